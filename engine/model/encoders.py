"""Which encoder is trained: the authors', a shipped one, or a class of one's own, `model.encoder: file.py:Class`.

    class Mine(nn.Module):                            # Mine(leads=12, **model.options)
        width = 128                                   # D
        def forward(self, x_RLT): ...                 # c_RND, from segments of 5 s in millivolts

    encoder = build_encoder(config, generator=generator)
    examine(encoder, config, masked=False)            # ConfigError if it does not keep to this
    cost_per_crop(encoder, config, local=False)       # FLOPs of a training step, and the numbers it keeps

For the local objective a class has `features`, `context` and `feature_width`, too (engine.model.encoder.MaskedEncoder). With
select_leads(weights, rows, of), a model of twelve leads can be fine-tuned on fewer channels. The file may import installed
packages only: it is copied into RUN/code and RUN/model, and is never run from there without being asked (`code=True`).
Shapes: engine.model.config.
"""

import copy
import inspect
import pkgutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.flop_counter import FlopCounterMode

from engine.common import ConfigError, blame, plugged
from engine.data.augmenter import HALF
from engine.model.config import ENCODERS, ModelConfig, flops_per_crop, kept_per_crop, local_flops
from engine.model.draws import max_masked
from engine.model.encoder import Dropout, Encoder, MaskedEncoder
from engine.model.init_weights import initialise

CODE = "code"  # folder of a run
ROWS = 4  # of the segments an encoder is examined with
AGREE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of the largest number: rows computed beside other rows


def file_of(spec: str) -> Path | None:
    """The file of file.py:Name."""
    return Path(spec.rpartition(":")[0]) if ":" in spec else None


def portable(spec: str) -> str:
    """As a model folder names it, where the file lies beside the weights."""
    return f"{file.name}:{spec.rpartition(':')[2]}" if (file := file_of(spec)) else spec


def code_of(settings: Mapping[str, str], run: str) -> dict[str, bytes]:
    """The files that these settings name, by name and content. `run` may have copies of them."""
    files: dict[str, bytes] = {}
    for setting, spec in settings.items():
        if file := file_of(spec):
            try:
                content = file.read_bytes()
            except OSError as error:
                kept = Path(run, CODE, file.name)
                copy = f": the run's copy is {kept}" if kept.is_file() else ""
                raise ConfigError(f"{setting}={spec}: {file}: {error.strerror}{copy}") from None
            if files.setdefault(file.name, content) != content:
                raise ConfigError(f"{setting}={spec}: another setting names another file {file.name}: rename one of them")
    return files


def encoder_class(config: ModelConfig) -> Any:
    shipped = ENCODERS.get(config.encoder)
    return pkgutil.resolve_name(shipped) if shipped else plugged(config.encoder, "model.encoder")


def build_encoder(
    config: ModelConfig, mask: bool = True, generator: torch.Generator | None = None, kind: Any = None
) -> nn.Module:
    """With weights drawn from `generator`, or if it is another than the authors', by itself from the same seed. `kind`: its
    class. `mask` false: no mask embedding in the authors'."""
    if not config.encoder:
        encoder = Encoder(config, mask)
        initialise(encoder, generator)
        return encoder
    setting = f"model.encoder={config.encoder}, model.options={config.options}, {config.leads} leads"
    own = _made(kind or encoder_class(config), setting, generator, leads=config.leads, **config.options)
    if type(getattr(own, "width", None)) is not int:
        raise ConfigError(f"model.encoder={config.encoder}: has no integer `width`")
    return own


def build_head(spec: str, width: int, outputs: int, generator: torch.Generator | None = None, kind: Any = None) -> nn.Module:
    """`task.head`, a class of one's own: Class(width, outputs), from c_RD to logits_RK."""
    setting = f"task.head={spec}, {width} wide, {outputs} outputs"
    head = _made(kind or plugged(spec, "task.head"), setting, generator, width, outputs)
    try:
        y = copy.deepcopy(head).eval()(torch.randn(ROWS, width))
        if list(y.shape) != [ROWS, outputs] or not y.isfinite().all():
            raise ValueError(f"gives {list(y.shape)} or numbers that are not finite for {[ROWS, width]}")
    except Exception as error:  # whatever a user's class raises
        raise ConfigError(f"{setting}: {blame(error)}") from None
    return head


