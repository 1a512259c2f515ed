"""The command: what is refused before any work, where a record is written, and resuming it."""

import json
import multiprocessing
import os
import re
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
from tests.tables import tabulated

INPUT = {"archive": "synthetic", "dataset": "0" * 64, "crops": 4}
SPREAD = {"median": 2.0, "low": 1.0, "high": 3.0}
RESULT = {"seconds": SPREAD, "cpu_seconds": SPREAD, "repeats": 3}


def case(text):
    if text:
        raise CaseError(text)
    return RESULT


@pytest.fixture
def cases(tmp_path, monkeypatch):
    """Replaces the cases of the benchmark `start`, of which a suite consists; records go to
    tmp_path / "results"."""
    made = {"first step: a": (case, ("",))}
    prepare = SimpleNamespace(prepare_input_and_cases=lambda work, options: (INPUT, made))
    monkeypatch.setitem(sys.modules, "benchmarks.start", prepare)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run, "command_output", lambda *_: "")
    monkeypatch.setitem(run.SUITES, "cpu", ("start",))
    monkeypatch.setattr(measure, "deadline", inf)
    monkeypatch.setattr(measure, "limit_s", inf)
    return made


@pytest.mark.parametrize(
    ("words", "named"),
    tabulated("""
e2e --model nope      | --model 'nope'
embed --model {bad}   | model.layers
e2e --batch 0         | --batch: '0': must be a whole number
e2e --only [          | --only '[': not a regular expression
loader --repeats 2    | --repeats 2: at least 3
ingest --device cuda  | --device cuda: ingest does not use a GPU
suite --device cuda   | --device cuda: torch finds no CUDA device: use --device cpu
start --out {folder}  | is a folder
nosuch                | invalid choice: 'nosuch'
"""),
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


def test_what_is_measured_said_and_kept(cases, tmp_path, monkeypatch, capsys, golden):
    """Records are never overwritten. A suite continues where it stopped: what failed waits until all
    others had their turn, and a bug fails the command. Another record is not continued."""
    monkeypatch.chdir(tmp_path)
    os.environ["OMNILEAD_REVISION"] = "1"
    said, damaged = [], tmp_path / "damaged"

    def ran(words, **reasons):
        cases.clear()
        for name, reason in reasons.items():
            cases[f"first step: {name}"] = (case, (reason,) if reason is not None else ())
        code = run.main(words.split())
        said.extend([f"$ {words}\n", *capsys.readouterr()[::-1], f"{code}\n"])
        for path in sorted(tmp_path.rglob("*.json")):
            record = json.loads(path.read_text())
            results = [result for part in record["parts"] for result in part["results"]]
            line = f"{path.name}: {results}, left out: {record['left_out']}\n"
            said.extend([line] * (line not in said))

    for _ in range(3):
        ran("start", a="")
    assert len(report.all_parts(tmp_path / "results")) == 3
    ran("start --out out.json", a="no luck")
    ran("start --out none.json --only b", a="")
    ran("suite --out record.json", a="", b="no luck", c=None)  # c has a bug
    ran("suite --out record.json --minutes 9", a="measured again", b="", c="")
    ran("suite --out record.json", a="", b="", c="", d="all cases are there")
    for reasons in ((measure.OVER_TIME, measure.OUT_OF_TIME), ("", "")):
        ran("suite --out late.json", **dict(zip(("slow", "b"), reasons, strict=True)))
    os.environ["OMNILEAD_REVISION"] = "2"
    ran("suite --out record.json", a="")
    for text in ("{", "[1]"):
        damaged.write_text(text)
        ran("suite --out damaged", a="")
    monkeypatch.setattr(run, "LEAST_S_TO_START", 61)
    ran("suite --out new.json --minutes 1", a="")
    text = re.sub(r"start_\S+_20[\d-]{8}", "start_MACHINE_DATE", "".join(said))
    golden("run.txt", re.sub(r"in \d+ s", "in 0 s", text).replace(str(tmp_path), "DIR"))


def test_a_record_that_cannot_be_written_is_printed(cases, monkeypatch, capsys):
    cases["first step: b"] = (case, ("",))  # measured, although the first cannot be saved
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


def test_a_record_has_all_facts(monkeypatch, capsys):
    facts = run.machine_facts()
    assert len(facts["git"]["commit"]) == 40 and facts["hardware"]["cores"] == os.cpu_count()
    assert {"python", "torch", "deepspeed", "numpy"} <= set(facts["versions"])
    row = "NVIDIA H200, 570.1, 143771 MiB, 700.00 W, 1980 MHz"
    monkeypatch.setattr(
        run, "command_output", lambda program, *_: row if program == "nvidia-smi" else ""
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("OMNILEAD_REVISION", "1" * 40)
    facts = run.machine_facts()
    assert facts["git"] == {"commit": "1" * 40, "dirty": None}
    assert facts["hardware"]["short"] == "nvidia-h200" and not capsys.readouterr().err
    monkeypatch.delenv("OMNILEAD_REVISION")
    assert run.machine_facts()["git"]["commit"] == "unknown"
    assert "neither git nor OMNILEAD_REVISION says which commit" in capsys.readouterr().err


@pytest.mark.parametrize("device", run.SUITES)
def test_a_suites_stages_are_commands(device):
    parsed = [run.parse([*shlex.split(words), "--device", device]) for words in run.SUITES[device]]
    missing = {"suite", *(run.CPU_ONLY if device == "cuda" else ())}
    assert {options.benchmark for options in parsed} == {*run.BENCHMARKS} - missing
