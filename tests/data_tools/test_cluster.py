"""The same bytes from one process, several, and a Dask cluster; and a worker's death costs time, never data."""

import errno
import importlib
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_tools import cluster, plan
from data_tools.__main__ import main
from data_tools.build import ShardOptions, shard
from data_tools.errors import StorageError
from data_tools.sources import open_sources
from data_tools.synth import synthesise
from tests.forks import CONTEXT, started
from tests.waiting import until

distributed = pytest.importorskip("distributed")
PLACES = os.pathsep.join(str(Path(__file__).parents[up]) for up in (0, 2))  # this module and data_tools, for the workers
Dask = tuple[str, list[Any]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cluster") / "archive"
    synthesise(out, patients=20, sessions=2, seed=4, progress=False)
    return out


@pytest.fixture(autouse=True)
def many_small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SHARD_CROPS", 8)
    monkeypatch.setenv("PYTHONPATH", PLACES)


@pytest.fixture(scope="module")
def right(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files as one process makes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 8)
        out = tmp_path_factory.mktemp("right") / "out"
        shard(open_sources(str(small)), ShardOptions(str(out), format="both", quiet=True))
    return files(out)


@pytest.fixture
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dask]:
    """A scheduler and two workers, each a process of its own, as on a real cluster. -> address, the three processes."""
    running: list[Any] = []
    told = tmp_path_factory.mktemp("dask") / "said.txt"

    def start(kind: str, *arguments: str) -> None:
        options = [*arguments, "--host", "127.0.0.1", "--no-dashboard"]
        running.append(started(command, kind, options, out=told, env={"OMP_NUM_THREADS": "1"}))

    try:
        start("scheduler", "--port", "0")
        until(lambda: told.exists() and "Scheduler at:" in told.read_text())
        address = next(line.split()[-1] for line in told.read_text().splitlines() if "Scheduler at:" in line)
        for _ in range(2):
            start("worker", address, "--no-nanny", "--nthreads", "1")
        yield address, running
    finally:
        for process in running:
            process.kill()
            process.join()


def command(kind: str, options: list[str]) -> None:
    """As `dask scheduler` and `dask worker`."""
    importlib.import_module(f"distributed.cli.dask_{kind}").main(options)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes that need not import everything again."""
    instead = SimpleNamespace(**vars(multiprocessing) | {"get_context": lambda _: CONTEXT})
    monkeypatch.setattr(cluster, "multiprocessing", instead)


def test_processes_make_the_same_bytes(
    small: Path, right: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "SCAN_CHUNK", 16)
    shard(open_sources(str(small)), ShardOptions(str(tmp_path), format="both", workers=2, quiet=True))
    assert files(tmp_path) == right


def test_dask_with_a_dying_worker_makes_the_same_bytes(
    small: Path, right: dict[str, bytes], tmp_path: Path, dask: Dask, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, (_, *workers) = dask
    monkeypatch.setattr(plan, "SCAN_CHUNK", 16)
    trap(small)
    sources = open_sources(str(small), "fatal:Fatal")
    shard(sources, ShardOptions(str(tmp_path), format="both", cluster=address, quiet=True))
    assert files(tmp_path) == right
    assert sorted(str(worker.exitcode) for worker in workers) == ["-9", "None"]


@pytest.mark.usefixtures("forked")
def test_process_that_dies(small: Path, right: dict[str, bytes], tmp_path: Path) -> None:
    """No process of a pool can be replaced: the run ends, says so, and what was finished is kept."""
    trap(small)
    settings = ShardOptions(str(tmp_path), format="both", workers=2, quiet=True)
    with pytest.raises(StorageError, match=r"worker process died.*run the same command again"):
        shard(open_sources(str(small), "fatal:Fatal"), settings)
    kept = {path.stem: (tmp_path / f"shards/{path.stem}.tar").stat().st_ino for path in tmp_path.glob(".build/0*.parquet")}
    shard(open_sources(str(small), "fatal:Fatal"), settings)
    assert files(tmp_path) == right
    assert kept  # else this shows nothing
    assert all((tmp_path / f"shards/{name}.tar").stat().st_ino == inode for name, inode in kept.items())


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nowhere", "tcp://no.such.host.invalid:8786"])
def test_no_scheduler(
    small: Path, tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    assert main(["shard", str(small), "--out", str(tmp_path), "--cluster", address]) == 2
    told = capsys.readouterr().err
    assert f"--cluster {address}: no scheduler answers" in told
    assert len(told.splitlines()) == 1


def test_scheduler_that_dies(small: Path, right: dict[str, bytes], tmp_path: Path, dask: Dask) -> None:
    address, (scheduler, *_) = dask
    trap(small, scheduler.pid)
    with pytest.raises(StorageError, match="scheduler lost: run the same command again"):
        shard(open_sources(str(small), "fatal:Fatal"), ShardOptions(str(tmp_path), cluster=address, quiet=True))
    shard(open_sources(str(small)), ShardOptions(str(tmp_path), format="both", quiet=True))
    assert files(tmp_path) == right


def test_cluster_that_cannot_work(small: Path, tmp_path: Path, dask: Dask, monkeypatch: pytest.MonkeyPatch) -> None:
    address, (_, *workers) = dask
    settings = ShardOptions(str(tmp_path / "out"), cluster=address, quiet=True)
    (tmp_path / "only_here.py").write_text("from fatal import PhysioNet2021\nclass Own(PhysioNet2021): pass\n")
    with pytest.raises(StorageError, match="--source's module, is not installed there"):
        shard(open_sources(str(small), f"{tmp_path / 'only_here.py'}:Own"), settings)
    for worker in workers:
        worker.kill()
        worker.join()
    monkeypatch.setattr(cluster, "WORKERS_S", 1)
    with pytest.raises(StorageError, match="no worker in 1 s"):
        shard(open_sources(str(small)), settings)


def trap(archive: Path, victim: int | str = "") -> None:
    """Lay it at a record in the middle of the fourth shard."""
    crops = plan.make_plan(open_sources(str(archive)), seed=0).shard(3).crops
    Path(f"{archive}.fatal").write_text(f"{crops[4][1]} {victim}")


def files(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_processes_that_cannot_be_started_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /dev/shm is read-only or full there are no semaphores."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(cluster, "ProcessPoolExecutor", refuse)
    with pytest.raises(StorageError, match=r"/dev/shm: Read-only file system: .*--workers 1"):
        list(cluster.run(str, range(3), workers=2))
