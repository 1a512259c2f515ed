"""What a label table is taken for: kinds, words and numbers that are guessed, told, or asked about."""

import json
import re
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from omnilead.downstream.tasks.config import TaskConfig
from omnilead.downstream.tasks.guess import guess_kind
from omnilead.downstream.tasks.labels import read_task
from omnilead.engine.settings.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "cells"),
    [
        ("binary", ["0", "1"]),
        ("multiclass", ["AF", "AVB", "NSR"]),
        ("multiclass", ["1", "2", "3"]),
        ("regression", [f"{i}.5" for i in range(20)]),
    ],
)
def test_the_kind_is_guessed(kind, cells, tables):
    rows = zip(tables.records, cycle(cells), strict=False)
    task = guess_kind(TaskConfig(labels=tables.write("record|v", rows)))
    assert task.kind == kind
    known = read_task(task, [tables.dataset])
    if kind == "multiclass":
        assert known.classes == known.task.classes == tuple(cells)
        assert (known.y[0].sum(1) == 1).all()


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("binary", ["1", "0", "0", ""], "v: binary: 45 yes, 90 no, 45 unknown"),
        ("multiclass", ["AF", "AF", "NSR"], "v: multiclass: AF 120, NSR 60, 0 unknown"),
        ("regression", ["1.5", "70", ""], "v: regression: 120 from 1.5 to 70, 60 unknown"),
    ],
)
def test_the_kind_and_the_counts_are_told(kind, values, says, tables):
    rows = zip(tables.records, cycle(values), strict=False)
    assert f"{tables.path}: {says}" in tables.read("record|v", rows, kind=kind).remarks


@pytest.mark.parametrize(
    "values", ["1 0 0 1 0 9", "ja nein nein ja nein unklar", "J N N J N U", "yes no maybe"]
)
def test_a_third_value_is_asked_about(values, tables):
    """It was a class of its own: another kind, and another score."""
    path = tables.write("record|v", list(zip(tables.records, cycle(values.split()), strict=False)))
    third = values.split()[-1]
    says = rf"my.csv: column 'v' holds '.*' in \d+ rows: does '{third}' mean unknown\?"
    with pytest.raises(ConfigError, match=says):
        guess_kind(TaskConfig(labels=path))
    assert read_task(TaskConfig("a", "multiclass", labels=path), [tables.dataset]).classes
    for classes in ("1 0 2", "0 0 0 1 0 1 2 3"):
        rows = list(zip(tables.records, cycle(classes.split()), strict=False))
        assert guess_kind(TaskConfig(labels=tables.write("record|v", rows))).kind == "multiclass"


@pytest.mark.parametrize("values", [("1", "2"), ("sinus", "af"), ("no", "MI")])
def test_which_of_two_values_is_positive_is_asked(values, tables):
    """They were two classes, each scored against the other: another AUPRC."""
    path = tables.write("record|v", list(zip(tables.records, cycle(values), strict=False)))
    first, second = values
    asked = (
        f"'{first}' and '{second}': which of them counts as 1\\? --positive {first} or --positive"
    )
    with pytest.raises(ConfigError, match=asked):
        guess_kind(TaskConfig(labels=path))
    assert guess_kind(TaskConfig(labels=path, positive=second)).kind == "binary"
    known = tables.read_file(positive=second)
    assert known.classes == (f"v={second}",)
    expected = dict(zip(tables.records, cycle([0, 1]), strict=False))
    assert known.y[0][:, 0].tolist() == [expected[name] for name in tables.dataset.column("record")]
    assert f"{path}: {second} in column 'v' is 1, all other values are 0" in known.remarks
    with pytest.raises(
        ConfigError, match="column 'v' has no 'x', which is to count as 1: choose one of"
    ):
        tables.read_file(positive="x")
    with pytest.raises(ConfigError, match="is for kind binary, not multiclass"):
        tables.read_file(positive=second, kind="multiclass")


def test_one_of_several_values_can_be_the_positive_one(tables):
    rows = list(zip(tables.records, cycle(["AF", "", "NSR", "PAC"]), strict=False))
    task = guess_kind(TaskConfig(labels=tables.write("record|v", rows), positive="AF"))
    y = read_task(task, [tables.dataset]).y[0][:, 0]
    assert np.unique(y[~np.isnan(y)]).tolist() == [0, 1]
    expected = dict(zip(tables.records, cycle([1, np.nan, 0, 0]), strict=False))
    np.testing.assert_array_equal(y, [expected[name] for name in tables.dataset.column("record")])


def test_a_word_beside_the_positive_value_is_asked_about(tables):
    rows = list(zip(tables.records, cycle(["AF", "none"]), strict=False))
    path = tables.write("record|v", rows)
    with pytest.raises(
        ConfigError, match=r"'none' .* empty these cells. If it means not AF, write 0"
    ):
        guess_kind(TaskConfig(labels=path, positive="AF"))
    tables.write("record|v", zip(tables.records, cycle(["AF", "0"]), strict=False))
    assert guess_kind(TaskConfig(labels=path, positive="AF")).kind == "binary"


