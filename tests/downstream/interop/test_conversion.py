"""The field's checkpoints: layouts of ECG-FM and DeepECG-SSL, pre-trained and classifiers, of
several sizes and sampling rates.

Oracle: the authors' forward pass written from their key names with plain torch, and scipy's
resampling.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from scipy.signal import butter, resample_poly, sosfiltfilt
from torch.testing import assert_close

import omnilead
from omnilead.data_tools.dataset import CLASSES
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.downstream import convert
from omnilead.downstream.interop import conversion
from omnilead.downstream.interop.conversion import preprocessing_document
from omnilead.downstream.interop.fairseq import fairseq_settings, weights_to_fairseq
from omnilead.engine.data.config import MV_PER_UV
from omnilead.engine.model.config import ModelConfig
from omnilead.engine.model.folder import write_model
from omnilead.engine.model.input import Input
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.leads import ALL_LEADS
from omnilead.engine.training.config import build_config
from omnilead.engine.training.continuing import read_starting_weights
from tests.engine.model.tiny import by_numpy, ecg, seeded
from tests.tables import tabulated

TAPS, GROUPS = 8, 4
SMALL = ModelConfig(
    conv=((16, 2),) * 4, width=24, layers=1, heads=2, ffn=32, codes=8, code_width=16, projection=8,
    position_kernel=TAPS, position_groups=GROUPS, feature_grad=0.0,
)  # fmt: skip
LARGE = replace(SMALL, conv=((32, 2),) * 4, width=48, layers=3, heads=4, ffn=64)
NAMES = ["Sinus rhythm", "Q wave (inferior - II, III, aVF)", "Afib"]
TASK = {
    "_name": "ecg_classification",
    "data": "/data/manifest",
    "filter": False,
    "normalize": False,
}
TASK |= dict.fromkeys(["leads_to_load", "sample_rate", "mean_path", "label_file"])


def saved(path, config, task, classes=3, **changes):
    """Save a classifier, or with 0 classes a pre-trained model, and return its weights. `changes`:
    to its section model."""
    config = replace(config, leads=changes.get("in_d", 12))
    ours = dict(by_numpy(seeded(config)).state_dict())
    model = (
        fairseq_settings(config)["model"] | {"args": None, "model_path": "base_ssl.pt"} | changes
    )
    model["conv_feature_layers"] = f"[({config.feature_width}, 2, 2)] * 4"
    if classes:
        ours = {name: w for name, w in ours.items() if name.startswith("encoder.")}
        del ours["encoder.mask_embedding"]
        ours |= {
            "head.weight": torch.randn(classes, config.width),
            "head.bias": torch.randn(classes),
        }
        model = {name: x for name, x in model.items() if not name.startswith(("latent", "final"))}
        model |= {"_name": "ecg_transformer_classifier", "num_labels": classes}
    state = weights_to_fairseq(ours, config, "weight_g")
    criterion = {"_name": "binary_cross_entropy_with_logits", "threshold": 0.3}
    cfg = {"task": TASK | task, "criterion": criterion, "model": model}
    history = [{"num_updates": 7}]
    torch.save({"args": None, "cfg": cfg, "model": state, "optimizer_history": history}, path)
    return state


def authors_forward(state, heads, x_RLT):
    """Pooled encodings c_RD of an authors' model."""

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    for i in range(4):
        x_RLT = F.conv1d(x_RLT, state[f"feature_extractor.conv_layers.{i}.0.weight"], stride=2)
        if i == 0:
            of = "feature_extractor.conv_layers.0.2"
            x_RLT = F.group_norm(x_RLT, x_RLT.shape[1], state[f"{of}.weight"], state[f"{of}.bias"])
        x_RLT = F.gelu(x_RLT)
    x = linear(norm(x_RLT.transpose(1, 2), "layer_norm"), "post_extract_proj")
    gain, direction, bias = (
        state[f"conv_pos.pos_conv.0.{part}"] for part in ("weight_g", "weight_v", "bias")
    )
    taps = gain * direction / direction.norm(dim=(0, 1), keepdim=True)
    position = F.conv1d(x.transpose(1, 2), taps, bias, padding=TAPS // 2, groups=GROUPS)
    x = norm(x + F.gelu(position[..., :-1]).transpose(1, 2), "encoder.layer_norm")
    for i in range(sum(name.endswith("fc1.bias") for name in state)):
        layer = f"encoder.layers.{i}."
        q, k, v = (
            linear(x, f"{layer}self_attn.{part}_proj").unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in "qkv"
        )
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        attended = linear((weights @ v).transpose(1, 2).flatten(2), f"{layer}self_attn.out_proj")
        x = norm(x + attended, f"{layer}self_attn_layer_norm")
        forwarded = linear(F.gelu(linear(x, f"{layer}fc1")), f"{layer}fc2")
        x = norm(x + forwarded, f"{layer}final_layer_norm")
    return x.mean(1)


def signal_uv():
    """Integer microvolts, 10 s at 500 Hz."""
    return np.rint(1e3 * ecg())


def halves_mv():
    return (signal_uv() / 1e3).reshape(12, 2, 2500).swapaxes(0, 1)


def converted(tmp_path, *options, name="a.pt"):
    out = (tmp_path / name).with_suffix("")
    assert convert.main(["from-fairseq", str(tmp_path / name), str(out), *options]) == 0
    return out


# What an ECG becomes, from its halves of 5 s in millivolts, [2, 12, 2500]
def half_rate(x_SLT):
    return np.asarray(resample_poly(x_SLT, 1, 2, axis=-1, window=("kaiser", 5.0), padtype="edge"))


def zscores(x_SLT):
    centred = x_SLT - x_SLT.mean((0, 2), keepdims=True)
    return np.asarray(centred / x_SLT.std((0, 2), keepdims=True))


def layer_norms(x_SLT):
    return F.layer_norm(torch.from_numpy(x_SLT), x_SLT.shape[1:]).numpy()


CASES = {
    "millivolts": (SMALL, {"sample_rate": 500}, [], []),
    "as ECG-FM": (LARGE, {"data": "/x/mimic_iv_ecg/manifest"}, ["--fs", "500"], [zscores]),
    "as DeepECG-SSL": (SMALL, {}, ["--fs", "250"], [half_rate]),
    "normalised": (LARGE, {"sample_rate": 250, "normalize": True}, [], [half_rate, layer_norms]),
    "z-scores": (SMALL, {"sample_rate": 250}, ["--input", "zscore"], [half_rate, zscores]),
}


@pytest.mark.parametrize("case", CASES)
def test_predictions_and_embeddings_are_the_authors(case, tmp_path, capsys):
    config, task, options, preparations = CASES[case]
    state = saved(tmp_path / "a.pt", config, task)
    names = tmp_path / "names.csv"
    names.write_text("\ufeffname,pos\n" + "".join(f'"{name}",5\n' for name in NAMES))
    folder = converted(tmp_path, *options, "--classes", str(names))
    model, x_SLT = omnilead.load(folder), halves_mv()
    assert (capsys.readouterr().err == "") is (case != "as ECG-FM")
    for prepared in preparations:
        x_SLT = prepared(x_SLT)
    encoder = {name.removeprefix("encoder."): w for name, w in state.items()}
    c_SD = authors_forward(encoder, config.heads, torch.tensor(x_SLT).float())
    uv = signal_uv()
    assert torch.allclose(model.embed(uv, 500, LEADS, "uV"), c_SD.mean(0), atol=2e-4)
    y_K = (c_SD @ state["proj.weight"].T + state["proj.bias"]).sigmoid().mean(0)
    expected = dict(zip(NAMES, y_K.tolist(), strict=True))
    assert model.predict(uv, 500, LEADS, "uV") == pytest.approx(expected, abs=1e-4)
    assert model.thresholds == (0.3,) * 3
    back = tmp_path / "b.pt"
    assert convert.main(["to-fairseq", str(folder), str(back)]) == 0
    again = torch.load(back, weights_only=True)["model"]
    assert list(again) == list(state)
    assert_close(again, state, rtol=0, atol=0)


def test_pretrained_at_250_hz(tmp_path, capsys):
    state = saved(tmp_path / "a.pt", LARGE, {"sample_rate": 250}, classes=0)
    folder, uv = converted(tmp_path), signal_uv()
    model, x_SLT = omnilead.load(folder), torch.tensor(half_rate(halves_mv())).float()
    at_500, at_250 = (model.embed(*ecg, LEADS, "uV") for ecg in ((uv, 500), (half_rate(uv), 250)))
    expected = authors_forward(state, LARGE.heads, x_SLT).mean(0)
    assert torch.allclose(at_500, expected, atol=2e-4)
    assert F.cosine_similarity(at_250, at_500, dim=0) > 0.98
    assert "at 250 Hz" in (folder / "README.md").read_text()
    assert not model.classes and not capsys.readouterr().err
    settings = json.loads((folder / "config.json").read_text())["model"]
    run = build_config({"start": str(folder), "model": settings, "data": {"datasets": ["x"]}})
    with pytest.raises(ConfigError, match=r"input\.fs_hz is 250\.0 there, 500\.0 here"):
        read_starting_weights(run)


def test_what_is_guessed_or_contradicted_is_noted(tmp_path, capsys):
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
def test_training_sees_what_inference_sees(scale):
    """A crop without augmentation; a half that is missing or masked does not affect the other."""
    of, both = Input(ALL_LEADS, ALL_LEADS, scale, 250.0), np.array([2])
    uv_BLT = torch.from_numpy(signal_uv().astype(np.int16))[None]
    x_BLT, keep_BSL1 = uv_BLT.float().mul_(MV_PER_UV), torch.ones(1, 2, 12, 1, dtype=torch.bool)
    whole = of.windows(uv_BLT, both)
    assert torch.equal(of.cut_windows(x_BLT, both, keep_BSL1)[0], whole) and whole.shape == (
        2,
        12,
        1250,
    )
    first, second = of.cut_windows(x_BLT, np.array([1]), keep_BSL1)[0]
    assert torch.equal(first, of.windows(uv_BLT, np.array([1]))[0]) and not second.any()
    keep_BSL1[:, 1] = False
    first, second = of.cut_windows(x_BLT, both, keep_BSL1)[0]
    assert torch.equal(first, whole[0]) and not second.any()
    shown = of.limited_to("I,V2").windows(uv_BLT, both)
    uv_BLT[:, [*range(1, 7), *range(8, 12)]] = 0  # not measured is as not shown
    assert shown.any() and torch.equal(of.windows(uv_BLT, both), shown)


def test_leads_and_kind_are_inferred_or_refused(tmp_path, capsys):
    saved(tmp_path / "a.pt", SMALL, {"leads_to_load": "[0, 'v2']"}, 26, in_d=2)
    model = omnilead.load(converted(tmp_path, "--classes", ",".join(reversed(CLASSES))))
    assert model.input.leads == (0, 7) and model.head_info and model.head_info.task == "diagnosis"
    assert "assumed 500 Hz" in capsys.readouterr().err
    nested = {"model": model.config["fairseq"]["cfg"]["model"] | {"in_d": 12}}
    padded = {"leads_to_load": "['I']", "enable_padding_leads": True}
    saved(tmp_path / "b.pt", SMALL, padded, 1, args=nested)
    model = omnilead.load(converted(tmp_path, name="b.pt"))
    assert model.input.seen_leads == (0,) and model.classes == ("class_0",)
    assert model.head_info and model.head_info.kind == "binary"
    assert "set names with --classes LIST|FILE" in capsys.readouterr().err
    saved(tmp_path / "c.pt", SMALL, {"sample_rate": 400}, 1, in_d=3)
    converted(tmp_path, name="c.pt")
    assert "do not name its 3 leads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "options", "text"),
    tabulated(r"""
{"filter": true}                         | | task.filter=True .* NeuroKit2: to convert it anyway, give --input
{"normalize": true, "mean_path": "m"}    | | task.mean_path=m .* are in another file
{"sample_rate": 25}                      | | fs_hz=25: must be 50 to 2000
{"leads_to_load": "[0, 12]"}             | | leads_to_load=.* must be a list of lead names or
{"leads_to_load": "__import__('os')"}    | | task.leads_to_load=
{} | --classes A,B          | 2 names, but the classifier has 3 outputs: give a different name for each
{} | --classes A,B,A        | 2 names, but the classifier has 3
{} | --classes {}/names.txt | 2 names, but the classifier has 3
{} | --classes A            | only pre-trained, without a classifier
{} | --classes no.csv       | no.csv: .*No such file.*: give a CSV with a column `name`
{} | --fs 0                 | fs_hz=0
"""),
)
def test_what_cannot_be_converted_is_a_one_line_error(task, options, text, tmp_path, capsys):
    saved(tmp_path / "a.pt", SMALL, json.loads(task), 0 if "only pre-trained" in text else 3)
    (tmp_path / "names.txt").write_text("A\nB")
    convert_refused(tmp_path, options.format(tmp_path), text, capsys)


