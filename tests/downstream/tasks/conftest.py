import pytest
from label_tables import Tables


@pytest.fixture
def tables(dataset, tmp_path):
    return Tables(dataset, tmp_path)
