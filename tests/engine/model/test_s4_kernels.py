"""S4's kernels for GPUs, without one: computed by Triton's interpreter, and compiled for an H100."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INTERPRETED = """
import json, torch
from omnilead.engine.model.s4 import ChunksInRegisters, StateSpace
torch.manual_seed(0)
differences = []
sizes = (4, 140, 1, 21, 2), (8, 5, 2, 40, 2), (2, 3, 1, 1, 2), (8, 3, 1, 9, 1), (4, 3, 1, 10, 4)
for states, width, rows, tokens, chunk in sizes:
    space = StateSpace(width, states, length=300)
    u_RND, g_RND = torch.randn(rows, tokens, width, requires_grad=True), torch.randn(rows, tokens, width)
    given = [u_RND, space.C, space.D]
    expected = space(u_RND)
    weights = space.chunk_weights(space.C[0], space.D, chunk)
    y_RND = ChunksInRegisters.apply(u_RND, *weights)
    pairs = [(y_RND, expected)]
    pairs += zip(*(torch.autograd.grad(y, given, g_RND) for y in (y_RND, expected)))
    differences += [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
print(json.dumps(differences))
"""
COMPILED = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from omnilead.engine.model import s4_kernels
from omnilead.engine.model.s4 import GPU_CHUNK_TOKENS
sizes = {"tokens": 313, "chunk": GPU_CHUNK_TOKENS, "states": 8}
sizes |= {"channels": s4_kernels.CHANNELS, "ahead": s4_kernels.CHUNKS_AHEAD}
for kernel, directions in ((s4_kernels.filter_kernel, ({"back": False}, {"back": True})), (s4_kernels.gradient_kernel, ({},))):
    for direction in directions:
        constants = sizes | direction
        types = dict.fromkeys(kernel.arg_names, "*fp32") | {"width": "i32"}
        types |= {name: "*bf16" for name in ("u", "y", "g") if name in types}
        types |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=kernel, signature=types, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": s4_kernels.CHANNELS // 32})
        assert made.asm["cubin"]
        assert ".local" not in made.asm["ptx"]  # all of it is in registers
"""


def run_python(script, tmp_path, **environment):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)} | environment
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kernels_compute_what_the_chunks_of_a_cpu_do(tmp_path):
    differences = json.loads(run_python(INTERPRETED, tmp_path, TRITON_INTERPRET="1"))
    assert len(differences) == 5 * 4 and max(differences) < 1e-6


def test_the_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    run_python(COMPILED, tmp_path)
