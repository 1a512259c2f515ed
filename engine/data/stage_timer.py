"""Measures where a loader spends its time: for the log, and for `data_wait_pct`, the percentage
of time that training waits."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from omnilead.data_tools.dataset import CROP_BYTES


class StageTimer:
    """Profile of a loader: the percentage of time that each stage was busy since the last
    `snapshot`.

    plan        choosing crops and drawing their augmentation parameters
    read        reading and verifying crops; with torch on a CPU also `augment`, as the reading
                threads make the tensors
    read_wait   waiting for the prefetching thread
    augment     making the model's input, summed over threads
    wait        training waits for a batch
    gpu_wait    the loader waits for a GPU that still reads earlier batches (DALI); not part of
                `wait`
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.crops = 0
        self._since = time.perf_counter()
        self._busy_s: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, stage: str, without: str = "") -> Iterator[None]:
        """Adds the time that the block takes to a stage. `without`: a nested stage in the same
        thread, whose time is subtracted."""
        began, nested = time.perf_counter(), self._busy_s.get(without, 0.0)
        try:
            yield
        finally:
            nested = self._busy_s.get(without, 0.0) - nested
            self.add(stage, time.perf_counter() - began - nested)

    def add(self, stage: str, seconds: float) -> None:
        self._busy_s[stage] += seconds

    def exclude(self, seconds: float) -> None:
        """Leaves `seconds` out of the profile: time that was not training, such as validation."""
        self._since += seconds

    def snapshot(self) -> dict[str, float]:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        facts = {
            "crops_per_s": self.crops / seconds,
            "data_bytes_per_s": self.crops * CROP_BYTES / seconds,
            "data_wait_pct": 0.0,
        }
        for stage, busy_s in sorted(self._busy_s.copy().items()):
            facts[f"data_{stage}_pct"] = 100 * busy_s / seconds
        self.restart()
        return facts
