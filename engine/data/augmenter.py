"""int16 microvolts -> float32 millivolts in two views -> augmentations, on any torch device.

    crops_BLT int16 [B, 12, 5000] -> x_BSLT float32 [B, S, L, 2500]

This is the reference for the other backends and the fast path on a CPU. `Augmenter` holds what is
the same for all batches; everything random is passed in as parameters, which are a function of
(seed, epoch, crop), so any process can reproduce a batch.

Missing leads are zeros in a crop and must stay zeros under every augmentation: `measured_leads`
finds them.
"""

import ctypes
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.io.plugins import plugin

from ..settings import counter
from ..settings.counter import RandomStream
from ..settings.errors import ConfigError, blaming
from ..settings.leads import ALL
from .augmentations import AugmentConfig
from .augmentations.leads import RandomLeads, UsableLeads
from .augmentations.stage import Noise, Params, Random, Stage, augment, draws
from .config import FS_HZ, HALF, MV_PER_UV, Views
from .order import Places
from .torch_ops import TorchOps

CHUNK = 16  # crops augmented at a time on a CPU: 4 MB of float32; the fastest of 4 to 32
WAVES_CHUNK = 64  # crops whose common noise is made at a time: 1 MB; the fastest of 4 to 64
Tensors = dict[str, torch.Tensor]
MeasuredLeads = Callable[[Places], np.ndarray]  # bool [B, 12]


@lru_cache(maxsize=4)  # every validation calls this
def missing_leads(dataset: Dataset) -> np.ndarray:
    """uint16 [crops]: one bit for each missing lead; bit 0 is lead I."""
    bits_of_parts = [np.zeros(0, np.uint16)]
    for part in dataset.parts(["missing_leads"]):
        missing, bits = part["missing_leads"], np.zeros(len(part), np.uint16)
        lead = pc.index_in(missing.flatten(), pa.array(LEADS)).fill_null(len(LEADS)).to_numpy()
        np.bitwise_or.at(
            bits, missing.value_parent_indices().to_numpy(), (1 << lead).astype(np.uint16)
        )
        bits_of_parts.append(bits)
    return np.concatenate(bits_of_parts)


def none_measured(dataset: Dataset, leads: Sequence[int]) -> np.ndarray:
    """bool [crops]: none of these leads was measured."""
    asked_bits = sum(1 << lead for lead in leads)
    return np.asarray(missing_leads(dataset) & asked_bits == asked_bits)


def measured_leads(datasets: Sequence[Dataset]) -> MeasuredLeads | None:
    """A function that looks up the measured leads of a batch; None if no record has missing
    leads."""
    bits = [missing_leads(dataset) for dataset in datasets]

    def of_places(places: Places) -> np.ndarray:
        return np.asarray(places.of(bits)[:, None] >> np.array(ALL) & 1 == 0)

    return of_places if any(bits_of_dataset.any() for bits_of_dataset in bits) else None


def crop_key(places: Places) -> np.ndarray:
    """The key of each crop for the counter-based generator: dataset and row in one integer."""
    return np.asarray(places.dataset.astype(np.int64) << 40 | places.row)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def single_threaded() -> None:
    """Keep torch from starting OpenMP threads for this thread's operations: they would take cores
    from the training step."""
    # initialises the thread's setting first: torch would otherwise reset it at the first operation
    torch.get_num_threads()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).omp_set_num_threads(1)


