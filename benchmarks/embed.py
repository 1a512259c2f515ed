"""Compare the speed of the command `omnilead embed` with that of the encoder alone. The command reads an input
of some kind and writes embeddings to a parquet file; the encoder runs on a batch in memory.

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

EMBED_BATCH = {"cpu": 16, "cuda": 256}  # crops in a batch, as by default in `omnilead embed`
# kind of input -> (its file or folder in the working folder, further options of `omnilead embed`)
INPUT_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tar": ("dataset", {}),
    "WFDB": ("archive", {}),
    "arrays, 500 Hz": ("500.npy", {"fs_hz": 500}),
    "arrays, 250 Hz": ("250.npy", {"fs_hz": 250}),
}


def prepare_input_and_cases(work: Path, options: argparse.Namespace) -> tuple[Result, Cases]:
    """Write the same crops as an archive, as a dataset and as arrays in millivolts. Return (facts about the
    input, a case for each kind of input)."""
    import numpy as np

    dataset, device = make_dataset(work, options.records or 600, keep_archive=True), options.device
    mv_BLT = np.stack([dataset.read(row) for row in range(len(dataset))]).astype(np.float32) / 1000
    np.save(work / "500.npy", mv_BLT)
    np.save(work / "250.npy", mv_BLT[..., ::2])
    name, batch = options.model or DEFAULT_MODEL[device], options.batch or EMBED_BATCH[device]
    write_untrained_model(work / "model", name)
    cases: Cases = {}
    for kind, (place, input_options) in INPUT_KINDS.items():
        embed_options = {
            "data": str(work / place),
            "device": device,
            "batch": batch,
        } | input_options
        arguments = (work, embed_options, len(dataset), options.repeats)
        cases[f"{kind}: {name}, {batch} crops"] = (compare_with_encoder, arguments)
    return describe_input(dataset, device=device, model=name), cases


def write_untrained_model(folder: Path, model: str) -> None:
    """Write a model folder with random weights, as engine.training.export would write it before the first
    training step."""
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
    """Run the encoder alone and the command in turns, and return their rates and the share of the encoder's
    speed that the command reaches."""
    import torch

    from omnilead.downstream.inference import commands

    device, batch, out = options["device"], options["batch"], work / "out.parquet"
    torch.set_num_threads(2)
    prepared = commands.load_model_and_precision(work / "model", device)
    # the command then uses this loaded model, so that loading is not timed
    commands.load_model_and_precision = lambda *_: prepared
    x_RLT = torch.randn(2 * batch, 12, 2500, device=device)

    @torch.inference_mode()
    def run_encoder_alone() -> None:
        for start in range(0, crops, batch):
            prepared[0].pool_tokens(x_RLT[: 2 * (crops - start)]).cpu()

    def run_command() -> None:
        out.unlink(missing_ok=True)
        commands.embed(work / "model", out=out, **options)

    rows = time_in_turns({"alone": run_encoder_alone, "command": run_command}, turns, crops)
    return {
        **rates(rows["command"]),
        **rates(rows["alone"], "bare_"),
        "share_pct": median_and_range(percentages(rows["alone"], rows["command"], device)),
        "repeats": turns,
    }
