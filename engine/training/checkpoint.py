"""Writes and loads atomic checkpoints: RUN/checkpoints/step-N/, and `latest`, which names the last
complete one.

    writer = Writer(root, ranks, config.train, prepare_folder, upload)   # RunFolder.writer
    writer.save(engine, state, loader_state)  # copies, and writes while training goes on
    writer.wait()                             # until it is written; WriteError if it cannot be
    writer.amend_progress(progress)           # changes state.json of the checkpoint of this step
    load_checkpoint(engine, path, universal=False)       # universal=True after to_universal(path)

Each rank copies its weights and optimiser state into memory of the host, which it keeps for the
next time, and a thread writes the copy, one checkpoint at a time. When its files are on the disk,
the thread writes their sizes and checksums to .rankR.json. The thread of rank 0 waits for these files
of all ranks; threads communicate in no other way, as training communicates at the same time. Then it
writes manifest.json (size and crc32c of every file), syncs it to disk, and only then replaces
`latest`: a kill at any moment leaves the last checkpoint valid. state.json beside the weights holds
the training progress, loader-rankR.json the loader's state.

To resume on another number of ranks, ZeRO's partitions are first converted to DeepSpeed's universal
format. DeepSpeed's files are pickles. They are read with weights_only, by DeepSpeed too, so no code
in them is ever run.
"""

import copy
import json
import math
import os
import pickle
import pkgutil
import re
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, Any

import google_crc32c
import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from omnilead.data_tools.io.storage import sync_folder, write_whole
from omnilead.data_tools.io.terminal import UserError, is_out_of_memory, write_error_advice

from .checkpoint_files import (
    BEST,
    CHUNK_BYTES,
    HOW_TO_RESTORE,
    LATEST,
    LATEST_UNIVERSAL,
    MANIFEST,
    STATE,
    CheckpointError,
    WriteError,
    checkpoint_named,
    complete_checkpoints,
    read_state,
    step_of,
    warn,
)
from .config import TrainConfig
from .distributed import Ranks, import_deepspeed, lost_a_rank, on_first_rank

