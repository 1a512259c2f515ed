"""Draw README's pictures: docs/wings.svg, docs/ecg.png, docs/views.png and docs/why.png.

    python -m docs.pictures [FOLDER]

All pictures show one synthetic ECG. wings.svg shows its way through data_tools, engine and downstream: from
an archive to shards, through random lead masking and the shipped encoder, to a prediction. Drawing takes
half a minute; the same version draws the same pictures.
"""

import sys
from html import escape
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

import omnilead
from docs.augmentations import (
    FIGURE_STYLE,
    MASK,
    PAPER,
    VIEW,
    _draw_leads,
    _draw_title,
    augmented_halves_and_params,
)
from omnilead.__main__ import main as run_command
from omnilead.data_tools.dataset import Dataset, Ecg
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.downstream.tasks.metrics import Array
from omnilead.engine.data.augmentations import AugmentConfig
from omnilead.engine.data.augmentations.threekg import ThreeKG
from omnilead.engine.data.config import HALF

DOCS = Path(__file__).parent
# The diagnoses of the synthetic archive that a linear classifier is fitted to
CLASSES = ("AF", "RBBB", "LBBB")
RECORD, SHOWN_CLASS = "syn3_HR00024", "RBBB"
# Resolution and number of colours of a .png. It is saved with twice this resolution, because README shows
# it at half its width
PX_PER_INCH, COLOURS = 84, 48

# Sizes of wings.svg in pixels: width of the picture, height of each row of WINGS, margin at the top
WIDTH, ROW, TOP = 760, 132, 12
# x of the left and of the right drawing in each row, and the width and height of both
LEFT_X, RIGHT_X, DRAWN, TALL = 206, 514, 228, 84
WINGS = (
    ("data_tools", "an archive becomes", "checked shards", "shard"),
    ("engine", "shards train", "an encoder", "pretrain"),
    ("downstream", "the encoder answers", "for any ECG", "predict"),
)
WINGS_STYLE = (
    "text{font:15px system-ui,sans-serif;fill:#1f2328}.t{font-size:19px;font-weight:600}"
    ".s{font-size:13px;fill:#59636e}.c{font:600 14px ui-monospace,monospace;fill:#0b62a8}"
    ".page{fill:#fff;stroke:#d1d9e0}.w0{fill:#eef4fb}.w1{fill:#eff6ea}.w2{fill:#fbf3e6}"
    ".paper{fill:#fff7f6;stroke:#eeb0ad}.grid{stroke:#f3cfcc;fill:none}.box{fill:#fff;stroke:#818b98}"
    ".ecg{stroke:#14141c}.hidden{stroke:#c5ccd3}.arrow{stroke:#0b62a8;stroke-width:2}"
    "path{fill:none;stroke-linejoin:round}.up{fill:#d55e00}.down{fill:#0b62a8}.layer{fill:#7fb069}"
    "@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.s{fill:#9198a1}.c{fill:#58a6ff}"
    ".page{fill:#0d1117;stroke:#3d444d}.w0{fill:#14202e}.w1{fill:#17241a}.w2{fill:#2a2114}"
    ".paper{fill:#2b1d1f;stroke:#7d4a4a}.grid{stroke:#4a2d2f}.box{fill:#0d1117}.ecg{stroke:#f0f6fc}"
    ".hidden{stroke:#444c56}.arrow{stroke:#58a6ff}.up{fill:#f0883e}.down{fill:#58a6ff}}"
)


def main(out: Path) -> None:
    with TemporaryDirectory() as folder:
        dataset, row, model = make_dataset_row_and_model(Path(folder))
        ecg = dataset[row]
        halves = np.hsplit(ecg.signal_mv.astype(np.float32), 2)
        halves_BSLT = np.ascontiguousarray(np.stack(halves)[None])
        prediction = model.predict(ecg.signal_mv, fs_hz=500, leads=LEADS, unit="mV")
        embedding = np.asarray(model.embed(ecg.signal_mv, fs_hz=500, leads=LEADS, unit="mV"))
        crc32c = f"{dataset.column('crc32c')[row]:08x}"
        (out / "wings.svg").write_text(draw_wings(ecg, halves_BSLT, crc32c, embedding, prediction))
        save_png(ecg.plot(), out / "ecg.png")
        with matplotlib.rc_context(FIGURE_STYLE):
            save_png(draw_views(halves_BSLT), out / "views.png")
        why = Path(folder, "why.png")
        crop = ["--crop", str(row), "--model", str(Path(folder, "model"))]
        run_omnilead(
            "show", str(Path(folder, "dataset")), *crop, "--why", SHOWN_CLASS, "--png", str(why)
        )
        save_small(Image.open(why), out / "why.png")


