"""Training runs for tests: one rank in this process; several, or a patched one, in processes
forked from one that has imported everything."""

import contextlib
import gc
import importlib.metadata
import json
import os
import time
from dataclasses import dataclass
from functools import cache
from unittest import mock

import torch

from benchmarks.measure import reserve_port
from omnilead.__main__ import main
from omnilead.downstream.reports import run_report
from omnilead.engine.settings import commandline
from omnilead.engine.settings.files import CONFIGS
from tests.forks import started
from tests.waiting import HANG_S

TINY = """
model: {conv: [[8, 4], [8, 4], [8, 1]], width: 16, layers: 2, heads: 2, ffn: 32, position_kernel: 8, position_groups: 2,
        codes: 8, code_width: 8, projection: 8, tau_decay: 0.9}
train: {steps: 6, batch_crops: 8, precision: fp32, lr: 1e-3, clip_norm: 1.0, log_every: 1, peak_tflops: 1.0, timeout_s: 600}
"""
TUNING = """
base: TASK
train: {steps: 4, batch_crops: 8, precision: fp32, lr: 1e-3, validate_every: 2, log_every: 1, peak_tflops: 1.0, timeout_s: 600}
"""
EXACT = ["step", "crops_seen", "epoch", "loss", "loss_local", "loss_global", "lr", "grad_norm"]
EXACT += ["gumbel_tau", "accuracy_local"]
VERSION = cache(importlib.metadata.version)
STILL = {f"model__{name}dropout": 0 for name in ("", "attention_", "input_", "feature_")}


@dataclass
class Ended:
    codes: list
    output: str  # of all ranks

    @property
    def ok(self):
        return all(code == 0 for code in self.codes)

    def good(self):
        assert self.ok, self.output
        return self.output

    def one_line(self, code=2):
        """No launcher ends the other ranks here, so each says why it fails."""
        lines = set(self.output.splitlines())
        assert set(self.codes) == {code} and len(lines) == 1, self.output
        assert self.output.count("\n") <= len(self.codes), self.output
        return f"{lines.pop()}\n"

    def last_line(self, *codes):
        """Of a run that failed with these codes after it had begun."""
        assert self.codes == list(codes) and "Traceback" not in self.output, self.output
        return self.output.splitlines()[-1]


RESERVED = []


def free_port():
    RESERVED.append(reserve_port())  # while this process lives
    return int(RESERVED[-1].getsockname()[1])


def train(arguments, before=None):
    torch.set_num_threads(1)
    commandline.OTHER_RANKS_WAIT_S = 0
    if before:
        before()
    command = "finetune" if "task.yaml" in " ".join(arguments) else "pretrain"
    return main([command, *arguments])


def without_charts(arguments, before):
    """In a process of its own."""
    run_report.report_page = drawn_nothing
    return train(arguments, before)


def drawn_nothing(*_):
    """The charts are most of a tiny run's time."""
    return ""


def nothing():
    """For `before`: a process of its own, with nothing patched."""


def start(tmp, arguments, world=1, before=None, **env):
    common = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    } | env
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    words, out = list(arguments), tmp / "out.txt"
    return [started(without_charts, words, before, out=out, env=env) for env in ranks]


def wait(tmp, processes):
    end = time.monotonic() + HANG_S
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    for process in processes:  # one that hangs does not outlive its test
        process.kill()
        process.join()
    output = (tmp / "out.txt").read_text() if (tmp / "out.txt").exists() else ""
    return Ended([process.exitcode for process in processes], output)


def run(tmp, arguments, world=1, before=None, **env):
    (tmp / "out.txt").unlink(missing_ok=True)
    if world > 1 or before or env:
        return wait(tmp, start(tmp, arguments, world, before, **env))
    with (
        open(tmp / "out.txt", "w", buffering=1) as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        mock.patch.dict(os.environ),
        mock.patch.object(gc, "collect"),  # of all that the tests have imported
        mock.patch.object(importlib.metadata, "version", VERSION),
        mock.patch.object(run_report, "report_page", drawn_nothing),
    ):
        code = train(arguments)
    return Ended([code], (tmp / "out.txt").read_text())


def settings(tmp, dataset, run="run", **changes):
    """Arguments for a tiny model; changes as train__steps=3."""
    (tmp / "tiny.yaml").write_text(TINY)
    return _settings(tmp, "tiny.yaml", dataset, run, changes)


def tuning(tmp, dataset, begin, task, run="run", **changes):
    """Arguments of a fine-tuning."""
    (tmp / "task.yaml").write_text(TUNING.replace("TASK", f"{CONFIGS}/tasks/{task}.yaml"))
    return _settings(tmp, "task.yaml", dataset, run, {"start": str(begin)} | changes)


def _settings(tmp, config, dataset, run, changes):
    sets = {"run": str(tmp / run), "data.datasets": [dataset]}
    sets |= {name.replace("__", "."): value for name, value in changes.items()}
    words = [f"{key}={json.dumps(value)}" for key, value in sets.items()]
    return ["--config", str(tmp / config), "--set", *words]


def pretrain(tmp, dataset, name="run", world=1, before=None, **changes):
    return run(tmp, settings(tmp, dataset, name, **changes), world, before)


def finetune(tmp, dataset, begin, task, name="run", world=1, **changes):
    return run(tmp, tuning(tmp, dataset, begin, task, name, **changes), world)


def rows(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def curve(run, keys=EXACT):
    """The logged values that must be equal bit for bit."""
    return [{key: row[key] for key in keys} for row in rows(run)]


def column(run, key="step", name="metrics.jsonl"):
    return [row[key] for row in rows(run, name)]
