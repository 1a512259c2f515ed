"""What it costs: one runner, one record a run, tables made from records. See README.md for the
rules."""

import argparse

from omnilead.data_tools.io.terminal import Parser


def program_parser(name: str, text: str | None) -> Parser:
    return Parser(
        f"python -m benchmarks.{name}",
        description=text,
        formatter_class=argparse.RawTextHelpFormatter,
    )
