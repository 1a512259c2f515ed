"""Settings of the model and of the pre-training objectives, and the model's cost in floating-point operations.

The defaults are the authors' (fairseq-signals w2v_cmsc_rlm.yaml and the dataclasses beneath it), described in the paper's
section "Pre-training": 90,883,072 parameters, 156 tokens for 5 s, 175.9 GFLOP for a 10 s crop, forward and backward.

    loss = local * L_local + diversity * L_diversity + features * L_features + contrast * L_global

| method of the paper | ObjectiveConfig |
|---|---|
| W2V + CMSC (+ RLM) | the defaults |
| W2V | contrast: 0 |
| CMSC | local: 0 |
| SimCLR | local: 0, method: simclr |
| 3KG | local: 0, method: 3kg |
| as the authors compute it | form: authors, detach_norm: true, gathered: false |

Random lead masking and views belong to the data loader. The diversity loss and the feature penalty are part of the local
objective: without it they are off too.

Letters in the names of tensors, in all of engine/model and engine/objectives:
    B crops  S halves or views of a crop  R = B * S rows  L leads  T samples  N tokens  D encoder width  F feature width
    H heads  M slots for masked tokens    K negatives     G codebooks (groups)  V codes of each  P projection width
"""

import json
from collections.abc import Mapping
from dataclasses import field
from math import prod
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from engine.common import OWN, ConfigError

