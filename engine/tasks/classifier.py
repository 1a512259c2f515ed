"""The model for fine-tuning: an encoder, the mean over time, and a linear layer (for identity:
cosines to class vectors).

    model = Classifier(encoder, TaskConfig(kind="multilabel"), outputs=26)
    losses = model(x_BSLT, labels_BK, present_BS)              # training
    model(x_BSLT)                                              # c_RD, float32: pooled encodings, for validation
    model.logits(c_RD)

Source: paper, section "Fine-tuning"; fairseq-signals
models/classification/ecg_transformer_classifier.py (Xavier-uniform, bias 0),
criterions/binary_cross_entropy_with_logits.py (mean over samples and classes),
models/identification/arcface.py.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omnilead.engine.model.encoder import pool
from omnilead.engine.model.encoders import build_head
from omnilead.engine.objectives.arcface import arcface_logits, cosines
from omnilead.engine.objectives.contrastive import sum_over_ranks, world_size
from omnilead.engine.tasks import kinds
from omnilead.engine.tasks.config import TaskConfig

SCALE_SPEED = 10  # the logarithm of a learned scale moves so many times faster than a weight


class Classifier(nn.Module):
    def __init__(
        self,
        encoder: nn.Module,
        task: TaskConfig,
        outputs: int,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        width = int(encoder.width)  # type: ignore[arg-type]
        self.encoder, self.task = encoder, task
        if task.head:
            self.head: Any = build_head(task.head, width, outputs, generator)
            return
        if task.kind == "identity" and task.scale == "learned":
            first = math.sqrt(2) * math.log(max(outputs - 1, 2))  # as in AdaCos (Zhang et al. 2019)
            self.log_scale = nn.Parameter(torch.tensor([math.log(first) / SCALE_SPEED]))
        self.head = nn.Linear(width, outputs, bias=task.kind != "identity")
        nn.init.xavier_uniform_(self.head.weight, generator=generator)
        if self.head.bias is not None:
            nn.init.zeros_(self.head.bias)

    def forward(
        self,
        x_BSLT: Tensor,
        labels: Tensor | None = None,
        present_BS: Tensor | None = None,
        weights_BK: Tensor | None = None,
        margin: Tensor | None = None,  # for identity, if it is not task.margin yet
    ) -> dict[str, Tensor] | Tensor:
        """labels: float [B, K], NaN where unknown; for identity int64 [B]. Both halves of a crop
        have its labels. present_BS: 0 for missing halves. weights_BK: weights of the labels.
        Without labels: the pooled encodings c_RD."""
        c_RD = pool(self.encoder(x_BSLT.flatten(0, 1)))
        if labels is None:
            return c_RD
        assert present_BS is not None
        halves = x_BSLT.shape[1]
        labels_R, present_R = labels.repeat_interleave(halves, 0), present_BS.flatten().float()
        if self.task.kind == "identity":
            loss_R, right_R = self._patient(
                c_RD, labels_R, self.task.margin if margin is None else margin
            )
            share_R = torch.ones_like(present_R)
        else:
            logits_RK, weights_RK = (
                self.logits(c_RD),
                None if weights_BK is None else weights_BK.repeat_interleave(halves, 0),
            )
            loss_R, share_R = kinds.loss(self.task.kind, logits_RK, labels_R, weights_RK)
            right_R = kinds.right(self.task.kind, logits_RK, labels_R)
        # Counts are averaged over ranks, so that the mean of the ranks' losses is the loss of the
        # global batch
        counts = torch.stack([(present_R * share_R).sum(), present_R.sum()])
        known, halves_there = sum_over_ranks(counts) / world_size()
        losses = {"loss": (loss_R * present_R).sum() / known}
        if self.task.kind == "regression":
            return losses
        return losses | {"accuracy": (right_R.float() * present_R).sum().detach() / halves_there}

    def logits(self, c_RD: Tensor) -> Tensor:
        logits: Tensor = self.head(c_RD.to(next(self.head.parameters()).dtype)).float()
        return logits

    def _patient(
        self, c_RD: Tensor, label_R: Tensor, margin: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        cosine_RC, fixed = cosines(c_RD, self.head.weight), self.task.scale
        scale = (SCALE_SPEED * self.log_scale.float()).exp() if fixed == "learned" else fixed
        logits_RC = arcface_logits(cosine_RC, label_R, scale, margin)
        return F.cross_entropy(logits_RC, label_R, reduction="none"), cosine_RC.argmax(1) == label_R
