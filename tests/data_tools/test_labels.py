"""Label tables of archives: right labels, and nothing else from the archives' tables."""

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from handmade import build, ecg, header, write_challenge
from twins import CODE15_COLUMNS, PTBXL_COLUMNS, write_code15, write_mimic, write_table

from omnilead.data_tools.__main__ import main
from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.data_tools.labels.archives import CODE15
from omnilead.data_tools.labels.mimic_iv_ecg import CODES, NUMBERS, REPORTS, statement_codes
from omnilead.data_tools.synthetic.archive import synthesise
from omnilead.engine.evaluation.results import load_task
from omnilead.engine.tasks.labels import read_task

SHARED = Path(__file__).parents[3] / "shared"
MIMIC_COLUMNS = " ".join(
    ["subject_id study_id cart_id ecg_time", *REPORTS, "bandwidth filtering", *NUMBERS]
)


def rows(table: Path) -> dict[str, dict[str, Any]]:
    return {row["record"]: row for row in pq.read_table(table).to_pylist()}


def labelled(table: Path) -> dict[str, set[str]]:
    known = rows(table).items()
    return {
        record: {name for name, value in row.items() if value == 1 and name != "fold"}
        for record, row in known
    }


def assert_no_secret(out: Path) -> None:
    for path in out.iterdir():
        text = (
            path.read_bytes()
            if path.suffix == ".json"
            else repr(pq.read_table(path).to_pylist()).encode()
        )
        assert b"SECRET" not in text + path.read_bytes() + path.name.encode(), path


