"""int16 microvolts -> float32 millivolts in two views -> augmentations, on any torch device.

    crops_BLT int16 [B, 12, 5000] -> x_BSLT float32 [B, S, L, 2500]

This is the reference for the other backends and the fast path on a CPU. `Augmenter` holds what is
the same for all batches; everything random is passed in as parameters (augment_draws), so any
process can reproduce a batch.

Missing leads are zeros in a crop and must stay zeros under every augmentation: `measured_leads`
finds them.
"""

import ctypes
import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.common import ALL, LEADS
from omnilead.engine.data import counter
from omnilead.engine.data.augment import (
    AUTHORS_NOISE,
    WAVES,
    AugmentConfig,
    Axis,
    Ops,
    augment,
    axis,
    formula,
    torch_ops,
)
from omnilead.engine.data.augment_draws import Params, draws, white, white_bank
from omnilead.engine.data.counter import RandomStream
from omnilead.engine.data.order import Places

FS_HZ, CROP, HALF = 500.0, 5000, 2500
MV_PER_UV = 1e-3
CHUNK, WAVES_CHUNK = (
    16,
    64,
)  # crops at a time on a CPU: 4 MB and 1 MB of float32; chosen among 4 to 32 and 4 to 64
Views = Literal["halves", "window"]
Tensors = dict[str, torch.Tensor]
MeasuredLeads = Callable[[Places], np.ndarray]  # bool [B, 12]
Write = Callable[
    [Sequence[int], Sequence[int]], None
]  # (places in a buffer of crops, positions in the batch)


@lru_cache(maxsize=4)  # every validation calls this
def missing_leads(dataset: Dataset) -> np.ndarray:
    """uint16 [crops]: one bit for each missing lead; bit 0 is lead I."""
    found = [np.zeros(0, np.uint16)]
    for part in dataset.parts(["missing_leads"]):
        missing, bits = part["missing_leads"], np.zeros(len(part), np.uint16)
        lead = pc.index_in(missing.flatten(), pa.array(LEADS)).fill_null(len(LEADS)).to_numpy()
        np.bitwise_or.at(
            bits, missing.value_parent_indices().to_numpy(), (1 << lead).astype(np.uint16)
        )
        found.append(bits)
    return np.concatenate(found)


def none_measured(dataset: Dataset, leads: Sequence[int]) -> np.ndarray:
    """bool [crops]: none of these leads was measured."""
    these = sum(1 << lead for lead in leads)
    none: np.ndarray = missing_leads(dataset) & these == these
    return none


def measured_leads(datasets: Sequence[Dataset]) -> MeasuredLeads | None:
    """A function that looks up the measured leads of a batch; None if no record has missing
    leads."""
    bits = [missing_leads(dataset) for dataset in datasets]

    def of(places: Places) -> np.ndarray:
        missing = np.zeros(len(places), np.uint16)
        for d, each in enumerate(bits):
            mine = places.dataset == d
            missing[mine] = each[places.row[mine]]
        measured: np.ndarray = missing[:, None] >> np.array(ALL) & 1 == 0
        return measured

    return of if any(each.any() for each in bits) else None


def crop_key(places: Places) -> np.ndarray:
    """The key of each crop for the counter-based generator: dataset and row in one integer."""
    key: np.ndarray = places.dataset.astype(np.int64) << 40 | places.row
    return key


def parameters(
    config: AugmentConfig,
    views: Views,
    seed: int,
    places: Places,
    measured: MeasuredLeads | None = None,
) -> Params:
    """Draw everything that is random about a batch."""
    crop = crop_key(places)
    p = draws(config, seed, places.epoch, crop, measured_BL=measured(places) if measured else None)
    if views == "window":
        p["start"] = (
            counter.uniform(seed, RandomStream.WINDOW, places.epoch, crop) * (HALF + 1)
        ).astype(np.int64)
    return p


def single_threaded() -> None:
    """Keep torch from starting OpenMP threads for this thread's operations: they would take cores
    from the training step."""
    # initialises the thread's setting first: torch would otherwise reset it at the first operation
    torch.get_num_threads()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).omp_set_num_threads(1)


