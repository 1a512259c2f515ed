"""The loader: correct tensors, the same order at every world size, and a state to resume from."""

import ctypes
import dataclasses
import functools
import hashlib
import json
import operator
import random
import threading
import time
from itertools import count, islice
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from loading import BACKENDS, CPU, NOISY, contents, loader, some
from shards_made import crops_of

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.data import dali, executors
from omnilead.engine.data import loader as module
from omnilead.engine.data.augmentations import AugmentConfig
from omnilead.engine.data.augmentations.noise import AmplitudeMv
from omnilead.engine.data.augmentations.threekg import ThreeKG
from omnilead.engine.data.augmenter import Augmenter, Draw
from omnilead.engine.data.config import LoaderConfig
from omnilead.engine.data.loader import Loader
from omnilead.engine.data.order import Places, Selection
from omnilead.engine.data.writer import CropWriter
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.training.config import build_config
from tests.forks import started
from tests.waiting import until


@pytest.mark.parametrize(
    ("backend", "source"), [*((backend, "tar") for backend in BACKENDS), ("torch", "zarr")]
)
def test_without_augmentation_the_halves_are_the_crops(backend, source, dataset):
    for batch, _ in some(loader(dataset, backend, augment=AugmentConfig(rlm=0), source=source), 2):
        halves = crops_of(dataset, batch.places.row).reshape(16, 12, 2, 2500).swapaxes(1, 2)
        np.testing.assert_allclose(batch.x_BSLT, halves / 1000.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("backend", "augment"),
    [*((backend, NOISY) for backend in BACKENDS), ("torch", AugmentConfig())],
)
def test_resuming_is_bit_exact_twice_and_across_an_epoch(backend, augment, dataset):
    per_epoch = loader(dataset).steps_per_epoch
    assert 4 <= per_epoch <= 14
    whole = some(loader(dataset, backend, augment=augment), per_epoch + 4)
    parts, state = [], None
    # prefetch is in flight when it is left; then over the end of the epoch
    for steps in (per_epoch - 2, 3, 3):
        parts += some(loader(dataset, backend, state, augment=augment), steps)
        state = parts[-1][1]
    assert contents(whole) == contents(parts)
    assert whole[0][1]["crops_seen"] == 16


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_that_are_kept_stay_as_they_were(backend, dataset):
    source = loader(dataset, backend, batch_crops=64)
    kept = [(batch, digest(batch)) for batch, _ in islice(source, 6)]
    source.close()
    assert [digest(batch) for batch, _ in kept] == [as_loaded for _, as_loaded in kept]
    for batch, _ in kept:  # torch.save writes the whole storage
        held, own = batch.x_BSLT.untyped_storage().nbytes(), batch.x_BSLT.nbytes
        assert held == own
    source = loader(dataset, backend, batch_crops=64, reuse_batches=True)
    assert [digest(batch) for batch, _ in islice(source, 6)] == [d for _, d in kept]
    source.close()


GLOBAL = """
import random
import numpy as np
import torch

def scaled(x_BSLT, generator):
    return x_BSLT * (torch.rand(1) + np.random.rand() + random.random())
"""


def test_an_own_augmentation_is_the_same_after_dali(dataset, tmp_path):
    """And may change its batch in place."""
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def dimmed(x, generator):\n"
        "    return x.mul_(torch.rand(len(x), 1, 1, 1, generator=generator, device=x.device))\n"
    )
    augment = AugmentConfig(extra=f"{tmp_path}/mine.py:dimmed", rlm=0.5)
    by_torch, by_dali = (some(loader(dataset, name, augment=augment), 5) for name in BACKENDS)
    for (one, _), (other, _) in zip(by_torch, by_dali, strict=True):
        np.testing.assert_allclose(other.x_BSLT.numpy(), one.x_BSLT.numpy(), atol=1e-6)
    plain = some(loader(dataset, "dali", augment=AugmentConfig(rlm=0.5)), 1)
    assert plain[0][0].x_BSLT.abs().sum() > 1.2 * by_dali[0][0].x_BSLT.abs().sum() > 0


