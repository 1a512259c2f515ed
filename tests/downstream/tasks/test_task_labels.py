"""Label tables: what is read, how records are matched and split, and what is refused."""

import importlib
import re
import sys
from dataclasses import replace
from itertools import cycle

import numpy as np
import pyarrow as pa
import pytest
from label_tables import Tables
from listed import listed
from pyarrow import parquet

import omnilead
from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.data_tools.ecg.record_tables import read_table
from omnilead.data_tools.io.errors import DataError, UserError
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources
from omnilead.data_tools.synthetic.archive import synthesise
from omnilead.downstream import finetune
from omnilead.downstream.tasks.config import TaskConfig
from omnilead.downstream.tasks.guess import guess_kind
from omnilead.downstream.tasks.labels import read_task
from omnilead.engine.settings.errors import ConfigError
from tests.tables import tabulated


def test_the_papers_tasks_are_the_datasets_own(dataset):
    dx, who = (read_task(task, [dataset]) for task in (TaskConfig(), TaskConfig(kind="identity")))
    assert dx.classes == CLASSES and (dx.y[0] == dataset.labels).all()
    assert (dx.role, who.role) == ("dx", "identity")
    for split in ("train", "valid", "test"):
        assert dx.rows_of_dataset(0, split).tolist() == dataset.select(dx=split).tolist()
    assert who.rows_of_dataset(0, "train").tolist() == dataset.select(identity="train").tolist()


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_accepted_spellings_of_cells(mark, tables):
    cells = [("1", " yes "), ("0", "NO"), ("", "TRUE"), ("1.0", "nan"), ("true", "false")]
    values = [[1, 1], [0, 0], [np.nan, 1], [1, np.nan], [1, 0]]
    rows = []
    for i, name in enumerate(tables.records):
        path = f"{'x/y/' * (i % 2)}{name}{'.hea' * (i % 3 == 0)}"
        rows.append((path, *cells[i % 5]))
    task = TaskConfig(labels=tables.write("Record |a, b|c", rows, mark, "utf-8-sig"))
    with pytest.raises(
        ConfigError, match=r"'nan' in column 'c' \(36 .* --kind multilabel if it means"
    ):
        guess_kind(task)
    known = read_task(task, [tables.dataset])
    assert known.task.columns == ("a, b", "c")
    value_of = dict(zip(tables.records, cycle(values), strict=False))
    expected = [value_of[name] for name in tables.dataset.column("record")]
    np.testing.assert_array_equal(known.y[0], np.array(expected, np.float32), strict=True)
    folders, nan, remark, counted, words = known.remarks
    assert nan == (
        f"{tables.path}: 'nan' in column 'c' (36 rows) is taken for an empty cell, which is unknown: if "
        "it means something else, write that"
    )
    assert "of 180 records are matched without their first folders: x/y/" in folders
    assert remark.startswith("patients unknown for 60 of 180 records: split by record")
    assert counted.startswith(f"{tables.path}: a, b, c: multilabel: ")
    assert words == f"{tables.path}: no is 0, yes is 1"


@pytest.mark.parametrize(
    "words",
    [
        "ja nein",
        "Y N",
        "positive negative",
        "yes no",
        "WAHR FALSCH",
        "J N",
        "positiv negativ",
        "+ -",
        "oui non",
        "VRAI FAUX",
        "Sí no",
        "sì no",
        "sim não",
        "ja nee",
        "PRAWDA FAŁSZ",
    ],
)
@pytest.mark.parametrize("columns", [["af"], ["af", "lbbb"]])
def test_words_for_yes_and_no_are_alike_in_one_and_in_several_columns(words, columns, tables):
    yes, no = words.split()
    rows = [
        [name, *[yes if i % 3 else no for _ in columns]] for i, name in enumerate(tables.records)
    ]
    task = guess_kind(TaskConfig(labels=tables.write(f"record|{'|'.join(columns)}", rows)))
    assert task.kind == ("binary" if len(columns) == 1 else "multilabel")
    known = read_task(task, [tables.dataset])
    assert known.remarks[-1] == f"{tables.path}: {no.lower()} is 0, {yes.lower()} is 1"
    expected = {name: i % 3 > 0 for i, name in enumerate(tables.records)}
    assert known.y[0][:, 0].tolist() == [expected[name] for name in tables.dataset.column("record")]


