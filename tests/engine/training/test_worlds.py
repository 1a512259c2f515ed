"""The same run on another number of processes."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import pretrain, rows

from data_tools.dataset import Dataset

STILL = {"model__dropout": 0, "model__attention_dropout": 0, "model__input_dropout": 0, "model__feature_dropout": 0}
PARTS = (
    "loss",
    "loss_local",
    "loss_global",
    "loss_diversity",
    "loss_features",
    "grad_norm",
    "code_perplexity",
    "accuracy_global",
)


def losses(run: Path, parts: tuple[str, ...] = PARTS) -> np.ndarray:
    return np.array([[row[name] for name in parts] for row in rows(run)])


def test_two_processes_equal_one(dataset: Dataset, tmp_path: Path) -> None:
    """Candidates, codes in use, norm and clipping are those of the global batch."""
    for run, world in (("one", 1), ("two", 2)):
        ended = pretrain(tmp_path, dataset.root.url, run, world, **STILL, train__steps=4)
        assert ended.ok, ended.output
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=2e-5)
    assert rows(tmp_path / "two")[-1]["crops_seen"] == 32


def test_parts_of_a_step_are_the_same_crops_on_one_process_and_two(dataset: Dataset, tmp_path: Path) -> None:
    """1 -> 2 in mid-run, each crop contrasted within its part; and the figures of validation, which hang on neither."""
    how = STILL | {"train__validate_every": 2, "train__valid_batches": 3}
    for run, plan in (("alone", [(1, 4, 4)]), ("moved", [(1, 2, 4), (2, 4, 2)])):
        for world, steps, micro in plan:
            ended = pretrain(tmp_path, dataset.root.url, run, world, **how, train__steps=steps, train__micro_batch=micro)
            assert ended.ok, ended.output
    np.testing.assert_allclose(losses(tmp_path / "moved"), losses(tmp_path / "alone"), rtol=2e-5)
    moved, alone = ([list(row.values()) for row in rows(tmp_path / run, "validation.jsonl")] for run in ("moved", "alone"))
    np.testing.assert_allclose(moved, alone, rtol=2e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_validation_of_fewer_batches_than_ranks(stage: int, dataset: Dataset, tmp_path: Path) -> None:
    """Ranks without a batch of their own keep the others company."""
    how = STILL | {"train__validate_every": 1, "train__steps": 1, "train__zero_stage": stage, "train__valid_batches": 1}
    for run, world in (("one", 1), ("four", 4)):
        ended = pretrain(tmp_path, dataset.root.url, run, world, **how)
        assert ended.ok, ended.output
    one, four = ([list(row.values()) for row in rows(tmp_path / run, "validation.jsonl")] for run in ("one", "four"))
    assert [row[0] for row in one] == [0, 1]
    np.testing.assert_allclose(four, one, rtol=2e-5)


def graphs() -> None:
    """The compiler's are counted, and run as they are."""
    from engine.training import throughput
    from engine.training import train as course

    def told(graph: Any, inputs: Any) -> Any:
        print(f"a graph of {len(graph.graph.nodes)} operations", flush=True)
        return graph.forward

    course.compile_model = partial(throughput.compile_model, backend=told)  # type: ignore[assignment]


def test_a_step_of_two_ranks_compiles_in_few_graphs(dataset: Dataset, tmp_path: Path) -> None:
    ended = pretrain(tmp_path, dataset.root.url, "run", 2, graphs, train__compile="step", train__steps=1)
    assert ended.ok, ended.output
    assert max(int(size) for size in re.findall("a graph of ([0-9]+) operations", ended.output)) > 300


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_goes_on_with_another_number_of_processes(stage: int, dataset: Dataset, tmp_path: Path) -> None:
    """1 -> 2 -> 1, against one that stayed alone; and not what a fresh Adam would do."""
    how = STILL | {"train__zero_stage": stage}
    for run, plan in (("alone", [(1, 6)]), ("moved", [(1, 2), (2, 4), (1, 6)])):
        for world, steps in plan:
            ended = pretrain(tmp_path, dataset.root.url, run, world, **how, train__steps=steps)
            assert ended.ok, ended.output
    np.testing.assert_allclose(losses(tmp_path / "moved"), losses(tmp_path / "alone"), rtol=1e-4)


def test_two_processes_in_bf16(dataset: Dataset, tmp_path: Path) -> None:
    """1 -> 2 at the precision that is the default; to its rounding."""
    for run, plan in (("alone", [(1, 4)]), ("moved", [(1, 2), (2, 4)])):
        for world, steps in plan:
            ended = pretrain(tmp_path, dataset.root.url, run, world, **STILL, train__precision="bf16", train__steps=steps)
            assert ended.ok, ended.output
    np.testing.assert_allclose(*(losses(tmp_path / run, ("loss", "grad_norm")) for run in ("moved", "alone")), rtol=0.01)
