"""Reads settings into one frozen object and validates them. An error is one line that names the setting.

    load_config("w2v_cmsc_rlm", ["train.steps=100", "data.datasets=[DATASET]"])     # a Config, from a file and --set
    load_config("diagnosis", ["start=RUN"], FinetuneConfig)      # downstream.tasks.config
    config = build_config({"train": {"steps": 100}})    # the same without a file
    check_config(config, world=8)                       # rejects contradictory settings before any work is done
    omnilead pretrain --schema                          # JSON schema, for editors

The settings of a component are a dataclass near its code, in a module that does not import PyTorch; this
file collects them.
"""

import ctypes
import difflib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from omnilead.data_tools.dataset import dataset_paths

from ..data.augmentations import AugmentConfig
from ..data.config import LoaderConfig, PipelineConfig
from ..model.config import ModelConfig, ObjectiveConfig, max_masked
from ..model.folder import find_local_model
from ..model.window import CROP_S, HALF_S, InputConfig
from ..settings.commandline import apply_overrides, read_yaml
from ..settings.descriptions import described_schema
from ..settings.errors import ConfigError, Flag
from ..settings.files import CONFIGS as CONFIGS
from ..settings.files import find_config, flatten, merge, read_plugin_files
from ..settings.metrics import METRIC_OF
from ..settings.resuming import MayChange

CPUINFO = Path("/proc/cpuinfo")
AMD_DRIVER = Path("/dev/kfd")
MAX_SHOWN_CHARACTERS = 80  # characters of a name or value that an error message shows
DEVICE_SETTING = re.compile(r"(^|\.)(device|gpu|cuda|accelerator)s?$")
HOW_TO_CHOOSE_DEVICE = (
    "training takes a GPU if it sees one: CUDA_VISIBLE_DEVICES=1 in the environment chooses it, "
    "CUDA_VISIBLE_DEVICES= hides them all"
)
SETTING_ALIASES = {  # names of these settings in other libraries
    "train.lr": "learning_rate",
    "train.batch_crops": "batch_size",
    "train.micro_batch": "micro_batch_size per_device_train_batch_size",
    "train.steps": "max_steps num_steps",
    "train.epochs": "max_epochs num_epochs num_train_epochs",
    "train.warmup": "warmup_steps warmup_ratio",
    "train.recompute_layers": "gradient_checkpointing activation_checkpointing checkpoint_layers",
    "train.clip_norm": "max_grad_norm gradient_clipping",
    "train.precision": "dtype",
    "train.save_every_steps": "save_steps",
    "train.validate_every": "eval_steps",
    "train.log_every": "logging_steps",
    "pipeline.threads": "num_workers",
    "run": "output_dir out",
    "data.datasets": "dataset",
    "model.width": "hidden_size",
    "model.layers": "num_layers",
    "model.heads": "num_heads",
    "start": "checkpoint pretrained",
}


if TYPE_CHECKING:
    from ..model.input import Input

    BestMetric = str
else:
    BestMetric = Literal[
        "f1", *(metric.name for metric in METRIC_OF.values() if metric.lower_is_better is not None)
    ]
Rate = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RoleSelection(Section):
    """Selects crops of a dataset by role: see data_tools.dataset.Dataset.select."""

    # true: crops for pre-training; false: all other crops; null: both
    pretrain: bool | None = None
    dx: Literal["train", "valid", "test"] | None = None  # role of the crops in diagnosis; null: any
    # role of the crops in patient identification; null: any
    identity: Literal["train", "valid", "gallery", "probe"] | None = None


class DataConfig(Section):
    # folders or s3:// addresses; also patterns such as ds/2027-*, and .txt files that list them
    datasets: MayChange[tuple[str, ...]] = ()
    train: RoleSelection = RoleSelection(pretrain=True)
    # crops for the validation loss; datasets that have none are skipped
    valid: RoleSelection = RoleSelection(dx="valid")
    # condition that crops must meet, in training and validation, such as age >= 18 and not
    # flags.flat
    where: str = ""
    # share of the patients of `train` to hold out for validation; `valid` is then not used; 0: none
    hold_out: float = Field(default=0.0, ge=0, lt=1)
    # of crops with the same waveform, train only on the first one in the order of `datasets`
    dedup: bool = False
    anonymous: MayChange[bool] = False  # read s3:// without credentials