def run_omnilead(*words: str) -> None:
    if run_command(words):
        raise SystemExit(f"omnilead {' '.join(words)} failed")


def make_dataset_row_and_model(folder: Path) -> tuple[Dataset, int, Any]:
    """Returns (a synthetic dataset, the row of the ECG to draw, the encoder `small` with a linear
    classifier)."""
    archive, dataset, labels = folder / "archive", folder / "dataset", folder / "labels"
    run_omnilead("synth", str(archive), "--patients", "600", "--seed", "3")
    run_omnilead("shard", str(archive), "--out", str(dataset), "--plan", "all", "--workers", "1")
    run_omnilead("labels", "physionet2021", str(archive), "--out", str(labels))
    table = labels / "physionet2021-scored.parquet"
    omnilead.fit(data=dataset, labels=table, columns=CLASSES, out=folder / "model")
    opened = Dataset.open(str(dataset))
    (row,) = np.flatnonzero(opened.column("record") == RECORD)
    return opened, int(row), omnilead.load(folder / "model")


def save_png(figure: Figure, path: Path) -> None:
    file = BytesIO()
    figure.savefig(file, dpi=2 * PX_PER_INCH, metadata={"Software": None})
    save_small(Image.open(file), path)


def save_small(image: Image.Image, path: Path) -> None:
    """Saves an image as a small file: at most 1,100 pixels wide, with COLOURS colours."""
    rgb = image.convert("RGB")
    rgb.thumbnail((1100, 1100), Image.Resampling.LANCZOS)
    rgb.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def draw_views(halves_BSLT: Array) -> Figure:
    """Returns a figure with the first 5 s of an ECG, as recorded and under three augmentations."""
    page = Figure(figsize=(12, 4.6), facecolor="white", layout="constrained")
    panels: Any = page.subplots(1, 4)
    configs = {
        "As recorded": (AugmentConfig(rlm=0), "12 leads, 5 s", PAPER),
        "Random lead masking": (AugmentConfig(), "each lead hidden or not", MASK),
        "Noise": (AugmentConfig(rlm=0, noise="physio4"), "powerline, muscle, baseline", PAPER),
        "3KG": (AugmentConfig(rlm=0, threekg=ThreeKG()), "dipole turned and stretched", VIEW),
    }
    for axes, (name, (config, what, colour)) in zip(panels, configs.items(), strict=True):
        after, _ = augmented_halves_and_params(halves_BSLT, config)
        _draw_leads(axes, halves_BSLT[0, 0], after[0, 0], colour)
        _draw_title(axes, name, what)
    return page


def draw_wings(
    ecg: Ecg, halves_BSLT: Array, crc32c: str, embedding: Array, prediction: dict[str, float]
) -> str:
    """Returns wings.svg: a row for each of data_tools, engine and downstream, with two drawings and the
    command that leads from one to the other."""
    masked, draws = augmented_halves_and_params(halves_BSLT, AugmentConfig())
    hidden = ~draws["keep"][0, 0, :, 0].astype(bool)
    height = TOP * 2 + ROW * len(WINGS)
    name = "One ECG as a crop in a shard, a view with hidden leads, an embedding and a prediction"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{name}"><style>{WINGS_STYLE}</style>',
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
    ]
    drawings = (
        (draw_ecg_paper(ecg.signal_mv), draw_crop_stack(ecg.signal_mv)),
        (draw_leads(masked[0, 0], hidden), draw_encoder()),
        (draw_embedding(embedding), draw_prediction(prediction)),
    )
    captions = (
        ("an ECG as it was recorded", f"a crop in a shard, crc32c {crc32c}"),
        ("hidden leads, another draw each step", "encoder"),
        (f"its embedding: {embedding.size} numbers", "its prediction"),
    )
    for place, (left, right) in enumerate(drawings):
        title, first, second, command = WINGS[place]
        y = TOP + ROW * place
        middle = y + 18 + TALL / 2
        lines += [
            f'<rect class="w{place}" x="8" y="{y + 4}" width="{WIDTH - 16}" height="{ROW - 8}" rx="6"/>',
            _text_svg(22, y + 48, title, "t"),
            _text_svg(22, y + 72, first),
            _text_svg(22, y + 91, second),
            f'<g transform="translate({LEFT_X} {y + 14})">{left}</g>',
            f'<g transform="translate({RIGHT_X} {y + 14})">{right}</g>',
            _text_svg(LEFT_X, y + 116, captions[place][0], "s"),
            _text_svg(RIGHT_X, y + 116, captions[place][1], "s"),
            _text_svg((LEFT_X + DRAWN + RIGHT_X) / 2, middle - 10, command, "c", "middle"),
            f'<path class="arrow" d="M{LEFT_X + DRAWN + 12} {middle}h{RIGHT_X - LEFT_X - DRAWN - 26}m-7 -5l7 5l-7 5"/>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def _text_svg(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def draw_trace(
    mv_T: Array, x: float, y: float, width: float, px_per_mv: float, kind: str = "ecg"
) -> str:
    """Returns a lead as an SVG path. Each pixel of its width shows the sample of largest amplitude in its
    interval, so that no spike is lost."""
    groups = np.array_split(mv_T - np.median(mv_T), int(width))
    values = [group[np.abs(group).argmax()] for group in groups]
    step = width / len(values)
    points = [f"{x + step * i:.1f} {y - px_per_mv * value:.1f}" for i, value in enumerate(values)]
    return f'<path class="{kind}" d="M{"L".join(points)}"/>'


