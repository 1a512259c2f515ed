"""Embeddings of ECGs by a trained model, as parquet; or the scores of probes on them.

    python -m engine.embed --model RUN --data DATASET --out F.parquet                  one row for each crop of 10 s
    python -m engine.embed --model RUN --data FOLDER A.hea --out F.parquet             WFDB records and known archives
    python -m engine.embed --model RUN --data A.npy --fs 250 --leads II,V1 --unit uV --out F.parquet
    python -m engine.embed --model RUN --data DATASET --probe [--json F]               linear probe, k-NN, identification

F.parquet: source, record, patient, row (of the dataset), start_s, embedding (fixed_size_list<float32>). It is written in parts:
stopped and started again, the command goes on and ends with the same bytes. .npy files hold [leads, samples] or
[ECGs, leads, samples], .npz files any number of the former. --leads: those that the model is shown, the others are zeros; for
arrays also the names of the rows. Exit code 2: an argument or a file is wrong. Exit code 1: writing failed.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from engine.common import Parser, interruptible

if __name__ == "__main__":
    interruptible("engine.embed")

import argparse
import errno
import hashlib
import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from data_tools.cli import keep_freed_memory
from data_tools.dataset import META, Dataset
from data_tools.sources import DataError, Prepared, ReadError, open_sources, prepared
from engine.common import LEADS, ConfigError, OutputError, describe_leads, leads_in_order, writable, write_whole, writing
from engine.data.augmenter import none_measured
from engine.data.npz import ArrayError, load_npz, npz_names, open_npy
from engine.data.preprocess import Input, SignalError
from engine.evaluation.embedding import CropSource, DatasetSource, ParquetParts, RecordSource, schema, tables
from engine.evaluation.probe import probe, probe_rows, report
from engine.model.inference import TrainedModel, crops, load
from engine.model.kernels import disable_tf32

ARRAYS = (".npy", ".npz")
RESUMABLE = ": run the same command again to go on"
PERMANENT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)  # the same command would fail again


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    resumable = RESUMABLE if args.out else ""
    try:
        check(args)
        run(args)
        return 0
    except (ConfigError, DataError) as error:
        message, code = str(error), 2
    except OutputError as error:
        message, code = str(error), 1
    except OSError as error:
        ours = args.out and str(error.filename or args.out).startswith(str(args.out))
        place = f"--out {args.out}" if ours or not error.filename else error.filename
        code = 2 if error.errno in PERMANENT else 1
        message = f"{place}: {error.strerror or error}{resumable * (code == 1)}"
    except KeyboardInterrupt:
        message, code = f"interrupted{resumable}", 130
    print(f"engine.embed: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m engine.embed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, metavar="RUN", help="RUN, RUN/model or s3://...")
    add("--data", required=True, nargs="+", metavar="DATASET|FILE", help="a dataset; or folders, .hea, .npy and .npz files")
    add("--out", type=Path, metavar="F.parquet", help="write the embeddings")
    add("--per", choices=("crop", "record", "half"), help="one row for each 10 s, each record, each 5 s (crop)")
    add("--leads", metavar="L", help='12, 6, 3, 2, 1 or names such as "I,II,V2"; others are zeros (default: all)')
    add("--fs", type=float, metavar="HZ", help="sampling rate of .npy and .npz files")
    add("--unit", help="unit of .npy and .npz files: V, mV, uV (mV)")
    add("--batch", type=int, metavar="N", help="crops encoded at a time (16, on a GPU 256)")
    add("--workers", type=int, metavar="N", help="threads that read (a quarter of the cores, with a GPU all of them)")
    gpu = torch.cuda.is_available()
    add("--device", default="cuda" if gpu else "cpu", help="cpu, cuda, cuda:1, ... (a GPU if there is one)")
    precision = "of the encoder; auto: bf16 on a GPU for a model trained in it, else fp32. Embeddings are float32"
    add("--precision", choices=("auto", "fp32", "bf16"), default="auto", help=precision)
    corrupt = "stop at data that cannot be read, or name and skip them (stop)"
    add("--on-corrupt", choices=("stop", "skip"), default="stop", help=corrupt)
    add("--probe", action="store_true", help="score the embeddings on a dataset's diagnosis and identification splits")
    add("--json", type=Path, metavar="F", help="with --probe: write the scores as JSON")
    return parser.parse_args(arguments)


def check(args: argparse.Namespace) -> None:
    """Arguments that contradict each other, and files that cannot be written: refused before the work."""
    if bool(args.out) == args.probe:
        raise ConfigError("give either --out F.parquet or --probe")
    if args.json and not args.probe:
        raise ConfigError(f"--json {args.json}: only with --probe, whose scores it holds")
    if args.per and args.probe:
        raise ConfigError(f"--per {args.per}: --probe always uses halves of 5 s: leave it out")
    if (args.fs is not None or args.unit) and not any(url.endswith(ARRAYS) for url in args.data):
        raise ConfigError("--fs and --unit are for .npy and .npz files, and --data names none: leave them out")
    if args.out and args.out.suffix not in ("", ".parquet"):
        raise ConfigError(f"--out {args.out}: a parquet file is written: use {args.out.with_suffix('.parquet').name}")
    if any(given is not None and given < 1 for given in (args.workers, args.batch)):
        raise ConfigError(f"--batch {args.batch}, --workers {args.workers}: must be at least 1")
    for flag, place in (("--out", args.out), ("--json", args.json)):
        if place:
            writable(place, flag)


def run(args: argparse.Namespace) -> None:
    on_gpu, cores = args.device.startswith("cuda"), len(os.sched_getaffinity(0))
    args.per, args.unit = args.per or "crop", args.unit or "mV"
    args.batch = args.batch or (256 if on_gpu else 16)
    args.workers = args.workers or (cores if on_gpu else max(1, cores // 4))
    model, model_input = prepare_model(args)
    datasets = [url for url in args.data if is_dataset(url)]
    if datasets and len(args.data) > 1:
        raise ConfigError(f"--data {' '.join(args.data)}: give one dataset, or files, but not both")
    if args.probe:
        if not datasets:
            raise ConfigError(f"--data {args.data[0]}: --probe needs a dataset with splits: make one with `data_tools shard`")
        score(args, model, model_input)
        return
    job = {"model": model.digest, "leads": args.leads, "per": args.per, "batch": args.batch, "precision": args.precision}
    job |= {"device": torch.device(args.device).type, "on_corrupt": args.on_corrupt}
    if datasets:
        dataset = Dataset.open(args.data[0])
        job |= {"data": dataset.fingerprint}
        make: Callable[[], CropSource] = partial(dataset_source, args, dataset, model_input, np.arange(len(dataset)))
    else:
        records = list(records_of(args, model_input))
        digest = hashlib.sha256()
        for record in records:
            digest.update(json.dumps([record.name, record.stamp.decode()]).encode())
        job |= {"data": digest.hexdigest(), "fs_hz": args.fs, "unit": args.unit}
        make = partial(record_source, args, model_input, records)
    with ParquetParts(args.out, job) as parts:
        if not parts.finished:
            source = make()
            missing, total = parts.missing(source.parts), source.count(range(source.parts))
            with progress_bar(total, source.unit, total - source.count(missing)) as bar:
                for number, table in tables(source, model, model_input, missing, args.per, bar.update):
                    parts.write(number, table)
            parts.join(source.parts, schema(model.encoder.width))
    print(
        f"{args.out}: {pq.read_metadata(args.out).num_rows:,} embeddings of {model.encoder.width}, computed in {args.precision}"
    )


def progress_bar(total: int, unit: str, done: int = 0) -> "tqdm[None]":
    return tqdm(total=total, initial=done, unit=unit, desc="embed", disable=None)


def score(args: argparse.Namespace, model: TrainedModel, model_input: Input) -> None:
    dataset = Dataset.open(args.data[0])
    args.per = "half"
    source = dataset_source(args, dataset, model_input, probe_rows(dataset))
    parts = range(source.parts)
    with progress_bar(source.count(parts), source.unit) as bar:
        halves = pa.concat_tables(table for _, table in tables(source, model, model_input, parts, "half", bar.update))
    scores = probe(dataset, halves) | {"precision": args.precision}
    print(report(scores))
    if args.json:
        with writing(args.json, "--json"):
            write_whole(args.json, json.dumps(scores, indent=1) + "\n")


def prepare_model(args: argparse.Namespace) -> tuple[TrainedModel, Input]:
    """The model on its device, and what it is shown."""
    try:
        device = torch.device(args.device)
        torch.zeros(0, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {args.device}: {error}".splitlines()[0][:200]) from None
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    keep_freed_memory()
    disable_tf32()
    model = load(args.model)
    if args.precision == "auto":
        args.precision = "bf16" if device.type == "cuda" and model.history.get("precision") == "bf16" else "fp32"
    model.to(device, torch.bfloat16 if args.precision == "bf16" else torch.float32)
    return model, model.input.limited_to(args.leads) if args.leads else model.input


def is_dataset(url: str) -> bool:
    if "://" not in url:
        return Path(url, META).is_file()
    try:
        return bool(Dataset.open(url))
    except DataError:
        return False


def skip(args: argparse.Namespace, name: str, reason: object) -> None:
    if args.on_corrupt == "stop":
        raise ConfigError(f"{name}: {reason}: fix it, or skip such data with --on-corrupt skip")
    tqdm.write(f"skipped: {name}: {reason}", file=sys.stderr)


def no_leads(model_input: Input) -> str:
    return f"no valid lead: nothing was measured of {describe_leads(model_input.seen)}, at which the model looks"


def dataset_source(args: argparse.Namespace, dataset: Dataset, model_input: Input, rows: np.ndarray) -> DatasetSource:
    """Without crops in which none of the model's leads was measured; a record that has no others cannot be read."""
    if dataset.root.remote and args.per == "record":
        raise ConfigError(f"--per record of {dataset.root.url}: remote crops are read shard by shard: use crop or half")
    blank = none_measured(dataset, model_input.seen)[rows]
    if blank.all():
        raise ConfigError(f"--data {dataset.root.url}: {no_leads(model_input)}: choose other --leads")
    if blank.any():
        names = pc.binary_join_element_wise(*dataset.table(["source", "record"]).take(rows).columns, "/")
        without, others = (names.filter(pa.array(which)) for which in (blank, ~blank))
        for name in without.filter(pc.invert(pc.is_in(without, others))).unique().to_pylist():
            skip(args, f"{dataset.root.url}: {name}", no_leads(model_input))
    reading = {"on_corrupt": args.on_corrupt, "threads": args.workers, "pin": args.device.startswith("cuda")}
    return DatasetSource(dataset, rows[~blank], args.batch, args.per, **reading)


