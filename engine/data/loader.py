"""Batches for training, and the state to resume from: the main interface of engine.data.

    order -> Plan (which crops, counter-based parameters) -> CropReader (threads, read ahead)
    -> Executor (views, augmentations) -> (batch, state)

    loader = Loader(LoaderConfig(), (Dataset.open("DATASET"),), torch.device("cuda"), Selection(pretrain=True))
    for batch, state in loader:               # endless; an epoch has steps_per_epoch batches
        ...                                   # save this state with the model that was trained on the batch
    Loader(..., state=state)                  # resumes with the next batch, bit for bit

The backend only says where the augmentations run (executors.py): `torch` (the reference, and fast on
a CPU) or `dali` (on a GPU). `auto` is DALI on a GPU and torch without one.
"""

import dataclasses
import json
import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from omnilead.data_tools.dataset import Dataset

from ..settings.errors import ConfigError
from ..settings.files import flatten
from .augmenter import Augmenter, ExtraAugmentation, Plan, measured_leads_lookup
from .config import LoaderConfig
from .executors import Dali, Executor, ReadCrops, TorchOnCpu, TorchOnGpu
from .order import ALL_CROPS, DatasetRows, Order, Places, Selection, shards_needed
from .reader import BadCrop, CropReader, fill_ahead
from .stage_timer import StageTimer
from .staging import Staging

# number of crops that are planned at a time, to share the overhead of numpy calls
CROPS_PER_PLAN = 1024
# The settings of LoaderConfig that determine what a batch contains
RECIPE_SETTINGS = ("batch_crops", "seed", "views", "block_shards", "weights", "augment", "windows")
State = dict[str, Any]
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Batch:
    x_BSLT: torch.Tensor  # float32 millivolts on the device
    places: Places  # dataset, row and epoch of each crop
    skipped: tuple[BadCrop, ...] = ()  # unreadable crops that were replaced
    # bool: the leads to keep in each window; None if LoaderConfig.windows is 0
    keep_BSL1: np.ndarray | None = None


