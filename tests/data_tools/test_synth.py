"""Synthetic archives are reproducible and readable by other libraries, and their ECGs match their
labels."""

import ast
import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import wfdb
from handmade import files

from omnilead.data_tools.errors import DataError
from omnilead.data_tools.record import ABBREVIATIONS, CLASS_OF, HEART_AXIS_CODES, LEADS, SCP_CODES
from omnilead.data_tools.synthetic import archive as synth
from omnilead.data_tools.synthetic.ecg import BLOCK, RHYTHM, draw_patients, simulate, twelve_leads
from omnilead.engine.evaluation.mean_beat import BEAT, mean_beats, r_peaks

PATIENTS, TWICE = 150, 13  # two sessions: 11 % are expected


@pytest.fixture(scope="module")
def challenge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("challenge") / "archive"
    counts = synth.synthesise(out, PATIENTS, seed=5, progress=False)
    assert counts == synth.allocate(PATIENTS) | {"ptb-xl": PATIENTS + TWICE}
    return out


@pytest.fixture(scope="module")
def ptbxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ptbxl") / "archive"
    assert synth.synthesise(out, PATIENTS, seed=5, layout="ptbxl", progress=False) == {
        "ptb-xl": PATIENTS + TWICE
    }
    return out


@pytest.fixture(scope="module")
def sessions() -> list[tuple]:
    """Two sessions of four blocks of patients: [(recordings of session 0, of session 1)]."""
    made = []
    for block in range(4):
        patients = draw_patients((11, block))
        made.append(
            tuple(simulate(patients, (11, block, s), range(BLOCK), 5000, 500, 50) for s in range(2))
        )
    return made


