"""Keyed hashes in place of the names of records and the ids of patients. One key always gives the
same pseudonyms.

key = read_key("KEYFILE")       # (umask 077; head -c 32 /dev/urandom > KEYFILE)
pseudonym(key, "r", "muse-xml", "ward_12345")       # of a record
"""

import os
import stat
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ..io.errors import ReadError, StorageError
from .constants import VENDORS

REMOVED = "patient was removed"

OPEN_KEY = b"omnilead removed"  # no secret: of datasets whose names are all public


def read_key(path: str) -> bytes:
    """Read a key file and hash it to a key. `(umask 077; head -c 32 /dev/urandom > KEYFILE)`
    creates one."""
    try:
        secret, mode = Path(path).read_bytes(), os.stat(path).st_mode
    except OSError as error:
        raise StorageError(f"--pseudonymize {path}: {error.strerror}") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise StorageError(
            f"--pseudonymize {path}: other users can read it ({stat.filemode(mode)}): chmod 600 "
            f"{path}"
        )
    if len(secret) < 16:
        raise StorageError(
            f"--pseudonymize {path}: {len(secret)} bytes, at least 16 are needed: "
            "(umask 077; head -c 32 /dev/urandom > KEYFILE)"
        )
    return blake2b(secret, digest_size=32).digest()


def pseudonym(key: bytes | None, kind: str, source: str, name: str) -> str:
    """A keyed hash of the name, or the name itself if there is no key. `kind`: r for records, p for
    patients."""
    if key is None:
        return name
    return (
        kind
        + blake2b(
            f"{source}/{name}".encode(), key=key, digest_size=10, person=kind.encode()
        ).hexdigest()
    )


def key_mark(key: bytes | None) -> str | None:
    """Identifies a key without disclosing it."""
    return blake2b(b"omnilead pseudonyms", key=key, digest_size=8).hexdigest() if key else None


def other_key(mark: str | None, key: bytes | None) -> str:
    """What is wrong if a dataset with this mark was not made with the key."""
    if key and not mark:
        return "the dataset's names are not pseudonyms: leave out --pseudonymize"
    if mark != key_mark(key):
        return (
            "the dataset's names are pseudonyms: to compare, use --pseudonymize with the same "
            "KEYFILE"
        )
    return ""


@dataclass(frozen=True)
class Removed:
    """Who was removed from a dataset: keyed hashes of patients, records and waveforms, by which they are
    known when an archive still has them. `key`: that of the dataset (Dataset.name_key)."""

    marks: frozenset[str] = frozenset()
    key: bytes | None = None

    def mark(self, source: str, name: str | None, kind: str = "p") -> str:
        """Of a patient, with the kind r of a record, or with source "" of a waveform."""
        return _removal_mark(self.key or OPEN_KEY, kind, source, name or "")

    def has(self, source: str, name: str | None, kind: str = "p") -> bool:
        """Also under the open key, which earlier versions used for every dataset."""
        if not self.marks:
            return False
        keys = {OPEN_KEY, self.key or OPEN_KEY}
        return any(_removal_mark(key, kind, source, name or "") in self.marks for key in keys)

    def refuse(self, source: str, patient: str | None) -> None:
        """Also a copy of a removed waveform, which may be without its patient: source is "" then."""
        if self.has(source, patient):
            raise ReadError(REMOVED)


def _removal_mark(key: bytes, kind: str, source: str, name: str) -> str:
    from .record import patient_source  # NumPy: `shard --help` needs none

    if source == "hospital":  # a damaged file, of no known format any more
        source = VENDORS[0]
    return pseudonym(key, kind, patient_source(source), name)
