"""Exports a trained model to ONNX: x [batch, leads, samples] -> embedding [batch, D], logits and
scores [batch, K].

    omnilead convert to-onnx RUN OUT.onnx

The batch can have any size, and so can the segments, but for s4 and plugged-in encoders: their length
is the window's. x is the output of `TrainedModel.segments`. The metadata has `preprocessing` (leads in
order, rate, scale), `config` and `head` (classes, thresholds, unit of the scores) as JSON. The file
is written only if onnxruntime reproduces PyTorch's numbers at several sizes. Boosted trees are left
out.
"""

import json
import logging
import os
import warnings
from copy import deepcopy
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from omnilead.data_tools.io.terminal import tell
from omnilead.engine.model.encoder import pool
from omnilead.engine.model.folder import config_of
from omnilead.engine.settings.errors import ConfigError, blaming
from omnilead.engine.settings.files import plugin_file

from ..inference.trained_model import TrainedModel
from ..inference.trees import Trees
from ..tasks.readout import measures_signal

NEEDED_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
# (segments, their length in windows), on which each export is checked
CHECKED_SIZES = ((1, 1.0), (3, 1.0))
ANY_LENGTH_SIZES = ((2, 2.0), (5, 0.495))  # further sizes, for encoders that take any length
FIXED_LENGTH_ENCODERS = ("s4",)  # S4 cuts a segment into chunks, whose number the export fixes
MAX_DIFFERENCE = 1e-4  # largest difference allowed between onnxruntime's and PyTorch's outputs


class ExportedModel(nn.Module):
    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        self.model = deepcopy(model).cpu().float().eval()
        if isinstance(model.head, Trees):
            self.model.head = None
        # A plugged-in encoder is exported for one length: if the length may vary, torch.onnx takes
        # minutes for each padding operation of a deep network
        encoder = config_of(model.config).encoder
        self.any_length = plugin_file(encoder) is None and encoder not in FIXED_LENGTH_ENCODERS

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the embedding and, if there is a head, the logits and scores. The embedding is
        the mean over tokens, whatever the model's read-out."""
        c_RND = self.model.tokens(x)
        embedding = pool(c_RND)
        if self.model.head is None or self.model.head_info is None:
            return (embedding,)
        logits = self.model.logits_of_tokens(c_RND, x)
        return embedding, logits, self.model.head_info.scores(logits)


def to_onnx(model: TrainedModel, out: Path) -> float:
    """Writes the model to an ONNX file. Returns the largest difference between the outputs of
    onnxruntime and of PyTorch, which is relative for outputs above 1."""
    missing = [name for name in NEEDED_PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is not installed: pip install 'omnilead[onnx]'")
    if out.exists():
        raise ConfigError(f"{out}: exists: choose another name")
    if isinstance(model.head, Trees):
        tell(f"note: {out}: its boosted trees are left out: the file has the embedding only")
    elif model.head and measures_signal(model.readout):
        raise ConfigError(
            f"{out}: ONNX cannot measure rhythm and beats, which the head needs: fit a head that does not "
            "need them (`omnilead fit --readout mean+std`)"
        )
    outputs, temporary = ExportedModel(model), out.with_name(f".{out.name}.{os.getpid()}")
    try:
        write_onnx(outputs, temporary)
        differences = []
        for segments, length in CHECKED_SIZES + ANY_LENGTH_SIZES * outputs.any_length:
            samples = int(length * model.input.samples)
            shape = f"{out}: the exported model must take {segments} segments of {samples} samples"
            with blaming(shape):
                differences.append(largest_difference(outputs, temporary, segments, samples))
        worst = float(np.max(differences))  # NaN stays NaN
        if not worst <= MAX_DIFFERENCE:
            raise ConfigError(
                f"{out}: not written, since onnxruntime differs from PyTorch by {worst:.2g}, more than "
                f"{MAX_DIFFERENCE:g}"
            )
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return worst


def write_onnx(outputs: ExportedModel, path: Path) -> None:
    model = outputs.model
    samples = model.input.samples
    x = torch.zeros(2, len(model.input.leads), samples)
    names = ["embedding"] if model.head is None else ["embedding", "logits", "scores"]
    sizes = {0: torch.export.Dim("batch")}
    if outputs.any_length:
        sizes[2] = torch.export.Dim("samples", min=min(64, samples // 3))
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                outputs,
                (x,),
                input_names=["x"],
                output_names=names,
                dynamic_shapes={"x": sizes},
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # the exporter raises errors of many types
        raise ConfigError(
            f"torch.onnx cannot export this model: {type(error).__name__}: {error}".splitlines()[0]
        ) from error
    assert program is not None
    documents = {"preprocessing": model.preprocessing, "config": model.config}
    documents |= {"head": asdict(model.head_info)} if model.head_info else {}
    program.model.metadata_props.update(
        {name: json.dumps(document) for name, document in documents.items()}
    )
    program.save(path)


def largest_difference(outputs: ExportedModel, path: Path, segments: int, samples: int) -> float:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    draw = torch.Generator().manual_seed(segments)
    x = 0.3 * torch.randn(segments, len(outputs.model.input.leads), samples, generator=draw)
    with torch.inference_mode():
        expected = outputs(x)
    pairs = zip(expected, session.run(None, {"x": x.numpy()}), strict=True)
    worst = [
        np.abs(expected_output.numpy() - onnx_output).max()
        / max(1.0, float(expected_output.abs().max()))
        for expected_output, onnx_output in pairs
    ]
    return float(np.max(worst))