def test_columns_of_two_numbers_are_no_regression(tables):
    rows = list(zip(tables.records, cycle("12"), cycle("122"), strict=False))
    path = tables.write("record|v|w", rows)
    with pytest.raises(ConfigError, match="column 'v' holds only '1' and '2': write 0 and 1; if"):
        guess_kind(TaskConfig(labels=path))


def test_classes_that_differ_only_in_case_are_told(tables):
    rows = list(zip(tables.records, cycle(["MI", "mi", "Mi", "NORM"]), strict=False))
    remarks = tables.read("record|v", rows, kind="multiclass").remarks
    assert (
        f"{tables.path}: 'MI' (45 records) and 'Mi' (45 records) and 'mi' (45 records) differ only in case "
        "and are 3 classes: if they are one, write them alike"
    ) in remarks
    path = tables.write("record|v", list(zip(tables.records, cycle(["MI", "mi"]), strict=False)))
    with pytest.raises(ConfigError, match="'MI' and 'mi', which differ only in case"):
        guess_kind(TaskConfig(labels=path))


def test_a_minus_is_no_in_a_table_with_a_plus(tables):
    """In every label column, also in one without any plus."""
    rows = [(name, "+-"[i % 2], "-", "") for i, name in enumerate(tables.records)]
    task = guess_kind(TaskConfig(labels=tables.write("record|a|b|c", rows)))
    assert task.kind == "multilabel"
    known = read_task(task, [tables.dataset])
    assert np.nansum(known.y[0], axis=0).tolist()[1:] == [0, 0] and (known.y[0][:, 1] == 0).all()


def test_times_with_another_column_of_yes_and_no_are_one_line(tables):
    path = tables.write("record|time|event|sick", [("a", "2", "1", "0"), ("b", "3", "0", "1")])
    with pytest.raises(ConfigError, match=r"column 'sick' is neither time nor event: leave it out"):
        guess_kind(TaskConfig(labels=path))


@pytest.mark.parametrize(
    ("kind", "values", "code"),
    [
        ("multiclass", "019", "9"),
        ("multiclass", ["0", "1", "-9"], "-9"),
        ("regression", [*map(str, range(40, 90)), "999"], "999"),
        ("multiclass", "123456789", ""),
        ("regression", ["-0.5", "1.5", "-9"], ""),
        ("regression", ["85", "99", "30"], ""),
    ],
)
def test_a_number_that_may_stand_for_unknown_is_named(kind, values, code, tables):
    rows = zip(tables.records, cycle(values), strict=False)
    remarks = " ".join(tables.read("record|v", rows, kind=kind).remarks)
    assert (f"my.csv: does {code} in column 'v' mean unknown?" in remarks) == bool(code)
    assert code or "mean unknown" not in remarks


def test_a_label_without_a_0_is_named(tables):
    """Many tables leave a cell empty where a diagnosis is absent."""
    rows = zip(tables.records, cycle(["1", ""]), cycle("01"), strict=False)
    remarks = tables.read("record|v|w", rows, kind="multilabel").remarks
    assert any("no record is 0 in v: an empty cell is unknown: write 0" in r for r in remarks)
    rows = zip(tables.records, cycle("a"), strict=False)
    remarks = tables.read("record|v", rows, kind="multiclass", classes=("a", "b")).remarks
    assert not any("is 0" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["40,1", "35,0"], "neither numbers nor classes: it holds '40,1' and '40,1'"),
        (["1.234,5", "> 89"], "it holds '1.234,5' and '1.234,5'"),
        (
            [f"{value} ms" for value in range(30)],
            "numbers followed by something else, such as '0 ms",
        ),
        (["1st degree", "2nd degree", "normal"], ""),
        (["1", "2", "3", ""], ""),
    ],
)
def test_a_column_that_is_neither_numbers_nor_classes_is_refused(values, says, tables):
    rows = list(zip(tables.records, cycle(values), strict=False))
    path = tables.write("record|v", rows)
    if says:
        with pytest.raises(ConfigError, match=rf"my.csv: column 'v' .*{re.escape(says)}"):
            guess_kind(TaskConfig(labels=path))
        assert read_task(TaskConfig("a", "multiclass", labels=path), [tables.dataset]).classes
    else:
        assert guess_kind(TaskConfig(labels=path)).kind == "multiclass"


