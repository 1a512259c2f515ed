"""The commands in the READMEs are accepted, and their Python code runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from omnilead.__main__ import COMMANDS
from omnilead.engine.tasks.config import FinetuneConfig
from omnilead.engine.training.config import Config, load
from tests.parsers import parse

ROOT = Path(__file__).parents[1]
PAGES = [page for page in sorted(ROOT.glob("docs/*.md")) if page.stem != "commands"]  # generated
READMES = [ROOT / "README.md", *sorted(ROOT.glob("*/README.md")), *PAGES]
TEXT = "\n".join(path.read_text() for path in READMES)
# omnilead NAME, python -m omnilead NAME, and, in one process or under a launcher, the module
# engine.NAME or engine/NAME.py
TYPED = re.compile(
    r"^ *(?:omnilead +|python -m omnilead +|(?:python|deepspeed|torchrun) "
    r".*?engine[./])(\w+)(?:\.py)?((?: [^#\n]*)?)",
    re.MULTILINE,
)
TYPED_LINES = TYPED.findall(TEXT.replace("\\\n", " ").replace("$B", "s3://bucket"))
USES = [use for use in TYPED_LINES if use[0] in COMMANDS and "..." not in use[1]]
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_readmes_contain_commands_and_python():
    assert len(USES) >= 20 and {"shard", "pretrain", "evaluate"} <= {name for name, _ in USES}
    assert len(PYTHON) >= 3


@pytest.mark.parametrize(("name", "words"), USES)
def test_commands_are_accepted(name, words, monkeypatch):
    if "--why " in words:  # as omnilead.__main__ does
        monkeypatch.setitem(COMMANDS, "show", ("omnilead.engine.extras.reports.why", ""))
    args = parse(name, shlex.split(words))
    if name in ("pretrain", "finetune") and args.config:
        load(args.config, args.set, Config if name == "pretrain" else FinetuneConfig)


@pytest.mark.parametrize("block", PYTHON)
def test_python_runs(
    block,
    dataset,
    saved_model,
    tmp_path,
    monkeypatch,
):
    """With the tests' dataset and a small model; an endless loop is left after its first
    iteration."""
    monkeypatch.chdir(tmp_path)
    Path("dataset").symlink_to(dataset.root.url)
    head = {"task": "diagnosis", "kind": "multilabel", "classes": ["AF", "NSR"]}
    saved_model("RUN/model", head=head | {"thresholds": [0.5, 0.5]})
    Path("KEYFILE").write_bytes(bytes(range(32)))
    Path("KEYFILE").chmod(0o600)
    # Hours: tests/engine/training/test_trainings_from_python.py trains from Python
    if "omnilead.pretrain(" in block:
        assert load("w2v_cmsc_rlm", {"train.steps": 1000}).train.steps == 1000
        return
    block = block.replace("batch_crops=512", "batch_crops=16")
    if re.search("^for ", block, re.MULTILINE):
        block += "    break\n"
    exec(compile(block, "README", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("packages", [True, False])
def test_bench_gpu_installs_only_what_python_cannot_import(packages, tmp_path):
    """Also without a registry: a python3 that has all packages is used as it is."""
    python, used = sys.executable, sys.executable
    if not packages:
        python, used = str(tmp_path / "python3"), ".venv/bin/python"
        Path(python).write_text("#!/bin/sh\nexit 1\n")
        Path(python).chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    command = ["make", "-n", "-f", ROOT / "Makefile", "bench-gpu", f"PYTHON={python}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert f"{used} -m benchmarks.run suite --device cuda" in printed
    (tests,) = re.findall(rf"{used} -m pytest -m gpu .*", printed)
    assert "-W default" in tests  # a warning of a library fails no test there
    assert ("pip install" in printed) == (not packages)


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z]+)", (ROOT / "README.md").read_text())) <= targets
