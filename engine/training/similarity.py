"""How alike things look to a model: cosines of pairs that belong together and of pairs that do not, for RUN/diagnostics.npz.

with Seen(engine.module) as seen:         # what passes between its parts, whatever ZeRO has made of their weights
    engine(*arguments)
seen.arrays(views=2)                      # under the names of engine.evaluation.run_files
pairs(c_AD, patient_A)                    # cosines of the same and of others
"""

from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.draws import Draws
from engine.model.heads import Compared, pool
from engine.objectives.gather import total

MOST = 20_000  # of a kind of pairs


class Seen:
    """Of the forward passes within, the last."""

    def __init__(self, model: Any) -> None:
        """A Pretrainer: its local head is given the encodings; without one, the encoder gives them out."""
        self.model = model
        self.c_RND: Tensor | None = None
        self.compared: Compared | None = None
        self.draws: Draws | None = None

    def __enter__(self) -> Self:
        local = self.model.local is not None
        self.hook = (self.model.local if local else self.model.encoder).register_forward_hook(
            self._at_head if local else self._at_encoder
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.hook.remove()

    def _at_head(self, _: Any, given: tuple[Any, ...], out: Compared) -> None:
        self.c_RND, self.draws, self.compared = given[0], given[2], out

    def _at_encoder(self, _: Any, given: tuple[Any, ...], out: Tensor) -> None:
        self.c_RND = out

    @torch.no_grad()
    def arrays(self, views: int) -> dict[str, np.ndarray]:
        """By all ranks: codes are counted over all of them, pairs are this rank's."""
        assert self.c_RND is not None
        found = {}
        if self.compared is not None and self.draws is not None:
            found["positive_similarity"], found["negative_similarity"] = contexts(self.compared, self.draws)
            found["code_usage"] = total(self.compared.quantized.hard_GV).cpu().numpy()
        crop_R = torch.arange(len(self.c_RND), device=self.c_RND.device) // views
        found["same_similarity"], found["other_similarity"] = pairs(pool(self.c_RND), crop_R)
        return found


def contexts(compared: Compared, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Of masked tokens with their own targets, and with those that they are to be told from."""
    context_RMP, target_RMP = (F.normalize(x.float(), dim=-1) for x in compared[:2])
    s_RMM = context_RMP @ target_RMP.transpose(1, 2)
    codes_RMG = compared.quantized.codes_RMG
    same_RMM = (codes_RMG[:, :, None] == codes_RMG[:, None]).all(-1)
    other_RMM = (draws.times_RMM > 0) & ~same_RMM & draws.valid_RM[:, :, None]
    return sampled(s_RMM.diagonal(dim1=1, dim2=2)[draws.valid_RM]), sampled(s_RMM[other_RMM])


def pairs(c_AD: Tensor, name_A: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Of all pairs: those of one name, those of two."""
    unit_AD = F.normalize(c_AD.float(), dim=-1)
    cosine_AA, same_AA = unit_AD @ unit_AD.T, name_A[:, None] == name_A
    once_AA = torch.ones_like(same_AA).triu(1)
    return sampled(cosine_AA[once_AA & same_AA]), sampled(cosine_AA[once_AA & ~same_AA])


def sampled(values: Tensor) -> np.ndarray:
    """Evenly, at most MOST."""
    every = -(-len(values) // MOST) or 1
    return values[::every].float().cpu().numpy()
