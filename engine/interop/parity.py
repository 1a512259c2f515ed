"""Compare our model with the authors', quantity by quantity, for the same weights, inputs and
random draws.

    for comparison in compare(DIR): print(comparison.quantity, comparison.error, comparison.holds)

engine/parity.py describes the files in DIR. The three optimiser steps repeat the same batch with
the authors' Adam (fairseq-signals optim/adam.py:81-209): weight decay on every parameter before the
update; eps is added outside the square root and before the bias correction.
"""

import ast
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from omnilead.data_tools.cli import tell
from omnilead.engine.common import ConfigError
from omnilead.engine.inference.npz import load_npz
from omnilead.engine.interop.fairseq import from_theirs, settings, spelling, to_theirs
from omnilead.engine.model.config import ModelConfig, ObjectiveConfig
from omnilead.engine.model.draws import Draws, count_negatives, slots
from omnilead.engine.model.pretrainer import Pretrainer

INPUTS = {"source", "mask_indices", "neg_idxs", "patient_id", "segment", "gumbel_noise", "temp"}
NOT_COMPARED = {"rlm_survivors", "num_vars", "count"}  # how the source was made; values of settings
LOSS, TENSOR, GRADIENT, PARAMETER = 1e-5, 2e-5, 1e-4, 1e-4  # largest allowed errors
CHANGE = 5e-4  # our error is 2e-4; it would be 1.2e-3 without weight decay
STEPS = 3


class Adam(NamedTuple):
    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float


@dataclass(frozen=True)
class ReferenceCase:
    name: str
    config: ModelConfig
    objective: ObjectiveConfig
    adam: Adam
    state: dict[str, Tensor]
    arrays: dict[str, dict[str, np.ndarray]]  # eval, train
    gradients: dict[str, Tensor]
    after: dict[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    case: str
    quantity: str
    error: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.error <= self.limit  # False for NaN


def read_case(folder: Path, name: str) -> ReferenceCase:
    cfg = json.loads((folder / f"{name}_cfg.json").read_text())
    model, criterion, optimizer = cfg["model"], cfg["criterion"], cfg["optimizer"]
    if model["logit_temp"] != criterion["temp"]:
        raise ConfigError(
            f"model.logit_temp={model['logit_temp']} and criterion.temp={criterion['temp']} "
            "differ: not supported"
        )
    diversity, features = criterion.get("loss_weights") or (0.0, 0.0)
    contrast = criterion.get("cmsc_weights", 1.0)
    objective = ObjectiveConfig(
        diversity=diversity,
        features=features,
        contrast=1.0
        if contrast is None
        else float(contrast[0] if isinstance(contrast, list) else contrast),
        form="authors",
        temperature=model["logit_temp"],
        negatives=model["num_negatives"],
        gathered=False,
    )
    first, second = map(float, ast.literal_eval(str(optimizer["adam_betas"])))
    lr, eps, decay = map(
        float, (cfg["optimization"]["lr"][0], optimizer["adam_eps"], optimizer["weight_decay"])
    )
    arrays, state = {}, load_file(folder / f"{name}_state_dict.safetensors")
    for mode in ("eval", "train"):
        if (folder / f"{name}_{mode}.npz").exists():
            arrays[mode] = load_npz(folder / f"{name}_{mode}.npz")
            check_pairs(arrays[mode], f"{name}_{mode}.npz")
    optional = [
        f"{name}_train_grads_of_sum_loss.safetensors",
        f"{name}_state_dict_after_3_steps.safetensors",
    ]
    gradients, after = (
        load_file(folder / file) if (folder / file).exists() else {} for file in optional
    )
    off = dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout", "dropout_input", "dropout_features"),
        0.0,
    )
    config = settings(model | off)  # the reference was made without dropout
    for file, weights in zip(optional, (gradients, after), strict=True):
        if missing := sorted(state.keys() - weights.keys()):
            tell(f"warning: {name}: not compared, as {file} lacks them: {', '.join(missing)}")
    return ReferenceCase(
        name,
        config,
        objective,
        Adam(lr, (first, second), eps, decay),
        state,
        arrays,
        gradients,
        after,
    )


def check_pairs(arrays: dict[str, np.ndarray], file: str) -> None:
    if not np.array_equal(arrays["segment"], np.arange(len(arrays["source"])) % 2):
        raise ConfigError(f"{file}: segment is not 0, 1, 0, 1, ...: pairs must be adjacent")
    if len(set(arrays["mask_indices"].sum(1).tolist())) != 1:
        raise ConfigError(
            f"{file}: mask_indices must mask the same number of tokens in every segment"
        )
    if arrays.keys() <= INPUTS:
        raise ConfigError(f"{file}: has only inputs: add results, such as logits_NBM")


