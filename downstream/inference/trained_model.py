"""Load a trained model; compute embeddings and predictions of ECGs.

    model = omnilead.load("RUN")                                      # or RUN/model, a copy of that folder, s3://bucket/model
    model.embed(signal, fs_hz=250, leads=["II", "V1"], unit="mV")   # [L, T] -> [E]: its read-out; [B, L, T] -> [B, E]
    model.predict(signal, fs_hz=250, leads=["II", "V1"])            # after fine-tuning: {"AF": 0.93, ...} or {"age": 61.2}
    model.classes, model.thresholds, model.unit                     # the meaning of predictions: model.head_info
    model(x_RLT), model.logits(x_RLT), model.scores(x_RLT)          # for segments that are already preprocessed (model.input)
    cut_crops(signal_LT, 250, "II,V1", "mV", model.input)           # int16 [B, 12, 5000], their start times, halves and flags

An ECG in memory is cut by `data_tools.ecg.crops`, like the ECGs of a dataset, so a record has the same
embedding from either source.

A file is refused if its sha256 is not that in config.json (engine.model.folder). Weights are refused if
any are missing, unexpected or of another shape, except that the quantiser and the projections of
pre-training are ignored.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.ecg.crops import (
    IMPLAUSIBLE_AMPLITUDE,
    Crop,
    crop_count,
    crop_flags,
    implausible_amplitude_text,
    prepare_crop,
    samples_at_500_hz,
    signal_in_microvolts,
)
from omnilead.data_tools.ecg.record import EcgRecord, unit_name
from omnilead.data_tools.ecg.resampling import RATE_RANGE_HZ
from omnilead.data_tools.io.errors import Flag, ReadError
from omnilead.data_tools.io.plugins import load_plugin
from omnilead.engine.data.config import CROP, FS_HZ
from omnilead.engine.data.seen import unknown_seen_record
from omnilead.engine.model.config import parse_settings
from omnilead.engine.model.encoder import Encoder
from omnilead.engine.model.encoders import build_encoder
from omnilead.engine.model.folder import (
    CONFIG,
    PREPROCESSING,
    WEIGHTS,
    LoadError,
    config_of,
    describe_weight_mismatches,
    model_folder,
    read_document,
    read_plugin_files,
    read_seen,
    unreadable_weights_error,
)
from omnilead.engine.model.input import Input, SignalError
from omnilead.engine.model.window import HALF_S, SCALE_MEANINGS
from omnilead.engine.settings.errors import ConfigError, Facts, blaming, join_first_names
from omnilead.engine.settings.files import File
from omnilead.engine.settings.leads import describe_leads, leads_in_order
from omnilead.engine.settings.metrics import METRIC_OF, label_of
from omnilead.engine.settings.run_files import number_or_nan

from ..tasks.classifier import build_head, takes_tokens
from ..tasks.config import TaskKind
from ..tasks.kinds import KINDS, sensitivity_sentences
from ..tasks.readout import (
    PAPER_READOUT,
    Readout,
    measures_signal,
    parse_readout,
    read_out,
    readout_width,
)
from .trees import Trees

# A unit is refused if the median of the absolute samples is above the first limit, or if the median
# of the leads' peaks is above the second or below the third. ECGs peak at 0.1 to 10 mV
LARGE_MV, HUGE_MV, TINY_MV = 20.0, 100.0, 0.01
NOT_MEASURED = -32_768  # the value in int16 of a sample that was not measured
SEGMENTS_PER_BATCH = 64  # number of segments that are encoded at a time
NOT_FINITE_MESSAGE = "the model's outputs are not finite: its weights are broken"
CLASSES_IN_REPR = 8  # the repr of a model names at most this many classes
# This sampling rate is enough for what is usually read from an ECG: waves up to 150 Hz
SUFFICIENT_RATE_HZ = 300
ModuleClass = type[nn.Module] | None
Count = Annotated[int, Field(ge=1, le=2**24)]  # bounded, because config.json may come from anyone
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
# Leads in the order of the rows, in any form that engine.settings.leads.leads_in_order reads
Leads = str | Iterable[str]


STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


@dataclass(frozen=True, config=STRICT)
class CrossValidation:
    """The scores of a head in cross-validation, which config.json holds as `head.cross_validated`.
    Each ECG is scored by a head that was fitted without its patient."""

    folds: Count
    n: Count  # number of ECGs
    metrics: dict[Name, float | None]
    # 95 % intervals from a bootstrap over patients
    intervals: dict[Name, tuple[float | None, float | None]]
    # By class: the threshold that 95 % of the positives reach, and the specificity at this
    # threshold
    sensitive: dict[Name, tuple[Share, Share]] = field(default_factory=dict)
    # Outputs that were not tested, because a fold had too few labels for them
    left_out: tuple[Name, ...] = ()


@dataclass(frozen=True, config=STRICT)
class HeadInfo:
    """What the K outputs of a fine-tuned model mean: the section `head` of config.json."""

    task: str
    kind: TaskKind
    # Names of the K classes; in a binary task or a regression, of the label columns
    classes: tuple[Name, ...] = ()
    # In binary and multilabel tasks, a threshold for each class. A class is predicted if its
    # probability is above its threshold
    thresholds: tuple[Share, ...] = ()
    # When the Challenge's classes are scored, `thresholds` are 0.5, and these are the thresholds
    # that were chosen on validation data, one for each class
    chosen: tuple[Share, ...] = ()
    unit: str = ""  # the unit of the values of a regression, or of the times of a survival task
    # In a regression, the center and the scale of each output: value = logit * scale + center
    center: tuple[float, ...] = ()
    scale: tuple[Annotated[float, Field(ge=0)], ...] = ()
    # The numbers of nodes and of trees; None if the head is not boosted
    trees: tuple[Count, Count] | None = None
    cross_validated: CrossValidation | None = None
    # The lowest and the highest recording rate of the ECGs that the head was fitted on; () if they
    # are unknown
    source_hz: tuple[float, ...] = ()
    # The settings of the task, such as labels and split
    definition: Facts = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {"classes": len(self.classes)}
        for name in KINDS[self.kind].head_numbers:
            lengths[name] = len(getattr(self, name))
        if len(set(lengths.values())) > 1 or (self.kind == "identity") != (not self.classes):
            counted = ", ".join(f"{length} {name}" for name, length in lengths.items())
            raise ConfigError(f"{self.kind} with {counted}")
        if len(set(self.classes)) < len(self.classes):
            raise ConfigError("two classes have the same name: give each class its own")

    @property
    def score_sentences(self) -> list[str]:
        """Returns sentences that say how good the head was in cross-validation; none if it was not
        cross-validated."""
        found = self.cross_validated
        if found is None:
            return []
        scores = []
        for name, value in found.metrics.items():
            low, high = found.intervals.get(name, (None, None))
            if value is not None and name in METRIC_OF and METRIC_OF[name].in_brief:
                ends = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
                scores.append(f"{label_of(name)} {value:.3f}{ends}")
        how = f"in {found.folds} folds of patients" if found.folds > 1 else "of held-out patients"
        said = [
            f"cross-validated on {found.n:,} ECGs {how}: {', '.join(scores) or 'no score is defined'}"
        ]
        if found.left_out:
            said.append(
                f"not tested, since a fold had too few labels: {join_first_names(found.left_out, 5)}"
            )
        if self.thresholds:
            tested = [name for name in self.classes if name not in found.left_out]
            said += sensitivity_sentences(found.sensitive, tested)
        return said

    def scores(self, logits_RK: Tensor) -> Tensor:
        """Returns probabilities, values in `unit`, or risks, by the kind of task."""
        if KINDS[self.kind].has_scale:
            return logits_RK * logits_RK.new_tensor(self.scale) + logits_RK.new_tensor(self.center)
        return KINDS[self.kind].scores(logits_RK)


def _rates_text(rates_hz: Sequence[float]) -> str:
    """Returns the range of the rates, such as "100 to 500"."""
    low, high = min(rates_hz), max(rates_hz)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


class TrainedModel(nn.Module):
    """A trained model in eval mode. `digest` identifies its files. Axes of tensors: R segments of
    `input.window_s`, L leads, T samples, N tokens, D = `encoder.width`, K outputs, B ECGs."""

    encoder: Any  # an nn.Module with an attribute `width`

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module | None,
        config: Facts,
        preprocessing: Facts,
        digest: str = "",
    ) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.config, self.preprocessing, self.digest = config, preprocessing, digest
        self.input = Input.from_document(preprocessing, config_of(config).leads)
        self.head_info = parse_head_info(config)
        known = self.head_info or HeadInfo("", "identity")
        self.classes, self.thresholds, self.unit = known.classes, known.thresholds, known.unit
        # {name: content} of the files with custom code in the model folder
        self.code: dict[str, bytes] = {}
        # which ECGs the model was trained on, as in engine.data.seen
        self.seen = unknown_seen_record()
        self.readout = self.suitable_readout(config.get("readout", PAPER_READOUT))
        self.eval()

    def note_on_rates(self, rates_hz: Iterable[float]) -> str:
        """Returns a note if some ECGs were recorded at rates so different from those that the head
        was fitted on that its scores may not hold; "" if there are none."""
        if not (self.head_info and self.head_info.source_hz):
            return ""
        widest = min(
            SUFFICIENT_RATE_HZ,
            self.input.fs_hz,
            2 * (self.input.band_hz or (0, SUFFICIENT_RATE_HZ))[1],
        )
        low, high = (min(rate, widest) for rate in self.head_info.source_hz)
        other = [
            rate for rate in sorted(rates_hz) if not 0.8 * low <= min(rate, widest) <= 1.25 * high
        ]
        if not other:
            return ""
        return (
            f"ECGs recorded at {_rates_text(other)} Hz, while the head was fitted on ECGs of "
            f"{_rates_text(self.head_info.source_hz)} Hz: the slower lack fast waves, so its scores may "
            "not hold for these"
        )

    def __repr__(self) -> str:
        """Returns one sentence on the input and the output, in place of PyTorch's list of
        layers."""
        signals, head = self.input, self.head_info
        does = f"makes an embedding of {self.readout_width(self.readout)} numbers"
        if head and head.classes:
            names = join_first_names(head.classes, CLASSES_IN_REPR)
            unit = f" in {head.unit}" if head.unit else ""
            does = f"predicts {head.task} ({head.kind} of {len(head.classes)}: {names}{unit})"
        band = "" if signals.band_hz is None else " from {:g} to {:g} Hz".format(*signals.band_hz)
        return (
            f"TrainedModel: {does} from leads {describe_leads(signals.seen_leads)}, "
            f"{signals.window_s:g} s at a time at {signals.fs_hz:g} Hz{band} "
            f"({SCALE_MEANINGS[signals.scale]}); it converts other rates and units"
        )

    def suitable_readout(self, text: str) -> Readout:
        """Returns the parts of the read-out `text`, or of the model's own if `text` is "".
        ConfigError if the read-out does not suit the model."""
        parts = parse_readout(text) if text else self.readout
        if measures_signal(parts) and not self.input.uses_stored_halves:
            raise ConfigError(
                f"readout={text}: rhythm, beats and waveform need a model whose input is in millivolts at "
                f"{FS_HZ:g} Hz, 5 s at a time and without a band: use mean or mean+std"
            )
        return parts

    def readout_width(self, readout: Readout) -> int:
        """Returns the number of dimensions of an embedding with this read-out."""
        return readout_width(readout, self.encoder.width)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.encoder.parameters()).device
        return device

    @property
    def history(self) -> Facts:
        """Returns the facts about the training, `trained` in config.json; {} if there are none."""
        trained = self.config.get("trained")
        return trained if isinstance(trained, dict) else {}

    def with_random_weights(self, seed: int = 0) -> "TrainedModel":
        """Returns a model of the same architecture with random weights and without a head."""
        config = config_of(self.config)
        kind = type(self.encoder) if config.encoder else None
        encoder = build_encoder(config, generator=torch.Generator().manual_seed(seed), kind=kind)
        model = TrainedModel(encoder, None, self.config, self.preprocessing)
        return model.to(self.device, next(self.parameters()).dtype)

    def missing_leads_doubt(self) -> str:
        """Returns the reason why predictions are doubtful if some of the model's leads are missing;
        "" if the model was trained with random lead masking."""
        # `masked` is NaN for models of other programs or of older versions, which do not say if leads
        # were masked
        masked = number_or_nan(self.history.get("rlm"))
        if masked > 0:
            return ""
        trained = "was not trained" if masked == 0 else "is not known to have been trained"
        return (
            f"the model, or its head, {trained} with missing leads: measure it with `omnilead evaluate "
            "--leads`; `omnilead fit --leads`, or fine-tuning with augment.rlm=0.5, adapts it"
        )

    def tokens(self, x_RLT: Tensor) -> Tensor:
        """Returns the tokens c_RND of the encoder."""
        c_RND: Tensor = self.encoder(x_RLT.to(next(self.encoder.parameters()).dtype))
        return c_RND

    def pool_tokens(self, x_RLT: Tensor) -> Tensor:
        """Returns embeddings c_RD in float32: the mean over the tokens, as in the paper."""
        return self.read(x_RLT, (PAPER_READOUT,))

    def read(self, x_RLT: Tensor, readout: Readout) -> Tensor:
        """Returns embeddings in float32 with this read-out, whose parts are concatenated."""
        return read_out(readout, self.tokens(x_RLT), x_RLT, self.input.leads)

    def forward(self, x_RLT: Tensor) -> Tensor:
        """Returns the embeddings c_RD of the segments, as `pool_tokens` does."""
        return self.pool_tokens(x_RLT)

    def logits(self, x_RLT: Tensor) -> Tensor:
        """Returns the outputs of the head for these segments; ConfigError if the model has no
        head."""
        return self.logits_of_tokens(self.tokens(x_RLT), x_RLT)

    def logits_of_tokens(self, c_RND: Tensor, x_RLT: Tensor) -> Tensor:
        """Returns the outputs of the head for these tokens of the segments x_RLT; ConfigError if
        the model has no head."""
        if self.head is None:
            raise ConfigError(
                "this model has no head: logits and scores need a model that was fine-tuned on "
                "labels"
            )
        c = c_RND
        if isinstance(self.head, Trees) and not c_RND.isfinite().all():
            # Trees would take NaN for a value that was not measured
            raise ConfigError(NOT_FINITE_MESSAGE)
        if not takes_tokens(self.head):
            c = read_out(self.readout, c_RND, x_RLT, self.input.leads)
        y: Tensor = self.head(c.to(next(self.head.parameters()).dtype))
        return y.float()

    def scores(self, x_RLT: Tensor) -> Tensor:
        """Returns y_RK: the probabilities of `classes`, values in `unit`, or risks, by the kind of
        task."""
        logits_RK = self.logits(x_RLT)
        assert self.head_info is not None
        return self.head_info.scores(logits_RK)

    def segments(self, signal: Any, fs_hz: float, leads: Leads, unit: str = "mV") -> Tensor:
        """Returns the model's input x_RLT for one ECG [L, T]. Arguments: see `embed`."""
        return self._segments_of(cut_crops(signal, fs_hz, leads, unit, self.input))

    def _segments_of(self, ecg: "EcgCrops") -> Tensor:
        halves_B = np.array(ecg.halves)
        return self.input.windows(torch.from_numpy(ecg.uv_BLT), halves_B).to(self.device)

    @torch.inference_mode()
    def embed(
        self,
        signal: Any,
        fs_hz: float,
        leads: Leads,
        unit: str = "mV",
        readout: str = "",
    ) -> Tensor:
        """Returns the embedding [E] of one ECG [L, T], or the embeddings [B, E] of several [B, L,
        T]. ECGs are numpy arrays or torch tensors. An embedding is the mean over the segments of
        the ECG, which are 5 s long, or as long as the model's window.

        leads: the names of the rows, in any order. Other leads are zeros, for which random lead
        masking has prepared the model. readout: parts joined by +, such as "mean" or
        "mean+std+rhythm"; "" for the model's own. NaN (in int16 -32768) is a sample that was not
        measured. `cut_crops` says which ECGs are refused. Warns if an amplitude is not an ECG's.
        """
        parts = self.suitable_readout(readout)
        forward, width = partial(self.read, readout=parts), self.readout_width(parts)
        ecgs = self._cut_crops(signal, fs_hz, leads, unit)
        for warning in _amplitude_warnings(ecgs, unit):
            # The warning points at the caller: frame 3, since frame 2 is torch's decorator
            warnings.warn(warning, stacklevel=3)
        c_BD = self._mean_outputs(forward, width, ecgs)
        return c_BD if _is_batch(signal) else c_BD[0]

    @torch.inference_mode()
    def predict(
        self, signal: Any, fs_hz: float, leads: Leads, unit: str = "mV"
    ) -> dict[str, float] | list[dict[str, float]]:
        """Returns {class: probability}, {name: value in `self.unit`} or, in a survival task, {name: risk}
        for an ECG [L, T], or a list of these for several ECGs [B, L, T]. A prediction is the mean over the segments of the ECG,
        as `evaluate` scores a record. Arguments: see `embed`. Warns if an amplitude is not an
        ECG's. Also warns if leads are missing (not named, NaN or all zero), unless the model was
        trained with missing leads."""
        ecgs = self._cut_crops(signal, fs_hz, leads, unit)
        for warning in (*_amplitude_warnings(ecgs, unit), *self._missing_lead_warnings(ecgs)):
            # The warning points at the caller: frame 3, since frame 2 is torch's decorator
            warnings.warn(warning, stacklevel=3)
        y_BK = self._mean_outputs(self.scores, len(self.classes), ecgs)
        answers = [dict(zip(self.classes, y_K, strict=True)) for y_K in y_BK.tolist()]
        return answers if _is_batch(signal) else answers[0]

    def _cut_crops(self, signal: Any, fs_hz: float, leads: Leads, unit: str) -> list["EcgCrops"]:
        """Returns the crops of each ECG in `signal`, which holds one ECG or several."""
        leads = leads if isinstance(leads, str) else tuple(leads)
        ecgs = []
        for i, record in enumerate(signal if _is_batch(signal) else [signal]):
            try:
                ecgs.append(cut_crops(record, fs_hz, leads, unit, self.input))
            except SignalError as error:
                if _is_batch(signal):
                    raise SignalError(f"signal[{i}]: {error}") from None
                raise
        return ecgs

    def _missing_lead_warnings(self, ecgs: Sequence["EcgCrops"]) -> Iterator[str]:
        """Yields a warning if some crop lacks leads that the model uses, unless the model was
        trained with missing leads."""
        missing = []
        for ecg in ecgs:
            measured_L = np.asarray(ecg.uv_BLT.any(axis=2).all(axis=0))
            missing.append([lead for lead in self.input.seen_leads if not measured_L[lead]])
        which = sorted(set(chain.from_iterable(missing)))
        if which and (why := self.missing_leads_doubt()):
            yield f"without leads {describe_leads(which)}{_affected_ecgs_text(missing)}: {why}"

    def _mean_outputs(
        self, forward: Callable[[Tensor], Tensor], width: int, ecgs: Sequence["EcgCrops"]
    ) -> Tensor:
        """Returns [B, width]: the output of `forward` for each ECG, averaged over its segments."""
        if not ecgs:
            return torch.zeros(0, width, device=self.device)
        parts = [self._segments_of(ecg) for ecg in ecgs]
        y_RD = torch.cat([forward(x_RLT) for x_RLT in torch.cat(parts).split(SEGMENTS_PER_BATCH)])
        y_BD = torch.stack([part.mean(0) for part in y_RD.split([len(part) for part in parts])])
        if not y_BD.isfinite().all():
            raise ConfigError(NOT_FINITE_MESSAGE)
        return y_BD


