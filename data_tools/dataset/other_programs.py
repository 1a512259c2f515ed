"""Give a dataset's crops to other programs: as (x, y) for any PyTorch loader, and as objects of
webdataset, zarr and Hugging Face datasets. docs/other_programs.md has examples.

    dataset = Dataset.open("DATASET")
    crops = dataset.torch("dx:train", labels=["AF", "NSR"])     # or a table: labels="my.csv"
    x, y = crops[0]          # float32 [12, 5000] in millivolts; float32 [2], NaN where unknown
    stream, array = dataset.webdataset("pretrain"), dataset.zarr()

A role must be named, so that nobody trains on held-out people by mistake. `dataset` is a Dataset in
every function below. The module of Dataset is not imported here, because it imports this module.
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..ecg.constants import CLASS_ABBREVIATIONS as CLASSES
from ..ecg.constants import CROP, CROP_SHAPE, FS_HZ
from ..ecg.record_names import match_records
from ..ecg.record_tables import RESERVED_COLUMNS, missing_words, read_table
from ..io.errors import DataError, DatasetError, Flag, naming_arguments_in_errors, one_line
from ..io.terminal import tell

ROLE_COLUMN_AND_VALUE: dict[str, tuple[str, Any]] = {
    "all": ("", None),
    "pretrain": ("pretrain", True),
}
ROLE_COLUMN_AND_VALUE |= {f"dx:{role}": ("dx_role", role) for role in ("train", "valid", "test")}
ROLE_COLUMN_AND_VALUE |= {
    f"id:{role}": ("id_role", role) for role in ("train", "valid", "gallery", "probe")
}


class Crops:
    """The crops of a role, in shard order. A torch.utils.data.DataLoader accepts this class as a
    dataset, although the class itself does not need torch."""

    def __init__(self, dataset: Any, role: str, labels: str | Sequence[str] | None) -> None:
        column, value = _role_column_and_value(role)
        chosen = dataset.column(column) == value if column else np.ones(len(dataset), bool)
        if not chosen.any():
            raise DatasetError(
                f"{dataset.root.url}: no crop has the role {role}: its roles are {dataset.facts.roles.model_dump()}"
            )
        self.dataset = dataset
        self.rows = np.flatnonzero(chosen)
        self.y = self.rows
        if labels is None:
            return
        if isinstance(labels, str) and labels not in CLASSES:
            y = _labels_in_table(dataset, labels)
        else:
            y = _own_labels(dataset, [labels] if isinstance(labels, str) else labels)
        known = ~np.isnan(y[self.rows]).all(1)
        if not known.any():
            raise DataError(
                f"labels={labels}: no crop of the role {role} has a known value of these labels: choose "
                "others"
            )
        if not known.all():
            left = f"{np.sum(~known):,} of {len(known):,} crops of the role {role}"
            tell(f"note: {left} have no label and are left out")
        self.rows = self.rows[known]
        self.y = y[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        """Returns (a crop in millivolts, its labels), after checking the crop's crc32c. Without labels,
        the second value is the crop's row in samples.parquet."""
        return _millivolts(self.dataset.read(int(self.rows[index]))), self.y[index]


def _role_column_and_value(role: str) -> tuple[str, Any]:
    """Returns the column of samples.parquet that holds a role, and the role's value in that column."""
    if role not in ROLE_COLUMN_AND_VALUE:
        raise DataError(
            f"role={role}: no such role: choose from {', '.join(ROLE_COLUMN_AND_VALUE)}"
        )
    return ROLE_COLUMN_AND_VALUE[role]


def _millivolts(crop: np.ndarray) -> np.ndarray:
    return crop.astype(np.float32) / 1000


def _own_labels(dataset: Any, names: Sequence[str]) -> np.ndarray:
    """Returns the dataset's own labels [crops, K]. If a record has no diagnosis code, its diagnoses
    are unknown (NaN)."""
    columns = {"age": dataset.column("age")}
    coded = pc.list_value_length(dataset.table(["dx"])["dx"]).to_numpy() > 0
    for name, has in zip(CLASSES, dataset.labels.T, strict=True):
        columns[name] = np.where(coded, has, np.nan)
    if unknown := [name for name in names if name not in columns]:
        raise DataError(
            f"labels={unknown[0]}: no such label: choose from {', '.join(columns)}, or name a CSV "
            "or parquet file"
        )
    return np.stack([columns[name] for name in names], 1).astype(np.float32)


