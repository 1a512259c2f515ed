"""The loader: correct tensors, the same order at every world size, and a state to resume from."""

import ctypes
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loading import BACKENDS, CPU, NOISY, loader, same, some

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.common import ConfigError
from omnilead.engine.data import dali
from omnilead.engine.data import loader as module
from omnilead.engine.data.augment import AugmentConfig, ThreeKG
from omnilead.engine.data.augment_draws import Params
from omnilead.engine.data.augmenter import single_threaded
from omnilead.engine.data.loader import Loader, LoaderConfig
from tests.forks import started
from tests.waiting import until


@pytest.mark.parametrize(
    ("backend", "source"), [*((backend, "tar") for backend in BACKENDS), ("torch", "zarr")]
)
def test_without_augmentation_the_halves_are_the_crops(
    backend: str, source: str, dataset: Dataset
) -> None:
    for batch, _ in some(loader(dataset, backend, augment=AugmentConfig(rlm=0), source=source), 2):
        crops = np.stack([dataset.read(int(row)) for row in batch.places.row])
        np.testing.assert_allclose(
            batch.x_BSLT, crops.reshape(16, 12, 2, 2500).swapaxes(1, 2) / 1000.0, rtol=1e-6
        )


@pytest.mark.parametrize(
    ("views", "augment"),
    [
        ("halves", AugmentConfig()),
        ("halves", NOISY),
        ("halves", AugmentConfig(noise="authors_physio4", rlm_keep_one=True)),
        ("halves", AugmentConfig(leads="3", padded=False)),
        ("window", AugmentConfig(noise="emg", rlm=0.3)),
        ("window", AugmentConfig(noise="physio4", rlm=0, threekg=ThreeKG())),
    ],
)
def test_backends_agree(views: str, augment: AugmentConfig, dataset: Dataset) -> None:
    """To 1e-5 mV; masked leads are exactly zero in both."""
    one = some(loader(dataset, "torch", views=views, augment=augment), 3)
    two = some(loader(dataset, "dali", views=views, augment=augment), 3)
    for (a, _), (b, _) in zip(one, two, strict=True):
        np.testing.assert_allclose(b.x_BSLT.numpy(), a.x_BSLT.numpy(), atol=1e-5)
        assert torch.equal(a.x_BSLT == 0, b.x_BSLT == 0) or augment.threekg


@pytest.mark.parametrize(
    ("backend", "augment"),
    [*((backend, NOISY) for backend in BACKENDS), ("torch", AugmentConfig())],
)
def test_resuming_is_bit_exact_twice_and_across_an_epoch(
    backend: str, augment: AugmentConfig, dataset: Dataset
) -> None:
    per_epoch = loader(dataset).steps_per_epoch
    assert 4 <= per_epoch <= 14
    whole = some(loader(dataset, backend, augment=augment), per_epoch + 4)
    first = some(
        loader(dataset, backend, augment=augment), per_epoch - 2
    )  # prefetch is in flight when it is left
    second = some(
        loader(dataset, backend, first[-1][1], augment=augment), 3
    )  # over the end of the epoch
    third = some(loader(dataset, backend, second[-1][1], augment=augment), 3)
    assert same(whole, first + second + third)
    assert whole[0][1]["crops_seen"] == 16


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_world_size_gives_the_same_global_batches(backend: str, dataset: Dataset) -> None:
    alone, world = some(loader(dataset, backend), 2), 4
    ranks = [some(loader(dataset, backend, rank=rank, world=world), 2) for rank in range(world)]
    for step, (batch, state) in enumerate(alone):
        together = torch.cat([taken[step][0].x_BSLT for taken in ranks])
        assert torch.equal(together, batch.x_BSLT)
        assert all(taken[step][1] == state for taken in ranks)


