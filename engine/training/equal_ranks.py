"""Compares the ranks before training. Each rank reads its own copy of the data, settings, plug-ins
and omnilead itself. If the copies differed, the run would train to its end and record only the copy
of rank 0.

    require_equal(ranks, facts_of_rank(config, datasets))       # ConfigError: the same line on every rank

A rank may read its data from a place of its own, by as many threads as its machine has.
"""

import hashlib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

import omnilead
from omnilead.data_tools.dataset import Dataset

from ..settings.errors import ConfigError, join_first_names
from ..settings.files import flatten, read_plugin_files
from ..settings.resuming import changeable_settings
from .config import RunConfig
from .distributed import Ranks, on_first_rank
from .loggers import versions

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = ("data_tools", "engine", "downstream")
# In these sections, settings that may change on a resume, such as paths and threads, may also differ
# between ranks
MACHINE_SECTIONS = ("data.", "pipeline.")
LISTED_DIFFERENCES = 3  # most differences that an error message lists
ABSENT_VALUE = "none"  # value, in messages, of a fact that a rank does not have
RankFacts = Mapping[str, tuple[str, str]]  # key of a fact -> (its name in messages, its value)


def facts_of_rank(config: RunConfig, datasets: Sequence[Dataset]) -> RankFacts:
    """Returns what must be equal on all ranks: the data, settings, plug-ins and versions of this
    rank."""
    facts = {}
    for number, dataset in enumerate(datasets):
        name = f"another dataset at {dataset.root.url}: fingerprint "
        facts[f"dataset {number}"] = name, dataset.fingerprint[:16]
    may_differ = {
        name for name in changeable_settings(type(config)) if name.startswith(MACHINE_SECTIONS)
    }
    for setting, value in flatten(config.tree()).items():
        if setting not in may_differ:
            facts[setting] = f"{setting}=", str(value)
    for file, content in read_plugin_files(config.plugin_settings, config.run).items():
        facts[f"code {file}"] = f"another {file}: sha256 ", _short_sha256(content)
    for package, version in versions().items():
        facts[f"version {package}"] = f"{package} ", version
    facts["version omnilead"] = "omnilead ", omnilead.__version__
    facts["code of omnilead"] = "other code of omnilead: sha256 ", _short_sha256(_omnilead_code())
    return facts


def facts_of_task(facts: Mapping[str, Any]) -> RankFacts:
    """Converts the facts that a task has found, such as its labels and the model that it starts
    from, to RankFacts."""
    return {name: (f"{name}=", str(value)) for name, value in flatten(facts).items()}


def require_equal(ranks: Ranks, facts: RankFacts) -> None:
    """Raises ConfigError on every rank if the facts of a rank differ from those of rank 0. All
    ranks must call it."""
    if ranks.world == 1:
        return
    by_rank: list[Any] | None = [None] * ranks.world if ranks.is_first else None
    dist.gather_object((socket.gethostname(), facts), by_rank, dst=0, group=ranks.control)
    on_first_rank(ranks, lambda: _refuse_differences(by_rank or []))


def _refuse_differences(by_rank: Sequence[tuple[str, RankFacts]]) -> None:
    (_, of_first), *_ = by_rank
    for rank, (machine, facts) in enumerate(by_rank):
        if found := describe_differences(of_first, facts):
            raise ConfigError(
                f"rank {rank} on {machine} has {join_first_names(found, LISTED_DIFFERENCES)}: give all ranks the "
                "data, settings, code and versions of rank 0"
            )


def describe_differences(of_first: RankFacts, facts: RankFacts) -> list[str]:
    """Returns phrases for a message that say how a rank's facts differ from those of rank 0."""
    found = []
    for key in dict.fromkeys([*facts, *of_first]):
        name, _ = facts.get(key) or of_first[key]
        _, value = facts.get(key, ("", ABSENT_VALUE))
        _, first_value = of_first.get(key, ("", ABSENT_VALUE))
        if value != first_value:
            found.append(f"{name}{value} instead of {first_value}")
    return found


def _omnilead_code() -> bytes:
    files = [
        file for folder in PACKAGE_FOLDERS for file in sorted((PACKAGE_ROOT / folder).rglob("*.py"))
    ]
    return b"\0".join(file.read_bytes() for file in files)


def _short_sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
