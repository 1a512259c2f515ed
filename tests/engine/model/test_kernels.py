"""Every replacement in engine.model.kernels gives the values and gradients of the plain
operation."""

import re
import runpy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from omnilead.engine.model import encoder as plain
from omnilead.engine.model import kernels

torch.set_num_threads(1)


def values_and_gradients(function, inputs, dtype=torch.float64):
    """In float64, for a random gradient that is exact in every precision."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    y = function(*leaves)
    grads = torch.autograd.grad(y, leaves, randn(*y.shape).bfloat16().to(y.dtype))
    return [t.detach().double() for t in (y, *grads)]


def near(got, expected, far, least=0):
    """Within `far` times the largest number of each, which counts as at least `least`."""
    for mine, exact in zip(got, expected, strict=True):
        assert (mine - exact).abs().max() <= far * max(least, float(exact.abs().max()))


def errors(got, expected):
    pairs = zip(got, expected, strict=True)
    return [float((mine - exact).norm() / exact.norm()) for mine, exact in pairs]


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_setting_selects_the_kernels():
    x = torch.ones(3)
    assert kernels.pick_operation("dropout", F.dropout, "plain", x) is F.dropout
    assert kernels.pick_operation("dropout", F.dropout, "auto", x) is kernels.dropout
    elsewhere = x.to("meta")  # stands for a GPU
    assert kernels.pick_operation("dropout", F.dropout, "auto", elsewhere) is F.dropout
    assert (
        kernels.pick_operation("convolve", F.relu, "auto", elsewhere) is kernels.convolve_in_blocks
    )


@pytest.mark.parametrize("dtype, far", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_group_norm_and_gelu_a_few_rows_at_a_time(dtype, far):
    """With a mean of 10, in which the variance must not be lost; 25 rows of 2,500 are processed in
    two parts."""
    y = 10 + randn(25, 2500, 32).cumsum(1) / 50
    inputs = [x.to(dtype) for x in (y, randn(32), randn(32, 1)[:, 0])]
    assert len(list(kernels.cache_sized_slices(inputs[0]))) > 1

    def exact(y, w, b):
        return F.gelu(F.group_norm(y.mT, 32, w, b, 1e-5).mT)

    expected = values_and_gradients(exact, inputs)
    for function in (plain.group_norm_gelu, kernels.group_norm_gelu):
        near(values_and_gradients(partial(function, eps=1e-5), inputs, dtype), expected, far)


@pytest.mark.parametrize("tokens, kernel", [(156, 128), (7, 16), (1, 5), (31, 1), (40, 7)])
def test_convolutions(tokens, kernel):
    """At the paper's length, and with a kernel longer than the input. test_encoder.py tests the
    plain convolution."""
    inputs = [randn(2, tokens, 24), randn(24, 6, kernel), randn(24)]
    expected = values_and_gradients(partial(plain.convolve, groups=4), inputs)
    for function in (kernels.convolve_by_fourier, kernels.convolve_in_blocks):
        near(values_and_gradients(partial(function, groups=4), inputs), expected, 1e-12, least=1)


def test_the_plain_convolution_in_bf16():
    """Few channels a group and 16 taps: on a CPU with AMX torch's own bf16 convolution returns
    other numbers."""
    inputs = [x.bfloat16() for x in (randn(2, 156, 32), randn(32, 8, 16), randn(32))]
    exact = plain.convolve(*(x.double() for x in inputs), groups=4)
    for arguments, autocast in ((inputs, False), (inputs, True), (map(Tensor.float, inputs), True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = plain.convolve(*arguments, groups=4)
        assert_close(got.double(), exact, rtol=4e-3, atol=0.04)


@pytest.mark.parametrize("function", [kernels.convolve_by_fourier, kernels.convolve_in_blocks])
def test_convolutions_in_bf16(function):
    """Almost as accurate as torch's, 1.7e-3; the same in autocast as in bf16."""
    inputs = [x.bfloat16() for x in (randn(8, 156, 64), randn(64, 4, 128), randn(64))]
    expected = values_and_gradients(partial(plain.convolve, groups=16), inputs)
    grouped = partial(function, groups=16)
    far = errors(values_and_gradients(grouped, inputs, torch.bfloat16), expected)
    assert max(far) < 2.5e-3 and far[1] < 1.8e-3
    with torch.autocast("cpu", torch.bfloat16):
        low = values_and_gradients(grouped, inputs, torch.float32)
    assert max(errors(low, expected)) < 0.01


def test_the_gradient_of_a_weight_is_summed_in_float32():
    """Of small integers, whose products and partial sums bf16 holds exactly, but not their sum of
    all blocks."""
    x, grad = (randn(3, 156, width).abs().round().clamp(max=4) for width in (24, 24))
    inputs = [x, torch.zeros(24, 6, 7), torch.zeros(24)]
    leaves = [t.double().requires_grad_() for t in inputs]
    plain.convolve(*leaves, groups=4).backward(grad.double())
    summed = kernels.weight_gradient(x.bfloat16(), grad.bfloat16(), 7, 4)
    assert summed.double().equal(leaves[1].grad)
    assert not summed.bfloat16().double().equal(leaves[1].grad)


