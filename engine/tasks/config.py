"""Settings of a task: its labels, their kind, and how records are split. The section `task` of a
fine-tuning config.

TaskConfig("rhythm", "multiclass", labels="rhythm.csv")
TaskConfig("age", "regression", columns=("age",), unit="years", split="8:1:1")      # the dataset's own ages
"""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from omnilead.engine.common import OWN, ConfigError

TaskKind = Literal["binary", "multilabel", "multiclass", "regression", "identity"]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Value = Annotated[
    str, BeforeValidator(lambda value: str(value) if type(value) is int else value)
]  # folds: {train: [1, 2]}

OLD_TASKS = {
    "diagnosis": "multilabel",
    "identification": "identity",
}  # kinds of an earlier version's tasks


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class TaskConfig:
    name: Name = "diagnosis"  # in results and file names
    kind: TaskKind = "multilabel"  # of the labels
    # CSV or parquet file. "": 26 diagnoses (multilabel), patients (identity), or `columns` of the
    # dataset
    labels: str = ""
    columns: tuple[
        Value, ...
    ] = ()  # label columns; (): all but record, source, patient, fold, split. No table: age, sex
    classes: tuple[Value, ...] = ()  # of multiclass, in order; (): the values that occur, sorted
    unit: Annotated[str, Field(max_length=32)] = ""  # of regression
    # column: by the table's `fold` or `split`; 8:1:1: drawn by patient; roles: the dataset's; auto:
    # column if there is one, else 8:1:1 with a table, roles without
    split: Literal["auto", "roles", "column", "8:1:1"] = "auto"
    # {train: [1, 2], valid: [3], test: [4]}; {}: the last fold is test, the one before it valid
    folds: dict[Literal["train", "valid", "test"], tuple[Value, ...]] = field(default_factory=dict)
    class_weights: Literal["none", "balanced"] = (
        "none"  # balanced: weights inverse to how frequent each class is
    )
    scale: Annotated[float, Field(ge=1, le=1e4)] | Literal["learned"] = (
        192.0  # of ArcFace, the loss of identity
    )
    margin: Annotated[float, Field(ge=0, le=3)] = 1.0  # of ArcFace, in radians
    margin_warmup: Annotated[float, Field(ge=0, le=1)] = (
        0.0  # share of all steps over which the margin grows from 0
    )
    class_vectors: Literal["random", "means"] = (
        "random"  # initial ones of ArcFace; means: mean embeddings of each class
    )
    # your own file.py:Class(width, outputs), from pooled encodings to logits; "": a linear layer
    head: str = ""

    def __post_init__(self) -> None:
        if self.head and (self.kind == "identity" or not OWN.fullmatch(self.head)):
            raise ConfigError(
                f"task.head={self.head!r}: name your own as file.py:Class; kind identity has no "
                "other head"
            )
        assigned = [fold for folds in self.folds.values() for fold in folds]
        if twice := [fold for fold in assigned if assigned.count(fold) > 1]:
            raise ConfigError(f"task.folds: {twice[0]!r} is in two splits: name each fold once")