UNIVERSAL = "universal"
# seconds that other ranks have to finish their parts when a run ends with an error
LOST_RANKS_WAIT_S = 30
# Besides tensors and plain containers, DeepSpeed's checkpoints hold only objects of these classes,
# which do nothing but hold values
LOADABLE_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
# Environment variables of torch.load, which raises an error if both are set
FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
FORBID_WEIGHTS_ONLY = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class Writer:
    """Writes checkpoints in a thread, one at a time. All ranks call its methods at the same
    steps."""

    def __init__(
        self,
        root: Path,
        ranks: Ranks,
        settings: TrainConfig,
        prepare_folder: Callable[[Path], None],
        upload: Callable[[], None],
    ) -> None:
        """`prepare_folder`: called on rank 0 before a checkpoint is written. `upload`: called in
        the thread of each rank when it has written its part."""
        self.prepare_folder, self.upload = prepare_folder, upload
        self.root, self.ranks, self.settings = root, ranks, settings
        self.ends_s = math.inf  # writing is given up at this time (time.monotonic)
        self.pending: Future[None] | None = None
        self.copies: dict[Any, Any] = {}

    def save(self, engine: Any, state: dict[str, Any], loader_state: dict[str, Any]) -> None:
        self.wait()
        path = self.root / f"step-{state['step']}"
        parts: list[tuple[Path, Any]] = []
        with _write_errors(path):
            on_first_rank(self.ranks, lambda: self.prepare_folder(path))
            # DeepSpeed decides what belongs in which file. Here it collects the contents instead of
            # writing files, which the thread does later
            engine.checkpoint_engine.save = lambda state_dict, path: parts.append(
                (Path(path), self._copy(state_dict, Path(path).name))
            )
            engine.save_checkpoint(str(self.root), tag=path.name, save_latest=False)
        facts = json.dumps(state, indent=1), json.dumps(loader_state)
        thread = ThreadPoolExecutor(1)
        self.pending = thread.submit(self._write, path, parts, *facts)
        thread.shutdown(False)  # the thread ends when the checkpoint is written

    def amend_progress(self, progress: dict[str, Any]) -> None:
        """Changes the stored progress of the checkpoint of step progress["step"]."""
        self.wait()
        on_first_rank(self.ranks, lambda: amend_progress(self.root, progress))

    def wait(self) -> None:
        if pending := self.pending:
            pending.exception()
            # cleared only after waiting: if Ctrl-C interrupts that, `close` waits again
            self.pending = None
            pending.result()

    def raise_if_failed(self) -> None:
        """Raises the error of the last checkpoint if writing it has failed. Does not wait for
        it."""
        if self.pending and self.pending.done():
            self.wait()

    def close(self, error: BaseException | None) -> None:
        """Finishes the checkpoint that is being written, also after an error. Gives it up after a
        second Ctrl-C, and when other ranks do not finish their parts in LOST_RANKS_WAIT_S
        seconds."""
        if isinstance(error, KeyboardInterrupt):
            self.ends_s = 0
        elif self.ranks.world > 1:
            self.ends_s = time.monotonic() + LOST_RANKS_WAIT_S
        try:
            self.wait()
        except UserError as second:
            if self.ends_s:
                warn(str(second))

    def _copy(self, state: Any, name: str) -> Any:
        """Returns a copy of `state` in the host's memory. Every checkpoint uses the same memory,
        because freshly allocated pages are slower."""
        copied: dict[int, Any] = {}
        for i, leaf in enumerate(tree_leaves(state)):
            if isinstance(leaf, torch.Tensor):
                key = name, i, leaf.shape, leaf.dtype
                if key not in self.copies:
                    self.copies[key] = torch.empty_like(leaf, device="cpu", pin_memory=leaf.is_cuda)
                copied[id(leaf)] = self.copies[key].copy_(leaf.detach())
        return copy.deepcopy(state, copied)

    def _write(self, path: Path, parts: list[tuple[Path, Any]], state: str, loader: str) -> None:
        with _write_errors(path):
            name = f"loader-rank{self.ranks.rank}.json"
            write_whole(path / name, loader)
            rank_manifest = {name: _size_and_checksum(loader)}
            for file, content in parts:
                with open(file, "wb") as opened:
                    part: Any = _PartFile(opened, self)
                    torch.save(content, part)  # and flushes it
                    if part.error:
                        raise part.error
                    os.fsync(opened.fileno())
                rank_manifest[file.name] = {"bytes": part.bytes, "crc32c": part.crc32c}
            write_whole(path / f".rank{self.ranks.rank}.json", json.dumps(rank_manifest))
            if self.ranks.is_first:
                _publish(path, state, self._wait_for_rank_manifests(path), self.settings.keep)
        self.upload()

    def _wait_for_rank_manifests(self, path: Path) -> dict[str, Any]:
        manifest: dict[str, Any] = {}
        until_s = time.monotonic() + self.settings.timeout_s
        for rank in range(self.ranks.world):
            file = path / f".rank{rank}.json"
            while not file.is_file():
                if time.monotonic() > min(until_s, self.ends_s):
                    raise CheckpointError(
                        f"{path}: rank {rank} did not write its part: if that rank still runs, put RUN "
                        "on a disk that all ranks share"
                    )
                time.sleep(0.02)
            manifest |= json.loads(file.read_text())
        return manifest


class _PartFile:
    """A file for torch.save that counts its bytes and computes their checksum while they are
    written. It stores an error instead of raising it, because not every version of PyTorch's writer
    survives one."""

    def __init__(self, file: IO[Any], writer: Writer) -> None:
        self.file, self.writer = file, writer
        self.bytes, self.crc32c, self.flush = 0, 0, file.flush
        self.error: OSError | None = None

    def write(self, data: Any) -> None:
        content = np.frombuffer(data, np.uint8)
        for start in range(0, len(content), CHUNK_BYTES):
            chunk = content[start : start + CHUNK_BYTES]
            self.crc32c = google_crc32c.extend(self.crc32c, chunk)
            try:
                if time.monotonic() > self.writer.ends_s:
                    raise InterruptedError("writing was stopped before its end")
                if not self.error:
                    self.file.write(chunk)
            except OSError as error:
                self.error = error
        self.bytes += len(content)


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        if lost_a_rank(error):
            raise
        last_good = checkpoint_named(path.parent, LATEST)
        last = (
            f"the last good checkpoint is {last_good.name}"
            if last_good
            else "there is no checkpoint yet"
        )
        mend = "free disk space"
        if isinstance(error, OSError):
            mend = write_error_advice(error, mend, "make it writable")
        raise WriteError(
            f"{path}: {str(error).splitlines()[0]}: {mend} and start again; {last}"
        ) from error


def _size_and_checksum(text: str) -> dict[str, int]:
    content = text.encode()
    return {"bytes": len(content), "crc32c": google_crc32c.value(content)}


def amend_progress(root: Path, progress: dict[str, Any]) -> None:
    path = root / f"step-{progress['step']}"
    state = read_state(path) | progress
    text = json.dumps(state, indent=1)
    manifest = json.loads((path / MANIFEST).read_text())
    # The new manifest also accepts the old state.json, because a kill may come between the writes of
    # these two files
    manifest[STATE] = _size_and_checksum(text) | {"before": manifest[STATE]}
    _point_to_best(root, path, state)
    write_whole(path / MANIFEST, json.dumps(manifest, indent=1))
    write_whole(path / STATE, text)


