"""What a model or a run has seen of datasets and files: engine.seen, the command."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import COLUMNS, Dataset
from omnilead.data_tools.io.spreadsheet import as_csv

from ..data.seen import USES, hashes_of, keys_of, marks_of, unknown_keys, use_of
from ..finetuning.task import FinetuneTask
from ..inference.inputs import EcgOptions, crops_of_files, dataset_of, pseudonym_mark
from ..model.folder import CONFIG, document_of, model_folder, seen_by
from ..settings.commandline import write_result
from ..settings.errors import ConfigError
from ..training import checkpoint
from ..training.export import seen_until
from ..training.pretraining import PretrainTask
from ..training.run_folder import RunFolder
from ..training.task import TrainingTask
from ..training.train import saved_config

NAMED = ["source", "record", "patient"]
CROPS = pa.schema([COLUMNS.field(name) for name in (*NAMED, "waveform")])


def table_of(
    model: str,
    data: Sequence[str] | None,
    out: Path | None,
    anonymous: bool,
    pseudonymize: str | None = None,
) -> Iterator[str]:
    """Lines that say it; `out`: a CSV file to write; `pseudonymize`: a key file, for files."""
    step, seen, datasets, times = trained_on(model)
    people, unknown = seen["patient"].to_numpy(), seen["hash"].to_numpy() < 0
    has = "is known to have" if unknown.any() else "has"
    yield (
        f"{model}, step {step}: {has} seen {(~people & ~unknown).sum():,} "
        f"waveforms of {people.sum():,} patients (records where they are unknown)"
    )
    if unknown.any():
        ask = f"; {model}/model may know more" if datasets else ""
        yield f"it is not known what else it was trained on: what is not seen here may be{ask}"
    options = EcgOptions((), anonymous=anonymous, pseudonymize=pseudonymize)
    opened = {url: dataset_of(replace(options, data=(url,))) for url in data or datasets}
    # The key of one dataset also finds its patients in others and in files
    with_keys = [dataset for dataset in opened.values() if dataset]
    if data and times:
        with_keys += [Dataset.open(url, anonymous) for url in datasets]
    keys, known = keys_of(with_keys), set[str]().union(*map(marks_of, with_keys))
    if pseudonymize:
        known.add(pseudonym_mark(pseudonymize))
    tables = []
    for url, dataset in opened.items():
        drawn = None
        if dataset:
            for version in times.keys() & {*dataset.earlier}:
                dataset = dataset.in_version(version)
            crops, drawn = dataset.table(CROPS.names), times.get(dataset.fingerprint)
        else:
            crops = crops_of_files(replace(options, data=(url,)))
            crops = pa.Table.from_pylist(crops, CROPS)
        table, lines = compared(seen, crops, drawn, keys)
        if not dataset or marks_of(dataset):
            lines += unknown_keys(seen, known)
        tables.append(table)
        yield from (f"\n{url}", *lines)
    if out:
        if not tables:
            raise ConfigError(f"--out {out}: of which ECGs? Add --data DATASET")
        table = pa.concat_tables(tables)
        rows = zip(*table.to_pydict().values(), strict=True)
        write_result(out, as_csv([table.column_names, *rows]), "--out")


def trained_on(model: str) -> tuple[Any, pa.Table, Sequence[str], dict[str, np.ndarray]]:
    """Until which step, and on what; of a run also its datasets, and how often each crop was drawn,
    by dataset."""
    path = RunFolder(Path(model)).newest(checkpoint.warn)
    if path is None:
        with model_folder(model) as (folder, _):
            trained = document_of(folder / CONFIG).get("trained")
            step = trained.get("step") if isinstance(trained, dict) else "unknown"
            return step, seen_by(folder), [], {}
    state = checkpoint.read_state(path)
    task: type[TrainingTask] = FinetuneTask if "task" in state["config"] else PretrainTask
    config: Any = saved_config(path, state, task.settings)
    seen, times = seen_until(Path(model), config, state, task)
    return state["step"], seen, config.data.datasets, times


def compared(
    seen: pa.Table, crops: pa.Table, times: np.ndarray | None, keys: Sequence[bytes]
) -> tuple[pa.Table, list[str]]:
    """A row for each record, and how many of each use there are."""
    under_keys, waves = hashes_of(crops.combine_chunks().to_batches()[0], keys)
    people, wave = under_keys[0], use_of(seen, False, waves)
    owner = np.max([use_of(seen, True, hashes) for hashes in under_keys], axis=0)
    drawn = pa.nulls(len(crops), pa.int64()) if times is None else pa.array(times)
    each = [*(crops[name] for name in NAMED), wave, owner, drawn]
    most = [("waveform", "max"), ("owner", "max"), ("times", "sum")]
    names = [*NAMED, "waveform", "owner", "times"]
    records = pa.table(each, names).group_by(NAMED, use_threads=False).aggregate(most)
    first = np.unique(people, return_index=True)[1]
    lines = [f"{'':12}{'crops':>12}{'records':>12}{'patients':>12}"]
    for use, name in enumerate(("not seen", *USES), -1):
        of_use = wave, records["waveform_max"].to_numpy(), owner[first]
        lines.append(f"{name:12}" + "".join(f"{(of == use).sum():12,}" for of in of_use))
    if times is not None:
        lines.append(f"crops drawn: {times.sum():,}, the same one at most {times.max():,} times")
    table = records.select(NAMED)
    for name in ("waveform", "owner"):
        uses = pa.array(["", *USES]).take(pc.add(records[f"{name}_max"], 1))
        table = table.append_column(name, uses)
    return table.append_column("times", records["times_sum"]), lines