def draws_of(arrays: dict[str, np.ndarray], config: ModelConfig) -> Draws:
    """The authors' draws in our format."""
    mask_RN = torch.from_numpy(arrays["mask_indices"])
    rows, used = len(mask_RN), int(mask_RN.sum(1)[0])
    slot_RM, valid_RM = slots(mask_RN, used)
    other_RMK = (
        torch.from_numpy(arrays["neg_idxs"]).view(rows, used, -1)
        - torch.arange(0, rows * used, used)[:, None, None]
    )
    if other_RMK.min() < 0 or other_RMK.max() >= used:
        raise ConfigError("neg_idxs: a negative is from another segment, which is not supported")
    noise = None
    if "gumbel_noise" in arrays:
        noise = torch.from_numpy(arrays["gumbel_noise"]).view(
            rows, used, config.codebooks, config.codes
        )
    return Draws(mask_RN, slot_RM, valid_RM, count_negatives(other_RMK, used), noise)


class Runner:
    """One case in one mode: our model with the authors' weights, its losses, and the outputs of its
    parts."""

    def __init__(self, case: ReferenceCase, mode: str) -> None:
        self.case, self.arrays = case, case.arrays[mode]
        self.model = Pretrainer(case.config, case.objective).train(mode == "train")
        self.model.load_state_dict(from_theirs(case.state, case.config))
        self.draws = draws_of(self.arrays, case.config)
        source = torch.from_numpy(self.arrays["source"])
        self.x_BSLT, self.ids_B = (
            source.unflatten(0, (-1, 2)),
            torch.from_numpy(self.arrays["patient_id"])[::2],
        )
        self.tau = torch.tensor(float(self.arrays.get("temp", 1)))
        self.outputs: dict[str, Tensor] = {}

    def losses(self) -> dict[str, Tensor]:
        return dict(self.model(self.x_BSLT, tau=self.tau, ids_B=self.ids_B, draws=self.draws))

    def losses_and_outputs(self) -> dict[str, Tensor]:
        """Compute the losses, and store the output of every part in `outputs` under its name in the
        reference."""
        encoder, local, config = self.model.encoder, self.model.local, self.case.config
        assert local is not None
        parts: dict[str, tuple[nn.Module, Callable[[Any], Tensor]]] = {
            "conv_features": (encoder.conv, lambda y: y.transpose(1, 2)),
            "features_layer_norm": (encoder.feature_norm, lambda y: y),
            "post_extract_proj": (encoder.project, lambda y: y),
            "conv_pos_out": (encoder.position, lambda y: y),
            "encoder_input_ln": (encoder.norm, lambda y: y),
            "quantizer_logits": (
                local.quantizer.logits,
                lambda y: y.reshape(-1, config.codebooks * config.codes),
            ),
            "quantized": (local.quantizer, lambda y: y.values_RMP),
            "projected_targets": (local.target, lambda y: y),
            "final_proj_out": (local.context, lambda y: y),
        }
        parts |= {
            f"conv_block{i}": (block, lambda y: y.transpose(1, 2))
            for i, block in enumerate(encoder.conv.blocks)
        }
        parts |= {
            f"encoder_layer{i}_TBC": (layer, lambda y: y.transpose(0, 1))
            for i, layer in enumerate(encoder.layers)
        }

        def keep(name: str, x: Tensor) -> None:
            self.outputs[name] = x

        hooks = [
            part.register_forward_hook(lambda _, x, y, name=name, form=form: keep(name, form(y)))
            for name, (part, form) in parts.items()
        ]
        for name, part in (("masked_input", encoder.position), ("quantizer_in", local.quantizer)):
            hooks.append(part.register_forward_pre_hook(lambda _, x, name=name: keep(name, x[0])))
        losses = self.losses()
        for hook in hooks:
            hook.remove()
        last = self.outputs[f"encoder_layer{config.layers - 1}_TBC"]
        self.outputs |= {
            "transformer_features": last.transpose(0, 1),
            "global_mean_pooled": last.mean(0),
        }
        self.outputs["logits_NBM"] = self._logits()
        return losses

    def _logits(self) -> Tensor:
        """[1 + K, R, M] logits as the authors gather them, taken from our Gram matrix."""
        x_RMP, y_RMP = (
            nn.functional.normalize(self.outputs[key], dim=-1)
            for key in ("final_proj_out", "projected_targets")
        )
        s_RMM = torch.bmm(x_RMP, y_RMP.transpose(1, 2)) / self.case.objective.temperature
        codes_RMP = self.outputs["quantized"]
        same_RMM = (codes_RMP[:, :, None] == codes_RMP[:, None]).all(-1)
        other_RMK = (
            torch.from_numpy(self.arrays["neg_idxs"]).view(*s_RMM.shape[:2], -1) % s_RMM.shape[1]
        )
        negative_RMK = s_RMM.masked_fill(same_RMM, -torch.inf).gather(2, other_RMK)
        return torch.cat([s_RMM.diagonal(dim1=1, dim2=2)[..., None], negative_RMK], -1).permute(
            2, 0, 1
        )


