import pytest

from tests.engine.evaluate.conftest import make_quick


@pytest.fixture(scope="module")
def few_resamples():
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        patch.setattr("omnilead.engine.training.metrics.FEW", 3)
        yield
