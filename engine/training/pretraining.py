"""Pre-training as a task: the model and what it is given, what is measured of it, what is exported."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data_tools.dataset import Dataset
from engine.common import ConfigError
from engine.config import Config, candidates, micro_batch
from engine.data.augmenter import HALF
from engine.data.loader import Batch
from engine.data.validation_split import patient_ids
from engine.evaluation.run_files import VALID
from engine.model.config import flops_per_crop, kept_per_crop, masked_share
from engine.model.pretrainer import Pretrainer
from engine.model.quantizer import temperature
from engine.training.distributed import Ranks
from engine.training.similarity import Capture
from engine.training.task import Task, chosen, told_best
from engine.training.validation import PatientProbe, ValidationLoss, eval_mode, model_inputs, training_roles

DIAGNOSED = 16  # crops of a rank
COLLAPSED_SHARE, COLLAPSED_LOGS = 0.02, 3  # of all codes; log lines in a row


class Pretraining(Task):
    keys = (
        *("step", "crops_seen", "epoch", "loss", "loss_local", "loss_global", "loss_diversity", "loss_features", "lr"),
        *("grad_norm", "crops_per_s", "data_wait_pct", "mfu", "code_perplexity", "prob_perplexity", "gumbel_tau"),
        *("masked_share", "accuracy_local", "accuracy_global", "skipped_steps", "memory_gb"),
    )
    exports_best = False

    def __init__(self, config: Config, datasets: Sequence[Dataset], ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.best = chosen(config.train.best, ("loss", "identification_accuracy"))
        self.roles = training_roles(config)
        self.patients = patient_ids(datasets) if config.objective.needs_ids else None
        self.held_out, self.probe = ValidationLoss(config, datasets, ranks), PatientProbe(config, datasets, ranks)
        if not self.held_out.crops:
            self.remarks = [nothing_held_out(config)]
        elif not config.data.hold_out and (seen := self.held_out.trained_on()):
            self.remarks = [f"validates on {seen} crops that it is trained on (data.train, data.valid): no held-out loss"]
        self.flops_per_crop = flops_per_crop(config.model, HALF, local=config.objective.local > 0)
        self.kept_per_crop = kept_per_crop(config.model, HALF)
        self.low_logs = 0

    def facts(self) -> dict[str, Any]:
        """Among how many crops each is contrasted is part of the objective."""
        contrasted = self.config.objective.contrast > 0
        return {"train.micro_batch x ranks": candidates(self.config, self.ranks.world)} if contrasted else {}

    def model(self, generator: torch.Generator) -> nn.Module:
        return Pretrainer(self.config.model, self.config.objective, generator=generator)

    def arguments(self, batch: Batch, step: int) -> tuple[Tensor | None, ...]:
        tau = torch.tensor(temperature(self.config.model, step)).to(self.ranks.device, non_blocking=True)
        return model_inputs(batch, self.config, self.patients, tau)

    def explained(self) -> dict[str, Any]:
        c = self.config
        chance: dict[str, float] = {}
        if c.objective.local > 0:
            tokens, drawn = c.model.tokens(HALF), c.objective.negatives
            others = max(1.0, tokens * masked_share(c.model, tokens) - 1)
            rivals = others * (1 - (1 - 1 / others) ** drawn)  # some are drawn more than once
            for of in ("", VALID):
                chance |= {f"{of}loss_local": math.log(1 + drawn), f"{of}accuracy_local": 1 / (1 + rivals)}
        among = {"": candidates(c, self.ranks.world), VALID: self.held_out.crops}
        for of, crops in among.items() if c.objective.contrast > 0 else ():
            rivals = crops if (c.objective.method, c.objective.form) == ("cmsc", "authors") else 2 * crops - 1
            chance |= {f"{of}loss_global": math.log(rivals), f"{of}accuracy_global": 1 / rivals} if crops else {}
        if self.probe.pairs:
            chance[f"{VALID}identification_accuracy"] = 1 / len(self.probe.pairs)
        return {"chance": chance, "validation": self._differs(among) if self.held_out.crops else []}

    def _differs(self, among: Mapping[str, int]) -> list[str]:
        c, m = self.config, self.config.model
        dropouts = (m.dropout, m.attention_dropout, m.activation_dropout, m.input_dropout, m.feature_dropout)
        found = ["dropout is off"] if any(dropouts) else []
        found += ["codes are the likeliest ones, not sampled"] if c.objective.local > 0 else []
        if c.objective.contrast > 0 and among[VALID] != among[""]:
            found.append(f"crops are contrasted in batches of {among[VALID]:,}, not {among['']:,}")
        masked = ["tokens"] * (c.objective.local > 0) + ["leads"] * (c.augment.rlm > 0)
        return found + ([f"{' and '.join(masked)} are masked as in training"] if found and masked else [])

    def values(self, step: int) -> dict[str, float | None]:
        return {"gumbel_tau": temperature(self.config.model, step) if self.config.objective.local else None}

    def concern(self, values: dict[str, float]) -> str | None:
        """An early sign of collapse, said once."""
        in_use, m = values.get("code_perplexity"), self.config.model
        if in_use is None:
            return None
        low = max(COLLAPSED_SHARE * m.codebooks * m.codes, 1.25 * m.codebooks)
        self.low_logs = self.low_logs + 1 if in_use < low else 0
        if self.low_logs != COLLAPSED_LOGS:
            return None
        return (
            f"warning: the quantiser collapses: {in_use:.1f} of {m.codebooks * m.codes} codes are in use. Raise "
            f"objective.diversity (now {self.config.objective.diversity}), lower train.lr (now {self.config.train.lr}), "
            f"or let the temperature fall later (model.tau_decay, now {m.tau_decay})"
        )

    def validate(self, engine: Any) -> dict[str, float]:
        row = self.held_out.measure(engine) if self.held_out.crops else {}
        if self.probe.pairs:
            row["identification_accuracy"] = self.probe.accuracy(engine)
        return row

    def diagnostics(self, engine: Any, batch: Batch) -> dict[str, np.ndarray]:
        """How the model sees the first crops of the batch, with nothing dropped out."""
        few = min(DIAGNOSED, micro_batch(self.config, self.ranks.world)[0])
        given = (a if a is None or a.ndim == 0 else a[:few] for a in self.arguments(batch, 0))
        with eval_mode(engine), Capture(engine.module) as captured, torch.no_grad():
            engine(*given)
        return super().diagnostics(engine, batch) | captured.similarities(batch.x_BSLT.shape[1])

    @staticmethod
    def described(config: Config, state: dict[str, Any]) -> dict[str, Any]:
        """What config.json of the exported model says of it."""
        return {"model": asdict(config.model), "objective": asdict(config.objective)}

    @staticmethod
    def card(config: Config, state: dict[str, Any]) -> tuple[str, list[str]]:
        """Heading and lines of the model card."""
        m, o = config.model, config.objective
        terms = [f"{getattr(o, name)} x {name}" for name in ("local", "diversity", "features", "contrast") if getattr(o, name)]
        return "Lead-agnostic ECG encoder, pre-trained with omnilead", [
            f"{len(m.conv)} convolutions, {m.layers} transformer layers of width {m.width}.",
            f"Loss: {', '.join(terms)}; global objective {o.method if o.contrast else 'none'}.",
            f"These are the weights of step {state['step']:,}, the newest. {told_best(state.get('best') or {})}",
        ]

    @staticmethod
    def exports(config: Config, name: str) -> bool:
        """All of it: whoever trains on needs the quantiser too."""
        return True


def nothing_held_out(config: Config) -> str:
    if config.data.hold_out:
        raise ConfigError(
            f"data.hold_out={config.data.hold_out}: holds nobody of these datasets out: raise it, or leave it out"
        )
    role = ", ".join(f"{name}={value!r}" for name, value in config.data.valid if value is not None)
    return f"no two crops have data.valid {role}: no loss is validated; data.hold_out=0.05 would keep patients for it"
