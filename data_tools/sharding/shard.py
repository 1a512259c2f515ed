"""Build a dataset from archives: plan, write shards in parallel, then tables, and dataset.json
last.

A shard is one task and depends only on its list of crops. Each finished shard has a *part* file:
its rows of samples.parquet, its rejects, a hash of its content, and the part's own sha256. When
`shard` is run again after an interruption, it keeps valid parts whose content hash matches and
builds the others again. A run may be killed at any moment, any number of times, and still ends with
the same bytes.

Roles depend on all records, so a shard is written with those that its crops are expected to have. At
the end others are written in their place, of fixed width, where it turned out otherwise. The part has
a crc32c of everything else for that: once its sha256 is gone, the shard is valid whichever roles it
has, and writing them again changes nothing.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import starmap
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from ..dataset import (
    COLUMNS,
    CROP_SHAPE,
    META,
    REJECTS,
    SHARD_CROPS,
    Dataset,
    label_names,
    waveform,
)
from ..ecg.crops import Crop, flags_of, prepare_crop
from ..ecg.pseudonyms import REMOVED, key_mark, pseudonym
from ..ecg.record import EcgRecord, class_row
from ..io import cluster
from ..io.errors import DataError, DatasetError, ReadError, StorageError
from ..io.storage import (
    Folder,
    dataset_folder,
    locked_by_another,
    prefetch,
    temporary_path,
    write_errors,
)
from ..io.terminal import keep_freed_memory
from ..sources.base import Source, located, read_safely, shown_patient
from .expected_roles import expected_roles
from .finishing import (
    ROLES,
    Parts,
    PlanFacts,
    check_patients,
    finish,
    hidden,
    nothing_to_add,
    read_part,
    recipe_hash,
    remove_traces,
    whole_tar,
    write_part,
)
from .finishing import ShardOptions as ShardOptions
from .known import KnownRecords
from .plan import PlannedCrops, ShardPlan, make_plan
from .previous import PreviousVersion
from .rejects import Reject, rejects_of
from .roles import PAPER_SOURCES, ROLE_NAMES, CropRoles, RoleSources
from .shards import MAX_INDEX, TarWriter, index_name, part_name, roles_text, shard_name

SAMPLE = 100  # records, of which one has a patient if many have
RECORDS_HELD = 8  # cached, so a long record with several crops in a shard is read once


def shard(sources: list[Source], options: ShardOptions) -> Dataset:
    """Build the dataset, or finish an interrupted build."""
    out = dataset_folder(options.out)
    if not out.remote and os.path.exists(out.url) and not os.path.isdir(out.url):
        raise DataError(f"--out {options.out}: is a file: choose a folder")
    if options.shard_crops and options.format == "zarr":
        raise DataError(
            f"--shard-crops {options.shard_crops}: --format zarr writes no tar shards, whose crops this "
            "option counts: leave it out"
        )
    complete = out.exists(META)
    unfinished = out.exists(".build")
    if not complete and not unfinished:
        with suppress(StorageError):  # the folder does not exist
            # rejects.csv is left if all records were refused
            if files := [name for name in out.children() if name != REJECTS]:
                raise DataError(
                    f"{out.url} is not empty ({files[0]}, ...) and is not a dataset: choose "
                    "another --out"
                )
    if options.append:
        Dataset.open(options.out)  # before a folder is made
    # A finished dataset may lie where nobody can write
    untouched = complete and not unfinished and not options.append
    with nullcontext() if untouched else locked(out):
        return _plan_and_build(sources, options, out)


@cluster.reused_processes()
def _plan_and_build(sources: list[Source], options: ShardOptions, out: Folder) -> Dataset:
    previous = known = None
    if options.append:
        previous = PreviousVersion.open(options.out)
        previous.check_appendable(options.out)
        known = KnownRecords.of_dataset(previous, rejects_of(previous), options.pseudonym_key)
        options = replace(options, removed=previous.removed)
        if options.shard_crops is None:
            options = replace(options, shard_crops=previous.meta.get("shard_crops"))
    plan = make_plan(
        sources,
        options.seed,
        options.workers,
        options.cluster,
        options.quiet,
        options.patients,
        options.pseudonym_key,
        known,
        options.shard_crops,
    )
    mark = key_mark(options.pseudonym_key)
    identities, contents = [], []
    for planned_shard in plan.planned(range(plan.shards)):
        identities.append(planned_shard.identity)
        contents.append(planned_shard.content + (mark or ""))
    recipe = _recipe(options, identities, mark)
    if out.exists(META) and not previous:
        return _already_finished(Dataset.open(options.out), recipe)
    if previous and (changed := _changed_settings(previous, recipe)):
        raise DataError(f"--append: {changed}: give the options that {out.url} was made with")
    if not plan.shards and not previous:
        return nothing_to_add(out, hidden(plan.rejects, options), None)
    expected = expected_roles(plan, options, previous)
    pa.default_memory_pool().release_unused()  # 260 MB after ten million records
    if previous and len(contents) > 1:  # what is refused then should not cost hours
        _build(plan, expected, contents[:1], out, options, previous)
        first = shard_name(previous.next_shard_number)
        check_patients(Parts(out, [first]), previous, SAMPLE)
    _build(plan, expected, contents, out, options, previous)
    planned = PlanFacts.of_plan(plan, previous)
    del plan, expected  # a gigabyte of ten million records
    return finish(planned, out, recipe, options, previous)


@contextmanager
def locked(out: Folder) -> Iterator[None]:
    """Let only one run write to a folder; it first removes the temporary files of killed runs."""
    place = out.workdir()
    with open(place / "lock", "wb") as lock:
        if locked_by_another(lock, out.url):
            raise StorageError(
                f"{out.url}: another run is writing there: wait for it, or choose another --out"
            )
        for path in (place / "tmp").iterdir():
            path.unlink()
        yield
        if out.remote:
            shutil.rmtree(place)


def _recipe(options: ShardOptions, identities: list[str], mark: str | None) -> dict[str, Any]:
    """All that determines the bytes. `identities`: of the shards; `mark`: of the key of pseudonyms."""
    recipe = {
        "plan": options.plan,
        "seed": options.seed,
        "format": options.format,
        "contents": identities,
        "pseudonyms": mark,
        "base": None,  # in the hash since version 1
        **options.role_sources.to_meta(options.plan),
    }
    if options.shard_crops not in (None, SHARD_CROPS):
        recipe["shard_crops"] = options.shard_crops
    return recipe


def _already_finished(finished: Dataset, recipe: dict[str, Any]) -> Dataset:
    """Return the finished dataset; an error if it was made with another recipe."""
    if finished.meta["recipe"] != recipe_hash(recipe):
        what = _changed_settings(finished, recipe) or "from other input or options"
        raise DatasetError(
            f"{finished.root.url} is already finished ({what}): choose another --out"
        )
    if finished.root.exists(".build"):  # a build was killed, perhaps that of another version
        remove_traces(finished)
    return finished


def _changed_settings(finished: Dataset, recipe: dict[str, Any]) -> str:
    """Which settings differ from those it was made with."""
    formats = finished.meta["formats"]
    left_out = RoleSources.from_meta(finished.meta).leave_out
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
        if name in ("contents", "base") or old.get(name) == value:
            continue
        if name == "shard_crops":  # the usual value is seldom given
            changed.append(f"made with --shard-crops {old[name]}")
        else:
            changed.append(f"{name} was {old.get(name)}, not {value}")
    return ", ".join(changed)


def _build(
    plan: ShardPlan,
    expected: CropRoles,
    contents: list[str],
    out: Folder,
    options: ShardOptions,
    previous: PreviousVersion | None,
) -> None:
    """Build the missing ones of so many shards."""
    first = previous.next_shard_number if previous else 0
    written = set(out.names(".build"))  # by an interrupted run
    left = []
    for number, content in enumerate(contents, first):
        if part_name(shard_name(number)) in written:
            left.append((number, content))
    checked = cluster.run(partial(_finished, out), left, options.workers, options.cluster)
    quiet = options.quiet or not left
    finished = set(tqdm(checked, "checking finished shards", len(left), disable=quiet))
    missing = [i for i in range(len(contents)) if first + i not in finished]
    tasks = (
        (first + i, shard.crops, expected.take(shard.numbers), contents[i])
        for i, shard in zip(missing, plan.planned(missing), strict=True)
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


def _finished(out: Folder, task: tuple[int, str]) -> int | None:
    """The shard's number if an interrupted run has finished it. Its part is written last, so the
    shard was whole then; it is read again, because the disk may have damaged it since."""
    number, content = task
    name = shard_name(number)
    try:
        facts = json.loads(read_part(out, name).schema.metadata[b"omnilead"])
        if facts["content"] != content:
            return None
        index = out.read(index_name(name), MAX_INDEX)
        if hashlib.sha256(index).hexdigest() != facts["index"]:
            return None
        whole_tar(out, facts)
        return number
    except (ReadError, KeyError):
        return None


def build_shard(
    out: Folder,
    sources: tuple[Source, ...],
    options: ShardOptions,
    task: tuple[int, PlannedCrops, CropRoles, str],
) -> None:
    """Read, prepare and write the crops of one shard, then publish its tar, index and part, in this
    order."""
    keep_freed_memory()
    number, crops, roles, content = task
    name = shard_name(number)
    temporary = temporary_path(out, name)
    try:
        with (
            write_errors(out.url, f"shards/{name}"),
            open(temporary, "wb", buffering=1 << 20) as file,
        ):
            writer = _ShardWriter(TarWriter(file), options)
            for place, (path, label, part, record) in enumerate(_records(sources, crops)):
                writer.add(path, label, part, record, roles.take(slice(place, place + 1)))
            index = writer.tar.close().encode()
        out.publish(temporary, f"shards/{name}")
    finally:
        temporary.unlink(missing_ok=True)
    facts = {
        "content": content,
        "name": name,
        "crops": len(writer.rows),
        "bytes": writer.tar.size,
        "crc32c": writer.tar.crc32c,
        "roles_at": writer.tar.roles_at,
        "sha256": writer.tar.sha256.hexdigest(),
        "index": hashlib.sha256(index).hexdigest(),
        "rejects": writer.rejects,
    }
    out.write(index_name(name), index)
    for row in writer.rows:
        row["shard"] = number
    write_part(out, pa.Table.from_pylist(writer.rows, COLUMNS), facts)


class _ShardWriter:
    """Prepares crops and appends them to a tar; what cannot be used is noted in `rejects`."""

    def __init__(self, tar: TarWriter, options: ShardOptions) -> None:
        self.tar = tar
        self.options = options
        self.key = options.pseudonym_key
        self.leave_out = set(options.role_sources.leave_out)
        self.rows: list[dict[str, Any]] = []
        self.rejects: list[Reject] = []
        self.samples = np.empty(CROP_SHAPE, "<i2")

    def add(
        self, path: str, label: str, part: int, record: EcgRecord | ReadError, roles: CropRoles
    ) -> None:
        """Add crop number `part` of a record. `label`: its source/name; `roles`: the crop's, if it has
        no flag that leaves it out."""
        source, _, name = label.partition("/")
        notes: list[tuple[str, str]] = []
        try:
            if isinstance(record, ReadError):
                raise record
            patient = shown_patient(self.key, source, record.patient)
            self.options.removed.refuse(source, patient)
            notes += record.warnings if part == 0 else ()
            crop = prepare_crop(record, part, self.samples)
            row = row_of(source, pseudonym(self.key, "r", source, name), record, crop, self.key)
            row["crc32c"], row["waveform"] = waveform(self.samples)
            self.options.removed.refuse("", str(row["waveform"]))
        except ReadError as error:
            if error.reason == REMOVED:
                notes = []
            notes.append((error.reason, located(path, error.detail)))
            refused = [(source, name, *note) for note in notes]
            self.rejects += hidden(refused, self.options)
            return
        # With a key without details, which may have names of files
        for reason, detail in (*notes, *_flags(crop)):
            self.rejects.append((source, row["record"], reason, "" if self.key else detail))
        self._write(row, part, roles)

    def _write(self, row: dict[str, Any], part: int, roles: CropRoles) -> None:
        """Append the crop to the tar, with its row as JSON."""
        facts = row | {"crc32c": f"{row['crc32c']:08x}", "waveform": f"{row['waveform']:016x}"}
        facts["label_names"] = label_names(row["labels"])
        text = json.dumps(facts).removesuffix("}").encode() + b", "
        named = self._named(roles, row["flags"])
        member = f"{row['source']}-{row['record']}-{part:03d}"
        ecg = self.samples.data.cast("B")
        row["offset"] = self.tar.add(member, ecg, text, roles_text(*named.values()))
        self.rows.append(row | named)

    def _named(self, roles: CropRoles, flags: tuple[str, ...]) -> dict[str, Any]:
        """The roles of one crop as in its row."""
        kinds = {flag.partition(":")[0] for flag in flags}
        if kinds & self.leave_out:
            roles = roles.take(np.array([0]))  # a copy
            roles.leave_out(np.array([True]))
        dx, identity = ROLE_NAMES[roles.dx[0]], ROLE_NAMES[roles.identity[0]]
        names = bool(roles.pretrain[0]), dx or None, identity or None
        return dict(zip(ROLES, names, strict=True))


def row_of(
    source: str, name: str, record: EcgRecord, crop: Crop, key: bytes | None
) -> dict[str, Any]:
    return {
        "source": source,
        "record": name,
        "patient": shown_patient(key, source, record.patient),
        "start_s": crop.start_s,
        "halves": crop.halves,
        "missing_leads": crop.missing,
        "flags": flags_of(record, crop),
        "dx": record.dx,
        "labels": class_row(record.dx),
        "age": record.age,
        "sex": record.sex,
        "fs_source_hz": float(record.fs_hz),
    }


def _flags(crop: Crop) -> Iterator[tuple[str, str]]:
    """(reason, detail) rows of rejects.csv for a usable but unusual crop."""
    when = f"at {crop.start_s:g} s"
    if crop.missing:
        yield "lead not measured", f"{' '.join(crop.missing)} {when}"
    if flat := [flag.removeprefix("flat:") for flag in crop.flags if flag.startswith("flat:")]:
        yield "flat lead", f"{' '.join(flat)} {when}"
    yield from ((flag, when) for flag in crop.flags if not flag.startswith("flat:"))


def _records(
    sources: tuple[Source, ...], crops: PlannedCrops
) -> Iterator[tuple[str, str, int, EcgRecord | ReadError]]:
    """(key, label, crop, record) in shard order; remote records are prefetched."""
    read = lru_cache(RECORDS_HELD)(lambda archive, key: read_safely(sources[archive].read, key))
    remote = any(source.root.remote for source in sources)
    pairs = [crop[:2] for crop in crops]
    records = prefetch(lambda pair: read(*pair), pairs) if remote else starmap(read, pairs)
    for (_, key, label, patient, part), record in zip(crops, records, strict=True):
        if patient and isinstance(record, EcgRecord):
            record = replace(record, patient=patient)
        yield key, label, part, record
