"""The attention for few tokens: in Triton's interpreter if there is no GPU, and compiled for a GPU
that need not exist.

Triton chooses the interpreter when it is imported: a process of its own runs this file.
"""

import dataclasses
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from omnilead.engine.model.kernels import short  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bf16


@cache
def kept(rows: int, tokens: int, heads: int, d: int, p: float, seed: int) -> Tensor:
    """[R, H, N, N], the dropout mask: with equal scores and one-hot values, the output y contains
    the shares."""
    parts = []
    for first in range(0, tokens, d):
        columns = range(first, min(first + d, tokens))
        qkv = torch.zeros(rows, tokens, 3, heads, d, dtype=LOW, device=DEVICE)
        qkv[:, columns, 2, :, [n - first for n in columns]] = 1
        torch.manual_seed(seed)
        y = short.attention(qkv.flatten(2), heads, p).view(rows, tokens, heads, d)
        parts.append(y.permute(0, 2, 1, 3)[..., : len(columns)] > 0)
    return torch.cat(parts, -1)


CASES = [  # rows, tokens, heads, width of a head, dropout
    *((1, 156, 2, 64, 0.1, LOW), (3, 5, 1, 16, 0.9, LOW), (1, 33, 3, 32, 0.5, LOW)),
    *((1, 64, 2, 16, 0.0, LOW), (1, 256, 1, 64, 0.1, LOW), (1, 33, 2, 16, 0.3, torch.float32)),
]


def is_attention(
    rows: int, tokens: int, heads: int, d: int, p: float, dtype: torch.dtype, far: float = 0.0
) -> None:
    """Forward and backward with the drawn dropout mask, against float64. `far`: all scores are
    so far below zero that the zeros beyond the last token would be the highest."""
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(rows, tokens, 3, heads * d, generator=generator)
    if far:
        qkv[:, :, 0, 0], qkv[:, :, 1, 0] = far, -far
    qkv = qkv.flatten(2).to(DEVICE, dtype).requires_grad_()
    grad = torch.randn(rows, tokens, heads * d, generator=generator).to(DEVICE, dtype)
    torch.manual_seed(7)
    y = short.attention(qkv, heads, p)
    y.backward(grad)
    exact = qkv.detach().double().requires_grad_()
    q, k, v = exact.view(rows, tokens, 3, heads, d).permute(2, 0, 3, 1, 4)
    shares = (q @ k.transpose(-1, -2) * d**-0.5).softmax(-1)
    used = shares * kept(rows, tokens, heads, d, p, seed=7) / (1 - round(p * 256) / 256)
    expected = (used @ v).transpose(1, 2).flatten(2)
    expected.backward(grad.double())
    assert qkv.grad is not None and exact.grad is not None and y.dtype == dtype
    rounding = (16 if dtype == torch.float32 else 3) * torch.finfo(dtype).eps
    for got, true in ((y.detach(), expected.detach()), (qkv.grad, exact.grad)):
        torch.testing.assert_close(
            got.double(), true, rtol=0, atol=rounding * float(true.abs().max())
        )


def takes_large_scores_and_any_strides() -> None:
    """The softmax of a score of a thousand is one, gradients can be views, and without dropout
    nothing is drawn."""
    qkv = torch.zeros(1, 20, 3, 1, 16, dtype=LOW, device=DEVICE)
    qkv[:, :, :2, :, 0] = 60.0
    qkv[:, 3, 1, :, 0] = 100.0
    qkv[:, :, 2] = torch.arange(20.0, device=DEVICE)[:, None, None].to(LOW)
    leaf = qkv.flatten(2).requires_grad_()
    before = torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()
    y = short.attention(leaf, 1)
    assert torch.equal(
        before, torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()
    )
    assert torch.equal(y, torch.full_like(y, 3))
    y.sum().backward()  # a gradient of stride 0
    assert leaf.grad is not None
    assert torch.equal(
        leaf.grad.view(20, 3, 16)[:, 2, 0], torch.eye(20, device=DEVICE, dtype=LOW)[3] * 20
    )


