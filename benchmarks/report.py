"""Records -> the README's table and a picture. A record that lacks what makes a number mean something is refused.

python -m benchmarks.report            rewrite the table in README.md and benchmarks/results/*.png
python -m benchmarks.report --check    exit 1 if they are not what the records say
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results: made by benchmarks.report -->", "<!-- end of results -->"
REQUIRED = ("format", "date", "git", "hardware", "versions", "benchmark", "config", "input", "results", "page_cache")
REQUIRED_IN = {"git": ("commit", "dirty"), "hardware": ("cpu", "cores", "memory_gb", "load_before")}


class RecordError(Exception):
    """A record that may not be published."""


def load(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    lacking = [name for name in REQUIRED if name not in record]
    lacking += [f"{name}.{part}" for name, parts in REQUIRED_IN.items() for part in parts if part not in record.get(name, {})]
    if lacking:
        raise RecordError(f"{path.name}: incomplete, it lacks {', '.join(lacking)}")
    for name, result in record["results"].items():
        for figure in ("per_s", "per_cpu_s"):
            spread = result.get(figure, {})
            if not {"median", "low", "high"} <= set(spread) or not spread["low"] <= spread["median"] <= spread["high"]:
                raise RecordError(f"{path.name}: {name} has no {figure} with median, low and high")
    return record


def latest(benchmark: str) -> tuple[Path, dict[str, Any]] | None:
    records = [(path, load(path)) for path in sorted(RESULTS.glob(f"{benchmark}_*.json"))]
    return max(records, key=lambda pair: str(pair[1]["date"]), default=None)


def table() -> str:
    parts = []
    for benchmark, heading in HEADINGS.items():
        if found := latest(benchmark):
            parts += [f"**{heading}**", *TABLES.get(benchmark, rates)(*found)]
    return "\n\n".join(parts) if parts else "No record yet: `make bench`."


def rates(path: Path, record: dict[str, Any]) -> list[str]:
    """A row a case. The peer of a case is the fastest of its kind (what stands before the colon) that is not ours."""
    results = record["results"]
    lines = [
        "| | per CPU-second | lowest to highest | per second | against the peer | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        peer = max((per_cpu(results[other]) for other in results if is_peer(other) and kind(other) == kind(name)), default=0.0)
        unit = " GB" if name.startswith("verify") else ""
        spread = result["per_cpu_s"]
        cells = [
            name,
            number(spread["median"]) + unit,
            f"{number(spread['low'])} to {number(spread['high'])}",
            number(result["per_s"]["median"]) + unit,
            f"{per_cpu(result) / peer:.1f}x" if peer and not is_peer(name) else "",
            f"{result['peak_mb']:.0f} MB",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return ["\n".join(lines), note(path, record)]


def scaling(path: Path, record: dict[str, Any]) -> list[str]:
    lines = ["| | seconds | peak memory |", "|---|---|---|"]
    for name, result in record["results"].items():
        lines.append(f"| {name} | {1 / result['per_s']['median']:.2f} | {result['peak_mb']:.0f} MB |")
    shuffled = ["| order | correlation of position and row | shards a batch | rows a batch spans (95 %) |", "|---|---|---|---|"]
    for name, facts in record["shuffle_quality"].items():
        cells = [f"{facts['correlation']:.4f}", f"{facts['shards_per_batch']:.1f}", f"{100 * facts['row_span_95']:.0f} %"]
        shuffled.append(f"| {name} | {' | '.join(cells)} |")
    return ["\n".join(lines), "\n".join(shuffled), note(path, record)]


HEADINGS = {
    "ingest": "Archive to dataset: records (read, ingest, plan, synth) or GB (verify)",
    "loader": "Dataset to batches: crops of 10 s as float32 millivolts in torch",
    "scaling": "Ten million crops: from nothing to a rank's first batch, and how well it is shuffled",
}
TABLES = {"scaling": scaling}


def kind(name: str) -> str:
    return name.split(":")[0]


def is_peer(name: str) -> bool:
    return any(word in name for word in ("re-creation", "wfdb.rdrecord"))


def per_cpu(result: dict[str, Any]) -> float:
    return float(result["per_cpu_s"]["median"])


def note(path: Path, record: dict[str, Any]) -> str:
    hardware, given = record["hardware"], record["input"]
    amount = f"{given['records']:,} records" if "records" in given else f"{given['crops']:,} crops"
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores shared with others (load {hardware['load_before']:.1f} before), "
        f"{record['date'][:10]}; {amount} ({given['archive']}) in the page cache; "
        f"median of {record['config']['repeats']} runs, each in a fresh process; {versions}; "
        f"[{path.name}](benchmarks/results/{path.name})."
    )


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def figure(record: dict[str, Any]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results = {name: result for name, result in record["results"].items() if not name.startswith("verify")}
    drawn = Figure(figsize=(9, 0.27 * len(results) + 1.2), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots()
    names = list(reversed(results))
    middle = [per_cpu(results[name]) for name in names]
    reach = [[abs(results[name]["per_cpu_s"][end] - per_cpu(results[name])) for name in names] for end in ("low", "high")]
    ours = [not is_peer(name) and not any(peer in name for peer in ("loadmat", "webdataset")) for name in names]
    colours = ["#2f6690" if own else "#b5b5bd" for own in ours]
    axes.barh(names, middle, xerr=reach, color=colours, error_kw={"lw": 0.8, "ecolor": "#333"})
    for row, value in enumerate(middle):
        axes.annotate(f" {number(value)}", (results[names[row]]["per_cpu_s"]["high"], row), va="center", fontsize=8)
    axes.set_xscale("log")
    axes.margins(y=0.01)
    axes.set_xlabel(f"per CPU-second, lowest to highest of {record['config']['repeats']} runs; grey: others")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{record['benchmark']}, {record['hardware']['cpu']}, {record['date'][:10]}", loc="left", fontsize=10)
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        fresh = table()
        readme = (ROOT / "README.md").read_text()
        before, _, rest = readme.partition(BEGIN)
        _, _, after = rest.partition(END)
        written = f"{before}{BEGIN}\n{fresh}\n{END}{after}"
        if options.check:
            return int(written != readme)
        (ROOT / "README.md").write_text(written)
        for benchmark in ("ingest", "loader"):
            if found := latest(benchmark):
                figure(found[1]).savefig(RESULTS / f"{benchmark}.png", dpi=120, metadata={"Software": None})
    except RecordError as error:
        print(f"benchmarks.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
