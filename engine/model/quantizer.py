"""Gumbel product quantiser: each feature is replaced by one code of each codebook, chosen with
Gumbel softmax.

    z_RMF -> logits_RMGV -> (+ noise) / tau -> softmax -> code = argmax -> codebook[g, code],
    concatenated over g -> q_RMP

The forward pass looks up the chosen vectors; the gradient is that of the softmax-weighted sum
(straight-through). The authors get the same values by multiplying one-hot vectors by the codebook,
[R * M, G * V, P / G] numbers.

Source: paper, section "Pre-training", Wav2Vec 2.0 (two groups of 320 codes, section "Experiments");
fairseq-signals modules/gumbel_vector_quantizer.py:90-94 (temperature), :130-200 (straight-through,
perplexities). Shapes: engine.model.config.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .config import ModelConfig


def temperature(config: ModelConfig, updates: int) -> float:
    """Return the Gumbel temperature tau after this number of updates. Pass it to a compiled step as a tensor:
    for each new Python number, the step would be compiled again."""
    return max(config.tau_start * config.tau_decay**updates, config.tau_end)


class StraightThroughLookUp(torch.autograd.Function):
    """Return the codebook vectors of the chosen codes, codebook_GVd[g, codes_AG], as [A, G, d]. The
    gradient of soft_AGV is that of the product soft_AGV @ codebook (straight-through); the gradient of the
    codebook is that of the look-up."""

    @staticmethod
    def forward(soft_AGV: Tensor, codebook_GVd: Tensor, codes_AG: Tensor) -> Tensor:
        return codebook_GVd[torch.arange(codebook_GVd.shape[0], device=codes_AG.device), codes_AG]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        soft_AGV, codebook_GVd, codes_AG = inputs
        ctx.save_for_backward(codebook_GVd, codes_AG)
        ctx.soft_dtype = soft_AGV.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        codebook_GVd, codes_AG = ctx.saved_tensors
        grad_GAd = grads[0].to(codebook_GVd.dtype).transpose(0, 1)
        grad_soft_AGV = torch.bmm(grad_GAd, codebook_GVd.transpose(1, 2)).transpose(0, 1)
        chosen_GVA = (
            codes_AG.t()[:, None, :]
            == torch.arange(codebook_GVd.shape[1], device=codes_AG.device)[:, None]
        )
        # a matrix product sums in a fixed order, so that runs repeat; scatter_add does not
        grad_codebook = torch.bmm(chosen_GVA.to(codebook_GVd.dtype), grad_GAd)
        return grad_soft_AGV.to(ctx.soft_dtype), grad_codebook, None


class Quantized(NamedTuple):
    values_RMP: Tensor
    codes_RMG: Tensor
    share_GV: Tensor  # the probability of each code, summed over the masked tokens; has a gradient
    tokens: Tensor  # the number of masked tokens
    hard_GV: Tensor  # how many tokens have each code as the most probable one, without noise


class Quantizer(nn.Module):
    """Replaces each feature by one code of each codebook, side by side."""

    def __init__(self, config: ModelConfig, feature_width: int) -> None:
        super().__init__()
        self.books, self.codes = config.codebooks, config.codes
        self.logits = nn.Linear(feature_width, self.books * self.codes)
        self.codebook = nn.Parameter(
            torch.empty(self.books, self.codes, config.code_width // self.books)
        )

    def forward(
        self, z_RMF: Tensor, valid_RM: Tensor, tau: Tensor, noise_RMGV: Tensor | None
    ) -> Quantized:
        """Quantise features. With `noise_RMGV`, standard Gumbel noise, codes are sampled; without it, each
        is the most probable one, as in evaluation."""
        rows, slots, _ = z_RMF.shape
        logits_AGV = self.logits(z_RMF).float().view(rows * slots, self.books, self.codes)
        weight_A = valid_RM.reshape(-1).float()
        best_AG = logits_AGV.detach().argmax(-1)
        # a sum of products instead of a matmul, which autocast would compute in bf16
        share_GV = (logits_AGV.softmax(-1) * weight_A[:, None, None]).sum(0)
        if noise_RMGV is None:
            codes_AG = best_AG
            values = self.codebook[torch.arange(self.books, device=codes_AG.device), codes_AG]
        else:
            noisy_AGV = (logits_AGV + noise_RMGV.reshape(logits_AGV.shape)) / tau
            codes_AG = noisy_AGV.detach().argmax(-1)
            values = StraightThroughLookUp.apply(noisy_AGV.softmax(-1), self.codebook, codes_AG)
        at_AG = best_AG + self.codes * torch.arange(self.books, device=best_AG.device)
        # scatter_add sums in any order, which does not matter for sums of 0 and 1, as they are exact
        counts = torch.zeros(self.books * self.codes, device=best_AG.device)
        counts = counts.scatter_add(
            0, at_AG.reshape(-1), weight_A[:, None].expand_as(at_AG).reshape(-1)
        )
        return Quantized(
            values.reshape(rows, slots, -1),
            codes_AG.view(rows, slots, self.books),
            share_GV,
            weight_A.sum(),
            counts.view(self.books, self.codes),
        )
