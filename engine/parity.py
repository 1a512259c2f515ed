"""Do we compute what the authors compute? Their weights, inputs and draws through our model, against the numbers they got.

    python -m engine.parity DIR [--json F]

DIR holds, for each case NAME: NAME_cfg.json (their settings), NAME_state_dict.safetensors and, of NAME_eval.npz and
NAME_train.npz, at least one: source [R, L, T], mask_indices, neg_idxs, patient_id, segment, with train also gumbel_noise and
temp, and what follows from them. Beside train.npz there may be NAME_train_grads_of_sum_loss.safetensors and
NAME_state_dict_after_3_steps.safetensors; what they lack is listed as not compared. Prints the largest error of every quantity:
of a tensor, relative to the largest number in the reference. Exit 0 if all hold, 1 if one does not, 2 if DIR is not so.

Three optimiser steps repeat the same batch with the authors' Adam (fairseq-signals optim/adam.py:81-209): weight decay on
every parameter before the update, eps outside the square root and before the correction of the bias.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
from torch import Tensor, nn

from engine.common import ConfigError, Parser
from engine.model.fairseq import WeightsError, ours, spelling, theirs
from engine.model.pretrainer import Pretrainer
from engine.model.reference import INPUTS, Adam, Case, InputError, draws_of, read_cases

LOSS, TENSOR, GRADIENT, PARAMETER = 1e-5, 2e-5, 1e-4, 1e-4  # limits
CHANGE = 5e-4  # we are off by 2e-4, without weight decay by 1.2e-3
STEPS = 3


@dataclass(frozen=True)
class Check:
    case: str
    quantity: str
    error: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.error <= self.limit  # NaN does not


class Runner:
    """One case in one mode: our model with their weights, its forward pass, and what its parts made of it."""

    def __init__(self, case: Case, mode: str, slot_count: int | None = None) -> None:
        self.case, self.arrays = case, case.files[mode]
        self.model = Pretrainer(case.config, case.objective).train(mode == "train")
        self.model.load_state_dict(ours(case.state, case.config))
        self.draws = draws_of(self.arrays, case.config, slot_count)
        source = torch.from_numpy(self.arrays["source"])
        self.x_BSLT, self.ids_B = source.unflatten(0, (-1, 2)), torch.from_numpy(self.arrays["patient_id"])[::2]
        self.tau = torch.tensor(float(self.arrays.get("temp", np.float32(1))))
        self.seen: dict[str, Tensor] = {}

    def losses(self) -> dict[str, Tensor]:
        return dict(self.model(self.x_BSLT, tau=self.tau, ids_B=self.ids_B, draws=self.draws))

    def watched(self) -> dict[str, Tensor]:
        """The same, keeping the output of every part under the reference's name for it."""
        model, config = self.model, self.case.config
        encoder, local = model.encoder, model.local
        assert local is not None
        parts: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
            "conv_features": (encoder.conv, lambda y: y.transpose(1, 2)),
            "features_layer_norm": (encoder.feature_norm, lambda y: y),
            "post_extract_proj": (encoder.project, lambda y: y),
            "conv_pos_out": (encoder.position, lambda y: y),
            "encoder_input_ln": (encoder.norm, lambda y: y),
            "quantizer_logits": (local.quantizer.logits, lambda y: y.reshape(-1, config.codebooks * config.codes)),
            "projected_targets": (local.target, lambda y: y),
            "final_proj_out": (local.context, lambda y: y),
        }
        parts |= {f"conv_block{i}": (block, lambda y: y.transpose(1, 2)) for i, block in enumerate(encoder.conv.blocks)}
        parts |= {f"encoder_layer{i}_TBC": (layer, lambda y: y.transpose(0, 1)) for i, layer in enumerate(encoder.layers)}
        hooks = [module.register_forward_hook(self._keep(name, form)) for name, (module, form) in parts.items()]
        hooks.append(encoder.position.register_forward_pre_hook(lambda _, x: self.seen.update(masked_input=x[0])))
        hooks.append(local.quantizer.register_forward_pre_hook(lambda _, x: self.seen.update(quantizer_in=x[0])))
        hooks.append(local.quantizer.register_forward_hook(lambda _, x, y: self.seen.update(quantized=y.values_RMP)))
        out = self.losses()
        for hook in hooks:
            hook.remove()
        last = self.seen[f"encoder_layer{config.layers - 1}_TBC"]
        self.seen |= {"transformer_features": last.transpose(0, 1), "global_mean_pooled": last.mean(0)}
        self.seen["logits_NBM"] = self._logits()
        return out

    def _keep(self, name: str, form: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _, x, y: self.seen.update({name: form(y)})

    def _logits(self) -> Tensor:
        """[1 + K, R, M] as the authors gather them; ours are entries of the Gram matrix."""
        names = "final_proj_out", "projected_targets"
        x_RMP, y_RMP = (nn.functional.normalize(self.seen[name], dim=-1, eps=1e-8) for name in names)
        rows, used = len(x_RMP), int(self.draws.valid_RM[0].sum())
        s_RMM = torch.bmm(x_RMP, y_RMP.transpose(1, 2))[:, :used, :used] / self.case.objective.temperature
        codes_RMP = self.seen["quantized"][:, :used]
        same_RMM = (codes_RMP[:, :, None] == codes_RMP[:, None]).all(-1)
        other_RMK = torch.from_numpy(self.arrays["neg_idxs"]).view(rows, used, -1) % used
        negative_RMK = s_RMM.masked_fill(same_RMM, -torch.inf).gather(2, other_RMK)
        return torch.cat([s_RMM.diagonal(dim1=1, dim2=2)[..., None], negative_RMK], -1).permute(2, 0, 1)


def forward_checks(case: Case, mode: str, runner: Runner, losses: dict[str, Tensor]) -> Iterator[Check]:
    label, arrays = f"{case.name} {mode}", case.files[mode]
    wanted = arrays.keys() - INPUTS
    if not wanted:
        raise InputError(f"{label}: holds inputs only: add what follows from them, such as logits_NBM")
    for name in arrays:
        if name in runner.seen:
            seen = runner.seen[name].detach()
            yield Check(label, name, difference(_unpadded(seen, arrays[name].shape), arrays[name]), TENSOR)
    tokens = float(arrays["mask_indices"].sum())
    weights = case.objective
    values = {
        "sample_size": losses["masked"],
        "loss_0_sum": losses["loss_local"] * tokens * weights.local,
        "loss_1_sum": losses["loss_diversity"] * tokens * weights.diversity,
        "loss_2_sum": losses["loss_features"] * tokens * weights.features,
        "loss_3_sum": losses.get("loss_global", torch.zeros(())) * tokens * weights.contrast,
        "loss_total_sum": losses["loss"] * tokens,
        "features_pen": losses["loss_features"],
        "prob_perplexity": losses["prob_perplexity"],
        "code_perplexity": losses["code_perplexity"],
        "correct": losses["accuracy_local"] * tokens,
    }
    unknown = wanted - runner.seen.keys() - values.keys()
    if unknown:
        print(f"warning: {label}: not compared, being no quantity of ours: {', '.join(sorted(unknown))}", file=sys.stderr)
    for name, value in values.items():
        if name in arrays:
            yield Check(label, name, difference(value.detach(), arrays[name]), LOSS)


def _unpadded(seen: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Without the slots that no token is in."""
    if seen.shape != shape and seen.ndim == 3 == len(shape) and seen.shape[1] > shape[1]:
        return seen[:, : shape[1]]
    return seen


def difference(ours: Tensor, reference: np.ndarray | Tensor) -> float:
    """Largest absolute error by the largest number in the reference; infinite if shapes or infinities differ."""
    mine, wanted = ours.double(), torch.as_tensor(reference).double()
    if mine.shape != wanted.shape:
        return math.inf
    finite = wanted.isfinite()
    if not torch.equal(mine.isfinite(), finite) or not torch.equal(mine[~finite], wanted[~finite]):
        return math.inf
    if not finite.any():
        return 0.0
    scale = wanted[finite].abs().max().clamp(min=1e-30)
    return float((mine[finite] - wanted[finite]).abs().max() / scale)


def training_checks(case: Case, runner: Runner, losses: dict[str, Tensor]) -> Iterator[Check]:
    """Gradients of the summed loss, then the weights after three steps on the same batch."""
    if case.gradients:
        yield from _gradient_checks(case, runner.model, losses)
    if case.after:
        yield from _step_checks(case, runner)


def _gradient_checks(case: Case, model: nn.Module, losses: dict[str, Tensor]) -> Iterator[Check]:
    tokens = float(case.files["train"]["mask_indices"].sum())
    (losses["loss"] * tokens).backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    mine = theirs(grads, case.config, spelling(case.state))
    scale = max(float(g.abs().max()) for g in case.gradients.values())
    for name, reference in case.gradients.items():
        error = difference(mine[name], reference)
        if float(reference.abs().max()) < 1e-6 * scale:  # zero but for rounding (the key's bias): no scale of its own
            error = float((mine[name] - reference).abs().max()) / scale
        yield Check(f"{case.name} train", f"gradient of {name}", error, GRADIENT)


def _step_checks(case: Case, runner: Runner) -> Iterator[Check]:
    label, model = f"{case.name} train", runner.model
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    for step in range(1, STEPS + 1):
        model.zero_grad()
        runner.losses()["loss"].backward()
        authors_adam(model, case.adam, moments, step)
    mine = theirs({name: p.detach() for name, p in model.named_parameters()}, case.config, spelling(case.state))
    moved, apart = 0.0, 0.0
    for name, reference in case.after.items():
        yield Check(label, f"after {STEPS} steps, {name}", difference(mine[name], reference), PARAMETER)
        moved += float((reference - case.state[name]).double().square().sum())
        apart += float((reference - mine[name]).double().square().sum())
    error = math.sqrt(apart / moved) if moved else math.inf if apart else 0.0
    yield Check(label, f"change in {STEPS} steps, all parameters", error, CHANGE)


@torch.no_grad()
def authors_adam(model: nn.Module, adam: Adam, moments: dict[str, tuple[Tensor, Tensor]], step: int) -> None:
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        mean, square = moments.setdefault(name, (torch.zeros_like(p), torch.zeros_like(p)))
        mean.mul_(adam.betas[0]).add_(p.grad, alpha=1 - adam.betas[0])
        square.mul_(adam.betas[1]).addcmul_(p.grad, p.grad, value=1 - adam.betas[1])
        corrections = 1 - adam.betas[0] ** step, 1 - adam.betas[1] ** step
        p.mul_(1 - adam.lr * adam.decay)
        p.addcdiv_(mean, square.sqrt().add_(adam.eps), value=-adam.lr * math.sqrt(corrections[1]) / corrections[0])


def compare(folder: Path) -> list[Check]:
    checks: list[Check] = []
    for case in read_cases(folder):
        if case.absent:
            print(f"warning: {case.name}: not compared, not in {folder}: {', '.join(case.absent)}", file=sys.stderr)
        for mode in case.files:
            runner = Runner(case, mode)
            losses = runner.watched()
            checks += forward_checks(case, mode, runner, losses)
            if mode == "train":
                checks += training_checks(case, runner, losses)
    return checks


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m engine.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="F", help="write the table as JSON too")
    args = parser.parse_args(arguments)
    try:
        checks = compare(args.folder)
        if args.json:
            args.json.write_text(json.dumps([asdict(check) | {"holds": check.holds} for check in checks], indent=1) + "\n")
    except (InputError, ConfigError, WeightsError, OSError) as error:
        print(f"engine.parity: {error}", file=sys.stderr)
        return 2
    width = max(len(check.quantity) for check in checks)
    for check in checks:
        verdict = "" if check.holds else "  DOES NOT HOLD"
        print(f"{check.case:<12} {check.quantity:<{width}} {check.error:9.1e} <= {check.limit:.0e}{verdict}")
    failed = sum(not check.holds for check in checks)
    print(f"{len(checks) - failed} of {len(checks)} quantities agree")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
