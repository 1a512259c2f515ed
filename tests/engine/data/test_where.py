"""data.where: an expression chooses the crops, in three-valued logic, and executes nothing."""

import numpy as np
import pyarrow as pa
import pytest

from omnilead.data_tools.dataset import COLUMNS
from omnilead.engine.data.where import MAX_CHARACTERS, where_mask
from omnilead.engine.settings.errors import ConfigError
from tests.tables import tabulated

ROWS = {
    "source": ["a", "a", "b", "b", "b"],
    "age": [17.0, 18.0, None, 60.0, 90.0],
    "sex": ["F", "M", "F", None, "F"],
    "pretrain": [True, True, True, False, False],
    "halves": [2, 2, 1, 2, 2],
    "flags": [[], ["flat:V1"], ["einthoven", "flat:I"], ["large"], []],
}


class Table:
    """A dataset of these rows."""

    def table(self, names):
        return pa.table({name: pa.array(ROWS[name], COLUMNS.field(name).type) for name in names})


def rows(where, cells=None):
    return np.flatnonzero(where_mask(Table(), where, cells)).tolist()


@pytest.mark.parametrize(
    "where, expected",
    tabulated("""
age >= 18                           | 1 3 4
not age >= 18                       | 0
not not age >= 18                   | 1 3 4
age < 18 or sex == 'F'              | 0 2 4
not (age < 18 or sex == 'F')        | 1
age != 18                           | 0 3 4
18 <= age < 90                      | 1 3
-5 < age <= 17                      | 0
age is None                         | 2
age is not None and sex is not None | 0 1 4
age is None or age > 60             | 2 4
sex in ['M', 'X']                   | 1
sex not in ['M', 'X']               | 0 2 4
age in [17, 90]                     | 0 4
pretrain                            | 0 1 2
pretrain == False                   | 3 4
not pretrain and halves == 2        | 3 4
source != 'a'                       | 2 3 4
flags.flat                          | 1 2
not flags.flat and not flags.large  | 0 4
"""),
)
def test_which_crops_an_expression_chooses(where, expected):
    assert rows(where) == [int(row) for row in expected.split()]
    assert rows(" " + where.replace(" ", "\t ") + " ") == rows(where)


def test_columns_of_a_label_table_come_first_and_may_hold_numbers_as_text():
    cells = pa.table({"quality": ["1", "2.5", None, "-3", "10"], "age": ["1", "2", "3", "4", "5"]})
    assert rows("quality > 1", cells) == [1, 4]
    assert rows("not quality > 1", cells) == [0, 3]
    assert rows("quality == '1' or quality == -3", cells) == [0, 3]
    assert rows("age >= 4 and halves == 2", cells) == [3, 4]
    words = pa.table({"quality": ["1", "NA", None, "3", "none"]})
    assert rows("quality > 0", words) == [0, 3]
    assert rows("not quality > 1", words) == [0]
    assert rows("quality == 'NA'", words) == [1]
    with pytest.raises(ConfigError, match="no column 'qualty': use quality, age, shard"):
        rows("qualty > 1", cells)


@pytest.mark.parametrize(
    "where, said",
    [
        *tabulated(r"""
ages >= 18                              | no column 'ages': use shard, .*sex, .*flags.flat
flags.flatt                             | no column 'flags.flatt': use .*flags.einthoven
flags                                   | no column 'flags'
age.real                                | no column 'age.real'
age >=                                  | not understood at character
age > 1; age                            | not understood at character 8
age                                     | must be true or false for each crop: write, for example
1 < 2                                   | must be true or false for each crop
True                                    | must be true or false for each crop
not sex                                 | invert
sex > 3                                 | Failed to parse string: 'F'
age > 99999999999999999999999           | too large
age == None                             | None cannot be used
age is 5                                | 5 cannot be used after is or in
age in []                               | \[\] cannot be used after is or in
'F' in sex                              | sex cannot be used after is or in
age + 1 > 3                             | age \+ 1 cannot be used
age > 9**9**9                           | 9 \*\* 9 \*\* 9 cannot be used
abs(age) > 3                            | abs\(age\) cannot be used
__import__('os').system('touch hacked') | cannot be used
().__class__                            | ().__class__ cannot be used
age > [x for x in age]                  | cannot be used
(lambda: age)()                         | cannot be used
5in [5] and age is 5                    | 5 cannot be used after is or in
-halves == -2                           | negate_checked
f'{age}' == sex                         | cannot be used
(age := 3) > 2                          | cannot be used
"""),
        ("", "not understood"),
        ("a\0b", "not understood"),
        ("(" * 240 + "age" + ")" * 240, "not understood"),
        ("age > 1 " * MAX_CHARACTERS, "more than 500 characters"),
        ("~" * 490, "not understood"),
        ("~" * 490 + "age", "nested too deeply: write, for example"),
        ("age > " + "~" * 490 + "5", "nested too deeply"),
    ],
)
@pytest.mark.filterwarnings("error")  # Python's own of 5in [5] would come before the line
def test_anything_else_is_one_line(where, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"(?s)^data.where=.*{said}") as caught:
        rows(where)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1200
    assert not any(tmp_path.iterdir())


def test_deep_expressions_are_computed():
    assert rows("not " * 122 + "pretrain") == [0, 1, 2]
    assert rows("-" * (MAX_CHARACTERS - 6) + "5<age") == [0, 1, 3, 4]


def test_an_age_that_is_not_a_number_is_missing(monkeypatch):
    monkeypatch.setitem(ROWS, "age", [17.0, float("nan"), None, 60.0, 90.0])
    assert rows("not age >= 18") == [0]
    assert rows("age is None") == [1, 2]