def _is_batch(signal: Any) -> bool:
    """Returns True if the signal holds several ECGs."""
    return getattr(signal, "ndim", None) == 3


def _amplitude_warnings(ecgs: Sequence["EcgCrops"], unit: str) -> Iterator[str]:
    """Yields a warning if the amplitude of some of these crops is not that of an ECG."""
    if doubts := [ecg.doubt for ecg in ecgs if ecg.doubt]:
        where = _affected_ecgs_text([ecg.doubt for ecg in ecgs])
        yield f"{IMPLAUSIBLE_AMPLITUDE}{where}: {doubts[0]}: is unit={unit!r} right?"


def _affected_ecgs_text(concerns: Sequence[object]) -> str:
    """Returns the words for how many ECGs a warning concerns; "" if it concerns all. `concerns`:
    for each ECG, something true if the warning concerns it."""
    if all(concerns):
        return ""
    return f" in {sum(map(bool, concerns)):,} of {len(concerns):,} ECGs"


def load(
    path: File,
    code: bool = False,
    encoder: ModuleClass = None,
    head: ModuleClass = None,
) -> TrainedModel:
    """Loads a model. If the class of its encoder or head is your own, `code` lets the file in the
    model folder that defines the class run; `encoder` and `head` give the class instead."""
    with model_folder(path) as (folder, digest):
        document, preprocessing = (
            read_document(folder / CONFIG),
            read_document(folder / PREPROCESSING),
        )
        config, head_info = (
            config_of(document, folder / CONFIG),
            parse_head_info(document, folder / CONFIG),
        )
        readout = parse_model_readout(document, folder / CONFIG)
        if encoder and not config.encoder:
            raise LoadError(
                f"{folder}: encoder={encoder.__name__}: this model has the paper's encoder, which is built "
                "in: leave the argument out"
            )
        kind = encoder or class_in_folder(folder, config.encoder, code, "encoder")
        with torch.device("cpu" if config.encoder else "meta"):
            own: Any = build_encoder(config, kind=kind)
            top = _build_head(head_info, readout_width(readout, own.width))
        if head_info and (spec := str(head_info.definition.get("head") or "")):
            kind = head or class_in_folder(folder, spec, code, "head")
            options = head_info.definition.get("head_options") or {}
            top = build_head(spec, options, own.width, len(head_info.classes), kind=kind)
        _load_weights(folder / WEIGHTS, own, top)
        if isinstance(top, Trees):
            with blaming(str(folder / WEIGHTS)):
                top.require_valid(readout_width(readout, own.width))
        try:
            model = TrainedModel(own, top, document, preprocessing, digest)
        except ConfigError as error:
            raise LoadError(f"{folder / PREPROCESSING}: {error}") from None
        model.code, model.seen = read_plugin_files(folder), read_seen(folder)
        return model


