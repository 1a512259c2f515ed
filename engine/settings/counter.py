"""Counter-based random numbers and permutations: pure functions of a seed and counters, so there is
no state to save.

Every random decision about a crop is drawn here, keyed by (seed, stream, epoch, crop, view, slot).
It does not depend on rank, batch size, order of calls, restarts or library versions.

    u_BVS = uniform(seed, RandomStream.WINDOW, epoch[:, None, None], crop[:, None, None], view[None,
    :, None], slot)

Counters are hashed from left to right and broadcast as late as possible, so put the fastest-varying
last: above, the first four cost one hash per crop. With 512 crops, 2 views and 16 slots on one
core: 7 ns per uniform, 40 ns per normal.

`permute` is a keyed bijection of [0, n), from which the order of crops is made: 0.14 ms for 512
elements of any n.
"""

from enum import IntEnum

import numpy as np

from omnilead.data_tools.io.splitmix import GOLDEN_GAMMA, mix

# An odd constant. `bits` adds k times this to the k-th counter, so that its result depends on the
# order of the counters
_POSITION_FACTOR = 0xD1B54A32D192ED03
# Each makes one of the two uniform numbers from which `normal` computes a normal one
_RADIUS_KEY = 0x8CB92BA72F3D8DD7
_ANGLE_KEY = 0xAEF17502108EF2D9
_ALL_BITS = 2**64 - 1

MAX_PERMUTED = 2**40  # largest number of elements that `permute` takes
# Half rounds of the Feistel network. With 6, pairs of elements are visibly dependent in
# permutations of fewer than 50 elements; with 8, only of fewer than 17
FEISTEL_HALF_ROUNDS = 8
# Up to this number of elements, `permute` ranks hashes: a Feistel network does not make all
# permutations equally likely, whatever the number of rounds
MAX_RANKED = 32

Counter = int | np.integer | np.ndarray


class RandomStream(IntEnum):
    """The purpose for which a random number is drawn: two purposes never share a draw. Saved
    runs depend on the values: add new ones, but never renumber. Each augmentation stage has a
    number of its own (5 to 11, 17, and new ones from 19)."""

    ORDER = 1
    SHARD_ORDER = 2
    BLOCK_ORDER = 3
    WINDOW = 4
    WHITE = 13
    EXTRA = 14
    LABELS = 15
    PAIR = 16
    OWN = 18


def bits(seed: Counter, *counters: Counter) -> np.ndarray:
    """Returns random uint64 in the broadcast shape of the counters, which are integers or
    integer arrays, taken modulo 2**64."""
    values = (seed, *counters)
    state = np.zeros(1, np.uint64)  # one element, not a scalar: numpy scalars warn on overflow
    for k, value in enumerate(values, 1):
        word = _as_uint64(value) * GOLDEN_GAMMA + (k * _POSITION_FACTOR & _ALL_BITS)
        # xor, because with addition crops with neighbouring states would draw the same numbers,
        # shifted
        state = mix(state ^ word)
    return state.reshape(np.broadcast_shapes(*map(np.shape, values)))


def uniform(seed: Counter, *counters: Counter) -> np.ndarray:
    """Returns random float64 in [0, 1), multiples of 2**-53, in the broadcast shape of the
    counters."""
    words = bits(seed, *counters)
    return _to_unit_interval(words.reshape(-1)).reshape(words.shape)


def normal(seed: Counter, *counters: Counter) -> np.ndarray:
    """Returns standard normal float64 in the broadcast shape of the counters, by Box-Muller,
    between -8.6 and 8.6. Two machines may differ by rounding, as the last bit of log and cos
    varies."""
    words = bits(seed, *counters)
    state = words.reshape(-1)
    angle = _to_unit_interval(mix(state ^ _ANGLE_KEY))
    angle *= 2.0 * np.pi
    radius = _to_unit_interval(mix(state ^ _RADIUS_KEY))
    np.subtract(1.0, radius, out=radius)  # now in (0, 1], so that the logarithm is finite
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    radius *= np.cos(angle, out=angle)
    return radius.reshape(words.shape)


