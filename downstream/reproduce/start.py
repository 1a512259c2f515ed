"""Opens the dataset and the folder DIR for `omnilead reproduce`."""

from dataclasses import asdict
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from pydantic import ValidationError

from omnilead.data_tools.dataset import META, Dataset, RoleFacts
from omnilead.data_tools.io.storage import write_whole
from omnilead.engine.settings.errors import ConfigError

from .jobs import COMMANDS_FILE, WorkDir, read_json, write_json
from .paper import DatasetInfo, PaperPlan, ReproductionScale

SCALE_AND_DATA_FILE = "settings/data.json"
REMEDY_DX = "add records of CPSC 2018 or Georgia, or name other sources with shard --dx-sources"
REMEDY_ID = "add PTB-XL, whose patients have several sessions, or name other sources with shard --id-sources"
REMEDY_FEW = "add more records"
REMEDY_OF_ROLE = {  # By role: what the user can do if --plan paper gave the role to no crop
    "pretrain": REMEDY_FEW,
    "dx train": REMEDY_DX,
    "dx valid": REMEDY_DX,
    "dx test": REMEDY_DX,
    "id train": REMEDY_FEW,
    "id valid": REMEDY_FEW,
    "id gallery": REMEDY_ID,
    "id probe": REMEDY_ID,
}


def read_dataset_info(url: str) -> DatasetInfo:
    """Returns facts about the dataset; ConfigError if it lacks crops of a role that the paper's
    plan needs."""
    if not url:
        raise ConfigError(
            "--data is missing: name a dataset made by omnilead shard SRC --out DATASET"
        )
    dataset = Dataset.open(url)
    path = url if "://" in url else str(Path(url).absolute())
    data = DatasetInfo(
        path, dataset.fingerprint, str(dataset.facts.plan), dataset.facts.roles.model_dump()
    )
    for role, mend in REMEDY_OF_ROLE.items():
        if data.count_crops(*role.split()):
            continue
        if data.split != "paper":
            mend = f"it was built with --plan {data.split}: use --plan paper"
        raise ConfigError(f"--data {url}: no crop has the role {role}: {mend}")
    return data


def begin_folder(plan: PaperPlan) -> None:
    """Creates the folder; ConfigError if it was started with other data or another scale."""
    folder, scale = plan.folder, plan.scale
    if folder.path.is_file() or (folder.path / META).exists():
        raise ConfigError(f"--out {folder.path}: this is a file or a dataset: name another folder")
    path = folder.path / SCALE_AND_DATA_FILE
    before = read_json(path)
    facts_now = {"scale": scale.name, "settings": scale.settings, **asdict(plan.data)}
    for key in before.keys() - {"path"}:
        if before[key] != facts_now.get(key):
            raise ConfigError(
                f"--out {folder.path}: was started with other data or settings ({key} was "
                f"{str(before[key])[:40]} and is {str(facts_now.get(key))[:40]}): use another --out"
            )
    accept_earlier_commands(plan)
    folder.note_commands(plan.jobs.values(), {plan.data.path: plan.data.fingerprint})
    for name in ("settings", "starts"):
        (folder.path / name).mkdir(exist_ok=True)
    write_json(path, facts_now)
    for start, tree in plan.starts.items():
        write_whole(folder.path / start, yaml.safe_dump(tree, sort_keys=False))


def accept_earlier_commands(plan: PaperPlan) -> None:
    """Removes the noted commands of earlier versions of this program, which named data and runs by
    --set alone, so that their results are not refused as those of other commands. Commands that
    depended on other settings stay."""
    path = plan.folder.path / COMMANDS_FILE
    commands = read_json(path)
    for job in plan.jobs.values():
        text = commands.get(job.name, "")
        if "--set 'data.datasets=" in text and text.endswith(job.basis):
            del commands[job.name]
    if commands:
        write_json(path, commands)


def read_scale_and_data(folder: WorkDir) -> tuple[ReproductionScale, DatasetInfo]:
    """Reads back from DIR the scale and the dataset that it was started with."""
    path = folder.path / SCALE_AND_DATA_FILE
    tree = read_json(path)
    tree.pop("settings", None)  # the settings are read from the scale's file instead
    try:
        scale, data = str(tree.pop("scale")), DatasetInfo(**tree)
        RoleFacts.model_validate(data.roles)
        return ReproductionScale.read(scale), data
    except (KeyError, TypeError, ValidationError):
        raise ConfigError(
            f"{path}: missing or damaged: run without --collect-only first, or use another --out"
        ) from None
