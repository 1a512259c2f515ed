"""What a run is worth while it runs: the loss on crops that it does not see, and whether it knows a patient again.

    HeldOut(config, datasets, ranks).losses(engine)      # the same crops, masks and negatives every time
    Probe(config, datasets, ranks).accuracy(engine)

The probe needs no labels: mean-pooled encodings of the first 5 s of each patient's gallery crop; a probe crop is recognised if
the most similar of them (cosine) is the same patient's (paper, section "Patient identification").
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor

from data_tools.dataset import Dataset
from engine.config import Config, Settings, candidates
from engine.data.augmenter import crop_key
from engine.data.loader import Batch, Loader
from engine.data.order import DatasetRows, OrderError
from engine.data.plain import views
from engine.data.validation_split import OWNER, owners
from engine.model.draws import row_keys
from engine.model.heads import pool
from engine.objectives.gather import apart, gather_constant, total
from engine.training.distributed import Ranks

GROUP = 16  # crops encoded at a time


def dtype_of(config: Settings) -> torch.dtype:
    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def arguments(batch: Batch, config: Config, ids: "Patients | None", tau: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """A batch as engine.model.pretrainer.Pretrainer takes it."""
    x, places = batch.x_BSLT, batch.places
    keys = to_device(row_keys(config.train.seed, places.epoch, crop_key(places), x.shape[1]), x.device)
    patients = to_device(ids.of(places.dataset, places.row), x.device) if ids else None
    return x.to(dtype_of(config)), keys, tau, patients


class Patients:
    """A number for each patient; for each record where patients are not known."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self.of_dataset: list[np.ndarray] = []
        for number, dataset in enumerate(datasets):
            names, known = zip(*map(owners, dataset.parts(OWNER)), strict=True)
            codes = [part.indices.to_numpy() for part in pa.chunked_array(names).unify_dictionaries().chunks]
            self.of_dataset.append(number << 40 | np.concatenate(codes).astype(np.int64) << 1 | np.concatenate(known))

    def of(self, dataset: np.ndarray, row: np.ndarray) -> np.ndarray:
        return np.array([self.of_dataset[d][r] for d, r in zip(dataset.tolist(), row.tolist(), strict=True)], np.int64)


def taught(config: Config) -> dict[str, Any]:
    """Which crops a pre-training is of, as engine.data.order.DatasetRows.of has them."""
    roles: dict[str, Any] = {name: value for name, value in config.data.train if value is not None} | {"halves": 2}
    return roles | ({"hold_out": config.data.hold_out} if config.data.hold_out else {})


