"""Converts weights and settings from and to fairseq-signals, exactly.

    weights_from_fairseq(state, config)     our state_dict
    weights_to_fairseq(state, config)       that of fairseq-signals
    read_model_config(cfg)         ModelConfig

Only names, concatenation and the order of axes change: every number keeps its bits. Source: state
dicts of fairseq-signals (models/wav2vec2/wav2vec2_cmsc.py and the modules it uses). The weight norm
of the positional convolution is named weight_g / weight_v before 2025-01-20 and
parametrizations.weight.original0 / original1 since then. A classifier
(models/classification/ecg_transformer_classifier.py) has its encoder under `encoder.`, with or
without the mask embedding, and a linear layer `proj` instead of the heads of pre-training.
"""

import ast
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from omnilead.engine.model.config import ModelConfig, ObjectiveConfig, parse_settings
from omnilead.engine.model.folder import describe_weight_mismatches
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.leads import ALL_LEADS, describe_leads

WEIGHT_NORM_KEYS = {
    "parametrizations": ("parametrizations.weight.original0", "parametrizations.weight.original1"),
    "weight_g": ("weight_g", "weight_v"),
}
CONVOLUTION_WEIGHT = re.compile(r"encoder\.conv\.blocks\.(\d+)\.weight")
# our conv_norm for each extractor_mode of fairseq-signals
CONV_NORM_OF_MODE = {"default": "group", "layer_norm": "layer"}
# errors by ast.literal_eval, and by the conversion of its result, for malformed text
MALFORMED_ERRORS = (
    SyntaxError,
    TypeError,
    LookupError,
    ValueError,
    OverflowError,
    RecursionError,
    MemoryError,
)
# limits for settings given as text: convolution blocks, and characters
MAX_BLOCKS, MAX_TEXT = 64, 1000
LAYER_MODULES = {  # modules of a transformer layer: {our name: the names in fairseq-signals}
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.out_proj",),
    "norm1": ("self_attn_layer_norm",),
    "fc1": ("fc1",),
    "fc2": ("fc2",),
    "norm2": ("final_layer_norm",),
}
TASK_SETTINGS = {
    "_name": "ecg_pretraining",
    "sample_rate": 500,
    "normalize": False,
    "filter": False,
}
Value = TypeVar("Value")
Weights = dict[str, Tensor]
Settings = dict[str, Any]
SETTING_NAMES = {  # {our name of a setting: (its name in fairseq-signals, its default there)}
    "leads": ("in_d", 12),
    "feature_grad": ("feature_grad_mult", 0.1),
    "width": ("encoder_embed_dim", None),
    "layers": ("encoder_layers", None),
    "heads": ("encoder_attention_heads", None),
    "ffn": ("encoder_ffn_embed_dim", 3072),
    "position_kernel": ("conv_pos", 128),
    "position_groups": ("conv_pos_groups", 16),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "activation_dropout": ("activation_dropout", 0.0),
    "input_dropout": ("dropout_input", 0.0),
    "feature_dropout": ("dropout_features", 0.0),
    "codebooks": ("latent_groups", 2),
    "codes": ("latent_vars", 320),
    "code_width": ("latent_dim", 0),  # 0 means the value of `projection`
    "projection": ("final_dim", 256),  # 0 means the value of `width`
    "mask_share": ("mask_prob", 0.65),
    "mask_span": ("mask_length", 10),
}
# settings of fairseq-signals that change the computation: {name: the only value supported here}
FIXED_SETTINGS = {
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
}


def weight_norm_spelling(state: Weights) -> str:
    if any(name.endswith("conv_pos.pos_conv.0.weight_g") for name in state):
        return "weight_g"
    return "parametrizations"


def output_count(state: Weights) -> int:
    """Returns the number of outputs of a classifier, or 0 for a model that is only pre-trained. The
    weights may have our names or those of fairseq-signals."""
    is_theirs = any(name.startswith("encoder.feature_extractor.") for name in state)
    head = state.get("proj.weight" if is_theirs else "head.weight")
    return len(head) if head is not None and head.ndim else int(is_theirs)


