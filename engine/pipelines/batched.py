"""int16 microvolts -> float32 millivolts in views -> augmentations, a whole batch at a time, on any torch device.

    crops_BLT int16 [B, 12, 5000] -> x_BSLT float32 [B, S, L, 2500]

The reference for the other backends and the fast path on a CPU. `Augmenter` holds what does not change from batch to batch;
everything that is drawn comes in as parameters (augment_draws), so the same batch can be made again anywhere.
"""

import ctypes
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, cast

import numpy as np
import torch

from data_tools.memory import keep_freed_memory
from engine.pipelines import counter
from engine.pipelines.augment import AugmentConfig, Axis, Ops, augment, axis, torch_ops
from engine.pipelines.augment_draws import Params, draws, white, white_bank
from engine.pipelines.counter import Stream
from engine.pipelines.leads import ALL
from engine.pipelines.order import Places

FS_HZ, CROP, HALF = 500.0, 5000, 2500
MV_PER_UV = 1e-3
CHUNK = 16  # crops, 4 MB of float32: measured 4 to 32
Views = Literal["halves", "window"]


def crop_key(places: Places) -> np.ndarray:
    """What names a crop to the counter-based generator: its dataset and its row."""
    key: np.ndarray = places.dataset.astype(np.int64) << 40 | places.row
    return key


def parameters(config: AugmentConfig, views: Views, seed: int, places: Places) -> Params:
    """All that is random about a batch."""
    crop = crop_key(places)
    p = draws(config, seed, places.epoch, crop, views=2)
    if views == "window":
        p["start"] = (counter.uniform(seed, Stream.WINDOW, places.epoch, crop) * (HALF + 1)).astype(np.int64)
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
    def only_scales(self) -> bool:
        """Neither noise nor 3KG: all that is left is a factor for each lead, its mask among them."""
        return self.config.threekg is None and not self.config.kinds and self.config.output_leads == ALL

    def to_device(self, p: Params) -> dict[str, torch.Tensor]:
        """A few kilobytes a batch, in one asynchronous copy each."""
        return {name: values.to(self.device, non_blocking=True) for name, values in self.pinned(p).items()}

    def pinned(self, p: Params) -> dict[str, torch.Tensor]:
        tensors = {name: torch.from_numpy(values) for name, values in p.items()}
        return {name: values.pin_memory() for name, values in tensors.items()} if self.device.type == "cuda" else tensors

    def __call__(self, crops_BLT: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.split(crops_BLT, p.get("start")).float()
        if self.only_scales and x.shape[1] == 2:
            return x.mul_(factor(p))  # one pass instead of two
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
        for at in range(0, len(out_BSLT), CHUNK):
            part = slice(at, at + CHUNK)
            crops = crops_BLT[part] if index_B is None else crops_BLT.index_select(0, index_B[part])
            q = {name: values[part] for name, values in p.items()}
            out = out_BSLT[part]
            if self.only_scales:  # straight into its place: two passes less
                torch.mul(self.split(crops, q.get("start")).expand_as(out), factor(q), out=out)
            else:
                out[:] = self(crops, q)
        return out_BSLT

    def split(self, crops_BLT: torch.Tensor, start_B: torch.Tensor | None = None) -> torch.Tensor:
        """The two halves as views of one copy, or the same window once: `augment` makes two of it."""
        if start_B is None:
            return crops_BLT.view(*crops_BLT.shape[:2], 2, HALF).transpose(1, 2)
        index = start_B[:, None, None] + torch.arange(HALF, device=crops_BLT.device)
        return crops_BLT.gather(2, index.expand(-1, crops_BLT.shape[1], -1))[:, None]


def factor(p: dict[str, torch.Tensor]) -> torch.Tensor | float:
    """To millivolts, and a masked lead to zero: [B, S, L, 1], or one number."""
    return p["keep"] * MV_PER_UV if "keep" in p else MV_PER_UV
