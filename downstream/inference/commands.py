"""Makes tables of a trained model's embeddings and predictions, for `omnilead embed` and `omnilead
predict`.

    table = embed("RUN", data="DATASET", leads="I,II", per="crop")        # a pyarrow table in memory
    done = predict("TUNED", data=["A.hea"], out="F.csv", per="record")    # in a file; done.rows, done.message

Errors are ConfigError, DataError and OutputError, each with one line for the user.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from omnilead.data_tools.io.terminal import keep_freed_memory, tell
from omnilead.engine.data.seen import were_seen_with_labels
from omnilead.engine.model.input import Input
from omnilead.engine.model.kernels import disable_tf32
from omnilead.engine.settings.commandline import RESUMABLE, file_error, require_writable
from omnilead.engine.settings.errors import ConfigError, Flag, OutputError, join_first_names
from omnilead.engine.settings.files import File
from omnilead.engine.settings.launcher import cores_per_rank, launched_rank

from . import outputs
from .ecg_reader import FLAGS_COLUMN, CropSource, EcgOptions, OpenedData, array_files, open_data
from .outputs import (
    MISSING_LEADS_COLUMN,
    Output,
    ParquetParts,
    RowCounts,
    compute_parts,
    compute_table,
    has_skipped_file,
    read_job,
    skipped_file,
)
from .trained_model import TrainedModel, load

MAX_PARTS_LISTED = 8  # a message lists at most this many numbers of parts
MAX_SENTENCES_SHOWN = 4  # a message has at most this many sentences about the model


class WrittenTable(NamedTuple):
    """The output file of a command, which may lack parts that other ranks still compute."""

    out: Path
    rows: int | None  # number of rows; None on ranks that did not complete the file
    message: str  # for the user; "" if another rank prints it


class ModelSetup(NamedTuple):
    """A loaded model with the input that it is shown, the precision it computes in, and the
    completed options."""

    model: TrainedModel
    input: Input
    precision: str
    options: EcgOptions


def embed(
    model: File,
    *,
    data: File | Sequence[File],
    out: File | None = None,
    readout: str = "",
    **options: Any,
) -> pa.Table | WrittenTable:
    """Does the work of `omnilead embed`. downstream/embed.py explains the options."""
    place = Path(out) if out else None
    if place and place.suffix not in ("", ".parquet"):
        name = place.with_suffix(".parquet").name
        raise ConfigError(Flag("--out"), f" {out}: must end in .parquet: use {name}")
    output_of = partial(outputs.embedding_output, readout=readout)
    return _make_table(output_of, model, data, place, options)


def predict(
    model: File,
    *,
    data: File | Sequence[File],
    out: File | None = None,
    **options: Any,
) -> pa.Table | WrittenTable:
    """Does the work of `omnilead predict`. downstream/predict.py explains the options."""
    place = Path(out) if out else None
    if place and place.suffix not in (".csv", ".parquet"):
        raise ConfigError(Flag("--out"), f" {out}: must end in .csv or .parquet")
    if place and place.suffix == ".csv" and place.exists() and read_job(place) is None:
        raise ConfigError(
            Flag("--out"),
            f" {out}: already exists, and does not say which job wrote it: remove it, or choose another ",
            Flag("--out"),
        )
    return _make_table(outputs.prediction_output, model, data, place, options)


def _make_table(
    output_of: Callable[[TrainedModel], Output],
    model: File,
    data: File | Sequence[File],
    out: Path | None,
    options: dict[str, Any],
) -> pa.Table | WrittenTable:
    """Applies the model to the ECGs. Returns the table or, with `out`, what was written."""
    # Called first, to refuse wrong environment variables before the model is loaded
    launched_rank()
    if out:
        require_writable(out, Flag("--out"))
    else:
        refuse_several_ranks("a table in memory is")
    try:
        setup = load_model_setup(model, data, **options)
        output = output_of(setup.model)
        opened = open_data(setup.options, setup.input)
        if out:
            return _write_file(setup, output, opened, out)
        source = opened.source()
        table = compute_table(source, output, setup.input, setup.options.per)
        counts = RowCounts().add_table(table, sum(map(len, source.skipped.values())))
        for doubt in _table_warnings(setup, output, source, counts):
            # The warning points at the user's call of omnilead.embed or predict
            warnings.warn(doubt, stacklevel=5)
        return table
    except OSError as error:
        raise file_error(error, out) from None


def _write_file(setup: ModelSetup, output: Output, opened: OpenedData, out: Path) -> WrittenTable:
    """Computes this rank's parts of the table, and completes the file if no part is missing."""
    rank, world, _ = launched_rank()
    options = setup.options
    if opened.private and rank == 0:
        tell(f"note: {out} will hold {opened.private}: --pseudonymize KEYFILE replaces both")
    job = {
        "model": setup.model.digest,
        "leads": options.leads,
        "per": options.per,
        "batch": options.batch,
        "precision": setup.precision,
        "device": setup.model.device.type,
        "on_corrupt": options.on_corrupt,
        **output.job,
        **opened.identity,
    }
    left, source = [], opened.source()
    with ParquetParts(out, job, rank, world) as parts:
        begun = not parts.finished
        if begun:
            left = compute_parts(source, output, setup.input, options.per, parts)
    if left and world == 1:
        raise OutputError(f"{out}: part {left[0]} cannot be read back{RESUMABLE}")
    if left:
        numbers = join_first_names(left, MAX_PARTS_LISTED)
        doing = f"others compute parts {numbers} (none runs? start the same command again)"
        return WrittenTable(out, None, f"rank {rank} of {world}: done; {doing}\n")
    if parts.rows is None:
        message = "" if begun or rank else f"{out}: is complete already\n"
        return WrittenTable(out, None, message)
    for doubt in _table_warnings(setup, output, source, parts.counts):
        tell(f"note: {out}: {doubt}")
    if has_skipped_file(out):
        tell(f"note: {skipped_file(out)}: which ECGs were skipped, and why")
    if output.sentences:
        more = "; ..., see config.json" if len(output.sentences) > MAX_SENTENCES_SHOWN else ""
        tell(f"note: {out}: the model: {'; '.join(output.sentences[:MAX_SENTENCES_SHOWN])}{more}")
    message = f"{out}: {parts.rows:,} {output.what}, computed in {setup.precision}\n"
    return WrittenTable(out, parts.rows, message)


