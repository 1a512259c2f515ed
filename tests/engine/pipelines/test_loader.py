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
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_tools.dataset import Dataset, DatasetError
from engine.pipelines import loader as pipelines_loader
from engine.pipelines.augment import AugmentConfig, ThreeKG
from engine.pipelines.batched import Augmenter, Views, alone, parameters
from engine.pipelines.dali import InFlight
from engine.pipelines.loader import Batch, Loader, LoaderConfig, LoaderError, State
from engine.pipelines.meter import Meter
from engine.pipelines.resident import Resident

CPU = torch.device("cpu")
BACKENDS = ("torch", "dali", "resident")
NOISY = AugmentConfig(noise="physio4")


def loader(dataset: Dataset, backend: str = "torch", state: State | None = None, **changes: Any) -> Loader:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="the extra cu13 or cu12 is not installed")
    others = {name: changes.pop(name) for name in ("rank", "world", "pretrain", "identity") if name in changes}
    config = LoaderConfig(**({"backend": backend, "batch_crops": 16, "augment": NOISY} | changes))  # type: ignore[arg-type]
    return Loader(config, (dataset,), CPU, state=state, halves=2, **others)


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
        ({"augment": AugmentConfig()}, r"cannot go on: augment\.\w+ was \S+ and is \S+: "),
        ({"views": "window"}, "views"),
        ({"block_shards": 1}, "block_shards"),
        ({"backend": "resident"}, "backend"),
    ],
)
def test_a_state_of_another_run_is_refused(changes: dict[str, Any], named: str, dataset: Dataset) -> None:
    state = some(loader(dataset), 1)[-1][1]
    with pytest.raises(LoaderError, match=named):
        loader(dataset, state=state, **changes)


def test_a_state_before_the_beginning_is_refused(dataset: Dataset) -> None:
    state = some(loader(dataset), 1)[-1][1]
    state["crops_seen"] = -16
    with pytest.raises(LoaderError, match="crops_seen=-16"):
        loader(dataset, state=state)


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
config = LoaderConfig(backend=sys.argv[2], batch_crops=32, augment=AugmentConfig(noise="physio4"))
state = json.loads(sys.argv[3]) if sys.argv[3] else None
for batch, state in Loader(config, (Dataset.open(sys.argv[1]),), torch.device("cpu"), state=state, halves=2):
    print(json.dumps([hashlib.sha256(batch.x_BSLT.numpy().tobytes()).hexdigest(), state]), flush=True)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_kill_minus_9_twice_with_prefetch_in_flight_over_an_epochs_end(backend: str, dataset: Dataset) -> None:
    source = loader(dataset, backend, batch_crops=32)
    assert source.steps_per_epoch < 8  # of nine that are compared
    whole = some(source, 9)
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


def at_once(dataset: Dataset, batch: Batch, augment: AugmentConfig, views: Views = "halves") -> torch.Tensor:
    augmenter, p = Augmenter(augment, views, 0, CPU), parameters(augment, views, 0, batch.places)
    crops = torch.from_numpy(np.stack([dataset.read(int(row)) for row in batch.places.row]))
    return augmenter(crops, augmenter.to_device(p))


@pytest.mark.parametrize("backend", ["torch", "resident"])
@pytest.mark.parametrize(
    ("views", "augment"),
    [
        *(("halves", AugmentConfig(rlm=rlm, noise=noise)) for rlm in (0, 0.5) for noise in ("", "emg", "shift", "physio4")),
        ("halves", AugmentConfig(noise="physio4", per_lead=True)),
        ("halves", AugmentConfig(noise="physio4", dependency=True)),
        ("halves", AugmentConfig(noise="physio4", leads="I,V1")),
        ("halves", AugmentConfig(noise="authors_physio4")),
        ("halves", AugmentConfig(noise="authors_physio4", dependency=False)),
        ("window", AugmentConfig(noise="physio4")),
        ("window", AugmentConfig(rlm=0, threekg=ThreeKG())),
    ],
)
def test_few_at_a_time_is_all_at_once(backend: str, views: Views, augment: AugmentConfig, dataset: Dataset) -> None:
    for batch, _ in some(loader(dataset, backend, views=views, augment=augment), 2):
        assert torch.equal(batch.x_BSLT, at_once(dataset, batch, augment, views))