def headers(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.hea"))


def samples_of(header: Path) -> np.ndarray:
    """Our own digital values, [samples, 12]."""
    mat = header.with_suffix(".mat")
    words = np.frombuffer(
        mat.read_bytes()[24:] if mat.exists() else header.with_suffix(".dat").read_bytes(), "<i2"
    )
    return words.reshape(-1, 12)


def comments(header: Path) -> dict[str, str]:
    lines = [line[1:].strip() for line in header.read_text().splitlines() if line.startswith("#")]
    return {key: value.strip() for key, value in (line.split(":", 1) for line in lines)}


def mean_beat(digital: np.ndarray) -> np.ndarray:
    peaks = r_peaks(digital.T)
    peaks = peaks[(peaks > 150) & (peaks < len(digital) - 200)]
    beat = np.median(digital[peaks[:, None] + np.arange(-150, 200)], axis=0)
    beat = (beat - beat.mean(0)).ravel()
    return beat / np.linalg.norm(beat)


def test_the_same_seed_gives_the_same_bytes_for_any_number_of_workers(
    challenge: Path, tmp_path: Path
) -> None:
    synth.synthesise(tmp_path / "two", PATIENTS, seed=5, workers=2, progress=False)
    first = files(challenge)
    assert files(tmp_path / "two") == first
    synth.synthesise(tmp_path / "other", 3, seed=6, progress=False)
    signals = [
        name for name in files(tmp_path / "other") if name.endswith(".mat") and name in first
    ]
    assert len(signals) >= 6
    assert all((tmp_path / "other" / name).read_bytes() != first[name] for name in signals)


def test_a_larger_archive_keeps_the_patients_of_a_smaller_one() -> None:
    few, many = (
        next(synth.sessions_of(synth.plan(n, share, 5, "ptbxl")[0]))
        for n, share in ((10, 0), (PATIENTS, 1))
    )
    assert few[1].shape == (10, 5000, 12)
    assert np.array_equal(few[1], many[1][:10])
    assert few[2] == many[2][:10]


def test_stored_samples_match_einthovens_equations_and_their_headers(
    challenge: Path, ptbxl: Path
) -> None:
    unsigned = 0
    for header in headers(challenge) + headers(ptbxl):
        digital = samples_of(header).astype(int)
        i, ii, iii, avr, avl, avf = digital[:, :6].T
        assert np.array_equal(iii, ii - i), header
        for lead, twice in ((avr, -(i + ii)), (avl, 2 * i - ii), (avf, 2 * ii - i)):
            assert np.abs(2 * lead - twice).max() <= 1, header
        lines = header.read_text().splitlines()[1:13]
        stated = np.array([line.split()[-4:-1] for line in lines]).astype(
            int
        )  # initial value, checksum, block size
        assert np.array_equal(stated[:, 0], digital[0])
        assert not ((stated[:, 1] - digital.sum(0)) % 65_536).any()
        if header.name.endswith("_hr.hea"):
            unsigned += (stated[:, 1] > 32_767).sum()
            assert (stated[:, 1] >= 0).all()
            assert [line.split()[-1] for line in lines[3:6]] == ["AVR", "AVL", "AVF"]
        else:
            assert np.abs(stated[:, 1]).max() <= 32_768
    assert unsigned > 100
    extreme = np.full((8, 2), 10_000, np.int16) * np.array(
        [[1, -1], [-1, 1]] + [[1, 1]] * 6, np.int16
    )
    assert twelve_leads(extreme)[:, 4].tolist() == [15_000, -15_000]


def test_wfdb_and_scipy_read_the_same_samples(challenge: Path, ptbxl: Path) -> None:
    groups = sorted((challenge / "training").iterdir())
    assert [group.name for group in groups] == sorted(synth.DATABASES)
    chosen = [header for group in groups for header in headers(group)[:3]] + headers(ptbxl)[::40]
    for header in chosen:
        name = str(header.with_suffix(""))
        record = wfdb.rdrecord(name, physical=False)
        ours = samples_of(header)
        assert np.array_equal(record.d_signal, ours)
        assert [n.lower() for n in record.sig_name] == [n.lower() for n in LEADS]
        assert np.allclose(wfdb.rdrecord(name).p_signal, ours / 1000)
        if header.with_suffix(".mat").exists():
            assert np.array_equal(scipy.io.loadmat(f"{name}.mat")["val"], ours.T)
    by_name = {path.name: wfdb.rdheader(str(headers(path)[0].with_suffix(""))) for path in groups}
    assert {name: header.fs for name, header in by_name.items()} == {
        n: d.fs_hz for n, d in synth.DATABASES.items()
    }
    assert (by_name["ptb"].sig_len, by_name["st_petersburg_incart"].sig_len) == (30_000, 15_420)
    assert (by_name["ptb-xl"].units[0], by_name["ningbo"].units[0]) == ("mv", "mV")
    assert {len(samples_of(h)) / 500 for h in headers(challenge / "training/cpsc_2018")} <= {
        6,
        10,
        12,
        15,
        20,
        30,
        60,
    }


def test_both_layouts_have_the_same_records_and_the_csv_matches_the_headers(
    challenge: Path, ptbxl: Path
) -> None:
    assert (challenge / "ptbxl_database.csv").read_bytes() == (
        ptbxl / "ptbxl_database.csv"
    ).read_bytes()
    assert "seed=5" in (ptbxl / "SYNTHETIC.txt").read_text()
    with open(challenge / "ptbxl_database.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows[0]) == 28
    assert [int(row["ecg_id"]) for row in rows] == list(range(1, PATIENTS + TWICE + 1))
    sessions = Counter(float(row["patient_id"]) for row in rows)
    assert len(sessions) == PATIENTS
    assert Counter(sessions.values()) == {1: PATIENTS - TWICE, 2: TWICE}
    dates = [row["recording_date"] for row in rows]
    assert dates == sorted(dates)
    assert len({row["strat_fold"] for row in rows}) == 10
    for row in rows:
        header = challenge / f"training/ptb-xl/g1/HR{int(row['ecg_id']):05d}.hea"
        stated, scp = comments(header), ast.literal_eval(row["scp_codes"])
        assert row["filename_hr"] == f"records500/00000/{int(row['ecg_id']):05d}_hr"
        assert np.array_equal(samples_of(header), samples_of(ptbxl / f"{row['filename_hr']}.hea"))
        assert stated["Sex"] == ("Female" if row["sex"] == "1" else "Male")
        assert float(row["age"]) == (300 if int(stated["Age"]) > 89 else int(stated["Age"]))
        codes = {SCP_CODES[name] for name in scp if name in SCP_CODES} | {
            HEART_AXIS_CODES.get(row["heart_axis"], "")
        }
        assert codes - {""} == set(stated["Dx"].split(",")) - {"428750005"}


def test_the_archives_have_the_quirks_of_the_real_ones(challenge: Path) -> None:
    for name, mark, form in (
        ("ptb-xl", "# Age: ", "16x1+24 1000.0(0)/mv"),
        ("chapman_shaoxing", "#Age: ", "16+24 1000/mV"),
    ):
        text = headers(challenge / "training" / name)[0].read_text()
        assert f"\n{mark}" in text and f".mat {form} 16 0 " in text
    georgia = [comments(header) for header in headers(challenge / "training/georgia")]
    assert 0 < sum("Sx" in stated for stated in georgia) < len(georgia)
    flat, invalid = np.ones((2, 100, 12), np.int16)
    synth.damage(flat, "georgia", np.array([0, 0.5, 0, 0, 0, 0]))
    assert not flat[:, 9:].any() and flat[:, :9].all()
    synth.damage(invalid, "ningbo", np.array([0.5, 0.5, 0, 0, 0.5, 0]))
    assert (invalid == -32_768).sum() == 11 and (invalid[:, :6] == 1).all()


def test_all_classes_occur_and_labels_are_noisy(challenge: Path, sessions: list[tuple]) -> None:
    shown = {
        name
        for pair in sessions
        for made in pair
        for name, mask in made.present.items()
        if mask.any()
    }
    assert shown == set(ABBREVIATIONS) - {"BBB", "LPR"}
    codes = [comments(header)["Dx"].split(",") for header in headers(challenge)]
    stated = [{CLASS_OF[code] for code in row if code in CLASS_OF} for row in codes]
    assert np.mean([bool(classes) for classes in stated]) > 0.9
    assert len(set().union(*stated)) == 24
    wrong = right = 0
    for block, pair in enumerate(sessions):
        for s, made in enumerate(pair):
            for i, written in enumerate(
                synth._read((11, block, s), list(range(BLOCK)), made.present, ())
            ):
                present = {name for name, mask in made.present.items() if mask[i]}
                wrong, right = (
                    wrong + len(present ^ set(written)),
                    right + len(present & set(written)),
                )
    assert 0.02 < wrong / (wrong + right) < 0.10


def test_the_heart_rate_matches_the_label(sessions: list[tuple]) -> None:
    for name, low, high in (("SB", 36, 62), ("STach", 96, 152)):
        within = []
        for made in (made for pair in sessions for made in pair):
            for i in np.flatnonzero(
                made.present[name] & ~made.present["PAC"] & ~made.present["PVC"]
            ):
                rate = 60 * 500 / np.median(np.diff(r_peaks(made.digital[i].T)))
                within.append(low <= rate <= high and abs(rate - made.rate_bpm[i]) < 6)
        assert len(within) > 30
        assert np.mean(within) > 0.85


def test_normal_ecgs_look_normal(sessions: list[tuple]) -> None:
    normal = []
    for made in (made for pair in sessions for made in pair):
        alone = made.present["NSR"] & (sum(mask.astype(int) for mask in made.present.values()) == 1)
        normal += [made.digital[i] for i in np.flatnonzero(alone)]
    beats = np.median([mean_beat(digital).reshape(350, 12) for digital in normal], axis=0)
    qrs = beats[120:180]
    assert qrs[:, 1].argmax() > 0
    assert qrs[:, 1].max() > 2 * -qrs[:, 1].min()
    assert -qrs[:, 3].min() > qrs[:, 3].max()
    r_over_s = qrs.max(0)[6:] / -qrs.min(0)[6:]
    assert r_over_s[0] < 1 < r_over_s[3]
    assert r_over_s[0] < r_over_s[2] < r_over_s[4]
    assert (
        beats[50:125, 1].max() - beats[:40, 1].mean() > 0.005
    )  # a P wave in II; a beat's norm is 1
    assert (
        beats[220:320, [0, 1, 9, 10]].max(0).min() > -beats[220:320, [0, 1, 9, 10]].min(0).max()
    )  # T upright
    std_mv = np.median([digital.std(0) for digital in normal], axis=0) / 1000
    assert (std_mv > 0.07).all()
    assert (std_mv < 0.4).all()


@pytest.fixture(scope="module")
def pairs() -> list[tuple[list[np.ndarray], list[list[str]]]]:
    """Two sessions of 448 patients of a PTB-XL: [(median beats, diagnoses)]."""
    made: list[tuple[list[np.ndarray], list[list[str]]]] = [([], []), ([], [])]
    for block in synth.plan(448, 1.0, 0, "ptbxl"):
        for (beats, names), (_, digital, diagnoses, _) in zip(
            made, synth.sessions_of(block), strict=True
        ):
            beats.append(mean_beats(digital.transpose(0, 2, 1))[:, : 12 * BEAT])
            names += diagnoses
    return made


def test_two_sessions_are_as_alike_as_real_ones(
    pairs: list[tuple[list[np.ndarray], list[list[str]]]],
) -> None:
    """Against the figures of real PTB-XL patients with two sessions."""
    (first, before), (second, after) = pairs
    rhythms = {*RHYTHM, "PR"}
    assert (
        abs(
            np.mean(
                [set(a) & rhythms == set(b) & rhythms for a, b in zip(before, after, strict=True)]
            )
            - 0.68
        )
        < 0.12
    )
    assert (
        abs(np.mean([set(a) == set(b) for a, b in zip(before, after, strict=True)]) - 0.44) < 0.12
    )
    cosine = (np.concatenate(first) @ np.concatenate(second).T)[:438, :438]
    own, others = np.diag(cosine), cosine[~np.eye(438, dtype=bool)]
    assert 0.40 < (cosine.argmax(0) == np.arange(438)).mean() < 0.65
    assert 0.80 < np.median(own) < 0.93
    assert 0.25 < np.median(others) < 0.5


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(DataError, match=r"full is not empty.*new folder"):
        synth.synthesise(tmp_path / "full", 3, progress=False)
    assert files(tmp_path / "full") == {"mine.txt": b"keep"}
    for change, words in (
        ({"patients": 0}, "patients=0"),
        ({"two_sessions": 1.5}, "two_sessions=1.5"),
        ({"layout": "edf"}, "layout='edf' is not one of physionet2021, ptbxl"),
        ({"patients": 60_000, "two_sessions": 0.9}, "five-digit"),
        ({"patients": 90_000, "two_sessions": 0}, "outside PTB-XL there are"),
    ):
        with pytest.raises(DataError, match=words):
            synth.synthesise(tmp_path / "new", **({"patients": 3, "progress": False} | change))
    assert not (tmp_path / "new").exists()
    assert sum(synth.allocate(66_000).values()) == 66_000
    assert sum(synth.allocate(7).values()) == 7
