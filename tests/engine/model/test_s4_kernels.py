"""S4's kernels for GPUs, without one: computed by Triton's interpreter, and compiled for an H100."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INTERPRETED = """
import json, torch
from omnilead.engine.model.s4 import GPU_CHUNK_TOKENS, GPUChunkedConvolution, StateSpace

class InRegisters(StateSpace):
    def filter_by(self, u_RND, c_Dh2, d_D):
        return GPUChunkedConvolution.apply(u_RND, *self.chunk_weights(c_Dh2, d_D, GPU_CHUNK_TOKENS))

torch.manual_seed(0)
differences = {}
sizes = (4, 140, 1, 21, False), (8, 5, 2, 40, True), (2, 3, 1, 1, True), (16, 3, 1, 9, False)
for states, width, rows, tokens, bidirectional in sizes:
    for dtype in (torch.float32, torch.bfloat16):
        products = StateSpace(width, states, 300, bidirectional).to(dtype)
        registers = InRegisters(width, states, 300, bidirectional).to(dtype)
        registers.load_state_dict(products.state_dict())
        found = []
        for space in (registers, products):
            u_NRD = torch.linspace(-1, 1, rows * tokens * width).sin().view(tokens, rows, width).to(dtype)
            u_RND = u_NRD.requires_grad_().transpose(0, 1)  # not contiguous
            y_RND = space(u_RND)
            grad_RND = torch.linspace(0, 9, y_RND.numel()).cos().view(tokens, rows, width).transpose(0, 1).to(dtype)
            found.append([y_RND, *torch.autograd.grad(y_RND, [u_NRD, space.C, space.D], grad_RND)])
        largest = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found))
        differences[f"{states} states, {tokens} tokens, {dtype}"] = largest
print(json.dumps(differences))
"""
COMPILED = """
import re, subprocess, tempfile, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from omnilead.engine.model import s4_kernels
from omnilead.engine.model.s4 import GPU_CHUNK_TOKENS
sizes = {"chunk": GPU_CHUNK_TOKENS, "states": 8}
sizes |= {"channels": s4_kernels.CHANNELS_PER_PROGRAM, "ahead": s4_kernels.PREFETCHED_CHUNKS}
directions = {s4_kernels.filter_kernel: ({"back": False}, {"back": True}), s4_kernels.gradient_kernel: ({},)}
for kernel, options in directions.items():
    for option in options:
        constants = sizes | option
        types = dict.fromkeys(kernel.arg_names, "*fp32") | {"width": "i32", "tokens": "i32"}
        types |= {name: "*bf16" for name in ("u", "y", "g") if name in types}
        types |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=kernel, signature=types, constexprs=constants)
        warps = {"num_warps": s4_kernels.CHANNELS_PER_PROGRAM // 32}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=warps)
        # a product of two 32-bit numbers is too small for the samples of a day
        assert not re.search(r"muli .*%width.* : i32", made.asm["ttir"]), made.asm["ttir"]
        with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
            file.write(made.asm["ptx"].encode())
            file.flush()
            command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert "0 bytes spill stores" in said, said
"""
IN_A_GRAPH = """
import torch
from torch.library import opcheck
from omnilead.engine.model.s4 import GPUChunkedConvolution, StateSpace, filter_chunks, weight_gradients
space = StateSpace(3, 4, 300)
u_RND = torch.randn(2, 5, 3, requires_grad=True)

def filtered(u_RND, C, D):
    return GPUChunkedConvolution.apply(u_RND, *space.chunk_weights(C[0], D, 2)).square().sum()

given = u_RND, space.C, space.D
expected = torch.autograd.grad(filtered(*given), given)
compiled = torch.compile(filtered, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(torch.autograd.grad(compiled(*given), given), expected)
weights = [w.detach() for w in space.chunk_weights(space.C[0], space.D, 2)]
tests = "test_schema", "test_faketensor"
opcheck(filter_chunks, (u_RND.detach(), *weights, False), test_utils=tests)
opcheck(weight_gradients, (u_RND.detach(), u_RND.detach(), *weights[2:]), test_utils=tests)
"""


def run_python(script, tmp_path, **environment):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)} | environment
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kernels_compute_what_the_products_of_a_cpu_do(tmp_path):
    differences = json.loads(run_python(INTERPRETED, tmp_path, TRITON_INTERPRET="1"))
    assert len(differences) == 8
    for case, difference in differences.items():
        assert difference < (2e-6 if "float32" in case else 2e-2), case


def test_the_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    run_python(COMPILED, tmp_path)


def test_the_compiler_calls_them_as_they_are(tmp_path):
    run_python(IN_A_GRAPH, tmp_path, TRITON_INTERPRET="1")
