"""docs/clusters.md: its scripts run as they stand, with stand-ins for Slurm's programs."""

import contextlib
import json
import logging
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest
import yaml
from torch.distributed.run import get_args_parser

from omnilead.engine.training.loop import Loop
from tests.engine.training.launching import launch
from tests.engine.training.ranks import STILL, run, settings
from tests.forks import started
from tests.pages import PAGES, blocks
from tests.parsers import parse
from tests.waiting import HANG_S, until

ROOT = Path(__file__).parents[1]
PAGE = PAGES["docs/clusters.md"]
BLOCKS = dict(re.findall(r"```\w+\n(?=(?:#![^\n]*\n)?# (\S+)\n)(.*?)```", PAGE, re.DOTALL))
# A task for each node. As in Slurm 22.05: SIGTERM to srun kills all tasks at once; with
# --kill-on-bad-exit one that fails ends the others with SIGTERM, even if they had one, and after KillWait with SIGKILL
SRUN = """
import os, pathlib, signal, subprocess, sys, time
words, strict = sys.argv[1:], "--kill-on-bad-exit=1" in sys.argv
while words[0].startswith("-"):
    del words[0]
tasks = []
for rank in range(int(os.environ["SLURM_NNODES"])):
    own = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)}
    tasks.append(subprocess.Popen(words, env=os.environ | own))
pathlib.Path("step-" + os.environ["SLURM_JOB_ID"]).write_text(" ".join(str(task.pid) for task in tasks))
def send(number):
    for task in tasks:
        task.send_signal(number)
signal.signal(signal.SIGTERM, lambda *_: send(signal.SIGKILL))
codes, killed_at = [None], None
while None in codes:
    time.sleep(0.05)
    codes = [task.poll() for task in tasks]
    if strict and any(codes) and killed_at is None:
        send(signal.SIGTERM)
        killed_at = time.monotonic() + float(os.environ["KILL_WAIT"])
    if killed_at and time.monotonic() > killed_at:
        send(signal.SIGKILL)
sys.exit(max(map(abs, codes)))
"""
# To the tasks of the job's step, not to its script
SCANCEL = """
import os, signal, sys
how, job = sys.argv[1:]
for task in open("step-" + job).read().split():
    os.kill(int(task), getattr(signal, "SIG" + how.removeprefix("--signal=")))
"""
SCONTROL = """
import os, sys
if sys.argv[1:] == ["show", "hostnames", "nodes[0-1]"]:
    print("localhost\\nlocalhost-2")
else:
    open("requeued", "a").write(" ".join(sys.argv[1:]) + "\\n")
"""
# Instead of an interpreter that imports PyTorch: this test forks the launcher, with its words and environment
LAUNCHER = """
import json, os, signal, socket, sys
tests = socket.socket(socket.AF_UNIX)
tests.connect(os.environ["TESTS"])
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: tests.send(b"%d\\n" % number))
told = os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd(), os.readlink("/proc/self/fd/1"), dict(os.environ)
tests.sendall(json.dumps(told).encode() + b"\\n")
sys.exit(int(tests.makefile().readline()))
"""


def launched(launcher, words, folder):
    """The ranks wait before a step until the file `GATE` allows it. The first that finds a file beside it
    dies."""
    os.chdir(folder)
    for name in logging.root.manager.loggerDict:  # which had no LOGLEVEL when they were imported
        if "torch.distributed.elastic" in name:
            logging.getLogger(name).setLevel(os.environ.get("LOGLEVEL", "WARNING"))
    step = Loop._step

    def gated(self, batch):
        gate = Path(os.environ["GATE"])
        with contextlib.suppress(FileNotFoundError):
            gate.with_name("death").unlink()
            os._exit(1)
        while self.progress.step >= int(gate.read_text() or 0) and not self.terminated:
            time.sleep(0.01)
        return step(self, batch)

    if "GATE" in os.environ:
        Loop._step = gated
    launch(launcher, words)


class Forks(socketserver.StreamRequestHandler):
    """Forks what a LAUNCHER asks for, passes its signals on, and tells how it ended."""

    one_at_a_time = threading.Lock()  # starting a process looks after all others

    def handle(self):
        launcher, words, folder, out, env = json.loads(self.rfile.readline())
        with self.one_at_a_time:
            process = started(launched, launcher, words, folder, out=out, env=env)
        while process.sentinel not in wait([process.sentinel, self.connection]):
            number = self.rfile.readline()
            os.kill(process.pid, int(number or signal.SIGKILL))
        with self.one_at_a_time:
            process.join()
        with contextlib.suppress(OSError):  # nobody listens
            self.wfile.write(b"%d\n" % abs(process.exitcode))


@pytest.fixture
def shell(tmp_path):
    """Starts a script of the page, which ends with the test."""
    programs, running = tmp_path / "bin", []
    programs.mkdir()
    made = {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL, "torchrun": LAUNCHER}
    for name, text in made.items():
        (programs / name).write_text(f"#!{sys.executable} -S\n{text.lstrip()}")
    for program in programs.iterdir():
        program.chmod(0o755)
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    forks = socketserver.ThreadingUnixStreamServer(str(tmp_path / "tests"), Forks)
    serving = threading.Thread(target=forks.serve_forever)
    serving.start()
    common = {
        **os.environ,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join([*paths, str(ROOT)]),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "TESTS": forks.server_address,
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "nodes[0-1]",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_ID": str(free_port()),
        "KILL_WAIT": "30",
    }

    def start(script, *words, out="out.txt", **env):
        (tmp_path / script).write_text(BLOCKS[script])
        with open(tmp_path / out, "a") as log:
            command = ["bash", script, *map(str, words)]
            running.append(
                subprocess.Popen(
                    command,
                    cwd=tmp_path,
                    env=common | env | {"STARTED_BY": f"{os.getpid()}-{id(command)}"},
                    stdout=log,
                    stderr=log,
                )
            )
        return running[-1]

    yield start
    for process in running:
        kill_all(process)
    forks.shutdown()
    serving.join()
    forks.server_close()


