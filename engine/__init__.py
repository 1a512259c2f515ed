"""Verified datasets -> weights, scores, embeddings.

import engine
model = engine.load("RUN")                     # or RUN/model, or a copy of that folder, or s3://...
model.embed(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from engine.model.inference import TrainedModel

__version__ = "0.1.0"


def load(path: str | os.PathLike[str], code: bool = False, encoder: "type[nn.Module] | None" = None) -> "TrainedModel":
    """A model that was trained here or converted, in eval mode. torch is imported now and not with the package.

    If its encoder is not one of omnilead's, its code lies in the folder: `code=True` runs it, `encoder` gives the class.
    """
    from engine.model.inference import load

    return load(path, code, encoder)
