"""The door to an evaluation: its numbers against plain loops over the same crops, and what it refuses."""

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import engine
from data_tools.build import ShardOptions, shard
from data_tools.dataset import CLASSES, Dataset, fingerprint
from data_tools.sources import open_sources
from data_tools.splits import RoleSources
from data_tools.synth import synthesise
from engine.common import LEADS
from engine.data.leakage import split_of
from engine.evaluate import main
from engine.evaluation import results as heldout
from engine.evaluation.metrics import challenge_score
from engine.model.folder import seal

Saved = Callable[..., Path]
DIAGNOSIS = {"task": "diagnosis", "classes": list(CLASSES)}
IDENTIFICATION = {"task": "identification"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Of the crops for validation, one has a single half."""
    place = tmp_path_factory.mktemp("evaluate")
    synthesise(place / "archive", patients=100, sessions=2, seed=5, progress=False)
    found = shard(
        open_sources(str(place / "archive")),
        ShardOptions(str(place / "dataset"), role_sources=RoleSources(id_share=1.0), quiet=True),
    )
    assert sorted(set(found.column("halves")[found.select(dx="valid")].tolist())) == [1, 2]
    return found


@pytest.fixture
def copy(data: Dataset, tmp_path: Path) -> Callable[..., str]:
    """The same dataset, of which dataset.json says something else."""

    def make(**changes: Any) -> str:
        place = tmp_path / "copy"
        place.mkdir()
        for name in ("samples.parquet", "shards"):
            (place / name).symlink_to(Path(data.root.url) / name)
        meta = data.meta | changes
        (place / "dataset.json").write_text(json.dumps(meta | {"fingerprint": fingerprint(meta)}))
        return str(place)

    return make


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def scored(capsys: pytest.CaptureFixture[str], out: Path, *arguments: object) -> dict[str, Any]:
    code, text, err = run(capsys, *arguments, "--json", out)
    assert (code, err) == (0, "")
    document: dict[str, Any] = json.loads(out.read_text())
    key = "challenge" if document["task"] == "diagnosis" else "accuracy"
    assert f"{document['score']:.4f}" in text and document["score"] == document["metrics"][key]
    return document


def by_hand(data: Dataset, rows: np.ndarray, leads: tuple[int, ...] = tuple(range(12))) -> tuple[torch.Tensor, np.ndarray]:
    """Every half that was recorded, in millivolts, other leads zero; and its crop."""
    halves, crops = [], []
    for row in rows.tolist():
        for half in range(int(data.column("halves")[row])):
            mv = data.read(row)[:, 2500 * half : 2500 * (half + 1)] / 1000.0
            mv[[lead for lead in range(12) if lead not in leads]] = 0
            halves.append(torch.tensor(mv, dtype=torch.float32))
            crops.append(row)
    return torch.stack(halves), np.array(crops)


# Numbers ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leads", [None, "1", "V2,ii"])
def test_diagnosis_is_that_of_every_half_by_hand(
    leads: str | None, data: Dataset, saved_model: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shuffled = list(reversed(CLASSES))  # the head's order is its own
    folder = saved_model(head={"task": "diagnosis", "classes": shuffled})
    asked = ("--leads", leads) if leads else ()
    found = scored(
        *(capsys, tmp_path / "f.json", "--model", folder, "--data", data.root.url, "--role", "valid", "--batch", 5), *asked
    )
    seen = {None: tuple(range(12)), "1": (0,), "V2,ii": (1, 7)}[leads]
    x, crops = by_hand(data, data.select(dx="valid"), seen)
    probability = engine.load(folder).logits(x).sigmoid().detach().numpy()[:, ::-1]
    labels = data.labels[crops]
    assert found["score"] == pytest.approx(challenge_score(labels, probability > 0.5), abs=1e-9)
    assert (found["n"], found["unit"], found["role"], found["data"]) == (len(crops), "half", "valid", data.fingerprint)
    assert found["leads"] == ",".join(LEADS[lead] for lead in seen)
    names = data.column("record")[crops]
    each = [np.flatnonzero(names == name) for name in np.unique(names)]
    of_records = challenge_score(
        np.stack([labels[rows[0]] for rows in each]), np.stack([probability[rows].mean(0) > 0.5 for rows in each])
    )
    assert found["record"]["metrics"]["challenge"] == pytest.approx(of_records, abs=1e-9)
    assert found["record"]["n"] == len(each) < len(np.unique(crops)) < found["n"]  # some records have several crops
    assert found["classes"]["NSR"]["positives"] == labels[:, CLASSES.index("NSR")].sum()
    assert found["intervals"]["challenge"][0] <= found["score"] <= found["intervals"]["challenge"][1]


def test_identification_is_the_nearest_gallery_crop_by_hand(
    data: Dataset, saved_model: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model without a head, on the first 5 s of each crop."""
    folder = saved_model()
    found = scored(capsys, tmp_path / "f.json", "--model", folder, "--data", data.root.url)
    patient, model = data.column("patient"), engine.load(folder)
    gallery, probe = data.select(identity="gallery"), data.select(identity="probe")
    first = [by_hand(data, rows)[0][::2] for rows in (gallery, probe)]
    g, p = (torch.nn.functional.normalize(model.pooled(x).detach().double(), dim=1) for x in first)
    hits = patient[gallery][(p @ g.T).argmax(1).numpy()] == patient[probe]
    assert found["score"] == pytest.approx(hits.mean()) and found["metrics"]["ties"] == 0
    assert (found["n"], found["gallery"], found["one_sided"]) == (100, 100, 0)
    assert found["metrics"]["chance"] == 0.01 < found["score"]


def test_identification_in_validation_compares_the_halves_of_a_crop(
    data: Dataset, saved_model: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved_model(head=IDENTIFICATION)
    found = scored(capsys, tmp_path / "f.json", "--model", folder, "--data", data.root.url, "--role", "valid")
    rows = data.select(identity="valid")
    rows = rows[data.column("halves")[rows] == 2]
    c = torch.nn.functional.normalize(engine.load(folder).pooled(by_hand(data, rows)[0]).detach().double(), dim=1)
    name = np.array([p or r for p, r in zip(data.column("patient")[rows], data.column("record")[rows], strict=True)])
    assert found["score"] == pytest.approx((name[(c[1::2] @ c[::2].T).argmax(1).numpy()] == name).mean())
    assert found["n"] == found["gallery"] == len(rows)


def test_a_model_of_three_leads_has_its_own(
    data: Dataset, saved_model: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved_model(leads=3, preprocessing={"leads": ["I", "II", "V2"]}, head=DIAGNOSIS)
    arguments = ("--model", folder, "--data", data.root.url, "--role", "valid")
    found = scored(capsys, tmp_path / "f.json", *arguments)
    x, crops = by_hand(data, data.select(dx="valid"))
    probability = engine.load(folder).logits(x[:, [0, 1, 7]]).sigmoid().detach().numpy()
    assert found["score"] == pytest.approx(challenge_score(data.labels[crops], probability > 0.5), abs=1e-9)
    assert found["leads"] == "I,II,V2" and scored(capsys, tmp_path / "g.json", *arguments, "--leads", 3) == found
    for leads, words in (("12", "trained to look at I,II,V2 only"), ("2", "needs all of I,II,V2"), ("V9", "no lead is called")):
        code, _, err = run(capsys, *arguments, "--leads", leads)
        assert code == 2 and re.search(f"--leads {leads}: .*{words}", err) and err.count("\n") == 1


def test_scale_is_that_of_what_was_recorded(
    data: Dataset, saved_model: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of normalised signals: the zeros after a record's end count for nothing."""
    folder = saved_model(head=DIAGNOSIS, preprocessing={"scale": "zscore"})
    found = scored(capsys, tmp_path / "f.json", "--model", folder, "--data", data.root.url, "--role", "valid")
    rows, model, parts = data.select(dx="valid"), engine.load(folder), []
    for row in rows.tolist():
        halves = int(data.column("halves")[row])
        uv = data.read(row)[:, : 2500 * halves].astype(float)
        z = (uv - uv.mean(1, keepdims=True)) / np.maximum(uv.std(1, keepdims=True), 1e-3)
        parts.append(torch.tensor(z, dtype=torch.float32).unflatten(1, (halves, 2500)).transpose(0, 1))
    probability = model.logits(torch.cat(parts)).sigmoid().detach().numpy()
    labels = np.repeat(data.labels[rows], data.column("halves")[rows], axis=0)
    assert found["score"] == pytest.approx(challenge_score(labels, probability > 0.5), abs=1e-9)


def test_the_page_and_the_remarks(
    data: Dataset, copy: Callable[..., str], saved_model: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = saved_model(head=DIAGNOSIS), tmp_path / "page.html"
    other = copy(plan="paper-split")
    code, text, _ = run(capsys, "--model", folder, "--data", other, "--role", "valid", "--report", page)
    assert code == 0 and text.splitlines()[-1] == str(page)
    told = ["classes have no positives", "leaking one (--plan paper-split)", "prepared in another way"]
    for words in told:
        assert words in text and words in page.read_text()
    assert len(text.splitlines()) < 16 and max(map(len, text.splitlines())) < 250


@pytest.mark.parametrize(("head", "roles"), [(DIAGNOSIS, {"test"}), (IDENTIFICATION, {"gallery", "probe"})])
def test_crops_in_which_the_model_sees_nothing_are_told(
    head: dict[str, Any],
    roles: set[str],
    data: Dataset,
    saved_model: Saved,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    role = data.column("dx_role" if head is DIAGNOSIS else "id_role")
    scored_rows = np.flatnonzero(np.isin(role, list(roles)))
    lacking = {*scored_rows[:2].tolist(), *scored_rows[-1:].tolist(), *np.flatnonzero(role == "").tolist()}
    monkeypatch.setattr(
        heldout, "unseen", lambda dataset, leads: np.isin(np.arange(len(dataset)), list(lacking)) & (leads == (7,))
    )
    arguments = (tmp_path / "f.json", "--model", saved_model(head=head), "--data", data.root.url)
    told = f"In 3 of {len(scored_rows):,} crops nothing was measured of V2: the model was shown zeros."
    assert told in scored(capsys, *arguments, "--leads", "V2")["remarks"]
    assert not any("nothing was measured" in remark for remark in scored(capsys, *arguments)["remarks"])


def test_a_model_that_has_seen_the_data_split_otherwise(
    data: Dataset, saved_model: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, mine = saved_model(head=DIAGNOSIS), split_of(data)
    arguments = ("--model", folder, "--data", data.root.url, "--role", "valid")
    elsewhere = mine | {"fingerprint": "0", "seed": 1}
    told = "split in another way (seed 1, here 0)"
    for splits, said in (
        ([mine], False),
        ([mine | {"fingerprint": "0"}], False),  # a role hangs on the seed and on whose it is
        ([elsewhere | {"sources": ["mimic-iv-ecg"]}], False),
        ([mine, elsewhere], True),  # of an earlier stage
        ("by hand", False),
    ):
        document = json.loads((folder / "config.json").read_text())
        seal(folder, document | {"trained": {"splits": splits}})
        found = scored(capsys, tmp_path / "f.json", *arguments)
        assert any(told in remark for remark in found["remarks"]) == said, splits


def test_one_patient_is_said_to_say_nothing(
    data: Dataset, saved_model: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    select = Dataset.select
    patient = data.column("patient")[select(data, identity="gallery")[0]]

    def one(self: Dataset, **role: Any) -> np.ndarray:
        rows = select(self, **role)
        return rows[self.column("patient")[rows] == patient]

    monkeypatch.setattr(Dataset, "select", one)
    found = scored(capsys, tmp_path / "f.json", "--model", saved_model(), "--data", data.root.url)
    assert found["metrics"] == {"accuracy": 1.0, "top5": 1.0, "chance": 1.0, "ties": 0.0}
    assert found["intervals"] == {"accuracy": [None, None]} and "say nothing" in found["remarks"][-1]


# Refusals -----------------------------------------------------------------------------------------------------------------


def refuse(capsys: pytest.CaptureFixture[str], words: str, *arguments: object, code: int = 2) -> None:
    found, out, err = run(capsys, *arguments)
    assert (found, out, err.count("\n")) == (code, "", 1), err
    assert err.startswith("engine.evaluate: ") and re.search(words, err), err


@pytest.mark.parametrize(
    ("head", "task", "words"),
    [
        (None, "diagnosis", "no head, it is only pre-trained: fine-tune it"),
        (IDENTIFICATION, "diagnosis", "no head, it is fine-tuned for identification"),
        ({"task": "diagnosis", "classes": ["AF", "NSR"]}, "auto", "knows 2 classes, not AFL, BBB"),
    ],
)
def test_a_model_that_makes_no_diagnosis(
    head: Any, task: str, words: str, data: Dataset, saved_model: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(capsys, words, "--model", saved_model(head=head), "--data", data.root.url, "--task", task)


def test_data_without_held_out_crops(
    data: Dataset, saved_model: Saved, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--model", saved_model(head=DIAGNOSIS), "--data", data.root.url)
    select = Dataset.select
    monkeypatch.setattr(Dataset, "select", lambda self, **role: select(self, **role)[:0])
    refuse(
        capsys,
        "no crop has dx=test: it was made with --plan paper, or holds no cpsc_2018 or georgia: shard --dx-sources names",
        *common,
    )
    refuse(capsys, "no crop has id=gallery", *common, "--task", "identification")
    refuse(capsys, "no crop has id=valid and two halves", *common, "--task", "identification", "--role", "valid")


def test_crops_without_a_scored_diagnosis(
    data: Dataset, saved_model: Saved, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dataset, "labels", np.zeros((len(data), 26), bool))
    common = ("--model", saved_model(head=DIAGNOSIS), "--data", data.root.url)
    refuse(capsys, r"none of its \d+ crops with dx=test has a scored diagnosis", *common)


def test_places_that_are_not_what_they_should_be(
    data: Dataset, saved_model: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved_model()
    refuse(capsys, "none: no dataset.json", "--model", folder, "--data", tmp_path / "none")
    refuse(capsys, "none: no such folder", "--model", tmp_path / "none", "--data", data.root.url)
    common = ("--model", folder, "--data", data.root.url)
    refuse(capsys, "name a file in a folder that is there", *common, "--json", tmp_path / "none" / "f.json")
    refuse(capsys, "--report .*: is a folder: name a file in a folder that is there", *common, "--report", tmp_path)
    refuse(capsys, "--batch 0: at least 1", *common, "--batch", 0)
    if not torch.cuda.is_available():
        refuse(capsys, "torch sees no GPU here", *common, "--device", "cuda")


def test_a_full_disk_is_that_of_the_output(
    data: Dataset, saved_model: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("engine.evaluation.run_files.os.fsync", full)
    common = ("--model", saved_model(), "--data", data.root.url)
    for flag in ("--json", "--report"):
        code, _, err = run(capsys, *common, flag, tmp_path / "f")
        assert code == 1 and err.startswith(f"engine.evaluate: {flag} {tmp_path / 'f'}: No space left on device: make room")
        assert err.count("\n") == 1 and not (tmp_path / "f").exists()
    refuse(capsys, "are one file: name two", *common, "--json", tmp_path / "f", "--report", tmp_path / "run" / ".." / "f")


def test_interrupted_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.evaluate.evaluate", stopped)
    assert main(["--model", "m", "--data", "d"]) == 130
    assert capsys.readouterr().err == "engine.evaluate: interrupted\n"


@pytest.mark.parametrize(("key", "value"), [("fs_hz", 250), ("uv_per_lsb", 4.88)])
def test_data_of_another_rate_or_unit(
    key: str, value: float, copy: Callable[..., str], saved_model: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(capsys, f"{key}={value}, where the model takes", "--model", saved_model(), "--data", copy(**{key: value}))


@pytest.mark.parametrize("head", [DIAGNOSIS, IDENTIFICATION], ids=["diagnosis", "identification"])
def test_a_model_that_gives_nan(
    head: Any, data: Dataset, saved_model: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved_model(head=head)
    weights = load_file(folder / "model.safetensors")
    weights[next(name for name in weights if name.startswith("encoder.layers"))][:] = np.nan
    save_file(weights, folder / "model.safetensors")
    seal(folder, json.loads((folder / "config.json").read_text()))
    common = ("--model", folder, "--data", data.root.url, "--json", tmp_path / "f.json")
    refuse(capsys, r"the model gave NaN for \d+ of|embeddings are not finite", *common, code=1)
    assert not (tmp_path / "f.json").exists()


def test_a_damaged_crop_is_named(data: Dataset, saved_model: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Path(shutil.copytree(data.root.url, tmp_path / "damaged"))
    row, path = int(data.select(dx="test")[0]), place / "shards" / "00000.tar"
    content = bytearray(path.read_bytes())
    content[int(data.column("offset")[row]) + 77] ^= 1
    path.write_bytes(content)
    words = rf"00000.tar: crop {row} at byte \d+ fails its crc32c"
    refuse(capsys, words, "--model", saved_model(head=DIAGNOSIS), "--data", place)


def test_public_data_need_no_credentials(
    saved_model: Saved, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def opened(url: str, anonymous: bool = False) -> Dataset:
        asked.append((url, anonymous))
        raise FileNotFoundError(2, "seen", url)

    monkeypatch.setattr(Dataset, "open", opened)
    refuse(capsys, "seen", "--model", saved_model(), "--data", "s3://b/d", "--anonymous")
    assert asked == [("s3://b/d", True)]
