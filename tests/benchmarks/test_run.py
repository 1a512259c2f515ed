"""The command: what is refused, what is left out and why, the search for the fastest settings, the real loop measured."""

import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from cases_made import dies, fails, stream, works

from benchmarks import e2e, embed, feed, measure, run, scaling, start, step
from benchmarks.measure import CaseError, call_fresh, run_cases
from data_tools.dataset import Dataset
from engine.config import QUICKSTART, load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("suite --device cuda", "torch sees no CUDA device here: use --device cpu"),
        ("loader --repeats 2", "--repeats 2: fewer than 3"),
        ("step --model nosuch", "--model nosuch: no such file: use paper, a name out of configs/pretrain"),
    ],
)
def test_what_cannot_be_is_one_line(words: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    import torch

    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(SystemExit) as stopped:
        run.main(shlex.split(words))
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and told in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("e2e --batch 0", "argument --batch: 0: must be a whole number, 1 or more"),
        ("ingest --records -3", "argument --records"),
        ("e2e --only [", "argument --only: '[': no regular expression"),
        ("step --only bf16", "unrecognized arguments: --only bf16"),
    ],
)
def test_options_that_mean_nothing_are_refused(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run.parse(shlex.split(words))
    assert stopped.value.code == 2 and told in capsys.readouterr().err


def test_cases_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.only({"a: x": 1, "b: x": 2}, "^b") == {"b: x": 2}
    with pytest.raises(SystemExit):
        run.only({"a: x": 1}, "nothing")
    assert "no case is called so: a: x" in capsys.readouterr().err


def test_a_record_says_where_it_comes_from() -> None:
    facts = run.environment()
    assert len(facts["git"]["commit"]) == 40 and facts["hardware"]["cores"] == os.cpu_count()
    assert facts["hardware"]["gpus"] == [] or facts["hardware"]["gpus"][0]["driver_version"]
    assert {"python", "torch", "deepspeed", "numpy"} <= set(facts["versions"])


def test_a_copy_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("OMNILEAD_REVISION", raising=False)
    assert run.revision() == {"commit": "unknown", "dirty": None}
    monkeypatch.setenv("OMNILEAD_REVISION", "1" * 40)
    assert run.revision()["commit"] == "1" * 40


def test_a_case_that_fails_does_not_take_the_others_with_it() -> None:
    left_out: dict[str, str] = {}
    results = run_cases({"a": (fails, (1.0,)), "b": (works, (2.0,)), "c": (dies, (3.0,))}, 3, str, left_out)
    assert set(results) == {"b"} and results["b"]["repeats"] == 3
    assert left_out == {"a": "MemoryError: no room for this", "c": "its process died"}
    with pytest.raises(SystemExit, match="a: MemoryError"):
        run_cases({"a": (fails, (1.0,))}, 3, str)


@pytest.mark.parametrize(("enough", "kept"), [(7, {"a": 4, "b": 3}), (5, {"a": 3}), (4, {})])
def test_what_was_measured_before_the_time_was_over_is_kept(
    enough: int, kept: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time for so many: three samples show a spread."""

    def instead(*arguments: Any) -> list[dict[str, float]]:
        nonlocal enough
        if arguments[1] is dies:
            raise CaseError("its process died")
        enough -= 1
        if enough < 0:
            raise CaseError(measure.OVER)
        return [{"units": 1.0, "wall_s": 1.0, "cpu_s": 1.0, "peak_mb": 1.0}]

    monkeypatch.setattr(measure, "call_fresh", instead)
    left_out: dict[str, str] = {}
    results = run_cases({"a": (works, (1.0,)), "b": (works, (2.0,)), "c": (dies, (3.0,))}, 9, str, left_out)
    assert {name: result["repeats"] for name, result in results.items()} == kept
    over = {name: measure.OVER for name in "ab" if name not in kept}
    assert left_out == over | {"c": "its process died"}


def test_a_case_that_is_not_done_in_time_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "end", time.monotonic() + 0.5)
    with pytest.raises(CaseError, match="its time was over"):
        call_fresh(time.sleep, 10**6)
    with pytest.raises(CaseError, match="its time was over"):
        start.started((sys.executable, "-c", "import time; time.sleep(10**6)"), Path("nowhere"), "dataset", 1)


def test_repeats_in_one_process() -> None:
    results = run_cases({"a": (stream, (10.0,))}, 3, str, in_one_process=True)
    assert results["a"]["units"] == 11 and results["a"]["repeats"] == 3


def test_the_fastest_step_is_what_the_engine_takes() -> None:
    base = step.Run(step.OURS, "bf16", device="cuda", compiled="layers")
    runs = step.by_value(base, (64, 256))
    results = {one.name: {"per_s": {"median": float(number)}} for number, one in enumerate(runs)}
    best = step.fastest({name: results[name] for name in results if "autocast" not in name}, runs)
    assert best == dataclasses.replace(base, batch=256, compiled="eager")  # the last of ours in bf16
    config = load(QUICKSTART, step.settings(best))
    assert (config.train.micro_batch, config.train.compile, config.model.kernels) == (256, "eager", "auto")
    assert step.fastest({}, runs) is None


def setup(dataset: Dataset, tiny: str, tmp_path: Path, **changes: Any) -> e2e.Setup:
    how: dict[str, Any] = {"model": tiny, "batch": 4, "steps": 2, "threads": 1} | changes
    return e2e.Setup(dataset.root.url, str(tmp_path / "run"), **how)


def test_the_loop_beside_the_bare_step(dataset: Dataset, tiny: str, tmp_path: Path) -> None:
    """From an object store, if one can be served here."""
    mine = setup(dataset, tiny, tmp_path)
    far = not e2e.missing("s3")
    mine = dataclasses.replace(mine, settings=e2e.SOURCES["s3" if far else "tar"])
    with e2e.served(mine, tmp_path) if far else contextlib.nullcontext(mine) as ready:
        found = call_fresh(e2e.turns, ready)
    assert found["backend"] == "torch"
    assert {kind: len(rows) for kind, rows in found["rows"].items()} == dict.fromkeys(e2e.KINDS, 3)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2 * 2 * (1 + 3)  # held and loaded, two steps a turn, a warm-up and three turns
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-16"  # the one that was timed
    assert not far or list((tmp_path / "cache").rglob("*.tar"))
    result = e2e.told(found, mine)
    assert 0 < result["stall_pct"]["median"] < 100 and result["per_s"]["median"] > 0 and result["checkpoint_s"] > 0
    assert len(list(e2e.lines({"tar": result}))) == 2


def test_where_a_median_lies() -> None:
    """Of a hundred, between the 40th and the 60th or so: in 95 of 100 samples the true one is there."""
    assert measure.middle([3, 1, 2]) == {"median": 2, "low": 1, "high": 3}
    lows = [measure.middle(range(n))["low"] for n in (5, 6, 8, 9, 60)]  # of 8, the 2nd to the 7th would be 93 %
    assert lows == [0, 0, 0, 1, 21] and measure.middle(range(60))["high"] == 38
    draws = np.random.default_rng(0).exponential(size=(400, 60))
    found = [measure.middle(row) for row in draws]
    assert 0.94 < np.mean([one["low"] <= np.log(2) <= one["high"] for one in found]) < 0.99
    assert np.mean([one["high"] - one["low"] for one in found]) < 0.6


def test_overhead_is_of_turns_side_by_side(dataset: Dataset, tiny: str, tmp_path: Path) -> None:
    rows = {
        kind: [{"wall_s": 2 * s * drift, "cpu_s": s * drift, "waited_s": 0.04 * s * drift} for drift in (1, 5, 2)]
        for kind, s in (("bare", 1.0), ("held", 1.05), ("loaded", 1.1))
    }
    found = {"rows": rows, "checkpoint_s": 18.0, "backend": "torch"}
    result = e2e.told(found, setup(dataset, tiny, tmp_path, batch=32, steps=4))
    assert result["overhead_pct"] == pytest.approx({"median": 10, "low": 10, "high": 10})  # whatever the machine's drift
    assert result["loader_pct"]["median"] == pytest.approx(100 * (1.1 / 1.05 - 1))
    assert result["stall_pct"]["median"] == pytest.approx(2.0) and result["checkpoint_pct"] == pytest.approx(1.0)
    assert result["per_cpu_s"]["high"] == pytest.approx(128 / 1.1) and result["bare_per_s"]["high"] == pytest.approx(64)


def test_a_loop_that_cannot_begin_says_why(dataset: Dataset, tiny: str, tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="position_groups"):
        call_fresh(e2e.turns, setup(dataset, tiny, tmp_path, settings=("model.position_groups=7",)))


def test_embeddings_beside_the_encoder_alone(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["embed", "--model", tiny, "--records", "10", "--only", "250", "--batch", "4", "--threads", "1"]
    part = run.measured(tmp_path, run.parse(words))
    assert not part["left_out"] and list(part["results"]) == [f"arrays, 250 Hz: {tiny}, 4 crops"]
    assert len(pq.read_table(tmp_path / "out.parquet")) == part["input"]["crops"] > 0
    (result,) = part["results"].values()
    assert result["share_pct"]["median"] > 0 and result["repeats"] == 3
    assert "share %" in capsys.readouterr().out


def test_random_weights_are_the_same_each_time(tiny: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        embed.untrained(tmp_path / name, tiny)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert first == second


def test_a_share_is_of_turns_side_by_side() -> None:
    rows = {name: [{"wall_s": s * d, "cpu_s": 2 * s * d} for d in (1, 5, 2)] for name, s in (("alone", 0.9), ("command", 1.0))}
    result = embed.told(rows, embed.Setup("model", ("dataset",), "out", crops=10))
    assert result["share_pct"] == pytest.approx({"median": 90, "low": 90, "high": 90})
    assert result["per_s"]["high"] == pytest.approx(10) and result["bare_per_cpu_s"]["high"] == pytest.approx(10 / 1.8)


def test_two_ranks(dataset: Dataset, tiny: str, tmp_path: Path) -> None:
    found = scaling.ranks(setup(dataset, tiny, tmp_path, steps=1), 2)
    assert found["batch"] == 4 and found["per_cpu_s"]["low"] > 0
    lines = [json.loads(line) for line in (tmp_path / "run-2" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["crops_seen"] == 8 * (lines[-1]["step"] + 1)  # the first batch was put aside


COMMAND = """
import pathlib, sys, time
run = next(word for word in sys.argv if word.startswith("run=")).removeprefix("run=")
time.sleep(0.2)
pathlib.Path(run).mkdir()
(pathlib.Path(run) / "metrics.jsonl").write_text("a line")
until = time.process_time() + 0.3
while time.process_time() < until: pass
sys.exit("steps=7" in " ".join(sys.argv))
"""


def test_the_clock_of_the_first_step(tmp_path: Path) -> None:
    found = start.started((sys.executable, "-c", COMMAND), tmp_path / "a", "dataset", 1)
    assert 0.2 <= found["first"] <= found["whole"] - 0.25
    assert found["first_cpu"] <= found["whole_cpu"] - 0.25
    with pytest.raises(CaseError, match="ended with 1"):
        start.started((sys.executable, "-c", COMMAND), tmp_path / "b", "dataset", 7)
    told = start.told(start.WHOLE, [found] * 3, 7)
    assert set(told) == {f"first step: {start.WHOLE}", f"7 steps and the end: {start.WHOLE}"}


def test_what_starts_it_needs_no_script_beside_the_interpreter() -> None:
    """`pip install --target` leaves none."""
    pytest.importorskip("deepspeed")
    assert {command[0] for command in start.COMMANDS.values()} == {sys.executable}
    answer = subprocess.run([*start.COMMANDS[start.WHOLE][:-2], "--help"], capture_output=True, text=True, check=False)
    assert answer.returncode == 0 and "--num_gpus" in answer.stdout


def test_this_sessions_cpu_seconds() -> None:
    code = "import time; t = time.process_time() + 0.3\nwhile time.process_time() < t: pass\ninput()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    while start.session_s(process.pid) < 0.2:  # counted in whole ticks, of which the last ones may never show
        assert process.poll() is None
    process.communicate(b"\n")
    assert start.session_s(process.pid) == 0


def test_crops_to_a_device(dataset: Dataset) -> None:
    stream = feed.feed(Path(dataset.root.url), "cpu", "resident", "RLM", 16, 1)
    assert [next(stream), next(stream), next(stream)] == [0.0, 640.0, 640.0]
    with pytest.raises(StopIteration):
        stream.send(True)


def test_backends_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set(feed.cases(Path("dataset"), "cuda", 2))
    assert {"RLM: torch to cuda, batch 1024", "RLM: resident to cuda, batch 64"} <= names
    monkeypatch.setattr(feed, "find_spec", lambda _: None)
    assert not any("dali" in name for name in feed.cases(Path("dataset"), "cuda", 2))
