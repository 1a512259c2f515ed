"""Crops in device memory: a whole dataset (pipeline.backend=resident), and copies to and from a GPU
that overlap computing."""

from collections.abc import Callable

import numpy as np
import torch

from omnilead.data_tools.dataset import CROP_BYTES, CROP_SHAPE
from omnilead.engine.common import ConfigError
from omnilead.engine.data.augmenter import CHUNK, Augmenter, Tensors
from omnilead.engine.data.order import Order, Places
from omnilead.engine.data.reader import BadCrop, CropReader, Report

READ_CROPS = 1024  # at a time


class Resident:
    """Keeps all rows of an order in device memory; each is read and verified once. On a GPU, one
    compiled kernel makes a batch: it gathers, scales, adds noise and masks."""

    def __init__(
        self, order: Order, reader: CropReader, augmenter: Augmenter, spare_bytes: float = 0
    ) -> None:
        """`spare_bytes`: memory that training needs besides the crops."""
        self.augmenter, self.numbers = (
            augmenter,
            [rows.row(np.arange(len(rows))) for rows in order.rows],
        )
        self.offset = np.cumsum([0, *map(len, self.numbers)])
        needed = int(self.offset[-1]) * CROP_BYTES
        free = (
            torch.cuda.mem_get_info(augmenter.device)[0]
            if augmenter.device.type == "cuda"
            else None
        )
        if free is not None and needed + spare_bytes > free:
            raise ConfigError(
                f"pipeline.backend=resident: {needed / 1e9:.1f} GB of crops and about "
                f"{spare_bytes / 1e9:.1f} GB for a step "
                f"do not fit in the GPU's free {free / 1e9:.1f} GB: use pipeline.backend=dali, or "
                "lower train.micro_batch"
            )
        self.crops = torch.empty(
            (int(self.offset[-1]), *CROP_SHAPE), dtype=torch.int16, device=augmenter.device
        )
        self.row = np.concatenate(
            self.numbers
        )  # with on_corrupt=skip, a bad row is replaced by another
        self.reasons: dict[tuple[int, int], str] = {}  # why a (dataset, row) is bad
        dataset = np.repeat(np.arange(len(self.numbers)), np.diff(self.offset))
        buffer = np.empty((READ_CROPS, *CROP_SHAPE), np.int16)
        for part in (slice(at, at + READ_CROPS) for at in range(0, len(dataset), READ_CROPS)):
            crops = buffer[: len(dataset[part])]
            report = reader.read(Places(dataset[part], self.row[part], dataset[part]), crops)
            self.row[part] = report.row
            self.reasons |= {(bad.dataset, bad.row): bad.reason for bad in report.skipped}
            self.crops[part] = torch.from_numpy(crops)
        self._make = self.compiled() if augmenter.device.type == "cuda" else self._eager

    def find(self, places: Places) -> tuple[np.ndarray, Report]:
        """The places of a batch's crops in memory, and their rows."""
        index = np.empty(len(places), np.int64)
        for d, numbers in enumerate(self.numbers):
            mine = places.dataset == d
            index[mine] = self.offset[d] + np.searchsorted(numbers, places.row[mine])
        row = self.row[index]
        replaced = [
            (int(i), int(places.dataset[i]), int(places.row[i]))
            for i in np.flatnonzero(row != places.row)
        ]
        return index, Report(
            row, tuple(BadCrop(i, d, asked, self.reasons[d, asked]) for i, d, asked in replaced)
        )

    def batch(self, p: Tensors) -> torch.Tensor:
        p = {name: values.to(self.crops.device, non_blocking=True) for name, values in p.items()}
        return self._make(p.pop("index"), p)

    def _eager(self, index: torch.Tensor, p: Tensors) -> torch.Tensor:
        return self.augmenter(self.crops.index_select(0, index), p)

    def compiled(self, backend: str = "inductor") -> Callable[..., torch.Tensor]:
        _ = self.augmenter.time  # computed here, as the compiler cannot trace it
        if self.augmenter.config.kinds:
            _ = self.augmenter.bank
        return torch.compile(self._eager, fullgraph=True, backend=backend)

    def write(self, p: Tensors, out: torch.Tensor) -> torch.Tensor:
        """Make a batch on a CPU, a few crops at a time."""
        write, index = self.augmenter.writer(p, out)(self.crops), p["index"].tolist()
        for at in range(0, len(index), CHUNK):
            write(index[at : at + CHUNK], range(at, min(at + CHUNK, len(index))))
        return out


class Upload:
    """Copies host memory to a GPU on a stream of its own, so that a copy does not wait for
    queued kernels. Call `wait` before writing to that host memory again."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream, self.copied = (
            device,
            torch.cuda.Stream(device),
            torch.cuda.Event(),
        )

    def __call__(self, host: torch.Tensor) -> torch.Tensor:
        pinned = host if host.is_pinned() else host.pin_memory()
        with torch.cuda.stream(self.stream):
            there = pinned.to(self.device, non_blocking=True)
            self.copied.record()
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(self.copied)
        there.record_stream(computing)  # so that its memory is not reused while kernels read it
        return there

    def wait(self) -> None:
        self.copied.synchronize()


def download(x: torch.Tensor) -> Callable[[], np.ndarray]:
    """Start copying to the host; the returned function waits for the copy. Work queued on the GPU
    later does not delay it."""
    if not x.is_cuda:
        return x.cpu().numpy
    host, copied = x.to("cpu", non_blocking=True), torch.cuda.Event()  # to pinned memory
    copied.record(torch.cuda.current_stream(x.device))

    def numbers() -> np.ndarray:
        copied.synchronize()
        return host.numpy()

    return numbers
