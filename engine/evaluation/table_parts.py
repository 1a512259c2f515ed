"""A long table, written in parts: killed at any moment and begun again, it ends as the same bytes.

    with Parts(Path("F.parquet"), job) as parts:      # job: all that decides the content, as plain JSON
        for number in parts.missing(count):
            parts.write(number, table)
        parts.publish(count, schema)                  # F.parquet, in one rename; F.parquet.parts/ goes

Parts lie in F.parquet.parts/ with the job they belong to. Those of another job are refused by name, not mixed in.
One that is damaged, or stands in another's place, is made again.
"""

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.common import ConfigError

KEY = b"omnilead"  # of a file's metadata: the job, and which part of it


class Parts:
    def __init__(self, out: Path, job: dict[str, Any]) -> None:
        if out.is_dir():
            raise ConfigError(f"--out {out}: is a folder: name a file")
        self.out, self.job, self.folder = out, json.loads(json.dumps(job)), out.with_name(f"{out.name}.parts")
        self.finished = out.exists()
        if self.finished:
            self._same(_told_in(out), out, "choose another --out")
            return
        if not out.parent.is_dir():
            raise ConfigError(f"--out {out}: no folder {out.parent}")
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"--out {out}: {self.folder} is a file: remove it, or choose another --out")
        self.folder.mkdir(exist_ok=True)
        self._lock = open(self.folder / "lock", "w")  # noqa: SIM115 - held until the end
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out {out}: another process is writing it") from None
        begun = self.folder / "job.json"
        if any(self.folder.glob("*.parquet")):
            mend = "remove that folder, or choose another --out"
            try:
                before = json.loads(begun.read_text()) if begun.exists() else None
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{begun}: cannot be read: {error}: {mend}") from None
            self._same(before, self.folder, mend)
        else:
            _publish(begun, lambda path: path.write_text(json.dumps(self.job, indent=1)))

    def _same(self, other: Any, place: Path, mend: str) -> None:
        before = other if isinstance(other, dict) else {}
        wrong = [name for name in self.job.keys() | before.keys() if self.job.get(name) != before.get(name)]
        if wrong:
            name = min(wrong)
            was, is_ = (str(job.get(name))[:60] for job in (before, self.job))
            raise ConfigError(f"{place}: is of another job, whose {name} was {was} and is {is_}: {mend}")

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.parquet"

    def missing(self, count: int) -> list[int]:
        """Also those that are not whole, or are not what they are called: they are made again."""
        return [number for number in range(count) if not self._is_whole(number)]

    def _is_whole(self, number: int) -> bool:
        path = self._path(number)
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                file.read()
                return bool(_told_in(path) == self._told(number))
        except (pa.ArrowException, OSError):  # no such file among them
            return False

    def _told(self, number: int) -> dict[str, Any]:
        return {"part": number, **self.job}

    def write(self, number: int, table: pa.Table) -> None:
        marked = table.replace_schema_metadata({KEY: json.dumps(self._told(number))})
        _publish(self._path(number), lambda path: pq.write_table(marked, path, write_page_checksum=True))

    @property
    def rows(self) -> int:
        return int(pq.read_metadata(self.out).num_rows)

    def publish(self, count: int, schema: pa.Schema) -> int:
        """All parts in one file, a row group each; how many rows there are."""
        described = schema.with_metadata({KEY: json.dumps(self.job)})

        def join(path: Path) -> None:
            with pq.ParquetWriter(path, described) as writer:
                for number in range(count):
                    table = pq.read_table(self._path(number), schema=schema)
                    if len(table):
                        writer.write_table(table.replace_schema_metadata(described.metadata))

        _publish(self.out, join)
        shutil.rmtree(self.folder)
        return self.rows

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.finished:
            self._lock.close()


def _told_in(path: Path) -> Any:
    try:
        return json.loads((pq.read_schema(path).metadata or {}).get(KEY, b"null"))
    except (pa.ArrowInvalid, OSError, ValueError):
        return None


def _publish(path: Path, write: Any) -> None:
    """A name appears only with all of its bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
