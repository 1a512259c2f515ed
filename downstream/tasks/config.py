"""Settings of fine-tuning; those of its task: labels, their kind, and how records are split.

TaskConfig("rhythm", "multiclass", labels="rhythm.csv")
TaskConfig("age", "regression", columns=("age",), unit="years", split="8:1:1")      # the dataset's own ages
"""

from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from omnilead.data_tools.ecg.record_tables import read_table
from omnilead.data_tools.io.errors import DataError, Flag
from omnilead.engine.data.augmentations import AugmentConfig
from omnilead.engine.data.augmentations.leads import AsText
from omnilead.engine.data.augmentations.stage import STRICT
from omnilead.engine.model.config import ModelConfig, Probability, Share
from omnilead.engine.model.folder import find_local_model, names_a_model
from omnilead.engine.settings.errors import ConfigError, one_line_errors
from omnilead.engine.settings.files import OWN_CODE
from omnilead.engine.settings.resuming import MayChange
from omnilead.engine.training.config import (
    Config,
    RunConfig,
    Section,
    load_config,
    micro_batch_and_passes,
)

TaskKind = Literal["binary", "multilabel", "multiclass", "regression", "survival", "identity"]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Value = Annotated[str, AsText]  # folds: {train: [1, 2]}


@one_line_errors
@dataclass(frozen=True, config=STRICT)
class TaskConfig:
    name: Name = "diagnosis"  # name in results and file names
    kind: TaskKind = "multilabel"  # kind of the labels
    # CSV or parquet file. "": 26 diagnoses (multilabel), patients (identity), or `columns` of the
    # dataset
    labels: MayChange[str] = ""
    # label columns; []: all but record, source, patient, fold, split. Without a table: age, sex. For
    # survival: the time, then the event (1, or 0: censored); []: time, event
    columns: tuple[Value, ...] = ()
    classes: tuple[Value, ...] = ()  # multiclass, in order; []: the values that occur, sorted
    positive: Value = (
        ""  # binary: the value that counts as 1, all others as 0; "": yes, true, 1, ...
    )
    unit: Annotated[str, Field(max_length=32)] = ""  # of regression values or survival times
    # column: by the table's `fold` or `split`; 8:1:1: drawn by patient; roles: the dataset's; auto:
    # column if there is one, else 8:1:1 with a table, roles without
    split: Literal["auto", "roles", "column", "8:1:1"] = "auto"
    # {train: [1, 2], valid: [3], test: [4]}; {}: the last fold is test, the one before it valid
    folds: dict[Literal["train", "valid", "test"], tuple[Value, ...]] = field(default_factory=dict)
    # balanced: weights inverse to class frequency; for binary, multilabel, multiclass
    class_weights: Literal["none", "balanced"] = "none"
    # scale of ArcFace, the loss of kind identity
    scale: Annotated[float, Field(ge=1, le=1e4)] | Literal["learned"] = 192.0
    margin: Annotated[float, Field(ge=0, le=3)] = 1.0  # margin of ArcFace, in radians
    # share of all steps over which the margin grows from 0
    margin_warmup: Annotated[float, Field(ge=0, le=1)] = 0.0
    # initial class vectors of ArcFace; means: the mean embedding of each class
    class_vectors: Literal["random", "means"] = "random"
    # "": a linear layer on the mean over tokens; start: the linear layer and the read-out of
    # `start`, a model of `omnilead fit`; attention: over all tokens, each head with a learnt query;
    # or your own file.py:Class(width, outputs), from the mean over tokens to logits
    head: str = ""
    # arguments of the head: of attention (heads: 16), or of your own
    head_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = self.head in ("", "start", "attention") or OWN_CODE.fullmatch(self.head)
        if not known or (self.head and self.kind == "identity"):
            raise ConfigError(
                f"task.head={self.head!r}: use start or attention, or name your own as file.py:Class; kind "
                "identity has no other head"
            )
        if self.head_options and self.head in ("", "start"):
            raise ConfigError(
                f"task.head_options={self.head_options}: a linear layer takes no options: set task.head"
            )
        if self.class_weights != "none" and self.kind in ("regression", "survival", "identity"):
            raise ConfigError(
                f"task.class_weights={self.class_weights!r}: kind {self.kind} has no class weights: "
                "use none"
            )
        assigned = [fold for folds in self.folds.values() for fold in folds]
        if twice := [fold for fold in assigned if assigned.count(fold) > 1]:
            raise ConfigError(f"task.folds: {twice[0]!r} is in two splits: name each fold once")


