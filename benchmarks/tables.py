"""A record's part -> Markdown tables for RESULTS.md and the README: benchmarks.report writes them there."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import fleet
from benchmarks.measure import ENOUGH
from engine.model.config import ModelConfig

Part = dict[str, Any]


def rows(head: str, lines: list[list[str]]) -> str:
    return "\n".join([head, f"|{'---|' * (head.count('|') - 1)}", *(f"| {' | '.join(cells)} |" for cells in lines)])


def rates(part: Part) -> Iterator[str]:
    """A row a case. The peer of a case is the fastest of its kind (what stands before the colon) that is not ours.
    Memory is that of a case's own process: of one with workers it says nothing."""
    results, lines = part["results"], []
    for name, result in results.items():
        peer = max((per_cpu(results[other]) for other in results if is_peer(other) and kind(other) == kind(name)), default=0.0)
        unit = " GB" if name.startswith("verify") else ""
        lines.append(
            [
                name,
                number(per_cpu(result)) + unit,
                reach(result["per_cpu_s"]),
                number(result["per_s"]["median"]) + unit,
                f"{per_cpu(result) / peer:.1f}x" if peer and not is_peer(name) and not name.endswith("(crops)") else "",
                "" if re.search(r"[1-9]\d* workers$", name) else f"{result['peak_mb']:.0f} MB",
            ]
        )
    yield rows("| | per CPU-second | lowest to highest | per second | against the peer | peak memory |", lines)


def loader(part: Part) -> Iterator[str]:
    usual = at_one_size(part)
    yield from rates(part | {"results": usual})
    swept: dict[str, dict[str, str]] = {}
    for name, r in part["results"].items():
        what, _, size = name.partition(SIZE)
        swept.setdefault(what, {})[size] = f"{number(per_cpu(r))} ({number(r['per_s']['median'])})"
    swept = {
        what: {size: cell for size, cell in cells.items() if not size.endswith("first epoch")} for what, cells in swept.items()
    }
    if len(usual) < len(part["results"]):
        swept = {what: cells for what, cells in swept.items() if len(cells) > 1}
        sizes = list(dict.fromkeys(size for cells in swept.values() for size in cells))
        lines = [[what, *(cells.get(size, "") for size in sizes)] for what, cells in swept.items()]
        yield rows(f"| per CPU-second (per second), batch of | {' | '.join(sizes)} |", lines)
    if any(name.startswith("physio") for name in usual):
        yield (
            "White noise is cut at random places out of a bank of normal numbers, also in `authors_physio3`, which follows the "
            "authors' formulas; the re-creation draws it anew. Only our loader checks crc32c, once a crop, in the first epoch. "
            "The re-creation's files are four times as large; where caches hold all, it is twice as fast and the ratios are "
            "half of these (LOG.md)."
        )


def at_one_size(part: Part) -> Part:
    """A CPU's cases without those of other sizes than 256 crops and one thread."""
    results: Part = part["results"]
    if part["config"].get("device") == "cuda":
        return results
    return {name: r for name, r in results.items() if name.partition(SIZE)[2] in ("", "256", "256, first epoch")}


def step(part: Part) -> Iterator[str]:
    lines = []
    for name, r in part["results"].items():
        unit = " GFLOP" if name.startswith("matrix product") else ""
        cells = [name, number(r["per_s"]["median"]) + unit, number(per_cpu(r)) + unit, reach(r[clock(part)])]
        cells += [
            f"{100 * r['mfu']:.0f} %" if "mfu" in r else "",
            " ".join(f"{r[key]:.2f}x{of}" for key, of in TIMES.items() if key in r),
        ]
        lines.append([*cells, f"{r.get('gpu_peak_mb', r['peak_mb']) / 1024:.1f} GB"])
    yield rows("| | crops a second | a CPU-second | lowest to highest | MFU | against the re-creation | peak memory |", lines)
    if any(name.startswith("re-creation") and "autocast" in name for name in part["results"]):
        yield "fairseq-signals as shipped does not run under bf16 autocast: that row is a re-creation with this repaired."


