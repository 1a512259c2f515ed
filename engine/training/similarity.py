"""Cosine similarities of pairs that belong together and of pairs that do not, for RUN/diagnostics.npz.

with Capture(engine.module) as captured:
    engine(*inputs)
captured.similarities(views=2)            # arrays, named as in engine.evaluation.run_files
pairs(c_AD, patient_A)                    # cosines of pairs with the same label and of pairs with different ones
"""

from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.draws import Draws
from engine.model.encoder import pool
from engine.model.pretrainer import LocalOutput
from engine.objectives.contrastive import sum_over_ranks

MAX_PAIRS = 20_000  # of each kind


class Capture:
    """What the encoder and the local head of a Pretrainer computed in the last forward pass, by a hook: that also works where
    ZeRO has partitioned the weights."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.c_RND: Tensor | None = None
        self.compared: LocalOutput | None = None
        self.draws: Draws | None = None

    def __enter__(self) -> Self:
        self.hook = (self.model.local or self.model.encoder).register_forward_hook(self._store)
        return self

    def __exit__(self, *_: object) -> None:
        self.hook.remove()

    def _store(self, module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if module is self.model.local:  # its inputs: encodings, features, draws
            self.c_RND, self.draws, self.compared = inputs[0], inputs[2], output
        else:
            self.c_RND = output

    @torch.no_grad()
    def similarities(self, views: int) -> dict[str, np.ndarray]:
        """Called by all ranks: codes are counted over all of them, pairs are those of this rank."""
        assert self.c_RND is not None
        arrays = {}
        if self.compared is not None and self.draws is not None:
            arrays["positive_similarity"], arrays["negative_similarity"] = contexts(self.compared, self.draws)
            arrays["code_usage"] = sum_over_ranks(self.compared.quantized.hard_GV).cpu().numpy()
        crop_R = torch.arange(len(self.c_RND), device=self.c_RND.device) // views
        arrays["same_similarity"], arrays["other_similarity"] = pairs(pool(self.c_RND), crop_R)
        return arrays


def contexts(compared: LocalOutput, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Of the contexts of masked tokens with their own targets, and with their negatives."""
    context_RMP, target_RMP = (F.normalize(x.float(), dim=-1) for x in compared[:2])
    s_RMM = context_RMP @ target_RMP.transpose(1, 2)
    codes_RMG = compared.quantized.codes_RMG
    same_RMM = (codes_RMG[:, :, None] == codes_RMG[:, None]).all(-1)
    negative_RMM = (draws.times_RMM > 0) & ~same_RMM & draws.valid_RM[:, :, None]
    return thinned(s_RMM.diagonal(dim1=1, dim2=2)[draws.valid_RM]), thinned(s_RMM[negative_RMM])


def pairs(c_AD: Tensor, label_A: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Of all pairs with the same label, and of all others."""
    unit_AD = F.normalize(c_AD.float(), dim=-1)
    cosine_AA, same_AA = unit_AD @ unit_AD.T, label_A[:, None] == label_A
    once_AA = torch.ones_like(same_AA).triu(1)
    return thinned(cosine_AA[once_AA & same_AA]), thinned(cosine_AA[once_AA & ~same_AA])


def thinned(values: Tensor) -> np.ndarray:
    """At most MAX_PAIRS, evenly spaced."""
    every = -(-len(values) // MAX_PAIRS) or 1
    return values[::every].float().cpu().numpy()
