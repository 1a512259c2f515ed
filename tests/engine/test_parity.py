"""engine.parity: our numbers are the authors', and it says so only when they are."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import parity
from engine.model.config import ModelConfig
from engine.model.fairseq import names, spelling, their_settings, theirs
from engine.model.pretrainer import Pretrainer
from engine.model.reference import read_cases
from engine.objectives.config import ObjectiveConfig

torch.set_num_threads(1)  # small tensors: threads would only wait for each other
REFERENCE = Path(__file__).parents[2].parent / "shared" / "parity"


@pytest.fixture(scope="module")
def reference() -> Path:
    if not REFERENCE.is_dir():
        pytest.skip("the authors' numbers are not here (../shared/parity)")
    return REFERENCE


def copied(reference: Path, out: Path, **renamed: str) -> Path:
    out.mkdir()
    for path in reference.glob("small_*"):
        if "checkpoint" not in path.name:
            shutil.copy(path, out / path.name)
            (out / path.name).chmod(0o644)
    return out


def test_everything_agrees_with_the_authors(reference: Path, tmp_path: Path) -> None:
    assert parity.main([str(reference), "--json", str(tmp_path / "table.json")]) == 0
    table = {(row["case"], row["quantity"]): row for row in json.loads((tmp_path / "table.json").read_text())}
    assert all(row["holds"] for row in table.values())
    for quantity in ("conv_features", "logits_NBM", "projected_targets", "loss_0_sum", "loss_3_sum", "loss_total_sum"):
        for mode in ("eval", "train"):
            assert table[f"small {mode}", quantity]["error"] < 1e-5
    assert sum(quantity.startswith("gradient of") for _, quantity in table) == 55
    assert sum(quantity.startswith("after 3 steps") for _, quantity in table) == 55
    assert table["small train", "change in 3 steps, all parameters"]["error"] < 1e-3


def test_padded_slots_give_the_same_losses(reference: Path) -> None:
    (case,) = read_cases(reference)
    tight, padded = (parity.Runner(case, "train", count) for count in (None, 110))
    one, other = tight.losses(), padded.losses()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6)


def test_a_changed_weight_does_not_agree(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(reference, tmp_path / "changed")
    state = load_file(folder / "small_state_dict.safetensors")
    state["encoder.layers.0.fc1.weight"][3, 5] += 0.01
    save_file(state, folder / "small_state_dict.safetensors")
    assert parity.main([str(folder)]) == 1
    assert "DOES NOT HOLD" in capsys.readouterr().out


def test_another_name_and_only_one_mode(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "named"
    folder.mkdir()
    for name in ("cfg.json", "state_dict.safetensors", "eval.npz"):
        shutil.copy(reference / f"small_{name}", folder / f"other_{name}")
    assert parity.main([str(folder)]) == 0


def arrays_without(path: Path, key: str) -> None:
    with np.load(path) as arrays:
        left = {name: arrays[name] for name in arrays.files if name != key}
    np.savez(path, **left)


@pytest.mark.parametrize("harm", ["nothing there", "no array", "cut", "weights", "settings", "negatives"])
def test_wrong_input_is_one_line_and_exit_2(
    harm: str, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(reference, tmp_path / "harmed")
    if harm == "nothing there":
        folder = tmp_path / "absent"
    elif harm == "no array":
        arrays_without(folder / "small_eval.npz", "mask_indices")
    elif harm == "cut":
        (folder / "small_train.npz").write_bytes((folder / "small_train.npz").read_bytes()[:1000])
    elif harm == "weights":
        state = load_file(folder / "small_state_dict.safetensors")
        del state["mask_emb"]
        save_file(state, folder / "small_state_dict.safetensors")
    elif harm == "settings":
        (folder / "small_cfg.json").write_text("{}")
    else:
        arrays_without(folder / "small_eval.npz", "neg_idxs")
    assert parity.main([str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "Traceback" not in captured.err


@pytest.mark.parametrize("conv_norm", ["group", "layer"])
def test_names_are_exact_both_ways(conv_norm: str) -> None:
    """Without reference numbers: what goes to the authors' names and comes back is the same, bit for bit."""
    from engine.model.fairseq import ours, settings

    config = ModelConfig(
        conv=((16, 2), (32, 4)), conv_norm=conv_norm, width=32, layers=2, heads=4, ffn=48, codes=8, code_width=16
    )  # type: ignore[arg-type]
    assert settings(their_settings(config)["model"]) == config
    state = Pretrainer(config, ObjectiveConfig()).state_dict()
    for spelled in ("parametrizations", "weight_g"):
        there = theirs(state, config, spelled)  # type: ignore[arg-type]
        assert spelling(there) == spelled
        assert "post_extract_proj.weight" not in there  # features are as wide as the encoder
        back = ours(there, config)
        assert back.keys() == state.keys() == names(config).keys()
        assert all(torch.equal(back[name], state[name]) for name in state)


def test_weights_mean_what_the_authors_mean() -> None:
    """Which third of our fused map is the query's, and how a convolution's weight lies, told by plain code on their names."""
    config = ModelConfig(conv=((8, 2), (8, 4)), conv_norm="layer", width=8, layers=1, heads=2, ffn=8, position_groups=2)
    model = Pretrainer(config, ObjectiveConfig(), generator=torch.Generator().manual_seed(0)).eval()
    their = theirs(model.state_dict(), config)
    x = torch.randn(2, 12, 64)
    first = model.encoder.conv.blocks[0]
    wanted = torch.conv1d(x, their["feature_extractor.conv_layers.0.0.weight"], stride=2).transpose(1, 2)
    wanted = torch.nn.functional.gelu(torch.layer_norm(wanted, (8,), first.norm.weight, first.norm.bias))
    torch.testing.assert_close(first(x.transpose(1, 2), 32), wanted)
    tokens, kind = torch.randn(2, 9, 8), "encoder.layers.0.self_attn."
    maps = (their[f"{kind}{p}_proj.weight"] * 20 for p in "qkv")  # as drawn they are so small that attention is even
    q, k, v = ((tokens @ weight.t()).view(2, 9, 2, 4).transpose(1, 2) for weight in maps)
    mixed = ((q @ k.transpose(-1, -2) / 2).softmax(-1) @ v).transpose(1, 2).reshape(2, 9, 8)
    attention = model.encoder.layers[0].attention
    attention.qkv.weight.data.mul_(20)
    torch.testing.assert_close(attention(tokens), mixed @ their[kind + "out_proj.weight"].t(), rtol=1e-4, atol=1e-6)
