"""Batches for training, and the state to resume from: the main interface of engine.data.

    order -> CropReader (threads, read ahead) -> parameters (counter-based) -> views, augmentations
    -> (batch, state)

    loader = Loader(LoaderConfig(), (Dataset.open("DATASET"),), device=torch.device("cuda"), pretrain=True)
    for batch, state in loader:               # endless; an epoch has steps_per_epoch batches
        ...                                   # save this state with the model that was trained on the batch
    Loader(..., state=state)                  # resumes with the next batch, bit for bit

The backend only says where the augmentations run: `torch` (the reference, and fast on a CPU) or
`dali` (on a GPU). `auto` is DALI on a GPU and torch without one.
"""

import dataclasses
import json
import logging
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from omnilead.data_tools.dataset import CROP_BYTES, CROP_SHAPE, Dataset
from omnilead.data_tools.io.terminal import keep_freed_memory

from ..settings.errors import ConfigError
from ..settings.files import flatten
from . import dali
from .augmentations.stage import Params
from .augmenter import (
    Augmenter,
    ChunkWriter,
    CropWriter,
    ExtraAugmentation,
    Upload,
    measured_leads,
    single_threaded,
)
from .config import HALF, LoaderConfig
from .order import DatasetRows, Order, Places, shards_needed
from .reader import BadCrop, CropBuffers, CropReader, Report, prefetch
from .staging import Staging

PLANNED_CROPS = 1024  # planned at a time, to share the overhead of numpy calls
# on a CPU, small batches are read together, so that reads lie closer: a third less time at 64 crops
READ_CROPS = 256
# Of LoaderConfig: what determines a batch
IN_RECIPE = ("batch_crops", "seed", "views", "block_shards", "weights", "augment", "windows")
State = dict[str, Any]
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Batch:
    x_BSLT: torch.Tensor  # float32 millivolts on the device
    places: Places  # dataset, row and epoch of each crop
    skipped: tuple[BadCrop, ...] = ()  # unreadable crops that were replaced
    keep_BSL1: np.ndarray | None = None  # bool, with LoaderConfig.windows


class Planned(NamedTuple):
    """One or several batches before they are read: which crops, and the parameters of their
    augmentation."""

    places: Places
    p: Params

    def part(self, part: slice) -> "Planned":
        return Planned(self.places[part], {name: values[part] for name, values in self.p.items()})


