"""Measure this machine and write one record.

    python -m benchmarks.run ingest                  archive to dataset, beside the peers
    python -m benchmarks.run loader                  dataset to batches, beside the peers
    python -m benchmarks.run step                    one training step, beside a re-creation of the authors'
    python -m benchmarks.run step --explain          each of its stages beside what it must cost
    python -m benchmarks.run e2e                     loader, step, optimiser, log through the real loop, beside the bare step
    python -m benchmarks.run embed                   ECGs to embeddings, beside the encoder alone
    python -m benchmarks.run start                   from the command to the first step
    python -m benchmarks.run scaling                 ten million crops; two ranks; a cluster, by formula
    python -m benchmarks.run suite [--device cuda]   all that this machine can tell, in one record: make bench, make bench-gpu

A record goes to benchmarks/results/, or --out; `python -m benchmarks.report` makes tables and pictures of records.
`python -m benchmarks.run BENCHMARK --help` lists what can be set.
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.measure import in_fresh_process, run_cases, summary
from engine.common import Parser

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    *("numpy", "scipy", "pyarrow", "zarr", "wfdb", "google-crc32c", "torch", "deepspeed", "webdataset", "s3fs", "moto"),
    *("nvidia-dali-cuda130", "nvidia-dali-cuda120", "mosaicml-streaming"),
)
GPU_FACTS = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")
MODEL = "paper, a file of configs/pretrain without its ending, or a path"
BATCHES = "crops of a micro-batch, for CMSC 2 or more (default: 4 on a CPU, 64 256 on a GPU)"
Part = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return recorded(options)
    except KeyboardInterrupt:
        print("benchmarks.run: interrupted: nothing was recorded", file=sys.stderr)
        return 130


def recorded(options: argparse.Namespace) -> int:
    began = time.monotonic()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # a thread that waits takes no CPU-seconds
    check_device(options.device)
    check_out(options.out or RESULTS / "record.json")
    if options.benchmark == "suite":
        from benchmarks import suite

        return suite.main(options, began)
    record = environment()
    with tempfile.TemporaryDirectory(prefix="omnilead-bench-") as place:
        record |= measured(Path(place), options)
    record["took_s"] = round(time.monotonic() - began)
    if not record.get("parts") and not record["results"]:
        why = "; ".join(f"{name}: {reason}" for name, reason in record.get("left_out", {}).items())
        print(f"benchmarks.run: nothing was measured: {why}", file=sys.stderr)
        return 1
    return save(record, options.out)


def save(record: Part, out: Path | None) -> int:
    """Whole. A file is written over only if --out names it. One that cannot be written is written elsewhere, and exit is 1."""
    from engine.common import write_whole

    wanted = out or free(RESULTS / file_name(record))
    took = f" in {record['took_s']} s" if "took_s" in record else ""
    for path in (wanted, *(free(folder / wanted.name) for folder in (Path(tempfile.gettempdir()), Path.cwd()))):
        try:
            write_whole(path, json.dumps(record, indent=1) + "\n")
        except OSError as error:
            print(f"benchmarks.run: {path}: {error.strerror or error}: the record goes to another folder", file=sys.stderr)
            continue
        print(f"{path}: {sum(len(part['results']) for part in record.get('parts', [record]))} results{took}")
        return int(path != wanted)
    return 1


def free(path: Path) -> Path:
    """This name, or with -2, -3, ... at its end: of machines that share a name, and of one day, each record stays."""
    names = (path.with_stem(f"{path.stem}-{number}") if number > 1 else path for number in count(1))
    return next(name for name in names if not name.exists())


def measured(work: Path, options: argparse.Namespace) -> Part:
    """What was asked, on what, and what came out."""
    name = options.benchmark
    if name == "step" and options.explain:
        name = "cost"
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items() if key != "out"}
    if getattr(options, "model", None):
        check_model(options.model)
    return {"benchmark": name, "config": settings} | RUN[name](work, options)


def check_out(out: Path) -> None:
    """Before the work, not after it."""
    from engine.common import (
        ConfigError,  # here: a case's process, whose memory counts, imports this module
        writable,
    )

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        writable(out, "--out")
    except ConfigError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"--out {out}: {error.strerror or error}: name a file in a folder that may be written to")


def check_model(name: str) -> None:
    from benchmarks.step import config_file, model_of
    from engine.common import ConfigError

    try:
        config_file(name)
        model_of(name)
    except ConfigError as error:
        refuse(f"--model {name}: {' '.join(str(error).split())}")


def check_device(device: str) -> None:
    """One line where there is no GPU; and on a CPU none is seen by anybody."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    try:
        found = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False, timeout=120).returncode == 0
    except subprocess.TimeoutExpired:
        found = False
    if not found:
        refuse("--device cuda: torch sees no CUDA device here: use --device cpu")


