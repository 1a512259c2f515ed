"""Folders of hospitals' files: formats mixed, files that are none, names, and XML of unknown
origin."""

import errno
import itertools
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pytest
from binary_ecgs import edf
from handmade import build, crops_of, ecg, everything_in, write_challenge
from hospital_cases import SHARED, decoded
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dicom import BASE, TRUTH, group
from test_dicom import file as dicom_file
from test_muse_xml import lead_xml, muse, steps
from twins import write_wfdb

from omnilead.data_tools import storage
from omnilead.data_tools.__main__ import main
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.errors import ReadError, StorageError
from omnilead.data_tools.hospital.base import Decoded
from omnilead.data_tools.hospital.files import FORMATS, HospitalFiles
from omnilead.data_tools.record import LEADS, VENDORS
from omnilead.data_tools.sources import open_sources
from omnilead.data_tools.sources.base import read_safely
from omnilead.data_tools.splits import RoleSources
from omnilead.data_tools.storage import folder
from omnilead.data_tools.verify import verify
from omnilead.engine.data.leakage import patient_ids

UID = "1.2.840.113619.2.5.1762583153.215519.978957063.78"


def mixed(root: Path) -> Path:
    (root / "a" / "b").mkdir(parents=True)
    files = {
        "a/one.xml": muse().encode(),
        f"a/b/{UID}": BASE,
        f"a/b/{UID}9": dicom_file(x00100020=("LO", "12")),
        "two.DCM": BASE,
    }
    files |= {
        "a/report.pdf": b"%PDF-1.7 ...",
        "notes.txt": b"",
        "a/other.xml": b"<html/>",
        "cut.dcm": BASE[:9000],
        "a/DICOMDIR": BASE,
        "a/IM1": BASE.ljust(FORMATS["dicom"].max_bytes + 1),
    }
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


def test_a_mixed_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "shard",
        str(mixed(tmp_path / "src")),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    assert main(command) == 0
    messages = capsys.readouterr().err
    assert "--pseudonymize KEYFILE" in messages and messages.count("were left out") == 1
    assert "3 files of no known format were left out (1 .pdf, 1 .txt, 1 no ending)" in messages
    made = Dataset.open(str(tmp_path / "out"))
    named = f"a_b_{UID.replace('.', '_')}"
    assert set(crops_of(made)) == {
        ("muse-xml", "a_one"),
        ("dicom", "two"),
        ("dicom", named),
        ("dicom", f"{named}9"),
    }
    assert sorted(made.rejects()) == [
        ("dicom", "a_IM1", "file too large", f"a/IM1: {2**24 + 1} bytes"),
        ("dicom", "cut", "malformed DICOM", "cut.dcm: cut off"),
        (
            "hospital",
            "a_other",
            "unknown format",
            "a/other.xml: its root is html: none of " + ", ".join(FORMATS),
        ),
    ]
    assert (
        main(
            ["verify", str(tmp_path / "out"), "--archive", str(tmp_path / "src"), "--workers", "1"]
        )
        == 0
    )


