"""Make tables and pictures from the records. Incomplete records are refused.

    python -m benchmarks.report            rewrite benchmarks/RESULTS.md, results/*.png, and README.md's table
    python -m benchmarks.report --check    exit 1 if the tables do not match the records

The newest record of each benchmark and kind of device counts. On the same day, a record of its own
comes before a part of a suite, which has fewer cases. A reduced record (--only, another --model,
...) counts only if there is no other.
"""

import argparse
import datetime
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks import tables
from benchmarks.tables import (
    Part,
    Result,
    device_of,
    machine,
    markdown,
    per_cpu,
)
from omnilead.engine.common import Parser
from omnilead.engine.report import bench_report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLES, README = ROOT / "benchmarks" / "RESULTS.md", ROOT / "README.md"
BEGIN, END = "<!-- results: made by benchmarks.report -->", "<!-- end of results -->"
OF_RECORD = ("format", "date", "git", "hardware", "versions", "page_cache")
NEEDED: tuple[str, ...] = (
    "format",
    "date",
    "benchmark",
    "config",
    "results",
    "input.archive",
    "git.commit",
)
NEEDED += ("versions.python", "hardware.cpu", "hardware.cores", "hardware.load_before")
# percentages, which may be 0 or less; all other figures must be above 0
SIGNED = {"overhead_pct", "loop_pct", "loader_pct", "stall_pct"}
TEN_MILLION = 10_000_000
Parts = dict[tuple[str, str], Part]  # by benchmark and device


class RecordError(Exception):
    """Why a record cannot be published, in one line."""


def load(path: Path) -> list[Part]:
    """The parts of a record, each with the facts that they share."""
    parts = []
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        shared = {name: record[name] for name in OF_RECORD if name in record}
        shared |= {"file": path.name, "alone": "parts" not in record}
        for own in [record] if shared["alone"] else record["parts"]:
            part = shared | own
            check(part)
            rank(part)
            list(published(part))
            parts.append(part)
        if not parts:
            raise RecordError("it has no parts")
    except RecordError as error:
        raise RecordError(f"{path.name}: {error}") from None
    except Exception as error:  # a damaged record can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RecordError(f"{path.name}: not a record: {reason}") from None
    return parts


def check(part: Part) -> None:
    benchmark, timed = part["benchmark"], part["benchmark"] != "evidence"
    if benchmark not in tables.TABLES or device_of(part) not in ("cpu", "cuda"):
        raise RecordError(f"there is no benchmark {benchmark!r} on {device_of(part)!r}")
    needed = list(NEEDED)
    if timed:
        needed.append("page_cache")
    if benchmark not in ("step", "evidence"):
        needed.append("input.dataset")
    if device_of(part) == "cuda":
        needed.append("hardware.gpus")
    for key in needed:
        value: Any = part
        for name in key.split("."):
            value = value.get(name, {})
        if value in ({}, [], None, ""):
            raise RecordError(f"incomplete: it lacks {key}")
    if part["format"] != 1:
        raise RecordError(f"format {part['format']}: only 1 is supported")
    if not timed:
        return
    if (repeats := tables.repeated(part)[0]) < 3:
        raise RecordError(f"{repeats} repeats show no spread: at least 3 are needed")
    for case, result in part["results"].items():
        for figure, spread in result.items():
            if isinstance(spread, dict):
                check_spread(f"{case}: {figure}", spread, figure in SIGNED)


def check_spread(name: str, spread: dict[str, float], signed: bool) -> None:
    low, median, high = (spread.get(key, nan) for key in ("low", "median", "high"))
    if not (low <= median <= high and isfinite(high - low) and (low > 0 or signed)):
        raise RecordError(
            f"{name} is {median} ({low} to {high}): must be finite, in order, above 0"
        )


def every(results: Path = RESULTS) -> list[Part]:
    """All parts of all records, the newest last."""
    return sorted(
        (part for path in sorted(results.glob("*.json")) for part in load(path)), key=rank
    )


def newest(parts: Iterable[Part]) -> Parts:
    return {(part["benchmark"], device_of(part)): part for part in parts}


def rank(part: Part) -> tuple[bool, datetime.date, bool, datetime.datetime]:
    date = datetime.datetime.fromisoformat(part["date"])
    date = date.astimezone(datetime.UTC) if date.tzinfo else date.replace(tzinfo=datetime.UTC)
    return not (part["alone"] and reduced(part["config"])), date.date(), part["alone"], date


def reduced(config: Part) -> bool:
    """Whether a record has fewer cases or a smaller job than the full benchmark."""
    fewer = config.get("only") or (config.get("alone") and config.get("device") == "cpu")
    return bool(
        fewer
        or config.get("model") not in (None, "paper")
        or config.get("huge", TEN_MILLION) < TEN_MILLION
    )


