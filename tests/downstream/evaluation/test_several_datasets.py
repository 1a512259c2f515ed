"""Heads, comparisons and scores over several datasets, as if they were one."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow.csv import write_csv

import omnilead
from omnilead.__main__ import main
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources
from omnilead.data_tools.synthetic.archive import synthesise
from omnilead.downstream.evaluation.records import ShownLeads, fold_groups, probed_records
from omnilead.downstream.evaluation.results import record_names
from omnilead.downstream.tasks.config import TaskConfig
from omnilead.downstream.tasks.labels import read_task
from omnilead.engine.data.datasets import Datasets, open_together
from omnilead.engine.model.input import Input
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.leads import ALL_LEADS
from tests.conftest import save_model

pytestmark = pytest.mark.usefixtures("few_resamples")


def synthetic(place, seed):
    synthesise(place / "archive", patients=30, seed=seed, progress=False)
    return shard(open_sources(str(place / "archive")), ShardOptions(str(place / "ds"), quiet=True))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return synthetic(tmp_path_factory.mktemp("other"), seed=8)


@pytest.fixture(scope="module")
def both(dataset, other):
    """They share nobody."""
    return Datasets((dataset, other))


@pytest.fixture(scope="module")
def overlapping(dataset, tmp_path_factory):
    """They share records and patients, who have other roles in the second."""
    return Datasets((dataset, synthetic(tmp_path_factory.mktemp("overlapping"), seed=7)))


def sheet_of(data, path):
    records = np.unique(data.column("record"))
    write_csv(pa.table({"record": records, "ill": np.resize([1, 0, 0], len(records))}), path)
    return path


@pytest.fixture(scope="module")
def sheet(both, tmp_path_factory):
    return sheet_of(both, tmp_path_factory.mktemp("sheet") / "mine.csv")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("encoder") / "model")


def test_crops_are_numbered_one_after_the_other(both, dataset, other):
    assert len(both) == len(dataset) + len(other)
    rows = np.array([2, len(dataset), len(dataset) + 3])
    of_first, of_other = both.rows_by_dataset(rows)
    assert of_first.tolist() == [2] and of_other.tolist() == [0, 3]
    assert (both[rows[2]].signal_uv == other[3].signal_uv).all()
    assert Datasets((dataset,)).fingerprint == dataset.fingerprint
    with pytest.raises(ConfigError, match=r"--data: .* are the same data"):
        open_together([dataset, dataset.root.url])


def test_records_of_one_name_are_two_and_patients_are_one(overlapping, tmp_path):
    both, sheet = overlapping, sheet_of(overlapping, tmp_path / "mine.csv")
    labels = read_task(TaskConfig(kind="binary", labels=str(sheet)), both.all)
    assert any("are in several datasets" in remark for remark in labels.remarks)
    shown = ShownLeads(Input(ALL_LEADS, ALL_LEADS), ("12",))
    records = probed_records(both, labels, ("train", "valid", "test"), shown)
    first = records.rows[records.begins]
    in_one = [len(np.unique(data.column("record"))) for data in both.all]
    assert len(first) == sum(in_one)
    # A record has crops of one dataset only, and a name of its own
    number_of_record = np.maximum.reduceat(both.dataset_numbers(records.rows), records.begins)
    assert (number_of_record == both.dataset_numbers(first)).all()
    names = record_names(both, first)
    assert len(set(names)) == len(names)
    # The same person is in one fold
    group_N = fold_groups(both, records)
    patient_N = both.column("patient")[first]
    source_N = both.column("source")[first]
    owner = [f"{s}/{p}" for s, p in zip(source_N, patient_N, strict=True)]
    shared = [name for name in set(owner) if name.partition("/")[2] not in ("None", "")]
    for name in shared:
        assert len(np.unique(group_N[[o == name for o in owner]])) == 1
    assert len(np.unique(labels.all_patients)) < sum(
        len(np.unique(read_task(labels.task, [data]).patients[0])) for data in both.all
    )


def test_a_head_is_fitted_and_scored_on_several(encoder, both, sheet, tmp_path):
    urls = [data.root.url for data in both.all]
    listed = tmp_path / "datasets.txt"
    listed.write_text("\n".join(urls))
    words = ["--model", str(encoder), "--labels", str(sheet), "--out", str(tmp_path / "MODEL")]
    assert main(["fit", "--data", str(listed), *words]) == 0
    omnilead.fit(encoder, data=list(both.all), labels=sheet, out=tmp_path / "SAME")
    for name in ("model.safetensors", "seen.parquet"):
        assert (tmp_path / "MODEL" / name).read_bytes() == (tmp_path / "SAME" / name).read_bytes()
    kept = omnilead.evaluate(
        tmp_path / "MODEL",
        data=urls,
        labels=sheet,
        json=tmp_path / "scores.json",
        report=tmp_path / "page.html",
    )
    assert kept["datasets"] == {data.root.url: data.fingerprint for data in both.all}
    in_memory = omnilead.evaluate(tmp_path / "MODEL", data=both.all, labels=sheet)
    assert in_memory["metrics"] == kept["metrics"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["datasets.txt", "MODEL", "SAME", "scores.json", "page.html"]
    )
    single = [omnilead.evaluate(tmp_path / "MODEL", data=url, labels=sheet) for url in urls]
    assert kept["record"]["n"] == sum(one["record"]["n"] for one in single)
    assert "datasets" not in single[0]


def test_a_comparison_embeds_only_the_dataset_that_is_new(encoder, both, sheet, tmp_path):
    urls, out = [data.root.url for data in both.all], tmp_path / "OUT"
    tasks = {"labels": str(sheet), "tasks": [str(sheet)], "folds": 2, "out": out}
    omnilead.bench([str(encoder)], data=urls[0], **tasks)
    before = {path: path.stat().st_mtime_ns for path in (out / "parts").rglob("*.npz")}
    found = omnilead.bench([str(encoder)], data=urls, **tasks)
    after = {path: path.stat().st_mtime_ns for path in (out / "parts").rglob("*.npz")}
    assert len(after) == 2 * len(before) and before.items() <= after.items()
    assert found["data"] == " ".join(urls)
    records = sum(len(np.unique(data.column("record"))) for data in both.all)
    assert {row["n"] for row in found["rows"]} == {records}


def test_roles_that_contradict_each_other_are_refused(encoder, overlapping, tmp_path):
    """A record that is trained on in one dataset and held out in another."""
    sheet = sheet_of(overlapping, tmp_path / "mine.csv")
    with pytest.raises(ConfigError, match=r"`data`: .* is trained on in .* and held out in"):
        omnilead.fit(encoder, data=list(overlapping.all), labels=sheet, out=tmp_path / "OUT")
    assert not (tmp_path / "OUT").exists()
