"""Make a dataset from archives, or finish an interrupted one.

    omnilead shard archive --out dataset --workers 8

Archives may be folders, s3:// addresses (with AWS_ENDPOINT_URL and the usual AWS credentials), a .zip
or a folder of these, read in place. A dataset is a source, too: `shard OLD MORE --out NEW` makes a new one
from both, `shard OLD --leave-out-patients FILE --out NEW` one without some patients. Exit code 1: some
patients of FILE are in none of the sources.
"""

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from omnilead.data_tools.ecg.constants import CROP_FLAGS, IMPLAUSIBLE
from omnilead.data_tools.ecg.pseudonyms import read_key
from omnilead.data_tools.io.commands import parse_options, run_as_omnilead, run_data_command
from omnilead.data_tools.io.errors import DataError, Flag
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.shared_options import (
    CORES,
    Anonymous,
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
    from omnilead.data_tools.sharding.roles import RoleSources
    from omnilead.data_tools.sharding.shard import ShardOptions
    from omnilead.data_tools.sources import Source


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__, "shard", shard, arguments)
    resume = ": run the same command again to continue"
    return run_data_command(
        "shard", lambda: _shard_command(**options), "--out", options["out"], resume
    )


def shard(
    sources: Annotated[
        Paths, Option("folder, .zip or s3:// address of an archive, or a dataset", "SRC")
    ],
    *,
    out: Annotated[str | os.PathLike[str], Option("where to write the dataset", "DATASET")],
    source: Format = "auto",
    fs_hz: Rate = None,
    unit: Unit = None,
    leads: Leads = None,
    patients: Patients = None,
    format: Annotated[
        Literal["tar", "zarr", "both"], Option("storage format of the samples (tar)")
    ] = "tar",
    shard_crops: Annotated[
        int | None,
        Option("crops in a tar shard (1024)", "N", low=1, high=16_384),
    ] = None,
    plan: Annotated[
        Literal["paper", "all", "paper-split"],
        Option(
            "paper: roles by patient; all: all for pre-training; paper-split: roles by crop, which "
            "leaks (paper)"
        ),
    ] = "paper",
    dx_sources: Annotated[
        Sequence[str] | None,
        Option("sources for diagnosis train, valid and test (cpsc_2018 georgia)", "NAME"),
    ] = None,
    id_sources: Annotated[
        Sequence[str] | None, Option("sources for gallery and probe (ptb-xl)", "NAME")
    ] = None,
    pretrain_sources: Annotated[
        Sequence[str] | None,
        Option("sources for pre-training, or `all` (all but ptb and st_petersburg_incart)", "NAME"),
    ] = None,
    leave_out_flags: Annotated[
        str,
        Option(
            "leave crops with one of these flags out of pre-training: "
            f"{', '.join(CROP_FLAGS)}, or none (implausible)",
            "FLAG,FLAG",
        ),
    ] = IMPLAUSIBLE,
    id_share: Annotated[
        float | None,
        Option(
            "largest share of a source's patients in gallery and probe (0.15)",
            "SHARE",
            low=0,
            high=1,
        ),
    ] = None,
    seed: Annotated[int, Option("seed of the crop order and of the roles (0)", low=0)] = 0,
    workers: Workers = None,
    cluster: Annotated[
        str | None,
        Option("run on this Dask cluster instead of local processes", "tcp://HOST:8786"),
    ] = None,
    pseudonymize: Annotated[
        str | None, Option("replace record and patient ids with keyed hashes", "KEYFILE")
    ] = None,
    anonymous: Anonymous = False,
    leave_out_patients: Annotated[
        str | None,
        Option("leave out patients, one on each line: PATIENT or SOURCE/PATIENT", "FILE"),
    ] = None,
    strict: Annotated[bool, Option("exit 2 if any record was refused")] = False,
) -> "Dataset":
    """Makes a dataset from archives, as `omnilead shard` does, or finishes an interrupted one.

    `sources`: one archive or several. Notes go to stderr. A DataError says in one line what is wrong."""
    from omnilead.data_tools.sharding import shard as build
    from omnilead.data_tools.sharding.leave_out import LeaveOut
    from omnilead.data_tools.sources import detect

    key = read_key(pseudonymize) if pseudonymize else None
    opened = detect.open_archives(
        sources,
        source,
        anonymous,
        bool(key),
        {"fs_hz": fs_hz, "unit": unit, "leads": leads},
    )
    dataset = _build_with_notes(
        opened,
        build.ShardOptions(
            os.fspath(out),
            plan=plan,
            seed=seed,
            shard_crops=shard_crops,
            format=format,
            workers=workers or CORES,
            cluster=cluster,
            role_sources=_role_sources(
                plan,
                {"dx": dx_sources, "id": id_sources, "pretrain": pretrain_sources},
                id_share,
                leave_out_flags,
            ),
            pseudonym_key=key,
            patients=patients,
            leave_out=LeaveOut.read(leave_out_patients, key) if leave_out_patients else None,
            quiet=not is_interactive(),
        ),
    )
    if strict:
        _require_no_refusals(dataset)
    return dataset


