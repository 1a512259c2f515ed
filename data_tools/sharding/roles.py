"""Assign train, validation and test roles by keyed hashes, so that a record keeps its roles when
data is added.

Records of one patient and records with the same waveform form a *group*, which gets its roles as a
whole and is never split. The code works on whole columns (numpy), and on names a part at a time, so
that ten million records take a minute and a gigabyte.

`paper`        by group, as the paper describes; no leakage; the default
`paper-split`  by crop, as the code of the paper's authors does: crops of one ECG can be in both
               train and test. For comparison only
`all`          everything is for pre-training
"""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..dataset import DatasetFacts
from ..ecg.constants import IMPLAUSIBLE
from ..ecg.record import patient_source, real_source

NONE, TRAIN, VALID, TEST, GALLERY, PROBE = range(6)
ROLE_NAMES = ("", "train", "valid", "test", "gallery", "probe")
NAMES_PER_PART = 65_536  # names that are held as Python objects at the same time
HASH_BUCKETS = 16  # equal texts fall into the same bucket, so texts are compared bucket by bucket
# Challenge databases that the paper does not use; one of them has 13,000 crops of only 32 patients
UNUSED_BY_PAPER = ("ptb", "st_petersburg_incart")


@dataclass(frozen=True)
class RoleSources:
    """The sources that get each role, and the flags that keep crops out of pre-training."""

    dx: tuple[str, ...] = ("cpsc_2018", "georgia")
    id: tuple[str, ...] = ("ptb-xl",)
    pretrain: tuple[str, ...] | None = None  # None means all but UNUSED_BY_PAPER
    id_share: float = 0.15  # largest share of a source's patients in gallery and probe
    # Crops with one of these flags are not for pre-training
    leave_out: tuple[str, ...] = (IMPLAUSIBLE,)

    def pretrains(self, source: str) -> bool:
        """Returns True if a source is for pre-training. This depends on the source alone, so that
        adding an archive does not change the roles of other sources."""
        if self.pretrain is None:
            return real_source(source) not in UNUSED_BY_PAPER
        return contains_source(source, self.pretrain) or "all" in self.pretrain

    def to_meta(self, plan: str) -> dict[str, Any]:
        """Returns the entries for dataset.json: `id_share` and each setting that differs from its
        default. With the plan `all`, returns only the flags, because all sources have the same role."""
        meta: dict[str, Any] = {}
        if self.leave_out != PAPER_SOURCES.leave_out:
            meta["leave_out_flags"] = list(self.leave_out)
        if plan == "all":
            return meta
        meta["id_share"] = self.id_share
        changed = {}
        for name in ("dx", "id", "pretrain"):
            value = getattr(self, name)
            if value != getattr(PAPER_SOURCES, name):
                changed[name] = list(value)
        if changed:
            meta["role_sources"] = changed
        return meta

    @classmethod
    def from_facts(cls, facts: DatasetFacts) -> "RoleSources":
        given: dict[str, Any] = {}
        for task, sources in facts.role_sources.items():
            given[task] = tuple(sources)
        if facts.id_share is not None:
            given["id_share"] = facts.id_share
        if facts.leave_out_flags is not None:
            given["leave_out"] = tuple(facts.leave_out_flags)
        elif facts.pretrain_implausible:
            given["leave_out"] = ()
        return cls(**given)


PAPER_SOURCES = RoleSources()


def contains_source(source: str, names: Container[str]) -> bool:
    """Returns True if `names` has the source, or the source that a synthetic source imitates."""
    return source in names or real_source(source) in names


