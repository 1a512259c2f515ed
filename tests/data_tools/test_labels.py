"""Label tables of archives: right labels, and nothing else from the archives' tables."""

import csv
import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from handmade import build, ecg, files, header, write_challenge
from twins import (
    CODE15_COLUMNS,
    PTBXL_COLUMNS,
    write_code15,
    write_mimic,
    write_quality,
    write_table,
)

from omnilead.__main__ import main
from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.data_tools.ecg.record_tables import read_table
from omnilead.data_tools.io import storage
from omnilead.data_tools.published_labels.tables import (
    CODE15_NAMES,
    CODES,
    INTERVAL_COLUMNS,
    REPORT_COLUMNS,
    asserted_and_possible_codes,
)
from omnilead.data_tools.synthetic.archive import synthesise
from omnilead.downstream.evaluation.results import load_task
from omnilead.downstream.tasks.config import TaskConfig
from omnilead.downstream.tasks.labels import read_task
from omnilead.engine.settings.errors import ConfigError
from tests.forks import started
from tests.tables import tabulated

SHARED = Path(__file__).parents[3] / "shared"
MIMIC_COLUMNS = " ".join(
    [
        "subject_id study_id cart_id ecg_time",
        *REPORT_COLUMNS,
        "bandwidth filtering",
        *INTERVAL_COLUMNS,
    ]
)


def rows(path):
    return {row["record"]: row for row in pq.read_table(path).to_pylist()}


def tables(folder):
    return {path.stem: rows(path) for path in folder.glob("*.parquet")}


def labelled(table):
    """The labels of each record."""
    return {
        record: {name for name, value in row.items() if value == 1 and name != "fold"}
        for record, row in table.items()
    }


@pytest.fixture
def labels(shell, tmp_path):
    """Write the tables of an archive to tmp_path/out: nothing in them is a secret of the archive."""

    def labels(archive, root):
        out = tmp_path / "out"
        shell.run("labels", archive, root, "--out", out)
        assert b"SECRET" not in b"".join(files(out).values())
        assert "SECRET" not in str(tables(out))
        return tables(out)

    return labels


@pytest.mark.skipif(not (SHARED / "ecg2").exists(), reason="needs the shared ECGs")
@pytest.mark.parametrize(
    ("place", "theirs"),
    [
        ("ecg2/ptbxl100", "ecg2/ptbxl100/ptbxl_database.csv"),
        ("ecg2/ptbxl500", "ecg2/ptbxl500/ptbxl_database.csv"),
        ("ecg/ptb-xl", "ecg2/ptbxl_labels_of_shared.csv"),
    ],
)
def test_ptbxl_labels_equal_an_independent_implementation(place, theirs, labels, tmp_path):
    """Against label sets of MERL, whose names lack underscores at the end."""
    shutil.copy(SHARED / place / "ptbxl_database.csv", tmp_path)
    shutil.copy(SHARED / "ecg2" / "ptbxl100" / "scp_statements.csv", tmp_path)
    made = labels("ptbxl", tmp_path)
    with open(SHARED / theirs) as file:
        merl = {f"HR{int(row['ecg_id']):05d}": row for row in csv.DictReader(file)}
    columns = {"superdiagnostic": "superclass", "subdiagnostic": "subclass"}
    for name, column in (columns | {"form": "form", "rhythm": "rhythm"}).items():
        table = made[f"ptbxl-{name}"]
        compared = [one for one in merl if merl[one][column] and one in made["ptbxl-likelihood"]]
        assert len(compared) >= 20
        for record in compared:
            ours = {label.strip("_") for label in labelled(table)[record]}
            assert ours == {label.strip("_") for label in merl[record][column].split(";")}
            assert table[record]["fold"] == int(merl[record]["strat_fold"])


