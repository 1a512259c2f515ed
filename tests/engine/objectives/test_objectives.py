"""Values and gradients of each objective equal the formula of its source."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from omnilead.engine.model.draws import count_negatives
from omnilead.engine.objectives.contrastive import authors_cmsc_loss, nt_xent, threekg_loss
from omnilead.engine.objectives.local import diversity, local_loss, mean_over_rows


def gathered_loss(x: Tensor, y: Tensor, other: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """As the authors: [1 + K, M] candidates of one segment, those equal to the target at -inf. ->
    loss and hit of each token"""
    candidates = torch.cat([y[None], y[other].permute(1, 0, 2)])
    logits = torch.cosine_similarity(x[None], candidates, dim=-1) / temperature
    same = (candidates[1:] == y).all(-1)
    logits = torch.cat([logits[:1], logits[1:].masked_fill(same, -torch.inf)]).t()
    hits = (logits.argmax(-1) == 0) & ~((logits.argmax(-1) == 0) & (logits.argmin(-1) == 0))
    return F.cross_entropy(logits, torch.zeros(len(y), dtype=torch.long), reduction="none"), hits


def case(
    rows: int, slots: int, codes: int, counts: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Contexts, targets made of few codes (so that many are identical), 100 negatives with repeats,
    valid slots, codes."""
    generator = torch.Generator().manual_seed(rows + slots + codes)
    book = torch.randn(codes, 16, generator=generator)
    code_RM = torch.randint(codes, (rows, slots), generator=generator)
    used = torch.tensor(counts)[:, None]
    other = (torch.rand(rows, slots, 100, generator=generator) * (used[..., None] - 1)).long()
    other += other >= torch.arange(slots)[:, None]
    x = torch.randn(rows, slots, 16, generator=generator)
    return (
        x,
        book[code_RM],
        other.clamp(max=slots - 1),
        torch.arange(slots) < used,
        code_RM[..., None],
    )


@pytest.mark.parametrize("codes", [1, 3, 40, 10_000])
@pytest.mark.parametrize("counts", [[13, 13, 13], [13, 7, 2]], ids=["equal", "ragged"])
def test_the_gram_matrix_gives_the_loss_of_gathered_negatives(
    codes: int, counts: list[int]
) -> None:
    x, y, other, valid, code = case(3, 13, codes, counts)
    x, y = x.requires_grad_(), y.requires_grad_()
    loss, accuracy = local_loss(x, y, count_negatives(other, 13), valid, code)
    rows = [gathered_loss(x[r, :n], y[r, :n], other[r, :n], 0.1) for r, n in enumerate(counts)]
    expected = torch.stack([losses.mean() for losses, _ in rows]).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        accuracy, torch.stack([hits.float().mean() for _, hits in rows]).mean()
    )
    for one, other_grad in zip(
        torch.autograd.grad(loss, (x, y)), torch.autograd.grad(expected, (x, y)), strict=True
    ):
        torch.testing.assert_close(one, other_grad, rtol=1e-4, atol=1e-6)
        assert one.isfinite().all()


def test_without_codes_no_negative_is_excluded() -> None:
    x, y, other, valid, code = case(2, 9, 3, [9, 9])
    times = count_negatives(other, 9)
    assert local_loss(x, y, times, valid)[0] > local_loss(x, y, times, valid, code)[0]


def test_with_equal_token_counts_the_loss_is_the_authors_mean_over_tokens() -> None:
    loss = torch.rand(4, 7)
    torch.testing.assert_close(
        mean_over_rows(loss, torch.ones(4, 7, dtype=torch.bool)), loss.mean()
    )
    assert mean_over_rows(loss, torch.zeros(4, 7, dtype=torch.bool)) == 0


def test_diversity() -> None:
    even = torch.full((2, 8), 10 / 8)
    loss, prob, code = diversity(even, torch.eye(8)[:2] * 10, torch.tensor(10.0), gathered=False)
    assert float(loss) == pytest.approx(0, abs=1e-5)
    assert float(prob) == pytest.approx(16, rel=1e-5) and float(code) == pytest.approx(2, rel=1e-5)


