"""Boosted trees: ours against LightGBM's, what is refused of a model with them."""

import numpy as np
import pytest
import torch

from omnilead.downstream.evaluation import boosted
from omnilead.downstream.evaluation.probe import ProbeData
from omnilead.downstream.inference.trees import MAX_DEPTH, Trees
from omnilead.downstream.tasks.kinds import KINDS
from omnilead.engine.model.folder import LoadError

lightgbm = pytest.importorskip("lightgbm")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 6)).astype(np.float32)
X[RNG.random(X.shape) < 0.2] = 0  # missing
Z = X @ RNG.normal(size=(6, 3)) + RNG.normal(size=(300, 3))


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """The boosters that are trained."""
    train, made = lightgbm.train, []

    def remembered(*args):
        made.append(train(*args))
        return made[-1]

    monkeypatch.setattr(lightgbm, "train", remembered)
    monkeypatch.setattr(boosted, "BOOSTING_ROUNDS", 30)
    return made


def fitted(y, kind="multilabel"):
    return boosted.fit_boosted_trees(ProbeData(X[:200], y[:200], np.arange(200), kind))


@pytest.mark.parametrize("kind", ["multilabel", "multiclass", "regression"])
def test_scores_equal_those_of_lightgbm(kept, kind):
    """Also where numbers are missing."""
    y = {"multilabel": Z > 0, "multiclass": np.eye(3)[Z.argmax(1)], "regression": Z}[kind]
    scores = KINDS[kind].scores(fitted(y.astype(float), kind).head(torch.tensor(X[200:]))).numpy()
    x = np.where(X[200:] == 0, np.nan, X[200:])
    theirs = np.stack([booster.predict(x) for booster in kept], 1).reshape(scores.shape)
    np.testing.assert_allclose(scores, theirs, atol=1e-5)


def test_a_label_may_depend_on_whether_a_number_is_missing():
    ill = RNG.random(300) > 0.5
    x = X.copy()
    x[:, 0] = np.where(ill, 0, 1)
    scores = boosted.fit_boosted_trees(
        ProbeData(x, ill[:, None] * 1.0, np.arange(300), "binary")
    ).scores(x)
    assert ((scores[:, 0] > 0.5) == ill).all()


def test_what_was_never_missing_goes_where_most_went():
    whole = np.where(X == 0, 0.1, X)
    y = (whole[:, :1] > -1).astype(float)
    probe = boosted.fit_boosted_trees(ProbeData(whole, y, np.arange(300), "multilabel"))
    assert probe.scores(whole * 0).min() > y.mean()


def test_unknown_labels_are_left_out_and_rare_classes_get_their_rate(kept):
    y = (Z > 0).astype(float)
    y[:200, 1] = np.arange(200) < 2
    y[:100, 0] = np.nan
    scores = fitted(y).scores(X[200:])
    assert [booster.num_trees() for booster in kept] == [30, 30]
    np.testing.assert_allclose(scores[:, 1], 2.5 / 201, rtol=1e-5)
    known = boosted.fit_boosted_trees(
        ProbeData(X[100:200], y[100:200, :1], np.arange(100), "multilabel")
    )
    np.testing.assert_array_equal(scores[:, :1], known.scores(X[200:]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("feature", 6),
        ("feature", -1),
        ("child", 0),  # a loop
        ("child", -1),
        ("child", 10**6),
        ("root", 10**6),
        ("output", 3),
        ("value", torch.nan),
    ],
)
def test_arrays_that_are_no_trees_are_refused(name, value):
    trees = fitted((Z > 0).astype(float)).head
    getattr(trees, name)[1 if name == "child" else 0] = value
    with pytest.raises(LoadError, match=f"head.{name}: a value is out of range"):
        trees.require_valid(6)


def test_a_chain_of_nodes_is_refused():
    nodes = MAX_DEPTH + 2
    trees = Trees(nodes, 1, 1)
    trees.child[:] = (torch.arange(nodes) + 1).clamp_max(nodes - 1)[:, None]
    with pytest.raises(LoadError, match="deeper than 64"):
        trees.require_valid(1)
