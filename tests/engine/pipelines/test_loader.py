"""The loader as the training loop meets it: right tensors, one order for all worlds, and a state that survives anything."""

import ctypes
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_tools.dataset import Dataset
from engine.pipelines import loader as pipelines_loader
from engine.pipelines.augment import AugmentConfig, ThreeKG
from engine.pipelines.batched import Augmenter, alone, parameters
from engine.pipelines.loader import Batch, Loader, LoaderConfig, LoaderError, State

CPU = torch.device("cpu")
BACKENDS = ("torch", "dali", "resident")
NOISY = AugmentConfig(noise="physio4")


def loader(dataset: Dataset, backend: str = "torch", state: State | None = None, **changes: Any) -> Loader:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="the extra cu13 or cu12 is not installed")
    world = {name: changes.pop(name) for name in ("rank", "world") if name in changes}
    config = LoaderConfig(**({"backend": backend, "batch_crops": 16, "augment": NOISY} | changes))  # type: ignore[arg-type]
    return Loader(config, (dataset,), CPU, state=state, halves=2, **world)


def some(source: Loader, count: int) -> list[tuple[Batch, State]]:
    kept = ((dataclasses.replace(batch, x_BSLT=batch.x_BSLT.clone()), state) for batch, state in islice(source, count))
    taken = [(batch, json.loads(json.dumps(state))) for batch, state in kept]
    source.close()
    return taken


def same(one: list[tuple[Batch, State]], two: list[tuple[Batch, State]]) -> bool:
    pairs = list(zip(one, two, strict=True))
    assert pairs
    return all(torch.equal(a.x_BSLT, b.x_BSLT) and np.array_equal(a.places.row, b.places.row) for (a, _), (b, _) in pairs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_augmentation_the_halves_are_the_crops(backend: str, dataset: Dataset) -> None:
    for batch, _ in some(loader(dataset, backend, augment=AugmentConfig(rlm=0)), 3):
        assert batch.x_BSLT.shape == (16, 2, 12, 2500)
        for i, row in enumerate(batch.places.row):
            halves = dataset.read(int(row)).reshape(12, 2, 2500).transpose(1, 0, 2)
            np.testing.assert_allclose(batch.x_BSLT[i].numpy(), halves / 1000.0, rtol=1e-6)


@pytest.mark.parametrize("backend", ["dali", "resident"])
@pytest.mark.parametrize(
    ("views", "augment"),
    [
        ("halves", AugmentConfig()),
        ("halves", AugmentConfig(noise="powerline,wander,shift")),
        ("halves", AugmentConfig(leads="3", padded=False)),
        ("window", AugmentConfig(rlm=0.3)),
        ("window", AugmentConfig(rlm=0, threekg=ThreeKG())),
    ],
)
def test_backends_agree(backend: str, views: str, augment: AugmentConfig, dataset: Dataset) -> None:
    """All but white noise, which DALI draws itself: to 1e-5 mV, masked leads exactly zero in both."""
    one = some(loader(dataset, "torch", views=views, augment=augment), 3)
    two = some(loader(dataset, backend, views=views, augment=augment), 3)
    for (a, _), (b, _) in zip(one, two, strict=True):
        np.testing.assert_allclose(b.x_BSLT.numpy(), a.x_BSLT.numpy(), atol=1e-5)
        assert torch.equal(a.x_BSLT == 0, b.x_BSLT == 0) or augment.threekg


@pytest.mark.parametrize(("backend", "augment"), [*((backend, NOISY) for backend in BACKENDS), ("torch", AugmentConfig())])
def test_a_restored_loader_goes_on_bit_for_bit_twice_and_over_an_epochs_end(
    backend: str, augment: AugmentConfig, dataset: Dataset
) -> None:
    per_epoch = loader(dataset).steps_per_epoch
    assert 4 <= per_epoch <= 14
    whole = some(loader(dataset, backend, augment=augment), per_epoch + 4)
    first = some(loader(dataset, backend, augment=augment), per_epoch - 2)  # prefetch is in flight when it is left
    second = some(loader(dataset, backend, first[-1][1], augment=augment), 3)  # over the end of the epoch
    third = some(loader(dataset, backend, second[-1][1], augment=augment), 3)
    assert same(whole, first + second + third)
    assert whole[0][1]["crops_seen"] == 16


def test_epochs_differ_and_each_is_a_permutation(dataset: Dataset) -> None:
    source = loader(dataset)
    batches = [batch.places.row for batch, _ in some(source, 2 * source.steps_per_epoch)]
    one, two = np.split(np.concatenate(batches), 2)
    assert len(set(one.tolist())) == len(one)
    assert len(set(two.tolist())) == len(two)
    assert (one != two).any()


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_world_size_gives_the_same_global_batches(world: int, dataset: Dataset) -> None:
    alone = some(loader(dataset), 2)
    ranks = [some(loader(dataset, rank=rank, world=world), 2) for rank in range(world)]
    for step, (batch, state) in enumerate(alone):
        together = torch.cat([taken[step][0].x_BSLT for taken in ranks])
        assert torch.equal(together, batch.x_BSLT)
        assert all(taken[step][1] == state for taken in ranks)


def test_another_world_size_goes_on_with_the_same_batches(dataset: Dataset) -> None:
    whole = some(loader(dataset), 4)
    state = some(loader(dataset, rank=0, world=2), 2)[-1][1]
    assert same(whole[2:], some(loader(dataset, state=state), 2))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_crops": 8}, "batch_crops was 16 and is 8"),
        ({"seed": 1}, "seed"),
        ({"augment": AugmentConfig()}, "augment"),
        ({"views": "window"}, "views"),
        ({"block_shards": 1}, "block_shards"),
        ({"backend": "resident"}, "backend"),
    ],
)
def test_a_state_of_another_run_is_refused(changes: dict[str, Any], named: str, dataset: Dataset) -> None:
    state = some(loader(dataset), 1)[-1][1]
    with pytest.raises(LoaderError, match=named):
        loader(dataset, state=state, **changes)


