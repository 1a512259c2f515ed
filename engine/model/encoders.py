"""Build encoders and global objectives, check and initialise them. An encoder is the authors', one that
comes with omnilead, or a class of yours: `model.encoder: file.py:Class`.

    class Mine(nn.Module):                            # Mine(leads=12, **model.options)
        width = 128                                   # D
        def forward(self, x_RLT): ...                 # c_RND, from windows: 5 s in millivolts, or as `input` says

    encoder = build_encoder(config, generator=generator)
    check_encoder(encoder, config, masked=False)            # ConfigError if it does not follow this interface
    encoder_flops(encoder, config, local=False)       # FLOPs of a training step

For the local objective a class also needs `features`, `context` and `feature_width`
(engine.model.encoder.MaskedEncoder). With select_leads(weights, rows, of), a model of twelve leads
can be fine-tuned on fewer channels. The file may import only installed packages: it is copied into
RUN/code and RUN/model, and runs from there only if you ask for it (`code=True`). Shapes:
engine.model.config.
"""

import copy
import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.flop_counter import FlopCounterMode

from omnilead.data_tools.io.plugins import load_plugin

from ..data.config import HALF
from ..settings.errors import ConfigError, blaming
from .config import (
    CLASS_OBJECTIVES,
    ENCODERS,
    ModelConfig,
    ObjectiveConfig,
    flops_per_crop,
    local_objective_flops,
    max_masked,
)
from .encoder import (
    ConvBlock,
    Dropout,
    Encoder,
    MaskedEncoder,
    PositionalConvolution,
    TransformerLayer,
)
from .quantizer import Quantizer

CHECKED_ROWS = 4  # rows (windows) in the batch on which check_encoder runs an encoder
# Largest difference between two outputs that should be the same, relative to the largest number in them
OUTPUT_TOLERANCE = {
    torch.float32: 1e-3,
    torch.bfloat16: 5e-2,
}


def build_encoder(
    config: ModelConfig,
    mask: bool = True,
    generator: torch.Generator | None = None,
    kind: Any = None,
) -> nn.Module:
    """Return a new encoder, as `config` describes it. The weights of the authors' encoder are drawn from
    `generator`; without `mask`, it has no mask embedding. Any other encoder draws its own weights, from
    torch's generator with the seed of `generator`; `kind` is its class, if that is already loaded."""
    encoder: nn.Module
    if not config.encoder:
        encoder = Encoder(config, mask)
        initialise(encoder, generator)
        return encoder
    with blaming(
        f"model.encoder={config.encoder}, model.options={config.options}, {config.leads} leads"
    ):
        encoder = build_module(
            kind or load_plugin(ENCODERS.get(config.encoder, config.encoder)),
            generator,
            leads=config.leads,
            **config.options,
        )
        return require_parameters(encoder)


def options_with_defaults(config: ModelConfig) -> dict[str, Any]:
    """Return model.options. For an encoder that comes with omnilead, the defaults of its options are
    filled in."""
    if not config.encoder or config.encoder not in ENCODERS:
        return config.options
    parameters = inspect.signature(load_plugin(ENCODERS[config.encoder])).parameters
    options = {name: one.default for name, one in parameters.items() if name != "leads"}
    options |= config.options
    # a tuple becomes a list when it is written to a file and read back
    return {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}


def build_module(
    kind: Any, generator: torch.Generator | None, *arguments: Any, **options: Any
) -> nn.Module:
    """Return kind(*arguments, **options), with torch's generator seeded as `generator` was."""
    with torch.random.fork_rng(devices=[]):
        if generator is not None:
            torch.manual_seed(generator.initial_seed())
        module = kind(*arguments, **options)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"is a {type(module).__name__}: must be an nn.Module")
    return module


def require_parameters(module: nn.Module) -> nn.Module:
    if next(module.parameters(), None) is None:
        raise ConfigError("has no weights: an encoder needs parameters")
    return module


def build_objective(
    config: ObjectiveConfig, encoder: nn.Module, generator: torch.Generator | None
) -> nn.Module:
    """Return a new global objective, Class(encoder, **objective.options). objective.method names the class:
    one that comes with omnilead or one of yours."""
    with blaming(f"objective.method={config.method}, objective.options={config.options}"):
        kind = load_plugin(CLASS_OBJECTIVES.get(config.method, config.method))
        objective = build_module(kind, generator, encoder, **config.options)
        if set(objective.parameters()) & set(encoder.parameters()):
            raise ConfigError(
                "holds the encoder's weights: do not store the encoder, but use the one passed to forward"
            )
    return objective


def encoder_and_token_count(
    config: ModelConfig,
    masked: bool,
    dtype: torch.dtype,
    seed: int,
    kind: Any = None,
    samples: int = HALF,
) -> tuple[nn.Module | None, int]:
    """Return (a new encoder that has passed check_encoder, or None for the authors' encoder; the number of
    tokens that the encoder makes of a window of `samples`)."""
    if not config.encoder:
        return None, config.tokens(samples)
    encoder = build_encoder(config, masked, torch.Generator().manual_seed(seed), kind)
    cast_batch_norm_statistics(encoder, dtype)
    return encoder, check_encoder(encoder, config, masked, dtype, samples)


