"""Cases in fresh processes: turns, time limits, what is kept if one fails, and figures with their
spread."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import psutil
import pytest

from benchmarks import measure
from benchmarks.measure import CaseError, call_fresh, run_cases
from tests.waiting import until


def works(units: float) -> float:
    return units * sum(i % 7 > 0 for i in range(10_000)) / 8571


def stream(units: float) -> Generator[float, bool, None]:
    yield 0.0
    while not (yield (units := units + 1)):
        pass


def fails(_: float) -> float:
    raise MemoryError("no room\nfor this")


def dies(_: float) -> float:
    os._exit(3)


def measures_itself(value: float) -> dict[str, Any]:
    return {"value": value}


def test_cases_take_turns_in_processes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    results, left_out = run_cases(
        {"a": (works, (10.0,)), "b": (works, (20.0,)), "c": (measures_itself, (3.0,))}, 3
    )
    lines = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["a", "b", "c", "a", "b", "a", "b"] and not left_out
    assert (
        results["a"]["repeats"] == 3
        and results["b"]["units"] == pytest.approx(20, rel=1e-3)
        and results["c"] == {"value": 3.0}
    )
    assert (
        results["a"]["per_cpu_s"]["low"]
        <= results["a"]["per_cpu_s"]["median"]
        <= results["a"]["per_cpu_s"]["high"]
    )


def test_repeats_in_one_process() -> None:
    results, _ = run_cases({"a": (stream, (10.0,))}, 3, at_once=True)
    assert results["a"]["units"] == 11 and results["a"]["repeats"] == 3


def test_a_failing_case_does_not_affect_others() -> None:
    kept: list[set[str]] = []
    cases = {"a": (fails, (1.0,)), "b": (works, (2.0,)), "c": (dies, (3.0,))}
    results, left_out = run_cases(
        cases, 3, keep=lambda outcome: kept.append({*outcome.results, *outcome.left_out})
    )
    assert set(results) == {"b"} and results["b"]["repeats"] == 3
    assert left_out == {"a": "MemoryError: no room for this", "c": "its process died"}
    assert kept[:3] == [{"a"}, {"a"}, {"a", "c"}] and kept[-1] == {"a", "b", "c"}


@pytest.mark.parametrize(("enough", "kept"), [(7, {"a": 4, "b": 3}), (5, {"a": 3}), (4, {})])
def test_measurements_before_the_deadline_are_kept(
    enough: int, kept: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is time for some repeats; three are enough for a spread."""
    most = enough - 1.0

    def instead(*arguments: Any, keep: Callable[[Any], None]) -> None:
        nonlocal enough
        enough -= 1
        if enough < 0:
            raise CaseError(measure.OUT_OF_TIME)
        keep({"units": 1.0, "wall_s": 1.0, "cpu_s": 1.0, "peak_mb": float(enough)})

    monkeypatch.setattr(measure, "call_fresh", instead)
    results, left_out = run_cases({"a": (works, (1.0,)), "b": (works, (2.0,))}, 9)
    assert {name: result["repeats"] for name, result in results.items()} == kept
    assert not results or results["a"]["peak_mb"] == most  # of all repeats
    assert left_out == {name: measure.OUT_OF_TIME for name in "ab" if name not in kept}


def slows_down(place: Path) -> Generator[float, bool, None]:
    """Hangs in the third repeat of its first process."""
    first = not place.exists()
    place.touch()
    yield 0.0
    for repeat in range(3):
        if first and repeat == 2:
            time.sleep(10**6)
        if (yield 1.0 + repeat):
            return


