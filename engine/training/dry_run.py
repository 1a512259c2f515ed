"""Describes a training without running it: its data, model, memory, hours and disk.

    print(dry_run(config, PretrainTask, open_datasets(config), gpus=8))

Needs no GPU, writes nothing, and does not look at RUN. Memory and hours are estimates. Activations
are what autograd keeps of a step on tensors that have shapes and no numbers, uncompiled. With 256 and
512 crops on an H100, compiled by layers, the paper's model needed 29.9 and 54.3 GB; this says 31.7
and 61.8.

A crop takes the time of its matrix products, and of what its activations move. Both rates are one
H100's with the paper's model in bf16 (benchmarks/RESULTS.md, and LOG.md, "On a GPU"): products ran at
97 % of the card's 769 TFLOP/s, and the rest of a crop's 1/1,748 s went to the 118 MB that autograd kept
of it. An H200 has the same processor.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from omnilead.data_tools.dataset import Dataset

from ..data.config import HALF
from ..data.loader import Batch, crop_order
from ..data.order import Order, Places
from ..model.kernels import REPLACEMENTS
from ..model.s4 import StateSpace
from .arguments import dtype_of
from .config import RunConfig, micro_batch_and_passes, zero_stage
from .distributed import Ranks
from .task import TrainingTask
from .train import batch_norm_remarks, format_duration, recompute_layers, total_steps

MATMUL_FLOPS = {
    torch.bfloat16: 0.97 * 769e12,
    # The data sheet gives 67 TFLOP/s in fp32 without TF32, which training does not use, and 989 in
    # bf16
    torch.float32: 0.97 * 769e12 * 67 / 989,
}
ACTIVATION_BYTES_S = 0.118e9 / (1 / 1748 - 175.9e9 / MATMUL_FLOPS[torch.bfloat16])
# A GPU that has less work than these limits also waits for its kernels to start, so the dry run says
# that the training takes "at least" the estimated time
MIN_CROP_GFLOP_FOR_ESTIMATE = 17.6  # of one crop: a tenth of what the measured model needs
# of the crops that one GPU takes at a time: a tenth of the smallest measured pass, of 256 crops
MIN_PASS_GFLOP_FOR_ESTIMATE = 4_500
# bytes of a crop in a shard: 120,832 of samples, 1,536 of its row as JSON
STORED_CROP_BYTES = 122_368


class TrainingAmount(NamedTuple):
    """How much a run trains. `crops`: the number of crops in the datasets, which --crops gives if the
    dataset is pretended."""

    crops: int
    trained_crops: int
    steps_per_epoch: int
    batch_crops: int
    steps: int


def dry_run(
    config: RunConfig,
    task_class: type[TrainingTask],
    datasets: Sequence[Dataset],
    gpus: int,
    crops: int | None = None,
    hourly: float | None = None,
) -> str:
    """Returns the settings, and lines that describe the training. Raises the errors that preparing
    the training would raise, except those about RUN. `crops`: the number that --crops gives if the
    dataset is pretended. `hourly`: the price of a GPU for an hour."""
    task = task_class.prepare(config, datasets, Ranks(0, 1, torch.device("cpu"), None))
    order = crop_order(replace(config.loader, windows=task.windows), datasets, task.selection)
    model = task.model(torch.Generator().manual_seed(config.train.seed))
    if config.train.recompute_layers:
        recompute_layers(model)
    which_gpus = "the GPU" if gpus == 1 else f"each of {gpus} GPUs"
    amount = planned_amount(task, order, crops)
    lines = [
        yaml.safe_dump(config.tree(), sort_keys=False),
        *describe_data(task, amount, pretended=crops is not None),
        describe_training(task, model, amount, gpus, which_gpus),
        *batch_norm_remarks(model, gpus),
        describe_memory(task, model, order, gpus, which_gpus),
        *describe_time_and_disk(task, model, order, amount, gpus, hourly),
    ]
    return "\n".join(lines)


def planned_amount(task: TrainingTask, order: Order, crops: int | None) -> TrainingAmount:
    rows, trained = sum(map(len, task.datasets)), sum(map(len, order.rows))
    if crops:
        trained = crops * trained // rows
    steps_per_epoch = trained // order.batch_crops
    steps = total_steps(task.config, steps_per_epoch)
    return TrainingAmount(crops or rows, trained, steps_per_epoch, order.batch_crops, steps)


def describe_data(task: TrainingTask, amount: TrainingAmount, pretended: bool) -> list[str]:
    of_whom = " of as many patients, which nobody has looked at" if pretended else ""
    trained = (
        f"{amount.trained_crops:,} to train on{'' if pretended else task.left_out_crops_text()}"
    )
    epoch = f"an epoch is {amount.steps_per_epoch:,} x {amount.batch_crops} crops"
    line = f"data: {amount.crops:,} crops{of_whom}, {trained}; {epoch}"
    return [line] if pretended else [line, *task.remarks]


def describe_training(
    task: TrainingTask, model: nn.Module, amount: TrainingAmount, gpus: int, which_gpus: str
) -> str:
    crops, passes = micro_batch_and_passes(task.config, gpus)
    parameters = sum(p.numel() for p in model.parameters())
    return (
        f"model: {parameters:,} parameters, {task.flops_per_crop / 1e9:.4g} GFLOP a crop; training: "
        f"{amount.steps:,} steps, {passes} x {crops} crops on {which_gpus}: {describe_epochs(amount)}"
    )


def describe_epochs(amount: TrainingAmount) -> str:
    epochs = amount.steps / amount.steps_per_epoch
    if epochs < 1:
        return f"{epochs:.2g} of an epoch; train.epochs=1 reads every crop once"
    return f"{epochs:.4g} epochs"


def describe_memory(
    task: TrainingTask, model: nn.Module, order: Order, gpus: int, which_gpus: str
) -> str:
    crops, _ = micro_batch_and_passes(task.config, gpus)
    memory = state_bytes(model, dtype_of(task.config), zero_stage(task.config), gpus)
    activations, unknown = f"activations of {crops} crops", ""
    try:
        memory[activations] = crops * peak_activation_bytes_per_crop(task, model, order)
    except Exception as error:
        if not task.code:
            raise
        why = type(error).__name__
        unknown = f", without {activations}: the plug-in needs numbers ({why})"
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in memory.items())
    return f"memory of {which_gpus}, an estimate: {format_size(sum(memory.values()))}: {parts}{unknown}"


def describe_time_and_disk(
    task: TrainingTask,
    model: nn.Module,
    order: Order,
    amount: TrainingAmount,
    gpus: int,
    hourly: float | None,
) -> list[str]:
    states = state_bytes(model, dtype_of(task.config), 0, 1)
    states.pop("gradients")
    checkpoint = format_size(sum(states.values()))
    disk = f"disk: {checkpoint} a checkpoint; the {task.config.train.keep} newest and the best are kept"
    try:
        crops_s = gpus / seconds_per_crop(task, model, order)
    except Exception as error:
        if not task.code:
            raise
        return [f"time: not estimated, the plug-in needs numbers ({type(error).__name__})", disk]
    seconds = amount.steps * amount.batch_crops / crops_s
    as_measured = "as fast as one H100 was with the paper's model in bf16"
    if dtype_of(task.config) == torch.float32:
        as_measured += ", products by the data sheet's share of fp32"
    estimate = "an estimate"
    micro_crops, _ = micro_batch_and_passes(task.config, gpus)
    if task.flops_per_crop < MIN_CROP_GFLOP_FOR_ESTIMATE * 1e9:
        estimate = "at least"
        as_measured += ", but so small a model also waits for its kernels to start"
    elif micro_crops * task.flops_per_crop < MIN_PASS_GFLOP_FOR_ESTIMATE * 1e9:
        estimate = "at least"
        as_measured += (
            f", but with {micro_crops} crops at a time a GPU also waits for its kernels to start"
        )
    else:
        disk += f"; reads {crops_s * STORED_CROP_BYTES / 1e6:,.0f} MB/s"
    lines = [
        f"time on H100 or H200, {estimate}: {format_duration(seconds)}, {crops_s:,.0f} crops/s: {as_measured}",
        disk,
    ]
    if hourly is not None:
        hours = gpus * seconds / 3600
        cost = f"{hours * hourly:,.2f}" if hours * hourly >= 0.01 else "less than 0.01"
        lines.insert(1, f"money, {estimate}: {cost}, {hours:,.2f} GPU-hours at {hourly:g}")
    return lines


def seconds_per_crop(task: TrainingTask, model: Any, order: Order) -> float:
    """Returns the seconds that a crop takes on one GPU: the time of its matrix products plus the time
    in which its activations are moved."""
    recomputed = task.config.train.recompute_layers
    if recomputed:
        model.encoder.recomputes = False
    kept = saved_tensor_bytes_per_crop(task, model, order)
    if recomputed:
        model.encoder.recomputes = True
    seconds = task.flops_per_crop / MATMUL_FLOPS[dtype_of(task.config)] + kept / ACTIVATION_BYTES_S
    # A backward pass costs as much as two forward passes. With recomputing there are two forward
    # passes, so the cost is 4 instead of 3
    return seconds * (4 / 3 if recomputed else 1)


def format_size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size > 1e8 else f"{size / 1e6:.1f} MB"


def state_bytes(model: nn.Module, dtype: torch.dtype, stage: int, gpus: int) -> dict[str, float]:
    """Returns the bytes that weights, gradients, AdamW's state and buffers take on each GPU. With
    bf16, AdamW's state includes float32 weights."""
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adamw = 12 if dtype == torch.bfloat16 else 8
    states = {
        "weights": parameters * dtype.itemsize / (gpus if stage >= 3 else 1),
        "gradients": trained * dtype.itemsize / (gpus if stage >= 2 else 1),
        f"AdamW with ZeRO {stage}": trained * adamw / (gpus if stage else 1),
    }
    if buffers := sum(buffer.nbytes for buffer in model.buffers()):
        states["buffers"] = buffers
    return states