def test_resuming_at_another_world_size_gives_the_same_batches(dataset: Dataset) -> None:
    whole = some(loader(dataset), 4)
    state = some(loader(dataset, rank=0, world=2), 2)[-1][1]
    assert same(whole[2:], some(loader(dataset, state=state), 2))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_crops": 8}, "batch_crops changed from 16 to 8"),
        ({"seed": 1}, "seed"),
        ({"augment": AugmentConfig()}, r"cannot resume: augment\.\w+ changed from \S+ to \S+: "),
        ({"views": "window"}, "views"),
        ({"block_shards": 1}, "block_shards"),
        ({"backend": "dali"}, "backend"),
    ],
)
def test_a_state_of_another_run_is_refused(
    changes: dict[str, Any], named: str, dataset: Dataset
) -> None:
    state = some(loader(dataset), 1)[-1][1]
    with pytest.raises(ConfigError, match=named):
        loader(dataset, state=state, **changes)


SEEN = (None, "16", -16, 8, True, 16.0, 2**64)
FORGED = [
    {"recipe": None},
    {"recipe": []},
    {"recipe": {"datasets": ["0" * 64]}},
    *({"crops_seen": seen} for seen in SEEN),
]


def test_a_forged_state_is_refused_and_does_not_restart_the_run(dataset: Dataset) -> None:
    state = some(loader(dataset), 1)[-1][1]
    for forged in ({}, *(state | change for change in FORGED)):
        with pytest.raises(ConfigError) as error:
            loader(dataset, state=forged)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("backend", "then"), [("dali", "dali"), ("torch", "resident")])
def test_a_state_with_what_earlier_loaders_saved_resumes(
    backend: str, then: str, dataset: Dataset
) -> None:
    whole = some(loader(dataset, backend), 3)
    state = whole[0][1]
    former = {"backend": then, "dali_version": "1.0.0", "rank": 1, "world": 4}
    state |= {"recipe": state["recipe"] | former, "dali": "aGVsbG8="}
    assert same(whole[1:], some(loader(dataset, backend, state), 2))


def batches_for_ever(url: str, backend: str, state: dict[str, Any] | None) -> None:
    config = LoaderConfig(backend=backend, batch_crops=32, augment=AugmentConfig(noise="physio4"))  # type: ignore[arg-type]
    for batch, after in Loader(config, (Dataset.open(url),), CPU, state=state, halves=2):
        print(
            json.dumps([hashlib.sha256(batch.x_BSLT.numpy().tobytes()).hexdigest(), after]),
            flush=True,
        )


@pytest.mark.parametrize("backend", ["torch", "dali"])
def test_resuming_after_two_sigkills_with_prefetch_in_flight(
    backend: str, dataset: Dataset, tmp_path: Path
) -> None:
    source = loader(dataset, backend, batch_crops=32)
    assert source.steps_per_epoch < 8  # of nine that are compared
    whole = some(source, 9)
    digests = [hashlib.sha256(batch.x_BSLT.numpy().tobytes()).hexdigest() for batch, _ in whole]
    seen: list[str] = []
    state = None
    for life in range(3):
        out = tmp_path / f"{life}.txt"
        child = started(batches_for_ever, dataset.root.url, backend, state, out=out)
        until(lambda out=out: out.exists() and len(out.read_text().splitlines()) > 3)
        child.kill()
        child.join()
        for line in out.read_text().splitlines()[:3]:
            digest, state = json.loads(line)
            seen.append(digest)
    assert seen == digests


def test_the_window_lies_within_the_crop_and_differs_between_epochs(dataset: Dataset) -> None:
    source = loader(dataset, views="window", augment=AugmentConfig(rlm=0))
    batch = some(source, 1)[0][0]
    assert torch.equal(batch.x_BSLT[:, 0], batch.x_BSLT[:, 1])
    starts = set()
    for i, row in enumerate(batch.places.row):
        chest = torch.from_numpy(dataset.read(int(row))[7] / 1000.0).float()
        distance = (
            (chest.unfold(0, 2500, 1) - batch.x_BSLT[i, 0, 7]).abs().amax(1)
        )  # [2501]: one for each place
        assert distance.min() < 1e-5
        starts.add(int(distance.argmin()))
    assert len(starts) > 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_iterating_again_continues(backend: str, dataset: Dataset) -> None:
    whole, source = some(loader(dataset, backend), 6), loader(dataset, backend)
    parts = [
        (batch.x_BSLT.clone(), batch.places.row) for _ in range(2) for batch, _ in islice(source, 3)
    ]
    source.close()
    for (batch, _), (x, row) in zip(whole, parts, strict=True):
        assert torch.equal(batch.x_BSLT, x) and np.array_equal(batch.places.row, row)


