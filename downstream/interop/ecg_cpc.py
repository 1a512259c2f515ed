"""Converts the published checkpoint of ECG-CPC (arXiv 2509.25095) to a model folder, with the input
of ECG-CPC.

    notes = from_ecg_cpc(Path("last.ckpt"), Path("OUT"))
    options, weights = options_and_weights(state)      # of engine.model.s4.S4, and its state_dict

Numbers keep their bits, but for C: it is turned to a basis that does not depend on the eigensolver. Of
what S4 freezes only the steps are taken; the rest must be HiPPO-LegS. Heads are left out. A
checkpoint does not state its input, which is ECG-CPC's: 240 Hz, limited to +-3 mV, 2.5 s at a time.

Source: AI4HealthUOL/ecg-fm-benchmarking.
"""

import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnilead.data_tools.ecg.constants import LEADS
from omnilead.engine.model.config import ModelConfig
from omnilead.engine.model.folder import (
    MAX_SHOWN_ITEMS,
    PREPROCESSING,
    describe_weight_mismatches,
    require_new_or_empty_folder,
    write_model,
)
from omnilead.engine.model.input import describe_input_format
from omnilead.engine.model.s4 import S4, conjugate_pair_basis
from omnilead.engine.settings.errors import ConfigError, blaming, join_first_names

from .conversion import float_tensors, preprocessing_document, read_tensors
from .hub import with_front_matter

Weights = dict[str, Tensor]
FIRST_WEIGHT = "encoder.layers.0.0.weight"
STEM_PREFIX = "encoder.layers"
LAYER_PREFIX, NORM_PREFIX = "predictor.predictor.s4_layers", "predictor.predictor.norms"
KERNEL = "kernel.kernel"
FROZEN_PARTS = ("B", "P", "Q", "w", "omega", "z")  # frozen weights of a kernel, besides log_dt
NETWORK_PREFIXES = ("encoder.", "predictor.")
# end of the name of a counter that batch norms have, but ours do not use
BATCH_COUNT_SUFFIX = "num_batches_tracked"
FS_HZ, CLIP_MV, WINDOW_S = 240.0, 3.0, 2.5
FROZEN_TOLERANCE = 1e-4  # largest relative error allowed in frozen weights, which are float32
ECG_CPC_HINT = "is it a checkpoint of ECG-CPC?"


def from_ecg_cpc(checkpoint: Path, out: Path) -> list[str]:
    """Writes a model folder from a checkpoint of ECG-CPC. Returns notes on what was left out and
    on what was assumed."""
    require_new_or_empty_folder(out)
    tensors = read_tensors(checkpoint)
    with blaming(str(checkpoint)):
        state = without_prefix(tensors)
    floats = {name: w for name, w in state.items() if not name.endswith(BATCH_COUNT_SUFFIX)}
    with blaming(str(checkpoint)):
        options, weights = options_and_weights(float_tensors(floats, checkpoint))
    config = ModelConfig(encoder="s4", options=options)
    preprocessing = preprocessing_document("millivolt", FS_HZ, [*LEADS], WINDOW_S) | {
        "clip_mv": CLIP_MV
    }
    parameters = sum(w.numel() for name, w in weights.items() if "running" not in name)
    card = with_front_matter({}, _model_card(checkpoint.name, options, preprocessing, parameters))
    encoder = {f"encoder.{name}": w for name, w in weights.items()}
    write_model(out, encoder, {"model": asdict(config)}, preprocessing, card)
    notes = [
        f"assumed ECG-CPC's input, which it does not state: {describe_input_format(preprocessing)}"
    ]
    if left := [name for name in state if not name.startswith(NETWORK_PREFIXES)]:
        notes.append(f"left out, as they are heads: {join_first_names(left, MAX_SHOWN_ITEMS)}")
    return notes


def _model_card(
    name: str, options: dict[str, Any], preprocessing: dict[str, Any], parameters: int
) -> str:
    return f"""# {name}, converted from ECG-CPC

An ECG encoder of {parameters:,} parameters: {len(options["kernels"])} convolutions and {options["layers"]} layers
of a structured state space (S4) of width {options["width"]}, pre-trained by contrastive predictive coding
(arXiv 2509.25095).

Input: {len(LEADS)} leads at {describe_input_format(preprocessing)}. See {PREPROCESSING}. The four windows
of a record of 10 s are averaged. The licence is that of the original.

    import omnilead
    model = omnilead.load("THIS_FOLDER")
    vectors = model.embed(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")    # [L, T] -> [{options["width"]}]
"""