@dataclass(frozen=True)
class Records:
    """Columns of all records. A column has one entry per record or, if its comment says [crops], one
    entry per crop. Each record has at least one crop."""

    source: np.ndarray  # int, index into source_names
    source_names: tuple[str, ...]
    names: pa.Array  # of strings
    patients: pa.Array  # of strings, null where unknown
    crop_record: np.ndarray  # [crops] int, row of the crop's record in the other columns
    crop_start: np.ndarray  # [crops] seconds
    waveform: np.ndarray  # [crops] uint64, the waveform hash

    def is_from(self, *sources: str) -> np.ndarray:
        codes = []
        for code, name in enumerate(self.source_names):
            if contains_source(name, sources):
                codes.append(code)
        return np.isin(self.source, codes)

    def patient_source(self) -> np.ndarray:
        """Returns the column `source`, but with one number for all formats of hospitals' files, because
        patient ids in them share a namespace."""
        names = [patient_source(name) for name in self.source_names]
        numbers: np.ndarray = np.array([names.index(name) for name in names], np.int64)[self.source]
        return numbers

    @cached_property
    def patient_number(self) -> np.ndarray:
        """Returns the number of each record's patient, -1 where the patient is unknown."""
        names = pa.array([patient_source(name) for name in self.source_names])

        def patient_names() -> Iterator[pa.Array]:
            for part in part_slices(len(self.names)):
                source = names.take(pa.array(self.source[part]))
                yield pc.binary_join_element_wise(source, self.patients[part], "/")

        return number_texts(pa.chunked_array(patient_names(), pa.string()))

    @cached_property
    def group(self) -> np.ndarray:
        """Returns the number of each record's group. The groups are the connected components of records
        that share a patient or a waveform."""
        from scipy.sparse import coo_array  # this import takes 0.2 s, which workers are spared
        from scipy.sparse.csgraph import connected_components

        known = np.flatnonzero(self.patient_number >= 0)
        owned, owned_too = _link_equal_values(self.patient_number[known])
        crop, crop_too = _link_equal_values(self.waveform)
        ends = (
            np.concatenate([known[owned], self.crop_record[crop]]).astype(np.int32),
            np.concatenate([known[owned_too], self.crop_record[crop_too]]).astype(np.int32),
        )
        count = len(self.names)
        edges = coo_array((np.ones(len(ends[0]), bool), ends), shape=(count, count))
        group_of_record: np.ndarray = connected_components(edges, directed=False)[1]
        return group_of_record

    def label(self, record: int) -> str:
        return f"{self.source_names[self.source[record]]}/{self.names[record]}"


def part_slices(count: int) -> Iterator[slice]:
    for start in range(0, count, NAMES_PER_PART):
        yield slice(start, start + NAMES_PER_PART)


def number_texts(texts: pa.ChunkedArray) -> np.ndarray:
    """Returns a number for each text, counted from 0; equal texts have the same number, and null has -1.
    Arrow's hash table of all texts would take 100 bytes per text, so arrow gets the texts of one hash
    bucket at a time."""
    bucket = np.empty(len(texts), np.int8)
    for part in part_slices(len(texts)):
        bucket[part] = [hash(text) % HASH_BUCKETS for text in texts[part].to_pylist()]
    numbers = np.empty(len(texts), np.int32)
    count = 0
    for number in range(HASH_BUCKETS):
        in_bucket = bucket == number
        codes = texts.filter(pa.array(in_bucket)).combine_chunks().dictionary_encode()
        numbers[in_bucket] = pc.fill_null(pc.add(codes.indices, count), -1)
        count += len(codes.dictionary)
    pa.default_memory_pool().release_unused()  # frees 270 MB after ten million texts
    return numbers


def _link_equal_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of positions with equal values, as two arrays. The pairs of a value link all of its
    positions in a chain."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    return order[same], order[same + 1]


def _run_starts(ordered: np.ndarray) -> np.ndarray:
    """Returns the positions at which runs of equal values begin."""
    return np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))


@dataclass(frozen=True)
class CropRoles:
    """The roles of all crops, as columns with one entry per crop."""

    pretrain: np.ndarray
    dx: np.ndarray
    identity: np.ndarray

    def leave_out(self, crops: np.ndarray) -> None:
        """Keeps the crops of a mask out of pre-training and out of training on identification."""
        self.pretrain[crops] = False
        trained = np.isin(self.identity, (TRAIN, VALID))
        self.identity[crops & trained] = NONE


def assign_crop_roles(
    records: Records, plan: str, seed: int, sources: RoleSources = PAPER_SOURCES
) -> CropRoles:
    crops = len(records.crop_record)
    if plan == "all":
        return CropRoles(np.ones(crops, bool), np.zeros(crops, np.int8), np.zeros(crops, np.int8))
    if plan == "paper-split":
        return _assign_by_crop(records, seed, sources)
    group = records.group
    in_dx = records.is_from(*sources.dx)
    group_dx, group_identity = _draw_dx_and_id_roles(records, seed, in_dx)
    identity, tested = _gallery_probe_roles_and_mask(records, seed, sources)
    kept_out, has_dx = np.zeros((2, len(group_dx)), bool)
    # `kept_out`: groups that stay out of pre-training and of training on identification
    kept_out[group[tested]] = True
    has_dx[group[in_dx]] = True
    kept_out |= has_dx & (group_dx != TRAIN)
    crop_group = group[records.crop_record]
    pretrain = ~kept_out[crop_group] & _pretrain_records(records, sources)[records.crop_record]
    dx = np.where(in_dx[records.crop_record], group_dx[crop_group], NONE)
    identity[pretrain] = group_identity[crop_group[pretrain]]
    return CropRoles(pretrain, dx.astype(np.int8), identity)


