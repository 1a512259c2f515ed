"""`verify` finds and names all damage, and reports nothing for a sound dataset."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from handmade import build as make
from handmade import ecg, flip, write_challenge

from omnilead.data_tools import build, plan, zarr_writer
from omnilead.data_tools.__main__ import main
from omnilead.data_tools.build import row_of
from omnilead.data_tools.dataset import CROP_BYTES, Dataset, fingerprint
from omnilead.data_tools.errors import DatasetError
from omnilead.data_tools.sources import open_sources
from omnilead.data_tools.splits import RoleSources
from omnilead.data_tools.verify import MAX_FINDINGS, verify

ROOT = Path(__file__).parents[2]
Damage = Callable[[Path], object]
TAR, ZARR = "shards/00000.tar", "store.zarr/c/0/0/0"


def rewritten(change: Callable[[dict], object]) -> Damage:  # type: ignore[type-arg]
    """dataset.json changed, with a fingerprint that fits again: forged, or written by a bug."""

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
        changed = pa.array(values(table[name].to_pylist()), field.type)
        return table.set_column(table.schema.get_field_index(name), field, changed)

    return with_table(change)


def flipped(name: str, at: int) -> Damage:
    return lambda root: flip(root / name, at)


def truncate(name: str, by: int) -> Damage:
    return lambda root: os.truncate(root / name, (root / name).stat().st_size - by)


def write(name: str, data: bytes) -> Damage:
    return lambda root: (root / name).write_bytes(data)


def cut_in_the_middle(root: Path) -> None:
    data = (root / ZARR).read_bytes()
    (root / ZARR).write_bytes(data[:50_000] + data[60_000:])


def edited(name: str, old: str, new: str) -> Damage:
    def damage(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new))

    return damage


def forged_rejects(text: str) -> Damage:
    """With the right sha256."""

    def damage(root: Path) -> None:
        data = text.encode("latin-1")
        (root / "rejects.csv").write_bytes(data)
        meta_with(rejects={"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})(root)

    return damage


def forged(text: bytes) -> Damage:
    """The first crop's JSON is another text, and the shard's sha256 is right."""

    def damage(root: Path) -> None:
        data = bytearray((root / TAR).read_bytes())
        start = 512 + CROP_BYTES + -CROP_BYTES % 512 + 512
        end = data.index(b"\0", start)
        data[start:end] = text.ljust(end - start)
        (root / TAR).write_bytes(data)
        rewritten(lambda meta: meta["shards"][0].update(sha256=hashlib.sha256(data).hexdigest()))(
            root
        )

    return damage


def meta_with(**facts: Any) -> Damage:
    return rewritten(lambda meta: meta.update(**facts))


def swap(values: list) -> list:  # type: ignore[type-arg]
    return [values[1], values[0], *values[2:]]


DAMAGES: dict[str, tuple[Damage, str]] = {  # damage, words of the finding
    "flipped sample": (flipped(TAR, 70_000), "crc32c"),
    "flipped tar header": (flipped(TAR, 3), "sha256"),
    "truncated shard": (truncate(TAR, 200_000), "truncated"),
    "missing shard": (lambda root: (root / TAR).unlink(), "missing file"),
    "missing index": (lambda root: (root / "shards/00000.idx").unlink(), "missing file"),
    "wrong index": (flipped("shards/00000.idx", 20), "00000.idx"),
    "wrong name in the index": (flipped("shards/00000.idx", 35), "00000.idx"),
    "wrong end of the index": (flipped("shards/00000.idx", -10), "00000.idx"),
    "flipped table": (flipped("samples.parquet", 500), "samples.parquet"),
    "flipped zarr chunk": (flipped(ZARR, 40_000), ZARR),
    "undeclared zarr": (meta_with(formats=["tar"]), "store.zarr: not a part"),
    "stray shard": (write("shards/00009.tar", b""), "shards/00009.tar: not a part"),
    "another rate": (meta_with(fs_hz=250), "fs_hz 250, 500 expected"),
    "another unit": (meta_with(uv_per_lsb=4.88), "uv_per_lsb"),
    "leads reversed": (rewritten(lambda meta: meta["leads"].reverse()), "leads"),
    "another length": (meta_with(crop_samples=2500), "crop_samples"),
    "another filter": (
        rewritten(lambda meta: meta["preprocessing"].update(filter="band")),
        "preprocessing fails",
    ),
    "a source's crops": (rewritten(lambda meta: meta["sources"][0].update(crops=99)), "counts of"),
    "a source's records": (
        rewritten(lambda meta: meta["sources"][0]["records"].update(seen=10**6)),
        "counts of",
    ),
    "a source renamed": (
        rewritten(lambda meta: meta["sources"][0].update(name="mine")),
        "missing in sources",
    ),
    "no plan": (rewritten(lambda meta: meta.pop("plan")), "plan is missing"),
    "no rejects": (rewritten(lambda meta: meta.pop("rejects")), "has no entry `rejects`"),
    "another column": (
        with_table(lambda table: table.append_column("name", table["record"])),
        "name",
    ),
    "a column less": (
        with_table(lambda table: table.drop_columns("waveform")),
        "waveform is missing",
    ),
    "rows without an address": (
        column("offset", lambda values: [None, *values[1:]]),
        "offset is missing in some rows",
    ),
    "nulls": (column("dx", lambda values: [None, *values[1:]]), "dx is missing in some rows"),
    "flipped rejects": (flipped("rejects.csv", 3), "rejects.csv: fails its sha256"),
    "missing rejects": (lambda root: (root / "rejects.csv").unlink(), "rejects.csv: missing file"),
    "longer rejects": (
        lambda root: (root / "rejects.csv").open("a").write("a,b,c,d\n"),
        "file too large",
    ),
    "rejects without columns": (forged_rejects("source\nptb\n"), "rejects.csv: not enough values"),
    "rejects in Latin": (forged_rejects("source,record,reason,detail\na,b,\xe9,d\n"), "utf-8"),
    "a huge field": (
        forged_rejects("source,record,reason,detail\na,b,c," + "x" * 200_000),
        "larger than field limit",
    ),
    "JSON that is a list": (forged(b"[]"), "invalid tar member"),
    "JSON that is none": (forged(b"{"), "invalid tar member"),
    "missing zarr": (lambda root: shutil.rmtree(root / "store.zarr"), "store.zarr"),
    "missing zarr chunk": (lambda root: (root / ZARR).unlink(), f"{ZARR}: missing file"),
    "truncated zarr chunk": (truncate(ZARR, 100_000), "index fails"),
    "zarr chunk with a hole": (cut_in_the_middle, ZARR),
    "zarr.json that is a list": (write("store.zarr/zarr.json", b"[]"), "store.zarr"),
    "zarr with another key": (edited("store.zarr/zarr.json", "endian", "endman"), "store.zarr"),
    "zarr with another shape": (edited("store.zarr/zarr.json", "5000", "2500"), "shape"),
    "zarr with more": (
        edited("store.zarr/zarr.json", '"attributes": {', '"attributes": {"a": 1'),
        "zarr.json: has entries",
    ),
    "role moved": (column("pretrain", lambda values: [True] * len(values)), "pretrain"),
    "rows swapped": (column("record", swap), "is in its place"),
    "addresses swapped": (column("offset", swap), "crc32c"),
    "flag dropped": (column("flags", lambda values: [["large"]] * len(values)), "flags"),
    "labels changed": (column("labels", lambda values: [[True] * 26, *values[1:]]), "labels"),
    "counts changed": (rewritten(lambda meta: meta["roles"].update(pretrain=1)), "counts per role"),
    "sha256 changed": (rewritten(lambda meta: meta["shards"][0].update(sha256="0" * 64)), "sha256"),
}


@pytest.fixture(scope="module")
def whole(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """In one shard and one storage object. Read only."""
    roles = RoleSources(pretrain=("all",), id_share=1.0)
    return make(small, tmp_path_factory.mktemp("whole") / "both", format="both", role_sources=roles)


@pytest.fixture
def copy(whole: Dataset, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole.root.url, tmp_path / "copy"))


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named(name: str, copy: Path) -> None:
    damage, words = DAMAGES[name]
    damage(copy)
    found = verify(Dataset.open(str(copy)))
    assert found and words in " ".join(found), found


@pytest.fixture(scope="module")
def pieces(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same archive in several shards and storage objects. Read only."""
    out = tmp_path_factory.mktemp("pieces") / "both"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 5)
        patch.setattr(zarr_writer, "SHARD_CROPS", 5)
        make(small, out, format="both")
    return out