def _get_help_string(self, action: argparse.Action) -> str | None:
    return super()._get_help_string(action) if action.default else action.help


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    made: dict[str, argparse.ArgumentParser] = {}
    for name in ("ingest", "loader", "step", "e2e", "embed", "start", "scaling", "suite"):
        made[name] = command = commands.add_parser(name, formatter_class=Help)
        command.add_argument("--out", type=Path, help="the record (default: benchmarks/results/BENCHMARK_MACHINE_DATE.json)")
        devices = ("cpu",) if name in ("ingest", "scaling") else ("cpu", "cuda")  # what they measure
        command.add_argument("--device", choices=devices, default="cpu")
        repeats = 3 if name in ("step", "embed", "start", "suite") else 5
        turns = {"default": None, "help": "turns (default: 60 on a CPU, 5 on a GPU)"} if name == "e2e" else {"default": repeats}
        command.add_argument("--repeats", type=positive, **turns)  # type: ignore[arg-type]
    for name in ("ingest", "loader", "e2e", "embed", "start", "suite"):
        made[name].add_argument("--only", type=regex, metavar="REGEX", default="", help="cases whose name matches")
    for name, records in {"ingest": 2000, "loader": 20_000, "e2e": 600, "embed": 600, "suite": None}.items():
        least = 1 if name in ("e2e", "embed") else 100  # with fewer there is not every database, nor a peer's batch
        size = "size of the synthetic archive" + (" (default: 1000 on a CPU, 24000 on a GPU)" if records is None else "")
        made[name].add_argument("--records", type=at_least(least), default=records, help=size)
    made["ingest"].add_argument("--headers", type=positive, default=1_000_000, help="of the large plan")
    made["loader"].add_argument("--seconds", type=above_zero, default=3, help="of one run, warm-up aside")
    made["loader"].add_argument("--sizes", action="store_true", help="batches of 64 to 1024, 1 and 2 threads, for every case")
    made["loader"].add_argument("--alone", action="store_true", help="our backends, without peers; always so on a GPU")
    made["scaling"].add_argument("--huge", type=at_least(1000), default=10_000_000, help="crops of the dataset")
    made["start"].add_argument("--steps", type=positive, default=150, help="of the whole quick start")
    made["suite"].add_argument("--minutes", type=above_zero, default=15, help="it takes no longer")
    made["suite"].add_argument("--stages", type=lambda text: text.split(","), help="some of them, as smoke,tests,step")
    made["suite"].add_argument("--work", type=Path, help="a folder that is kept, for the same command to go on")
    made["suite"].add_argument("--model", default="paper", help=MODEL)
    made["suite"].add_argument("--kind", choices=("cpu", "gpu"), help="which parts (default: by --device)")
    of_step(made["step"])
    for name in ("e2e", "scaling", "embed"):
        few = 16 if name == "embed" else 64
        made[name].add_argument("--model", help=f"{MODEL} (default: small on a CPU, paper on a GPU)")
        made[name].add_argument(
            "--batch", type=positive, help=f"crops at a time on one device (default: {few} on a CPU, 256 on a GPU)"
        )
        made[name].add_argument("--threads", type=positive, default=2, help="of torch on a CPU")
    made["e2e"].add_argument("--steps", type=positive, help="of one turn (default: 2 on a CPU, 20 on a GPU)")
    made["scaling"].add_argument("--steps", type=positive, default=10, help="of one turn")
    options = parser.parse_args(arguments)
    if options.repeats is not None and options.repeats < 3:
        refuse(f"--repeats {options.repeats}: fewer than 3 show no spread")
    if options.benchmark == "step":
        check_ways(options)
    return options


def check_ways(options: argparse.Namespace) -> None:
    """What a record says was asked for was measured."""
    if options.explain and max(len(options.batches or ()), len(options.compiled or ())) > 1:
        refuse("--explain: measures one of --batches and one of --compiled: name one")


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number, {least} or more")
        return int(text)

    return number


positive = at_least(1)


def above_zero(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: must be a number above 0")


def regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}: no regular expression: {error}") from None
    return text


def of_step(command: argparse.ArgumentParser) -> None:
    command.add_argument("--explain", action="store_true", help="stage by stage beside the cost model")
    command.add_argument("--model", default="paper", help=MODEL)
    command.add_argument("--batches", type=at_least(2), nargs="+", help=BATCHES)
    command.add_argument("--steps", type=positive, help="counted steps of one run (default: 2 on a CPU, 20 on a GPU)")
    command.add_argument("--threads", type=positive, default=2, help="of torch on a CPU")
    ways = ("eager", "layers", "step")
    command.add_argument("--compiled", choices=ways, nargs="+", help="by torch.compile (default: eager on a CPU, else all)")
    command.add_argument("--precision", choices=("fp32", "autocast", "bf16"), default="bf16", help="of --explain")
    command.add_argument("--machine", choices=("this", "h200", "a100"), default="this", help="of --explain")
    command.add_argument("--peak-tflops", type=above_zero, help="of --explain: instead of the machine's")
    command.add_argument("--bandwidth-gb", type=above_zero, help="of --explain: GB a second, instead of the machine's")


