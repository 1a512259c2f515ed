"""benchmarks.cpc: the re-creation is the authors' step, and ours equals it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import cpc, measure, run
from omnilead.downstream.interop.ecg_cpc import options_and_weights

REFERENCE = Path(__file__).parents[2].parent / "shared" / "parity" / "ecg_cpc_small"


def test_both_sides_give_the_same_loss_and_gradients():
    torch.manual_seed(0)
    assert cpc.largest_loss_or_gradient_difference() < 2e-5


def test_the_re_creation_gives_the_authors_numbers():
    if not REFERENCE.is_dir():
        pytest.skip("the authors' numbers are not here (../shared/parity)")
    state = load_file(REFERENCE / "state_dict.safetensors")
    options, weights = options_and_weights(state)
    model = cpc.build_pretrainer(**options, dropout=0.0)
    model.encoder.load_state_dict(weights)
    model.plugin.map.weight.data.copy_(state["head_ssl.proj.0.weight"])
    with np.load(REFERENCE / "eval.npz") as results:
        x_RLT, idx_RnK = (torch.from_numpy(results[name]) for name in ("x", "idx"))
        for mode, name in (("eval", "loss"), ("train", "loss_train")):
            theirs = cpc.AuthorsCpcStep(model).train(mode == "train")(x_RLT, idx_RnK)
            assert float(theirs.detach()) == pytest.approx(float(results[name]), rel=1e-6)


@pytest.mark.parametrize(
    ("side", "precision"),
    [(cpc.OURS, "bf16"), (cpc.RECREATION, "fp32"), (cpc.EMBEDDING_SIDE, "bf16")],
)
def test_a_step_of_either_side(side, precision, monkeypatch):
    small = cpc.build_pretrainer
    monkeypatch.setattr(cpc, "build_pretrainer", lambda **options: small(width=16, **options))
    steps = cpc.repeat_steps(cpc.CpcRun(side, precision, batch=2, steps=2))
    next(steps)
    assert next(steps) == 4


def test_the_cases(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "deadline", math.inf)  # of other tests
    facts, cases = cpc.prepare_input_and_cases(tmp_path, run.parse(["cpc", "--batch", "4"]))
    assert list(cases) == [
        "re-creation of ECG-CPC's step: fp32, 4 windows",
        "omnilead: fp32, 4 windows",
        "omnilead, embedding: fp32, 4 windows",
        "omnilead: bf16, 4 windows",
        "omnilead, embedding: bf16, 4 windows",
        "matrix product: fp32",
        "matrix product: bf16",
    ]
    assert facts["loss_difference"] < cpc.GRADIENT_TOLERANCE
    assert facts["gflop_per_crop"] == pytest.approx(5.4, abs=0.1)
