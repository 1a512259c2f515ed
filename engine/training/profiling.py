"""Traces some steps of a training (`--profile N`), on rank 0.

    with Profile(20).traced(folder, device) as tracer: ...

RUN/profile/trace.json      every operation of every step, for https://ui.perfetto.dev or chrome://tracing
RUN/profile/operators.txt   the operations that took the most time
RUN/profile/memory.pickle   on CUDA: the allocations of these steps, for https://pytorch.org/memory_viz
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from omnilead.data_tools.io.terminal import say

from ..settings.errors import ConfigError

# steps before the traced ones, in which kernels are compiled and buffers allocated
WARM_UP_STEPS = 5
TERMINAL_ROWS, FILE_ROWS = 12, 200
MAX_ALLOCATIONS = 10**5  # most allocations that the memory snapshot holds


@dataclass
class Profile:
    steps: int  # number of steps to trace

    def require_enough_steps(self, left: int) -> None:
        if self.steps > left - WARM_UP_STEPS:
            raise ConfigError(
                f"--profile {self.steps}: {left} steps are left, of which {WARM_UP_STEPS} warm up and are not "
                "traced: trace fewer steps, or raise train.steps"
            )

    @contextmanager
    def traced(self, folder: Path, device: torch.device) -> Iterator[Any]:
        """A context that traces steps. Yields an object whose step() must be called after each
        training step."""
        # silences the profiler's own messages on standard error
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        cuda = device.type == "cuda"
        by = f"self_{device.type}_time_total"

        def write(trace: profile) -> None:
            folder.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(folder / "trace.json"))
            table = trace.key_averages()
            (folder / "operators.txt").write_text(
                table.table(sort_by=by, row_limit=FILE_ROWS, max_name_column_width=80) + "\n"
            )
            if cuda:
                torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
            say(table.table(sort_by=by, row_limit=TERMINAL_ROWS, max_name_column_width=40))
            say(f"profile of {self.steps} steps: {folder}/")

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        profiler_schedule = schedule(wait=WARM_UP_STEPS - 1, warmup=1, active=self.steps, repeat=1)
        kind = AllocationProfile if cuda else profile
        with kind(
            activities=activities, schedule=profiler_schedule, on_trace_ready=write
        ) as tracer:
            yield tracer


class AllocationProfile(profile):
    """A profile that also records allocations, with Python stacks only: C++ stacks slow
    down each allocation and take long to resolve."""

    def step(self) -> None:
        super().step()
        if self.step_num == WARM_UP_STEPS:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS, stacks="python")
