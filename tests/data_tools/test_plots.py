"""Figures are to scale, and state what they show and what is missing."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from omnilead.data_tools.plots import ROWS_Y_MM, TRACE_X_MM, ecg_figure, save, summary_figure
from omnilead.data_tools.record import ABBREVIATIONS, LEADS

FS_HZ = 500.0


def square_waves(mv: float = 1.0) -> np.ndarray:
    """0 and `mv` by turns, half a second each, in all leads, in microvolts; a little more often 0,
    so that 0 is the median."""
    t = np.arange(5000) / FS_HZ
    return np.tile(np.int16(1000 * mv) * (t % 1.0 >= 0.52), (len(LEADS), 1))


def lines(figure: Figure, label: str) -> list[Line2D]:
    return [line for line in figure.axes[0].lines if line.get_label() == label]


def points(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_xydata(), dtype=np.float64)


def words(where: Figure | Axes) -> list[str]:
    return [text.get_text() for text in where.texts]


def test_every_row_has_a_calibration_pulse_on_a_page_of_a4() -> None:
    figure = ecg_figure(np.zeros((12, 5000)), 2)
    assert figure.get_size_inches() * 25.4 == pytest.approx([297, 210])
    assert figure.axes[0].get_window_extent().width / figure.dpi * 25.4 == pytest.approx(270)
    pulses = [points(line) for line in lines(figure, "calibration")]
    assert [pulse[0, 1] for pulse in pulses] == list(ROWS_Y_MM)
    for pulse in pulses:
        high = pulse[pulse[:, 1] > pulse[0, 1]]
        assert np.ptp(high[:, 0]) == 5 and np.ptp(pulse[:, 1]) == 10
        assert pulse[:, 0].max() < TRACE_X_MM


def test_columns_are_contiguous_in_time() -> None:
    ramp = np.tile(np.linspace(-1000, 1000, 5000), (12, 1))
    figure = ecg_figure(ramp, 2)
    for i, lead in enumerate(LEADS):
        trace = points(lines(figure, f"trace {lead}")[0])
        start_s = 2.5 * (i // 3)
        assert trace[0, 0] == pytest.approx(TRACE_X_MM + 25 * start_s)
        assert trace[-1, 0] == pytest.approx(TRACE_X_MM + 25 * min(start_s + 2.5, 4999 / FS_HZ))
        assert trace[0, 1] == pytest.approx(
            ROWS_Y_MM[i % 3] + 10 * (-1 + 2 * start_s * FS_HZ / 4999)
        )
    assert [words(figure.axes[0])[i] for i in range(13)] == [*LEADS, "II"]
    assert len(lines(figure, "separator")) == 9
    assert "25 mm/s   10 mm/mV   500 Hz" in words(figure)


def test_a_missing_lead_is_dashed_and_labelled() -> None:
    figure = ecg_figure(square_waves(), 2, missing=["V1", "V5"])
    assert words(figure.axes[0]).count("missing") == 2
    for lead in ("V1", "V5"):
        (line,) = lines(figure, f"missing {lead}")
        assert (
            line.is_dashed()
            and np.ptp(points(line)[:, 0]) == 62.5
            and np.ptp(points(line)[:, 1]) == 0
        )
        assert not lines(figure, f"trace {lead}")
    assert "missing" not in words(ecg_figure(square_waves(), 2).axes[0])


def test_half_gain_is_used_only_when_needed_and_stated() -> None:
    def footer(mv: float) -> str:
        figure = ecg_figure(square_waves(mv), 2)
        trace, pulse = points(lines(figure, "trace II")[1]), points(lines(figure, "calibration")[0])
        assert np.ptp(trace[:, 1]) == pytest.approx(mv * np.ptp(pulse[:, 1]))
        return " | ".join(words(figure))

    assert "   10 mm/mV   " in footer(3.0) and "half gain" not in footer(3.0)
    assert (
        "   5 mm/mV   " in footer(6.0) and "half gain" in footer(6.0) and "cut" not in footer(6.0)
    )
    assert "   5 mm/mV   " in footer(30.0) and "cut at the edge" in footer(30.0)
    uv = square_waves()
    uv[0, 3000:] = 30_000  # lead I is printed up to 2.5 s only
    assert "25 mm/s   10 mm/mV   500 Hz" in words(ecg_figure(uv, 2))


def test_a_short_record_starts_again_in_later_columns() -> None:
    """A crop of 5 s still has chest leads: their columns show its own time, not an empty paper."""
    figure = ecg_figure(np.tile(np.linspace(0, 2000, 5000), (12, 1)), 1)
    assert points(lines(figure, "trace II")[1])[:, 0].max() <= TRACE_X_MM + 125  # the rhythm strip
    assert any("5 s long" in text for text in words(figure))
    for lead, like, columns in (("V1", "I", 2), ("V4", "aVR", 2)):
        moved = points(lines(figure, f"trace {lead}")[0]) - points(
            lines(figure, f"trace {like}")[0]
        )
        np.testing.assert_allclose(
            moved, np.tile([columns * 62.5, 0.0], (len(moved), 1)), atol=1e-9
        )


@pytest.mark.parametrize("how", ["flat", "missing"])
def test_the_rhythm_strip_uses_another_lead_if_ii_has_no_signal(how: str) -> None:
    uv = square_waves()
    assert len(lines(ecg_figure(uv, 2), "trace II")) == 2
    uv[1] = 700 if how == "flat" else uv[1]
    figure = ecg_figure(uv, 2, missing=["I", "II"] if how == "missing" else ["I"])
    strip = points(lines(figure, "trace III")[1])
    assert strip[0, 1] == ROWS_Y_MM[3] and len(strip) == 5000


def tick_names(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize("sources", [1, 15])
def test_the_summary_shows_all_names_and_counts(sources: int) -> None:
    counts = {f"source_{i}": {"train": 1000 * (i + 1), "valid": 10 + i} for i in range(sources)}
    counts["source_0"]["test"] = 7
    classes = {name: 3**i for i, name in enumerate(ABBREVIATIONS[:12])}
    figure = summary_figure(counts, classes, "a $title")
    left, right = figure.axes
    totals = {source: sum(roles.values()) for source, roles in counts.items()}
    assert tick_names(left) == sorted(totals, key=lambda source: -totals[source])
    assert words(left) == [f"{totals[source]:,}" for source in tick_names(left)]
    lengths = np.array([[bar.get_width() for bar in group] for group in left.containers])
    assert lengths.sum(axis=0).tolist() == [totals[source] for source in tick_names(left)]
    legend = [text.get_text() for text in left.get_legend().get_texts()]  # type: ignore[union-attr]
    assert legend == [
        f"{role}  {sum(part.get(role, 0) for part in counts.values()):,}"
        for role in ("train", "valid", "test")
    ]
    assert (
        tick_names(right)[:12] == list(reversed(ABBREVIATIONS[:12]))
        and len(tick_names(right)) == 26
    )
    assert words(right) == [f"{classes.get(name, 0):,}" for name in tick_names(right)]
    figure.canvas.draw()
    for text in (text for axes in (left, right) for text in (*axes.texts, *axes.get_yticklabels())):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_save_is_deterministic_and_leaves_nothing_else(tmp_path: Path, suffix: str) -> None:
    paths = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    paths[1].write_bytes(b"old")
    for path in paths:
        save(ecg_figure(square_waves(), 1, title="t"), path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert first.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix])
    for stamp in (b"Software", b"CreationDate", b"dc:date"):
        assert stamp not in first
    assert sorted(tmp_path.iterdir()) == paths
