"""Where a step's time goes: each stage by itself, forward and backward, beside the time that it must take by formula.

    python -m benchmarks.run step --explain [--device cpu|cuda] [--model paper] [--batches 8] [--precision bf16]
                                  [--machine h200 | --peak-tflops T --bandwidth-gb B]

The stages are those of benchmarks.cost; each is the model's own module on tensors of the right shape, of a model in training
mode. What is predicted is for the machine named, or for this one: its large matrix product and its large copy. Sorted by gap,
measured less predicted, it is the list of what to work on. Their sum stands beside the whole step, measured alike: what the sum
lacks is glue, what it has too much is what one stage leaves in the cache for the next. On a CPU all are CPU-milliseconds: its
cores are shared; on a GPU milliseconds between events. Each stage is compiled as the loop does it, with
`layers` all but what follows the quantiser's codes and the pooling.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import cost, step
from benchmarks.measure import Progress, call_fresh, spread
from benchmarks.step import OURS, Run
from data_tools.cli import keep_freed_memory
from engine.model.config import ModelConfig, ObjectiveConfig
from engine.model.draws import draw
from engine.model.encoder import pool
from engine.model.kernels import pick
from engine.model.pretrainer import Pretrainer, take
from engine.objectives.contrastive import nt_xent
from engine.objectives.local import diversity, local_loss
from engine.training.throughput import AGAIN, COMPILED

REPEATS = {"cpu": 3, "cuda": 20}
BATCH = {"cpu": 4, "cuda": 256}
SUM, WHOLE = "all stages", "the whole step"
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}

PARTLY = ("quantiser", "global loss")  # by train.compile=layers
AHEAD = 20_000_000  # a GPU's cycles, 10 ms

# What is timed: a function, and the tensors that it gets.
Timed = tuple[Callable[..., Any], tuple[Tensor, ...]]
Inner = Callable[[Callable[..., Any]], Callable[..., Any]]


class Given(nn.Module):
    """In place of a projection: what comes out of it."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        return self.output


def timed(model: Pretrainer, batch: int, precision: str, device: str, inner: Inner = lambda part: part) -> dict[str, Timed]:
    """A function for each stage of benchmarks.cost but the optimiser, and its inputs, which want gradients. `inner` gets
    what train.compile=layers compiles of the stages PARTLY."""
    dtype, rows, config = torch.float32 if precision == "fp32" else torch.bfloat16, 2 * batch, model.config
    tokens = config.tokens(cost.SAMPLES)

    def some(*shape: int, dtype: torch.dtype = dtype, wanted: bool = True) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(wanted)

    found = convolutions(model, rows, some)
    found |= before_layers(model, rows, tokens, some)
    found |= layer_parts(model.encoder.layers[0], config, rows, tokens, some)
    found |= local_parts(model, rows, tokens, some, inner)
    objective, pooled = model.objective, inner(pool)
    found["global loss"] = (
        lambda c: nt_xent(pooled(c).unflatten(0, (-1, 2)), objective.temperature, True, False)[0],
        (some(rows, tokens, config.width),),
    )
    return found


def convolutions(model: Pretrainer, rows: int, some: Callable[..., Tensor]) -> dict[str, Timed]:
    found: dict[str, Timed] = {}
    config, length, width = model.config, cost.SAMPLES, model.config.leads
    keep = length // config.patch * config.patch
    for i, ((out, kernel), block) in enumerate(zip(config.conv, model.encoder.conv.blocks, strict=True)):
        keep //= kernel
        if i == 0:
            function = partial(lambda block, x: block(x.transpose(1, 2).to(block.weight.dtype)), block)
            found["convolution 1"] = (function, (some(rows, width, length, dtype=torch.float32, wanted=False),))
        else:
            function = partial(lambda block, x: block(x), block)
            found[f"convolution {i + 1}"] = (function, (some(rows, keep * kernel, width),))
        width = out
    return found


