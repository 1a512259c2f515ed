"""One process, several processes and a Dask cluster give the same bytes, also if a worker dies."""

import contextlib
import errno
import gc
import importlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from handmade import build, files

from omnilead.data_tools.io import cluster
from omnilead.data_tools.io.errors import StorageError
from omnilead.data_tools.sharding import plan
from omnilead.data_tools.sharding import shard as building
from omnilead.data_tools.sharding import verify as checks
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.detect import open_sources
from tests.forks import CONTEXT, started
from tests.waiting import until

distributed = pytest.importorskip("distributed")
# This module and data_tools, for the workers
PLACES = os.pathsep.join(str(Path(__file__).parents[up]) for up in (0, 2))
ADDRESS = re.compile(r"Scheduler at: +(\S+)\n")


@pytest.fixture(scope="module", autouse=True)
def many_small_tasks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 2)
        patch.setattr(plan, "KEYS_PER_TASK", 5)
        patch.setenv("PYTHONPATH", PLACES)
        yield


@pytest.fixture(scope="module")
def right(small, many_small_tasks, tmp_path_factory):
    """The files as one process makes them."""
    build(small, out := tmp_path_factory.mktemp("right") / "out", format="both")
    return files(out)


def test_a_build_starts_its_processes_once_and_keeps_its_lock_until_they_end(
    small, right, tmp_path, monkeypatch
):
    pools = []

    def counted(*how, **more):
        pools.append(executor(*how, **more))
        return pools[-1]

    @contextlib.contextmanager
    def locked_until_they_ended(out):
        with locked(out):
            yield
            with pytest.raises(RuntimeError, match="after shutdown"):
                pools[0].submit(len, "")

    executor, locked = cluster.ProcessPoolExecutor, building.lock_folder
    monkeypatch.setattr(cluster, "ProcessPoolExecutor", counted)
    monkeypatch.setattr(building, "lock_folder", locked_until_they_ended)
    build(small, tmp_path / "out", format="both", workers=2)
    assert files(tmp_path / "out") == right
    assert len(pools) == 1


def run_script(folder, text):
    """What a script prints that Python is started with."""
    (folder / "script.py").write_text(text)
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_script_without_a_guard_runs_once(small, right, tmp_path):
    """Workers that imported it would run it again, and delete what it deletes at its top."""
    printed = run_script(
        tmp_path,
        f"""
import shutil, omnilead
from omnilead.data_tools.sharding import plan

print("began")
shutil.rmtree("out", ignore_errors=True)
plan.SHARD_CROPS, plan.KEYS_PER_TASK = 2, 5
omnilead.shard({str(small)!r}, out="out", format="both", workers=2)
""",
    )
    assert printed == "began\n"
    assert files(tmp_path / "out") == right


def test_workers_find_what_a_script_defines(tmp_path):
    printed = run_script(
        tmp_path,
        """
from omnilead.data_tools.io import cluster

def double(number):
    return 2 * number

if __name__ == "__main__":
    print(list(cluster.run_in_order(double, range(3), workers=2)))
""",
    )
    assert printed == "[0, 2, 4]\n"


@pytest.fixture
def dask(tmp_path_factory):
    """A scheduler and two workers, each a process of its own, as on a real cluster. -> address, the
    three processes."""
    running = []
    output = tmp_path_factory.mktemp("dask") / "output.txt"

    def start(kind, *arguments):
        options = [*arguments, "--host", "127.0.0.1", "--no-dashboard"]
        running.append(started(command, kind, options, out=output, env={"OMP_NUM_THREADS": "1"}))

    try:
        start("scheduler", "--port", "0")
        found = until(lambda: output.exists() and ADDRESS.search(output.read_text()))
        address = found[1]
        for _ in range(2):
            start("worker", address, "--no-nanny", "--nthreads", "1")
        # One that has never registered would look for its scheduler for ever
        until(lambda: output.read_text().count("Registered to:") == 2)
        yield address, running
    finally:
        for process in running:
            process.kill()
            process.join()


def command(kind, options):
    """As `dask scheduler` and `dask worker`."""
    importlib.import_module(f"distributed.cli.dask_{kind}").main(options)


@pytest.fixture
def forked(monkeypatch):
    """Worker processes that need not import everything again."""
    instead = SimpleNamespace(**vars(multiprocessing) | {"get_context": lambda _: CONTEXT})
    monkeypatch.setattr(cluster, "multiprocessing", instead)


@pytest.mark.usefixtures("forked")
def test_processes_make_the_same_bytes(small, right, tmp_path):
    dataset = build(small, tmp_path, format="both", workers=2)
    assert files(tmp_path) == right
    assert verify(dataset, workers=2) == []


def fatal(archive, out, victim="", **settings):
    """A build whose source kills once, in the middle of the fifth shard."""
    [(crops, *_)] = plan.make_plan(open_sources(str(archive)), seed=0).planned([4])
    Path(f"{archive}.fatal").write_text(f"{crops[1][1]} {victim}")
    options = ShardOptions(str(out), format="both", quiet=True, **settings)
    # Else the recipe names the code of this source, and the bytes differ from the right ones
    with mock.patch.object(plan, "is_builtin", return_value=True):
        shard(open_sources(str(archive), "fatal:Fatal"), options)


