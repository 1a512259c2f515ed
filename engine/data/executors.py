"""Three ways to make a batch of planned crops: torch on a CPU, torch on a GPU, and DALI.

    executor = TorchOnGpu(augmenter, reader, meter, crops)
    executor.buffers(2)                     memory to read into, again and again
    executor.read(plan, buffer)             in the thread that reads ahead
    executor.augment(batches)               in the thread that trains: each batch and its x_BSLT

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

# on a CPU, small batches are read together, so that reads lie closer: a third less time at 64 crops
CROPS_PER_READ = 256


@dataclass(frozen=True, eq=False)
class ReadCrops:
    """One or more batches that have been read."""

    plan: Plan  # plan of the crops that were read; some may be replacements
    buffer: Any
    report: ReadReport

    def batch(self, crops: slice) -> "ReadCrops":
        """Returns one of the batches. Raises if it has a crop that could not be read."""
        plan, report = self.plan.plan_of(crops), self.report.report_on(crops)
        return ReadCrops(plan, self.buffer[crops], report)


@dataclass(frozen=True, eq=False)
class Executor(ABC):
    """Reads planned crops and makes batches of them."""

    augmenter: Augmenter
    reader: CropReader
    meter: StageTimer
    crops: int  # crops in a batch
    reuse_batches: bool = False  # TorchOnCpu may reuse them: see Loader

    batches_in_use: ClassVar = 1  # buffers that may still be read when the next batch is asked for

    @property
    def batches_per_read(self) -> int:
        """The number of batches that are read at a time."""
        return 1

    def buffers(self, ahead: int) -> Sequence[Any]:
        """Memory to read `ahead` batches into, beside those in use."""
        return self.reader.buffers(ahead + self.batches_in_use, self.crops)

    def read(self, plan: Plan, buffer: Any) -> ReadCrops:
        """Read a plan's crops, and with torch on a CPU augment them."""
        output = self.read_target(plan, buffer)
        with self.meter.timed("read"):
            report = self.reader.read_to(plan.places, output)
        if report.skipped:  # what is random about a replacement depends on its row
            plan = self.augmenter.plan(replace(plan.places, row=report.row))
        return ReadCrops(plan, buffer, report)

    def read_target(self, plan: Plan, buffer: Any) -> np.ndarray | CropSink:
        """Returns what the reader writes the crops to."""
        crops: np.ndarray = buffer
        return crops

    @abstractmethod
    def augment(
        self, batches: Iterator[ReadCrops]
    ) -> Generator[tuple[ReadCrops, Tensor], None, None]:
        """Yields (batch, the model's input made of it)."""


class TorchOnCpu(Executor):
    """The threads that read crops also turn them into tensors, while they are in the core's cache."""

    @property
    def batches_per_read(self) -> int:
        # from s3://, one batch at a time, so that a batch does not wait for the next one's shards
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

    def augment(
        self, batches: Iterator[ReadCrops]
    ) -> Generator[tuple[ReadCrops, Tensor], None, None]:
        for batch in batches:
            yield batch, batch.buffer if self.reuse_batches else batch.buffer.clone()


class TorchOnGpu(Executor):
    """Crops are read into pinned memory, and augmented on the GPU."""

    def augment(
        self, batches: Iterator[ReadCrops]
    ) -> Generator[tuple[ReadCrops, Tensor], None, None]:
        upload = Upload(self.augmenter.device)
        for batch in batches:
            with self.meter.timed("augment"):
                p = self.augmenter.to_device(batch.plan.parameters)
                x_BSLT = self.augmenter(upload(torch.from_numpy(batch.buffer)), p)
            yield batch, x_BSLT
            with self.meter.timed("read_wait"):
                # before the next batch is asked for, which returns this one's buffer to the reader
                upload.wait()


class Dali(Executor):
    """DALI prefetches, so a batch is kept until DALI returns it."""

    batches_in_use = dali.BATCHES_IN_USE

    def augment(
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
