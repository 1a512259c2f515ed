"""Synthetic archives are reproducible and readable by other libraries, and their ECGs match their
labels."""

import ast
import csv
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.io
import wfdb
from handmade import files

from omnilead.data_tools.ecg.record import (
    CLASS_ABBREVIATIONS,
    CLASS_OF_CODE,
    HEART_AXIS_CODES,
    LEADS,
    SCP_CODES,
)
from omnilead.data_tools.io.errors import DataError
from omnilead.data_tools.published_labels.tables import write_labels
from omnilead.data_tools.shard import shard
from omnilead.data_tools.synthetic import archive as synth
from omnilead.data_tools.synthetic.ecg import simulate, twelve_leads
from omnilead.data_tools.synthetic.patients import BLOCK_PATIENTS, draw_patients

PATIENTS, TWICE = 150, 13  # two sessions: 11 % are expected


@pytest.fixture(scope="module")
def challenge(tmp_path_factory):
    out = tmp_path_factory.mktemp("challenge") / "archive"
    counts = synth.synthesise(out, PATIENTS, seed=5, progress=False)
    assert counts == synth.patients_of_other_databases(PATIENTS) | {"ptb-xl": PATIENTS + TWICE}
    return out


@pytest.fixture(scope="module")
def ptbxl(tmp_path_factory):
    out = tmp_path_factory.mktemp("ptbxl") / "archive"
    counts = synth.synthesise(out, PATIENTS, seed=5, layout="ptbxl", progress=False)
    assert counts == {"ptb-xl": PATIENTS + TWICE}
    return out


def headers(folder):
    return sorted(folder.rglob("*.hea"))


def samples_of(header):
    """Our own digital values, [samples, 12]."""
    mat = header.with_suffix(".mat")
    data = mat.read_bytes()[24:] if mat.exists() else header.with_suffix(".dat").read_bytes()
    return np.frombuffer(data, "<i2").reshape(-1, 12)


def database_of(header):
    return header.parents[1].name.removeprefix("synthetic-")


def comments(header):
    lines = [line[1:] for line in header.read_text().splitlines() if line.startswith("#")]
    return {key.strip(): value.strip() for key, value in (line.split(":", 1) for line in lines)}


def test_the_same_seed_gives_the_same_bytes_for_any_number_of_workers(challenge, tmp_path):
    synth.synthesise(tmp_path / "two", PATIENTS, seed=5, workers=2, progress=False)
    first = files(challenge)
    assert files(tmp_path / "two") == first
    synth.synthesise(tmp_path / "other", 3, seed=6, progress=False)
    other = {
        name.replace("syn6_", "syn5_"): data
        for name, data in files(tmp_path / "other").items()
        if ".mat" in name
    }
    assert len(other.keys() & first) >= 6 and not other.items() & first.items()


def test_nothing_made_from_a_synthetic_archive_can_pass_for_real(challenge, ptbxl, tmp_path):
    """Sources, records, patients and licence are its own, in both layouts, and no two seeds share a
    patient or a record; roles and labels are as those of real archives."""
    synth.synthesise(tmp_path / "other", 150, seed=6, progress=False)
    rows = []
    for name, place in (("5", challenge), ("5 alone", ptbxl), ("6", tmp_path / "other")):
        made = shard([str(place)], out=tmp_path / name, workers=2)
        for source in made.meta["sources"]:
            assert source["name"].startswith("synthetic-") and source["licence"] == "CC0-1.0"
        assert made.meta["roles"]["id"]["gallery"] > 0
        rows.append(made.table(["source", "record", "patient"]).to_pylist())
    assert {row["record"].partition("_")[0] for row in rows[0]} == {"syn5"}
    people = [{row["patient"] for row in some} - {None} for some in rows]
    records = [{row["record"] for row in some} for some in rows]
    assert people[0] == people[1] and all(one.startswith("syn5_1") for one in people[0])
    assert records[0] > records[1]  # PTB-XL alone
    assert not (people[0] & people[2] or records[0] & records[2])
    list(write_labels("ptbxl", str(ptbxl), str(tmp_path / "labels"), None, False, True))
    labels = pq.read_table(tmp_path / "labels" / "ptbxl-superdiagnostic.parquet").to_pylist()
    assert {row["record"] for row in labels} <= records[1]
    assert {row["source"] for row in labels} == {"synthetic-ptb-xl"}


def test_a_larger_archive_keeps_the_patients_of_a_smaller_one():
    blocks = [
        synth.plan_blocks(10, 0, 5, "ptbxl")[0],
        synth.plan_blocks(PATIENTS, 1, 5, "ptbxl")[0],
    ]
    few, many = (next(synth.sessions_of(block)) for block in blocks)
    assert few[1].shape == (10, 5000, 12)
    assert np.array_equal(few[1], many[1][:10])
    assert few[2] == many[2][:10]


def test_stored_samples_match_einthovens_equations_and_their_headers(challenge, ptbxl):
    for header in headers(challenge) + headers(ptbxl):
        digital = samples_of(header).astype(int)
        i, ii, iii, avr, avl, avf = digital[:, :6].T
        assert np.array_equal(iii, ii - i), header
        for rounding in (2 * avr + i + ii, 2 * avl + ii - 2 * i, 2 * avf + i - 2 * ii):
            assert np.abs(rounding).max() <= 1, header
        lines = [line.split() for line in header.read_text().splitlines()[1:13]]
        first, checksum = np.array([line[-4:-2] for line in lines]).astype(int).T
        assert np.array_equal(first, digital[0])
        own = header.name.endswith("_hr.hea")  # PTB-XL's own release
        assert np.array_equal(checksum, digital.sum(0).astype(np.uint16 if own else np.int16))
        assert lines[3][-1] == ("AVR" if own else "aVR")
    extreme = np.full((8, 2), 10_000, np.int16)
    extreme[0, 1] = extreme[1, 0] = -10_000
    assert twelve_leads(extreme)[:, 4].tolist() == [15_000, -15_000]


