"""Archives in the formats of real ones are read back bit for bit."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from handmade import build, crops_of, ecg, everything_in, write_challenge
from twins import (
    EXAMS,
    MIMIC_COLUMNS,
    PTBXL_COLUMNS,
    crop,
    read,
    said,
    write_code15,
    write_mimic,
    write_ptbxl,
    write_table,
    write_wfdb,
)

from omnilead.data_tools.__main__ import main
from omnilead.data_tools.build import ShardOptions, shard
from omnilead.data_tools.dataset import REJECTS, Dataset
from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.record import LEADS, EcgRecord
from omnilead.data_tools.sources import Prepared, Source, open_sources, prepared
from omnilead.data_tools.sources.code15 import Code15
from omnilead.data_tools.sources.mimic_iv_ecg import MimicIvEcg
from omnilead.data_tools.sources.physionet2021 import TABLE_PLACES, PhysioNet2021
from omnilead.data_tools.sources.ptbxl import PtbXl
from omnilead.data_tools.storage import folder
from omnilead.data_tools.verify import verify

# The Challenge's archive


@pytest.fixture
def challenge(tmp_path: Path) -> Path:
    """One record of each way in which its databases differ."""
    new = [
        "# Age: 78",
        "# Sex: Female",
        "# Dx: 427393009,426783006",
        "# Rx: Unknown",
        "# Hx: Unknown",
    ]
    old = [
        "#Age: NaN",
        "#Sex: Unknown",
        "#Dx: 426177001,",
        "#Rx: Unknown",
        "#Hx: Unknown",
        "#Sx: Unknown",
    ]
    at = tmp_path / "training"
    write_challenge(at / "georgia" / "g1", "E00001", ecg(seed=1), comments=new)
    write_challenge(at / "georgia" / "g11", "E10344", ecg(2500, 2), comments=new)
    write_challenge(
        at / "ningbo" / "g35", "JS45551", ecg(seed=3), comments=old, form="16+24 1000/mV 16 0"
    )
    write_challenge(
        at / "ptb-xl" / "g1", "HR00011", ecg(seed=4), comments=new, form="16x1+24 1000.0(0)/mv 16 0"
    )
    write_challenge(
        at / "ptb-xl" / "g22",
        "HR21837",
        ecg(seed=5),
        comments=new,
        form="16x1+24 1000.0(0)/mv 16 0",
    )
    write_challenge(
        at / "st_petersburg_incart" / "g1", "I0001", ecg(6000, 6), fs="257", comments=old
    )
    return tmp_path


CHALLENGE = {
    "E00001": "georgia",
    "E10344": "georgia",
    "JS45551": "ningbo",
    "HR00011": "ptb-xl",
    "HR21837": "ptb-xl",
}
CHALLENGE["I0001"] = "st_petersburg_incart"


def test_challenge_records_are_read_correctly(challenge: Path) -> None:
    records = read(PhysioNet2021(folder(challenge)))
    assert {name: record.source for name, record in records.items()} == CHALLENGE
    for seed, (name, record) in enumerate(((name, records[name]) for name in CHALLENGE), 1):
        np.testing.assert_array_equal(record.signal, ecg(record.signal.shape[1], seed), name)
        assert record.warnings == ()
    assert said(records["E00001"]) == (None, 78.0, "F", ("427393009", "426783006"))
    assert said(records["JS45551"]) == (None, None, None, ("426177001",))
    assert records["I0001"].fs_hz == 257
    (note,) = PhysioNet2021(folder(challenge)).notes()
    assert "no ptbxl_database.csv, so this archive's PTB-XL records have no patient" in note


@pytest.mark.parametrize("place", TABLE_PLACES)
def test_patients_of_the_challenge_come_from_ptbxls_table(challenge: Path, place: str) -> None:
    rows = [
        {"ecg_id": 11, "patient_id": "15709.0"},
        {"ecg_id": 21837.0, "patient_id": 8},
        {"ecg_id": 1, "patient_id": 9},
    ]
    write_table(challenge / place, PTBXL_COLUMNS, [*rows, {"ecg_id": 12, "patient_id": ""}])
    write_challenge(challenge / "training" / "ptb-xl" / "g1", "HR00012", ecg())
    records = read(PhysioNet2021(folder(challenge)))
    assert records["HR00012"].warnings == ()  # its row has no patient, but it has a row
    assert {name: record.patient for name, record in records.items() if record.patient} == {
        "HR00011": "15709",
        "HR21837": "8",
    }
    assert PhysioNet2021(folder(challenge)).notes() == []


def test_ptbxls_table_may_be_stored_elsewhere(challenge: Path, tmp_path: Path) -> None:
    write_table(
        tmp_path / "elsewhere" / "my table.csv",
        PTBXL_COLUMNS,
        [{"ecg_id": 11, "patient_id": "15709.0"}],
    )
    command = [
        "shard",
        str(challenge / "training"),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    assert main([*command, "--patients", str(tmp_path / "elsewhere" / "my table.csv")]) == 0
    crops = crops_of(Dataset.open(str(tmp_path / "out")))
    assert crops["ptb-xl", "HR00011"][0]["patient"] == "15709"
    assert crops["ptb-xl", "HR21837"][0]["patient"] is None
    assert (tmp_path / "out" / REJECTS).read_text().splitlines()[1:] == [
        "ptb-xl,HR21837,not in ptbxl_database.csv,"
    ]


@pytest.mark.parametrize("below", ["training", "training/georgia", "training/georgia/g1"])
def test_any_folder_of_the_challenge_may_be_the_root(challenge: Path, below: str) -> None:
    records = read(PhysioNet2021(folder(challenge / below)))
    assert records["E00001"].source == "georgia"


# PTB-XL's own release


def test_ptbxl_records_are_read_correctly(tmp_path: Path) -> None:
    rows: dict[int, dict[str, object]] = {
        11: {
            "patient_id": "15709.0",
            "sex": 1,
            "age": 300,
            "scp_codes": "{'AFIB': 0.0, 'CLBBB': 100.0, 'IMI': 15.0}",
        }
        | {"heart_axis": "LAD"},
        1000: {
            "patient_id": "15709.0",
            "sex": "0.0",
            "age": "17.5",
            "scp_codes": "{}",
            "heart_axis": " RAD ",
        },
        21837: {"patient_id": "", "sex": "", "age": "", "scp_codes": "", "heart_axis": "MID"},
    }
    made = write_ptbxl(tmp_path, rows)
    records = read(PtbXl(folder(tmp_path)))
    assert set(records) == set(made) == {"HR00011", "HR01000", "HR21837"}
    for name, x in made.items():
        np.testing.assert_array_equal(crop(records[name]), x)
        assert (records[name].source, records[name].warnings) == ("ptb-xl", ())
    assert said(records["HR00011"]) == ("15709", 90.0, "F", ("164889003", "164909002", "39732003"))
    assert said(records["HR01000"]) == ("15709", 17.5, "M", ("47665007",))
    assert said(records["HR21837"]) == (None, None, None, ())


@pytest.mark.parametrize(
    "text",
    [
        "__import__('pathlib').Path('PWNED').touch()",
        "{'NORM': __import__('pathlib').Path('PWNED').touch()}",
        "{[]: 1}",
        "{**{}}",
        "['AFIB']",
        "{1: 2, None: 3, ('AFIB',): 4}",
        "{'AFIB': 1",
        "\0",
        "-" * 100_000 + "1",
        "(" * 100_000,
        "{'AFIB': 1}" + " " * 5000 + "; import os",
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_scp_statements_are_parsed_and_never_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A text that is no dictionary of names costs the record its diagnoses, not its ECG."""
    monkeypatch.chdir(tmp_path)
    made = write_ptbxl(
        tmp_path / "archive", {7: {"patient_id": 3, "scp_codes": text, "heart_axis": "LAD"}}
    )
    record = read(PtbXl(folder(tmp_path / "archive")))["HR00007"]
    np.testing.assert_array_equal(record.signal, made["HR00007"])
    assert record.patient == "3"
    assert record.dx in (("39732003",), ("164889003", "39732003"))
    assert not (tmp_path / "PWNED").exists()


