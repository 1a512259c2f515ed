"""Write RUN/report.html, one self-contained page with the training curves of a run.

    omnilead report RUN

Also for a run that is still training: what was not logged yet is left out.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from omnilead.data_tools.io.terminal import echo, tell
from omnilead.engine.settings.commandline import command_parser, interruptible
from omnilead.engine.settings.errors import ConfigError

NAME = "omnilead report"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("report", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    run = parser.parse_args(arguments).run

    from omnilead.engine.extras.reports.run_report import write_report

    try:
        echo(write_report(run))
    except (ConfigError, OSError) as error:
        tell(f"{NAME}: {' '.join(str(error).split())}")
        return 2
    return 0


if __name__ == "__main__":
    interruptible(NAME)
    sys.exit(main())
