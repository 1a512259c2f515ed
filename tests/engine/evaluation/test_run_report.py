"""The page of a run: every curve is on it, nothing is loaded, and no run is too strange for it."""

import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from engine.evaluation import charts, run_report
from engine.evaluation.run_files import Rows, read_diagnostics, write_diagnostics

ROOT = Path(__file__).parents[3]
LOGGED = (
    *(
        "loss",
        "loss_local",
        "loss_global",
        "loss_diversity",
        "loss_features",
        "lr",
        "grad_norm",
        "crops_per_s",
        "data_wait_pct",
    ),
    *(
        "mfu",
        "code_perplexity",
        "prob_perplexity",
        "gumbel_tau",
        "masked_share",
        "accuracy_local",
        "accuracy_global",
        "skipped_steps",
        "memory_gb",
    ),
)


def row(step: int, **changes: Any) -> dict[str, Any]:
    values = {key: (i + 1) / (step + 1) for i, key in enumerate(LOGGED)}
    return {"step": step, "crops_seen": 512 * step, "epoch": step / 10} | values | changes


def make(run: Path, *lines: dict[str, Any] | str) -> Path:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return run


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A run that left everything behind."""
    run = make(tmp_path / "w2v", *(row(step) for step in range(1, 200)))
    held_out = [{"step": s, "loss": 3.0, "accuracy_local": 0.2, "identification_accuracy": 0.5} for s in (50, 100)]
    (run / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held_out))
    (run / "run.json").write_text(json.dumps({"steps": 300, "hardware": {"gpus": ["<b>H200</b>"]}, "config": {"model": {}}}))
    (run / "config.yaml").write_text("run: '</pre><script>alert(1)</script>'\n")
    write_diagnostics(
        run / "diagnostics.npz",
        positive_similarity=np.linspace(0.5, 1, 100),
        negative_similarity=np.linspace(-0.5, 0.5, 100),
        code_usage=np.arange(64).reshape(2, 32),
        samples_mv=np.random.default_rng(0).normal(size=(1, 2, 12, 2500)).astype(np.float32),
    )
    return run


def svgs(html: str) -> list[ElementTree.Element]:
    """Every picture, read strictly."""
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.S)]


class Strict(HTMLParser):
    """Tags that are opened are closed, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "xlink:href", "srcset", "onload", "onerror"} & {name for name, _ in attrs}
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(html: str) -> list[ElementTree.Element]:
    """It stands alone, and no coordinate is anything but a number."""
    for forbidden in ("http", "//cdn", "src=", "url(", "@import", "<link", "<iframe"):
        assert forbidden not in html
    reader = Strict()
    reader.feed(html)
    assert reader.open == []
    found = svgs(html)
    for svg in found:
        for node in svg.iter():
            for name, value in node.attrib.items():
                if name in ("d", "x1", "x2", "y1", "y2", "cx", "cy") or name.startswith("data-x") or name.startswith("data-y"):
                    assert not re.search(r"nan|inf", value), (svg.get("aria-label"), name, value[:80])
    return found


def curves(html: str) -> set[str]:
    return {str(node.get("data-key")) for svg in svgs(html) for node in svg.iter("path") if node.get("data-key")}


def test_every_curve_is_on_the_page_and_nothing_is_loaded(full: Path) -> None:
    html = run_report.write_report(full).read_text()
    check(html)
    assert set(LOGGED) <= curves(html)
    assert {"valid/loss", "valid/accuracy_local", "valid/identification_accuracy"} <= curves(html)
    assert {"its own", "others of the same half", "codebook 1", "codebook 2"} <= curves(html)
    assert "Crop 1" in html and "aVR" in html
    assert "of 300" in html and "hardware.gpus" in html


def test_all_that_the_loop_logs_is_drawn() -> None:
    from engine.training.finetuning import Finetuning
    from engine.training.pretraining import Pretraining

    drawn = {curve.key for section in run_report.SECTIONS.values() for chart in section for curve in chart.curves}
    for task in (Pretraining, Finetuning):
        assert set(task.keys) - drawn == {"step", "crops_seen", "epoch"}  # these are in the heading


