"""Reads what the launcher (deepspeed, torchrun) sets in the environment: ranks, and the cores for
each."""

import os
from typing import NamedTuple

from .errors import ConfigError


class LaunchedRank(NamedTuple):
    rank: int
    world: int  # number of ranks
    local: int  # rank among those of this machine


def launched_rank() -> LaunchedRank:
    """Returns this process's rank, as the launcher set it."""
    names = ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")
    try:
        rank, world, local = (int(os.environ.get(name, default)) for name, default in names)
        if not 0 <= rank < world:
            raise ValueError(f"RANK={rank}, WORLD_SIZE={world}")
    except ValueError as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE, LOCAL_RANK in the environment: {error}: start with deepspeed or "
            "torchrun"
        ) from None
    return LaunchedRank(rank, world, local)


def cores_per_rank() -> int:
    """CPU cores of this machine for each of its ranks."""
    local_ranks = next(
        (
            int(os.environ[name])
            for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")
            if os.environ.get(name)
        ),
        1,
    )
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)
