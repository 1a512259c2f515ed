"""Keyed hashes in place of the names of records and the ids of patients. One key always gives the
same pseudonyms.

key = read_key("KEYFILE")       # (umask 077; head -c 32 /dev/urandom > KEYFILE)
pseudonym(key, "r", "muse-xml", "ward_12345")       # of a record
"""

import os
import stat
from hashlib import blake2b
from pathlib import Path

from ..io.errors import Flag, StorageError


def read_key(path: str) -> bytes:
    """Read a key file and hash it to a key. `(umask 077; head -c 32 /dev/urandom > KEYFILE)`
    creates one."""
    try:
        secret, mode = Path(path).read_bytes(), os.stat(path).st_mode
    except OSError as error:
        raise StorageError(Flag("--pseudonymize"), f" {path}: {error.strerror}") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise StorageError(
            Flag("--pseudonymize"),
            f" {path}: other users can read it ({stat.filemode(mode)}): chmod 600 {path}",
        )
    if len(secret) < 16:
        raise StorageError(
            Flag("--pseudonymize"),
            f" {path}: {len(secret)} bytes, at least 16 are needed: (umask 077; head -c 32 "
            "/dev/urandom > KEYFILE)",
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


def wrong_key_message(mark: str | None, key: bytes | None) -> str:
    """Returns an error text if a dataset with this mark was not made with the key; else ""."""
    if key and not mark:
        return "the dataset's names are not pseudonyms: leave out --pseudonymize"
    if mark != key_mark(key):
        return (
            "the dataset's names are pseudonyms: to compare, use --pseudonymize with the same "
            "KEYFILE"
        )
    return ""
