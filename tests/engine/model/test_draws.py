"""Draws depend only on their keys, have the authors' distributions, and shapes that do not depend
on a draw."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import SMALL
from torch.testing import assert_close

from omnilead.data_tools.io.splitmix import mix
from omnilead.engine.model.config import ModelConfig, masked_share
from omnilead.engine.model.draws import (
    ModelStream,
    _mix,
    draw_for_step,
    draw_gumbel,
    draw_mask,
    draw_negatives,
    masked_slots,
    random_hash,
    row_keys,
    uniform,
)
from omnilead.engine.settings.errors import ConfigError

CONFIG = ModelConfig()


def keys(rows, seed=3):
    return torch.from_numpy(row_keys(seed, 0, np.arange(rows // 2))).flatten()


def runs(mask):
    edges = np.flatnonzero(np.diff(np.r_[0, mask.int().numpy(), 0]))
    return (edges[1::2] - edges[::2]).tolist()


@pytest.mark.parametrize(
    ("how", "digest", "noise"),
    [
        ({}, "2626f3127b5816fc", -363.61973),
        ({"mask_trim": True}, "b0cd01b5216f8c18", -363.61973),
        ({"mask_starts": "bernoulli"}, "c24082b8979b33b8", 396.67395),
    ],
)
def test_draws_never_change(how, digest, noise):
    """A run that a later version resumes gets the same masks, negatives and noise."""
    *whole, noise_RMGV = draw_for_step(replace(CONFIG, **how), keys(8), 156, 100)
    content = b"".join(part.numpy().astype("<i4").tobytes() for part in whole)
    assert hashlib.sha256(content).hexdigest()[:16] == digest
    drawn = noise_RMGV.double().flatten()
    weighted = drawn @ torch.arange(len(drawn)).double().cos()
    assert float(weighted) == pytest.approx(noise, rel=1e-5)


def test_hashes_equal_those_of_the_counter():
    """The finaliser in int64 equals numpy's in uint64 bit for bit."""
    state = np.arange(2**63 - 8, 2**63 + 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = _mix(torch.from_numpy(state.view(np.int64).copy()))
    assert np.array_equal(mixed.numpy().view(np.uint64), mix(state.copy()))


@pytest.mark.gpu  # for a CPU, where nothing is compiled unless asked for, it would take 20 s
def test_compiled_hashes_are_the_same():
    """64-bit integers wrap in compiled code, too."""

    def draws(keys_R):
        return random_hash(
            keys_R[:, None], ModelStream.NEGATIVES, torch.arange(1000, device="cuda")
        )

    keys_R = keys(6).cuda()
    assert torch.equal(torch.compile(draws, fullgraph=True, dynamic=False)(keys_R), draws(keys_R))


def test_a_row_s_draws_do_not_depend_on_its_batch():
    config = replace(CONFIG, codes=8)
    whole, part = (
        draw_for_step(config, keys(16), 156, 100),
        draw_for_step(config, keys(16)[5:9], 156, 100),
    )
    assert_close([drawn[5:9] for drawn in whole], list(part), rtol=0, atol=0)
    again = row_keys(3, 0, np.array([2, 3]))
    assert np.array_equal(again.ravel(), keys(16)[4:8].numpy())
    for seed, epoch in ((3, 1), (4, 0)):
        assert not np.isin(row_keys(seed, epoch, np.arange(8)), keys(16).numpy()).any()


def test_masks_have_as_many_spans_as_the_authors():
    mask = draw_mask(CONFIG, keys(4000), 156)
    counts = mask.sum(1)
    assert not mask[:, -1].any()  # the last start is 145
    assert all(min(runs(row)) >= 10 for row in mask[:200])
    assert counts.min() >= 11 and counts.max() <= 110
    assert counts.float().mean() / 156 == pytest.approx(masked_share(CONFIG, 156), abs=0.004)
    share = mask.float().mean(0)
    assert share[20:130].std() < 0.012  # no token is preferred


def test_masks_as_described_in_the_paper():
    """Each token is independently a start with p = 0.065; it and the nine after it are masked."""
    config = replace(CONFIG, mask_starts="bernoulli")
    starts = draw_mask(replace(config, mask_share=0.065, mask_span=1), keys(4000), 156)
    mask = draw_mask(config, keys(4000), 156)
    direct = torch.stack([starts[:, max(0, n - 9) : n + 1].any(1) for n in range(156)], 1)
    assert torch.equal(mask, direct)
    assert (starts.double().mean(0) - 0.065).abs().max() < 5 * (0.065 * 0.935 / 4000) ** 0.5
    count = starts.sum(1).double()  # binomial
    assert count.mean() == pytest.approx(10.14, abs=0.25)
    assert count.var() == pytest.approx(9.48, abs=1)
    assert mask.double().mean() == pytest.approx(masked_share(config, 156), abs=0.004)
    # rows with one masked token, with none, with all
    few = draw_for_step(config, keys(400), 20, 7, sample_codes=False)
    slots_R = few.valid_RM.sum(1)
    assert {0, 1, 20} <= set(slots_R.tolist()) and torch.equal(slots_R, few.mask_RN.sum(1))


def test_trimmed_masks_are_as_large_as_the_smallest_and_lie_within_the_drawn():
    trimmed = draw_mask(replace(CONFIG, mask_trim=True), keys(128), 156)
    drawn = draw_mask(CONFIG, keys(128), 156)
    assert (trimmed.sum(1) == drawn.sum(1).min()).all()
    assert not (trimmed & ~drawn).any()
    lost = (drawn & ~trimmed).float().mean(0)[20:130]
    assert lost.min() > 0  # at random, not from one end


def test_slots_hold_the_masked_tokens_in_order():
    mask = draw_mask(CONFIG, keys(32), 156)
    slot, valid = masked_slots(mask, 110)
    assert slot.shape == valid.shape == (32, 110)
    for row in range(32):
        assert torch.equal(slot[row][valid[row]], mask[row].nonzero()[:, 0])
        assert (slot[row][~valid[row]] == 0).all()


def test_negatives_are_uniform_among_other_valid_slots():
    valid = torch.arange(12) < torch.tensor([[12], [5], [2]])
    times = draw_negatives(torch.arange(3), valid, 20_000)
    for row, used in enumerate((12, 5, 2)):
        expected = torch.zeros(used, 12)
        expected[:, :used] = (1 - torch.eye(used)) / (used - 1)
        inside = times[row, :used]
        assert (inside[expected == 0] == 0).all() and (inside.sum(1) == 20_000).all()
        assert (inside / 20_000 - expected).abs().max() < 0.02
        assert not times[row, :, used:].any()
    alone = draw_negatives(torch.arange(1), torch.arange(12)[None] < 1, 50)
    assert not alone[0, 0].any()  # the only masked token has none


def test_gumbel_noise_is_gumbel():
    noise = draw_gumbel(keys(64), (20, 4, 50)).double()
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0.57722, abs=0.01)
    assert noise.var() == pytest.approx(1.64493, abs=0.02)
    assert (noise < 0).double().mean() == pytest.approx(np.exp(-1), abs=0.003)
    assert draw_for_step(SMALL, keys(4), 50, 5, sample_codes=False).noise_RMGV is None


def test_numbers_for_an_objective_of_one_s_own():
    some = uniform(keys(50), 40)
    assert some.min() >= 0 and some.max() < 1 and float(some.mean()) == pytest.approx(0.5, abs=0.02)
    assert uniform(keys(50)[7:9], 10).equal(some[7:9, :10]) and len(some.unique()) > 1990


def test_a_crop_too_short_for_its_spans_is_refused():
    with pytest.raises(ConfigError, match=r"model\.mask_span"):
        draw_for_step(CONFIG, keys(2), 11, 100)
