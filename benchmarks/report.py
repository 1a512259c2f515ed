"""Make the tables and pictures of the documentation from the records of measurements. Incomplete records are
refused.

    python -m benchmarks.report    rewrite RESULTS.md, the pictures in results/, and the table of EVIDENCE.md

The newest record of each benchmark and kind of device counts. On the same day, a record of its own
comes before a part of a suite, which has fewer cases. A reduced record (--only, another --model,
...) counts only if there is no other.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import isnan, nan
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import RESULTS, ROOT, chart, program_parser, tables
from benchmarks.measure import LEAST_REPEATS, Part, Result
from benchmarks.tables import (
    TEN_MILLION,
    device_of,
    machine_name,
    markdown_table,
    speed_against_library,
    speed_against_recreation,
    step_speed_against_recreation,
)
from omnilead.downstream.reports import bench_report

# The tasks whose AUROC is drawn against the share of labels
DIAGNOSIS_TASKS = ("diagnosis", "ptbxl-superdiagnostic")
RESULTS_PAGE, EVIDENCE_PAGE = (
    ROOT / "benchmarks" / "RESULTS.md",
    ROOT / "benchmarks" / "EVIDENCE.md",
)
SPEED_CHART_PATH = RESULTS / "speed.svg"  # shown in README
OFFICIAL_FOLD_RESULTS = RESULTS / "sources" / "fold10.json"
BOOSTED_RESULTS = RESULTS / "sources" / "folds_8_to_10_981_labels.json"
BEGIN, END = "<!-- results: made by benchmarks.report -->", "<!-- end of results -->"
RECORD_FACTS = ("format", "date", "git", "hardware", "versions")
CROP_TICKS = (40, 80, 160, 320, 640, 1280, 2560)  # ticks of the axis of crops, in thousands
LABEL_SHARES = (1.0, 0.1)  # the shares of labels for which a row of panels is drawn
COST_CASE = "tar: small, 64 crops"  # the case of e2e whose CPU-seconds per crop the cost axis shows
# For an H200 that reaches 60 % of 790 TFLOP/s, with 1.13 GFLOP a crop (flops_per_crop of
# configs/pretrain/small.yaml)
CROPS_PER_H200_MINUTE = 60 * 0.6 * 790e12 / 1.13e9
# (colour, marker) of each curve. The colours are Okabe and Ito's
CURVE_STYLES = (
    ("#0072b2", "o"),
    ("#d55e00", "s"),
    ("#111111", "D"),
)
# {baseline: the style of its line}
BASELINE_LINES = {
    "boosted features": "-.",
    "mean beat": ":",
    "random weights": "--",
}
Parts = dict[tuple[str, str], Part]  # {(benchmark, device): part of a record}


class RecordError(Exception):
    """Raised if a record cannot be published; the message gives the reason in one line."""


def load_parts(path: Path) -> list[Part]:
    """Returns the parts of a record, with RECORD_FACTS of the record added to each."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        shared = {name: record[name] for name in RECORD_FACTS}
        shared |= {"file": path.name, "alone": record["benchmark"] != "suite"}
        parts = []
        for part_of_record in record.get("parts", [record]):
            prefix = f"{part_of_record['benchmark']}: "
            left_out = {}
            for name, reason in record.get("left_out", {}).items():
                if name.startswith(prefix):
                    left_out[name.removeprefix(prefix)] = reason
            part = shared | {"left_out": left_out} | part_of_record
            check_part(part)
            parts.append(part)
        if not parts:
            raise ValueError("the record has no parts")
    except Exception as error:  # reading a damaged record can raise any error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RecordError(f"{path.name}: the record is not complete: {reason}") from None
    return parts


def check_part(part: Part) -> None:
    """Raises an error, of any type, if a part lacks something that its table needs."""
    if part["format"] != 1 or device_of(part) not in ("cpu", "cuda") or not part["results"]:
        raise ValueError(
            f"format={part['format']}, device={device_of(part)}, {len(part['results'])} results: must be "
            "format 1, cpu or cuda, and at least one result"
        )
    list(part_blocks(part))
    if (
        part["benchmark"] != "evidence"
        and (repeats := tables.fewest_and_most_repeats(part)[0]) < LEAST_REPEATS
    ):
        raise ValueError(f"a case has {repeats} repeats: at least {LEAST_REPEATS} are needed")


