"""Every configuration's step on a GPU that is not there (fake_gpu.py): all of it on the device, and nothing waits for it."""

import json
from pathlib import Path

import pytest

from engine.config import CONFIGS
from tests.forks import started

PRETRAINED = sorted(path.stem for path in (CONFIGS / "pretrain").glob("*.yaml"))
STEPS = [f"pretrain {name} bf16" for name in PRETRAINED] + ["pretrain w2v_cmsc_rlm fp32"]
STEPS += [f"finetune {task} {precision}" for task in ("diagnosis", "identification") for precision in ("fp32", "bf16")]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    tmp = tmp_path_factory.mktemp("gpu")
    started(steps_on_a_fake_gpu, tmp, out=tmp / "out.txt").join()
    found: dict[str, str] = json.loads((tmp / "errors.json").read_text())
    return found


def steps_on_a_fake_gpu(tmp: Path) -> None:
    import fake_gpu

    fake_gpu.errors(CONFIGS, tmp / "errors.json")


def test_it_finds_what_it_must(errors: dict[str, str]) -> None:
    assert "DataDependentOutput" in errors.pop("wait")
    assert "cpu" in errors.pop("leave behind")
    assert sorted(errors) == sorted(STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_stays_on_the_device_and_does_not_wait_for_it(step: str, errors: dict[str, str]) -> None:
    assert errors[step] == ""
