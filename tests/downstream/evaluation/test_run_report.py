"""The report of a run: three curves are on it, nothing is loaded, and any run has one."""

import json
import math

import numpy as np
import pytest
import torch
from pages import words

from docs import augmentations
from omnilead.downstream.reports import charts, run_report
from omnilead.downstream.tasks.metrics import identification_scores
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.training.config import Config
from omnilead.engine.training.pretraining import PretrainTask
from omnilead.engine.training.validation import identified_share

LOGGED = [key for key in PretrainTask.keys if key not in ("step", "crops_seen", "epoch")]
NAN, INF = math.nan, math.inf


def row(step, **changes):
    values = {key: (i + 1) / (step + 1) for i, key in enumerate(LOGGED)}
    return {"step": step, "crops_seen": 512 * step, "epoch": step / 10} | values | changes


def make(run, lines, validation=(), facts=None, config=""):
    run.mkdir(exist_ok=True)
    for name, given in (("metrics.jsonl", lines), ("validation.jsonl", validation)):
        texts = [line if isinstance(line, str) else json.dumps(line) for line in given]
        whole = "".join(f"{text}\n" for text in texts)
        (run / name).write_text(whole, errors="surrogateescape")
    if facts:
        (run / "run.json").write_text(facts if isinstance(facts, str) else json.dumps(facts))
    if config:
        (run / "config.yaml").write_text(config)
    return run


def tuned(steps, **train):
    """A fine-tuning whose first best step is 20."""
    lines = [{"step": s, "crops_seen": s, "loss": 1 / s, "accuracy": 0.5} for s in range(1, 41)]
    figures = dict.fromkeys(("loss", "challenge", "auprc", "accuracy", "f_measure"), 0.3)
    scores = {0: 0.9, 10: 0.25, 20: 0.75, 30: 0.75, 40: NAN}
    validation = [figures | {"step": step, "auroc": score} for step, score in scores.items()]
    facts = {"config": {"task": {"name": "diagnosis"}, "train": train}, "best": "auroc"}
    facts |= {"chance": {"valid/auroc": 0.5, "valid/auprc": 0.1}, "steps": steps}
    return lines, validation, facts


def held_out(losses, **more):
    return [{"step": step, "loss": loss} | more for step, loss in losses.items()]


