"""An archive always gives the same bytes, rows and roles, so that existing datasets stay valid.
A hash here may change only together with an entry in CHANGELOG.md."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from handmade import write_challenge

from omnilead.data_tools.dataset import flag_mask
from omnilead.data_tools.ecg.crops import IMPLAUSIBLE, SPEC_HASH
from omnilead.data_tools.sharding.finishing import assign_roles, read_records
from omnilead.data_tools.sharding.roles import RoleSources, keyed_uniform
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources

RATES = ("500", "257", "1000", "400")


def signal(number, samples):
    """Whole numbers from products and remainders only, so they do not depend on a library's
    generator or cosine."""
    at = np.arange(12)[:, None] * 977 + np.arange(samples) * (131 + number)
    x = (at % 1009 + at % 97 * 11 - 1000) // 2 * 2
    if number % 17:
        x[2:6] = x[1] - x[0], -(x[0] + x[1]) // 2, x[0] - x[1] // 2, x[1] - x[0] // 2
    if number % 23 == 5:
        x[8] = 4
    return x.astype(np.int16)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("golden")
    for number in range(120):
        folder, letter = (("cpsc_2018", "A"), ("georgia", "E"), ("ningbo", "JS"), ("ptb-xl", "HR"))[
            number % 4
        ]
        x = signal(number, 2600 + 433 * (number % 29))
        if number % 19 == 3:
            x[number % 12, 7] = -32768  # not measured
        rate = RATES[number // 4 % 4] if number % 7 == 0 else "500"
        gain = (
            "488.3(-3)/mV"
            if number % 5 == 1
            else "20(0)/mV"
            if number % 31 == 9
            else "1000.0(0)/mV"
        )
        place = root / "archive" / "training" / folder / f"g{number // 40 + 1}"
        write_challenge(place, f"{letter}{number:05d}", x, fs=rate, form=f"16x1+24 {gain} 16 0")
    rows = "".join(f"{number},{number // 12}.0,50,0,{{}},\n" for number in range(3, 120, 4))
    (root / "archive" / "ptbxl_database.csv").write_text(
        f"ecg_id,patient_id,age,sex,scp_codes,heart_axis\n{rows}"
    )
    return shard(open_sources(str(root / "archive")), ShardOptions(str(root / "out"), quiet=True))


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_bytes_and_rows_never_change(made):
    assert len(made) == 217
    assert [one["sha256"][:16] for one in made.meta["shards"]] == ["fd89b7b087c0cbf7"]
    rows = made.table().to_pylist()
    sums = [[row["waveform"], row["crc32c"]] for row in rows]
    assert digest(json.dumps(sums)) == "ae4ccf115c10f38a"
    assert digest(json.dumps([row["offset"] for row in rows])) == "2e6da599c9befc0c"
    columns = (
        "source",
        "record",
        "patient",
        "start_s",
        "halves",
        "missing_leads",
        "flags",
        "dx",
        "labels",
        "fs_source_hz",
    )
    assert (
        digest(json.dumps([[row[name] for name in columns] for row in rows])) == "a6303553ca62aea1"
    )
    assert digest(Path(made.root.url, "rejects.csv").read_text()) == "2d77454e568a01da"


@pytest.mark.parametrize(
    ("plan", "seed", "everybody", "default"),
    [
        ("paper", 0, "3c3bd8cac7b5c5d8", "5c0b50971ea4b0ef"),
        ("paper", 5, "b15359ba9e51d4d8", "3a535c624a1e0c3f"),
        ("paper-split", 0, "de5f257911d25994", "285db338b80fc220"),
    ],
)
def test_roles_never_change(plan, seed, everybody, default, made):
    for sources, roles in (
        (RoleSources(pretrain=("all",), id_share=1.0), everybody),
        (RoleSources(), default),
    ):
        doubtful = flag_mask(made.table(["flags"]), [IMPLAUSIBLE])
        given = assign_roles(read_records(made.table), doubtful, plan, seed, sources)
        assert digest(json.dumps(given.to_pylist())) == roles


def test_the_hash_of_the_preprocessing_never_changes():
    """Datasets used together, and a model and its data, must have the same hash."""
    assert SPEC_HASH == "ab21e8fe59588e9ba351e16fcfe918f30b27e92a10aa96979cc29362c9c1f538"


def test_the_hash_behind_the_roles_never_changes():
    (one,) = keyed_uniform(["georgia/E00001"], "roles 0", 3).tolist()
    assert one == [0.2080226667060051, 0.272549073484993, 0.4958111328991003]
