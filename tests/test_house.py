"""The rules of the code base: names and import directions."""

import ast
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("data_tools", "engine")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in MODULES}


def dotted(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {dotted(path): path for path in MODULES}


def imports(path, late=True):
    """What a module imports; a name from a module may be a submodule. `late`: in functions too."""
    tree, found = TREES[path], set()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if id(node) in inside and not late:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("omnilead.") for name in found}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_no_module_shadows_the_standard_library(path):
    """A script in engine/ has engine/ first on sys.path: engine/queue.py would replace the standard
    queue."""
    assert path.stem not in sys.stdlib_module_names


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_each_module_says_what_it_is(path):
    assert ast.get_docstring(TREES[path])


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_only_one_module_prints(path):
    """data_tools.cli escapes what would control the terminal, because text may come from a file of
    anyone's."""
    calls = [node.func for node in ast.walk(TREES[path]) if isinstance(node, ast.Call)]
    prints = {"print", "sys.stdout.write", "sys.stderr.write", "tqdm.write"}
    assert dotted(path) == "data_tools.cli" or not prints & {ast.unparse(call) for call in calls}


def test_data_tools_know_nothing_of_torch_or_the_engine():
    ours = [name for name in NAMES if name.startswith("data_tools")]
    for name in ours:
        packages = {other.partition(".")[0] for other in imports(NAMES[name])}
        assert not packages & {"torch", "deepspeed", "engine", "nvidia"}, name
    ours.remove("data_tools.__main__")
    # Nor through a library
    probe = f"import sys, {', '.join(ours)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT).returncode == 0


def test_inference_does_without_what_only_training_needs():
    """torch's compiler alone takes two seconds to import."""
    probe = (
        "import sys, omnilead.engine.inference.commands; sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT).returncode == 0


def test_the_engine_imports_only_the_public_modules_of_data_tools():
    doors = {"data_tools", "data_tools.cli"}
    doors |= {"data_tools.constants", "data_tools.dataset", "data_tools.spreadsheet"}
    resampling = {"data_tools.errors", "data_tools.resampling"}
    in_memory = resampling | {"data_tools.prepare", "data_tools.record"}  # ECGs in memory
    allowed_more = {
        # Records straight from files
        "engine.inference.inputs": {
            "data_tools.sources",
            "data_tools.hospital.files",
            "data_tools.npz",
        },
        # file.py:Name in settings; files written whole; the names of the leads
        "engine.common": {"data_tools.plugins", "data_tools.storage", "data_tools.constants"},
        "engine.reproduce.jobs": {"data_tools.cluster"},  # jobs on a Dask cluster
        "engine.inference.trained_model": in_memory,
        "engine.report.charts": {"data_tools.plots"},  # ECGs on paper
        "engine.report.why": {"data_tools.plots"},
        "engine.model.input": resampling,
        "engine.inference.mean_beat": resampling,
        "engine.inference.readout": resampling,
        "engine.tasks.labels": {"data_tools.record_tables", "data_tools.errors"},
        "engine.training.bucket": {"data_tools.storage", "data_tools.errors"},  # a run on s3://
        "engine.status": {"data_tools.storage"},
    }
    for name, path in NAMES.items():
        if name.startswith("engine"):
            theirs = {one for one in imports(path) & set(NAMES) if one.startswith("data_tools")}
            assert theirs <= doors | allowed_more.get(name, set()), name


def test_modules_do_not_import_each_other():
    """At import time; a package's __init__ may import its own modules, and they only that."""
    edges = {}
    for name, path in NAMES.items():
        others = imports(path, late=False) & set(NAMES) - {name}
        edges[name] = {other for other in others if not name.startswith(f"{other}.")}
    TopologicalSorter(edges).prepare()


def apart(one, other):
    """Whether neither of two folders is the other or in it."""
    return not f"{one}/".startswith(f"{other}/") and not f"{other}/".startswith(f"{one}/")


def test_folders_do_not_import_each_other():
    """Imports inside functions count too. Each program directly in engine/ counts as a folder of
    its own, above the others."""
    folder = {name: str(path.parent.relative_to(ROOT)) for name, path in NAMES.items()}
    folder |= {name: name for name, place in folder.items() if place == "engine"}
    # Fine-tuning stands above inference and evaluation, the labels and kinds of tasks below them;
    # so do the metrics, by which fine-tuning chooses its best step.
    folder["engine.evaluation.metrics"] = "metrics"
    folder |= dict.fromkeys(("engine.tasks.finetuning", "engine.tasks.start"), "fine-tuning")
    # What a head is given, in fine-tuning and afterwards
    folder |= dict.fromkeys(("engine.inference.readout", "engine.inference.mean_beat"), "readouts")
    edges = {place: set() for place in folder.values()}
    for name, path in NAMES.items():
        here = folder[name]
        others = {folder[other] for other in imports(path) & set(NAMES)} - {"engine"}
        edges[here] |= {there for there in others if apart(here, there)}
    TopologicalSorter(edges).prepare()


ROOMS = {  # what the core never imports, so that each can be deleted alone
    *("data_tools.hospital", "data_tools.labels", "data_tools.synthetic", "data_tools.plots"),
    *("engine.inference", "engine.tasks", "engine.evaluation"),
    *("engine.report", "engine.interop", "engine.reproduce"),
}


def test_the_core_imports_no_room():
    commands = {dotted(path) for path in (ROOT / "engine").glob("*.py")}
    commands = commands - {"engine.common", "engine.config"} | {"data_tools.__main__"}
    inside = {name for name in NAMES for room in ROOMS if f"{name}.".startswith(f"{room}.")}
    assert len(inside) > len(ROOMS)
    for name in set(NAMES) - commands - inside:
        assert not imports(NAMES[name]) & inside, name


# In a program of its own, the rooms cannot be imported, as if their folders were deleted
WITHOUT_ROOMS = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(",")))
from omnilead.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
def test_sharding_and_pretraining_do_without_any_room(archive, tmp_path):
    """What a room would have added is left out, with a note."""
    rooms = ",".join(f"omnilead.{room}" for room in sorted(ROOMS))
    program = [sys.executable, "-c", WITHOUT_ROOMS, rooms]
    dataset, run = str(tmp_path / "dataset"), tmp_path / "run"
    steps = ["train.steps=2", "train.batch_crops=8", "train.validate_every=0"]
    said = ""
    for words in (
        ["shard", str(archive), "--out", dataset],
        ["pretrain", "--data", dataset, "--out", str(run), "--set", *steps],
    ):
        done = subprocess.run([*program, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said += done.stderr
    for what in ("files of ECG carts", "a summary", "a model card", "RUN/report.html"):
        assert f"note: without {what}, as there is no omnilead." in said
    assert (run / "model" / "model.safetensors").is_file()


def test_a_class_name_means_one_thing():
    classes = [node for tree in TREES.values() for node in tree.body]
    names = Counter(node.name for node in classes if isinstance(node, ast.ClassDef))
    assert [name for name, n in names.items() if n > 1 and not name.startswith("_")] == []
