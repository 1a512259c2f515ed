"""--profile N: the trace of N steps after the warm-up, and a run that continues."""

import json

from ranks import column, run, settings

from omnilead.engine.training.tracking import WARM_UP


def test_steps_are_traced_and_training_continues(dataset, tmp_path):
    steps, folder = WARM_UP + 3, tmp_path / "run" / "profile"
    arguments = settings(tmp_path, dataset.root.url, train__steps=steps)
    says = f"--profile 4: {steps} steps are left, of which {WARM_UP} warm up"
    assert says in run(tmp_path, [*arguments, "--profile", "4"]).one_line()
    assert "aten::" in run(tmp_path, [*arguments, "--profile", "2"]).good()
    assert column(tmp_path / "run") == list(range(1, steps + 1))
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {event.get("name", "") for event in trace}
    traced = {name for name in names if name.startswith("ProfilerStep#")}
    assert traced == {f"ProfilerStep#{WARM_UP}", f"ProfilerStep#{WARM_UP + 1}"}
    assert "aten::" in (folder / "operators.txt").read_text()
