"""The tree of settings: YAML and `--set a.b=c` -> one frozen Config, or one line that names the key.

    config = load("configs/pretrain/w2v_cmsc_rlm.yaml", ["train.steps=100", "data.datasets=[DATASET]"])
    check(config, world=8)                    # every combination that cannot be, before any work is done
    load("configs/finetune/diagnosis.yaml", ["start=RUN"], FinetuneConfig)
    python engine/pretrain.py --schema        # JSON schema, for editors

Each component's settings are a dataclass that lies beside its code; here they are gathered. A file may begin with
`base: other.yaml`, and says then only what differs. Unknown keys and values of the wrong type are errors.
"""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from engine.common import ConfigError
from engine.data.augment import AugmentConfig
from engine.data.augmenter import HALF
from engine.data.loader import LoaderConfig
from engine.model.classifier import HeadConfig
from engine.model.config import ModelConfig, ObjectiveConfig, current_settings
from engine.model.draws import max_masked
from engine.yaml_files import over, parse, read

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
QUICKSTART = CONFIGS / "pretrain" / "quickstart.yaml"
CPUINFO = Path("/proc/cpuinfo")
SHOWN = 80  # characters of a wrong value
ALIASES = {  # what others call it
    "learning_rate": "train.lr",
    "batch_size": "train.batch_crops",
    "per_device_train_batch_size": "train.micro_batch",
    "micro_batch_size": "train.micro_batch",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "max_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "warmup_steps": "train.warmup",
    "warmup_ratio": "train.warmup",
    "max_grad_norm": "train.clip_norm",
    "gradient_clipping": "train.clip_norm",
    "dtype": "train.precision",
    "save_steps": "train.save_every_steps",
    "eval_steps": "train.validate_every",
    "logging_steps": "train.log_every",
    "num_workers": "pipeline.threads",
    "output_dir": "run",
    "out": "run",
    "dataset": "data.datasets",
    "hidden_size": "model.width",
    "num_layers": "model.layers",
    "num_heads": "model.heads",
    "checkpoint": "start",
    "pretrained": "start",
}
DEEPSPEED_KEYS = ("zero_optimization", "communication_data_type", "prescale_gradients", "gradient_predivide_factor")


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Roles(Section):
    """Which crops of a dataset: see data_tools.dataset.Dataset.select."""

    pretrain: bool | None = None
    dx: Literal["train", "valid", "test"] | None = None
    identity: Literal["train", "valid", "gallery", "probe"] | None = None


class DataConfig(Section):
    datasets: tuple[str, ...] = ()  # directories or s3:// addresses
    train: Roles = Roles(pretrain=True)
    valid: Roles = Roles(dx="valid")  # the loss is measured on these; datasets without any are left out
    hold_out: float = Field(default=0.0, ge=0, lt=1)  # share of the patients of `train` that validate instead of `valid`
    anonymous: bool = False  # s3:// without credentials


class PipelineConfig(Section):
    """LoaderConfig, less what other sections say."""

    backend: Literal["auto", "dali", "torch", "resident"] = "auto"
    views: Literal["halves", "window"] = "halves"
    block_shards: int = 0
    weights: tuple[float, ...] | None = None
    source: Literal["tar", "zarr"] | None = None
    check: Literal["first", "always", "never"] = "first"
    on_corrupt: Literal["stop", "skip"] = "stop"
    threads: int | None = None  # that read; None: one for a CPU, two for a GPU
    read_ahead: int = 2
    cache_dir: str | None = None
    cache_bytes: int = 100 * 2**30


