"""Normalised, temperature-scaled cross entropy between the rows of a batch (NT-Xent), the core of every global objective.

    s_ij = cos(g_i, g_j) / temperature;  loss_i = log sum_{j != i} exp s_ij - s_ip,  p the other view of the same crop

Rows are a rank's own, candidates those of all ranks. Source: paper, section "Pre-training", L_global; Chen et al. 2020
(SimCLR).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.objectives.gather import gather, rank


def unit(g: Tensor, detach: bool = False) -> Tensor:
    """g / |g| in float32. `detach`: no gradient through the norm (authors: criterions/cmsc_criterion.py:45)."""
    g = g.float()
    return g / g.detach().norm(dim=-1, keepdim=True).clamp(min=1e-8) if detach else F.normalize(g, dim=-1, eps=1e-8)


def similarities(g_AD: Tensor, temperature: float, gathered: bool, detach_norm: bool) -> tuple[Tensor, Tensor]:
    """s [A, C] of own rows and all candidates, -inf where a row meets itself; and the column of each row."""
    with torch.autocast(g_AD.device.type, enabled=False):
        g_AD = unit(g_AD, detach_norm)
        all_CD = gather(g_AD) if gathered else g_AD
        s_AC = g_AD @ all_CD.t() / temperature
    own_A = torch.arange(len(g_AD), device=g_AD.device) + (rank() * len(g_AD) if gathered else 0)
    itself_AC = own_A[:, None] == torch.arange(len(all_CD), device=g_AD.device)
    return s_AC.masked_fill(itself_AC, -torch.inf), own_A


def nt_xent(g_BSD: Tensor, temperature: float, gathered: bool, detach_norm: bool = False) -> tuple[Tensor, Tensor]:
    """Loss and share of rows whose other view is the nearest candidate, for two views of each crop."""
    views = g_BSD.shape[1]
    if views != 2:
        raise ValueError(f"this objective needs two views or halves of each crop, not {views}")
    s_AC, own_A = similarities(g_BSD.flatten(0, 1), temperature, gathered, detach_norm)
    other_A = own_A ^ 1  # rows 2 b and 2 b + 1 are the views of crop b, and every rank has an even number of rows
    return F.cross_entropy(s_AC, other_A), (s_AC.argmax(1) == other_A).float().mean()
