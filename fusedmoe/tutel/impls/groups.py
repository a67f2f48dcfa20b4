"""PyTorch's process groups, as clients hand them in, as the library's groups."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from fusedmoe.comm.failure import Board
from fusedmoe.comm.group import Group, Job, Lease
from fusedmoe.errors import ConfigError

TIMEOUT_S = float(os.environ.get("TUTEL_GLOBAL_TIMEOUT_SEC", 86400))


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks of the group, by default of the job; 1 where nothing is initialised."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_world_rank(group: dist.ProcessGroup | None = None) -> int:
    """This rank's place in the group; 0 where nothing is initialised."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def size_of(handle: dist.ProcessGroup | None) -> int:
    """Ranks of the group.

    Raises:
        ConfigError: this rank is none of them.
    """
    size = get_world_size(handle)
    if size < 1:
        raise ConfigError("this rank is not one of the group's; make layers and collectives over it on its ranks alone")
    return size


def as_group(handle: dist.ProcessGroup | None) -> Group:
    """The library's view of a group: its waits are bounded by TUTEL_GLOBAL_TIMEOUT_SEC, and errors name ranks."""
    if size_of(handle) == 1:
        return Group("tutel")
    default: Any = dist.group.WORLD
    handle = handle or default
    rank = dist.get_rank()
    job = Job(rank, TIMEOUT_S, Board(dist.distributed_c10d._get_default_store(), rank))
    ranks = tuple(dist.get_process_group_ranks(handle))
    return Group("tutel", ranks, ranks.index(rank), Lease(handle), job)
