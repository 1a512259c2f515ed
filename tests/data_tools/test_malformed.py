"""Malformed records that are known to have fooled readers are refused with a reason, or read as
intended.

All are in one archive with good records. Each is read alone, within a second and 200 MB, as part of
a Challenge archive and of a plain folder of WFDB records. Then the whole archive is made into a
dataset with the command that a user would type.
"""

import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import wfdb  # noqa: F401  (imported here, so that the first read through it is not timed with its import)
from handmade import crops_of, ecg, everything_in, header, mat, rejected
from malformed import NAMES, ORPHANS, READ, REFUSED, SECRET, Made

from omnilead.data_tools.__main__ import main
from omnilead.data_tools.build import ShardOptions, shard
from omnilead.data_tools.dataset import CROP_SHAPE, Dataset
from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.prepare import crop_count, prepare_crop
from omnilead.data_tools.record import LEADS, EcgRecord
from omnilead.data_tools.sources.base import Source
from omnilead.data_tools.sources.physionet2021 import PhysioNet2021
from omnilead.data_tools.sources.wfdb_folder import WfdbFolder
from omnilead.data_tools.storage import folder
from omnilead.data_tools.verify import verify

SLOWEST_S, LARGEST_BYTES = 1.0, 200e6
PLACE = "training/georgia/g1"


