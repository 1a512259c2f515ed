"""Make pseudonyms: keyed hashes that replace the names of records and the ids of patients. The same key
always gives the same pseudonyms.

key = read_key("KEYFILE")       # (umask 077; head -c 32 /dev/urandom > KEYFILE)
pseudonym(key, "r", "muse-xml", "ward_12345")       # of a record
"""

import os
import stat
from hashlib import blake2b
from pathlib import Path

from ..io.errors import Flag, StorageError


def read_key(path: str) -> bytes:
    """Return the key that is the hash of a key file. `(umask 077; head -c 32 /dev/urandom > KEYFILE)`
    creates a key file."""
    try:
        secret, mode = Path(path).read_bytes(), os.stat(path).st_mode
    except OSError as error:
        raise StorageError(Flag("--pseudonymize"), f" {path}: {error.strerror}") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise StorageError(
            Flag("--pseudonymize"),
            f" {path}: other users can read this file ({stat.filemode(mode)}): chmod 600 {path}",
        )
    if len(secret) < 16:
        raise StorageError(
            Flag("--pseudonymize"),
            f" {path}: has {len(secret)} bytes, but a key needs at least 16: create one with (umask 077; "
            "head -c 32 /dev/urandom > KEYFILE)",
        )
    return blake2b(secret, digest_size=32).digest()


def pseudonym(key: bytes | None, kind: str, source: str, name: str) -> str:
    """Return a keyed hash of `source` and `name`, or `name` itself if there is no key. `kind` is r for a
    record, p for a patient."""
    if key is None:
        return name
    return (
        kind
        + blake2b(
            f"{source}/{name}".encode(), key=key, digest_size=10, person=kind.encode()
        ).hexdigest()
    )


def key_fingerprint(key: bytes | None) -> str | None:
    """Return a hash that identifies a key without disclosing it; None without a key."""
    return blake2b(b"omnilead pseudonyms", key=key, digest_size=8).hexdigest() if key else None


def wrong_key_message(fingerprint: str | None, key: bytes | None) -> str:
    """Returns "" if a dataset was made with this key, else an error text. `fingerprint`: the dataset's key
    fingerprint, None if its names are no pseudonyms."""
    if key and not fingerprint:
        return "the dataset's names are not pseudonyms: leave out --pseudonymize"
    if fingerprint != key_fingerprint(key):
        return (
            "the dataset's names are pseudonyms: to compare, use --pseudonymize with the same "
            "KEYFILE"
        )
    return ""