def test_a_record_that_the_table_lacks_is_read_with_a_warning(tmp_path: Path) -> None:
    write_ptbxl(tmp_path, {1: {}, 2: {}})
    write_table(tmp_path / "ptbxl_database.csv", PTBXL_COLUMNS, [{"ecg_id": 1, "patient_id": 5}])
    record = read(PtbXl(folder(tmp_path)))["HR00002"]
    assert (record.patient, record.warnings) == (None, (("not in ptbxl_database.csv", ""),))


@pytest.mark.parametrize("kind", ["ptbxl", "auto"])
def test_records100_alone_is_ptbxl(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"patient_id": 7, "sex": 1, "age": 60, "scp_codes": "{'AFIB': 0.0}"}
    write_ptbxl(tmp_path / "src", dict.fromkeys((1, 2, 3), row), fs=100)
    (tmp_path / "src" / "one.dcm").touch()
    given = ["--source", kind, "--id-share", "1", "--workers", "1"]
    assert main(["shard", str(tmp_path / "src"), "--out", str(tmp_path / "out"), *given]) == 0
    said = capsys.readouterr().err
    assert "no records500, so records100 is read" in said
    assert "leaves out 1 file that looks like an ECG: one.dcm" in said
    made = Dataset.open(str(tmp_path / "out"))
    assert made.meta["sources"][0]["licence"] == PtbXl.licence
    crops = crops_of(made)
    assert set(crops) == {("ptb-xl", f"HR0000{number}") for number in (1, 2, 3)}
    for (one,) in crops.values():
        assert (one["patient"], one["fs_source_hz"], one["dx"], one["sex"]) == (
            "7",
            100.0,
            ["164889003"],
            "F",
        )
        assert one["halves"] == 2
    assert made.meta["roles"]["id"]["probe"] == 1