@pytest.fixture(scope="module")
def traced() -> Iterator[None]:
    """Once for all: Python 3.11's tracemalloc.stop() may crash the process if another thread takes
    memory just then."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture(scope="module")
def written(traced: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Made]]:
    root = tmp_path_factory.mktemp("malformed") / "archive"
    place = root / PLACE
    place.mkdir(parents=True)
    cases: dict[str, Made] = {}
    for number, (case, (change, *_)) in enumerate((REFUSED | READ | ORPHANS).items()):
        x = ecg(seed=number)
        name = NAMES[case]
        made = cases[case] = Made(place, name, x, header(name, x), mat(x))
        change(made)
        made.write()
    (place / os.fsdecode(b"E\xff.hea")).write_text(header("E", ecg()))  # a name that is no UTF-8
    (place / os.fsdecode(b"O\xff.mat")).write_bytes(mat(ecg()))
    return root, cases


def read_all(source: Source, key: str) -> tuple[EcgRecord, list[np.ndarray], list[tuple[str, ...]]]:
    """The record, its crops and their missing leads, as plan and build read them."""
    plan = source.header(key)
    if not crop_count(plan.samples, plan.fs_hz):
        raise ReadError("too short")
    record = source.read(key)
    crops = [np.empty(CROP_SHAPE, "<i2") for _ in range(crop_count(plan.samples, plan.fs_hz))]
    return (
        record,
        crops,
        [prepare_crop(record, index, crop).missing for index, crop in enumerate(crops)],
    )


def bounded(
    source: Source, key: str
) -> tuple[EcgRecord, list[np.ndarray], list[tuple[str, ...]]] | str:
    """What comes of a record, or the reason of its refusal, in bounded time and memory."""
    tracemalloc.reset_peak()
    before, started = tracemalloc.get_traced_memory()[0], time.process_time()
    try:
        return read_all(source, key)
    except ReadError as error:
        return error.reason
    finally:
        took, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
        assert took < SLOWEST_S
        assert peak - before < LARGEST_BYTES


def same(crops: list[np.ndarray], x: np.ndarray, missing: tuple[str, ...] = ()) -> None:
    """Crops of 10 s; a last one of 5 s if as much is left."""
    parts = [x[:, start : start + 5000] for start in range(0, x.shape[1], 5000)]
    parts = [
        part if part.shape[1] == 5000 else part[:, :2500] for part in parts if part.shape[1] >= 2500
    ]
    assert len(crops) == len(parts)
    for crop, part in zip(crops, parts, strict=True):
        meant = np.pad(part, ((0, 12 - len(part)), (0, 5000 - part.shape[1])))
        meant[[LEADS.index(lead) for lead in missing]] = 0
        np.testing.assert_array_equal(crop, meant)


@pytest.mark.parametrize("case", REFUSED | ORPHANS)
def test_malformed_records_are_refused_with_their_reason(
    written: tuple[Path, dict[str, Made]], case: str
) -> None:
    """Of the Challenge's archive; a plain folder has another reason, or reads it by the names of
    its leads."""
    root, cases = written
    _, reason, *other = (REFUSED | ORPHANS)[case]
    key = f"{PLACE}/{NAMES[case]}.{'mat' if case in ORPHANS else 'hea'}"
    assert str(bounded(PhysioNet2021(folder(root)), key)).startswith(reason)
    if case in ORPHANS:
        return
    found = bounded(WfdbFolder(folder(root)), key)
    if other and isinstance(other[0], tuple):
        assert not isinstance(found, str)
        assert set(found[2]) == {other[0]}
        same(found[1], cases[case].x, other[0])
    else:
        assert str(found).startswith(str(other[0]) if other else reason)


@pytest.mark.parametrize("kind", [PhysioNet2021, WfdbFolder])
@pytest.mark.parametrize("case", READ)
def test_unusual_records_are_read_correctly(
    written: tuple[Path, dict[str, Made]], case: str, kind: type[Source]
) -> None:
    root, cases = written
    found = bounded(kind(folder(root)), f"{PLACE}/{NAMES[case]}.hea")
    assert not isinstance(found, str), found
    record, crops, missing = found
    _, absent, reasons, dx = READ[case]
    assert set(missing) == {absent}
    assert {reason for reason, _ in record.warnings} == reasons - {"lead not measured", "flat lead"}
    assert record.dx == dx
    same(crops, cases[case].x)


@pytest.fixture(scope="module")
def dataset(
    written: tuple[Path, dict[str, Made]], tmp_path_factory: pytest.TempPathFactory
) -> Dataset:
    out = tmp_path_factory.mktemp("malformed") / "dataset"
    assert main(["shard", str(written[0]), "--out", str(out), "--workers", "1"]) == 0
    return Dataset.open(str(out))


def test_the_archive_becomes_a_dataset_of_its_good_records(
    dataset: Dataset, written: tuple[Path, dict[str, Made]]
) -> None:
    crops, (_, cases) = crops_of(dataset), written
    assert set(crops) == {("georgia", NAMES[case]) for case in READ}
    for case, (_, missing, _, dx) in READ.items():
        rows = crops["georgia", NAMES[case]]
        same([row["x"] for row in rows], cases[case].x)  # type: ignore[misc]
        assert {tuple(row["missing_leads"]) for row in rows} == {missing}  # type: ignore[arg-type]
        assert {tuple(row["dx"]) for row in rows} == {dx}  # type: ignore[arg-type]


def test_rejects_csv_names_each_bad_record_and_no_good_one(dataset: Dataset) -> None:
    lines: dict[str, list[str]] = {}
    for record, reason in rejected(dataset):
        lines.setdefault(record, []).append(reason)
    assert lines.pop("E_") == lines.pop("O_") == ["file name"]
    for case, (_, reason, *_) in (REFUSED | ORPHANS).items():
        (line,) = lines.pop(NAMES[case])
        assert line.startswith(reason), case
    assert {name: set(reasons) for name, reasons in lines.items()} == {
        NAMES[case]: reasons for case, (_, _, reasons, _) in READ.items() if reasons
    }
    (source,) = dataset.meta["sources"]
    refused = len(REFUSED) + len(ORPHANS) + 2
    assert source["records"] == {"seen": len(READ) + refused, "used": len(READ), "refused": refused}


def test_no_file_of_the_dataset_holds_free_text(dataset: Dataset) -> None:
    everything = everything_in(dataset)
    assert NAMES["a secret for a code"].encode() in everything
    for word in SECRET.split():
        assert len(word) < 4 or word.encode() not in everything


def test_the_dataset_verifies_and_strict_makes_refused_records_an_error(
    dataset: Dataset, written: tuple[Path, dict[str, Made]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", dataset.root.url, "--archive", str(written[0]), "--workers", "1"]) == 0
    command = ["shard", str(written[0]), "--out", dataset.root.url, "--workers", "1"]
    assert main([*command, "--strict"]) == 2
    assert f"{len(REFUSED) + len(ORPHANS) + 2} records were refused" in capsys.readouterr().err
    assert main(command) == 0


class Floats(Source):
    """A user's source in float millivolts, with typical mistakes."""

    name = "own"
    wrong: dict[str, tuple[dict[str, object], str]] = {  # noqa: RUF012
        "huge": ({"at": (2, 7, 1e308)}, "saturated"),
        "nan": ({"at": (8, 4999, np.nan)}, "lead not measured"),
        "inf": ({"at": (8, 0, -np.inf)}, "lead not measured"),
        "all-nan": ({"signal": np.full((12, 5000), np.nan)}, "no valid lead"),
        "transposed": ({"signal": ecg().T / 1000}, "signal shape"),
        "one-lead": ({"signal": ecg()[0] / 1000}, "signal shape"),
        "text": ({"signal": np.full((12, 5000), "1.0")}, "signal shape"),
        "complex": ({"signal": ecg() * 1j}, "signal shape"),
        "eleven-gains": ({"gain": (1.0,) * 11}, "gain"),
        "gain-0": ({"gain": 0.0}, "gain"),
        "gain-nan": ({"gain": (*(1.0,) * 11, np.nan)}, "gain"),
        "gain-text": ({"gain": ("1.0 mV",) * 12}, "unreadable record"),
        "gain-none": ({"gain": None, "signal": ecg()}, "unreadable record"),
        "unit": ({"unit": "kV"}, "unknown unit"),
        "rate": ({"fs_hz": float("nan")}, "sampling rate"),
        "patient": ({"patient": 17}, "record field"),
        "dx": ({"dx": (426783006,)}, "record field"),
        "age": ({"age": "78"}, "record field"),
        "numpys-age": ({"age": np.int64(78)}, "record field"),  # JSON cannot write it
        "short": ({"signal": ecg(2499) / 1000}, "too short"),
        "empty": ({"signal": np.empty((12, 0))}, "too short"),
        "raises": ({"leads": None}, "unreadable record"),
    }

    def keys(self):  # type: ignore[no-untyped-def]
        return iter(["good", *self.wrong])

    def read(self, key: str) -> EcgRecord:
        plain = {
            "signal": ecg() / 1000.0,
            "fs_hz": 500.0,
            "leads": LEADS,
            "source": "own",
            "age": 64.3,
        }
        facts = plain | self.wrong.get(key, ({}, ""))[0]
        if "at" in facts:
            lead, sample, value = facts.pop("at")  # type: ignore[misc]
            facts["signal"][lead, sample] = value  # type: ignore[index]
        return EcgRecord(key, **facts)  # type: ignore[arg-type]


def test_mistakes_of_a_user_source_are_refused_or_flagged(tmp_path: Path) -> None:
    made = shard([Floats(folder(tmp_path))], ShardOptions(str(tmp_path / "out"), quiet=True))
    assert verify(made, [Floats(folder(tmp_path))]) == []
    reasons = [(key, reason) for key, (_, reason) in Floats.wrong.items()]
    assert sorted(rejected(made)) == sorted([*reasons, ("huge", "large"), ("huge", "einthoven")])
    crops = {name: rows[0] for (_, name), rows in crops_of(made).items()}
    assert set(crops) == {"good", "huge", "nan", "inf"}
    np.testing.assert_array_equal(crops["good"]["x"], ecg())
    for name in ("nan", "inf"):
        assert crops[name]["missing_leads"] == ["V3"]
        same([crops[name]["x"]], ecg(), ("V3",))  # type: ignore[list-item]
    spike = ecg()
    spike[2, 7] = 32767
    np.testing.assert_array_equal(crops["huge"]["x"], spike)
