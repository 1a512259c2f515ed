"""Local contrast: tell the quantised features of a masked token from those of other masked tokens of the same 5 s.

    s_ij = cos(context_i, target_j) / temperature          the Gram matrix of a segment, [M, M]
    loss_i = log(exp s_ii + sum_j n_ij exp s_ij) - s_ii    n_ij: how often j was drawn as a negative for i, K times in all

The authors gather K targets for each i, [K, R, M, P] numbers, and take as many cosines; but these are entries of s, some of
them many times, and the same loss and gradient follow from s and the counts. Negatives made of the same codes as the positive
do not count. A row's loss is the mean over its masked tokens, the batch's the mean over rows: where all rows have equally
many, as the authors', this is their mean over tokens; where they differ, each segment weighs alike in whichever micro-batch
it is.

Source: paper, section "Pre-training", L_local; fairseq-signals models/wav2vec2/wav2vec2.py:157-231 (100 negatives, cosine /
0.1, identical ones to -inf), criterions/wav2vec2_criterion.py:254-282 (diversity, feature penalty). Shapes:
engine.model.config.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.quantizer import Quantized, perplexity
from engine.objectives.gather import total


def local_loss(
    context_RMP: Tensor,
    target_RMP: Tensor,
    times_RMM: Tensor,
    valid_RM: Tensor,
    codes_RMG: Tensor | None = None,
    temperature: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """Loss, and the share of tokens whose target is the nearest of its candidates. Always in float32."""
    with torch.autocast(context_RMP.device.type, enabled=False):
        context_RMP = F.normalize(context_RMP.float(), dim=-1, eps=1e-8)
        target_RMP = F.normalize(target_RMP.float(), dim=-1, eps=1e-8)
        s_RMM = torch.bmm(context_RMP, target_RMP.transpose(1, 2)) / temperature
    own_MM = torch.eye(s_RMM.shape[-1], dtype=torch.bool, device=s_RMM.device)
    same_RMM = own_MM if codes_RMG is None else (codes_RMG[:, :, None] == codes_RMG[:, None]).all(-1)
    counted_RMM = torch.where(own_MM, 1.0, times_RMM.masked_fill(same_RMM, 0.0))
    s_RM = s_RMM.diagonal(dim1=1, dim2=2)
    loss_RM = (s_RMM + counted_RMM.log()).logsumexp(-1) - s_RM
    hits_RM = _hits(s_RMM.detach(), s_RM.detach(), times_RMM > 0, same_RMM)
    return mean_over_rows(loss_RM, valid_RM), mean_over_rows(hits_RM.float(), valid_RM)


def _hits(s_RMM: Tensor, s_RM: Tensor, drawn_RMM: Tensor, same_RMM: Tensor) -> Tensor:
    """As the authors count: no candidate is nearer, and they are not all equally near (wav2vec2_criterion.py:300-310)."""
    infinite = torch.inf
    nearest_RM = torch.where(drawn_RMM & ~same_RMM, s_RMM, -infinite).amax(-1)
    farthest_RM = torch.where(drawn_RMM, s_RMM.masked_fill(same_RMM, -infinite), infinite).amin(-1)
    return (s_RM >= nearest_RM) & (s_RM > farthest_RM)


def mean_over_rows(x_RM: Tensor, valid_RM: Tensor) -> Tensor:
    weight_RM = valid_RM / valid_RM.sum(1, keepdim=True).clamp(min=1)
    return torch.where(valid_RM, x_RM, 0.0).mul(weight_RM).sum(1).mean()


def diversity(q: Quantized, gathered: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Share of the codes that are out of use: (G V - perplexity) / G V; then the perplexities of probabilities and of codes."""
    share_GV, hard_GV, count = q.share_GV, q.hard_GV, q.tokens
    if gathered:
        size = share_GV.numel()
        summed = total(torch.cat([share_GV.flatten(), hard_GV.flatten(), count[None]]))
        share_GV, hard_GV = summed[:size].view_as(share_GV), summed[size:-1].view_as(hard_GV)
        count = summed[-1]
    count = count.clamp(min=1)
    in_use = perplexity(share_GV / count)
    return 1 - in_use / share_GV.numel(), in_use.detach(), perplexity(hard_GV / count)
