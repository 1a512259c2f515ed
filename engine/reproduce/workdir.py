"""DIR: the progress of a plan, and the settings it was started with.

DIR/pretrain/MODEL/  finetune/MODEL/CELL/     runs, as `omnilead pretrain` and `finetune` write them
    scores/MODEL/CELL.json                    what `omnilead evaluate` wrote
    jobs/JOB.out .err .json                   output of a job; the seconds it took, or why it failed
    settings/*.json  starts/*.yaml            data and settings, which must not change; models with random weights
    table-N.md .csv .json
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from omnilead.engine.common import ConfigError, write_whole
from omnilead.engine.reproduce.plan import Job, JobPlan


@dataclass(frozen=True)
class WorkDir:
    path: Path

    def file(self, job: Job, suffix: str) -> Path:
        return self.path / "jobs" / f"{job.name.replace('/', '_')}.{suffix}"

    def done(self, job: Job) -> bool:
        if job.result.startswith("scores/"):
            return self.score(job) is not None
        return (self.path / job.result).exists()

    def missing(self, jobs: Iterable[Job]) -> list[Job]:
        return [job for job in jobs if not self.done(job)]

    def score(self, job: Job, metric: str = "") -> float | None:
        """The evaluation's main score, or another of its metrics. None if it has not been measured
        or is not a number."""
        tree = read_json(self.path / job.result)
        value = tree.get("metrics", {}).get(metric) if metric else tree.get("score")
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def seconds(self, job: Job) -> float:
        """How long the job took; 0 if unknown."""
        return float(read_json(self.file(job, "json")).get("seconds", 0))

    def failure(self, job: Job) -> str:
        """Why its last attempt failed; empty if it did not."""
        return str(read_json(self.file(job, "json")).get("error", ""))

    def start(self, plan: JobPlan) -> None:
        """Creates the folder, or refuses one that was started with other data or settings."""
        for name in ("jobs", "settings", "starts"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self._same_settings("data", {"scale": plan.scale.name} | asdict(plan.data))
        for name, settings in plan.settings.items():
            self._same_settings(name, settings)
        for start, tree in plan.starts.items():
            write_whole(self.path / start, yaml.safe_dump(tree, sort_keys=False))

    def _same_settings(self, name: str, settings: dict[str, Any]) -> None:
        path = self.path / "settings" / f"{name}.json"
        old, new = read_json(path), json.loads(json.dumps(settings))
        for key in {**old, **new} if old else ():
            was, now = old.get(key), new.get(key)
            if was != now and key != "path":
                raise ConfigError(
                    f"--out {self.path}: was started with other settings ({name}: {key} was "
                    f"{str(was)[:40]} and is {str(now)[:40]}): use another --out"
                )
        write_json(path, new)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it is missing or holds something else."""
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")
