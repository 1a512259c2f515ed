"""DIR: what of a plan is done, failed, being done; which settings it was begun with.

DIR/pretrain/MODEL/  finetune/MODEL/CELL/     runs, as engine/pretrain.py and engine/finetune.py leave them
    scores/MODEL/CELL.json                    what engine.evaluate measured
    jobs/JOB.out .err .json .failed .claim-N  what a job said, what it took, how it failed, who has it
    settings/*.json                           the data and the settings: another --data or --scale is refused
    table-N.md .csv .json
"""

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from engine.common import ConfigError, write_whole
from engine.reproduction import claims
from engine.reproduction.paper import Scale
from engine.reproduction.plan import Data, Job, Plan, part


@dataclass(frozen=True)
class Place:
    out: Path

    @property
    def jobs(self) -> Path:
        return self.out / "jobs"

    def of(self, job: Job, suffix: str) -> Path:
        return self.jobs / f"{stem(job)}.{suffix}"

    def done(self, job: Job) -> bool:
        return self.score(job) is not None if job.kind == "evaluate" else (self.out / job.result).exists()

    def held(self, job: Job) -> bool:
        return claims.held(self.jobs, stem(job))

    def failed_since(self, job: Job, since: float) -> bool:
        try:
            return self.of(job, "failed").stat().st_mtime >= since
        except FileNotFoundError:
            return False

    def why(self, job: Job) -> str:
        """The reason of a failure, if there was one."""
        try:
            return str(json.loads(self.of(job, "failed").read_text())["why"])
        except (OSError, ValueError, LookupError, TypeError):
            return ""

    def seconds(self, job: Job) -> float | None:
        """What a job that is done took, if a worker has seen it from beginning to end."""
        try:
            return float(json.loads(self.of(job, "json").read_text())["seconds"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def score(self, job: Job, metric: str = "") -> float | None:
        try:
            return read_score(self.out / job.result, job, metric)
        except (OSError, ValueError):
            return None

    def tidy(self, job: Job) -> None:
        """Of a fine-tuning that is done only the model is of use: hundreds of them would fill a disk with checkpoints."""
        if job.kind == "finetune":
            shutil.rmtree((self.out / job.result).parent / "checkpoints", ignore_errors=True)

    def keep(self, path: Path, value: Any) -> None:
        write_whole(path, json.dumps(value, indent=1) + "\n")

    def accept(self, job: Job) -> bool:
        """Whether a job that ended well has left what it was to leave; an evaluation's file counts from here on."""
        written = self.out / part(job.result)
        if job.kind == "evaluate" and written.exists():
            read_score(written, job)
            os.replace(written, self.out / job.result)
        return self.done(job)


def stem(job: Job) -> str:
    return job.name.replace("/", "_")


def read_score(path: Path, job: Job, metric: str = "") -> float:
    """The score that the task goes by, or one of its other metrics; if it is this job's."""
    state = path.stat()
    told = _told(path, state.st_mtime_ns, state.st_size)
    for key, value in job.says.items():
        if not f"/{told.get(key)}".endswith(f"/{value}"):  # of the model's place only what is below DIR, which may be moved
            raise ValueError(f"{path}: {key} is {told.get(key)!r}, not {value!r}")
    tree, name = (told.get("metrics"), metric) if metric else (told, "score")
    score = tree.get(name) if isinstance(tree, dict) else None
    if not isinstance(score, int | float) or isinstance(score, bool) or not math.isfinite(score):
        raise ValueError(f"{path}: {name} is {score!r}, no number")
    return float(score)


@lru_cache(maxsize=4096)  # who waits for workers asks twice a second
def _told(path: Path, *stamp: int) -> dict[str, Any]:
    tree = json.loads(path.read_text())
    return (
        {key: tree[key] for key in ("model", "data", "leads", "score", "metrics") if key in tree}
        if isinstance(tree, dict)
        else {}
    )


def begin(place: Place, plan: Plan, scale: Scale, data: Data) -> None:
    """Write down what DIR is for, or refuse if it is for something else."""
    (place.out / "settings").mkdir(parents=True, exist_ok=True)
    place.jobs.mkdir(exist_ok=True)
    _hold(place, "data", about(scale, data), ("path",))
    for name, settings in plan.settings.items():
        _hold(place, name, settings)
    for start, tree in plan.starts.items():
        path = place.out / start
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_whole(path, yaml.safe_dump(tree, sort_keys=False))


def about(scale: Scale, data: Data) -> dict[str, Any]:
    return {"scale": scale.name} | asdict(data)


def known(place: Place, name: str) -> dict[str, Any] | None:
    path = place.out / "settings" / f"{name}.json"
    try:
        tree = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}: use another --out") from None
    return tree if isinstance(tree, dict) else None


def _hold(place: Place, name: str, now: Mapping[str, Any], free: tuple[str, ...] = ()) -> None:
    now = json.loads(json.dumps(now))
    was = known(place, name)
    if was is None:
        place.keep(place.out / "settings" / f"{name}.json", now)
        return
    differ = [key for key in {**was, **now} if was.get(key) != now.get(key) and key not in free]
    if differ:
        told = "; ".join(f"{key} was {_short(was.get(key))} and is {_short(now.get(key))}" for key in differ[:3])
        raise ConfigError(f"--out {place.out}: {name} is not what it was begun with: {told}: use another --out")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
