"""Workers: processes of this machine, of other hosts by ssh, of a Slurm array; all run `engine.reproduce ... --worker`.

    watch(local(arguments, jobs=4, stop=PATH), ...)      lines of the workers, a bar, until all have ended
    slurm_script(arguments, jobs, out)                   the text for sbatch

Hosts share DIR, the dataset and the project by the same paths; nothing else passes between them.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from engine.common import ConfigError
from engine.reproduction.work import LIBC, PR_SET_PDEATHSIG, ROOT, environment

COMMAND = (sys.executable, "-m", "engine.reproduce")
POLL_S = 0.5


@dataclass
class Started:
    name: str
    process: subprocess.Popen[str]


def local(arguments: Sequence[str], jobs: int, stop: Path) -> list[Started]:
    """Each with its share of the cores, and of the GPUs."""
    devices = visible_devices()
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    started = []
    for number in range(jobs):
        env = {"OMP_NUM_THREADS": str(threads)} | environment()  # what the user has set counts
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        command = [*COMMAND, *arguments, "--worker", str(stop)]
        started.append(_start(f"worker {number + 1}" if jobs > 1 else "", command, env))
    return started


def visible_devices() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(torch.cuda.device_count())] if named is None else [name for name in named.split(",") if name]


def read_hosts(path: Path) -> list[str]:
    """One a line; # begins a remark."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"--hosts {path}: {error.strerror}: give a file with one host a line") from None
    hosts = [host for line in lines if (host := line.partition("#")[0].strip())]
    if not hosts:
        raise ConfigError(f"--hosts {path}: names no host: write one a line")
    for host in hosts:
        if host.startswith("-") or any(c.isspace() for c in host):
            raise ConfigError(f"--hosts {path}: {host!r} is no host: write one a line, as ssh takes it")
    return hosts


def by_ssh(arguments: Sequence[str], hosts: Sequence[str], stop: Path) -> list[Started]:
    remote = f"cd {shlex.quote(str(ROOT))} && exec {shlex.join([*COMMAND, *arguments, '--worker', str(stop)])}"
    try:
        return [_start(host, ["ssh", "-o", "BatchMode=yes", host, remote], dict(os.environ)) for host in hosts]
    except FileNotFoundError:
        raise ConfigError("--hosts: there is no ssh here: install it, or use --jobs") from None


def _start(name: str, command: Sequence[str], env: dict[str, str]) -> Started:
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True, preexec_fn=_stop_with_parent,
    )  # fmt: skip
    return Started(name, process)


def _stop_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def watch(started: Sequence[Started], stop: Path, jobs: int, done: Callable[[], int]) -> bool:
    """Until all have ended; whether somebody asked to stop, which `stop` passes on to hosts that no signal reaches."""
    asked: list[int] = []
    before = [signal.signal(number, lambda number, _: asked.append(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    readers = [threading.Thread(target=_pass_on, args=(worker,), daemon=True) for worker in started]
    bar = tqdm(total=jobs, initial=done(), unit="job", disable=None)
    try:
        for reader in readers:
            reader.start()
        while any(worker.process.poll() is None for worker in started):
            if asked and not stop.exists():
                stop.touch()
                tqdm.write("stopping: each job writes a checkpoint first", file=sys.stderr)
            bar.update(done() - bar.n)
            time.sleep(POLL_S)
        for reader in readers:
            reader.join(5)
        bar.update(done() - bar.n)
    finally:
        bar.close()
        stop.unlink(missing_ok=True)
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
    return bool(asked)


def _pass_on(worker: Started) -> None:
    stream: Any = worker.process.stdout
    for line in stream:
        tqdm.write(f"{worker.name}: {line.rstrip()}" if worker.name else line.rstrip())
    code = worker.process.wait()
    if code not in (0, 1):
        tqdm.write(f"{worker.name or 'worker'}: ended with {code}; the others go on")


def slurm_script(arguments: Sequence[str], jobs: int, out: Path, name: str) -> str:
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{jobs - 1}
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output={out / "jobs" / "slurm-%A-%a.out"}
# Edit the resources above. Each task takes jobs until none is left; five minutes before the end of its time it writes a
# checkpoint. Submit the file again to go on.
cd {shlex.quote(str(ROOT))} || exit 2
exec {shlex.join([*COMMAND, *arguments, "--worker"])}
"""
