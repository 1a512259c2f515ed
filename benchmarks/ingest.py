"""Archive -> dataset: how many records a second and a core, beside the ways in which it is done elsewhere.

The archive is synthetic (10 s records in the PhysioNet 2021 layout) and in the page cache after the warm-up. The peers read
the very same files: `wfdb.rdrecord` in a loop, `scipy.io.loadmat` in a loop, and our re-creation of fairseq-signals'
preprocess_physionet2021.py (wfdb for the header, loadmat, division by the gain, two float64 .mat files of 5 s a record), with
our malloc settings.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Case
from data_tools import synth
from data_tools.build import ShardOptions, shard
from data_tools.cli import keep_freed_memory
from data_tools.dataset import Dataset
from data_tools.plan import make_plan
from data_tools.sources import open_sources
from data_tools.sources.physionet2021 import PhysioNet2021
from data_tools.verify import verify


def prepare(work: Path, records: int) -> Path:
    """An archive of about `records` records at 500 Hz; the two databases of other rates become an archive of their own."""
    archive, others = work / "archive", work / "other-rates" / "training"
    synth.synthesise(archive, patients=records // 2, sessions=1, seed=11, progress=False)
    others.mkdir(parents=True)
    for name in ("st_petersburg_incart", "ptb"):
        (archive / "training" / name).rename(others / name)
    return archive


def cases(archive: Path, work: Path) -> dict[str, Case]:
    dataset = work / "dataset"
    shard(open_sources(str(archive)), ShardOptions(str(dataset), format="both", quiet=True))
    return {
        "read: omnilead": (read_omnilead, (archive,)),
        "read: wfdb.rdrecord": (read_wfdb, (archive, 300)),
        "read: scipy.io.loadmat": (read_loadmat, (archive, 1000)),
        "ingest: omnilead, tar": (ingest, (archive, work, "tar", 1)),
        "ingest: omnilead, tar, 2 workers": (ingest, (archive, work, "tar", 2)),
        "ingest: omnilead, tar and zarr": (ingest, (archive, work, "both", 1)),
        "ingest: omnilead, 257 and 1000 Hz (crops)": (ingest_crops, (work / "other-rates", work)),
        "ingest: re-creation of fairseq-signals' preprocessing": (ingest_like_fairseq, (archive, work, 300)),
        "plan: headers on disk": (plan_on_disk, (archive,)),
        "verify": (check, (dataset,)),
        "synth: signals": (synthesise_signals, (512,)),
        "synth: signals and files": (synthesise_files, (work, 512)),
    }


def headers(archive: Path, most: int) -> list[Path]:
    return sorted(archive.glob("training/*/g*/*.hea"))[:most]


def read_omnilead(archive: Path) -> float:
    sources = open_sources(str(archive))
    return sum(record.signal.shape[0] == 12 for source in sources for record in source)


def read_wfdb(archive: Path, most: int) -> float:
    import wfdb

    return sum(wfdb.rdrecord(str(path.with_suffix(""))).p_signal.shape[1] == 12 for path in headers(archive, most))


def read_loadmat(archive: Path, most: int) -> float:
    from scipy.io import loadmat

    return sum(loadmat(path.with_suffix(".mat"))["val"].shape[0] == 12 for path in headers(archive, most))


def ingest(archive: Path, work: Path, format: str, workers: int) -> float:
    out = work / f"out-{os.getpid()}"
    dataset = shard(open_sources(str(archive)), ShardOptions(str(out), format=format, workers=workers, quiet=True))
    used = sum(source["records"]["used"] for source in dataset.meta["sources"])
    shutil.rmtree(out)
    return float(used)


def ingest_crops(archive: Path, work: Path) -> float:
    out = work / f"out-{os.getpid()}"
    crops = len(shard(open_sources(str(archive)), ShardOptions(str(out), quiet=True)))
    shutil.rmtree(out)
    return float(crops)


def ingest_like_fairseq(archive: Path, work: Path, most: int) -> float:
    """Written by us from a reading of the original, for the same input and output: not their code."""
    import wfdb
    from scipy.io import loadmat, savemat

    keep_freed_memory()
    out = work / f"fairseq-{os.getpid()}"
    out.mkdir()
    records = headers(archive, most)
    for number, path in enumerate(records):
        header = wfdb.rdheader(str(path.with_suffix("")))
        sample = loadmat(path.with_suffix(".mat"))["val"] / np.array(header.adc_gain)[:, None]
        width = 5 * int(header.fs)
        for segment in range(sample.shape[1] // width):
            feats = sample[:, segment * width : (segment + 1) * width]
            data = {
                "feats": feats,
                "curr_sample_rate": 500,
                "patient_id": number,
                "label": np.zeros(26, bool),
                "age": 0,
                "sex": 1,
            }
            savemat(out / f"{path.stem}_{segment}.mat", data)
    shutil.rmtree(out)
    return float(len(records))


def plan_on_disk(archive: Path) -> float:
    return float(len(make_plan(open_sources(str(archive)), 0).keys))


def check(dataset: Path) -> float:
    """Units are gigabytes of shards."""
    opened = Dataset.open(str(dataset))
    assert verify(opened) == []
    return sum(entry["bytes"] for entry in opened.shards) / 1e9


def synthesise_signals(records: int) -> float:
    blocks = [block for block in synth.plan(records, 1, 5, "physionet2021") if block.database == "ptb-xl"]
    return float(sum(len(digital) for block in blocks for _, digital, *_ in synth.sessions_of(block)))


def synthesise_files(work: Path, records: int) -> float:
    out = work / f"synth-{os.getpid()}"
    counts = synth.synthesise(out, records // 2, 1, 5, progress=False)
    shutil.rmtree(out)
    return float(sum(counts.values()))


@dataclass(frozen=True)
class HeadersInMemory:
    """An archive of headers that no disk holds, so that a million can be planned: parsing, hashing and planning are real."""

    count: int
    url: str = "memory"
    remote = False

    def children(self) -> list[str]:
        return ["training"]

    def exists(self, name: str) -> bool:
        return False

    def names(self, under: str = "") -> Iterator[str]:
        for i in range(self.count):
            yield f"training/ningbo/g{i // 1000 + 1}/JS{i:08d}.hea"
            yield f"training/ningbo/g{i // 1000 + 1}/JS{i:08d}.mat"

    def read(self, name: str, limit: int) -> bytes:
        stem = name[-14:-4]
        lead = f"{stem}.mat 16+24 1000/mV 16 0 12 -{int(stem[2:]) % 32768} 0 "
        return "\n".join(
            [f"{stem} 12 500 5000", *(lead + name for name in LEADS), "#Age: 50", "#Sex: Male", "#Dx: 426783006"]
        ).encode()

    def stamp(self, name: str) -> bytes:
        return b""


LEADS = ["I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6"]


def plan_in_memory(count: int) -> float:
    plan = make_plan([PhysioNet2021(HeadersInMemory(count))], 0)  # type: ignore[arg-type]
    for shard_index in range(plan.shards):
        plan.shard(shard_index)
    return float(len(plan.keys))


def facts(archive: Path, work: Path) -> dict[str, Any]:
    """What a reader of the record needs to know about its input."""
    dataset = Dataset.open(str(work / "dataset"))
    return {
        "archive": "synthetic",
        "records": len(headers(archive, 10**9)),
        "crops": len(dataset),
        "dataset": dataset.fingerprint,
    }
