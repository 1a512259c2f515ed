"""Validates during training: measures the loss on held-out crops, and patient identification.

ValidationLoss(config, datasets, ranks).measure(engine, between)     # the same crops, masks and negatives every time
PatientProbe(config, datasets, ranks).accuracy(engine, between)      # share of patients identified; needs no labels
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from omnilead.data_tools.dataset import Dataset

from ..data.batches import CropBatch, predict
from ..data.loader import Loader
from ..data.order import DatasetRows, OrderError, Selection
from ..data.patients import owner_and_known_of_rows, store_choice, validation_split
from ..data.where import where_mask
from ..model.encoder import pool
from ..model.objectives import all_gather_no_grad, sum_over_ranks, without_other_ranks, world_size
from ..settings.errors import ConfigError
from ..settings.metrics import COSINE_TIE
from .arguments import PretrainInputs, dtype_of
from .config import Config, DataConfig, RunConfig, count_candidates
from .distributed import Ranks, on_first_rank
from .task import Between

CROPS_PER_BATCH = 16  # number of crops that the encoder takes at a time
NOT_LOGGED = (
    "loss_diversity",
    "loss_features",
    "prob_perplexity",
    "code_perplexity",
    "masked",
    "masked_share",
)


@contextmanager
def eval_mode(engine: Any) -> Iterator[None]:
    """A context with the model in evaluation mode; all ranks call it. Running statistics, which a
    plugged-in encoder may have, are copied from rank 0 first, because checkpoints hold those of
    rank 0."""
    engine.eval()
    for buffer in engine.module.buffers() if world_size() > 1 else ():
        dist.broadcast(buffer, 0)
    try:
        yield
    finally:
        engine.train()


def training_selection(config: Config) -> Selection:
    """Returns the selection of crops on which pre-training trains."""
    data = config.data
    return Selection(**dict(data.train), halves=2, hold_out=data.hold_out, where=data.where)


def first_of_each_waveform(
    config: Config, datasets: Sequence[Dataset]
) -> tuple[list[np.ndarray], int]:
    """Returns (for each dataset, the rows of the crops that data.dedup trains on; the number of
    crops that it leaves out). Waveforms are compared by 64 bits, the checksums of their two parts.
    These determine a waveform's crc32c, so comparing that too would add nothing. The chance that
    any two of 10**7 different crops share their bits is 3 in 10**6."""
    rows: list[np.ndarray] = []
    waveforms = []
    for dataset in datasets:
        selected = DatasetRows.select(dataset, training_selection(config))
        rows.append(selected.row(np.arange(len(selected))))
        waveforms.append(dataset.column("waveform")[rows[-1]])
    waveform_N = np.concatenate(waveforms)
    is_first_N = np.zeros(len(waveform_N), bool)
    is_first_N[np.unique(waveform_N, return_index=True)[1]] = True
    ends = np.cumsum([len(rows_of_dataset) for rows_of_dataset in rows])
    kept_rows = []
    for dataset, rows_of_dataset, is_first in zip(
        datasets, rows, np.split(is_first_N, ends[:-1]), strict=True
    ):
        kept_rows.append(rows_of_dataset[is_first])
        if config.data.dedup and not is_first.any():
            raise ConfigError(
                f"data.dedup=true: all {len(rows_of_dataset):,} crops of {dataset.root.url} for pre-training are "
                "in the datasets before it too: leave this dataset out"
            )
    return kept_rows, int((~is_first_N).sum())


def choose_crops_on_first_rank(datasets: Sequence[Dataset], data: DataConfig, ranks: Ranks) -> None:
    """Chooses the held-out patients and the crops of data.where on rank 0, for all ranks. Ten
    million patient names take seconds of a core, and the ranks of a machine share its cores."""
    choices: list[tuple[Any, Any]] = [(data.hold_out, validation_split), (data.where, where_mask)]
    for dataset in datasets:
        for by, choose in choices:
            if by:
                store_choice(dataset, by, on_first_rank(ranks, partial(choose, dataset, by)))


def selected_rows(dataset: Dataset, selection: Selection) -> np.ndarray:
    """Returns the numbers of the rows that `selection` selects in the dataset."""
    try:
        rows = DatasetRows.select(dataset, selection)
    except OrderError:  # no row is selected
        return np.arange(0)
    return np.arange(len(rows)) if rows.numbers is None else rows.numbers


class ValidationLoss:
    """The loss on held-out crops. The attribute `crops` is the number of crops in a batch; 0 if
    there are too few to validate on."""

    def __init__(self, config: Config, datasets: Sequence[Dataset], ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        if config.data.hold_out:
            self.selection = replace(training_selection(config), held=True)
        else:
            data = config.data
            self.selection = Selection(**dict(data.valid), halves=2, where=data.where)
        counts = [len(selected_rows(dataset, self.selection)) for dataset in datasets]
        self.datasets = [dataset for dataset, count in zip(datasets, counts, strict=True) if count]
        contrasted = config.objective.contrast > 0
        largest = count_candidates(config, ranks.world) if contrasted else config.train.batch_crops
        self.crops = min(largest, sum(counts)) if sum(counts) > contrasted else 0
        self.batches = min(config.train.valid_batches, sum(counts) // max(self.crops, 1))
        self.inputs = PretrainInputs(config, self.datasets if self.crops else [])

    def count_trained_on(self) -> int:
        """Returns the number of validation crops that are also trained on."""
        shared = 0
        for dataset in self.datasets:
            trained = selected_rows(dataset, training_selection(self.config))
            shared += len(np.intersect1d(selected_rows(dataset, self.selection), trained))
        return shared

    def measure(self, engine: Any, between: Between) -> dict[str, float]:
        """Returns mean losses over at most train.valid_batches batches. Each rank takes whole
        batches, so the result depends neither on the number of ranks nor on the micro-batch. All
        ranks call the engine equally often, as ZeRO stage 3 requires."""
        settings = replace(
            self.config.loader,
            backend="torch",
            batch_crops=self.crops,
            micro_batch=None,
            weights=None,
        )
        share = math.ceil(self.batches / self.ranks.world)
        first = self.ranks.rank * share
        loader = Loader(
            settings,
            self.datasets,
            self.ranks.device,
            self.selection,
            step=first,
            reuse_batches=True,
        )
        sums: dict[str, Tensor] = {}
        try:
            with eval_mode(engine), torch.no_grad(), without_other_ranks():
                for number, (batch, _) in enumerate(islice(loader, share), first):
                    between()
                    losses = engine(*self.inputs(batch))
                    for name, value in losses.items():
                        # surplus batches count as 0; their loss is replaced, not multiplied by 0,
                        # because it may be NaN
                        counts = value if number < self.batches else torch.zeros_like(value)
                        sums[name] = sums.get(name, 0) + counts.float()
        finally:
            loader.close()
        total = sum_over_ranks(torch.stack(list(sums.values())))
        means = dict(zip(sums, (total / self.batches).tolist(), strict=True))
        return {name: mean for name, mean in means.items() if name not in NOT_LOGGED}


class PatientProbe:
    """Identifies patients (paper, section "Patient identification"): the first train.probe_patients
    that have a gallery and a probe crop. An embedding is the mean over the tokens of a crop's first
    window."""

    def __init__(self, config: Config, datasets: Sequence[Dataset], ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.pairs: list[tuple[Dataset, int, int]] = []  # (dataset, gallery row, probe row)
        for dataset in datasets:
            has_window = config.model_input.count_windows(dataset.column("halves")) > 0
            sides = []
            for role in ("gallery", "probe"):
                rows = dataset.select(identity=role)
                rows = rows[has_window[rows]]
                sides.append(
                    dict(zip(owner_and_known_of_rows(dataset, rows), rows.tolist(), strict=True))
                )
            gallery, probe = sides
            for patient, row in gallery.items():
                if patient in probe:
                    self.pairs.append((dataset, row, probe[patient]))
        self.pairs = self.pairs[: config.train.probe_patients]

    def accuracy(self, engine: Any, between: Between) -> float:
        crops = []
        for dataset, gallery_row, probe_row in self.pairs:
            crops += [(dataset, gallery_row), (dataset, probe_row)]
        encoder, signals = engine.module.encoder, self.config.model_input
        with eval_mode(engine):
            c_RD = predict_on_ranks(
                self.config,
                self.ranks,
                crops,
                lambda x_RLT: pool(encoder(x_RLT)),
                lambda uv_BLT, halves_B: signals.padded_windows(uv_BLT, halves_B)[:, 0],
                windows=1,
                between=between,
            )
        return identified_share(c_RD[::2], c_RD[1::2])


def identified_share(gallery_PD: Tensor, probe_PD: Tensor) -> float:
    """Returns the share of patients whose probe is nearest (by cosine) to their own gallery entry.
    A patient whose own entry ties with others for nearest counts as 1 / number of tied entries.
    Equals downstream.tasks.metrics.identification_scores."""
    gallery_PD = F.normalize(gallery_PD.double(), dim=-1)
    probe_PD = F.normalize(probe_PD.double(), dim=-1)
    cosine_PP = probe_PD @ gallery_PD.T
    own_P1 = cosine_PP.diagonal()[:, None]
    beaten_P = (cosine_PP > own_P1 + COSINE_TIE).any(1)
    tied_P = ((cosine_PP - own_P1).abs() <= COSINE_TIE).sum(1)
    chance_P = (~beaten_P).double() / tied_P
    return float(chance_P.mean())


def predict_on_ranks(
    config: RunConfig,
    ranks: Ranks,
    crops: Sequence[tuple[Dataset, int]],
    forward: Callable[[Tensor], Tensor],
    windows_of: Callable[[Tensor, np.ndarray], Tensor],
    windows: int,
    between: Between = lambda: None,
) -> Tensor:
    """Returns forward(x_RLT) of all crops, in order, on the CPU of every rank. `windows_of` returns
    x_RLT, with `windows` rows for each crop, from crops in microvolts and their numbers of halves.
    The ranks share the work. They call the model and `between` equally often, as ZeRO stage 3
    requires, so the last crop is repeated to fill up."""
    share = math.ceil(len(crops) / ranks.world)
    numbers = range(ranks.rank * share, (ranks.rank + 1) * share)
    own_crops = [crops[min(number, len(crops) - 1)] for number in numbers]
    dtype = dtype_of(config)
    halves: dict[str, np.ndarray] = {}
    for dataset, _ in own_crops:
        # the whole column is read; it is 10 MB for ten million crops
        if dataset.root.url not in halves:
            halves[dataset.root.url] = dataset.column("halves")

    def batches() -> Iterator[CropBatch]:
        for start in range(0, share, CROPS_PER_BATCH):
            between()
            batch = own_crops[start : start + CROPS_PER_BATCH]
            uv_BLT = np.stack([dataset.read(row) for dataset, row in batch])
            halves_B = np.array([halves[dataset.root.url][row] for dataset, row in batch])
            yield CropBatch(uv_BLT, halves_B)

    def cut_windows(uv_BLT: Tensor, halves_B: np.ndarray) -> Tensor:
        return windows_of(uv_BLT, halves_B).to(dtype)

    outputs = [y_RD for _, y_RD in predict(batches(), cut_windows, forward, ranks.device)]
    y_RD = torch.from_numpy(np.concatenate(outputs)).to(ranks.device)
    return all_gather_no_grad(y_RD)[: windows * len(crops)].cpu()
