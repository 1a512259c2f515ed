"""What the figures of a record must reach, and whether they do: one line below each table."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Part = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    what: str
    cases: str  # a regular expression; the worst of them counts
    figure: Callable[[Result, dict[str, Result]], float]  # of a case, among all
    bar: float
    at_most: bool = False
    device: str = ""  # "": both


def median(name: str) -> Callable[[Result, dict[str, Result]], float]:
    return lambda result, results: float(result[name]["median"])


def times_the_loader(result: Result, results: dict[str, Result]) -> float:
    """Per CPU-second, of the fastest re-creation of the authors' loader on the same stage."""
    stage = next(name for name, other in results.items() if other is result).split(":")[0]
    rates = [r["per_cpu_s"]["median"] for name, r in results.items() if name.startswith(f"{stage}: re-creation")]
    return float(result["per_cpu_s"]["median"] / max(rates)) if rates else float("nan")


BARS = {
    "ingest": (Bar("records a CPU-second to tar shards", "^ingest: omnilead, tar$", median("per_cpu_s"), 2000),),
    "loader": (
        Bar("lead masking, times the re-creation", r"^RLM: (torch|resident), batch \d+$", times_the_loader, 10, device="cpu"),
        Bar("noise, times the re-creation", r"^physio\S*: (torch|resident), batch \d+$", times_the_loader, 15, device="cpu"),
        Bar("crops a second from tar", "^RLM: (torch|dali) to cuda, batch (256|1024)", median("per_s"), 27_000, device="cuda"),
        Bar("crops a second, resident", "^RLM: resident to cuda, batch (256|1024)", median("per_s"), 500_000, device="cuda"),
    ),
    "e2e": (
        Bar("overhead %", "", median("overhead_pct"), 3, at_most=True),
        Bar("of the loop alone %", "", median("loop_pct"), 2, at_most=True),
        Bar("stall %", "", median("stall_pct"), 1, at_most=True),
    ),
    "embed": (Bar("% of the encoder's speed", "^(tar|WFDB)", median("share_pct"), 90),),
    "start": (Bar("seconds to the first step", "^first step", median("seconds"), 20, at_most=True),),
    "scaling": (
        Bar("seconds to the first batch", "^open", lambda r, _: 1 / float(r["per_s"]["median"]), 10, at_most=True),
        Bar("MB", "^open", lambda r, _: float(r["peak_mb"]), 1000, at_most=True),
    ),
}


def judged(part: Part) -> Iterator[tuple[str, float, Bar]]:
    """Of each bar that this record can tell of: the worst case, and its figure."""
    device, results = part["config"].get("device", "cpu"), part["results"]
    for bar in BARS.get(part["benchmark"], ()):
        if bar.device in ("", device):
            found = {name: bar.figure(r, results) for name, r in results.items() if re.search(bar.cases, name)}
            found = {name: value for name, value in found.items() if value == value}
            if found:
                worst = (max if bar.at_most else min)(found, key=lambda name: found[name])
                yield worst, found[worst], bar


def line(part: Part) -> str:
    said = []
    for worst, found, bar in judged(part):
        met = found <= bar.bar if bar.at_most else found >= bar.bar
        side = "at most" if bar.at_most else "at least"
        said.append(f"{bar.what} {side} {bar.bar:,g}: {'met' if met else 'missed'}, {found:,.4g} ({worst})")
    return f"Bars, the worst case: {'; '.join(said)}." if said else ""
