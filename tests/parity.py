"""Compare our model with the authors': run it with their weights, inputs and random draws, and
compare the results, quantity by quantity.

    python -m tests.parity DIR

DIR holds, for each case NAME: NAME_cfg.json (their settings), NAME_state_dict.safetensors, and
NAME_eval.npz, NAME_train.npz or both. These hold the inputs source [R, L, T], mask_indices,
neg_idxs, patient_id, segment (train also gumbel_noise and temp) and the authors' results. With
train.npz there may be NAME_train_grads_of_sum_loss.safetensors and
NAME_state_dict_after_3_steps.safetensors. Missing or unknown results are listed as not compared.
Prints the largest error of every quantity; for tensors it is relative to the largest number in the
reference. Exit 0: all errors are within their limits. Exit 1: one is not. Exit 2: DIR cannot be
read.

The three optimiser steps repeat the same batch with the authors' Adam (fairseq-signals
optim/adam.py:81-209): weight decay on every parameter before the update; eps is added outside the
square root and before the bias correction.
"""

import argparse
import ast
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.authors_step import convert_draws
from omnilead.data_tools.io.npz import npz_array, npz_names
from omnilead.data_tools.io.terminal import echo, tell
from omnilead.downstream.interop.fairseq import (
    Settings,
    Weights,
    read_model_config,
    weight_norm_spelling,
    weights_from_fairseq,
    weights_to_fairseq,
)
from omnilead.engine.model.config import ModelConfig, ObjectiveConfig
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.settings.errors import ConfigError

INPUTS = {"source", "mask_indices", "neg_idxs", "patient_id", "segment", "gumbel_noise", "temp"}
NOT_COMPARED = {"rlm_survivors", "num_vars", "count"}  # how the source was made; values of settings
LOSS, TENSOR, GRADIENT, PARAMETER = 1e-5, 2e-5, 1e-4, 1e-4  # largest allowed errors
CHANGE = 5e-4  # our error is 2e-4; it would be 1.2e-3 without weight decay
STEPS = 3
Arrays = dict[str, np.ndarray]
DROPOUTS = "dropout", "attention_dropout", "activation_dropout", "dropout_input", "dropout_features"
NO_DROPOUT = dict.fromkeys(DROPOUTS, 0.0)  # as the reference was made


@dataclass(frozen=True)
class ReferenceCase:
    name: str
    config: ModelConfig
    objective: ObjectiveConfig
    adam: Settings  # as torch.optim.AdamW takes it
    state: Weights
    arrays: dict[str, Arrays]  # eval, train
    gradients: Weights
    after: Weights


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
    model, criterion = cfg["model"], cfg["criterion"]
    if model["logit_temp"] != criterion["temp"]:
        raise ConfigError(
            f"model.logit_temp={model['logit_temp']} and criterion.temp={criterion['temp']} "
            "differ: not supported"
        )
    optimizer = cfg["optimizer"]
    first, second = ast.literal_eval(str(optimizer["adam_betas"]))
    adam = {
        "lr": float(cfg["optimization"]["lr"][0]),
        "betas": (float(first), float(second)),
        "eps": float(optimizer["adam_eps"]),
        "weight_decay": float(optimizer["weight_decay"]),
    }
    arrays = {}
    for mode in ("eval", "train"):
        path = folder / f"{name}_{mode}.npz"
        if path.exists():
            arrays[mode] = {key: npz_array(path, key) for key in npz_names(path)}
            check_pairs(arrays[mode], path.name)
    state = load_file(folder / f"{name}_state_dict.safetensors")
    return ReferenceCase(
        name,
        read_model_config(model | NO_DROPOUT),
        _objective(model, criterion),
        adam,
        state,
        arrays,
        _optional_weights(folder, name, "train_grads_of_sum_loss", state),
        _optional_weights(folder, name, "state_dict_after_3_steps", state),
    )


def _objective(model: Settings, criterion: Settings) -> ObjectiveConfig:
    diversity, features = criterion.get("loss_weights") or (0.0, 0.0)
    contrast = criterion.get("cmsc_weights")
    if isinstance(contrast, list):
        contrast = contrast[0]
    return ObjectiveConfig(
        diversity=diversity,
        features=features,
        contrast=1.0 if contrast is None else float(contrast),
        form="authors",
        temperature=model["logit_temp"],
        negatives=model["num_negatives"],
        gathered=False,
    )


def _optional_weights(folder: Path, name: str, what: str, state: Weights) -> Weights:
    file = f"{name}_{what}.safetensors"
    weights = load_file(folder / file) if (folder / file).exists() else {}
    missing = sorted(state.keys() - weights.keys())
    if missing:
        tell(f"warning: {name}: not compared, as {file} lacks them: {', '.join(missing)}")
    return weights


