"""A shard is written once, with the roles that its crops are expected to have. Only where it turned
out otherwise is it written again, and the bytes do not depend on what was expected."""

import re

import numpy as np
import pytest
from handmade import build, ecg, files, no_roles, write_challenge
from twins import write_code15, write_mimic

from omnilead.data_tools.ecg.record import LEADS, EcgRecord
from omnilead.data_tools.io.storage import LocalFolder
from omnilead.data_tools.sharding import shard as building
from omnilead.data_tools.sharding.roles import RoleSources
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.base import Source

KEY = b"k" * 32
TABLE = "ecg_id,patient_id,age,sex,scp_codes,heart_axis\n"
LETTERS = {"cpsc_2018": "A", "georgia": "E", "ningbo": "JS", "ptb-xl": "HR"}
pytestmark = pytest.mark.usefixtures("small_shards")


@pytest.fixture
def again(monkeypatch):
    """The tars into which roles are written again."""
    names, patch = [], LocalFolder.patch

    def noted(self, name, *rest):
        names.append(name)
        return patch(self, name, *rest)

    monkeypatch.setattr(LocalFolder, "patch", noted)
    return names


def write(root, source, number, x, **options):
    place = root / "training" / source / "g1"
    write_challenge(place, f"{LETTERS[source]}{number:05d}", x, **options)
    return place / f"{LETTERS[source]}{number:05d}.hea"


