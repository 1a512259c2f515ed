"""The attention for few tokens: interpreted where there is no GPU, and compiled for one that is not here."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.encoder import Encoder
from engine.model.init_weights import initialise
from engine.training.throughput import compile_model
from tests.engine.model.tiny import SMALL

triton = pytest.importorskip("triton")
CASES = Path(__file__).parent / "short_cases.py"


@pytest.mark.parametrize("interpreted", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_its_cases(interpreted: bool) -> None:
    environment = os.environ | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if interpreted else {})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(CASES)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0 and " passed" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-1000:]


def test_compiled_for_an_h200_two_programs_fit_a_processor(tmp_path: Path) -> None:
    """With the paper's shapes: registers, shared memory, next to nothing spilled, and the tensor cores of whole warp groups."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.model.kernels import short

    sizes = short.constants(torch.empty(1, 156, 2304, device="meta"), 12, 26)
    how = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    for kernel in (short.forward_kernel, short.backward_kernel):
        names: list[str] = kernel.arg_names
        kinds = dict.fromkeys(names, "*bf16") | {"sums": "*fp32", "seeds": "*i32"} | dict.fromkeys(sizes, "constexpr")
        values = {(names.index(name),): value for name, value in sizes.items()}
        aligned: dict[Any, Any] = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in sizes}
        made = triton.compile(ASTSource(kernel, kinds, values, aligned), target=GPUTarget("cuda", 90, 32), options=how)
        assert "wgmma.mma_async" in made.asm["ptx"]
        assert 2 * made.metadata.shared < 227 * 1024 and how["num_warps"] * 32 * 255 * 2 < 65536
        if not (tools / "cuobjdump").is_file():  # some builds leave it out
            continue
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        told = subprocess.run([tools / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True).stdout
        spilled = re.search(r"STACK:(\d+)", told)
        assert spilled is not None and int(spilled[1]) <= 64, told


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["eager", "layers"])
def test_an_encoder_with_it(how: str) -> None:
    """In bf16 as near to float32 as with torch's kernel."""
    x = torch.randn(4, 12, 2500, generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for kind, dtype in (("plain", torch.float32), ("plain", torch.bfloat16), ("all", torch.bfloat16)):
        config = dataclasses.replace(SMALL, kernels=kind, width=128, heads=2)
        encoder = Encoder(config)
        initialise(encoder, torch.Generator().manual_seed(0))
        encoder = encoder.cuda().to(dtype)
        if dtype == torch.bfloat16:
            compile_model(torch.nn.ModuleDict({"encoder": encoder}), how)
        c = encoder(x.to(dtype))
        c.float().square().sum().backward()
        qkv = encoder.layers[0].attention.qkv
        found.append(torch.cat([c.detach().float().flatten(), qkv.weight.grad.float().flatten(), qkv.bias.grad.float()]))
    errors = [float((low - found[0]).norm()) for low in found[1:]]
    assert errors[1] < 1.5 * errors[0]
