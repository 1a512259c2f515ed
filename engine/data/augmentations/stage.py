"""The base class of the augmentations, which are applied one after the other, and the random
numbers that they draw.

    p = Stage(settings).draw(random)            arrays, a function of (seed, epoch, crop, view)
    x = Stage(settings).apply(x, p, ops)        in torch, or in a DALI graph

Shapes: B crops, S adjacent halves or views, L leads, T samples, K components. x is [B, S, L, T]
float32 millivolts; p holds [B, S, 1 or L, 1 or K]. A DALI graph sees one crop, without B. One half
(S = 1) becomes two views if p has parameters for two.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from pydantic import ConfigDict

from ...settings import counter
from ...settings.counter import RandomStream

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
ONE_DRAW_FOR_ALL_LEADS = (0,)  # given in place of lead numbers: one draw for all leads
TAU = 2 * math.pi
# How many numbers the bank of white noise has. They take 16 MiB, which fits in a CPU's cache; the
# noise of two leads is cut from overlapping places with probability 0.001
WHITE_BANK_SIZE = 2**22
Params = dict[str, np.ndarray]
Node = Any  # a tensor, or a node of a DALI graph
Nodes = Mapping[str, Node]
# (gain [.., S, 1 or L, 1], or None for a gain of 1; wave [.., S, 1 or L, T])
Wave = tuple[Node, Node]


class Random:
    """Draws random numbers [B, S, leads, slots] for a batch of crops. Slot n is the n-th number
    that a stream draws for a lead. The numbers of a lead do not depend on rank, batch size,
    order of crops, restarts or the other leads."""

    def __init__(
        self,
        seed: int,
        epoch_B: np.ndarray,
        crop_B: np.ndarray,
        views: int = 2,
        samples: int = 2500,
        measured_BL: np.ndarray | None = None,
    ) -> None:
        """`crop_B`: for each crop, its augmenter.crop_key. `measured_BL`: bool [B, 12], True for
        each lead that was recorded; None: all leads were."""
        epoch, crop = np.broadcast_arrays(np.atleast_1d(epoch_B), np.atleast_1d(crop_B))
        self.seed, self.samples, self.measured_BL = seed, samples, measured_BL
        self.epoch = epoch[:, None, None, None]
        self.crop = crop[:, None, None, None]
        self.view = np.arange(views)[:, None, None]

    def uniform(self, stream: int, leads: Sequence[int], slots: Sequence[int] = (0,)) -> np.ndarray:
        return counter.uniform(*self._stream_key(stream, leads, slots))

    def normal(self, stream: int, leads: Sequence[int], slots: Sequence[int] = (0,)) -> np.ndarray:
        return counter.normal(*self._stream_key(stream, leads, slots))

    def _stream_key(
        self, stream: int, leads: Sequence[int], slots: Sequence[int]
    ) -> tuple[Any, ...]:
        lead = np.array(leads)[:, None]
        return self.seed, stream, self.epoch, self.crop, self.view, lead, np.array(slots)


class Stage(ABC):
    """Base class of the stages. `settings` is the whole AugmentConfig; each subclass annotates
    `settings` with the part that it reads."""

    # Number of the stage's random stream, which nothing else uses. Never change it: saved runs
    # depend on it
    stream = 0
    # Settings that switch the stage on. Tests run the stage with each of these settings, and run
    # the first of them together with other stages
    examples: ClassVar[Sequence[dict[str, Any]]] = ()
    # For noise that is cut from the bank of white noise: the names of the parameters for its
    # strength and for its start in the bank. DALI cannot read the bank, so torch adds this noise to
    # DALI's output
    bank_parameters: tuple[str, ...] = ()

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @property
    @abstractmethod
    def active(self) -> bool:
        """True if the settings switch this stage on."""

    @property
    def description(self) -> str:
        """Returns the name for the model card; "" if this stage is not an augmentation."""
        return ""

    @property
    def fits_single_crop_writer(self) -> bool:
        """True if writer.SingleCropWriter, the fast path on a CPU, supports this stage. It
        supports noise that all leads share, noise from the bank of white noise, and stages that
        only keep or zero leads."""
        return False

    @property
    def changes_zeros(self) -> bool:
        """True if the stage may change zeros. RandomLeads then zeroes the leads that were not
        measured."""
        return True

    def check(self) -> None:  # noqa: B027 (most settings cannot contradict each other)
        """Raises ConfigError if the settings contradict each other."""

    def draw(self, random: Random) -> Params:
        """Returns the random parameters of this stage, under names that no other stage uses."""
        return {}

    def apply(self, x: Node, p: Nodes, ops: Any) -> Node:
        """Returns the augmented `x`, and may overwrite `x`. `ops`: TorchOps or dali.DaliOps.
        Subclasses of Noise define `wave` instead. A stage with neither raises an error, so that
        it is not skipped silently."""
        raise TypeError(
            f"augmentation {type(self).__name__}: has neither apply() nor wave(): define one"
        )


class Noise(Stage):
    """A stage that adds gain * wave to the signal; `wave` returns both."""

    def wave(self, p: Nodes, ops: Any) -> Wave:
        gain, start = self.bank_parameters
        return p[gain], ops.white_noise(p[start])


def augment(x: Node, p: Nodes, stages: Sequence[Stage], ops: Any) -> Node:
    """Applies all stages in order. Overwrites x where possible."""
    waves: list[Wave] = []
    for stage in stages:
        if isinstance(stage, Noise):
            waves.append(stage.wave(p, ops))
        else:
            x = stage.apply(ops.add(x, waves), p, ops)
            waves = []
    return ops.add(x, waves)


def draw_parameters(stages: Sequence[Stage], random: Random) -> Params:
    """Draws the parameters of all stages, as contiguous arrays of float32, bool or int32."""
    p: Params = {}
    for stage in stages:
        for name, values in stage.draw(random).items():
            if values.dtype not in (np.bool_, np.int32):
                values = values.astype(np.float32)
            p[name] = np.ascontiguousarray(values)
    return p


def time_axes(samples: int, fs_hz: float) -> Iterator[np.ndarray]:
    """Yields three axes, float32 [T]: the sample number; the time in s; and the time modulo 0.1
    s, the common period of all mains hum. The last one is for hum, because float32 loses the
    phase of large angles."""
    index = np.arange(samples)
    time_s = index / fs_hz
    for axis in (index, time_s, (time_s + 0.05) % 0.1 - 0.05):
        yield axis.astype(np.float32)


@lru_cache(maxsize=1)  # all loaders of a run share the bank
def white_bank(seed: int) -> np.ndarray:
    """Returns WHITE_BANK_SIZE standard normal float32 numbers, drawn once in 0.2 s. Fresh numbers
    for each crop would cost ten times as much as all other draws."""
    numbers = counter.normal(seed, RandomStream.WHITE, np.arange(WHITE_BANK_SIZE))
    return numbers.astype(np.float32)
