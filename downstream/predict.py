"""Write a fine-tuned model's predictions as parquet or CSV: class probabilities and decisions, or
values in their unit.

    omnilead predict --model TUNED --data DATASET --out F.csv                  one row for each record
    omnilead predict --model TUNED --data FOLDER A.hea B.dcm --out F.parquet   records, known archives, hospital files
    omnilead predict --model TUNED --data EXPORT --pseudonymize KEYFILE --out F.csv      with the names that `shard` gives
    omnilead predict --model TUNED --data A.npy --fs 250 --leads II,V1 --unit uV --out F.csv
    torchrun --nproc-per-node 8 -m omnilead.downstream.predict --model TUNED --data DATASET --out F.parquet  a GPU per rank

Columns: source, record, patient, row (of the dataset), start_s, flags (as in samples.parquet:
`implausible` if the file probably states a wrong scale), missing_leads (the model uses them,
but they were not recorded, or are all zero), path (the file that the ECG came from), then, by the
kind of task: for each class AF (probability) and AF_predicted (true above the threshold with the
best F1 in validation, which can be far below 0.5); or `predicted` (the most probable class) and the
probability of each class; or values such as age_years, or risk. The prediction of a record is the
mean over its segments (5 s, or the model's window). A note says how good a model of `omnilead fit`
was in cross-validation, and which score 95 % of the positives reach; for other models see
`omnilead evaluate --role valid`. What was skipped is listed in F.csv.skipped.csv. Inputs and resuming
are as in `omnilead embed`. Exit code 2: an argument or a file is wrong. Exit code 1: computing or
writing failed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from omnilead.data_tools.io.commands import run_as_omnilead
from omnilead.data_tools.io.options import Option
from omnilead.downstream.inference import options as shared
from omnilead.engine.settings.files import File

if TYPE_CHECKING:
    import pyarrow as pa

    from omnilead.downstream.inference.commands import WrittenTable


def predict(
    model: shared.Model,
    *,
    code: shared.Code = False,
    data: shared.Ecgs,
    leads: shared.Leads = None,
    fs_hz: shared.Rate = None,
    unit: shared.Unit = None,
    workers: shared.Workers = None,
    on_corrupt: shared.OnCorrupt = "auto",
    batch: shared.Batch = None,
    device: shared.Device = "auto",
    precision: shared.Precision = "auto",
    anonymous: shared.Anonymous = False,
    out: Annotated[
        File | None, Option("F.csv or F.parquet: write the predictions", "F", required=True)
    ] = None,
    per: Annotated[
        Literal["crop", "record", "half"],
        Option(
            "one row for each record, each 10 s, each 5 s or other window of the model (record)"
        ),
    ] = "record",
    pseudonymize: shared.Pseudonymize = None,
) -> "pa.Table | WrittenTable":
    """Computes predictions of a fine-tuned model, as `omnilead predict` does. Returns a pyarrow
    table or, with `out`, writes a parquet or CSV file. The file is written in parts, as by
    `omnilead.embed`."""
    options = locals()
    # These imports wait until here, so that --help does not load PyTorch
    from omnilead.downstream.inference import commands

    return commands.predict(**options)


def main(arguments: Sequence[str] | None = None) -> int:
    return shared.run_table_command("predict", predict, __doc__, arguments)


if __name__ == "__main__":
    run_as_omnilead("predict")
