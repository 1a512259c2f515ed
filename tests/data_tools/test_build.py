"""A dataset as a whole: its bytes, its readers (ours, tarfile, webdataset, DALI, zarr), and how it is extended."""

import csv
import errno
import hashlib
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
import zarr
from handmade import ecg, write_challenge

from data_tools.__main__ import main
from data_tools.build import ShardOptions, shard
from data_tools.dataset import COLUMNS, CROP_BYTES, CROP_SHAPE, SAMPLES, Dataset, fingerprint
from data_tools.errors import DataError, DatasetError, StorageError
from data_tools.plan import make_plan, permutation
from data_tools.record import class_row
from data_tools.sources import open_sources
from data_tools.splits import RoleSources
from data_tools.storage import LocalFolder
from data_tools.synth import synthesise
from data_tools.tar import member_header
from data_tools.verify import verify


def digests(root: Path) -> dict[str, str]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def build(archive: Path, out: Path, **changes: object) -> Dataset:
    return shard(open_sources(str(archive)), ShardOptions(str(out), quiet=True, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 3, 97, 1024, 10_007])
def test_the_order_is_a_permutation_that_a_seed_decides(count: int) -> None:
    order = permutation(count, 5)
    assert sorted(order.tolist()) == list(range(count))
    np.testing.assert_array_equal(order, permutation(count, 5))
    if count > 3:
        assert (order != permutation(count, 6)).any()
        assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 4 / np.sqrt(count)


def test_the_order_is_the_same_for_ever() -> None:
    """Datasets built by any version with one seed are one dataset: these numbers may not change."""
    assert permutation(10, 0).tolist() == [0, 3, 5, 7, 9, 6, 2, 8, 1, 4]