def test_with_a_key_no_message_names_a_file_or_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that cannot be listed, files of no known format, and an archive of which nothing is
    known."""
    src, key = mixed(tmp_path / "src"), tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    (src / "scan.JOHNDOE").touch()
    (src / "JOHN_DOE_1951").mkdir()
    (tmp_path / "unknown" / "JOHN_DOE_1951").mkdir(parents=True)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "JOHN_DOE_1951").symlink_to(src)
    options = ["--out", str(tmp_path / "out"), "--workers", "1", "--pseudonymize", str(key)]
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("DOE_1951"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        assert main(["shard", str(src), "--source", "hospital", *options]) == 2
    assert main(["shard", str(src), *options]) == 0
    for name in ("unknown", "link"):
        assert main(["shard", str(tmp_path / name), *options]) == 2
    said = capsys.readouterr()
    assert (
        f"cannot list a folder in {src} (`find {src} -type d ! -readable` names it): Permission "
        "denied" in said.err
    )
    assert "4 files of no known format were left out\n" in said.err and "one is a link" in said.err
    content = everything_in(Dataset.open(str(tmp_path / "out"))).decode("latin-1")
    for text in (said.out, said.err, content):
        assert (
            not re.search("john|1951", text, re.IGNORECASE) and "--pseudonymize KEYFILE" not in text
        )


def test_with_a_key_no_error_of_object_storage_names_an_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0)
    root = folder("memory://private", private=True)
    for error in (
        PermissionError("private/JOHN_DOE"),
        TimeoutError("no answer for private/JOHN_DOE"),
    ):
        monkeypatch.setattr(type(root.fs), "find", mock.Mock(side_effect=error))
        with pytest.raises(
            StorageError, match=r"memory://private: .*(PermissionError|TimeoutError)"
        ) as said:
            list(root.names("JOHN_DOE"))
        assert "JOHN" not in str(said.value)


def test_beside_wfdb_records_they_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wfdb(mixed(tmp_path / "src"), "rec_1", "16", LEADS)
    assert (
        main(
            [
                "shard",
                f"{tmp_path}/src",
                "--out",
                f"{tmp_path}/out",
                "--plan",
                "all",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    message = " and 3 more: move them to a folder of their own and give it as well\n"
    assert message in capsys.readouterr().err and {
        kind for kind, _ in crops_of(Dataset.open(f"{tmp_path}/out"))
    } == {"wfdb"}


def test_beside_a_known_archive_they_are_left_out_and_counted(tmp_path: Path) -> None:
    write_challenge(tmp_path / "src" / "training" / "georgia" / "g1", "E00001", ecg())
    for name in ("one.xml", "ward/two.DCM"):
        (tmp_path / "src" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "src" / name).write_bytes(b"")
    (source,) = open_sources(f"{tmp_path}/src", hospital=HospitalFiles)
    assert (
        source.name == "physionet2021"
        and "leaves out 2 files that look like ECGs: one.xml: " in source.notes()[-1]
    )


def test_a_folder_named_training_is_no_archive_without_records(tmp_path: Path) -> None:
    (tmp_path / "src" / "training").mkdir(parents=True)
    for name in ("one.xml", "training/two.xml"):
        (tmp_path / "src" / name).write_text(muse())
    (source,) = open_sources(f"{tmp_path}/src", hospital=HospitalFiles)
    assert [*source.keys()] == ["one.xml", "training/two.xml"] and source.name == "hospital"


def test_one_format_of_a_mixed_folder(tmp_path: Path) -> None:
    (source,) = open_sources(str(mixed(tmp_path / "src")), "muse-xml", hospital=HospitalFiles)
    assert [*source.keys()] == ["a/one.xml"] and source.source_of("a/one.xml") == "muse-xml"


def test_a_mixed_folder_in_a_bucket() -> None:
    files = {f"a/{UID}": BASE, "empty.txt": b"", "one.xml": muse().encode(), "report.pdf": b"%PDF"}
    for name, content in files.items():
        fsspec.filesystem("memory").pipe(f"/mixed/{name}", content)
    (source,) = open_sources("memory://mixed", hospital=HospitalFiles)
    assert sorted(record.source for record in source) == ["dicom", "muse-xml"]
    assert "2 files of no known format were left out (1 .pdf, 1 .txt)" in source.notes()[0]


def test_a_file_that_a_store_denies_once_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").pipe(f"/once/{UID}", BASE)
    answer, denials = storage.RemoteFolder._range, [FileNotFoundError()]

    def denied(self: storage.RemoteFolder, name: str, start: int, size: int) -> bytes:
        if denials:
            raise denials.pop()
        return answer(self, name, start, size)

    monkeypatch.setattr(storage.RemoteFolder, "_range", denied)
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0)
    assert [*HospitalFiles(folder("memory://once")).keys()] == [UID]


def test_show_draws_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixed(tmp_path / "src")
    assert main(["show", f"{tmp_path}/src/two.DCM", "--png", f"{tmp_path}/one.png"]) == 0
    assert (
        "two.DCM: 12 leads, 500 Hz, 5 s" in capsys.readouterr().out
        and (tmp_path / "one.png").stat().st_size > 10_000
    )
    assert main(["show", f"{tmp_path}/src/notes.txt"]) == 2
    assert (
        "notes.txt would be refused: unknown format: none of muse-xml, dicom"
        in capsys.readouterr().err
    )


def test_show_prints_one_line_for_a_damaged_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(data: bytes) -> Decoded:
        raise TypeError("of a bug")

    monkeypatch.setitem(FORMATS, "dicom", FORMATS["dicom"]._replace(decode=decode))
    assert main(["show", str(mixed(tmp_path / "src") / "two.DCM")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "two.DCM would be refused: unreadable record: TypeError" in err


def test_names_that_lose_letters_or_are_cut_stay_different(tmp_path: Path) -> None:
    source, long = HospitalFiles(folder(tmp_path)), "x" * 64
    same = {
        "a (1).xml": "a_1_",
        "1.2.3/4.5": "1_2_3_4_5",
        f"{long}.xml": long,
        "ward 7/Smith, J.xml": "ward_7_Smith_J",
    }
    assert {key: source.name_for(key) for key in same} == same
    keys = [
        "李四.xml",
        "王五.xml",
        "a [1].xml",
        "a {1}.xml",
        "Jürgen.xml",
        "Jörgen.xml",
        "李/1.xml",
        "王/1.xml",
        "\udce4.xml",
    ]
    names = [
        source.name_for(key)
        for key in [*same, *keys, f"{long}1.xml", f"{long}2.xml", f"ward/{long}"]
    ]
    assert len(set(names)) == len(names) and max(map(len, names)) == 64
    assert all(re.fullmatch("[A-Za-z0-9_-]+", name) for name in names)
    for seed, name in enumerate(keys[:2]):
        (tmp_path / name).write_text(
            muse("".join(lead_xml(lead, one + seed) for lead, one in steps().items()))
        )
    made = build(tmp_path, tmp_path / "out", plan="all")
    assert not made.rejects() and len(set(made.column("record"))) == 2


@pytest.mark.parametrize(
    ("factor", "plausible"), [(0.03, False), (0.2, True), (1, True), (8, False)]
)
def test_amplitudes_that_no_heart_has_are_noted_in_every_format(
    tmp_path: Path, factor: float, plausible: bool
) -> None:
    leads = "".join(
        lead_xml(name, one, LeadAmplitudeUnitsPerBit=4.88 * factor) for name, one in steps().items()
    )
    (tmp_path / "one.xml").write_text(muse(leads))
    (tmp_path / "one.dcm").write_bytes(
        dicom_file(group(TRUTH, {"x003a0210": ("DS", str(2.5 * factor))}))
    )
    x = dict(zip(LEADS, ecg() // 2, strict=True))
    (tmp_path / "one.edf").write_bytes(
        edf(x, scale=(-32768 * factor, round(32767 * factor), -32768, 32767))
    )
    for record in HospitalFiles(folder(tmp_path)):
        assert [reason for reason, _ in record.warnings] == (
            [] if plausible else ["implausible amplitude"]
        )


@pytest.mark.parametrize("plan", ["all", "paper", "paper-split"])
def test_records_of_an_implausible_amplitude_are_for_pre_training_only_if_asked_for(
    tmp_path: Path, plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src").mkdir()
    for number, high in enumerate(
        (32767, 327670, 32767)
    ):  # the second file states ten times the scale
        x = dict(zip(LEADS, ecg(seed=number) // 2, strict=True))
        (tmp_path / "src" / f"{number}.edf").write_bytes(
            edf(x, scale=(-high - 1, high, -32768, 32767))
        )
    command = ["shard", f"{tmp_path}/src", "--plan", plan, "--workers", "1", "--out"]
    for option, pretrained in (([], {"0", "2"}), (["--pretrain-implausible"], {"0", "1", "2"})):
        out = f"{tmp_path}/out{len(option)}"
        assert main([*command, out, *option]) == 0
        noted = (
            "note: 1 crop left out of pre-training: no heart has such an amplitude"
            in capsys.readouterr().err
        )
        assert noted == (not option)
        rows = Dataset.open(out).table().to_pylist()
        assert {row["record"] for row in rows if "implausible" in row["flags"]} == {"1"}
        assert {row["record"] for row in rows if row["pretrain"]} == pretrained
        assert plan == "all" or {row["record"] for row in rows if row["id_role"]} == pretrained
        assert (
            verify(Dataset.open(out), open_sources(f"{tmp_path}/src", hospital=HospitalFiles)) == []
        )
    assert main([*command, f"{tmp_path}/out0", "--pretrain-implausible"]) == 2
    assert "already finished (pretrain_implausible was False, not True)" in capsys.readouterr().err


def test_samples_that_were_not_measured_do_not_count_in_the_amplitude(tmp_path: Path) -> None:
    gaps = {lead: np.where(np.arange(len(uv)) % 2, -32768 * 2.5, uv) for lead, uv in TRUTH.items()}
    (tmp_path / "one.dcm").write_bytes(dicom_file(group(gaps)))
    assert not HospitalFiles(folder(tmp_path)).read("one.dcm").warnings


def test_long_names_are_shortened_and_stay_different(tmp_path: Path) -> None:
    for name in (f"{UID}/{UID}.1", f"{UID}/{UID}.2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(BASE)
    names = {record.name for record in HospitalFiles(folder(tmp_path))}
    assert len(names) == 2 and {len(name) for name in names} == {64}


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Anonymous",
        "000000",
        "xxx",
        "0",
        "-",
        "UNK",
        "NoID",
        "No ID",
        "Unidentified",
        "TEST",
        "not available",
    ],
)
def test_what_stands_for_an_unknown_patient_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "one").write_bytes(dicom_file(x00100020=("LO", text)))
    assert HospitalFiles(folder(tmp_path)).read("one").patient is None


def test_patients_of_different_ids_stay_different(tmp_path: Path) -> None:
    ids = [
        "4711",
        f"{UID}.1",
        f"{UID}.2",
        "A/7",
        "B/7",
        "7",
        "Ü 7",
        "Ö 7",
        "x.1",
        "x.2",
        "7" * 63 + "8",
        "7" * 64 + "8",
    ]
    for number, text in enumerate(ids):
        (tmp_path / f"{number}.xml").write_text(muse().replace("4711", text), encoding="utf-8")
    found = build(tmp_path, tmp_path / "out", plan="all").table(["record", "patient"]).to_pylist()
    patients = {row["record"]: row["patient"] for row in found}
    assert (
        len(set(patients.values())) == len(ids)
        and patients["0"] == "4711"
        and max(map(len, patients.values())) == 64
    )


def test_a_constant_lead_was_not_measured_and_nothing_is_computed_from_it(tmp_path: Path) -> None:
    flat = steps() | {"I": np.zeros_like(steps()["I"])}
    (tmp_path / "one.xml").write_text(
        muse("".join(lead_xml(name, one) for name, one in flat.items()))
    )
    assert HospitalFiles(folder(tmp_path)).read("one.xml").leads == (
        "II",
        "V1",
        "V2",
        "V3",
        "V4",
        "V5",
        "V6",
    )
    (tmp_path / "two.dcm").write_bytes(dicom_file(x00100020=("LO", "12")))
    whole = HospitalFiles(folder(tmp_path)).read("two.dcm")
    assert set(whole.leads) == set(LEADS) and np.ptp(whole.signal, axis=1).all()


def test_a_large_file_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "one.xml").write_bytes(b"<RestingECG>" + b" " * FORMATS["muse-xml"].max_bytes)
    found = read_safely(HospitalFiles(folder(tmp_path)).read, "one.xml")
    assert isinstance(found, ReadError) and found.reason == "file too large"


@pytest.mark.parametrize("key", [None, bytes(32)])
def test_a_patient_has_one_role_whatever_the_format(tmp_path: Path, key: bytes | None) -> None:
    (tmp_path / "src").mkdir()
    for seed in range(2):
        leads = "".join(lead_xml(name, one + seed) for name, one in steps().items())
        (tmp_path / "src" / f"{seed}.xml").write_text(muse(leads))  # of patient 4711, too
    (tmp_path / "src" / "2.dcm").write_bytes(BASE)
    roles = RoleSources(id=("muse-xml",), id_share=1.0)
    made = build(tmp_path / "src", tmp_path / "out", role_sources=roles, pseudonym_key=key)
    rows = made.table(["source", "patient", "id_role", "pretrain"]).to_pylist()
    assert sorted((row["source"], str(row["id_role"]), row["pretrain"]) for row in rows) == [
        ("dicom", "None", False),
        ("muse-xml", "gallery", False),
        ("muse-xml", "probe", False),
    ]
    assert len({row["patient"] for row in rows}) == 1 == len(set(patient_ids([made])[0].tolist()))


def test_the_sources_that_share_patients_are_the_formats() -> None:
    assert (
        set(VENDORS) == set(FORMATS) and VENDORS[0] == "muse-xml"
    )  # whose pseudonyms all of them have


@given(st.binary(max_size=300), st.sampled_from(["", "one.xml", "one.scp", "one.edf"]))
@settings(max_examples=40)
def test_no_bytes_make_a_format_fail(data: bytes, name: str) -> None:
    """Looking at a file never raises, and decoding it raises a ReadError only."""
    for kind, one in FORMATS.items():
        head = (
            b""
            if len(data) % 2
            else (
                BASE[:140] if kind == "dicom" else b"<RestingECG>" if "xml" in kind else b"0       "
            )
        )
        one.looks_like(head + data, name)
        assert isinstance(decoded(kind, head + data), ReadError)


TRIPLE = {
    "hl7-aecg": "aecg_fda_example.xml",
    "dicom": "same_as_aecg.dcm",
    "scp-ecg": "same_as_aecg.scp",
}


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared files")
def test_one_recording_in_three_formats_is_one_crop(tmp_path: Path) -> None:
    present = {kind: name for kind, name in TRIPLE.items() if kind in FORMATS}
    for name in present.values():
        shutil.copy(SHARED / name, tmp_path)
    made = crops_of(build(tmp_path, tmp_path / "out", plan="all"))
    assert {kind for kind, _ in made} == set(present)
    for (one,), (other,) in itertools.pairwise(made.values()):
        np.testing.assert_array_equal(one["x"], other["x"])
        assert one["waveform"] == other["waveform"]
