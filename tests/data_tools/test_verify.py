"""`verify` must find what we break, name it, and find nothing where nothing is broken."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from handmade import ecg, write_challenge

from data_tools import build, plan, zarr_writer
from data_tools.__main__ import main
from data_tools.build import ShardOptions, row_of, shard
from data_tools.dataset import CROP_BYTES, CROP_SHAPE, Dataset, fingerprint
from data_tools.errors import DatasetError
from data_tools.sources import open_sources
from data_tools.verify import FLAGS, verify

ROOT = Path(__file__).parents[2]
Damage = Callable[[Path], None]


def flip(name: str, at: int) -> Damage:
    def damage(root: Path) -> None:
        data = bytearray((root / name).read_bytes())
        data[at] ^= 0x10
        (root / name).write_bytes(data)

    return damage


def rewritten(change: Callable[[dict], None]) -> Damage:  # type: ignore[type-arg]
    """dataset.json changed with a fingerprint that fits again: a forger's or a bug's work."""

    def damage(root: Path) -> None:
        meta = json.loads((root / "dataset.json").read_text())
        change(meta)
        (root / "dataset.json").write_text(json.dumps(meta | {"fingerprint": fingerprint(meta)}))

    return damage


def with_table(change: Callable[[pa.Table], pa.Table]) -> Damage:
    """samples.parquet changed, and its sha256 in dataset.json with it."""

    def damage(root: Path) -> None:
        pq.write_table(change(pq.read_table(root / "samples.parquet")), root / "samples.parquet")
        data = (root / "samples.parquet").read_bytes()
        facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        rewritten(lambda meta: meta.update(samples=facts))(root)

    return damage


def column(name: str, values: Callable[[list], list]) -> Damage:  # type: ignore[type-arg]
    def change(table: pa.Table) -> pa.Table:
        field = table.schema.field(name)
        return table.set_column(
            table.schema.get_field_index(name), field, pa.array(values(table[name].to_pylist()), field.type)
        )

    return with_table(change)


def everyone_pretrains(values: list[bool]) -> list[bool]:
    return [True] * len(values)


def swap_first_two(values: list) -> list:  # type: ignore[type-arg]
    return [values[1], values[0], *values[2:]]


def truncate(root: Path) -> None:
    path = root / "shards" / "00000.tar"
    path.write_bytes(path.read_bytes()[:-200_000])


def cut_in_the_middle(root: Path) -> None:
    path = root / "store.zarr" / "c" / "0" / "0" / "0"
    data = path.read_bytes()
    path.write_bytes(data[:50_000] + data[60_000:])


def edited(name: str, old: str, new: str) -> Damage:
    def damage(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new))

    return damage


def old_rejects(text: str) -> Damage:
    """Of a dataset that does not tell its sum."""

    def damage(root: Path) -> None:
        (root / "rejects.csv").write_text(text, "latin-1")
        rewritten(lambda meta: meta.pop("rejects", None))(root)

    return damage


def forged(text: bytes) -> Damage:
    """The first crop's JSON is another text, and the shard's sum is right."""

    def damage(root: Path) -> None:
        path = root / "shards" / "00000.tar"
        data = bytearray(path.read_bytes())
        start = 512 + CROP_BYTES + -CROP_BYTES % 512 + 512
        end = data.index(b"\0", start)
        data[start:end] = text.ljust(end - start)
        path.write_bytes(data)
        rewritten(lambda meta: meta["shards"][0].update(sha256=hashlib.sha256(data).hexdigest()))(root)

    return damage


DAMAGES: dict[str, tuple[Damage, str]] = {  # what, a word of the finding
    "flipped sample": (flip("shards/00000.tar", 70_000), "crc32c"),
    "flipped tar header": (flip("shards/00000.tar", 3), "sha256"),
    "truncated shard": (truncate, "truncated"),
    "missing shard": (lambda root: (root / "shards" / "00000.tar").unlink(), "missing file"),
    "missing index": (lambda root: (root / "shards" / "00000.idx").unlink(), "missing file"),
    "wrong index": (flip("shards/00000.idx", 20), "00000.idx"),
    "wrong name in the index": (flip("shards/00000.idx", 35), "00000.idx"),
    "wrong end of the index": (flip("shards/00000.idx", -10), "00000.idx"),
    "flipped table": (flip("samples.parquet", 500), "samples.parquet"),
    "flipped zarr chunk": (flip("store.zarr/c/0/0/0", 40_000), "store.zarr"),
    "zarr that is not told": (rewritten(lambda meta: meta.update(formats=["tar"])), "store.zarr: not a part"),
    "stray shard": (lambda root: (root / "shards/00009.tar").write_bytes(b""), "shards/00009.tar: not a part"),
    "another rate told": (rewritten(lambda meta: meta.update(fs_hz=250)), "fs_hz 250, 500 expected"),
    "another unit told": (rewritten(lambda meta: meta.update(uv_per_lsb=4.88)), "uv_per_lsb"),
    "leads told backwards": (rewritten(lambda meta: meta["leads"].reverse()), "leads"),
    "another length told": (rewritten(lambda meta: meta.update(crop_samples=2500)), "crop_samples"),
    "a filter told": (rewritten(lambda meta: meta["preprocessing"].update(filter="band")), "preprocessing fails"),
    "a source's crops": (rewritten(lambda meta: meta["sources"][0].update(crops=1)), "counts of"),
    "a source's records": (rewritten(lambda meta: meta["sources"][0]["records"].update(seen=10**6)), "counts of"),
    "a source renamed": (rewritten(lambda meta: meta["sources"][0].update(name="mine")), "sources lack"),
    "nothing of roles": (rewritten(lambda meta: meta.pop("plan")), "says nothing of plan"),
    "another column": (with_table(lambda table: table.append_column("name", table["record"])), "has not: name"),
    "a column less": (with_table(lambda table: table.drop_columns("waveform")), "waveform is missing"),
    "nulls": (column("dx", lambda values: [None, *values[1:]]), "dx is missing in some rows"),
    "flipped rejects": (flip("rejects.csv", 3), "rejects.csv: fails its sha256"),
    "missing rejects": (lambda root: (root / "rejects.csv").unlink(), "rejects.csv: missing file"),
    "longer rejects": (lambda root: (root / "rejects.csv").open("a").write("a,b,c,d\n"), "file too large"),
    "rejects of an old dataset": (old_rejects("source\nptb\n"), "rejects.csv: not enough values"),
    "rejects of an old dataset in Latin": (old_rejects("source,record,reason,detail\na,b,\xe9,d\n"), "utf-8"),
    "a huge field": (old_rejects("source,record,reason,detail\na,b,c," + "x" * 200_000), "larger than field limit"),
    "JSON that is a list": (forged(b"[]"), "another form"),
    "JSON that is none": (forged(b"{"), "another form"),
    "missing zarr": (lambda root: shutil.rmtree(root / "store.zarr"), "store.zarr"),
    "missing zarr chunk": (lambda root: (root / "store.zarr/c/0/0/0").unlink(), "store.zarr/c/0/0/0: missing file"),
    "truncated zarr chunk": (lambda root: os.truncate(root / "store.zarr/c/0/0/0", 900_000), "index fails"),
    "zarr chunk with a hole": (cut_in_the_middle, "store.zarr/c/0/0/0"),
    "zarr of no form": (lambda root: (root / "store.zarr/zarr.json").write_text("[]"), "store.zarr"),
    "zarr of other words": (edited("store.zarr/zarr.json", "endian", "endman"), "store.zarr"),
    "zarr of another shape": (edited("store.zarr/zarr.json", "5000", "2500"), "shape"),
    "zarr with a note": (edited("store.zarr/zarr.json", '"attributes": {', '"attributes": {"a": 1'), "zarr.json: has more"),
    "role moved": (column("pretrain", everyone_pretrains), "pretrain"),
    "rows swapped": (column("record", swap_first_two), "stands where it should"),
    "addresses swapped": (column("offset", swap_first_two), "crc32c"),
    "flag dropped": (column("flags", lambda values: [[]] * len(values)), "flags"),
    "labels changed": (column("labels", lambda values: [[True] * 26, *values[1:]]), "labels"),
    "counts changed": (rewritten(lambda meta: meta["roles"].update(pretrain=1)), "counts per role"),
    "sha256 changed": (rewritten(lambda meta: meta["shards"][0].update(sha256="0" * 64)), "sha256"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named(name: str, dataset: Dataset, tmp_path: Path) -> None:
    damage, word = DAMAGES[name]
    root = tmp_path / "copy"
    shutil.copytree(dataset.root.url, root)
    damage(root)
    found = verify(Dataset.open(str(root)))
    assert found
    assert word in " ".join(found), found


@pytest.fixture(scope="module")
def pieces(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same archive in four shards and four storage objects."""
    out = tmp_path_factory.mktemp("pieces") / "both"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 50)
        patch.setattr(zarr_writer, "SHARD_CROPS", 50)
        shard(open_sources(str(archive)), ShardOptions(str(out), format="both", quiet=True))
    return out


