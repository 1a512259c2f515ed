"""Many cases in one record: each costs its own time at most, the record is saved after each, and the same command goes on."""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from cases_made import fails, hangs, part

from benchmarks import checks, feed, measure, report, run, step, suite
from benchmarks.measure import CaseError, call_fresh
from benchmarks.suite import Case

Started = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """A suite of these cases: its exit and its record."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(run, "git", lambda *_: "")
    out = tmp_path / "record.json"

    def go(*cases: Case, words: str = "") -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(suite, "table", lambda *_: list(cases))
        code = run.main(["suite", "--out", str(out), "--work", str(tmp_path / "work"), *words.split()])
        return code, json.loads(out.read_text()) if out.exists() else {}

    return go


def test_what_fails_or_hangs_costs_its_own_time_and_the_second_call_goes_on(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Case("step", "first", 60, part, (1.0,), "start")
    code, record = started(
        first,
        Case("step", "hangs", 0.5, hangs),
        Case("loop", "fails", 60, fails, (1.0,)),
        Case("loop", "last", 60, part, (2.0,), "start"),
    )
    assert code == 0 and set(record["cases"]) == {"step: first", "loop: last"}
    assert record["left_out"] == {"step: hangs": f"{measure.OVER} (0.5 s)", "loop: fails": "MemoryError: no room for this"}
    (kept,) = record["parts"]
    assert set(kept["results"]) == {"rate 1.0", "rate 2.0"} and kept["config"] == {"device": "cpu", "model": "paper"}
    assert record["git"]["commit"] == "unknown"
    assert "MemoryError" in capsys.readouterr().err  # the last lines of its log
    again = Case("step", "first", 60, fails, (1.0,))
    code, record = started(
        again, Case("loop", "fails", 60, part, (3.0,), "start"), Case("step", "hangs", 60, part, (4.0,), "start")
    )
    assert code == 0 and record["left_out"] == {} and len(record["parts"][0]["results"]) == 4


def test_the_minutes_are_kept_whatever_happens(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "LEAST_S", 0.1)
    (tmp_path / "logs").mkdir()
    cases = Case("step", "hangs", 600, hangs), Case("step", "later", 600, part, (1.0,), "start")
    record: dict[str, Any] = {"parts": [], "checks": {}, "cases": {}, "left_out": {}}
    now = time.monotonic()
    suite.Suite(record, tmp_path / "record.json", tmp_path, now, now + 1, cases).measure()
    assert record["left_out"].pop("step: hangs").startswith(measure.OVER)
    assert record == {"parts": [], "checks": {}, "cases": {}, "left_out": {"step: later": suite.NO_TIME}}
    assert started(*cases, words="--minutes 1e-9") == (1, {})
    assert f"benchmarks.run: nothing was measured: {suite.NO_TIME}" in capsys.readouterr().err


def test_a_process_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "kill", lambda _: None)
    monkeypatch.setattr(measure, "EXIT_S", 0.1)
    with pytest.raises(CaseError, match=measure.OVER):
        call_fresh(time.sleep, 600, limit_s=0.1)
    (process,) = multiprocessing.active_children()
    psutil.Process(process.pid).kill()
    process.join()


def test_what_is_not_timed_runs_side_by_side(started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data are made though they are in no record; what is compiled only until its share of the minutes is over."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(suite, "call_fresh", lambda _, function, arguments, *__, **___: function(*arguments) or {})
    made, late = tmp_path / "made", tmp_path / "late"
    cases = (
        Case("data", "made", 60, made.touch, together="first", makes=made),
        Case("step", f"{suite.COMPILE}x", 60, late.touch, together="first", makes=late, share=1e-9),
        Case("step", "x", 60, part, (1.0,), "start"),
    )
    code, record = started(*cases)
    assert code == 0 and made.exists() and not late.exists()
    assert record["cases"].keys() == {"step: x"} and not record["left_out"]
    assert all(case.done(record) for case in cases)  # what is measured need not be compiled


def test_a_record_of_something_else_is_not_gone_on_with(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started(Case("install", "there", 60, dict))
    for revision, words, told in (("2" * 40, "", "git"), ("unknown", "--repeats 5", "config")):
        monkeypatch.setenv("OMNILEAD_REVISION", revision)
        with pytest.raises(SystemExit) as stopped:
            started(words=words)
        assert stopped.value.code == 2
        assert f"is a record of another {told}: name another file" in capsys.readouterr().err
    assert report.load(tmp_path / "record.json") == []  # checks alone make no table


def test_without_a_name_today_s_record_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    new = run.environment() | {"benchmark": "suite", "kind": "cpu", "config": {"device": "cpu"}}
    path, _ = suite.begun(None, new)
    unfinished = new | {"cases": {"a": 1}, "left_out": {"b": suite.NO_TIME}}
    path.write_text(json.dumps(unfinished))
    assert suite.begun(None, new) == (path, unfinished)
    for old, now in ((unfinished, new | {"kind": "gpu"}), (unfinished | {"left_out": {}}, new)):
        path.write_text(json.dumps(old))
        assert suite.begun(None, now) == (path.with_stem(f"{path.stem}-2"), now)


def cases_of(words: str, tmp_path: Path) -> list[Case]:
    options = run.parse(["suite", *words.split()])
    kind = options.kind or ("gpu" if options.device == "cuda" else "cpu")
    return suite.table(options, kind, tmp_path, tmp_path / "record.json")


def test_a_cpus_cases_are_commands(tmp_path: Path) -> None:
    cases = cases_of("", tmp_path)
    assert [case.stage for case in cases] == list(suite.STAGES["cpu"])
    assert {run.parse(case.arguments[0]).benchmark for case in cases} == set(run.RUN) - {"cost"}


def test_a_gpus_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "present", lambda _: True)
    cases = cases_of("--device cuda", tmp_path)
    assert {case.stage for case in cases} == {*suite.STAGES["gpu"], "data"}
    assert len({case.title for case in cases}) == len(cases) and max(case.limit_s for case in cases) < 600
    runs = [case.arguments[0] for case in cases if case.function is step.alone]
    ours = [one for one in runs if one.side == step.OURS]
    assert {one.batch for one in ours} == {64, 128, 256, 512} and {one.compiled for one in ours} == {"layers", "step", "eager"}
    for key, kinds in step.KINDS["cuda"].items():
        assert set(kinds) <= {getattr(one, key) for one in ours}
    theirs = {(one.precision, one.batch) for one in runs if one.side == step.RECREATION}
    assert theirs == {("fp32", 64), ("autocast", 64), ("fp32", 256), ("autocast", 256)}
    compiled = {case.arguments[0] for case in cases if case.function is step.compiled}
    assert compiled == {one for one in ours if one.compiled != "eager"}
    smoked = {case.name for case in cases if case.stage == "smoke"}
    assert smoked == {f"{model}, {backend}" for model in ("small", "paper") for backend in ("torch", "resident", "dali")}
    assert {case.name for case in cases if case.stage == "tests"} >= {"tests/benchmarks/test_step.py"}
    assert {case.stage for case in cases_of("--device cuda --stages smoke", tmp_path)} == {"data", "smoke"}
    assert {case.stage for case in cases_of("--device cuda --stages step", tmp_path)} == {"step"}


def test_a_gpus_cases_for_real(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, a case of each stage."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(suite, "present", lambda _: False)
    monkeypatch.setattr(feed, "find_spec", lambda _: None)
    only = "a dataset|product: bf16|omnilead: bf16, 4|re-.*autocast, 4|^RLM: resident.*8|^resident$|loop$|probe$"
    out = tmp_path / "record.json"
    words = ["suite", "--kind", "gpu", "--model", tiny, "--out", str(out), "--work", str(tmp_path / "work"), "--only", only]
    assert run.main(words) == 0
    record = json.loads(out.read_text())
    assert record["left_out"] == {}
    assert {part["benchmark"] for part in report.load(out)} == {"step", "loader", "e2e"}
    (steps,) = (part for part in record["parts"] if part["benchmark"] == "step")
    assert len(steps["results"]) == 3 and steps["input"]["loss_difference"] < 1e-4
    assert all(result["mfu"] > 0 for name, result in steps["results"].items() if not name.startswith(step.PRODUCT))
    assert "--set train.micro_batch=4" in record["fastest"]
    profile, train = record["checks"]["profile: the loop"], record["checks"]["train: and a probe"]
    assert profile["step_ms"] > 0 and 0 < len(profile["kernels"]) <= checks.KERNELS and profile["busy_ms"] > 0
    assert "model.kernels=auto" in profile["settings"]
    assert train["last"]["step"] >= 1 and set(train["trained"]) == set(train["random"])


def test_what_training_needs_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "NEEDED", ("json", "nosuch"))
    monkeypatch.setattr(checks, "OPTIONAL", ("neither",))
    with pytest.raises(CaseError, match=r"^nosuch: ModuleNotFoundError"):
        checks.install()
    monkeypatch.setattr(checks, "NEEDED", ("json",))
    assert set(checks.install()["imports"]) == {"json", "neither"}


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (0, "3 passed", "3 passed"),
        (1, "FAILED a\n1 failed, 2 passed", "1 failed, 2 passed; FAILED a"),
        (4, "a warning\nModuleNotFoundError: no moto", "ModuleNotFoundError: no moto"),
        (4, "", "pytest said nothing"),
    ],
)
def test_what_pytest_said_last(code: int, said: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '{said}\\n\\n'\nexit {code}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    if code:
        with pytest.raises(CaseError, match=f"^{told}$"):
            checks.tests("test_it.py")
    else:
        assert checks.tests("test_it.py") == {"said": told}
