"""Inputs of other windows, rates, bands and scales: against scipy, window by window, from the
configuration to the outputs of a trained model."""

import json
import math
import re
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from pyarrow import parquet
from scipy.signal import butter, resample_poly, sosfiltfilt

import omnilead
from omnilead.__main__ import main
from omnilead.downstream.reports import run_report
from omnilead.engine.data.augmenter import crop_key
from omnilead.engine.data.loader import Loader
from omnilead.engine.data.order import Selection
from omnilead.engine.model.input import Input
from omnilead.engine.settings.counter import RandomStream, uniform
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.leads import ALL_LEADS
from omnilead.engine.training.arguments import PretrainInputs
from omnilead.engine.training.config import build_config, check_config
from omnilead.engine.training.continuing import read_starting_weights
from omnilead.engine.training.read_settings import read_settings
from tests.conftest import save_model
from tests.downstream.evaluate.conftest import quick  # noqa: F401
from tests.engine.training.ranks import drawn_nothing

TEN = {"window_s": 10.0, "fs_hz": 100.0, "scale": "zscore"}
SHORT = {"window_s": 2.5, "band_hz": [0.5, 40.0]}
UNEVEN = {"window_s": 3.0, "fs_hz": 360.0, "band_hz": [0.05, 150.0], "scale": "layernorm"}
HALVES = {"fs_hz": 250.0, "scale": "zscore"}  # as imported models have
ODD = {"fs_hz": 62.5}  # a half has 312.5 samples
ALMOST = {"fs_hz": 499.999}  # counts as 500 Hz
TINY = {
    "conv": [[8, 4], [8, 4]],
    "width": 16,
    "layers": 1,
    "heads": 2,
    "ffn": 32,
    "position_kernel": 8,
    "position_groups": 2,
    "codes": 8,
    "code_width": 8,
    "projection": 8,
}


def signals(config):
    return build_config({"input": config}).model_input


def by_hand(uv_LT, halves, window_s=5.0, fs_hz=500.0, band_hz=None, scale="millivolt"):
    """The windows of a crop with scipy, in float64."""
    x = uv_LT[:, : 2500 * halves] / 1000
    if band_hz:
        x = sosfiltfilt(butter(2, band_hz, "bandpass", fs=500, output="sos"), x)
    pieces = np.split(x, halves, 1) if window_s == 5 and not band_hz else [x]
    if fs_hz != 500:
        how = {"window": ("kaiser", 5.0), "padtype": "edge"}
        ratio = {62: (1, 8), 100: (1, 5), 250: (1, 2), 360: (18, 25), 499: (1, 1)}[int(fs_hz)]
        pieces = [resample_poly(piece, *ratio, axis=1, **how) for piece in pieces]
    x = np.concatenate(pieces, 1)
    there_L1 = uv_LT.any(1, keepdims=True)
    if scale == "zscore":
        x = (x - x.mean(1, keepdims=True)) / np.where(there_L1, x.std(1, keepdims=True), 1)
    count, size = int(5 * halves / window_s), math.ceil(window_s * fs_hz)
    windows = np.stack([x[:, i * size : (i + 1) * size] for i in range(count)])
    if scale == "layernorm":
        for window in windows:
            inside = window[there_L1[:, 0]]
            window[there_L1[:, 0]] = (inside - inside.mean()) / inside.std()
    return windows


@pytest.mark.parametrize("config", [TEN, SHORT, UNEVEN, HALVES, ODD, ALMOST, {}], ids=repr)
def test_windows_are_those_of_scipy(config, dataset):
    """Also of a lead that was not recorded, and of crops with one half, whose rest is not looked
    at."""
    of = signals(config)
    uv_BLT = np.stack([dataset.read(row) for row in range(4)]).astype(np.int16)
    uv_BLT[1, 3], halves_B = 0, np.array([2, 2, 1, 2])
    uv_BLT[:, :, 2500:] += 700  # the halves differ
    uv_BLT[1, 3] = 0
    expected = [
        by_hand(uv_LT.astype(float), halves, **config)
        for uv_LT, halves in zip(uv_BLT, halves_B, strict=True)
        if of.count_windows(halves)
    ]
    x_RLT = of.windows(torch.from_numpy(uv_BLT), halves_B)
    np.testing.assert_allclose(x_RLT, np.concatenate(expected), atol=1e-5)
    assert not x_RLT[of.count_windows() : 2 * of.count_windows(), 3].any()
    assert of.uses_stored_halves == (not config)


