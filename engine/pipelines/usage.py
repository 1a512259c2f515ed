"""What a command line says before its work begins: of wrong arguments one line, of Ctrl-C, and of too little memory.

interruptible("engine.x")                    # first of all, in a program
Parser(prog="python -m engine.x").parse_args()
"""

import sys
from types import TracebackType

from data_tools.usage import Parser as Parser
from data_tools.usage import guard_streams, is_memory


def interruptible(name: str) -> None:
    """Seconds pass while torch is imported: Ctrl-C is then answered as it is later, and not with the importer's traceback."""
    guard_streams()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print(f"{name}: interrupted", file=sys.stderr)
        elif is_memory(error):
            print(f"{name}: out of memory: raise the limit (ulimit -v), or free some", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
