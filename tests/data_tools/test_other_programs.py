"""A dataset's crops for PyTorch, webdataset, zarr and Hugging Face datasets: those of a role and no
others, equal to what `Dataset.read` returns. docs/other_programs.md has examples, which
test_docs.py runs."""

import gc
import pickle
from pathlib import Path

import numpy as np
import pytest
from handmade import build, flip

from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.data_tools.dataset.other_programs import ROLE_COLUMN_AND_VALUE
from omnilead.data_tools.io.errors import DataError, DatasetError

# webdataset leaves its files to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
GIVEN = [
    role for role in ROLE_COLUMN_AND_VALUE if role not in ("dx:test",)
]  # the small dataset may have none


def rows_of(dataset, role):
    """Those that samples.parquet says."""
    kind, _, value = role.partition(":")
    table = dataset.table(["pretrain", "dx_role", "id_role"]).to_pylist()
    if kind == "all":
        return list(range(len(table)))
    if kind == "pretrain":
        return [row for row, facts in enumerate(table) if facts["pretrain"]]
    return [row for row, facts in enumerate(table) if facts[f"{kind}_role"] == value]


def millivolts(dataset, rows):
    return np.stack([dataset.read(row).astype(np.float32) / 1000 for row in rows])


@pytest.mark.parametrize("role", GIVEN)
def test_every_way_gives_the_crops_of_a_role(role, dataset):
    rows = rows_of(dataset, role)
    assert rows
    expected = millivolts(dataset, rows)
    crops = dataset.torch(role)
    assert [y for _, y in crops] == rows and len(crops) == len(rows)
    np.testing.assert_array_equal(np.stack([x for x, _ in crops]), expected)
    assert crops[-1][0].dtype == np.float32
    stream = list(dataset.webdataset(role))
    np.testing.assert_array_equal(np.stack([crop["ecg"] for crop in stream]), expected)
    records = dataset.table(["record"])["record"].to_pylist()
    assert [crop["json"]["record"] for crop in stream] == [records[row] for row in rows]
    np.testing.assert_array_equal(dataset.zarr().oindex[rows], np.round(1000 * expected))


def test_labels_by_name_and_from_tables(dataset, tmp_path, capsys):
    """What is unknown is NaN; crops of which nothing is known are left out, with a note."""
    crops = dataset.torch("pretrain", labels=["AF", "age"])
    table = dataset.table(["source", "record", "dx", "age"]).to_pylist()
    rows = rows_of(dataset, "pretrain")
    has_af, known = (
        dataset.labels[rows, CLASSES.index("AF")],
        [bool(table[row]["dx"]) for row in rows],
    )
    af = np.where(known, has_af, np.nan).astype(np.float32)
    age = np.array([table[row]["age"] for row in rows], np.float32)
    expected = np.stack([af, age], 1)[~np.isnan(np.stack([af, age], 1)).all(1)]
    np.testing.assert_array_equal(np.stack([y for _, y in crops]), expected)
    assert {0, 1} <= set(expected[:, 0].tolist())
    alone = np.stack([y for _, y in dataset.torch("pretrain", labels="AF")])
    np.testing.assert_array_equal(alone[:, 0], af[~np.isnan(af)])

    capsys.readouterr()
    lines = ["record,source,fold,ef,mi"]
    for number, row in enumerate(rows[:9]):
        names = table[row]["record"], table[row]["source"]
        lines.append(",".join((*names, "1", str(40 + number), ("NA", "0", "1")[number % 3])))
    lines += [
        f"{table[rows[20]]['record']},{table[rows[20]]['source']},1,,",
        "nobody,ptb-xl,1,50,1",
    ]
    (tmp_path / "my.csv").write_text("\n".join(lines))
    crops = dataset.torch("pretrain", labels=str(tmp_path / "my.csv"))
    said = capsys.readouterr().err
    names = [(row["record"], row["source"]) for row in table]
    expected = {names[row]: number for number, row in enumerate(rows[:9])}
    assert {names[row] for row in crops.rows} == expected.keys()
    for (_, y), row in zip(crops, crops.rows, strict=True):
        number = expected[names[row]]
        np.testing.assert_array_equal(y, [40 + number, (np.nan, 0, 1)[number % 3]])
    assert "my.csv: column 'mi' holds words such as NA in 3 rows: unknown" in said
    assert "my.csv: 1 (nobody) of 11 records are not in the data" in said
    left = len(rows) - len(crops)
    assert f"{left:,} of {len(rows):,} crops of the role pretrain have no label" in said


