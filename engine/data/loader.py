"""Batches for training, and the state to go on from: the one face of the pipelines.

    order -> gather (threads, read ahead) -> parameters (counter-based) -> views, augmentations on the device -> (batch, state)

    loader = Loader(LoaderConfig(), (Dataset.open("DATASET"),), device=torch.device("cuda"), pretrain=True)
    for batch, state in loader:               # without end; steps_per_epoch says how long an epoch is
        ...                                   # state belongs to this batch: save it beside the model that has seen it
    Loader(..., state=state)                  # the batch after it, bit for bit, after any kill

Backends: `torch` (reference, and the fast path on a CPU), `dali` (GPU), `resident` (the dataset in device memory); `auto` takes
DALI where there is a GPU and torch where there is none.
"""

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from data_tools.cli import keep_freed_memory
from data_tools.dataset import CROP_SHAPE, Dataset
from engine.data import dali
from engine.data.augment import AugmentConfig
from engine.data.augment_draws import Params
from engine.data.augmenter import HALF, Augmenter, MakeCrop, Views, alone, parameters
from engine.data.meter import StageTimer
from engine.data.missing_leads import measured
from engine.data.order import DatasetRows, Order, Places, shards_needed
from engine.data.prefetch import Filled, made_ahead, read_ahead
from engine.data.reader import Bad, CropReader, Desk, Hold, Report
from engine.data.resident import Plan, Resident
from engine.data.staging import Staging
from engine.data.state import LoaderError, State, resumed_step
from engine.data.transfer import Upload