def before_layers(model: Pretrainer, rows: int, tokens: int, some: Callable[..., Tensor]) -> dict[str, Timed]:
    config, encoder = model.config, model.encoder
    mask_RN1 = torch.rand(rows, tokens, 1, device=some(1).device) < 0.5

    def masked(x: Tensor) -> Tensor:
        return torch.where(mask_RN1, encoder.mask_embedding.to(x.dtype), encoder.input_dropout(x))

    d = (rows, tokens, config.width)
    z = (rows, tokens, config.feature_width)
    found: dict[str, Timed] = {
        "feature norm and penalty": (lambda x: (encoder.feature_norm(x), x.float().square().mean()), (some(*z),)),
        "dropout and mask": (masked, (some(*d),)),
        "positional convolution": (encoder.position, (some(*d),)),
        "norm before the layers": (lambda x, y: encoder.dropout(encoder.norm(x + y)), (some(*d), some(*d))),
    }
    if config.feature_width != config.width:
        found["projection"] = (encoder.project, (some(*z),))
    return found


def layer_parts(layer: Any, config: ModelConfig, rows: int, tokens: int, some: Callable[..., Tensor]) -> dict[str, Timed]:
    d, wide = (rows, tokens, config.width), (rows, tokens, config.ffn)
    qkv = some(rows, tokens, 3 * config.width)
    attention = copy.deepcopy(layer.attention)
    attention.qkv, attention.out = Given(qkv), nn.Identity()
    x = some(*d, wanted=False)

    def joined(norm: nn.Module, x: Tensor, y: Tensor) -> Any:
        return norm(x + layer.dropout(y))

    return {
        "qkv": (layer.attention.qkv, (some(*d),)),
        "attention": (lambda _: attention(x), (qkv,)),
        "attention out": (layer.attention.out, (some(*d),)),
        "dropout, residual, norm 1": (partial(joined, layer.norm1), (some(*d), some(*d))),
        "fc1": (layer.fc1, (some(*d),)),
        "GELU": (lambda x: layer.activation_dropout(pick("gelu", F.gelu, config.kernels, x)(x)), (some(*wide),)),
        "fc2": (layer.fc2, (some(*wide),)),
        "dropout, residual, norm 2": (partial(joined, layer.norm2), (some(*d), some(*d))),
    }


def local_parts(model: Pretrainer, rows: int, tokens: int, some: Callable[..., Tensor], inner: Inner) -> dict[str, Timed]:
    config, objective, local = model.config, model.objective, model.local
    assert local is not None
    keys = torch.arange(rows, device=some(1).device) * 7919
    draws = draw(config, keys, tokens, objective.negatives)
    tau = torch.tensor(1.9, device=keys.device)
    slots = draws.slot_RM.shape[1]
    c_RND, z_RNF = some(rows, tokens, config.width), some(rows, tokens, config.feature_width)
    with torch.no_grad():
        quantised = local.quantizer(take(z_RNF, draws.slot_RM).to(local.quantizer.codebook.dtype), draws.valid_RM, tau, None)

    def codes(z_RNF: Tensor) -> Any:
        z_RMF = local.dropout(take(z_RNF, draws.slot_RM))
        return local.quantizer(z_RMF, draws.valid_RM, tau, draws.noise_RMGV)

    chosen = inner(codes)

    def quantiser(z_RNF: Tensor) -> Any:
        q = chosen(z_RNF)
        return q.values_RMP, diversity(q.share_GV, q.hard_GV, q.tokens, True)[0]

    def loss(context_RMP: Tensor, target_RMP: Tensor) -> Tensor:
        return local_loss(context_RMP, target_RMP, draws.times_RMM, draws.valid_RM, quantised.codes_RMG, objective.temperature)[
            0
        ]

    return {
        "draws": (lambda keys: draw(config, keys, tokens, objective.negatives), (keys,)),
        "quantiser": (quantiser, (z_RNF,)),
        "projections": (
            lambda c, v: (local.context(take(c, draws.slot_RM)), local.target(v)),
            (c_RND, some(rows, slots, config.code_width)),
        ),
        "local loss": (loss, (some(rows, slots, config.projection), some(rows, slots, config.projection))),
    }


