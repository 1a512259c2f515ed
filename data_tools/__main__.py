"""Turn ECG archives into verified datasets.

  omnilead synth  OUT --patients 100                  make a synthetic archive in a real archive's layout
  omnilead shard  SRC [SRC ...] --out DATASET         make a dataset; after an interruption, run it again
  omnilead verify DATASET [--archive SRC] [--fast]    check every byte; exit 0 only if there are no findings
  omnilead remove DATASET --patients FILE             remove patients who withdrew their consent
  omnilead show   DATASET|RECORD [--png FILE]         print a summary, plot 12 leads
  omnilead labels ptbxl SRC --out DIR                 write an archive's published labels for fine-tuning

`python -m omnilead` is the same program. SRC and DATASET may be folders or s3:// addresses (with
AWS_ENDPOINT_URL and the usual AWS credentials), SRC also a .zip or a folder of these, read in place.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from omnilead.data_tools.ecg.constants import CROP_FLAGS, IMPLAUSIBLE
from omnilead.data_tools.ecg.pseudonyms import read_key
from omnilead.data_tools.io.errors import DataError, ReadError, mend_for, printable
from omnilead.data_tools.io.options import Option, add_options
from omnilead.data_tools.io.terminal import (
    Parser,
    about_file,
    drop_output,
    echo,
    interactive,
    is_memory,
    optional,
    say,
    tell,
)

if TYPE_CHECKING:
    from omnilead.data_tools.build.roles import RoleSources
    from omnilead.data_tools.build.shard import ShardOptions
    from omnilead.data_tools.dataset import Dataset
    from omnilead.data_tools.sources import Source

RESUME = {
    "shard": ": run the same command again to continue",
    "remove": ": run the same command again to continue",
    "synth": ": delete {out} and run it again",
}
# The option that says where a command writes, and its name in Python
WRITES = {
    "synth": ("OUT", "out"),
    "shard": ("--out", "out"),
    "labels": ("--out", "out"),
    "show": ("--png", "png"),
}
KINDS = (
    "auto, physionet2021, ptbxl, mimic-iv-ecg, code15, ecg-arrhythmia, physionet2011, wfdb, "
    "hospital (any mix of the following), muse-xml, dicom, "
)
KINDS += "philips-xml, cardiosoft-xml, hl7-aecg, scp-ecg, edf, arrays (.npy, .npz, HDF5, zarr), "
KINDS += "or your own file.py:Class (auto)"
CORES = os.cpu_count() or 1
Paths = Sequence[str | os.PathLike[str]] | str | os.PathLike[str]
# What several commands have
Workers = Annotated[int | None, Option("worker processes (all cores)", low=1)]
Anonymous = Annotated[bool, Option("read public buckets without credentials")]
Format = Annotated[str, Option(f"format of SRC: {KINDS}", "KIND", "--source")]
DatasetPath = Annotated[
    str | os.PathLike[str], Option("folder or s3:// address of a dataset", "DATASET")
]
Patients = Annotated[
    str | None,
    Option(
        "the patient of each record: CSV or parquet with columns record and patient, or "
        "ptbxl_database.csv",
        "FILE",
    ),
]
Rate = Annotated[
    str | float | None,
    Option("sampling rate of --source arrays without arrays.yaml", "HZ", "--fs"),
]
Unit = Annotated[
    str | None, Option("unit of these arrays: mV, uV, V, or how many microvolts one step is")
]
Leads = Annotated[
    str | Sequence[str] | None,
    Option("leads of these arrays: 12, or their names in order, such as I,II,V1"),
]


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        run: Callable[..., int] = options.run
        return run(**_options(options))
    except KeyboardInterrupt:
        tell(f"interrupted{RESUME.get(options.command, '').format(**vars(options))}")
        return 130
    except BrokenPipeError:
        return drop_output()
    except (DataError, OSError, MemoryError, RuntimeError) as error:
        if is_memory(error):
            error = MemoryError("out of memory: lower --workers, or raise the limit (ulimit -v)")
        elif isinstance(error, RuntimeError):
            raise
        message = str(error)
        if isinstance(error, OSError):
            option, name = WRITES.get(options.command, ("-", ""))
            message = about_file(error, option, getattr(options, name, None))
            if message.startswith(option):
                message += f": {mend_for(error)}"
        tell(f"omnilead {options.command}: {message}")
        return 2


def _parser() -> argparse.ArgumentParser:
    table: tuple[tuple[str, Callable[..., int], Callable[..., Any], str, str], ...] = (
        ("synth", _synth, synth, "make a synthetic archive", "archive --patients 1000"),
        (
            "shard",
            _shard,
            shard,
            "make a dataset from archives, or finish an interrupted one",
            "archive --out dataset --workers 8",
        ),
        (
            "verify",
            _verify,
            verify,
            "check a dataset; exit 0 only if there are no findings",
            "dataset --archive archive",
        ),
        (
            "remove",
            _remove,
            _remove,
            "remove patients from a dataset, and check every byte; exit 0 only if it had them all",
            "dataset --patients withdrawn.txt",
        ),
        (
            "show",
            _show,
            _show,
            "print or draw a dataset, a crop or a record; what each lead adds to a model's answer: show --why AF --help",
            "dataset --crop 7 --png ecg.png",
        ),
        (
            "labels",
            _labels,
            _labels,
            "write an archive's published labels as tables, or your own table with pseudonyms",
            "ptbxl archive --out labels",
        ),
    )
    parser = Parser("omnilead", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="synth|shard|verify|remove|show|labels"
    )
    for name, run, declaring, text, example in table:
        epilog = f"example: omnilead {name} {example}"
        command = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:], epilog=epilog
        )
        command.set_defaults(run=run)
        add_options(command, declaring)
    return parser


def synth(
    out: Annotated[str | os.PathLike[str], Option("an empty or new folder", "OUT")],
    *,
    patients: Annotated[
        int,
        Option("PTB-XL patients; in physionet2021 as many other records, too (100)", low=1),
    ] = 100,
    two_sessions: Annotated[
        float,
        Option("share of PTB-XL patients with two recordings (0.11)", "SHARE", low=0, high=1),
    ] = 0.11,
    seed: Annotated[int, Option("the same seed gives the same bytes (0)", low=0)] = 0,
    layout: Annotated[
        Literal["physionet2021", "ptbxl"], Option("file layout (physionet2021)")
    ] = "physionet2021",
    workers: Annotated[int, Option("worker processes (1)", low=1)] = 1,
) -> dict[str, int]:
    """Makes a synthetic archive, as `omnilead synth`. Returns the number of records by source."""
    from omnilead.data_tools.extras.synthetic.archive import synthesise

    return synthesise(
        os.fspath(out), patients, two_sessions, seed, layout, workers, progress=interactive()
    )


def shard(
    sources: Annotated[Paths, Option("folder, .zip or s3:// address of an archive", "SRC")],
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
        Option(
            "crops in a tar shard (1024; with --append, as the dataset)", "N", low=1, high=16_384
        ),
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
    append: Annotated[
        bool,
        Option("add the new records of SRC to DATASET, with its settings and as a new version"),
    ] = False,
    strict: Annotated[bool, Option("exit 2 if any record was refused")] = False,
) -> "Dataset":
    """Makes a dataset from archives, as `omnilead shard`, or finishes one that was interrupted.

    `sources` is an archive or several. Notes go to stderr. A DataError says in one line what is wrong."""
    from omnilead.data_tools.build import shard as build

    key = read_key(pseudonymize) if pseudonymize else None
    opened = _open_sources(
        _paths(sources),
        source,
        anonymous,
        bool(key),
        {"fs_hz": fs_hz, "unit": unit, "leads": leads},
    )
    dataset = _built(
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
            quiet=not interactive(),
            append=append,
        ),
    )
    if strict:
        _check_refused(dataset)
    return dataset


def _built(opened: "list[Source]", options: "ShardOptions") -> "Dataset":
    """The dataset, with notes before and after it is made."""
    from omnilead.data_tools.build import shard as build

    private = [] if options.pseudonym_key else _privacy_notes(opened)
    notes_before = _tell_notes(_notes_of(opened) + private)
    dataset = build.shard(opened, options)
    notes_after = _notes_of(opened)  # some are known only afterwards
    with optional("notes on the dataset"):
        from omnilead.data_tools.extras.plots import notes

        notes_after = [*notes(dataset), *notes_after]
    _tell_notes(notes_after, notes_before)
    return dataset


def _check_refused(dataset: "Dataset") -> None:
    """With --strict, a refused record is an error."""
    if refused := _refused(dataset):
        url = dataset.root.url
        raise DataError(f"--strict: {refused} records were refused: see {url}/rejects.csv")


def _role_sources(
    plan: str,
    named: "dict[str, Sequence[str] | None]",
    id_share: float | None,
    flags: str,
) -> "RoleSources":
    """Which sources and crops may have which roles. `named`: by task, those that the user names."""
    from omnilead.data_tools.build.roles import RoleSources

    chosen: dict[str, Any] = {}
    for task, names in named.items():
        if names:
            chosen[task] = tuple(sorted(set(names)))
    if id_share is not None:
        chosen["id_share"] = id_share
    if plan == "all" and chosen:
        option = "--id-share" if "id_share" in chosen else f"--{next(iter(chosen))}-sources"
        raise DataError(
            f"--plan all uses everything for pre-training, so {option} has no effect: use --plan "
            "paper"
        )
    leave_out = [] if flags == "none" else sorted(set(flags.split(",")))
    if unknown := [flag for flag in leave_out if flag not in CROP_FLAGS]:
        raise DataError(
            f"--leave-out-flags {flags}: no flag is called {unknown[0]!r}: use "
            f"{', '.join(CROP_FLAGS)}, or none"
        )
    return RoleSources(**chosen, leave_out=tuple(leave_out))


def _notes_of(sources: "list[Source]") -> list[str]:
    notes = []
    for source in sources:
        notes += [*source.notes(), source.left_out]
    return notes


def _tell_notes(notes: list[str], told_before: Sequence[str] = ()) -> list[str]:
    """Tells the notes but for those `told` before. Returns the notes."""
    for note in notes:
        if note and note not in told_before:
            tell(f"note: {note}")
    return notes


def _privacy_notes(sources: "list[Source]") -> list[str]:
    """What in a dataset of these sources would tell who the patients are."""
    notes = []
    for source in sources:
        if source.private:
            held = f"{source.root.url}: a dataset made from it holds {source.private}"
            notes.append(f"{held}: --pseudonymize KEYFILE replaces both")
    return notes


def verify(
    dataset: DatasetPath,
    *,
    archive: Annotated[
        Paths, Option("compare with the archives that it was made from", "SRC")
    ] = (),
    source: Format = "auto",
    fs_hz: Rate = None,
    unit: Unit = None,
    leads: Leads = None,
    patients: Patients = None,
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
    """Checks every byte of a dataset, as `omnilead verify`. Returns what it found wrong, each on
    one line; an empty list means that everything holds."""
    from omnilead.data_tools.build import verify as checks
    from omnilead.data_tools.dataset import Dataset

    key = read_key(pseudonymize) if pseudonymize else None
    opened = Dataset.open(os.fspath(dataset), anonymous)
    for option, value in (("source", source != "auto" and source), ("patients", patients)):
        if value and not archive:
            raise DataError(
                f"--{option} {value} applies to an archive, and none is given: add --archive SRC"
            )
    arrays = {"fs_hz": fs_hz, "unit": unit, "leads": leads}
    sources = _open_sources(_paths(archive), source, anonymous, bool(key), arrays)
    _tell_notes([opened_source.left_out for opened_source in sources])
    quiet = not interactive()
    return checks.verify(opened, sources, fast, workers or CORES, key, quiet, patients)


def _paths(paths: Paths) -> list[str]:
    if isinstance(paths, str | os.PathLike):
        return [os.fspath(paths)]
    return [os.fspath(path) for path in paths]


def _refused(dataset: "Dataset") -> int:
    return sum(source["records"]["refused"] for source in dataset.meta["sources"])


def _open_sources(
    urls: list[str], kind: str, anonymous: bool, private: bool, arrays: dict[str, Any]
) -> "list[Source]":
    from omnilead.data_tools.sources.detect import FileReader, open_sources

    stated = {name: value for name, value in arrays.items() if value is not None}
    if stated and kind != "arrays":
        raise DataError("--fs, --unit and --leads describe arrays: add --source arrays")
    hospital: FileReader | None = None
    with optional("files of ECG carts"):
        from omnilead.data_tools.extras.hospital.files import HospitalFiles

        hospital = HospitalFiles
    sources = []
    for url in urls:
        sources += open_sources(url, kind, anonymous, urls, private, hospital, stated)
    return sources


def _options(parsed: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the function that a command calls."""
    return {name: value for name, value in vars(parsed).items() if name not in ("command", "run")}


