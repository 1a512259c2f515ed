"""What a report's page is made of beside its charts: HTML, styles for light and dark, and the reading of curves at the pointer.

    page("title", [tiles([("Loss", "3.21", "at step 100")]), section("Loss", [(chart, False)]), table([("steps", "100")])])

All of it stands in the page: nothing is loaded. Every text that comes in is escaped, except cards, which are charts.
"""

from collections.abc import Iterable, Sequence
from html import escape

COLOURS = 5  # classes s0 to s4 for strokes, f0 to f4 for fills


def page(title: str, parts: Iterable[str]) -> str:
    colours = "".join(f".s{i}{{stroke:var(--c{i})}}.f{i}{{fill:var(--c{i})}}" for i in range(COLOURS))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escape(title)}</title>\n'
        f"<style>{STYLE}{colours}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n</main>\n<script>{HOVER}</script></body></html>\n"
    )


def header(kind: str, title: str, facts: Sequence[str]) -> str:
    return f'<header><p class="kind">{escape(kind)}</p><h1>{escape(title)}</h1><p>{escape(" · ".join(facts))}</p></header>'


def tiles(told: Iterable[tuple[str, str, str]]) -> str:
    """Name, number, what it is of."""
    inside = [f"<span>{escape(n)}</span><b>{escape(v)}</b><small>{escape(w)}</small>" for n, v, w in told]
    return f'<div class="tiles">{"".join(f"<div class=tile>{tile}</div>" for tile in inside)}</div>'


def remarks(lines: Sequence[str]) -> str:
    return f'<ul class="remarks">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>' if lines else ""


def section(title: str, cards: Sequence[tuple[str, bool]], columns: int = 3, note: str = "") -> str:
    """Charts, and whether each is as wide as two; under them a note."""
    inside = "".join(f'<div class="card{" wide" * wide}">{card}</div>' for card, wide in cards)
    charts = f'<div class="cards by{columns}">{inside}</div>{small(note)}'
    return f"<section><h2>{escape(title)}</h2>{charts}</section>" if cards else ""


