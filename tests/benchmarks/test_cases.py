"""Benchmarks of whole commands, on small data: the loop, ranks, embeddings, the start, loaders."""

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import e2e, embed, ingest, loader, measure, run, scaling, start
from benchmarks.measure import CaseError, call_fresh
from omnilead.data_tools.dataset import Dataset
from omnilead.engine.data.order import DatasetRows, Order


def loop_run(dataset: Dataset, tiny: str, tmp_path: Path, **changes: Any) -> e2e.LoopRun:
    how: dict[str, Any] = {"model": tiny, "batch": 4, "steps": 2, "threads": 1} | changes
    return e2e.LoopRun(dataset.root.url, str(tmp_path / "run"), **how)


def test_the_loop_is_measured_against_the_bare_step(
    dataset: Dataset, tiny: str, tmp_path: Path
) -> None:
    """From an object store, if a server for one is installed."""
    far = all(importlib.util.find_spec(name) for name in ("moto", "s3fs"))
    mine = loop_run(dataset, tiny, tmp_path, settings=e2e.SOURCES["s3" if far else "tar"])
    measured = call_fresh(e2e.on_s3 if far else e2e.compare, mine)
    assert measured["backend"] == "torch" and measured["repeats"] == 3
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[-1]["step"] == 2 * 2 * (
        1 + 3
    )  # held and loaded, two steps a turn, a warm-up and three turns
    assert (
        tmp_path / "run" / "checkpoints" / "latest"
    ).read_text() == "step-16"  # the one that was timed
    assert not far or list((tmp_path / "cache").rglob("*.tar"))
    assert (
        0 < measured["stall_pct"]["median"] < 100
        and measured["per_s"]["median"] > 0
        and measured["checkpoint_s"] > 0
    )


def test_overhead_is_computed_from_adjacent_turns(
    dataset: Dataset, tiny: str, tmp_path: Path
) -> None:
    rows = {
        kind: [
            {"wall_s": 2 * s * drift, "cpu_s": s * drift, "waited_s": 0.04 * s * drift}
            for drift in (1, 5, 2)
        ]
        for kind, s in (("bare", 1.0), ("held", 1.05), ("loaded", 1.1))
    }
    measured = {"rows": rows, "checkpoint_s": 18.0, "backend": "torch"}
    result = e2e.figures(measured, loop_run(dataset, tiny, tmp_path, batch=32, steps=4))
    assert result["overhead_pct"] == pytest.approx(
        {"median": 10, "low": 10, "high": 10}
    )  # whatever the machine's drift
    assert result["loader_pct"]["median"] == pytest.approx(100 * (1.1 / 1.05 - 1))
    assert result["stall_pct"]["median"] == pytest.approx(2.0)
    assert result["per_cpu_s"]["high"] == pytest.approx(128 / 1.1) and result["bare_per_s"][
        "high"
    ] == pytest.approx(64)


def test_a_loop_that_cannot_start_reports_the_reason(
    dataset: Dataset, tiny: str, tmp_path: Path
) -> None:
    with pytest.raises(CaseError, match="position_groups"):
        call_fresh(
            e2e.loop_turns, loop_run(dataset, tiny, tmp_path, settings=("model.position_groups=7",))
        )


def test_two_ranks(dataset: Dataset, tiny: str, tmp_path: Path) -> None:
    measured = scaling.ranks(loop_run(dataset, tiny, tmp_path, steps=1), 2)
    assert measured["batch"] == 4 and measured["per_cpu_s"]["low"] > 0
    lines = [
        json.loads(line) for line in (tmp_path / "run-2" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[-1]["crops_seen"] == 8 * (lines[-1]["step"] + 1)  # the first batch was put aside


def test_a_dataset_of_zeros_and_its_shuffle_quality(tmp_path: Path) -> None:
    dataset = scaling.zeros(tmp_path / "zeros", 30_000)
    assert len(dataset) == 30_000 and not dataset.read(29_999).any()
    assert scaling.first_batch(dataset.root.url) == 1.0
    rows = DatasetRows.of(dataset, pretrain=True)
    whole, blocks, fair = (
        scaling.shuffle_quality(Order((rows,), 512, block_shards=n)) for n in (0, 1, 16)
    )
    assert abs(whole["correlation"]) < 0.02 and whole["row_span_95"] == pytest.approx(
        0.95, abs=0.01
    )
    assert (
        whole["shards_per_batch"] == pytest.approx(30, abs=0.5) and blocks["shards_per_batch"] < 3
    )
    assert (
        fair["shards_per_batch"] == pytest.approx(15.5, abs=1.5) and abs(fair["correlation"]) < 0.3
    )


def test_embedding_is_measured_against_the_encoder_alone(tiny: str, tmp_path: Path) -> None:
    words = ["embed", "--model", tiny, "--records", "10", "--only", "250", "--batch", "4"]
    part = run.measured(tmp_path, run.parse(words))
    assert not part["left_out"] and list(part["results"]) == [f"arrays, 250 Hz: {tiny}, 4 crops"]
    assert len(pq.read_table(tmp_path / "out.parquet")) == part["input"]["crops"] > 0
    (result,) = part["results"].values()
    assert result["share_pct"]["median"] > 0 and result["repeats"] == 3
    embed.untrained(tmp_path / "again", tiny)  # the same weights each time
    first, second = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "again")
    )
    assert first == second


