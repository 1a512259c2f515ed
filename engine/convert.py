"""Convert weights from and to fairseq-signals (and ECG-FM, of the same family), bit for bit, and
export them to ONNX.

    omnilead convert from-fairseq CKPT.pt OUT [--classes LIST|FILE] [--fs HZ] [--input auto|millivolt|zscore|layernorm]
    omnilead convert to-fairseq   RUN OUT.pt
    omnilead convert to-onnx      RUN OUT.onnx                      for use without PyTorch

OUT/ gets model.safetensors, config.json, preprocessing.json and README.md, a model card. Weights
keep their values and dtypes; the optimiser's state is dropped. An error lists all weights that are
missing, unexpected or of another shape. Checkpoints are read without running code that may be
pickled in them. They may hold a pre-trained model or a classifier (ecg_transformer_classifier),
such as those of ECG-FM and DeepECG-SSL.

--input: the scale of the training signals. The paper's are in millivolts; ECG-FM's were scaled to
mean 0 and standard deviation 1 in each lead of each record (fairseq-signals
scripts/preprocess/ecg). auto follows the checkpoint's settings: layernorm (over all leads of 5 s)
if they set normalize, zscore if one of their paths names ECG-FM or MIMIC-IV-ECG (printed), else
millivolt. --fs: the sampling rate of the training signals, if the settings lack it (DeepECG-SSL:
250). Inputs are resampled to it. If the settings state another rate, also those of pre-training in
a fine-tuned checkpoint, --fs is used and the difference is printed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from omnilead.data_tools.cli import echo, tell
from omnilead.engine.commandline import RUN_CODE, Parser, interruptible
from omnilead.engine.common import ConfigError


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        "omnilead convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="from-fairseq|to-fairseq|to-onnx"
    )
    for command, source, out, text in (
        (
            "from-fairseq",
            "CKPT.pt",
            "OUT",
            "convert a checkpoint of fairseq-signals, ECG-FM or DeepECG-SSL to a model folder",
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
        what = (
            "a checkpoint, local"
            if command == "from-fairseq"
            else "a run or model folder, local or s3://, hf://org/name"
        )
        sub.add_argument("source", metavar=source, help=what)
        sub.add_argument(
            "out",
            type=Path,
            metavar=out,
            help="where to write it: a new file, or for a model a new folder",
        )
        if command == "from-fairseq":
            scales = ("auto", "millivolt", "zscore", "layernorm")
            sub.add_argument(
                "--input",
                choices=scales,
                default="auto",
                help="scale of the training signals (auto)",
            )
            sub.add_argument(
                "--fs",
                type=float,
                metavar="HZ",
                help="sampling rate of the training signals (from the settings, or 500)",
            )
            sub.add_argument(
                "--classes",
                default="",
                metavar="LIST|FILE",
                help="a classifier's outputs in order: A,B,C or a file",
            )
        elif command == "to-onnx":
            sub.add_argument("--code", **RUN_CODE)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    from safetensors import SafetensorError

    from omnilead.engine.inference.trained_model import load
    from omnilead.engine.interop.conversion import from_fairseq, to_fairseq
    from omnilead.engine.interop.onnx import to_onnx

    try:
        if args.command == "from-fairseq":
            if "://" in args.source:
                raise ConfigError(f"{args.source}: download the checkpoint first")
            for note in from_fairseq(
                Path(args.source), args.out, args.input, args.fs, args.classes
            ):
                tell(f"note: {args.source}: {note}")
        elif args.command == "to-fairseq":
            to_fairseq(args.source, args.out)
        else:
            worst = to_onnx(load(args.source, args.code), args.out)
            echo(f"onnxruntime and PyTorch differ by {worst:.1g} at most")
    except (ConfigError, OSError, SafetensorError) as error:
        tell(f"omnilead convert: {error}")
        return 2
    echo(args.out)
    return 0


if __name__ == "__main__":
    interruptible("omnilead convert")
    sys.exit(main())