@dataclass(frozen=True, eq=False)
class Augmenter:
    """What is the same for all batches."""

    config: AugmentConfig
    views: Views  # two adjacent halves (CMSC), or one random window augmented twice (SimCLR, 3KG)
    seed: int
    device: torch.device
    measured: MeasuredLeads | None = None  # None: all leads of all crops
    # 0: random lead masking is of each half or view. Else of so many windows, by whoever cuts them
    windows: int = 0

    @cached_property
    def stages(self) -> list[Stage]:
        stages = self.config.stages
        if self.windows:
            stages = [
                UsableLeads(self.config) if isinstance(stage, RandomLeads) else stage
                for stage in stages
            ]
        return stages

    @cached_property
    def ops(self) -> TorchOps:
        return TorchOps(HALF, FS_HZ, self.device, self.seed)

    def random(self, places: Places, views: int = 2) -> Random:
        measured_BL = self.measured(places) if self.measured else None
        return Random(self.seed, places.epoch, crop_key(places), views, measured_BL=measured_BL)

    def window_masks(self, places: Places) -> np.ndarray | None:
        """bool [B, windows, L, 1]: the leads that are kept in each window of a crop. None: the halves
        or views are masked."""
        if not self.windows:
            return None
        return RandomLeads(self.config).masks(self.random(places, self.windows))

    def parameters(self, places: Places) -> Params:
        """Draw everything that is random about the stages."""
        p = draws(self.stages, self.random(places))
        if self.views == "window":
            key = (self.seed, RandomStream.WINDOW, places.epoch, crop_key(places))
            p["start"] = (counter.uniform(*key) * (HALF + 1)).astype(np.int64)
        return p

    def to_device(self, p: Params) -> Tensors:
        """Copy the parameters to the device asynchronously: a few kilobytes for a batch."""
        return {name: to_device(values, self.device) for name, values in p.items()}

    def __call__(self, crops_BLT: torch.Tensor, p: Tensors) -> torch.Tensor:
        x: torch.Tensor = self._split(crops_BLT, p.get("start")).float()
        x = augment(x.mul_(MV_PER_UV), p, self.stages, self.ops)
        # without augmentation, the window is repeated as two views
        return x if x.shape[1] == 2 else x.repeat(1, 2, 1, 1)

    def add_white_noise(self, x_BSLT: torch.Tensor, p: Params) -> None:
        """Add the noises that DALI has left out. What follows them is linear, so the other stages
        may have been applied before."""
        if not any(stage.from_bank for stage in self.stages):
            return
        stages = [stage for stage in self.stages if stage.from_bank or not isinstance(stage, Noise)]
        silent = x_BSLT.new_zeros((*x_BSLT.shape[:2], len(ALL), HALF))
        x_BSLT += augment(silent, self.to_device(p), stages, self.ops)

    def _split(self, crops_BLT: torch.Tensor, start_B: torch.Tensor | None) -> torch.Tensor:
        """The two halves (without copying), or one window, which `augment` turns into two views."""
        if start_B is None:
            return crops_BLT.view(*crops_BLT.shape[:2], 2, HALF).transpose(1, 2)
        index = start_B[:, None, None] + torch.arange(HALF, device=crops_BLT.device)
        return crops_BLT.gather(2, index.expand(-1, crops_BLT.shape[1], -1))[:, None]

    def writer(self, p: Tensors, out_BSLT: torch.Tensor) -> "ChunkWriter | CropWriter":
        """For a CPU: makes a batch a few crops at a time. Five times faster than a whole batch at
        once, where page faults take most of the time."""
        if self.views == "halves" and all(stage.by_crop for stage in self.stages):
            return CropWriter(self, p, out_BSLT)
        return ChunkWriter(self, p, out_BSLT)


class ChunkWriter:
    """Writes augmented crops into a batch, `at_a_time` of them while they are in the core's cache."""

    at_a_time = CHUNK

    def __init__(self, augmenter: Augmenter, p: Tensors, out_BSLT: torch.Tensor) -> None:
        self.augmenter, self.p, self.out_BSLT = augmenter, p, out_BSLT

    def write(self, crops_BLT: torch.Tensor, positions: Sequence[int]) -> None:
        """The first crops of a buffer to these positions of the batch."""
        index = torch.tensor(positions)
        p = {name: values.index_select(0, index) for name, values in self.p.items()}
        x_BSLT = self.augmenter(crops_BLT[: len(positions)], p)
        self.out_BSLT.index_copy_(0, index, x_BSLT)


class CropWriter:
    """The same, one crop at a time, in three passes over it and without scratch memory: for halves
    of all 12 leads, if all stages are `by_crop`. What does not need the crop is computed here, for
    the whole batch: numpy and torch calls for one crop cost more than their arithmetic."""

    at_a_time = 1

    def __init__(self, augmenter: Augmenter, p: Tensors, out_BSLT: torch.Tensor) -> None:
        crops, self.ops = len(out_BSLT), augmenter.ops
        keep = torch.ones(crops, 2, len(ALL), 1)
        shared: list[Noise] = []
        from_bank: list[Stage] = []
        for stage in augmenter.stages:
            if stage.from_bank:
                from_bank.append(stage)
            elif isinstance(stage, Noise):
                shared.append(stage)
            else:
                keep = stage.apply(keep, p, self.ops)
        self.out = out_BSLT.unbind()
        self.keep = keep.unbind()
        self.scale = (keep * MV_PER_UV).unbind()
        self.waves = _shared_noise(shared, p, self.ops, crops).unbind() if shared else None
        self.white = []
        for stage in from_bank:
            gain, start = (p[name] for name in stage.from_bank)
            self.white.append(((gain * keep).unbind(), start.unbind()))

    def write(self, crops_BLT: torch.Tensor, positions: Sequence[int]) -> None:
        (i,) = positions
        out_SLT = self.out[i]
        halves_SLT = crops_BLT.view(len(ALL), 2, HALF).transpose(0, 1)
        out_SLT.copy_(halves_SLT).mul_(self.scale[i])  # torch.mul takes up to a fifth longer
        if self.waves:
            out_SLT.addcmul_(self.keep[i], self.waves[i])
        for gain, start in self.white:
            out_SLT.addcmul_(gain[i], self.ops.white(start[i]))


