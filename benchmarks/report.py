"""Records -> tables and pictures. A record that lacks what makes a number mean something is refused.

python -m benchmarks.report            rewrite benchmarks/RESULTS.md, results/*.png, and README.md's two tables
python -m benchmarks.report --check    exit 1 if the tables are not what the records say

Of each benchmark and kind of device the newest record counts; of one day, one of its own before a part of a suite, which has
fewer cases. One of its own that was not asked for all (--only, another --model, ...) counts where there is no other.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from benchmarks import bars, fleet, plots, tables
from benchmarks.fleet import TEN_MILLION
from benchmarks.tables import Part
from engine.common import Parser

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLES, README = ROOT / "benchmarks" / "RESULTS.md", ROOT / "README.md"
BEGIN, END = "<!-- results: made by benchmarks.report -->", "<!-- end of results -->"
OF_RECORD = ("format", "date", "git", "hardware", "versions", "page_cache")
OF_PART = ("benchmark", "config", "input", "results")
INSIDE = {"git": ("commit", "dirty"), "hardware": ("cpu", "cores", "memory_gb", "load_before")}
RATES = ("per_s", "per_cpu_s")
FIGURES: dict[str, tuple[str, ...]] = {  # with a spread, of each result
    **dict.fromkeys(("ingest", "loader", "step", "scaling"), RATES),
    "cost": ("ms",),
    "e2e": (*RATES, "bare_per_s", "bare_per_cpu_s", "overhead_pct", "loop_pct", "loader_pct", "stall_pct"),
    "embed": (*RATES, "bare_per_s", "bare_per_cpu_s", "share_pct"),
    "start": ("seconds", "cpu_seconds"),
    "downstream": ("score",),
}


SIGNED = ("overhead_pct", "loop_pct", "loader_pct", "stall_pct", "score")  # others are above 0
INPUT = {  # what was measured on
    **dict.fromkeys(("ingest", "loader", "e2e", "embed", "start", "scaling"), ("archive", "dataset")),
    **dict.fromkeys(("step", "cost"), ("archive", "model", "device")),
}


Parts = dict[tuple[str, str], Part]  # by benchmark and device


class RecordError(Exception):
    """A record that may not be published."""


def load(path: Path) -> list[Part]:
    """The record's parts, each with what holds for all of them."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise RecordError(f"{path.name}: no JSON: {error}") from None
    if not isinstance(record, dict):
        raise RecordError(f"{path.name}: no record")
    shared = {name: record[name] for name in OF_RECORD if name in record}
    whole = "parts" not in record
    found = [shared | {"file": path.name, "alone": whole} | part for part in ([record] if whole else record["parts"])]
    if not found and not record.get("checks"):
        raise RecordError(f"{path.name}: has no part")
    for part in found:
        try:
            check(path.name, part)
            rank(part)
            list(published(part))
        except RecordError:
            raise
        except Exception as error:  # whatever a damaged one lets the tables do
            told = " ".join(f"{type(error).__name__}: {error}".split())
            raise RecordError(f"{path.name}: no record of this form: {told}") from None
    return found


def check(name: str, part: Part) -> None:
    lacking = [key for key in (*OF_RECORD, *OF_PART) if key not in part]
    lacking += [f"{key}.{inner}" for key, inners in INSIDE.items() for inner in inners if inner not in part.get(key, {})]
    if lacking:
        raise RecordError(f"{name}: incomplete, it lacks {', '.join(lacking)}")
    if part["format"] != 1:
        raise RecordError(f"{name}: format {part['format']}, this program reads 1")
    lacking = [key for key in ("git.commit", "versions.python") if not part[key.split(".")[0]].get(key.split(".")[1])]
    lacking += [f"input.{key}" for key in INPUT.get(part["benchmark"], ()) if key not in part["input"]]
    if lacking:
        raise RecordError(f"{name}: incomplete, it lacks {', '.join(lacking)}")
    if part["benchmark"] not in FIGURES:
        raise RecordError(f"{name}: there is no benchmark {part['benchmark']!r}")
    if part["config"].get("device", "cpu") not in ("cpu", "cuda"):
        raise RecordError(f"{name}: there is no device {part['config']['device']!r}")
    if part["config"].get("device") == "cuda" and not part["hardware"].get("gpus"):
        raise RecordError(f"{name}: incomplete, it lacks hardware.gpus")
    if not part["results"]:
        raise RecordError(f"{name}: {part['benchmark']} has no results")
    if part["benchmark"] != "downstream" and (repeats := tables.repeated(part)[1]) < 3:
        raise RecordError(f"{name}: {repeats} repeats show no spread: 3 are the least")
    if part["benchmark"] == "cost":
        roof, stages = part["machine"], part["results"].values()
        if min(roof["tflops"], roof["gb_per_s"], *(r["gb"] for r in stages)) <= 0 or min(r["gflop"] for r in stages) < 0:
            raise RecordError(f"{name}: a machine or a stage without operations or bytes")
    for case, result in part["results"].items():
        for figure in FIGURES[part["benchmark"]]:
            spread = result.get(figure, {})
            if not {"median", "low", "high"} <= set(spread) or not spread["low"] <= spread["median"] <= spread["high"]:
                raise RecordError(f"{name}: {case} has no {figure} with median, low and high")
            if not isfinite(spread["high"] - spread["low"]) or (figure not in SIGNED and spread["low"] <= 0):
                raise RecordError(f"{name}: {case} has {figure} from {spread['low']} to {spread['high']}: no such thing")