def fairseq_names(
    config: ModelConfig, spelled: str = "parametrizations", classifier: bool = False
) -> dict[str, list[str]]:
    """Returns {our name of a weight: its names in fairseq-signals}. There are several names if our
    weight is the concatenation of several weights there."""
    table: dict[str, list[str]] = {}

    def add_names(ours: str, *theirs: str) -> None:
        """Adds the weight and the bias of a module to the table."""
        for kind in ("weight", "bias"):
            table[f"{ours}.{kind}"] = [f"{their}.{kind}" for their in theirs]

    add_names("encoder.feature_norm", "layer_norm")
    add_names("encoder.norm", "encoder.layer_norm")
    if config.feature_width != config.width:
        add_names("encoder.project", "post_extract_proj")
    for i in range(len(config.conv)):
        block, their = f"encoder.conv.blocks.{i}", f"feature_extractor.conv_layers.{i}"
        table[f"{block}.weight"] = [f"{their}.0.weight"]
        if config.conv_norm == "layer":
            add_names(f"{block}.norm", f"{their}.2.1")
        elif i == 0:
            add_names(f"{block}.norm", f"{their}.2")
    for i in range(config.layers):
        layer = f"encoder.layers.{i}"
        for ours, theirs in LAYER_MODULES.items():
            add_names(f"{layer}.{ours}", *(f"{layer}.{their}" for their in theirs))
    gain, direction = WEIGHT_NORM_KEYS[spelled]
    for name, their in (("gain", gain), ("direction", direction), ("bias", "bias")):
        table[f"encoder.position.{name}"] = [f"conv_pos.pos_conv.0.{their}"]
    table["encoder.mask_embedding"] = ["mask_emb"]
    if classifier:
        for parts in table.values():
            parts[:] = [f"encoder.{part}" for part in parts]
        add_names("head", "proj")
        return table
    add_names("local.quantizer.logits", "quantizer.weight_proj")
    add_names("local.target", "project_q")
    add_names("local.context", "final_proj")
    table["local.quantizer.codebook"] = ["quantizer.vars"]
    return table


def meta_weights(config: ModelConfig, state: Weights) -> Weights:
    """Returns all weights of our model as meta tensors, which have a shape but no numbers. The model
    is a classifier if `state` is the state_dict of one, by our names or those of fairseq-signals."""
    with torch.device("meta"):
        weights = dict(Pretrainer(config, ObjectiveConfig()).state_dict())
        classes = output_count(state)
        if not classes:
            return weights
        encoder = {name: w for name, w in weights.items() if name.startswith("encoder.")}
        if not any("mask_emb" in name for name in state):
            del encoder["encoder.mask_embedding"]
        encoder["head.weight"] = torch.empty(classes, config.width)
        encoder["head.bias"] = torch.empty(classes)
        return encoder


def weights_from_fairseq(state: Weights, config: ModelConfig) -> Weights:
    spelled, our_weights = weight_norm_spelling(state), meta_weights(config, state)
    _require_shapes(state, _convert_to_fairseq(our_weights, config, spelled))
    converted = {}
    for name, parts in _names_in_state(our_weights, config, spelled).items():
        weights = torch.cat([state[part] for part in parts]) if len(parts) > 1 else state[parts[0]]
        if CONVOLUTION_WEIGHT.fullmatch(name):  # from [out, in, kernel] to [out, kernel * in]
            weights = weights.transpose(1, 2)
        converted[name] = weights.reshape(our_weights[name].shape).contiguous()
    return converted


def weights_to_fairseq(
    state: Weights, config: ModelConfig, spelled: str = "parametrizations"
) -> Weights:
    _require_shapes(state, meta_weights(config, state))
    return _convert_to_fairseq(state, config, spelled)


def _names_in_state(state: Weights, config: ModelConfig, spelled: str) -> dict[str, list[str]]:
    """Returns {our name: the names in fairseq-signals} for the weights in `state`."""
    table = fairseq_names(config, spelled, output_count(state) > 0)
    return {name: parts for name, parts in table.items() if name in state}


def _convert_to_fairseq(state: Weights, config: ModelConfig, spelled: str) -> Weights:
    renamed: Weights = {}
    for name, parts in _names_in_state(state, config, spelled).items():
        weights = state[name]
        if block := CONVOLUTION_WEIGHT.fullmatch(name):
            _, kernel = config.conv[int(block[1])]
            weights = weights.unflatten(1, (kernel, -1)).transpose(1, 2)
        elif name.endswith("codebook"):
            weights = weights.flatten(0, 1)[None]
        for part, w in zip(parts, weights.chunk(len(parts)), strict=True):
            renamed[part] = w.contiguous().clone()
    return renamed


def _require_shapes(state: Weights, expected: Weights) -> None:
    if wrong := describe_weight_mismatches(shapes_of(state), shapes_of(expected)):
        raise ConfigError(f"the weights do not fit the model: {wrong}")


