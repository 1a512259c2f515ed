"""Reports which ECGs of datasets and files a run or a model was trained on, as lines for the terminal
and as a table, for `omnilead seen`."""

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
    KindsOfUse,
    dataset_key_marks,
    kinds_of_use,
    name_keys,
    unknown_key_notes,
)
from omnilead.engine.model.folder import CONFIG, model_folder, read_document, read_seen
from omnilead.engine.settings.commandline import write_result
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.training import checkpoint_files
from omnilead.engine.training.export import seen_by_checkpoint
from omnilead.engine.training.pretraining import PretrainTask
from omnilead.engine.training.run_folder import RunFolder
from omnilead.engine.training.task import TrainingTask
from omnilead.engine.training.train import saved_config

from ..finetuning.task import FinetuneTask
from ..inference.ecg_reader import EcgOptions, crops_of_files, find_dataset, pseudonym_mark

ID_COLUMNS = ["source", "record", "patient"]
CROP_SCHEMA = pa.schema([COLUMNS.field(name) for name in (*ID_COLUMNS, "waveform")])


class TrainedOn(NamedTuple):
    """What a model or a run was trained on."""

    step: Any
    seen: pa.Table  # hashes of waveforms and patients, as in engine.data.seen
    # For a run: its datasets, and by the fingerprint of a dataset how often each crop was drawn.
    # Both are empty for a model
    datasets: Sequence[str]
    times: dict[str, np.ndarray]


def training_data_lines(
    model: str,
    data: Sequence[str] | None,
    out: Path | None,
    anonymous: bool,
    pseudonymize: str | None = None,
) -> Iterator[str]:
    """Yields the lines that `omnilead seen` prints. `data`: datasets and files; None for the datasets
    of the run. `out`: a CSV file to write. `pseudonymize`: a key file, by which patients in files
    are recognised."""
    trained = read_trained_on(model)
    yield from _summary_lines(model, trained)
    options = EcgOptions((), anonymous=anonymous, pseudonymize=pseudonymize)
    opened = {url: find_dataset(replace(options, data=(url,))) for url in data or trained.datasets}
    # Patient ids are hashed with the keys of all datasets, since a patient of one dataset may occur
    # in another, or in a file
    with_keys = [dataset for dataset in opened.values() if dataset]
    if data and trained.times:
        with_keys += [Dataset.open(url, anonymous) for url in trained.datasets]
    keys, marks = name_keys(with_keys), set[str]().union(*map(dataset_key_marks, with_keys))
    if pseudonymize:
        marks.add(pseudonym_mark(pseudonymize))
    tables = []
    for url, dataset in opened.items():
        if dataset:
            crops, times = _crops_and_times(dataset, trained)
        else:
            crops = pa.Table.from_pylist(crops_of_files(replace(options, data=(url,))), CROP_SCHEMA)
            times = None
        uses = kinds_of_use(trained.seen, crops, keys)
        table = _records_table(crops, uses, times)
        yield f"\n{url}"
        yield from _use_count_lines(uses, table, times)
        if not dataset or dataset_key_marks(dataset):
            yield from unknown_key_notes(trained.seen, marks)
        tables.append(table)
    if out:
        _write_csv(out, tables)


def read_trained_on(model: str) -> TrainedOn:
    """Reads what a model was trained on, or what a run was trained on up to its newest
    checkpoint."""
    path = RunFolder(Path(model)).newest_checkpoint(checkpoint_files.warn)
    if path is None:
        with model_folder(model) as (folder, _):
            trained = read_document(folder / CONFIG).get("trained")
            step = trained.get("step") if isinstance(trained, dict) else "unknown"
            return TrainedOn(step, read_seen(folder), [], {})
    state = checkpoint_files.read_state(path)
    task: type[TrainingTask] = FinetuneTask if "task" in state["config"] else PretrainTask
    config: Any = saved_config(path, state, task.settings)
    known = seen_by_checkpoint(Path(model), config, state, task)
    datasets = known.datasets or config.data.datasets
    return TrainedOn(state["step"], known.seen, datasets, known.times_drawn)


def _summary_lines(model: str, trained: TrainedOn) -> Iterator[str]:
    """Yields lines that say how many waveforms and patients the model has seen."""
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
    """Returns the table of the dataset's crops, and how often the run drew each of them, or None if
    the run was not trained on this dataset."""
    return dataset.table(CROP_SCHEMA.names), trained.times.get(dataset.fingerprint)


def _records_table(crops: pa.Table, uses: KindsOfUse, times: np.ndarray | None) -> pa.Table:
    """Returns a table with a row for each record: the use of its waveforms and the use of its patient
    (both an index of USES, the largest of several, -1 for none), and how often its crops were drawn
    (null if that is not known)."""
    times_drawn = pa.nulls(len(crops), pa.int64()) if times is None else pa.array(times)
    columns = [
        *(crops[name] for name in ID_COLUMNS),
        uses.of_waveform,
        uses.of_patient,
        times_drawn,
    ]
    table = pa.table(columns, [*ID_COLUMNS, "waveform", "owner", "times"])
    last_uses = [("waveform", "max"), ("owner", "max"), ("times", "sum")]
    records = table.group_by(ID_COLUMNS, use_threads=False).aggregate(last_uses)
    return records.select([*ID_COLUMNS, "waveform_max", "owner_max", "times_sum"]).rename_columns(
        table.column_names
    )


def _use_count_lines(
    uses: KindsOfUse, records: pa.Table, times: np.ndarray | None
) -> Iterator[str]:
    """Yields the lines of a table that says how many crops, records and patients have each use and,
    with `times`, a line that says how often crops were drawn."""
    by_record = records["waveform"].to_numpy()
    first_crops = np.unique(uses.patient_hash, return_index=True)[1]
    by_patient = uses.of_patient[first_crops]
    yield f"{'':12}{'crops':>12}{'records':>12}{'patients':>12}"
    for use, name in enumerate(("not seen", *USES), -1):
        counts = [(used == use).sum() for used in (uses.of_waveform, by_record, by_patient)]
        yield f"{name:12}" + "".join(f"{count:12,}" for count in counts)
    if times is not None:
        yield f"crops drawn: {times.sum():,}, the same one at most {times.max():,} times"


def _write_csv(out: Path, tables: Sequence[pa.Table]) -> None:
    """Writes the rows of all tables to a CSV file, with the uses as words."""
    if not tables:
        raise ConfigError(f"--out {out}: there are no ECGs to list: name some with --data DATASET")
    table = pa.concat_tables(tables)
    for name in ("waveform", "owner"):
        column = table.schema.get_field_index(name)
        use = pa.array(["", *USES]).take(pc.add(table[name], 1))
        table = table.set_column(column, name, use)
    rows = zip(*table.to_pydict().values(), strict=True)
    write_result(out, csv_text([table.column_names, *rows]), "--out")
