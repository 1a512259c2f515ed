"""Global contrast of adjacent halves (CMSC): the two 5 s halves of a crop agree, those of other crops do not.

    paper      each half against the 2 N - 1 others of the whole global batch, gathered from all ranks
    authors    first halves against second halves of the local micro-batch alone, in both directions; no gradient through the
               norm; every pair of crops with the same id is positive

Source: paper, section "Pre-training", CMSC and L_global; Kiyasseh et al. 2021 (CLOCS); fairseq-signals
criterions/cmsc_criterion.py:40-85, models/wav2vec2/wav2vec2_cmsc.py:28-37 (pooling). Shapes: engine.model.config.
"""

import torch
from torch import Tensor

from engine.objectives.ntxent import nt_xent, unit


def cmsc_loss(g_BSD: Tensor, temperature: float, gathered: bool, detach_norm: bool = False) -> tuple[Tensor, Tensor]:
    return nt_xent(g_BSD, temperature, gathered, detach_norm)


def authors_cmsc_loss(g_BSD: Tensor, ids_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Mean over positive pairs of -log softmax along the rows and along the columns, half each."""
    with torch.autocast(g_BSD.device.type, enabled=False):
        first_BD, second_BD = unit(g_BSD, detach=True).unbind(1)
        s_BB = first_BD @ second_BD.t() / temperature
    positive_BB = (ids_B[:, None] == ids_B).float()
    log_share_BB = s_BB.log_softmax(1) + s_BB.log_softmax(0)
    loss = -(log_share_BB * positive_BB).sum() / (2 * positive_BB.sum())
    hits_B = positive_BB.gather(1, s_BB.argmax(1, keepdim=True)).mean()
    return loss, hits_B