class TrainConfig(Section):
    steps: int | None = Field(default=None, ge=1)  # set either steps or epochs
    epochs: float | None = Field(default=None, gt=0, le=1e6)  # passes over the training crops
    batch_crops: int = Field(default=512, ge=1)  # global batch size, over all ranks
    # Crops per rank and forward pass; None: all crops of the rank. A smaller number means gradient
    # accumulation: CMSC, SimCLR and 3KG then contrast a crop only with the crops of the same
    # micro-batch. These are micro_batch x ranks crops, or micro_batch crops if candidates come from
    # one rank only: with objective.gathered=false, or with CMSC and objective.form=authors. The losses
    # of code diversity and of survival also see one micro-batch at a time. Losses of labels are
    # averaged over the known labels of each micro-batch, then over the micro-batches.
    micro_batch: MayChange[int | None] = Field(default=None, ge=1)
    # auto: bf16 if the hardware supports it, else fp32
    precision: Literal["auto", "bf16", "fp32"] = "bf16"
    # ZeRO stage; None: the stage in the DeepSpeed JSON, or 1 if it sets none
    zero_stage: MayChange[int | None] = Field(default=None, ge=0, le=3)
    # DeepSpeed JSON file, or a shipped one: zero0 to zero3; it may set only ZeRO and communication
    deepspeed: MayChange[str | None] = None
    # scope of torch.compile; None: layers on CUDA, eager on a CPU, where `layers` made the config
    # `small` half as fast
    compile: MayChange[Literal["eager", "layers", "step"] | None] = None
    # activation checkpointing: the transformer layers keep only their inputs and are computed again
    # in the backward pass. The losses are equal; it needs less memory and a third more computing
    recompute_layers: MayChange[bool] = False
    lr: Rate = 5e-5  # peak learning rate
    # factors of lr for parts of the model, such as {stem: 0.01, context: 0.1}. stem: the encoder's
    # convolutions; context: the rest of the encoder; head: all other weights. A part that is not
    # named has the factor 1
    lr_factors: dict[Literal["stem", "context", "head"], Rate] = Field(default_factory=dict)
    # fixed: constant lr; warmup_cosine: warm-up, then half a cosine; tri_stage: warm-up, hold,
    # decay
    schedule: Literal["fixed", "warmup_cosine", "tri_stage"] = "fixed"
    warmup: float = Field(default=0.1, ge=0, le=1)  # length of the warm-up, as a share of all steps
    # length of the hold in tri_stage, as a share of all steps
    hold: float = Field(default=0.2, ge=0, le=1)
    # first learning rate, as a fraction of lr
    start_factor: float = Field(default=0.01, ge=0, le=1)
    end_factor: float = Field(default=0.01, ge=0, le=1)  # last learning rate, as a fraction of lr
    # decoupled weight decay, of every parameter
    weight_decay: float = Field(default=0.01, ge=0, le=1)
    betas: tuple[Beta, Beta] = (0.9, 0.98)  # decay rates of AdamW's two moving averages
    eps: float = Field(default=1e-6, gt=0, le=1)  # term that AdamW adds to its denominator
    # norm to which gradients are clipped; 0: no clipping
    clip_norm: float = Field(default=0.0, ge=0)
    # the run stops after this many steps in a row with a non-finite loss or gradient; checked when
    # logging
    max_nonfinite: MayChange[int] = Field(default=10, ge=1, le=10**6)
    # seed of the data order, the augmentation, the initial weights, dropout and the objective's draws
    seed: int = Field(default=0, ge=0, lt=2**63)
    # use deterministic GPU kernels; an operation without one stops the run with an error that names
    # it
    deterministic: MayChange[bool] = False
    # services that get the training curves, besides metrics.jsonl
    track: MayChange[tuple[Literal["tensorboard", "wandb", "mlflow"], ...]] = ("tensorboard",)
    log_every: MayChange[int] = Field(default=10, ge=1)  # steps between log lines
    validate_every: MayChange[int] = Field(default=0, ge=0)  # steps between validations; 0: never
    valid_batches: MayChange[int] = Field(default=16, ge=1)  # most batches in a validation
    # the metric that chooses the best checkpoint; None: the task's first validation metric
    best: BestMetric | None = None
    # stop early after this many validations in a row without improvement; 0: never
    patience: MayChange[int] = Field(default=0, ge=0)
    # patients to identify in each validation of pre-training; 0: none
    probe_patients: MayChange[int] = Field(default=256, ge=0)
    # steps between checkpoints; 0: checkpoints only by time and at the end
    save_every_steps: MayChange[int] = Field(default=0, ge=0)
    # minutes between checkpoints, which are written while training goes on
    save_every_minutes: MayChange[float] = Field(default=30.0, gt=0)
    # number of newest checkpoints to keep, besides the best
    keep: MayChange[int] = Field(default=3, ge=1)
    # peak TFLOP/s of one device, for MFU; None: measured at the start
    peak_tflops: MayChange[float | None] = Field(default=None, gt=0)
    # seconds after which the run ends if a rank does not respond
    timeout_s: MayChange[float] = Field(default=600.0, gt=0, le=1e6)

    @field_validator("precision")
    @classmethod
    def _resolve_auto(cls, precision: str) -> str:
        return precision if precision != "auto" else "bf16" if has_bf16() else "fp32"


