"""A small model and its draws, for the tests of this folder."""

import zlib

import numpy as np
import torch

from omnilead.engine.model.config import ModelConfig, ObjectiveConfig
from omnilead.engine.model.draws import row_keys
from omnilead.engine.model.pretrainer import Pretrainer

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other

STILL = {"dropout": 0.0, "attention_dropout": 0.0, "input_dropout": 0.0, "feature_dropout": 0.0}
SMALL = ModelConfig(
    conv=((32, 2),) * 4,
    width=48,
    layers=2,
    heads=4,
    ffn=96,
    codes=16,
    code_width=32,
    projection=32,
    position_kernel=16,
    **STILL,
)


def seeded(config: ModelConfig = SMALL, objective: ObjectiveConfig | None = None) -> Pretrainer:
    return Pretrainer(
        config, objective or ObjectiveConfig(), generator=torch.Generator().manual_seed(0)
    )


@torch.no_grad()
def by_numpy(model: Pretrainer) -> Pretrainer:
    """Draw the weights from a random stream that library releases do not change."""
    for name, p in model.named_parameters():
        drawn = (
            np.random.RandomState(zlib.crc32(name.encode()))
            .standard_normal(tuple(p.shape))
            .astype(np.float32)
        )
        scale = 0.1 if p.ndim == 1 else np.prod(p.shape[1:]) ** -0.5
        p.copy_(
            torch.from_numpy(drawn) * scale
            + (1.0 if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")) else 0.0)
        )
    return model


def keys(crops: int, epoch: int = 0) -> torch.Tensor:
    return torch.from_numpy(row_keys(7, epoch, np.arange(crops)))


def waves(crops: int, samples: int = 800) -> torch.Tensor:
    """x_BSLT: each crop has its own rhythm and shape, the same in both halves."""
    rng = np.random.RandomState(0)
    t = np.arange(2 * samples) / 500
    hz, phase, gain = (
        rng.uniform(2, 8, (crops, 1, 1)),
        rng.uniform(0, 6, (crops, 12, 1)),
        rng.normal(0, 1, (crops, 12, 1)),
    )
    x = gain * np.cos(2 * np.pi * hz * t + phase) ** 5 + 0.05 * rng.normal(
        0, 1, (crops, 12, 2 * samples)
    )
    return torch.from_numpy(
        x.astype(np.float32).reshape(crops, 12, 2, samples).swapaxes(1, 2).copy()
    )
