"""Converts fairseq-signals checkpoints to model folders and back, keeping every bit of the weights.
Also makes a model folder from the weights of any other PyTorch class and its code: see
downstream/convert.py.

    notes = from_fairseq(Path("CKPT.pt"), Path("OUT"), classes="label_def.csv")
    to_fairseq(Path("RUN"), Path("OUT.pt"))
    report = from_torch(Path("net.pt"), Path("OUT"), "net.py:Net", {"width": 64}, preprocessing_document(...), "", [])

An untrusted checkpoint is read without running code that may be pickled in it:
torch.load(weights_only=True) creates only tensors and containers. Other classes in a checkpoint,
such as the settings objects of OmegaConf or argparse that fairseq-signals saves, are replaced by
stand-ins, which only keep their state; no module is imported. What torch considers dangerous is
refused.
"""

import ast
import csv
import io
import json
import math
import os
import pickle
import site
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from omnilead.data_tools.dataset import CLASSES
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.io.storage import write_whole
from omnilead.engine.model.config import ModelConfig, parse_settings
from omnilead.engine.model.encoder import pool
from omnilead.engine.model.encoders import build_encoder, check_encoder, outputs_agree
from omnilead.engine.model.folder import (
    CONFIG,
    MAX_SHOWN_ITEMS,
    PREPROCESSING,
    config_of,
    describe_weight_mismatches,
    file_sha256,
    load_weights,
    model_folder,
    read_document,
    require_new_or_empty_folder,
    write_model,
)
from omnilead.engine.model.input import Input, describe_input_format
from omnilead.engine.model.window import SCALE_MEANINGS
from omnilead.engine.settings.errors import ConfigError, blaming
from omnilead.engine.settings.files import portable_spec, read_plugin_files
from omnilead.engine.settings.leads import ALL_LEADS, describe_leads, leads_in_order

from ..inference.trained_model import load
from ..tasks.metrics import DEFAULT_THRESHOLD
from .fairseq import (
    MAX_TEXT,
    Settings,
    Weights,
    fairseq_settings,
    output_count,
    read_model_config,
    read_setting,
    shapes_of,
    weight_norm_spelling,
    weights_from_fairseq,
    weights_to_fairseq,
)
from .hub import with_front_matter

# If the data path in a checkpoint's settings contains one of these names, the training signals are
# taken to be z-scored
ZSCORED_NAMES = ("mimic_iv_ecg", "mimic-iv-ecg", "ecg_fm", "ecg-fm", "ecgfm")


# limit of a checkpoint's pickled objects in bytes. Tensors do not count: they are stored separately
MAX_PICKLE = 256 * 2**20
# Limits of settings written as JSON, where a shared object counts each time it occurs
MAX_SETTINGS = 100_000  # JSON tokens
MAX_JSON = 64 * 2**20  # characters


def from_fairseq(
    checkpoint: Path, out: Path, scale: str = "auto", fs_hz: float | None = None, classes: str = ""
) -> list[str]:
    """Converts a checkpoint to a model folder. Returns notes on what was assumed. `classes`: the
    names of a classifier's outputs, or a file with these names."""
    require_new_or_empty_folder(out)
    content = read_checkpoint(checkpoint)
    cfg, args = as_json(content.get("cfg")), as_json(content.get("args"))
    if not isinstance(cfg, dict) or not isinstance(cfg.get("model"), dict):
        cfg = {"model": args, "task": args}  # old checkpoints have all settings in `args`
    if not isinstance(cfg["model"], dict):
        raise ConfigError(
            f"{checkpoint}: has no settings of a model: is it a checkpoint of fairseq-signals?"
        )
    state = float_tensors(content.get("model"), checkpoint)
    config = read_model_config(cfg["model"])
    # The weights are cloned, as safetensors refuses tensors that share memory
    weights = {name: w.clone() for name, w in weights_from_fairseq(state, config).items()}
    preprocessing, notes = _preprocessing_and_notes(cfg, config, scale, fs_hz)
    document: Settings = {
        "model": asdict(config),
        "fairseq": {
            "cfg": cfg,
            "spelling": weight_norm_spelling(state),
            "order": list(state),
            "optimizer_history": as_json(content.get("optimizer_history")),
        },
    }
    names = class_names(classes, output_count(state))
    if names:
        document["head"] = _head_section(cfg, names)
    if names and not classes:
        notes.append(
            f"its {len(names)} outputs were named {names[0]} to {names[-1]}: set names with "
            "--classes LIST|FILE"
        )
    parameters = sum(w.numel() for w in weights.values())
    card = _model_card(checkpoint.name, config, preprocessing, names, parameters)
    write_model(out, weights, document, preprocessing, with_front_matter({}, card))
    return notes


