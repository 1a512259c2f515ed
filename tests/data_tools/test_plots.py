"""Figures are to scale, and state what they show and what is missing."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from omnilead.data_tools import plots
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.ecg.mean_beat import heart_rate
from omnilead.data_tools.ecg.paper import ROWS_Y_MM, TRACE_X_MM, ecg_figure
from omnilead.data_tools.ecg.record import CLASS_ABBREVIATIONS, LEADS
from omnilead.data_tools.plots import save_figure

RAMP = np.tile(np.linspace(-1000, 1000, 5000), (12, 1))


def square_waves(mv=1.0):
    """0 and `mv` by turns, half a second each, in all leads, in microvolts; a little more often 0,
    so that 0 is the median."""
    high = np.arange(5000) % 500 >= 260
    return np.tile(np.int16(1000 * mv) * high, (12, 1))


def lines(figure, label):
    """The points [N, 2] of each line, in millimetres."""
    drawn = [line for line in figure.axes[0].lines if line.get_label() == label]
    return [np.asarray(line.get_xydata(), float) for line in drawn]


def words(where):
    return [text.get_text() for text in where.texts]


def test_every_row_has_a_calibration_pulse_on_a_page_of_a4():
    figure = ecg_figure(np.zeros((12, 5000)), 2)
    assert figure.get_size_inches() * 25.4 == pytest.approx([297, 210])
    assert figure.axes[0].get_window_extent().width / figure.dpi * 25.4 == pytest.approx(270)
    pulses = lines(figure, "calibration")
    assert [pulse[0, 1] for pulse in pulses] == list(ROWS_Y_MM)
    for pulse in pulses:
        high = pulse[pulse[:, 1] > pulse[0, 1]]
        assert np.ptp(high[:, 0]) == 5 and np.ptp(pulse[:, 1]) == 10
        assert pulse[:, 0].max() < TRACE_X_MM


def test_columns_are_contiguous_in_time():
    figure = ecg_figure(RAMP, 2)
    for i, lead in enumerate(LEADS):
        trace, start_s = lines(figure, f"trace {lead}")[0], 2.5 * (i // 3)
        end_s = min(start_s + 2.5, 4999 / 500)
        first_mv = -1 + 2 * start_s * 500 / 4999
        assert trace[[0, -1], 0] - TRACE_X_MM == pytest.approx([25 * start_s, 25 * end_s])
        assert trace[0, 1] - ROWS_Y_MM[i % 3] == pytest.approx(10 * first_mv)
    assert words(figure.axes[0])[:13] == [*LEADS, "II"]
    assert "25 mm/s   10 mm/mV   500 Hz" in words(figure)


def test_a_missing_lead_is_dashed_and_labelled():
    figure = ecg_figure(square_waves(), 2, missing=["V1", "V5"])
    assert words(figure.axes[0]).count("missing") == 2
    for lead in ("V1", "V5"):
        (line,) = lines(figure, f"missing {lead}")
        assert np.ptp(line, axis=0).tolist() == [62.5, 0]
        assert not lines(figure, f"trace {lead}")


@pytest.mark.parametrize(
    ("mv", "gain", "said"),
    [(3.0, 10, ""), (6.0, 5, "half gain"), (30.0, 5, "cut at the edge")],
)
def test_half_gain_is_used_only_when_needed_and_stated(mv, gain, said):
    figure = ecg_figure(square_waves(mv), 2)
    assert np.ptp(lines(figure, "trace II")[1][:, 1]) == pytest.approx(mv * gain)
    assert np.ptp(lines(figure, "calibration")[0][:, 1]) == pytest.approx(gain)
    text = " | ".join(words(figure))
    assert f"   {gain} mm/mV   " in text and said in text
    assert ("half gain" in text, "cut" in text) == (gain == 5, mv == 30)


def test_a_short_record_starts_again_in_later_columns():
    """A crop of 5 s still has chest leads: their columns show its own time, not an empty paper."""
    figure = ecg_figure(RAMP, 1)
    assert lines(figure, "trace II")[1][:, 0].max() <= TRACE_X_MM + 125  # the rhythm strip
    assert any("5 s long" in text for text in words(figure))
    for lead, like in (("V1", "I"), ("V4", "aVR")):
        moved = lines(figure, f"trace {lead}")[0] - lines(figure, f"trace {like}")[0]
        assert moved == pytest.approx(np.tile([125.0, 0.0], (len(moved), 1)))


def test_the_rhythm_strip_uses_another_lead_if_ii_has_no_signal():
    uv = square_waves()
    uv[1] = 700  # flat
    strip = lines(ecg_figure(uv, 2, missing=["I"]), "trace III")[1]
    assert strip[0, 1] == ROWS_Y_MM[3] and len(strip) == 5000


def test_names_of_leads_hide_no_part_of_a_trace():
    """They stand above their own trace, and below all traces in the drawing's order."""
    figure = ecg_figure(square_waves(1.5)[:, ::-1], 2)  # high at the beginning of each lead
    (axes,) = figure.axes
    figure.draw_without_rendering()
    for name in axes.texts:
        box = name.get_window_extent()
        assert axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
        assert not name.get_path_effects()
        for line in axes.lines:
            if line.get_label() == f"trace {name.get_text()}":
                assert line.get_zorder() > name.get_zorder()
                assert not box.count_contains(axes.transData.transform(line.get_xydata()))


