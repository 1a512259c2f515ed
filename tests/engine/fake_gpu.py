"""Training steps on a fake GPU: torch's fake tensors have shapes and devices, but no values.

A tensor left on the CPU is an error, and so is anything that waits for the device, since it would
need a value. The device is called `gpu`, because a build of torch without CUDA has no other. The
name holds for the whole process, so test_fake_gpu.py calls `errors` in a process of its own.
"""

import json
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from omnilead.downstream.tasks.classifier import Classifier
from omnilead.downstream.tasks.config import TaskConfig, TaskKind
from omnilead.engine.data.augmenter import Augmenter
from omnilead.engine.data.order import Places
from omnilead.engine.model.config import ModelConfig
from omnilead.engine.model.encoder import Encoder
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.settings.files import CONFIGS
from omnilead.engine.training.config import load_config
from omnilead.engine.training.optimizer import GuardedAdamW

CROPS, CLASSES = 4, 26
module = backend_registration._DummyBackendModule()
module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
backend_registration._setup_privateuseone_for_python_backend("gpu", backend_module=module)
GPU = torch.device("gpu")
SMALL = {
    "conv": ((16, 4), (16, 5)),
    "width": 32,
    "layers": 2,
    "heads": 2,
    "ffn": 64,
    "codes": 8,
    "code_width": 8,
    "projection": 16,
}


def pretrain(path, dtype):
    config = load_config(path)
    crops = np.arange(CROPS)
    places = Places(crops * 0, crops, crops * 0)
    with GPU:
        augmenter = Augmenter(config.augment, config.pipeline.views, 0, GPU)
        drawn = augmenter.draw_parameters(places)
        p = {name: torch.from_numpy(values).to(GPU) for name, values in drawn.items()}
        x_BSLT = augmenter(torch.empty(CROPS, 12, 5000, dtype=torch.int16), p)
        options = config.model.options
        if options.get("norm") == "batch":  # which torch has not for a device of one's own
            options = options | {"norm": "layer"}
        settings = replace(config.model, **SMALL, position_groups=4, options=options)
        model = Pretrainer(settings, config.objective)
        keys_BS, tau, ids_B = (
            torch.empty(x_BSLT.shape[:2], dtype=torch.int64),
            torch.ones(()),
            torch.arange(CROPS),
        )
    train(model, dtype, x_BSLT.to(dtype), keys_BS, tau, ids_B)


def finetune(kind, dtype):
    with GPU:
        model = Classifier(
            Encoder(ModelConfig(**SMALL, position_groups=4), mask=False),
            TaskConfig(kind=kind),
            CLASSES,
        )
        labels = torch.ones(CROPS, CLASSES) if kind != "identity" else torch.arange(CROPS)
        x_BSLT, there_BS = torch.empty(CROPS, 2, 12, 2500, dtype=dtype), torch.ones(CROPS, 2)
    train(model, dtype, x_BSLT, labels, there_BS)


def train(model, dtype, *arguments):
    for p in model.parameters():
        p.data = p.data.to(dtype)
    adam = GuardedAdamW([(1.0, model.parameters())], lr=1e-4, clip_norm=1.0)
    losses = model(*arguments)
    losses["loss"].backward()
    adam.step()
    values = losses | {"norm": adam.norm, "skipped": adam.skipped}
    left = [name for name, value in values.items() if value.device.type != GPU.type]
    assert not left, f"{left} are on the CPU"
    assert all(p.grad.device.type == GPU.type for p in model.parameters() if p.grad is not None)


def wait():
    """Waits for the device: an error that must be found, like `leave_behind`."""
    with GPU:
        torch.ones(()).item()


def leave_behind():
    with GPU:
        there = torch.ones(2)
    there + torch.from_numpy(np.ones(2, np.float32))


def errors(out):
    """Writes the error of each step; empty if there is none."""
    cases = {"wait": wait, "leave behind": leave_behind}
    for path in (CONFIGS / "pretrain").glob("*.yaml"):
        cases[f"pretrain {path.stem}"] = partial(pretrain, path, torch.bfloat16)
    cases["pretrain fp32"] = partial(
        pretrain, CONFIGS / "pretrain" / "w2v_cmsc_rlm.yaml", torch.float32
    )
    for kind in get_args(TaskKind):
        cases[f"finetune {kind}"] = partial(finetune, kind, torch.bfloat16)
    cases["finetune fp32"] = partial(finetune, "multilabel", torch.float32)
    found = dict.fromkeys(cases, "")
    for name, step in cases.items():
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                step()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:300]
    out.write_text(json.dumps(found))
