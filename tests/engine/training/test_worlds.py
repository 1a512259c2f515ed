"""The same run on another number of processes."""

from pathlib import Path

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
