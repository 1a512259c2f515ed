"""Separate processes for tests, forked from a server that has already imported the heavy packages.

The server starts with the first of them. A test process has only one, so all heavy packages are
listed here.
"""

import contextlib
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from tests.waiting import HANG_S

CONTEXT = multiprocessing.get_context("forkserver")
HEAVY = [
    "omnilead.engine.training.train",
    "omnilead.engine.training.pretraining",
    "omnilead.downstream.finetuning.task",
    "omnilead.downstream.reports.evaluation_report",
    "omnilead.downstream.inference.commands",
    "omnilead.downstream.evaluation.results",
    "omnilead.downstream.reproduce.start",
    "deepspeed",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "deepspeed.runtime.zero.stage3",
    # DeepSpeed imports it and thereby torch's compiler
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "omnilead.data_tools.sharding.shard",
    "omnilead.data_tools.sharding.verify",
    "pyarrow.dataset",
    "distributed.cli.dask_worker",
    "distributed.cli.dask_scheduler",
    "tests.unsynced",
    "tests.engine.training.ranks",  # with scipy.stats
    "tests.downstream.evaluate.conftest",  # with pytest, hypothesis and scikit-learn
]
CONTEXT.set_forkserver_preload(["tests.preloaded"])
FREEZE = gc.freeze


def started(call, *arguments, out, env=None):
    """Start a process for call(*arguments). Its exit code is the return value; its output is
    appended to `out`."""
    process = CONTEXT.Process(target=_run, args=(call, arguments, str(out), dict(env or {})))
    process.start()
    return process


def _run(call, arguments, out, env):
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGINT}
    )  # the server may have started with it blocked
    os.environ.update(env)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    # One that hangs ends, with its stack in `out`, before pytest would end its whole worker
    faulthandler.dump_traceback_later(2 * HANG_S, exit=True, file=2)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
    code = call(*arguments)
    sys.stdout.flush()
    os._exit(int(code or 0))


def fork(call):
    """Run it in a child of a process without threads. -> its exit code."""
    child = os.fork()
    if not child:
        try:
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def members(group):
    """The processes of a group that are alive, and still alive after a long while."""
    found, stop = [group], time.monotonic() + HANG_S
    while found and time.monotonic() < stop:
        time.sleep(0.01)
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
                found += [int(path.parent.name)] if int(its_group) == group and state != "Z" else []
    return found


def import_heavy():
    for name in HEAVY:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    freeze()


def import_all(names):
    """What a child has imported, so that the next ones need not."""
    for name in names:
        # Theirs who import them: _asyncio before asyncio breaks both
        if not name.startswith("_"):
            with contextlib.suppress(ImportError):  # Cython's own are no modules
                importlib.import_module(name)
    freeze()


def freeze():
    """Garbage collection skips what was imported: millions of objects, and none of them garbage. A
    training, which freezes too, no longer thaws it at its end."""
    gc.collect()
    FREEZE()
    gc.freeze = gc.unfreeze = lambda: None


def at_functions(act):
    """Before each call of a function, in Python or C, of this thread and those that it starts."""

    def profile(frame, event, _):
        if event in ("call", "c_call"):
            act()

    sys.setprofile(profile)
    threading.setprofile(profile)


def death_at(number):
    calls = itertools.count(1)

    def act(*_):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return act
