"""Benchmarks of whole commands, on small data: the loop, ranks, embeddings, the start, loaders."""

import json
import sys
from argparse import Namespace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks import e2e, embed, huge, ingest, libraries, loader, measure, run, scaling, start
from benchmarks.measure import CaseError, call_fresh


def loop_run(dataset, tiny, tmp_path, **changes):
    how = {"model": tiny, "batch": 4, "steps": 2, "threads": 1} | changes
    return e2e.LoopRun(dataset.root.url, str(tmp_path / "run"), **how)


def last_line(run):
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def test_the_loop_is_measured_against_the_bare_step(dataset, tiny, tmp_path):
    measured = call_fresh(e2e.compare_sides, loop_run(dataset, tiny, tmp_path))
    assert measured["backend"] == "torch" and measured["repeats"] == 3
    # held and loaded, two steps a turn, a warm-up and three turns
    assert last_line(tmp_path / "run")["step"] == 2 * 2 * (1 + 3)
    # the one that was timed
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-16"
    assert 0 < measured["stall_pct"]["median"] < 100
    assert measured["per_s"]["median"] > 0 and 0 < measured["checkpoint_s"] < measured["written_s"]


@pytest.mark.parametrize(("device", "overhead"), [("cpu", 10), ("cuda", 20)])
def test_overhead_is_computed_from_adjacent_turns(device, overhead):
    """Whatever the machine's drift; in CPU-seconds, on a GPU in seconds."""
    rows = {}
    for side, cpu_s, wall_s in (("bare", 1.0, 2.0), ("held", 1.05, 2.2), ("loaded", 1.1, 2.4)):
        rows[side] = []
        for drift in (1, 5, 2):
            row = {"units": 128, "wall_s": drift * wall_s, "cpu_s": drift * cpu_s}
            rows[side].append(row | {"waited_s": 0.02 * drift * wall_s})
    result = e2e.rates_and_percentages({"rows": rows, "backend": "torch"}, device)
    assert result["overhead_pct"] == pytest.approx(
        {"median": overhead, "low": overhead, "high": overhead}
    )
    ratio = 1.1 / 1.05 if device == "cpu" else 2.4 / 2.2
    assert result["loader_pct"]["median"] == pytest.approx(100 * (ratio - 1))
    assert result["stall_pct"]["median"] == pytest.approx(2.0)
    assert result["per_cpu_s"]["high"] == pytest.approx(128 / 1.1)
    assert result["bare_per_s"]["high"] == pytest.approx(64) and result["backend"] == "torch"


def test_two_ranks(dataset, tiny, tmp_path):
    measured = scaling.run_ranks(loop_run(dataset, tiny, tmp_path, steps=1), 2)
    assert measured["batch"] == 4 and measured["per_cpu_s"]["low"] > 0
    last = last_line(tmp_path / "run-2")
    assert last["crops_seen"] == 8 * (last["step"] + 1)  # the first batch was put aside


def test_a_dataset_of_zeros(tmp_path):
    dataset = huge.make_huge_dataset(tmp_path / "zeros", 3000)
    assert len(dataset) == 3000 and not dataset.read(2999).any()
    assert next(scaling.time_first_batch(dataset.root.url)) == 1.0
    roles = dataset.meta["roles"]
    assert roles["pretrain"] and roles["dx"]["test"] and roles["id"]["probe"]
    for job, arguments in huge.cases_of_jobs(dataset).values():
        steps = job(*arguments)
        assert [next(steps), next(steps), next(steps)] == [0, 1, 1]


