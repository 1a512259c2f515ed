"""The command: what is refused before any work, where a record is written, and resuming it."""

import json
import multiprocessing
import os
import shlex
import signal
import sys
import time
from math import inf
from types import SimpleNamespace
from unittest import mock

import pytest

from benchmarks import measure, report, run
from benchmarks.measure import CaseError

INPUT = {"archive": "synthetic", "dataset": "0" * 64, "crops": 4}
SPREAD = {"median": 2.0, "low": 1.0, "high": 3.0}
RESULT = {"seconds": SPREAD, "cpu_seconds": SPREAD, "repeats": 3}


def result(_):
    return RESULT


def fails(text):
    raise CaseError(text)


@pytest.fixture
def cases(tmp_path, monkeypatch):
    """Replaces the cases of the benchmark `start`, of which a suite consists; records go to
    tmp_path / "results"."""
    made = {"first step: a": (result, ("",))}
    prepare = SimpleNamespace(prepare=lambda work, options: (INPUT, made))
    monkeypatch.setitem(sys.modules, "benchmarks.start", prepare)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run, "said", lambda *_: "")
    monkeypatch.setitem(run.SUITES, "cpu", ("start",))
    monkeypatch.setattr(measure, "deadline", inf)
    monkeypatch.setattr(measure, "limit_s", inf)
    return made


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("e2e --model nope", "--model 'nope'"),
        ("embed --model {bad}", "model.layers"),
        ("e2e --batch 0", "--batch: '0': must be a whole number"),
        ("e2e --only [", "--only '[': not a regular expression"),
        ("loader --repeats 2", "--repeats 2: at least 3"),
        ("ingest --device cuda", "--device cuda: ingest does not use one"),
        ("suite --device cuda", "--device cuda: torch finds no CUDA device: use --device cpu"),
        ("suite --stages nosuch", "--stages nosuch: no such stage: use ingest"),
        ("start --out {folder}", "is a folder"),
        ("nosuch", "invalid choice: 'nosuch'"),
    ],
)
def test_a_wrong_option_is_a_one_line_error_before_any_work(words, named, cases, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("model: {layers: frog}")
    try:
        code = run.main(shlex.split(words.format(bad=tmp_path / "bad.yaml", folder=tmp_path)))
    except SystemExit as stopped:
        code = int(str(stopped.code))
    error = capsys.readouterr().err
    assert code == 2 and named in error and len(error.splitlines()) == 1
    assert not list((tmp_path / "results").glob("*"))


def test_records_are_never_overwritten(cases, tmp_path, capsys):
    for _ in range(3):
        assert run.main(["start"]) == 0
    first, *others = sorted(path.stem for path in (tmp_path / "results").iterdir())
    assert others == [f"{first}-2", f"{first}-3"]
    assert "| first step: a | 2 | 1 to 3 | 2 |" in capsys.readouterr().out
    (part,) = report.newest(report.every(tmp_path / "results")).values()
    assert part["results"] == {"first step: a": RESULT}


def test_a_record_that_cannot_be_written_is_printed(cases, monkeypatch, capsys):
    cases["first step: b"] = (result, ("",))  # measured, although the first cannot be saved
    monkeypatch.setattr(run, "write_whole", mock.Mock(side_effect=OSError(28, "No space left")))
    assert run.main(["start"]) == 1
    out, error = capsys.readouterr()
    assert error.endswith("No space left: the record is printed above\n")
    (part,) = json.loads(out[out.index("\n{") :])["parts"]
    assert part["results"] == dict.fromkeys(cases, RESULT)


def interrupts(pid):
    for one in (os.getpid(), pid):  # a terminal interrupts both
        os.kill(one, signal.SIGINT)
    time.sleep(10**6)


def test_ctrl_c_is_one_line_and_ends_the_case(cases, capsys):
    cases["first step: a"] = (interrupts, (os.getpid(),))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert run.main(["start"]) == 130
    signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.endswith("\nbenchmarks.run: interrupted: run it again\n")
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("start", "first step: a: no luck"),
        ("start --only b", "matches none"),
        ("suite --minutes 1", "start: stopped: out of time"),
    ],
)
def test_without_a_result_nothing_is_published(words, why, cases, monkeypatch, capsys):
    cases["first step: a"] = (fails, ("no luck",))
    if "minutes" in words:
        monkeypatch.setattr(run, "LEAST_S", 61)
    assert run.main(words.split()) == 1
    error = capsys.readouterr().err
    assert why in error and "nothing was measured" in error


