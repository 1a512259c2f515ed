"""Wraps a training in a command line and in a Python function. After the training it writes RUN/model, a
model card and RUN/report.html. PyTorch is imported only when most settings have been checked.

main = partial(run_training_command, "pretrain", __doc__, train_run, pretrain_task, pretrain_settings, "quickstart", SHORTCUTS)
main(["--config", "w2v_cmsc_rlm", "--data", "DATASET", "--out", "RUN"])  # -> exit code

run = run_from_python(train_run, pretrain_task, pretrain_settings, None, "DATASET", "RUN", {"train.steps": 1000})
run.validation[-1], run.report

export_run(RunFolder("RUN"), PretrainTask)               # RUN/model from a checkpoint

Model cards, reports and `omnilead.load` are no part of the engine. Whoever starts a training hands them
in as an AfterTraining; without one, RUN has neither card nor report.
"""

import argparse
import errno
import html
import json
import os
import signal
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from omnilead.data_tools.io.commands import run_command
from omnilead.data_tools.io.errors import Flag, UserError, naming_arguments_in_errors
from omnilead.data_tools.io.options import Option, add_option, declare_option
from omnilead.data_tools.io.terminal import Parser, is_out_of_memory, print_result, say
from omnilead.engine.settings.commandline import (
    local_run_path,
    note_for_torchrun,
    parse_price,
    positive_integer,
    tell_failure,
)
from omnilead.engine.settings.errors import ConfigError, TrainError
from omnilead.engine.settings.launcher import launched_rank
from omnilead.engine.settings.run_files import METRICS, REPORT, VALIDATION, read_metric_rows

if TYPE_CHECKING:
    from omnilead.data_tools.dataset import Data, Dataset
    from omnilead.engine.training.config import RunConfig
    from omnilead.engine.training.run_folder import RunFolder
    from omnilead.engine.training.task import TrainingTask

    # A function that returns the class of the task. To do so, it imports PyTorch
    Task = Callable[[], type[TrainingTask]]
    # A function that returns (the class of the settings, the function that reads them from a config
    # and from the overrides of --set). It does not import PyTorch
    Settings = Callable[[], tuple[type[RunConfig], Callable[..., Any]]]
    Train = Callable[..., bool]  # has the signature of engine.pretrain.train_run

HOW_TO_SAVE_MEMORY = "lower train.micro_batch or pipeline.read_ahead, or free memory"
HOW_TO_CONTINUE = ": the same command continues"
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
# Options that stand for a setting: name of the option -> (setting, type and help of the option)
Shortcuts = Mapping[str, tuple[str, Any]]
SHORTCUTS: Shortcuts = {
    "start": (
        "start",
        Annotated[str, Option("a run or model folder whose weights training starts from", "RUN")],
    ),
    "data": (
        "data.datasets",
        Annotated[
            Sequence[str],
            Option(
                "datasets, 'ds/2027-*', or a .txt file that lists them; s3:// works too", "DATASET"
            ),
        ],
    ),
    "out": (
        "run",
        Annotated[str, Option("the run's folder; a run that was interrupted is resumed", "RUN")],
    ),
    "anonymous": (
        "data.anonymous",
        Annotated[bool, Option("s3:// data without credentials")],
    ),
}


@dataclass(frozen=True)
class AfterTraining:
    """Functions that make the model card and the report of a trained run, and load its model. Each
    imports what it needs when called, since the engine must not import downstream."""

    model_card: Callable[..., str]  # the text of RUN/model/README.md
    write_report: Callable[[Path], Path]  # writes RUN/report.html
    load: Callable[..., Any]  # loads a model, as omnilead.load does


class TrainingParser(Parser):
    """A parser that knows the settings: for `--steps 10` it suggests `--set train.steps=10`."""

    settings: Callable[[], Any]  # returns the class of the settings
    shortcuts: Shortcuts

    def suggest(self, option: str, value: str) -> str:
        from omnilead.engine.training.config import DEVICE_SETTING, nearest_settings, settings_named

        name, kind = option.lstrip("-").replace("-", "_"), self.settings()
        if DEVICE_SETTING.search(name):
            return "CUDA_VISIBLE_DEVICES in the environment"
        near = settings_named(name, kind)
        if not near and (other := super().suggest(option, value)):
            return other
        near = near or nearest_settings(name, kind)
        options = {setting: f"--{name}" for name, (setting, _) in self.shortcuts.items()}
        return options.get(near[0], f"--set {near[0]}={value or '...'}") if near else ""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            note_for_torchrun(message.strip())
        super().exit(status, message)


