"""Label tables: what is read, how records are matched and split, and what is refused."""

import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import omnilead
from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.engine import finetune
from omnilead.engine.common import ConfigError
from omnilead.engine.tasks.config import TaskConfig
from omnilead.engine.tasks.labels import guess, read_table, read_task

Write = Callable[..., str]


@pytest.fixture(scope="module")
def records(dataset: Dataset) -> list[str]:
    return list(dict.fromkeys(dataset.table(["record"])["record"].to_pylist()))


@pytest.fixture(scope="module")
def fold_of(dataset: Dataset) -> dict[str, int]:
    """Patients in ten folds."""
    names = dataset.table(["record", "patient"]).to_pylist()
    patients = sorted({name["patient"] or name["record"] for name in names})
    return {
        name["record"]: patients.index(name["patient"] or name["record"]) % 10 for name in names
    }


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(
        header: Sequence[str],
        rows: Sequence[Sequence[Any]],
        mark: str = ",",
        encoding: str = "utf-8",
    ) -> str:
        path = tmp_path / "my.csv"
        with path.open("w", newline="", encoding=encoding) as file:
            csv.writer(file, delimiter=mark).writerows([header, *rows])
        return str(path)

    return write


def test_the_papers_tasks_are_the_datasets_own(dataset: Dataset) -> None:
    dx, who = (read_task(task, [dataset]) for task in (TaskConfig(), TaskConfig(kind="identity")))
    assert (
        dx.classes == CLASSES
        and (dx.y[0] == dataset.labels).all()
        and (dx.role, who.role) == ("dx", "identity")
    )
    for split in ("train", "valid", "test"):
        assert dx.rows(0, split).tolist() == dataset.select(dx=split).tolist()
    assert who.rows(0, "train").tolist() == dataset.select(identity="train").tolist()


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_accepted_spellings_of_cells(
    mark: str, dataset: Dataset, records: list[str], write: Write
) -> None:
    cells = [("1", " yes "), ("0", "NO"), ("", "TRUE"), ("1.0", "nan"), ("true", "false")]
    rows = [
        (f"{'x/y/' * (i % 2)}{name}{'.hea' * (i % 3 == 0)}", *cells[i % 5])
        for i, name in enumerate(records)
    ]
    table = write(["Record ", "a, b", "c"], rows, mark, "utf-8-sig")
    task = guess(TaskConfig(labels=table))
    assert task.kind == "multilabel" and task.columns == ("a, b", "c")
    known = read_task(task, [dataset])
    row = {name: i % 5 for i, name in enumerate(records)}
    expected = np.array([[1, 1], [0, 0], [np.nan, 1], [1, np.nan], [1, 0]], np.float32)
    np.testing.assert_array_equal(
        known.y[0], expected[[row[name] for name in dataset.column("record")]]
    )
    assert known.y[0].dtype == np.float32 and not known.remarks


def test_a_parquet_table_and_a_source_where_names_clash(dataset: Dataset, tmp_path: Path) -> None:
    table = dataset.table(["source", "record", "age"])
    twin = table.append_column("label", pa.array(np.arange(len(table)) % 2 == 0))
    words = tmp_path / "words.parquet"
    parquet.write_table(
        table.append_column("v", pa.array(["NA", "null", "yes", "n/a"] * len(table))[: len(table)]),
        words,
    )
    # the same words are empty cells as in CSV
    assert read_table(str(words))["v"].null_count == 3 * len(table) // 4
    path = tmp_path / "t.parquet"
    crops = twin.group_by(["source", "record"], use_threads=False).aggregate(
        [("age", "min"), ("label", "min")]
    )
    parquet.write_table(crops.rename_columns(["source", "record", "age", "label"]), path)
    known = read_task(TaskConfig(kind="regression", labels=str(path), columns=("age",)), [dataset])
    np.testing.assert_array_equal(known.y[0][:, 0], dataset.column("age"))
    assert (
        read_task(TaskConfig(kind="binary", labels=str(path), columns=("label",)), [dataset])
        .y[0]
        .sum()
        > 0
    )


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["0", "1"], "binary"),
        (["AF", "NSR"], "multiclass"),
        (["1", "2", "3"], "multiclass"),
        ([f"{i}.5" for i in range(20)], "regression"),
    ],
)
def test_the_kind_is_guessed(
    cells: list[str], kind: str, dataset: Dataset, records: list[str], write: Write
) -> None:
    task = guess(
        TaskConfig(
            labels=write(
                ["record", "v"], [(n, cells[i % len(cells)]) for i, n in enumerate(records)]
            )
        )
    )
    assert task.kind == kind
    known = read_task(task, [dataset])
    if kind == "multiclass":
        assert (
            known.classes == tuple(cells) == known.task.classes and (known.y[0].sum(1) == 1).all()
        )