def test_scores_are_drawn_and_the_first_of_the_best_is_marked(tmp_path: Path) -> None:
    run = make(tmp_path / "dx", *({"step": s, "crops_seen": s, "loss": 1 / s, "accuracy": 0.5} for s in range(1, 41)))
    figures = {"loss": 0.2, "challenge": 0.1, "auroc": 0.6, "auprc": 0.3, "accuracy": 0.4, "f_measure": 0.2}
    scores = {0: 0.9, 10: 0.25, 20: 0.75, 30: 0.75, 40: NAN}
    lines = [{"step": step, **figures, "auroc": score} for step, score in scores.items()]
    (run / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = {"config": {"head": {"task": "diagnosis"}}, "best": "auroc", "chance": {"valid/auroc": 0.5, "valid/auprc": 0.1}}
    (run / "run.json").write_text(json.dumps(facts))
    html = run_report.build(run)
    marks = [svg.get("aria-label") for svg in check(html) for node in svg.iter("text") if node.text == "best"]
    assert marks == ["Loss", "Halves answered right", "AUROC, AUPRC, F-measure", "CinC score"]
    assert {"valid/challenge", "valid/auroc", "valid/auprc", "valid/f_measure", "valid/accuracy", "accuracy"} <= curves(html)
    colours = [node.get("data-colour") for svg in svgs(html) for node in svg.iter("path") if node.get("data-key") in
               ("valid/auroc", "valid/auprc", "valid/f_measure")]  # fmt: skip
    assert colours == ["0", "1", "2"]
    assert html.count("best at step 20") == len(marks) and "<b>0.750</b><small>held out, chance 0.500" in html
    assert "No step is better than step 0, before training: auroc 0.900, and 0.750 at step 20." in html
    levels = [node.findtext("title") for svg in svgs(html) for node in svg.iter("line") if "level" in str(node.get("class"))]
    assert levels == ["chance 0.5", "chance 0.1"] or levels == ["chance 0.1", "chance 0.5"]
    assert "Fine-tuning: diagnosis" in html and "Not logged" not in html


def cards(html: str) -> dict[str, tuple[str, str]]:
    return {name: (value, of) for name, value, of in re.findall(r"<span>(.*?)</span><b>(.*?)</b><small>(.*?)</small>", html)}


def test_cards_are_of_held_out_crops_and_say_what_chance_is(tmp_path: Path) -> None:
    run = make(tmp_path / "run", *(row(step, accuracy_global=0.5 * (step % 2)) for step in range(1, 30)))
    (run / "run.json").write_text(json.dumps({
        "best": "loss", "validation": ["dropout is off"],
        "chance": {"accuracy_global": 1 / 63, "valid/accuracy_global": 1 / 11, "valid/accuracy_local": NAN, "loss_global": "x"},
    }))  # fmt: skip
    html = run_report.build(run)
    assert cards(html)["Global accuracy"] == ("25.0%", "training, chance 1.6%")  # not the last batch's 50
    assert "Held-out loss can lie" not in html
    lines = [{"step": 0, "loss": 1.0, "accuracy_global": 0.1}, {"step": 29, "loss": 3.0, "accuracy_global": 0.2}]
    (run / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = run_report.build(run)
    check(html)
    assert cards(html)["Global accuracy"] == ("20.0%", "held out, chance 9.1%")
    assert cards(html)["Held-out loss"] == ("3.000", "at step 29") and cards(html)["Local accuracy"][1] == "training"
    assert "Held-out loss can lie below training loss" in html and "In validation dropout is off." in html
    levels = [node.findtext("title") for svg in svgs(html) for node in svg.iter("line") if "level" in str(node.get("class"))]
    assert sorted(map(str, levels)) == ["chance 1.59%", "chance 9.09%"]
    assert "No step is better than step 0" in html and html.count("best at step 29") > 1


def test_what_a_run_says_of_itself_is_text(full: Path) -> None:
    html = run_report.build(full)
    assert "<b>H200</b>" not in html and "&lt;b&gt;H200" in html
    assert html.count("<script>") == 1


NAN, INF = math.nan, math.inf
STRANGE: dict[str, list[dict[str, Any] | str]] = {
    "one step": [row(1)],
    "two equal steps": [row(1, loss=2.0), row(2, loss=2.0)],
    "nothing but a step": [{"step": 3}],
    "all NaN": [row(s, **dict.fromkeys(LOGGED, NAN)) for s in (1, 2, 3)],
    "NaN and infinite among numbers": [row(1), row(2, loss=NAN, grad_norm=INF), row(3, loss=-INF), row(4)],
    "null": [row(s, loss_global=None, accuracy_global=None) for s in (1, 2)],
    "zero and negative where a logarithm is wanted": [row(1, grad_norm=0.0), row(2, grad_norm=-1.0)],
    "constants": [row(s, loss=5.0, lr=0.0, memory_gb=1e-9) for s in range(1, 90)],
    "text and truth values": [row(1, loss="low", lr=True), row(2, loss=[1], mfu={})],
    "a line cut off, an empty one, garbage": [row(1), '{"step": 2, "lo', "", "[1, 2]", "null", '"x"', "[" * 5000],
    "giants": [row(1, loss=1e300, grad_norm=10**400), row(2, loss=1e11, lr=1e-30), row(10**11)],
    "steps that are none": [row(1), row(2) | {"step": NAN}, row(2) | {"step": "2"}, row(2) | {"step": 10**30}, row(-4)],
    "many": [row(s, loss=1 + s % 7) for s in range(1, 5000)],
}


@pytest.mark.parametrize("lines", STRANGE.values(), ids=STRANGE)
def test_no_run_is_too_strange(lines: list[dict[str, Any] | str], tmp_path: Path) -> None:
    html = run_report.build(make(tmp_path / "run", *lines))
    check(html)
    assert len(html) < 1_000_000


def test_what_is_not_finite_is_marked_and_what_was_not_logged_is_named(tmp_path: Path) -> None:
    html = run_report.build(
        make(tmp_path / "run", row(1, loss_global=None), row(2, loss=NAN, loss_global=None), row(3, loss_global=None))
    )
    assert "not finite in 1 of 3 logged steps" in html
    assert html.count('class="lost"') == 1
    assert "Not logged in this run: loss_global" in html and "loss_global" not in curves(html)


def test_a_step_done_again_counts_as_it_was_done_last(tmp_path: Path) -> None:
    rows = Rows(make(tmp_path / "run", row(1), row(2, loss=9.0), row(2, loss=1.0)) / "metrics.jsonl")
    assert rows.steps.tolist() == [1, 2] and rows.column("loss")[1] == 1.0


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"\x93NUMPY garbage"])
def test_damaged_files_beside_the_metrics_are_remarked_on(content: bytes, tmp_path: Path) -> None:
    run = make(tmp_path / "run", row(1))
    for name in ("diagnostics.npz", "run.json"):
        (run / name).write_bytes(content)
    (run / "validation.jsonl").write_bytes(b"\xff\xfe\x00")
    html = run_report.build(run)
    check(html)
    assert "diagnostics.npz cannot be read" in html and "run.json cannot be read" in html


