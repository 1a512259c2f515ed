"""Input and output of commands: settings files, --set, files of results, failures of ranks, Ctrl-C.

read_yaml(path)                   # merged over the file that its `base:` names
parse_yaml("5e-5", "--set lr")    # 5e-5
handle_interrupts("engine.x")    # call it before importing torch

A YAML file may begin with `base: other.yaml` and then holds only what differs from that file.
"""

import argparse
import errno
import json
import math
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]

from omnilead.data_tools.io.commands import run_command
from omnilead.data_tools.io.errors import DataError, Flag, UserError, write_error_advice
from omnilead.data_tools.io.options import add_options
from omnilead.data_tools.io.storage import write_whole
from omnilead.data_tools.io.terminal import Parser as Parser
from omnilead.data_tools.io.terminal import (
    file_error_parts,
    guard_streams,
    is_out_of_memory,
    print_result,
    tell,
)

from .errors import ConfigError, OutputError
from .files import find_config, merge

Actions = Mapping[str, tuple[Callable[..., Any], str, str]]
LENGTH_SETTINGS = ("train.steps", "train.epochs")
ALLOW_CODE_OPTION: Any = {
    "action": "store_true",
    "help": "allow running the custom encoder or head code in the model folder",
}
# how long the other ranks wait while rank 0 prints why the command fails; torchrun kills them 0.1 s
# after rank 0 exits, deepspeed after 1 s
OTHER_RANKS_WAIT_S = 10.0
# how long to wait for deepspeed's end; deepspeed itself waits 30 s for ranks that do not end
DEEPSPEED_END_TIMEOUT_S = 60
RESUMABLE = ": run the same command again to resume"
# After one of these errors, the same command would fail again
PERMANENT_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)
MAX_YAML_BYTES, MAX_YAML_VALUES, MAX_INTEGER = 2**20, 10_000, 2**63


class _YamlLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Loads YAML with limits, because a file may come from anyone: an alias counts as all the
    values that it repeats ("billion laughs"), and integers have at most 63 bits. Reads 5e-5 as a
    number, where YAML 1.1 has a string. A key may not occur twice, because PyYAML would silently
    use its last value."""

    def __init__(self, stream: bytes | str) -> None:
        super().__init__(stream)
        self.values = 0
        self.sizes: dict[int, int] = {}  # number of values in each finished node, by id(node)

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias, before = self.check_event(yaml.AliasEvent), self.values
        node = super().compose_node(parent, index)
        # an alias of an unfinished node makes that node contain itself, and counts as too many
        # values
        self.values += self.sizes.get(id(node), MAX_YAML_VALUES) if is_alias else 1
        if self.values > MAX_YAML_VALUES:
            raise yaml.YAMLError(
                f"more than {MAX_YAML_VALUES:,} values, counting those that aliases repeat"
            )
        self.sizes.setdefault(id(node), self.values - before)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if (key.tag, key.value) in seen:
                raise yaml.YAMLError(
                    f"line {key.start_mark.line + 1}: the key {key.value[:40]!r} occurs twice: "
                    "remove one"
                )
            seen.add((key.tag, key.value))
        return node

    def construct_integer(self, node: Any) -> int | str:
        if ":" in node.value:  # 8:1:1 is text, not a base-60 number as in YAML 1.1
            return str(node.value)
        value: int = self.construct_yaml_int(node)
        if abs(value) >= MAX_INTEGER:
            raise yaml.YAMLError("an integer has more than 63 bits")
        return value


_YamlLoader.add_constructor("tag:yaml.org,2002:int", _YamlLoader.construct_integer)


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(path: Path, folder: str = "", above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Reads a YAML file and merges it over its `base:`, which is a path relative to the file or
    a config shipped in `folder`."""
    tree = read_mapping(path)
    base = tree.pop("base", None)
    if base is None:
        return tree
    path = path.resolve()
    if path in above:
        raise ConfigError(
            f"{path}: `base` refers back to itself: name another file, or leave it out"
        )
    return merge(
        read_yaml(
            find_config(str(base), folder, f"{path}: base", path.parent), folder, (*above, path)
        ),
        tree,
    )


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads one YAML file without merging it over its `base:`."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_YAML_BYTES + 1)
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # ValueError: NUL in a name; RuntimeError: a loop of symbolic links
        raise ConfigError(
            f"{path}: {getattr(error, 'strerror', None) or error}: give another ", Flag("--config")
        ) from None
    if len(content) > MAX_YAML_BYTES:
        raise ConfigError(
            f"{path}: has more than {MAX_YAML_BYTES:,} bytes: give a file of settings"
        )
    tree = parse_yaml(content, str(path))
    if tree is None:  # an empty file
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: settings must be a mapping, key: value")
    return tree


