"""Writes crops into a batch on a CPU, augmented: the threads that read them do it, a few at a time, while
they are in the core's cache. Five times faster than a whole batch at once, where page faults take most
of the time.

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

CROPS_PER_WRITE = 16  # crops augmented at a time: 4 MB of float32; the fastest of 4 to 32
CROPS_PER_WAVE = 64  # crops whose common noise is made at a time: 1 MB; the fastest of 4 to 64


class CropWriter:
    """Writes crops with any augmentation, as many at a time as fit in the cache."""

    crops_per_write = CROPS_PER_WRITE

    def __init__(
        self, augmenter: Augmenter, plan: Plan, out_BSLT: Tensor, meter: StageTimer
    ) -> None:
        self.augmenter, self.plan, self.out_BSLT, self.meter = augmenter, plan, out_BSLT, meter
        self.planned_rows = (
            plan.places.row.tolist()
        )  # Python's integers compare faster than numpy's
        self.parameters = augmenter.to_device(plan.parameters)

    def write(self, crops_BLT: Tensor, positions: list[int], rows: list[int]) -> None:
        """Writes the first crops of a buffer to these positions of the batch."""
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
        """Writes a replacement of a bad crop. Its parameters are drawn now, as they depend on the
        row."""
        one = slice(position, position + 1)
        plan = self.augmenter.plan(replace(self.plan.places[one], row=np.array([row])))
        writer = type(self)(self.augmenter, plan, self.out_BSLT[one], self.meter)
        writer._augment(crops_BLT, [0])


class SingleCropWriter(CropWriter):
    """Augments each crop in three passes without scratch memory: for halves of all 12 leads, if all stages
    fit (Stage.fits_single_crop_writer). Computes what does not depend on the crop once for the batch:
    numpy and torch calls for one crop cost more than their arithmetic."""

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
        out_SLT.copy_(halves_SLT).mul_(self.scale[i])  # torch.mul takes up to a fifth longer
        if self.waves:
            out_SLT.addcmul_(self.keep[i], self.waves[i])
        for gain, start in self.white:
            out_SLT.addcmul_(gain[i], self.ops.white_noise(start[i]))


def crop_writer(
    augmenter: Augmenter, plan: Plan, out_BSLT: Tensor, meter: StageTimer
) -> CropWriter:
    """The fastest writer that supports all stages."""
    by_crop = augmenter.views == "halves" and all(
        stage.fits_single_crop_writer for stage in augmenter.stages
    )
    kind = SingleCropWriter if by_crop else CropWriter
    return kind(augmenter, plan, out_BSLT, meter)


def _shared_noise(stages: Sequence[Noise], p: Tensors, ops: TorchOps, crops: int) -> Tensor:
    """[B, 2, 1, 2500]: for each crop, the sum of the noises that all leads share."""
    waves = torch.empty(crops, 2, 1, HALF)
    for start in range(0, crops, CROPS_PER_WAVE):
        part = slice(start, start + CROPS_PER_WAVE)
        chunk = {name: values[part] for name, values in p.items()}
        waves[part] = ops.sum([stage.wave(chunk, ops) for stage in stages])
    return waves