def test_the_patients_of_a_table_count_where_the_data_have_none(tables):
    """For the split and for intervals; a patient whom the dataset knows keeps its name."""
    plain = tables.read("record|v", zip(tables.records, cycle("01"), strict=False))
    assert plain.unknown == (60, 180) and plain.resampling_unit.startswith("patients (records")
    dataset = tables.dataset
    columns = ["source", "record", "patient"]
    rows = {row["record"]: row for row in dataset.table(columns).to_pylist()}
    nameless = [name for name in tables.records if rows[name]["patient"] is None]
    nameless.sort(key=lambda name: rows[name]["source"])
    whose = {name: f"P{i // 3}" for i, name in enumerate(nameless)} | {nameless[0]: ""}
    given = [(name, i % 2, whose.get(name, "other")) for i, name in enumerate(tables.records)]
    known = tables.read("record|v|Patient", given)
    assert known.unknown == (1, 180)
    remark, _ = known.remarks
    assert remark == (
        "patients unknown for 1 of 180 records: split by record, scores may be too high"
    )
    record, split, people = dataset.column("record"), known.split[0], known.patients[0]
    persons = {name: (rows[name]["source"], whose[name] or name) for name in nameless}
    for person in persons.values():  # one id in two sources is two people
        of = np.isin(record, [name for name in nameless if persons[name] == person])
        assert len(np.unique(split[of])) == len(np.unique(people[of])) == 1
    there = np.isin(record, nameless)
    assert np.array_equal(split[~there], plain.split[0][~there])
    assert 20 < len(np.unique(people[there])) == len(set(persons.values())) < 30
    folds = [(*row[:2], whose.get(row[0], ""), i % 3) for i, row in enumerate(given)]
    with pytest.raises(ConfigError, match=r"patient [\w-]+/P\d+ is in folds \d and \d"):
        tables.read("record|v|patient|fold", [row for row in folds if row[2]])


def test_a_parquet_table_and_a_source_where_names_clash(dataset, tmp_path):
    path, rows = str(tmp_path / "t.parquet"), dataset.table(["source", "record", "age"])
    words = pa.array(["NA", "null", "yes", "n/a"] * len(rows))[: len(rows)]
    parquet.write_table(rows.append_column("v", words), path)
    assert read_table(path)["v"].to_pylist() == words.to_pylist()  # only what is empty is null
    records = rows.group_by(["source", "record"], use_threads=False).aggregate([("age", "min")])
    parquet.write_table(records.rename_columns(["source", "record", "age"]), path)
    known = read_task(TaskConfig(kind="regression", labels=path), [dataset])
    np.testing.assert_array_equal(known.y[0][:, 0], dataset.column("age"))


@pytest.mark.parametrize("columns", [(), ("time", "event")])
def test_times_are_negative_if_censored(columns, tables):
    """By the names time and event, in any order, or as named; both must be known."""
    rows = [("1", "2.5"), ("0", "1e-3"), ("", "4"), ("1", ""), ("no", "7")]
    path = tables.write(
        "record|event|time", ((r, *row) for r, row in zip(tables.records, rows, strict=False))
    )
    task = TaskConfig(labels=path, columns=columns)
    task = replace(task, kind="survival") if columns else guess_kind(task)
    found = read_task(task, [tables.dataset])
    assert found.task.kind == "survival" and found.task.columns == ("time", "event")
    time_of = dict(zip(tables.dataset.column("record"), found.y[0][:, 0], strict=True))
    expected = np.float32([2.5, -1e-3, np.nan, np.nan, -7])
    np.testing.assert_array_equal([time_of[r] for r in tables.records[:5]], expected)
    assert (
        found.classes == ("risk",)
        and not np.isin(found.split[0][np.isnan(found.y[0][:, 0])], 1).any()
    )


