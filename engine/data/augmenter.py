"""Turns int16 microvolts into float32 millivolts in two views, and augments these, on any torch
device.

    crops_BLT int16 [B, 12, 5000] -> x_BSLT float32 [B, S, L, 2500]

This is the reference for the other backends and for the fast path on a CPU (writer.py). `Augmenter`
holds what is the same for all batches; everything random is passed in as parameters, which are a function of
(seed, epoch, crop), so any process can reproduce a batch.

Missing leads are zeros in a crop and must stay zeros under every augmentation: `measured_leads_lookup`
finds them.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.io.plugins import load_plugin

from ..settings import counter
from ..settings.counter import RandomStream
from ..settings.errors import ConfigError, blaming
from ..settings.leads import ALL_LEADS
from .augmentations import AugmentConfig
from .augmentations.leads import RandomLeads, UsableLeads
from .augmentations.stage import Noise, Params, Random, Stage, augment, draw_parameters
from .config import FS_HZ, HALF, MV_PER_UV, Views
from .order import Places
from .torch_ops import TorchOps

# `examine` runs a user's augmentation on a batch, and then twice more: with other crops in place of
# those that are False here, and with other crops in place of those that are True. The output for the
# crops that stayed must be the same. Rolling or reversing the batch would mix a True one with a False one
UNCHANGED_B = (False, True, True, False, True, False, False, True)
# outputs that differ by less count as equal, because a GPU may add in another order
TOLERANCE_MV = 1e-6
Tensors = dict[str, torch.Tensor]
MeasuredLeads = Callable[[Places], np.ndarray]  # bool [B, 12]


@lru_cache(maxsize=4)  # cached, because every validation calls this
def missing_leads(dataset: Dataset) -> np.ndarray:
    """Returns uint16 [crops], in which each bit that is set stands for a missing lead; bit 0 is
    lead I."""
    bits_of_parts = [np.zeros(0, np.uint16)]
    for part in dataset.row_batches(["missing_leads"]):
        missing, bits = part["missing_leads"], np.zeros(len(part), np.uint16)
        lead = pc.index_in(missing.flatten(), pa.array(LEADS)).fill_null(len(LEADS)).to_numpy()
        np.bitwise_or.at(
            bits, missing.value_parent_indices().to_numpy(), (1 << lead).astype(np.uint16)
        )
        bits_of_parts.append(bits)
    return np.concatenate(bits_of_parts)


def crops_without_leads(dataset: Dataset, leads: Sequence[int]) -> np.ndarray:
    """Returns bool [crops]: True where none of `leads` was measured."""
    asked_bits = sum(1 << lead for lead in leads)
    return np.asarray(missing_leads(dataset) & asked_bits == asked_bits)


def measured_leads_lookup(datasets: Sequence[Dataset]) -> MeasuredLeads | None:
    """Returns a function that returns the measured leads of a batch; None if no record lacks a
    lead."""
    bits = [missing_leads(dataset) for dataset in datasets]

    def measured_leads_of(places: Places) -> np.ndarray:
        return np.asarray(places.take(bits)[:, None] >> np.array(ALL_LEADS) & 1 == 0)

    return measured_leads_of if any(bits_of_dataset.any() for bits_of_dataset in bits) else None


def crop_key(places: Places) -> np.ndarray:
    """Returns one integer for each crop, made of its dataset and row: the key of the crop in the
    counter-based generator."""
    return np.asarray(places.dataset.astype(np.int64) << 40 | places.row)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True, eq=False)
class Plan:
    """Crops to be read, and the random parameters of their augmentation."""

    places: Places
    parameters: Params
    # what Augmenter.kept_leads_per_window returns: the leads to keep in each window
    keep_BSL1: np.ndarray | None = None

    def plan_of_part(self, crops: slice) -> "Plan":
        """Returns the part of this plan for a slice of its crops."""
        p = {name: values[crops] for name, values in self.parameters.items()}
        keep_BSL1 = None if self.keep_BSL1 is None else self.keep_BSL1[crops]
        return Plan(self.places[crops], p, keep_BSL1)


@dataclass(frozen=True, eq=False)
class Augmenter:
    """Augments batches of crops. Holds what is the same for all batches."""

    config: AugmentConfig
    views: Views  # two adjacent halves (CMSC), or one random window augmented twice (SimCLR, 3KG)
    seed: int
    device: torch.device
    measured_leads: MeasuredLeads | None = None  # None: all leads of all crops were measured
    # number of windows that the model's input cuts from each crop and masks; 0: the stages mask
    # halves or views (LoaderConfig.windows)
    windows: int = 0

    @cached_property
    def stages(self) -> list[Stage]:
        stages = self.config.stages
        # with `windows`, no stage masks leads at random: the model's input filters each crop, cuts it
        # into windows, and masks these by `kept_leads_per_window`
        if self.windows:
            stages = [
                UsableLeads(self.config) if isinstance(stage, RandomLeads) else stage
                for stage in stages
            ]
        return stages

    @cached_property
    def ops(self) -> TorchOps:
        return TorchOps(HALF, FS_HZ, self.device, self.seed)

    def random_numbers(self, places: Places, views: int = 2) -> Random:
        measured_BL = self.measured_leads(places) if self.measured_leads else None
        return Random(self.seed, places.epoch, crop_key(places), views, measured_BL=measured_BL)

    def plan(self, places: Places) -> Plan:
        """Draws all random parameters of a batch."""
        return Plan(places, self.draw_parameters(places), self.kept_leads_per_window(places))

    def kept_leads_per_window(self, places: Places) -> np.ndarray | None:
        """Returns bool [B, windows, L, 1], True for each lead to keep in each window of a crop;
        None if the stages mask halves or views instead."""
        if not self.windows:
            return None
        return RandomLeads(self.config).keep_masks(self.random_numbers(places, self.windows))

    def draw_parameters(self, places: Places) -> Params:
        """Draws the random parameters of all stages."""
        p = draw_parameters(self.stages, self.random_numbers(places))
        if self.views == "window":
            key = (self.seed, RandomStream.WINDOW, places.epoch, crop_key(places))
            p["start"] = (counter.uniform(*key) * (HALF + 1)).astype(np.int64)
        return p

    def to_device(self, p: Params) -> Tensors:
        """Copies the parameters to the device asynchronously: a few kilobytes for a batch."""
        return {name: to_device(values, self.device) for name, values in p.items()}

    def __call__(self, crops_BLT: torch.Tensor, p: Tensors) -> torch.Tensor:
        x: torch.Tensor = self._halves_or_window(crops_BLT, p.get("start")).float()
        x = augment(x.mul_(MV_PER_UV), p, self.stages, self.ops)
        # without augmentation, both views are the same window
        return x if x.shape[1] == 2 else x.repeat(1, 2, 1, 1)

    def add_white_noise(self, x_BSLT: torch.Tensor, p: Params) -> None:
        """Adds the white noise that DALI has left out. DALI may already have applied the stages
        after it, because they are linear."""
        if not any(stage.bank_parameters for stage in self.stages):
            return
        stages = [
            stage for stage in self.stages if stage.bank_parameters or not isinstance(stage, Noise)
        ]
        silent = x_BSLT.new_zeros((*x_BSLT.shape[:2], len(ALL_LEADS), HALF))
        x_BSLT += augment(silent, self.to_device(p), stages, self.ops)

    def _halves_or_window(
        self, crops_BLT: torch.Tensor, start_B: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the two halves of each crop (without copying) or, with `start_B`, the window of
        each crop that begins there, which `augment` turns into two views."""
        if start_B is None:
            return crops_BLT.view(*crops_BLT.shape[:2], 2, HALF).transpose(1, 2)
        index = start_B[:, None, None] + torch.arange(HALF, device=crops_BLT.device)
        return crops_BLT.gather(2, index.expand(-1, crops_BLT.shape[1], -1))[:, None]


