"""Embeddings of ECGs by a trained model, as parquet; or what they are worth, in one command.

    python -m engine.embed --model RUN --data DATASET --out F.parquet                  a row for each crop of 10 s
    python -m engine.embed --model RUN --data FOLDER A.hea --out F.parquet             WFDB and known archives
    python -m engine.embed --model RUN --data A.npy --fs 250 --leads II,V1 --unit uV --out F.parquet
    python -m engine.embed --model RUN --data DATASET --probe [--json F]               linear probe, k-NN, identification

F.parquet: source, record, patient, row (of the dataset), start_s, embedding (fixed_size_list<float32>). It is written in parts:
killed and started again it goes on, and ends as the same bytes. .npy holds [leads, samples] or [ECGs, leads, samples], .npz any
number of the former. --leads: those that the model is shown, the others being zeros; of arrays the names of the rows too.
Exit 2: a setting or a file is wrong. Exit 1: the disk failed.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from engine.common import Parser, interruptible

if __name__ == "__main__":
    interruptible("engine.embed")

import argparse
import atexit
import errno
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from tqdm import tqdm

from data_tools.cli import keep_freed_memory
from data_tools.dataset import META, Dataset
from data_tools.sources import DataError, Prepared, ReadError, Source, open_sources, prepared
from engine.common import LEADS, ConfigError, OutputError, describe_leads, leads_in_order, writable, write_whole, writing
from engine.data.missing_leads import unseen
from engine.data.npz import ArrayError, load_npz, npz_names, open_npy
from engine.data.preprocess import Input, SignalError, crops
from engine.data.reader import CropReader
from engine.data.staging import Staging
from engine.evaluation.embedding import DatasetStream, Loaded, RecordStream, Stream, encoder, finite, schema, tables
from engine.evaluation.probed import probe, report, roles
from engine.evaluation.table_parts import Parts
from engine.model.inference import TrainedModel, load
from engine.model.kernels import disable_tf32

CACHE_SHARDS = 8
ARRAYS = (".npy", ".npz")
GOES_ON = ": the same command goes on"
LASTING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)  # the same command would fail again


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        check(args)
        run(args)
    except (ConfigError, DataError) as error:
        return say(error, 2)
    except OutputError as error:
        return say(error, 1)
    except OSError as error:
        ours = args.out and str(error.filename or args.out).startswith(
            (f"{args.out}.parts", f"{args.out.parent}/.{args.out.name}.")
        )
        told = f"{f'--out {args.out}' if ours or not error.filename else error.filename}: {error.strerror or error}"
        if error.errno in LASTING:
            return say(OSError(told), 2)
        return say(OSError(f"{told}{GOES_ON if args.out else ''}"), 1)
    except KeyboardInterrupt:
        return say(KeyboardInterrupt(f"stopped{GOES_ON if args.out else ''}"), 130)
    return 0


def say(error: BaseException, code: int) -> int:
    print(f"engine.embed: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m engine.embed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, metavar="RUN", help="RUN, RUN/model or s3://...")
    add("--data", required=True, nargs="+", metavar="DATASET|FILE", help="a dataset; or folders, .hea, .npy and .npz files")
    add("--out", type=Path, metavar="F.parquet")
    add("--per", choices=("crop", "record", "half"), help="a row for each 10 s, each record, each 5 s (crop)")
    add("--leads", metavar="L", help='12, 6, 3, 2, 1 or names such as "I,II,V2"; without it all that the model knows')
    add("--fs", type=float, metavar="HZ", help="of .npy and .npz")
    add("--unit", help="of .npy and .npz: V, mV, uV (mV)")
    add("--batch", type=int, metavar="N", help="crops encoded at a time; 16, on a GPU 256")
    add("--workers", type=int, metavar="N", help="threads that read; a quarter of the cores, beside a GPU all of them")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add(
        "--precision",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="of the encoder; auto: bf16 on a GPU for a model trained in it, else fp32. Embeddings are float32",
    )
    add(
        "--on-corrupt",
        choices=("stop", "skip"),
        default="stop",
        help="what cannot be read ends the run, or is named and left out",
    )
    add("--probe", action="store_true", help="score the embeddings of a dataset's diagnosis and identification roles")
    add("--json", type=Path, metavar="F", help="with --probe: the scores")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    if bool(args.out) == args.probe:
        raise ConfigError("give --out F.parquet, or --probe")
    args.per, args.unit = args.per or "crop", args.unit or "mV"
    if any(given is not None and given < 1 for given in (args.workers, args.batch)):
        raise ConfigError(f"--batch {args.batch}, --workers {args.workers}: at least 1")
    on_gpu, cores = args.device.startswith("cuda"), len(os.sched_getaffinity(0))
    args.batch = args.batch or (256 if on_gpu else 16)
    args.workers = args.workers or (cores if on_gpu else max(1, cores // 4))
    model, wanted = prepare_model(args)
    with_meta = [url for url in args.data if is_dataset(url)]
    if with_meta and len(args.data) > 1:
        raise ConfigError(f"--data {' '.join(args.data)}: one dataset at a time, and no files beside it")
    if args.probe:
        if not with_meta:
            raise ConfigError(f"--data {args.data[0]}: --probe needs a dataset with roles: `data_tools shard` makes one")
        score(args, model, wanted)
        return
    job = {"model": model.digest, "leads": args.leads, "per": args.per, "batch": args.batch, "precision": args.precision}
    job |= {"device": torch.device(args.device).type, "on_corrupt": args.on_corrupt}
    if with_meta:
        dataset = Dataset.open(args.data[0])
        job |= {"data": dataset.fingerprint}
        make: Callable[[], Stream] = partial(dataset_stream, args, dataset, wanted, np.arange(len(dataset)))
    else:
        records = list(records_of(args, wanted))
        job |= {"data": digest_of(records), "fs_hz": args.fs, "unit": args.unit}
        make = partial(record_stream, args, wanted, records)
    with Parts(args.out, job) as parts:
        rows = parts.rows if parts.finished else write(args, make(), parts, model, wanted)
    print(f"{args.out}: {rows:,} embeddings of {model.encoder.width}, computed in {args.precision}")


def check(args: argparse.Namespace) -> None:
    """What would be ignored, and places that cannot be written to, before the work."""
    if args.json and not args.probe:
        raise ConfigError(f"--json {args.json}: holds the scores of --probe: give both, or neither")
    if args.per and args.probe:
        raise ConfigError(f"--per {args.per}: --probe looks at halves of 5 s: leave it out")
    if (args.fs is not None or args.unit) and not any(url.endswith(ARRAYS) for url in args.data):
        raise ConfigError("--fs and --unit are of .npy and .npz files, and --data names none: leave them out")
    if args.out and args.out.suffix not in ("", ".parquet"):
        raise ConfigError(f"--out {args.out}: parquet is written: call it {args.out.with_suffix('.parquet').name}")
    for flag, place in (("--out", args.out), ("--json", args.json)):
        if place:
            writable(place, flag)


def prepare_model(args: argparse.Namespace) -> tuple[TrainedModel, Input]:
    """The model where it computes, and what it takes."""
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
    args.precision = precision_of(args.precision, device, model)
    model.to(device, torch.bfloat16 if args.precision == "bf16" else torch.float32)
    return model, model.input.limited_to(args.leads) if args.leads else model.input


def precision_of(asked: str, device: torch.device, model: TrainedModel) -> str:
    if asked != "auto":
        return asked
    return "bf16" if device.type == "cuda" and model.history.get("precision") == "bf16" else "fp32"


def is_dataset(url: str) -> bool:
    if "://" not in url:
        return Path(url, META).is_file()
    try:
        return bool(Dataset.open(url))
    except DataError:
        return False


def write(args: argparse.Namespace, stream: Stream, parts: Parts, model: TrainedModel, wanted: Input) -> int:
    todo = parts.missing(stream.parts)
    total, left = stream.count(range(stream.parts)), stream.count(todo)
    with tqdm(total=total, initial=total - left, unit=stream.unit, desc="embed", disable=None) as bar:
        for number, table in tables(stream, encoder(model, wanted), todo, args.per, bar.update):
            finite(table)
            parts.write(number, table)
    return parts.publish(stream.parts, schema(model.encoder.width))


def dataset_stream(args: argparse.Namespace, dataset: Dataset, wanted: Input, rows: np.ndarray) -> DatasetStream:
    rows, staged = measured(args, dataset, wanted, rows), {}
    if dataset.root.remote:
        if args.per == "record":
            raise ConfigError(f"--per record of {dataset.root.url}: crops come shard by shard from far away: use crop or half")
        cache = tempfile.mkdtemp(prefix="omnilead-")
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
        shards = dataset.addresses[0][rows]
        order = shards[np.flatnonzero(np.diff(shards, prepend=-1))].tolist()
        most = CACHE_SHARDS * max(int(shard["bytes"]) for shard in dataset.shards)
        staged = {0: Staging(dataset, cache, most, order=order).hold}
    pin = args.device.startswith("cuda")
    gather = CropReader([dataset], on_corrupt=args.on_corrupt, threads=args.workers, pin=pin, staged=staged)
    return DatasetStream(dataset, rows, args.batch, args.per, gather)


def measured(args: argparse.Namespace, dataset: Dataset, wanted: Input, rows: np.ndarray) -> np.ndarray:
    """The rows in which the model finds a lead that was measured. A record without any is one that cannot be read."""
    blank = unseen(dataset, wanted.seen)[rows]
    if not blank.any():
        return rows
    if blank.all():
        raise ConfigError(f"--data {dataset.root.url}: {nothing_of(wanted)}: show it other leads")
    names = dataset.table(["source", "record"]).take(rows)
    records = pc.binary_join_element_wise(*names.columns, "/").combine_chunks().dictionary_encode()
    codes = records.indices.to_numpy()
    for code in np.setdiff1d(codes[blank], codes[~blank]).tolist():
        leave_out(args, f"{dataset.root.url}: {records.dictionary[code]}", nothing_of(wanted))
    return np.asarray(rows[~blank])


def nothing_of(wanted: Input) -> str:
    return f"no valid lead: nothing was measured of {describe_leads(wanted.seen)}, at which the model looks"


def leave_out(args: argparse.Namespace, name: str, why: object) -> None:
    if args.on_corrupt == "stop":
        raise ConfigError(f"{name}: {why}: mend it, or leave such out with --on-corrupt skip")
    tqdm.write(f"skipped: {name}: {why}", file=sys.stderr)


class Record(NamedTuple):
    name: str
    stamp: bytes  # another: it may hold something else
    read: Callable[[], Prepared | ReadError | Loaded]
    label: str = ""  # what an array is called, if no other is called so; then `name`


def records_of(args: argparse.Namespace, wanted: Input) -> Iterator[Record]:
    for url in args.data:
        if url.endswith(ARRAYS) and Path(url).exists():
            yield from arrays(args, Path(url), wanted)
        elif url.endswith(".hea"):
            source = open_sources(str(Path(url).parent), "wfdb")[0]
            yield from (Record(url, source.root.stamp(key), partial(prepared, source, key)) for key in [Path(url).name])
        elif "://" in url or Path(url).is_dir():
            for source in opened(url):
                for key in source.keys():  # noqa: SIM118 - no dictionary
                    stamp = b"" if source.root.remote else source.root.stamp(key)
                    yield Record(f"{source.root.url}/{key}", stamp, partial(prepared, source, key))
        else:
            what = "neither a dataset or folder nor a .hea, .npy or .npz file" if Path(url).exists() else "is not there"
            raise ConfigError(f"--data {url}: {what}")


def opened(url: str) -> list[Source]:
    try:
        return open_sources(url)
    except DataError as error:
        told = str(error).replace("name it with --source", "name it with `data_tools shard --source`, and give the dataset")
        raise ConfigError(told) from None


def arrays(args: argparse.Namespace, path: Path, wanted: Input) -> Iterator[Record]:
    if args.fs is None:
        raise ConfigError(f"--data {path}: say with --fs how many samples a second it holds")
    leads = [LEADS[i] for i in leads_in_order(args.leads or "12")]

    def load_one(label: str, member: str | None, index: int | None) -> Loaded:
        try:
            if whole is None:
                values = load_npz(path, [str(member)])[str(member)]
            elif index is None:
                values = whole
            else:
                values = whole[index]
        except (ArrayError, OSError) as error:
            raise SignalError(str(error)) from None
        if not args.leads and values.ndim == 2 and len(values) != len(leads):
            raise SignalError(f"has {len(values)} rows, not {len(leads)}: name its rows with --leads")
        found = crops(values, args.fs, leads, args.unit, wanted)
        return Loaded("array", label, None, *found)

    try:
        state = path.stat()
        stamp = f"{state.st_size},{state.st_mtime_ns}".encode()
        whole = None if zipfile.is_zipfile(path) else open_npy(path)
        members: list[str | None] = [None] if whole is not None else [*npz_names(path)]
    except (ArrayError, OSError) as error:
        raise ConfigError(f"--data {path}: {error}") from None
    if whole is not None and whole.ndim not in (2, 3):
        raise ConfigError(
            f"--data {path}: has the shape {list(whole.shape)}: [leads, samples] or [ECGs, leads, samples] is needed"
        )
    if not (members if whole is None else whole.size):
        raise ConfigError(f"--data {path}: holds no ECG")
    indices = range(len(whole)) if whole is not None and whole.ndim == 3 else [None]
    for member in members:
        for index in indices:
            name = str(path) + (f"[{member or index}]" if member or index is not None else "")
            label = member or path.stem + ("" if index is None else f"[{index}]")
            yield Record(name, stamp, partial(load_one, label, member, index), label)


def digest_of(records: Sequence[Record]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps([record.name, record.stamp.decode()]).encode())
    return digest.hexdigest()


def record_stream(args: argparse.Namespace, wanted: Input, records: Sequence[Record]) -> RecordStream:
    called = Counter(record.label for record in records)

    def read(number: int) -> Loaded | None:
        name, _, call, label = records[number]
        try:
            found = call()
        except SignalError as error:
            found = ReadError(str(error))
        if isinstance(found, Prepared):
            found = looked_at(Loaded(*found), wanted)
        if isinstance(found, Loaded):
            return found._replace(record=name) if label and called[label] > 1 else found
        leave_out(args, name, found)
        return None

    return RecordStream(len(records), read, args.batch, args.workers)


def looked_at(found: Loaded, wanted: Input) -> Loaded | ReadError:
    """Without the crops in which all that the model looks at is zero, as it is where nothing was measured."""
    there = np.flatnonzero(found.uv_BLT[:, list(wanted.seen)].any(axis=(1, 2))).tolist()
    if len(there) == len(found.halves):
        return found
    if not len(there):
        return ReadError(nothing_of(wanted))
    starts = [found.start_s[i] for i in there]
    return found._replace(uv_BLT=found.uv_BLT[there], start_s=starts, halves=[found.halves[i] for i in there])


def score(args: argparse.Namespace, model: TrainedModel, wanted: Input) -> None:
    dataset = Dataset.open(args.data[0])
    args.per = "half"
    rows = roles(dataset)
    stream = dataset_stream(args, dataset, wanted, rows)
    with tqdm(total=len(stream.rows), unit=" crops", desc="embed", disable=None) as bar:
        found = [table for _, table in tables(stream, encoder(model, wanted), range(stream.parts), "half", bar.update)]
    scores = probe(dataset, pa.concat_tables(found)) | {"precision": args.precision}
    print(report(scores))
    if args.json:
        with writing(args.json, "--json"):
            write_whole(args.json, json.dumps(scores, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
