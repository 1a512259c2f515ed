"""Measure this machine and write one record to benchmarks/results/, or --out.

python -m benchmarks.run ingest                  archive to dataset, against other programs
python -m benchmarks.run loader                  dataset to batches, against other loaders; to a GPU only omnilead
python -m benchmarks.run step                    one training step, against a re-creation of the authors'
python -m benchmarks.run e2e                     the training loop on each data source, against the bare step
python -m benchmarks.run embed                   ECGs to embeddings, against the encoder alone
python -m benchmarks.run start                   from the command to the first step
python -m benchmarks.run scaling                 ten million crops; two ranks
python -m benchmarks.run suite [--device cuda]   all of them in one record: make bench, make bench-gpu
"""

import argparse
import contextlib
import datetime
import importlib
import json
import multiprocessing
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import measure
from benchmarks.measure import (
    BUG,
    OUT_OF_TIME,
    OVER_TIME,
    CaseError,
    Outcome,
    Samples,
    run_cases,
    say,
)
from omnilead.engine.common import ConfigError, Parser, writable, write_whole

RESULTS = Path(__file__).parent / "results"
PACKAGES = [
    "numpy",
    "scipy",
    "pyarrow",
    "zarr",
    "wfdb",
    "google-crc32c",
    "torch",
    "deepspeed",
    "webdataset",
    "s3fs",
    "moto",
    "nvidia-dali-cuda130",
    "nvidia-dali-cuda120",
]
GPU_FACTS = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")
Part = dict[str, Any]
NAMES = ("ingest", "loader", "step", "e2e", "embed", "start", "scaling", "suite")
CPU_ONLY = ("ingest", "scaling")
REPEATS = {"ingest": 5, "loader": 5, "scaling": 5, "e2e": 60}  # on a CPU; others have 3
LIMIT_S = {"cpu": 600.0, "cuda": 200.0}  # time limit of one process in a suite
LEAST_S = 15  # a suite starts nothing with less time left
INGEST = r"^read|^ingest: omnilead, tar$|^ingest: re-creation|^verify$"
LOADER = r": torch, batch 256$|^RLM: dali|loader, 0 workers$|DataLoader, 0 workers"
CPU = (  # stages of a suite and their commands, with fewer cases than when run alone
    ("step", "step --steps 1"),
    ("ingest", f"ingest --records 1000 --only '{INGEST}'"),
    ("loader", f"loader --records 1000 --seconds 2 --only '{LOADER}'"),
    ("loop", "e2e --repeats 15 --records 400 --only tar"),
    ("embed", "embed --records 200 --only 'tar|500 Hz'"),
    ("start", "start --steps 20"),
    ("scaling", "scaling --steps 4 --repeats 3 --huge 1000000"),
)
GPU = (  # in order of value
    ("step", "step --only '(bf16|autocast), (.*, )?(64|256) crops|product: bf16'"),
    ("loop", "e2e --steps 10 --only tar"),
    ("loader", "loader --records 24000 --seconds 1"),
    ("step", "step"),
    ("embed", "embed --records 1000"),
    ("start", "start --only deepspeed"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options, began = parse(arguments), time.monotonic()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # waiting threads use no CPU-seconds
    check(options)
    try:
        if options.benchmark == "suite":
            return suite(options, began)
        record = environment()
        with tempfile.TemporaryDirectory(prefix="omnilead-bench-") as work:
            record |= measured(Path(work), options)
    except KeyboardInterrupt:
        print("benchmarks.run: interrupted: run it again", file=sys.stderr)
        return 130
    record["took_s"] = round(time.monotonic() - began)
    return publish(record, options.out)


def measured(
    work: Path,
    options: argparse.Namespace,
    done: Collection[str] = (),
    keep: Callable[[Part], None] = lambda part: None,
    samples: dict[str, Samples] | None = None,
) -> Part:
    """Run a benchmark and return a part of a record: its configuration, input and results. Cases
    named in `done` are left out; `keep` is called with the part after each process; `samples`
    are repeats of earlier calls, and gets those of this one."""
    prepared = importlib.import_module(f"benchmarks.{options.benchmark}").prepare(work, options)
    cases = {
        name: case for name, case in prepared.cases.items() if re.search(options.only or "", name)
    }
    if not cases:
        refuse(
            f"--only {options.only!r}: matches no case: use a part of {', '.join(prepared.cases)}"
        )
    cases = {name: case for name, case in cases.items() if name not in done}
    given = vars(options).items()
    config = {key: value for key, value in given if key != "out" and value is not None}
    part: Part = {"benchmark": options.benchmark, "config": config, "input": prepared.input}

    def with_results(outcome: Outcome) -> Part:
        return part | outcome._asdict()

    prepared.warm_up(cases)
    outcome = run_cases(
        cases,
        options.repeats,
        at_once=options.device == "cuda",
        keep=lambda outcome: keep(with_results(outcome)),
        samples=samples,
    )
    return with_results(outcome) | (prepared.extra() if outcome.results else {})


def suite(options: argparse.Namespace, began: float) -> int:
    """Run all benchmarks into one record, saved after each process. A process that fails or
    hangs takes at most its time limit; a case over its limit waits until all others had their
    turn. Running the same command again measures what is missing, with the repeats that are
    there."""
    rows = GPU if options.device == "cuda" else CPU
    known = list(dict(rows))
    stages = options.stages.split(",") if options.stages else known
    for stage in stages:
        if stage not in known:
            refuse(f"--stages {stage}: no such stage: use {', '.join(known)}")
    config = {name: getattr(options, name) for name in ("device", "model", "repeats")}
    new = environment() | {"benchmark": "suite", "config": config, "took_s": 0}
    path, record = resumed(options.out, new | {"parts": [], "left_out": {}})
    record.setdefault("partial", {})  # repeats of cases without a result, by benchmark
    before = record["took_s"]
    measure.deadline = began + 60 * (options.minutes or 15)
    measure.limit_s = LIMIT_S[options.device]
    chosen = [(stage, words) for stage, words in rows if stage in stages]
    for stage, words in chosen:
        run_stage(stage, words, options, record, path)
    for stage, words in dict(chosen).items():
        if over_time(record, stage):
            run_stage(stage, words, options, record, path, late=True)
    record["took_s"] = before + round(time.monotonic() - began)
    for name, reason in record["left_out"].items():
        say(f"left out: {name}: {reason}")
    return publish(record, path)


def over_time(record: Part, stage: str) -> list[str]:
    """Cases of a stage that ran over their time limit."""
    found = []
    for name, reason in record["left_out"].items():
        of, _, case = name.partition(": ")
        if of == stage and reason == OVER_TIME:
            found.append(case)
    return found


def run_stage(
    stage: str,
    words: str,
    options: argparse.Namespace,
    record: Part,
    path: Path,
    late: bool = False,
) -> None:
    """Run the missing cases of a stage of a suite and add them to the record's part of the same
    benchmark. Those that ran over their time limit are run if `late`, and then alone."""
    left_out = record["left_out"]
    command = [*shlex.split(words), "--device", options.device]
    if options.model and stage not in ("ingest", "loader", "start"):
        command += ["--model", options.model]
    if options.repeats and "--repeats" not in words:
        command += ["--repeats", str(options.repeats)]
    parsed = parse(command)
    same = [part for part in record["parts"] if part["benchmark"] == parsed.benchmark]
    old = same[0] if same else {"results": {}}
    waiting = over_time(record, stage)
    if late:
        parsed.only = "|".join(f"^{re.escape(case)}$" for case in waiting)
    done = old["results"] if late else [*old["results"], *waiting]
    samples = dict(record["partial"].get(parsed.benchmark, {}))

    def keep(part: Part) -> None:
        partial = {case: each for case, each in samples.items() if case not in part["results"]}
        record["partial"][parsed.benchmark] = {case: each for case, each in partial.items() if each}
        others = [each for each in record["parts"] if each["benchmark"] != parsed.benchmark]
        new = old | part | {"results": old["results"] | part["results"]}
        record["parts"] = [*others, new] if new["results"] else others
        for case in part["results"]:
            left_out.pop(f"{stage}: {case}", None)
        for case, reason in part["left_out"].items():
            if not (late and reason == OUT_OF_TIME):  # it stays known as one that takes long
                left_out[f"{stage}: {case}"] = reason
        with contextlib.suppress(OSError):  # save() reports it at the end
            write_whole(path, json.dumps(record, indent=1) + "\n")

    try:
        if measure.deadline is not None and measure.deadline - time.monotonic() < LEAST_S:
            raise CaseError(OUT_OF_TIME)
        left_out.pop(stage, None)
        with tempfile.TemporaryDirectory(prefix="omnilead-suite-") as work:
            keep(measured(Path(work), parsed, done, keep, samples))
    except (CaseError, SystemExit) as error:
        left_out[stage] = str(error)
        say(f"{stage}: left out: {error}")


def publish(record: Part, out: Path | None) -> int:
    from benchmarks.tables import TABLES

    parts = [part for part in record.get("parts", [record]) if part["results"]]
    for part in parts:
        print("\n\n".join(TABLES[part["benchmark"]][1](part)))
    bugs = [
        f"{name}: {reason}" for name, reason in record["left_out"].items() if reason.startswith(BUG)
    ]
    for bug in bugs:
        print(
            f"benchmarks.run: {bug}: the program is wrong, not this machine: its traceback is "
            "printed above",
            file=sys.stderr,
        )
    if parts:
        return save(record, out) or int(bool(bugs))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in record["left_out"].items())
    print(f"benchmarks.run: nothing was measured: {reasons}", file=sys.stderr)
    return 1


def resumed(out: Path | None, new: Part) -> tuple[Path, Part]:
    """The record to continue: --out, or today's if it has the same machine and revision and
    something is missing."""
    path = out or RESULTS / file_name(new)
    if not path.exists():
        return path, new
    try:
        old: Part = json.loads(path.read_text())
        same = all(old[key] == new[key] for key in ("benchmark", "config", "versions"))
        same = same and old["git"]["commit"] == new["git"]["commit"]
    except (ValueError, LookupError, TypeError):
        same = False
    if same and (out or old["left_out"]):
        return path, old
    if out:
        refuse(
            f"--out {out}: is not a record of this command, with these versions and revision: "
            "choose another"
        )
    return free(path), new


def save(record: Part, out: Path | None) -> int:
    """Write the record atomically. If that fails, print it, so that no measurement is lost to a
    full disk."""
    path = out or free(RESULTS / file_name(record))
    text = json.dumps(record, indent=1) + "\n"
    try:
        write_whole(path, text)
    except OSError as error:
        print(text)
        print(
            f"benchmarks.run: {path}: {error.strerror or error}: the record is printed above",
            file=sys.stderr,
        )
        return 1
    print(
        f"{path}: {sum(len(part['results']) for part in record.get('parts', [record]))} results "
        f"in {record.get('took_s', 0)} s"
    )
    return 0


def free(path: Path) -> Path:
    """This name, or with -2, -3, ... at its end: records are never overwritten."""
    names = (path.with_stem(f"{path.stem}-{number}") if number > 1 else path for number in count(1))
    return next(name for name in names if not name.exists())


def file_name(record: Part) -> str:
    device = f"-{record['config']['device']}" if record["benchmark"] == "suite" else ""
    return f"{record['benchmark']}{device}_{record['hardware']['short']}_{record['date'][:10]}.json"


def check(options: argparse.Namespace) -> None:
    """Refuse wrong options before the work starts."""
    out = options.out or RESULTS / "record.json"
    try:
        RESULTS.mkdir(parents=True, exist_ok=True)
        writable(out, "--out")
        if options.model:
            from benchmarks.step import config_file, model_of

            config_file(options.model)
            model_of(options.model)
    except (ConfigError, OSError) as error:
        refuse(" ".join(str(error).split()))
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
        if subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, check=False
        ).returncode:
            refuse("--device cuda: torch finds no CUDA device: use --device cpu")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        "python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("benchmark", choices=NAMES, metavar="BENCHMARK")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: not ingest, scaling")
    add("--out", type=Path, help="the record (results/BENCHMARK_MACHINE_DATE.json)")
    add("--repeats", type=at_least(3), help="of each case, at least 3 (3 to 60)")
    add("--only", type=regex, help="run only cases whose name matches this regular expression")
    add("--model", help="paper, a config in configs/pretrain, or a path: step, e2e, embed, scaling")
    add("--batch", type=at_least(2), help="crops on one device: step, e2e, embed, scaling")
    add("--records", type=at_least(2), help="of the synthetic archive: ingest, loader, e2e, embed")
    add("--steps", type=at_least(1), help="per repeat or turn: step, e2e, scaling, start")
    add("--seconds", type=at_least(1), help="per repeat: loader (3)")
    add("--huge", type=at_least(1000), help="crops of the large dataset: scaling (10000000)")
    add("--minutes", type=at_least(1), help="start nothing after this time: suite (15)")
    add("--stages", help="run only these, e.g. step,loop: suite")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and options.benchmark in CPU_ONLY:
        refuse(f"--device cuda: {options.benchmark} does not use one: leave it out")
    if options.benchmark != "suite":  # each stage of a suite has its own
        usual = 5 if options.device == "cuda" else REPEATS.get(options.benchmark, 3)
        options.repeats = options.repeats or usual
    return options


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number, {least} or more")
        return int(text)

    return number


def regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}: not a regular expression: {error}") from None
    return text


def refuse(text: str) -> NoReturn:
    print(f"benchmarks.run: {text}", file=sys.stderr)
    raise SystemExit(2)


def environment() -> Part:
    """The facts about machine and software that every record needs."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    cpu = dict(re.findall(r"^(.+?)\s*: (.*)$", first, re.MULTILINE))
    name = cpu.get("model name", "")
    # cloud machines do not name the generation
    generation = ", ".join(f"{key} {cpu[key]}" for key in ("cpu family", "model") if key in cpu)
    gpus, installed = gpu_facts(), {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    short = gpus[0]["name"] if gpus else " ".join(name.split()[:2]) or platform.machine()
    return {
        "format": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": revision(),
        "hardware": {
            "cpu": f"{name} ({generation})" if generation else name,
            "short": "-".join(re.findall(r"[a-z0-9]+", short.lower())),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "load_before": os.getloadavg()[0],
            "gpus": gpus,
        },
        "versions": installed,
        "page_cache": "warm: each case runs once uncounted in its own process",
    }


def gpu_facts() -> list[dict[str, str]]:
    """Facts from nvidia-smi about the GPUs that torch sees; none without nvidia-smi, or if all GPUs
    are hidden."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader"]
    query += [f"--id={visible}"] if visible else []
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines()]
    return [dict(zip(GPU_FACTS, row, strict=True)) for row in rows]


def revision() -> Part:
    """The git revision; in a copy without git, OMNILEAD_REVISION."""
    if commit := git("rev-parse", "HEAD"):
        return {
            "commit": commit,
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    return {"commit": os.environ.get("OMNILEAD_REVISION") or "unknown", "dirty": None}


def git(*arguments: str) -> str:
    with contextlib.suppress(OSError):  # git is not installed
        answer = subprocess.run(
            ("git", *arguments), cwd=RESULTS.parent, capture_output=True, text=True, check=False
        )
        return answer.stdout.strip()
    return ""


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    if multiprocessing.active_children():  # a process cannot be killed, e.g. because a driver hangs
        os._exit(code)
    sys.exit(code)
