"""Fine-tuning: an encoder, the mean over time, and a linear layer (diagnosis) or cosines to class vectors (identification).

    model = Classifier(encoder, HeadConfig(task="diagnosis"), classes=26)
    losses = model(x_BSLT, labels_BC, present_BS)              # training
    model(x_BSLT)                                              # c_RD, float32: pooled encodings, for validation
    model.logits(c_RD)

Source: paper, section "Fine-tuning"; fairseq-signals models/classification/ecg_transformer_classifier.py (Xavier-uniform, bias
0), criterions/binary_cross_entropy_with_logits.py (mean over samples and classes), models/identification/arcface.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import HeadConfig
from engine.model.encoder import pool
from engine.objectives.arcface import arcface_logits, cosines
from engine.objectives.contrastive import sum_over_ranks, world_size


class Classifier(nn.Module):
    def __init__(self, encoder: nn.Module, config: HeadConfig, classes: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        width = int(encoder.width)  # type: ignore[arg-type]
        self.encoder, self.config = encoder, config
        self.head = nn.Linear(width, classes, bias=config.task == "diagnosis")
        nn.init.xavier_uniform_(self.head.weight, generator=generator)
        if config.task == "diagnosis":
            nn.init.zeros_(self.head.bias)

    def forward(
        self, x_BSLT: Tensor, labels: Tensor | None = None, present_BS: Tensor | None = None
    ) -> dict[str, Tensor] | Tensor:
        """labels: float [B, C] for diagnosis, int64 [B] for identification; both halves of a crop have the crop's.
        present_BS: 0 for halves that the record does not have. Without labels: the pooled encodings c_RD."""
        c_RD = pool(self.encoder(x_BSLT.flatten(0, 1)))
        if labels is None:
            return c_RD
        assert present_BS is not None
        labels_R, present_R = labels.repeat_interleave(x_BSLT.shape[1], 0), present_BS.flatten().float()
        loss_R, right_R = self._diagnosis(c_RD, labels_R) if self.config.task == "diagnosis" else self._patient(c_RD, labels_R)
        count = sum_over_ranks(present_R.sum()) / world_size()  # as the mean is taken over the ranks' losses
        return {"loss": (loss_R * present_R).sum() / count, "accuracy": (right_R.float() * present_R).sum().detach() / count}

    def logits(self, c_RD: Tensor) -> Tensor:
        logits: Tensor = self.head(c_RD.to(self.head.weight.dtype)).float()
        return logits

    def _diagnosis(self, c_RD: Tensor, labels_RC: Tensor) -> tuple[Tensor, Tensor]:
        logits_RC = self.logits(c_RD)
        loss_R = F.binary_cross_entropy_with_logits(logits_RC, labels_RC, reduction="none").mean(1)
        return loss_R, ((logits_RC > 0) == (labels_RC > 0)).all(1)

    def _patient(self, c_RD: Tensor, label_R: Tensor) -> tuple[Tensor, Tensor]:
        cosine_RC = cosines(c_RD, self.head.weight)
        logits_RC = arcface_logits(cosine_RC, label_R, self.config.scale, self.config.margin)
        return F.cross_entropy(logits_RC, label_R, reduction="none"), cosine_RC.argmax(1) == label_R
