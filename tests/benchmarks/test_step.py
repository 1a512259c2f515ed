"""The re-creation of the authors' step gives our loss and gradients for the same weights and draws;
what is compared."""

import re
import shlex
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from time import sleep

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from benchmarks import run, step
from benchmarks.authors_step import compute_mask_indices
from omnilead.engine.model.config import ModelConfig

torch.set_num_threads(1)
CHANGES = {
    "small": {},
    "one codebook": {"codebooks": 1, "position_kernel": 15, "mask_span": 6},
    "plain kernels": {"kernels": "plain"},
    "no projection": {"conv": ((48, 2),) * 4},
}
BASE = step.StepRun(step.OURS, "fp32", threads=1)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_the_recreation_gives_our_loss_and_gradients(changes, tiny):
    step.set_up(BASE)
    config = replace(step.config_of(tiny).model, **changes)
    model, sides = step.model_with_both_losses(config, pairs=3)
    losses = [side() for side in sides]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    names, weights = zip(*model.named_parameters(), strict=True)
    both = [torch.autograd.grad(loss, weights, materialize_grads=True) for loss in losses]
    largest = max(float(each.abs().max()) for each in both[1])
    for name, mine, theirs in zip(names, *both, strict=True):
        scale = float(theirs.abs().max())
        if scale < 1e-6 * largest:  # zero but for rounding
            scale = largest
        assert float((mine - theirs).abs().max()) <= 1e-4 * scale, name


def test_masks_are_the_authors():
    """Spans, and every row trimmed to the smallest count."""
    np.random.seed(0)
    config = ModelConfig()
    counts = [compute_mask_indices(config, 8, 156).sum(1) for _ in range(50)]
    assert all(len(set(count.tolist())) == 1 for count in counts)
    mean = float(np.mean([count[0] for count in counts]))
    assert 55 < mean < 70  # 64 for 4 pairs, 55 for 64


SIDES = [(step.OURS, precision) for precision in ("fp32", "autocast", "bf16")]
SIDES += [(step.RECREATION, precision) for precision in ("fp32", "autocast")]


@pytest.mark.parametrize(("side", "precision"), SIDES)
def test_each_case_trains(side, precision, tiny, monkeypatch):
    made = []
    real = step.Pretrainer
    monkeypatch.setattr(step, "Pretrainer", lambda *of: made.append(real(*of)) or made[-1])
    stream = step.repeat_steps(replace(BASE, side=side, precision=precision, batch=2, model=tiny))
    assert next(stream) == {"attention": "unfused" if side == step.OURS else "math"}
    before = [p.detach().clone() for p in made[0].parameters()]
    assert next(stream) == 4  # two steps of two crops
    after = list(made[0].parameters())
    assert {p.dtype for p in after} == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) > 0.6 * len(after)
    assert all(p.isfinite().all() for p in after)
    # torch's own, which our programs turn off
    assert torch.backends.cudnn.allow_tf32 == (side == step.RECREATION)


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.gpu
def test_the_bare_step_never_waits(tiny):
    advance = step.prepare_ours(step.StepRun(step.OURS, "bf16", batch=4, model=tiny, device="cuda"))
    advance()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_is_timed_while_the_sides_disagree(tiny, monkeypatch):
    options = run.parse(["step", "--model", tiny])
    for difference in (2e-4, float("nan")):
        monkeypatch.setattr(step, "call_fresh", lambda *_, found=difference: found)
        with pytest.raises(step.CaseError, match="nothing was timed"):
            step.prepare_input_and_cases(Path(), options)
    monkeypatch.setattr(step, "call_fresh", lambda *_: 5e-5)
    assert step.prepare_input_and_cases(Path(), options)[0]["loss_difference"] == 5e-5


ASKED = [pytest.param("cpu", "flash")]
ASKED += [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in step.ATTENTION_BACKENDS]


@pytest.mark.parametrize(("device", "name"), ASKED)
def test_the_attention_that_is_asked_for_runs(device, name):
    """Also if torch has compiled the same function before: it would find that code, with what it
    chose then."""
    q = torch.randn(4, 2, 156, 64, device=device, dtype=torch.bfloat16)
    with fresh_cache():
        for asked in ("", name):
            torch.compiler.reset()
            counters.clear()
            attend = torch.compile(partial(F.scaled_dot_product_attention, q, q, q))
            with step.force_attention(asked):
                attend()
                found = step.detect_attention(attend)
    assert found == name and not counters["aot_autograd"]["autograd_cache_hit"]


@pytest.mark.parametrize("compiled", [False, True])
def test_an_attention_that_a_device_does_not_have_is_no_bug(compiled):
    q, attend = torch.randn(1, 2, 9, 8), F.scaled_dot_product_attention
    if compiled:
        attend = torch.compile(attend)
    with pytest.raises(step.CaseError, match="no cudnn attention"), step.force_attention("cudnn"):
        attend(q, q, q)


@pytest.mark.parametrize("device", step.BATCH_SIZES)
def test_the_order_of_cases(device, golden):
    """+: those of a suite's first stage. A GPU's are what decides the defaults."""
    options = run.parse([*shlex.split(run.SUITES[device][0]), "--device", device])
    base = replace(BASE, precision="bf16", device=device, compiled=step.COMPILE_DEFAULTS[device])
    names = [each.name for each in step.runs_to_compare(base, step.BATCH_SIZES[device])]
    marks = ["+" if re.search(options.only or "", name) else "-" for name in names]
    golden(f"step_{device}.txt", "".join(map("{} {}\n".format, marks, names)))


@pytest.mark.gpu
def test_the_recreation_gives_our_loss_and_gradients_on_a_gpu():
    assert step.loss_difference(replace(BASE, device="cuda")) <= step.LOSS_TOLERANCE["cuda"]


def test_large_steps_are_compiled_one_at_a_time_and_failures_are_said(monkeypatch, capsys):
    """Two steps of 512 crops do not fit a GPU together."""
    running, together, lock = [], [], Lock()

    def call(_, __, arguments, *___, **____):
        (compiled,) = arguments
        with lock:
            running.append(compiled.batch)
            together.append(list(running))
        sleep(0.05)
        with lock:
            running.remove(compiled.batch)
        if compiled.batch == 256:
            raise step.CaseError("out of memory")

    monkeypatch.setattr(step, "call_fresh", call)
    monkeypatch.setattr(step.os, "cpu_count", lambda: 16)
    runs = [replace(BASE, compiled="step", batch=batch) for batch in (64, 512, 512, 65, 256)]
    step.fill_compile_caches([*runs, replace(BASE, compiled="eager", batch=1024)])
    assert sorted(map(len, together)) == [1, 1, 1, 1, 2]
    assert {64, 65} == set(max(together, key=len))
    said = capsys.readouterr()
    assert "256 crops: not compiled before it is measured: out of memory" in said.out + said.err
