"""`verify` finds and names all damage, and reports nothing for a sound dataset."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from handmade import build, ecg, files, flip, write_challenge

from omnilead.data_tools.dataset import COLUMNS as SCHEMA
from omnilead.data_tools.dataset import CROP_BYTES, Dataset, fingerprint
from omnilead.data_tools.ecg.crops import prepare_crop
from omnilead.data_tools.io.errors import DatasetError
from omnilead.data_tools.sharding import plan, record_index
from omnilead.data_tools.sharding import shard as builder
from omnilead.data_tools.sharding import shards as shard_writers
from omnilead.data_tools.sharding.data_card import CARD, CROISSANT
from omnilead.data_tools.sharding.record_index import RecordIndex
from omnilead.data_tools.sharding.roles import RoleSources
from omnilead.data_tools.sharding.verify import MAX_FINDINGS, verify
from omnilead.data_tools.sources.detect import open_sources
from tests.tables import tabulated

MISSING = object()
TAR, INDEX, ZARR = "shards/00000.tar", "shards/00000.idx", "store.zarr/c/0/0/0"
LAYOUT = "store.zarr/zarr.json"


def findings(root, **options):
    return verify(Dataset.open(str(root)), **options)


def meta(path, value):
    """An entry of dataset.json changed, with a fingerprint that fits again: forged, or written by a
    bug."""

    def damage(root):
        document = json.loads((root / "dataset.json").read_text())
        *parents, name = path.split(".")
        entry = document
        for parent in parents:
            entry = entry[int(parent) if parent == "0" else parent]
        entry[name] = value
        if value is MISSING:
            del entry[name]
        document["fingerprint"] = fingerprint(document)
        (root / "dataset.json").write_text(json.dumps(document))

    return damage


def declare(root, name):
    """Make the sha256 in dataset.json fit a table that was changed."""
    data = (root / name).read_bytes()
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    meta(Path(name).stem, facts)(root)


def with_table(change):
    def damage(root):
        pq.write_table(change(pq.read_table(root / "samples.parquet")), root / "samples.parquet")
        declare(root, "samples.parquet")

    return damage


def column(name, values):
    def change(table):
        field = table.schema.field(name)
        changed = pa.array(values(table[name].to_pylist()), field.type)
        return table.set_column(table.schema.get_field_index(name), field, changed)

    return with_table(change)


def rejects(text):
    def damage(root):
        (root / "rejects.csv").write_text(text, encoding="latin-1")
        declare(root, "rejects.csv")

    return damage


def flipped(name, at):
    return lambda root: flip(root / name, at)


def missing(name):
    return lambda root: (root / name).unlink()


def longer(name):
    return lambda root: os.truncate(root / name, 10**6)


def cut(name, start, end=None):
    """Without the bytes from `start` to `end`."""

    def damage(root):
        data = (root / name).read_bytes()
        (root / name).write_bytes(data[:start] + data[end:] if end else data[:start])

    return damage


def edited(name, old, new):
    def damage(root):
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new))

    return damage


def member(text):
    """The first crop's JSON is another text, and the shard's sha256 is right."""

    def damage(root):
        data = bytearray((root / TAR).read_bytes())
        start = 512 + CROP_BYTES + -CROP_BYTES % 512 + 512
        end = data.index(b"\0", start)
        data[start:end] = text.ljust(end - start)
        (root / TAR).write_bytes(data)
        meta("shards.0.sha256", hashlib.sha256(data).hexdigest())(root)

    return damage


def in_tar(old, new):
    """A text in the first tar is another one, and the shard's sha256 is right."""

    def damage(root):
        data = (root / TAR).read_bytes()
        assert old in data and len(old) == len(new)
        (root / TAR).write_bytes(data.replace(old, new, 1))
        digest = hashlib.sha256((root / TAR).read_bytes()).hexdigest()
        meta("shards.0.sha256", digest)(root)

    return damage