def nt_xent_by_hand(g: Tensor, temperature: float) -> Tensor:
    z = F.normalize(g.flatten(0, 1), dim=-1)
    terms = []
    for i in range(len(z)):
        s = {j: z[i] @ z[j] / temperature for j in range(len(z)) if j != i}
        terms.append(torch.stack(list(s.values())).logsumexp(0) - s[i ^ 1])
    return torch.stack(terms).mean()


def test_cmsc_and_simclr_are_the_paper_s_formula() -> None:
    g = torch.randn(4, 2, 10, requires_grad=True)
    expected = nt_xent_by_hand(g, 0.1)
    for loss, _ in (nt_xent(g, 0.1, gathered=True), nt_xent(g, 0.1, gathered=False)):
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(v, g, retain_graph=True)[0] for v in (loss, expected))
        )
    detached, _ = nt_xent(g, 0.1, gathered=False, detach_norm=True)
    torch.testing.assert_close(detached, expected)
    assert not torch.allclose(
        *(torch.autograd.grad(v, g, retain_graph=True)[0] for v in (detached, expected))
    )


def test_accuracy_is_one_where_views_agree() -> None:
    g = torch.randn(8, 1, 32).expand(8, 2, 32)
    assert nt_xent(g, 0.1, gathered=False)[1] == 1
    assert authors_cmsc_loss(g, torch.arange(8), 0.1)[1] == 1
    assert threekg_loss(g, torch.arange(8), 0.1, gathered=False)[1] == 1
    assert nt_xent(torch.randn(50, 2, 32), 0.1, gathered=False)[1] < 0.2


def test_authors_cmsc_is_the_authors_formula() -> None:
    """cmsc_criterion.py: all pairs with one id are positive, and averaged."""
    g, ids = torch.randn(4, 2, 10, requires_grad=True), torch.tensor([3, 1, 2, 3])
    norm = g.detach().norm(dim=-1, keepdim=True)
    first, second = (g / norm).unbind(1)
    s, same = first @ second.t() / 0.1, ids[:, None] == ids
    expected = (-s.log_softmax(-1)[same].mean() - s.t().log_softmax(-1)[same.t()].mean()) / 2
    loss, _ = authors_cmsc_loss(g, ids, 0.1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(v, g, retain_graph=True)[0] for v in (loss, expected))
    )
    assert authors_cmsc_loss(g[:1], ids[:1], 0.1)[0] == 0  # one pair has nothing to be told from


def test_3kg_is_the_authors_formula() -> None:
    """3kg_criterion.py: each positive against the negatives alone."""
    g, ids = torch.randn(5, 2, 10, requires_grad=True), torch.tensor([0, 1, 0, 2, 1])
    z, who, terms = F.normalize(g.flatten(0, 1), dim=-1), ids.repeat_interleave(2), []
    s = z @ z.t() / 0.1
    for i in range(10):
        negatives = s[i][who != who[i]]
        positives = [s[i, p] for p in range(10) if p != i and who[p] == who[i]]
        terms += [torch.cat([p[None], negatives]).logsumexp(0) - p for p in positives]
    expected = torch.stack(terms).mean()
    loss, _ = threekg_loss(g, ids, 0.1, gathered=False)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(v, g, retain_graph=True)[0] for v in (loss, expected))
    )


def test_3kg_with_a_single_patient_is_zero_not_nan() -> None:
    g = torch.randn(2, 2, 10, requires_grad=True)
    loss, _ = threekg_loss(g, torch.tensor([4, 4]), 0.1, gathered=False)
    loss.backward()
    assert loss == 0 and g.grad is not None and g.grad.isfinite().all()


@pytest.mark.parametrize("views", [1, 3])
def test_contrast_needs_two_views(views: int) -> None:
    with pytest.raises(ValueError, match="two views"):
        nt_xent(torch.randn(4, views, 8), 0.1, gathered=False)
