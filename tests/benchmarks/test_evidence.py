"""The protocol: plans become commands that their programs take, are run once and end in a record;
real ECGs by folds."""

import itertools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks import evidence, real, report, trials
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.synthetic import archive as synth
from omnilead.engine.common import CONFIGS, ConfigError, read_yaml
from omnilead.engine.config import check, load
from omnilead.engine.evaluation import bench
from omnilead.engine.evaluation.embedders import Vectors
from omnilead.engine.evaluation.probe import fit_scaled
from omnilead.engine.report import bench_report
from omnilead.engine.tasks.config import FinetuneConfig
from tests.conftest import save_model
from tests.parsers import parse

PLANS = sorted(path.stem for path in (CONFIGS / "evidence").glob("*.yaml"))
Row = dict[str, Any]


@pytest.mark.parametrize("name", PLANS)
def test_every_command_of_a_shipped_plan_is_one_that_its_program_takes(
    name: str, tmp_path: Path
) -> None:
    plan = evidence.read_plan(read_yaml(CONFIGS / "evidence" / f"{name}.yaml"), tmp_path)
    jobs = {job.name: job for job in plan}
    for job in jobs.values():
        program, command, *words = shlex.split(evidence.said(job))
        if program == "omnilead":
            args = parse(command, words)
            if command == "synth":
                synth.plan(args.patients, args.two_sessions, args.seed, args.layout)
            if command in ("pretrain", "finetune") and not any(
                "real-pretrain" in word for word in words
            ):
                place = [f"data.datasets=[{args.data[0]}]", f"run={args.out}"]
                own = (
                    [f"task.name={args.task}", f"start={args.start}"]
                    if command == "finetune"
                    else []
                )
                kind = {"kind": FinetuneConfig} if own else {}
                shipped = (
                    args.config
                    if command == "pretrain"
                    else CONFIGS / "finetune" / "diagnosis.yaml"
                )
                config = load(shipped, [*args.set, *place, *own], **kind)
                check(config, 1)
    order = list(jobs)
    pretrained = {name for name in order if name.startswith("pretrain/")}
    assert set(jobs["bench"].needs) == {"dataset", *pretrained}
    assert "real-data" in jobs["real-scores"].needs
    tuned = [job for job in plan if job.kind == "finetune"]
    chosen = {job.name for job in tuned if "benchmarks.trials" in job.command}
    assert len(chosen) == 6
    for job in tuned:  # its learning rate is chosen by trials
        assert chosen & {job.name, *job.needs}
        assert job.name not in chosen or any(need.startswith("trial/") for need in job.needs)
    for job in plan:
        if job.kind == "evaluate":
            assert set(job.needs) == {"dataset", *(one.name for one in tuned)}
        assert all(order.index(need) < order.index(job.name) for need in job.needs)


def run(plan: Path, out: Path, *words: str) -> int:
    return evidence.main([str(plan), "--out", str(out), *words])


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    write = (
        "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(''.join(open(f).read() for f "
        "in sys.argv[3:]) + sys.argv[2])"
    )
    steps = [
        {
            "name": "one/{x}",
            "each": {"x": "letters"},
            "run": f'python -c "{write}" {{out}}/one/{{x}}/f {{x}}',
        },
        {
            "name": "evaluate/two",
            "run": f'python -c "{write}" {{out}}/evaluate/two/f ! {{out}}/one/a/f {{out}}/one/b/f',
        },
        {"name": "three", "run": "python -c pass"},
    ]
    tree = {
        "scale": "smoke",
        "values": {"letters": ["a", "b"]},
        "steps": [{"makes": "f", "minutes": 1} | step for step in steps],
    }
    (path := tmp_path / "plan.yaml").write_text(yaml.safe_dump(tree))
    return path


