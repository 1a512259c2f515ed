"""Code of one's own, where an option or a setting takes `file.py:Name`.

plugin("clinic.py:Csv")                   # the class Csv; raises whatever the file raises
blame(error)                              # of it: one line, which names the line of the file
"""

import hashlib
import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from data_tools.errors import DataError, one_line

_modules: dict[tuple[Path, str], ModuleType] = {}  # by file and sha256: a file that was changed is run again


def plugin(spec: str, importable: bool = False) -> Any:
    """What `file.py:Name` or `module:Name` names. `importable`: worker processes must find the file's module, too."""
    module, _, name = spec.rpartition(":")
    return getattr(_run(Path(module), importable) if module.endswith(".py") else importlib.import_module(module), name)


def blame(error: BaseException) -> str:
    if isinstance(error, DataError):
        return str(error)
    files = {str(path) for path, _ in _modules}
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    place = f" ({Path(lines[-1].filename).name}, line {lines[-1].lineno})" if lines else ""
    return one_line(f"{type(error).__name__}: {error}", 300 - len(place)) + place


def _run(path: Path, importable: bool) -> ModuleType:
    """The module of a file. Under another name if its own is taken, so that models with files of one name can be compared."""
    if not path.is_file():
        raise DataError(f"no such file {path}")
    path, content = path.resolve(), path.read_bytes()
    key = path, hashlib.sha256(content).hexdigest()
    if key not in _modules:
        other = getattr(sys.modules.get(path.stem), "__file__", "") != str(path) and path.stem in sys.modules
        taken = other or path.stem in sys.stdlib_module_names
        module = ModuleType(f"{path.stem}_{key[1][:12]}" if taken else path.stem)
        module.__file__ = str(path)
        if importable and str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        _modules[key] = sys.modules[module.__name__] = module
        try:
            exec(compile(content, str(path), "exec"), module.__dict__)  # no __pycache__ is left in a model folder
        except BaseException:
            del sys.modules[module.__name__], _modules[key]
            raise
    return _modules[key]