def test_500_hz_is_preferred_to_100_hz(tmp_path: Path) -> None:
    write_ptbxl(tmp_path, {1: {}, 2: {}}, fs=100)
    write_ptbxl(tmp_path, {1: {}})
    (source,) = open_sources(str(tmp_path))
    assert [record.fs_hz for record in source] == [500.0] and source.notes() == []


def below_35_hz(crop_uv: np.ndarray) -> np.ndarray:
    """What both rates hold, without the ends."""
    spectrum = np.fft.rfft(crop_uv.astype(float))
    spectrum[:, 350:] = 0
    return np.fft.irfft(spectrum, crop_uv.shape[1])[:, 500:-500]


def test_real_records_are_the_same_at_100_and_500_hz(real_ecgs: Path) -> None:
    """The release's 100 Hz are 1 to 2 ms ahead of its 500 Hz, in all records alike."""
    more = real_ecgs.parent / "ecg2"
    if not (more / "ptbxl100").is_dir():
        pytest.skip("the real ECGs at 100 Hz are not here (../shared/ecg2)")
    originals = [
        source for place in (more / "ptbxl500", real_ecgs) for source in open_sources(str(place))
    ]
    at_500 = {source.name_for(key): (source, key) for source in originals for key in source.keys()}  # noqa: SIM118
    (source,) = open_sources(str(more / "ptbxl100"))
    alike = []
    for key in list(source.keys())[::8]:  # of all 358 the lowest is 0.987, and half are above 0.994
        if source.name_for(key) in at_500:
            slow, fast = prepared(source, key), prepared(*at_500[source.name_for(key)])
            assert isinstance(slow, Prepared) and isinstance(fast, Prepared) and slow.halves == (2,)
            for a, b in zip(
                below_35_hz(slow.crops_uv[0]), below_35_hz(fast.crops_uv[0]), strict=True
            ):
                if b.std() > 5:
                    alike.append(np.corrcoef(a, b)[0, 1])
                    assert a.std() == pytest.approx(b.std(), rel=0.05)
    assert len(alike) > 12 * 30 and min(alike) > 0.97 and np.median(alike) > 0.99


