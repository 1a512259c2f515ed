"""The objective of contrastive predictive coding (CPC). `objective.method: cpc` chooses it.

    z_RNF = features(x)           tokens, each of its own samples (32 ms)
    c_RND = context(z)            each sees itself and those before it: model.causal
    s_tu  = cos(W_k c_t, z_u) / temperature
    loss  = mean over k = 1 .. steps and t of  log sum_u exp s_tu - s_t(t+k)

W_k is one linear map for each step ahead, and the candidates u are all tokens of the same 5 s, so the loss
of guessing is log(tokens). The loss never compares different ECGs, so it depends neither on the batch nor on
the ranks. The maps are thrown away afterwards. What is exported is the encoder with its causal
transformer, which is what was trained.

`objective.options: {form: sampled}` is the form of ECG-CPC: one step of 14 ahead, and for each t as
candidates, beside t + 14, 128 of the other tokens, drawn with replacement; no temperature and no cosine;
the loss is summed over t, so that it is (tokens - 14) log(129) for guessing, and averaged over windows:

    s_tu  = W c_t . z_u;  loss = sum over t of  log(sum_u n_tu exp s_tu) - s_t(t+14),   n_tu: how often u is a candidate of t

The authors copy 129 candidates for each t; here all s_tu are one matrix product, weighted by n_tu.

Source: van den Oord et al. 2018; for ECGs Mehari and Strodthoff 2022 (12 steps ahead, negatives of
the same record; an LSTM has the place of the causal transformer); 2509.25095 and
AI4HealthUOL/ecg-fm-benchmarking (sampled). Shapes: engine.model.config; n tokens that predict.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..settings.errors import ConfigError
from .draws import ModelStream, count_draws, random_integers
from .objectives import unit_vectors


def predictive_coding(encoder: Any, form: str = "all", **options: Any) -> nn.Module:
    """Return the objective `cpc`. `form` says which tokens of the window are candidates: `all` tokens, or
    tokens that are drawn (`sampled`)."""
    if not getattr(encoder, "causal", False):
        raise ConfigError(
            "needs an encoder that does not look ahead: set model.causal=true and model.conv_norm=layer; "
            "for s4 use the options bidirectional=false and norm=layer or batch; a class of yours needs "
            "features(), context() and causal = True"
        )
    if form not in FORMS:
        raise ConfigError(f"form={form!r}: use {' or '.join(FORMS)}")
    known = list(inspect.signature(FORMS[form]).parameters)[1:]
    if other := [name for name in options if name not in known]:
        raise ConfigError(f"form={form} has no option {other[0]}: use {', '.join(known)}")
    return FORMS[form](encoder, **options)


class PredictiveCoding(nn.Module):
    """The objective `cpc` with all tokens of a window as candidates."""

    def __init__(self, encoder: Any, steps: int = 12, temperature: float = 0.1) -> None:
        super().__init__()
        if steps < 1 or temperature <= 0:
            raise ConfigError(
                f"steps={steps}, temperature={temperature}: steps must be at least 1, and temperature above 0"
            )
        self.temperature = temperature
        self.maps = nn.ModuleList()
        for _ in range(steps):
            self.maps.append(nn.Linear(encoder.width, encoder.feature_width))

    def forward(self, encoder: Any, x_BSLT: Tensor, keys_BS: Tensor) -> Tensor:
        z_RNF, _ = encoder.features(x_BSLT.flatten(0, 1))
        c_RND = encoder.context(z_RNF, None)
        if (steps := len(self.maps)) >= (tokens := z_RNF.shape[1]):
            raise ConfigError(
                f"steps={steps}: must be less than the {tokens} tokens of a window: lower it, or raise input.window_s"
            )
        losses = []
        for ahead, linear in enumerate(self.maps, 1):
            # Each of the first n tokens predicts the token that is `ahead` tokens later
            predicted_RnF = linear(c_RND[:, :-ahead])
            with torch.autocast(z_RNF.device.type, enabled=False):
                s_RnN = (
                    unit_vectors(predicted_RnF)
                    @ unit_vectors(z_RNF).transpose(1, 2)
                    / self.temperature
                )
            target_n = torch.arange(ahead, tokens, device=z_RNF.device)
            losses.append(F.cross_entropy(s_RnN.flatten(0, 1), target_n.repeat(len(z_RNF))))
        return torch.stack(losses).mean()


class SampledCoding(nn.Module):
    """The objective `cpc` in the form of ECG-CPC, with sampled candidates."""

    def __init__(self, encoder: Any, ahead: int = 14, negatives: int = 128) -> None:
        super().__init__()
        if ahead < 1 or negatives < 1:
            raise ConfigError(f"ahead={ahead}, negatives={negatives}: both must be at least 1")
        self.ahead, self.negatives = ahead, negatives
        self.map = nn.Linear(encoder.width, encoder.feature_width, bias=False)

    def forward(self, encoder: Any, x_BSLT: Tensor, keys_BS: Tensor) -> Tensor:
        z_RNF, _ = encoder.features(x_BSLT.flatten(0, 1))
        c_RND = encoder.context(z_RNF, None)
        if self.ahead >= (tokens := z_RNF.shape[1]):
            raise ConfigError(
                f"ahead={self.ahead}: must be less than the {tokens} tokens of a window: lower it, or raise input.window_s"
            )
        predicted_RnF = self.map(c_RND[:, : -self.ahead])
        drawn_RnK = draw_candidates(keys_BS.flatten(), tokens, self.ahead, self.negatives)
        return sampled_loss(predicted_RnF, z_RNF, drawn_RnK, self.ahead)


FORMS = {"all": PredictiveCoding, "sampled": SampledCoding}


def draw_candidates(keys_R: Tensor, tokens: int, ahead: int, negatives: int) -> Tensor:
    """Draw K tokens of the window, with replacement, for each token that predicts. The token that it
    predicts, `ahead` tokens later, is not drawn. Return their indices [R, n, K]."""
    predicting = tokens - ahead
    count = predicting * negatives
    random_RX = random_integers(keys_R, ModelStream.CANDIDATES, (count + 1) // 2)
    random_RX = torch.cat([random_RX, random_RX >> 32], 1)[:, :count] & 0x7FFFFFFF
    other_RnK: Tensor = (random_RX * (tokens - 1) >> 31).unflatten(1, (predicting, negatives))
    target_n1 = torch.arange(ahead, tokens, device=keys_R.device)[:, None]
    other_RnK += other_RnK >= target_n1
    return other_RnK


class Float32Product(torch.autograd.Function):
    """Return a b^T in float32 from a and b in bfloat16, on a GPU. This is ten times as fast as a product of
    float32 tensors. The gradient is rounded to bfloat16, like all others of a model in bfloat16."""

    @staticmethod
    def forward(ctx: Any, a_RnF: Tensor, b_RNF: Tensor) -> Tensor:
        ctx.sizes = a_RnF.shape[1], b_RNF.shape[1]
        a_RnF, b_RNF = pad_tokens(a_RnF), pad_tokens(b_RNF)
        ctx.save_for_backward(a_RnF, b_RNF)
        s_RnN = torch.bmm(a_RnF, b_RNF.transpose(1, 2), out_dtype=torch.float32)
        return s_RnN[:, : ctx.sizes[0], : ctx.sizes[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (a_RnF, b_RNF), (n, tokens) = ctx.saved_tensors, ctx.sizes
        g_RnN = F.pad(grads[0], (0, -tokens % TOKEN_MULTIPLE, 0, -n % TOKEN_MULTIPLE)).to(
            a_RnF.dtype
        )
        return (g_RnN @ b_RNF)[:, :n], (g_RnN.transpose(1, 2) @ a_RnF)[:, :tokens]


# On an H200, a matrix product takes twice as long if a number of tokens in it is no multiple of 8
TOKEN_MULTIPLE = 8


def pad_tokens(x_RND: Tensor) -> Tensor:
    """Append zeros until the number of tokens is a multiple of TOKEN_MULTIPLE."""
    return F.pad(x_RND, (0, 0, 0, -x_RND.shape[1] % TOKEN_MULTIPLE))


def sampled_loss(predicted_RnF: Tensor, z_RNF: Tensor, drawn_RnK: Tensor, ahead: int) -> Tensor:
    """Return the loss of ECG-CPC for the candidates drawn_RnK. It is computed in float32, because bfloat16
    has too few digits for sums of so many products."""
    with torch.autocast(z_RNF.device.type, enabled=False):
        if z_RNF.is_cuda and predicted_RnF.dtype == z_RNF.dtype == torch.bfloat16:
            s_RnN: Tensor = Float32Product.apply(predicted_RnF, z_RNF)
        else:
            s_RnN = predicted_RnF.float() @ z_RNF.float().transpose(1, 2)
    times_RnN = count_draws(drawn_RnK, z_RNF.shape[1])
    times_RnN.diagonal(ahead, 1, 2).fill_(1.0)
    # This is a logsumexp weighted by the counts. On a CPU, adding log(count) to the scores instead would be
    # slow where a count is 0. A token that is no candidate may score higher than all candidates, so the clamp
    # keeps its exp finite
    drawn_RnN = s_RnN.detach().masked_fill(times_RnN == 0, -torch.inf)
    largest_Rn1 = drawn_RnN.amax(2, keepdim=True)
    share_RnN = times_RnN * (s_RnN - largest_Rn1).clamp(max=0).exp()
    all_Rn = share_RnN.sum(2).log() + largest_Rn1.squeeze(2)
    return (all_Rn - s_RnN.diagonal(ahead, 1, 2)).sum(1).mean()