@contextmanager
def seeded_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the global generators of torch, numpy and Python, from which a library may draw, and
    restores their former states afterwards."""
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
    """Random numbers for your own augmentation. `uniform` and `normal` give each half (or view)
    of a crop numbers that do not depend on batch, rank or device, and are new in each epoch. As
    a torch.Generator it is seeded once for each step and rank, and all functions draw from it in
    turn."""

    def set_crops(self, seed: int, places: Places, function: int) -> None:
        """Makes `uniform` and `normal` draw the numbers of these crops. `function`: the index of
        the user's function that will draw."""
        crop_B11 = crop_key(places)[:, None, None]
        self.key = seed, RandomStream.OWN, function, places.epoch[:, None, None], crop_B11
        self.calls = 0

    def uniform(self, *shape: int) -> torch.Tensor:
        """Returns float32 [crops, halves, *shape], uniform from 0 to 1; each call gives new
        numbers."""
        return self._tensor_of_draws(counter.uniform, shape)

    def normal(self, *shape: int) -> torch.Tensor:
        """Returns float32 [crops, halves, *shape], standard normal; each call gives new numbers."""
        return self._tensor_of_draws(counter.normal, shape)

    def _tensor_of_draws(
        self, numbers: Callable[..., np.ndarray], shape: tuple[int, ...]
    ) -> torch.Tensor:
        self.calls += 1
        half_S1, slot = np.arange(2)[:, None], np.arange(math.prod(shape))
        values = numbers(*self.key, half_S1, self.calls, slot).astype(np.float32)
        return to_device(values, self.device).view(*values.shape[:2], *shape)


