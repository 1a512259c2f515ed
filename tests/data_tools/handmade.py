"""Records and archives written byte by byte from the formats' documentation, without the
project's own writers; helpers that build datasets and read them back."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omnilead.data_tools.build import ShardOptions, shard
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.hospital.files import HospitalFiles
from omnilead.data_tools.record import LEADS
from omnilead.data_tools.sources import open_sources

GEORGIA = [
    "# Age: 78",
    "# Sex: Female",
    "# Dx: 426783006",
    "# Rx: Unknown",
    "# Hx: Unknown",
    "# Sx: Unknown",
]


def ecg(samples: int = 5000, seed: int = 0) -> np.ndarray:
    """int16 [12, samples], microvolts: no lead flat, limb leads as Einthoven wants them, all
    divisible by 10."""
    x = np.random.default_rng(seed).integers(-90, 90, (12, samples)) * 20
    i, ii = x[0], x[1]
    x[2], x[3], x[4], x[5] = ii - i, -(i + ii) // 2, i - ii // 2, ii - i // 2
    return x.astype(np.int16)


def header(
    name: str,
    x: np.ndarray,
    form: str = "16x1+24 1000.0(0)/mV 16 0",
    file: str = "",
    fs: str = "500",
    leads: Sequence[str] = LEADS,
    comments: Iterable[str] = GEORGIA,
    unsigned: bool = False,
) -> str:
    """`form` is all between a signal line's file name and its first value."""
    sums = x.astype(np.int64).sum(axis=1).astype(np.uint16 if unsigned else np.int16)
    rows = zip(leads, x[:, 0], sums, strict=True)
    lines = [
        f"{file or name + '.mat'} {form} {first} {checksum} 0 {lead}"
        for lead, first, checksum in rows
    ]
    return "\n".join([f"{name} {len(x)} {fs} {x.shape[1]}", *lines, *comments, ""])


def mat(x: np.ndarray) -> bytes:
    """MATLAB level 4: int16, rows, columns, real, length of the name; `val`; column by column."""
    return np.array([30, *x.shape, 0, 4], "<i4").tobytes() + b"val\0" + dat(x)


def dat(x: np.ndarray) -> bytes:
    """WFDB's format 16: sample by sample, lead after lead."""
    return np.ascontiguousarray(x.T).astype("<i2").tobytes()


def write_challenge(place: Path, name: str, x: np.ndarray, **options: object) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.hea").write_text(header(name, x, **options))  # type: ignore[arg-type]
    (place / f"{name}.mat").write_bytes(mat(x))


def build(archive: Path | str, out: Path | str, **options: Any) -> Dataset:
    sources = open_sources(str(archive), hospital=HospitalFiles)
    return shard(sources, ShardOptions(str(out), quiet=True, **options))


def files(root: Path) -> dict[str, bytes]:
    """Relative path -> contents."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def flip(path: Path, at: int, bit: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def crops_of(dataset: Dataset) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(source, record) -> its rows of samples.parquet in order, each with its samples as `x`."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row, facts in enumerate(dataset.table().to_pylist()):
        found.setdefault((facts["source"], facts["record"]), []).append(
            facts | {"x": dataset.read(row)}
        )
    return {name: sorted(rows, key=lambda row: row["start_s"]) for name, rows in found.items()}


def rejected(dataset: Dataset) -> list[tuple[str, str]]:
    """Record and reason of every line of rejects.csv."""
    return [(record, reason) for _, record, reason, _ in dataset.rejects()]


def everything_in(dataset: Dataset) -> bytes:
    """All bytes of all files, their names, and what the compressed tables say."""
    table, content = dataset.table(), files(Path(dataset.root.url))
    return b"\n".join(
        [*content.values(), str([*content, table.to_pydict(), table.schema.metadata]).encode()]
    )
