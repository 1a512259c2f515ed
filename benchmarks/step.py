"""Measure one training step on a batch in memory: random draws, forward, backward, gradient norm, AdamW.

    fp32       float32 throughout
    autocast   float32 weights, matrix products in bf16
    bf16       bf16 weights and activations, float32 master weights that AdamW updates

It takes turns with a re-creation of the authors' step (benchmarks.authors_step) and with a large
matrix product, the peak rate of this machine. Reports compute MFU from it with flops_per_crop:
175.9 GFLOP for the paper's model in any implementation. Rates are per CPU-second on a CPU, which is
shared, and per second on a GPU. Crops are noise: the time of a step does not depend on their
content. Timing starts only if both sides give the same loss for the same weights and draws. On a
GPU, other `model.kernels`, compile modes and implementations of attention are measured as well.
A result says which of the latter ran, by a trace of the last step of the warm-up.
"""

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks import measure
from benchmarks.authors_step import AuthorsStep, convert_draws, make_draws
from benchmarks.measure import CaseError, Cases, Result, call_fresh, measure_case, say
from omnilead.data_tools.io.terminal import keep_freed_memory
from omnilead.engine.data.augmenter import to_device
from omnilead.engine.model.config import ModelConfig, ObjectiveConfig, flops_per_crop
from omnilead.engine.model.draws import Draws, row_keys
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.model.quantizer import temperature
from omnilead.engine.settings.files import find_config
from omnilead.engine.training.config import Config, load_config
from omnilead.engine.training.train import COMPILE_DEFAULTS, compile_model

LossFunction = Callable[[], Tensor]
RECREATION, OURS, PRODUCT = "re-creation of fairseq-signals' step", "omnilead", "matrix product"
BATCH_SIZES = {"cpu": (4,), "cuda": (512, 256, 64)}  # crops of 10 s; the paper's batch has 512
STEPS_PER_REPEAT = {"cpu": 2, "cuda": 20}
WARM_UP_STEPS = {"cpu": 1, "cuda": 3}  # how many steps are not counted
PRODUCT_SIZE, PRODUCTS = {"cpu": 2048, "cuda": 8192}, {"cpu": 5, "cuda": 20}
SMALL_BATCH = 128  # steps with up to so many crops are small enough that four fit a GPU at once
# Largest relative difference that our loss and that of the re-creation may have in float32. It is not 0,
# because GPU kernels sum in different orders
LOSS_TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}
# Settings of our step that are changed, one at a time, on a GPU and with the first of the batch sizes. A
# variant that equals the default is measured only once
GPU_VARIANTS: tuple[dict[str, str], ...] = (
    {"compiled": "step"},
    # Both of these attentions are measured, because which one torch prefers depends on its version and the GPU
    {"attention": "cudnn"},
    {"attention": "flash"},
    # The positional convolution is computed by torch's grouped convolution, not in blocks
    {"kernels": "plain"},
    {"compiled": "eager"},
)
ATTENTION_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
# Name of the operation in a trace of torch that shows which implementation computed the attention
ATTENTION_EVENT = re.compile(r"aten::_scaled_dot_product_(?:attention_)?([a-z]+)(?!.*_backward)")
HALF_SAMPLES = 2500
COMPILE_LIMIT_S = 150  # how long fill_compile_caches may take
ADAM: Any = {"lr": 5e-5, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}
AUTHORS_OBJECTIVE = ObjectiveConfig(form="authors", gathered=False)
DROPOUTS = "dropout attention_dropout activation_dropout input_dropout feature_dropout"


