"""The command as it is typed: what is refused before any work, where a record goes, and what is left after Ctrl-C."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import e2e, measure, peers, report, run, scaling, start
from benchmarks.measure import CaseError, call_fresh
from data_tools.dataset import Dataset
from engine.evaluation import run_files
from tests.waiting import HANG_S, until

ROOT = Path(run.__file__).parents[1]
PART = {"input": {"archive": "synthetic", "dataset": "0" * 64}, "left_out": {}}
SECONDS = {figure: {"median": 2.0, "low": 1.0, "high": 3.0} for figure in ("seconds", "cpu_seconds")}
DONE = PART | {"results": {"first step: a": SECONDS}}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run, "git", lambda *_: "0" * 40)
    monkeypatch.setitem(run.RUN, "start", lambda *_: DONE)
    return tmp_path / "results"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("e2e --model nope", "--model nope: no such file"),
        ("suite --model nope", "--model nope: no such file"),
        ("embed --model {bad}", "bad.yaml: model.layers='frog'"),
        ("ingest --records 20", "--records: 20: must be a whole number, 100 or more"),
        ("loader --records 20", "--records: 20: must be a whole number, 100 or more"),
        ("loader --seconds 0", "--seconds: 0: must be a number above 0"),
        ("scaling --huge 10", "--huge: 10: must be"),
        ("scaling --device cuda", "--device: invalid choice: 'cuda'"),
        ("ingest --device cuda", "--device: invalid choice: 'cuda'"),
        ("step --batches 1", "--batches: 1: must be a whole number, 2 or more"),
        ("step --threads 0", "--threads: 0: must be"),
        ("step --steps 0", "--steps: 0: must be"),
        ("step --peak-tflops nan", "--peak-tflops: nan: must be a number above 0"),
        ("step --bandwidth-gb -1", "--bandwidth-gb: -1: must be"),
        ("step --explain --batches 2 8", "--explain: measures one of --batches"),
        ("step --explain --compiled eager step", "one of --compiled"),
        ("suite --stages step,nosuch", "--stages nosuch: no such stage: use step, ingest"),
        ("start --out {folder}", "is a folder"),
        ("start --out {bad}/record.json", "--out"),
        ("start --out /proc/none/record.json", "--out /proc/none/record.json: "),
        ("nosuch", "invalid choice: 'nosuch'"),
    ],
)
def test_a_wrong_option_is_one_line_before_any_work(
    words: str, told: str, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text("model: {layers: frog}")
    for name in run.RUN:
        monkeypatch.setitem(run.RUN, name, lambda *_: pytest.fail("it began"))
    with pytest.raises(SystemExit) as stopped:
        run.main(shlex.split(words.format(bad=tmp_path / "bad.yaml", folder=tmp_path)))
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and told in error and len(error.splitlines()) == 1


def test_a_default_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.parse(["scaling", "--help"])
    (steps,) = (line for line in capsys.readouterr().out.splitlines() if "  --steps" in line)
    assert steps.count("default") == 1


def test_no_record_takes_anothers_place(results: Path, tmp_path: Path) -> None:
    for _ in range(3):
        assert run.main(["start"]) == 0
    first, *others = sorted(path.stem for path in results.iterdir())
    assert (
        others == [f"{first}-2", f"{first}-3"]
        and report.newest(report.every(results))["start", "cpu"]["results"] == DONE["results"]
    )
    assert [run.main(["start", "--out", str(tmp_path / "mine.json")]) for _ in range(2)] == [0, 0]
    assert [path.name for path in tmp_path.glob("*.json")] == ["mine.json"]


def test_a_record_that_cannot_be_written_is_not_lost(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: str) -> None:
        if path.parent in (results, tmp_path / "full"):
            raise OSError(28, "No space left on device")
        path.write_text(content)

    monkeypatch.setattr(run_files, "write_whole", full)
    monkeypatch.setattr(run.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    assert run.main(["start"]) == 1
    said, (path,) = capsys.readouterr(), tmp_path.glob("start_*.json")
    assert "No space left on device: the record goes to another folder" in said.err and len(said.err.splitlines()) == 1
    assert str(path) in said.out and json.loads(path.read_text())["results"] == DONE["results"]
    monkeypatch.setattr(run.tempfile, "gettempdir", lambda: str(tmp_path / "full"))
    assert run.main(["start"]) == 1 and len(list(tmp_path.glob("start_*-2.json"))) == 1


def test_no_result_is_no_record(results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(run.RUN, "start", lambda *_: PART | {"results": {}, "left_out": {"a": "no luck"}})
    assert run.main(["start"]) == 1 and not list(results.iterdir())
    assert capsys.readouterr().err == "benchmarks.run: nothing was measured: a: no luck\n"


INTERRUPTED = """
import signal, sys, time
from benchmarks import run
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests themselves run in the background
from benchmarks.measure import call_fresh
def started(*_):
    print("ready", flush=True)
    call_fresh(time.sleep, 10**6)
