"""engine.parity: our numbers are the authors', and it says so only when they are."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import parity
from engine.model.config import ModelConfig, ObjectiveConfig
from engine.model.fairseq import names, spelling, their_settings, theirs
from engine.model.pretrainer import Pretrainer
from engine.model.reference import read_cases

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
    assert table["small train", "change in 3 steps, all parameters"]["error"] < 3e-4


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


def test_another_weight_decay_does_not_agree(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(reference, tmp_path / "decay")
    edit(folder, optimizer={"weight_decay": 0.0})
    assert parity.main([str(folder)]) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if line.endswith("DOES NOT HOLD")]
    assert len(told) == 1 and "change in 3 steps" in told[0]


def test_both_spellings_and_either_byte_order(reference: Path, tmp_path: Path) -> None:
    folder = copied(reference, tmp_path / "spelled")
    for path in folder.glob("*.safetensors"):
        state = {name.replace("parametrizations.weight.original", "weight_"): w for name, w in load_file(path).items()}
        save_file({re.sub("_0$", "_g", re.sub("_1$", "_v", name)): w for name, w in state.items()}, path)
    change(folder, "eval", source=lambda x: x.astype(">f4"), neg_idxs=lambda x: x.astype(">i4"))
    assert parity.main([str(folder)]) == 0


def edit(folder: Path, **sections: dict[str, Any]) -> None:
    path = folder / "small_cfg.json"
    cfg = json.loads(path.read_text())
    path.write_text(json.dumps(cfg | {name: cfg[name] | values for name, values in sections.items()}))


def rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    with np.load(path) as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    np.savez(path, **change(kept))


def change(folder: Path, mode: str, **changes: Callable[[np.ndarray], np.ndarray]) -> None:
    rewrite(folder / f"small_{mode}.npz", lambda arrays: arrays | {name: form(arrays[name]) for name, form in changes.items()})


def drop(folder: Path, *names: str) -> None:
    rewrite(folder / "small_eval.npz", lambda arrays: {name: a for name, a in arrays.items() if name not in names})


def tensor(folder: Path, which: str, new: torch.Tensor | None) -> None:
    path = folder / f"small_{which}.safetensors"
    state = load_file(path)
    del state["mask_emb"]
    save_file(state | ({} if new is None else {"mask_emb": new}), path)


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def only_inputs(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: arrays[name] for name in ("source", "mask_indices", "neg_idxs", "patient_id", "segment")}


GRADIENTS, AFTER = "train_grads_of_sum_loss", "state_dict_after_3_steps"
HARMS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing there": (shutil.rmtree, "no such directory"),
    "no array": (lambda d: drop(d, "mask_indices"), "lacks mask_indices"),
    "no negatives": (lambda d: drop(d, "neg_idxs"), "lacks neg_idxs"),
    "cut": (lambda d: (d / "small_train.npz").write_bytes((d / "small_train.npz").read_bytes()[:1000]), "cannot be read"),
    "weights": (lambda d: tensor(d, "state_dict", None), "mask_emb"),
    "integer weights": (lambda d: tensor(d, "state_dict", torch.arange(48)), "mask_emb (torch.int64)"),
    "settings": (lambda d: (d / "small_cfg.json").write_text("{}"), "cannot be read"),
    "deep settings": (lambda d: (d / "small_cfg.json").write_text("[" * 100_000), "RecursionError"),
    "no settings": (lambda d: (d / "small_cfg.json").unlink(), "small_cfg.json"),
    "no weights": (lambda d: (d / "small_state_dict.safetensors").unlink(), "small_state_dict"),
    "a directory": (lambda d: as_directory(d / "small_eval.npz"), "small_eval.npz"),
    "inputs only": (lambda d: rewrite(d / "small_eval.npz", only_inputs), "small eval: holds inputs only"),
    "gradient's shape": (lambda d: tensor(d, GRADIENTS, torch.zeros(3)), "mask_emb"),
    "gradient of no size": (lambda d: tensor(d, GRADIENTS, torch.zeros(0)), "mask_emb"),
    "later shape": (lambda d: tensor(d, AFTER, torch.ones(3)), "mask_emb"),
    "mask of numbers": (lambda d: change(d, "eval", mask_indices=lambda x: x.astype("i8")), "mask_indices (int64)"),
    "negatives no numbers": (lambda d: change(d, "eval", neg_idxs=lambda x: x.astype("f4")), "neg_idxs (float32)"),
    "texts": (lambda d: change(d, "eval", source=lambda x: x[..., :9].astype(str), loss_0_sum=lambda x: x.astype(str)), "(<U"),
    "complex": (lambda d: change(d, "eval", source=lambda x: x.astype(complex)), "source (complex128)"),
    "temperatures": (lambda d: change(d, "train", temp=lambda x: np.ones(2)), "temp does not fit"),
    "ids": (lambda d: change(d, "eval", patient_id=lambda x: x[:, None]), "patient_id does not fit"),
    "segments": (lambda d: change(d, "eval", segment=lambda x: x[:3]), "segment is not"),
    "lr": (lambda d: edit(d, optimization={"lr": ["x"]}), "'x'"),
    "eps": (lambda d: edit(d, optimizer={"adam_eps": "x"}), "'x'"),
    "decay": (lambda d: edit(d, optimizer={"weight_decay": None}), "NoneType"),
    "betas": (lambda d: edit(d, optimizer={"adam_betas": "(0.9,)"}), "not enough values"),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
def test_wrong_input_is_one_line_and_exit_2(
    harm: str, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(reference, tmp_path / "harmed")
    damage, told = HARMS[harm]
    damage(folder)
    assert parity.main([str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and told in captured.err


def test_what_is_not_compared_is_said(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(reference, tmp_path / "more")
    rewrite(folder / "small_eval.npz", lambda arrays: arrays | {"logits_NMB": np.zeros(3)})
    assert parity.main([str(folder)]) == 0
    assert "small eval: not compared, being no quantity of ours: logits_NMB" in capsys.readouterr().err


@pytest.mark.parametrize(("gone", "gradients", "after"), [((GRADIENTS,), 0, 55), ((AFTER,), 55, 0), ((GRADIENTS, AFTER), 0, 0)])
def test_what_is_there_is_compared_and_what_is_not_is_listed(
    gone: tuple[str, ...], gradients: int, after: int, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(reference, tmp_path / "part")
    for which in gone:
        (folder / f"small_{which}.safetensors").unlink()
    assert parity.main([str(folder)]) == 0
    out, err = capsys.readouterr()
    assert (out.count("gradient of "), out.count("after 3 steps, ")) == (gradients, after) and "loss_total_sum" in out
    assert err.count("\n") == 1 and all(f"small_{which}.safetensors" in err for which in gone)


def test_a_folder_without_train_or_without_some_weights(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(reference, tmp_path / "part")
    for which in (GRADIENTS, AFTER):
        tensor(folder, which, None)
    assert parity.main([str(folder)]) == 0
    out, err = capsys.readouterr()
    assert (out.count("gradient of "), out.count("after 3 steps, ")) == (54, 54)
    assert all(f"mask_emb of small_{which}.safetensors" in err for which in (GRADIENTS, AFTER))
    save_file({}, folder / f"small_{GRADIENTS}.safetensors")
    (folder / "small_train.npz").unlink()
    assert parity.main([str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "small train" not in out and "small_train.npz" in err


def test_weights_that_did_not_move_do_not_agree(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(reference, tmp_path / "still")
    shutil.copy(folder / "small_state_dict.safetensors", folder / f"small_{AFTER}.safetensors")
    assert parity.main([str(folder)]) == 1
    assert "change in 3 steps, all parameters" in capsys.readouterr().out


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
    torch.testing.assert_close(first(x.transpose(1, 2)), wanted)
    tokens, kind = torch.randn(2, 9, 8), "encoder.layers.0.self_attn."
    maps = (their[f"{kind}{p}_proj.weight"] * 20 for p in "qkv")  # as drawn they are so small that attention is even
    q, k, v = ((tokens @ weight.t()).view(2, 9, 2, 4).transpose(1, 2) for weight in maps)
    mixed = ((q @ k.transpose(-1, -2) / 2).softmax(-1) @ v).transpose(1, 2).reshape(2, 9, 8)
    attention = model.encoder.layers[0].attention
    attention.qkv.weight.data.mul_(20)
    torch.testing.assert_close(attention(tokens), mixed @ their[kind + "out_proj.weight"].t(), rtol=1e-4, atol=1e-6)
