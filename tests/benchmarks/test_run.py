"""The command: what is refused before any work, where a record is written, and resuming a suite."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import measure, report, run, step
from benchmarks.measure import Benchmark, CaseError
from tests.waiting import until

ROOT = Path(run.__file__).parents[1]
SECONDS = {
    "seconds": {"median": 2.0, "low": 1.0, "high": 3.0},
    "cpu_seconds": {"median": 2.0, "low": 1.0, "high": 3.0},
}
INPUT = {"archive": "synthetic", "dataset": "0" * 64, "crops": 4}


def result(_: str) -> dict[str, Any]:
    return SECONDS | {"repeats": 3}


def fails(text: str) -> dict[str, Any]:
    raise CaseError(text)


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the cases of the benchmark `start`; records go to tmp_path / "results"."""
    made = {"first step: a": (result, ("",))}
    module = ModuleType("benchmarks.start")
    module.prepare = lambda work, options: Benchmark(INPUT, made)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.start", module)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run, "git", lambda *_: "0" * 40)
    monkeypatch.setattr(run, "CPU", (("start", "start"),))
    monkeypatch.setattr(measure, "deadline", None)
    monkeypatch.setattr(measure, "limit_s", None)
    return made


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("e2e --model nope", "--model nope: no such file"),
        ("suite --model nope", "--model nope: no such file"),
        ("embed --model {bad}", "model.layers"),
        ("e2e --batch 0", "--batch: 0: must be a whole number, 2 or more"),
        ("e2e --only [", "--only: '[': not a regular expression"),
        ("loader --repeats 2", "--repeats: 2: must be a whole number, 3 or more"),
        ("loader --seconds 0", "--seconds: 0: must be"),
        ("scaling --huge 10", "--huge: 10: must be"),
        ("ingest --device cuda", "--device cuda: ingest does not use one"),
        ("start --only nothing", "--only 'nothing': matches no case: use a part of first step: a"),
        ("suite --stages start,nosuch", "--stages nosuch: no such stage: use start"),
        ("start --out {folder}", "is a folder"),
        ("start --out /proc/none/record.json", "/proc/none"),
        ("nosuch", "invalid choice: 'nosuch'"),
    ],
)
def test_a_wrong_option_is_a_one_line_error_before_any_work(
    words: str, named: str, cases: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text("model: {layers: frog}")
    with pytest.raises(SystemExit) as stopped:
        run.main(shlex.split(words.format(bad=tmp_path / "bad.yaml", folder=tmp_path)))
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and named in error and len(error.splitlines()) == 1
    assert not list((tmp_path / "results").glob("*"))


def test_a_missing_gpu_is_refused(
    cases: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit):
        run.main(["suite", "--device", "cuda"])
    assert (
        capsys.readouterr().err
        == "benchmarks.run: --device cuda: torch finds no CUDA device: use --device cpu\n"
    )


def test_records_are_never_overwritten(
    cases: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        assert run.main(["start"]) == 0
    first, *others = sorted(path.stem for path in (tmp_path / "results").iterdir())
    assert (
        others == [f"{first}-2", f"{first}-3"]
        and "| first step: a | 2.0 | 1 to 3 | 2.0 |" in capsys.readouterr().out
    )
    (part,) = report.newest(report.every(tmp_path / "results")).values()
    assert part["results"] == {"first step: a": SECONDS | {"repeats": 3}}
    assert [run.main(["start", "--out", str(tmp_path / "mine.json")]) for _ in range(2)] == [0, 0]
    assert [path.name for path in tmp_path.glob("*.json")] == ["mine.json"]


def test_a_record_that_cannot_be_written_is_printed(
    cases: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "write_whole", full)
    assert run.main(["start"]) == 1
    printed = capsys.readouterr()
    assert "No space left on device" in printed.err
    assert (
        json.loads(printed.out[printed.out.index("\n{") :])["results"]["first step: a"]["repeats"]
        == 3
    )


def test_without_a_result_no_record_is_written(
    cases: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases["first step: a"] = (fails, ("no luck",))
    for name in ("start", "suite"):
        assert run.main([name]) == 1
        assert "nothing was measured: " in capsys.readouterr().err
    assert not [path for path in (tmp_path / "results").iterdir() if "suite" not in path.name]


INTERRUPTED = """
import signal, sys, time
from benchmarks import measure, run
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests themselves run in the background
def measured(*_):
    measure.call_fresh(time.sleep, 10**6)
run.measured = measured
sys.exit(run.main(["start"]))
"""


def words_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):  # it has just ended
        return " ".join(process.cmdline())
    return ""


def test_ctrl_c_is_one_line() -> None:
    """No process of the case is left; the terminal interrupts it, too."""
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", INTERRUPTED]
    process = subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
    sleeping = until(
        lambda: [
            one for one in psutil.Process(process.pid).children() if "spawn_main" in words_of(one)
        ]
    )
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate()
    assert (process.returncode, error) == (130, "benchmarks.run: interrupted: run it again\n")
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in sleeping)


def test_a_record_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = run.environment()
    assert len(facts["git"]["commit"]) == 40 and facts["hardware"]["cores"] == os.cpu_count()
    assert {"python", "torch", "deepspeed", "numpy"} <= set(facts["versions"])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("OMNILEAD_REVISION", raising=False)
    assert run.revision() == {"commit": "unknown", "dirty": None}
    monkeypatch.setenv("OMNILEAD_REVISION", "1" * 40)
    assert run.revision()["commit"] == "1" * 40


def test_a_suite_continues_where_it_stopped(
    cases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "record.json"
    words = ["suite", "--out", str(out)]
    cases["first step: b"] = (fails, ("no luck",))
    monkeypatch.setattr(run, "CPU", (("broken", "embed"), ("start", "start")))
    monkeypatch.setitem(
        sys.modules, "benchmarks.embed", SimpleNamespace(prepare=lambda *_: fails("no room"))
    )
    assert run.main(words) == 0
    record = json.loads(out.read_text())
    (part,) = record["parts"]
    assert set(part["results"]) == {"first step: a"} and part["input"] == INPUT
    assert record["left_out"] == {"broken": "no room", "start: first step: b": "no luck"}
    cases |= {"first step: a": (fails, ("measured again",)), "first step: b": (result, ("",))}
    assert run.main([*words, "--stages", "start"]) == 0
    (part,) = report.load(out)
    assert set(part["results"]) == {"first step: a", "first step: b"} and part["left_out"] == {}
    assert json.loads(out.read_text())["left_out"] == {"broken": "no room"}


def test_a_bug_in_a_case_fails_the_command(
    cases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the other cases measured is not lost."""
    cases["first step: b"] = (result, ())  # a TypeError
    out = tmp_path / "record.json"
    for words in ("start", "suite"):
        out.unlink(missing_ok=True)
        assert run.main([words, "--out", str(out)]) == 1
        prefix = "start: " if words == "suite" else ""
        assert (
            f"benchmarks.run: {prefix}first step: b: bug: TypeError: result() missing"
            in capsys.readouterr().err
        )
        assert json.loads(out.read_text())["left_out"][f"{prefix}first step: b"].startswith(
            "bug: TypeError"
        )
    part = json.loads(out.read_text())["parts"][0]
    assert set(part["results"]) == {"first step: a"}
    cases["first step: b"] = (result, ("",))
    assert run.main(["suite", "--out", str(out)]) == 0


def test_a_case_over_its_time_limit_waits_for_all_others(
    cases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its repeats are kept, and it is tried again at the end of the same command and of the next one."""
    measured: list[str] = []
    sample = {"units": 1.0, "wall_s": 1.0, "cpu_s": 1.0, "peak_mb": 1.0}

    def call_fresh(timed: Any, case: Any, arguments: Any, repeats: int, keep: Any) -> Any:
        (name,) = arguments
        measured.append(name)
        if name == "slow" and measured.count(name) < 4:
            if measured.count(name) < 3:
                keep(sample)
            raise CaseError(measure.OVER_TIME)
        for _ in range(repeats):
            keep(sample)

    def prepare(*names: str) -> Any:
        made = {f"first step: {name}": (result, (name,)) for name in names}
        return SimpleNamespace(prepare=lambda *_: Benchmark(INPUT, made))

    monkeypatch.setattr(measure, "call_fresh", call_fresh)
    monkeypatch.setattr(run, "GPU", (("start", "start"), ("embed", "embed"), ("start", "start")))
    monkeypatch.setattr(run, "publish", lambda record, path: 0)
    monkeypatch.setattr(run, "check", lambda options: None)
    monkeypatch.setitem(sys.modules, "benchmarks.start", prepare("slow", "a"))
    monkeypatch.setitem(sys.modules, "benchmarks.embed", prepare("b"))
    words = ["suite", "--device", "cuda", "--repeats", "3", "--out", str(tmp_path / "record.json")]
    run.main(words)
    assert measured == ["slow", "a", "b", "slow"]
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["left_out"] == {"start: first step: slow": measure.OVER_TIME}
    assert record["partial"]["start"] == {"first step: slow": [sample, sample]}
    for again, left in ((["slow"], {"start: first step: slow": measure.OVER_TIME}), (["slow"], {})):
        measured_before = len(measured)
        run.main(words)
        record = json.loads((tmp_path / "record.json").read_text())
        assert measured[measured_before:] == again and record["left_out"] == left
    (part,) = [part for part in record["parts"] if part["benchmark"] == "start"]
    assert part["results"]["first step: slow"]["repeats"] == 3 and record["partial"]["start"] == {}


def test_no_stage_starts_after_the_time_limit(
    cases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LEAST_S", 10**6)
    assert run.main(["suite", "--minutes", "1", "--out", str(tmp_path / "record.json")]) == 1
    assert measure.deadline is not None and measure.deadline <= time.monotonic() + 60


def test_another_record_is_not_continued(
    cases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["suite", "--out", str(tmp_path / "record.json")]
    assert run.main(words) == 0
    for commit, more in (("2" * 40, []), ("0" * 40, ["--repeats", "5"])):
        monkeypatch.setattr(run, "git", lambda *_, commit=commit: commit)
        with pytest.raises(SystemExit):
            run.main([*words, *more])
        assert "record.json: is not a record of this command" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "rows"), [("cpu", run.CPU), ("cuda", run.GPU)])
def test_a_suites_stages_are_commands(
    device: str, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = [run.parse([*shlex.split(words), "--device", device]) for _, words in rows]
    measured = {options.benchmark for options in parsed}
    assert measured == {*run.NAMES} - {"suite"} - (
        {"ingest", "scaling"} if device == "cuda" else set()
    )
    names = [one.name for one in step.runs(step.base_run(parsed[0]), step.BATCHES[device])]
    assert len(set(names)) == len(names)
    if device == "cuda":
        import re

        first = {name for name in names if re.search(parsed[0].only, name)}
        ours = "omnilead: bf16, "
        assert names[:5] == [
            "matrix product: bf16",
            f"{ours}layers compiled, 256 crops",  # with the positions convolved in blocks
            # with the library's grouped convolution
            f"{ours}plain kernels, layers compiled, 256 crops",
            f"{ours}256 crops",
            f"{ours}step compiled, 256 crops",
        ]
        assert {*names[:5]} < first < set(names)
        assert {name.split(", ")[-1] for name in names if "fp32" in name} == {
            "matrix product: fp32",
            "64 crops",
        }
