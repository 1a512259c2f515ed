"""Draw docs/house.svg, which shows the folders of the project, their modules, and which folder imports which.

python -m docs.house [FILE.svg]
"""

import sys
from collections import Counter
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from tests.test_house import MODULES, dotted, imports
from tests.test_house import room as wing_and_folder

WING_COLOURS = {"data_tools": "#dbe7f3", "engine": "#e6f0dd", "downstream": "#f6e9d7"}
DOCS = Path(__file__).parent
ROW, COLUMNS, WIDTH, GAP = 0.19, 3, 4.2, 0.5  # inches


def folder_of(module: str) -> str:
    """Returns the folder of a module, such as engine/data."""
    return "/".join(wing_and_folder(module))


def layer_by_folder(below: dict[str, set[str]]) -> dict[str, int]:
    """Returns the layer in which each folder is drawn, 0 at the bottom: one above the highest folder that it
    imports. `below`: {folder: the folders that it imports}."""
    level = dict.fromkeys(below, 0)
    for _ in below:
        level = {
            name: 1 + max((level[other] for other in below[name]), default=-1) for name in below
        }
    return level


def main(out: Path) -> None:
    members: dict[str, list[str]] = {}
    names = {dotted(path) for path in MODULES if path.stem not in ("__init__", "__main__")}
    for name in sorted(names):
        members.setdefault(folder_of(name), []).append(name.rpartition(".")[2])
    pairs = (
        (folder_of(dotted(path)), folder_of(target))
        for path in MODULES
        for target in imports(path)
        if target in names
    )
    counts = Counter((user, used) for user, used in pairs if user != used)
    below = {name: {used for user, used in counts if user == name} for name in members}
    level = layer_by_folder(below)
    rows = [
        [name for name in members if level[name] == floor]
        for floor in range(max(level.values()) + 1)
    ]
    # The arrow to a folder is left out if arrows lead there through another imported folder
    arrows = {
        name: used - {far for near in used for far in _folders_below(near, below)}
        for name, used in below.items()
    }
    draw_house(out, [row for row in rows if row], members, arrows)


def _folders_below(name: str, below: dict[str, set[str]]) -> set[str]:
    return below[name].union(*(_folders_below(other, below) for other in below[name]))


def draw_house(
    out: Path, rows: list[list[str]], members: dict[str, list[str]], arrows: dict[str, set[str]]
) -> None:
    matplotlib.rcParams["svg.fonttype"], matplotlib.rcParams["svg.hashsalt"] = "none", "house"
    height = {name: 0.42 + ROW * -(-len(modules) // COLUMNS) for name, modules in members.items()}
    tall = [max(height[name] for name in row) for row in rows]
    size = (max(map(len, rows)) * (WIDTH + 0.5) + 0.3, sum(tall) + GAP * len(rows))
    figure = Figure(size, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, size[0]), ylim=(0, size[1]))
    axes.axis("off")
    boxes, y = {}, GAP / 2
    for row, top in zip(rows, tall, strict=True):
        for i, name in enumerate(row):
            left = size[0] / 2 + (i - len(row) / 2) * (WIDTH + 0.5) + 0.25
            bottom = y + top - height[name]
            boxes[name] = (left, bottom)
            colour, style = WING_COLOURS[name.split("/")[0]], "round,pad=0,rounding_size=0.08"
            axes.add_patch(
                FancyBboxPatch(
                    (left, bottom), WIDTH, height[name], style, fc=colour, ec="#667", zorder=2
                )
            )
            axes.text(
                left + 0.1,
                bottom + height[name] - 0.25,
                name,
                weight="bold",
                size=9,
                zorder=3,
            )
            for j, module in enumerate(sorted(members[name])):
                place = (
                    left + 0.1 + j % COLUMNS * WIDTH / COLUMNS,
                    bottom + height[name] - 0.45 - j // COLUMNS * ROW,
                )
                axes.text(*place, module, size=8, color="#333", zorder=3)
        y += top + GAP
    for user, used in ((user, used) for user, rooms in arrows.items() for used in sorted(rooms)):
        start = (boxes[user][0] + WIDTH / 2, boxes[user][1])
        end = (boxes[used][0] + WIDTH / 2, boxes[used][1] + height[used])
        axes.annotate(
            "",
            end,
            start,
            arrowprops={"arrowstyle": "-|>", "color": "#667", "shrinkA": 0, "shrinkB": 0},
            zorder=1,
        )
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("house.svg"))
