"""Loaders for tests, and comparing what they return."""

import json
from itertools import islice

import pytest
import torch

from omnilead.engine.data.augmentations import AugmentConfig
from omnilead.engine.data.config import LoaderConfig
from omnilead.engine.data.loader import Loader
from omnilead.engine.data.order import Selection

CPU = torch.device("cpu")
BACKENDS = ("torch", "dali")
NOISY = AugmentConfig(noise="physio4")


def loader(dataset, backend="torch", state=None, **changes):
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="the extra cu13 or cu12 is not installed")
    names = {"rank", "world", "reuse_batches"}
    others = {name: changes.pop(name) for name in names & changes.keys()}
    chosen = {name: changes.pop(name) for name in {"pretrain", "rows"} & changes.keys()}
    config = LoaderConfig(**({"backend": backend, "batch_crops": 16, "augment": NOISY} | changes))
    return Loader(config, (dataset,), CPU, Selection(halves=2, **chosen), state=state, **others)


def some(source, count):
    taken = [(batch, json.loads(json.dumps(state))) for batch, state in islice(source, count)]
    source.close()
    return taken


def contents(taken):
    """To compare: each batch's bytes and rows."""
    assert taken
    return [(batch.x_BSLT.numpy().tobytes(), batch.places.row.tolist()) for batch, _ in taken]
