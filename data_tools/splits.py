"""Assign train, validation and test roles by keyed hashes, so that a record keeps its roles when
data is added.

Records of one patient and records with the same waveform form a *group*, which gets its roles as a
whole and is never split. The code works on whole columns (numpy), so ten million records take
seconds.

`paper`        by group, as the paper describes; no leakage; the default
`paper-split`  by crop, as the authors' code does: crops of one ECG can be in both train and
               test. For comparison only
`all`          everything is for pre-training
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from omnilead.data_tools.record import patient_source, real_source

NONE, TRAIN, VALID, TEST, GALLERY, PROBE = range(6)
ROLE_NAMES = ("", "train", "valid", "test", "gallery", "probe")
NOT_THE_PAPERS = (
    "ptb",
    "st_petersburg_incart",
)  # unused Challenge databases; one has 32 patients in 13,000 crops


@dataclass(frozen=True)
class RoleSources:
    """Which sources get which roles."""

    dx: tuple[str, ...] = ("cpsc_2018", "georgia")
    id: tuple[str, ...] = ("ptb-xl",)
    pretrain: tuple[str, ...] | None = None  # None: all but NOT_THE_PAPERS
    id_share: float = 0.15  # largest share of a source's patients in gallery and probe
    # Whether records of an implausible amplitude are for pre-training, too
    implausible: bool = False

    def pretrains(self, source: str) -> bool:
        """Whether a source is for pre-training; depends on this source only, so adding an archive
        changes no other."""
        if self.pretrain is None:
            return real_source(source) not in NOT_THE_PAPERS
        return is_named(source, self.pretrain) or "all" in self.pretrain

    def to_meta(self) -> dict[str, Any]:
        """Entries for dataset.json: `id_share`, and role sources that differ from the default."""
        changed = {}
        for name in ("dx", "id", "pretrain"):
            value = getattr(self, name)
            if value != getattr(PAPER_SOURCES, name):
                changed[name] = list(value)
        return {"id_share": self.id_share} | ({"role_sources": changed} if changed else {})

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> "RoleSources":
        chosen = {name: tuple(sources) for name, sources in meta.get("role_sources", {}).items()}
        implausible = meta.get("pretrain_implausible", cls.implausible)
        return cls(**chosen, id_share=meta.get("id_share", cls.id_share), implausible=implausible)


PAPER_SOURCES = RoleSources()


def is_named(source: str, names: Container[str]) -> bool:
    """Whether `names` has the source; a synthetic one has the roles of the one it imitates."""
    return source in names or real_source(source) in names


@dataclass(frozen=True)
class Records:
    """Columns with one entry per record, or per crop where marked [crops]. Each record has
    crops."""

    source: np.ndarray  # int, index of source_names
    source_names: tuple[str, ...]
    names: pa.Array  # of strings
    patients: pa.Array  # of strings, null where unknown
    crop_record: np.ndarray  # [crops] int64, index of the crop's record
    crop_start: np.ndarray  # [crops] seconds
    waveform: np.ndarray  # [crops] uint64

    def is_from(self, *sources: str) -> np.ndarray:
        codes = []
        for code, name in enumerate(self.source_names):
            if is_named(name, sources):
                codes.append(code)
        return np.isin(self.source, codes)

    def patient_source(self) -> np.ndarray:
        """Like `source`, but with the same number for all formats of hospitals' files."""
        names = [patient_source(name) for name in self.source_names]
        found: np.ndarray = np.array([names.index(name) for name in names], np.int64)[self.source]
        return found

    def label(self, record: int) -> str:
        return f"{self.source_names[self.source[record]]}/{self.names[record]}"


@dataclass(frozen=True)
class CropRoles:
    """Columns with one entry per crop."""

    pretrain: np.ndarray
    dx: np.ndarray
    identity: np.ndarray


