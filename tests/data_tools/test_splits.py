"""Roles have the paper's shares, do not leak for any seed, and stay the same when data is added."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from omnilead.data_tools.sharding.roles import (
    GALLERY,
    PROBE,
    TEST,
    TRAIN,
    VALID,
    Records,
    RoleSources,
    assign_crop_roles,
    describe_leaks,
    number_texts,
)

SOURCES = ("cpsc_2018", "georgia", "ningbo", "ptb-xl")
EVERYBODY = RoleSources(id_share=1.0)  # all patients with two sessions are tested


def archive(records, seed=0, duplicates=0):
    """Records with 1 to 3 crops; a third of PTB-XL's patients have several sessions; some waveforms
    stand twice."""
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 4, records).astype(np.int16)
    names = [f"{SOURCES[s]}{i:06d}" for i, s in enumerate(source)]
    patients = [f"p{rng.integers(0, max(1, records // 6))}" if s == 3 else None for s in source]
    crops = rng.integers(1, 4, records)
    crop_record = np.repeat(np.arange(records), crops)
    crop_start = np.concatenate([10.0 * np.arange(count) for count in crops])
    waveform = np.arange(len(crop_record), dtype=np.uint64) + 1000
    for a, b in rng.integers(0, len(waveform), (duplicates, 2)):
        waveform[a] = waveform[b]
    strings = pa.array(names), pa.array(patients, pa.string())
    return Records(source, SOURCES, *strings, crop_record, crop_start, waveform)


def records_of(sources, patients=None, waveform=None):
    """One crop per record."""
    order, count = tuple(sorted(set(sources))), len(sources)
    return Records(
        np.array([order.index(source) for source in sources], np.int16),
        order,
        pa.array([f"R{i:05d}" for i in range(count)]),
        pa.array(patients or [None] * count, pa.string()),
        np.arange(count),
        np.zeros(count),
        np.array(waveform or range(count), np.uint64),
    )


def part(records, keep):
    crops, taken = keep[records.crop_record], pa.array(np.flatnonzero(keep))
    return dataclasses.replace(
        records,
        source=records.source[keep],
        names=records.names.take(taken),
        patients=records.patients.take(taken),
        crop_record=(np.cumsum(keep) - 1)[records.crop_record[crops]],
        crop_start=records.crop_start[crops],
        waveform=records.waveform[crops],
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_patient_or_waveform_has_two_roles(seed):
    records = archive(600, seed, duplicates=80)
    roles = assign_crop_roles(records, "paper", seed)
    assert describe_leaks(records, roles) == []
    assert (roles.dx != assign_crop_roles(records, "paper", seed + 1).dx).any()


def test_the_roles_have_the_shares_of_the_paper():
    records = archive(12_000)
    roles = assign_crop_roles(records, "paper", 0)
    in_dx = records.is_from("cpsc_2018", "georgia")[records.crop_record]
    trained = np.isin(roles.identity, (TRAIN, VALID))
    assert ((roles.dx != 0) == in_dx).all() and (trained <= roles.pretrain).all()
    shares = [np.mean(roles.dx[in_dx] == role) for role in (TRAIN, VALID, TEST)]
    shares.append(np.mean(roles.identity[trained] == TRAIN))
    assert shares == pytest.approx([0.8, 0.1, 0.1, 0.8], abs=0.015)


def test_gallery_and_probe_have_one_crop_of_two_sessions_of_each_patient_with_two():
    records = archive(600)
    roles = assign_crop_roles(records, "paper", 0, EVERYBODY)
    patients = np.array(records.patients.to_pylist(), dtype=object)
    patient_of = patients[records.crop_record]
    for patient in set(patients.tolist()) - {None}:
        tested = np.isin(roles.identity, (GALLERY, PROBE)) & (patient_of == patient)
        several = int(np.sum(patients == patient) >= 2)
        assert sorted(roles.identity[tested]) == [GALLERY, PROBE] * several
        assert not records.crop_start[tested].any()
        assert len(set(records.crop_record[tested])) == 2 * several
        assert not (several and roles.pretrain[patient_of == patient].any())


def patients(total, returning):
    """The patient of each record: so many have two, the others one."""
    return [f"p{i}" for i in range(total) for _ in range(2 if i < returning else 1)]


def drawn(patient_of, **sources):
    """The patients in gallery and probe, if these are the sessions of PTB-XL."""
    records = records_of(["ptb-xl"] * len(patient_of), patient_of)
    roles = assign_crop_roles(records, "paper", 0, RoleSources(**sources))
    assert describe_leaks(records, roles) == []
    names = np.array(patient_of)
    gallery, probe = (names[roles.identity == role].tolist() for role in (GALLERY, PROBE))
    assert sorted(gallery) == sorted(probe) and len(set(gallery)) == len(gallery)
    assert (roles.pretrain == ~np.isin(names, gallery)).all()
    return set(gallery)


@pytest.mark.parametrize("returning", [0.16, 0.3, 0.5, 1.0])
def test_at_most_id_share_of_the_patients_are_in_gallery_and_probe(returning):
    """Where all have two sessions, pre-training would else get nobody."""
    all_of = patients(2000, 2000 * returning)
    for share in (0.0, 0.05, 0.15):
        assert share / 2.5 * 2000 <= len(drawn(all_of, id_share=share)) <= share * 2000
    assert drawn(all_of) == drawn(all_of, id_share=0.15)
    assert len(drawn(all_of, id_share=1.0)) == 2000 * returning


def test_with_the_share_of_the_real_ptbxl_all_patients_with_two_sessions_are_used():
    """2,127 of 18,885; here a tenth."""
    assert len(drawn(patients(1_888, 213))) == 213


def test_new_patients_move_no_patient_between_training_and_test():
    before, after = drawn(patients(1000, 1000)), drawn(patients(1500, 1500))
    assert len(before) > 80 and {patient for patient in after if int(patient[1:]) < 1000} == before


def test_the_share_is_computed_for_each_source():
    few, many = patients(500, 50), patients(400, 400)
    both = records_of(["clinic"] * len(few) + ["ptb-xl"] * len(many), few + many)
    roles = assign_crop_roles(both, "paper", 0, RoleSources(id=("clinic", "ptb-xl")))
    of = [np.sum((roles.identity == GALLERY) & both.is_from(name)) for name in both.source_names]
    assert of == [50, len(drawn(many))]


def test_ptb_and_incart_are_for_pretraining_only_if_named():
    """Sources of one's own pre-train, whatever lies beside them: what is added later takes nobody
    out."""
    names = ("clinic", "georgia", "ptb", "st_petersburg_incart")
    of = records_of([name for name in names for _ in range(10)])

    def trained(plan="paper", **sources):
        roles = assign_crop_roles(of, plan, 0, RoleSources(dx=(), **sources))
        assert ((roles.identity != 0) == roles.pretrain).all()
        return {names[i] for i in of.source[roles.pretrain]}

    assert trained() == trained("paper-split") == {"clinic", "georgia"}
    assert trained(pretrain=("ptb", "georgia")) == {"ptb", "georgia"}
    assert trained(pretrain=("all",)) == set(names)


@pytest.mark.parametrize(
    ("sources", "waveform", "tested"),
    [
        (["ptb-xl", "ptb-xl"], [5, 6], True),
        (["ptb-xl", "ptb-xl"], [5, 5], False),  # two files of one session
        (["ningbo", "ptb-xl"], [5, 6], False),  # the same id in two sources: two patients
    ],
)
def test_two_sessions_are_two_waveforms_of_a_patient_of_one_source(sources, waveform, tested):
    whose = RoleSources(id=("ningbo", "ptb-xl"), id_share=1.0)
    roles = assign_crop_roles(records_of(sources, ["7", "7"], waveform), "paper", 0, whose)
    assert (set(roles.identity.tolist()) == {GALLERY, PROBE}) == tested
    assert np.isin(roles.identity, (GALLERY, PROBE)).any() == tested


@pytest.mark.parametrize("seed", range(3))
def test_adding_data_changes_no_role(seed):
    """Single-session records keep every role when a fifth more of other records comes."""
    full = archive(1000, seed)
    old = np.random.default_rng(seed).random(1000) < 0.8
    before, after = (
        assign_crop_roles(part(full, old), "paper", 0),
        assign_crop_roles(full, "paper", 0),
    )
    kept = old[full.crop_record]
    # A patient's second session makes a gallery of the first: by definition
    lonely = ~full.is_from("ptb-xl")[full.crop_record]
    for field in ("pretrain", "dx", "identity"):
        same = getattr(before, field)[lonely[kept]] == getattr(after, field)[kept & lonely]
        assert same.all()


def test_a_duplicate_from_another_source_does_not_move_a_diagnosis_record():
    for seed in range(40):
        one = assign_crop_roles(records_of(["cpsc_2018"], waveform=[1]), "paper", seed)
        two = assign_crop_roles(records_of(["cpsc_2018", "ningbo"], waveform=[1, 1]), "paper", seed)
        assert one.dx[0] == two.dx[0]
        assert two.pretrain[0] == two.pretrain[1] == (one.dx[0] == TRAIN)


def test_every_kind_of_leakage_is_found():
    records = archive(300, 1)
    clean = assign_crop_roles(records, "paper", 0)
    assert describe_leaks(records, clean) == []
    from_dx = records.is_from("cpsc_2018")[records.crop_record]
    inside = from_dx & (records.crop_start > 0)  # crops with one of the same record before them
    second = np.flatnonzero(inside)[0]
    test_crop = np.flatnonzero(clean.dx == TEST)[0]
    gallery = np.flatnonzero(clean.identity == GALLERY)[0]
    for finding, field, crop, values in (
        ("train, valid and test", "dx", second, [TRAIN, TEST]),
        ("pre-training and diagnosis", "pretrain", test_crop, [True]),
        ("gallery or probe", "pretrain", gallery, [True]),
        ("identification train and valid", "identity", second, [TRAIN, VALID]),
    ):
        changed = getattr(clean, field).copy()
        changed[crop + 1 - len(values) : crop + 1] = values
        assert finding in " ".join(
            describe_leaks(records, dataclasses.replace(clean, **{field: changed}))
        )


def test_paper_split_leaks_like_the_authors_code():
    records = archive(2000)
    leaking = assign_crop_roles(records, "paper-split", 0)
    assert any("two of diagnosis" in finding for finding in describe_leaks(records, leaking))
    in_dx = records.is_from("cpsc_2018", "georgia")[records.crop_record]
    trained = np.isin(leaking.identity, (TRAIN, VALID))
    tested = np.isin(leaking.identity, (GALLERY, PROBE))
    shares = [np.mean(leaking.dx[in_dx] == TRAIN), np.mean(leaking.identity[trained] == TRAIN)]
    assert shares == pytest.approx([0.8, 0.8], abs=0.03)
    assert (trained | tested).all() and tested.any() and leaking.pretrain[~in_dx].all()


def test_all_uses_everything_for_pretraining():
    everything = assign_crop_roles(archive(2000), "all", 0)
    assert everything.pretrain.all()
    assert not everything.dx.any() and not everything.identity.any()


def test_equal_texts_have_equal_numbers():
    """Also in other chunks; a text that is missing has none."""
    words = [f"w{i % 700}" if i % 5 else None for i in range(3000)]
    numbers = number_texts(pa.chunked_array([words[:100], words[100:2000], words[2000:]]))
    known = np.array([word is not None for word in words])
    assert (numbers[~known] == -1).all()
    pairs = set(zip(np.array(words)[known], numbers[known].tolist(), strict=True))
    assert len(pairs) == 560 and {number for _, number in pairs} == set(range(560))
