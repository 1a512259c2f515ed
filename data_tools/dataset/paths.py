"""Find the datasets that an argument names: by path, by a pattern of paths, or in a file of paths.

dataset_paths(["ds/2027-*", "s3://bucket/more"])     # ds/2027-01, ds/2027-02, s3://bucket/more
dataset_paths("datasets.txt")                         # one path a line, relative to the file
"""

import os
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from ..io.errors import DataError, Flag
from .dataset import Dataset

Data = str | os.PathLike[str] | Dataset
LIST_ENDING = ".txt"  # the ending of a file that lists datasets


def as_list(data: Data | Sequence[Data]) -> list[Data]:
    """Returns the datasets of an argument as a list. The argument may be one dataset or a sequence."""
    return [data] if isinstance(data, str | os.PathLike | Dataset) else list(data)


def dataset_paths(data: Data | Sequence[Data], option: str = Flag("--data")) -> list[str]:
    """Returns the path or address of each dataset. Error messages start with `option`."""
    paths = []
    for one in as_list(data):
        if isinstance(one, Dataset):
            paths.append(one.root.url)
            continue
        path = os.fspath(one)
        if path.endswith(LIST_ENDING) and os.path.isfile(path):
            paths += _read_list(path, option)
        else:
            paths += _matching_folders(path, option)
    return paths


def open_all(
    data: Data | Sequence[Data], anonymous: bool = False, option: str = Flag("--data")
) -> list[Dataset]:
    """Opens the datasets of an argument. A Dataset is returned as it is."""
    datasets = []
    for one in as_list(data):
        if isinstance(one, Dataset):
            datasets.append(one)
        else:
            datasets += [Dataset.open(path, anonymous) for path in dataset_paths(one, option)]
    return datasets


def _read_list(file: str, option: str) -> list[str]:
    """Returns the paths of the datasets that a file lists, one a line."""
    try:
        text = Path(file).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(option, f" {file}: cannot be read as UTF-8 text ({error})") from None
    paths = []
    for line in map(str.strip, text.splitlines()):
        if line and not line.startswith("#"):
            place = line if "://" in line else os.path.join(os.path.dirname(file), line)
            paths += _matching_folders(place, option)
    if not paths:
        raise DataError(option, f" {file}: lists no dataset: write one path a line")
    return paths


def _matching_folders(path: str, option: str) -> list[str]:
    """Returns the folders that match a pattern, sorted; only `path` if it is not a pattern."""
    if "://" in path:
        if "*" in path:
            raise DataError(
                option,
                f" {path}: patterns are expanded on local disks only: name each dataset, or list "
                f"them in a {LIST_ENDING} file",
            )
        return [path]
    if not set(path) & set("*?[") or os.path.lexists(path):
        return [path]
    folders = [match for match in sorted(glob(path)) if os.path.isdir(match)]
    if not folders:
        raise DataError(option, f" {path}: no folder matches this pattern: check its spelling")
    return folders