OWN = """
def wandering(x_BSLT, draw, amplitude=1.0):
    return x_BSLT + amplitude * draw.normal(12, 1) + draw.uniform(1, 2500)

def dimmed(x_BSLT, draw):
    return x_BSLT.mul_(draw.uniform(1, 1))
"""


def test_own_augmentations_draw_for_each_crop(dataset, tmp_path):
    """Whatever the batch, the rank and the backend."""
    (tmp_path / "mine.py").write_text(OWN)
    wandering, dimmed = f"{tmp_path}/mine.py:wandering", f"{tmp_path}/mine.py:dimmed"
    augment = AugmentConfig(extra=({"name": wandering, "amplitude": 0.1}, dimmed), rlm=0.5)

    def crops(*loaders):
        found = {}
        for batch, _ in (one for made in loaders for one in some(made, 2)):
            for row, x_SLT in zip(batch.places.row.tolist(), batch.x_BSLT, strict=True):
                found[row] = x_SLT.clone()
        return found

    whole = crops(loader(dataset, augment=augment))
    ranks = [loader(dataset, augment=augment, rank=rank, world=2) for rank in (0, 1)]
    others = crops(*ranks), crops(loader(dataset, augment=augment, batch_crops=8))
    for other in others:
        assert other.keys() <= whole.keys() and len(other) >= 16
        assert all(x_SLT.equal(whole[row]) for row, x_SLT in other.items())
    other = crops(loader(dataset, "dali", augment=augment))
    assert other.keys() == whole.keys()
    for row, x_SLT in other.items():
        np.testing.assert_allclose(x_SLT.numpy(), whole[row].numpy(), atol=1e-6)
    first, second, *_ = whole.values()
    assert not (first == second).all() and (first == 0).all(-1).any()
    plain = crops(loader(dataset, augment=AugmentConfig(rlm=0.5)))
    added = next(iter(whole.values())) - next(iter(plain.values()))
    assert added.std() > 0.1  # of both
    swapped = AugmentConfig(extra=(dimmed, {"name": wandering, "amplitude": 0.1}), rlm=0.5)
    assert not next(iter(crops(loader(dataset, augment=swapped)).values())).equal(first)


GOLDEN_DRAWS = (0.93259937, 0.17879882, 0.19814938)