class HeldOut:
    """Crops for validation, `crops` at a time; 0: there are too few."""

    def __init__(self, config: Config, datasets: Sequence[Dataset], ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.roles = taught(config) | {"held": True} if config.data.hold_out else {**dict(config.data.valid), "halves": 2}
        counts = [count_of(dataset, self.roles) for dataset in datasets]
        self.datasets = [dataset for dataset, count in zip(datasets, counts, strict=True) if count]
        contrasted = config.objective.contrast > 0
        most = candidates(config, ranks.world) if contrasted else config.train.batch_crops
        self.crops = min(most, sum(counts)) if sum(counts) > contrasted else 0
        self.batches = min(config.train.valid_batches, sum(counts) // max(self.crops, 1))
        self.ids = Patients(self.datasets) if self.crops and config.objective.needs_ids else None

    def taught(self) -> int:
        """How many of all that could be drawn are trained on too."""
        return sum(count_of(dataset, self.roles, taught(self.config)) for dataset in self.datasets)

    def losses(self, engine: Any) -> dict[str, float]:
        """Means over the batches; one pass, at most train.valid_batches. A rank has some of them whole, so that the figures
        hang neither on the ranks nor on the micro-batch; all call the engine equally often, as ZeRO stage 3 must."""
        settings = replace(self.config.loader, backend="torch", batch_crops=self.crops, micro_batch=None, weights=None)
        each = -(-self.batches // self.ranks.world)
        first = self.ranks.rank * each
        loader = Loader(settings, self.datasets, self.ranks.device, step=first, **self.roles)
        engine.eval()
        sums: dict[str, Tensor] = {}
        try:
            with torch.no_grad(), apart():
                for number, (batch, _) in enumerate(islice(loader, each), first):
                    for name, value in engine(*arguments(batch, self.config, self.ids)).items():
                        counted = value.float() if number < self.batches else torch.zeros_like(value, dtype=torch.float32)
                        sums[name] = sums.get(name, 0) + counted
        finally:
            loader.close()
            engine.train()
        means = total(torch.stack(list(sums.values()))) / self.batches
        wanted = ("loss", "loss_local", "loss_global", "accuracy_local", "accuracy_global")
        return {name: value for name, value in zip(sums, means.tolist(), strict=True) if name in wanted}


def count_of(dataset: Dataset, roles: dict[str, Any], also: dict[str, Any] | None = None) -> int:
    """Crops of a role; those that are of another too."""
    try:
        asked = [DatasetRows.of(dataset, **one) for one in (roles, also) if one is not None]
    except OrderError:  # none has the role
        return 0
    some = [rows.numbers for rows in asked if rows.numbers is not None]
    return len(np.intersect1d(some[0], some[1], assume_unique=True)) if len(some) == 2 else min(map(len, asked))


def by_patient(dataset: Dataset, rows: np.ndarray) -> dict[tuple[str, str], int]:
    """The last of each patient's: two sources may number theirs alike."""
    names = dataset.table(["source", "patient"]).take(rows).to_pydict().values()
    return dict(zip(zip(*names, strict=True), rows.tolist(), strict=True))


class Probe:
    """Gallery and probe crops of the first patients that have both."""

    def __init__(self, config: Config, datasets: Sequence[Dataset], ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.pairs: list[tuple[Dataset, tuple[int, int]]] = []
        for dataset in datasets:
            gallery, probes = (by_patient(dataset, dataset.select(identity=role)) for role in ("gallery", "probe"))
            self.pairs += [(dataset, (gallery[name], probes[name])) for name in gallery if name in probes]
        self.pairs = self.pairs[: config.train.probe_patients]

    def accuracy(self, engine: Any) -> float:
        engine.eval()
        try:
            gallery_PD, probe_PD = (self._encode(engine, [(d, pair[side]) for d, pair in self.pairs]) for side in (0, 1))
        finally:
            engine.train()
        nearest_P = (probe_PD @ gallery_PD.t()).argmax(1)
        return float((nearest_P == torch.arange(len(nearest_P), device=nearest_P.device)).float().mean())

    def _encode(self, engine: Any, crops: Sequence[tuple[Dataset, int]]) -> Tensor:
        def unit(x_BSLT: Tensor) -> Tensor:
            return F.normalize(pool(engine.module.encoder(x_BSLT[:, 0])), dim=-1)

        return encode(self.config, self.ranks, crops, unit)


@torch.no_grad()
def encode(config: Settings, ranks: Ranks, crops: Sequence[tuple[Dataset, int]], forward: Callable[[Tensor], Tensor]) -> Tensor:
    """forward(x_BSLT) of all crops, known to all ranks; each does its share, in the same number of calls."""
    share = math.ceil(len(crops) / ranks.world)
    mine = [crops[min(i, len(crops) - 1)] for i in range(ranks.rank * share, (ranks.rank + 1) * share)]
    parts = []
    for at in range(0, share, GROUP):
        crops_BLT = np.stack([dataset.read(row) for dataset, row in mine[at : at + GROUP]])
        parts.append(forward(views(crops_BLT, config.augment).to(ranks.device, dtype_of(config))))
    return gather_constant(torch.cat(parts))[: len(crops)]