def test_age_and_sex_of_the_dataset_are_drawn_by_patient(dataset: Dataset) -> None:
    age = read_task(TaskConfig("age", "regression", columns=("age",), split="8:1:1"), [dataset])
    patients = np.array(dataset.table(["patient"])["patient"].to_pylist(), object)
    sides = [set(patients[age.rows(0, split)]) - {None} for split in ("train", "valid", "test")]
    assert all(sides) and not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])
    assert len(sides[0]) > 5 * len(sides[2])
    sex = read_task(
        TaskConfig("sex", "multiclass", columns=("sex",), classes=("F", "M"), split="8:1:1"),
        [dataset],
    )
    both = (age.split[0] > 0) & (sex.split[0] > 0)  # the same draw for every task
    assert (age.split[0] == sex.split[0])[both].all() and both.sum() > 50
    assert (
        read_task(TaskConfig("age", "regression", columns=("age",), split="8:1:1"), [dataset]).facts
        == age.facts
    )


def test_folds_splits_and_unknown_labels(
    dataset: Dataset, records: list[str], fold_of: dict[str, int], write: Write
) -> None:
    table = write(
        ["record", "v", "fold"],
        [(n, i % 2 if i else "", fold_of[n]) for i, n in enumerate(records)],
    )
    known = read_task(TaskConfig(kind="binary", labels=table), [dataset])
    assert known.task.folds == {"train": tuple("01234567"), "valid": ("8",), "test": ("9",)}
    name = dataset.column("record")
    assert {fold_of[n] for n in name[known.rows(0, "valid")]} == {8} and records[0] not in name[
        known.rows(0, "train")
    ]
    chosen = TaskConfig(
        kind="binary", labels=table, folds={"train": ("1",), "valid": ("2",), "test": ("3",)}
    )
    assert {fold_of[n] for n in name[read_task(chosen, [dataset]).rows(0, "test")]} == {3}
    # pandas
    decimals = write(
        ["record", "v", "fold"], [(n, i % 2, f"{fold_of[n]}.0") for i, n in enumerate(records)]
    )
    assert {
        fold_of[n]
        for n in name[read_task(replace(chosen, labels=decimals), [dataset]).rows(0, "test")]
    } == {3}
    names = ["train"] * 8 + ["val", "Test"]
    table = write(
        ["record", "v", "split"], [(n, i % 2, names[fold_of[n]]) for i, n in enumerate(records)]
    )
    assert (
        read_task(TaskConfig(kind="binary", labels=table), [dataset]).split[0][known.split[0] > 0]
        > 0
    ).all()
    roles = read_task(TaskConfig(kind="binary", labels=table, split="roles"), [dataset])
    assert (
        roles.rows(0, "valid").tolist() == dataset.select(dx="valid").tolist() and roles.role == ""
    )


