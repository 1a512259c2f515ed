"""The rules of the code base: where a module lies, and what it may import."""

import ast
import json
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WINGS = ("data_tools", "engine", "downstream")
MODULES = sorted(path for wing in WINGS for path in (ROOT / wing).rglob("*.py"))
# From the lowest: a room imports its own modules and those of rooms before it, nothing else. The
# doors, modules directly in a wing that a user starts, come last.
ROOMS = {
    "data_tools": [
        *("io", "ecg", "dataset", "sources", "sharding"),
        *("published_labels", "plots", "synthetic", "doors"),
    ],
    "engine": ["settings", "data", "model", "training", "doors"],
    "downstream": [
        *("tasks", "inference", "finetuning", "evaluation"),
        *("interop", "reports", "reproduce", "doors"),
    ],
}
# What a wing uses of those before it. `inference` reads records straight from files, and reports draw
# ECGs on paper
BORDER = {
    "engine": {"data_tools": {"io", "ecg", "dataset"}},
    "downstream": {
        "data_tools": {"io", "ecg", "dataset"},
        "engine": {"settings", "data", "model", "training", "doors"},
    },
    "downstream.inference": {"data_tools": {"sources"}},
    "downstream.reports": {"data_tools": {"plots"}},
}


def dotted(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {dotted(path): path for path in MODULES}


@cache
def tree(path):
    return ast.parse(path.read_text())


def room(name):
    """The wing of a module, and its room."""
    wing, *rest = name.split(".")
    return wing, rest[0] if rest and rest[0] in ROOMS[wing] else "doors"


def imports(path, late=True):
    """What a module imports; a name from a module may be a submodule. `late`: in functions too."""
    found = set()
    functions = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    package = dotted(path).split(".")
    if path.stem != "__init__":
        package.pop()
    for node in ast.walk(tree(path)):
        if id(node) in inside and not late:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("omnilead.") for name in found}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_no_module_shadows_the_standard_library(path):
    """A script in engine/ has engine/ first on sys.path: engine/queue.py would replace the standard
    queue."""
    assert path.stem not in sys.stdlib_module_names


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_each_module_says_what_it_is(path):
    assert ast.get_docstring(tree(path))


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_only_one_module_prints(path):
    """data_tools.io.terminal escapes what would control the terminal, because text may come from a
    file of anyone's."""
    calls = [node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    prints = {"print", "sys.stdout.write", "sys.stderr.write", "tqdm.write"}
    is_terminal = dotted(path) == "data_tools.io.terminal"
    assert is_terminal or not prints & {ast.unparse(call) for call in calls}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_an_absolute_import_crosses_a_border(path):
    """Inside a wing imports are relative. A program that is started as a file has no package to be
    relative to."""
    wing, name = room(dotted(path))
    if name != "doors" and path.stem != "__main__":
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert not f"{node.module}.".startswith(f"omnilead.{wing}."), ast.unparse(node)


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_room_imports_only_rooms_before_it(path):
    """Imports inside functions count too."""
    (wing, mine), name = room(dotted(path)), dotted(path)
    order = ROOMS[wing]
    for other in imports(path) & set(NAMES) - set(WINGS):
        there, theirs = room(other)
        if there == wing:
            assert order.index(theirs) <= order.index(mine), other
        else:
            allowed = set()
            for start, wings in BORDER.items():
                if f"{name}.".startswith(f"{start}."):
                    allowed |= wings.get(there, set())
            assert theirs in allowed, other


def test_data_tools_know_nothing_of_torch():
    ours = [name for name in NAMES if name.startswith("data_tools")]
    for name in ours:
        packages = {other.partition(".")[0] for other in imports(NAMES[name])}
        assert not packages & {"torch", "deepspeed", "nvidia"}, name
    modules = [f"omnilead.{name}" for name in ours if not name.endswith("__main__")]
    # Nor through a library
    probe = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT).returncode == 0


def test_inference_does_without_what_only_training_needs():
    """torch's compiler alone takes two seconds to import."""
    probe = "import sys, omnilead.downstream.inference.commands; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT).returncode == 0


def test_modules_do_not_import_each_other():
    """At import time; a package's __init__ may import its own modules, and they only that."""
    edges = {}
    for name, path in NAMES.items():
        others = imports(path, late=False) & set(NAMES) - {name}
        edges[name] = {other for other in others if not name.startswith(f"{other}.")}
    TopologicalSorter(edges).prepare()


def test_folders_do_not_import_each_other():
    """Nor in functions, nor a folder in a room the folder around it."""
    edges = {}
    for path in MODULES:
        others = {NAMES[name].parent for name in imports(path) & set(NAMES)}
        edges.setdefault(path.parent, set()).update(others - {path.parent})
    TopologicalSorter(edges).prepare()


# A program of its own that runs commands; downstream cannot be found, as if its folder were deleted
WITHOUT_DOWNSTREAM = """
import importlib.util, json, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "omnilead.downstream" else find(name, *rest)
sys.modules["omnilead.downstream"] = None
from omnilead.__main__ import main
sys.exit(any(main(words) for words in json.loads(sys.argv[1])))
"""


@pytest.mark.slow
def test_downstream_can_be_deleted(archive, tmp_path):
    """Archives are still sharded and verified; a run is trained, resumed, exported and looked at."""
    dataset, run = str(tmp_path / "dataset"), tmp_path / "run"
    settings = ["train.steps=4", "train.validate_every=0", "train.save_every_steps=2"]
    train = ["pretrain", "--data", dataset, "--out", str(run), "--set", "train.batch_crops=8"]
    train += settings

    def run_commands(*commands):
        program = [sys.executable, "-c", WITHOUT_DOWNSTREAM, json.dumps(commands)]
        done = subprocess.run(program, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    said = run_commands(["shard", str(archive), "--out", dataset], ["verify", dataset], train)
    # as if it had been killed after step 2
    shutil.rmtree(run / "checkpoints" / "step-4")
    shutil.rmtree(run / "model")
    said += run_commands(train, ["pretrain", "--export", str(run)], ["status", str(run)])
    assert "note: without omnilead.downstream a run gets no model card and no report.html" in said
    assert (run / "model" / "model.safetensors").is_file() and not (run / "report.html").exists()


def test_a_class_name_means_one_thing():
    classes = [node for path in MODULES for node in tree(path).body]
    names = Counter(node.name for node in classes if isinstance(node, ast.ClassDef))
    assert [name for name, n in names.items() if n > 1 and not name.startswith("_")] == []


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda p: p.stem)
def test_tests_can_be_collected_without_a_cluster(path):
    """One that cannot ends the collection: `pytest -m gpu` would run nothing."""
    extras = {"distributed", "s3fs", "huggingface_hub", "onnxruntime", "lightgbm"}
    at_top = [node for node in tree(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in at_top
    ]
    assert not extras & {name.partition(".")[0] for name in names if name}
