"""omnilead bench: scores against a direct computation, shares of labels, differences, what is kept,
what is refused."""

import csv
import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from pyarrow.csv import write_csv
from safetensors.torch import load_file, save_file

import omnilead
from omnilead.__main__ import main
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.ecg.constants import LEADS as LEADS_OF
from omnilead.downstream.bench import Comparison
from omnilead.downstream.evaluation import bench, differences, embedders, plan
from omnilead.downstream.evaluation import vectors as vectors_of
from omnilead.downstream.evaluation.differences import ROW_KEYS, bootstrap_weights
from omnilead.downstream.evaluation.identification import crops_to_identify
from omnilead.downstream.evaluation.probe import (
    ProbeData,
    fit_linear_probe,
    train_and_held_out_rows,
)
from omnilead.downstream.evaluation.records import (
    ProbedRecords,
    ShownLeads,
    assign_folds,
    draws_of_share,
    fold_groups,
)
from omnilead.downstream.reports import bench_report
from omnilead.downstream.tasks.config import TaskConfig
from omnilead.downstream.tasks.kinds import KINDS
from omnilead.downstream.tasks.labels import TaskLabels
from omnilead.downstream.tasks.metrics import (
    Classification,
    exact_interval,
    measure,
    weighted_measures,
)
from omnilead.engine.data.datasets import Datasets
from omnilead.engine.model.folder import write_config
from omnilead.engine.model.input import Input
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.leads import ALL_LEADS, parse_leads
from tests.conftest import save_model, save_probed

pytestmark = pytest.mark.usefixtures("few_resamples")
RNG = np.random.default_rng(0)
LEADS, TASKS = ["V2,I"], ["sex", "age", "identification"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "A" / "model")
    save_model(folder / "B", layers=1)
    save_model(folder / "C", layers=1)
    return [f"first={folder / 'A'}", str(folder / "B")]


