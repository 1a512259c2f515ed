"""Folders of hospitals' files: real files, formats mixed, files that are none, and names."""

import errno
import itertools
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pytest
from handmade import build, crops_of, everything_in, write_files
from hospital_cases import decoded
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dicom import BASE, TRUTH, group
from test_dicom import file as dicom_file
from test_muse_xml import TRUTH as STORED
from test_muse_xml import X, muse

from omnilead.__main__ import main
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.ecg.record import VENDORS
from omnilead.data_tools.io import storage
from omnilead.data_tools.io.errors import ReadError, StorageError
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.sharding.finishing import read_rejects
from omnilead.data_tools.sharding.roles import RoleSources
from omnilead.data_tools.show import show_record
from omnilead.data_tools.sources.base import prepare_record
from omnilead.data_tools.sources.detect import open_sources
from omnilead.data_tools.sources.hospital_files import HOSPITAL_FORMATS, HospitalFiles
from omnilead.engine.data.patients import patient_ids

SHARED = Path(__file__).parents[3] / "shared" / "formats"
UID = "1.2.840.113619.2.5.1762583153.215519.978957063.78"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs the shared files")


def opened(root, kind="auto"):
    (source,) = open_sources(str(root), kind)
    return source


def read_one(place, name, content):
    return HospitalFiles(folder(write_files(place, {name: content}))).read(name)


# A `-` stands for what is unknown
REAL = """
aecg_3lead_1khz.xml              hl7-aecg      6  10000  1000.0  106_ABC           -     -
aecg_fda_example.xml             hl7-aecg     12   5000   500.0  SBJ-123           46.0  M
philips_104_ad4d_as_aecg.xml     hl7-aecg     12   5500   500.0  20044             -     F
dicom_12lead_mortara.dcm         dicom        12  10000  1000.0  -                 42.0  F
same_as_aecg.dcm                 dicom        12   5000   500.0  SBJ-123           -     M
edf_contec.edf                   edf           6  37855   800.0  -                 -     -   implausible amplitude
muse_example1.xml                muse-xml     12   5000   500.0  -                 -     -
muse_example2.xml                muse-xml     12   5000   500.0  -                 -     -
muse_example4.xml                muse-xml     12   5000   500.0  -                 -     -
philips_103_mrx.xml              philips-xml  12   5000   500.0  1112010721168bdc  50.0  M
philips_10401_tc.xml             philips-xml  12   5000   500.0  -                 -     -
philips_10401_wrong_encoding.xml philips-xml  12   5000   500.0  -                 -     -
philips_104_ad4d.xml             philips-xml  12   5000   500.0  -                 -     F
philips_104_demo.xml             philips-xml  12   5000   500.0  -                 -     M
same_as_aecg.scp                 scp-ecg      12   5000   500.0  SBJ-123           -     M
scp_contec_truncated.scp         scp-ecg       6  32767   800.0  -                 -     -   shorter than stated
"""


@needs_shared
@pytest.mark.parametrize("line", REAL.strip().splitlines())
def test_real_files_give_the_microvolts_that_independent_decoders_found(line):
    file, kind, *facts = line.split()
    head, right = (SHARED / file).read_bytes()[:4096], np.load(SHARED / f"{file}.npz")
    assert [name for name, one in HOSPITAL_FORMATS.items() if one.looks_like(head, file)] == [kind]
    record = HospitalFiles(folder(SHARED)).read(file)
    leads, samples = record.signal.shape
    notes = " ".join(reason for reason, _ in record.warnings)
    said = (leads, samples, record.fs_hz, record.patient, record.age, record.sex)
    assert [*("-" if fact is None else str(fact) for fact in said), *notes.split()] == facts
    assert right["fs_hz"] == record.fs_hz
    truth = dict(zip(right["leads"].tolist(), right["signal_uv"], strict=True))
    for lead, uv in zip(record.leads, record.signal, strict=True):
        if lead in truth:  # others are computed
            np.testing.assert_allclose(uv, truth[lead][:samples], atol=1e-3)


@needs_shared
def test_a_real_file_with_13_samples_is_refused():
    source = HospitalFiles(folder(SHARED))
    assert (
        str(prepare_record(source, "bad_aecg_no_waveform.xml"))
        == "too short: 0.026 s, 5 s at least"
    )


@needs_shared
def test_one_recording_in_three_formats_is_one_crop(tmp_path):
    for name in ("aecg_fda_example.xml", "same_as_aecg.dcm", "same_as_aecg.scp"):
        shutil.copy(SHARED / name, tmp_path)
    made = crops_of(build(tmp_path, tmp_path / "out", plan="all"))
    assert {kind for kind, _ in made} == {"hl7-aecg", "dicom", "scp-ecg"}
    for (one,), (other,) in itertools.pairwise(made.values()):
        np.testing.assert_array_equal(one["x"], other["x"])
        assert one["waveform"] == other["waveform"]