def run_ingest(work: Path, options: argparse.Namespace) -> Part:
    from benchmarks import ingest

    say(f"an archive of {options.records} records")
    archive = ingest.prepare(work, options.records)
    results = run_cases(only(ingest.cases(archive, work), options.only), options.repeats, say)
    if re.search(options.only, "plan: headers in memory"):
        say(f"a plan of {options.headers:,} headers, {options.repeats} times")
        plans = [in_fresh_process(ingest.plan_in_memory, options.headers, warm_up=False) for _ in range(options.repeats)]
        results["plan: headers in memory"] = summary(plans)
    return {"input": ingest.facts(archive, work), "results": results}


def run_loader(work: Path, options: argparse.Namespace) -> Part:
    from benchmarks import e2e, feed, loader
    from data_tools.dataset import Dataset

    say(f"a dataset of about {options.records} crops")
    alone, left_out = options.alone or options.device == "cuda", dict[str, str]()
    dataset = (e2e if alone else loader).prepare(work, options.records)
    opened, threads = Dataset.open(str(dataset)), min(4, max(2, len(os.sched_getaffinity(0)) // 4))  # 4: as the bar has
    cases = (
        feed.cases(dataset, options.device, threads) if alone else loader.cases(dataset, work, options.seconds, options.sizes)
    )
    results = run_cases(only(cases, options.only), options.repeats, say, left_out, in_one_process=alone)
    given = {"archive": "synthetic", "crops": len(opened), "dataset": opened.fingerprint}
    given |= {"threads": threads} if alone else {}
    return {"input": given, "results": results, "left_out": left_out}


def late(module: str, function: str = "measure") -> Callable[[Path, argparse.Namespace], Part]:
    """Imported when it runs: most bring torch, and ingest has none."""

    def run(work: Path, options: argparse.Namespace) -> Part:
        part: Part = getattr(importlib.import_module(f"benchmarks.{module}"), function)(work, options, say)
        return part

    return run


RUN = {
    "ingest": run_ingest,
    "loader": run_loader,
    "cost": late("stages", "explain"),
    **{name: late(name) for name in ("scaling", "step", "e2e", "embed", "start")},
}


def only(cases: dict[str, Any], pattern: str) -> dict[str, Any]:
    found = {name: case for name, case in cases.items() if re.search(pattern, name)}
    return found or refuse(f"--only {pattern!r}: no case is called so: {', '.join(cases)}")


def say(text: str) -> None:
    print(f"benchmark: {text}", file=sys.stderr, flush=True)


def refuse(text: str) -> NoReturn:
    print(f"benchmarks.run: {text}", file=sys.stderr)
    raise SystemExit(2)


def file_name(record: Part) -> str:
    device = f"-{record['config']['device']}" if record["benchmark"] == "suite" else ""
    return f"{record['benchmark']}{device}_{record['hardware']['short']}_{record['date'][:10]}.json"


def environment() -> Part:
    """Everything without which a number means nothing."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first)}
    cpu, generation = told.get("model name", ""), [f"{key} {told[key]}" for key in ("cpu family", "model") if key in told]
    gpus = gpu_facts()
    short = gpus[0]["name"] if gpus else " ".join(cpu.split()[:2]) or platform.machine()
    return {
        "format": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": revision(),
        "hardware": {
            "cpu": " ".join([cpu, *([f"({', '.join(generation)})"] if generation else [])]),  # a cloud's names hide it
            "short": "-".join(re.findall(r"[a-z0-9]+", short.lower())),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "load_before": os.getloadavg()[0],
            "gpus": gpus,
        },
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES if installed(name)},
        "page_cache": "warm: each case runs once uncounted in its own process",
    }


def gpu_facts() -> list[dict[str, str]]:
    """As nvidia-smi says, of those that torch sees, its first one first; none without nvidia-smi, or where all were hidden."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    query = ("nvidia-smi", f"--query-gpu={','.join(('index', 'uuid', *GPU_FACTS))}", "--format=csv,noheader")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines()]
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    chosen = rows if names is None else [row for name in names for row in rows if name == row[0] or row[1].startswith(name)]
    return [dict(zip(GPU_FACTS, row[2:], strict=True)) for row in chosen or rows]  # or rows: a part of one (MIG)


def installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def revision() -> Part:
    """Of a copy without git, what OMNILEAD_REVISION says."""
    if commit := git("rev-parse", "HEAD"):
        return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    return {"commit": os.environ.get("OMNILEAD_REVISION") or "unknown", "dirty": None}


def git(*arguments: str) -> str:
    with contextlib.suppress(OSError):  # there is none
        answer = subprocess.run(("git", *arguments), cwd=RESULTS.parent, capture_output=True, text=True, check=False)
        return answer.stdout.strip()
    return ""


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    if multiprocessing.active_children():  # one that nothing can kill, as where a driver hangs
        os._exit(code)
    sys.exit(code)