@pytest.mark.parametrize("augment", [NOISY, AugmentConfig(), AugmentConfig(rlm=0), AugmentConfig(leads="I")])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_crop_in_the_place_of_another_has_its_own_parameters(
    augment: AugmentConfig, threads: int, dataset: Dataset, tmp_path: Path
) -> None:
    source = loader(dataset)
    rows = some(source, 2)[1][0].places.row
    damaged = damage(dataset, tmp_path / "copy", [rows[5]])
    (before, _), (batch, _) = some(loader(damaged, on_corrupt="skip", augment=augment, threads=threads), 2)
    assert before.skipped == ()
    assert [bad[:3] for bad in batch.skipped] == [(5, 0, rows[5])]
    assert batch.places.row.tolist() == [*rows[:5], source.order.rows[0].after(rows[5]), *rows[6:]]
    assert torch.equal(batch.x_BSLT, at_once(dataset, batch, augment))


@pytest.mark.parametrize(("backend", "per_lead"), [("torch", False), ("torch", True), ("dali", False)])
def test_what_is_read_together_with_a_bad_crop_comes_before_its_error(
    backend: str, per_lead: bool, dataset: Dataset, tmp_path: Path
) -> None:
    changes = {"augment": AugmentConfig(noise="shift", per_lead=per_lead)}
    whole = some(loader(dataset, backend, **changes), 4)
    damaged = damage(dataset, tmp_path / "copy", [whole[3][0].places.row[7], whole[2][0].places.row[5]])
    source, taken = loader(damaged, backend, **changes), []
    with pytest.raises(DatasetError, match=f"crop {whole[2][0].places.row[5]} at byte"):
        taken += ((dataclasses.replace(batch, x_BSLT=batch.x_BSLT.clone()), state) for batch, state in source)
    source.close()
    assert backend == "dali" or same(whole[:2], taken)  # which asks ahead


def damage(dataset: Dataset, copy: Path, rows: Iterable[int]) -> Dataset:
    """A copy in which these crops do not read well."""
    shutil.copytree(dataset.root.url, copy)
    damaged = Dataset.open(str(copy))
    shard, offset, _ = damaged.addresses
    for row in rows:
        with open(copy / "shards" / damaged.shards[shard[row]]["name"], "r+b") as file:
            file.seek(offset[row])
            file.write(bytes(200))
    return damaged


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_comes_in_the_place_of_another_takes_part_too(backend: str, dataset: Dataset, tmp_path: Path) -> None:
    """Nobody who is kept for tests is trained on because a neighbour is bad, and each signal is whose it says it is."""
    source = loader(dataset, pretrain=True)
    taking_part = source.order.rows[0].row(np.arange(len(source.order.rows[0])))
    source.close()
    bad = taking_part[np.append(np.diff(taking_part) > 1, True)]  # others follow in the dataset
    bad = {*bad.tolist(), int(taking_part[0])}  # the last one's substitute is bad as well
    assert 3 < len(bad) < len(taking_part) - 8
    damaged = damage(dataset, tmp_path / "copy", bad)
    changes = {"pretrain": True, "on_corrupt": "skip", "augment": AugmentConfig(rlm=0), "batch_crops": 8}
    steps = source.order.crops_per_epoch // 8
    skipped = set()
    for batch, _ in some(loader(damaged, backend, **changes), steps):
        assert set(batch.places.row.tolist()) <= {*taking_part.tolist()} - bad
        for x_SLT, row in zip(batch.x_BSLT, batch.places.row.tolist(), strict=True):
            halves = dataset.read(row).reshape(12, 2, 2500).transpose(1, 0, 2)
            np.testing.assert_allclose(x_SLT.numpy(), halves / 1000.0, rtol=1e-6)
        assert all(bad.reason.endswith("it fails its crc32c: restore the file") for bad in batch.skipped)
        skipped |= {bad.row for bad in batch.skipped}
    assert len(bad) - 8 <= len(skipped) and skipped <= bad  # an epoch leaves out less than a batch


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loader_that_is_gone_through_again_goes_on(backend: str, dataset: Dataset) -> None:
    whole, source = some(loader(dataset, backend), 6), loader(dataset, backend)
    parts = [(batch.x_BSLT.clone(), batch.places.row) for _ in range(2) for batch, _ in islice(source, 3)]
    source.close()
    for (batch, _), (x, row) in zip(whole, parts, strict=True):
        assert torch.equal(batch.x_BSLT, x) and np.array_equal(batch.places.row, row)


