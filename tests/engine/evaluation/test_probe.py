"""Probes against their optimum."""

import numpy as np
import pytest

from omnilead.engine.evaluation.boosted import boosted
from omnilead.engine.evaluation.probe import (
    STRENGTHS,
    ProbeData,
    fit_scaled,
    folds,
    held_out,
    least_squares,
    linear,
    logistic,
    outputs,
    principal,
    proportional_hazards,
    ridge,
    standardised,
)
from omnilead.engine.training.metrics import measure

RNG = np.random.default_rng(0)
SCALE = np.linspace(0.1, 30, 6)
PROBES = {"linear": linear, "boosted": boosted, "least squares": least_squares}


def made(n, noise=1.0, seed=1):
    truth = np.random.default_rng(7).normal(size=(6, 4))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 6))
    z = x @ truth + noise * rng.logistic(size=(n, 4))
    return x * SCALE + 5, z > 0.7


def known(y, unknown=0.3):
    """The same labels, some of them unknown."""
    return np.where(np.random.default_rng(3).random(y.shape) < unknown, np.nan, y)


@pytest.mark.parametrize("strength", [1.0, 0.01])
@pytest.mark.parametrize("kind", ["multilabel", "multiclass", "regression"])
def test_weights_are_where_the_gradient_is_zero(kind, strength):
    """Of the mean loss of the known labels plus the penalty."""
    x, y = made(300)
    x = standardised(x)[0]
    design = np.hstack([np.ones((len(x), 1)), x])
    if kind == "multilabel":
        labels = known(y)
        w = logistic(x, labels, strength, np.zeros((x.shape[1] + 1, labels.shape[1])), False)
        p, n = 1 / (1 + np.exp(-design @ w)), len(x)
    elif kind == "multiclass":
        labels = np.eye(3)[y[:, :2].sum(1)]
        w = logistic(x, labels, strength, np.zeros((x.shape[1] + 1, labels.shape[1])), True)
        p, n = np.exp(design @ w), len(x)
        p /= p.sum(1, keepdims=True)
    else:
        labels = known(x @ np.arange(12).reshape(6, 2) + 3)
        w = ridge(x, labels, strength)
        p, n = design @ w, np.isfinite(labels).sum(0)
    gradient = design.T @ np.nan_to_num(p - labels) / n
    gradient[1:] += strength * w[1:]
    np.testing.assert_allclose(gradient, 0, atol=1e-9 if kind == "regression" else 1e-5)


@pytest.mark.parametrize("strength", [1.0, 0.01])
def test_penalised_hazards_are_where_the_gradient_is_zero(strength):
    """Of Breslow's partial likelihood, the sum over events, by hand."""
    x = standardised(made(300)[0])[0]
    hazard = np.exp(x @ np.linspace(-1, 1, 6))
    time = np.round(RNG.exponential(1 / hazard), 1) + 0.1
    event = RNG.random(300) < 0.6
    w = proportional_hazards(x, np.where(event, time, -time)[:, None], strength, np.zeros((7, 1)))
    hazard, gradient = np.exp(x @ w[1:, 0]), np.zeros(6)
    for i in np.flatnonzero(event):
        at_risk = time >= time[i]
        gradient += hazard[at_risk] @ x[at_risk] / hazard[at_risk].sum() - x[i]
    np.testing.assert_allclose(gradient / event.sum() + strength * w[1:, 0], 0, atol=2e-5)
    assert abs(w[0]) < 1e-9


def test_risks_that_are_known_are_found():
    """Whatever the unit of time; without any event, nothing. Boosting approximates."""
    truth, xs, ys = np.linspace(-1, 1, 6), [], []
    for n in (1500, 800):
        x = RNG.normal(size=(n, 6))
        time = 365 * RNG.exponential(np.exp(-x @ truth))
        ys.append(np.where(time < 700, time, -700.0)[:, None])
        xs.append(x * SCALE + 5)
    (train, test), (y, test_y) = xs, ys
    data = ProbeData(train, y, np.arange(1500), test, "survival")
    known = measure("survival", test_y, ((test - 5) / SCALE @ truth)[:, None])["c_index"]
    for name, loss in (("linear", 0.01), ("least squares", 0.01), ("boosted", 0.03)):
        fit = fit_scaled(PROBES[name], data)
        assert measure("survival", test_y, fit.scores_NK)["c_index"] > known - loss
    none = fit_scaled(linear, data._replace(labels_NK=-np.abs(y)))
    assert known < 0.9 and not none.scores_NK.any()