def _synth(**options: Any) -> int:
    counts = synth(**options)
    kinds = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    echo(f"{options['out']}: {sum(counts.values()):,} synthetic records: {kinds}")
    return 0


def _shard(**options: Any) -> int:
    started = time.monotonic()
    strict = options.pop("strict")
    dataset = shard(**options)
    with optional("a summary"):
        from omnilead.data_tools.extras.plots import describe

        echo(describe(dataset))
    refused = _refused(dataset)
    echo(f"\n{refused} record{'s' * (refused != 1)} refused; {time.monotonic() - started:.1f} s")
    if strict:
        _check_refused(dataset)
    return 0


def _verify(**options: Any) -> int:
    from omnilead.data_tools.dataset import Dataset

    started = time.monotonic()
    findings = verify(**options)
    for finding in findings:
        echo(printable(finding))
    dataset = Dataset.open(options["dataset"], options["anonymous"])
    checked = "every byte, row and role"
    if options["fast"]:
        checked = "structure, tables, roles and sizes"
    if options["archive"]:
        checked += ", the archive's samples"
    if options["fast"]:
        folders = {"tar": "shards/", "zarr": "store.zarr"}
        files = " and ".join(folders[name] for name in dataset.meta["formats"])
        checked += f"; not read: the contents of {files}, run without --fast to check these"
    result = f"all checks passed ({checked})"
    if findings:
        result = f"{len(findings)} finding{'s' * (len(findings) != 1)}"
    seconds = time.monotonic() - started
    echo(f"{options['dataset']}: {len(dataset):,} crops, {result}; {seconds:.1f} s")
    return 1 if findings else 0