def draw_ecg_paper(signal_LT: Array) -> str:
    """Returns leads II and V1 on ECG paper as SVG."""
    grid = "".join(f"M{x} 0v{TALL}" for x in range(12, DRAWN, 12))
    grid += "".join(f"M0 {y}h{DRAWN}" for y in range(12, TALL, 12))
    lines = [
        f'<rect class="paper" width="{DRAWN}" height="{TALL}"/><path class="grid" d="{grid}"/>'
    ]
    for place, lead in enumerate(("II", "V1")):
        mv_T = signal_LT[LEADS.index(lead), :HALF]
        lines.append(draw_trace(mv_T, 22, 32 + 36 * place, DRAWN - 26, 20))
        lines.append(_text_svg(4, 26 + 36 * place, lead, "s"))
    return "".join(lines)


def draw_crop_stack(signal_LT: Array) -> str:
    """Returns a shard as SVG, drawn as a crop in front of other crops."""
    behind = [
        f'<rect class="box" x="{shift}" y="{8 - shift}" width="{DRAWN - 16}" height="{TALL - 8}" rx="3"/>'
        for shift in (12, 6, 0)
    ]
    return (
        "".join(behind)
        + f'<g transform="translate(0 8)">{draw_leads(signal_LT, np.zeros(12, bool), TALL - 8, DRAWN - 16)}</g>'
    )


def draw_leads(
    signal_LT: Array, hidden_L: Array, height: float = TALL, width: float = DRAWN
) -> str:
    """Returns twelve leads as SVG, one below the other. Hidden leads are drawn grey."""
    step = height / 12
    lines = []
    for lead in range(12):
        kind = "hidden" if hidden_L[lead] else "ecg"
        lines.append(draw_trace(signal_LT[lead, :HALF], 4, step * (lead + 0.6), width - 8, 5, kind))
    return "".join(lines)


def draw_encoder() -> str:
    """Returns the encoder as SVG: four convolutional layers, each shorter than the one before, and the
    layers of a transformer."""
    parts: list[tuple[float, float, int, int]]
    parts = [(22 * place, 7 * place, 14, TALL - 14 * place) for place in range(4)]
    parts += [(102 + 21 * place, TALL / 2 - 30, 14, 60) for place in range(6)]
    return "".join(
        f'<rect class="layer" x="{x}" y="{y:g}" width="{width}" height="{tall}" rx="2"/>'
        for x, y, width, tall in parts
    )


def draw_embedding(embedding_E: Array) -> str:
    """Returns an embedding as SVG, with a square for each number: orange if it is above the median of all
    numbers, else blue, and the more opaque the further it is from the median."""
    columns = 27
    size = DRAWN / columns
    centred = (embedding_E - np.median(embedding_E)) / np.quantile(np.abs(embedding_E), 0.95)
    squares = []
    for i, value in enumerate(np.clip(centred, -1, 1)):
        y, x = divmod(i, columns)
        place = f'x="{size * x:.1f}" y="{size * y * 0.83:.1f}" width="{size - 1:.1f}" height="6"'
        kind = "up" if value > 0 else "down"
        squares.append(f'<rect class="{kind}" {place} opacity="{abs(value):.2f}"/>')
    return "".join(squares)


def draw_prediction(prediction: dict[str, float]) -> str:
    """Returns a prediction as SVG, with a bar for each class."""
    lines = []
    for place, (name, probability) in enumerate(prediction.items()):
        y = 8 + 26 * place
        lines.append(_text_svg(0, y + 14, name))
        lines.append(
            f'<rect class="down" x="50" y="{y + 2}" width="{max(1, 130 * probability):.1f}" height="14"/>'
        )
        lines.append(_text_svg(56 + 130 * probability, y + 14, f"{probability:.2f}", "s"))
    return "".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