def test_ptbxl_label_sets_are_right(labels, tmp_path):
    """Statements of five records, some of them without a diagnosis."""
    synthesise(tmp_path / "synthetic", 1, 0, layout="ptbxl", progress=False)
    shutil.copy(tmp_path / "synthetic" / "scp_statements.csv", tmp_path)
    codes = [
        "{'NORM': 100.0, 'SR': 0.0}",
        "{'LAFB': 0.0, 'CRBBB': 80.0}",
        "{'SR': 0.0, 'SECRET name': 100.0}",
        "{'NST_': 'SECRET'}",
        "SECRET {",
    ]
    table = [
        {"ecg_id": 7 + i, "scp_codes": text, "strat_fold": 10 - i} for i, text in enumerate(codes)
    ]
    write_table(tmp_path / "ptbxl_database.csv", PTBXL_COLUMNS, table)
    made = labels("ptbxl", tmp_path)
    likelihood = made.pop("ptbxl-likelihood")
    found = {name.removeprefix("ptbxl-"): labelled(table) for name, table in made.items()}
    norm, blocks, rhythm, form = "HR00007", "HR00008", "HR00009", "HR00010"
    diagnoses = {norm: {"NORM"}, blocks: {"LAFB", "CRBBB"}, form: {"NST_"}}
    assert found == {
        "superdiagnostic": {norm: {"NORM"}, blocks: {"CD"}, form: {"STTC"}},
        "subdiagnostic": diagnoses | {blocks: {"LAFB/LPFB", "CRBBB"}},
        "diagnostic": diagnoses,
        "form": {form: {"NST_"}},
        "rhythm": {norm: {"SR"}, rhythm: {"SR"}},
        "all": diagnoses | {norm: {"NORM", "SR"}, rhythm: {"SR"}},
    }
    assert [likelihood[blocks][name] for name in ("CRBBB", "LAFB", "NORM")] == [80.0, 0.0, None]
    assert [row["fold"] for row in likelihood.values()] == [10, 9, 8, 7, 6]
    facts = json.loads((tmp_path / "out" / "ptbxl-superdiagnostic.json").read_text())
    assert facts["labels"]["CD"].pop("means").startswith("conduction disturbance: ")
    assert facts["labels"]["CD"] == {"known": 3, "positive": 1}
    assert facts["records"] == 3
    assert [*facts["sha256"]] == ["ptbxl_database.csv", "scp_statements.csv"]


def test_the_shipped_tasks_read_the_labels(labels, tmp_path):
    """And split them by PTB-XL's folds: 1 to 8, 9, 10."""
    synthesise(tmp_path / "archive", 12, 1, layout="ptbxl", progress=False)
    dataset = build(tmp_path / "archive", tmp_path / "data", plan="all")
    made = labels("ptbxl", tmp_path / "archive")
    del made["ptbxl-likelihood"]
    for name, table in made.items():
        task = replace(load_task(name), labels=str(tmp_path / "out" / f"{name}.parquet"))
        splits = read_task(task, [dataset]).split[0].tolist()
        for split, record in zip(splits, dataset.column("record"), strict=True):
            assert split == (max(1, table[record]["fold"] - 7) if record in table else 0)
    assert set(load_task("code15").columns) <= set(CODE15_NAMES)


def test_code15_labels_are_right(labels, tmp_path):
    exams = [
        {"exam_id": 1169160, "1dAVb": "False", "RBBB": "True", "AF": "", "age": "93"},
        {"exam_id": 2873686, "1dAVb": "True", "AF": "True", "age": 40, "death": "", "timey": ""},
        {"exam_id": 7, "1dAVb": "True", "age": 40, "death": "False", "timey": "-0.01"},
    ]
    exams[0] |= {"death": "True", "timey": "1.5"}
    write_table(tmp_path / "exams.csv", CODE15_COLUMNS, exams)
    (made,) = labels("code15", tmp_path).values()
    columns = ["source", "1dAVb", "RBBB", "AF", "age", "death", "timey"]
    assert {record: [row[name] for name in columns] for record, row in made.items()} == {
        "1169160": ["code15", 0, 1, None, 90.0, 1, 1.5],
        "2873686": ["code15", 1, None, 1, 40.0, None, None],
        "7": ["code15", 1, None, None, 40.0, 0, None],
    }


