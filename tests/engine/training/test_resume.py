"""A run that was stopped and gone on with equals one that was not."""

from pathlib import Path

import pytest
from ranks import curve, pretrain, rows
from safetensors.torch import load_file

from data_tools.dataset import Dataset


def url(dataset: Dataset) -> str:
    return dataset.root.url


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16"), (1, "fp32")])
def test_resumed_equals_uninterrupted_bit_for_bit_over_an_epochs_end(
    stage: int, precision: str, dataset: Dataset, tmp_path: Path
) -> None:
    how = {"train__zero_stage": stage, "train__precision": precision, "train__batch_crops": 16}  # 4 steps an epoch
    for run, step_counts in (("whole", [7]), ("parts", [3, 7])):
        for steps in step_counts:
            ended = pretrain(tmp_path, url(dataset), run, **how, train__steps=steps)
            assert ended.ok, ended.output
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert 1 < rows(whole)[-1]["epoch"] < 3
    assert [row["step"] for row in rows(parts)] == list(range(1, 8))
    assert curve(whole) == curve(parts)
    one, two = (load_file(run / "model" / "model.safetensors") for run in (whole, parts))
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
