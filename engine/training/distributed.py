"""One process of many, or alone: the same under `deepspeed`, `torchrun` and plain `python`, on CPU (gloo) and CUDA (nccl).

    ranks = start(timeout_s=600)              # ranks.rank, ranks.world, ranks.device
    agreed = Agreement(ranks, names=("stop", "save"))
    agreed({"stop": flag})                    # at each step: what any rank wanted a step ago

Alone, no port is opened. DeepSpeed finds the process group ready and takes it.
"""

import logging
import os
import socket
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from data_tools.cli import show
from engine.common import ConfigError
from engine.model.kernels import disable_tf32

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device
    control: Any  # gloo group for words between hosts; None when alone

    @property
    def first(self) -> bool:
        return self.rank == 0


def environment() -> tuple[int, int, int]:
    """rank, world, local rank, as the launcher says."""
    try:
        rank, world, local = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK in the environment must be whole numbers: {error}") from None
    if not 0 <= rank < world:
        raise ConfigError(f"RANK={rank}, WORLD_SIZE={world}: ranks count from 0 to below WORLD_SIZE")
    return rank, world, local


def start(timeout_s: float, deterministic: bool = False) -> Ranks:
    rank, world, local = environment()
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local)})  # DeepSpeed reads them
    _set_threads(world)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    disable_tf32()
    if cuda:
        if local >= torch.cuda.device_count():
            raise ConfigError(f"LOCAL_RANK={local}: this machine has {torch.cuda.device_count()} GPUs: start one rank for each")
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if cuda else "gloo"
    if world == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return Ranks(rank, world, device, None)
    _check_port(rank)
    try:
        dist.init_process_group(backend, timeout=timeout, device_id=device if cuda else None)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"rank {rank} of {world} found no others: {str(error).splitlines()[0]}"[:300]) from None
    return Ranks(rank, world, device, dist.new_group(backend="gloo", timeout=timeout) if cuda else dist.group.WORLD)


def quiet_deepspeed() -> Any:
    """DeepSpeed, without its JIT build of a gloo replacement (80 s; needs a compiler), and silent."""
    deprecated = r".*_all_gather_base|.*all_gather_into_tensor|.*reduce_scatter|torch.distributed.nn.functional"
    warnings.filterwarnings("ignore", category=FutureWarning, message=deprecated)
    import deepspeed  # type: ignore[import-untyped]

    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.utils.logger.setLevel(logging.ERROR)
    return deepspeed


def lost_a_rank(error: Exception) -> bool:
    """Whether a collective failed because another rank did not answer, in the words of the libraries."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "Connection closed"))


def close() -> None:
    """The process can train again. DeepSpeed forgets its own groups only if asked itself."""
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()


def abandon() -> None:
    """After an error: nobody is waited for."""
    if dist.is_initialized() and dist.get_world_size() == 1:
        close()


def leave(code: int) -> NoReturn:
    """The end of a process that had a group, with `code`. A thread of gloo may still hold the tensors of the last exchange; it
    would ask for the interpreter that is going down to let go of them, and end as SIGABRT what had ended well."""
    code = show("") or code
    sys.stderr.flush()
    os._exit(code)


def _set_threads(world: int) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))


def _check_port(rank: int) -> None:
    """Only rank 0 of a launcher that leaves the port to us listens there; torchrun's agent holds it already."""
    if rank or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    port = os.environ.get("MASTER_PORT", "")
    if not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"MASTER_PORT={port!r}: must be a free port, 1 to 65535: start with deepspeed or torchrun")
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            raise ConfigError(f"MASTER_PORT={port}: {error.strerror}: give another with --master_port") from None


class Agreement:
    """What any rank wants, known to all at the same step, one step late; the exchange hides behind the step between."""

    def __init__(self, ranks: Ranks, names: tuple[str, ...]) -> None:
        self.ranks, self.names = ranks, names
        self.pending: tuple[Any, torch.Tensor] | None = None

    def __call__(self, wanted: dict[str, bool]) -> dict[str, bool]:
        if self.ranks.control is None:
            return wanted
        flags = torch.tensor([int(wanted[name]) for name in self.names], dtype=torch.int32)
        before, self.pending = (
            self.pending,
            (dist.all_reduce(flags, dist.ReduceOp.MAX, self.ranks.control, async_op=True), flags),
        )
        if before is None:
            return dict.fromkeys(self.names, False)
        before[0].wait()
        return dict(zip(self.names, map(bool, before[1].tolist()), strict=True))

    def finish(self) -> None:
        """Before the process group is closed."""
        if self.pending is not None:
            self.pending[0].wait()
            self.pending = None
