"""Defines options that several commands share (see data_tools/io/options.py), and runs `embed` and
`predict` as commands."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.shared_options import DatasetPaths
from omnilead.data_tools.io.terminal import print_result
from omnilead.engine.settings.commandline import (
    ALLOW_CODE_OPTION,
    one_blas_thread,
    parse_options,
    run_on_ranks,
)
from omnilead.engine.settings.files import File

Code = Annotated[bool, Option(ALLOW_CODE_OPTION["help"])]
Model = Annotated[File, Option("RUN, small, s3://... or hf://org/name", "RUN", "--model")]
Ecgs = Annotated[
    Sequence[File] | File,
    Option(
        "a dataset; or folders, .hea, .npy and .npz files, vendors' .xml, .dcm, .scp and .edf",
        "DATASET|FILE",
    ),
]
BuiltDatasets = Annotated[
    DatasetPaths,
    Option(
        "datasets made by omnilead shard, patterns such as 'ds/2027-*', or a .txt file that lists them; "
        "s3:// works too",
        "DATASET",
    ),
]
Leads = Annotated[
    str | None,
    Option(
        '12, 6, 3, 2, 1 or names such as "I,II,V2"; other leads are set to zero (default: all)', "L"
    ),
]
Rate = Annotated[float | None, Option("sampling rate of .npy and .npz files", "HZ", "--fs")]
Unit = Annotated[str | None, Option("unit of .npy and .npz files: V, mV, uV (mV)")]
Workers = Annotated[
    int | None, Option("reading threads (a quarter of the cores; with a GPU, all)", "N", low=1)
]
OnCorrupt = Annotated[
    Literal["auto", "stop", "skip"],
    Option("stop at unreadable data, or report and skip them (auto: skip in folders, else stop)"),
]
Batch = Annotated[int | None, Option("crops encoded at a time (16, on a GPU 256)", "N", low=1)]
Device = Annotated[str, Option("cpu, cuda, cuda:1, ... (auto: a GPU if there is one)")]
Precision = Annotated[
    Literal["auto", "fp32", "bf16"],
    Option(
        "precision of the encoder; auto: bf16 on a GPU if the model was trained in bf16, else fp32"
    ),
]
Anonymous = Annotated[bool, Option("read public s3:// data without credentials")]
Readout = Annotated[
    str, Option("parts joined by +: mean, std, beats, rhythm, waveform (the model's own)", "R")
]
Pseudonymize = Annotated[
    File | None,
    Option(
        "for files: replace record and patient ids with keyed hashes, as `shard` does", "KEYFILE"
    ),
]
Columns = Annotated[Sequence[str], Option("label columns of the table (default: all)", "NAME")]
Kind = Annotated[
    Literal["binary", "multilabel", "multiclass", "regression", "survival"] | None,
    Option("kind of the labels (default: guessed from the table)"),
]
Positive = Annotated[
    str, Option("in a column of two or more values: the one that counts as 1", "VALUE")
]
Reader = Annotated[
    Literal["linear", "boosted"],
    Option("what is fitted on embeddings: a linear probe or gradient boosting (linear)"),
]


def run_table_command(
    name: str, table_of: Callable[..., Any], about: str | None, arguments: Sequence[str] | None
) -> int:
    """Parses the options that `table_of` declares, calls it, and prints its message. Returns the
    exit code."""
    options = parse_options(table_of, name, about, arguments)
    one_blas_thread()
    return run_on_ranks(
        f"omnilead {name}", lambda: print_result(table_of(**options).message), options["out"]
    )
