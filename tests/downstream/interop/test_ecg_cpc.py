"""convert from-ecg-cpc: the authors' names, wrapped as Lightning writes them; what does not fit; use."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import omnilead
from omnilead.__main__ import main
from omnilead.downstream import convert
from omnilead.downstream.interop.ecg_cpc import KERNEL, LAYER_PREFIX, NORM_PREFIX, STEM_PREFIX
from omnilead.downstream.interop.onnx import NEEDED_PACKAGES
from omnilead.engine.model.s4 import S4, conjugate_pair_basis

PARITY = Path(__file__).parents[3].parent / "shared" / "parity" / "ecg_cpc_small"
WIDTH, LENGTH = 16, 40


def their_state(encoder):
    """A state_dict by the authors' names, with eigenvectors of other phases than ours."""
    ours, state = encoder.state_dict(), {}
    for i in range(len(encoder.stem)):
        state[f"{STEM_PREFIX}.{i}.0.weight"] = ours[f"stem.{i}.weight"]
        for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            state[f"{STEM_PREFIX}.{i}.1.{part}"] = ours[f"stem.{i}.norm.{part}"]
    w, p, _ = map(torch.from_numpy, conjugate_pair_basis(8))
    for i in range(len(encoder.layers)):
        own, theirs = f"layers.{i}", f"{LAYER_PREFIX}.{i}"
        phase = torch.polar(torch.ones(4), torch.arange(4.0) + i)
        frozen = {"P": p * phase, "Q": p * phase.conj(), "B": p * phase * 2**0.5}
        c = torch.view_as_complex(ours[f"{own}.space.C"]) / phase
        for name, values in (frozen | {"C": c}).items():
            values = values.to(torch.complex64).expand(len(c), WIDTH, 4)
            state[f"{theirs}.{KERNEL}.{name}"] = torch.view_as_real(values).clone()
        numbers = torch.view_as_real(w.to(torch.complex64).expand(WIDTH, 4))
        state[f"{theirs}.{KERNEL}.w"] = numbers.clone()
        for name in ("omega", "z"):
            state[f"{theirs}.{KERNEL}.{name}"] = torch.zeros(LENGTH // 2 + 1, 2)
        state[f"{theirs}.{KERNEL}.log_dt"] = ours[f"{own}.space.log_dt"]
        state[f"{theirs}.D"] = ours[f"{own}.space.D"][None]
        state[f"{theirs}.output_linear.0.weight"] = ours[f"{own}.linear.weight"]
        state[f"{theirs}.output_linear.0.bias"] = ours[f"{own}.linear.bias"][:, None]
        for part in ("weight", "bias"):
            state[f"{NORM_PREFIX}.{i}.{part}"] = ours[f"{own}.norm.{part}"]
    return state | {"head_ssl.proj.0.weight": torch.randn(WIDTH, WIDTH)}


def made(bidirectional=False):
    torch.manual_seed(0)
    encoder = S4(12, WIDTH, 2, bidirectional=bidirectional, norm="batch", length=LENGTH)
    for block in encoder.stem:
        block.norm.running_mean.normal_()
        block.norm.running_var.uniform_(0.5, 2)
    return encoder.eval(), their_state(encoder)


def lightning(path, state, prefix="model.", **more):
    """As Lightning 2 writes a checkpoint."""
    optimizer = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-3}]}
    checkpoint = {
        "epoch": 9,
        "global_step": 100,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": {prefix + name: w for name, w in state.items()},
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "x"}},
        "optimizer_states": [optimizer],
        "lr_schedulers": [],
        "hparams_name": "hparams",
        "hyper_parameters": {"lr": 1e-3},
        **more,
    }
    torch.save(checkpoint, path)
    return path