def mixed(root):
    files = {
        "a/one.xml": muse(),
        f"a/b/{UID}": BASE,
        f"a/b/{UID}9": dicom_file(x00100020_LO="12"),
        "two.DCM": BASE,
        "a/report.pdf": b"%PDF-1.7 ...",
        "notes.txt": b"",
        "a/other.xml": "<html/>",
        "cut.dcm": BASE[:9000],
        "a/DICOMDIR": BASE,
        "a/IM1": BASE.ljust(HOSPITAL_FORMATS["dicom"].max_bytes + 1),
    }
    return write_files(root, files)


def test_a_mixed_folder(tmp_path, shell):
    src, out = mixed(tmp_path / "src"), tmp_path / "out"
    messages = shell.shard(src, out)
    assert "--pseudonymize KEYFILE" in messages
    assert messages.count("were left out") == 1
    assert "3 files of no known format were left out (1 .pdf, 1 .txt, 1 no ending)" in messages
    made = Dataset.open(str(out))
    named = f"a_b_{UID.replace('.', '_')}"
    dicoms = {("dicom", name) for name in ("two", named, f"{named}9")}
    assert set(crops_of(made)) == dicoms | {("muse-xml", "a_one")}
    none_of = f"a/other.xml: its root element is html: not a file of {', '.join(HOSPITAL_FORMATS)}"
    assert sorted(read_rejects(made)) == [
        ("dicom", "a_IM1", "file too large", f"a/IM1: {2**24 + 1} bytes"),
        ("dicom", "cut", "malformed DICOM", "cut.dcm: the file is cut off"),
        ("hospital", "a_other", "unknown format", none_of),
    ]
    shell.verify(out, src)


def test_with_a_key_no_message_names_a_file_or_folder(tmp_path, key_file, shell, monkeypatch):
    """A folder that cannot be listed, files of no known format, and an archive of which nothing is
    known."""
    src = mixed(tmp_path / "src")
    (src / "scan.JOHNDOE").touch()
    (src / "JOHN_DOE_1951").mkdir()
    (tmp_path / "unknown" / "JOHN_DOE_1951").mkdir(parents=True)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "JOHN_DOE_1951").symlink_to(src)
    out, scandir, said = tmp_path / "out", os.scandir, ""

    def sharded(place, *options, code=0):
        words = ("shard", place, "--out", out, "--workers", 1, "--pseudonymize", key_file)
        return "".join(shell.run(*words, *options, code=code))

    def refuse(path):
        if str(path).endswith("DOE_1951"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        said += sharded(src, "--source", "hospital", code=2)
    said += sharded(src)
    for name in ("unknown", "link"):
        said += sharded(tmp_path / name, code=2)
    find = f"`find {src} -type d ! -readable` names it"
    assert f"cannot list a folder in {src} ({find}): Permission denied" in said
    assert "4 files of no known format were left out\n" in said
    assert "one is a link" in said
    content = everything_in(Dataset.open(str(out))).decode("latin-1")
    assert not re.search("john|1951|--pseudonymize KEYFILE", said + content, re.IGNORECASE)


@pytest.mark.parametrize("error", [PermissionError, TimeoutError])
def test_with_a_key_no_error_of_object_storage_names_an_object(monkeypatch, error):
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0)
    root = folder("memory://private", private=True)
    failing = mock.Mock(side_effect=error("no answer for private/JOHN_DOE"))
    monkeypatch.setattr(type(root.fs), "find", failing)
    with pytest.raises(StorageError, match=f"memory://private: .*{error.__name__}") as said:
        list(root.names("JOHN_DOE"))
    assert "JOHN" not in str(said.value)


def test_a_folder_named_training_is_no_archive_without_records(tmp_path):
    source = opened(write_files(tmp_path, dict.fromkeys(("one.xml", "training/two.xml"), muse())))
    assert source.name == "hospital"
    assert [*source.keys()] == ["one.xml", "training/two.xml"]


def test_one_format_of_a_mixed_folder(tmp_path):
    source = opened(mixed(tmp_path / "src"), "muse-xml")
    assert [*source.keys()] == ["a/one.xml"]
    assert source.source_of("a/one.xml") == "muse-xml"