def kill_all(process):
    """With all that it has started; a LAUNCHER's forks die with it."""
    mark = b"STARTED_BY=%d-%d" % (os.getpid(), id(process.args))
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
    process.wait()


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def free_port():
    """The script's for a job of this number: below those that systems give away."""
    return next(port for port in range(20000 + os.getpid() % 9000, 30000) if not listens(port))


def tiny(folder, dataset, name="run", **changes):
    return settings(folder, dataset.root.url, name, **STILL, **changes)


def log(folder, name="out.txt"):
    return (folder / name).read_text()


def rows(folder, name="run"):
    path = folder / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_no_block_of_the_page_is_left_out_here():
    assert len(BLOCKS) == len([*blocks("docs/clusters.md")]) == 3


@pytest.mark.slow
def test_a_job_is_stopped_before_its_time_limit_requeued_and_goes_on(shell, dataset, tmp_path):
    words, gate = tiny(tmp_path, dataset, train__steps=5), tmp_path / "gate"
    gate.write_text("2")
    job = shell("pretrain.sbatch", *words, GATE=str(gate))
    until(lambda: len(rows(tmp_path)) == 2 or job.poll() is not None)
    os.kill(job.pid, signal.SIGUSR1)  # to the batch shell alone, as with B:
    assert job.wait(HANG_S) != 0, log(tmp_path)
    assert (tmp_path / "requeued").read_text().startswith("requeue "), log(tmp_path)
    saved = (tmp_path / "run" / "checkpoints" / "latest").read_text()
    assert re.search("[2-4]$", saved.strip()), saved
    gate.write_text("99")
    gate.with_name("death").touch()  # of a rank, which torchrun starts again
    assert shell("pretrain.sbatch", *words, GATE=str(gate)).wait(HANG_S) == 0, log(tmp_path)
    output = log(tmp_path)
    assert output.count("2 x cpu") >= 3 and output.count("resumes after step") >= 2
    assert not gate.with_name("death").exists()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]
    assert len((tmp_path / "requeued").read_text().splitlines()) == 1


def test_a_node_that_dies_and_returns_changes_no_loss(shell, dataset, tmp_path):
    """2 ranks, 1, 2 again. The gate decides in which steps."""
    steps, gate = 8, tmp_path / "gate"
    port = free_port()
    # A node is lost after 10 s. After 3, a busy machine loses the living: they no longer meet
    soon = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10"
    how = {
        "HEAD": f"localhost:{port}",
        "NODES": "1:2",
        "GPUS": "1",
        "RDZV": soon,
        "LOGLEVEL": "INFO",
    }
    words = tiny(tmp_path, dataset, train__steps=steps, train__save_every_steps=1)
    gate.write_text("0")
    how["GATE"] = str(gate)
    first = shell("elastic.sh", *words, out="first.txt", **how)
    until(lambda: listens(port))  # the first keeps the rendezvous
    lost = shell("elastic.sh", *words, out="second.txt", **how)
    names = "first.txt", "second.txt", "third.txt"
    until(lambda: "2 x cpu" in "".join(log(tmp_path, name) for name in names[:2]))
    gate.write_text("3")
    latest = tmp_path / "run" / "checkpoints" / "latest"
    # Else the first waits for the part of the other (checkpoint.LOST_RANKS_WAIT_S)
    until(lambda: first.poll() is not None or (latest.exists() and latest.read_text() == "step-3"))
    assert first.poll() is None, log(tmp_path, "first.txt")
    kill_all(lost)
    gate.write_text("5")
    until(lambda: len(rows(tmp_path)) == 5 or first.poll() is not None)
    assert first.poll() is None, log(tmp_path, "first.txt")
    back = shell("elastic.sh", *words, out="third.txt", **how)
    until(lambda: "Detected 1 new nodes" in log(tmp_path, "first.txt"))
    gate.write_text("99")
    codes = [first.wait(HANG_S), back.wait(HANG_S)]
    output = "".join(log(tmp_path, name) for name in names)
    assert codes == [0, 0], output
    assert output.count("2 x cpu") >= 2 and "1 x cpu" in output and "resumes after step" in output
    run(tmp_path, tiny(tmp_path, dataset, "whole", train__steps=steps)).good()
    two, one = rows(tmp_path), rows(tmp_path, "whole")
    for key in ("step", "crops_seen"):
        assert [row[key] for row in two] == [row[key] for row in one]
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([row[key] for row in two], [row[key] for row in one], rtol=1e-4)


def test_the_job_of_kubernetes_is_complete_and_its_command_parses():
    service, job = yaml.safe_load_all(BLOCKS["job.yaml"])
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = get_args_parser().parse_args(container["command"][1:])
    assert spec["completionMode"] == "Indexed" and container["command"][0] == "torchrun"
    assert args.nnodes == str(spec["completions"]) == str(spec["parallelism"])
    assert int(args.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert args.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    assert args.max_restarts > 0
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    host = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert args.rdzv_endpoint == f"{host}:29500" and pod["subdomain"] == service["metadata"]["name"]
    assert args.training_script == "omnilead.engine.pretrain"
    assert parse("pretrain", args.training_script_args).out == "/data/RUN"
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
