"""engine.load: embeddings from a model folder, and what is refused. References: pre-training's
encoder, the dataset builder."""

import json
from unittest import mock

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import omnilead
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.ecg.crops import crop_count, prepare_crop
from omnilead.data_tools.ecg.record import EcgRecord
from omnilead.downstream.finetuning.start import read_start_model
from omnilead.downstream.inference.trained_model import cut_crops
from omnilead.engine.data.seen import unknown_seen_record
from omnilead.engine.model.config import ObjectiveConfig
from omnilead.engine.model.encoder import pool
from omnilead.engine.model.folder import LoadError, config_of, write_config
from omnilead.engine.model.input import Input, SignalError
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.leads import ALL_LEADS
from tests.engine.model.tiny import ecg
from tests.tables import tabulated

DIAGNOSIS = {"task": "diagnosis", "kind": "multilabel", "classes": ["AF", "NSR", "SB"]}
DIAGNOSIS |= {"thresholds": [0.5] * 3}
RHYTHM = {"task": "rhythm", "kind": "multiclass", "classes": ["AF", "NSR"]}
AGE = {"task": "age", "kind": "regression", "classes": ["age"], "unit": "years"}
AGE |= {"center": [60.0], "scale": [15.0]}
WHOLE = Input(ALL_LEADS, ALL_LEADS)


@pytest.fixture
def model(saved_model):
    return omnilead.load(saved_model().parent)


@pytest.fixture
def embed(model):
    return lambda signal, leads=LEADS, unit="mV": model.embed(signal, 500, leads, unit)


def test_unreadable_weights_are_refused(saved_model, monkeypatch):
    # Root, as which tests may run, may read all files
    folder, denied = saved_model(), mock.Mock(side_effect=PermissionError)
    monkeypatch.setattr("omnilead.engine.model.folder.file_sha256", denied)
    with pytest.raises(LoadError, match="permission denied"):
        omnilead.load(folder)


def test_weights_equal_those_in_the_file(saved_model):
    folder = saved_model(head=DIAGNOSIS)
    state = load_file(folder / "model.safetensors")
    weight, bias = state.pop("head.weight"), state.pop("head.bias")
    whole = Pretrainer(config_of(document(folder)), ObjectiveConfig()).eval()
    whole.load_state_dict(state)
    x = torch.randn(3, 12, 2500)
    expected = pool(whole.encoder(x))
    for place in (folder, folder.parent, str(folder)):
        model = omnilead.load(place)
        assert not model.training and torch.equal(model(x), expected)
    assert torch.allclose(model.logits(x), expected @ weight.T + bias, atol=1e-6)
    assert model.classes == ("AF", "NSR", "SB")


def test_a_model_from_a_bucket_and_one_in_half_precision(saved_model):
    folder = saved_model()
    state = load_file(folder / "model.safetensors")
    weights(folder, **{name: w.half() for name, w in state.items()})
    bucket = fsspec.filesystem("memory")
    bucket.put(str(folder), "/bucket/run/model", recursive=True)
    x = torch.randn(1, 12, 2500)
    model = omnilead.load("memory://bucket/run")
    assert model(x).dtype == torch.float32 and torch.equal(model(x), omnilead.load(folder)(x))
    with pytest.raises(LoadError, match="has no complete model"):
        omnilead.load("memory://bucket/other")
    with pytest.raises(LoadError, match="no such folder"):
        omnilead.load("nowhere/at/all")


def test_an_encoder_that_was_never_masked_and_a_head_without_classes(saved_model):
    folder = saved_model(head={"task": "identification", "kind": "identity"})
    names = load_file(folder / "model.safetensors")
    unused = [name for name in names if "mask" in name or name.startswith("local.")]
    weights(folder, **dict.fromkeys(unused))
    model = omnilead.load(folder)
    assert model.head is None and model(torch.randn(1, 12, 2500)).isfinite().all()
    with pytest.raises(ConfigError, match="no head"):
        model.predict(ecg(), 500, LEADS)


def document(folder, name="config.json"):
    return dict(json.loads((folder / name).read_text()))


def sealed(folder):
    """Write the current sha256 of the files to config.json."""
    write_config(folder, document(folder))