def _table_warnings(
    setup: ModelSetup, output: Output, source: CropSource, counts: RowCounts
) -> Iterator[str]:
    """Yields warnings about the table: leads that are missing, implausible amplitudes and rates,
    ECGs that the model was fitted on, and records that could not be read."""
    of_rows = f"of {counts.rows:,} rows"
    if counts.lacking and (why := setup.model.missing_leads_doubt()):
        yield f"{counts.lacking:,} {of_rows} lack leads (column {MISSING_LEADS_COLUMN}): {why}"
    if counts.implausible:
        yield (
            f"implausible amplitude in {counts.implausible:,} {of_rows} (column {FLAGS_COLUMN}): is the "
            "scale of these ECGs right?"
        )
    yield from source.heart_rates.warnings()
    if output.scores:
        if note := setup.model.note_on_rates(source.rates_hz):
            yield note
        ecg_N, waveform_N = source.waveform_hashes
        fitted_N = were_seen_with_labels(setup.model.seen, waveform_N)
        if fitted_N.any():
            fitted, ecgs = len(np.unique(ecg_N[fitted_N])), len(np.unique(ecg_N))
            yield (
                f"{fitted:,} of the {ecgs:,} ECGs read were fitted on: their scores are better than "
                "those of new ones"
            )
    if counts.refused:
        records = f"{source.count_units(range(source.parts)):,} records"
        yield f"without {counts.refused:,} of {records}, which cannot be read"


def load_model_setup(
    model: File,
    data: File | Sequence[File],
    *,
    device: str = "auto",
    precision: str = "auto",
    code: bool = False,
    **options: Any,
) -> ModelSetup:
    """Loads the model on its device. Options that were not given get their defaults, some of which
    depend on the device. EcgOptions and `load_model_and_precision` explain the arguments."""
    several = [data] if isinstance(data, str | os.PathLike) else data
    urls = tuple(os.fspath(url) for url in several)
    chosen = {name: value for name, value in options.items() if value is not None}
    asked = EcgOptions(urls, **chosen)
    if (asked.fs_hz is not None or asked.unit) and not any(map(array_files, urls)):
        raise ConfigError(
            Flag("--fs"),
            " and ",
            Flag("--unit"),
            " are for .npy and .npz files, and ",
            Flag("--data"),
            " names no such file: leave them out",
        )
    loaded, precision = load_model_and_precision(model, device, precision, code)
    on_gpu, cores = loaded.device.type == "cuda", cores_per_rank()
    complete = replace(
        asked,
        unit=asked.unit or "mV",
        batch=asked.batch or (256 if on_gpu else 16),
        workers=asked.workers or (cores if on_gpu else max(1, cores // 4)),
        pin=on_gpu,
    )
    shown = loaded.input.limited_to(asked.leads) if asked.leads else loaded.input
    return ModelSetup(loaded, shown, precision, complete)


def select_device(name: str) -> torch.device:
    """Returns the device that --device names, such as cpu, cuda or cuda:1. "auto" is a GPU if there
    is one. With several ranks on a machine, each takes the next of its GPUs."""
    try:
        device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        )
        if device.type == "cuda" and ":" not in name and (gpus := torch.cuda.device_count()):
            device = torch.device("cuda", launched_rank().local % gpus)
        torch.zeros(0, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(Flag("--device"), f" {name}: {error}".splitlines()[0][:200]) from None
    disable_tf32()
    return device


def load_model_and_precision(
    path: File, device: str = "auto", precision: str = "auto", code: bool = False
) -> tuple[TrainedModel, str]:
    """Loads a model on its device. Returns the model and the precision that it computes in. Device
    "auto": a GPU if there is one. Precision "auto": bf16 on a GPU if the model was trained in bf16,
    else fp32."""
    place = select_device(device)
    if place.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_per_rank())
    keep_freed_memory()
    model = load(path, code)
    if precision == "auto":
        trained = model.history.get("precision")
        precision = "bf16" if place.type == "cuda" and trained == "bf16" else "fp32"
    model.encoder.to(place, torch.bfloat16 if precision == "bf16" else torch.float32)
    if model.head:
        # The head stays in fp32, because its weights include the standardisation of a probe, which
        # bf16 would round
        model.head.to(place)
    return model, precision


def refuse_several_ranks(what: str) -> None:
    """Raises ConfigError if the program was started on several ranks. `what`: subject and verb for
    the message."""
    world = launched_rank().world
    if world > 1:
        raise ConfigError(
            f"WORLD_SIZE={world}: {what} computed by a single process: start the program without "
            "deepspeed or torchrun"
        )
