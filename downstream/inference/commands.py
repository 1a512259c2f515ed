"""Tables of a trained model's embeddings and predictions: what `omnilead embed` and `omnilead
predict` do.

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
from omnilead.engine.settings.errors import ConfigError, Flag, OutputError, first_names
from omnilead.engine.settings.files import File
from omnilead.engine.settings.launcher import cores_per_rank, launched_rank

from . import outputs
from .ecg_reader import FLAGS, CropSource, EcgOptions, OpenedData, array_files, open_data
from .outputs import (
    MISSING,
    Counts,
    Output,
    ParquetParts,
    has_skipped_file,
    make_parts,
    read_job,
    skipped_file,
    whole_table,
)
from .trained_model import TrainedModel, load

PARTS_LISTED = 8  # numbers that a message lists
SENTENCES_SHOWN = 4  # sentences that a message has about a model


class Written(NamedTuple):
    """A file that was written, or whose last parts other ranks compute."""

    out: Path
    rows: int | None  # None on ranks that did not complete the file
    message: str  # for the user; "" if another rank has told


class Setup(NamedTuple):
    """A model on its device, and what it is shown."""

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
) -> pa.Table | Written:
    """Runs `omnilead embed`: see downstream/embed.py."""
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
) -> pa.Table | Written:
    """Runs `omnilead predict`: see downstream/predict.py."""
    place = Path(out) if out else None
    if place and place.suffix not in (".csv", ".parquet"):
        raise ConfigError(Flag("--out"), f" {out}: must end in .csv or .parquet")
    if place and place.suffix == ".csv" and place.exists() and read_job(place) is None:
        raise ConfigError(
            Flag("--out"), f" {out}: already exists: remove it, or choose another ", Flag("--out")
        )
    return _make_table(outputs.prediction_output, model, data, place, options)


def _make_table(
    output_of: Callable[[TrainedModel], Output],
    model: File,
    data: File | Sequence[File],
    out: Path | None,
    options: dict[str, Any],
) -> pa.Table | Written:
    launched_rank()  # refuses wrong environment variables before the model is loaded
    if out:
        require_writable(out, Flag("--out"))
    else:
        refuse_ranks("a table in memory is")
    try:
        setup = load_setup(model, data, **options)
        output = output_of(setup.model)
        opened = open_data(setup.options, setup.input)
        if out:
            return _write_file(setup, output, opened, out)
        source = opened.source()
        table = whole_table(source, output, setup.input, setup.options.per)
        counts = Counts().add_table(table, sum(map(len, source.skipped.values())))
        for doubt in _table_doubts(setup, output, source, counts):
            warnings.warn(doubt, stacklevel=5)  # points at the call of omnilead.embed or predict
        return table
    except OSError as error:
        raise file_error(error, out) from None


def _write_file(setup: Setup, output: Output, opened: OpenedData, out: Path) -> Written:
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
            left = make_parts(source, output, setup.input, options.per, parts)
    if left and world == 1:
        raise OutputError(f"{out}: part {left[0]} cannot be read back{RESUMABLE}")
    if left:
        numbers = first_names(left, PARTS_LISTED)
        doing = f"others compute parts {numbers} (none runs? start the same command again)"
        return Written(out, None, f"rank {rank} of {world}: done; {doing}\n")
    if parts.rows is None:
        message = "" if begun or rank else f"{out}: is complete already\n"
        return Written(out, None, message)
    for doubt in _table_doubts(setup, output, source, parts.counts):
        tell(f"note: {out}: {doubt}")
    if has_skipped_file(out):
        tell(f"note: {skipped_file(out)}: which ECGs were skipped, and why")
    if output.sentences:
        more = "; ..., see config.json" if len(output.sentences) > SENTENCES_SHOWN else ""
        tell(f"note: {out}: the model: {'; '.join(output.sentences[:SENTENCES_SHOWN])}{more}")
    message = f"{out}: {parts.rows:,} {output.what}, computed in {setup.precision}\n"
    return Written(out, parts.rows, message)


def _table_doubts(
    setup: Setup, output: Output, source: CropSource, counts: Counts
) -> Iterator[str]:
    """Yields what the user of a table must know."""
    of_rows = f"of {counts.rows:,} rows"
    if counts.lacking and (why := setup.model.missing_leads_doubt()):
        yield f"{counts.lacking:,} {of_rows} lack leads (column {MISSING}): {why}"
    if counts.implausible:
        yield (
            f"implausible amplitude in {counts.implausible:,} {of_rows} (column {FLAGS}): is the "
            "scale of these ECGs right?"
        )
    yield from source.heart_rates.warnings()
    if output.scores:
        if note := setup.model.note_on_rates(source.rates_hz):
            yield note
        ecg_N, waveform_N = source.waveforms
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


def load_setup(
    model: File,
    data: File | Sequence[File],
    *,
    device: str = "auto",
    precision: str = "auto",
    code: bool = False,
    **options: Any,
) -> Setup:
    """Loads the model and completes the options: see EcgOptions and `load_model_and_precision`."""
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
            " names none: leave them out",
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
    return Setup(loaded, shown, precision, complete)


def select_device(name: str) -> torch.device:
    """Returns the device for --device: cpu, cuda, cuda:1, ...; auto: a GPU if there is one. Ranks
    use a machine's GPUs in turn."""
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
    """Loads a model on its device; returns the precision that it computes in, too. "auto": a GPU if
    there is one; there bf16 if the model was trained in bf16, else fp32."""
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
        model.head.to(place)  # a probe's standardisation is in its weights: bf16 would round it
    return model, precision


def refuse_ranks(what: str) -> None:
    world = launched_rank().world
    if world > 1:
        raise ConfigError(
            f"WORLD_SIZE={world}: {what} computed by one process: start it without deepspeed or "
            "torchrun"
        )