def weights(folder, **to):
    path = folder / "model.safetensors"
    state = load_file(path) | to
    save_file({name: w for name, w in state.items() if w is not None}, path)
    sealed(folder)


def text(folder, name, content):
    (folder / name).write_text(content)


def removed(folder, name):
    (folder / name).unlink()


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])
    sealed(folder)


def not_exported(folder):
    (folder.parent / "checkpoints").mkdir()
    folder.rename(folder.parent.parent / "elsewhere")


FOREIGN = '{"architectures": ["Wav2Vec2Model"], "hidden_size": 32, "format_version": 1}'
OTHER_NORM = {"encoder.norm.weight": torch.zeros(31)}
HARMS = [
    ("1 missing: encoder.layers.1.fc1.bias", weights, {"encoder.layers.1.fc1.bias": None}),
    ("1 unexpected: encoder.x", weights, {"encoder.x": torch.zeros(48)}),
    (r"encoder.norm.weight is \[31\], not \[32\]", weights, OTHER_NORM),
    ("1 missing: head.bias", weights, {"head.bias": None}),
    ("has no section `model`", text, {"name": "config.json", "content": FOREIGN}),
    ("config.json", text, {"name": "config.json", "content": "{"}),
    ("preprocessing.json: no such file", removed, {"name": "preprocessing.json"}),
    ("no model.safetensors", removed, {"name": "model.safetensors"}),
    ("cannot be read as safetensors", cut, {}),
    ("run omnilead pretrain --export", not_exported, {}),
]


def refused(folder, says):
    with pytest.raises(LoadError, match=says) as caught:
        omnilead.load(folder.parent)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(("says", "harm", "to"), HARMS, ids=[case[0] for case in HARMS])
def test_an_invalid_model_is_a_one_line_error(says, harm, to, saved_model):
    folder = saved_model(head=DIAGNOSIS)
    harm(folder, **to)
    refused(folder, says)


# An entry of a model's documents, the JSON that is in its place, and what the line says
ENTRIES = tabulated(r"""
config format_version      | 2                 | format_version=2
config model.width         | 64                | and 26 more
config model.heads         | 5                 | model.heads=5
config readout             | ""                | config\.json: readout=
config readout             | null              | config\.json: readout=
config readout             | 5                 | config\.json: readout=
config readout             | ["mean"]          | config\.json: readout=
config head                | null              | 2 unexpected: head.bias, head.weight
config head                | "diagnosis"       | head=diagnosis
config head                | {"task": "age"}   | 'age'
config head.classes        |                   | 0 classes
config head.classes        | ["A", "A", "B"]   | config.json: .*two classes have the same name
config head.classes        | ["A", "B", ""]    | config.json: .*head.classes=''
config head.thresholds     | [NaN, 0.5, 0.5]   | config.json: .*head.thresholds=nan: input should be a finite number
config head.thresholds     | [1e12, 0.5, 0.5]  | config.json: .*head.thresholds=1.*less than or equal to 1
config head.thresholds     | [-0.1, 0.5, 0.5]  | config.json: .*head.thresholds=-0.1: .*greater than or equal to 0
config head.chosen         | [2.0, 0.5, 0.5]   | config.json: .*head.chosen=2.0
age    head.center         |                   | 1 classes, 0 center, 1 scale
age    head.center         | [NaN]             | config.json: .*head.center=nan
age    head.scale          | [Infinity]        | config.json: .*head.scale=inf
age    head.scale          | [-20.0]           | config.json: .*head.scale=-20.0
age    head.trees          | [1099511627776, 1] | config.json: .*head.trees=1099511627776
preprocessing fs_hz        | 25                | fs_hz=25: must be 50 to 2000
preprocessing fs_hz        | "250"             | fs_hz='250'
preprocessing scale        | [[1]]             | scale=
preprocessing leads        | ["I", "II"]       | 12 channels
preprocessing segment_s    | 11                | segment_s=11: must be above 0 and at most 10 s
preprocessing segment_s    | "5"               | segment_s='5'
preprocessing segment_s    | true              | segment_s=True: must be above 0
preprocessing band_hz      | []                | band_hz=\[\]: give \[LOW, HIGH\]
preprocessing band_hz      | [1, "a"]          | band_hz=
preprocessing band_hz      | [0.5, 250]        | less than half of fs_hz=500
""")
LONG = ("config readout", json.dumps("mean+" * 10**5), r"config\.json: readout=")


