"""A run's folder belongs to one process, and what is published in it is never taken away before something better is there."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import pretrain, rows, settings, start, wait
from safetensors import SafetensorError

from data_tools.dataset import Dataset
from engine.common import ConfigError
from engine.config import load
from engine.model.config import ModelConfig
from engine.training import checkpoint
from engine.training.checkpoint import CheckpointError
from engine.training.distributed import Ranks
from engine.training.tracking import Tracker

ALONE = Ranks(0, 1, torch.device("cpu"), None)


def asked_while_validating() -> None:
    """SIGTERM while a validation that turns out the best is under way; each checkpoint that is written is told."""
    from engine.training import loop
    from engine.training.pretraining import Pretraining

    validate, save = Pretraining.validate, checkpoint.save

    def asked(self: Pretraining, engine: Any) -> dict[str, float]:
        if engine.global_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return validate(self, engine)

    def told(engine: object, run: Path, state: dict[str, object], *rest: object) -> Path:
        print(f"writes {state['step']}")
        return save(engine, run, state, *rest)  # type: ignore[arg-type]

    Pretraining.validate = asked  # type: ignore[method-assign]
    loop.checkpoint.save = told  # type: ignore[assignment]


def test_a_step_is_written_once(dataset: Dataset, tmp_path: Path) -> None:
    ended = pretrain(tmp_path, dataset.root.url, before=asked_while_validating, train__validate_every=2, train__keep=1)
    assert ended.ok and "stopped after step 2" in ended.output, ended.output
    assert [line for line in ended.output.splitlines() if line.startswith("writes")] == ["writes 2"]


def made(root: Path, *steps: int) -> None:
    for step in steps:
        (root / f"step-{step}").mkdir(parents=True)
        (root / f"step-{step}" / checkpoint.MANIFEST).write_text("{}")


@pytest.mark.parametrize("keep, left", [(1, {5, 30, 40}), (2, {5, 20, 30, 40}), (9, {5, 10, 20, 30, 40})])
def test_only_what_a_run_has_done_is_pruned(keep: int, left: set[int], tmp_path: Path) -> None:
    """A run that fell back from step 40 keeps what it publishes on its way there again, and leaves step 40 alone."""
    made(tmp_path, 5, 10, 20, 30, 40)
    (tmp_path / checkpoint.BEST).write_text("step-5")
    checkpoint.prune(tmp_path, tmp_path / "step-30", keep)
    assert {checkpoint.step_of(path) for path in tmp_path.glob("step-*")} == left


def test_two_processes_do_not_share_a_run(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with checkpoint.claimed(tmp_path / "run", ALONE):
        ended = pretrain(tmp_path, dataset.root.url)
        assert ended.codes == [2] and ended.output.count("\n") == 1
        assert "another process trains here: wait for it, or use run=NEW" in ended.output
        ended = wait(tmp_path, start(tmp_path, settings(tmp_path, dataset.root.url), world=2))
        assert ended.codes == [2, 2] and "Traceback" not in ended.output
    assert pretrain(tmp_path, dataset.root.url, train__steps=1).ok


def test_a_place_that_takes_no_lock_is_refused_in_a_line(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"there: .*: choose another with --set run=RUN"),
        checkpoint.claimed(tmp_path / "not there", ALONE),
    ):
        raise AssertionError


def test_a_run_is_not_made_shorter(dataset: Dataset, tmp_path: Path) -> None:
    assert pretrain(tmp_path, dataset.root.url, train__steps=3, train__schedule="fixed").ok
    ended = pretrain(tmp_path, dataset.root.url, train__steps=2, train__schedule="fixed")
    assert ended.codes == [2] and "has done 3 steps, of 2" in ended.output and ended.output.count("\n") == 1
    assert json.loads((tmp_path / "run/run.json").read_text())["steps"] == 3


def no_room(*_: object) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device")


def not_merged(*_: object) -> None:
    raise RuntimeError("basic_ios::clear: iostream error")


def patched(module: str, name: str, function: Callable[..., None]) -> None:
    import importlib

    setattr(importlib.import_module(module), name, function)


def test_a_full_disk_in_the_end_is_one_line(dataset: Dataset, tmp_path: Path) -> None:
    before = partial(patched, "engine.model.folder", "save_weights", no_room)
    ended = pretrain(tmp_path, dataset.root.url, before=before, train__steps=1)
    assert ended.codes == [1] and "Traceback" not in ended.output
    assert "No space left on device: make room, then --export" in ended.output.splitlines()[-1]
    assert not list((tmp_path / "run").glob(".model*"))
    assert pretrain(tmp_path, dataset.root.url, train__steps=1).ok


def test_a_full_disk_on_the_way_to_another_number_of_ranks_is_one_line(dataset: Dataset, tmp_path: Path) -> None:
    assert pretrain(tmp_path, dataset.root.url, world=2, train__steps=1, train__schedule="fixed").ok
    before = partial(patched, "deepspeed.checkpoint.ds_to_universal", "main", not_merged)
    ended = pretrain(tmp_path, dataset.root.url, before=before, train__steps=2, train__schedule="fixed")
    assert ended.codes == [1] and "cannot be cut for another number of ranks: basic_ios" in ended.output
    assert "Traceback" not in ended.output and not (tmp_path / "run/checkpoints/step-1/.universal").exists()
    assert pretrain(tmp_path, dataset.root.url, train__steps=2, train__schedule="fixed").ok


def interrupted() -> None:
    from engine.training import train as course

    def asked(*_: object) -> None:
        raise KeyboardInterrupt

    course.open_datasets = asked  # type: ignore[assignment]


def test_interrupted_before_the_first_step_it_says_so(dataset: Dataset, tmp_path: Path) -> None:
    ended = pretrain(tmp_path, dataset.root.url, before=interrupted)
    assert ended.codes == [1] and ended.output.count("\n") == 1 and "the same command goes on" in ended.output


@pytest.mark.parametrize("port", ["99999", "0", "http"])
def test_a_port_that_is_none_is_one_line(port: str, dataset: Dataset, tmp_path: Path) -> None:
    processes = start(tmp_path, settings(tmp_path, dataset.root.url), 1, None, WORLD_SIZE="2", MASTER_PORT=port)
    ended = wait(tmp_path, processes)
    assert ended.codes == [2] and f"MASTER_PORT='{port}'" in ended.output and ended.output.count("\n") == 1


def test_a_token_longer_than_the_signal_is_one_line(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.conv: a token takes 10000 samples, of 2500"):
        ModelConfig(conv=((32, 1000), (32, 10))).tokens(2500)
    conv = {"model__conv": [[32, 1000], [32, 10]], "objective__local": 0}
    ended = pretrain(tmp_path, dataset.root.url, **conv)
    assert ended.codes == [2] and "model.conv: a token takes" in ended.output and ended.output.count("\n") == 1


def test_what_is_no_number_is_none_in_the_files(tmp_path: Path) -> None:
    """JSON has no NaN."""
    config = load("configs/pretrain/quickstart.yaml", ["train.track=[]"])
    row = {"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.5}
    (tmp_path / "validation.jsonl").write_text('{"step": 0, "loss": 1}\n')  # of a start that was killed before a checkpoint
    tracker = Tracker(tmp_path, config, tuple(row), {}, 0, 2)
    tracker._write("metrics.jsonl", row, row)
    tracker.close()
    assert rows(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}]
    assert rows(tmp_path, "validation.jsonl") == []
