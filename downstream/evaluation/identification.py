"""Identification: whether the gallery crop most similar to a probe crop is of the same patient.

    identify(model, data, EvalOptions()).document()["score"]     # accuracy

The first 5 s of each patient's gallery crop and probe crop are compared; with role "valid", the two
halves of each crop that was held out of fine-tuning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from omnilead.engine.data.datasets import Datasets
from omnilead.engine.data.patients import patient_ids
from omnilead.engine.model.input import Input
from omnilead.engine.settings.errors import ConfigError, Facts, Flag

from ..inference.outputs import Output, vector_output
from ..inference.trained_model import TrainedModel
from ..tasks.metrics import Array, bootstrap_interval, exact_interval, identification_scores
from .differences import RESAMPLES, Samples, bootstrap_weights
from .results import (
    EvalOptions,
    crops_with_leads_and_note,
    evaluation_facts,
    input_and_warnings,
    leakage_notes,
    nan_to_none,
    outputs_and_positions,
    rates_note,
    require_rows,
)
from .vectors import Vectors


@dataclass(frozen=True, eq=False)
class IdentificationResult:
    gallery_PD: Array
    gallery_ids: Sequence[Any]
    probe_QD: Array
    probe_ids: Sequence[Any]
    facts: Facts = field(default_factory=dict)
    notes: Sequence[str] = ()
    resamples: int = RESAMPLES
    # Random weights of the same architecture, on the same pairs
    untrained: "IdentificationResult | None" = None

    @cached_property
    def scores(self) -> Facts:
        return identification_scores(
            self.gallery_PD, self.gallery_ids, self.probe_QD, self.probe_ids
        )

    @cached_property
    def accuracy_interval(self) -> list[float]:
        hits, people = self.scores["hits"], len(set(self.probe_ids))
        if people > 1 and hits.mean() in (0, 1):  # all resamples would agree
            return exact_interval(int(hits[0]) * people, people)

        def accuracy(weight_Q: Array) -> Any:
            return weight_Q @ hits / weight_Q.sum()

        return list(bootstrap_interval(accuracy, self.probe_ids, self.resamples).tolist())

    @property
    def remarks(self) -> list[str]:
        remarks, scores = list(self.notes), self.scores
        if scores["n_gallery"] == 1:
            remarks.append("The gallery has one entry: accuracy and chance say nothing.")
        elif scores["ties"] > 0.5:
            remarks.append(
                "Most probes are equally similar to several patients: the embeddings have "
                "collapsed, or are copies."
            )
        if scores["one_sided"]:
            remarks.append(
                f"{scores['one_sided']:,} probes are of patients who are not in the gallery: they "
                "count as misses."
            )
        if self.untrained and self.untrained.scores["accuracy"] >= scores["accuracy"]:
            remarks.append(
                "Random weights of the same architecture recognise as many patients: training "
                "gains nothing here."
            )
        return remarks

    def document(self) -> Facts:
        scores = self.scores
        metrics = {name: scores[name] for name in ("accuracy", "top5", "chance", "ties")}
        intervals = {"accuracy": self.accuracy_interval}
        if self.untrained:
            metrics["random_weights"] = self.untrained.scores["accuracy"]
            intervals["random_weights"] = self.untrained.accuracy_interval
        document = {
            "task": "identification",
            **self.facts,
            "unit": "patient",
            "n": scores["n_probes"],
            "gallery": scores["n_gallery"],
            "one_sided": scores["one_sided"],
            "metrics": metrics,
            "intervals": intervals,
            "classes": {},
            "cmc": scores["cmc"].tolist(),
            "score": scores["accuracy"],
            "remarks": self.remarks,
        }
        return dict(nan_to_none(document))


class Pairs(NamedTuple):
    """The crops to compare, and their embeddings."""

    rows: Array  # all crops
    gallery: Array  # crops
    gallery_PD: Array
    probe: Array  # crops
    probe_QD: Array
    left_out: list[str]  # a note on crops that cannot be compared

    def compare(self, dimensions: slice, patients: Array) -> IdentificationResult:
        """Compares the crops by these dimensions of their embeddings."""
        return IdentificationResult(
            self.gallery_PD[:, dimensions],
            patients[self.gallery].tolist(),
            self.probe_QD[:, dimensions],
            patients[self.probe].tolist(),
        )


def identify(model: TrainedModel, data: Datasets, options: EvalOptions) -> IdentificationResult:
    """Identifies patients by the model and by random weights, in one pass over the crops."""
    model_input, notes = input_and_warnings(model, data, options)
    width = model.encoder.width
    output = vector_output(model, joined_embedding_function(model), 2 * width)
    pairs_of = pair_halves_of_crops if options.role == "valid" else pair_crops_of_patients
    pairs = pairs_of(output, data, model_input, options)
    patients = np.concatenate(patient_ids(data.all))
    if model.head_info and model.head_info.kind == "identity":
        notes += rates_note(model, data, pairs.rows)
    notes += leakage_notes(model, data, pairs.rows, patients, options.role)
    return replace(
        pairs.compare(slice(width), patients),
        facts=evaluation_facts(data, options, model_input),
        notes=notes + pairs.left_out,
        untrained=pairs.compare(slice(width, None), patients),
    )


def joined_embedding_function(model: TrainedModel) -> Callable[[Tensor], Tensor]:
    """Returns a function that maps windows to the model's embeddings, joined to those by random
    weights of its architecture."""
    untrained = model.with_random_weights()

    def embed_with_both(x_RLT: Tensor) -> Tensor:
        return torch.cat([model.pool_tokens(x_RLT), untrained.pool_tokens(x_RLT)], 1)

    return embed_with_both


def pair_halves_of_crops(
    output: Output, data: Datasets, model_input: Input, options: EvalOptions
) -> Pairs:
    """Pairs the first window of each crop with the second."""
    rows = _crops_with_two_windows(data, model_input)
    (rows,), left_out = crops_with_leads_and_note(data, model_input, rows)
    c_RD, _ = outputs_and_positions(output, data, rows, model_input, options)
    windows = model_input.count_windows()
    return Pairs(rows, rows, c_RD[::windows], rows, c_RD[1::windows], left_out)


def pair_crops_of_patients(
    output: Output, data: Datasets, model_input: Input, options: EvalOptions
) -> Pairs:
    """Pairs a crop of each patient with another one."""
    sides = gallery_and_probe_rows(data)
    (gallery, probe), left_out = crops_with_leads_and_note(data, model_input, *sides)
    rows = np.union1d(gallery, probe)
    c_BD, _ = outputs_and_positions(output, data, rows, model_input, options, "first")
    gallery_PD, probe_QD = (c_BD[np.searchsorted(rows, side)] for side in (gallery, probe))
    return Pairs(rows, gallery, gallery_PD, probe, probe_QD, left_out)


def _crops_with_two_windows(data: Datasets, model_input: Input) -> Array:
    if model_input.count_windows() < 2:
        raise ConfigError(
            Flag("--role"),
            f" valid: compares two windows of a crop, but the model takes {model_input.window_s:g} s "
            "at once: use ",
            Flag("--role"),
            " test",
        )
    rows = data.select("valid")
    rows = rows[data.column("halves")[rows] == 2]
    require_rows(rows, data, "id=valid and two halves", "records that are not kept for tests")
    return np.asarray(rows)


class Identities(NamedTuple):
    """The crops whose patients `omnilead bench` identifies."""

    gallery: Array  # crops
    probe: Array
    patient_B: Array  # the patient of each crop of the data
    weight_NB: Array  # bootstrap weights of the probes

    @property
    def counts(self) -> Facts:
        patients = np.unique(self.patient_B[self.probe])
        return {"n": len(self.probe), "patients": len(patients), "gallery": len(self.gallery)}

    def scores(self, embeddings: Sequence[Vectors], identity_dims: slice) -> Samples:
        """Accuracy by cosine of some dimensions of the joined vectors."""
        sides = []
        for crops in (self.gallery, self.probe):
            first_ND = np.hstack([vectors.take(crops).c_BSD[:, 0] for vectors in embeddings])
            sides += [first_ND[:, identity_dims], self.patient_B[crops].tolist()]
        hits_N = identification_scores(*sides)["hits"]
        return {"accuracy": (hits_N @ self.weight_NB / self.weight_NB.sum(0))[None]}


def crops_to_identify(tested: Datasets, measured_B: Array) -> Identities:
    """Returns the gallery and the probes among `measured_B`: the crops that every model can see."""
    gallery, probe = gallery_and_probe_rows(tested, np.flatnonzero(measured_B))
    patient_B = np.concatenate(patient_ids(tested.all))
    return Identities(gallery, probe, patient_B, bootstrap_weights(patient_B[probe]))


def gallery_and_probe_rows(data: Datasets, among: Array | None = None) -> list[Array]:
    """Returns the gallery and the probe crops; ConfigError if there are none."""
    sides = []
    for role in ("gallery", "probe"):
        rows = data.select(role)
        rows = rows if among is None else np.intersect1d(rows, among)
        source = (
            "patients of ptb-xl with two sessions: shard --id-sources names others. To score labels, fit a "
            "model to them: omnilead fit"
        )
        require_rows(rows, data, f"id={role}", source)
        sides.append(rows)
    return sides
