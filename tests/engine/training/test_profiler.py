"""--profile N: the trace of N steps after the warm-up, and a run that continues."""

import json
from pathlib import Path

from ranks import rows, run, settings

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.training.profiler import WARM_UP


def test_steps_are_traced_and_training_continues(dataset: Dataset, tmp_path: Path) -> None:
    steps = WARM_UP + 3
    arguments = settings(tmp_path, dataset.root.url, "run", train__steps=steps)
    assert (
        f"--profile 4: {steps} steps are left, of which {WARM_UP} warm up"
        in run(tmp_path, [*arguments, "--profile", "4"]).one_line()
    )
    ended = run(tmp_path, [*arguments, "--profile", "2"])
    assert ended.ok and "aten::" in ended.output, ended.output
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, steps + 1))
    trace = json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())["traceEvents"]
    traced = {event["name"] for event in trace if event.get("name", "").startswith("ProfilerStep#")}
    assert traced == {f"ProfilerStep#{WARM_UP + i}" for i in range(2)}
    assert "aten::" in (tmp_path / "run" / "profile" / "operators.txt").read_text()