def test_age_and_sex_of_the_dataset_are_drawn_by_patient(dataset):
    task = TaskConfig("age", "regression", columns=("age",), split="8:1:1")
    age, again = (read_task(task, [dataset]) for _ in range(2))
    assert age.resume_facts == again.resume_facts
    patients = np.array(dataset.table(["patient"])["patient"].to_pylist(), object)
    train, valid, test = (
        set(patients[age.rows_of_dataset(0, split)]) - {None}
        for split in ("train", "valid", "test")
    )
    assert valid and test and not (train & valid or train & test or valid & test)
    assert len(train) > 5 * len(test)
    task = TaskConfig("sex", "multiclass", columns=("sex",), classes=("F", "M"), split="8:1:1")
    sex = read_task(task, [dataset])
    both = (age.split[0] > 0) & (sex.split[0] > 0)  # the same draw for every task
    assert (age.split[0] == sex.split[0])[both].all() and both.sum() > 50


def test_a_patient_whose_id_has_other_characters_is_one_person(tmp_path):
    """The dataset knows every second record's patient, the table the others'."""
    who = [f"MRN {i // 2}/7" for i in range(60)]
    records = {f"r{i}": ("dicom", who[i] if i % 2 else None, i) for i in range(60)}
    rows = [f"r{i},{i // 2 % 2},{who[i]}\n" for i in range(60)]
    (tmp_path / "my.csv").write_text("".join(["record,v,patient\n", *rows]))
    task = TaskConfig(labels=str(tmp_path / "my.csv"), kind="binary")
    made = listed(tmp_path / "out", **records)
    split = dict(zip(made.column("record"), read_task(task, [made]).split[0], strict=True))
    assert all(split[f"r{i}"] == split[f"r{i + 1}"] for i in range(0, 60, 2))


def test_folds_splits_and_unknown_labels(dataset, tables):
    known = tables.by_fold("fold", str)
    assert known.task.folds == {"train": tuple("01234567"), "valid": ("8",), "test": ("9",)}
    assert tables.folds_in(known, "valid") == {8}
    unlabelled = dataset.column("record") == tables.records[0]
    assert not known.split[0][unlabelled].any()
    chosen = {"train": ("1",), "valid": ("2",), "test": ("3",)}
    for fold in (str, "{}.0".format):  # as pandas writes whole numbers
        assert tables.folds_in(tables.by_fold("fold", fold, folds=chosen), "test") == {3}
    names = ["train"] * 8 + ["val", "Test"]
    assert (tables.by_fold("split", names.__getitem__).split[0] == known.split[0]).all()
    roles = tables.by_fold("fold", str, split="roles")
    expected = set(dataset.select(dx="valid")) - set(np.flatnonzero(unlabelled))
    assert set(roles.rows_of_dataset(0, "valid")) == expected and roles.role == ""
    some = {0: "", 8: "valid", 9: "test"}
    remarks = " ".join(tables.by_fold("split", lambda fold: some.get(fold, "train")).remarks)
    assert "crops are left out: their split does not belong to train, valid or test" in remarks


@pytest.mark.parametrize("held_out", ["valid", "test"])
def test_copies_of_held_out_ecgs_are_left_out(held_out, tables, monkeypatch):
    before, column = tables.by_fold("fold", str), Dataset.column
    train, test = before.rows_of_dataset(0, "train")[0], before.rows_of_dataset(0, held_out)[0]

    def copied(self, name):
        values = column(self, name).copy()
        if name == "waveform":
            values[train] = values[test]
        return values

    monkeypatch.setattr(Dataset, "column", copied)
    after = tables.by_fold("fold", str)
    assert after.split[0][train] == 0 and (after.split[0] != before.split[0]).sum() == 1
    assert "1 crops are left out: copies of ECGs in valid or test" in after.remarks


def test_records_missing_from_table_or_data_are_counted(tables):
    rows = zip([*tables.records[10:], "X1", "X2"], cycle("01"), strict=False)
    first, second, *_ = tables.read("record|v", rows).remarks
    assert f"2 (X1, X2) of {len(tables.records) - 8} records are not in the data" in first
    assert f"/{tables.records[0]}" in second and "10 (" in second


