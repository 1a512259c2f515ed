"""Share a model on the Hugging Face Hub, or fetch one.

    omnilead hub push RUN org/name --private --licence cc-by-4.0     RUN/model: weights, settings, model card
    omnilead hub pull org/name OUT                                   downloads; org/name@v1 selects a branch, tag or commit

Only the files of the model folder are uploaded, after their checksums are verified: no data, no
logs, no checkpoints. Paths on this machine are reduced to file names. Log in with `hf auth login`,
or set HF_TOKEN in the environment. In Python: omnilead.load("hf://org/name"). Needs `pip install
'omnilead[hub]'`.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from omnilead.data_tools.io.commands import explain_failure, run_as_omnilead, run_command
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.terminal import echo
from omnilead.engine.settings.commandline import Actions, parse_action


def push(
    model: Annotated[str, Option("a run, or a model folder", "RUN")],
    repo: Annotated[str, Option("repository on the Hub; created if it does not exist", "org/name")],
    *,
    private: Annotated[
        bool, Option("if it is created: visible to you and your organisation only")
    ] = False,
    licence: Annotated[
        str | None,
        Option("licence of the weights, for the model card: mit, cc-by-4.0, ...", "ID"),
    ] = None,
) -> None:
    # Imported here, so that --help does not load PyTorch
    from omnilead.downstream.interop import hub

    echo(hub.push(model, repo, private, licence))


def pull(
    repo: Annotated[str, Option("repository on the Hub, or org/name@revision", "org/name")],
    out: Annotated[str, Option("a new or empty folder", "OUT")],
) -> None:
    from omnilead.downstream.interop import hub

    hub.pull(repo, Path(out))
    echo(f"{out}: downloaded; use it with omnilead.load({out!r})")


ACTIONS: Actions = {
    "push": (push, "upload RUN/model", "RUN org/name --private"),
    "pull": (pull, "download a model", "org/name OUT"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    action, options = parse_action("hub", __doc__, ACTIONS, arguments)

    def run_action() -> int:
        action(**options)
        return 0

    explain = partial(explain_failure, option="OUT", place=options.get("out"))
    return run_command("omnilead hub", run_action, explain, ": run the same command again")


if __name__ == "__main__":
    run_as_omnilead("hub")
