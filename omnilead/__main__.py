"""Turn ECG archives into datasets, pre-trained encoders, fine-tuned models and scores.

    omnilead synth archive --patients 1000                      synthetic ECGs to try everything with
    omnilead shard archive --out dataset                        a dataset for training
    omnilead fit --data dataset --labels my.csv --out MODEL     a classifier of your own labels
    omnilead pretrain --data dataset --out RUN                  a small model: a minute on a CPU
    omnilead COMMAND --help                                     the options of a command, with examples

`python -m omnilead COMMAND` is the same.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import omnilead
from omnilead.data_tools.io.terminal import Parser, tell
from omnilead.engine.settings.commandline import interruptible, leave

COMMANDS = {  # name: (module with main(arguments), optionally its first arguments; what it does)
    "shard": ("omnilead.data_tools.__main__ shard", "make a dataset from archives or files"),
    "verify": ("omnilead.data_tools.__main__ verify", "check every byte of a dataset"),
    "remove": ("omnilead.data_tools.__main__ remove", "remove patients from a dataset"),
    "show": ("omnilead.data_tools.__main__ show", "print or draw a dataset, a crop or a record"),
    "labels": (
        "omnilead.data_tools.__main__ labels",
        "write an archive's published labels as tables",
    ),
    "synth": ("omnilead.data_tools.__main__ synth", "make a synthetic archive"),
    "embed": ("omnilead.engine.embed", "write embeddings of ECGs as parquet"),
    "fit": ("omnilead.engine.fit", "fit a classifier of your own labels on a frozen model"),
    "predict": ("omnilead.engine.predict", "write a fitted model's predictions as CSV or parquet"),
    "pretrain": ("omnilead.engine.pretrain", "pre-train an encoder on a dataset"),
    "finetune": ("omnilead.engine.finetune", "train a pre-trained encoder on labels"),
    "status": ("omnilead.engine.status", "show the state of a training run"),
    "report": ("omnilead.engine.extras.reports.__main__", "write RUN/report.html, at any time"),
    "evaluate": ("omnilead.engine.evaluate", "score a model on held-out ECGs"),
    "bench": ("omnilead.engine.bench", "compare frozen models with each other and with baselines"),
    "seen": ("omnilead.engine.seen", "say which ECGs a model or a run was trained on"),
    "reproduce": ("omnilead.engine.extras.reproduce.__main__", "reproduce the tables of the paper"),
    "convert": (
        "omnilead.engine.convert",
        "convert weights from and to fairseq-signals, from any PyTorch network, and to ONNX",
    ),
    "hub": ("omnilead.engine.hub", "share a model on the Hugging Face Hub, or fetch one"),
}
HEADINGS = {  # in the help, before the first command of each group
    "shard": "make a dataset",
    "embed": "use a model",
    "pretrain": "train",
    "evaluate": "compare",
    "convert": "share",
}
GONE = {  # what to type instead
    "parity": "python -m tests.parity DIR, in a clone of the repository",
    "probe": "omnilead bench --models RUN --data DATASET --tasks TASK|TABLE identification --out OUT; "
    "--head MODEL instead of probe's --out MODEL",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Imports only the module of the chosen command, so that --help does not wait for PyTorch."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    about = {"description": __doc__, "epilog": listed_commands()}
    if given and given[0] in GONE:
        tell(f"omnilead: {given[0]} is no longer a command: type {GONE[given[0]]}")
        return 2
    parser = Parser("omnilead", **about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"omnilead {omnilead.__version__}")
    parser.add_argument(
        "command", metavar="COMMAND", choices=COMMANDS, help="one of the commands listed below"
    )
    module, *first = COMMANDS[parser.parse_args(given[:1]).command][0].split()
    if first == ["show"] and any(word.partition("=")[0] == "--why" for word in given):
        module, first = "omnilead.engine.extras.reports.why", []  # data_tools knows no models
    code: int = importlib.import_module(module).main([*first, *given[1:]])
    return code


def listed_commands() -> str:
    lines = []
    for name, (_, text) in COMMANDS.items():
        if name in HEADINGS:
            lines.append(f"{HEADINGS[name]}:")
        lines.append(f"  {name:<10} {text}")
    return "\n".join(lines)


def script() -> NoReturn:
    interruptible("omnilead")
    code = main()
    if "torch" in sys.modules:
        leave(code)
    sys.exit(code)


if __name__ == "__main__":
    script()
