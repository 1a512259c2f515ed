"""Crops as they are, in an order that is given: for validation, evaluation and embeddings.

views(dataset.read(row)[None], augment)      # int16 [B, 12, 5000] -> float32 millivolts [B, 2, L, 2500], on the CPU
"""

import numpy as np
import torch
from torch import Tensor

from engine.data.augment import AugmentConfig
from engine.data.augmenter import HALF, MV_PER_UV


def views(crops_BLT: np.ndarray, config: AugmentConfig) -> Tensor:
    """Both halves, with the leads that the model sees: the others are zeros, or gone. Nothing is masked, nothing added."""
    x_BSLT = np.zeros((len(crops_BLT), 2, len(config.output_leads), HALF), np.float32)
    seen = list(config.seen)
    at = seen if config.padded else slice(None)
    x_BSLT[:, :, at] = crops_BLT[:, seen].reshape(len(crops_BLT), len(seen), 2, HALF).swapaxes(1, 2)
    return torch.from_numpy(x_BSLT).mul_(MV_PER_UV)
