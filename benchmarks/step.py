"""One training step on a batch in memory: draws, forward, backward, gradient norm, AdamW.

    fp32       float32 throughout
    autocast   float32 weights, matrix products in bf16
    bf16       bf16 weights and activations, float32 master weights that AdamW updates

It takes turns with a re-creation of the authors' step (benchmarks.authors_step) with their Adam,
and with a large matrix product, the peak rate of this machine. Reports compute MFU from it with
flops_per_crop: 175.9 GFLOP for the paper's model in any implementation. Rates are per CPU-second on
a CPU, which is shared, and per second on a GPU. Crops are noise: the time of a step does not depend
on their content. Timing starts only if both sides give the same loss for the same weights and
draws. On a GPU, other `model.kernels` and compile modes are measured as well.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import measure
from benchmarks.authors_step import AuthorsStep, draw
from benchmarks.measure import Benchmark, CaseError, call_fresh, say
from omnilead.data_tools.cli import keep_freed_memory
from omnilead.engine.common import ConfigError
from omnilead.engine.config import CONFIGS, load
from omnilead.engine.interop import fairseq
from omnilead.engine.interop.parity import Adam, authors_adam, draws_of
from omnilead.engine.model.config import ModelConfig, ObjectiveConfig, flops_per_crop
from omnilead.engine.model.draws import Draws, row_keys
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.model.quantizer import temperature
from omnilead.engine.training.train import COMPILED, compile_model
from omnilead.engine.training.validation import to_device

RECREATION, OURS, PRODUCT = "re-creation of fairseq-signals' step", "omnilead", "matrix product"
BATCHES = {"cpu": (4,), "cuda": (256, 64, 512)}  # crops of 10 s
STEPS = {"cpu": 2, "cuda": 20}  # per repeat
WARM_UP = {"cpu": 1, "cuda": 3}
PRODUCT_SIZE, PRODUCTS = {"cpu": 2048, "cuda": 8192}, {"cpu": 5, "cuda": 20}
TOLERANCE = {
    "cpu": 1e-4,
    "cuda": 1e-3,
}  # between the two losses in float32: GPU kernels sum in other orders
# other settings of our step on a GPU, at the first batch size: the default's own is measured once
VARIANTS = (
    ("kernels", "plain"),  # the library's grouped convolution for the positions, against blocks
    ("compiled", "eager"),
    ("compiled", "layers"),
    ("compiled", "step"),
)
SAMPLES = 2500
FILL_S, FILL_SHARE = (
    150,
    0.35,
)  # time to fill the compile caches: seconds, or share of a suite's remaining time
ADAM = Adam(lr=5e-5, betas=(0.9, 0.98), eps=1e-6, decay=0.01)
AUTHORS_OBJECTIVE = ObjectiveConfig(form="authors", gathered=False)


@dataclass(frozen=True)
class StepRun:
    side: str
    precision: str
    batch: int = 0
    model: str = "paper"
    kernels: str = "auto"
    compiled: str = "eager"
    device: str = "cpu"
    threads: int = 2
    steps: int = 2

    @property
    def name(self) -> str:
        how = [self.precision]
        how += [f"{self.kernels} kernels"] if self.kernels != "auto" else []
        how += [f"{self.compiled} compiled"] if self.compiled != "eager" else []
        how += [f"{self.batch} crops"] if self.batch else []
        return f"{self.side}: {', '.join(how)}"

    @property
    def config(self) -> ModelConfig:
        return replace(model_of(self.model), kernels=self.kernels)  # type: ignore[arg-type]


def model_of(name: str) -> ModelConfig:
    """`name`: paper, the name of a config in configs/pretrain, or a path."""
    return ModelConfig() if name == "paper" else load(config_file(name)).model


def config_file(name: str) -> str:
    """The config file of the experiment; `paper` is W2V + CMSC + RLM."""
    ours = CONFIGS / "pretrain" / f"{'w2v_cmsc_rlm' if name == 'paper' else name}.yaml"
    path = Path(name) if name.endswith(".yaml") else ours
    if not path.is_file():
        raise ConfigError(
            f"--model {name}: no such file: use paper, a name from configs/pretrain, or a path "
            "that ends in .yaml"
        )
    return str(path)


def base_run(options: argparse.Namespace) -> StepRun:
    """The settings that all runs share."""
    device, model = options.device, options.model or "paper"
    return StepRun(
        OURS,
        "bf16",
        model=model,
        device=device,
        steps=options.steps or STEPS[device],
        compiled=COMPILED[device],
    )


def describe(run: StepRun) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if run.device == "cuda" else "cpu"
    gflop = flops_per_crop(run.config) / 1e9
    return {
        "archive": "noise, on the device",
        "device": name,
        "model": run.model,
        "gflop_per_crop": gflop,
    }


def prepare(work: Path, options: argparse.Namespace) -> Benchmark:
    base = base_run(options)
    if base.config.encoder:
        raise SystemExit(
            f"benchmarks.step: --model {base.model}: the authors have no step with this encoder: "
            "use e2e"
        )
    chosen = runs(base, [options.batch] if options.batch else BATCHES[base.device])
    say("checking that both sides give the same loss")
    difference, limit = call_fresh(disagreement, base), TOLERANCE[base.device]
    if not difference <= limit:
        raise SystemExit(
            f"benchmarks.step: the two losses differ by {difference:.1e}, more than {limit:.0e}: "
            "nothing was timed"
        )
    cases = {run.name: (product if run.side == PRODUCT else step, (run,)) for run in chosen}
    compiled = {
        run.name: run for run in chosen if run.compiled != "eager" and base.device == "cuda"
    }
    return Benchmark(
        describe(base) | {"loss_difference": difference},
        cases,
        warm_up=lambda names: fill_compile_caches(
            [run for name, run in compiled.items() if name in names]
        ),
    )


def fill_compile_caches(runs: Sequence[StepRun]) -> None:
    """Compile one step of each run in parallel processes, as a compiler uses one core at a time:
    the measurements then find the code in torch's cache. What fails or takes too long here is
    compiled again when it is measured."""
    seconds = (
        FILL_S if measure.deadline is None else FILL_SHARE * (measure.deadline - time.monotonic())
    )
    end = time.monotonic() + seconds

    def fill(run: StepRun) -> None:
        with contextlib.suppress(CaseError):
            if (left := end - time.monotonic()) > 0:
                call_fresh(warm, run, seconds=left)

    if runs:
        say(f"compiling {len(runs)} cases in parallel")
    with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 4))) as pool:
        list(pool.map(fill, runs))


def warm(run: StepRun) -> None:
    next(step(run))


def runs(base: StepRun, batches: Sequence[int]) -> list[StepRun]:
    """All runs to compare, the most valuable first: on a GPU, what decides the defaults. float32
    only at the smallest batch: at 512 crops a step is 90 TFLOP."""
    recreation = replace(base, side=RECREATION, compiled="eager")
    product_bf16 = replace(base, side=PRODUCT, compiled="eager", precision="bf16")
    chosen = [product_bf16, replace(base, batch=batches[0])]
    if base.device == "cuda":
        chosen += [replace(base, batch=batches[0], **{key: value}) for key, value in VARIANTS]  # type: ignore[arg-type]
    chosen.append(replace(product_bf16, precision="fp32"))
    for batch in batches:
        chosen += [
            replace(base, batch=batch),
            replace(recreation, precision="autocast", batch=batch),
        ]
    for side in (recreation, base):
        chosen.append(replace(side, precision="fp32", batch=min(batches)))
    chosen += [replace(base, precision="autocast", batch=batch) for batch in batches]
    return list(dict.fromkeys(chosen))


def step(run: StepRun) -> Generator[float, bool, None]:
    """Yields once when warm, then the number of crops trained on, repeatedly."""
    set_up(run)
    advance = authors(run) if run.side == RECREATION else ours(run)
    for _ in range(WARM_UP[run.device]):
        advance()
    synchronize(run)
    units = 0.0
    while not (yield units):
        for _ in range(run.steps):
            advance()
        synchronize(run)
        units = float(run.steps * run.batch)


def product(run: StepRun) -> Generator[float, bool, None]:
    """GFLOP of square matrix products."""
    set_up(run)
    size, dtype = (
        PRODUCT_SIZE[run.device],
        torch.float32 if run.precision == "fp32" else torch.bfloat16,
    )
    a, b = (torch.randn(size, size, device=run.device).to(dtype) for _ in range(2))
    a @ b
    synchronize(run)
    units = 0.0
    while not (yield units):
        for _ in range(PRODUCTS[run.device]):
            a @ b
        synchronize(run)
        units = PRODUCTS[run.device] * 2 * size**3 / 1e9


def set_up(run: StepRun) -> None:
    torch.set_num_threads(run.threads)
    torch.manual_seed(1)
    np.random.seed(1)
    if run.device == "cpu":
        keep_freed_memory()  # for both sides; the loader does this where it augments


def synchronize(run: StepRun) -> None:
    if run.device == "cuda":
        torch.cuda.synchronize()


def ours(run: StepRun) -> Callable[[], None]:
    config, device = run.config, torch.device(run.device)
    objective = (
        ObjectiveConfig() if run.model == "paper" else load(config_file(run.model)).objective
    )
    model = Pretrainer(config, objective).to(device).train()
    optimize = optimizer(model, run.precision)
    compile_model(model, run.compiled)
    dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
    x_BSLT = torch.randn(run.batch, 2, config.leads, SAMPLES, device=device).to(dtype)
    ids_B = torch.arange(run.batch, device=device)
    updates = count()

    def advance() -> None:
        update = next(updates)
        keys_BS = to_device(
            row_keys(1, update, np.arange(run.batch)), device
        )  # as in the loop: nothing waits
        tau = torch.tensor(temperature(config, update)).to(device, non_blocking=True)
        with torch.autocast(run.device, torch.bfloat16, enabled=run.precision == "autocast"):
            loss = model(x_BSLT, keys_BS, tau, ids_B)["loss"]
        loss.backward()
        optimize()

    return advance


def optimizer(model: nn.Module, precision: str) -> Callable[[], None]:
    """A function that computes the gradient norm and runs AdamW; for bf16, on float32 masters of a
    model that becomes bf16."""
    weights = list(model.parameters())
    masters = (
        [nn.Parameter(p.detach().clone()) for p in weights] if precision == "bf16" else weights
    )
    if precision == "bf16":
        model.bfloat16()
    adam = torch.optim.AdamW(masters, ADAM.lr, ADAM.betas, ADAM.eps, ADAM.decay, fused=True)

    def optimize() -> None:
        if precision == "bf16":
            for master, p in zip(masters, weights, strict=True):
                master.grad, p.grad = p.grad.float() if p.grad is not None else None, None
        nn.utils.get_total_norm([p.grad for p in masters if p.grad is not None])
        adam.step()
        adam.zero_grad()
        if precision == "bf16":
            with torch.no_grad():
                torch._foreach_copy_([*weights], [*masters])

    return optimize


def authors(run: StepRun) -> Callable[[], None]:
    torch.backends.cudnn.allow_tf32 = (
        True  # torch's default, as the authors leave it; our programs turn it off
    )
    config = run.config
    model = AuthorsStep(config, AUTHORS_OBJECTIVE)
    model.load_state_dict(
        fairseq.to_theirs(Pretrainer(config, AUTHORS_OBJECTIVE).state_dict(), config)
    )
    model.to(run.device).train()
    source = torch.randn(2 * run.batch, config.leads, SAMPLES, device=run.device)
    patient_id = torch.arange(run.batch, device=run.device)
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    updates = count()

    def advance() -> None:
        update = next(updates)
        with torch.autocast(run.device, torch.bfloat16, enabled=run.precision == "autocast"):
            loss, sample_size = model(source, patient_id, temperature(config, update))
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient.div_(sample_size)
        nn.utils.get_total_norm(gradients, foreach=False)
        authors_adam(model, ADAM, moments, update + 1)
        model.zero_grad()

    return advance


def both_sides(
    config: ModelConfig, pairs: int, device: str = "cpu"
) -> tuple[tuple[Pretrainer, Tensor], tuple[AuthorsStep, Tensor]]:
    """Two models with the same weights, and their losses for the same batch and draws, without
    dropout."""
    config = replace(
        config,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        input_dropout=0.0,
        feature_dropout=0.0,
    )
    model, again = Pretrainer(config, AUTHORS_OBJECTIVE), AuthorsStep(config, AUTHORS_OBJECTIVE)
    again.load_state_dict(fairseq.to_theirs(model.state_dict(), config))
    source, patient_id, tau = (
        torch.randn(2 * pairs, config.leads, SAMPLES),
        torch.arange(pairs),
        1.99,
    )
    drawn = draw(
        config, AUTHORS_OBJECTIVE.negatives, 2 * pairs, config.tokens(SAMPLES), source.device
    )
    same = draws_of({name: np.asarray(value) for name, value in drawn._asdict().items()}, config)
    model, again, source, patient_id = (x.to(device) for x in (model, again, source, patient_id))
    summed, tokens = again(
        source, patient_id, tau, drawn._replace(gumbel_noise=drawn.gumbel_noise.to(device))
    )
    same = Draws(*(x if x is None else x.to(device) for x in same))
    x_BSLT, tau_there = source.view(pairs, 2, *source.shape[1:]), torch.tensor(tau, device=device)
    losses = model(x_BSLT, tau=tau_there, ids_B=patient_id, draws=same)
    return (model, losses["loss"]), (again, summed / tokens)


def disagreement(run: StepRun) -> float:
    set_up(run)
    torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        (_, mine), (_, authors_loss) = both_sides(run.config, 2, run.device)
    return abs(float(mine / authors_loss) - 1)
