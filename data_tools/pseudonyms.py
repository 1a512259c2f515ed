"""Record and patient ids replaced by keyed hashes: the same key gives the same pseudonyms, without it nobody goes back."""

from hashlib import blake2b
from pathlib import Path

from data_tools.errors import StorageError

MIN_KEY = 16


def read_key(path: str) -> bytes:
    """The key file's bytes, hashed to a key. `head -c 32 /dev/urandom > KEYFILE` makes one."""
    try:
        secret = Path(path).read_bytes()
    except OSError as error:
        raise StorageError(f"--pseudonymize {path}: {error.strerror}") from None
    if len(secret) < MIN_KEY:
        raise StorageError(
            f"--pseudonymize {path}: {len(secret)} bytes, at least {MIN_KEY} are needed: head -c 32 /dev/urandom"
        )
    return blake2b(secret, digest_size=32).digest()


def shown(key: bytes | None, kind: str, source: str, name: str) -> str:
    """The name to write: itself without a key. `kind` is r (record) or p (patient), and keeps the two apart."""
    if key is None:
        return name
    return kind + blake2b(f"{source}/{name}".encode(), key=key, digest_size=10, person=kind.encode()).hexdigest()


def fingerprint(key: bytes) -> str:
    """Tells two keys apart without telling the key."""
    return blake2b(b"omnilead pseudonyms", key=key, digest_size=8).hexdigest()
