"""tests/parity.py: our numbers are the authors', and a difference is noticed."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from omnilead.downstream.interop.fairseq import (
    fairseq_names,
    fairseq_settings,
    read_model_config,
    weight_norm_spelling,
    weights_from_fairseq,
    weights_to_fairseq,
)
from omnilead.engine.model.config import ModelConfig, ObjectiveConfig
from omnilead.engine.model.pretrainer import Pretrainer
from tests import parity

torch.set_num_threads(1)  # small tensors: threads would only wait for each other
REFERENCE = Path(__file__).parents[2].parent / "shared" / "parity"
GRADIENTS, AFTER = "train_grads_of_sum_loss", "state_dict_after_3_steps"


@pytest.fixture(scope="module")
def reference():
    if not REFERENCE.is_dir():
        pytest.skip("the authors' numbers are not here (../shared/parity)")
    return REFERENCE


@pytest.fixture
def folder(reference, tmp_path):
    """A copy to damage."""
    out = tmp_path / "copy"
    out.mkdir()
    for path in reference.glob("small_*"):
        if "checkpoint" not in path.name:
            shutil.copyfile(path, out / path.name)
    return out


def only(folder, mode):
    for path in folder.glob(f"small_{'eval' if mode == 'train' else 'train'}*"):
        path.unlink()
    if mode == "eval":
        (folder / f"small_{AFTER}.safetensors").unlink()


def test_everything_agrees_with_the_authors(reference):
    table = {(one.case, one.quantity): one for one in parity.compare(reference)}
    assert all(one.holds for one in table.values())
    for quantity in (
        "conv_features",
        "logits_NBM",
        "projected_targets",
        "loss_0_sum",
        "loss_3_sum",
        "loss_total_sum",
    ):
        for mode in ("eval", "train"):
            assert table[f"small {mode}", quantity].error < 1e-5
    assert sum(quantity.startswith("gradient of") for _, quantity in table) == 55
    assert sum(quantity.startswith("after 3 steps") for _, quantity in table) == 55
    assert table["small train", "change in 3 steps, all parameters"].error < 3e-4


def test_one_mode_older_names_and_results_that_are_not_compared(folder, capsys):
    only(folder, "eval")
    (folder / f"small_{GRADIENTS}.safetensors").unlink(missing_ok=True)
    path = folder / "small_state_dict.safetensors"
    state = {
        name.replace("parametrizations.weight.original", "weight_"): w
        for name, w in load_file(path).items()
    }
    save_file(
        {re.sub("_0$", "_g", re.sub("_1$", "_v", name)): w for name, w in state.items()}, path
    )
    rewrite(folder / "small_eval.npz", lambda arrays: arrays | {"logits_NMB": np.zeros(3)})
    assert parity.main([str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "logits_NBM" in out and "gradient of" not in out and "small train" not in out
    assert (
        err.count("\n") == 3
        and "logits_NMB" in err
        and all(f"small_{name}.safetensors" in err for name in (GRADIENTS, AFTER))
    )


def weights(folder, change):
    state = load_file(folder / "small_state_dict.safetensors")
    change(state)
    save_file(state, folder / "small_state_dict.safetensors")


def changed_weight(folder):
    only(folder, "eval")
    weights(folder, lambda state: state["encoder.layers.0.fc1.weight"][3, 5].add_(0.01))


def other_decay(folder):
    only(folder, "train")
    edit(folder, optimizer={"weight_decay": 0.0})


def unmoved_weights(folder):
    only(folder, "train")
    shutil.copy(folder / "small_state_dict.safetensors", folder / f"small_{AFTER}.safetensors")


@pytest.mark.parametrize(
    "harm, text",
    [
        (changed_weight, "logits_NBM"),
        (other_decay, "change in 3 steps"),
        (unmoved_weights, "change in 3 steps"),
    ],
)
def test_a_difference_is_noticed(harm, text, folder, capsys):
    harm(folder)
    assert parity.main([str(folder)]) == 1
    wrong = [
        line for line in capsys.readouterr().out.splitlines() if line.endswith("DOES NOT HOLD")
    ]
    assert any(text in line for line in wrong)
    assert harm is not other_decay or len(wrong) == 1


def edit(folder, **sections):
    path = folder / "small_cfg.json"
    cfg = json.loads(path.read_text())
    path.write_text(
        json.dumps(cfg | {name: cfg[name] | values for name, values in sections.items()})
    )


def rewrite(path, change):
    with np.load(path) as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    np.savez(path, **change(kept))


def change(folder, **changes):
    rewrite(
        folder / "small_eval.npz",
        lambda arrays: arrays | {name: form(arrays[name]) for name, form in changes.items()},
    )


def keep(folder, names):
    rewrite(
        folder / "small_eval.npz",
        lambda arrays: {name: arrays[name] for name in names & arrays.keys()},
    )


HARMS = {
    "nothing there": (shutil.rmtree, "NAME_cfg.json"),
    "cut": (
        lambda d: (d / "small_eval.npz").write_bytes((d / "small_eval.npz").read_bytes()[:1000]),
        "cannot be read",
    ),
    "no array": (lambda d: keep(d, {"source", "segment"}), "mask_indices"),
    "a missing weight": (
        lambda d: weights(d, lambda state: state.pop("mask_emb")),
        "1 missing: mask_emb",
    ),
    "settings": (lambda d: (d / "small_cfg.json").write_text("[" * 100_000), "RecursionError"),
    "no weights": (lambda d: (d / "small_state_dict.safetensors").unlink(), "NAME_state_dict"),
    "other shape": (lambda d: change(d, source=lambda x: x[:, :5]), "RuntimeError"),
    "betas": (lambda d: edit(d, optimizer={"adam_betas": "(0.9,)"}), "not enough values"),
    "inputs only": (lambda d: keep(d, parity.INPUTS), "has only inputs"),
    "ragged mask": (
        lambda d: change(d, mask_indices=lambda x: x & (np.arange(len(x)) > 0)[:, None]),
        "the same number of tokens",
    ),
    "segments": (lambda d: change(d, segment=lambda x: x[::-1]), "segment is not"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_wrong_input_is_one_line_and_exit_2(harm, folder, capsys):
    damage, text = HARMS[harm]
    damage(folder)
    assert parity.main([str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and text in captured.err


@pytest.mark.parametrize("conv_norm", ["group", "layer"])
def test_names_are_exact_both_ways(conv_norm):
    """Needs no reference numbers: weights converted to the authors' names and back are the same,
    bit for bit."""
    sizes = {
        "conv": ((16, 2), (32, 4)),
        "width": 32,
        "layers": 2,
        "heads": 4,
        "ffn": 48,
        "codes": 8,
        "code_width": 16,
    }
    config = ModelConfig(conv_norm=conv_norm, **sizes)  # type: ignore[arg-type]
    assert read_model_config(fairseq_settings(config)["model"]) == config
    state = Pretrainer(config, ObjectiveConfig()).state_dict()
    for spelled in ("parametrizations", "weight_g"):
        there = weights_to_fairseq(state, config, spelled)
        assert weight_norm_spelling(there) == spelled
        assert "post_extract_proj.weight" not in there  # features are as wide as the encoder
        back = weights_from_fairseq(there, config)
        assert back.keys() == state.keys() == fairseq_names(config).keys()
        assert all(torch.equal(back[name], state[name]) for name in state)


def test_the_layout_of_weights_is_the_authors():
    """Which third of our fused projection is the query's, and how convolution weights are laid out,
    by plain code on theirs."""
    config = ModelConfig(
        conv=((8, 2), (8, 4)),
        conv_norm="layer",
        width=8,
        layers=1,
        heads=2,
        ffn=8,
        position_groups=2,
    )
    model = Pretrainer(config, ObjectiveConfig(), generator=torch.Generator().manual_seed(0)).eval()
    their = weights_to_fairseq(model.state_dict(), config)
    x = torch.randn(2, 12, 64)
    first = model.encoder.conv.blocks[0]
    expected = torch.conv1d(
        x, their["feature_extractor.conv_layers.0.0.weight"], stride=2
    ).transpose(1, 2)
    expected = torch.nn.functional.gelu(
        torch.layer_norm(expected, (8,), first.norm.weight, first.norm.bias)
    )
    torch.testing.assert_close(first(x.transpose(1, 2)), expected)
    tokens, kind = torch.randn(2, 9, 8), "encoder.layers.0.self_attn."
    maps = (
        their[f"{kind}{p}_proj.weight"] * 20 for p in "qkv"
    )  # as drawn they are so small that attention is even
    q, k, v = ((tokens @ weight.t()).view(2, 9, 2, 4).transpose(1, 2) for weight in maps)
    mixed = ((q @ k.transpose(-1, -2) / 2).softmax(-1) @ v).transpose(1, 2).reshape(2, 9, 8)
    attention = model.encoder.layers[0].attention
    attention.qkv.weight.data.mul_(20)
    torch.testing.assert_close(
        attention(tokens), mixed @ their[kind + "out_proj.weight"].t(), rtol=1e-4, atol=1e-6
    )