@pytest.fixture(scope="module")
def out(models, dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "OUT"
    words = ["--data", dataset.root.url, "--tasks", *TASKS, "--leads", *LEADS, "--seed", "3"]
    words += ["--share", "1", "0.3", "--out", str(folder)]
    assert main(["bench", "--models", *models, *words]) == 0
    return folder


@pytest.fixture
def found(out):
    return json.loads((out / "bench.json").read_text())


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(bench_report, "draw_comparison", mock.Mock())


@pytest.fixture
def again(out, dataset, tmp_path, undrawn):
    """Arguments that find the same embeddings in a copy of OUT."""
    copy = shutil.copytree(out, tmp_path / "OUT")
    return {"data": dataset.root.url, "out": copy, "leads": LEADS, "seed": 3}


def metrics_of(found):
    return {tuple(row[key] for key in ROW_KEYS): row["metrics"] for row in found["rows"]}


def write_table(path, dataset, **columns):
    """Labels of all records; a column repeats its values."""
    records = np.unique(dataset.column("record"))
    cells = {name: np.resize(values, len(records)) for name, values in columns.items()}
    path.parent.mkdir(exist_ok=True)
    write_csv(pa.table({"record": records, **cells}), path)


@pytest.mark.slow
def test_every_row_and_its_differences_in_every_file(out, found):
    rows, gaps, scores = found["rows"], found["differences"], metrics_of(found)
    identified = {key[0] for key in scores if key[1] == "identification"}
    assert identified == {"first", "random weights", "B", "random weights of B", "mean beat"}
    assert len(scores) == len(rows) == 9 * (2 * 2) + 5
    assert scores["first", "age", *LEADS, 1].keys() == {"mae", "rmse", "r2", "pearson"}
    assert scores["mean beat", "identification", *LEADS, None]["accuracy"] > 0.2
    compared = {("first", "random weights"), ("B", "random weights of B")}
    compared |= {(name, "first") for name in found["models"] if name != "first"}
    drawn_scores = next(row for row in rows if row["model"] == "random weights")
    for metric, of in drawn_scores["per_class"].items():
        assert np.mean(list(of.values())) == pytest.approx(drawn_scores["metrics"][metric])
    for metric, values in drawn_scores["each"].items():
        assert len(set(values)) == 2
        assert drawn_scores["metrics"][metric] == pytest.approx(np.mean(values))
    assert {(gap["model"], gap["against"]) for gap in gaps} == compared
    assert (
        found["readouts"] == dict.fromkeys(found["readouts"], "mean")
        and len(found["readouts"]) == 4
    )
    for gap in gaps:
        name, *setting = (gap[key] for key in ROW_KEYS)
        values = [scores[model, *setting][gap["metric"]] for model in (name, gap["against"])]
        assert gap["difference"] == pytest.approx(values[0] - values[1])
        assert gap["interval"][0] <= gap["interval"][1]
    lines = list(csv.DictReader((out / "bench.csv").read_text().splitlines()))
    numbers = [value for row in rows for value in row["metrics"].values()]
    numbers += [gap["difference"] for gap in gaps]
    assert [float(line["value"]) for line in lines if not line["class"]] == numbers
    classes = [of for row in rows for of in row.get("per_class", {}).values()]
    numbers = [value for of in classes for value in of.values()]
    assert [float(line["value"]) for line in lines if line["class"]] == numbers
    text = (out / "bench.md").read_text()
    assert "## identification: accuracy, cosine\n" in text and "| minus first" in text
    assert "## age: mean absolute error (lower is better)\n" in text
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_line_for_each_model_and_clips_no_word(found):
    """Readable in grey: shares of labels differ in their marks, models in their lines."""
    long = "a model with a name of more than forty letters"
    document = json.loads(json.dumps(found).replace('"first"', f'"{long}"'))
    figure = bench_report.draw_comparison(document)
    figure.draw_without_rendering()
    drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width and drawn.y1 <= height
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["30 %", "100 %"]
    left = figure.axes[0]  # sex, AUROC
    named = [label.get_text() for label in left.get_yticklabels()]
    assert named == list(document["models"])
    rows = [row for row in document["rows"] if row["task"] == "sex"]
    dots = [line for line in left.lines if line.get_marker() not in ("", "None")]
    places = {(round(line.get_ydata()[0]), line.get_marker()): line.get_xdata() for line in dots}
    assert len(dots) == len(places) == len(rows) == 2 * len(named)
    for row in rows:
        mark = "o" if row["share"] == 0.3 else "^"
        assert places[named.index(row["model"]), mark] == [row["metrics"]["auroc"]]


def test_cached_embeddings_are_reused(again, found, models, monkeypatch, capsys):
    """More tasks of the same model cost nothing; only a damaged file is computed again. A line says
    that tables are lost."""
    made, batches = list[Any](), vectors_of.dataset_batches

    def counted(dataset, rows, **how):
        made.append(rows)
        return batches(dataset, rows, **how)

    monkeypatch.setattr(vectors_of, "dataset_batches", counted)
    monkeypatch.setattr(bench, "monotonic", lambda: 0)  # of a minute or more a line would tell
    same = metrics_of(omnilead.bench(models, tasks=["identification"], **again))
    assert made == [] and len(same) == 5 and same.items() <= metrics_of(found).items()
    lost = (
        f"bench: {again['out']} has the tables of another comparison, of {', '.join(found['models'])} "
        f"on {again['data']}: they will be replaced"
    )
    said = [f"bench: {i} of 9 done: {name}" for i, name in enumerate(found["models"], 1)]
    assert capsys.readouterr().err.splitlines() == [
        lost,
        *said,
    ]  # no terminal: a line for each model
    damaged = max(again["out"].rglob("*.npz"), key=lambda path: path.stat().st_size)
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-100])
    monkeypatch.setattr(bench, "is_interactive", lambda: True)
    omnilead.bench(models, tasks=TASKS, **again)
    assert len(made) == 1 and damaged.read_bytes() == content
    assert (
        capsys.readouterr().err == ""
    )  # `again` writes no tables: those of all tasks are still there


def test_probes_fitted_on_other_leads_than_are_tested(again, models, found):
    own = metrics_of(found)
    for leads, same in (("I,V2", True), ("12", False)):
        other = omnilead.bench(models[:1], tasks=["sex"], fit_leads=leads, **again)
        assert (metrics_of(other).items() <= own.items()) == same


def test_a_model_under_two_names_does_not_differ_from_itself(again, models):
    two = [models[0], models[0].replace("first=", "twin=")]
    gaps = omnilead.bench(two, tasks=TASKS, **again)["differences"]
    own, first, twin = (
        [gap for gap in gaps if (gap["model"], gap["against"]) == pair]
        for pair in (("twin", "first"), ("first", "random weights"), ("twin", "random weights"))
    )
    metrics = {"auroc", "auprc", "mae", "accuracy"}
    assert {gap["metric"] for gap in own} >= metrics
    assert all(gap["difference"] == 0 and gap["interval"] == [0, 0] for gap in own)
    assert [gap | {"model": "twin"} for gap in first] == twin
    assert any(gap["difference"] for gap in first)


