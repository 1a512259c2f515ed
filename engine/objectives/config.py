"""Which objectives are trained on, and how much each weighs.

    loss = local * L_local + diversity * L_diversity + features * L_features + contrast * L_global

| method of the paper | settings |
|---|---|
| W2V + CMSC (+ RLM) | the defaults |
| W2V | contrast: 0 |
| CMSC | local: 0 |
| SimCLR | local: 0, method: simclr |
| 3KG | local: 0, method: 3kg |
| as the authors compute it | form: authors, detach_norm: true, gathered: false |

Random lead masking and the views are made by the pipelines. Diversity and feature penalty belong to the local objective and
go with it. Source: paper, section "Pre-training"; weights: fairseq-signals examples w2v_cmsc_rlm.yaml, loss_weights.
"""

from dataclasses import dataclass
from typing import Literal

from engine.common import ConfigError


@dataclass(frozen=True)
class ObjectiveConfig:
    local: float = 1.0
    diversity: float = 0.1
    features: float = 10.0
    contrast: float = 1.0
    method: Literal["cmsc", "simclr", "3kg"] = "cmsc"  # the global objective
    form: Literal["paper", "authors"] = "paper"  # of CMSC
    temperature: float = 0.1  # of both contrasts
    negatives: int = 100
    gathered: bool = True  # candidates and code usage of all ranks, with gradient
    detach_norm: bool = False  # no gradient through the norm of global representations (CMSC's form `authors` never has one)

    def __post_init__(self) -> None:
        for key in ("local", "diversity", "features", "contrast"):
            _number(f"objective.{key}", getattr(self, key), 0, 1e6)
        _number("objective.temperature", self.temperature, 1e-4, 1e4)
        if self.local == 0 and self.contrast == 0:
            raise ConfigError("objective.local=0 and objective.contrast=0: nothing is left to learn: give one of them a weight")
        if isinstance(self.negatives, bool) or not isinstance(self.negatives, int) or not 1 <= self.negatives <= 10_000:
            raise ConfigError(f"objective.negatives={self.negatives!r}: must be a whole number from 1 to 10000")
        if self.method not in ("cmsc", "simclr", "3kg"):
            raise ConfigError(f"objective.method={self.method!r}: use cmsc, simclr or 3kg")
        if self.form not in ("paper", "authors"):
            raise ConfigError(f"objective.form={self.form!r}: use paper or authors")

    @property
    def across_ranks(self) -> bool:
        """Whether crops of other ranks are among the candidates."""
        return self.gathered and (self.method, self.form) != ("cmsc", "authors")

    @property
    def needs_ids(self) -> bool:
        """Whether a step must be told whose crops it sees."""
        return self.contrast > 0 and (self.method == "3kg" or (self.method == "cmsc" and self.form == "authors"))


def _number(key: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:  # NaN is not within
        raise ConfigError(f"{key}={value!r}: must be a number from {low} to {high}")
