"""Render a part of a record as Markdown tables, which benchmarks.report writes to RESULTS.md and
README.md."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.measure import INTERVAL_FROM
from omnilead.engine.report import bench_report

Part = dict[str, Any]
Result = dict[str, Any]
CLUSTERS: tuple[tuple[int, int], ...] = (
    (1, 512),
    (8, 64),
    (8, 512),
    (16, 512),
    (64, 64),
    (64, 512),
)
CLUSTERS += ((256, 512), (1024, 64), (1024, 512))  # GPUs, and crops of each
NODE, NVLINK_GB_PER_S, NETWORK_GB_PER_S, HOP_S, FP32_TFLOPS = 8, 450.0, 50.0, 5e-6, 50.0
PARAMETERS, WIDTH = 90_883_072, 768  # of the paper's model
BASELINES = ("random weights", "mean beat")
HEADLINE = (
    ("synthetic", "diagnosis", "auroc", "12", 0.01),
    ("synthetic", "diagnosis", "auroc", "1", 0.01),
    ("synthetic", "identification", "accuracy_whitened", "1", None),
    ("real", "diagnosis", "auroc", "12", 1.0),
)
FRESH = (
    "ingest",
    "loader",
    "step",
    "scaling",
    "start",
)  # on a CPU, every repeat of these benchmarks is a fresh process


def markdown(head: str, rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([head, f"|{'---|' * (head.count('|') - 1)}", *lines])


def rates(part: Part) -> Iterator[str]:
    """The peer of a case is the fastest re-creation of its kind (the name before the colon).
    Memory is that of the case's main process, so it is omitted for cases with workers."""
    results, rows = part["results"], []
    peers: dict[str, float] = {}
    for name, result in results.items():
        if is_peer(name):
            peers[kind(name)] = max(per_cpu(result), peers.get(kind(name), 0.0))
    for name, result in results.items():
        times = ""
        if kind(name) in peers and not is_peer(name) and not name.endswith("(crops)"):
            times = f"{per_cpu(result) / peers[kind(name)]:.1f}x"
        memory = f"{result['peak_mb']:.0f} MB"
        if re.search(r"[1-9]\d* workers$", name):
            memory = ""
        unit = " GB" if name.startswith("verify") else ""
        cells = [name, number(per_cpu(result)) + unit, reach(result["per_cpu_s"])]
        rows.append([*cells, middle(result["per_s"]) + unit, times, memory])
    yield markdown(
        "| | per CPU-second | lowest to highest | per second | against the peer | peak memory |",
        rows,
    )


def loader(part: Part) -> Iterator[str]:
    yield from rates(part)
    if any(name.startswith("physio") for name in part["results"]):
        yield (
            "omnilead cuts white noise from a fixed bank of normal numbers at random places, also "
            "in `authors_physio3`, which "
            "follows the authors' formulas; the re-creation draws it anew. Only our loader "
            "verifies crc32c, once per crop, in "
            "the first epoch. The re-creation's files are four times as large; if caches hold all "
            "of them, it is twice as fast "
            "and the ratios are half of these (LOG.md)."
        )


def step(part: Part) -> Iterator[str]:
    """MFU is relative to the rate of the matrix product; ratios are to the re-creation with the
    same number of crops."""
    results, figure = part["results"], clock(part)
    speed = {name: float(result[figure]["median"]) for name, result in results.items()}
    baselines = {"fp32": ""}
    if device_of(part) == "cuda":
        baselines["autocast"] = " (its autocast)"
    rows = []
    for name, result in results.items():
        precision, crops = name.split(": ")[1].split(",")[0], name.split(", ")[-1]
        unit, mfu, times = " GFLOP", "", []
        if not name.startswith("matrix product"):
            unit = ""
            product = f"matrix product: {'fp32' if precision == 'fp32' else 'bf16'}"
            if product in results:
                gflop = part["input"]["gflop_per_crop"]
                mfu = f"{100 * speed[name] * gflop / speed[product]:.0f} %"
            for other, label in baselines.items():
                peer = f"re-creation of fairseq-signals' step: {other}, {crops}"
                if peer in results:
                    times.append(f"{speed[name] / speed[peer]:.2f}x{label}")
        cells = [name, middle(result["per_s"]) + unit, number(per_cpu(result)) + unit]
        cells += [reach(result[figure]), mfu, " ".join(times)]
        rows.append([*cells, f"{result.get('gpu_peak_mb', result['peak_mb']) / 1024:.1f} GB"])
    head = (
        "| | crops per second | per CPU-second | lowest to highest | MFU | against the "
        "re-creation | peak memory |"
    )
    yield markdown(head, rows)
    if ours := [name for name in results if name.startswith("omnilead: bf16")]:
        yield f"Fastest in bf16: {max(ours, key=speed.__getitem__)}."
    if any(name.startswith("re-creation") and "autocast" in name for name in results):
        yield (
            "fairseq-signals as released does not run under bf16 autocast: that row is a "
            "re-creation with this fixed."
        )


