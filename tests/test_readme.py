"""What the READMEs tell a newcomer to type is what the commands take, and their Python runs."""

import argparse
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from data_tools.__main__ import _parser
from data_tools.dataset import Dataset
from engine import convert, embed, evaluate, finetune, pretrain, reproduce
from engine.config import load

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("*/README.md")), *sorted(ROOT.glob("docs/*.md"))]
LINES = [
    (path.parent.name, line.strip().split("#")[0].replace("$B", "s3://bucket"))
    for path in READMES
    for line in path.read_text().replace("\\\n", " ").splitlines()
]
COMMANDS = [(where, line) for where, line in LINES if line.startswith("python -m data_tools ")]
DOORS = [line for _, line in LINES if line.startswith(("deepspeed engine/", "python engine/"))]
TOOLS = {"evaluate": evaluate.parse, "embed": embed.parse, "reproduce": reproduce.parse, "convert": convert.parse}
USES = [line for _, line in LINES if line.startswith(tuple(f"python -m engine.{name} " for name in TOOLS))]
PYTHON = [(path, block) for path in READMES for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)]


def test_there_is_something_to_check() -> None:
    assert len(COMMANDS) >= 9 and len(DOORS) >= 3 and len(USES) >= 4
    assert len(PYTHON) >= 3


@pytest.mark.parametrize(("where", "command"), COMMANDS)
def test_commands_are_accepted(where: str, command: str) -> None:
    _parser().parse_args(shlex.split(command)[3:])


@pytest.mark.parametrize("command", DOORS)
def test_settings_are_accepted(command: str) -> None:
    words = shlex.split(command)
    first = next(i for i, word in enumerate(words) if word.startswith("engine/"))
    program = {"engine/pretrain.py": pretrain.main, "engine/finetune.py": finetune.main}[words[first]]
    _, _, kind, _, default = program.args
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=default)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args(words[first + 1 :])
    load(ROOT / args.config, args.set, kind)


@pytest.mark.parametrize("command", USES)
def test_options_are_accepted(command: str) -> None:
    words = shlex.split(command)
    TOOLS[words[2].split(".")[1]](words[3:])


@pytest.mark.parametrize(("path", "block"), PYTHON, ids=lambda value: getattr(value, "parent", Path("block")).name)
def test_python_runs(
    path: Path, block: str, dataset: Dataset, saved_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the tests' own dataset and a small model; an endless loop is left after its first turn."""
    (tmp_path / "dataset").symlink_to(dataset.root.url)
    saved_model("RUN/model", head={"task": "diagnosis", "classes": ["AF", "NSR"]})
    monkeypatch.chdir(tmp_path)
    block = block.replace("batch_crops=512", "batch_crops=16")
    lines = block.rstrip().splitlines()
    if any(line.startswith("for ") for line in lines):
        lines.append("    break")
    exec(compile("\n".join(lines), str(path), "exec"), {"__name__": "readme"})


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z]+)", (ROOT / "README.md").read_text())) <= targets
