"""Evidence for pre-training: the steps of a plan, run by one command that can be killed and goes
on, and their record.

    python -m benchmarks.evidence cpu --out DIR --jobs 2        configs/evidence/cpu.yaml; also smoke, gpu, or a file of yours
    python -m benchmarks.evidence cpu --out DIR --dry-run       every command, and how long what is left takes
    python -m benchmarks.evidence cpu --out DIR --only bench    the steps whose names begin so, and those that they need

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
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import report, tables
from benchmarks.run import environment
from omnilead.engine.common import (
    ConfigError,
    Parser,
    find_config,
    positive,
    read_yaml,
    write_whole,
)
from omnilead.engine.reproduce.jobs import duration, on_this_machine, run_jobs
from omnilead.engine.reproduce.paper import ReproductionScale, as_arguments
from omnilead.engine.reproduce.plan import DatasetInfo, Job, JobPlan
from omnilead.engine.reproduce.workdir import WorkDir, read_json, write_json

Tree = dict[str, Any]
COMMANDS = "commands.json"


@dataclass(frozen=True)
class Step(Job):
    """`flops` are the minutes that the plan expects."""

    makes: str = ""

    @property
    def result(self) -> str:
        return f"{self.name}/{self.makes}"


class StepFolder(WorkDir):
    def done(self, job: Job) -> bool:
        return (self.path / job.result).exists()


class StepPlan(JobPlan):
    @property
    def ordered(self) -> list[Job]:
        return list(self.jobs.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "python -m benchmarks.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "plan",
        metavar="PLAN",
        help="smoke, cpu, gpu, or a YAML file like those in configs/evidence",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="for archives, datasets, runs and scores",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME",
        help="steps whose names begin so, such as bench or real",
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        default=1,
        metavar="N",
        help="steps at a time, each with its share of cores (1)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print every command, and run nothing"
    )
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except (ConfigError, OSError) as error:
        print(f"benchmarks.evidence: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    folder = StepFolder(options.out.absolute())
    tree = read_yaml(find_config(options.plan, "evidence", "PLAN"))
    plan = read_plan(tree, folder.path, options.only)
    skip_absent(plan, folder)
    left = forecast(plan, folder, options.jobs)
    if options.dry_run:
        for job in plan.ordered:
            print(f"# {job.name}: {'done' if folder.done(job) else 'to do'}\n{said(job)}")
        print(f"# {left}")
        return 0
    (folder.path / "jobs").mkdir(parents=True, exist_ok=True)
    same_commands(plan, folder)
    print(left, flush=True)
    with on_this_machine(options.jobs) as executor:
        failed, interrupted = run_jobs(
            plan, folder, executor, lambda: options.jobs, lambda job: None
        )
    for name, why in failed.items():
        print(
            f"benchmarks.evidence: {name} failed: {why}; its output: {folder.path}/jobs",
            file=sys.stderr,
        )
    write_record(folder, tree, options.plan)
    return 130 if interrupted else 1 if failed else 0


def read_plan(tree: Tree, out: Path, only: str = "") -> StepPlan:
    try:
        steps = {step.name: step for step in filled(tree, out)}
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"not a plan: {type(error).__name__} {error}: see configs/evidence/cpu.yaml"
        ) from None
    chosen, todo = set[str](), [name for name in steps if name.startswith(only)]
    if not todo:
        raise ConfigError(
            f"--only {only}: no step has such a name: use "
            f"{', '.join(dict.fromkeys(s.kind for s in steps.values()))}"
        )
    while todo:
        chosen.add(name := todo.pop())
        todo += [need for need in steps[name].needs if need not in chosen]
    jobs: dict[str, Job] = {name: step for name, step in steps.items() if name in chosen}
    return StepPlan(ReproductionScale("", {}), DatasetInfo("", "", "", {}), out, jobs)


def filled(tree: Tree, out: Path) -> Iterator[Step]:
    """The plan's steps in its order, which is also that of running."""
    scale = ReproductionScale.read(tree["scale"]).settings["pretrain"] | tree.get("settings", {})
    scale_words = shlex.join(word for pair in as_arguments(scale) for word in ("--set", pair))
    words = {"out": shlex.quote(str(out)), "scale": scale_words}
    values = {
        key: value.format_map(words) if isinstance(value, str) else value
        for key, value in tree["values"].items()
    }
    names: list[str] = []
    for entry in tree["steps"]:
        each = {
            key: values[of] if isinstance(of, str) else of
            for key, of in entry.get("each", {}).items()
        }
        groups: dict[str, str] = {}
        for group, slash, name in (name.partition("/") for name in names):
            groups[group] = (
                f"{groups.get(group, '')} {name or group}={words['out']}/{group}{slash}{name}".strip()
            )
        for combination in itertools.product(*each.values()):
            known = groups | values | words | dict(zip(each, combination, strict=True))
            name, command = (
                entry["name"].format_map(known),
                shlex.split(entry["run"].format_map(known)),
            )
            needs = tuple(
                other for other in names if any(f"{out}/{other}/" in f"{word}/" for word in command)
            )
            program = command[1:] if command[0] == "python" else ["-m", "omnilead", *command[1:]]
            names.append(name)
            minutes = float(tree.get("pace", 1) * entry["minutes"])
            yield Step(
                name, tuple(program), needs, minutes, 0, makes=entry["makes"].format_map(known)
            )


