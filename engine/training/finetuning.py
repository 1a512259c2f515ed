"""Fine-tuning as a task: diagnosis (26 classes, multi-label) or patient identification (ArcFace), from a pre-trained encoder.

| | diagnosis | identification |
|---|---|---|
| trained on | dx_role train: each half with its record's labels | id_role train: each half with its patient, or its record |
| validated on | dx_role valid: AUROC, or what train.best names | id_role valid: second half of a crop among all first halves |
| exported | encoder and linear layer | encoder; the class vectors are thrown away |

Source: paper, sections "Fine-tuning" and "Datasets"; fairseq-signals tasks/ecg_identification.py. The encoder is the one of a
model folder, or, if `start` is a pre-training YAML, of that architecture with random weights.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_tools.dataset import CLASSES, Dataset
from engine.common import ConfigError, describe_leads
from engine.config import Config, FinetuneConfig, load
from engine.data.augmenter import HALF
from engine.data.leakage import torn
from engine.data.loader import Batch
from engine.data.validation_split import patient_ids
from engine.evaluation import metrics
from engine.evaluation.run_files import VALID
from engine.model import inference
from engine.model.classifier import Classifier
from engine.model.config import flops_per_crop, kept_per_crop
from engine.model.encoder import Encoder
from engine.model.init_weights import initialise
from engine.training.distributed import Ranks
from engine.training.similarity import pairs
from engine.training.task import Task, chosen, told_best
from engine.training.validation import count_crops, dtype_of, eval_mode, predict_on_ranks, to_device

DIAGNOSED = 64  # crops
RANDOM = "random"  # weights of a start that is a YAML


class Finetuning(Task):
    keys = (
        *("step", "crops_seen", "epoch", "loss", "accuracy", "lr", "grad_norm"),
        *("crops_per_s", "data_wait_pct", "mfu", "skipped_steps", "memory_gb"),
    )
    exports_best = True

    def __init__(self, config: FinetuneConfig, datasets: Sequence[Dataset], ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.diagnosis = config.head.task == "diagnosis"
        figures = ("auroc", "auprc", "challenge", "f_measure", "loss") if self.diagnosis else ("identification_accuracy",)
        self.best = chosen(config.train.best, figures)
        role = "dx" if self.diagnosis else "identity"
        self.roles = {role: "train"}
        if told := torn(datasets, "dx_role" if self.diagnosis else "id_role"):
            raise ConfigError(f"data.datasets: {told}: build them with one --plan and --seed, or leave one out")
        for dataset in datasets:
            if not count_crops(dataset, self.roles):
                raise ConfigError(f"data.datasets: {dataset.root.url} has no crop with {role}=train: nothing to learn from")
        self.source, weights = read_start(config.start)
        self.architecture = config.tuned(self.source["model"])
        self.weights = weights and fitted(weights, self.source, config)
        valid: dict[str, Any] = {role: "valid"}
        held = [(d, row, n) for n, d in enumerate(datasets) for row in d.select(**valid).tolist()]
        if not self.diagnosis:
            held = [(d, row, n) for d, row, n in held if d.column("halves")[row] == 2]
        held = held[: config.train.valid_batches * config.train.batch_crops]
        self.held = [(d, row) for d, row, _ in held]
        where = tuple(np.array([(n, row) for _, row, n in held], np.int64).reshape(-1, 2).T)
        self.halves = [dataset.column("halves") for dataset in datasets]
        if self.diagnosis:
            self.of_crop, self.held_labels, self.remarks = diagnoses(datasets, where)
            self.classes = len(CLASSES)
        else:
            self.of_crop, self.held_labels, self.classes = identities(datasets, where)
            self.remarks = [f"{self.classes:,} identities"]
        if not self.held:
            self.remarks.append(f"no crop with {role}=valid: the newest model will count as the best")
        self.flops_per_crop = flops_per_crop(self.architecture, HALF, local=False)
        self.kept_per_crop = kept_per_crop(self.architecture, HALF)

    def facts(self) -> dict[str, Any]:
        """A resumed run must not begin from elsewhere, and its export must know its architecture."""
        told = {"architecture": asdict(self.architecture), "start": self.source["name"]}
        before = {"splits_before": self.source["splits"]} if self.source["splits"] else {}  # a run of before had none
        return {"finetuning": _plain(told)} | before

    def explained(self) -> dict[str, Any]:
        m, augment = self.architecture, self.config.augment
        dropouts = (m.dropout, m.attention_dropout, m.activation_dropout, m.input_dropout)
        differs = ["dropout is off"] if any(dropouts) else []
        differs += ["no lead is masked and no noise added"] if augment.rlm or augment.kinds else []
        return {"chance": self._chance() if self.held else {}, "validation": differs}

    def _chance(self) -> dict[str, float]:
        if not self.diagnosis:
            _, crops = np.unique(self.held_labels, return_counts=True)
            found = float((crops / crops.sum()) @ (crops / crops.sum()))
            return {"accuracy": 1 / self.classes, f"{VALID}identification_accuracy": found}
        labels_BC, halves_B = self.held_labels
        share_C = halves_B @ labels_BC / halves_B.sum()
        return {f"{VALID}auroc": 0.5} | ({f"{VALID}auprc": float(share_C[share_C > 0].mean())} if share_C.any() else {})

    def model(self, generator: torch.Generator) -> nn.Module:
        encoder = Encoder(self.architecture, mask=False)
        initialise(encoder, generator)
        if self.weights is not None:
            encoder.load_state_dict(self.weights)
        if self.architecture.feature_grad == 0:
            encoder.conv.requires_grad_(False)
        return Classifier(encoder, self.config.head, self.classes, generator)

    def arguments(self, batch: Batch, step: int) -> tuple[Tensor | None, ...]:
        x_BSLT, places = batch.x_BSLT, batch.places
        at = list(zip(places.dataset.tolist(), places.row.tolist(), strict=True))
        labels = np.stack([self.of_crop[d][row] for d, row in at])
        there_BS = np.array([[self.halves[d][row] > 0, self.halves[d][row] > 1] for d, row in at], np.float32)
        return x_BSLT.to(dtype_of(self.config)), to_device(labels, x_BSLT.device), to_device(there_BS, x_BSLT.device)

    def validate(self, engine: Any) -> dict[str, float]:
        if not self.held:
            return {}
        out_BSD = self._outputs(engine, self.held)
        return self._diagnosed(out_BSD) if self.diagnosis else self._identified(out_BSD)

    def diagnostics(self, engine: Any, batch: Batch) -> dict[str, np.ndarray]:
        """Of identification, how alike held-out halves are: of the same patient, of others."""
        found = super().diagnostics(engine, batch)
        if self.diagnosis or not self.held:
            return found
        c_BSD = self._outputs(engine, self.held[:DIAGNOSED])
        names_R = torch.from_numpy(self.held_labels[:DIAGNOSED]).repeat_interleave(c_BSD.shape[1])
        same, other = pairs(c_BSD.flatten(0, 1), names_R)
        return found | {"same_similarity": same, "other_similarity": other}

    def _outputs(self, engine: Any, crops: Sequence[tuple[Dataset, int]]) -> Tensor:
        """Logits, or embeddings, of both halves of each crop."""

        def forward(x_RLT: Tensor) -> Tensor:
            c_RD: Tensor = engine(x_RLT.unflatten(0, (-1, 2)))
            y_RD: Tensor = engine.module.logits(c_RD) if self.diagnosis else c_RD
            return y_RD

        with eval_mode(engine):
            y_RD = predict_on_ranks(self.config, self.ranks, crops, forward)
        return y_RD.view(-1, 2, y_RD.shape[1])

    def _diagnosed(self, logits_BSC: Tensor) -> dict[str, float]:
        """Each half that is there is a sample, as in the paper."""
        labels_BC, halves_B = self.held_labels
        there = torch.arange(2) < torch.from_numpy(halves_B.astype(np.int64))[:, None]
        logits_RC = logits_BSC[there]
        labels_RC = np.repeat(labels_BC, halves_B, axis=0)
        loss = F.binary_cross_entropy_with_logits(logits_RC, torch.from_numpy(labels_RC.astype(np.float32)))
        scores_RC = logits_RC.sigmoid().numpy()
        summary = metrics.summary(labels_RC, scores_RC > 0.5, scores_RC)
        names = ("challenge", "auroc", "auprc", "accuracy", "f_measure")
        return {"loss": float(loss)} | {name: float(summary[name]) for name in names}

    def _identified(self, c_BSD: Tensor) -> dict[str, float]:
        """The second half of each crop among all first halves."""
        found = metrics.identification(c_BSD[:, 0].numpy(), self.held_labels, c_BSD[:, 1].numpy(), self.held_labels)
        return {"identification_accuracy": float(found["accuracy"])}

    @staticmethod
    def described(config: FinetuneConfig, state: dict[str, Any]) -> dict[str, Any]:
        classes = {"classes": list(CLASSES)} if config.head.task == "diagnosis" else {}
        return {"model": state["finetuning"]["architecture"], "head": {"task": config.head.task, **classes}}

    @staticmethod
    def card(config: FinetuneConfig, state: dict[str, Any]) -> tuple[str, list[str]]:
        best, task = state.get("best") or {}, config.head.task
        which = "the best by it" if best.get("step") == state["step"] else "the newest"
        weights = f"{told_best(best)} These are the weights of step {state['step']:,}, {which}."
        head = "mean over time, then a linear layer to 26 classes, sigmoid"
        use = head if task == "diagnosis" else "mean over time as a unit vector, compared by cosine"
        seen = describe_leads(config.augment.seen)
        return f"ECG {task}, fine-tuned with omnilead", [f"Begun from {config.start}, on leads {seen}.", f"{use}.", weights]

    @staticmethod
    def exports(config: FinetuneConfig, name: str) -> bool:
        return name.startswith("encoder.") or config.head.task == "diagnosis"


def read_start(start: str) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    """What is known of the model to begin from: model, leads, name, splits; its encoder's weights, or none for random ones."""
    if Path(start).suffix in (".yaml", ".yml"):
        config = load(start, kind=Config)
        return {
            "model": config.model,
            "leads": config.augment.output_leads,
            "name": f"{RANDOM} {config.model}",
            "splits": [],
        }, None
    model = inference.load(start)
    weights = {name: w for name, w in model.encoder.state_dict().items() if name != "mask_embedding"}
    own = model.history
    name = " ".join(str(own.get(key)) for key in ("step", "crops_seen", "datasets"))
    told = {"model": inference.config_of(model.config), "leads": model.input.leads, "name": name}
    splits = own.get("splits")
    return told | {"splits": splits if isinstance(splits, list) else []}, weights