ROWS = [row(1), row(2)]
GUESSED = [row(step, accuracy_global=0.5 * (step % 2)) for step in range(1, 30)]
CHANCE = {"chance": {"accuracy_global": 1 / 63, "valid/accuracy_global": 1 / 11}, "best": "loss"}
RATES = {"rates": [["1e-4", 5], ["1e-5", 7]], "validation": ["crops are whole", "no dropout"]}
IDENTIFIED = [
    {"step": s, "loss": 3.0, "accuracy_local": 0.2, "identification_accuracy": 0.5 - s / 1000}
    for s in (0, 50, 100)
]
RUNS = {  # lines of metrics.jsonl, validation.jsonl, run.json, config.yaml
    "all files": (
        [row(step) for step in range(1, 200)],
        IDENTIFIED,
        {"steps": 300, "hardware": {"gpus": ["<b>H200</b>"]}, "config": {"model": {}}} | RATES,
        "run: '</pre><script>alert(1)</script>'\n",
    ),
    "fine-tuned, not converged": tuned(0),
    "fine-tuned, ended": tuned(999, patience=2),
    "fine-tuned, still training": tuned(999, patience=3),
    "the recent mean beside chance": (GUESSED, (), CHANCE),
    "held-out figures beside chance": (
        GUESSED,
        held_out({0: 1.0, 29: 3.0}, accuracy_global=0.2),
        CHANCE,
    ),
    "a best step by an unknown metric": (ROWS, held_out({1: 1.0}, kappa=0.1), {"best": "kappa"}),
    "held-out NaN": (ROWS, held_out({1: 1.0, 2: 1.0}, r2=NAN), {"best": "r2"}),
    "held-out text": (ROWS, held_out({1: 1.0, 2: 1.0}, r2="high"), {"best": "r2"}),
    # The training log lost its end, and only the last step measured patients
    "a best step beyond the axis": (
        ROWS,
        [{"step": 2, "loss": 1.0, "identification_accuracy": 0.5}, {"step": 9, "loss": 0.5}],
    ),
    "a damaged file": (ROWS, ["\udcff\udcfe\0"], "PK\3\4 cut"),
    "a repeated step": ([row(1), row(2, loss=9.0), row(2, loss=1.0)],),
    "nothing but a step": ([{"step": 3}],),
    "all NaN": ([row(s, **dict.fromkeys(LOGGED, NAN)) for s in (1, 2, 3)],),
    "NaN, infinite and negative among numbers": (
        [row(1), row(2, loss=NAN), row(3, grad_norm=None)],
    ),
    "infinite and negative": (
        [row(1, grad_norm=INF), row(3, loss=-INF, grad_norm=0.0), row(4, grad_norm=-1.0)],
    ),
    "constants": ([row(s, loss=5.0, lr=0.0, memory_gb=1e-9) for s in range(1, 90)],),
    "text, negative numbers on a logarithmic scale, garbage, steps that are none": (
        [
            row(1, loss="low", lr=True, grad_norm=0.0),
            row(2, loss=[1], mfu={}, grad_norm=-1.0),
            *('{"step": 2, "lo', "", "[1, 2]", "null", '"x"', "[" * 5000),
            *(row(2) | {"step": step} for step in (NAN, "2", 10**30)),
            row(-4),
        ],
    ),
    "longer than any date": ([row(1, crops_per_s=1e-12)],),
    "longer than any date, in parts": ([row(s, crops_per_s=1e-9) for s in range(1, 200)],),
    "giants": ([row(1, loss=1e300, grad_norm=10**400), row(2, loss=1e11), row(10**11)],),
    "many": ([row(s, loss=1 + s % 7) for s in range(1, 5000)],),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", RUNS)
def test_any_run_has_a_report(name, tmp_path, golden, capsys):
    run = make(tmp_path / "run", *RUNS[name])
    print(run_report.write_report(run))
    page = (run / "report.html").read_text()
    assert page == run_report.report_page(run)  # same run, same bytes
    said = capsys.readouterr().out.replace(str(run), "RUN")
    golden(f"run, {name}.txt", f"{said}{words(page)}")


def test_a_folder_that_is_no_run_has_no_report(tmp_path):
    for run in (tmp_path / "missing", tmp_path, make(tmp_path / "empty", ["\n"])):
        with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
            run_report.write_report(run)


def test_a_curve_of_many_steps_hides_no_outlier_and_makes_no_large_page(monkeypatch):
    """It is drawn as an image, with all its points."""
    figures, drawn = [], charts.to_picture
    monkeypatch.setattr(
        charts, "to_picture", lambda title, figure: figures.append(figure) or drawn(title, figure)
    )
    x, y = np.arange(100_000.0), np.full(100_000, 2.0)
    y[4321] = 9.0
    noise = np.random.default_rng(0).normal(size=100_000)
    for values, highest in ((y, 9), (noise, max(noise))):
        source = charts.curves_over_steps("Loss", {"loss": (x, values)}).source
        (axes,) = figures.pop().axes
        (line,) = axes.lines
        assert max(line.get_ydata()) == highest and len(line.get_ydata()) == 100_000
        assert line.get_rasterized() and len(source) < 100_000


def test_settings_that_are_not_the_defaults_are_on_the_page(tmp_path):
    config = Config().tree()
    facts = {"config": config | {"train": config["train"] | {"lr": 0.125}}, "steps": 2}
    page = words(run_report.report_page(make(tmp_path / "run", ROWS, facts=facts)))
    assert "\ntrain.lr\n0.125\nThe run\n" in page and "train.batch_crops" not in page


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
    expected = identification_scores(gallery_PD.numpy(), ids, probe_PD.numpy(), ids)["accuracy"]
    assert identified_share(gallery_PD, probe_PD) == pytest.approx(expected, abs=1e-12)