def preprocessing_document(
    scale: str,
    fs_hz: float,
    leads: list[str] | int,
    window_s: float = 5.0,
    band_hz: list[float] | None = None,
) -> Settings:
    """Returns preprocessing.json of a converted model. `leads`: their names or, if these are
    unknown, their number."""
    band = {"band_hz": band_hz} if band_hz else {}
    return {
        "fs_hz": fs_hz,
        "leads": leads,
        "segment_s": window_s,
        "scale": scale,
        "meaning": SCALE_MEANINGS[scale],
        **band,
    }


def _preprocessing_and_notes(
    cfg: Settings, config: ModelConfig, scale: str, fs_hz: float | None
) -> tuple[Settings, list[str]]:
    """Returns the input that the checkpoint's settings describe, and notes on what was assumed. The
    arguments `scale` and `fs_hz` take precedence over the settings."""
    task, notes = _settings_section(cfg, "task"), []
    # A fine-tuned checkpoint keeps the settings of its pre-training among those of its model
    model = _settings_section(cfg["model"], "args") or _settings_section(cfg["model"], "w2v_args")
    stated = task.get("sample_rate") or _settings_section(model, "task").get("sample_rate")
    if fs_hz is None:
        fs_hz = stated or 500
        if not stated:
            notes.append(
                "its settings do not state a sampling rate: assumed 500 Hz (change with --fs; "
                "DeepECG-SSL: 250)"
            )
    elif stated and stated != fs_hz:
        notes.append(
            f"its settings state {stated} Hz, --fs {fs_hz:g} is used instead: leave it out if "
            "that was not intended"
        )
    if scale == "auto":
        scale = _guess_scale(cfg)
        if scale == "zscore":
            notes.append(
                "its paths name ECG-FM or MIMIC-IV-ECG: assumed the input zscore (change with "
                "--input millivolt)"
            )
    preprocessing = preprocessing_document(
        scale,
        fs_hz,
        [*LEADS] if config.leads == len(LEADS) else config.leads,
    )
    if task.get("leads_to_load"):
        form = "a list of lead names or numbers"
        rows = read_setting("task", task, "leads_to_load", None, _parse_leads, form)
        key = "leads" if len(rows) == config.leads else "seen"
        preprocessing[key] = describe_leads(rows).split(",")
    if isinstance(preprocessing["leads"], int):
        notes.append(
            f"its settings do not name its {config.leads} leads: it can be converted back, but "
            "not loaded"
        )
        Input.from_document(preprocessing | {"leads": [*LEADS]}, len(LEADS))
    else:
        Input.from_document(preprocessing, config.leads)
    return preprocessing, notes


def _parse_leads(loaded: Any) -> list[int]:
    """Returns the leads in `leads_to_load`, which is a list of names or numbers, or a text of such
    a list."""
    listed = ast.literal_eval(loaded[:MAX_TEXT]) if isinstance(loaded, str) else loaded
    return list(leads_in_order([LEADS[n] if isinstance(n, int) else n for n in listed]))


def _settings_section(settings: Settings, name: str) -> Settings:
    section = settings.get(name)
    return section if isinstance(section, dict) else {}


