"""Modules under their old names."""

import importlib
import sys

import pytest

from omnilead import moved
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.training.metrics import challenge_score


@pytest.mark.parametrize("name", moved.MOVED)
def test_an_old_name_gives_what_the_new_one_holds(name, monkeypatch):
    monkeypatch.delitem(sys.modules, name, raising=False)
    places = [importlib.import_module(place) for place in moved.MOVED[name]]
    with pytest.warns(DeprecationWarning, match=f"{name} is {places[0].__name__}"):
        module = importlib.import_module(name)
    for place in places:
        for public in (one for one in vars(place) if not one.startswith("_")):
            assert getattr(module, public) is not None or vars(place)[public] is None
    with pytest.raises(AttributeError, match="has no 'nothing'"):
        module.nothing  # noqa: B018
    monkeypatch.delitem(sys.modules, name)


def test_imports_of_plug_ins_and_docs(monkeypatch):
    for name in ("omnilead.engine.common", "omnilead.engine.evaluation.metrics"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match="is omnilead.engine.settings.errors and"):
        from omnilead.engine.common import ConfigError as old_error
    with pytest.warns(DeprecationWarning, match="is omnilead.engine.training.metrics now"):
        from omnilead.engine.evaluation.metrics import challenge_score as old_score
    assert (old_error, old_score) == (ConfigError, challenge_score)
