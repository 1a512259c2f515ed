"""Fits a head on a frozen model and writes both: what `omnilead fit` does.

scores, sentences = fit_scores_and_sentences(FitOptions("DATASET", "MODEL", labels="my.csv"))  # of cross-validation
"""

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omnilead.data_tools.dataset import Data
from omnilead.data_tools.io.terminal import tell
from omnilead.engine.data.datasets import open_together
from omnilead.engine.settings.commandline import report_write_errors
from omnilead.engine.settings.errors import Facts, Flag

from ..inference.commands import refuse_several_ranks
from ..tasks.config import TaskConfig, TaskKind
from ..tasks.labels import TaskLabels
from .embedders import EmbedOptions, load_embedder
from .heads import (
    FittedHead,
    HeadOptions,
    fit_head,
    full_precision_model,
    require_known_labels,
    require_new_folder,
    write_head,
)
from .plan import datasets_text, read_labels_to_probe, refuse_leak_between, task_of_table
from .records import FIT_SPLITS, ShownLeads, probed_records
from .results import EvalOptions, leakage_notes, limited_input_and_warnings
from .vectors import refuse_foreign_files

# This many classes get a line each, and all others share one. If only one is left, it gets its own
CLASSES_SHOWN = 12


@dataclass(frozen=True)
class FitOptions:
    """The options of `omnilead fit`. downstream.fit explains them."""

    data: Data | Sequence[Data]
    out: str
    model: str = "small"
    labels: str = ""
    columns: tuple[str, ...] = ()
    kind: TaskKind | None = None
    positive: str = ""
    leads: str = "12"
    reader: str = "linear"
    folds: int | None = None
    anonymous: bool = False
    embedding: EmbedOptions = field(default_factory=EmbedOptions)

    @property
    def head_options(self) -> HeadOptions:
        return HeadOptions(self.reader, self.embedding.readout, self.leads, self.folds or 0)


def fit_scores_and_sentences(options: FitOptions) -> tuple[Facts, list[str]]:
    """Fits a head to the label table of the options, and writes it with the model. Returns the
    scores of its cross-validation, and sentences for the user."""
    refuse_several_ranks("a head is")
    head, labels = fit_task(
        task_of_table(options.labels, options.columns, options.kind, options.positive), options
    )
    cross_validated = head.document.get("cross_validated", {})
    read_out = f"{options.model} read out as {'+'.join(head.readout)}"
    sentences = [
        f"{options.out}: {head.description} on {read_out}, leads {options.leads}, fitted on {head.people}",
        *head.sentences,
        *class_lines(cross_validated.get("classes", {})),
    ]
    if len(labels.rows_of_all_datasets("test")):
        sentences.append(
            f"the ECGs of test were not used: omnilead evaluate --model {shlex.quote(options.out)} --data "
            f"{datasets_text(options.data)} --labels {shlex.quote(options.labels)} scores them"
        )
    return cross_validated, sentences


def fit_task(task: TaskConfig, options: FitOptions) -> tuple[FittedHead, TaskLabels]:
    """Fits a head for any task, writes it with the model, and prints notes on the data. Returns the
    head and the labels that it was fitted to."""
    out = Path(options.out)
    require_new_folder(out, Flag("--out"))
    # The embeddings are saved in this folder. It stays after an interruption, so that the same
    # command can resume
    parts = out.with_name(f"{out.name}.parts")
    refuse_foreign_files(parts)
    data = open_together(options.data, options.anonymous)
    embedder = load_embedder(options.model, options.model, options.embedding)
    model = full_precision_model(embedder, options.model, options.embedding.code)
    notes = limited_input_and_warnings(model, data, EvalOptions(leads=options.leads))[1]
    shown = ShownLeads(embedder.input, (options.leads,))
    labels = read_labels_to_probe(data, task, FIT_SPLITS)
    refuse_leak_between(data, labels)
    train = probed_records(data, labels, FIT_SPLITS, shown)
    require_known_labels(labels, train)
    notes += labels.remarks + shown.left_out_notes(data)
    notes += leakage_notes(model, data, train.rows, labels.all_patients)
    for note in notes:
        tell(f"note: {note}")
    head = fit_head(embedder, data, labels, train, options.head_options, parts)
    with report_write_errors(out, Flag("--out")):
        write_head(head, model, out)
    shutil.rmtree(parts, ignore_errors=True)
    return head, labels


def class_lines(classes: Facts) -> list[str]:
    """Returns lines for the terminal with the AUROC of each class, the most frequent class first.
    Returns no line if there is only one class."""
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
