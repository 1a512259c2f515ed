"""Every replacement in engine.model.kernels gives the values and gradients of the plain
operation."""

import re
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from omnilead.engine.common import ConfigError
from omnilead.engine.config import load
from omnilead.engine.model import encoder as plain
from omnilead.engine.model import kernels
from omnilead.engine.model.kernels import cpu, cuda

torch.set_num_threads(1)


def values_and_gradients(
    function: Any, inputs: list[Tensor], dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """In float64, for a random gradient that is exact in every precision."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    y = function(*leaves)
    return [
        t.detach().double()
        for t in (y, *torch.autograd.grad(y, leaves, randn(*y.shape).bfloat16().to(y.dtype)))
    ]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_setting_selects_the_kernels() -> None:
    x = torch.ones(3)
    assert kernels.pick("dropout", F.dropout, "plain", x) is F.dropout
    assert kernels.pick("dropout", F.dropout, "auto", x) is cpu.dropout
    elsewhere = x.to("meta")  # stands for a GPU
    assert kernels.pick("dropout", F.dropout, "auto", elsewhere) is F.dropout
    assert kernels.pick("convolve", F.relu, "auto", elsewhere) is cuda.convolve


def test_kernels_that_were_removed_are_read_from_old_runs_and_refused_anew(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {kernels: all}")
    assert load(tmp_path / "config.yaml").model.kernels == "auto"
    with pytest.raises(ConfigError, match="use plain or auto"):
        load("w2v_cmsc_rlm", ["model.kernels=all"])


@pytest.mark.parametrize("dtype, far", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_group_norm_and_gelu_a_few_rows_at_a_time(dtype: torch.dtype, far: float) -> None:
    """With a mean of 10, in which the variance must not be lost; 25 rows of 2,500 are processed in
    two parts."""
    inputs = [
        (10 + randn(25, 2500, 32).cumsum(1) / 50).to(dtype),
        randn(32).to(dtype),
        randn(32, 1)[:, 0].to(dtype),
    ]
    assert len(list(cpu.in_cache(inputs[0]))) > 1
    expected = values_and_gradients(
        lambda y, w, b: F.gelu(F.group_norm(y.transpose(1, 2), 32, w, b, 1e-5).transpose(1, 2)),
        inputs,
    )
    for function in (plain.group_norm_gelu, cpu.group_norm_gelu):
        got = values_and_gradients(partial(function, eps=1e-5), inputs, dtype)
        for mine, exact in zip(got, expected, strict=True):
            assert (mine - exact).abs().max() <= far * exact.abs().max()


@pytest.mark.parametrize("tokens, kernel", [(156, 128), (7, 16), (1, 5), (31, 1), (40, 7)])
def test_convolutions(tokens: int, kernel: int) -> None:
    """At the paper's length, and with a kernel longer than the input. test_encoder.py tests the
    plain convolution."""
    inputs = [randn(2, tokens, 24), randn(24, 6, kernel), randn(24)]
    functions = [
        partial(function, groups=4) for function in (plain.convolve, cpu.convolve, cuda.convolve)
    ]
    expected, *others = (values_and_gradients(function, inputs) for function in functions)
    for got in others:
        for mine, exact in zip(got, expected, strict=True):
            assert (mine - exact).abs().max() <= 1e-12 * max(1, exact.abs().max())


def test_the_plain_convolution_in_bf16() -> None:
    """Few channels a group and 16 taps: on a CPU with AMX torch's own bf16 convolution returns
    other numbers."""
    inputs = [x.bfloat16() for x in (randn(2, 156, 32), randn(32, 8, 16), randn(32))]
    exact = plain.convolve(*(x.double() for x in inputs), groups=4)
    torch.testing.assert_close(
        plain.convolve(*inputs, groups=4).double(), exact, rtol=4e-3, atol=0.04
    )
    for arguments in (inputs, [x.float() for x in inputs]):
        with torch.autocast("cpu", torch.bfloat16):
            got = plain.convolve(*arguments, groups=4)
        torch.testing.assert_close(got.double(), exact, rtol=4e-3, atol=0.04)


@pytest.mark.parametrize("function", [cpu.convolve, cuda.convolve])
def test_convolutions_in_bf16(function: Any) -> None:
    """Almost as accurate as torch's, 1.7e-3; the same in autocast as in bf16."""
    inputs = [x.bfloat16() for x in (randn(8, 156, 64), randn(64, 4, 128), randn(64))]
    expected = values_and_gradients(partial(plain.convolve, groups=16), inputs)
    got = values_and_gradients(partial(function, groups=16), inputs, torch.bfloat16)
    errors = [
        float((one - other).norm() / other.norm()) for one, other in zip(got, expected, strict=True)
    ]
    assert max(errors) < 2.5e-3 and errors[1] < 1.8e-3
    with torch.autocast("cpu", torch.bfloat16):
        low = values_and_gradients(partial(function, groups=16), inputs, torch.float32)
    assert all(
        (one - other).norm() < 0.01 * other.norm() for one, other in zip(low, expected, strict=True)
    )


def test_gradients_of_blocks_are_gathered() -> None:
    """No scattered additions, which a GPU would do in any order."""
    with torch.profiler.profile() as profile:
        values_and_gradients(
            partial(cuda.convolve, groups=4), [randn(2, 40, 24), randn(24, 6, 7), randn(24)]
        )
    names = {event.key for event in profile.key_averages()}
    assert "aten::bmm" in names
    assert not [
        name for name in names if re.search("index_put|scatter|index_add|unfold_backward", name)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(dtype: torch.dtype) -> None:
    inputs = [randn(4, 150, 24), randn(40, 24), randn(40)]
    expected = values_and_gradients(F.linear, [x.to(dtype) for x in inputs])
    module = plain.Linear(24, 40, "auto")

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, x)

    for function in (call, cpu.linear):
        got = values_and_gradients(function, inputs, dtype)
        for mine, exact in zip(got, expected, strict=True):
            rounding = torch.finfo(dtype).eps * float(exact.abs().max())
            torch.testing.assert_close(
                mine, exact, rtol=0, atol=(1 if dtype == torch.bfloat16 else 8) * rounding
            )


def test_attention() -> None:
    """Heads of width 9, which no fused kernel supports; the replacements without dropout are
    torch's."""
    qkv, heads = randn(2, 20, 3 * 36), 4
    q, k, v = qkv.double().view(2, 20, 3, heads, 9).permute(2, 0, 3, 1, 4)
    expected = ((q @ k.transpose(-1, -2) / 3).softmax(-1) @ v).transpose(1, 2).flatten(2)
    for function in (plain.attention, cpu.attention):
        torch.testing.assert_close(
            function(qkv, heads, 0.0).double(), expected, rtol=1e-4, atol=1e-5
        )
        assert not torch.allclose(function(qkv, heads, 0.5), function(qkv, heads, 0.5))
    written_out, fused = (
        values_and_gradients(lambda x, p=p: cpu.attention(x, heads, p), [qkv], torch.float32)
        for p in (1e-9, 0.0)
    )
    for one, other in zip(
        written_out, fused, strict=True
    ):  # with a probability that rounds to zero
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape, p", [((40, 50, 60), 0.1), ((333, 7), 0.25), ((3,), 0.5)])
def test_dropout(shape: tuple[int, ...], p: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(shape, requires_grad=True)
    y = cpu.dropout(x, p)
    share = float((y.detach() == 0).float().mean())
    assert share == pytest.approx(
        p, abs=0.5 if x.numel() < 10 else 5 * (p * (1 - p) / x.numel()) ** 0.5
    )
    assert float(y.detach().max()) == pytest.approx(1 / (1 - p), rel=1e-4)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # type: ignore[arg-type]
    assert not torch.equal(cpu.dropout(x, p), y) or x.numel() < 10
    torch.manual_seed(0)
    assert torch.equal(cpu.dropout(x, p), y)
    if x.numel() > 4000:  # the four numbers of one draw are independent
        neighbours = (y.detach() == 0).float().view(-1, 4)
        assert (torch.corrcoef(neighbours.t()) - torch.eye(4)).abs().max() < 0.03


@pytest.mark.gpu
def test_blocks_on_a_gpu_agree_with_the_library_and_are_deterministic() -> None:
    inputs = [
        x.to("cuda", torch.bfloat16) for x in (randn(8, 156, 64), randn(64, 4, 128), randn(64))
    ]
    grad = randn(8, 156, 64).to("cuda", torch.bfloat16)

    def on_gpu(function: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        y = function(*leaves, groups=16)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))]

    exact = on_gpu(plain.convolve, torch.float64)
    first, second = (on_gpu(cuda.convolve, torch.bfloat16) for _ in range(2))
    for one, other, expected in zip(first, second, exact, strict=True):
        assert torch.equal(one, other) and (one - expected).norm() < 4e-3 * expected.norm()


def test_float32_is_made_exact_by_programs_and_not_by_an_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    module = runpy.run_path(kernels.__file__)
    assert torch.backends.cudnn.allow_tf32
    module["disable_tf32"]()
    assert not torch.backends.cudnn.allow_tf32