def test_what_an_own_augmentation_draws():
    """Saved runs depend on it. Nothing is drawn twice: not by two calls, halves, crops, functions or
    epochs."""

    def drawn(function=0, epoch=0, rows=(5, 9)):
        draw = Draw()
        places = Places(np.zeros(2, np.int16), np.array(rows), np.full(2, epoch))
        draw.set_crops(7, places, function)
        return torch.cat([draw.uniform(3), draw.uniform(3), draw.normal(3)], dim=-1)

    numbers = drawn()
    every = torch.cat([numbers, drawn(function=1), drawn(epoch=1)]).flatten().tolist()
    assert len(set(every)) == len(every) == 3 * 2 * 2 * 9
    assert drawn(rows=(9, 5)).equal(numbers.flip(0))
    np.testing.assert_allclose(numbers[0, 0, ::4], GOLDEN_DRAWS, rtol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_an_augmentation_may_draw_from_the_global_generators(threads, dataset, tmp_path):
    """Of torch, numpy and Python, which resuming does not restore. Those outside stay as they are."""
    (tmp_path / "mine.py").write_text(GLOBAL)
    augment = AugmentConfig(extra=f"{tmp_path}/mine.py:scaled")
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    whole = some(loader(dataset, augment=augment), 4)
    assert torch.get_rng_state().equal(before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    for draw in (torch.rand, np.random.rand, lambda _: random.random()):
        draw(1)
    resumed = some(loader(dataset, state=whole[1][1], augment=augment, threads=threads), 2)
    assert contents(whole[2:]) == contents(resumed)
    plain = some(loader(dataset, augment=AugmentConfig()), 4)
    scales = [
        x.x_BSLT.norm() / y.x_BSLT.norm() for (x, _), (y, _) in zip(whole, plain, strict=True)
    ]
    assert np.ptp(scales) > 0.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_world_size_gives_the_same_global_batches(backend, dataset):
    """And the same states, so that a run may be resumed at another one."""
    alone, world = some(loader(dataset, backend), 2), 4
    ranks = [some(loader(dataset, backend, rank=rank, world=world), 2) for rank in range(world)]
    for step, (batch, state) in enumerate(alone):
        together = torch.cat([taken[step][0].x_BSLT for taken in ranks])
        assert torch.equal(together, batch.x_BSLT)
        assert all(taken[step][1] == state for taken in ranks)


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
def test_a_state_of_another_run_is_refused(changes, named, dataset):
    state = some(loader(dataset), 1)[-1][1]
    with pytest.raises(ConfigError, match=named):
        loader(dataset, state=state, **changes)


AMPLE = AugmentConfig(noise="physio4", amplitude_mv=AmplitudeMv(emg=1.0))
TURNED = AugmentConfig(rlm=0, threekg=ThreeKG())
TURNED_ONLY = AugmentConfig(rlm=0, threekg=ThreeKG(time_mask=0.0))
FORGED = [{"recipe": recipe} for recipe in (None, [], {"datasets": ["0" * 64]})]
FORGED += [{"crops_seen": seen} for seen in (None, "16", -16, 8, True, 16.0, 2**64)]


def test_a_forged_state_is_refused_and_does_not_restart_the_run(dataset):
    state = some(loader(dataset), 1)[-1][1]
    for forged in ({}, *(state | change for change in FORGED)):
        with pytest.raises(ConfigError, match=r"\A.*\Z"):
            loader(dataset, state=forged)


ADDED = [
    ("views", {}, {"views": "window"}),
    ("windows", {}, {"windows": 2}),
    ("augment.padded", {}, {"augment": AugmentConfig(noise="physio4", padded=False, leads="3")}),
    ("augment.amplitude_mv.emg", {}, {"augment": AMPLE}),
    ("augment.threekg.time_mask", {"augment": TURNED}, {"augment": TURNED_ONLY}),
]


@pytest.mark.parametrize(("key", "how", "changed"), ADDED, ids=[key for key, *_ in ADDED])
def test_a_setting_that_is_newer_than_the_state_had_its_default(key, how, changed, dataset):
    """At every level: otherwise a new setting would end all older runs."""
    whole = some(loader(dataset, **how), 3)
    state = whole[0][1]
    *sections, name = key.split(".")
    del functools.reduce(operator.getitem, sections, state["recipe"])[name]
    assert contents(whole[1:]) == contents(some(loader(dataset, state=state, **how), 2))
    with pytest.raises(ConfigError, match=f"cannot resume: {sections[0] if sections else key}"):
        loader(dataset, state=state, **how | changed)


def test_a_setting_that_the_loader_no_longer_has_is_named(dataset):
    state = some(loader(dataset), 1)[0][1]
    state["recipe"]["augment"]["flip"] = 0.5
    with pytest.raises(ConfigError, match=r"augment\.flip changed from 0\.5 to None"):
        loader(dataset, state=state)


# As a loader wrote it before each augmentation had its own file
SAVED = """{"crops_seen": 16, "recipe": {"datasets": ["DATASET"], "roles": {"halves": 2},
"backend": "torch", "batch_crops": 16, "seed": 0, "views": "halves", "block_shards": 0, "weights":
null, "augment": {"rlm": 0.5, "rlm_keep_one": true, "noise": "physio4", "amplitude_mv": {"powerline":
0.5, "emg": 0.5, "wander": 0.5, "shift": 0.5}, "powerline_hz": 50, "powerline_components": 1,
"per_lead": false, "dependency": null, "threekg": null, "leads": "12", "padded": true, "extra": ""},
"windows": 0}}"""


def test_a_saved_state_and_the_settings_of_its_run_resume(dataset):
    state = json.loads(SAVED.replace("DATASET", dataset.fingerprint))
    augment = build_config({"augment": state["recipe"]["augment"]}).augment
    assert augment == AugmentConfig(noise="physio4", rlm_keep_one=True)
    whole = some(loader(dataset, augment=augment), 3)
    assert contents(whole[1:]) == contents(some(loader(dataset, state=state, augment=augment), 2))
    with pytest.raises(ConfigError, match=r"augment\.rlm_keep_one changed from True to False"):
        loader(dataset, state=state)


def digest(batch):
    return hashlib.sha256(batch.x_BSLT.numpy().tobytes()).hexdigest()


def batches_for_ever(url, backend, state):
    for batch, after in loader(Dataset.open(url), backend, state, batch_crops=32):
        print(json.dumps([digest(batch), after]), flush=True)


@pytest.mark.parametrize("backend", ["torch", "dali"])
def test_resuming_after_two_sigkills_with_prefetch_in_flight(backend, dataset, tmp_path):
    source = loader(dataset, backend, batch_crops=32)
    assert source.steps_per_epoch < 8  # of nine that are compared
    digests = [digest(batch) for batch, _ in some(source, 9)]
    seen = []
    state = None
    for life in range(3):
        out = tmp_path / f"{life}.txt"
        child = started(batches_for_ever, dataset.root.url, backend, state, out=out)
        until(lambda out=out: out.exists() and len(out.read_text().splitlines()) > 3)
        child.kill()
        child.join()
        for line in out.read_text().splitlines()[:3]:
            one, state = json.loads(line)
            seen.append(one)
    assert seen == digests


def test_the_window_lies_within_the_crop_and_differs_between_epochs(dataset):
    source = loader(dataset, views="window", augment=AugmentConfig(rlm=0))
    batch = some(source, 1)[0][0]
    assert torch.equal(batch.x_BSLT[:, 0], batch.x_BSLT[:, 1])
    starts = set()
    for crop, x_SLT in zip(crops_of(dataset, batch.places.row), batch.x_BSLT, strict=True):
        windows = torch.from_numpy(crop[7] / 1000.0).float().unfold(0, 2500, 1)
        distance = (windows - x_SLT[0, 7]).abs().amax(1)  # [2501]: one for each place
        assert distance.min() < 1e-5
        starts.add(int(distance.argmin()))
    assert len(starts) > 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_iterating_again_continues(backend, dataset):
    whole, source = some(loader(dataset, backend), 6), loader(dataset, backend)
    parts = [digest(batch) for _ in range(2) for batch, _ in islice(source, 3)]
    source.close()
    assert parts == [digest(batch) for batch, _ in whole]


def test_reading_threads_open_no_openmp_threads(dataset, monkeypatch):
    """They would take cores from the training step."""
    if not hasattr(ctypes.CDLL(None), "omp_set_num_threads"):
        pytest.skip("this torch does not show its OpenMP")
    seen, before, write = {}, torch.get_num_threads(), CropWriter.write

    def spy(*arguments):
        seen.setdefault(threading.current_thread().name, set()).add(torch.get_num_threads())
        write(*arguments)

    monkeypatch.setattr(CropWriter, "write", spy)
    torch.set_num_threads(2)
    some(loader(dataset, threads=2), 2)
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert seen == {"prefetch": {1}, "reader_0": {1}} and after == 2


@pytest.mark.parametrize(("backend", "leads"), [("torch", "12"), ("torch", "I"), ("dali", "12")])
def test_the_timer_reports_the_share_of_each_stage(backend, leads, dataset):
    source = loader(dataset, backend, augment=AugmentConfig(rlm=0.5, noise="emg", leads=leads))
    some(source, 3)
    facts = source.meter.snapshot()
    stages = ["plan", "read", "read_wait", "augment", "wait", *["gpu_wait"] * (backend == "dali")]
    names = {"crops_per_s", "data_bytes_per_s"} | {f"data_{stage}_pct" for stage in stages}
    assert set(facts) == names
    assert all(value > 0 for value in facts.values())
    assert facts["data_read_wait_pct"] <= facts["data_wait_pct"] <= 100
    assert source.meter.snapshot()["crops_per_s"] == 0


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (LoaderConfig, {"backend": "resident"}, "backend='resident': input should be 'auto'"),
        (LoaderConfig, {"threads": 0}, "threads=0: input should be greater"),
        (LoaderConfig, {"windows": -1}, "windows=-1: input should be greater"),
        (LoaderConfig, {"seed": 2**63}, "seed=9223372036854775808: input should be less"),
        (LoaderConfig, {"weights": [1, 2]}, r"weights=\[1, 2\]: .*: write weights=\(1, 2\)"),
        (
            LoaderConfig,
            {"noise": ["emg"]},
            r"noise=\['emg'\]: belongs to augment: write augment=AugmentConfig\(noise=...\)",
        ),
        (LoaderConfig, {"workers": 2}, "workers=2: no such setting: they are backend, "),
        (AugmentConfig, {"noise": ["emg"]}, r"noise=\['emg'\]: .*: write noise=\('emg',\)"),
        (AugmentConfig, {"noise": ("emg", ["x"])}, r"noise=\('emg', \['x'\]\): input should be"),
        (AugmentConfig, {"noise": {"a": {}}}, "noise=.*: input should be a valid string"),
        (AugmentConfig, {"rlm": float("nan")}, "rlm=nan: input should be a finite number"),
    ],
)
def test_invalid_settings_are_one_line(kind, settings, says):
    with pytest.raises(ConfigError, match=rf"\A{kind.__name__}: {says}[^\n]*\Z"):
        kind(**settings)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_gpu_and_cpu_give_the_same_tensors(backend, dataset):
    on_cpu = loader(dataset, augment=AugmentConfig(noise="powerline,wander,shift"))
    config = dataclasses.replace(on_cpu.config, backend=backend)
    on_gpu = Loader(config, (dataset,), torch.device("cuda", 0), Selection(halves=2))
    for (a, _), (b, _) in zip(some(on_gpu, 5), some(on_cpu, 5), strict=True):
        np.testing.assert_allclose(a.x_BSLT.cpu().numpy(), b.x_BSLT.numpy(), atol=1e-4)


