"""Arguments of a command line, of which what is wrong is one line, as everywhere: Parser(prog="engine.x").parse_args()."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (--help shows all)\n")
