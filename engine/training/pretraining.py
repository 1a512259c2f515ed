"""The pre-training task: model, arguments, validation, collapse warning, export."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.common import ConfigError
from omnilead.engine.config import Config, candidates, micro_batch
from omnilead.engine.data.leakage import patient_ids
from omnilead.engine.data.loader import Batch
from omnilead.engine.model.config import masked_share
from omnilead.engine.model.encoders import (
    code_of,
    describe_encoder,
    drops_out,
    encoder_flops,
    portable,
    prepared,
)
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.model.quantizer import temperature
from omnilead.engine.training.continuing import read_weights
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.files import VALID
from omnilead.engine.training.task import (
    Arguments,
    TrainingTask,
    best_metric,
    best_step_text,
    some_crops,
    start_text,
)
from omnilead.engine.training.validation import (
    Capture,
    PatientProbe,
    ValidationLoss,
    dtype_of,
    eval_mode,
    model_inputs,
    training_roles,
)

DIAGNOSED = 16  # crops of a rank
COLLAPSED_SHARE, COLLAPSED_LOGS = 0.02, 3  # of all codes; log lines in a row


class PretrainTask(TrainingTask):
    keys = (
        *(
            "step",
            "crops_seen",
            "epoch",
            "loss",
            "loss_local",
            "loss_global",
            "loss_diversity",
            "loss_features",
            "lr",
        ),
        *(
            "grad_norm",
            "crops_per_s",
            "data_wait_pct",
            "mfu",
            "code_perplexity",
            "prob_perplexity",
            "gumbel_tau",
        ),
        *("masked_share", "accuracy_local", "accuracy_global", "skipped_steps", "memory_gb"),
    )
    exports_best = False

    def __init__(self, config: Config, datasets: Sequence[Dataset], ranks: Ranks) -> None:
        super().__init__(config, datasets, ranks)
        self.low_logs = 0
        local = config.objective.local > 0
        self.code = code_of(
            {"model.encoder": config.model.encoder, "augment.extra": config.augment.extra},
            config.run,
        )
        self.encoder, self.tokens = prepared(
            config.model, local, dtype_of(config), config.train.seed
        )
        self.start = read_weights(config) if config.start else None
        self.best = best_metric(config.train.best, ("loss", "identification_accuracy"))
        self.roles = training_roles(config)
        self.patients = patient_ids(datasets) if config.objective.needs_ids else None
        self.held_out, self.probe = (
            ValidationLoss(config, datasets, ranks),
            PatientProbe(config, datasets, ranks),
        )
        self.remarks = [remark] if (remark := self._validation_remark()) else []
        self.flops_per_crop = encoder_flops(self.encoder, config.model, local)

    def _validation_remark(self) -> str | None:
        data = self.config.data
        if self.held_out.crops:
            shared = 0 if data.hold_out else self.held_out.trained_on()
            leak = (
                f"{shared} validation crops are also trained on (data.train, data.valid): their "
                "loss is not held out"
            )
            return leak if shared else None
        if data.hold_out:
            raise ConfigError(
                f"data.hold_out={data.hold_out}: selects no patient of these datasets: raise it, "
                "or leave it out"
            )
        role = ", ".join(f"{name}={value!r}" for name, value in data.valid if value is not None)
        return (
            f"no validation loss: too few crops have data.valid {role}; data.hold_out=0.05 holds "
            "patients out for it"
        )

    def model(self, generator: torch.Generator) -> nn.Module:
        model = Pretrainer(self.config.model, self.config.objective, self.encoder, generator)
        if self.start:
            self.remarks = [*self.remarks, self.start.into(model)]
        return model

    def arguments(self, batch: Batch, step: int, total: int) -> Arguments:
        tau = torch.tensor(temperature(self.config.model, step)).to(
            self.ranks.device, non_blocking=True
        )
        return model_inputs(batch, self.config, self.patients, tau)

    def validate(self, engine: Any) -> dict[str, float]:
        row = self.held_out.measure(engine) if self.held_out.crops else {}
        if self.probe.pairs:
            row["identification_accuracy"] = self.probe.accuracy(engine)
        return row

    def facts(self) -> dict[str, Any]:
        """Adds the number of candidates, which is part of the objective."""
        contrasted = self.config.objective.contrast > 0
        facts = (
            {"train.micro_batch x ranks": candidates(self.config, self.ranks.world)}
            if contrasted
            else {}
        )
        return super().facts() | facts | (self.start.facts if self.start else {})

    def explained(self) -> dict[str, Any]:
        c, m = self.config, self.config.model
        local, contrast = c.objective.local > 0, c.objective.contrast > 0
        chance: dict[str, float] = {}
        crops = {"": candidates(c, self.ranks.world), VALID: self.held_out.crops}
        if local:
            tokens, drawn = self.tokens, c.objective.negatives
            others = max(1.0, tokens * masked_share(m, tokens) - 1)
            rivals = others * (1 - (1 - 1 / others) ** drawn)  # some are drawn more than once
            for prefix in crops:
                chance |= {
                    f"{prefix}loss_local": math.log(1 + drawn),
                    f"{prefix}accuracy_local": 1 / (1 + rivals),
                }
        if contrast:
            one_half = (c.objective.method, c.objective.form) == ("cmsc", "authors")
            for prefix, n in crops.items():
                choices = n if one_half else 2 * n - 1
                chance |= (
                    {
                        f"{prefix}loss_global": math.log(choices),
                        f"{prefix}accuracy_global": 1 / choices,
                    }
                    if n
                    else {}
                )
        if self.probe.pairs:
            chance[f"{VALID}identification_accuracy"] = 1 / len(self.probe.pairs)
        differs = ["dropout is off"] * drops_out(self.encoder, m, m.feature_dropout)
        differs += ["codes are the likeliest ones, not sampled"] * local
        if contrast and crops[VALID] != crops[""]:
            differs.append(
                f"crops are contrasted in batches of {crops[VALID]:,}, not {crops['']:,}"
            )
        masked = ["tokens"] * local + ["leads"] * (c.augment.rlm > 0)
        differs += (
            [f"{' and '.join(masked)} are masked as in training"] if differs and masked else []
        )
        return {"chance": chance, "validation": differs if self.held_out.crops else []}

    def extra_metrics(self, step: int) -> dict[str, float | None]:
        return {
            "gumbel_tau": temperature(self.config.model, step)
            if self.config.objective.local
            else None
        }

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
            "use. Raise objective.diversity "
            f"({self.config.objective.diversity}), lower train.lr ({self.config.train.lr}), or "
            "raise model.tau_decay"
        )

    def diagnostics(self, engine: Any, batch: Batch) -> dict[str, np.ndarray]:
        """Adds similarities of encodings of the first crops of the batch, without dropout."""
        few = min(DIAGNOSED, micro_batch(self.config, self.ranks.world)[0])
        part = some_crops(self.arguments(batch, 0, 1), 0, few)
        with eval_mode(engine), Capture(engine.module) as captured, torch.no_grad():
            engine(*part)
        return super().diagnostics(engine, batch) | captured.similarities(batch.x_BSLT.shape[1])

    @staticmethod
    def described(config: Config, state: dict[str, Any]) -> dict[str, Any]:
        model = asdict(config.model) | {"encoder": portable(config.model.encoder)}
        continued = {"continued": state["continued"]} if "continued" in state else {}
        return {"model": model, "objective": asdict(config.objective)} | continued

    @staticmethod
    def card(config: Config, state: dict[str, Any]) -> tuple[str, list[str]]:
        m, o = config.model, config.objective
        names = ("local", "diversity", "features", "contrast") if o.local else ("contrast",)
        terms = [f"{getattr(o, name)} x {name}" for name in names if getattr(o, name)]
        return "Lead-agnostic ECG encoder, pre-trained with omnilead", [
            describe_encoder(m),
            *(
                [f"Continued from the weights of {start_text(config.start)}."]
                if config.start
                else []
            ),
            f"Loss: {', '.join(terms)}; global objective {o.method if o.contrast else 'none'}.",
            f"Weights of step {state['step']:,}, the newest. "
            f"{best_step_text(state.get('best') or {})}",
        ]