# A slash ends a line of the labels; {0} is the name of the first record
BAD = tabulated(r"""
none of its 1 records is in the data: .* names like X     | record,v / X,1
record .* is in rows 2 and 4                         | record,v / {0},1 / {1},0 / {0},0
folds 1, 2: at least 3                               | record,v,fold / {0},1,1 / {1},0,2
split 'tset': write train                            | record,v,split / {0},1,train / {1},0,tset
'v' of record .*: '2' is not 0 or 1                  | record,v / {0},2
'v' of record .*: '41,5' is not 0 or 1               | record;v / {0};41,5 / {1};0
no record has a known label in v                     | record,v / {0}, / {1},nan
one label column, not v, w: --columns NAME, or columns: \[NAME\] in a YAML task | record,v,w / {0},1,1
has no column of labels, only 'record', 'fold': add  | record,fold / {0},1
columns are name, v: a column `record` must name .*: rename the column that has | name,v / {0},1
columns are id, ef, af: a column `record` must name  | id;ef;af / {0};40,5;1 / {1};38,0;0
two columns are called 'v'                           | record,v,v / {0},1,1
cannot be read as CSV or parquet                     | record,v / {0},1 / {1},1,2,3
'v' of record .*: 'high' is not a number             | record,v / {0},high           | kind="regression"
'v' of record .*: 'inf' is not a number              | record,v / {0},inf            | kind="regression"
'v' of record .*: 'C' is not one of the classes A, B | record,v / {0},C | kind="multiclass", classes=("A", "B")
two columns, .*, not v: --columns TIME EVENT, or .*\[TIME, EVENT\] | record,v / {0},1 | kind="survival", columns=("v",)
no column 'time': its label columns are v            | record,v / {0},1              | kind="survival"
'time' of record .*: '0' is not a number above 0     | record,time,event / {0},0,1   | kind="survival"
'time' of record .*: '1e-60' is not a number above 0 | record,time,event / {0},1e-60,1 | kind="survival"
'event' of record .*: '2' is not 0 or 1              | record,time,event / {0},3,2   | kind="survival"
no column 'w': its label columns are v               | record,v / {0},1              | columns=("w",)
needs a column `fold` or `split`, but there is none  | record,v / {0},1              | split="column"
its labels are the dataset's patients                | record,v / {0},1              | kind="identity"
task\.folds: '2' is in two splits | record,v / {0},1 | folds={"train": ("1", "2"), "test": ("2",)}
no such file: name a CSV           |                  | labels="/nowhere.csv"
name a label table                 |                  | labels=""
'height' is not in the dataset     |                  | labels="", kind="regression", columns=("height",)
name one with --labels             |                  | labels="", kind="multilabel", split="8:1:1"
""")
EACH = range(171)  # of the records
MANY = "".join(f" / {{{i}}},{i}" for i in EACH)
BAD += [
    ("column 'v' has 171 classes: use at most 100", f"record,v{MANY}", 'kind="multiclass"'),
    ("column 'fold' has 171 values: use at most 100", f"record,v,fold{MANY.replace(',', ',1,')}"),
    ("the first line has a quote that is not closed", 'record,"v' + " / A,1" * 60_000),
    (
        r"patient .* is in folds \d and \d",
        "record,v,fold" + "".join(f" / {{{i}}},1,{i % 3}" for i in EACH),
    ),
]


@pytest.mark.parametrize("row", BAD, ids=[row[0][:30] for row in BAD])
def test_a_task_that_cannot_be_read_is_one_line(row, tables):
    says, text, *how = row
    tables.path.write_text(text.replace(" / ", "\n").format(*tables.records))
    with pytest.raises(ConfigError, match=says) as caught:
        tables.read_file(**eval(f"dict({''.join(how)})"))
    assert "\n" not in str(caught.value)


