"""Build a dataset from archives: make the plan, write the shards in parallel, then the tables, and
dataset.json last.

A shard is one task and depends only on its list of crops. Each finished shard has a *part* file:
its rows of samples.parquet without roles, its rejects, a hash of its content, and the part's own
sha256. When `shard` is run again after an interruption, it keeps valid parts whose content hash
matches and builds the others again. A run may be killed at any moment, any number of times, and
still ends with the same bytes. If only the roles of a finished dataset change, its table is written
again, and its shards stay.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import starmap
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from ..dataset import (
    CROP_SHAPE,
    META,
    REJECTS,
    SHARD_CROPS,
    Dataset,
    crc_and_waveform_hash,
    label_names,
)
from ..dataset.rejects import Reject
from ..ecg.crops import Crop, crop_flags, prepare_crop
from ..ecg.pseudonyms import key_fingerprint, pseudonym
from ..ecg.record import EcgRecord, class_row, patient_source
from ..io import cluster
from ..io.errors import DataError, DatasetError, Flag, ReadError, StorageError
from ..io.storage import (
    Folder,
    dataset_folder,
    explain_write_errors,
    locked_by_another,
    prefetch,
    temporary_path,
)
from ..io.terminal import keep_freed_memory, tell
from ..sources.base import Source, dataset_patient, detail_with_path, read_record, read_safely
from ..sources.dataset import StoredDataset
from .finishing import (
    PART_COLUMNS,
    PlanFacts,
    ShardParts,
    finish_dataset,
    raise_no_record_error,
    read_part,
    recipe_hash,
    remove_build_folder,
    restore_table,
    write_part,
    write_roles,
)
from .finishing import ShardOptions as ShardOptions
from .plan import PlannedCrops, ShardPlan, make_plan, reject_line
from .roles import PAPER_SOURCES, RoleSources
from .shards import MAX_INDEX_BYTES, TarWriter, index_name, part_name, shard_name

LOCK_TRIES = 100
CACHED_RECORDS = 8  # records in memory, so that one with several crops in a shard is read once


def shard(sources: list[Source], options: ShardOptions) -> Dataset:
    """Builds the dataset, or finishes an interrupted build."""
    out = dataset_folder(options.out)
    if not out.remote and os.path.exists(out.url) and not os.path.isdir(out.url):
        raise DataError(Flag("--out"), f" {options.out}: is a file: choose a folder")
    if options.shard_crops and options.format == "zarr":
        raise DataError(
            Flag("--shard-crops"),
            f" {options.shard_crops}: ",
            Flag("--format"),
            " zarr writes no tar shards, so the number of their crops has no effect: leave it out",
        )
    complete = out.exists(META)
    unfinished = out.exists(".build")
    if not complete and not unfinished:
        with suppress(StorageError):  # a folder that does not exist cannot be listed
            # rejects.csv may come from a build whose records were all refused, and .build from a run that has
            # begun since `unfinished` was set
            if files := [name for name in out.children() if name not in (REJECTS, ".build")]:
                raise DataError(
                    f"{out.url} is not empty ({files[0]}, ...) and is not a dataset: choose another ",
                    Flag("--out"),
                )
    mark = _pseudonym_key_mark(sources, options.pseudonym_key)
    if any(source.root.url == out.url for source in sources):
        raise DataError(
            Flag("--out"),
            f" {options.out}: is also a source, and a dataset never changes: choose another ",
            Flag("--out"),
        )
    # A finished dataset is not locked, because its folder may be one that nobody can write to
    untouched = complete and not unfinished
    with nullcontext() if untouched else lock_folder(out):
        return _plan_and_build(sources, options, mark, out, is_locked=not untouched)


def _pseudonym_key_mark(sources: list[Source], key: bytes | None) -> str | None:
    """Returns a text that identifies the key of all pseudonyms in the new dataset; None without pseudonyms.
    Raises a DataError if a dataset among the sources has pseudonyms of another key."""
    mark = key_fingerprint(key)
    marks = {source.pseudonyms for source in sources}
    if not key and len(marks) == 1 and all(isinstance(source, StoredDataset) for source in sources):
        return marks.pop()
    for source in sources:
        if source.pseudonyms not in (None, mark):
            raise DataError(
                f"{source.root.url}: its names are pseudonyms: give the key that they were made with as ",
                Flag("--pseudonymize"),
                " KEYFILE, because all names need the same key",
            )
    return mark


@cluster.reuse_processes()
def _plan_and_build(
    sources: list[Source], options: ShardOptions, mark: str | None, out: Folder, is_locked: bool
) -> Dataset:
    plan = make_plan(
        sources,
        options.seed,
        options.workers,
        options.cluster,
        options.quiet,
        options.patients,
        options.pseudonym_key,
        options.shard_crops,
    )
    identities, contents = [], []
    left_out = "\n".join(options.leave_out.names) if options.leave_out else ""
    for planned_shard in plan.planned(range(plan.shards)):
        identities.append(planned_shard.identity)
        contents.append(planned_shard.content + (mark or "") + left_out)
    recipe = _recipe(options, identities, mark)
    if out.exists(META):
        return _already_finished(out, recipe, options, is_locked)
    if not plan.shards:
        return raise_no_record_error(out, plan.rejects)
    _build_missing_shards(plan, contents, out, options, {})
    planned = PlanFacts.of_plan(plan)
    if options.leave_out and (copies := _copies_of_left_out(ShardParts(out, planned.shards))):
        contents = [
            content + (json.dumps(copies[name]) if name in copies else "")
            for name, content in zip(planned.shards, contents, strict=True)
        ]
        _build_missing_shards(plan, contents, out, options, copies)
    del plan  # frees a gigabyte at ten million records
    return finish_dataset(planned, out, recipe, options)


def _copies_of_left_out(parts: ShardParts) -> dict[str, list[int]]:
    """Returns the waveform hashes of left-out crops that shards still contain, by the shard's name. The
    crops that are still there belong to another patient or to none."""
    waveforms: set[int] = set()
    for facts in parts.facts():
        waveforms |= {left[3] for left in facts["left_out"]}
    copies = {}
    for name, part in zip(parts.shards, parts, strict=True):
        if both := waveforms.intersection(part["waveform"].to_pylist()):
            copies[name] = sorted(both)
    return copies


@contextmanager
def lock_folder(out: Folder) -> Iterator[None]:
    """Lets only one run at a time write to a folder. First removes the temporary files of killed runs."""
    place, lock = _locked_folder_and_file(out)
    with lock:
        for path in (place / "tmp").iterdir():
            path.unlink()
        yield
        if out.remote:
            shutil.rmtree(place)


def _locked_folder_and_file(out: Folder) -> tuple[Path, IO[bytes]]:
    """Returns (folder for temporary files, file in this folder that this run has locked). If a run that
    ends at this moment removes both, tries again."""
    for _ in range(LOCK_TRIES):
        place = out.workdir()
        with suppress(FileNotFoundError), ExitStack() as refused:
            lock = refused.enter_context(open(place / "lock", "wb"))
            if locked_by_another(lock, out.url):
                break
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(place / "lock")):
                (place / "tmp").mkdir(exist_ok=True)
                refused.pop_all()  # after this, the block does not close the locked file
                return place, lock
    raise StorageError(
        f"{out.url}: another run is writing there: wait for it, or choose another ", Flag("--out")
    )


def _recipe(options: ShardOptions, identities: list[str], mark: str | None) -> dict[str, Any]:
    """Returns everything that determines the dataset's bytes. `identities`: hashes of the
    shards' contents; `mark`: identifies the key of pseudonyms."""
    recipe = {
        "plan": options.plan,
        "seed": options.seed,
        "format": options.format,
        "contents": identities,
        "pseudonyms": mark,
        **options.role_sources.to_meta(options.plan),
    }
    if options.shard_crops not in (None, SHARD_CROPS):
        recipe["shard_crops"] = options.shard_crops
    if options.leave_out:  # dataset.json stores no names, only a hash of the recipe
        recipe["leave_out"] = options.leave_out.names
    return recipe


