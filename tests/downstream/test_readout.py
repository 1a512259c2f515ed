"""Read-outs: each part against its definition, and the same numbers from every door."""

from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import SafetensorError

import omnilead
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.ecg.mean_beat import MEASUREMENTS, RHYTHM_MEASUREMENTS, measurements
from omnilead.downstream.inference.commands import load_model_and_precision
from omnilead.downstream.interop.onnx import to_onnx
from omnilead.downstream.tasks.readout import BEAT_OFFSETS_S, parse_readout, read_out, readout_width
from omnilead.engine.settings.errors import ConfigError, OutputError
from tests.conftest import save_model, save_probed
from tests.data_tools.test_mean_beat import REGULAR, ecg
from tests.downstream.evaluate.conftest import quick  # noqa: F401

ALL_PARTS = "mean+std+beats+rhythm+waveform"
MV = np.stack([ecg(REGULAR), ecg(REGULAR, 30)]).astype(np.float32) / 1000


def test_mean_and_spread_of_the_tokens():
    c_RND = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0))
    found = read_out(parse_readout("std+mean"), c_RND, torch.zeros(3, 12, 9))
    assert torch.equal(found[:, 4:], c_RND.mean(1))
    np.testing.assert_allclose(found[:, :4], c_RND.numpy().std(1), rtol=1e-5)


def test_tokens_around_the_beats():
    """Tokens of 0.1 s that hold their own time since the nearest R peak."""
    beats_s, centre_s = np.arange(0.5, 10, 1.0), np.arange(0.05, 10, 0.1)
    since_s = (centre_s - 0.1) % 1 - 0.4
    c_RND = torch.from_numpy(since_s.astype(np.float32))[None, :, None]
    mv_RLT = torch.from_numpy(ecg(beats_s)[None] / 1000)
    (found,) = read_out(parse_readout("beats"), c_RND, mv_RLT).numpy()
    np.testing.assert_allclose(found, BEAT_OFFSETS_S, atol=0.06)
    nothing = read_out(parse_readout("beats"), c_RND, torch.zeros(1, 12, 5000))
    assert nothing.isfinite().all()


def test_measurements_of_the_signal():
    one, twice = measurements(np.stack([MV[0], 2 * MV[0]]))
    found = dict(zip(MEASUREMENTS, one, strict=True))
    peak_L = MV[0][:, 2200].tolist()  # of the beat at 4.4 s
    for lead, peak in zip(LEADS, peak_L, strict=True):
        wave = found[f"R {lead}"] if peak > 0 else found[f"S {lead}"]
        assert wave == pytest.approx(peak, abs=0.15 * abs(peak) + 0.1)
    assert found["RR mean"] == pytest.approx(np.log(0.8), abs=0.01)
    heights = slice(len(RHYTHM_MEASUREMENTS), None)
    np.testing.assert_allclose(twice[heights], 2 * one[heights], rtol=1e-4)
    hidden = MV[:1].copy()
    hidden[:, 1:] = 0
    assert (measurements(hidden)[0, heights].reshape(-1, 12)[:, 1:] == 0).all()


