"""Write a trained model's embeddings of ECGs as parquet.

    omnilead embed --model RUN --data DATASET --out F.parquet                  one row for each crop of 10 s
    omnilead embed --model RUN --data FOLDER A.hea B.dcm --out F.parquet       records, known archives, hospital files
    omnilead embed --model RUN --data A.npy --fs 250 --leads II,V1 --unit uV --out F.parquet
    torchrun --nproc-per-node 8 -m omnilead.downstream.embed --model RUN --data DATASET --out F.parquet  a GPU per rank

Columns: source, record, patient, row (of the dataset), start_s, flags (as in samples.parquet:
`implausible` if the file probably states a wrong scale), embedding (fixed_size_list<float32>).
What an embedding keeps of an ECG: --readout, docs/readouts.md. F.parquet is written in parts: run
the same command again to resume; the result has the same bytes. .npy files, also in a folder, hold
[leads, samples] or [ECGs, leads, samples]; .npz files hold any number of [leads, samples]. --leads
names the leads shown to the model, and the others are set to zero; for arrays it also names the
rows. A folder's unreadable files are left out, and listed in F.parquet.skipped.csv. Exit code 2: an
argument or a file is wrong. Exit code 1: computing or writing failed.
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


def embed(
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
    out: Annotated[File | None, Option("write the embeddings", "F.parquet", required=True)] = None,
    per: Annotated[
        Literal["crop", "record", "half"],
        Option("one row for each 10 s, each record, each 5 s or other window of the model (crop)"),
    ] = "crop",
    readout: shared.Readout = "",
    pseudonymize: shared.Pseudonymize = None,
) -> "pa.Table | WrittenTable":
    """Computes embeddings of ECGs, as `omnilead embed` does. Returns a pyarrow table or, with
    `out`, writes a parquet file. The file is written in parts, so that the same call resumes after an
    interruption, and ranks of torchrun or deepspeed share the parts."""
    options = locals()
    # These imports wait until here, so that --help does not load PyTorch
    from omnilead.downstream.inference import commands

    return commands.embed(**options)


def main(arguments: Sequence[str] | None = None) -> int:
    return shared.run_table_command("embed", embed, __doc__, arguments)


if __name__ == "__main__":
    run_as_omnilead("embed")
