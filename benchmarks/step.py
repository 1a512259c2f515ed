"""One training step on a batch that is already there: draws, forward, backward, gradient norm, AdamW.

    python -m benchmarks.run step [--device cpu|cuda] [--model paper|small|FILE] [--batches 4 8] [--compiled eager layers step]
    python -m benchmarks.run step --explain       where its time goes: benchmarks.stages

    fp32       float32 throughout
    autocast   float32 weights, matrix products in bf16
    bf16       bf16 weights and activations, float32 masters that AdamW updates

Beside ours, in turns with it, the authors' step as benchmarks.authors_step writes it again, with their Adam; and a large matrix
product: the rate that this machine has to give. MFU is the share of it that a step reaches by flops_per_crop, 175.9 GFLOP for
the paper's model, whatever an implementation spends. On a CPU both count per CPU-second, since seconds are also those of
others; on a GPU per second. Crops are noise: a step's time does not depend on what they show. Before anything is timed, both
sides must agree on the loss of the same weights and draws. `--compiled` is the loop's train.compile.
"""

import argparse
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import bars
from benchmarks.authors_step import AuthorsStep, draw
from benchmarks.measure import Case, in_fresh_process, run_cases, timed
from data_tools.cli import keep_freed_memory
from engine.common import ConfigError
from engine.config import CONFIGS, load
from engine.model import fairseq
from engine.model.config import ModelConfig, ObjectiveConfig, flops_per_crop
from engine.model.draws import Draws, row_keys
from engine.model.pretrainer import Pretrainer
from engine.model.quantizer import temperature
from engine.parity import Adam, authors_adam, draws_of
from engine.training.throughput import compile_model
from engine.training.validation import to_device

RECREATION, OURS, PRODUCT = "re-creation of fairseq-signals' step", "omnilead", "matrix product"
BATCHES = {"cpu": (4,), "cuda": (64, 256)}  # crops of 10 s
STEPS = {"cpu": 2, "cuda": 20}  # that count
WAYS = {"cpu": ("eager",), "cuda": ("layers", "step", "eager")}  # of compiling, the loop's own first
KINDS = {  # that a suite tries, one after the other
    "cpu": {"kernels": ("plain",)},  # compiling takes minutes there, for nothing
    "cuda": {"kernels": ("all",), "compiled": ("step", "eager")},
}
WARM_UP = {"cpu": 1, "cuda": 3}
FIGURE = {"cpu": "per_cpu_s", "cuda": "per_s"}  # what is compared: on shared cores seconds are also those of others
PRODUCT_SIZE, PRODUCTS = {"cpu": 2048, "cuda": 8192}, {"cpu": 5, "cuda": 20}
AGREEMENT = {"cpu": 1e-4, "cuda": 1e-3}  # of two losses in float32; a GPU's kernels sum in other orders
SAMPLES = 2500
ADAM = Adam(lr=5e-5, betas=(0.9, 0.98), eps=1e-6, decay=0.01)
THEIR_OBJECTIVE = ObjectiveConfig(form="authors", gathered=False)


PRECISIONS = ("fp32", "autocast", "bf16")


@dataclass(frozen=True)
class Run:
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
    """`paper`, a file of configs/pretrain without its ending, or a path."""
    return ModelConfig() if name == "paper" else load(config_file(name)).model


def config_file(name: str) -> str:
    """Of the whole experiment; `paper` is W2V + CMSC + RLM."""
    ours = CONFIGS / "pretrain" / f"{'w2v_cmsc_rlm' if name == 'paper' else name}.yaml"
    path = Path(name) if name.endswith(".yaml") else ours
    if not path.is_file():
        raise ConfigError("no such file: use paper, a name out of configs/pretrain, or a path that ends in .yaml")
    return str(path)


def runs(base: Run, batches: Sequence[int], compiled: Sequence[str]) -> list[Run]:
    """All that are compared; `base` says on what device, with how many threads and steps."""
    found = [replace(base, side=PRODUCT, precision=precision) for precision in ("fp32", "bf16")]
    for batch in batches:
        peer, mine = replace(base, side=RECREATION, batch=batch), replace(base, side=OURS, batch=batch)
        found += [replace(peer, precision=precision) for precision in ("fp32", "autocast")]
        found += [replace(mine, precision=precision, compiled=how) for precision in PRECISIONS for how in compiled]
    return found


def by_value(base: Run, batches: Sequence[int]) -> list[Run]:
    """What a suite measures on a GPU, what is worth most first: ours in bf16 and the re-creation's autocast at the usual batch,
    then other batches, ways to compile, and model.kernels."""
    small, usual, *others = batches
    mine = replace(base, side=OURS, precision="bf16", batch=usual, compiled=WAYS[base.device][0])
    peer = replace(base, side=RECREATION, precision="autocast", batch=usual)
    found = [replace(base, side=PRODUCT, precision="bf16"), mine, peer, replace(mine, batch=small), replace(peer, batch=small)]
    found += [replace(mine, batch=batch) for batch in others]
    found += [replace(peer, precision="fp32", batch=batch) for batch in (small, usual)]
    found += [replace(mine, **{key: kind}) for key, kinds in KINDS[base.device].items() for kind in kinds]  # type: ignore[arg-type]
    return [*found, replace(base, side=PRODUCT, precision="fp32"), replace(mine, precision="autocast")]


