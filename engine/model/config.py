"""Settings of the model and of the pre-training objectives, and the model's cost in floating-point
operations.

The defaults are the authors' (fairseq-signals w2v_cmsc_rlm.yaml and its dataclasses), described in
the paper's section "Pre-training": 90,883,072 parameters, 156 tokens for 5 s, 175.9 GFLOP for a 10
s crop, forward and backward.

    loss = local * L_local + diversity * L_diversity + features * L_features + contrast * L_global

| method of the paper | ObjectiveConfig |
|---|---|
| W2V + CMSC (+ RLM) | the defaults |
| W2V | contrast: 0 |
| CMSC | local: 0 |
| SimCLR | local: 0, method: simclr |
| 3KG | local: 0, method: 3kg |
| CPC (not in the paper) | local: 0, method: cpc, with model.causal, conv_norm: layer, or encoder: s4 |
| JEPA (not in the paper) | local: 0, method: jepa, with conv_norm: layer, or encoder: s4 |
| as the authors compute it | form: authors, detach_norm: true, gathered: false |

Random lead masking and views are made by the data loader. The diversity loss and the feature
penalty belong to the local objective: if it is off, so are they.

Suffixes of tensor names in engine/model:
    B crops  S halves or views of a crop  R = B * S rows  L leads  T samples  N tokens  D encoder width  F feature width
    H heads  M slots for masked tokens    K negatives     G codebooks (groups)  V codes of each  P projection width
"""

import json
from collections.abc import Mapping
from dataclasses import field
from math import floor, prod
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..settings.errors import ConfigError, one_line_errors
from ..settings.files import OWN_CODE