class FakeUpload:
    """The copy to the GPU ends only when the host waits for it: until then its memory must not change."""

    def __init__(self, device):
        self.waits, self.host = 0, torch.empty(0)

    def __call__(self, host):
        self.host, self.copy = host, host.clone()
        return self.copy.clone()

    def wait(self):
        self.waits += 1
        time.sleep(0.02)  # in which a reading thread would overwrite it
        assert self.host.equal(self.copy)


def test_a_gpu_gets_the_same_batches_and_is_waited_for_before_its_memory_is_reused(
    dataset, monkeypatch
):
    on_cpu, made = some(loader(dataset), 8), []
    monkeypatch.setattr(
        executors, "Upload", lambda device: made.append(FakeUpload(device)) or made[0]
    )
    monkeypatch.setattr(module, "TorchOnCpu", executors.TorchOnGpu)
    on_gpu = some(loader(dataset, read_ahead=1), 8)
    for (one, _), (other, _) in zip(on_gpu, on_cpu, strict=True):
        assert torch.equal(one.x_BSLT, other.x_BSLT)
        assert one.places.row.tolist() == other.places.row.tolist()
    assert made[0].waits == 7


class FakeEvent:
    """Its kernels end only when the host waits for them."""

    def __init__(self):
        self.waited = False

    def record(self): ...

    def query(self):
        return self.waited

    def synchronize(self):
        self.waited = True


