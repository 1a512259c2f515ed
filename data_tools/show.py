"""Print or draw a dataset, a crop or a record. See `omnilead show --why AF --help` for what each lead adds to a model's answer

    omnilead show dataset --crop 7 --png ecg.png
    omnilead show 'datasets/2027-*'

Of several datasets, each summary is printed. A record is shown as `shard` would store it, with what
`shard` would refuse or repair.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from omnilead.data_tools.io.commands import parse_options, run_as_omnilead, run_data_command
from omnilead.data_tools.io.errors import DataError, ReadError
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.shared_options import Anonymous, DatasetPaths
from omnilead.data_tools.io.terminal import echo

if TYPE_CHECKING:
    from omnilead.data_tools.dataset import Dataset
    from omnilead.data_tools.sources import Source


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__, "show", show, arguments)
    return run_data_command("show", lambda: show(**options), "--png", options["png"])


def show(
    what: Annotated[
        DatasetPaths,
        Option(
            "datasets, patterns such as 'ds/2027-*', a .txt file that lists them, WFDB header files or "
            "hospitals' ECG files",
            "DATASET|RECORD",
        ),
    ],
    *,
    crop: Annotated[
        int | None, Option("show one crop of the dataset instead of the summary", "ROW", low=0)
    ] = None,
    anonymous: Anonymous = False,
    png: Annotated[str | None, Option("save a figure as .png, .svg or .pdf", "FILE")] = None,
) -> int:
    from omnilead.data_tools import plots

    shown = things_to_show(what)
    for option, value in (("--crop", crop), ("--png", png)):
        if value is not None and len(shown) > 1:
            raise DataError(
                f"{option} {value}: this option is for one dataset, and {len(shown)} are given: name one"
            )
    if png:
        file, folder = Path(png), Path(png).absolute().parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise DataError(
                f"--png {file}: folder {folder} is missing or not writable: choose another one"
            )
        if file.exists() and not file.is_file():
            raise DataError(
                f"--png {file}: this path exists and is not a regular file: choose another path"
            )
        plots.picture_format(file)
    for one in shown:
        figure = show_one(one, crop, anonymous, bool(png))
    if png:
        plots.save_figure(figure, png)
        echo(f"drawn: {png}")
    return 0


def things_to_show(what: DatasetPaths) -> "list[str | Dataset]":
    """Returns what the argument names: each record as a path, each dataset as a path or a Dataset."""
    from omnilead.data_tools.dataset import Dataset, as_list, dataset_paths

    shown: list[str | Dataset] = []
    for one in as_list(what):
        shown += [one] if isinstance(one, Dataset) else dataset_paths(one, "show")
    return shown


def show_one(what: "str | Dataset", crop: int | None, anonymous: bool, draw: bool) -> Any:
    """Prints the facts of a record, a dataset or a crop of a dataset. Returns a figure of it if `draw`."""
    from omnilead.data_tools import plots
    from omnilead.data_tools.dataset import Dataset
    from omnilead.data_tools.ecg.paper import rate_and_axis_text

    if isinstance(what, str):
        if Path(what).is_file() or what.endswith(".hea") or ".zip/" in what:
            if crop is not None:
                raise DataError(
                    f"--crop {crop}: {what} is a record, not a dataset: leave out --crop"
                )
            return show_record(what, draw)
        what = Dataset.open(what, anonymous)
    if crop is None:
        echo(plots.describe(what))
        return plots.dataset_figure(what) if draw else None
    try:
        ecg = what[crop]
    except IndexError:
        raise DataError(f"--crop {crop}: the dataset has crops 0 to {len(what) - 1}") from None
    for name, value in vars(ecg).items():
        if name != "signal_uv":
            echo(f"{name:15}{'' if value is None else value}")
    rate_and_axis = rate_and_axis_text(ecg.signal_uv, ecg.halves, ecg.missing_leads)
    echo(f"{'rate, axis':15}{rate_and_axis}")
    return ecg.plot() if draw else None


def show_record(path: str, draw: bool = True) -> Any:
    """Prints the facts of a record. Returns a figure of it if `draw`."""
    import numpy as np

    from omnilead.data_tools.dataset import CROP_SHAPE
    from omnilead.data_tools.ecg.crops import HALF, prepare_crop
    from omnilead.data_tools.ecg.paper import ecg_figure, patient_caption, rate_and_axis_text
    from omnilead.data_tools.ecg.resampling import FS_HZ
    from omnilead.data_tools.sources.base import read_safely
    from omnilead.data_tools.sources.hospital_files import HospitalFiles
    from omnilead.data_tools.sources.wfdb_archives import WfdbFolder
    from omnilead.data_tools.sources.zip_folder import folder_or_zip

    place, samples = Path(path), np.empty(CROP_SHAPE, "<i2")
    if place.suffix.lower() == ".zip":
        raise DataError(
            f"{path} is an archive: show one of its records, {path}/FOLDER/RECORD.hea, or first "
            f"`omnilead shard {path} --out DATASET`"
        )
    try:
        kind: type[Source] = WfdbFolder if path.endswith(".hea") else HospitalFiles
        source = kind(folder_or_zip(place.parent))
        if isinstance(record := read_safely(source.read, place.name), ReadError):
            raise record
        seconds = record.signal.shape[1] / record.fs_hz
        echo(
            f"{place.name}: {len(record.leads)} leads, {record.fs_hz:g} Hz, {seconds:g} s, dx "
            f"{', '.join(record.dx) or 'none'}"
        )
        warnings = [f"{reason}: {detail}" for reason, detail in record.warnings]
        for warning in warnings:
            echo(f"  {warning}")
        crop = prepare_crop(record, 0, samples)
    except ReadError as error:
        raise DataError(f"{path}: `omnilead shard` would refuse this record: {error}") from None
    if not draw:  # importing matplotlib would take half a second
        return None
    drawn_s = crop.halves * HALF / FS_HZ
    rate_and_axis = rate_and_axis_text(samples, crop.halves, crop.missing)
    echo(f"  {rate_and_axis}")
    part = f"first {drawn_s:g} of {seconds:.3g} s" if seconds > drawn_s else ""
    sentences = [part, rate_and_axis, *warnings, patient_caption(record.age, record.sex, record.dx)]
    caption = ". ".join(filter(None, sentences))
    return ecg_figure(samples, crop.halves, record.name, caption, crop.missing)


if __name__ == "__main__":
    run_as_omnilead("show")
