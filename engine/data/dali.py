"""The NVIDIA DALI pipeline. The same definition runs on a GPU and, for tests, on a CPU
(device_id=None).

    external source (int16 crops and the parameters of their augmentation) -> halves -> mV -> stages
    -> torch -> white noise (augmenter.add_white_noise)

The stages are those of torch, made of DALI's operations. All parameters come from the counter-based
generator on the host, so DALI has no random state. White noise is slices of the bank that torch has
on the device: DALI has no operator that gathers them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..settings.errors import ConfigError
from ..settings.leads import ALL_LEADS
from .augmentations.stage import TAU, Node, Params, Wave, augment, time_axes
from .augmenter import Augmenter
from .config import FS_HZ, HALF, MV_PER_UV, Views

PREFETCH = 2
# Number of batches that DALI may still be reading, because it does not copy what it is fed: the
# batches that it prefetches, the batch that it returns, and the batch before that one, whose copy
# to the GPU `release` has not waited for.
BATCHES_IN_USE = PREFETCH + 2
HOST_PARAMETER = "start"  # name of the parameter that stays on the host, where fn.slice needs it


def check_installed() -> None:
    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        raise ConfigError(
            "pipeline.backend=dali (the default on a GPU) needs the extra cu13 or cu12: pip "
            "install 'omnilead[cu13]', or set pipeline.backend=torch"
        ) from None


class DaliOps:
    """The operations of TorchOps for a DALI graph, except white noise. DALI computes with single
    crops, so there is no batch axis."""

    def __init__(self) -> None:
        from nvidia.dali import types

        constant: Any = types.Constant  # not typed
        self.sample, self.time_s, self.mains_s = map(constant, time_axes(HALF, FS_HZ))

    def lead(self, x: Node, lead: int) -> Node:
        return x[:, lead : lead + 1, :]

    def cat(self, leads: Sequence[Node]) -> Node:
        from nvidia.dali import fn

        return fn.cat(*leads, axis=1)

    def matmul(self, matrix: Node, x: Node) -> Node:
        """Returns the matrix product as a sum of columns times rows, because DALI has no matrix
        product."""
        total = matrix[:, :, 0:1] * x[:, 0:1, :]
        for lead in ALL_LEADS[1:]:
            total = total + matrix[:, :, lead : lead + 1] * x[:, lead : lead + 1, :]
        return total

    def multiply(self, x: Node, factor: Node) -> Node:
        return x * factor

    def add(self, x: Node, waves: Sequence[Wave]) -> Node:
        for gain, wave in waves:
            x = x + (wave if gain is None else gain * wave)
        return x

    def cosines(self, a: Node, hz: Node, phase: Node, time_s: Node, count: int) -> Node:
        from nvidia.dali import math

        total = 0.0
        for k in range(count):
            amplitude, f, phi = (values[:, :, k : k + 1] for values in (a, hz, phase))
            total = total + amplitude * math.cos(TAU * f * time_s + phi)
        return total


class InFlight:
    """Keeps batches alive while a GPU may still read them: DALI reuses freed memory without waiting
    for torch's kernels."""

    def __init__(self, event: Callable[[], Any]) -> None:
        self.event = event
        self.current: Any = None
        self.queued: deque[tuple[Any, Any]] = deque()

    def hold(self, batch: Any) -> None:
        self.current = batch

    def release(self) -> None:
        """Lets go of batches that the GPU has finished reading; keeps at most two batches. Call
        before the next batch, when all kernels that read the current batch are queued."""
        if self.current is not None:
            event = self.event()
            event.record()
            self.queued.append((event, self.current))
        while self.queued and (len(self.queued) > 2 or self.queued[0][0].query()):
            self.queued.popleft()[0].synchronize()


class Pipeline:
    """Runs DALI ahead of its consumer. `feed` yields (position, crops int16 [B, 12, 5000],
    parameters), and may overwrite the crops after BATCHES_IN_USE more items. `example`: the
    parameters of any batch, for their names."""

    def __init__(
        self,
        augmenter: Augmenter,
        feed: Iterator[tuple[int, np.ndarray, Params]],
        batch: int,
        example: Params,
        threads: int = 2,
    ) -> None:
        check_installed()
        self.feed, self.device = feed, augmenter.device
        self.stages = [stage for stage in augmenter.stages if not stage.bank_parameters]
        unused = {name for stage in augmenter.stages for name in stage.bank_parameters}
        self.names = sorted(example.keys() - unused)
        self.fed_arrays: deque[list[np.ndarray]] = deque(maxlen=BATCHES_IN_USE)
        self.in_flight = InFlight(torch.cuda.Event) if self.device.type == "cuda" else None
        self.pipeline = self._pipeline_function(augmenter.views, batch, threads)()
        self.pipeline.build()

    def _pipeline_function(self, views: Views, batch: int, threads: int) -> Callable[[], Any]:
        from nvidia.dali import fn, types
        from nvidia.dali import pipeline as dali_pipeline

        gpu = self.device.type == "cuda"
        device_id: Any = (self.device.index or 0) if gpu else None

        @dali_pipeline.pipeline_def(
            batch_size=batch,
            num_threads=threads,
            device_id=device_id,
            prefetch_queue_depth=PREFETCH,
        )
        def define_graph() -> Any:
            stamp, crops, *parameters = fn.external_source(
                source=self._feed_next, num_outputs=2 + len(self.names), batch=True, no_copy=True
            )
            p = dict(zip(self.names, parameters, strict=True))
            if gpu:
                crops = crops.gpu()
                p = {
                    name: node if name == HOST_PARAMETER else node.gpu() for name, node in p.items()
                }
            if views == "halves":
                x = fn.transpose(fn.reshape(crops, shape=[12, 2, HALF]), perm=[1, 0, 2])
            else:
                window = fn.slice(crops, start=p[HOST_PARAMETER], shape=[HALF], axes=[1])
                view = fn.reshape(window, shape=[1, 12, HALF])
                x = fn.cat(view, view, axis=0)
            x = fn.cast(x, dtype=types.DALIDataType.FLOAT) * np.float32(MV_PER_UV)
            return stamp, augment(x, p, self.stages, DaliOps())

        return define_graph

    def _feed_next(self) -> list[np.ndarray]:
        position, crops, p = next(self.feed)
        stamp = np.full((len(crops), 1), position, np.int64)
        self.fed_arrays.append([stamp, crops, *(_feed_array(name, p[name]) for name in self.names)])
        return self.fed_arrays[-1]

    def release(self) -> None:
        """Waits until the GPU has finished with all but the last two batches. Call before
        `next_batch`."""
        if self.in_flight:
            self.in_flight.release()

    def next_batch(self) -> tuple[int, torch.Tensor]:
        """Returns (position of the batch, x_BSLT). The tensor shares DALI's memory. On a GPU,
        torch's current stream waits for the tensor, but the host does not."""
        on_stream = [torch.cuda.current_stream(self.device)] if self.device.type == "cuda" else []
        stamp, x = self.pipeline.run(*on_stream)
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(x.as_tensor())
        if self.in_flight:
            self.in_flight.hold(tensor)
        return int(np.asarray(stamp.as_cpu().at(0))[0]), tensor

    def close(self) -> None:
        """Shuts DALI down at once, not at garbage collection: until then DALI may read the crops
        that it was fed."""
        self.pipeline._shutdown()


def _feed_array(name: str, values: np.ndarray) -> np.ndarray:
    if name == HOST_PARAMETER:
        return values.astype(np.int32)[:, None]
    return values.astype(np.float32) if values.dtype == np.bool_ else values