def stated(name, value):
    """An entry of dataset.json in JSON; without a value it is missing."""
    return meta(name, json.loads(value) if value else MISSING)


def swap(values):
    return [values[1], values[0], *values[2:]]


COLUMNS = "source,record,reason,detail\n"
DAMAGES = [  # words of the finding
    (flipped(TAR, 70_000), "00000.tar: crop 0 at byte 512 fails its crc32c"),
    (flipped(TAR, 3), "sha256"),  # of a tar header
    (cut(TAR, 200_000), "truncated"),
    (missing(INDEX), "missing file"),
    (flipped(INDEX, 20), "00000.idx: names"),
    (flipped("samples.parquet", 500), "samples.parquet"),
    (longer("samples.parquet"), "samples.parquet: fails its sha256"),
    (flipped(ZARR, 40_000), ZARR),
    (with_table(lambda table: table.append_column("name", table["record"])), "name"),
    (with_table(lambda table: table.drop_columns("waveform")), "waveform is missing"),
    (column("dx", lambda values: [None, *values[1:]]), "dx is missing in some rows"),
    (flipped("rejects.csv", 3), "rejects.csv: fails its sha256"),
    (missing("rejects.csv"), "rejects.csv: missing file"),
    (longer("rejects.csv"), "rejects.csv: file too large"),
    (rejects("source\nptb\n"), "rejects.csv: not enough values"),
    (rejects(f"{COLUMNS}a,b,\xe9,d\n"), "utf-8"),
    (rejects(f"{COLUMNS}a,b,c," + "x" * 200_000), "larger than field limit"),
    (member(b"[]"), "invalid tar member"),
    (member(b"{"), "invalid tar member"),
    (member(b"{}"), "JSON and samples.parquet differ in age, "),
    (member(b'{"name": "Bob"}'), "missing_leads, name, "),  # an entry too many
    (lambda root: shutil.rmtree(root / "store.zarr"), "store.zarr"),
    (missing(ZARR), f"{ZARR}: missing file"),
    (cut(ZARR, 100_000), "index fails"),
    (cut(ZARR, 50_000, 60_000), ZARR),
    (lambda root: (root / LAYOUT).write_text("[]"), "store.zarr"),
    (column("pretrain", lambda values: [True] * len(values)), "pretrain"),
    (column("record", swap), "is in its place"),
    (column("offset", swap), "crc32c"),
    (column("flags", lambda values: [["large"]] * len(values)), "flags"),
    (column("labels", lambda values: [[True] * 26, *values[1:]]), "labels"),
]


FACTS = tabulated("""
formats                | ["tar"] | store.zarr: not a part
preprocessing.filter   | "band"  | preprocessing fails
sources.0.crops        | 99      | counts of
sources.0.records.seen | 1000000 | counts of
sources.0.name         | "mine"  | missing in sources
roles.pretrain         | 1       | counts per role
""")
DAMAGES += [(stated(name, value), words) for name, value, words in FACTS]
EDITS = tabulated("""
endian          | endman                 | store.zarr
5000            | 2500                   | shape
"attributes": { | "attributes": {"a": 1, | zarr.json: has entries
"uV"            | "mV"                   | zarr.json: has entries
""")
DAMAGES += [(edited(LAYOUT, old, new), words) for old, new, words in EDITS]
IN_TARS = tabulated("""
"halves": 2         | "halves": 1         | halves
"start_s": 0.0      | "start_s": 1.0      | start_s
"label_names": ["N  | "label_names": ["M  | label_names
""")
DAMAGES += [
    (in_tar(old.encode(), new.encode()), f"samples.parquet differ in {name}")
    for old, new, name in IN_TARS
]


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """In one shard and one storage object. Read only."""
    roles = RoleSources(pretrain=("all",), id_share=1.0)
    return build(
        small, tmp_path_factory.mktemp("whole") / "both", format="both", role_sources=roles
    )


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole.root.url, tmp_path / "copy"))


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_damage_is_found_and_named(damage, words, copy):
    damage(copy)
    assert words in " ".join(findings(copy))