class Bar(NamedTuple):
    what: str  # the description; it states what `cases` and `asks` leave out
    benchmark: str
    cases: str  # regular expression for the names of cases
    # (case, results of all cases) -> figure, or NaN
    figure: Callable[[str, dict[str, Result]], float]
    bar: float  # the target
    device: str = ""  # "": both
    at_most: bool = False
    # whether a part with this input can answer it
    asks: Callable[[Part], bool] = lambda input: True

    def met(self, value: float) -> bool:
        return value <= self.bar if self.at_most else value >= self.bar

    def __str__(self) -> str:
        return f"at {'most' if self.at_most else 'least'} {self.bar:,g}"


def median(figure: str) -> Callable[[str, dict[str, Result]], float]:
    return lambda name, results: float(results[name][figure]["median"])


def times_recreation(name: str, results: dict[str, Result]) -> float:
    """The speed per CPU-second, relative to the fastest re-creation of the same stage."""
    prefix = f"{name.split(':')[0]}: re-creation"
    peers = [per_cpu(result) for other, result in results.items() if other.startswith(prefix)]
    return per_cpu(results[name]) / max(peers) if peers else nan


def times_step(name: str, results: dict[str, Result]) -> float:
    """The speed per CPU-second, relative to the re-creation in fp32 with the same number of crops:
    its smallest batch."""
    peers = {}
    for other, result in results.items():
        if re.match("re-creation.*: fp32, ", other):
            peers[int(other.split()[-2])] = per_cpu(result)
    crops = int(name.split()[-2])
    return per_cpu(results[name]) / peers[crops] if crops == min(peers, default=0) else nan


def seconds_to_open(name: str, results: dict[str, Result]) -> float:
    return 1 / median("per_s")(name, results)


def memory(name: str, results: dict[str, Result]) -> float:
    return float(results[name]["peak_mb"])


def paper(input: Part) -> bool:
    return bool(input["model"] == "paper")


def paper_on_h200(input: Part) -> bool:
    return paper(input) and "H200" in input["device"]


def huge(input: Part) -> bool:
    return int(input["crops"]) >= TEN_MILLION


def four_threads(input: Part) -> bool:
    return "threads" in input and int(input["threads"]) <= 4


ONE_THREAD = r": torch, batch \d+(, first epoch)?$"
LOADER = "times the re-creation of fairseq-signals' loader"
STEP = "times the re-creation of fairseq-signals' in fp32"
TAR = "^ingest: omnilead, tar$"
# fmt: off
BARS = (
    Bar("records to tar shards a CPU-second, one worker", "ingest", TAR, median("per_cpu_s"), 2000),
    Bar("records to tar shards, times the re-creation of fairseq-signals' preprocessing",
        "ingest", TAR, times_recreation, 10),
    Bar(f"lead masking, torch, one thread, {LOADER}",
        "loader", f"^RLM{ONE_THREAD}", times_recreation, 10, "cpu"),
    Bar(f"noise, torch, one thread, {LOADER}",
        "loader", rf"^physio\S*{ONE_THREAD}", times_recreation, 15, "cpu"),
    Bar("crops a second to a GPU from tar, lead masking, batches of 256 and 1024, 4 threads",
        "loader", r"^RLM: (torch|dali) to cuda, batch (256|1024)$", median("per_s"), 27_000,
        "cuda", asks=four_threads),
    Bar(f"the paper's model in bf16, {STEP}",
        "step", "^omnilead: (autocast|bf16), .*crops$", times_step, 3, "cpu", asks=paper),
    Bar(f"the paper's model in fp32, {STEP}",
        "step", "^omnilead: fp32, .*crops$", times_step, 1.1, "cpu", asks=paper),
    Bar("crops a second through the paper's model on an H200",
        "step", "^omnilead: ", median("per_s"), 2700, "cuda", asks=paper_on_h200),
    Bar("overhead of the loader and the loop over the bare step, %",
        "e2e", "", median("overhead_pct"), 3, at_most=True),
    Bar("overhead of the loop alone, %", "e2e", "", median("loop_pct"), 2, at_most=True),
    Bar("stall, % of the time", "e2e", "", median("stall_pct"), 1, at_most=True),
    Bar("ECGs of 500 Hz to embeddings, % of the encoder's own speed",
        "embed", "^(tar|WFDB|arrays, 500 Hz):", median("share_pct"), 90),
    Bar("seconds from the command to the first step",
        "start", "^first step", median("seconds"), 20, "cpu", at_most=True),
    Bar("10,000,000 crops: seconds to a rank's first batch",
        "scaling", "^open", seconds_to_open, 10, at_most=True, asks=huge),
    Bar("10,000,000 crops: a rank's memory, MB",
        "scaling", "^open", memory, 1000, at_most=True, asks=huge),
)
# fmt: on