def test_flags_stand_in_the_picture(dataset):
    page = replace(dataset[3], flags=["implausible", "flat:V1"]).plot()
    assert any("flagged: implausible, flat:V1" in text.get_text() for text in page.texts)


def test_rate_and_axis_stand_in_the_picture(dataset):
    ecg = dataset[3]
    silent = replace(ecg, signal_uv=0 * ecg.signal_uv)
    for shown, says in ((ecg, "/min, QRS axis "), (silent, "no heart rate or axis: 0 beats")):
        written = words(shown.plot())
        assert any(says in text and "(computed, not a diagnosis)" in text for text in written)


def tick_names(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def titled(figure):
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def test_the_summary_shows_ecgs_measurements_and_counts(dataset):
    table = dataset.table(["source", "age", "fs_source_hz"])
    panels = titled(plots.dataset_figure(dataset))
    ecgs = [axes for title, axes in panels.items() if title.startswith("crop ")]
    assert [len(axes.lines) for axes in ecgs] == [4] * 6
    uv = dataset[0].signal_uv[LEADS.index("II")]
    drawn = ecgs[0].lines[1].get_ydata()
    assert drawn + 2 == pytest.approx((uv - np.median(uv)) / 1000, abs=1e-4)
    for title, column in (("age, years", "age"), ("rate of the recording, Hz", "fs_source_hz")):
        counted = sum(bar.get_height() for bar in panels[title].patches)
        assert counted == len(table) - table[column].null_count
    sources = panels[f"{len(dataset):,} crops by source and role"]
    counts = Counter(table["source"].to_pylist())
    drawn = dict(zip(tick_names(sources), words(sources), strict=False))
    assert drawn == {name: f"{count:,}" for name, count in counts.items()}
    classes = panels["crops with each diagnosis class"]
    labels = dict(zip(CLASS_ABBREVIATIONS, dataset.labels.sum(axis=0).tolist(), strict=True))
    drawn = dict(zip(tick_names(classes), words(classes), strict=False))
    assert drawn == {name: f"{count:,}" for name, count in labels.items() if count}


def test_a_wrong_rate_is_seen_in_the_summary(dataset, monkeypatch):
    """ECGs of 250 Hz that were read as 500 Hz have twice the heart rate."""
    ecgs = [dataset.read(row) for row in range(20)]
    slow = min(
        ecgs, key=lambda uv: heart_rate(uv / 1000)
    )  # regular, and not too fast to be counted twice
    fast = np.tile(slow[:, ::2], 2)
    for uv in (slow, fast):
        monkeypatch.setattr(Dataset, "read", lambda self, row, uv=uv: uv)
        rates = next(
            axes
            for title, axes in titled(plots.dataset_figure(dataset)).items()
            if "heart" in title
        )
        assert rates.get_xlabel() == f"median {heart_rate(uv / 1000):.3g}"
    assert heart_rate(fast / 1000) == pytest.approx(2 * heart_rate(slow / 1000), rel=0.1)


def test_a_summary_of_ecgs_without_labels_has_no_panel_for_them(dataset, monkeypatch):
    assert "crops with each diagnosis class" in titled(plots.dataset_figure(dataset))
    monkeypatch.setattr(Dataset, "labels", np.zeros((len(dataset), 26), bool))
    assert "crops with each diagnosis class" not in titled(plots.dataset_figure(dataset))


def test_a_notebook_shows_a_crop_on_paper(dataset):
    png = dataset[3]._repr_png_()
    assert png == dataset[3].plot()._repr_png_() and png.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_save_is_deterministic_and_leaves_nothing_else(suffix, start, tmp_path):
    first, second = (tmp_path / f"{name}.{suffix}" for name in "ab")
    second.write_bytes(b"old")
    save_figure(ecg_figure(square_waves(), 1, title="t"), first)
    save_figure(ecg_figure(square_waves(), 1, title="t"), second)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(start)
    assert sorted(tmp_path.iterdir()) == [first, second]


def test_an_ecg_can_be_plotted(dataset):
    page = dataset[3].plot()
    (axes,) = page.axes
    assert "aVR" in {text.get_text() for text in axes.texts}
    assert any(dataset[3].record in text.get_text() for text in page.texts)
    for figure in (page, plots.dataset_figure(dataset)):
        assert figure._repr_png_().startswith(b"\x89PNG")
