"""int16 microvolts -> float32 millivolts in views -> augmentations, a whole batch at a time, on any torch device.

    crops_BLT int16 [B, 12, 5000] -> x_BSLT float32 [B, S, L, 2500]

The reference for the other backends and the fast path on a CPU. `Augmenter` holds what does not change from batch to batch;
everything that is drawn comes in as parameters (augment_draws), so the same batch can be made again anywhere.
"""

import ctypes
import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, cast

import numpy as np
import torch

from data_tools.cli import keep_freed_memory
from engine.common import ALL
from engine.data import counter
from engine.data.augment import AUTHORS_NOISE, WAVES, AugmentConfig, Axis, Ops, augment, axis, formula, torch_ops
from engine.data.augment_draws import Params, draws, white, white_bank
from engine.data.counter import RandomStream
from engine.data.missing_leads import Measured
from engine.data.order import Places

FS_HZ, CROP, HALF = 500.0, 5000, 2500
MV_PER_UV = 1e-3
CHUNK, WAVES_CHUNK = 16, 64  # crops, 4 MB of float32 and 1: measured 4 to 32, 4 to 64
Views = Literal["halves", "window"]
MakeCrop = Callable[[int, torch.Tensor, torch.Tensor], None]  # position in the batch, halves_SLT int16, out_SLT


def crop_key(places: Places) -> np.ndarray:
    """What names a crop to the counter-based generator: its dataset and its row."""
    key: np.ndarray = places.dataset.astype(np.int64) << 40 | places.row
    return key


def parameters(config: AugmentConfig, views: Views, seed: int, places: Places, measured: Measured | None = None) -> Params:
    """All that is random about a batch, and what none of it may touch."""
    crop = crop_key(places)
    p = draws(config, seed, places.epoch, crop, measured_BL=measured(places) if measured else None)
    if views == "window":
        p["start"] = (counter.uniform(seed, RandomStream.WINDOW, places.epoch, crop) * (HALF + 1)).astype(np.int64)
    return p


def alone() -> None:
    """torch's operations in this thread open no team of OpenMP threads: beside a training step they would take its cores."""
    torch.get_num_threads()  # torch writes the process's number into a thread at its first operation
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).omp_set_num_threads(1)


@dataclass(frozen=True, eq=False)
class Augmenter:
    config: AugmentConfig
    views: Views  # the two adjacent halves (CMSC), or one random window that is augmented twice (SimCLR, 3KG)
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
        """The halves, all leads, and of noise what they have alike or white noise: a crop is made in a few passes over it."""
        c = self.config
        plain = self.views == "halves" and c.threekg is None and c.output_leads == ALL
        of_leads = c.refits_limb_leads or c.per_lead or any(kind in AUTHORS_NOISE for kind in c.kinds)
        return plain and not (c.kinds and of_leads)

    def to_device(self, p: Params) -> dict[str, torch.Tensor]:
        """A few kilobytes a batch, in one asynchronous copy each."""
        return {name: values.to(self.device, non_blocking=True) for name, values in self.pinned(p).items()}

    def pinned(self, p: Params) -> dict[str, torch.Tensor]:
        tensors = {name: torch.from_numpy(values) for name, values in p.items()}
        return {name: values.pin_memory() for name, values in tensors.items()} if self.device.type == "cuda" else tensors

    def __call__(self, crops_BLT: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.split(crops_BLT, p.get("start")).float()
        if "emg_amplitude" in p:
            p = p | {"white": white(self.bank, p["white_start"], HALF)}
        x = cast(torch.Tensor, augment(x.mul_(MV_PER_UV), p, self.config, self.time, self.ops))
        return x if x.shape[1] == 2 else x.repeat(1, 2, 1, 1)  # a window that nothing was done to is still two views

    def into(
        self,
        crops_BLT: torch.Tensor,
        p: dict[str, torch.Tensor],
        out_BSLT: torch.Tensor,
        index_B: torch.Tensor | None = None,  # which crops; None: all
    ) -> torch.Tensor:
        """The same for a CPU: a few crops at a time, so that what lies between two passes stays in its cache and is not asked
        of the kernel anew for every batch. Five times faster than a whole batch at once, page faults being most of its cost."""
        keep_freed_memory()
        if self.by_crop:
            make, halves_BSLT, outs = self.crop_maker(p, len(out_BSLT)), self.split(crops_BLT), out_BSLT.unbind()
            for position, crop in enumerate(range(len(outs)) if index_B is None else index_B.tolist()):
                make(position, halves_BSLT[crop], outs[position])
            return out_BSLT
        for at in range(0, len(out_BSLT), CHUNK):
            part = slice(at, at + CHUNK)
            crops = crops_BLT[part] if index_B is None else crops_BLT.index_select(0, index_B[part])
            out_BSLT[part] = self(crops, {name: values[part] for name, values in p.items()})
        return out_BSLT

    def crop_maker(self, p: dict[str, torch.Tensor], crops: int) -> MakeCrop:
        """Where `by_crop`, the same for one of so many crops, while it is in a core's cache. What its leads have alike is made
        here, for many crops at once."""
        keep = p.get("keep", torch.ones(1)).expand(crops, 2, len(ALL), 1)
        scales, keeps = (keep * MV_PER_UV).unbind(), keep.unbind()
        alike = [formula(kind) for kind in self.config.kinds if formula(kind) != "emg"]
        waves = self._waves(p, alike, crops) if alike else ()
        emg = (p["emg_amplitude"] * keep).unbind() if "emg_amplitude" in p else ()
        bank, starts = (self.bank, p["white_start"].unbind()) if emg else (None, ())

        def make(position: int, halves_SLT: torch.Tensor, out_SLT: torch.Tensor) -> None:
            torch.mul(halves_SLT, scales[position], out=out_SLT)
            if waves:
                out_SLT.addcmul_(keeps[position], waves[position])
            if emg:
                out_SLT.addcmul_(emg[position], white(bank, starts[position], HALF))

        return make

    def _waves(self, p: dict[str, torch.Tensor], kinds: Sequence[str], crops: int) -> tuple[torch.Tensor, ...]:
        """The sum of these kinds for each crop, [2, 1, 2500]."""
        waves = torch.empty(crops, 2, 1, HALF)
        for part in (slice(at, at + WAVES_CHUNK) for at in range(0, crops, WAVES_CHUNK)):
            q = {name: values[part] for name, values in p.items()}
            products = (WAVES[kind](q, self.time, self.config, self.ops) for kind in kinds)
            waves[part] = functools.reduce(operator.add, (gain * wave for gain, wave in products))
        return waves.unbind()

    def split(self, crops_BLT: torch.Tensor, start_B: torch.Tensor | None = None) -> torch.Tensor:
        """The two halves as views of one copy, or the same window once: `augment` makes two of it."""
        if start_B is None:
            return crops_BLT.view(*crops_BLT.shape[:2], 2, HALF).transpose(1, 2)
        index = start_B[:, None, None] + torch.arange(HALF, device=crops_BLT.device)
        return crops_BLT.gather(2, index.expand(-1, crops_BLT.shape[1], -1))[:, None]