def has_bf16() -> bool:
    """True if the hardware computes in bf16; emulated bf16 is slower than fp32."""
    if may_have_gpu():
        import torch

        if torch.cuda.is_available():
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(CPUINFO.read_text().split())


def may_have_gpu() -> bool:
    """True if PyTorch should be asked for a GPU: it is imported already, or a GPU driver is
    installed. Importing PyTorch takes a second."""
    if "torch" in sys.modules or AMD_DRIVER.exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class RunConfig(Section):
    """Settings of every training run."""

    # subfolder of configs/ in which a shipped config is found by its name
    config_folder: ClassVar[str] = "pretrain"
    # nested dict of defaults that replace those of the sections' classes
    defaults: ClassVar[dict[str, Any]] = {}
    other_commands: ClassVar[dict[str, str]] = {}  # setting of another command -> that command
    run: MayChange[str]  # folder of the run
    data: Any
    pipeline: PipelineConfig = PipelineConfig()
    augment: AugmentConfig = AugmentConfig()
    train: TrainConfig = TrainConfig()

    def tree(self) -> dict[str, Any]:
        """Returns the settings as nested dicts of JSON values."""
        return self.model_dump(mode="json")

    def problems(self, world: int) -> list[tuple[Any, str | tuple[str, ...]]]:
        """Returns pairs (condition, message). A true condition means that settings contradict each
        other."""
        return []

    @property
    def plugin_settings(self) -> list[tuple[str, str]]:
        """The settings that may name the user's own code: pairs (dotted name, value)."""
        return self.augment.plugin_settings

    def require_files(self) -> None:
        """Raises ConfigError if a file that a setting names does not exist. Needs no PyTorch, which takes
        seconds to import."""
        read_plugin_files(self.plugin_settings, self.run)

    @property
    def depends_on_total_steps(self) -> bool:
        """True if a single step depends on the total number of steps, as with a learning-rate
        schedule."""
        return self.train.schedule != "fixed"

    @property
    def loader(self) -> LoaderConfig:
        t = self.train
        return LoaderConfig(
            **vars(self.pipeline),
            batch_crops=t.batch_crops,
            micro_batch=t.micro_batch,
            seed=t.seed,
            augment=self.augment,
        )


