"""Whole datasets: their bytes, reading them (with data_tools, tarfile, webdataset, DALI, zarr), and
repeated builds."""

import csv
import errno
import fcntl
import json
import os
import shutil
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import webdataset
from handmade import build, ecg, files, write_challenge
from pyarrow import parquet

from omnilead.data_tools.dataset import COLUMNS, CROP_BYTES, CROP_SHAPE, Dataset
from omnilead.data_tools.ecg.record import LEADS
from omnilead.data_tools.io.errors import DataError, DatasetError, StorageError
from omnilead.data_tools.io.storage import LocalFolder, locked_by_another
from omnilead.data_tools.sharding import finishing, plan
from omnilead.data_tools.sharding import shard as building
from omnilead.data_tools.sharding.finishing import read_rejects
from omnilead.data_tools.sharding.plan import permutation
from omnilead.data_tools.sharding.shards import member_header
from omnilead.data_tools.sharding.verify import verify
from tests.forks import started

KEY = b"k" * 32


@pytest.mark.parametrize("count", [1, 2, 97, 10_007])
def test_the_order_is_a_permutation_that_depends_on_the_seed(count):
    order = permutation(count, 5)
    assert sorted(order.tolist()) == list(range(count))
    np.testing.assert_array_equal(order, permutation(count, 5))
    if count > 3:
        assert (order != permutation(count, 6)).any()
        assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 4 / np.sqrt(count)
    assert permutation(10, 0).tolist() == [0, 3, 5, 7, 9, 6, 2, 8, 1, 4]  # in every version


def shards(dataset):
    return [f"{dataset.root.url}/shards/{entry.name}" for entry in dataset.shards]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset's own
def test_webdataset_reads_the_tars(dataset):
    rows = dataset.table().to_pylist()
    samples = list(webdataset.WebDataset(shards(dataset), shardshuffle=False))
    for number, (sample, row) in enumerate(zip(samples, rows, strict=True)):
        crop = np.frombuffer(sample["ecg"], "<i2").reshape(CROP_SHAPE)
        np.testing.assert_array_equal(crop, dataset.read(number))
        facts = json.loads(sample["json"])
        assert all(facts[name] == row[name] for name in ("source", "record", "start_s"))


def test_tarfile_and_index_agree_on_every_offset(dataset):
    for path in shards(dataset):
        with tarfile.open(path) as tar:
            members = tar.getmembers()
        assert all(member.isreg() and member.mtime == 0 for member in members)
        expected = [f"v1.2 {len(members) // 2}"]
        for crop, text in zip(members[::2], members[1::2], strict=True):
            assert crop.size == CROP_BYTES
            line = f"ecg {crop.offset_data} {crop.size} {crop.name}"
            expected.append(f"{line} json {text.offset_data} {text.size} {text.name}")
        assert Path(path).with_suffix(".idx").read_text().splitlines() == expected


def test_dali_reads_the_tars(dataset):
    dali = pytest.importorskip("nvidia.dali", reason="the extra cu13 or cu12 is not installed")
    indexes = [path.removesuffix("tar") + "idx" for path in shards(dataset)]

    @dali.pipeline_def(batch_size=16, num_threads=1, device_id=None)
    def reader():
        how = {"dtypes": [dali.types.INT16], "missing_component_behavior": "error"}
        paths = {"paths": shards(dataset), "index_paths": indexes}
        return dali.fn.readers.webdataset(**paths, ext=["ecg"], **how)

    pipeline = reader()
    pipeline.build()
    for batch in range(3):
        (crops,) = pipeline.run()
        for i in range(16):
            crop = np.array(crops.at(i)).reshape(CROP_SHAPE)
            np.testing.assert_array_equal(crop, dataset.read(16 * batch + i))


def test_the_zarr_copy_has_the_same_bytes_as_zarr_python_writes(dataset, tmp_path):
    import zarr
    from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec

    blosc = BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=2)
    inner = (BytesCodec(endian="little"), blosc, Crc32cCodec())
    theirs = zarr.create_array(
        tmp_path / "store.zarr",
        shape=(len(dataset), *CROP_SHAPE),
        chunks=(1024, *CROP_SHAPE),
        dtype="int16",
        fill_value=0,
        serializer=ShardingCodec(chunk_shape=(1, *CROP_SHAPE), codecs=inner),
        compressors=None,
        filters=None,
        dimension_names=("crop", "lead", "sample"),
        attributes={
            "leads": list(LEADS),
            "unit": "uV",
            "fs_hz": 500,
            "roles": {"file": "samples.parquet", "columns": ["pretrain", "dx_role", "id_role"]},
        },
    )
    theirs[:] = np.stack([dataset.read(row) for row in range(len(dataset))])
    assert files(tmp_path / "store.zarr") == files(Path(dataset.root.url, "store.zarr"))