def _remove(
    dataset: DatasetPath,
    *,
    patients: Annotated[
        str,
        Option(
            "a file with one patient on each line, as in the dataset: PATIENT or SOURCE/PATIENT",
            "FILE",
        ),
    ],
    pseudonymize: Annotated[
        str | None,
        Option("the key file of the dataset, if FILE has the original ids", "KEYFILE"),
    ] = None,
    forget: Annotated[
        bool,
        Option("keep no hashes of those who were ever removed: --append can then bring them back"),
    ] = False,
    workers: Workers = None,
) -> int:
    from omnilead.data_tools.build.removal import remove

    url, key = os.fspath(dataset), read_key(pseudonymize) if pseudonymize else None
    how = workers or CORES, not interactive(), forget
    made, missing = remove(url, patients, key, *how)
    echo(f"{url}: version {made.version}, {len(made):,} crops are left; every byte was checked")
    echo(
        "which models have seen them: omnilead seen RUN/model --data FILES, with files of their ECGs"
    )
    return 1 if missing else 0


def _show(
    what: Annotated[
        str, Option("a dataset, a WFDB header file or a hospital's ECG file", "DATASET|RECORD")
    ],
    *,
    crop: Annotated[
        int | None, Option("show one crop of the dataset instead of the summary", "ROW", low=0)
    ] = None,
    anonymous: Anonymous = False,
    png: Annotated[str | None, Option("save a figure as .png, .svg or .pdf", "FILE")] = None,
) -> int:
    from omnilead.data_tools.dataset import Dataset
    from omnilead.data_tools.extras import plots

    if png:
        file, folder = Path(png), Path(png).absolute().parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise DataError(
                f"--png {file}: folder {folder} is missing or not writable: choose another one"
            )
        if file.exists() and not file.is_file():
            raise DataError(f"--png {file}: exists and is not a regular file: choose another path")
        plots.picture_kind(file)
    if Path(what).is_file() or what.endswith(".hea") or ".zip/" in what:
        if crop is not None:
            raise DataError(f"--crop {crop}: {what} is a record, not a dataset: leave out --crop")
        figure = _record_figure(what, draw=bool(png))
    else:
        dataset = Dataset.open(what, anonymous)
        if crop is None:
            echo(plots.describe(dataset))
            figure = plots.dataset_figure(dataset) if png else None
        else:
            try:
                ecg = dataset[crop]
            except IndexError:
                raise DataError(
                    f"--crop {crop}: the dataset has crops 0 to {len(dataset) - 1}"
                ) from None
            for name, value in vars(ecg).items():
                if name != "signal_uv":
                    echo(f"{name:15}{'' if value is None else value}")
            rate_and_axis = plots.computed(ecg.signal_uv, ecg.halves, ecg.missing_leads)
            echo(f"{'rate, axis':15}{rate_and_axis}")
            figure = plots.plot_ecg(ecg) if png else None
    if png:
        plots.save(figure, png)
        echo(f"drawn: {png}")
    return 0