COMMAND = """
import pathlib, sys, time
run = next(word for word in sys.argv if word.startswith("run=")).removeprefix("run=")
sys.stderr.write("w" * 200_000)
pathlib.Path(run).mkdir()
(pathlib.Path(run) / "metrics.jsonl").write_text("a line")
until = time.process_time() + 0.2
while time.process_time() < until: pass
sys.exit("steps=7" in " ".join(sys.argv))
"""


def test_the_time_to_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, "-S", "-c", COMMAND)
    first, first_cpu = start.start(command, tmp_path / "a", "dataset", 1, True)
    whole, whole_cpu = start.start(command, tmp_path / "a", "dataset", 1, False)
    assert first > 0 and whole_cpu >= 0.2 and whole >= 0.2 and first_cpu < whole_cpu
    with pytest.raises(CaseError, match="exited with 1: w"):
        start.start(command, tmp_path / "b", "dataset", 7, True)
    monkeypatch.setitem(start.COMMANDS, start.PYTHON, command)
    result = start.repeated(start.PYTHON, str(tmp_path), 1, 3)
    assert (
        result["repeats"] == 3
        and result["seconds"]["low"] >= 0.2
        and not (tmp_path / "run").exists()
    )


def test_loader_throughput_counts_whole_batches(dataset: Dataset) -> None:
    """In later epochs, and in the first epoch only."""
    given = (Path(dataset.root.url), "torch", "RLM", 16, 1, 0.05)
    samples: list[dict[str, float]] = []
    assert measure.timed(loader.ours, given, 1, samples.append) is None
    (sample,) = samples
    assert sample["units"] > 0 and sample["units"] % 16 == 0
    stream = loader.ours(*given, "cpu", True)
    assert next(stream) == 0.0 and next(stream) <= (len(dataset) // 16 - loader.FILLED) * 16
    with pytest.raises(StopIteration):
        stream.send(True)


def test_every_case_of_an_ingest_runs(tmp_path: Path) -> None:
    prepared = ingest.prepare(tmp_path, run.parse(["ingest", "--records", "100"]))
    units = {name: function(*arguments) for name, (function, arguments) in prepared.cases.items()}
    assert (
        all(number > 0 for number in units.values())
        and units["read: omnilead"] == prepared.input["records"]
    )


def test_other_loaders_end_with_the_same_crops(dataset: Dataset, tmp_path: Path) -> None:
    for row in range(8):
        for half in range(2):
            mv = dataset.read(row)[:, 2500 * half : 2500 * (half + 1)] / 1000.0
            ingest.write_segment(tmp_path / f"{row:06d}_{half}.mat", mv, row)
    batch = next(loader.fairseq_like(tmp_path, "RLM", 4, 0))["source"]
    assert batch.shape == (8, 12, 2500) and 0.2 < (batch == 0).all(-1).float().mean() < 0.8
    noisy = next(loader.fairseq_like(tmp_path, "physio4+RLM", 4, 0))["source"]
    assert noisy.dtype == batch.dtype and np.isfinite(noisy).all()
    halves = loader._halves_with_rlm(
        loader._decode({"ecg": dataset.read(0).tobytes()})[None]
    ).numpy()
    mv = (dataset.read(0) / np.float32(1000)).reshape(12, 2, 2500).swapaxes(0, 1)
    assert all(
        (lead == 0).all() or np.allclose(lead, real)
        for lead, real in zip(halves[1], mv[1], strict=True)
    )


def test_a_loader_without_a_batch_is_an_error() -> None:
    with pytest.raises(CaseError, match="too few crops for a batch of 4"):
        next(loader.epochs([1, 2, 3], 4, 0))
    stream = loader.epochs([1, 2, 3], 2, 0)
    assert [len(next(stream)) for _ in range(3)] == [2, 2, 2]
