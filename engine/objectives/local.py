"""The local objective: find the quantised features of a masked token among those of other masked
tokens of the same 5 s.

    s_ij = cos(context_i, target_j) / temperature          the Gram matrix of a segment, [M, M]
    loss_i = log(exp s_ii + sum_j n_ij exp s_ij) - s_ii    n_ij: how often j was drawn as a negative for i; sum_j n_ij = K

The authors gather K targets for each i, [K, R, M, P] numbers, and compute a cosine for each. These
are entries of s, some of them repeated, so s and the counts give the same loss and gradient.
Negatives with the same codes as the positive do not count. The loss of a row is the mean over its
masked tokens, and the loss of a batch the mean over rows. If all rows have the same number of
tokens, as in the authors' code, this equals their mean over tokens; if not, every segment has the
same weight.

Source: paper, section "Pre-training", L_local; fairseq-signals models/wav2vec2/wav2vec2.py:157-231
(100 negatives, cosine / 0.1, identical ones to -inf), criterions/wav2vec2_criterion.py:254-282
(diversity, feature penalty). Shapes: engine.model.config.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from omnilead.engine.objectives.contrastive import sum_over_ranks


def local_loss(
    context_RMP: Tensor,
    target_RMP: Tensor,
    times_RMM: Tensor,
    valid_RM: Tensor,
    codes_RMG: Tensor | None = None,
    temperature: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """Loss, and the share of tokens whose target is nearer than all negatives. Always computed in
    float32."""
    with torch.autocast(context_RMP.device.type, enabled=False):
        context_RMP = F.normalize(context_RMP.float(), dim=-1, eps=1e-8)
        target_RMP = F.normalize(target_RMP.float(), dim=-1, eps=1e-8)
        s_RMM = torch.bmm(context_RMP, target_RMP.transpose(1, 2)) / temperature
    own_MM = torch.eye(s_RMM.shape[-1], dtype=torch.bool, device=s_RMM.device)
    same_RMM = own_MM
    if codes_RMG is not None:
        same_RMM = (codes_RMG[:, :, None] == codes_RMG[:, None]).all(-1)
    counted_RMM = torch.where(own_MM, 1.0, times_RMM.masked_fill(same_RMM, 0.0))
    s_RM = s_RMM.diagonal(dim1=1, dim2=2)
    loss_RM = (s_RMM + counted_RMM.log()).logsumexp(-1) - s_RM
    hits_RM = _hits(s_RMM.detach(), s_RM.detach(), times_RMM > 0, same_RMM)
    return mean_over_rows(loss_RM, valid_RM), mean_over_rows(hits_RM.float(), valid_RM)


def _hits(s_RMM: Tensor, s_RM: Tensor, drawn_RMM: Tensor, same_RMM: Tensor) -> Tensor:
    """The authors' definition: no candidate is nearer, and not all are equally near
    (wav2vec2_criterion.py:300-310)."""
    candidate_RMM = s_RMM.masked_fill(same_RMM, -torch.inf)
    nearest_RM = torch.where(drawn_RMM, candidate_RMM, -torch.inf).amax(-1)
    farthest_RM = torch.where(drawn_RMM, candidate_RMM, torch.inf).amin(-1)
    return (s_RM >= nearest_RM) & (s_RM > farthest_RM)


def mean_over_rows(x_RM: Tensor, valid_RM: Tensor) -> Tensor:
    weight_RM = valid_RM / valid_RM.sum(1, keepdim=True).clamp(min=1)
    x_RM = torch.where(valid_RM, x_RM, 0.0)
    return (x_RM * weight_RM).sum(1).mean()


def diversity(
    share_GV: Tensor, used_GV: Tensor, tokens: Tensor, gathered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Share of unused codes, (G V - perplexity) / G V; then the perplexities of the probabilities
    and of the chosen codes.

    share_GV: probability of each code, summed over tokens; used_GV: how often each code was
    chosen."""
    if gathered:
        mine = torch.cat([share_GV.flatten(), used_GV.flatten(), tokens[None]])
        share, used, tokens_1 = sum_over_ranks(mine).split([share_GV.numel()] * 2 + [1])
        share_GV = share.view_as(share_GV)
        used_GV = used.view_as(used_GV)
        tokens = tokens_1[0]
    tokens = tokens.clamp(min=1)
    in_use = perplexity(share_GV / tokens)
    return 1 - in_use / share_GV.numel(), in_use.detach(), perplexity(used_GV / tokens)


def perplexity(share_GV: Tensor) -> Tensor:
    """How many codes are in use: the sum over codebooks of exp(entropy), from G to G * V."""
    entropy_G = -(share_GV * (share_GV + 1e-7).log()).sum(-1)
    return entropy_G.exp().sum()