@pytest.mark.parametrize(("place", "value", "says"), [*ENTRIES, LONG], ids=lambda text: text[:30])
def test_an_invalid_entry_of_a_model_is_a_one_line_error(place, value, says, saved_model):
    file, place = place.split()
    folder = saved_model(head=AGE if file == "age" else DIAGNOSIS)
    path = folder / ("preprocessing.json" if file == "preprocessing" else "config.json")
    changed = entry = json.loads(path.read_text())
    *parents, name = place.split(".")
    for parent in parents:
        entry = entry[parent]
    entry.pop(name, None)
    if value:
        entry[name] = json.loads(value)
    path.write_text(json.dumps(changed))
    sealed(folder)
    refused(folder, says)


def test_incomplete_documents_are_read(saved_model):
    folder = saved_model()
    content = document(folder)
    del content["model"]["leads"]
    write_config(folder, content | {"trained": None})
    assert omnilead.load(folder).history == {} and read_start_model(str(folder)).seen.equals(
        unknown_seen_record()
    )


@pytest.mark.parametrize(
    "fs_hz, unit", [(500, "mV"), (257, "uV"), (1000, "mV"), (400, "uV"), (333.5, "mV")]
)
def test_an_array_becomes_what_the_dataset_builder_makes_of_it(fs_hz, unit):
    """Values, missing leads, cuts: 26.2 s in three crops, shuffled leads, some missing samples."""
    names = tuple(np.random.default_rng(1).permutation(LEADS)[:9])
    signal = ecg(26.2, fs_hz, len(names))
    signal[2, int(12 * fs_hz)] = np.nan
    signal[5] = np.inf
    signal[4, int(21 * fs_hz)] = 50.0  # beyond int16 microvolts
    signal *= 1e3 if unit == "uV" else 1
    record = EcgRecord("a", signal, fs_hz, names, unit=unit)
    cut = cut_crops(signal, fs_hz, names, unit, WHOLE)
    assert len(cut.uv_BLT) == crop_count(signal.shape[1], fs_hz) == 3
    for index, crop_uv in enumerate(cut.uv_BLT):
        expected = np.zeros((12, 5000), np.int16)
        prepared = prepare_crop(record, index, expected)
        assert (cut.start_s[index], cut.halves[index]) == (prepared.start_s, prepared.halves)
        assert np.array_equal(crop_uv, expected)


def test_lead_names_decide_and_not_their_order(embed):
    signal, order = ecg(), np.random.default_rng(0).permutation(12)
    expected = embed(signal)
    assert torch.equal(embed(signal[order], [LEADS[i].lower() for i in order]), expected)
    assert torch.equal(embed(torch.from_numpy(signal), "12"), expected)
    others = [lead for lead in range(12) if lead not in (1, 6)]
    few, holed = signal.copy(), signal.copy()
    few[others] = 0
    holed[others, 700] = np.nan  # a lead that was not measured is a lead that is not there
    for same in (embed(signal[[6, 1]], "V1,II"), embed(holed)):
        assert torch.equal(same, embed(few))
    assert not torch.equal(embed(few), expected)


def test_missing_samples_in_integers_and_masked_arrays(embed):
    uv = np.rint(ecg() * 1e3).astype(np.int16)
    expected = embed(uv * (np.arange(12) != 6)[:, None], unit="uV")
    mask = np.zeros(uv.shape, bool)
    mask[6, 100:110] = True
    masked = np.ma.masked_array(uv, mask)
    holed = masked.filled(-32768)  # as scipy.io.loadmat gives a record of the Challenge
    swapped = [array.astype(">i2") for array in (holed, masked)]
    for same in (holed, torch.from_numpy(holed), masked, masked.astype(np.float32), *swapped):
        assert torch.equal(embed(same, unit="uV"), expected)
    with pytest.raises(SignalError, match="no valid lead"):
        embed(np.full_like(uv, -32768), unit="uV")


