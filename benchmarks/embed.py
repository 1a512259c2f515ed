"""Embeddings: `engine.embed` from each kind of input to a parquet file, against the encoder alone
on one batch.

For each input, a fresh process loads a model with random weights and takes turns: the encoder alone
on as many crops as the input has, then the command, which reads, prepares and encodes them and
writes the file. Only loading the model is left out. `share_pct`: the speed of the command as a
percentage of the encoder's, per CPU-second on a CPU, per second on a GPU.
"""

import argparse
import contextlib
import io
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.e2e import MODEL
from benchmarks.measure import Benchmark, describe, make_dataset, rates, spread, take_turns

BATCH = {"cpu": 16, "cuda": 256}  # the command's defaults
INPUTS = {
    "tar": ("dataset",),
    "WFDB": ("archive",),
    "arrays, 500 Hz": ("500.npy", "--fs", "500"),
    "arrays, 250 Hz": ("250.npy", "--fs", "250"),
}


def prepare(work: Path, options: argparse.Namespace) -> Benchmark:
    """The same crops as an archive, as a dataset and as arrays of millivolts."""
    import numpy as np

    dataset, device = make_dataset(work, options.records or 600, keep_archive=True), options.device
    mv_BLT = np.stack([dataset.read(row) for row in range(len(dataset))]).astype(np.float32) / 1000
    np.save(work / "500.npy", mv_BLT)
    np.save(work / "250.npy", mv_BLT[..., ::2])
    name, batch = options.model or MODEL[device], options.batch or BATCH[device]
    untrained(work / "model", name)
    cases = {}
    for kind, (place, *more) in INPUTS.items():
        words = [
            "--model",
            str(work / "model"),
            "--data",
            str(work / place),
            *more,
            "--out",
            str(work / "out.parquet"),
        ]
        words += ["--device", device, "--batch", str(batch)]
        cases[f"{kind}: {name}, {batch} crops"] = (compare, (words, len(dataset), options.repeats))
    return Benchmark(describe(dataset, device=device, model=name), cases)


def untrained(folder: Path, model: str) -> None:
    """Write a model with random weights as engine.training.export would before the first step."""
    import torch

    from benchmarks.step import config_file
    from omnilead.engine.common import LEADS
    from omnilead.engine.config import load
    from omnilead.engine.model.folder import write
    from omnilead.engine.model.pretrainer import Pretrainer

    config = load(config_file(model))
    seeded = torch.Generator().manual_seed(0)
    weights = Pretrainer(config.model, config.objective, generator=seeded).state_dict()
    signal = {"fs_hz": 500, "leads": LEADS, "segment_s": 5.0, "scale": "millivolt"}
    write(folder, weights, {"model": asdict(config.model)}, signal)


def compare(words: list[str], crops: int, turns: int, threads: int = 2) -> dict[str, Any]:
    """Run the encoder and the command in turns."""
    import torch

    from omnilead.engine import embed
    from omnilead.engine.inference import commands as embedding

    args = embed.parse(words)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(threads)
    prepared = embedding.prepare_model(args.model, args.device, args.precision)
    model, device, out = prepared[0], torch.device(args.device), Path(args.out)
    x_RLT = torch.randn(2 * args.batch, 12, 2500, device=device)
    embedding.prepare_model = lambda *_: prepared

    @torch.inference_mode()
    def alone() -> None:
        for at in range(0, crops, args.batch):
            model.pooled(x_RLT[: 2 * (crops - at)]).cpu()

    def command() -> None:
        out.unlink(missing_ok=True)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            embedding.embed(**embed.options_of(args))

    return figures(take_turns({"alone": alone, "command": command}, turns), crops, args.device)


def figures(rows: dict[str, list[dict[str, float]]], crops: int, device: str) -> dict[str, Any]:
    """Rates, and shares computed from adjacent turns."""
    clock = "cpu_s" if device == "cpu" else "wall_s"
    pairs = zip(rows["alone"], rows["command"], strict=True)
    return {
        **rates(rows["command"], crops),
        **rates(rows["alone"], crops, "bare_"),
        "share_pct": spread(100 * alone[clock] / command[clock] for alone, command in pairs),
        "repeats": len(rows["command"]),
    }