def test_a_name_shared_by_two_databases_needs_a_source(tables, monkeypatch):
    """The first record of another database gets the name of the first record."""
    whole, sources = Dataset.table, tables.dataset.column("source")
    other = int((sources != sources[0]).argmax())

    def renamed(self, columns=None):
        table = whole(self, columns)
        if columns == ["source", "record"]:
            names = table["record"].to_pylist()
            names[other] = names[0]
            table = table.set_column(1, "record", [names])
        return table

    monkeypatch.setattr(Dataset, "table", renamed)
    with pytest.raises(ConfigError, match="add a column `source`"):
        tables.read("record|v", [(tables.records[0], 1)])
    known = tables.read("source|record|v", [(sources[0], tables.records[0], 1)])
    assert known.y[0][0] == 1 and np.isnan(known.y[0][other])


@pytest.mark.parametrize("mark", [";", "\t"])
def test_decimal_commas_are_numbers_where_commas_do_not_separate(mark, tables):
    rows = zip(tables.records, cycle(["40,1", "-0,5", "1,5e2", "7", ""]), strict=False)
    path = tables.write("record|v", rows, mark)
    assert guess_kind(TaskConfig(labels=path)).kind == "multiclass"  # of few values
    known = tables.read_file(kind="regression")
    assert set(known.y[0][:, 0].round(2)) >= {np.float32(40.1), -0.5, 150, 7}


@pytest.mark.parametrize(
    ("mark", "values", "says"),
    tabulated("""
tab | 1,234 987       | holds 1,234 and 987: write numbers without thousands
;   | 1.234 987       | holds 1.234 and 987: write
;   | 12,5 1.234      | holds 1.234 and 12,5: write
;   | 4,125 4         | holds 4,125 and 4: .*, decimals as 1,0, or leave the column out
;   | 4,125 4,0       |
;   | 1,234 0,125 987 |
;   | 1.234 2.345     |
"""),
)
def test_a_mark_of_thousands_is_not_taken_for_a_decimal_point(mark, values, says, tables):
    rows = zip(tables.records, cycle(values.split()), strict=False)
    path = tables.write("record|v", rows, mark.replace("tab", "\t"))
    if not says:
        assert tables.read_file(kind="regression").y
        return
    with pytest.raises(ConfigError, match=f"column 'v' {says}"):
        guess_kind(TaskConfig(labels=path))


def test_only_columns_that_are_used_must_have_clear_numbers(tables):
    rows = zip(tables.records, cycle("01"), cycle(["1.234", "12,5"]), strict=False)
    tables.write("record|af|v", rows, ";")
    chosen = TaskConfig("af", "binary", labels=str(tables.path), columns=("af",))
    assert guess_kind(chosen).kind == "binary" and tables.read_file(columns=("af",)).y
    with pytest.raises(ConfigError, match=r"column 'v' holds 1\.234 and 12,5"):
        read_task(chosen, [tables.dataset], where="v > 2")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"record,v\n", "has a header, but no rows: add a row for each ECG"),
        (b"record,v\n\n\n", "has a header, but no rows"),
        (
            "record;v\nA;ä\n".encode("cp1252"),
            "the text of the file is not UTF-8: save it as CSV UTF-8",
        ),
        (b"PK\x03\x04", "the file is a workbook or another archive: save the sheet as CSV UTF-8"),
        (None, "is a folder: name a CSV or parquet file of labels"),
    ],
)
def test_files_that_are_no_tables_of_records(data, says, tmp_path):
    path = tmp_path / "my.csv"
    path.write_bytes(data) if data else path.mkdir()
    with pytest.raises(ConfigError, match=re.escape(f"{path}: ") + f".*{says}"):
        guess_kind(TaskConfig(labels=str(path)))


def test_utf_16_is_read(tmp_path):
    """Excel saves it as "Unicode text"."""
    path = tmp_path / "my.csv"
    path.write_text("record\tkind\nA\tnötig\nB\t\n", encoding="utf-16")
    assert read_table(str(path)).to_pydict() == {"record": ["A", "B"], "kind": ["nötig", None]}


def test_a_missing_extra_is_named(monkeypatch):
    for package in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)
    registry = importlib.import_module("fsspec.registry")
    monkeypatch.delitem(registry._registry, "s3", raising=False)  # another test used it
    for read, url, says in (
        (read_table, "s3://b/l.csv", r"needs the extra s3: pip install 'omnilead\[s3\]'"),
        (omnilead.load, "s3://b/run", "needs the extra s3"),
        (read_table, "gs://b/l.csv", "Please install gcsfs"),
    ):
        with pytest.raises(UserError, match=f"{url}:? {says}"):
            read(url)