def test_a_mixed_folder_in_a_bucket():
    files = {f"a/{UID}": BASE, "empty.txt": b"", "one.xml": muse().encode(), "report.pdf": b"%PDF"}
    for name, content in files.items():
        fsspec.filesystem("memory").pipe(f"/mixed/{name}", content)
    source = opened("memory://mixed")
    assert sorted(record.source for record in source) == ["dicom", "muse-xml"]
    assert "2 files of no known format were left out (1 .pdf, 1 .txt)" in source.notes()[0]


def test_a_file_that_a_store_denies_once_is_not_left_out(monkeypatch):
    fsspec.filesystem("memory").pipe(f"/once/{UID}", BASE)
    answer, denials = storage.RemoteFolder._range, [FileNotFoundError()]

    def denied(self, name, start, size):
        if denials:
            raise denials.pop()
        return answer(self, name, start, size)

    monkeypatch.setattr(storage.RemoteFolder, "_range", denied)
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0)
    assert [*HospitalFiles(folder("memory://once")).keys()] == [UID]


def test_show_draws_one_file(tmp_path, capsys, monkeypatch):
    mixed(tmp_path)
    assert main(["show", f"{tmp_path}/two.DCM", "--png", f"{tmp_path}/one.png"]) == 0
    said = capsys.readouterr().out
    assert "two.DCM: 12 leads, 500 Hz, 5 s" in said
    assert "heart rate or axis" in said and "(computed, not a diagnosis)\n" in said
    assert (tmp_path / "one.png").stat().st_size > 10_000
    (tmp_path / "notes.dat").write_text("no ECG")
    assert main(["show", f"{tmp_path}/notes.dat"]) == 2
    refusal = "notes.dat: `omnilead shard` would refuse this record: unknown format: not a file of muse-xml, dicom"
    assert refusal in capsys.readouterr().err
    broken = mock.Mock(side_effect=TypeError("of a bug"))
    monkeypatch.setitem(
        HOSPITAL_FORMATS, "dicom", HOSPITAL_FORMATS["dicom"]._replace(decode=broken)
    )
    assert main(["show", f"{tmp_path}/two.DCM"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "two.DCM: `omnilead shard` would refuse this record: unreadable record: TypeError" in line
    )


def test_names_that_lose_letters_or_are_cut_stay_different(tmp_path):
    source, long = HospitalFiles(folder(tmp_path)), "x" * 64
    same = {
        "a (1).xml": "a_1_",
        "1.2.3/4.5": "1_2_3_4_5",
        f"{long}.xml": long,
        "ward 7/Smith, J.xml": "ward_7_Smith_J",
    }
    assert {key: source.name_for(key) for key in same} == same
    others = "李四 王五 Jürgen Jörgen 李/1 王/1 \udce4 a[1] a{1} ".replace(" ", ".xml ").split()
    cut = [f"{long}1.xml", f"{long}2.xml", f"ward/{long}", f"{UID}/{UID}.1", f"{UID}/{UID}.2"]
    names = [source.name_for(key) for key in (*same, *others, *cut)]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) == 64
    assert all(re.fullmatch("[A-Za-z0-9_-]+", name) for name in names)
    for seed, name in enumerate(others[:2]):
        write_files(tmp_path, {name: muse({lead: uv + 10 * seed for lead, uv in STORED.items()})})
    made = build(tmp_path, tmp_path / "out", plan="all")
    assert not read_rejects(made)
    assert len(set(made.column("record"))) == 2


@pytest.mark.parametrize(
    ("factor", "notes"),
    [(0.02, ["implausible amplitude"]), (0.2, []), (1, []), (8, ["implausible amplitude"])],
)
def test_amplitudes_that_no_heart_has_are_noted(tmp_path, factor, notes):
    content = dicom_file(group(TRUTH, {"x003a0210_DS": str(2.5 * factor)}))
    warnings = read_one(tmp_path, "one.dcm", content).warnings
    assert [reason for reason, _ in warnings] == notes


def test_a_picture_says_what_it_leaves_out_and_what_is_doubtful(tmp_path):
    minutes = {lead: np.tile(uv, 60) for lead, uv in TRUTH.items()}
    seconds = len(minutes["I"]) / 500
    content = dicom_file(group(minutes, {"x003a0210_DS": "20"}))
    figure = show_record(str(write_files(tmp_path, {"one.dcm": content}) / "one.dcm"))
    said = " ".join(text.get_text() for text in figure.texts)
    none = "no heart rate or axis: no beats that are alike (computed, not a diagnosis)"
    assert f"first 10 of {seconds:.3g} s. {none}. implausible amplitude: " in said


def test_samples_that_were_not_measured_do_not_count_in_the_amplitude(tmp_path):
    gaps = {lead: np.where(np.arange(len(uv)) % 2, -32768 * 2.5, uv) for lead, uv in TRUTH.items()}
    assert not read_one(tmp_path, "one.dcm", dicom_file(group(gaps))).warnings


