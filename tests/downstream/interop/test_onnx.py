"""An ONNX model reproduces PyTorch at sizes that the exporter has not seen; otherwise no file is
written."""

import json

import numpy as np
import pytest
import torch

import omnilead
from omnilead.downstream import convert
from omnilead.downstream.interop import onnx as onnx_export
from omnilead.downstream.tasks.classifier import build_head

EF = {"task": "ef", "kind": "regression", "classes": ["ef", "qrs"], "unit": "%"}
EF |= {"center": [50.0, 90.0], "scale": [10.0, 20.0]}
RHYTHM = {"task": "rhythm", "kind": "multiclass", "classes": ["AF", "NSR"]}


def exported(folder, out):
    import onnxruntime

    assert convert.main(["to-onnx", str(folder), str(out)]) == 0
    return onnxruntime.InferenceSession(out)


def test_onnx_gives_the_same_numbers(saved_model, tmp_path, capsys):
    for name in onnx_export.NEEDED_PACKAGES:
        pytest.importorskip(name, reason="the extra `onnx` is not installed")
    import onnx

    torch.manual_seed(0)  # by chance a score can be near 0, where 50 and 90 leave rounding errors
    folder, out = saved_model(head=EF, leads=3, layers=1), tmp_path / "model.onnx"
    model, session = omnilead.load(folder), exported(folder.parent, out)
    assert str(out) in capsys.readouterr().out
    graph = onnx.load(out)
    about = {entry.key: json.loads(entry.value) for entry in graph.metadata_props}
    attentions = [node.op_type for node in graph.graph.node if node.op_type == "Softmax"]
    assert len(attentions) == 1  # one layer: the encoder is computed once
    assert about["preprocessing"]["leads"] == ["I", "II", "III"] and about["config"]["head"] == EF
    assert about["head"].items() >= (EF | {"thresholds": [], "chosen": []}).items()
    record = model.segments(np.random.default_rng(0).normal(0, 0.3, (3, 12_000)), 500, "I,II,III")
    for x_RLT in (record, torch.randn(7, 3, 999), torch.randn(1, 3, 64)):
        names = ["embedding", "logits", "scores"]
        embedding, logits, scores = session.run(names, {"x": x_RLT.numpy()})
        np.testing.assert_allclose(embedding, model(x_RLT).detach(), atol=1e-5)
        np.testing.assert_allclose(logits, model.logits(x_RLT).detach(), atol=1e-5)
        np.testing.assert_allclose(scores, logits * [10, 20] + [50, 90], rtol=1e-5)
    assert convert.main(["to-onnx", str(folder), str(out)]) == 2  # nothing is overwritten
    x_RLT = torch.randn(5, 12, 2500)
    folder = saved_model("rhythm", head=RHYTHM, layers=1)
    (scores,) = exported(folder, tmp_path / "b.onnx").run(["scores"], {"x": x_RLT.numpy()})
    expected = omnilead.load(folder).logits(x_RLT).detach().softmax(1)
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_onnx_gives_the_same_numbers_of_a_head_that_sees_all_tokens(saved_model, tmp_path):
    for name in onnx_export.NEEDED_PACKAGES:
        pytest.importorskip(name, reason="the extra `onnx` is not installed")
    import onnxruntime

    torch.manual_seed(0)
    model, out = omnilead.load(saved_model(head=RHYTHM, layers=1)), tmp_path / "model.onnx"
    model.head = build_head("attention", {"heads": 4}, 32, 2)
    onnx_export.to_onnx(model, out)
    session = onnxruntime.InferenceSession(out)
    for x_RLT in (torch.randn(5, 12, 2500), torch.randn(1, 12, 999)):
        scores, logits = session.run(["scores", "logits"], {"x": x_RLT.numpy()})
        expected = model.head(model.tokens(x_RLT)).detach()
        np.testing.assert_allclose(logits, expected, atol=1e-5)
        np.testing.assert_allclose(scores, expected.softmax(1), atol=1e-5)


def test_wrong_numbers_leave_no_file(saved_model, tmp_path, monkeypatch, capsys):
    folder, out = saved_model(), str(tmp_path / "a.onnx")
    monkeypatch.setattr(onnx_export, "NEEDED_PACKAGES", ())
    monkeypatch.setattr(onnx_export, "write_onnx", lambda model, path: path.write_text("weights"))
    for seen in (0.01, float("nan")):
        monkeypatch.setattr(
            onnx_export,
            "largest_difference",
            lambda *size, seen=seen: seen if size[-1] == 5000 else 0.0,
        )
        assert convert.main(["to-onnx", str(folder), out]) == 2
        assert "differs from PyTorch" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [folder.parent]
