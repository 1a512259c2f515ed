"""The protocol: plans become commands that their programs take, are run once and end in a record;
real ECGs by folds."""

import itertools
import json

import pytest
import yaml

from benchmarks import evidence, report
from omnilead.data_tools.synthetic import archive as synth
from omnilead.engine.commandline import load, read_yaml
from omnilead.engine.common import CONFIGS
from omnilead.engine.config import check
from omnilead.engine.tasks.config import FinetuneConfig
from tests.parsers import parse

PLANS = sorted(path.stem for path in (CONFIGS / "evidence").glob("*.yaml"))


@pytest.mark.parametrize("name", PLANS)
def test_every_command_of_a_shipped_plan_is_one_that_its_program_takes(name, tmp_path):
    plan = evidence.read_plan(read_yaml(CONFIGS / "evidence" / f"{name}.yaml"), tmp_path)
    jobs = {job.name: job for job in plan}
    for job in plan:
        program, command, *words = job.command
        args = parse(command, words) if program == "omnilead" else None
        if command == "synth":
            synth.plan(args.patients, args.two_sessions, args.seed, args.layout)
        if command in ("pretrain", "finetune") and not job.name.startswith("real-"):
            settings = [*args.set, f"data.datasets=[{args.data[0]}]", f"run={args.out}"]
            if command == "pretrain":
                check(load(args.config, settings), 1)
            else:
                settings += [f"task.name={args.task}", f"start={args.start}"]
                shipped = CONFIGS / "finetune" / "diagnosis.yaml"
                check(load(shipped, settings, FinetuneConfig), 1)
    order = list(jobs)
    assert all(order.index(need) < order.index(job.name) for job in plan for need in job.needs)
    pretrained = {name for name in order if name.startswith("pretrain/")}
    assert set(jobs["bench"].needs) == {"dataset", *pretrained}
    assert "real-data" in jobs["real-scores"].needs
    tuned = {job.name: job for job in plan if job.kind == "finetune"}
    chosen = {name for name, job in tuned.items() if "benchmarks.trials" in job.command}
    for name, job in tuned.items():  # its learning rate is chosen by trials
        assert chosen & {name, *job.needs}
        assert name not in chosen or any(need.startswith("trial/") for need in job.needs)


WRITE = "import pathlib, sys; f, *words = sys.argv[1:]; pathlib.Path(f).write_text(''.join(words))"
STEPS = (
    {
        "name": "one/{x}",
        "each": {"x": "letters"},
        "run": f'python -c "{WRITE}" {{out}}/one/{{x}}/f {{x}}',
    },
    {"name": "evaluate/two", "run": f'python -c "{WRITE}" {{out}}/evaluate/two/f ! {{one}}'},
    {"name": "three", "run": "python -c pass"},
)


class Planned:
    """A plan in a file, and the command that runs it."""

    def __init__(self, folder, capsys):
        self.path, self.out, self.capsys = folder / "plan.yaml", folder / "my out", capsys
        steps = [{"makes": "f", "minutes": 1} | step for step in STEPS]
        self.tree = {"scale": "smoke", "values": {"letters": ["a", "b"]}, "steps": steps}
        self.write()

    def write(self):
        self.path.write_text(yaml.safe_dump(self.tree))

    def change(self, old, new):
        self.path.write_text(self.path.read_text().replace(old, new))

    def run(self, *words):
        """The exit code, and what is said."""
        code = evidence.main([str(self.path), "--out", str(self.out), *words])
        said = self.capsys.readouterr()
        return code, said.out + said.err


@pytest.fixture
def plan(tmp_path, capsys):
    return Planned(tmp_path, capsys)


def test_what_is_done_is_not_done_again(plan):
    out = plan.out
    code, said = plan.run("--dry-run")
    assert code == 0 and not out.exists() and said.startswith("# one/a: about 1 min\npython -c")
    assert "4 of 4 jobs left (2 one, 1 evaluate, 1 three): about 4 min, 1 at a time" in said
    assert plan.run("--only", "evaluate")[0] == 0  # with those that it needs
    assert (out / "evaluate/two/f").read_text() == f"!a={out}/one/ab={out}/one/b"
    (out / "one/a/f").write_text("kept")
    code, said = plan.run()
    assert code == 1 and "Traceback" not in said
    assert "1 of 4 jobs left" in said and "three failed: left no valid three/f" in said
    refusal = "benchmarks.evidence: made by other commands or settings than this plan's: "
    plan.change("two/f !", "two/f ?")
    code, said = plan.run()
    assert code == 2 and f"{refusal}{out}/evaluate/two: remove them" in said
    assert (out / "one/a/f").read_text() == "kept"
    plan.change("two/f ?", "two/f !")
    plan.change("/f {x}", "/f {x}{x}")
    code, said = plan.run()
    assert code == 2 and f"{refusal}{out}/one/a, {out}/one/b, {out}/evaluate/two:" in said
    for letter in "ab":
        (out / f"one/{letter}/f").unlink()
    code, said = plan.run()  # what was made from them is still refused
    assert code == 2 and f"{refusal}{out}/evaluate/two:" in said