def _build_head(head: HeadInfo | None, width: int) -> nn.Module | None:
    """Returns the head, still without its weights; None if the model has no head."""
    # A model of identification has none, because its class vectors are not exported
    if head is None or not head.classes:
        return None
    if head.trees:
        return Trees(*head.trees, len(head.classes))
    return nn.Linear(width, len(head.classes))


def class_in_folder(folder: Path, spec: str, code: bool, part: str) -> Any:
    """Returns the class of the encoder or head (`part`) from a file in the model folder; None if
    `spec` names a class that is built into omnilead. LoadError unless `code` allows to run the
    file."""
    file, _, name = spec.rpartition(":")
    if not file:
        return None
    give = f"omnilead.load(..., {part}={name})"
    if file not in read_plugin_files(folder):
        raise LoadError(
            f"{folder / file}: this file with the {part} is missing, or {CONFIG} does not list it: copy the "
            f"folder again, or use {give}"
        )
    if not code:
        raise LoadError(
            f"{folder}: the {part} is code in {file} of that folder, which runs only if you allow it: read "
            "the file, then use ",
            Flag("--code"),
            f", omnilead.load(..., code=True), or {give}",
        )
    with blaming(f"{folder / file}"):
        return load_plugin(f"{folder / file}:{name}")


def parse_model_readout(document: Mapping[str, Any], path: Path) -> Readout:
    """Returns the model's own read-out, `readout` in config.json."""
    try:
        return parse_readout(str(document.get("readout", PAPER_READOUT)))
    except ConfigError as error:
        raise LoadError(f"{path}: {error}") from None


