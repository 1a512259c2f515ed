"""`shard --patients FILE`: who is the patient of which record, for an archive that does not say."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from handmade import ecg, everything_in, write_challenge
from listed import without
from twins import write_code15, write_ptbxl

from omnilead.data_tools.io.errors import DataError
from omnilead.data_tools.shard import shard
from omnilead.data_tools.verify import verify
from tests.tables import tabulated

NUMBERS = range(1, 31)
PERSON = {number: number // 3 for number in NUMBERS}


@pytest.fixture
def plain(tmp_path):
    """Records of PTB-XL, several of a person, as a folder without its table."""
    for number in NUMBERS:
        write_challenge(tmp_path / "plain" / "00000", f"{number:05d}_hr", ecg(seed=number))
    return tmp_path / "plain"


@pytest.fixture
def made_with(plain, tmp_path):
    """The dataset of `plain` with the patients of a table."""

    def made(table, **more):
        how = {"out": tmp_path / "out", "plan": "all", "workers": 1}
        return shard(plain, **how | more, patients=str(table))

    return made


def patients_in(dataset):
    return dict(zip(dataset.column("record"), dataset.table()["patient"].to_pylist(), strict=True))


def write_who(path, rows):
    path.write_text("\n".join(["record,patient", *(f"{a},{b}" for a, b in rows)]))
    return path


def as_parquet(path, rows):
    columns = [pa.array(column) for column in zip(*rows, strict=True)]
    pq.write_table(pa.table(columns, ["Record", "patient"]), path)
    return path


TABLES = {
    "names": lambda path: write_who(path, ((f"00000_{n:05d}_hr", p) for n, p in PERSON.items())),
    "paths": lambda path: write_who(
        path, ((f"00000/{n:05d}_hr.hea", p) for n, p in PERSON.items())
    ),
    "parquet": lambda path: as_parquet(
        path, [(f"00000/{n:05d}_hr", float(p)) for n, p in PERSON.items()]
    ),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_plain_folder_gets_its_patients_from_a_table(kind, made_with, plain, tmp_path, capsys):
    table = TABLES[kind](tmp_path / "who")
    out = tmp_path / "out"
    made = made_with(table)
    assert patients_in(made) == {f"00000_{n:05d}_hr": str(p) for n, p in PERSON.items()}
    assert "patients unknown" not in capsys.readouterr().err
    assert verify(out, archive=plain, patients=str(table)) == []
    findings = verify(out, archive=plain)
    differs = "differs in patient, which it does not name: if `shard` was given --patients, "
    assert len(findings) > 1 and all(differs in one for one in findings[:20])
    other = write_who(tmp_path / "other", [("00000_00001_hr", "B")])
    with pytest.raises(DataError, match="is already finished"):
        made_with(other)


def test_records_that_are_in_one_of_both_only_are_counted(made_with, tmp_path, capsys):
    table = write_who(tmp_path / "who.csv", [("00000_00001_hr", "A B"), ("X", "C"), ("Y", "D")])
    made = made_with(table)
    assert patients_in(made)["00000_00001_hr"].startswith("A_B_")
    told = capsys.readouterr().err
    assert "who.csv: 2 (X, Y) of 3 records are not in the data" in told
    assert "patients unknown for 29 of 30 records: split by record" in told


def test_ptbxls_own_table_names_the_patients_of_its_records_in_any_folder(plain, tmp_path):
    table = tmp_path / "ptbxl_database.csv"
    rows = [f"{n},{p}.0,records500/00000/{n:05d}_hr" for n, p in PERSON.items()]
    table.write_text("\n".join(["ecg_id,patient_id,filename_hr", *rows]))
    (tmp_path / "flat").mkdir()
    for path in plain.rglob("*_hr*"):
        os.link(path, tmp_path / "flat" / path.name)
    made = shard(tmp_path / "flat", out=tmp_path / "out", workers=1, patients=str(table))
    assert patients_in(made) == {f"{n:05d}_hr": str(p) for n, p in PERSON.items()}


def test_a_table_counts_more_than_the_archive_and_may_name_sources(tmp_path):
    """As for archives that know their patients but count one person twice."""
    write_code15(tmp_path / "code", {7: {"patient_id": 1}, 8: {"patient_id": 2}})
    write_ptbxl(tmp_path / "ptbxl", {7: {"patient_id": 5}})
    table = tmp_path / "who.csv"
    table.write_text("record;source;patient\n7;code15;one\n8;code15;one\n")
    sources = [tmp_path / "code", tmp_path / "ptbxl"]
    made = shard(sources, out=tmp_path / "out", workers=1, patients=str(table))
    assert patients_in(made) == {"7": "one", "8": "one", "HR00007": "5"}


def test_pseudonyms_of_named_patients(made_with, plain, key_file, tmp_path):
    table = TABLES["names"](tmp_path / "who.csv")
    made = made_with(table, pseudonymize=str(key_file))
    people = patients_in(made)
    assert len(set(people.values())) == len(set(PERSON.values()))
    assert all(name.startswith("p") and len(name) == 21 for name in people.values())
    assert b"00000_00001_hr" not in everything_in(made)
    how = {"patients": str(table), "pseudonymize": str(key_file)}
    assert verify(tmp_path / "out", archive=plain, **how) == []


def test_one_id_in_several_spellings_is_one_patient(made_with, tmp_path):
    """Long numbers as floats, and Unicode that is composed or not."""
    names = [f"00000_{n:05d}_hr" for n in NUMBERS]
    out = {}
    for kind, ids in (
        ("int", pa.array([12345678901 + n % 2 for n in NUMBERS])),
        ("float", pa.array([12345678901.0 + n % 2 for n in NUMBERS])),
        ("text", pa.array([f"{12345678901 + n % 2}.0" for n in NUMBERS])),
    ):
        pq.write_table(pa.table({"record": names, "patient": ids}), tmp_path / kind)
        out[kind] = patients_in(made_with(tmp_path / kind, out=tmp_path / f"out_{kind}"))
    assert out["int"] == out["float"] == out["text"]
    assert set(out["int"].values()) == {"12345678901", "12345678902"}
    rows = zip(names, ("M\u00fcller" if n % 2 else "Mu\u0308ller" for n in NUMBERS), strict=True)
    table = write_who(tmp_path / "who.csv", rows)
    made = made_with(table)
    assert len(set(patients_in(made).values())) == 1
    with pytest.raises(DataError, match="all are left out"):
        without(made, tmp_path / "none", "Mu\u0308ller")


def test_ids_that_differ_only_in_zeros_or_in_case_are_named(made_with, tmp_path, capsys):
    ids = ["007", "7", "ab1", "AB1", "07b", "7b"]
    rows = [(f"00000_{n:05d}_hr", ids[n % len(ids)]) for n in NUMBERS]
    table = write_who(tmp_path / "who.csv", rows)
    made = made_with(table)
    early, late = (one for one in capsys.readouterr().err.split("\n") if "zeros or in case" in one)
    said = (
        "007 and 7, AB1 and ab1 differ only in zeros or in case (2 in all) and count as different"
    )
    assert early.startswith(f"warning: {table}: patients {said} people")
    assert "patients ptb-xl/007 and ptb-xl/7, " in late or "patients wfdb/007 and wfdb/7, " in late
    left = without(made, tmp_path / "left", "7", "AB1")
    assert {"007", "ab1"} < set(left.column("patient")) and "7" not in left.column("patient")
    source = left.column("source")[0]
    assert (
        "warning: 2 patients stay whose ids differ from those given only in zeros or in case: "
        f"{source}/007, {source}/ab1: if they are the same people" in capsys.readouterr().err
    )
    without(left, tmp_path / "again", "0007", "B")
    assert f"zeros or in case: {source}/007" in capsys.readouterr().err


def test_words_for_an_unknown_patient_are_nobody(made_with, tmp_path, capsys):
    """Not one person, who would join all of them."""
    words = ["NA", "unknown", "nan", "", "?"]
    rows = [(f"00000_{n:05d}_hr", words[n % 5] if n > 5 else "B") for n in NUMBERS]
    table = write_who(tmp_path / "who.csv", rows)
    made = made_with(table)
    assert set(patients_in(made).values()) == {"B", None}
    assert "patients unknown for 25 of 30 records" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    tabulated(r"""
record,who / A,B     | who.csv: its columns are record, who: a column `patient` must name
name,patient / A,B   | who.csv: its columns are name, patient: a column `record` must
record,patient / A,B | none of its 1 records is in the data: the table has names like A, the data like 00000_
record,patient / 00000_00001_hr,A / 00000/00001_hr,B | is in rows 2 and 3: keep one
record,patient / / 00000_00001_hr,"A / / B" / / / 00000/00001_hr,B | is in rows 3 and 6: keep one
sep=; / record;patient / / 00000_00001_hr;A / 00000/00001_hr;B     | is in rows 3 and 4: keep one
record,patient / 00000_00001_hr,1.23457E+10          | patient id: 1.23457E\+10 lacks digits
"""),
)
def test_tables_that_do_not_fit_are_refused(text, says, made_with, tmp_path):
    (tmp_path / "who.csv").write_text(text.replace(" /", "\n").replace("\n ", "\n"))
    with pytest.raises(DataError, match=says):
        made_with(tmp_path / "who.csv")
    assert not (tmp_path / "out" / "dataset.json").exists()
