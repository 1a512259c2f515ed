"""All random draws of a training step except dropout: masked tokens, negatives and the quantiser's
noise.

    keys = row_keys(seed, epoch_B, crop_B, halves=2)          numpy, on the host: one 64-bit key for each half of each crop
    draws = draw_for_step(config, keys_R, tokens, negatives)           torch, on any device: a pure function of the keys

All draws are counter-based: the draws for a crop in an epoch are the same on any rank, at any batch size
and after any restart, and integers are the same on every device. No shape depends on a draw, so
nothing waits for the device: the masked tokens of a row fill the first of M slots, where M is the largest
possible number, and valid_RM is True for the slots in use. A step makes its draws from keys, or is given
them (in the parity check and in tests).

    mask_RN    bool    masked tokens
    slot_RM    int64   index of the token in each slot, ascending; 0 in unused slots
    valid_RM   bool    slots in use
    times_RMM  float32 how often slot j was drawn as a negative for slot i; K draws for each i, uniform among the other slots
    noise_RMGV float32 standard Gumbel; None if codes are not sampled

Source: paper, section "Experiments" (spans of 10; each token starts one with p = 0.065:
`mask_starts: bernoulli`, where a span may run past the last token and a row may have no masked
token); fairseq-signals data/data_utils.py:18-142 (share * tokens / span spans, rounded at random,
starts without replacement, overlapping; `mask_trim`: every row is trimmed at random to the smallest
count in the batch), models/wav2vec2/wav2vec2.py:157-213 (negatives). The authors round once for all
rows of a batch; here each row is rounded separately. Shapes: engine.model.config.
"""

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from omnilead.data_tools.io.splitmix import GOLDEN_GAMMA, M1, M2

from ..settings.counter import Counter, bits
from .config import ModelConfig, max_masked, max_spans


class ModelStream(IntEnum):
    """Purposes of random numbers in a model, in addition to engine.settings.counter.RandomStream. Saved runs
    depend on the values, so add new ones and never change a number."""

    ROW = 100
    SPANS = 101
    STARTS = 102
    TRIM = 103
    NEGATIVES = 104
    GUMBEL = 105
    OWN = 106
    CANDIDATES = 107
    BLOCKS = 108


class Draws(NamedTuple):
    mask_RN: Tensor
    slot_RM: Tensor
    valid_RM: Tensor
    times_RMM: Tensor
    noise_RMGV: Tensor | None


def row_keys(seed: int, epoch: Counter, crop: Counter, halves: int = 2) -> np.ndarray:
    """Return a random key for each half of each crop in an epoch, int64 [B, S]. `epoch` and `crop` are
    integers or arrays [B]."""
    epoch_B1 = np.atleast_1d(epoch)[:, None]
    crop_B1 = np.atleast_1d(crop)[:, None]
    half_S = np.arange(halves)
    keys_BS = bits(seed, ModelStream.ROW, epoch_B1, crop_B1, half_S)
    return keys_BS.view(np.int64)


def draw_for_step(
    config: ModelConfig, keys_R: Tensor, tokens: int, negatives: int, sample_codes: bool = True
) -> Draws:
    """Return all draws of a step for the rows with these keys. Without `sample_codes`, as in evaluation,
    there is no Gumbel noise."""
    count = max_masked(config, tokens)
    mask_RN = draw_mask(config, keys_R, tokens)
    slot_RM, valid_RM = masked_slots(mask_RN, count)
    times_RMM = draw_negatives(keys_R, valid_RM, negatives)
    noise_RMGV = None
    if sample_codes:
        noise_RMGV = draw_gumbel(keys_R, (count, config.codebooks, config.codes))
    return Draws(mask_RN, slot_RM, valid_RM, times_RMM, noise_RMGV)


