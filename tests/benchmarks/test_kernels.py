"""What the compiler makes for a GPU: read from its code, and, where triton is installed, made."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import kernels

ROOT = Path(kernels.__file__).parents[1]
CODE = """
triton_poi_fused_gelu_0 = async_compile.triton('triton_poi_fused_gelu_0', '''
    inductor_meta={'grid_type': 'Grid1D', 'kernel_num_gb': 1.5e-01, 'no_x_dim': False},
)
@triton.jit
def triton_poi_fused_gelu_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
''')
triton_red_fused_sum_1 = async_compile.triton('triton_red_fused_sum_1', '''
    inductor_meta={'kernel_num_gb': 0.25, 'no_x_dim': False},
def triton_red_fused_sum_1(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
''')
def call(args):
    triton_poi_fused_gelu_0.run(buf0, buf1, 8, stream=raw_stream0)
    extern_kernels.mm(buf1, buf0, out=buf2)
    triton_poi_fused_gelu_0.run(buf2, buf1, 8, stream=raw_stream0)
    triton_red_fused_sum_1.run(buf1, buf3, 8, stream=raw_stream0)
"""


def test_kernels_are_read_from_the_code() -> None:
    graph = kernels.graph_of("Layer", True, CODE)
    assert graph.launches == Counter(triton_poi_fused_gelu_0=2, triton_red_fused_sum_1=1)
    assert graph.gb == {"triton_poi_fused_gelu_0": 0.3, "triton_red_fused_sum_1": 0.25}
    twelve = kernels.Graph("Layer", True, 12, graph.gb, graph.launches)
    assert twelve.total_gb == pytest.approx(6.6)
    _, layers, *each, total = kernels.lines([twelve], True)
    assert layers.split() == ["12", "x", "Layer,", "backward", "36", "6.60", "1.53"]
    assert [line.split()[-1] for line in each] == ["triton_poi_fused_gelu_0", "triton_red_fused_sum_1"]
    assert total.split() == ["all", "36", "6.60", "1.53"]


Told = Callable[[str], subprocess.CompletedProcess[str]]
# It pretends before torch is imported, which takes most of its time: once, and then each command in a fork of its own.
COMMANDS = """
import json, os, sys
from benchmarks import kernels
kernels.lacking() or kernels.pretend()
if "torch" in sys.modules:
    kernels.lacking, kernels.pretend = str, str
for name, *arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        for stream, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT), stream)
        try:
            code = kernels.main(arguments)
        except SystemExit as error:
            code = error.code
        sys.stdout.flush()
        os._exit(code)
    with open(f"{name}.code", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("kernels")
    commands = [["unknown", "--model", "nope"]]
    for attention, only in (("all", "Lay"),):
        (folder / f"{attention}.yaml").write_text(f"model: {{layers: 1, kernels: {attention}}}\n")
        commands += [[attention, "--model", f"{attention}.yaml", "--batch", "64", "--only", only]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    subprocess.run([sys.executable, "-c", COMMANDS, json.dumps(commands)], cwd=folder, env=environment, check=True)

    def ended(name: str) -> subprocess.CompletedProcess[str]:
        code, out, err = ((folder / f"{name}.{kind}").read_text() for kind in ("code", "out", "err"))
        return subprocess.CompletedProcess(name, int(code), out, err)

    return ended


def test_an_unknown_model_is_one_line(told: Told) -> None:
    ended = told("unknown")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert "--model nope: no such file" in ended.stderr or "not installed" in ended.stderr


@pytest.mark.parametrize("attention, least, most, only", [("all", 43, 47, "Lay")])
def test_a_layer_passes_over_memory_no_more_often_than_it_must(
    attention: str, least: float, most: float, only: str, told: Told
) -> None:
    """Beside its products and attention, forward and backward: 49 times the bytes of its input, of which 20 are the GELU's. Our
    attention leaves the gradients of q, k and v where they are needed."""
    ended = told(attention)
    if ended.returncode == 2:
        assert len(ended.stderr.splitlines()) == 1
        pytest.skip(ended.stderr.strip())
    assert ended.returncode == 0, ended.stderr[-2000:]
    gb = {line[:28].strip(): float(line.split()[-2]) for line in ended.stdout.splitlines()[1:]}
    parts = ("Layer",) if only else ("features", "enter", "Layer", "compare", "pool")
    expected = {f"1 x {part}{what}" for part in parts for what in ("", ", backward")} | {"all"}
    assert set(gb) == expected | (set() if only else {"1 x draw"})
    assert least < (gb["1 x Layer"] + gb["1 x Layer, backward"]) * 1e9 / (128 * 156 * 768 * 2) < most
