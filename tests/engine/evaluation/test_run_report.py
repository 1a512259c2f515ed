"""The report of a run: four curves are on it, nothing is loaded, and any run has one."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from pages import check, curves

from docs import augmentations
from omnilead.engine.evaluation.metrics import identification
from omnilead.engine.report import charts, run_report
from omnilead.engine.report.__main__ import main as report_main
from omnilead.engine.report.page import Line, LineStyle
from omnilead.engine.report.run_report import StepLog
from omnilead.engine.training.pretraining import PretrainTask
from omnilead.engine.training.validation import identified_share

LOGGED = [key for key in PretrainTask.keys if key not in ("step", "crops_seen", "epoch")]
NAN, INF = math.nan, math.inf
Row = dict[str, Any]


def row(step, **changes):
    values = {key: (i + 1) / (step + 1) for i, key in enumerate(LOGGED)}
    return {"step": step, "crops_seen": 512 * step, "epoch": step / 10} | values | changes


def make(run, *lines, validation=(), facts=None):
    run.mkdir(exist_ok=True)
    for name, given in (("metrics.jsonl", lines), ("validation.jsonl", validation)):
        texts = [line if isinstance(line, str) else json.dumps(line) for line in given]
        (run / name).write_text("".join(f"{text}\n" for text in texts))
    if facts:
        (run / "run.json").write_text(json.dumps(facts))
    return run


@pytest.fixture
def full(tmp_path):
    """A run with all its files."""
    validation = [
        {"step": s, "loss": 3.0, "accuracy_local": 0.2, "identification_accuracy": 0.5 - s / 1000}
        for s in (0, 50, 100)
    ]
    facts = {"steps": 300, "hardware": {"gpus": ["<b>H200</b>"]}, "config": {"model": {}}}
    run = make(
        tmp_path / "w2v", *(row(step) for step in range(1, 200)), validation=validation, facts=facts
    )
    (run / "config.yaml").write_text("run: '</pre><script>alert(1)</script>'\n")
    return run


def texts(html, beginning):
    """What the charts say with this beginning."""
    nodes = [node for chart in check(html) for node in chart.iter("text")]
    return sorted(
        str(node.text).strip() for node in nodes if str(node.text).strip().startswith(beginning)
    )


def cards(html):
    found = re.findall(r"<span>(.*?)</span><b>(.*?)</b><small>(.*?)</small>", html)
    return {name: (value, of) for name, value, of in found}


def test_four_charts_are_on_the_page_and_texts_are_escaped(full, capsys):
    assert report_main([str(full)]) == 0
    assert capsys.readouterr().out.strip() == str(full / "report.html")
    html = (full / "report.html").read_text()
    assert html == run_report.build(full)  # same run, same bytes
    wanted = {"loss", "valid/loss", "accuracy_local", "accuracy_global", "grad_norm", "crops_per_s"}
    assert wanted | {"valid/identification_accuracy"} <= curves(html) and len(check(html)) == 4
    assert cards(html)["Patients recognised"] == ("40.0%", "held out, 50.0% before training")
    assert "of 300" in html and "hardware.gpus" in html
    assert "<b>H200</b>" not in html and "&lt;b&gt;H200" in html


def test_scores_are_drawn_and_the_first_best_step_is_marked(tmp_path):
    figures = ("loss", "challenge", "auroc", "auprc", "accuracy", "f_measure")
    scores = {0: 0.9, 10: 0.25, 20: 0.75, 30: 0.75, 40: NAN}
    chance = {"valid/auroc": 0.5, "valid/auprc": 0.1}
    steps = [{"step": s, "crops_seen": s, "loss": 1 / s, "accuracy": 0.5} for s in range(1, 41)]
    validation = [
        dict.fromkeys(figures, 0.3) | {"step": step, "auroc": score}
        for step, score in scores.items()
    ]

    def page(**train):
        config = {"task": {"name": "diagnosis"}, "train": train}
        facts = {"config": config, "best": "auroc", "chance": chance}
        if train:
            facts["steps"] = 999
        return run_report.build(make(tmp_path / "dx", *steps, validation=validation, facts=facts))

    html = page()
    marked = [
        chart.get("aria-label")
        for chart in check(html)
        if "best at step 20" in "".join(chart.itertext())
    ]
    assert marked == ["Loss", "AUROC"] and {"valid/loss", "valid/auroc"} <= curves(html)
    assert texts(html, "chance ") == ["chance 0.5"] and cards(html)["AUPRC"][0] == "0.300"
    assert cards(html)["Converged"] == ("no", "2 validations since the best")
    assert "No step is better than step 0, before training: auroc 0.900, and 0.750 at" in html
    assert "Not converged: best auroc 0.7500 at step 20" in html
    ended, training = page(patience=2), page(patience=3)
    assert cards(ended)["Converged"][0] == "yes" and "onverged: " not in ended
    assert "Converged" not in cards(training)


def test_cards_show_held_out_figures_and_chance(tmp_path):
    chance = {"accuracy_global": 1 / 63, "valid/accuracy_global": 1 / 11}
    facts = {"best": "loss", "chance": chance}
    steps = [row(step, accuracy_global=0.5 * (step % 2)) for step in range(1, 30)]
    html = run_report.build(make(tmp_path / "run", *steps, facts=facts))
    # not the last batch's 50
    assert cards(html)["Global accuracy"] == ("25.0%", "training, chance 1.6%")
    losses = {0: 1.0, 29: 3.0}
    valid = [{"step": s, "loss": losses[s], "accuracy_global": 0.2} for s in losses]
    shown = cards(run_report.build(make(tmp_path / "run", *steps, validation=valid, facts=facts)))
    assert shown["Global accuracy"] == ("20.0%", "held out, chance 9.1%")
    assert shown["Held-out loss"] == ("3.000", "at step 29")
    assert shown["Local accuracy"][1] == "training"


RUNS = {
    "nothing but a step": [{"step": 3}],
    "all NaN": [row(s, **dict.fromkeys(LOGGED, NAN)) for s in (1, 2, 3)],
    "NaN, infinite and negative among numbers": [
        row(1),
        row(2, loss=NAN, grad_norm=INF),
        row(3, loss=-INF, grad_norm=0.0),
        row(4, grad_norm=-1.0),
    ],
    "constants": [row(s, loss=5.0, lr=0.0, memory_gb=1e-9) for s in range(1, 90)],
    "text, negative numbers on a logarithmic scale, garbage, steps that are none": [
        row(1, loss="low", lr=True, grad_norm=0.0),
        row(2, loss=[1], mfu={}, grad_norm=-1.0),
        *('{"step": 2, "lo', "", "[1, 2]", "null", '"x"', "[" * 5000),
        *(row(2) | {"step": step} for step in (NAN, "2", 10**30)),
        row(-4),
    ],
    "longer than any date": [row(1, crops_per_s=1e-12)],
    "longer than any date, in parts": [row(s, crops_per_s=1e-9) for s in range(1, 200)],
    "giants": [row(1, loss=1e300, grad_norm=10**400), row(2, loss=1e11, lr=1e-30), row(10**11)],
    "many": [row(s, loss=1 + s % 7) for s in range(1, 5000)],
}


@pytest.mark.parametrize("name", RUNS)
def test_any_run_has_a_report(name, tmp_path):
    charts_of = check(run_report.build(make(tmp_path / "run", *RUNS[name])))
    assert charts_of or name == "nothing but a step"


def test_non_finite_values_are_marked(tmp_path):
    steps = row(1), row(2, loss=NAN), row(3, grad_norm=None)
    html = run_report.build(make(tmp_path / "run", *steps))
    assert "not finite in 1 of 3 logged steps" in html and html.count('id="lost"') == 1


def test_a_repeated_step_counts_once(tmp_path):
    run = make(tmp_path / "run", row(1), row(2, loss=9.0), row(2, loss=1.0))
    log = StepLog(run / "metrics.jsonl")
    assert log.steps.tolist() == [1, 2] and log.column("loss")[1] == 1.0


def test_damaged_files_are_remarks(tmp_path):
    run = make(tmp_path / "run", row(1))
    (run / "run.json").write_bytes(b"PK\x03\x04 cut")
    (run / "validation.jsonl").write_bytes(b"\xff\xfe\x00")
    html = run_report.build(run)
    assert check(html) and html.count(" cannot be read") == 1


def test_a_best_step_by_an_unknown_metric_is_not_marked(tmp_path):
    validation = [{"step": s, "kappa": 0.1 * s} for s in (1, 2)]
    how = {"validation": validation, "facts": {"best": "kappa"}}
    html = run_report.build(make(tmp_path / "run", row(1), row(2), **how))
    assert "best=&#39;kappa&#39; is no known metric: no best step is marked" in html
    assert "best at step" not in html


def test_held_out_numbers_that_are_none_are_not_drawn(tmp_path):
    for value in (NAN, "high"):
        validation = [{"step": s, "loss": 1.0, "r2": value} for s in (1, 2)]
        run = make(tmp_path / "run", row(1), validation=validation, facts={"best": "r2"})
        html = run_report.build(run)
        assert "valid/loss" in curves(html) and "valid/r2" not in curves(html)


@pytest.mark.filterwarnings("error")
def test_a_best_step_beyond_the_axis_is_not_in_the_legend(tmp_path):
    """The training log lost its end, and only the last step measured patients."""
    name = "identification_accuracy"
    validation = [{"step": 2, "loss": 1.0, name: 0.5}, {"step": 9, "loss": 0.5}]
    html = run_report.build(make(tmp_path / "run", row(1), row(2), validation=validation))
    marked = [
        chart.get("aria-label") for chart in check(html) if "best at" in "".join(chart.itertext())
    ]
    assert marked == ["Loss"] and f"valid/{name}" in curves(html)


def test_errors_are_one_line(tmp_path, capsys):
    for run in (tmp_path / "missing", tmp_path, make(tmp_path / "empty", "\n")):
        assert report_main([str(run)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1 and "metrics.jsonl" in err


def test_thinning_keeps_outliers_and_smoothing_skips_gaps():
    y = np.zeros(10_000)
    y[4321], y[77] = 9.0, -3.0
    x, kept = charts.thinned(np.arange(10_000), y)
    assert len(x) <= charts.MAX_POINTS and x[kept == 9.0] == [4321] and x[kept == -3.0] == [77]
    assert (np.diff(x) > 0).all()
    y = np.full(300, 2.0)
    y[100] = NAN
    smooth = charts.smoothed(y)  # a mean of what is there
    assert np.isnan(smooth[100]) and np.allclose(np.delete(smooth, 100), 2.0)


@pytest.mark.parametrize("values", [(2.2, 2.9, 3.1), (0.8, 1.4, 5.0), (1e-3, 1.0, 50.0)])
def test_every_axis_has_at_least_two_numbers(values):
    line = Line("grad_norm", "", np.arange(3.0), np.array(values))
    axis = charts.line_chart("Gradient norm", [line], LineStyle(log=True)).partition(
        "matplotlib.axis_2"
    )[2]
    assert len(re.findall(r">[\d.]+</text>", axis)) >= 2


def test_the_picture_of_augmentations(dataset, tmp_path, capsys):
    assert (
        augmentations.main([str(tmp_path / "out.png"), "--data", dataset.root.url, "--crop", "3"])
        == 0
    )
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    assert (
        augmentations.main(
            [str(tmp_path / "none.png"), "--data", dataset.root.url, "--crop", "999"]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("docs.augmentations: ")


@pytest.mark.parametrize("ties", [False, True])
def test_patients_identified_are_those_of_the_evaluation(ties):
    c_RD = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    if ties:
        c_RD = c_RD.round()
        c_RD[3] = 0
    gallery_PD, probe_PD = c_RD[::2], c_RD[1::2]
    ids = range(10)
    expected = identification(gallery_PD.numpy(), ids, probe_PD.numpy(), ids)["accuracy"]
    assert identified_share(gallery_PD, probe_PD) == pytest.approx(expected, abs=1e-12)
