"""Every replacement in engine.model.kernels gives the values and gradients of the plain
operation."""

import re
import runpy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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
    meta = x.to("meta")
    assert (
        kernels.pick("gelu", F.gelu, "auto", meta) is F.gelu
        and kernels.pick("gelu", F.gelu, "all", meta) is cuda.gelu
    )
    on_gpu = {
        name for name in cuda.OPERATIONS if kernels.pick(name, F.relu, "auto", meta) is not F.relu
    }
    assert (
        on_gpu == {"convolve"} and kernels.pick("convolve", F.relu, "auto", meta) is cuda.convolve
    )


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

    for function in (
        call,
        cpu.linear,
        torch.compile(cuda.linear, backend="aot_eager", fullgraph=True),
    ):
        got = values_and_gradients(function, inputs, dtype)
        for mine, exact in zip(got, expected, strict=True):
            rounding = torch.finfo(dtype).eps * float(exact.abs().max())
            torch.testing.assert_close(
                mine, exact, rtol=0, atol=(1 if dtype == torch.bfloat16 else 8) * rounding
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_gelu_is_the_exact_one(dtype: torch.dtype) -> None:
    """Exact in bf16; float32 is not replaced."""
    x = torch.linspace(-9, 9, 100_001, dtype=dtype)
    grad, results = torch.cos(x), []
    for function, leaf in (
        (F.gelu, x.double()),
        (torch.compile(cuda.gelu, backend="aot_eager", fullgraph=True), x.clone()),
    ):
        y = function(leaf.requires_grad_())
        results.append(
            [y.detach().double(), torch.autograd.grad(y, leaf, grad.to(y.dtype))[0].double()]
        )
    for exact, got in zip(*results, strict=True):
        torch.testing.assert_close(got, exact, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=2e-6)


def test_attention() -> None:
    """Heads of width 9, which no fused kernel supports; the replacements without dropout are
    torch's."""
    qkv, heads = randn(2, 20, 3 * 36), 4
    q, k, v = qkv.double().view(2, 20, 3, heads, 9).permute(2, 0, 3, 1, 4)
    expected = ((q @ k.transpose(-1, -2) / 3).softmax(-1) @ v).transpose(1, 2).flatten(2)
    for function in (plain.attention, cpu.attention, cuda.attention):
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


@pytest.mark.parametrize("how", ["cpu", "cuda"])
@pytest.mark.parametrize("shape, p", [((40, 50, 60), 0.1), ((333, 7), 0.25), ((3,), 0.5)])
def test_dropout(shape: tuple[int, ...], p: float, how: str) -> None:
    function = (
        cpu.dropout
        if how == "cpu"
        else torch.compile(cuda.dropout, backend="aot_eager", fullgraph=True, dynamic=False)
    )
    torch.compiler.reset()
    torch.manual_seed(0)
    x = torch.ones(shape, requires_grad=True)
    y = function(x, p)
    share = float((y.detach() == 0).float().mean())
    assert share == pytest.approx(
        p, abs=0.5 if x.numel() < 10 else 5 * (p * (1 - p) / x.numel()) ** 0.5
    )
    assert float(y.detach().max()) == pytest.approx(1 / (1 - p), rel=1e-4)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # type: ignore[arg-type]
    assert not torch.equal(function(x, p), y) or x.numel() < 10
    torch.manual_seed(0)
    assert torch.equal(function(x, p), y)
    if x.numel() > 4000:  # the four numbers of one draw are independent
        neighbours = (y.detach() == 0).float().view(-1, 4)
        assert (torch.corrcoef(neighbours.t()) - torch.eye(4)).abs().max() < 0.03


def test_hashed_dropout_has_no_pattern() -> None:
    """Neighbours, columns, rows, and masks of seeds that differ in one bit are as independent as
    random numbers."""
    count, p, z = 768 * 1000, 0.1, []
    seeds = [(0, 0), (0, 1), (1, 0), (0, -(2**31)), (2**30, 7), (-1, 2**20)]
    kept = (
        cuda.keep_mask(torch.empty(count), p, torch.tensor(pair, dtype=torch.int32))
        for pair in seeds
    )
    masks = [(keep.float() - (1 - p)) / 0.3 for keep in kept]
    for i, one in enumerate(masks):
        z.append(one.mean())
        z += [(one[lag:] * one[:-lag]).mean() for lag in (1, 2, 3, 64, 156, 768, 1024, 65536)]
        z += [
            (one[lag:] * other[: count - lag]).mean() for other in masks[:i] for lag in (0, 1, 768)
        ]
    scaled = torch.stack(z) * count**0.5
    assert scaled.abs().max() < 4.5 and scaled.std() == pytest.approx(1, abs=0.2)


@pytest.mark.gpu
def test_a_gpus_kernels_drop_the_same_forward_and_backward() -> None:
    """The mask is computed twice, and the GELU is the polynomial."""
    signs = torch.tensor([1.0, -1.0], device="cuda").repeat(384)
    x = (
        (torch.linspace(0.1, 4, 300 * 768, device="cuda").view(300, 768) * signs)
        .bfloat16()
        .requires_grad_()
    )
    y = torch.compile(lambda x: cuda.dropout(cuda.gelu(x), 0.25), fullgraph=True)(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    kept = y.detach() != 0
    assert float(kept.float().mean()) == pytest.approx(0.75, abs=0.01)
    leaf = x.detach().double().requires_grad_()
    (expected := F.gelu(leaf)).sum().backward()
    assert leaf.grad is not None
    for got, exact in ((y.detach(), expected.detach()), (grad, leaf.grad)):
        torch.testing.assert_close(
            got.double(), torch.where(kept, exact / 0.75, 0), rtol=0.01, atol=0.01
        )


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
