"""What the commands of this wing share: their parser, and errors as one line and an exit code.

options = parse_options(__doc__, "shard", shard, arguments)
return run_command("shard", lambda: work(**options), "--out", options["out"], resume=": run it again")
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .errors import DataError
from .options import add_options
from .terminal import Parser, about_file, drop_output, is_memory, mend_for, tell


def parse_options(
    about: str | None, name: str, function: Callable[..., Any], arguments: Sequence[str] | None
) -> dict[str, Any]:
    """The arguments for `function`, which declares the options. `about`: the module's docstring,
    whose first paragraph is the description and whose first indented line is the example."""
    paragraphs = (about or "").split("\n\n")
    example = next(part for part in paragraphs if part.startswith("    "))
    parser = Parser(
        f"omnilead {name}",
        description=paragraphs[0].removesuffix("."),
        epilog=f"example: {' '.join(example.split())}",
    )
    add_options(parser, function)
    return vars(parser.parse_args(arguments))


def run_command(
    name: str,
    work: Callable[[], int],
    option: str = "-",
    place: str | os.PathLike[str] | None = None,
    resume: str = "",
) -> int:
    """Runs the work of a command; an error is one line and exit code 2. `option` and `place`: where it
    writes. `resume`: what to type after Ctrl-C."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        return work()
    except KeyboardInterrupt:
        tell(f"interrupted{resume}")
        return 130
    except BrokenPipeError:
        return drop_output()
    except (DataError, OSError, MemoryError, RuntimeError) as error:
        if is_memory(error):
            error = MemoryError("out of memory: lower --workers, or raise the limit (ulimit -v)")
        elif isinstance(error, RuntimeError):
            raise
        message = str(error)
        if isinstance(error, OSError):
            message = about_file(error, option, place)
            if message.startswith(option):
                message += f": {mend_for(error)}"
        tell(f"omnilead {name}: {message}")
        return 2


def short_busy_loops() -> None:
    """Call before PyTorch is imported. Its threads wait for each other in long busy loops. With shorter
    ones `small` trains 1.3 to 2 times as fast on two cores that others use as well, and as fast on two
    that nobody else uses."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def run_as_omnilead(name: str) -> None:
    """Makes a program that is started by its file or module the same as `omnilead NAME`."""
    sys.argv.insert(1, name)
    importlib.import_module("omnilead.__main__").script()