STRICT = ConfigDict(strict=True, extra="forbid")
ENCODERS = {
    "": "omnilead.engine.model.encoder:Encoder",
    "resnet": "omnilead.engine.model.resnet:ResNet",
    "s4": "omnilead.engine.model.s4:S4",
}
ATTRIBUTES = ("age", "sex")  # in the order of the outputs of Pretrainer.attributes
# A global objective is a function of the encoder's pooled outputs, or a class, which runs the encoder itself
# (engine.model.encoders.build_objective)
FUNCTION_OBJECTIVES = ("cmsc", "simclr", "3kg")
CLASS_OBJECTIVES = {
    "cpc": "omnilead.engine.model.cpc:predictive_coding",
    "jepa": "omnilead.engine.model.jepa:JointEmbedding",
}
MAX_VALUE_CHARACTERS = 80  # a message shows at most this many characters of a wrong value
HALF_SAMPLES = 2500  # samples in 5 s
# Numbers have upper bounds, because a config may come from a stranger
Count = Annotated[int, Field(ge=1, le=65_536)]
Probability = Annotated[float, Field(ge=0, le=0.99, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Kind = TypeVar("Kind")


@one_line_errors
@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The choice of encoder, and the settings of the authors' encoder and of the local
    objective. Other encoders are configured by `options`; they ignore the settings from `conv`
    to `input_dropout`, except `kernels`."""

    # the encoder: "" is the authors' encoder, the wav2vec 2.0 of fairseq-signals; resnet and s4 come with
    # omnilead; file.py:Class is a class of yours (see omnilead.engine.model.encoders)
    encoder: str = ""
    # arguments of the class of a resnet, an s4 or an encoder of yours
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    leads: Count = 12  # input channels
    conv: Annotated[
        tuple[tuple[Count, Annotated[int, Field(ge=1, le=1024)]], ...],
        Field(min_length=1, max_length=16),
        # [width, kernel] of each convolution; the stride equals the kernel size
    ] = ((256, 2),) * 4
    # group: a group norm after the first convolution only, as in fairseq-signals; layer: a layer norm after
    # each convolution, as in the paper
    conv_norm: Literal["group", "layer"] = "group"
    feature_grad: Share = 0.1  # factor on the gradient of the convolutions; 0 freezes them
    width: Count = 768  # width of the transformer's tokens
    layers: Annotated[int, Field(ge=1, le=1000)] = 12  # number of transformer layers
    heads: Count = 12  # attention heads
    ffn: Count = 3072  # width of the feed-forward layers
    position_kernel: Count = 128  # kernel size of the positional convolution, in tokens
    position_groups: Count = 16  # groups of the positional convolution
    # true: a token sees only itself and earlier tokens, which objective.method=cpc needs
    causal: bool = False
    # auto: faster implementations of some operations (omnilead.engine.model.kernels); plain: torch's
    kernels: Literal["plain", "auto"] = "auto"
    # dropout on the residual branches, and on the tokens before the first layer
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.1  # dropout on attention weights
    activation_dropout: Probability = 0.0  # dropout inside the feed-forward layers
    input_dropout: Probability = 0.1  # dropout on the projected features
    feature_dropout: Probability = 0.1  # dropout on the features before they are quantised
    codebooks: Count = 2  # number of codebooks of the quantiser
    codes: Count = 320  # number of codes in each codebook
    code_width: Count = 256  # width of a quantised feature, which joins a code of each codebook
    projection: Count = 256  # width to which contexts and targets are projected to be compared
    # first Gumbel temperature; after n updates it is max(tau_start * tau_decay ** n, tau_end)
    tau_start: Annotated[float, Field(ge=1e-3, le=1e3)] = 2.0
    tau_end: Annotated[float, Field(ge=1e-3, le=1e3)] = 0.5  # lowest Gumbel temperature
    # factor on the Gumbel temperature in each update
    tau_decay: Annotated[float, Field(gt=0, le=1)] = 0.999995
    # share of the tokens that masked spans would cover if no two overlapped; because some overlap, about half of
    # the tokens are masked
    mask_share: Share = 0.65
    mask_span: Count = 10  # length of a masked span, in tokens
    # count: the number of spans is fixed up to rounding, as in fairseq-signals; bernoulli: each token starts a
    # span at random, as in the paper
    mask_starts: Literal["count", "bernoulli"] = "count"
    # true: unmask tokens at random until all rows of a batch have as many masked tokens as the row with the fewest,
    # as in fairseq-signals
    mask_trim: bool = False

    def __post_init__(self) -> None:
        if self.encoder not in ENCODERS and not OWN_CODE.fullmatch(self.encoder):
            shipped = ", ".join(filter(None, ENCODERS))
            raise ConfigError(
                f"model.encoder={self.encoder!r}: use {shipped}, your own file.py:Class, or '' "
                "for the authors' encoder"
            )
        if self.options and not self.encoder:
            raise ConfigError(
                f"model.options={self.options}: the authors' encoder takes no options: set "
                "model.encoder"
            )
        if self.causal and self.conv_norm == "group" and not self.encoder:
            raise ConfigError(
                "model.causal=true: model.conv_norm=group takes the mean and variance of all samples, "
                "later ones included: set model.conv_norm=layer"
            )
        for key, divisor in (
            ("width", "heads"),
            ("width", "position_groups"),
            ("code_width", "codebooks"),
        ):
            value, by = getattr(self, key), getattr(self, divisor)
            if value % by:
                raise ConfigError(
                    f"model.{key}={value}: must be a multiple of model.{divisor}={by}"
                )
        if self.tau_start < self.tau_end:
            raise ConfigError(
                f"model.tau_start={self.tau_start}: must be at least model.tau_end={self.tau_end}"
            )

    @property
    def architecture_settings(self) -> list[str]:
        """Return the names of the settings that must stay the same for the encoder's weights to be valid."""
        names = ["encoder", "options", "leads"]
        if not self.encoder:
            names += ["conv", "conv_norm", "width", "layers", "heads", "ffn"]
            names += ["position_kernel", "position_groups", "causal"]
        return names

    @property
    def feature_width(self) -> int:
        return self.conv[-1][0]

    def tokens(self, samples: int) -> int:
        """Return the number of tokens that the authors' encoder makes of a window of `samples`."""
        patch = prod(kernel for _, kernel in self.conv)  # the number of samples in a token
        if samples < patch:
            raise ConfigError(
                f"model.conv: a token takes {patch} samples, but a window has {samples}: use fewer "
                "convolutions or smaller kernels"
            )
        return samples // patch


@one_line_errors
@dataclass(frozen=True, config=STRICT)
class ObjectiveConfig:
    local: Weight = 1.0  # weight of the local objective, the loss on masked tokens
    diversity: Weight = 0.1  # weight of the code diversity loss, part of the local objective
    features: Weight = 10.0  # weight of the feature penalty, part of the local objective
    contrast: Weight = 1.0  # weight of the global objective
    # global objective: cmsc, simclr, 3kg, cpc, jepa, or a class of yours as file.py:Class
    method: str = "cmsc"
    # arguments of an objective that is a class. cpc: form (`all` with steps, temperature; `sampled` with ahead,
    # negatives); jepa: momentum; a class of yours: its own arguments
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    form: Literal["paper", "authors"] = "paper"  # CMSC as in the paper or as in fairseq-signals
    # temperature of the local and the global objective
    temperature: Annotated[float, Field(ge=1e-4, le=1e4)] = 0.1
    # number of negatives for each masked token
    negatives: Annotated[int, Field(ge=1, le=10_000)] = 100
    # true: the candidates of the global objective and the usage of codes come from all ranks, with gradients;
    # false: from each rank alone
    gathered: bool = True
    # true: no gradient flows through the norms of the vectors that the global objective compares; in CMSC with
    # objective.form=authors, none ever does
    detach_norm: bool = False
    # number of windows that a step takes from a crop, side by side from a random start; null: two, or one if
    # windows are longer than 5 s
    windows: Annotated[int, Field(ge=1, le=100)] | None = None
    # weights of the losses for predicting age and sex, such as {age: 1.0, sex: 1.0}; crops without a known age or
    # sex do not count
    attributes: dict[Literal["age", "sex"], Weight] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        methods = (*FUNCTION_OBJECTIVES, *CLASS_OBJECTIVES)
        if self.method not in methods and not OWN_CODE.fullmatch(self.method):
            raise ConfigError(
                f"objective.method={self.method!r}: use {', '.join(methods)}, or your own file.py:Class"
            )
        if self.options and self.method in FUNCTION_OBJECTIVES:
            raise ConfigError(
                f"objective.options={self.options}: objective.method={self.method} takes no options"
            )
        if self.local == 0 and self.contrast == 0:
            raise ConfigError(
                "objective.local=0 and objective.contrast=0: no loss is left: set at least one "
                "above 0"
            )

    @property
    def method_is_class(self) -> bool:
        """True if the global objective is in use and is a class, not a function."""
        return self.contrast > 0 and self.method not in FUNCTION_OBJECTIVES

    @property
    def compares_across_ranks(self) -> bool:
        """True if the global objective compares crops with those of other ranks."""
        return self.gathered and (self.method, self.form) != ("cmsc", "authors")

    @property
    def needs_patient_ids(self) -> bool:
        """True if the global objective needs to know the patient of each crop."""
        return self.contrast > 0 and (
            self.method == "3kg" or (self.method == "cmsc" and self.form == "authors")
        )


def parse_settings(kind: type[Kind], settings: Mapping[str, Any], section: str) -> Kind:
    """Return the settings dataclass `kind` made from a mapping. A ConfigError names
    the first invalid key as `section.key`."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(settings))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key, value = ".".join(map(str, (section, *first["loc"][:1]))), repr(first["input"])
        value = (
            value if len(value) <= MAX_VALUE_CHARACTERS else f"{value[:MAX_VALUE_CHARACTERS]}..."
        )
        raise ConfigError(f"{key}={value}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    except TypeError as error:  # a value that JSON cannot hold, such as a date in a YAML file
        raise ConfigError(f"{section}: {error}: write text or a number") from None


def flops_per_crop(
    config: ModelConfig, local: bool = True, samples: int = HALF_SAMPLES, windows: int = 2
) -> float:
    """Return the FLOPs of a training step for one crop with the authors' encoder. Forward and backward
    together are three times the forward pass. Only matrix products count; a multiply-add is two FLOPs.

    The quantiser and the projections see only masked tokens, about half. This counts the work that
    the objective needs in any implementation: one cosine for each negative that the authors gather,
    and one product with the codebook.
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
    flops += config.layers * (
        2 * tokens * (4 * d * d + 2 * d * config.ffn) + 4 * tokens * tokens * d
    )
    return windows * (
        3 * flops + (local_objective_flops(config, tokens, d, width) if local else 0.0)
    )


def local_objective_flops(
    config: ModelConfig, tokens: int, width: int, feature_width: int
) -> float:
    """Return the FLOPs of the local objective for one window, forward and backward, with 100 negatives.
    `width` and `feature_width` are those of the encoder's tokens and features."""
    heads = (
        width * config.projection
        + feature_width * config.codebooks * config.codes
        + config.code_width * config.projection
    )
    codebook = config.codebooks * config.codes * (config.code_width // config.codebooks)
    return 6 * tokens * masked_share(config, tokens) * (heads + codebook + 101 * config.projection)


def masked_share(config: ModelConfig, tokens: int) -> float:
    """Return the expected share of masked tokens: 1 minus the mean, over the tokens, of the probability that
    no drawn span covers a token. Two effects are ignored: that of mask_trim, and that mask_starts=count
    draws at least two spans."""
    starts, rate = tokens - config.mask_span, config.mask_share / config.mask_span
    if config.mask_starts == "bernoulli":
        return 1 - sum((1 - rate) ** min(n + 1, config.mask_span) for n in range(tokens)) / tokens
    if starts < 1:
        return config.mask_share
    unmasked, spans = 0.0, min(rate * tokens, float(starts))
    for n in range(tokens):
        # the number of possible starts whose span covers token n
        covering = min(n, starts - 1) - max(0, n - config.mask_span + 1) + 1
        unmasked += prod(max(0.0, 1 - spans / (starts - j)) for j in range(covering))
    return 1 - unmasked / tokens


def max_spans(config: ModelConfig, tokens: int) -> int:
    """Return the largest number of spans that mask_starts=count can draw in a row."""
    spans = config.mask_share * tokens / config.mask_span
    return max(2, floor(spans + 1 - 1e-9))


def max_masked(config: ModelConfig, tokens: int) -> int:
    """Return M, the largest possible number of masked tokens in a row."""
    if config.mask_starts == "bernoulli":
        return tokens
    spans = max_spans(config, tokens)
    if tokens - config.mask_span < spans:
        raise ConfigError(
            f"model.mask_span={config.mask_span}: too long for {tokens} tokens: use a smaller one"
        )
    return min(spans * config.mask_span, tokens - 1)
