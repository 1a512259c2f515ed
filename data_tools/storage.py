"""Archives and datasets by relative name, on a local disk or behind any fsspec URL (s3://bucket/prefix).

A reader never follows a link out of the archive and never reads more than it was told to expect; a writer never leaves
a half-written file under its final name. `folder(url)` picks the place.
"""

import errno
import os
import random
import shutil
import stat
import tempfile
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from data_tools.errors import ReadError, StorageError, one_line, printable

T = TypeVar("T")
Item = TypeVar("Item")
RETRIES, FIRST_WAIT_S = 6, 0.2
REQUESTS = 32  # in flight in one worker, when the place is far away


class Folder(Hashable, Protocol):
    @property
    def url(self) -> str: ...
    @property
    def remote(self) -> bool: ...

    def read(self, name: str, limit: int) -> bytes: ...
    def read_range(self, name: str, start: int, size: int) -> bytes: ...
    def size(self, name: str) -> int: ...
    def stamp(self, name: str) -> bytes: ...
    def exists(self, name: str) -> bool: ...
    def names(self, under: str = "") -> Iterator[str]: ...
    def children(self) -> list[str]: ...
    def write(self, name: str, data: bytes) -> None: ...
    def publish(self, path: Path, name: str) -> None: ...
    def scratch(self) -> Path: ...
    def remove(self, name: str) -> None: ...
    def patiently(self, what: str, call: Callable[[], T]) -> T: ...


def folder(url: str | os.PathLike[str], anonymous: bool = False) -> Folder:
    text = os.fspath(url)
    return RemoteFolder(text.rstrip("/"), anonymous) if "://" in text else LocalFolder(os.path.realpath(text))


def folder_of_dataset(url: str | os.PathLike[str], anonymous: bool = False) -> Folder:
    """An archive may lie under any name; pyarrow and zarr open files under names in UTF-8 alone."""
    place = folder(url, anonymous)
    try:
        place.url.encode()
    except UnicodeEncodeError:
        raise StorageError(
            f"{printable(place.url)}: the path of a dataset has to be UTF-8: rename it, or choose another"
        ) from None
    return place


