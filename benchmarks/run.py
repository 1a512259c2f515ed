"""Measure this machine and write one record.

    python -m benchmarks.run ingest                  archive to dataset, beside the peers
    python -m benchmarks.run loader                  dataset to batches, beside the peers
    python -m benchmarks.run step                    one training step, beside a re-creation of the authors'
    python -m benchmarks.run step --explain          each of its stages beside what it must cost
    python -m benchmarks.run step --autotune         micro-batch and kernels: the fastest settings
    python -m benchmarks.run e2e                     loader, step, optimiser, log through the real loop, beside the bare step
    python -m benchmarks.run embed                   ECGs to embeddings, beside the encoder alone
    python -m benchmarks.run start                   from the command to the first step
    python -m benchmarks.run scaling                 ten million crops; two ranks; a cluster, by formula
    python -m benchmarks.run suite [--device cuda]   all that this machine can tell, in one record: make bench, make bench-gpu

A record goes to benchmarks/results/, or --out; `python -m benchmarks.report` makes tables and pictures of records.
`python -m benchmarks.run BENCHMARK --help` lists what can be set.
"""

import argparse
import datetime
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.measure import in_fresh_process, run_cases, summary

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    *("numpy", "scipy", "pyarrow", "zarr", "wfdb", "google-crc32c", "torch", "deepspeed", "webdataset", "s3fs", "moto"),
    *("nvidia-dali-cuda130", "nvidia-dali-cuda120", "mosaicml-streaming"),
)
GPU_FACTS = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")
MODEL = "paper, a file of configs/pretrain without its ending, or a path"
Part = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # a thread that waits takes no CPU-seconds
    check_device(options.device)
    began, record = time.monotonic(), environment()
    with tempfile.TemporaryDirectory(prefix="omnilead-bench-") as place:
        record |= measured(Path(place), options)
    record["took_s"] = round(time.monotonic() - began)
    out: Path = options.out or RESULTS / file_name(record)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    parts = record.get("parts", [record])
    print(f"{out}: {sum(len(part['results']) for part in parts)} results in {record['took_s']} s")
    return 0


def measured(work: Path, options: argparse.Namespace) -> Part:
    """What was asked, on what, and what came out."""
    name = options.benchmark
    if name == "step" and (options.explain or options.autotune):
        name = "cost" if options.explain else "autotune"
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items() if key != "out"}
    return {"benchmark": name, "config": settings} | RUN[name](work, options)


def check_device(device: str) -> None:
    """One line where there is no GPU; and on a CPU none is seen by anybody."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode:
        refuse("--device cuda: torch sees no CUDA device here: use --device cpu")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    made: dict[str, argparse.ArgumentParser] = {}
    for name in ("ingest", "loader", "step", "e2e", "embed", "start", "scaling", "suite"):
        made[name] = command = commands.add_parser(name, formatter_class=Help)
        command.add_argument("--out", type=Path, help="the record (default: benchmarks/results/BENCHMARK_MACHINE_DATE.json)")
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        repeats = 3 if name in ("step", "embed", "start", "suite") else 5
        turns = {"default": None, "help": "turns (default: 60 on a CPU, 5 on a GPU)"} if name == "e2e" else {"default": repeats}
        command.add_argument("--repeats", type=positive, **turns)  # type: ignore[arg-type]
    for name in ("ingest", "loader", "e2e", "embed", "start"):
        made[name].add_argument("--only", type=regex, metavar="REGEX", default="", help="cases whose name matches")
    for name, records in {"ingest": 2000, "loader": 2000, "e2e": 600, "embed": 600, "suite": 1000}.items():
        made[name].add_argument("--records", type=positive, default=records, help="size of the synthetic archive")
    made["ingest"].add_argument("--headers", type=positive, default=1_000_000, help="of the large plan")
    made["loader"].add_argument("--seconds", type=float, default=3, help="of one run, warm-up aside")
    made["loader"].add_argument("--sizes", action="store_true", help="batches of 64 to 1024, 1 and 2 threads, for every case")
    made["loader"].add_argument("--alone", action="store_true", help="our backends, without peers; always so on a GPU")
    made["scaling"].add_argument("--huge", type=positive, default=10_000_000, help="crops of the dataset")
    made["start"].add_argument("--steps", type=positive, default=150, help="of the whole quick start")
    made["suite"].add_argument("--minutes", type=float, default=15, help="what has not begun by then is left out")
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
    for name, steps in {"e2e": None, "scaling": 10}.items():
        made[name].add_argument("--steps", type=positive, default=steps, help="of one turn (default: 2 on a CPU, 20 on a GPU)")
    options = parser.parse_args(arguments)
    if options.repeats is not None and options.repeats < 3:
        refuse(f"--repeats {options.repeats}: fewer than 3 show no spread")
    return options


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, 1 or more")
    return int(text)


def regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}: no regular expression: {error}") from None
    return text


def of_step(command: argparse.ArgumentParser) -> None:
    how = command.add_mutually_exclusive_group()
    how.add_argument("--explain", action="store_true", help="stage by stage beside the cost model")
    how.add_argument("--autotune", action="store_true", help="the fastest settings on this machine")
    how.add_argument("--brief", action="store_true", help="fewer cases: what a GPU's owner asks first")
    command.add_argument("--model", default="paper", help=MODEL)
    command.add_argument("--batches", type=int, nargs="+", help="crops of a micro-batch (default: 4 on a CPU, 64 256 on a GPU)")
    command.add_argument("--steps", type=int, help="counted steps of one run (default: 2 on a CPU, 20 on a GPU)")
    command.add_argument("--threads", type=int, default=2, help="of torch on a CPU")
    ways = ("eager", "layers", "step")
    command.add_argument("--compiled", choices=ways, nargs="+", help="by torch.compile (default: eager on a CPU, else all)")
    command.add_argument("--precision", choices=("fp32", "autocast", "bf16"), default="bf16", help="of --explain, --autotune")
    command.add_argument("--machine", choices=("this", "h200", "a100"), default="this", help="of --explain")
    command.add_argument("--peak-tflops", type=float, help="of --explain: instead of the machine's")
    command.add_argument("--bandwidth-gb", type=float, help="of --explain: GB a second, instead of the machine's")


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
    opened, threads = Dataset.open(str(dataset)), max(2, len(os.sched_getaffinity(0)) // 4)
    cases = (
        feed.cases(dataset, options.device, threads) if alone else loader.cases(dataset, work, options.seconds, options.sizes)
    )
    results = run_cases(only(cases, options.only), options.repeats, say, left_out, in_one_process=alone)
    given = {"archive": "synthetic", "crops": len(opened), "dataset": opened.fingerprint}
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
    **{name: late(name) for name in ("scaling", "step", "autotune", "e2e", "embed", "start", "suite")},
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
        "git": {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))},
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
    """As nvidia-smi says; none where there is no nvidia-smi, or where GPUs were hidden."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    query = ("nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(GPU_FACTS, (part.strip() for part in line.split(",")), strict=True)) for line in answer.splitlines()]


def installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def git(*arguments: str) -> str:
    answer = subprocess.run(("git", *arguments), cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return answer.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
