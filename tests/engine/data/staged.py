"""Storage that records its reads, and caches to inspect."""

import fcntl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.storage import Folder
from omnilead.engine.data.staging import Staging

CROPS = 2


@dataclass
class Root:
    """A storage root that records its reads, which `how` may replace."""

    inner: Folder
    how: Callable[["Root", str, int, int], bytes] = lambda root, *what: root.inner.read_range(*what)
    reads: list[tuple[str, int]] = field(default_factory=list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def read_range(self, name: str, start: int, size: int) -> bytes:
        self.reads.append((name, start))
        return self.how(self, name, start, size)

    def shards(self) -> list[int]:
        """Shards in the order in which their downloads started."""
        return [int(name[7:12]) for name, start in self.reads if start == 0]


def through(
    dataset: Dataset, how: Callable[[Root, str, int, int], bytes] | None = None
) -> tuple[Dataset, Root]:
    root = Root(dataset.root, how) if how else Root(dataset.root)
    return Dataset(root, dataset.meta), root


def stage(
    dataset: Dataset, cache: Path, max_bytes: int, order: Iterable[int] = (), **options: Any
) -> Staging:
    return Staging({0: dataset}, cache, max_bytes, ((0, shard) for shard in order), **options)


@contextmanager
def held(staging: Staging, *shards: int) -> Iterator[list[str]]:
    """Hold shards and return their paths; raises the error of an unusable one."""
    with staging.hold([(0, shard) for shard in shards]) as paths:
        for path in paths.values():
            if isinstance(path, Exception):
                raise path
        yield [str(path) for path in paths.values()]


def path_of(staging: Staging, shard: int) -> str:
    with held(staging, shard) as (path,):
        return path


def room(dataset: Dataset, shards: int) -> int:
    return shards * dataset.shards[0]["bytes"]


def cached(cache: Path) -> int:
    """Bytes in the cache, counted under the lock that is needed to claim, evict or rename."""
    with open(cache / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return sum(path.stat().st_size for path in cache.glob("*.*"))


def right(path: str, dataset: Dataset, shard: int) -> bool:
    return (
        Path(path).read_bytes()
        == Path(dataset.root.url, "shards", dataset.shards[shard]["name"]).read_bytes()
    )


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]