class Settings:
    def __init__(self):
        self.lr = 1e-3


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_checkpoint_becomes_a_model(bidirectional, prefix, tmp_path, capsys):
    encoder, state = made(bidirectional)
    path = lightning(tmp_path / "last.ckpt", state, prefix, hyper_parameters={"config": Settings()})
    assert convert.main(["from-ecg-cpc", str(path), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "240 Hz, 2.5 s at a time, limited to +-3 mV, millivolts, not normalised" in said
    assert "left out, as they are heads: head_ssl.proj.0.weight" in said
    model = omnilead.load(tmp_path / "out")
    x_RLT = torch.randn(3, 12, 600)
    torch.testing.assert_close(model.encoder(x_RLT), encoder(x_RLT), rtol=1e-5, atol=1e-5)
    uv_LT = np.random.default_rng(0).normal(0, 200, (12, 5000))
    uv_LT += 4000 * np.sin(np.arange(5000) * 2 * np.pi / 5000)  # slowly above 3 mV
    windows_RLT = model.segments(uv_LT, 500, "12", "uV")
    assert windows_RLT.shape == (4, 12, 600) and windows_RLT.abs().max() == 3
    expected_D = encoder(windows_RLT).mean((0, 1)).detach()
    embedded = model.embed(uv_LT, 500, "12", "uV")
    np.testing.assert_allclose(embedded, expected_D, rtol=1e-4, atol=1e-5)


def test_the_authors_weights_give_the_authors_numbers(tmp_path):
    if not PARITY.is_dir():
        pytest.skip("the authors' numbers are not here (../shared/parity)")
    path = lightning(tmp_path / "last.ckpt", load_file(PARITY / "state_dict.safetensors"))
    assert convert.main(["from-ecg-cpc", str(path), str(tmp_path / "out")]) == 0
    model = omnilead.load(tmp_path / "out")
    with np.load(PARITY / "eval.npz") as results:
        context_RND = model.encoder(torch.from_numpy(results["x"])).detach()
        np.testing.assert_allclose(context_RND, results["context"], atol=1e-5)


def test_it_is_embedded_exported_and_fine_tuned(dataset, tmp_path):
    _, state = made()
    path, model = lightning(tmp_path / "last.ckpt", state), str(tmp_path / "model")
    assert convert.main(["from-ecg-cpc", str(path), model]) == 0
    out = str(tmp_path / "embeddings.parquet")
    assert main(["embed", "--model", model, "--data", dataset.root.url, "--out", out]) == 0
    how = ["--start", model, "--data", dataset.root.url, "--out", str(tmp_path / "tuned")]
    how += ["--task", "diagnosis", "--set", "train.steps=2", "train.epochs=null"]
    how += ["train.batch_crops=8", "train.precision=fp32", "train.peak_tflops=1.0"]
    assert main(["finetune", *how, "train.lr_factors={stem: 0.01, context: 0.1}"]) == 0
    tuned = omnilead.load(tmp_path / "tuned")
    assert tuned.input.clip_mv == 3 and tuned.config["model"]["options"]["length"] == LENGTH
    for name in NEEDED_PACKAGES:
        pytest.importorskip(name, reason="the extra `onnx` is not installed")
    onnx = tmp_path / "model.onnx"
    assert convert.main(["to-onnx", str(tmp_path / "tuned"), str(onnx)]) == 0 and onnx.exists()


def other(name, change):
    def harm(state):
        state[name] = change(state[name])

    return harm


FIRST = f"{LAYER_PREFIX}.0.{KERNEL}"
HARMS = {
    "no network": (
        lambda state: state.clear(),
        "0 weights instead of one have a name that ends in",
    ),
    "missing": (
        lambda state: state.pop(f"{NORM_PREFIX}.1.bias"),
        f"1 missing: {NORM_PREFIX}.1.bias",
    ),
    "unknown": (
        lambda state: state.update({"predictor.extra": torch.ones(3)}),
        "1 unexpected: predictor.extra",
    ),
    "another shape": (
        other(f"{NORM_PREFIX}.1.bias", lambda w: w[:5]),
        f"{NORM_PREFIX}.1.bias has shape [5], not [16]",
    ),
    "turned round": (
        other(f"{LAYER_PREFIX}.1.output_linear.0.weight", lambda w: w.T),
        "output_linear.0.weight has shape [16, 32], not [32, 16]",
    ),
    "another A": (other(f"{FIRST}.w", lambda w: w * 1.1), f"{FIRST}.w is not that of HiPPO-LegS"),
    "another B": (other(f"{FIRST}.B", lambda b: -b), f"{FIRST}.B is not that of HiPPO-LegS"),
    "no S4": (lambda state: state.pop(f"{FIRST}.C"), "some weights of S4 are missing"),
    "integers": (other(f"{FIRST}.C", lambda c: c.long()), "is torch.int64"),
    "NaN": (other(f"{FIRST}.C", lambda c: c * torch.nan), "has NaN or infinity"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_does_not_fit_is_one_line(harm, tmp_path, capsys):
    _, state = made()
    damage, says = HARMS[harm]
    damage(state)
    path = lightning(tmp_path / "last.ckpt", state | {"other": torch.ones(1)})
    assert convert.main(["from-ecg-cpc", str(path), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and says in said and str(path) in said, said
    assert not (tmp_path / "out").exists()


def test_nothing_in_a_checkpoint_runs(tmp_path, capsys):
    class Harm:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    _, state = made()
    path = lightning(tmp_path / "last.ckpt", state, hyper_parameters=Harm())
    convert.main(["from-ecg-cpc", str(path), str(tmp_path / "out")])
    assert not (tmp_path / "ran").exists()