@dataclass(frozen=True)
class StepRun:
    """A case: the step, or the matrix product, that is measured, and its settings."""

    side: str  # RECREATION, OURS or PRODUCT
    precision: str
    batch: int = 0
    model: str = "paper"
    kernels: str = "auto"
    compiled: str = "eager"
    attention: str = ""  # one of ATTENTION_BACKENDS; with "", torch chooses
    device: str = "cpu"
    threads: int = 2
    steps: int = 2

    @property
    def name(self) -> str:
        variants = [self.precision]
        variants += [f"{self.kernels} kernels"] if self.kernels != "auto" else []
        variants += [f"{self.compiled} compiled"] if self.compiled != "eager" else []
        variants += [f"{self.attention} attention"] if self.attention else []
        variants += [f"{self.batch} crops"] if self.batch else []
        return f"{self.side}: {', '.join(variants)}"

    @property
    def config(self) -> ModelConfig:
        model = config_of(self.model).model
        return replace(model, kernels=self.kernels)  # type: ignore[arg-type]


def config_name(model: str) -> str:
    """Returns the name or path of the config for --model: `paper` stands for W2V + CMSC + RLM; other names and
    paths are unchanged."""
    return "w2v_cmsc_rlm" if model == "paper" else model


def config_of(model: str) -> Config:
    return load_config(str(find_config(config_name(model), "pretrain", "--model")))


def prepare_input_and_cases(work: Path, options: argparse.Namespace) -> tuple[Result, Cases]:
    device, model = options.device, options.model or "paper"
    steps = options.steps or STEPS_PER_REPEAT[device]
    base = StepRun(
        OURS, "bf16", model=model, device=device, steps=steps, compiled=COMPILE_DEFAULTS[device]
    )
    if base.config.encoder:
        raise CaseError(
            f"--model {model}: fairseq-signals has no such encoder to compare with: use the benchmark e2e"
        )
    say("checking that both sides give the same loss")
    difference, limit = call_fresh(loss_difference, base), LOSS_TOLERANCE[device]
    if not difference <= limit:
        raise CaseError(
            f"the losses of omnilead and the re-creation differ by {difference:.1e}, more than {limit:.0e}, so nothing "
            "was timed"
        )
    chosen = runs_to_compare(base, [options.batch] if options.batch else BATCH_SIZES[device])
    if device == "cuda":
        fill_compile_caches([run for run in chosen if re.search(options.only or "", run.name)])
    facts = {
        "archive": "noise, on the device",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "model": model,
        "gflop_per_crop": flops_per_crop(base.config) / 1e9,
        "loss_difference": difference,
    }
    cases: Cases = {}
    for run in chosen:
        cases[run.name] = (repeat_products if run.side == PRODUCT else repeat_steps, (run,))
    return facts, cases


def fill_compile_caches(runs: Sequence[StepRun]) -> None:
    """Compiles one step of each run, so that the measurements find the code in torch's cache. A run that fails or
    takes too long here is reported, and compiled when it is measured. Runs with small batches are compiled in
    parallel processes, because a compiler uses one core at a time. Runs with large batches are not, because
    they do not fit a GPU together: two steps of 512 crops take 111 GB."""
    end = min(time.monotonic() + COMPILE_LIMIT_S, measure.deadline)

    def compile_step(run: StepRun) -> None:
        try:
            call_fresh(measure_case, repeat_steps, (run,), 0, seconds=end - time.monotonic())
        except CaseError as error:
            say(f"{run.name}: not compiled before it is measured: {error}")

    compiled = [run for run in runs if run.compiled != "eager"]
    for run in compiled:
        if run.batch > SMALL_BATCH:
            compile_step(run)
    with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 4))) as pool:
        list(pool.map(compile_step, [run for run in compiled if run.batch <= SMALL_BATCH]))


def runs_to_compare(base: StepRun, batches: Sequence[int]) -> list[StepRun]:
    """Returns all runs to compare. The most important ones come first: on a GPU, those that decide the default
    settings. float32 is measured only with the smallest batch, because a step of 512 crops is 90 TFLOP."""
    recreation = replace(base, side=RECREATION, compiled="eager")
    product_bf16 = replace(base, side=PRODUCT, compiled="eager")
    first, smallest = replace(base, batch=batches[0]), min(batches)
    chosen = [product_bf16, first]
    if base.device == "cuda":
        chosen += [replace(first, **changes) for changes in GPU_VARIANTS]
    chosen.append(replace(product_bf16, precision="fp32"))
    for batch in batches:
        autocast = replace(recreation, precision="autocast", batch=batch)
        chosen += [replace(base, batch=batch), autocast]
    chosen += [replace(side, precision="fp32", batch=smallest) for side in (recreation, base)]
    chosen += [replace(base, precision="autocast", batch=batch) for batch in batches]
    return list(dict.fromkeys(chosen))


