"""Cases in fresh processes: turns, time limits, what is kept if one fails, and figures with their
spread."""

import os
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from benchmarks import measure
from benchmarks.measure import CaseError, call_fresh, run_cases
from tests.waiting import until


def works(units):
    while True:
        yield units * sum(i % 7 > 0 for i in range(10_000)) / 8571


def fails(_):
    raise MemoryError("no room\nfor this")


def dies(_):
    os._exit(3)


def has_a_bug(_):
    return np.no_such_function()


def measures_itself(value):
    return {"value": value}


def outcome(cases, at_once=False):
    found = list(run_cases({name: (case, (10.0,)) for name, case in cases.items()}, 3, at_once))
    return {name: one for name, one, _ in found if one}, {
        name: why for name, _, why in found if why
    }


def test_cases_take_turns_in_processes_of_their_own(capsys):
    results, left_out = outcome({"a": works, "b": works, "c": measures_itself})
    lines = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["a", "b", "c", "a", "b", "a", "b"] and not left_out
    assert results["c"] == {"value": 10.0} and results["a"]["repeats"] == 3
    assert results["b"]["units"] == pytest.approx(10, rel=1e-3)
    rate = results["a"]["per_cpu_s"]
    assert 0 < rate["low"] <= rate["median"] <= rate["high"]


def test_a_failing_case_does_not_affect_others():
    """A bug is told from what a machine cannot do."""
    results, left_out = outcome({"a": fails, "b": works, "c": dies, "d": has_a_bug}, at_once=True)
    assert set(results) == {"b"} and results["b"]["repeats"] == 3
    bug = left_out.pop("d")
    assert left_out == {"a": "MemoryError: no room for this", "c": "its process died"}
    assert bug.startswith(f"{measure.BUG}AttributeError: module 'numpy' has no attribute")


@pytest.mark.parametrize(("enough", "kept"), [(7, {"a": 4, "b": 3}), (5, {"a": 3}), (4, {})])
def test_measurements_before_the_deadline_are_kept(enough, kept, monkeypatch):
    """There is time for some repeats; three are enough for a spread."""
    left = iter(range(enough))

    def instead(*arguments):
        if next(left, None) is None:
            raise CaseError(measure.OUT_OF_TIME)
        return [{"units": 1.0, "wall_s": 1.0, "cpu_s": 1.0}]

    monkeypatch.setattr(measure, "call_fresh", instead)
    found = list(run_cases({"a": (works, (1.0,)), "b": (works, (2.0,))}, 9))
    assert {name: result["repeats"] for name, result, _ in found if result} == kept
    left_out = {name: why for name, _, why in found if why}
    assert left_out == {name: measure.OUT_OF_TIME for name in "ab" if name not in kept}


def starts_another(place):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"])
    place.write_text(str(child.pid))
    time.sleep(10**6)


def ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_process_over_its_time_is_killed_with_its_children(tmp_path, monkeypatch):
    place, poll = tmp_path / "pid", measure.multiprocessing.connection.Connection.poll

    def waits(pipe, seconds):
        until(lambda: place.exists() and place.read_text())
        return bool(poll(pipe, 0))

    monkeypatch.setattr(measure.multiprocessing.connection.Connection, "poll", waits)
    with pytest.raises(CaseError, match=measure.OVER_TIME):
        call_fresh(starts_another, place, seconds=60)
    until(lambda: ended(int(place.read_text())))
    monkeypatch.setattr(measure, "deadline", time.monotonic())
    with pytest.raises(CaseError, match=measure.OUT_OF_TIME):
        call_fresh(starts_another, place)


def test_sides_are_measured_in_alternating_order():
    called = []

    def side(name):
        return lambda: called.append(name) or {"waited_s": 1.0}

    rows = measure.take_turns({"a": side("a"), "b": side("b")}, 3, 5.0)
    assert called == list("ba" + "ab" + "ba" + "ab")  # the first two are not counted
    assert [len(rows[name]) for name in "ab"] == [3, 3]
    assert set(rows["a"][0]) == {"units", "wall_s", "cpu_s", "waited_s"}


def test_the_interval_of_a_median():
    """Of a hundred values, from about the 40th to the 60th: it contains the true median in 95 of
    100 samples."""
    assert measure.interval([3, 1, 2]) == {"median": 2, "low": 1, "high": 3}
    # of 8, the 2nd to the 7th would be 93 %
    lows = [measure.interval(range(n))["low"] for n in (5, 6, 8, 9, 60)]
    assert lows == [0, 0, 0, 1, 21] and measure.interval(range(60))["high"] == 38
    draws = np.random.default_rng(0).exponential(size=(400, 60))
    found = [measure.interval(row) for row in draws]
    assert 0.94 < np.mean([one["low"] <= np.log(2) <= one["high"] for one in found]) < 0.99