def test_a_dataset_may_have_only_a_zarr_copy(small, tmp_path):
    lone = build(small, tmp_path / "zarr", format="zarr")
    both = build(small, tmp_path / "both", format="both")
    assert not (tmp_path / "zarr" / "shards").exists() and lone.shards == []
    for row in range(-1, len(both)):
        np.testing.assert_array_equal(lone.read(row), both.read(row))


def test_same_input_gives_the_same_dataset_and_other_options_are_refused(small, tmp_path):
    """A copy of the archive with other times gives the same bytes; another table of patients does
    not."""
    first = build(small, tmp_path / "a", format="both")
    before = files(tmp_path / "a")
    shutil.copytree(small, tmp_path / "copy", copy_function=shutil.copyfile)
    build(tmp_path / "copy", tmp_path / "b", format="both")
    build(small, tmp_path / "a", format="both")
    for change in ({"format": "tar"}, {"pseudonym_key": KEY}, {"seed": 1}):
        with pytest.raises(DatasetError, match="choose another --out"):
            build(small, tmp_path / "a", **{"format": "both"} | change)
    assert files(tmp_path / "a") == files(tmp_path / "b") == before
    other = build(small, tmp_path / "c", seed=1)
    assert other.fingerprint != first.fingerprint
    assert sorted(other.column("waveform")) == sorted(first.column("waveform"))
    # Tables are read once per process and place
    copy = (tmp_path / "copy").rename(tmp_path / "corrected")
    table = copy / "ptbxl_database.csv"
    table.write_text(table.read_text().replace("\n2,", "\n90002,"))
    with pytest.raises(DatasetError, match="other input"):
        build(copy, tmp_path / "a", format="both")


@pytest.mark.parametrize("layout", ["folders", "training/georgia"])
def test_every_refused_record_has_its_row_and_its_path(layout, shell, tmp_path):
    """Refused while planning or while reading, or because another record has its name; in two
    archives alike."""
    src, out = tmp_path / "src", tmp_path / "out"
    headers = [f"{layout}/g{number}/rec_1.hea" for number in range(5)]
    for name in headers:
        (src / name).parent.mkdir(parents=True)
        (src / name).touch()
    for number in range(3):
        write_challenge(src / layout / "h", f"rec_{number + 1}", ecg(6000, number) * (number != 2))
    words, _ = shell.run("shard", src, src, "--workers", 1, "--out", out)
    made = Dataset.open(str(out))
    used = set(made.column("record"))
    refused = [detail for _, name, _, detail in read_rejects(made) if name not in used]
    doubles = [f"{layout}/h/rec_{number}.hea" for number in (1, 2, 3)]
    paths = sorted(detail.partition(":")[0] for detail in refused)
    assert paths == sorted([*headers, *headers, *doubles, doubles[2]])
    (source,) = made.meta["sources"]
    assert source["records"] == {"seen": 16, "used": 2, "refused": 14}
    assert source["dropped_s"] == 6.0
    assert "\n14 records refused" in words
    (source,) = build(src, tmp_path / "key", pseudonym_key=KEY).meta["sources"]
    assert source["records"] == {"seen": 8, "used": 2, "refused": 6}


def test_pseudonyms_depend_only_on_the_key(small, tmp_path):
    names = []
    for seed, key in enumerate((b"a" * 32, b"a" * 32, KEY, None)):
        made = build(small, tmp_path / str(seed), pseudonym_key=key, seed=seed)
        names.append(set(made.column("record")))
    assert names[0] == names[1] and len(names[0]) == len(names[3])
    assert not names[0] & (names[2] | names[3])


def test_a_folder_with_other_files_is_left_alone(small, tmp_path):
    (tmp_path / "shards").write_text("precious")
    with pytest.raises(DataError, match="not empty"):
        build(small, tmp_path, format="zarr")
    assert files(tmp_path) == {"shards": b"precious"}


