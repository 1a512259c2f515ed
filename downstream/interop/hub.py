"""Uploads models to the Hugging Face Hub and downloads them: `omnilead hub push|pull`. Also makes
the model card of a run, RUN/model/README.md, which the Hub shows.

omnilead.load("hf://org/name@revision") loads a model from the Hub.
"""

import hashlib
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from torch import Tensor

from omnilead.data_tools.io.terminal import tell
from omnilead.engine.data.seen import to_bytes, without_guessable_hashes
from omnilead.engine.model.folder import (
    CARD,
    CONFIG,
    HUB_SCHEME,
    NO_TOKEN,
    SEEN,
    LoadError,
    config_text,
    model_folder,
    open_hub_api,
    published_files,
    read_document,
    read_seen,
    require_new_or_empty_folder,
)
from omnilead.engine.model.input import describe_input_format
from omnilead.engine.model.window import DEFAULT_INPUT
from omnilead.engine.settings.commandline import parse_yaml
from omnilead.engine.settings.errors import Facts
from omnilead.engine.settings.files import plugin_file, portable_spec
from omnilead.engine.settings.leads import describe_leads
from omnilead.engine.settings.metrics import label_of
from omnilead.engine.settings.run_files import VALIDATION, read_metric_rows
from omnilead.engine.training.config import RunConfig
from omnilead.engine.training.task import TrainingTask

# Matches an absolute path or the address of a bucket, but not https:// or hf:// addresses
PATH_OR_BUCKET = re.compile(
    r"(?<![\w/:.])(?:(?!https?:|hf:)[a-z][a-z0-9]*://|~?//?|[A-Za-z]:[/\\])[\w.+-]+(?:[/\\][\w.+-]+)+"
)
HUB_TAGS = ("ecg", "electrocardiogram", "12-lead", "self-supervised-learning", "time-series")
CARD_TEMPLATE = """# {title}

{parameters:,} parameters.

{lines}
- Input: {leads} at {signals} (preprocessing.json).
- Trained for {state[step]:,} steps of {t.batch_crops} crops of 10 s, {t.precision}, AdamW, lr {t.lr} ({t.schedule}).
- Augmentation: {augmentations}.
- Data: {sources} (fingerprints of the datasets: {datasets}).
- Steps skipped because loss or gradient was not finite: {state[skipped_steps]}.

{table}This is not a medical device: whatever is built on it must be validated for its use and its population. config.json
holds the settings; weights are float32 in safetensors. Usage:

    import omnilead
    model = omnilead.load("THIS_FOLDER"{code})    # or "hf://organisation/name"
    vector = model.embed(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")    # [L, T] -> a vector: its read-out
"""
PREDICT_EXAMPLE = """    answers = model.predict(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")
"""


def with_front_matter(facts: Facts, card: str = "") -> str:
    """Returns a model card with the YAML front matter for Hugging Face. Front matter that `card`
    already has is kept, except for entries that are in `facts`."""
    before, body = {"library_name": "omnilead", "license": "unknown", "tags": list(HUB_TAGS)}, card
    if card.startswith("---\n") and "\n---\n" in card:
        head, _, body = card.removeprefix("---\n").partition("\n---\n")
        before = parse_yaml(head, CARD) or {}
    text = yaml.safe_dump({**before, **facts}, sort_keys=False, allow_unicode=True)
    return f"---\n{text}---\n{body}"


def model_card(
    run: Path,
    config: RunConfig,
    state: Facts,
    weights: dict[str, Tensor],
    task: type[TrainingTask],
) -> str:
    title, lines = task.card_title_and_lines(config, state)
    leads = config.augment.output_leads
    document = task.exported_config(config, state)
    head, signals = document.get("head"), state.get("input", DEFAULT_INPUT)
    plugged = plugin_file(document["model"].get("encoder", ""))
    if head and not plugged:
        plugged = plugin_file(head["definition"].get("head", ""))
    sources = state.get("sources", ())
    measured = _validation_numbers(run, state["step"])
    augmentations = config.augment.descriptions
    for name, options in config.augment.extra_functions:
        augmentations.append(f"{portable_spec(name)} {options or ''}".strip())
    card = CARD_TEMPLATE.format(
        title=title,
        lines="\n".join(f"- {line}" for line in lines),
        parameters=sum(w.numel() for w in weights.values()),
        signals=describe_input_format(signals),
        leads=f"{len(leads)} leads ({describe_leads(leads).replace(',', ', ')})",
        sources=", ".join(sources) or "unknown sources",
        datasets=", ".join(fingerprint[:16] for fingerprint in state["datasets"]),
        augmentations=", ".join(augmentations) or "none",
        code=", code=True" if plugged else "",
        table=_validation_table(measured),
        state=state,
        t=config.train,
    )
    if head and head.get("classes"):
        card += PREDICT_EXAMPLE
    facts: Facts = {"datasets": sources}
    if measured:
        name = head["task"] if head else "pre-training"
        facts["model-index"] = [
            {"name": title, "results": [_model_index_result(name, sources, measured)]}
        ]
    return with_front_matter(facts, card)


