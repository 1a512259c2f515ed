"""Read and write files by relative name, in a local folder or below an fsspec URL (s3://bucket/prefix);
`folder(url)` returns a LocalFolder or a RemoteFolder.

Reading never follows a link out of the archive and never reads more bytes than the caller expects.
Writing never leaves an incomplete file under its final name.
"""

import errno
import fcntl
import hashlib
import mmap
import os
import random
import shutil
import socket
import stat
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar
from uuid import uuid4

from .errors import (
    MISSING_FILE,
    Flag,
    ReadError,
    StorageError,
    machine_error,
    one_line,
    printable,
    write_error_advice,
)
from .terminal import tell

T = TypeVar("T")
Item = TypeVar("Item")
MAX_TRIES, FIRST_WAIT_S = 6, 0.2
CONCURRENT_REQUESTS = 32  # requests that one process sends at the same time


def publish(temporary: Path, final: Path) -> None:
    """Moves a complete file to its final name. When this returns, the file is on the disk."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, final)
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file, which replaces `path` at the end of the block. After an
    error in the block, the old file stays."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        yield temporary
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes or replaces a file atomically. When this returns, the file is on the disk."""
    with replacing_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def read_into(file: int, buffer: Any, start: int) -> int:
    """Fills a buffer from an open file. Returns the number of bytes read, which is smaller than the
    buffer only at the end of the file. Several system calls may be needed: on a network file system
    or beyond 2 GiB, one call may read only a part."""
    view = memoryview(buffer).cast("B")
    read = os.preadv(file, [view], start)
    while 0 < read < len(view):
        more = os.preadv(file, [view[read:]], start + read)
        if not more:
            break
        read += more
    return read


def read_bytes(file: int, start: int, size: int) -> bytes:
    """Returns `size` bytes of an open file, or fewer at the end of the file."""
    data = os.pread(file, size, start)
    if 0 < len(data) < size:
        rest = bytearray(size - len(data))
        data += rest[: read_into(file, rest, start + len(data))]
    return data


def write_at(file: int, data: bytes, start: int) -> None:
    """Writes all bytes to an open file, in as many system calls as needed."""
    written = os.pwrite(file, data, start)
    while written < len(data):
        written += os.pwrite(file, memoryview(data)[written:], start + written)