def draw_mask(config: ModelConfig, keys_R: Tensor, tokens: int) -> Tensor:
    """Return mask_RN, True for the tokens in the drawn spans, which may overlap. With mask_trim, some of these
    tokens are unmasked again (trim_to_fewest_masked)."""
    starts = draw_bernoulli_starts if config.mask_starts == "bernoulli" else draw_fixed_count_starts
    started_RN = starts(config, keys_R, tokens).cumsum(1)
    ended_RN = F.pad(started_RN, (config.mask_span, 0))[:, :tokens]
    mask_RN = started_RN > ended_RN
    if config.mask_trim:
        return trim_to_fewest_masked(mask_RN, keys_R)
    return mask_RN


def draw_bernoulli_starts(config: ModelConfig, keys_R: Tensor, tokens: int) -> Tensor:
    """Draw where spans start, [R, N] of 0 and 1: at each token with the probability mask_share /
    mask_span, independently."""
    random_RN = random_integers(keys_R, ModelStream.STARTS, tokens) & 0xFFFFFF
    probability = config.mask_share / config.mask_span
    return (random_RN < probability * 2**24).long()


def draw_fixed_count_starts(config: ModelConfig, keys_R: Tensor, tokens: int) -> Tensor:
    """Draw where spans start, [R, N] of 0 and 1: mask_share * N / mask_span starts in a row, rounded up or
    down at random and at least 2, without replacement. They are the first in a random order of the tokens."""
    limit = max_spans(config, tokens)
    random_R = random_hash(keys_R, ModelStream.SPANS) & 0xFFFFFF
    rounding_R = random_R.float() * 2.0**-24  # in [0, 1)
    spans_R = config.mask_share * tokens / config.mask_span + rounding_R
    spans_R = spans_R.floor().clamp(2, limit).long()
    order_RN = random_integers(keys_R, ModelStream.STARTS, tokens - config.mask_span)
    first_RS = order_RN.topk(limit, dim=1, largest=False).indices
    drawn_RS = torch.arange(limit, device=keys_R.device) < spans_R[:, None]
    starts_RN = keys_R.new_zeros(len(keys_R), tokens)
    return starts_RN.scatter_(1, first_RS, drawn_RS.long())


def trim_to_fewest_masked(mask_RN: Tensor, keys_R: Tensor) -> Tensor:
    """Unmask tokens at random until each row has as many masked tokens as the row with the fewest."""
    fewest = mask_RN.sum(1).amin()
    order_RN = random_integers(keys_R, ModelStream.TRIM, mask_RN.shape[1])
    order_RN = torch.where(mask_RN, order_RN, torch.iinfo(torch.int64).max)
    rank_RN = order_RN.argsort(1).argsort(1)
    return rank_RN < fewest


