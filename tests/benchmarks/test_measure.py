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
    yield {"attention": "math"}
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


def test_cases_take_turns_in_processes_of_their_own(capsys, golden):
    """One that fails does not affect others; a bug is told from what a machine cannot do."""
    functions = (works, fails, works, measures_itself, dies, has_a_bug)
    cases = {name: (case, (10.0,)) for name, case in zip("abcdef", functions, strict=True)}
    for at_once in (False, True):
        for name, result, reason in run_cases(cases, 3, at_once):
            print(f"{name}: {reason or list(result)}, {result.get('repeats')}", file=sys.stderr)
            rate = result.get("per_s", dict.fromkeys(("low", "median", "high"), 1))
            assert 0 < rate["low"] <= rate["median"] <= rate["high"]
            assert result.get("units", 10) == 10
    golden("measure.txt", capsys.readouterr().err)


LATE = measure.OUT_OF_TIME


@pytest.mark.parametrize(("enough", "kept"), [(7, [4, 3]), (5, [3, LATE]), (4, [LATE, LATE])])
def test_measurements_before_the_deadline_are_kept(enough, kept, monkeypatch):
    """There is time for some repeats; three are enough for a spread."""
    left = iter(range(enough))

    def instead(*arguments, rows):
        if next(left, None) is None:
            raise CaseError(LATE)
        rows.append({"units": 1.0, "wall_s": 1.0, "cpu_s": 1.0})

    monkeypatch.setattr(measure, "call_fresh", instead)
    cases = dict.fromkeys("ab", (works, ()))
    found = {name: reason or result["repeats"] for name, result, reason in run_cases(cases, 9)}
    assert found == dict(zip("ab", kept, strict=True))


def sends_and_dies(send):
    send({"units": 1})
    os._exit(3)


def test_repeats_are_kept_when_their_process_dies():
    rows = []
    with pytest.raises(CaseError, match="its process ended without an answer"):
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

    rows = measure.time_in_turns({"a": side("a"), "b": side("b")}, 3, 5.0)
    assert called == list("baabbaab")  # the first two are not counted
    assert [len(rows[name]) for name in "ab"] == [3, 3]
    assert set(rows["a"][0]) == {"units", "wall_s", "cpu_s", "waited_s"}


def test_the_interval_of_a_median():
    """Between two of the values, by the binomial distribution; of few, the lowest and highest."""
    # of 8, the 2nd to the 7th would be 93 %
    assert [measure.interval(range(n))["low"] for n in (3, 5, 8, 9)] == [0, 0, 0, 1]
    assert measure.interval(range(60)) == {"median": 29.5, "low": 21, "high": 38}