def test_row_numbers_and_odd_numbers(dataset, tables):
    """What spreadsheets and pandas leave in a table."""
    numbers = ["1_000", "", "7", *["12.5"] * (len(tables.records) - 3)]
    rows = [(i, tables.records[i], number, i) for i, number in enumerate(numbers)]
    assert guess_kind(TaskConfig(labels=tables.write("|record|ef|Unnamed: 0", rows))).columns == (
        "ef",
    )
    labels = tables.read("|record|ef|Unnamed: 0", rows, kind="regression")
    of = dict(zip(dataset.column("record"), labels.y[0][:, 0].tolist(), strict=True))
    assert [of[name] for name in tables.records[:4]] == pytest.approx(
        [1000, np.nan, 7, 12.5], nan_ok=True
    )


def test_names_in_a_table_do_not_control_the_terminal(tables, capsys):
    """A label's name may hold escape sequences, which could hide lines or change what was
    copied."""
    table = tables.write("record|AF\x1b[2J\x1b]0;title\x07\u202e", [["nowhere", "1"]])
    shown = r"AF\x1b[2J\x1b]0;title\x07\u202e"
    arguments = ["--start", "small", "--data", tables.dataset.root.url, "--labels", table]
    assert finetune.main([*arguments, "--columns", "other", "--out", "OUT"]) == 2
    err = capsys.readouterr().err
    assert shown in err and "\x1b" not in err and err.count("\n") == 1


def test_a_word_in_a_column_of_folds_is_no_fold(tables):
    folds = ["1", "2", "3", "NA"]
    rows = [(name, i % 2, folds[tables.fold_of[name] % 4]) for i, name in enumerate(tables.records)]
    known = tables.read("record|v|fold", rows)
    assert known.task.folds == {"train": ("1",), "valid": ("2",), "test": ("3",)}
    assert any("'NA' in column 'fold'" in one for one in known.remarks)


def test_patients_of_one_id_in_two_spellings_are_one_or_named(tables, tmp_path):
    """A float, or Unicode that is not composed, is another spelling; zeros and case are a question."""
    rows = tables.dataset.table(["source", "record", "patient"]).to_pylist()
    source = {row["record"]: row["source"] for row in rows if row["patient"] is None}
    most = max(source.values(), key=[*source.values()].count)
    nameless = [name for name in source if source[name] == most]
    ids = ["12345678901", "12345678901.0", "Mu\u0308ller", "M\u00fcller", "007", "7", "a1", "A1"]
    whose = dict(zip(nameless, cycle(ids), strict=False))
    given = [(name, i % 2, whose.get(name, "")) for i, name in enumerate(tables.records)]
    known = tables.read("record|v|patient", given)
    ids_of = dict(zip(tables.dataset.column("record"), known.patients[0].tolist(), strict=True))
    people = {whose[name]: ids_of[name] for name in nameless}
    assert people[ids[0]] == people[ids[1]] and people[ids[2]] == people[ids[3]]
    assert len(set(people.values())) == 6
    (doubt,) = [one for one in known.remarks if "differ only in zeros or in case" in one]
    assert f"{most}/007 and {most}/7" in doubt and f"{most}/A1 and {most}/a1" in doubt


def test_long_ids_in_a_column_of_floats(tmp_path):
    ids = pa.array([12345678901.0, 7.0, None])
    parquet.write_table(pa.table({"record": ids, "patient": ids}), tmp_path / "t.parquet")
    cells = read_table(str(tmp_path / "t.parquet"))
    assert cells["record"].to_pylist() == cells["patient"].to_pylist() == ["12345678901", "7", None]
    for value, column in (("1.23457E+10", ["1.23457E+10"]), ("1.2", [12345678901234567890.0])):
        parquet.write_table(pa.table({"record": ["a"], "patient": column}), tmp_path / "t.parquet")
        with pytest.raises(
            DataError, match=rf"patient id: {re.escape(value)}.* lacks digits: save"
        ):
            read_table(str(tmp_path / "t.parquet"))