@pytest.fixture(scope="module")
def pieces(small, tmp_path_factory):
    """The same archive in several shards and storage objects. Read only."""
    out = tmp_path_factory.mktemp("pieces") / "both"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 5)
        patch.setattr(shard_writers, "SHARD_CROPS", 5)
        build(small, out, format="both")
    return out


def test_a_flipped_byte_is_found_in_any_file(pieces, tmp_path):
    """In every file except the two with the checksums of all others, which are flipped above, and
    the data card, which may be edited."""
    names = files(pieces).keys() - {"dataset.json", "samples.parquet", CARD, CROISSANT}
    assert len(names) >= 2 + 3 * 3
    rng = np.random.default_rng(0)
    for turn in range(4):
        copy = Path(shutil.copytree(pieces, tmp_path / f"{turn}"))
        for name in sorted(names):
            flip(copy / name, int(rng.integers((pieces / name).stat().st_size)))
        assert any("zarr.json" in line for line in findings(copy))
        shutil.copy(pieces / LAYOUT, copy / LAYOUT)
        found = " ".join(findings(copy))
        assert {name for name in names if name not in found} == {LAYOUT}


@pytest.mark.parametrize(
    ("name", "other"),
    [(TAR, "shards/00001.tar"), (INDEX, "shards/00001.idx"), (ZARR, "store.zarr/c/1/0/0")],
)
def test_swapped_files_are_found(name, other, pieces, tmp_path):
    root = Path(shutil.copytree(pieces, tmp_path / "copy"))
    shutil.copy(pieces / other, root / name)
    shutil.copy(pieces / name, root / other)
    found = " ".join(findings(root))
    assert name in found and other in found


def test_fast_checks_sizes_without_reading_samples(copy):
    flip(copy / TAR, 70_000)
    flip(copy / ZARR, 40_000)
    assert findings(copy, fast=True) == []
    for damage in (cut(TAR, -1), cut(ZARR, 50_000, 60_000), missing(INDEX)):
        damage(copy)
    found = findings(copy, fast=True)
    assert [line.split(":")[0] for line in found] == [TAR, INDEX, ZARR]


def text(content):
    return lambda root: (root / "dataset.json").write_bytes(content)


SHARD = {"name": "00000.tar", "crops": 1, "bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (text(b"[" * 100_000), "not JSON"),
        (text(b'{"crops": ' + b"9" * 5000 + b"}"), "not JSON"),
        (text(b"\xff"), "not JSON"),
        (missing("dataset.json"), "unfinished"),
        (edited("dataset.json", '"seed": 0', '"seed": 3'), "fingerprint"),
        (meta("format_version", 2), "format version 2, this program reads 1"),
        (meta("crops", 9), "entries contradict each other"),
        (meta("formats", ["zarr"]), "entries contradict each other"),
        (meta("shards.0.crops", 10**30), "dataset.json"),
        (
            meta("shards", [SHARD | {"crops": 15}, SHARD | {"crops": 0}]),
            "entries contradict each other",
        ),
        (meta("shards", [SHARD | {"name": "a.tar\n"}]), r"dataset\.json: the entry shards "),
        (meta("sources.0.licence", "\udc80"), r"dataset\.json: not JSON "),
    ],
)
def test_a_damaged_dataset_json_does_not_open(damage, words, whole, tmp_path):
    shutil.copy(Path(whole.root.url, "dataset.json"), tmp_path)
    damage(tmp_path)
    with pytest.raises(DatasetError, match=rf"\A[^\n]*{words}[^\n]*\Z"):
        Dataset.open(str(tmp_path))


