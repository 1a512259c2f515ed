"""The field's checkpoints: layouts of ECG-FM and DeepECG-SSL, pre-trained and classifiers, of
several sizes and sampling rates.

Oracle: the authors' forward pass written from their key names with plain torch, and scipy's
resampling.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.signal import resample_poly
from torch import Tensor

import omnilead
from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.engine import convert, evaluate, finetune, predict
from omnilead.engine.common import LEADS, ConfigError
from omnilead.engine.config import build
from omnilead.engine.data.augmenter import MV_PER_UV
from omnilead.engine.model.input import Input
from omnilead.engine.training.continuing import read_weights

SMALL = {"width": 24, "layers": 1, "heads": 2, "ffn": 32, "conv": 16}
LARGE = {"width": 48, "layers": 3, "heads": 4, "ffn": 64, "conv": 32}
TAPS, GROUPS = 8, 4
NAMES = ["Sinus rhythm", "Q wave (inferior - II, III, aVF)", "Afib"]
TASK = {
    "_name": "ecg_classification",
    "data": "/data/manifest",
    "leads_to_load": None,
    "sample_rate": None,
    "filter": False,
    "normalize": False,
    "mean_path": None,
    "label_file": None,
}
MODEL = {
    "args": None,
    "model_path": "base_ssl.pt",
    "layer_norm_first": False,
    "dropout": 0.0,
    "activation_dropout": 0.1,
    "mask_prob": 0.0,
    "mask_selection": "static",
    "mask_channel_prob": 0.0,
    "extractor_mode": "default",
    "in_d": 12,
    "conv_bias": False,
    "feature_grad_mult": 0.0,
    "conv_pos": TAPS,
    "conv_pos_groups": GROUPS,
}


def encoder_state(size: dict[str, int], leads: int = 12) -> dict[str, Tensor]:
    """Random weights with the authors' names."""
    d, ffn, conv = size["width"], size["ffn"], size["conv"]
    seeded = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {}

    def draw(name: str, *shape: int) -> None:
        state[name] = 0.3 * torch.randn(shape, generator=seeded)

    def linear(name: str, rows: int, columns: int) -> None:
        draw(f"{name}.weight", rows, columns)
        draw(f"{name}.bias", rows)

    def norm(name: str, width: int) -> None:
        state[f"{name}.weight"] = 1 + 0.1 * torch.randn(width, generator=seeded)
        state[f"{name}.bias"] = torch.zeros(width)

    linear("post_extract_proj", d, conv)
    for i in range(4):
        draw(f"feature_extractor.conv_layers.{i}.0.weight", conv, conv if i else leads, 2)
    draw("conv_pos.pos_conv.0.weight_g", 1, 1, TAPS)
    draw("conv_pos.pos_conv.0.weight_v", d, d // GROUPS, TAPS)
    draw("conv_pos.pos_conv.0.bias", d)
    norm("feature_extractor.conv_layers.0.2", conv)
    norm("layer_norm", conv)
    norm("encoder.layer_norm", d)
    for i in range(size["layers"]):
        layer = f"encoder.layers.{i}"
        for part in ("q", "k", "v", "out"):
            linear(f"{layer}.self_attn.{part}_proj", d, d)
        linear(f"{layer}.fc1", ffn, d)
        linear(f"{layer}.fc2", d, ffn)
        norm(f"{layer}.self_attn_layer_norm", d)
        norm(f"{layer}.final_layer_norm", d)
    return state


def saved(
    path: Path, size: dict[str, int], task: dict[str, Any], classes: int = 3, **changes: Any
) -> dict[str, Tensor]:
    """Save a classifier, or with 0 classes a pre-trained model, and return its weights. `changes`:
    to its section model."""
    state, d = encoder_state(size, changes.get("in_d", 12)), size["width"]
    model = MODEL | {
        "encoder_embed_dim": d,
        "encoder_layers": size["layers"],
        "encoder_ffn_embed_dim": size["ffn"],
        "encoder_attention_heads": size["heads"],
        "conv_feature_layers": f"[({size['conv']}, 2, 2)] * 4",
        **changes,
    }
    if classes:
        model |= {"_name": "ecg_transformer_classifier", "num_labels": classes}
        state = {f"encoder.{name}": w for name, w in state.items()}
        shapes = {"proj.weight": (classes, d), "proj.bias": (classes,)}
    else:
        model |= {"_name": "wav2vec2_cmsc", "latent_vars": 8, "latent_dim": 16, "final_dim": 8}
        shapes = {
            "mask_emb": (d,),
            "quantizer.vars": (1, 16, 8),
            "quantizer.weight_proj.weight": (16, size["conv"]),
            "quantizer.weight_proj.bias": (16,),
            "project_q.weight": (8, 16),
            "project_q.bias": (8,),
            "final_proj.weight": (8, d),
            "final_proj.bias": (8,),
        }
    state |= {name: torch.randn(shape) for name, shape in shapes.items()}
    criterion = {"_name": "binary_cross_entropy_with_logits", "threshold": 0.3}
    cfg = {"task": TASK | task, "criterion": criterion, "model": model}
    history = [{"num_updates": 7}]
    torch.save({"args": None, "cfg": cfg, "model": state, "optimizer_history": history}, path)
    return state


def authors_forward(state: dict[str, Tensor], heads: int, x_RLT: Tensor) -> Tensor:
    """Pooled encodings c_RD of an authors' model."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    for i in range(4):
        x_RLT = F.conv1d(x_RLT, state[f"feature_extractor.conv_layers.{i}.0.weight"], stride=2)
        if i == 0:
            of = "feature_extractor.conv_layers.0.2"
            x_RLT = F.group_norm(x_RLT, x_RLT.shape[1], state[f"{of}.weight"], state[f"{of}.bias"])
        x_RLT = F.gelu(x_RLT)
    x = linear(norm(x_RLT.transpose(1, 2), "layer_norm"), "post_extract_proj")
    direction, conv = state["conv_pos.pos_conv.0.weight_v"], "conv_pos.pos_conv.0"
    taps = state[f"{conv}.weight_g"] * direction / direction.norm(dim=(0, 1), keepdim=True)
    position = F.conv1d(
        x.transpose(1, 2), taps, state[f"{conv}.bias"], padding=TAPS // 2, groups=GROUPS
    )[..., :-1]
    x = norm(x + F.gelu(position).transpose(1, 2), "encoder.layer_norm")
    for i in range(sum(name.endswith("fc1.bias") for name in state)):
        layer = f"encoder.layers.{i}."
        q, k, v = (
            linear(x, f"{layer}self_attn.{part}_proj").unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in "qkv"
        )
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        attended = linear((weights @ v).transpose(1, 2).flatten(2), f"{layer}self_attn.out_proj")
        x = norm(x + attended, f"{layer}self_attn_layer_norm")
        x = norm(
            x + linear(F.gelu(linear(x, f"{layer}fc1")), f"{layer}fc2"), f"{layer}final_layer_norm"
        )
    return x.mean(1)


def signal_uv() -> np.ndarray:
    """Integer microvolts, 10 s at 500 Hz, with different amplitudes."""
    rng, t = np.random.default_rng(0), np.arange(5000) / 500
    beats = (
        rng.uniform(0.2, 1.5, (12, 1))
        * np.cos(np.pi * (1.1 * t + 0.02 * rng.uniform(0, 1, (12, 1)))) ** 40
    )
    return np.rint(
        1e3 * (beats + 0.05 * rng.normal(size=(12, 5000)) + rng.uniform(-0.2, 0.2, (12, 1)))
    )


def converted(tmp_path: Path, *options: str, name: str = "a.pt") -> Path:
    out = tmp_path / "model"
    assert convert.main(["from-fairseq", str(tmp_path / name), str(out), *options]) == 0
    return out


# What an ECG becomes, from its halves of 5 s in millivolts, [2, 12, 2500]
def half_rate(x_SLT: np.ndarray) -> np.ndarray:
    return np.asarray(resample_poly(x_SLT, 1, 2, axis=-1, window=("kaiser", 5.0), padtype="edge"))


def zscores(x_SLT: np.ndarray) -> np.ndarray:
    return np.asarray(
        (x_SLT - x_SLT.mean((0, 2), keepdims=True)) / x_SLT.std((0, 2), keepdims=True)
    )


def layer_norms(x_SLT: np.ndarray) -> np.ndarray:
    return np.stack([F.layer_norm(torch.from_numpy(x_LT), x_LT.shape).numpy() for x_LT in x_SLT])


CASES: dict[str, tuple[dict[str, int], dict[str, Any], list[str], Any]] = {
    "millivolts": (SMALL, {"sample_rate": 500}, [], lambda x: x),
    "as ECG-FM": (LARGE, {"data": "/x/mimic_iv_ecg/manifest"}, ["--fs", "500"], zscores),
    "as DeepECG-SSL": (SMALL, {}, ["--fs", "250"], half_rate),
    "250 Hz, normalised": (
        LARGE,
        {"sample_rate": 250, "normalize": True},
        [],
        lambda x: layer_norms(half_rate(x)),
    ),
    "250 Hz, z-scores": (
        SMALL,
        {"sample_rate": 250},
        ["--input", "zscore"],
        lambda x: zscores(half_rate(x)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_predictions_and_embeddings_are_the_authors(case: str, tmp_path: Path, capsys: Any) -> None:
    size, task, options, prepared = CASES[case]
    state = saved(tmp_path / "a.pt", size, task)
    (tmp_path / "names.csv").write_text(
        "\ufeffname,pos\n" + "".join(f'"{name}",5\n' for name in NAMES)
    )
    model = omnilead.load(
        folder := converted(tmp_path, *options, "--classes", str(tmp_path / "names.csv"))
    )
    assert (capsys.readouterr().err == "") is (case != "as ECG-FM")
    uv = signal_uv()
    x = torch.from_numpy(prepared((uv / 1e3).reshape(12, 2, 2500).swapaxes(0, 1)).copy()).float()
    encoder = {
        name.removeprefix("encoder."): w for name, w in state.items() if name.startswith("encoder.")
    }
    c_SD = authors_forward(encoder, size["heads"], x)
    assert torch.allclose(model.embed(uv, 500, LEADS, "uV"), c_SD.mean(0), atol=2e-4)
    y_K = (c_SD @ state["proj.weight"].T + state["proj.bias"]).sigmoid().mean(0)
    assert model.predict(uv, 500, LEADS, "uV") == pytest.approx(
        dict(zip(NAMES, y_K.tolist(), strict=True)), abs=1e-4
    )
    assert model.thresholds == (0.3,) * 3
    back = tmp_path / "b.pt"
    assert convert.main(["to-fairseq", str(folder), str(back)]) == 0
    again = torch.load(back, weights_only=True)["model"]
    assert list(again) == list(state) and all(
        torch.equal(again[name], w) for name, w in state.items()
    )


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_pretrained_at_250_hz(size: dict[str, int], tmp_path: Path, capsys: Any) -> None:
    state = saved(tmp_path / "a.pt", size, {"sample_rate": 250}, classes=0)
    model, uv = omnilead.load(folder := converted(tmp_path)), signal_uv()
    x = torch.from_numpy(half_rate((uv / 1e3).reshape(12, 2, 2500).swapaxes(0, 1))).float()
    assert torch.allclose(
        model.embed(uv, 500, LEADS, "uV"),
        authors_forward(state, size["heads"], x).mean(0),
        atol=2e-4,
    )
    both = [model.embed(half_rate(uv), 250, LEADS, "uV"), model.embed(uv, 500, LEADS, "uV")]
    assert F.cosine_similarity(*both, dim=0) > 0.98
    assert (
        "at 250 Hz" in (folder / "README.md").read_text()
        and not model.classes
        and not capsys.readouterr().err
    )
    document = json.loads((folder / "config.json").read_text())
    config = build({"start": str(folder), "model": document["model"], "data": {"datasets": ["x"]}})
    with pytest.raises(ConfigError, match="trained at 250 Hz, pre-training is at 500 Hz"):
        read_weights(config)


def test_what_is_guessed_or_contradicted_is_noted(tmp_path: Path, capsys: Any) -> None:
    nested = {"task": {"sample_rate": 250}}  # of pre-training, in a fine-tuned checkpoint
    contradicted = "its settings state 250 Hz, --fs 500 is used instead: leave it out if"
    guessed = "its paths name ECG-FM or MIMIC-IV-ECG: assumed the input zscore (change with --input"
    for task, options, fs_hz, scale, note in (
        ({}, [], 250, "millivolt", ""),
        ({}, ["--fs", "250"], 250, "millivolt", ""),
        ({}, ["--fs", "500"], 500, "millivolt", contradicted),
        ({"sample_rate": 400}, [], 400, "millivolt", ""),
        ({"normalize": True}, [], 250, "layernorm", ""),
        ({"normalize": True}, ["--input", "millivolt"], 250, "millivolt", ""),
        ({"data": "/x/mimic_iv_ecg"}, [], 250, "zscore", guessed),
        ({"data": "/x/mimic_iv_ecg"}, ["--input", "zscore"], 250, "zscore", ""),
    ):
        saved(tmp_path / "a.pt", SMALL, task, 0, args=nested)
        out = converted(tmp_path, *options)
        err = capsys.readouterr().err
        made = json.loads((out / "preprocessing.json").read_text())
        assert (made["fs_hz"], made["scale"], made["leads"]) == (fs_hz, scale, list(LEADS))
        assert err.count("\n") == bool(note) and note in err
        shutil.rmtree(out)


@pytest.mark.parametrize("scale", ["zscore", "layernorm"])
def test_training_sees_what_inference_sees(scale: str) -> None:
    """A crop without augmentation; a lead that is masked in a half is zero and does not affect
    others."""
    of = Input(tuple(range(12)), tuple(range(12)), scale, 250.0)
    uv_BLT = torch.from_numpy(signal_uv().astype(np.int16))[None]
    x_BSLT = uv_BLT.unflatten(2, (2, 2500)).swapaxes(1, 2).float().mul_(MV_PER_UV)
    whole = of.halves(uv_BLT, np.array([2]))
    assert torch.allclose(of.scaled(x_BSLT)[0], whole, atol=1e-6) and whole.shape == (2, 12, 1250)
    first = of.halves(uv_BLT, np.array([1]))
    x_BSLT[:, 1] = 0
    assert (
        torch.allclose(of.scaled(x_BSLT)[0, 0], first[0], atol=1e-6)
        and not of.scaled(x_BSLT)[0, 1].any()
    )
    shown = of.limited_to("I,V2").halves(uv_BLT, np.array([2]))
    uv_BLT[:, [lead for lead in range(12) if lead not in (0, 7)]] = (
        0  # not measured is as not shown
    )
    assert shown.any() and torch.equal(of.halves(uv_BLT, np.array([2])), shown)


def test_fine_tuning_and_prediction_keep_the_models_rate_and_scale(
    dataset: Dataset, tmp_path: Path
) -> None:
    saved(tmp_path / "a.pt", SMALL, {"sample_rate": 250, "data": "ecg_fm"}, classes=1)
    start, run, found = converted(tmp_path, "--classes", "AF"), tmp_path / "run", tmp_path / "found"
    out = tmp_path / "AF.csv"
    assert predict.main(["--model", str(start), "--data", dataset.root.url, "--out", str(out)]) == 0
    assert out.read_text().partition("\n")[0].endswith('"AF","AF_predicted"')
    url = dataset.root.url
    how = ["--start", str(start), "--data", url, "--config", "diagnosis", "--out", str(run)]
    for setting in ("steps=2", "validate_every=1", "batch_crops=4", "precision=fp32"):
        how += ["--set", f"train.{setting}"]
    how += ["--set", "encoder.dropout=0.1"]
    assert finetune.main(how) == 0
    model = omnilead.load(run)
    assert (model.input.fs_hz, model.input.scale) == (250.0, "zscore") and "at 250 Hz" in (
        run / "model/README.md"
    ).read_text()
    lines = (run / "validation.jsonl").read_text().splitlines()[1:]
    best = max(json.loads(line)["auroc"] for line in lines)
    scored = ["--model", str(run), "--data", url, "--role", "valid", "--json", str(found)]
    assert evaluate.main(scored) == 0
    assert json.loads(found.read_text())["metrics"]["auroc"] == pytest.approx(best, abs=1e-6)
    assert finetune.main(how) == 0  # resumes, with the same facts


def test_leads_and_kind_are_inferred_or_refused(tmp_path: Path, capsys: Any) -> None:
    saved(tmp_path / "a.pt", SMALL, {"leads_to_load": "[0, 'v2']"}, 26, in_d=2)
    model = omnilead.load(converted(tmp_path, "--classes", ",".join(reversed(CLASSES))))
    assert model.input.leads == (0, 7) and model.head_info and model.head_info.task == "diagnosis"
    assert "assumed 500 Hz" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    nested = {
        "model": json.loads(json.dumps(model.config["fairseq"]["cfg"]["model"])) | {"in_d": 12}
    }
    saved(
        other / "a.pt",
        SMALL,
        {"leads_to_load": "['I']", "enable_padding_leads": True},
        1,
        args=nested,
    )
    model = omnilead.load(converted(other))
    assert model.input.seen == (0,) and model.classes == ("class_0",) and model.head_info
    assert (
        model.head_info.kind == "binary"
        and "set names with --classes LIST|FILE" in capsys.readouterr().err
    )
    saved(tmp_path / "b.pt", SMALL, {"sample_rate": 400}, 1, in_d=3)
    assert convert.main(["from-fairseq", str(tmp_path / "b.pt"), str(tmp_path / "out")]) == 0
    assert "do not name its 3 leads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "options", "text"),
    [
        ({"filter": True}, "", "task.filter=True .* NeuroKit2: to convert it anyway, give --input"),
        ({"normalize": True, "mean_path": "m"}, "", "task.mean_path=m .* are in another file"),
        ({"sample_rate": 25}, "", "fs_hz=25: must be 50 to 2000"),
        ({"sample_rate": "fast"}, "", "fs_hz='fast': must be"),
        ({"leads_to_load": "[0, 12]"}, "", "leads_to_load=.* must be a list of lead names or"),
        ({"leads_to_load": "__import__('os')"}, "", "task.leads_to_load="),
        ({}, "--classes A,B", "2 names: must be 3, in the order of the outputs"),
        ({}, "--classes A,B,A", "2 names: must be 3"),
        ({}, "--classes no.csv", "no.csv: .*No such file.*: give a CSV with a column `name`"),
        ({}, "--fs nan", "fs_hz=nan"),
        ({"sample_rate": 250}, "--fs 0", "fs_hz=0.0: must be 50 to 2000"),
    ],
)
def test_what_cannot_be_converted_is_a_one_line_error(
    task: dict[str, Any], options: str, text: str, tmp_path: Path, capsys: Any
) -> None:
    saved(tmp_path / "a.pt", SMALL, task)
    convert_refused(tmp_path, options.split(), text, capsys)


def test_names_for_a_model_without_a_classifier_or_in_a_file_are_refused(
    tmp_path: Path, capsys: Any
) -> None:
    saved(tmp_path / "a.pt", SMALL, {}, classes=0)
    convert_refused(tmp_path, ["--classes", "A"], "only pre-trained, without a classifier", capsys)
    saved(tmp_path / "a.pt", SMALL, {})
    (tmp_path / "names.txt").write_text("A\nB")
    names = str(tmp_path / "names.txt")
    convert_refused(tmp_path, ["--classes", names], "2 names: must be 3", capsys)


def convert_refused(tmp_path: Path, options: list[str], text: str, capsys: Any) -> None:
    arguments = ["from-fairseq", str(tmp_path / "a.pt"), str(tmp_path / "out"), *options]
    assert convert.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and re.search(text, err) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"aux_proj.0.weight": torch.zeros(4, 4)}, "1 unexpected: aux_proj.0.weight"),
        ({"proj.weight": torch.zeros(3, 30)}, r"proj.weight is \[3, 30\], not \[3, 24\]"),
        (
            {"proj.weight": None, "proj.bias": None, "kernel": torch.zeros(5, 24)},
            "2 missing: proj.weight, proj.bias; 1 unexp",
        ),
        ({"proj.weight": torch.tensor(1.0)}, "of another shape"),
        ({"encoder.mask_emb": torch.zeros(25)}, "encoder.mask_emb"),
    ],
)
def test_other_heads_are_refused_by_name(
    change: dict[str, Tensor | None], text: str, tmp_path: Path, capsys: Any
) -> None:
    saved(path := tmp_path / "a.pt", SMALL, {})
    content = torch.load(path, weights_only=True)
    content["model"] = {name: w for name, w in (content["model"] | change).items() if w is not None}
    torch.save(content, path)
    convert_refused(tmp_path, [], text, capsys)