# MIMIC-IV-ECG


@pytest.mark.parametrize("listed", [True, False])
def test_mimic_records_are_read_correctly(tmp_path: Path, listed: bool) -> None:
    made = write_mimic(
        tmp_path, {"41420867": "10001725", "45090959": "10001725", "40000017": "19999987"}, listed
    )
    records = read(MimicIvEcg(folder(tmp_path)))
    assert [records[name].patient for name in made] == ["10001725", "10001725", "19999987"]
    for name, x in made.items():
        np.testing.assert_array_equal(crop(records[name]), x)
        assert said(records[name])[1:] == (None, None, ())
        assert (records[name].source, records[name].warnings) == ("mimic-iv-ecg", ())


def test_mimic_rows_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    write_mimic(tmp_path, {"41420867": "10001725", "41420868": "10001726"})
    good, other = (
        "files/p1000/p10001725/s41420867/41420867",
        "files/p1000/p10001726/s41420868/41420868",
    )
    paths = [f"{other}.hea", f"/{other}", f"../{other}", f"{other[:-1]}9", "/etc/passwd", ""]
    wrong = [("10001725", other), ("", other), *(("10001726", path) for path in paths)]
    rows = [{"subject_id": subject, "path": path} for subject, path in [("10001725", good), *wrong]]
    write_table(tmp_path / "record_list.csv", MIMIC_COLUMNS, rows)  # type: ignore[arg-type]
    source = MimicIvEcg(folder(tmp_path))
    first, *others = source.keys()
    assert source.read(first).patient == "10001725"
    assert len(others) == len(wrong)
    for key in others:
        with pytest.raises(ReadError, match="patient contradicts the path"):
            source.header(key)
        with pytest.raises(ReadError):
            source.read(key)