class ExtraAugmentation:
    """Applies your own augmentations, `augment.extra: file.py:function`, to a batch on its device.
    They come after all other augmentations, with every backend.

        def dim(x_BSLT, draw, most=0.5):         # float32 millivolts; may be changed in place
            return x_BSLT * (1 - most * draw.uniform(1, 1))

    Masked and missing leads stay zeros. `draw` is a Draw: random numbers. The global generators of torch, numpy and
    Python are seeded from the run's seed, the step and the rank: a resumed run draws the same numbers;
    another number of ranks draws different ones, as with dropout."""

    def __init__(
        self,
        named_functions: Sequence[tuple[str, dict[str, Any]]],
        seed: int,
        rank: int,
        device: torch.device,
    ) -> None:
        """`named_functions`: for each function, (file.py:function, its options)."""
        self.seed, self.rank, self.draw = seed, rank, Draw(device)
        self.functions = []
        for name, options in named_functions:
            setting = f"augment.extra={name}{f' with {options}' if options else ''}"
            with blaming(setting):
                self.functions.append((setting, partial(load_plugin(name), **options)))

    def __call__(self, x_BSLT: torch.Tensor, places: Places, step: int) -> torch.Tensor:
        seed = int(counter.bits(self.seed, RandomStream.EXTRA, step, self.rank)) >> 1
        self.draw.manual_seed(seed)
        absent_BSL1 = ~x_BSLT.any(-1, keepdim=True)
        with seeded_generators(seed, x_BSLT.device):
            for number in range(len(self.functions)):
                x_BSLT = self._apply(number, x_BSLT, places)
                # not in place, as x_BSLT may be an expanded tensor
                x_BSLT = x_BSLT.masked_fill(absent_BSL1, 0.0)
        return x_BSLT

    def _apply(self, number: int, x_BSLT: torch.Tensor, places: Places) -> torch.Tensor:
        setting, function = self.functions[number]
        self.draw.set_crops(self.seed, places, number)
        with blaming(setting):
            return require_like(x_BSLT, function(x_BSLT, self.draw))

    def examine(self, leads: int) -> None:
        """Tries each function on noise. Raises ConfigError if it returns NaN or infinity, mixes
        the crops of a batch, or returns different outputs for the same batch."""
        device, generator = self.draw.device, torch.Generator().manual_seed(0)
        shape = len(UNCHANGED_B), 2, leads, HALF
        x_BSLT, other_BSLT = (
            (0.3 * torch.randn(shape, generator=generator)).to(device) for _ in range(2)
        )
        # lead 0 of crop 1 is all zeros, as if it were masked
        x_BSLT[1, :, 0] = other_BSLT[1, :, 0] = 0
        stays_B = torch.tensor(UNCHANGED_B, device=device)
        for number, (setting, _) in enumerate(self.functions):
            y_BSLT = self._repeatable_output(number, x_BSLT)
            with blaming(setting):
                if not y_BSLT.isfinite().all():
                    raise ConfigError("returns NaN or infinity for noise: return finite numbers")
                if not agree_within_rounding(y_BSLT, self._repeatable_output(number, x_BSLT)):
                    raise ConfigError(
                        "returns something else for the same batch in a second call: take random numbers from `draw` only"
                    )
                for kept_B in (stays_B, ~stays_B):
                    mixed_BSLT = torch.where(kept_B[:, None, None, None], x_BSLT, other_BSLT)
                    if not agree_within_rounding(
                        y_BSLT[kept_B], self._repeatable_output(number, mixed_BSLT)[kept_B]
                    ):
                        raise ConfigError(
                            "the output for a crop changes when other crops of the batch change: crops must be independent"
                        )

    def _repeatable_output(self, number: int, x_BSLT: torch.Tensor) -> torch.Tensor:
        """Returns the function's output for a batch; every call uses the same random numbers."""
        rows = np.arange(len(x_BSLT))
        places = Places(np.zeros_like(rows), rows, np.zeros_like(rows))
        self.draw.manual_seed(0)
        with seeded_generators(0, x_BSLT.device):
            y_BSLT = self._apply(number, x_BSLT.clone(), places)
        return y_BSLT.masked_fill(~x_BSLT.any(-1, keepdim=True), 0.0)


def agree_within_rounding(a_BSLT: torch.Tensor, b_BSLT: torch.Tensor) -> bool:
    """Returns True if two batches differ at most by rounding."""
    return bool(torch.isclose(a_BSLT, b_BSLT, rtol=0, atol=TOLERANCE_MV).all())


def require_like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns y. Raises ConfigError if the type, shape or device of y differs from that of x."""
    if (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device):
        return y
    difference = f"{list(y.shape)} {y.dtype} on {y.device}"
    raise ConfigError(
        f"{list(x.shape)} became {difference}: keep the batch's shape, type and device"
    )


class Upload:
    """Copies host memory to a GPU on a stream of its own, so that a copy does not wait for
    queued kernels. Call `wait` before writing to the copied host memory again."""

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
        # keeps the memory from being reused while kernels read it
        uploaded.record_stream(computing)
        return uploaded

    def wait(self) -> None:
        self.copied.synchronize()
