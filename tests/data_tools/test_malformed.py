"""Malformed records that are known to have fooled readers are refused with a reason, or read as
intended.

All are in one archive with good records. Each is read alone, in bounded time and memory, as part of
a Challenge archive and of a plain folder of WFDB records. Then the whole archive is made into a
dataset with the command that a user would type.
"""

import os
import tracemalloc

import numpy as np
import pytest
import wfdb  # noqa: F401  (imported here, so that the first read through it does not count its import)
from handmade import (
    crops_of,
    ecg,
    everything_in,
    found_in,
    header,
    mat,
    rejected,
)
from malformed import NAMES, ORPHANS, READ, REFUSED, SECRET, Made

from omnilead.__main__ import main
from omnilead.data_tools.dataset import CROP_SHAPE, Dataset
from omnilead.data_tools.ecg.crops import crop_count, prepare_crop
from omnilead.data_tools.ecg.record import LEADS, EcgRecord
from omnilead.data_tools.io.errors import ReadError
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.base import Source
from omnilead.data_tools.sources.wfdb_archives import PhysioNet2021, WfdbFolder
from tests.waiting import bounded_work

LARGEST_BYTES = 200e6
PLACE = "training/georgia/g1"
BAD = REFUSED | ORPHANS


@pytest.fixture(scope="module")
def traced():
    """Once for all: Python 3.11's tracemalloc.stop() may crash the process if another thread takes
    memory just then."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture(scope="module")
def written(traced, tmp_path_factory):
    root = tmp_path_factory.mktemp("malformed") / "archive"
    place = root / PLACE
    place.mkdir(parents=True)
    cases = {}
    for seed, (case, name) in enumerate(NAMES.items()):
        made = cases[case] = Made(place, name, ecg(seed=seed))
        made.store(made.x)
        (READ | BAD)[case].change(made)
        made.write()
    (place / os.fsdecode(b"E\xff.hea")).write_text(header("E", ecg()))  # a name that is no UTF-8
    (place / os.fsdecode(b"O\xff.mat")).write_bytes(mat(ecg()))
    return root, cases


def read_all(source, key):
    """The record, its crops and their missing leads, as plan and build read them."""
    plan = source.header(key)
    count = crop_count(plan.samples, plan.fs_hz)
    if not count:
        raise ReadError("too short")
    record = source.read(key)
    crops = [np.empty(CROP_SHAPE, "<i2") for _ in range(count)]
    missing = {prepare_crop(record, index, crop).missing for index, crop in enumerate(crops)}
    return record, crops, missing


def bounded(source, key):
    """What comes of a record, or the reason of its refusal, in bounded time and memory."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        with bounded_work():
            return read_all(source, key)
    except ReadError as error:
        return error.reason
    finally:
        assert tracemalloc.get_traced_memory()[1] - before < LARGEST_BYTES