def test_copies_of_test_ecgs_are_left_out(
    dataset: Dataset,
    records: list[str],
    fold_of: dict[str, int],
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = write(["record", "v", "fold"], [(n, i % 2, fold_of[n]) for i, n in enumerate(records)])
    column, before = Dataset.column, read_task(TaskConfig(kind="binary", labels=table), [dataset])
    train, test = before.rows(0, "train")[0], before.rows(0, "test")[0]

    def copied(self: Dataset, name: str) -> np.ndarray:
        values = column(self, name).copy()
        if name == "waveform":
            values[train] = values[test]
        return values

    monkeypatch.setattr(Dataset, "column", copied)
    after = read_task(TaskConfig(kind="binary", labels=table), [dataset])
    assert after.split[0][train] == 0 and (after.split[0] != before.split[0]).sum() == 1
    assert "1 crops are left out: copies of ECGs in valid or test" in after.remarks


def test_records_missing_from_table_or_data_are_counted(
    dataset: Dataset, records: list[str], write: Write
) -> None:
    table = write(
        ["record", "v"], [(n, i % 2) for i, n in enumerate(records[10:])] + [("X1", 1), ("X2", 0)]
    )
    first, second = read_task(TaskConfig(kind="binary", labels=table), [dataset]).remarks
    assert f"2 (X1, X2) of {len(records) - 8} records are not in the data" in first
    assert f"/{records[0]}" in second and "10 (" in second


BAD: list[tuple[str, list[str], Callable[[list[str]], list[Any]], dict[str, Any]]] = [
    ("none of its 1 records is in the data: it names X", ["record", "v"], lambda r: [("X", 1)], {}),
    ("record .* is in rows 1 and 3", ["record", "v"], lambda r: [(r[0], 1), (r[1], 0), (r[0], 0)], {}),
    ("patient .* is in folds \\d and \\d", ["record", "v", "fold"], lambda r: [(n, 1, i % 3) for i, n in enumerate(r)], {}),
    ("folds 1, 2: at least 3", ["record", "v", "fold"], lambda r: [(r[0], 1, 1), (r[1], 0, 2)], {}),
    ("v has 171 values: use at most 100 classes", ["record", "v"], lambda r: list(zip(r[:171], r[:171], strict=True)),
     {"kind": "multiclass"}),
    ("fold has 171 values: use at most 100", ["record", "v", "fold"], lambda r: [(n, 1, i) for i, n in enumerate(r[:171])], {}),
    ("split 'tset': write train", ["record", "v", "split"], lambda r: [(r[0], 1, "train"), (r[1], 0, "tset")], {}),
    ("'v' of record .*: 'high' is not a number", ["record", "v"], lambda r: [(r[0], "high")], {"kind": "regression"}),
    ("'v' of record .*: 'inf' is not a number", ["record", "v"], lambda r: [(r[0], "inf")], {"kind": "regression"}),
    ("'v' of record .*: '2' is not 0 or 1", ["record", "v"], lambda r: [(r[0], "2")], {}),
    ("'v' of record .*: 'C' is not one of its classes A, B", ["record", "v"], lambda r: [(r[0], "C")],
     {"kind": "multiclass", "classes": ("A", "B")}),
    ("no record has a known label in v", ["record", "v"], lambda r: [(r[0], ""), (r[1], "nan")], {}),
    ("no column 'w': its label columns are v", ["record", "v"], lambda r: [(r[0], 1)], {"columns": ("w",)}),
    ("has one column, not v, w", ["record", "v", "w"], lambda r: [(r[0], 1, 1)], {}),
    ("no column 'of labels'", ["record", "fold"], lambda r: [(r[0], 1)], {}),
    ("a column `record` must name", ["name", "v"], lambda r: [(r[0], 1)], {}),
    ("two columns are called 'v'", ["record", "v", "v"], lambda r: [(r[0], 1, 1)], {}),
    ("has neither `fold` nor `split`", ["record", "v"], lambda r: [(r[0], 1)], {"split": "column"}),
    ("cannot be read as CSV or parquet", ["record", "v"], lambda r: [(r[0], 1), (r[1], 1, 2, 3)], {}),
    ("no such file: name a CSV", ["record", "v"], lambda r: [], {"labels": "/nowhere.csv"}),
]  # fmt: skip


def test_a_header_with_an_open_quote_is_named(tmp_path: Path) -> None:
    (tmp_path / "open.csv").write_text('record,"v\n' + "A,1\n" * 60_000)
    with pytest.raises(ConfigError, match="the first line has a quote that is not closed"):
        read_table(str(tmp_path / "open.csv"))


@pytest.mark.parametrize(("says", "header", "rows", "how"), BAD, ids=[case[0][:30] for case in BAD])
def test_a_table_that_cannot_be_used_is_one_line(
    says: str,
    header: list[str],
    rows: Any,
    how: dict[str, Any],
    dataset: Dataset,
    records: list[str],
    write: Write,
) -> None:
    table = write(header, rows(records))
    with pytest.raises(ConfigError, match=says) as caught:
        read_task(TaskConfig(**{"kind": "binary", "labels": table, **how}), [dataset])
    assert "\n" not in str(caught.value)


def test_a_name_shared_by_two_databases_needs_a_source(
    dataset: Dataset, records: list[str], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, other = (
        Dataset.table,
        next(i for i, n in enumerate(dataset.column("source")) if n != dataset.column("source")[0]),
    )

    def renamed(self: Dataset, columns: Any = None) -> pa.Table:
        """The first record gets the name of another database's record."""
        table = whole(self, columns)
        if columns == ["source", "record"]:
            names = table["record"].to_pylist()
            names[other] = names[0]
            table = table.set_column(1, "record", [names])
        return table

    monkeypatch.setattr(Dataset, "table", renamed)
    with pytest.raises(ConfigError, match="add a column `source`"):
        read_task(
            TaskConfig(kind="binary", labels=write(["record", "v"], [(records[0], 1)])), [dataset]
        )
    source = dataset.column("source")[0]
    known = read_task(
        TaskConfig(
            kind="binary", labels=write(["source", "record", "v"], [(source, records[0], 1)])
        ),
        [dataset],
    )
    assert known.y[0][0] == 1 and np.isnan(known.y[0][other])
    assert len(known.rows(0, "test")) <= 1


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        ConfigError, match=r"s3://b/l.csv needs the extra s3: pip install 'omnilead\[s3\]'"
    ):
        read_table("s3://b/l.csv")
    with pytest.raises(ConfigError, match=r"s3://b/run needs the extra s3"):
        omnilead.load("s3://b/run")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"gs://b/l.csv: Please install gcsfs"):
        read_table("gs://b/l.csv")