def said(job: Job) -> str:
    words = job.command
    return shlex.join(
        ["omnilead", *words[2:]] if words[:2] == ("-m", "omnilead") else ["python", *words]
    )


def same_commands(plan: StepPlan, folder: WorkDir) -> None:
    """Refuses results of other commands than the plan's, and what was made from them."""
    path, other = folder.path / COMMANDS, set[str]()
    now, before = (
        {job.name: said(job).replace(str(folder.path), "DIR") for job in plan.ordered},
        read_json(path),
    )
    for job in plan.ordered:
        if before.get(job.name, now[job.name]) != now[job.name] or other & {*job.needs}:
            other.add(job.name)
    if old := [
        f"{folder.path}/{job.name}"
        for job in plan.ordered
        if job.name in other and folder.done(job)
    ]:
        raise ConfigError(
            f"made by other commands than this plan's: {', '.join(old)}: remove them, or use "
            "another --out"
        )
    write_json(path, before | now)


def forecast(plan: StepPlan, folder: WorkDir, jobs: int) -> str:
    """From the plan's minutes, and for each group from what its steps that are done have taken."""
    pace: dict[str, list[float]] = {}
    for job in plan.ordered:
        if folder.done(job) and folder.seconds(job):
            pace.setdefault(job.kind, []).append(folder.seconds(job) / (60 * job.flops))
    missing = folder.missing(plan)
    seconds = sum(60 * job.flops * fmean(pace.get(job.kind, [1])) for job in missing) / jobs
    return (
        f"{len(missing)} of {len(plan.jobs)} steps left: about {duration(seconds)}, {jobs} at a "
        "time"
    )


def skip_absent(plan: StepPlan, folder: WorkDir) -> None:
    """Leaves out the steps real-* if the folders with real ECGs are absent."""
    first = plan.jobs.get("real-data")
    paths = (
        [word for word in first.command if "/" in word] if first and not folder.done(first) else []
    )
    if absent := [
        path
        for path in paths
        if not (path.startswith(str(folder.path)) or Path(report.ROOT, path).exists())
    ]:
        print(
            f"{absent[0]}: no such folder: the steps real-* are skipped: name ECGs of yours in "
            "the plan's `real`",
            flush=True,
        )
        plan.jobs = {name: job for name, job in plan.jobs.items() if not name.startswith("real-")}


def write_record(folder: WorkDir, tree: Tree, plan: str) -> None:
    """DIR/evidence.json, .md and .png, of all scores that are there. Names the steps that are done
    but never ran here."""
    found = {
        "synthetic": read_json(folder.path / "bench/bench.json"),
        "real": read_json(folder.path / "real-scores/bench.json"),
    }
    steps = read_plan(tree, folder.path).ordered
    tuned = [
        one
        for step in steps
        if step.kind == "evaluate" and (one := read_json(folder.path / step.result))
    ]
    rows = {key: [row for one in tuned for row in one[key]] for key in ("rows", "differences")}
    notes = [*dict.fromkeys(note for one in tuned for note in one["notes"])]
    found["fine-tuned"] = {**tuned[-1], **rows, "notes": notes} if tuned else {}
    results = {name: one | {"data": Path(one["data"]).name} for name, one in found.items() if one}
    if not results:
        return print("no scores yet", flush=True)
    record = environment() | {
        "benchmark": "evidence",
        "config": {"plan": plan} | tree,
        "results": results,
    }
    del record["page_cache"]  # nothing was timed
    record["config"]["device"] = "cuda" if record["hardware"]["gpus"] else "cpu"
    outside = [
        step.name
        for step in steps
        if (folder.path / step.result).exists() and not folder.file(step, "json").exists()
    ]
    record["input"] = {"archive": f"plan {plan}", "made_outside": outside}
    write_json(folder.path / "evidence.json", record)
    (part,) = report.load(folder.path / "evidence.json")
    write_whole(
        folder.path / "evidence.md",
        "\n\n".join([tables.headline(part), *report.published(part)]) + "\n",
    )
    if {"synthetic", "real"} & results.keys():
        report.share_curves(part).savefig(folder.path / "evidence.png", dpi=150)
    print(
        f"{folder.path}: evidence.json, evidence.md, evidence.png: {', '.join(results)}", flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