def table(rows: Sequence[tuple[str, str]]) -> str:
    inside = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows)
    return f"<table>{inside}</table>" if rows else ""


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], dim: Sequence[bool] = ()) -> str:
    """A table of numbers under their names; `dim`: rows that say nothing."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    off = dim or [False] * len(rows)
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    inside = "".join(f"<tr{' class=dim' * grey}>{row}</tr>" for row, grey in zip(cells, off, strict=True))
    return f'<div class="scroll"><table class="grid"><thead><tr>{top}</tr></thead><tbody>{inside}</tbody></table></div>'


def part(title: str, *inside: str) -> str:
    """A section of anything."""
    return f"<section><h2>{escape(title)}</h2>{''.join(inside)}</section>"


def folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>" if text else ""


def small(text: str) -> str:
    return f'<p class="small">{escape(text)}</p>' if text else ""


STYLE = """
:root{--paper:#f6f6f4;--card:#fff;--ink:#14141c;--grey:#6f6f78;--rule:#ececf0;--axis:#b4b4bc;
--c0:#2f6690;--c1:#c0641c;--c2:#2a7a4f;--c3:#5b3a72;--c4:#c0392b;
--font:system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
@media screen and (prefers-color-scheme:dark){:root{--paper:#131417;--card:#1c1d22;--ink:#ececf1;--grey:#9a9aa5;--rule:#2b2c33;
--axis:#5a5b66;--c0:#6aaedb;--c1:#e69550;--c2:#5fbf8b;--c3:#b48fd0;--c4:#f0705f}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 var(--font)}
main{max-width:1290px;margin:0 auto;padding:36px 24px 64px}
header p{margin:0;color:var(--grey)}
header .kind{font-size:12px;letter-spacing:.08em;text-transform:uppercase}
h1{font-size:30px;line-height:1.2;margin:2px 0 4px;overflow-wrap:anywhere}
h2{font-size:17px;margin:38px 0 12px}
.tile,.card,.remarks,table,details{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:10px;margin-top:24px}
.tile{padding:12px 14px;display:flex;flex-direction:column}
.tile span,.tile small{color:var(--grey);font-size:12px}
.tile b{font-size:23px;line-height:1.3;font-weight:600;font-variant-numeric:tabular-nums}
.cards{display:grid;gap:14px}
.card{padding:15px 17px 9px;min-width:0}
@media(min-width:620px){.by2,.by3{grid-template-columns:1fr 1fr}.wide{grid-column:span 2}}
.wide{overflow-x:auto}
.wide .chart{min-width:560px}
@media(min-width:620px){.by4{grid-template-columns:1fr 1fr}}
@media(min-width:980px){.by4{grid-template-columns:repeat(4,1fr)}.by3{grid-template-columns:1fr 1fr 1fr}}
.remarks{margin:18px 0 0;padding:12px 18px 12px 34px;border-left:4px solid var(--c1)}
table{border-collapse:separate;border-spacing:0;width:100%;padding:8px 4px;font-size:13px}
th,td{text-align:left;vertical-align:top;padding:3px 14px;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
th{font-weight:400;color:var(--grey);white-space:nowrap}
td{width:100%}
.scroll{overflow-x:auto}
.grid th,.grid td{text-align:right;width:auto;white-space:nowrap;padding:4px 14px;border-bottom:1px solid var(--rule)}
.grid th:first-child,.grid td:first-child{text-align:left}
.grid tr:last-child td{border-bottom:0}
.grid .dim td{color:var(--grey)}
details{margin-top:14px;padding:10px 18px}
summary{cursor:pointer}
pre{font:12px/1.5 ui-monospace,"DejaVu Sans Mono",monospace;overflow-x:auto}
.small{color:var(--grey);font-size:13px}
@media print{body{background:#fff}.card,.tile{break-inside:avoid}}
.chart{display:block;width:100%;height:auto;overflow:visible}
.chart text{font:11px var(--font);fill:var(--grey);font-variant-numeric:tabular-nums}
.chart .title{font-size:13.5px;font-weight:600;fill:var(--ink)}
.chart .key{fill:var(--ink)}
.chart .grid{stroke:var(--rule)}
.chart .axis{stroke:var(--axis)}
.chart .curve{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.chart .level{stroke-width:1.2;stroke-dasharray:2 3}
.chart .raw{stroke-width:1;opacity:.32}
.chart .dashed{stroke-dasharray:5 3.5}
.chart .none{fill:var(--rule)}
.chart .number{font-size:9px;fill:var(--ink)}
.chart .lost{stroke:var(--c4);stroke-width:1.6}
.chart .cross{stroke:var(--axis);visibility:hidden}
.chart .read{visibility:hidden}
.chart .read text{fill:var(--ink)}
.chart .read rect{fill:var(--card);opacity:.94}
"""

# Curves are read back from their paths: the page holds every number once.
HOVER = """
const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
const number = v => Math.abs(v) >= 1e5 || (v && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(4));
for (const svg of document.querySelectorAll("svg.lines")) {
  const {x0, x1, y0, y1, left, top, width, height, log, scale} = Object.fromEntries(
    Object.entries(svg.dataset).map(([key, value]) => [key, Number(value)]));
  const curves = [...svg.querySelectorAll("path.data")].map(path => ({
    colour: path.dataset.colour,
    label: path.dataset.label,
    points: path.getAttribute("d").split(/[ML]/).filter(Boolean).map(pair => pair.split(" ").map(Number)),
  })).filter(curve => curve.points.length);
  if (!curves.length) continue;
  const cross = svg.querySelector(".cross"), read = svg.querySelector(".read");
  const show = visibility => { cross.style.visibility = read.style.visibility = visibility; };
  const value = y => {
    const at = y0 + (top + height - y) / height * (y1 - y0);
    return (log ? 10 ** at : at) * scale;
  };
  const add = (name, attributes) => {
    const node = document.createElementNS(svg.namespaceURI, name);
    for (const [key, to] of Object.entries(attributes)) node.setAttribute(key, to);
    return read.appendChild(node);
  };
  svg.addEventListener("pointermove", event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    if (at < left || at > left + width) return show("hidden");
    const near = curves.map(curve => nearest(curve.points, at)), x = nearest(near, at)[0];
    const step = Math.round(x0 + (x - left) / width * (x1 - x0)).toLocaleString("en");
    const reading = i => `${curves[i].label} ${number(value(near[i][1]))}${svg.dataset.unit}`;
    const lines = curves.map((curve, i) => [`var(--c${curve.colour})`, reading(i)]);
    lines.unshift(["var(--grey)", `${svg.dataset.across} ${step}`]);
    const wide = 6.4 * Math.max(...lines.map(([, text]) => text.length)) + 12;
    const from = x > left + width / 2 ? x - wide - 5 : x + 5;
    read.replaceChildren();
    add("rect", {x: from, y: top, width: wide, height: 15 * lines.length + 5, rx: 3});
    lines.forEach(([fill, text], i) => {
      add("text", {x: from + 6, y: top + 14 + 15 * i, style: `fill:${fill}`}).textContent = text;
    });
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    show("visible");
  });
  svg.addEventListener("pointerleave", () => show("hidden"));
}
"""
