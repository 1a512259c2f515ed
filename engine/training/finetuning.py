"""The fine-tuning task: diagnosis (26 classes, multi-label) or patient identification (ArcFace), from a pre-trained encoder.

| | diagnosis | identification |
|---|---|---|
| trained on | dx_role train: each half with its record's labels | id_role train: each half with its patient, or its record |
| validated on | dx_role valid: AUROC, or what train.best names | id_role valid: second half of a crop among all first halves |
| exported | encoder and linear layer | encoder; the class vectors are dropped |

Source: paper, sections "Fine-tuning" and "Datasets"; fairseq-signals tasks/ecg_identification.py. `start` is a run or model
folder; a pre-training YAML gives its architecture with random weights.
"""

import ast
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_tools.dataset import CLASSES, Dataset
from engine.common import ConfigError, describe_leads
from engine.config import Config, FinetuneConfig, load
from engine.data.leakage import find_leak, patient_ids
from engine.data.loader import Batch
from engine.evaluation import metrics
from engine.evaluation.run_files import VALID
from engine.model import inference
from engine.model.classifier import Classifier
from engine.model.config import ModelConfig, current_settings, validated
from engine.model.encoder import Encoder
from engine.model.encoders import (
    build_encoder,
    code_of,
    cost_per_crop,
    describe_encoder,
    drops_out,
    encoder_class,
    portable,
    prepared,
)
from engine.training.distributed import Ranks
from engine.training.task import TrainingTask, best_metric, best_step_text
from engine.training.validation import count_crops, dtype_of, eval_mode, pairs, predict_on_ranks, to_device

DIAGNOSED = 64  # crops
RANDOM = "random "  # before the settings, in the name of a start without weights