def test_a_state_of_another_dataset_or_dali_is_refused(dataset: Dataset) -> None:
    state = some(loader(dataset), 1)[-1][1]
    other = json.loads(json.dumps(state))
    other["recipe"]["datasets"] = ["0" * 64]
    with pytest.raises(LoaderError, match="datasets"):
        loader(dataset, state=other)
    state = some(loader(dataset, "dali"), 1)[-1][1]
    state["recipe"]["dali_version"] = "1.0.0"
    with pytest.raises(LoaderError, match=r"dali_version was 1\.0\.0"):
        loader(dataset, "dali", state=state)


CHILD = """
import sys, json, hashlib, torch
from data_tools.dataset import Dataset
from engine.pipelines.augment import AugmentConfig
from engine.pipelines.loader import Loader, LoaderConfig
config = LoaderConfig(backend=sys.argv[2], batch_crops=16, augment=AugmentConfig(noise="physio4"))
state = json.loads(sys.argv[3]) if sys.argv[3] else None
for batch, state in Loader(config, (Dataset.open(sys.argv[1]),), torch.device("cpu"), state=state, halves=2):
    print(json.dumps([hashlib.sha256(batch.x_BSLT.numpy().tobytes()).hexdigest(), state]), flush=True)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_kill_minus_9_twice_with_prefetch_in_flight(backend: str, dataset: Dataset) -> None:
    whole = [(batch, state) for batch, state in some(loader(dataset, backend), 9)]
    digests = [hashlib.sha256(batch.x_BSLT.numpy().tobytes()).hexdigest() for batch, _ in whole]
    seen: list[str] = []
    state = ""
    for _ in range(3):
        command = [sys.executable, "-c", CHILD, dataset.root.url, backend, state]
        root = str(Path(__file__).parents[3])
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert child.stdout is not None
        for line in islice(child.stdout, 3):
            digest, after = json.loads(line)
            seen.append(digest)
            state = json.dumps(after)
        child.send_signal(signal.SIGKILL)
        child.stdout.close()
        child.wait()
    assert seen == digests


def test_the_window_lies_within_the_crop_and_differs_between_epochs(dataset: Dataset) -> None:
    source = loader(dataset, views="window", augment=AugmentConfig(rlm=0))
    batch = some(source, 1)[0][0]
    assert torch.equal(batch.x_BSLT[:, 0], batch.x_BSLT[:, 1])
    starts = set()
    for i, row in enumerate(batch.places.row):
        chest = torch.from_numpy(dataset.read(int(row))[7] / 1000.0).float()
        distance = (chest.unfold(0, 2500, 1) - batch.x_BSLT[i, 0, 7]).abs().amax(1)  # [2501]: one for each place
        assert distance.min() < 1e-5
        starts.add(int(distance.argmin()))
    assert len(starts) > 8


@pytest.mark.parametrize("augment", [NOISY, AugmentConfig(), AugmentConfig(rlm=0)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_crop_in_the_place_of_another_has_its_own_parameters(
    augment: AugmentConfig, threads: int, dataset: Dataset, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dataset.root.url, copy)
    damaged = Dataset.open(str(copy))
    shard, offset, _ = damaged.addresses
    rows = some(loader(dataset), 1)[0][0].places.row
    with open(copy / "shards" / damaged.shards[shard[rows[5]]]["name"], "r+b") as file:
        file.seek(offset[rows[5]])
        file.write(bytes(200))
    batch = some(loader(damaged, on_corrupt="skip", augment=augment, threads=threads), 1)[0][0]
    assert [(d, row) for d, row, _ in batch.skipped] == [(0, rows[5])]
    assert batch.places.row.tolist() == [*rows[:5], (rows[5] + 1) % len(dataset), *rows[6:]]
    p = parameters(augment, "halves", 0, batch.places)
    augmenter = Augmenter(augment, "halves", 0, CPU)
    crops = torch.from_numpy(np.stack([dataset.read(int(row)) for row in batch.places.row]))
    assert torch.equal(batch.x_BSLT, augmenter(crops, augmenter.to_device(p)))


@pytest.mark.parametrize("source", ["tar", "zarr"])
def test_both_twins_give_the_same_tensors(source: str, dataset: Dataset) -> None:
    assert same(some(loader(dataset), 2), some(loader(dataset, source=source), 2))


def test_reading_threads_compute_alone(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A team of OpenMP threads for each of them would take the cores of the training step."""
    if not hasattr(ctypes.CDLL(None), "omp_set_num_threads"):
        pytest.skip("this torch does not show its OpenMP")
    seen: list[int] = []
    before = torch.get_num_threads()
    monkeypatch.setattr(pipelines_loader, "alone", lambda: (alone(), seen.append(torch.get_num_threads())))
    torch.set_num_threads(2)
    try:
        some(loader(dataset, augment=AugmentConfig(), threads=2), 2)
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_auto_says_what_it_chose(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert loader(dataset, "auto").backend == "torch"
    assert "auto: torch, because the device is cpu" in caplog.text


def test_the_meter_says_where_time_went(dataset: Dataset) -> None:
    source = loader(dataset)
    some(source, 3)
    facts = source.meter.snapshot()
    assert facts["crops_per_s"] > 0
    assert {"data_wait_pct", "gather_wait_pct", "draws_pct", "augment_pct", "bytes_per_s"} <= set(facts)
    assert source.meter.snapshot()["crops_per_s"] == 0


@pytest.mark.parametrize("changes", [{"backend": "cuda"}, {"views": "thirds"}, {"threads": 0}, {"read_ahead": 0}])
def test_impossible_settings_are_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(LoaderError, match=f"pipeline.{next(iter(changes))}"):
        LoaderConfig(**changes)


def test_config_is_plain_data(dataset: Dataset) -> None:
    recipe = loader(dataset).recipe
    assert json.loads(json.dumps(recipe)) == recipe
    assert recipe["augment"]["noise"] == dataclasses.asdict(NOISY)["noise"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_gpu_the_tensors_are_those_of_the_cpu(backend: str, dataset: Dataset) -> None:
    config = LoaderConfig(backend=backend, batch_crops=16, augment=AugmentConfig(noise="powerline,wander,shift"))  # type: ignore[arg-type]
    on_gpu = Loader(config, (dataset,), torch.device("cuda", 0), halves=2)
    on_cpu = Loader(dataclasses.replace(config, backend="torch"), (dataset,), CPU, halves=2)
    for (a, _), (b, _) in zip(some(on_gpu, 5), some(on_cpu, 5), strict=True):
        np.testing.assert_allclose(a.x_BSLT.cpu().numpy(), b.x_BSLT.numpy(), atol=1e-4)
