"""The training loop: every method trains; stopping, non-finite steps, bad crops, precision of what
is measured."""

import gc
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import curve, nothing, pretrain, rows, settings, start, tuning, wait

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.config import CONFIGS, Config, build, load
from omnilead.engine.data.augmenter import HALF
from omnilead.engine.data.order import DatasetRows, Order
from omnilead.engine.model.draws import draw, row_keys
from omnilead.engine.objectives.contrastive import nt_xent
from omnilead.engine.objectives.local import local_loss
from omnilead.engine.training import checkpoint
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.loop import Loop
from omnilead.engine.training.pretraining import PretrainTask
from omnilead.engine.training.validation import training_roles
from tests.waiting import until

STILL = {f"model__{name}dropout": 0 for name in ("", "attention_", "input_", "feature_")}


def newest_step(run: Path) -> int:
    path = checkpoint.newest(run)
    return checkpoint.step_of(path) if path else 0


@pytest.mark.parametrize(
    ("world", "method"),
    [
        (1, {"objective__contrast": 0}),
        (1, {"objective__local": 0}),
        (1, {"objective__local": 0, "objective__method": "simclr", "pipeline__views": "window"}),
        (
            2,
            {
                "objective__local": 0,
                "objective__method": "3kg",
                "pipeline__views": "window",
                "augment__threekg": {},
            },
        ),
        (
            2,
            {
                "objective__form": "authors",
                "objective__gathered": False,
                "train__micro_batch": 2,
                "model__mask_trim": True,
            },
        ),
        (
            1,
            {
                "augment__leads": "2",
                "augment__padded": False,
                "model__leads": 2,
                "augment__noise": "physio3",
            },
        ),
    ],
)
def test_every_method_trains_and_validates(
    world: int, method: dict[str, Any], dataset: Dataset, tmp_path: Path
) -> None:
    how = {
        "train__steps": 2,
        "train__validate_every": 2,
        "train__zero_stage": 3,
        "train__probe_patients": 9,
    }
    ended = pretrain(tmp_path, dataset.root.url, world=world, **method, **how)
    assert ended.ok, ended.output
    assert rows(tmp_path / "run")[-1]["skipped_steps"] == 0
    assert np.isfinite(rows(tmp_path / "run", "validation.jsonl")[0]["loss"])


def test_chance_equals_the_score_of_random_representations(dataset: Dataset) -> None:
    config = load(CONFIGS / "pretrain" / "quickstart.yaml", [f"data.datasets=[{dataset.root.url}]"])
    task = PretrainTask(config, [dataset], Ranks(0, 1, torch.device("cpu"), None))
    chance, held_out = task.explained()["chance"], task.held_out.crops
    random, tokens = torch.Generator().manual_seed(0), config.model.tokens(HALF)
    keys_R = torch.from_numpy(row_keys(0, 0, np.arange(40))).flatten()
    draws = draw(config.model, keys_R, tokens, config.objective.negatives, sample_codes=False)
    x_RMP, y_RMP = (torch.randn(*draws.valid_RM.shape, 16, generator=random) for _ in range(2))
    loss, hits = local_loss(x_RMP, y_RMP, draws.times_RMM, draws.valid_RM, temperature=1e4)
    assert [chance["loss_local"], chance["accuracy_local"]] == pytest.approx(
        [float(loss), float(hits)], rel=0.06
    )
    for prefix, crops in (("", config.train.batch_crops), ("valid/", held_out)):
        found = [
            nt_xent(torch.randn(crops, 2, 16, generator=random), 1e4, False) for _ in range(200)
        ]
        loss, hits = (torch.stack(part).mean() for part in zip(*found, strict=True))
        assert chance[f"{prefix}loss_global"] == pytest.approx(float(loss), rel=1e-3)
        assert chance[f"{prefix}accuracy_global"] == pytest.approx(float(hits), rel=0.2)
    assert chance["valid/identification_accuracy"] == 1 / len(task.probe.pairs)


