"""Draw a crop of a dataset on ECG paper."""

from typing import TYPE_CHECKING

from ..ecg.paper import caption_of, computed, ecg_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .dataset import Ecg


def plot_ecg(ecg: "Ecg") -> "Figure":
    """A figure of a crop's twelve leads on ECG paper, to scale; notebooks display it."""
    title = f"{ecg.source}/{ecg.record}, from {ecg.start_s:g} s"
    caption = caption_of(ecg.age, ecg.sex, ecg.dx)
    caption = f"{computed(ecg.signal_uv, ecg.halves, ecg.missing_leads)}. {caption}"
    if ecg.flags:  # first, because a long caption is cut
        caption = f"flagged: {', '.join(ecg.flags)}. {caption}"
    return ecg_figure(ecg.signal_uv, ecg.halves, title, caption, ecg.missing_leads)