def run_training_command(
    name: str,
    about: str | None,
    train: "Train",
    task: "Task",
    settings: "Settings",
    default: str | None,
    shortcuts: Shortcuts,
    arguments: Sequence[str] | None = None,
    after: AfterTraining | None = None,
) -> int:
    """Parses the command line and calls `train`, which is engine.pretrain.train_run. Returns the
    exit code; errors are printed as one line. `default`: what --help names as the default
    config."""
    parser = _make_parser(name, about, default, shortcuts, pretended=name == "pretrain")
    parser.settings = lambda: settings()[0]
    args = parser.parse_args(arguments)
    set_options = [key for key, value in vars(args).items() if value not in (None, False, [])]
    ignored = [
        f"--{key.replace('_', '-')}"
        for key in set_options
        if key not in ("export", "schema", "local_rank")
    ]
    if ignored and (args.export or args.schema):
        parser.error(f"{' '.join(ignored)}: --export and --schema take no other option")

    if args.dry_run and args.profile:
        parser.error("--profile: --dry-run runs no step: leave one of them out")
    for option in ("crops", "hourly"):
        if getattr(args, option) is not None and not args.dry_run:
            parser.error(f"--{option}: is for --dry-run")
    if args.crops and args.data:
        parser.error(f"--crops {args.crops}: instead of --data, of which there is none yet")

    from omnilead.engine.training.config import json_schema
    from omnilead.engine.training.run_folder import RunFolder

    kind, read = settings()

    def execute() -> int:
        if args.schema:
            # if `| head` closes the pipe, end without an error
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            return print_result(json_schema(kind) + "\n")
        if args.export:
            say(str(export_run(RunFolder(args.export), task(), after)))
            return 0
        if args.dry_run and launched_rank().rank:
            return 0
        config = read(args.config, [*_settings_of_options(args, shortcuts), *args.set])
        if args.dry_run:
            return print_result(_dry_run(config, task, args) + "\n")
        train(config, task, args.profile or 0, after)
        return 0

    return run_command(
        f"omnilead {name}", execute, explain_training_error, HOW_TO_CONTINUE, tell_failure
    )


def _dry_run(config: Any, task: "Task", args: argparse.Namespace) -> str:
    from omnilead.engine.training.config import check_config
    from omnilead.engine.training.run_folder import open_datasets

    check_config(config, args.dry_run)
    if args.crops:
        from omnilead.engine.training.pretended import pretend_dataset

        datasets: list[Dataset] = [pretend_dataset(args.crops, config.train.batch_crops)]
    else:
        datasets = open_datasets(config)
    config.require_files()
    # This imports PyTorch, which takes seconds, so wrong settings are reported before
    from omnilead.engine.training.dry_run import dry_run

    return dry_run(config, task(), datasets, args.dry_run, args.crops, args.hourly)


def _make_parser(
    name: str, about: str | None, default: str | None, shortcuts: Shortcuts, pretended: bool
) -> TrainingParser:
    parser = TrainingParser(
        f"omnilead {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.shortcuts = shortcuts
    add = parser.add_argument
    which = f" (default: {default})" if default else ""
    add("--config", metavar="NAME|F", help=f"a shipped config by its name, or a YAML file{which}")
    for word, (setting, annotation) in shortcuts.items():
        add_option(parser, declare_option(word, annotation), f"; --set {setting}=...")
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="a.b=c",
        help="settings by their names; may be given many times",
    )
    traced = (
        "trace N steps after a warm-up into RUN/profile, print the slowest operations, and "
        "continue training"
    )
    add("--profile", type=positive_integer, metavar="N", help=traced)
    add(
        "--dry-run",
        type=positive_integer,
        nargs="?",
        const=1,
        metavar="GPUS",
        help="print the settings, the data, and estimates of memory, time and disk on so many GPUs "
        "(1), and exit; RUN is not looked at",
    )
    if pretended:
        about_crops = "with --dry-run: of so many crops, without a dataset"
        add("--crops", type=positive_integer, metavar="N", help=about_crops)
    else:
        parser.set_defaults(crops=None)
    about_hourly = "with --dry-run: what a GPU costs in an hour, for an estimate of the money"
    add("--hourly", type=parse_price, metavar="PRICE", help=about_hourly)
    add("--export", type=local_run_path, metavar="RUN", help="write RUN/model and exit")
    add("--schema", action="store_true", help="print the JSON schema of the settings and exit")
    # DeepSpeed's launcher adds this option; the variable LOCAL_RANK is used instead
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def _settings_of_options(args: argparse.Namespace, shortcuts: Shortcuts) -> list[str]:
    """Returns the settings for which options were given, as `setting=value` like those of --set."""
    overrides = []
    for name, (setting, _) in shortcuts.items():
        value = getattr(args, name)
        if value is not None:
            overrides.append(f"{setting}={json.dumps(value)}")
    if args.crops:
        overrides.append(f"data.datasets={json.dumps([f'{args.crops} crops'])}")
    return overrides