def parse_yaml(text: str | bytes, source: str) -> Any:
    try:
        return yaml.load(text, _YamlLoader)
    except (
        Exception
    ) as error:  # a scalar's constructor may raise any error, and too deep nesting a RecursionError
        raise ConfigError(
            source, f": not valid YAML: {' '.join(str(error).split())}"[:300]
        ) from None


def apply_overrides(
    tree: dict[str, Any], overrides: Sequence[str] | Mapping[str, Any]
) -> dict[str, Any]:
    """Applies --set strings, or values by dotted key, to `tree`. Setting train.steps unsets
    train.epochs, and setting train.epochs unsets train.steps."""
    pairs = list(
        overrides.items() if isinstance(overrides, Mapping) else map(_parse_override, overrides)
    )
    values = dict(pairs)
    pairs += [
        (other_length, None)
        for length, other_length in zip(LENGTH_SETTINGS, LENGTH_SETTINGS[::-1], strict=True)
        if values.get(length) and other_length not in values
    ]
    for key, value in pairs:
        for name in reversed(key.split(".")):
            value = {name: value}
        tree = merge(tree, value)
    return tree


def _parse_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(
            Flag(f"--set {override!r}"),
            ": write key=value, for example ",
            Flag("--set train.lr=1e-4"),
        )
    return key, parse_yaml(text, Flag(f"--set {key}"))


def command_parser(name: str, about: str | None) -> Parser:
    """Returns a parser for a command. Its help keeps the line breaks of the text `about`."""
    as_written = argparse.RawDescriptionHelpFormatter
    return Parser(f"omnilead {name}", description=about, formatter_class=as_written)


def parse_options(
    function: Callable[..., Any], name: str, about: str | None, arguments: Sequence[str] | None
) -> dict[str, Any]:
    """Parses the command line, and returns the arguments for `function`. Its parameters declare
    the command's options."""
    parser = command_parser(name, about)
    add_options(parser, function)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    options = vars(parser.parse_args(arguments))
    del options["local_rank"]  # deepspeed's launcher adds --local_rank; LOCAL_RANK is used instead
    return options


def parse_action(
    name: str,
    about: str | None,
    actions: Actions,
    arguments: Sequence[str] | None,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns (function of the chosen action, its arguments). `actions` maps the name of each
    action to a tuple of three: its function, whose parameters declare the options; a text that
    says what it does; the arguments of an example."""
    parser = command_parser(name, about)
    commands = parser.add_subparsers(dest="action", required=True, metavar="|".join(actions))
    for action, (function, text, example) in actions.items():
        command = commands.add_parser(
            action,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"example: omnilead {name} {action} {example}",
        )
        add_options(command, function)
    options = vars(parser.parse_args(arguments))
    return actions[options.pop("action")][0], options


def require_writable(path: Path, flag: str) -> None:
    """Raises ConfigError if a file cannot be written, so that a command fails before hours of
    work."""
    folder, mend = path.parent, "name a file in an existing folder"
    if path.is_dir():
        raise ConfigError(flag, f" {path}: is a folder: {mend}")
    if not folder.is_dir():
        raise ConfigError(flag, f" {path}: the folder {folder} does not exist: {mend}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            flag, f" {path}: no permission to write in {folder}: choose another folder"
        )


@contextmanager
def report_write_errors(path: Path, flag: str) -> Iterator[None]:
    """Raises OutputError if the block cannot write a command's result to the path that `flag`
    sets."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            flag, f" {path}: {error.strerror or error}: {write_error_advice(error)}"
        ) from None


def write_result(path: Path, text: str, flag: str) -> None:
    with report_write_errors(path, flag):
        write_whole(path, text)


def positive_integer(text: str) -> int:
    """Parses a whole number of at least 1, such as 1000, 1e6 or 1_000_000. For use as a type in
    argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (1 <= number < 2**53 and number.is_integer()):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(number)


def parse_price(text: str) -> float:
    """Parses a price of at least 0. For use as a type in argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of at least 0, such as 2.5")
    return value