def write_archive(root, numbers):
    """Of each database; PTB-XL's patients have three records, two of them the same number twice."""
    for number in numbers:
        for place, source in enumerate(LETTERS):
            write(root, source, number, ecg(seed=4 * number + place))
    rows = "".join(f"{number},{number % 8}.0,50,0,{{}},\n" for number in range(100))
    (root / "ptbxl_database.csv").write_text(TABLE + rows)
    return root


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Three ECGs are also in another database, under other names; two have a flag."""
    root = write_archive(tmp_path_factory.mktemp("roles") / "archive", range(16))
    for number in (2, 5, 7):
        write(root, "ningbo", 50 + number, ecg(seed=4 * number))
    for number in (60, 61):
        x = ecg(seed=number)
        x[6, :9] = 25_000
        write(root, "ningbo", number, x)
    return root


def assert_same_without(archive, made, out, monkeypatch, before=None, **options):
    """As when no crop is expected to have a role."""
    with monkeypatch.context() as patch:
        patch.setattr(building, "expected_roles", no_roles)
        if before:
            build(before, out, **options)
            options["append"] = True
        build(archive, out, **options)
    assert files(out) == files(made)


OPTIONS = {
    "paper": {},
    "paper-split": {"plan": "paper-split"},
    "all": {"plan": "all"},
    "all patients tested": {"role_sources": RoleSources(id_share=1.0)},
    "pseudonyms": {"pseudonym_key": KEY},
    "flags": {"role_sources": RoleSources(leave_out=("large",))},
    "flags and no roles": {"plan": "all", "role_sources": RoleSources(leave_out=("large",))},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_shard_is_written_twice(options, archive, again, tmp_path, monkeypatch):
    made = build(archive, tmp_path / "out", **options)
    assert again == []
    assert verify(made) == []
    assert_same_without(archive, tmp_path / "out", tmp_path / "other", monkeypatch, **options)
    assert len(again) > len(made.shards) / 2  # some crops have no role


@pytest.mark.parametrize("key", [None, KEY])
def test_patients_of_a_table_are_expected(key, archive, again, tmp_path, monkeypatch):
    table = tmp_path / "who.csv"
    rows = [f"{letter}{n:05d},{n % 5}" for letter in "AE" for n in range(16)]
    table.write_text("\n".join(["record,patient", *rows]))
    options = {"patients": str(table), "pseudonym_key": key}
    build(archive, tmp_path / "out", **options)
    assert again == []
    assert_same_without(archive, tmp_path / "out", tmp_path / "other", monkeypatch, **options)


def test_an_append_to_the_same_patients_writes_no_shard_twice(
    archive, again, tmp_path, monkeypatch
):
    more = write_archive(tmp_path / "more", range(16, 40))
    options = {"role_sources": RoleSources(id_share=1.0)}
    build(archive, tmp_path / "out", **options)
    made = build(more, tmp_path / "out", append=True, **options)
    assert again == []
    assert verify(made) == []
    options["before"] = archive
    assert_same_without(more, tmp_path / "out", tmp_path / "other", monkeypatch, **options)


@pytest.mark.parametrize("kind", ["code15", "mimic", "plug-in"])
def test_other_archives_say_their_patients_in_time(kind, again, tmp_path):
    roles = RoleSources(dx=("code15", "mine"), id=("mimic-iv-ecg",), id_share=1.0)
    if kind == "plug-in":
        shard([Mine(LocalFolder("/"))], ShardOptions(str(tmp_path / "out"), role_sources=roles))
    elif kind == "code15":
        write_code15(tmp_path / "in", {n: {"patient_id": n % 5} for n in range(1, 25)})
    else:
        write_mimic(tmp_path / "in", {f"{4 * 10**7 + n}": f"{10**7 + n % 5}" for n in range(24)})
    if kind != "plug-in":
        build(tmp_path / "in", tmp_path / "out", role_sources=roles)
    assert again == []


class Mine(Source):
    """Every patient has two ECGs, one of which another patient's record has, too."""

    name = "mine"

    def keys(self):
        return map(str, range(24))

    def read(self, key):
        number = int(key)
        signal = ecg(seed=number if number < 20 else number - 20)
        return EcgRecord(key, signal, 500.0, LEADS, "uV", source="mine", patient=str(number // 2))


def noted(capsys):
    """How many shards of how many, and crops."""
    found = re.findall(
        r"note: (\d+) of (\d+) shards are written again: (\d+) crops have other roles than the",
        capsys.readouterr().err,
    )
    return [tuple(map(int, numbers)) for numbers in found]


def test_after_a_late_refusal_only_shards_with_other_roles_are_written_again(
    archive, again, tmp_path, monkeypatch, capsys
):
    """A session on which identification is tested cannot be read: another one takes its place, or
    the patient is free for training."""
    options = {"role_sources": RoleSources(id_share=1.0)}
    expected = build(archive, tmp_path / "expected", **options).table().to_pylist()
    drawn = [row["record"] for row in expected if row["id_role"] in ("gallery", "probe")]
    broken = write_archive(tmp_path / "archive", range(16))
    next(broken.rglob(f"{drawn[0]}.mat")).write_bytes(b"")
    assert noted(capsys) == again == []
    made = build(broken, tmp_path / "out", **options)
    [(shards, every, crops)] = noted(capsys)
    assert 0 < shards == len(again) < every == len(made.shards)
    assert verify(made) == []
    again.clear()
    assert_same_without(broken, tmp_path / "out", tmp_path / "other", monkeypatch, **options)
    wrong = {row["record"]: row for row in expected}
    roles = ("pretrain", "dx_role", "id_role")
    others = [
        row["record"]
        for row in made.table().to_pylist()
        if any(row[name] != wrong[row["record"]][name] for name in roles)
    ]
    assert 0 < len(others) == crops


def test_copies_that_no_header_tells_are_written_again(again, tmp_path, monkeypatch, capsys):
    """A longer record begins with the same ten seconds: its header has other checksums."""
    root = write_archive(tmp_path / "archive", range(10))
    for number in range(10):
        x = np.concatenate([ecg(seed=4 * number), ecg(100, seed=1)], axis=1)
        write(root, "ningbo", 50 + number, x)
    made = build(root, tmp_path / "out")
    assert 0 < len(again) < len(made.shards)
    assert noted(capsys)[0][:2] == (len(again), len(made.shards))
    assert verify(made) == []
    assert_same_without(root, tmp_path / "out", tmp_path / "other", monkeypatch)


def test_headers_without_checksums_make_no_copies(again, tmp_path):
    for number in range(24):
        path = write(tmp_path / "archive", "cpsc_2018", number, ecg(seed=number))
        path.write_text(re.sub(r" \S+ \S+ 0 (\S+)$", r" 0 0 0 \1", path.read_text(), flags=re.M))
    build(tmp_path / "archive", tmp_path / "out")
    assert again == []