@pytest.mark.slow
def test_dask_with_a_dying_worker_makes_the_same_bytes(small, right, tmp_path, dask):
    address, (_, *workers) = dask
    fatal(small, tmp_path, cluster=address)
    assert files(tmp_path) == right
    assert sorted(str(worker.exitcode) for worker in workers) == ["-9", "None"]


@pytest.mark.usefixtures("forked")
def test_finished_shards_are_kept_if_a_process_dies(small, right, tmp_path):
    """No process of a pool can be replaced: the run ends, says so, and what was finished is
    kept."""
    with pytest.raises(StorageError, match=r"worker process died"):
        fatal(small, tmp_path, workers=2)
    finished = [path.stem for path in tmp_path.glob(".build/0*.parquet")]
    assert finished  # else this shows nothing
    shards = [tmp_path / f"shards/{name}.tar" for name in finished]
    before = [path.stat().st_ino for path in shards]
    build(small, tmp_path, format="both")
    assert files(tmp_path) == right
    assert [path.stat().st_ino for path in shards] == before


@pytest.mark.usefixtures("forked")
def test_processes_find_the_same_in_an_archive(small, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "RECORDS_PER_TASK", 2)
    archive = Path(shutil.copytree(small, tmp_path / "archive"))
    made = build(archive, tmp_path / "out")
    first, *others = sorted(archive.rglob("*.hea"))
    for header in others[::2]:
        header.write_text(header.read_text().replace("Dx: ", "Dx: 164890007,"))
    first.unlink()
    sources = open_sources(str(archive), "fatal:Fatal")  # takes its time
    found = verify(made, sources)
    assert len(found) == len(others[::2]) + 1 and found[-1].startswith("1 record is not")
    for workers in (2, 3):
        assert verify(made, sources, workers=workers) == found


@pytest.mark.usefixtures("forked")
def test_a_process_that_dies_ends_the_comparison(small, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "RECORDS_PER_TASK", 2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    archive = Path(shutil.copytree(small, tmp_path / "archive"))
    made = build(archive, tmp_path / "out")
    sources = open_sources(str(archive), "fatal:Fatal")
    Path(f"{archive}.fatal").write_text(list(sources[0].keys())[5])
    with pytest.raises(StorageError, match="a worker process died"):
        verify(made, sources, workers=2)
    assert not list(tmp_path.glob("omnilead-*"))
    assert verify(made, sources, workers=2) == []


@pytest.mark.parametrize("address", ["nowhere", "tcp://no.host.invalid:1"])
def test_an_unreachable_scheduler_gives_a_one_line_error(
    address, small, shell, tmp_path, monkeypatch
):
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    line = shell.error("shard", small, "--out", tmp_path, "--cluster", address)
    assert f"--cluster {address}: no scheduler answers" in line


def test_a_client_that_failed_is_gone_before_the_next_one_starts(monkeypatch):
    """Collected later, it would wait for the lock of Dask that the next client holds."""
    under_lock, closed = [], distributed.Client.__del__
    runner, thread = distributed.utils.LoopRunner, distributed.utils._CollectErrorThread

    def collected(client):
        under_lock.append(runner._lock.locked())
        if not under_lock[-1]:
            closed(client)

    def thread_after_a_collection(*args, **options):
        gc.collect()
        return thread(*args, **options)

    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    monkeypatch.setattr(distributed.Client, "__del__", collected)
    monkeypatch.setattr(distributed.utils, "_CollectErrorThread", thread_after_a_collection)
    for _ in range(2):
        with (
            pytest.raises(StorageError, match="no scheduler answers"),
            cluster.dask_client("tcp://127.0.0.1:1"),
        ):
            pass
    gc.collect()
    assert len(under_lock) >= 2 and not any(under_lock)


def test_a_run_can_go_on_after_its_scheduler_died(small, right, tmp_path, dask):
    address, (scheduler, *workers) = dask
    with pytest.raises(StorageError, match="lost the scheduler: run the same command again"):
        fatal(small, tmp_path, scheduler.pid, cluster=address)
    for worker in workers:
        worker.join()  # it may still be at work on a shard, and ends without a scheduler
    build(small, tmp_path, format="both")
    assert files(tmp_path) == right


def test_missing_workers_are_an_error(small, tmp_path, dask, monkeypatch):
    address, (_, *workers) = dask
    own, out = tmp_path / "own.py", str(tmp_path / "out")
    options = ShardOptions(out, cluster=address, quiet=True)
    own.write_text("from fatal import PhysioNet2021\nclass Own(PhysioNet2021): pass\n")
    with pytest.raises(StorageError, match="or the module of --source is not installed there"):
        shard(open_sources(str(small), f"{own}:Own"), options)
    for worker in workers:
        worker.kill()
        worker.join()
    monkeypatch.setattr(cluster, "WORKERS_S", 1)
    with pytest.raises(StorageError, match="no worker in 1 s"):
        build(small, out, cluster=address)


def test_processes_that_cannot_start_give_a_one_line_error(monkeypatch):
    """Where /dev/shm is read-only or full there are no semaphores."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(cluster, "ProcessPoolExecutor", refuse)
    with pytest.raises(StorageError, match=r"/dev/shm: Read-only file system: .*--workers 1"):
        list(cluster.run(str, range(3), workers=2))