def describe_leaks(records: Records, roles: CropRoles) -> list[str]:
    """Returns a sentence for each kind of leakage of patients or waveforms between roles; an empty list
    for a clean split."""
    group = records.group[records.crop_record]
    sentences = []
    for kind, leaking in _leaking_groups(group, roles).items():
        if leaking.any():
            record = records.crop_record[np.flatnonzero(group == np.flatnonzero(leaking)[0])[0]]
            sentences.append(
                f"{int(leaking.sum())} patients or waveforms in {kind}, for example that of "
                f"{records.label(record)}"
            )
    return sentences


def _leaking_groups(group: np.ndarray, roles: CropRoles) -> dict[str, np.ndarray]:
    """Returns a mask of the groups that leak, for each kind of leakage. `group`: each crop's group."""
    size = int(group.max()) + 1 if len(group) else 0

    def groups_with(mask: np.ndarray) -> np.ndarray:
        return np.bincount(group[mask], minlength=size) > 0

    dx = [groups_with(roles.dx == role) for role in (TRAIN, VALID, TEST)]
    id_train, id_valid, gallery, probe = (
        groups_with(roles.identity == role) for role in (TRAIN, VALID, GALLERY, PROBE)
    )
    tested, pretrain = gallery | probe, groups_with(roles.pretrain)
    return {
        "two of diagnosis train, valid and test": np.sum(dx, axis=0) > 1,
        "pre-training and diagnosis valid or test": pretrain & (dx[1] | dx[2]),
        "pre-training and gallery or probe": pretrain & tested,
        "identification train or valid, and gallery or probe": (id_train | id_valid) & tested,
        "identification train and valid": id_train & id_valid,
    }


def _train_valid_test(chance: np.ndarray) -> np.ndarray:
    role = np.full(len(chance), TEST, np.int8)
    role[chance < 0.9] = VALID
    role[chance < 0.8] = TRAIN
    return role


def _pretrain_records(records: Records, sources: RoleSources) -> np.ndarray:
    return records.is_from(*filter(sources.pretrains, records.source_names))


def keyed_uniform(texts: Iterable[str], key: str, draws: int = 1) -> np.ndarray:
    """Returns `draws` pseudo-random numbers in [0, 1) for each text, as [texts, draws]. They depend only on
    the text and the key."""
    keyed = blake2b(key=key.encode(), digest_size=8 * draws)
    words = bytearray()
    for text in texts:
        keyed_text = keyed.copy()  # a copy is faster than a new keyed hash
        keyed_text.update(text.encode())
        words += keyed_text.digest()
    numbers = np.frombuffer(words, ">u8").reshape(-1, draws)
    bits = numbers >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _draw_in_parts(count: int, texts: Callable[[slice], Iterable[str]], key: str) -> np.ndarray:
    """Returns one draw of keyed_uniform for each of `count` texts. `texts` yields the texts of a slice,
    so that only some are in memory."""
    draws = np.empty(count)
    for part in part_slices(count):
        draws[part] = keyed_uniform(texts(part), key)[:, 0]
    return draws


