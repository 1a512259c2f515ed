"""The protocol: plans become commands that their programs take, are run once and end in a record;
real ECGs by folds."""

import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import yaml

from benchmarks import evidence, report
from omnilead.data_tools.synthetic import archive as synth
from omnilead.downstream.reproduce.jobs import write_json
from omnilead.downstream.tasks.config import FinetuneConfig
from omnilead.engine.settings.commandline import read_yaml
from omnilead.engine.settings.files import CONFIGS
from omnilead.engine.training.config import check_config, load_config
from tests.parsers import parse

GOLDEN = Path(__file__).with_name("golden")


@pytest.mark.parametrize(
    "path", sorted((CONFIGS / "evidence").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_command_of_a_shipped_plan_is_one_that_its_program_takes(path, golden):
    """And what each kind of step needs: a learning rate is chosen by trials, for example."""
    kinds = Counter()
    for job in evidence.read_plan(read_yaml(path), Path("/DIR")):
        needs = Counter(need.partition("/")[0] for need in job.needs)
        words = shlex.join(job.command[:3]).partition("\n")[0]
        kinds[f"{job.kind}: {words}, needs {dict(needs)}"] += 1
        program, command, *words = job.command
        args = parse(command, words) if program == "omnilead" else None
        if command == "synth":
            synth.plan_blocks(args.patients, args.two_sessions, args.seed, args.layout)
        if command in ("pretrain", "finetune") and not job.name.startswith("real-"):
            settings = [*args.set, f"data.datasets=[{args.data[0]}]", f"run={args.out}"]
            if command == "pretrain":
                check_config(load_config(args.config, settings), 1)
            else:
                settings += [f"task.name={args.task}", f"start={args.start}"]
                shipped = CONFIGS / "finetune" / "diagnosis.yaml"
                check_config(load_config(shipped, settings, FinetuneConfig), 1)
    golden(f"plan_{path.stem}.txt", "".join(f"{n} {kind}\n" for kind, n in kinds.items()))


PLAN = """
scale: smoke
pace: 2
values:
  letters: [a, b]
  write: python -c "import pathlib, sys; f, *words = sys.argv[1:]; pathlib.Path(f).write_text(' '.join(words))"
steps:
- {name: "one/{x}", each: {x: letters}, makes: f, minutes: 1, run: "{write} {out}/one/{x}/f {x}"}
- {name: evaluate/two, makes: f, minutes: 1, run: "{write} {out}/evaluate/two/f ! {one}"}
- {name: three, makes: f, minutes: 1, run: python -c pass}
- {name: real-data, makes: f, minutes: 1, run: python -c pass DIR/ecgs}
- {name: real-scores, makes: f, minutes: 1, run: "python -c pass {out}/real-data {out}/one"}
"""


def test_what_is_done_is_not_done_again(tmp_path, capsys, golden):
    """What other commands made is refused. Steps without their ECGs are skipped. What is no plan is
    one line."""
    out, printed = tmp_path / "my out", []

    def run(words, old="", new=""):
        text = PLAN.replace(old, new).replace("DIR", str(tmp_path))
        (tmp_path / "plan.yaml").write_text(text)
        code = evidence.main([*f"{tmp_path}/{words} --out".split(), str(out)])
        made = [f"{path.parent}: {path.read_text()}\n" for path in sorted(out.rglob("f"))]
        printed.extend([f"$ {words} {old} {new}\n", *capsys.readouterr(), f"{code}\n", *made, "\n"])

    run("plan.yaml --dry-run")
    run("plan.yaml --only evaluate")  # with those that it needs
    (out / "one/a/f").write_text("kept")
    run("plan.yaml")
    run("plan.yaml", "two/f !", "two/f ?")
    run("plan.yaml", "/f {x}", "/f {x}{x}")
    for letter in "ab":
        (out / f"one/{letter}/f").unlink()
    run("plan.yaml", "/f {x}", "/f {x}{x}")  # what was made from them is still refused
    (tmp_path / "ecgs").mkdir()
    run("plan.yaml --dry-run")
    run("plan.yaml --only four")
    run("plan.yaml", "letters:", "others:")
    run("none")
    text = re.sub(r"done in \d+ s", "done", "".join(printed))
    golden("plan.txt", text.replace(str(tmp_path), "DIR"))


SCORED = """
scale: smoke
values: {letters: [a, b], leads: [1, 12]}
steps:
- {name: "one/{x}", each: {x: letters}, makes: f, minutes: 1, run: python}
- {name: "evaluate/diagnosis-{n}", each: {n: leads}, makes: bench.json, minutes: 1, run: python}
- {name: real-tuned/few, makes: bench.json, minutes: 1, run: python}
"""


def test_the_record_of_all_scores(tmp_path, monkeypatch, golden):
    """Those of fine-tuned models are put together, with what did not converge. What was made by
    hand is named."""
    suite = json.loads((GOLDEN / "suite.json").read_text())
    facts = {name: suite[name] for name in report.RECORD_FACTS} | {"page_cache": "warm"}
    monkeypatch.setattr(evidence, "machine_facts", lambda: facts)
    made = json.loads((GOLDEN / "scores.json").read_text().replace("DIR", str(tmp_path)))
    made = {f"{place}/bench.json": scores for place, scores in made.items()}
    jobs = ("one_b", "evaluate_diagnosis-12")
    made |= dict.fromkeys(["one/a/f", "one/b/f", *(f"jobs/{name}.json" for name in jobs)])
    for place, content in made.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        write_json(tmp_path / place, content)
    evidence.write_record(evidence.WorkDir(tmp_path), yaml.safe_load(SCORED), "mine")
    record = json.loads((tmp_path / "evidence.json").read_text())
    record["results"] = list(record["results"])
    text = (tmp_path / "evidence.md").read_text()
    golden("evidence.md", f"{text}\n{json.dumps(record, indent=1)}\n")
    assert (tmp_path / "evidence.png").stat().st_size > 10_000
