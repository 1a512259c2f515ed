"""A writer and a reader made from docs/dataset_format.md alone give the bytes that omnilead gives."""

import hashlib
import json
import re
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow.parquet as pq
import pytest
from handmade import ecg

from omnilead.data_tools.shard import shard

PAGE = (Path(__file__).parents[2] / "docs" / "dataset_format.md").read_text()
RECORDS, SHARD_CROPS, SEED = 9, 4, 2**70 + 5
ABBREVIATIONS = re.search(r"by abbreviation: ([^|]+) \|", PAGE)[1].split()


@pytest.fixture(scope="module")
def signals_uv():
    """Of 24 s: two crops, and 4 s that are dropped; the last one of 16 s, with a crop of 5 s."""
    signals = [ecg(12_000, seed=number) for number in range(RECORDS)]
    return [*signals[:-1], signals[-1][:, :8000]]


@pytest.fixture(scope="module")
def made(signals_uv, tmp_path_factory):
    place = tmp_path_factory.mktemp("second")
    (place / "raw").mkdir()
    for number, signal in enumerate(signals_uv):
        np.save(place / "raw" / f"r{number}.npy", signal)
    (place / "raw" / "arrays.yaml").write_text(
        "fs_hz: 500\nunit: uV\nleads: 12\nfile: '*.npy'\nlayout: leads samples\n"
    )
    out = place / "out"
    shard(place / "raw", out=out, plan="all", seed=SEED, shard_crops=SHARD_CROPS, workers=1)
    return out


def shuffled(count):
    """The positions of the archive's crops in the shards, by the formula as it stands on the page."""
    (formula,) = re.findall(r"```text\n(x = [^`]+)```", PAGE)
    variables = {
        "position": np.arange(count, dtype=np.uint64),
        "seed": np.array([SEED % 2**64], np.uint64),
    }
    exec(formula, variables)
    return sorted(range(count), key=variables["hash"].tolist().__getitem__)


def crops_of(signals_uv):
    """(name in the shard, samples, row as JSON) of each crop, in the order of the archive."""
    crops = []
    for number, signal in enumerate(signals_uv):
        for part in range(2):
            samples = signal[:, 5000 * part : 5000 * (part + 1)]
            halves = 2 if samples.shape[1] == 5000 else 1
            crop = np.zeros((12, 5000), "<i2")
            crop[:, : 2500 * halves] = samples[:, : 2500 * halves]
            limb, chest = (
                google_crc32c.value(crop[rows].tobytes()) for rows in (slice(6), slice(6, 12))
            )
            row = {
                **{"source": "arrays", "record": f"r{number}", "patient": None},
                **{"start_s": 10.0 * part, "halves": halves, "missing_leads": [], "flags": []},
                **{"dx": [], "labels": [False] * len(ABBREVIATIONS), "age": None, "sex": None},
                "fs_source_hz": 500.0,
                "crc32c": f"{google_crc32c.value(crop.tobytes()):08x}",
                "waveform": f"{limb << 32 | chest:016x}",
                "label_names": [],
            }
            crops.append((f"arrays-r{number}-{part:03d}", crop.tobytes(), json.dumps(row).encode()))
    return crops


def tar_member(name, data):
    fields = [
        *(name.encode().ljust(100, b"\0"), b"0000644\0", b"0000000\0", b"0000000\0"),
        *(b"%011o\0" % len(data), b"%011o\0" % 0, b" " * 8, b"0", bytes(100), b"ustar\0" + b"00"),
        *(bytes(32), bytes(32), b"0000000\0", b"0000000\0", bytes(167)),
    ]
    fields[6] = b"%06o\0 " % sum(b"".join(fields))
    header = b"".join(fields)
    assert len(header) == 512
    return header + data + bytes(-len(data) % 512)


def test_a_second_writer_gives_the_same_shards(signals_uv, made):
    crops = crops_of(signals_uv)
    order = shuffled(len(crops))
    shards = [order[start : start + SHARD_CROPS] for start in range(0, len(order), SHARD_CROPS)]
    assert len(shards) == 5 and len(shards[-1]) == 2
    for number, positions in enumerate(shards):
        tar, lines = b"", [f"v1.2 {len(positions)}"]
        for position in positions:
            name, samples, row = crops[position]
            line = ""
            for ending, data in (("ecg", samples), ("json", row)):
                line += f" {ending} {len(tar) + 512} {len(data)} {name}.{ending}"
                tar += tar_member(f"{name}.{ending}", data)
            lines.append(line.strip())
        shards_folder = made / "shards"
        assert (shards_folder / f"{number:05d}.tar").read_bytes() == tar + bytes(1024)
        assert (shards_folder / f"{number:05d}.idx").read_text() == "\n".join(lines) + "\n"


def test_a_second_reader_finds_the_same_crops(signals_uv, made):
    meta = json.loads((made / "dataset.json").read_text())
    fields = {name: value for name, value in meta.items() if name != "fingerprint"}
    text = json.dumps(fields, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == meta["fingerprint"]
    for facts, name in ((meta["samples"], "samples.parquet"), (meta["rejects"], "rejects.csv")):
        data = (made / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (facts["bytes"], facts["sha256"])
    crops = {name: samples for name, samples, _ in crops_of(signals_uv)}
    found = 0
    for row in pq.read_table(made / "samples.parquet").to_pylist():
        place = meta["shards"][row["shard"]]
        tar = (made / "shards" / place["name"]).read_bytes()
        assert hashlib.sha256(tar).hexdigest() == place["sha256"] and len(tar) == place["bytes"]
        data = tar[row["offset"] : row["offset"] + 120_000]
        name = f"{row['source']}-{row['record']}-{round(row['start_s'] / 10):03d}"
        assert data == crops[name] and google_crc32c.value(data) == row["crc32c"]
        found += 1
    assert found == len(crops) == meta["crops"]
