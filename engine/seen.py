"""Say which records, patients and waveforms a model or a run was trained on.

    omnilead seen RUN                                    also how often each crop was drawn, up to the newest checkpoint
    omnilead seen RUN --out seen.csv                     a table with a row for each record
    omnilead seen MODEL --data DATASET --out seen.csv    MODEL: RUN/model, a copy of it, small, s3://... or hf://org/name
    omnilead seen MODEL --data A.hea B.dcm               whether it has seen these ECGs
    omnilead seen MODEL --data DATASET B.dcm             or their patients: DATASET is what it was trained on
    omnilead seen MODEL --data B.dcm --pseudonymize KEYFILE    the same, if DATASET was made with this key

A run's order is computed again from its settings and data; if these are gone, ask RUN/model. A model
has only hashes, of waveforms and of patients (of records where the patient is unknown), including what
the models that it was started from were trained on. A waveform is found only if it is bit-identical.
Patients of your own ECGs are found only with the key of their dataset: that of a KEYFILE, or the one which
the dataset itself holds. Hashes have 48 bits: with 10 million patients and as many waveforms, one stranger
in 14 million is taken for seen.

Uses: unlabelled, in pre-training; selected, in validation, which chose a step, a threshold or a penalty;
labelled, trained on with its label. Of several uses, the last in this list counts. Columns of the table:
source, record, patient, waveform (its use), owner (the use of the patient), times (how often
the record's crops were drawn; empty if unknown).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from omnilead.data_tools.io.terminal import show
from omnilead.engine.settings.commandline import command_parser, interruptible, writable


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    # imported late, so that --help does not wait for PyTorch
    from omnilead.engine.evaluation.seen import table_of
    from omnilead.engine.inference.commands import exit_code

    def work() -> int:
        if args.out:
            writable(args.out, "--out")
        return show("\n".join(table_of(**vars(args))) + "\n")

    return exit_code("omnilead seen", work, args.out)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("seen", __doc__)
    add = parser.add_argument
    models = "a run, a model folder, small, s3://... or hf://org/name"
    add("model", metavar="RUN|MODEL", help=models)
    ecgs = "datasets, folders or files of ECGs (default: the data of RUN)"
    add("--data", nargs="+", metavar="DATASET|FILE", help=ecgs)
    add("--out", type=Path, metavar="F.csv", help="write a table with a row for each record")
    key = "the key file of the dataset that the model was trained on, if DATA are files"
    add("--pseudonymize", metavar="KEYFILE", help=key)
    add("--anonymous", action="store_true", help="read public s3:// data without credentials")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    interruptible("omnilead seen")
    sys.exit(main())