@pytest.mark.parametrize(
    ("backend", "config"),
    [*(("torch", config) for config in (TEN, SHORT, UNEVEN, HALVES)), ("dali", TEN)],
    ids=repr,
)
def test_training_sees_windows_of_the_crop_with_leads_masked_in_each(backend, config, dataset):
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    data = {"datasets": [dataset.root.url]}
    settings = build_config(
        {"input": config, "data": data, "train": {"batch_crops": 4}, "model": TINY}
        | {"pipeline": {"backend": backend}}
        | {"objective": {"contrast": 0}, "augment": {"rlm": 0.5, "rlm_keep_one": True}}
    )
    loader = Loader(
        settings.loader, [dataset], torch.device("cpu"), Selection(pretrain=True, halves=2)
    )
    batch, _ = next(iter(loader))
    x_BSLT, of, places = (
        PretrainInputs(settings, [dataset]).windows(batch),
        settings.model_input,
        batch.places,
    )
    loader.close()
    start_B = uniform(0, RandomStream.PAIR, places.epoch, crop_key(places))
    count, size = settings.windows, of.samples
    assert x_BSLT.shape == (4, count, 12, size) and count == (1 if config == TEN else 2)
    kept_BSL1 = batch.keep_BSL1
    assert 0.3 < kept_BSL1.mean() < 0.7
    for x_SLT, kept_SL1, row, u in zip(x_BSLT, kept_BSL1, places.row, start_B, strict=True):
        plain = {"scale": "millivolt"} if config == UNEVEN else {}
        whole = {"window_s": 10.0} if config != HALVES else {}
        crop = by_hand(dataset.read(row).astype(float), 2, **config | whole | plain)
        crop = np.concatenate(list(crop), 1)
        first = int(u * (crop.shape[1] - count * size + 1))
        for s, (x_LT, kept_L1) in enumerate(zip(x_SLT, kept_SL1, strict=True)):
            window = crop[:, first + s * size :][:, :size] * kept_L1
            if config == UNEVEN:
                there = window.any(1)
                inside = window[there]
                window[there] = (inside - inside.mean()) / inside.std()
            np.testing.assert_allclose(x_LT, window, atol=1e-5)


def test_two_views_of_five_seconds_become_shorter(dataset):
    settings = build_config(
        {"input": SHORT, "data": {"datasets": [dataset.root.url]}, "train": {"batch_crops": 4}}
        | {"objective": {"method": "simclr"}, "pipeline": {"views": "window"}}
    )
    loader = Loader(
        settings.loader, [dataset], torch.device("cpu"), Selection(pretrain=True, halves=2)
    )
    batch, _ = next(iter(loader))
    loader.close()
    x_BSLT = PretrainInputs(settings, [dataset]).windows(batch)
    sos = butter(2, SHORT["band_hz"], "bandpass", fs=500, output="sos")
    expected = sosfiltfilt(sos, batch.x_BSLT.double())[..., :1250] * batch.keep_BSL1
    np.testing.assert_allclose(x_BSLT, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"window_s": 10.5}, "input.window_s=10.5: input should be less than or equal to 10"),
        ({"window_s": 8.0}, "input.window_s=8: a crop has no two such windows to contrast"),
        ({"fs_hz": 501.0}, "input.fs_hz=501.0: input should be less than or equal to 500"),
        (
            {"fs_hz": 257.3},
            "input.fs_hz=257.3: must be 50 to 2000 Hz, and its ratio to 500 Hz a fraction",
        ),
        ({"fs_hz": 100.0, "band_hz": [0.5, 50.0]}, "input.band_hz=(0.5, 50.0): give [LOW, HIGH]"),
        ({"band_hz": [40.0, 0.5]}, "input.band_hz=(40.0, 0.5): give [LOW, HIGH]"),
        ({"scale": "unit"}, "input.scale='unit': input should be 'millivolt', 'zscore' or"),
        ({"window_s": 0.02}, "model.conv"),
    ],
)
def test_refused_inputs(config, says):
    with pytest.raises(ConfigError) as error:
        check_config(
            build_config({"input": config, "data": {"datasets": ["x"]}, "train": {"steps": 1}}), 1
        )
    assert str(error.value).startswith(says)