def times_ms(once: Callable[[], None], device: str) -> list[float]:
    once()
    found = []
    for _ in range(REPEATS[device]):
        if device == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD)  # while the host launches, which in a step is ahead: else small kernels would wait for it
            began.record()
            once()
            ended.record()
            ended.synchronize()
            found.append(began.elapsed_time(ended))
        else:
            since = time.process_time()
            once()
            found.append((time.process_time() - since) * 1e3)
    return found


def both_ways(function: Callable[..., Any], inputs: tuple[Tensor, ...], run: Run) -> Callable[[], None]:
    """Forward, and backward if it has a gradient, from gradients of ones."""

    def once() -> None:
        for x in inputs:
            x.grad = None
        with torch.autocast(run.device, torch.bfloat16, enabled=run.precision == "autocast"):
            answer = function(*inputs)
        outs = [y for y in (answer if isinstance(answer, tuple) else (answer,)) if isinstance(y, Tensor) and y.requires_grad]
        if outs:
            torch.autograd.backward(outs, [torch.ones_like(y) for y in outs])

    return once


def optimiser(model: Pretrainer, precision: str) -> Callable[[], None]:
    """As in benchmarks.step: the norm, AdamW, and for bf16 the float32 masters and back."""
    weights = list(model.parameters())
    masters = [nn.Parameter(p.detach().float().clone()) for p in weights]
    adam = torch.optim.AdamW(masters, step.ADAM.lr, step.ADAM.betas, step.ADAM.eps, step.ADAM.decay, fused=True)
    gradients = [torch.randn_like(p) for p in weights]

    def once() -> None:
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.float()
        nn.utils.get_total_norm([p.grad for p in masters if p.grad is not None])
        adam.step()
        if precision == "bf16":
            with torch.no_grad():
                torch._foreach_copy_([*weights], [*masters])

    return once


def measured(run: Run) -> dict[str, list[float]]:
    """Stage -> milliseconds of one time, in a process of its own; and of the whole step."""
    step.prepare(run)
    if run.device == "cpu":
        keep_freed_memory()  # as in the whole step
    model = Pretrainer(run.config, ObjectiveConfig()).to(run.device).train()
    if run.precision == "bf16":
        model.bfloat16()
    found, compiled = {}, partial(torch.compile, dynamic=False, options=AGAIN)
    inner = (compiled,) if run.compiled == "layers" else ()
    for name, (function, inputs) in timed(model, run.batch, run.precision, run.device, *inner).items():
        torch.compiler.reset()  # stages share code, and a second shape of it would be compiled for any, which is slower
        if run.compiled == "step" or (run.compiled == "layers" and name not in PARTLY):
            function = compiled(function)
        found[name] = times_ms(both_ways(function, inputs, run), run.device)
        model.zero_grad()
    found["gradient norm, AdamW"] = times_ms(optimiser(model, run.precision), run.device)
    del model
    torch.compiler.reset()
    found[WHOLE] = times_ms(step.ours(run), run.device)
    return found


