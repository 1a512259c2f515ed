"""omnilead bench: scores against a direct computation, shares of labels, differences, what is kept,
what is refused."""

import csv
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnilead.__main__ import main
from omnilead.data_tools.dataset import Dataset, as_csv
from omnilead.engine.evaluation import bench, embedders
from omnilead.engine.evaluation.bench import (
    ProbedRecords,
    ProbedTask,
    drawn,
    probe_scores,
    resampled,
    unlike,
    weighted,
    whitening,
)
from omnilead.engine.evaluation.embedders import Vectors
from omnilead.engine.evaluation.metrics import Classification, measure, weighted_areas
from omnilead.engine.evaluation.probe import ProbeData, linear
from omnilead.engine.report import bench_report
from omnilead.engine.tasks.config import TaskConfig
from omnilead.engine.tasks.labels import TaskLabels
from tests.conftest import save_model
from tests.parsers import parse, parser_of

RNG = np.random.default_rng(0)
LEADS, TASKS = ["--leads", "V2,I"], ["--tasks", "sex", "age", "identification"]


@pytest.fixture(scope="module", autouse=True)
def few_resamples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "RESAMPLES", 20)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "A" / "model")
    save_model(folder / "B", layers=1)
    return ["--models", f"first={folder / 'A'}", str(folder / "B")]


def run_bench(models: list[str], data: str, out: Path | str, *more: str) -> int:
    return main(["bench", *models, "--data", data, "--out", str(out), *more])


def read_document(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "bench.json").read_text())
    return document