def _made(kind: Any, setting: str, generator: torch.Generator | None, *arguments: Any, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        if generator is not None:
            torch.manual_seed(generator.initial_seed())
        try:
            made = kind(*arguments, **options)
        except Exception as error:  # whatever a user's class raises
            raise ConfigError(f"{setting}: {blame(error)}") from None
    if not isinstance(made, nn.Module) or next(made.parameters(), None) is None:
        raise ConfigError(f"{setting}: must be an nn.Module with weights")
    return made


def prepared(
    config: ModelConfig, masked: bool, dtype: torch.dtype, seed: int, kind: Any = None
) -> tuple[nn.Module | None, int]:
    """An encoder that is not the authors', examined; the number of tokens of 5 s."""
    if not config.encoder:
        return None, config.tokens(HALF)
    encoder = build_encoder(config, masked, torch.Generator().manual_seed(seed), kind)
    for part in encoder.modules():  # DeepSpeed casts weights only, and a batch norm needs its statistics in their type
        if isinstance(part, _NormBase) and part.running_mean is not None and part.running_var is not None:
            part.running_mean, part.running_var = part.running_mean.to(dtype), part.running_var.to(dtype)
    return encoder, examine(encoder, config, masked, dtype)


@torch.no_grad()
def examine(encoder: nn.Module, config: ModelConfig, masked: bool = False, dtype: torch.dtype = torch.float32) -> int:
    """The number of tokens of 5 s; ConfigError if the encoder does not do what it says. `masked`: what the local objective
    needs, too."""
    setting = f"model.encoder={config.encoder}"
    fewer = "" if config.leads == 12 else f": can it take {config.leads} leads? augment.padded=true gives it 12, others zero"
    generator = torch.Generator().manual_seed(0)
    x_RLT = torch.randn(ROWS, config.leads, HALF, generator=generator).to(dtype)
    x_RLT[1] = 0  # as random lead masking may make it
    others_RLT = torch.cat([x_RLT[:1], torch.randn(ROWS - 1, config.leads, HALF, generator=generator).to(dtype)])
    own: Any = copy.deepcopy(encoder).eval()
    for p in own.parameters():
        p.data = p.data.to(dtype)

    def call(name: str, *inputs: Tensor) -> Any:
        try:
            return getattr(own, name)(*inputs)
        except Exception as error:  # whatever a user's class raises
            shape = list(inputs[0].shape)
            raise ConfigError(f"{setting}: {name} fails for {shape}: {blame(error)}{fewer}") from None

    def checked(y: Any, name: str, width: int, tokens: int | None = None) -> Tensor:
        shape = list(y.shape) if isinstance(y, Tensor) else [type(y).__name__]
        if len(shape) != 3 or shape[0] != ROWS or shape[1] != (tokens or shape[1]) or shape[2] != width or not shape[1]:
            wanted = f"[{ROWS}, {tokens or 'tokens'}, {width}]"
            raise ConfigError(f"{setting}: {name} gives {shape} for {list(x_RLT.shape)}, not {wanted} as its width says")
        if not y.isfinite().all():
            raise ConfigError(f"{setting}: {name} gives NaN or infinity for noise and zeros{fewer}")
        return y.float()  # type: ignore[no-any-return]

    def same(a: Tensor, b: Tensor) -> bool:
        return bool((a - b).abs().max() <= AGREE[dtype] * a.abs().max())

    width = int(own.width)
    c_RND = checked(call("forward", x_RLT), "forward", width)
    if not same(c_RND[0], checked(call("forward", others_RLT), "forward", width)[0]):
        raise ConfigError(
            f"{setting}: in eval mode a row changes when other rows of the batch change: rows must be independent"
        )
    tokens = c_RND.shape[1]
    if masked and isinstance(own, MaskedEncoder):
        max_masked(config, tokens)
        pair = call("features", x_RLT)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(f"{setting}: features gives {type(pair).__name__}, not the pair of features and their penalty")
        z_RNF = checked(pair[0], "features", int(own.feature_width), tokens).to(dtype)
        mask_RN = torch.arange(tokens).expand(ROWS, -1) % 2 == 0
        hidden_RNF = torch.where(mask_RN[..., None], -2 * z_RNF + 1, z_RNF)
        first, second = (checked(call("context", z, mask_RN), "context", width, tokens) for z in (z_RNF, hidden_RNF))
        if not same(first, second):
            raise ConfigError(f"{setting}: context sees the masked tokens, so the local objective would be too easy")
    return tokens


class StepCost(NamedTuple):
    flops: float  # forward and backward
    kept: float  # numbers kept for the backward pass


def cost_per_crop(encoder: nn.Module | None, config: ModelConfig, local: bool) -> StepCost:
    """Of 10 s. For the authors' encoder by formula, for others by running a few rows.

    Forward is counted, and backward as twice that. torch's counter has its faults in what is left out here: it multiplies the
    weight gradient of a grouped convolution by the groups, and counts fused attention and recurrent layers of a CPU as nothing.
    """
    if not config.encoder or encoder is None:
        return StepCost(flops_per_crop(config, HALF, local=local), kept_per_crop(config, HALF))
    own, rows, saved = copy.deepcopy(encoder).cpu().float().train(), 2, dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with (
        warnings.catch_warnings(action="ignore"),  # about TF32 on Intel's GPUs
        torch.random.fork_rng(devices=[]),
        torch.backends.mkldnn.flags(enabled=False),
        sdpa_kernel(SDPBackend.MATH),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        FlopCounterMode(display=False) as counter,
    ):
        c_RND = own(torch.randn(rows, config.leads, HALF))
    weights = {p.untyped_storage().data_ptr() for p in own.parameters()}
    kept = sum(numbers for place, numbers in saved.items() if place not in weights)
    flops = 3 * counter.get_total_flops() / rows
    flops += local_flops(config, c_RND.shape[1], c_RND.shape[2], int(getattr(own, "feature_width", 0))) if local else 0
    return StepCost(2 * flops, 2 * kept / rows)


def drops_out(encoder: nn.Module | None, config: ModelConfig, *others: float) -> bool:
    """Whether dropout makes training differ from evaluation. `others`: dropout rates outside of the encoder."""
    if config.encoder and encoder is not None:
        return any(getattr(part, "p", 0) for part in encoder.modules() if isinstance(part, Dropout | _DropoutNd))
    return any((config.dropout, config.attention_dropout, config.activation_dropout, config.input_dropout, *others))


def describe_encoder(config: ModelConfig) -> str:
    """A line of the model card."""
    if not config.encoder:
        size = f"{len(config.conv)} convolutions, {config.layers} transformer layers of width {config.width}"
        return f"Encoder of wav2vec 2.0 for ECGs (Oh et al., CHIL 2022): {size}."
    options = ", ".join(f"{name}={value}" for name, value in config.options.items()) or "defaults"
    if config.encoder in ENCODERS:
        about = (inspect.getdoc(pkgutil.resolve_name(ENCODERS[config.encoder])) or "").split("\n")[0]
        return f"Encoder `{config.encoder}`: {about} Options: {options}."
    return f"Encoder `{portable(config.encoder)}`, whose code lies in this folder. Options: {options}."