def drops_at_random() -> None:
    """As many as requested, and independent between rows, heads, queries, keys and seeds."""
    one, other = (kept(4, 64, 4, 64, 0.1, seed).float() for seed in (0, 1))
    share = 1 - 26 / 256
    assert abs(float(one.mean()) - share) < 5 * (share * (1 - share) / one.numel()) ** 0.5
    x = (one - share) / (share * (1 - share)) ** 0.5
    pairs = {"seed": (x, (other - share) / (share * (1 - share)) ** 0.5)}
    for axis, name in enumerate(("row", "head", "query", "key")):
        for lag in (1, 2, 3, 4, 8, 16, 31, 32)[: 3 if axis < 2 else None]:
            pairs[f"{name} {lag}"] = (
                x.narrow(axis, lag, x.shape[axis] - lag),
                x.narrow(axis, 0, x.shape[axis] - lag),
            )
    for lag in (1, 8):
        pairs[f"query and key {lag}"] = (x[:, :, lag:, lag:], x[:, :, :-lag, :-lag])
    z = {name: float((a * b).mean()) * a.numel() ** 0.5 for name, (a, b) in pairs.items()}
    assert max(map(abs, z.values())) < 4, z
    assert 0.4 < sum(value**2 for value in z.values()) / len(z) < 2


@pytest.mark.parametrize("interpreted", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_short_attention_equals_attention(interpreted: bool) -> None:
    environment = os.environ | (
        {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if interpreted else {}
    )
    ended = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_compiled_for_an_h200_two_programs_fit_a_processor(tmp_path: Path) -> None:
    """With the paper's shapes: registers, shared memory, almost no spilling, and tensor cores of
    whole warp groups."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sizes = short.constants(torch.empty(1, 156, 2304, device="meta"), 12, 26)
    how = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    for kernel in (short.forward_kernel, short.backward_kernel):
        names: list[str] = kernel.arg_names
        kinds = (
            dict.fromkeys(names, "*bf16")
            | {"sums": "*fp32", "seeds": "*i32"}
            | dict.fromkeys(sizes, "constexpr")
        )
        values = {(names.index(name),): value for name, value in sizes.items()}
        aligned: dict[Any, Any] = {
            (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in sizes
        }
        made = triton.compile(
            ASTSource(kernel, kinds, values, aligned), target=GPUTarget("cuda", 90, 32), options=how
        )
        assert "wgmma.mma_async" in made.asm["ptx"]
        assert 2 * made.metadata.shared < 227 * 1024 and how["num_warps"] * 32 * 255 * 2 < 65536
        if not (tools / "cuobjdump").is_file():  # some builds leave it out
            continue
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True
        ).stdout
        spilled = re.search(r"STACK:(\d+)", usage)
        assert spilled is not None and int(spilled[1]) <= 64, usage


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["eager", "layers"])
def test_an_encoder_with_it(how: str) -> None:
    """In bf16, as close to float32 as with torch's kernel."""
    from omnilead.engine.model.encoder import Encoder
    from omnilead.engine.model.init_weights import initialise
    from omnilead.engine.training.train import compile_model
    from tests.engine.model.tiny import SMALL

    x = torch.randn(4, 12, 2500, generator=torch.Generator().manual_seed(0)).cuda()
    results = []
    for kind, dtype in (
        ("plain", torch.float32),
        ("plain", torch.bfloat16),
        ("all", torch.bfloat16),
    ):
        config = dataclasses.replace(SMALL, kernels=kind, width=128, heads=2)
        encoder = Encoder(config)
        initialise(encoder, torch.Generator().manual_seed(0))
        encoder = encoder.cuda().to(dtype)
        if dtype == torch.bfloat16:
            compile_model(torch.nn.ModuleDict({"encoder": encoder}), how)
        c = encoder(x.to(dtype))
        c.float().square().sum().backward()
        qkv = encoder.layers[0].attention.qkv
        results.append(
            torch.cat(
                [
                    c.detach().float().flatten(),
                    qkv.weight.grad.float().flatten(),
                    qkv.bias.grad.float(),
                ]
            )
        )
    errors = [float((low - results[0]).norm()) for low in results[1:]]
    assert errors[1] < 1.5 * errors[0]


if __name__ == "__main__":
    for case in CASES:
        is_attention(*case)
    takes_large_scores_and_any_strides()
    is_attention(1, 20, 1, 16, 0.0, LOW, far=60.0)
    drops_at_random()
