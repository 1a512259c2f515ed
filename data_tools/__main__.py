"""ECG archives -> verified datasets.

  python -m data_tools synth  OUT --patients 100              a synthetic archive in the real layouts
  python -m data_tools shard  SRC [SRC ...] --out DATASET     an archive -> shards; run again after any interruption
  python -m data_tools verify DATASET [--source SRC] [--fast] is every byte right? exit 0 only if everything holds
  python -m data_tools show   DATASET|RECORD [--png FILE]     a summary; a 12-lead plot

SRC and DATASET may be folders or s3:// addresses (AWS_ENDPOINT_URL and the usual credentials are honoured).
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_tools.cli import Parser, drop_output, is_memory
from data_tools.errors import DataError, printable


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.exit(2, f"{parser.prog} {options.command}: no such option: {' '.join(unknown)} (--help shows all)\n")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except KeyboardInterrupt:
        mend = {"shard": ": run the same command again to go on"}
        if options.command == "synth":
            mend["synth"] = f": delete {options.out} and run it again"
        print(f"interrupted{mend.get(options.command, '')}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return drop_output()
    except (DataError, OSError, MemoryError, RuntimeError) as error:
        if is_memory(error):
            error = MemoryError("out of memory: lower --workers, or raise the limit (ulimit -v)")
        elif isinstance(error, RuntimeError):
            raise
        print(f"data_tools {options.command}: {printable(str(error))}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m data_tools", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="synth|shard|verify|show")

    synth = commands.add_parser("synth", help="a synthetic archive", description="Write an archive of synthetic patients.")
    synth.add_argument("out", metavar="OUT", help="an empty or new folder")
    synth.add_argument("--patients", type=_positive, default=100, help="PTB-XL patients, and as many further records (100)")
    synth.add_argument("--sessions", type=_positive, default=2, help="recordings of each PTB-XL patient (2)")
    synth.add_argument("--seed", type=_natural, default=0, help="same seed, same bytes (0)")
    synth.add_argument("--layout", choices=("physionet2021", "ptbxl"), default="physionet2021", help="(physionet2021)")
    synth.add_argument("--workers", type=_positive, default=1, help="processes (1)")
    synth.set_defaults(run=_synth)

    shard = commands.add_parser(
        "shard", help="archives -> dataset", description="Archives -> dataset. Finishes what was begun."
    )
    shard.add_argument("sources", metavar="SRC", nargs="+", help="a folder or s3:// address of an archive")
    shard.add_argument("--out", metavar="DATASET", required=True, help="where to write")
    shard.add_argument("--source", default="auto", metavar="KIND", help=SOURCE_HELP)
    shard.add_argument("--patients", metavar="CSV", help="ptbxl_database.csv, if it is not in the Challenge's archive")
    shard.add_argument("--format", choices=("tar", "zarr", "both"), default="tar", help="(tar)")
    shard.add_argument(
        "--plan", choices=("paper", "all", "paper-split"), default="paper", help="who trains and who tests (paper)"
    )
    shard.add_argument("--dx-sources", metavar="NAME", nargs="+", help="whose records get diagnosis roles (cpsc_2018 georgia)")
    shard.add_argument("--id-sources", metavar="NAME", nargs="+", help="whose patients get gallery and probe (ptb-xl)")
    shard.add_argument(
        "--pretrain-sources",
        metavar="NAME",
        nargs="+",
        help="what is for pre-training, or `all` (all but ptb and st_petersburg_incart)",
    )
    shard.add_argument("--id-share", type=_share, metavar="X", help="most of a source's patients for gallery and probe (0.15)")
    shard.add_argument("--seed", type=_natural, default=0, help="of the order and of the roles (0)")
    shard.add_argument("--workers", type=_positive, default=os.cpu_count() or 1, help="processes (all cores)")
    shard.add_argument("--cluster", metavar="tcp://HOST:8786", help="a Dask scheduler instead of processes")
    shard.add_argument("--extend", metavar="DATASET", help="keep this dataset's shards and add SRC's new records after them")
    shard.add_argument("--pseudonymize", metavar="KEYFILE", help="replace record and patient ids by keyed hashes")
    shard.add_argument("--anonymous", action="store_true", help="read public buckets without credentials")
    shard.add_argument("--strict", action="store_true", help="exit 2 if any record was refused")
    shard.set_defaults(run=_shard)

    verify = commands.add_parser("verify", help="check a dataset", description="Exit 0 only if everything holds.")
    verify.add_argument("dataset", metavar="DATASET")
    verify.add_argument("--source", metavar="SRC", action="append", help="compare with the archive; once for each SRC")
    verify.add_argument("--kind", default="auto", metavar="KIND", help="as --source of shard (auto)")
    verify.add_argument("--patients", metavar="CSV", help="as --patients of shard")
    verify.add_argument("--fast", action="store_true", help="structure, tables and sizes only: samples are not read")
    verify.add_argument("--workers", type=_positive, default=os.cpu_count() or 1, help="processes (all cores)")
    verify.add_argument("--pseudonymize", metavar="KEYFILE", help="the key the dataset was made with, for --source")
    verify.add_argument("--anonymous", action="store_true", help="read public buckets without credentials")
    verify.set_defaults(run=_verify)

    show = commands.add_parser("show", help="a summary or a plot", description="Of a dataset, one of its crops, or a record.")
    show.add_argument("what", metavar="DATASET|RECORD", help="a dataset, or a WFDB header file")
    show.add_argument("--crop", metavar="ROW", type=_natural, help="one crop of the dataset instead of the summary")
    show.add_argument("--anonymous", action="store_true", help="read public buckets without credentials")
    show.add_argument("--png", metavar="FILE", help="draw it")
    show.set_defaults(run=_show)
    return parser


SOURCE_HELP = "auto, physionet2021, ptbxl, mimic-iv-ecg, code15, wfdb, or your own module:Class (auto)"


def _positive(text: str) -> int:
    value = _natural(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def _quiet() -> bool:
    return not sys.stderr.isatty()


def _synth(options: argparse.Namespace) -> int:
    from data_tools.synth import synthesise

    counts = synthesise(
        options.out,
        options.patients,
        options.sessions,
        options.seed,
        options.layout,
        options.workers,
        progress=not _quiet(),
    )
    print(f"{options.out}: {sum(counts.values()):,} synthetic records: {', '.join(f'{n} {k}' for k, n in counts.items())}")
    return 0


def _opened(urls: list[str], kind: str, options: argparse.Namespace) -> list[Any]:
    from data_tools.sources import PhysioNet2021, open_sources

    sources = [source for url in urls for source in open_sources(url, kind, options.anonymous)]
    if options.patients:
        ours = [source for source in sources if isinstance(source, PhysioNet2021)]
        if not ours:
            raise DataError(
                f"--patients {options.patients}: is read with the Challenge's archive, and no SRC is one: leave it out"
            )
        if "://" not in options.patients and not Path(options.patients).exists():
            raise DataError(f"--patients {options.patients}: no such file: name PTB-XL's ptbxl_database.csv")
        for source in ours:
            source.table = options.patients
    return sources


def _shard(options: argparse.Namespace) -> int:
    from data_tools.build import ShardOptions, shard
    from data_tools.pseudonyms import read_key
    from data_tools.splits import RoleSources
    from data_tools.summary import describe, notes

    started = time.monotonic()
    named = {task: getattr(options, f"{task}_sources") for task in ("dx", "id", "pretrain")}
    chosen: dict[str, Any] = {task: tuple(sorted(set(names))) for task, names in named.items() if names}
    if options.id_share is not None:
        chosen["id_share"] = options.id_share
    if options.plan == "all" and chosen:
        given = "--id-share" if "id_share" in chosen else f"--{next(iter(chosen))}-sources"
        raise DataError(f"--plan all: everything is for pre-training, nothing for {given}: use --plan paper")
    key = read_key(options.pseudonymize) if options.pseudonymize else None
    sources = _opened(options.sources, options.source, options)
    for note in (note for source in sources for note in source.notes()):
        print(f"note: {printable(note)}", file=sys.stderr)
    settings = ShardOptions(
        out=options.out,
        plan=options.plan,
        seed=options.seed,
        role_sources=RoleSources(**chosen),
        format=options.format,
        workers=options.workers,
        cluster=options.cluster,
        pseudonym_key=key,
        extend=options.extend,
        quiet=_quiet(),
    )
    dataset = shard(sources, settings)
    print(describe(dataset))
    refused = sum(source["records"]["refused"] for source in dataset.meta["sources"])
    print(f"\n{refused} records refused; {time.monotonic() - started:.1f} s")
    for note in notes(dataset):
        print(f"note: {note}", file=sys.stderr)
    if options.strict and refused:
        print(f"data_tools shard: --strict: {refused} records were refused, see {options.out}/rejects.csv", file=sys.stderr)
        return 2
    return 0


def _verify(options: argparse.Namespace) -> int:
    from data_tools.dataset import Dataset
    from data_tools.pseudonyms import read_key
    from data_tools.verify import verify

    started = time.monotonic()
    key = read_key(options.pseudonymize) if options.pseudonymize else None
    dataset = Dataset.open(options.dataset, options.anonymous)
    sources = _opened(options.source or [], options.kind, options)
    found = verify(dataset, sources, options.fast, options.workers, key, _quiet())
    for finding in found:
        print(printable(finding))
    checked = "structure, tables, roles and sizes" if options.fast else "every byte, row and role"
    checked += ", the archive's samples" if sources else ""
    if options.fast:
        files = " and ".join(
            {"tar": "shards/", "zarr": "store.zarr"}[name]
            for name in dataset.meta["formats"]
            if name != "tar" or dataset.shards
        )
        checked += f"; not read: the contents of {files}, run without --fast for these"
    verdict = f"{len(found)} finding{'s' * (len(found) != 1)}" if found else f"everything holds ({checked})"
    print(f"{options.dataset}: {len(dataset):,} crops, {verdict}; {time.monotonic() - started:.1f} s")
    return 1 if found else 0


def _show(options: argparse.Namespace) -> int:
    from data_tools import plots
    from data_tools.dataset import Dataset
    from data_tools.summary import describe, figure

    if options.png and not os.access(parent := Path(options.png).absolute().parent, os.W_OK | os.X_OK):
        raise DataError(f"--png {options.png}: no folder {parent} that may be written to: choose another place")
    if options.png and Path(options.png).exists() and not Path(options.png).is_file():
        raise DataError(f"--png {options.png}: no regular file, and would be replaced: choose another place")
    if options.png:
        plots.kind_of(Path(options.png))
    if options.what.endswith(".hea"):
        if options.crop is not None:
            raise DataError(f"--crop {options.crop}: {options.what} is a record, and only datasets have crops: leave it out")
        drawn = _record_figure(options.what)
    else:
        dataset = Dataset.open(options.what, options.anonymous)
        if options.crop is None:
            print(describe(dataset))
            drawn = figure(dataset) if options.png else None
        else:
            drawn = _crop_figure(dataset, options.crop)
    if options.png:
        plots.save(drawn, options.png)
        print(f"drawn: {options.png}")
    return 0


def _crop_figure(dataset: Any, row: int) -> Any:
    from data_tools.plots import ecg_figure
    from data_tools.prepare import FS_HZ, HALF

    if row >= len(dataset):
        raise DataError(f"--crop {row}: the dataset has crops 0 to {len(dataset) - 1}")
    facts = dataset.table().slice(row, 1).to_pylist()[0]
    for name, value in facts.items():
        if name not in ("labels", "offset", "crc32c", "waveform"):
            print(f"{name:15}{'' if value is None else value}")
    mv = dataset.read(row)[:, : HALF * facts["halves"]] / 1000.0
    title = f"{facts['source']}/{facts['record']}, from {facts['start_s']:g} s"
    return ecg_figure(mv, FS_HZ, title, _caption(facts["age"], facts["sex"], facts["dx"]), facts["missing_leads"])


def _record_figure(path: str) -> Any:
    import numpy as np

    from data_tools.dataset import CROP_SHAPE
    from data_tools.errors import ReadError
    from data_tools.plots import ecg_figure
    from data_tools.prepare import FS_HZ, HALF, crop_count, prepare_crop
    from data_tools.sources.wfdb_folder import WfdbFolder
    from data_tools.storage import folder

    place = Path(path)
    source = WfdbFolder(folder(str(place.parent)))
    try:
        record = source.read(place.name)
        seconds = record.signal.shape[1] / record.fs_hz
        print(
            f"{place.name}: {len(record.leads)} leads, {record.fs_hz:g} Hz, {seconds:g} s, dx {', '.join(record.dx) or 'none'}"
        )
        for reason, detail in record.warnings:
            print(f"  {reason}: {detail}")
        if not crop_count(record.signal.shape[1], record.fs_hz):
            raise ReadError("too short", f"{seconds:g} s")
        crop = np.empty(CROP_SHAPE, "<i2")
        facts = prepare_crop(record, 0, crop)
    except ReadError as error:
        raise DataError(f"{path} would be refused: {error}") from None
    mv = crop[:, : HALF * facts.halves] / 1000.0
    return ecg_figure(mv, FS_HZ, record.name, _caption(record.age, record.sex, record.dx), facts.missing)


def _caption(age: float | None, sex: str | None, dx: list[str] | tuple[str, ...]) -> str:
    from data_tools.record import ABBREVIATIONS, CLASS_OF

    names = [ABBREVIATIONS[CLASS_OF[code]] if code in CLASS_OF else code for code in dx]
    return ", ".join([*(f"{age:.0f} years" for age in [age] if age is not None), *([sex] if sex else []), *names])


if __name__ == "__main__":
    sys.exit(main())
