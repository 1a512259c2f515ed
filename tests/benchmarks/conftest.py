"""A model that trains in milliseconds."""

import multiprocessing
from types import SimpleNamespace

import pytest

from benchmarks import measure
from tests.forks import CONTEXT

TINY = """
model:
  conv: [[32, 2], [32, 2], [32, 2], [32, 2]]
  width: 48
  layers: 2
  heads: 4
  ffn: 96
  position_kernel: 16
  codes: 16
  code_width: 32
  projection: 32
"""


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Every case still runs in its own process, without importing everything again."""
    monkeypatch.setattr(
        measure,
        "multiprocessing",
        SimpleNamespace(**vars(multiprocessing) | {"get_context": lambda _: CONTEXT}),
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY)
    return str(path)