def _guess_scale(cfg: Settings) -> str:
    """Returns the scale of the model's input. "zscore" is a guess from the data paths, as nothing
    else in the settings of ECG-FM reveals that its training signals were z-scored."""
    task = _settings_section(cfg, "task")
    model_and_task = {**cfg["model"], **task}
    if model_and_task.get("filter"):
        raise _unconvertible_error(
            "filter",
            model_and_task["filter"],
            "the model was trained on signals filtered by NeuroKit2",
        )
    if model_and_task.get("normalize") and model_and_task.get("mean_path"):
        raise _unconvertible_error(
            "mean_path",
            model_and_task["mean_path"],
            "the means that normalise its signals are in another file",
        )
    if model_and_task.get("normalize") is True:
        return "layernorm"
    paths = f"{cfg['model'].get('data')} {task.get('data')}".lower()
    return "zscore" if any(name in paths for name in ZSCORED_NAMES) else "millivolt"


def _unconvertible_error(key: str, value: Any, why: str) -> ConfigError:
    return ConfigError(
        f"task.{key}={str(value)[:80]} in the checkpoint's settings: {why}: to convert it anyway, "
        "give --input millivolt or zscore"
    )


def class_names(text: str, outputs: int) -> list[str]:
    """Returns the names in a text A,B,C, or in a file: in the column `name` of a CSV (such as
    ECG-FM's label_def.csv), or one per line. Without a text, they are class_0, class_1, ..."""
    if not text:
        return [f"class_{i}" for i in range(outputs)]
    if not outputs:
        raise ConfigError(
            f"--classes {text[:80]}: the checkpoint is only pre-trained, without a classifier: "
            "leave --classes out"
        )
    names = [name.strip() for name in text.split(",")]
    if os.path.isfile(text) or text.endswith((".csv", ".txt")):
        names = _read_names(text)
    if len(names) != outputs or len(set(names)) < len(names) or "" in names:
        raise ConfigError(
            f"--classes {text[:80]}: {len(set(names))} names, but the classifier has {outputs} outputs: "
            "give a different name for each, in the order of the outputs"
        )
    return names


def _read_names(file: str) -> list[str]:
    try:
        lines = Path(file).read_text("utf-8-sig").splitlines()
        table = list(csv.DictReader(lines))
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"--classes {file}: {error}: give a CSV with a column `name`, or one name per line"
        ) from None
    if table and "name" in table[0]:
        lines = [row["name"] or "" for row in table]
    return [line.strip() for line in lines if line.strip()]


def _head_section(cfg: Settings, names: list[str]) -> Settings:
    """Returns the section `head` of config.json, inferred from the loss with which the checkpoint
    was trained."""
    criterion = _settings_section(cfg, "criterion") or {"_name": cfg.get("criterion")}
    loss, threshold = str(criterion.get("_name")), criterion.get("threshold")
    head: Settings = {"task": "classification", "classes": names}
    if "mse" in loss:
        head.update(kind="regression", center=[0.0] * len(names), scale=[1.0] * len(names))
    elif loss == "cross_entropy":
        head["kind"] = "multiclass"
    else:
        if not isinstance(threshold, float) or not 0 < threshold < 1:
            threshold = DEFAULT_THRESHOLD
        head["kind"] = "binary" if len(names) == 1 else "multilabel"
        head["thresholds"] = [threshold] * len(names)
    if set(names) == set(CLASSES):
        head["task"] = "diagnosis"
        return head
    labels_key = "classes" if head["kind"] == "multiclass" else "columns"
    head["definition"] = {"name": head["task"], "kind": head["kind"], labels_key: names}
    return head


