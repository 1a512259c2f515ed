"""The metrics: their names, labels, and the kinds of task that they score."""

from typing import NamedTuple

COSINE_TIE = 1e-12  # float64 cosines that differ by less than this count as equal


class Metric(NamedTuple):
    """What settings, commands and reports must know about a metric. It is not in
    downstream.tasks.metrics, which computes the metrics, because --help need not wait for that
    module to import NumPy."""

    name: str  # name in JSON and in the settings
    label: str
    lower_is_better: bool | None  # None: the metric is not used to choose a checkpoint
    kinds: tuple[str, ...] = ()  # kinds of task that the metric scores
    # True: also shown where there is little room, as in a terminal and in the tiles of a run's
    # report
    in_brief: bool = False
    in_bench: bool = False  # True: shown where models are compared
    percent: bool = False


_YES_NO_TASKS = ("binary", "multilabel")


_CLASSIFICATION_TASKS = (*_YES_NO_TASKS, "multiclass")


# The first metric in this list that scores a kind of task is the score of these tasks, and chooses
# their checkpoints
METRIC_OF = {
    metric.name: metric
    for metric in (
        Metric("loss", "loss", True),
        # The CinC scores count only the 26 classes of the CinC Challenge. challenge_chosen uses
        # thresholds chosen in validation
        Metric("challenge", "CinC 2021 score at 0.5", False, in_brief=True, in_bench=True),
        Metric("challenge_chosen", "CinC 2021 score, chosen thresholds", None, in_bench=True),
        Metric("auroc", "AUROC", False, _CLASSIFICATION_TASKS, in_brief=True, in_bench=True),
        Metric("auprc", "AUPRC", False, _CLASSIFICATION_TASKS, in_brief=True, in_bench=True),
        Metric("accuracy", "accuracy", False, _CLASSIFICATION_TASKS, in_bench=True, percent=True),
        Metric("balanced_accuracy", "balanced accuracy", False, ("multiclass",)),
        Metric("f_measure", "F-measure", False, _CLASSIFICATION_TASKS, in_brief=True),
        Metric("sensitivity", "sensitivity", False, _YES_NO_TASKS),
        Metric("specificity", "specificity", False, _YES_NO_TASKS),
        Metric("brier", "Brier score", True, _CLASSIFICATION_TASKS, in_brief=True, in_bench=True),
        Metric("mae", "mean absolute error", True, ("regression",), in_brief=True, in_bench=True),
        Metric("rmse", "RMSE", True, ("regression",)),
        Metric("r2", "R\u00b2", False, ("regression",), in_brief=True),
        Metric("pearson", "Pearson r", False, ("regression",)),
        Metric("mean_error", "mean error", None),
        Metric("sd_error", "SD of the error", None),
        Metric("c_index", "C-index", False, ("survival",), in_brief=True, in_bench=True),
        Metric(
            "identification_accuracy",
            "patients recognised",
            False,
            ("identity",),
            in_brief=True,
            percent=True,
        ),
        Metric("accuracy_local", "local accuracy", None, in_brief=True, percent=True),
        Metric("accuracy_global", "global accuracy", None, in_brief=True, percent=True),
    )
}


def label_of(metric: str) -> str:
    return METRIC_OF[metric].label if metric in METRIC_OF else metric.replace("_", " ")
