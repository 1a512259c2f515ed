"""Checkpoints that are whole or not there: RUN/checkpoints/step-N/, and `latest`, which names the last good one.

    save(engine, run, state, loader_state, ranks, keep=3)
    found = newest(run)                       # the one that `latest` names, or the one before it if that is damaged
    load(engine, found, ranks)

All ranks write. Then rank 0 looks at every file, writes manifest.json (sizes and crc32c), waits for the disk, and only then
replaces `latest` in one step: a kill at any moment leaves the old one in force. DeepSpeed alone writes `latest` before the last
rank is done. state.json beside the weights says in words where the run stands; loader-rankR.json is the loader's own state.

Another number of ranks: ZeRO's parts are cut anew by DeepSpeed's universal format, by itself, when the run is started again.
DeepSpeed's files are pickles: load only checkpoints that are your own.
"""

import fcntl
import json
import os
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import google_crc32c
import torch
import torch.distributed as dist

from engine.scoring.rundir import sync, write_whole
from engine.training.distributed import Ranks, lost_a_rank

LATEST, BEST, MANIFEST, STATE, UNIVERSAL = "latest", "best", "manifest.json", "state.json", "universal"
CHUNK_BYTES = 16 * 2**20


class CheckpointError(Exception):
    """One line: the file and what is wrong with it."""


class WriteError(Exception):
    """No room for another checkpoint, or a broken disk; those that are there are good."""


def folder(run: Path) -> Path:
    return run / "checkpoints"


@contextmanager
def claimed(run: Path, ranks: Ranks) -> Iterator[None]:
    """Two on one run would take away each other's checkpoints."""
    with ExitStack() as held:
        _together(ranks, lambda: _lock(run, held))
        yield


def _lock(run: Path, held: ExitStack) -> None:
    try:
        file = held.enter_context(open(run / ".lock", "w"))  # noqa: SIM115
    except OSError as error:
        raise CheckpointError(f"{run}: {error.strerror}: choose another with --set run=RUN") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(f"{run}: another process trains here: wait for it, or use run=NEW") from None
    except OSError:  # this file system knows no locks
        pass


def save(engine: Any, run: Path, state: dict[str, Any], loader_state: dict[str, Any], ranks: Ranks, keep: int) -> Path:
    """By all ranks, at the same step."""
    root, tag = folder(run), f"step-{state['step']}"
    path = root / tag
    _together(ranks, lambda: _make_room(root, path, engine))
    try:
        engine.save_checkpoint(str(root), tag=tag, save_latest=False)
        write_whole(path / f"loader-rank{ranks.rank}.json", json.dumps(loader_state))
    except (OSError, RuntimeError) as error:
        if lost_a_rank(error):
            raise
        raise WriteError(f"{path}: {str(error).splitlines()[0]}: {_good(root)}") from error
    if ranks.world > 1:
        dist.barrier()
    _together(ranks, lambda: _publish(root, path, state, keep))
    return path


def _together(ranks: Ranks, work: Any) -> None:
    """On rank 0, and if it fails, on all."""
    error: list[Exception | None] = [None]
    if ranks.first:
        try:
            work()
        except (OSError, WriteError, CheckpointError) as failed:
            error[0] = failed
    if ranks.world > 1:
        dist.broadcast_object_list(error, src=0, group=ranks.control)
    if error[0] is not None:
        raise WriteError(str(error[0])) if isinstance(error[0], OSError) else error[0]


def _make_room(root: Path, path: Path, engine: Any) -> None:
    root.mkdir(parents=True, exist_ok=True)
    clean(root)
    shutil.rmtree(path, ignore_errors=True)
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    needed, free = 16 * parameters + 2**20, shutil.disk_usage(root).free  # two copies of the weights, two moments
    if free < needed:
        raise WriteError(
            f"{path}: needs {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free: make room, run again; {_good(root)}"
        )


def _good(root: Path) -> str:
    latest = root / LATEST
    return f"the last good checkpoint is {latest.read_text().strip()}" if latest.is_file() else "there is no checkpoint yet"


def _publish(root: Path, path: Path, state: dict[str, Any], keep: int) -> None:
    write_whole(path / STATE, json.dumps(state, indent=1))
    expected = state["world"] if state["zero_stage"] else 0
    parts = list(path.glob("*optim_states.pt"))
    if len(parts) != expected:
        raise CheckpointError(
            f"{path}: {len(parts)} of {expected} ranks have written their part: is RUN on a disk that all ranks share?"
        )
    manifest = {}
    for file in sorted(path.iterdir()):
        if file.suffix == ".pt" and not zipfile.is_zipfile(file):
            raise CheckpointError(f"{file}: is cut off")
        manifest[file.name] = {"bytes": file.stat().st_size, "crc32c": crc32c(file, sync=True)}
    write_whole(path / MANIFEST, json.dumps(manifest, indent=1))
    sync(path)
    write_whole(root / LATEST, path.name)
    if state.get("best", {}).get("step") == state["step"]:
        write_whole(root / BEST, path.name)
    prune(root, path, keep)


