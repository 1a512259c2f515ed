"""The weights of ECG-CPC (2509.25095) by our names.

    options, weights = from_theirs(state)      # of engine.model.s4.S4, and its state_dict

Numbers keep their bits, but for C: it is turned to a basis that does not depend on the eigensolver. Of
what S4 freezes only the steps are taken; the rest must be HiPPO-LegS. The head of pre-training is left
out.

Source: AI4HealthUOL/ecg-fm-benchmarking.
"""

import math
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnilead.engine.model.folder import misfits
from omnilead.engine.model.s4 import S4, conjugate_pairs
from omnilead.engine.settings.errors import ConfigError

Weights = dict[str, Tensor]
FIRST = "encoder.layers.0.0.weight"
STEM = "encoder.layers"
LAYER, NORM = "predictor.predictor.s4_layers", "predictor.predictor.norms"
KERNEL = "kernel.kernel"
FROZEN = ("B", "P", "Q", "w", "omega", "z")  # of a kernel, besides log_dt
HEAD = "head_ssl."
CLOSE = 1e-4  # of what is frozen, which they store in float32
NOT_THEIRS = "is it a checkpoint of ECG-CPC?"


def from_theirs(state: Weights) -> tuple[dict[str, Any], Weights]:
    state = {name: w for name, w in without_prefix(state).items() if not name.startswith(HEAD)}
    options = options_of(state)
    with torch.device("meta"):
        expected = S4(12, **options).state_dict()
    names = their_names(options)
    shapes = {name: tuple(w.shape) for name, w in state.items()}
    known = set(names.values())
    for number in range(options["layers"]):
        known |= {f"{LAYER}.{number}.{KERNEL}.{name}" for name in FROZEN}
    wrong = misfits(dict.fromkeys(shapes, ()), dict.fromkeys(known, ()))
    if wrong:
        raise ConfigError(f"the weights do not fit the model: {wrong}")
    weights = {}
    for name, theirs in names.items():
        weight = state[theirs]
        if name.endswith(".C"):
            weight = turned(state, theirs.removesuffix("C"), options["states"])
        if weight.numel() != expected[name].numel():
            shape = list(expected[name].shape)
            raise ConfigError(f"{theirs} is {list(weight.shape)}, not {shape}: {NOT_THEIRS}")
        weights[name] = weight.reshape(expected[name].shape).clone()
    return options, weights


def without_prefix(state: Weights) -> Weights:
    """Lightning names weights by where the module keeps the network, such as model."""
    prefixes = [name.removesuffix(FIRST) for name in state if name.endswith(FIRST)]
    if len(prefixes) != 1:
        raise ConfigError(f"{len(prefixes)} weights end in {FIRST}: {NOT_THEIRS}")
    start = prefixes[0]
    return {name.removeprefix(start): w for name, w in state.items() if name.startswith(start)}


def options_of(state: Weights) -> dict[str, Any]:
    """What the shapes say. Strides are not stored: two in the first convolution, as theirs are."""
    first = f"{LAYER}.0.{KERNEL}"
    try:
        kernels = [state[f"{STEM}.{i}.0.weight"].shape[2] for i in range(count(state, STEM))]
        directions, width, pairs, _ = state[f"{first}.C"].shape
        length = 2 * (len(state[f"{first}.omega"]) - 1)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"no weights of S4 ({error}): {NOT_THEIRS}") from None
    return {
        "width": width,
        "layers": count(state, LAYER),
        "states": 2 * pairs,
        "bidirectional": directions == 2,
        "kernels": kernels,
        "strides": [2, *(1 for _ in kernels[1:])],
        "norm": "batch",
        "length": length,
    }


def count(state: Weights, prefix: str) -> int:
    found = (re.match(rf"{re.escape(prefix)}\.(\d+)\.", name) for name in state)
    return len({match[1] for match in found if match})


def their_names(options: dict[str, Any]) -> dict[str, str]:
    names = {}
    for i in range(len(options["kernels"])):
        names[f"stem.{i}.weight"] = f"{STEM}.{i}.0.weight"
        for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            names[f"stem.{i}.norm.{part}"] = f"{STEM}.{i}.1.{part}"
    for i in range(options["layers"]):
        ours, theirs = f"layers.{i}", f"{LAYER}.{i}"
        names[f"{ours}.space.C"] = f"{theirs}.{KERNEL}.C"
        names[f"{ours}.space.D"] = f"{theirs}.D"
        names[f"{ours}.space.log_dt"] = f"{theirs}.{KERNEL}.log_dt"
        for part in ("weight", "bias"):
            names[f"{ours}.linear.{part}"] = f"{theirs}.output_linear.0.{part}"
            names[f"{ours}.norm.{part}"] = f"{NORM}.{i}.{part}"
    return names


def turned(state: Weights, kernel: str, states: int) -> Tensor:
    """C in our basis. Each of their eigenvectors has a phase of its own, which their P has too."""
    c, p, b, w = (torch.view_as_complex(state[kernel + name].double()) for name in "CPBw")
    phase = p / p.abs()
    expected_w, expected_p, _ = conjugate_pairs(states)
    for name, given, expected in (
        ("P", p.abs(), expected_p),
        ("B", b / phase, expected_p * math.sqrt(2)),
        ("w", w, expected_w),
    ):
        if np.abs(given.numpy() - expected).max() > CLOSE * np.abs(expected).max():
            raise ConfigError(f"{kernel}{name} is not that of HiPPO-LegS, the only one S4 has here")
    return torch.view_as_real(c * phase).float()