def _shared_noise(stages: Sequence[Noise], p: Tensors, ops: TorchOps, crops: int) -> torch.Tensor:
    """The sum of these noises, which all leads share, for each crop: [B, 2, 1, 2500]."""
    waves = torch.empty(crops, 2, 1, HALF)
    for start in range(0, crops, WAVES_CHUNK):
        part = slice(start, start + WAVES_CHUNK)
        chunk = {name: values[part] for name, values in p.items()}
        waves[part] = ops.sum([stage.wave(chunk, ops) for stage in stages])
    return waves


@contextmanager
def global_draws(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the global generators of torch, numpy and Python, from which a library may draw, and
    restores them."""
    before = np.random.get_state(), random.getstate()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(before[0])
            random.setstate(before[1])


class Draw(torch.Generator):
    """Random numbers for your own augmentation. Those of `uniform` and `normal` belong to each half
    (or view) of each crop and are the same whenever the crop comes in this epoch, in whatever batch, on
    whatever rank or device. As a torch.Generator it is seeded for each step and rank, once for all
    functions."""

    def at(self, seed: int, places: Places, function: int) -> None:
        """`function`: which of several."""
        crop_B11 = crop_key(places)[:, None, None]
        self.key = seed, RandomStream.OWN, function, places.epoch[:, None, None], crop_B11
        self.calls = 0

    def uniform(self, *shape: int) -> torch.Tensor:
        """[crops, halves, *shape] float32, from 0 to 1; other ones at each call."""
        return self._tensor_of_draws(counter.uniform, shape)

    def normal(self, *shape: int) -> torch.Tensor:
        """The same, standard normal."""
        return self._tensor_of_draws(counter.normal, shape)

    def _tensor_of_draws(
        self, numbers: Callable[..., np.ndarray], shape: tuple[int, ...]
    ) -> torch.Tensor:
        self.calls += 1
        half_S1, slot = np.arange(2)[:, None], np.arange(math.prod(shape))
        values = numbers(*self.key, half_S1, self.calls, slot).astype(np.float32)
        return to_device(values, self.device).view(*values.shape[:2], *shape)


class ExtraAugmentation:
    """Your own augmentations, `augment.extra: file.py:function`, applied after all others to the
    batch on its device, whichever backend made it.

        def dim(x_BSLT, draw, most=0.5):         # float32 millivolts; may be changed in place
            return x_BSLT * (1 - most * draw.uniform(1, 1))

    Masked and missing leads stay zeros. Random numbers: Draw. The global generators of torch, numpy and
    Python are seeded from the run's seed, the step and the rank: a resumed run draws the same numbers;
    another number of ranks draws different ones, as with dropout."""

    def __init__(
        self,
        named_functions: Sequence[tuple[str, dict[str, Any]]],
        seed: int,
        rank: int,
        device: torch.device,
    ) -> None:
        """`named_functions`: the names of functions, and their options."""
        self.seed, self.rank, self.draw = seed, rank, Draw(device)
        self.functions = []
        for name, options in named_functions:
            setting = f"augment.extra={name}{f' with {options}' if options else ''}"
            with blaming(setting):
                self.functions.append((setting, partial(plugin(name), **options)))

    def __call__(self, x_BSLT: torch.Tensor, places: Places, step: int) -> torch.Tensor:
        seed = int(counter.bits(self.seed, RandomStream.EXTRA, step, self.rank)) >> 1
        self.draw.manual_seed(seed)
        absent_BSL1 = ~x_BSLT.any(-1, keepdim=True)
        with global_draws(seed, x_BSLT.device):
            for number, (setting, function) in enumerate(self.functions):
                self.draw.at(self.seed, places, number)
                with blaming(setting):
                    x_BSLT = checked_like(x_BSLT, function(x_BSLT, self.draw))
                x_BSLT = x_BSLT.masked_fill(absent_BSL1, 0.0)  # a copy: it may be expanded
        return x_BSLT


def checked_like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y; ConfigError if it is not like x."""
    if (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device):
        return y
    difference = f"{list(y.shape)} {y.dtype} on {y.device}"
    raise ConfigError(f"{list(x.shape)} became {difference}: keep its shape, type and device")


class Upload:
    """Copies host memory to a GPU on a stream of its own, so that a copy does not wait for
    queued kernels. Call `wait` before writing to that host memory again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream, self.copied = torch.cuda.Stream(device), torch.cuda.Event()

    def __call__(self, host: torch.Tensor) -> torch.Tensor:
        pinned = host if host.is_pinned() else host.pin_memory()
        with torch.cuda.stream(self.stream):
            uploaded = pinned.to(self.device, non_blocking=True)
            self.copied.record()
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(self.copied)
        uploaded.record_stream(computing)  # so that its memory is not reused while kernels read it
        return uploaded

    def wait(self) -> None:
        self.copied.synchronize()
