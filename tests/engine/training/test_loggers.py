"""RUN's files, Weights & Biases and MLflow: what is written, resumed after a kill, and reported
when a service fails."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from ranks import column, rows

from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.training import tracking
from omnilead.engine.training.config import build_config
from omnilead.engine.training.loggers import RunLogger, move_repeated_lines, progress_lines

KEYS = ("step", "loss", "crops_per_s", "data_wait_pct", "mfu", "lr")


class Service(ModuleType):
    """Stands in for either service: it has the methods that the loop calls, and records the
    calls."""

    def __init__(self, name):
        super().__init__(name)
        self.runs = []
        self.told = []
        self.settings = {}
        self.ended = 0
        self.broken = False

    def _begin(self, name):
        self.runs.append(name or f"{self.__name__}-{len(self.runs)}")
        return self.runs[-1]

    def _log(self, values, step):
        if self.broken:
            raise ConnectionError("no route\nto host")
        self.told.append((step, values))

    def _end(self):
        self.ended += 1


class Wandb(Service):
    def init(self, project, dir, id, resume, name, config):
        assert resume == "allow" and name == "run" and Path(dir).is_dir() and project == "omnilead"
        self.settings = config
        return SimpleNamespace(id=self._begin(id), log=self._log, finish=self._end)


class Mlflow(Service):
    def start_run(self, run_id, run_name):
        self.settings = self.settings if run_id else {}
        return SimpleNamespace(info=SimpleNamespace(run_id=self._begin(run_id)))

    def log_params(self, settings):
        assert len(settings) <= 100 and not self.settings.keys() & settings.keys()
        self.settings |= settings

    def log_metrics(self, values, step):
        self._log(values, step)

    def end_run(self):
        self._end()


@pytest.fixture
def services(monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    found = [Wandb("wandb"), Mlflow("mlflow")]
    for service in found:
        monkeypatch.setitem(sys.modules, service.__name__, service)
    return found


def config(*track):
    return build_config({"train": {"track": list(track), "steps": 3, "lr": 1e-3}})


def logger(run, settings, step=0, validated=-1):
    made = RunLogger(run, settings, KEYS, {}, (step, validated), 3)
    with ExitStack() as refused:
        refused.callback(made.close)
        made.services |= tracking.open_services(run, settings, step)
        refused.pop_all()
    return made


OTHERS = {"crops_per_s": 1.0, "data_wait_pct": 0.0, "mfu": 0.1, "lr": 1.0, "more": 2.0}


def log(to, step, **values):
    to.log({"step": step, "loss": 1.0 / step, "loss_x": None} | OTHERS | values)


def test_both_services_get_every_curve_and_continue_after_a_kill(services, tmp_path):
    settings = config("wandb", "mlflow")
    tracking.require_installed(settings)
    first = logger(tmp_path / "run", settings)
    log(first, 1)
    for file in first.files.values():  # and no more: it was killed
        file.close()
    second = logger(tmp_path / "run", settings, step=1)
    second.log_validation({"step": 2, "loss": 0.5, "score": 0.25})
    log(second, 2)
    second.close()
    expected = [
        (1, {"loss": 1.0} | OTHERS),
        (2, {"valid/loss": 0.5, "valid/score": 0.25}),
        (2, {"loss": 0.5} | OTHERS),
    ]
    for service in services:
        assert service.told == expected and service.ended == 1
        assert service.runs == [f"{service.__name__}-0"] * 2
    assert services[0].settings == settings.tree() and services[1].settings["train.lr"] == "0.001"
    assert not (tmp_path / "run" / "tensorboard").exists()  # which was not asked for
    logger(tmp_path / "run", settings).close()
    assert services[0].runs[-1] == "wandb-2"


def test_numbers_for_prometheus(tmp_path):
    """In the text format, which has no NaN here, and never half a file."""
    folder = tmp_path / 'a "run"\t\\'  # Prometheus knows \\, \" and \n, but no \t
    to = logger(folder, config())
    to.log_validation({"step": 1, "loss": 0.5, "score": float("nan")})
    log(to, 2, loss=0.25)
    to.close()
    *lines, end = (folder / "metrics.prom").read_text().splitlines()
    assert end == "# EOF" and sorted(path.name for path in folder.glob("metrics.*")) == [
        "metrics.jsonl",
        "metrics.prom",
    ]
    values = {}
    for kind, sample in zip(lines[::2], lines[1::2], strict=True):
        labelled, value = sample.split("} ")
        name = labelled.removesuffix('{run="a \\"run\\"\t\\\\"')
        assert kind == f"# TYPE {name} gauge" and name.isidentifier()
        values[name.removeprefix("omnilead_")] = float(value)
    at_s = values.pop("started_at_seconds"), values.pop("logged_at_seconds")
    assert 0 <= at_s[1] - at_s[0] < 600
    assert (
        values == {"steps": 3, "first_step": 0, "step": 2, "loss": 0.25, "valid_loss": 0.5} | OTHERS
    )


def test_a_service_that_fails_does_not_end_a_training(services, tmp_path, capsys):
    to = logger(tmp_path / "run", config("wandb", "mlflow"))
    services[0].broken = True
    for step in (1, 2):
        log(to, step)
    to.close()
    assert [step for step, _ in services[1].told] == [1, 2] and services[0].told == []
    out = capsys.readouterr().out
    assert out.count("wandb") == 1 and "no route to host" in out
    assert len(rows(tmp_path / "run")) == 2


def test_a_service_that_does_not_start_or_is_missing_is_one_line(
    services, training, tmp_path, monkeypatch
):
    monkeypatch.setattr(services[0], "init", lambda **_: 1 / 0, raising=False)
    with pytest.raises(ConfigError, match=r"train\.track: wandb .*division by zero"):
        logger(tmp_path / "run", config("wandb"))
    monkeypatch.setattr(tracking, "is_installed", lambda name: False)
    says = training("new", train__track=["mlflow"]).one_line()
    assert "mlflow is not installed" in says
    assert not (tmp_path / "new").exists()


def test_without_services_only_files_are_written_and_nan_is_null(tmp_path):
    """JSON has no NaN."""
    # of a start that was killed before a checkpoint
    (tmp_path / "validation.jsonl").write_text('{"step": 0, "loss": 1}\n')
    to = logger(tmp_path, config())
    log(to, 1, loss=float("nan"), lr=float("inf"))
    to.close()
    assert [(row["loss"], row["lr"], row["mfu"]) for row in rows(tmp_path)] == [(None, None, 0.1)]
    assert rows(tmp_path, "validation.jsonl") == []
    names = {"config.yaml", "run.json", "metrics.jsonl", "metrics.prom"}
    names |= {"validation.jsonl", "validation.cut.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "run.json").read_text())["versions"]


def test_a_validation_that_is_repeated_has_one_line(tmp_path):
    """It was killed between the line and the checkpoint that knows of it."""
    lines = "".join(f'{{"step": {step}, "loss": 1}}\n' for step in (0, 1))
    for name in ("metrics.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text(lines)
    logger(tmp_path, config(), step=1, validated=0).close()
    assert column(tmp_path) == [0, 1] and column(tmp_path, name="validation.jsonl") == [0]


def test_lines_of_repeated_steps_are_moved(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (3, 1):
        path.write_bytes(b"".join(b'{"step": %d}\n' % n for n in range(1, 6)) + b'\xff{"st')
        move_repeated_lines(path, step)
        assert column(tmp_path) == list(range(1, step + 1))
    cut = (tmp_path / "metrics.cut.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in cut if line.startswith(b"{")] == [4, 5, 2, 3, 4, 5]
    assert cut.count(b'\xff{"st') == 2
    move_repeated_lines(path, 1)
    assert len((tmp_path / "metrics.cut.jsonl").read_bytes().splitlines()) == len(cut)


def test_a_line_of_progress_fits_100_columns():
    row = {
        "step": 1000,
        "loss": 9.1234,
        "loss_local": 5.1,
        "loss_global": 6.1,
        "loss_features": 0.01,
    }
    row |= {
        "loss_diversity": None,
        "lr": 5e-5,
        "crops_per_s": 1396.3,
        "data_wait_pct": 0.1,
        "mfu": 0.31,
    }
    line = progress_lines(row, 100_000, 5000)
    assert line == (
        "step 1000/100000  loss 9.1234  lr 5e-05  1396.3 crops/s, data wait 0.1 %, MFU 31.0 %  1:23:20 left\n"
        "    losses: local 5.100, global 6.100, features 0.010"
    )
    row |= {f"loss_{name}": 1.0 for name in ("variance", "invariance", "covariance", "age", "sex")}
    long = progress_lines(row | {"step": 123_456}, 1_000_000, 1e6).splitlines()
    assert len(long) == 4 and max(map(len, long)) <= 100
