"""Time a training step of ECG-CPC (configs/pretrain/ecg_cpc.yaml) in omnilead and in a re-creation of its
authors' code, on one thread, with windows of 2.5 s that are in memory.

The re-creation computes as the authors do:

    network    channels before time; kernels from sums over poles at each frequency (Cauchy), products
               of spectra
    loss       a target and 128 negatives copied for each token, in one array

omnilead's encoder alone (embedding) is timed, too, and matrix products show the peak rate of a core. Timing
starts only if omnilead and the re-creation give the same loss and gradients for the same weights and draws;
tests/benchmarks/test_cpc.py compares the re-creation with the authors' numbers. Windows are noise. On a
GPU, only omnilead is measured, with a compiled step.

Source: AI4HealthUOL/ecg-fm-benchmarking and ecg-pretraining-strategies.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import CaseError, Cases, Result, call_fresh, say
from benchmarks.step import (
    OURS,
    PRODUCT,
    STEPS_PER_REPEAT,
    StepRun,
    make_optimizer_step,
    repeat_products,
    synchronize,
)
from omnilead.data_tools.io.terminal import keep_freed_memory
from omnilead.engine.model.cpc import draw_candidates
from omnilead.engine.model.draws import row_keys
from omnilead.engine.model.encoders import build_encoder, cast_batch_norm_statistics, encoder_flops
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.model.s4 import StateSpace, conjugate_pair_basis
from omnilead.engine.training.config import Config, load_config
from omnilead.engine.training.train import COMPILE_DEFAULTS, compile_model

CONFIG_NAME = "ecg_cpc"
RECREATION = "re-creation of ECG-CPC's step"
EMBEDDING_SIDE = "omnilead, embedding"
# Windows in a batch by default. The re-creation copies 226 MB for each window
WINDOWS_PER_BATCH = {"cpu": 16, "cuda": 1024}
GRADIENT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class CpcRun:
    """A case of the benchmark. `side` is the re-creation, omnilead's step or omnilead's encoder alone."""

    side: str
    precision: str
    batch: int
    steps: int
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.side}: {self.precision}, {self.batch} windows"


class AuthorsCpcStep(nn.Module):
    """A re-creation of the training step of ECG-CPC's authors. It has the weights of `model` and returns the
    loss of a batch."""

    def __init__(self, model: Pretrainer) -> None:
        super().__init__()
        self.encoder: Any = model.encoder
        self.head: Any = model.plugin
        self.poles: Any
        self.poles, self.p, _ = map(
            torch.from_numpy, conjugate_pair_basis(self.state_space(0).states)
        )

    def state_space(self, layer: int) -> StateSpace:
        space: StateSpace = self.encoder.layers[layer].space
        return space

    def forward(self, x_RLT: Tensor, idx_RnK: Tensor) -> Tensor:
        for block in self.encoder.stem:
            x_RLT = F.conv1d(x_RLT, block.weight, stride=block.stride, padding=block.kernel // 2)
            x_RLT = F.relu(block.norm(x_RLT))
        z_RND = x_RLT.transpose(1, 2)
        x_RND = z_RND
        for layer in self.encoder.layers:
            y_RDN = self.filter_signal(layer.space, x_RND.transpose(1, 2))
            y_RDN = F.dropout1d(F.gelu(y_RDN), layer.dropout.p, self.training)
            y_RDN = torch.einsum("rdn,ed->ren", y_RDN, layer.linear.weight)
            y_RDN = F.glu(y_RDN + layer.linear.bias[:, None], 1)
            y_RDN = F.dropout1d(y_RDN, layer.dropout.p, self.training)
            x_RND = layer.norm(x_RND + y_RDN.transpose(1, 2))
        ahead = self.head.ahead
        return contrastive_loss(self.head.map(x_RND)[:, :-ahead], z_RND, idx_RnK)

    def filter_signal(self, space: StateSpace, u_RDN: Tensor) -> Tensor:
        """Return the output of a state space, computed as a product of spectra."""
        tokens = u_RDN.shape[2]
        spectrum = torch.fft.rfft(u_RDN, 2 * tokens) * torch.fft.rfft(
            self.convolution_kernel(space)[:, :tokens], 2 * tokens
        )
        return torch.fft.irfft(spectrum, 2 * tokens)[..., :tokens] + space.D[:, None] * u_RDN

    def convolution_kernel(self, space: StateSpace) -> Tensor:
        """Return the convolution kernel [D, L] of a state space. As in the authors' code, its spectrum is
        computed by sums over poles (Cauchy) with a correction of rank 1."""
        angle = torch.arange(space.length // 2 + 1) * (-2 * math.pi / space.length)
        omega = torch.polar(torch.ones_like(angle), angle)
        z = 2 * (1 - omega) / (1 + omega)
        dt_D1 = space.log_dt.exp()[:, None]
        p = self.p.to(torch.complex64)
        c_Dh = torch.view_as_complex(space.C[0])
        w_Dh1 = (self.poles.to(torch.complex64) * dt_D1)[..., None]

        def cauchy_sum(v_Dh: Tensor) -> Tensor:
            v_Dh1 = v_Dh.expand(len(dt_D1), -1)[..., None]
            return dt_D1 * (v_Dh1 / (z - w_Dh1) + v_Dh1.conj() / (z - w_Dh1.conj())).sum(1)

        b = p * 2**0.5
        k = cauchy_sum(b * c_Dh) - cauchy_sum(b * p.conj()) * cauchy_sum(p * c_Dh) / (
            1 + cauchy_sum(p * p.conj())
        )
        return torch.fft.irfft(k * 2 / (1 + omega), space.length)


def contrastive_loss(predicted_RnF: Tensor, z_RNF: Tensor, idx_RnK: Tensor) -> Tensor:
    """Return the loss of ECG-CPC. As in its authors' code, the candidates of each token are copied. `idx_RnK`
    holds the index of the target, then those of the negatives."""
    rows, tokens, width = z_RNF.shape
    flat = z_RNF.reshape(-1, width)
    first = torch.arange(0, rows * tokens, tokens)[:, None, None]
    positives = flat[idx_RnK[..., :1] + first]
    negatives = flat[idx_RnK[..., 1:] + first]
    candidates = torch.cat([positives, negatives], 2)
    logits = (predicted_RnF[:, :, None] * candidates).sum(-1).flatten(0, 1)
    targets = torch.zeros(len(logits), dtype=torch.int64)
    return F.cross_entropy(logits, targets, reduction="sum") / rows


def prepare_input_and_cases(work: Path, options: argparse.Namespace) -> tuple[Result, Cases]:
    device = options.device
    say("checking that both sides give the same loss and gradients")
    difference = call_fresh(largest_loss_or_gradient_difference)
    if not difference <= GRADIENT_TOLERANCE:
        raise CaseError(
            f"loss or gradients of omnilead and the re-creation differ by {difference:.1e}, more than "
            f"{GRADIENT_TOLERANCE:g}: nothing was timed"
        )
    batch, steps = (
        options.batch or WINDOWS_PER_BATCH[device],
        options.steps or STEPS_PER_REPEAT[device],
    )
    cases: Cases = {}
    sides = (OURS, EMBEDDING_SIDE) if device == "cuda" else (RECREATION, OURS, EMBEDDING_SIDE)
    for side, precision in ((side, p) for p in ("fp32", "bf16") for side in sides):
        if (side, precision) != (RECREATION, "bf16"):  # ECG-CPC's authors train in float32 only
            run = CpcRun(side, precision, batch, steps, device)
            cases[run.name] = (repeat_steps, (run,))
    for precision in ("fp32", "bf16"):
        run = StepRun(PRODUCT, precision, device=device, threads=1)
        cases[run.name] = (repeat_products, (run,))
    config: Config = load_config(CONFIG_NAME)
    encoder = build_encoder(config.model)
    flops = encoder_flops(encoder, config.model, False, config.input.samples, windows=1)
    facts = {
        "archive": "noise, on the device",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "model": CONFIG_NAME,
        "gflop_per_crop": flops / 1e9,
        "loss_difference": difference,
    }
    return facts, cases


def build_pretrainer(**options: Any) -> Pretrainer:
    config: Config = load_config(
        CONFIG_NAME, {"model.options": load_config(CONFIG_NAME).model.options | options}
    )
    return Pretrainer(config.model, config.objective, generator=torch.Generator().manual_seed(1))


def largest_loss_or_gradient_difference() -> float:
    """Return the largest relative difference between omnilead and the re-creation in the loss and the
    gradients, without dropout."""
    # The seed matters: on some inputs, the input of a ReLU is so close to 0 that rounding makes it positive
    # in only one of the two, which changes a gradient by 1e-2
    torch.manual_seed(1)
    model, rows = build_pretrainer(dropout=0.0), 2
    x_RLT, keys_RS = torch.randn(rows, 12, 600), torch.arange(rows)[:, None]
    drawn_RnK = draw_candidates(keys_RS.flatten(), 300, 14, 128)
    target_Rn1 = torch.arange(14, 300)[:, None].expand(rows, -1, 1)
    theirs = AuthorsCpcStep(model)(x_RLT, torch.cat([target_Rn1, drawn_RnK], 2))
    ours = model(x_RLT[:, None], keys_RS)["loss"]
    weights = list(model.parameters())
    pairs = [(ours.detach(), theirs.detach())]
    pairs += zip(
        torch.autograd.grad(ours, weights), torch.autograd.grad(theirs, weights), strict=True
    )
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def repeat_steps(run: CpcRun) -> Iterator[Any]:
    """Yield None after a warm-up step, then the number of windows in each repeat of `run.steps` steps,
    without end."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if run.device == "cpu":
        keep_freed_memory()  # for omnilead and for the re-creation alike
    prepare_side = {
        RECREATION: prepare_authors,
        OURS: prepare_ours,
        EMBEDDING_SIDE: prepare_embedding,
    }
    run_step = prepare_side[run.side](run)
    run_step()
    yield
    while True:
        for _ in range(run.steps):
            run_step()
        synchronize(run.device)
        yield run.steps * run.batch