def test_physionet2021_labels_equal_those_of_the_dataset(small, labels, tmp_path):
    made = build(small, tmp_path / "data", plan="all").table()
    found = labels("physionet2021", small)
    scored = labelled(found["physionet2021-scored"])
    every = labelled(found["physionet2021-all"])
    for row in made.select(["record", "dx", "labels"]).to_pylist():
        has = {name for name, there in zip(CLASSES, row["labels"], strict=True) if there}
        assert (scored[row["record"]], every[row["record"]]) == (has, set(row["dx"]))


def test_ecg_arrhythmias_labels_have_the_challenges_names(labels, tmp_path):
    for name in ("JS00001", "JS10647"):
        write_challenge(tmp_path / "WFDBRecords/01/010", name, ecg())
    made = labels("ecg-arrhythmia", tmp_path)
    assert {record: row["source"] for record, row in made["ecg-arrhythmia-all"].items()} == {
        "JS00001": "chapman_shaoxing",
        "JS10647": "ningbo",
    }
    assert labelled(made["ecg-arrhythmia-scored"])["JS00001"] == {"NSR"}


@pytest.mark.parametrize("place", [".", "set-a"])
def test_the_labels_of_the_challenge_2011_are_its_lists(place, labels, tmp_path):
    names = ["good", "bad", "neither", "both"]
    lists = {"acceptable": ["good", "both"], "unacceptable": ["both", "bad"]}
    write_quality(tmp_path / place, dict.fromkeys(names, ecg()), **lists)
    (made,) = labels("physionet2011", tmp_path).values()
    assert {name: row["acceptable"] for name, row in made.items()} == {
        "good": 1,
        "bad": 0,
        "neither": None,
        "both": None,
    }


def test_unreadable_headers_of_the_challenge_are_counted(labels, tmp_path):
    place = tmp_path / "training" / "georgia" / "g1"
    write_challenge(place, "E00001", ecg())
    (place / "E00002.hea").write_text(header("E00009", ecg()))
    (place / "E00003.hea").write_text(header("E00003", ecg(), comments=["# Dx: SECRET,426783006"]))
    labels("physionet2021", tmp_path)
    facts = json.loads((tmp_path / "out" / "physionet2021-all.json").read_text())
    assert (facts["records"], list(facts["labels"])) == (2, ["426783006"])
    assert "(1 of 3 headers are unreadable or duplicates)" in facts["about"]


# A statement, the codes that it states, and those that it only hedges
STATEMENTS = """
Sinus rhythm with borderline 1st degree A-V block | SR | 1AVB
Atrial fibrillation with rapid ventricular response | AFIB RVR |
Sinus rhythm with PAC(s) | SR PAC |
with frequent multifocal PVCs or aberrant ventricular conduction |  | PVC
Atrial-sensed ventricular-paced rhythm | PACE |
Pacemaker rhythm - no further analysis | PACE UNREAD |
*** Consider acute ST elevation MI *** |  | MI ACUTE STE
--- Warning: Data quality may affect interpretation --- | QUAL |
Inferior infarct - age undetermined | MI IMI |
Possible inferior infarct - age undetermined |  | MI IMI
Anterolateral infarct, old | MI AMI LMI |
Inferior/lateral ST-T changes may be due to myocardial ischemia | STTC | ISC
Inferior ST elevation, CONSIDER ACUTE INFARCT | STE | MI ACUTE
ST junctional depression is nonspecific | STD |
Probable  junctional rhythm |  | JUNC
Prolonged QT - consider ischemia, electrolyte imbalance, drug effects | LNGQT | ISC
RBBB with RAD - possible left posterior fascicular block | CRBBB RAD | LPFB
Incomplete left bundle branch block | ILBBB |
Left ventricular hypertrophy by voltage only | VCLVH |
Minimal voltage criteria for LVH, may be normal variant | VCLVH | LVH
Poor R wave progression - cannot rule out anteroseptal infarct | PRWP | MI AMI
Abnormal R-wave progression, early transition |  |
Q in V1/V2 may be normal variant but septal infarct cannot be excluded |  | MI AMI
Small inferior Q waves noted: probably normal ECG | QWAVE | NORM
ABNORMAL ECG | ABNORM |
Borderline abnormal ECG | BORDER |
Normal ECG except for rate |  |
Wandering atrial pacemaker | EAR |
Supraventricular tachycardia | TACHY SVTAC |
2nd degree A-V block, Mobitz I (Wenckebach) | 2AVB |
Sinus rhythm - no PACs, without left axis deviation | SR |
No further analysis made because of pacemaker rhythm | PACE UNREAD |
*** INFERIOR INFARCT - POSSIBLY ACUTE *** | MI IMI | ACUTE
Lateral T wave abnormality is borderline |  | TAB
Sinus rhythm with 2:1 A-V block | SR 2AVB |
Atrial flutter with 2:1 A-V block | AFLT |
Multiple premature complexes, vent & supraven | PAC PVC |
Summary: SECRET of Mr. Pace, a patient |  |
"""