def parse_head_info(document: Mapping[str, Any], path: Path | str = CONFIG) -> HeadInfo | None:
    """Returns the section `head` of config.json; None if there is none."""
    if (head := document.get("head")) is None:
        return None
    try:
        return parse_settings(HeadInfo, head, "head")
    except ConfigError as error:
        raise LoadError(f"{path}: head={str(head)[:60]}: {error}") from None


def _load_weights(path: Path, encoder: nn.Module, head: nn.Module | None) -> None:
    """Loads the weights of the encoder and the head from the file; LoadError if they do not fit."""
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {}
            for name in file.keys():  # noqa: SIM118 - no dictionary
                if name.startswith(("encoder.", "head.")):
                    shapes[name] = tuple(file.get_slice(name).get_shape())
            if isinstance(encoder, Encoder) and "encoder.mask_embedding" not in shapes:
                encoder.mask_embedding = None
            model = nn.ModuleDict({"encoder": encoder})
            if head:
                model["head"] = head
            expected = {name: tuple(weights.shape) for name, weights in model.state_dict().items()}
            if wrong := describe_weight_mismatches(shapes, expected):
                raise LoadError(f"{path}: the weights do not fit {CONFIG}: {wrong}")
            weights = {}
            for name, own in model.state_dict().items():
                tensor = file.get_tensor(name)
                if own.is_floating_point() and tensor.is_floating_point():
                    tensor = tensor.float()
                elif tensor.dtype != own.dtype:
                    kinds = f"{name} is {tensor.dtype}, not {own.dtype}"
                    raise LoadError(f"{path}: the weights do not fit {CONFIG}: {kinds}")
                weights[name] = tensor
            model.load_state_dict(weights, assign=True)
    except (SafetensorError, OSError) as error:
        raise unreadable_weights_error(path, error) from None


