"""Reads the settings of a pre-training from a config, or from the run or model that it continues.

config = read_settings(None, {"start": "RUN"})      # those of the run, or of the model and its objective
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..model.folder import CONFIG, PREPROCESSING, config_of, model_folder, read_document
from ..settings.commandline import apply_overrides, read_mapping
from ..settings.errors import ConfigError, Flag
from ..settings.files import flatten, portable_spec
from .config import Config, build_config, load_config

QUICKSTART = "quickstart"  # the shipped config that is read if none is given
INPUT_SETTINGS = ("window_s", "fs_hz", "band_hz", "clip_mv", "scale")
# Settings that may name the user's own code
CODE_SETTINGS = ("model.encoder", "augment.extra", "objective.method")
# Settings that may name a file or a service, and their defaults
SERVICE_DEFAULTS: dict[str, Any] = {
    "train.deepspeed": None,
    "train.track": ["tensorboard"],
    "pipeline.cache_dir": None,
}


def read_settings(
    config: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Config:
    """Reads settings as engine.training.config.load_config does. Without a config, it takes the
    settings of the run `start`. If `start` is a model folder or a fine-tuned run, it takes the
    model, objective and input of `start`. Without a config and without `start`, it reads the quick
    start."""
    set_by_user = apply_overrides({}, overrides)
    start = set_by_user.get("start")
    if config or not start or not isinstance(start, str):
        return load_config(config or QUICKSTART, overrides)
    before = Path(start, "config.yaml")
    if before.is_symlink():
        raise ConfigError(
            f"start={start}: {before} is a link, which is not followed: give the run itself, or "
            "RUN/model"
        )
    settings = read_mapping(before) if before.is_file() else {"task": {}}
    if "task" not in settings:
        left_out = ("run", "start", "data")
        tree = {name: section for name, section in settings.items() if name not in left_out}
    else:  # `start` is a model folder or a fine-tuned run
        with model_folder(start) as (folder, _):
            document = read_document(folder / CONFIG)
            preprocessing = read_document(folder / PREPROCESSING)
        from ..model.input import Input  # imported here because PyTorch takes seconds to import

        tree = {name: document[name] for name in ("model", "objective") if name in document}
        signals = Input.from_document(preprocessing, config_of(document).leads)
        tree["input"] = {name: getattr(signals, name) for name in INPUT_SETTINGS}
    refuse_foreign_settings(start, flatten(tree), flatten(set_by_user))
    objective, method = tree.get("objective", {}), flatten(set_by_user).get("objective.method")
    if method and portable_spec(str(method)) != portable_spec(str(objective.get("method"))):
        # these options are for the class of `start`, which the user replaced
        objective.pop("options", None)
    return build_config(apply_overrides(tree, overrides))


def refuse_foreign_settings(
    start: str, settings: dict[str, Any], set_by_user: dict[str, Any]
) -> None:
    """Raises ConfigError if `settings`, those of `start`, name code, files or services that the
    user has not named again. The run `start` may come from anyone."""
    for key, value in settings.items():
        option = Flag(f"--set {key}={value}")
        if key in set_by_user:
            continue
        if key in CODE_SETTINGS and ":" in str(value):
            raise ConfigError(
                f"start={start}: {key}={value} is code: to run that code, name the file: ", option
            )
        if key in SERVICE_DEFAULTS and value != SERVICE_DEFAULTS[key]:
            raise ConfigError(
                f"start={start}: {key}={value} is a file or a service: to use it again, add ",
                option,
            )
