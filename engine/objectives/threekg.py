"""3KG: views of the heart turned in space agree with all views of the same patient.

    loss of a row i and a positive p: log(exp s_ip + sum_{j of other patients} exp s_ij) - s_ip, averaged over all pairs (i, p)

A patient's other positives are not in the denominator, unlike in the authors' CMSC.
Source: paper, section "Experiments" (baselines); Gopal et al. 2021; fairseq-signals criterions/3kg_criterion.py:50-105.
Shapes: engine.model.config.
"""

import torch
from torch import Tensor

from engine.objectives.gather import gather_constant, world_size
from engine.objectives.ntxent import similarities


def threekg_loss(
    g_BSD: Tensor, ids_B: Tensor, temperature: float, gathered: bool, detach_norm: bool = False
) -> tuple[Tensor, Tensor]:
    """Loss and share of rows whose nearest candidate is the same patient's."""
    ids_A = ids_B.repeat_interleave(g_BSD.shape[1])
    s_AC, own_A = similarities(g_BSD.flatten(0, 1), temperature, gathered, detach_norm)
    ids_C = gather_constant(ids_A) if gathered else ids_A
    alike_AC = ids_A[:, None] == ids_C
    positive_AC = alike_AC & (own_A[:, None] != torch.arange(len(ids_C), device=own_A.device))
    nearest_A1 = s_AC.detach().argmax(1, keepdim=True)
    others_A1 = s_AC.masked_fill(alike_AC, -torch.inf).logsumexp(1, keepdim=True)
    s_AC = s_AC.masked_fill(~positive_AC, 0.0)  # before the logarithm: an infinite entry would make its gradient NaN
    loss_AC = torch.where(positive_AC, torch.logaddexp(s_AC, others_A1) - s_AC, 0.0)
    pairs = (ids_C[:, None] == ids_C).sum() - len(ids_C)  # of all ranks: one with more pairs weighs more
    ranks = world_size() if gathered else 1
    return loss_AC.sum() * ranks / pairs.clamp(min=1), positive_AC.gather(1, nearest_A1).float().mean()
