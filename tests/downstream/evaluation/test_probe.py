"""Probes against their optimum."""

from multiprocessing import active_children

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from omnilead.downstream.evaluation.boosted import fit_boosted_trees
from omnilead.downstream.evaluation.heads import held_out_scores
from omnilead.downstream.evaluation.probe import (
    LOGISTIC_TOLERANCE,
    PENALTY_STRENGTHS,
    ProbeData,
    ProbeJob,
    fit_linear_probe,
    fitting_in_processes,
    run_probe_jobs,
    solve_cox,
    solve_logistic,
    solve_ridge,
    solve_softmax,
    train_and_held_out_rows,
)
from omnilead.downstream.tasks.metrics import measure

RNG = np.random.default_rng(0)
SCALE = np.linspace(0.1, 30, 6)
PROBES = {"linear": fit_linear_probe, "boosted": fit_boosted_trees}


def made(n, noise=1.0, seed=1):
    truth = np.random.default_rng(7).normal(size=(6, 4))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 6))
    z = x @ truth + noise * rng.logistic(size=(n, 4))
    return x * SCALE + 5, z > 0.7


def known(y, unknown=0.3):
    """The same labels, some of them unknown."""
    return np.where(np.random.default_rng(3).random(y.shape) < unknown, np.nan, y)


def standardised(x):
    return (x - x.mean(0)) / x.std(0)


@pytest.mark.parametrize("alpha", [300.0, 3.0])
@pytest.mark.parametrize("kind", ["multilabel", "multiclass", "regression"])
def test_weights_are_where_the_gradient_is_zero(kind, alpha):
    """Of the summed loss of the known labels plus the penalty."""
    x, y = made(300)
    x = standardised(x)
    if kind == "multilabel":
        labels = known(y)
        ((w, bias),) = solve_logistic(x, labels, [alpha])
        p = 1 / (1 + np.exp(-x @ w.T - bias))
    elif kind == "multiclass":
        labels = np.eye(3)[y[:, :2].sum(1)]
        ((w, bias),) = solve_softmax(x, labels, [alpha])
        p = np.exp(x @ w.T + bias)
        p /= p.sum(1, keepdims=True)
    else:
        labels = known(x @ np.arange(12).reshape(6, 2) + 3)
        ((w, bias),) = solve_ridge(x, labels, [alpha])
        p = x @ w.T + bias
    error, n = np.nan_to_num(p - labels), len(x)
    np.testing.assert_allclose((error.T @ x + alpha * w) / n, 0, atol=2 * LOGISTIC_TOLERANCE)
    np.testing.assert_allclose(error.mean(0), 0, atol=2 * LOGISTIC_TOLERANCE)


def test_logistic_regression_is_that_of_scikit_learn():
    x, y = made(80)
    x, labels, alphas = standardised(x), known(y, 0.1), [30.0, 1.0]
    models = [LogisticRegression(tol=LOGISTIC_TOLERANCE, warm_start=True) for _ in labels.T]
    for alpha, (w, bias) in zip(alphas, solve_logistic(x, labels, alphas), strict=True):
        for k, (model, label) in enumerate(zip(models, labels.T, strict=True)):
            rows = ~np.isnan(label)
            model.set_params(C=1 / alpha).fit(x[rows], label[rows])
            np.testing.assert_allclose(w[k], model.coef_[0], rtol=1e-6)
            np.testing.assert_allclose(bias[k], model.intercept_[0], rtol=1e-6)


def test_processes_fit_what_one_process_fits(monkeypatch):
    """Bit for bit. From Python there is one, whatever the threads."""
    x, y = made(60)
    data = ProbeData(x, y.astype(float), np.arange(60), "multilabel")
    used = np.array([True, False, True, True])
    jobs = [
        ProbeJob(fit, data.take(np.arange(40)), used, x[40:])
        for fit in (fit_linear_probe, fit_boosted_trees)
    ]
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    alone = list(run_probe_jobs(jobs))
    assert not active_children()
    with fitting_in_processes():
        together = list(run_probe_jobs(jobs))
        assert len(active_children()) == 2
    for one, other in zip(alone, together, strict=True):
        assert one.shape == (20, 3) and one.tobytes() == other.tobytes()
    assert not active_children()


def test_exclusive_classes_without_examples_are_never_predicted():
    x, _ = made(90)
    for classes in (1, 2, 3):
        labels = np.eye(4)[np.arange(90) % classes]
        ((w, bias),) = solve_softmax(standardised(x), labels, [1.0])
        logits = standardised(x) @ w.T + bias
        assert logits[:, classes:].max() < logits[:, :classes].min() - 10


@pytest.mark.parametrize("alpha", [300.0, 3.0])
def test_penalised_hazards_are_where_the_gradient_is_zero(alpha):
    """Of Breslow's partial likelihood, the sum over events, by hand."""
    x = standardised(made(300)[0])
    hazard = np.exp(x @ np.linspace(-1, 1, 6))
    time = np.round(RNG.exponential(1 / hazard), 1) + 0.1
    event = RNG.random(300) < 0.6
    ((w, bias),) = solve_cox(x, np.where(event, time, -time)[:, None], [alpha])
    hazard, gradient = np.exp(x @ w[0]), np.zeros(6)
    for i in np.flatnonzero(event):
        at_risk = time >= time[i]
        gradient += hazard[at_risk] @ x[at_risk] / hazard[at_risk].sum() - x[i]
    np.testing.assert_allclose((gradient + alpha * w[0]) / event.sum(), 0, atol=2e-5)
    assert not bias.any()