def test_wfdb_and_scipy_read_the_same_samples(challenge, ptbxl):
    groups = sorted((challenge / "training").iterdir())
    assert [group.name for group in groups] == sorted(f"synthetic-{one}" for one in synth.DATABASES)
    chosen = [header for group in groups for header in headers(group)[:3]] + headers(ptbxl)[::40]
    for header in chosen:
        name, ours = str(header.with_suffix("")), samples_of(header)
        record = wfdb.rdrecord(name, physical=False)
        assert np.array_equal(record.d_signal, ours)
        assert [n.lower() for n in record.sig_name] == [n.lower() for n in LEADS]
        assert np.allclose(wfdb.rdrecord(name).p_signal, ours / 1000)
        if ptbxl not in header.parents:
            assert np.array_equal(scipy.io.loadmat(f"{name}.mat")["val"], ours.T)
            assert record.fs == synth.DATABASES[database_of(header)].fs_hz


def test_both_layouts_have_the_same_records_and_the_csv_matches_the_headers(challenge, ptbxl):
    table = (challenge / "ptbxl_database.csv").read_text()
    assert table == (ptbxl / "ptbxl_database.csv").read_text()
    assert "seed=5" in (ptbxl / "SYNTHETIC.txt").read_text()
    rows = list(csv.DictReader(table.splitlines()))
    assert [int(row["ecg_id"]) for row in rows] == list(range(1, PATIENTS + TWICE + 1))
    sessions = Counter(row["patient_id"] for row in rows)
    assert Counter(sessions.values()) == {1: PATIENTS - TWICE, 2: TWICE}
    dates = [row["recording_date"] for row in rows]
    assert dates == sorted(dates)
    assert len({row["strat_fold"] for row in rows}) == 10
    for row in rows:
        header = challenge / f"training/synthetic-ptb-xl/g1/syn5_HR{int(row['ecg_id']):05d}.hea"
        stated, scp = comments(header), ast.literal_eval(row["scp_codes"])
        assert row["filename_hr"] == f"records500/00000/syn5_{int(row['ecg_id']):05d}_hr"
        assert np.array_equal(samples_of(header), samples_of(ptbxl / f"{row['filename_hr']}.hea"))
        assert stated["Sex"] == ("Female" if row["sex"] == "1" else "Male")
        assert float(row["age"]) == (300 if int(stated["Age"]) > 89 else int(stated["Age"]))
        codes = {SCP_CODES.get(name, "") for name in scp}
        codes.add(HEART_AXIS_CODES.get(row["heart_axis"], ""))
        assert codes - {""} == set(stated["Dx"].split(",")) - {"428750005"}


def test_a_few_records_are_damaged_as_real_ones():
    flat, invalid = np.ones((2, 100, 12), np.int16)
    synth.damage_record(flat, "georgia", np.array([0, 0.5, 0, 0, 0, 0]))
    assert not flat[:, 9:].any() and flat[:, :9].all()
    synth.damage_record(invalid, "ningbo", np.array([0.5, 0.5, 0, 0, 0.5, 0]))
    assert (invalid == -32_768).sum() == 11 and (invalid[:, :6] == 1).all()


def test_all_classes_occur_and_labels_are_noisy(challenge):
    codes = [comments(header)["Dx"].split(",") for header in headers(challenge)]
    stated = [{CLASS_OF_CODE[code] for code in row if code in CLASS_OF_CODE} for row in codes]
    assert np.mean([bool(classes) for classes in stated]) > 0.9
    assert len(set().union(*stated)) == 24
    shown, wrong, right = set(), 0, 0
    for block in range(4):
        patients, key = draw_patients((11, block)), (11, block, 0)
        made = simulate(patients, key, range(BLOCK_PATIENTS), 5000, 500, 50)
        for i, written in enumerate(
            synth._recorded_diagnoses(key, list(range(BLOCK_PATIENTS)), made.present, ())
        ):
            present = {name for name, mask in made.present.items() if mask[i]}
            shown |= present
            wrong += len(present ^ set(written))
            right += len(present & set(written))
    assert shown == set(CLASS_ABBREVIATIONS) - {"BBB", "LPR"}
    assert 0.02 < wrong / (wrong + right) < 0.10


def test_a_folder_with_files_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(DataError, match=r"is not empty.*new folder"):
        synth.synthesise(tmp_path, 3, progress=False)
    assert files(tmp_path) == {"mine.txt": b"keep"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patients": 0}, "patients=0"),
        ({"two_sessions": 1.5}, "two_sessions=1.5"),
        ({"layout": "edf"}, "layout='edf' is not one of physionet2021, ptbxl"),
        ({"patients": 60_000, "two_sessions": 0.9}, "five-digit"),
        ({"patients": 90_000, "two_sessions": 0}, "the databases other than PTB-XL have"),
    ],
)
def test_invalid_arguments_are_refused(options, words, tmp_path):
    with pytest.raises(DataError, match=words):
        synth.synthesise(tmp_path / "new", **{"patients": 3} | options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("patients", [7, 66_000])
def test_every_patient_is_in_one_database(patients):
    assert sum(synth.patients_of_other_databases(patients).values()) == patients
