"""Predict the least time of a training step on an H200 without having one, from what torch's
compiler generates.

    python -m benchmarks.predict_gpu [--model paper] [--batch 512]

Fake tensors (shapes without data) go through the model in bf16 and through torch.compile, which is
made to believe in an H200. Its kernels are generated but never run. A kernel's time is the bytes it
must read and write once, at the memory's bandwidth. Matrix products and attention, which libraries
compute, take flops_per_crop at the rate of a large product. Needs g++.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.run import MODEL, at_least
from omnilead.engine.common import ConfigError, Parser

TB_PER_S, TFLOPS = (
    4.3,
    790.0,
)  # of an H200: a large copy, counting reads and writes; a large bf16 product
H200 = {
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "warp_size": 32,
    "L2_cache_size": 60 << 20,
}
H200 |= {
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "regs_per_multiprocessor": 65536,
}
H200 |= {"shared_memory_per_block_optin": 232448, "total_memory": 141 * 10**9}
# Autograd asks for a device's guard and hooks before it computes anything. A build without CUDA has
# neither, and one with CUDA has those of a driver that may be missing: these replace them.
DEVICE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static const Device here(DeviceType::CUDA, 0);
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return here; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, here); }
};
static Guard guard;
extern "C" void known() { impl::device_guard_impl_registry[size_t(DeviceType::CUDA)].store(&guard); }
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}
"""


