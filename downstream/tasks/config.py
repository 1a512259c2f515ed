"""Settings of fine-tuning and of its task: the labels, their kind, and how records are split.

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
Value = Annotated[str, AsText]  # numbers become text: {train: [1, 2]} names the folds "1" and "2"


@one_line_errors
@dataclass(frozen=True, config=STRICT)
class TaskConfig:
    name: Name = "diagnosis"  # name in results and file names
    kind: TaskKind = "multilabel"  # kind of the labels, which decides the loss and the scores
    # CSV or parquet file with the labels. "": the labels come from the dataset: its 26 diagnoses
    # (multilabel), its patients (identity), or the columns that task.columns names
    labels: MayChange[str] = ""
    # label columns. []: all columns except record, source, patient, fold and split; for survival,
    # time and event. Survival takes two columns: the time, then the event (1, or 0 if censored).
    # Without a label table, the columns are age or sex of the dataset
    columns: tuple[Value, ...] = ()
    # for kind multiclass: the classes, in the order of the outputs; []: all values that occur,
    # sorted
    classes: tuple[Value, ...] = ()
    # for kind binary: the value that counts as 1, while all other values count as 0; "": words such as
    # yes, true and 1 count as 1
    positive: Value = ""
    unit: Annotated[str, Field(max_length=32)] = ""  # unit of regression values or survival times
    # how records are split. column: by the column `fold` or `split` of the label table; 8:1:1: at
    # random by patient; roles: by the roles that the dataset gives its records; auto: column if the
    # table has such a column, else 8:1:1 with a label table, and roles without one
    split: Literal["auto", "roles", "column", "8:1:1"] = "auto"
    # values of the column `fold` in each split, such as {train: [1, 2], valid: [3], test: [4]}; {}:
    # the last fold is test, the one before it valid, and the others are train
    folds: dict[Literal["train", "valid", "test"], tuple[Value, ...]] = field(default_factory=dict)
    # balanced: labels are weighted inversely to how frequent their class is; only for the kinds
    # binary, multilabel and multiclass
    class_weights: Literal["none", "balanced"] = "none"
    # scale of the logits in ArcFace, the loss of kind identity
    scale: Annotated[float, Field(ge=1, le=1e4)] | Literal["learned"] = 192.0
    margin: Annotated[float, Field(ge=0, le=3)] = 1.0  # angular margin of ArcFace, in radians
    # share of all training steps over which the margin of ArcFace grows from 0
    margin_warmup: Annotated[float, Field(ge=0, le=1)] = 0.0
    # how the class vectors of ArcFace begin. means: each at the mean embedding of its class
    class_vectors: Literal["random", "means"] = "random"
    # "": a linear layer on the mean over tokens; start: the linear layer and the read-out that
    # `omnilead fit` gave to the model `start`; attention: attention over all tokens, in which each
    # attention head has a learnt query; or file.py:Class of your own: Class(width, outputs) maps
    # the mean over tokens to logits
    head: str = ""
    # arguments with which the head is built: for attention {heads: 16}, its default, or those of
    # your own class
    head_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = self.head in ("", "start", "attention") or OWN_CODE.fullmatch(self.head)
        if not known or (self.head and self.kind == "identity"):
            raise ConfigError(
                f"task.head={self.head!r}: use start or attention, or name your own as file.py:Class; with "
                "kind identity leave it out"
            )
        if self.head_options and self.head in ("", "start"):
            raise ConfigError(
                f"task.head_options={self.head_options}: the linear layer takes no options: leave them "
                "out, or set task.head"
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
    """Names the datasets of a fine-tuning. Which of their crops are used is decided by the task
    (downstream.tasks)."""

    datasets: MayChange[tuple[str, ...]] = ()  # dataset folders or s3:// addresses
    # condition such as age >= 18 and quality != "poor": training and validation use only the crops
    # for which it is true. Its columns are those of the label table, then those of samples.parquet
    where: str = ""
    anonymous: MayChange[bool] = False  # read s3:// addresses without credentials


class Tuning(Section):
    """Encoder settings that may differ from those of pre-training. The defaults are those of
    fairseq-signals' fine-tuning configs."""

    frozen: bool = False  # train only the head
    # scales the gradient of the convolutions: 0 freezes them, 1 trains them like the rest
    feature_grad: Share = 0.0
    # how much slower earlier layers learn: the learning rate of layer i of L is train.lr *
    # layer_decay ** (L - i), that of the head train.lr. Layer 0 is the convolutions and whatever
    # else is in no layer
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    dropout: Probability = 0.0  # model.dropout during fine-tuning
    attention_dropout: Probability = 0.0  # model.attention_dropout during fine-tuning
    activation_dropout: Probability = 0.1  # model.activation_dropout during fine-tuning
    input_dropout: Probability = 0.0  # model.input_dropout during fine-tuning


class FinetuneConfig(RunConfig):
    config_folder: ClassVar[str] = "finetune"
    run: MayChange[str] = "runs/finetune"  # folder of the run; an unfinished run there is resumed
    # folder of a pre-trained run or model, or a pre-training YAML, whose architecture then begins with
    # random weights
    start: str = ""
    # allow running the code of a plugged-in encoder in the folder `start`
    code: MayChange[bool] = False
    data: FinetuneData = FinetuneData()
    # leads are masked only if augment.rlm is set
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
        for name in ("frozen", "layer_decay"):  # settings of the training, which ModelConfig lacks
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
            try:  # the error of read_table says what is wrong
                read_table(labels)
            except DataError as error:
                raise ConfigError(error) from None

    @property
    def depends_on_total_steps(self) -> bool:
        return super().depends_on_total_steps or self.task.margin_warmup > 0

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