def test_leftovers_of_a_killed_run_are_removed_and_nothing_else(small, tmp_path):
    out = tmp_path / "out"
    left = ("shards/00009.tar", "shards/00009.idx", "store.zarr/zarr.json", "store.zarr/c/9/0/0")
    for name in (*left, "shards/notes.txt", ".build/x"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("of another run")
    build(small, out)
    build(small, tmp_path / "fresh")
    assert files(out) == files(tmp_path / "fresh") | {"shards/notes.txt": b"of another run"}


def foreign_threads():
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def threads_left(*places):
    """Threads of C++ libraries that are alive when a build has failed: while Python shuts down,
    they could abort the process."""
    before = foreign_threads()
    try:
        build(*places)
    except StorageError as error:
        print(foreign_threads() - before, error)


def test_an_archive_without_a_usable_crop_is_one_line_and_leaves_no_thread(tmp_path):
    place = tmp_path / "a" / "training" / "georgia" / "g1"
    write_challenge(place, "E1", np.zeros((12, 5000), np.int16))
    started(threads_left, tmp_path / "a", tmp_path / "out", out=tmp_path / "log").join()
    why = "no valid lead (training/georgia/g1/E1.hea: at 0 s: 12 of 12 leads never change)"
    said = f"0 no record can be used: {why}; {tmp_path}/out/rejects.csv lists every refusal\n"
    assert (tmp_path / "log").read_text() == said


@pytest.mark.parametrize(
    ("options", "samples", "said"),
    [
        ({"leads": [f"X{i}" for i in range(12)]}, 5000, r"no known lead \(one\.hea: X0, X1, "),
        ({"form": "16x1+24 1000.0(0)/furlong 16 0"}, 5000, r"unknown unit \(one\.hea: 'furlong'\)"),
        (
            {"fs": "3"},
            5000,
            r"sampling rate \(one\.hea: 3: only a number from 50 to 2000 is read\)",
        ),
        ({}, 1500, r"too short \(one\.hea: 3\.00 s, 5 s are needed\)"),
    ],
)
def test_if_all_records_are_refused_the_error_says_why_and_they_are_listed(
    options, samples, said, tmp_path
):
    """The next run, with files that can be read, uses the same folder."""
    src, out = tmp_path / "src", tmp_path / "out"
    rejects = out / "rejects.csv"
    for name in ("one", "two"):
        write_challenge(src, name, ecg(samples), **options)
    with pytest.raises(StorageError, match=f"{said}.*; {rejects} lists every refusal"):
        build(src, out)
    _, one, two = csv.reader(rejects.read_text().splitlines())
    assert (one[1], two[1]) == ("one", "two") and one[2] in said
    # Refused for the header alone; then object storage has no folder .build
    if not (out / "shards").exists():
        shutil.rmtree(out / ".build")
    with pytest.raises(StorageError) as hidden:
        build(src, out, pseudonym_key=KEY)
    assert "one" not in str(hidden.value).replace(str(out), "")
    assert "one.hea" not in rejects.read_text()
    for name in ("one", "two"):
        write_challenge(src, name, ecg())
    assert build(src, out).meta["sources"][0]["records"] == {"seen": 2, "used": 2, "refused": 0}


def test_a_file_system_without_locks_is_used_with_a_note(small, tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    number = errno.EWOULDBLOCK
    with pytest.raises(StorageError, match="another run"):
        build(small, tmp_path)
    assert capsys.readouterr().err == ""
    number = errno.EACCES  # as some network file systems do
    build(small, tmp_path)
    note = f"note: {tmp_path}: its file system has no locks: never let two runs write there\n"
    assert capsys.readouterr().err == note


def first_ends_while_second(step, monkeypatch):
    """At this step of a second run a first one ends, and removes what only an unfinished dataset has."""
    ended = []

    def end(folder):
        if not ended:
            ended.append(True)
            shutil.rmtree(f"{folder}/.build")

    if step == "makes the folder":
        workdir = LocalFolder.workdir

        def makes(self):
            place = workdir(self)
            end(self.url)
            return place

        monkeypatch.setattr(LocalFolder, "workdir", makes)
    elif step == "locks it":

        def locks(file, place):
            end(place)
            return locked_by_another(file, place)

        monkeypatch.setattr(building, "locked_by_another", locks)
    elif step == "looks at it":
        exists = LocalFolder.exists
        monkeypatch.setattr(
            LocalFolder, "exists", lambda self, name: name != ".build" and exists(self, name)
        )
    else:
        remove = LocalFolder.remove

        def is_looked_at(self, name):
            remove(self, name)
            if name == ".build":
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), name)

        monkeypatch.setattr(LocalFolder, "remove", is_looked_at)


