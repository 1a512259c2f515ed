"""engine.load: embeddings from a model folder, and what is refused. References: pre-training's
encoder, the dataset builder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import omnilead
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.prepare import crop_count, prepare_crop
from omnilead.data_tools.record import EcgRecord
from omnilead.engine.common import ALL, LEADS, ConfigError
from omnilead.engine.inference.trained_model import TrainedModel, crops
from omnilead.engine.model.config import ObjectiveConfig
from omnilead.engine.model.encoder import pool
from omnilead.engine.model.folder import LoadError, config_of, seal
from omnilead.engine.model.input import Input, SignalError
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.tasks.finetuning import read_start

Saved = Callable[..., Path]
DIAGNOSIS: dict[str, Any] = {
    "task": "diagnosis",
    "kind": "multilabel",
    "classes": ["AF", "NSR", "SB"],
}
DIAGNOSIS["thresholds"] = [0.5] * 3
AGE: dict[str, Any] = {"task": "age", "kind": "regression", "classes": ["age"], "unit": "years"}
AGE |= {"center": [60.0], "scale": [15.0]}
torch.set_num_threads(1)


def ecg(seconds: float = 10, fs_hz: float = 500, leads: int = 12, seed: int = 0) -> np.ndarray:
    """Millivolts: beats with a different shape and amplitude in each lead, baseline wander and
    noise."""
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * fs_hz)) / fs_hz
    gain, phase = rng.normal(0, 0.7, (leads, 1)), rng.uniform(0, 1, (leads, 1))
    beats = gain * np.cos(np.pi * (1.2 * t + 0.02 * phase)) ** 40
    return (
        beats
        + 0.1 * np.sin(2 * np.pi * (0.3 * t + phase))
        + 0.01 * rng.normal(size=(leads, len(t)))
    )


@pytest.fixture
def model(saved_model: Saved) -> TrainedModel:
    return omnilead.load(saved_model().parent)


def test_unreadable_weights_are_refused(
    saved_model: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root, as which tests may run, may read all files
    denied = mock.Mock(side_effect=PermissionError)
    folder = saved_model()
    monkeypatch.setattr("omnilead.engine.model.folder.file_sha256", denied)
    with pytest.raises(LoadError, match="permission denied"):
        omnilead.load(folder)


def test_weights_equal_those_in_the_file(saved_model: Saved) -> None:
    folder = saved_model(head=DIAGNOSIS)
    config = config_of(json.loads((folder / "config.json").read_text()))
    state = load_file(folder / "model.safetensors")
    head = state.pop("head.weight"), state.pop("head.bias")
    whole = Pretrainer(config, ObjectiveConfig()).eval()
    whole.load_state_dict(state)
    x = torch.randn(3, 12, 2500)
    for place in (folder, folder.parent, str(folder)):
        model = omnilead.load(place)
        assert not model.training and model(x).dtype == torch.float32
        assert torch.equal(model(x), pool(whole.encoder(x)))
    assert torch.allclose(model.logits(x), pool(whole.encoder(x)) @ head[0].T + head[1], atol=1e-6)
    assert model.classes == ("AF", "NSR", "SB")


def test_a_model_from_a_bucket_and_one_in_half_precision(saved_model: Saved) -> None:
    folder = saved_model()
    state = load_file(folder / "model.safetensors")
    weights(folder, **{name: w.half() for name, w in state.items()})
    bucket = fsspec.filesystem("memory")
    bucket.put(str(folder), "/bucket/run/model", recursive=True)
    x = torch.randn(1, 12, 2500)
    assert torch.equal(omnilead.load("memory://bucket/run")(x), omnilead.load(folder)(x))
    with pytest.raises(LoadError, match="no model there"):
        omnilead.load("memory://bucket/other")
    with pytest.raises(LoadError, match="no such folder"):
        omnilead.load("nowhere/at/all")


def test_an_encoder_that_was_never_masked_and_a_head_without_classes(saved_model: Saved) -> None:
    folder = saved_model(head={"task": "identification", "kind": "identity"})
    names = load_file(folder / "model.safetensors")
    unused = [name for name in names if "mask" in name or name.startswith("local.")]
    weights(folder, **dict.fromkeys(unused))
    model = omnilead.load(folder)
    assert model.head is None and model(torch.randn(1, 12, 2500)).isfinite().all()
    with pytest.raises(ConfigError, match="no head"):
        model.logits(torch.randn(1, 12, 2500))


def sealed(folder: Path) -> None:
    """Write the current sha256 of the files to config.json."""
    seal(folder, json.loads((folder / "config.json").read_text()))


def change(folder: Path, name: str, **to: Any) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | to))
    sealed(folder)


def model_setting(folder: Path, **to: Any) -> None:
    settings = json.loads((folder / "config.json").read_text())["model"]
    change(folder, "config.json", model=settings | to)


def weights(folder: Path, **to: Tensor | None) -> None:
    path = folder / "model.safetensors"
    changed = load_file(path) | {name.replace("__", "."): w for name, w in to.items()}
    save_file({name: w for name, w in changed.items() if w is not None}, path)
    sealed(folder)


def cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-5000])
    sealed(folder)


def not_exported(folder: Path) -> None:
    (folder.parent / "checkpoints").mkdir()
    folder.rename(folder.parent.parent / "elsewhere")


FOREIGN = '{"architectures": ["Wav2Vec2Model"], "hidden_size": 32, "format_version": 1}'
HARMS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (
        lambda d: weights(d, encoder__layers__1__fc1__bias=None),
        "1 missing: encoder.layers.1.fc1.bias",
    ),
    "unexpected": (lambda d: weights(d, encoder__x=torch.zeros(48)), "1 unexpected: encoder.x"),
    "reshaped": (
        lambda d: weights(d, encoder__norm__weight=torch.zeros(31)),
        r"encoder.norm.weight is \[31\], not \[32\]",
    ),
    "other width": (lambda d: model_setting(d, width=64), "and 26 more"),
    "no head": (lambda d: weights(d, head__bias=None), "1 missing: head.bias"),
    "unnamed head": (
        lambda d: change(d, "config.json", head=None),
        "2 unexpected: head.bias, head.weight",
    ),
    "no kind": (lambda d: change(d, "config.json", head={"task": "age"}), "'age'"),
    "no classes": (
        lambda d: change(d, "config.json", head={"task": "diagnosis", "kind": "multilabel"}),
        "0 classes",
    ),
    "no scale": (
        lambda d: change(d, "config.json", head=AGE | {"scale": []}),
        "1 classes, 1 center, 0 scale",
    ),
    "a head of text": (lambda d: change(d, "config.json", head="diagnosis"), "head=diagnosis"),
    "no settings": (lambda d: (d / "config.json").write_text(FOREIGN), "no model settings"),
    "wrong settings": (lambda d: model_setting(d, heads=5), "model.heads=5"),
    "version": (lambda d: change(d, "config.json", format_version=2), "format_version=2"),
    "not json": (lambda d: (d / "config.json").write_text("{"), "config.json"),
    "no preprocessing": (
        lambda d: (d / "preprocessing.json").unlink(),
        "preprocessing.json: no such file",
    ),
    "other rate": (
        lambda d: change(d, "preprocessing.json", fs_hz=25),
        "fs_hz=25: must be 50 to 2000",
    ),
    "no rate": (lambda d: change(d, "preprocessing.json", fs_hz="250"), "fs_hz='250'"),
    "nested scale": (lambda d: change(d, "preprocessing.json", scale=[[1]]), "scale="),
    "few names": (lambda d: change(d, "preprocessing.json", leads=["I", "II"]), "12 channels"),
    "cut": (cut, "cannot be read as safetensors"),
    "not exported": (not_exported, "run omnilead pretrain or finetune --export"),
    "emptied": (lambda d: (d / "model.safetensors").unlink(), "no model.safetensors"),
}


@pytest.mark.parametrize("kind", HARMS)
def test_an_invalid_model_is_a_one_line_error(kind: str, saved_model: Saved) -> None:
    folder = saved_model(head=DIAGNOSIS)
    harm, text = HARMS[kind]
    harm(folder)
    with pytest.raises(LoadError, match=text) as caught:
        omnilead.load(folder.parent)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_incomplete_documents_are_read(saved_model: Saved) -> None:
    folder = saved_model()
    document = json.loads((folder / "config.json").read_text())
    del document["model"]["leads"]
    seal(folder, document | {"trained": None})
    assert omnilead.load(folder).history == {} and read_start(str(folder)).splits == []


@pytest.mark.parametrize(
    "fs_hz, unit", [(500, "mV"), (257, "uV"), (1000, "mV"), (400, "uV"), (333.5, "mV")]
)
def test_an_array_becomes_what_the_dataset_builder_makes_of_it(fs_hz: float, unit: str) -> None:
    """Values, missing leads, cuts: 26.2 s in three crops, shuffled leads, some missing samples."""
    names = tuple(np.random.default_rng(1).permutation(LEADS)[:9])
    signal = ecg(26.2, fs_hz, len(names))
    signal[2, int(12 * fs_hz)] = np.nan
    signal[5] = np.inf
    signal[4, int(21 * fs_hz)] = 50.0  # beyond int16 microvolts
    signal *= 1e3 if unit == "uV" else 1
    record = EcgRecord("a", signal, fs_hz, names, unit=unit)
    cut = crops(signal, fs_hz, names, unit, Input(ALL, ALL))
    assert len(cut.uv_BLT) == crop_count(signal.shape[1], fs_hz) == 3
    for index, crop_uv in enumerate(cut.uv_BLT):
        expected = np.zeros((12, 5000), np.int16)
        prepared = prepare_crop(record, index, expected)
        assert (cut.start_s[index], cut.halves[index]) == (prepared.start_s, prepared.halves)
        assert np.array_equal(crop_uv, expected)


def test_integers_and_tensors_give_the_same_crops() -> None:
    signal_uv = np.rint(ecg() * 1e3).astype(np.int32)
    expected = crops(signal_uv, 500, LEADS, "uV", Input(ALL, ALL)).uv_BLT
    assert np.array_equal(expected[0], signal_uv)
    for same in (
        signal_uv.astype(np.float32),
        torch.from_numpy(signal_uv),
        torch.from_numpy(signal_uv).double(),
    ):
        assert np.array_equal(crops(same, 500, LEADS, "uV", Input(ALL, ALL)).uv_BLT, expected)


def test_a_crop_has_the_same_embedding_in_memory_and_in_a_dataset(
    dataset: Dataset, model: TrainedModel
) -> None:
    crop = dataset.read(0)
    mv_LT = torch.from_numpy(crop.astype(np.float32) * np.float32(1e-3))
    x_SLT = mv_LT.view(12, 2, 2500).transpose(0, 1)
    expected = model(x_SLT).mean(0)
    assert torch.allclose(model.embed(crop, 500, LEADS, "uV"), expected, atol=1e-6)
    assert torch.allclose(model.embed(crop / 1e6, 500, LEADS, "V"), expected, atol=1e-6)


def test_lead_names_decide_and_not_their_order(model: TrainedModel) -> None:
    signal, rng = ecg(), np.random.default_rng(0)
    expected = model.embed(signal, 500, LEADS)
    order = rng.permutation(12)
    assert torch.equal(model.embed(signal[order], 500, [LEADS[i].lower() for i in order]), expected)
    assert torch.equal(model.embed(torch.from_numpy(signal), 500, "12"), expected)
    few = np.zeros_like(signal)
    few[[1, 6]] = signal[[1, 6]]
    assert torch.equal(model.embed(signal[[6, 1]], 500, "V1,II"), model.embed(few, 500, LEADS))
    holed = signal.copy()
    holed[[0, *range(2, 6), *range(7, 12)], 700] = (
        np.nan
    )  # a lead that was not measured is a lead that is not there
    assert torch.equal(model.embed(holed, 500, LEADS), model.embed(few, 500, LEADS))
    assert not torch.equal(model.embed(few, 500, LEADS), expected)


def test_missing_samples_in_integers_and_masked_arrays(model: TrainedModel) -> None:
    signal_uv = np.rint(ecg() * 1e3).astype(np.int16)
    holed, mask = signal_uv.copy(), np.zeros(signal_uv.shape, bool)
    holed[6, 100:110], mask[6, 100:110] = (
        -32768,
        True,
    )  # as scipy.io.loadmat gives a record of the Challenge
    masked = np.ma.masked_array(signal_uv, mask)
    expected = model.embed(signal_uv * (np.arange(12) != 6)[:, None], 500, LEADS, "uV")
    for same in (
        holed,
        holed.astype(">i2"),
        torch.from_numpy(holed),
        masked,
        masked.astype(">i2"),
        masked.astype(np.float32),
    ):
        assert torch.equal(model.embed(same, 500, LEADS, "uV"), expected)
    with pytest.raises(SignalError, match="no valid lead"):
        model.embed(np.full((12, 5000), -32768, np.int16), 500, LEADS, "uV")


def test_several_records_and_any_length(model: TrainedModel) -> None:
    signals = np.stack([ecg(23, seed=seed) for seed in range(3)])
    together = model.embed(signals, 500, LEADS)
    assert together.shape == (3, 32) and together.dtype == torch.float32
    for one, signal in zip(together, signals, strict=True):
        fives = torch.stack(
            [model.embed(signal[:, i * 2500 : (i + 1) * 2500], 500, LEADS) for i in range(4)]
        )
        assert torch.allclose(one, fives.mean(0), atol=1e-6)  # what is left, 3 s, is no segment
    assert model.embed(signals[:0], 500, LEADS).shape == (0, 32)


def test_predictions_are_the_mean_over_segments(saved_model: Saved) -> None:
    signals = np.stack([ecg(13, seed=seed) for seed in range(2)])
    rhythm = {"task": "rhythm", "kind": "multiclass", "classes": ["AF", "NSR"]}
    kinds = {"a": DIAGNOSIS, "b": rhythm, "c": AGE}
    for place, head in kinds.items():
        model = omnilead.load(saved_model(place, head=head))
        x_RLT = model.segments(signals[1], 500, LEADS)
        logits, scores = model.logits(x_RLT), model.scores(x_RLT)
        kind = {"a": logits.sigmoid(), "b": logits.softmax(1), "c": 15 * logits + 60}[place]
        assert torch.allclose(scores, kind)
        first, second = model.predict(signals, 500, LEADS)
        expected = dict(zip(head["classes"], scores.mean(0).tolist(), strict=True))
        assert second == pytest.approx(expected, abs=1e-5)
        assert model.predict(signals[0], 500, LEADS) == pytest.approx(first, abs=1e-5)
        assert model.unit == head.get("unit", "")
        assert model.thresholds == tuple(head.get("thresholds", ()))
    assert model.predict(signals[:0], 500, LEADS) == []
    assert model.head is not None
    model.head.bias.data[:] = torch.inf
    with pytest.raises(ConfigError, match="outputs are not finite"):
        model.predict(signals[0], 500, LEADS)
    with pytest.raises(ConfigError, match="no head"):
        omnilead.load(saved_model("d")).predict(signals[0], 500, LEADS)


def test_ten_seconds_in_which_nothing_was_measured_are_left_out(model: TrainedModel) -> None:
    signal = ecg(30)
    signal[:, 6000] = np.nan
    kept = np.concatenate([signal[:, :5000], signal[:, 10000:]], 1)
    assert torch.allclose(model.embed(signal, 500, LEADS), model.embed(kept, 500, LEADS), atol=1e-6)
    quiet = np.concatenate([signal[:, :5000], np.full((12, 5000), 0.1)], axis=1)
    beating = model.embed(signal[:, :5000], 500, LEADS)
    assert torch.allclose(model.embed(quiet, 500, LEADS), beating, atol=1e-6)


def test_scores_of_each_lead(saved_model: Saved) -> None:
    """For a model trained on z-scores, the gain and offset of a lead do not matter, and a missing
    lead is zero."""
    model, signal = omnilead.load(saved_model(preprocessing={"scale": "zscore"})), ecg()[:8]
    expected = model.embed(signal, 500, LEADS[:8])
    gains = np.linspace(0.5, 3, 8)[:, None]
    assert torch.allclose(
        model.embed(signal * gains + gains, 500, LEADS[:8]), expected, atol=0.02
    )  # of whole microvolts
    uv = np.rint(signal * 1e3)
    z = np.zeros((12, 5000))
    z[:8] = (uv - uv.mean(1, keepdims=True)) / uv.std(1, keepdims=True)
    x_SLT = torch.from_numpy(z).float().view(12, 2, 2500).transpose(0, 1)
    assert torch.allclose(model(x_SLT).mean(0), expected, atol=1e-5)


def test_models_of_fewer_leads(saved_model: Saved) -> None:
    signal = ecg()
    padded = omnilead.load(saved_model("a", preprocessing={"seen": ["I", "V2"]}))
    assert torch.equal(padded.embed(signal, 500, LEADS), padded.embed(signal[[0, 7]], 500, "I,V2"))
    with pytest.raises(SignalError, match="I,V2"):
        padded.embed(signal[[1]], 500, "II")
    small = omnilead.load(saved_model("b", leads=2))
    assert torch.equal(small.embed(signal, 500, LEADS), small.embed(signal[[1, 0]], 500, "II,I"))
    with pytest.raises(SignalError, match="needs II too"):
        small.embed(signal[[0]], 500, "I")


@pytest.mark.parametrize(
    "change, text",
    [
        ({"signal": ecg() * 1e3}, "is the unit smaller"),
        ({"unit": "uV"}, "is the unit larger"),
        ({"unit": "V"}, "is the unit smaller"),
        ({"unit": "mmHg"}, "unknown unit: .mmHg.: give .* V, mV or uV"),
        ({"fs_hz": float("nan")}, "fs_hz=nan"),
        ({"fs_hz": "fast"}, "fs_hz='fast'"),
        ({"leads": [*LEADS[:11], "V7"]}, "'V7'"),
        ({"leads": [*LEADS[:11], "i"]}, "named twice"),
        ({"leads": LEADS[:3]}, "for 3 leads"),
        ({"signal": ecg().T}, "for 12 leads"),
        ({"signal": ecg() > 0}, "bool"),
        ({"signal": ecg()[0]}, "for 12 leads"),
        ({"signal": ecg(4.9)}, "4.9 s"),
        ({"signal": np.zeros((12, 0))}, "0 s of signal"),
        ({"signal": np.full((12, 5000), np.nan)}, "no valid lead"),
        ({"signal": np.ones((12, 5000))}, "no valid lead"),
        ({"signal": np.stack([ecg(), ecg() * np.nan])}, r"signal\[1\]: no valid lead"),
    ],
)
def test_an_invalid_ecg_is_a_one_line_error(
    change: dict[str, Any], text: str, model: TrainedModel
) -> None:
    given = {"signal": ecg(), "fs_hz": 500, "leads": LEADS, "unit": "mV"} | change
    with pytest.raises(ConfigError, match=text) as caught:
        model.embed(**given)
    assert "\n" not in str(caught.value)