def test_repeats_before_a_time_limit_are_kept_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All repeats of a process, as on a GPU."""
    monkeypatch.setattr(measure, "limit_s", 2.0)
    cases = {"a": (slows_down, (tmp_path / "begun",))}
    kept: dict[str, measure.Samples] = {}
    results, left_out = run_cases(cases, 3, at_once=True, samples=kept)
    assert not results and left_out == {"a": measure.OVER_TIME}
    assert [each["units"] for each in kept["a"]] == [1, 2]
    results, left_out = run_cases(cases, 3, at_once=True, samples=kept)
    assert results["a"]["repeats"] == 3 and not left_out
    kept = {"a": kept["a"][:1]}
    results, left_out = run_cases({"a": (fails, (1.0,))}, 3, samples=kept)
    assert set(left_out) == {"a"} and not results and kept == {"a": []}


def has_a_bug(_: float) -> float:
    return np.no_such_function()  # type: ignore[no-any-return, attr-defined]


def finds_no_package(_: float) -> float:
    import no_such_package  # type: ignore[import-not-found]

    return float(no_such_package.units)


def test_a_bug_is_told_from_what_a_machine_cannot_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {"a": (has_a_bug, (1.0,)), "b": (finds_no_package, (1.0,)), "c": (works, (1.0,))}
    results, left_out = run_cases(cases, 3, at_once=True)
    assert (
        set(results) == {"c"}
        and left_out["b"] == "ModuleNotFoundError: No module named 'no_such_package'"
    )
    assert left_out["a"].startswith(f"{measure.BUG}AttributeError: module 'numpy' has no attribute")
    with pytest.raises(
        CaseError, match=r"\Abug: AttributeError: "
    ):  # also if a case calls another process
        call_fresh(call_fresh, has_a_bug, 1.0)
    monkeypatch.setattr(measure, "signal", MagicMock())  # what its process prints
    sent: list[measure.Answer] = []
    measure._child(SimpleNamespace(send=sent.append), has_a_bug, (1.0,), False)
    assert sent[0].error.startswith(measure.BUG) and "in has_a_bug" in capsys.readouterr().err


def test_a_hanging_case_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CaseError, match=measure.OVER_TIME):
        call_fresh(time.sleep, 10**6, seconds=0.01)
    monkeypatch.setattr(measure, "deadline", time.monotonic() + 0.01)
    with pytest.raises(CaseError, match=measure.OUT_OF_TIME):
        call_fresh(time.sleep, 10**6, seconds=10)
    monkeypatch.setattr(measure, "deadline", time.monotonic() - 1)
    monkeypatch.setattr(measure, "multiprocessing", None)  # no process is started
    with pytest.raises(CaseError, match=measure.OUT_OF_TIME):
        call_fresh(time.sleep, 10**6)


def starts_another(place: Path) -> None:
    place.write_text(
        str(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(10**6)"]).pid)
    )
    time.sleep(10**6)


def test_an_interrupt_kills_what_a_case_has_started(tmp_path: Path) -> None:
    place, main = tmp_path / "pid", threading.get_ident()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        until(lambda: place.exists() and place.read_text())
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call_fresh(starts_another, place)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    until(lambda: ended(int(place.read_text())))


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_sides_are_measured_in_alternating_order() -> None:
    called: list[str] = []

    def side(name: str) -> Callable[[], dict[str, float]]:
        return lambda: called.append(name) or {"waited_s": 1.0}

    rows = measure.take_turns({"a": side("a"), "b": side("b")}, 3)
    assert called == list("ba" + "ab" + "ba" + "ab")  # the first two are not counted
    assert [len(rows[name]) for name in "ab"] == [3, 3] and set(rows["a"][0]) == {
        "wall_s",
        "cpu_s",
        "waited_s",
    }


def test_the_interval_of_a_median() -> None:
    """Of a hundred values, from about the 40th to the 60th: it contains the true median in 95 of
    100 samples."""
    assert measure.interval([3, 1, 2]) == {"median": 2, "low": 1, "high": 3}
    lows = [
        measure.interval(range(n))["low"] for n in (5, 6, 8, 9, 60)
    ]  # of 8, the 2nd to the 7th would be 93 %
    assert lows == [0, 0, 0, 1, 21] and measure.interval(range(60))["high"] == 38
    draws = np.random.default_rng(0).exponential(size=(400, 60))
    intervals = [measure.interval(row) for row in draws]
    assert 0.94 < np.mean([one["low"] <= np.log(2) <= one["high"] for one in intervals]) < 0.99