def judged(part: Part) -> Iterator[tuple[str, float, Bar]]:
    """For each target of this device: the case that counts and its figure; "" and NaN if it was
    not measured. The worst case counts; for a step, whose cases are ways to do the same thing,
    the best."""
    results = part["results"]
    for bar in BARS:
        if bar.benchmark != part["benchmark"] or bar.device not in ("", device_of(part)):
            continue
        values = {}
        for name in results if bar.asks(part["input"]) else ():
            if re.search(bar.cases, name) and not isnan(value := bar.figure(name, results)):
                values[name] = value
        highest_counts = bar.at_most != (part["benchmark"] == "step")
        choose = max if highest_counts else min
        case = choose(values, key=values.__getitem__, default="")
        yield case, values.get(case, nan), bar


def bars_table(parts: Sequence[Part]) -> str:
    """Each target and the figures of the newest record of each machine, or "not measured"."""
    by_machine = {(part["benchmark"], device_of(part), machine(part)): part for part in parts}
    newest_first = sorted(by_machine.values(), key=rank, reverse=True)
    rows = []
    for asked in BARS:
        heads = [asked.what, str(asked)]
        for part in newest_first:
            for case, value, bar in judged(part):
                if bar is asked and case:
                    figure = f"{value:,.4g}" if bar.met(value) else f"**missed: {value:,.4g}**"
                    link = f"[{case}](results/{part['file']})"
                    rows.append([*heads, figure, machine(part), link])
                    heads = ["", ""]
        if heads[0]:
            rows.append([*heads, "not measured", "", ""])
    return markdown("| | target | measured | on | case: the worst; for a step, the best |", rows)


def whole(parts: Sequence[Part]) -> str:
    """RESULTS.md."""
    head = (
        "Made by `python -m benchmarks.report` from the newest records in `results/`. Rules: "
        "[README.md](README.md)."
    )
    blocks = [
        "# Results",
        head,
        "### Targets and measurements",
        bars_table(parts),
    ]
    for benchmark in tables.TABLES:
        for device in ("cuda", "cpu"):
            if part := newest(parts).get((benchmark, device)):
                blocks += published(part)
                if benchmark == "evidence":
                    blocks.append(f"![evidence](results/{picture_of(part)})")
    return "\n\n".join([*blocks, *tables.cluster(newest(parts).get(("step", "cuda")))]) + "\n"


def published(part: Part) -> Iterator[str]:
    heading, make = tables.TABLES[part["benchmark"]]
    tuned = "; fine-tuned models" * ("fine-tuned" in part["results"])
    yield f"### {heading}{tuned}" + (f", on {machine(part)}" if device_of(part) == "cuda" else "")
    yield from make(part)
    yield tables.note(part)


def readme(parts: Sequence[Part]) -> str:
    """README.md with the figure and four rows of the evidence for pre-training between the
    marks."""
    table = ""
    if part := newest(parts).get(("evidence", "cpu")):
        figure = "![AUROC against the share of labels](results/evidence.png)"
        table = "\n\n".join([figure, tables.headline(part), tables.note(part)])
    table = table.replace("](results/", "](benchmarks/results/")
    before, _, rest = README.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def picture_of(part: Part) -> str:
    return "evidence_gpu.png" if device_of(part) == "cuda" else "evidence.png"


def share_curves(part: Part) -> Figure:
    """AUROC of diagnosis against the share of labels: synthetic beside real ECGs, 12 leads and lead
    I."""
    rows: list[Result] = []
    models: dict[str, str] = {}
    for where, document in part["results"].items():
        shown = {*tables.BASELINES, *list(document["models"])[:1]}
        for row in document["rows"]:
            if row["task"] == "diagnosis" and row["share"] and row["model"] in shown:
                auroc = {"auroc": row["metrics"]["auroc"]}
                rows.append({**row, "task": f"diagnosis, {where}", "metrics": auroc})
                models[row["model"]] = document["models"][row["model"]]
    return bench_report.picture({"rows": rows, "models": models})


def main() -> int:
    parser = Parser(
        "python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        parts = every()
    except RecordError as error:
        print(f"benchmarks.report: {error}", file=sys.stderr)
        return 2
    written = {TABLES: whole(parts), README: readme(parts)}
    if options.check:
        return int(any(path.read_text() != text for path, text in written.items()))
    for path, text in written.items():
        path.write_text(text)
    for (benchmark, _), part in newest(parts).items():
        if benchmark == "evidence":
            figure = share_curves(part)
            figure.savefig(RESULTS / picture_of(part), dpi=120, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