class TrainConfig(Section):
    steps: int | None = Field(default=None, ge=1)  # this or epochs
    epochs: float | None = Field(default=None, gt=0, le=1e6)
    batch_crops: int = Field(default=512, ge=1)  # of all ranks together, whatever their number
    # Crops of a rank at a time; None: all. With fewer, gradients are accumulated, but contrasted crops meet only within a part
    # (of all ranks): candidates of CMSC, SimCLR, 3KG are then micro_batch x ranks crops. Diversity of codes is of a part too.
    micro_batch: int | None = Field(default=None, ge=1)
    precision: Literal["auto", "bf16", "fp32"] = "bf16"  # auto: bf16 where the hardware has it, and the run is told so
    zero_stage: int | None = Field(default=None, ge=0, le=3)  # None: as the DeepSpeed JSON says, else 1
    deepspeed: str | None = None  # JSON file, for ZeRO and communication only
    compile: Literal["eager", "layers", "step"] | None = None  # what torch.compile gets; None: the layers on CUDA
    lr: float = Field(default=5e-5, gt=0, le=1)
    schedule: Literal["fixed", "warmup_cosine", "tri_stage"] = "fixed"
    warmup: float = Field(default=0.1, ge=0, le=1)  # shares of all steps
    hold: float = Field(default=0.2, ge=0, le=1)  # tri_stage
    start_factor: float = Field(default=0.01, ge=0, le=1)  # of lr
    end_factor: float = Field(default=0.01, ge=0, le=1)
    weight_decay: float = Field(default=0.01, ge=0, le=1)  # on every parameter, decoupled
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = Field(default=1e-6, gt=0, le=1)
    clip_norm: float = Field(default=0.0, ge=0)  # 0: gradients are not clipped
    max_nonfinite: int = Field(default=10, ge=1, le=10**6)  # skipped steps in a row that end the run, looked for when it logs
    seed: int = Field(default=0, ge=0, lt=2**63)
    deterministic: bool = False  # on a GPU: kernels that add up in the same order each time, or an error that names the one
    track: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)  # beside metrics.jsonl
    log_every: int = Field(default=10, ge=1)
    validate_every: int = Field(default=0, ge=0)  # steps; 0: never
    valid_batches: int = Field(default=16, ge=1)
    best: Literal["loss", "auroc", "auprc", "challenge", "f_measure", "identification_accuracy"] | None = None  # Task.figures
    probe_patients: int = Field(default=256, ge=0)
    save_every_steps: int = Field(default=0, ge=0)  # 0: by time only, and at the end
    save_every_minutes: float = Field(default=30.0, gt=0)
    keep: int = Field(default=3, ge=1)  # checkpoints, beside the best one
    peak_tflops: float | None = Field(default=None, gt=0)  # of one device, for MFU; None: measured at the start
    timeout_s: float = Field(default=600.0, gt=0, le=1e6)  # a rank that is silent for so long ends the run

    @field_validator("precision")
    @classmethod
    def _found(cls, asked: str) -> str:
        return asked if asked != "auto" else "bf16" if has_bf16() else "fp32"


def has_bf16() -> bool:
    """Of its own: emulated it is slower than fp32."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(CPUINFO.read_text().split())


class FinetuneData(Section):
    """The roles are those of the task: engine.training.finetuning."""

    datasets: tuple[str, ...] = ()
    anonymous: bool = False


class Tuning(Section):
    """What fine-tuning changes in the encoder that it starts from. Defaults are the authors' (their finetuning configs)."""

    feature_grad: float = 0.0  # 0: the convolutions stay as they are; 1: they learn like the rest
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.1
    input_dropout: float = 0.0


class Settings(Section):
    """What every run has."""

    defaults: ClassVar[dict[str, Any]] = {}  # within sections, where they are not those of the section
    run: str
    data: Any
    pipeline: PipelineConfig = PipelineConfig()
    augment: AugmentConfig = AugmentConfig()
    train: TrainConfig = TrainConfig()

    def tree(self) -> dict[str, Any]:
        """As JSON and YAML hold it."""
        plain: dict[str, Any] = json.loads(self.model_dump_json())
        return plain

    @property
    def loader(self) -> LoaderConfig:
        given = {name: getattr(self.train, name) for name in ("batch_crops", "micro_batch", "seed")}
        return LoaderConfig(**dict(self.pipeline), **given, augment=self.augment)


class Config(Settings):
    """Of a pre-training."""

    run: str = "runs/pretrain"
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()


class FinetuneConfig(Settings):
    run: str = "runs/finetune"
    start: str = ""  # a pre-trained run or model; or a pre-training YAML: its architecture with random weights
    data: FinetuneData = FinetuneData()
    defaults: ClassVar[dict[str, Any]] = {"augment": {"rlm": 0.0}}  # nothing is masked unless asked for, whatever else is set
    augment: AugmentConfig = AugmentConfig(rlm=0.0)
    encoder: Tuning = Tuning()
    head: HeadConfig = HeadConfig()

    def tuned(self, model: ModelConfig) -> ModelConfig:
        """The architecture of the start, as it is trained here."""
        return replace(model, leads=len(self.augment.output_leads), **dict(self.encoder))


Kind = TypeVar("Kind", bound=Settings)


def load(path: str | Path, overrides: Sequence[str] = (), kind: type[Kind] = Config) -> Kind:  # type: ignore[assignment]
    tree = read(Path(path))
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {override!r}: write key=value, for example --set train.steps=100")
        _set(tree, key.strip().split("."), parse(value, f"--set {key}"))
    return build(tree, kind)


