"""Batches made ahead of their use, by a thread of its own, in a ring of buffers that are used again and again.

requests -> read_ahead: [thread: CropReader.read -> ring of depth + 1 buffers] -> batch in use
"""

import atexit
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from engine.data.reader import CropReader, Report


class Request(Protocol):
    @property
    def dataset(self) -> np.ndarray: ...
    @property
    def row(self) -> np.ndarray: ...


R = TypeVar("R", bound=Request)
Buffer = TypeVar("Buffer")
Made = TypeVar("Made")


class Filled(NamedTuple, Generic[R]):
    request: R
    crops: np.ndarray  # int16 [n, 12, 5000], valid until the next one is asked for
    report: Report


def read_ahead(
    requests: Iterable[R], gather: CropReader, shape: tuple[int, ...], depth: int = 2, in_use: int = 1, late: bool = False
) -> Generator[Filled[R], None, None]:
    """Batches in the order of their requests, at most `depth` of them ready beside those in use, in depth + in_use buffers of
    `shape` (a request may be shorter) that are allocated once.

    Who copies a batch to a device asynchronously waits for that copy before asking for the next batch.
    """

    def fill(request: R, buffer: np.ndarray) -> Filled[R]:
        crops = buffer[: len(request.row)]
        return Filled(request, crops, gather.read(request.dataset, request.row, crops, late))

    return made_ahead(requests, fill, [_buffer(shape, gather.pin) for _ in range(depth + in_use)], in_use)


def made_ahead(
    requests: Iterable[R], make: Callable[[R, Buffer], Made], buffers: Sequence[Buffer], in_use: int = 1
) -> Generator[Made, None, None]:
    """make(request, buffer) in a thread of its own, in the order of the requests. The last `in_use` batches stand; an older
    one's buffer is free when the next is asked for. A request's error is raised when its turn comes."""
    free: SimpleQueue[Buffer | None] = SimpleQueue()
    ready: SimpleQueue[tuple[Buffer, Made] | BaseException | None] = SimpleQueue()
    for buffer in buffers:
        free.put(buffer)
    thread = threading.Thread(target=_keep_making, args=(iter(requests), make, free, ready), name="read-ahead", daemon=True)

    def stop() -> None:
        with suppress(Empty):
            while True:
                free.get_nowait()
        free.put(None)
        thread.join(timeout=2)  # more than a read from a disk; one that waits for a network is left behind, being a daemon

    # A daemon that is in numpy's C++ when the interpreter ends takes the whole process down with SIGABRT (3 exits in 10).
    atexit.register(stop)
    thread.start()
    used: deque[Buffer] = deque()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            used.append(item[0])
            yield item[1]
            if len(used) == in_use:
                free.put(used.popleft())
    finally:
        item = None  # an error holds its frames, and they the buffers
        atexit.unregister(stop)
        stop()


def _keep_making(
    requests: Iterator[R], make: Callable[[R, Any], Any], free: "SimpleQueue[Any]", ready: "SimpleQueue[Any]"
) -> None:
    try:
        while (buffer := free.get()) is not None:
            request = next(requests, None)
            if request is None:
                break
            ready.put((buffer, make(request, buffer)))
    except BaseException as error:
        ready.put(error)
    else:
        ready.put(None)


def _buffer(shape: tuple[int, ...], pin: bool) -> np.ndarray:
    if pin:
        import torch

        if torch.cuda.is_available():
            pinned: np.ndarray = torch.empty(shape, dtype=torch.int16, pin_memory=True).numpy()
            return pinned
    return np.empty(shape, np.int16)