def check_pairs(arrays: Arrays, file: str) -> None:
    if not np.array_equal(arrays["segment"], np.arange(len(arrays["source"])) % 2):
        raise ConfigError(f"{file}: segment is not 0, 1, 0, 1, ...: pairs must be adjacent")
    if len(set(arrays["mask_indices"].sum(1).tolist())) != 1:
        raise ConfigError(
            f"{file}: mask_indices must mask the same number of tokens in every segment"
        )
    if arrays.keys() <= INPUTS:
        raise ConfigError(f"{file}: has only inputs: add results, such as logits_NBM")


class Runner:
    """One case in one mode: our model with the authors' weights, its losses, and the outputs of its
    parts."""

    def __init__(self, case: ReferenceCase, mode: str) -> None:
        self.case, self.arrays = case, case.arrays[mode]
        self.model = Pretrainer(case.config, case.objective).train(mode == "train")
        self.model.load_state_dict(weights_from_fairseq(case.state, case.config))
        self.draws = convert_draws(self.arrays, case.config)
        self.x_BSLT = torch.from_numpy(self.arrays["source"]).unflatten(0, (-1, 2))
        self.ids_B = torch.from_numpy(self.arrays["patient_id"])[::2]
        self.tau = torch.tensor(float(self.arrays.get("temp", 1)))
        self.outputs: Weights = {}  # by their names in the reference

    def losses(self) -> Weights:
        return dict(self.model(self.x_BSLT, tau=self.tau, ids_B=self.ids_B, draws=self.draws))

    def losses_and_outputs(self) -> Weights:
        """Computes the losses, and keeps the output of every part in `outputs`."""
        self._watch()
        losses = self.losses()
        outputs = self.outputs
        for name, output in outputs.items():
            if name.startswith(("conv_features", "conv_block")):
                outputs[name] = output.transpose(1, 2)
        for i in range(self.case.config.layers):
            last = outputs.pop(f"encoder_layer{i}")
            outputs[f"encoder_layer{i}_TBC"] = last.transpose(0, 1)
        outputs["transformer_features"] = last
        outputs["global_mean_pooled"] = last.mean(1)
        outputs["quantizer_logits"] = outputs["quantizer_logits"].flatten(0, -2)
        outputs["logits_NBM"] = self._logits()
        return losses

    def _watch(self) -> None:
        encoder, local = self.model.encoder, self.model.local
        assert local is not None
        parts: dict[str, nn.Module] = {
            "conv_features": encoder.conv,
            "features_layer_norm": encoder.feature_norm,
            "post_extract_proj": encoder.project,
            "conv_pos_out": encoder.position,
            "encoder_input_ln": encoder.norm,
            "quantizer_logits": local.quantizer.logits,
            "quantized": local.quantizer,
            "projected_targets": local.target,
            "final_proj_out": local.context,
        }
        for i, block in enumerate(encoder.conv.blocks):
            parts[f"conv_block{i}"] = block
        for i, layer in enumerate(encoder.layers):
            parts[f"encoder_layer{i}"] = layer

        def keep(name: str, module: nn.Module, given: tuple[Tensor, ...], output: Any) -> None:
            self.outputs[name] = output
            if name == "conv_pos_out":
                self.outputs["masked_input"] = given[0]
            elif name == "quantized":
                self.outputs |= {"quantizer_in": given[0], name: output.values_RMP}

        for name, part in parts.items():
            part.register_forward_hook(partial(keep, name))

    def _logits(self) -> Tensor:
        """[1 + K, R, M] logits as the authors gather them, taken from our Gram matrix."""
        x_RMP = nn.functional.normalize(self.outputs["final_proj_out"], dim=-1)
        y_RMP = nn.functional.normalize(self.outputs["projected_targets"], dim=-1)
        s_RMM = torch.bmm(x_RMP, y_RMP.transpose(1, 2)) / self.case.objective.temperature
        codes_RMP = self.outputs["quantized"]
        same_RMM = (codes_RMP[:, :, None] == codes_RMP[:, None]).all(-1)
        rows, used, _ = s_RMM.shape
        other_RMK = torch.from_numpy(self.arrays["neg_idxs"]).view(rows, used, -1) % used
        negative_RMK = s_RMM.masked_fill(same_RMM, -torch.inf).gather(2, other_RMK)
        positive_RM = s_RMM.diagonal(dim1=1, dim2=2)
        return torch.cat([positive_RM[..., None], negative_RMK], -1).permute(2, 0, 1)