def _draw_dx_and_id_roles(
    records: Records, seed: int, in_dx: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (role in diagnosis, role in training on identification) of each group. A group has the roles
    that are drawn for one of its records, the leader. The leader is a record in the mask `in_dx` if the
    group has one, so that duplicates from other sources do not change the roles."""
    names = [patient_source(name) for name in records.source_names]

    def owner_names(part: slice) -> Iterator[str]:
        owners = pc.coalesce(records.patients[part], records.names[part]).to_pylist()
        for source, owner in zip(records.source[part], owners, strict=True):
            yield f"{names[source]}/{owner}"

    count = len(records.names)
    rank = np.empty(count)
    dx, identity = np.empty(count, np.int8), np.empty(count, np.int8)
    for part in part_slices(count):
        draws = keyed_uniform(owner_names(part), f"roles {seed}", draws=3)
        rank[part] = draws[:, 0]
        dx[part] = _train_valid_test(draws[:, 1])
        identity[part] = np.where(draws[:, 2] < 0.8, TRAIN, VALID)
    order = np.lexsort((rank, ~in_dx, records.group))
    leaders = order[_run_starts(records.group[order])]
    return dx[leaders], identity[leaders]


def _gallery_probe_roles_and_mask(
    records: Records, seed: int, sources: RoleSources
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (gallery or probe role of each crop, mask of the records that have a crop with such a role).
    Two sessions of each tested patient are drawn by keyed hash: the first crop of one is for the gallery,
    the first crop of the other is a probe. Two files with the same waveform count as one session."""
    identity = np.zeros(len(records.crop_record), np.int8)
    tested = np.zeros(len(records.names), bool)
    candidates = np.flatnonzero(records.is_from(*sources.id) & (records.patient_number >= 0))
    names = records.names.take(pa.array(candidates))
    ranks = _draw_in_parts(len(names), lambda part: names[part].to_pylist(), f"session {seed}")
    owner = records.patient_number[candidates]
    order = np.lexsort((records.source[candidates], ranks, owner))
    candidates = candidates[order]
    first_crop = _first_crops(records, candidates)
    begins = _run_starts(owner[order])
    sessions = np.diff(begins, append=len(candidates))
    first_session = np.repeat(begins, sessions)
    waveform = records.waveform[first_crop]
    later = np.flatnonzero(waveform != waveform[first_session])
    probes = later[_run_starts(first_session[later])]
    galleries = first_session[probes]
    drawn = _draw_tested_patients(records, candidates[begins], candidates[galleries], seed, sources)
    identity[first_crop[galleries[drawn]]] = GALLERY
    identity[first_crop[probes[drawn]]] = PROBE
    tested[candidates[galleries[drawn]]] = True
    tested[candidates[probes[drawn]]] = True
    return identity, tested


def _first_crops(records: Records, some: np.ndarray) -> np.ndarray:
    """Returns the number of the first crop of each record in `some`, which holds numbers of records."""
    place = np.full(len(records.names), -1, np.int32)
    place[some] = np.arange(len(some))
    crops = np.flatnonzero(place[records.crop_record] >= 0)
    record = place[records.crop_record[crops]]
    order = np.lexsort((records.crop_start[crops], record))
    first: np.ndarray = crops[order[_run_starts(record[order])]]
    return first


def _draw_tested_patients(
    records: Records, each: np.ndarray, twice: np.ndarray, seed: int, sources: RoleSources
) -> np.ndarray:
    """Returns a mask of the patients with two sessions: True for those who are tested.

    All of them are tested if they are at most `id_share` of their source's patients, as in the real
    PTB-XL (2,127 of 18,885). Otherwise the tested patients are those whose hash is below a limit: the
    first of 1/2, 1/4, ... that leaves at most that share. `each`: one record of each patient; `twice`:
    one record of each patient with two sessions.

    A ranking would come closer to `id_share`, but each new patient with a small hash would displace
    another one."""
    of_record = records.patient_source()
    patients = records.patients.take(pa.array(twice))
    source_of = of_record[twice]

    def patient_names(part: slice) -> Iterator[str]:
        for source, patient in zip(source_of[part], patients[part].to_pylist(), strict=True):
            yield f"{patient_source(records.source_names[source])}/{patient}"

    chances = _draw_in_parts(len(twice), patient_names, f"gallery {seed}")
    kinds = len(records.source_names)
    most = sources.id_share * np.bincount(of_record[each], minlength=kinds)
    drawn: np.ndarray = np.ones(len(twice), bool)
    limit = 1.0
    while (too_many := np.bincount(source_of[drawn], minlength=kinds) > most).any():
        limit /= 2
        drawn &= ~too_many[source_of] | (chances < limit)
    return drawn


def _assign_by_crop(records: Records, seed: int, sources: RoleSources) -> CropRoles:
    """Assigns roles crop by crop, as the code of the paper's authors does. Unlike in their paper, only
    crops for diagnosis valid and test stay out of pre-training."""

    def names_with_source(numbers: np.ndarray) -> Iterator[str]:
        names = records.names.take(pa.array(numbers)).to_pylist()
        for source, name in zip(records.source[numbers], names, strict=True):
            yield f"{records.source_names[source]}/{name}"

    def crop_names(part: slice) -> Iterator[str]:
        starts = records.crop_start[part]
        names = names_with_source(records.crop_record[part])
        for name, start in zip(names, starts, strict=True):
            yield f"{name}/{start:g}"

    every = np.arange(len(records.names))
    chance = _draw_in_parts(len(records.crop_record), crop_names, f"roles {seed}")
    dx = np.where(
        records.is_from(*sources.dx)[records.crop_record], _train_valid_test(chance), NONE
    ).astype(np.int8)
    identity, _ = _gallery_probe_roles_and_mask(records, seed, sources)
    record_chance = _draw_in_parts(
        len(every), lambda part: names_with_source(every[part]), f"identity {seed}"
    )
    pretrains = _pretrain_records(records, sources)
    trained = np.where(pretrains, np.where(record_chance < 0.8, TRAIN, VALID), NONE).astype(
        np.int8
    )[records.crop_record]
    pretrain = (dx != VALID) & (dx != TEST) & pretrains[records.crop_record]
    return CropRoles(pretrain, dx, np.where(identity == NONE, trained, identity))
