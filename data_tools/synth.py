"""Make a synthetic archive.

    omnilead synth archive --patients 1000

It has a real archive's layout, so that everything can be tried without data.
"""

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from omnilead.data_tools.io.commands import parse_options, run_as_omnilead, run_data_command
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.terminal import echo, is_interactive


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__, "synth", synth, arguments)
    out = options["out"]
    resume = f": delete {out} and run it again"
    return run_data_command("synth", lambda: _synth_command(**options), "OUT", out, resume)


def synth(
    out: Annotated[str | os.PathLike[str], Option("an empty or new folder", "OUT")],
    *,
    patients: Annotated[
        int,
        Option("PTB-XL patients; in physionet2021 as many other records, too (100)", low=1),
    ] = 100,
    two_sessions: Annotated[
        float,
        Option("share of PTB-XL patients with two recordings (0.11)", "SHARE", low=0, high=1),
    ] = 0.11,
    seed: Annotated[int, Option("the same seed gives the same bytes (0)", low=0)] = 0,
    layout: Annotated[
        Literal["physionet2021", "ptbxl"], Option("file layout (physionet2021)")
    ] = "physionet2021",
    workers: Annotated[int, Option("worker processes (1)", low=1)] = 1,
) -> dict[str, int]:
    """Makes a synthetic archive, as `omnilead synth` does. Returns the number of records by source."""
    from omnilead.data_tools.synthetic.archive import synthesise

    return synthesise(
        os.fspath(out), patients, two_sessions, seed, layout, workers, progress=is_interactive()
    )


def _synth_command(**options: Any) -> int:
    counts = synth(**options)
    kinds = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    echo(f"{options['out']}: {sum(counts.values()):,} synthetic records: {kinds}")
    return 0


if __name__ == "__main__":
    run_as_omnilead("synth")