def locked_by_another(file: IO[Any], place: str) -> bool:
    """Locks an open file until it is closed, unless another process has locked it: then returns True.
    Prints a note if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            return True
        tell(f"note: {place}: its file system has no locks: never let two runs write there")
    return False


@dataclass(frozen=True)
class LocalFolder:
    url: str
    # True if messages must not name files in the folder, because the names may be those of patients
    private: bool = False
    remote = False

    def path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read(self, name: str, limit: int, cut: bool = False) -> bytes:
        """Returns the contents of a regular file of at most `limit` bytes. With `cut`, a file may be
        larger, and its first `limit` bytes are returned. Links, pipes and devices are refused."""
        try:
            file = os.open(
                self.path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError as error:
            if failure := machine_error(error):
                raise failure from None
            link = ("not a regular file", f"{name}: a link, which is not followed")
            reasons = {errno.ENOENT: (MISSING_FILE, name), errno.ELOOP: link}
            raise ReadError(
                *reasons.get(error.errno or 0, ("unreadable file", f"{name}: {error.strerror}"))
            ) from None
        try:
            state = os.fstat(file)
            if not stat.S_ISREG(state.st_mode):
                raise ReadError("not a regular file", name)
            if state.st_size > limit and not cut:
                raise ReadError("file too large", f"{name}: {state.st_size} bytes")
            return read_bytes(file, 0, min(state.st_size, limit))
        finally:
            os.close(file)

    def read_range(self, name: str, start: int, size: int) -> bytes:
        file = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_bytes(file, start, size)
        finally:
            os.close(file)

    def view(self, name: str, limit: int) -> memoryview:
        """Returns a memory map of a whole file. A map may have any size, so `limit` is not used."""
        try:
            with open(self.path(name), "rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            raise ReadError(MISSING_FILE) from None
        except ValueError:
            raise ReadError("empty file") from None

    def size(self, name: str) -> int:
        return os.path.getsize(self.path(name))

    def stamp(self, name: str) -> bytes:
        """Returns size and modification time of a file as bytes. A continued build reads a file again
        if its stamp has changed."""
        try:
            state = os.lstat(self.path(name))
        except OSError:
            return b""
        return f"{state.st_size},{state.st_mtime_ns}".encode()

    def exists(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def names(self, under: str = "") -> Iterator[str]:
        """Yields the names of all files below `under`, sorted, folder by folder. Links to folders are
        not followed."""
        try:
            entries = sorted(os.scandir(self.path(under)), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            inside = f"a folder in {self.url} (`find {self.url} -type d ! -readable` names it)"
            place = inside if self.private and under else self.path(under)
            raise StorageError(f"cannot list {place}: {error.strerror}") from None
        prefix = f"{under}/" if under else ""
        yield from (
            prefix + entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)
        )
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self.names(prefix + entry.name)

    def links(self, under: str = "") -> Iterator[str]:
        """Yields the names of all links below `under` that point to folders, sorted. The method `names`
        does not follow such links."""
        entries: list[os.DirEntry[str]] = []
        with suppress(OSError):  # for a folder that cannot be listed, `names` raises the error
            entries = sorted(os.scandir(self.path(under)), key=lambda entry: entry.name)
        for entry in entries:
            path = f"{under}/{entry.name}" if under else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from self.links(path)
            elif entry.is_symlink() and entry.is_dir():
                yield path

    def children(self, under: str = "") -> list[str]:
        place = self.path(under) if under else self.url
        try:
            return sorted(os.listdir(place))
        except NotADirectoryError:
            raise StorageError(f"{place} is a file: name the folder that it is in") from None
        except OSError as error:
            raise StorageError(f"cannot list {place}: {error.strerror}") from None

    def write(self, name: str, data: bytes) -> None:
        temporary = temporary_path(self, name)
        try:
            with explain_write_errors(self.url, name):
                temporary.write_bytes(data)
                self.publish(temporary, name)
        finally:
            temporary.unlink(missing_ok=True)

    def publish(self, path: Path, name: str) -> None:
        final = Path(self.path(name))
        final.parent.mkdir(parents=True, exist_ok=True)
        publish(path, final)

    def workdir(self) -> Path:
        """Returns the folder for temporary files and the lock. It is on the same disk as the final
        files, so that publishing a file is a rename."""
        place = Path(self.url, ".build")
        (place / "tmp").mkdir(parents=True, exist_ok=True)
        return place

    def remove(self, name: str) -> None:
        path = Path(self.path(name))
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def temporary_path(folder: "Folder", name: str) -> Path:
    """Returns a unique path for a temporary file. The process id would not make it unique: threads of a
    Dask worker share one, and processes in two containers can have the same."""
    return folder.workdir() / "tmp" / f"{os.path.basename(name)}.{uuid4().hex}"


@contextmanager
def explain_write_errors(url: str, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        mend = write_error_advice(error, "free disk space, then run the same command again")
        raise StorageError(f"writing {name} in {url}: {error.strerror or error}: {mend}") from None


@lru_cache(maxsize=8)
def _connect(url: str, anonymous: bool) -> Any:
    """Returns the fsspec file system of a URL. On S3 it does not retry requests, because
    `RemoteFolder._retry` does. If s3fs and botocore retried, too, three layers would retry a stalled
    server at once."""
    options: dict[str, Any] = {"anon": True} if anonymous else {}
    try:
        import fsspec

        if not url.startswith("s3:"):
            return fsspec.core.url_to_fs(url, **options)[0]
        once = {"retries": {"total_max_attempts": 1}}
        fs = fsspec.core.url_to_fs(url, use_listings_cache=False, config_kwargs=once, **options)[0]
        fs.retries = 1  # set in s3fs only, because `retries` means something else in gcsfs
        return fs
    except ImportError as error:
        raise StorageError(missing_package(url, error)) from None


def missing_package(url: str, error: ImportError) -> str:
    return (
        f"{url} needs the extra s3: pip install 'omnilead[s3]' ({error})"
        if url.startswith("s3:")
        else f"{url}: {error}"
    )


async def _get_s3_range(fs: Any, path: str, start: int, size: int) -> tuple[bytes, int]:
    """Returns (a range of an object's bytes, length of the whole object). The response states the
    length, but fsspec's `cat_file` does not return it."""
    bucket, key, _ = fs.split_path(path)
    answer = await fs._call_s3(
        "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{start + size - 1}"
    )
    async with answer["Body"] as body:
        data: bytes = await body.read()
    return data, int(answer["ContentRange"].rpartition("/")[2])


@dataclass(frozen=True)
class RemoteFolder:
    """A folder in object storage. An object appears only when its upload is complete, so no
    renaming is needed."""

    url: str
    anonymous: bool = False
    # True if messages must not name files in the folder, because the names may be those of patients
    private: bool = False
    tries: int | None = None  # how often each request is tried; None means MAX_TRIES times
    remote = True

    @property
    def fs(self) -> Any:
        return _connect(self.url, self.anonymous)

    def path(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _retry(self, name: str, call: Callable[[], T], must_exist: bool = False) -> T:
        """Returns the result of `call`, which is retried with exponential backoff and jitter.
        `must_exist`: a missing file (404) is retried, too, because the error can be transient."""
        what = self.url if self.private else self.path(name)
        tries = self.tries or MAX_TRIES
        for attempt in range(1, tries + 1):
            try:
                return call()
            except StorageError:  # trying again is useless: a package is not installed
                raise
            except FileNotFoundError:
                if not must_exist or attempt == tries:
                    raise
            except PermissionError as error:
                why = type(error).__name__ if self.private else error
                raise StorageError(
                    f"{what}: not allowed ({why}): check the credentials, or use ",
                    Flag("--anonymous"),
                ) from None
            except Exception as error:
                if "Credentials" in type(error).__name__:
                    raise StorageError(
                        f"{what}: {error}: set AWS credentials, or use ",
                        Flag("--anonymous"),
                        " for public data",
                    ) from None
                if attempt == tries:
                    why = "" if self.private else f": {error}"
                    raise StorageError(
                        one_line(f"{what}: {type(error).__name__} after {tries} tries{why}")
                    ) from None
            time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1) * (0.5 + random.random()))
        raise AssertionError

    def read(self, name: str, limit: int, cut: bool = False) -> bytes:
        try:  # one byte more than the limit shows whether the object is larger
            data = self._retry(name, lambda: self._range(name, 0, limit + 1), must_exist=cut)
        except FileNotFoundError:
            raise ReadError(MISSING_FILE, name) from None
        if len(data) > limit and not cut:
            raise ReadError("file too large", f"{name}: over {limit} bytes")
        return data[:limit]

    def read_range(self, name: str, start: int, size: int) -> bytes:
        return self._retry(name, lambda: self._range(name, start, size), must_exist=True)

    def _range(self, name: str, start: int, size: int) -> bytes:
        """Returns the part of the byte range that the object has. Its length is checked, because a
        proxy may truncate a response."""
        path = self.path(name)
        try:
            if hasattr(self.fs, "call_s3"):
                from fsspec.asyn import sync

                data, total = sync(self.fs.loop, _get_s3_range, self.fs, path, start, size)
            else:
                data, total = (
                    self.fs.cat_file(path, start=start, end=start + size),
                    self.fs.info(path)["size"],
                )
        except OSError as error:  # an empty object has no range: the server answers HTTP 416
            if error.errno == errno.EINVAL and not self.fs.info(path)["size"]:
                return b""
            raise
        if len(data) != (expected := min(size, max(0, total - start))):
            raise OSError(f"{len(data)} of {expected} bytes arrived")
        return bytes(data)

    def view(self, name: str, limit: int) -> memoryview:
        return memoryview(self.read(name, limit))

    def size(self, name: str) -> int:
        return int(
            self._retry(name, lambda: self.fs.info(self.path(name))["size"], must_exist=True)
        )

    def stamp(self, name: str) -> bytes:
        # A request per record would take longer than planning. The stamp can be missing, because record
        # headers have checksums
        return b""

    def exists(self, name: str) -> bool:
        return bool(self._retry(name, lambda: self.fs.exists(self.path(name))))

    def names(self, under: str = "") -> Iterator[str]:
        root = self.fs._strip_protocol(self.url) + "/"
        try:
            paths: list[str] = self._retry(under, lambda: self.fs.find(self.path(under)))
        except FileNotFoundError:
            return
        yield from sorted((name.removeprefix(root) for name in paths), key=local_sort_key)

    def links(self, under: str = "") -> Iterator[str]:
        return iter(())  # object storage has no links

    def children(self, under: str = "") -> list[str]:
        place = self.path(under)
        try:
            paths: list[str] = self._retry(under, lambda: self.fs.ls(place, detail=False))
        except FileNotFoundError:
            raise StorageError(f"cannot list {place}: it does not exist") from None
        return sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in paths)

    def write(self, name: str, data: bytes) -> None:
        self._retry(name, lambda: self.fs.pipe_file(self.path(name), data))

    def publish(self, path: Path, name: str) -> None:
        self.upload(path, name)
        path.unlink()

    def upload(self, path: Path, name: str) -> None:
        self._retry(name, lambda: self.fs.put_file(str(path), self.path(name)))
        if (size := self.size(name)) != path.stat().st_size:
            raise StorageError(
                f"{self.path(name)}: {size} of {path.stat().st_size} bytes arrived: run again"
            )

    def workdir(self) -> Path:
        mark = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        place = Path(tempfile.gettempdir(), f"omnilead-{os.getuid()}-{mark}")
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        _check_only_owner_enters(place)
        (place / "tmp").mkdir(exist_ok=True)
        return place

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._retry(name, lambda: self.fs.rm(self.path(name), recursive=True))


