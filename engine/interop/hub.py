"""Models on the Hugging Face Hub: `omnilead hub push|pull`,
omnilead.load("hf://org/name@revision")."""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from omnilead.engine.common import ConfigError
from omnilead.engine.model.folder import (
    CARD,
    CONFIG,
    FILE_NAME,
    HUB,
    NO_TOKEN,
    PREPROCESSING,
    SHA256,
    WEIGHTS,
    LoadError,
    document_of,
    front_matter,
    huggingface,
    model_folder,
    sealed,
)

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