def all_parts(results: Path = RESULTS) -> list[Part]:
    """Returns the parts of all records in a folder, sorted by `sort_key`: the part that counts most is last."""
    parts = [part for path in sorted(results.glob("*.json")) for part in load_parts(path)]
    return sorted(parts, key=sort_key)


def newest_parts(parts: Iterable[Part]) -> Parts:
    """Returns the last part of each benchmark and device. Of the benchmark `evidence`, results that the last
    part lacks are added from earlier parts."""
    newest_of_key: Parts = {}
    for part in parts:
        key = part["benchmark"], device_of(part)
        if part["benchmark"] == "evidence" and key in newest_of_key:
            part = part | {
                "results": part["results"] | results_only_in_older(part, newest_of_key[key])
            }
        newest_of_key[key] = part
    return newest_of_key


def results_only_in_older(part: Part, older: Part) -> dict[str, Result]:
    """Returns the results that `older` has and `part` lacks, with a note that names the record they are from."""
    results = {}
    for name, document in older["results"].items():
        if name not in part["results"]:
            notes = list(document["notes"])
            if not any(note.startswith("From evidence_") for note in notes):
                note = f"From {older['file']}, {older['date'][:10]}, {machine_name(older)}."
                if outside := older["input"].get("made_outside"):
                    note += f" Made outside the plan: {', '.join(outside)}."
                notes.append(note)
            results[name] = document | {"notes": notes}
    return results


def sort_key(part: Part) -> tuple[bool, str, bool, str]:
    """Returns the key by which parts are sorted: reduced records of their own before all other parts, older days (UTC)
    before newer ones, and on the same day parts of a suite before records of their own."""
    reduced = bool(part["config"].get("only")) or is_smaller_job(part["config"])
    return not (part["alone"] and reduced), part["date"][:10], part["alone"], part["date"]


def is_smaller_job(config: Part) -> bool:
    """True if a benchmark was run with another model than the paper's, or with fewer crops than ten million."""
    other = config.get("model") not in (None, "paper")
    return other or (config.get("huge") or TEN_MILLION) < TEN_MILLION


class Target(NamedTuple):
    """A performance that a benchmark should reach."""

    what: str  # what is measured, for the table of targets
    benchmark: str
    cases: str  # regular expression for the names of the cases that count
    # Function of (case, results of all cases) that returns the measured figure, or NaN
    figure: Callable[[str, dict[str, Result]], float]
    bound: float  # the value to reach
    device: str = ""  # cpu or cuda; "" for both
    at_most: bool = False  # True if the figure must not be above `bound`, else not below it

    def is_met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


def inverse_median_getter(figure: str) -> Callable[[str, dict[str, Result]], float]:
    """Returns a function of (case, results of all cases) that returns 1 / the median of `figure`, such as per_s."""
    return lambda name, results: 1 / float(results[name][figure]["median"])


def peak_memory(name: str, results: dict[str, Result]) -> float:
    return float(results[name]["peak_mb"])


def median_getter(figure: str) -> Callable[[str, dict[str, Result]], float]:
    """Returns a function of (case, results of all cases) that returns the median of `figure`, such as per_s."""
    return lambda name, results: float(results[name][figure]["median"])


