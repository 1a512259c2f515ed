"""The entries of dataset.json and the columns of samples.parquet in format version 1."""

import hashlib
import json
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import BaseModel, Field, NonNegativeInt, field_validator

from ..ecg.constants import CLASS_ABBREVIATIONS, LEADS

FORMAT_VERSION = 1
# Since minor version 2, only samples.parquet holds the roles, and no record is added to a dataset or
# removed from it
FORMAT_MINOR = 2
CLASSES = CLASS_ABBREVIATIONS  # the diagnoses, in the order of the column `labels`
SHARD_CROPS = 1024
META, SAMPLES, REJECTS, STORE = "dataset.json", "samples.parquet", "rejects.csv", "store.zarr"
MAX_META_BYTES = 256 * 2**20
NAME_KEY = b"omnilead name key"  # entry in the metadata of samples.parquet: see Dataset.name_key

COLUMNS = pa.schema(
    [
        # shard and offset are -1 in a dataset without tar shards, where a crop's address is its row number
        ("shard", pa.int32()),
        ("offset", pa.int64()),
        ("crc32c", pa.uint32()),
        # crc32c of the limb leads (upper 32 bits) and of the chest leads (lower 32 bits): equal
        # waveforms have equal values
        ("waveform", pa.uint64()),
        ("source", pa.string()),
        ("record", pa.string()),
        ("patient", pa.string()),
        ("start_s", pa.float64()),
        ("halves", pa.uint8()),
        ("missing_leads", pa.list_(pa.string())),
        ("flags", pa.list_(pa.string())),
        ("pretrain", pa.bool_()),
        ("dx_role", pa.string()),
        ("id_role", pa.string()),
        ("dx", pa.list_(pa.string())),
        ("labels", pa.list_(pa.bool_(), 26)),
        ("age", pa.float32()),
        ("sex", pa.string()),
        ("fs_source_hz", pa.float64()),
    ]
)
NULLABLE_COLUMNS = ("patient", "dx_role", "id_role", "age", "sex")
COLUMN_RANGES = {
    "offset": (-1, 2**62),
    "start_s": (0, 1e9),
    "halves": (1, 2),
    "fs_source_hz": (1e-3, 1e9),
}
ROLE_WORDS = {  # the only values, besides null, that these columns may have
    "dx_role": ("train", "valid", "test"),
    "id_role": ("train", "valid", "gallery", "probe"),
}
MAX_CROPS = 2**32
Crops = Annotated[int, Field(ge=0, le=MAX_CROPS)]


class FileFacts(BaseModel, strict=True, frozen=True):
    bytes: NonNegativeInt
    sha256: str


class ShardFacts(BaseModel, strict=True, frozen=True):
    """The entry of one shard in dataset.json. Only some characters are allowed in `name` and `sha256`,
    because both are used as file names."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}\.tar$")]
    crops: Crops
    bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class SourceFacts(BaseModel, strict=True, frozen=True):
    name: str
    licence: str
    records: Annotated[
        dict[Literal["seen", "used", "refused"], NonNegativeInt], Field(min_length=3)
    ]
    crops: Crops
    dropped_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RoleFacts(BaseModel, strict=True, frozen=True):
    """How many crops have each role."""

    pretrain: Crops = 0
    dx: dict[str, Crops] = {}
    id: dict[str, Crops] = {}


class DatasetFacts(BaseModel, strict=True, frozen=True):
    """The entries of dataset.json that readers rely on. Entries with a default may be absent."""

    fingerprint: str
    fs_hz: Literal[500]
    leads: list[str]
    uv_per_lsb: Annotated[float, Field(ge=1, le=1)]
    crop_samples: Literal[5000]
    preprocessing: dict[str, Any]
    preprocessing_sha256: str
    recipe: str
    pseudonyms: str | None = None
    crops: Crops
    samples: FileFacts
    rejects: FileFacts
    format_minor: int = 0
    shards: list[ShardFacts]
    formats: list[Literal["tar", "zarr"]]
    seed: int
    shard_crops: Crops = SHARD_CROPS  # crops in each shard but the last
    plan: Literal["paper", "all", "paper-split"]
    # id_share, role_sources and leave_out_flags are settings of RoleSources; None stands for the default
    id_share: Annotated[float, Field(ge=0, le=1)] | None = None
    role_sources: dict[Literal["dx", "id", "pretrain"], list[str]] = {}
    leave_out_flags: list[str] | None = None
    # True means that no flag keeps a crop out of pre-training. Only datasets older than leave_out_flags can
    # have this entry
    pretrain_implausible: bool = False
    left_out_patients: dict[Literal["asked", "found"], NonNegativeInt] = {"asked": 0, "found": 0}
    roles: RoleFacts
    sources: list[SourceFacts]

    @field_validator("leads")
    @classmethod
    def _check_lead_order(cls, leads: list[str]) -> list[str]:
        if leads != list(LEADS):
            raise ValueError(f"leads must be {', '.join(LEADS)}, in this order")
        return leads


def fingerprint(meta: dict[str, Any]) -> str:
    """Returns a hash of all entries of dataset.json but the fingerprint itself. The entries include the
    sha256 of every shard and table."""
    rest = {name: value for name, value in meta.items() if name != "fingerprint"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