def test_a_flipped_byte_is_found_wherever_it_is(pieces: Path, tmp_path: Path) -> None:
    """Of every file but the two that hold the checksums of all others, which the tests above flip."""
    names = sorted(str(path.relative_to(pieces)) for path in pieces.rglob("*") if path.is_file())
    assert len(names) == 3 + 4 + 4 + 4 + 1
    rng = np.random.default_rng(0)
    for turn in range(4):
        shutil.copytree(pieces, tmp_path / f"{turn}")
        names = [name for name in names if name not in ("dataset.json", "samples.parquet")]
        for name in names:
            flip(name, int(rng.integers((pieces / name).stat().st_size)))(tmp_path / f"{turn}")
        found = verify(Dataset.open(str(tmp_path / f"{turn}")))
        if not any("zarr.json" in line for line in found):
            raise AssertionError(found)
        (tmp_path / f"{turn}/store.zarr/zarr.json").write_bytes((pieces / "store.zarr/zarr.json").read_bytes())
        found = verify(Dataset.open(str(tmp_path / f"{turn}")))
        assert [name for name in names if name not in " ".join(found)] == ["store.zarr/zarr.json"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("shards/00000.tar", "shards/00001.tar"),
        ("shards/00000.idx", "shards/00001.idx"),
        ("store.zarr/c/0/0/0", "store.zarr/c/1/0/0"),
    ],
)
def test_swapped_files_are_found(one: str, other: str, pieces: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(pieces, root)
    (root / one).rename(root / "aside"), (root / other).rename(root / one), (root / "aside").rename(root / other)
    found = " ".join(verify(Dataset.open(str(root))))
    assert one in found and other in found


@pytest.mark.parametrize("name", ["samples.parquet", "rejects.csv", "store.zarr/c/3/0/0"])
def test_files_of_another_dataset_are_found(name: str, archive: Path, pieces: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(pieces, root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_writer, "SHARD_CROPS", 50)
        key = b"k" * 32 if name == "rejects.csv" else None
        shard(
            open_sources(str(archive)), ShardOptions(str(tmp_path / "o"), format="both", seed=1, pseudonym_key=key, quiet=True)
        )
    (root / name).write_bytes((tmp_path / "o" / name).read_bytes())
    assert any(name in line for line in verify(Dataset.open(str(root))))


def test_fast_looks_at_sizes_and_reads_no_sample(dataset: Dataset, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(dataset.root.url, root)
    flip("shards/00000.tar", 70_000)(root)
    flip("store.zarr/c/0/0/0", 40_000)(root)
    assert verify(Dataset.open(str(root)), fast=True) == []
    for damage in (truncate, cut_in_the_middle, lambda root: (root / "shards" / "00000.idx").unlink()):
        damage(root)
    found = verify(Dataset.open(str(root)), fast=True)
    assert [line.split(":")[0] for line in found] == ["shards/00000.tar", "shards/00000.idx", "store.zarr/c/0/0/0"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("crops", "9"), ("formats", ["hdf5"]), ("samples", {"bytes": 1}), ("shards", None), ("shards", [{"name": 3}])],
        *[("formats", ["zarr"]), ("rejects", 3), ("seed", "x"), ("plan", "mine"), ("roles", []), ("sources", 3)],
        *[("sources", [{"name": "x"}]), ("role_sources", {"dx": 3}), ("role_sources", {"q": ["a"]}), ("role_sources", 3)],
    ],
)
def test_metadata_of_another_form_is_one_line(name: str, value: Any, dataset: Dataset, tmp_path: Path) -> None:
    """Also where its fingerprint is right."""
    meta = dataset.meta | {name: value}
    (tmp_path / "dataset.json").write_text(json.dumps(meta | {"fingerprint": fingerprint(meta)}))
    with pytest.raises(DatasetError, match=rf"dataset\.json: {name} has not the form of version 1"):
        Dataset.open(str(tmp_path))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"crops": ' + "9" * 5000 + "}", "\xff"], ids=["nested", "digits", "bytes"])
def test_metadata_that_is_no_json_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(text, "latin-1")
    with pytest.raises(DatasetError, match=r"\A[^\n]*dataset\.json: not JSON [^\n]*\Z"):
        Dataset.open(str(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.update(crops=9),
        lambda meta: meta["shards"][0].update(crops=10**30),
        lambda meta: meta["shards"].append(meta["shards"][0] | {"crops": 0}),
    ],
)
def test_metadata_that_contradicts_itself_is_one_line(change: Any, dataset: Dataset, tmp_path: Path) -> None:
    shutil.copy(Path(dataset.root.url, "dataset.json"), tmp_path)
    rewritten(change)(tmp_path)
    with pytest.raises(DatasetError, match=r"dataset\.json: contradicts itself \(\d+ shards of \d+ crops"):
        Dataset.open(str(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../outside.tar"},
        {"name": "/etc/outside.tar"},
        {"sha256": "/home/somebody/precious"},
        {"sha256": "A" * 64},
        {"bytes": -1},
        {"crops": -1},
    ],
    ids=str,
)
def test_no_name_of_a_strangers_dataset_leads_elsewhere(change: dict[str, Any], dataset: Dataset, tmp_path: Path) -> None:
    """A shard's name and sum are names of files in the dataset, and in the cache of one far away."""
    first, *others = dataset.meta["shards"]
    meta = dataset.meta | {"shards": [first | change, *others]}
    (tmp_path / "dataset.json").write_text(json.dumps(meta | {"fingerprint": fingerprint(meta)}))
    with pytest.raises(DatasetError, match=r"dataset\.json: shards has not the form of version 1"):
        Dataset.open(str(tmp_path))


def test_rows_without_an_address_are_one_line(dataset: Dataset, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(dataset.root.url, root)
    column("offset", lambda values: [None, *values[1:]])(root)
    with pytest.raises(DatasetError, match=r"samples\.parquet: offset is missing in some rows"):
        Dataset.open(str(root)).addresses  # noqa: B018


def test_no_json_tells_more_than_its_row(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "row_of", lambda *facts: row_of(*facts) | {"name": "Bob"})
    made = shard(open_sources(str(archive)), ShardOptions(str(tmp_path / "out"), quiet=True))
    assert verify(made)[0].endswith("JSON and samples.parquet differ in name")


def test_a_sound_dataset_passes_every_check(archive: Path, dataset: Dataset) -> None:
    assert verify(dataset, open_sources(str(archive))) == []
    assert verify(dataset, workers=2) == []


def test_rejects_that_are_damaged_hide_nothing_else(dataset: Dataset, tmp_path: Path) -> None:
    shutil.copytree(dataset.root.url, tmp_path / "copy")
    flip("rejects.csv", 3)(tmp_path / "copy")
    truncate(tmp_path / "copy")
    found = verify(Dataset.open(str(tmp_path / "copy")))
    assert len(found) == 2 and "rejects.csv" in found[0] and "truncated" in found[1]


def test_a_dataset_that_does_not_tell_the_sum_of_its_rejects_passes(dataset: Dataset, tmp_path: Path) -> None:
    shutil.copytree(dataset.root.url, tmp_path / "copy")
    rewritten(lambda meta: meta.pop("rejects"))(tmp_path / "copy")
    assert verify(Dataset.open(str(tmp_path / "copy"))) == []


def test_a_dataset_changed_by_hand_does_not_open(dataset: Dataset, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(dataset.root.url, root)
    meta = (root / "dataset.json").read_text()
    (root / "dataset.json").write_text(meta.replace('"seed": 0', '"seed": 3'))
    with pytest.raises(DatasetError, match="fingerprint"):
        Dataset.open(str(root))
    (root / "dataset.json").write_text(meta.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(DatasetError, match="format version 2, this program reads 1"):
        Dataset.open(str(root))
    (root / "dataset.json").write_text("{")
    with pytest.raises(DatasetError, match="not JSON"):
        Dataset.open(str(root))
    (root / "dataset.json").unlink()
    with pytest.raises(DatasetError, match="unfinished"):
        Dataset.open(str(root))


def test_a_wrong_byte_never_reaches_the_reader(dataset: Dataset, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(dataset.root.url, root)
    flip("shards/00000.tar", 70_000)(root)
    broken = Dataset.open(str(root))
    with pytest.raises(DatasetError, match=r"00000\.tar: crop 0 at byte 512 fails its crc32c"):
        broken.read(0)
    np.testing.assert_array_equal(broken.read(1), dataset.read(1))


def test_the_archive_betrays_what_the_checksums_cannot(archive: Path, dataset: Dataset, tmp_path: Path) -> None:
    """An archive that changed after sharding, a record that vanished, and one that was never taken."""
    copy = tmp_path / "archive"
    shutil.copytree(archive, copy)
    georgia = sorted((copy / "training" / "georgia").glob("g*/*.mat"))
    data = bytearray(georgia[0].read_bytes())
    data[24 + 1000] ^= 1
    georgia[0].write_bytes(data)
    found = verify(dataset, open_sources(str(copy)))
    assert [f"georgia/{georgia[0].stem} at 0 s: the archive has other samples"] == found
    shutil.copytree(archive, copy, dirs_exist_ok=True)
    georgia[1].unlink()
    assert "not in the archive" in verify(dataset, open_sources(str(copy)))[0]
    shutil.copytree(archive, copy, dirs_exist_ok=True)
    stem = georgia[0].with_suffix("")
    for suffix in (".hea", ".mat"):
        text = stem.with_suffix(suffix).read_bytes().replace(stem.name.encode(), b"E09999")
        (stem.parent / f"E09999{suffix}").write_bytes(text)
    assert "neither in samples.parquet nor in rejects.csv" in " ".join(verify(dataset, open_sources(str(copy))))


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("training/georgia/g1/E00001.hea", "Dx: ", "Dx: 164890007,", "dx"),
        ("training/georgia/g1/E00001.hea", "Age: ", "Age: 1", "age"),
        ("training/georgia/g1/E00001.hea", "ale\n", "\n", "sex"),
        ("training/georgia/g1/E00001.hea", " 12 500 ", " 12 500.001 ", "fs_source_hz"),
        ("ptbxl_database.csv", ",10001.0,", ",10002.0,", "patient"),
    ],
)
@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_what_the_archive_says_otherwise_is_named(
    name: str, old: str, new: str, said: str, key: bytes | None, archive: Path, tmp_path: Path
) -> None:
    """Under pseudonyms too."""
    copy = tmp_path / "archive"
    shutil.copytree(archive, copy)
    made = shard(open_sources(str(archive)), ShardOptions(str(tmp_path / "out"), pseudonym_key=key, quiet=True))
    assert verify(made, open_sources(str(archive)), key=key) == []
    edited(name, old, new)(copy)
    found = verify(made, open_sources(str(copy)), key=key)
    assert found and all(line.endswith(f" at 0 s: the archive says otherwise in {said}") for line in found)


def test_a_record_that_is_longer_now_or_only_flagged_is_missed(tmp_path: Path) -> None:
    """A flag's line in rejects.csv excuses nothing; a crop that had to be refused is not missed."""
    place, x = tmp_path / "training" / "georgia" / "g1", ecg(30_000)
    x[:, 10_000:15_000] = 7
    write_challenge(place, "E1", x)
    write_challenge(place, "E2", ecg())
    made = shard(open_sources(str(tmp_path)), ShardOptions(str(tmp_path / "out"), quiet=True))
    assert verify(made, open_sources(str(tmp_path))) == []
    write_challenge(place, "E1", np.concatenate([x, ecg(5000, 1)], axis=1))
    assert verify(made, open_sources(str(tmp_path))) == [
        "georgia/E1 at 60 s: a crop of the archive that is not in samples.parquet"
    ]
    write_challenge(place, "E1", x)
    write_challenge(place, "E3", ecg(seed=3))
    lines = {"flat lead": ["georgia/E3 is in the archive, and neither in samples.parquet nor in rejects.csv"], "gain": []}
    for reason, found in lines.items():
        old_rejects(f"source,record,reason,detail\ngeorgia,E3,{reason},x\n")(tmp_path / "out")
        assert verify(Dataset.open(str(tmp_path / "out")), open_sources(str(tmp_path))) == found


def test_flags_are_those_that_the_readme_names() -> None:
    flagged = (ROOT / "data_tools" / "README.md").read_text().partition("Used, but flagged:")[2].replace("\n", " ")
    assert sorted(re.findall("`([^`]+)`", flagged)) == sorted(FLAGS)


def test_a_record_that_is_shorter_now_is_one_finding_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "training" / "georgia" / "g1"
    for name in ("E1", "E2"):
        write_challenge(place, name, ecg(10_000))
    shard(open_sources(str(tmp_path)), ShardOptions(str(tmp_path / "out"), quiet=True))
    write_challenge(place, "E1", ecg(5000))
    write_challenge(place, "E2", ecg(10_000, seed=1))
    assert main(["verify", str(tmp_path / "out"), "--source", str(tmp_path), "--workers", "1"]) == 1
    told = capsys.readouterr().out
    assert "georgia/E1 at 10 s: the archive has no such crop: too short: no crop 1 in 10 s" in told
    assert "georgia/E2 at 10 s: the archive has other samples" in told


def test_crops_are_twelve_by_five_thousand(dataset: Dataset) -> None:
    assert dataset.read(0).shape == CROP_SHAPE