def test_crops_go_to_workers_of_a_data_loader(dataset):
    """Pickled without what is cached, and in batches as torch makes them."""
    from torch.utils.data import DataLoader

    crops = dataset.torch("dx:train", labels=["AF", "NSR"])
    crops[0]
    assert len(pickle.dumps(crops)) < 20_000
    again = pickle.loads(pickle.dumps(crops))
    np.testing.assert_array_equal(again[3][0], crops[3][0])
    x, y = next(iter(DataLoader(crops, batch_size=4, num_workers=1)))
    assert tuple(x.shape) == (4, 12, 5000) and tuple(y.shape) == (4, 2)
    np.testing.assert_array_equal(x.numpy(), np.stack([crops[i][0] for i in range(4)]))
    (_, rows) = next(iter(DataLoader(dataset.torch("all"), batch_size=4)))
    assert rows.tolist() == [0, 1, 2, 3]


def test_a_flipped_bit_never_becomes_a_crop(small, tmp_path):
    made = build(small, tmp_path / "out")
    flip(tmp_path / "out/shards/00000.tar", 70_000)
    with pytest.raises(DatasetError, match="crop 0 at byte 512 fails its crc32c"):
        made.torch("all")[0]
    with pytest.raises(DatasetError, match=r"00000\.tar: .* fails its crc32c"):
        list(made.webdataset("all"))
    gc.collect()  # the error's traceback holds webdataset's open file, of which no later test should be warned


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (
            lambda made: made.torch("train"),
            "role=train: no such role: choose from all, pretrain, dx",
        ),
        (lambda made: made.webdataset("dx"), "role=dx: no such role: choose from all"),
        (lambda made: made.torch("all", labels=["AFX"]), "labels=AFX: no such label: .* age, AF, "),
        (lambda made: made.torch("all", labels="AFX"), "AFX: no such file"),
        (
            lambda made: made.torch("dx:train"),
            r"no crop has the role dx:train: its roles are {'pretrain'",
        ),
        (
            lambda made: made.torch("all", labels="text.csv"),
            "text.csv: labels must be columns of n",
        ),
        (
            lambda made: made.torch("all", labels="none.csv"),
            "none.csv: labels must be columns of n",
        ),
        (
            lambda made: made.torch("all", labels="empty.csv"),
            "no crop of the role all has a known value",
        ),
        (lambda made: made.zarr(), "has no store.zarr: build it with `format` both"),
    ],
)
def test_what_cannot_be_given_is_an_error_of_one_line(ask, words, small, tmp_path, monkeypatch):
    made = build(small, tmp_path / "out", plan="all")
    monkeypatch.chdir(tmp_path)
    name = made[0].record
    Path("text.csv").write_text(f"record,rhythm\n{name},sinus\n")
    Path("none.csv").write_text(f"record,fold\n{name},1\n")
    Path("empty.csv").write_text(f"record,ef\n{name},\n")
    with pytest.raises(DataError, match=words) as error:
        ask(made)
    assert len(str(error.value).splitlines()) == 1


def test_webdataset_reads_tar_shards_on_a_disk(small, tmp_path):
    build(small, tmp_path / "zarr", format="zarr")
    with pytest.raises(DatasetError, match="webdataset reads tar shards"):
        Dataset.open(tmp_path / "zarr").webdataset("pretrain")