def convert_refused(tmp_path, options, text, capsys):
    out = tmp_path / "out"
    arguments = ["from-fairseq", str(tmp_path / "a.pt"), str(out), *options.split()]
    assert convert.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and re.search(text, err) and not out.exists()


HEADLESS = {"proj.weight": None, "proj.bias": None, "kernel": torch.zeros(5, 24)}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"aux_proj.0.weight": torch.zeros(4, 4)}, "1 unexpected: aux_proj.0.weight"),
        ({"proj.weight": torch.zeros(3, 30)}, r"proj.weight is \[3, 30\], not \[3, 24\]"),
        (HEADLESS, "2 missing: proj.weight, proj.bias; 1 unexp"),
        ({"proj.weight": torch.tensor(1.0)}, "of another shape"),
        ({"encoder.mask_emb": torch.zeros(25)}, "encoder.mask_emb"),
    ],
)
def test_other_heads_are_refused_by_name(change, text, tmp_path, capsys):
    saved(path := tmp_path / "a.pt", SMALL, {})
    content = torch.load(path, weights_only=True)
    content["model"] = {name: w for name, w in (content["model"] | change).items() if w is not None}
    torch.save(content, path)
    convert_refused(tmp_path, "", text, capsys)


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, leads, width=8):
        super().__init__()
        self.width = width
        self.conv = nn.Conv1d(leads, width, 10, 5)

    def forward(self, x):
        return self.conv(x).tanh().transpose(1, 2)