ONE_THREAD_CASES = r": torch, batch \d+(, first epoch)?$"
TIMES_RECREATED_LOADER = "times the re-creation of fairseq-signals' loader"
TIMES_RECREATED_STEP = "times the re-creation of fairseq-signals' in fp32"
TAR_CASE = "^ingest: omnilead, tar$"
# fmt: off
TARGETS = (
    Target("records to tar shards a CPU-second, one worker", "ingest", TAR_CASE, median_getter("per_cpu_s"), 2000),
    Target("records to tar shards, times the re-creation of fairseq-signals' preprocessing",
        "ingest", TAR_CASE, speed_against_recreation, 10),
    Target(f"lead masking, torch, one thread, {TIMES_RECREATED_LOADER}",
        "loader", f"^RLM{ONE_THREAD_CASES}", speed_against_recreation, 10, "cpu"),
    Target("lead masking, torch, one thread, times the fastest of other libraries",
        "loader", f"^RLM{ONE_THREAD_CASES}", speed_against_library, 2.5, "cpu"),
    Target(f"noise, torch, one thread, {TIMES_RECREATED_LOADER}",
        "loader", rf"^physio\S*{ONE_THREAD_CASES}", speed_against_recreation, 15, "cpu"),
    Target("crops a second to a GPU from tar, lead masking, batches of 256 and 1024, 4 threads",
        "loader", r"^RLM: (torch|dali) to cuda, batch (256|1024)$", median_getter("per_s"), 27_000,
        "cuda"),
    Target(f"the paper's model in bf16, {TIMES_RECREATED_STEP}",
        "step", "^omnilead: (autocast|bf16), .*crops$", step_speed_against_recreation, 3, "cpu"),
    Target(f"the paper's model in fp32, {TIMES_RECREATED_STEP}",
        "step", "^omnilead: fp32, .*crops$", step_speed_against_recreation, 1.1, "cpu"),
    Target("crops a second through the paper's model (the target is for an H200)",
        "step", "^omnilead: ", median_getter("per_s"), 2700, "cuda"),
    Target("overhead of the loader and the loop over the bare step, %",
        "e2e", "", median_getter("overhead_pct"), 3, at_most=True),
    Target("overhead of the loop alone, %", "e2e", "", median_getter("loop_pct"), 2, at_most=True),
    Target("stall, % of the time", "e2e", "", median_getter("stall_pct"), 1, at_most=True),
    Target("ECGs of 500 Hz to embeddings, % of the encoder's own speed",
        "embed", "^(tar|WFDB|arrays, 500 Hz):", median_getter("share_pct"), 90),
    Target("seconds from the command to the first step",
        "start", "^first step", median_getter("seconds"), 20, "cpu", at_most=True),
    Target("10,000,000 crops: seconds to a rank's first batch",
        "scaling", "^open", inverse_median_getter("per_s"), 10, at_most=True),
    Target("10,000,000 crops: a rank's memory, MB", "scaling", "^open", peak_memory, 1000, at_most=True),
    Target("10,000,000 crops: CPU-seconds to hold patients out",
        "scaling", "^all.*hold_out$", inverse_median_getter("per_cpu_s"), 5, at_most=True),
    Target("10,000,000 crops: CPU-seconds to look for leakage across two datasets",
        "scaling", "^all.*leakage", inverse_median_getter("per_cpu_s"), 10, at_most=True),
    Target("10,000,000 crops: memory of planning, roles, finishing and verify's tables, MB",
        "scaling", "^all.*(planning|roles|finishing|tables)$", peak_memory, 1500, at_most=True),
)
# fmt: on


def deciding_case_and_figure(part: Part, target: Target) -> tuple[str, float]:
    """Returns (case, its figure) for the case of a part that decides whether the target is met: the worst case,
    but the best one for the benchmark `step`, whose cases are ways to do the same thing. Returns ("", NaN)
    if the part has no such case."""
    applies = target.benchmark == part["benchmark"] and target.device in ("", device_of(part))
    values = {}
    if applies and not is_smaller_job(part["config"]):
        for name in part["results"]:
            if re.search(target.cases, name):
                values[name] = target.figure(name, part["results"])
    highest_counts = target.at_most != (part["benchmark"] == "step")
    measured = [name for name, value in values.items() if not isnan(value)]
    choose = max if highest_counts else min
    case = choose(measured, key=values.__getitem__, default="")
    return case, values.get(case, nan)


