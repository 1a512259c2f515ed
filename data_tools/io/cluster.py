"""Run many tasks in this process, in N processes, or on a Dask cluster; results are yielded as they
finish.

A task's result depends only on its argument, so order, retries and the number of workers do not
change it. Only a limited number of tasks is submitted at a time, so that eleven million records do
not queue up in memory.
"""

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import chain, islice
from multiprocessing import spawn
from typing import Any, TypeVar

from .errors import Flag, StorageError

Task = TypeVar("Task")
Result = TypeVar("Result")
DASK_RETRIES = 5  # of a task that fails on a Dask worker: another worker may have more disk space
CONNECT_S, WORKERS_S = 10, 60
_starting_processes = threading.Lock()
_pools: ContextVar[dict[int, ProcessPoolExecutor] | None] = ContextVar("pools", default=None)


def run(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    workers: int = 1,
    cluster: str | None = None,
) -> Iterator[Result]:
    """Yields function(task) for each task, in the order in which they finish."""
    queue = iter(tasks)
    if cluster:
        return _run_on_dask(function, queue, cluster)
    first = list(islice(queue, 2))
    # For a single task, starting processes would cost more than the task
    if workers <= 1 or len(first) < 2:
        return map(function, chain(first, queue))
    return _run_on_processes(function, chain(first, queue), workers)


def run_in_order(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    workers: int = 1,
    cluster: str | None = None,
) -> Iterator[Result]:
    """Yields function(task) for each task, in the order of the tasks."""
    early: dict[int, Result] = {}
    due = 0
    for number, result in run(
        partial(_call_numbered, function), enumerate(tasks), workers, cluster
    ):
        early[number] = result
        while due in early:
            yield early.pop(due)
            due += 1


def _call_numbered(
    function: Callable[[Task], Result], task: tuple[int, Task]
) -> tuple[int, Result]:
    number, argument = task
    return number, function(argument)


@contextmanager
def reuse_processes() -> Iterator[None]:
    """Lets calls of `run` in the block use the same processes, because starting a process takes a
    CPU-second."""
    pools: dict[int, ProcessPoolExecutor] = {}
    token = _pools.set(pools)
    try:
        yield
    finally:
        _pools.reset(token)
        for pool in pools.values():
            pool.shutdown(cancel_futures=True)


@contextmanager
def _process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    pools = _pools.get()
    if pools and workers in pools:
        yield pools[workers]
        return
    context = multiprocessing.get_context("spawn")
    try:
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare_worker)
    except OSError as error:  # without a writable /dev/shm, the pool gets no semaphores
        raise StorageError(
            f"/dev/shm: {error.strerror}: allow this user to write there, or use ",
            Flag("--workers"),
            " 1",
        ) from None
    if pools is not None:
        pools[workers] = pool
        yield pool
        return
    with pool:
        yield pool


def _run_on_processes(
    function: Callable[[Task], Result], queue: Iterator[Task], workers: int
) -> Iterator[Result]:
    pending: set[Future[Result]] = set()
    # A function that refers to __main__ may need a class that the user's script defines
    needs_script = b"__main__" in pickle.dumps(function)
    with _process_pool(workers) as pool:

        def submit(count: int) -> set[Future[Result]]:
            taken = list(islice(queue, count))
            # Workers inherit the blocked signal, so Ctrl-C makes them print no traceback
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                with nullcontext() if needs_script else _hide_main_script():
                    return {pool.submit(function, task) for task in taken}
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        try:
            pending = submit(2 * workers)
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                pending |= submit(len(done))
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise StorageError(
                "a worker process died (out of memory?): run the same command again to continue"
            ) from None
        finally:
            for future in pending:
                future.cancel()


@contextmanager
def _hide_main_script() -> Iterator[None]:
    """Hides the script that Python was started with from the processes that this thread starts in the
    block. They do not need it, and a script without an `if __name__ == "__main__"` guard would run again
    in each of them."""
    this_thread = threading.get_ident()

    def preparation_without_script(name: str) -> dict[str, Any]:
        facts = preparation_data(name)
        if threading.get_ident() == this_thread:
            facts.pop("init_main_from_name", None)
            facts.pop("init_main_from_path", None)
        return facts

    with _starting_processes:
        preparation_data = spawn.get_preparation_data
        spawn.get_preparation_data = preparation_without_script
        try:
            yield
        finally:
            spawn.get_preparation_data = preparation_data


def _prepare_worker() -> None:
    """Prepares a worker process. It gets one thread, because threads of numpy and pyarrow would compete
    for cores. It exits without a traceback on Ctrl-C. It also exits when its parent dies, so that it
    never writes to the same files as the next run."""
    import pyarrow

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    pyarrow.set_cpu_count(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


def _run_on_dask(
    function: Callable[[Task], Result], queue: Iterator[Task], address: str
) -> Iterator[Result]:
    with dask_client(address) as client:
        from distributed import as_completed

        window = max(16, 4 * sum(client.nthreads().values()))

        def submit(count: int) -> list[Any]:
            return [
                client.submit(function, task, pure=False, retries=DASK_RETRIES)
                for task in islice(queue, count)
            ]

        futures = as_completed(submit(window))
        for future in futures:
            yield future.result()
            future.release()
            futures.update(submit(1))


@contextmanager
def dask_client(address: str) -> Iterator[Any]:
    """Yields a client of a Dask cluster that has at least one worker. Dask's exceptions in the block
    become StorageErrors of one line."""
    try:
        from distributed import Client
        from distributed.comm.core import CommClosedError
        from distributed.scheduler import KilledWorker
    except ImportError as error:
        raise StorageError(
            Flag("--cluster"),
            f" needs the extra cluster: pip install 'omnilead[cluster]' ({error})",
        ) from None
    # Dask need not log its errors: those that matter become StorageErrors below
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    # A client that failed to connect closes itself when it is garbage-collected. If that happened
    # while another client starts, both would wait forever for Dask's lock.
    gc.collect()
    try:
        client: Any = Client(address, timeout=CONNECT_S)
    except (OSError, TimeoutError, ValueError) as error:
        raise StorageError(
            Flag("--cluster"),
            f" {address}: no scheduler answers ({type(error).__name__}): start one",
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=WORKERS_S)
        except (OSError, TimeoutError):
            raise StorageError(
                Flag("--cluster"),
                f" {address}: no worker in {WORKERS_S} s: start some with `dask worker`",
            ) from None
        try:
            yield client
        except KilledWorker as error:
            died = error.allowed_failures + 1
            raise StorageError(
                Flag("--cluster"),
                f" {address}: {died} workers died under the same task (out of memory?): give workers more memory",
            ) from None
        except (CommClosedError, CancelledError):
            raise StorageError(
                Flag("--cluster"),
                f" {address}: lost the scheduler: run the same command again to continue",
            ) from None
        except (ImportError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "deserialization" not in str(error):
                raise
            raise StorageError(
                Flag("--cluster"),
                f" {address}: omnilead or the module of --source is not installed there: install it on all workers",
            ) from None
