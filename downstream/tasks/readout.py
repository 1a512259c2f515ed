"""Read-outs: the ways to turn an encoder's tokens, and the signal, into an embedding.

    readout = parse_readout("mean+std+rhythm")
    readout_width(readout, 128)                     # how many numbers that is, for an encoder of width 128
    read_out(readout, c_RND, x_RLT, leads)     # [R, width] float32; x_RLT: these leads in millivolts at 500 Hz

A read-out names one or more parts, joined by +:

    mean      the mean over tokens, as in the paper                               D numbers
    std       the standard deviation over tokens                                  D
    beats     the mean of the tokens at fixed times around the R peaks            len(BEAT_OFFSETS_S) * D
    rhythm    rhythm, amplitudes and residuals, measured in the signal            len(MEASUREMENTS)
    waveform  the median beat of each lead, of unit length over all leads         12 * BEAT

The mean of tokens drops what diagnosis needs: the rhythm, and the amplitude, which the encoder's
group norm removes. The last three are computed on the CPU, at about 900 segments
a second and core.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.ecg.mean_beat import (
    BEAT_SAMPLES,
    MEASUREMENTS,
    mean_beats,
    measurements,
    r_peaks,
)
from omnilead.data_tools.ecg.resampling import FS_HZ
from omnilead.engine.model.encoder import pool
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.leads import ALL_LEADS

PAPER_READOUT = "mean"
Readout = tuple[str, ...]  # names of the parts of a read-out, such as ("mean", "std")
# times relative to the R peak, in seconds: from the P wave to the end of the T wave
BEAT_OFFSETS_S = np.linspace(-0.3, 0.5, 9)
WIDTH_OF_PART: dict[str, Callable[[int], int]] = {
    "mean": lambda width: width,
    "std": lambda width: width,
    "beats": lambda width: len(BEAT_OFFSETS_S) * width,
    "rhythm": lambda width: len(MEASUREMENTS),
    "waveform": lambda width: len(LEADS) * BEAT_SAMPLES,
}


def parse_readout(text: str) -> Readout:
    """Returns the parts that a text such as mean+std names; raises ConfigError if they are unknown
    or repeated."""
    parts = tuple(text.split("+"))
    unknown = [part for part in parts if part not in WIDTH_OF_PART]
    if unknown or len(set(parts)) < len(parts):
        raise ConfigError(
            f"readout={text[:60]!r}: join one or more of these by +, each once: {', '.join(WIDTH_OF_PART)}"
        )
    return parts


def measures_signal(readout: Readout) -> bool:
    return not {"rhythm", "beats", "waveform"}.isdisjoint(readout)


def readout_width(readout: Readout, width: int) -> int:
    return sum(WIDTH_OF_PART[part](width) for part in readout)


def mean_slice(readout: Readout, width: int) -> slice:
    """Returns which slice of an embedding is the mean over tokens, by which patients are
    identified; the whole embedding if the read-out has no mean."""
    if "mean" not in readout:
        return slice(None)
    before = readout_width(readout[: readout.index("mean")], width)
    return slice(before, before + width)


def read_out(
    readout: Readout, c_RND: Tensor, x_RLT: Tensor, leads: Sequence[int] = ALL_LEADS
) -> Tensor:
    c_RND, signal = c_RND.float(), np.empty(0)
    if measures_signal(readout):
        signal = np.zeros((len(x_RLT), len(LEADS), x_RLT.shape[2]), np.float32)
        signal[:, list(leads)] = x_RLT.float().cpu()
    vectors = []
    for part in readout:
        if part == "mean":
            vectors.append(pool(c_RND))
        elif part == "std":
            vectors.append(c_RND.std(1, correction=0))
        elif part == "beats":
            vectors.append(_beat_tokens(c_RND, signal))
        else:
            measured = measurements(signal)
            if part == "waveform":
                measured = mean_beats(signal)[:, : len(LEADS) * BEAT_SAMPLES]
            vectors.append(torch.from_numpy(measured).to(c_RND.device))
    return torch.cat(vectors, 1)


def _beat_tokens(c_RND: Tensor, signal: np.ndarray) -> Tensor:
    """Returns for each of BEAT_OFFSETS_S the mean, over all beats, of the token at this time from
    the R peak; the mean of all tokens if no beat has a token there."""
    rows = []
    for c_ND, x_LT in zip(c_RND, signal, strict=True):
        samples = r_peaks(x_LT)[:, None] + BEAT_OFFSETS_S * FS_HZ
        token = np.floor(samples / x_LT.shape[1] * len(c_ND)).astype(int)
        times = []
        for beat_tokens in token.T:
            beat_tokens = beat_tokens[(beat_tokens >= 0) & (beat_tokens < len(c_ND))]
            times.append(
                c_ND[torch.from_numpy(beat_tokens)].mean(0) if len(beat_tokens) else c_ND.mean(0)
            )
        rows.append(torch.cat(times))
    return torch.stack(rows) if rows else c_RND.new_zeros(0, len(BEAT_OFFSETS_S) * c_RND.shape[2])
