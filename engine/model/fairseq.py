"""The authors' names and layouts of weights and settings, and ours: both ways, exactly.

    ours(state, config) -> our state_dict          theirs(state, config) -> the authors'          settings(cfg) -> ModelConfig

Nothing but names, concatenation and permutation: every number keeps its bits. What is missing, unexpected or of another shape
is an error that lists it. Source: state dicts of fairseq-signals (models/wav2vec2/wav2vec2_cmsc.py and the modules below it);
the weight norm of the positional convolution is spelled weight_g / weight_v before 2025-01-20 and
parametrizations.weight.original0 / original1 since.
"""

import ast
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from engine.common import ConfigError
from engine.model.config import ModelConfig, ObjectiveConfig
from engine.model.pretrainer import Pretrainer

Spelling = Literal["parametrizations", "weight_g"]
_NORM_KEYS: dict[Spelling, tuple[str, str]] = {
    "parametrizations": ("parametrizations.weight.original0", "parametrizations.weight.original1"),
    "weight_g": ("weight_g", "weight_v"),
}
_POSITION = "conv_pos.pos_conv.0."
MAX_BLOCKS, MAX_TEXT = 64, 1000  # of a stranger's settings that are evaluated
# Of their settings: those that change what is computed and that we have in no other way.
_FIXED = {
    "layer_norm_first": False,
    "conv_bias": False,
    "quantize_targets": True,
    "quantize_input": False,
    "same_quantizer": False,
    "target_glu": False,
    "negatives_from_everywhere": False,
    "cross_sample_negatives": 0,
    "codebook_negatives": 0,
    "mask_channel_prob": 0.0,
    "mask_selection": "static",
    "no_mask_overlap": False,
    "encoder_layerdrop": None,  # any: it changes training only
}


class WeightsError(Exception):
    """Weights that do not fit the model: one line that lists them."""


def spelling(state: Mapping[str, Tensor]) -> Spelling:
    return "weight_g" if _POSITION + "weight_g" in state else "parametrizations"