def test_a_comparison_is_a_table(found):
    """In Python `bench` returns it."""
    table = Comparison(found).table.to_pylist()
    assert len(table) == sum(len(row["metrics"]) for row in found["rows"])
    row, line = found["rows"][0], table[0]
    name = next(iter(row["metrics"]))
    assert line["metric"] == name and line["value"] == row["metrics"][name]
    assert [line["low"], line["high"]] == row["intervals"][name]
    assert [line[key] for key in ROW_KEYS] == [row[key] for key in ROW_KEYS]
    pytest.importorskip("pandas")
    assert len(Comparison(found).to_pandas()) == len(table)
    assert "<th>model</th>" in Comparison(found)._repr_html_()


def test_a_probe_is_written_as_a_model_with_the_same_scores(again, models, dataset, tmp_path):
    """A mean of risks is the risk of the mean, so a record's are equal."""
    times = np.random.default_rng(1).exponential(size=97).round(2) + 0.01
    path, task = tmp_path / "code15.csv", "code15-mortality"
    write_table(path, dataset, timey=times, death=[1, 1, 0])
    head = tmp_path / "head"
    found = omnilead.bench(models[:1], tasks=[task], labels=str(tmp_path), **again)
    how = {"columns": ["timey", "death"], "kind": "survival", "leads": LEADS[0]}
    encoder = models[0].partition("=")[2]
    omnilead.fit(encoder, data=dataset.root.url, labels=path, out=head, **how)
    (first,) = (of for key, of in metrics_of(found).items() if key[0] == "first")
    direct = omnilead.evaluate(head, data=dataset.root.url, labels=path, leads=LEADS[0])
    assert first == {"c_index": pytest.approx(direct["record"]["metrics"]["c_index"])}
    assert omnilead.load(head).input.seen_leads == parse_leads(LEADS[0])
    one = omnilead.bench(models[:1], tasks=[task], labels=str(path), **again)  # the table itself
    assert metrics_of(one) == metrics_of(found)


def test_boosted_trees_are_written_as_a_model(again, models, dataset, tmp_path, capsys):
    """On the embedding, measurements and the mean beat of each window; whole, and safe to load."""
    head, data = tmp_path / "head", dataset.root.url
    save_probed(models[0].partition("=")[2], data, "sex", head, leads=LEADS[0], reader="boosted")
    found = omnilead.bench(models[:1], tasks=["sex"], reader="boosted", **again)
    linear = omnilead.bench(models[:1], tasks=["sex"], **again)
    rows = [metrics_of(one)["first", "sex", *LEADS, 1] for one in (found, linear)]
    assert rows[0] != rows[1]
    model = omnilead.load(head)
    assert model.readout == ("mean", "rhythm", "waveform") and model.head.depth > 0
    scored = omnilead.evaluate(head, data=dataset.root.url, task="sex", leads=LEADS[0])
    assert scored["record"]["metrics"]["auroc"] > 0.4 and scored["record"]["intervals"]["auroc"]
    with (
        pytest.warns(UserWarning, match="lack leads"),
        pytest.warns(match="ECGs read were fitted on"),
    ):
        table = omnilead.predict(head, data=dataset.root.url, leads=LEADS[0])
    ecg = dataset[0]
    leads = [LEADS_OF.index(name) for name in ("I", "V2")]
    one = model.predict(ecg.signal_mv[leads], 500, ["I", "V2"])
    row = table.column("record").to_pylist().index(ecg.record)
    name = model.classes[0]
    assert one[name] == pytest.approx(table.column(name)[row].as_py(), abs=1e-4)
    assert main(["convert", "to-onnx", str(head), str(tmp_path / "x.onnx")]) == 0
    assert "its boosted trees are left out" in capsys.readouterr().err
    place = head / "model.safetensors"
    weights = load_file(place)
    weights["head.child"][0] = 10**9
    save_file(weights, place)
    write_config(head, json.loads((head / "config.json").read_text()))
    with pytest.raises(
        ConfigError, match=r"model\.safetensors: head\.child: a value is out of range"
    ):
        omnilead.load(head)


def test_without_lightgbm_one_line_says_what_is_left_out(again, models, monkeypatch, capsys):
    for module in (bench, embedders):
        monkeypatch.setattr(module, "has_lightgbm", lambda: False)
    found = omnilead.bench(models[:1], tasks=["sex"], **again)
    assert "boosted features" not in {row["model"] for row in found["rows"]}
    notes = [note for note in found["notes"] if "left out" in note]
    assert notes == [
        "boosted features: left out: lightgbm is not installed: pip install 'omnilead[bench]'",
    ]
    with pytest.raises(ConfigError, match="boosted: lightgbm is not installed"):
        omnilead.bench(models[:1], tasks=["sex"], reader="boosted", **again)


