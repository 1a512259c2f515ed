"""Augments crops on a CPU and writes them into a batch. The threads that read crops do this, a few
crops at a time, while these are in the core's cache. That is five times faster than augmenting a
whole batch at once, where page faults take most of the time.

    writer = crop_writer(augmenter, plan, out_BSLT, meter)       # once for a batch, for all threads
    writer.write(crops_BLT, positions, rows)                     # engine.data.reader.CropSink
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..settings.leads import ALL_LEADS
from .augmentations.stage import Noise, Stage
from .augmenter import Augmenter, Plan, Tensors
from .config import HALF, MV_PER_UV
from .stage_timer import StageTimer
from .torch_ops import TorchOps

# number of crops augmented at a time: 4 MB of float32; the fastest number from 4 to 32
CROPS_PER_WRITE = 16
# number of crops whose shared noise is made at a time: 1 MB; the fastest number from 4 to 64
CROPS_PER_WAVE = 64


class CropWriter:
    """Augments crops with any stages, and writes them into a batch. Takes as many crops at a
    time as fit in the cache."""

    crops_per_write = CROPS_PER_WRITE

    def __init__(
        self, augmenter: Augmenter, plan: Plan, out_BSLT: Tensor, meter: StageTimer
    ) -> None:
        self.augmenter, self.plan, self.out_BSLT, self.meter = augmenter, plan, out_BSLT, meter
        # Python's integers compare faster than numpy's
        self.planned_rows = plan.places.row.tolist()
        self.parameters = augmenter.to_device(plan.parameters)

    def write(self, crops_BLT: Tensor, positions: list[int], rows: list[int]) -> None:
        """Augments the first crops of a buffer, and writes them to these positions of the batch."""
        began = time.perf_counter()
        if rows[0] == self.planned_rows[positions[0]]:
            self._augment(crops_BLT, positions)
        else:
            self._write_replacement(crops_BLT, positions[0], rows[0])
        self.meter.add("augment", time.perf_counter() - began)

    def _augment(self, crops_BLT: Tensor, positions: list[int]) -> None:
        index = torch.tensor(positions)
        p = {name: values.index_select(0, index) for name, values in self.parameters.items()}
        x_BSLT = self.augmenter(crops_BLT[: len(positions)], p)
        self.out_BSLT.index_copy_(0, index, x_BSLT)

    def _write_replacement(self, crops_BLT: Tensor, position: int, row: int) -> None:
        """Augments and writes the replacement of a bad crop. Its random parameters are drawn
        only now, because they depend on its row."""
        one = slice(position, position + 1)
        plan = self.augmenter.plan(replace(self.plan.places[one], row=np.array([row])))
        writer = type(self)(self.augmenter, plan, self.out_BSLT[one], self.meter)
        writer._augment(crops_BLT, [0])


class SingleCropWriter(CropWriter):
    """Augments each crop in three passes without scratch memory; for noise from the bank of white
    noise, also copies a slice of the bank for each lead, and adds these in one more pass.
    `crop_writer` chooses it for halves of all 12 leads if all stages support it
    (Stage.fits_single_crop_writer). All else that does not depend on the signals is computed once
    for the whole batch, because numpy and torch calls for one crop cost more than their
    arithmetic."""

    crops_per_write = 1

    def __init__(
        self, augmenter: Augmenter, plan: Plan, out_BSLT: Tensor, meter: StageTimer
    ) -> None:
        super().__init__(augmenter, plan, out_BSLT, meter)
        crops, self.ops = len(out_BSLT), augmenter.ops
        keep = torch.ones(crops, 2, len(ALL_LEADS), 1)
        shared: list[Noise] = []
        from_bank: list[Stage] = []
        for stage in augmenter.stages:
            if stage.bank_parameters:
                from_bank.append(stage)
            elif isinstance(stage, Noise):
                shared.append(stage)
            else:
                keep = stage.apply(keep, self.parameters, self.ops)
        self.out = out_BSLT.unbind()
        self.keep = keep.unbind()
        self.scale = (keep * MV_PER_UV).unbind()
        self.waves = (
            _shared_noise(shared, self.parameters, self.ops, crops).unbind() if shared else None
        )
        self.white = []
        for stage in from_bank:
            gain, start = (self.parameters[name] for name in stage.bank_parameters)
            self.white.append(((gain * keep).unbind(), start.unbind()))

    def _augment(self, crops_BLT: Tensor, positions: list[int]) -> None:
        (i,) = positions
        out_SLT = self.out[i]
        halves_SLT = crops_BLT.view(len(ALL_LEADS), 2, HALF).transpose(0, 1)
        # in two steps, because one torch.mul would take up to a fifth longer
        out_SLT.copy_(halves_SLT).mul_(self.scale[i])
        if self.waves:
            out_SLT.addcmul_(self.keep[i], self.waves[i])
        for gain, start in self.white:
            out_SLT.addcmul_(gain[i], self.ops.white_noise(start[i]))


def crop_writer(
    augmenter: Augmenter, plan: Plan, out_BSLT: Tensor, meter: StageTimer
) -> CropWriter:
    """Returns the fastest writer that supports all stages of `augmenter`."""
    by_crop = augmenter.views == "halves" and all(
        stage.fits_single_crop_writer for stage in augmenter.stages
    )
    kind = SingleCropWriter if by_crop else CropWriter
    return kind(augmenter, plan, out_BSLT, meter)


def _shared_noise(stages: Sequence[Noise], p: Tensors, ops: TorchOps, crops: int) -> Tensor:
    """Returns [B, 2, 1, 2500]: for each half of each crop, the sum of the noises that all leads
    share."""
    waves = torch.empty(crops, 2, 1, HALF)
    for start in range(0, crops, CROPS_PER_WAVE):
        part = slice(start, start + CROPS_PER_WAVE)
        chunk = {name: values[part] for name, values in p.items()}
        waves[part] = ops.sum([stage.wave(chunk, ops) for stage in stages])
    return waves
