"""What the attention for few tokens must give, by Triton's interpreter or on a GPU. Which, Triton decides when it is imported:
test_short.py runs this in a process of its own."""

from functools import cache

import pytest
import torch
from torch import Tensor

from engine.model.kernels import short

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bf16
PRECISIONS = [LOW] if DEVICE == "cuda" else [torch.float32, LOW]


@cache
def kept(rows: int, tokens: int, heads: int, d: int, p: float, seed: int) -> Tensor:
    """[R, H, N, N], by what it lets through: scores are equal and values one-hot, so a number of y is a share."""
    found = []
    for first in range(0, tokens, d):
        seen = range(first, min(first + d, tokens))
        qkv = torch.zeros(rows, tokens, 3, heads, d, dtype=LOW, device=DEVICE)
        qkv[:, seen, 2, :, [n - first for n in seen]] = 1
        torch.manual_seed(seed)
        y = short.attention(qkv.flatten(2), heads, p).view(rows, tokens, heads, d)
        found.append(y.permute(0, 2, 1, 3)[..., : len(seen)] > 0)
    return torch.cat(found, -1)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize(
    "rows, tokens, heads, d, p",
    [
        *((1, 156, 2, 64, 0.1), (3, 5, 1, 16, 0.9), (1, 33, 3, 32, 0.5)),
        *((1, 64, 2, 16, 0.0), (1, 200, 1, 32, 0.3), (1, 256, 1, 32, 0.1)),
    ],
)
def test_it_is_attention(rows: int, tokens: int, heads: int, d: int, p: float, dtype: torch.dtype) -> None:
    """With the zeros that it drew, forward and backward, against float64."""
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(rows, tokens, 3 * heads * d, generator=generator).to(DEVICE, dtype).requires_grad_()
    grad = torch.randn(rows, tokens, heads * d, generator=generator).to(DEVICE, dtype)
    torch.manual_seed(7)
    y = short.attention(qkv, heads, p)
    y.backward(grad)
    exact = qkv.detach().double().requires_grad_()
    q, k, v = exact.view(rows, tokens, 3, heads, d).permute(2, 0, 3, 1, 4)
    shares = (q @ k.transpose(-1, -2) * d**-0.5).softmax(-1)
    used = shares * kept(rows, tokens, heads, d, p, seed=7) / (1 - round(p * 256) / 256)
    wanted = (used @ v).transpose(1, 2).flatten(2)
    wanted.backward(grad.double())
    assert qkv.grad is not None and exact.grad is not None and y.dtype == dtype
    rounding = (16 if dtype == torch.float32 else 3) * torch.finfo(dtype).eps
    for got, true in ((y.detach(), wanted.detach()), (qkv.grad, exact.grad)):
        torch.testing.assert_close(got.double(), true, rtol=0, atol=rounding * float(true.abs().max()))


def test_large_scores_and_strange_strides() -> None:
    """A softmax of one score of a thousand is one, a gradient may come as a view, and without dropout nothing is drawn."""
    qkv = torch.zeros(1, 20, 3, 1, 16, dtype=LOW, device=DEVICE)
    qkv[:, :, :2, :, 0] = 60.0
    qkv[:, 3, 1, :, 0] = 100.0
    qkv[:, :, 2] = torch.arange(20.0, device=DEVICE)[:, None, None].to(LOW)
    leaf = qkv.flatten(2).requires_grad_()
    before = torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()
    y = short.attention(leaf, 1)
    assert torch.equal(before, torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state())
    assert torch.equal(y, torch.full_like(y, 3))
    y.sum().backward()  # a gradient of stride 0
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.view(20, 3, 16)[:, 2, 0], torch.eye(20, device=DEVICE, dtype=LOW)[3] * 20)


def test_its_zeros_are_random() -> None:
    """As many as asked for, and no two places agree more often than chance: rows, heads, queries, keys, seeds."""
    one, other, again = (kept(4, 64, 4, 64, 0.1, seed).float() for seed in (0, 1, 0))
    assert torch.equal(one, again)
    share = 1 - 26 / 256
    assert abs(float(one.mean()) - share) < 5 * (share * (1 - share) / one.numel()) ** 0.5
    x = (one - share) / (share * (1 - share)) ** 0.5
    pairs = {"seed": (x, (other - share) / (share * (1 - share)) ** 0.5)}
    for axis, name in enumerate(("row", "head", "query", "key")):
        for lag in (1, 2, 3, 4, 8, 16, 31, 32)[: 3 if axis < 2 else None]:
            pairs[f"{name} {lag}"] = (x.narrow(axis, lag, x.shape[axis] - lag), x.narrow(axis, 0, x.shape[axis] - lag))
    for lag in (1, 8):
        pairs[f"query and key {lag}"] = (x[:, :, lag:, lag:], x[:, :, :-lag, :-lag])
    z = {name: float((a * b).mean()) * a.numel() ** 0.5 for name, (a, b) in pairs.items()}
    assert max(map(abs, z.values())) < 4, z
    assert 0.4 < sum(value**2 for value in z.values()) / len(z) < 2


def test_scores_far_below_zero() -> None:
    """The zeros beyond the last token would be the highest scores of all."""
    qkv = torch.randn(1, 20, 3, 1, 16, generator=torch.Generator().manual_seed(3))
    qkv[:, :, 0, :, 0], qkv[:, :, 1, :, 0] = 60, -60
    leaf = qkv.flatten(2).to(DEVICE, LOW).requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    q, k, v = exact.view(20, 3, 16).unbind(1)
    wanted = (q @ k.t() / 4).softmax(-1) @ v
    short.attention(leaf, 1).square().sum().backward()
    wanted.square().sum().backward()
    assert leaf.grad is not None and exact.grad is not None
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=0, atol=0.01 * float(exact.grad.abs().max()))