def test_a_dali_batch_is_let_go_when_the_gpu_has_read_it():
    flight = dali.InFlight(FakeEvent)
    for batch in "ab":
        flight.hold(batch)
        flight.release()
        flight.queued[0][0].waited = True
    assert [batch for _, batch in flight.queued] == ["b"]


class FakeDali:
    """Prefetches like DALI, and returns the position of each batch."""

    def __init__(self, feed):
        self.feed, self.ahead, self.streams = feed, [], []

    def build(self): ...

    def run(self, cuda_stream=None):
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
    kind, monkeypatch
):
    fed = []

    def feed():
        for position in count():
            fed.append(position)
            yield position, np.zeros((1, 12, 5000), np.int16), {}

    device = torch.device(kind, 1) if kind == "cuda" else CPU
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"torch's stream of {device}")
    monkeypatch.setattr(dali, "check_installed", lambda: None)
    made = lambda pipeline, *_: lambda: FakeDali(pipeline._feed_next)  # noqa: E731
    monkeypatch.setattr(dali.Pipeline, "_pipeline_function", made)
    augmenter = Augmenter(AugmentConfig(), "halves", 0, device)
    pipeline = dali.Pipeline(augmenter, feed(), 1, {})
    events = {}
    for _ in range(8):
        pipeline.release()
        if pipeline.in_flight:
            events |= {position: event for event, position in pipeline.in_flight.queued}
        position, _x = pipeline.next_batch()
        held = {int(arrays[0][0, 0]) for arrays in pipeline.fed_arrays}
        copied = set(range(position + 1))
        if pipeline.in_flight:
            copied = {done for done, event in events.items() if event.waited}
            pipeline.in_flight.hold(position)  # instead of the tensor
        assert set(fed) - copied <= held
    stream = "torch's stream of cuda:1" if kind == "cuda" else None
    assert pipeline.pipeline.streams == [stream] * 8