def _labels(
    archive: Annotated[
        Literal[
            "ptbxl",
            "code15",
            "physionet2021",
            "ecg-arrhythmia",
            "physionet2011",
            "mimic-iv-ecg",
            "table",
        ],
        Option(
            "the archive's format; `table` gives the records of your own table their pseudonyms"
        ),
    ],
    src: Annotated[
        str,
        Option(
            "folder or s3:// address of the archive, whose signals are not read; or your table",
            "SRC",
        ),
    ],
    *,
    out: Annotated[str, Option("where to write the tables", "DIR")],
    pseudonymize: Annotated[
        str | None, Option("the key file that the dataset was made with", "KEYFILE")
    ] = None,
    anonymous: Anonymous = False,
) -> int:
    from omnilead.data_tools.extras.labels import write_labels

    key = read_key(pseudonymize) if pseudonymize else None
    for line in write_labels(archive, src, out, key, anonymous, not interactive()):
        say(line)  # all tables are written even if the pipe is closed
    return 0


def _record_figure(path: str, draw: bool = True) -> Any:
    import numpy as np

    from omnilead.data_tools.dataset import CROP_SHAPE
    from omnilead.data_tools.ecg.crops import HALF, prepare_crop
    from omnilead.data_tools.ecg.resampling import FS_HZ
    from omnilead.data_tools.extras.hospital.files import HospitalFiles
    from omnilead.data_tools.extras.plots import caption_of, computed, ecg_figure
    from omnilead.data_tools.sources.base import read_safely
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
        raise DataError(f"{path} would be refused: {error}") from None
    if not draw:  # matplotlib takes half a second
        return None
    drawn_s = crop.halves * HALF / FS_HZ
    rate_and_axis = computed(samples, crop.halves, crop.missing)
    echo(f"  {rate_and_axis}")
    part = f"first {drawn_s:g} of {seconds:.3g} s" if seconds > drawn_s else ""
    sentences = [part, rate_and_axis, *warnings, caption_of(record.age, record.sex, record.dx)]
    caption = ". ".join(filter(None, sentences))
    return ecg_figure(samples, crop.halves, record.name, caption, crop.missing)


if __name__ == "__main__":
    sys.exit(main())