def e2e(part: Part) -> Iterator[str]:
    rows = []
    for name, result in part["results"].items():
        cells = [name, result["backend"]]
        cells += [middle(result[key]) for key in ("per_s", "per_cpu_s", f"bare_{clock(part)}")]
        overhead = result["overhead_pct"]
        cells += [percent(overhead), f"{overhead['low']:.1f} to {overhead['high']:.1f} %"]
        cells += [percent(result["loader_pct"]), percent(result["stall_pct"])]
        rows.append([*cells, f"{result['checkpoint_s']:.2f} s"])
    between = "95 % interval" if repeated(part)[0] >= INTERVAL_FROM else "lowest to highest"
    head = (
        f"| | backend | crops per second | per CPU-second | bare step | overhead | {between} | "
        "loader's part |"
    )
    yield markdown(f"{head} stall | checkpoint |", rows)


def percent(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1f} %"


def embed(part: Part) -> Iterator[str]:
    rows = []
    for name, result in part["results"].items():
        share = result["share_pct"]
        keys = ("per_s", "per_cpu_s", "bare_per_s", "bare_per_cpu_s")
        cells = [name, *(middle(result[key]) for key in keys), f"{share['median']:.0f} %"]
        rows.append([*cells, f"{share['low']:.0f} to {share['high']:.0f} %"])
    head = (
        "| | crops per second | per CPU-second | encoder alone | per CPU-second | share of its "
        "speed | lowest to highest |"
    )
    yield markdown(head, rows)


def start(part: Part) -> Iterator[str]:
    rows = []
    for name, result in part["results"].items():
        seconds, cpu = (f"{result[key]['median']:.1f}" for key in ("seconds", "cpu_seconds"))
        rows.append([name, seconds, reach(result["seconds"]), cpu])
    yield markdown("| | seconds | lowest to highest | CPU-seconds |", rows)


def scaling(part: Part) -> Iterator[str]:
    rows = []
    for name, result in part["results"].items():
        rows.append([name, f"{1 / result['per_s']['median']:.2f}", f"{result['peak_mb']:.0f} MB"])
    yield markdown("| | seconds | peak memory |", rows)
    rows = []
    for name, facts in part["shuffle_quality"].items():
        cells = [name, f"{facts['correlation']:.4f}", f"{facts['shards_per_batch']:.1f}"]
        rows.append([*cells, f"{100 * facts['row_span_95']:.0f} %"])
    yield markdown(
        "| order | correlation of position and row | shards per batch | range of a batch's rows "
        "(95 %) |",
        rows,
    )
    rows, worlds = [], part["ranks"]
    for ranks, result in worlds.items():
        kept = result["per_s"]["median"] / worlds["1"]["per_s"]["median"] / int(ranks)
        kept_cpu = per_cpu(result) / per_cpu(worlds["1"])
        cells = [ranks, middle(result["per_s"]), reach(result["per_s"]), f"{100 * kept:.0f} %"]
        rows.append([*cells, number(per_cpu(result)), f"{100 * kept_cpu:.0f} %"])
    if rows:
        head = (
            "| ranks on this machine | crops per second | lowest to highest | efficiency | per "
            "CPU-second | efficiency |"
        )
        yield markdown(head, rows)


