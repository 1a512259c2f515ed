"""The model's settings, checked on construction, and its cost in floating-point operations.

Defaults are those of the authors (fairseq-signals w2v_cmsc_rlm.yaml and the dataclasses beneath it), which the paper's
section "Pre-training" describes: 90,883,072 parameters, 156 tokens for 5 s, 175.9 GFLOP for a 10 s crop, forward and
backward.

Letters in shapes, in all of engine/model and engine/objectives:
    B crops  S halves or views of a crop  R = B * S rows  L leads  T samples  N tokens  D encoder's width  F features' width
    H heads  M slots for masked tokens    K negatives     G codebooks (groups)  V codes of each  P width of the projections
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from engine.common import ConfigError

MAX_WIDTH, MAX_LAYERS = 65_536, 1_000  # a stranger's config must not ask for all memory


@dataclass(frozen=True)
class ModelConfig:
    leads: int = 12
    conv: tuple[tuple[int, int], ...] = ((256, 2),) * 4  # (width, kernel = stride) of each block
    conv_norm: Literal["group", "layer"] = "group"  # group: one group norm, in block 0 (authors); layer: in each block (paper)
    feature_grad: float = 0.1  # factor on the gradient that reaches the convolutions; 0 freezes them
    width: int = 768
    layers: int = 12
    heads: int = 12
    ffn: int = 3072
    position_kernel: int = 128
    position_groups: int = 16
    position: Literal["auto", "conv", "blocks", "dft"] = "auto"  # how it is computed: engine.model.position
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.0
    input_dropout: float = 0.1  # on the projected features
    feature_dropout: float = 0.1  # on the features that are quantised
    # auto: sdpa, torch's choice of a fused kernel; on a CPU with dropout manual, which is faster. Others: that kernel on a GPU;
    # short: our own for up to 256 tokens in 16 bits (engine.model.kernels.short), else sdpa
    attention: Literal["auto", "sdpa", "flash", "efficient", "cudnn", "short", "manual"] = "auto"
    codebooks: int = 2
    codes: int = 320
    code_width: int = 256  # of all codebooks together
    projection: int = 256  # where contexts and targets meet
    tau_start: float = 2.0  # Gumbel temperature: start * decay ** updates, not below end
    tau_end: float = 0.5
    tau_decay: float = 0.999995
    mask_share: float = 0.65  # spans * span / tokens before they overlap; about half of the tokens after
    mask_span: int = 10
    mask_trim: bool = False  # cut every row to the smallest count of the batch (authors)

    def __post_init__(self) -> None:
        for key in ("leads", "width", "heads", "ffn", "position_kernel", "position_groups", "mask_span"):
            _count(f"model.{key}", getattr(self, key), MAX_WIDTH)
        _count("model.layers", self.layers, MAX_LAYERS)
        for key in ("codebooks", "codes", "code_width", "projection"):
            _count(f"model.{key}", getattr(self, key), MAX_WIDTH)
        for key in ("dropout", "attention_dropout", "activation_dropout", "input_dropout", "feature_dropout"):
            _share(f"model.{key}", getattr(self, key), 0.99)
        _share("model.feature_grad", self.feature_grad, 1)
        _share("model.mask_share", self.mask_share, 1)
        if not self.conv or len(self.conv) > 16:
            raise ConfigError(f"model.conv={self.conv!r}: needs 1 to 16 blocks (width, kernel)")
        for width, kernel in self.conv:
            _count("model.conv width", width, MAX_WIDTH)
            _count("model.conv kernel", kernel, 1024)
        for key, allowed in (
            ("conv_norm", ("group", "layer")),
            ("position", ("auto", "conv", "blocks", "dft")),
            ("attention", ("auto", "sdpa", "flash", "efficient", "cudnn", "short", "manual")),
        ):
            if getattr(self, key) not in allowed:
                raise ConfigError(f"model.{key}={getattr(self, key)!r}: use {' or '.join(allowed)}")
        _divides("model.width", self.width, "model.heads", self.heads)
        if self.attention == "short" and self.width // self.heads not in (16, 32, 64):
            seen = f"model.attention=short, model.width={self.width}, model.heads={self.heads}"
            raise ConfigError(f"{seen}: heads must be 16, 32 or 64 wide: use attention auto")
        _divides("model.width", self.width, "model.position_groups", self.position_groups)
        _divides("model.code_width", self.code_width, "model.codebooks", self.codebooks)
        if not 1e-3 <= self.tau_end <= self.tau_start <= 1e3 or not 0 < self.tau_decay <= 1:
            seen = f"{self.tau_start}, {self.tau_end}, {self.tau_decay}"
            raise ConfigError(
                f"model.tau_start, tau_end, tau_decay={seen}: 0.001 <= end <= start <= 1000 and 0 < decay <= 1 must hold"
            )

    @property
    def feature_width(self) -> int:
        return self.conv[-1][0]

    @property
    def patch(self) -> int:
        """Samples to a token."""
        return prod(kernel for _, kernel in self.conv)

    def tokens(self, samples: int) -> int:
        if samples < self.patch:
            raise ConfigError(f"model.conv: a token takes {self.patch} samples, of {samples}: use fewer or shorter blocks")
        return samples // self.patch


def _count(key: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{key}={value!r}: must be a whole number from 1 to {most}")


def _share(key: str, value: object, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ConfigError(f"{key}={value!r}: must be a number from 0 to {most}")


def _divides(key: str, value: int, by: str, divisor: int) -> None:
    if value % divisor:
        raise ConfigError(f"{key}={value}: must be a multiple of {by}={divisor}")


def flops_per_segment(config: ModelConfig, samples: int = 2500, negatives: int = 100, local: bool = True) -> float:
    """Multiply-adds counted as two, of one segment, forward and backward = three times forward; matrix products only.

    The quantiser and the projections see the masked half of the tokens. It is the work that the objective needs, whatever the
    implementation: the authors' gather of negatives is counted as the cosines it yields, the product with the codebook once.
    """
    length, width, flops = samples, config.leads, 0.0
    for out, kernel in config.conv:
        length //= kernel
        flops += 2 * length * width * kernel * out
        width = out
    tokens, d = config.tokens(samples), config.width
    if width != d:
        flops += 2 * tokens * width * d
    flops += 2 * tokens * (d // config.position_groups) * config.position_kernel * d
    flops += config.layers * (2 * tokens * (4 * d * d + 2 * d * config.ffn) + 4 * tokens * tokens * d)
    if local:
        masked = tokens * masked_share(config, tokens)
        heads = d * config.projection + width * config.codebooks * config.codes + config.code_width * config.projection
        codebook = config.codebooks * config.codes * (config.code_width // config.codebooks)
        flops += 2 * masked * (heads + codebook + (1 + negatives) * config.projection)
    return 3 * flops


def flops_per_crop(config: ModelConfig, samples: int = 2500, segments: int = 2, local: bool = True) -> float:
    return segments * flops_per_segment(config, samples, local=local)


def kept_per_crop(config: ModelConfig, samples: int = 2500, segments: int = 2) -> int:
    """Numbers that a training step holds of a crop for its gradients, at most: for each token, in each layer, 20 times the
    encoder's width (of which the feed-forward has 10), and as much as in two layers for what stands before them."""
    return 20 * segments * config.tokens(samples) * config.width * (config.layers + 2)


def masked_share(config: ModelConfig, tokens: int) -> float:
    """Expected share of masked tokens: each is spared if none of its possible starts is among those drawn."""
    starts = tokens - config.mask_span
    if starts < 1:
        return config.mask_share
    spared, spans = 0.0, min(config.mask_share * tokens / config.mask_span, float(starts))
    for n in range(tokens):
        own = min(n, starts - 1) - max(0, n - config.mask_span + 1) + 1  # starts whose span covers token n
        spared += prod(max(0.0, 1 - spans / (starts - j)) for j in range(own))
    return 1 - spared / tokens
