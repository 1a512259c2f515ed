"""Whole datasets: their bytes, reading them (with data_tools, tarfile, webdataset, DALI, zarr), and
repeated builds."""

import csv
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from handmade import build, ecg, files, write_challenge

from omnilead.data_tools.__main__ import main
from omnilead.data_tools.build import ShardOptions, shard
from omnilead.data_tools.dataset import COLUMNS, CROP_BYTES, CROP_SHAPE, Dataset
from omnilead.data_tools.errors import DataError, DatasetError, StorageError
from omnilead.data_tools.plan import make_plan, permutation
from omnilead.data_tools.sources import open_sources
from omnilead.data_tools.synthetic.archive import synthesise
from omnilead.data_tools.tar import member_header


@pytest.mark.parametrize("count", [1, 2, 97, 10_007])
def test_the_order_is_a_permutation_that_depends_on_the_seed(count: int) -> None:
    order = permutation(count, 5)
    assert sorted(order.tolist()) == list(range(count))
    np.testing.assert_array_equal(order, permutation(count, 5))
    if count > 3:
        assert (order != permutation(count, 6)).any()
        assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 4 / np.sqrt(count)
    assert permutation(10, 0).tolist() == [0, 3, 5, 7, 9, 6, 2, 8, 1, 4]  # in every version


def test_a_dataset_has_the_documented_files_and_dataset_json(dataset: Dataset) -> None:
    root = Path(dataset.root.url)
    assert {path.name for path in root.iterdir()} == {
        "dataset.json",
        "samples.parquet",
        "rejects.csv",
        "shards",
        "store.zarr",
    }
    meta = json.loads((root / "dataset.json").read_text())
    assert (meta["format_version"], meta["fs_hz"], meta["uv_per_lsb"], meta["crop_samples"]) == (
        1,
        500,
        1.0,
        5000,
    )
    assert meta["leads"] == [
        "I",
        "II",
        "III",
        "aVR",
        "aVL",
        "aVF",
        "V1",
        "V2",
        "V3",
        "V4",
        "V5",
        "V6",
    ]
    assert sum(entry["crops"] for entry in meta["shards"]) == meta["crops"] == len(dataset)
    assert dataset.table().schema.names == COLUMNS.names


def test_webdataset_reads_the_tars(dataset: Dataset) -> None:
    rows = dataset.table().to_pylist()
    urls = [f"{dataset.root.url}/shards/{entry['name']}" for entry in dataset.shards]
    for number, sample in enumerate(webdataset.WebDataset(urls, shardshuffle=False)):
        np.testing.assert_array_equal(
            np.frombuffer(sample["ecg"], "<i2").reshape(CROP_SHAPE), dataset.read(number)
        )
        facts = json.loads(sample["json"])
        assert all(facts[name] == rows[number][name] for name in ("source", "record", "start_s"))
    assert number + 1 == len(dataset)


def test_tarfile_and_index_agree_on_every_offset(dataset: Dataset) -> None:
    for entry in dataset.shards:
        path = Path(dataset.root.url, "shards", entry["name"])
        with tarfile.open(path) as tar:
            members = [(m.name, m.offset_data, m.size) for m in tar]
            assert all(m.isreg() and m.mtime == 0 for m in tar.getmembers())
        head, *lines = path.with_suffix(".idx").read_text().splitlines()
        words = [line.split() for line in lines]
        assert head == f"v1.2 {len(lines)}" and {
            (line[0], line[4], len(line)) for line in words
        } == {("ecg", "json", 8)}
        assert [
            (name, int(at), int(size)) for line in words for at, size, name in (line[1:4], line[5:])
        ] == members
        assert {size for name, _, size in members if name.endswith(".ecg")} == {CROP_BYTES}