def to_fairseq(run: str | Path, out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out}: exists: choose another name")
    with model_folder(run) as (folder, _):
        document = read_document(folder / CONFIG)
        config, state = config_of(document, folder / CONFIG), load_weights(folder)
        preprocessing = read_document(folder / PREPROCESSING)
    # from_fairseq writes this section; a model trained with omnilead has none
    origin = document.get("fairseq") or {}
    if not any(name.startswith("local.") for name in state) and not (
        origin and output_count(state)
    ):
        raise ConfigError(
            f"{run}: cannot be converted: it was trained without the local objective, whose weights "
            "fairseq-signals needs"
        )
    if config.causal:
        raise ConfigError(
            f"{run}: cannot be converted: fairseq-signals has no encoder for model.causal=true"
        )
    model_input = None if origin else Input.from_document(preprocessing, config.leads)
    if model_input:
        require_fairseq_input(run, model_input, preprocessing)
    try:
        their_weights = weights_to_fairseq(
            state, config, origin.get("spelling", "parametrizations")
        )
        weights = {
            name: their_weights.pop(name) for name in origin.get("order") or list(their_weights)
        }
        if their_weights:
            raise LookupError(f"its list `order` lacks the weight {next(iter(their_weights))}")
        cfg = origin.get("cfg") or fairseq_settings(
            config, model_input.seen_leads if model_input else ALL_LEADS
        )
        history = origin.get("optimizer_history") or []
    except (AttributeError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{folder / CONFIG}: section fairseq is damaged ({error!r}): restore or remove it"
        ) from error
    checkpoint = {
        "args": None,
        "criterion": None,
        "last_optimizer_state": None,
        "task_state": {},
        "extra_state": {},
        "cfg": cfg,
        "model": weights,
        "optimizer_history": history,
    }
    content = io.BytesIO()
    torch.save(checkpoint, content)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, content.getvalue())


def require_fairseq_input(run: str | Path, model_input: Input, preprocessing: Settings) -> None:
    """Raises ConfigError if a model takes signals that fairseq-signals cannot prepare."""
    if not model_input.uses_stored_halves:
        raise ConfigError(
            f"{run}: its input is {describe_input_format(preprocessing)}: fairseq-signals cannot prepare such signals"
        )
    leads = f"{run}: its leads are {describe_leads(model_input.leads)}"
    if model_input.leads != tuple(sorted(model_input.leads)):
        raise ConfigError(f"{leads}: fairseq-signals takes leads only in the usual order, I to V6")
    if model_input.leads != ALL_LEADS and model_input.seen_leads != model_input.leads:
        raise ConfigError(
            f"{leads}, but it was trained on only some of them: fairseq-signals has no setting for that"
        )


def _model_card(
    name: str,
    config: ModelConfig,
    preprocessing: Settings,
    classes: list[str],
    parameters: int,
) -> str:
    predict = ""
    if classes:
        predict = f'    model.predict(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")    # {len(classes)} classes\n'
    return f"""# {name}, converted from fairseq-signals

A lead-agnostic ECG encoder of the wav2vec 2.0 family (Oh et al., CHIL 2022): {parameters:,} parameters, {len(config.conv)}
convolutions, {config.layers} transformer layers of width {config.width}.

Input: {config.leads} leads at {describe_input_format(preprocessing)}. See {PREPROCESSING};
{CONFIG} holds the settings, including the original ones. Every weight equals the original bit for bit; the optimiser's state is
not included. The licence is that of the original.

    import omnilead
    model = omnilead.load("THIS_FOLDER")
    vectors = model.embed(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")    # [L, T] -> [{config.width}]
{predict}
    omnilead convert to-fairseq THIS_FOLDER OUT.pt      # convert back
"""


def read_checkpoint(path: Path) -> Settings:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    zipped = zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings(), safe_globals(stand_ins(path) if zipped else []):
            warnings.simplefilter("ignore")  # torch warns about types in old checkpoints
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except (ConfigError, PermissionError):
        raise
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path}: cannot be read without running code that it contains: save only its state_dict "
            "(for from-fairseq: its model and cfg)"
        ) from error
    except Exception as error:  # a hostile or truncated file may raise any error
        raise ConfigError(f"{path}: not a PyTorch checkpoint, or damaged: copy it again") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: contains a {type(content).__name__}, not a dictionary of weights and settings"
        )
    return content