def test_invalid_tasks_are_refused(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"task\.folds: '2' is in two splits"):
        TaskConfig(folds={"train": ("1", "2"), "test": ("2",)})
    for task, says in (
        (TaskConfig(kind="binary"), "name a label table"),
        (TaskConfig(kind="identity", labels="my.csv"), "its labels are the dataset's patients"),
        (TaskConfig(kind="regression", columns=("height",)), "'height' is not in the dataset"),
        (TaskConfig(split="8:1:1"), "name one with --labels"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_task(task, [dataset])


def test_row_numbers_odd_numbers_and_rows_without_a_fold(
    dataset: Dataset, records: list[str], fold_of: dict[str, int], write: Write
) -> None:
    """What spreadsheets and pandas leave in a table."""
    numbers = ["1_000", "", *("12.5" for _ in records[2:])]
    table = write(
        ["", "record", "ef", "Unnamed: 0"],
        [[i, *pair, i] for i, pair in enumerate(zip(records, numbers, strict=True))],
    )
    assert guess(TaskConfig(labels=table)).columns == ("ef",)
    labels = read_task(TaskConfig(kind="regression", labels=table), [dataset])
    of = dict(
        zip(
            dataset.table(["record"])["record"].to_pylist(), labels.y[0][:, 0].tolist(), strict=True
        )
    )
    assert (of[records[0]], of[records[2]]) == (1000, 12.5) and np.isnan(of[records[1]])
    splits = {0: "", 8: "valid", 9: "test"}
    some = write(
        ["record", "af", "split"],
        [(name, i % 2, splits.get(fold_of[name], "train")) for i, name in enumerate(records)],
    )
    remarks = " ".join(read_task(TaskConfig(kind="binary", labels=some), [dataset]).remarks)
    assert "crops are left out: their split is not for train, valid or test" in remarks


def test_names_in_a_table_do_not_control_the_terminal(
    dataset: Dataset, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """A label's name may hold escape sequences, which could hide lines or change what was
    copied."""
    name = "AF\x1b[2J\x1b]0;title\x07\u202e"
    table, shown = write(["record", name], [["nowhere", "1"]]), r"AF\x1b[2J\x1b]0;title\x07\u202e"
    with pytest.raises(ConfigError) as error:
        guess(TaskConfig(labels=table, columns=("other",)))
    assert shown in str(error.value) and name not in str(error.value)
    arguments = [
        "--start",
        "small",
        "--data",
        dataset.root.url,
        "--labels",
        table,
        "--columns",
        "other",
        "--out",
        "OUT",
    ]
    assert finetune.main(arguments) == 2
    err = capsys.readouterr().err
    assert shown in err and "\x1b" not in err and err.count("\n") == 1