STRICT = ConfigDict(strict=True, extra="forbid")
OBSOLETE = ("attention", "position")  # settings of earlier versions, replaced by `kernels`
ENCODERS = {"": "engine.model.encoder:Encoder", "resnet": "engine.model.resnet:ResNet"}
SHOWN = 80  # characters of a wrong value in a message
Count = Annotated[int, Field(ge=1, le=65_536)]  # bounded, since a config may come from anywhere
Probability = Annotated[float, Field(ge=0, le=0.99, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Kind = TypeVar("Kind")


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """Settings of the authors' encoder, of the local objective, and which encoder it is. Another one than the authors' takes
    `options`, and no notice of the settings from `conv` to `input_dropout`, but `kernels`."""

    encoder: str = ""  # "": the authors'; resnet; or your own, file.py:Class (engine.model.encoders)
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # arguments of its class
    leads: Count = 12  # channels
    conv: Annotated[tuple[tuple[Count, Annotated[int, Field(ge=1, le=1024)]], ...], Field(min_length=1, max_length=16)] = (
        ((256, 2),) * 4  # (width, kernel = stride) of each block
    )
    conv_norm: Literal["group", "layer"] = "group"  # group: one group norm, in block 0 (authors); layer: in each block (paper)
    feature_grad: Share = 0.1  # factor on the gradient that reaches the convolutions; 0 freezes them
    width: Count = 768  # of the tokens
    layers: Annotated[int, Field(ge=1, le=1000)] = 12  # of the transformer
    heads: Count = 12  # of attention
    ffn: Count = 3072  # width of the feed-forward layers
    position_kernel: Count = 128  # tokens that the positional convolution covers
    position_groups: Count = 16  # of the positional convolution
    kernels: Literal["plain", "auto", "all"] = "auto"  # faster replacements of plain operations: engine.model.kernels
    dropout: Probability = 0.1  # of what each layer adds, and of the tokens before the first layer
    attention_dropout: Probability = 0.1  # of attention weights
    activation_dropout: Probability = 0.0  # within the feed-forward layers
    input_dropout: Probability = 0.1  # on the projected features
    feature_dropout: Probability = 0.1  # on the features that are quantised
    codebooks: Count = 2  # of the quantiser
    codes: Count = 320  # of each codebook
    code_width: Count = 256  # of all codebooks together
    projection: Count = 256  # width at which contexts and targets are compared
    tau_start: Annotated[float, Field(ge=1e-3, le=1e3)] = 2.0  # Gumbel temperature: start * decay ** updates, at least end
    tau_end: Annotated[float, Field(ge=1e-3, le=1e3)] = 0.5  # the lowest
    tau_decay: Annotated[float, Field(gt=0, le=1)] = 0.999995  # for each update
    mask_share: Share = 0.65  # spans * span / tokens before they overlap; about half of the tokens after
    mask_span: Count = 10  # tokens
    mask_starts: Literal["count", "bernoulli"] = "count"  # count: a set number (authors); bernoulli: by chance (paper)
    mask_trim: bool = False  # cut every row to the smallest count of the batch (authors)

    def __post_init__(self) -> None:
        if self.encoder not in ENCODERS and not OWN.fullmatch(self.encoder):
            shipped = ", ".join(filter(None, ENCODERS))
            raise ConfigError(f"model.encoder={self.encoder!r}: use {shipped}, your own file.py:Class, or '' for the authors'")
        if self.options and not self.encoder:
            raise ConfigError(f"model.options={self.options}: are for another encoder than the authors': set model.encoder")
        for key, divisor in (("width", "heads"), ("width", "position_groups"), ("code_width", "codebooks")):
            value, by = getattr(self, key), getattr(self, divisor)
            if value % by:
                raise ConfigError(f"model.{key}={value}: must be a multiple of model.{divisor}={by}")
        if self.tau_start < self.tau_end:
            raise ConfigError(f"model.tau_start={self.tau_start}: must be at least model.tau_end={self.tau_end}")

    @property
    def feature_width(self) -> int:
        return self.conv[-1][0]

    @property
    def patch(self) -> int:
        """Samples of a token."""
        return prod(kernel for _, kernel in self.conv)

    def tokens(self, samples: int) -> int:
        if samples < self.patch:
            raise ConfigError(f"model.conv: a token takes {self.patch} of {samples} samples: use fewer or shorter blocks")
        return samples // self.patch


@dataclass(frozen=True, config=STRICT)
class ObjectiveConfig:
    local: Weight = 1.0  # weight of the masked, local objective
    diversity: Weight = 0.1  # weight of the use of codes, within the local objective
    features: Weight = 10.0  # weight of the size of features, within the local objective
    contrast: Weight = 1.0  # weight of the global objective
    method: Literal["cmsc", "simclr", "3kg"] = "cmsc"  # the global objective
    form: Literal["paper", "authors"] = "paper"  # of CMSC
    temperature: Annotated[float, Field(ge=1e-4, le=1e4)] = 0.1  # of the local and the global objective
    negatives: Annotated[int, Field(ge=1, le=10_000)] = 100  # of each masked token
    gathered: bool = True  # candidates and code usage from all ranks, with gradient
    detach_norm: bool = False  # no gradient through the norm of global representations (CMSC's form `authors` never has one)

    def __post_init__(self) -> None:
        if self.local == 0 and self.contrast == 0:
            raise ConfigError("objective.local=0 and objective.contrast=0: nothing is left to learn: give one of them a weight")

    @property
    def across_ranks(self) -> bool:
        """Whether crops of other ranks are among the candidates."""
        return self.gathered and (self.method, self.form) != ("cmsc", "authors")

    @property
    def needs_ids(self) -> bool:
        """Whether the loss needs to know which patient each crop belongs to."""
        return self.contrast > 0 and (self.method == "3kg" or (self.method == "cmsc" and self.form == "authors"))


def validated(kind: type[Kind], settings: Mapping[str, Any], section: str) -> Kind:
    """A dataclass of settings from a JSON object; ConfigError names the first wrong key as `section.key`."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(settings))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key, value = ".".join(map(str, (section, *first["loc"][:1]))), repr(first["input"])
        value = value if len(value) <= SHOWN else f"{value[:SHOWN]}..."
        raise ConfigError(f"{key}={value}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def current_settings(model: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a model that an earlier version saved, without those that no longer exist."""
    return {name: value for name, value in model.items() if name not in OBSOLETE}


def flops_per_segment(config: ModelConfig, samples: int = 2500, negatives: int = 100, local: bool = True) -> float:
    """Multiply-adds counted as two, of one segment, forward and backward = three times forward; matrix products only.

    The quantiser and the projections see the masked half of the tokens. This is the work that the objective needs, whatever
    the implementation: the authors' gather of negatives counts as the cosines it yields, the product with the codebook once.
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
    return 3 * flops + (local_flops(config, tokens, d, width, negatives) if local else 0.0)


def local_flops(config: ModelConfig, tokens: int, width: int, feature_width: int, negatives: int = 100) -> float:
    """Of the local objective, of one segment, for an encoder of these widths."""
    heads = width * config.projection + feature_width * config.codebooks * config.codes + config.code_width * config.projection
    codebook = config.codebooks * config.codes * (config.code_width // config.codebooks)
    return 6 * tokens * masked_share(config, tokens) * (heads + codebook + (1 + negatives) * config.projection)


def flops_per_crop(config: ModelConfig, samples: int = 2500, segments: int = 2, local: bool = True) -> float:
    return segments * flops_per_segment(config, samples, local=local)


def kept_per_crop(config: ModelConfig, samples: int = 2500, segments: int = 2) -> int:
    """Upper bound on the activations of a crop that a training step keeps for the backward pass: for each token 20 times the
    encoder width per layer (10 of them in the feed-forward), and as much as two layers for what comes before."""
    return 20 * segments * config.tokens(samples) * config.width * (config.layers + 2)


def masked_share(config: ModelConfig, tokens: int) -> float:
    """Expected share of masked tokens. A token stays unmasked if no span starts where it would cover the token."""
    starts, rate = tokens - config.mask_span, config.mask_share / config.mask_span
    if config.mask_starts == "bernoulli":
        return 1 - sum((1 - rate) ** min(n + 1, config.mask_span) for n in range(tokens)) / tokens
    if starts < 1:
        return config.mask_share
    unmasked, spans = 0.0, min(rate * tokens, float(starts))
    for n in range(tokens):
        covering = min(n, starts - 1) - max(0, n - config.mask_span + 1) + 1  # starts whose span covers token n
        unmasked += prod(max(0.0, 1 - spans / (starts - j)) for j in range(covering))
    return 1 - unmasked / tokens
