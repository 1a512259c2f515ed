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


def seeded(config=SMALL, objective=None):
    return Pretrainer(
        config, objective or ObjectiveConfig(), generator=torch.Generator().manual_seed(0)
    )


@torch.no_grad()
def by_numpy(model):
    """Draw the weights from a random stream that library releases do not change."""
    for name, p in model.named_parameters():
        stream = np.random.RandomState(zlib.crc32(name.encode()))
        drawn = torch.from_numpy(stream.standard_normal(tuple(p.shape)).astype(np.float32))
        scale = 0.1 if p.ndim == 1 else np.prod(p.shape[1:]) ** -0.5
        is_gain = name.endswith(("norm.weight", "norm1.weight", "norm2.weight"))
        p.copy_(drawn * scale + float(is_gain))
    return model


def keys(crops, epoch=0):
    return torch.from_numpy(row_keys(7, epoch, np.arange(crops)))


def waves(crops, samples=800):
    """x_BSLT: each crop has its own rhythm and shape, the same in both halves."""
    rng = np.random.RandomState(0)
    t = np.arange(2 * samples) / 500
    hz = rng.uniform(2, 8, (crops, 1, 1))
    phase = rng.uniform(0, 6, (crops, 12, 1))
    gain = rng.normal(0, 1, (crops, 12, 1))
    noise = 0.05 * rng.normal(0, 1, (crops, 12, 2 * samples))
    x = torch.from_numpy(gain * np.cos(2 * np.pi * hz * t + phase) ** 5 + noise).float()
    return x.unflatten(2, (2, samples)).transpose(1, 2).contiguous()


def ecg(seconds=10, fs_hz=500, leads=12, seed=0):
    """Millivolts: beats with a different shape and amplitude in each lead, baseline wander and
    noise."""
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * fs_hz)) / fs_hz
    gain, phase = rng.normal(0, 0.7, (leads, 1)), rng.uniform(0, 1, (leads, 1))
    beats = gain * np.cos(np.pi * (1.2 * t + 0.02 * phase)) ** 40
    wander = 0.1 * np.sin(2 * np.pi * (0.3 * t + phase))
    return beats + wander + 0.01 * rng.normal(size=(leads, len(t)))
