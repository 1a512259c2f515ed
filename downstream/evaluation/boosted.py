"""Fits gradient-boosted trees to embeddings or measurements of ECGs, by LightGBM (the extra `bench`).

    probe = fit_boosted_trees(ProbeData(x_ND, y_NK, patient_N, "multilabel"))
    probe.head                               # downstream.inference.trees

One setting for few labels and for many, chosen on folds 1 to 7 of PTB-XL with 85 and 850 labelled
ECGs (benchmarks/LOG.md): small trees that see a twentieth of the numbers each. A number that is
missing (NaN, or 0) goes where it lowers the loss; if it was never missing, where most ECGs went.
A class with fewer than MIN_EXAMPLES_OF_CLASS positives or negatives gets its base rate. In survival the loss is
the partial likelihood; the diagonal of its Hessian is approximated by that of a Poisson model.
"""

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from omnilead.engine.settings.errors import Facts

from ..inference.trees import Trees
from ..tasks.kinds import KINDS, event_loss
from ..tasks.metrics import Array
from .probe import Probe, ProbeData, standardise_labels

BOOSTING_ROUNDS = 400
LIGHTGBM_SETTINGS = {
    "learning_rate": 0.03,
    "num_leaves": 7,
    "min_data_in_leaf": 5,
    "lambda_l2": 1.0,
    "seed": 0,
    "deterministic": True,
    "force_row_wise": True,
    "verbose": -1,
}
# Each tree sees FEATURE_SHARE of the features, but at least LEAST_FEATURES of them
FEATURE_SHARE, LEAST_FEATURES = 0.05, 32
MIN_EXAMPLES_OF_CLASS = 3
INSTALL_LIGHTGBM = "lightgbm is not installed: pip install 'omnilead[bench]'"
Node = dict[str, Any]  # a node in LightGBM's dump


def has_lightgbm() -> bool:
    return find_spec("lightgbm") is not None


def fit_boosted_trees(data: ProbeData) -> Probe:
    """Returns a probe of boosted trees, fitted for each output alone, or for all outputs together
    if the classes are exclusive."""
    data, center_K, scale_K = standardise_labels(data)
    # Each tree with the number of the output that it adds to
    trees_and_outputs: list[tuple[Node, int]] = []
    x_ND, outputs = data.x_ND.astype(np.float32), data.y_NK.shape[1]
    x_ND[x_ND == 0] = np.nan
    if KINDS[data.kind].exclusive:
        known_N = ~np.isnan(data.y_NK).any(1)
        y_N = data.y_NK[known_N].argmax(1)
        trees_and_outputs += _fit_trees_and_outputs(
            x_ND[known_N], y_N, "multiclass", num_class=outputs
        )
    else:
        for number, y_N in enumerate(data.y_NK.T):
            known_N = ~np.isnan(y_N)
            y_N = y_N[known_N]
            if KINDS[data.kind].has_classes:
                positives = y_N.sum()
                if min(positives, len(y_N) - positives) < MIN_EXAMPLES_OF_CLASS:
                    rate = (positives + 0.5) / (len(y_N) + 1)
                    trees_and_outputs.append(({"leaf_value": np.log(rate / (1 - rate))}, number))
                    continue
            trees_and_outputs += [
                (tree, number) for tree, _ in _fit_trees_and_outputs(x_ND[known_N], y_N, data.kind)
            ]
    trees = convert_trees(trees_and_outputs, outputs).require_valid(x_ND.shape[1])
    return Probe(data.kind, trees, center_K, scale_K)


def _fit_trees_and_outputs(
    x_ND: Array, y_N: Array, kind: str, **more_settings: Any
) -> list[tuple[Node, int]]:
    """Fits trees with LightGBM. Returns (tree, number of the class that it adds to) in the order of
    boosting."""
    import lightgbm

    share = min(1.0, max(FEATURE_SHARE, LEAST_FEATURES / x_ND.shape[1]))
    settings: Facts = {**LIGHTGBM_SETTINGS, **more_settings, "feature_fraction": share}
    settings["num_threads"] = torch.get_num_threads()
    settings["objective"] = OBJECTIVES[kind]
    booster = lightgbm.train(settings, lightgbm.Dataset(x_ND, y_N), BOOSTING_ROUNDS)
    trees = booster.dump_model()["tree_info"]
    return [
        (tree["tree_structure"], tree["tree_index"] % more_settings.get("num_class", 1))
        for tree in trees
    ]


def _cox_gradient_and_hessian(risk_N: Array, data: Any) -> tuple[Array, Array]:
    """Returns the gradient of the summed Cox loss, and the approximate diagonal of its Hessian, as
    LightGBM asks an objective for them."""
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
    "survival": _cox_gradient_and_hessian,
}


def convert_trees(trees_and_outputs: list[tuple[Node, int]], outputs: int) -> Trees:
    """Returns LightGBM's trees as the module Trees."""
    nodes: list[tuple[int, float, tuple[int, int, int], float]] = []
    roots = [_append_tree(tree, nodes) for tree, _ in trees_and_outputs]
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


def _append_tree(tree: Node, nodes: list[Any]) -> int:
    """Appends the nodes of a tree to `nodes`, its root before its children. Returns the index of
    the root."""
    index = len(nodes)
    nodes.append((0, 0.0, (index, index, index), tree.get("leaf_value", 0.0)))
    if "leaf_value" not in tree:
        sides = tree["left_child"], tree["right_child"]
        left, right = (_append_tree(side, nodes) for side in sides)
        first = tree["default_left"]
        if tree["missing_type"] != "NaN":
            counts = [side.get("leaf_count", side.get("internal_count", 0)) for side in sides]
            first = counts[0] >= counts[1]
        # LightGBM writes the threshold 1e300 where it splits missing values from all others
        exact = min(tree["threshold"], float(np.finfo(np.float32).max))
        # The threshold is rounded down to float32, so that every float32 number goes the same way
        # as by the exact threshold
        threshold = np.float32(exact)
        if threshold > exact:
            threshold = np.nextafter(threshold, np.float32(-np.inf))
        child = left, right, left if first else right
        nodes[index] = tree["split_feature"], float(threshold), child, 0.0
    return index
