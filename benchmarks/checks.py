"""What a suite does beside measuring: is all there, does everything run, where does a step of the loop wait, does it learn?

Each function runs in a process of its own, which benchmarks.suite starts; what it returns stands in the record under its name.
"""

import importlib
import json
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import e2e, embed, step
from benchmarks.e2e import Setup
from benchmarks.measure import CaseError, gpu_peak_mb
from benchmarks.step import Run
from data_tools import synth
from data_tools.build import ShardOptions, shard
from data_tools.sources import open_sources

ROOT = Path(__file__).parents[1]
NEEDED = ("torch", "numpy", "scipy", "pyarrow", "pydantic", "psutil", "wfdb", "google_crc32c", "safetensors", "tensorboard")
NEEDED += ("deepspeed", "engine.pretrain", "engine.embed", "engine.model.kernels.short", "benchmarks.stages")
OPTIONAL = ("triton", "nvidia.dali", "zarr", "soundfile", "webdataset", "s3fs", "moto", "distributed", "pytest")
KERNELS = 25  # of a profile
Found = dict[str, Any]


def install() -> Found:
    """Imports: versions and seconds. What training needs must be there."""
    found: Found = {}
    lacking = []
    for name in (*NEEDED, *OPTIONAL):
        began = time.monotonic()
        try:
            told = str(getattr(importlib.import_module(name), "__version__", "there"))
        except Exception as error:  # whatever a broken package raises
            told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            lacking += [f"{name}: {told}"] if name in NEEDED else []
        found[name] = f"{told} ({time.monotonic() - began:.1f} s)"
        print(name, found[name], flush=True)
    if lacking:
        raise CaseError("; ".join(lacking))
    return {"imports": found}


def dataset(work: Path, records: int, workers: int) -> Found:
    """work/dataset: about so many synthetic records, in the paper's roles."""
    for name in ("archive", "dataset"):  # of one that was stopped
        shutil.rmtree(work / name, ignore_errors=True)
    synth.synthesise(work / "archive", patients=max(60, records // 3), seed=11, workers=workers, progress=False)
    made = shard(open_sources(str(work / "archive")), ShardOptions(str(work / "dataset"), workers=workers, quiet=True))
    shutil.rmtree(work / "archive")
    return {"crops": len(made), "dataset": made.fingerprint}


def smoke(setup: Setup) -> Found:
    """Two steps and a checkpoint, an exported model and a report."""
    settings = ("train.steps=2", "train.compile=eager", "train.log_every=1", "augment.rlm=0.5", "train.peak_tflops=1")
    e2e.trained(setup, f"{setup.run}.txt", *settings)
    return {"log": (Path(setup.run) / "metrics.jsonl").read_text().splitlines()[-1]}


def tests(file: str) -> Found:
    """`pytest -m gpu` of a file. On a machine without a GPU they are skipped, and it says so."""
    command = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--no-header", "-rA", file)
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines += [line.strip()] if line.strip() else []
    if process.returncode:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise CaseError("; ".join([*lines[-1:], *failed]) or "pytest said nothing")
    return {"said": lines[-1]}


def gpu_test_files() -> list[str]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "pytest.mark.gpu" in path.read_text()]


def profile(setup: Setup, record: Path, runs: Sequence[Run]) -> Found:
    """Steps of the real loop: milliseconds on the host and in all, what waits for the device, and the kernels."""
    return e2e.turns(fastest(setup, record, runs), take=look)


def look(loop: Any, setup: Setup, train: Callable[[Any], bool]) -> Found:
    import torch

    cuda = setup.device == "cuda"
    kept = e2e.Kept(loop.loader)
    loop._save, loop._diagnose = (lambda: None), (lambda batch: None)

    def steps(count: int, wait: bool = True) -> float:
        loop.loader, loop.total = kept, loop.progress.step + count
        train(loop)
        host = time.perf_counter()
        if cuda and wait:
            torch.cuda.synchronize()
        return host

    steps(3)
    rows = []
    for _ in range(3):
        began = time.perf_counter()
        host = steps(setup.steps)
        rows.append([1e3 * (at - began) / setup.steps for at in (time.perf_counter(), host)])
    found: Found = dict(zip(("step_ms", "host_ms"), sorted(rows)[1], strict=True))
    found |= {"crops": setup.batch, "backend": kept.loader.backend, "settings": list(setup.settings)}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        steps(2, wait=False)
        if cuda:
            torch.cuda.set_sync_debug_mode("default")
    said = [f"{Path(w.filename).name}:{w.lineno}: {str(w.message).splitlines()[0][:120]}" for w in seen]
    found["waits_of_two_steps"] = {each: said.count(each) for each in sorted(set(said))}
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities) as profiled:
        steps(2)
    found |= kernels(profiled.key_averages(), cuda) | gpu_peak_mb()
    profiled.export_chrome_trace(f"{setup.run}.trace.json.gz")
    del loop._save
    loop._save()  # a run ends with a checkpoint
    return found


def kernels(events: Any, cuda: bool) -> Found:
    """The longest of two steps, in milliseconds a step; on a CPU operators."""
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    ran = [event for event in events if not cuda or str(event.device_type).endswith("CUDA")]
    ran.sort(key=lambda event: -getattr(event, key))
    longest = [{"ms": getattr(e, key) / 2e3, "calls": e.count / 2, "name": e.key[:160]} for e in ran[:KERNELS]]
    for row in longest:
        print(f"{row['ms']:10.3f} ms {row['calls']:6.0f} calls  {row['name']}", flush=True)
    return {"busy_ms": sum(getattr(event, key) for event in ran) / 2e3, "kernels": longest}


def train(setup: Setup, record: Path, runs: Sequence[Run], seconds: float) -> Found:
    """So many seconds of training, and what a linear probe says of its embeddings and of random weights'."""
    from engine.embed import main
    from engine.training.loop import Loop

    setup = fastest(setup, record, runs)

    def for_seconds(loop: Loop) -> bool:
        timer = threading.Timer(seconds, lambda: setattr(loop, "total", loop.progress.step + 1))
        timer.daemon = True
        timer.start()
        return original(loop)

    original, Loop.train = Loop.train, for_seconds  # type: ignore[method-assign]
    e2e.trained(setup, f"{setup.run}.txt", "train.steps=1000000", "train.log_every=10", "train.validate_every=250")
    lines = (Path(setup.run) / "metrics.jsonl").read_text().splitlines()
    embed.untrained(Path(f"{setup.run}-random"), setup.model)
    found: Found = {"first": json.loads(lines[0]), "last": json.loads(lines[-1])}
    for name, model in (("trained", setup.run), ("random", f"{setup.run}-random")):
        scores = f"{setup.run}-{name}.json"
        words = ["--model", model, "--data", setup.dataset, "--probe", "--json", scores, "--device", setup.device]
        if main([*words, "--precision", e2e.precision()]):
            raise CaseError(f"the probe of {name} weights failed")
        found[name] = json.loads(Path(scores).read_text())
    return found


def fastest(setup: Setup, record: Path, runs: Sequence[Run]) -> Setup:
    """With the settings of the fastest of `runs` that the record has."""
    parts = json.loads(record.read_text())["parts"] if record.exists() else []
    best = next((step.fastest(part["results"], runs) for part in parts if part["benchmark"] == "step"), None)
    return replace(setup, batch=best.batch, settings=(*setup.settings, *step.settings(best))) if best else setup