"""


def test_a_model_folder_of_any_network_gives_its_numbers(tmp_path, monkeypatch):
    """At 250 Hz, z-scored, on two leads; computed by hand, from the card, and by onnxruntime."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    state = {"weight": torch.randn(16, 2, 10), "bias": torch.randn(16)}
    save_file({f"module.conv.{name}": weight for name, weight in state.items()}, "w.safetensors")
    arguments = ["from-torch", "w.safetensors", "OUT", "--encoder", "net.py:Net", "--fs", "250"]
    arguments += ["--options", "{width: 16}", "--input", "zscore", "--leads", "V2,I"]
    assert convert.main(arguments) == 0
    for name in ("net.py", "w.safetensors"):
        Path(name).unlink()

    def by_hand(x_RLT):
        return F.conv1d(x_RLT, state["weight"], state["bias"], 5).tanh().mean(2)

    model, x_SLT = omnilead.load("OUT", code=True), zscores(half_rate(halves_mv()))[:, [7, 0]]
    expected = by_hand(torch.tensor(x_SLT).float())
    assert_close(model.embed(signal_uv(), 500, LEADS, "uV"), expected.mean(0), rtol=0, atol=1e-5)
    made = json.loads(Path("OUT/preprocessing.json").read_text())
    assert made == preprocessing_document("zscore", 250.0, ["V2", "I"])
    origin = json.loads(Path("OUT/config.json").read_text())["from_torch"]
    assert f"{origin['input']}\n" in Path("OUT/README.md").read_text()
    x_RLT = eval(origin["input"])
    assert x_RLT.shape == (2, 2, 1250)
    assert origin["embedding"] == pytest.approx(by_hand(x_RLT)[0, :4].tolist(), abs=1e-5)
    assert convert.main(["to-onnx", "OUT", "net.onnx", "--code"]) == 0