def test_without_real_ecgs_their_steps_are_skipped(plan, tmp_path):
    for step, name in zip(plan.tree["steps"][1:], ("real-data", "real-scores"), strict=True):
        step["name"] = name
    plan.tree["steps"][1]["run"] = f"python -c pass {tmp_path}/ecgs {{out}}/one"
    plan.write()
    code, said = plan.run("--dry-run")
    assert code == 0 and "2 of 2 jobs left" in said
    assert said.startswith(f"{tmp_path}/ecgs: no such folder: the steps real-* are skipped: name")
    (tmp_path / "ecgs").mkdir()
    assert "4 of 4 jobs left" in plan.run("--dry-run")[1]


def test_what_is_no_plan_is_one_line(plan):
    code, said = plan.run("--only", "four")
    assert code == 2 and "four: no step has such a name: use one, evaluate, three" in said
    plan.change("letters:", "others:")
    code, said = plan.run()
    assert code == 2 and "not a plan: KeyError 'letters'" in said
    plan.path = plan.path / "none"
    code, said = plan.run()
    assert code == 2 and "no such file or shipped config" in said


SCORES = (("diagnosis", "auroc", 0.01), ("ptbxl-superdiagnostic", "auroc", 1.0))
SCORES += (("identification", "accuracy_whitened", None),)


def document(models, values):
    rows, differences = [], []
    for (task, metric, share), leads in itertools.product(SCORES, ("12", "1")):
        about = {"task": task, "leads": leads, "share": share, "noise": 0.0}
        for model, value in zip(models, values, strict=False):
            intervals = {metric: [value - 0.01, value + 0.01]}
            scores = {"metrics": {metric: value}, "intervals": intervals}
            rows.append(about | scores | {"model": model, "n": 50, "patients": 40})
        gap = {"metric": metric, "difference": 0.125, "interval": [0.1, 0.15]}
        differences.append(about | gap | {"model": models[0], "against": "random weights"})
    random = {name: "" if name == "mean beat" else "random weights" for name in models}
    return {"data": "D", "models": random, "rows": rows, "differences": differences, "notes": []}


def test_the_record_of_all_scores(plan, tmp_path):
    """Those of fine-tuned models are put together, with what did not converge. What was made by
    hand is named."""
    names = ("A-1", "random weights", "mean beat")
    found = {
        "bench": document((names[0], "A-2", *names[1:]), (0.9, 0.8, 0.7, 0.6)),
        "real-scores": document(names, (0.9, 0.8, 0.7)),
    }
    for n in ("1", "12", "of an older plan"):
        tuned = document(("A", "random weights"), (0.5, 0.25))
        each = {"each": {"auroc": [0.125, 0.875], "accuracy_whitened": [0.5, 0.5]}, "share": None}
        tuned["rows"] = [row | each for row in tuned["rows"] if row["leads"] == n]
        tuned |= {"differences": [], "notes": [f"{n} leads: 1 of 2 not converged."]}
        found[f"evaluate/diagnosis-{n}"] = tuned
    found["real-tuned/few"] = found["evaluate/diagnosis-1"]
    for place, scores in found.items():
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "bench.json").write_text(json.dumps(scores))
    for folder in ("one/a", "one/b", "jobs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "f").touch()
    for name in ("one_b", "evaluate_diagnosis-12"):
        (tmp_path / f"jobs/{name}.json").write_text('{"seconds": 1}')
    plan.tree["values"]["leads"] = ["1", "12"]
    step = {"name": "evaluate/diagnosis-{n}", "each": {"n": "leads"}, "makes": "bench.json"}
    plan.tree["steps"][1] |= step
    plan.tree["steps"][2] |= {"name": "real-tuned/few", "makes": "bench.json"}
    evidence.write_record(evidence.WorkDir(tmp_path), plan.tree, "mine")
    (part,) = report.load(tmp_path / "evidence.json")
    assert list(part["results"]) == [
        "synthetic",
        "real",
        "real, fine-tuned",
        "fine-tuned",
    ]
    assert "A-2" in part["results"]["synthetic"]["models"] and "page_cache" not in part
    assert part["input"]["made_outside"] == ["one/a", "evaluate/diagnosis-1", "real-tuned/few"]
    text = (tmp_path / "evidence.md").read_text()
    for words in (
        "0.900 (0.890 to 0.910), seeds 0.800 to 0.900 |",
        "made outside the plan: one/a, evaluate/diagnosis-1, real-tuned/few;",
        "| 0.125, 0.875 ",
        "1 leads: 1 of 2 not converged.",
        "12 leads: 1 of 2 not converged.",
    ):
        assert words in text
    assert "older plan" not in text and text.count("+0.125 (+0.100 to +0.150) |") >= 4
    assert (tmp_path / "evidence.png").stat().st_size > 10_000
