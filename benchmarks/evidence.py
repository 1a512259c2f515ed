"""Run the steps of a plan that produces evidence for pre-training, and write a record of their scores. If
this program was killed, start it again: it then runs the steps that are not done, and a training resumes
from its last checkpoint.

    python -m benchmarks.evidence cpu --out DIR --jobs 2        configs/evidence/cpu.yaml; also smoke, gpu, or a file of yours
    python -m benchmarks.evidence cpu --out DIR --dry-run       every command, and how long what is left takes
    python -m benchmarks.evidence cpu --out DIR --only bench    the steps whose names begin with bench, and those that they need

A step of a plan is a command. NAME is its folder below DIR, and MAKES the file or folder in it that
exists once it is done. `each` repeats it for all combinations of values. In a command {out} is DIR,
{GROUP} stands for NAME=FOLDER of each earlier step GROUP/NAME, other names in braces are the plan's
`values`. A step runs after those whose folders its command names. The steps real-* are skipped if
the folders with real ECGs that real-data names are absent. DIR/evidence.json, .md and .png are
written from all scores that are there; the record is published by copying it:

    cp DIR/evidence.json benchmarks/results/evidence_MACHINE_DATE.json && python -m
    benchmarks.report
"""

import argparse
import itertools
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import ROOT, program_parser, report, tables
from benchmarks.run import machine_facts
from omnilead.data_tools.io.storage import write_whole
from omnilead.data_tools.io.terminal import say
from omnilead.downstream.reproduce.jobs import (
    Job,
    WorkDir,
    job_of_step,
    open_executor_and_slots,
    read_json,
    run_jobs,
    show_plan,
    write_json,
)
from omnilead.downstream.reproduce.paper import ReproductionScale, set_options_text
from omnilead.engine.settings.commandline import positive_integer, read_yaml, run_on_ranks
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.files import find_config

Tree = dict[str, Any]
STEP_KIND_OF_RESULT = {  # name of a result in the record -> the kind of the steps whose scores it joins
    "synthetic": "bench",
    "real": "real-scores",
    tables.BY_CROPS_RESULT: "real-crops",
    "real, fine-tuned": "real-tuned",
    "fine-tuned": "evaluate",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = program_parser("evidence", __doc__)
    add = parser.add_argument
    add("plan", metavar="PLAN", help="smoke, cpu, gpu, or a file like those in configs/evidence")
    add("--out", type=Path, required=True, metavar="DIR", help="for datasets, runs and scores")
    add("--only", default="", metavar="NAME", help="steps whose names begin so: bench, real, ...")
    add("--jobs", type=positive_integer, default=1, metavar="N", help="steps at a time (1)")
    add("--dry-run", action="store_true", help="print every command, and run nothing")
    options = parser.parse_args(arguments)
    return run_on_ranks("benchmarks.evidence", lambda: run_plan(options))


def run_plan(options: argparse.Namespace) -> int:
    """Run the steps of the plan that are not done yet, write the record and return an exit status."""
    folder = WorkDir(options.out.absolute())
    tree = read_yaml(find_config(options.plan, "evidence", "PLAN"))
    jobs = drop_real_steps_without_ecgs(read_plan(tree, folder.path, options.only), folder)
    if options.dry_run:
        return show_plan(folder, jobs, options.jobs)
    folder.note_commands(jobs)
    with open_executor_and_slots(options.jobs) as (executor, slots):
        code = run_jobs(folder, jobs, executor, slots)
    write_record(folder, tree, options.plan)
    return code


def read_plan(tree: Tree, out: Path, only: str = "") -> list[Job]:
    """Return the steps of the plan, in the order of the plan. With `only`, return only those whose names begin
    with it, and the steps that they need."""
    try:
        steps = list(jobs_of_plan(tree, out))
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the plan has the wrong form ({type(error).__name__} {error}): compare it with "
            "configs/evidence/cpu.yaml"
        ) from None
    chosen: set[str] = set()
    # backwards, because a plan has each step after the steps that it needs
    for step in reversed(steps):
        if step.name.startswith(only) or step.name in chosen:
            chosen |= {step.name, *step.needs}
    if not chosen:
        kinds = ", ".join(dict.fromkeys(step.kind for step in steps))
        raise ConfigError(f"--only {only}: no step's name begins with this: use {kinds}")
    return [step for step in steps if step.name in chosen]


