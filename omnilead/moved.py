"""Old names of modules that docs named or that plug-ins import. They keep working in this release,
with a DeprecationWarning; then this file goes."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {  # where what they held is now
    "omnilead.data_tools.errors": ["omnilead.data_tools.io.errors"],
    "omnilead.data_tools.hospital": ["omnilead.data_tools.extras.hospital"],
    "omnilead.data_tools.hospital.files": ["omnilead.data_tools.extras.hospital.files"],
    "omnilead.data_tools.other_programs": ["omnilead.data_tools.dataset.other_programs"],
    "omnilead.data_tools.plots": ["omnilead.data_tools.extras.plots"],
    "omnilead.data_tools.record": ["omnilead.data_tools.ecg.record"],
    "omnilead.data_tools.storage": ["omnilead.data_tools.io.storage"],
    "omnilead.data_tools.zarr_reader": ["omnilead.data_tools.dataset.zarr_reader"],
    "omnilead.engine.common": [
        "omnilead.engine.settings.errors",
        "omnilead.engine.settings.leads",
        "omnilead.engine.settings.files",
    ],
    "omnilead.engine.config": ["omnilead.engine.training.config"],
    "omnilead.engine.evaluation.metrics": ["omnilead.engine.training.metrics"],
    "omnilead.engine.run": ["omnilead.engine.trainings"],  # TrainingRun
}


class MovedModules(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in MOVED:
            return None
        return ModuleSpec(name, self, is_package=name == "omnilead.data_tools.hospital")

    def exec_module(self, module: ModuleType) -> None:
        places = MOVED[module.__name__]
        says = f"{module.__name__} is {' and '.join(places)} now"
        warnings.warn(says, DeprecationWarning, stacklevel=2)

        def attribute(name: str) -> Any:
            for place in places:
                if hasattr(found := importlib.import_module(place), name):
                    return getattr(found, name)
            raise AttributeError(f"{says}, and has no {name!r}")

        module.__getattr__ = attribute  # type: ignore[method-assign]


def install() -> None:
    sys.meta_path.append(MovedModules())