class RecordToRead(NamedTuple):
    name: str
    stamp: bytes  # changes with the content
    read: Callable[[], Prepared | ReadError]
    label: str = ""  # of an array, used in the table if no other array has it; else `name`


def records_of(args: argparse.Namespace, model_input: Input) -> Iterator[RecordToRead]:
    for url in args.data:
        if url.endswith(ARRAYS) and Path(url).exists():
            yield from arrays(args, Path(url), model_input)
        elif url.endswith(".hea"):
            source = open_sources(str(Path(url).parent), "wfdb")[0]
            yield RecordToRead(url, source.root.stamp(Path(url).name), partial(prepared, source, Path(url).name))
        elif "://" in url or Path(url).is_dir():
            try:
                sources = open_sources(url)
            except DataError as error:
                other = "name it with `data_tools shard --source`, and give the dataset"
                raise ConfigError(str(error).replace("name it with --source", other)) from None
            for source in sources:
                for key in source.keys():  # noqa: SIM118 - no dictionary
                    stamp = b"" if source.root.remote else source.root.stamp(key)
                    yield RecordToRead(f"{source.root.url}/{key}", stamp, partial(prepared, source, key))
        else:
            what = "neither a dataset or folder nor a .hea, .npy or .npz file" if Path(url).exists() else "does not exist"
            raise ConfigError(f"--data {url}: {what}")