def jobs_of_plan(tree: Tree, out: Path) -> Iterator[Job]:
    """Yield a job for each step of a plan and each combination of its `each` values."""
    settings = ReproductionScale.read(tree["scale"]).settings["pretrain"]
    scale = set_options_text(settings | tree.get("settings", {}))
    words = {"out": shlex.quote(str(out)), "scale": scale}
    values = {}
    for key, value in tree["values"].items():
        values[key] = value.format_map(words) if isinstance(value, str) else value
    names: list[str] = []
    for step in tree["steps"]:
        value_names = step.get("each", {})
        lists = [values[name] for name in value_names.values()]
        substitutions = named_folders_by_group(names, words["out"]) | values | words
        for combination in itertools.product(*lists):
            job = job_of_step(
                step, substitutions | dict(zip(value_names, combination, strict=True)), names, out
            )
            names.append(job.name)
            yield replace(job, minutes=float(tree.get("pace", 1) * step["minutes"]))


def named_folders_by_group(names: Sequence[str], out: str) -> dict[str, str]:
    """Return {group: text}. A step is named GROUP/NAME; the text has NAME=FOLDER for each step of the group,
    separated by spaces."""
    groups: dict[str, list[str]] = {}
    for name in names:
        group, _, member = name.partition("/")
        groups.setdefault(group, []).append(f"{member or group}={out}/{name}")
    return {group: " ".join(members) for group, members in groups.items()}


def drop_real_steps_without_ecgs(jobs: list[Job], folder: WorkDir) -> list[Job]:
    """Return the jobs. If the step real-data is not done, and a folder of real ECGs that it reads does not
    exist, leave out the steps real-* and say so."""
    for job in jobs:
        if job.name == "real-data" and not folder.is_done(job):
            for word in job.command:
                is_made = "/" not in word or word.startswith(str(folder.path))
                if not is_made and not Path(ROOT, word).exists():
                    say(
                        f"{word}: no such folder: the steps real-* are skipped: name ECGs of "
                        "yours in the plan's `real`"
                    )
                    return [job for job in jobs if not job.name.startswith("real-")]
    return jobs


def write_record(folder: WorkDir, tree: Tree, plan: str) -> None:
    """Write DIR/evidence.json, .md and .png from the scores of all finished steps. The record lists, as
    `made_outside`, the finished steps that did not run in DIR."""
    steps, place = read_plan(tree, folder.path), folder.path
    results = {}
    for name, kind in STEP_KIND_OF_RESULT.items():
        document = join_scores(steps, folder, kind)
        if document["rows"]:
            notes = dict.fromkeys(note.replace(f"{place}/", "") for note in document["notes"])
            results[name] = document | {"data": Path(document["data"]).name, "notes": list(notes)}
    if not results:
        return say("no scores yet")
    record = machine_facts() | {"benchmark": "evidence", "results": results}
    del record["page_cache"]  # matters only for timings, which this record does not have
    device = "cuda" if record["hardware"]["gpus"] else "cpu"
    record["config"] = {"plan": plan, **tree, "device": device}
    done = [step for step in steps if (place / step.makes).exists()]
    outside = [step.name for step in done if not folder.job_file(step, "json").exists()]
    record["input"] = {"archive": f"plan {plan}", "made_outside": outside}
    write_json(place / "evidence.json", record)
    (part,) = report.load_parts(place / "evidence.json")
    blocks = [tables.headline_table(part), *report.part_blocks(part)]
    write_whole(place / "evidence.md", "\n\n".join(blocks) + "\n")
    if {"synthetic", "real"} & results.keys():
        report.label_share_chart(part).savefig(place / "evidence.png", dpi=150)
    say(f"{place}: evidence.json, evidence.md, evidence.png: {', '.join(results)}")


def join_scores(steps: Sequence[Job], folder: WorkDir, kind: str) -> Tree:
    """Return the joined scores of all steps of a kind. If the plan has no such step, return the scores
    in DIR/KIND/bench.json, a file that the user may have put there."""
    scores_of_kind: Tree = {"rows": [], "differences": [], "notes": []}
    paths = [folder.path / step.makes for step in steps if step.kind == kind]
    for path in paths or [folder.path / kind / "bench.json"]:
        scores = read_json(path)
        for key in scores.keys() & {"rows", "differences", "notes"}:
            scores[key] = scores_of_kind[key] + scores[key]
        scores_of_kind |= scores
    return scores_of_kind


if __name__ == "__main__":
    sys.exit(main())