def fastest(results: dict[str, dict[str, Any]], chosen: Sequence[Run]) -> Run | None:
    """Of ours in bf16, which the loop has too."""
    found = [run for run in chosen if run.name in results and (run.side, run.precision) == (OURS, "bf16")]
    return max(found, key=lambda run: float(results[run.name][FIGURE[run.device]]["median"]), default=None)


def settings(run: Run) -> tuple[str, ...]:
    """For --set."""
    return (f"train.micro_batch={run.batch}", f"train.compile={run.compiled}", f"model.kernels={run.kernels}")


def cases(chosen: Sequence[Run]) -> dict[str, Case]:
    return {run.name: (product if run.side == PRODUCT else step, (run,)) for run in chosen}


def step(run: Run) -> Generator[float, bool, None]:
    """Yields once when warm, then the crops trained on, again and again."""
    prepare(run)
    advance = theirs(run) if run.side == RECREATION else ours(run)
    for _ in range(WARM_UP[run.device]):
        advance()
    synchronise(run)
    yield 0.0
    while True:
        for _ in range(run.steps):
            advance()
        synchronise(run)
        if (yield float(run.steps * run.batch)):
            return


def product(run: Run) -> Generator[float, bool, None]:
    """GFLOP of square matrix products."""
    prepare(run)
    size, dtype = PRODUCT_SIZE[run.device], torch.float32 if run.precision == "fp32" else torch.bfloat16
    a, b = (torch.randn(size, size, device=run.device).to(dtype) for _ in range(2))
    a @ b
    synchronise(run)
    yield 0.0
    while True:
        for _ in range(PRODUCTS[run.device]):
            a @ b
        synchronise(run)
        if (yield PRODUCTS[run.device] * 2 * size**3 / 1e9):
            return


def prepare(run: Run) -> None:
    torch.set_num_threads(run.threads)
    torch.manual_seed(1)
    np.random.seed(1)
    if run.device == "cpu":
        keep_freed_memory()  # as the loader does wherever it augments; for both sides


def synchronise(run: Run) -> None:
    if run.device == "cuda":
        torch.cuda.synchronize()


def ours(run: Run) -> Callable[[], None]:
    config, device = run.config, torch.device(run.device)
    model = Pretrainer(config, ObjectiveConfig()).to(device).train()
    weights = list(model.parameters())
    masters = [nn.Parameter(p.detach().clone()) for p in weights] if run.precision == "bf16" else weights
    if run.precision == "bf16":
        model.bfloat16()
    compile_model(model, run.compiled)
    adam = torch.optim.AdamW(masters, ADAM.lr, ADAM.betas, ADAM.eps, ADAM.decay, fused=True)
    x_BSLT = torch.randn(run.batch, 2, config.leads, SAMPLES, device=device)
    updates = count()

    def advance() -> None:
        update = next(updates)
        keys_BS = to_device(row_keys(1, update, np.arange(run.batch)), device)  # as the loop does: nothing waits
        tau = torch.tensor(temperature(config, update)).to(device, non_blocking=True)
        with torch.autocast(run.device, torch.bfloat16, enabled=run.precision == "autocast"):
            loss = model(x_BSLT, keys_BS, tau)["loss"]
        loss.backward()
        if run.precision == "bf16":
            for master, p in zip(masters, weights, strict=True):
                master.grad, p.grad = p.grad.float() if p.grad is not None else None, None
        nn.utils.get_total_norm([p.grad for p in masters if p.grad is not None])
        adam.step()
        adam.zero_grad()
        if run.precision == "bf16":
            with torch.no_grad():
                torch._foreach_copy_([*weights], [*masters])

    return advance


def theirs(run: Run) -> Callable[[], None]:
    torch.backends.cudnn.allow_tf32 = True  # torch's default, which they leave as it is and our programs turn off
    config = run.config
    model = AuthorsStep(config, THEIR_OBJECTIVE)
    model.load_state_dict(fairseq.to_theirs(Pretrainer(config, THEIR_OBJECTIVE).state_dict(), config))
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
    """Two models with the same weights, and their losses for the same batch and draws, without dropout."""
    config = replace(config, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, input_dropout=0.0, feature_dropout=0.0)
    model, again = Pretrainer(config, THEIR_OBJECTIVE), AuthorsStep(config, THEIR_OBJECTIVE)
    again.load_state_dict(fairseq.to_theirs(model.state_dict(), config))
    source, patient_id, tau = torch.randn(2 * pairs, config.leads, SAMPLES), torch.arange(pairs), 1.99
    drawn = draw(config, THEIR_OBJECTIVE.negatives, 2 * pairs, config.tokens(SAMPLES), source.device)
    same = draws_of({name: np.asarray(value) for name, value in drawn._asdict().items()}, config)
    model, again, source, patient_id = (x.to(device) for x in (model, again, source, patient_id))
    summed, tokens = again(source, patient_id, tau, drawn._replace(gumbel_noise=drawn.gumbel_noise.to(device)))
    same = Draws(*(x if x is None else x.to(device) for x in same))
    x_BSLT, tau_there = source.view(pairs, 2, *source.shape[1:]), torch.tensor(tau, device=device)
    losses = model(x_BSLT, tau=tau_there, ids_B=patient_id, draws=same)
    return (model, losses["loss"]), (again, summed / tokens)