def cluster(step: Part | None) -> Iterator[str]:
    """Estimate the speed of many GPUs from one GPU's rate with the paper's model: the measured
    rate, or else the target.

    ZeRO-1 as in configs/deepspeed/zero1.json. After the backward pass DeepSpeed all-reduces the
    bf16 gradients (a scatter and a gather); after AdamW the bf16 weights are gathered; all in a
    ring, without overlap. CMSC gathers the pooled halves of all crops in float32, and their
    gradient returns the same way; its scores, each half against those of all crops, are a float32
    product and its two gradients. All assumptions are conservative; nothing of this was measured on
    a cluster.
    """
    rate, basis = 2700.0, "the target for one H200; nothing was measured on a GPU"
    if step and step["input"].get("model") == "paper":
        rates = []
        for name, result in step["results"].items():
            if name.startswith("omnilead"):
                rates.append(float(result["per_s"]["median"]))
        if rates:
            rate, basis = max(rates), f"measured on one {step['input']['device']}"
    yield (
        "### Many GPUs, by formula: communication per step, efficiency and training time "
        "(estimated)"
    )
    rows = []
    for gpus, crops in CLUSTERS:
        *ms, sent_mb, efficiency = cluster_step(gpus, crops, rate)
        cells = [f"{gpus:,}", f"{crops}", f"{1e3 * crops / rate:.0f} ms", f"{sent_mb:,.0f} MB"]
        cells += [f"{each:.1f} ms" for each in ms]
        cells.append(f"{100 * efficiency:.0f} %")
        for total in (200 * 85_000, 10_000_000):
            cells.append(f"{total / (gpus * rate * efficiency) / 60:.3g} min")
        rows.append(cells)
    head = (
        "| GPUs | crops per GPU | compute | sent per GPU | gradients | weights | CMSC candidates "
        "| its scores | efficiency |"
    )
    yield markdown(f"{head} the paper's run: 200 epochs of 85,000 crops | 10 M ECGs, once |", rows)
    yield (
        f"From {rate:,.0f} crops/s per GPU ({basis}), bf16, the paper's 90.9 M parameters, "
        "ZeRO-1; assumed: "
        f"{NVLINK_GB_PER_S:.0f} GB/s per GPU within a node of {NODE}, {NETWORK_GB_PER_S:.0f} GB/s "
        "per GPU between nodes, "
        f"{1e6 * HOP_S:.0f} us per hop, {FP32_TFLOPS:.0f} TFLOP/s in float32; the paper trains in "
        "batches of 512 crops."
    )


def cluster_step(gpus: int, crops: int, rate: float) -> tuple[float, ...]:
    """Milliseconds for gradients, weights, candidates and scores; the megabytes that a GPU sends;
    and the efficiency."""
    bandwidth = 1e9 * (NVLINK_GB_PER_S if gpus <= NODE else NETWORK_GB_PER_S)
    sent = 0.0
    spent = []
    # bytes, and how often they go around the ring
    for size, rounds in (
        (4 * PARAMETERS, 2),
        (2 * PARAMETERS, 1),
        (2 * gpus * crops * 2 * WIDTH * 4, 2),
    ):
        part = size * (gpus - 1) / gpus
        sent += part
        spent.append(part / bandwidth + rounds * (gpus - 1) * HOP_S)
    # in addition to one GPU's
    spent.append(3 * 2 * (2 * crops) * (gpus - 1) * (2 * crops) * WIDTH / (FP32_TFLOPS * 1e12))
    compute = crops / rate
    return *(1e3 * seconds for seconds in spent), sent / 1e6, compute / (compute + sum(spent))


def evidence(part: Part) -> Iterator[str]:
    """The reports of `omnilead bench` on synthetic and real ECGs, and the same for fine-tuned
    models."""
    for where, document in part["results"].items():
        text = bench_report.markdown(document).strip()
        text = text.replace("\n## ", f"\n#### {where}: ")
        yield text.partition("\n")[2].strip()


def headline(part: Part) -> str:
    """Four rows of the evidence, for README.md. Names that end in a number are seeds of one
    config."""
    body = []
    for where, task, metric, leads, share in HEADLINE:
        document = part["results"].get(where, {"rows": (), "differences": ()})
        asked = {"task": task, "leads": leads, "share": share}
        rows = {row["model"]: row for row in document["rows"] if asked.items() <= row.items()}
        if not rows:
            continue
        model = next(iter(rows))
        shown = [rows[name] for name in (model, *BASELINES)]
        cells = [scored(row["metrics"][metric], row["intervals"][metric]) for row in shown]
        prefix, _, seed = model.rpartition("-")
        seeds = []
        for name, row in rows.items():
            if re.fullmatch(rf"{re.escape(prefix)}-\d+", name):
                seeds.append(row["metrics"][metric])
        if seed.isdecimal() and len(seeds) > 1:
            cells[0] += f", seeds {min(seeds):.3f} to {max(seeds):.3f}"
        asked |= {"metric": metric, "model": model, "against": BASELINES[0]}
        gaps = [gap for gap in document["differences"] if asked.items() <= gap.items()]
        cells += [scored(gap["difference"], gap["interval"], "+") for gap in gaps]
        what = f"{task}, {'lead I' if leads == '1' else f'{leads} leads'}"
        if share:
            what += f", {100 * share:g} % of labels"
        count = rows[model]["n"]
        body.append([f"{where}: {what}, {bench_report.MAIN[metric]} (n = {count:,})", *cells])
    return markdown(f"| | pre-trained | {' | '.join(BASELINES)} | pre-trained minus random |", body)


