"""What a command line says before its work begins: of wrong arguments one line, and of Ctrl-C.

interruptible("engine.x")                    # first of all, in a program
Parser(prog="python -m engine.x").parse_args()
"""

import argparse
import sys
from types import TracebackType
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {' '.join(message.split())} (--help shows all)\n")


def interruptible(name: str) -> None:
    """Seconds pass while torch is imported: Ctrl-C is then answered as it is later, and not with the importer's traceback."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print(f"{name}: interrupted", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