def build(tree: dict[str, Any], kind: type[Kind] = Config) -> Kind:  # type: ignore[assignment]
    for other, door in ((Config, "engine/pretrain.py"), (FinetuneConfig, "engine/finetune.py")):
        if foreign := sorted(tree.keys() & (other.model_fields.keys() - kind.model_fields.keys())):
            raise ConfigError(f"{foreign[0]}: is a setting of {door}: name other settings, or another run")
    if isinstance(tree.get("model"), dict):
        tree = tree | {"model": current_settings(tree["model"])}
    _known(tree, list(keys(kind)))
    tree = over(kind.defaults, tree)
    augment = tree.get("augment")
    if isinstance(augment, dict) and type(augment.get("leads")) is int:
        tree = tree | {"augment": augment | {"leads": str(augment["leads"])}}
    try:
        return kind.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"] if not re.search(r"\W", str(part)))
        if first["type"] == "json_invalid":
            raise ConfigError("a value is no UTF-8 text: write another") from None
        given = repr(first["input"])
        mend = f": write {key}=[{first['input']}]" if first["type"] == "tuple_type" else ""
        if len(given) > SHOWN:
            given, mend = f"{given[:SHOWN]}...", ""
        raise ConfigError(f"{key}={given}: {first['msg'][0].lower()}{first['msg'][1:]}{mend}") from None
    except TypeError as error:  # a date, say
        raise ConfigError(f"a value is none that JSON knows: {error}") from None


def schema(kind: type[Settings] = Config) -> str:
    return json.dumps(kind.model_json_schema(), indent=1)