class EcgCrops(NamedTuple):
    """The crops of one ECG."""

    uv_BLT: np.ndarray  # int16 [B, 12, 5000]; 0 where nothing was measured
    start_s: tuple[float, ...]
    halves: tuple[int, ...]
    flags: tuple[tuple[str, ...], ...]  # the flags of each crop, as in a dataset
    # The text of data_tools.ecg.crops.implausible_amplitude_text: the typical amplitude if it is
    # implausible, else ""
    doubt: str


def cut_crops(signal: Any, fs_hz: float, leads: Leads, unit: str, wanted: Input) -> EcgCrops:
    """Returns the crops of one ECG [L, T], cut from its start like those of a dataset. A remainder of
    5 s or more becomes a crop with one half, unless the model's window is longer than 5 s; other
    remainders are dropped. An ECG shorter than wanted.shortest_ecg_s is refused. A sample was not
    measured if it is NaN, -32768 in int16, or masked in a masked array. A lead with such a sample in
    a crop is zero in the whole crop. Crops are left out if no lead that the model uses was measured
    in them, or if each of their leads is flat or missing."""
    indices = leads_in_order(leads)
    wanted.require_leads(indices)
    values, names = _signal_array(signal), tuple(LEADS[lead] for lead in indices)
    if values.ndim == 2 and len(values) != len(names) == values.shape[1]:
        raise SignalError(
            f"the signal has {len(values):,} rows and {len(names)} columns: transpose it to [leads, samples]"
        )
    # int16 arrays, such as those that loadmat returns, have no NaN
    invalid = NOT_MEASURED if values.dtype == np.int16 else None
    try:
        record = EcgRecord("", values, float(fs_hz), names, unit_name(str(unit)), invalid=invalid)
        count = _count_crops_with_windows(record, wanted)
    except (ReadError, TypeError, ValueError) as error:
        needed = "[leads, samples] in V, mV or uV at {:g} to {:g} Hz".format(*RATE_RANGE_HZ)
        raise SignalError(f"fs_hz={fs_hz!r}, unit={unit!r}: {error}: give {needed}") from None
    uv_LT = signal_in_microvolts(record)
    _require_plausible(np.abs(uv_LT) / 1000, unit)
    if doubt := implausible_amplitude_text(uv_LT, record.fs_hz):
        record = replace(record, warnings=((IMPLAUSIBLE_AMPLITUDE, doubt),))
    uv_BLT = np.empty((count, len(LEADS), CROP), np.int16)
    usable = list(_usable_crops(record, uv_BLT, wanted))
    if not usable:
        raise SignalError(
            "no valid lead: in every 10 s crop, all leads are flat, or each lead that the model uses has "
            "a sample that is NaN (a single NaN leaves out the lead in that crop)"
        )
    return EcgCrops(
        uv_BLT[: len(usable)],
        tuple(crop.start_s for crop in usable),
        tuple(crop.halves for crop in usable),
        tuple(crop_flags(record, crop) for crop in usable),
        doubt,
    )


