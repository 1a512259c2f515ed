"""Losses, weights and thresholds of each kind: unknown labels are ignored."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from omnilead.downstream.tasks.kinds import (
    KINDS,
    best_thresholds,
    cox_loss,
    sensitivity_points,
    sensitivity_sentences,
)

NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        ("binary", F.binary_cross_entropy_with_logits),
        ("multilabel", F.binary_cross_entropy_with_logits),
        ("regression", F.smooth_l1_loss),
        ("multiclass", F.cross_entropy),
    ],
)
def test_unknown_labels_have_no_loss_and_no_gradient(kind, reference):
    logits_RK = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y_RK = torch.tensor([[1.0, 0, 0], [NAN, NAN, NAN], [0, 1, 0], [0, 0, 1]])
    known = torch.tensor([0, 2, 3])
    if kind != "multiclass":
        y_RK[0, 2] = NAN
        known = ~y_RK.isnan()
    loss_R, share_R = KINDS[kind].loss_and_known_share(logits_RK, y_RK)
    mean = loss_R.sum() / share_R.sum()
    torch.testing.assert_close(mean, reference(logits_RK[known], y_RK[known]))
    (grad_RK,) = torch.autograd.grad(mean, logits_RK)
    assert not grad_RK[1].any() and bool(grad_RK.isfinite().all())


def test_a_sample_is_right_if_all_its_known_labels_are():
    logits_RK = torch.tensor([[2.0, -1.0, 3.0], [2.0, -1.0, 3.0], [-1.0, 4.0, 1.0]])
    y_RK = torch.tensor([[1.0, 0.0, NAN], [1.0, 1.0, NAN], [0.0, 1.0, 0.0]])
    assert KINDS["multilabel"].are_right(logits_RK, y_RK).tolist() == [True, False, False]
    assert KINDS["multiclass"].are_right(logits_RK, torch.eye(3)).tolist() == [False, False, False]


def test_balanced_classes_weigh_the_same():
    y_NK = np.array([[1, 0], [0, 0], [0, NAN], [0, 1]])
    multilabel, multiclass = KINDS["multilabel"], KINDS["multiclass"]
    w_NK = multilabel.label_weights(y_NK, multilabel.balanced_weights(y_NK))
    for k, positive in ((0, [0]), (1, [3])):
        known = ~np.isnan(y_NK[:, k])
        assert w_NK[positive, k].sum() == pytest.approx(w_NK[known, k].sum() / 2)
        assert w_NK[known, k].mean() == pytest.approx(1)
    one_hot = np.eye(3)[[0, 0, 0, 1, 2, 2]]
    w_N1 = multiclass.label_weights(one_hot, multiclass.balanced_weights(one_hot))
    assert [w_N1[one_hot[:, k] > 0].sum() for k in range(3)] == pytest.approx([2, 2, 2])


def test_thresholds_have_the_highest_f1():
    rng = np.random.default_rng(0)
    y_NK = (rng.random((60, 3)) < 0.3).astype(float)
    y_NK[:, 2], y_NK[5:20, 0] = 0, NAN
    # with ties
    scores_NK = np.round(np.clip(rng.normal(0.3 + 0.2 * np.nan_to_num(y_NK), 0.2), 0, 1), 2)

    def f1(k, threshold):
        known = ~np.isnan(y_NK[:, k])
        predicted, true = scores_NK[known, k] > threshold, y_NK[known, k] > 0
        return float(2 * (predicted & true).sum() / max(1, predicted.sum() + true.sum()))

    found = best_thresholds(y_NK, scores_NK)
    for k in (0, 1):
        assert f1(k, found[k]) == max(f1(k, t) for t in np.linspace(-0.005, 1.005, 102))
    assert found[2] == 0.5


@pytest.mark.parametrize("positives", [19, 20, 39, 40, 57])
def test_the_score_that_95_of_100_positives_reach(positives):
    """Unknown labels do not count; there is none of fewer than 20 positives, or without a negative."""
    rng = np.random.default_rng(positives)
    y_N = rng.permutation(np.repeat([1.0, 0.0, NAN], (positives, 30, 9)))
    score_N = np.round(rng.normal(0.3 + 0.2 * np.nan_to_num(y_N), 0.1), 4)
    no_negative_N = np.where(y_N == 0, NAN, y_N)
    points = sensitivity_points(
        np.stack([y_N, no_negative_N], 1), np.stack([score_N] * 2, 1), ("AF", "SR")
    )
    said = sensitivity_sentences(points, ("AF", "SR"))
    none = "no score with 95 % sensitivity for {}: that takes 20 positives and a negative"
    if positives < 20:
        assert said == [none.format("AF, SR")] and not points
        return
    line, without = said
    assert without == none.format("SR")
    name, threshold, specificity = re.fullmatch(
        r"(\w+): 95 % sensitivity with ([\d.]+) for the threshold, specificity ([\d.]+)", line
    ).groups()
    assert name == "AF" and [*points] == ["AF"]
    assert points["AF"] == pytest.approx([float(threshold), float(specificity)], abs=0.005)
    assert (score_N[y_N == 1] >= float(threshold)).mean() >= 0.95
    assert (score_N[y_N == 1] > float(threshold)).mean() < 0.95
    assert float(specificity) == pytest.approx(
        (score_N[y_N == 0] < float(threshold)).mean(), abs=0.005
    )


def test_the_partial_likelihood_is_cox_and_breslows():
    """Each event against all who were followed at least as long, ties and strangers included."""
    rng = np.random.default_rng(0)
    time = rng.integers(1, 9, 40) / 2
    y_R = np.where(rng.random(40) < 0.5, time, -time)
    y_R[[3, 17]] = np.nan
    risk_R = torch.from_numpy(rng.normal(size=40)).requires_grad_()
    hazard_R = np.exp(risk_R.detach().numpy())
    found_R = cox_loss(risk_R[:, None], torch.from_numpy(y_R)[:, None])[:, 0]
    events = np.flatnonzero(y_R > 0)
    for i in events:
        at_risk = np.abs(y_R) >= y_R[i]
        share = hazard_R[i] / hazard_R[at_risk].sum()
        assert found_R[i].item() == pytest.approx(-np.log(share * at_risk.sum()), abs=1e-12)
    loss_R, share_R = KINDS["survival"].loss_and_known_share(
        risk_R[:, None], torch.from_numpy(y_R)[:, None]
    )
    assert share_R.numpy().tolist() == (y_R > 0).tolist() and not loss_R[~share_R.bool()].any()
    (gradient_R,) = torch.autograd.grad(loss_R.sum(), risk_R)
    expected_R = -(y_R > 0).astype(float)
    for i in events:
        at_risk = np.abs(y_R) >= y_R[i]
        expected_R[at_risk] += hazard_R[at_risk] / hazard_R[at_risk].sum()
    np.testing.assert_allclose(gradient_R, expected_R, atol=1e-12)