def scored(value: float, ends: Sequence[float], sign: str = "") -> str:
    return f"{value:{sign}.3f} ({ends[0]:{sign}.3f} to {ends[1]:{sign}.3f})"


TABLES: dict[str, tuple[str, Callable[[Part], Iterator[str]]]] = {
    "evidence": (
        "Does pre-training help? Linear probes on frozen embeddings, and identification",
        evidence,
    ),
    "ingest": ("Archive to dataset: records (read, ingest, plan, synth) or GB (verify)", rates),
    "loader": ("Dataset to batches: crops of 10 s as float32 millivolts in torch", loader),
    "step": ("One training step: crops of 10 s", step),
    "e2e": ("The training loop, against the bare step", e2e),
    "embed": ("ECGs to embeddings: the command against the encoder alone", embed),
    "start": ("From the command to the first step: the quick start", start),
    "scaling": ("A very large dataset: time to a rank's first batch, and shuffle quality", scaling),
}


def kind(name: str) -> str:
    return name.split(":")[0].removeprefix("authors_")


def is_peer(name: str) -> bool:
    return any(word in name for word in ("re-creation", "wfdb.rdrecord"))


def device_of(part: Part) -> str:
    return str(part["config"].get("device", "cpu"))


def machine(part: Part) -> str:
    hardware = part["hardware"]
    return str(hardware["gpus"][0]["name"] if device_of(part) == "cuda" else hardware["cpu"])


def clock(part: Part) -> str:
    """The rate that counts: per second on a GPU, which is not shared, else per CPU-second."""
    return "per_s" if device_of(part) == "cuda" else "per_cpu_s"


def per_cpu(result: Result) -> float:
    return float(result["per_cpu_s"]["median"])


def middle(spread: dict[str, float]) -> str:
    return number(spread["median"])


def reach(spread: dict[str, float]) -> str:
    return f"{number(spread['low'])} to {number(spread['high'])}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def repeated(part: Part) -> tuple[int, int]:
    """How often cases were measured: the fewest, and the requested number (the most if none was
    requested)."""
    asked = part["config"].get("repeats")
    each = [int(r.get("repeats", asked or 0)) for r in part["results"].values()]
    return min(each), int(asked or max(each))


def note(part: Part) -> str:
    """How a table was measured: machine, date, input, repeats and versions."""
    hardware, facts, name = part["hardware"], part["input"], part["benchmark"]
    on_gpu = device_of(part) == "cuda"
    file = f"[{part['file']}](results/{part['file']})"
    where = f"{machine(part)}, {hardware['cpu']}" if on_gpu else hardware["cpu"]
    where += f", {hardware['cores']} cores" + ("" if on_gpu else " shared with others")
    when = part["date"][:10]
    if part["git"]["dirty"]:
        when = f"uncommitted changes, {when}"
    if name == "evidence":
        made = f"{where}, {when}; {facts['archive']}"
        if outside := facts.get("made_outside"):
            made += f"; made outside the plan: {', '.join(outside)}"
        return f"{made}; {file}. {bench_report.INTERVALS}"
    what = facts["archive"]
    if name != "step":
        unit = "records" if "records" in facts else "crops"
        what = f"{facts[unit]:,} {unit} ({facts['archive']}) in the page cache"
        if "threads" in facts:
            what += f", {facts['threads']} threads"
    fewest, repeats = repeated(part)  # fewer if time ran out
    many = f"{fewest} to {repeats} runs" if fewest < repeats else f"{repeats} runs"
    if name in FRESH and not on_gpu:
        many += ", each in a fresh process"
    versions = ", ".join(f"{package} {version}" for package, version in part["versions"].items())
    load = f"load {hardware['load_before']:.1f} before"
    said = f"{where} ({load}), {when}; {what}; median of {many}; {versions}; {file}."
    for case, reason in part.get("left_out", {}).items():
        said += f" Left out: {case}: {reason}."
    return said
