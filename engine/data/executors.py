"""Three ways to make a batch of planned crops: torch on a CPU, torch on a GPU, and DALI.

    executor = TorchOnGpu(augmenter, reader, meter, crops)
    executor.buffers(2)                     memory to read into, again and again
    executor.read(plan, buffer)             in the thread that reads ahead
    executor.model_inputs(batches)          in the thread that trains: each batch and its x_BSLT

They differ in where crops are read to and in what is left to do then; the loader does the rest.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from omnilead.data_tools.io.terminal import keep_freed_memory

from . import dali
from .augmentations.stage import Params
from .augmenter import Augmenter, Plan, Upload
from .config import HALF
from .order import Places
from .reader import CropReader, CropSink, ReadReport
from .stage_timer import StageTimer
from .writer import crop_writer

# On a CPU, small batches are read together, up to this many crops. The crops of a read then lie
# closer together in the files, which saves a third of the time with batches of 64 crops
CROPS_PER_READ = 256


@dataclass(frozen=True, eq=False)
class ReadCrops:
    """One or more batches that have been read."""

    plan: Plan  # plan of the crops that were read; some may be replacements of bad crops
    buffer: Any
    report: ReadReport

    def batch(self, crops: slice) -> "ReadCrops":
        """Returns the batch that consists of a slice of these crops. Raises DatasetError if one
        of its crops could not be read."""
        plan, report = self.plan.plan_of_part(crops), self.report.report_of_batch(crops)
        return ReadCrops(plan, self.buffer[crops], report)


@dataclass(frozen=True, eq=False)
class Executor(ABC):
    """Base class: reads planned crops and makes batches of them."""

    augmenter: Augmenter
    reader: CropReader
    meter: StageTimer
    crops: int  # crops in a batch
    # True: TorchOnCpu may overwrite a batch when the next one is requested
    reuse_batches: bool = False

    # number of buffers that may still be read when the next batch is requested
    batches_in_use: ClassVar = 1

    @property
    def batches_per_read(self) -> int:
        """Returns the number of batches that are read at a time."""
        return 1

    def buffers(self, ahead: int) -> Sequence[Any]:
        """Returns the buffers to read into: enough for `ahead` batches, and `batches_in_use` more
        buffers."""
        return self.reader.buffers(ahead + self.batches_in_use, self.crops)

    def read(self, plan: Plan, buffer: Any) -> ReadCrops:
        """Reads the crops of a plan. TorchOnCpu also augments them."""
        output = self.read_target(plan, buffer)
        with self.meter.timed("read"):
            report = self.reader.read_to(plan.places, output)
        if report.skipped:  # the random parameters of a replacement depend on its row
            plan = self.augmenter.plan(replace(plan.places, row=report.row))
        return ReadCrops(plan, buffer, report)

    def read_target(self, plan: Plan, buffer: Any) -> np.ndarray | CropSink:
        """Returns the array or CropSink to which the reader gives the crops."""
        crops: np.ndarray = buffer
        return crops

    @abstractmethod
    def model_inputs(
        self, batches: Iterator[ReadCrops]
    ) -> Generator[tuple[ReadCrops, Tensor], None, None]:
        """Yields (batch, x_BSLT) for each batch that was read; x_BSLT is the model's input."""


class TorchOnCpu(Executor):
    """The threads that read crops also augment them, while the crops are in the core's cache."""

    @property
    def batches_per_read(self) -> int:
        # From s3://, one batch is read at a time, so that it does not wait for the shards of the
        # next batch
        return 1 if self.reader.staging else max(1, CROPS_PER_READ // self.crops)

    def buffers(self, ahead: int) -> Sequence[Tensor]:
        keep_freed_memory()
        shape = (
            self.batches_per_read * self.crops,
            2,
            len(self.augmenter.config.output_leads),
            HALF,
        )
        count = -(-ahead // self.batches_per_read) + self.batches_in_use
        return [torch.empty(shape) for _ in range(count)]

    def read_target(self, plan: Plan, buffer: Tensor) -> CropSink:
        with self.meter.timed("augment"):
            return crop_writer(self.augmenter, plan, buffer, self.meter)

    def model_inputs(
        self, batches: Iterator[ReadCrops]
    ) -> Generator[tuple[ReadCrops, Tensor], None, None]:
        for batch in batches:
            yield batch, batch.buffer if self.reuse_batches else batch.buffer.clone()


class TorchOnGpu(Executor):
    """Reads crops into pinned memory, and augments them on the GPU."""

    def model_inputs(
        self, batches: Iterator[ReadCrops]
    ) -> Generator[tuple[ReadCrops, Tensor], None, None]:
        upload = Upload(self.augmenter.device)
        for batch in batches:
            with self.meter.timed("augment"):
                p = self.augmenter.to_device(batch.plan.parameters)
                x_BSLT = self.augmenter(upload(torch.from_numpy(batch.buffer)), p)
            yield batch, x_BSLT
            with self.meter.timed("read_wait"):
                # waits here, because the request for the next batch returns this batch's buffer to
                # the reader
                upload.wait()


class Dali(Executor):
    """Augments with DALI. DALI prefetches, so each batch is kept until DALI has returned its
    x_BSLT."""

    batches_in_use = dali.BATCHES_IN_USE

    def model_inputs(
        self, batches: Iterator[ReadCrops]
    ) -> Generator[tuple[ReadCrops, Tensor], None, None]:
        in_dali: dict[int, ReadCrops] = {}
        example = self.augmenter.draw_parameters(Places(*np.zeros((3, 1), np.int64)))
        with closing(_dali_inputs(batches, in_dali)) as feed:
            pipeline = dali.Pipeline(self.augmenter, feed, self.crops, example, self.reader.threads)
            with closing(pipeline):
                while True:
                    with self.meter.timed("gpu_wait"):
                        pipeline.release()
                    with self.meter.timed("augment", without="read_wait"):
                        position, x_BSLT = pipeline.next_batch()
                        batch = in_dali.pop(position)
                        self.augmenter.add_white_noise(x_BSLT, batch.plan.parameters)
                    yield batch, x_BSLT


def _dali_inputs(
    batches: Iterator[ReadCrops], in_dali: dict[int, ReadCrops]
) -> Generator[tuple[int, np.ndarray, Params], None, None]:
    for position, batch in enumerate(batches):
        in_dali[position] = batch
        yield position, batch.buffer, batch.plan.parameters
