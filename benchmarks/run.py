"""Measure this machine and write one record.

python -m benchmarks.run ingest [--out F.json] [--repeats 5] [--records 2000]
python -m benchmarks.run loader [--out F.json] [--repeats 5] [--records 2000] [--seconds 3]
python -m benchmarks.run step [--out F.json] [--repeats 3] [--device cpu|cuda] [--batches 4 8] [--compiled]
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import ingest, loader, scaling
from benchmarks.measure import in_fresh_process, run_cases, summary
from data_tools.dataset import Dataset

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "numpy",
    "scipy",
    "pyarrow",
    "zarr",
    "wfdb",
    "google-crc32c",
    "torch",
    "webdataset",
    "nvidia-dali-cuda130",
    "mosaicml-streaming",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("benchmark", choices=tuple(BENCHMARKS))
    parser.add_argument("--out", type=Path, help="the record (benchmarks/results/<benchmark>_<cpu>_<date>.json)")
    parser.add_argument("--repeats", type=int, help="counted runs of each case (5; step: 3)")
    parser.add_argument("--records", type=int, default=2000, help="ingest, loader: size of the synthetic archive (2000)")
    parser.add_argument("--headers", type=int, default=1_000_000, help="ingest: headers of the large plan (1000000)")
    parser.add_argument("--seconds", type=float, default=3, help="loader: how long one run lasts, warm-up aside (3)")
    parser.add_argument("--huge", type=int, default=10_000_000, help="scaling: crops of the dataset (10000000)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="step: where (cpu)")
    parser.add_argument("--batches", type=int, nargs="+", help="step: crops of a micro-batch (cpu: 4; cuda: 64 256)")
    parser.add_argument("--steps", type=int, help="step: counted steps of one run (cpu: 2; cuda: 20)")
    parser.add_argument("--threads", type=int, default=2, help="step: threads of torch (2)")
    parser.add_argument("--compiled", action="store_true", help="step: torch.compile too, minutes more a run on a CPU")
    options = parser.parse_args()
    options.repeats = REPEATS.get(options.benchmark, 5) if options.repeats is None else options.repeats
    if options.repeats < 3:
        parser.exit(2, f"benchmarks.run: --repeats {options.repeats}: fewer than 3 show no spread\n")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    record = environment() | {"benchmark": options.benchmark, "config": settings}
    with tempfile.TemporaryDirectory(prefix="omnilead-bench-") as place:
        record |= BENCHMARKS[options.benchmark](Path(place), options)
    name = f"{options.benchmark}_{record['hardware']['cpu_short']}_{record['date'][:10]}.json"
    out: Path = options.out or RESULTS / name
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{out}: {len(record['results'])} results")


def run_ingest(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    say(f"an archive of {options.records} records")
    archive = ingest.prepare(work, options.records)
    results = run_cases(ingest.cases(archive, work), options.repeats, say)
    say(f"a plan of {options.headers:,} headers")
    results["plan: headers in memory"] = summary([in_fresh_process(ingest.plan_in_memory, options.headers, warm_up=False)])
    return {"input": ingest.facts(archive, work), "results": results}


def run_loader(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    say(f"a dataset of about {options.records} crops")
    dataset = loader.prepare(work, options.records)
    opened = Dataset.open(str(dataset))
    results = run_cases(loader.cases(dataset, work, options.seconds), options.repeats, say)
    return {"input": {"archive": "synthetic", "crops": len(opened), "dataset": opened.fingerprint}, "results": results}


def run_scaling(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    say(f"a dataset of {options.huge:,} crops that are zeros")
    dataset = scaling.prepare(work, options.huge)
    results = run_cases(scaling.cases(dataset), options.repeats, say)
    say("shuffle quality")
    facts = {"archive": "zeros", "crops": options.huge, "dataset": Dataset.open(str(dataset)).fingerprint}
    return {"input": facts, "results": results, "shuffle_quality": scaling.shuffle_quality(dataset)}


def run_step(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import step  # here, since it imports torch

    return step.measure(work, options, say)


BENCHMARKS = {"ingest": run_ingest, "loader": run_loader, "scaling": run_scaling, "step": run_step}
REPEATS = {"step": 3}


def say(text: str) -> None:
    print(f"benchmark: {text}", file=sys.stderr, flush=True)


def environment() -> dict[str, Any]:
    """Everything without which a number means nothing."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    return {
        "format": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))},
        "hardware": {
            "cpu": cpu,
            "cpu_short": "-".join(cpu.lower().split()[:2]) or platform.machine(),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "load_before": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES if find(name)},
        "page_cache": "warm: each case runs once uncounted in its own process",
    }


def find(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def git(*arguments: str) -> str:
    answer = subprocess.run(("git", *arguments), cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return answer.stdout.strip()


if __name__ == "__main__":
    main()
