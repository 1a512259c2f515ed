"""docs/: the tutorial runs, troubleshooting names settings and links that exist, the picture can be drawn."""

import os
import re
from pathlib import Path

from docs import house
from engine.config import Config, FinetuneConfig, flatten
from tests.forks import started

DOCS = Path(__file__).parents[1] / "docs"


def tutorial(folder: Path) -> None:
    """As it is, but with few patients and steps."""
    source, constants = (DOCS / "tutorial.py").read_text(), "PATIENTS, STEPS = 600, 150"
    assert constants in source
    os.chdir(folder)
    exec(compile(source.replace(constants, "PATIENTS, STEPS = 100, 2"), "tutorial", "exec"), {"__name__": "tutorial"})


def test_the_tutorial_runs(tmp_path: Path) -> None:
    process = started(tutorial, tmp_path, out=tmp_path / "log")
    process.join()
    log = (tmp_path / "log").read_text()
    assert process.exitcode == 0, log[-3000:]
    assert log.count("\n$ python -m ") == 8 and "AUROC:" in log and "embedding: torch.Size([64])" in log
    made = {path.name for path in (tmp_path / "tutorial").iterdir()}
    assert {"ecg.png", "scores.html", "embeddings.parquet", "pretrained", "diagnosis"} <= made


def test_troubleshooting_has_fifteen_answers_of_settings_that_exist() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    assert re.findall(r"^\*\*(\d+)\. .*[?.]\*\*$", text, re.MULTILINE) == [str(n) for n in range(1, 16)]
    known = {key for kind in (Config, FinetuneConfig) for key in flatten(kind().tree())}
    sections = {key.partition(".")[0] for key in known if "." in key}
    named = {key for key in re.findall(r"[`\s]([a-z]+\.[a-z_]+)(?==|`)", text) if key.partition(".")[0] in sections}
    assert len(named) >= 12 and named <= known
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (DOCS / link).exists()


def test_the_picture_of_the_house_names_every_folder(tmp_path: Path) -> None:
    house.main(tmp_path / "house.svg")
    drawn = (tmp_path / "house.svg").read_text()
    folders = {path.parent.relative_to(DOCS.parent) for path in house.MODULES if path.parent.name != "kernels"}
    assert all(f"{folder}/<" in drawn for folder in folders)