class StageTimer:
    """Profile of a loader: how long each stage was busy since the last `snapshot`, in percent of
    the time.

    plan        choosing crops and drawing their augmentation parameters
    read        reading and verifying crops; with torch on a CPU also `augment`, as the reading
                threads make the tensors
    read_wait   waiting for the prefetching thread
    augment     making the model's input, summed over threads
    wait        training waits for a batch
    gpu_wait    the loader waits for a GPU that still reads earlier batches (DALI); not part of
                `wait`
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.crops = 0
        self._since = time.perf_counter()
        self._busy_s: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, stage: str, without: str = "") -> Iterator[None]:
        """`without`: a nested stage in the same thread, whose time is subtracted."""
        began, nested = time.perf_counter(), self._busy_s.get(without, 0.0)
        try:
            yield
        finally:
            nested = self._busy_s.get(without, 0.0) - nested
            self.add(stage, time.perf_counter() - began - nested)

    def add(self, stage: str, seconds: float) -> None:
        self._busy_s[stage] += seconds

    def pause(self, seconds: float) -> None:
        """Leave out time that was not training, such as validation."""
        self._since += seconds

    def snapshot(self) -> dict[str, float]:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        facts = {
            "crops_per_s": self.crops / seconds,
            "data_bytes_per_s": self.crops * CROP_BYTES / seconds,
            "data_wait_pct": 0.0,
        }
        for stage, busy_s in sorted(self._busy_s.copy().items()):
            facts[f"data_{stage}_pct"] = 100 * busy_s / seconds
        self.restart()
        return facts


def order_of(
    config: LoaderConfig, datasets: Sequence[Dataset], rows: Sequence[np.ndarray] = (), **roles: Any
) -> Order:
    """The order of these rows of each dataset, or of the crops with these roles."""
    selected = [
        DatasetRows.of(dataset, rows=rows[d] if rows else None, **roles)
        for d, dataset in enumerate(datasets)
    ]
    return Order(
        tuple(selected), config.batch_crops, config.seed, config.weights, config.block_shards
    )


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
        rows: Sequence[np.ndarray] = (),
        reuse_batches: bool = False,
        **roles: Any,
    ) -> None:
        """`step`: where to start without a `state`. Select crops by `rows` of each dataset, or by
        `roles` as in DatasetRows.of. `reuse_batches`: on a CPU, a batch may be overwritten when the
        next one is asked for, which saves copying it."""
        self.config, self.device, self.rank, self.world = config, device, rank, world
        self.backend = self._chosen_backend()
        self.extra = None
        if named_functions := config.augment.own:
            self.extra = ExtraAugmentation(named_functions, config.seed, rank, device)
        self.order = order_of(config, datasets, rows, **roles)
        # fail early if the batch cannot be divided
        self.order.slice(0, rank, world, micro=config.micro_batch)
        self.crops = config.batch_crops // world
        self.reuse_batches = reuse_batches
        self.recipe = self._recipe(datasets, rows, roles)
        self.step = step if state is None else resumed_step(state, self.recipe, config.batch_crops)
        measured = measured_leads(datasets) if config.augment.changes_zeros else None
        self.augmenter = Augmenter(
            config.augment, config.views, config.seed, device, measured, config.windows
        )
        self.staging = self._staging(datasets)
        # a second thread costs a CPU a third more time per crop; it halves the wait for a cold disk
        self.threads = config.threads or (1 if device.type == "cpu" else 2)
        self.reader = CropReader(
            datasets,
            config.check,
            config.on_corrupt,
            self.threads,
            pin=device.type == "cuda",
            source=config.source,
            staging=self.staging,
            rows=self.order.rows,
        )
        self.meter = StageTimer()

    def _chosen_backend(self) -> str:
        backend = self.config.backend
        if backend != "auto":
            return backend
        backend = "dali" if self.device.type == "cuda" else "torch"
        log.info("pipeline.backend=auto: %s, because the device is %s", backend, self.device.type)
        return backend

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    def close(self) -> None:
        if self.staging:  # close it first: a reader may be waiting for a shard
            self.staging.close()
        self.reader.close()

    def __iter__(self) -> Iterator[tuple[Batch, State]]:
        in_torch = self._by_cpu if self.device.type == "cpu" else self._by_gpu
        batches = self._by_dali() if self.backend == "dali" else in_torch()
        while True:
            with self.meter.timed("wait", without="gpu_wait"):
                batch = next(batches)
            if self.extra:
                with self.meter.timed("augment"):
                    x_BSLT = self.extra(batch.x_BSLT, batch.places, self.step)
                    batch = dataclasses.replace(batch, x_BSLT=x_BSLT)
            masks = self.augmenter.window_masks(batch.places)
            batch = dataclasses.replace(batch, keep_BSL1=masks)
            self.meter.crops += len(batch.places)
            self.step += 1
            seen = self.step * self.config.batch_crops
            yield batch, {"crops_seen": seen, "recipe": self.recipe}

    def _plans(self, together: int = 1) -> Iterator[Planned]:
        """Plan `together` batches at a time."""
        crops = together * self.crops
        steps = max(1, PLANNED_CROPS // crops) * together
        for first in count(self.step, steps):
            with self.meter.timed("plan"):
                places = self.order.slice(
                    first, self.rank, self.world, steps, self.config.micro_batch
                )
                plan = Planned(places, self.augmenter.parameters(places))
            yield from map(plan.part, _slices(len(places), crops))

    def _by_cpu(self) -> Iterator[Batch]:
        """The threads that read crops also turn them into tensors, while they are in the core's
        cache."""
        keep_freed_memory()
        # from s3://, one batch at a time, so that a batch does not wait for the next one's shards
        together = 1 if self.staging else max(1, READ_CROPS // self.crops)
        shape = (together * self.crops, 2, len(self.config.augment.output_leads), HALF)
        ahead = -(-self.config.read_ahead // together)
        outs = [torch.empty(shape) for _ in range(ahead + 1)]

        def make(plan: Planned, x_BSLT: torch.Tensor) -> tuple[torch.Tensor, Planned, Report]:
            single_threaded()
            with self.meter.timed("augment"):
                writer = self.augmenter.writer(self.augmenter.to_device(plan.p), x_BSLT)
            with self.meter.timed("read"):
                report = self.reader.read_to(
                    plan.places, lambda: _Desk(self, plan.places, writer, x_BSLT)
                )
            return x_BSLT, plan, report

        with closing(prefetch(self._plans(together), make, outs)) as batches:
            while True:
                with self.meter.timed("read_wait"):
                    x_BSLT, plan, report = next(batches)
                places = dataclasses.replace(plan.places, row=report.row)
                for part in _slices(len(places), self.crops):
                    batch_BSLT = x_BSLT[part] if self.reuse_batches else x_BSLT[part].clone()
                    yield Batch(batch_BSLT, places[part], report.part(part).skipped)

    def _read(self, in_use: int = 1) -> Generator[tuple[Planned, np.ndarray, Report], None, None]:
        """Batches as they are read, with the plan of the crops that they have."""

        def fill(plan: Planned, crops: np.ndarray) -> tuple[Planned, np.ndarray, Report]:
            with self.meter.timed("read"):
                report = self.reader.read(plan.places, crops)
            if report.skipped:  # the parameters of a replacement depend on its row
                places = dataclasses.replace(plan.places, row=report.row)
                plan = Planned(places, self.augmenter.parameters(places))
            return plan, crops, report

        buffers = self.reader.buffers(self.config.read_ahead + in_use, self.crops)
        return prefetch(self._plans(), fill, buffers, in_use)

    def _by_gpu(self) -> Iterator[Batch]:
        upload = Upload(self.device)
        with closing(self._read()) as read:
            while True:
                with self.meter.timed("read_wait"):
                    # before next(read), which returns the last batch's buffer to the reader
                    upload.wait()
                    plan, crops, report = next(read)
                with self.meter.timed("augment"):
                    p = self.augmenter.to_device(plan.p)
                    x_BSLT = self.augmenter(upload(torch.from_numpy(crops)), p)
                yield Batch(x_BSLT, plan.places, report.skipped)

    def _by_dali(self) -> Iterator[Batch]:
        """DALI prefetches, so the plan of a batch is kept until DALI returns it."""
        plans_in_dali: dict[int, tuple[Planned, Report]] = {}
        read = self._read(in_use=dali.IN_USE)

        def feed() -> Generator[tuple[int, np.ndarray, Params], None, None]:
            for step in count(self.step):
                with self.meter.timed("read_wait"):
                    plan, crops, report = next(read)
                plans_in_dali[step] = plan, report
                yield step, crops, plan.p

        example = self.augmenter.parameters(self.order.slice(0, self.rank, self.world))
        with closing(read), closing(feed()) as fed:
            pipeline = dali.Pipeline(self.augmenter, fed, self.crops, example, self.threads)
            with closing(pipeline):
                while True:
                    with self.meter.timed("gpu_wait"):
                        pipeline.release()
                    with self.meter.timed("augment", without="read_wait"):
                        step, x_BSLT = pipeline.run()
                        plan, report = plans_in_dali.pop(step)
                        self.augmenter.add_white_noise(x_BSLT, plan.p)
                    yield Batch(x_BSLT, plan.places, report.skipped)

    def _staging(self, datasets: Sequence[Dataset]) -> Staging | None:
        remote = {
            d: dataset
            for d, dataset in enumerate(datasets)
            if dataset.root.remote and dataset.shards
        }
        if not remote or self.config.source == "zarr":
            return None
        cache_dir, together = self.config.cache_dir, self.config.block_shards
        if not cache_dir or not together:
            raise ConfigError(
                "a dataset on s3:// is read through a cache: set pipeline.cache_dir, and "
                "pipeline.block_shards to 1 or more"
            )
        needed = shards_needed(self.order, self.step * self.config.batch_crops)
        order = (key for key in needed if key[0] in remote)
        ahead = max(4, together) * len(remote)
        return Staging(remote, cache_dir, self.config.cache_bytes, order, together, ahead)

    def _recipe(
        self, datasets: Sequence[Dataset], rows: Sequence[np.ndarray], roles: dict[str, Any]
    ) -> dict[str, Any]:
        """Everything besides `crops_seen` that determines the next batch, as JSON."""
        if rows:
            roles = roles | {
                "rows": [sha256(rows_of_dataset.tobytes()).hexdigest() for rows_of_dataset in rows]
            }
        return {
            "datasets": [dataset.fingerprint for dataset in datasets],
            "roles": {name: value for name, value in sorted(roles.items()) if value is not None},
            "backend": self.backend,
            **_settings(self.config),
        }


class _Desk(CropBuffers):
    """A reading thread's own buffer for a few crops, which are written to the batch as soon as it
    is full."""

    def __init__(
        self,
        loader: Loader,
        places: Places,
        writer: ChunkWriter | CropWriter,
        x_BSLT: torch.Tensor,
    ) -> None:
        """`places`: as planned."""
        single_threaded()
        self.loader, self.places = loader, places
        self.planned_rows = places.row.tolist()  # Python's integers compare faster than numpy's
        self.writer, self.x_BSLT = writer, x_BSLT
        self.crops_BLT = torch.empty((writer.at_a_time, *CROP_SHAPE), dtype=torch.int16)
        self.buffers: list[np.ndarray] = list(self.crops_BLT.numpy())
        self.positions: list[int] = []

    def buffer(self, position: int) -> np.ndarray:
        return self.buffers[len(self.positions)]

    def accept(self, position: int, row: int) -> None:
        if row != self.planned_rows[position]:
            self._write_replacement(position, row)
            return
        self.positions.append(position)
        if len(self.positions) == len(self.buffers):
            self.finish()

    def finish(self) -> None:
        if not self.positions:
            return
        began = time.perf_counter()
        self.writer.write(self.crops_BLT, self.positions)
        self.positions = []
        self.loader.meter.add("augment", time.perf_counter() - began)

    def _write_replacement(self, position: int, row: int) -> None:
        """A replacement of a bad crop always comes alone, at a desk of its own. Its parameters are
        drawn now, as they depend on the row."""
        position_slice = slice(position, position + 1)
        places = dataclasses.replace(self.places[position_slice], row=np.array([row]))
        augmenter = self.loader.augmenter
        p = augmenter.to_device(augmenter.parameters(places))
        augmenter.writer(p, self.x_BSLT[position_slice]).write(self.crops_BLT, [0])


def resumed_step(state: State, recipe: dict[str, Any], batch_crops: int) -> int:
    """The step to resume at. Raises if `state` is from a run with another recipe."""
    before: Any = state.get("recipe")
    if not isinstance(before, dict):
        raise ConfigError("cannot resume: the loader's state has no recipe: start a new run")
    before, recipe_now = flatten(_as_today(before)), flatten(recipe)
    for key in sorted(before.keys() | recipe_now.keys()):
        saved = before.get(key)
        if saved != recipe_now.get(key):
            raise ConfigError(
                f"cannot resume: {key} changed from {str(saved)[:200]} to {recipe_now.get(key)}: set it back"
            )
    seen = state.get("crops_seen")
    if type(seen) is not int or not 0 <= seen < 2**63 or seen % batch_crops:
        raise ConfigError(
            f"cannot resume: crops_seen={str(seen)[:40]} is not a whole number of batches: start "
            "a new run"
        )
    return seen // batch_crops


def _settings(config: LoaderConfig) -> dict[str, Any]:
    """The settings that determine a batch, as JSON."""
    tree: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return {name: tree[name] for name in IN_RECIPE}


def _as_today(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe as today's loader would write it: settings that it lacks, because they are newer,
    have their defaults."""
    saved = {name: recipe[name] for name in IN_RECIPE if name in recipe}
    try:
        config = TypeAdapter(LoaderConfig).validate_json(json.dumps(saved))
    except ValidationError:  # has settings that are gone: comparing finds them
        return recipe
    return recipe | _settings(config)


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))
