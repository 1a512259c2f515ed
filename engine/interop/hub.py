"""Models on the Hugging Face Hub: `omnilead hub push|pull`,
omnilead.load("hf://org/name@revision")."""

import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omnilead.engine.common import ConfigError
from omnilead.engine.model.folder import (
    CARD,
    CONFIG,
    PREPROCESSING,
    SHA256,
    WEIGHTS,
    LoadError,
    document_of,
    front_matter,
    model_folder,
    sealed,
)

HUB = "hf://"
WRONG_TOKEN = "your token is wrong or may not write there: `hf auth login`, or HF_TOKEN"
NO_TOKEN = "there is no token: `hf auth login`, or HF_TOKEN"
ANSWERS = {  # our messages for the errors of huggingface_hub
    "GatedRepoError": "is gated: ask for access on its page, then `hf auth login`",
    "RepositoryNotFoundError": "no such repository, or your token may not see it: `hf auth login`, or HF_TOKEN",
    "RevisionNotFoundError": "no such revision: give a branch, tag or commit after @",
    "LocalEntryNotFoundError": "the Hub cannot be reached, and the local cache has no copy",
    "ConnectError": "the Hub cannot be reached: is there a network?",
    "EntryNotFoundError": f"is not an omnilead model: {CONFIG}, or a file that it names, is missing",
}
FILE_NAME = re.compile(r"\w[\w.-]{0,99}")
# An absolute path or the address of a bucket, but not https:// or hf://
PLACE = re.compile(
    r"(?<![\w/:.])(?:(?!https?:|hf:)[a-z][a-z0-9]*://|~?//?|[A-Za-z]:[/\\])[\w.+-]+(?:[/\\][\w.+-]+)+"
)


def push(model: str | Path, repo: str, private: bool = False, licence: str | None = None) -> str:
    """Upload RUN/model in one commit and return the repository's address."""
    with model_folder(model) as (folder, _), huggingface(repo) as (hub, add):
        files = published(folder, licence)
        if not hub.token:
            raise LoadError(f"{HUB}{repo}: {NO_TOKEN}")
        hub.create_repo(repo, private=private or None, exist_ok=True)
        operations = [add(name, content) for name, content in files.items()]
        commit = hub.create_commit(repo, operations, commit_message="A model of omnilead")
    return str(commit.repo_url)


def published(folder: Path, licence: str | None = None) -> dict[str, Path | bytes]:
    """{name: content} to upload: the files that config.json names, the model card, and a matching
    config.json."""
    document: dict[str, Any] = without_places(document_of(folder / CONFIG))
    sums = document.pop(SHA256, None) or {WEIGHTS: "", PREPROCESSING: ""}
    files: dict[str, Path | bytes] = {
        name: folder / name for name in sums if FILE_NAME.fullmatch(name) and name != CONFIG
    }
    card = (
        (folder / CARD).read_text()
        if (folder / CARD).is_file()
        else f"# {folder.resolve().parent.name}\n"
    )
    files[CARD] = front_matter(
        {"license": licence} if licence else {}, without_places(card)
    ).encode()
    digests = {
        name: hashlib.sha256(c if isinstance(c, bytes) else c.read_bytes()).hexdigest()
        for name, c in files.items()
    }
    return files | {CONFIG: sealed(document, digests).encode()}


def without_places(value: Any) -> Any:
    """Reduce paths and bucket addresses in texts, at any depth, to the last name; `labels` is
    always treated as a path."""
    if isinstance(value, dict):
        return {
            key: _last(inner) if key == "labels" and inner else without_places(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [without_places(inner) for inner in value]
    if not isinstance(value, str):
        return value
    return _last(value) if PLACE.match(value) else PLACE.sub(lambda place: _last(place[0]), value)


def _last(place: Any) -> str:
    return re.split(r"[/\\]", str(place))[-1]


def pull(repo: str, out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not an empty folder: choose another name")
    with model_folder(f"hf://{repo}") as (folder, _):
        out.mkdir(parents=True, exist_ok=True)
        for file in sorted(
            filter(Path.is_file, folder.iterdir()), key=lambda file: file.name == CONFIG
        ):
            shutil.copy(file, out)  # config.json last: without it, the folder is no model


def fetched(repo: str) -> Path:
    """Download org/name@revision into the Hub's local cache; all files are from the same commit."""
    name, _, revision = repo.partition("@")
    with huggingface(repo) as (hub, _):
        config = Path(hub.hf_hub_download(name, CONFIG, revision=revision or None))
        folder = config.parent  # snapshots/COMMIT
        sums = document_of(config).get(SHA256)
        for file in {WEIGHTS, PREPROCESSING, *(sums if isinstance(sums, dict) else ())} - {CONFIG}:
            if FILE_NAME.fullmatch(file):
                hub.hf_hub_download(name, file, revision=folder.name)
    return folder


@contextmanager
def huggingface(repo: str) -> Iterator[tuple[Any, Any]]:
    """The Hub's API and the class for adding a file to a commit; all errors become one line."""
    try:
        from huggingface_hub import CommitOperationAdd, HfApi, get_token
    except ImportError:
        raise ConfigError(
            f"{HUB}{repo}: huggingface_hub is not installed: pip install 'omnilead[hub]'"
        ) from None
    try:
        yield HfApi(library_name="omnilead", token=get_token()), CommitOperationAdd
    except ConfigError:
        raise
    except (
        Exception
    ) as error:  # also from the Hub's HTTP client, which changes, and for invalid names
        denied = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
        known = (ANSWERS[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in ANSWERS)
        text = next(known, WRONG_TOKEN if denied else f"{type(error).__name__}: {error}")
        raise LoadError(f"{HUB}{repo}: {' '.join(text.split())[:200]}") from None
