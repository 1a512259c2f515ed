"""Share a model on the Hugging Face Hub, or fetch one.

    omnilead hub push RUN org/name --private --licence cc-by-4.0     RUN/model: weights, settings, model card
    omnilead hub pull org/name OUT                                   downloads; org/name@v1 selects a branch, tag or commit

Only the files of the model folder are uploaded, after their checksums are verified: no data, no
logs, no checkpoints. Paths on this machine are reduced to file names. Log in with `hf auth login`,
or set HF_TOKEN in the environment. In Python: omnilead.load("hf://org/name"). Needs `pip install
'omnilead[hub]'`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from omnilead.data_tools.io.terminal import about_file, echo, tell
from omnilead.engine.settings.commandline import command_parser, interruptible
from omnilead.engine.settings.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    from omnilead.engine.extras.interop import hub

    try:
        if args.action == "push":
            echo(hub.push(args.model, args.repo, args.private, args.licence))
        else:
            hub.pull(args.repo, args.out)
            echo(f"{args.out}: downloaded; use it with omnilead.load({str(args.out)!r})")
        return 0
    except ConfigError as error:
        message, code = str(error), 2
    except OSError as error:
        message, code = about_file(error, "OUT", getattr(args, "out", None)), 2
    except KeyboardInterrupt:
        message, code = "interrupted: run the same command again", 130
    tell(f"omnilead hub: {' '.join(message.split())}")
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("hub", __doc__)
    commands = parser.add_subparsers(dest="action", required=True, metavar="push|pull")
    example = "example: omnilead hub push RUN org/name --private"
    upload = commands.add_parser(
        "push", help="upload RUN/model", description="Upload RUN/model.", epilog=example
    )
    upload.add_argument("model", metavar="RUN", help="a run, or a model folder")
    upload.add_argument(
        "repo", metavar="org/name", help="repository on the Hub; created if it does not exist"
    )
    upload.add_argument(
        "--private",
        action="store_true",
        help="if it is created: visible to you and your organisation only",
    )
    upload.add_argument(
        "--licence",
        metavar="ID",
        help="licence of the weights, for the model card: mit, cc-by-4.0, ...",
    )
    example = "example: omnilead hub pull org/name OUT"
    fetch = commands.add_parser(
        "pull", help="download a model", description="Download a model.", epilog=example
    )
    fetch.add_argument(
        "repo", metavar="org/name", help="repository on the Hub, or org/name@revision"
    )
    fetch.add_argument("out", metavar="OUT", type=Path, help="a new or empty folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    interruptible("omnilead hub")
    sys.exit(main())
