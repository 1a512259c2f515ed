"""Reference numbers of the authors' implementation, read and checked: what engine.parity compares with.

cases = read_cases(DIR)                     settings, weights, inputs, draws and what followed from them
draws = draws_of(arrays, config)            their draws in our form
"""

import ast
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.data.npz import load_npz
from engine.model.config import ModelConfig, ObjectiveConfig
from engine.model.draws import Draws, count_negatives, slots
from engine.model.fairseq import settings

STATE = "_state_dict.safetensors"
_NEEDED = ("source", "mask_indices", "neg_idxs", "patient_id", "segment")
_NEEDED_TRAIN = ("gumbel_noise", "temp")
INPUTS = frozenset(_NEEDED + _NEEDED_TRAIN)
_KINDS = {"mask_indices": "b", "neg_idxs": "iu", "patient_id": "iu", "segment": "iu"}  # of dtypes; of all others f
_UNCOMPARED = ("rlm_survivors", "num_vars", "count")  # what the source was made from, and what the settings say already
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class InputError(Exception):
    """DIR is not what it must be: one line."""


class Adam(NamedTuple):
    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float


@dataclass(frozen=True)
class Case:
    name: str
    config: ModelConfig
    objective: ObjectiveConfig
    adam: Adam
    state: dict[str, Tensor]
    files: dict[str, dict[str, np.ndarray]]  # eval, train
    gradients: dict[str, Tensor]  # both may lack some or all
    after: dict[str, Tensor]
    absent: list[str]  # files and weights of `train` that are not there, if others are


def read_cases(folder: Path) -> list[Case]:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such directory")
    ends = (STATE, "_eval.npz", "_train.npz")
    names = sorted({path.name.removesuffix(end) for end in ends for path in folder.glob("*" + end)})
    if not names:
        raise InputError(f"{folder}: holds no NAME{STATE} with NAME_cfg.json beside it")
    return [_read_case(name, folder / (name + STATE)) for name in names]


def _read_case(name: str, path: Path) -> Case:
    folder = path.parent
    try:
        cfg = json.loads((folder / f"{name}_cfg.json").read_text())
        state = _weights(path)
        files = {}
        for mode in ("eval", "train"):
            if (folder / f"{name}_{mode}.npz").exists():
                arrays = load_npz(folder / f"{name}_{mode}.npz")
                files[mode] = {key: array for key, array in arrays.items() if key not in _UNCOMPARED}
        more = [folder / f"{name}_train_grads_of_sum_loss.safetensors", folder / f"{name}_state_dict_after_3_steps.safetensors"]
        whole = [folder / f"{name}_train.npz", *more]
        absent = [p.name for p in whole if not p.exists()]
        absent = absent if len(absent) < len(whole) else []
        gradients, after = (_weights(p) if p.exists() else {} for p in more)
        config = replace(settings(cfg["model"]), dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
        config = replace(config, input_dropout=0.0, feature_dropout=0.0)  # dropouts were off when the reference was made
        objective = _objective(cfg)
        o = cfg["optimizer"]
        one, two = map(float, ast.literal_eval(str(o["adam_betas"])))
        adam = Adam(float(cfg["optimization"]["lr"][0]), (one, two), float(o["adam_eps"]), float(o["weight_decay"]))
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        SyntaxError,
        RecursionError,
        safetensors.SafetensorError,
    ) as error:
        raise InputError(f"{folder}, case {name}: cannot be read: {type(error).__name__}: {error}".splitlines()[0]) from error
    if not files:
        raise InputError(f"{folder}: case {name} has neither {name}_eval.npz nor {name}_train.npz")
    for mode, arrays in files.items():
        label = f"{folder}/{name}_{mode}.npz"
        files[mode] = _native(label, arrays)
        _check_arrays(label, files[mode], config, mode, objective.negatives)
    for p, reference in zip(more, (gradients, after), strict=True):
        odd = [n for n in sorted(reference) if n not in state or state[n].shape != reference[n].shape]
        if odd:
            raise InputError(f"{p}: {', '.join(odd)}: names and shapes must be those of {path.name}")
        absent += [f"{n} of {p.name}" for n in sorted(state) if p.exists() and n not in reference]
    return Case(name, config, objective, adam, state, files, gradients, after, absent)


