import pytest

from tests.downstream.evaluate.conftest import make_quick


@pytest.fixture(scope="module")
def few_resamples():
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        patch.setattr("omnilead.downstream.tasks.metrics.FEW_PATIENTS", 3)
        yield