def ten_seconds(mv_LT):
    """At 100 Hz, z-scored."""
    x_LT = resample_poly(mv_LT, 1, 5, axis=1, window=("kaiser", 5.0), padtype="edge")
    return (x_LT - x_LT.mean(1, keepdims=True))[None] / x_LT.std(1, keepdims=True)


def four_windows(mv_LT):
    """Of 2.5 s, band-passed."""
    band = butter(2, [0.5, 40], "bandpass", fs=500, output="sos")
    return sosfiltfilt(band, mv_LT).reshape(12, 4, 1250).swapaxes(0, 1)


@pytest.mark.parametrize(
    ("prepared", "options"),
    [
        (ten_seconds, ["--window", "10", "--fs", "100", "--input", "zscore"]),
        (four_windows, ["--window", "2.5", "--band", "0.5", "40"]),
    ],
)
def test_a_network_of_any_window_rate_and_band(prepared, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    weight, bias = torch.randn(8, 12, 10), torch.randn(8)
    save_file({"conv.weight": weight, "conv.bias": bias}, "w.safetensors")
    arguments = ["from-torch", "w.safetensors", "OUT", "--encoder", "net.py:Net", *options]
    # Proven in another interpreter by the test above
    monkeypatch.setattr(
        conversion, "_write_if_complete", lambda out, _, *parts: write_model(out, *parts)
    )
    assert convert.main(arguments) == 0
    x_SLT = torch.tensor(prepared(signal_uv() / 1e3).copy()).float()
    expected = F.conv1d(x_SLT, weight, bias, 5).tanh().mean((0, 2))
    assert ("band-passed from 0.5 to 40 Hz" in Path("OUT/README.md").read_text()) == (
        "--band" in options
    )
    found = omnilead.load("OUT", code=True).embed(signal_uv(), 500, LEADS, "uV")
    assert_close(found, expected, rtol=0, atol=1e-5)
