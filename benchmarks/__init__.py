"""What it costs: one runner, one record a run, tables made from records. See README.md for the
rules."""

import argparse
from pathlib import Path

from omnilead.data_tools.io.terminal import Parser

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def program_parser(name: str, text: str | None) -> Parser:
    """Returns the parser of a program in this folder."""
    return Parser(
        f"python -m benchmarks.{name}",
        description=text,
        formatter_class=argparse.RawTextHelpFormatter,
    )
