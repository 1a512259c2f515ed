"""Loaders for tests, and comparing what they return."""

import dataclasses
import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.data.augment import AugmentConfig
from omnilead.engine.data.loader import Batch, Loader, LoaderConfig, State

CPU = torch.device("cpu")
BACKENDS = ("torch", "dali")
NOISY = AugmentConfig(noise="physio4")


def loader(
    dataset: Dataset, backend: str = "torch", state: State | None = None, **changes: Any
) -> Loader:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="the extra cu13 or cu12 is not installed")
    others = {
        name: changes.pop(name)
        for name in ("rank", "world", "pretrain", "identity")
        if name in changes
    }
    config = LoaderConfig(**({"backend": backend, "batch_crops": 16, "augment": NOISY} | changes))  # type: ignore[arg-type]
    return Loader(config, (dataset,), CPU, state=state, halves=2, **others)


def some(source: Loader, count: int) -> list[tuple[Batch, State]]:
    kept = (
        (dataclasses.replace(batch, x_BSLT=batch.x_BSLT.clone()), state)
        for batch, state in islice(source, count)
    )
    taken = [(batch, json.loads(json.dumps(state))) for batch, state in kept]
    source.close()
    return taken


def same(one: list[tuple[Batch, State]], two: list[tuple[Batch, State]]) -> bool:
    pairs = list(zip(one, two, strict=True))
    assert pairs
    return all(
        torch.equal(a.x_BSLT, b.x_BSLT) and np.array_equal(a.places.row, b.places.row)
        for (a, _), (b, _) in pairs
    )
