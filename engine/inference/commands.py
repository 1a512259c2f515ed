"""The commands embed, predict and probe, once their arguments are read."""

import argparse
import errno
import json
import os
from collections.abc import Callable

import torch

from omnilead.data_tools.cli import keep_freed_memory, show, tell
from omnilead.data_tools.dataset import DataError
from omnilead.engine.common import (
    ConfigError,
    OutputError,
    cores_per_rank,
    environment,
    write_result,
)
from omnilead.engine.evaluation.probe import labels_to_probe, probe, probe_rows, report
from omnilead.engine.evaluation.results import nullable
from omnilead.engine.inference.inputs import dataset_of, dataset_source, open_data
from omnilead.engine.inference.outputs import MISSING, RESUMABLE, Output, ParquetParts, make, whole
from omnilead.engine.inference.trained_model import TrainedModel, load
from omnilead.engine.model.input import Input
from omnilead.engine.model.kernels import chosen_device

SHOWN = 8  # numbers in a message
PERMANENT = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
)  # the same command would fail again


def command(
    name: str,
    args: argparse.Namespace,
    work: Callable[[argparse.Namespace], int],
    flag: str = "--out",
) -> int:
    """Runs a command after its arguments are read; returns the exit code. `flag`: the option that
    args.out comes from."""
    args.began, resumable = False, RESUMABLE if args.out else ""
    try:
        return work(args)
    except (ConfigError, DataError) as error:
        message, code = str(error), 2
        args.began |= isinstance(error, DataError)  # perhaps of this rank alone
    except OutputError as error:
        message, code = str(error), 1
    except OSError as error:
        ours = args.out and str(error.filename or args.out).startswith(str(args.out))
        place = f"{flag} {args.out}" if ours else error.filename or f"--data {args.data}"
        code = 2 if error.errno in PERMANENT else 1
        message = f"{place}: {error.strerror or error}{resumable * (code == 1)}"
    except KeyboardInterrupt:
        message, code = f"interrupted{resumable}", 130
    rank = os.environ.get("RANK", "0")
    if rank == "0" or args.began or code == 1:  # other errors are the same on every rank
        of_rank = f"rank {rank}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        tell(f"{name}: {of_rank}{' '.join(message.split())}")
    return code


def run(args: argparse.Namespace, output_of: Callable[[TrainedModel], Output]) -> int:
    (rank, world, _), cores = environment(), cores_per_rank()
    args.device = str(chosen_device(args.device))
    on_gpu = args.device.startswith("cuda")
    args.batch = args.batch or (256 if on_gpu else 16)
    args.workers = args.workers or (cores if on_gpu else max(1, cores // 4))
    model, model_input = prepare_model(args)
    output = output_of(model)
    if args.out is None:
        if world > 1:
            raise ConfigError(
                f"WORLD_SIZE={world}: probes are computed by one process: start it without "
                "deepspeed or torchrun"
            )
        return score(args, output, model_input)
    job = {
        "model": model.digest,
        "leads": args.leads,
        "per": args.per,
        "batch": args.batch,
        "precision": args.precision,
    }
    job |= {"device": torch.device(args.device).type, "on_corrupt": args.on_corrupt}
    identity, opened = open_data(args, model_input)
    with ParquetParts(args.out, job | output.job | identity, rank, world) as parts:
        source = None if parts.finished else opened()
        args.began = True
        left = make(source, output, model_input, args.per, parts) if source else []
    if left and world == 1:
        raise OutputError(f"{args.out}: part {left[0]} cannot be read back{RESUMABLE}")
    if left:
        numbers = ", ".join(map(str, left[:SHOWN])) + ", ..." * (len(left) > SHOWN)
        return show(
            f"rank {rank} of {world}: done; others compute parts {numbers} (none runs? start the "
            "same command again)\n"
        )
    if parts.lacking and (why := model.unprepared()):
        what = f"{parts.lacking:,} of {parts.rows:,} rows lack leads (column {MISSING})"
        tell(f"note: {args.out}: {what}: {why}")
    return (
        0
        if parts.rows is None
        else show(f"{args.out}: {parts.rows:,} {output.what}, computed in {args.precision}\n")
    )


def score(args: argparse.Namespace, output: Output, model_input: Input) -> int:
    if (dataset := dataset_of(args)) is None:
        raise ConfigError(
            f"--data {args.data[0]}: a probe needs a dataset with splits: make one with `omnilead "
            "shard`"
        )
    labels = labels_to_probe(dataset, args.task, args.labels)
    source = dataset_source(args, dataset, model_input, probe_rows(dataset, labels))
    halves = whole(source, output, model_input, args.per)
    scores = probe(dataset, halves, labels) | {"precision": args.precision}
    if args.json:
        write_result(args.json, json.dumps(nullable(scores), indent=1) + "\n", "--json")
    return show(report(scores) + "\n")


def prepare_model(args: argparse.Namespace) -> tuple[TrainedModel, Input]:
    """The model on its device, and its input."""
    device = chosen_device(args.device)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_per_rank())
    keep_freed_memory()
    model = load(args.model, args.code)
    if args.precision == "auto":
        args.precision = (
            "bf16" if device.type == "cuda" and model.history.get("precision") == "bf16" else "fp32"
        )
    model.to(device, torch.bfloat16 if args.precision == "bf16" else torch.float32)
    return model, model.input.limited_to(args.leads) if args.leads else model.input
