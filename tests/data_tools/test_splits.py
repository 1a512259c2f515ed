"""Roles have the paper's shares, do not leak for any seed, and stay the same when data is added."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from omnilead.data_tools.splits import (
    GALLERY,
    PROBE,
    TEST,
    TRAIN,
    VALID,
    Records,
    RoleSources,
    assign,
    leaks,
)

SOURCES = ("cpsc_2018", "georgia", "ningbo", "ptb-xl")
EVERYBODY = RoleSources(id_share=1.0)  # all patients with two sessions are tested


def archive(records: int, seed: int = 0, duplicates: int = 0) -> Records:
    """Records with 1 to 3 crops; a third of PTB-XL's patients have several sessions; some waveforms
    stand twice."""
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 4, records).astype(np.int16)
    names = [f"{SOURCES[s]}{i:06d}" for i, s in enumerate(source)]
    patients = [f"p{rng.integers(0, max(1, records // 6))}" if s == 3 else None for s in source]
    crops = rng.integers(1, 4, records)
    crop_record = np.repeat(np.arange(records), crops)
    crop_start = 10.0 * (np.arange(len(crop_record)) - np.repeat(np.cumsum(crops) - crops, crops))
    waveform = np.arange(len(crop_record), dtype=np.uint64) + 1000
    for a, b in rng.integers(0, len(waveform), (duplicates, 2)):
        waveform[a] = waveform[b]
    return Records(
        source,
        SOURCES,
        pa.array(names),
        pa.array(patients, pa.string()),
        crop_record,
        crop_start,
        waveform,
    )


def records_of(
    sources: list[str],
    patients: list[str | None],
    waveform: list[int] | None = None,
    names: list[str] | None = None,
) -> Records:
    """One crop per record."""
    order, count = tuple(sorted(set(sources))), len(sources)
    return Records(
        np.array([order.index(source) for source in sources], np.int16),
        order,
        pa.array(names or [f"R{i:05d}" for i in range(count)]),
        pa.array(patients, pa.string()),
        np.arange(count),
        np.zeros(count),
        np.array(waveform or range(count), np.uint64),
    )


def part(records: Records, keep: np.ndarray) -> Records:
    crops = keep[records.crop_record]
    renumbered = np.cumsum(keep) - 1
    taken = pa.array(np.flatnonzero(keep))
    return Records(
        records.source[keep],
        records.source_names,
        records.names.take(taken),
        records.patients.take(taken),
        renumbered[records.crop_record[crops]],
        records.crop_start[crops],
        records.waveform[crops],
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_patient_or_waveform_has_two_roles(seed: int) -> None:
    records = archive(600, seed, duplicates=80)
    roles = assign(records, "paper", seed)
    assert leaks(records, roles) == []
    assert (roles.dx != assign(records, "paper", seed + 1).dx).any()


def test_the_roles_have_the_shares_of_the_paper() -> None:
    records = archive(12_000)
    roles = assign(records, "paper", 0)
    in_dx = records.is_from("cpsc_2018", "georgia")[records.crop_record]
    trained = np.isin(roles.identity, (TRAIN, VALID))
    assert ((roles.dx != 0) == in_dx).all() and (trained <= roles.pretrain).all()
    shares = [np.mean(roles.dx[in_dx] == role) for role in (TRAIN, VALID, TEST)]
    assert [*shares, np.mean(roles.identity[trained] == TRAIN)] == pytest.approx(
        [0.8, 0.1, 0.1, 0.8], abs=0.015
    )


def test_gallery_and_probe_have_one_crop_of_two_sessions_of_each_patient_with_two() -> None:
    records = archive(600)
    roles = assign(records, "paper", 0, EVERYBODY)
    patients = np.array(records.patients.to_pylist(), dtype=object)
    for patient in set(patients.tolist()) - {None}:
        owned = np.flatnonzero(patients == patient)
        gallery, probe = (
            np.flatnonzero((roles.identity == role) & (patients[records.crop_record] == patient))
            for role in (GALLERY, PROBE)
        )
        assert len(gallery) == len(probe) == (len(owned) >= 2)
        assert not records.crop_start[[*gallery, *probe]].any()
        if len(owned) >= 2:
            assert records.crop_record[gallery] != records.crop_record[probe]
            assert not roles.pretrain[np.isin(records.crop_record, owned)].any()


def patients_of(sessions: np.ndarray) -> Records:
    """One source, whose patients have so many sessions of one crop each."""
    patients = [f"p{p}" for p in np.repeat(np.arange(len(sessions)), sessions)]
    return records_of(
        ["ptb-xl"] * len(patients), patients, names=[f"HR{i:05d}" for i in range(len(patients))]
    )


def drawn(records: Records, **sources: float) -> set[str]:
    roles = assign(records, "paper", 0, RoleSources(**sources))  # type: ignore[arg-type]
    assert leaks(records, roles) == []
    gallery, probe = (
        np.array(records.patients)[roles.identity == role].tolist() for role in (GALLERY, PROBE)
    )
    assert sorted(gallery) == sorted(probe) and len(set(gallery)) == len(gallery)
    assert (
        roles.pretrain.sum()
        == len(records.names) - np.isin(np.array(records.patients), gallery).sum()
    )
    return set(gallery)


@pytest.mark.parametrize("returning", [0.16, 0.3, 0.5, 1.0])
def test_at_most_id_share_of_the_patients_are_in_gallery_and_probe(returning: float) -> None:
    """Where all have two sessions, pre-training would else get nobody."""
    sessions = np.where(np.arange(2000) < 2000 * returning, 2, 1)
    for share in (0.0, 0.05, 0.15):
        assert (
            share / 2.5 * 2000 <= len(drawn(patients_of(sessions), id_share=share)) <= share * 2000
        )
    assert drawn(patients_of(sessions)) == drawn(patients_of(sessions), id_share=0.15)
    assert len(drawn(patients_of(sessions), id_share=1.0)) == 2000 * returning


def test_with_the_share_of_the_real_ptbxl_all_patients_with_two_sessions_are_used() -> None:
    """2,127 of 18,885; here a tenth."""
    assert len(drawn(patients_of(np.where(np.arange(1_888) < 213, 2, 1)))) == 213


def test_new_patients_move_no_patient_between_training_and_test() -> None:
    sessions = np.full(1500, 2)
    before = drawn(patients_of(sessions[:1000]))
    after = drawn(patients_of(sessions))
    assert len(before) > 80 and {patient for patient in after if int(patient[1:]) < 1000} == before


def test_the_share_is_computed_for_each_source() -> None:
    few, many = patients_of(np.where(np.arange(500) < 50, 2, 1)), patients_of(np.full(400, 2))
    names = [*few.names.to_pylist(), *many.names.to_pylist()]
    patients = [*few.patients.to_pylist(), *many.patients.to_pylist()]
    both = records_of(
        ["clinic"] * len(few.names) + ["ptb-xl"] * len(many.names), patients, names=names
    )
    roles = assign(both, "paper", 0, RoleSources(id=("clinic", "ptb-xl")))
    of = [
        int(((roles.identity == GALLERY) & both.is_from(name)).sum()) for name in both.source_names
    ]
    assert of[0] == 50 and of[1] == len(drawn(many))


def test_ptb_and_incart_are_for_pretraining_only_if_named() -> None:
    """Sources of one's own pre-train, whatever lies beside them: what is added later takes nobody
    out."""
    names = ("clinic", "georgia", "ptb", "st_petersburg_incart")
    of = records_of([name for name in names for _ in range(10)], [None] * 40)

    def trained(plan: str = "paper", **sources: tuple[str, ...]) -> set[str]:
        roles = assign(of, plan, 0, RoleSources(dx=(), **sources))  # type: ignore[arg-type]
        assert ((roles.identity != 0) == roles.pretrain).all()
        return {names[i] for i in of.source[roles.pretrain]}

    assert trained() == trained("paper-split") == {"clinic", "georgia"}
    assert trained(pretrain=("ptb", "georgia")) == {"ptb", "georgia"}
    assert trained(pretrain=("all",)) == set(names)


def test_the_same_patient_id_in_two_sources_means_two_patients() -> None:
    records = records_of(["ningbo", "ptb-xl"], ["7", "7"])
    assert not np.isin(
        assign(records, "paper", 0, RoleSources(id=("ningbo", "ptb-xl"))).identity, (GALLERY, PROBE)
    ).any()


def test_two_files_with_the_same_waveform_count_as_one_session() -> None:
    for waveform, expected in (([5, 5], 0), ([5, 6], 1)):
        roles = assign(records_of(["ptb-xl"] * 2, ["p", "p"], waveform), "paper", 0, EVERYBODY)
        assert [int((roles.identity == role).sum()) for role in (GALLERY, PROBE)] == [
            expected,
            expected,
        ]


@pytest.mark.parametrize("seed", range(3))
def test_adding_data_changes_no_role(seed: int) -> None:
    """Single-session records keep every role when a fifth more of other records comes; duplicates
    in other sources too."""
    full = archive(1000, seed)
    old = np.random.default_rng(seed).random(1000) < 0.8
    before, after = assign(part(full, old), "paper", 0), assign(full, "paper", 0)
    kept = old[full.crop_record]
    lonely = ~full.is_from("ptb-xl")[
        full.crop_record
    ]  # a patient's second session makes a gallery of the first: by definition
    chosen = lonely[kept]
    for field in ("pretrain", "dx", "identity"):
        np.testing.assert_array_equal(
            getattr(before, field)[chosen], getattr(after, field)[kept & lonely]
        )


def test_a_duplicate_from_another_source_does_not_move_a_diagnosis_record() -> None:
    alone = records_of(["cpsc_2018"], [None], [1], ["A1"])
    twin = records_of(["cpsc_2018", "ningbo"], [None, None], [1, 1], ["A1", "JS1"])
    for seed in range(40):
        one, two = assign(alone, "paper", seed), assign(twin, "paper", seed)
        assert one.dx[0] == two.dx[0]
        assert two.pretrain[0] == two.pretrain[1] == (one.dx[0] == TRAIN)


def test_every_kind_of_leakage_is_found() -> None:
    records = archive(300, 1)
    clean = assign(records, "paper", 0)
    of_two = np.flatnonzero(np.bincount(records.crop_record) >= 2)
    dx_record = next(r for r in of_two if records.is_from("cpsc_2018")[r])
    first, second = np.flatnonzero(records.crop_record == dx_record)[:2]
    test_crop, gallery = (
        np.flatnonzero(clean.dx == TEST)[0],
        np.flatnonzero(clean.identity == GALLERY)[0],
    )
    for finding, field, values in (
        ("train, valid and test", "dx", {first: TRAIN, second: TEST}),
        ("pre-training and diagnosis", "pretrain", {test_crop: True}),
        ("gallery or probe", "pretrain", {gallery: True}),
        ("identification train and valid", "identity", {first: TRAIN, second: VALID}),
    ):
        changed = getattr(clean, field).copy()
        for crop, value in values.items():
            changed[crop] = value
        assert finding in " ".join(leaks(records, dataclasses.replace(clean, **{field: changed})))
    assert leaks(records, clean) == []


def test_paper_split_leaks_like_the_authors_code_and_all_uses_everything_for_pretraining() -> None:
    records = archive(2000)
    leaking = assign(records, "paper-split", 0)
    assert any("two of diagnosis" in finding for finding in leaks(records, leaking))
    in_dx = records.is_from("cpsc_2018", "georgia")[records.crop_record]
    assert np.mean(leaking.dx[in_dx] == TRAIN) == pytest.approx(0.8, abs=0.03)
    assert leaking.pretrain[~in_dx].all()
    trained = np.isin(leaking.identity, (TRAIN, VALID))
    assert np.mean(leaking.identity[trained] == TRAIN) == pytest.approx(0.8, abs=0.03)
    tested = np.isin(leaking.identity, (GALLERY, PROBE))
    assert (trained | tested).all() and tested.any() and leaking.pretrain[tested & ~in_dx].all()
    everything = assign(records, "all", 0)
    assert everything.pretrain.all()
    assert not everything.dx.any()
    assert not everything.identity.any()