@pytest.mark.parametrize(
    "step", ["makes the folder", "locks it", "looks at it", "does so while it ends"]
)
def test_a_second_run_begins_when_the_first_ends(step, small, tmp_path, monkeypatch):
    (tmp_path / ".build" / "tmp").mkdir(parents=True)
    first_ends_while_second(step, monkeypatch)
    made = build(small, tmp_path)
    assert verify(made) == [] and not (tmp_path / ".build").exists()


def test_a_tar_header_fits_or_is_refused():
    member = tarfile.TarInfo.frombuf(member_header("n" * 99, 8**11 - 1), "ascii", "strict")
    assert (member.name, member.size, member.mode, member.mtime) == ("n" * 99, 8**11 - 1, 0o644, 0)
    for name, size in (("n" * 100, 0), ("n", 8**11)):
        with pytest.raises(ValueError):
            member_header(name, size)


def test_real_ecgs_are_read_bit_for_bit(real_ecgs, tmp_path):
    import scipy.io

    real = build(real_ecgs, tmp_path / "real")
    assert {source["name"]: source["records"]["used"] for source in real.meta["sources"]} == {
        "chapman_shaoxing": 300,
        "cpsc_2018": 112,
        "cpsc_2018_extra": 29,
        "georgia": 58,
        "ningbo": 55,
        "ptb-xl": 309,
    }
    with open(real_ecgs / "RECORDS.csv") as file:
        codes = {Path(row["path"]).name: row["dx_codes"] for row in csv.DictReader(file)}
    place = real_ecgs / "training" / "chapman_shaoxing"
    for number, row in enumerate(real.table().to_pylist()):
        if row["source"] == "chapman_shaoxing" and row["start_s"] == 0 and number % 5 == 0:
            (path,) = place.glob(f"g*/{row['record']}.mat")
            x = scipy.io.loadmat(path)["val"][:, :5000]
            np.testing.assert_array_equal(real.read(number), x)
        if codes.get(row["record"]):
            assert set(row["dx"]) == set(codes[row["record"]].split(";")), row["record"]


def test_shards_of_any_number_of_crops_hold_the_same_contents(small, tmp_path):
    whole, made = (build(small, tmp_path / f"{crops}", shard_crops=crops) for crops in (1024, 7))
    assert {shard.crops for shard in made.shards[:-1]} == {7} and len(made.shards) > 2
    assert made.meta["shard_crops"] == 7 and "shard_crops" not in whole.meta
    same = [name for name in COLUMNS.names if name not in ("shard", "offset")]
    assert made.table(same).equals(whole.table(same)) and verify(made) == []
    for row in range(len(made)):
        assert np.array_equal(made.read(row), whole.read(row))
    assert build(small, tmp_path / "1024").fingerprint == whole.fingerprint
    with pytest.raises(
        DatasetError, match=r"already finished \(made with --shard-crops 7\): choose"
    ):
        build(small, tmp_path / "7")
    with pytest.raises(DataError, match="--shard-crops 7: --format zarr writes no tar shards"):
        build(small, tmp_path / "zarr", shard_crops=7, format="zarr")


def test_row_groups_of_any_size_hold_the_same_rows(small, tmp_path, monkeypatch):
    """Neither the end of a shard nor that of a batch is a border for the other."""
    whole = build(small, tmp_path / "whole", format="both")
    monkeypatch.setattr(plan, "SHARD_CROPS", 4)
    monkeypatch.setattr(finishing, "ROW_GROUP_ROWS", 6)
    made = build(small, tmp_path / "made", format="both")
    groups = parquet.ParquetFile(f"{made.root.url}/samples.parquet")
    rows = [groups.metadata.row_group(i).num_rows for i in range(groups.num_row_groups)]
    assert len(made.shards) > 1 and set(rows[:-1]) == {6} and sum(rows) == len(made)
    kept = ["source", "record", "start_s", "waveform", "pretrain", "dx_role", "id_role"]
    assert made.table(kept).equals(whole.table(kept))
    assert verify(made) == []
