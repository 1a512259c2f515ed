"""Write a trained model's embeddings of ECGs as parquet.

    omnilead embed --model RUN --data DATASET --out F.parquet                  one row for each crop of 10 s
    omnilead embed --model RUN --data FOLDER A.hea B.dcm --out F.parquet       records, known archives, hospital files
    omnilead embed --model RUN --data A.npy --fs 250 --leads II,V1 --unit uV --out F.parquet
    torchrun --nproc-per-node 8 -m omnilead.engine.embed --model RUN --data DATASET --out F.parquet  a GPU per rank

Columns: source, record, patient, row (of the dataset), start_s, flags (as in samples.parquet:
`implausible` if the file probably states a wrong scale), embedding (fixed_size_list<float32>).
What an embedding keeps of an ECG: --readout, docs/readouts.md. F.parquet is written in parts: run
the same command again to resume; the result has the same bytes. .npy files, also in a folder, hold
[leads, samples] or [ECGs, leads, samples]; .npz files hold any number of [leads, samples]. --leads
names the leads shown to the model, and the others are set to zero; for arrays it also names the
rows. A folder's unreadable files are listed and left out. Exit code 2: an argument or a file is
wrong. Exit code 1: computing or writing failed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnilead.data_tools.io.terminal import show
from omnilead.engine.settings.commandline import (
    RUN_CODE,
    command_parser,
    interruptible,
    one_blas_thread,
    positive,
)

PER = ("crop", "record", "half")
PSEUDONYMS: Any = {
    "metavar": "KEYFILE",
    "help": "for files: replace record and patient ids with keyed hashes, as `shard` does",
}
READOUT: Any = {
    "default": "",
    "metavar": "R",
    "help": "parts joined by +: mean, std, beats, rhythm, waveform (the model's own)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    one_blas_thread()
    # imported late, so that --help does not wait for PyTorch
    from omnilead.engine.inference.commands import embed, exit_code

    return exit_code("omnilead embed", lambda: show(embed(**options_of(args)).message), args.out)


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments for Python's functions."""
    options = dict(vars(args))
    del options["local_rank"]  # added by deepspeed's launcher; LOCAL_RANK is used instead
    return options


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("embed", __doc__)
    add_inputs(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="F.parquet", help="write the embeddings")
    add(
        "--per",
        choices=PER,
        default="crop",
        help="one row for each 10 s, each record, each 5 s or other window of the model (crop)",
    )
    add("--readout", **READOUT)
    add("--pseudonymize", **PSEUDONYMS)
    return parser.parse_args(arguments)


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Adds the options that embed and predict share."""
    add = parser.add_argument
    add("--model", required=True, metavar="RUN", help="RUN, small, s3://... or hf://org/name")
    add("--code", **RUN_CODE)
    inputs = "a dataset; or folders, .hea, .npy and .npz files, vendors' .xml, .dcm, .scp and .edf"
    add("--data", required=True, nargs="+", metavar="DATASET|FILE", help=inputs)
    add(
        "--leads",
        metavar="L",
        help='12, 6, 3, 2, 1 or names such as "I,II,V2"; other leads are set to zero (default: all)',
    )
    add("--fs", dest="fs_hz", type=float, metavar="HZ", help="sampling rate of .npy and .npz files")
    add("--unit", help="unit of .npy and .npz files: V, mV, uV (mV)")
    add(
        "--workers",
        type=positive,
        metavar="N",
        help="reading threads (a quarter of the cores; with a GPU, all)",
    )
    corrupt = "stop at unreadable data, or report and skip them (auto: skip in folders, else stop)"
    add("--on-corrupt", choices=("auto", "stop", "skip"), default="auto", help=corrupt)
    add_machine(parser)
    add("--local_rank", type=int, help=argparse.SUPPRESS)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how the encoder runs."""
    add = parser.add_argument
    add("--batch", type=positive, metavar="N", help="crops encoded at a time (16, on a GPU 256)")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (auto: a GPU if there is one)")
    precision = (
        "precision of the encoder; auto: bf16 on a GPU if the model was trained in bf16, else fp32"
    )
    add("--precision", choices=("auto", "fp32", "bf16"), default="auto", help=precision)
    add("--anonymous", action="store_true", help="read public s3:// data without credentials")


if __name__ == "__main__":
    interruptible("omnilead embed")
    sys.exit(main())