def finish_run(run: "RunFolder", task: "type[TrainingTask]", after: AfterTraining | None) -> None:
    """Writes RUN/model and RUN/report.html on rank 0, when all steps are done."""
    if launched_rank().rank:
        return
    written = [str(export_run(run, task, after))]
    if after:
        written.append(str(after.write_report(run.path)))
    say(f"done: {', '.join(written)}")


def export_run(
    run: "RunFolder", task: "type[TrainingTask]", after: AfterTraining | None = None
) -> Path:
    """Writes RUN/model from a checkpoint of the run. `after`: makes the model card."""
    from omnilead.engine.training.export import read_export, write_export

    read, card = read_export(run, task), ""
    if after:
        card = after.model_card(run.path, read.config, read.state, read.weights, task)
    return write_export(run, read, task, card)


def explain_training_error(error: Exception) -> UserError | None:
    """Returns the error that the user sees instead of `error`; None if `error` is a bug. The exit
    code of the returned error is 2 if settings or files are wrong, 1 if the run failed."""
    if isinstance(error, UserError):
        return error
    if is_out_of_memory(error):
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        return TrainError(f"out of memory: {HOW_TO_SAVE_MEMORY} ({reason})")
    if isinstance(error, UnicodeEncodeError):  # torch accepts only paths in UTF-8
        return ConfigError(f"{error.object[:200]!r}: not UTF-8: choose another name")
    if isinstance(error, OSError):
        what = (error.filename,) if error.filename else (Flag("--out"), " RUN")
        if error.errno in NOT_WRITABLE:
            mend = ": choose another folder with ", Flag("--out"), " RUN"
            return ConfigError(*what, f": {error.strerror}", *mend)
        return TrainError(*what, f": {error.strerror}: the last checkpoint is intact")
    if isinstance(error, RuntimeError):
        from omnilead.engine.training.distributed import lost_a_rank

        if lost_a_rank(error):
            reason = textwrap.shorten(str(error).splitlines()[0], 150, placeholder=" ...")
            return TrainError(f"another rank died or hung ({reason}): start again to resume")
    return None


@dataclass(frozen=True)
class TrainingRun:
    """A finished run. Pass it wherever a path to a run is expected: omnilead.load(run),
    omnilead.finetune(run, ...)."""

    path: Path
    after: AfterTraining | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    @naming_arguments_in_errors()
    def model(self, **options: Any) -> Any:
        """Loads the trained model: returns what omnilead.load(RUN, **options) returns."""
        if not self.after:
            raise ConfigError(
                f"{self.path}: the engine trains models but cannot load them: use omnilead.load"
            )
        return self.after.load(self.path, **options)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The training metrics, one row for each logged step: pandas.DataFrame(run.metrics)."""
        return read_metric_rows(self.path / METRICS).rows

    @property
    def validation(self) -> list[dict[str, Any]]:
        return read_metric_rows(self.path / VALIDATION).rows

    @property
    def report(self) -> Path:
        """Returns the path of the run's report, an HTML page."""
        return self.path / REPORT

    def _repr_html_(self) -> str:
        if not self.report.is_file():
            return html.escape(repr(self))
        page = html.escape(self.report.read_text(), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'


def run_from_python(
    train: "Train",
    task: "Task",
    settings_of: "Settings",
    config: str | Path | None,
    data: "Data | Sequence[Data]",
    out: str | os.PathLike[str],
    settings: Mapping[str, Any],
    after: AfterTraining | None = None,
) -> TrainingRun:
    """Implements omnilead.pretrain and omnilead.finetune."""
    from omnilead.data_tools.dataset import dataset_paths
    from omnilead.engine.training.run_folder import RunFolder

    overrides: dict[str, Any] = {
        "data.datasets": dataset_paths(data, "data"),
        "run": os.fspath(out),
    }
    for name, value in settings.items():
        overrides[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    try:
        finished = train(settings_of()[1](config, overrides), task, 0, after)
    except Exception as error:
        failure = explain_training_error(error)
        if failure is None or failure is error:
            raise
        raise failure from error
    if not finished:
        raise KeyboardInterrupt(f"{os.fspath(out)}: training was stopped: the same call resumes it")
    return TrainingRun(RunFolder(os.fspath(out)).path, after)