def _build_with_notes(opened: "list[Source]", options: "ShardOptions") -> "Dataset":
    """Builds and returns the dataset. Prints notes on the sources before the build, and on the dataset
    after it."""
    from omnilead.data_tools.plots import dataset_notes
    from omnilead.data_tools.sharding import shard as build
    from omnilead.data_tools.sources import detect

    private = [] if options.pseudonym_key else _privacy_notes(opened)
    notes_before = detect.tell_notes(_source_notes(opened) + private)
    dataset = build.shard(opened, options)
    notes_after = _source_notes(opened)  # some notes are known only after all records were read
    detect.tell_notes([*dataset_notes(dataset), *notes_after], notes_before)
    return dataset


def _require_no_refusals(dataset: "Dataset") -> None:
    """Raises an error if records were refused. This is for --strict."""
    if refused := _refused_count(dataset):
        url = dataset.root.url
        raise DataError(
            Flag("--strict"), f": {refused} records were refused: {url}/rejects.csv says why"
        )


def _role_sources(
    plan: str,
    named: "dict[str, Sequence[str] | None]",
    id_share: float | None,
    flags: str,
) -> "RoleSources":
    """Returns the sources and flags that decide which crops may have which roles. `named`: the sources
    that the user names for each task."""
    from omnilead.data_tools.sharding.roles import RoleSources

    chosen: dict[str, Any] = {}
    for task, names in named.items():
        if names:
            chosen[task] = tuple(sorted(set(names)))
    if id_share is not None:
        chosen["id_share"] = id_share
    if plan == "all" and chosen:
        option = "--id-share" if "id_share" in chosen else f"--{next(iter(chosen))}-sources"
        raise DataError(
            Flag("--plan"),
            " all uses everything for pre-training, so ",
            Flag(option),
            " has no effect: use ",
            Flag("--plan"),
            " paper",
        )
    leave_out = [] if flags == "none" else sorted(set(flags.split(",")))
    if unknown := [flag for flag in leave_out if flag not in CROP_FLAGS]:
        raise DataError(
            Flag("--leave-out-flags"),
            f" {flags}: no flag is called {unknown[0]!r}: use {', '.join(CROP_FLAGS)}, or none",
        )
    return RoleSources(**chosen, leave_out=tuple(leave_out))


def _source_notes(sources: "list[Source]") -> list[str]:
    notes = []
    for source in sources:
        notes += [*source.notes(), source.left_out]
    return notes


def _privacy_notes(sources: "list[Source]") -> list[str]:
    """Returns notes on what could identify patients in a dataset made from these sources."""
    notes = []
    for source in sources:
        if source.private:
            held = f"{source.root.url}: a dataset made from it holds {source.private}"
            notes.append(f"{held}: --pseudonymize KEYFILE replaces both")
    return notes


def _refused_count(dataset: "Dataset") -> int:
    return sum(source.records["refused"] for source in dataset.facts.sources)


def _shard_command(**options: Any) -> int:
    from omnilead.data_tools.plots import describe

    started = time.monotonic()
    strict = options.pop("strict")
    dataset = shard(**options)
    echo(describe(dataset))
    refused = _refused_count(dataset)
    echo(f"\n{refused} record{'s' * (refused != 1)} refused; {time.monotonic() - started:.1f} s")
    if strict:
        _require_no_refusals(dataset)
    asked = dataset.facts.left_out_patients
    return 1 if asked["found"] < asked["asked"] else 0


if __name__ == "__main__":
    run_as_omnilead("shard")
