"""Load user code where an option or a setting takes `file.py:Name`.

load_plugin("clinic.py:Csv")         # the class Csv; raises whatever the file raises
error_with_line(error)               # on one line, with the line of the file that raised it
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

# Modules by file and sha256 of its contents, so that a changed file is run again
_modules: dict[tuple[Path, str], ModuleType] = {}


def load_plugin(spec: str, importable: bool = False) -> Any:
    """Returns the object that `file.py:Name` or `module:Name` names. `importable`: the file's folder
    is added to sys.path, so that worker processes can import the file, too."""
    module, _, name = spec.rpartition(":")
    return getattr(
        _run_file(Path(module), importable)
        if module.endswith(".py")
        else importlib.import_module(module),
        name,
    )


def shadows_a_module(file_name: str) -> bool:
    """Returns True if a file of this name hides a standard or installed module from a Python that is
    started in the file's folder."""
    name = file_name.removesuffix(".py")
    # Python imports sitecustomize and usercustomize by itself when it starts
    if name in {*sys.stdlib_module_names, "omnilead", "sitecustomize", "usercustomize"}:
        return True
    # Other folders of sys.path do not count: the one that Python was started in may have the user's copy
    # of the file
    installed = [
        folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")
    ]
    return PathFinder.find_spec(name, installed) is not None


def plugin_code(kind: type) -> bytes:
    """Returns the contents of the file that defines a user's class, and of the files beside it that it
    imports. What the class does depends on all of them."""
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
    """Runs a file as a module and returns the module. If another module has its name, the new module gets
    a longer name, so that models with equal file names can coexist."""
    if not path.is_file():
        raise DataError(f"no such file {path}: check the path before the colon")
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
            # Unlike an import, exec leaves no __pycache__ in a model folder
            exec(compile(content, str(path), "exec"), module.__dict__)
        except BaseException:
            del sys.modules[module.__name__], _modules[key]
            raise
    return _modules[key]