class StandIn:
    """Stands in for a class or function that torch.load refuses."""

    def __new__(cls, *args: Any) -> "StandIn":
        stand_in = object.__new__(cls)
        # The only argument of a pickled enum is its value
        stand_in.__dict__["content"] = args[0] if len(args) == 1 else f"<{cls.__name__}>"
        return stand_in

    def __setstate__(self, state: Any) -> None:
        """Keeps the settings of the replaced object: argparse.Namespace has them in its state, and
        nodes of OmegaConf have them in _content or _val."""
        # The state of an object with slots is a tuple, whose first part is its __dict__
        if isinstance(state, tuple) and state:
            state = state[0]
        if isinstance(state, dict):
            state = next((state[key] for key in ("_content", "_val") if key in state), state)
        self.__dict__["content"] = state


def stand_ins(path: Path) -> list[Any]:
    """Returns (stand-in, name) for each class or function in the file that torch.load would
    refuse."""
    with zipfile.ZipFile(path) as archive:
        pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if sum(info.file_size for info in pickles) > MAX_PICKLE:
            raise ConfigError(
                f"{path}: its data.pkl is larger than the limit of {MAX_PICKLE} bytes"
            )
    replacements: Settings = {"collections.defaultdict": lambda *_: {}}
    names = get_unsafe_globals_in_checkpoint(path)
    return [
        (replacements.get(name) or type(name.split(".")[-1], (StandIn,), {}), name)
        for name in names
    ]


def as_json(value: Any) -> Any:
    """Returns settings as JSON types. A StandIn, which replaces a class that torch.load
    refuses, becomes the content that was pickled; a tensor or another object becomes a text that
    names its type."""
    parts, size = [], 0
    try:
        for part in json.JSONEncoder(default=_as_json_type, skipkeys=True).iterencode(value):
            size += len(part)
            parts.append(part)
            if size > MAX_JSON or len(parts) > MAX_SETTINGS:
                raise ConfigError(
                    f"more than {MAX_SETTINGS:,} settings, or {MAX_JSON:,} characters in settings: not a "
                    "checkpoint of fairseq-signals"
                )
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"settings are not valid JSON ({error}): not a checkpoint of fairseq-signals"
        ) from error
    return json.loads("".join(parts))


def _as_json_type(value: Any) -> Any:
    if isinstance(value, StandIn):
        return value.__dict__["content"]
    return f"<{type(value).__name__.lower()}>"


def float_tensors(values: Any, path: Path) -> Weights:
    """Returns the weights, which must be floating-point tensors in the file. Their total size must
    not exceed the size of the file, since a tensor can claim any size by repeating one number."""
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: has no weights under `model`: is it a checkpoint of fairseq-signals?"
        )
    left = path.stat().st_size
    for name, value in values.items():
        if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
            raise ConfigError(
                f"{path}: a weight is named {repr(name)[:80]}: must be printable text"
            )
        fits, kind = False, f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            kind = f"{value.dtype}, {value.layout}, on {value.device}"
            fits = value.is_floating_point() and kind.endswith("torch.strided, on cpu")
        if not fits:
            raise ConfigError(
                f"{path}: the weight {name} is {kind}: must be a dense tensor of "
                "floating-point numbers that are in the file"
            )
        left -= math.prod(value.shape) * value.element_size()
        if left < 0:
            raise ConfigError(
                f"{path}: the weights up to {name} {tuple(value.shape)} are larger than the file, as some "
                "share or repeat stored numbers: save a clone of each weight"
            )
    return values


EMBED_ALONE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from omnilead.downstream.interop.conversion import embed_alone; embed_alone()"
)
# A converted model must load without other files of the user: while it is checked, its code may read
# only modules, its own folder and these folders
SYSTEM_FOLDERS = "/proc", "/sys", "/etc", sys.prefix, sys.base_prefix, site.getuserbase()