class HandedOver(Exception):
    """Raised with what torch asks of DALI's memory."""


class OnGpu:
    """DALI's tensor of a GPU, as far as torch looks at it on a machine without one."""

    def __init__(self, kind):
        self.kind = kind

    def __dlpack_device__(self):
        return self.kind, 1

    def __dlpack__(self, **asked):
        raise HandedOver(asked)


def test_torch_hands_dali_its_stream_with_the_memory(monkeypatch):
    """Else its kernels would read a batch before DALI's have written it. torch passes a stream if
    the device is CUDA by its own enumeration; DALI has another one."""
    backend = pytest.importorskip("nvidia.dali.backend_impl", reason="DALI is not installed")
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(dali.Pipeline, "__init__", lambda self: None)
    pipeline = dali.Pipeline()
    pipeline.device, x = torch.device("cuda", 1), OnGpu(backend.DLDeviceType.kDLCUDA)
    run = lambda cuda_stream: (None, SimpleNamespace(as_tensor=lambda: x))  # noqa: E731
    pipeline.pipeline = SimpleNamespace(run=run)
    with pytest.raises(HandedOver) as passed:
        pipeline.next_batch()
    assert passed.value.args[0]["stream"] == 7


def test_waiting_for_the_gpu_does_not_count_as_data_wait(dataset, monkeypatch):
    """With a clock that only the fake DALI advances: 6 s until the GPU has released a batch, 1 s to
    make the next one."""
    clock = [0.0]

    class Pipeline:
        def __init__(self, *arguments):
            self.feed = arguments[1]

        def release(self):
            clock[0] += 6

        def next_batch(self):
            clock[0] += 1
            step, crops, _ = next(self.feed)
            return step, torch.from_numpy(crops)

        def close(self): ...

    monkeypatch.setattr("omnilead.engine.data.dali.Pipeline", Pipeline)
    monkeypatch.setattr(
        "omnilead.engine.data.stage_timer.time", SimpleNamespace(perf_counter=lambda: clock[0])
    )
    source = loader(dataset, "dali", augment=AugmentConfig())
    some(source, 3)
    clock[0] += 9  # steps of the training
    facts = source.meter.snapshot()
    shares = [facts[f"data_{stage}_pct"] for stage in ("gpu_wait", "wait", "augment")]
    assert shares == pytest.approx([100 * 18 / 30, 100 * 3 / 30, 100 * 3 / 30])


def memory_grown(url):
    """Print by how many bytes each 4,000 batches raise the memory of a process of their own, in
    which no other test's threads and garbage come and go."""
    source = loader(Dataset.open(url), batch_crops=2, augment=AugmentConfig(noise="powerline"))
    batches, process = iter(source), psutil.Process()
    for _ in range(4):
        before = process.memory_info().rss
        for _ in islice(batches, 4_000):
            pass
        print(process.memory_info().rss - before)
    source.close()


def test_memory_is_flat_over_ten_thousand_batches(dataset, tmp_path):
    out = tmp_path / "grown.txt"
    child = started(memory_grown, dataset.root.url, out=out)
    child.join()
    _, *grown = map(int, out.read_text().split())
    assert child.exitcode == 0
    # The first 4,000 fill caches. A leak shows every time; the allocator may keep some pages once
    assert min(grown) < 3 * 2**20
