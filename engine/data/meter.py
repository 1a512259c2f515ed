"""Where a loader's time goes: how much of the time since the last `snapshot` each stage was at work, in percent.

    plan        which crops come next, and the parameters of their augmentations
    read        crops out of their shards, checked; on a CPU, where each is then made at once, `augment` too
    read_wait   waiting for the thread that does both ahead
    augment     out of them what the model is given
    wait        the training, for its batches
    gpu_wait    the loader, for the GPU, which still reads batches given before (DALI): not part of `wait`

Stages beside each other add up to more than 100, and so does `augment` of several threads that read.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from data_tools.dataset import CROP_BYTES


class StageTimer:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._crops, self._since, self._busy_s = 0, time.perf_counter(), defaultdict[str, float](float)

    @contextmanager
    def timed(self, stage: str, without: str = "") -> Iterator[None]:
        """`without`: another within it, in the same thread, that is counted by itself."""
        other, began = self._busy_s.get(without, 0.0), time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - began - (self._busy_s.get(without, 0.0) - other))

    def add(self, stage: str, seconds: float) -> None:
        with self._lock:
            self._busy_s[stage] += seconds

    def done(self, crops: int) -> None:
        self._crops += crops

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            seconds, crops = max(time.perf_counter() - self._since, 1e-9), self._crops
            shares = {f"data_{stage}_pct": 100 * busy / seconds for stage, busy in sorted(self._busy_s.items())}
            self._begin()
        return {"crops_per_s": crops / seconds, "data_bytes_per_s": crops * CROP_BYTES / seconds, "data_wait_pct": 0.0} | shares