def _to_unit_interval(random: np.ndarray) -> np.ndarray:
    random >>= 11
    return np.asarray(random * 2.0**-53)


def _as_uint64(value: Counter) -> np.ndarray:
    if isinstance(value, int):
        return np.full(1, value & _ALL_BITS, np.uint64)
    array = np.atleast_1d(value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"a counter must be an integer or an integer array, not {array.dtype}")
    return array.astype(np.uint64)


def permute(i: Counter, n: Counter, key: Counter) -> np.ndarray:
    """Returns the image (int64) of i under the permutation of [0, n) that `key` determines, for
    n from 1 to 2**40. The arguments broadcast."""
    shape = np.broadcast_shapes(np.shape(i), np.shape(n), np.shape(key))
    x = np.broadcast_to(i, shape).reshape(-1)
    size = _flatten(np.asarray(n), shape)
    keys = _flatten(bits(key), shape)
    if x.size and (size.min() < 1 or size.max() > MAX_PERMUTED or x.min() < 0 or (x >= size).any()):
        raise ValueError(
            f"permute: element {x.max()} of {size.min()}: 0 <= element < size <= 2**40 must hold"
        )
    out = np.empty(x.size, np.uint64)
    tiny = np.broadcast_to(size <= MAX_RANKED, x.shape)
    for scheme, mask in ((_permute_by_rank, tiny), (_permute_by_feistel, ~tiny)):
        indices = np.flatnonzero(mask)
        if indices.size:
            elements = x[indices].astype(np.uint64)
            sizes = _take(size, indices).astype(np.uint64)
            out[indices] = scheme(elements, sizes, _take(keys, indices))
    return out.astype(np.int64).reshape(shape)


def _flatten(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the value as an array of one dimension: one element if it has only one, else one
    for each element of `shape`."""
    if value.size == 1:
        return value.reshape(1)
    return np.broadcast_to(value, shape).reshape(-1)


def _take(value: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return value if value.size == 1 else value[indices]


def _permute_by_rank(x: np.ndarray, n: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Returns the rank of each x among the elements of [0, n), which are ranked by a hash. The
    hash is a bijection, so no two are equal, and every permutation is equally likely."""
    element = np.arange(MAX_RANKED)
    hashes = bits(key[:, None], element)
    own_hashes = bits(key, x)
    smaller = (hashes < own_hashes[:, None]) & (element < n[:, None])
    return np.asarray(smaller.sum(axis=1))


def _permute_by_feistel(x: np.ndarray, n: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Applies a Feistel network on [0, a * b), with a = ceil(sqrt n) and b = ceil(n / a), until
    the result is in [0, n). Once is nearly always enough, as a * b exceeds n by less than a."""
    a = np.ceil(np.sqrt(n)).astype(np.uint64)  # IEEE rounds sqrt the same way on every machine
    b = (n + a - 1) // a
    out = _feistel(x, a, b, key)
    outside = np.flatnonzero(out >= n)
    while outside.size:
        walked = _feistel(out[outside], _take(a, outside), _take(b, outside), _take(key, outside))
        out[outside] = walked
        outside = outside[walked >= _take(n, outside)]
    return out


def _feistel(x: np.ndarray, a: np.ndarray, b: np.ndarray, key: np.ndarray) -> np.ndarray:
    high, low = np.divmod(x, b)
    for k in range(0, FEISTEL_HALF_ROUNDS, 2):
        high = (high + _round(low, key + k)) % a
        low = (low + _round(high, key + (k + 1))) % b
    return np.asarray(high * b + low)


def _round(x: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Returns 53 bits of a hash: the round function of the Feistel network. With 53 bits, its
    sums do not overflow before the modulus is taken."""
    return np.asarray(mix(x * GOLDEN_GAMMA ^ key) >> 11)
