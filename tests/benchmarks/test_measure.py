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
        yield units


def fails(_):
    raise MemoryError("no room\nfor this")


def dies(_):
    os._exit(3)


def has_a_bug(_):
    return np.no_such_function()


def measures_itself(value):
    return {"value": value}


def outcome(cases, repeats=3, at_once=False):
    """The last result of each case that has one, and why others were left out."""
    results, left_out = {}, {}
    given = {name: (case, (10.0,)) for name, case in cases.items()}
    for name, result, reason in run_cases(given, repeats, at_once):
        (results if result else left_out)[name] = result or reason
    return results, left_out


def test_cases_take_turns_in_processes_of_their_own(capsys):
    results, left_out = outcome({"a": works, "b": works, "c": measures_itself})
    lines = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["a", "b", "c", "a", "b", "a", "b"] and not left_out
    assert results["c"] == {"value": 10.0} and results["a"]["repeats"] == 3
    assert results["b"]["units"] == 10
    rate = results["a"]["per_s"]
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

    def instead(*arguments, rows):
        if next(left, None) is None:
            raise CaseError(measure.OUT_OF_TIME)
        rows.append({"units": 1.0, "wall_s": 1.0, "cpu_s": 1.0})

    monkeypatch.setattr(measure, "call_fresh", instead)
    results, left_out = outcome({"a": works, "b": works}, 9)
    assert {name: result["repeats"] for name, result in results.items()} == kept
    assert left_out == {name: measure.OUT_OF_TIME for name in "ab" if name not in kept}


def sends_and_dies(send):
    send({"units": 1})
    os._exit(3)


def test_repeats_are_kept_when_their_process_dies():
    rows = []
    with pytest.raises(CaseError, match="its process died"):
        call_fresh(sends_and_dies, rows=rows)
    assert rows == [{"units": 1}]


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
    """Between two of the values, by the binomial distribution; of few, the lowest and highest."""
    assert measure.interval([3, 1, 2]) == {"median": 2, "low": 1, "high": 3}
    # of 8, the 2nd to the 7th would be 93 %
    lows = [measure.interval(range(n))["low"] for n in (5, 6, 8, 9, 60)]
    assert lows == [0, 0, 0, 1, 21] and measure.interval(range(60))["high"] == 38
