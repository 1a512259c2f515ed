"""The commands in the READMEs are accepted, and their Python code runs."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from omnilead.__main__ import COMMANDS
from omnilead.data_tools.dataset import Dataset
from omnilead.engine.config import Config, load
from omnilead.engine.tasks.config import FinetuneConfig
from tests.parsers import parse

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("*/README.md")), *sorted(ROOT.glob("docs/*.md"))]
LINES = [
    line.strip().split("#")[0].replace("$B", "s3://bucket")
    for path in READMES
    for line in path.read_text().replace("\\\n", " ").splitlines()
]
# omnilead NAME, python -m omnilead NAME, and, in one process or under a launcher, the module
# engine.NAME or engine/NAME.py
TYPED = re.compile(
    r"(?:omnilead +|python -m omnilead +|(?:python|deepspeed|torchrun) "
    r".*?engine[./])(\w+)(?:\.py)?(?: +(.*))?$"
)
USES = [
    (line[:60], *match.groups())
    for line in LINES
    if (match := TYPED.match(line)) and match[1] in COMMANDS and "..." not in line
]
PYTHON = [
    (path, block)
    for path in READMES
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
]


def test_the_readmes_contain_commands_and_python() -> None:
    assert len(USES) >= 20 and {"shard", "pretrain", "evaluate"} <= {name for _, name, _ in USES}
    assert len(PYTHON) >= 3


@pytest.mark.parametrize(("name", "words"), [use[1:] for use in USES], ids=[use[0] for use in USES])
def test_commands_are_accepted(name: str, words: str) -> None:
    args = parse(name, shlex.split(words or ""))
    if name in ("pretrain", "finetune") and args.config:
        load(args.config, args.set, Config if name == "pretrain" else FinetuneConfig)


@pytest.mark.parametrize(
    ("path", "block"), PYTHON, ids=lambda value: getattr(value, "parent", Path("block")).name
)
def test_python_runs(
    path: Path,
    block: str,
    dataset: Dataset,
    saved_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the tests' dataset and a small model; an endless loop is left after its first
    iteration."""
    (tmp_path / "dataset").symlink_to(dataset.root.url)
    saved_model(
        "RUN/model",
        head={
            "task": "diagnosis",
            "kind": "multilabel",
            "classes": ["AF", "NSR"],
            "thresholds": [0.5, 0.5],
        },
    )
    (tmp_path / "KEYFILE").write_bytes(bytes(range(32)))
    (tmp_path / "KEYFILE").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    if (
        "omnilead.pretrain(" in block
    ):  # hours: tests/engine/training/test_trainings_from_python.py trains from Python
        assert load("w2v_cmsc_rlm", {"train.steps": 1000}).train.steps == 1000
        return
    block = block.replace("batch_crops=512", "batch_crops=16")
    lines = block.rstrip().splitlines()
    if any(line.startswith("for ") for line in lines):
        lines.append("    break")
    exec(compile("\n".join(lines), str(path), "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("packages", [True, False])
def test_bench_gpu_installs_only_what_python_cannot_import(packages: bool, tmp_path: Path) -> None:
    """Also without a registry: a python3 that has all packages is used as it is."""
    python = sys.executable
    if not packages:
        python = str(tmp_path / "python3")
        Path(python).write_text("#!/bin/sh\nexit 1\n")
        Path(python).chmod(0o755)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()
    command = ["make", "-n", "-f", str(ROOT / "Makefile"), "bench-gpu", f"PYTHON={python}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout
    used = python if packages else ".venv/bin/python"
    assert (
        f"{used} -m benchmarks.run suite --device cuda" in printed
        and f"{used} -m pytest -m gpu" in printed
    )
    assert ("pip install" in printed) == (not packages)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z]+)", (ROOT / "README.md").read_text())) <= targets