def test_identification_equals_a_direct_computation(out, found, dataset):
    (beats,) = embedders.rows_to_compare([], embedders.EmbedOptions())[0].draws[0]
    shown = ShownLeads(Input(ALL_LEADS, ALL_LEADS), tuple(LEADS))
    data = Datasets((dataset,))
    of = crops_to_identify(data, shown.usable_crops(data))

    def vectors(rows):
        made = vectors_of.cached_vectors(beats, data, rows, *LEADS, out / "parts")
        return made.take(rows).c_BSD[:, 0, beats.identity_dims]  # of unit length

    nearest = (vectors(of.probe) @ vectors(of.gallery).T).argmax(1)
    hits = of.patient_B[of.gallery][nearest] == of.patient_B[of.probe]
    scores = metrics_of(found)["mean beat", "identification", *LEADS, None]
    assert scores["accuracy"] == pytest.approx(hits.mean())


@pytest.fixture
def transferred(models, dataset, tmp_path, undrawn):
    """Fits probes on the table train/body.csv, and tests them on another table."""
    how = {"data": dataset.root.url, "test_data": dataset.root.url, "out": tmp_path / "OUT"}

    def run(**columns):
        write_table(tmp_path / "test" / "body.csv", dataset, **columns)
        train, tables = tmp_path / "train" / "body.csv", str(tmp_path / "test")
        return omnilead.bench(models[:1], tasks=[str(train)], test_labels=tables, **how)

    return run


def test_trained_on_one_dataset_and_tested_on_another(transferred, dataset, tmp_path):
    """Classes are matched by name; each dataset has a table and splits of its own."""
    tall, old = [0, 1], [0, 1, 0]
    write_table(tmp_path / "train" / "body.csv", dataset, tall=tall, old=old)
    found = transferred(old=old, other=1, tall=tall)
    assert list(found["rows"][0]["per_class"]["auroc"]) == ["tall", "old"]
    assert "leakage" not in str(found["notes"])
    found = transferred(old=old, tall=tall, split="test")  # also the records of train
    assert "body: Possible leakage: record " in str(found["notes"])
    assert "tested on" in (tmp_path / "OUT" / "bench.md").read_text().partition("\n")[0]
    with pytest.raises(ConfigError, match="no column 'tall'"):
        transferred(old=old)


