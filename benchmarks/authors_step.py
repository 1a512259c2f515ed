"""A re-creation of the authors' training step, for comparison with omnilead's. It runs in eager mode and
computes what fairseq-signals computes.

    source [2B, L, T], adjacent rows the halves of a crop -> Conv1d stack -> layer norm ->
    projection -> x[mask] = mask_emb -> [T, B, C] transformer with F.multi_head_attention_forward ->
    x[mask], one-hot quantiser, negatives gathered to [100, 2B, M, 256] -> sums of four losses ->
    gradients divided by the masked tokens -> AdamW, one tensor after another

This is not the authors' code, but uses their definitions, layouts and operators, without their data path,
logging and checkpoints. The optimiser is torch's, which takes as long as theirs. The weights are those of
omnilead's Pretrainer, so that the same weights and draws can be shown to give the same loss and gradients
(tests/benchmarks/test_step.py).

Source: fairseq-signals modules/ (conv_feature_extraction, conv_positional_encoding,
transformer_encoder, multi_head_attention, gumbel_vector_quantizer), models/wav2vec2/, criterions/
(wav2vec2, cmsc), data/data_utils.py, trainer.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omnilead.engine.model.config import ModelConfig
from omnilead.engine.model.draws import Draws, count_draws, masked_slots
from omnilead.engine.model.encoder import ScaleGradient
from omnilead.engine.model.objectives import perplexity
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.settings.errors import ConfigError


class AuthorsDraws(NamedTuple):
    mask_indices: np.ndarray  # bool [R, N], True for M masked tokens in each row
    neg_idxs: Tensor  # int64 [R, M * K], indices among the R * M masked tokens of the batch
    gumbel_noise: Tensor  # [R * M * G, V], for each codebook of each masked token


def convert_draws(arrays: Mapping[str, np.ndarray], config: ModelConfig) -> Draws:
    """Convert the random draws of fairseq-signals to omnilead.engine.model.draws.Draws."""
    mask_RN = torch.from_numpy(arrays["mask_indices"])
    rows, masked = len(mask_RN), int(mask_RN.sum(1)[0])
    slot_RM, valid_RM = masked_slots(mask_RN, masked)
    begin_R11 = torch.arange(0, rows * masked, masked)[:, None, None]
    other_RMK = torch.from_numpy(arrays["neg_idxs"]).view(rows, masked, -1) - begin_R11
    if other_RMK.min() < 0 or other_RMK.max() >= masked:
        raise ConfigError(
            "neg_idxs: a negative is from another row than its token: draw negatives within a row"
        )
    noise = None
    if "gumbel_noise" in arrays:
        shape = rows, masked, config.codebooks, config.codes
        noise = torch.from_numpy(arrays["gumbel_noise"]).view(shape)
    return Draws(mask_RN, slot_RM, valid_RM, count_draws(other_RMK, masked), noise)


class AuthorsStep(nn.Module):
    """A re-creation of the authors' training step. It returns (the loss of a batch, summed over masked tokens;
    the number of these tokens)."""

    def __init__(self, model: Pretrainer) -> None:
        super().__init__()
        self.encoder, self.local = model.encoder, model.local
        self.config, self.objective = model.config, model.objective

    def forward(
        self, source: Tensor, patient_id: Tensor, tau: float, draws: AuthorsDraws | None = None
    ) -> tuple[Tensor, int]:
        config, weights, rows = self.config, self.objective, len(source)
        features = ScaleGradient.apply(self.convolve(source), config.feature_grad)
        features_pen = features.float().pow(2).mean()
        features = self.encoder.feature_norm(features.transpose(1, 2))
        unmasked = F.dropout(features.clone(), config.feature_dropout, self.training)
        x = F.dropout(self.encoder.project(features), config.input_dropout, self.training)
        if draws is None:
            draws = make_draws(config, weights.negatives, rows, x.shape[1], x.device)
        mask = torch.from_numpy(draws.mask_indices).to(x.device)
        x[mask] = self.encoder.mask_embedding.to(x.dtype)
        y = unmasked[mask].view(rows, -1, config.feature_width)
        x = self.transform(x)
        y, prob_perplexity = self.quantize_with_perplexity(y, tau, draws.gumbel_noise)
        y = self.local.target(y)
        negatives = gather_negatives(y, draws.neg_idxs)
        contexts = self.local.context(x[mask].view(rows, -1, config.width))
        logits = compute_preds(contexts, y, negatives, weights.temperature)
        loss = local_loss(logits) * weights.local
        masked, codes = int(mask.sum().item()), config.codebooks * config.codes
        loss = loss + weights.diversity * (codes - prob_perplexity) / codes * masked
        loss = loss + weights.features * features_pen * masked
        contrast = cmsc_loss(x, patient_id, weights.temperature)
        return loss + weights.contrast * contrast * masked, masked

    def convolve(self, x: Tensor) -> Tensor:
        """Return the output of the convolutions."""
        for block in self.encoder.conv.blocks:
            weight = block.weight.unflatten(1, (block.kernel, -1)).transpose(1, 2)
            x = F.conv1d(x, weight, stride=block.kernel)
            if (norm := block.norm) is not None:  # the authors compute norms in float32
                scale, shift = norm.weight.float(), norm.bias.float()
                x = F.group_norm(x.float(), x.shape[1], scale, shift, norm.eps).type_as(x)
            x = F.gelu(x)
        return x

    def transform(self, x: Tensor) -> Tensor:
        """Return the output of the positional convolution and the transformer layers."""
        position, tokens = self.encoder.position, x.shape[1]
        padding, groups = self.config.position_kernel // 2, position.groups
        y = x.transpose(1, 2)
        y = F.conv1d(y, position.weight(), position.bias, padding=padding, groups=groups)
        # with an even kernel, y has one token more than x; this last one is dropped
        x = x + F.gelu(y[:, :, :tokens]).transpose(1, 2)
        x = self.dropout(self.encoder.norm(x))
        x = x.transpose(0, 1)  # batch x time x channels becomes time x batch x channels
        for layer in self.encoder.layers:
            x = layer.norm1(x + self.dropout(self.attend(layer.attention, x)))
            hidden = F.dropout(F.gelu(layer.fc1(x)), self.config.activation_dropout, self.training)
            x = layer.norm2(x + self.dropout(layer.fc2(hidden)))
        return x.transpose(0, 1)

    def dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training)

    def attend(self, attention: Any, x: Tensor) -> Tensor:
        config, qkv, out = self.config, attention.qkv, attention.out
        query, key, value = qkv.weight.chunk(3)
        weights = {"q_proj_weight": query, "k_proj_weight": key, "v_proj_weight": value}
        options = {
            "training": self.training,
            "need_weights": False,
            "use_separate_proj_weight": True,
        }
        shape = (config.width, config.heads, None, qkv.bias, None, None, False)
        last = (config.attention_dropout, out.weight, out.bias)
        return F.multi_head_attention_forward(x, x, x, *shape, *last, **options, **weights)[0]

    def quantize_with_perplexity(
        self, x: Tensor, tau: float, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (the quantised features, the perplexity of the code probabilities). As in
        fairseq-signals, one-hot vectors are multiplied by the codebook, which makes [R * M, G * V,
        code_width / G] numbers, and these are summed over V."""
        rows, masked, width = x.shape
        tokens, groups, codes = rows * masked, self.config.codebooks, self.config.codes
        x = self.local.quantizer.logits(x.reshape(-1, width)).view(tokens * groups, codes)
        hard = torch.zeros_like(x).scatter_(-1, x.max(-1)[1].view(-1, 1), 1.0)
        # the authors log the perplexity of the chosen codes, so computing it belongs to their step
        perplexity(hard.view(tokens, groups, codes).float().mean(0))
        soft = torch.softmax(x.view(tokens, groups, codes).float(), -1)
        x = gumbel_softmax(x.float(), tau, noise).type_as(x).view(tokens, -1)
        products = x.unsqueeze(-1) * self.local.quantizer.codebook.flatten(0, 1)
        quantized = products.view(tokens, groups, codes, -1).sum(-2)
        return quantized.view(rows, masked, -1), perplexity(soft.mean(0))


