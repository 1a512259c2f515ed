"""The pre-training task: model, arguments, validation, collapse warning.

engine.training.continuing has what comes before and after: starting weights, and the export.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.common import VALID, ConfigError
from omnilead.engine.config import Config, candidates
from omnilead.engine.data.leakage import held_out, refuse_leak
from omnilead.engine.data.loader import Batch
from omnilead.engine.data.patients import patient_ids
from omnilead.engine.model.config import masked_share
from omnilead.engine.model.encoders import (
    code_of,
    drops_out,
    encoder_flops,
    prepared,
)
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.model.quantizer import temperature
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.task import (
    Arguments,
    Between,
    TrainingTask,
    best_metric,
)
from omnilead.engine.training.validation import (
    PatientProbe,
    ValidationLoss,
    dtype_of,
    model_inputs,
    rows_of,
    training_roles,
)

COLLAPSED_SHARE, COLLAPSED_LOGS = 0.02, 3  # of all codes; log lines in a row


class PretrainTask(TrainingTask):
    """From random weights; ContinuedTask also loads those of `start`."""

    keys: tuple[str, ...] = (
        "step",
        "crops_seen",
        "epoch",
        "loss",
        "loss_local",
        "loss_global",
        "loss_diversity",
        "loss_features",
        "lr",
        "grad_norm",
        "crops_per_s",
        "data_wait_pct",
        "mfu",
        "code_perplexity",
        "prob_perplexity",
        "gumbel_tau",
        "masked_share",
        "accuracy_local",
        "accuracy_global",
        "skipped_steps",
        "memory_gb",
    )

    def __init__(self, config: Config, datasets: Sequence[Dataset], ranks: Ranks) -> None:
        super().__init__(config, datasets, ranks)
        self.low_logs = 0  # log lines in a row with few codes in use
        local = config.objective.local > 0
        plugged = {"model.encoder": config.model.encoder, "augment.extra": config.augment.extra}
        plugged["objective.method"] = config.objective.method
        self.code = code_of(plugged, config.run)
        dtype = dtype_of(config)
        signals = config.signals
        self.windows = config.loader.windows
        self.encoder, self.tokens = prepared(
            config.model, local, dtype, config.train.seed, samples=signals.samples
        )
        self.best = best_metric(config.train.best, ("loss", "identification_accuracy"))
        self.roles = training_roles(config)
        self.patients = patient_ids(datasets) if config.objective.needs_ids else None
        self.held_out = ValidationLoss(config, datasets, ranks)
        self.probe = PatientProbe(config, datasets, ranks)
        if len(datasets) > 1:
            refuse_leak(
                datasets,
                trained=[rows_of(dataset, self.roles) for dataset in datasets],
                held=[
                    np.union1d(held_out(dataset), rows_of(dataset, self.held_out.roles))
                    for dataset in datasets
                ],
            )
        self.remarks = self._validation_remarks()
        self.flops_per_crop = encoder_flops(
            self.encoder, config.model, local, signals.samples, config.windows
        )

    def _validation_remarks(self) -> list[str]:
        data = self.config.data
        if self.held_out.crops:
            shared = 0 if data.hold_out else self.held_out.trained_on()
            if not shared:
                return []
            return [
                f"{shared} validation crops are also trained on (data.train, data.valid): their "
                "loss is not held out"
            ]
        if data.hold_out:
            raise ConfigError(
                f"data.hold_out={data.hold_out}: selects no patient of these datasets: raise it, "
                "or leave it out"
            )
        role = ", ".join(f"{name}={value!r}" for name, value in data.valid if value is not None)
        return [
            f"no validation loss: too few crops have data.valid {role}; data.hold_out=0.1 holds "
            "patients out for it, those whom a later 8:1:1 split tests"
        ]

    def model(self, generator: torch.Generator) -> nn.Module:
        return Pretrainer(self.config.model, self.config.objective, self.encoder, generator)

    def arguments(self, batch: Batch, step: int, total: int) -> Arguments:
        tau = torch.tensor(temperature(self.config.model, step)).to(
            self.ranks.device, non_blocking=True
        )
        return model_inputs(batch, self.config, self.patients, tau)

    def validate(self, engine: Any, between: Between) -> dict[str, float]:
        row = self.held_out.measure(engine, between) if self.held_out.crops else {}
        if self.probe.pairs:
            row["identification_accuracy"] = self.probe.accuracy(engine, between)
        return row

    def facts(self) -> dict[str, Any]:
        """Adds the number of candidates, which is part of the objective."""
        facts = super().facts()
        if not self.config.signals.plain:
            facts["input"] = self.config.signals.signals
        if self.config.objective.contrast > 0:
            facts["train.micro_batch x ranks"] = candidates(self.config, self.ranks.world)
        return facts

    def explained(self) -> dict[str, Any]:
        in_training, held_out = candidates(self.config, self.ranks.world), self.held_out.crops
        chance = self._chance("", in_training) | self._chance(VALID, held_out)
        if self.probe.pairs:
            chance[f"{VALID}identification_accuracy"] = 1 / len(self.probe.pairs)
        differs = self._validation_differs(in_training, held_out) if held_out else []
        return {"chance": chance, "validation": differs}

    def _chance(self, prefix: str, crops: int) -> dict[str, float]:
        """Losses and accuracies when guessing. `crops`: how many are contrasted."""
        objective, model = self.config.objective, self.config.model
        chance: dict[str, float] = {}
        if objective.local > 0:
            drawn = objective.negatives
            others = max(1.0, self.tokens * masked_share(model, self.tokens) - 1)
            rivals = others * (1 - (1 - 1 / others) ** drawn)  # some are drawn more than once
            chance[f"{prefix}loss_local"] = math.log(1 + drawn)
            chance[f"{prefix}accuracy_local"] = 1 / (1 + rivals)
        if objective.contrast > 0 and crops and not objective.plugged:
            one_half = objective.method == "cmsc" and objective.form == "authors"
            choices = crops if one_half else 2 * crops - 1
            chance[f"{prefix}loss_global"] = math.log(choices)
            chance[f"{prefix}accuracy_global"] = 1 / choices
        return chance

    def _validation_differs(self, in_training: int, held_out: int) -> list[str]:
        config, model = self.config, self.config.model
        local = config.objective.local > 0
        differs = []
        if drops_out(self.encoder, model, model.feature_dropout):
            differs.append("dropout is off")
        if local:
            differs.append("codes are the likeliest ones, not sampled")
        contrasted = config.objective.contrast > 0 and not config.objective.plugged
        if contrasted and held_out != in_training:
            differs.append(f"crops are contrasted in batches of {held_out:,}, not {in_training:,}")
        masked = ["tokens"] * local + ["leads"] * (config.augment.rlm > 0)
        if differs and masked:
            differs.append(f"{' and '.join(masked)} are masked as in training")
        return differs

    def extra_metrics(self, step: int) -> dict[str, float | None]:
        local = self.config.objective.local > 0
        return {"gumbel_tau": temperature(self.config.model, step) if local else None}

    def warning(self, values: dict[str, float]) -> str | None:
        """Warns once, and early, when the quantizer collapses."""
        codes, m = values.get("code_perplexity"), self.config.model
        if codes is None:
            return None
        low = codes < max(COLLAPSED_SHARE * m.codebooks * m.codes, 1.25 * m.codebooks)
        self.low_logs = self.low_logs + 1 if low else 0
        if self.low_logs != COLLAPSED_LOGS:
            return None
        return (
            f"the quantizer is collapsing: {codes:.1f} of {m.codebooks * m.codes} codes are in "
            f"use. Raise objective.diversity ({self.config.objective.diversity}), lower train.lr "
            f"({self.config.train.lr}), or raise model.tau_decay"
        )