def test_several_records_of_any_length(embed):
    records = np.stack([ecg(23, seed=seed) for seed in range(2)])
    for one, signal in zip(embed(records), records, strict=True):
        fives = [embed(signal[:, at : at + 2500]) for at in range(0, 10_000, 2500)]
        # what is left, 3 s, is no segment
        assert torch.allclose(one, torch.stack(fives).mean(0), atol=1e-6)
    assert embed(records[:0]).shape == (0, 32)


def test_predictions_are_the_mean_over_segments(saved_model):
    records = np.stack([ecg(13, seed=seed) for seed in range(2)])
    for head, link in (
        (DIAGNOSIS, torch.sigmoid),
        (RHYTHM, lambda logits_RK: logits_RK.softmax(1)),
        (AGE, lambda logits_RK: 15 * logits_RK + 60),
    ):
        model = omnilead.load(saved_model(str(head["task"]), head=head))
        x_RLT = model.segments(records[1], 500, LEADS)
        scores = model.scores(x_RLT)
        assert torch.allclose(scores, link(model.logits(x_RLT)))
        first, second = model.predict(records, 500, LEADS)
        expected = dict(zip(model.classes, scores.mean(0).tolist(), strict=True))
        assert second == pytest.approx(expected, abs=1e-5)
        assert model.predict(records[0], 500, LEADS) == pytest.approx(first, abs=1e-5)
        assert model.unit == head.get("unit", "")
        assert list(model.thresholds) == head.get("thresholds", [])
    assert model.predict(records[:0], 500, LEADS) == []
    assert model.head is not None
    model.head.bias.data[:] = torch.inf
    with pytest.raises(ConfigError, match="outputs are not finite"):
        model.predict(records[0], 500, LEADS)


def test_ten_seconds_in_which_nothing_was_measured_are_left_out(embed):
    signal = ecg(30)
    first, holed, last = np.split(signal.copy(), 3, axis=1)
    signal[:, 6000] = np.nan
    assert torch.allclose(embed(signal), embed(np.append(first, last, 1)), atol=1e-6)
    flat = np.full_like(holed, 0.1)
    both = np.append(first, last, 1)
    assert torch.allclose(embed(np.append(both, flat, 1)), embed(both), atol=1e-6)


def test_models_of_fewer_leads(saved_model):
    signal = ecg()
    padded = saved_model("a", preprocessing={"seen": ["I", "V2"]})
    for folder, rows, names, one, says in (
        (padded, [0, 7], "I,V2", "II", "I,V2"),
        (saved_model("b", leads=2), [1, 0], "II,I", "I", "needs II too"),
    ):
        model = omnilead.load(folder)
        expected = model.embed(signal, 500, LEADS)
        assert torch.equal(expected, model.embed(signal[rows], 500, names))
        with pytest.raises(SignalError, match=says):
            model.embed(signal[:1], 500, one)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"signal": ecg() * 1e3}, "give the true unit, which is probably smaller"),
        ({"unit": "uV"}, "give the true unit, which is probably larger"),
        ({"unit": "mmHg"}, "unknown unit: .mmHg.: give .* V, mV or uV"),
        ({"fs_hz": float("nan")}, "fs_hz=nan"),
        ({"fs_hz": "fast"}, "fs_hz='fast'"),
        ({"leads": [*LEADS[:11], "V7"]}, "'V7'"),
        ({"leads": [*LEADS[:11], "i"]}, "named twice"),
        ({"signal": ecg().T}, "has 5,000 rows and 12 columns: transpose it to .leads, samples."),
        ({"signal": ecg() > 0}, "bool"),
        ({"signal": ecg(4.9)}, "4.9 s"),
        ({"signal": np.zeros((12, 0))}, "0 s of signal are too short"),
        ({"signal": np.full((12, 5000), np.nan)}, "no valid lead"),
        ({"signal": np.ones((12, 5000))}, "no valid lead"),
        ({"signal": np.stack([ecg(), ecg() * np.nan])}, r"signal\[1\]: no valid lead"),
    ],
)
def test_an_invalid_ecg_is_a_one_line_error(change, says, model):
    given = {"signal": ecg(), "fs_hz": 500, "leads": LEADS, "unit": "mV"} | change
    with pytest.raises(ConfigError, match=says) as caught:
        model.embed(**given)
    assert "\n" not in str(caught.value)
