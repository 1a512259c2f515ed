"""Which row of a table names which record."""

import pyarrow as pa
import pytest

from omnilead.data_tools.ecg.record_names import match_records
from omnilead.data_tools.io.errors import DataError
from omnilead.data_tools.sources.base import name_with_folders
from tests.tables import tabulated

NAMES = ["ward_3_A1", "ward_3_A2", "icu_A2", "Jahr_2000_07434", "1009874_1009874", "syn0_HR00001"]
NAMES += ["plain", "HR00001", "HR00002"]


@pytest.mark.parametrize(
    ("record", "name", "noted"),
    tabulated(r"""
ward 3/A1                        | ward_3_A1 |
ward 3\A1.xml                    | ward_3_A1 |
C:\My ECGs\ward 3\A2.hea         | ward_3_A2        | folders
Jahr 2000/07434                  | Jahr_2000_07434 |
./icu/A2                         | icu_A2 |
records500/00000/00002_hr        | HR00002 |
other/folder/plain.dcm           | plain            | folders
A1                               | ward_3_A1        | end
3/A2                             | ward_3_A2        | end
A1.xml                           | ward_3_A1        | end
07434                            | Jahr_2000_07434  | end
1009874                          | 1009874_1009874  | end
1009874.0                        | 1009874_1009874  | end
HR00001                          | HR00001 |
other/A1                         | |
1                                | |
"""),
)
def test_ways_in_which_a_table_may_name_a_record(record, name, noted):
    names = pa.array(NAMES)
    table = pa.table({"record": [record, "icu_A2" if name != "icu_A2" else "plain"]})
    matches = match_records("my.csv", table, names, names)
    rows = dict(zip(NAMES, matches.row, strict=True))
    assert [found for found, row in rows.items() if row == 0] == ([name] if name else [])
    said = " ".join(matches.notes)
    for kind, how in (("end", "by the end of a name"), ("folders", "without their first folders")):
        assert (f"1 ({record}) of 2 records are matched {how}" in said) == (noted == kind)
    assert (f"{record} is {name}" in said) == bool(noted)
    assert ("not in the data" in said) == (not name)


def test_the_end_of_several_names_is_refused():
    names = pa.array(NAMES)
    table = pa.table({"record": ["A1", "", "A2.xml"]})
    says = r"my.csv: A2 \(row 4\) is the end of two names, ward_3_A2 and icu_A2: write the record's name with"
    with pytest.raises(DataError, match=says):
        match_records("my.csv", table, names, names)
    keys = pa.array([f"dicom/{name}" for name in NAMES[:2]] + [f"edf/{name}" for name in NAMES[2:]])
    table = pa.table({"record": ["A2", "A2", "A1", None], "source": ["edf", "dicom", "edf", "edf"]})
    matches = match_records("my.csv", table, keys, names)
    assert matches.row.tolist() == [-1, 1, 0, *[-1] * 6]


@pytest.mark.parametrize(
    ("names", "records", "rows", "missing"),
    [
        (["ward_3_A1"], ["ward_3_A1", "A1"], [0], "A1"),
        (["ward_3_A1"], ["siteB/ward_3/A1", "ward 3/A1.xml"], [1], "siteB/ward_3/A1"),
        (["ward_3_A1", "icu_A1"], ["A1", "ward_3_A1", "icu_A1"], [1, 2], "A1"),
        (["ward_3_A1", "icu_A1"], ["A1", "ward_3_A1"], [1, -1], "A1"),
        (["A_1"], ["A.1", "A_1"], [1], "A.1"),
        (["1_5", "ward_1_5", "B"], ["1.5", "B"], [-1, -1, 1], "1.5"),
    ],
)
def test_a_row_that_is_not_the_name_of_a_record_takes_none_that_another_row_names(
    names, records, rows, missing
):
    names = pa.array(names)
    matches = match_records("my.csv", pa.table({"record": records}), names, names)
    assert matches.row.tolist() == rows
    assert matches.notes == [f"1 ({missing}) of {len(records)} records are not in the data"]


WITHOUT_FOLDERS = "records are matched without their first folders"
OTHER_CHARACTERS = "records are matched with _ for unusual characters of a file's name"


@pytest.mark.parametrize(
    ("record", "name", "how"),
    [
        ("siteB/ward_3/A1", "ward_3_A1", WITHOUT_FOLDERS),
        ("siteB/ward_3/A1", "A1", WITHOUT_FOLDERS),
        ("C:\\ward 3\\A 1.xml", "ward_3_A_1", WITHOUT_FOLDERS),
        ("A 1", "A_1", OTHER_CHARACTERS),
        ("A.1", "A_1", OTHER_CHARACTERS),
        ("ward 3/1.5", "ward_3_1_5", OTHER_CHARACTERS),
    ],
)
def test_a_note_counts_names_without_their_folders_or_with_other_characters(record, name, how):
    names = pa.array([name])
    matches = match_records("my.csv", pa.table({"record": [record]}), names, names)
    assert matches.row.tolist() == [0]
    assert matches.notes == [f"1 ({record}) of 1 {how}: {record} is {name}"]


@pytest.mark.parametrize("path", ["A1", "ward 3/A1", "Füße/b.c/A_1", "a  b/c-d/07434"])
def test_the_path_that_a_name_is_made_of_needs_no_note(path):
    names = pa.array([name_with_folders(path, path.rpartition("/")[2])])
    for record in (path, f"{path}.hea", f"./{path}.xml", path.replace("/", "\\")):
        matches = match_records("my.csv", pa.table({"record": [record]}), names, names)
        assert matches.row.tolist() == [0] and not matches.notes


def test_a_name_whose_zeros_a_spreadsheet_dropped_is_pointed_out():
    table = pa.table({"record": ["7434", "633", "A1", "8"]})
    for names in (["07434", "00633", "A1"], ["Jahr_2000/07434", "ward_00633", "A1"]):
        matches = match_records("my.csv", table, pa.array(names), pa.array(names))
        (note,) = matches.notes
        assert note.startswith("3 (7434, ") and note.endswith(
            " of 4 records are not in the data; 7434 may be 07434: did a spreadsheet drop zeros?"
        )


def test_a_real_record_is_not_taken_for_a_synthetic_one():
    names = pa.array(["syn0_HR00001", "syn0_HR00002", "A_HR00001"])
    table = pa.table({"record": ["HR00001", "HR00002", "syn0_HR00002"]})
    matches = match_records("my.csv", table, names, names)
    assert matches.row.tolist() == [-1, 2, 0]
