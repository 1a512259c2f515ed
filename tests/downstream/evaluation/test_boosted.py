"""Boosted trees: ours against LightGBM's, what is refused of a model with them; MiniRocket against a
direct computation."""

import numpy as np
import pytest
import torch

from omnilead.downstream.evaluation import boosted, minirocket
from omnilead.downstream.evaluation.minirocket import MiniRocket
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
    monkeypatch.setattr(boosted, "ROUNDS", 30)
    return made


def fitted(y, kind="multilabel"):
    return boosted.boosted(ProbeData(X[:200], y[:200], np.arange(200), kind))


@pytest.mark.parametrize("kind", ["multilabel", "multiclass", "regression"])
def test_scores_equal_those_of_lightgbm(kept, kind):
    """Also where numbers are missing."""
    y = {"multilabel": Z > 0, "multiclass": np.eye(3)[Z.argmax(1)], "regression": Z}[kind]
    scores = KINDS[kind].scores(fitted(y.astype(float), kind).head(torch.tensor(X[200:]))).numpy()
    x = np.where(X[200:] == 0, np.nan, X[200:])
    theirs = np.stack([booster.predict(x) for booster in kept], 1).reshape(scores.shape)
    np.testing.assert_allclose(scores, theirs, atol=1e-5)


def test_what_was_never_missing_goes_where_most_went():
    whole = np.where(X == 0, 0.1, X)
    y = (whole[:, :1] > -1).astype(float)
    probe = boosted.boosted(ProbeData(whole, y, np.arange(300), "multilabel"))
    assert probe.scores(whole * 0).min() > y.mean()


def test_unknown_labels_are_left_out_and_rare_classes_get_their_rate(kept):
    y = (Z > 0).astype(float)
    y[:200, 1] = np.arange(200) < 2
    y[:100, 0] = np.nan
    scores = fitted(y).scores(X[200:])
    assert [booster.num_trees() for booster in kept] == [30, 30]
    np.testing.assert_allclose(scores[:, 1], 2.5 / 201, rtol=1e-5)
    known = boosted.boosted(ProbeData(X[100:200], y[100:200, :1], np.arange(100), "multilabel"))
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
    with pytest.raises(LoadError, match=f"head.{name}: is out of range"):
        trees.check(6)


def test_a_chain_of_nodes_is_refused():
    nodes = MAX_DEPTH + 2
    trees = Trees(nodes, 1, 1)
    trees.child[:] = (torch.arange(nodes) + 1).clamp_max(nodes - 1)[:, None]
    with pytest.raises(LoadError, match="deeper than 64"):
        trees.check(1)


def test_minirocket_equals_a_direct_computation(monkeypatch):
    monkeypatch.setattr(minirocket, "THRESHOLDS", 5)
    x = torch.from_numpy(RNG.normal(size=(3, 4, 90))).float()
    rocket = MiniRocket(x, (1, 3))
    features = rocket(x).numpy()
    assert features.shape == (3, 84 * 5) and rocket.digest == MiniRocket(x, (1, 3)).digest
    assert rocket.digest != MiniRocket(x, (1,)).digest
    expected = []
    for dilation, weight_KLT, threshold_KF in rocket.convolutions:
        taps = weight_KLT[:, [1, 3]].numpy()
        assert not weight_KLT[:, [0, 2]].any() and weight_KLT.any((1, 2)).all()
        assert {tuple(np.sort(of)) for of in taps.reshape(-1, 9)} <= {
            (0,) * 9,
            (-1,) * 6 + (2,) * 3,
        }
        for side in (0, 1):
            for f in range(threshold_KF.shape[1]):
                for k in range(side, 84, 2):
                    for_row = []
                    for signal in x[:, [1, 3]].numpy():
                        y = np.zeros(90)
                        for lead, weights in zip(signal, taps[k], strict=True):
                            wide = np.pad(lead, 4 * dilation)
                            for tap, weight in enumerate(weights):
                                y += weight * wide[tap * dilation : tap * dilation + 90]
                        y = y[4 * dilation : 90 - 4 * dilation] if side else y
                        for_row.append((y > threshold_KF[k, f].item()).mean())
                    expected.append(for_row)
    assert dilation == 6
    np.testing.assert_allclose(features, np.array(expected).T, atol=0.03)