def crop_order(
    config: LoaderConfig, datasets: Sequence[Dataset], selection: Selection = ALL_CROPS
) -> Order:
    """Returns the order in which the selected crops are drawn."""
    selected = [DatasetRows.select(dataset, selection, d) for d, dataset in enumerate(datasets)]
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
        selection: Selection = ALL_CROPS,
        rank: int = 0,
        world: int = 1,
        state: State | None = None,
        step: int = 0,
        reuse_batches: bool = False,
    ) -> None:
        """`step`: the step to start at without a `state`. `reuse_batches`: on a CPU, a batch may
        be overwritten when the next one is requested, which saves copying it."""
        self.config, self.device, self.rank, self.world = config, device, rank, world
        self.backend = self._choose_backend()
        self.extra = None
        if named_functions := config.augment.extra_functions:
            self.extra = ExtraAugmentation(named_functions, config.seed, rank, device)
            self.extra.examine(len(config.augment.output_leads))
        self.order = crop_order(config, datasets, selection)
        # fails early if the batch cannot be divided among ranks and micro-batches
        self.order.places_of_rank(0, rank, world, micro=config.micro_batch)
        self.crops = config.batch_crops // world
        self.reuse_batches = reuse_batches
        self.recipe = self._recipe(datasets, selection)
        self.step = (
            step if state is None else step_to_resume(state, self.recipe, config.batch_crops)
        )
        measured = measured_leads_lookup(datasets) if config.augment.changes_zeros else None
        self.augmenter = Augmenter(
            config.augment, config.views, config.seed, device, measured, config.windows
        )
        self.staging = self._make_staging(datasets)
        # a second thread costs a CPU a third more time per crop, but halves the wait for a cold
        # disk
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

    def _choose_backend(self) -> str:
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
        if self.staging:  # closed before the reader, which may be waiting for a shard
            self.staging.close()
        self.reader.close()

    def __iter__(self) -> Iterator[tuple[Batch, State]]:
        with closing(self._batches()) as batches:
            while True:
                with self.meter.timed("wait", without="gpu_wait"):
                    batch = next(batches)
                if self.extra:
                    with self.meter.timed("augment"):
                        x_BSLT = self.extra(batch.x_BSLT, batch.places, self.step)
                        batch = dataclasses.replace(batch, x_BSLT=x_BSLT)
                self.meter.crops += len(batch.places)
                self.step += 1
                seen = self.step * self.config.batch_crops
                yield batch, {"crops_seen": seen, "recipe": self.recipe}

    def _batches(self) -> Generator[Batch, None, None]:
        """Yields batches. A thread of its own plans and reads them ahead of training. The thread
        that requests a batch augments it, unless the reading threads have done so."""
        executor = self._make_executor()
        plans = self._plans(executor)
        buffers = executor.buffers(self.config.read_ahead)
        with (
            closing(fill_ahead(plans, executor.read, buffers, executor.batches_in_use)) as read,
            closing(self._single_batches(read)) as batches,
            closing(executor.model_inputs(batches)) as inputs,
        ):
            for batch, x_BSLT in inputs:
                plan = batch.plan
                yield Batch(x_BSLT, plan.places, batch.report.skipped, plan.keep_BSL1)

    def _make_executor(self) -> Executor:
        in_torch = TorchOnCpu if self.device.type == "cpu" else TorchOnGpu
        kind: type[Executor] = Dali if self.backend == "dali" else in_torch
        return kind(self.augmenter, self.reader, self.meter, self.crops, self.reuse_batches)

    def _plans(self, executor: Executor) -> Iterator[Plan]:
        """Yields a plan for each group of batches that are read together."""
        crops = executor.batches_per_read * self.crops
        steps = max(1, CROPS_PER_PLAN // crops) * executor.batches_per_read
        for first in count(self.step, steps):
            with self.meter.timed("plan"):
                places = self.order.places_of_rank(
                    first, self.rank, self.world, steps, self.config.micro_batch
                )
                plan = self.augmenter.plan(places)
            yield from map(plan.plan_of_part, _slices(len(places), crops))

    def _single_batches(self, read: Iterator[ReadCrops]) -> Generator[ReadCrops, None, None]:
        """Yields the single batches out of groups that were read together."""
        while True:
            with self.meter.timed("read_wait"):
                several = next(read)
            yield from map(several.batch, _slices(len(several.plan.places), self.crops))

    def _make_staging(self, datasets: Sequence[Dataset]) -> Staging | None:
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

    def _recipe(self, datasets: Sequence[Dataset], selection: Selection) -> dict[str, Any]:
        """Returns everything besides `crops_seen` that determines the next batch, in JSON's
        types."""
        return {
            "datasets": [dataset.fingerprint for dataset in datasets],
            "roles": dict(sorted(selection.criteria().items())),
            "backend": self.backend,
            **_recipe_settings(self.config),
        }


def step_to_resume(state: State, recipe: dict[str, Any], batch_crops: int) -> int:
    """Returns the step to resume at. Raises ConfigError if `state` is from a run with another
    recipe."""
    before: Any = state.get("recipe")
    if not isinstance(before, dict):
        raise ConfigError(
            "cannot resume: the saved state has no `recipe`, the data and settings from which its "
            "batches were made: start a new run"
        )
    before, recipe_now = flatten(_upgrade_recipe(before)), flatten(recipe)
    for key in sorted(before.keys() | recipe_now.keys()):
        saved = before.get(key)
        if saved != recipe_now.get(key):
            raise ConfigError(
                f"cannot resume: {key} changed from {str(saved)[:200]} to {recipe_now.get(key)}: set it back"
            )
    seen = state.get("crops_seen")
    if type(seen) is not int or not 0 <= seen < 2**63 or seen % batch_crops:
        raise ConfigError(
            f"cannot resume: crops_seen={str(seen)[:40]} is not the number of crops in whole batches: start "
            "a new run"
        )
    return seen // batch_crops


def _recipe_settings(config: LoaderConfig) -> dict[str, Any]:
    """Returns the settings that determine what a batch contains, in JSON's types."""
    tree: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return {name: tree[name] for name in RECIPE_SETTINGS}


def _upgrade_recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    """Adds the defaults of newer settings to a recipe of an earlier version."""
    saved = {name: recipe[name] for name in RECIPE_SETTINGS if name in recipe}
    try:
        config = TypeAdapter(LoaderConfig).validate_json(json.dumps(saved))
    # the recipe has settings that no longer exist; `step_to_resume` reports them
    except ValidationError:
        return recipe
    return recipe | _recipe_settings(config)


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))