def targets_table(parts: Sequence[Part]) -> str:
    """Renders a table with each target and its figure on each machine, from the machine's newest record. A
    target without a figure is "not measured"."""
    newest_first = sorted(parts, key=sort_key, reverse=True)
    rows = []
    for target in TARGETS:
        heads = [target.what, f"at {'most' if target.at_most else 'least'} {target.bound:,g}"]
        seen_machines = set()
        for part in newest_first:
            case, value = deciding_case_and_figure(part, target)
            device_and_machine = device_of(part), machine_name(part)
            if case and device_and_machine not in seen_machines:
                seen_machines.add(device_and_machine)
                figure = f"{value:,.4g}" if target.is_met(value) else f"**missed: {value:,.4g}**"
                link = f"[{case}](results/{part['file']})"
                rows.append([*heads, figure, machine_name(part), link])
                heads = ["", ""]
        if heads[0]:
            rows.append([*heads, "not measured", "", ""])
    return markdown_table(
        "| | target | measured | on | case: the worst; for a step, the best |", rows
    )


def results_page(parts: Sequence[Part]) -> str:
    """Returns the text of RESULTS.md."""
    blocks = [
        "# Results",
        "Made by `python -m benchmarks.report` from the newest records in `results/`. Rules: "
        "[README.md](README.md).",
        "### Targets and measurements",
        targets_table(parts),
        *chart.ratio_table_blocks(sorted(parts, key=sort_key)),
    ]
    for benchmark in tables.TABLES:
        for device in ("cuda", "cpu"):
            if part := newest_parts(parts).get((benchmark, device)):
                blocks += part_blocks(part)
                if benchmark == "evidence":
                    blocks.append(f"![evidence](results/{picture_name(part)})")
    return "\n\n".join(blocks) + "\n"


def part_blocks(part: Part) -> Iterator[str]:
    """Yields the section of RESULTS.md about a part: heading, tables and how they were measured."""
    heading, make = tables.TABLES[part["benchmark"]]
    tuned = "; fine-tuned models" * ("fine-tuned" in part["results"])
    yield f"### {heading}{tuned}" + (
        f", on {machine_name(part)}" if device_of(part) == "cuda" else ""
    )
    yield from make(part)
    yield tables.measurement_note(part)


def read_official_fold() -> Part:
    """Returns the results that `omnilead bench` wrote for PTB-XL's official test fold."""
    return {"results": {"real": json.loads(OFFICIAL_FOLD_RESULTS.read_text())}}


def evidence_page() -> str:
    """Returns the text of EVIDENCE.md: its table of PTB-XL's official test fold is made anew, and the rest is kept."""
    before, _, rest = EVIDENCE_PAGE.read_text().partition(BEGIN)
    table = tables.headline_table(read_official_fold())
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def picture_name(part: Part) -> str:
    return "evidence_gpu.png" if device_of(part) == "cuda" else "evidence.png"


def label_share_chart(part: Part) -> Figure:
    """Returns a figure of the AUROC of diagnosis against the share of labels, for synthetic and real ECGs, and for
    12 leads and lead I."""
    rows: list[Result] = []
    models: dict[str, str] = {}
    for where, document in part["results"].items():
        if where == tables.BY_CROPS_RESULT:
            continue
        models_shown = {*tables.BASELINES, *list(document["models"])[:1]}
        for row in document["rows"]:
            if row["task"] in DIAGNOSIS_TASKS and row["share"] and row["model"] in models_shown:
                auroc = {"auroc": row["metrics"]["auroc"]}
                rows.append({**row, "task": f"{row['task']}, {where}", "metrics": auroc})
                models[row["model"]] = document["models"][row["model"]]
    return bench_report.draw_comparison({"rows": rows, "models": models})