@pytest.mark.parametrize(
    ("views", "augment"),
    [
        ("halves", AugmentConfig()),
        ("halves", NOISY),
        ("halves", AugmentConfig(noise="authors_physio4")),
        ("window", AugmentConfig(rlm=0.3)),
        ("window", AugmentConfig(rlm=0, threekg=ThreeKG())),
    ],
)
def test_what_a_gpu_compiles_is_one_graph_and_the_same(views: str, augment: AugmentConfig, dataset: Dataset) -> None:
    source = loader(dataset, "resident", views=views, augment=augment)
    resident = Resident(source.order, source.gather, source.augmenter)
    resident._make = resident._compiled("aot_eager")
    for planned in islice(source._planned(), 2):
        plan = resident.plan(planned.places, planned.p)
        plain = resident.batch(plan, torch.empty(16, 2, 12, 2500))
        torch.testing.assert_close(resident.batch(plan), plain, rtol=0, atol=1e-5)
    source.close()


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


@pytest.mark.parametrize(("backend", "leads"), [("torch", "12"), ("torch", "I"), ("dali", "12"), ("resident", "12")])
def test_the_meter_says_where_time_went(backend: str, leads: str, dataset: Dataset) -> None:
    source = loader(dataset, backend, augment=AugmentConfig(rlm=0.5, noise="emg", leads=leads))
    some(source, 3)
    facts = source.meter.snapshot()
    stages = ("plan", "read", "read_wait", "augment", "wait")
    assert set(facts) == {"crops_per_s", "data_bytes_per_s", *(f"data_{stage}_pct" for stage in stages)}
    assert all(value > 0 for value in facts.values())
    assert facts["data_read_wait_pct"] <= facts["data_wait_pct"] <= 100
    assert source.meter.snapshot()["crops_per_s"] == 0


def test_a_stage_within_a_stage_is_counted_once() -> None:
    meter = Meter()
    with meter.timed("augment", without="read_wait"), meter.timed("read_wait"):
        time.sleep(0.05)
    facts = meter.snapshot()
    assert facts["data_read_wait_pct"] > 50 > facts["data_augment_pct"] >= 0


@pytest.mark.parametrize(
    "changes",
    [
        *({"backend": "cuda"}, {"views": "thirds"}, {"threads": 0}, {"read_ahead": 0}),
        *({"check": "foo"}, {"on_corrupt": "ignore"}, {"micro_batch": 0}),
    ],
    ids=str,
)
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


def test_a_batch_stays_while_a_gpu_may_read_it() -> None:
    class Event:
        def __init__(self) -> None:
            self.done = False
            events.append(self)

        def record(self) -> None: ...

        def query(self) -> bool:
            return self.done

        def synchronize(self) -> None:
            self.done = True

    events: list[Event] = []
    flight = InFlight(Event)
    flight.release()
    for batch in "abc":
        flight.hold(batch)
        flight.release()
    assert [batch for _, batch in flight.queued] == ["b", "c"] and events[0].done and not events[1].done
    events[1].done = True
    flight.hold("d")
    flight.release()
    assert [batch for _, batch in flight.queued] == ["c", "d"]


def test_memory_is_flat_over_ten_thousand_batches(dataset: Dataset) -> None:
    for augment in (AugmentConfig(), AugmentConfig(noise="powerline")):
        source = loader(dataset, batch_crops=2, augment=augment)
        batches = iter(source)
        for _ in islice(batches, 2_000):
            pass
        before = resident_mb()
        for _ in islice(batches, 10_000):
            pass
        assert resident_mb() - before < 8
        source.close()


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_dali_draws_white_noise_of_its_own_for_each_rank_and_batch(dataset: Dataset) -> None:
    emg = AugmentConfig(noise="emg", rlm=0)
    noise = []
    for rank in (0, 1):
        loud = some(loader(dataset, "dali", augment=emg, rank=rank, world=2), 2)
        still = some(loader(dataset, "dali", augment=AugmentConfig(rlm=0), rank=rank, world=2), 2)
        for (a, _), (b, _) in zip(loud, still, strict=True):
            amplitude = torch.from_numpy(parameters(emg, "halves", 0, a.places)["emg_amplitude"])
            noise.append((a.x_BSLT - b.x_BSLT) / amplitude)
    for one in noise:
        assert abs(one.mean()) < 0.01 and abs(one.std() - 1) < 0.02 and abs(one.pow(4).mean() - 3) < 0.2
    assert abs(torch.corrcoef(torch.stack([one.flatten() for one in noise])) - torch.eye(4)).max() < 0.01
