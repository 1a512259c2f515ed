"""The page of an evaluation: it stands alone, says what is so, and no numbers are too strange for it."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from data_tools.record import ABBREVIATIONS
from engine.evaluation import evaluation_report, squares
from engine.evaluation.metrics import MetricError, challenge_score, outputs_of
from engine.evaluation.results import DiagnosisResult, IdentificationResult, by_record, calibration

FACTS = {"model": "runs/<b>w2v</b>", "data": "0f3a", "role": "test", "leads": "I,II,V2"}
NAN = math.nan


def diagnoses(labels: Any, scores: Any, **more: Any) -> DiagnosisResult:
    names = [f"r{i // 2}" for i in range(len(labels))]
    return DiagnosisResult(np.asarray(labels), np.asarray(scores), names, names, FACTS, resamples=20, **more)


def usual(n: int = 200) -> DiagnosisResult:
    rng = np.random.default_rng(0)
    labels = np.repeat(rng.random((n // 2, 26)) < np.linspace(0, 0.3, 26), 2, 0)
    return diagnoses(labels, np.clip(0.4 * labels + 0.7 * rng.random(labels.shape), 0, 1))


def identities(gallery: Any, probes: Any, ids: Any = None) -> IdentificationResult:
    own = [f"p{i}" for i in range(len(gallery))]
    return IdentificationResult(
        np.asarray(gallery), own, np.asarray(probes), own[: len(probes)] if ids is None else ids, FACTS, resamples=20
    )


class Strict(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "xlink:href", "srcset", "onload"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(html: str) -> list[ElementTree.Element]:
    """It stands alone, and no coordinate is anything but a number within its chart."""
    for forbidden in ("http", "src=", "url(", "@import", "<link", "<b>w2v"):
        assert forbidden not in html
    reader = Strict()
    reader.feed(html)
    assert reader.open == []
    found = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.S)]
    for svg in found:
        for node in svg.iter():
            for name, value in node.attrib.items():
                if name in ("d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "opacity"):
                    assert not re.search(r"nan|inf", value), (svg.get("aria-label"), name, value[:80])
    return found


ROW, NONE = np.eye(26, dtype=bool)[:1], np.zeros((6, 26), bool)
STRANGE: dict[str, DiagnosisResult | IdentificationResult] = {
    "usual diagnoses": usual(),
    "no positives at all": diagnoses(NONE, np.full((6, 26), 0.2)),
    "every class of every row": diagnoses(~NONE, np.full((6, 26), 0.9)),
    "one row": diagnoses(ROW, ROW * 0.8),
    "all equal scores": diagnoses(usual().labels_NK, np.full((200, 26), 0.5)),
    "zeros and ones": diagnoses(usual().labels_NK, usual().labels_NK.astype(np.float32)),
    "usual identities": identities(*np.random.default_rng(0).normal(size=(2, 30, 8))),
    "one patient": identities(np.ones((1, 4)), np.ones((1, 4))),
    "all embeddings equal": identities(np.ones((20, 4)), np.ones((20, 4))),
    "zero vectors": identities(np.zeros((20, 4)), np.zeros((20, 4))),
    "nobody is in the gallery": identities(np.eye(4), np.eye(4), ["x", "y", "z", "w"]),
}


@pytest.mark.parametrize("told", STRANGE.values(), ids=STRANGE)
def test_no_numbers_are_too_strange(told: DiagnosisResult | IdentificationResult, tmp_path: Path) -> None:
    html = evaluation_report.write_report(told, tmp_path / "page.html").read_text()
    assert len(check(html)) >= 2 and len(html) < 1_000_000
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    document = json.loads(json.dumps(told.document(), allow_nan=False))
    key = "challenge" if isinstance(told, DiagnosisResult) else "accuracy"
    assert document["score"] == document["metrics"][key]
    assert (document["role"], document["leads"]) == ("test", "I,II,V2")


def test_classes_without_positives_are_named() -> None:
    html = evaluation_report.build(usual())
    assert "1 of 26 classes have no positives: AF." in html and "AF (no positives)" in html
    assert html.count("(no positives)") == 1
    charts = {svg.get("aria-label") for svg in check(html)}
    assert {"All classes together", "TInv", "Reliability", "What is said of whom"} <= charts and "AF" not in charts


def test_what_the_page_says_is_what_was_measured() -> None:
    told = usual()
    score = challenge_score(told.labels_NK, outputs_of(told.scores_NK))
    low, high = told.half["intervals"]["challenge"]
    assert low < score < high
    assert f"<b>{score:.3f}</b><small>{low:.3f} to {high:.3f}</small>" in evaluation_report.build(told)


def test_a_record_is_the_mean_of_its_halves() -> None:
    labels, scores = usual(6).labels_NK, usual(6).scores_NK
    order = [3, 0, 5, 2, 1, 4]
    y, p, patients = by_record(labels[order], scores[order], np.array(list("aabbcc"))[order], np.array(list("xxyyzz"))[order])
    np.testing.assert_allclose(p, scores.reshape(3, 2, 26).mean(1))
    assert (y == labels[::2]).all() and patients == ["x", "y", "z"]
    document = usual().document()
    assert (document["n"], document["record"]["n"], document["record"]["unit"]) == (200, 100, "record")


def test_calibration_by_hand() -> None:
    labels, scores = np.array([[1, 0, 1, 1]], bool), np.array([[0.95, 0.05, 0.05, 1.0]])
    said, held, number, error = calibration(labels, scores)
    assert number.tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert (said[[0, 9]].tolist(), held[[0, 9]].tolist()) == ([0.05, 0.975], [0.5, 1.0])
    assert error == pytest.approx((0.45 + 0.025) / 2)


def test_confusions_by_hand() -> None:
    """Two rows of AF, one of which also has AFL: AFL said of it is no confusion."""
    labels, outputs = np.zeros((3, 26), bool), np.zeros((3, 26), bool)
    labels[:2, 0] = labels[0, 1] = True
    outputs[0, [0, 1, 2]] = True
    share = squares.confusion_shares(labels, outputs)
    assert share[0, [0, 1, 2, 26]].tolist() == [0.5, 0.0, 0.5, 0.5]
    assert share[1, [0, 1, 2, 26]].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert np.isnan(share[2]).all() and share.shape == (26, len(ABBREVIATIONS) + 1)


def test_curves_end_where_they_must() -> None:
    told = usual(2000)
    svg = ElementTree.fromstring(squares.trade_offs("TInv", told.labels_NK[:, 25], told.scores_NK[:, 25]))
    roc, pr = (node.get("d", "") for node in svg.iter("path") if "curve" in node.get("class", ""))
    assert roc.startswith("M24.0 166.0L") and roc.endswith("L144.0 46.0") and pr.split("L")[-1].startswith("296.0 ")
    assert len(roc.split("L")) <= squares.MOST_POINTS


def test_broken_models_are_an_error_of_one_line() -> None:
    scores = usual().scores_NK.copy()
    scores[[3, 8], 1] = NAN
    with pytest.raises(MetricError, match="NaN for 2 of 200"):
        diagnoses(usual().labels_NK, scores).document()
