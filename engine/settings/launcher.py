"""Reads what the launcher (deepspeed, torchrun) sets in the environment: this process's rank,
and how many CPU cores each rank may use."""

import os
from typing import NamedTuple

from .errors import ConfigError


class LaunchedRank(NamedTuple):
    rank: int
    world: int  # number of ranks
    local: int  # rank among the ranks of this machine


def launched_rank() -> LaunchedRank:
    """Returns this process's rank, as the launcher set it in the environment; without a
    launcher, rank 0 of 1."""
    names = ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")
    try:
        rank, world, local = (int(os.environ.get(name, default)) for name, default in names)
        if not 0 <= rank < world:
            raise ValueError(f"RANK={rank} must be at least 0 and below WORLD_SIZE={world}")
    except ValueError as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE, LOCAL_RANK in the environment: {error}: start with deepspeed or "
            "torchrun"
        ) from None
    return LaunchedRank(rank, world, local)


def cores_per_rank() -> int:
    """Returns the number of this machine's CPU cores for each rank that runs on it."""
    local_ranks = next(
        (
            int(os.environ[name])
            for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")
            if os.environ.get(name)
        ),
        1,
    )
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)
