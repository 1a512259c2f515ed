"""Shared by data commands: their parser, and errors as one line and an exit code.

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
    """The arguments for `function`, which declares the options. `about`: the module's docstring,
    whose first paragraph is the description and whose first indented lines are the examples."""
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
    """The error for the user that stands for another one; None for a bug. `option` and `place`: where
    the command writes."""
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
    """Runs the work of a command and returns its exit code. `explain`: see explain_failure. `resume`:
    what to type after Ctrl-C. `tell(program, message, code)`: prints why the command fails."""
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
    """Runs a data command and returns its exit code. `option` names the output `place` in errors."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    def explain(error: Exception) -> UserError | None:
        if is_out_of_memory(error):
            return DataError("out of memory: lower --workers, or raise the limit (ulimit -v)")
        return explain_failure(error, option, place)

    return run_command(f"omnilead {name}", work, explain, resume)


def shorten_busy_loops() -> None:
    """Call before PyTorch is imported. Its threads wait for each other in long busy loops. With shorter
    ones `small` trains 1.3 to 2 times as fast on two cores that others use as well, and as fast on two
    that nobody else uses."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def run_as_omnilead(name: str) -> None:
    """Makes a program that is started by its file or module the same as `omnilead NAME`."""
    sys.argv.insert(1, name)
    importlib.import_module("omnilead.__main__").script()
