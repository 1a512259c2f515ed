"""Values and gradients of each objective equal the formula of its source."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import SMALL, keys, seeded, waves
from torch.testing import assert_close

from omnilead.engine.model.cpc import PredictiveCoding, SampledCoding, draw_candidates
from omnilead.engine.model.draws import count_draws
from omnilead.engine.model.objectives import (
    attribute_losses,
    authors_cmsc_loss,
    diversity_loss_and_perplexities,
    local_loss,
    mean_over_rows,
    nt_xent,
    threekg_loss,
)


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves, retain_graph=True)


def same(loss, expected, g):
    """Value and gradient."""
    assert_close(loss, expected)
    assert_close(gradients(loss, g), gradients(expected, g))


def gathered_loss(x, y, other, temperature):
    """As the authors: [1 + K, M] candidates of one segment, those equal to the target at -inf. ->
    mean loss and share of hits"""
    candidates = torch.cat([y[None], y[other].permute(1, 0, 2)])
    logits = torch.cosine_similarity(x[None], candidates, dim=-1) / temperature
    logits[1:] = logits[1:].masked_fill((candidates[1:] == y).all(-1), -torch.inf)
    highest, lowest = logits.argmax(0), logits.argmin(0)
    hits = (highest == 0) & (lowest != 0)
    return F.cross_entropy(logits.t(), torch.zeros_like(highest)), hits.float().mean()


def case(rows, slots, codes, counts):
    """Contexts, targets made of few codes (so that many are identical), 100 negatives with repeats,
    valid slots, codes."""
    torch.manual_seed(rows + slots + codes)
    code_RM = torch.randint(codes, (rows, slots))
    used = torch.tensor(counts)[:, None]
    other = (torch.rand(rows, slots, 100) * (used[..., None] - 1)).long()
    other += other >= torch.arange(slots)[:, None]
    x = torch.randn(rows, slots, 16)
    y = torch.randn(codes, 16)[code_RM]
    return x, y, other.clamp(max=slots - 1), torch.arange(slots) < used, code_RM[..., None]


@pytest.mark.parametrize("codes", [1, 3, 40, 10_000])
@pytest.mark.parametrize("counts", [[13, 13, 13], [13, 7, 2]], ids=["equal", "ragged"])
def test_the_gram_matrix_gives_the_loss_of_gathered_negatives(codes, counts):
    x, y, other, valid, code = case(3, 13, codes, counts)
    x, y = x.requires_grad_(), y.requires_grad_()
    loss, accuracy = local_loss(x, y, count_draws(other, 13), valid, code)
    rows = [gathered_loss(x[r, :n], y[r, :n], other[r, :n], 0.1) for r, n in enumerate(counts)]
    losses, hits = map(torch.stack, zip(*rows, strict=True))
    assert_close(loss, losses.mean(), rtol=1e-5, atol=1e-6)
    assert_close(accuracy, hits.mean())
    grads, expected = (gradients(value, x, y) for value in (loss, losses.mean()))
    assert_close(grads, expected, rtol=1e-4, atol=1e-6)


def test_without_codes_no_negative_is_excluded():
    x, y, other, valid, code = case(2, 9, 3, [9, 9])
    times = count_draws(other, 9)
    assert local_loss(x, y, times, valid)[0] > local_loss(x, y, times, valid, code)[0]


def test_with_equal_token_counts_the_loss_is_the_authors_mean_over_tokens():
    loss, valid = torch.rand(4, 7), torch.ones(4, 7, dtype=torch.bool)
    assert_close(mean_over_rows(loss, valid), loss.mean())
    assert mean_over_rows(loss, ~valid) == 0


def test_diversity():
    """Even probabilities of 8 codes in two books, of which the tokens take one each."""
    even, one = torch.full((2, 8), 10 / 8), torch.eye(8)[:2] * 10
    loss, *perplexities = diversity_loss_and_perplexities(
        even, one, torch.tensor(10.0), gathered=False
    )
    assert float(loss) == pytest.approx(0, abs=1e-5)
    assert perplexities == pytest.approx([16, 2], rel=1e-5)


def test_cmsc_and_simclr_are_the_paper_s_formula():
    g = torch.randn(4, 2, 10, requires_grad=True)
    z = F.normalize(g.flatten(0, 1), dim=-1)
    s = (z @ z.t() / 0.1).masked_fill(torch.eye(8, dtype=torch.bool), -torch.inf)
    expected = F.cross_entropy(s, torch.arange(8) ^ 1)
    for gathered in (True, False):
        same(nt_xent(g, 0.1, gathered=gathered)[0], expected, g)
    detached, _ = nt_xent(g, 0.1, gathered=False, detach_norm=True)
    assert_close(detached, expected)
    assert not torch.allclose(*gradients(detached, g), *gradients(expected, g))


def test_accuracy_is_one_where_views_agree():
    g, ids = torch.randn(8, 1, 32).expand(8, 2, 32), torch.arange(8)
    assert nt_xent(g, 0.1, gathered=False)[1] == 1
    assert authors_cmsc_loss(g, ids, 0.1)[1] == 1
    assert threekg_loss(g, ids, 0.1, gathered=False)[1] == 1
    assert nt_xent(torch.randn(50, 2, 32), 0.1, gathered=False)[1] < 0.2


def test_authors_cmsc_is_the_authors_formula():
    """cmsc_criterion.py: all pairs with one id are positive, and averaged."""
    g, ids = torch.randn(4, 2, 10, requires_grad=True), torch.tensor([3, 1, 2, 3])
    first, second = (g / g.detach().norm(dim=-1, keepdim=True)).unbind(1)
    s, positive = first @ second.t() / 0.1, ids[:, None] == ids
    one_way, back = (-x.log_softmax(-1)[positive].mean() for x in (s, s.t()))
    same(authors_cmsc_loss(g, ids, 0.1)[0], (one_way + back) / 2, g)
    assert authors_cmsc_loss(g[:1], ids[:1], 0.1)[0] == 0  # one pair has nothing to be told from


def test_3kg_is_the_authors_formula():
    """3kg_criterion.py: each positive against the negatives alone."""
    g, ids = torch.randn(5, 2, 10, requires_grad=True), torch.tensor([0, 1, 0, 2, 1])
    z, who, terms = F.normalize(g.flatten(0, 1), dim=-1), ids.repeat_interleave(2), []
    s = z @ z.t() / 0.1
    for i in range(10):
        negatives = s[i][who != who[i]]
        positives = [s[i, p] for p in range(10) if p != i and who[p] == who[i]]
        terms += [torch.cat([p[None], negatives]).logsumexp(0) - p for p in positives]
    same(threekg_loss(g, ids, 0.1, gathered=False)[0], torch.stack(terms).mean(), g)


def test_3kg_with_a_single_patient_is_zero_not_nan():
    g = torch.randn(2, 2, 10, requires_grad=True)
    loss, _ = threekg_loss(g, torch.tensor([4, 4]), 0.1, gathered=False)
    loss.backward()
    assert loss == 0 and g.grad is not None and g.grad.isfinite().all()


@pytest.mark.parametrize("views", [1, 3])
def test_contrast_needs_two_views(views):
    with pytest.raises(ValueError, match="two views"):
        nt_xent(torch.randn(4, views, 8), 0.1, gathered=False)


def test_age_and_sex_count_where_they_are_known():
    logits_R2 = torch.tensor([[0.5, 2.0], [3.0, -1.0], [9.0, 9.0]], requires_grad=True)
    y_R2 = torch.tensor([[0.0, 1.0], [1.0, torch.nan], [torch.nan, torch.inf]])
    age, sex = attribute_losses(logits_R2, y_R2)
    assert float(age.detach()) == pytest.approx((0.5**2 / 2 + (3 - 1 - 0.5)) / 2)
    assert float(sex.detach()) == pytest.approx(math.log(1 + math.exp(-2)))
    (grad_R2,) = torch.autograd.grad(age + sex, logits_R2)
    assert ((grad_R2 != 0) == torch.tensor([[1, 1], [1, 0], [0, 0]])).all()
    nothing = attribute_losses(logits_R2, torch.full_like(y_R2, torch.nan))
    assert nothing.tolist() == [0, 0]
    assert not torch.autograd.grad(nothing.sum(), logits_R2)[0].any()


@torch.no_grad()
def test_predictive_coding_is_van_den_oord_s_formula():
    encoder = seeded(replace(SMALL, causal=True, conv_norm="layer", layers=1)).encoder
    objective = PredictiveCoding(encoder, steps=3, temperature=0.5)
    x_BSLT = waves(2, 240)
    z_RNF = encoder.features(x_BSLT.flatten(0, 1))[0].numpy()
    c_RND = encoder(x_BSLT.flatten(0, 1)).numpy()
    unit_RNF = z_RNF / np.linalg.norm(z_RNF, axis=2, keepdims=True)
    losses = []
    for ahead, linear in enumerate(objective.maps, 1):
        for row in range(4):
            for t in range(15 - ahead):
                guess = linear.weight.numpy() @ c_RND[row, t] + linear.bias.numpy()
                s = unit_RNF[row] @ guess / np.linalg.norm(guess) / 0.5
                weight = 1 / (15 - ahead)  # every step ahead weighs the same
                losses.append(weight * (np.log(np.exp(s).sum()) - s[t + ahead]))
    expected = sum(losses) / 4 / 3
    assert float(objective(encoder, x_BSLT, None)) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_sampled_coding_is_the_cross_entropy_of_copied_candidates():
    encoder = seeded(replace(SMALL, causal=True, conv_norm="layer", layers=1)).encoder
    objective = SampledCoding(encoder, ahead=4, negatives=20)
    x_BSLT, keys_BS = waves(2, 240), keys(2)
    z_RNF, _ = encoder.features(x_BSLT.flatten(0, 1))
    guess_RND = objective.map(encoder(x_BSLT.flatten(0, 1)))
    drawn_RnK = draw_candidates(keys_BS.flatten(), 15, 4, 20)
    losses = []
    for row in range(4):
        for t in range(11):
            candidates = z_RNF[row, [t + 4, *drawn_RnK[row, t].tolist()]]
            losses.append(-(candidates @ guess_RND[row, t]).log_softmax(0)[0])
    expected = torch.stack(losses).sum() / 4
    assert_close(objective(encoder, x_BSLT, keys_BS), expected)


def test_candidates_are_all_other_tokens_alike_and_each_crop_has_its_own():
    keys_R = keys(200).flatten()
    drawn_RnK = draw_candidates(keys_R, 20, 14, 33)
    assert drawn_RnK.shape == (400, 6, 33)
    for t in range(6):
        times_N = torch.bincount(drawn_RnK[:, t].flatten(), minlength=20)
        assert times_N[t + 14] == 0 and len(times_N) == 20
        expected = 400 * 33 / 19
        others_N = times_N[torch.arange(20) != t + 14].double()
        assert ((others_N - expected).square() / expected).sum() < 50  # chi squared, 18 degrees
    assert not drawn_RnK[0].equal(drawn_RnK[1]) and not drawn_RnK[0, 0].equal(drawn_RnK[0, 1])
    assert draw_candidates(keys_R[7:9], 20, 14, 33).equal(drawn_RnK[7:9])
