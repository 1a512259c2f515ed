"""A re-creation of the authors' training step for comparison with ours: eager, as fairseq-signals
computes it.

    source [2B, L, T], adjacent rows the halves of a crop -> Conv1d stack -> layer norm ->
    projection -> x[mask] = mask_emb -> [T, B, C] transformer with F.multi_head_attention_forward ->
    x[mask], one-hot quantiser, negatives gathered to [100, 2B, M, 256] -> sums of four losses ->
    gradients divided by the masked tokens -> Adam, one tensor after another

This is not their code, but uses their definitions, layouts and operators, without their data path,
logging and checkpoints. Weights have the authors' names, so that engine.interop.fairseq.to_theirs
converts ours; tests/benchmarks/test_step.py shows that the same weights and draws give the same
loss and gradients as engine.model.pretrainer.

Source: fairseq-signals modules/ (conv_feature_extraction, conv_positional_encoding,
transformer_encoder, multi_head_attention, gumbel_vector_quantizer), models/wav2vec2/, criterions/
(wav2vec2, cmsc), data/data_utils.py, optim/adam.py, trainer.py.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omnilead.engine.model.config import ModelConfig, ObjectiveConfig
from omnilead.engine.model.encoder import ScaleGradient


class AuthorsDraws(NamedTuple):
    mask_indices: np.ndarray  # bool [R, N], M in each row
    neg_idxs: Tensor  # int64 [R, M * K], among the masked tokens of all segments
    gumbel_noise: Tensor  # [R * M * G, V]


class AuthorsStep(nn.Module):
    """Computes the loss of a batch, summed over masked tokens, and the number of masked tokens."""

    def __init__(self, config: ModelConfig, objective: ObjectiveConfig) -> None:
        super().__init__()
        self.config, self.objective = config, objective
        self.feature_extractor = AuthorsConvolutions(config)
        self.layer_norm = nn.LayerNorm(config.feature_width)
        same = config.feature_width == config.width
        self.post_extract_proj: nn.Module = (
            nn.Identity() if same else nn.Linear(config.feature_width, config.width)
        )
        self.mask_emb = nn.Parameter(torch.empty(config.width).uniform_())
        self.conv_pos = AuthorsPositions(config)
        self.encoder = AuthorsTransformer(config)
        self.quantizer = AuthorsQuantizer(config)
        self.project_q = nn.Linear(config.code_width, config.projection)
        self.final_proj = nn.Linear(config.width, config.projection)

    def forward(
        self, source: Tensor, patient_id: Tensor, tau: float, draws: AuthorsDraws | None = None
    ) -> tuple[Tensor, int]:
        config, rows = self.config, len(source)
        features: Tensor = ScaleGradient.apply(self.feature_extractor(source), config.feature_grad)  # type: ignore[no-untyped-call]
        features_pen = features.float().pow(2).mean()
        features = self.layer_norm(features.transpose(1, 2))
        unmasked = F.dropout(features.clone(), config.feature_dropout, self.training)
        x = F.dropout(self.post_extract_proj(features), config.input_dropout, self.training)
        if draws is None:
            draws = draw(config, self.objective.negatives, rows, x.shape[1], x.device)
        mask = torch.from_numpy(draws.mask_indices).to(x.device)
        x[mask] = self.mask_emb.to(x.dtype)
        y = unmasked[mask].view(rows, -1, config.feature_width)
        x = self.encoder(x + self.conv_pos(x))
        y, prob_perplexity = self.quantizer(y, tau, draws.gumbel_noise)
        y = self.project_q(y)
        negatives = gather_negatives(y, draws.neg_idxs)
        contexts = self.final_proj(x[mask].view(rows, -1, config.width))
        logits = compute_preds(contexts, y, negatives, self.objective.temperature)
        return self.total(logits, prob_perplexity, features_pen, x, patient_id), int(
            mask.sum().item()
        )

    def total(
        self,
        logits: Tensor,
        prob_perplexity: Tensor,
        features_pen: Tensor,
        x: Tensor,
        patient_id: Tensor,
    ) -> Tensor:
        weights = self.objective
        logits = logits.transpose(0, 2).reshape(-1, logits.shape[0])
        target = logits.new_zeros(len(logits), dtype=torch.long)
        sample_size = len(target)
        loss = F.cross_entropy(logits.float(), target, reduction="sum") * weights.local
        with torch.no_grad():  # the accuracy that the authors log; it waits for the device
            best, worst = logits.argmax(-1) == 0, logits.argmin(-1) == 0
            _ = best.long().sum().item() - (best & worst).long().sum().item()
        codes = self.config.codebooks * self.config.codes
        loss = loss + weights.diversity * (codes - prob_perplexity) / codes * sample_size
        loss = loss + weights.features * features_pen * sample_size
        return loss + weights.contrast * cmsc(x, patient_id, weights.temperature) * sample_size


class AuthorsConvolutions(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.conv_layers, inputs = nn.ModuleList(), config.leads
        for i, (width, kernel) in enumerate(config.conv):
            norm = [Fp32GroupNorm(width, width)] if i == 0 else []
            conv = nn.Conv1d(inputs, width, kernel, stride=kernel, bias=False)
            self.conv_layers.append(nn.Sequential(conv, nn.Dropout(0.0), *norm, nn.GELU()))
            inputs = width

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.conv_layers:
            x = layer(x)
        return x


class AuthorsPositions(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, kernel = config.width, config.position_kernel
        conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=config.position_groups)
        self.pos_conv = nn.Sequential(nn.utils.parametrizations.weight_norm(conv, dim=2))
        self.surplus = 1 - kernel % 2

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.pos_conv(x.transpose(1, 2))
        return F.gelu(y[:, :, : -self.surplus] if self.surplus else y).transpose(1, 2)


class AuthorsTransformer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.layer_norm = nn.LayerNorm(config.width)
        self.layers = nn.ModuleList(AuthorsLayer(config) for _ in range(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.layer_norm(x), self.dropout, self.training)
        x = x.transpose(0, 1)  # B x T x C -> T x B x C
        for layer in self.layers:
            x = layer(x)
        return x.transpose(0, 1)


class Fp32GroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(
            x.float(), self.num_groups, self.weight.float(), self.bias.float(), self.eps
        ).type_as(x)


class AuthorsAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width, self.heads, self.dropout = config.width, config.heads, config.attention_dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(config.width, config.width) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        projections = self.q_proj, self.k_proj, self.v_proj
        bias = torch.cat([projection.bias for projection in projections])
        weights = dict(
            zip(
                ("q_proj_weight", "k_proj_weight", "v_proj_weight"),
                (p.weight for p in projections),
                strict=True,
            )
        )
        how = {"training": self.training, "need_weights": False, "use_separate_proj_weight": True}
        heads = (self.width, self.heads, None, bias, None, None, False, self.dropout)
        out, _ = F.multi_head_attention_forward(
            x, x, x, *heads, self.out_proj.weight, self.out_proj.bias, **how, **weights
        )
        return out


class AuthorsLayer(nn.Module):
    """A post-norm transformer layer for [T, B, C]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = AuthorsAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, config.ffn)
        self.fc2 = nn.Linear(config.ffn, config.width)
        self.final_layer_norm = nn.LayerNorm(config.width)
        self.dropout1 = nn.Dropout(config.dropout)
        self.dropout2 = nn.Dropout(config.activation_dropout)
        self.dropout3 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.dropout1(self.self_attn(x)))
        hidden = self.dropout2(F.gelu(self.fc1(x)))
        y: Tensor = self.final_layer_norm(x + self.dropout3(self.fc2(hidden)))
        return y