class FinetuneTask(TrainingTask):
    keys = (
        *("step", "crops_seen", "epoch", "loss", "accuracy", "lr", "grad_norm"),
        *("crops_per_s", "data_wait_pct", "mfu", "skipped_steps", "memory_gb"),
    )
    exports_best = True

    def __init__(self, config: FinetuneConfig, datasets: Sequence[Dataset], ranks: Ranks) -> None:
        self.config, self.ranks, self.diagnosis = config, ranks, config.head.task == "diagnosis"
        figures = ("auroc", "auprc", "challenge", "f_measure", "loss") if self.diagnosis else ("identification_accuracy",)
        self.best = best_metric(config.train.best, figures)
        role, column = ("dx", "dx_role") if self.diagnosis else ("identity", "id_role")
        self.roles = {role: "train"}
        if leak := find_leak(datasets, column):
            raise ConfigError(f"data.datasets: {leak}: build them with one --plan and --seed, or leave one out")
        for dataset in datasets:
            if not count_crops(dataset, self.roles):
                raise ConfigError(f"data.datasets: {dataset.root.url} has no crop with {role}=train: nothing to learn from")
        self.start = read_start(config.start, config.code)
        self.architecture = config.tuned(self.start.model)
        self.weights = self.start.weights and select_leads(self.start, config)
        self.halves = [dataset.column("halves") for dataset in datasets]
        valid: dict[str, Any] = {role: "valid"}
        held_out = [(n, row) for n, dataset in enumerate(datasets) for row in dataset.select(**valid).tolist()]
        if not self.diagnosis:
            held_out = [(n, row) for n, row in held_out if self.halves[n][row] == 2]
        held_out = held_out[: config.train.valid_batches * config.train.batch_crops]
        self.held_out = [(datasets[n], row) for n, row in held_out]
        if self.diagnosis:
            self.labels, self.remarks = diagnosis_labels(datasets)
            self.classes = len(CLASSES)
        else:
            self.patients, self.labels, self.classes = identity_labels(datasets)
            self.remarks = [f"{self.classes:,} identities"]
            self.held_out_ids = np.array([self.patients[n][row] for n, row in held_out], np.int64)
        self.held_out_labels = np.array([self.labels[n][row] for n, row in held_out])
        self.held_out_halves = np.array([self.halves[n][row] for n, row in held_out], np.int64)
        if not held_out:
            self.remarks = [*self.remarks, f"no crop with {role}=valid: the newest model counts as the best"]
        self.code = self.start.code | code_of({"augment.extra": config.augment.extra}, config.run)
        self.encoder, _ = prepared(self.architecture, False, dtype_of(config), config.train.seed, self.start.kind)
        self.flops_per_crop, self.kept_per_crop = cost_per_crop(self.encoder, self.architecture, local=False)

    def facts(self) -> dict[str, Any]:
        """The model it starts from: a resumed run must have the same one, and an export needs its architecture."""
        architecture = asdict(self.architecture) | {"encoder": portable(self.architecture.encoder)}
        facts = super().facts() | {"finetuning": {"architecture": architecture, "start": self.start.name}}
        plain: dict[str, Any] = json.loads(json.dumps(facts))  # as it comes back from a checkpoint
        return plain | ({"splits_before": self.start.splits} if self.start.splits else {})

    def saved_facts(self, state: dict[str, Any]) -> dict[str, Any]:
        """An earlier version saved settings of the model that no longer exist, and not those that were added since."""
        saved = super().saved_facts(state)
        # What cannot be read as settings stays as it is, and differs
        with suppress(ConfigError, LookupError, TypeError, AttributeError, SyntaxError, ValueError, RecursionError):
            architecture, start = saved["finetuning"]["architecture"], saved["finetuning"]["start"]
            if start.startswith(RANDOM):
                settings = ast.parse(start.removeprefix(RANDOM), mode="eval").body.keywords
                values = {setting.arg: ast.literal_eval(setting.value) for setting in settings}
                start = f"{RANDOM}{_current(values, self.start.model)}"
            architecture = json.loads(json.dumps(asdict(_current(architecture, self.architecture))))
            saved["finetuning"] = {"architecture": architecture, "start": start}
        return saved

    def explained(self) -> dict[str, Any]:
        augment = self.config.augment
        differs = ["dropout is off"] * drops_out(self.encoder, self.architecture)
        differs += ["no lead is masked and no noise added"] if augment.rlm or augment.kinds else []
        return {"chance": self._chance() if self.held_out else {}, "validation": differs}

    def _chance(self) -> dict[str, float]:
        if not self.diagnosis:
            _, counts = np.unique(self.held_out_ids, return_counts=True)
            same = float((counts / counts.sum()) @ (counts / counts.sum()))
            return {"accuracy": 1 / self.classes, f"{VALID}identification_accuracy": same}
        share_C = self.held_out_halves @ self.held_out_labels / self.held_out_halves.sum()
        return {f"{VALID}auroc": 0.5} | ({f"{VALID}auprc": float(share_C[share_C > 0].mean())} if share_C.any() else {})

    def model(self, generator: torch.Generator) -> nn.Module:
        encoder = self.encoder or build_encoder(self.architecture, mask=False, generator=generator)
        if self.weights is not None:
            encoder.load_state_dict(self.weights)
        if isinstance(encoder, Encoder) and self.architecture.feature_grad == 0:
            encoder.conv.requires_grad_(False)
        return Classifier(encoder, self.config.head, self.classes, generator)

    def arguments(self, batch: Batch, step: int) -> tuple[Tensor | None, ...]:
        x_BSLT, places = batch.x_BSLT, batch.places
        crops = list(zip(places.dataset.tolist(), places.row.tolist(), strict=True))
        labels = np.stack([self.labels[n][row] for n, row in crops])
        exists_BS = np.array([[self.halves[n][row] > 0, self.halves[n][row] > 1] for n, row in crops], np.float32)
        return x_BSLT.to(dtype_of(self.config)), to_device(labels, x_BSLT.device), to_device(exists_BS, x_BSLT.device)

    def validate(self, engine: Any) -> dict[str, float]:
        if not self.held_out:
            return {}
        out_BSD = self._outputs(engine, len(self.held_out))
        if not self.diagnosis:  # the second half of each crop among all first halves
            ids: Any = self.held_out_ids
            first_BD, second_BD = out_BSD.numpy().swapaxes(0, 1)
            score = metrics.identification(first_BD, ids, second_BD, ids)
            return {"identification_accuracy": float(score["accuracy"])}
        exists_BS = torch.arange(2) < torch.from_numpy(self.held_out_halves)[:, None]
        logits_RC = out_BSD[exists_BS]  # each half is a sample, as in the paper
        labels_RC = np.repeat(self.held_out_labels, self.held_out_halves, axis=0)
        loss = F.binary_cross_entropy_with_logits(logits_RC, torch.from_numpy(labels_RC))
        scores_RC = logits_RC.sigmoid().numpy()
        summary = metrics.summary(labels_RC > 0, scores_RC > 0.5, scores_RC)
        names = ("challenge", "auroc", "auprc", "accuracy", "f_measure")
        return {"loss": float(loss)} | {name: float(summary[name]) for name in names}

    def diagnostics(self, engine: Any, batch: Batch) -> dict[str, np.ndarray]:
        """Identification: cosines of held-out halves of the same patient and of different ones."""
        arrays = super().diagnostics(engine, batch)
        if self.diagnosis or not self.held_out:
            return arrays
        c_BSD = self._outputs(engine, DIAGNOSED)
        ids_R = torch.from_numpy(self.held_out_ids[:DIAGNOSED]).repeat_interleave(c_BSD.shape[1])
        same, other = pairs(c_BSD.flatten(0, 1), ids_R)
        return arrays | {"same_similarity": same, "other_similarity": other}

    def _outputs(self, engine: Any, crops: int) -> Tensor:
        """Logits (diagnosis) or embeddings of the first held-out crops, on the CPU."""

        def forward(x_RLT: Tensor) -> Tensor:
            c_RD: Tensor = engine(x_RLT.unflatten(0, (-1, 2)))
            out_RD: Tensor = engine.module.logits(c_RD) if self.diagnosis else c_RD
            return out_RD

        with eval_mode(engine):
            out_RD = predict_on_ranks(self.config, self.ranks, self.held_out[:crops], forward)
        return out_RD.view(-1, 2, out_RD.shape[1])

    @staticmethod
    def described(config: FinetuneConfig, state: dict[str, Any]) -> dict[str, Any]:
        classes = {"classes": list(CLASSES)} if config.head.task == "diagnosis" else {}
        return {"model": state["finetuning"]["architecture"], "head": {"task": config.head.task, **classes}}

    @staticmethod
    def card(config: FinetuneConfig, state: dict[str, Any]) -> tuple[str, list[str]]:
        best, diagnosis = state.get("best") or {}, config.head.task == "diagnosis"
        which = "the best by it" if best.get("step") == state["step"] else "the newest"
        return f"ECG {config.head.task}, fine-tuned with omnilead", [
            describe_encoder(validated(ModelConfig, current_settings(state["finetuning"]["architecture"]), "model")),
            f"Fine-tuned from {config.start}, on leads {describe_leads(config.augment.seen)}.",
            "Mean over time, then a linear layer to 26 classes, sigmoid."
            if diagnosis
            else "Mean over time as a unit vector, compared by cosine.",
            f"{best_step_text(best)} These are the weights of step {state['step']:,}, {which}.",
        ]

    @staticmethod
    def exports(config: FinetuneConfig, name: str) -> bool:
        return name.startswith("encoder.") or config.head.task == "diagnosis"


