"""Draw results/speed.svg, the chart in README.md, and make the tables of ratios in RESULTS.md. Both compare
how much omnilead and other programs do in a CPU-second. The numbers are from the newest complete record of
each machine.

The SVG is written as text, is readable in light and in dark mode, and is the same for the same records.
"""

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from benchmarks.measure import Part
from benchmarks.tables import device_of, machine_name, markdown_table, per_cpu_rate

# in pixels: widths of the page, of the column of program names, of the number after a bar
PAGE_WIDTH, LABEL_WIDTH, NUMBER_WIDTH = (
    760,
    256,
    84,
)
BAR_HEIGHT, PROGRAM_GAP = 15, 8  # in pixels: height of a bar, gap between the bars of two programs
SVG_STYLE = (
    "text{font:16px system-ui,sans-serif;fill:#1f2328}.h{font-weight:600}.s{font-size:14px;fill:#59636e}"
    ".page{fill:#fff;stroke:#d1d9e0}.us0{fill:#0b62a8}.us1{fill:#6fa8d6}.o0{fill:#818b98}.o1{fill:#bcc4cd}"
    "@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.s{fill:#9198a1}.page{fill:#0d1117;stroke:#3d444d}"
    ".us0{fill:#58a6ff}.us1{fill:#2f6db5}.o0{fill:#9198a1}.o1{fill:#59636e}}"
)


class Panel(NamedTuple):
    """A part of the chart, which compares programs by one benchmark. It also becomes a table of ratios."""

    benchmark: str
    title: str
    # name of a program in the chart -> its case in the record; omnilead first
    programs: dict[str, str]
    form: str  # Python's format for the numbers


PANELS = (
    Panel(
        "loader",
        "ECGs loaded in a CPU-second, shuffled, leads hidden",
        {
            "omnilead": "RLM: torch, batch 256",
            "memory-mapped .npy": "RLM: memory-mapped .npy in a DataLoader",
            "Hugging Face datasets": "RLM: Hugging Face datasets in a DataLoader",
            "litdata": "RLM: litdata in a DataLoader",
            "mosaicml-streaming": "RLM: mosaicml-streaming in a DataLoader",
            "webdataset": "RLM: webdataset in a DataLoader",
            "fairseq-signals*": "RLM: re-creation of fairseq-signals' loader, 0 workers",
            ".npy, conversion in NumPy": "RLM: memory-mapped .npy, converted by batch",
        },
        ",.0f",
    ),
    Panel(
        "loader",
        "The same with noise added: powerline, muscle, baseline",
        {
            "omnilead": "physio3+RLM: torch, batch 256",
            "fairseq-signals*": "physio3+RLM: re-creation of fairseq-signals' loader, 0 workers",
        },
        ",.0f",
    ),
    Panel(
        "step",
        "ECGs trained on in a CPU-second, the paper's model, 4 a step",
        {
            "omnilead, bf16": "omnilead: bf16, 4 crops",
            "omnilead, fp32": "omnilead: fp32, 4 crops",
            "the authors' step, autocast*": "re-creation of fairseq-signals' step: autocast, 4 crops",
            "the authors' step, fp32*": "re-creation of fairseq-signals' step: fp32, 4 crops",
        },
        ".2f",
    ),
    Panel(
        "ingest",
        "Records to checked shards in a CPU-second",
        {
            "omnilead": "ingest: omnilead, tar",
            "fairseq-signals*": "ingest: re-creation of fairseq-signals' preprocessing",
        },
        ",.0f",
    ),
)
RATIO_NOTE = (
    "Below 1 the other is faster. The other loaders read int16 with our conversion to millivolts, but for "
    "`.npy, conversion in NumPy`, and check nothing; omnilead checks crc32c once per crop. \\* re-created: "
    "written by us after fairseq-signals."
)
# program -> {machine: rate}, for the machines on which it was measured
Rates = dict[str, dict[str, float]]