def assign(
    records: Records, plan: str, seed: int, sources: RoleSources = PAPER_SOURCES
) -> CropRoles:
    crops = len(records.crop_record)
    if plan == "all":
        return CropRoles(np.ones(crops, bool), np.zeros(crops, np.int8), np.zeros(crops, np.int8))
    if plan == "paper-split":
        return _assign_by_crop(records, seed, sources)
    group = _groups(records)
    in_dx = records.is_from(*sources.dx)
    chance_dx, chance_id = _chances(records, group, seed, in_dx)
    group_dx = _train_valid_test(chance_dx)
    identity, tested = _gallery_probe(records, seed, sources)
    kept_out = np.bincount(group, weights=tested) > 0  # groups that must stay out of all training
    kept_out |= (np.bincount(group, weights=in_dx) > 0) & (group_dx != TRAIN)
    crop_group = group[records.crop_record]
    pretrain = ~kept_out[crop_group] & _pretrains(records, sources)[records.crop_record]
    dx = np.where(in_dx[records.crop_record], group_dx[crop_group], NONE)
    identity[pretrain] = np.where(chance_id < 0.8, TRAIN, VALID)[crop_group[pretrain]]
    return CropRoles(pretrain, dx.astype(np.int8), identity)


def leaks(records: Records, roles: CropRoles) -> list[str]:
    """Describe every kind of leakage of patients or waveforms between roles; empty for a clean
    split."""
    group = _groups(records)[records.crop_record]
    size = int(group.max()) + 1 if len(group) else 0

    def has(mask: np.ndarray) -> np.ndarray:
        return np.bincount(group[mask], minlength=size) > 0

    dx = [has(roles.dx == role) for role in (TRAIN, VALID, TEST)]
    id_train, id_valid, gallery, probe = (
        has(roles.identity == role) for role in (TRAIN, VALID, GALLERY, PROBE)
    )
    tested, pretrain = gallery | probe, has(roles.pretrain)
    kinds = {
        "two of diagnosis train, valid and test": np.sum(dx, axis=0) > 1,
        "pre-training and diagnosis valid or test": pretrain & (dx[1] | dx[2]),
        "pre-training and gallery or probe": pretrain & tested,
        "identification train or valid, and gallery or probe": (id_train | id_valid) & tested,
        "identification train and valid": id_train & id_valid,
    }
    found = []
    for kind, leaking in kinds.items():
        if leaking.any():
            record = records.crop_record[np.flatnonzero(group == np.flatnonzero(leaking)[0])[0]]
            found.append(
                f"{int(leaking.sum())} patients or waveforms in {kind}, for example that of "
                f"{records.label(record)}"
            )
    return found


def _train_valid_test(chance: np.ndarray) -> np.ndarray:
    return np.select([chance < 0.8, chance < 0.9], [TRAIN, VALID], TEST).astype(np.int8)


def _pretrains(records: Records, sources: RoleSources) -> np.ndarray:
    return records.is_from(*filter(sources.pretrains, records.source_names))


def keyed_uniform(texts: Iterable[str], key: str, draws: int = 1) -> np.ndarray:
    """[n, draws] numbers in [0, 1) that depend only on each text and the key."""
    secret, size = key.encode(), 8 * draws
    words = bytearray()
    for text in texts:
        words += blake2b(text.encode(), key=secret, digest_size=size).digest()
    return (np.frombuffer(words, ">u8").reshape(-1, draws) >> np.uint64(11)).astype(
        np.float64
    ) * 2.0**-53


def _groups(records: Records) -> np.ndarray:
    """The group of each record: connected components, with edges to the first record of its patient
    and of its waveforms."""
    count = len(records.names)
    codes = pc.dictionary_encode(records.patients)
    known = np.flatnonzero(pc.is_valid(records.patients))
    owner = (
        np.asarray(codes.indices.drop_null()).astype(np.int64) * len(records.source_names)
        + records.patient_source()[known]
    )
    _, first, member = np.unique(owner, return_index=True, return_inverse=True)
    _, first_crop, same = np.unique(records.waveform, return_index=True, return_inverse=True)
    ends_a = np.concatenate([known, records.crop_record])
    ends_b = np.concatenate([known[first[member]], records.crop_record[first_crop[same]]])
    edges = coo_array((np.ones(len(ends_a), np.int8), (ends_a, ends_b)), shape=(count, count))
    group: np.ndarray = connected_components(edges, directed=False)[1]
    return group