def names(config: ModelConfig, spelled: Spelling = "parametrizations") -> dict[str, list[str]]:
    """Our name -> the authors' names, several where ours is their concatenation."""
    gain, direction = _NORM_KEYS[spelled]
    e, out = "encoder.", {}
    if config.conv_norm == "layer":
        norm_of = {i: f"feature_extractor.conv_layers.{i}.2.1" for i in range(len(config.conv))}
    else:
        norm_of = {0: "feature_extractor.conv_layers.0.2"}
    plain = {"feature_norm": "layer_norm", "position": _POSITION[:-1], "norm": "encoder.layer_norm"}
    out[e + "mask_embedding"] = ["mask_emb"]
    for i in range(len(config.conv)):
        out[f"{e}conv.blocks.{i}.weight"] = [f"feature_extractor.conv_layers.{i}.0.weight"]
    plain |= {f"conv.blocks.{i}.norm": theirs for i, theirs in norm_of.items()}
    if config.feature_width != config.width:
        plain["project"] = "post_extract_proj"
    for i in range(config.layers):
        one, other = f"layers.{i}.", f"encoder.layers.{i}."
        for kind in ("weight", "bias"):
            out[f"{e}{one}attention.qkv.{kind}"] = [f"{other}self_attn.{p}_proj.{kind}" for p in "qkv"]
        plain |= {one + "attention.out": other + "self_attn.out_proj", one + "norm1": other + "self_attn_layer_norm"}
        plain |= {one + "fc1": other + "fc1", one + "fc2": other + "fc2", one + "norm2": other + "final_layer_norm"}
    whole = {e + k: v for k, v in plain.items()}
    whole |= {"local.quantizer.logits": "quantizer.weight_proj", "local.target": "project_q", "local.context": "final_proj"}
    for mine, theirs in whole.items():
        out |= {f"{mine}.{kind}": [f"{theirs}.{kind}"] for kind in ("weight", "bias")}
    del out[e + "position.weight"]
    out |= {e + "position.gain": [_POSITION + gain], e + "position.direction": [_POSITION + direction]}
    out["local.quantizer.codebook"] = ["quantizer.vars"]
    return out


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of our weights, without making any."""
    with torch.device("meta"):
        return {name: tuple(weights.shape) for name, weights in Pretrainer(config, ObjectiveConfig()).state_dict().items()}


def ours(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    table = names(config, spelling(state))
    known = [theirs for parts in table.values() for theirs in parts]
    _complain(
        missing=[name for name in known if name not in state],
        unexpected=[name for name in state if name not in set(known)],
        reshaped=[],
    )
    wanted = shapes(config)
    _complain([], [], [_wrong(mine, parts, state, wanted[mine], config) for mine, parts in table.items()])
    return {mine: _join([state[name] for name in parts], mine, wanted[mine]) for mine, parts in table.items()}


def theirs(state: Mapping[str, Tensor], config: ModelConfig, spelled: Spelling = "parametrizations") -> dict[str, Tensor]:
    table, wanted = names(config, spelled), shapes(config)
    known = [name for name in table if name in state]
    _complain(
        missing=[name for name in table if name not in state],
        unexpected=[name for name in state if name not in table],
        reshaped=[f"{n} is {tuple(state[n].shape)}, not {wanted[n]}" for n in known if state[n].shape != wanted[n]],
    )
    out: dict[str, Tensor] = {}
    for mine, parts in table.items():
        out |= dict(zip(parts, _split(state[mine], mine, len(parts), config), strict=True))
    return out


def _join(parts: list[Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if _is_conv(name):  # [out, in, kernel] -> [out, kernel * in]
        return parts[0].transpose(1, 2).reshape(shape).contiguous()
    return torch.cat(parts) if len(parts) > 1 else parts[0].reshape(shape).contiguous()


def _split(weights: Tensor, name: str, count: int, config: ModelConfig) -> list[Tensor]:
    if _is_conv(name):
        return [weights.unflatten(1, (config.conv[_block(name)][1], -1)).transpose(1, 2).contiguous()]
    if name.endswith("codebook"):
        return [weights.flatten(0, 1)[None].contiguous()]
    return [part.contiguous().clone() for part in weights.chunk(count)]


def _is_conv(name: str) -> bool:
    return re.fullmatch(r"encoder\.conv\.blocks\.\d+\.weight", name) is not None


def _block(name: str) -> int:
    return int(name.split(".")[3])


def _wrong(mine: str, parts: list[str], state: Mapping[str, Tensor], wanted: tuple[int, ...], config: ModelConfig) -> str:
    """A name with the shape seen, or nothing."""
    seen = [tuple(state[name].shape) for name in parts]
    if _is_conv(mine):
        i = _block(mine)
        wanted = (config.conv[i][0], config.conv[i - 1][0] if i else config.leads, config.conv[i][1])
        right = seen[0] == wanted
    elif mine.endswith("codebook"):
        right = seen[0] == (1, wanted[0] * wanted[1], wanted[2])
    else:
        right = all(shape == (wanted[0] // len(parts), *wanted[1:]) for shape in seen)
    return "" if right else f"{parts[0]} is {seen[0]}, our {mine} {wanted}"


def _complain(missing: list[str], unexpected: list[str], reshaped: list[str]) -> None:
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
    told = [f"{len(found)} {kind}: {', '.join(found)}" for kind, seen in kinds if (found := [name for name in seen if name])]
    if told:
        raise WeightsError("the weights do not fit the model: " + "; ".join(told))


def settings(cfg: Mapping[str, Any]) -> ModelConfig:
    """From the section `model` of the authors' configuration."""
    try:
        return _settings(cfg)
    except ConfigError as error:  # which quotes a stranger's values, of any length
        told = str(error)
        raise ConfigError(told if len(told) <= 300 else f"{told[:150]} ... {told[-100:]}") from error


