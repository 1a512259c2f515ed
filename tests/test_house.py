"""The rules of the code base: where a module lies, and what it may import."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WINGS = ("data_tools", "engine")
MODULES = sorted(path for wing in WINGS for path in (ROOT / wing).rglob("*.py"))
# From the lowest: a room imports its own modules and those of rooms before it, nothing else. The
# doors, modules directly in a wing that a user starts, come last.
ROOMS = {
    "data_tools": ["io", "ecg", "dataset", "sources", "build", "extras", "doors"],
    "engine": [
        *("settings", "data", "model", "training"),
        *("tasks", "inference", "finetuning", "evaluation", "extras", "doors"),
    ],
}
# What the engine uses of data_tools, besides io, ecg and dataset
BORDER = {
    "engine.inference.inputs": {"sources", "extras"},  # records straight from files
    "engine.extras": {"extras"},  # ECGs on paper
}
# What sharding and pre-training do without, so that each can be deleted
SPARE = [
    *("data_tools.extras.hospital", "data_tools.extras.labels"),
    *("data_tools.extras.synthetic", "data_tools.extras.plots"),
    *("engine.tasks", "engine.inference", "engine.finetuning", "engine.evaluation"),
    *(f"engine.extras.{name}" for name in ("interop", "reports", "reproduce")),
]


def dotted(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {dotted(path): path for path in MODULES}


@cache
def tree(path):
    return ast.parse(path.read_text())


def room(name):
    """The wing of a module, and its room."""
    wing, *rest = name.split(".")
    return wing, rest[0] if rest and (ROOT / wing / rest[0]).is_dir() else "doors"


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
    for other in imports(path) & set(NAMES) - {"engine", "data_tools"}:
        there, theirs = room(other)
        if there == wing:
            assert order.index(theirs) <= order.index(mine), other
        else:
            allowed = {"io", "ecg", "dataset"}
            for start, more in BORDER.items():
                allowed |= more if name.startswith(start) else set()
            assert (wing, there) == ("engine", "data_tools") and theirs in allowed, other


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
    probe = (
        "import sys, omnilead.engine.inference.commands; sys.exit('torch._dynamo' in sys.modules)"
    )
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


# In a program of its own, the spare rooms cannot be imported, as if their folders were deleted
WITHOUT_ROOMS = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(",")))
from omnilead.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
def test_sharding_and_pretraining_do_without_any_spare_room(archive, tmp_path):
    """What a room would have added is left out, with a note."""
    rooms = ",".join(f"omnilead.{name}" for name in sorted(SPARE))
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
    classes = [node for path in MODULES for node in tree(path).body]
    names = Counter(node.name for node in classes if isinstance(node, ast.ClassDef))
    assert [name for name, n in names.items() if n > 1 and not name.startswith("_")] == []