def same(crops, x, missing=()):
    """Crops of 10 s; a last one of 5 s if as much is left."""
    halves = x.shape[1] // 2500
    assert len(crops) == -(-halves // 2)
    meant = np.zeros((12, 5000 * len(crops)))
    meant[: len(x), : 2500 * halves] = x[:, : 2500 * halves]
    meant[[LEADS.index(lead) for lead in missing]] = 0
    np.testing.assert_array_equal(np.hstack(crops), meant)


@pytest.mark.parametrize("case", BAD)
def test_malformed_records_are_refused_with_their_reason(written, case):
    """Of the Challenge's archive; a plain folder has another reason, or reads it by the names of
    its leads."""
    root, cases = written
    _, reason, plain = BAD[case]
    key = f"{PLACE}/{NAMES[case]}.{'mat' if case in ORPHANS else 'hea'}"
    assert str(bounded(PhysioNet2021(folder(root)), key)).startswith(reason)
    if case in ORPHANS:
        return
    found = bounded(WfdbFolder(folder(root)), key)
    if isinstance(plain, tuple):
        _, crops, missing = found
        assert missing == {plain}
        same(crops, cases[case].x, plain)
    else:
        assert str(found).startswith(plain or reason)


@pytest.mark.parametrize("kind", [PhysioNet2021, WfdbFolder])
@pytest.mark.parametrize("case", READ)
def test_unusual_records_are_read_correctly(written, case, kind):
    root, cases = written
    record, crops, missing = bounded(kind(folder(root)), f"{PLACE}/{NAMES[case]}.hea")
    right = READ[case]
    assert missing == {right.missing}
    reasons = {reason for reason, _ in record.warnings}
    assert reasons == {*right.reasons} - {"lead not measured", "flat lead"}
    assert record.dx == right.dx
    same(crops, cases[case].x)


@pytest.fixture(scope="module")
def dataset(written, tmp_path_factory):
    out = tmp_path_factory.mktemp("malformed") / "dataset"
    assert main(["shard", str(written[0]), "--out", str(out), "--workers", "1"]) == 0
    return Dataset.open(str(out))


def test_the_archive_becomes_a_dataset_of_its_good_records(dataset, written):
    crops, (_, cases) = crops_of(dataset), written
    assert set(crops) == {("georgia", NAMES[case]) for case in READ}
    for case, right in READ.items():
        rows = crops["georgia", NAMES[case]]
        same([row["x"] for row in rows], cases[case].x)
        for row in rows:
            assert (tuple(row["missing_leads"]), tuple(row["dx"])) == (right.missing, right.dx)
    everything = everything_in(dataset)
    assert found_in(everything, [NAMES["a secret for a code"]])
    assert not found_in(everything, [word for word in SECRET.split() if len(word) > 4])


def test_rejects_csv_names_each_bad_record_and_no_good_one(dataset):
    lines = {}
    for record, reason in rejected(dataset):
        lines.setdefault(record, set()).add(reason)
    assert lines.pop("E_") == lines.pop("O_") == {"file name"}
    for case, bad in BAD.items():
        (line,) = lines.pop(NAMES[case])
        assert line.startswith(bad.reason), case
    flagged = {NAMES[case]: {*right.reasons} for case, right in READ.items() if right.reasons}
    assert lines == flagged
    (source,) = dataset.meta["sources"]
    refused = len(BAD) + 2
    assert source["records"] == {"seen": len(READ) + refused, "used": len(READ), "refused": refused}


def test_the_dataset_verifies_and_strict_makes_refused_records_an_error(dataset, written, shell):
    archive, out = written[0], dataset.root.url
    shell.verify(out, archive)
    said = shell.shard(archive, out, "--strict", code=2)
    assert f"{len(BAD) + 2} records were refused" in said
    shell.shard(archive, out)


MV = ecg() / 1000


def spiked(lead, sample, value):
    signal = MV.copy()
    signal[lead, sample] = value
    return {"signal": signal}


# Typical mistakes by what is said of them
MISTAKES = {
    "signal shape": [{"signal": x} for x in (MV.T, MV[0], MV.astype(str), MV * 1j)],
    "gain": [{"gain": gain} for gain in ((1.0,) * 11, 0.0, None, (*(1.0,) * 11, np.nan))],
    "unreadable record": [{"gain": ("1.0 mV",) * 12}, {"leads": None}],
    "unknown unit": [{"unit": "kV"}],
    "sampling rate": [{"fs_hz": np.nan}],
    "record field": [
        {"patient": 17},
        {"dx": (426783006,)},
        {"age": "78"},
        {"age": np.int64(78)},  # JSON cannot write it
    ],
    "too short": [{"signal": MV[:, :2499]}, {"signal": MV[:, :0]}],
    "no valid lead": [{"signal": MV * np.nan}],
    "lead not measured": [spiked(8, 4999, np.nan), spiked(8, 0, -np.inf)],
    "saturated": [spiked(2, 7, 1e308)],
    "good": [{}],
}


class Floats(Source):
    """A user's source in float millivolts."""

    name = "own"

    def keys(self):
        for reason, mistakes in MISTAKES.items():
            yield from (f"{reason.replace(' ', '_')}-{number}" for number in range(len(mistakes)))

    def read(self, key):
        reason, _, number = key.replace("_", " ").partition("-")
        right = {"signal": MV, "fs_hz": 500.0, "leads": LEADS, "source": "own", "age": 64.3}
        return EcgRecord(key, **right | MISTAKES[reason][int(number)])


def test_mistakes_of_a_user_source_are_refused_or_flagged(tmp_path):
    source = Floats(folder(tmp_path))
    made = shard([source], ShardOptions(str(tmp_path / "out"), quiet=True))
    assert verify(made, [source]) == []
    reasons = {(key, key.partition("-")[0].replace("_", " ")) for key in source.keys()}  # noqa: SIM118
    more = {("saturated-0", "large"), ("saturated-0", "einthoven")}
    assert {*rejected(made)} == (reasons | more) - {("good-0", "good")}
    crops = {name: rows[0] for (_, name), rows in crops_of(made).items()}
    spike = ecg()
    spike[2, 7] = 32767
    right = {"good-0": ecg(), "saturated-0": spike}
    for name, crop in crops.items():
        if name in right:
            np.testing.assert_array_equal(crop["x"], right.pop(name))
        else:
            assert crop["missing_leads"] == ["V3"]
            same([crop["x"]], ecg(), ("V3",))
    assert len(crops) == 4
    assert not right
