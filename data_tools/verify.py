"""Check a dataset. The exit code is 0 only if there are no findings.

    omnilead verify dataset --archive archive
    omnilead verify 'datasets/2027-*'

Every byte, row and role is checked, and with --archive the archive's samples too. Of several datasets,
each gets a line.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from omnilead.data_tools.ecg.pseudonyms import read_key
from omnilead.data_tools.io.commands import parse_options, run_as_omnilead, run_data_command
from omnilead.data_tools.io.errors import DataError, Flag, printable
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.shared_options import (
    CORES,
    Anonymous,
    DatasetPaths,
    Format,
    Leads,
    Paths,
    Patients,
    Rate,
    Unit,
    Workers,
)
from omnilead.data_tools.io.terminal import echo, is_interactive

if TYPE_CHECKING:
    from omnilead.data_tools.dataset import Dataset


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__, "verify", verify, arguments)
    return run_data_command("verify", lambda: _verify_command(**options))


def verify(
    dataset: Annotated[
        DatasetPaths,
        Option("datasets, patterns such as 'ds/2027-*', or a .txt file that lists them", "DATASET"),
    ],
    *,
    archive: Annotated[
        Paths, Option("compare with the archives that it was made from", "SRC")
    ] = (),
    source: Format = "auto",
    fs_hz: Rate = None,
    unit: Unit = None,
    leads: Leads = None,
    patients: Patients = None,
    leave_out_patients: Annotated[
        str | None, Option("with --archive: the patients that the dataset was made without", "FILE")
    ] = None,
    fast: Annotated[
        bool, Option("check structure, tables and sizes only; do not read samples")
    ] = False,
    workers: Workers = None,
    pseudonymize: Annotated[
        str | None,
        Option("the key file that the dataset was made with, for --archive", "KEYFILE"),
    ] = None,
    anonymous: Anonymous = False,
) -> list[str]:
    """Checks every byte of one dataset or of several, as `omnilead verify` does. Returns one line for each
    thing that is wrong; an empty list means that all checks passed."""
    from omnilead.data_tools.dataset import open_all
    from omnilead.data_tools.sharding import verify as checks
    from omnilead.data_tools.sharding.leave_out import LeaveOut
    from omnilead.data_tools.sources import detect

    key = read_key(pseudonymize) if pseudonymize else None
    datasets = open_all(dataset, anonymous, "DATASET")
    for option, value in (
        ("source", source != "auto" and source),
        ("patients", patients),
        ("leave-out-patients", leave_out_patients),
    ):
        if value and not archive:
            raise DataError(
                Flag(f"--{option}"),
                f" {value} applies to an archive, and none is given: add ",
                Flag("--archive"),
                " SRC",
            )
    if archive and len(datasets) > 1:
        raise DataError(
            Flag("--archive"),
            f" compares one dataset with the archives that it was made from, and {len(datasets)} datasets "
            "are given: verify each of them by itself",
        )
    arrays = {"fs_hz": fs_hz, "unit": unit, "leads": leads}
    sources = detect.open_archives(archive, source, anonymous, bool(key), arrays)
    detect.tell_notes([opened_source.left_out for opened_source in sources])
    quiet = not is_interactive()
    left_out = LeaveOut.read(leave_out_patients, key) if leave_out_patients else None
    findings = []
    for opened in datasets:
        of_dataset = checks.verify(
            opened, sources, fast, workers or CORES, key, quiet, patients, left_out
        )
        prefix = f"{opened.root.url}: " if len(datasets) > 1 else ""
        findings += [prefix + finding for finding in of_dataset]
    return findings


def _verify_command(**options: Any) -> int:
    from omnilead.data_tools.dataset import open_all

    datasets = open_all(options["dataset"], options["anonymous"], "DATASET")
    if options["archive"] and len(datasets) > 1:
        verify(**options)  # raises the error that --archive is for one dataset
    has_findings = [_verify_one(dataset, options) for dataset in datasets]
    return 1 if any(has_findings) else 0


def _verify_one(dataset: "Dataset", options: dict[str, Any]) -> bool:
    """Prints the findings about a dataset and a summary. Returns True if there are findings."""
    started = time.monotonic()
    findings = verify(**{**options, "dataset": dataset})
    for finding in findings:
        echo(printable(finding))
    checked = "every byte, row and role"
    if options["fast"]:
        checked = "structure, tables, roles and sizes"
    if options["archive"]:
        checked += ", the archive's samples"
    if options["fast"]:
        folders = {"tar": "shards/", "zarr": "store.zarr"}
        files = " and ".join(folders[name] for name in dataset.facts.formats)
        checked += f"; not read: the contents of {files}, run without --fast to check these"
    result = f"all checks passed ({checked})"
    if findings:
        result = f"{len(findings)} finding{'s' * (len(findings) != 1)}"
    seconds = time.monotonic() - started
    echo(f"{dataset.root.url}: {len(dataset):,} crops, {result}; {seconds:.1f} s")
    return bool(findings)


if __name__ == "__main__":
    run_as_omnilead("verify")
