"""Archive to dataset: records per second and per CPU-second, compared with other programs.

The archive is synthetic (10 s records in the PhysioNet 2021 layout) and in the page cache after the
warm-up. The others read the same files: `wfdb.rdrecord` in a loop, `scipy.io.loadmat` in a loop,
and our re-creation of fairseq-signals' preprocess_physionet2021.py (wfdb for the header, loadmat,
division by the gain, two float64 .mat files of 5 s per record), with our malloc settings.
"""

import argparse
import os
import shutil
from pathlib import Path

import numpy as np

from benchmarks.measure import Benchmark, Case, describe
from omnilead.data_tools.build import ShardOptions, shard
from omnilead.data_tools.cli import keep_freed_memory
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.sources import open_sources
from omnilead.data_tools.synthetic import archive as synth
from omnilead.data_tools.verify import verify


def prepare(work: Path, options: argparse.Namespace) -> Benchmark:
    """Make an archive of records at 500 Hz, and another one of the two databases with other
    rates."""
    archive, others = work / "archive", work / "other-rates" / "training"
    synth.synthesise(
        archive, patients=(options.records or 2000) // 2, two_sessions=0, seed=11, progress=False
    )
    others.mkdir(parents=True)
    for name in ("st_petersburg_incart", "ptb"):
        (archive / "training" / name).rename(others / name)
    dataset = shard(
        open_sources(str(archive)), ShardOptions(str(work / "dataset"), format="both", quiet=True)
    )
    return Benchmark(describe(dataset, records=len(headers(archive, 10**9))), cases(archive, work))


def cases(archive: Path, work: Path) -> dict[str, Case]:
    return {
        "read: omnilead": (read_omnilead, (archive,)),
        "read: wfdb.rdrecord": (read_wfdb, (archive, 300)),
        "read: scipy.io.loadmat": (read_loadmat, (archive, 1000)),
        "ingest: omnilead, tar": (ingest, (archive, work, "tar", 1)),
        "ingest: omnilead, tar, 2 workers": (ingest, (archive, work, "tar", 2)),
        "ingest: omnilead, tar and zarr": (ingest, (archive, work, "both", 1)),
        "ingest: omnilead, 257 and 1000 Hz (crops)": (
            ingest,
            (work / "other-rates", work, "tar", 1, True),
        ),
        "ingest: re-creation of fairseq-signals' preprocessing": (
            ingest_like_fairseq,
            (archive, work, 300),
        ),
        "verify": (check, (work / "dataset",)),
    }


def headers(archive: Path, most: int) -> list[Path]:
    return sorted(archive.glob("training/*/g*/*.hea"))[:most]


def read_omnilead(archive: Path) -> float:
    return sum(
        record.signal.shape[0] == 12 for source in open_sources(str(archive)) for record in source
    )


def read_wfdb(archive: Path, most: int) -> float:
    import wfdb

    return sum(
        wfdb.rdrecord(str(path.with_suffix(""))).p_signal.shape[1] == 12
        for path in headers(archive, most)
    )


def read_loadmat(archive: Path, most: int) -> float:
    from scipy.io import loadmat

    return sum(
        loadmat(path.with_suffix(".mat"))["val"].shape[0] == 12 for path in headers(archive, most)
    )


def ingest(archive: Path, work: Path, format: str, workers: int, crops: bool = False) -> float:
    out = work / f"out-{os.getpid()}"
    dataset = shard(
        open_sources(str(archive)),
        ShardOptions(str(out), format=format, workers=workers, quiet=True),
    )
    used = sum(source["records"]["used"] for source in dataset.meta["sources"])
    shutil.rmtree(out)
    return float(len(dataset) if crops else used)


def ingest_like_fairseq(archive: Path, work: Path, most: int) -> float:
    """Our re-creation, written after reading the original, with the same input and output; not
    their code."""
    import wfdb
    from scipy.io import loadmat

    keep_freed_memory()
    out = work / f"fairseq-{os.getpid()}"
    out.mkdir()
    records = headers(archive, most)
    for number, path in enumerate(records):
        header = wfdb.rdheader(str(path.with_suffix("")))
        sample = loadmat(path.with_suffix(".mat"))["val"] / np.array(header.adc_gain)[:, None]
        width = 5 * int(header.fs)
        for segment in range(sample.shape[1] // width):
            write_segment(
                out / f"{path.stem}_{segment}.mat",
                sample[:, segment * width : (segment + 1) * width],
                number,
            )
    shutil.rmtree(out)
    return float(len(records))


def write_segment(path: Path, feats: np.ndarray, patient: int) -> None:
    """Write a file as fairseq-signals' preprocessing does."""
    from scipy.io import savemat

    facts = {
        "curr_sample_rate": 500,
        "patient_id": patient,
        "label": np.zeros(26, bool),
        "age": 0,
        "sex": 1,
    }
    savemat(path, {"feats": feats} | facts)


def check(dataset: Path) -> float:
    """Verify a dataset; returns gigabytes of shards."""
    opened = Dataset.open(str(dataset))
    assert verify(opened) == []
    return sum(entry["bytes"] for entry in opened.shards) / 1e9