def local_run_path(text: str) -> Path:
    """Returns the path of a run on this machine. For use as a type in argparse."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text}: give the run's working folder, which the first line of its output names"
        )
    return Path(text)


def tell_failure(program: str, message: str, code: int) -> None:
    """Prints why a command fails. With code 2, all ranks usually fail for the same reason. Rank 0
    then prints it, and the others wait for the launcher to kill them, which it does as soon as
    one rank exits. A rank that is still alive after the wait has failed alone, and prints its own
    reason. Ctrl-C (code 130) reaches all ranks, so only rank 0 prints it."""
    rank = os.environ.get("RANK", "0")
    if code == 130 and rank != "0":
        return
    of_rank = f"rank {rank}: " if code == 1 and os.environ.get("WORLD_SIZE", "1") != "1" else ""
    line = f"{program}: {of_rank}{on_one_line(message)}"
    note_for_torchrun(line)
    if code == 2 and rank != "0":
        time.sleep(OTHER_RANKS_WAIT_S)
    with suppress(OSError):
        tell(line)
    repeat_after_deepspeed(line)


def on_one_line(message: str) -> str:
    lines = [line.strip() for line in message.split("\n")]
    return " ".join(filter(None, lines))


def run_on_ranks(
    program: str,
    work: Callable[[], int],
    out: str | os.PathLike[str] | None = None,
    flag: str = Flag("--out"),
) -> int:
    """Runs the work of a command that may have several ranks, and returns its exit code. `out`:
    where the command writes. `flag`: the option that sets `out`."""

    def as_user_error(error: Exception) -> UserError | None:
        if isinstance(error, OSError):
            return file_error(error, out, flag)
        return error if isinstance(error, UserError) else None

    return run_command(program, work, as_user_error, RESUMABLE if out else "", tell_failure)


def file_error(
    error: OSError, out: str | os.PathLike[str] | None, flag: str = Flag("--out")
) -> UserError:
    """Returns the error that tells a user about a file that could not be read or written. `out`:
    where the command writes. `flag`: the option that sets `out`."""
    about = file_error_parts(error, flag, out)
    if error.errno in PERMANENT_ERRORS:
        return DataError(*about)
    return OutputError(*about, RESUMABLE if out else "")


def repeat_after_deepspeed(line: str) -> None:
    """Prints the line again after deepspeed has ended. When a rank fails, deepspeed prints the
    processes that it kills and its whole command, which would hide the line. A forked process
    waits for deepspeed's end."""
    launcher = os.getppid()
    try:
        if "CROSS_SIZE" not in os.environ or os.fork():  # deepspeed.launcher.launch sets CROSS_SIZE
            return
    except OSError:  # there is no memory to fork
        return
    try:
        os.setsid()
        ended = select.poll()
        ended.register(os.pidfd_open(launcher), select.POLLIN)
        ended.poll(DEEPSPEED_END_TIMEOUT_S * 1000)
        tell(line)
    finally:
        os._exit(0)


def note_for_torchrun(line: str) -> None:
    """Writes the line to the file from which torchrun takes error messages. Torchrun prints it
    after its own report and traceback, instead of a hint at PyTorch's documentation."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        failure = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": failure}))


def exit_process(code: int) -> NoReturn:
    """Exits without shutting down the interpreter: gloo threads that still hold tensors would
    raise SIGABRT then."""
    code = print_result("") or code
    sys.stderr.flush()
    os._exit(code)


def one_blas_thread() -> None:
    """Limits NumPy to one BLAS thread. Call before importing NumPy. More BLAS threads and
    PyTorch's threads would block each other, and make probes ten times as slow."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def handle_interrupts(name: str) -> None:
    """Makes Python print one line instead of a traceback after Ctrl-C (exit code 130) or when
    memory runs out. Call it before importing torch: this import takes seconds, in which somebody
    may press Ctrl-C."""
    guard_streams()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            tell(f"{name}: interrupted")
            # Python would end itself by SIGINT: a shell sees 130 then, but a program that started
            # Python sees -2
            exit_process(130)
        elif is_out_of_memory(error):
            tell(f"{name}: out of memory: raise the limit (ulimit -v), or free some")
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
