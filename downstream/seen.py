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
from typing import Annotated

from omnilead.data_tools.io.commands import run_as_omnilead
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.terminal import print_result
from omnilead.downstream.inference import options as shared
from omnilead.engine.settings.commandline import parse_options, require_writable, run_on_ranks
from omnilead.engine.settings.files import File


def main(arguments: Sequence[str] | None = None) -> int:
    typed = sys.argv[1:] if arguments is None else list(arguments)
    options = parse_options(print_seen, "seen", __doc__, with_model_first(typed))
    return run_on_ranks("omnilead seen", lambda: print_seen(**options), options["out"])


def with_model_first(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with `--model MODEL`, which other commands take, replaced by MODEL as
    the first argument."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", nargs="?")
    named, others = parser.parse_known_args(arguments)
    return [named.model, *others] if named.model else list(arguments)


def print_seen(
    model: Annotated[
        str, Option("a run, a model folder, small, s3://... or hf://org/name", "RUN|MODEL")
    ],
    *,
    data: Annotated[
        Sequence[str] | None,
        Option("datasets, folders or files of ECGs (default: the data of RUN)", "DATASET|FILE"),
    ] = None,
    out: Annotated[File | None, Option("write a table with a row for each record", "F.csv")] = None,
    pseudonymize: Annotated[
        str | None,
        Option(
            "the key file of the dataset that the model was trained on, if DATA are files",
            "KEYFILE",
        ),
    ] = None,
    anonymous: shared.Anonymous = False,
) -> int:
    """Prints which records, patients and waveforms the model was trained on. Returns the exit
    code."""
    from omnilead.downstream.evaluation.trained_on import training_data_lines

    table = Path(out) if out else None
    if table:
        require_writable(table, "--out")
    lines = training_data_lines(model, data, table, anonymous, pseudonymize)
    return print_result("\n".join(lines) + "\n")


if __name__ == "__main__":
    run_as_omnilead("seen")