@dataclass(frozen=True, eq=False)
class Augmenter:
    config: AugmentConfig
    views: Views  # two adjacent halves (CMSC), or one random window augmented twice (SimCLR, 3KG)
    seed: int
    device: torch.device
    ops: Ops = field(default_factory=torch_ops)

    @cached_property
    def time(self) -> Axis:
        return Axis(*(values.to(self.device) for values in axis(HALF, FS_HZ, self.ops)))

    @cached_property
    def bank(self) -> torch.Tensor:
        return torch.from_numpy(white_bank(self.seed)).to(self.device)

    @property
    def by_crop(self) -> bool:
        """Whether the fast writer applies: halves of all 12 leads, with only white noise and noise
        that all leads share."""
        c = self.config
        per_lead = (
            c.refits_limb_leads or c.per_lead or any(kind in AUTHORS_NOISE for kind in c.kinds)
        )
        return (
            self.views == "halves"
            and c.threekg is None
            and c.output_leads == ALL
            and not (c.kinds and per_lead)
        )

    def to_device(self, p: Params) -> Tensors:
        """Copy the parameters to the device asynchronously: a few kilobytes for a batch."""
        return {
            name: values.to(self.device, non_blocking=True)
            for name, values in self.pinned(p).items()
        }

    def pinned(self, p: Params) -> Tensors:
        tensors = {name: torch.from_numpy(values) for name, values in p.items()}
        return (
            {name: values.pin_memory() for name, values in tensors.items()}
            if self.device.type == "cuda"
            else tensors
        )

    def __call__(self, crops_BLT: torch.Tensor, p: Tensors) -> torch.Tensor:
        x = self.split(crops_BLT, p.get("start")).float()
        if "emg_amplitude" in p:
            p = p | {"white": white(self.bank, p["white_start"], HALF)}
        x = cast(torch.Tensor, augment(x.mul_(MV_PER_UV), p, self.config, self.time, self.ops))
        return (
            x if x.shape[1] == 2 else x.repeat(1, 2, 1, 1)
        )  # without augmentation, the window is repeated as two views

    def writer(self, p: Tensors, out_BSLT: torch.Tensor) -> Callable[[torch.Tensor], Write]:
        """For a CPU: writer(p, out)(crops)(places, positions) writes a few augmented crops to
        their positions in `out`. Five times faster than a whole batch at once, where page faults
        take most of the time."""
        if self.by_crop:
            return self._crop_writer(p, out_BSLT)

        def of(crops_BLT: torch.Tensor) -> Write:
            def write(places: Sequence[int], positions: Sequence[int]) -> None:
                index = torch.tensor(positions)
                q = {name: values.index_select(0, index) for name, values in p.items()}
                whole = len(places) == len(crops_BLT)
                crops = crops_BLT if whole else crops_BLT.index_select(0, torch.tensor(places))
                out_BSLT.index_copy_(0, index, self(crops, q))

            return write

        return of

    def _crop_writer(self, p: Tensors, out_BSLT: torch.Tensor) -> Callable[[torch.Tensor], Write]:
        """The fast writer: what the leads of a crop share is computed here first, for many crops at
        once."""
        keep = p.get("keep", torch.ones(1)).expand(len(out_BSLT), 2, len(ALL), 1)
        scales, keeps, outs = (keep * MV_PER_UV).unbind(), keep.unbind(), out_BSLT.unbind()
        shared = [formula(kind) for kind in self.config.kinds if formula(kind) != "emg"]
        waves = self._waves(p, shared, len(out_BSLT)) if shared else ()
        emg = (p["emg_amplitude"] * keep).unbind() if "emg_amplitude" in p else ()
        bank, starts = (self.bank, p["white_start"].unbind()) if emg else (None, ())

        def of(crops_BLT: torch.Tensor) -> Write:
            halves: Any = self.split(crops_BLT)
            halves = halves.unbind() if len(halves) == 1 else halves

            def write(places: Sequence[int], positions: Sequence[int]) -> None:
                for place, position in zip(places, positions, strict=True):
                    out_SLT = outs[position]
                    torch.mul(halves[place], scales[position], out=out_SLT)
                    if waves:
                        out_SLT.addcmul_(keeps[position], waves[position])
                    if emg:
                        out_SLT.addcmul_(emg[position], white(bank, starts[position], HALF))

            return write

        return of

    def _waves(self, p: Tensors, kinds: Sequence[str], crops: int) -> tuple[torch.Tensor, ...]:
        """The sum of these kinds of noise for each crop, [2, 1, 2500]."""
        waves = torch.empty(crops, 2, 1, HALF)
        for part in (slice(at, at + WAVES_CHUNK) for at in range(0, crops, WAVES_CHUNK)):
            q = {name: values[part] for name, values in p.items()}
            products = (WAVES[kind](q, self.time, self.config, self.ops) for kind in kinds)
            waves[part] = functools.reduce(operator.add, (gain * wave for gain, wave in products))
        return waves.unbind()

    def split(self, crops_BLT: torch.Tensor, start_B: torch.Tensor | None = None) -> torch.Tensor:
        """The two halves (without copying), or one window, which `augment` turns into two views."""
        if start_B is None:
            return crops_BLT.view(*crops_BLT.shape[:2], 2, HALF).transpose(1, 2)
        index = start_B[:, None, None] + torch.arange(HALF, device=crops_BLT.device)
        return crops_BLT.gather(2, index.expand(-1, crops_BLT.shape[1], -1))[:, None]
