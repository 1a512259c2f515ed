"""Every configuration's step on a GPU that is not there (fake_gpu.py): all of it on the device, and nothing waits for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import CONFIGS

ROOT = Path(__file__).parents[2]
PRETRAINED = sorted(path.stem for path in (CONFIGS / "pretrain").glob("*.yaml"))
STEPS = [f"pretrain {name} bf16" for name in PRETRAINED] + ["pretrain w2v_cmsc_rlm fp32"]
STEPS += [f"finetune {task} {precision}" for task in ("diagnosis", "identification") for precision in ("fp32", "bf16")]


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, str(Path(__file__).with_name("fake_gpu.py")), str(CONFIGS))
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]
    found: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])
    return found


def test_it_finds_what_it_must(errors: dict[str, str]) -> None:
    assert "DataDependentOutput" in errors.pop("wait")
    assert "cpu" in errors.pop("leave behind")
    assert sorted(errors) == sorted(STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_stays_on_the_device_and_does_not_wait_for_it(step: str, errors: dict[str, str]) -> None:
    assert errors[step] == ""