def from_torch(
    path: Path,
    out: Path,
    encoder: str,
    options: Settings,
    preprocessing: Settings,
    prefix: str,
    renamed: Sequence[Sequence[str]],
) -> list[str]:
    """Writes a model folder from the weights in a file and the class that uses them, `encoder`.
    `renamed`: pairs (beginning of names in the file, beginning of names in the class). Returns the
    lines of a report."""
    require_new_or_empty_folder(out)
    config = parse_settings(
        ModelConfig,
        {"encoder": encoder, "options": options, "leads": len(preprocessing["leads"])},
        "model",
    )
    code = read_plugin_files([("--encoder", encoder)], "")
    x_RLT = fixed_input(preprocessing)
    file_weights = read_tensors(path)
    module = build_encoder(config, generator=torch.Generator().manual_seed(0))
    check_encoder(module, config, samples=x_RLT.shape[2])
    fresh_RD = mean_embedding(module, x_RLT)
    names, left = matching_names_and_remark(
        path, module.state_dict(), file_weights, prefix, renamed
    )
    load_into_encoder(path, module, {name: file_weights[their] for name, their in names.items()})
    c_RD = mean_embedding(module, x_RLT)
    if outputs_agree(c_RD, fresh_RD):
        raise ConfigError(
            f"{path}: its weights fit {encoder}, but loading them does not change the embedding: "
            "forward must use the weights, and the constructor must not load weights itself"
        )
    origin = {
        "file": path.name,
        "sha256": file_sha256(path),
        "input": f"torch.randn({[*x_RLT.shape]}, generator=torch.Generator().manual_seed(0))",
        "embedding": c_RD[0, :MAX_SHOWN_ITEMS].tolist(),
    }
    document = {
        "model": asdict(config) | {"encoder": portable_spec(encoder)},
        "from_torch": origin,
    }
    weights = {f"encoder.{name}": weight.clone() for name, weight in module.state_dict().items()}
    card = _torch_model_card(config, origin, preprocessing)
    _write_if_complete(out, c_RD, weights, document, preprocessing, card, code)
    return [
        f"{len(names)} weights matched, 0 missing, 0 of another shape; left out: {left}",
        "loading changed the embedding of a fixed input, and the folder alone gives the same numbers "
        "as the class (README.md shows them)",
    ]


def _write_if_complete(out: Path, c_RD: Tensor, *parts: Any) -> None:
    """Writes a model folder, if it gives the embedding `c_RD` without any other file of the
    user."""
    # -E ignores PYTHONPATH, which may lead to the user's own modules
    place = Path(sys.modules["omnilead"].__path__[0]).parent
    command = [sys.executable, "-E", "-P", "-c", EMBED_ALONE, str(place)]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder, "model"), *parts)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            why = done.stderr.strip().rpartition("\n")[2]
            raise ConfigError(f"the model folder does not load without your other files: {why}")
        if not outputs_agree(load_file(f"{folder}/alone")["c_RD"], c_RD):
            raise ConfigError(
                "the model folder gives another embedding: does the class have weights that are not in "
                "its state_dict?"
            )
    write_model(out, *parts)


def read_tensors(path: Path) -> Weights:
    """Returns all tensors in a file by name. The names of tensors in nested dictionaries are joined
    by dots."""
    if path.suffix == ".safetensors":
        with blaming(str(path)):
            return load_file(path)
    tensors: Weights = {}
    # ids of the dictionaries already read: one may be in many others, or in itself
    seen: set[int] = set()
    waiting: list[tuple[str, dict[Any, Any]]] = [("", read_checkpoint(path))]
    for prefix, values in waiting:
        if id(values) in seen or len(prefix) > MAX_TEXT:
            continue
        seen.add(id(values))
        for key, value in values.items():
            name = f"{prefix}{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
            elif isinstance(value, dict):
                waiting.append((f"{name}.", value))
    if not tensors:
        raise ConfigError(f"{path}: has no tensors: save net.state_dict()")
    return tensors


