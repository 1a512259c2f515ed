"""Gradient boosting on the numbers of an ECG, by LightGBM (the extra `bench`).

    probe = boosted(ProbeData(x_ND, y_NK, patient_N, "multilabel"))
    probe.head                               # downstream.inference.trees

One setting for few labels and for many, chosen on folds 1 to 7 of PTB-XL with 85 and 850 labelled
ECGs (benchmarks/LOG.md): small trees that see a twentieth of the numbers each. A number that is
missing (NaN, or 0) goes where it lowers the loss; if it was never missing, where most ECGs went.
A class with fewer than FEW positives or negatives gets its base rate. Survival: the partial
likelihood, with the diagonal of its curvature that a Poisson model has.
"""

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from omnilead.engine.settings.errors import Facts

from ..inference.trees import Trees
from ..tasks.kinds import KINDS, event_loss
from ..tasks.metrics import Array
from .probe import Probe, ProbeData, standardised

ROUNDS = 400
SETTINGS = {
    "learning_rate": 0.03,
    "num_leaves": 7,
    "min_data_in_leaf": 5,
    "lambda_l2": 1.0,
    "seed": 0,
    "deterministic": True,
    "force_row_wise": True,
    "verbose": -1,
}
SHARE, AT_LEAST = 0.05, 32  # of the numbers, that a tree sees
FEW = 3
INSTALL = "lightgbm is not installed: pip install 'omnilead[bench]'"
Node = dict[str, Any]  # of LightGBM's dump


def installed() -> bool:
    return find_spec("lightgbm") is not None


def boosted(data: ProbeData) -> Probe:
    data, center_K, scale_K = standardised(data)
    trees_and_outputs: list[tuple[Node, int]] = []  # trees, and their outputs
    x_ND, outputs = data.x_ND.astype(np.float32), data.y_NK.shape[1]
    x_ND[x_ND == 0] = np.nan
    if KINDS[data.kind].exclusive:
        known_N = ~np.isnan(data.y_NK).any(1)
        y_N = data.y_NK[known_N].argmax(1)
        trees_and_outputs += _trees(x_ND[known_N], y_N, "multiclass", num_class=outputs)
    else:
        for number, y_N in enumerate(data.y_NK.T):
            known_N = ~np.isnan(y_N)
            y_N = y_N[known_N]
            if KINDS[data.kind].of_classes:
                positives = y_N.sum()
                if min(positives, len(y_N) - positives) < FEW:
                    rate = (positives + 0.5) / (len(y_N) + 1)
                    trees_and_outputs.append(({"leaf_value": np.log(rate / (1 - rate))}, number))
                    continue
            trees_and_outputs += [
                (tree, number) for tree, _ in _trees(x_ND[known_N], y_N, data.kind)
            ]
    trees = planted(trees_and_outputs, outputs).check(x_ND.shape[1])
    return Probe(data.kind, trees, center_K, scale_K)


def _trees(x_ND: Array, y_N: Array, kind: str, **more_settings: Any) -> list[tuple[Node, int]]:
    """The trees in their order; with several classes, one of each in turn."""
    import lightgbm

    share = min(1.0, max(SHARE, AT_LEAST / x_ND.shape[1]))
    settings: Facts = {**SETTINGS, **more_settings, "feature_fraction": share}
    settings["num_threads"] = torch.get_num_threads()
    settings["objective"] = OBJECTIVES[kind]
    booster = lightgbm.train(settings, lightgbm.Dataset(x_ND, y_N), ROUNDS)
    trees = booster.dump_model()["tree_info"]
    return [
        (tree["tree_structure"], tree["tree_index"] % more_settings.get("num_class", 1))
        for tree in trees
    ]


def _hazards(risk_N: Array, data: Any) -> tuple[Array, Array]:
    """The slope of the loss of the events, and its curvature."""
    risk_N1 = torch.tensor(risk_N[:, None], requires_grad=True)
    y_N1 = torch.from_numpy(data.get_label()[:, None].astype(np.float64))
    event_N = (y_N1[:, 0] > 0).double()
    loss = event_loss(risk_N1, y_N1) * event_N.sum()
    (slope_N1,) = torch.autograd.grad(loss, risk_N1)
    slope_N = slope_N1[:, 0]
    return slope_N.numpy(), (slope_N + event_N).clamp_min(1e-6).numpy()


OBJECTIVES: Facts = {
    "binary": "binary",
    "multilabel": "binary",
    "multiclass": "multiclass",
    "regression": "regression",
    "survival": _hazards,
}


def planted(trees_and_outputs: list[tuple[Node, int]], outputs: int) -> Trees:
    """Trees of LightGBM as ours."""
    nodes: list[tuple[int, float, tuple[int, int, int], float]] = []
    roots = [_plant(tree, nodes) for tree, _ in trees_and_outputs]
    feature, threshold, child, value = zip(*nodes, strict=True)
    trees = Trees(len(nodes), len(roots), outputs)
    tensors = {
        "feature": torch.tensor(feature),
        "threshold": torch.tensor(threshold),
        "child": torch.tensor(child),
        "value": torch.tensor(value),
        "root": torch.tensor(roots),
        "output": torch.tensor([output for _, output in trees_and_outputs]),
    }
    trees.load_state_dict(tensors)
    return trees


def _plant(tree: Node, nodes: list[Any]) -> int:
    """Appends a tree, its root first. Returns the root's place."""
    place = len(nodes)
    nodes.append((0, 0.0, (place, place, place), tree.get("leaf_value", 0.0)))
    if "leaf_value" not in tree:
        sides = tree["left_child"], tree["right_child"]
        left, right = (_plant(side, nodes) for side in sides)
        first = tree["default_left"]
        if tree["missing_type"] != "NaN":
            counts = [side.get("leaf_count", side.get("internal_count", 0)) for side in sides]
            first = counts[0] >= counts[1]
        # A split of what is missing from all else is at 1e300
        exact = min(tree["threshold"], float(np.finfo(np.float32).max))
        # The same for every number in float32
        threshold = np.float32(exact)
        if threshold > exact:
            threshold = np.nextafter(threshold, np.float32(-np.inf))
        child = left, right, left if first else right
        nodes[place] = tree["split_feature"], float(threshold), child, 0.0
    return place
