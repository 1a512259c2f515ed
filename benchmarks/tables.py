"""Render the results of a benchmark as Markdown tables, which benchmarks.report writes to RESULTS.md and
EVIDENCE.md."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isnan, log10, nan

from benchmarks.measure import LEAST_FOR_INTERVAL, Part, Result
from omnilead.downstream.reports import bench_report

# {heading of a column: function that makes a cell from the result of a case}
Columns = dict[str, Callable[[Result], str]]
# Baselines that only older records have, because `omnilead bench` no longer measures them
OLD_BASELINES = ("MiniRocket + ridge",)
BASELINES = ("random weights", "mean beat", "measurements", *OLD_BASELINES, "boosted features")
HEADLINE_ROWS = (
    ("real", "ptbxl-superdiagnostic", "auroc", "12", 0.1),
    ("real", "ptbxl-superdiagnostic", "auroc", "12", 1.0),
    ("real", "ptbxl-superdiagnostic", "auroc", "1", 0.1),
    ("real", "ptbxl-superdiagnostic", "auroc", "1", 1.0),
    ("synthetic", "diagnosis", "auroc", "12", 0.01),
    ("synthetic", "diagnosis", "auroc", "1", 0.01),
    ("synthetic", "identification", "accuracy", "1", None),
)
PERCENTILE_NOTE = (
    "These intervals are plain percentiles of the resamples, as `omnilead bench` took them then: those of "
    "AUPRC sit too high. The records do not have what it takes to correct them."
)
# Name of the result of `evidence` that is shown as a picture, not as a table
BY_CROPS_RESULT = "real, by crops"


TEN_MILLION = 10_000_000
SHARE_OF_SIZE = {"a hundredth of the crops": 100, "a tenth of the crops": 10, "all crops": 1}


def markdown_table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table. `head` is its first line."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([head, f"|{'---|' * (head.count('|') - 1)}", *lines])


def case_table(results: dict[str, Result], columns: Columns) -> str:
    """Returns a Markdown table with a row for each case."""
    rows = []
    for name, result in results.items():
        rows.append([name, *(cell(result) for cell in columns.values())])
    return markdown_table(f"| | {' | '.join(columns)} |", rows)


def rate_blocks(part: Part) -> Iterator[str]:
    """Yields a table of the rates and the peak memory of all cases. Memory is that of the main process."""
    rows = []
    for name, result in part["results"].items():
        times = speed_against_recreation(name, part["results"])
        unit = " GB" if name.startswith("verify") else ""
        cells = [
            name,
            median_formatter("per_cpu_s")(result) + unit,
            range_formatter("per_cpu_s")(result),
        ]
        cells += [median_formatter("per_s")(result) + unit, "" if isnan(times) else f"{times:.1f}x"]
        rows.append([*cells, f"{result['peak_mb']:.0f} MB"])
    head = "per CPU-second | lowest to highest | per second | against the peer | peak memory"
    yield markdown_table(f"| | {head} |", rows)


def speed_against_recreation(name: str, results: dict[str, Result]) -> float:
    """Returns the speed of a case per CPU-second, relative to the fastest peer of the same kind, which is wfdb or a
    re-creation of fairseq-signals; NaN if there is none, or if the case itself is a peer. The kind is what a case's
    name has before the colon."""
    # Older records have cases such as authors_physio3+RLM: our loader with the noise of fairseq-signals' code.
    # They are compared with the re-creation of physio3+RLM
    kind = name.split(":")[0].removeprefix("authors_")
    peers = [
        other for other in results if re.match(rf"{re.escape(kind)}: (re-creation|wfdb)", other)
    ]
    if not peers or name in peers:
        return nan
    return per_cpu_rate(results[name]) / max(per_cpu_rate(results[peer]) for peer in peers)


def speed_against_library(name: str, results: dict[str, Result]) -> float:
    """Returns the speed of a case per CPU-second, relative to that of the fastest library in a DataLoader (with lead
    masking); NaN if none was measured."""
    library_rates = [
        per_cpu_rate(results[other]) for other in results if other.endswith(" in a DataLoader")
    ]
    return per_cpu_rate(results[name]) / max(library_rates, default=nan)


def loader_blocks(part: Part) -> Iterator[str]:
    yield from rate_blocks(part)
    yield (
        "omnilead cuts white noise from a fixed bank of normal numbers at random places; the "
        "re-creation draws it anew. Only our loader verifies crc32c, once per crop, in the first "
        "epoch. Rows of a DataLoader have our conversion to millivolts, but for the one by batch. "
        "The re-creation's files are four times as large; if caches hold all of them, it is "
        "twice as fast and the ratios are half of these (LOG.md)."
    )


def step_blocks(part: Part) -> Iterator[str]:
    """Yields the table of training steps. Each is compared with the re-creation of fairseq-signals' step with the same
    number of crops. The column `attention` is left out for older records, which do not have it."""
    results, figure, rows = part["results"], main_rate_key(part), []
    traced = any("attention" in result for result in results.values())
    speed = {name: float(result[figure]["median"]) for name, result in results.items()}
    baselines = ("fp32", "autocast") if figure == "per_s" else ("fp32",)
    for name, result in results.items():
        precision = name.split(": ")[1].split(",")[0]
        unit, mfu, times = " GFLOP", "", list[str]()
        if not name.startswith("matrix product"):
            product = speed.get(f"matrix product: {'fp32' if precision == 'fp32' else 'bf16'}")
            share = 100 * speed[name] * part["input"]["gflop_per_crop"] / (product or 1)
            unit, mfu = "", f"{share:.0f} %" if product else ""
            ratios = {
                baseline: step_speed_against_recreation(name, results, baseline, figure)
                for baseline in baselines
            }
            times = [
                f"{ratio:.2f}x ({baseline})"
                for baseline, ratio in ratios.items()
                if not isnan(ratio)
            ]
        cells = [
            name,
            median_formatter("per_s")(result) + unit,
            number_text(per_cpu_rate(result)) + unit,
        ]
        memory = result.get("gpu_peak_mb", result["peak_mb"]) / 1024
        cells += [range_formatter(figure)(result), mfu, " ".join(times), f"{memory:.1f} GB"]
        rows.append(cells + ([result.get("attention", "")] if traced else []))
    head = "crops per second | per CPU-second | lowest to highest | MFU | against the re-creation"
    head += " | peak memory | attention" if traced else " | peak memory"
    yield markdown_table(f"| | {head} |", rows)
    yield (
        "MFU: model FLOPs utilisation, here as a share of the matrix product's rate. "
        "fairseq-signals as released does not run under bf16 autocast: that row is a re-creation "
        "with this fixed."
    )


def cpc_blocks(part: Part) -> Iterator[str]:
    """Yields the table of training steps of ECG-CPC. Each is compared with the re-creation of ECG-CPC's step, which
    computes in float32."""
    results, figure, rows = part["results"], main_rate_key(part), []
    step_gflop = part["input"]["gflop_per_crop"]
    speed = {name: float(result[figure]["median"]) for name, result in results.items()}
    authors = [value for name, value in speed.items() if name.startswith("re-creation")]
    for name, result in results.items():
        product = speed.get(f"matrix product: {name.split(': ')[1].split(',')[0]}")
        is_product, is_forward = name.startswith("matrix product"), "embedding" in name
        unit = " GFLOP" if is_product else ""
        cells = [name, median_formatter(figure)(result) + unit, range_formatter(figure)(result)]
        gflop = step_gflop / 3 if is_forward else step_gflop
        share = 100 * speed[name] * gflop / product if product else nan
        cells.append("" if is_product or not product else f"{share:.0f} %")
        is_step = authors and not is_product and not is_forward
        cells.append(f"{speed[name] / authors[0]:.2f}x" if is_step else "")
        rows.append([*cells, f"{result.get('gpu_peak_mb', result['peak_mb']) / 1024:.1f} GB"])
    head = (
        "windows per CPU-second | lowest to highest | MFU | against the re-creation | peak memory"
    )
    yield markdown_table(f"| | {head} |", rows)
    yield "MFU: of the encoder's FLOPs alone, as a share of the matrix product's rate."


def step_speed_against_recreation(
    name: str, results: dict[str, Result], baseline: str = "fp32", figure: str = "per_cpu_s"
) -> float:
    """Returns the speed of a step relative to the re-creation of fairseq-signals' step with the same number of
    crops and the precision `baseline`; NaN if that was not measured."""
    peer = results.get(f"re-creation of fairseq-signals' step: {baseline}, {name.split(', ')[-1]}")
    return float(results[name][figure]["median"] / peer[figure]["median"]) if peer else nan


def loop_blocks(part: Part) -> Iterator[str]:
    has_intervals = fewest_and_most_repeats(part)[0] >= LEAST_FOR_INTERVAL
    columns: Columns = {
        "backend": lambda result: result["backend"],
        "crops per second": median_formatter("per_s"),
        "per CPU-second": median_formatter("per_cpu_s"),
        "bare step": median_formatter(f"bare_{main_rate_key(part)}"),
        "overhead": percent_formatter("overhead_pct"),
        "95 % interval" if has_intervals else "lowest to highest": range_formatter("overhead_pct"),
        "loader's part": percent_formatter("loader_pct"),
        "stall": percent_formatter("stall_pct"),
        "checkpoint": lambda result: f"{result['checkpoint_s']:.2f} s",
        "written": lambda result: f"{result.get('written_s', result['checkpoint_s']):.2f} s",
    }
    yield case_table(part["results"], columns)


def embed_blocks(part: Part) -> Iterator[str]:
    columns = {
        "crops per second": median_formatter("per_s"),
        "per CPU-second": median_formatter("per_cpu_s"),
        "encoder alone": median_formatter("bare_per_s"),
        "encoder alone per CPU-second": median_formatter("bare_per_cpu_s"),
        "share of its speed": percent_formatter("share_pct"),
        "lowest to highest": range_formatter("share_pct"),
    }
    yield case_table(part["results"], columns)


def start_blocks(part: Part) -> Iterator[str]:
    columns = {
        "seconds": median_formatter("seconds"),
        "lowest to highest": range_formatter("seconds"),
    }
    yield case_table(part["results"], columns | {"CPU-seconds": median_formatter("cpu_seconds")})


def scaling_blocks(part: Part) -> Iterator[str]:
    results = part["results"]
    opened = {name: result for name, result in results.items() if name.startswith("open")}
    columns: Columns = {
        "seconds": lambda result: f"{1 / result['per_s']['median']:.2f}",
        "peak memory": lambda result: f"{result['peak_mb']:.0f} MB",
    }
    yield case_table(opened, columns)
    rows = []
    for name in results:  # gives no rows for older records, which have no jobs
        size, _, job = name.partition(": ")
        if size == list(SHARE_OF_SIZE)[-1]:
            of_sizes = [results.get(f"{size}: {job}") for size in SHARE_OF_SIZE]
            cpu_s = [1 / per_cpu_rate(result) if result else nan for result in of_sizes]
            mb = [result["peak_mb"] if result else nan for result in of_sizes]
            rows.append(
                [
                    job,
                    *map(number_text, cpu_s),
                    growth_exponent(cpu_s),
                    *map(number_text, mb),
                    growth_exponent(mb),
                ]
            )
    if rows:
        largest = part["config"].get("huge") or TEN_MILLION
        counts = " | ".join(f"{largest // share:,}" for share in SHARE_OF_SIZE.values())
        head = f"CPU-seconds of {counts} crops | exponent | peak MB of {counts} crops | exponent"
        yield markdown_table(f"| the last tenfold gives the exponents | {head} |", rows)
    if "shuffle_quality" in part:  # only older records have it
        columns = {
            "correlation of position and row": lambda facts: f"{facts['correlation']:.4f}",
            "shards per batch": lambda facts: f"{facts['shards_per_batch']:.1f}",
            "range of a batch's rows (95 %)": lambda facts: f"{100 * facts['row_span_95']:.0f} %",
        }
        yield case_table(part["shuffle_quality"], columns)
    worlds = {f"{world} ranks": result for world, result in part.get("ranks", {}).items()}
    worlds |= {name: result for name, result in results.items() if name.endswith(" ranks")}
    if "1 ranks" in worlds:
        single_rank, rows = worlds["1 ranks"], []
        for name, result in worlds.items():
            efficiency = (
                result["per_s"]["median"] / single_rank["per_s"]["median"] / int(name.split()[0])
            )
            cells = [
                name,
                median_formatter("per_s")(result),
                range_formatter("per_s")(result),
                f"{100 * efficiency:.0f} %",
            ]
            efficiency = per_cpu_rate(result) / per_cpu_rate(single_rank)
            rows.append([*cells, number_text(per_cpu_rate(result)), f"{100 * efficiency:.0f} %"])
        head = "crops per second | lowest to highest | efficiency | per CPU-second | efficiency"
        yield markdown_table(f"| on this machine | {head} |", rows)


def evidence_blocks(part: Part) -> Iterator[str]:
    """Yields the tables of `omnilead bench` for each result of `evidence`: frozen and fine-tuned models, on synthetic and
    real ECGs."""
    for where, document in part["results"].items():
        if where == BY_CROPS_RESULT:
            yield "![AUROC against crops seen in pre-training](results/crops.png)"
            continue
        text = bench_report.comparison_markdown(document).strip()
        text = text.replace("\n## ", f"\n#### {where}: ")
        yield text.partition("\n")[2].strip()
    yield from notes_on_outdated_results(part)


def notes_on_outdated_results(part: Part) -> Iterator[str]:
    """Yields notes on the rows and intervals of a record that the present version would not make, or would make
    differently."""
    if not all("interval_method" in result for result in part["results"].values()):
        yield PERCENTILE_NOTE
    models = {name for result in part["results"].values() for name in result.get("models", ())}
    for name in OLD_BASELINES:
        if name in models:
            yield f"{name} was measured with an earlier version: `omnilead bench` has no such row now."


def headline_table(part: Part) -> str:
    """Returns the table of EVIDENCE.md, with a row for each of HEADLINE_ROWS. Models whose names differ only in a
    number at the end are seeds of one config; the range of their scores is shown."""
    body = []
    models = {row["model"] for result in part["results"].values() for row in result["rows"]}
    baselines = [name for name in BASELINES if name in models]  # older records have fewer baselines
    for where, task, metric, leads, share in HEADLINE_ROWS:
        document = part["results"].get(where, {"rows": (), "differences": ()})
        criteria = {"task": task, "leads": leads, "share": share}
        rows = {row["model"]: row for row in document["rows"] if criteria.items() <= row.items()}
        if not rows:
            continue
        model = next(iter(rows))
        cells = []
        for name in (model, *baselines):
            row = rows.get(name)
            cells.append(
                score_text(row["metrics"][metric], row["intervals"][metric]) if row else ""
            )
        prefix, _, seed = model.rpartition("-")
        seeds = []
        for name, row in rows.items():
            if re.fullmatch(rf"{re.escape(prefix)}-\d+", name):
                seeds.append(row["metrics"][metric])
        if seed.isdecimal() and len(seeds) > 1:
            cells[0] += f", seeds {min(seeds):.3f} to {max(seeds):.3f}"
        criteria |= {"metric": metric, "model": model, "against": BASELINES[0]}
        gaps = [gap for gap in document["differences"] if criteria.items() <= gap.items()]
        cells += [score_text(gap["difference"], gap["interval"], "+") for gap in gaps]
        row_name = f"{task}, {'lead I' if leads == '1' else f'{leads} leads'}"
        if share:
            row_name += f", {100 * share:g} % of labels"
        count = rows[model]["n"]
        body.append(
            [f"{where}: {row_name}, {bench_report.METRIC_LABELS[metric]} (n = {count:,})", *cells]
        )
    return markdown_table(
        f"| | pre-trained | {' | '.join(baselines)} | pre-trained minus random |", body
    )


def score_text(value: float, ends: Sequence[float], sign: str = "") -> str:
    """Returns a score with the ends of its interval; with `sign` +, positive numbers have a +."""
    return f"{value:{sign}.3f} ({ends[0]:{sign}.3f} to {ends[1]:{sign}.3f})"


TABLES: dict[str, tuple[str, Callable[[Part], Iterator[str]]]] = {
    "evidence": (
        "Does pre-training help? Linear probes on frozen embeddings, and identification",
        evidence_blocks,
    ),
    "ingest": (
        "Archive to dataset: records (read, ingest, plan, synth) or GB (verify)",
        rate_blocks,
    ),
    "loader": ("Dataset to batches: crops of 10 s as float32 millivolts in torch", loader_blocks),
    "step": ("One training step: crops of 10 s", step_blocks),
    "cpc": ("One step of ECG-CPC: windows of 2.5 s", cpc_blocks),
    "e2e": ("The training loop, against the bare step", loop_blocks),
    "embed": ("ECGs to embeddings: the command against the encoder alone", embed_blocks),
    "start": ("From the command to the first step: the quick start", start_blocks),
    "scaling": (
        "A very large dataset: time to a rank's first batch, and shuffle quality",
        scaling_blocks,
    ),
}


def device_of(part: Part) -> str:
    return str(part["config"].get("device", "cpu"))


def machine_name(part: Part) -> str:
    hardware = part["hardware"]
    return str(hardware["gpus"][0]["name"] if device_of(part) == "cuda" else hardware["cpu"])


def main_rate_key(part: Part) -> str:
    """Returns the key of the rate by which cases are compared: `per_s` on a GPU, which is not shared with other jobs,
    else `per_cpu_s`."""
    return "per_s" if device_of(part) == "cuda" else "per_cpu_s"


def per_cpu_rate(result: Result) -> float:
    return float(result["per_cpu_s"]["median"])


def median_formatter(figure: str) -> Callable[[Result], str]:
    """Returns a function that makes a cell with the median of `figure`, such as per_s, of a result."""
    return lambda result: number_text(result[figure]["median"])


def range_formatter(figure: str) -> Callable[[Result], str]:
    """Returns a function that makes a cell with the lowest and highest value of `figure`, such as per_s."""
    return lambda result: (
        f"{number_text(result[figure]['low'])} to {number_text(result[figure]['high'])}"
    )


def growth_exponent(values: Sequence[float]) -> str:
    """Returns x if a value grows with the number of crops to the power x, as measured between a tenth of the crops and all
    of them."""
    return f"{log10(values[-1] / values[-2]):.2f}"


def percent_formatter(figure: str) -> Callable[[Result], str]:
    """Returns a function that makes a cell with the median of `figure`, such as stall_pct, in per cent."""
    return lambda result: f"{result[figure]['median']:.1f} %"


def number_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def fewest_and_most_repeats(part: Part) -> tuple[int, int]:
    """Returns (fewest, most) repeats that the cases of a part have."""
    usual = part["config"].get("repeats") or 0
    repeats = [int(result.get("repeats", usual)) for result in part["results"].values()]
    return min(repeats), max(repeats)


def measurement_note(part: Part) -> str:
    """Returns a note on how a table was measured: machine, date, input, repeats and versions."""
    hardware, facts = part["hardware"], part["input"]
    machine_text = f"{hardware['cpu']}, {hardware['cores']} cores"
    machine_text = (
        f"{machine_name(part)}, {machine_text}"
        if device_of(part) == "cuda"
        else f"{machine_text} shared with others"
    )
    date = "uncommitted changes, " * bool(part["git"]["dirty"]) + part["date"][:10]
    file = f"[{part['file']}](results/{part['file']})"
    if part["benchmark"] == "evidence":
        archive_and_date = f"{machine_text}, {date}; {facts['archive']}"
        if outside := facts.get("made_outside"):
            archive_and_date += f"; made outside the plan: {', '.join(outside)}"
        return f"{archive_and_date}; {file}. {bench_report.INTERVAL_NOTE}"
    inputs = facts["archive"]
    for unit in ("records", "crops", "threads"):
        inputs += f", {facts[unit]:,} {unit}" if unit in facts else ""
    repeats = " to ".join(dict.fromkeys(map(str, fewest_and_most_repeats(part))))
    versions = ", ".join(f"{package} {version}" for package, version in part["versions"].items())
    load = f"load {hardware['load_before']:.1f} before"
    text = (
        f"{machine_text} ({load}), {date}; {inputs}; median of {repeats} runs; {versions}; {file}."
    )
    for case, reason in part.get("left_out", {}).items():
        text += f" Left out: {case}: {reason}."
    return text