BACKENDS = ("auto", "dali", "torch", "resident")
PLANNED_CROPS = 1024
READ_CROPS = 256  # at once, of small batches together: their places in a file lie closer, and a call's own cost is shared
THREADS = {"cpu": 1, "cuda": 2}  # a second one costs a CPU a third more for each crop; it halves the wait for a cold disk
Make = Callable[["Planned", torch.Tensor], Iterable["Batch"]]  # into a buffer
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoaderConfig:
    backend: Literal["auto", "dali", "torch", "resident"] = "auto"
    batch_crops: int = 512  # of all ranks together
    micro_batch: int | None = None  # crops of a rank that meet those of the others at a time; None: all of its share
    seed: int = 0
    views: Views = "halves"
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    block_shards: int = 0  # 0: every crop of the dataset may meet every other; G: those of G shards, for data far away
    weights: tuple[float, ...] | None = None  # of several datasets; None: by size
    source: Literal["tar", "zarr"] | None = None
    check: Literal["first", "always", "never"] = "first"
    on_corrupt: Literal["stop", "skip"] = "stop"
    threads: int | None = None  # that read; None: THREADS
    read_ahead: int = 2  # batches ready beside the one in use, at least: small ones come several at once
    cache_dir: str | None = None  # for datasets on s3://
    cache_bytes: int = 100 * 2**30

    def __post_init__(self) -> None:
        for name, known in (
            ("backend", BACKENDS),
            ("views", ("halves", "window")),
            ("check", ("first", "always", "never")),
            ("on_corrupt", ("stop", "skip")),
        ):
            if getattr(self, name) not in known:
                raise LoaderError(f"pipeline.{name}={getattr(self, name)!r}: use one of {', '.join(known)}")
        for name in ("threads", "read_ahead", "micro_batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise LoaderError(f"pipeline.{name}={value}: at least 1 is needed")


@dataclass(frozen=True, eq=False)
class Batch:
    x_BSLT: torch.Tensor  # float32 millivolts on the device; on a CPU (not dali) in a buffer that later batches use again
    places: Places  # dataset, row and epoch of each crop
    skipped: tuple[Bad, ...] = ()  # crops left out as unreadable


class Planned(NamedTuple):
    """A batch before it is read, or several."""

    places: Places
    p: Params

    def part(self, these: slice) -> "Planned":
        return Planned(self.places[these], {name: values[these] for name, values in self.p.items()})

    @property
    def dataset(self) -> np.ndarray:
        return self.places.dataset

    @property
    def row(self) -> np.ndarray:
        return self.places.row


def resolve(backend: str, device: torch.device) -> str:
    """`auto` in full, and why."""
    if backend != "auto":
        return backend
    chosen = "dali" if device.type == "cuda" else "torch"
    log.info("pipeline.backend=auto: %s, because the device is %s", chosen, device.type)
    return chosen


class Loader:
    """One rank's share of every global batch."""

    def __init__(
        self,
        config: LoaderConfig,
        datasets: Sequence[Dataset],
        device: torch.device,
        rank: int = 0,
        world: int = 1,
        state: State | None = None,
        step: int = 0,
        spare_bytes: float = 0,
        **roles: Any,
    ) -> None:
        """`step`: where to begin without a `state`. `spare_bytes`: memory that `resident` leaves free on a GPU. `roles`: which
        crops take part, as DatasetRows.of has it."""
        self.config, self.device, self.rank, self.world, self.spare_bytes = config, device, rank, world, spare_bytes
        self.backend = resolve(config.backend, device)
        rows = tuple(DatasetRows.of(dataset, **roles) for dataset in datasets)
        self.order = Order(rows, config.batch_crops, config.seed, config.weights, config.block_shards)
        self.order.slice(0, rank, world, micro=config.micro_batch)  # says now what cannot be
        self.crops = config.batch_crops // world
        self.together = 1 if any(one.root.remote for one in datasets) else max(1, READ_CROPS // self.crops)  # batches
        self.recipe = self._recipe(datasets, roles)
        self.step = step if state is None else resumed_step(state, self.recipe, config.batch_crops)
        self._blob = None if state is None else state["dali"]
        self.measured = measured(datasets) if config.augment.changes_zeros else None
        self.augmenter = Augmenter(config.augment, config.views, config.seed, device)
        self.stagings = self._stagings(datasets)
        staged: dict[int, Hold] = {d: staging.hold for d, staging in self.stagings.items()}
        self.threads, pin = config.threads or THREADS.get(device.type, 2), device.type == "cuda"
        self.meter = StageTimer()
        self.gather = CropReader(
            datasets, config.check, config.on_corrupt, self.threads, pin, config.source, staged, rows, self.meter
        )

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    def close(self) -> None:
        for staging in self.stagings.values():  # first: a reader may wait for a shard
            staging.close()
        self.gather.close()

    def __iter__(self) -> Iterator[tuple[Batch, State]]:
        batches = {"torch": self._torch, "dali": self._dali, "resident": self._resident}[self.backend]()
        while True:
            with self.meter.timed("wait", without="gpu_wait"):
                batch, blob = next(batches)
            self.meter.done(len(batch.places))
            self.step += 1
            yield batch, {"crops_seen": self.step * self.config.batch_crops, "recipe": self.recipe, "dali": blob}

    def _planned(self, together: int = 1) -> Iterator[Planned]:
        """So many batches at a time, planned many at once: the same numpy calls, whose cost is that of being called."""
        crops = together * self.crops
        steps = max(1, PLANNED_CROPS // crops) * together
        for first in count(self.step, steps):
            with self.meter.timed("plan"):
                places = self.order.slice(first, self.rank, self.world, steps, self.config.micro_batch)
                planned = Planned(places, self._parameters(places))
            yield from map(planned.part, _slices(len(places), crops))

    def _filled(self, in_use: int = 1) -> Generator[Filled[Planned], None, None]:
        """Batches whose last `in_use` stand."""
        groups, depth = 1 - (1 - in_use) // self.together, -(-self.config.read_ahead // self.together)
        shape = (self.together * self.crops, *CROP_SHAPE)
        ahead = read_ahead(self._planned(self.together), self.gather, shape, depth, groups, late=True)
        with closing(ahead):
            for planned, crops, report in ahead:
                for these in _slices(len(crops), self.crops):
                    yield Filled(planned.part(these), crops[these], report.part(these))

    def _parameters(self, places: Places) -> Params:
        return parameters(self.config.augment, self.config.views, self.config.seed, places, self.measured)

    def _as_read(self, planned: Planned, report: Report) -> Planned:
        """A crop that came in the place of another has parameters of its own."""
        if not report.skipped:
            return planned
        places = dataclasses.replace(planned.places, row=report.row)
        return Planned(places, self._parameters(places))

    def _torch(self) -> Iterator[tuple[Batch, None]]:
        if self.device.type == "cpu" and self.augmenter.by_crop:
            yield from self._by_crop()
            return
        filled = self._filled()
        outs = cycle(self._outs(2 if self.device.type == "cpu" else 0))  # a GPU's allocator keeps its own
        upload = Upload(self.device) if self.device.type == "cuda" else None
        try:
            while True:
                with self.meter.timed("read_wait"):
                    if upload:
                        upload.wait()  # asking for the next batch gives the last one's buffer back
                    planned, crops, report = next(filled)
                with self.meter.timed("augment"):
                    places, drawn = self._as_read(planned, report)
                    p = self.augmenter.to_device(drawn)
                    if upload:
                        x = self.augmenter(upload(torch.from_numpy(crops)), p)
                    else:
                        x = self.augmenter.into(torch.from_numpy(crops), p, next(outs))
                yield Batch(x, places, report.skipped), None
        finally:
            filled.close()

    def _by_crop(self) -> Iterator[tuple[Batch, None]]:
        """Each crop by the thread that reads it, out of its core's cache."""

        def make(planned: Planned, x_BSLT: torch.Tensor) -> Iterable[Batch]:
            alone()
            with self.meter.timed("augment"):
                make_crop = self._crop_maker(planned)
            took_s: list[float] = []
            desk = partial(self._desk, planned, x_BSLT, make_crop, took_s)
            report = self.gather.read(planned.dataset, planned.row, desk, late=True)
            self.meter.add("augment", sum(took_s))
            places = dataclasses.replace(planned.places, row=report.row)
            parts = _slices(len(places), self.crops)
            return (Batch(x_BSLT[part], places[part], report.part(part).skipped) for part in parts)

        return self._made(make, self.together)

    def _made(
        self, make: Callable[[Planned, torch.Tensor], Iterable[Batch]], together: int = 1
    ) -> Iterator[tuple[Batch, None]]:
        """Ahead, so many at a time, in a thread beside the training."""
        keep_freed_memory()
        ahead = made_ahead(self._planned(together), make, self._outs(1 - -self.config.read_ahead // together, together))
        try:
            while True:
                with self.meter.timed("read_wait"):
                    batches = next(ahead)
                yield from ((batch, None) for batch in batches)
        finally:
            ahead.close()

    def _desk(self, planned: Planned, x_BSLT: torch.Tensor, make: MakeCrop, took_s: list[float]) -> Desk:
        alone()
        crop = torch.empty(CROP_SHAPE, dtype=torch.int16)
        halves_SLT, rows, outs = self.augmenter.split(crop[None])[0], planned.row.tolist(), x_BSLT.unbind()

        def done(position: int, row: int) -> None:
            began = time.perf_counter()
            if row == rows[position]:
                make(position, halves_SLT, outs[position])
            else:  # it came in the place of another, and has parameters of its own
                at = dataclasses.replace(planned.places[position : position + 1], row=np.array([row]))
                self._crop_maker(Planned(at, self._parameters(at)))(0, halves_SLT, outs[position])
            took_s.append(time.perf_counter() - began)

        read = crop.numpy()
        return Desk(lambda position: read, done)

    def _crop_maker(self, planned: Planned) -> MakeCrop:
        return self.augmenter.crop_maker(self.augmenter.to_device(planned.p), len(planned.row))

    def _outs(self, count: int, together: int = 1) -> list[torch.Tensor]:
        shape = (together * self.crops, 2, len(self.config.augment.output_leads), HALF)
        return [torch.empty(shape) for _ in range(count)]

    def _resident(self) -> Iterator[tuple[Batch, None]]:
        resident = Resident(self.order, self.gather, self.augmenter, self.spare_bytes)

        def plan(planned: Planned, _: Any = None) -> tuple[Plan, Places, Report]:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread, or memory would be pinned for another GPU
            with self.meter.timed("plan"):
                report = resident.report(planned.places)
                places, drawn = self._as_read(planned, report)
                return resident.plan(places, drawn), places, report

        def make(planned: Planned, out: torch.Tensor) -> list[Batch]:
            alone()
            mine, places, report = plan(planned)
            with self.meter.timed("augment"):
                return [Batch(resident.batch(mine, out), places, report.skipped)]

        if self.device.type == "cpu":
            yield from self._made(make)
            return
        plans = made_ahead(self._planned(), plan, range(self.config.read_ahead + 1))  # which take longer than the batches
        try:
            while True:
                with self.meter.timed("read_wait"):
                    mine, places, report = next(plans)
                with self.meter.timed("augment"):
                    x = resident.batch(mine)
                yield Batch(x, places, report.skipped), None
        finally:
            plans.close()

    def _dali(self) -> Iterator[tuple[Batch, str]]:
        """DALI asks ahead; what it was given is kept until its batch comes out."""
        ahead: dict[int, tuple[Places, tuple[Bad, ...]]] = {}
        filled = self._filled(in_use=dali.IN_USE)

        def feed() -> Iterator[tuple[int, np.ndarray, Params]]:
            for step in count(self.step):
                with self.meter.timed("read_wait"):
                    planned, crops, report = next(filled)
                places, p = self._as_read(planned, report)
                ahead[step] = places, report.skipped
                yield step, crops, p

        example = self._parameters(self.order.slice(0, self.rank, self.world))
        seed = self.config.seed * 65_537 + self.rank
        fed = feed()
        pipeline = dali.Pipeline(
            self.config.augment, self.config.views, seed, fed, self.crops, example, self.device, self.threads, self._blob
        )
        try:
            while True:
                with self.meter.timed("gpu_wait"):
                    pipeline.release()
                with self.meter.timed("augment", without="read_wait"):
                    step, x = pipeline.run()
                places, skipped = ahead.pop(step)
                self._blob = pipeline.checkpoint()
                yield Batch(x, places, skipped), self._blob
        finally:
            pipeline.close()
            fed.close()  # type: ignore[attr-defined]
            filled.close()

    def _stagings(self, datasets: Sequence[Dataset]) -> dict[int, Staging]:
        in_tar = self.config.source != "zarr"
        far = [d for d, dataset in enumerate(datasets) if in_tar and dataset.root.remote and dataset.shards]
        if not far:
            return {}
        if not self.config.cache_dir or not self.config.block_shards:
            raise LoaderError(
                "a dataset on s3:// needs pipeline.cache_dir, and pipeline.block_shards of 1 or more to be staged"
            )
        stagings = {d: self._staging(d, datasets[d]) for d in far}
        for d, staging in stagings.items():
            staging.beside = [other for o, other in stagings.items() if o != d]
        return stagings

    def _staging(self, number: int, dataset: Dataset) -> Staging:
        needed = shards_needed(self.order, number, self.step * self.config.batch_crops)
        together = self.config.block_shards
        return Staging(dataset, str(self.config.cache_dir), self.config.cache_bytes, max(4, together), needed, together)

    def _recipe(self, datasets: Sequence[Dataset], roles: dict[str, Any]) -> dict[str, Any]:
        """All that the next batch depends on besides `crops_seen`, in words."""
        recipe = {
            "datasets": [dataset.fingerprint for dataset in datasets],
            "roles": {name: value for name, value in sorted(roles.items()) if value is not None},
            "backend": self.backend,
            "batch_crops": self.config.batch_crops,
            "seed": self.config.seed,
            "views": self.config.views,
            "block_shards": self.config.block_shards,
            "weights": list(self.config.weights) if self.config.weights else None,
            "augment": json.loads(json.dumps(dataclasses.asdict(self.config.augment))),
        }
        if self.backend == "dali":  # its generator's state is of one version, and of one rank of so many
            recipe |= {"dali_version": dali.version(), "rank": self.rank, "world": self.world}
        return recipe


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(at, at + size) for at in range(0, count, size))
