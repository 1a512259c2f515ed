"""The wheel, installed without the repository: from an archive to a model for custom labels, beside
modules of the user's."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Everything is imported from the environment, and sys.path does not contain the repository
WHERE = """
import sys
from pathlib import Path
import omnilead.data_tools.dataset, omnilead.engine
from omnilead.engine.common import CONFIGS
from omnilead.engine.reproduce.paper import ReproductionScale, tables
places = [Path(module.__file__) for module in (omnilead, omnilead.data_tools, omnilead.engine)] + [CONFIGS]
assert all(place.is_relative_to(sys.prefix) for place in places), places
assert not any(Path(entry).is_relative_to(sys.argv[1]) and ".venv" not in entry for entry in sys.path), sys.path
assert len(tables()) == 4 and ReproductionScale.read("smoke").settings["pretrain"]["train.steps"] == 10
print(len(list(CONFIGS.rglob("*.yaml"))))
"""
TABLE = """
from omnilead.data_tools.dataset import Dataset
records = dict.fromkeys(Dataset.open("dataset").table(["record"])["record"].to_pylist())
open("my.csv", "w").writelines(["record,label\\n", *(f"{record},{'abc'[i % 3]}\\n" for i, record in enumerate(records))])
"""
TINY = (
    "train.steps=6 train.batch_crops=8 train.validate_every=0 train.peak_tflops=1 model.width=16 "
    "model.ffn=16 model.layers=1"
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not importlib.util.find_spec("hatchling"):
        pytest.skip("hatchling, which builds the wheel, is not installed")
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    venv.create(place / "venv", symlinks=True)
    python = str(place / "venv" / "bin" / "python")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
    ]
    subprocess.run(
        [*pip, "--no-deps", "--no-index", *map(str, place.glob("*.whl"))],
        check=True,
        capture_output=True,
    )
    site = sysconfig.get_path("purelib", vars={"base": str(place / "venv")})
    Path(site, "dependencies.pth").write_text(
        sysconfig.get_path("purelib")
    )  # the packages there, but not their .pth files
    return place / "venv"


@pytest.fixture(scope="module")
def omnilead(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in ("engine.py", "data_tools.py", "benchmarks.py"):  # modules of the user's
        (folder / name).write_text(f"raise SystemExit('imported {name} of the working folder')")
    (folder / "configs").mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1"
    }

    def run(*arguments: str, program: str = "omnilead") -> str:
        command = [str(environment / "bin" / program), *arguments]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


@pytest.mark.slow
def test_a_tour_without_the_repository(omnilead: Callable[..., str]) -> None:
    assert int(omnilead("-c", WHERE, str(ROOT), program="python")) == len(
        list((ROOT / "configs").rglob("*.yaml"))
    )
    assert "  pretrain " in omnilead("--help")
    omnilead("synth", "archive", "--patients", "30")
    omnilead("shard", "archive", "--out", "dataset", "--workers", "1", "--pretrain-sources", "all")
    assert "all checks passed" in omnilead(
        "verify", "dataset", "--archive", "archive", "--workers", "1"
    )
    settings = [
        word for setting in [*TINY.split(), "train.deepspeed=zero1"] for word in ("--set", setting)
    ]
    done = omnilead(
        "pretrain",
        "--config",
        "quickstart",
        "--data",
        "dataset",
        "--out",
        "RUN",
        *settings,
        "--profile",
        "1",
    )
    assert "aten::" in done and "done: RUN/model, RUN/report.html" in done
    tune = [
        "--start",
        "RUN",
        "--data",
        "dataset",
        "--labels",
        "my.csv",
        "--out",
        "OUT",
        "--set",
        "train.steps=4",
    ]
    omnilead("-c", TABLE, program="python")
    assert "my: multiclass" in omnilead("finetune", *tune, "--set", "train.peak_tflops=1")
    assert "auroc" in omnilead(
        "evaluate",
        "--model",
        "OUT",
        "--data",
        "dataset",
        "--labels",
        "my.csv",
        "--report",
        "page.html",
    )
    assert " predictions of my (" in omnilead(
        "predict", "--model", "OUT", "--data", "dataset", "--out", "predictions.csv"
    )
