"""What a training would be, without training: its data, model, memory, hours and disk.

    print(dry_run(config, PretrainTask, gpus=8))

Needs no GPU and writes nothing. Memory and hours are estimates. Activations are what autograd keeps
of a step on tensors that have shapes and no numbers, uncompiled: 31.7 and 61.8 GB for the paper's
model with 256 and 512 crops, of which it needed 29.9 and 54.3 on an H100, compiled by layers.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..data.augmenter import HALF
from ..data.loader import Batch, order_of
from ..data.order import Order, Places
from ..model.kernels import REPLACEMENTS
from .config import RunConfig, check, micro_batch, zero_stage
from .distributed import Ranks
from .inputs import dtype_of
from .task import TrainingTask
from .train import duration, open_datasets

# Of one H100 with the paper's model: 1,748 crops/s of 175.9 GFLOP (benchmarks/RESULTS.md). An H200
# has the same processor
MEASURED_TFLOPS = 307
CROP_BYTES = 121_856  # of a shard


def dry_run(config: RunConfig, task_class: type[TrainingTask], gpus: int) -> str:
    """Several lines, after the settings. Raises what a training would raise at its start."""
    check(config, gpus)
    datasets = open_datasets(config)
    task = task_class(config, datasets, Ranks(0, 1, torch.device("cpu"), None))
    t, stage, is_bf16 = config.train, zero_stage(config), dtype_of(config) == torch.bfloat16
    order = order_of(replace(config.loader, windows=task.windows), datasets, **task.roles)
    steps = t.steps or math.ceil((t.epochs or 0) * order.steps_per_epoch)
    model = task.model(torch.Generator().manual_seed(t.seed))
    every, trained = (sum(p.numel() for p in ps) for ps in (model.parameters(), trained_of(model)))
    crops, passes = micro_batch(config, gpus)
    memory = state_bytes(every, trained, is_bf16, stage, gpus)
    activations = f"activations of {crops} crops"
    try:
        memory[activations] = crops * activations_of(task, model, order)
    except Exception as error:
        if not task.code:
            raise
        activations = f"without {activations}: the plug-in needs numbers ({type(error).__name__})"
    rate = gpus * MEASURED_TFLOPS * 1e12 / task.flops_per_crop
    checkpoint = sum(state_bytes(every, trained, is_bf16, 0, 1).values())
    each = "the GPU" if gpus == 1 else f"each of {gpus} GPUs"
    parts = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in memory.items())
    if activations not in memory:
        parts += f", {activations}"
    lines = [
        f"data: {sum(map(len, datasets)):,} crops, {sum(map(len, order.rows)):,} to train on"
        f"{task.left_out()}; {order.steps_per_epoch:,} steps of {t.batch_crops} go through them once",
        *task.remarks,
        f"model: {every:,} parameters, {task.flops_per_crop / 1e9:.4g} GFLOP a crop",
        f"training: {steps:,} steps, {passes} x {crops} crops on {each}",
        f"memory of {each}, an estimate: {sum(memory.values()) / 1e9:.2f} GB: {parts}",
        f"time on H100 or H200, an estimate: at least {duration(steps * t.batch_crops / rate)}, at most "
        f"{rate:,.0f} crops/s: {MEASURED_TFLOPS} TFLOP/s a GPU, as the paper's model had on one H100; small "
        "models have less",
        f"disk: {checkpoint / 1e9:.2f} GB a checkpoint, {t.keep} are kept; reads up to "
        f"{rate * CROP_BYTES / 1e6:,.0f} MB/s",
    ]
    return "\n".join([yaml.safe_dump(config.tree(), sort_keys=False), *lines])


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def state_bytes(
    parameters: int, trained: int, is_bf16: bool, stage: int, gpus: int
) -> dict[str, float]:
    """Weights, gradients and what AdamW keeps, which with bf16 has weights in float32 too."""
    width = 2 if is_bf16 else 4
    return {
        "weights": parameters * width / (gpus if stage >= 3 else 1),
        "gradients": trained * width / (gpus if stage >= 2 else 1),
        f"AdamW with ZeRO {stage}": trained * (12 if is_bf16 else 8) / (gpus if stage else 1),
    }


def activations_of(task: TrainingTask, model: nn.Module, order: Order) -> float:
    """Bytes that autograd keeps of each crop until the backward pass."""
    few, more = (order.batch(0)[:n] for n in (1, min(3, order.batch_crops)))
    if len(more) == 1:
        return kept_bytes(task, model, more)
    return (kept_bytes(task, model, more) - kept_bytes(task, model, few)) / (len(more) - len(few))


def kept_bytes(task: TrainingTask, model: nn.Module, places: Places) -> float:
    leads, dtype = len(task.input.leads), dtype_of(task.config)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage._cdata] = storage
        return x

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, as_on_a_gpu():
        weights: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            weights[name] = mode.from_tensor(p).to(dtype).detach().requires_grad_(p.requires_grad)
        x_BSLT = torch.empty(len(places), 2, leads, HALF)
        masks = None if task.input.plain else np.ones((len(places), 2, leads, 1), bool)
        arguments = task.arguments(Batch(x_BSLT, places, keep_BSL1=masks), 1, 1)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            torch.func.functional_call(model.train(), weights, arguments)
        for weight in weights.values():
            kept.pop(weight.untyped_storage()._cdata, None)
    return float(sum(storage.nbytes() for storage in kept.values()))


class FusedAttention(torch.autograd.Function):
    """What fused attention keeps: no scores."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.empty_like(q)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """torch's own operations instead of those for a CPU, and fused attention."""
    attention, for_a_cpu = F.scaled_dot_product_attention, REPLACEMENTS["cpu"].copy()

    def fused(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        y: Tensor = FusedAttention.apply(q, k, v)
        return y

    F.scaled_dot_product_attention = fused  # type: ignore[assignment]
    REPLACEMENTS["cpu"].clear()
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention
        REPLACEMENTS["cpu"].update(for_a_cpu)