def test_every_door_gives_the_same_numbers(dataset, tmp_path):
    """The model in memory, and `embed` by the model's own read-out and by a given one."""
    save_model(tmp_path / "A", readout="mean+rhythm")
    model = omnilead.load(tmp_path / "A")
    given = {"model": tmp_path / "A", "data": dataset.root.url, "per": "half"}
    out = tmp_path / "E.parquet"
    omnilead.embed(**given, out=out, readout=ALL_PARTS)
    table, other = omnilead.embed(**given), pq.read_table(out)
    width = model.encoder.width
    assert table.schema.field("embedding").type.list_size == width + len(MEASUREMENTS)
    assert other.schema.field("embedding").type.list_size == readout_width(
        parse_readout(ALL_PARTS), width
    )
    first = dataset.read(int(table["row"][0].as_py()))[:, :2500]
    signal = np.where(first == -32768, 0, first) / 1000
    for text, found in (("", table), (ALL_PARTS, other)):
        expected = model.embed(signal, 500, LEADS, readout=text)
        np.testing.assert_allclose(found["embedding"][0].as_py(), expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(model.embed(signal, 500, LEADS, readout="mean"), expected[:width])
    with pytest.raises(ConfigError, match=r"another job wrote it \(readout was mean\+std"):
        omnilead.embed(**given, out=out)


def test_a_probe_of_one_lead_uses_no_other(dataset, tmp_path):
    save_model(tmp_path / "A")
    how = {"leads": "I", "readout": "std"}
    save_probed(tmp_path / "A", dataset.root.url, "sex", tmp_path / "B", **how)
    assert omnilead.load(tmp_path / "B").input.seen_leads == (0,)


@pytest.mark.parametrize("text", ["loud", "mean+mean", "mean+", "+"])
def test_unknown_parts_are_refused(text):
    with pytest.raises(ConfigError, match="join one or more of these by"):
        parse_readout(text)


def test_a_normalised_input_has_no_amplitudes(tmp_path):
    save_model(tmp_path / "A", preprocessing={"scale": "zscore"})
    model = omnilead.load(tmp_path / "A")
    assert model.suitable_readout("mean+std") == ("mean", "std")
    with pytest.raises(ConfigError, match="need a model whose input is in millivolts at 500 Hz"):
        model.suitable_readout("rhythm")


def test_the_shipped_model_is_complete():
    model = omnilead.load("small")
    signal = np.concatenate([MV[0]] * 2, 1)[:, :5000]
    assert model.embed(signal, 500, LEADS).isfinite().all()
    assert "rhythm" in model.readout
    with pytest.raises(ConfigError, match="or a shipped model: small"):
        omnilead.load("smal")


@pytest.mark.filterwarnings("ignore:.* lack leads")  # of few synthetic ECGs
@pytest.mark.parametrize("task", ["sex", "age"])
def test_a_probe_becomes_the_head_of_a_model(task, dataset, tmp_path):
    """The weights and the standardisation are in one layer; `rhythm` stands where it was named."""
    save_model(tmp_path / "A")
    given = {"model": tmp_path / "A", "data": dataset.root.url, "readout": "mean+rhythm+std"}
    save_probed(**given, task=task, out=tmp_path / "B")
    model = omnilead.load(tmp_path / "B")
    assert model.readout == ("mean", "rhythm", "std") and model.head_info.task == task
    half, _ = load_model_and_precision(str(tmp_path / "B"), precision="bf16")
    assert half.head.weight.equal(model.head.weight)  # rounded, it would lose the standardisation
    assert "was not trained with missing leads" in model.missing_leads_doubt()
    for out, says in (
        ("B", "B: already exists"),
        ("A/config.json/B", "no folder can be created in"),
    ):
        with pytest.raises(ConfigError, match=f"--out .*{says}"):
            save_probed(**given, task=task, out=tmp_path / out)
    full = mock.Mock(side_effect=SafetensorError("I/O error: No space (os error 28)"))
    with (
        mock.patch("safetensors.torch.save_file", full),
        pytest.raises(OutputError, match=f"--out {tmp_path / 'D'}: No space left on device: free"),
    ):
        save_probed(**given, task=task, out=tmp_path / "D")
    assert not list(tmp_path.glob("*D")) and not list(tmp_path.glob(".D*"))
    with pytest.raises(ConfigError, match="ONNX cannot measure rhythm"):
        to_onnx(model, tmp_path / "B.onnx")
    with pytest.warns(UserWarning, match="of the 180 ECGs read were fitted on"):
        table = omnilead.predict(tmp_path / "B", data=dataset.root.url, per="half")
    embedded = omnilead.embed(tmp_path / "B", data=dataset.root.url, per="half")
    c_D = torch.tensor(embedded["embedding"][3].as_py())
    expected = model.head_info.scores(model.head(c_D)[None]).detach()[0]
    name = model.classes[0] + (f"_{model.unit}" if model.unit else "")
    assert table[name][3].as_py() == pytest.approx(float(expected[0]), rel=1e-3)