class Config(RunConfig):
    """The settings of a pre-training."""

    run: MayChange[str] = "runs/pretrain"  # folder of the run; an unfinished run in it is resumed
    start: str = ""  # run or model folder from whose weights training starts; "": random weights
    data: DataConfig = DataConfig()
    input: InputConfig = InputConfig()
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    other_commands: ClassVar[dict[str, str]] = dict.fromkeys(
        ("task", "encoder", "code"), "omnilead finetune"
    )

    @property
    def plugin_settings(self) -> list[tuple[str, str]]:
        encoder = ("model.encoder", self.model.encoder)
        return [encoder, *super().plugin_settings, ("objective.method", self.objective.method)]

    def require_files(self) -> None:
        super().require_files()
        if self.start and "://" not in self.start:
            find_local_model(self.start)

    @property
    def model_input(self) -> "Input":
        # imported here because PyTorch takes seconds to import
        from ..model.input import Input

        return Input(self.augment.output_leads, self.augment.seen_leads, **vars(self.input))

    @property
    def windows(self) -> int:
        """The number of windows of each crop in a step: objective.windows if it is set, otherwise
        2, or 1 if a window is longer than half a crop."""
        return self.objective.windows or (1 if self.input.window_s > HALF_S else 2)

    @property
    def loader(self) -> LoaderConfig:
        return replace(
            super().loader,
            windows=0 if self.input.uses_stored_halves and self.windows == 2 else self.windows,
        )

    def problems(self, world: int) -> list[tuple[Any, str | tuple[str, ...]]]:
        objective, augment, t = self.objective, self.augment, self.train
        leads = len(augment.output_leads)
        views = "halves" if objective.method == "cmsc" else "window"
        contrast = objective.contrast > 0 and not objective.method_is_class
        if not self.model.encoder:
            tokens = self.model.tokens(self.input.samples)
            if objective.local > 0:
                max_masked(self.model, tokens)
        return [
            (
                t.recompute_layers and bool(self.model.encoder),
                f"train.recompute_layers=true: model.encoder={self.model.encoder} has no layers that "
                "omnilead knows: leave it out, or use torch.utils.checkpoint in your own encoder",
            ),
            (
                self.input.window_s > HALF_S and (contrast or self.pipeline.views == "window"),
                f"input.window_s={self.input.window_s:g}: a crop has no two such windows to "
                "contrast: use at most 5, or objective.contrast=0 and pipeline.views=halves",
            ),
            (
                self.windows * self.input.window_s > CROP_S,
                f"objective.windows={self.windows}: a crop has fewer windows of "
                f"{self.input.window_s:g} s: it has {CROP_S:g} s",
            ),
            (
                self.windows != 2 and (contrast or self.pipeline.views == "window"),
                f"objective.windows={objective.windows}: objective.method={objective.method} contrasts two: "
                "leave it out",
            ),
            (
                self.model.leads != leads,
                f"model.leads={self.model.leads}: augment.leads={augment.leads!r} needs {leads}",
            ),
            (
                contrast and self.pipeline.views != views,
                f"pipeline.views={self.pipeline.views!r}: objective.method={objective.method} needs "
                f"{views}",
            ),
            (
                contrast
                and views == "window"
                and not (augment.descriptions or augment.extra_functions),
                "pipeline.views='window' without augmentation: both views would be equal: set "
                "augment.rlm or augment.noise",
            ),
            (
                contrast and count_candidates(self, world) < 2,
                f"train.batch_crops={t.batch_crops}, train.micro_batch={t.micro_batch}: a crop is "
                "contrasted with "
                "the others of its micro-batch: use 2 or more, or objective.contrast=0",
            ),
        ]


