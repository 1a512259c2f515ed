"""Scores identification: how often the gallery crop most similar to a probe crop is of the same patient.

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
    leakage_notes,
    limited_input_and_warnings,
    nan_to_none,
    outputs_and_positions,
    rates_note,
    require_crops,
)
from .vectors import Vectors


@dataclass(frozen=True, eq=False)
class IdentificationResult:
    """The embeddings and patients of gallery and probes, and the scores that follow from them."""

    gallery_PD: Array
    gallery_ids: Sequence[Any]
    probe_QD: Array
    probe_ids: Sequence[Any]
    facts: Facts = field(default_factory=dict)
    notes: Sequence[str] = ()
    resamples: int = RESAMPLES
    # The result of random weights of the same architecture on the same crops
    untrained: "IdentificationResult | None" = None

    @cached_property
    def scores(self) -> Facts:
        return identification_scores(
            self.gallery_PD, self.gallery_ids, self.probe_QD, self.probe_ids
        )

    @cached_property
    def accuracy_interval(self) -> list[float]:
        """Returns the 95 % interval of the accuracy."""
        hits, people = self.scores["hits"], len(set(self.probe_ids))
        # If all probes are hits, or none is, all resamples agree, so the interval is exact instead
        if people > 1 and hits.mean() in (0, 1):
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
        """Returns the scores as `omnilead evaluate --json` writes them."""
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


class EmbeddedPairs(NamedTuple):
    """The gallery crops and the probe crops to compare, and their embeddings."""

    rows: Array  # all crops, of the gallery and of the probes
    gallery: Array  # the crop of each row of `gallery_PD`
    gallery_PD: Array
    probe: Array  # the crop of each row of `probe_QD`
    probe_QD: Array
    left_out: list[str]  # at most one note: how many crops cannot be compared, and why

    def compare(self, dimensions: slice, patients: Array) -> IdentificationResult:
        """Returns the result of comparing the crops by these dimensions of their embeddings.
        `patients`: the patient of each crop of the data."""
        return IdentificationResult(
            self.gallery_PD[:, dimensions],
            patients[self.gallery].tolist(),
            self.probe_QD[:, dimensions],
            patients[self.probe].tolist(),
        )


def identify(model: TrainedModel, data: Datasets, options: EvalOptions) -> IdentificationResult:
    """Scores how well the model and random weights identify patients. Both embed each crop in one
    pass over the data."""
    model_input, notes = limited_input_and_warnings(model, data, options)
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
    """Returns a function that embeds windows twice, by the model and by random weights of its
    architecture, and concatenates the two embeddings."""
    untrained = model.with_random_weights()

    def embed_with_both(x_RLT: Tensor) -> Tensor:
        return torch.cat([model.pool_tokens(x_RLT), untrained.pool_tokens(x_RLT)], 1)

    return embed_with_both


def pair_halves_of_crops(
    output: Output, data: Datasets, model_input: Input, options: EvalOptions
) -> EmbeddedPairs:
    """Pairs the first window of each crop of the split valid with the second window."""
    rows = _crops_with_two_windows(data, model_input)
    (rows,), left_out = crops_with_leads_and_note(data, model_input, rows)
    c_RD, _ = outputs_and_positions(output, data, rows, model_input, options)
    windows = model_input.count_windows()
    return EmbeddedPairs(rows, rows, c_RD[::windows], rows, c_RD[1::windows], left_out)


def pair_crops_of_patients(
    output: Output, data: Datasets, model_input: Input, options: EvalOptions
) -> EmbeddedPairs:
    """Pairs the gallery crops with the probe crops, which are other crops of the same patients."""
    sides = gallery_and_probe_rows(data)
    (gallery, probe), left_out = crops_with_leads_and_note(data, model_input, *sides)
    rows = np.union1d(gallery, probe)
    c_BD, _ = outputs_and_positions(output, data, rows, model_input, options, "first")
    gallery_PD, probe_QD = (c_BD[np.searchsorted(rows, side)] for side in (gallery, probe))
    return EmbeddedPairs(rows, gallery, gallery_PD, probe, probe_QD, left_out)


def _crops_with_two_windows(data: Datasets, model_input: Input) -> Array:
    """Returns the crops of the split valid that have two halves; ConfigError if there are none, or
    if the model takes more than a half at once."""
    if model_input.count_windows() < 2:
        raise ConfigError(
            Flag("--role"),
            " valid: identification then compares two windows of each crop, but a crop has no two windows "
            f"of the {model_input.window_s:g} s that the model takes at once: use ",
            Flag("--role"),
            " test",
        )
    rows = data.rows_with_id_role("valid")
    rows = rows[data.column("halves")[rows] == 2]
    require_crops(rows, data, "id=valid and two halves", "records that are not kept for tests")
    return np.asarray(rows)


class GalleryAndProbes(NamedTuple):
    """The crops whose patients `omnilead bench` identifies: probes, and the gallery to find them
    in."""

    gallery: Array  # numbers of the gallery crops
    probe: Array  # numbers of the probe crops
    patient_B: Array  # the patient of each crop of the tested datasets
    weight_NB: Array  # how often each probe counts in each bootstrap weighting

    @property
    def counts(self) -> Facts:
        """Returns the numbers of probes, of their patients, and of gallery crops."""
        patients = np.unique(self.patient_B[self.probe])
        return {"n": len(self.probe), "patients": len(patients), "gallery": len(self.gallery)}

    def scores(self, embeddings: Sequence[Vectors], identity_dims: slice) -> Samples:
        """Returns the accuracy [1, B] on the bootstrap resamples, by the cosine between embeddings.
        `embeddings`: vectors of several embedders, which are joined. `identity_dims`: the
        dimensions of the joined vectors that are compared."""
        sides = []
        for crops in (self.gallery, self.probe):
            first_ND = np.hstack([vectors.take(crops).c_BSD[:, 0] for vectors in embeddings])
            sides += [first_ND[:, identity_dims], self.patient_B[crops].tolist()]
        hits_N = identification_scores(*sides)["hits"]
        return {"accuracy": (hits_N @ self.weight_NB / self.weight_NB.sum(0))[None]}


def crops_to_identify(tested: Datasets, measured_B: Array) -> GalleryAndProbes:
    """Returns the gallery crops and the probe crops that every model can see. `measured_B`: True
    for the crops that every model can see."""
    gallery, probe = gallery_and_probe_rows(tested, np.flatnonzero(measured_B))
    patient_B = np.concatenate(patient_ids(tested.all))
    return GalleryAndProbes(gallery, probe, patient_B, bootstrap_weights(patient_B[probe]))


def gallery_and_probe_rows(data: Datasets, among: Array | None = None) -> list[Array]:
    """Returns [gallery crops, probe crops]; ConfigError if either has no crops. `among`: the crops to
    choose from; None for all."""
    sides = []
    for role in ("gallery", "probe"):
        rows = data.rows_with_id_role(role)
        rows = rows if among is None else np.intersect1d(rows, among)
        source = (
            "patients of ptb-xl with two sessions: shard --id-sources names others. To score labels, fit a "
            "model to them: omnilead fit"
        )
        require_crops(rows, data, f"id={role}", source)
        sides.append(rows)
    return sides
