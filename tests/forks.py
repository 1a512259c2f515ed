"""Processes of their own for tests, forked from one that has imported what is heavy: none of them pays for it again.

It starts with the first of them, and a process of the tests has but one: whatever they need is named here.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
HEAVY = [
    "engine.training.train",
    "engine.training.pretraining",
    "engine.training.finetuning",
    "engine.evaluation.evaluation_report",
    "engine.evaluation.embedding",
    "engine.evaluation.results",
    "engine.reproduction.run",
    "deepspeed",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # DeepSpeed imports it, and with it torch's compiler
    "data_tools.build",
    "data_tools.verify",
    "distributed.cli.dask_worker",
    "distributed.cli.dask_scheduler",
    "tests.frozen",
]
CONTEXT.set_forkserver_preload(HEAVY)


def started(call: Callable[..., Any], *arguments: Any, out: Path | str, env: Mapping[str, str] | None = None) -> Any:
    """A process for call(*arguments), whose exit code is what that returns; what it prints is appended to `out`."""
    process = CONTEXT.Process(target=_run, args=(call, arguments, str(out), dict(env or {})))
    process.start()
    return process


def _run(call: Callable[..., Any], arguments: tuple[Any, ...], out: str, env: dict[str, str]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which the server may have begun with
    os.environ.update(env)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
    code = call(*arguments)
    sys.stdout.flush()
    os._exit(int(code or 0))