def matching_names_and_remark(
    path: Path,
    encoder_weights: Weights,
    file_weights: Weights,
    prefix: str,
    renamed: Sequence[Sequence[str]],
) -> tuple[dict[str, str], str]:
    """Returns {name of a weight in the class: its name in the file}, and a text that lists the
    other weights in the file. The names in the file may all have a prefix, such as
    "state_dict.module."."""
    inner_names = {}
    for name in encoder_weights:
        inner_names[name] = name
        for old, new in renamed:
            if name.startswith(new):
                inner_names[name] = old + name.removeprefix(new)
    places = Counter(
        full.removesuffix(name)
        for full in file_weights
        for name in inner_names.values()
        if f".{full}".endswith(f".{prefix}{name}")
    )
    best = [place for place in places if places[place] == max(places.values())]
    if prefix in best or not best:
        best = [prefix]
    if len(best) > 1:
        raise ConfigError(
            f"{path}: has the weights under several prefixes, {best[:MAX_SHOWN_ITEMS]}: choose one with "
            "--prefix"
        )
    names = {name: best[0] + inner for name, inner in inner_names.items()}
    expected = shapes_of(encoder_weights)
    shapes = shapes_of(
        {name: file_weights[their] for name, their in names.items() if their in file_weights}
    )
    left = (
        describe_weight_mismatches(
            {their: () for their in file_weights if their not in names.values()}, {}
        )
        or "none"
    )
    if shapes != expected:
        fit = shapes.items() & expected.items()
        raise ConfigError(
            f"{path}: {len(fit)} of {len(expected)} weights fit: {describe_weight_mismatches(shapes, expected)}; left "
            f"over: {left}: change --options, --leads, --prefix or --map"
        )
    return names, left


def load_into_encoder(path: Path, encoder: nn.Module, weights: Weights) -> None:
    with blaming(str(path)):
        for name, own_weight in encoder.state_dict().items():
            if own_weight.is_floating_point() and not weights[name].is_floating_point():
                raise ConfigError(
                    f"the weight {name} is {weights[name].dtype}: use a checkpoint that is not quantised"
                )
        encoder.load_state_dict(weights)
        for name, weight in encoder.state_dict().items():
            if not weight.isfinite().all():
                raise ConfigError(f"the weight {name} has NaN or infinity: use another checkpoint")


def fixed_input(preprocessing: Settings) -> Tensor:
    """Returns x_RLT: two rows of noise, always the same, with the leads and the length of the
    model's input."""
    model_input = Input.from_document(preprocessing, len(preprocessing["leads"]))
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, len(model_input.leads), model_input.samples, generator=generator)


@torch.no_grad()
def mean_embedding(encoder: nn.Module, x_RLT: Tensor) -> Tensor:
    return pool(encoder.eval()(x_RLT))


def embed_alone() -> None:
    """Saves the embedding that the model in the folder `model` gives, while no other file of the
    user can be read. Must run in a process of its own, as Python cannot remove an audit hook."""
    sys.addaudithook(_refuse_other_files)
    model = load("model", code=True)
    save_file({"c_RD": mean_embedding(model.encoder, fixed_input(model.preprocessing))}, "alone")


def _refuse_other_files(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str):
        path = Path(arguments[0]).absolute()
        is_allowed = any(path.is_relative_to(place) for place in (Path.cwd(), *SYSTEM_FOLDERS))
        if path.is_file() and not is_allowed and path.suffix not in (".py", ".pyc", ".so"):
            raise FileNotFoundError(
                f"the code reads {path}: keep its numbers in the code or in buffers of the class"
            )


def _torch_model_card(config: ModelConfig, origin: Settings, preprocessing: Settings) -> str:
    name = config.encoder.rpartition(":")[2]
    text = f"""# {name} of {origin["file"]}

All weights of the class `{name}` (its code is in this folder) come from {origin["file"]}, sha256
{origin["sha256"]}. The licence is that of the original.

Input: {config.leads} leads at {describe_input_format(preprocessing)}. See {PREPROCESSING}.

    import omnilead
    model = omnilead.load("THIS_FOLDER", code=True)
    vectors = model.embed(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")    # [L, T] -> [D]

To check by hand: the class with the original weights, in eval mode, gives

    x = {origin["input"]}
    {name}(leads={config.leads}, **{config.options})(x).mean(1)[0, :{MAX_SHOWN_ITEMS}]      # {origin["embedding"]}
"""
    return with_front_matter({}, text)
