"""Write, verify and read model folders such as RUN/model/: model.safetensors, config.json,
preprocessing.json and a model card.

    write_model(folder, weights, config, preprocessing, card)
    with model_folder("RUN") as (folder, digest):       # RUN, RUN/model, a copy of it, s3://bucket/model, hf://org/name
        ...

config.json holds the sha256 of every file; its own is that of its content before this sum was added.
model_folder() verifies the sums, so that a damaged or changed model is never loaded, but not that of the
model card, which may be edited.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
from safetensors import SafetensorError

from omnilead.data_tools.io.plugins import shadows_a_module
from omnilead.data_tools.io.storage import missing_package
from omnilead.data_tools.io.terminal import tell

from ..data import seen
from ..settings.errors import ConfigError
from ..settings.files import CODE_FILE_NAME, CONFIGS, plugin_file
from .config import ModelConfig, parse_settings

if TYPE_CHECKING:
    from torch import Tensor

# SEEN is the file that lists what a model was trained on (engine.data.seen). Models converted from other
# programs have none
WEIGHTS, CONFIG, PREPROCESSING, CARD, SEEN = (
    "model.safetensors",
    "config.json",
    "preprocessing.json",
    "README.md",
    "seen.parquet",
)
SHA256_KEY = "sha256"  # the key in config.json under which {file: its sha256} is stored
FORMAT_VERSION = 1
MAX_SHOWN_ITEMS = 4  # a message shows at most this many names of weights
HUB_SCHEME = "hf://"
SHIPPED_MODELS = "models"  # the subfolder of configs/ that holds the models that come with omnilead
CHECKPOINTS = "checkpoints"  # the subfolder of a run that holds its checkpoints
WRONG_TOKEN = "your token is wrong or may not write there: `hf auth login`, or HF_TOKEN"
NO_TOKEN = "there is no token: `hf auth login`, or HF_TOKEN"
HUB_ERROR_TEXTS = {  # class name of an error of huggingface_hub -> the message that omnilead shows
    "GatedRepoError": "is gated: ask for access on its page, then `hf auth login`",
    "RepositoryNotFoundError": "no such repository, or your token may not see it: `hf auth login`, or HF_TOKEN",
    "RevisionNotFoundError": "no such revision: give a branch, tag or commit after @",
    "LocalEntryNotFoundError": "the Hub cannot be reached, and the local cache has no copy",
    "ConnectError": "the Hub cannot be reached: is there a network?",
    "EntryNotFoundError": f"is not an omnilead model: {CONFIG}, or a file that it names, is missing",
}


class LoadError(ConfigError):
    """Raised if a folder is not a complete, undamaged model of omnilead."""


def require_new_or_empty_folder(out: Path) -> None:
    """Raise ConfigError if `out` is a file or a folder that is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not an empty folder: choose another name")


def write_model(
    folder: Path,
    weights: Mapping[str, "Tensor"],
    config: Mapping[str, Any],
    preprocessing: Mapping[str, Any],
    card: str = "",
    code: Mapping[str, bytes] | None = None,
    record: pa.Table | None = None,
) -> None:
    """Write a model to a temporary folder and rename this to `folder`, so that `folder` is never half
    written. An existing folder is renamed away just before and then deleted, so for a moment there is
    none. `code` is {name: content} of plug-in files. `record` lists what the model was trained on."""
    # "." has no name. Replacing the current folder would leave the user's shell in a deleted folder
    if not folder.name:
        raise ConfigError(f"{folder}: is the current or root folder: give the path of a new folder")
    # if the parent is a file, writing fails below with a clear error
    with suppress(FileExistsError):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock_folder(folder.parent) as is_alone:
        if is_alone:
            _remove_leftovers(folder)
        # A process id would not be unique: the first processes of two containers have the same id
        unique = uuid4().hex
        temporary = folder.with_name(f".{folder.name}.{unique}")
        old_folder = folder.with_name(f".{folder.name}.old.{unique}")
        try:
            temporary.mkdir()
            save_weights(dict(weights), temporary / WEIGHTS)
            (temporary / PREPROCESSING).write_text(_json_text(preprocessing))
            (temporary / CARD).write_text(card)
            for name, content in (code or {}).items():
                (temporary / name).write_bytes(content)
            if record is not None:
                (temporary / SEEN).write_bytes(seen.to_bytes(record))
            write_config(temporary, {"format_version": FORMAT_VERSION, **config})
            if folder.exists():
                os.replace(folder, old_folder)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(old_folder, ignore_errors=True)


