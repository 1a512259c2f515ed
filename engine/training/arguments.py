"""Makes the inputs of a training step.

inputs = PretrainInputs(config, datasets)      # once
arguments = inputs(batch, tau)                 # of engine.model.pretrainer.Pretrainer, each step
slice_arguments(arguments, 0, 8)            # those of a micro-batch
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from omnilead.data_tools.dataset import Dataset

from ..data.augmenter import crop_key, to_device
from ..data.loader import Batch
from ..data.patients import age_and_sex_targets, patient_ids
from ..model.draws import row_keys
from ..settings.counter import RandomStream, uniform
from .config import Config, RunConfig

# The arguments of a model: a tensor with one row per crop, a scalar tensor, or None if not given
Arguments = tuple[Tensor | None, ...]


def dtype_of(config: RunConfig) -> torch.dtype:
    if config.train.precision == "bf16":
        return torch.bfloat16
    return torch.float32


def slice_arguments(arguments: Arguments, start: int, stop: int) -> Arguments:
    """Returns the arguments for the crops from `start` to `stop` of a batch. Scalars are not cut,
    since they hold for all crops."""
    part_of_arguments: list[Tensor | None] = []
    for argument in arguments:
        if argument is not None and argument.ndim > 0:
            argument = argument[start:stop]
        part_of_arguments.append(argument)
    return tuple(part_of_arguments)


def whole_crops(x_BSLT: Tensor) -> Tensor:
    """Joins the two halves of each crop: returns x_BLT of 10 s."""
    return x_BSLT.transpose(1, 2).flatten(2)


class PretrainInputs:
    """Turns batches into arguments of engine.model.pretrainer.Pretrainer. Keeps the columns of the
    datasets' tables that the objective needs."""

    def __init__(self, config: Config, datasets: Sequence[Dataset]) -> None:
        self.seed = config.train.seed
        self.dtype = dtype_of(config)
        self.model_input = config.model_input
        self.views = config.pipeline.views
        objective = config.objective
        self.patients = patient_ids(datasets) if datasets and objective.needs_patient_ids else None
        self.attributes = age_and_sex_targets(datasets) if objective.attributes else []

    def __call__(self, batch: Batch, tau: Tensor | None = None) -> Arguments:
        x_BSLT = self.windows(batch)
        places, device = batch.places, x_BSLT.device
        windows = x_BSLT.shape[1]
        keys_BS = row_keys(self.seed, places.epoch, crop_key(places), windows)
        ids_B = attributes_B2 = None
        if self.patients:
            ids_B = to_device(places.take(self.patients), device)
        if self.attributes:
            attributes_B2 = to_device(places.take(self.attributes), device)
        return x_BSLT.to(self.dtype), to_device(keys_BS, device), tau, ids_B, attributes_B2

    def windows(self, batch: Batch) -> Tensor:
        """Returns x_BSLT: one window of each crop, or two adjacent ones, from a random place. If
        the loader gave two views of 5 s, returns the beginning of each view. Each window has its
        own masked leads."""
        x_BSLT, places = batch.x_BSLT, batch.places
        if batch.keep_BSL1 is None:  # the loader gave halves of 5 s, which are the windows
            return x_BSLT
        signals, crops, device = self.model_input, len(x_BSLT), x_BSLT.device
        keep_BSL1 = to_device(batch.keep_BSL1, device)
        if self.views == "window":
            window_counts = np.ones(2 * crops, np.int64)
            x_RSLT = signals.cut_windows(
                x_BSLT.flatten(0, 1), window_counts, keep_BSL1.flatten(0, 1)[:, None]
            )
            return x_RSLT.view(crops, 2, *x_RSLT.shape[2:])
        u = uniform(self.seed, RandomStream.PAIR, places.epoch, crop_key(places))
        start_B = to_device(u, device)
        return signals.cut_windows(whole_crops(x_BSLT), np.full(crops, 2), keep_BSL1, start_B)