def compare_case(case: ReferenceCase) -> Iterator[Comparison]:
    for mode, arrays in case.arrays.items():
        runner, label = Runner(case, mode), f"{case.name} {mode}"
        losses = runner.losses_and_outputs()
        tokens, weights = float(arrays["mask_indices"].sum()), case.objective
        contrast = losses.get("loss_global", torch.zeros(()))
        values = {
            "sample_size": losses["masked"],
            "loss_0_sum": losses["loss_local"] * tokens * weights.local,
            "loss_1_sum": losses["loss_diversity"] * tokens * weights.diversity,
            "loss_2_sum": losses["loss_features"] * tokens * weights.features,
            "loss_3_sum": contrast * tokens * weights.contrast,
            "loss_total_sum": losses["loss"] * tokens,
            "features_pen": losses["loss_features"],
            "prob_perplexity": losses["prob_perplexity"],
            "code_perplexity": losses["code_perplexity"],
            "correct": losses["accuracy_local"] * tokens,
        }
        ours = values | runner.outputs
        for name in [name for name in arrays if name in ours]:
            limit = LOSS if name in values else TENSOR
            yield Comparison(label, name, difference(ours[name], arrays[name]), limit)
        unknown = arrays.keys() - INPUTS - NOT_COMPARED - ours.keys()
        if unknown:
            tell(f"warning: {label}: not compared, unknown names: {', '.join(sorted(unknown))}")
        if mode == "train" and case.gradients:
            yield from compare_gradients(case, runner.model, losses["loss"] * tokens, label)
        if mode == "train" and case.after:
            yield from compare_steps(case, runner, label)


def difference(ours: Tensor, reference: np.ndarray | Tensor) -> float:
    """Largest absolute error divided by the largest number in the reference; infinite if shapes or
    infinities differ."""
    ours, theirs = ours.detach().double(), torch.as_tensor(reference).double()
    if ours.shape != theirs.shape:
        return math.inf
    finite = theirs.isfinite()
    if not torch.equal(ours[~finite], theirs[~finite]):
        return math.inf
    if not finite.any():
        return 0.0
    scale = theirs[finite].abs().max().clamp(min=1e-30)
    return float((ours[finite] - theirs[finite]).abs().max() / scale)


def compare_gradients(
    case: ReferenceCase, model: nn.Module, loss: Tensor, label: str
) -> Iterator[Comparison]:
    loss.backward()
    gradients = {}
    for name, p in model.named_parameters():
        gradients[name] = torch.zeros_like(p) if p.grad is None else p.grad
    ours = weights_to_fairseq(gradients, case.config, weight_norm_spelling(case.state))
    scale = max(float(g.abs().max()) for g in case.gradients.values())
    for name, reference in case.gradients.items():
        error = difference(ours[name], reference)
        if float(reference.abs().max()) < 1e-6 * scale:
            # Only rounding errors (the bias of the keys), which have no scale of their own
            error = float((ours[name] - reference).abs().max()) / scale
        yield Comparison(label, f"gradient of {name}", error, GRADIENT)


def compare_steps(case: ReferenceCase, runner: Runner, label: str) -> Iterator[Comparison]:
    adam = torch.optim.AdamW(runner.model.parameters(), **case.adam)
    for step in range(1, STEPS + 1):
        adam.zero_grad()
        runner.losses()["loss"].backward()
        # The authors add eps before the bias correction of the denominator, torch after it
        correction = 1 - case.adam["betas"][1] ** step
        adam.param_groups[0]["eps"] = case.adam["eps"] / math.sqrt(correction)
        adam.step()
    weights = {name: p.detach() for name, p in runner.model.named_parameters()}
    ours = weights_to_fairseq(weights, case.config, weight_norm_spelling(case.state))
    changed, wrong = 0.0, 0.0
    for name, reference in case.after.items():
        error = difference(ours[name], reference)
        yield Comparison(label, f"after {STEPS} steps, {name}", error, PARAMETER)
        changed += float((reference - case.state[name]).double().square().sum())
        wrong += float((reference - ours[name]).double().square().sum())
    error = math.inf if wrong else 0.0
    if changed:
        error = math.sqrt(wrong / changed)
    yield Comparison(label, f"change in {STEPS} steps, all parameters", error, CHANGE)


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.parity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the authors' numbers")
    args = parser.parse_args(arguments)
    try:
        comparisons = compare(args.folder)
    except (ConfigError, OSError) as error:
        tell(f"tests.parity: {error}")
        return 2
    width = max(len(comparison.quantity) for comparison in comparisons)
    for one in comparisons:
        verdict = "" if one.holds else "  DOES NOT HOLD"
        echo(f"{one.case:<12} {one.quantity:<{width}} {one.error:9.1e} <= {one.limit:.0e}{verdict}")
    failed = sum(not comparison.holds for comparison in comparisons)
    echo(f"{len(comparisons) - failed} of {len(comparisons)} quantities agree")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