def _point_to_best(root: Path, path: Path, state: dict[str, Any]) -> None:
    if state.get("best", {}).get("step") == state["step"]:
        write_whole(root / BEST, path.name)


def _publish(path: Path, state: str, manifest: dict[str, Any], keep: int) -> None:
    root = path.parent
    write_whole(path / STATE, state)
    manifest[STATE] = _size_and_checksum(state)
    write_whole(path / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
    sync_folder(path)
    # `best` is written before `latest`. In the other order, a run that is killed in between would
    # resume after this step, and never write `best` for it
    _point_to_best(root, path, json.loads(state))
    write_whole(root / LATEST, path.name)
    for file in path.glob(".rank*.json"):
        file.unlink()
    _prune(root, path, keep)


def _prune(root: Path, newest: Path, keep: int) -> None:
    """Removes old checkpoints. Keeps the newest `keep` of those up to `newest`, the best one, and
    those of later steps, which this run has not reached yet."""
    for path in [path for path in complete_checkpoints(root) if step_of(path) <= step_of(newest)][
        keep:
    ]:
        if path != checkpoint_named(root, BEST):
            (path / MANIFEST).unlink()  # a folder without a manifest does not count as a checkpoint
            shutil.rmtree(path)


def to_universal(path: Path) -> None:
    """Converts a checkpoint to DeepSpeed's universal format, in step-N/universal, atomically."""
    import_deepspeed()
    from deepspeed.checkpoint import ds_to_universal  # type: ignore[import-untyped]

    universal, temporary = path / UNIVERSAL, path / f".{UNIVERSAL}"
    # An earlier resume may have left these folders, which the manifest does not cover
    for leftover in (universal, temporary):
        shutil.rmtree(leftover, ignore_errors=True)
    arguments = Namespace(
        input_folder=str(path),
        output_folder=str(temporary),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with reading_safely(path):
        try:
            with silenced_output():
                ds_to_universal.main(arguments)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            reason = str(error).splitlines()[0]
            raise WriteError(
                f"{path}: cannot be converted for another number of ranks: {reason}: free disk "
                "space"
            ) from error
    (path / LATEST_UNIVERSAL).unlink(missing_ok=True)
    os.replace(temporary, universal)


def load_checkpoint(engine: Any, path: Path, universal: bool) -> None:
    """Loads a checkpoint into the engine. Called by all ranks."""
    source = path / UNIVERSAL if universal else path
    try:
        with reading_safely(source):
            loaded, _ = engine.load_checkpoint(str(source.parent), tag=source.name)
    finally:
        # otherwise DeepSpeed would write the next checkpoint in the universal format
        engine._config.load_universal_checkpoint = False
    if loaded is None:
        raise CheckpointError(f"{source}: DeepSpeed cannot read it: ", *HOW_TO_RESTORE)


@contextmanager
def reading_safely(path: Path) -> Iterator[None]:
    """A context for reading the checkpoint `path`. Runs no code of the checkpoint, and turns an
    error while reading into a CheckpointError of one line."""
    try:
        with weights_only():
            yield
    except Exception as error:
        if isinstance(error, WriteError) or is_out_of_memory(error) or lost_a_rank(error):
            raise
        reason = " ".join(f"cannot be read: {type(error).__name__}: {error}".split())[:200]
        if isinstance(error, pickle.UnpicklingError):
            name = re.search(r"GLOBAL (\S+)", str(error))
            reason = (
                f"would run code when it is read ({name[1]})" if name else "holds more than weights"
            )
        raise CheckpointError(f"{path}: {reason}: ", *HOW_TO_RESTORE) from error


@contextmanager
def weights_only() -> Iterator[None]:
    """Makes every torch.load in this process read only tensors, plain containers and
    LOADABLE_CLASSES, and refuse everything else. DeepSpeed passes weights_only=False, but an
    environment variable of PyTorch overrides that."""
    import_deepspeed()
    before = {
        name: os.environ.pop(name, None) for name in (FORCE_WEIGHTS_ONLY, FORBID_WEIGHTS_ONLY)
    }
    os.environ[FORCE_WEIGHTS_ONLY] = "1"
    try:
        with torch.serialization.safe_globals(
            [pkgutil.resolve_name(name) for name in LOADABLE_CLASSES]
        ):
            yield
    finally:
        del os.environ[FORCE_WEIGHTS_ONLY]
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def silenced_output() -> Iterator[None]:
    """A context in which standard output and standard error print nothing."""
    with (
        open(os.devnull, "w", errors="replace") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield
