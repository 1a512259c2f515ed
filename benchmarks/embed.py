"""Embeddings: `downstream.embed` from each kind of input to a parquet file, against the encoder alone
on one batch.

For each input, a fresh process loads a model with random weights and takes turns: the encoder alone
on as many crops as the input has, then the command, which reads, prepares and encodes them and
writes the file. Only loading the model is left out. `share_pct`: the speed of the command as a
percentage of the encoder's, per CPU-second on a CPU, per second on a GPU.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.e2e import DEFAULT_MODEL
from benchmarks.measure import (
    Cases,
    Result,
    describe_input,
    make_dataset,
    median_and_range,
    percentages,
    rates,
    time_in_turns,
)

EMBED_BATCH = {"cpu": 16, "cuda": 256}  # the command's defaults
INPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tar": ("dataset", {}),
    "WFDB": ("archive", {}),
    "arrays, 500 Hz": ("500.npy", {"fs_hz": 500}),
    "arrays, 250 Hz": ("250.npy", {"fs_hz": 250}),
}


def prepare_input_and_cases(work: Path, options: argparse.Namespace) -> tuple[Result, Cases]:
    """Makes the same crops as an archive, as a dataset and as arrays of millivolts."""
    import numpy as np

    dataset, device = make_dataset(work, options.records or 600, keep_archive=True), options.device
    mv_BLT = np.stack([dataset.read(row) for row in range(len(dataset))]).astype(np.float32) / 1000
    np.save(work / "500.npy", mv_BLT)
    np.save(work / "250.npy", mv_BLT[..., ::2])
    name, batch = options.model or DEFAULT_MODEL[device], options.batch or EMBED_BATCH[device]
    write_untrained(work / "model", name)
    cases: Cases = {}
    for kind, (place, input_options) in INPUTS.items():
        embed_options = {
            "data": str(work / place),
            "device": device,
            "batch": batch,
        } | input_options
        arguments = (work, embed_options, len(dataset), options.repeats)
        cases[f"{kind}: {name}, {batch} crops"] = (compare_with_encoder, arguments)
    return describe_input(dataset, device=device, model=name), cases


def write_untrained(folder: Path, model: str) -> None:
    """Writes a model with random weights as engine.training.export would before the first step."""
    import torch

    from benchmarks.step import config_of
    from omnilead.data_tools.ecg.constants import LEADS
    from omnilead.engine.model.folder import write_model
    from omnilead.engine.model.pretrainer import Pretrainer

    config = config_of(model)
    seeded = torch.Generator().manual_seed(0)
    weights = Pretrainer(config.model, config.objective, generator=seeded).state_dict()
    signal = {"fs_hz": 500, "leads": LEADS, "segment_s": 5.0, "scale": "millivolt"}
    write_model(folder, weights, {"model": asdict(config.model)}, signal)


def compare_with_encoder(work: Path, options: Any, crops: int, turns: int) -> Result:
    """Runs the encoder and the command in turns."""
    import torch

    from omnilead.downstream.inference import commands

    device, batch, out = options["device"], options["batch"], work / "out.parquet"
    torch.set_num_threads(2)
    prepared = commands.load_model_and_precision(work / "model", device)
    commands.load_model_and_precision = lambda *_: prepared  # use it instead of the command's own
    x_RLT = torch.randn(2 * batch, 12, 2500, device=device)

    @torch.inference_mode()
    def bare() -> None:
        for start in range(0, crops, batch):
            prepared[0].pool_tokens(x_RLT[: 2 * (crops - start)]).cpu()

    def command() -> None:
        out.unlink(missing_ok=True)
        commands.embed(work / "model", out=out, **options)

    rows = time_in_turns({"alone": bare, "command": command}, turns, crops)
    return {
        **rates(rows["command"]),
        **rates(rows["alone"], "bare_"),
        "share_pct": median_and_range(percentages(rows["alone"], rows["command"], device)),
        "repeats": turns,
    }