def test_embedding_is_measured_against_the_encoder_alone(tiny, tmp_path):
    options = run.parse(["embed", "--model", tiny, "--records", "10", "--batch", "4"])
    facts, cases = embed.prepare_input_and_cases(tmp_path, options)
    assert list(cases)[-1] == f"arrays, 250 Hz: {tiny}, 4 crops" and facts["crops"] > 0
    function, arguments = cases[f"arrays, 250 Hz: {tiny}, 4 crops"]
    result = call_fresh(function, *arguments)
    assert result["share_pct"]["median"] > 0 and result["repeats"] == 3
    assert (tmp_path / "out.parquet").stat().st_size > 0


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
    monkeypatch.setattr(start, "tree_cpu_s", lambda pid: (tmp_path / "seen").touch() or 1.5)
    command = (sys.executable, "-S", "-c")
    result = start.repeat_start((*command, COMMAND), tmp_path, 3)
    assert result["repeats"] == 3 and result["seconds"]["low"] > 0
    assert result["cpu_seconds"]["median"] == 1.5 and not (tmp_path / "run").exists()
    with pytest.raises(CaseError, match=r"exited with 1, .*frog"):
        start.wall_and_cpu_s_of_start((*command, "import sys; sys.exit('frog')"), tmp_path)


def test_loader_throughput_counts_whole_batches(dataset):
    given = (Path(dataset.root.url), "RLM", "torch", 16, 1, 0.05, "cpu")
    measure.measure_case(loader.count_crops_of_our_loader, given, 1, (sent := []).append)
    (sample,) = sent
    assert sample["units"] > 0 and sample["units"] % 16 == 0


def test_every_case_of_an_ingest_runs(tmp_path):
    facts, cases = ingest.prepare_input_and_cases(tmp_path, Namespace(records=100))
    units = {name: next(function(*arguments)) for name, (function, arguments) in cases.items()}
    assert min(units.values()) > 0 and units["read: omnilead"] == facts["records"]


def test_the_re_creation_ends_with_masked_halves(dataset, tmp_path):
    for row in range(8):
        loader.write_halves(dataset, row, tmp_path)
    batch = next(loader.fairseq_like_batches(tmp_path, "RLM", 4))["source"]
    assert batch.shape == (8, 12, 2500) and 0.2 < (batch == 0).all(-1).float().mean() < 0.8
    noisy = next(loader.fairseq_like_batches(tmp_path, "physio3+RLM", 4))["source"]
    assert noisy.dtype == batch.dtype and noisy.isfinite().all()


def test_the_limit_reads_and_converts_whole_crops(dataset):
    folder = Path(dataset.root.url)
    crops = np.stack([dataset.read(row) for row in range(len(dataset))]) / np.float32(1000)
    for crop in next(loader.read_and_convert(folder, "", 4)).numpy():
        assert np.isclose(crop, crops, rtol=1e-6).all((1, 2)).any()


MODULES = {"Hugging Face datasets": "datasets", "mosaicml-streaming": "streaming"}


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves it open
@pytest.mark.filterwarnings("default")  # of the libraries
@pytest.mark.parametrize(
    "make, name",
    [(loader.npy_batches, "memory-mapped .npy")]
    + [(loader.library_batches, name) for name in libraries.LIBRARIES],
)
def test_other_libraries_end_with_the_same_crops(make, name, dataset, tmp_path):
    """Each batch has other crops of the dataset, half of whose leads are masked."""
    if name in (*MODULES, "litdata"):
        pytest.importorskip(MODULES.get(name, name))
    folder, place = Path(dataset.root.url), tmp_path / "crops"
    libraries.LIBRARIES[name][0](folder, place)
    crops = np.stack([dataset.read(row) for row in range(len(dataset))]) / np.float32(1000)
    seen = []
    for batch in islice(make(place, name, 4), 2):
        assert batch.shape == (8, 12, 2500)
        for pair in batch.numpy().reshape(4, 2, 12, 2500).swapaxes(1, 2):
            masked = (pair == 0).all(-1, keepdims=True)
            expected = np.where(masked, 0, crops.reshape(-1, 12, 2, 2500))
            same = np.isclose(pair, expected, rtol=1e-6).all((1, 2, 3))
            assert same.any() and 0 < masked.mean() < 1
            seen.append(same.argmax())
    assert len(set(seen)) > 6 and seen != sorted(seen)


def test_a_loader_without_a_batch_is_an_error():
    with pytest.raises(CaseError, match="too few crops for a batch of 4"):
        next(loader.endless_batches([1, 2, 3], 4))
    stream = loader.endless_batches([1, 2, 3], 2)
    assert [len(next(stream)) for _ in range(3)] == [2, 2, 2]