ROLE_SETTINGS = ("plan", "id_share", "role_sources", "leave_out_flags")


def _already_finished(
    out: Folder, recipe: dict[str, Any], options: ShardOptions, is_locked: bool
) -> Dataset:
    """Returns the finished dataset. If only its roles differ from the recipe, first writes the new roles.
    Raises a DatasetError if anything else differs."""
    finished = Dataset.of_folder(out)
    url = finished.root.url
    if finished.facts.recipe == recipe_hash(recipe):
        if out.exists(".build"):
            restore_table(finished)
            remove_build_folder(finished)
        tell(f"note: {url} is already finished: nothing was done")
        return finished
    old = {name: finished.meta[name] for name in ROLE_SETTINGS if name in finished.meta}
    same = {name: value for name, value in recipe.items() if name not in ROLE_SETTINGS} | old
    if finished.facts.recipe == recipe_hash(same):
        tell(
            f"note: only roles differ from those of {url}: samples.parquet is written anew, no shard"
        )
        with nullcontext() if is_locked else lock_folder(out):
            return write_roles(finished, recipe, options)
    what = _changed_settings(finished, recipe) or "from other input or options"
    raise DatasetError(f"{url} is already finished ({what}): choose another ", Flag("--out"))


def _changed_settings(finished: Dataset, recipe: dict[str, Any]) -> str:
    """Returns a text on the settings that differ from those of the finished dataset."""
    formats = finished.facts.formats
    left_out = RoleSources.from_facts(finished.facts).leave_out
    old = (
        {"shard_crops": SHARD_CROPS}
        | finished.meta
        | {"format": "both" if len(formats) > 1 else formats[0]}
    )
    old["leave_out_flags"] = list(left_out)
    changed = []
    usual: dict[str, Any] = {"leave_out_flags": list(PAPER_SOURCES.leave_out), "role_sources": None}
    usual["shard_crops"] = SHARD_CROPS
    for name, value in (usual | recipe).items():
        if name in ("contents", "leave_out") or old.get(name) == value:
            continue
        if (
            name == "shard_crops"
        ):  # the new value is not shown: it may be a default that nobody typed
            changed.append(f"made with --shard-crops {old[name]}")
        else:
            changed.append(f"{name} was {old.get(name)}, not {value}")
    return ", ".join(changed)


