"""AdamW that clips and skips, and learning rates."""

import torch

from omnilead.engine.training.config import TrainConfig
from omnilead.engine.training.optimizer import GuardedAdamW, lr_at


def test_schedules():
    fixed, cosine, tri = (
        TrainConfig(schedule=name, lr=1.0) for name in ("fixed", "warmup_cosine", "tri_stage")
    )
    assert {lr_at(fixed, step, 100) for step in range(100)} == {1.0}
    for config, steps, expected in (
        (cosine, (0, 5, 10, 55, 100), [0.01, 0.505, 1.0, 0.505, 0.01]),
        (tri, (0, 10, 29, 30, 65, 100), [0.01, 1.0, 1.0, 1.0, 0.1, 0.01]),
    ):
        assert [round(lr_at(config, step, 100), 4) for step in steps] == expected


def test_adamw_clips_and_skips_non_finite_steps():
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.ones(n)) for n in (6, 4)] for _ in range(2))
    options = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}
    guarded = GuardedAdamW([(1.0, ours)], clip_norm=0.5, **options)
    plain = torch.optim.AdamW(theirs, **options)
    for step in range(6):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine) * (10 if step % 2 else 0.01)
            other.grad = mine.grad.clone()
        if step == 3:
            ours[1].grad[0] = torch.inf
            guarded.step()
            assert (float(guarded.skipped), float(guarded.in_a_row)) == (1, 1)
        else:
            norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
            guarded.step()
            plain.step()
            torch.testing.assert_close(guarded.norm, norm)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    assert (float(guarded.skipped), float(guarded.in_a_row)) == (1, 0)


def test_the_norm_of_a_million_numbers():
    """As ZeRO hands them to one rank, and their halves to two."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(10**6 + 1, generator=generator)
    weights = torch.nn.Parameter(torch.zeros(gradient.shape))
    weights.grad = gradient
    adam = GuardedAdamW([(1.0, [weights])], lr=1e-3)
    adam.step()
    torch.testing.assert_close(adam.norm.double(), gradient.double().norm(), rtol=1e-6, atol=0)
