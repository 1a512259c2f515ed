"""Linear probe and nearest neighbours against Newton's method and a loop; identification of two
sources."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from omnilead.engine.evaluation.metrics import measure
from omnilead.engine.evaluation.probe import (
    PROBES,
    ProbeData,
    fit_scaled,
    linear,
    logistic,
    nearest,
    probe,
    report,
    ridge,
    standardised,
    votes,
)

RNG = np.random.default_rng(0)


def made(
    n: int, width: int = 6, noise: float = 1.0, seed: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    truth = np.random.default_rng(7).normal(size=(width, 4))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, width)) * np.linspace(0.1, 30, width) + 5
    z = ((x - 5) / np.linspace(0.1, 30, width)) @ truth + noise * rng.logistic(size=(n, 4))
    return x, z > 0.7


@pytest.mark.parametrize("strength", [1.0, 0.01])
def test_logistic_regression_agrees_with_newtons_method(strength: float) -> None:
    x, y = made(200)
    x = standardised(x)[0]
    weights = logistic(x, y, strength)
    design = np.hstack([np.ones((len(x), 1)), x])
    penalty = strength * np.diag([0.0, *[1.0] * x.shape[1]])
    for k in range(y.shape[1]):
        w = np.zeros(design.shape[1])
        for _ in range(50):
            p = 1 / (1 + np.exp(-design @ w))
            gradient = design.T @ (p - y[:, k]) / len(x) + penalty @ w
            w -= np.linalg.solve((design.T * (p * (1 - p))) @ design / len(x) + penalty, gradient)
        np.testing.assert_allclose(weights[:, k], w, atol=2e-4)


def test_nearest_neighbours_agree_with_a_loop() -> None:
    train, labels, queries = (
        RNG.normal(size=(30, 5)),
        RNG.random((30, 3)) > 0.5,
        RNG.normal(size=(1100, 5)),
    )
    train /= np.linalg.norm(train, axis=1, keepdims=True)
    for k, shares in votes(train, labels, queries, [1, 4]).items():
        for i in (0, 17, 1023, 1024, 1099):
            similar = sorted(range(30), key=lambda j: -float(train[j] @ queries[i]))[:k]
            np.testing.assert_allclose(shares[i], labels[similar].mean(0))


def test_a_noiseless_rule_is_learned_at_any_scale() -> None:
    (train, y), (valid, valid_y), (test, test_y) = (
        made(n, noise=0.0, seed=n) for n in (1500, 300, 400)
    )
    for fit, least in ((linear, 0.97), (nearest, 0.8)):
        one = fit(ProbeData(train, y, valid, valid_y, test))
        assert ((one.scores_NK > 0.5) == test_y).mean() > least
        other = fit(ProbeData(train * 100 - 3, y, valid * 100 - 3, valid_y, test * 100 - 3))
        np.testing.assert_allclose(one.scores_NK, other.scores_NK, atol=1e-6)


def test_valid_rows_choose_penalty_and_neighbours() -> None:
    """Noisy labels need a strong penalty and many neighbours; a noiseless rule needs neither."""
    x, y = RNG.normal(size=(120, 60)), RNG.random((120, 2)) > 0.5
    other, other_y = RNG.normal(size=(400, 60)), RNG.random((400, 2)) > 0.5
    noise = ProbeData(x, y, other, other_y, other)
    (train, rule), (valid, valid_rule) = made(600, noise=0.0, seed=3), made(300, noise=0.0, seed=4)
    clean = ProbeData(train, rule, valid, valid_rule, valid)
    for fit in PROBES.values():
        assert fit(noise).chosen > fit(clean).chosen


def test_classes_without_positives_and_constant_features() -> None:
    x, y = made(100)
    y[:, 2] = False
    x[:, 3] = 7
    for fit in PROBES.values():
        scores = fit(ProbeData(x, y, x, y, x)).scores_NK
        assert np.isfinite(scores).all() and (scores[:, 2] < 0.1).all()


def known(y: np.ndarray, share: float = 0.3) -> np.ndarray:
    """The same labels, some of them unknown."""
    return np.where(np.random.default_rng(3).random(y.shape) < share, np.nan, y.astype(float))


def test_softmax_and_ridge_regression_reach_their_optimum() -> None:
    """Against the conditions of the optimum: the gradient of the penalised mean loss is zero."""
    x, y = made(300)
    x = standardised(x)[0]
    design, classes = np.hstack([np.ones((len(x), 1)), x]), np.eye(3)[y[:, :2].sum(1)]
    w = logistic(x, classes, 0.1, exclusive=True)
    p = np.exp(design @ w) / np.exp(design @ w).sum(1, keepdims=True)
    penalty = 0.1 * np.diag([0.0, *[1.0] * x.shape[1]])
    np.testing.assert_allclose(design.T @ (p - classes) / len(x) + penalty @ w, 0, atol=1e-5)
    values = known(x @ np.arange(12).reshape(6, 2) + 3)
    w = ridge(x, values, 0.1)
    error = np.nan_to_num(design @ w - values)
    np.testing.assert_allclose(
        design.T @ error / (~np.isnan(values)).sum(0) + penalty @ w, 0, atol=1e-9
    )


def test_unknown_labels_are_ignored_in_the_fit() -> None:
    """A class that is known in some rows is learned from these alone, by neighbours too."""
    (train, y), (valid, valid_y), (test, test_y) = (
        made(n, noise=0.0, seed=n) for n in (900, 200, 300)
    )
    partly = known(y)
    for fit, least in ((linear, 0.95), (nearest, 0.75)):
        scores = fit(ProbeData(train, partly, valid, known(valid_y), test)).scores_NK
        assert ((scores > 0.5) == test_y).mean() > least
    x = standardised(train)[0]
    rows = ~np.isnan(partly[:, 0])
    alone = logistic(x[rows], partly[rows, :1], 0.1 * len(x) / rows.sum())
    np.testing.assert_allclose(logistic(x, partly[:, :1], 0.1), alone, atol=1e-3)
    similar = np.eye(3)
    assert votes(similar, np.array([[np.nan], [1.0], [0.0]]), similar[:1], [1, 3]) == {
        1: [[0.5]],
        3: [[0.5]],
    }


def test_regression_at_any_scale() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(700, 5))
    y = (x @ rng.normal(size=(5, 2)) + 0.1 * rng.normal(size=(700, 2))) * [3, 3000] + [60, 1e4]
    data = ProbeData(x[:400], y[:400], x[400:500], y[400:500], x[500:], "regression")
    fits = {name: fit_scaled(fit, data) for name, fit in PROBES.items()}
    found = {
        name: measure("regression", y[500:], fit.scores_NK) | {"chosen": fit.chosen}
        for name, fit in fits.items()
    }
    assert found["linear"]["r2"] > 0.99 and 0.5 < found["nearest"]["r2"] < 1
    assert "mae" in report(
        {"task": "ef", "records": dict.fromkeys(("train", "valid", "test"), 1), **found}
    )


class TwoSources:
    """Both number their patients alike; one has a probe without a gallery crop."""

    rows = pa.table(
        {"source": [*"aabbb"], "patient": [*"11112"], "record": [*"vwxyz"], "dx_role": [""] * 5}
    )
    labels = np.zeros((5, 26), bool)

    def select(self, dx: str | None = None, identity: str = "") -> np.ndarray:
        return np.array({"gallery": [0, 2], "probe": [1, 3, 4]}.get(identity, []), np.int64)

    def table(self, names: list[str]) -> pa.Table:
        return self.rows.select(names)

    def parts(self, names: list[str]) -> list[pa.RecordBatch]:
        return list(self.rows.select(names).to_batches())


def test_equal_patient_numbers_in_two_sources_are_two_patients() -> None:
    vectors = np.eye(2, dtype=np.float32)[
        [0, 1, 1, 0, 0]
    ].ravel()  # each probe is like the other source's patient
    halves = pa.table(
        {"row": range(5), "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors), 2)}
    )
    data: Any = TwoSources()
    scores = probe(data, halves)
    found = scores["identification"]
    assert (found["accuracy"], found["n_probes"], found["one_sided"]) == (0, 3, 1) and found[
        "chance"
    ] == pytest.approx(1 / 3)
    assert "1 of patients not in the gallery" in report(scores)
