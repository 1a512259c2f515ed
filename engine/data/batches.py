"""Runs a model on crops, in batches: for validation, evaluation, embeddings and predictions.

    batches = dataset_batches(dataset, np.array_split(rows, 10))
    for batch, y_RD in predict(batches, model.input.windows, model.logits, model.device):
        ...                              # y_RD: one row for each window, crop by crop; batch.crops: which crops

Reading, copying and computing overlap: a batch is launched before waiting for the outputs of the
previous one.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain, islice
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from omnilead.data_tools.dataset import CROP_BYTES, CROP_SHAPE, Dataset, DatasetError
from omnilead.data_tools.io.storage import prefetch

from .augmenter import Upload
from .order import Places
from .reader import CropReader, read_ahead
from .staging import Staging

CACHE_SHARDS = 8  # size of the temporary cache on the local disk, in shards of a remote dataset
# if the crops are less than this share of their shards' bytes, they are read one by one
SPARSE_SHARE = 0.5

log = logging.getLogger(__name__)


def start_download(x: torch.Tensor) -> Callable[[], np.ndarray]:
    """Starts copying x to the host. Returns a function that waits for the copy and returns it.
    Work that is queued on the GPU later does not delay the copy."""
    if not x.is_cuda:
        return x.cpu().numpy
    # torch copies to pinned memory here, so this does not wait for the copy
    host, copied = x.to("cpu", non_blocking=True), torch.cuda.Event()
    copied.record(torch.cuda.current_stream(x.device))

    def wait() -> np.ndarray:
        copied.synchronize()
        return host.numpy()

    return wait


class CropBatch(NamedTuple):
    uv_BLT: np.ndarray  # int16 [B, 12, 5000] in microvolts, valid until the next batch is requested
    halves_B: np.ndarray  # how many halves of 5 s each crop has: 1 or 2
    crops: Any = None  # the caller's own description of the crops, such as their rows


def predict(
    batches: Iterable[CropBatch],
    prepare: Callable[[Tensor, np.ndarray], Tensor],
    forward: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Iterator[tuple[CropBatch, np.ndarray]]:
    """Yields (batch without its signal, outputs) for each batch. Outputs are
    forward(prepare(uv_BLT, halves_B)) in float32. `prepare` returns the model's input, like
    engine.model.input.Input.windows."""
    upload = Upload(device) if device.type == "cuda" else None

    # not torch.inference_mode: ZeRO stage 3 may gather weights here that training uses afterwards
    @torch.no_grad()
    def launch(batch: CropBatch) -> tuple[CropBatch, Callable[[], np.ndarray]]:
        host = torch.from_numpy(batch.uv_BLT)
        uv_BLT = upload(host) if upload else host.to(device)
        outputs = start_download(forward(prepare(uv_BLT, batch.halves_B)).float())
        if upload:
            upload.wait()  # waits, because the next batch may overwrite the host's memory
        return batch._replace(uv_BLT=np.empty(0, np.int16)), outputs

    waiting: tuple[CropBatch, Callable[[], np.ndarray]] | None = None
    for batch in chain(batches, [None]):
        launched = launch(batch) if batch else None
        if waiting:
            yield waiting[0], waiting[1]()
        waiting = launched


def dataset_batches(
    dataset: Dataset,
    batches: Sequence[np.ndarray],
    on_corrupt: Literal["stop", "skip"] = "stop",
    threads: int = 2,
    pin: bool = False,
) -> Iterator[CropBatch]:
    """Yields batches of crops, given their rows; `crops` of each batch has the rows.
    `on_corrupt`: "skip" leaves out unreadable crops. Shards of a remote dataset pass through a
    temporary cache, unless few of their crops are needed: these are then read one by one."""
    if not batches:
        return
    halves, staging = dataset.column("halves"), None
    with ExitStack() as stack:
        if dataset.root.remote and "tar" in dataset.facts.formats:
            shards = dataset.addresses[0][np.concatenate(batches)]
            order = [
                (0, shard) for shard in shards[np.flatnonzero(np.diff(shards, prepend=-1))].tolist()
            ]
            size = {key: dataset.shards[key[1]].bytes for key in order}
            if len(shards) * CROP_BYTES < SPARSE_SHARE * sum(size.values()):
                yield from _batches_read_singly(dataset, batches, on_corrupt)
                return
            cache = stack.enter_context(
                TemporaryDirectory(prefix="omnilead-", ignore_cleanup_errors=True)
            )
            staging = stack.enter_context(
                closing(Staging({0: dataset}, cache, CACHE_SHARDS * max(size.values()), order))
            )
        gather = CropReader(
            [dataset], on_corrupt=on_corrupt, threads=threads, pin=pin, staging=staging
        )
        stack.callback(gather.close)
        requests = (Places(np.zeros(len(rows), np.int64), rows, rows) for rows in batches)
        shape = (max(map(len, batches)), *CROP_SHAPE)
        for request, uv_BLT, report in stack.enter_context(
            closing(read_ahead(requests, gather, shape))
        ):
            # leaves out crops that the reader put in place of bad ones, as nobody asked for them
            good = report.row == request.row
            rows = request.row[good]
            if len(rows):
                yield CropBatch(uv_BLT if good.all() else uv_BLT[good], halves[rows], rows)


def _batches_read_singly(
    dataset: Dataset, batches: Sequence[np.ndarray], on_corrupt: str
) -> Iterator[CropBatch]:
    def read(row: int) -> tuple[int, np.ndarray] | None:
        try:
            return row, dataset.read(row)
        except DatasetError as error:
            if on_corrupt == "stop":
                raise
            log.warning("skipped: %s", error)
            return None

    crops = prefetch(read, np.concatenate(batches).tolist())
    for batch in batches:
        if good := [crop for crop in islice(crops, len(batch)) if crop]:
            rows = np.array([row for row, _ in good])
            yield CropBatch(
                np.stack([uv_LT for _, uv_LT in good]), dataset.column("halves")[rows], rows
            )