NOBODY = """
ANONYMOUS
000000
xxx
0
-
UNK
NoID
No ID
Unidentified
TEST
not available"""


@pytest.mark.parametrize("text", NOBODY.splitlines())
def test_what_stands_for_an_unknown_patient_is_none(tmp_path, text):
    assert read_one(tmp_path, "one", dicom_file(x00100020_LO=text)).patient is None


def test_patients_of_different_ids_stay_different(tmp_path):
    same = ["4711", "7", "7" * 63 + "8"]
    others = [f"{UID}.1", f"{UID}.2", "A/7", "B/7", "Ü 7", "Ö 7", "x.1", "x.2", "7" * 64 + "8"]
    text, found = muse().replace("ISO-8859-1", "utf-8"), []
    for number, patient in enumerate(same + others):
        record = read_one(tmp_path, f"{number}.xml", text.replace("4711", patient))
        found.append(str(record.patient))
    assert found[: len(same)] == same
    assert len(set(found)) == len(found)
    assert max(map(len, found)) == 64


def test_a_constant_lead_was_not_measured_and_nothing_is_computed_from_it(tmp_path):
    record = read_one(tmp_path, "one.xml", muse(STORED | {"I": 0 * X["I"]}))
    assert set(record.leads) == STORED.keys() - {"I"}


def test_a_large_file_is_not_parsed(tmp_path):
    content = "<RestingECG>" + " " * HOSPITAL_FORMATS["muse-xml"].max_bytes
    with pytest.raises(ReadError, match="file too large"):
        read_one(tmp_path, "one.xml", content)


@pytest.mark.parametrize("key", [None, bytes(32)])
def test_a_patient_has_one_role_whatever_the_format(tmp_path, key):
    other = muse({lead: uv + 10 for lead, uv in STORED.items()})  # of patient 4711, too
    src = write_files(tmp_path / "src", {"0.xml": muse(), "1.xml": other, "2.dcm": BASE})
    roles = RoleSources(id=("muse-xml",), id_share=1.0)
    made = build(src, tmp_path / "out", role_sources=roles, pseudonym_key=key)
    rows = made.table(["source", "patient", "id_role", "pretrain"]).to_pylist()
    assert sorted((row["source"], str(row["id_role"]), row["pretrain"]) for row in rows) == [
        ("dicom", "None", False),
        ("muse-xml", "gallery", False),
        ("muse-xml", "probe", False),
    ]
    assert len({row["patient"] for row in rows}) == 1 == len(set(patient_ids([made])[0].tolist()))


def test_the_sources_that_share_patients_are_the_formats():
    assert set(VENDORS) == set(HOSPITAL_FORMATS)
    assert VENDORS[0] == "muse-xml"  # whose pseudonyms all of them have


ROOTS = {
    "hl7-aecg": "AnnotatedECG",
    "muse-xml": "RestingECG",
    "cardiosoft-xml": "CardiologyXML",
    "philips-xml": "restingecgdata",
}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "malformed XML"),
        ("<ROOT><", "malformed XML"),
        ('<?xml version="1.0" encoding="no-such"?><ROOT/>', "malformed XML"),
        ('<!DOCTYPE ROOT [<!ENTITY a "aaaa">]><ROOT>&a;</ROOT>', "XML entity"),
        ('<!DOCTYPE ROOT [<!ATTLIST x a CDATA "aaaa">]><ROOT/>', "XML entity"),
        ('<!DOCTYPE ROOT SYSTEM "x.dtd"><ROOT><x>&a;</x></ROOT>', "XML entity"),
        ("<ROOT>" + "<a>" * 40, "XML too deep"),
        ("<ROOT>" + "<a/>" * 20_000, "XML too large"),
    ],
    ids=range(8),
)
@pytest.mark.parametrize("kind", ROOTS)
def test_hostile_xml_is_refused_in_every_format(kind, text, reason):
    found = decoded(kind, text.replace("ROOT", ROOTS[kind]))
    assert isinstance(found, ReadError) and found.reason == reason


@given(st.binary(max_size=300), st.sampled_from(["", "one.xml", "one.scp", "one.edf"]))
@settings(max_examples=40)
def test_no_bytes_make_a_format_fail(data, name):
    """Looking at a file never raises, and decoding it raises a ReadError only."""
    begins = {"dicom": BASE[:140], "scp-ecg": b"0       ", "edf": b"0       "}
    for kind, one in HOSPITAL_FORMATS.items():
        head = b"" if len(data) % 2 else begins.get(kind, b"<RestingECG>")
        one.looks_like(head + data, name)
        assert isinstance(decoded(kind, head + data), ReadError)