@pytest.fixture(scope="module")
def out(models: list[str], dataset: Dataset, tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("bench") / "OUT"
    more = ["--share", "1", "0.3", "--noise", "0", "1", "--seed", "3"]
    assert run_bench(models, dataset.root.url, folder, *TASKS, *LEADS, *more) == 0
    return folder


def test_every_row_and_its_differences_in_every_file(out: Path) -> None:
    found = read_document(out)
    names = ["first", "random weights", "B", "random weights of B", "mean beat"]
    assert list(found["models"]) == names and found["models"]["B"] == "random weights of B"
    rows = {tuple(row[key] for key in bench_report.KEYS): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == len(names) * (2 * 2 * 2 + 2)
    one = rows["B", "sex", "V2,I", 0.3, 1.0]
    assert (one["draws"], one["classes"], one["left_out"]) == (1, 2, [])
    low, high = one["intervals"]["auroc"]
    assert low <= one["metrics"]["auroc"] <= high and one["n"] > one["patients"]
    of_age = rows["first", "age", "V2,I", 1.0, 0.0]["metrics"]
    assert of_age.keys() == {"mae", "rmse", "r2", "pearson"}
    identity = [rows["mean beat", "identification", "V2,I", None, level] for level in (0.0, 1.0)]
    clean, noise = (row["metrics"] for row in identity)
    assert clean["accuracy"] > 0.2 and clean["accuracy_whitened"] > 0.2 and noise != clean
    settings = ("sex", "V2,I", 1.0, 0.0)
    gaps = {
        (gap["against"], gap["metric"], *(gap[key] for key in bench_report.KEYS)): gap
        for gap in found["differences"]
    }
    random, pair = "random weights of B", ("age", "V2,I", 0.3, 0.0)
    gap = gaps[random, "mae", "B", *pair]
    values = [rows[name, *pair]["metrics"]["mae"] for name in ("B", random)]
    assert gap["difference"] == pytest.approx(values[0] - values[1])
    assert gap["interval"][0] <= gap["interval"][1]
    assert ("first", "auroc", "mean beat", *settings) in gaps
    assert ("first", "auroc", "first", *settings) not in gaps
    lines = list(csv.DictReader((out / "bench.csv").open()))
    classes = [line for line in lines if line["class"]]
    scores = sum(len(row["metrics"]) for row in found["rows"])
    assert len(lines) == scores + len(gaps) + len(classes)
    of_f = {
        line["metric"]: float(line["value"])
        for line in classes
        if line["class"] == "F"
        and [line[key] for key in bench_report.KEYS] == ["B", "sex", "V2,I", "0.3", "1.0"]
    }
    assert of_f == {name: values["F"] for name, values in one["per_class"].items()}
    assert set(one["per_class"]["auroc"]) == {"F", "M"}
    text = (out / "bench.md").read_text()
    assert (
        "## identification: accuracy, whitened" in text
        and "## sex: AUPRC" in text
        and "| minus first" in text
    )
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_cached_embeddings_are_reused(
    out: Path,
    models: list[str],
    dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """More tasks of the same model cost nothing; only a damaged file is computed again."""
    shutil.copytree(out, copy := tmp_path / "OUT")
    made, batches = list[int](), embedders.dataset_batches
    monkeypatch.setattr(
        embedders,
        "dataset_batches",
        lambda d, rows, **how: made.append(sum(map(len, rows))) or batches(d, rows, **how),
    )
    again = [*LEADS, "--seed", "3", "--tasks"]
    assert run_bench(models, dataset.root.url, copy, *again, "identification") == 0 and made == []
    names = list(read_document(out)["models"])
    said = [f"bench: {i} of {len(names)} done: {name}" for i, name in enumerate(names, 1)]
    assert capsys.readouterr().err.splitlines() == said  # no terminal: a line for each model
    monkeypatch.setattr(bench, "interactive", lambda: True)
    wanted = ("identification", "V2,I", 0)
    before = [
        row["metrics"]
        for row in read_document(out)["rows"]
        if (row["task"], row["leads"], row["noise"]) == wanted
    ]
    assert [row["metrics"] for row in read_document(copy)["rows"]] == before
    damaged = sorted((copy / "parts").rglob("*.npz"), key=lambda path: path.stat().st_size)[-1]
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert run_bench(models, dataset.root.url, copy, *again, *TASKS[1:]) == 0
    assert len(made) == 1 and " done: " not in capsys.readouterr().err
    assert damaged.stat().st_size == (out / damaged.relative_to(copy)).stat().st_size


def test_a_model_under_two_names_does_not_differ_from_itself(
    out: Path, models: list[str], dataset: Dataset, tmp_path: Path
) -> None:
    shutil.copytree(out, copy := tmp_path / "OUT")
    two = [*models[:2], models[1].replace("first=", "twin=")]
    assert run_bench(two, dataset.root.url, copy, *TASKS, *LEADS, "--seed", "3") == 0
    found = read_document(copy)["differences"]
    gaps = [gap for gap in found if (gap["model"], gap["against"]) == ("twin", "first")]
    metrics = {"auroc", "auprc", "mae", "accuracy", "accuracy_whitened"}
    assert {gap["metric"] for gap in gaps} >= metrics
    assert all(gap["difference"] == 0 and gap["interval"] == [0, 0] for gap in gaps)
    first, twin = (
        [gap for gap in found if (gap["model"], gap["against"]) == (name, "random weights")]
        for name in ("first", "twin")
    )
    assert [gap | {"model": "twin"} for gap in first] == twin
    assert any(gap["difference"] for gap in first)


def test_identification_equals_a_direct_computation(
    out: Path, models: list[str], dataset: Dataset
) -> None:
    """The probes have noise, the gallery has none."""
    beats, of = (
        embedders.embedders_of([], bench.Namespace(seed=3))[-1],
        bench.identities(dataset, dataset, ["V2,I"]),
    )
    found = read_document(out)["rows"]
    for level in (0.0, 1.0):
        a, b = (
            embedders.embedded(beats, dataset, rows, noise, "V2,I", out / "parts")
            .of(rows)
            .c_BSD[:, 0, : beats.compared]
            for rows, noise in ((of.gallery, 0.0), (of.probe, level))
        )
        a, b = (c / np.linalg.norm(c, axis=1, keepdims=True) for c in (a, b))
        direct = of.patient_B[of.gallery][(b @ a.T).argmax(1)] == of.patient_B[of.probe]
        (row,) = [
            r
            for r in found
            if (r["model"], r["task"], r["noise"]) == ("mean beat", "identification", level)
        ]
        assert row["metrics"]["accuracy"] == pytest.approx(direct.mean()) and row["n"] == len(
            direct
        )


def test_trained_on_one_dataset_and_tested_on_another(
    models: list[str], dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Classes are matched by name; each dataset has a table and splits of its own."""
    rows = dataset.table(["record", "patient"]).to_pylist()
    for name, columns in (
        ("train", "tall,old"),
        ("test", "old,other,tall"),
        ("wrong", "old,other"),
    ):
        (tmp_path / name).mkdir()
        order = [("tall", "old", "other").index(column) for column in columns.split(",")]
        cells = {row["record"]: [i % 2, i % 3 % 2, 1] for i, row in enumerate(rows)}
        (tmp_path / name / "body.csv").write_text(
            as_csv(
                [
                    ["record", *columns.split(",")],
                    *([key, *(values[k] for k in order)] for key, values in cells.items()),
                ]
            )
        )
    url, train = dataset.root.url, str(tmp_path / "train" / "body.csv")
    out, page = tmp_path / "OUT", tmp_path / "OUT" / "bench.md"
    words = ["--test-data", url, "--tasks", train, "--test-labels"]
    assert run_bench(models[:2], url, out, *words, str(tmp_path / "test")) == 0
    one = read_document(out)["rows"][0]
    assert list(one["per_class"]["auroc"]) == ["tall", "old"] and one["task"] == "body"
    assert "leakage" not in page.read_text()
    body = tmp_path / "test" / "body.csv"  # all records are tested, those of train too
    split = re.sub("$", ",test", body.read_text().strip(), flags=re.M)
    body.write_text(split.replace("test", "split", 1))
    assert run_bench(models[:2], url, out, *words, str(tmp_path / "test")) == 0
    assert "- body: Possible leakage: record " in page.read_text()
    assert run_bench(models[:2], url, out, *words, str(tmp_path / "wrong")) == 2
    assert "no column 'tall'" in capsys.readouterr().err


def test_two_columns_of_numbers_and_a_test_split_in_the_other_dataset_only(
    models: list[str], dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = dict(zip(*dataset.table(["record", "patient"]).to_pydict().values(), strict=True))
    people, header = list(dict.fromkeys(records.values())), ["record", "hr", "qtc", "split"]
    for name, splits in (("train", ["train", "valid"]), ("test", ["test"])):
        split_of = {person: splits[i % len(splits)] for i, person in enumerate(people)}
        cells = [
            [name, i % 9 + 0.5, i % 7, split_of[of]] for i, (name, of) in enumerate(records.items())
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "two.csv").write_text(as_csv([header, *cells]))
    url, out, test = dataset.root.url, tmp_path / "OUT", tmp_path / "test"
    words = ["--test-data", url, "--test-labels", str(test)]
    words += ["--tasks", str(tmp_path / "train" / "two.csv")]
    assert run_bench(models[:2], url, out, *words) == 0
    one = read_document(out)["rows"][0]
    assert one["per_class"] == {} and one["classes"] == 2 and one["metrics"]["mae"] > 0
    same = [[record, 1.5, 2, "test"] for record in records]
    (test / "two.csv").write_text(as_csv([header, *same]))
    assert run_bench(models[:2], url, out, *words) == 2
    assert f"{test}/two.csv: all labels of the split test are the same" in capsys.readouterr().err


def made_task(kind: Any = "multilabel", test: int = 60) -> tuple[ProbedTask, Vectors]:
    """Vectors and labels by hand: 200 records of two halves, the last ones tested; two of each
    patient."""
    c_BSD = RNG.normal(size=(200, 2, 5)).astype(np.float32)
    y_NK = (c_BSD.sum(1) @ RNG.normal(size=(5, 3)) + RNG.normal(size=(200, 3)) > 0).astype(
        np.float32
    )
    y_NK[RNG.random(y_NK.shape) < 0.1] = np.nan
    splits = np.split(np.arange(200), [100, 200 - test])
    parts = [ProbedRecords(rows, np.arange(len(rows)), y_NK[rows], rows // 2) for rows in splits]
    labels = TaskLabels(TaskConfig("made", kind), ("a", "b", "c"), [y_NK], [])
    draws, every = (
        {0.2: list(drawn(parts[0].patient_N, 0.2)), 1.0: [np.arange(100)]},
        np.ones(3, bool),
    )
    task = ProbedTask(
        labels,
        tuple(parts),
        draws,
        {0.2: np.array([True, False, True]), 1.0: every},
        resampled(parts[2].patient_N),
    )
    return task, Vectors(np.arange(200), np.full(200, 2), c_BSD)


def test_scores_of_made_up_vectors_equal_a_direct_computation() -> None:
    task, vectors = made_task()
    found = {key[0]: row for key, row in probe_scores(task, vectors, {0.0: vectors})}
    (train, valid, test), x = task.parts, vectors.c_BSD.mean(1)
    for share, used in task.used.items():
        direct = []
        for at in task.draws[share]:
            data = ProbeData(
                x[train.rows[at]],
                train.y_NK[at][:, used],
                x[valid.rows],
                valid.y_NK[:, used],
                x[test.rows],
            )
            direct.append(measure("multilabel", test.y_NK[:, used], linear(data).scores_NK))
        facts, samples = found[share]
        assert (
            facts["draws"] == len(direct) == {0.2: 2, 1.0: 1}[share]
            and facts["left_out"] == {0.2: ["b"], 1.0: []}[share]
        )
        for name in ("auroc", "auprc"):
            assert samples[name][0] == pytest.approx(np.mean([one[name] for one in direct]))


def test_areas_for_many_weightings_at_once() -> None:
    score, y = RNG.integers(0, 12, 90) / 12, RNG.integers(0, 2, 90).astype(float)
    y[RNG.random(90) < 0.2] = np.nan
    weight = RNG.poisson(1, (90, 7))
    one = Classification(y[:, None], np.zeros((90, 1)), score[:, None], ["a"])
    direct = np.stack([np.concatenate(one.areas(w)) for w in weight.T], 1)
    np.testing.assert_allclose(
        weighted_areas(y, score, weight.astype(np.float32)), direct, rtol=1e-6
    )
    assert np.isnan(weighted_areas(np.zeros(90), score, weight)).all()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_means_over_resampled_draws_vary_as_means_over_all_draws_do(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "RESAMPLES", 4000)
    value_R = np.array([1.0, 4, 2, 8, 5])[:n]
    mean_B = np.sum([value * weight_B for value, weight_B in weighted(value_R)], axis=0)
    assert mean_B[0] == pytest.approx(value_R.mean())
    expected = value_R.var(ddof=1) / n if n > 1 else 0
    assert mean_B[1:].var() == pytest.approx(expected, rel=0.1)


def test_small_shares_are_subsets_of_larger_ones_and_patients_stay_whole() -> None:
    patient = RNG.integers(0, 300, 1000)
    small, large, half = (list(drawn(patient, share)) for share in (0.01, 0.1, 0.5))
    assert [len(small), len(large), len(half)] == [5, 5, 1]
    for few, many in zip(small, large, strict=True):
        assert set(few) < set(many) and len(np.unique(patient[few])) == round(
            0.01 * len(np.unique(patient))
        )
        assert np.isin(patient, patient[few]).sum() == len(few)
    assert len({tuple(few) for few in small}) == 5
    weight = resampled(patient)
    assert (weight[:, 0] == 1).all() and all(
        len(np.unique(weight[patient == p], axis=0)) == 1 for p in (patient[0], patient[7])
    )
    assert unlike(np.array([[0, 1, 1, np.nan], [1, 1, np.nan, np.nan]])).tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_whitened_halves_differ_equally_in_every_direction() -> None:
    mix, person = np.eye(4) + 0.2 * RNG.normal(size=(4, 4)), RNG.normal(size=(5000, 1, 4))
    matrix = whitening((person + RNG.normal(size=(5000, 2, 4)) @ mix).astype(np.float32))[1]
    np.testing.assert_allclose(matrix.T @ mix.T @ mix @ matrix, np.eye(4), atol=0.1)
    few = np.zeros((3, 2, 8), np.float32)
    few[:, :, :2] = RNG.normal(size=(3, 2, 2))
    assert np.isfinite(whitening(few)[1]).all() and np.isfinite(whitening(few[:1] * 0)[1]).all()


def test_the_covariance_is_shrunk_by_the_formula() -> None:
    """By hand: 6 crops of width 8 with covariance diag(6, 1, 0, ...), so tr = 7 and tr of the
    square = 37. OAS shrinks by (0.75 * 37 + 49) / (6.75 * (37 - 49 / 8)) = 0.36827 towards 7 /
    8."""
    c_BSD = np.zeros((6, 2, 8), np.float32)
    c_BSD[0, 1, 0], c_BSD[1, 1, 1] = 6 * 2**0.5, 6**0.5 * 2**0.5
    matrix = whitening(c_BSD)[1]
    shrunk = np.diag([4.1126, 0.95397] + [0.32224] * 6)
    np.testing.assert_allclose(np.linalg.inv(matrix @ matrix.T), shrunk, atol=1e-4)


def test_if_none_or_all_are_found_the_interval_is_the_exact_one() -> None:
    key, facts = ("A", "identification", "12", None, 0.0), {"n": 25, "patients": 20}
    samples = {"accuracy": np.zeros(21), "accuracy_whitened": np.ones(21), "auroc": np.ones(21)}
    (row,) = bench.compared({key: (facts, samples)}, {"A": ""})["rows"]
    assert row["intervals"]["accuracy"] == pytest.approx([0, 1 - 0.025 ** (1 / 20)])
    assert row["intervals"]["accuracy_whitened"] == pytest.approx([0.025 ** (1 / 20), 1])
    assert row["intervals"]["auroc"] == [1, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "sex", "--share", "0"], "--share 0: must be from 0.0001 to 1"),
        (["--tasks", "sex", "--noise", "-1"], "--noise -1: must be from 0 to 20"),
        (["--tasks", "sexx"], "'sexx': no such file or shipped config: did you mean sex"),
        (
            ["--tasks", "ptbxl-form"],
            "--tasks ptbxl-form: task.split=column: the split of a label table",
        ),
        (
            ["--tasks", "ptbxl-form", "--labels", "."],
            "--tasks ptbxl-form: no ptbxl-form.parquet in --labels .: ",
        ),
        (
            ["--tasks", "sex", "--share", "0.01"],
            "no class has positives and negatives in both: use a larger share",
        ),
        (["--tasks", "sex", "--leads", "13"], "leads='13': no lead is called"),
        (["--tasks", "same.csv"], "same.csv: all labels of the split train are the same"),
        (["--tasks", "folds.csv"], "folds 1, 2: at least 3 are needed"),
        (["--tasks", "sex", "sex"], "two tasks have the same name"),
        (["--tasks", "sex", "--models", "A=nowhere"], "nowhere: no such folder"),
        (["--tasks", "sex", "--models", "nowhere/x", "nowhere/x"], "nowhere/x: no such folder"),
        (["--tasks", "sex", "--models", "none/lr=1/RUN"], " none/lr=1/RUN: no such folder"),
    ],
)
def test_refusals_are_one_line(
    words: list[str], message: str, models: list[str], dataset: Dataset, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    records = list(dict.fromkeys(dataset.column("record").tolist()))
    Path("same.csv").write_text("record,ill\n" + "".join(f"{name},1\n" for name in records))
    Path("folds.csv").write_text(
        "record,ill,fold\n"
        + "".join(f"{name},{i % 2},{1 + i % 2}\n" for i, name in enumerate(records))
    )
    assert run_bench(models, dataset.root.url, "OUT", *words) == 2
    err = capsys.readouterr().err
    assert err.startswith("omnilead bench: ") and err.count("\n") == 1 and message in err
    assert not Path("OUT").exists()


def test_models_with_equal_names(models: list[str], dataset: Dataset, capsys: Any) -> None:
    assert run_bench([*models, models[2]], dataset.root.url, "OUT", "--tasks", "sex") == 2
    assert "the name 'B' is taken: write NAME=" in capsys.readouterr().err


def test_the_commands_in_the_docs_are_valid() -> None:
    page = (Path(__file__).parents[3] / "docs" / "comparing.md").read_text()
    assert bench_report.OVER in " ".join(page.split())
    commands = re.findall(r"^    omnilead bench (.*)$", page.replace("\\\n", ""), re.MULTILINE)
    assert len(commands) == 1 and parse("bench", shlex.split(commands[0])).share == [0.01, 0.1, 1.0]
    words = {
        word
        for words in re.findall(r"`(--[^`]*)`", page)
        for word in words.split()
        if word.startswith("--")
    }
    assert words <= {
        option for action in parser_of("bench")._actions for option in action.option_strings
    } | {"--plan"}