def test_risks_that_are_known_are_found():
    """Whatever the unit of time; without any event, nothing. Boosting approximates."""
    truth, xs, ys = np.linspace(-1, 1, 6), [], []
    for n in (1500, 800):
        x = RNG.normal(size=(n, 6))
        time = 365 * RNG.exponential(np.exp(-x @ truth))
        ys.append(np.where(time < 700, time, -700.0)[:, None])
        xs.append(x * SCALE + 5)
    (train, test), (y, test_y) = xs, ys
    data = ProbeData(train, y, np.arange(1500), "survival")
    known = measure("survival", test_y, ((test - 5) / SCALE @ truth)[:, None])["c_index"]
    for name, loss in (("linear", 0.01), ("boosted", 0.03)):
        scores = PROBES[name](data).scores(test)
        assert measure("survival", test_y, scores)["c_index"] > known - loss
    none = fit_linear_probe(data._replace(y_NK=-np.abs(y)))
    assert known < 0.9 and not none.scores(test).any()


@pytest.mark.parametrize("unknown", [0, 0.3])
def test_a_noiseless_rule_is_learned_at_any_scale(unknown):
    """A class that is known in some rows is learned from these alone."""
    (train, y), (test, test_y) = (made(n, noise=0.0, seed=n) for n in (1500, 400))
    y, patient = known(y, unknown), np.arange(1500)
    one = fit_linear_probe(ProbeData(train, y, patient, "multilabel")).scores(test)
    assert ((one > 0.5) == test_y).mean() > 0.97
    other = fit_linear_probe(ProbeData(train * 100 - 3, y, patient, "multilabel")).scores(
        test * 100 - 3
    )
    np.testing.assert_allclose(one, other, atol=1e-6)
    trees = fit_boosted_trees(ProbeData(train, y, patient, "multilabel")).scores(test)
    assert ((trees > 0.5) == test_y).mean() > 0.9


def test_patients_held_out_choose_the_penalty():
    """Noisy labels need a strong one; a noiseless rule does not. Nobody is on both sides; a patient
    whose two rows are equal but for noise cannot lure to a weak one."""
    x, y = RNG.normal(size=(120, 60)), RNG.random((120, 2)) > 0.5
    noise = ProbeData(x, y, np.arange(120), "multilabel")
    train, rule = made(600, noise=0.0, seed=3)
    clean = ProbeData(train, rule, np.arange(600), "multilabel")
    twice = noise._replace(
        x_ND=np.tile(x, (2, 1)), y_NK=np.tile(y, (2, 1)), patient_N=np.tile(range(120), 2)
    )
    strangers = twice._replace(patient_N=np.random.default_rng(1).permutation(240))
    assert fit_linear_probe(noise).strength > fit_linear_probe(clean).strength
    assert fit_linear_probe(twice).strength > fit_linear_probe(strangers).strength
    held = [held for _, held in train_and_held_out_rows(twice.patient_N)]
    assert np.sort(np.concatenate(held)).tolist() == list(range(240)) and len(held) == 5
    for rest, out in train_and_held_out_rows(twice.patient_N):
        assert not set(twice.patient_N[rest]) & set(twice.patient_N[out])
    assert (
        list(train_and_held_out_rows(np.zeros(5))) == []
        and len(list(train_and_held_out_rows(np.arange(5001)))) == 1
    )
    fold = np.arange(600) % 5 - 1  # -1: is not tested
    scores = held_out_scores(
        fit_linear_probe, clean, np.arange(600), fold, np.ones(rule.shape[1], bool)
    )
    assert ((scores > 0.5) == rule)[fold >= 0].mean() > 0.9 and not scores[fold < 0].any()
    second = np.arange(rule.shape[1]) == 1
    of_one = held_out_scores(
        fit_linear_probe,
        clean._replace(y_NK=np.where(second, rule, np.nan)),
        np.arange(600),
        fold,
        second,
    )
    assert of_one.shape == (600, 1) and np.allclose(of_one[:, 0], scores[:, 1], atol=0.1)


def test_classes_without_positives_and_constant_features():
    x, y = made(100)
    y[:, 2] = False
    x[:, 3] = 7
    for fit in PROBES.values():
        scores = fit(ProbeData(x, y, np.arange(100), "multilabel")).scores(x)
        assert np.isfinite(scores).all() and (scores[:, 2] < 0.1).all()
    one = fit_linear_probe(ProbeData(x, y, np.zeros(100), "multilabel"))  # of one patient
    assert one.strength == PENALTY_STRENGTHS[0] and np.isfinite(one.scores(x)).all()


def test_regression_at_any_scale():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(700, 5))
    y = (x @ rng.normal(size=(5, 2)) + 0.1 * rng.normal(size=(700, 2))) * [3, 3000] + [60, 1e4]
    data = ProbeData(x[:500], y[:500], np.arange(500), "regression")
    for fit, least in ((fit_linear_probe, 0.99), (fit_boosted_trees, 0.7)):
        scores = fit(data).scores(x[500:])
        assert least < measure("regression", y[500:], scores)["r2"] < 1