def cost(part: Part) -> Iterator[str]:
    given, roof, lines = part["input"], part["machine"], []
    whole = part["results"]["the whole step"]["ms"]["median"]
    for name, r in part["results"].items():
        share = f"{100 * r['ms']['median'] / whole:.1f} %"
        figures = [f"{r[key]:.4g}" for key in ("predicted_ms", "gap_ms", "gflop", "gb")]
        lines.append([name, f"{r['ms']['median']:.4g}", *figures[:2], share, r["bound"], *figures[2:]])
    unit = "CPU-ms" if given["device"] == "cpu" else "ms"
    yield rows(f"| | {unit} | by formula | gap | share | bound by | GFLOP | GB |", lines)
    yield (
        f"{given['crops']} crops, {given['precision']}, the {given['model']} model; by formula: for {roof['name']}, "
        f"{roof['tflops']:.3g} TFLOP/s and {roof['gb_per_s']:.3g} GB/s ({roof['source']})."
    )


def e2e(part: Part) -> Iterator[str]:
    lines = []
    for name, r in part["results"].items():
        shares = [f"{r[key]['median']:.1f} %" for key in ("overhead_pct", "loader_pct", "stall_pct")]
        figures = [number(r[key]["median"]) for key in ("per_s", "per_cpu_s", f"bare_{clock(part)}")]
        spread = f"{r['overhead_pct']['low']:.1f} to {r['overhead_pct']['high']:.1f} %"
        lines.append([name, r["backend"], *figures, shares[0], spread, *shares[1:], f"{r['checkpoint_s']:.2f} s"])
    between = "with 95 %" if repeated(part)[0] >= ENOUGH else "lowest to highest"
    head = ("", "backend", "crops a second", "a CPU-second", "bare step", "overhead", between, "the loader's")
    yield rows(f"| {' | '.join(head)} | stall | checkpoint |", lines)


def embed(part: Part) -> Iterator[str]:
    lines = []
    for name, r in part["results"].items():
        figures = [number(r[key]["median"]) for key in ("per_s", "per_cpu_s", "bare_per_s", "bare_per_cpu_s")]
        share = r["share_pct"]
        lines.append([name, *figures, f"{share['median']:.0f} %", f"{share['low']:.0f} to {share['high']:.0f} %"])
    head = ("", "crops a second", "a CPU-second", "encoder alone", "a CPU-second", "of its speed", "lowest to highest")
    yield rows(f"| {' | '.join(head)} |", lines)


def start(part: Part) -> Iterator[str]:
    lines = [
        [name, f"{r['seconds']['median']:.1f}", reach(r["seconds"]), f"{r['cpu_seconds']['median']:.1f}"]
        for name, r in part["results"].items()
    ]
    yield rows("| | seconds | lowest to highest | CPU-seconds |", lines)


def scaling(part: Part) -> Iterator[str]:
    lines = [[name, f"{1 / r['per_s']['median']:.2f}", f"{r['peak_mb']:.0f} MB"] for name, r in part["results"].items()]
    yield rows("| | seconds | peak memory |", lines)
    shuffled = [
        [name, f"{facts['correlation']:.4f}", f"{facts['shards_per_batch']:.1f}", f"{100 * facts['row_span_95']:.0f} %"]
        for name, facts in part["shuffle_quality"].items()
    ]
    yield rows("| order | correlation of position and row | shards a batch | rows a batch spans (95 %) |", shuffled)
    if worlds := part.get("ranks"):
        lines = []
        for n, w in worlds.items():
            kept = [w[key]["median"] / worlds["1"][key]["median"] for key in ("per_s", "per_cpu_s")]
            rate = number(w["per_s"]["median"])
            lines.append(
                [n, rate, reach(w["per_s"]), f"{100 * kept[0] / int(n):.0f} %", number(per_cpu(w)), f"{100 * kept[1]:.0f} %"]
            )
        yield rows("| ranks on this machine | crops a second | lowest to highest | kept | a CPU-second | kept |", lines)


