"""Copies to and from a GPU that overlap computing."""

from collections.abc import Callable

import numpy as np
import torch


class Upload:
    """Copies host memory to a GPU on a stream of its own, so that a copy does not wait for
    queued kernels. Call `wait` before writing to that host memory again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream, self.copied = torch.cuda.Stream(device), torch.cuda.Event()

    def __call__(self, host: torch.Tensor) -> torch.Tensor:
        pinned = host if host.is_pinned() else host.pin_memory()
        with torch.cuda.stream(self.stream):
            there = pinned.to(self.device, non_blocking=True)
            self.copied.record()
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(self.copied)
        there.record_stream(computing)  # so that its memory is not reused while kernels read it
        return there

    def wait(self) -> None:
        self.copied.synchronize()


def download(x: torch.Tensor) -> Callable[[], np.ndarray]:
    """Start copying to the host; the returned function waits for the copy. Work queued on the GPU
    later does not delay it."""
    if not x.is_cuda:
        return x.cpu().numpy
    host, copied = x.to("cpu", non_blocking=True), torch.cuda.Event()  # to pinned memory
    copied.record(torch.cuda.current_stream(x.device))

    def numbers() -> np.ndarray:
        copied.synchronize()
        return host.numpy()

    return numbers
