"""What the READMEs tell a newcomer to type is what the commands take, and their Python runs."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from data_tools.__main__ import _parser
from data_tools.dataset import Dataset

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("*/README.md"))]
COMMANDS = [
    (path.parent.name, line.split("#")[0].replace("$B", "s3://bucket"))
    for path in READMES
    for line in path.read_text().splitlines()
    if line.startswith("python -m data_tools ")
]
PYTHON = [(path, block) for path in READMES for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)]


def test_there_is_something_to_check() -> None:
    assert len(COMMANDS) >= 9
    assert len(PYTHON) >= 3


@pytest.mark.parametrize(("where", "command"), COMMANDS)
def test_commands_are_accepted(where: str, command: str) -> None:
    _parser().parse_args(shlex.split(command)[3:])


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