def crc32c(path: Path, sync: bool = False) -> int:
    value = 0
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        while chunk := file.read(CHUNK_BYTES):
            value = google_crc32c.extend(value, chunk)
    return int(value)


def step_of(path: Path) -> int:
    number = path.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1


def prune(root: Path, newest: Path, keep: int) -> None:
    """The last `keep` up to the newest stay, and the best. Later steps are those that were found damaged and passed over."""
    best = (root / BEST).read_text().strip() if (root / BEST).is_file() else ""
    whole = sorted((p for p in root.glob("step-*") if (p / MANIFEST).is_file()), key=step_of)
    later = [path for path in whole if step_of(path) > step_of(newest)]
    for path in whole[: len(whole) - len(later)][:-keep] + later:
        if path.name != best:
            (path / MANIFEST).unlink()  # from here on it is no checkpoint
            shutil.rmtree(path)


def clean(root: Path) -> None:
    """What a kill has left half written."""
    for path in root.glob("step-*"):
        if not (path / MANIFEST).is_file():
            shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".*"):
        path.unlink(missing_ok=True)


def fault(path: Path) -> str | None:
    """Why it is no good checkpoint; None: it is."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, facts in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{file}: missing"
            if file.stat().st_size != facts["bytes"] or crc32c(file) != facts["crc32c"]:
                return f"{file}: is not what was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path / MANIFEST}: {error}"
    return None


def newest(run: Path, warn: Any = None) -> Path | None:
    """The newest whole one. A damaged one is passed over, and said."""
    root = folder(run)
    if not (root / LATEST).is_file():
        return None
    named = root / (root / LATEST).read_text().strip()
    others = sorted((p for p in root.glob("step-*") if (p / MANIFEST).is_file() and p != named), key=step_of, reverse=True)
    for path in (named, *others):
        reason = fault(path)
        if reason is None:
            return path
        if warn:
            warn(f"{reason}: passed over")
    raise CheckpointError(f"{root}: no checkpoint is whole: begin a new run with --set run=NEW, or restore the files")


def best(run: Path) -> Path | None:
    """The best by validation; without one, the newest."""
    root = folder(run)
    named = root / (root / BEST).read_text().strip() if (root / BEST).is_file() else None
    return named if named and fault(named) is None else newest(run)


def read_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / STATE).read_text())
    return state


def read_loader_state(path: Path, ranks: Ranks, world_then: int) -> dict[str, Any]:
    """This rank's; of another number of ranks, rank 0's, without what belongs to a rank."""
    rank = ranks.rank if world_then == ranks.world else 0
    state: dict[str, Any] = json.loads((path / f"loader-rank{rank}.json").read_text())
    if world_then != ranks.world:
        state["dali"] = None  # its white noise begins another stream
        state["recipe"] |= {
            name: now for name, now in (("rank", ranks.rank), ("world", ranks.world)) if name in state["recipe"]
        }
    return state


def recut(path: Path, state: dict[str, Any], ranks: Ranks) -> bool:
    """Whether the universal form is needed; it is made once."""
    if not state["zero_stage"] or state["world"] == ranks.world:
        return False
    _together(ranks, lambda: to_universal(path))
    return True


def to_universal(path: Path) -> Path:
    """step-N/universal, whole or not there."""
    from deepspeed.checkpoint import ds_to_universal  # type: ignore[import-untyped]

    done, temporary = path / UNIVERSAL, path / f".{UNIVERSAL}"
    if done.is_dir():
        return done
    shutil.rmtree(temporary, ignore_errors=True)
    wish = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    arguments = Namespace(input_folder=str(path), output_folder=str(temporary), inject_missing_state=True, **wish)
    try:
        with _silence():
            ds_to_universal.main(arguments)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise WriteError(
            f"{path}: cannot be cut for another number of ranks: {str(error).splitlines()[0]}: make room"
        ) from error
    (path / "latest_universal").unlink(missing_ok=True)
    os.replace(temporary, done)
    return done


def load(engine: Any, path: Path, universal: bool) -> None:
    """By all ranks."""
    where = path / UNIVERSAL if universal else path
    try:
        loaded, _ = engine.load_checkpoint(str(where.parent), tag=where.name)
    finally:
        engine._config.load_universal_checkpoint = False  # or the next checkpoint would be written in a form of its own
    if loaded is None:
        raise CheckpointError(f"{where}: DeepSpeed cannot read it: begin a new run with --set run=NEW")


def full_weights(path: Path) -> dict[str, torch.Tensor]:
    """All weights in float32, under the model's own names. Frozen ones have the precision that they were trained beside."""
    stage = read_state(path)["zero_stage"]
    whole: dict[str, torch.Tensor] = {}
    if stage < 2:  # stages 2 and 3 give the frozen ones to the optimizer's files
        whole = torch.load(path / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)["module"]
    if stage > 0:
        from deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-untyped]
            get_fp32_state_dict_from_zero_checkpoint,
        )

        with _silence():
            whole = {**whole, **get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)}
    return {name: weights.float().contiguous().clone() for name, weights in whole.items()}


@contextmanager
def _silence() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