def test_diagnostics_hold_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "diagnostics.npz"
    np.savez(path, code_usage=np.array([[{}]], dtype=object), positive_similarity=np.zeros(0))
    assert read_diagnostics(path)[0] == {}


def test_diagnostics_are_checked_when_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"code_usage: of shape \(3,\)"):
        write_diagnostics(tmp_path / "d.npz", code_usage=np.zeros(3))
    with pytest.raises(ValueError, match="codes: of shape"):
        write_diagnostics(tmp_path / "d.npz", codes=np.zeros(3))
    assert list(tmp_path.iterdir()) == []


def test_strange_diagnostics_are_drawn(tmp_path: Path) -> None:
    run = make(tmp_path / "run", row(1))
    odd = np.full((1, 1, 3, 100), NAN)
    write_diagnostics(
        run / "diagnostics.npz",
        positive_similarity=np.full(5, 1.0),
        negative_similarity=np.array([NAN, INF]),
        code_usage=np.zeros((7, 1)),
        samples_mv=odd,
    )
    check(run_report.build(run))


def test_a_report_is_written_whole_or_not_at_all(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_report.write_report(full)
    before, names = (full / "report.html").read_text(), sorted(os.listdir(full))
    make(full, row(7))
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        run_report.write_report(full)
    assert (full / "report.html").read_text() == before
    assert sorted(os.listdir(full)) == names


def test_same_run_same_bytes(full: Path) -> None:
    assert run_report.build(full) == run_report.build(full)


@pytest.mark.parametrize("case", ["missing", "no metrics", "empty metrics", "a file"])
def test_errors_are_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    if case == "a file":
        run.write_text("")
    elif case != "missing":
        run.mkdir()
        if case == "empty metrics":
            (run / "metrics.jsonl").write_text("\n")
    assert run_report.main([str(run)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "metrics.jsonl" in err


def test_the_command_runs_as_a_script_too(full: Path) -> None:
    script = [sys.executable, str(ROOT / "engine" / "evaluation" / "run_report.py"), str(full)]
    done = subprocess.run(script, cwd=full, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(full / "report.html") and (full / "report.html").stat().st_size > 10_000


def test_thinning_keeps_what_sticks_out() -> None:
    y = np.zeros(10_000)
    y[4321], y[77] = 9.0, -3.0
    x, kept = charts.thinned(np.arange(10_000), y)
    assert len(x) <= charts.MOST_POINTS and x[kept == 9.0] == [4321] and x[kept == -3.0] == [77]
    assert (np.diff(x) > 0).all()


def test_smoothing_is_a_mean_of_what_is_there() -> None:
    y = np.full(300, 2.0)
    y[100] = NAN
    smooth = charts.smoothed(y)
    assert np.isnan(smooth[100]) and np.allclose(np.delete(smooth, 100), 2.0)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (1e-9, 2e-9), (1234.5, 1234.6), (0, 320), (0, 1e11)])
def test_ticks_are_few_round_and_within(low: float, high: float) -> None:
    marks = charts.ticks(low, high, 6)
    assert 2 <= len(marks) <= 7
    assert all(low - 1e-9 * abs(high) <= mark <= high + 1e-9 * abs(high) for mark in marks)
    written = [charts.labels(marks)(mark) for mark in marks]
    assert len(set(written)) == len(marks)
