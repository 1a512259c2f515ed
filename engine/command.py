"""The command line of `pretrain` and `finetune`. PyTorch is imported only once the arguments are
known.

main = partial(command, "pretrain", __doc__, train_run, pretrain_task, "quickstart", SHORTCUTS)
main(["--config", "w2v_cmsc_rlm", "--data", "DATASET", "--out", "RUN"])  # -> exit code
"""

import argparse
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from omnilead.data_tools.io.terminal import Parser, say, show

from .settings.commandline import note_for_torchrun, positive, run_folder, tell_failure

Shortcut = tuple[
    str, dict[str, Any]
]  # the setting that an option sets, and its arguments for argparse
SHORTCUTS: dict[str, Shortcut] = {
    "--start": (
        "start",
        {"metavar": "RUN", "help": "a run or model folder whose weights training starts from"},
    ),
    "--data": (
        "data.datasets",
        {"nargs": "+", "metavar": "DATASET", "help": "one or more datasets; s3:// works too"},
    ),
    "--out": (
        "run",
        {"metavar": "RUN", "help": "the run's folder; a run that was interrupted is resumed"},
    ),
    "--anonymous": (
        "data.anonymous",
        {"action": "store_const", "const": True, "help": "s3:// data without credentials"},
    ),
}


class TrainingParser(Parser):
    """Knows the settings: suggests `--set train.steps=10` instead of `--steps 10`."""

    settings: Callable[[], Any]  # their class
    shortcuts: Mapping[str, Shortcut]

    def suggest(self, option: str, value: str) -> str:
        from .training.config import DEVICE, nearest_settings, settings_named

        name, kind = option.lstrip("-").replace("-", "_"), self.settings()
        if DEVICE.search(name):
            return "CUDA_VISIBLE_DEVICES in the environment"
        near = settings_named(name, kind)
        if not near and (other := super().suggest(option, value)):
            return other
        near = near or nearest_settings(name, kind)
        options = {setting: option for option, (setting, _) in self.shortcuts.items()}
        return options.get(near[0], f"--set {near[0]}={value or '...'}") if near else ""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            note_for_torchrun(message.strip())
        super().exit(status, message)


def command(
    name: str,
    about: str | None,
    train: Callable[..., bool],
    task: Callable[[], Any],
    default: str | None,
    shortcuts: Mapping[str, Shortcut],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parses the arguments and trains with engine.pretrain.train_run. `task`: imports the class of
    the task. `default`: the default config, for --help. Errors are one line and an exit code."""
    parser = _parser(name, about, default, shortcuts)
    parser.settings = lambda: task().settings
    args = parser.parse_args(arguments)
    given = [key for key, value in vars(args).items() if value not in (None, False, [])]
    ignored = [f"--{key}" for key in given if key not in ("export", "schema", "local_rank")]
    if ignored and (args.export or args.schema):
        parser.error(f"{' '.join(ignored)}: --export and --schema take no other option")

    from .run import export, message_and_code
    from .training.config import schema
    from .training.run_folder import RunFolder

    task_class = task()
    try:
        if args.schema:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is not an error
            return show(schema(task_class.settings) + "\n")
        if args.export:
            say(str(export(RunFolder(args.export), task_class)))
        else:
            settings = [*_overrides(args, shortcuts), *args.set]
            train(task_class.read(args.config, settings), task_class, args.profile or 0)
    except (Exception, KeyboardInterrupt) as error:
        message, code = message_and_code(error)
        if code != 130 or os.environ.get("RANK", "0") == "0":  # Ctrl-C reaches all ranks
            tell_failure(f"omnilead {name}: {' '.join(message.split())}", everywhere=code == 2)
        return code
    return 0


def _parser(
    name: str, about: str | None, default: str | None, shortcuts: Mapping[str, Shortcut]
) -> TrainingParser:
    parser = TrainingParser(
        f"omnilead {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.shortcuts = shortcuts
    add = parser.add_argument
    which = f" (default: {default})" if default else ""
    add("--config", metavar="NAME|F", help=f"a shipped config by its name, or a YAML file{which}")
    for option, (setting, how) in shortcuts.items():
        add(option, **{**how, "help": f"{how['help']}; --set {setting}=..."})
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
    add("--profile", type=positive, metavar="N", help=traced)
    add("--export", type=run_folder, metavar="RUN", help="write RUN/model and exit")
    add("--schema", action="store_true", help="print the JSON schema of the settings and exit")
    # added by deepspeed's launcher; LOCAL_RANK is used instead
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def _overrides(args: argparse.Namespace, shortcuts: Mapping[str, Shortcut]) -> list[str]:
    """The options that stand for a setting, as --set would say them."""
    overrides = []
    for option, (setting, _) in shortcuts.items():
        value = getattr(args, option.removeprefix("--"))
        if value is not None:
            overrides.append(f"{setting}={json.dumps(value)}")
    return overrides
