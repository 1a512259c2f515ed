"""What a training would be, without training: its data, model, memory, hours and disk.

    print(dry_run(config, PretrainTask, open_datasets(config), gpus=8))

Needs no GPU, writes nothing, and does not look at RUN. Memory and hours are estimates. Activations
are what autograd keeps of a step on tensors that have shapes and no numbers, uncompiled. With 256 and
512 crops on an H100, compiled by layers, the paper's model needed 29.9 and 54.3 GB; this says 31.7
and 61.8.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from omnilead.data_tools.dataset import Dataset

from ..data.config import HALF
from ..data.loader import Batch, order_of
from ..data.order import Order, Places
from ..model.input import forget_filters
from ..model.kernels import REPLACEMENTS
from .arguments import dtype_of
from .config import RunConfig, micro_batch, zero_stage
from .distributed import Ranks
from .task import TrainingTask
from .train import duration, recompute_layers, total_steps

# Of one H100 with the paper's model: 1,748 crops/s of 175.9 GFLOP (benchmarks/RESULTS.md). An H200
# has the same processor
MEASURED_TFLOPS, MEASURED_GFLOP = 307, 176
CROP_BYTES = 122_368  # of a shard: samples 120,832, their row as JSON 1,536


def dry_run(
    config: RunConfig, task_class: type[TrainingTask], datasets: Sequence[Dataset], gpus: int
) -> str:
    """Several lines, after the settings. Raises what a training would, but for what RUN holds."""
    task = task_class(config, datasets, Ranks(0, 1, torch.device("cpu"), None))
    order = order_of(replace(config.loader, windows=task.windows), datasets, task.selection)
    model = task.model(torch.Generator().manual_seed(config.train.seed))
    if config.train.recompute_layers:
        recompute_layers(model)
    which_gpus = "the GPU" if gpus == 1 else f"each of {gpus} GPUs"
    lines = [
        yaml.safe_dump(config.tree(), sort_keys=False),
        *of_data(task, order),
        of_training(task, model, order, gpus, which_gpus),
        of_memory(task, model, order, gpus, which_gpus),
        *of_time_and_disk(task, model, order, gpus),
    ]
    return "\n".join(lines)


def of_data(task: TrainingTask, order: Order) -> list[str]:
    crops, trained_crops = sum(map(len, task.datasets)), sum(map(len, order.rows))
    epoch = f"an epoch is {order.steps_per_epoch:,} x {order.batch_crops} crops"
    return [
        f"data: {crops:,} crops, {trained_crops:,} to train on{task.left_out()}; {epoch}",
        *task.remarks,
    ]


def of_training(
    task: TrainingTask, model: nn.Module, order: Order, gpus: int, which_gpus: str
) -> str:
    crops, passes = micro_batch(task.config, gpus)
    parameters = sum(p.numel() for p in model.parameters())
    return (
        f"model: {parameters:,} parameters, {task.flops_per_crop / 1e9:.4g} GFLOP a crop; training: "
        f"{total_steps(task.config, order.steps_per_epoch):,} steps, {passes} x {crops} crops on {which_gpus}"
    )


def of_memory(
    task: TrainingTask, model: nn.Module, order: Order, gpus: int, which_gpus: str
) -> str:
    crops, _ = micro_batch(task.config, gpus)
    memory = state_bytes(model, dtype_of(task.config), zero_stage(task.config), gpus)
    activations, unknown = f"activations of {crops} crops", ""
    try:
        memory[activations] = crops * activations_of(task, model, order)
    except Exception as error:
        if not task.code:
            raise
        why = type(error).__name__
        unknown = f", without {activations}: the plug-in needs numbers ({why})"
    parts = ", ".join(f"{name} {size_of(size)}" for name, size in memory.items())
    return f"memory of {which_gpus}, an estimate: {size_of(sum(memory.values()))}: {parts}{unknown}"


def of_time_and_disk(
    task: TrainingTask, model: nn.Module, order: Order, gpus: int
) -> tuple[str, str]:
    states = state_bytes(model, dtype_of(task.config), 0, 1)
    states.pop("gradients")
    checkpoint = size_of(sum(states.values()))
    disk = f"disk: {checkpoint} a checkpoint; the {task.config.train.keep} newest and the best are kept"
    is_like_the_measured = (
        dtype_of(task.config) == torch.bfloat16 and task.flops_per_crop > MEASURED_GFLOP * 1e8
    )
    if not is_like_the_measured:
        why = f"only a model of {MEASURED_GFLOP} GFLOP a crop in bf16 has been measured on a GPU"
        return f"time: not estimated, {why}", disk
    cost = task.flops_per_crop
    if task.config.train.recompute_layers:
        cost *= 4 / 3  # forward twice, and backward, which costs as much as two forward
    crops_s = gpus * MEASURED_TFLOPS * 1e12 / cost
    seconds = total_steps(task.config, order.steps_per_epoch) * order.batch_crops / crops_s
    return (
        f"time on H100 or H200, an estimate: {duration(seconds)}, {crops_s:,.0f} crops/s: "
        f"{MEASURED_TFLOPS} TFLOP/s a GPU, as the paper's model had on one H100",
        f"{disk}; reads {crops_s * CROP_BYTES / 1e6:,.0f} MB/s",
    )


def size_of(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size > 1e8 else f"{size / 1e6:.1f} MB"


def state_bytes(model: nn.Module, dtype: torch.dtype, stage: int, gpus: int) -> dict[str, float]:
    """Weights, gradients and what AdamW keeps, which with bf16 has weights in float32 too."""
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adamw = 12 if dtype == torch.bfloat16 else 8
    return {
        "weights": parameters * dtype.itemsize / (gpus if stage >= 3 else 1),
        "gradients": trained * dtype.itemsize / (gpus if stage >= 2 else 1),
        f"AdamW with ZeRO {stage}": trained * adamw / (gpus if stage else 1),
    }


def activations_of(task: TrainingTask, model: Any, order: Order) -> float:
    """Bytes that autograd keeps of each crop until the backward pass; with train.recompute_layers, those
    of one layer too, which is computed again at a time."""
    kept_by_layers = activations_of_each(task, model, order)
    if not task.config.train.recompute_layers:
        return kept_by_layers
    model.encoder.recomputes = False
    without = activations_of_each(task, model, order)
    model.encoder.recomputes = True
    return kept_by_layers + (without - kept_by_layers) / len(model.encoder.layers)


def activations_of_each(task: TrainingTask, model: nn.Module, order: Order) -> float:
    fewer_places, more_places = (order.batch(0)[:n] for n in (1, min(3, order.batch_crops)))
    if len(more_places) == 1:
        return kept_bytes(task, model, more_places)
    return (kept_bytes(task, model, more_places) - kept_bytes(task, model, fewer_places)) / (
        len(more_places) - len(fewer_places)
    )


def kept_bytes(task: TrainingTask, model: nn.Module, places: Places) -> float:
    leads, dtype = len(task.input.leads), dtype_of(task.config)
    storages: dict[int, torch.UntypedStorage] = {}

    def note_storage(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        storages[storage._cdata] = storage
        return x

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, as_on_a_gpu():
        weights: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            weights[name] = mode.from_tensor(p).to(dtype).detach().requires_grad_(p.requires_grad)
        x_BSLT = torch.empty(len(places), 2, leads, HALF)
        masks = None
        if not task.input.plain:
            masks = np.ones((len(places), task.windows, leads, 1), bool)
        arguments = task.arguments(Batch(x_BSLT, places, keep_BSL1=masks), 1, 1)
        with torch.autograd.graph.saved_tensors_hooks(note_storage, lambda x: x):
            torch.func.functional_call(model.train(), weights, arguments)
        for weight in weights.values():
            storages.pop(weight.untyped_storage()._cdata, None)
    forget_filters()  # a run in this process needs its own
    return float(sum(storage.nbytes() for storage in storages.values()))


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