def test_gradient_accumulation_equals_one_large_batch(dataset: Dataset, tmp_path: Path) -> None:
    """Without diversity and CMSC, which look at all crops of a micro-batch together."""
    how = STILL | {"objective__contrast": 0, "objective__diversity": 0, "train__steps": 3}
    for name, micro in (("one", 8), ("four", 2)):
        assert pretrain(tmp_path, dataset.root.url, name, **how, train__micro_batch=micro).ok
    parts = ("loss", "loss_local", "loss_features", "grad_norm")
    one, four = (
        [[row[part] for part in parts] for row in rows(tmp_path / name)] for name in ("one", "four")
    )
    np.testing.assert_allclose(four, one, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler on a CPU")
def test_compiled_equals_eager(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole step takes minutes: test_pretrainer.py traces it."""
    monkeypatch.setenv("AOT_INDUCTOR_DEBUG_COMPILE", "1")  # C++ without optimisation
    small = {"model__layers": 1, "model__conv": [[8, 4], [8, 4]], "train__steps": 2}
    for how in ("eager", "layers"):
        ended = pretrain(
            tmp_path, dataset.root.url, how, before=nothing, **STILL, **small, train__compile=how
        )
        assert ended.ok, ended.output
    one, two = (
        [(row["loss"], row["grad_norm"]) for row in rows(tmp_path / how)]
        for how in ("eager", "layers")
    )
    np.testing.assert_allclose(two, one, rtol=2e-5)


@pytest.mark.parametrize(
    ("task", "asked", "code"), [("pretraining", "SIGTERM", 0), ("diagnosis", "SIGINT", 130)]
)
def test_a_stop_signal_writes_a_checkpoint(
    task: str, asked: str, code: int, dataset: Dataset, tmp_path: Path
) -> None:
    arguments = settings(tmp_path, dataset.root.url, train__steps=100_000)
    if task == "diagnosis":  # from random weights of those settings
        arguments = tuning(
            tmp_path, dataset.root.url, tmp_path / "tiny.yaml", task, train__steps=100_000
        )
    processes = start(tmp_path, arguments, world=2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3)
    os.kill(processes[1].pid, signal.Signals[asked])  # one rank is enough
    ended = wait(tmp_path, processes)
    assert ended.codes == [0, code] and "the same command resumes" in ended.output, ended.output
    assert newest_step(tmp_path / "run") == rows(tmp_path / "run")[-1]["step"] > 3


def test_a_step_has_one_checkpoint(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM during a validation that turns out to be the best."""
    validate, save, written = PretrainTask.validate, checkpoint.save, []

    def asked(self: PretrainTask, engine: Any) -> dict[str, float]:
        if engine.global_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return validate(self, engine)

    def counted(engine: object, run: Path, state: dict[str, Any], *rest: Any) -> None:
        written.append(state["step"])
        save(engine, run, state, *rest)

    monkeypatch.setattr(PretrainTask, "validate", asked)
    monkeypatch.setattr(checkpoint, "save", counted)
    ended = pretrain(tmp_path, dataset.root.url, train__validate_every=2, train__keep=1)
    assert ended.ok and "stopped after step 2" in ended.output and written == [2], ended.output


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_non_finite_steps_are_skipped_and_too_many_end_the_run(
    stage: int, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omnilead.engine.model.pretrainer import Pretrainer

    forward, calls = Pretrainer.forward, iter(range(1, 10_000))

    def poisoned(self: Pretrainer, *args: Any) -> dict[str, torch.Tensor]:
        losses: dict[str, torch.Tensor] = forward(self, *args)
        call = next(calls)
        return (
            losses | {"loss": losses["loss"] * float("nan")}
            if call in (3, 4) or call >= 8
            else losses
        )

    monkeypatch.setattr(Pretrainer, "forward", poisoned)
    how = {"train__zero_stage": stage, "train__max_nonfinite": 5, "train__steps": 30}
    ended = pretrain(tmp_path, dataset.root.url, **how)
    assert [row["skipped_steps"] for row in rows(tmp_path / "run")] == [
        0,
        0,
        1,
        2,
        2,
        2,
        2,
        3,
        4,
        5,
        6,
        7,
    ]
    assert all(row["loss"] is not None for row in rows(tmp_path / "run")[4:7])
    assert (
        ended.codes == [1]
        and "not finite in 5 steps in a row (train.max_nonfinite)" in ended.output
    )
    assert "rows" in ended.output and "Traceback" not in ended.output
    assert newest_step(tmp_path / "run") == 12  # the good steps are not lost


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_does_not_wait_for_the_device(
    stage: int, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.accelerator import get_accelerator  # type: ignore[import-untyped]

    waited: list[int] = []
    step = Loop._step

    def counted(self: Loop, batch: Any) -> Any:
        waited.clear() if self.progress.step == 1 else None
        losses = step(self, batch)
        steps.append(len(waited))
        return losses

    steps: list[int] = []
    gc.collect()  # engines of other tests, which wait when they are destroyed
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: waited.append(1))
    monkeypatch.setattr(Loop, "_step", counted)
    how = {
        "train__steps": 3,
        "train__micro_batch": 4,
        "train__zero_stage": stage,
        "train__save_every_steps": 100,
    }
    assert pretrain(tmp_path, dataset.root.url, **how).ok and steps == [0, 0, 0]


def test_a_rank_with_bad_crops_names_them(dataset: Dataset, tmp_path: Path) -> None:
    """A rank on its own saves what it has trained before."""
    shutil.copytree(dataset.root.url, tmp_path / "damaged")
    damaged = Dataset.open(str(tmp_path / "damaged"))
    config = load(tmp_path / "tiny.yaml", settings(tmp_path, damaged.root.url)[3::2], Config)
    order = Order((DatasetRows.of(damaged, **training_roles(config)),), 8)
    row = int(order.slice(3, 1, 2).row[0])  # of rank 1, in the fourth step
    shard, offset, _ = damaged.addresses
    with open(tmp_path / "damaged" / "shards" / damaged.shards[shard[row]]["name"], "r+b") as file:
        file.seek(offset[row])
        file.write(bytes(200))
    for run, world, said in (
        ("two", 2, f"rank 1: .*crop {row} at byte"),
        ("one", 1, f"omnilead pretrain: /.*crop {row} at byte"),
    ):
        ended = pretrain(tmp_path, damaged.root.url, run, world)
        assert ended.codes == [1] * world and re.search(said, ended.output), ended.output
        assert "Traceback" not in ended.output
    assert newest_step(tmp_path / "one") == 3


def test_determinism_checkpoints_by_time_and_lost_output(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, asked = Loop.train, []

    def noted(self: Loop, tracer: Any) -> bool:
        asked.append(
            (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32)
        )
        return train(self, tracer)

    monkeypatch.setattr(Loop, "train", noted)
    by_time = {"train__save_every_minutes": 1e-6, "train__keep": 9, "train__deterministic": True}
    assert pretrain(tmp_path, dataset.root.url, "plain", train__steps=2).ok
    assert pretrain(tmp_path, dataset.root.url, "strict", train__steps=2, **by_time).ok
    assert asked == [(False, False), (True, False)]
    assert {path.name for path in (tmp_path / "strict" / "checkpoints").glob("step-*")} == {
        "step-1",
        "step-2",
    }
    ended = pretrain(tmp_path, dataset.root.url, "unseen", before=full_output, train__steps=2)
    assert (
        ended.ok
        and ended.output.count("\n") == 1
        and "standard output: No space left" in ended.output
    )
    assert curve(tmp_path / "plain") == curve(tmp_path / "strict") == curve(tmp_path / "unseen")


def full_output() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def little_memory() -> None:
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))


def test_out_of_memory_is_one_line(dataset: Dataset, tmp_path: Path) -> None:
    ended = pretrain(tmp_path, dataset.root.url, before=little_memory, pipeline__read_ahead=10**6)
    assert ended.codes == [1] and "Traceback" not in ended.output, ended.output
    assert (
        "omnilead pretrain: out of memory: lower train.micro_batch" in ended.output.splitlines()[-1]
    )


@pytest.mark.parametrize("replaced", [False, True])
def test_a_moved_or_replaced_run_ends_with_one_line(
    replaced: bool, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another training may have begun in its place."""
    step = Loop._step

    def losing(self: Loop, batch: Any) -> Any:
        if self.progress.step == 3:
            self.run.rename(self.run.with_name("elsewhere"))
            if replaced:
                self.run.mkdir()
                (self.run / checkpoint.LOCK).touch()
        return step(self, batch)

    monkeypatch.setattr(Loop, "_step", losing)
    ended = pretrain(tmp_path, dataset.root.url, train__steps=10_000, train__save_every_steps=5)
    assert ended.codes == [1] and "was moved or deleted" in ended.output.splitlines()[-1], (
        ended.output
    )
    assert "Traceback" not in ended.output and "step 9/" not in ended.output
    assert (tmp_path / "run").exists() == replaced and not (
        tmp_path / "run" / "checkpoints"
    ).exists()


def test_a_collapse_is_reported_once_and_early() -> None:
    task = SimpleNamespace(config=build({"model": {"codes": 320, "codebooks": 2}}), low_logs=0)
    said = [
        PretrainTask.warning(task, {"code_perplexity": codes})
        for codes in (600.0, 3.0, 3.0, 600.0, 3.0, 3.0, 3.0, 3.0)
    ]  # type: ignore[arg-type]
    assert [bool(one) for one in said] == [False] * 6 + [True, False]
    assert "3.0 of 640 codes" in str(said[6]) and "Raise objective.diversity" in str(said[6])