def this_machine(run: Run) -> cost.Machine:
    """Its large matrix product and its large copy, in a process of its own; the fastest of some."""
    step.prepare(run)
    dtype, size = torch.float32 if run.precision == "fp32" else torch.bfloat16, step.PRODUCT_SIZE[run.device]
    a, b = (torch.randn(size, size, device=run.device).to(dtype) for _ in range(2))
    product_ms = min(times_ms(lambda: torch.mm(a, b), run.device) + times_ms(lambda: torch.mm(a, b), run.device))
    source = torch.ones(COPY_BYTES[run.device] // 4, device=run.device)
    target = torch.empty_like(source)
    copy_ms = min(times_ms(lambda: target.copy_(source), run.device))
    tflops, gb_per_s = 2 * size**3 / product_ms / 1e9, 2 * source.nbytes / copy_ms / 1e6
    name = torch.cuda.get_device_name() if run.device == "cuda" else "this machine, per CPU-second"
    return cost.Machine(name, dict.fromkeys(step.PRECISIONS, tflops), gb_per_s, "measured: product and copy")


def machine_of(options: argparse.Namespace, run: Run) -> cost.Machine:
    machine = cost.MACHINES.get(options.machine) or call_fresh(this_machine, run)
    given = machine.tflops | (dict.fromkeys(step.PRECISIONS, options.peak_tflops) if options.peak_tflops else {})
    source = "given" if options.peak_tflops and options.bandwidth_gb else machine.source
    return replace(machine, tflops=given, gb_per_s=options.bandwidth_gb or machine.gb_per_s, source=source)


def explain(work: Path, options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    base = step.base_run(options)
    compiled = (options.compiled or [COMPILED[base.device]])[0]
    batch = (options.batches or [BATCH[base.device]])[0]
    run = replace(base, side=OURS, precision=options.precision, batch=batch, compiled=compiled)
    progress("what this machine can do" if options.machine == "this" else f"for {options.machine}")
    machine = machine_of(options, run)
    progress(f"{batch} crops, stage by stage")
    found = call_fresh(measured, run)
    results = beside(cost.stages(run.config, batch, run.precision), found, machine, run.precision)
    record = {
        "input": step.facts(run) | {"crops": batch, "precision": run.precision, "compiled": compiled},
        "machine": {"name": machine.name, "tflops": machine.tflops[run.precision], "gb_per_s": machine.gb_per_s}
        | {"source": machine.source},
        "results": results,
    }
    print("\n".join(lines(record)))
    return record


def beside(
    stages: Sequence[cost.Stage], found: dict[str, list[float]], machine: cost.Machine, precision: str
) -> dict[str, dict[str, Any]]:
    """Predicted and measured of each stage, largest gap first; then their sum and the whole step."""
    results: dict[str, dict[str, Any]] = {}
    for one in stages:
        ms = spread(value * one.times for value in found[one.name])
        predicted = one.ms(machine, precision)
        results[one.name] = {"ms": ms, "predicted_ms": predicted, "gap_ms": ms["median"] - predicted}
        results[one.name] |= {"bound": one.bound(machine, precision), "gflop": one.all_flops / 1e9, "gb": one.all_bytes / 1e9}
    results = dict(sorted(results.items(), key=lambda item: -float(item[1]["gap_ms"])))
    both = {key: sum(float(r[key]) for r in results.values()) for key in ("predicted_ms", "gflop", "gb")}
    summed = {key: sum(float(r["ms"][key]) for r in results.values()) for key in ("median", "low", "high")}
    for name, ms in ((SUM, summed), (WHOLE, spread(found[WHOLE]))):
        results[name] = {"ms": ms, **both, "gap_ms": ms["median"] - both["predicted_ms"], "bound": ""}
    return results


def lines(record: dict[str, Any]) -> Iterator[str]:
    given, machine = record["input"], record["machine"]
    unit = "CPU-ms" if given["device"] == "cpu" else "ms"
    yield (
        f"{given['crops']} crops, {given['precision']}, {given['model']} model; predicted for {machine['name']}: "
        f"{machine['tflops']:.3g} TFLOP/s, {machine['gb_per_s']:.3g} GB/s ({machine['source']})"
    )
    yield f"{unit:<28}  measured  predicted       gap  bound by     GFLOP      GB"
    for name, r in record["results"].items():
        figures = f"{r['ms']['median']:9.2f}  {r['predicted_ms']:9.2f}  {r['gap_ms']:8.2f}"
        yield f"{name:<28} {figures}  {r['bound']:<8}  {r['gflop']:8.1f} {r['gb']:7.2f}"