def test_amplitudes_are_limited_after_resampling_and_before_scaling():
    names = ["I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6"]
    document = {"scale": "millivolt", "fs_hz": 250, "segment_s": 5.0, "leads": names, "clip_mv": 3}
    x_BLT = torch.randn(2, 12, 5000) * 3
    halves_B = np.full(2, 2)
    of = Input.from_document(document, 12)
    free = replace(of, clip_mv=None)
    clipped_BSLT = free.cut_windows(x_BLT, halves_B).clamp(-3, 3)
    assert (
        of.cut_windows(x_BLT, halves_B).equal(clipped_BSLT)
        and of.preprocessing_fields["clip_mv"] == 3
    )
    scaled = Input.from_document(document | {"scale": "zscore"}, 12).cut_windows(x_BLT, halves_B)
    assert not scaled.allclose(
        replace(free, scale="zscore").cut_windows(x_BLT, halves_B), atol=0.01
    )
    assert not replace(of, fs_hz=500.0).uses_stored_halves
    for wrong in (-1, 0, "3", 1e9):
        with pytest.raises(ConfigError, match=f"clip_mv={wrong!r}: must be above 0 and at most"):
            Input.from_document(document | {"clip_mv": wrong}, 12)


def test_an_ecg_without_a_whole_window_is_refused(dataset, tmp_path):
    model = omnilead.load(save_model(tmp_path / "a", preprocessing={"segment_s": 8.0}))
    uv_LT = dataset.read(0)
    with pytest.raises(ConfigError, match=r"9 s of signal: .* segments of 8 s: give at least 10 s"):
        model.embed(uv_LT[:, :4500], 500, "12", "uV")
    longer = np.concatenate([uv_LT, uv_LT], 1)
    assert len(model.segments(longer[:, :9000], 500, "12", "uV")) == 1
    short = omnilead.load(save_model(tmp_path / "b", preprocessing={"segment_s": 1.5}))
    assert len(short.segments(longer[:, :9000], 500, "12", "uV")) == 6 + 3


def run(*words):
    with mock.patch.object(run_report, "report_page", drawn_nothing):
        assert main([str(word) for word in words]) == 0


