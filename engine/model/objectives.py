"""The losses of the local objective and of the global objectives that are functions of the encoder's
outputs. Tensor suffixes are explained in engine.model.config.

The local objective: find the quantised features of a masked token among those of other masked
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
(diversity, feature penalty).

Global objectives: representations of two views of the same heart should agree, those of
different hearts should not.

    s_ij = cos(g_i, g_j) / temperature;  loss_i = log sum_{j != i} exp s_ij - s_ip;  p is the other view of the same crop

| | views | candidates |
|---|---|---|
| CMSC (`nt_xent`) | the two 5 s halves of a crop | all halves of the global batch, gathered from all ranks |
| SimCLR (`nt_xent`) | two augmented views of the same 5 s | the same |
| CMSC as the authors compute it | first against second halves, in both directions | the local micro-batch |
| 3KG | rotated views, and all views of the same patient | views of other patients, gathered from all ranks |

Source: paper, section "Pre-training", CMSC and L_global, and "Experiments" (baselines); Kiyasseh et
al. 2021 (CLOCS), Chen et al. 2020 (SimCLR), Gopal et al. 2021 (3KG); fairseq-signals
criterions/{cmsc,simclr,3kg}_criterion.py, where SimCLR's loss is a sum that the trainer divides by
the number of rows.

Tensors of all ranks are gathered and summed with exact gradients: the mean of the ranks' losses is
the loss of the global batch, and its gradient is that loss's gradient, as the engine divides the
summed gradients of the weights by the number of ranks. Every rank must have the same number of
rows. Without a process group the gathers return their input.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
import torch.nn.functional as F
from torch import Tensor

# torch.compile cannot trace these two collectives. Without `disable`, it would run every function that
# calls one of them in eager mode.
_all_gather = torch.compiler.disable(functional.all_gather)
_all_reduce = torch.compiler.disable(functional.all_reduce)
_without_other_ranks = False


@contextmanager
def without_other_ranks() -> Iterator[None]:
    """Return a context in which world_size() is 1, so that each rank computes as if there were no other
    ranks."""
    global _without_other_ranks
    before, _without_other_ranks = _without_other_ranks, True
    try:
        yield
    finally:
        _without_other_ranks = before


def world_size() -> int:
    """Return the number of ranks; 1 without a process group or inside without_other_ranks()."""
    return (
        dist.get_world_size()
        if not _without_other_ranks and dist.is_available() and dist.is_initialized()
        else 1
    )


def all_gather(x: Tensor) -> Tensor:
    """Concatenate the tensors [A, ...] of all W ranks to [W * A, ...], in the order of ranks, with a
    gradient."""
    return torch.cat(_all_gather(x.contiguous())) if world_size() > 1 else x


def all_gather_no_grad(x: Tensor) -> Tensor:
    """Concatenate the tensors [A, ...] of all W ranks to [W * A, ...], in the order of ranks, without a
    gradient."""
    if world_size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 0)


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of the tensors of all ranks, with a gradient."""
    total: Tensor = _all_reduce(x) if world_size() > 1 else x
    return total


def unit_vectors(g: Tensor, detach: bool = False) -> Tensor:
    """Return g / |g| in float32. With `detach`, no gradient flows through the norm |g|, as in
    fairseq-signals' criterions/cmsc_criterion.py:45."""
    g = g.float()
    return (
        g / g.detach().norm(dim=-1, keepdim=True).clamp(min=1e-8)
        if detach
        else F.normalize(g, dim=-1, eps=1e-8)
    )


def similarities_and_own_columns(
    g_AD: Tensor, temperature: float, gathered: bool, detach_norm: bool
) -> tuple[Tensor, Tensor]:
    """Return (the similarities [A, C] of this rank's rows and all candidates, -inf between a row and itself;
    the column [A] in which each of these rows is itself the candidate)."""
    gathered = gathered and world_size() > 1
    with torch.autocast(g_AD.device.type, enabled=False):
        g_AD = unit_vectors(g_AD, detach_norm)
        all_CD = all_gather(g_AD) if gathered else g_AD
        s_AC = g_AD @ all_CD.t() / temperature
    own_A = torch.arange(len(g_AD), device=g_AD.device) + (
        dist.get_rank() * len(g_AD) if gathered else 0
    )
    itself_AC = own_A[:, None] == torch.arange(len(all_CD), device=g_AD.device)
    return s_AC.masked_fill(itself_AC, -torch.inf), own_A


