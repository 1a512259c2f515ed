"""Run many tasks in this process, in N processes, or on a Dask cluster; results come as they finish.

A task's result depends on its argument alone, so order, retries and the number of workers change nothing.
Only a window of tasks is submitted at a time: eleven million records do not queue up in memory.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

from data_tools.errors import StorageError

Task = TypeVar("Task")
Result = TypeVar("Result")
ATTEMPTS = 5  # of a task that fails on a Dask worker: another may have more disk space
CONNECT_S, WORKERS_S = 10, 60


def run(
    function: Callable[[Task], Result], tasks: Iterable[Task], workers: int = 1, cluster: str | None = None
) -> Iterator[Result]:
    if cluster:
        return _on_dask(function, tasks, cluster)
    queue = iter(tasks)
    first = list(islice(queue, 2))
    if workers <= 1 or len(first) < 2:  # starting processes for a single task would cost more than the task
        return map(function, chain(first, queue))
    return _on_processes(function, chain(first, queue), workers)


def _on_processes(function: Callable[[Task], Result], tasks: Iterable[Task], workers: int) -> Iterator[Result]:
    queue = iter(tasks)
    spawn = multiprocessing.get_context("spawn")
    try:
        executor = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker)
    except OSError as error:  # no semaphores
        raise StorageError(f"/dev/shm: {error.strerror}: let this user write there, or use --workers 1") from None
    with executor as pool:

        def submit(count: int) -> set[Future[Result]]:
            taken = list(islice(queue, count))
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: a worker would print a traceback
            try:
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
            raise StorageError("a worker process died (out of memory?): run the same command again to go on") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start_worker() -> None:
    """One thread per worker: those of numpy and pyarrow would compete for the cores. Ctrl-C ends a worker without a traceback,
    and so does its parent's death: it must not go on writing where the next run writes."""
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


def _on_dask(function: Callable[[Task], Result], tasks: Iterable[Task], address: str) -> Iterator[Result]:
    with connected(address) as client:
        from distributed import as_completed

        queue = iter(tasks)
        window = max(16, 4 * sum(client.nthreads().values()))

        def submit(count: int) -> list[Any]:
            return [client.submit(function, task, pure=False, retries=ATTEMPTS) for task in islice(queue, count)]

        futures = as_completed(submit(window))
        for future in futures:
            yield future.result()
            future.release()
            futures.update(submit(1))


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """A client of a Dask cluster that has a worker. What Dask raises in the block becomes a StorageError of one line."""
    try:
        from distributed import Client
        from distributed.comm.core import CommClosedError
        from distributed.scheduler import KilledWorker
    except ImportError as error:
        raise StorageError(f"--cluster needs the extra cluster: pip install 'omnilead[cluster]' ({error})") from None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what matters is said below, in one line
    try:
        client: Any = Client(address, timeout=CONNECT_S)
    except (OSError, TimeoutError, ValueError) as error:
        raise StorageError(f"--cluster {address}: no scheduler answers ({type(error).__name__})") from None
    with client:
        try:
            client.wait_for_workers(1, timeout=WORKERS_S)
        except (OSError, TimeoutError):
            raise StorageError(f"--cluster {address}: no worker in {WORKERS_S} s: start some with `dask worker`") from None
        try:
            yield client
        except KilledWorker as error:
            died = error.allowed_failures + 1
            raise StorageError(f"--cluster {address}: {died} workers died under the same task (out of memory?)") from None
        except (CommClosedError, CancelledError):
            raise StorageError(f"--cluster {address}: scheduler lost: run the same command again to go on") from None
        except (ImportError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "deserialization" not in str(error):
                raise
            raise StorageError(f"--cluster {address}: omnilead, or --source's module, is not installed there") from None