def fitted(weights: dict[str, Tensor], source: dict[str, Any], config: FinetuneConfig) -> dict[str, Tensor]:
    """The encoder's weights for the leads that are seen here. If it was trained on more, the first convolution keeps what is
    of those that remain: as if the others were zeros."""
    had, wanted = list(source["leads"]), list(config.augment.output_leads)
    if had == wanted:
        return weights
    if not set(wanted) <= set(had):
        raise ConfigError(
            f"augment.leads={config.augment.leads!r}: start={config.start} was trained on {describe_leads(had)} only: "
            "name leads among them, and augment.padded=false"
        )
    first = "conv.blocks.0.weight"
    by_lead = weights[first].unflatten(1, (-1, len(had)))
    return weights | {first: by_lead[:, :, [had.index(lead) for lead in wanted]].flatten(1).contiguous()}


Where = tuple[np.ndarray, ...]  # dataset and row of each held-out crop


def diagnoses(datasets: Sequence[Dataset], where: Where) -> tuple[list[np.ndarray], Any, list[str]]:
    """Labels of every crop; of the held-out ones, with their halves; and what a reader should know of the classes."""
    of_crop = [dataset.labels.astype(np.float32) for dataset in datasets]
    positives = np.sum([of_crop[n][d.select(dx="train")].sum(0) for n, d in enumerate(datasets)], 0)
    if not positives.any():
        raise ConfigError(f"data.datasets: no crop with dx=train of {datasets[0].root.url} has a scored diagnosis")
    unseen = [name for name, n in zip(CLASSES, positives, strict=True) if not n]
    remarks = [f"never positive in training, so never learned: {', '.join(unseen)}"] if unseen else []
    halves = [dataset.column("halves") for dataset in datasets]
    labels_BC = np.array([of_crop[n][row] for n, row in zip(*where, strict=True)], np.float32).reshape(-1, len(CLASSES))
    return of_crop, (labels_BC > 0, np.array([halves[n][row] for n, row in zip(*where, strict=True)], np.int64)), remarks


def identities(datasets: Sequence[Dataset], where: Where) -> tuple[list[np.ndarray], np.ndarray, int]:
    """The class of every crop, 0 where it is none that is trained on; patients of the held-out crops; how many classes."""
    patients = patient_ids(datasets)
    taught = np.unique(np.concatenate([patients[n][d.select(identity="train")] for n, d in enumerate(datasets)]))
    of_crop = [np.clip(np.searchsorted(taught, ids), 0, len(taught) - 1) for ids in patients]
    held = np.array([patients[n][row] for n, row in zip(*where, strict=True)], np.int64)
    return of_crop, held, len(taught)


def _plain(value: Any) -> Any:
    """As JSON would give it back."""
    return json.loads(json.dumps(value))