def _chances(
    records: Records, group: np.ndarray, seed: int, in_dx: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Two draws per group, taken from its leader. The leader is a diagnosis record if there is
    one, so that duplicates from other sources do not change the draws."""
    owners = pc.coalesce(records.patients, records.names)
    names = [patient_source(name) for name in records.source_names]
    texts = (
        f"{names[s]}/{owner}" for s, owner in zip(records.source, _strings(owners), strict=True)
    )
    draws = keyed_uniform(texts, f"roles {seed}", draws=3)
    order = np.lexsort((draws[:, 0], ~in_dx, group))
    leaders = order[np.unique(group[order], return_index=True)[1]]
    return draws[leaders, 1], draws[leaders, 2]


def _gallery_probe(
    records: Records, seed: int, sources: RoleSources
) -> tuple[np.ndarray, np.ndarray]:
    """Draw two sessions per patient by keyed hash; the first crop of each goes to gallery and
    probe. Returns the roles of crops and a mask of the drawn records. Two files with the same
    waveform count as one session."""
    identity = np.zeros(len(records.crop_record), np.int8)
    tested = np.zeros(len(records.names), bool)
    order = np.lexsort((records.crop_start, records.crop_record))
    first_crop = order[np.unique(records.crop_record[order], return_index=True)[1]]  # of records
    has_patient = np.asarray(pc.is_valid(records.patients))
    candidates = np.flatnonzero(records.is_from(*sources.id) & has_patient)
    names = _strings(records.names.take(pa.array(candidates)))
    ranks = keyed_uniform(names, f"session {seed}")[:, 0]
    sessions: dict[tuple[int, str], list[int]] = {}
    owner = records.patient_source()
    for position in np.argsort(ranks, kind="stable"):
        record = int(candidates[position])
        chosen = sessions.setdefault((int(owner[record]), records.patients[record].as_py()), [])
        waveform = records.waveform[first_crop[record]]
        if len(chosen) < 2 and not (chosen and records.waveform[first_crop[chosen[0]]] == waveform):
            chosen.append(record)
    for patient in _tested_patients(sessions, records.source_names, seed, sources.id_share):
        chosen = sessions[patient]
        identity[first_crop[chosen]] = GALLERY, PROBE
        tested[chosen] = True
    return identity, tested


def _tested_patients(
    sessions: dict[tuple[int, str], list[int]],
    source_names: tuple[str, ...],
    seed: int,
    share: float,
) -> list[tuple[int, str]]:
    """All patients with two sessions, if they are at most `share` of their source's patients, as in
    the real PTB-XL (2,127 of 18,885). Otherwise those whose hash is below 1/2, 1/4, ...: the first
    limit that is low enough.

    A ranking would come closer to `share`, but each new patient with a small hash would displace
    another one."""
    both = [patient for patient, chosen in sessions.items() if len(chosen) == 2]
    texts = (f"{patient_source(source_names[source])}/{patient}" for source, patient in both)
    chances = keyed_uniform(texts, f"gallery {seed}")[:, 0]
    patients = np.bincount(
        np.array([source for source, _ in sessions], np.int64), minlength=len(source_names)
    )
    source_of = np.array([source for source, _ in both], np.int64)
    drawn = np.ones(len(both), bool)
    limit = 1.0
    while (
        too_many := np.bincount(source_of[drawn], minlength=len(source_names)) > share * patients
    ).any():
        limit /= 2
        drawn &= ~too_many[source_of] | (chances < limit)
    return [both[i] for i in np.flatnonzero(drawn)]


def _strings(column: pa.Array) -> Iterator[str]:
    for start in range(0, len(column), 1 << 16):
        yield from column.slice(start, 1 << 16).to_pylist()


def _assign_by_crop(records: Records, seed: int, sources: RoleSources) -> CropRoles:
    """As the authors' code does, unlike their paper: only diagnosis valid and test crops stay out
    of pre-training."""
    labels = [records.label(record) for record in range(len(records.names))]
    crops = zip(records.crop_record, records.crop_start, strict=True)
    chance = keyed_uniform(
        (f"{labels[record]}/{start:g}" for record, start in crops), f"roles {seed}"
    )[:, 0]
    dx = np.where(
        records.is_from(*sources.dx)[records.crop_record], _train_valid_test(chance), NONE
    ).astype(np.int8)
    identity, _ = _gallery_probe(records, seed, sources)
    record_chance = keyed_uniform(labels, f"identity {seed}")[:, 0]
    pretrains = _pretrains(records, sources)
    trained = np.where(pretrains, np.where(record_chance < 0.8, TRAIN, VALID), NONE).astype(
        np.int8
    )[records.crop_record]
    pretrain = (dx != VALID) & (dx != TEST) & pretrains[records.crop_record]
    return CropRoles(pretrain, dx, np.where(identity == NONE, trained, identity))
