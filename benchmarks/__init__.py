"""Benchmarks of speed and evidence of quality. A run of a benchmark writes a record, and the tables are
made from records. README.md has the rules."""

import argparse
from pathlib import Path

from omnilead.data_tools.io.terminal import Parser

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def program_parser(name: str, text: str | None) -> Parser:
    """Return the command-line parser of the program benchmarks/NAME.py, with `text` as its description."""
    return Parser(
        f"python -m benchmarks.{name}",
        description=text,
        formatter_class=argparse.RawTextHelpFormatter,
    )