def _build_missing_shards(
    plan: ShardPlan,
    contents: list[str],
    out: Folder,
    options: ShardOptions,
    copies: dict[str, list[int]],
) -> None:
    """Builds the shards that no earlier run has finished. `copies`: waveform hashes that a shard must
    not contain, by the shard's name."""
    written = set(out.names(".build"))  # files that an interrupted run has written
    left = []
    for number, content in enumerate(contents):
        if part_name(shard_name(number)) in written:
            left.append((number, content))
    checked = cluster.run(partial(_finished_shard, out), left, options.workers, options.cluster)
    quiet = options.quiet or not left
    finished = set(tqdm(checked, "checking finished shards", len(left), disable=quiet))
    missing = [number for number in range(len(contents)) if number not in finished]
    tasks = (
        (number, shard.crops, contents[number], copies.get(shard_name(number), []))
        for number, shard in zip(missing, plan.planned(missing), strict=True)
    )
    build = partial(build_shard, out, plan.sources, options)
    made = cluster.run(build, tasks, options.workers, options.cluster)
    done = len(contents) - len(missing)
    for _ in tqdm(
        made,
        total=len(contents),
        initial=done,
        unit=" shards",
        desc="shards",
        disable=options.quiet,
    ):
        pass


def _finished_shard(out: Folder, task: tuple[int, str]) -> int | None:
    """Returns the shard's number if an interrupted run has finished it, else None. The part is written
    last, so a shard with a part was complete. The shard is read again, because the disk may have damaged
    it since."""
    number, content = task
    name = shard_name(number)
    try:
        facts = json.loads(read_part(out, name).schema.metadata[b"omnilead"])
        if facts["content"] != content:
            return None
        index = out.read(index_name(name), MAX_INDEX_BYTES)
        tar = out.view(f"shards/{name}", facts["bytes"])
        sums = [hashlib.sha256(data).hexdigest() for data in (index, tar)]
        return number if sums == [facts["index"], facts["sha256"]] else None
    except (ReadError, KeyError):
        return None


def build_shard(
    out: Folder,
    sources: tuple[Source, ...],
    options: ShardOptions,
    task: tuple[int, PlannedCrops, str, list[int]],
) -> None:
    """Reads, prepares and writes the crops of one shard, then publishes its tar, index and part, in
    this order."""
    keep_freed_memory()
    number, crops, content, copies = task
    name = shard_name(number)
    temporary = temporary_path(out, name)
    try:
        with (
            explain_write_errors(out.url, f"shards/{name}"),
            open(temporary, "wb", buffering=1 << 20) as file,
        ):
            writer = _ShardWriter(TarWriter(file), options, set(copies))
            for source, path, label, part, record in _read_in_shard_order(sources, crops):
                writer.add(source, path, label, part, record)
            index = writer.tar.close().encode()
        out.publish(temporary, f"shards/{name}")
    finally:
        temporary.unlink(missing_ok=True)
    facts = {
        "content": content,
        "name": name,
        "crops": len(writer.rows),
        "bytes": writer.tar.size,
        "sha256": writer.tar.sha256.hexdigest(),
        "index": hashlib.sha256(index).hexdigest(),
        "rejects": writer.rejects,
        "left_out": writer.left_out,
    }
    out.write(index_name(name), index)
    for row in writer.rows:
        row["shard"] = number
    write_part(out, pa.Table.from_pylist(writer.rows, PART_COLUMNS), facts)


