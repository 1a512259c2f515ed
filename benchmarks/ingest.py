"""Measure how fast archives become datasets: records per second and per CPU-second, compared with other
programs.

The archive is synthetic (10 s records in the PhysioNet 2021 layout) and in the page cache after the
warm-up. The others read the same files: `wfdb.rdrecord` in a loop, and our re-creation of
fairseq-signals' preprocess_physionet2021.py (wfdb for the header, loadmat, division by the gain,
two float64 .mat files of 5 s per record), with our malloc settings.
"""

import argparse
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Cases, Result, describe_input
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io.terminal import keep_freed_memory
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.detect import open_sources
from omnilead.data_tools.synthetic import archive as synth


def prepare_input_and_cases(work: Path, options: argparse.Namespace) -> tuple[Result, Cases]:
    """Makes an archive of records at 500 Hz and a dataset of it. Returns (facts about them, the cases)."""
    archive = work / "archive"
    patients = (options.records or 2000) // 2
    synth.synthesise(archive, patients=patients, two_sessions=0, seed=11, progress=False)
    for name in ("synthetic-st_petersburg_incart", "synthetic-ptb"):  # not sampled at 500 Hz
        shutil.rmtree(archive / "training" / name)
    dataset = shard_archive(archive, work / "dataset")
    cases: Cases = {
        "read: omnilead": (repeat_work, (read_with_omnilead, archive)),
        "read: wfdb.rdrecord": (repeat_work, (read_with_wfdb, archive)),
        "ingest: omnilead, tar": (repeat_work, (ingest, archive)),
        "ingest: re-creation of fairseq-signals' preprocessing": (
            repeat_work,
            (ingest_like_fairseq, archive),
        ),
        "verify: tar": (repeat_work, (verify_dataset, work / "dataset")),
    }
    return describe_input(dataset, records=len(record_paths(archive))), cases


def repeat_work(work: Callable[[Path], float], place: Path) -> Iterator[float]:
    """Does some work repeatedly, and yields each time how many units were done."""
    while True:
        yield work(place)


def record_paths(archive: Path) -> list[Path]:
    """Returns the paths of the records without their suffix."""
    return sorted(path.with_suffix("") for path in archive.glob("training/*/g*/*.hea"))


def shard_archive(archive: Path, out: Path) -> Dataset:
    return shard(open_sources(str(archive)), ShardOptions(str(out), quiet=True))


def read_with_omnilead(archive: Path) -> float:
    """Reads all records of an archive with our sources. Returns their number."""
    return sum(1 for source in open_sources(str(archive)) for _ in source)


def read_with_wfdb(archive: Path) -> float:
    """Reads the first 300 records of an archive with wfdb.rdrecord. Returns their number."""
    import wfdb

    records = record_paths(archive)[:300]
    return sum(wfdb.rdrecord(str(path)).p_signal.shape[1] == 12 for path in records)


def ingest(archive: Path) -> float:
    """Makes a dataset of an archive, then deletes it. Returns the number of records."""
    out = archive.parent / f"out-{os.getpid()}"
    dataset = shard_archive(archive, out)
    shutil.rmtree(out)
    return sum(source.records["used"] for source in dataset.facts.sources)


def ingest_like_fairseq(archive: Path) -> float:
    """Runs our re-creation of fairseq-signals' preprocessing on the first 300 records of an archive. It has the same
    input and output as the original; it was written after reading that, and is not its authors' code.
    Returns the number of records."""
    import wfdb
    from scipy.io import loadmat

    keep_freed_memory()
    out = archive.parent / f"fairseq-{os.getpid()}"
    out.mkdir()
    records = record_paths(archive)[:300]
    for number, path in enumerate(records):
        header = wfdb.rdheader(str(path))
        sample = loadmat(f"{path}.mat")["val"] / np.array(header.adc_gain)[:, None]
        width = 5 * int(header.fs)
        for segment in range(sample.shape[1] // width):
            feats = sample[:, segment * width : (segment + 1) * width]
            write_segment(out / f"{path.name}_{segment}.mat", feats, number)
    shutil.rmtree(out)
    return len(records)


def write_segment(path: Path, feats: np.ndarray, patient: int) -> None:
    """Writes a 5 s segment as a .mat file with the same fields as that of fairseq-signals' preprocessing."""
    from scipy.io import savemat

    facts: dict[str, Any] = {"curr_sample_rate": 500, "patient_id": patient, "age": 0, "sex": 1}
    savemat(path, {"feats": feats, "label": np.zeros(26, bool)} | facts)


def verify_dataset(dataset: Path) -> float:
    """Verifies a dataset, and returns the size of its shards in gigabytes."""
    opened = Dataset.open(str(dataset))
    assert verify(opened) == []
    return sum(entry.bytes for entry in opened.shards) / 1e9
