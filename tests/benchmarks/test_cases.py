"""Benchmarks of whole commands, on small data: the loop, ranks, embeddings, the start, loaders."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import e2e, huge, loader, measure, run, start
from benchmarks.measure import CaseError

POSITIVE = ("per_s", "per_cpu_s", "bare_per_s", "stall_pct", "share_pct")
CASES = (
    "ingest --records 100",
    "embed --records 10 --batch 4 --model {model}",
    "e2e --records 100 --batch 4 --steps 2 --model {model}",
    "scaling --huge 3000 --batch 4 --steps 1 --model {model}",
)


@pytest.mark.parametrize("words", CASES, ids=lambda words: words.split()[0])
def test_what_each_case_does(words, tiny, tmp_path, monkeypatch, golden):
    """Units of work, or the figures that it measures itself; the last steps of the runs, and what is
    left."""
    monkeypatch.setattr(measure, "LEAST_REPEATS", 1)
    options = run.parse([*words.format(model=tiny).split(), "--repeats", "1"])
    facts, cases = importlib.import_module(f"benchmarks.{options.benchmark}").prepare(
        tmp_path, options
    )
    said = [", ".join(facts)]
    for name, result, reason in measure.run_cases(cases, 1):
        done = result.get("units") or [*result, result.get("backend")]
        said.append(f"{name}: {reason or done}")
        assert all(value["low"] > 0 for key, value in result.items() if key in POSITIVE)
    for path in sorted(tmp_path.glob("run*/metrics.jsonl")):
        last = json.loads(path.read_text().splitlines()[-1])
        saved = (path.parent / "checkpoints" / "latest").read_text()
        said.append(
            f"{path.parent.name}: {last['step']}, {last['crops_seen']} crops, saved {saved}"
        )
    said += sorted(path.name for path in tmp_path.iterdir())
    golden(f"{options.benchmark}.txt", "\n".join([*said, ""]).replace(tiny, "MODEL"))


def test_overhead_is_computed_from_adjacent_turns(golden):
    """Whatever the machine's drift; in CPU-seconds, on a GPU in seconds."""
    found = {}
    for device in ("cpu", "cuda"):
        rows = {}
        for side, cpu_s, wall_s in (("bare", 1.0, 2.0), ("held", 1.05, 2.2), ("loaded", 1.1, 2.4)):
            rows[side] = []
            for drift in (1, 5, 2):
                row = {"units": 128, "wall_s": drift * wall_s, "cpu_s": drift * cpu_s}
                rows[side].append(row | {"waited_s": 0.02 * drift * wall_s})
        found[device] = e2e.figures({"rows": rows, "backend": "torch"}, device)
    rounded = json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 6))
    golden("overhead.json", json.dumps(rounded, indent=1) + "\n")


def test_a_dataset_of_zeros(tmp_path):
    dataset = huge.make(tmp_path / "zeros", 3000)
    assert len(dataset) == 3000 and not dataset.read(2999).any()
    roles = dataset.meta["roles"]
    assert roles["pretrain"] and roles["dx"]["test"] and roles["id"]["probe"]


COMMAND = """
import pathlib, sys, time
run = pathlib.Path(next(word for word in sys.argv if word.startswith("run=")).removeprefix("run="))
sys.stderr.write("w" * 200_000)
run.mkdir()
(run / "metrics.jsonl").write_text("a line")
while not run.with_name("seen").exists():
    time.sleep(0.01)
run.with_name("seen").unlink()
"""


def test_the_time_to_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "tree_s", lambda pid: (tmp_path / "seen").touch() or 1.5)
    command = (sys.executable, "-S", "-c")
    result = start.repeated((*command, COMMAND), tmp_path, 3)
    assert result["repeats"] == 3 and result["seconds"]["low"] > 0
    assert result["cpu_seconds"]["median"] == 1.5 and not (tmp_path / "run").exists()
    with pytest.raises(CaseError, match=r"exited with 1: .*frog"):
        start.start((*command, "import sys; sys.exit('frog')"), tmp_path)


def test_loader_throughput_counts_whole_batches(dataset):
    given = (Path(dataset.root.url), "RLM", "torch", 16, 1, 0.05, "cpu")
    measure.timed(loader.ours, given, 1, (sent := []).append)
    (sample,) = sent
    assert sample["units"] > 0 and sample["units"] % 16 == 0


def test_other_loaders_end_with_the_same_crops(dataset, tmp_path):
    for row in range(8):
        loader.write_halves(dataset, row, tmp_path)
    batch = next(loader.fairseq_like(tmp_path, "RLM", 4))["source"]
    assert batch.shape == (8, 12, 2500) and 0.2 < (batch == 0).all(-1).float().mean() < 0.8
    noisy = next(loader.fairseq_like(tmp_path, "physio3+RLM", 4))["source"]
    assert noisy.dtype == batch.dtype and noisy.isfinite().all()
    crop = dataset.read(0)
    halves = loader._halves_with_rlm(loader._decode({"ecg": crop.tobytes()})[None]).numpy()
    mv = (crop / np.float32(1000)).reshape(12, 2, 2500).swapaxes(0, 1)
    masked = (halves == 0).all(-1)[..., None]
    np.testing.assert_allclose(halves, np.where(masked, 0, mv), rtol=1e-6)


def test_a_loader_without_a_batch_is_an_error():
    with pytest.raises(CaseError, match="too few crops for a batch of 4"):
        next(loader.epochs([1, 2, 3], 4))
    stream = loader.epochs([1, 2, 3], 2)
    assert [len(next(stream)) for _ in range(3)] == [2, 2, 2]