class _ShardWriter:
    """Prepares crops and appends them to a tar. `rejects` collects the lines for rejects.csv."""

    def __init__(self, tar: TarWriter, options: ShardOptions, copies: set[int]) -> None:
        """`copies`: waveform hashes of left-out patients. Crops with one of these are left out, too."""
        self.tar, self.options, self.copies = tar, options, copies
        self.rows: list[dict[str, Any]] = []
        self.rejects: list[Reject] = []
        # For each left-out crop: (source/record, the patient as the user's file names it, the patient as
        # SOURCE/PATIENT, waveform hash). Source/record and SOURCE/PATIENT are those that the dataset would
        # show. Both patients are "" for a copy. The part file holds these entries until the build ends
        self.left_out: list[tuple[str, str, str, int]] = []
        self.samples = np.empty(CROP_SHAPE, "<i2")

    def add(
        self, archive: Source, path: str, label: str, part: int, record: EcgRecord | ReadError
    ) -> None:
        """Adds crop number `part` of a record to the tar, and its flags and repairs to `rejects`. Of a crop
        that cannot be used, only `rejects` gets the reasons; a crop that must be left out is only added
        to `left_out`. `label`: source/name of the record."""
        source, _, name = label.partition("/")
        key = None if archive.pseudonyms else self.options.pseudonym_key
        notes: list[tuple[str, str]] = []
        try:
            if isinstance(record, ReadError):
                raise record
            notes += record.warnings if part == 0 else ()
            crop = prepare_crop(record, part, self.samples)
            row = table_row(source, pseudonym(key, "r", source, name), record, crop, key)
            row["crc32c"], row["waveform"] = crc_and_waveform_hash(self.samples)
        except ReadError as error:
            notes.append((error.reason, detail_with_path(archive.path_of(path), error.detail)))
            self.rejects += [reject_line(archive, key, source, name, *note) for note in notes]
            return
        if self._note_if_left_out(row):
            return
        for note in (*notes, *_flag_lines(crop)):
            self.rejects.append(reject_line(archive, key, source, name, *note))
        self._write(row, part)

    def _note_if_left_out(self, row: dict[str, Any]) -> bool:
        """Returns True if the crop must be left out. Adds it to `left_out` then."""
        if not self.options.leave_out:
            return False
        source, patient, hashed = row["source"], row["patient"], row["waveform"]
        label = f"{source}/{row['record']}"
        if who := self.options.leave_out.listed_name(source, patient):
            person = f"{patient_source(source)}/{patient}"
            self.left_out.append((label, who, person, hashed))
            return True
        if hashed in self.copies:
            self.left_out.append((label, "", "", hashed))
            return True
        return False

    def _write(self, row: dict[str, Any], part: int) -> None:
        """Appends the crop to the tar, with its row as JSON."""
        facts = row | {"crc32c": f"{row['crc32c']:08x}", "waveform": f"{row['waveform']:016x}"}
        facts["label_names"] = label_names(row["labels"])
        member = f"{row['source']}-{row['record']}-{part:03d}"
        ecg = self.samples.data.cast("B")
        row["offset"] = self.tar.add(member, ecg, json.dumps(facts).encode())
        self.rows.append(row)


def table_row(
    source: str, name: str, record: EcgRecord, crop: Crop, key: bytes | None
) -> dict[str, Any]:
    return {
        "source": source,
        "record": name,
        "patient": dataset_patient(key, source, record.patient),
        "start_s": crop.start_s,
        "halves": crop.halves,
        "missing_leads": crop.missing,
        "flags": crop_flags(record, crop),
        "dx": record.dx,
        "labels": class_row(record.dx),
        "age": record.age,
        "sex": record.sex,
        "fs_source_hz": float(record.fs_hz),
    }


def _flag_lines(crop: Crop) -> Iterator[tuple[str, str]]:
    """Yields (reason, detail) for rejects.csv for each unusual property of a crop that can be used."""
    when = f"at {crop.start_s:g} s"
    if crop.missing:
        yield "lead not measured", f"{' '.join(crop.missing)} {when}"
    if flat := [flag.removeprefix("flat:") for flag in crop.flags if flag.startswith("flat:")]:
        yield "flat lead", f"{' '.join(flat)} {when}"
    yield from ((flag, when) for flag in crop.flags if not flag.startswith("flat:"))


def _read_in_shard_order(
    sources: tuple[Source, ...], crops: PlannedCrops
) -> Iterator[tuple[Source, str, str, int, EcgRecord | ReadError]]:
    """Yields (source, record's key, label, number of the crop in the record, record) for each crop, in shard
    order. Remote records are prefetched."""
    read = lru_cache(CACHED_RECORDS)(
        lambda archive, key: read_safely(partial(read_record, sources[archive]), key)
    )
    remote = any(source.root.remote for source in sources)
    pairs = [crop[:2] for crop in crops]
    records = prefetch(lambda pair: read(*pair), pairs) if remote else starmap(read, pairs)
    for (archive, key, label, patient, part), record in zip(crops, records, strict=True):
        if patient and isinstance(record, EcgRecord):
            record = replace(record, patient=patient)
        yield sources[archive], key, label, part, record
