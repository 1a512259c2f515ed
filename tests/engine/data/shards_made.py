"""Small datasets of noise, and helpers to damage and read them."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omnilead.data_tools import zarr_writer
from omnilead.data_tools.dataset import COLUMNS, CROP_BYTES, CROP_SHAPE, Dataset, fingerprint
from omnilead.data_tools.storage import folder
from omnilead.data_tools.tar import TarWriter
from omnilead.engine.data.reader import CropReader, Report


def make_dataset(
    root: Path,
    shards: int,
    crops: int = 4,
    seed: int = 0,
    zarr: bool = False,
    distinct: int | None = None,
) -> Dataset:
    """Shards of white noise. With `distinct`, later shards are hard links to the first ones."""
    rng, rows, entries = np.random.default_rng(seed), [], []
    (root / "shards").mkdir(parents=True)
    for s in range(shards):
        name, same = f"{s:05d}.tar", s % (distinct or shards)
        if same != s:
            os.link(root / "shards" / f"{same:05d}.tar", root / "shards" / name)
            entries.append(entries[same] | {"name": name})
            rows += [row | {"shard": s} for row in rows[same * crops : (same + 1) * crops]]
            continue
        with open(root / "shards" / name, "wb") as file:
            tar = TarWriter(file)
            for c in range(crops):
                data = rng.bytes(CROP_BYTES)
                rows.append(
                    {
                        "shard": s,
                        "offset": tar.add(f"{s}-{c}", data, b"{}"),
                        "crc32c": google_crc32c.value(data),
                    }
                )
            tar.close()
        entries.append(
            {"name": name, "crops": crops, "bytes": tar.size, "sha256": tar.sha256.hexdigest()}
        )
    table = pa.Table.from_pylist([row | {"halves": 2, "missing_leads": []} for row in rows])
    table = table.cast(pa.schema([COLUMNS.field(name) for name in table.column_names]))
    pq.write_table(table, root / "samples.parquet")
    if zarr:
        zarr_writer.write(table, entries, folder(root), 1, None, True)
    meta = {
        "format_version": 1,
        "crops": len(rows),
        "formats": ["tar", "zarr"] if zarr else ["tar"],
        "shards": entries,
    }
    samples = (root / "samples.parquet").read_bytes()
    meta["samples"] = {"bytes": len(samples), "sha256": hashlib.sha256(samples).hexdigest()}
    folder(root).write(
        "dataset.json", json.dumps(meta | {"fingerprint": fingerprint(meta)}).encode()
    )
    return Dataset.open(str(root))


@dataclass
class Batch:
    dataset: np.ndarray
    row: np.ndarray


def batches(*rows: list[int]) -> list[Batch]:
    return [Batch(np.zeros(len(r), np.int16), np.array(r)) for r in rows]


def read(reader: CropReader, rows: Any, datasets: Any = None) -> tuple[np.ndarray, Report]:
    out = np.full((len(rows), *CROP_SHAPE), 7, np.int16)
    return out, reader.read(
        Batch(np.zeros(len(rows), np.int16) if datasets is None else datasets, np.array(rows)), out
    )


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def tar_path(dataset: Dataset, row: int) -> tuple[Path, int]:
    shard, offset, _ = dataset.addresses
    return Path(dataset.root.url, "shards", dataset.shards[shard[row]]["name"]), int(offset[row])


def take_all(
    ahead: Iterable[tuple[Batch, np.ndarray, Report]], yielded: list[list[int]], dataset: Dataset
) -> None:
    for request, crops, _ in ahead:
        yielded.append(request.row.tolist())
        assert all(
            np.array_equal(crop, dataset.read(row))
            for crop, row in zip(crops, request.row, strict=True)
        )