def rates_and_parts(panel: Panel, parts: Sequence[Part]) -> tuple[Rates, dict[str, Part]]:
    """Return (the rates of a panel, {machine: the record that its rates come from}). `parts` are records,
    oldest first. The rates of a machine come from its newest record of a CPU that has the cases of the first
    two programs of the panel."""
    ours, *others = panel.programs.values()
    sources: dict[str, Part] = {}
    for part in parts:
        known = part["results"].keys() if part["benchmark"] == panel.benchmark else ()
        if device_of(part) == "cpu" and ours in known and not known.isdisjoint(others[:1]):
            sources.pop(machine_name(part), None)
            sources[machine_name(part)] = part
    rates: Rates = {}
    for program, case in panel.programs.items():
        rates[program] = {
            name: per_cpu_rate(part["results"][case])
            for name, part in reversed(sources.items())
            if case in part["results"]
        }
    return rates, sources


def ratio_table_blocks(parts: Sequence[Part]) -> Iterator[str]:
    """Yield blocks of Markdown for RESULTS.md: for each panel, how many times as fast omnilead is as each
    other program, by machine. Without records, yield nothing."""
    measured = [(panel, *rates_and_parts(panel, parts)) for panel in PANELS]
    measured = [(panel, rates, sources) for panel, rates, sources in measured if sources]
    if measured:
        yield "### Times as fast as others, per CPU-second"
        yield RATIO_NOTE
    for panel, rates, sources in measured:
        machines = list(reversed(sources))
        ours = rates[next(iter(panel.programs))]
        rows = []
        for program, by_machine in rates.items():
            cells = [
                f"{ours[name] / by_machine[name]:.2f}" if name in by_machine else "not measured"
                for name in machines
            ]
            rows.append([program, *cells])
        heads = [f"[{name}](results/{sources[name]['file']})" for name in machines]
        yield markdown_table(f"| {panel.title}: omnilead against | {' | '.join(heads)} |", rows[1:])


def draw_chart(parts: Sequence[Part]) -> str:
    """Return the chart as the text of an SVG."""
    lines: list[str] = []
    machines: list[str] = []
    y = 34
    for panel in PANELS:
        rates, sources = rates_and_parts(panel, parts)
        machines = list(reversed(sources))
        lines.append(f'<text class="h" x="18" y="{y}">{escape(panel.title)}</text>')
        y += 14
        longest = max(rate for by_machine in rates.values() for rate in by_machine.values())
        for program, by_machine in rates.items():
            y_name = y + BAR_HEIGHT * len(machines) / 2 + 4
            lines.append(f'<text x="18" y="{y_name:g}">{escape(program)}</text>')
            kind = "us" if program.startswith("omnilead") else "o"
            for place, name in enumerate(machines):
                width = (
                    (PAGE_WIDTH - LABEL_WIDTH - NUMBER_WIDTH) * by_machine.get(name, 0) / longest
                )
                lines.append(_bar_svg(f"{kind}{place}", y, width))
                said = f"{by_machine[name]:{panel.form}}" if name in by_machine else "not measured"
                x_said = LABEL_WIDTH + width + 6
                lines.append(
                    f'<text class="s" x="{x_said:.1f}" y="{y + BAR_HEIGHT - 4}">{said}</text>'
                )
                y += BAR_HEIGHT
            y += PROGRAM_GAP
        y += 30
    for place, name in enumerate(machines):
        x = 18 + place * (PAGE_WIDTH - 36) // len(machines)
        lines.append(f'<rect class="o{place}" x="{x}" y="{y - 21}" width="11" height="11"/>')
        lines.append(f'<text class="s" x="{x + 18}" y="{y - 11}">{escape(name)}</text>')
    lines.append(f'<text class="s" x="18" y="{y + 12}">* re-created by us</text>')
    frame = (
        f'<rect class="page" x="0.5" y="0.5" width="{PAGE_WIDTH - 1}" height="{y + 27}" rx="8"/>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PAGE_WIDTH} {y + 28}" role="img" '
        f'aria-label="omnilead beside other programs, per CPU-second"><style>{SVG_STYLE}</style>'
    )
    return "\n".join([head, frame, *lines, "</svg>", ""])


def _bar_svg(kind: str, y: int, width: float) -> str:
    """Return a bar in the colour of the CSS class `kind`."""
    return f'<rect class="{kind}" x="{LABEL_WIDTH}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT - 3}"/>'