def _labels_in_table(dataset: Any, url: str) -> np.ndarray:
    """Returns labels [crops, K] from a table: one column for each table column whose name is not reserved."""
    cells = read_table(url)
    names = [name for name in cells.column_names if name not in RESERVED_COLUMNS]
    for name in names:
        words = missing_words(cells[name])
        if count := pc.sum(words).as_py():
            tell(f"note: {url}: column {name!r} holds words such as NA in {count:,} rows: unknown")
            place = cells.column_names.index(name)
            cells = cells.set_column(place, name, pc.if_else(words, None, cells[name]))
    try:
        y = np.stack([cells[name].cast(pa.float32()).to_numpy() for name in names], 1)
    except ValueError as error:  # errors of arrow are ValueErrors, too
        why = one_line(str(error))
        raise DataError(f"{url}: labels must be columns of numbers, 0 and 1 ({why})") from None
    table = dataset.table(["source", "record"])
    keys = pc.binary_join_element_wise(table["source"], table["record"], "/")
    records = keys.combine_chunks().dictionary_encode()
    plain = pc.replace_substring_regex(records.dictionary, "^[^/]*/", "")
    matches = match_records(url, cells, records.dictionary, plain)
    for note in matches.notes:
        tell(f"note: {url}: {note}")
    # The last row, which is also row -1, is NaN for records that are not in the table
    y = np.append(y, np.full((1, len(names)), np.nan, np.float32), 0)
    labels: np.ndarray = y[matches.row[records.indices.to_numpy()]]
    return labels


def web_dataset(dataset: Any, role: str, options: dict[str, Any]) -> Any:
    """Returns a webdataset.WebDataset of a role's crops, with `ecg` in millivolts and `json` as a dict."""
    import webdataset

    root = dataset.root
    if root.remote or not dataset.shards:
        raise DatasetError(
            f"{root.url}: webdataset reads tar shards on a local disk, and this dataset has none there: use torch()"
        )
    urls = [root.path(f"shards/{shard.name}") for shard in dataset.shards]
    stream = webdataset.WebDataset(urls, **{"shardshuffle": False} | options)
    if role != "all":
        stream = stream.select(partial(_key_is_in, sample_keys(dataset, role)))
    return stream.map_dict(json=json.loads).map(_decode_sample)


def sample_keys(dataset: Any, role: str) -> set[str]:
    """Returns the keys that a role's crops have in the shards. The shards themselves do not hold the roles."""
    column, value = _role_column_and_value(role)
    table = dataset.table(["source", "record", "start_s", *([column] if column else [])])
    if column:
        table = table.filter(pc.fill_null(pc.equal(table[column], value), False))
    parts = (table["start_s"].to_numpy() * FS_HZ / CROP).round().astype(int).tolist()
    names = (table[name].to_pylist() for name in ("source", "record"))
    return {
        f"{source}-{record}-{part:03d}" for source, record, part in zip(*names, parts, strict=True)
    }


def _key_is_in(keys: set[str], sample: dict[str, Any]) -> bool:
    return sample["__key__"] in keys


def _decode_sample(sample: dict[str, Any]) -> dict[str, Any]:
    if f"{google_crc32c.value(sample['ecg']):08x}" != sample["json"]["crc32c"]:
        raise DatasetError(f"{sample['__url__']}: {sample['__key__']} fails its crc32c")
    crop = np.frombuffer(sample["ecg"], "<i2").reshape(CROP_SHAPE)
    return sample | {"ecg": _millivolts(crop)}


@naming_arguments_in_errors()
def zarr_array(dataset: Any, store: str) -> Any:
    """Returns the zarr.Array of all crops in microvolts, in the order of samples.parquet's rows."""
    import zarr

    root = dataset.root
    if "zarr" not in dataset.facts.formats:
        raise DatasetError(
            f"{root.url}: this dataset has no {store}: build it with ", Flag("--format"), " both"
        )
    options = {"anon": True} if getattr(root, "anonymous", False) else None
    return zarr.open_array(root.path(store), mode="r", storage_options=options)


def hugging_face_features(columns: pa.Schema) -> Any:
    """Returns the datasets.Features of the shards. Without them, `datasets` would infer types from the
    first crops, and a column of missing values has no type."""
    from datasets import Features

    text = pa.string()
    types = {field.name: field.type for field in columns}
    types |= {"crc32c": text, "waveform": text, "label_names": pa.list_(text)}
    for name in ("shard", "offset", "pretrain", "dx_role", "id_role"):
        del types[name]
    members = {"ecg": pa.binary(), "json": pa.struct(types), "__key__": text, "__url__": text}
    return Features.from_arrow_schema(pa.schema(members))