def compare_case(case: ReferenceCase) -> Iterator[Comparison]:
    for mode, arrays in case.arrays.items():
        runner, label = Runner(case, mode), f"{case.name} {mode}"
        losses = runner.losses_and_outputs()
        tokens, weights = float(arrays["mask_indices"].sum()), case.objective
        values = {
            "sample_size": losses["masked"],
            "loss_0_sum": losses["loss_local"] * tokens * weights.local,
            "loss_1_sum": losses["loss_diversity"] * tokens * weights.diversity,
            "loss_2_sum": losses["loss_features"] * tokens * weights.features,
            "loss_3_sum": losses.get("loss_global", torch.zeros(())) * tokens * weights.contrast,
            "loss_total_sum": losses["loss"].detach() * tokens,
            "features_pen": losses["loss_features"],
            "prob_perplexity": losses["prob_perplexity"],
            "code_perplexity": losses["code_perplexity"],
            "correct": losses["accuracy_local"] * tokens,
        }
        unknown = arrays.keys() - INPUTS - NOT_COMPARED - runner.outputs.keys() - values.keys()
        if unknown:
            tell(f"warning: {label}: not compared, unknown names: {', '.join(sorted(unknown))}")
        for quantities, limit in ((runner.outputs, TENSOR), (values, LOSS)):
            for name in (name for name in quantities if name in arrays):
                yield Comparison(
                    label, name, difference(quantities[name].detach(), arrays[name]), limit
                )
        if mode == "train" and case.gradients:
            yield from compare_gradients(case, runner.model, losses["loss"] * tokens, label)
        if mode == "train" and case.after:
            yield from compare_steps(case, runner, label)


def difference(ours: Tensor, reference: np.ndarray | Tensor) -> float:
    """Largest absolute error divided by the largest number in the reference; infinite if shapes or
    infinities differ."""
    mine, theirs = ours.double(), torch.as_tensor(reference).double()
    if mine.shape != theirs.shape:
        return math.inf
    finite = theirs.isfinite()
    if not torch.equal(mine.isfinite(), finite) or not torch.equal(mine[~finite], theirs[~finite]):
        return math.inf
    if not finite.any():
        return 0.0
    scale = theirs[finite].abs().max().clamp(min=1e-30)
    return float((mine[finite] - theirs[finite]).abs().max() / scale)


def compare_gradients(
    case: ReferenceCase, model: nn.Module, loss: Tensor, label: str
) -> Iterator[Comparison]:
    loss.backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    mine = to_theirs(grads, case.config, spelling(case.state))
    scale = max(float(g.abs().max()) for g in case.gradients.values())
    for name, reference in case.gradients.items():
        error = difference(mine[name], reference)
        if (
            float(reference.abs().max()) < 1e-6 * scale
        ):  # only rounding errors (the key's bias): has no scale
            error = float((mine[name] - reference).abs().max()) / scale
        yield Comparison(label, f"gradient of {name}", error, GRADIENT)


def compare_steps(case: ReferenceCase, runner: Runner, label: str) -> Iterator[Comparison]:
    model, moments = runner.model, dict[str, tuple[Tensor, Tensor]]()
    for step in range(1, STEPS + 1):
        model.zero_grad()
        runner.losses()["loss"].backward()
        authors_adam(model, case.adam, moments, step)
    mine = to_theirs(
        {name: p.detach() for name, p in model.named_parameters()},
        case.config,
        spelling(case.state),
    )
    changed, wrong = 0.0, 0.0
    for name, reference in case.after.items():
        yield Comparison(
            label, f"after {STEPS} steps, {name}", difference(mine[name], reference), PARAMETER
        )
        changed += float((reference - case.state[name]).double().square().sum())
        wrong += float((reference - mine[name]).double().square().sum())
    error = math.sqrt(wrong / changed) if changed else math.inf if wrong else 0.0
    yield Comparison(label, f"change in {STEPS} steps, all parameters", error, CHANGE)


@torch.no_grad()
def authors_adam(
    model: nn.Module, adam: Adam, moments: dict[str, tuple[Tensor, Tensor]], step: int
) -> None:
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        mean, square = moments.setdefault(name, (torch.zeros_like(p), torch.zeros_like(p)))
        mean.mul_(adam.betas[0]).add_(p.grad, alpha=1 - adam.betas[0])
        square.mul_(adam.betas[1]).addcmul_(p.grad, p.grad, value=1 - adam.betas[1])
        corrections = 1 - adam.betas[0] ** step, 1 - adam.betas[1] ** step
        p.mul_(1 - adam.lr * adam.decay)
        p.addcdiv_(
            mean,
            square.sqrt().add_(adam.eps),
            value=-adam.lr * math.sqrt(corrections[1]) / corrections[0],
        )


def compare(folder: Path) -> list[Comparison]:
    names = sorted(path.name.removesuffix("_cfg.json") for path in folder.glob("*_cfg.json"))
    names = [name for name in names if (folder / f"{name}_state_dict.safetensors").exists()]
    comparisons: list[Comparison] = []
    for name in names:
        try:
            comparisons += compare_case(read_case(folder, name))
        except Exception as error:  # many kinds: files are damaged or do not match
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            raise ConfigError(
                f"{folder}, case {name}: {kind}{error}".splitlines()[0][:500]
            ) from error
    if not comparisons:
        raise ConfigError(
            f"{folder}: no NAME_cfg.json with NAME_state_dict.safetensors and NAME_eval.npz or "
            "NAME_train.npz"
        )
    return comparisons