def test_a_flipped_byte_is_found_in_any_file(pieces: Path, tmp_path: Path) -> None:
    """In every file except the two with the checksums of all others, which are flipped above."""
    names = {str(path.relative_to(pieces)) for path in pieces.rglob("*") if path.is_file()}
    names -= {"dataset.json", "samples.parquet"}
    assert len(names) >= 2 + 3 * 3
    rng = np.random.default_rng(0)
    for turn in range(4):
        copy = Path(shutil.copytree(pieces, tmp_path / f"{turn}"))
        for name in sorted(names):
            flip(copy / name, int(rng.integers((pieces / name).stat().st_size)))
        assert any("zarr.json" in line for line in verify(Dataset.open(str(copy))))
        shutil.copy(pieces / "store.zarr/zarr.json", copy / "store.zarr/zarr.json")
        found = " ".join(verify(Dataset.open(str(copy))))
        assert {name for name in names if name not in found} == {"store.zarr/zarr.json"}


def test_swapped_files_and_files_of_another_dataset_are_found(
    small: Path, pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of a dataset swapped, and files of another dataset."""
    for name, other in (
        (TAR, "shards/00001.tar"),
        ("shards/00000.idx", "shards/00001.idx"),
        (ZARR, "store.zarr/c/1/0/0"),
    ):
        root = Path(shutil.copytree(pieces, tmp_path / "copy", dirs_exist_ok=True))
        shutil.copy(pieces / other, root / name)
        shutil.copy(pieces / name, root / other)
        found = " ".join(verify(Dataset.open(str(root))))
        assert name in found and other in found
    monkeypatch.setattr(zarr_writer, "SHARD_CROPS", 5)
    monkeypatch.setattr(plan, "SHARD_CROPS", 5)
    make(small, tmp_path / "other", format="both", seed=1, pseudonym_key=b"k" * 32)
    for name in ("samples.parquet", "rejects.csv", "store.zarr/c/1/0/0"):
        root = Path(shutil.copytree(pieces, tmp_path / "copy", dirs_exist_ok=True))
        (root / name).write_bytes(
            (tmp_path / "other" / name).read_bytes() + b"," * (name == "rejects.csv")
        )
        assert any(name in line for line in verify(Dataset.open(str(root))))


def test_fast_checks_sizes_without_reading_samples(copy: Path) -> None:
    flip(copy / TAR, 70_000)
    flip(copy / ZARR, 40_000)
    assert verify(Dataset.open(str(copy)), fast=True) == []
    for damage in (
        truncate(TAR, 1),
        cut_in_the_middle,
        lambda root: (root / "shards/00000.idx").unlink(),
    ):
        damage(copy)
    found = verify(Dataset.open(str(copy)), fast=True)
    assert [line.split(":")[0] for line in found] == [TAR, "shards/00000.idx", ZARR]


SHARD = {"name": "00000.tar", "crops": 1, "bytes": 1, "sha256": "0" * 64}
# facts of dataset.json, whose fingerprint is right. A shard's name and sha256 become file names
INVALID = [
    *[
        ("crops", "9"),
        ("formats", ["hdf5"]),
        ("samples", {"bytes": 1}),
        ("shards", None),
        ("shards", [{"name": 3}]),
    ],
    *[
        ("rejects", 3),
        ("seed", "x"),
        ("plan", "mine"),
        ("roles", []),
        ("sources", 3),
        ("sources", [{"name": "x"}]),
    ],
    *[
        ("role_sources", {"dx": 3}),
        ("role_sources", {"q": ["a"]}),
        ("role_sources", 3),
        ("id_share", 1.5),
    ],
    *[
        ("shards", [SHARD | {"name": name}])
        for name in ("../../outside.tar", "/etc/outside.tar", "a.tar\n")
    ],
    *[("shards", [SHARD | {"sha256": text}]) for text in ("/home/somebody/precious", "A" * 64)],
    *[("shards", [SHARD | {name: -1}]) for name in ("bytes", "crops")],
]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        *[(meta_with(**{name: value}), rf"dataset\.json: {name} ") for name, value in INVALID],
        (write("dataset.json", b"[" * 100_000), "not JSON"),
        (write("dataset.json", b'{"crops": ' + b"9" * 5000 + b"}"), "not JSON"),
        (write("dataset.json", b"\xff"), "not JSON"),
        (lambda root: (root / "dataset.json").unlink(), "unfinished"),
        (edited("dataset.json", '"seed": 0', '"seed": 3'), "fingerprint"),
        (
            edited("dataset.json", '"format_version": 1', '"format_version": 2'),
            "format version 2, this program reads 1",
        ),
        (meta_with(crops=9), "contradicts itself"),
        (meta_with(formats=["zarr"]), "contradicts itself"),
        (rewritten(lambda meta: meta["shards"][0].update(crops=10**30)), "dataset.json"),
        (
            rewritten(lambda meta: meta["shards"].append(meta["shards"][0] | {"crops": 0})),
            "contradicts itself",
        ),
    ],
)
def test_a_damaged_dataset_json_does_not_open(
    damage: Damage, words: str, whole: Dataset, tmp_path: Path
) -> None:
    shutil.copy(Path(whole.root.url, "dataset.json"), tmp_path)
    damage(tmp_path)
    with pytest.raises(DatasetError, match=rf"\A[^\n]*{words}[^\n]*\Z"):
        Dataset.open(str(tmp_path))


def test_extra_json_entries_are_found(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "row_of", lambda *facts: row_of(*facts) | {"name": "Bob"})
    assert verify(make(small, tmp_path / "out"))[0].endswith(
        "JSON and samples.parquet differ in name"
    )


def test_a_sound_dataset_passes_every_check(archive: Path, dataset: Dataset) -> None:
    assert verify(dataset, open_sources(str(archive))) == []
    assert verify(dataset, open_sources(str(archive)), fast=True, key=b"k" * 32) == [
        "the dataset's names are not pseudonyms: leave out --pseudonymize"
    ]


def test_a_wrong_byte_never_reaches_the_reader(whole: Dataset, copy: Path) -> None:
    flip(copy / TAR, 70_000)
    broken = Dataset.open(str(copy))
    with pytest.raises(DatasetError, match=r"00000\.tar: crop 0 at byte 512 fails its crc32c"):
        broken.read(0)
    np.testing.assert_array_equal(broken.read(1), whole.read(1))
    flip(copy / "rejects.csv", 3)
    found = verify(broken)  # all of it
    assert "rejects.csv" in found[0] and "crc32c" in " ".join(found[1:])


def test_a_changed_archive_is_found(tmp_path: Path) -> None:
    """Changed samples, a missing record, a record that was never read, and longer and shorter
    records."""
    place, x = tmp_path / "a" / "training" / "georgia" / "g1", ecg(30_000)
    x[:, 10_000:15_000] = 7  # a crop that has to be refused is not missed
    y = ecg(10_000)
    for name, signal in (("E1", x), ("E2", ecg()), ("E4", y)):
        write_challenge(place, name, signal)
    made = make(tmp_path / "a", tmp_path / "out")

    def found() -> list[str]:
        return verify(Dataset.open(made.root.url), open_sources(str(tmp_path / "a")))

    assert found() == []
    write_challenge(place, "E1", np.concatenate([x, ecg(5000, 1)], axis=1))
    assert found() == ["georgia/E1 at 60 s: a crop of the archive is not in samples.parquet"]
    write_challenge(place, "E1", x)
    write_challenge(place, "E4", y[:, :5000])
    assert found() == [
        "georgia/E4 at 10 s: the archive has no such crop: too short: no crop 1 in 10 s"
    ]
    write_challenge(place, "E4", ecg(10_000, seed=1))
    assert found() == [f"georgia/E4 at {at} s: the archive has other samples" for at in (0, 10)]
    (place / "E4.hea").unlink()
    assert [("georgia/E4" in line and "not in the archive" in line) for line in found()] == [True]
    write_challenge(place, "E4", y)
    write_challenge(place, "E3", ecg(seed=3))
    missed = ["georgia/E3 is in the archive, but neither in samples.parquet nor in rejects.csv"]
    for reason, lines in {
        "flat lead": missed,
        "gain": [],
    }.items():  # a flag in rejects.csv excuses nothing
        forged_rejects(f"source,record,reason,detail\ngeorgia,E3,{reason},x\n")(tmp_path / "out")
        assert found() == lines


@pytest.mark.parametrize("key", [None, b"k" * 32], ids=["plain", "pseudonyms"])
def test_columns_that_differ_from_the_archive_are_named(
    key: bytes | None, archive: Path, tmp_path: Path
) -> None:
    copy = Path(
        shutil.copytree(
            archive, tmp_path / "0", ignore=shutil.ignore_patterns("ningbo", "cpsc*", "chapman*")
        )
    )
    made = make(copy, tmp_path / "out", pseudonym_key=key)
    assert verify(made, open_sources(str(copy)), key=key) == []
    header = "training/georgia/g1/E00001.hea"
    for number, (name, old, new, words) in enumerate(
        (
            (header, "Dx: ", "Dx: 164890007,", "dx"),
            (header, "Age: ", "Age: 1", "age"),
            (header, "Sex: ", "Sex: not ", "sex"),
            (header, " 12 500 ", " 12 500.001 ", "fs_source_hz"),
            ("ptbxl_database.csv", ",10001.0,", ",10002.0,", "patient"),
        ),
        1,
    ):
        place = copy.rename(tmp_path / str(number))  # tables are read once per process and place
        text = (place / name).read_text()
        edited(name, old, new)(place)
        found = verify(made, open_sources(str(place)), key=key)
        assert found and all(
            line.endswith(f" at 0 s: the archive differs in {words}") for line in found
        )
        (place / name).write_text(text)
        copy = place


def test_findings_that_are_not_listed_are_counted(copy: Path) -> None:
    for number in range(MAX_FINDINGS + 5):
        (copy / "shards" / f"copy-{number:02d}.tar").touch()
    found = verify(Dataset.open(str(copy)), fast=True)
    assert found[-2:] == [
        "shards/copy-19.tar: not a part of the dataset",
        "shards/: 5 more findings like these are not listed",
    ]
    assert len(found) == MAX_FINDINGS + 1
    (copy / "shards" / "copy-24.tar").unlink()
    assert (
        verify(Dataset.open(str(copy)), fast=True)[-1]
        == "shards/: 4 more findings like these are not listed"
    )


def test_the_command_prints_findings_and_exits_1(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for fast in ((), ("--fast",)):
        assert main(["verify", str(copy), "--workers", "1", *fast]) == 0
        assert (
            "not read: the contents of shards/ and store.zarr" in capsys.readouterr().out
        ) == bool(fast)
    (copy / TAR).unlink()
    assert main(["verify", str(copy), "--workers", "1"]) == 1
    assert f"{TAR}: missing file" in capsys.readouterr().out
