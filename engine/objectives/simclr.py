"""SimCLR: two augmented views of the same 5 s agree, all other views of the global batch do not.

Source: paper, section "Experiments" (baselines); Chen et al. 2020; fairseq-signals criterions/simclr_criterion.py (adjacent
rows are views; no gradient through the norm; a sum, which the trainer divides by the number of rows). Shapes:
engine.model.config.
"""

from torch import Tensor

from engine.objectives.ntxent import nt_xent


def simclr_loss(g_BSD: Tensor, temperature: float, gathered: bool, detach_norm: bool = False) -> tuple[Tensor, Tensor]:
    return nt_xent(g_BSD, temperature, gathered, detach_norm)