class Start(NamedTuple):
    """The model to begin from."""

    model: ModelConfig
    leads: tuple[int, ...]
    name: str
    splits: list[Any]  # of the datasets it was trained on
    weights: dict[str, Tensor] | None  # of its encoder; None: random
    kind: type[nn.Module]  # of its encoder
    code: dict[str, bytes]  # files that it brings


def _current(settings: dict[str, Any], now: ModelConfig) -> ModelConfig:
    return validated(ModelConfig, {"kernels": now.kernels} | current_settings(settings), "model")


def read_start(start: str, code: bool = False) -> Start:
    """`code`: run an encoder's own code, which the folder may hold."""
    if Path(start).suffix in (".yaml", ".yml"):
        config = load(start, kind=Config)
        brought = code_of({"model.encoder": config.model.encoder}, start)
        return Start(
            config.model, config.augment.output_leads, f"{RANDOM}{config.model}", [], None, encoder_class(config.model), brought
        )
    model = inference.load(start, code)
    weights = dict(model.encoder.state_dict())
    if isinstance(model.encoder, Encoder):
        weights.pop("mask_embedding", None)
    name = " ".join(str(model.history.get(key)) for key in ("step", "crops_seen", "datasets"))
    splits, settings = model.history.get("splits"), inference.config_of(model.config)
    splits = splits if isinstance(splits, list) else []
    return Start(settings, model.input.leads, name, splits, weights, type(model.encoder), model.code)


def select_leads(start: Start, config: FinetuneConfig) -> dict[str, Tensor]:
    """The encoder's weights for the leads of this fine-tuning: the output is the same as with zeros for the other leads."""
    assert start.weights is not None
    had, leads, setting = list(start.leads), list(config.augment.output_leads), f"augment.leads={config.augment.leads!r}"
    if not set(leads) <= set(had):
        trained = f"start={config.start} was trained on {describe_leads(had)} only"
        raise ConfigError(f"{setting}: {trained}: choose among them, with augment.padded=false")
    if leads == had:
        return start.weights
    select: Any = getattr(start.kind, "select_leads", None)
    if select is None:
        raise ConfigError(
            f"{setting}: {start.model.encoder} cannot take fewer leads: use augment.padded=true: the others are zeros"
        )
    chosen: dict[str, Tensor] = select(start.weights, [had.index(lead) for lead in leads], len(had))
    return chosen


def diagnosis_labels(datasets: Sequence[Dataset]) -> tuple[list[np.ndarray], list[str]]:
    """Labels of every crop [crops, 26], and a remark on classes without positive examples."""
    labels = [dataset.labels.astype(np.float32) for dataset in datasets]
    positives = np.sum([labels[n][d.select(dx="train")].sum(0) for n, d in enumerate(datasets)], 0)
    if not positives.any():
        raise ConfigError(f"data.datasets: no crop with dx=train of {datasets[0].root.url} has a scored diagnosis")
    absent = [name for name, n in zip(CLASSES, positives, strict=True) if not n]
    return labels, [f"no positive examples in training: {', '.join(absent)}"] if absent else []


def identity_labels(datasets: Sequence[Dataset]) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """By dataset, the patient of every crop and its class (arbitrary if not trained on); the number of classes."""
    patients = patient_ids(datasets)
    trained = np.unique(np.concatenate([patients[n][d.select(identity="train")] for n, d in enumerate(datasets)]))
    return patients, [np.clip(np.searchsorted(trained, ids), 0, len(trained) - 1) for ids in patients], len(trained)
