"""Copies between host and GPU beside what the GPU computes: on the stream that computes, a copy waits for all that is queued
there, and so does whoever waits for the copy."""

from collections.abc import Callable

import numpy as np
import torch


class Upload:
    """`wait` before the host memory is written again."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream, self.copied = device, torch.cuda.Stream(device), torch.cuda.Event()

    def __call__(self, host: torch.Tensor) -> torch.Tensor:
        pinned = host if host.is_pinned() else host.pin_memory()
        with torch.cuda.stream(self.stream):
            there = pinned.to(self.device, non_blocking=True)
            self.copied.record()
        using = torch.cuda.current_stream(self.device)
        using.wait_event(self.copied)
        there.record_stream(using)  # its memory is not given to the next copy while it is read
        return there

    def wait(self) -> None:
        self.copied.synchronize()


def download(x: torch.Tensor) -> Callable[[], np.ndarray]:
    """A function that waits for the numbers and returns them. A GPU sends them before it begins with what is queued later."""
    if not x.is_cuda:
        return x.cpu().numpy
    host, copied = x.to("cpu", non_blocking=True), torch.cuda.Event()  # to pinned memory
    copied.record(torch.cuda.current_stream(x.device))

    def numbers() -> np.ndarray:
        copied.synchronize()
        return host.numpy()

    return numbers