def test_what_is_done_is_not_done_again(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my out"
    assert run(plan, out, "--dry-run") == 0 and not out.exists()
    assert "4 of 4 steps left: about 4 min" in (
        said := capsys.readouterr().out
    ) and said.startswith("# one/a: to do\npython -c")
    assert (
        run(plan, out, "--only", "evaluate") == 0 and (out / "evaluate/two/f").read_text() == "ab!"
    )  # with those that it needs
    (out / "one/a/f").write_text("kept")
    capsys.readouterr()
    assert run(plan, out) == 1
    said = capsys.readouterr()
    assert (
        "1 of 4 steps left" in said.out
        and "three failed: left no valid three/f" in said.err
        and "Traceback" not in said.err
    )
    plan.write_text(plan.read_text().replace("two/f !", "two/f ?"))
    refusal = "benchmarks.evidence: made by other commands than this plan's: "
    assert (
        run(plan, out) == 2
        and f"{refusal}{out}/evaluate/two: remove them" in capsys.readouterr().err
    )
    assert (out / "one/a/f").read_text() == "kept"
    plan.write_text(plan.read_text().replace("two/f ?", "two/f !").replace("/f {x}", "/f {x}{x}"))
    assert (
        run(plan, out) == 2
        and f"{refusal}{out}/one/a, {out}/one/b, {out}/evaluate/two:" in capsys.readouterr().err
    )
    (out / "one/a/f").unlink()  # and what was made from it is still refused
    (out / "one/b/f").unlink()
    assert run(plan, out) == 2 and f"{refusal}{out}/evaluate/two:" in capsys.readouterr().err


def test_without_real_ecgs_their_steps_are_skipped(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = read_yaml(plan)
    tree["steps"] = [tree["steps"][0]] + [
        {"makes": "f", "minutes": 1, "name": name} for name in ("real-data", "real-scores")
    ]
    for step, command in zip(
        tree["steps"][1:], (f"{tmp_path}/ecgs {{out}}/one", "pass"), strict=True
    ):
        step["run"] = f"python -c pass {command}"
    plan.write_text(yaml.safe_dump(tree))
    assert run(plan, tmp_path / "out", "--dry-run") == 0 and "2 of 2 steps left" in (
        said := capsys.readouterr().out
    )
    assert said.startswith(
        f"{tmp_path}/ecgs: no such folder: the steps real-* are skipped: name ECGs of yours in "
        "the plan's `real`"
    )
    (tmp_path / "ecgs").mkdir()
    assert (
        run(plan, tmp_path / "out", "--dry-run") == 0
        and "4 of 4 steps left" in capsys.readouterr().out
    )


def test_what_is_no_plan_is_one_line(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(plan, tmp_path, "--only", "four") == 2
    assert (
        "--only four: no step has such a name: use one, evaluate, three" in capsys.readouterr().err
    )
    plan.write_text(plan.read_text().replace("letters:", "others:"))
    assert run(plan, tmp_path) == 2 and "not a plan: KeyError 'letters'" in capsys.readouterr().err
    assert (
        run(tmp_path / "none.yaml", tmp_path) == 2
        and "no such file or shipped config" in capsys.readouterr().err
    )


def document(models: Sequence[str], values: Sequence[float]) -> Row:
    rows, differences = [], []
    for task, metric, share in (
        ("diagnosis", "auroc", 0.01),
        ("diagnosis", "auroc", 1.0),
        ("identification", "accuracy_whitened", None),
    ):
        for leads in ("12", "1"):
            about = {"task": task, "leads": leads, "share": share, "noise": 0.0}
            for model, value in zip(models, values, strict=True):
                ends = [value - 0.01, value + 0.01]
                rows.append(
                    about
                    | {
                        "model": model,
                        "n": 50,
                        "patients": 40,
                        "metrics": {metric: value},
                        "intervals": {metric: ends},
                    }
                )
            one = {
                "model": models[0],
                "against": "random weights",
                "metric": metric,
                "difference": 0.125,
                "interval": [0.1, 0.15],
            }
            differences.append(about | one)
    random = {name: "" if name == "mean beat" else "random weights" for name in models}
    return {"data": "D", "models": random, "rows": rows, "differences": differences, "notes": []}


def test_the_record_of_all_scores(plan: Path, tmp_path: Path) -> None:
    """Those of fine-tuned models are put together, with what did not converge. What was made by
    hand is named."""
    names = ("A-1", "random weights", "mean beat")
    for folder in ("one/a", "one/b", "jobs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "f").touch()
    for name in ("one_b", "evaluate_diagnosis-12"):
        (tmp_path / f"jobs/{name}.json").write_text('{"seconds": 1}')
    for place, models in (("bench", ("A-1", "A-2", *names[1:])), ("real-scores", names)):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "bench.json").write_text(
            json.dumps(document(models, (0.9, 0.8, 0.7, 0.6)[: len(models)]))
        )
    tree = read_yaml(plan)
    tree["values"]["leads"] = ["1", "12"]
    tree["steps"][1] |= {
        "name": "evaluate/diagnosis-{n}",
        "each": {"n": "leads"},
        "makes": "bench.json",
    }
    for n in ("1", "12", "of an older plan"):
        (tmp_path / f"evaluate/diagnosis-{n}").mkdir(parents=True)
        tuned = document(("A", "random weights"), (0.5, 0.25)) | {
            "notes": [f"{n} leads: 1 of 2 not converged."]
        }
        each = {"each": {"auroc": [0.125, 0.875], "accuracy_whitened": [0.5, 0.5]}}
        tuned["rows"] = [row | each | {"share": None} for row in tuned["rows"] if row["leads"] == n]
        (tmp_path / f"evaluate/diagnosis-{n}/bench.json").write_text(
            json.dumps(tuned | {"differences": []})
        )
    evidence.write_record(evidence.WorkDir(tmp_path), tree, "mine")
    (part,) = report.load(tmp_path / "evidence.json")
    assert (
        list(part["results"]) == ["synthetic", "real", "fine-tuned"]
        and "A-2" in part["results"]["synthetic"]["models"]
    )
    assert (
        part["input"]["made_outside"] == ["one/a", "evaluate/diagnosis-1"]
        and "page_cache" not in part
    )
    text = (tmp_path / "evidence.md").read_text()
    assert (
        "| synthetic: diagnosis, lead I, 1 % of labels, AUROC (n = 50) | 0.900 (0.890 to 0.910), "
        "seeds 0.800 to 0.900 |" in text
    )
    assert (
        "12 leads, 100 % of labels, AUROC (n = 50) | 0.900 (0.890 to 0.910) | 0.800 (" in text
    )  # real: one seed
    assert "; made outside the plan: one/a, evaluate/diagnosis-1; [evidence.json]" in text
    assert "identification; fine-tuned models\n" in text
    assert "older plan" not in text and "| of each seed |" in text and "| 0.125, 0.875 |" in text
    assert text.count(bench_report.OF_TUNED) == 1 and text.count(bench_report.INTERVALS) == 3
    assert text.count("+0.125 (+0.100 to +0.150) |") >= 4
    assert text.count("0.500 (0.490 to 0.510)") >= 2 and all(
        f"{n} leads: 1 of 2 not converged." in text for n in (1, 12)
    )
    assert (tmp_path / "evidence.png").stat().st_size > 10_000


@pytest.fixture(scope="module")
def folds(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("real") / "data"
    assert real.main(["dataset", str(archive), "--folds", "3", "--out", str(out)]) == 0
    return out


def test_a_folds_patients_are_in_no_other_part_of_it(folds: Path) -> None:
    whole = Dataset.open(str(folds / "all"))
    its = real.folds_of(whole, 3)
    table = whole.table(["record", "patient"]).to_pydict()
    for fold in range(3):
        names = {name for name, one in zip(table["record"], its, strict=True) if one == fold}
        assert names.isdisjoint(
            rest := set(
                Dataset.open(str(folds / f"fold-{fold}")).table(["record"])["record"].to_pylist()
            )
        )
        assert names | rest == set(table["record"])
        patients = [
            {p for p, one in zip(table["patient"], its, strict=True) if p and (one == fold) == own}
            for own in (True, False)
        ]
        assert patients[0] and patients[0].isdisjoint(patients[1])


def test_held_out_records_are_scored_by_their_own_fold(
    folds: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scores of a fold are those of its own model; identification by embeddings of patients
    finds them."""
    dataset = Dataset.open(str(folds / "all"))
    crops = real.RealCrops(dataset, 3, 12)
    halves = dataset.column("halves")
    there = (np.arange(2) < halves[:, None])[..., None]
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(len(dataset), 2, 32))

    def vectors(says: np.ndarray) -> Vectors:
        c_BSD = np.repeat(says[:, None], 2, 1) + 0.01 * noise[..., : says.shape[1]]
        return Vectors(crops.all, halves, (c_BSD * there).astype(np.float32))

    labels, person = (
        vectors(says)
        for says in (
            dataset.labels.astype(float),
            rng.normal(size=(2000, 32))[crops.people_B % 2000],
        )
    )
    bad = Vectors(crops.all, halves, (noise * there).astype(np.float32))
    facts, found = crops.diagnosis([labels] * 3, 1.0)
    assert found["auroc"][0] > 0.8 and found["auroc"].shape == (1001,)
    left_out = facts["left_out"]
    assert facts["classes"] == len(crops.classes) - len(left_out)
    assert 0.3 < crops.diagnosis([bad] * 3, 1.0)[1]["auroc"][0] < 0.7
    assert crops.diagnosis([labels] * 3, 0.25)[0]["draws"] == 2
    with pytest.raises(ConfigError, match=r"--share 0\.0001: no class has positives"):
        crops.diagnosis([labels] * 3, 0.0001)
    call = itertools.count()
    monkeypatch.setattr(
        real,
        "fit_scaled",
        lambda *of: (one := fit_scaled(*of))._replace(scores_NK=one.scores_NK * 2.0 ** next(call)),
    )
    for name, value_B in crops.diagnosis([labels] * 3, 1.0)[1].items():
        np.testing.assert_allclose(
            value_B, found[name], atol=1e-6
        )  # each fold's scores have a scale of their own
    two_bad = crops.diagnosis([labels, bad, bad], 1.0)[1]["auroc"][0]
    assert two_bad < found["auroc"][0] - 0.05  # their records are guessed
    y_NK = crops.records.y_NK.copy()
    y_NK[crops.fold_B[crops.records.rows[crops.records.begins]] == 2, 0] = (
        0  # the training records of fold 0
    )
    crops.records = crops.records._replace(y_NK=y_NK)
    facts = crops.diagnosis([labels] * 3, 1.0)[0]
    assert facts["left_out"] == [crops.classes[0], *left_out] and crops.classes[0] not in left_out
    assert len(crops.second) > 50 and set(crops.people_B[crops.second]) <= set(
        crops.people_B[crops.first]
    )
    for task, count in (("other half", len(crops.whole)), ("second session", len(crops.second))):
        (facts, found), hits = crops.identification([person] * 3, task, None)
        assert (
            facts["n"] == len(hits) == count
            and found["accuracy"][0] > 0.95
            and found["accuracy_whitened"][0] > 0.9
        )
        assert crops.identification([bad] * 3, task, None)[0][1]["accuracy"][0] < 0.2
    said = real.exact(
        "other half", "12", {"A": np.array([1, 1, 1, 0.0]), "B": np.array([0, 0, 1, 1.0])}
    )
    assert said == "other half, leads 12, found whitened: 2 only by A, 1 only by B, p 1."
    assert (
        real.main(
            [
                "score",
                str(folds),
                "--models",
                "x=none",
                "--positives",
                "999",
                "--out",
                str(folds / "o"),
            ]
        )
        == 2
    )
    assert "--positives 999: no class has as many: name a smaller number" in capsys.readouterr().err


def test_scores_of_a_model_under_two_names(
    folds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of the folds count as one; if all are the same, it is equal to that one, in every
    resample."""
    monkeypatch.setattr(bench, "RESAMPLES", 20)
    model = save_model(tmp_path / "model", layers=1)
    models = [f"{name}={model}" for name in ("fold-0", "fold-1", "fold-2", "same")]
    words = ["score", str(folds), "--positives", "12", "--out", str(tmp_path / "out"), "--models"]
    assert real.main([*words, *models]) == 0
    found = json.loads((tmp_path / "out/bench.json").read_text())
    assert (
        list(found["models"]) == [real.BOTH, "random weights", "same", "mean beat"]
        and len(found["rows"]) == 4 * 3
    )
    gaps = [
        gap for gap in found["differences"] if (gap["model"], gap["against"]) == ("same", real.BOTH)
    ]
    assert {gap["task"] for gap in gaps} == {"diagnosis", "other half", "second session"} and len(
        gaps
    ) == 6
    assert all(gap["difference"] == 0 and gap["interval"] == [0, 0] for gap in gaps)
    assert "records without a SNOMED code are left out" in found["notes"][0]
    assert f"0 only by {real.BOTH}, 0 only by same, p 1" in found["notes"][1]


def test_the_best_learning_rate_by_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among the runs of the name; their checkpoints are not copied."""
    found = {"few-x-3e-4": 0.6, "few-x-1e-3": 0.7, "few-y-1e-3": 0.9}
    for name, best in found.items():
        for folder in ("model", "checkpoints"):
            (tmp_path / name / folder).mkdir(parents=True)
        (tmp_path / name / "model/config.json").write_text(name)
        (tmp_path / name / "run.json").write_text('{"config": {}}')
        result = {"best": best, "step": 5, "higher_is_better": True, "converged": True}
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    runs = [f"{name}={tmp_path / name}" for name in found]
    out = tmp_path / "out"
    assert trials.main([*runs, "--of", "few-x", "--out", str(out)]) == 0
    assert (out / "model/config.json").read_text() == "few-x-1e-3"
    assert not (out / "checkpoints").exists()
    tried = json.loads((out / "run.json").read_text())["rates"]
    assert tried == [["0.0003", 5, "0.6000", "yes"], ["0.001", 5, "0.7000", "yes"]]
    assert trials.main([*runs, "--of", "z", "--out", str(out)]) == 2
    assert "no run has such a name" in capsys.readouterr().err