def test_directory_and_dataset_json(dataset: Dataset) -> None:
    root = Path(dataset.root.url)
    assert {path.name for path in root.iterdir()} == {"dataset.json", "samples.parquet", "rejects.csv", "shards", "store.zarr"}
    meta = json.loads((root / "dataset.json").read_text())
    assert meta["format_version"] == 1
    assert (meta["fs_hz"], meta["uv_per_lsb"], meta["crop_samples"]) == (500, 1.0, 5000)
    assert meta["leads"] == ["I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6"]
    for entry in meta["shards"]:
        path = root / "shards" / entry["name"]
        assert path.stat().st_size == entry["bytes"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
    assert sum(entry["crops"] for entry in meta["shards"]) == meta["crops"] == len(dataset)
    assert all(s["records"]["seen"] == s["records"]["used"] + s["records"]["refused"] for s in meta["sources"])
    assert meta["fingerprint"] == fingerprint(meta)
    assert dataset.table().schema.names == COLUMNS.names


def test_rows_say_what_the_headers_say(archive: Path, dataset: Dataset) -> None:
    rows = {(r["source"], r["record"], r["start_s"]): r for r in dataset.table().to_pylist()}
    for source in open_sources(str(archive)):
        for key in list(source.keys())[::7]:
            record = source.read(key)
            row = rows[(record.source, record.name, 0.0)]
            assert (row["age"], row["sex"], row["patient"]) == (record.age, record.sex, record.patient)
            assert tuple(row["dx"]) == record.dx
            assert row["labels"] == class_row(record.dx)
            assert row["fs_source_hz"] == record.fs_hz


def test_webdataset_reads_the_tars(dataset: Dataset) -> None:
    rows = dataset.table().to_pylist()
    urls = [f"{dataset.root.url}/shards/{entry['name']}" for entry in dataset.shards]
    stream = webdataset.WebDataset(urls, shardshuffle=False)
    for number, sample in enumerate(stream):
        row = rows[number]
        np.testing.assert_array_equal(np.frombuffer(sample["ecg"], "<i2").reshape(CROP_SHAPE), dataset.read(number))
        told = json.loads(sample["json"])
        assert (told["source"], told["record"], told["start_s"]) == (row["source"], row["record"], row["start_s"])
    assert number + 1 == len(dataset)


def test_tarfile_and_the_index_agree_on_every_address(dataset: Dataset) -> None:
    for entry in dataset.shards:
        path = Path(dataset.root.url, "shards", entry["name"])
        with tarfile.open(path) as tar:
            members = [(m.name, m.offset_data, m.size) for m in tar]
            assert all(m.isreg() and m.mtime == 0 for m in tar.getmembers())
        head, *lines = path.with_suffix(".idx").read_text().splitlines()
        words = [line.split() for line in lines]
        assert head == f"v1.2 {len(lines)}" and {(line[0], line[4], len(line)) for line in words} == {("ecg", "json", 8)}
        assert [(name, int(at), int(size)) for line in words for at, size, name in (line[1:4], line[5:])] == members
        assert {size for name, _, size in members if name.endswith(".ecg")} == {CROP_BYTES}


def test_dali_reads_the_tars(dataset: Dataset) -> None:
    dali = pytest.importorskip("nvidia.dali", reason="the extra cu13 or cu12 is not installed")
    types = dali.types
    shards = [f"{dataset.root.url}/shards/{entry['name']}" for entry in dataset.shards]

    @dali.pipeline_def(batch_size=16, num_threads=1, device_id=None)
    def reader():  # type: ignore[no-untyped-def]
        return dali.fn.readers.webdataset(
            paths=shards,
            index_paths=[path.removesuffix("tar") + "idx" for path in shards],
            ext=["ecg"],
            dtypes=[types.INT16],
            missing_component_behavior="error",
        )

    pipeline = reader()
    pipeline.build()
    for batch in range(3):
        (crops,) = pipeline.run()
        for i in range(16):
            np.testing.assert_array_equal(np.array(crops.at(i)).reshape(CROP_SHAPE), dataset.read(16 * batch + i))


def test_zarr_holds_the_same_crops_and_numpy_slices_them(dataset: Dataset) -> None:
    store = zarr.open_array(f"{dataset.root.url}/store.zarr", mode="r")
    assert store.shape == (len(dataset), *CROP_SHAPE)
    for row in range(0, len(dataset), 17):
        np.testing.assert_array_equal(store[row], dataset.read(row))


def test_a_dataset_of_zarr_alone_reads_the_same(archive: Path, dataset: Dataset, tmp_path: Path) -> None:
    lone = build(archive, tmp_path / "z", format="zarr")
    assert not (tmp_path / "z" / "shards").exists()
    assert lone.shards == []
    for row in (0, 1, len(lone) - 1):
        np.testing.assert_array_equal(lone.read(row), dataset.read(row))


def test_same_input_same_bytes_and_another_seed_another_order(archive: Path, tmp_path: Path) -> None:
    one, two = build(archive, tmp_path / "a"), build(archive, tmp_path / "b", workers=2)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert one.fingerprint == two.fingerprint
    other = build(archive, tmp_path / "c", seed=1)
    assert other.fingerprint != one.fingerprint
    crops = [sorted(d.column("waveform").tolist()) for d in (one, other)]
    assert crops[0] == crops[1]


def test_run_again_finds_it_finished_and_refuses_other_settings(archive: Path, tmp_path: Path) -> None:
    first = build(archive, tmp_path / "d")
    before = digests(tmp_path / "d")
    assert build(archive, tmp_path / "d").fingerprint == first.fingerprint
    assert digests(tmp_path / "d") == before
    for changes in ({"seed": 1}, {"plan": "all"}, {"format": "both"}, {"pseudonym_key": b"k" * 32}):
        with pytest.raises(DatasetError, match="choose another --out"):
            build(archive, tmp_path / "d", **changes)
    assert digests(tmp_path / "d") == before


def test_several_archives_make_one_dataset(tmp_path: Path) -> None:
    synthesise(tmp_path / "a", patients=8, sessions=2, seed=1, progress=False)
    synthesise(tmp_path / "b", patients=6, sessions=2, seed=2, layout="ptbxl", progress=False)
    sources = open_sources(str(tmp_path / "a")) + open_sources(str(tmp_path / "b"))
    joint = shard(sources, ShardOptions(str(tmp_path / "d"), quiet=True))
    with open(tmp_path / "d" / "rejects.csv") as file:
        again = [row for row in csv.DictReader(file) if row["reason"] == "record read already"]
    assert len(again) == 12  # the second archive's HR00001 to HR00012: the first came first
    assert len({(r["source"], r["record"]) for r in joint.table().to_pylist()}) == 24


def told(dataset: Dataset) -> tuple[list[str], dict[str, int]]:
    """The paths of the refused records in rejects.csv, one for each; and what dataset.json says of them."""
    used = {(row["source"], row["record"]) for row in dataset.table(["source", "record"]).to_pylist()}
    details = {(source, name): detail for source, name, _, detail in dataset.rejects() if (source, name) not in used}
    return sorted(detail.split(":")[0] for detail in details.values()), dataset.meta["sources"][0]["records"]


@pytest.mark.parametrize("layout", ["folders", "training/georgia"])
def test_every_refused_record_has_its_row_and_its_path(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused while planning, or while reading, or because another has its name; in two archives alike."""
    src = tmp_path / "src" / layout
    for number in range(5):
        (src / f"g{number}").mkdir(parents=True)
        (src / f"g{number}" / "rec_1.hea").write_text("")
    for number in range(3):
        write_challenge(src / "h", f"rec_{number + 1}", ecg(6000, number) * (number != 2))
    command = ["shard", str(tmp_path / "src"), str(tmp_path / "src"), "--workers", "1", "--out"]
    assert main([*command, str(tmp_path / "out")]) == 0
    words = capsys.readouterr().out
    paths, counts = told(made := Dataset.open(str(tmp_path / "out")))
    under = f"{layout}/"
    headers = [f"{under}g{number}/rec_1.hea" for number in range(5)]
    doubles = [f"{under}h/rec_{number}.hea" for number in (1, 2, 3)]
    assert paths == sorted([*headers, *headers, *doubles, doubles[2]])
    assert counts == {"seen": 16, "used": 2, "refused": len(paths)} and f"\n{len(paths)} records refused" in words
    again = shard(open_sources(str(tmp_path / "src")), ShardOptions(str(tmp_path / "key"), pseudonym_key=b"k" * 32, quiet=True))
    assert told(again)[1] == {"seen": 8, "used": 2, "refused": 6} and len(told(again)[0]) == 6
    write_challenge(src / "h", "rec_4", ecg(6000, 4))
    grown = shard(open_sources(str(tmp_path / "src")), ShardOptions(str(tmp_path / "more"), extend=made.root.url, quiet=True))
    assert told(grown)[1] == {"seen": 17, "used": 3, "refused": 14} and len(told(grown)[0]) == 14


def test_extending_keeps_the_shards_and_the_roles(tmp_path: Path) -> None:
    synthesise(tmp_path / "all", patients=10, sessions=2, seed=1, progress=False)
    old, new = tmp_path / "old" / "training", tmp_path / "new" / "training"
    for place in (old, new):
        place.mkdir(parents=True)
    for name in ("cpsc_2018", "ptb-xl", "ningbo", "georgia", "chapman_shaoxing", "cpsc_2018_extra"):
        if (tmp_path / "all" / "training" / name).exists():
            (tmp_path / "all" / "training" / name).rename((new if name in ("ningbo", "chapman_shaoxing") else old) / name)
    (tmp_path / "all" / "ptbxl_database.csv").rename(tmp_path / "old" / "ptbxl_database.csv")
    base = build(tmp_path / "old", tmp_path / "base")
    joint = build(tmp_path / "new", tmp_path / "joint", extend=str(tmp_path / "base"))
    assert joint.shards[: len(base.shards)] == base.shards
    assert len(joint) == len(base) + sum(
        s["crops"] for s in joint.meta["sources"] if s["name"] in ("ningbo", "chapman_shaoxing")
    )
    before, after = base.table().to_pylist(), joint.table().to_pylist()[: len(base)]
    assert before == after
    assert joint.read(len(base)).any()
    with pytest.raises(Exception, match="no usable record"):  # nothing new in it
        build(tmp_path / "old", tmp_path / "nothing", extend=str(tmp_path / "joint"))
    shard_file = tmp_path / "base" / "shards" / base.shards[0]["name"]
    damaged = bytearray(shard_file.read_bytes())
    damaged[5000] ^= 1
    shard_file.unlink()  # a hard link is shared with `joint`
    shard_file.write_bytes(damaged)
    with pytest.raises(DatasetError, match="sha256"):
        build(tmp_path / "new", tmp_path / "refused", extend=str(tmp_path / "base"))


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_an_archive_that_grew_is_counted_once(tmp_path: Path, key: bytes | None) -> None:
    """Read twice, or extended by what it holds now: the same seconds are dropped, the same records refused."""
    place = tmp_path / "src" / "training" / "georgia" / "g1"
    for number in range(6):
        write_challenge(place, f"E{number}", ecg(6000, number))
    write_challenge(place, "E6", ecg(2000))
    write_challenge(place, "E7", ecg(5000) * 0)
    base = build(tmp_path / "src", tmp_path / "base", pseudonym_key=key)
    src = open_sources(str(tmp_path / "src"))
    twice = shard([*src, *src], ShardOptions(str(tmp_path / "twice"), pseudonym_key=key, quiet=True)).meta["sources"][0]
    assert base.meta["sources"][0] == twice | {"records": {"seen": 8, "used": 6, "refused": 2}}
    assert (twice["records"], twice["dropped_s"]) == ({"seen": 16, "used": 6, "refused": 10}, 12.0)
    write_challenge(place, "E6", ecg(6000, 6))  # too short no more
    write_challenge(place, "E8", ecg(6000, 8))
    whole = build(tmp_path / "src", tmp_path / "whole", pseudonym_key=key)
    grown = build(tmp_path / "src", tmp_path / "grown", pseudonym_key=key, extend=base.root.url)
    assert grown.meta["sources"] == whole.meta["sources"]
    assert "record read already" not in Path(grown.root.url, "rejects.csv").read_text()
    assert verify(grown, src, key=key) == []


def test_pseudonyms_are_stable_and_need_their_key_to_extend(archive: Path, tmp_path: Path) -> None:
    key = b"0123456789abcdef0123456789abcdef"
    hidden = build(archive, tmp_path / "h", pseudonym_key=key)
    plain = {row["record"] for row in build(archive, tmp_path / "p").table(["record"]).to_pylist()}
    names = {row["record"] for row in hidden.table(["record"]).to_pylist()}
    assert len(names) == len(plain)
    assert not names & plain
    assert {row["record"] for row in build(archive, tmp_path / "h2", pseudonym_key=key).table(["record"]).to_pylist()} == names
    with pytest.raises(DatasetError, match="pseudonyms"):
        build(archive, tmp_path / "e", extend=str(tmp_path / "h"))


def test_roles_can_be_selected(dataset: Dataset) -> None:
    gallery, probe = dataset.select(identity="gallery"), dataset.select(identity="probe")
    patients = np.array(dataset.table(["patient"])["patient"].to_pylist(), dtype=object)
    assert sorted(patients[gallery]) == sorted(patients[probe])
    assert len(gallery) == 60
    assert not np.isin(gallery, dataset.select(pretrain=True)).any()
    assert len(dataset.select(dx="train")) == dataset.meta["roles"]["dx"]["train"]


def test_crops_of_multi_crop_records_are_spread_over_the_plan(archive: Path) -> None:
    plan = make_plan(open_sources(str(archive)), 0)
    assert len(plan.order) == plan.first_crop[-1] > len(plan.keys)
    crops, identity, seen = plan.shard(0)
    assert len({(label, part) for _, _, label, part in crops}) == len(crops)
    assert (identity, seen) == make_plan(open_sources(str(archive)), 0).shard(0)[1:]
    assert identity != make_plan(open_sources(str(archive)), 1).shard(0).identity


def test_a_dataset_is_what_is_in_it_not_where_or_when(archive: Path, dataset: Dataset, tmp_path: Path) -> None:
    """A copy of the archive with other times gives the same dataset; another table of patients does not."""
    copy = tmp_path / "copy"
    shutil.copytree(archive, copy, copy_function=shutil.copyfile)
    same = {"format": "both", "role_sources": RoleSources.from_meta(dataset.meta)}
    again = build(copy, tmp_path / "again", **same)
    assert digests(tmp_path / "again") == digests(Path(dataset.root.url))
    assert build(archive, tmp_path / "again", **same).fingerprint == again.fingerprint
    copy = copy.rename(tmp_path / "corrected")  # tables are read once a process
    table = copy / "ptbxl_database.csv"
    table.write_text(table.read_text().replace("\n2,", "\n90002,"))
    with pytest.raises(DatasetError, match="of other input or settings: choose another --out"):
        build(copy, tmp_path / "again", **same)


def test_somebodys_folder_is_left_alone(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "shards").write_text("precious")
    with pytest.raises(DataError, match="not empty"):
        build(archive, tmp_path / "mine", format="zarr")
    assert (tmp_path / "mine" / "shards").read_text() == "precious"


def test_what_a_killed_run_of_other_settings_left_is_cleared_and_nothing_else(archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".build").mkdir(parents=True)
    (out / "shards").mkdir()
    (out / "store.zarr").mkdir()
    left = ("shards/00009.tar", "shards/00009.idx", "store.zarr/zarr.json")
    for name in (*left, "shards/notes.txt"):
        (out / name).write_text("of another run")
    made = build(archive, out)
    assert not any((out / name).exists() for name in left) and not (out / "store.zarr").exists()
    assert (out / "shards" / "notes.txt").exists() and len(made.shards) == len(list((out / "shards").glob("*.tar")))


def test_an_archive_without_a_usable_crop_is_one_line(tmp_path: Path) -> None:
    write_challenge(tmp_path / "a" / "training" / "georgia" / "g1", "E1", np.zeros((12, 5000), np.int16))
    with pytest.raises(StorageError, match=r"no usable crop in any record \(no valid lead\): nothing to write"):
        build(tmp_path / "a", tmp_path / "out")


def test_tables_that_cannot_be_written_are_one_line(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = LocalFolder.write

    def full(self: LocalFolder, name: str, data: bytes) -> None:
        if name == SAMPLES:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, data)

    monkeypatch.setattr(LocalFolder, "write", full)
    with pytest.raises(StorageError, match=r"writing the tables in .*/out: No space left on device"):
        build(archive, tmp_path / "out")
    monkeypatch.undo()
    assert len(build(archive, tmp_path / "out"))


@pytest.mark.parametrize(("name", "size", "fits"), [("n" * 99, 8**11 - 1, True), ("n" * 100, 0, False), ("n", 8**11, False)])
def test_a_tar_header_says_what_it_can_or_nothing(name: str, size: int, fits: bool) -> None:
    if fits:
        member = tarfile.TarInfo.frombuf(member_header(name, size), "ascii", "strict")
        assert (member.name, member.size, member.mode, member.mtime) == (name, size, 0o644, 0)
    else:
        with pytest.raises(ValueError, match="cannot be"):
            member_header(name, size)


def test_the_real_ecgs_are_read_to_the_last_bit(real_ecgs: Path, tmp_path: Path) -> None:
    import scipy.io

    real = build(real_ecgs, tmp_path / "real", workers=2)
    assert {s["name"]: s["records"]["used"] for s in real.meta["sources"]} == {
        "chapman_shaoxing": 300,
        "cpsc_2018": 112,
        "cpsc_2018_extra": 29,
        "georgia": 58,
        "ningbo": 55,
        "ptb-xl": 309,
    }
    rows = real.table().to_pylist()
    for number, row in enumerate(rows):
        if row["source"] == "chapman_shaoxing" and row["start_s"] == 0 and number % 5 == 0:
            (path,) = (real_ecgs / "training" / "chapman_shaoxing").glob(f"g*/{row['record']}.mat")
            np.testing.assert_array_equal(real.read(number), scipy.io.loadmat(path)["val"][:, :5000])
    with open(real_ecgs / "RECORDS.csv") as file:
        told = {Path(line["path"]).name: line for line in csv.DictReader(file) if line["path"].startswith("training/")}
    for row in rows:
        if row["record"] in told and told[row["record"]]["dx_codes"]:
            assert set(row["dx"]) == set(told[row["record"]]["dx_codes"].split(";")), row["record"]
