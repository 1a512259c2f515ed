"""Patient identification as classification with an angular margin (ArcFace, Deng et al. 2019).

    cosine_RC = unit embeddings @ unit class vectors
    logits    = scale * (cos(theta + margin) for the true class, cos(theta) for the others)

Source: paper, section "Fine-tuning" (scale 192, margin 1.0); fairseq-signals
criterions/arcface_criterion.py:46-66. Beyond theta = pi - margin, cos(theta + margin) would rise
again; there the authors use cos(theta) - margin * sin(margin), which the paper does not mention.
CLIP keeps the cosine away from +-1, where the sine's slope is unbounded. `margin` and `scale` may
be tensors, for a margin that grows or a learned scale.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

CLIP = 1e-6


def arcface_logits(
    cosine_RC: Tensor, label_R: Tensor, scale: float | Tensor = 192.0, margin: float | Tensor = 1.0
) -> Tensor:
    """Computed in float32: with a scale of 192, bf16 has two digits left."""
    margin = torch.as_tensor(margin, dtype=torch.float64)
    cosine_RC = cosine_RC.float().clamp(-1 + CLIP, 1 - CLIP)
    true_R1 = cosine_RC.gather(1, label_R[:, None])
    sine_R1 = (1 - true_R1.square()).sqrt()
    moved_R1 = true_R1 * margin.cos() - sine_R1 * margin.sin()
    beyond_R1 = true_R1 - margin * margin.sin()
    moved_R1 = torch.where(true_R1 > (math.pi - margin).cos(), moved_R1, beyond_R1)
    return scale * cosine_RC.scatter(1, label_R[:, None], moved_R1)


def cosines(x_RD: Tensor, weight_CD: Tensor) -> Tensor:
    x_RD = F.normalize(x_RD.float(), dim=-1)
    weight_CD = F.normalize(weight_CD.float(), dim=-1)
    return x_RD @ weight_CD.t()
