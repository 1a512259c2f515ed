"""The rules of the code base: names, import directions, module sizes. See README, "Read these eight
files first"."""

import ast
import itertools
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("data_tools", "engine")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether at import time) for each import statement; submodules imported from a
    package count as modules."""
    tree = ast.parse(path.read_text())
    late = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef)
        for node in ast.walk(scope)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (alias.name.removeprefix("omnilead."), id(node) not in late) for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            package = str(node.module).removeprefix("omnilead").removeprefix(".")
            yield package, id(node) not in late
            inside = ROOT / package.replace(".", "/")
            submodules = [
                alias.name
                for alias in node.names
                if (inside / f"{alias.name}.py").exists() or (inside / alias.name).is_dir()
            ]
            yield from (
                (f"{package}.{name}".removeprefix("."), id(node) not in late) for name in submodules
            )


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_no_module_shadows_the_standard_library(path: Path) -> None:
    """A script in engine/ has engine/ first on sys.path: engine/queue.py would replace the standard
    queue."""
    stem = path.stem
    assert stem not in sys.stdlib_module_names or stem in ("__init__", "__main__")


# What a reader must hold in mind. Size counts in tokens, because lines can be packed.
TOKENS_A_LINE = 13.6  # of a module: names, numbers, strings and operators on a line of code
NODES = 420  # of a function's syntax tree
NAMES = 24  # that a function assigns, arguments included
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def tokens_a_line(path: Path, tree: ast.Module) -> float:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens, lines = 0, set()
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in LAYOUT or token.type == tokenize.COMMENT:
                continue
            if token.start[0] not in docstrings:
                tokens += 1
                lines.update(range(token.start[0], token.end[0] + 1))
    return tokens / len(lines) if len(lines) >= 20 else 0


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_modules_stay_readable(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path.name} has no docstring"
    assert tokens_a_line(path, tree) <= TOKENS_A_LINE, f"{path.name}: one thing a line"
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            inside = list(ast.walk(function))
            arguments = {node.arg for node in inside if isinstance(node, ast.arg)}
            stored = (node for node in inside if isinstance(node, ast.Name))
            assigned = {node.id for node in stored if isinstance(node.ctx, ast.Store)}
            assert len(inside) <= NODES, f"{function.name}: too long: name its paragraphs"
            assert len(arguments | assigned) <= NAMES, f"{function.name}: has too many names"


def test_data_tools_know_nothing_of_torch_or_the_engine() -> None:
    named = {
        (dotted(p), n.split(".")[0])
        for p in MODULES
        if dotted(p).startswith("data_tools")
        for n, _ in imports(p)
    }
    assert not {
        (module, name)
        for module, name in named
        if name in {"torch", "deepspeed", "engine", "nvidia"}
    }
    modules = [
        dotted(path)
        for path in MODULES
        if dotted(path).startswith("data_tools") and path.stem != "__main__"
    ]
    probe = (
        f"import sys, importlib; [importlib.import_module(m) for m in {modules}]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=False).returncode == 0
    )  # nor through a library


def test_the_engine_imports_only_the_public_modules_of_data_tools() -> None:
    doors = {"data_tools", "data_tools.dataset", "data_tools.cli"}
    engine = {
        (dotted(p), n) for p in MODULES if dotted(p).startswith("engine") for n, _ in imports(p)
    }
    files = ("data_tools.sources", "data_tools.hospital.files")  # records straight from files
    allowed_more = {("engine.inference.inputs", name) for name in files}
    allowed_more |= {("engine.common", "data_tools.plugins")}  # file.py:Name in settings
    allowed_more |= {("engine.common", "data_tools.storage")}  # files written whole
    allowed_more |= {("engine.reproduce.run", "data_tools.cluster")}  # jobs on a Dask cluster
    in_memory = ("data_tools.errors", "data_tools.prepare", "data_tools.record")  # ECGs in memory
    allowed_more |= {
        (module, name)
        for name in in_memory
        for module in ("engine.inference.trained_model", "engine.model.input")
    }
    allowed_more |= {("engine.evaluation.mean_beat", "data_tools.prepare")}
    trespasses = {
        (m, n) for m, n in engine if n.startswith("data_tools") and n not in doors
    } - allowed_more
    assert not trespasses


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_only_one_module_prints(path: Path) -> None:
    """data_tools.cli escapes what would control the terminal, because text may come from a file of
    anyone's."""
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    prints = {"print", "sys.stdout.write", "sys.stderr.write", "tqdm.write"} & set(calls)
    assert not prints or dotted(path) == "data_tools.cli"