def shapes_of(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(w.shape) for name, w in weights.items()}


def read_model_config(cfg: Settings) -> ModelConfig:
    """Returns the model settings in the section `model` of a fairseq-signals configuration. If the
    section of a classifier contains that of its pre-trained model, the inner one is read instead."""
    for key in ("args", "w2v_args"):
        inner = cfg.get(key)
        if isinstance(inner, dict) and isinstance(inner.get("model"), dict):
            cfg = inner["model"]
    values = {ours: cfg.get(theirs, default) for ours, (theirs, default) in SETTING_NAMES.items()}
    for ours, value in values.items():
        if value is None:
            raise ConfigError(
                f"the checkpoint's settings lack model.{SETTING_NAMES[ours][0]}: is it a wav2vec 2.0 "
                "model of fairseq-signals?"
            )
    for key, value in FIXED_SETTINGS.items():
        if cfg.get(key, value) != value:
            raise ConfigError(
                f"model.{key}={str(cfg[key])[:80]!r} in the checkpoint's settings: only {value!r} "
                "can be read"
            )
    values["projection"] = values["projection"] or values["width"]
    values["code_width"] = values["code_width"] or values["projection"]
    values["conv_norm"] = read_setting(
        "model",
        cfg,
        "extractor_mode",
        "default",
        CONV_NORM_OF_MODE.__getitem__,
        "default or layer_norm",
    )
    stack = "[(width, kernel, stride), ...] with kernel = stride"
    values["conv"] = read_setting(
        "model", cfg, "conv_feature_layers", "[(256, 2, 2)] * 4", _parse_blocks, stack
    )
    values |= read_setting(
        "model",
        cfg,
        "latent_temp",
        (2.0, 0.5, 0.999995),
        _parse_temperatures,
        "(start, end, decay)",
    )
    return parse_settings(ModelConfig, values, "model")


def read_setting(
    section: str, cfg: Settings, key: str, default: Any, parse: Callable[[Any], Value], form: str
) -> Value:
    value = cfg.get(key, default)
    try:
        return parse(value)
    except (*MALFORMED_ERRORS, ConfigError) as error:
        raise ConfigError(
            f"{section}.{key}={repr(value)[:80]} in the checkpoint's settings: must be {form}"
        ) from error


def _parse_temperatures(value: Any) -> dict[str, float]:
    numbers = ast.literal_eval(value[:MAX_TEXT]) if isinstance(value, str) else value
    return dict(zip(("tau_start", "tau_end", "tau_decay"), map(float, numbers), strict=True))


def _parse_blocks(value: Any) -> list[tuple[int, int]]:
    """Parses the text of a stack of convolutions, which fairseq-signals passes to eval(). For
    example, "[(256, 2, 2)] * 3 + [(512, 2, 2)]" gives four blocks."""
    text, layers = str(value), list[tuple[int, int, int]]()
    if len(text) > MAX_TEXT:
        raise ValueError
    for term in text.split("+"):
        stack, _, times = term.strip().rpartition("]")
        layers += ast.literal_eval(stack + "]") * min(int(times.strip(" *") or 1), MAX_BLOCKS + 1)
    if not 0 < len(layers) <= MAX_BLOCKS or any(kernel != stride for _, kernel, stride in layers):
        raise ValueError
    return [(width, kernel) for width, kernel, _ in layers]


def fairseq_settings(config: ModelConfig, seen: tuple[int, ...] = ALL_LEADS) -> Settings:
    """Returns the part of a fairseq-signals configuration from which it can build one of our models:
    cfg.model, cfg.task and cfg.criterion. `seen`: the leads on which the model was trained."""
    model = {"_name": "wav2vec2_cmsc", "apply_mask": True, "encoder_layerdrop": 0.0}
    model |= {
        theirs: getattr(config, ours) for ours, (theirs, _) in SETTING_NAMES.items()
    } | FIXED_SETTINGS
    model["conv_feature_layers"] = str([(width, kernel, kernel) for width, kernel in config.conv])
    model["extractor_mode"] = "layer_norm" if config.conv_norm == "layer" else "default"
    model["latent_temp"] = [config.tau_start, config.tau_end, config.tau_decay]
    task: Settings = dict(TASK_SETTINGS)
    if seen != ALL_LEADS:
        task["leads_to_load"] = str(describe_leads(seen).split(","))
        task["enable_padding_leads"] = len(seen) < config.leads
    return {
        "_name": None,
        "model": model,
        "task": task,
        "criterion": {"_name": "wav2vec2_with_cmsc"},
    }
