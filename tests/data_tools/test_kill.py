"""kill -9 at any moment of sharding: no file under a final name is ever wrong, but for roles that
will be others in the end, and another run gives the same bytes.

Run as a script, this file starts the processes to kill: a process without threads forks them, so
that they need no imports. They die at a random call, of any function or of the file system: how
fast the machine is does not change where.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from handmade import build, expect_wrong_roles, files, without_roles

from omnilead.data_tools.__main__ import main
from omnilead.data_tools.build import plan
from omnilead.data_tools.build import shards as shard_writers
from omnilead.data_tools.build.verify import verify
from omnilead.data_tools.dataset import META, Dataset
from omnilead.data_tools.io.errors import DatasetError
from omnilead.data_tools.io.storage import LocalFolder
from tests import unsynced  # noqa: F401
from tests.forks import at_functions, death_at, fork, import_all
from tests.waiting import HANG_S, until

KILLS, SEED = 40, 20240229
LAST_CALLS = 12
ROOT = Path(__file__).parents[2]

if __name__ in ("__main__", "__mp_main__"):  # the victims and their workers: many small shards
    plan.SHARD_CROPS = shard_writers.SHARD_CROPS = 4
    write = LocalFolder.write

    def write_or_hang(self, name, data):
        parts = list(Path(self.url).glob(".build/*.parquet"))
        if len(parts) >= int(os.environ.get("HANG_AT", 10**6)):
            time.sleep(10**6)
        write(self, name, data)

    LocalFolder.write = write_or_hang
    expect_wrong_roles(0, 7)


@pytest.mark.slow
def test_killed_over_and_over(small, tmp_path):
    during = _script("storm", small, tmp_path, KILLS)
    assert sum(during.values()) >= KILLS
    # Kills fell where something can break
    assert min(during[phase] for phase in ("shards", "zarr", "tables")) >= 5


def test_killing_a_run_also_ends_its_worker_processes(small, tmp_path):
    """Kill the whole group, then only the parent: its workers, here reading a zip, must not keep
    writing where the next run writes."""
    source = shutil.make_archive(str(tmp_path / "z"), "zip", small)
    assert _script("workers", source, tmp_path, 1) == {"kills": 2, "orphans": 0}


def test_a_second_run_is_refused_until_the_first_ends(small, shell, tmp_path):
    """The second run is refused with one line and changes nothing. After the first is killed, a
    run with other settings may use the folder, and nothing of the killed run stays: its parts
    have plain names, and the next run has a key."""
    out = tmp_path / "out"
    run = _start("held", small, out, 8, 1)
    try:
        assert os.WIFSTOPPED(os.waitpid(run.pid, os.WUNTRACED)[1])
        before = files(out)
        assert [name for name in before if name.endswith(".parquet")]
        line = shell.error("shard", small, "--workers", 1, "--out", out)
        assert "another run is writing there" in line
        assert files(out) == before
    finally:
        run.kill()
        run.wait()
    hidden = build(small, out, pseudonym_key=b"k" * 32)
    build(small, tmp_path / "fresh", pseudonym_key=b"k" * 32)
    assert files(out) == files(tmp_path / "fresh")
    names = hidden.column("record")
    assert not [name for name in names if name.startswith(("HR", "A0", "JS", "E0"))]


def test_ctrl_c_is_one_line_and_the_run_can_be_finished(small, tmp_path, monkeypatch):
    """Ctrl-C for the whole group gives one line, no traceback of any process, and exit code 130;
    another run finishes."""
    out = tmp_path / "out"
    monkeypatch.setenv("HANG_AT", "3")
    # Or, begun by `command &`, nobody here would hear it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    run = _start("typed", small, out, 2, stderr=subprocess.PIPE, start_new_session=True)
    signal.signal(signal.SIGINT, before)
    until(lambda: len(list(out.glob(".build/*.parquet"))) >= 3)
    os.killpg(run.pid, signal.SIGINT)
    error = run.communicate()[1]
    assert (run.returncode, error) == (130, "interrupted: run the same command again to continue\n")
    assert members(run.pid) == []
    monkeypatch.setattr(plan, "SHARD_CROPS", 4)
    assert typed(str(small), out, 1) == 0


def _start(*arguments, **options):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, **options)


def _script(*arguments):
    run = _start(*arguments, stdout=subprocess.PIPE)
    output = run.communicate()[0]
    assert run.returncode == 0
    return json.loads(output.splitlines()[-1])


# The script


def at_files(out, act):
    """Before each file-system call (open, rename, remove, mkdir, ...) below `out`."""

    def hook(event, arguments):
        if arguments and str(arguments[0]).startswith(str(out)):
            act(event, *arguments)

    sys.addaudithook(hook)


MARKS = {"after": META, "tables": "samples.parquet", "zarr": "store.zarr", "shards": "shards"}


def phase(out):
    return next((name for name, mark in MARKS.items() if (out / mark).exists()), "plan")


def is_partial(name):
    return name.startswith(".build/") or name.endswith(".partial")


def reference(archive, out):
    """An uninterrupted build, which opens no file for writing under its final name, except the tars of
    which crops have other roles than expected. -> how many functions it calls, how often the file system, and which of
    these calls are the worst to die at: every rename and the last ones. What it imports lazily is
    imported here."""
    notes = out.parent / "calls.json"

    def recorded():
        functions, calls, opened = itertools.count(), [], []

        def note(event, path, *how):
            calls.append(event)
            if event == "open" and how[1] & (os.O_WRONLY | os.O_RDWR):
                opened.append(str(path).removeprefix(str(out)).lstrip("/"))

        at_files(out, note)
        at_functions(partial(next, functions))
        build(archive, out, format="both")
        sys.setprofile(None)
        tars = {name for name in files(out) if name.endswith(".tar")}
        again = {name for name in opened if not is_partial(name)}
        assert set() < again < tars
        modules = sorted(set(sys.modules) - {"__main__"})
        notes.write_text(json.dumps([next(functions), calls, modules]))

    for _ in range(2):
        shutil.rmtree(out, ignore_errors=True)
        assert fork(recorded) == 0
        functions, calls, modules = json.loads(notes.read_text())
        import_all(modules)
    last = len(calls) - LAST_CALLS
    worst = [1 + i for i, event in enumerate(calls) if event == "os.rename" or i >= last]
    return functions, len(calls), worst


def check_unfinished(out, right):
    """What a killed run left: every file that has a final name is the right one, perhaps without
    some roles; finished only if it verifies."""
    for name, data in files(out).items() if out.exists() else ():
        assert is_partial(name) or without_roles(right[name]) == without_roles(data), name
    if (out / META).exists():
        assert fork(lambda: holds(out)) == 0
        return
    with pytest.raises(DatasetError, match="unfinished"):
        Dataset.open(str(out))


def holds(out):
    assert verify(Dataset.open(str(out))) == []


def storm(archive, root, kills):
    """-> how many kills fell into each phase."""
    plan.SHARD_CROPS = shard_writers.SHARD_CROPS = 8  # two shards: a third has nothing new to break
    rng = random.Random(SEED)
    functions, calls, worst = reference(archive, root / "right")
    right, out = files(root / "right"), root / "out"
    during = Counter()
    while during.total() < kills or worst:
        code = -1
        while code:
            place = partial(at_files, out)
            call = worst.pop() if worst and not out.exists() else rng.randint(1, calls)
            if out.exists() and rng.random() < 0.7:
                place, call = at_functions, rng.randint(1, functions)

            def victim(place=place, call=call):
                place(death_at(call))
                build(archive, out, format="both")

            code = fork(victim)
            if code:
                assert code == -signal.SIGKILL
                during[phase(out)] += 1
                check_unfinished(out, right)
        assert files(out) == right
        shutil.rmtree(out)
    return during


def members(group):
    """The processes of a group that are alive, and still alive after a long while."""
    found, stop = [group], time.monotonic() + HANG_S
    while found and time.monotonic() < stop:
        time.sleep(0.01)
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
                found += [int(path.parent.name)] if int(its_group) == group and state != "Z" else []
    return found


def under_way(group, out, parts):
    return os.getpgid(group) == group and len(list(out.glob(".build/*.parquet"))) > parts


def workers(archive, root, kills):
    assert fork(lambda: build(archive, root / "right", format="both")) == 0
    right, out, orphans = files(root / "right"), root / "out", 0
    for number in range(kills + 1):
        alone = number == 0
        child = os.fork()
        if not child:
            os.setsid()
            os.environ["HANG_AT"] = str(number + 4)
            build(archive, out, format="both", workers=2)
            os._exit(0)
        try:
            until(partial(under_way, child, out, number))
        finally:
            (os.kill if alone else os.killpg)(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        for orphan in members(child):
            orphans += 1
            os.kill(orphan, signal.SIGKILL)
        check_unfinished(out, right)
    assert fork(lambda: build(archive, out, format="both")) == 0
    assert files(out) == right
    return {"kills": kills + 1, "orphans": orphans}


def typed(archive, out, workers):
    """As the command line runs it."""
    options = ["--format", "both", "--workers", str(workers)]
    return main(["shard", archive, "--out", str(out), *options])


def held(archive, out, crops, parts):
    """A run that stops, alive, when it has written some parts."""
    plan.SHARD_CROPS = crops
    write = LocalFolder.write

    def write_then_stop(self, name, data):
        write(self, name, data)
        if len(list(out.glob(".build/*.parquet"))) == parts:
            os.kill(os.getpid(), signal.SIGSTOP)

    LocalFolder.write = write_then_stop
    build(archive, out, format="both")


if __name__ == "__main__":
    scene, archive, place, *numbers = sys.argv[1:]
    result = globals()[scene](archive, Path(place), *map(int, numbers))
    print(json.dumps(result))
    sys.exit(result if scene == "typed" else 0)
