"""Batches for training, and the state to resume from: the main interface of engine.data.

    order -> CropReader (threads, read ahead) -> parameters (counter-based) -> views, augmentations
    -> (batch, state)

    loader = Loader(LoaderConfig(), (Dataset.open("DATASET"),), device=torch.device("cuda"), pretrain=True)
    for batch, state in loader:               # endless; an epoch has steps_per_epoch batches
        ...                                   # save this state with the model that was trained on the batch
    Loader(..., state=state)                  # resumes with the next batch, bit for bit

Backends: `torch` (the reference, and fast on a CPU), `dali` (GPU), `resident` (the dataset in
device memory, 120,000 bytes per crop, so that input costs nothing). `auto` is DALI on a GPU and
torch without one.
"""

import dataclasses
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import count, repeat
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from omnilead.data_tools.cli import keep_freed_memory
from omnilead.data_tools.dataset import CROP_BYTES, CROP_SHAPE, Dataset
from omnilead.engine.common import ConfigError
from omnilead.engine.data import dali
from omnilead.engine.data.augment import STRICT, AugmentConfig
from omnilead.engine.data.augment_draws import Params
from omnilead.engine.data.augmenter import (
    CHUNK,
    HALF,
    Augmenter,
    Tensors,
    Views,
    Write,
    measured_leads,
    parameters,
    single_threaded,
)
from omnilead.engine.data.device import Resident, Upload
from omnilead.engine.data.extra import ExtraAugmentation
from omnilead.engine.data.order import DatasetRows, Order, Places, shards_needed
from omnilead.engine.data.reader import BadCrop, CropReader, Desk, Report, prefetch
from omnilead.engine.data.staging import Staging

PLANNED_CROPS = 1024  # planned at a time, to share the overhead of numpy calls
# on a CPU, small batches are read together, so that reads lie closer: a third less time at 64 crops
READ_CROPS = 256
THREADS = {
    "cpu": 1,
    "cuda": 2,
}  # a second thread costs a CPU a third more time per crop; it halves the wait for a cold disk
State = dict[str, Any]
log = logging.getLogger(__name__)


@checked_dataclass(frozen=True, config=STRICT)
class PipelineConfig:
    """The section `pipeline` of the settings: how crops are loaded."""

    backend: Literal["auto", "dali", "torch", "resident"] = (
        "auto"  # auto: dali on a GPU; resident: keep data in GPU memory
    )
    views: Views = (
        "halves"  # the pair to contrast: the two halves of a crop, or two views of one window
    )
    # 0: shuffle the whole dataset; G: shuffle G shards at a time, for remote data and slow disks
    block_shards: Annotated[int, Field(ge=0)] = 0
    weights: tuple[float, ...] | None = None  # sampling weights of several datasets; None: by size
    source: Literal["tar", "zarr"] | None = None  # format to read if a dataset has both; null: tar
    check: Literal["first", "always", "never"] = (
        "first"  # verify a crop's checksum at its first read, at every read, or never
    )
    on_corrupt: Literal["stop", "skip"] = (
        "stop"  # stop at a crop that cannot be read, or skip and count it
    )
    threads: Annotated[int | None, Field(ge=1)] = None  # reading threads; None: 1, on a GPU 2
    read_ahead: Annotated[int, Field(ge=1)] = 2  # minimum number of prefetched batches
    cache_dir: str | None = None  # local cache directory for datasets on s3://
    cache_bytes: int = 100 * 2**30  # size limit of cache_dir


@checked_dataclass(frozen=True, config=STRICT)
class LoaderConfig(PipelineConfig):
    """The section `pipeline` and the settings of other sections that the loader needs."""

    batch_crops: int = 512  # over all ranks
    micro_batch: Annotated[int | None, Field(ge=1)] = (
        None  # crops of a rank contrasted at a time; None: its whole share
    )
    seed: Annotated[int, Field(ge=0)] = 0
    augment: AugmentConfig = field(default_factory=AugmentConfig)