# Facts of dataset.json, whose fingerprint is right; 0 is the first of a list. A shard's name and sha256 become file names
FORGED = """
crops                  | "9"
crops                  | -1
crops                  | 1000000000000000000
fs_hz                  | 250
fs_hz                  |
leads                  | ["II", "I"]
leads                  | null
uv_per_lsb             | 4.88
uv_per_lsb             | "1"
crop_samples           | 2500
formats                | ["hdf5"]
preprocessing          | 3
pseudonyms             | 3
rejects                | 3
rejects                |
plan                   |
recipe                 |
seed                   | "x"
plan                   | "mine"
roles                  | []
roles.dx               | "train"
roles.dx.test          | [1]
roles.pretrain         | Infinity
role_sources           | {"dx": 3}
role_sources           | 3
id_share               | 1.5
id_share               | NaN
samples                | {"bytes": 1}
samples.bytes          | -1
sources                | 3
sources                | [{"name": "x"}]
sources.0.dropped_s    | NaN
sources.0.crops        | -3
sources.0.records.used | -3
shards                 | null
shards                 | [{"name": 3}]
shards.0.name          | "../../outside.tar"
shards.0.sha256        | "/home/somebody/precious"
shards.0.bytes         | -1
shards.0.crops         | 1180591620717411303424
"""


@pytest.mark.parametrize(("name", "value"), tabulated(FORGED))
def test_a_forged_dataset_json_does_not_open(name, value, whole, tmp_path):
    shutil.copy(Path(whole.root.url, "dataset.json"), tmp_path)
    stated(name, value)(tmp_path)
    says = name.partition(".")[0]
    with pytest.raises(DatasetError, match=rf"\A[^\n]*dataset\.json: the entry {says} [^\n]*\Z"):
        Dataset.open(str(tmp_path))


def test_a_sound_dataset_passes_every_check(archive, dataset):
    sources = open_sources(str(archive))
    assert verify(dataset, sources) == []
    (no_key,) = verify(dataset, sources, fast=True, key=b"k" * 32)
    assert no_key == "the dataset's names are not pseudonyms: leave out --pseudonymize"


def test_a_changed_archive_is_found(tmp_path):
    """Changed samples, a missing record, a record that was never read, and longer and shorter
    records."""
    archive, out = tmp_path / "a", tmp_path / "out"
    place, x, y = archive / "training" / "georgia" / "g1", ecg(30_000), ecg(10_000)
    x[:, 10_000:15_000] = 7  # a crop that has to be refused is not missed
    write_challenge(place, "E1", x)
    write_challenge(place, "E4", y)
    build(archive, out)

    def found():
        return findings(out, sources=open_sources(str(archive)))

    assert found() == []
    write_challenge(place, "E1", np.concatenate([x, ecg(5000, 1)], axis=1))
    assert found() == ["georgia/E1 at 60 s: a crop of the archive is not in samples.parquet"]
    write_challenge(place, "E1", x)
    write_challenge(place, "E4", y[:, :5000])
    no_crop = "the archive has no such crop: too short: no crop 1 in 10 s"
    assert found() == [f"georgia/E4 at 10 s: {no_crop}"]
    write_challenge(place, "E4", ecg(10_000, seed=1))
    assert found() == [f"georgia/E4 at {at} s: the archive has other samples" for at in (0, 10)]
    (place / "E4.hea").unlink()
    (line,) = found()
    assert line.startswith("1 record is not in the archive, for example georgia/E4")
    for header in place.glob("*.hea"):
        header.rename(header.with_name(f"other{header.name}"))
    (line,) = found()
    says = r"all \d records are not in the archive, for example georgia/E\d: is this the archive."
    assert re.fullmatch(says, line)
    for header in place.glob("*.hea"):
        header.rename(header.with_name(header.name.removeprefix("other")))
    write_challenge(place, "E4", y)
    write_challenge(place, "E3", ecg(seed=3))
    missed = "georgia/E3 is in the archive, but neither in samples.parquet nor in rejects.csv"
    rejects(f"{COLUMNS}georgia,E3,flat lead,x\n")(out)  # a flag excuses nothing
    assert found() == [missed]
    rejects(f"{COLUMNS}georgia,E3,gain,x\n")(out)
    assert found() == [
        "georgia/E3 was refused (gain), but can be read now: make a new dataset from it and this one"
    ]
    write_challenge(place, "E3", ecg(2000, seed=3))
    assert found() == []