def test_few_patients_have_no_interval(models, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("omnilead.downstream.tasks.metrics.FEW_PATIENTS", 10)
    table, how = tmp_path / "rare.csv", {"data": dataset.root.url, "out": tmp_path / "OUT"}
    write_table(table, dataset, rare=[1, 0, 0, 0, 0, 0, 0])
    found = omnilead.bench(models[:1], tasks=[str(table)], **how)
    assert "rare: No class has 10 patients with it" in str(found["notes"])
    # Patients are known in ptb-xl only
    assert ", some of unknown patients." in (tmp_path / "OUT" / "bench.md").read_text()
    intervals = [ends for row in found["rows"] for ends in row["intervals"].values()]
    intervals += [gap["interval"] for gap in found["differences"]]
    assert intervals and all(ends == [None, None] for ends in intervals)


def test_shares_that_no_resample_changes():
    same = np.full(1001, 1 - 1e-16)  # a mean of ones over several members
    assert differences.score_interval(same, 2) == exact_interval(2, 2)
    facts = {"patients": 2}
    scored = {
        (name, "identification", "12", None): (facts, {"accuracy": np.full(1001, share)})
        for name, share in (("A", 1), ("B", 0))
    }
    (gap,) = differences.rows_and_differences(scored, {"A": "", "B": "A"})["differences"]
    assert gap["difference"] == -1 and np.isnan(gap["interval"]).all()


def test_two_columns_of_numbers_and_a_test_split_in_the_other_dataset_only(
    transferred, dataset, tmp_path
):
    first = np.unique(dataset.column("record"), return_index=True)[1]
    patient = dataset.column("patient")[first].astype(str)
    person = np.unique(patient, return_inverse=True)[1]
    numbers = {"hr": np.arange(9) + 0.5, "qtc": np.arange(7)}
    split = np.where(person % 2, "train", "valid")
    write_table(tmp_path / "train" / "body.csv", dataset, **numbers, split=split)
    one = transferred(**numbers, split="test")["rows"][0]
    assert one["per_class"] == {} and one["classes"] == 2 and one["metrics"]["mae"] > 0
    with pytest.raises(ConfigError, match=r"body\.csv: all labels of the split test are the same"):
        transferred(hr=1.5, qtc=2, split="test")


def test_scores_of_made_up_vectors_equal_a_direct_computation():
    """200 records of two halves, two of each patient; the last 60 are tested."""
    c_BSD = RNG.normal(size=(200, 2, 5)).astype(np.float32)
    x, every = c_BSD.mean(1), np.arange(200)
    y = (x @ RNG.normal(size=(5, 3)) + RNG.normal(size=(200, 3)) > 0).astype(np.float32)
    y[RNG.random(y.shape) < 0.1] = np.nan
    train, test = (
        ProbedRecords(rows, np.arange(len(rows)), y[rows], rows // 2)
        for rows in np.split(every, [140])
    )
    labels = TaskLabels(TaskConfig("made", "multilabel"), ("a", "b", "c"), [y], [])
    draws = {0.2: list(draws_of_share(train.patient_N, 0.2)), 1.0: [np.arange(140)]}
    used = {0.2: np.array([True, False, True]), 1.0: np.ones(3, bool)}
    weight = bootstrap_weights(test.patient_N)
    task = plan.ProbedTask(labels, train, test, draws, used, weight, set(), every)
    vectors = [vectors_of.Vectors(every, np.full(200, 2), c_BSD)]
    for share, of_classes in bench.metrics_of_probes(
        task, vectors, vectors, fit_linear_probe, bench.TimeEstimate(1, 1)
    ).items():
        facts, samples = (
            task.scored_facts(share, of_classes),
            differences.mean_over_classes(of_classes),
        )
        direct, known = [], y[:, used[share]]
        for at in draws[share]:
            probe = fit_linear_probe(ProbeData(x[at], known[at], at // 2, "multilabel"))
            direct.append(measure("multilabel", known[140:], probe.scores(x[140:])))
        assert (facts["draws"], facts["left_out"]) == {0.2: (2, ["b"]), 1.0: (1, [])}[share]
        for name in ("auroc", "auprc"):
            assert samples[name][0] == pytest.approx(np.mean([one[name] for one in direct]))


def test_in_cross_validation_an_ecg_is_ranked_in_its_own_fold_alone():
    """Equal to a count of pairs, however much higher the scores of one fold are."""
    fold, score = RNG.integers(0, 3, 90), RNG.normal(size=90)
    y = (score + RNG.normal(size=90) > 0).astype(float)
    y[RNG.random(90) < 0.1] = np.nan
    weight = bootstrap_weights(np.arange(90) // 2)
    for shift in (0, 9):
        scores = (score + shift * fold)[:, None]
        found = differences.cross_validated_metrics("binary", y[:, None], scores, weight, fold)
        for column in (0, 1):  # all ECGs, and a resample
            right = []
            rows = np.repeat(np.arange(90), weight[:, column].astype(int))
            for i in rows[y[rows] == 1]:
                right += (score[i] > score[rows[(y[rows] == 0) & (fold[rows] == fold[i])]]).tolist()
            assert found["auroc"][0, column] == pytest.approx(np.mean(right))
    one = differences.cross_validated_metrics("binary", y[:, None], scores, weight, 0 * fold)
    whole = differences.metrics_by_class("binary", y[:, None], scores, weight)
    for name, value in whole.items():
        np.testing.assert_allclose(one[name], value, rtol=1e-6)
    values = y[:, None] + 3
    ages = differences.cross_validated_metrics("regression", values, scores, weight, fold)
    assert ages["mae"][0, 0] == pytest.approx(np.nanmean(np.abs(values - scores)))


def test_a_fold_whose_event_comes_last_has_no_pair():
    time = np.append(np.arange(1.0, 31), 99.0)
    y, fold = np.where(np.arange(31) % 3, -time, time), np.append(np.arange(30) % 2, 2)
    y[30] = 99  # alone in its fold
    scores, weight = -time[:, None], bootstrap_weights(np.arange(31))
    found = differences.cross_validated_metrics("survival", y[:, None], scores, weight, fold)
    assert found["c_index"][0, 0] == 1 and np.isfinite(found["c_index"]).all()


def test_intervals_of_cross_validation_are_wider():
    value_KB = np.append([[0.9]], RNG.normal(0.9, 0.01, (1, 5000)), axis=1)
    samples = {
        "auroc": value_KB,
        "mae": value_KB * 9,
        "auprc": 0 * value_KB + 0.99 + (value_KB - 0.9),
    }
    wider = differences.widen_spread(samples, np.arange(90) % 5)
    assert wider["auroc"][0, 0] == 0.9 and wider["auroc"].mean() == pytest.approx(value_KB.mean())
    for name in ("auroc", "mae"):
        assert wider[name][0, 1:].std() == pytest.approx(1.5 * samples[name][0, 1:].std())
    assert wider["auprc"].max() == 1
    small = {"mae": abs(RNG.normal(0.1, 0.1, (1, 500))), "pearson": 0 * value_KB[:, :500] - 0.999}
    small["pearson"][0, 1:] += RNG.normal(0, 0.001, 499).clip(-0.001, 0.001)
    clipped = differences.widen_spread(small, np.arange(90) % 5)
    assert clipped["mae"].min() == 0 and clipped["pearson"].min() == -1
    one = differences.widen_spread(samples, np.zeros(90))  # of many ECGs, one fold is tested
    np.testing.assert_allclose(one["mae"], samples["mae"])


def test_a_patient_and_the_copies_of_an_ecg_are_in_one_fold():
    patient = np.array([7, 7, 9, 11, 13, 15, 17, 19])
    waveform = np.array([1, 2, 3, 3, 4, 5, 5, 6, 7, 8])  # of the crops of 8 records
    begins = np.array([0, 1, 2, 3, 4, 6, 7, 8])  # the fifth has two
    records = ProbedRecords(np.arange(10), begins, np.zeros((8, 1)), patient)
    dataset = mock.Mock(column=lambda name: waveform)
    group = fold_groups(Datasets((dataset,)), records)
    fold = assign_folds(group, 3)
    assert fold[0] == fold[1] and fold[2] == fold[3] and fold[4] == fold[5]
    assert sorted(np.unique(fold)) == [0, 1, 2]
    with pytest.raises(
        ConfigError, match="--folds 6: only 5 patients have labels: use fewer folds"
    ):
        assign_folds(group, 6)
    everybody = ProbedRecords(np.arange(10), begins, np.zeros((8, 1)), np.arange(8))
    dataset.column = lambda name: np.arange(10)
    for number, (_, held) in enumerate(train_and_held_out_rows(np.arange(8))):
        assert (assign_folds(fold_groups(Datasets((dataset,)), everybody), 5)[held] == number).all()


@pytest.fixture
def sheet(dataset, tmp_path):
    path = tmp_path / "mine.csv"
    write_table(path, dataset, ill=["ja", "nein", "nein"], height=np.arange(150, 190))
    return str(path)


def test_with_folds_every_ecg_is_tested_once_by_a_probe_without_its_patient(
    again, models, sheet, monkeypatch, capsys
):
    """Before, a line says how long it may take."""
    fitted = []

    def spied(data):
        fitted.append(set(data.patient_N))
        return fit_linear_probe(data)

    monkeypatch.setitem(embedders.FIT_FUNCTION_OF_READER, "linear", spied)
    how = {"labels": sheet, "columns": ["ill"], **again}
    monkeypatch.setattr(bench, "monotonic", count(0, 30).__next__)
    split = omnilead.bench(models[:1], **how)
    said = [line for line in capsys.readouterr().err.splitlines() if "parts" in line]
    assert said == ["bench: 1 of 7 parts took 30 s: all may take 4 minutes. What is done is kept"]
    (few,) = (note for note in split["notes"] if "--folds" in note)
    labelled = len(np.unique(Dataset.open(again["data"]).column("record")))
    tested = split["rows"][0]["n"]
    assert (
        few
        == f"mine: ill: {tested} ECGs are tested, which says little: --folds 5 tests all {labelled}."
    )
    fitted.clear()
    monkeypatch.setattr(bench, "monotonic", count(0, 30).__next__)
    found = omnilead.bench(models[:1], tasks=[sheet], columns=["ill"], folds=4, **again)
    said = [line for line in capsys.readouterr().err.splitlines() if "all may take" in line]
    assert said == [
        "bench: the first of 4 fits took 30 s: all may take 18 minutes. What is done is kept"
    ]  # 7 parts of 30 s and 4 fits
    row = found["rows"][0]
    assert row["n"] == labelled and row["labelled"] < labelled and row["task"] == "mine: ill"
    assert "4 folds: each ECG is scored once" in str(found["notes"]) and found["folds"] == 4
    everybody = set.union(*fitted)
    held = [everybody - patients for patients in fitted[:4]]
    assert len(set.union(*held)) == sum(map(len, held)) == len(everybody)
    taller = omnilead.bench(
        models[:1], labels=sheet, columns=["height"], kind="regression", **again
    )
    assert "mae" in taller["rows"][0]["metrics"]


def test_areas_for_many_weightings_at_once():
    score, y = RNG.integers(0, 12, 90) / 12, RNG.integers(0, 2, 90).astype(float)
    y[RNG.random(90) < 0.2] = np.nan
    weight = RNG.poisson(1, (90, 7)).astype(np.float32)
    one = Classification(y[:, None], np.zeros((90, 1)), score[:, None], ["a"])
    found = weighted_measures(y, score, weight)
    for name, value_B in found.items():
        direct = [one.by_class(w)[name][0] for w in weight.T]
        np.testing.assert_allclose(value_B, direct, rtol=1e-6)
    absent = weighted_measures(0 * score, score, weight)
    assert np.isnan([absent["auroc"], absent["auprc"]]).all()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_means_over_resampled_draws_vary_as_means_over_all_draws_do(n, monkeypatch):
    monkeypatch.setattr(differences, "RESAMPLES", 4000)
    value_R = np.array([1.0, 4, 2, 8, 5])[:n]
    mean_B = differences.average_draws([{"auroc": value} for value in value_R])["auroc"]
    assert mean_B[0] == pytest.approx(value_R.mean())
    expected = value_R.var(ddof=1) / n if n > 1 else 0
    assert mean_B[1:].var() == pytest.approx(expected, rel=0.1)


def test_small_shares_are_subsets_of_larger_ones_and_patients_stay_whole():
    patient = RNG.integers(0, 300, 1000)
    small, large, half = (list(draws_of_share(patient, share)) for share in (0.01, 0.1, 0.5))
    assert [len(small), len(large), len(half)] == [5, 5, 1]
    assert len({tuple(few) for few in small}) == 5
    for few, many in zip(small, large, strict=True):
        people = np.unique(patient[few])
        assert set(few) < set(many) and len(people) == round(0.01 * len(np.unique(patient)))
        np.testing.assert_array_equal(np.flatnonzero(np.isin(patient, people)), few)
    weight = bootstrap_weights(patient)
    assert (weight[:, 0] == 1).all()
    for one in patient[:2]:
        assert len(np.unique(weight[patient == one], axis=0)) == 1
    labels = np.array([[0, 1, 1, np.nan], [1, 1, np.nan, np.nan]])
    assert KINDS["multilabel"].varying_outputs(labels).tolist() == [True, False, False, False]


def test_if_none_or_all_are_found_the_interval_is_the_exact_one():
    facts, tail = {"n": 25, "patients": 20}, 0.025 ** (1 / 20)
    for accuracy, exact in ((np.zeros(21), [0, 1 - tail]), (np.ones(21), [tail, 1])):
        samples = {"accuracy": accuracy, "auroc": np.ones(21)}
        scores = {("A", "identification", "12", None): (facts, samples)}
        (row,) = differences.rows_and_differences(scores, {"A": ""})["rows"]
        assert row["intervals"]["accuracy"] == pytest.approx(exact)
        # That all resamples agree does not make it certain
        assert np.isnan(row["intervals"]["auroc"]).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sexx", "'sexx': no such file or shipped config: did you mean sex"),
        (
            "ptbxl-form",
            "--tasks ptbxl-form: needs --labels DIR: `omnilead labels ptbxl SRC --out DIR`",
        ),
        (
            "ptbxl-form --labels .",
            "--tasks ptbxl-form: no ptbxl-form.parquet in --labels .: `omnilead labels ptbxl SRC "
            "--out .` writes this table",
        ),
        ("code15 --labels .", "`omnilead labels code15 SRC --out .` writes this table"),
        (
            "alive --labels .",
            "--tasks alive: is no shipped task, but a table has this name: to probe it, give --tasks alive.csv",
        ),
        ("sex --labels alive.csv", "alive.csv: no column 'sex'"),
        ("sex --labels nowhere", "--labels nowhere: no such folder"),
        (
            "sex --labels same.csv few.csv",
            "--labels same.csv few.csv: several values must all be tables, and cannot stand beside --tasks",
        ),
        ("--labels same.csv few.csv", "--tasks same.csv: same.csv: all labels of the split"),
        ("same.csv --columns well", "same.csv: no column 'well'"),
        (
            "sex --columns ill",
            "--columns, --kind and --positive are for a table of labels: name one with",
        ),
        (
            "sex --folds 5 --test-data D",
            "--folds tests only the ECGs of --data: leave --test-data out",
        ),
        ("sex --folds 99999", "--folds 99999: only "),
        ("sex --share 0.01", "no class has positives and negatives in both: use a larger share"),
        ("sex --leads 13", "leads='13': no lead is called"),
        ("sex --fit-leads 13", "leads='13': no lead is called"),
        ("book.xls", "workbook"),
        ("same.csv", "nothing to learn or to score; an empty cell is unknown: write 0"),
        (
            "none.csv",
            "none.csv: all labels of the split train are the same: nothing to learn or to score\n",
        ),
        ("alive.csv", "alive.csv: no event in the split train: nothing to learn"),
        ("trained.csv", "is in the split test"),
        ("tested.csv", "no record is in the split train: a probe needs train and test"),
        ("few.csv --share 1 0.02", "--share 0.02 of"),
        ("few.csv --share 0.02", " records of test: no event in one of them: use a larger share"),
        ("folds.csv", "folds 1, 2: at least 3 are needed"),
        ("sex sex", "two tasks have the same name"),
        ("sex --models A=nowhere", "nowhere: no such folder"),
        ("sex --models none/lr=1/RUN", " none/lr=1/RUN: no such folder"),
        ("sex --models A=", "--models A=: names no folder: write NAME=RUN"),
        ("sex --models A=B,C", "--models A=B,C: a name can have only one run: write A-1=B A-2=C"),
        (
            "sex --readout rhythm",
            "rhythm is measured in the signal, not by the model: add mean, std or beats",
        ),
        ("sex --readout loud", "readout='loud'"),
        ("sex --models B B", "--models B: the name 'B' is taken: write NAME=B"),
    ],
)
def test_refusals_are_one_line(
    words, message, models, dataset,
    monkeypatch, capsys,
):  # fmt: skip
    monkeypatch.chdir(Path(models[1]).parent)
    Path("book.xls").write_bytes(b"PK\3\4")
    write_table(Path("same.csv"), dataset, ill=1)
    write_table(Path("none.csv"), dataset, ill=0)
    write_table(Path("alive.csv"), dataset, time=[1, 2, 3], event=0)
    first = np.unique(dataset.column("record"), return_index=True)[1]
    person = np.unique(dataset.column("patient")[first].astype(str), return_inverse=True)[1]
    split = np.array(["train", "valid", "test"])[person % 3]
    write_table(Path("few.csv"), dataset, time=[1, 2, 3], event=[1, 0, 0, 0], split=split)
    ill = np.arange(len(split)) % 2
    write_table(Path("trained.csv"), dataset, ill=ill, split="train")
    write_table(Path("tested.csv"), dataset, ill=ill, split="test")
    write_table(Path("folds.csv"), dataset, ill=[0, 1], fold=[1, 2])
    given = ["--models", "B", "--data", dataset.root.url, "--out", "OUT"]
    given += [] if words.startswith("--") else ["--tasks"]
    assert main(["bench", *given, *words.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("omnilead bench: ") and err.count("\n") == 1 and message in err
    assert not Path("OUT").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--share 0", "argument --share: 0.0: must be a number from 0.0001 to 1 "),
    ],
)
def test_options_that_are_refused(words, message, capsys):
    given = ["--models", "B", "--data", "D", "--out", "OUT", "--tasks", "sex"]
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *given, *words.split()])
    assert message in capsys.readouterr().err


def test_several_ranks_are_refused(models, dataset, tmp_path, monkeypatch, capsys):
    """They would all do the whole work, and write the same files."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = ["--models", models[1], "--data", dataset.root.url, "--tasks", "sex"]
    assert main(["bench", *given, "--out", str(tmp_path / "OUT")]) == 2
    assert "WORLD_SIZE=2: a comparison is computed by a single process" in capsys.readouterr().err
    assert not (tmp_path / "OUT").exists()


def test_a_model_with_other_windows_is_joined_by_its_mean():
    c_BSD = RNG.normal(size=(3, 4, 3))
    c_BSD[2, 2:] = 0  # has two windows
    many = vectors_of.Vectors(np.arange(3), np.array([4, 4, 2]), c_BSD)
    one = vectors_of.Vectors(np.arange(3), np.ones(3), c_BSD[:, :1])
    records = ProbedRecords(np.arange(3), np.arange(3), np.zeros((3, 1)), np.arange(3))
    means = records.mean_embeddings([many, one])
    assert means.shape == (3, 6)
    np.testing.assert_allclose(means[2], [*c_BSD[2, :2].mean(0), *c_BSD[2, 0]])
