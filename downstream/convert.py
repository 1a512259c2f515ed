"""Convert weights from and to fairseq-signals (and ECG-FM, of the same family), bit for bit; take the
weights of any other network, with its class; and export to ONNX.

    omnilead convert from-fairseq CKPT.pt OUT [--classes LIST|FILE] [--fs HZ] [--input auto|millivolt|zscore|layernorm]
    omnilead convert from-torch   WEIGHTS OUT --encoder file.py:Class [--options '{width: 64}'] [--fs HZ] [--input ...]
    omnilead convert to-fairseq   RUN OUT.pt
    omnilead convert to-onnx      RUN OUT.onnx                      for use without PyTorch

OUT/ gets model.safetensors, config.json, preprocessing.json and README.md, a model card. Weights
from and to fairseq-signals keep their values and dtypes; the optimiser's state is dropped. An error
lists all weights that are missing, unexpected or of another shape. Checkpoints are read without
running code that may be pickled in them. They may hold a pre-trained model or a classifier
(ecg_transformer_classifier), such as those of ECG-FM and DeepECG-SSL.

--input: the scale of the training signals. The paper's are in millivolts; ECG-FM's were scaled to
mean 0 and standard deviation 1 in each lead of each record (fairseq-signals
scripts/preprocess/ecg). auto follows the checkpoint's settings: layernorm (over all leads of 5 s)
if they set normalize, zscore if one of their paths names ECG-FM or MIMIC-IV-ECG (printed), else
millivolt. --fs: the sampling rate of the training signals, if the settings lack it (DeepECG-SSL:
250). Inputs are resampled to it. If the settings (or those of the pre-training, in a fine-tuned
checkpoint) state another rate, --fs is used and the difference is printed.

from-torch: WEIGHTS is a state_dict, a checkpoint with one in it, or .safetensors. The class follows
docs/extending.md; adapters for other layouts: docs/foreign_models.md. All of its weights must be in
the file, and its embedding must change by loading them. They get the dtypes of the class: float64
usually becomes float32.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.io.commands import explain_failure, run_as_omnilead, run_command
from omnilead.data_tools.io.errors import UserError
from omnilead.data_tools.io.terminal import echo, tell
from omnilead.engine.settings.commandline import RUN_CODE, command_parser, parse_yaml
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.leads import leads_in_order


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_parser("convert", __doc__)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="from-fairseq|from-torch|to-fairseq|to-onnx"
    )
    for command, source, out, text in (
        (
            "from-fairseq",
            "CKPT.pt",
            "OUT",
            "convert a checkpoint of fairseq-signals, ECG-FM or DeepECG-SSL to a model folder",
        ),
        (
            "from-torch",
            "WEIGHTS",
            "OUT",
            "make a model folder of any network's weights and its class",
        ),
        (
            "to-fairseq",
            "RUN",
            "OUT.pt",
            "convert a model folder to a checkpoint of fairseq-signals",
        ),
        (
            "to-onnx",
            "RUN",
            "OUT.onnx",
            "export a model folder to ONNX and check it with onnxruntime",
        ),
    ):
        example = f"example: omnilead convert {command} {source} {out}"
        sub = commands.add_parser(command, help=text, description=text, epilog=example)
        source_help = (
            "a checkpoint, local"
            if command.startswith("from")
            else "a run or model folder, local or s3://, hf://org/name"
        )
        add = sub.add_argument
        add("source", metavar=source, help=source_help)
        add(
            "out",
            type=Path,
            metavar=out,
            help="where to write it: a new file, or for a model a new folder",
        )
        if command.startswith("from"):
            scales = ["auto", "millivolt", "zscore", "layernorm"]
            if command == "from-torch":
                scales.remove("auto")
            add(
                "--input",
                choices=scales,
                default=scales[0],
                help=f"scale of the training signals ({scales[0]})",
            )
            add(
                "--fs",
                type=float,
                metavar="HZ",
                help="sampling rate of the training signals (from the settings, or 500)",
            )
        if command == "from-fairseq":
            add(
                "--classes",
                default="",
                metavar="LIST|FILE",
                help="a classifier's outputs in order: A,B,C or a file",
            )
        elif command == "from-torch":
            add_torch_options(sub)
        elif command == "to-onnx":
            add("--code", **RUN_CODE)
    return parser.parse_args(arguments)


def add_torch_options(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("--encoder", required=True, metavar="file.py:Class", help="the class of the weights")
    add(
        "--band",
        type=float,
        nargs=2,
        help="band-pass filter of the training signals: from, to in Hz",
    )
    for option, kind, default, text in (
        ("--options", str, "{}", "arguments of the class as YAML, such as '{width: 64}'"),
        ("--leads", str, "12", "leads of the training signals in order (12), or I,II,V2"),
        ("--window", float, 5.0, "length of the training signals in seconds (5)"),
        (
            "--prefix",
            str,
            "",
            "with what the names of the network begin, if the file holds several",
        ),
    ):
        add(option, type=kind, default=default, help=text)
    add(
        "--map",
        nargs=2,
        action="append",
        default=[],
        metavar=("OLD", "NEW"),
        help="names that begin with OLD in the file begin with NEW in the class",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    return run_command("omnilead convert", lambda: convert(args), partial(explain, out=args.out))


def explain(error: Exception, out: Path) -> UserError | None:
    from safetensors import SafetensorError

    if isinstance(error, SafetensorError):
        return ConfigError(str(error))
    return explain_failure(error, "OUT", out)


def convert(args: argparse.Namespace) -> int:
    from omnilead.downstream.inference.trained_model import load
    from omnilead.downstream.interop.conversion import (
        from_fairseq,
        from_torch,
        signals,
        to_fairseq,
    )
    from omnilead.downstream.interop.onnx import to_onnx

    source, notes = Path(args.source), []
    if args.command.startswith("from") and "://" in args.source:
        raise ConfigError(f"{args.source}: download the checkpoint first")
    if args.command == "from-fairseq":
        notes = from_fairseq(source, args.out, args.input, args.fs, args.classes)
    elif args.command == "from-torch":
        fs_hz = 500.0 if args.fs is None else args.fs
        leads = [LEADS[lead] for lead in leads_in_order(args.leads, "--leads")]
        preprocessing = signals(args.input, fs_hz, leads, args.window, args.band)
        options = parse_yaml(args.options, "--options")
        notes = from_torch(
            source, args.out, args.encoder, options, preprocessing, args.prefix, args.map
        )
    elif args.command == "to-fairseq":
        to_fairseq(args.source, args.out)
    else:
        worst = to_onnx(load(args.source, args.code), args.out)
        echo(f"onnxruntime and PyTorch differ by {worst:.1g} at most")
    for note in notes:
        tell(f"note: {args.source}: {note}")
    echo(args.out)
    return 0


if __name__ == "__main__":
    run_as_omnilead("convert")
