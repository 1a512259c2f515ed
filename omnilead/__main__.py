"""Turn ECG archives into datasets, pre-trained encoders, fine-tuned models and scores.

    omnilead synth archive --patients 1000                      synthetic ECGs to try everything with
    omnilead shard archive --out dataset                        a dataset for training
    omnilead fit --data dataset --labels my.csv --out MODEL     a classifier of your own labels
    omnilead pretrain --data dataset --out RUN                  a tiny model: a minute on a CPU
    omnilead COMMAND --help                                     the options of a command, with examples

`python -m omnilead COMMAND` is the same.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import omnilead
from omnilead.data_tools.io.commands import shorten_busy_loops
from omnilead.data_tools.io.terminal import Parser, tell
from omnilead.engine.settings.commandline import exit_process, handle_interrupts

if TYPE_CHECKING:
    from omnilead.engine.run import AfterTraining

# {command: (the module whose main(arguments) runs it, what it does)}
COMMANDS = {
    "shard": ("omnilead.data_tools.shard", "make a dataset from archives or files"),
    "verify": ("omnilead.data_tools.verify", "check every byte of a dataset"),
    "show": ("omnilead.data_tools.show", "print or draw a dataset, a crop or a record"),
    "labels": ("omnilead.data_tools.labels", "write an archive's published labels as tables"),
    "synth": ("omnilead.data_tools.synth", "make a synthetic archive"),
    "embed": ("omnilead.downstream.embed", "write embeddings of ECGs as parquet"),
    "fit": ("omnilead.downstream.fit", "fit a classifier of your own labels on a frozen model"),
    "predict": (
        "omnilead.downstream.predict",
        "write a fitted model's predictions as CSV or parquet",
    ),
    "pretrain": ("omnilead.engine.pretrain", "pre-train an encoder on a dataset"),
    "finetune": ("omnilead.downstream.finetune", "train a pre-trained encoder on labels"),
    "status": ("omnilead.engine.status", "show the state of a training run"),
    "evaluate": ("omnilead.downstream.evaluate", "score a model on held-out ECGs"),
    "bench": (
        "omnilead.downstream.bench",
        "compare frozen models with each other and with baselines",
    ),
    "seen": ("omnilead.downstream.seen", "say which ECGs a model or a run was trained on"),
    "reproduce": ("omnilead.downstream.reproduce.__main__", "reproduce the tables of the paper"),
    "convert": (
        "omnilead.downstream.convert",
        "convert weights from and to fairseq-signals, from any PyTorch network, and to ONNX",
    ),
    "hub": ("omnilead.downstream.hub", "share a model on the Hugging Face Hub, or fetch one"),
}
# {command: the heading that the help shows above it}, for the first command of each group
HEADINGS = {
    "shard": "make a dataset",
    "embed": "use a model",
    "pretrain": "train",
    "evaluate": "compare",
    "convert": "share",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen command and returns its exit code. Modules of other commands are not imported, so
    that --help does not wait for PyTorch."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    about = {"description": __doc__, "epilog": listed_commands()}
    parser = Parser("omnilead", **about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"omnilead {omnilead.__version__}")
    parser.add_argument(
        "command", metavar="COMMAND", choices=COMMANDS, help="one of the commands listed below"
    )
    command, handed = parser.parse_args(given[:1]).command, {}
    module = COMMANDS[command][0]
    if command == "show" and any(word.partition("=")[0] == "--why" for word in given):
        module = "omnilead.downstream.reports.why"  # --why loads a model, which data_tools cannot
    if command in ("pretrain", "status") and (after := after_training()):
        handed["after"] = after
    shorten_busy_loops()
    code: int = importlib.import_module(module).main(given[1:], **handed)
    return code


def after_training() -> "AfterTraining | None":
    """Return the functions that the engine calls at the end of a training, to write a model card and a
    report. They are handed over, because the engine does not import downstream. Without downstream/,
    return None."""
    if not importlib.util.find_spec("omnilead.downstream"):
        tell("note: without omnilead.downstream a run gets no model card and no report.html")
        return None
    from omnilead.downstream.after_training import AFTER_TRAINING

    return AFTER_TRAINING


def listed_commands() -> str:
    """Return the list of commands for the help, under their headings."""
    lines = []
    for name, (_, text) in COMMANDS.items():
        if name in HEADINGS:
            lines.append(f"{HEADINGS[name]}:")
        lines.append(f"  {name:<10} {text}")
    return "\n".join(lines)


def script() -> NoReturn:
    """Run the command of the process's own arguments, and exit with its code."""
    name = sys.argv[1] if sys.argv[1:2] and sys.argv[1] in COMMANDS else ""
    handle_interrupts(f"omnilead {name}".rstrip())
    code = main()
    if "torch" in sys.modules:
        exit_process(code)
    sys.exit(code)


if __name__ == "__main__":
    script()