def test_modules_do_not_import_each_other() -> None:
    graph = {
        dotted(p): {n for n, at_import in imports(p) if at_import and n.split(".")[0] in PACKAGES}
        for p in MODULES
    }
    names = set(graph)
    packages = {name for name in names if any(other.startswith(name + ".") for other in names)}
    edges = {
        module: {
            target
            for target in targets
            if target in names and target != module and target not in packages
        }
        | {target for target in targets & packages if not module.startswith(target + ".")}
        for module, targets in graph.items()
    }
    for package in packages:  # a package's __init__ may import its own modules
        edges[package] = {
            target for target in graph[package] if target in names and target != package
        }
    try:
        list(TopologicalSorter(edges).static_order())
    except CycleError as error:
        pytest.fail(f"imports run in a circle: {' -> '.join(error.args[1])}")


def test_folders_do_not_import_each_other() -> None:
    """Imports inside functions count too. Each program directly in engine/ counts as a folder of
    its own, above the others."""
    folder = {
        dotted(p): dotted(p) if p.parent.name == "engine" else str(p.parent.relative_to(ROOT))
        for p in MODULES
    }
    # Fine-tuning stands above inference and evaluation, the labels and kinds of tasks below them;
    # so do the metrics, by which fine-tuning chooses its best step.
    folder["engine.evaluation.metrics"] = "metrics"
    folder |= dict.fromkeys(("engine.tasks.finetuning", "engine.tasks.recipe"), "fine-tuning")
    edges: dict[str, set[str]] = {name: set() for name in folder.values() if name != "engine"}
    for path in MODULES:
        here = folder[dotted(path)]
        there = {folder[name] for name, _ in imports(path) if name in folder} - {here, "engine"}
        edges.get(here, set()).update(
            name
            for name in there
            if not name.startswith(f"{here}/") and not here.startswith(f"{name}/")
        )
    try:
        list(TopologicalSorter(edges).static_order())
    except CycleError as error:
        pytest.fail(f"folders import each other: {' -> '.join(error.args[1])}")


ROOMS = {  # what the core never imports, so that a room can be read, changed or moved alone
    *("data_tools/hospital", "data_tools/labels", "data_tools/synthetic", "data_tools/plots.py"),
    *("engine/inference", "engine/tasks", "engine/evaluation"),
    *("engine/report", "engine/interop", "engine/reproduce"),
}


def room(path: Path) -> str:
    """The room that a module is in; "" if it is in the core or is a command."""
    place = path.relative_to(ROOT).as_posix()
    return next((one for one in ROOMS if place == one or place.startswith(f"{one}/")), "")


def test_the_core_imports_no_room() -> None:
    commands = set((ROOT / "engine").glob("*.py"))
    commands -= {ROOT / "engine" / "common.py", ROOT / "engine" / "config.py"}
    commands.add(ROOT / "data_tools" / "__main__.py")
    room_of = {dotted(path): room(path) for path in MODULES}
    trespasses = []
    for path in MODULES:
        if path in commands or room(path):
            continue
        trespasses += [(dotted(path), name) for name, _ in imports(path) if room_of.get(name)]
    assert any(room_of.values()) and not trespasses


def test_a_class_name_means_one_thing() -> None:
    classes = [
        (node.name, dotted(p))
        for p in MODULES
        for node in ast.parse(p.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    public = sorted((name, module) for name, module in classes if not name.startswith("_"))
    assert not [(a, b) for a, b in itertools.pairwise(public) if a[0] == b[0]]
