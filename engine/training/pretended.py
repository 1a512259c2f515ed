"""A dataset that does not exist yet: a table of crops without samples, for `pretrain --dry-run --crops`."""

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omnilead.data_tools.dataset import COLUMNS, Dataset
from omnilead.data_tools.ecg.constants import CROP, FS_HZ, LEADS
from omnilead.data_tools.io.storage import LocalFolder

MAX_ROWS = 65_536  # most rows of a pretended table; it may have four batches, if they are more


class PretendedDataset(Dataset):
    @cached_property
    def _samples_bytes(self) -> pa.Buffer:
        """The content of samples.parquet, a table in which each crop has its own patient."""
        rows = np.arange(len(self))
        names = [f"{row}" for row in rows]
        known: dict[str, Any] = {
            "shard": np.zeros(len(rows), np.int32),
            "waveform": rows.astype(np.uint64),
            "source": ["yours"] * len(rows),
            "record": names,
            "patient": names,
            "halves": np.full(len(rows), 2, np.uint8),
            "pretrain": np.ones(len(rows), bool),
            "labels": pa.array([[False] * 26] * len(rows), COLUMNS.field("labels").type),
            "age": np.full(len(rows), 60, np.float32),
            "sex": ["F"] * len(rows),
        }
        for field in COLUMNS:
            if pa.types.is_list(field.type):
                known[field.name] = [[]] * len(rows)
            elif field.name in ("dx_role", "id_role"):
                known[field.name] = pa.nulls(len(rows), field.type)
            elif field.name not in known:
                known[field.name] = np.ones(len(rows))
        arrays = [pa.array(known[field.name]).cast(field.type) for field in COLUMNS]
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_arrays(arrays, schema=COLUMNS), sink)
        return sink.getvalue()


def pretend_dataset(crops: int, batch_crops: int) -> PretendedDataset:
    """Returns a dataset with a table of `crops` crops; if they are many, the table has only the
    first ones."""
    rows = min(crops, max(MAX_ROWS, 4 * batch_crops))
    no_sum = "0" * 64
    meta: dict[str, Any] = {
        "fs_hz": FS_HZ,
        "leads": list(LEADS),
        "uv_per_lsb": 1.0,
        "crop_samples": CROP,
        "preprocessing": {},
        "preprocessing_sha256": no_sum,
        "recipe": no_sum,
        "seed": 0,
        "plan": "all",
        "roles": {},
        "sources": [],
        "crops": rows,
        "rejects": {"bytes": 0, "sha256": no_sum},
        "samples": {"bytes": 0, "sha256": no_sum},
        "shards": [{"name": "00000.tar", "crops": rows, "bytes": 0, "sha256": no_sum}],
        "formats": ["tar"],
        "fingerprint": no_sum,
    }
    return PretendedDataset(LocalFolder(f"{crops:,} crops"), meta)
