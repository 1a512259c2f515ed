"""Faster replacements for plain operations of the model, chosen by `model.kernels`.

    pick("linear", F.linear, config.kernels, x)(x, weight, bias)

| model.kernels | on a CPU | on a GPU |
|---|---|---|
| plain | torch's operations | torch's operations |
| auto | kernels.cpu, measured to be faster | torch's; kernels.cuda for the positional convolution |

A replacement has the same arguments and result as the plain operation and is tested against it. On
a CPU, torch.compile gets the plain operations, which it fuses itself.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from omnilead.engine.common import ConfigError, environment
from omnilead.engine.model.kernels import cpu, cuda

Operation = Callable[..., Tensor]
REPLACEMENTS: dict[str, dict[str, Operation]] = {
    "cpu": cpu.OPERATIONS,
    "cuda": {"convolve": cuda.convolve},
}


def pick(name: str, plain: Operation, setting: str, x: Tensor) -> Operation:
    """The operation to use on x's device."""
    device = "cpu" if x.device.type == "cpu" else "cuda"
    if setting == "plain" or (device == "cpu" and torch.compiler.is_compiling()):
        return plain
    return REPLACEMENTS[device].get(name, plain)


def chosen_device(name: str) -> torch.device:
    """The device for --device: cpu, cuda, cuda:1, ...; auto: a GPU if there is one. Ranks use a
    machine's GPUs in turn."""
    try:
        device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        )
        if device.type == "cuda" and ":" not in name and (gpus := torch.cuda.device_count()):
            device = torch.device("cuda", environment()[2] % gpus)
        torch.zeros(0, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: {error}".splitlines()[0][:200]) from None
    disable_tf32()
    return device


def disable_tf32() -> None:
    """Turn off TensorFloat32 on a GPU, which torch uses by default in convolutions, but not in
    matrix products.

    It affects the whole process: programs call it at their start; importing the engine does not."""
    torch.backends.cudnn.allow_tf32 = False