def gumbel_softmax(logits: Tensor, tau: float, noise: Tensor) -> Tensor:
    """Return what F.gumbel_softmax(hard=True) returns for this Gumbel noise."""
    soft = ((logits + noise) / tau).softmax(-1)
    hard = torch.zeros_like(logits).scatter_(-1, soft.max(-1, keepdim=True)[1], 1.0)
    return hard - soft.detach() + soft


def gather_negatives(y: Tensor, neg_idxs: Tensor) -> Tensor:
    """Return a copy of the negatives of each masked token: [K, R, M, P] from y [R, M, P]."""
    rows, masked, width = y.shape
    gathered = y.reshape(-1, width)[neg_idxs.view(-1).to(y.device)]
    return gathered.view(rows, masked, -1, width).permute(2, 0, 1, 3)


def compute_preds(x: Tensor, y: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """Return [1 + K, R, M]: the cosines of x with the positive and each negative, divided by the
    temperature; -inf for a negative that equals the positive."""
    same = (y == negatives).all(-1)
    targets = torch.cat([y.unsqueeze(0), negatives], dim=0)
    logits = torch.cosine_similarity(x.float(), targets.float(), dim=-1).type_as(x)
    logits /= temperature
    if same.any():
        logits[1:][same] = float("-inf")
    return logits


def local_loss(logits: Tensor) -> Tensor:
    logits = logits.transpose(0, 2).reshape(-1, logits.shape[0])
    target = logits.new_zeros(len(logits), dtype=torch.long)
    # the authors log the accuracy, whose .item() waits for the device, so computing it belongs to their step
    with torch.no_grad():
        best, worst = logits.argmax(-1) == 0, logits.argmin(-1) == 0
        _ = best.long().sum().item() - (best & worst).long().sum().item()
    return F.cross_entropy(logits.float(), target, reduction="sum")


def cmsc_loss(x: Tensor, patient_id: Tensor, temperature: float) -> Tensor:
    """Return CMSC's loss: the cross-entropy of first halves against second halves and the reverse, where
    pairs of the same patient are positive."""
    x = x.float()
    pooled = x.sum(1) / (x != 0).sum(1)
    pooled = pooled / pooled.detach().norm(dim=1, keepdim=True)
    first, second = pooled[::2], pooled[1::2]
    logits = torch.matmul(first, second.t()) / temperature
    positive = torch.stack([patient == patient_id for patient in patient_id])
    loss = -F.log_softmax(logits, 1)[positive].mean() - F.log_softmax(logits, 0)[positive].mean()
    return loss / 2


def make_draws(
    config: ModelConfig, negatives: int, rows: int, tokens: int, device: torch.device
) -> AuthorsDraws:
    """Return the draws of a step, made as fairseq-signals makes them: masks in numpy and negatives in torch on
    the host, noise on the device of the model."""
    mask = compute_mask_indices(config, rows, tokens)
    masked = int(mask[0].sum())
    position = torch.arange(masked).unsqueeze(-1).expand(-1, negatives).flatten()
    neg_idxs = torch.randint(0, masked - 1, (rows, negatives * masked))
    neg_idxs[neg_idxs >= position] += 1
    neg_idxs += masked * torch.arange(rows).unsqueeze(1)
    shape = rows * masked * config.codebooks, config.codes
    noise = -torch.empty(shape, device=device).exponential_().log()
    return AuthorsDraws(mask, neg_idxs, noise)


def compute_mask_indices(config: ModelConfig, rows: int, tokens: int) -> np.ndarray:
    """Return the masks, bool [R, N]. Span starts are drawn without replacement, equally many in each row,
    and tokens are then unmasked at random until all rows have as many as the row with the fewest."""
    spans = max(2, int(config.mask_share * tokens / config.mask_span + np.random.rand()))
    chosen = []
    for _ in range(rows):
        starts = np.random.choice(tokens - config.mask_span, spans, replace=False)
        chosen.append(np.unique(starts[:, None] + np.arange(config.mask_span)))
    fewest, mask = min(len(steps) for steps in chosen), np.full((rows, tokens), False)
    for row, steps in enumerate(chosen):
        if len(steps) > fewest:
            steps = np.random.choice(steps, fewest, replace=False)
        mask[row, steps] = True
    return mask
