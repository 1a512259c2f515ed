"""Curves on Weights & Biases and MLflow: what is sent, what goes on after a kill, what is said when they are not there."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ranks import pretrain

from data_tools.dataset import Dataset
from engine.common import ConfigError
from engine.config import Config, build
from engine.training import loggers
from engine.training.tracking import Tracker

KEYS = ("step", "loss", "mfu")


class Service(ModuleType):
    """Either of the two, as far as the loop speaks to it; it remembers what it was told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.runs: list[str] = []
        self.told: list[tuple[int, dict[str, float]]] = []
        self.settings: dict[str, Any] = {}
        self.ended = 0
        self.broken = False

    def _begin(self, name: str | None) -> str:
        self.runs.append(name or f"{self.__name__}-{len(self.runs)}")
        return self.runs[-1]

    def _log(self, values: dict[str, float], step: int) -> None:
        if self.broken:
            raise ConnectionError("no route\nto host")
        self.told.append((step, values))

    def _end(self) -> None:
        self.ended += 1


class Wandb(Service):
    def init(self, project: str, dir: str, id: str | None, resume: str, name: str, config: dict[str, Any]) -> Any:
        assert resume == "allow" and name == "run" and Path(dir).is_dir() and project == "omnilead"
        self.settings = config
        return SimpleNamespace(id=self._begin(id), log=self._log, finish=self._end)


class Mlflow(Service):
    def start_run(self, run_id: str | None, run_name: str) -> Any:
        self.settings = self.settings if run_id else {}
        return SimpleNamespace(info=SimpleNamespace(run_id=self._begin(run_id)))

    def log_params(self, settings: dict[str, str]) -> None:
        assert len(settings) <= 100 and not self.settings.keys() & settings.keys()
        self.settings |= settings

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self._log(values, step)

    def end_run(self) -> None:
        self._end()


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> list[Service]:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    found: list[Service] = [Wandb("wandb"), Mlflow("mlflow")]
    for service in found:
        monkeypatch.setitem(sys.modules, service.__name__, service)
    return found


def config(*track: str) -> Config:
    return build({"train": {"track": list(track), "steps": 3, "lr": 1e-3}})


def tracker(run: Path, settings: Config, step: int = 0) -> Tracker:
    return Tracker(run, settings, KEYS, {}, step, total=3)


def log(to: Tracker, step: int) -> None:
    to.log({"step": step, "loss": 1.0 / step, "crops_per_s": 1.0, "data_wait_pct": 0.0, "mfu": 0.1, "lr": 1.0, "loss_x": None})


def test_both_get_every_curve_and_go_on_after_a_kill(services: list[Service], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("engine.training.tracking.line", lambda *_: "")
    settings = config("wandb", "mlflow")
    loggers.check(settings)
    first = tracker(tmp_path / "run", settings)
    log(first, 1)
    for file in first.files.values():  # and no more: it was killed
        file.close()
    second = tracker(tmp_path / "run", settings, step=1)
    second.validated({"step": 2, "loss": 0.5, "score": 0.25})
    log(second, 2)
    second.close()
    others = {"crops_per_s": 1.0, "data_wait_pct": 0.0, "mfu": 0.1, "lr": 1.0}  # more than KEYS, which metrics.jsonl has
    expected = [(1, {"loss": 1.0} | others), (2, {"valid/loss": 0.5, "valid/score": 0.25}), (2, {"loss": 0.5} | others)]
    for service in services:
        assert service.told == expected and service.ended == 1
        assert service.runs == [f"{service.__name__}-0"] * 2
    assert services[0].settings == settings.tree() and services[1].settings["train.lr"] == "0.001"
    assert not (tmp_path / "run" / "tensorboard").exists()  # which was not asked for
    anew = tracker(tmp_path / "run", settings)
    anew.close()
    assert services[0].runs[-1] == "wandb-2"


def test_a_service_that_fails_does_not_end_a_training(
    services: list[Service], tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("engine.training.tracking.line", lambda *_: "")
    to = tracker(tmp_path / "run", config("wandb", "mlflow"))
    services[0].broken = True
    for step in (1, 2):
        log(to, step)
    to.close()
    assert [step for step, _ in services[1].told] == [1, 2] and services[0].told == []
    assert capsys.readouterr().out.count("wandb is left out from here on: no route to host") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_one_that_does_not_begin_is_one_line(services: list[Service], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(services[0], "init", lambda **_: 1 / 0, raising=False)
    with pytest.raises(ConfigError, match=r"train\.track: wandb does not begin: division by zero"):
        tracker(tmp_path / "run", config("wandb"))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_what_is_not_installed_is_named_before_any_work(name: str, dataset: Dataset, tmp_path: Path) -> None:
    if loggers.installed(name):
        pytest.skip(f"{name} is installed here")
    ended = pretrain(tmp_path, dataset.root.url, train__track=[name])
    assert ended.codes == [2] and len(ended.output.splitlines()) == 1
    assert f"{name} is not installed: pip install 'omnilead[track]'" in ended.output and not (tmp_path / "run").exists()


def test_nothing_asked_for_is_nothing_written(tmp_path: Path) -> None:
    tracker(tmp_path / "run", config()).close()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.yaml",
        "run.json",
        "metrics.jsonl",
        "validation.jsonl",
    }
    assert json.loads((tmp_path / "run" / "run.json").read_text())["versions"]
