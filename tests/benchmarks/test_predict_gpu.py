"""Predictions for a GPU that need not exist: the bytes of a small kernel, and the kernels of a
step."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import predict_gpu
from benchmarks.measure import call_fresh

BYTES = 2 * 1024 * 1024 * 2  # of a bf16 matrix, read and written


def on_a_pretended_gpu(model: str) -> tuple[list[tuple[int, float]], list[str]]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    predict_gpu.pretend()
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            x_NM = torch.empty(1024, 1024, dtype=torch.bfloat16)
        compiled = torch.compile(lambda x: torch.nn.functional.gelu(x) * 2, fullgraph=True)
        kernels = predict_gpu.kernels_of(lambda: compiled(x_NM))
    predict_gpu.kernels_of = lambda call: [(3, 0.5), (2, 1.5)]
    return kernels, list(predict_gpu.predict(model, 4))


def test_a_step_is_predicted_from_the_bytes_of_its_kernels(tiny: str) -> None:
    """A GELU and a product are one kernel. In its own process, as torch stays patched."""
    kernels, lines = call_fresh(on_a_pretended_gpu, tiny)
    assert kernels == [(1, pytest.approx(BYTES / 1e9))]
    rows: dict[str, Any] = {line[:28].strip(): line[28:].split() for line in lines}
    parts = {"1 x features", "1 x draw", "1 x enter", "2 x layer", "1 x compare", "1 x pool"}
    assert set(rows) >= parts | {f"{part}, backward" for part in parts}
    assert rows["2 x layer"] == ["6", "1.00", "0.23"] and rows["2 x layer, backward"] == [
        "4",
        "3.00",
        "0.70",
    ]
    assert "all: 14.00 GB, 3.3 ms, and" in lines[-2] and "a step of 4 crops" in lines[-1]


def test_an_unknown_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(predict_gpu, "pretend", lambda: None)
    with pytest.raises(SystemExit) as ended:
        predict_gpu.main(["--model", str(tmp_path / "nope.yaml")])
    error = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and "nope.yaml: no such file" in error
        and len(error.splitlines()) == 1
    )