@pytest.mark.parametrize("row", tabulated(STATEMENTS), ids=lambda row: row[0])
def test_statements_give_the_right_codes(row):
    text, *codes = row
    for bits, names in zip(asserted_and_possible_codes(text), codes, strict=True):
        assert {code for i, code in enumerate(CODES) if bits >> i & 1} == set(names.split())


def mimic_row(study, *reports, **numbers):
    said = dict.fromkeys(REPORT_COLUMNS, "") | dict(zip(REPORT_COLUMNS, reports, strict=False))
    plain = dict(zip(INTERVAL_COLUMNS, (800, 40, 128, 170, 258, 518, 81, 77, 65), strict=True))
    return {"study_id": study} | said | plain | numbers


def test_mimic_labels_and_intervals_are_right(labels, tmp_path):
    no_p = {"p_onset": 29999, "p_end": 29999, "p_axis": 32767}
    unread = "Pacemaker rhythm - no further analysis"
    table = [
        mimic_row(1, "Sinus rhythm", "", "Possible LEFT axis deviation", "Abnormal\nECG"),
        mimic_row(2, unread, "SECRET Meier", **no_p),
        mimic_row(3, p_end=29999, rr_interval=65535, t_axis=-32768, qrs_end=150),
        mimic_row(4, "Left axis deviation", "SECRET, 5th floor", rr_interval=""),
    ]
    write_table(tmp_path / "machine_measurements.csv", MIMIC_COLUMNS, table)
    made = labels("mimic-iv-ecg", tmp_path)
    codes = ("SR", "ABNORM", "LAD", "PACE", "UNREAD")
    stated = made["mimic-iv-ecg-statements"]
    assert {name: [row[code] for code in codes] for name, row in stated.items()} == {
        "1": [1, 1, None, 0, 0],
        "2": [None, None, None, 1, 1],
        "4": [0, 0, 1, 0, 0],
    }
    names = ("RR", "P", "PR", "QRS", "QT", "P_axis", "QRS_axis", "T_axis")
    measured = made["mimic-iv-ecg-intervals"]
    assert {record: [row[name] for name in names] for record, row in measured.items()} == {
        "1": [800, 88, 130, 88, 348, 81, 77, 65],
        "2": [800, None, None, 88, 348, None, 77, 65],
        "3": [None, None, None, None, 348, None, 77, None],
        "4": [None, 88, 130, 88, 348, 81, 77, 65],
    }
    facts = json.loads((tmp_path / "out" / "mimic-iv-ecg-statements.json").read_text())
    assert "pattern list 1" in facts["about"]