class ZeroSection(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # DeepSpeed checks all other entries
    stage: Literal[0, 1, 2, 3] = 1


class DeepSpeedFile(Section):
    """The entries that a DeepSpeed JSON may set. All other entries follow from the settings in
    `train`."""

    zero_optimization: ZeroSection = ZeroSection()
    communication_data_type: str | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0


Kind = TypeVar("Kind", bound=RunConfig)
Parsed = TypeVar("Parsed", bound=BaseModel)


def build_config(tree: dict[str, Any], kind: type[Kind] = Config) -> Kind:  # type: ignore[assignment]
    """Builds validated settings of class `kind` from nested dicts."""
    tree = _with_dataset_paths(merge(kind.defaults, tree))
    train = tree.get("train")
    if isinstance(train, dict) and isinstance(rates := train.get("lr"), list) and rates:
        if len(rates) > 1:
            raise ConfigError(
                f"train.lr={rates}: a run has one learning rate: start one run for each rate: ",
                Flag("--lr"),
                f" {rates[0]} ",
                Flag("--out"),
                f" OUT/lr-{rates[0]} and so on, and compare their RUN/result.json",
            )
        tree = tree | {"train": train | {"lr": rates[0]}}
    try:
        return _validate(kind, json.dumps(tree))
    except TypeError as error:  # YAML has dates, for example, and JSON has none
        raise ConfigError(
            f"a value has a type that JSON does not have: {error}: write text or a number"
        ) from None


def _with_dataset_paths(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings with patterns and lists of datasets replaced by paths, so that a run
    keeps the datasets that it was started with."""
    data = tree.get("data")
    paths = data.get("datasets") if isinstance(data, dict) else None
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
        return tree
    return merge(tree, {"data": {"datasets": dataset_paths(paths, "data.datasets")}})


def json_schema(kind: type[RunConfig] = Config) -> str:
    return json.dumps(described_schema(kind), indent=1)


def _validate(kind: type[Parsed], text: str, source: str = "") -> Parsed:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(source + _explain_errors(error.errors(include_url=False), kind)) from None


def _explain_errors(errors: Sequence[Any], kind: type[BaseModel]) -> str:
    for error in errors:
        if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            key = ".".join(map(str, error["loc"]))[:MAX_SHOWN_CHARACTERS]
            return f"{key}: no such setting{_suggest_keys(key, kind)}"
    first = errors[0]
    if first["type"] == "json_invalid":
        return "settings are not valid JSON or UTF-8 text: write other values"
    # pydantic adds to the key the types of a union that it tried, such as str or
    # constrained-float[...]; they are left out here
    parts = [str(part) for part in first["loc"]]
    key = ".".join(part for part in parts if not re.search(r"\W|^str$", part))[
        :MAX_SHOWN_CHARACTERS
    ]
    value, message = repr(first["input"]), first["msg"][0].lower() + first["msg"][1:]
    if len(value) > MAX_SHOWN_CHARACTERS:
        return f"{key}={value[:MAX_SHOWN_CHARACTERS]}...: {message}"
    mend = f": write {key}=[{first['input']}]" if first["type"] == "tuple_type" else ""
    return f"{key}={value}: {message}{mend}"


def _suggest_keys(key: str, kind: type[BaseModel]) -> str:
    if issubclass(kind, RunConfig) and key in kind.other_commands:
        return f" here: it belongs to {kind.other_commands[key]}"
    if DEVICE_SETTING.search(key):
        return f": {HOW_TO_CHOOSE_DEVICE}"
    near = settings_named(key, kind) or nearest_settings(key, kind)
    if near:
        return f": did you mean {near[0]}?"
    return f": settings are {', '.join(kind.model_fields)}"


def settings_named(key: str, kind: type[BaseModel]) -> list[str]:
    """Returns the settings that are called `key` here or in another library. Only the last part of a
    dotted name counts."""
    name = key.rpartition(".")[2]
    matching = []
    for setting in flatten(kind().model_dump()):
        name_here = setting.rpartition(".")[2]
        if name == name_here or name in SETTING_ALIASES.get(setting, "").split():
            matching.append(setting)
    return matching


def nearest_settings(key: str, kind: type[BaseModel]) -> list[str]:
    return difflib.get_close_matches(key, list(flatten(kind().model_dump())), 1, 0.5)


def deepspeed_json(config: RunConfig, world: int, universal: bool = False) -> dict[str, Any]:
    """Returns DeepSpeed's configuration: ZeRO and communication from the file train.deepspeed,
    everything else from the settings."""
    settings = _deepspeed_file(config).model_dump(exclude_unset=True)
    zero: dict[str, Any] = settings.pop("zero_optimization", {}) | {"stage": zero_stage(config)}
    if zero["stage"] in (1, 2):
        # DeepSpeed need not compute the norm: GuardedAdamW does, without waiting for the device
        zero["compute_grad_norm"] = False
    elif zero["stage"] == 3:
        # more weights than a group has, so that no group is split over several optimizer calls
        zero["sub_group_size"] = 10**12
    micro, accumulation = micro_batch_and_passes(config, world)
    return settings | {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
        "bf16": {"enabled": config.train.precision == "bf16", "check_grad_overflow": False},
        # Overrides DeepSpeed's default of 1, because GuardedAdamW clips, by train.clip_norm
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**62,
        # this timer would wait for the device twice per step
        "timers": {"throughput": {"enabled": False}},
        "checkpoint": {"load_universal": universal},
    }


def _deepspeed_file(config: RunConfig) -> DeepSpeedFile:
    name = config.train.deepspeed
    if name is None:
        return DeepSpeedFile()
    text = find_config(name, "deepspeed", "train.deepspeed").read_text(errors="replace")
    return _validate(DeepSpeedFile, text, f"train.deepspeed={name!r}: ")


def zero_stage(config: RunConfig) -> int:
    zero, stage_set = _deepspeed_file(config).zero_optimization, config.train.zero_stage
    if stage_set is not None and "stage" in zero.model_fields_set and stage_set != zero.stage:
        raise ConfigError(
            f"train.zero_stage={stage_set}, but {config.train.deepspeed} has stage {zero.stage}: set "
            "only one of them"
        )
    return zero.stage if stage_set is None else stage_set


def micro_batch_and_passes(config: RunConfig, world: int) -> tuple[int, int]:
    """Returns (crops per rank and forward pass, forward passes per step)."""
    t = config.train
    share, remainder = divmod(t.batch_crops, world)
    if remainder:
        raise ConfigError(
            f"train.batch_crops={t.batch_crops}: must be a multiple of the {world} ranks"
        )
    micro = t.micro_batch or share
    if share % micro:
        raise ConfigError(
            f"train.micro_batch={micro}: must divide train.batch_crops / ranks = {t.batch_crops} "
            f"/ {world} = {share}"
        )
    return micro, share // micro


def count_candidates(config: Config, world: int) -> int:
    """Returns how many crops are contrasted with each other."""
    return micro_batch_and_passes(config, world)[0] * (
        world if config.objective.compares_across_ranks else 1
    )


def check_config(config: RunConfig, world: int) -> None:
    """Raises ConfigError if settings contradict each other."""
    t, weights, datasets = config.train, config.pipeline.weights, config.data.datasets
    stage = zero_stage(config)
    micro_batch_and_passes(config, world)
    problems = [
        (
            not config.run,
            ("run='': name a folder: ", Flag("--set run=runs/first")),
        ),
        (not datasets, ("data.datasets=[]: name a dataset: ", Flag("--data"), " DATASET")),
        (
            t.steps and t.epochs,
            (
                f"train.steps={t.steps}, train.epochs={t.epochs}: set only one: ",
                Flag("--set train.epochs=null"),
            ),
        ),
        (
            not (t.steps or t.epochs),
            (
                "train.steps and train.epochs are not set: give one: ",
                Flag("--set train.steps=1000"),
            ),
        ),
        (
            stage == 3 and t.compile not in (None, "eager"),
            f"train.compile={t.compile}: ZeRO stage 3 needs eager",
        ),
        (
            stage == 0 and t.precision == "bf16",
            "train.zero_stage=0: DeepSpeed's bf16 Adam is one step off there: use stage 1",
        ),
        (
            "offload_optimizer" in (_deepspeed_file(config).zero_optimization.model_extra or {}),
            f"train.deepspeed={t.deepspeed!r}: offload_optimizer is not supported, because omnilead's "
            "AdamW runs on the GPU: leave it out",
        ),
        (
            t.schedule == "tri_stage" and t.warmup + t.hold > 1,
            f"train.warmup={t.warmup}, train.hold={t.hold}: are shares of all steps and must add "
            "up to 1 at most",
        ),
        (
            weights and len(weights) != len(datasets),
            f"pipeline.weights={weights}: give one for each of data.datasets",
        ),
    ]
    for is_wrong, message in [*problems, *config.problems(world)]:
        if is_wrong:
            raise ConfigError(*([message] if isinstance(message, str) else message))


def load_config(
    path: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    kind: type[Kind] | None = None,
) -> Kind:
    """Reads a YAML file, or a shipped config by its name, and applies `overrides`: a list of
    "key=value", or a mapping from dotted keys to values. `kind`: the class of the settings; None:
    Config."""

    config_kind: Any = kind or Config
    tree = read_yaml(find_config(path, config_kind.config_folder), config_kind.config_folder)
    config: Kind = build_config(apply_overrides(tree, overrides), config_kind)
    return config
