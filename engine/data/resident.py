"""The dataset as int16 in device memory: for datasets that fit, an epoch costs no input at all.

A batch is an index into the resident crops; gathering, scaling, noise and masking are one compiled kernel on CUDA. 120,000
bytes a crop: 139 GiB hold a million ECGs beside a model.
"""

from collections.abc import Callable

import numpy as np
import torch

from data_tools.dataset import CROP_BYTES, CROP_SHAPE
from engine.data.augment_draws import Params
from engine.data.augmenter import Augmenter
from engine.data.order import Order, Places
from engine.data.reader import Bad, CropReader, Report

CHUNK = 1024
Plan = dict[str, torch.Tensor]


class ResidentError(Exception):
    """A dataset that does not fit."""


class Resident:
    """All rows that an order may ask for, each read and checked once."""

    def __init__(self, order: Order, gather: CropReader, augmenter: Augmenter, spare_bytes: float = 0) -> None:
        """`spare_bytes`: what the training needs beside the crops."""
        self.order, self.augmenter = order, augmenter
        self.numbers = [rows.row(np.arange(len(rows))) for rows in order.rows]
        self.offset = np.cumsum([0, *map(len, self.numbers)])
        needed = int(self.offset[-1]) * CROP_BYTES
        free = torch.cuda.mem_get_info(augmenter.device)[0] if augmenter.device.type == "cuda" else None
        if free is not None and needed + spare_bytes > free:
            raise ResidentError(
                f"pipeline.backend=resident: {needed / 1e9:.1f} GB of crops and about {spare_bytes / 1e9:.1f} GB for a step "
                f"are more than the GPU's free {free / 1e9:.1f} GB: use pipeline.backend=dali, or lower train.micro_batch"
            )
        self.crops = torch.empty((int(self.offset[-1]), *CROP_SHAPE), dtype=torch.int16, device=augmenter.device)
        self.reasons: dict[tuple[int, int], str] = {}  # of crops that could not be read
        buffer = np.empty((CHUNK, *CROP_SHAPE), np.int16)
        for d, numbers in enumerate(self.numbers):
            for start in range(0, len(numbers), CHUNK):
                rows = numbers[start : start + CHUNK]
                report = gather.read(np.full(len(rows), d), rows, buffer[: len(rows)])
                self.reasons |= {(dataset, row): reason for _, dataset, row, reason in report.skipped}
                at = int(self.offset[d]) + start
                self.crops[at : at + len(rows)] = torch.from_numpy(buffer[: len(rows)])
        self._make = self._compiled() if augmenter.device.type == "cuda" else self._eager

    def report(self, places: Places) -> Report:
        """Which crops come in the place of those that could not be read."""
        rows, skipped = places.row.copy(), []
        if self.reasons:
            for i, d in enumerate(places.dataset.tolist()):
                while reason := self.reasons.get((d, int(rows[i]))):
                    skipped.append(Bad(i, d, int(rows[i]), reason))
                    rows[i] = self.order.rows[d].after(int(rows[i]))
        return Report(rows, tuple(skipped))

    def plan(self, places: Places, p: Params) -> Plan:
        """The host's part of a batch: where its crops lie, and what is done to them."""
        at = np.empty(len(places), np.int64)
        for d, numbers in enumerate(self.numbers):
            mine = places.dataset == d
            at[mine] = self.offset[d] + np.searchsorted(numbers, places.row[mine])
        return self.augmenter.pinned({"index": at} | p)

    def batch(self, plan: Plan, out: torch.Tensor | None = None) -> torch.Tensor:
        """`out` is for a CPU."""
        p = {name: values.to(self.crops.device, non_blocking=True) for name, values in plan.items()}
        index = p.pop("index")
        return self._make(index, p) if out is None else self.augmenter.into(self.crops, p, out, index)

    def _compiled(self, backend: str = "inductor") -> Callable[..., torch.Tensor]:
        _ = self.augmenter.time  # made here: the compiler cannot look into what makes it
        if self.augmenter.config.kinds:
            _ = self.augmenter.bank
        return torch.compile(self._eager, fullgraph=True, backend=backend)

    def _eager(self, index: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.augmenter(self.crops.index_select(0, index), p)
