"""Load user code where an option or a setting takes `file.py:Name`.

plugin("clinic.py:Csv")                   # the class Csv; raises whatever the file raises
blame(error)                              # on one line, with the line of the file that raised it
"""

import ast
import hashlib
import importlib
import sys
import traceback
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import DataError, one_line

_modules: dict[
    tuple[Path, str], ModuleType
] = {}  # by file and sha256, so that a changed file is run again


def load_plugin(spec: str, importable: bool = False) -> Any:
    """The object named by `file.py:Name` or `module:Name`. `importable`: worker processes must be
    able to import it, too."""
    module, _, name = spec.rpartition(":")
    return getattr(
        _run_file(Path(module), importable)
        if module.endswith(".py")
        else importlib.import_module(module),
        name,
    )


def shadows_a_module(file_name: str) -> bool:
    """True if Python, started in the folder of this file, would import it in place of a module of its own
    or of an installed one."""
    name = file_name.removesuffix(".py")
    # Python imports the last two by itself when it starts
    if name in {*sys.stdlib_module_names, "omnilead", "sitecustomize", "usercustomize"}:
        return True
    # Not all of sys.path: the folder that Python was started in may have the user's own copy of the file
    installed = [
        folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")
    ]
    return PathFinder.find_spec(name, installed) is not None


def plugin_code(kind: type) -> bytes:
    """The file that defines a class of the user's, and the files beside it that it imports: what the class
    does depends on all of it."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    codes: dict[Path, bytes] = {}
    waiting = [Path(file)] if file else []
    while waiting:
        path = waiting.pop()
        if path in codes or not path.is_file():
            continue
        codes[path] = path.read_bytes()
        names: set[str] = set()
        for node in ast.walk(ast.parse(codes[path])):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
        waiting += [
            path.with_name(f"{name.partition('.')[0]}.py") for name in sorted(names) if name
        ]
    return b"\0".join(codes[path] for path in sorted(codes))


def error_with_line(error: BaseException) -> str:
    if isinstance(error, DataError):
        return str(error)
    files = {str(path) for path, _ in _modules}
    lines = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files
    ]
    place = f" ({Path(lines[-1].filename).name}, line {lines[-1].lineno})" if lines else ""
    return one_line(f"{type(error).__name__}: {error}", 300 - len(place)) + place


def _run_file(path: Path, importable: bool) -> ModuleType:
    """Run a file as a module. If its name is taken, it gets another one, so that models with equal
    file names can coexist."""
    if not path.is_file():
        raise DataError(f"no such file {path}")
    path, content = path.resolve(), path.read_bytes()
    key = path, hashlib.sha256(content).hexdigest()
    if key not in _modules:
        other = (
            getattr(sys.modules.get(path.stem), "__file__", "") != str(path)
            and path.stem in sys.modules
        )
        taken = other or path.stem in sys.stdlib_module_names
        module = ModuleType(f"{path.stem}_{key[1][:12]}" if taken else path.stem)
        module.__file__ = str(path)
        if importable and str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        _modules[key] = sys.modules[module.__name__] = module
        try:
            exec(
                compile(content, str(path), "exec"), module.__dict__
            )  # leaves no __pycache__ in a model folder
        except BaseException:
            del sys.modules[module.__name__], _modules[key]
            raise
    return _modules[key]
