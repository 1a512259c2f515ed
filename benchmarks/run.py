"""Measure this machine and write one record to benchmarks/results/, or --out.

python -m benchmarks.run ingest                  archive to dataset, against other programs
python -m benchmarks.run loader                  dataset to batches, against other loaders; to a GPU only omnilead
python -m benchmarks.run step                    one training step, against a re-creation of the authors'
python -m benchmarks.run cpc                     one step of S4 with CPC, against a re-creation of ECG-CPC's
python -m benchmarks.run e2e                     the training loop on each data source, against the bare step
python -m benchmarks.run embed                   ECGs to embeddings, against the encoder alone
python -m benchmarks.run start                   from the command to the first step
python -m benchmarks.run scaling                 ten million crops: what goes over all of them; two ranks
python -m benchmarks.run suite [--device cuda]   all of them in one record: make bench, make bench-gpu
"""

import argparse
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
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, count
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT, measure, program_parser
from benchmarks.measure import BUG_PREFIX, LEAST_REPEATS, OUT_OF_TIME, CaseError, Part, say
from omnilead.data_tools.io.storage import write_whole
from omnilead.engine.settings.commandline import positive_integer, require_writable
from omnilead.engine.settings.errors import ConfigError

PACKAGES = (
    "numpy scipy pyarrow zarr wfdb google-crc32c torch deepspeed webdataset "
    "datasets litdata mosaicml-streaming "
    "nvidia-dali-cuda130 nvidia-dali-cuda120"
)
GPU_FACTS = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")
BENCHMARKS = ("ingest", "loader", "step", "cpc", "e2e", "embed", "start", "scaling", "suite")
CPU_ONLY = ("ingest", "scaling")
# Number of repeats of each case on a CPU. Benchmarks that are not listed have LEAST_REPEATS
CPU_REPEATS = {"ingest": 5, "loader": 5, "scaling": 5, "e2e": 60}
GPU_REPEATS = 5
LIMIT_S = {"cpu": 600.0, "cuda": 200.0}  # time limit of each process of a suite
LEAST_S_TO_START = 15  # a benchmark is not started if fewer seconds than this are left
# Regular expression for the cases of `step` that decide the default settings; all steps among them have the
# paper's batch size
DECIDING_STEPS = (
    r"product: bf16|: bf16, (plain kernels, )?(layers|step) compiled, .*512|step: autocast, 512"
)
# The commands of each suite. They have fewer cases or repeats than a benchmark run alone
SUITES = {
    "cpu": (
        "step --steps 1",
        "cpc --steps 1",
        "ingest --records 1000",
        "loader --records 1000 --seconds 2",
        "e2e --repeats 15 --records 400 --only tar",
        "embed --records 200 --only 'tar|500 Hz'",
        "start",
        "scaling --steps 4 --repeats 3 --huge 1000000",
    ),
    # On a GPU, the benchmarks whose results are needed most come first, as time may run out
    "cuda": (
        f"step --only '{DECIDING_STEPS}'",
        "e2e --steps 10 --only tar",
        "loader --records 24000 --seconds 1",
        "step",
        "cpc",
        "embed --records 1000",
        "start --only deepspeed",
    ),
}
NUMBER_OPTIONS = {
    "repeats": f"of each case, at least {LEAST_REPEATS} (3 to 60)",
    "batch": "crops on one device: step, cpc, e2e, embed, scaling",
    "records": "of the synthetic archive: ingest, loader, e2e, embed",
    "steps": "per repeat or turn: step, cpc, e2e, scaling",
    "seconds": "per repeat: loader (3)",
    "huge": "crops of the large dataset: scaling (10000000)",
    "minutes": "start nothing after this time (a suite: 15)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # so that waiting threads use no CPU-seconds
    try:
        options = parse(arguments)
        check_options(options)
        chosen = [options]
        if options.benchmark == "suite":
            measure.limit_s, chosen = LIMIT_S[options.device], suite_parts(options)
            options.minutes = options.minutes or 15
        if options.minutes:
            measure.deadline = began + 60 * options.minutes
        path, record = find_path_and_record(options)
    except (ConfigError, OSError, ValueError) as error:
        print(f"benchmarks.run: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    before = record["took_s"]
    # Cases that failed in an earlier run, or were over their time limit, are tried again only after all other
    # cases
    failed = {name for name, reason in record["left_out"].items() if reason != OUT_OF_TIME}
    try:
        for late in (False, True):
            for part_options in chosen:
                run_part(part_options, record, path, failed, late)
            for name, reason in record["left_out"].items():
                if reason == measure.OVER_TIME:
                    failed.add(name)
    except KeyboardInterrupt:
        print("benchmarks.run: interrupted: run it again", file=sys.stderr)
        return 130
    record["took_s"] = before + round(time.monotonic() - began)
    return publish_record(record, path)


def suite_parts(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Returns the options of each benchmark of a suite, in the order in which they run."""
    parts = []
    for words in SUITES[options.device]:
        part_options = parse([*shlex.split(words), "--device", options.device])
        part_options.model = options.model
        part_options.repeats = options.repeats or part_options.repeats
        parts.append(part_options)
    return parts


def run_part(
    options: argparse.Namespace, record: Part, path: Path, failed: set[str], late: bool
) -> None:
    """Runs those cases of a benchmark that the record lacks, and adds their results. The record is saved after
    each process. With `late`, only cases in `failed` are run, else only the other ones."""
    name, left_out = options.benchmark, record["left_out"]
    config = {key: value for key, value in vars(options).items() if value is not None}
    config.pop("out", None)
    if config in record["complete"] or (
        late and not any(f"{name}: " in failed_case for failed_case in failed)
    ):
        return
    parts = [part for part in record["parts"] if part["benchmark"] == name]
    part = parts[0] if parts else {"benchmark": name, "results": {}}
    try:
        if measure.deadline - time.monotonic() < LEAST_S_TO_START:
            raise CaseError(OUT_OF_TIME)
        left_out.pop(name, None)
        with tempfile.TemporaryDirectory(prefix="omnilead-bench-") as work:
            program = importlib.import_module(f"benchmarks.{name}")
            part["input"], all_cases = program.prepare_input_and_cases(Path(work), options)
            part["config"] = config
            chosen_cases = [case for case in all_cases if re.search(options.only or "", case)]
            if not chosen_cases:
                raise CaseError(
                    f"--only {options.only!r}: matches none of the cases {', '.join(all_cases)}"
                )
            cases = {}
            for case in chosen_cases:
                if case not in part["results"] and (f"{name}: {case}" in failed) == late:
                    cases[case] = all_cases[case]
            outcomes = measure.run_cases(cases, options.repeats, options.device == "cuda")
            for case, result, reason in outcomes:
                if result:
                    part["results"][case] = result
                    left_out.pop(f"{name}: {case}", None)
                else:
                    part["results"].pop(case, None)
                    left_out[f"{name}: {case}"] = reason
                if part["results"] and part not in record["parts"]:
                    record["parts"].append(part)
                with suppress(OSError):  # publish_record() saves once more, and reports the error
                    save_record(record, path)
            if part["results"].keys() >= set(chosen_cases):
                record["complete"].append(config)
    except measure.EXPECTED_ERRORS as error:
        left_out[name] = str(error)
        say(f"{name}: left out: {error}")


def publish_record(record: Part, path: Path) -> int:
    """Prints the tables of a record and what was left out, and saves it. Returns the exit code."""
    from benchmarks.tables import TABLES

    for part in record["parts"]:
        print("\n\n".join(TABLES[part["benchmark"]][1](part)))
    wrong = 0
    for name, reason in record["left_out"].items():
        print(f"benchmarks.run: left out: {name}: {reason}", file=sys.stderr)
        # A reason that begins with BUG_PREFIX means an error of the program, not of this machine
        wrong |= reason.startswith(BUG_PREFIX)
    if not record["parts"]:
        print("benchmarks.run: nothing was measured", file=sys.stderr)
        return 1
    try:
        save_record(record, path)
    except OSError as error:  # the record is printed, so that a full disk loses no measurement
        print(json.dumps(record, indent=1))
        text = f"{path}: {error.strerror or error}: the record is printed above"
        print(f"benchmarks.run: {text}", file=sys.stderr)
        return 1
    results = sum(len(part["results"]) for part in record["parts"])
    print(f"{path}: {results} results in {record['took_s']} s")
    return int(wrong)


def save_record(record: Part, path: Path) -> None:
    write_whole(path, json.dumps(record, indent=1) + "\n")


def find_path_and_record(options: argparse.Namespace) -> tuple[Path, Part]:
    """Returns (path, record) to add results to. An existing record is continued if it is of the same command,
    versions and revision. Without --out, it must also be today's and lack cases; if there is none, a new
    record is begun, with -2, -3, ... in its name if needed, because records are never overwritten. With
    --out, a missing file becomes a new record; a file that is not such a record raises a ConfigError."""
    settings = vars(options).items()
    config = {key: value for key, value in settings if key not in ("out", "minutes")}
    new = machine_facts() | {"benchmark": options.benchmark, "config": config, "took_s": 0}
    device = f"-{options.device}" if options.benchmark == "suite" else ""
    machine = f"{new['hardware']['short']}_{new['date'][:10]}"
    name = RESULTS / f"{options.benchmark}{device}_{machine}.json"
    numbered = (name.with_stem(f"{name.stem}-{number}") for number in count(2))
    for path in [options.out] if options.out else chain([name], numbered):
        if not path.exists():
            return path, new | {"parts": [], "left_out": {}, "complete": []}
        same = ("benchmark", "config", "versions", "git")
        with suppress(ValueError, LookupError, TypeError):  # a damaged record raises one of these
            old = json.loads(path.read_text())
            # This raises a KeyError if one of the keys is missing
            old["parts"], old["left_out"], old["complete"], old["took_s"]
            if all(old[key] == new[key] for key in same) and (options.out or old["left_out"]):
                return path, old
    raise ConfigError(
        f"--out {options.out}: is not a record of this command with the same versions and revision: "
        "choose another file"
    )


def check_options(options: argparse.Namespace) -> None:
    """Raises an error for wrong options, before anything is measured."""
    from benchmarks.step import config_of

    RESULTS.mkdir(parents=True, exist_ok=True)
    require_writable(options.out or RESULTS / "record.json", "--out")
    config_of(options.model or "paper")
    try:
        re.compile(options.only or "")
    except re.error as error:
        raise ConfigError(f"--only {options.only!r}: not a regular expression: {error}") from None
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif options.benchmark in CPU_ONLY:
        raise ConfigError(
            f"--device cuda: {options.benchmark} does not use a GPU: leave the option out"
        )
    elif (
        command_output(sys.executable, "-c", "import torch; print(torch.cuda.is_available())")
        != "True"
    ):
        raise ConfigError("--device cuda: torch finds no CUDA device: use --device cpu")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = program_parser("run", __doc__)
    add = parser.add_argument
    add("benchmark", choices=BENCHMARKS, metavar="BENCHMARK")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: not ingest, scaling")
    add("--out", type=Path, help="the record (results/BENCHMARK_MACHINE_DATE.json)")
    add("--only", help="run only cases whose name matches this regular expression")
    add("--model", help="paper, a config in configs/pretrain, or a path: step, e2e, embed, scaling")
    for name, text in NUMBER_OPTIONS.items():
        add(f"--{name}", type=positive_integer, help=text)
    options = parser.parse_args(arguments)
    if options.repeats and options.repeats < LEAST_REPEATS:
        parser.error(f"--repeats {options.repeats}: at least {LEAST_REPEATS} are needed")
    if options.benchmark != "suite":  # a suite sets the repeats of each of its benchmarks
        usual = (
            GPU_REPEATS
            if options.device == "cuda"
            else CPU_REPEATS.get(options.benchmark, LEAST_REPEATS)
        )
        options.repeats = options.repeats or usual
    return options


def machine_facts() -> Part:
    """Returns what every record says about the machine and its software."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    cpu = dict(re.findall(r"^(.+?)\s*: (.*)$", first, re.MULTILINE))
    name = cpu.get("model name", platform.machine())
    # The model name of cloud machines does not tell the CPU's generation, but these numbers do
    generation = ", ".join(f"{key} {cpu[key]}" for key in ("cpu family", "model") if key in cpu)
    gpus, installed = gpu_facts(), {"python": platform.python_version()}
    for package in PACKAGES.split():
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    short = gpus[0]["name"] if gpus else " ".join(name.split()[:2])
    git = {"commit": os.environ.get("OMNILEAD_REVISION", "unknown"), "dirty": None}
    if commit := command_output(
        "git", "rev-parse", "HEAD"
    ):  # "" in a copy of the sources without git
        changes = command_output("git", "status", "--porcelain", "--untracked-files=no")
        git = {"commit": commit, "dirty": bool(changes)}
    if git["commit"] == "unknown":
        say("neither git nor OMNILEAD_REVISION says which commit this is: records say unknown")
    return {
        "format": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": git,
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
    """Returns GPU_FACTS, from nvidia-smi, of each GPU that torch sees. Returns [] without nvidia-smi, or if all GPUs
    are hidden."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader"]
    rows = command_output(*query, *([f"--id={visible}"] if visible else [])).splitlines()
    return [dict(zip(GPU_FACTS, row.split(", "), strict=True)) for row in rows]


def command_output(*command: str) -> str:
    """Returns the output of a command, or "" if it fails or is not installed."""
    with suppress(OSError, subprocess.SubprocessError):
        run_options: dict[str, Any] = {
            "capture_output": True,
            "text": True,
            "check": True,
            "timeout": 60,
        }
        return str(subprocess.run(command, cwd=ROOT, **run_options).stdout).strip()
    return ""


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # If a child process could not be killed, e.g. because a driver hangs, sys.exit would wait for it forever
    if multiprocessing.active_children():
        os._exit(code)
    sys.exit(code)
