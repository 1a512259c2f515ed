"""A training in the test's folder on the synthetic dataset."""

from functools import partial

import pytest
from ranks import pretrain


@pytest.fixture
def training(dataset, tmp_path):
    return partial(pretrain, tmp_path, dataset.root.url)