@pytest.mark.skipif(not (SHARED / "ecg2").exists(), reason="needs the shared ECGs")
@pytest.mark.parametrize("place", ["ecg2/ptbxl100", "ecg2/ptbxl500", "ecg/ptb-xl"])
def test_ptbxl_labels_equal_an_independent_implementation(tmp_path: Path, place: str) -> None:
    """Against label sets of MERL, whose names lack underscores at the end."""
    for path in (
        SHARED / place / "ptbxl_database.csv",
        SHARED / "ecg2" / "ptbxl100" / "scp_statements.csv",
    ):
        shutil.copy(path, tmp_path)
    assert main(["labels", "ptbxl", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    right = SHARED / (
        "ecg2/ptbxl_labels_of_shared.csv"
        if place.startswith("ecg/")
        else f"{place}/ptbxl_database.csv"
    )
    theirs = list(csv.DictReader(right.open()))
    known = rows(tmp_path / "out" / "ptbxl-likelihood.parquet")
    sets = {
        "superdiagnostic": "superclass",
        "subdiagnostic": "subclass",
        "form": "form",
        "rhythm": "rhythm",
    }
    for name, column in sets.items():
        table = tmp_path / "out" / f"ptbxl-{name}.parquet"
        ours, folds = labelled(table), {record: row["fold"] for record, row in rows(table).items()}
        compared = 0
        for row in theirs:
            record = f"HR{int(row['ecg_id']):05d}"
            if row[column] and record in known:
                assert {label.strip("_") for label in ours[record]} == {
                    one.strip("_") for one in row[column].split(";")
                }
                assert folds[record] == int(row["strat_fold"])
                compared += 1
        assert compared >= 20


@pytest.fixture(scope="module")
def ptbxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statements of four records, one of them without a diagnosis."""
    root = tmp_path_factory.mktemp("ptbxl")
    synthesise(root / "synthetic", 1, 0, layout="ptbxl", progress=False)
    shutil.copy(root / "synthetic" / "scp_statements.csv", root)
    codes = [
        "{'NORM': 100.0, 'SR': 0.0}",
        "{'LAFB': 0.0, 'CRBBB': 80.0}",
        "{'SR': 0.0, 'SECRET name': 100.0}",
    ]
    codes += ["{'NST_': 'SECRET'}", "SECRET {"]
    table = [
        {"ecg_id": 7 + i, "scp_codes": text, "strat_fold": 10 - i} for i, text in enumerate(codes)
    ]
    write_table(root / "ptbxl_database.csv", PTBXL_COLUMNS, table)
    assert main(["labels", "ptbxl", str(root), "--out", str(root / "out")]) == 0
    return root


def test_ptbxl_label_sets_are_right(ptbxl: Path) -> None:
    found = {path.stem: labelled(path) for path in (ptbxl / "out").glob("*.parquet")}
    assert found["ptbxl-superdiagnostic"] == {
        "HR00007": {"NORM"},
        "HR00008": {"CD"},
        "HR00010": {"STTC"},
    }
    assert found["ptbxl-subdiagnostic"] == {
        "HR00007": {"NORM"},
        "HR00008": {"LAFB/LPFB", "CRBBB"},
        "HR00010": {"NST_"},
    }
    assert found["ptbxl-diagnostic"]["HR00008"] == {"LAFB", "CRBBB"}
    assert found["ptbxl-form"] == {"HR00010": {"NST_"}}
    assert found["ptbxl-rhythm"] == {"HR00007": {"SR"}, "HR00009": {"SR"}}
    assert found["ptbxl-all"]["HR00007"] == {"NORM", "SR"} and len(found["ptbxl-all"]) == 4
    table = rows(ptbxl / "out" / "ptbxl-likelihood.parquet")
    assert (table["HR00008"]["CRBBB"], table["HR00008"]["LAFB"], table["HR00008"]["NORM"]) == (
        80.0,
        0.0,
        None,
    )
    assert [row["fold"] for row in table.values()] == [10, 9, 8, 7, 6]
    columns = pq.read_table(ptbxl / "out" / "ptbxl-superdiagnostic.parquet").column_names
    assert columns == ["source", "record", "CD", "NORM", "STTC", "fold"]
    facts = json.loads((ptbxl / "out" / "ptbxl-superdiagnostic.json").read_text())
    assert facts["labels"]["CD"].pop("means").startswith("conduction disturbance: ")
    assert facts["labels"]["CD"] == {"known": 3, "positive": 1}
    assert facts["records"] == 3 and set(facts["sha256"]) == {
        "ptbxl_database.csv",
        "scp_statements.csv",
    }
    assert_no_secret(ptbxl / "out")


def test_labels_match_the_dataset_and_the_shipped_tasks(tmp_path: Path) -> None:
    """Also with pseudonyms."""
    archive, key = tmp_path / "archive", tmp_path / "key"
    synthesise(archive, 12, 1, layout="ptbxl", progress=False)
    key.write_bytes(b"0123456789abcdef")
    key.chmod(0o600)
    made = build(archive, tmp_path / "data", pseudonym_key=None, plan="all")
    assert main(["labels", "ptbxl", str(archive), "--out", str(tmp_path / "plain")]) == 0
    plain = rows(tmp_path / "plain" / "ptbxl-all.parquet")
    assert {(row["source"], name) for name, row in plain.items()} == set(
        zip(made.column("source"), made.column("record"), strict=True)
    )
    for table in (tmp_path / "plain").glob("ptbxl-[!l]*.parquet"):
        labels = read_task(replace(load_task(table.stem), labels=str(table)), [made])
        folds = {record: row["fold"] for record, row in rows(table).items()}
        numbers = [folds.get(record, 0) for record in made.column("record")]
        assert labels.split[0].tolist() == [
            0 if not fold else max(1, fold - 7) for fold in numbers
        ]  # 1-8, 9, 10
    arguments = [
        "shard",
        str(archive),
        "--out",
        str(tmp_path / "hidden"),
        "--pseudonymize",
        str(key),
        "--workers",
        "1",
    ]
    assert main(arguments) == 0
    assert (
        main(
            [
                "labels",
                "ptbxl",
                str(archive),
                "--out",
                str(tmp_path / "same"),
                "--pseudonymize",
                str(key),
            ]
        )
        == 0
    )
    hidden = rows(tmp_path / "same" / "ptbxl-all.parquet")
    assert set(hidden) == set(Dataset.open(str(tmp_path / "hidden")).column("record")) and not set(
        hidden
    ) & set(plain)


def test_code15_labels_are_right(tmp_path: Path) -> None:
    known = {
        "RBBB": "True",
        "SB": "False",
        "ST": "False",
        "AF": "",
        "normal_ecg": "False",
        "is_male": "True",
        "age": "93",
    }
    exams = [
        known
        | {"exam_id": 1169160, "1dAVb": "False", "LBBB": "False", "death": "True", "timey": "1.5"},
        {"exam_id": 2873686, "1dAVb": "True", "age": 40, "death": "", "timey": ""},
    ]
    write_table(tmp_path / "exams.csv", CODE15_COLUMNS, exams)
    assert main(["labels", "code15", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    first, second = rows(tmp_path / "out" / "code15.parquet").values()
    assert first == {
        "source": "code15", "record": "1169160", "1dAVb": 0, "RBBB": 1, "is_male": 1, "age": 90.0, "death": 1, "timey": 1.5,
    }  # fmt: skip
    assert (second["1dAVb"], second["RBBB"], second["age"], second["death"], second["timey"]) == (
        1,
        None,
        40.0,
        None,
        None,
    )
    assert_no_secret(tmp_path / "out")
    assert set(load_task("code15").columns) <= set(CODE15)


def test_physionet2021_labels_equal_those_of_the_dataset(small: Path, tmp_path: Path) -> None:
    made = build(small, tmp_path / "data", plan="all")
    assert main(["labels", "physionet2021", str(small), "--out", str(tmp_path / "out")]) == 0
    scored, every = (
        labelled(tmp_path / "out" / f"physionet2021-{name}.parquet") for name in ("scored", "all")
    )
    table = made.table(["source", "record", "dx", "labels"]).to_pylist()
    for row in table:
        assert scored[row["record"]] == {
            name for name, there in zip(CLASSES, row["labels"], strict=True) if there
        }
        assert every[row["record"]] == set(row["dx"])
    assert set(scored) >= {row["record"] for row in table}


def test_unreadable_headers_of_the_challenge_are_counted(tmp_path: Path) -> None:
    place = tmp_path / "training" / "georgia" / "g1"
    write_challenge(place, "E00001", ecg())
    (place / "E00002.hea").write_text(header("E00009", ecg()))
    (place / "E00003.hea").write_text(header("E00003", ecg(), comments=["# Dx: SECRET,426783006"]))
    assert main(["labels", "physionet2021", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    facts = json.loads((tmp_path / "out" / "physionet2021-all.json").read_text())
    assert (facts["records"], list(facts["labels"])) == (2, ["426783006"])
    assert "(1 of 3 headers are unreadable or duplicates)" in facts["about"]
    assert_no_secret(tmp_path / "out")


def named(text: str) -> tuple[set[str], set[str]]:
    stated, hedged = statement_codes(text)
    return tuple(
        {code for i, code in enumerate(CODES) if bits >> i & 1} for bits in (stated, hedged)
    )  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "stated", "hedged"),
    [
        ("Sinus rhythm with borderline 1st degree A-V block", "SR", "1AVB"),
        ("Atrial fibrillation with rapid ventricular response", "AFIB RVR", ""),
        ("Sinus rhythm with PAC(s)", "SR PAC", ""),
        ("with frequent multifocal PVCs or aberrant ventricular conduction", "", "PVC"),
        ("Atrial-sensed ventricular-paced rhythm", "PACE", ""),
        ("Pacemaker rhythm - no further analysis", "PACE UNREAD", ""),
        ("*** Consider acute ST elevation MI ***", "", "MI ACUTE STE"),
        ("--- Warning: Data quality may affect interpretation ---", "QUAL", ""),
        ("Inferior infarct - age undetermined", "MI IMI", ""),
        ("Possible inferior infarct - age undetermined", "", "MI IMI"),
        ("Anterolateral infarct, old", "MI AMI LMI", ""),
        ("Inferior/lateral ST-T changes may be due to myocardial ischemia", "STTC", "ISC"),
        ("Inferior ST elevation, CONSIDER ACUTE INFARCT", "STE", "MI ACUTE"),
        ("ST junctional depression is nonspecific", "STD", ""),
        ("Probable  junctional rhythm", "", "JUNC"),
        ("Prolonged QT - consider ischemia, electrolyte imbalance, drug effects", "LNGQT", "ISC"),
        ("RBBB with RAD - possible left posterior fascicular block", "CRBBB RAD", "LPFB"),
        ("Incomplete left bundle branch block", "ILBBB", ""),
        ("Left ventricular hypertrophy by voltage only", "VCLVH", ""),
        ("Minimal voltage criteria for LVH, may be normal variant", "VCLVH", "LVH"),
        ("Poor R wave progression - cannot rule out anteroseptal infarct", "PRWP", "MI AMI"),
        ("Abnormal R-wave progression, early transition", "", ""),
        ("Q in V1/V2 may be normal variant but septal infarct cannot be excluded", "", "MI AMI"),
        ("Small inferior Q waves noted: probably normal ECG", "QWAVE", "NORM"),
        ("ABNORMAL ECG", "ABNORM", ""),
        ("Borderline abnormal ECG", "BORDER", ""),
        ("Normal ECG except for rate", "", ""),
        ("Wandering atrial pacemaker", "EAR", ""),
        ("Supraventricular tachycardia", "TACHY SVTAC", ""),
        ("2nd degree A-V block, Mobitz I (Wenckebach)", "2AVB", ""),
        ("Sinus rhythm - no PACs, without left axis deviation", "SR", ""),
        ("No further analysis made because of pacemaker rhythm", "PACE UNREAD", ""),
        ("*** INFERIOR INFARCT - POSSIBLY ACUTE ***", "MI IMI", "ACUTE"),
        ("Lateral T wave abnormality is borderline", "", "TAB"),
        ("Sinus rhythm with 2:1 A-V block", "SR 2AVB", ""),
        ("Atrial flutter with 2:1 A-V block", "AFLT", ""),
        ("Multiple premature complexes, vent & supraven", "PAC PVC", ""),
        ("Summary: SECRET of Mr. Pace, a patient", "", ""),
        ("", "", ""),
    ],
)
def test_statements_give_the_right_codes(text: str, stated: str, hedged: str) -> None:
    assert named(text) == (set(stated.split()), set(hedged.split()))


def mimic_row(study: int, *reports: str, **numbers: object) -> dict[str, object]:
    said = dict.fromkeys(REPORTS, "") | dict(zip(REPORTS, reports, strict=False))
    plain = dict(zip(NUMBERS, (800, 40, 128, 170, 258, 518, 81, 77, 65), strict=True))
    return {"study_id": study} | said | plain | numbers


def test_mimic_labels_and_intervals_are_right(tmp_path: Path) -> None:
    table = [
        mimic_row(40000001, "Sinus rhythm", "", "Possible LEFT axis deviation", "Abnormal\nECG"),
        mimic_row(
            40000002,
            "Pacemaker rhythm - no further analysis",
            "SECRET Meier",
            p_onset=29999,
            p_end=29999,
            p_axis=32767,
        ),
        mimic_row(40000003, p_end=29999, rr_interval=65535, t_axis=-32768, qrs_end=150),
        mimic_row(40000004, "Left axis deviation", "SECRET, 5th floor", rr_interval=""),
    ]
    write_table(tmp_path / "machine_measurements.csv", MIMIC_COLUMNS, table)
    assert main(["labels", "mimic-iv-ecg", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    stated = rows(tmp_path / "out" / "mimic-iv-ecg-statements.parquet")
    codes = ("SR", "ABNORM", "LAD", "PACE", "UNREAD")
    assert {name: [row[code] for code in codes] for name, row in stated.items()} == {
        "40000001": [1, 1, None, 0, 0],
        "40000002": [None, None, None, 1, 1],
        "40000004": [0, 0, 1, 0, 0],
    }
    measured = rows(tmp_path / "out" / "mimic-iv-ecg-intervals.parquet")
    names = ("RR", "P", "PR", "QRS", "QT", "P_axis", "QRS_axis", "T_axis")
    assert [measured["40000001"][name] for name in names] == [800, 88, 130, 88, 348, 81, 77, 65]
    assert [measured["40000002"][name] for name in names] == [
        800,
        None,
        None,
        88,
        348,
        None,
        77,
        65,
    ]
    assert [measured["40000003"][name] for name in names] == [
        None,
        None,
        None,
        None,
        348,
        None,
        77,
        None,
    ]
    assert measured["40000004"]["RR"] is None
    assert (
        "pattern list 1"
        in json.loads((tmp_path / "out" / "mimic-iv-ecg-statements.json").read_text())["about"]
    )
    assert_no_secret(tmp_path / "out")


@pytest.mark.parametrize("name", ["code15", "mimic-iv-ecg"])
def test_labels_have_the_datasets_names(name: str, tmp_path: Path) -> None:
    """Also with pseudonyms."""
    archive, key = tmp_path / "archive", tmp_path / "key"
    if name == "code15":
        write_code15(archive, {1169160: {}, 2873686: {}})
    else:
        write_mimic(archive, {"41420867": "10001725", "45090959": "10001726"})
        measured = [mimic_row(int(study), "Sinus rhythm") for study in ("41420867", "45090959")]
        write_table(archive / "machine_measurements.csv", MIMIC_COLUMNS, measured)
    key.write_bytes(b"0123456789abcdef")
    key.chmod(0o600)
    names = []
    for hidden in ([], ["--pseudonymize", str(key)]):
        data, out = tmp_path / f"data{len(hidden)}", tmp_path / f"labels{len(hidden)}"
        assert (
            main(
                [
                    "shard",
                    str(archive),
                    "--out",
                    str(data),
                    "--plan",
                    "all",
                    "--workers",
                    "1",
                    *hidden,
                ]
            )
            == 0
        )
        assert main(["labels", name, str(archive), "--out", str(out), *hidden]) == 0
        made = Dataset.open(str(data)).table(["source", "record"]).to_pylist()
        for table in out.glob("*.parquet"):
            labelled_rows = pq.read_table(table, columns=["source", "record"]).to_pylist()
            assert len(made) == 2 and sorted(labelled_rows, key=str) == sorted(made, key=str)
        names.append({row["record"] for row in made})
    assert not names[0] & names[1]


@pytest.mark.parametrize(
    ("archive", "table", "words"),
    [
        ("ptbxl", None, "no scp_statements.csv: copy it from PTB-XL's release"),
        ("ptbxl", {"strat_fold": "x"}, "strat_fold is not 1 to 10 in every row"),
        ("code15", None, "missing file: exams.csv"),
        ("code15", "exam_id,age\n1,2\n", "no column 1dAVb, AF, LBBB"),
        ("code15", {"exam_id": "a b"}, "exams.csv: 'a b' is not a record's id"),
        ("mimic-iv-ecg", None, "missing file: machine_measurements.csv"),
        ("mimic-iv-ecg", "study_id,report_0\n1,x\n", "machine_measurements.csv: Column 'report_1'"),
        ("mimic-iv-ecg", mimic_row(1, "Sinus rhythm", t_end="soon"), "conversion error to float"),
        ("physionet2021", None, "no readable header of the Challenge"),
    ],
)
def test_bad_tables_give_a_one_line_error(
    tmp_path: Path, archive: str, table: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "src"
    root.mkdir()
    name = {"ptbxl": "ptbxl_database.csv", "code15": "exams.csv"}.get(
        archive, "machine_measurements.csv"
    )
    columns = {"ptbxl": PTBXL_COLUMNS, "code15": CODE15_COLUMNS}.get(archive, MIMIC_COLUMNS)
    if isinstance(table, str):
        (root / name).write_text(table)
    elif table is not None:
        write_table(root / name, columns, table if isinstance(table, list) else [table])
        (root / "scp_statements.csv").write_text(
            ",description,diagnostic,form,rhythm,diagnostic_class,diagnostic_subclass\n"
        )
    assert main(["labels", archive, str(root), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("name", ["statement", "Unnamed: 0", "description"])
def test_statements_are_read_from_the_first_column_whatever_its_name(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    synthesise(tmp_path / "src", 20, layout="ptbxl", progress=False)
    command = ["labels", "ptbxl", str(tmp_path / "src"), "--out"]
    assert main([*command, str(tmp_path / "right")]) == 0
    table = tmp_path / "src" / "scp_statements.csv"
    header, *lines = table.read_text().splitlines()
    if name == "description":  # the column of names is lost
        table.write_text("\n".join(line.partition(",")[2] for line in (header, *lines)))
        assert main([*command, str(tmp_path / "out")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(
            "scp_statements.csv: the first column, before description, is missing: restore the file"
        )
        return
    table.write_text("\n".join([name + header, *lines]))
    assert main([*command, str(tmp_path / "out")]) == 0
    tables = sorted(path.name for path in (tmp_path / "right").glob("*.parquet"))
    assert len(tables) > 4 and tables == sorted(
        path.name for path in (tmp_path / "out").glob("*.parquet")
    )
    for one in tables:
        assert (tmp_path / "out" / one).read_bytes() == (tmp_path / "right" / one).read_bytes()


def test_the_temporary_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    synthesise(tmp_path / "src", 5, layout="ptbxl", progress=False)
    command = ["labels", "ptbxl", str(tmp_path / "src"), "--out", str(tmp_path / "out")]
    kill = (
        "from omnilead.data_tools import storage; import os, sys; storage.publish = lambda "
        "*paths: os.kill(os.getpid(), 9)"
    )
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{kill}; from omnilead.data_tools.__main__ import main; main({command})",
        ],
        check=False,
    )
    assert run.returncode == -9
    (left,) = (tmp_path / "out").iterdir()
    running = left.with_name(f".other.parquet.{socket.gethostname()}.{os.getpid()}")
    running.touch()  # of a process that is still writing
    (tmp_path / "out" / ".mine.7").touch()
    assert main(command) == 0
    assert sorted(path.name for path in (tmp_path / "out").glob(".*")) == [".mine.7", running.name]


def test_paths_that_do_not_exist_give_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert (
        main(["labels", "code15", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 2
    )
    assert main(["labels", "code15", str(tmp_path), "--out", str(tmp_path / "file")]) == 2
    nowhere, file = capsys.readouterr().err.splitlines()
    assert "cannot list" in nowhere and "File exists" in file