def crop_count_chart(document: Result, crops_per_cpu_s: float) -> Figure:
    """Returns a figure of the AUROC on real ECGs against the number of crops that a model was trained on. Models
    are called "NAME, 40,000 crops"; those with the same NAME are a curve. A NAME with only one number of crops
    is left out, as it would be a single point. Baselines are not trained on crops, so they are horizontal
    lines. Two more x axes show what the crops cost."""
    figure = Figure((8.2, 6.8), layout="constrained")
    costs = (
        (-0.29, "CPU-hours (1 M weights; measured)", 3600 * crops_per_cpu_s),
        (-0.52, "H200-minutes (1 M weights; computed, not measured)", CROPS_PER_H200_MINUTE),
    )
    titles = {"12": "12 leads", "1": "lead I"}
    for line, share in zip(figure.subplots(2, 2, sharex=True), LABEL_SHARES, strict=True):
        for axes, leads in zip(line, titles, strict=True):
            place = leads, share
            _draw_crop_curves(
                axes, [row for row in document["rows"] if (row["leads"], row["share"]) == place]
            )
            title = f"{titles[leads]}, {100 * share:g} % of labels"
            axes.set_title(title, fontsize=10, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel("AUROC")
    for axes in line:
        axes.set(xscale="log", xlabel="thousands of crops seen in pre-training")
        axes.set_xticks(
            [1000 * crops for crops in CROP_TICKS], [f"{crops:,}" for crops in CROP_TICKS]
        )
        axes.set_xticks([], minor=True)
        for below, label, crops_per_unit in costs:
            convert = partial(mul, 1 / crops_per_unit), partial(mul, crops_per_unit)
            cost_axis = axes.secondary_xaxis(below, functions=convert)
            cost_axis.set_xlabel(label, fontsize=8)
            ticks = [1000 * crops / crops_per_unit for crops in CROP_TICKS]
            cost_axis.set_xticks(ticks, [f"{round(cost, 3):.2g}" for cost in ticks], fontsize=8)
            cost_axis.set_xticks([], minor=True)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        names,
        title="models trained for one length only: in the tables",
        loc="outside upper left",
        ncols=3,
        frameon=False,
        fontsize=8,
        title_fontsize=8,
    )
    # The figure is drawn once now, because the layout leaves room for the cost axes only after that
    figure.draw_without_rendering()
    return figure


def _draw_crop_curves(axes: Axes, rows: list[Result]) -> None:
    """Draws one panel of crop_count_chart: a curve for each NAME, and a horizontal line for each baseline."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        model, auroc = row["model"], row["metrics"]["auroc"]
        if model in BASELINE_LINES:
            axes.axhline(auroc, color="#777777", ls=BASELINE_LINES[model], lw=1, label=model)
        elif model.endswith(" crops") and not model.startswith(tuple(BASELINE_LINES)):
            name, _, crops = model.removesuffix(" crops").rpartition(", ")
            curves.setdefault(name, []).append((float(crops.replace(",", "")), auroc))
    several = [(name, points) for name, points in curves.items() if len(points) > 1]
    for (name, points), (colour, mark) in zip(several, CURVE_STYLES, strict=False):
        crops_seen, aurocs = zip(*sorted(points), strict=True)
        axes.plot(crops_seen, aurocs, color=colour, marker=mark, label=name)


def main() -> int:
    parser = program_parser("report", __doc__)
    parser.parse_args()
    try:
        parts = all_parts()
    except RecordError as error:
        print(f"benchmarks.report: {error}", file=sys.stderr)
        return 2
    RESULTS_PAGE.write_text(results_page(parts))
    EVIDENCE_PAGE.write_text(evidence_page())
    SPEED_CHART_PATH.write_text(chart.draw_chart(parts))
    figures = {"fold10.png": label_share_chart(read_official_fold())}
    latest = newest_parts(parts)
    for part in latest.values():
        if part["benchmark"] == "evidence":
            figures[picture_name(part)] = label_share_chart(part)
            if document := part["results"].get(tables.BY_CROPS_RESULT):
                rows = json.loads(BOOSTED_RESULTS.read_text())["rows"]
                document["rows"] += [row for row in rows if row["model"] == "boosted features"]
                speed = latest["e2e", "cpu"]["results"][COST_CASE]["per_cpu_s"]["median"]
                figures["crops.png"] = crop_count_chart(document, speed)
    for name, figure in figures.items():
        figure.savefig(RESULTS / name, dpi=120, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