def keys(component: Any = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted name that there is."""
    if isinstance(component, type) and issubclass(component, BaseModel):
        parts: list[tuple[str, Any]] = [(name, field.annotation) for name, field in component.model_fields.items()]
    else:
        parts = [(field.name, field.type) for field in fields(component)]
    for name, kind in parts:
        yield prefix + name
        for inner in (kind, *getattr(kind, "__args__", ())):
            if isinstance(inner, type) and (is_dataclass(inner) or issubclass(inner, BaseModel)):
                yield from keys(inner, f"{prefix}{name}.")


def _known(tree: dict[str, Any], known: list[str], prefix: str = "") -> None:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key not in known:
            alias = [other for other in known if other == ALIASES.get(str(name))]
            tail = [other for other in known if other.split(".")[-1] == str(name)]
            near = tail or alias or difflib.get_close_matches(key[:SHOWN], known, 1, 0.5)
            raise ConfigError(f"{key[:SHOWN]}: no such key" + (f": did you mean {near[0]}?" if near else ""))
        if isinstance(value, dict):
            _known(value, known, f"{key}.")


def _set(tree: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[names[-1]] = value


def deepspeed_json(config: Settings, world: int, universal: bool = False) -> dict[str, Any]:
    """ZeRO and communication from the file, all else from the tree."""
    own = _own_deepspeed(config.train.deepspeed)
    zero: dict[str, Any] = own.pop("zero_optimization", {}) | {"stage": zero_stage(config)}
    if zero["stage"] in (1, 2):
        zero["compute_grad_norm"] = False  # the optimizer takes it, without waiting for the device
    elif zero["stage"] == 3:
        zero["sub_group_size"] = 10**12  # one step of the optimizer a step
    micro, accumulation = micro_batch(config, world)
    return own | {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
        "bf16": {"enabled": config.train.precision == "bf16", "check_grad_overflow": False},
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1; the optimizer clips, by train.clip_norm
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**62,
        "timers": {"throughput": {"enabled": False}},  # it waits for the device, twice a step
        "checkpoint": {"load_universal": universal},
    }


def _own_deepspeed(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    found = next((p for p in (Path(path), CONFIGS.parent / path) if p.is_file()), None)
    if found is None:
        raise ConfigError(f"train.deepspeed={path!r}: no such file; {CONFIGS / 'deepspeed'} has some")
    try:
        own = json.loads(found.read_text())
        names, stage = set(own), own.get("zero_optimization", {}).get("stage", 1)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"train.deepspeed={path!r}: no JSON of DeepSpeed's form: {error}") from None
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"train.deepspeed={path!r}: zero_optimization.stage={stage!r}: use 0, 1, 2 or 3")
    if names - set(DEEPSPEED_KEYS):
        allowed = ", ".join(DEEPSPEED_KEYS)
        raise ConfigError(
            f"train.deepspeed={path!r}: {sorted(names - set(DEEPSPEED_KEYS))[0]} is set in `train`: keep to {allowed}"
        )
    return dict(own)


def zero_stage(config: Settings) -> int:
    in_file = _own_deepspeed(config.train.deepspeed).get("zero_optimization", {}).get("stage")
    asked = config.train.zero_stage
    if asked is not None and in_file is not None and asked != in_file:
        raise ConfigError(f"train.zero_stage={asked}, but {config.train.deepspeed} has stage {in_file}: leave one of them out")
    stage: int = next((stage for stage in (asked, in_file) if stage is not None), 1)
    return stage


def micro_batch(config: Settings, world: int) -> tuple[int, int]:
    """Crops of a rank at a time, and how many times to a step."""
    t = config.train
    share, rest = divmod(t.batch_crops, world)
    if rest or not share:
        raise ConfigError(f"train.batch_crops={t.batch_crops}: must be a multiple of the {world} ranks")
    micro = t.micro_batch or share
    if share % micro:
        raise ConfigError(
            f"train.micro_batch={micro}: must divide the {share} crops of a rank "
            f"(train.batch_crops={t.batch_crops} / {world} ranks)"
        )
    return micro, share // micro


def check(config: Settings, world: int) -> None:
    """What no section can see by itself."""
    t = config.train
    if not config.run or "://" in config.run:
        raise ConfigError(f"run={config.run!r}: must be a local folder, for example --set run=runs/first")
    if not config.data.datasets:
        raise ConfigError("data.datasets=[]: name a dataset, for example --set data.datasets=[DATASET]")
    if t.steps is not None and t.epochs is not None:
        cure = "add --set train.epochs=null, or --set train.steps=null"
        raise ConfigError(f"train.steps={t.steps}, train.epochs={t.epochs}: only one of the two may be set: {cure}")
    if t.steps is None and t.epochs is None:
        raise ConfigError("train.steps and train.epochs are not set: give one, for example --set train.steps=1000")
    micro_batch(config, world)
    if zero_stage(config) == 3 and t.compile not in (None, "eager"):
        raise ConfigError(f"train.compile={t.compile} with ZeRO stage 3, which gathers weights layer by layer: use eager")
    if zero_stage(config) == 0 and t.precision == "bf16":
        raise ConfigError("train.zero_stage=0 with train.precision=bf16: DeepSpeed's Adam is one step off there: use stage 1")
    if t.schedule == "tri_stage" and t.warmup + t.hold > 1:
        raise ConfigError(f"train.warmup={t.warmup}, train.hold={t.hold}: shares of all steps: together 1 at most")
    if not all(0 <= beta < 1 for beta in t.betas):
        raise ConfigError(f"train.betas={list(t.betas)}: each must be from 0 to below 1")
    if config.pipeline.weights is not None and len(config.pipeline.weights) != len(config.data.datasets):
        raise ConfigError(f"pipeline.weights={list(config.pipeline.weights)}: must be one for each of data.datasets")
    _ = config.loader  # its own checks
    if isinstance(config, Config):
        _check_pretraining(config, world)
    elif isinstance(config, FinetuneConfig):
        _check_finetuning(config)


def _check_pretraining(config: Config, world: int) -> None:
    objective, augment = config.objective, config.augment
    seen = len(augment.output_leads)
    if config.model.leads != seen:
        raise ConfigError(f"model.leads={config.model.leads}: augment.leads={augment.leads!r} gives it {seen}: write that")
    if objective.local > 0:
        max_masked(config.model, config.model.tokens(HALF))
    window = config.pipeline.views == "window"
    if objective.contrast > 0 and window != (objective.method != "cmsc"):
        right = "halves" if objective.method == "cmsc" else "window"
        raise ConfigError(f"pipeline.views={config.pipeline.views!r}: objective.method={objective.method} needs {right}")
    if objective.contrast > 0 and window and not (augment.rlm or augment.kinds or augment.threekg):
        raise ConfigError("pipeline.views='window' without augmentation: both views are the same: set augment.rlm or noise")
    if objective.contrast > 0 and candidates(config, world) < 2:
        raise ConfigError(
            f"train.batch_crops={config.train.batch_crops}, train.micro_batch={config.train.micro_batch}: a crop is contrasted "
            "with the others of its micro-batch, and there is none: use 2 or more, or objective.contrast=0"
        )


def candidates(config: Config, world: int) -> int:
    """Crops among which each is to find its other half, or view."""
    return micro_batch(config, world)[0] * (world if config.objective.across_ranks else 1)


def _check_finetuning(config: FinetuneConfig) -> None:
    if not config.start:
        example = "--set start=runs/small, or --set start=configs/pretrain/small.yaml for random weights"
        raise ConfigError(f"start='': name a pre-trained run or model, for example {example}")
    if config.pipeline.views != "halves":
        raise ConfigError(f"pipeline.views={config.pipeline.views!r}: fine-tuning sees both halves of a crop: use halves")
    if config.augment.threekg:
        raise ConfigError("augment.threekg: is made for pre-training: leave it out")
