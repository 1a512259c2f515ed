"""What torch's compiler makes of a training step for an H200, counted where there is none: kernels, and the bytes of each.

    pip install triton
    python -m benchmarks.kernels [--model paper] [--batch 512] [--compile layers|step] [--only REGEX] [--each]

Tensors that know shapes and no numbers go through the model in bf16, and what `train.compile` says through the compiler, which
is told of an H200. Its kernels are written and never run; a kernel's bytes are what it must read and write once. Not counted:
matrix products and attention, which are the library's, and what runs uncompiled. Needs g++.
"""

import argparse
import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.run import MODEL, positive, regex
from engine.common import Parser

TB_PER_S = 4.3  # of an H200's memory, read and written
H200 = {
    "name": "NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "shared_memory_per_block_optin": 232448,
    "warp_size": 32,
    "total_memory": 141 * 10**9,
    "L2_cache_size": 60 * 2**20,
}
# Autograd asks a device for its guard and its hooks, before anything is computed on it. A build without CUDA has neither, one
# with CUDA has those of a driver that may not be there: these stand in their place.
DEVICE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static const Device here(DeviceType::CUDA, 0);
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return here; }
  Device getDevice() const override { return here; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, here); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, here); }
};
static Guard guard;
extern "C" void known() {
  impl::device_guard_impl_registry[size_t(DeviceType::CUDA)].store(&guard);
}
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}
"""


@dataclass(frozen=True)
class Graph:
    part: str  # what was compiled
    backward: bool
    times: int  # in a step
    gb: dict[str, float]  # of each kernel, all its launches together
    launches: Counter[str]

    @property
    def total_gb(self) -> float:
        return self.times * sum(self.gb.values())


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__
    parser = Parser(
        prog="python -m benchmarks.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="paper", help=f"{MODEL} (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=512, help="crops (default: %(default)s)")
    parser.add_argument(
        "--compile", choices=("layers", "step"), default="layers", help="as train.compile (default: %(default)s)"
    )
    parser.add_argument("--only", type=regex, default="", metavar="REGEX", help="parts whose name matches: Layer, pool, ...")
    parser.add_argument("--each", action="store_true", help="list each kernel")
    options = parser.parse_args(arguments)
    lack = lacking()
    if lack:
        print(f"benchmarks.kernels: {lack}", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", module="torch")
    pretend()
    from engine.common import ConfigError

    try:
        found = graphs(options.model, options.batch, options.compile, options.only)
    except ConfigError as error:
        print(f"benchmarks.kernels: --model {options.model}: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(found, options.each)))
    return 0


def lacking() -> str:
    if "torch" in sys.modules:
        return "torch has been imported: this is a process of its own"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if shutil.which("g++") is None:
        return "g++ is not installed: apt install g++"
    return ""


def torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def pretend() -> None:
    """An H200, for whoever asks torch; before it is imported."""
    torch_at = torch_folder()
    with tempfile.TemporaryDirectory(prefix="omnilead-") as place:
        source, made = Path(place) / "device.cpp", Path(place) / "device.so"
        source.write_text(DEVICE)
        libraries = [f"-L{torch_at}/lib", f"-Wl,-rpath,{torch_at}/lib", "-lc10", "-ltorch_cpu"]
        command = ["g++", "-std=c++20", "-w", "-fPIC", "-shared", f"-I{torch_at}/include", str(source), "-o", str(made)]
        subprocess.run(command + libraries, check=True)
        device = ctypes.CDLL(str(made))

    import torch

    device.known()

    known: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": SimpleNamespace(**H200),
        "get_device_capability": (9, 0),
        "set_device": None,
        "set_rng_state": None,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in known.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu")
    torch.version.cuda = "13.0"

    import triton  # from here on the compiler's modules, which keep what they find
    from torch._functorch import config as autograd
    from torch._inductor import config as compiler
    from torch._inductor.fx_passes import fuse_attention, pad_mm
    from torch._subclasses import fake_tensor
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget

    _triton.has_triton = lambda: True  # type: ignore[assignment]
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), is_active=lambda: True)
    triton.runtime.driver.set_active(target)
    triton.JITFunction.run = lambda *_, **__: None
    computing = (fuse_attention, "_sfdp_init"), (pad_mm, "_pad_mm_init"), (fake_tensor, "init_gpu_context")
    for module, on_the_device in computing:
        setattr(module, on_the_device, lambda *_: None)
    compiler.joint_graph_constant_folding = False  # so does this
    compiler.profile_bandwidth = True  # kernels carry their bytes
    compiler.fx_graph_cache = autograd.enable_autograd_cache = False
    autograd.force_non_lazy_backward_lowering = True


class NeverRun(Exception):
    """What was compiled is called."""


def graphs(model: str, batch: int, how: str, only: str) -> list[Graph]:
    """Of one training step, in the order in which they are compiled."""
    import torch
    import torch.nn.functional as F
    from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks.step import config_file
    from engine.config import load
    from engine.model.pretrainer import Pretrainer
    from engine.training.throughput import compile_model

    codes: list[str] = []
    found: list[Graph] = []
    times: Counter[str] = Counter()

    def written(graph: Any) -> Any:
        codes.append(graph.codegen()[0].value)

        def call(*_: Any) -> None:
            raise NeverRun

        return SimpleNamespace(call=call, __file__="")

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        owner = getattr(function, "__self__", None)
        name = function.__name__ if function.__name__ != "_call_impl" else type(owner).__name__

        def once(*arguments: Any, **named: Any) -> Any:
            times[name] += 1
            if times[name] == 1 and re.search(only, name):
                codes.clear()
                torch._dynamo.reset()
                try:
                    compile_(function, fullgraph=True, **options)(*arguments, **named)
                except NeverRun:
                    found.extend(graph_of(name, bool(i), code) for i, code in enumerate(codes))
            return function(*arguments, **named)

        return once

    def flash(q: Any, k: Any, v: Any, dropout_p: float = 0.0) -> Any:  # what a GPU would choose
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p)[0]

    def accesses(kernel: Any) -> Any:  # by the names of what is read, also where a kernel of ours wrote it
        real = V.graph.scheduler.mutation_real_name
        return {real.get(name, name): where for name, where in by_version(kernel).items()}

    by_version, SIMDKernelFeatures.buf_accesses = SIMDKernelFeatures.buf_accesses, accesses  # type: ignore[method-assign]
    compile_, torch.compile = torch.compile, compiled  # type: ignore[assignment]
    GraphLowering.compile_to_module, F.scaled_dot_product_attention = written, flash  # type: ignore[assignment, method-assign]
    config = load(config_file(model))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            pretrainer = Pretrainer(config.model, config.objective)
            for p in pretrainer.parameters():
                p.data = p.data.to(torch.bfloat16)
            x_BSLT = torch.empty(batch, 2, config.model.leads, 2500, dtype=torch.bfloat16)
            others = torch.empty(batch, 2, dtype=torch.int64), torch.ones(()), torch.arange(batch)
        compile_model(pretrainer, how)
        pretrainer(x_BSLT, *others)
    return [Graph(g.part, g.backward, times[g.part], g.gb, g.launches) for g in found]


def graph_of(part: str, backward: bool, code: str) -> Graph:
    launches = Counter(re.findall(r"\b(\w+)\.run\(", code))
    written = re.findall(r"'kernel_num_gb': ([\d.e-]+).*?\ndef (triton_\w+)\(", code, re.DOTALL)
    return Graph(part, backward, 1, {name: float(gb) * launches[name] for gb, name in written}, launches)


def lines(found: list[Graph], each: bool) -> Iterator[str]:
    yield f"{'':<28}{'kernels':>8}{'GB':>9}{'ms at ' + str(TB_PER_S) + ' TB/s':>16}"
    for graph in found:
        name = f"{graph.times} x {graph.part}{', backward' if graph.backward else ''}"
        launched = graph.times * graph.launches.total()
        yield f"{name:<28}{launched:>8}{graph.total_gb:>9.2f}{graph.total_gb / TB_PER_S:>16.2f}"
        if each:
            for kernel, gb in sorted(graph.gb.items(), key=lambda pair: -pair[1]):
                yield f"    {gb:9.3f} GB  {graph.launches[kernel]} x {kernel}"
    total = sum(graph.total_gb for graph in found)
    yield f"{'all':<28}{sum(g.times * g.launches.total() for g in found):>8}{total:>9.2f}{total / TB_PER_S:>16.2f}"


if __name__ == "__main__":
    sys.exit(main())
