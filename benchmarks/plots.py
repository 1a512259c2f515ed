"""Records -> pictures: each benchmark's rates, where a step's time goes, its roofline, the way from archive to weights."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import log10
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.tables import Part, at_one_size, is_peer, machine, number, repeated

OURS, OTHERS, INK = "#2f6690", "#b5b5bd", "#333333"
NAMES = {"cost": "a step by its stages", "step": "one training step"}
UNITS = {"ingest": "records (plan: headers)", "loader": "crops of 10 s", "step": "crops of 10 s"}
WAY = {  # case -> what a crop passes through, in this order; the first case that was measured counts
    ("ingest", "read: omnilead"): "read a WFDB record",
    ("ingest", "ingest: omnilead, tar"): "archive to verified shards",
    ("loader", "gather: tar, batch 256"): "shards to memory",
    ("loader", "RLM: torch, batch 256"): "to a batch, with lead masking",
    ("loader", "physio3+RLM: torch, batch 256"): "to a batch, with noise too",
    ("e2e", "tar: small, 64 crops"): "train the small model, whole loop",
    ("step", "omnilead: bf16, 4 crops"): "a step of the paper's model, bf16",
}


def pictures(parts: dict[tuple[str, str], Part]) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """File name, without its ending, and what draws it."""
    for (benchmark, device), part in parts.items():
        name = benchmark + ("_gpu" if device == "cuda" else "")
        if benchmark in ("ingest", "loader", "step"):
            if shown(part):
                yield name, partial(rates, part)
        elif benchmark == "cost":
            yield f"{name}_time", partial(where_time_goes, part)
            yield f"{name}_roofline", partial(roofline, part)
    on_cpu = {benchmark: part for (benchmark, device), part in parts.items() if device == "cpu"}
    way = {label: on_cpu[place]["results"].get(case) for (place, case), label in WAY.items() if place in on_cpu}
    if len(found := {label: result for label, result in way.items() if result}) > 2:
        machines = dict.fromkeys(machine(on_cpu[place]) for place, _ in WAY if place in on_cpu)
        yield "way", partial(whole_way, found, " and ".join(machines))


def blank(width: float, height: float, title: str) -> tuple[Figure, Any]:
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10)
    return drawn, axes


def title_of(part: Part) -> str:
    return f"{NAMES.get(part['benchmark'], part['benchmark'])}, {machine(part)}, {part['date'][:10]}"


def shown(part: Part) -> dict[str, Any]:
    results = at_one_size(part) if part["benchmark"] == "loader" else part["results"]
    return {name: r for name, r in results.items() if not name.startswith(("verify", "matrix product"))}


def rates(part: Part) -> Figure:
    """Bars with their spread. On a GPU per second, else per CPU-second."""
    figure = "per_s" if part["config"].get("device") == "cuda" else "per_cpu_s"
    results = shown(part)
    drawn, axes = blank(9, 0.27 * len(results) + 1.2, title_of(part))
    names = list(reversed(results))
    ours = [not is_peer(name) and not any(peer in name for peer in ("loadmat", "webdataset", "streaming")) for name in names]
    bars(axes, names, [results[name][figure] for name in names], [OURS if own else OTHERS for own in ours])
    unit = "second" if figure == "per_s" else "CPU-second"
    scale = ", logarithmic" if axes.get_xscale() == "log" else ""
    axes.set_xlabel(
        f"{UNITS[part['benchmark']]} a {unit}{scale}; lowest to highest of {repeated(part)[1]} runs; grey: others",
        fontsize=9,
    )
    return drawn


def bars(axes: Any, names: Sequence[str], spreads: Sequence[dict[str, float]], colours: Sequence[str]) -> None:
    middle = [spread["median"] for spread in spreads]
    ends = [[abs(s[end] - s["median"]) for s in spreads] for end in ("low", "high")]
    axes.barh(names, middle, xerr=ends, color=colours, error_kw={"lw": 0.8, "ecolor": INK})
    for row, spread in enumerate(spreads):
        axes.annotate(f" {number(spread['median'])}", (spread["high"], row), va="center", fontsize=8)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.margins(y=0.01)
    low, high = min(spread["low"] for spread in spreads), max(spread["high"] for spread in spreads)
    if high < 10 * low:
        axes.set_xlim(0, high * 1.12)  # room for the largest's figure
    else:
        axes.set_xscale("log")
        axes.set_xlim(low / 3, high * (high / low) ** 0.12 * 1.5)


def where_time_goes(part: Part) -> Figure:
    """Measured bars with what the formula asks for drawn into them."""
    stages = {n: r for n, r in part["results"].items() if n not in ("all stages", "the whole step")}
    stages = dict(sorted(stages.items(), key=lambda item: float(item[1]["ms"]["median"])))
    whole = part["results"]["the whole step"]["ms"]["median"]
    drawn, axes = blank(9, 0.27 * len(stages) + 1.2, subtitle(part))
    measured = [r["ms"]["median"] for r in stages.values()]
    axes.barh(list(stages), measured, color=OURS, label="measured")
    axes.barh(list(stages), [r["predicted_ms"] for r in stages.values()], height=0.35, color="#f0c987", label="by formula")
    for row, (value, r) in enumerate(zip(measured, stages.values(), strict=True)):
        end = max(value, r["predicted_ms"])
        axes.annotate(f" {number(value)} ({100 * value / whole:.1f} %)", (end, row), va="center", fontsize=8)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.margins(y=0.01)
    axes.set_xlim(right=1.18 * max(*measured, *(r["predicted_ms"] for r in stages.values())))
    axes.set_xlabel(f"{unit_of(part)} of a step; share of the whole step's {number(whole)}", fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return drawn


def roofline(part: Part) -> Figure:
    """Each stage with matrix products: operations a byte, and operations a second; the machine's roof above them."""
    roof = part["machine"]
    peak, bandwidth = roof["tflops"] * 1e3, roof["gb_per_s"]  # GFLOP/s, GB/s
    stages = {n: r for n, r in part["results"].items() if r["gflop"] and n not in ("all stages", "the whole step")}
    points = {n: (r["gflop"] / r["gb"], 1e3 * r["gflop"] / r["ms"]["median"]) for n, r in stages.items()}
    drawn, axes = blank(9, 5.2, subtitle(part))
    left = min(x for x, _ in points.values()) / 2
    right = max(*(x for x, _ in points.values()), peak / bandwidth) * 4
    axes.plot([left, peak / bandwidth, right], [left * bandwidth, peak, peak], color=INK, lw=1.2)
    axes.annotate(
        f"{peak:,.0f} GFLOP/s", (right, peak), ha="right", va="bottom", fontsize=8, xytext=(0, 3), textcoords="offset points"
    )
    axes.annotate(f"{bandwidth:.3g} GB/s", (left, left * bandwidth), fontsize=8, xytext=(8, -14), textcoords="offset points")
    most = max(r["ms"]["median"] for r in stages.values())
    sizes = [20 + 400 * r["ms"]["median"] / most for r in stages.values()]
    axes.scatter(*zip(*points.values(), strict=True), s=sizes, color=OURS, alpha=0.55, lw=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for (name, point), at in zip(points.items(), beside(points, axes), strict=True):
        axes.annotate(name, point, xytext=at, textcoords="offset points", fontsize=7.5, va="center")
    axes.set_xlabel("operations a byte, by formula", fontsize=9)
    axes.set_ylabel(f"GFLOP a {'CPU-second' if 'CPU' in unit_of(part) else 'second'}; area: time", fontsize=9)
    return drawn


def beside(points: dict[str, tuple[float, float]], axes: Any) -> Iterator[tuple[float, float]]:
    """For each point the nearest place of its label, in points of print, that is off all points and the labels before it."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    at = {
        n: (560 * log10(x / left) / log10(right / left), 300 * log10(y / low) / log10(high / low))
        for n, (x, y) in points.items()
    }
    taken = [(x - 5, x + 5, y - 4, y + 4) for x, y in at.values()]
    for name, (x, y) in at.items():
        wide = 4.0 * len(name)
        places = [(dx, dy) for dy in (0, -11, 11, -22, 22, -33, 33, -44, -55) for dx in (9, -9 - wide)]
        for dx, dy in places:
            box = (x + dx, x + dx + wide, y + dy - 5, y + dy + 5)
            if not any(box[0] < r and box[1] > l_ and box[2] < t and box[3] > b for l_, r, b, t in taken):
                break
        taken.append(box)
        yield dx, dy


def whole_way(found: dict[str, dict[str, Any]], machines: str) -> Figure:
    title = f"From archive to weights: crops of 10 s a CPU-second, each stage by itself\n{machines}"
    drawn, axes = blank(9, 0.34 * len(found) + 1.2, title)
    names = list(reversed(found))
    bars(axes, names, [found[name]["per_cpu_s"] for name in names], [OURS] * len(names))
    axes.set_xlabel("crops (first two: records) of 10 s a CPU-second, logarithmic; lowest to highest", fontsize=9)
    return drawn


def subtitle(part: Part) -> str:
    given = part["input"]
    what = f"{given['crops']} crops, {given['precision']}, the {given['model']} model"
    return f"{title_of(part)}\n{what}; roof of {part['machine']['name']}"


def unit_of(part: Part) -> str:
    return "CPU-ms" if part["input"]["device"] == "cpu" else "ms"
