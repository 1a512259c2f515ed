"""docs/: the tutorial runs, settings and links in the pages exist, the picture can be drawn."""

import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from docs import house, settings
from omnilead.__main__ import COMMANDS, main
from omnilead.data_tools.hospital.files import FORMATS
from omnilead.engine.common import LEADS, flatten
from omnilead.engine.config import Config
from omnilead.engine.tasks.config import FinetuneConfig
from tests.forks import started

DOCS = Path(__file__).parents[1] / "docs"
README = DOCS.parent / "data_tools" / "README.md"
FEW = [
    "train.steps=2",
    "train.epochs=null",
    "train.batch_crops=4",
    "train.precision=fp32",
    "train.compile=eager",
]


def tutorial(folder: Path) -> None:
    """The tutorial unchanged, except for few patients and steps."""
    source, constants = (DOCS / "tutorial.py").read_text(), "PATIENTS, STEPS = 600, 150"
    assert constants in source
    os.chdir(folder)
    exec(
        compile(source.replace(constants, "PATIENTS, STEPS = 100, 2"), "tutorial", "exec"),
        {"__name__": "tutorial"},
    )


def test_the_tutorial_runs(tmp_path: Path) -> None:
    process = started(tutorial, tmp_path, out=tmp_path / "log")
    process.join()
    log = (tmp_path / "log").read_text()
    assert process.exitcode == 0, log[-3000:]
    assert (
        log.count("\n$ omnilead ") == 5 and "AUROC:" in log and "embedding: torch.Size([64])" in log
    )
    assert "prediction: {'abnormal': 0." in log
    made = {path.name for path in (tmp_path / "tutorial").iterdir()}
    assert {"ecg.png", "scores.html", "predictions.csv", "pretrained", "tuned"} <= made


def extending(folder: Path) -> None:
    """All files and commands of docs/extending.md, with few steps on few ECGs."""
    os.chdir(folder)
    page = (DOCS / "extending.md").read_text()
    for block in re.findall(
        r"```(?:python|yaml|csv)\n(# (\S+)\n.*?)```", page + README.read_text(), re.DOTALL
    ):
        Path(block[1]).write_text(block[0])
    Path("FOLDER").mkdir()
    rhythms = [
        f"{number},{('AF', 'sinus')[number % 2]},{('train', 'valid', 'test')[number // 2 % 3]}"
        for number in range(24)
    ]
    Path("rhythm.csv").write_text("\n".join(["record,rhythm,split", *rhythms]))
    for number in range(24):
        mv_TL = np.random.default_rng(number).normal(0, 0.3, (2500, 12))
        np.savetxt(
            f"FOLDER/{number}.csv", mv_TL, delimiter=",", header=",".join(LEADS), comments=""
        )
    for line in re.findall(r"^    omnilead (.*)", page, re.MULTILINE):
        command, *words = shlex.split(line)
        words += [
            word
            for setting in FEW
            if command in ("pretrain", "finetune")
            for word in ("--set", setting)
        ]
        print(f"\n$ omnilead {shlex.join([command, *words])}", flush=True)
        assert main([command, *words]) == 0


def test_the_extension_points_are_as_documented(tmp_path: Path) -> None:
    process = started(extending, tmp_path, out=tmp_path / "log")
    process.join()
    assert process.exitcode == 0, (tmp_path / "log").read_text()[-3000:]
    assert {"embeddings.parquet", "predictions.csv"} < {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "OUT" / "model" / "hidden.py").exists()


def test_the_reference_of_settings_is_current() -> None:
    assert (DOCS / "settings.md").read_text() == settings.text(), (
        "write it again: python -m docs.settings"
    )
    assert " | |" not in settings.text(), (
        "a setting has no comment beside it that says what it means"
    )


def test_troubleshooting_has_fifteen_answers() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    assert re.findall(r"^\*\*(\d+)\. .*[?.]\*\*$", text, re.MULTILINE) == [
        str(n) for n in range(1, 16)
    ]


def test_the_page_for_hospitals_names_every_format_and_command() -> None:
    text = (DOCS / "hospitals.md").read_text()
    assert all(f"(`{name}`)" in text for name in FORMATS)
    assert set(re.findall(r"^    omnilead (\w+)", text, re.MULTILINE)) <= set(COMMANDS)
    assert all((DOCS / link).exists() for link in re.findall(r"\]\(([^)#]+)", text))


@pytest.mark.parametrize("page", ["troubleshooting", "deviations"])
def test_settings_links_and_tests_that_a_page_names_exist(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    known = {key for kind in (Config, FinetuneConfig) for key in flatten(kind().tree())}
    sections = {key.partition(".")[0] for key in known if "." in key}
    named = {
        key
        for key in re.findall(r"[`\s]([a-z]+\.[a-z_.]+)(?=[=:`])", text)
        if key.partition(".")[0] in sections
    }
    assert len(named) >= 12 and named <= known | {"augment.threekg"}
    for test in re.findall(r"test_\w+\.py", text):
        assert list(Path(__file__).parent.rglob(test))
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (DOCS / link).exists()


def test_the_picture_of_the_house_names_every_folder(tmp_path: Path) -> None:
    house.main(tmp_path / "house.svg")
    drawn = (tmp_path / "house.svg").read_text()
    folders = {
        path.parent.relative_to(DOCS.parent)
        for path in house.MODULES
        if path.parent.name != "kernels"
    }
    assert all(f"{folder}/<" in drawn for folder in folders)