class AuthorsQuantizer(nn.Module):
    """Multiplies one-hot vectors by the codebook, [R * M, G * V, width / G] numbers, and sums over
    V."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.groups, self.codes = config.codebooks, config.codes
        self.vars = nn.Parameter(
            torch.empty(1, self.groups * self.codes, config.code_width // self.groups).uniform_()
        )
        self.weight_proj = nn.Linear(config.feature_width, self.groups * self.codes)

    def forward(self, x: Tensor, tau: float, noise: Tensor) -> tuple[Tensor, Tensor]:
        rows, masked, width = x.shape
        x = self.weight_proj(x.reshape(-1, width)).view(rows * masked * self.groups, -1)
        hard = (
            x.new_zeros(*x.shape)
            .scatter_(-1, x.max(-1)[1].view(-1, 1), 1.0)
            .view(rows * masked, self.groups, -1)
        )
        perplexity(hard.float().mean(0))  # of the codes; the authors log it
        prob_perplexity = perplexity(
            torch.softmax(x.view(rows * masked, self.groups, -1).float(), -1).mean(0)
        )
        x = gumbel_softmax(x.float(), tau, noise).type_as(x).view(rows * masked, -1)
        products = (x.unsqueeze(-1) * self.vars).view(rows * masked, self.groups, self.codes, -1)
        return products.sum(-2).view(rows, masked, -1), prob_perplexity


def perplexity(share: Tensor) -> Tensor:
    return torch.exp(-torch.sum(share * torch.log(share + 1e-7), dim=-1)).sum()


def gumbel_softmax(logits: Tensor, tau: float, noise: Tensor) -> Tensor:
    """F.gumbel_softmax(hard=True) with given noise."""
    soft = ((logits + noise) / tau).softmax(-1)
    hard = torch.zeros_like(logits).scatter_(-1, soft.max(-1, keepdim=True)[1], 1.0)
    return hard - soft.detach() + soft


def gather_negatives(y: Tensor, neg_idxs: Tensor) -> Tensor:
    """y [R, M, P] -> [K, R, M, P]."""
    rows, masked, width = y.shape
    gathered = y.reshape(-1, width)[neg_idxs.view(-1).to(y.device)]
    return gathered.view(rows, masked, -1, width).permute(2, 0, 1, 3)


def compute_preds(x: Tensor, y: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """[1 + K, R, M]: cosines with the positive and each gathered negative; -inf if a negative
    equals the positive."""
    same = (y == negatives).all(-1)
    targets = torch.cat([y.unsqueeze(0), negatives], dim=0)
    logits = torch.cosine_similarity(x.float(), targets.float(), dim=-1).type_as(x)
    logits /= temperature
    if same.any():
        logits[1:][same] = float("-inf")
    return logits


def cmsc(x: Tensor, patient_id: Tensor, temperature: float) -> Tensor:
    """CMSC: first halves against second halves in both directions; positives are pairs of the same
    patient."""
    x = x.float()
    pooled = x.sum(1) / (x != 0).sum(1)
    pooled = pooled / pooled.detach().norm(dim=1, keepdim=True)
    first, second = pooled[::2], pooled[1::2]
    logits = torch.matmul(first, second.t()) / temperature
    positive = torch.stack([patient == patient_id for patient in patient_id])
    loss = -F.log_softmax(logits, 1)[positive].mean() - F.log_softmax(logits, 0)[positive].mean()
    return loss / 2


def draw(
    config: ModelConfig, negatives: int, rows: int, tokens: int, device: torch.device
) -> AuthorsDraws:
    """Draw masks in numpy and negatives in torch on the host, noise on the model's device."""
    mask = compute_mask_indices(config, rows, tokens)
    masked = int(mask[0].sum())
    own = torch.arange(masked).unsqueeze(-1).expand(-1, negatives).flatten()
    neg_idxs = torch.randint(0, masked - 1, (rows, negatives * masked))
    neg_idxs[neg_idxs >= own] += 1
    for row in range(1, rows):
        neg_idxs[row] += row * masked
    noise = (
        -torch.empty(rows * masked * config.codebooks, config.codes, device=device)
        .exponential_()
        .log()
    )
    return AuthorsDraws(mask, neg_idxs, noise)


def compute_mask_indices(config: ModelConfig, rows: int, tokens: int) -> np.ndarray:
    """Draw span starts without replacement, their number rounded once per batch; then trim each row
    to the smallest count."""
    spans = max(2, int(config.mask_share * tokens / config.mask_span + np.random.rand()))
    chosen = []
    for _ in range(rows):
        starts = np.random.choice(tokens - config.mask_span, spans, replace=False)
        steps = np.asarray(
            [start + offset for start in starts for offset in range(config.mask_span)]
        )
        chosen.append(np.unique(steps[steps < tokens]))
    fewest, mask = min(len(steps) for steps in chosen), np.full((rows, tokens), False)
    for row, steps in enumerate(chosen):
        mask[
            row, np.random.choice(steps, fewest, replace=False) if len(steps) > fewest else steps
        ] = True
    return mask
