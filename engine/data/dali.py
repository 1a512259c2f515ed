"""The NVIDIA DALI pipeline. The same definition runs on a GPU and, for tests, on a CPU
(device_id=None).

    external source (int16 crops and the parameters of their augmentation) -> halves -> mV -> noise
    -> lead mask -> torch

Parameters come from the counter-based generator on the host. White noise is drawn on the device by
DALI's own generator. Its state is part of the checkpoint, so a restored pipeline continues bit for
bit. On a CPU, DALI draws noise ten times slower than torch.
"""

import base64
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from omnilead.engine.common import ConfigError
from omnilead.engine.data.augment import AugmentConfig, augment, axis, dali_ops
from omnilead.engine.data.augment_draws import Params
from omnilead.engine.data.augmenter import FS_HZ, HALF, MV_PER_UV, Views

PREFETCH = 2
# Batches that DALI may still be reading, as it does not copy what it is fed: those that it
# prefetches, the one it returns, and the one before, whose copy to the GPU `release` has not waited
# for.
IN_USE = PREFETCH + 2
ON_HOST = "start"  # fn.slice needs this one on the host


def version() -> str:
    try:
        from nvidia import dali
    except ImportError:
        raise ConfigError(
            "pipeline.backend=dali (the default on a GPU) needs the extra cu13 or cu12: pip "
            "install 'omnilead[cu13]', "
            "or set pipeline.backend=torch"
        ) from None
    return str(dali.__version__)


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
        """Call before the next batch, when all kernels that read the current one are queued. Keeps
        at most two batches."""
        if self.current is not None:
            event = self.event()
            event.record()
            self.queued.append((event, self.current))
        while self.queued and (len(self.queued) > 2 or self.queued[0][0].query()):
            self.queued.popleft()[0].synchronize()


class Pipeline:
    """`feed` is read ahead: (position, crops int16 [B, 12, 5000], parameters). It may reuse the
    crops IN_USE items later."""

    def __init__(
        self,
        config: AugmentConfig,
        views: Views,
        seed: int,
        feed: Iterator[tuple[int, np.ndarray, Params]],
        batch: int,
        example: Params,
        device: torch.device,
        threads: int = 2,
        blob: str | None = None,
    ) -> None:
        version()
        self.feed, self.names = feed, sorted(name for name in example if name != "white_start")
        self.device = device
        self.given: deque[list[np.ndarray]] = deque(maxlen=IN_USE)
        self.taken = InFlight(torch.cuda.Event) if device.type == "cuda" else None
        build = self._definition(config, views, batch, seed, threads)
        with (
            warnings.catch_warnings()
        ):  # DALI does not restore an external source; `feed` starts at the right position
            warnings.filterwarnings(
                "ignore", "Checkpointing enabled in a pipeline with external source"
            )
            try:
                state = (
                    {}
                    if blob is None
                    else {"checkpoint": base64.b64decode(blob, validate=True).decode("latin-1")}
                )
                self.pipeline = build(**state)
                self.pipeline.build()
            except (RuntimeError, ValueError) as error:
                if blob is None or "alloc" in str(error):  # out of memory
                    raise
                damaged = (
                    "the state of DALI's generator is damaged: restore the checkpoint's files, or "
                    "start a new run"
                )
                raise ConfigError(f"cannot resume: {damaged}") from None

    def _definition(
        self, config: AugmentConfig, views: Views, batch: int, seed: int, threads: int
    ) -> Any:
        from nvidia.dali import fn
        from nvidia.dali import pipeline as dali_pipeline
        from nvidia.dali import types as dali_types

        types: Any = dali_types  # not typed
        names, gpu = self.names, self.device.type == "cuda"
        options: dict[str, Any] = {"device_id": (self.device.index or 0) if gpu else None}

        @dali_pipeline.pipeline_def(
            batch_size=batch,
            num_threads=threads,
            **options,
            seed=seed % 2**31,
            prefetch_queue_depth=PREFETCH,
            enable_checkpointing=True,
        )
        def definition() -> Any:
            stamp, crops, *given = fn.external_source(
                source=self._next, num_outputs=2 + len(names), batch=True, no_copy=True
            )
            if gpu:
                crops = crops.gpu()
                given = [
                    values if name == ON_HOST else values.gpu()
                    for name, values in zip(names, given, strict=True)
                ]
            p = dict(zip(names, given, strict=True))
            if views == "halves":
                x = fn.transpose(fn.reshape(crops, shape=[12, 2, HALF]), perm=[1, 0, 2])
            else:
                window = fn.slice(crops, start=p[ON_HOST], shape=[HALF], axes=[1])
                one = fn.reshape(window, shape=[1, 12, HALF])
                x = fn.cat(one, one, axis=0)
            x = fn.cast(x, dtype=types.FLOAT) * np.float32(MV_PER_UV)
            if "emg_amplitude" in p:
                p["white"] = fn.random.normal(
                    shape=[2, len(config.noise_leads), HALF], device="gpu" if gpu else "cpu"
                )
            ops = dali_ops()
            return stamp, augment(x, p, config, axis(HALF, FS_HZ, ops), ops)

        return definition

    def _next(self) -> list[np.ndarray]:
        position, crops, p = next(self.feed)
        stamp = np.full((len(crops), 1), position, np.int64)
        self.given.append([stamp, crops, *(_fed(name, p[name]) for name in self.names)])
        return self.given[-1]

    def release(self) -> None:
        """Call before `run`: waits until the GPU has finished with all but the last batches."""
        if self.taken:
            self.taken.release()

    def run(self) -> tuple[int, torch.Tensor]:
        """-> (position of the batch, x_BSLT). The tensor shares DALI's memory. On a GPU the host
        does not wait for it: torch's current stream does."""
        on_stream = [torch.cuda.current_stream(self.device)] if self.device.type == "cuda" else []
        stamp, x = self.pipeline.run(*on_stream)
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(x.as_tensor())
        if self.taken:
            self.taken.hold(tensor)
        return int(np.asarray(stamp.as_cpu().at(0))[0]), tensor

    def close(self) -> None:
        """Shut down now, not at garbage collection: until then DALI may read the crops that it was
        fed."""
        self.pipeline._shutdown()

    def checkpoint(self) -> str:
        """The state of DALI's generator after the last batch that `run` returned."""
        state: Any = self.pipeline.checkpoint()
        return base64.b64encode(
            state.encode("latin-1") if isinstance(state, str) else state
        ).decode()


def _fed(name: str, values: np.ndarray) -> np.ndarray:
    if name == ON_HOST:
        return values.astype(np.int32)[:, None]
    return values.astype(np.float32) if values.dtype == np.bool_ else values