def cluster(rate: float, basis: str) -> Iterator[str]:
    """By formula, from one GPU's rate."""
    config = ModelConfig()
    yield "### Many GPUs, by formula: what a step sends, and what is left of the speed (estimated)"
    lines = []
    for crops in (64, 512):
        for one in (fleet.step(config, gpus, crops, rate) for gpus in fleet.RANKS):
            sent_ms = [f"{1e3 * part:.1f} ms" for part in (one.gradients_s, one.weights_s, one.candidates_s, one.scores_s)]
            kept = [f"{100 * share:.0f} %" for share in (one.efficiency, one.overlapped)]
            lines.append(
                [f"{one.gpus:,}", f"{crops}", f"{1e3 * one.compute_s:.0f} ms", f"{one.megabytes:,.0f} MB", *sent_ms, *kept]
            )
    head = ("GPUs", "crops a GPU", "compute", "a GPU sends", "gradients", "weights", "CMSC's candidates", "its scores")
    yield rows(f"| {' | '.join(head)} | efficiency | with overlap_comm |", lines)
    yield "### How long a training takes"
    works = (("200 epochs of 85,000 crops: the paper's run", fleet.PAPER_CROPS), ("10 M ECGs, once", fleet.TEN_MILLION))
    lines = []
    for what, crops in works:
        for gpus, batch in ((1, 512), (8, 64), (8, 512), (64, 64), (64, 512)):
            hours = fleet.hours(config, crops, gpus, batch, rate)
            took = f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.2g} min"
            sure = basis.split(":")[0].split(" ")[0] if gpus == 1 and basis.startswith("measured") else "estimated"
            lines.append([what, f"{gpus}", f"{gpus * batch:,}", took, sure])
    yield rows("| | GPUs | crops a step | time | |", lines)
    yield (
        f"From {rate:,.0f} crops/s a GPU ({basis}), bf16, the paper's 90.9 M parameters, ZeRO-1; assumed: "
        f"{fleet.NVLINK_GB_PER_S:.0f} GB/s a GPU within a node of {fleet.NODE}, {fleet.NETWORK_GB_PER_S:.0f} GB/s a GPU "
        f"between nodes, {1e6 * fleet.HOP_S:.0f} us a hop, {fleet.FP32_TFLOPS:.0f} TFLOP/s in float32; "
        "batches other than 512 crops train otherwise than the paper did."
    )


def downstream(part: Part) -> Iterator[str]:
    """A row an archive, task and set of leads; a column each for random and for pre-trained weights."""
    found: dict[tuple[str, str, str], dict[str, Part]] = {}
    for name, result in part["results"].items():
        archive, _, rest = name.partition(": ")
        row, task, column = rest.split(", ")
        found.setdefault((archive, task, column), {})[row] = result
    methods = list(dict.fromkeys(row for cells in found.values() for row in cells))
    shown = {"Dx": (("CinC score", "challenge"), ("AUROC", "auroc")), "Id": (("known again", "accuracy"),)}
    lines = []
    for (archive, task, column), cells in found.items():
        for label, metric in shown[task]:
            told = [cells[row]["metrics"][metric] if row in cells else None for row in methods]
            n = next(iter(cells.values()))["n"]
            what = f"{archive}: {'diagnosis' if task == 'Dx' else 'identification'}, {column}, {label} (n = {n:,})"
            lines.append([what, *map(mean, told)])
    yield rows(f"| | {' | '.join(methods)} |", lines)


def mean(told: Part | None) -> str:
    """Over seeds, with half of the interval if there are several."""
    if told is None:
        return ""
    return f"{told['mean']:.3f}" + (f" ± {told['interval']:.3f}" if told["interval"] is not None else "")