def arrays(args: argparse.Namespace, path: Path, model_input: Input) -> Iterator[RecordToRead]:
    if args.fs is None:
        raise ConfigError(f"--data {path}: give its sampling rate with --fs")
    leads = [LEADS[i] for i in leads_in_order(args.leads or "12")]

    def read(label: str, values_of: Callable[[], np.ndarray]) -> Prepared | ReadError:
        try:
            values = values_of()
            if not args.leads and values.ndim == 2 and len(values) != len(leads):
                return ReadError(f"has {len(values)} rows, not {len(leads)}: name its rows with --leads")
            return Prepared("array", label, None, *crops(values, args.fs, leads, args.unit, model_input))
        except (ArrayError, SignalError, OSError) as error:
            return ReadError(str(error))

    ecgs: list[tuple[str, str, Callable[[], np.ndarray]]]  # suffix of the name, label, values
    try:
        if zipfile.is_zipfile(path):
            ecgs = [(f"[{name}]", name, partial(lambda one: load_npz(path, [one])[one], name)) for name in npz_names(path)]
        else:
            whole = open_npy(path)
            ecgs = [("", path.stem, lambda: whole)] if whole.size else []
            if whole.ndim == 3:
                ecgs = [(f"[{i}]", f"{path.stem}[{i}]", partial(whole.__getitem__, i)) for i in range(len(whole))]
            elif whole.ndim != 2:
                raise ConfigError(f"--data {path}: shape {list(whole.shape)}, not [leads, samples] or [ECGs, leads, samples]")
        stamp = f"{path.stat().st_size},{path.stat().st_mtime_ns}".encode()
    except (ArrayError, OSError) as error:
        raise ConfigError(f"--data {path}: {error}") from None
    if not ecgs:
        raise ConfigError(f"--data {path}: has no ECG")
    for suffix, label, values_of in ecgs:
        yield RecordToRead(f"{path}{suffix}", stamp, partial(read, label, values_of), label)


