"""Fine-tuning of a pre-trained encoder: for labels of any kind (engine.tasks), or for patient
identification (ArcFace).

| | labels | identity |
|---|---|---|
| trained on | each half with its record's labels; unknown ones are ignored | each half with its patient, or its record |
| validated on | AUROC, mean absolute error, or train.best | second half of a crop against all first halves |
| exported | encoder, linear layer, thresholds chosen in validation | encoder, without the class vectors |

Source: paper, sections "Fine-tuning" and "Datasets"; fairseq-signals tasks/ecg_identification.py.
`start` is a run or model folder; a pre-training YAML gives its architecture with random weights.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pyarrow import parquet
from torch import Tensor, nn

from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.engine.common import ConfigError, describe_leads
from omnilead.engine.config import Config, FinetuneConfig, load
from omnilead.engine.data.augmenter import FS_HZ
from omnilead.engine.data.loader import Batch
from omnilead.engine.evaluation import metrics
from omnilead.engine.inference import trained_model as inference
from omnilead.engine.inference.preprocess import DEFAULT_INPUT, Input
from omnilead.engine.model import encoders
from omnilead.engine.model.config import ModelConfig, validated
from omnilead.engine.model.encoder import Encoder, pool
from omnilead.engine.tasks import kinds
from omnilead.engine.tasks.classifier import Classifier
from omnilead.engine.tasks.labels import SPLITS, TaskLabels, read_task
from omnilead.engine.training.checkpoint import newest
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.files import LABELS, VALID
from omnilead.engine.training.task import TrainingTask, best_metric, best_step_text, start_text
from omnilead.engine.training.validation import (
    dtype_of,
    eval_mode,
    pairs,
    predict_on_ranks,
    to_device,
)

DIAGNOSED = 64  # crops


class FinetuneTask(TrainingTask):
    keys = (
        *("step", "crops_seen", "epoch", "loss", "accuracy", "lr", "grad_norm"),
        *("crops_per_s", "data_wait_pct", "mfu", "skipped_steps", "memory_gb"),
    )
    exports_best = True

    def __init__(self, config: FinetuneConfig, datasets: Sequence[Dataset], ranks: Ranks) -> None:
        self.config, self.ranks, self.kind, self.datasets = (
            config,
            ranks,
            config.task.kind,
            datasets,
        )
        labels = self.labels = read_task(config.task, datasets)
        measures = metrics.MEASURES.get(self.kind, ("identification_accuracy",))
        challenge = ("challenge",) * (labels.classes == CLASSES)
        self.best = best_metric(config.train.best, (*measures, *challenge, "loss"))
        trained = [labels.rows(n, "train") for n in range(len(datasets))]
        for dataset, rows in zip(datasets, trained, strict=True):
            if not len(rows):
                what = (
                    f"{labels.role}=train" if labels.role else "a known label in the training split"
                )
                raise ConfigError(
                    f"{labels.name or 'data.datasets'}: {dataset.root.url} has no crop with "
                    f"{what}: nothing to learn from"
                )
        self.roles = {labels.role: "train"} if labels.role else {"rows": trained}
        self.start = read_start(config.start, config.code)
        self.architecture = config.tuned(self.start.model)
        self.weights = self.start.weights and select_leads(self.start, config)
        self.input = replace(
            self.start.input, leads=config.augment.output_leads, seen=config.augment.seen
        )
        self.halves = [dataset.column("halves") for dataset in datasets]
        held_out = [
            (n, row) for n in range(len(datasets)) for row in labels.rows(n, "valid").tolist()
        ]
        if self.kind == "identity":
            held_out = [(n, row) for n, row in held_out if self.halves[n][row] == 2]
        held_out = held_out[: config.train.valid_batches * config.train.batch_crops]
        self.held_out = [(datasets[n], row) for n, row in held_out]
        self.remarks: list[str] = [*labels.remarks, split_remark(labels)]
        self.center_K, self.scale_K = np.zeros(1), np.ones(1)
        self.balanced_2K: np.ndarray | None = None
        self.thresholds: list[float] = []  # from the last validation
        if self.kind == "identity":
            self.y, self.outputs = identity_classes(labels)
            self.remarks.append(f"{self.outputs:,} identities")
        else:
            self._use_labels(labels)
        self.held_out_y = np.array(
            [labels.y[n][row] for n, row in held_out]
        )  # of identity: patients
        self.held_out_halves = np.array([self.halves[n][row] for n, row in held_out], np.int64)
        if not held_out:
            self.remarks.append("no validation crops: the newest checkpoint counts as the best")
        elif self.kind in kinds.WITH_THRESHOLDS:
            absent = named(labels, ~(self.held_out_y > 0).any(0))
            self.remarks += (
                [f"no positive examples in validation, threshold 0.5: {absent}"] if absent else []
            )
        if labels.table:
            parquet.write_table(labels.table, table := io.BytesIO())
            self.kept = {LABELS: table.getvalue()}
        plugged = {"augment.extra": config.augment.extra, "task.head": config.task.head}
        self.code = encoders.code_of(plugged, config.run, self.start.code)
        self.encoder, _ = encoders.prepared(
            self.architecture, False, dtype_of(config), config.train.seed, self.start.kind
        )
        cost = encoders.cost_per_crop(self.encoder, self.architecture, local=False)
        self.flops_per_crop, self.kept_per_crop = (part * self.input.fs_hz / FS_HZ for part in cost)

    def _use_labels(self, labels: TaskLabels) -> None:
        """Sets targets and class weights; ConfigError if the labels cannot be learnt."""
        y_NK, name = labels.of("train"), labels.name or "data.datasets"
        self.y, self.outputs = labels.y, len(labels.classes)
        if unknown := named(labels, np.isnan(y_NK).all(0)):
            raise ConfigError(
                f"{name}: no crop of the training split has a known label in {unknown}: leave the "
                "column out"
            )
        if self.kind == "regression":
            self.center_K, self.scale_K = (
                np.nanmean(y_NK, 0, np.float64),
                np.nanstd(y_NK, 0, np.float64),
            )
            if equal := named(labels, self.scale_K == 0):
                raise ConfigError(
                    f"{name}: all known values of {equal} in the training split are equal: "
                    "nothing to learn"
                )
            self.y = [((y - self.center_K) / self.scale_K).astype(np.float32) for y in labels.y]
            return
        there_K = (y_NK > 0).any(0)
        if there_K.sum() < (2 if self.kind == "multiclass" else 1) or (
            self.kind == "binary" and not (y_NK == 0).any()
        ):
            only = "positives of " * (self.kind == "binary") + named(labels, there_K)
            has = f"only {only}" if there_K.any() else f"no positive of {named(labels, ~there_K)}"
            raise ConfigError(f"{name}: the training split has {has}: nothing to tell apart")
        self.remarks += (
            [f"no positive examples in training: {named(labels, ~there_K)}"]
            if not there_K.all()
            else []
        )
        if self.config.task.class_weights == "balanced":
            self.balanced_2K = kinds.balanced(self.kind, y_NK)

    def facts(self) -> dict[str, Any]:
        """Adds the starting model: a resumed run must start from the same one, and an export needs
        its architecture."""
        architecture = asdict(self.architecture) | {
            "encoder": encoders.portable(self.architecture.encoder)
        }
        facts = super().facts() | {
            "finetuning": {"architecture": architecture, "start": self.start.name}
        }
        scaled = (
            {"center": self.center_K.tolist(), "scale": self.scale_K.tolist()}
            if self.kind == "regression"
            else {}
        )
        facts["labels"] = self.labels.facts | scaled
        plain: dict[str, Any] = json.loads(json.dumps(facts))  # as a checkpoint returns it
        signals = {"fs_hz": self.input.fs_hz, "scale": self.input.scale}
        plain |= {"input": signals} if signals != DEFAULT_INPUT else {}
        return plain | ({"splits_before": self.start.splits} if self.start.splits else {})

    def explained(self) -> dict[str, Any]:
        augment = self.config.augment
        differs = ["dropout is off"] * encoders.drops_out(self.encoder, self.architecture)
        differs += ["no lead is masked and no noise added"] if augment.rlm or augment.kinds else []
        return {"chance": self._chance() if self.held_out else {}, "validation": differs}

    def _chance(self) -> dict[str, float]:
        if self.kind == "identity":
            _, counts = np.unique(self.held_out_y, return_counts=True)
            same = float((counts / counts.sum()) @ (counts / counts.sum()))
            return {"accuracy": 1 / self.outputs, f"{VALID}identification_accuracy": same}
        if self.kind == "regression":
            error = float(np.nanmean(np.abs(self.held_out_y - self.center_K)))
            return {f"{VALID}mae": error, f"{VALID}r2": 0.0}
        known_NK = self.held_out_halves[:, None] * ~np.isnan(self.held_out_y)
        share_K = (known_NK * (self.held_out_y > 0)).sum(0) / np.maximum(known_NK.sum(0), 1)
        if self.kind == "multiclass":
            return {f"{VALID}auroc": 0.5, f"{VALID}accuracy": float(share_K.max())}
        return {f"{VALID}auroc": 0.5} | (
            {f"{VALID}auprc": float(share_K[share_K > 0].mean())} if share_K.any() else {}
        )

    def model(self, generator: torch.Generator) -> nn.Module:
        encoder = self.encoder or encoders.build_encoder(
            self.architecture, mask=False, generator=generator
        )
        if self.weights is not None:
            encoder.load_state_dict(self.weights)
        if isinstance(encoder, Encoder) and self.architecture.feature_grad == 0:
            encoder.conv.requires_grad_(False)
        model = Classifier(encoder, self.config.task, self.outputs, generator)
        means = self.kind == "identity" and self.config.task.class_vectors == "means"
        if means and newest(Path(self.config.run)) is None:
            self._begin_at_means(model.to(self.ranks.device))
        return model

    @torch.no_grad()
    def _begin_at_means(self, model: Classifier) -> None:
        """Sets each class vector to the mean unit embedding of its class, minus the mean of all,
        which dominates every one."""
        places = [
            (n, row) for n in range(len(self.y)) for row in self.labels.rows(n, "train").tolist()
        ]
        crops, encoder = [(self.datasets[n], row) for n, row in places], model.encoder.eval()

        def embed(x_RLT: Tensor) -> Tensor:
            return pool(encoder(x_RLT.float()))

        c_RD = predict_on_ranks(self.config, self.ranks, crops, embed, model_input=self.input)
        there_R = torch.tensor([self.halves[n][row] > half for n, row in places for half in (0, 1)])
        class_R = torch.tensor([self.y[n][row] for n, row in places]).repeat_interleave(2)[there_R]
        unit_RD = F.normalize(c_RD[there_R], dim=-1)
        sum_CD = torch.zeros(model.head.weight.shape).index_add_(
            0, class_R, unit_RD - unit_RD.mean(0)
        )
        model.head.weight.copy_(F.normalize(sum_CD, dim=-1))
        model.train()

    def arguments(self, batch: Batch, step: int, total: int) -> tuple[Tensor | None, ...]:
        x_BSLT, places = batch.x_BSLT, batch.places
        crops = list(zip(places.dataset.tolist(), places.row.tolist(), strict=True))
        y = np.stack([self.y[n][row] for n, row in crops])
        exists_BS = np.array(
            [[self.halves[n][row] > 0, self.halves[n][row] > 1] for n, row in crops], np.float32
        )
        weights_BK = (
            None if self.balanced_2K is None else kinds.weights(self.kind, y, self.balanced_2K)
        )
        arrays = (
            None if array is None else to_device(array, x_BSLT.device)
            for array in (y, exists_BS, weights_BK)
        )
        task = self.config.task
        share = min(1.0, step / (task.margin_warmup * total)) if task.margin_warmup else 1.0
        margin = (
            torch.tensor(share * task.margin, dtype=torch.float64)
            if self.kind == "identity"
            else None
        )
        return self.input.scaled(x_BSLT).to(dtype_of(self.config)), *arrays, margin

    def validate(self, engine: Any) -> dict[str, float]:
        if not self.held_out:
            return {}
        out_BSD, y = self._outputs(engine, len(self.held_out)), self.held_out_y
        if self.kind == "identity":  # the second half of each crop among all first halves
            ids: Any = y
            first_BD, second_BD = out_BSD.numpy().swapaxes(0, 1)
            score = metrics.identification(first_BD, ids, second_BD, ids)
            return {"identification_accuracy": float(score["accuracy"])}
        exists_BS = torch.arange(2) < torch.from_numpy(self.held_out_halves)[:, None]
        logits_RK = out_BSD[exists_BS]  # each half is a sample, as in the paper
        y_RK = np.repeat(y, self.held_out_halves, axis=0)
        targets_RK = (
            ((y_RK - self.center_K) / self.scale_K).astype(np.float32)
            if self.kind == "regression"
            else y_RK
        )
        loss_RK, known_RK = kinds.cell_losses(self.kind, logits_RK, torch.from_numpy(targets_RK))
        scores_RK = kinds.scores(self.kind, logits_RK).numpy() * self.scale_K + self.center_K
        measured = metrics.measure(self.kind, y_RK, scores_RK, classes=self.labels.classes)
        if self.kind in kinds.WITH_THRESHOLDS:
            self.thresholds = kinds.thresholds(y_RK, scores_RK)
        return {"loss": float(loss_RK[known_RK].mean())} | measured

    def chosen(self) -> dict[str, Any]:
        return {"thresholds": self.thresholds} if self.thresholds else {}

    def diagnostics(self, engine: Any, batch: Batch) -> dict[str, np.ndarray]:
        """Identification: cosines of held-out halves of the same patient and of different ones."""
        arrays = super().diagnostics(engine, batch)
        if self.kind != "identity" or not self.held_out:
            return arrays
        c_BSD = self._outputs(engine, DIAGNOSED)
        ids_R = torch.from_numpy(self.held_out_y[:DIAGNOSED]).repeat_interleave(c_BSD.shape[1])
        same, other = pairs(c_BSD.flatten(0, 1), ids_R)
        return arrays | {"same_similarity": same, "other_similarity": other}

    def _outputs(self, engine: Any, crops: int) -> Tensor:
        """Logits (diagnosis) or embeddings of the first held-out crops, on the CPU."""

        def forward(x_RLT: Tensor) -> Tensor:
            c_RD: Tensor = engine(x_RLT.unflatten(0, (-1, 2)))
            out_RD: Tensor = c_RD if self.kind == "identity" else engine.module.logits(c_RD)
            return out_RD

        with eval_mode(engine):
            out_RD = predict_on_ranks(
                self.config, self.ranks, self.held_out[:crops], forward, model_input=self.input
            )
        return out_RD.view(-1, 2, out_RD.shape[1])

    @staticmethod
    def described(config: FinetuneConfig, state: dict[str, Any]) -> dict[str, Any]:
        task, best = config.task, state.get("best") or {}
        labels = state["labels"]
        head: dict[str, Any] = {"task": task.name, "kind": task.kind, "unit": task.unit, **labels}
        head["definition"] = head["definition"] | {"head": encoders.portable(task.head)}
        if task.kind in kinds.WITH_THRESHOLDS:
            head["thresholds"] = best.get("thresholds", [0.5] * len(labels["classes"]))
        return {"model": state["finetuning"]["architecture"], "head": head}

    @staticmethod
    def card(config: FinetuneConfig, state: dict[str, Any]) -> tuple[str, list[str]]:
        best, task = state.get("best") or {}, config.task
        which = "the best by it" if best.get("step") == state["step"] else "the newest"
        return f"ECG {task.name}, fine-tuned with omnilead", [
            encoders.describe_encoder(
                validated(ModelConfig, state["finetuning"]["architecture"], "model")
            ),
            f"Fine-tuned from {start_text(config.start)}, on leads "
            f"{describe_leads(config.augment.seen)}.",
            "Mean over time as a unit vector, compared by cosine."
            if task.kind == "identity"
            else f"Mean over time, then {encoders.portable(task.head) or 'a linear layer'}: {task.kind} (config.json, head).",
            f"{best_step_text(best)} These are the weights of step {state['step']:,}, {which}.",
        ]

    @staticmethod
    def exports(config: FinetuneConfig, name: str) -> bool:
        return name.startswith("encoder.") or config.task.kind != "identity"


class Start(NamedTuple):
    """The model that fine-tuning starts from."""

    model: ModelConfig
    input: Input  # sampling rate and scale of its signals; fine-tuning keeps them
    name: str
    code: dict[str, bytes]  # its plugged-in files
    splits: Sequence[Any] = ()  # of the datasets it was trained on
    weights: dict[str, Tensor] | None = None  # of its encoder; None: random
    kind: type[nn.Module] | None = None  # of its encoder; None: as `model` names it


def read_start(start: str, code: bool = False) -> Start:
    """`code`: allow running encoder code that the folder holds."""
    if Path(start).suffix in (".yaml", ".yml"):
        config = load(start, kind=Config)
        brought = encoders.code_of({"model.encoder": config.model.encoder}, start)
        model_input = Input(config.augment.output_leads, config.augment.seen)
        return Start(config.model, model_input, f"random {config.model}", code=brought)
    model = inference.load(start, code)
    weights = dict(model.encoder.state_dict())
    if isinstance(model.encoder, Encoder):
        weights.pop("mask_embedding", None)
    name = " ".join(str(model.history.get(key)) for key in ("step", "crops_seen", "datasets"))
    splits, settings = model.history.get("splits"), inference.config_of(model.config)
    splits = splits if isinstance(splits, list) else []
    return Start(settings, model.input, name, model.code, splits, weights, type(model.encoder))


def select_leads(start: Start, config: FinetuneConfig) -> dict[str, Tensor]:
    """The encoder's weights for these leads only: the output is the same as with the other leads
    set to zero."""
    assert start.weights is not None
    had, leads, setting = (
        list(start.input.leads),
        list(config.augment.output_leads),
        f"augment.leads={config.augment.leads!r}",
    )
    if not set(leads) <= set(had):
        trained = f"start={config.start} was trained on {describe_leads(had)} only"
        raise ConfigError(f"{setting}: {trained}: choose among them, with augment.padded=false")
    if leads == had:
        return start.weights
    select: Any = getattr(start.kind, "select_leads", None)
    if select is None:
        raise ConfigError(
            f"{setting}: {start.model.encoder} cannot take fewer leads: use augment.padded=true, "
            "which sets the others to zero"
        )
    chosen: dict[str, Tensor] = select(start.weights, [had.index(lead) for lead in leads], len(had))
    return chosen


def named(labels: TaskLabels, these_K: Any) -> str:
    return ", ".join(name for name, this in zip(labels.classes, these_K, strict=True) if this)


def split_remark(labels: TaskLabels) -> str:
    counts = [sum(len(labels.rows(n, split)) for n in range(len(labels.y))) for split in SPLITS[1:]]
    what = f"{labels.task.name}: {labels.task.kind}" + f" of {', '.join(labels.classes)}" * (
        0 < len(labels.classes) <= 10
    )
    shares = ", ".join(
        f"{count:,} {split}" for count, split in zip(counts, SPLITS[1:], strict=True)
    )
    return f"{what}; crops: {shares}" + ": nothing to evaluate on" * (not counts[-1])


def identity_classes(labels: TaskLabels) -> tuple[list[np.ndarray], int]:
    """By dataset, the class of every crop (arbitrary if not trained on); the number of classes."""
    trained = np.unique(labels.of("train"))
    return [np.clip(np.searchsorted(trained, ids), 0, len(trained) - 1) for ids in labels.y], len(
        trained
    )
