"""What the figures of a record must reach, and whether they do: one line below each table, and the README's table of all."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fleet import BAR_CROPS_PER_S, TEN_MILLION
from benchmarks.tables import machine, rows

Part = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    what: str  # with all that `cases` and `asks` leave out
    cases: str  # a regular expression
    figure: Callable[[str, dict[str, Result]], float]  # of a case, among all; NaN: has none
    bar: float
    device: str = ""  # "": both
    at_most: bool = False
    asks: Callable[[Part], bool] = lambda given: True  # of the part's input


def median(figure: str) -> Callable[[str, dict[str, Result]], float]:
    return lambda name, results: float(results[name][figure]["median"])


def times_theirs(name: str, results: dict[str, Result]) -> float:
    """Per CPU-second, of the fastest re-creation of what the authors have for the same."""
    peers = [r for other, r in results.items() if other.startswith(f"{name.split(':')[0]}: re-creation")]
    return per_cpu(results[name]) / max(map(per_cpu, peers)) if peers else float("nan")


def times_the_step(name: str, results: dict[str, Result]) -> float:
    """Per CPU-second, of the re-creation in fp32 of as many crops: the fewest that both were measured with."""
    peers = {int(other.split()[-2]): r for other, r in results.items() if re.match("re-creation.*: fp32, ", other)}
    crops = int(name.split()[-2])
    return per_cpu(results[name]) / per_cpu(peers[crops]) if crops == min(peers, default=0) else float("nan")


def seconds(name: str, results: dict[str, Result]) -> float:
    return 1 / float(results[name]["per_s"]["median"])


def per_cpu(result: Result) -> float:
    return float(result["per_cpu_s"]["median"])


def paper(given: Part) -> bool:
    return bool(given["model"] == "paper")


def huge(given: Part) -> bool:
    return int(given["crops"]) >= TEN_MILLION


def h200(given: Part) -> bool:
    return paper(given) and "H200" in given["device"]


def four_threads(given: Part) -> bool:
    return int(given.get("threads", TEN_MILLION)) <= 4


OURS = r": (torch|resident), batch \d+(, first epoch)?$"  # with one thread
TO_GPU = r" to cuda, batch (256|1024)$"
BF16, FP32 = "^omnilead: (autocast|bf16), .*crops$", "^omnilead: fp32, .*crops$"
LOADER, STEP = "times the re-creation of fairseq-signals' loader", "times the re-creation of fairseq-signals' in fp32"
BARS = {
    "ingest": (
        Bar("records to tar shards a CPU-second, one worker", "^ingest: omnilead, tar$", median("per_cpu_s"), 2000),
        Bar(
            "records to tar shards, times the re-creation of fairseq-signals' preprocessing",
            "^ingest: omnilead, tar$",
            times_theirs,
            10,
        ),
    ),
    "loader": (
        Bar(f"lead masking, torch and resident, one thread, {LOADER}", f"^RLM{OURS}", times_theirs, 10, "cpu"),
        Bar(f"noise, torch and resident, one thread, {LOADER}", rf"^physio\S*{OURS}", times_theirs, 15, "cpu"),
        Bar(
            "crops a second to a GPU from tar, lead masking, batches of 256 and 1024, 4 threads",
            f"^RLM: (torch|dali){TO_GPU}",
            median("per_s"),
            27_000,
            "cuda",
            asks=four_threads,
        ),
        Bar(
            "crops a second on a GPU, resident, lead masking",
            f"^RLM: resident{TO_GPU}",
            median("per_s"),
            500_000,
            "cuda",
        ),
    ),
    "step": (
        Bar(f"a step of the paper's model in bf16, {STEP}", BF16, times_the_step, 3, "cpu", asks=paper),
        Bar(f"a step of the paper's model in fp32, {STEP}", FP32, times_the_step, 1.1, "cpu", asks=paper),
        Bar(
            "crops a second through the paper's model on an H200",
            "^omnilead: ",
            median("per_s"),
            BAR_CROPS_PER_S,
            "cuda",
            asks=h200,
        ),
    ),
    "e2e": (
        Bar("overhead of the loader and the loop over the bare step, %", "", median("overhead_pct"), 3, at_most=True),
        Bar("overhead of the loop alone, %", "", median("loop_pct"), 2, at_most=True),
        Bar("stall, % of the time", "", median("stall_pct"), 1, at_most=True),
    ),
    "embed": (
        Bar(
            "ECGs of 500 Hz to embeddings, % of the encoder's own speed",
            "^(tar|WFDB|arrays, 500 Hz):",
            median("share_pct"),
            90,
        ),
    ),
    "start": (Bar("seconds from the command to the first step", "^first step", median("seconds"), 20, "cpu", at_most=True),),
    "scaling": (
        Bar("10,000,000 crops: seconds to a rank's first batch", "^open", seconds, 10, at_most=True, asks=huge),
        Bar(
            "10,000,000 crops: a rank's memory, MB",
            "^open",
            lambda name, results: float(results[name]["peak_mb"]),
            1000,
            at_most=True,
            asks=huge,
        ),
    ),
}
BEST = ("step",)  # cases are ways to do one thing: the best counts, elsewhere the worst


def judged(part: Part) -> Iterator[tuple[str, float, Bar]]:
    """Of each bar that this device has: the case that counts, and its figure; "" and NaN where there is none."""
    device, results = part["config"].get("device", "cpu"), part["results"]
    for bar in BARS.get(part["benchmark"], ()):
        if bar.device in ("", device):
            cases = [name for name in results if re.search(bar.cases, name)] if bar.asks(part["input"]) else []
            found = {name: value for name in cases if (value := bar.figure(name, results)) == value}
            highest = bar.at_most != (part["benchmark"] in BEST)
            counts = (max if highest else min)(found, key=lambda name: found[name], default="")
            yield counts, found.get(counts, float("nan")), bar


def line(part: Part) -> str:
    said = []
    for case, found, bar in judged(part):
        outcome = f"{verdict(found, bar)}, {found:,.4g} ({case})" if case else "not measured"
        said.append(f"{bar.what} at {'most' if bar.at_most else 'least'} {bar.bar:,g}: {outcome}")
    return f"Bars, the {'best way' if part['benchmark'] in BEST else 'worst case'}: {'; '.join(said)}." if said else ""


def verdict(found: float, bar: Bar) -> str:
    return "met" if (found <= bar.bar if bar.at_most else found >= bar.bar) else "missed"


def table(parts: Sequence[Part]) -> str:
    """Of every bar what was measured on each machine, also that nothing was."""
    lines = []
    for benchmark, all_bars in BARS.items():
        found = [(part, *one) for part in parts if part["benchmark"] == benchmark for one in judged(part)]
        for bar in all_bars:
            told = [bar.what, f"at {'most' if bar.at_most else 'least'} {bar.bar:,g}"]
            measured = [(part, case, value) for part, case, value, of in found if of is bar and case]
            for part, case, value in measured:
                figure = f"{value:,.4g}" if verdict(value, bar) == "met" else f"**missed: {value:,.4g}**"
                lines.append([*told, figure, machine(part), f"[{case}](results/{part['file']})"])
                told = ["", ""]
            if not measured:
                lines.append([*told, "not measured", "", ""])
    return rows("| | bar | measured | on | worst case; of a step the best way |", lines)