def _validation_numbers(run: Path, step: int) -> Facts:
    """Returns the finite numbers that validation measured at this step."""
    for row in read_metric_rows(run / VALIDATION).rows:
        if row["step"] == step:
            numbers = ((name, value) for name, value in row.items() if isinstance(value, float))
            return {name: value for name, value in numbers if math.isfinite(value)}
    return {}


def _validation_table(measured: Facts) -> str:
    if not measured:
        return ""
    rows = ["| in validation | |", "|---|---|"]
    for name, value in measured.items():
        rows.append(f"| {label_of(name)} | {value:.4f} |")
    return "\n".join(rows) + "\n\n"


def _model_index_result(task: str, sources: list[str], measured: Facts) -> Facts:
    """Returns the results of one evaluation as an entry of Hugging Face's model-index."""
    return {
        "task": {"name": task, "type": "ecg"},
        "dataset": {"name": ", ".join(sources), "type": "ecg", "split": "validation"},
        "metrics": [{"type": name, "value": round(value, 4)} for name, value in measured.items()],
    }


def push(model: str | Path, repo: str, private: bool = False, licence: str | None = None) -> str:
    """Uploads RUN/model in one commit. Returns the address of the repository."""
    with model_folder(model) as (folder, _), open_hub_api(repo) as (hub, add):
        files = files_to_upload(folder, licence)
        if not hub.token:
            raise LoadError(f"{HUB_SCHEME}{repo}: {NO_TOKEN}")
        hub.create_repo(repo, private=private or None, exist_ok=True)
        operations = [add(name, content) for name, content in files.items()]
        commit = hub.create_commit(repo, operations, commit_message="A model of omnilead")
    return str(commit.repo_url)


def files_to_upload(folder: Path, licence: str | None = None) -> dict[str, Path | bytes]:
    """Returns {name: content} of the files to upload: the files of the model, the model card, and a
    config.json that matches them."""
    document: Facts = without_paths(read_document(folder / CONFIG))
    names = published_files(document, folder)
    files: dict[str, Path | bytes] = {name: folder / name for name in names}
    card = f"# {folder.resolve().parent.name}\n"
    if (folder / CARD).is_file():
        card = (folder / CARD).read_text()
    facts = {"license": licence} if licence else {}
    files[CARD] = with_front_matter(facts, without_paths(card)).encode()
    if SEEN in files:
        record = read_seen(folder)
        public = without_guessable_hashes(record)
        files[SEEN] = to_bytes(public)
        if guessable := len(record) - len(public):
            tell(f"note: {SEEN}: left out {guessable:,} open hashes of patients")
    digests = {
        name: hashlib.sha256(c if isinstance(c, bytes) else c.read_bytes()).hexdigest()
        for name, c in files.items()
    }
    return files | {CONFIG: config_text(document, digests).encode()}


def without_paths(value: Any) -> Any:
    """Returns the value with all paths and bucket addresses in its texts, at any depth, cut to
    their last part. The value of a key `labels` always counts as a path."""
    if isinstance(value, dict):
        return {
            key: _last_name(inner) if key == "labels" and inner else without_paths(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [without_paths(inner) for inner in value]
    if not isinstance(value, str):
        return value
    return (
        _last_name(value)
        if PATH_OR_BUCKET.match(value)
        else PATH_OR_BUCKET.sub(lambda place: _last_name(place[0]), value)
    )


def _last_name(place: Any) -> str:
    return re.split(r"[/\\]", str(place))[-1]


def pull(repo: str, out: Path) -> None:
    # inside OUT, since OUT may be a shell's current folder, which cannot be replaced
    staged = out / ".omnilead-pull"
    shutil.rmtree(staged, ignore_errors=True)  # a pull that was killed may have left it
    require_new_or_empty_folder(out)
    with model_folder(f"hf://{repo}") as (folder, _):
        staged.mkdir(parents=True)
        try:
            # Only the model's files are copied: the Hub's cache may hold other files of the
            # repository, which another program fetched
            names = published_files(read_document(folder / CONFIG), repo)
            for name in [*names, CONFIG]:
                shutil.copy(folder / name, staged)
            # config.json is moved last, since a folder does not count as a model without it
            for file in sorted(staged.iterdir(), key=lambda file: file.name == CONFIG):
                os.replace(file, out / file.name)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