@contextmanager
def _lock_folder(parent: Path) -> Iterator[bool]:
    """Lock `parent` during the context, after waiting until no other process that writes a model there holds
    the lock. Yield True, or False if `parent` cannot be locked."""
    try:
        descriptor = os.open(parent, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:  # the folder cannot be listed, but writing to it may be allowed
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            is_alone = True
        except OSError:
            is_alone = False
        yield is_alone
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary folders of processes that were killed while they wrote this model."""
    leftover = re.compile(rf"\.{re.escape(folder.name)}\.(old\.)?[0-9a-f]{{32}}")
    for path in folder.parent.glob(".*"):
        if leftover.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def save_weights(weights: dict[str, "Tensor"], path: Path) -> None:
    """Write weights to a safetensors file with the permissions of a new file. safetensors alone would
    ignore the umask and let only the owner read the file."""
    # imported here and not at the top, because safetensors.torch imports PyTorch, which takes seconds
    from safetensors.torch import save_file

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # the text of a system error ends in its number, for example (os error 28) for a full disk
        code = re.search(r"os error (\d+)", str(error))
        if not code:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
    path.chmod(mode)


def load_weights(folder: Path) -> dict[str, "Tensor"]:
    """Return {name: tensor} of all weights of the model in a folder."""
    from safetensors.torch import load_file

    try:
        return load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise unreadable_weights_error(folder / WEIGHTS, error) from None


def unreadable_weights_error(path: Path, error: Exception) -> LoadError:
    text = f"{path}: cannot be read as safetensors: {error}: copy the file again"
    return LoadError(text.splitlines()[0])


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json, with the sha256 of all other files that are in the folder."""
    sums = {
        path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.name != CONFIG
    }
    (folder / CONFIG).write_text(config_text(config, sums))


def config_text(config: Mapping[str, Any], sums: Mapping[str, str]) -> str:
    """Return the text of config.json, with `sums` {file: its sha256} and a sum of its own content."""
    # the sum is of the content as it will be read back, because JSON turns tuples into lists, for example
    content = json.loads(json.dumps(config))
    content.pop(SHA256_KEY, None)
    return _json_text(
        content | {SHA256_KEY: {**sums, CONFIG: _content_sha256(content | {SHA256_KEY: sums})}}
    )


def verified_digest(folder: Path, mend: str = "") -> str:
    """Return a digest of all files of a model except the model card. Raise LoadError if a file does not
    match its sha256 in config.json; `mend` is what the message tells the user to do."""
    document = read_document(folder / CONFIG)
    sums = document.get(SHA256_KEY)
    sums = sums if isinstance(sums, dict) else {}
    sums_of_others = {name: value for name, value in sums.items() if name != CONFIG}
    actual = {CONFIG: _content_sha256(document | {SHA256_KEY: sums_of_others})}
    names = [PREPROCESSING, WEIGHTS, *read_plugin_files(folder)]
    if (folder / SEEN).exists() or SEEN in sums:
        names.append(SEEN)
    for name in names:
        try:
            actual[name] = file_sha256(folder / name)
        except OSError as error:
            raise _unreadable_file_error(folder / name, error) from None
    for name, digest in actual.items():
        if sums and sums.get(name) != digest:
            difference = (
                f"its sha256 is {digest[:12]}..., {CONFIG} has {str(sums.get(name))[:12]}..."
            )
            if not mend:
                run, mend = folder.parent, "copy it again"
                if (run / CHECKPOINTS).is_dir():
                    mend += f", or run {export_command(run)}"
            raise LoadError(f"{folder / name}: was changed or damaged ({difference}): {mend}")
    if not sums:
        tell(f"warning: {folder / CONFIG}: has no sha256 of the files: damage cannot be detected")
    return hashlib.sha256("".join(actual.values()).encode()).hexdigest()


def read_plugin_files(folder: Path) -> dict[str, bytes]:
    """Return {name: content} of those .py files in a model folder whose sha256 is in its config.json."""
    sums = read_document(folder / CONFIG).get(SHA256_KEY)
    return {
        file.name: file.read_bytes()
        for file in sorted(folder.glob("*.py"))
        if isinstance(sums, dict) and file.name in sums
    }


def published_files(document: Mapping[str, Any], place: str | Path) -> list[str]:
    """Return the names of the files of a model that are uploaded and downloaded with its config.json
    (`document`). A code file is one of them only if the model's settings name it. Raise ConfigError if such
    a code file has the name of a module, because Python, started in the model's folder, would import the
    file instead of the module."""
    sums = document.get(SHA256_KEY)
    listed = set(sums) if isinstance(sums, dict) else {WEIGHTS, PREPROCESSING}
    head = _mapping_or_empty(document, "head")
    specs = (
        _mapping_or_empty(document, "model").get("encoder"),
        _mapping_or_empty(document, "objective").get("method"),
        _mapping_or_empty(head, "definition").get("head"),
    )
    plugins = {file.name for spec in specs if (file := plugin_file(str(spec or "")))}
    for name in sorted(plugins & listed):
        if shadows_a_module(name):
            raise ConfigError(
                f"{place}: its code file {name} has the name of a module of Python or of an installed package "
                "and would replace that module: the model's owner must rename the file and train again"
            )
    known = {WEIGHTS, PREPROCESSING, CARD, SEEN} | {
        name for name in plugins if name.endswith(".py") and CODE_FILE_NAME.fullmatch(name)
    }
    return sorted(known & listed)


def _mapping_or_empty(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return document[name] if it is a mapping, else {}."""
    inner = document.get(name)
    return inner if isinstance(inner, dict) else {}


def read_seen(folder: Path) -> pa.Table:
    """Return the table that lists what a model was trained on. `folder` is the model's folder, or that of a
    run, which holds the table of the model from which the run starts."""
    return (
        seen.read_seen_record(folder / SEEN)
        if (folder / SEEN).exists()
        else seen.unknown_seen_record()
    )


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _content_sha256(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def shipped_models() -> list[str]:
    """Return the names of the models that come with omnilead."""
    return sorted(path.name for path in (CONFIGS / SHIPPED_MODELS).iterdir() if path.is_dir())


@cache  # prints the note once, though a command opens a model more than once
def note_folder_hides_shipped_model(name: str) -> None:
    tell(f"note: {name} is the folder {name} here, not the model that comes with omnilead")


@contextmanager
def model_folder(path: str | os.PathLike[str]) -> Iterator[tuple[Path, str]]:
    """Yield (a local folder with the verified model, its digest). A remote model is downloaded first: from
    the Hub into the Hub's cache, from another address into a temporary folder."""
    text = os.fspath(path)
    if text.startswith(HUB_SCHEME):
        yield download_from_hub(text.removeprefix(HUB_SCHEME))
        return
    if "://" in text:
        with tempfile.TemporaryDirectory() as local:
            folder = _download(text.rstrip("/"), Path(local))
            yield folder, verified_digest(folder)
        return
    folder = find_local_model(text)
    yield folder, verified_digest(folder)


def find_local_model(text: str) -> Path:
    """Return the folder that holds the weights of the model `text`, which is the folder of a run or model on
    this machine, or the name of a model that comes with omnilead."""
    run = Path(text)
    if text in shipped_models():
        if run.exists():
            note_folder_hides_shipped_model(text)
        else:
            run = CONFIGS / SHIPPED_MODELS / text
    folder = run / "model" if (run / "model").is_dir() else run
    if not (folder / WEIGHTS).is_file():
        if not run.exists():
            names = ", ".join(shipped_models())
            raise LoadError(
                f"{run}: no such folder: give the folder of a run or model, or a shipped model: {names}"
            )
        if folder == run and (run / CHECKPOINTS).is_dir():
            raise LoadError(f"{run}: has checkpoints but no model/ yet: run {export_command(run)}")
        raise LoadError(
            f"{folder}: has no {WEIGHTS}: give the folder of a finished run, or its model/"
        )
    return folder


def names_a_model(start: str) -> bool:
    """True if the setting `start` names a model. If it names a YAML file instead, that is a config, with
    which training starts from random weights."""
    return bool(start) and Path(start).suffix not in (".yaml", ".yml")


def export_command(run: Path) -> str:
    """Return the command that writes RUN/model from a checkpoint of a run: the newest of pre-training, the
    best of fine-tuning."""
    settings = run / "config.yaml"
    tunes = settings.is_file() and re.search("^task:", settings.read_text(), re.MULTILINE)
    return f"omnilead {'finetune' if tunes else 'pretrain'} --export {run}"


def _download(url: str, local: Path) -> Path:
    try:
        import fsspec

        files, root = fsspec.core.url_to_fs(url)
        root = f"{root}/model" if files.exists(f"{root}/model/{WEIGHTS}") else root
        code = [place.rpartition("/")[2] for place in files.glob(f"{root}/*.py")]
        record = [SEEN] if files.exists(f"{root}/{SEEN}") else []
        for name in (CONFIG, PREPROCESSING, WEIGHTS, *record, *code):
            files.get_file(f"{root}/{name}", str(local / name))
    except FileNotFoundError as error:
        raise LoadError(f"{url}: has no complete model: {error}".splitlines()[0]) from None
    except ImportError as error:
        raise LoadError(missing_package(url, error)) from None
    except Exception as error:  # a failure of the network or the credentials, for example
        raise LoadError(f"{url}: {type(error).__name__}: {error}".splitlines()[0]) from None
    return local


def download_from_hub(repo: str) -> tuple[Path, str]:
    """Download a model of the Hub, org/name or org/name@revision, into the Hub's local cache. Return
    (its folder, its digest). All files are of the same commit. If a file is damaged, all are downloaded
    once more, because a damaged file would stay in the cache."""
    name, _, revision = repo.partition("@")
    damage: LoadError | None = None
    with open_hub_api(repo) as (hub, _):
        for is_retry in (False, True):
            get = partial(hub.hf_hub_download, name, force_download=is_retry)
            try:
                config = Path(get(CONFIG, revision=revision or None))
                folder = config.parent  # the cache keeps each commit in snapshots/COMMIT
                names = published_files(read_document(config), f"{HUB_SCHEME}{repo}")
                for file in {WEIGHTS, PREPROCESSING, *names}:
                    get(file, revision=folder.name)
                return folder, verified_digest(folder, "not mended by fetching it again")
            except LoadError as error:
                damage = error
            except Exception:
                if not damage:
                    raise
    cache = config.parents[2]
    raise LoadError(f"{damage}: delete the Hub's cache, {cache}, or ask the model's owner")


@contextmanager
def open_hub_api(repo: str) -> Iterator[tuple[Any, Any]]:
    """Yield (the API of the Hugging Face Hub, the class that adds a file to a commit). Errors of the Hub
    are raised as LoadError with a message of one line."""
    try:
        from huggingface_hub import CommitOperationAdd, HfApi, get_token
    except ImportError:
        raise ConfigError(
            f"{HUB_SCHEME}{repo}: huggingface_hub is not installed: pip install 'omnilead[hub]'"
        ) from None
    try:
        yield HfApi(library_name="omnilead", token=get_token()), CommitOperationAdd
    except ConfigError:
        raise
    except Exception as error:  # from the Hub or its HTTP client, whose classes differ by version, or for an invalid name
        denied = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
        answers = (
            HUB_ERROR_TEXTS[kind.__name__]
            for kind in type(error).__mro__
            if kind.__name__ in HUB_ERROR_TEXTS
        )
        text = next(answers, WRONG_TOKEN if denied else f"{type(error).__name__}: {error}")
        raise LoadError(f"{HUB_SCHEME}{repo}: {' '.join(text.split())[:200]}") from None


def read_document(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable_file_error(path, error) from None
    if not isinstance(document, dict):
        raise LoadError(f"{path}: contains a JSON {type(document).__name__}, not an object")
    return document


def config_of(document: Mapping[str, Any], path: Path | str = CONFIG) -> ModelConfig:
    """Return the settings of the encoder in a config.json (`document`). `path` is named in errors."""
    version, model = document.get("format_version"), document.get("model")
    if version != FORMAT_VERSION:
        raise LoadError(
            f"{path}: format_version={version!r}: this omnilead reads only version {FORMAT_VERSION}"
        )
    if not isinstance(model, dict):
        raise LoadError(f"{path}: has no section `model`: is it a config.json of omnilead?")
    try:
        return parse_settings(ModelConfig, model, "model")
    except ConfigError as error:
        raise LoadError(f"{path}: {error}") from None


def _unreadable_file_error(path: Path, error: Exception) -> LoadError:
    if isinstance(error, FileNotFoundError):
        return LoadError(
            f"{path}: no such file: a model folder has {WEIGHTS}, {CONFIG} and {PREPROCESSING}"
        )
    if isinstance(error, PermissionError):
        return LoadError(f"{path}: permission denied: ask its owner for access")
    return LoadError(f"{path}: cannot be read: {error}".splitlines()[0])


def describe_weight_mismatches(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> str:
    """Return one line that lists missing weights, unexpected weights and wrong shapes; "" if there are
    none."""
    kinds = {
        "missing": [name for name in expected if name not in shapes],
        "unexpected": [name for name in shapes if name not in expected],
        "of another shape": [
            f"{name} is {list(shapes[name])}, not {list(shape)}"
            for name, shape in expected.items()
            if name in shapes and shapes[name] != shape
        ],
    }
    sentences = []
    for kind, names in kinds.items():
        if names:
            and_more = (
                f" and {len(names) - MAX_SHOWN_ITEMS} more" if len(names) > MAX_SHOWN_ITEMS else ""
            )
            sentences.append(f"{len(names)} {kind}: {', '.join(names[:MAX_SHOWN_ITEMS])}{and_more}")
    return "; ".join(sentences)
