"""The source distribution and the wheel that is built from it, installed without the repository: from
an archive to a model for custom labels, beside modules of the user's."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Everything is imported from the environment, and sys.path does not contain the repository
WHERE = """
import sys
from pathlib import Path
import omnilead.data_tools.dataset, omnilead.engine
from omnilead.engine.settings.files import CONFIGS
from omnilead.downstream.reproduce.paper import ReproductionScale, paper_tables
places = [Path(module.__file__) for module in (omnilead, omnilead.data_tools, omnilead.engine)] + [CONFIGS]
assert all(place.is_relative_to(sys.prefix) for place in places), places
assert not any(Path(entry).is_relative_to(sys.argv[1]) and ".venv" not in entry for entry in sys.path), sys.path
assert len(paper_tables()) == 4 and ReproductionScale.read("smoke").settings["pretrain"]["train.steps"] == 10
print(len(list(CONFIGS.rglob("*.yaml"))))
"""
# Commands, one after the other, in one process: each would import PyTorch again
TOUR = """
import sys
from omnilead.__main__ import main
from omnilead.data_tools.dataset import Dataset
for line in sys.argv[1:]:
    assert not main(line.split()), line
    if line.startswith("shard"):
        records = dict.fromkeys(Dataset.open("dataset").column("record"))
        rows = [f"{record},{'abc'[i % 3]}\\n" for i, record in enumerate(records)]
        open("my.csv", "w").writelines(["record,label\\n", *rows])
"""
TINY = (
    "--set train.steps=6 --set train.batch_crops=8 --set train.validate_every=0 "
    "--set model.width=16 --set model.ffn=16 --set model.layers=1 --set train.deepspeed=zero1"
)
ON_CPU = "--set train.peak_tflops=1"


EDITABLE = "import hatchling.build, sys; hatchling.build.build_editable(sys.argv[1])"


def built(kind, source, place):
    """The wheel or sdist that is made in a folder: what `python -m build` makes, without a network."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", place]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (made,) = place.iterdir()
    return made


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The source distribution, unpacked."""
    if not importlib.util.find_spec("hatchling"):
        pytest.skip("hatchling, which builds the wheel, is not installed")
    place = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built("sdist", ROOT, place / "packed")) as packed:
        packed.extractall(place, filter="data")
    (folder,) = place.glob("omnilead-*")
    return folder


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory):
    """Made from the source distribution."""
    return built("wheel", unpacked, tmp_path_factory.mktemp("wheel") / "made")


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    place = tmp_path_factory.mktemp("environment")
    venv.create(place / "venv", symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", place / "venv" / "bin" / "python"]
    options = "install --quiet --disable-pip-version-check --no-compile --no-deps --no-index"
    subprocess.run([*pip, *options.split(), wheel], check=True, capture_output=True)
    site = sysconfig.get_path("purelib", vars={"base": str(place / "venv")})
    # The packages there, but not their .pth files
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return place / "venv"


def files(wheel):
    with zipfile.ZipFile(wheel) as packed:
        return {file.filename: file.CRC for file in packed.infolist()}


def test_the_wheel_from_the_source_distribution_is_that_of_the_repository(wheel, tmp_path):
    ours = files(built("wheel", ROOT, tmp_path / "made"))
    assert files(wheel) == ours
    tracked = [path for name in ("engine", "data_tools") for path in (ROOT / name).rglob("*.py")]
    assert {f"omnilead/{path.relative_to(ROOT)}" for path in tracked} <= set(ours)


def test_the_unpacked_source_distribution_runs_as_the_repository_does(unpacked, tmp_path):
    """It has no links to engine, data_tools and configs."""
    env = os.environ | {"PYTHONPATH": str(unpacked)}
    for words in ("-m omnilead synth made --patients 1", f"{unpacked}/engine/pretrain.py --help"):
        command = [sys.executable, *words.split()]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]


def test_an_editable_install_points_to_the_repository(tmp_path):
    pytest.importorskip("hatchling")
    subprocess.run([sys.executable, "-c", EDITABLE, tmp_path], cwd=ROOT, check=True)
    (made,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as packed:
        assert packed.read("_omnilead.pth").decode() == str(ROOT)


@pytest.mark.slow
def test_a_tour_without_the_repository(environment, tmp_path):
    for name in ("engine.py", "data_tools.py", "benchmarks.py"):  # modules of the user's
        (tmp_path / name).write_text(f"raise SystemExit('imported {name} of the working folder')")
    (tmp_path / "configs").mkdir()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)

    def run(program, *words):
        command = [environment / "bin" / program, *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    configs = list((ROOT / "configs").rglob("*.yaml"))
    assert int(run("python", "-c", WHERE, str(ROOT))) == len(configs)
    assert "  pretrain " in run("omnilead", "--help")
    run("omnilead", "synth", "archive", "--patients", "30")
    pretrain = f"pretrain --config quickstart --data dataset --out RUN --profile 1 {TINY}"
    finetune = "finetune --start RUN --data dataset --labels my.csv --out OUT --set train.steps=4"
    said = run(
        "python",
        "-c",
        TOUR,
        "shard archive --out dataset --workers 1 --pretrain-sources all",
        "verify dataset --archive archive --workers 1",
        f"{pretrain} {ON_CPU}",
        f"{finetune} {ON_CPU}",
        "evaluate --model OUT --data dataset --labels my.csv --report page.html",
        "predict --model OUT --data dataset --out predictions.csv",
    )
    for words in (
        "all checks passed",
        "aten::",
        "done: RUN/model, RUN/report.html",
        "my: the table looks like multiclass",
        "auroc",
        " predictions of my (",
    ):
        assert words in said
