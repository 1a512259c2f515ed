"""Starts and connects ranks, in the same way under `deepspeed`, `torchrun` and plain `python`, on CPU (gloo) and
CUDA (nccl).

    with started_ranks(config.train) as ranks: ...  # ranks.rank, ranks.world, ranks.device
    on_first_rank(ranks, work)                # work() on rank 0; its result or its error on every rank
    with process_state_restored(): ...        # restores environment, threads, compiled graphs
    largest = MaxOverRanks(ranks)
    stop = largest(asked)                     # called regularly on all ranks: the largest `asked` of the call before

A single process opens no port. DeepSpeed uses this process group.
"""

import importlib.metadata
import inspect
import logging
import os
import re
import select
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._distributed_c10d import HashStore

from ..model.kernels import disable_tf32
from ..settings.errors import ConfigError
from ..settings.launcher import cores_per_rank, launched_rank
from .config import TrainConfig

T = TypeVar("T")
# Addresses by which a machine reaches only itself
LOOPBACK = re.compile(r"\b127\.\d+\.\d+\.\d+|::1\b|\blocalhost\b")
# Modules whose functions wait for other ranks; nvtx, because it wraps functions in which ZeRO 3 waits
COLLECTIVE_MODULES = ("torch.distributed", "deepspeed.comm", "deepspeed.utils.nvtx")


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device
    control: Any  # gloo group for messages between the ranks; None for a single process

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@contextmanager
def started_ranks(config: TrainConfig) -> Iterator[Ranks]:
    """A context in which this process is one of the ranks of a training. Afterwards the process is
    as it was before, so that it can train again."""
    with process_state_restored():
        ranks = start_ranks(config.timeout_s, config.deterministic)
        try:
            yield ranks
        except BaseException:
            if ranks.world == 1:  # with several ranks, closing would wait for the others
                close_groups()
            raise
        close_groups()


def start_ranks(timeout_s: float, deterministic: bool = False) -> Ranks:
    rank, world, local = launched_rank()
    # DeepSpeed reads these variables
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local)})
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_per_rank())
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    disable_tf32()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"LOCAL_RANK={local}: this machine has {torch.cuda.device_count()} GPUs: start "
                "one rank for each"
            )
        torch.cuda.set_device(device)
    backend, timeout = "nccl" if cuda else "gloo", timedelta(seconds=timeout_s)
    own_gpu = device if cuda else None  # without it, NCCL guesses the GPU and warns
    if world == 1:
        dist.init_process_group(
            backend, timeout=timeout, world_size=1, rank=0, store=HashStore(), device_id=own_gpu
        )
        return Ranks(rank, world, device, None)
    _join(backend, timeout, own_gpu)
    return Ranks(
        rank,
        world,
        device,
        dist.new_group(backend="gloo", timeout=timeout) if cuda else dist.group.WORLD,
    )


def _join(backend: str, timeout: timedelta, device: torch.device | None = None) -> None:
    try:
        dist.init_process_group(backend, timeout=timeout, device_id=device)
    except (RuntimeError, ValueError) as error:
        rank, world, _ = launched_rank()
        master, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        reason, mend = str(error).splitlines()[0][:200], "try another --master_port"
        if LOOPBACK.search(str(error)) and not LOOPBACK.search(master):
            mend = (
                "a machine's name stands for its loopback address, which no other can reach: set "
                "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on every machine to the interface of "
                "their network, such as eth0 (`ip addr` lists them)"
            )
        raise ConfigError(
            f"MASTER_PORT={port!r}: rank {rank} cannot join {world} ranks: {reason}: {mend}"
        ) from None


def join_ranks() -> int:
    """Returns the rank of this process. With several ranks it also creates a process group, so that
    they can wait for each other."""
    rank, world, _ = launched_rank()
    if world > 1:
        torch.set_num_threads(cores_per_rank())
        # A rank may have failed before it got here, so the others wait 10 minutes at most
        _join("gloo", timedelta(minutes=10))
        # Later, ranks may wait for a day, because a rank's share of the work may take long
        dist.distributed_c10d._set_pg_timeout(timedelta(days=1), dist.group.WORLD)
    return rank


