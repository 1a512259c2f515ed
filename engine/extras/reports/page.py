"""The page of a report, and what stands on it: nothing here needs matplotlib, which takes 0.3 s to
import.

    render("RUN: report", "Pre-training", "RUN", ["step 100"], [ReportSection("Loss", charts=[svg])])
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2

from ...settings.files import flatten
from ...settings.metrics import label_of
from ...training.metrics import Array

Tile = tuple[str, str, str]  # label, value, detail


@dataclass(frozen=True)
class ReportSection:
    """A section of a page. report.html draws the fields that are set, in this order."""

    title: str = ""
    tiles: Sequence[Tile] = ()
    charts: Sequence[str] = ()
    columns: int = 3
    # rows of numbers under a row of names; a row whose second cell is "0" is grey
    grid: Sequence[Sequence[str]] = ()
    table: Sequence[tuple[str, str]] = ()
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


@dataclass(frozen=True, eq=False)
class Line:
    key: str  # the id of the curve in the page
    label: str
    x: Array
    y: Array  # NaN or infinite where there is no number
    colour: int = 0
    dashed: bool = False
    chance: float | None = None  # the value of guessing


@dataclass(frozen=True)
class LineStyle:
    unit: str = ""
    percent: bool = False
    log: bool = False
    floor: float | None = None  # the y axis reaches at least down to it
    smooth: bool = True
    x_label: str = "step"