def test_gradients_of_blocks_are_gathered():
    """No scattered additions, which a GPU would do in any order."""
    inputs = [randn(2, 40, 24), randn(24, 6, 7), randn(24)]
    with torch.profiler.profile() as profile:
        values_and_gradients(partial(kernels.convolve_in_blocks, groups=4), inputs)
    names = [event.key for event in profile.key_averages()]
    assert "aten::bmm" in names
    assert not re.search("index_put|scatter|index_add|unfold_backward", " ".join(names))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(dtype):
    inputs = [randn(4, 150, 24), randn(40, 24), randn(40)]
    expected = values_and_gradients(F.linear, [x.to(dtype) for x in inputs])
    module = plain.Linear(24, 40, "auto")

    def call(x, weight, bias):
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, x)

    units = 1 if dtype == torch.bfloat16 else 8
    for function in (call, kernels.linear):
        got = values_and_gradients(function, inputs, dtype)
        near(got, expected, units * torch.finfo(dtype).eps)


def test_attention():
    """Heads of width 9, which no fused kernel supports; the replacements without dropout are
    torch's."""
    qkv, heads = randn(2, 20, 3 * 36), 4
    q, k, v = qkv.double().view(2, 20, 3, heads, 9).permute(2, 0, 3, 1, 4)
    expected = ((q @ k.transpose(-1, -2) / 3).softmax(-1) @ v).transpose(1, 2).flatten(2)
    for function in (plain.attention, kernels.attention):
        assert_close(function(qkv, heads, 0.0).double(), expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(function(qkv, heads, 0.5), function(qkv, heads, 0.5))
    written_out, fused = (  # with a probability that rounds to zero
        values_and_gradients(
            partial(kernels.attention, heads=heads, dropout_p=p), [qkv], torch.float32
        )
        for p in (1e-9, 0.0)
    )
    assert_close(written_out, fused, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape, p", [((40, 50, 60), 0.1), ((333, 7), 0.25), ((3,), 0.5)])
def test_dropout(shape, p):
    torch.manual_seed(0)
    x = torch.ones(shape, requires_grad=True)
    y = kernels.dropout(x, p)
    dropped = (y.detach() == 0).float()
    near_p = 0.5 if x.numel() < 10 else 5 * (p * (1 - p) / x.numel()) ** 0.5
    assert float(dropped.mean()) == pytest.approx(p, abs=near_p)
    assert float(y.detach().max()) == pytest.approx(1 / (1 - p), rel=1e-4)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # type: ignore[arg-type]
    assert not torch.equal(kernels.dropout(x, p), y) or x.numel() < 10
    torch.manual_seed(0)
    assert torch.equal(kernels.dropout(x, p), y)
    if x.numel() > 4000:  # the four numbers of one draw are independent
        assert (torch.corrcoef(dropped.view(-1, 4).t()) - torch.eye(4)).abs().max() < 0.03


def test_blocks_survive_a_compiler_that_pads_matrix_products(monkeypatch):
    """torch's does on a GPU, if a size is no multiple of 4: the product is then a part of a larger
    tensor. On an H100, torch 2.11, the compiled gradient of such a model was wrong."""
    x, grad, bmm = randn(8, 50, 48), randn(8, 50, 48), torch.bmm
    expected = kernels.weight_gradient(x, grad, 16, 16)
    monkeypatch.setattr(torch, "bmm", lambda a, b: bmm(a, F.pad(b, (0, 2)))[..., :-2])
    assert_close(kernels.weight_gradient(x, grad, 16, 16), expected)


@pytest.mark.gpu
def test_blocks_on_a_gpu_agree_with_the_library_and_are_deterministic():
    inputs = [randn(8, 156, 64), randn(64, 4, 128), randn(64)]
    inputs = [x.to("cuda", torch.bfloat16) for x in inputs]
    grad = randn(8, 156, 64).to("cuda", torch.bfloat16)

    def on_gpu(function, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        y = function(*leaves, groups=16)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))]

    exact = on_gpu(plain.convolve, torch.float64)
    first, second = (on_gpu(kernels.convolve_in_blocks, torch.bfloat16) for _ in range(2))
    assert_close(first, second, rtol=0, atol=0)
    assert max(errors(first, exact)) < 4e-3


def test_float32_is_made_exact_by_programs_and_not_by_an_import(
    monkeypatch,
):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    module = runpy.run_path(kernels.__file__)
    assert torch.backends.cudnn.allow_tf32
    module["disable_tf32"]()
    assert not torch.backends.cudnn.allow_tf32