def every(results: Path = RESULTS) -> list[Part]:
    """The newest last."""
    return sorted((part for path in sorted(results.glob("*.json")) for part in load(path)), key=rank)


def newest(parts: Iterable[Part]) -> Parts:
    return {(part["benchmark"], part["config"].get("device", "cpu")): part for part in parts}


def of_machines(parts: Iterable[Part]) -> list[Part]:
    """The newest of each benchmark on each machine."""
    found = {(part["benchmark"], part["config"].get("device", "cpu"), tables.machine(part)): part for part in parts}
    return sorted(found.values(), key=rank, reverse=True)


def rank(part: Part) -> tuple[bool, datetime.date, bool, datetime.datetime]:
    date = datetime.datetime.fromisoformat(part["date"])
    date = date.astimezone(datetime.UTC) if date.tzinfo else date.replace(tzinfo=datetime.UTC)
    return not (part["alone"] and partial(part["config"])), date.date(), part["alone"], date


def partial(config: Part) -> bool:
    """Fewer cases or a smaller job than the benchmark has by itself."""
    fewer = config.get("only") or (config.get("alone") and config.get("device") == "cpu")
    return bool(fewer or config.get("model") not in (None, "paper") or config.get("huge", TEN_MILLION) < TEN_MILLION)


def whole(parts: Parts) -> str:
    """RESULTS.md."""
    head = "Made by `python -m benchmarks.report` from the newest records in `results/`. Rules: [README.md](README.md)."
    return "\n\n".join(["# Results", head, *blocks_of(parts)]) + "\n"


def brief(parts: Sequence[Part]) -> str:
    """What stands in the README between the marks: what pre-training is worth, and each bar."""
    learned = [
        block for (benchmark, _), part in newest(parts).items() if benchmark == "downstream" for block in published(part)
    ]
    blocks = [*learned, "### Bars, and what was measured", bars.table(of_machines(parts))]
    return "\n\n".join(blocks).replace("](results/", "](benchmarks/results/")


def readme(parts: Sequence[Part]) -> str:
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{brief(parts)}\n{END}{after}"


def blocks_of(parts: Parts) -> Iterator[str]:
    for benchmark in tables.TABLES:
        for device in ("cuda", "cpu"):
            if part := parts.get((benchmark, device)):
                yield from published(part)
                drawn = plots.pictures({(benchmark, device): part})
                yield from (f"![{name}](results/{name}.png)" for name, _ in drawn)
    if parts:
        yield from tables.cluster(*rate_of(parts))


def published(part: Part) -> Iterator[str]:
    heading, make = tables.TABLES[part["benchmark"]]
    where = f", on {tables.machine(part)}" if part["config"].get("device") == "cuda" else ""
    yield f"### {heading}{where}"
    yield from make(part)
    if told := bars.line(part):
        yield told
    yield tables.note(part)


def rate_of(parts: Parts) -> tuple[float, str]:
    """Crops a second of one GPU with the paper's model: measured on one, or else the bar."""
    step = parts.get(("step", "cuda"))
    if step and step["input"].get("model") == "paper":
        rates = [float(r["per_s"]["median"]) for name, r in step["results"].items() if name.startswith("omnilead")]
        if rates:
            return max(rates), f"measured on one {step['input']['device']}"
    return fleet.BAR_CROPS_PER_S, "the bar for one H200: estimated, nothing was measured on a GPU"


def main() -> int:
    parser = Parser("python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        parts = every()
        written = {TABLES: whole(newest(parts)), README: readme(parts)}
        if options.check:
            return int(any(path.read_text() != text for path, text in written.items()))
        for path, text in written.items():
            path.write_text(text)
            print(path)
        for name, draw in plots.pictures(newest(parts)):
            draw().savefig(RESULTS / f"{name}.png", dpi=120, metadata={"Software": None})
            print(RESULTS / f"{name}.png")
    except RecordError as error:
        print(f"benchmarks.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