@pytest.mark.parametrize("name", ["ptbxl", "code15", "physionet2011", "mimic-iv-ecg"])
def test_labels_have_the_datasets_names(name, key_file, shell, tmp_path):
    """Also with pseudonyms."""
    archive = tmp_path / "archive"
    if name == "ptbxl":
        synthesise(archive, 2, 0, layout="ptbxl", progress=False)
    elif name == "code15":
        write_code15(archive, {1169160: {}, 2873686: {}})
    elif name == "physionet2011":
        ecgs = {str(number): ecg(seed=number) for number in (1002603, 1002867)}
        write_quality(archive, ecgs, acceptable=list(ecgs), unacceptable=[])
    else:
        studies = {"41420867": "10001725", "45090959": "10001726"}
        write_mimic(archive, studies)
        measured = [mimic_row(int(study), "Sinus rhythm") for study in studies]
        write_table(archive / "machine_measurements.csv", MIMIC_COLUMNS, measured)
    names = []
    for hidden in ([], ["--pseudonymize", key_file]):
        data, out = tmp_path / f"data{len(hidden)}", tmp_path / f"labels{len(hidden)}"
        shell.run("shard", archive, "--out", data, "--plan", "all", "--workers", 1, *hidden)
        shell.run("labels", name, archive, "--out", out, *hidden)
        made = Dataset.open(str(data)).table(["source", "record"]).to_pylist()
        records = {row["record"]: row["source"] for row in made}
        for table in tables(out).values():
            assert all(records[record] == row["source"] for record, row in table.items())
        assert len(records) == max(map(len, tables(out).values())) == 2
        names.append(set(records))
    assert not names[0] & names[1]


NO_STATEMENT = ",description,diagnostic,form,rhythm,diagnostic_class,diagnostic_subclass\n"
EXAM = ",".join(CODE15_COLUMNS.split()) + "\na b" + 14 * ","
MEASURED = ",".join(["study_id", *REPORT_COLUMNS, *INTERVAL_COLUMNS]) + "\n1" + 27 * ",soon"


