"""A model that trains in milliseconds."""

import pytest

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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY)
    return str(path)
