"""Where a model looks: attributions known by hand, that they add up, and what is refused."""

from dataclasses import asdict

import numpy as np
import pytest
import torch

import omnilead
from omnilead.__main__ import main
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.engine.data.patients import patient_ids
from omnilead.engine.extras.reports import why
from omnilead.engine.model.config import ModelConfig
from omnilead.engine.model.folder import write
from tests.conftest import save_probed


def test_of_a_linear_model_they_are_inputs_times_weights():
    """And what adds most is deleted first: the curve follows from the weights."""
    generator = torch.Generator().manual_seed(0)
    x_RLT = torch.randn(2, 3, 100, generator=generator)
    weight_LT = torch.randn(3, 100, generator=generator)
    x_RLT[:, 1] = 0  # a missing lead
    found = why.attribute(lambda x, measured: (x * weight_LT).sum((1, 2)) + 5, x_RLT, 20.0)
    torch.testing.assert_close(found.a_RLT, x_RLT * weight_LT / 2, rtol=1e-2, atol=1e-4)
    assert found.of_zeros == pytest.approx(5) and found.measured == 0
    stretches = (x_RLT * weight_LT / 2)[:, [0, 2]].reshape(-1, 2).sum(1).sort(descending=True)[0]
    assert len(stretches) == 200
    expected = [5 + stretches[round(200 * share) :].sum().item() for share in why.SHARES]
    np.testing.assert_allclose(found.curve, expected, atol=1e-4)
    assert len(found.random) == why.DRAWS and found.random[0] != found.random[1]
    assert all(curve[-1] == pytest.approx(5, abs=1e-4) for curve in found.random)
    assert np.mean(found.curve) < np.mean(found.random)


def test_they_add_up_for_the_shipped_model(dataset, tmp_path, capsys, monkeypatch):
    """To 1 %, and without changing what it predicts; drawn from the command line."""
    data, model, table = dataset.root.url, tmp_path / "model", tmp_path / "few.csv"
    rows = np.unique(patient_ids([dataset])[0], return_index=True)[1][:24]
    lines = ["record,M,split"]
    for i, name in enumerate(dataset.column("record")[rows]):
        lines.append(f"{name},{i % 2},{('train', 'valid', 'test')[i // 2 % 3]}")
    table.write_text("\n".join(lines))
    save_probed("small", data, table, model, readout="mean+std+rhythm")
    attribute, seen = why.attribute, []

    def spy(score, x_RLT, fs_hz):
        seen.extend([x_RLT, attribute(score, x_RLT, fs_hz)])
        return seen[1]

    for name, fewer in (("attribute", spy), ("DRAWS", 1), ("SHARES", why.SHARES[::10])):
        monkeypatch.setattr(why, name, fewer)
    words = ["show", data, "--crop", "3", "--model", str(model), "--png", str(tmp_path / "a.png")]
    assert main([*words, "--why", "M"]) == 0
    said = capsys.readouterr().out
    x_RLT, found = seen
    loaded, ecg = omnilead.load(model), dataset[3]
    windows = loaded.input.windows(torch.tensor(ecg.signal_uv)[None], np.array([ecg.halves]))
    before = loaded.logits(x_RLT)
    assert x_RLT.equal(windows) and before.mean().item() == pytest.approx(found.output, abs=1e-5)
    assert why.score_of(loaded, 0)(x_RLT, x_RLT).equal(before[:, 0])
    change = found.output - found.of_zeros - found.measured
    assert found.measured != 0
    assert abs(found.a_RLT.sum().item() - change) <= 0.0101 * max(abs(change), 0.1)
    assert f"value {found.output:+.2f}, the mean over {len(x_RLT)} windows" in said
    assert (tmp_path / "a.png").stat().st_size > 10_000
    for change, says in (
        (["--why", "X"], "--why X: the model's outputs are M"),
        (["--why", "M", "--crop", "9999"], "the dataset has crops 0 to"),
        (["--why", "M", "--model", "small"], "the model was only pre-trained"),
    ):
        assert main([*words, *change]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1


NET = """
import torch
from torch import nn

class Net(nn.Conv1d):
    width = 4

    def __init__(self, leads):
        super().__init__(leads, 4, 10, 10)

    def forward(self, x_RLT):
        return super().forward(x_RLT).mT
"""
HIDDEN = NET.replace("return super", "with torch.no_grad():\n            return super")
HEADS = {
    "age": {"kind": "regression", "classes": ["age"], "center": [50.0], "scale": [3.0]},
    "risk": {"kind": "survival", "classes": ["risk"]},
}


@pytest.mark.parametrize("name", HEADS)
def test_of_a_plugged_in_encoder_they_are_inputs_times_weights(name, tmp_path, capsys):
    """For a value and a risk, of an array with two windows of 10 s at 100 Hz, of two leads."""
    shapes = {
        "encoder.weight": (4, 12, 10),
        "encoder.bias": (4,),
        "head.weight": (1, 4),
        "head.bias": (1,),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    document = {"model": asdict(ModelConfig(encoder="net.py:Net")), "trained": {"rlm": 0.5}}
    document["head"] = {"task": "t"} | HEADS[name]
    signals = {"fs_hz": 100.0, "segment_s": 10.0, "scale": "millivolt", "leads": list(LEADS)}
    for folder, source in (("model", NET), ("hidden", HIDDEN)):
        write(tmp_path / folder, weights, document, signals, code={"net.py": source.encode()})
    model = omnilead.load(tmp_path / "model", code=True)
    mv_LT = np.random.default_rng(0).normal(0, 0.3, (2, 6500))
    np.save(tmp_path / "a.npy", mv_LT)

    x_RLT = model.segments(mv_LT, 250, "II,V1")
    found = why.attribute(why.score_of(model, 0), x_RLT, 100.0)
    weight_L10 = torch.einsum("d,dlk->lk", weights["head.weight"][0], weights["encoder.weight"])
    expected = x_RLT * weight_L10.repeat(1, 100) / 100 / 2 * HEADS[name].get("scale", [1.0])[0]
    assert x_RLT.shape == (2, 12, 1000)
    torch.testing.assert_close(found.a_RLT, expected, rtol=1e-2, atol=1e-6)

    words = ["show", tmp_path / "a.npy", "--fs", 250, "--leads", "II,V1", "--code", "--why", name]
    words += ["--png", tmp_path / "a.png", "--model"]
    assert main([*map(str, words), str(tmp_path / "model")]) == 0
    value = model.predict(mv_LT, 250, "II,V1")[name]
    says = (
        f"{name}: {value:.3g} in a, from 0 s\nLogit or value {value:+.2f}, the mean over 2 windows"
    )
    assert says in capsys.readouterr().out
    assert main([*map(str, words), str(tmp_path / "hidden")]) == 2
    assert "the model's output has no gradient" in capsys.readouterr().err