def _usable_crops(record: EcgRecord, uv_BLT: np.ndarray, wanted: Input) -> Iterator[Crop]:
    """Yields the crops in which a lead that the model uses was measured. Writes their samples to
    the first rows of uv_BLT."""
    used, row = {LEADS[lead] for lead in wanted.seen_leads}, 0
    for index in range(len(uv_BLT)):
        try:
            crop = prepare_crop(record, index, uv_BLT[row])
        except ReadError as error:
            if error.reason != "no valid lead":
                raise
            continue
        if not used <= set(crop.missing):
            row += 1
            yield crop


def _count_crops_with_windows(record: EcgRecord, wanted: Input) -> int:
    """Returns the number of crops that are long enough for a window; SignalError if there are
    none."""
    samples = samples_at_500_hz(record.signal.shape[1], record.fs_hz)
    count = samples // CROP
    if wanted.shortest_ecg_s == HALF_S:
        count = crop_count(record.signal.shape[1], record.fs_hz)
    if not count:
        raise SignalError(
            f"{samples / FS_HZ:g} s of signal are too short: the model takes segments of {wanted.window_s:g} s: "
            f"give at least {wanted.shortest_ecg_s:g} s"
        )
    return count


def _signal_array(signal: Any) -> np.ndarray:
    """Returns the signal as an array, in which masked samples are NaN, or NOT_MEASURED in int16."""
    if isinstance(signal, Tensor):
        signal = signal.detach().cpu()
        signal = (signal.double() if signal.is_floating_point() else signal).numpy()
    array = np.asarray(signal)
    none: float = np.nan
    if array.dtype.kind == "i" and array.dtype.itemsize == 2:  # int16 in either byte order
        array, none = array.astype(np.int16, copy=False), NOT_MEASURED
    return np.where(np.ma.getmaskarray(signal), none, array) if np.ma.is_masked(signal) else array


def _require_plausible(mv_LT: np.ndarray, unit: str) -> None:
    """Raises SignalError if the unit seems to be wrong by a factor of 1,000. The medians over
    samples and leads decide, because single leads may be off."""
    measured = np.isfinite(mv_LT)
    if not measured.any():
        return
    peaks = np.where(measured, mv_LT, 0).max(axis=1)
    peak = float(np.median(peaks[measured.any(axis=1)]))
    middle = 0.0
    if peaks.max() > LARGE_MV:
        middle = float(np.median(mv_LT[measured]))
    seen = f"unit={unit!r}: a typical lead peaks at {peak:.3g} mV"
    if middle > LARGE_MV or peak > HUGE_MV:
        raise SignalError(
            f"{seen} (median {middle:.3g} mV), which is too large for an ECG: give the true unit, "
            "which is probably smaller"
        )
    if 0 < peak < TINY_MV:
        raise SignalError(
            f"{seen}, which is too small for an ECG: give the true unit, which is probably larger"
        )