class FinetuneData(Section):
    """The task decides which crops are used: downstream.tasks."""

    datasets: MayChange[tuple[str, ...]] = ()  # folders or s3:// addresses
    # Train and validate only on crops for which this is true, such as age >= 18 and quality != "poor";
    # columns are those of the label table, then those of samples.parquet
    where: str = ""
    anonymous: MayChange[bool] = False  # s3:// without credentials


class Tuning(Section):
    """Encoder settings that differ from pre-training. Defaults: the authors' fine-tuning
    configs."""

    frozen: bool = False  # only the head is trained
    feature_grad: Share = 0.0  # 0: convolutions frozen; 1: trained like the rest
    # The learning rate of layer i of L is train.lr * layer_decay ** (L - i), that of the head train.lr;
    # i = 0: convolutions and whatever else is in no layer
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    dropout: Probability = 0.0  # as model.dropout
    attention_dropout: Probability = 0.0  # as model.attention_dropout
    activation_dropout: Probability = 0.1  # as model.activation_dropout
    input_dropout: Probability = 0.0  # as model.input_dropout


class FinetuneConfig(RunConfig):
    config_folder: ClassVar[str] = "finetune"
    run: MayChange[str] = "runs/finetune"  # folder of the run; an unfinished run there is resumed
    # pre-trained run or model folder; or a pre-training YAML: its architecture with random weights
    start: str = ""
    code: MayChange[bool] = False  # run the code of a plugged-in encoder in the folder `start`
    data: FinetuneData = FinetuneData()
    # no lead masking unless asked for
    defaults: ClassVar[dict[str, Any]] = {"augment": {"rlm": 0.0}}
    other_commands: ClassVar[dict[str, str]] = dict.fromkeys(
        ("model", "objective", "input"), "omnilead pretrain"
    )
    augment: AugmentConfig = AugmentConfig(rlm=0.0)
    encoder: Tuning = Tuning()
    task: TaskConfig = TaskConfig()

    def tuned_architecture(self, model: ModelConfig) -> ModelConfig:
        """Returns the pre-trained architecture with the settings of this fine-tuning."""
        settings = dict(self.encoder)
        for name in ("frozen", "layer_decay"):  # of the training, not of the architecture
            del settings[name]
        return replace(model, leads=len(self.augment.output_leads), **settings)

    @property
    def plugin_settings(self) -> list[tuple[str, str]]:
        return [*super().plugin_settings, ("task.head", self.task.head)]

    def require_files(self) -> None:
        super().require_files()
        if not names_a_model(self.start):
            load_config(self.start, kind=Config)
        elif "://" not in self.start:
            find_local_model(self.start)
        labels = self.task.labels
        if labels and "://" not in labels and not Path(labels).is_file():
            try:  # it says what is wrong
                read_table(labels)
            except DataError as error:
                raise ConfigError(error) from None

    @property
    def length_matters(self) -> bool:
        return super().length_matters or self.task.margin_warmup > 0

    def problems(self, world: int) -> list[tuple[Any, str | tuple[str, ...]]]:
        views, t = self.pipeline.views, self.train
        return [
            (
                not self.start,
                (
                    "start='': name a pre-trained run, or a pre-training YAML for random weights: ",
                    Flag("--start"),
                    " RUN",
                ),
            ),
            (
                views != "halves",
                f"pipeline.views={views!r}: fine-tuning uses both halves of a crop: use halves",
            ),
            (
                self.encoder.frozen and self.task.kind == "identity",
                "encoder.frozen=true: of identification only the encoder is exported: train it",
            ),
            (
                self.encoder.frozen and self.encoder.layer_decay < 1,
                f"encoder.layer_decay={self.encoder.layer_decay}: encoder.frozen=true trains only "
                "the head: set one of them",
            ),
            (
                self.encoder.layer_decay < 1 and bool(t.lr_factors),
                f"encoder.layer_decay={self.encoder.layer_decay}, train.lr_factors={t.lr_factors}: both "
                "give weights their share of train.lr: set one of them",
            ),
            (
                self.task.kind == "survival" and micro_batch_and_passes(self, world)[0] * world < 2,
                f"train.batch_crops={t.batch_crops}, train.micro_batch={t.micro_batch}: survival "
                "compares the patients of a micro-batch: use 2 or more",
            ),
            (self.augment.threekg, "augment.threekg: is for pre-training only: remove it"),
        ]