def disagreement(run: Run) -> float:
    prepare(run)
    if run.device == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # theirs() turns it on again
    with torch.no_grad():
        (_, mine), (_, wanted) = both_sides(run.config, 2, run.device)
    return abs(float(mine / wanted) - 1)


def check_agreement(run: Run) -> float:
    """The benchmark's own first condition: the same weights and draws give the same loss."""
    return agreed(run, in_fresh_process(disagreement, run, warm_up=False)["units"])


def agreed(run: Run, found: float) -> float:
    if not found <= (most := AGREEMENT[run.device]):
        raise SystemExit(
            f"benchmarks.step: the two sides' losses differ by {found:.1e}, more than {most:.0e}: nothing was timed"
        )
    return found


def alone(run: Run, repeats: int) -> dict[str, Any]:
    """One case in this process, as a part of a record; the re-creation's only if it agrees with ours."""
    given = facts(run)
    if run.side == RECREATION:
        given["loss_difference"] = agreed(run, disagreement(run))
    (case,) = cases([run]).values()
    return {"input": given, "results": {run.name: timed(case, repeats)}}


def compiled(run: Run, done: Path) -> dict[str, Any]:
    """Its first steps, for the compiler's cache."""
    began = time.monotonic()
    next(step(run))
    done.parent.mkdir(exist_ok=True)
    done.touch()
    return {"first_steps_s": round(time.monotonic() - began, 1)}


def completed(results: dict[str, dict[str, Any]], chosen: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Each step's result with what its crops a second mean: MFU, times the re-creation."""
    for run in chosen:
        if run.side == PRODUCT or run.name not in results:
            continue
        gflop = flops_per_crop(run.config) / 1e9
        result, kind, figure = results[run.name], "fp32" if run.precision == "fp32" else "bf16", FIGURE[run.device]
        rate = result[figure]["median"]
        if possible := results.get(f"{PRODUCT}: {kind}"):
            result["mfu"] = rate * gflop / possible[figure]["median"]
        peers = {"fp32": "times_recreation"} | ({"autocast": "times_autocast"} if run.device == "cuda" else {})
        for precision, key in peers.items():
            if peer := results.get(Run(RECREATION, precision, run.batch).name):
                result[key] = rate / peer[figure]["median"]
    return results


def table(results: dict[str, dict[str, Any]]) -> str:
    width = max(map(len, results), default=0)
    lines = [f"{'':<{width}}    per s   per CPU-s (low to high)    MFU  x re-creation  peak GB"]
    for name, r in results.items():
        spread = " ".join(f"{r['per_cpu_s'][key]:7.3g}" for key in ("median", "low", "high"))
        line = f"{name:<{width}}  {r['per_s']['median']:7.3g}   {spread}"
        if not name.startswith(PRODUCT):
            mfu = f"{r['mfu']:6.1%}" if "mfu" in r else " " * 6
            times = f"{r['times_recreation']:13.2f}" if "times_recreation" in r else " " * 13
            line += f"  {mfu}  {times}  {r.get('gpu_peak_mb', r['peak_mb']) / 1024:7.2f}"
        lines.append(line)
    return "\n".join(lines)


def refuse(text: str) -> NoReturn:
    print(f"benchmarks.run: {text}", file=sys.stderr)
    raise SystemExit(2)


def base_run(options: argparse.Namespace) -> Run:
    """What all runs share; a wrong option is one line."""
    if options.device == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: torch sees no CUDA device here: use --device cpu")
    steps = options.steps or STEPS[options.device]
    return Run(OURS, "fp32", model=options.model, device=options.device, threads=options.threads, steps=steps)


def facts(base: Run) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if base.device == "cuda" else "cpu"
    gflop = flops_per_crop(base.config) / 1e9
    return {"archive": "noise, on the device", "device": name, "model": base.model, "gflop_per_crop": gflop}


def measure(work: Path, options: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    base = base_run(options)
    chosen = runs(base, options.batches or BATCHES[base.device], options.compiled or WAYS[base.device])
    left_out = dict[str, str]()
    progress("do both sides agree on a loss?")
    difference = check_agreement(base)
    results = run_cases(cases(chosen), options.repeats, progress, left_out, in_one_process=base.device == "cuda")
    results = completed(results, chosen)
    print(table(results))
    given = facts(base) | {"loss_difference": difference}
    print(bars.line({"benchmark": "step", "config": vars(options), "input": given, "results": results}))
    return {"input": given, "results": results, "left_out": left_out}
