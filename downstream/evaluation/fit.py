"""Fits a head on a frozen model and writes both: what `omnilead fit` does.

fit(args)["metrics"]["auroc"]       # of cross-validation; args: the options of downstream.fit
"""

import os
import shutil
from argparse import Namespace
from pathlib import Path

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io.terminal import tell
from omnilead.engine.settings.commandline import writing
from omnilead.engine.settings.errors import Facts

from ..inference.commands import refuse_ranks
from .embedders import embedder_of
from .heads import Choice, fit_head, require_free, require_known, unrounded, write_head
from .plan import labels_to_probe, task_of_table
from .records import FITTED, left_out, records_of
from .results import EvalOptions, leakage, shown_input
from .vectors import require_cache

CLASSES_SHOWN = 12  # if there is one more, it is shown as well


def fit(args: Namespace) -> Facts:
    """`cross_validated` of the head that it writes, and `said`: sentences for the user."""
    refuse_ranks("a head is")
    args.model, args.labels, out = os.fspath(args.model), os.fspath(args.labels), Path(args.out)
    require_free(out, "--out")
    parts = out.with_name(f"{out.name}.parts")  # kept after an interruption
    require_cache(parts)
    dataset = Dataset.open(args.data, args.anonymous)
    embedder = embedder_of(args.model, args.model, args)
    model = unrounded(embedder, args.model, args.code)
    notes = shown_input(model, dataset, EvalOptions(leads=args.leads))[1]
    args.shown, args.widest = [args.leads], embedder.input
    labels = labels_to_probe(dataset, task_of_table(args.labels, args), FITTED)
    train = records_of(dataset, labels, FITTED, args)
    require_known(labels, train)
    notes += labels.remarks + left_out(dataset, args)
    notes += leakage(model, dataset, train.rows, labels.patients[0])
    for note in notes:
        tell(f"note: {note}")
    choice = Choice(args.reader, args.readout, args.leads, args.folds or 0)
    head = fit_head(embedder, dataset, labels, train, choice, parts)
    with writing(out, "--out"):
        write_head(head, model, out)
    shutil.rmtree(parts, ignore_errors=True)
    read_out = f"{args.model} read out as {'+'.join(head.readout)}"
    sentences = [f"{out}: {head.made} on {read_out}, leads {args.leads}, fitted on {head.people}"]
    cross_validated = head.document.get("cross_validated", {})
    sentences += [*head.said, *class_lines(cross_validated.get("classes", {}))]
    if len(labels.rows(0, "test")):
        sentences.append(
            f"the ECGs of test were not used: omnilead evaluate --model {out} --data {args.data} "
            f"--labels {args.labels} scores them"
        )
    return {**cross_validated, "said": sentences}


def class_lines(classes: Facts) -> list[str]:
    """How good it is for each of several classes, the most frequent first."""
    if len(classes) < 2:
        return []
    frequent = sorted(classes, key=lambda name: -classes[name]["positives"])
    lines = []
    shown = CLASSES_SHOWN + (len(frequent) == CLASSES_SHOWN + 1)
    for name in frequent[:shown]:
        positives, n, auroc = (classes[name][key] for key in ("positives", "n", "auroc"))
        score = "no AUROC" if auroc is None else f"AUROC {auroc:.3f}"
        lines.append(f"{name}: {score}, {positives:,} of {n:,} ECGs")
    if rarer := [classes[name]["auroc"] for name in frequent[shown:]]:
        aurocs = [auroc for auroc in rarer if auroc is not None]
        span = f"AUROC {min(aurocs):.3f} to {max(aurocs):.3f}" if aurocs else "no AUROC"
        lines.append(f"{len(rarer):,} rarer classes: {span}; config.json has each")
    return lines