def test_dali_reads_the_tars(dataset: Dataset) -> None:
    dali = pytest.importorskip("nvidia.dali", reason="the extra cu13 or cu12 is not installed")
    shards = [f"{dataset.root.url}/shards/{entry['name']}" for entry in dataset.shards]
    indexes = [path.removesuffix("tar") + "idx" for path in shards]

    @dali.pipeline_def(batch_size=16, num_threads=1, device_id=None)
    def reader():  # type: ignore[no-untyped-def]
        how = {"dtypes": [dali.types.INT16], "missing_component_behavior": "error"}
        return dali.fn.readers.webdataset(paths=shards, index_paths=indexes, ext=["ecg"], **how)

    pipeline = reader()
    pipeline.build()
    for batch in range(3):
        (crops,) = pipeline.run()
        for i in range(16):
            np.testing.assert_array_equal(
                np.array(crops.at(i)).reshape(CROP_SHAPE), dataset.read(16 * batch + i)
            )


def test_the_zarr_copy_has_the_same_bytes_as_zarr_python_writes(
    dataset: Dataset, tmp_path: Path
) -> None:
    import zarr
    from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec

    inner = (
        BytesCodec(endian="little"),
        BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=2),
        Crc32cCodec(),
    )
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
    )
    theirs[:] = np.stack([dataset.read(row) for row in range(len(dataset))])
    assert files(tmp_path / "store.zarr") == files(Path(dataset.root.url, "store.zarr"))


def test_a_dataset_may_have_only_a_zarr_copy(small: Path, tmp_path: Path) -> None:
    lone, both = (
        build(small, tmp_path / "z", format="zarr"),
        build(small, tmp_path / "both", format="both"),
    )
    assert not (tmp_path / "z" / "shards").exists() and lone.shards == []
    for row in range(-1, len(both)):
        np.testing.assert_array_equal(lone.read(row), both.read(row))


def test_same_input_gives_the_same_dataset_and_other_options_are_refused(
    small: Path, tmp_path: Path
) -> None:
    """A copy of the archive with other times gives the same bytes; another table of patients does
    not."""
    first = build(small, tmp_path / "a", format="both")
    before = files(tmp_path / "a")
    shutil.copytree(small, tmp_path / "copy", copy_function=shutil.copyfile)
    assert build(tmp_path / "copy", tmp_path / "b", format="both").fingerprint == first.fingerprint
    assert build(small, tmp_path / "a", format="both").fingerprint == first.fingerprint
    for change in ({"format": "tar"}, {"plan": "all"}, {"pseudonym_key": b"k" * 32}, {"seed": 1}):
        with pytest.raises(DatasetError, match="choose another --out"):
            build(small, tmp_path / "a", **{"format": "both"} | change)
    assert files(tmp_path / "a") == files(tmp_path / "b") == before
    other = build(small, tmp_path / "c", seed=1)
    assert other.fingerprint != first.fingerprint
    assert sorted(other.column("waveform")) == sorted(first.column("waveform"))
    copy = (tmp_path / "copy").rename(
        tmp_path / "corrected"
    )  # tables are read once per process and place
    table = copy / "ptbxl_database.csv"
    table.write_text(table.read_text().replace("\n2,", "\n90002,"))
    with pytest.raises(DatasetError, match="other input"):
        build(copy, tmp_path / "a", format="both")


def test_several_archives_make_one_dataset(small: Path, tmp_path: Path) -> None:
    synthesise(tmp_path / "b", patients=6, two_sessions=1, seed=2, layout="ptbxl", progress=False)
    sources = open_sources(str(small)) + open_sources(str(tmp_path / "b"))
    joint = shard(sources, ShardOptions(str(tmp_path / "d"), quiet=True))
    again = [reject for reject in joint.rejects() if reject[2] == "record read already"]
    assert len(again) == 10  # HR00001 to HR00010: the first archive's came first
    assert len({(r["source"], r["record"]) for r in joint.table().to_pylist()}) == 17


def refusals(dataset: Dataset) -> tuple[list[str], dict[str, int]]:
    """The paths of the refused records in rejects.csv, and the counts in dataset.json."""
    used = {
        (row["source"], row["record"]) for row in dataset.table(["source", "record"]).to_pylist()
    }
    details = {
        (source, name): detail
        for source, name, _, detail in dataset.rejects()
        if (source, name) not in used
    }
    return sorted(detail.split(":")[0] for detail in details.values()), dataset.meta["sources"][0][
        "records"
    ]