def prepare_ours(run: CpcRun) -> Callable[[], None]:
    """Return a function that runs one training step of omnilead."""
    model = build_pretrainer().to(run.device).train()
    optimize = make_optimizer_step(model, run.precision)
    dtype = next(model.parameters()).dtype
    cast_batch_norm_statistics(model, dtype)
    compile_model(model, COMPILE_DEFAULTS[run.device])
    x_BSLT = torch.randn(run.batch, 1, 12, 600, device=run.device).to(dtype)
    updates = count()

    def run_step() -> None:
        keys_BS = torch.from_numpy(row_keys(1, next(updates), np.arange(run.batch), 1))
        model(x_BSLT, keys_BS.to(run.device, non_blocking=True))["loss"].backward()
        optimize()

    return run_step


def prepare_embedding(run: CpcRun) -> Callable[[], None]:
    """Return a function that encodes one batch with omnilead's encoder."""
    dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
    encoder = build_pretrainer().encoder.to(run.device, dtype).eval()
    x_RLT = torch.randn(run.batch, 12, 600, device=run.device).to(dtype)

    @torch.inference_mode()
    def run_step() -> None:
        encoder(x_RLT)

    return run_step


def prepare_authors(run: CpcRun) -> Callable[[], None]:
    """Return a function that runs one training step of the re-creation."""
    model = AuthorsCpcStep(build_pretrainer()).train()
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
    x_RLT = torch.randn(run.batch, 12, 600)
    target_n1 = torch.arange(14, 300)[:, None]

    def run_step() -> None:
        other_RnK = torch.randint(299, (run.batch, 286, 128))
        other_RnK += other_RnK >= target_n1
        idx_RnK = torch.cat([target_n1.expand(run.batch, -1, 1), other_RnK], 2)
        model(x_RLT, idx_RnK).backward()
        adam.step()
        adam.zero_grad()

    return run_step