def test_reading_threads_open_no_openmp_threads(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP threads for each of them would take cores from the training step."""
    if not hasattr(ctypes.CDLL(None), "omp_set_num_threads"):
        pytest.skip("this torch does not show its OpenMP")
    seen: list[int] = []
    before = torch.get_num_threads()
    monkeypatch.setattr(
        module, "single_threaded", lambda: (single_threaded(), seen.append(torch.get_num_threads()))
    )
    torch.set_num_threads(2)
    try:
        some(loader(dataset, augment=AugmentConfig(), threads=2), 2)
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_auto_logs_the_chosen_backend(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert loader(dataset, "auto").backend == "torch"
    assert "auto: torch, because the device is cpu" in caplog.text


@pytest.mark.parametrize(("backend", "leads"), [("torch", "12"), ("torch", "I"), ("dali", "12")])
def test_the_timer_reports_the_share_of_each_stage(
    backend: str, leads: str, dataset: Dataset
) -> None:
    source = loader(dataset, backend, augment=AugmentConfig(rlm=0.5, noise="emg", leads=leads))
    some(source, 3)
    facts = source.meter.snapshot()
    stages = {"plan", "read", "read_wait", "augment", "wait"} | (
        {"gpu_wait"} if backend == "dali" else set()
    )
    assert set(facts) == {
        "crops_per_s",
        "data_bytes_per_s",
        *(f"data_{stage}_pct" for stage in stages),
    }
    assert all(value > 0 for value in facts.values())
    assert facts["data_read_wait_pct"] <= facts["data_wait_pct"] <= 100
    assert source.meter.snapshot()["crops_per_s"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"backend": "cuda"},
            {"backend": "resident"},
            {"views": "thirds"},
            {"threads": 0},
            {"read_ahead": 0},
            {"block_shards": -2},
            {"seed": -1},
        ),
        *({"check": "foo"}, {"on_corrupt": "ignore"}, {"micro_batch": 0}),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        LoaderConfig(**changes)


def test_config_is_plain_data(dataset: Dataset) -> None:
    recipe = loader(dataset).recipe
    assert json.loads(json.dumps(recipe)) == recipe
    assert recipe["augment"]["noise"] == dataclasses.asdict(NOISY)["noise"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_gpu_and_cpu_give_the_same_tensors(backend: str, dataset: Dataset) -> None:
    config = LoaderConfig(
        backend=backend, batch_crops=16, augment=AugmentConfig(noise="powerline,wander,shift")
    )  # type: ignore[arg-type]
    on_gpu = Loader(config, (dataset,), torch.device("cuda", 0), halves=2)
    on_cpu = Loader(dataclasses.replace(config, backend="torch"), (dataset,), CPU, halves=2)
    for (a, _), (b, _) in zip(some(on_gpu, 5), some(on_cpu, 5), strict=True):
        np.testing.assert_allclose(a.x_BSLT.cpu().numpy(), b.x_BSLT.numpy(), atol=1e-4)


class FakeEvent:
    """Its kernels end only when the host waits for them."""

    def __init__(self) -> None:
        self.waited = False

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True


def test_a_dali_batch_is_held_while_the_gpu_may_read_it() -> None:
    flight = dali.InFlight(FakeEvent)
    flight.release()
    events: list[FakeEvent] = []
    for batch in "abc":
        flight.hold(batch)
        flight.release()
        events.append(flight.queued[-1][0])
    assert (
        [batch for _, batch in flight.queued] == ["b", "c"]
        and events[0].waited
        and not events[1].waited
    )
    events[1].waited = True
    flight.hold("d")
    flight.release()
    assert [batch for _, batch in flight.queued] == ["c", "d"]


class FakeDali:
    """Prefetches like DALI, and returns the position of each batch."""

    def __init__(self, feed: Callable[[], list[np.ndarray]]) -> None:
        self.feed, self.ahead, self.streams = feed, list[np.ndarray](), list[Any]()

    def build(self) -> None: ...

    def run(self, cuda_stream: Any = None) -> tuple[Any, Any]:
        self.streams.append(cuda_stream)
        for _ in range(1 if self.ahead else dali.PREFETCH):
            self.ahead.append(self.feed()[0])
        stamp = self.ahead.pop(0)
        on_host = SimpleNamespace(at=lambda row: stamp[row])
        return SimpleNamespace(as_cpu=lambda: on_host), SimpleNamespace(
            as_tensor=lambda: torch.zeros(2)
        )


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_dali_hands_a_batch_to_torchs_stream_and_keeps_what_the_gpu_may_still_copy(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[int] = []

    def feed() -> Iterator[tuple[int, np.ndarray, Params]]:
        for position in count():
            fed.append(position)
            yield position, np.zeros((1, 12, 5000), np.int16), {}

    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: asked.append(device) or "torch's stream"
    )
    monkeypatch.setattr(dali, "check_installed", lambda: None)
    monkeypatch.setattr(
        dali.Pipeline, "_definition", lambda pipeline, *_: lambda: FakeDali(pipeline._next)
    )
    device = torch.device(kind, 1) if kind == "cuda" else CPU
    pipeline = dali.Pipeline(AugmentConfig(), "halves", feed(), 1, {}, device)
    events: dict[int, FakeEvent] = {}
    for _ in range(8):
        pipeline.release()
        if pipeline.taken:
            events |= {position: event for event, position in pipeline.taken.queued}
        position, _x = pipeline.run()
        held = {int(arrays[0][0, 0]) for arrays in pipeline.given}
        copied = (
            {done for done, event in events.items() if event.waited}
            if kind == "cuda"
            else set(range(position + 1))
        )
        assert set(fed) - copied <= held
        if pipeline.taken:
            pipeline.taken.hold(position)  # instead of the tensor
    assert pipeline.pipeline.streams == (["torch's stream"] * 8 if kind == "cuda" else [None] * 8)
    assert asked == ([device] * 8 if kind == "cuda" else [])


def test_waiting_for_the_gpu_does_not_count_as_data_wait(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that only the fake DALI advances: 6 s until the GPU has released a batch, 1 s to
    make the next one."""
    clock = [0.0]

    class Pipeline:
        def __init__(self, *arguments: Any) -> None:
            self.feed = arguments[2]

        def release(self) -> None:
            clock[0] += 6

        def run(self) -> tuple[int, torch.Tensor]:
            clock[0] += 1
            step, crops, _ = next(self.feed)
            return step, torch.from_numpy(crops)

        def close(self) -> None: ...

    monkeypatch.setattr("omnilead.engine.data.dali.Pipeline", Pipeline)
    monkeypatch.setattr(
        "omnilead.engine.data.loader.time", SimpleNamespace(perf_counter=lambda: clock[0])
    )
    source = loader(dataset, "dali", augment=AugmentConfig())
    some(source, 3)
    clock[0] += 9  # steps of the training
    facts = source.meter.snapshot()
    wanted = {"data_gpu_wait_pct": 18 / 30, "data_wait_pct": 3 / 30, "data_augment_pct": 3 / 30}
    assert {name: facts[name] for name in wanted} == pytest.approx(
        {name: 100 * share for name, share in wanted.items()}
    )


def test_memory_is_flat_over_ten_thousand_batches(dataset: Dataset) -> None:
    source = loader(dataset, batch_crops=2, augment=AugmentConfig(noise="powerline"))
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