def peak_activation_bytes_per_crop(task: TrainingTask, model: Any, order: Order) -> float:
    """Returns the bytes per crop that autograd keeps until the backward pass. With
    train.recompute_layers this includes one layer that is being recomputed."""
    kept_by_layers = saved_tensor_bytes_per_crop(task, model, order)
    if not task.config.train.recompute_layers:
        return kept_by_layers
    model.encoder.recomputes = False
    without = saved_tensor_bytes_per_crop(task, model, order)
    model.encoder.recomputes = True
    return kept_by_layers + (without - kept_by_layers) / len(model.encoder.layers)


def saved_tensor_bytes_per_crop(task: TrainingTask, model: nn.Module, order: Order) -> float:
    fewer_places, more_places = (order.batch(0)[:n] for n in (1, min(3, order.batch_crops)))
    if len(more_places) == 1:
        return saved_tensor_bytes(task, model, more_places)
    return (
        saved_tensor_bytes(task, model, more_places) - saved_tensor_bytes(task, model, fewer_places)
    ) / (len(more_places) - len(fewer_places))


def saved_tensor_bytes(task: TrainingTask, model: nn.Module, places: Places) -> float:
    leads, dtype = len(task.input.leads), dtype_of(task.config)
    storages: dict[int, torch.UntypedStorage] = {}

    def note_storage(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        storages[storage._cdata] = storage
        return x

    masks = None
    if not task.input.uses_stored_halves:
        masks = np.ones((len(places), task.windows, leads, 1), bool)
    # Real tensors, because filters that are computed here are cached: fake ones would spoil the
    # next training
    x_BSLT = torch.zeros(len(places), 2, leads, HALF)
    arguments = task.arguments(Batch(x_BSLT, places, keep_BSL1=masks), 1, 1)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, gpu_operations(model):
        weights: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            weights[name] = mode.from_tensor(p).to(dtype).detach().requires_grad_(p.requires_grad)
        with torch.autograd.graph.saved_tensors_hooks(note_storage, lambda x: x):
            torch.func.functional_call(model.train(), weights, arguments)
        for weight in weights.values():
            storages.pop(weight.untyped_storage()._cdata, None)
    return float(sum(storage.nbytes() for storage in storages.values()))


class FusedAttention(torch.autograd.Function):
    """Stands for a GPU's fused attention: for the backward pass it keeps inputs and output, but no
    scores."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.empty_like(q)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)


@contextmanager
def gpu_operations(model: nn.Module) -> Iterator[None]:
    """A context in which operations are those of a GPU: torch's own instead of the replacements for
    a CPU, fused attention, and S4's kernels."""
    attention, for_a_cpu = F.scaled_dot_product_attention, REPLACEMENTS["cpu"].copy()
    spaces = [part for part in model.modules() if isinstance(part, StateSpace)]

    def fused_attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        y: Tensor = FusedAttention.apply(q, k, v)
        return y

    F.scaled_dot_product_attention = fused_attention  # type: ignore[assignment]
    REPLACEMENTS["cpu"].clear()
    for space in spaces:
        space.in_registers = True
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention
        REPLACEMENTS["cpu"].update(for_a_cpu)
        for space in spaces:
            space.in_registers = False