def masked_slots(mask_RN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return (slot_RM: the indices of the masked tokens of each row, ascending, then zeros up to `count`;
    valid_RM: True for the slots in use). Masked tokens beyond `count` are dropped."""
    rows, tokens = mask_RN.shape
    device = mask_RN.device
    # tokens that are not masked, or do not fit, go to an extra last column, which is then cut off
    place_RN = torch.where(mask_RN, mask_RN.cumsum(1) - 1, count)
    place_RN = place_RN.clamp(max=count)
    token_RN = torch.arange(tokens, device=device).expand(rows, tokens)
    slot_RM = torch.zeros(rows, count + 1, dtype=torch.int64, device=device)
    slot_RM = slot_RM.scatter_(1, place_RN, token_RN)
    slot_RM = slot_RM[:, :count]
    valid_RM = torch.arange(count, device=device) < mask_RN.sum(1, keepdim=True)
    return slot_RM * valid_RM, valid_RM


def draw_negatives(keys_R: Tensor, valid_RM: Tensor, negatives: int) -> Tensor:
    """Draw `negatives` negatives for each slot, with replacement, among the other slots of the row that are
    in use. Return times_RMM: how often slot j was drawn for slot i."""
    count = valid_RM.shape[1]
    others_R = (valid_RM.sum(1) - 1).clamp(min=1)
    random_RX = random_integers(keys_R, ModelStream.NEGATIVES, count * negatives) & 0x7FFFFFFF
    other_RX = (random_RX * others_R[:, None]) >> 31
    other_RMK = other_RX.unflatten(1, (count, negatives))
    own_M1 = torch.arange(count, device=keys_R.device)[:, None]
    other_RMK = other_RMK + (other_RMK >= own_M1)
    times_RMM = count_draws(other_RMK.clamp(max=count - 1), count)
    # slots that are not in use are no negatives, so a row with only one masked token has none
    return times_RMM.mul_(valid_RM[:, None])


def count_draws(other_RMK: Tensor, count: int) -> Tensor:
    """Return times_RMM: for each slot, how often each of `count` slots is among the K slots drawn for it.
    scatter_add sums in any order, which does not matter, because sums of ones are exact."""
    device = other_RMK.device
    times_RMM = torch.zeros(*other_RMK.shape[:2], count, device=device)
    ones_RMK = torch.ones((), device=device).expand(other_RMK.shape)
    return times_RMM.scatter_add_(2, other_RMK, ones_RMK)


def draw_gumbel(keys_R: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return Gumbel noise -log(-log u) of shape [R, *shape]. u in (0, 1) has 23 random bits, so that it is
    exact in float32 and neither 0 nor 1. Each 64-bit hash gives two numbers u."""
    count = math.prod(shape)
    random = random_integers(keys_R, ModelStream.GUMBEL, (count + 1) // 2)
    low, high = random & 0x7FFFFF, random >> 32 & 0x7FFFFF
    u = torch.cat([low, high], 1)[:, :count]
    u = u.float().add_(0.5).mul_(2.0**-23)
    gumbel = u.log_().neg_().log_().neg_()
    return gumbel.view(-1, *shape)


def random_integers(keys_R: Tensor, stream: ModelStream, count: int) -> Tensor:
    """Return random int64 [R, count], the same for the same keys and stream."""
    counter = torch.arange(count, device=keys_R.device)
    return random_hash(keys_R[:, None], stream, counter)


def uniform(keys_R: Tensor, count: int) -> Tensor:
    """Return random numbers in [0, 1), [R, count], for objectives of users; no other draws use them."""
    return (random_integers(keys_R, ModelStream.OWN, count) & 0xFFFFFF).float() * 2.0**-24


def random_hash(keys: Tensor, stream: ModelStream, counter: Tensor | int = 0) -> Tensor:
    """Return random int64: output number `counter` of a SplitMix64 generator whose start is made from a key
    and a stream.

    The step and the finaliser are those of engine.settings.counter. int64 wraps like uint64, and shifts
    become logical by clearing the copied sign bits. The counter is added before the multiplication by
    _STEP, and the start is divided by _STEP for that, because torch's compiler takes counter * _STEP for
    a memory address beyond 64 bits, and fails.
    """
    purpose = int(stream) * _STEP & (2**63 - 1)
    start = _mix(keys ^ purpose) * _STEP_INVERSE
    return _mix((start + counter) * _STEP)


_STEP = GOLDEN_GAMMA - 2**64  # SplitMix64's step as a signed number
_STEP_INVERSE = pow(_STEP, -1, 2**64) - 2**64  # _STEP * _STEP_INVERSE is 1 modulo 2**64
_M1, _M2 = M1 - 2**64, M2 - 2**64


def _mix(x: Tensor) -> Tensor:
    """Return x with its bits mixed by the finaliser of SplitMix64."""
    x = _shift_right(x, 30).bitwise_xor_(x).mul_(_M1)
    x = _shift_right(x, 27).bitwise_xor_(x).mul_(_M2)
    return _shift_right(x, 31).bitwise_xor_(x)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Shift int64 to the right as if it were uint64."""
    return (x >> by).bitwise_and_(2 ** (64 - by) - 1)