@pytest.mark.parametrize("layout", ["folders", "training/georgia"])
def test_every_refused_record_has_its_row_and_its_path(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused while planning or while reading, or because another record has its name; in two
    archives alike."""
    src = tmp_path / "src" / layout
    for number in range(5):
        (src / f"g{number}").mkdir(parents=True)
        (src / f"g{number}" / "rec_1.hea").write_text("")
    for number in range(3):
        write_challenge(src / "h", f"rec_{number + 1}", ecg(6000, number) * (number != 2))
    command = ["shard", str(tmp_path / "src"), str(tmp_path / "src"), "--workers", "1", "--out"]
    assert main([*command, str(tmp_path / "out")]) == 0
    words = capsys.readouterr().out
    made = Dataset.open(str(tmp_path / "out"))
    paths, counts = refusals(made)
    headers = [f"{layout}/g{number}/rec_1.hea" for number in range(5)]
    doubles = [f"{layout}/h/rec_{number}.hea" for number in (1, 2, 3)]
    assert paths == sorted([*headers, *headers, *doubles, doubles[2]])
    assert (
        counts == {"seen": 16, "used": 2, "refused": len(paths)}
        and f"\n{len(paths)} records refused" in words
    )
    assert made.meta["sources"][0]["dropped_s"] == 6.0
    again = build(tmp_path / "src", tmp_path / "key", pseudonym_key=b"k" * 32)
    assert (
        refusals(again)[1] == {"seen": 8, "used": 2, "refused": 6} and len(refusals(again)[0]) == 6
    )


def test_pseudonyms_depend_only_on_the_key(small: Path, tmp_path: Path) -> None:
    keys = (b"a" * 32, b"a" * 32, b"k" * 32, None)
    made = [
        build(small, tmp_path / str(i), pseudonym_key=key, seed=i) for i, key in enumerate(keys)
    ]
    names = [{row["record"] for row in one.table(["record"]).to_pylist()} for one in made]
    assert names[0] == names[1] and len(names[0]) == len(names[3])
    assert not names[0] & names[2] and not names[0] & names[3]


def test_the_plan_has_every_crop_once_and_depends_on_the_seed(small: Path) -> None:
    plan, other = (make_plan(open_sources(str(small)), seed).shard(0) for seed in (0, 1))
    assert len({(label, part) for _, _, label, part in plan.crops}) == len(plan.crops) == 15
    assert plan.identity != other.identity


def test_a_folder_with_other_files_is_left_alone(small: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "shards").write_text("precious")
    with pytest.raises(DataError, match="not empty"):
        build(small, tmp_path / "mine", format="zarr")
    assert (tmp_path / "mine" / "shards").read_text() == "precious"


def test_leftovers_of_a_killed_run_are_removed_and_nothing_else(
    small: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    left = ("shards/00009.tar", "shards/00009.idx", "store.zarr/zarr.json", "store.zarr/c/9/0/0")
    for name in (*left, "shards/notes.txt", ".build/x"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("of another run")
    build(small, out)
    build(small, tmp_path / "fresh")
    assert files(out) == files(tmp_path / "fresh") | {"shards/notes.txt": b"of another run"}


# Threads of C++ libraries that are alive when a build has failed: while Python shuts down, they
# could abort the process
THREADS_LEFT = """
import os, sys, threading
from handmade import build
from omnilead.data_tools.errors import StorageError
def threads():
    return len(os.listdir("/proc/self/task")) - threading.active_count()
before = threads()
try:
    build(*sys.argv[1:])
except StorageError as error:
    print(threads() - before, error)
"""


def test_an_archive_without_a_usable_crop_is_one_line_and_leaves_no_thread(tmp_path: Path) -> None:
    write_challenge(
        tmp_path / "a" / "training" / "georgia" / "g1", "E1", np.zeros((12, 5000), np.int16)
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    environment = os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", THREADS_LEFT, tmp_path / "a", tmp_path / "out"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    why = "no valid lead (training/georgia/g1/E1.hea: at 0 s)"
    said = f"0 no record can be used: {why}: {tmp_path}/out/rejects.csv lists all of them\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, said, "")


@pytest.mark.parametrize(
    ("options", "samples", "said"),
    [
        ({"leads": [f"X{i}" for i in range(12)]}, 5000, r"no known lead \(one\.hea: X0, X1, "),
        ({"form": "16x1+24 1000.0(0)/furlong 16 0"}, 5000, r"unknown unit \(one\.hea: 'furlong'\)"),
        ({"fs": "3"}, 5000, r"sampling rate \(one\.hea: 3: 50 to 2000 is read\)"),
        ({}, 1500, r"too short \(one\.hea: 3\.00 s, 5 s are needed\)"),
    ],
)
def test_if_all_records_are_refused_the_error_says_why_and_they_are_listed(
    options: dict[str, object], samples: int, said: str, tmp_path: Path
) -> None:
    """The next run, with files that can be read, uses the same folder."""
    src, out = tmp_path / "src", tmp_path / "out"
    for name in ("one", "two"):
        write_challenge(src, name, ecg(samples), **options)
    with pytest.raises(StorageError, match=f"{said}.*: {out}/rejects.csv lists all of them"):
        build(src, out)
    with open(out / "rejects.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["record"] for row in rows] == ["one", "two"] and rows[0]["reason"] in said
    if not (
        out / "shards"
    ).exists():  # refused for the header alone; then object storage has no folder .build
        shutil.rmtree(out / ".build")
    with pytest.raises(StorageError) as hidden:
        build(src, out, pseudonym_key=b"k" * 32)
    assert (
        "one" not in str(hidden.value).replace(str(out), "")
        and "one.hea" not in (out / "rejects.csv").read_text()
    )
    for name in ("one", "two"):
        write_challenge(src, name, ecg())
    assert build(src, out).meta["sources"][0]["records"] == {"seen": 2, "used": 2, "refused": 0}


def test_a_file_system_without_locks_is_used_with_a_note(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(number: int) -> None:
        def flock(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)

    refuse(errno.EWOULDBLOCK)
    with pytest.raises(StorageError, match="another run is writing there"):
        build(small, tmp_path / "out")
    assert capsys.readouterr().err == ""
    refuse(errno.EACCES)  # as some network file systems do
    assert len(build(small, tmp_path / "out")) == 15
    assert (
        capsys.readouterr().err
        == f"note: {tmp_path}/out: its file system has no locks: never let two runs write there\n"
    )


def test_a_tar_header_fits_or_is_refused() -> None:
    member = tarfile.TarInfo.frombuf(member_header("n" * 99, 8**11 - 1), "ascii", "strict")
    assert (member.name, member.size, member.mode, member.mtime) == ("n" * 99, 8**11 - 1, 0o644, 0)
    for name, size in (("n" * 100, 0), ("n", 8**11)):
        with pytest.raises(ValueError):
            member_header(name, size)


def test_real_ecgs_are_read_bit_for_bit(real_ecgs: Path, tmp_path: Path) -> None:
    import scipy.io

    real = build(real_ecgs, tmp_path / "real")
    used = {
        "chapman_shaoxing": 300,
        "cpsc_2018": 112,
        "cpsc_2018_extra": 29,
        "georgia": 58,
        "ningbo": 55,
        "ptb-xl": 309,
    }
    assert {s["name"]: s["records"]["used"] for s in real.meta["sources"]} == used
    rows = real.table().to_pylist()
    for number, row in enumerate(rows):
        if row["source"] == "chapman_shaoxing" and row["start_s"] == 0 and number % 5 == 0:
            (path,) = (real_ecgs / "training" / "chapman_shaoxing").glob(f"g*/{row['record']}.mat")
            np.testing.assert_array_equal(
                real.read(number), scipy.io.loadmat(path)["val"][:, :5000]
            )
    with open(real_ecgs / "RECORDS.csv") as file:
        codes = {
            Path(row["path"]).name: row["dx_codes"]
            for row in csv.DictReader(file)
            if row["path"].startswith("training/")
        }
    for row in rows:
        if codes.get(row["record"]):
            assert set(row["dx"]) == set(codes[row["record"]].split(";")), row["record"]