def repeat_steps(run: StepRun) -> Iterator[Any]:
    """Yields which implementation computes the attention, after the warm-up. Then yields repeatedly the number
    of crops that a repeat trained on."""
    set_up(run)
    with force_attention(run.attention):
        advance = prepare_authors(run) if run.side == RECREATION else prepare_ours(run)
        for _ in range(WARM_UP_STEPS[run.device] - 1):
            advance()
        yield {"attention": detect_attention(advance)}
        while True:
            for _ in range(run.steps):
                advance()
            synchronize(run.device)
            yield run.steps * run.batch


@contextmanager
def force_attention(name: str) -> Iterator[None]:
    """Makes torch use one of ATTENTION_BACKENDS within the context. Raises a CaseError if torch cannot use it on
    this device."""
    if not name:
        yield
        return
    try:
        # The cache of compiled code is off, because its keys do not include the attention: code compiled for
        # another implementation would run
        with functorch.patch(enable_autograd_cache=False), sdpa_kernel(ATTENTION_BACKENDS[name]):
            yield
    except RuntimeError as error:
        if re.search("No available kernel|No viable backend", str(error)):
            raise CaseError(
                f"torch has no {name} attention for this device and these shapes"
            ) from None
        raise


def detect_attention(advance: Callable[[], None]) -> str:
    """Returns which of torch's implementations computes the attention in a step: flash, cudnn, efficient or math;
    unfused if it is none of these."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # silences the profiler
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        advance()
    matches = (ATTENTION_EVENT.match(event.key) for event in traced.key_averages())
    return " and ".join(sorted({match[1] for match in matches if match})) or "unfused"


def repeat_products(run: StepRun) -> Iterator[float]:
    """Yields repeatedly how many GFLOP of square matrix products were computed, to measure the peak rate of the
    machine."""
    set_up(run)
    size, dtype = PRODUCT_SIZE[run.device], dtype_of(run)
    a, b = (torch.randn(size, size, device=run.device).to(dtype) for _ in range(2))
    while True:
        for _ in range(PRODUCTS[run.device]):
            a @ b
        synchronize(run.device)
        yield PRODUCTS[run.device] * 2 * size**3 / 1e9


def dtype_of(run: StepRun) -> torch.dtype:
    return torch.bfloat16 if run.precision == "bf16" else torch.float32


def set_up(run: StepRun) -> None:
    """Sets threads, random seeds and malloc of this process."""
    torch.set_num_threads(run.threads)
    torch.manual_seed(1)
    np.random.seed(1)
    if run.device == "cpu":
        # In training, the loader calls keep_freed_memory. This benchmark has no loader, and calls it for
        # the re-creation of fairseq-signals, too
        keep_freed_memory()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def prepare_ours(run: StepRun) -> Callable[[], None]:
    """Returns a function that runs one training step of omnilead."""
    whole, config, device = config_of(run.model), run.config, torch.device(run.device)
    model = Pretrainer(config, whole.objective).to(device).train()
    optimize = make_optimizer_step(model, run.precision)
    compile_model(model, run.compiled)
    shape = run.batch, whole.windows, config.leads, whole.input.samples
    x_BSLT = torch.randn(shape, device=device).to(dtype_of(run))
    ids_B = torch.arange(run.batch, device=device)
    updates = count()

    def advance() -> None:
        update = next(updates)
        # As in the training loop, these copies do not wait for the GPU
        keys_BS = to_device(row_keys(1, update, np.arange(run.batch), whole.windows), device)
        tau = torch.tensor(temperature(config, update)).to(device, non_blocking=True)
        with torch.autocast(run.device, torch.bfloat16, enabled=run.precision == "autocast"):
            loss = model(x_BSLT, keys_BS, tau, ids_B)["loss"]
        loss.backward()
        optimize()

    return advance


def make_optimizer_step(model: nn.Module, precision: str) -> Callable[[], None]:
    """Returns a function that computes the gradient norm and runs AdamW. With precision bf16, the model is converted
    to bf16, and AdamW updates float32 copies of its weights."""
    weights = masters = list(model.parameters())
    if precision == "bf16":
        masters = [nn.Parameter(p.detach().clone()) for p in weights]
        model.bfloat16()
    adam = torch.optim.AdamW(masters, fused=True, **ADAM)

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


def prepare_authors(run: StepRun) -> Callable[[], None]:
    """Returns a function that runs one training step of the re-creation of fairseq-signals."""
    # TF32 for convolutions is torch's default, which fairseq-signals keeps. Our programs turn it off
    torch.backends.cudnn.allow_tf32 = True
    config = run.config
    model = AuthorsStep(Pretrainer(config, AUTHORS_OBJECTIVE)).to(run.device).train()
    source = torch.randn(2 * run.batch, config.leads, HALF_SAMPLES, device=run.device)
    patient_id = torch.arange(run.batch, device=run.device)
    # In fairseq-signals' own Adam, eps stands at another place of the formula; that takes no less time
    adam = torch.optim.AdamW(model.parameters(), foreach=False, **ADAM)
    updates = count()

    def advance() -> None:
        tau = temperature(config, next(updates))
        with torch.autocast(run.device, torch.bfloat16, enabled=run.precision == "autocast"):
            loss, sample_size = model(source, patient_id, tau)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient.div_(sample_size)
        nn.utils.get_total_norm(gradients, foreach=False)
        adam.step()
        adam.zero_grad()

    return advance


def model_with_both_losses(
    config: ModelConfig, pairs: int, device: str = "cpu"
) -> tuple[Pretrainer, tuple[LossFunction, LossFunction]]:
    """Returns (a model without dropout, (our loss, the re-creation's loss)). The two losses are functions that compute
    the loss of the model on the same batch with the same random draws."""
    none: dict[str, Any] = dict.fromkeys(DROPOUTS.split(), 0.0)
    config, tau = replace(config, **none), 1.99
    model = Pretrainer(config, AUTHORS_OBJECTIVE).to(device)
    x_BSLT = torch.randn(pairs, 2, config.leads, HALF_SAMPLES).to(device)
    ids_B = torch.arange(pairs, device=device)
    rows, tokens, host = 2 * pairs, config.tokens(HALF_SAMPLES), torch.device("cpu")
    authors_draws = make_draws(config, AUTHORS_OBJECTIVE.negatives, rows, tokens, host)
    our_draws = convert_draws(
        {name: np.asarray(value) for name, value in authors_draws._asdict().items()}, config
    )
    our_draws = Draws(*(x if x is None else x.to(device) for x in our_draws))

    def our_loss() -> Tensor:
        loss: Tensor = model(
            x_BSLT, tau=torch.tensor(tau, device=device), ids_B=ids_B, draws=our_draws
        )["loss"]
        return loss

    def authors_loss() -> Tensor:
        draws = authors_draws._replace(gumbel_noise=authors_draws.gumbel_noise.to(device))
        summed, masked = AuthorsStep(model)(x_BSLT.flatten(0, 1), ids_B, tau, draws)
        return summed / masked

    return model, (our_loss, authors_loss)


def loss_difference(run: StepRun) -> float:
    """Returns the relative difference between our loss and that of the re-creation of fairseq-signals."""
    set_up(run)
    torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        _, (our_loss, authors_loss) = model_with_both_losses(run.config, 2, run.device)
        return abs(float(our_loss() / authors_loss()) - 1)
