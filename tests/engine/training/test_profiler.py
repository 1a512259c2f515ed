"""--profile N: the trace of N steps after the warm-up, and a run that continues."""

import json
from unittest import mock

import pytest
import torch
from ranks import column, run, settings

from omnilead.engine.training.profiling import WARM_UP_STEPS, Profile


def test_steps_are_traced_and_training_continues(dataset, tmp_path):
    steps, folder = WARM_UP_STEPS + 3, tmp_path / "run" / "profile"
    arguments = settings(tmp_path, dataset.root.url, train__steps=steps)
    says = f"--profile 4: {steps} steps are left, of which {WARM_UP_STEPS} warm up"
    assert says in run(tmp_path, [*arguments, "--profile", "4"]).one_line()
    assert "aten::" in run(tmp_path, [*arguments, "--profile", "2"]).good()
    assert column(tmp_path / "run") == list(range(1, steps + 1))
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {event.get("name", "") for event in trace}
    traced = {name for name in names if name.startswith("ProfilerStep#")}
    assert traced == {f"ProfilerStep#{WARM_UP_STEPS}", f"ProfilerStep#{WARM_UP_STEPS + 1}"}
    assert "aten::" in (folder / "operators.txt").read_text()


@pytest.mark.filterwarnings("ignore:CUDA is not available, disabling CUDA profiling")
def test_a_gpus_allocations_are_recorded_after_the_warm_up_with_pythons_stacks(
    tmp_path, monkeypatch
):
    """With C++'s, or while kernels are compiled, recording would disturb the steps it is about."""
    calls, done = mock.Mock(), []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", calls.record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.dump)
    calls.record.side_effect = lambda **_: done.append(tracer.step_num)
    with Profile(2).traced(tmp_path / "profile", torch.device("cuda")) as tracer:
        for _ in range(WARM_UP_STEPS + 2):
            tracer.step()
    assert done == [WARM_UP_STEPS, WARM_UP_STEPS + 2]
    (began, _, ended) = calls.mock_calls
    assert began.kwargs["stacks"] == "python" and ended == mock.call.record(enabled=None)
