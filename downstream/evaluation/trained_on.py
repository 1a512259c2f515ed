"""What a run or a model was trained on, of datasets and files: lines and a table, for `omnilead seen`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import COLUMNS, Dataset
from omnilead.data_tools.io.spreadsheet import csv_text
from omnilead.engine.data.seen import (
    USES,
    CropUses,
    keys_of,
    marks_of,
    unknown_keys,
    uses_of_crops,
)
from omnilead.engine.model.folder import CONFIG, document_of, model_folder, seen_by
from omnilead.engine.settings.commandline import write_result
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.training import checkpoint_files
from omnilead.engine.training.export import seen_until
from omnilead.engine.training.pretraining import PretrainTask
from omnilead.engine.training.run_folder import RunFolder
from omnilead.engine.training.task import TrainingTask
from omnilead.engine.training.train import saved_config

from ..finetuning.task import FinetuneTask
from ..inference.ecg_reader import EcgOptions, crops_of_files, dataset_of, pseudonym_mark

NAMES = ["source", "record", "patient"]
CROPS = pa.schema([COLUMNS.field(name) for name in (*NAMES, "waveform")])


class TrainedOn(NamedTuple):
    step: Any
    seen: pa.Table  # engine.data.seen
    # Of a run: its datasets, and how often each crop was drawn, by the dataset's fingerprint
    datasets: Sequence[str]
    times: dict[str, np.ndarray]


def report(
    model: str,
    data: Sequence[str] | None,
    out: Path | None,
    anonymous: bool,
    pseudonymize: str | None = None,
) -> Iterator[str]:
    """Lines that say it. `data`: datasets and files (default: those of a run); `out`: a CSV file to
    write; `pseudonymize`: a key file, for files."""
    trained = trained_on(model)
    yield from _summary(model, trained)
    options = EcgOptions((), anonymous=anonymous, pseudonymize=pseudonymize)
    opened = {url: dataset_of(replace(options, data=(url,))) for url in data or trained.datasets}
    # The key of one dataset also finds its patients in others and in files
    with_keys = [dataset for dataset in opened.values() if dataset]
    if data and trained.times:
        with_keys += [Dataset.open(url, anonymous) for url in trained.datasets]
    keys, marks = keys_of(with_keys), set[str]().union(*map(marks_of, with_keys))
    if pseudonymize:
        marks.add(pseudonym_mark(pseudonymize))
    tables = []
    for url, dataset in opened.items():
        if dataset:
            crops, times = _crops_and_times(dataset, trained)
        else:
            crops = pa.Table.from_pylist(crops_of_files(replace(options, data=(url,))), CROPS)
            times = None
        uses = uses_of_crops(trained.seen, crops, keys)
        table = _by_record(crops, uses, times)
        yield f"\n{url}"
        yield from _counts(uses, table, times)
        if not dataset or marks_of(dataset):
            yield from unknown_keys(trained.seen, marks)
        tables.append(table)
    if out:
        _write(out, tables)


def trained_on(model: str) -> TrainedOn:
    """`model`: a run, of which the newest checkpoint counts, or a model."""
    path = RunFolder(Path(model)).newest(checkpoint_files.warn)
    if path is None:
        with model_folder(model) as (folder, _):
            trained = document_of(folder / CONFIG).get("trained")
            step = trained.get("step") if isinstance(trained, dict) else "unknown"
            return TrainedOn(step, seen_by(folder), [], {})
    state = checkpoint_files.read_state(path)
    task: type[TrainingTask] = FinetuneTask if "task" in state["config"] else PretrainTask
    config: Any = saved_config(path, state, task.settings)
    known = seen_until(Path(model), config, state, task)
    datasets = known.datasets or config.data.datasets
    return TrainedOn(state["step"], known.seen, datasets, known.times_drawn)


def _summary(model: str, trained: TrainedOn) -> Iterator[str]:
    is_patient = trained.seen["patient"].to_numpy()
    is_unknown = trained.seen["hash"].to_numpy() < 0
    has_seen = "is known to have" if is_unknown.any() else "has"
    yield (
        f"{model}, step {trained.step}: {has_seen} seen {(~is_patient & ~is_unknown).sum():,} "
        f"waveforms of {is_patient.sum():,} patients (records where they are unknown)"
    )
    if is_unknown.any():
        hint = f"; {model}/model may know more" if trained.datasets else ""
        yield f"it is not known what else it was trained on: what is not seen here may be{hint}"


def _crops_and_times(dataset: Dataset, trained: TrainedOn) -> tuple[pa.Table, np.ndarray | None]:
    """And how often the run has drawn each crop, if it was trained on this dataset."""
    return dataset.table(CROPS.names), trained.times.get(dataset.fingerprint)


def _by_record(crops: pa.Table, uses: CropUses, times: np.ndarray | None) -> pa.Table:
    """A row for each record: the last use of a waveform and of the owner (-1: none), times."""
    times_drawn = pa.nulls(len(crops), pa.int64()) if times is None else pa.array(times)
    columns = [*(crops[name] for name in NAMES), uses.waveform, uses.owner, times_drawn]
    table = pa.table(columns, [*NAMES, "waveform", "owner", "times"])
    last_uses = [("waveform", "max"), ("owner", "max"), ("times", "sum")]
    records = table.group_by(NAMES, use_threads=False).aggregate(last_uses)
    return records.select([*NAMES, "waveform_max", "owner_max", "times_sum"]).rename_columns(
        table.column_names
    )


def _counts(uses: CropUses, records: pa.Table, times: np.ndarray | None) -> Iterator[str]:
    """How many crops, records and patients there are of each use."""
    by_record = records["waveform"].to_numpy()
    first_crops = np.unique(uses.owner_hash, return_index=True)[1]
    by_patient = uses.owner[first_crops]
    yield f"{'':12}{'crops':>12}{'records':>12}{'patients':>12}"
    for use, name in enumerate(("not seen", *USES), -1):
        counts = [(used == use).sum() for used in (uses.waveform, by_record, by_patient)]
        yield f"{name:12}" + "".join(f"{count:12,}" for count in counts)
    if times is not None:
        yield f"crops drawn: {times.sum():,}, the same one at most {times.max():,} times"


def _write(out: Path, tables: Sequence[pa.Table]) -> None:
    if not tables:
        raise ConfigError(f"--out {out}: of which ECGs? Add --data DATASET")
    table = pa.concat_tables(tables)
    for name in ("waveform", "owner"):
        column = table.schema.get_field_index(name)
        use = pa.array(["", *USES]).take(pc.add(table[name], 1))
        table = table.set_column(column, name, use)
    rows = zip(*table.to_pydict().values(), strict=True)
    write_result(out, csv_text([table.column_names, *rows]), "--out")
