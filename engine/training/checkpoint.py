"""Checkpoints that are whole or not there: RUN/checkpoints/step-N/, and `latest`, which names the last good one.

    save(engine, run, state, loader_state, ranks, keep=3)
    found = newest(run)                       # the one that `latest` names, or if that is damaged or gone, the newest whole one
    load(engine, found, ranks)

All ranks write. Then rank 0 looks at every file, writes manifest.json (sizes and crc32c), waits for the disk, and only then
replaces `latest` in one step: a kill at any moment leaves the old one in force. DeepSpeed alone writes `latest` before the last
rank is done. state.json beside the weights says in words where the run stands; loader-rankR.json is the loader's own state.

Another number of ranks: ZeRO's parts are cut anew by DeepSpeed's universal format, by itself, when the run is started again.
DeepSpeed's files are pickles: they are read with weights_only, by DeepSpeed too, so that no code in them is ever run.
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
from typing import Annotated, Any, Literal

import google_crc32c
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.common import sync, write_whole
from engine.training.distributed import Ranks, lost_a_rank
from engine.training.weights_only import reason, refused, weights_only

LATEST, BEST, MANIFEST, STATE, UNIVERSAL, LOCK = "latest", "best", "manifest.json", "state.json", "universal", ".lock"
RESTORE = "restore the file, or begin a new run with --set run=NEW"
CHUNK_BYTES = 16 * 2**20
Count = Annotated[int, Field(ge=0, lt=2**63)]


class CheckpointError(Exception):
    """One line: the file and what is wrong with it."""


class WriteError(Exception):
    """No room for another checkpoint, or a broken disk; those that are there are good."""


def folder(run: Path) -> Path:
    return run / "checkpoints"


def place(run: Path) -> tuple[int, int] | None:
    """Which folder RUN is, by the lock that this process holds open in it."""
    try:
        found = os.stat(run / LOCK)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def claimed(run: Path, ranks: Ranks) -> Iterator[None]:
    """Two on one run would take away each other's checkpoints."""
    with ExitStack() as held:
        _together(ranks, lambda: _lock(run, held))
        yield


def still_there(run: Path, then: tuple[int, int] | None, ranks: Ranks) -> None:
    """Asked before anything is written: files that are open in a deleted folder take whatever is written, and keep nothing."""

    def check() -> None:
        if place(run) != then:
            raise WriteError(f"{run}: was moved or deleted during training, which ends here: move it back and start again")

    _together(ranks, check)


def _lock(run: Path, held: ExitStack) -> None:
    try:
        file = held.enter_context(open(run / LOCK, "w"))  # noqa: SIM115
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
    root.mkdir(exist_ok=True)  # RUN itself is there, or is gone
    clean(root)
    shutil.rmtree(path, ignore_errors=True)
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    needed, free = 16 * parameters + 2**20, shutil.disk_usage(root).free  # two copies of the weights, two moments
    if free < needed:
        raise WriteError(
            f"{path}: needs {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free: make room, run again; {_good(root)}"
        )


def _good(root: Path) -> str:
    latest = named(root, LATEST)
    return f"the last good checkpoint is {latest.name}" if latest else "there is no checkpoint yet"


def named(root: Path, pointer: str) -> Path | None:
    """What `latest` or `best` names, if it is a checkpoint's name."""
    try:
        path = root / (root / pointer).read_text().strip()
    except (OSError, ValueError):
        return None
    return path if path.parent == root and step_of(path) >= 0 else None


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
    return int(number) if number.isascii() and number.isdigit() and len(number) < 19 else -1


def prune(root: Path, newest: Path, keep: int) -> None:
    """The last `keep` up to the newest stay, the best, and whatever is later: this run has not done it."""
    whole = [path for path in wholes(root) if step_of(path) <= step_of(newest)]
    for path in whole[keep:]:
        if path != named(root, BEST):
            (path / MANIFEST).unlink()  # from here on it is no checkpoint
            shutil.rmtree(path)


def wholes(root: Path) -> list[Path]:
    """Finished checkpoints, the newest first."""
    found = (path for path in root.glob("step-*") if step_of(path) >= 0 and (path / MANIFEST).is_file())
    return sorted(found, key=step_of, reverse=True)


def clean(root: Path) -> None:
    """What a kill has left half written."""
    for path in root.glob("step-*"):
        if step_of(path) >= 0 and not (path / MANIFEST).is_file():
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
        for file in sorted(path.glob("*.pt")):  # whatever the manifest says: DeepSpeed reads what is there
            if why := refused(file):
                return f"{file}: {why}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{path / MANIFEST}: {' '.join(str(error).split())[:200]}"
    return None


def newest(run: Path, warn: Any = None) -> Path | None:
    """The one that `latest` names, else the newest whole one; what was passed over is said."""
    root = folder(run)
    latest, found = named(root, LATEST), wholes(root)
    if latest is None and not found and not (root / LATEST).exists():
        return None
    passed_over = [] if latest else [f"{root / LATEST}: names no checkpoint"]
    for path in dict.fromkeys([*([latest] if latest else []), *found]):
        why = fault(path)
        if why is None:
            if warn and passed_over:
                warn(f"{'; '.join(passed_over)}: going on from {path.name}, the newest whole checkpoint")
            return path
        passed_over.append(why)
    told = "; ".join(passed_over)
    raise CheckpointError(f"{told}: no checkpoint is whole: begin a new run with --set run=NEW, or restore the files")