TABLES: dict[str, tuple[str, Callable[[Part], Iterator[str]]]] = {
    "downstream": ("Does pre-training help? A model of a million parameters, fine-tuned for minutes", downstream),
    "ingest": ("Archive to dataset: records (read, ingest, plan, synth) or GB (verify)", rates),
    "loader": ("Dataset to batches: crops of 10 s as float32 millivolts in torch (gather: as stored, int16)", loader),
    "step": ("One training step: crops of 10 s", step),
    "cost": ("Where a step's time goes, largest gap first", cost),
    "e2e": ("Crops to weights through the loop, beside the bare step", e2e),
    "embed": ("ECGs to embeddings: the command beside its encoder alone", embed),
    "start": ("From the command to the first step: the quick start", start),
    "scaling": ("A very large dataset: from nothing to a rank's first batch, and how well it is shuffled", scaling),
}


SIZE = ", batch "
TIMES = {"times_recreation": "", "times_autocast": " (its autocast)"}
FRESH = ("ingest", "loader", "step", "scaling", "start")


def kind(name: str) -> str:
    return name.split(":")[0].removeprefix("authors_")


def is_peer(name: str) -> bool:
    return any(word in name for word in ("re-creation", "wfdb.rdrecord"))


def machine(part: Part) -> str:
    hardware = part["hardware"]
    return str(hardware["gpus"][0]["name"] if part["config"].get("device") == "cuda" else hardware["cpu"])


def clock(part: Part) -> str:
    """A GPU is nobody else's, and its work no CPU's."""
    return "per_s" if part["config"].get("device") == "cuda" else "per_cpu_s"


def per_cpu(result: dict[str, Any]) -> float:
    return float(result["per_cpu_s"]["median"])


def reach(spread: dict[str, float]) -> str:
    return f"{number(spread['low'])} to {number(spread['high'])}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def repeated(part: Part) -> tuple[int, int]:
    """How often each case was measured: fewest, and as asked for; where that was left open, most."""
    asked = part["config"].get("repeats")
    each = [int(r.get("repeats", asked or 0)) for r in part["results"].values()]
    return min(each), int(asked or max(each))


def note(part: Part) -> str:
    hardware, given = part["hardware"], part["input"]
    amount = next(
        (f"{given[name]:,} {name} ({given['archive']}) in the page cache" for name in ("records", "crops") if name in given), ""
    )
    amount = given["archive"] if part["benchmark"] in ("step", "cost") or not amount else amount
    dirty = ", uncommitted changes" if part["git"]["dirty"] else ""
    if part["benchmark"] == "downstream":
        seeds = part["config"]["repeats"]
        how = f"up to {seeds} seeds of fine-tuning, ± half of the 95 % interval" if seeds > 1 else "one seed of fine-tuning"
        where = f"{machine(part)}, {hardware['cores']} cores{dirty}, {part['date'][:10]}"
        return f"{where}; {given['archive']}; {how}; [{part['file']}](results/{part['file']})."
    versions = ", ".join(f"{name} {version}" for name, version in part["versions"].items())
    left_out = "".join(f" Left out: {name}: {reason}." for name, reason in part.get("left_out", {}).items())
    threads = f", {given['threads']} threads" if "threads" in given else ""
    fresh = ", each in a fresh process" if part["benchmark"] in FRESH and part["config"].get("device") != "cuda" else ""
    gpu = f"{machine(part)}, " if part["config"].get("device") == "cuda" else ""
    shared = "" if gpu else " shared with others"
    fewest, repeats = repeated(part)  # fewer where the time was over
    many = f"{fewest} to {repeats}" if fewest < repeats else f"{repeats}"
    return (
        f"{gpu}{hardware['cpu']}, {hardware['cores']} cores{shared} (load {hardware['load_before']:.1f} before){dirty}, "
        f"{part['date'][:10]}; {amount}{threads}; median of {many} runs{fresh}; {versions}; "
        f"[{part['file']}](results/{part['file']}).{left_out}"
    )