def _weights(path: Path) -> dict[str, Tensor]:
    weights = load_file(path)
    odd = [f"{name} ({w.dtype})" for name, w in weights.items() if w.dtype not in _FLOATS]
    if odd:
        raise InputError(f"{path}: {', '.join(odd)}: must be floating point")
    return weights


def _native(name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As torch takes them: of few types, in this machine's byte order."""
    odd = [f"{key} ({array.dtype})" for key, array in arrays.items() if array.dtype.kind not in _KINDS.get(key, "f")]
    if odd:
        raise InputError(f"{name}: {', '.join(odd)}: masks must be bool, negatives, ids and segments integer, all else float")
    types = {"b": np.bool_, "i": np.int64, "u": np.int64}
    return {
        key: array.astype(types.get(array.dtype.kind, np.float64 if array.dtype.itemsize > 4 else np.float32))
        for key, array in arrays.items()
    }


def _objective(cfg: dict[str, Any]) -> ObjectiveConfig:
    model, criterion = cfg["model"], cfg["criterion"]
    diversity, features = criterion.get("loss_weights") or (0.0, 0.0)
    if model["logit_temp"] != criterion["temp"]:
        raise InputError(f"model.logit_temp={model['logit_temp']} and criterion.temp={criterion['temp']} differ: not supported")
    weights = criterion.get("cmsc_weights")
    return ObjectiveConfig(
        diversity=diversity,
        features=features,
        contrast=1.0 if weights is None else float(weights[0] if isinstance(weights, list) else weights),
        form="authors",
        temperature=model["logit_temp"],
        negatives=model["num_negatives"],
        gathered=False,
    )


def _check_arrays(name: str, arrays: dict[str, np.ndarray], config: ModelConfig, mode: str, negatives: int) -> None:
    missing = [key for key in _NEEDED + _NEEDED_TRAIN * (mode == "train") if key not in arrays]
    if missing:
        raise InputError(f"{name}: lacks {', '.join(missing)}")
    source, mask = arrays["source"], arrays["mask_indices"]
    if source.ndim != 3 or source.shape[1] != config.leads or len(source) % 2:
        raise InputError(f"{name}: source is {source.shape}: must be [2 x pairs, {config.leads} leads, samples]")
    if mask.shape != (len(source), config.tokens(source.shape[2])) or len(set(mask.sum(1).tolist())) != 1 or not mask.any():
        raise InputError(f"{name}: mask_indices is {mask.shape}: must mask equally many tokens of each segment")
    if not np.array_equal(arrays["segment"], np.arange(len(source)) % 2):
        raise InputError(f"{name}: segment is not 0, 1, 0, 1, ...: pairs must lie side by side")
    masked, codes = int(mask.sum()), config.codebooks * config.codes
    sizes = {"neg_idxs": masked * negatives, "gumbel_noise": masked * codes}
    wrong = [key for key, size in sizes.items() if key in arrays and arrays[key].size != size]
    shapes: dict[str, tuple[int, ...]] = {"patient_id": (len(source),), "temp": ()}
    wrong += [key for key, shape in shapes.items() if key in arrays and arrays[key].shape != shape]
    if wrong:
        raise InputError(f"{name}: {', '.join(wrong)} does not fit {len(source)} segments with {masked} masked tokens")


def draws_of(arrays: dict[str, np.ndarray], config: ModelConfig, count: int | None = None) -> Draws:
    """Their draws in our form; `count` slots instead of as many as are used."""
    mask_RN = torch.from_numpy(arrays["mask_indices"])
    rows, used = len(mask_RN), int(mask_RN.sum(1)[0])
    slot_RM, valid_RM = slots(mask_RN, count or used)
    spare = slot_RM.shape[1] - used
    first_R11 = torch.arange(0, rows * used, used)[:, None, None]
    other_RMK = torch.from_numpy(arrays["neg_idxs"]).view(rows, used, -1) - first_R11
    if other_RMK.min() < 0 or other_RMK.max() >= used:
        raise InputError("neg_idxs: a negative lies in another segment, which these losses do not know")
    times_RMM = nn.functional.pad(count_negatives(other_RMK, used), (0, spare, 0, spare))
    noise = None
    if "gumbel_noise" in arrays:
        noise = torch.from_numpy(arrays["gumbel_noise"]).view(rows, used, config.codebooks, config.codes)
        noise = nn.functional.pad(noise, (0, 0, 0, 0, 0, spare))
    return Draws(mask_RN, slot_RM, valid_RM, times_RMM, noise)