def best(run: Path) -> Path | None:
    """The best by validation; without one, the newest."""
    path = named(folder(run), BEST)
    return path if path and fault(path) is None else newest(run)


class _State(BaseModel):
    """What every state.json holds; the task adds its own."""

    model_config = ConfigDict(strict=True)
    step: Count
    crops_seen: Count
    skipped_steps: Count
    in_a_row: Count
    best: dict[str, float] = {}
    world: Annotated[int, Field(ge=1, lt=2**31)]
    zero_stage: Literal[0, 1, 2, 3]
    preprocessing_sha256: str
    datasets: list[str]
    splits: list[dict[str, Any]] = []
    config: dict[str, Any]


def read_state(path: Path) -> dict[str, Any]:
    state, file = _json(path / STATE), path / STATE
    try:
        _State.model_validate(state)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        key = ".".join(map(str, wrong["loc"]))
        raise CheckpointError(f"{file}: {key}={str(wrong['input'])[:80]}: {wrong['msg']}: {RESTORE}") from None
    return {"best": {}} | state


def read_loader_state(path: Path, ranks: Ranks, world_then: int) -> dict[str, Any]:
    """This rank's; of another number of ranks, rank 0's, without what belongs to a rank."""
    same = world_then == ranks.world
    file = path / f"loader-rank{ranks.rank if same else 0}.json"
    state = _json(file)
    if not isinstance(recipe := state.get("recipe"), dict):
        raise CheckpointError(f"{file}: has no recipe, so the order of the crops is not known: {RESTORE}")
    if not same:
        state["dali"] = None  # its white noise begins another stream
        state["recipe"] = recipe | {name: now for name, now in (("rank", ranks.rank), ("world", ranks.world)) if name in recipe}
    elif recipe.get("backend") == "dali" and state.get("dali") is None:
        raise CheckpointError(f"{file}: has no state of DALI's generator: {RESTORE}")
    return state


def _json(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as content:
            value = json.loads(content.read(CHUNK_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: {' '.join(str(error).split())[:200]}: {RESTORE}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: is no JSON object: {RESTORE}")
    return value


def recut(path: Path, state: dict[str, Any], ranks: Ranks) -> bool:
    """Whether the universal form is needed; it is made then."""
    if not state["zero_stage"] or state["world"] == ranks.world:
        return False
    _together(ranks, lambda: to_universal(path))
    return True


def to_universal(path: Path) -> Path:
    """step-N/universal, whole or not there."""
    from deepspeed.checkpoint import ds_to_universal  # type: ignore[import-untyped]

    done, temporary = path / UNIVERSAL, path / f".{UNIVERSAL}"
    for left in (done, temporary):  # of an earlier start; no manifest vouches for it
        shutil.rmtree(left, ignore_errors=True)
    wish = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    arguments = Namespace(input_folder=str(path), output_folder=str(temporary), inject_missing_state=True, **wish)
    with _reading(path):
        try:
            with _silence():
                ds_to_universal.main(arguments)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            told = f"{path}: cannot be cut for another number of ranks: {str(error).splitlines()[0]}: make room"
            raise WriteError(told) from error
    (path / "latest_universal").unlink(missing_ok=True)
    os.replace(temporary, done)
    return done


def load(engine: Any, path: Path, universal: bool) -> None:
    """By all ranks."""
    where = path / UNIVERSAL if universal else path
    try:
        with _reading(where):
            loaded, _ = engine.load_checkpoint(str(where.parent), tag=where.name)
    finally:
        engine._config.load_universal_checkpoint = False  # or the next checkpoint would be written in a form of its own
    if loaded is None:
        raise CheckpointError(f"{where}: DeepSpeed cannot read it: begin a new run with --set run=NEW")


def full_weights(path: Path) -> dict[str, torch.Tensor]:
    """All weights in float32, under the model's own names. Frozen ones have the precision that they were trained beside."""
    stage = read_state(path)["zero_stage"]
    whole: dict[str, torch.Tensor] = {}
    with _reading(path), _silence():
        if stage < 2:  # stages 2 and 3 give the frozen ones to the optimizer's files
            whole = torch.load(path / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=True)["module"]
        if stage > 0:
            from deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-untyped]
                get_fp32_state_dict_from_zero_checkpoint,
            )

            whole = {**whole, **get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)}
        return {name: weights.float().contiguous().clone() for name, weights in whole.items()}


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """No code of a checkpoint is run, and what DeepSpeed cannot make sense of is one line."""
    try:
        with weights_only():
            yield
    except Exception as error:
        if isinstance(error, OSError | MemoryError | WriteError) or lost_a_rank(error) or "memory" in str(error):
            raise
        raise CheckpointError(f"{path}: {reason(error)}: begin a new run with --set run=NEW, or restore it") from error


@contextmanager
def _silence() -> Iterator[None]:
    with open(os.devnull, "w", errors="replace") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