run.RUN["start"] = started
sys.exit(run.main(["start"]))
"""


@pytest.mark.parametrize("wait_s", [0.1, 3.0])
def test_ctrl_c_is_one_line(wait_s: float) -> None:
    """While a case's process begins, and while it works. Nothing is left of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        **{"cwd": ROOT, "text": True, "start_new_session": True},
        **dict.fromkeys(("stdout", "stderr"), subprocess.PIPE),
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    time.sleep(wait_s)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate()
    assert (process.returncode, said) == (130, "benchmarks.run: interrupted: nothing was recorded\n")
    assert not [one for one in psutil.process_iter() if group_of(one.pid) == process.pid and not gone(one.pid)]


def group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def begins_another(place: Path) -> None:
    place.write_text(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"]).pid))
    time.sleep(10**6)


def test_what_a_stopped_case_has_started_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "pid"

    def none_once_begun() -> float:
        until(lambda: place.exists() and place.read_text())
        return 0.0

    monkeypatch.setattr(measure, "left_s", none_once_begun)
    with pytest.raises(CaseError, match=measure.OVER):
        call_fresh(begins_another, place)
    assert gone(int(place.read_text()))


def gone(pid: int) -> bool:
    """Within a minute. A zombie is."""
    try:
        process, end = psutil.Process(pid), time.monotonic() + 60
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
    except psutil.NoSuchProcess:
        pass
    return True


WRITES = """
import os, pathlib, sys, time
run = pathlib.Path(next(word for word in sys.argv if word.startswith("run=")).removeprefix("run="))
sys.stderr.write("w" * 200_000)
run.mkdir()
(run / "metrics.jsonl").write_text(str(os.getpid()))
time.sleep(10**6 if "steps=7" in " ".join(sys.argv) else 0)
"""


def test_a_command_that_says_much_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "end", time.monotonic() + HANG_S)
    assert start.started((sys.executable, "-c", WRITES), tmp_path / "a", "dataset", 1)["whole"] < HANG_S


def test_a_training_ends_with_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a session of its own, which Ctrl-C does not reach."""
    metrics = tmp_path / "b" / "metrics.jsonl"

    def interrupted() -> None:
        if metrics.exists() and metrics.stat().st_size:
            raise KeyboardInterrupt

    monkeypatch.setattr(start, "left_s", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start.started((sys.executable, "-c", WRITES), tmp_path / "b", "dataset", 7)
    assert gone(int(metrics.read_text()))


def one_fails(setup: e2e.Setup, rank: int) -> None:
    if rank == 0:
        raise CaseError("no luck")
    time.sleep(10**6)


def test_no_rank_waits_for_one_that_failed(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(e2e, "turns", one_fails)
    with pytest.raises(CaseError, match="no luck"):
        scaling.ranks(e2e.Setup(dataset.root.url, str(tmp_path / "run")), 2)


def test_a_loader_without_a_batch_is_no_loop_without_end() -> None:
    with pytest.raises(CaseError, match="too few crops for a batch of 4: ask for more --records"):
        next(peers.epochs([1, 2, 3], 4, 0))
    stream = peers.epochs([1, 2, 3], 2, 0)
    assert [len(next(stream)) for _ in range(3)] == [2, 2, 2]


def test_the_loaders_threads_are_recorded(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(e2e, "prepare", lambda *_: Path(dataset.root.url))
    monkeypatch.setattr(run, "run_cases", lambda cases, *_, **__: asked.extend(cases.values()) or {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    part = run.measured(tmp_path, run.parse(["loader", "--alone"]))
    assert part["input"]["threads"] == 4 and {arguments[-1] for _, arguments in asked} == {4}


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["A", "B", "C"]),
        ("", []),
        ("2,0", ["C", "A"]),
        ("GPU-bb", ["B"]),
        ("MIG-77", ["A", "B", "C"]),
    ],
)
def test_the_gpus_of_a_record_are_those_that_are_seen(
    visible: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{i}, GPU-{2 * name.lower()}, {name}, 570, 1 MiB, 700 W, 1980 MHz" for i, name in enumerate("ABC")]
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="\n".join(rows) + "\n"))
    monkeypatch.setattr(os, "environ", {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    found = run.gpu_facts()
    assert [gpu["name"] for gpu in found] == names
    assert all(list(gpu) == list(run.GPU_FACTS) and gpu["driver_version"] == "570" for gpu in found)
