"""One process, several processes and a Dask cluster give the same bytes, also if a worker dies."""

import errno
import importlib
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from handmade import build, files

from omnilead.data_tools import cluster, plan
from omnilead.data_tools.__main__ import main
from omnilead.data_tools.build import ShardOptions, shard
from omnilead.data_tools.errors import StorageError
from omnilead.data_tools.sources import open_sources
from omnilead.data_tools.verify import verify
from tests.forks import CONTEXT, started
from tests.waiting import until

distributed = pytest.importorskip("distributed")
PLACES = os.pathsep.join(
    str(Path(__file__).parents[up]) for up in (0, 2)
)  # this module and data_tools, for the workers
Dask = tuple[str, list[Any]]


@pytest.fixture(scope="module", autouse=True)
def many_small_tasks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 2)
        patch.setattr(plan, "SCAN_CHUNK", 5)
        patch.setenv("PYTHONPATH", PLACES)
        yield


@pytest.fixture(scope="module")
def right(
    small: Path, many_small_tasks: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The files as one process makes them."""
    build(small, out := tmp_path_factory.mktemp("right") / "out", format="both")
    return files(out)


@pytest.fixture
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dask]:
    """A scheduler and two workers, each a process of its own, as on a real cluster. -> address, the
    three processes."""
    running: list[Any] = []
    output = tmp_path_factory.mktemp("dask") / "output.txt"

    def start(kind: str, *arguments: str) -> None:
        options = [*arguments, "--host", "127.0.0.1", "--no-dashboard"]
        running.append(started(command, kind, options, out=output, env={"OMP_NUM_THREADS": "1"}))

    try:
        start("scheduler", "--port", "0")
        until(lambda: output.exists() and "Scheduler at:" in output.read_text())
        address = next(
            line.split()[-1] for line in output.read_text().splitlines() if "Scheduler at:" in line
        )
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


@pytest.mark.usefixtures("forked")
def test_processes_make_the_same_bytes(
    small: Path, right: dict[str, bytes], tmp_path: Path
) -> None:
    dataset = build(small, tmp_path, format="both", workers=2)
    assert files(tmp_path) == right
    assert verify(dataset, workers=2) == []


def fatal(archive: Path, out: Path, victim: int | str = "", **settings: Any) -> None:
    """A build whose source kills once, in the middle of the fifth shard."""
    crops = plan.make_plan(open_sources(str(archive)), seed=0).shard(4).crops
    Path(f"{archive}.fatal").write_text(f"{crops[1][1]} {victim}")
    shard(
        open_sources(str(archive), "fatal:Fatal"),
        ShardOptions(str(out), format="both", quiet=True, **settings),
    )


def test_dask_with_a_dying_worker_makes_the_same_bytes(
    small: Path, right: dict[str, bytes], tmp_path: Path, dask: Dask
) -> None:
    address, (_, *workers) = dask
    fatal(small, tmp_path, cluster=address)
    assert files(tmp_path) == right
    assert sorted(str(worker.exitcode) for worker in workers) == ["-9", "None"]


@pytest.mark.usefixtures("forked")
def test_finished_shards_are_kept_if_a_process_dies(
    small: Path, right: dict[str, bytes], tmp_path: Path
) -> None:
    """No process of a pool can be replaced: the run ends, says so, and what was finished is
    kept."""
    with pytest.raises(StorageError, match=r"worker process died.*run the same command again"):
        fatal(small, tmp_path, workers=2)
    kept = {
        path.stem: (tmp_path / f"shards/{path.stem}.tar").stat().st_ino
        for path in tmp_path.glob(".build/0*.parquet")
    }
    build(small, tmp_path, format="both")
    assert files(tmp_path) == right
    assert kept  # else this shows nothing
    assert all(
        (tmp_path / f"shards/{name}.tar").stat().st_ino == inode for name, inode in kept.items()
    )


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "nowhere", "tcp://no.such.host.invalid:8786"]
)
def test_an_unreachable_scheduler_gives_a_one_line_error(
    small: Path,
    tmp_path: Path,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    assert main(["shard", str(small), "--out", str(tmp_path), "--cluster", address]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--cluster {address}: no scheduler answers" in line


def test_a_run_can_go_on_after_its_scheduler_died(
    small: Path, right: dict[str, bytes], tmp_path: Path, dask: Dask
) -> None:
    address, (scheduler, *workers) = dask
    with pytest.raises(StorageError, match="lost the scheduler: run the same command again"):
        fatal(small, tmp_path, scheduler.pid, cluster=address)
    for worker in workers:
        worker.join()  # it may still be at work on a shard, and ends without a scheduler
    build(small, tmp_path, format="both")
    assert files(tmp_path) == right


def test_missing_workers_are_an_error(
    small: Path, tmp_path: Path, dask: Dask, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, (_, *workers) = dask
    (tmp_path / "only_here.py").write_text(
        "from fatal import PhysioNet2021\nclass Own(PhysioNet2021): pass\n"
    )
    sources = open_sources(str(small), f"{tmp_path / 'only_here.py'}:Own")
    with pytest.raises(
        StorageError, match="omnilead or the module of --source is not installed there"
    ):
        shard(sources, ShardOptions(str(tmp_path / "out"), cluster=address, quiet=True))
    for worker in workers:
        worker.kill()
        worker.join()
    monkeypatch.setattr(cluster, "WORKERS_S", 1)
    with pytest.raises(StorageError, match="no worker in 1 s"):
        build(small, tmp_path / "out", cluster=address)


def test_processes_that_cannot_start_give_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /dev/shm is read-only or full there are no semaphores."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(cluster, "ProcessPoolExecutor", refuse)
    with pytest.raises(StorageError, match=r"/dev/shm: Read-only file system: .*--workers 1"):
        list(cluster.run(str, range(3), workers=2))
