"""Fine-tuning of a pre-trained encoder: for labels of any kind (downstream.tasks), or for patient
identification (ArcFace).

| | labels | identity |
|---|---|---|
| trained on | each half with its record's labels; unknown ones are ignored | each half with its patient, or its record |
| validated on | AUROC, mean absolute error, C-index, or train.best | second half of a crop against all first halves |
| exported | encoder, linear layer, thresholds chosen in validation | encoder, without the class vectors |

Source: paper, sections "Fine-tuning" and "Datasets"; fairseq-signals tasks/ecg_identification.py.

What differs between kinds of labels is in downstream.tasks.kinds.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from pyarrow import parquet
from torch import Tensor, nn

from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.engine.data.augmenter import to_device
from omnilead.engine.data.leakage import refuse_leak
from omnilead.engine.data.loader import Batch, crop_order
from omnilead.engine.data.order import Selection
from omnilead.engine.data.seen import seen_notes, to_bytes
from omnilead.engine.model import encoders
from omnilead.engine.model.config import ModelConfig, parse_settings
from omnilead.engine.model.encoder import Encoder, pool
from omnilead.engine.model.folder import SEEN, names_a_model
from omnilead.engine.model.input import Input
from omnilead.engine.model.window import HALF_S
from omnilead.engine.settings.errors import ConfigError, Facts
from omnilead.engine.settings.files import portable_spec, read_plugin_files
from omnilead.engine.settings.leads import describe_leads
from omnilead.engine.settings.run_files import LABELS, VALID_PREFIX
from omnilead.engine.training.arguments import Arguments, dtype_of, whole_crops
from omnilead.engine.training.config import micro_batch_and_passes
from omnilead.engine.training.distributed import Ranks, on_first_rank
from omnilead.engine.training.export import preprocessing_of
from omnilead.engine.training.optimizer import Groups
from omnilead.engine.training.run_folder import RunFolder
from omnilead.engine.training.task import (
    Between,
    TrainingTask,
    best_metric_and_sign,
    best_step_text,
    describe_encoder,
    start_for_card,
)
from omnilead.engine.training.validation import eval_mode, predict_on_ranks

from ..tasks.classifier import Classifier, lr_shares_and_weights
from ..tasks.config import FinetuneConfig
from ..tasks.kinds import KINDS, Kind, Targets, best_thresholds, join_selected
from ..tasks.labels import DX_ROLES_HINT, TaskLabels, read_task
from ..tasks.metrics import MEASURES, Array, identification_scores, measure
from ..tasks.people import unknown_patients_remark
from ..tasks.readout import PAPER_READOUT, Readout
from ..tasks.splits import SPLITS, TRAIN
from .start import (
    StartModel,
    choose_readout,
    drop_short_crops,
    read_start_model,
    select_leads,
    with_exact_weights,
)

# Those facts on the labels that may change when a run is resumed
LABELS_MAY_CHANGE = ("labels.unknown_patients", "labels.center", "labels.scale")


def make_targets(labels: TaskLabels) -> Targets:
    """Returns what a model learns from the labels; raises ConfigError if they cannot be learnt."""
    task = labels.task
    name, balanced = labels.name or "data.datasets", task.class_weights == "balanced"
    kind = KINDS[task.kind]
    return kind.make_targets(labels.y, labels.y_of("train"), labels.classes, name, balanced)


def read_labels(config: FinetuneConfig, datasets: Sequence[Dataset]) -> TaskLabels:
    labels = read_task(config.task, datasets, config.data.where)
    columns = labels.table.column_names if labels.table else []
    if config.task.folds and ("fold" not in columns or not labels.task.folds):
        raise ConfigError(
            "task.folds would be ignored, since the label table has no column `fold` or "
            f"task.split={config.task.split} does not use it: leave task.folds out"
        )
    return labels


def read_checked_labels(
    config: FinetuneConfig, datasets: Sequence[Dataset], ranks: Ranks
) -> TaskLabels:
    """Returns the labels. If the datasets' roles split them, refuses leakage between the datasets,
    as the roles of each dataset were drawn separately. All ranks call it together."""
    labels = read_labels(config, datasets)
    if labels.is_split_by_role:
        trained, held_out = [], []
        for split_N in labels.split:
            trained.append(np.flatnonzero(split_N == TRAIN))
            held_out.append(np.flatnonzero(split_N > TRAIN))
        on_first_rank(ranks, partial(refuse_leak, datasets, trained, held_out))
    return labels


class HeldOutCrops(NamedTuple):
    """The crops on which validation measures the model."""

    crops: list[tuple[Dataset, int]]
    y: Array  # labels [N, K]; for identity, patients [N]
    windows_N: Array  # number of windows of each crop


@dataclass(eq=False, kw_only=True)
class FinetuneTask(TrainingTask):
    settings = FinetuneConfig
    exports_best = True
    config: FinetuneConfig
    keys: tuple[str, ...] = (
        "step",
        "crops_seen",
        "epoch",
        "loss",
        "accuracy",
        "lr",
        "grad_norm",
        "crops_per_s",
        "data_wait_pct",
        "mfu",
        "skipped_steps",
        "memory_gb",
    )
    kind: Kind
    labels: TaskLabels
    label_facts: Facts
    start: StartModel
    architecture: ModelConfig
    weights: dict[str, Tensor] | None  # weights with which the encoder begins; None: random weights
    halves: list[Array]  # for each dataset, the number of halves (of 5 s) of each crop
    targets: Targets
    readout: Readout
    held_out: HeldOutCrops
    encoder: nn.Module | None  # None: the authors' encoder (architecture.encoder is "")
    # thresholds of the classes, from the last validation
    thresholds: list[float] = field(default_factory=list)

    @classmethod
    def prepare(cls, config: FinetuneConfig, datasets: Sequence[Dataset], ranks: Ranks) -> Self:
        kind = KINDS[config.task.kind]
        all_labels = read_checked_labels(config, datasets, ranks)
        best = best_metric_and_sign(config.train.best, validation_metrics(all_labels))
        start = read_start_model(config.start, config.code)
        labels = drop_short_crops(all_labels, datasets, start.input)
        architecture = config.tuned_architecture(start.model)
        weights = select_leads(start, config) if start.weights else None
        model_input = replace(
            start.input, leads=config.augment.output_leads, seen_leads=config.augment.seen_leads
        )
        halves = [dataset.column("halves") for dataset in datasets]
        selection = training_selection(labels, datasets, model_input)
        targets = make_targets(labels)
        readout = choose_readout(start, config, labels)
        held_out = held_out_crops(config, datasets, labels, model_input, halves)
        remarks = [
            *labels.remarks,
            split_remark(labels),
            *targets.remarks,
            *leakage_remarks(start, datasets, labels),
            *validation_remarks(kind, labels, held_out),
        ]
        kept = {LABELS: parquet_bytes(labels.table)} if labels.table else {}
        if names_a_model(config.start):
            kept[SEEN] = to_bytes(start.seen)
        code = read_plugin_files(config.plugin_settings, config.run, start.code)
        encoder, flops_per_crop = own_encoder_and_flops(config, architecture, start, model_input)
        return cls(
            config=config,
            datasets=datasets,
            ranks=ranks,
            best=best,
            selection=selection,
            flops_per_crop=flops_per_crop,
            input=model_input,
            windows=0 if model_input.uses_stored_halves else int(model_input.count_windows()),
            remarks=remarks,
            code=code,
            kept_files=kept,
            kind=kind,
            labels=labels,
            label_facts=all_labels.resume_facts,
            start=start,
            architecture=architecture,
            weights=weights,
            halves=halves,
            targets=targets,
            readout=readout,
            held_out=held_out,
            encoder=encoder,
        )

    @property
    def identifies(self) -> bool:
        return self.kind.name == "identity"

    def may_change(self, fact: str) -> bool:
        """Returns True for facts that may change when a run is resumed. `labels.definition` is
        one: it repeats the settings of the task, which are compared on their own."""
        return fact in LABELS_MAY_CHANGE or fact.startswith("labels.definition.")

    def resume_facts(self) -> Facts:
        """Returns the facts that must not change when a run is resumed. They include the name of
        the start model, and the architecture, which an export needs as well."""
        model = self.architecture
        architecture = asdict(model) | {"encoder": portable_spec(model.encoder)}
        if not model.causal:  # left out, as runs of earlier versions lack this setting
            del architecture["causal"]
        facts: Facts = super().resume_facts()
        facts["finetuning"] = {"architecture": architecture, "start": self.start.name}
        if self.readout != (PAPER_READOUT,):
            facts["finetuning"]["readout"] = "+".join(self.readout)
        facts["labels"] = dict(self.label_facts)
        if self.kind.has_scale:
            facts["labels"] |= {
                "center": self.targets.center_K.tolist(),
                "scale": self.targets.scale_K.tolist(),
            }
        # converted to JSON types, which the facts in a checkpoint have
        facts = json.loads(json.dumps(facts))
        if not self.input.uses_stored_halves:
            facts["input"] = self.input.preprocessing_fields
        if self.kind.name == "survival":  # the loss compares the patients of a micro-batch
            candidates = micro_batch_and_passes(self.config, self.ranks.world)[0] * self.ranks.world
            facts["train.micro_batch x ranks"] = candidates
        return facts

    def left_out_crops_text(self) -> str:
        return self.labels.left_out

    def explanations(self) -> Facts:
        differs = []
        frozen = self.config.encoder.frozen  # a frozen encoder has no dropout in training, either
        if encoders.has_dropout(self.encoder, self.architecture) and not frozen:
            differs.append("dropout is off")
        if augmentations := self.config.augment.descriptions:
            differs.append(f"signals are not augmented ({', '.join(augmentations)})")
        return {
            "chance": self._chance_metrics() if self.held_out.crops else {},
            "validation": differs,
        }

    def _chance_metrics(self) -> dict[str, float]:
        held_out = self.held_out
        chance = self.kind.chance_metrics_in_training(self.targets)
        of_held_out = self.kind.chance_metrics(held_out.y, held_out.windows_N, self.targets)
        return chance | {f"{VALID_PREFIX}{name}": value for name, value in of_held_out.items()}

    def model(self, generator: torch.Generator) -> nn.Module:
        encoder = self.encoder or encoders.build_encoder(
            self.architecture, mask=False, generator=generator
        )
        if self.weights is not None:
            encoder.load_state_dict(self.weights)
        if isinstance(encoder, Encoder) and self.architecture.feature_grad == 0:
            encoder.conv.requires_grad_(False)
        model = Classifier(
            encoder,
            self.config.task,
            self.targets.outputs,
            generator,
            self.config.encoder.frozen,
            self.readout,
            self.input.leads,
        )
        if self.config.task.head == "start":
            model.head.load_state_dict(self.start.head_weights)
        means = self.identifies and self.config.task.class_vectors == "means"
        if means and RunFolder(self.config.run).newest_checkpoint() is None:
            self._begin_at_means(model.to(self.ranks.device))
        return model

    def groups(self, model: Any) -> Groups:
        decay = self.config.encoder.layer_decay
        return lr_shares_and_weights(model, decay) if decay < 1 else super().groups(model)

    @torch.no_grad()
    def _begin_at_means(self, model: Classifier) -> None:
        """Sets each class vector to the mean unit embedding of its class, minus the mean of all
        embeddings, because that mean would dominate every class vector."""
        encoder = model.encoder.eval()
        crops, exists, classes = [], [], []
        for n, y in enumerate(self.targets.y):
            rows = self.labels.rows_of_dataset(n, "train")
            crops += [(self.datasets[n], row) for row in rows.tolist()]
            exists += self._existing_windows(self.halves[n][rows]).ravel().tolist()
            classes += y[rows].repeat(self.input.count_windows()).tolist()

        c_RD = self._outputs_on_ranks(crops, lambda x_RLT: pool(encoder(x_RLT.float())))
        exists_R = torch.tensor(exists)
        unit_RD = F.normalize(c_RD[exists_R], dim=-1)
        sum_CD = torch.zeros(model.head.weight.shape)
        sum_CD.index_add_(0, torch.tensor(classes)[exists_R], unit_RD - unit_RD.mean(0))
        model.head.weight.copy_(F.normalize(sum_CD, dim=-1))
        model.train()

    def _outputs_on_ranks(
        self, crops: list[tuple[Dataset, int]], forward: Any, between: Between = lambda: None
    ) -> Tensor:
        """Returns the outputs for the windows of all crops, computed by all ranks together. Each crop
        has as many windows as a full one: those that a short crop lacks are zeros."""
        return predict_on_ranks(
            self.config,
            self.ranks,
            crops,
            forward,
            lambda uv_BLT, halves_B: self.input.padded_windows(uv_BLT, halves_B).flatten(0, 1),
            windows=int(self.input.count_windows()),
            between=between,
        )

    def _existing_windows(self, halves_B: Array) -> Array:
        """Returns bool [B, S]: True for windows that the crop has, as short crops have fewer."""
        return np.asarray(
            np.arange(self.input.count_windows()) < self.input.count_windows(halves_B)[:, None]
        )

    def shown_signals(self, batch: Batch) -> Tensor:
        if self.input.uses_stored_halves:
            return batch.x_BSLT
        assert batch.keep_BSL1 is not None
        keep_BSL1 = to_device(batch.keep_BSL1, batch.x_BSLT.device)
        return self.input.cut_windows(
            whole_crops(batch.x_BSLT), batch.places.take(self.halves), keep_BSL1
        )

    def arguments(self, batch: Batch, step: int, total: int) -> Arguments:
        """Returns the arguments of the model: x_BSLT, the labels, a mask of the windows that exist,
        the weights of the labels, and the margin of ArcFace."""
        task, device = self.config.task, batch.x_BSLT.device
        y = batch.places.take(self.targets.y)
        exists_BS = self._existing_windows(batch.places.take(self.halves)).astype(np.float32)
        weights_BK = margin = None
        if self.targets.balanced_2K is not None:
            weights_BK = to_device(self.kind.label_weights(y, self.targets.balanced_2K), device)
        if self.identifies:
            share = min(1.0, step / (task.margin_warmup * total)) if task.margin_warmup else 1.0
            margin = torch.tensor(share * task.margin, dtype=torch.float64)
        x_BSLT = self.shown_signals(batch).to(dtype_of(self.config))
        return x_BSLT, to_device(y, device), to_device(exists_BS, device), weights_BK, margin

    def validate(self, engine: Any, between: Between) -> dict[str, float]:
        if not self.held_out.crops:
            return {}
        out_BSD = self._held_out_outputs(engine, len(self.held_out.crops), between)
        # compares the second window of each crop with the first windows of all crops
        if self.identifies:
            ids: Any = self.held_out.y
            first_BD, second_BD = out_BSD[:, :2].numpy().swapaxes(0, 1)
            score = identification_scores(first_BD, ids, second_BD, ids)
            return {"identification_accuracy": float(score["accuracy"])}
        windows_N = self.held_out.windows_N
        exists_BS = torch.arange(out_BSD.shape[1]) < torch.from_numpy(windows_N)[:, None]
        # each window counts as a sample, like the halves in the paper
        logits_RK = out_BSD[exists_BS]
        y_RK = np.repeat(self.held_out.y, windows_N, axis=0)
        targets_RK = torch.from_numpy(self.targets.standardise(y_RK))
        loss_RK, known_RK = self.kind.cell_losses_and_known(logits_RK, targets_RK)
        scores_RK = self.targets.to_label_scale(self.kind.scores(logits_RK).numpy())
        if self.kind.has_thresholds:
            self.thresholds = best_thresholds(y_RK, scores_RK)
        measured = measure(self.kind.name, y_RK, scores_RK, classes=self.labels.classes)
        return {"loss": float(loss_RK[known_RK].mean()), **measured}

    def chosen_values(self) -> Facts:
        return {"thresholds": self.thresholds} if self.thresholds else {}

    def _held_out_outputs(self, engine: Any, crops: int, between: Between = lambda: None) -> Tensor:
        """Returns the outputs for the first held-out crops, on the CPU: embeddings for identity,
        else logits."""
        count = int(self.input.count_windows())

        def forward(x_RLT: Tensor) -> Tensor:
            c_RD: Tensor = engine(x_RLT.unflatten(0, (-1, count)))
            out_RD: Tensor = c_RD if self.identifies else engine.module.logits(c_RD)
            return out_RD

        some = self.held_out.crops[:crops]
        with eval_mode(engine):
            out_RD = self._outputs_on_ranks(some, forward, between)
        return out_RD.view(-1, count, out_RD.shape[1])

    @staticmethod
    def exported_config(config: FinetuneConfig, state: Facts) -> Facts:
        task, labels = config.task, state["labels"]
        head = {"task": task.name, "kind": task.kind, "unit": task.unit, **labels}
        own = "" if task.head == "start" else portable_spec(task.head)
        head["definition"] = {**labels["definition"], "head": own}
        if KINDS[task.kind].has_thresholds:
            best = state.get("best") or {}
            head["thresholds"] = best.get("thresholds", [0.5] * len(labels["classes"]))
        made = state["finetuning"]
        return {
            "model": made["architecture"],
            "head": head,
            "readout": made.get("readout", PAPER_READOUT),
        }

    @staticmethod
    def card_title_and_lines(config: FinetuneConfig, state: Facts) -> tuple[str, list[str]]:
        best, task = state.get("best") or {}, config.task
        which = "the best by it" if best.get("step") == state["step"] else "the newest"
        model = parse_settings(ModelConfig, state["finetuning"]["architecture"], "model")
        head = portable_spec(task.head) or "a linear layer"
        outputs = f"Mean over time, then {head}: {task.kind} (config.json, head)."
        if task.head == "start":
            read = state["finetuning"].get("readout", PAPER_READOUT)
            outputs = f"Read out as {read}, then a linear layer that began as a probe: {task.kind}."
        if task.head == "attention":
            outputs = (
                f"Attention to all tokens with learnt queries: {task.kind} (config.json, head)."
            )
        if task.kind == "identity":
            outputs = "Mean over time as a unit vector, compared by cosine."
        unknown = unknown_patients_remark(state["labels"].get("unknown_patients", (0, 0)))
        return f"ECG {task.name}, fine-tuned with omnilead", [
            describe_encoder(model),
            f"Fine-tuned from {start_for_card(config.start)}, on leads "
            f"{describe_leads(config.augment.seen_leads)}.",
            outputs,
            f"{best_step_text(best)} These are the weights of step {state['step']:,}, {which}.",
            *[f"Labels: {remark}." for remark in unknown],
        ]

    @staticmethod
    def crop_uses(
        config: FinetuneConfig, state: Facts, run: Path, datasets: Sequence[Dataset]
    ) -> list[tuple[Dataset, Array, str]]:
        if (run / LABELS).exists():  # the user's own table may have changed since the training
            config = config.model_copy(
                update={"task": replace(config.task, labels=str(run / LABELS))}
            )
        architecture = parse_settings(ModelConfig, state["finetuning"]["architecture"], "model")
        model_input = Input.from_document(preprocessing_of(config, state), architecture.leads)
        labels = drop_short_crops(read_labels(config, datasets), datasets, model_input)
        order = crop_order(
            config.loader, datasets, training_selection(labels, datasets, model_input)
        )
        used = []
        for n, times in enumerate(order.times_drawn(state["crops_seen"])):
            used.append((datasets[n], times, "labelled"))
            if state.get("best"):
                used.append((datasets[n], labels.split[n] == SPLITS.index("valid"), "selected"))
        return used

    @staticmethod
    def exported_weights(config: FinetuneConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        if config.task.kind == "identity":
            return {name: w for name, w in weights.items() if name.startswith("encoder.")}
        if config.encoder.frozen and config.train.precision != "fp32":
            return with_exact_weights(config, weights)
        return weights


def own_encoder_and_flops(
    config: FinetuneConfig, architecture: ModelConfig, start: StartModel, model_input: Input
) -> tuple[nn.Module | None, float]:
    """Returns the encoder (None for the authors' encoder), and the FLOPs of a crop."""
    encoder, _ = encoders.encoder_and_token_count(
        architecture, False, dtype_of(config), config.train.seed, start.kind, model_input.samples
    )
    windows = int(model_input.count_windows())
    flops = encoders.encoder_flops(encoder, architecture, False, model_input.samples, windows)
    return encoder, flops / 3 if config.encoder.frozen else flops  # frozen: no backward pass


def held_out_crops(
    config: FinetuneConfig,
    datasets: Sequence[Dataset],
    labels: TaskLabels,
    model_input: Input,
    halves: Sequence[Array],
) -> HeldOutCrops:
    # Identification compares the first two windows of a crop
    needed = 2 if config.task.kind == "identity" else 1
    crops, y, windows = [], [], []
    for n, dataset in enumerate(datasets):
        rows = labels.rows_of_dataset(n, "valid")
        windows_N = model_input.count_windows(halves[n][rows])
        rows = rows[windows_N >= needed]
        crops += [(dataset, row) for row in rows.tolist()]
        y.append(labels.y[n][rows])
        windows.append(windows_N[windows_N >= needed])
    most = config.train.valid_batches * config.train.batch_crops
    return HeldOutCrops(crops[:most], np.concatenate(y)[:most], np.concatenate(windows)[:most])


def leakage_remarks(
    start: StartModel, datasets: Sequence[Dataset], labels: TaskLabels
) -> list[str]:
    held_out = [np.flatnonzero(split > TRAIN) for split in labels.split]
    return seen_notes(start.seen, datasets, held_out, labels.patients, "in validation or test")


def validation_remarks(kind: Kind, labels: TaskLabels, held_out: HeldOutCrops) -> list[str]:
    if not held_out.crops:
        return ["no validation crops: the newest checkpoint counts as the best"]
    if why := kind.why_no_best_step(held_out.y):
        return [f"{why}: the newest checkpoint counts as the best"]
    if not kind.has_thresholds:
        return []
    absent = join_selected(labels.classes, ~(held_out.y > 0).any(0))
    return [f"no positive examples in validation, threshold 0.5: {absent}"] if absent else []


def validation_metrics(labels: TaskLabels) -> tuple[str, ...]:
    challenge = ("challenge",) if labels.classes == CLASSES else ()
    return (*MEASURES[labels.task.kind], *challenge, "loss")


def training_selection(
    labels: TaskLabels, datasets: Sequence[Dataset], model_input: Input
) -> Selection:
    """Returns the crops to train on; raises ConfigError if a dataset has none."""
    rows = [labels.rows_of_dataset(n, "train") for n in range(len(datasets))]
    for dataset, some in zip(datasets, rows, strict=True):
        if not len(some):
            what = "a known label in the training split"
            if labels.role:
                what = f"{labels.role}=train"
            if model_input.shortest_ecg_s > HALF_S:
                what += f" and the {model_input.window_s:g} s that the model takes at once"
            why = f"{dataset.root.url} has no crop with {what}: nothing to learn from"
            if labels.role == "dx":
                why += f"; {DX_ROLES_HINT}"
            raise ConfigError(f"{labels.name or 'data.datasets'}: {why}{labels.left_out}")
    if not labels.role or labels.left_out:
        return Selection(rows=rows)
    role: Any = {labels.role: "train"}
    return Selection(**role, halves=2 if model_input.shortest_ecg_s > HALF_S else None)


def split_remark(labels: TaskLabels) -> str:
    """Returns a remark on what is learnt, and from how many crops. For example: rhythm is
    multiclass (each ECG has exactly one of them): AF, SR. Crops of 10 s: 800 to learn from, 100 to
    choose the best step by, 100 for the test, which training never sees"""
    counts = {}
    for split in SPLITS[1:]:
        counts[split] = sum(len(labels.rows_of_dataset(n, split)) for n in range(len(labels.y)))
    what = f"{labels.task.name} is {labels.task.kind} ({KINDS[labels.task.kind].meaning})"
    if 0 < len(labels.classes) <= 10:
        what += f": {', '.join(labels.classes)}"
    test = f"{counts['test']:,} for the test, which training never sees"
    if not counts["test"]:
        test = "none for a test: there is nothing to evaluate on"
    return (
        f"{what}. Crops of 10 s: {counts['train']:,} to learn from, {counts['valid']:,} to choose "
        f"the best step by, {test}"
    )


def parquet_bytes(table: pa.Table) -> bytes:
    content = io.BytesIO()
    parquet.write_table(table, content)
    return content.getvalue()
