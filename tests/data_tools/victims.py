"""The runs that test_kill.py kills; each scene is a function, called by its name on the command line.

A process without threads forks the victims of a storm, so that they need no imports. They die at a
random call, of any function or of the file system: how fast the machine is does not change where.
"""

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from handmade import build, files

from omnilead.__main__ import main
from omnilead.data_tools.dataset import META, Dataset
from omnilead.data_tools.io.errors import DatasetError
from omnilead.data_tools.io.storage import LocalFolder
from omnilead.data_tools.sharding import plan
from omnilead.data_tools.sharding import shards as shard_writers
from omnilead.data_tools.sharding.leave_out import LeaveOut
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.detect import open_sources
from tests import unsynced  # noqa: F401
from tests.forks import at_functions, death_at, fork, import_all, members
from tests.waiting import until

LAST_CALLS = 12
MARKS = {"after": META, "tables": "samples.parquet", "zarr": "store.zarr", "shards": "shards"}

# Many small shards, also in the workers' processes
plan.SHARD_CROPS = shard_writers.SHARD_CROPS = 4
write = LocalFolder.write


def write_or_hang(self, name, data):
    parts = list(Path(self.url).glob(".build/*.parquet"))
    if len(parts) >= int(os.environ.get("HANG_AT", 10**6)):
        time.sleep(10**6)
    write(self, name, data)


LocalFolder.write = write_or_hang


def at_files(out, act):
    """Before each file-system call (open, rename, remove, mkdir, ...) below `out`."""

    def hook(event, arguments):
        if arguments and str(arguments[0]).startswith(str(out)):
            act(event, *arguments)

    sys.addaudithook(hook)


def function_calls(change, notes):
    """How many functions a change calls that nobody kills. What it imports lazily is imported here, for
    all victims. `notes`: a file for its process."""

    def counted():
        calls = itertools.count()
        at_functions(partial(next, calls))
        change()
        sys.setprofile(None)
        modules = sorted(set(sys.modules) - {"__main__"})
        notes.write_text(json.dumps([next(calls), modules]))

    assert fork(counted) == 0
    calls, modules = json.loads(notes.read_text())
    import_all(modules)
    return calls


def killed_until_it_ends(change, draw, after_a_kill):
    """Begin a change anew until none kills it. `draw`: at which kind of calls, and at which of them. -> how
    many kills that took."""
    for kills in itertools.count():
        place, call = draw()

        def victim(place=place, call=call):
            place(death_at(call))
            change()

        code = fork(victim)
        if not code:
            return kills
        assert code == -signal.SIGKILL
        after_a_kill()


# Scenes: what a storm kills


def new_dataset(archive, root, kills):
    """-> how many kills fell into each phase of a build."""
    plan.SHARD_CROPS = shard_writers.SHARD_CROPS = 8  # two shards: a third has nothing new to break
    rng = random.Random(20240229)
    functions, calls, worst = reference(archive, root / "right")
    right, out = files(root / "right"), root / "out"
    during = Counter()

    def draw():
        call = worst.pop() if worst and not out.exists() else rng.randint(1, calls)
        if out.exists() and rng.random() < 0.7:
            return at_functions, rng.randint(1, functions)
        return partial(at_files, out), call

    def after_a_kill():
        phase = (name for name, mark in MARKS.items() if (out / mark).exists())
        during[next(phase, "plan")] += 1
        check_unfinished(out, right)

    while during.total() < kills or worst:
        killed_until_it_ends(partial(build, archive, out, format="both"), draw, after_a_kill)
        assert files(out) == right
        shutil.rmtree(out)
    return during


def reference(archive, out):
    """An uninterrupted build, which opens no file for writing under its final name. -> how many functions it
    calls, how often the file system, and which of these calls are the worst to die at: every rename and
    the last ones."""
    notes = out.parent / "file calls.json"

    def noted():
        calls, opened = [], []

        def note(event, path, *how):
            calls.append(event)
            if event == "open" and how[1] & (os.O_WRONLY | os.O_RDWR):
                opened.append(str(path).removeprefix(str(out)).lstrip("/"))

        at_files(out, note)
        build(archive, out, format="both")
        notes.write_text(json.dumps([calls, opened]))

    for _ in range(2):  # the first one imports
        shutil.rmtree(out, ignore_errors=True)
        functions = function_calls(noted, out.parent / "calls.json")
    calls, opened = json.loads(notes.read_text())
    assert not {name for name in opened if not is_partial(name)}
    last = len(calls) - LAST_CALLS
    worst = [1 + i for i, event in enumerate(calls) if event == "os.rename" or i >= last]
    return functions, len(calls), worst


def is_partial(name):
    return name.startswith(".build/") or name.endswith(".partial")


def check_unfinished(out, right):
    """What a killed run left: every file that has a final name is the right one; finished only if it
    verifies."""
    for name, data in files(out).items() if out.exists() else ():
        assert is_partial(name) or right[name] == data, name
    if (out / META).exists():
        assert fork(lambda: holds(out)) == 0
        return
    with pytest.raises(DatasetError, match="unfinished"):
        Dataset.open(str(out))


def holds(out):
    assert verify(Dataset.open(str(out))) == []


def from_dataset(archive, root, kills, old, withdrawn):
    """A dataset from `old` and an archive, without some patients and copies of their ECGs; then with other
    roles. -> how many kills."""
    rng, died, out = random.Random(43), 0, root / "out"

    def changes(out):
        sources = [*open_sources(old), *open_sources(archive)]
        leave_out = LeaveOut.read(withdrawn, None)
        how = partial(ShardOptions, str(out), quiet=True, leave_out=leave_out)
        return partial(shard, sources, how()), partial(shard, sources, how(plan="all"))

    references = []
    for change in changes(root / "right"):
        calls = function_calls(change, root / "calls.json")
        references.append((calls, files(root / "right")))
    while died < kills:
        for change, (calls, right) in zip(changes(out), references, strict=True):
            draw = partial(at_any_function, rng, calls)
            died += killed_until_it_ends(change, draw, lambda: None)
            assert files(out) == right
        shutil.rmtree(out)
    return died


def at_any_function(rng, calls):
    return at_functions, rng.randint(1, calls)


# Scenes: runs with processes of their own


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


def under_way(group, out, parts):
    return os.getpgid(group) == group and len(list(out.glob(".build/*.parquet"))) > parts


def typed(archive, out, workers):
    """As the command line runs it."""
    options = ["--format", "both", "--workers", str(workers)]
    return main(["shard", archive, "--out", str(out), *options])


def held(archive, out, crops, parts):
    """A run that stops, alive, when it has written some parts."""
    plan.SHARD_CROPS = crops

    def write_then_stop(self, name, data):
        write(self, name, data)
        if len(list(out.glob(".build/*.parquet"))) == parts:
            os.kill(os.getpid(), signal.SIGSTOP)

    LocalFolder.write = write_then_stop
    build(archive, out, format="both")


if __name__ == "__main__":
    scene, archive, place, *words = sys.argv[1:]
    more = [int(word) if word.isdigit() else word for word in words]
    result = globals()[scene](archive, Path(place), *more)
    print(json.dumps(result))
    sys.exit(result if scene == "typed" else 0)