@pytest.mark.parametrize(("config", "contrast"), [(TEN, 0), (SHORT, 1)], ids=["ten", "short"])
def test_from_settings_to_outputs(config, contrast, dataset, tmp_path, capsys):
    """Pre-training, embeddings, fine-tuning, its validation and predictions see what scipy makes."""
    data, model, tuned = dataset.root.url, tmp_path / "model", tmp_path / "tuned"
    train = {"steps": 2, "batch_crops": 8, "precision": "fp32", "probe_patients": 4}
    train |= {"validate_every": 1, "valid_batches": 1, "lr": 1e-3, "peak_tflops": 1.0}
    tree = {"input": config, "model": TINY, "objective": {"contrast": contrast}, "train": train}
    (tmp_path / "a.yaml").write_text(json.dumps(tree))
    how = ["--config", tmp_path / "a.yaml", "--data", data]
    run("pretrain", *how, "--out", model)
    run("embed", "--model", model, "--data", data, "--per", "half", "--out", tmp_path / "e.parquet")
    table = parquet.read_table(tmp_path / "e.parquet").to_pydict()
    halves, starts = (
        dataset.column("halves").tolist(),
        dataset.table(["start_s"])["start_s"].to_pylist(),
    )
    loaded, window_s = omnilead.load(model), config["window_s"]
    expected, at = [], []
    for row in range(len(dataset)):
        if not loaded.input.count_windows(halves[row]):
            continue
        windows = by_hand(dataset.read(row).astype(float), halves[row], **config)
        with torch.no_grad():
            c_RND = loaded.encoder(torch.tensor(windows, dtype=torch.float32))
        expected.append(torch.cat([c_RND.mean(1), c_RND.std(1, correction=0)], 1))
        at += [(row, starts[row] + window_s * i) for i in range(len(windows))]
    expected = torch.cat(expected).numpy()
    error = np.abs(np.array(table["embedding"]) - expected).max() / np.abs(expected).max()
    assert error < 1e-5 and at == list(zip(table["row"], table["start_s"], strict=True))

    sets = [f"train.{name}" for name in ("steps=2", "validate_every=1", "batch_crops=4")]
    sets += ["augment.rlm=0.5", "train.precision=fp32", "train.peak_tflops=1"]
    words = [word for one in sets for word in ("--set", one)]
    capsys.readouterr()
    for _ in range(2):  # resumes, with the same facts
        run("finetune", "--start", model, "--data", data, "--task", "sex", "--out", tuned, *words)
    said = capsys.readouterr().out
    known = [bool(sex) for sex in dataset.table(["sex"])["sex"].to_pylist()]
    short = sum(np.equal(halves, 1) & known) if config == TEN else 0
    assert (short > 0) == (config == TEN)
    assert (f"{short} labelled crops are left out: shorter than the 10 s" in said) == (short > 0)
    counts = re.search(r": (\d+) to learn from, (\d+) to \D+, (\d+) for the test", said).groups()
    assert sum(map(int, counts)) == known.count(True) - short
    assert f"{counts[0]} training crops" in said
    lines = (tuned / "validation.jsonl").read_text().splitlines()[1:]
    best = max(json.loads(line)["auroc"] for line in lines)
    scored = omnilead.evaluate(tuned, data=data, role="valid")
    assert scored["metrics"]["auroc"] == pytest.approx(best, abs=1e-6)
    run("predict", "--model", tuned, "--data", data, "--out", tmp_path / "p.csv")
    folders = [json.loads((one / "model/preprocessing.json").read_text()) for one in (model, tuned)]
    assert folders[0] == folders[1] and folders[1]["segment_s"] == window_s
    assert omnilead.load(tuned).input == signals(config)

    again = read_settings(None, {"start": str(model), "data.datasets": [data]})
    assert again.model_input == signals(config) and read_starting_weights(again)
    other = again.model_copy(update={"input": replace(again.input, scale="layernorm")})
    with pytest.raises(ConfigError, match=r"another input: input\.scale is .* there, 'layernorm'"):
        read_starting_weights(other)
    capsys.readouterr()
    assert main(["pretrain", *map(str, how), "--out", str(model), "--set", "input.fs_hz=200"]) == 2
    assert "cannot resume: input.fs_hz changed" in capsys.readouterr().err


def test_older_folders_load_as_before():
    document = {"segment_s": 5.0, "fs_hz": 500, "scale": "millivolt", "leads": ["I", "II"]}
    assert Input.from_document(document, 2) == Input((0, 1), (0, 1))
    assert Input(ALL_LEADS, ALL_LEADS).uses_stored_halves


NET = """
from torch import nn

class Net(nn.Conv1d):
    width = 8

    def __init__(self, leads):
        super().__init__(leads, 8, 10, 10)

    def forward(self, x_RLT):
        assert x_RLT.shape[1:] == (12, 1000)
        return super().forward(x_RLT).mT
"""


def test_an_encoder_of_ones_own_is_fine_tuned_on_other_windows(dataset, tmp_path):
    data, tuned, net = dataset.root.url, tmp_path / "tuned", tmp_path / "net.py"
    net.write_text(NET)
    tree = {"input": TEN, "model": {"encoder": f"{net}:Net"}}
    (tmp_path / "start.yaml").write_text(json.dumps(tree))
    words = ["--task", "sex", "--out", tuned, "--set", "train.steps=2", "train.precision=fp32"]
    run("finetune", "--start", tmp_path / "start.yaml", "--data", data, *words)
    net.unlink()
    out = tmp_path / "p.parquet"
    run("predict", "--model", tuned, "--code", "--data", data, "--per", "crop", "--out", out)
    model, table = omnilead.load(tuned, code=True), parquet.read_table(out).to_pydict()
    assert model.input == signals(TEN) and len(table["row"]) > 100
    x_RLT = [by_hand(dataset.read(row).astype(float), 2, **TEN) for row in table["row"]]
    with torch.no_grad():
        expected = model.scores(torch.tensor(np.concatenate(x_RLT)).float())
    np.testing.assert_allclose(table["F"], expected[:, 0], atol=1e-5)