@pytest.mark.parametrize("name", ["record", "source", "patient", "fold", "v"])
def test_text_of_a_parquet_table_that_is_not_utf8_is_one_line(name, tmp_path):
    """Arrow takes it as it is, and trims the ends of b"a\xffb" without a look at its middle."""
    cells = pa.array([b"a\xffb", b"c"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(cells), cells.buffers())
    path = str(tmp_path / "t.parquet")
    parquet.write_table(pa.table({"record": ["A", "B"], "v": ["0", "1"]} | {name: text}), path)
    says = rf"\A[^\n]*: the text of column '{name}' is not UTF-8: save the table again\Z"
    with pytest.raises(DataError, match=says):
        read_table(path)


@pytest.mark.parametrize(
    ("how", "cells", "said"),
    [
        ({"kind": "multiclass"}, ("poor", "good"), "poor"),
        ({"kind": "binary", "positive": "poor"}, ("poor", "good"), "v=poor"),
        ({"kind": "multilabel"}, ("1", "0"), "v"),
        ({"kind": "regression"}, ("1", "0"), ""),
    ],
)
def test_labels_of_refused_records_are_told(how, cells, said, tmp_path):
    """No score says anything of them, and the poorest ECGs are refused."""
    synthesise(tmp_path / "archive", patients=10, two_sessions=0, seed=1, progress=False)
    headers = sorted((tmp_path / "archive").rglob("*.hea"))
    for header in headers[:4]:
        header.write_text("broken")
    made = shard(
        open_sources(str(tmp_path / "archive")), ShardOptions(str(tmp_path / "ds"), quiet=True)
    )
    rows = [
        (
            header.relative_to(tmp_path / "archive").with_suffix(""),
            cells[0 if i in (0, 1, 2, 9) else 1],
        )
        for i, header in enumerate(headers)
    ]
    remarks = " ".join(Tables(made, tmp_path).read("record|v", rows, **how).remarks)
    if not said:
        assert "refused ECGs" not in remarks
        return
    others = len(headers) - 4
    assert f"my.csv: 3 of 4 refused ECGs are of class {said} (1 of {others} others)" in remarks
    assert ("1 of 4 refused ECGs are of class good" in remarks) == (how["kind"] == "multiclass")


def test_labels_in_a_workbook(tables, monkeypatch):
    """A sheet of Excel, where openpyxl is installed; of several, the one that is named."""
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "ECGs"
    cells = [(name, i % 3 == 0, 40.5 + i, None) for i, name in enumerate(tables.records)]
    for row in [("record", "af", "ef", None), *cells]:
        sheet.append(row)
    path = str(tables.path.with_suffix(".xlsx"))
    book.save(path)
    known = read_task(TaskConfig(kind="binary", labels=path, columns=("af",)), [tables.dataset])
    af_of = {name: float(af) for name, af, *_ in cells}
    assert known.y[0][:, 0].tolist() == [af_of[name] for name in tables.dataset.column("record")]
    assert guess_kind(TaskConfig(labels=path, columns=("ef",))).kind == "regression"
    book.create_sheet("notes").append(["record", "v"])
    book.save(path)
    with pytest.raises(ConfigError, match=r"has the sheets ECGs, notes: .* labels\.xlsx:ECGs"):
        guess_kind(TaskConfig(labels=path))
    assert guess_kind(TaskConfig(labels=f"{path}:ECGs", columns=("af",))).kind == "binary"
    with pytest.raises(ConfigError, match="has no sheet 'other': its sheets are ECGs, notes"):
        guess_kind(TaskConfig(labels=f"{path}:other"))
    sheet["B3"] = "=1-0"  # its value is not in the file
    book.save(path)
    with pytest.raises(ConfigError, match="row 3 has the formula =1-0 without its value"):
        guess_kind(TaskConfig(labels=f"{path}:ECGs"))
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(ConfigError, match=r"a workbook or .*: save the sheet .*, or pip install"):
        guess_kind(TaskConfig(labels=path))
