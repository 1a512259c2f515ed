"""The page of a report: sections of tiles, pictures and tables, in one file that loads nothing.

render("RUN: report", "Pre-training", "RUN", ["step 100"], [ReportSection("Curves", pictures=[...])])
"""

import base64
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

import jinja2
from matplotlib.figure import Figure

from ...settings.files import flatten
from ...settings.metrics import label_of

Tile = tuple[str, str, str]  # label, value, detail
WIDE_IN = 5.5  # wider pictures are scrolled on a phone instead of shrunk


class Picture(NamedTuple):
    title: str
    source: str  # a data: URI
    wide: bool


def picture(title: str, figure: Figure, kind: str = "svg", **options: Any) -> Picture:
    """The same figure gives the same bytes."""
    file = io.BytesIO()
    if kind == "svg":
        options |= {"metadata": {"Date": None}, "dpi": 150}  # dpi: of what is drawn as an image
    figure.savefig(file, format=kind, **options)
    mime = {"svg": "svg+xml"}.get(kind, kind)
    source = f"data:image/{mime};base64,{base64.b64encode(file.getvalue()).decode()}"
    return Picture(title, source, figure.get_figwidth() > WIDE_IN)


@dataclass(frozen=True)
class ReportSection:
    """A section of a page. report.html shows the fields that are set, in this order."""

    title: str = ""
    tiles: Sequence[Tile] = ()
    pictures: Sequence[Picture] = ()
    table: Sequence[Sequence[str]] = ()  # rows under a row of names
    facts: Sequence[tuple[str, str]] = ()
    config: str = ""
    note: str = ""
    remarks: Sequence[str] = ()


def render(
    title: str, kind: str, name: str, facts: Sequence[str], sections: Sequence[ReportSection]
) -> str:
    templates = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    page = (files("omnilead.engine.extras.reports") / "report.html").read_text()
    template = templates.from_string(page)
    return template.render(title=title, kind=kind, name=name, facts=facts, sections=sections) + "\n"


def readable(tree: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(tree, dict):
        return
    for key, value in flatten(tree).items():
        text = str(value)
        if isinstance(value, list):
            text = " ".join(map(str, value)) or "none"
        if value != {}:
            yield key, text


def shown(value: float | None, percent: bool = False) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    if percent:
        return f"{value:.1%}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def titled(metric: str) -> str:
    label = label_of(metric)
    return label[:1].upper() + label[1:]