def _check_only_owner_enters(place: Path) -> None:
    """Raises a StorageError unless `place` is a folder that only this user can enter. Anybody can foresee
    the folder's name in /tmp and put a link there. Files in the link's target would then be removed."""
    state = place.lstat()
    if not stat.S_ISDIR(state.st_mode):
        wrong = "is a link or a file"
    elif state.st_uid != os.getuid():
        wrong = "belongs to another user"
    elif state.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        wrong = f"is open to other users ({stat.filemode(state.st_mode)})"
    else:
        return
    raise StorageError(f"{place} {wrong}: remove it, or set TMPDIR to another folder")


Folder = LocalFolder | RemoteFolder


def folder(url: str | os.PathLike[str], anonymous: bool = False, private: bool = False) -> Folder:
    text = os.fspath(url)
    if "://" in text:
        return RemoteFolder(text.rstrip("/"), anonymous, private)
    return LocalFolder(os.path.realpath(text), private)


def dataset_folder(url: str | os.PathLike[str], anonymous: bool = False) -> Folder:
    """Returns the folder of a dataset, whose path must be UTF-8, because pyarrow requires it. The path
    of an archive may have any bytes."""
    place = folder(url, anonymous)
    try:
        place.url.encode()
    except UnicodeEncodeError:
        raise StorageError(
            f"{printable(place.url)}: a dataset's path must be UTF-8: rename it, or choose another path"
        ) from None
    return place


def local_sort_key(name: str) -> list[tuple[bool, str]]:
    """Returns a sort key for the order of LocalFolder.names: the files of a folder come before its
    subfolders."""
    *folders, file = name.split("/")
    return [*((True, folder) for folder in folders), (False, file)]


def prefetch(
    call: Callable[[Item], T], items: Iterable[Item], threads: int = CONCURRENT_REQUESTS
) -> Generator[T, None, None]:
    """Yields call(item) for each item, in order. Up to `threads` calls run at the same time."""
    queue = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        pending = deque(pool.submit(call, item) for item in islice(queue, 2 * threads))
        try:
            while pending:
                yield pending.popleft().result()
                pending.extend(pool.submit(call, item) for item in islice(queue, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
