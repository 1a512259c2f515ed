"""An ONNX model reproduces PyTorch at sizes that the exporter has not seen; otherwise no file is
written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import omnilead
from omnilead.engine import convert
from omnilead.engine.interop import onnx as onnx_export

Saved = Callable[..., Path]


def test_onnx_gives_the_same_numbers(saved_model: Saved, tmp_path: Path, capsys: Any) -> None:
    for name in onnx_export.NEEDED:
        pytest.importorskip(name, reason="the extra `onnx` is not installed")
    import onnx
    import onnxruntime

    head = {
        "task": "ef",
        "kind": "regression",
        "classes": ["ef", "qrs"],
        "unit": "%",
        "center": [50.0, 90.0],
    }
    head |= {"scale": [10.0, 20.0], "definition": {}}
    folder, out = saved_model(head=head, leads=3, layers=1), tmp_path / "model.onnx"
    assert convert.main(["to-onnx", str(folder.parent), str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    about = {entry.key: entry.value for entry in onnx.load(out).metadata_props}
    assert json.loads(about["preprocessing"])["leads"] == ["I", "II", "III"]
    assert json.loads(about["config"])["head"] == head and json.loads(about["head"]) == head | {
        "thresholds": [],
        "chosen": [],
        "sha256": "",
    }
    model, session = omnilead.load(folder), onnxruntime.InferenceSession(out)
    signal = np.random.default_rng(0).normal(0, 0.3, (3, 12_000))
    for x_RLT in (
        model.segments(signal, 500, "I,II,III"),
        torch.randn(7, 3, 999),
        torch.randn(1, 3, 64),
    ):
        embedding, logits, scores = session.run(
            ["embedding", "logits", "scores"], {"x": x_RLT.numpy()}
        )
        np.testing.assert_allclose(embedding, model(x_RLT).detach(), atol=1e-5)
        np.testing.assert_allclose(logits, model.logits(x_RLT).detach(), atol=1e-5)
        np.testing.assert_allclose(scores, logits * [10, 20] + [50, 90], rtol=1e-5)
    assert convert.main(["to-onnx", str(folder), str(out)]) == 2  # nothing is overwritten
    for kind, link in (("multilabel", torch.sigmoid), ("multiclass", lambda z_NK: z_NK.softmax(1))):
        head = {"task": "rhythm", "kind": kind, "classes": ["AF", "NSR", "other"]}
        head["thresholds"] = [0.5] * 3 if kind == "multilabel" else []
        of_kind = saved_model(kind, head=head, layers=1)
        assert convert.main(["to-onnx", str(of_kind), str(tmp_path / f"{kind}.onnx")]) == 0
        x_RLT = torch.randn(5, 12, 2500)
        (scores,) = onnxruntime.InferenceSession(tmp_path / f"{kind}.onnx").run(
            ["scores"], {"x": x_RLT.numpy()}
        )
        np.testing.assert_allclose(
            scores, link(omnilead.load(of_kind).logits(x_RLT).detach()), atol=1e-5
        )


def test_wrong_numbers_leave_no_file(
    saved_model: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = saved_model()
    monkeypatch.setattr(onnx_export, "NEEDED", ())
    monkeypatch.setattr(onnx_export, "export", lambda model, path: path.write_text("weights"))
    for seen in (0.01, float("nan")):
        monkeypatch.setattr(
            onnx_export, "difference", lambda *size, seen=seen: seen if size[-1] == 5000 else 0.0
        )
        assert convert.main(["to-onnx", str(folder), str(tmp_path / "a.onnx")]) == 2
        assert "differs from PyTorch" in capsys.readouterr().err
    monkeypatch.setattr(onnx_export, "NEEDED", ("onnx_of_tomorrow",))
    assert convert.main(["to-onnx", str(folder), str(tmp_path / "a.onnx")]) == 2
    assert "omnilead[onnx]" in capsys.readouterr().err and list(tmp_path.iterdir()) == [
        folder.parent
    ]