@contextmanager
def process_state_restored() -> Iterator[None]:
    """A context that restores, at its end, what a training changes in its process, which may be a
    notebook."""
    environment = dict(os.environ)
    threads = torch.get_num_threads()
    hook = sys.excepthook  # torch.distributed replaces this hook
    deterministic, linear = torch.are_deterministic_algorithms_enabled(), F.linear
    cudnn: Any = torch.backends.cudnn
    tf32 = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with warnings.catch_warnings(), torch.random.fork_rng(devices):
        try:
            yield
        finally:
            # Forget compiled graphs: they keep the model alive, and torch compiles a function at
            # most eight times
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)
            # restores an older flag, but also sets the two precisions that the next line restores
            cudnn.allow_tf32 = "tf32" in tf32
            cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = tf32
            # ZeRO 3 replaces F.linear, which would change a later training's gradients by rounding
            F.linear = linear
            sys.excepthook = hook


def import_deepspeed() -> Any:
    """Imports DeepSpeed without log lines and without compiling its own replacement of gloo (80 s;
    needs a compiler)."""
    deprecated = r".*_all_gather_base|.*all_gather_into_tensor|.*reduce_scatter|torch.distributed.nn.functional"
    warnings.filterwarnings("ignore", category=FutureWarning, message=deprecated)
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed  # type: ignore[import-untyped]

    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.utils.logger.setLevel(logging.ERROR)
    return deepspeed


def require_function(engine: Any, name: str, arguments: Sequence[str]) -> None:
    """Raises ConfigError if DeepSpeed's engine has no function of this name with these arguments. Callers
    replace the function, and another version might not call the replacement."""
    try:
        inspect.signature(attrgetter(name)(engine)).bind(**dict.fromkeys(arguments))
    except (AttributeError, TypeError, ValueError):
        version = importlib.metadata.version("deepspeed")
        raise ConfigError(
            f"deepspeed {version}: has no {name}({', '.join(arguments)}), which training replaces: "
            "pip install deepspeed==0.19.8"
        ) from None


def lost_a_rank(error: BaseException) -> bool:
    """True if a collective failed because another rank did not answer. NCCL and torch.distributed's
    key-value store raise a DistError. gloo raises a plain RuntimeError, as a plug-in may, so the
    module that raised it decides."""
    if launched_rank().world == 1:
        return False
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _raised_in(error, COLLECTIVE_MODULES)


def _raised_in(error: BaseException, packages: Sequence[str]) -> bool:
    trace, name = error.__traceback__, ""
    while trace:
        name, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def close_groups() -> None:
    """Closes all process groups, so that this process can train again. If DeepSpeed has started,
    its own function closes them."""
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()


def on_first_rank(ranks: Ranks, work: Callable[[], T]) -> T:
    """Runs work() on rank 0; every rank returns its result or raises its error."""
    answer: list[Any] = [None, None]
    if ranks.is_first:
        try:
            answer[0] = work()
        except Exception as error:
            answer[1] = error
    if ranks.world > 1:
        dist.broadcast_object_list(answer, src=0, group=ranks.control)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


class DeepSpeedLauncher:
    """Watches the command `deepspeed`, which starts deepspeed.launcher.launch, which starts the
    ranks. SIGTERM ends the command at once, without telling the launcher, so the ranks watch the
    command themselves."""

    def __init__(self) -> None:
        self.poll = select.poll()
        if "CROSS_SIZE" not in os.environ:  # only deepspeed.launcher.launch sets it
            return
        try:
            status = Path(f"/proc/{os.getppid()}/status").read_text()
            command = int(re.findall(r"^PPid:\s*(\d+)", status, re.MULTILINE)[0])
            self.poll.register(os.pidfd_open(command), select.POLLIN)
        except OSError:  # this is not Linux, or a container hides other processes
            return

    def has_ended(self) -> bool:
        return bool(self.poll.poll(0))


class MaxOverRanks:
    """The maximum of a number over all ranks. With several ranks, a call returns the maximum of the
    previous call, so that communication overlaps with the work between two calls."""

    def __init__(self, ranks: Ranks) -> None:
        self.group = ranks.control
        self.pending: tuple[Any, torch.Tensor] | None = None

    def __call__(self, number: int) -> int:
        if self.group is None:
            return number
        before, largest = self.finish(), torch.tensor(number)
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, self.group, async_op=True)
        self.pending = work, largest
        return before

    def finish(self) -> int:
        """Waits for the communication of the last call and returns its maximum; 0 if there is
        nothing to wait for. Must also be called before the process group is closed."""
        if self.pending is None:
            return 0
        (work, largest), self.pending = self.pending, None
        try:
            work.wait()
        except RuntimeError as error:
            raise dist.DistNetworkError(str(error)) from error
        return int(largest)
