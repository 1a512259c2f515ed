"""Make a dataset of ten million crops, and define the jobs that go over all of them. Each job runs in a
process of its own.

    dataset = make_huge_dataset(Path("huge"), 10_000_000)
    cases = cases_of_jobs(dataset)                       # for benchmarks.measure.run_cases

The tables are complete: parts as a build leaves them, roles, samples.parquet. The 9,766 shards, but
for the first, are sparse files of zeros, so that reading is real while the 1.2 TB take no space on
the disk. The data tools run without PyTorch, as users run them: it would add 310 MB to their peaks.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from benchmarks.measure import Cases
from omnilead.data_tools.dataset import CROP_BYTES, SHARD_CROPS, Dataset, flag_mask
from omnilead.data_tools.ecg.crops import IMPLAUSIBLE
from omnilead.data_tools.ecg.record import LEADS, EcgRecord, Header, class_row
from omnilead.data_tools.io.splitmix import mix
from omnilead.data_tools.io.storage import LocalFolder
from omnilead.data_tools.sharding.finishing import (
    PART_COLUMNS,
    PlanFacts,
    ShardOptions,
    assign_roles,
    finish_dataset,
    parquet_bytes,
    read_records,
)
from omnilead.data_tools.sharding.plan import make_plan
from omnilead.data_tools.sharding.roles import PAPER_SOURCES
from omnilead.data_tools.sharding.shards import TarWriter, index_name, part_name, shard_name
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.base import Source
from omnilead.data_tools.sources.dataset import dataset_sources

# Bytes of a crop in a tar shard: a header and the samples, then a header and the metadata
CROP_IN_TAR_BYTES = 512 + 120_320 + 512 + 512
PREFIX_OF_SOURCE = {"cpsc_2018": "A", "georgia": "E", "ningbo": "JS", "ptb-xl": "HR"}
SOURCES_AND_PREFIXES = tuple(PREFIX_OF_SOURCE.items())
DIAGNOSES = ("426783006",), ("164889003", "59118001")
ZEROS_CRC32C = google_crc32c.value(bytes(CROP_BYTES))
# A job is a generator: it yields 0 when it is ready, then 1 whenever its work is done once more
Job = Iterator[float]


def make_huge_dataset(root: Path, crops: int) -> Dataset:
    """Writes the shards and the parts of a build, and returns the finished dataset."""
    (root / "shards").mkdir(parents=True)
    (root / "parts").mkdir()
    names = [shard_name(number) for number in range(-(-crops // SHARD_CROPS))]
    rows_of_shards = np.split(np.arange(crops), np.arange(SHARD_CROPS, crops, SHARD_CROPS))
    for name, rows in zip(names, rows_of_shards, strict=True):
        size = len(rows) * CROP_IN_TAR_BYTES + 1024
        with open(root / "shards" / name, "wb") as file:
            writer = TarWriter(file)
            file.truncate(size)
        (root / index_name(name)).touch()
        digest = writer.sha256.hexdigest()
        facts = {"name": name, "crops": len(rows), "bytes": size, "sha256": digest}
        facts |= {"rejects": [], "left_out": []}
        part = parquet_bytes(
            crop_table(rows).replace_schema_metadata({"omnilead": json.dumps(facts)})
        )
        place = root / "parts" / Path(part_name(name)).name
        place.write_bytes(part + hashlib.sha256(part).digest())
    return finish_build(root, root)


def finish_build(root: Path, out: Path) -> Dataset:
    """Finishes a build in `out` from the parts in `root`, and returns the dataset."""
    (out / ".build").mkdir(parents=True)
    parts = sorted((root / "parts").iterdir())
    for part in parts:
        os.link(part, out / ".build" / part.name)
    names = [f"{part.stem}.tar" for part in parts]
    seen = len(parts) * SHARD_CROPS  # at least as many as there are records in a source
    sources = [
        {"name": name, "licence": "unknown", "seen": seen, "dropped_s": 0.0}
        for name in PREFIX_OF_SOURCE
    ]
    recipe = {"plan": "paper", "seed": 0, "pseudonyms": None} | PAPER_SOURCES.to_meta("paper")
    options = ShardOptions(str(out), quiet=True)
    return finish_dataset(
        PlanFacts(names, sources, [], None), LocalFolder(str(out)), recipe, options
    )


def source_and_name(row: int) -> tuple[str, str]:
    """Returns (source, name) of the record to which row `row` of the table belongs."""
    source, prefix = SOURCES_AND_PREFIXES[row % len(SOURCES_AND_PREFIXES)]
    return source, f"{prefix}{row:08d}"


def patient_of(source: str, row: int) -> str | None:
    return f"p{row // 8:08d}" if source == "ptb-xl" else None


def crop_table(rows: np.ndarray) -> pa.Table:
    """Returns these rows of the crop table, with the columns that a build keeps in a shard's part file. Each
    record has one crop, and each patient of PTB-XL has two records."""
    count = len(rows)
    sources, names, patients, diagnoses = [], [], [], []
    for row in rows.tolist():
        source, name = source_and_name(row)
        sources.append(source)
        names.append(name)
        patients.append(patient_of(source, row))
        diagnoses.append(DIAGNOSES[row % 3 == 0])
    columns: dict[str, Any] = {
        "shard": rows // SHARD_CROPS,
        "offset": rows % SHARD_CROPS * CROP_IN_TAR_BYTES + 512,
        "crc32c": np.full(count, ZEROS_CRC32C),
        "waveform": mix(rows.astype(np.uint64)),
        "source": sources,
        "record": names,
        "patient": patients,
        "start_s": np.zeros(count),
        "halves": np.where(rows % 20, 2, 1),
        "missing_leads": [[]] * count,
        "flags": [["einthoven"] if row % 50 == 0 else [] for row in rows],
        "dx": diagnoses,
        "labels": [class_row(dx) for dx in diagnoses],
        "age": np.full(count, 60.0),
        "sex": ["male"] * count,
        "fs_source_hz": np.full(count, 500.0),
    }
    return pa.Table.from_pydict(columns, schema=PART_COLUMNS)


class NoiseArchive(Source):
    """An archive whose records are noise and exist only when they are read."""

    name = "headers"

    def __init__(self, rows: range) -> None:
        super().__init__(LocalFolder("/"))
        self.rows = rows

    def keys(self) -> Iterator[str]:
        for row in self.rows:
            source, name = source_and_name(row)
            yield f"training/{source}/g{row // 4000 + 1}/{name}"

    def read(self, key: str) -> EcgRecord:
        header = self.header(key)
        row = int(header.name.strip("AEHJRS"))
        signal = np.random.default_rng(row).integers(-1000, 1000, (12, 5000), np.int16)
        header_facts = {"source": header.source, "patient": header.patient}
        return EcgRecord(header.name, signal, 500.0, LEADS, "uV", **header_facts)

    def header(self, key: str) -> Header:
        _, source, _, name = key.split("/")
        patient = patient_of(source, int(name.strip("AEHJRS")))
        return Header(name, source, 5000, 500.0, key.encode(), key.encode(), patient)


def cases_of_jobs(dataset: Dataset) -> Cases:
    """Returns all jobs as {name: (generator function, arguments)}."""
    url = dataset.root.url
    return {
        "data.hold_out": (hold_out, (url,)),
        "leakage across two datasets": (look_for_leaks, (url,)),
        "data.dedup": (find_copies, (url,)),
        "what a model has seen": (hash_seen_crops, (url,)),
        "planning": (plan_shards, (len(dataset),)),
        "roles": (assign_all_roles, (url,)),
        "finishing": (finish_again, (url,)),
        "verify's tables": (verify_tables, (url,)),
        "planning from a dataset": (plan_from_dataset, (url,)),
    }


def open_verified(url: str) -> Dataset:
    """Opens a dataset and, by reading a column, verifies the checksum of its table. Every training begins with
    this, too."""
    dataset = Dataset.open(url)
    dataset.column("halves")
    return dataset


def hold_out(url: str) -> Job:
    """Draws the patients that are held out for validation."""
    from omnilead.engine.data.patients import validation_split

    dataset = open_verified(url)
    yield 0
    while True:
        validation_split(dataset, 0.1)
        yield 1


def look_for_leaks(url: str) -> Job:
    """Looks for leakage between a dataset and a second opening of it. The roles keep patients for training
    apart from those held out, so all of them are compared and no leak is found."""
    from omnilead.engine.data import leakage

    datasets = open_verified(url), open_verified(url)
    yield 0
    while True:
        trained = [dataset.select(pretrain=True) for dataset in datasets]
        held_out = [leakage.held_out_rows(dataset) for dataset in datasets]
        leakage.refuse_leak(datasets, trained, held_out)
        yield 1


def find_copies(url: str) -> Job:
    """Finds the first crop of each waveform, as data.dedup does."""
    from omnilead.engine.training.config import build_config
    from omnilead.engine.training.validation import first_of_each_waveform

    dataset = open_verified(url)
    yield 0
    while True:
        first_of_each_waveform(build_config({"data": {"datasets": [url]}}), [dataset])
        yield 1


def hash_seen_crops(url: str) -> Job:
    """Makes the record of what a model has seen: hashes of the crops for pre-training and of their patients."""
    from omnilead.engine.data import seen

    yield 0
    while True:
        dataset = Dataset.open(url)
        seen.to_bytes(
            seen.seen_record_of_crops(dataset, dataset.select(pretrain=True), "unlabelled")
        )
        yield 1


def plan_shards(records: int) -> Job:
    """Plans the shards of an archive."""
    yield 0
    while True:
        shard_plan = make_plan([NoiseArchive(range(records))], seed=0)
        for _ in shard_plan.planned(range(shard_plan.shards)):
            pass
        del shard_plan
        yield 1


def plan_from_dataset(url: str) -> Job:
    """Plans the shards of a new dataset from an existing one."""
    yield 0
    while True:
        shard_plan = make_plan(dataset_sources(LocalFolder(url)), seed=0)
        for _ in shard_plan.planned(range(shard_plan.shards)):
            pass
        del shard_plan
        yield 1


def assign_all_roles(url: str) -> Job:
    """Assigns the roles of all crops."""
    yield 0
    while True:
        dataset = Dataset.open(url)
        records = read_records(dataset.table)
        doubtful = flag_mask(dataset.table(["flags"]), [IMPLAUSIBLE])
        assign_roles(records, doubtful, "paper", 0)
        del records
        yield 1


def finish_again(url: str) -> Job:
    """Finishes the build once more, in another folder, which is then deleted."""
    out = Path(url, "again")
    yield 0
    while True:
        finish_build(Path(url), out)
        shutil.rmtree(out)
        yield 1


def verify_tables(url: str) -> Job:
    """Verifies the tables of a dataset, without its shards."""
    yield 0
    while True:
        assert not verify(Dataset.open(url), fast=True)
        yield 1
