"""Embeddings: `engine.embed` from each kind of input to its parquet, beside the encoder alone on a batch that is there.

    python -m benchmarks.run embed [--device cpu|cuda] [--model small] [--batch 16]

For each input a process of its own loads a model of random weights and takes turns: the encoder alone on as many crops as the
input has, then the command, which reads, prepares and encodes them and writes the file. Only loading the model is left out.
`share`: the speed of the command in per cent of the encoder's, per CPU-second on a CPU, per second on a GPU.
"""

import argparse
import contextlib
import io
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.e2e import MODEL
from benchmarks.measure import CaseError, Progress, call_fresh, cpu_s, spread
from benchmarks.run import only
from data_tools import synth
from data_tools.build import ShardOptions, shard
from data_tools.dataset import Dataset
from data_tools.sources import open_sources

BATCH = {"cpu": 16, "cuda": 256}  # the command's own
INPUTS = {
    "tar": ("dataset",),
    "WFDB": ("archive",),
    "arrays, 500 Hz": ("500.npy", "--fs", "500"),
    "arrays, 250 Hz": ("250.npy", "--fs", "250"),
}


@dataclass(frozen=True)
class Setup:
    model: str  # a folder
    data: tuple[str, ...]  # what follows --data
    out: str
    crops: int
    device: str = "cpu"
    batch: int = 16
    turns: int = 3
    threads: int = 2


def measure(work: Path, options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    progress(f"an archive of {options.records} records, and the same as a dataset and as arrays")
    dataset, name = prepare(work, options.records), options.model or MODEL[options.device]
    untrained(work / "model", name)
    left_out, results = dict[str, str](), dict[str, Any]()
    for kind, (place, *more) in only(INPUTS, options.only).items():
        progress(f"{kind}: the encoder and the command, {options.repeats} turns")
        batch = options.batch or BATCH[options.device]
        mine = Setup(
            *(str(work / "model"), (str(work / place), *more), str(work / "out.parquet"), len(dataset)),
            *(options.device, batch, options.repeats, options.threads),
        )
        try:
            results[f"{kind}: {name}, {batch} crops"] = told(call_fresh(turns, mine), mine)
        except CaseError as error:
            left_out[kind] = str(error)
            progress(f"{kind}: left out: {error}")
    print("\n".join(lines(results)))
    given = {"archive": "synthetic", "crops": len(dataset), "dataset": dataset.fingerprint}
    given |= {"device": options.device, "model": name}
    return {"input": given, "results": results, "left_out": left_out}


def prepare(work: Path, records: int) -> Dataset:
    """archive/, dataset/ and its crops as arrays of millivolts."""
    import numpy as np

    synth.synthesise(work / "archive", patients=records // 2, sessions=1, seed=13, progress=False)
    shard(open_sources(str(work / "archive")), ShardOptions(str(work / "dataset"), plan="all", quiet=True))
    dataset = Dataset.open(str(work / "dataset"))
    mv_BLT = np.stack([dataset.read(row) for row in range(len(dataset))]).astype(np.float32) / 1000
    np.save(work / "500.npy", mv_BLT)
    np.save(work / "250.npy", mv_BLT[..., ::2])
    return dataset


def untrained(folder: Path, model: str) -> None:
    """As engine.training.export would write it before the first step."""
    import torch

    from benchmarks.step import config_file
    from engine.common import LEADS
    from engine.config import load
    from engine.model.folder import write
    from engine.model.pretrainer import Pretrainer

    config = load(config_file(model))
    seeded = torch.Generator().manual_seed(0)
    weights = Pretrainer(config.model, config.objective, generator=seeded).state_dict()
    signal = {"fs_hz": 500, "leads": LEADS, "segment_s": 5.0, "scale": "millivolt"}
    write(folder, weights, {"model": asdict(config.model)}, signal)


def turns(setup: Setup) -> dict[str, list[dict[str, float]]]:
    """In a process of its own: seconds and CPU-seconds of the encoder's and of the command's turns."""
    if setup.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from engine import embed

    torch.set_num_threads(setup.threads)
    words = ["--model", setup.model, "--data", *setup.data, "--out", setup.out, "--device", setup.device]
    args = embed.parse([*words, "--batch", str(setup.batch)])
    prepared = embed.prepare_model(args)
    model, device, out = prepared[0], torch.device(setup.device), Path(setup.out)
    x_RLT = torch.randn(2 * setup.batch, 12, 2500, device=device)
    embed.prepare_model = lambda args: prepared

    @torch.inference_mode()
    def alone() -> None:
        for at in range(0, setup.crops, setup.batch):
            model.pooled(x_RLT[: 2 * (setup.crops - at)]).cpu()

    def command() -> None:
        out.unlink(missing_ok=True)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            embed.run(args)

    rows: dict[str, list[dict[str, float]]] = {"alone": [], "command": []}
    for turn in range(setup.turns + 1):
        for name, call in (("alone", alone), ("command", command)):
            wall, cpu = time.perf_counter(), cpu_s()
            call()
            if turn:  # the first is a warm-up
                rows[name].append({"wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu})
    return rows


def told(rows: dict[str, list[dict[str, float]]], setup: Setup) -> dict[str, Any]:
    """The turns as figures; shares are of turns side by side."""
    clock = "cpu_s" if setup.device == "cpu" else "wall_s"

    def rate(what: str, clock: str) -> dict[str, float]:
        return spread(setup.crops / row[clock] for row in rows[what])

    pairs = zip(rows["alone"], rows["command"], strict=True)
    return {
        "per_s": rate("command", "wall_s"),
        "per_cpu_s": rate("command", "cpu_s"),
        "bare_per_s": rate("alone", "wall_s"),
        "bare_per_cpu_s": rate("alone", "cpu_s"),
        "share_pct": spread(100 * alone[clock] / command[clock] for alone, command in pairs),
        "repeats": setup.turns,
    }


def lines(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    width = max(map(len, results), default=8)
    yield f"{'':<{width}}  crops/s  per CPU-s  encoder/s  per CPU-s  share %"
    for name, r in results.items():
        figures = [r[key]["median"] for key in ("per_s", "per_cpu_s", "bare_per_s", "bare_per_cpu_s", "share_pct")]
        yield f"{name:<{width}}  {{:7.4g}}  {{:9.4g}}  {{:9.4g}}  {{:9.4g}}  {{:7.1f}}".format(*figures)
