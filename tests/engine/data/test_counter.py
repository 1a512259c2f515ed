"""Counter-based random numbers: uniform, independent along every counter, never changing;
permutations are bijections."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from omnilead.engine.settings.counter import (
    MAX_PERMUTED,
    MAX_RANKED,
    RandomStream,
    bits,
    mix,
    normal,
    permute,
    uniform,
)

EPOCH, CROP, VIEW, SLOT = np.arange(4), np.arange(64), np.arange(2), np.arange(48)
GRID = (EPOCH[:, None, None, None], CROP[:, None, None], VIEW[:, None], SLOT)
LEAD_MASK, EMG, SHIFT, ROTATION = 5, 7, 9, 10  # streams of stages of the augmentations
STREAMS = [LEAD_MASK, RandomStream.WINDOW, RandomStream.WHITE]


def chi2_p(counts):
    return float(stats.chisquare(counts.reshape(-1)).pvalue)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_uniform_is_uniform(seed, stream):
    drawn = uniform(seed, stream, *GRID)
    assert drawn.shape == (4, 64, 2, 48) and drawn.dtype == np.float64
    assert drawn.min() >= 0 and drawn.max() < 1
    assert stats.kstest(drawn.reshape(-1), "uniform").pvalue > 1e-4
    low_bits = bits(seed, stream, *GRID) & np.uint64(255)
    assert chi2_p(np.unique(low_bits, return_counts=True)[1]) > 1e-4


def test_normal_is_normal():
    drawn = normal(3, EMG, np.arange(100_000))
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    assert np.isfinite(drawn).all() and 3.9 < np.abs(drawn).max() < 6
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.015


@pytest.mark.parametrize("axis", range(4), ids=["epoch", "crop", "view", "slot"])
def test_neighbours_along_each_counter_are_independent(axis):
    drawn = np.moveaxis(uniform(5, SHIFT, *GRID), axis, 0)
    a, b = drawn[:-1].reshape(-1), drawn[1:].reshape(-1)
    assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / math.sqrt(len(a))
    pairs = np.histogram2d(a, b, bins=16, range=[[0, 1], [0, 1]])[0]
    assert chi2_p(pairs) > 1e-4


def test_draws_differ_by_seed_stream_and_number_of_counters():
    n = np.arange(20_000)
    counters = [(0, 1, n), (1, 1, n), (0, 2, n), (0, 1, n, 0), (0, n, 1), (0, 1, n, 1)]
    draws = [uniform(*each) for each in counters]
    correlation = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlation).max() < 4.5 / math.sqrt(len(n))


@pytest.mark.parametrize("word", range(5), ids=["seed", "stream", "epoch", "crop", "slot"])
def test_one_flipped_bit_of_a_counter_flips_half_of_the_result(word):
    """For every bit of input and output; counters are small, as in practice."""
    samples = 1500
    small = np.random.default_rng(0).integers(0, 2000, (5, samples))
    before = bits(*small)
    for bit in range(64):
        flipped = small.astype(np.uint64)
        flipped[word] ^= np.uint64(1 << bit)
        changed = before ^ bits(*flipped)
        share = np.mean(changed[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1), axis=0)
        assert np.abs(share - 0.5).max() < 5.5 * 0.5 / math.sqrt(samples)


def test_neighbouring_crops_do_not_share_a_shifted_sequence():
    drawn = bits(0, RandomStream.WHITE, np.arange(2000)[:, None], np.arange(100))
    assert len(np.unique(drawn)) == drawn.size


def test_a_draw_does_not_depend_on_other_draws_in_the_call():
    whole = uniform(9, ROTATION, *GRID)
    for at in ((0, 0, 0, 0), (3, 63, 1, 47), (2, 5, 0, 11)):
        alone = uniform(9, ROTATION, *at)
        assert alone.shape == () and alone == whole[at]
    assert (normal(9, EMG, CROP)[7:9] == normal(9, EMG, CROP[7:9])).all()
    assert bits(1, np.zeros((0, 3), int)).shape == (0, 3)


@given(st.integers(-(2**70), 2**70), st.integers(-(2**62), 2**62))
def test_counters_are_taken_modulo_2_to_the_64_whatever_their_type(seed, counter):
    same = [counter % 2**64, np.int64(counter), np.array([counter])]
    if abs(counter) < 2**31:
        same.append(np.array(counter, np.int32))
    for other in same:
        assert bits(seed % 2**64, other) == bits(seed, counter)


def test_a_float_counter_is_refused():
    for wrong in (1.5, np.array([0.5]), np.array([True])):
        with pytest.raises(TypeError, match="must be an integer"):
            bits(0, wrong)


def test_random_numbers_never_change():
    """These values must never change: resumed runs and published tables depend on them."""
    assert bits(0).tolist() == 9370218965779684112
    assert bits(0, RandomStream.ORDER, 5).tolist() == 11465996907461922957
    crops, far = np.arange(2)[:, None], np.array([0, 9_999_999])
    assert bits(42, LEAD_MASK, crops, far).tolist() == [
        [17739224505840947513, 8628901530934472146],
        [4677151155395135643, 11256478470255647343],
    ]
    window = uniform(42, RandomStream.WINDOW, 3, np.array([17, 18]), 1)
    assert window.tolist() == [0.39652061815463724, 0.31401424694183555]
    emg = [-0.3100193572069275, -2.1531534601926907, -1.4697126466600487]
    assert normal(42, EMG, np.arange(3)) == pytest.approx(emg, rel=1e-12)
    streams = list(RandomStream.__members__)
    assert streams[:4] == ["ORDER", "SHARD_ORDER", "BLOCK_ORDER", "WINDOW"]
    assert (RandomStream.WHITE, RandomStream.PAIR) == (13, 16)
    assert permute(np.arange(12), 12, 7).tolist() == [2, 7, 1, 9, 3, 4, 0, 10, 5, 6, 8, 11]
    assert permute(np.arange(6), 100, 7).tolist() == [16, 59, 10, 38, 39, 18]
    far = [859268690655, 643271941931, 681987866659, 926660097324]
    assert permute(np.arange(4), 2**40, 2**64 - 1).tolist() == far


def test_mix_is_splitmix64():
    """The first numbers of the published generator with seed 1234567."""
    state = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


keys = st.integers(0, 2**64 - 1)
SIZES = (
    st.integers(1, 200) | st.integers(200, 20_000) | st.sampled_from([4096, 4099, 65536, 10_007])
)


@given(SIZES, keys)
def test_permute_is_a_bijection(n, key):
    assert (np.sort(permute(np.arange(n), n, key)) == np.arange(n)).all()


@given(st.integers(1, MAX_PERMUTED), keys, st.integers(0, 2**62))
def test_permute_is_a_bijection_for_any_size(n, key, start):
    i = (start + np.arange(300)) % n
    out = permute(i, n, key)
    assert out.dtype == np.int64 and (out >= 0).all() and (out < n).all()
    assert len(np.unique(out)) == len(np.unique(i))


@given(st.lists(st.tuples(st.integers(1, 3000), keys), min_size=1, max_size=20))
def test_permute_broadcasts_sizes_and_keys(blocks):
    sizes, block_keys = (np.array(values, np.uint64) for values in zip(*blocks, strict=True))
    i = np.arange(40)[:, None] % sizes.astype(int)
    alone = [permute(i[:, column], n, key) for column, (n, key) in enumerate(blocks)]
    assert (permute(i, sizes.astype(int), block_keys) == np.stack(alone, axis=1)).all()


@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_permutation_of_few_elements_is_equally_likely(n):
    keys_K = np.arange(200 * math.factorial(n))
    codes = permute(np.arange(n), n, keys_K[:, None]) @ n ** np.arange(n)
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == math.factorial(n)
    assert chi2_p(counts) > 1e-4


@pytest.mark.parametrize("n", [MAX_RANKED, MAX_RANKED + 1, 36, 65])
def test_pairs_are_independent_under_neighbouring_keys(n):
    """Too few rounds would keep elements together that share a half of the network."""
    for other in (1, math.ceil(math.sqrt(n)), n - 1):
        first, second = permute(np.array([0, other]), n, np.arange(100_000)[:, None]).T
        counts = np.bincount(first * n + second, minlength=n * n).reshape(n, n)
        assert (np.diag(counts) == 0).all()
        assert chi2_p(counts[~np.eye(n, dtype=bool)]) > 1e-4


def test_permuted_neighbours_are_uncorrelated():
    out = permute(np.arange(100_000), 10**7, 1) / 1e7
    assert stats.kstest(out, "uniform").pvalue > 1e-4
    for a, b in ((out[1:], out[:-1]), (out, np.arange(100_000))):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.015


@pytest.mark.parametrize("i, n", [(5, 5), (-1, 5), (0, 0), (0, MAX_PERMUTED + 1), (2**40, 2**40)])
def test_permute_refuses_elements_out_of_range(i, n):
    with pytest.raises(ValueError, match="must hold"):
        permute(np.array([i]), n, 0)