def nt_xent(
    g_BSD: Tensor, temperature: float, gathered: bool, detach_norm: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (the NT-Xent loss, the share of rows whose nearest candidate is the other view of their
    crop)."""
    views = g_BSD.shape[1]
    if views != 2:
        raise ValueError(f"this objective needs two views or halves of each crop, not {views}")
    s_AC, own_A = similarities_and_own_columns(
        g_BSD.flatten(0, 1), temperature, gathered, detach_norm
    )
    # Rows 2b and 2b + 1 are the two views of crop b, also among the candidates, because every rank has
    # an even number of rows. XOR with 1 gives the index of the other view
    other_A = own_A ^ 1
    return F.cross_entropy(s_AC, other_A), (s_AC.argmax(1) == other_A).float().mean()


def authors_cmsc_loss(g_BSD: Tensor, ids_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (CMSC's loss, accuracy) as fairseq-signals computes them. The loss is -log softmax over rows and
    over columns, averaged over all pairs of crops with the same id. The accuracy is the share of first
    halves whose nearest second half has the same id."""
    with torch.autocast(g_BSD.device.type, enabled=False):
        first_BD, second_BD = unit_vectors(g_BSD, detach=True).unbind(1)
        s_BB = first_BD @ second_BD.t() / temperature
    positive_BB = (ids_B[:, None] == ids_B).float()
    log_share_BB = s_BB.log_softmax(1) + s_BB.log_softmax(0)
    loss = -(log_share_BB * positive_BB).sum() / (2 * positive_BB.sum())
    return loss, positive_BB.gather(1, s_BB.argmax(1, keepdim=True)).mean()


def threekg_loss(
    g_BSD: Tensor, ids_B: Tensor, temperature: float, gathered: bool, detach_norm: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (3KG's loss, the share of rows whose nearest candidate is of the same patient).

    The loss is averaged over all pairs of a row i and a positive p: log(exp s_ip + sum_{j of
    other patients} exp s_ij) - s_ip. Unlike in the authors' CMSC, the patient's other positives
    are not in the denominator."""
    ids_A = ids_B.repeat_interleave(g_BSD.shape[1])
    s_AC, own_A = similarities_and_own_columns(
        g_BSD.flatten(0, 1), temperature, gathered, detach_norm
    )
    ids_C = all_gather_no_grad(ids_A) if gathered else ids_A
    alike_AC = ids_A[:, None] == ids_C
    positive_AC = alike_AC & (own_A[:, None] != torch.arange(len(ids_C), device=own_A.device))
    nearest_A1 = s_AC.detach().argmax(1, keepdim=True)
    others_A1 = s_AC.masked_fill(alike_AC, -torch.inf).logsumexp(1, keepdim=True)
    # entries that do not count are replaced before logaddexp, where an infinite one would give a NaN
    # gradient
    s_AC = s_AC.masked_fill(~positive_AC, 0.0)
    loss_AC = torch.where(positive_AC, torch.logaddexp(s_AC, others_A1) - s_AC, 0.0)
    # the loss is a mean over the pairs of all ranks, so a rank with more pairs has more weight
    pairs = (ids_C[:, None] == ids_C).sum() - len(ids_C)
    ranks = world_size() if gathered else 1
    return loss_AC.sum() * ranks / pairs.clamp(min=1), positive_AC.gather(
        1, nearest_A1
    ).float().mean()


def local_loss(
    context_RMP: Tensor,
    target_RMP: Tensor,
    times_RMM: Tensor,
    valid_RM: Tensor,
    codes_RMG: Tensor | None = None,
    temperature: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """Return (the loss of the local objective, its accuracy), in float32. The accuracy is the share of masked
    tokens whose target is nearest (_target_is_nearest), averaged over rows."""
    with torch.autocast(context_RMP.device.type, enabled=False):
        context_RMP = unit_vectors(context_RMP)
        target_RMP = unit_vectors(target_RMP)
        s_RMM = torch.bmm(context_RMP, target_RMP.transpose(1, 2))
        s_RMM = s_RMM / temperature
    s_RM = s_RMM.diagonal(dim1=1, dim2=2)
    own_MM = torch.eye(s_RMM.shape[-1], dtype=torch.bool, device=s_RMM.device)
    same_RMM = own_MM
    if codes_RMG is not None:
        same_RMM = (codes_RMG[:, :, None] == codes_RMG[:, None]).all(-1)
    counted_RMM = times_RMM.masked_fill(same_RMM, 0.0)
    counted_RMM = torch.where(own_MM, 1.0, counted_RMM)
    loss_RM = (s_RMM + counted_RMM.log()).logsumexp(-1) - s_RM
    loss = mean_over_rows(loss_RM, valid_RM)
    hits_RM = _target_is_nearest(s_RMM.detach(), s_RM.detach(), times_RMM > 0, same_RMM)
    return loss, mean_over_rows(hits_RM.float(), valid_RM)


def _target_is_nearest(s_RMM: Tensor, s_RM: Tensor, drawn_RMM: Tensor, same_RMM: Tensor) -> Tensor:
    """Return bool [R, M]: True if the target of a masked token is its nearest candidate. As in
    fairseq-signals (wav2vec2_criterion.py:300-310), this means that no drawn negative is nearer, and at
    least one is farther."""
    candidate_RMM = s_RMM.masked_fill(same_RMM, -torch.inf)
    nearest_RM = torch.where(drawn_RMM, candidate_RMM, -torch.inf).amax(-1)
    farthest_RM = torch.where(drawn_RMM, candidate_RMM, torch.inf).amin(-1)
    return (s_RM >= nearest_RM) & (s_RM > farthest_RM)


def attribute_losses(logits_R2: Tensor, y_R2: Tensor) -> Tensor:
    """Return the losses [2] of age and of sex. Each is the mean over the rows of all ranks for which the
    value is known, or 0 if it is known for none."""
    known_R2 = y_R2.isfinite()
    y_R2 = torch.where(known_R2, y_R2, 0.0)
    age_R = F.smooth_l1_loss(logits_R2[:, 0], y_R2[:, 0], reduction="none")
    sex_R = F.binary_cross_entropy_with_logits(logits_R2[:, 1], y_R2[:, 1], reduction="none")
    loss_R2 = torch.where(known_R2, torch.stack([age_R, sex_R], 1), 0.0)
    counts_2 = sum_over_ranks(known_R2.float().sum(0)).clamp(min=1)
    return loss_R2.sum(0) * world_size() / counts_2


def mean_over_rows(x_RM: Tensor, valid_RM: Tensor) -> Tensor:
    """Return the mean over rows of the mean over the valid entries of each row."""
    count_R1 = valid_RM.sum(1, keepdim=True).clamp(min=1)
    weight_RM = valid_RM / count_R1
    x_RM = torch.where(valid_RM, x_RM, 0.0)
    return (x_RM * weight_RM).sum(1).mean()


def diversity_loss_and_perplexities(
    share_GV: Tensor, used_GV: Tensor, tokens: Tensor, gathered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the diversity loss; the perplexity of the codes' probabilities; the perplexity of the most
    probable codes). The loss is the share of codes not in use, 1 - (the first perplexity) / (G V).

    share_GV is the probability of each code, summed over tokens; used_GV is for how many tokens each code
    was the most probable one."""
    if gathered:
        shares_and_counts = torch.stack([share_GV, used_GV])
        summed = sum_over_ranks(torch.cat([shares_and_counts.flatten(), tokens[None]]))
        share_GV, used_GV = summed[:-1].view_as(shares_and_counts)
        tokens = summed[-1]
    tokens = tokens.clamp(min=1)
    in_use = perplexity(share_GV / tokens)
    unused = 1 - in_use / share_GV.numel()
    return unused, in_use.detach(), perplexity(used_GV / tokens)


def perplexity(share_GV: Tensor) -> Tensor:
    """Return the effective number of codes in use, from G to G * V: the sum over codebooks of exp(entropy)."""
    log_GV = (share_GV + 1e-7).log()
    entropy_G = -(share_GV * log_GV).sum(-1)
    return entropy_G.exp().sum()