@dataclass(frozen=True)
class LocalFolder:
    url: str
    remote = False

    def path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read(self, name: str, limit: int) -> bytes:
        """A whole regular file of at most `limit` bytes: a link, a pipe or a device is refused, not followed."""
        try:
            file = os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ReadError("missing file", name) from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ReadError("not a regular file", f"{name}: a link, which is not followed") from None
            raise ReadError("unreadable file", f"{name}: {error.strerror}") from None
        try:
            state = os.fstat(file)
            if not stat.S_ISREG(state.st_mode):
                raise ReadError("not a regular file", name)
            if state.st_size > limit:
                raise ReadError("file too large", f"{name}: {state.st_size} bytes")
            if state.st_size < 2**30:
                return os.read(file, state.st_size)
            with open(file, "rb", closefd=False) as whole:  # one os.read ends at 2 GiB
                return whole.read(limit)
        finally:
            os.close(file)

    def read_range(self, name: str, start: int, size: int) -> bytes:
        """A part of one of our own files."""
        with open(self.path(name), "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, start)

    def size(self, name: str) -> int:
        return os.path.getsize(self.path(name))

    def stamp(self, name: str) -> bytes:
        """Size and time of change: another stamp means that the file may hold something else."""
        try:
            state = os.lstat(self.path(name))
        except OSError:
            return b""
        return f"{state.st_size},{state.st_mtime_ns}".encode()

    def exists(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def names(self, under: str = "") -> Iterator[str]:
        """Every file below, folder by folder, each sorted; folders that are links are not entered."""
        try:
            entries = sorted(os.scandir(self.path(under)), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise StorageError(f"cannot list {self.path(under)}: {error.strerror}") from None
        prefix = f"{under}/" if under else ""
        yield from (prefix + entry.name for entry in entries if not entry.is_dir(follow_symlinks=False))
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self.names(prefix + entry.name)

    def children(self) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self.url))
        except OSError as error:
            raise StorageError(f"cannot list {self.url}: {error.strerror}") from None

    def write(self, name: str, data: bytes) -> None:
        temporary = self.scratch() / f"{os.path.basename(name)}.{os.getpid()}"
        temporary.write_bytes(data)
        self.publish(temporary, name)

    def publish(self, path: Path, name: str) -> None:
        """fsync, then rename, then fsync of the folder: the name appears only with all of its bytes."""
        final = Path(self.path(name))
        final.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        os.replace(path, final)
        parent = os.open(final.parent, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)

    def scratch(self) -> Path:
        """Unfinished files lie on the same disk, so that publishing is a rename."""
        place = Path(self.url, ".build", "tmp")
        place.mkdir(parents=True, exist_ok=True)
        return place

    def patiently(self, what: str, call: Callable[[], T]) -> T:
        return call()  # a disk that fails once is not asked again

    def remove(self, name: str) -> None:
        path = Path(self.path(name))
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def links_in(place: Folder) -> str:
    """Where nothing was found, this may be why."""
    if not isinstance(place, LocalFolder):
        return ""
    found = next((name for name in place.names() if os.path.islink(path := place.path(name)) and os.path.isdir(path)), None)
    return f" ({found} is a link, and such folders are not entered: name the folder itself)" if found else ""


@lru_cache(maxsize=8)
def _connect(url: str, anonymous: bool) -> Any:
    """`patiently` tries again; the two libraries beneath would too, and a server that stalls be waited for half an hour. With
    s3fs's limit of 15 s an answer it is two minutes."""
    options: dict[str, Any] = {"anon": True} if anonymous else {}
    try:
        import fsspec

        if not url.startswith("s3:"):
            return fsspec.core.url_to_fs(url, **options)[0]
        once = {"retries": {"total_max_attempts": 1}}
        fs = fsspec.core.url_to_fs(url, use_listings_cache=False, config_kwargs=once, **options)[0]
        fs.retries = 1
        return fs
    except ImportError as error:
        raise StorageError(f"{url} needs the extra s3: pip install 'omnilead[s3]' ({error})") from None


async def _get_s3(fs: Any, path: str, start: int, size: int) -> tuple[bytes, int]:
    """A range, and the length of the whole object, which the same answer names and `cat_file` does not pass on."""
    bucket, key, _ = fs.split_path(path)
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{start + size - 1}")
    async with answer["Body"] as body:
        data: bytes = await body.read()
    return data, int(answer["ContentRange"].rpartition("/")[2])


@dataclass(frozen=True)
class RemoteFolder:
    """An fsspec place. An object appears only when its upload is complete, so there is nothing to rename."""

    url: str
    anonymous: bool = False
    remote = True

    @property
    def fs(self) -> Any:
        return _connect(self.url, self.anonymous)

    def path(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def patiently(self, what: str, call: Callable[[], T], ours: bool = False) -> T:
        """Retries with growing, jittered waits: an object store answers 500 or stalls now and then, and may answer 404 for
        `ours`, files that are known to be there."""
        for attempt in range(RETRIES):
            try:
                return call()
            except FileNotFoundError:
                if not ours or attempt == RETRIES - 1:
                    raise
            except PermissionError as error:
                raise StorageError(f"{what}: not allowed ({error}): credentials, or --anonymous") from None
            except Exception as error:
                if "Credentials" in type(error).__name__:
                    raise StorageError(f"{what}: {error}: set the usual variables, or --anonymous for public data") from None
                if attempt == RETRIES - 1:
                    raise StorageError(one_line(f"{what}: {type(error).__name__} after {RETRIES} tries: {error}")) from None
            time.sleep(FIRST_WAIT_S * 2**attempt * (0.5 + random.random()))
        raise AssertionError

    def read(self, name: str, limit: int) -> bytes:
        try:  # one request: a byte more than the limit tells whether there is more
            data = self.patiently(self.path(name), lambda: self._range(name, 0, limit + 1))
        except FileNotFoundError:
            raise ReadError("missing file", name) from None
        if len(data) > limit:
            raise ReadError("file too large", f"{name}: over {limit} bytes")
        return data

    def read_range(self, name: str, start: int, size: int) -> bytes:
        return self.patiently(self.path(name), lambda: self._range(name, start, size), ours=True)

    def _range(self, name: str, start: int, size: int) -> bytes:
        """As many of the bytes as the object has: an answer may be cut, and announce the length that it was cut to."""
        path = self.path(name)
        data: bytes
        try:
            if hasattr(self.fs, "call_s3"):
                from fsspec.asyn import sync

                data, whole = sync(self.fs.loop, _get_s3, self.fs, path, start, size)
            else:
                data = self.fs.cat_file(path, start=start, end=start + size)
                whole = start + size if len(data) == size else self.fs.info(path)["size"]
        except OSError as error:  # HTTP 416: an empty object has no range
            if error.errno == errno.EINVAL and not self.fs.info(path)["size"]:
                return b""
            raise
        if len(data) != (due := min(size, max(0, whole - start))):
            raise OSError(f"{len(data)} bytes arrived of {due}")
        return data

    def size(self, name: str) -> int:
        return int(self.patiently(self.path(name), lambda: self.fs.info(self.path(name))["size"], ours=True))

    def stamp(self, name: str) -> bytes:
        return b""  # a request per record would cost more than the plan; headers carry checksums

    def exists(self, name: str) -> bool:
        return bool(self.patiently(self.path(name), lambda: self.fs.exists(self.path(name))))

    def names(self, under: str = "") -> Iterator[str]:
        root = self.fs._strip_protocol(self.url) + "/"
        try:
            found: list[str] = self.patiently(self.path(under), lambda: self.fs.find(self.path(under)))
        except FileNotFoundError:
            return
        yield from sorted((name.removeprefix(root) for name in found), key=_as_on_a_disk)

    def children(self) -> list[str]:
        try:
            listed: list[str] = self.patiently(self.url, lambda: self.fs.ls(self.url, detail=False))
        except FileNotFoundError:
            raise StorageError(f"cannot list {self.url}: nothing is there") from None
        return sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in listed)

    def write(self, name: str, data: bytes) -> None:
        self.patiently(self.path(name), lambda: self.fs.pipe_file(self.path(name), data))

    def publish(self, path: Path, name: str) -> None:
        self.patiently(self.path(name), lambda: self.fs.put_file(str(path), self.path(name)))
        size = self.patiently(self.path(name), lambda: self.fs.info(self.path(name)))["size"]
        if size != path.stat().st_size:
            raise StorageError(f"{self.path(name)}: {size} bytes arrived of {path.stat().st_size}: run again")
        path.unlink()

    def scratch(self) -> Path:
        place = Path(tempfile.gettempdir(), f"omnilead-{os.getuid()}")
        place.mkdir(mode=0o700, exist_ok=True)
        if place.stat().st_uid != os.getuid():
            raise StorageError(f"{place} belongs to somebody else: name another place in TMPDIR")
        return place

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.patiently(self.path(name), lambda: self.fs.rm(self.path(name), recursive=True))


def _as_on_a_disk(name: str) -> list[tuple[bool, str]]:
    """A folder's files come before the folders in it."""
    *places, file = name.split("/")
    return [*((True, place) for place in places), (False, file)]


def ahead(call: Callable[[Item], T], items: Iterable[Item]) -> Iterator[T]:
    """call(item) for each, in order, while the next ones are on their way."""
    queue = iter(items)
    with ThreadPoolExecutor(REQUESTS) as pool:
        pending = deque(pool.submit(call, item) for item in islice(queue, 2 * REQUESTS))
        try:
            while pending:
                yield pending.popleft().result()
                pending.extend(pool.submit(call, item) for item in islice(queue, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
