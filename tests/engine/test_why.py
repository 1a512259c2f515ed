"""Where a model looks: attributions known by hand, that they add up, and what is refused."""

import re

import numpy as np
import pytest
import torch

import omnilead
from omnilead.__main__ import main
from omnilead.engine.evaluation.probe import probe_model
from omnilead.engine.report import why


def test_of_a_linear_model_they_are_inputs_times_weights():
    """And what adds most is deleted first: the curve follows from the weights."""
    generator = torch.Generator().manual_seed(0)
    x_RLT = torch.randn(2, 3, 100, generator=generator)
    weight_LT = torch.randn(3, 100, generator=generator)
    x_RLT[:, 1] = 0  # a missing lead
    found = why.explain(lambda x, measured: (x * weight_LT).sum((1, 2)) + 5, x_RLT, 20.0)
    torch.testing.assert_close(found.a_RLT, x_RLT * weight_LT / 2, rtol=1e-2, atol=1e-4)
    assert found.of_zeros == pytest.approx(5) and found.measured == 0
    stretches = (x_RLT * weight_LT / 2)[:, [0, 2]].reshape(-1, 2).sum(1).sort(descending=True)[0]
    assert len(stretches) == 200
    expected = [5 + stretches[round(200 * share) :].sum().item() for share in why.SHARES]
    np.testing.assert_allclose(found.curve, expected, atol=1e-4)
    assert len(found.random) == why.DRAWS and found.random[0] != found.random[1]
    assert all(curve[-1] == pytest.approx(5, abs=1e-4) for curve in found.random)
    assert np.mean(found.curve) < np.mean(found.random)


@pytest.mark.parametrize("readout", ["mean", "mean+std+rhythm"])
def test_they_add_up_for_the_shipped_model(readout, dataset, tmp_path, capsys):
    """To 1 %, and without changing what it predicts; drawn from the command line."""
    data, model = dataset.root.url, tmp_path / "model"
    probe_model("small", data, "sex", readout=readout, out=model)
    loaded = omnilead.load(model)
    ecg = dataset[3]
    x_RLT = loaded.input.windows(torch.tensor(ecg.signal_uv)[None], np.array([ecg.halves]))
    before = loaded.logits(x_RLT)
    found = why.explain(why.score_of(loaded, 1), x_RLT, 500.0)
    assert loaded.logits(x_RLT).equal(before)
    change = before[:, 1].mean().item() - found.of_zeros - found.measured
    assert (found.measured != 0) == ("rhythm" in readout)
    assert abs(found.a_RLT.sum().item() - change) <= 0.0101 * max(abs(change), 0.1)
    words = ["show", data, "--crop", "3", "--model", str(model), "--png", str(tmp_path / "a.png")]
    assert main([*words, "--why", "M"]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"value {found.output:+.2f}, the mean over {len(x_RLT)} windows", said)
    assert (tmp_path / "a.png").stat().st_size > 10_000
    for change, says in (
        (["--why", "X"], "--why X: the model's outputs are F, M"),
        (["--why", "M", "--crop", "9999"], "the dataset has crops 0 to"),
        (["--why", "M", "--model", "small"], "the model was only pre-trained"),
    ):
        assert main([*words, *change]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