class NeverRun(Exception):
    """Raised when compiled code would run."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "python -m benchmarks.predict_gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", default="paper", help=MODEL)
    parser.add_argument(
        "--batch", type=at_least(1), default=512, help="crops (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        pretend()
        print("\n".join(predict(options.model, options.batch)))
    except (ConfigError, OSError) as error:  # OSError: e.g. no g++
        parser.error(str(error))
    return 0


def pretend() -> None:
    """Make torch believe that it has an H200. For gradients, call this before torch is imported."""
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    home = Path(spec.origin).parent
    with tempfile.TemporaryDirectory(prefix="omnilead-") as work:
        library = f"{work}/device.so"
        command = [
            "g++",
            "-std=c++20",
            "-w",
            "-fPIC",
            "-shared",
            "-x",
            "c++",
            "-",
            "-o",
            library,
            f"-I{home}/include",
        ]
        command += [f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, input=DEVICE, text=True, check=True)
        device = ctypes.CDLL(library)

    import torch

    device.known()
    answers: dict[str, Any] = dict.fromkeys(("set_device", "set_rng_state", "_lazy_init"))
    answers |= dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0)
    answers |= {"is_available": True, "device_count": 1, "get_device_capability": (9, 0)}
    answers["_get_device_properties"] = SimpleNamespace(name="NVIDIA H200", **H200)
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu")
    torch.version.cuda = "13.0"

    import triton  # the compiler's modules, which cache what they find at import
    from torch._functorch import config as autograd
    from torch._inductor import config as compiler
    from torch._inductor.fx_passes import fuse_attention, pad_mm
    from torch._subclasses import fake_tensor
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget

    _triton.has_triton = lambda: True  # type: ignore[assignment]
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), is_active=lambda: True
    )
    triton.runtime.driver.set_active(target)
    triton.JITFunction.run = lambda *_, **__: None
    for module, name in (
        (fuse_attention, "_sfdp_init"),
        (pad_mm, "_pad_mm_init"),
        (fake_tensor, "init_gpu_context"),
    ):
        setattr(module, name, lambda *_: None)  # they compute on the device
    compiler.joint_graph_constant_folding = False  # this computes there, too
    compiler.profile_bandwidth = True  # annotates kernels with their bytes
    compiler.fx_graph_cache = autograd.enable_autograd_cache = False
    autograd.force_non_lazy_backward_lowering = True

    def flash(q: Any, k: Any, v: Any, dropout_p: float = 0.0) -> Any:  # what a GPU would choose
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p)[0]

    torch.nn.functional.scaled_dot_product_attention = flash  # type: ignore[assignment]


def kernels_of(call: Callable[[], Any]) -> list[tuple[int, float]]:
    """(launched kernels, their GB) for a call of a compiled function: forward, then backward."""
    import torch
    from torch._inductor.graph import GraphLowering

    graphs: list[tuple[int, float]] = []

    def count(graph: Any) -> Any:
        code = graph.codegen()[0].value
        launches = Counter(re.findall(r"\b(\w+)\.run\(", code))
        written = re.findall(r"'kernel_num_gb': ([\d.e-]+).*?\ndef (triton_\w+)\(", code, re.DOTALL)
        graphs.append((launches.total(), sum(float(gb) * launches[name] for gb, name in written)))
        return SimpleNamespace(call=never_run, __file__="")

    def never_run(*_: Any) -> None:
        raise NeverRun

    GraphLowering.compile_to_module = count  # type: ignore[assignment, method-assign]
    torch._dynamo.reset()
    with contextlib.suppress(NeverRun):
        call()
    return graphs


def predict(model: str, batch: int) -> Iterator[str]:
    """Lines of a table: the compiled parts in the order of compilation, and the predicted step
    time."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks.explain import OPTIMIZER_BYTES
    from benchmarks.step import SAMPLES, config_file
    from omnilead.engine.config import load
    from omnilead.engine.model.config import flops_per_crop
    from omnilead.engine.model.pretrainer import Pretrainer
    from omnilead.engine.training.train import COMPILED, compile_model

    graphs: dict[str, list[tuple[int, float]]] = {}
    times: Counter[str] = Counter()

    def compile_once(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        name = "layer" if function.__name__ == "_call_impl" else function.__name__

        def run(*arguments: Any, **named: Any) -> Any:
            times[name] += 1
            if name not in graphs:
                graphs[name] = kernels_of(
                    lambda: compile_(function, fullgraph=True, **options)(*arguments, **named)
                )
            return function(*arguments, **named)

        return run

    warnings.filterwarnings("ignore", module="torch")
    compile_, torch.compile = torch.compile, compile_once  # type: ignore[assignment]
    config = load(config_file(model))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            pretrainer = Pretrainer(config.model, config.objective)
            for p in pretrainer.parameters():
                p.data = p.data.bfloat16()
            x_BSLT = torch.empty(batch, 2, config.model.leads, SAMPLES, dtype=torch.bfloat16)
            others = torch.empty(batch, 2, dtype=torch.int64), torch.ones(()), torch.arange(batch)
        compile_model(pretrainer, COMPILED["cuda"])
        pretrainer(x_BSLT, *others)
    row = "{:<28}{:>8}{:>9.2f}{:>9.2f}"
    yield f"{'':<28}{'kernels':>8}{'GB':>9}{'ms':>9}"
    gb = OPTIMIZER_BYTES["bf16"] * sum(p.numel() for p in pretrainer.parameters()) / 1e9
    yield row.format("optimizer", "", gb, gb / TB_PER_S)
    for name, both in graphs.items():
        for (launches, each), direction in zip(both, ("", ", backward"), strict=False):
            of_step = times[name] * each
            yield row.format(
                f"{times[name]} x {name}{direction}",
                times[name] * launches,
                of_step,
                of_step / TB_PER_S,
            )
            gb += of_step
    products_ms = batch * flops_per_crop(config.model) / TFLOPS / 1e9
    ms = gb / TB_PER_S + products_ms
    yield (
        f"all: {gb:.2f} GB, {gb / TB_PER_S:.1f} ms, and matrix products and attention, "
        f"{products_ms:.1f} ms"
    )
    yield (
        f"predicted: at least {ms:.1f} ms a step of {batch} crops, at most "
        f"{1e3 * batch / ms:,.0f} crops/s"
    )


if __name__ == "__main__":
    sys.exit(main())