def test_a_record_has_all_facts(monkeypatch, capsys):
    facts = run.environment()
    assert len(facts["git"]["commit"]) == 40 and facts["hardware"]["cores"] == os.cpu_count()
    assert {"python", "torch", "deepspeed", "numpy"} <= set(facts["versions"])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("OMNILEAD_REVISION", "1" * 40)
    assert run.environment()["git"] == {"commit": "1" * 40, "dirty": None}
    assert not capsys.readouterr().err
    monkeypatch.delenv("OMNILEAD_REVISION")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    row = "NVIDIA H200, 570.1, 143771 MiB, 700.00 W, 1980 MHz"
    monkeypatch.setattr(run, "said", lambda program, *_: row if program == "nvidia-smi" else "")
    facts = run.environment()
    assert facts["git"]["commit"] == "unknown" and facts["hardware"]["short"] == "nvidia-h200"
    assert "neither git nor OMNILEAD_REVISION says which commit" in capsys.readouterr().err


def test_a_suite_continues_where_it_stopped(cases, tmp_path):
    """What failed is tried again after all others; a bug fails the command, and what the other
    cases measured is not lost."""
    out = tmp_path / "record.json"
    words = ["suite", "--out", str(out)]
    cases["first step: b"] = (fails, ("no luck",))
    cases["first step: c"] = (result, ())  # a TypeError
    assert run.main(words) == 1
    left_out = json.loads(out.read_text())["left_out"]
    assert left_out.pop("start: first step: c").startswith("bug: TypeError")
    assert left_out == {"start: first step: b": "no luck"}
    (part,) = report.load(out)
    assert set(part["results"]) == {"first step: a"} and "first step: b" in part["left_out"]
    cases["first step: a"] = (fails, ("measured again",))
    cases |= dict.fromkeys(("first step: b", "first step: c"), (result, ("",)))
    assert run.main([*words, "--stages", "start", "--minutes", "9"]) == 0
    (part,) = report.load(out)
    assert set(part["results"]) == set(cases) and part["left_out"] == {}
    cases["first step: d"] = (fails, ("all cases are there",))
    assert run.main(words) == 0


def test_what_failed_before_waits_until_all_others_had_their_turn(cases, tmp_path, monkeypatch):
    measured = []

    def call_fresh(timed, case, arguments, repeats, rows):
        measured.append(arguments[0])
        if arguments[0] == "slow" and len(measured) < 3:
            raise CaseError(measure.OVER_TIME)
        if arguments[0] == "b" and len(measured) < 3:
            raise CaseError(measure.OUT_OF_TIME)
        return RESULT

    monkeypatch.setattr(measure, "call_fresh", call_fresh)
    cases.clear()
    cases |= {f"first step: {name}": (result, (name,)) for name in ("slow", "b")}
    for _ in range(2):
        run.main(["suite", "--out", str(tmp_path / "record.json")])
    # Again at the end of its command if it ran over its limit, in the next if there was no time
    assert measured == ["slow", "b", "slow", "b"]


def test_another_record_is_not_continued(cases, tmp_path, capsys):
    words = ["suite", "--out", str(tmp_path / "record.json")]
    assert run.main(words) == 0
    os.environ["OMNILEAD_REVISION"] = "2" * 40
    for text in ("", "{", "[1]"):  # of another revision, and damaged
        (tmp_path / "record.json").write_text(text or (tmp_path / "record.json").read_text())
        assert run.main(words) == 2
        assert "record.json: is not a record of this command" in capsys.readouterr().err


@pytest.mark.parametrize("device", run.SUITES)
def test_a_suites_stages_are_commands(device):
    parsed = [run.parse([*shlex.split(words), "--device", device]) for words in run.SUITES[device]]
    missing = {"suite", *(run.CPU_ONLY if device == "cuda" else ())}
    assert {options.benchmark for options in parsed} == {*run.NAMES} - missing