# Tables


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("exams.csv", lambda text: text.replace("patient_id", "patient"), "no column patient_id"),
        ("exams.csv", lambda text: text + '"' + "x" * 200_000, "field larger than"),
        (
            "ptbxl_database.csv",
            lambda text: text.replace("scp_codes", "c").replace("sex", "s"),
            "no column scp_codes, sex",
        ),
        ("ptbxl_database.csv", lambda text: "", "no column"),
        (
            "record_list.csv",
            lambda text: text.replace("subject_id", "subject"),
            "no column subject_id",
        ),
        ("record_list.csv", lambda text: text + "1," + "x" * 200_000, "field larger than"),
    ],
)
def test_an_unusable_table_stops_the_run_with_a_one_line_error(
    tmp_path: Path,
    table: str,
    change: Callable[[str], str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = tmp_path / "archive"
    write: dict[str, Callable[[], object]] = {
        "exams.csv": lambda: write_code15(root, EXAMS),
        "ptbxl_database.csv": lambda: write_ptbxl(root, {1: {}}),
        "record_list.csv": lambda: write_mimic(root, {"41420867": "10001725"}),
    }
    write[table]()
    (root / table).write_text(change((root / table).read_text()))
    assert main(["shard", str(root), "--out", str(tmp_path / "out"), "--workers", "1"]) == 2
    (error,) = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("note:")
    ]
    assert message in error and table in error


def test_a_truncated_table_or_one_saved_by_a_spreadsheet_is_read(tmp_path: Path) -> None:
    write_code15(tmp_path, EXAMS)
    path = tmp_path / "exams.csv"
    path.write_bytes(
        b"\xef\xbb\xbf" + path.read_bytes().replace(b"\r\n", b"\n").rstrip() + b"\n999,4"
    )
    records = [
        Code15(folder(tmp_path)).read(key)
        for key in ("exams_part0#0", "exams_part0#1", "exams_part1#0")
    ]
    assert [record.patient for record in records] == ["11", "11", "12"]


# A source of one's own


def test_the_custom_source_in_the_readme_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example in the README, word for word, through the command line."""
    readme = (Path(__file__).parents[2] / "data_tools" / "README.md").read_text()
    (tmp_path / "clinics.py").write_text(re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0])
    x = ecg(2500, 3)
    (tmp_path / "archive").mkdir()
    for name in ("one", "two"):
        np.savetxt(
            tmp_path / "archive" / f"{name}.csv",
            x.T / 1000.0,
            "%.3f",
            ",",
            header=",".join(LEADS),
            comments="",
        )
    (tmp_path / "archive" / "broken.csv").write_text("I,II\n1,x\n")
    command = ["shard", str(tmp_path / "archive"), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main([*command, "--source", f"{tmp_path}/clinics.py:Csv"]) == 0
    made = Dataset.open(str(tmp_path / "out"))
    assert made.meta["sources"][0]["licence"] == "internal"
    crops = crops_of(made)
    assert set(crops) == {("clinic", "one"), ("clinic", "two")}
    in_mv = EcgRecord("x", x / 1000.0, 250.0, LEADS)
    for rows in crops.values():
        np.testing.assert_array_equal(rows[0]["x"], crop(in_mv))
    (reject,) = Path(made.root.url, REJECTS).read_text().splitlines()[1:]
    assert reject == "clinic,broken,unreadable record,broken.csv: ValueError"
    assert "\n1 record refused; " in capsys.readouterr().out


class Named(Source):
    """Keys that are source/record."""

    def keys(self) -> Iterator[str]:
        return iter(["a-b/c", "a/b-c", f"{'s' * 40}/{'r' * 49}", f"{'s' * 40}/{'r' * 50}"])

    def read(self, key: str) -> EcgRecord:
        source, name = key.split("/")
        dx = ("MI", "164889003", "heart attack") if key == "a-b/c" else ("426783006",)
        return EcgRecord(name, ecg(seed=len(key)), 500.0, LEADS, gain=1000.0, dx=dx, source=source)


def test_invalid_record_names_are_refused_and_diagnoses_without_a_code_are_dropped(
    tmp_path: Path,
) -> None:
    made = shard([Named(folder(tmp_path))], ShardOptions(str(tmp_path / "out"), quiet=True))
    assert [(name, rows[0]["dx"]) for name, rows in sorted(crops_of(made).items())] == [
        (("a-b", "c"), ["164889003"]),
        (("s" * 40, "r" * 49), ["426783006"]),
    ]
    flag, *lines = sorted(made.rejects(), key=lambda line: line[2])
    assert flag[:3] == ("a-b", "c", "diagnosis without a code") and flag[3].startswith("2 ")
    assert lines == [
        (
            "s" * 40,
            "r" * 50,
            "record name",
            f"{'s' * 40}/{'r' * 50}: 100 characters in a shard, 99 at most",
        ),
        ("a", "b-c", "record read already", "a/b-c: another b-c came first"),
    ]
    assert b"heart attack" not in everything_in(made)
    assert verify(made, [Named(folder(tmp_path))]) == []


# Which archive is it?


def test_archives_are_detected_by_their_file_names(tmp_path: Path, challenge: Path) -> None:
    writers: dict[str, Callable[[Path], object]] = {
        "a": lambda root: write_ptbxl(root, {1: {}}),
        "b": lambda root: write_mimic(root, {"41420867": "10001725"}),
        "c": lambda root: write_code15(root, EXAMS),
        "d": lambda root: write_wfdb(root / "x" / "y", "rec_1", "16", LEADS),
    }
    for name, write in writers.items():
        write(tmp_path / "each" / name)

    def found(place: Path) -> list[tuple[str, str]]:
        return [
            (type(source).__name__, Path(source.root.url).name)
            for source in open_sources(str(place))
        ]

    assert found(challenge) == [("PhysioNet2021", challenge.name)]
    assert found(challenge / "training") == [("PhysioNet2021", "training")]
    for name, kind in zip("abcd", ("PtbXl", "MimicIvEcg", "Code15", "WfdbFolder"), strict=True):
        assert found(tmp_path / "each" / name) == [(kind, name)]
    assert found(tmp_path / "each") == [("PtbXl", "a"), ("MimicIvEcg", "b"), ("Code15", "c")]
    (tmp_path / "each" / "e").symlink_to(challenge)
    assert found(tmp_path / "each")[-1] == ("PhysioNet2021", challenge.name)


def test_ptbxls_own_release_beside_databases_of_the_challenge_is_read_once(tmp_path: Path) -> None:
    write_challenge(tmp_path / "georgia" / "g1", "E00001", ecg())
    write_ptbxl(tmp_path / "ptb-xl", {1: {"patient_id": 4}})
    write_mimic(tmp_path / "mimic", {"41420867": "10001725"})
    records = [record for source in open_sources(str(tmp_path)) for record in source]
    names = [("georgia", "E00001"), ("mimic-iv-ecg", "41420867"), ("ptb-xl", "HR00001")]
    assert [(record.source, record.name) for record in records] == names


@pytest.mark.parametrize("names", [[], ["notes.txt", "data/readme.md"], None])
def test_an_unknown_folder_is_an_error(
    tmp_path: Path, names: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "archive"
    for name in names or ():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    if names is not None:
        root.mkdir(exist_ok=True)
    assert main(["shard", str(root), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(root) in line


# What may not leave an archive

PEOPLE = {
    "HR48213577": "982451653",
    "418273645": "17382946",
    "915273648": "615243798",
}  # record: patient


def write_private(root: Path) -> None:
    """All tables full of secrets, and of each archive a record that is refused."""
    refused = {"patient_id": "615243799"}
    write_ptbxl(
        root / "a",
        {48213577: {"patient_id": "982451653.0"}, 48213578: {"patient_id": "982451654.0"}},
    )
    (root / "a/records500/48213000/48213578_hr.dat").write_bytes(b"")
    (root / "a/records500/48213000/48213579_hr.dat").write_bytes(b"")
    write_mimic(root / "b", {"418273645": "17382946", "418273646": "17382947"})
    table = root / "b" / "record_list.csv"
    table.write_text(
        table.read_text().replace("17382947,", "17382948,")
        + "\n".join(table.read_text().splitlines()[1:2])
    )
    write_code15(root / "c", {915273648: {"patient_id": "615243798"}, 915273649: refused})
    with h5py.File(root / "c" / "exams_part1.hdf5", "r+") as file:
        file["tracings"][:] = 0
    write_challenge(
        root / "d/training/georgia/g1",
        "E00001",
        ecg(seed=8),
        comments=["# Dx: SECRET Mr. Xavier", "# Hx: SECRET"],
    )


def test_a_dataset_has_no_private_columns_of_an_archives_tables(tmp_path: Path) -> None:
    write_private(tmp_path / "archive")
    made = build(tmp_path / "archive", tmp_path / "out", format="both")
    everything = everything_in(made)
    assert {name: rows[0]["patient"] for (_, name), rows in crops_of(made).items()} == PEOPLE | {
        "E00001": None
    }
    for word in (*PEOPLE, *PEOPLE.values(), "georgia"):
        assert word.encode() in everything  # the search finds what is there
    for secret in (b"SECRET", b"Xavier", b"recording_date", b"timey"):
        assert secret not in everything


def test_a_pseudonymized_dataset_has_no_original_ids(tmp_path: Path) -> None:
    write_private(tmp_path / "archive")
    made = build(
        tmp_path / "archive", tmp_path / "out", format="both", pseudonym_key=bytes(range(32))
    )
    everything = everything_in(made)
    assert made.meta["crops"] == 4
    ids = (
        "48213577 48213578 48213579 982451653 982451654 418273645 418273646 17382946 17382947 "
        "17382948"
    )
    ids += " 915273648 915273649 615243798 615243799 E00001 exams_part SECRET"
    for word in ids.split():
        assert word.encode() not in everything, word
    assert all(re.fullmatch(r"r[0-9a-f]{20}", name) for _, name in crops_of(made))