def _settings(cfg: Mapping[str, Any]) -> ModelConfig:
    missing = [key for key in ("encoder_layers", "encoder_embed_dim", "encoder_attention_heads") if key not in cfg]
    if missing:
        raise ConfigError(f"the checkpoint's settings lack model.{missing[0]}: is it a wav2vec 2.0 of fairseq-signals?")
    for key, value in _FIXED.items():
        if value is not None and cfg.get(key, value) != value:
            raise ConfigError(f"model.{key}={cfg[key]!r} in the checkpoint's settings: only {value!r} can be read")
    mode = cfg.get("extractor_mode", "default")
    if mode not in ("default", "layer_norm"):
        raise ConfigError(f"model.extractor_mode={mode!r} in the checkpoint's settings: must be default or layer_norm")
    get, width = cfg.get, cfg["encoder_embed_dim"]
    projection = get("final_dim", 256) or width
    tau_start, tau_end, tau_decay = _temperatures(get("latent_temp", (2.0, 0.5, 0.999995)))
    return ModelConfig(
        leads=get("in_d", 12),
        conv=blocks(str(get("conv_feature_layers", "[(256, 2, 2)] * 4"))),
        conv_norm="layer" if mode == "layer_norm" else "group",
        feature_grad=get("feature_grad_mult", 0.1),
        width=width,
        layers=cfg["encoder_layers"],
        heads=cfg["encoder_attention_heads"],
        ffn=get("encoder_ffn_embed_dim", 3072),
        position_kernel=get("conv_pos", 128),
        position_groups=get("conv_pos_groups", 16),
        dropout=get("dropout", 0.1),
        attention_dropout=get("attention_dropout", 0.1),
        activation_dropout=get("activation_dropout", 0.0),
        input_dropout=get("dropout_input", 0.0),
        feature_dropout=get("dropout_features", 0.0),
        codebooks=get("latent_groups", 2),
        codes=get("latent_vars", 320),
        code_width=get("latent_dim", 0) or projection,
        projection=projection,
        tau_start=tau_start,
        tau_end=tau_end,
        tau_decay=tau_decay,
        mask_share=get("mask_prob", 0.65),
        mask_span=get("mask_length", 10),
    )


def _temperatures(value: Any) -> tuple[float, float, float]:
    try:
        start, end, decay = map(float, ast.literal_eval(_bounded(value)) if isinstance(value, str) else value)
    except (SyntaxError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"model.latent_temp={value!r} in the checkpoint's settings: use (start, end, decay)") from error
    return start, end, decay


def _bounded(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise ValueError("too long")
    return text


def blocks(text: str) -> tuple[tuple[int, int], ...]:
    """ "[(256, 2, 2)] * 4" -> four blocks. The authors eval() it; here only lists, tuples, whole numbers, + and * count."""
    refused = ConfigError(f"model.conv_feature_layers={text!r}: use [(width, kernel, stride), ...] with kernel = stride")
    try:
        layers = _evaluate(ast.parse(_bounded(text), mode="eval").body)
        if all(len(layer) == 3 and all(isinstance(n, int) for n in layer) and layer[1] == layer[2] for layer in layers):
            return tuple((width, kernel) for width, kernel, _ in layers)
    except (SyntaxError, TypeError, ValueError, RecursionError) as error:
        raise refused from error
    raise refused


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(_evaluate(item) for item in node.elts)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(left, int) or len(left) + len(right) <= MAX_BLOCKS:
            return left + right
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(left, tuple) and isinstance(right, int) and len(left) * right <= MAX_BLOCKS:
            return left * right
    raise ValueError("not a list of blocks")


def their_settings(config: ModelConfig) -> dict[str, Any]:
    """The authors' configuration for a model of ours, as far as building it takes: cfg.model, cfg.task, cfg.criterion."""
    model = {
        "_name": "wav2vec2_cmsc",
        "in_d": config.leads,
        "conv_feature_layers": str([(width, kernel, kernel) for width, kernel in config.conv]),
        "extractor_mode": "layer_norm" if config.conv_norm == "layer" else "default",
        "feature_grad_mult": config.feature_grad,
        "encoder_embed_dim": config.width,
        "encoder_layers": config.layers,
        "encoder_attention_heads": config.heads,
        "encoder_ffn_embed_dim": config.ffn,
        "conv_pos": config.position_kernel,
        "conv_pos_groups": config.position_groups,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "dropout_input": config.input_dropout,
        "dropout_features": config.feature_dropout,
        "latent_groups": config.codebooks,
        "latent_vars": config.codes,
        "latent_dim": config.code_width,
        "final_dim": config.projection,
        "latent_temp": [config.tau_start, config.tau_end, config.tau_decay],
        "apply_mask": True,
        "mask_prob": config.mask_share,
        "mask_length": config.mask_span,
    }
    model |= {key: value for key, value in _FIXED.items() if value is not None} | {"encoder_layerdrop": 0.0}
    return {"_name": None, "model": model, "task": {"_name": "ecg_pretraining"}, "criterion": {"_name": "wav2vec2_with_cmsc"}}
