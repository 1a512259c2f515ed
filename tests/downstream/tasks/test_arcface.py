"""ArcFace's logits against its formula and the authors' form."""

import math

import torch
from torch.testing import assert_close

from omnilead.downstream.tasks.classifier import arcface_logits


def test_arcface_equals_its_formula():
    rows = [[0.3, -0.2, 0.9], [-0.99, 0.1, 0.0], [0.5, 1.0, -1.0]]
    cosine = torch.tensor(rows, requires_grad=True)
    label = torch.tensor([0, 0, 1])
    logits = arcface_logits(cosine, label, scale=10.0, margin=1.0)
    turned = math.cos(math.acos(0.3) + 1)
    beyond = -0.99 - math.sin(1)  # beyond pi - margin
    expected = 10 * torch.tensor([[turned, -0.2, 0.9], [beyond, 0.1, 0.0]])
    assert_close(logits[:2], expected, rtol=0, atol=1e-4)
    logits.sum().backward()
    assert cosine.grad is not None and bool(cosine.grad.isfinite().all())
    # bit for bit what the authors' form gave before margin and scale could be tensors
    with torch.no_grad():
        true = cosine.gather(1, label[:, None]).clamp(-1 + 1e-6, 1 - 1e-6)
        moved = true * math.cos(1.0) - (1 - true.square()).sqrt() * math.sin(1.0)
        moved = torch.where(true > math.cos(math.pi - 1), moved, true - 1.0 * math.sin(1.0))
        assert (192 * moved).equal(arcface_logits(cosine, label).gather(1, label[:, None]))
        plain = arcface_logits(cosine, label, scale=10.0, margin=0.0)
    assert_close(plain, 10 * cosine.detach(), atol=2e-3, rtol=0)