def options_and_weights(state: Weights) -> tuple[dict[str, Any], Weights]:
    """Returns the options and the state_dict of our S4. The names in `state` may have a prefix, and
    `state` may include heads and counts of batches."""
    state = {
        name: w for name, w in without_prefix(state).items() if name.startswith(NETWORK_PREFIXES)
    }
    state = {name: w for name, w in state.items() if not name.endswith(BATCH_COUNT_SUFFIX)}
    options = read_options(state)
    with torch.device("meta"):
        expected = S4(len(LEADS), **options).state_dict()
    names = ecg_cpc_names(options)
    known = set(names.values())
    for number in range(options["layers"]):
        known |= {f"{LAYER_PREFIX}.{number}.{KERNEL}.{name}" for name in FROZEN_PARTS}
    if wrong := describe_weight_mismatches(dict.fromkeys(state, ()), dict.fromkeys(known, ())):
        raise ConfigError(f"the weights do not fit the model: {wrong}")
    weights: Weights = {}
    for name, tensor in expected.items():
        if name.endswith(BATCH_COUNT_SUFFIX):
            weights[name] = torch.zeros((), dtype=torch.int64)
            continue
        weight, shape = state[names[name]], list(tensor.shape)
        if not weight.isfinite().all():
            raise ConfigError(
                f"the weight {names[name]} has NaN or infinity: use another checkpoint"
            )
        if [size for size in weight.shape if size > 1] != [size for size in shape if size > 1]:
            raise ConfigError(
                f"{names[name]} has shape {list(weight.shape)}, not {shape}: {ECG_CPC_HINT}"
            )
        if name.endswith(".C"):
            weight = to_our_basis(state, names[name].removesuffix("C"), options["states"])
        weights[name] = weight.reshape(shape).float().clone()
    return options, weights


def without_prefix(state: Weights) -> Weights:
    """Returns the weights without the prefix that Lightning gives to the network's names, such as
    "model."."""
    prefixes = [name.removesuffix(FIRST_WEIGHT) for name in state if name.endswith(FIRST_WEIGHT)]
    if len(prefixes) != 1:
        raise ConfigError(
            f"{len(prefixes)} weights instead of one have a name that ends in {FIRST_WEIGHT}: {ECG_CPC_HINT}"
        )
    start = prefixes[0]
    return {name.removeprefix(start): w for name, w in state.items() if name.startswith(start)}


def read_options(state: Weights) -> dict[str, Any]:
    """Returns the options of S4, which follow from the shapes of its weights. Strides are not
    stored: as in ECG-CPC, the first convolution has stride 2, and the others 1."""
    first = f"{LAYER_PREFIX}.0.{KERNEL}"
    try:
        kernels = [
            state[f"{STEM_PREFIX}.{i}.0.weight"].shape[2]
            for i in range(count_layers(state, STEM_PREFIX))
        ]
        directions, width, pairs, _ = state[f"{first}.C"].shape
        length = 2 * (len(state[f"{first}.omega"]) - 1)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"some weights of S4 are missing ({error}): {ECG_CPC_HINT}") from None
    return {
        "width": width,
        "layers": count_layers(state, LAYER_PREFIX),
        "states": 2 * pairs,
        "bidirectional": directions == 2,
        "kernels": kernels,
        "strides": [2, *(1 for _ in kernels[1:])],
        "norm": "batch",
        "length": length,
    }


def count_layers(state: Weights, prefix: str) -> int:
    found = (re.match(rf"{re.escape(prefix)}\.(\d+)\.", name) for name in state)
    return len({match[1] for match in found if match})


def ecg_cpc_names(options: dict[str, Any]) -> dict[str, str]:
    names = {}
    for i in range(len(options["kernels"])):
        names[f"stem.{i}.weight"] = f"{STEM_PREFIX}.{i}.0.weight"
        for part in ("weight", "bias", "running_mean", "running_var"):
            names[f"stem.{i}.norm.{part}"] = f"{STEM_PREFIX}.{i}.1.{part}"
    for i in range(options["layers"]):
        ours, theirs = f"layers.{i}", f"{LAYER_PREFIX}.{i}"
        names[f"{ours}.space.C"] = f"{theirs}.{KERNEL}.C"
        names[f"{ours}.space.D"] = f"{theirs}.D"
        names[f"{ours}.space.log_dt"] = f"{theirs}.{KERNEL}.log_dt"
        for part in ("weight", "bias"):
            names[f"{ours}.linear.{part}"] = f"{theirs}.output_linear.0.{part}"
            names[f"{ours}.norm.{part}"] = f"{NORM_PREFIX}.{i}.{part}"
    return names


def to_our_basis(state: Weights, kernel: str, states: int) -> Tensor:
    """Returns C in our basis: multiplied by the phases of P, because each eigenvector of the
    checkpoint has a phase of its own, which is also in P. Raises ConfigError if P, B or w are not
    those of HiPPO-LegS."""
    c, p, b, w = (torch.view_as_complex(state[kernel + name].double()) for name in "CPBw")
    phase = p / p.abs()
    expected_w, expected_p, _ = conjugate_pair_basis(states)
    for name, given, expected in (
        ("P", p.abs(), expected_p),
        ("B", b / phase, expected_p * math.sqrt(2)),
        ("w", w, expected_w),
    ):
        if np.abs(given.numpy() - expected).max() > FROZEN_TOLERANCE * np.abs(expected).max():
            raise ConfigError(
                f"{kernel}{name} is not that of HiPPO-LegS, which is all that S4 supports here"
            )
    return torch.view_as_real(c * phase).float()