@dataclass(frozen=True, eq=False)
class Batch:
    # float32 millivolts on the device; on a CPU (except dali) a buffer that later batches overwrite
    x_BSLT: torch.Tensor
    places: Places  # dataset, row and epoch of each crop
    skipped: tuple[BadCrop, ...] = ()  # unreadable crops that were replaced


class Planned(NamedTuple):
    """One or several batches before they are read."""

    places: Places
    p: Params

    def part(self, these: slice) -> "Planned":
        return Planned(self.places[these], {name: values[these] for name, values in self.p.items()})


class StageTimer:
    """Profile of a loader: how long each stage was busy since the last `snapshot`, in percent of
    the time.

    plan        choosing crops and drawing their augmentation parameters
    read        reading and verifying crops; with torch on a CPU also `augment`, as the reading threads make the tensors
    read_wait   waiting for the prefetching thread
    augment     making the model's input, summed over threads
    wait        training waits for a batch
    gpu_wait    the loader waits for a GPU that still reads earlier batches (DALI); not part of `wait`
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.crops, self._since, self._busy_s = (
            0,
            time.perf_counter(),
            defaultdict[str, float](float),
        )

    @contextmanager
    def timed(self, stage: str, without: str = "") -> Iterator[None]:
        """`without`: a nested stage in the same thread, whose time is subtracted."""
        other, began = self._busy_s.get(without, 0.0), time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - began - (self._busy_s.get(without, 0.0) - other))

    def add(self, stage: str, seconds: float) -> None:
        self._busy_s[stage] += seconds

    def pause(self, seconds: float) -> None:
        """Leave out time that was not training, such as validation."""
        self._since += seconds

    def snapshot(self) -> dict[str, float]:
        seconds, crops = max(time.perf_counter() - self._since, 1e-9), self.crops
        shares = {
            f"data_{stage}_pct": 100 * busy / seconds
            for stage, busy in sorted(self._busy_s.copy().items())
        }
        self.restart()
        return {
            "crops_per_s": crops / seconds,
            "data_bytes_per_s": crops * CROP_BYTES / seconds,
            "data_wait_pct": 0.0,
        } | shares


class Loader:
    """Loads one rank's share of every global batch."""

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
        rows: Sequence[np.ndarray] = (),
        **roles: Any,
    ) -> None:
        """`step`: where to start without a `state`. `spare_bytes`: memory that `resident` leaves
        free on a GPU. Select crops by `rows` of each dataset, or by `roles` as in
        DatasetRows.of."""
        self.config, self.device, self.rank, self.world, self.spare_bytes = (
            config,
            device,
            rank,
            world,
            spare_bytes,
        )
        self.backend: str = config.backend
        if self.backend == "auto":
            self.backend = "dali" if device.type == "cuda" and not config.augment.extra else "torch"
            log.info(
                "pipeline.backend=auto: %s, because the device is %s", self.backend, device.type
            )
        self.extra = (
            ExtraAugmentation(config.augment.extra, config.seed, rank, device)
            if config.augment.extra
            else None
        )
        if self.extra and self.backend == "dali":
            raise ConfigError(
                f"pipeline.backend=dali: cannot run augment.extra={config.augment.extra}: use "
                "torch or resident"
            )
        given = {"rows": [sha256(mine.tobytes()).hexdigest() for mine in rows]} if rows else {}
        parts = tuple(
            DatasetRows.of(dataset, rows=mine, **roles)
            for dataset, mine in zip(datasets, rows or repeat(None), strict=False)
        )
        self.order = Order(
            parts, config.batch_crops, config.seed, config.weights, config.block_shards
        )
        self.order.slice(
            0, rank, world, micro=config.micro_batch
        )  # fail early if the batch cannot be divided
        self.crops = config.batch_crops // world
        self.recipe = self._recipe(datasets, roles | given)
        self.step = step if state is None else resumed_step(state, self.recipe, config.batch_crops)
        self._blob = None if state is None else state["dali"]
        self.measured = measured_leads(datasets) if config.augment.changes_zeros else None
        self.augmenter = Augmenter(config.augment, config.views, config.seed, device)
        self.staging = self._staging(datasets)
        self.threads, pin = config.threads or THREADS.get(device.type, 2), device.type == "cuda"
        self.reader = CropReader(
            datasets,
            config.check,
            config.on_corrupt,
            self.threads,
            pin,
            config.source,
            self.staging,
            parts,
        )
        self.meter = StageTimer()

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    def close(self) -> None:
        if self.staging:  # close it first: a reader may be waiting for a shard
            self.staging.close()
        self.reader.close()

    def __iter__(self) -> Iterator[tuple[Batch, State]]:
        torch_backend = self._by_cpu if self.device.type == "cpu" else self._by_gpu
        batches = {"torch": torch_backend, "dali": self._dali, "resident": self._resident}[
            self.backend
        ]()
        while True:
            with self.meter.timed("wait", without="gpu_wait"):
                batch, blob = next(batches)
            if self.extra:
                with self.meter.timed("augment"):
                    batch = dataclasses.replace(batch, x_BSLT=self.extra(batch.x_BSLT, self.step))
            self.meter.crops += len(batch.places)
            self.step += 1
            yield (
                batch,
                {
                    "crops_seen": self.step * self.config.batch_crops,
                    "recipe": self.recipe,
                    "dali": blob,
                },
            )

    def _planned(self, together: int = 1) -> Iterator[Planned]:
        """Plan `together` batches at a time."""
        crops = together * self.crops
        steps = max(1, PLANNED_CROPS // crops) * together
        for first in count(self.step, steps):
            with self.meter.timed("plan"):
                places = self.order.slice(
                    first, self.rank, self.world, steps, self.config.micro_batch
                )
                planned = Planned(places, self._parameters(places))
            yield from map(planned.part, _slices(len(places), crops))

    def _parameters(self, places: Places) -> Params:
        return parameters(
            self.config.augment, self.config.views, self.config.seed, places, self.measured
        )

    def _as_read(self, planned: Planned, report: Report) -> Planned:
        """Draw the parameters again if bad crops were replaced: they depend on the row."""
        if not report.skipped:
            return planned
        places = dataclasses.replace(planned.places, row=report.row)
        return Planned(places, self._parameters(places))

    def _ahead(
        self, make: Callable[[Planned, torch.Tensor], Iterable[Batch]], together: int = 1
    ) -> Iterator[tuple[Batch, None]]:
        """Prefetch batches in a thread on a CPU, `together` at a time."""
        keep_freed_memory()
        shape = (together * self.crops, 2, len(self.config.augment.output_leads), HALF)
        outs = [torch.empty(shape) for _ in range(1 - -self.config.read_ahead // together)]
        with closing(prefetch(self._planned(together), make, outs)) as ahead:
            while True:
                with self.meter.timed("read_wait"):
                    batches = next(ahead)
                yield from ((batch, None) for batch in batches)

    def _by_cpu(self) -> Iterator[tuple[Batch, None]]:
        """The thread that reads crops also turns them into tensors, while they are in its core's
        cache."""
        remote = self.staging is not None

        def make(planned: Planned, x_BSLT: torch.Tensor) -> Iterable[Batch]:
            single_threaded()
            with self.meter.timed("augment"):
                writer = self.augmenter.writer(self.augmenter.to_device(planned.p), x_BSLT)
            with self.meter.timed("read"):
                desk = partial(self._desk, planned, x_BSLT, writer)
                report = self.reader.read(planned.places, desk, late=True)
            places = dataclasses.replace(planned.places, row=report.row)
            parts = _slices(len(places), self.crops)
            return (Batch(x_BSLT[part], places[part], report.part(part).skipped) for part in parts)

        return self._ahead(make, 1 if remote else max(1, READ_CROPS // self.crops))

    def _desk(
        self, planned: Planned, x_BSLT: torch.Tensor, writer: Callable[[torch.Tensor], Write]
    ) -> Desk:
        single_threaded()
        crops = torch.empty(
            (1 if self.augmenter.by_crop else CHUNK, *CROP_SHAPE), dtype=torch.int16
        )
        write, asked = writer(crops), planned.places.row.tolist()

        def make(positions: list[int], rows: list[int]) -> None:
            began = time.perf_counter()
            if rows == [asked[position] for position in positions]:
                write(range(len(rows)), positions)
            else:  # a replacement of a bad crop always comes alone
                this = slice(positions[0], positions[0] + 1)
                p = self._parameters(dataclasses.replace(planned.places[this], row=np.array(rows)))
                self.augmenter.writer(self.augmenter.to_device(p), x_BSLT[this])(crops)([0], [0])
            self.meter.add("augment", time.perf_counter() - began)

        return Desk(crops.numpy(), make)

    def _read(self, in_use: int = 1) -> Generator[tuple[Planned, np.ndarray, Report], None, None]:
        def fill(planned: Planned, crops: np.ndarray) -> tuple[Planned, np.ndarray, Report]:
            with self.meter.timed("read"):
                return planned, crops, self.reader.read(planned.places, crops)

        buffers = self.reader.buffers(self.config.read_ahead + in_use, self.crops)
        return prefetch(self._planned(), fill, buffers, in_use)

    def _by_gpu(self) -> Iterator[tuple[Batch, None]]:
        upload = Upload(self.device)
        with closing(self._read()) as read:
            while True:
                with self.meter.timed("read_wait"):
                    # before next(read), which returns the last batch's buffer to the reader
                    upload.wait()
                    planned, crops, report = next(read)
                with self.meter.timed("augment"):
                    places, p = self._as_read(planned, report)
                    x = self.augmenter(upload(torch.from_numpy(crops)), self.augmenter.to_device(p))
                yield Batch(x, places, report.skipped), None

    def _resident(self) -> Iterator[tuple[Batch, None]]:
        with self.meter.timed("read"):
            resident = Resident(self.order, self.reader, self.augmenter, self.spare_bytes)

        def plan(planned: Planned, _: Any = None) -> tuple[Tensors, Places, Report]:
            if self.device.type == "cuda":
                torch.cuda.set_device(
                    self.device
                )  # per thread; otherwise memory would be pinned for another GPU
            with self.meter.timed("plan"):
                index, report = resident.find(planned.places)
                places, p = self._as_read(planned, report)
                return self.augmenter.pinned({"index": index} | p), places, report

        def make(planned: Planned, out: torch.Tensor) -> list[Batch]:
            single_threaded()
            mine, places, report = plan(planned)
            with self.meter.timed("augment"):
                return [Batch(resident.write(mine, out), places, report.skipped)]

        if self.device.type == "cpu":
            yield from self._ahead(make)
        with closing(
            prefetch(self._planned(), plan, range(self.config.read_ahead + 1))
        ) as plans:  # slower than a batch
            while True:
                with self.meter.timed("read_wait"):
                    mine, places, report = next(plans)
                with self.meter.timed("augment"):
                    x = resident.batch(mine)
                yield Batch(x, places, report.skipped), None

    def _dali(self) -> Iterator[tuple[Batch, str]]:
        """DALI prefetches, so the places of a batch are kept until DALI returns it."""
        given: dict[int, tuple[Places, tuple[BadCrop, ...]]] = {}
        read = self._read(in_use=dali.IN_USE)

        def feed() -> Generator[tuple[int, np.ndarray, Params], None, None]:
            for step in count(self.step):
                with self.meter.timed("read_wait"):
                    planned, crops, report = next(read)
                places, p = self._as_read(planned, report)
                given[step] = places, report.skipped
                yield step, crops, p

        example = self._parameters(self.order.slice(0, self.rank, self.world))
        seed = self.config.seed * 65_537 + self.rank
        with closing(read), closing(feed()) as fed:
            pipeline = dali.Pipeline(
                self.config.augment,
                self.config.views,
                seed,
                fed,
                self.crops,
                example,
                self.device,
                self.threads,
                self._blob,
            )
            with closing(pipeline):
                while True:
                    with self.meter.timed("gpu_wait"):
                        pipeline.release()
                    with self.meter.timed("augment", without="read_wait"):
                        step, x = pipeline.run()
                    places, skipped = given.pop(step)
                    self._blob = pipeline.checkpoint()
                    yield Batch(x, places, skipped), self._blob

    def _staging(self, datasets: Sequence[Dataset]) -> Staging | None:
        remote = {
            d: one
            for d, one in enumerate(datasets)
            if self.config.source != "zarr" and one.root.remote and one.shards
        }
        if not remote:
            return None
        cache_dir, together = self.config.cache_dir, self.config.block_shards
        if not cache_dir or not together:
            raise ConfigError(
                "a dataset on s3:// is read through a cache: set pipeline.cache_dir, and "
                "pipeline.block_shards to 1 or more"
            )
        needed = shards_needed(self.order, self.step * self.config.batch_crops)
        order = (key for key in needed if key[0] in remote)
        return Staging(
            remote,
            cache_dir,
            self.config.cache_bytes,
            order,
            together,
            max(4, together) * len(remote),
        )

    def _recipe(self, datasets: Sequence[Dataset], roles: dict[str, Any]) -> dict[str, Any]:
        """Everything besides `crops_seen` that determines the next batch, as JSON."""
        augment = json.loads(json.dumps(dataclasses.asdict(self.config.augment)))
        recipe = {
            "datasets": [dataset.fingerprint for dataset in datasets],
            "roles": {name: value for name, value in sorted(roles.items()) if value is not None},
            "backend": self.backend,
            "batch_crops": self.config.batch_crops,
            "seed": self.config.seed,
            "views": self.config.views,
            "block_shards": self.config.block_shards,
            "weights": list(self.config.weights) if self.config.weights else None,
            "augment": {
                name: value for name, value in augment.items() if name != "extra" or value
            },  # older recipes lack it
        }
        if (
            self.backend == "dali"
        ):  # its generator state is only valid for the same version, rank and world size
            recipe |= {"dali_version": dali.version(), "rank": self.rank, "world": self.world}
        return recipe


def resumed_step(state: State, recipe: dict[str, Any], batch_crops: int) -> int:
    """The step to resume at. Raises if `state` is from a run with another recipe."""
    then, seen, blob = state.get("recipe"), state.get("crops_seen"), state.get("dali", 0)
    if not isinstance(then, dict):
        raise ConfigError("cannot resume: the loader's state has no recipe: start a new run")
    before: Any = then
    now: Any = recipe
    path: list[str] = []
    while (
        isinstance(before, dict) and isinstance(now, dict) and before != now
    ):  # find the innermost key that differs
        path.append(
            next(
                key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)
            )
        )
        before, now = before.get(path[-1]), now.get(path[-1])
    if path:
        raise ConfigError(
            f"cannot resume: {'.'.join(path)} changed from {str(before)[:200]} to {now}: set it "
            "back"
        )
    if type(seen) is not int or not 0 <= seen < 2**63 or seen % batch_crops:
        raise ConfigError(
            f"cannot resume: crops_seen={str(seen)[:40]} is not a whole number of batches: start "
            "a new run"
        )
    if blob is not None and not (isinstance(blob, str) and blob):
        raise ConfigError(
            f"cannot resume: dali={str(blob)[:40]!r} is not a state of DALI's generator: start a "
            "new run"
        )
    return seen // batch_crops


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(at, at + size) for at in range(0, count, size))