def cast_batch_norm_statistics(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the running statistics of batch norms to `dtype`. DeepSpeed casts only weights, and a batch norm
    needs weights and statistics of the same type."""
    for part in model.modules():
        if isinstance(part, _NormBase) and part.running_mean is not None:
            part.running_mean = part.running_mean.to(dtype)
            part.running_var = cast(Tensor, part.running_var).to(dtype)


@torch.no_grad()
def check_encoder(
    encoder: nn.Module,
    config: ModelConfig,
    masked: bool = False,
    dtype: torch.dtype = torch.float32,
    samples: int = HALF,
) -> int:
    """Run a copy of an encoder on noise, and raise ConfigError if its outputs break the interface. Return
    the number of tokens in a window. With `masked`, also check what the local objective needs."""
    examined = cast(Any, copy.deepcopy(encoder).eval())
    for p in examined.parameters():
        p.data = p.data.to(dtype)
    generator = torch.Generator().manual_seed(0)
    shape = CHECKED_ROWS, config.leads, samples
    x_RLT = torch.randn(shape, generator=generator).to(dtype)
    other_RLT = torch.randn(shape, generator=generator).to(dtype)
    x_RLT[1] = 0  # a row of zeros, as random lead masking may make one
    other_RLT[0] = x_RLT[0]  # the output of this row must be the same in both batches
    hint = ""
    if config.leads != 12:
        hint = f": can it take {config.leads} leads? augment.padded=true gives it 12, others zero"
    with blaming(f"model.encoder={config.encoder}", hint):
        c_RND = _checked_output("forward", examined(x_RLT), examined.width, shape)
        other_RND = _checked_output("forward", examined(other_RLT), examined.width, shape)
        if not outputs_agree(c_RND[0], other_RND[0], dtype):
            raise ConfigError(
                "in eval mode, the output for a row changes when other rows of the batch change: a row's output must "
                "depend on that row alone"
            )
        tokens = int(c_RND.shape[1])
        if masked and isinstance(examined, MaskedEncoder):
            max_masked(config, tokens)
            features_RNF = _checked_output(
                "features", examined.features(x_RLT)[0], examined.feature_width, shape
            )
            _check_masking(examined, features_RNF.to(dtype))
    return tokens


def _check_masking(encoder: Any, z_RNF: Tensor) -> None:
    """Raise ConfigError if the output of context() depends on features of masked tokens."""
    mask_RN = torch.arange(z_RNF.shape[1]).expand(CHECKED_ROWS, -1) % 2 == 0
    hidden_RNF = torch.where(mask_RN[..., None], 1 - 2 * z_RNF, z_RNF)
    first = _checked_output("context", encoder.context(z_RNF, mask_RN), encoder.width, z_RNF.shape)
    second = _checked_output(
        "context", encoder.context(hidden_RNF, mask_RN), encoder.width, z_RNF.shape
    )
    if not outputs_agree(first, second, z_RNF.dtype):
        raise ConfigError(
            "the output of context depends on the features of masked tokens: hide them, because the local "
            "objective predicts them"
        )


def _checked_output(name: str, y: Tensor, width: int, shape: Sequence[int]) -> Tensor:
    """Return `y`, the output of the method `name` for an input of this shape, in float32. Raise
    ConfigError if its shape is wrong or a value is not finite."""
    if y.ndim != 3 or len(y) != CHECKED_ROWS or y.shape[2] != width:
        raise ConfigError(
            f"{name} returns the shape {list(y.shape)} for an input {list(shape)}: return the shape "
            f"[{CHECKED_ROWS}, tokens, {width}]"
        )
    if not y.isfinite().all():
        raise ConfigError(f"{name} returns NaN or infinity for windows of noise and zeros")
    return y.float()


def outputs_agree(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """True if two outputs differ by no more than rounding in `dtype`."""
    return a.shape == b.shape and bool(
        (a - b).abs().max() <= OUTPUT_TOLERANCE[dtype] * a.abs().max()
    )


def encoder_flops(
    encoder: nn.Module | None,
    config: ModelConfig,
    local: bool,
    samples: int = HALF,
    windows: int = 2,
) -> float:
    """Return the FLOPs of a training step for one crop, forward and backward: those of the encoder and, with
    `local`, of the local objective. Those of the authors' encoder are computed by a formula. Another encoder
    is run on two rows, and its operations are counted.

    Only the forward pass is counted, and the backward pass is taken as twice that. This avoids errors
    of torch's counter: it multiplies the weight gradient of a grouped convolution by the groups, and
    counts fused attention and recurrent layers on a CPU as 0.
    """
    if not config.encoder or encoder is None:
        return flops_per_crop(config, local, samples, windows)
    encoder_copy, rows = copy.deepcopy(encoder).cpu().float().train(), 2
    with (
        warnings.catch_warnings(action="ignore"),  # hides torch's warning about TF32 on Intel GPUs
        torch.random.fork_rng(devices=[]),
        torch.backends.mkldnn.flags(enabled=False),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
        blaming(f"model.encoder={config.encoder}, in training"),
    ):
        c_RND = encoder_copy(torch.randn(rows, config.leads, samples))
    flops: float = 3 * counter.get_total_flops() / rows
    if local:
        _, tokens, width = c_RND.shape
        flops += local_objective_flops(
            config, tokens, width, int(getattr(encoder_copy, "feature_width", 0))
        )
    return windows * flops


def has_dropout(encoder: nn.Module | None, config: ModelConfig, *other_rates: float) -> bool:
    """Return True if any dropout rate is above 0, in the encoder or among `other_rates`, those of other
    modules. `encoder` is None for the authors' encoder, whose rates are in `config`."""
    rates = [
        config.dropout,
        config.attention_dropout,
        config.activation_dropout,
        config.input_dropout,
    ]
    if encoder is not None:
        rates = [
            float(getattr(part, "p", 0))
            for part in encoder.modules()
            if isinstance(part, Dropout | _DropoutNd)
        ]
    return any((*rates, *other_rates))


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw all weights in the order of the modules, so that the same generator gives the same weights.

    | weights | drawn from | source in fairseq-signals |
    |---|---|---|
    | convolutions | N(0, 2 / (inputs * kernel)) | modules/conv_feature_extraction.py:34, kaiming_normal_ |
    | projections: to the encoder's width; of contexts and targets | U(+-1 / sqrt(inputs)), bias too | nn.Linear |
    | mask embedding | U(0, 1) | models/transformer.py:184 |
    | positional convolution | N(0, 4 / (kernel * width)), bias 0; gain = its norm | modules/conv_positional_encoding.py:15 |
    | its bias, if features are as wide as the encoder and not projected | U(+-1 / sqrt(width)) | |
    | linear maps of the transformer | N(0, 0.02^2), bias 0 | modules/transformer_encoder.py:17-45 |
    | quantiser's logits | N(0, 1), bias 0 | modules/gumbel_vector_quantizer.py:60 |
    | codebook | U(0, 1) | modules/gumbel_vector_quantizer.py:40 |
    | every norm | gain 1, bias 0 | |

    Without the bias of the positional convolution, an ECG of zeros would be zeros in every layer. A layer
    norm of zeros multiplies the gradient by 316, and five such norms overflow float32.
    """
    if any(p.is_meta for p in model.parameters()):
        # Parameters without memory will be loaded, so there is nothing to draw. Drawing them would
        # import torch._dynamo, which takes 0.7 CPU-seconds
        return
    _initialise_layers(model, generator)
    _initialise_transformer(model, generator)


def _initialise_layers(model: nn.Module, generator: torch.Generator | None) -> None:
    """Draw the weights of linear layers, convolutions and layer norms."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            nn.init.uniform_(module.weight, -bound, bound, generator)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -bound, bound, generator)
        elif isinstance(module, ConvBlock):
            inputs = module.weight.shape[1]
            spread = math.sqrt(2 / inputs)
            nn.init.normal_(module.weight, 0, spread, generator)
        elif isinstance(module, PositionalConvolution):
            kernel, width = module.gain.numel(), len(module.bias)
            spread = math.sqrt(4 / (kernel * width))
            nn.init.normal_(module.direction, 0, spread, generator)
            squares = module.direction.square().sum((0, 1), keepdim=True)
            module.gain.copy_(squares.sqrt())
            nn.init.zeros_(module.bias)


def _initialise_transformer(model: nn.Module, generator: torch.Generator | None) -> None:
    """Draw the mask embedding, the codebook and, if features are not projected, the bias of the positional
    convolution. Draw the linear layers of the transformer and the quantiser again, from N(0, 0.02^2) and
    N(0, 1)."""
    for module in model.modules():
        if isinstance(module, Encoder):
            if module.mask_embedding is not None:
                nn.init.uniform_(module.mask_embedding, 0, 1, generator)
            if isinstance(module.project, nn.Identity):
                bound = 1 / math.sqrt(module.width)
                nn.init.uniform_(module.position.bias, -bound, bound, generator)
        elif isinstance(module, TransformerLayer):
            attention = module.attention
            linears = [attention.qkv, attention.out, module.fc1, module.fc2]
            for linear in linears:
                nn.init.normal_(linear.weight, 0, 0.02, generator)
                nn.init.zeros_(linear.bias)
        elif isinstance(module, Quantizer):
            nn.init.normal_(module.logits.weight, 0, 1, generator)
            nn.init.zeros_(module.logits.bias)
            nn.init.uniform_(module.codebook, 0, 1, generator)
