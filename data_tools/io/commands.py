"""Parse the options of data commands, and turn errors into one line and an exit code.

options = parse_options(__doc__, "shard", shard, arguments)
return run_data_command("shard", lambda: work(**options), "--out", options["out"], resume=": run it again")
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .errors import DataError, UserError, write_error_advice
from .options import add_options
from .terminal import OutputClosed, Parser, drop_output, file_error_parts, is_out_of_memory, tell


def parse_options(
    about: str | None, name: str, function: Callable[..., Any], arguments: Sequence[str] | None
) -> dict[str, Any]:
    """Returns the arguments for `function`, whose parameters declare the command's options. `about` is
    the module's docstring: its first paragraph becomes the description of the command, and its first
    indented lines become the examples."""
    paragraphs = (about or "").split("\n\n")
    examples = next(part for part in paragraphs if part.startswith("    ")).splitlines()
    parser = Parser(
        f"omnilead {name}",
        description=paragraphs[0].removesuffix("."),
        epilog=f"example: {'; '.join(line.strip() for line in examples)}",
    )
    add_options(parser, function)
    return vars(parser.parse_args(arguments))


def tell_failure(program: str, message: str, code: int) -> None:
    tell(f"{program}: {message}")


def explain_failure(
    error: Exception, option: str = "-", place: str | os.PathLike[str] | None = None
) -> UserError | None:
    """Returns the error that the user sees instead of `error`; None if `error` is a bug. The command
    writes to `place`, which the user sets by `option`."""
    if isinstance(error, OSError):
        about = file_error_parts(error, option, place)
        return DataError(*about, f": {write_error_advice(error)}" if about[0] == option else "")
    return error if isinstance(error, UserError) else None


Explain = Callable[[Exception], UserError | None]


def run_command(
    program: str,
    work: Callable[[], int],
    explain: Explain = explain_failure,
    resume: str = "",
    tell: Callable[[str, str, int], None] = tell_failure,
) -> int:
    """Runs `work`, which is what a command does, and returns the command's exit code.

    `explain` returns the error that the user sees instead of an exception, or None for a bug.
    `resume` is added to the message after Ctrl-C and says how to continue. `tell(program, message,
    code)` prints why the command fails."""
    try:
        return work()
    except KeyboardInterrupt as error:
        message, code = str(error) or f"interrupted{resume}", 130
    except OutputClosed:
        return drop_output()
    except Exception as error:
        failure = explain(error)
        if failure is None:
            raise
        failure.in_python = False
        message, code = str(failure), failure.code
    tell(program, message, code)
    return code


def run_data_command(
    name: str,
    work: Callable[[], int],
    option: str = "-",
    place: str | os.PathLike[str] | None = None,
    resume: str = "",
) -> int:
    """Runs a data command and returns its exit code. An error about the output names `option` and its
    value `place`, to which the command writes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    def explain(error: Exception) -> UserError | None:
        if is_out_of_memory(error):
            return DataError("out of memory: lower --workers, or raise the limit (ulimit -v)")
        return explain_failure(error, option, place)

    return run_command(f"omnilead {name}", work, explain, resume)


def shorten_busy_loops() -> None:
    """Shortens the busy loops in which PyTorch's threads wait for each other. Call this before PyTorch is
    imported. The model `small` then trains 1.3 to 2 times as fast on two cores that other programs
    use as well, and equally fast on two cores that are otherwise idle."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def run_as_omnilead(name: str) -> None:
    """Runs `omnilead NAME` with this process's arguments, for a program that is started by its file or
    module."""
    sys.argv.insert(1, name)
    importlib.import_module("omnilead.__main__").script()