@pytest.mark.parametrize("unknown", [0, 0.3])
def test_a_noiseless_rule_is_learned_at_any_scale(unknown):
    """A class that is known in some rows is learned from these alone."""
    (train, y), (test, test_y) = (made(n, noise=0.0, seed=n) for n in (1500, 400))
    y, patient = known(y, unknown), np.arange(1500)
    one = linear(ProbeData(train, y, patient, test))
    assert ((one.scores_NK > 0.5) == test_y).mean() > 0.97
    # As a head of a model has it
    of_head = outputs("multilabel", test, one.weights_DK)
    np.testing.assert_allclose(of_head, one.scores_NK, atol=1e-6)
    other = linear(ProbeData(train * 100 - 3, y, patient, test * 100 - 3))
    np.testing.assert_allclose(one.scores_NK, other.scores_NK, atol=1e-6)
    trees = boosted(ProbeData(train, y, patient, test))
    assert ((trees.scores_NK > 0.5) == test_y).mean() > 0.9


def test_patients_held_out_choose_the_penalty():
    """Noisy labels need a strong one; a noiseless rule does not. Nobody is on both sides; a patient
    whose two rows are equal but for noise cannot lure to a weak one."""
    x, y = RNG.normal(size=(120, 60)), RNG.random((120, 2)) > 0.5
    noise = ProbeData(x, y, np.arange(120), x)
    train, rule = made(600, noise=0.0, seed=3)
    clean = ProbeData(train, rule, np.arange(600), train)
    twice = noise._replace(
        train_ND=np.tile(x, (2, 1)), labels_NK=np.tile(y, (2, 1)), patient_N=np.tile(range(120), 2)
    )
    strangers = twice._replace(patient_N=np.arange(240))
    for fit in (linear, least_squares):
        assert fit(noise).chosen > fit(clean).chosen
        assert fit(twice).chosen > fit(strangers).chosen
    held = [held for _, held in folds(twice.patient_N)]
    assert np.sort(np.concatenate(held)).tolist() == list(range(240)) and len(held) == 5
    for rest, out in folds(twice.patient_N):
        assert not set(twice.patient_N[rest]) & set(twice.patient_N[out])
    assert list(folds(np.zeros(5))) == [] and len(list(folds(np.arange(5001)))) == 1
    labels, scores = held_out(linear, clean)
    assert ((scores > 0.5) == labels).mean() > 0.9


def test_more_features_than_rows_change_no_solution():
    x = standardised(RNG.normal(size=(20, 60)))[0]
    basis = principal(x)
    np.testing.assert_allclose(basis.T @ basis, np.eye(19), atol=1e-8)
    np.testing.assert_allclose(x @ basis @ basis.T, x, atol=1e-8)


def test_classes_without_positives_and_constant_features():
    x, y = made(100)
    y[:, 2] = False
    x[:, 3] = 7
    for fit in PROBES.values():
        scores = fit(ProbeData(x, y, np.arange(100), x)).scores_NK
        assert np.isfinite(scores).all() and (scores[:, 2] < 0.1).all()
    one = linear(ProbeData(x, y, np.zeros(100), x))  # of one patient
    assert one.chosen == STRENGTHS[0] and np.isfinite(one.scores_NK).all()


def test_regression_at_any_scale():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(700, 5))
    y = (x @ rng.normal(size=(5, 2)) + 0.1 * rng.normal(size=(700, 2))) * [3, 3000] + [60, 1e4]
    data = ProbeData(x[:500], y[:500], np.arange(500), x[500:], "regression")
    for fit, least in ((linear, 0.99), (boosted, 0.7)):
        scores = fit_scaled(fit, data).scores_NK
        assert least < measure("regression", y[500:], scores)["r2"] < 1