def record_source(args: argparse.Namespace, model_input: Input, records: Sequence[RecordToRead]) -> RecordSource:
    labels = Counter(record.label for record in records)

    def read(number: int) -> Prepared | None:
        record = records[number]
        ecg = record.read()
        if isinstance(ecg, Prepared):
            if record.label and labels[record.label] > 1:
                ecg = ecg._replace(record=record.name)
            ecg = with_leads(ecg, model_input)
        if isinstance(ecg, Prepared):
            return ecg
        skip(args, record.name, ecg)
        return None

    return RecordSource(len(records), read, args.batch, args.workers)


def with_leads(ecg: Prepared, model_input: Input) -> Prepared | ReadError:
    """Without crops in which all leads that the model uses are zero, as they are where nothing was measured."""
    there = np.flatnonzero(ecg.crops_uv[:, list(model_input.seen)].any(axis=(1, 2))).tolist()
    if len(there) == len(ecg.halves):
        return ecg
    if not there:
        return ReadError(no_leads(model_input))
    starts, halves = tuple(ecg.start_s[i] for i in there), tuple(ecg.halves[i] for i in there)
    return ecg._replace(crops_uv=ecg.crops_uv[there], start_s=starts, halves=halves)


if __name__ == "__main__":
    sys.exit(main())