@pytest.mark.parametrize("key", [None, b"k" * 32], ids=["plain", "pseudonyms"])
def test_columns_that_differ_from_the_archive_are_named(key, archive, tmp_path):
    others = shutil.ignore_patterns("*ningbo", "*cpsc*", "*chapman*")
    copy = Path(shutil.copytree(archive, tmp_path / "0", ignore=others))
    made = build(copy, tmp_path / "out", pseudonym_key=key)
    assert verify(made, open_sources(str(copy)), key=key) == []
    header = str(next(copy.rglob("*_E00001.hea")).relative_to(copy))
    for name, old, new, words in (
        (header, "Dx: ", "Dx: 164890007,", "dx"),
        (header, "Age: ", "Age: 1", "age"),
        (header, "Sex: ", "Sex: not ", "sex"),
        (header, " 12 500 ", " 12 500.001 ", "fs_source_hz"),
        ("ptbxl_database.csv", "_10001,", "_10002,", "patient"),
    ):
        copy = copy.rename(tmp_path / words)  # tables are read once per process and place
        edited(name, old, new)(copy)
        found = verify(made, open_sources(str(copy)), key=key)
        differs = f" at 0 s: the archive differs in {words}"
        assert found and all(line.endswith(differs) for line in found)
        edited(name, new, old)(copy)


def test_records_are_found_even_if_their_hashes_are_equal(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(record_index, "member_hash", lambda source, name: 7)
    columns = ["source", "record", "crc32c"]
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    index = RecordIndex.write(tmp_path / "rows", schema, whole.row_batches(columns))
    for row, expected in enumerate(whole.table(columns).to_pylist()):
        assert index.find(expected["source"], expected["record"]) == [{**expected, "row": row}]
    assert index.find("georgia", "E9") == []


@pytest.mark.parametrize(("least", "found"), [(-32_767, 0), (-32_768, 1)])
def test_a_sample_that_means_not_measured_is_found(least, found, tmp_path, monkeypatch):
    """It is found in both formats, where all checksums are right: written by a bug."""

    def prepare(record, part, out):
        crop = prepare_crop(record, part, out)
        out[3, 7] = least
        return crop

    monkeypatch.setattr(builder, "prepare_crop", prepare)
    write_challenge(tmp_path / "archive/training/georgia/g1", "E1", ecg())
    build(tmp_path / "archive", tmp_path / "out", format="both")
    lines = findings(tmp_path / "out")
    assert [line.split(":")[0] for line in lines] == [TAR, ZARR] * found
    assert all(line.endswith("contains -32768, which is not allowed") for line in lines)


def test_a_damaged_crop_does_not_hide_what_else_differs(small, copy):
    flip(copy / TAR, 70_000)
    found = findings(copy, fast=True, sources=open_sources(str(small)))
    assert len(found) == 1 and "fails its crc32c" in found[0]


def test_findings_that_are_not_listed_are_counted(copy):
    for number in range(MAX_FINDINGS + 5):
        (copy / "shards" / f"copy-{number:02d}.tar").touch()
    listed = [f"shards/copy-{number:02d}.tar: not a part of the dataset" for number in range(20)]
    more = "shards/: 5 more findings like these are not listed"
    assert findings(copy, fast=True) == [*listed, more]


def test_the_command_prints_findings_and_exits_1(copy, shell):
    not_read = "not read: the contents of shards/ and store.zarr"
    assert not_read not in shell.run("verify", copy, "--workers", 1)[0]
    assert not_read in shell.run("verify", copy, "--workers", 1, "--fast")[0]
    (copy / TAR).unlink()
    assert f"{TAR}: missing file" in shell.run("verify", copy, "--workers", 1, code=1)[0]