@pytest.mark.parametrize(
    ("archive", "table", "text", "words"),
    tabulated("""
ptbxl         | other       | | has no scp_statements.csv: copy this file from PTB-XL's
ptbxl         | ptbxl_database | ecg_id,patient_id,scp_codes,strat_fold / 1,,,x | strat_fold is not 1 to
code15        | other       | | missing file: exams.csv
code15        | exams       | exam_id,age / 1,2 | no column 1dAVb, AF, LBBB
code15        | exams       | EXAM | exams.csv: 'a b' cannot be a record's id
mimic-iv-ecg  | other       | | missing file: machine_measurements.csv
mimic-iv-ecg  | machine_measurements | study_id,report_0 / 1,x | Column 'report_1'
mimic-iv-ecg  | machine_measurements | MEASURED | conversion error to float
physionet2021 | other       | | has no readable header of PhysioNet/CinC Challenge 2021
physionet2011 | other       | | missing file: RECORDS: restore the file
"""),
)
def test_bad_tables_give_a_one_line_error(archive, table, text, words, shell, tmp_path):
    text = {"EXAM": EXAM, "MEASURED": MEASURED}.get(text, text.replace(" / ", "\n"))
    (tmp_path / f"{table}.csv").write_text(text)
    if table == "ptbxl_database":
        (tmp_path / "scp_statements.csv").write_text(NO_STATEMENT)
    assert words in shell.error("labels", archive, tmp_path, "--out", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_statements_are_read_from_the_first_column_whatever_its_name(shell, tmp_path):
    synthesise(tmp_path / "src", 20, layout="ptbxl", progress=False)
    command = ("labels", "ptbxl", tmp_path / "src", "--out")
    shell.run(*command, tmp_path / "right")
    table = tmp_path / "src" / "scp_statements.csv"
    text = table.read_text()
    assert text.startswith(",description,")
    table.write_text(f"statement{text}")
    shell.run(*command, tmp_path / "out")
    assert len(tables(tmp_path / "out")) > 4
    assert tables(tmp_path / "out") == tables(tmp_path / "right")
    table.write_text("\n".join(line.partition(",")[2] for line in text.splitlines()))
    assert shell.error(*command, tmp_path / "out").endswith(
        "scp_statements.csv: the first column, before description, is missing: restore the file"
    )


def killed(command):
    storage.publish = lambda *paths: os.kill(os.getpid(), 9)
    main(command)


def test_the_temporary_files_of_a_killed_run_are_removed(shell, tmp_path):
    synthesise(tmp_path / "src", 5, layout="ptbxl", progress=False)
    out = tmp_path / "out"
    command = ["labels", "ptbxl", str(tmp_path / "src"), "--out", str(out)]
    process = started(killed, command, out=tmp_path / "log")
    process.join()
    assert process.exitcode == -9
    (left,) = out.iterdir()
    running = left.with_name(f".other.parquet.{socket.gethostname()}.{os.getpid()}")
    running.touch()  # of a process that is still writing
    (out / ".mine.7").touch()
    shell.run(*command)
    assert sorted(path.name for path in out.glob(".*")) == [".mine.7", running.name]


def test_paths_that_do_not_exist_give_a_one_line_error(shell, tmp_path):
    file, nowhere = tmp_path / "file", tmp_path / "nowhere"
    file.touch()
    assert "cannot list" in shell.error("labels", "code15", nowhere, "--out", tmp_path / "out")
    assert "File exists" in shell.error("labels", "code15", tmp_path, "--out", file)


def test_own_labels_get_the_pseudonyms_of_a_dataset(key_file, shell, tmp_path):
    src, out = tmp_path / "src", tmp_path / "out"
    for number in range(6):
        write_challenge(src / "ward 1", f"e{number}", ecg(seed=number))
    hidden = ("--pseudonymize", key_file)
    shell.run("shard", src, "--out", out, "--workers", 1, "--plan", "all", *hidden)
    mine = tmp_path / "mine.csv"
    slashes = "/\\" * 3
    lines = [f"ward 1{slashes[i]}e{i}.hea;wfdb;{i % 2};A{i // 2};40,{i}" for i in range(6)]
    mine.write_text("\n".join(["record;source;sick;patient;age", *lines]))
    task = TaskConfig("mine", "binary", labels=str(mine), columns=("sick",))
    with pytest.raises(ConfigError, match=r"have pseudonyms: omnilead labels table .*mine.csv"):
        read_task(task, [Dataset.open(str(out))])
    text, _ = shell.run("labels", "table", mine, "--out", tmp_path / "labels", *hidden)
    assert (
        "6 records have their pseudonyms, right only where the table has the record's own" in text
    )
    assert "not in the data; copied as they are, so make sure" in text
    assert text.rstrip().endswith(": sick, age")
    made = tmp_path / "labels" / "mine.parquet"
    read = read_task(replace(task, labels=str(made)), [Dataset.open(str(out))])
    assert read.y[0][:, 0].sum() == 3 and read.unknown == (0, 6)
    assert pq.read_table(made)["age"].to_pylist() == [f"40.{i}" for i in range(6)]
    assert not pq.read_table(made).schema.metadata
    assert "A1" not in str(pq.read_table(made).to_pydict())
    for words, says in (
        (
            (mine,),
            "needs --pseudonymize KEYFILE. If the dataset was made without",
        ),
        ((mine, *hidden), "a pseudonym depends on the source: add a column `source`, such as"),
    ):
        assert says in shell.error("labels", "table", *words, "--out", tmp_path / "labels")
        mine.write_text("record;sick\na;1\n")
    mine.write_text("record;source;sick\na;wfdb;1\nb;;0\n")
    says = "mine.csv: row 3 has an empty cell in `source` or `record`"
    assert says in shell.error("labels", "table", mine, "--out", tmp_path / "labels", *hidden)


@pytest.mark.parametrize(
    ("ages", "used", "says"),
    [
        ("300;41;300.0", (), "is 300 in 2 rows, as PTB-XL writes ages over 89, and is read as 300"),
        ("300;41;41", ("age",), "is 300 in 1 row, as PTB-XL"),
        ("300;41;300", ("potassium",), ""),
        ("89;90;30", (), ""),
    ],
)
def test_ages_of_300_are_said_to_be_those_over_89(ages, used, says, tmp_path, capsys):
    rows = [f"r{number},{age},4" for number, age in enumerate(ages.split(";"))]
    (tmp_path / "my.csv").write_text("\n".join(["record,age,potassium", *rows]))
    for _ in range(2):
        read_table(str(tmp_path / "my.csv"), used=used)
    said = capsys.readouterr().err
    assert said.count("\n") == bool(says) and says in said
