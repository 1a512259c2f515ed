"""Renders the pages of the reports: jinja templates in this folder, filled with tables and
pictures. A page is one file, and loads no other file.

render_page("run.html", title="RUN: report", result=[["", "value"], ["Loss", "0.31"]], ...)
"""

import base64
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from matplotlib.figure import Figure

from omnilead.engine.settings.files import flatten
from omnilead.engine.settings.metrics import label_of


class Picture(NamedTuple):
    title: str
    source: str  # a data: URI


def to_picture(title: str, figure: Figure, kind: str = "svg", **options: Any) -> Picture:
    """Renders a figure as a picture for a page. The same figure gives the same bytes."""
    file = io.BytesIO()
    if kind == "svg":
        # dpi is for the parts of an SVG that are drawn as images
        options |= {"metadata": {"Date": None}, "dpi": 150}
    figure.savefig(file, format=kind, **options)
    mime = {"svg": "svg+xml"}.get(kind, kind)
    data = base64.b64encode(file.getvalue()).decode()
    return Picture(title, f"data:image/{mime};base64,{data}")


def render_page(template: str, **content: Any) -> str:
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return templates.get_template(template).render(content) + "\n"


def readable_items(tree: Any) -> Iterator[tuple[str, str]]:
    """Yields (dotted key, text) for the values of nested dicts."""
    if not isinstance(tree, dict):
        return
    for key, value in flatten(tree).items():
        text = str(value)
        if isinstance(value, list):
            text = " ".join(map(str, value)) or "none"
        if value != {}:
            yield key, text


def number_text(value: float | None, percent: bool = False) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    if percent:
        return f"{value:.1%}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def metric_title(metric: str) -> str:
    label = label_of(metric)
    return label[:1].upper() + label[1:]