def test_numbers_beside_0_and_1_are_not_made_a_regression_of_all(tables):
    path = tables.write("record|AF|EF|none", [("a", "0", "40", ""), ("b", "1", "55", "")])
    with pytest.raises(
        ConfigError, match=r"column 'EF' holds numbers such as '40', not 0 and 1: .*AF"
    ):
        guess_kind(TaskConfig(labels=path))
    assert guess_kind(TaskConfig(labels=path, columns=("AF", "none"))).kind == "multilabel"
    tables.write("record|AF|EF", [("a", "0", "41,5"), ("b", "1", "55")], ";")  # quoted as typed
    with pytest.raises(ConfigError, match=r"column 'EF' holds numbers such as '41,5', not 0 and 1"):
        guess_kind(TaskConfig(labels=path))
    tables.write("record|AF|EF", [("a", "0", "1"), ("b", "1", "2")])
    with pytest.raises(ConfigError, match=r"column 'EF' holds numbers such as '2', not 0 and 1"):
        guess_kind(TaskConfig(labels=path))
    tables.write("record|age|time|event", [("a", "61", "2.5", "0"), ("b", "70", "3", "1")])
    with pytest.raises(ConfigError, match=r"'age' .*: --columns time event, .* --kind regression"):
        guess_kind(TaskConfig(labels=path))


def test_misspelt_and_rare_classes_are_named(tables):
    common = cycle(["normal", "NORM", "grade1", "grade2"])
    values = ["normall", "Norm", "grade3", *(next(common) for _ in tables.records[3:])]
    *_, case, two, rare, _ = tables.read(
        "record|v", zip(tables.records, values, strict=True), kind="multiclass"
    ).remarks
    assert "'NORM' (44 records) and 'Norm' (1 records) differ only in case and are 2" in case
    assert "are 'normall' (1 records) and 'normal' (45)" in two
    few = "fewer than 5 records are positive in Norm (1), grade3 (1), normall (1): too few to learn"
    assert few in rare


@pytest.mark.parametrize(
    ("columns", "mend"),
    [
        ("af|note|age", "leave it out: --columns af, or columns: [af] in"),
        ("note|age", "leave it out: --columns age, or columns: [age] in"),
        (
            "note|remark",
            "for texts as classes, choose one column: --columns note, or columns: [note] in",
        ),
    ],
)
def test_columns_of_texts_are_not_proposed(columns, mend, tables):
    cells = {"af": [0, 1], "age": [61, 62], "note": ["calm", "lively"], "remark": ["a", "b"]}
    rows = [(f"r{i}", *(cells[name][i % 2] for name in columns.split("|"))) for i in range(40)]
    with pytest.raises(
        ConfigError, match=f"'note' holds texts such as 'calm', .*: {re.escape(mend)}"
    ):
        guess_kind(TaskConfig(labels=tables.write(f"record|{columns}", rows)))


@pytest.mark.parametrize("word", ["NA", "null", "nan", "N/A", "none", "Unknown", "?"])
def test_a_class_that_may_mean_a_missing_value_is_asked_about(word, tables):
    """An empty cell is missing. Of a word only the user knows, who says it by naming the classes."""
    values = dict(zip(tables.records, cycle([word, "AF", "", "SR", "AVB"]), strict=False))
    path = tables.write("record|v", values.items())
    task = guess_kind(TaskConfig(labels=path))
    assert task.kind == "multiclass"
    names = sorted([word, "AF", "AVB", "SR"])
    asked = rf"'{word}' in column 'v' (36 rows): is it a class, or does it mean unknown? .* --set 'task.classes="
    asked = re.escape(asked).replace(r"\.\*", ".*") + re.escape(json.dumps(names))
    with pytest.raises(ConfigError, match=asked):
        read_task(task, [tables.dataset])
    for classes in (tuple(names), ("AF", "AVB", "SR")):
        known = read_task(replace(task, classes=classes), [tables.dataset])
        for name, y in zip(tables.dataset.column("record"), known.y[0], strict=True):
            expected = [float(values[name] == one) for one in classes]
            assert y.tolist() == expected if sum(expected) else np.isnan(y).all()
        said = f"{word!r} in column 'v' (36 rows) is taken for an empty cell"
        assert (said in " ".join(known.remarks)) == (word not in classes)


@pytest.mark.parametrize(
    ("cells", "kind"),
    [(["0", "1", "?"], "binary"), ([*map(str, range(30)), "NA"], "regression")],
)
def test_a_word_among_numbers_is_asked_about_and_then_unknown(cells, kind, tables):
    values = dict(zip(tables.records, cycle(cells), strict=False))
    task = TaskConfig(labels=tables.write("record|v", values.items()))
    with pytest.raises(
        ConfigError, match=f"--kind {kind} if it means unknown, --kind multiclass if"
    ):
        guess_kind(task)
    known = read_task(replace(task, kind=kind), [tables.dataset])
    expected = [values[name] for name in tables.dataset.column("record")]
    expected = [float(cell) if cell.isdigit() else np.nan for cell in expected]
    np.testing.assert_array_equal(known.y[0][:, 0], np.float32(expected))
    assert any(f"{cells[-1]!r} in column 'v'" in remark for remark in known.remarks)
