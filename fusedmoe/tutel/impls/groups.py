"""Groups of ranks by Tutel's names, and the library's groups and topologies for PyTorch's process groups."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fusedmoe import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.ranks import Group, group_of

CURE = "set TUTEL_GLOBAL_TIMEOUT_SEC to more seconds"
TIMEOUT_S = float(os.environ.get("TUTEL_GLOBAL_TIMEOUT_SEC", 86400))


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Returns the number of ranks of a group, by default of the job; 1 where nothing is initialised."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_world_rank(group: dist.ProcessGroup | None = None) -> int:
    """Returns this rank's place in a group; 0 where nothing is initialised."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def size_of(handle: dist.ProcessGroup | None) -> int:
    """Returns the number of ranks of a group.

    Raises:
        ConfigError: this rank is none of them.
    """
    size = get_world_size(handle)
    if size < 1:
        raise ConfigError("this rank is not one of the group's; make layers and collectives over it on its ranks alone")
    return size


def as_group(handle: dist.ProcessGroup | None) -> Group:
    """Returns a group whose waits are bounded by TUTEL_GLOBAL_TIMEOUT_SEC, and whose errors name ranks."""
    if size_of(handle) == 1:
        return Group("tutel")
    return group_of(handle or dist.distributed_c10d._get_default_group(), "tutel", TIMEOUT_S)


ProcessGroup = dist.ProcessGroup
#: The backend under "", and what `create_groups_from_world` made, by its argument.
TUTEL_GROUPING_CACHE: dict[Any, Any] = {}


@dataclass
class ParallelEnv:
    """This rank's place in `group_count` groups of `model_size` consecutive ranks."""

    global_size: int
    global_rank: int
    group_count: int
    data_rank: int
    model_size: int
    model_rank: int
    local_device: torch.device | None
    local_rank: int
    local_size: int
    data_group: ProcessGroup | None
    model_group: ProcessGroup | None
    global_group: ProcessGroup | None
    is_distributed: bool
    is_cuda: bool
    dist_print: Callable[..., None] = field(repr=False)


def create_standalone_group() -> ProcessGroup | None:
    """Makes a group of this rank alone. Collective over all ranks."""
    if not dist.is_initialized():
        return None
    _meet(None)
    return [dist.new_group(ranks=[rank]) for rank in range(get_world_size())][get_world_rank()]


def create_groups_from_world(
    group_count: int, include_init: str | None = None, parent_group: ProcessGroup | None = None
) -> ParallelEnv:
    """Splits the world into `group_count` groups of consecutive ranks; a negative count is minus the size of a group.

    Collective over the parent's ranks; the same arguments give the same object.

    Args:
        include_init: the backend to initialise with from the launcher's environment ("nccl", "gloo"); without a
            launcher the result is that of a single process. None: takes what is initialised.
        parent_group: split this group instead of the world; ranks are then places in it.
    Raises:
        ConfigError: the groups do not come out even; another backend than before; "nccl" without a GPU.
    """
    parent = None if parent_group in (None, dist.group.WORLD) else parent_group
    if include_init is not None:
        _initialise(include_init)
    key = group_count if parent is None else (group_count, parent)
    # A world that was ended and made again has other groups under the same key.
    if key not in TUTEL_GROUPING_CACHE or TUTEL_GROUPING_CACHE[key].global_group is not _world(parent):
        _meet(parent)
        TUTEL_GROUPING_CACHE[key] = _split(group_count, parent)
    env: ParallelEnv = TUTEL_GROUPING_CACHE[key]
    return env


def _meet(parent: ProcessGroup | None) -> None:
    """Waits for the ranks that make groups together: PyTorch's own wait for them names nobody."""
    members = as_group(parent)
    if members.size > 1:
        # The store's keys tell who is here; PyTorch's `new_group` waits without a name.
        members.board.meet(members.ranks, None, TIMEOUT_S, operation="making groups", cure=CURE)


def _world(parent: ProcessGroup | None) -> ProcessGroup | None:
    return parent if parent is not None else dist.group.WORLD if dist.is_initialized() else None


def _initialise(backend: str) -> None:
    if backend not in ("nccl", "gloo"):
        raise ConfigError(f"unknown backend {backend!r}; choose nccl or gloo")
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("backend='nccl' needs a CUDA GPU; give backend='gloo' to run on CPUs")
    if not dist.is_initialized():
        TUTEL_GROUPING_CACHE.clear()
    # Under Tutel's own key, which clients read.
    known = TUTEL_GROUPING_CACHE.setdefault("", backend)
    if known != backend:
        raise ConfigError(f"initialised with {known} before, now asked for {backend}: one backend a job")
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    environment = os.environ
    # Open MPI's launcher, which sets neither RANK nor MASTER_PORT.
    if "LOCAL_RANK" not in environment and "OMPI_COMM_WORLD_SIZE" in environment:
        where = f"tcp://{environment.get('MASTER_ADDR', 'localhost')}:{environment.get('MASTER_PORT', '23456')}"
        rank, size = int(environment["OMPI_COMM_WORLD_RANK"]), int(environment["OMPI_COMM_WORLD_SIZE"])
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, timeout=timeout)
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(environment):
        dist.init_process_group(backend, timeout=timeout)


def _split(group_count: int, parent: ProcessGroup | None) -> ParallelEnv:
    world = _world(parent)
    size, rank = get_world_size(world), get_world_rank(world)
    count = size // -group_count if group_count < 0 else group_count
    if count < 1 or size % count or (group_count < 0 and count * -group_count != size):
        raise ConfigError(f"{size} ranks do not divide into {group_count} groups (a negative count is minus a size)")
    inner = size // count
    data_rank, model_rank = divmod(rank, inner)
    rows = [list(range(i * inner, (i + 1) * inner)) for i in range(count)]
    columns = [list(range(i, size, inner)) for i in range(inner)]
    backend = TUTEL_GROUPING_CACHE.get("")
    if backend is None and world is not None:
        backend = dist.get_backend(world)
    on_gpu = backend == "nccl"
    local_rank = _local("RANK")
    if on_gpu:
        local_rank = min(local_rank, torch.cuda.device_count() - 1)
    device = torch.device("cuda", local_rank) if on_gpu else None if backend is None else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    def print_on_first(*args: Any, **more: Any) -> None:
        if get_world_rank() == 0:
            print(*args, **more)

    return ParallelEnv(
        global_size=size,
        global_rank=rank,
        group_count=count,
        data_rank=data_rank,
        model_size=inner,
        model_rank=model_rank,
        local_device=device,
        local_rank=local_rank,
        local_size=_local("SIZE"),
        data_group=_group_of(columns, model_rank, world),
        model_group=_group_of(rows, data_rank, world),
        global_group=world,
        is_distributed=world is not None,
        is_cuda=on_gpu,
        dist_print=print_on_first,
    )


def _group_of(grid: list[list[int]], own: int, world: ProcessGroup | None) -> ProcessGroup | None:
    """Makes the group of one line of a grid of places. Every rank makes all lines, unless they lie in a sub-group."""
    if world is None or len(grid) == 1:
        return world
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    ranks = dist.get_process_group_ranks(world)
    lines = [[ranks[place] for place in line] for line in grid]
    if world is dist.group.WORLD:
        # `new_group` over the world is collective over all ranks, so every rank makes every line.
        return [dist.new_group(ranks=line, timeout=timeout) for line in lines][own]
    return dist.new_group(ranks=lines[own], timeout=timeout, use_local_synchronization=True)


def _local(what: str) -> int:
    default = {"RANK": "0", "SIZE": os.environ.get("LOCAL_WORLD_SIZE", "1")}[what]
    return int(os.environ.get(f"LOCAL_{what}", os.environ.get(f"OMPI_COMM_WORLD_LOCAL_{what}", default)))


# By (world, ranks, shards and degree, ranks of a node); the world, as a process may end one and make another.
_TOPOLOGIES: dict[tuple[object, tuple[int, ...], tuple[int, int], int | None], Topology] = {}


def topology_of(handle: dist.ProcessGroup | None, shards: int = 1, degree: int = 1) -> Topology:
    """Returns the topology for experts that `shards` consecutive ranks of a group share. Collective on first use.

    Args:
        handle: the group; None for all ranks.
        shards: s, ranks that hold one expert's parameters.
        degree: r, into how many parts an expert's work is split, a divisor of s. The s ranks are r blocks of s/r; a
            block holds one part (gathered from its ranks) and its ranks share the tokens. ep numbers (expert, place in
            the block), esp the blocks.
    """
    W = get_world_size(handle)
    if W == 1:
        return Topology()
    handle = handle or dist.group.WORLD
    per_node = int(os.environ["LOCAL_SIZE"]) if "LOCAL_SIZE" in os.environ else None
    key = (dist.group.WORLD, tuple(dist.get_process_group_ranks(handle)), (shards, degree), per_node)
    if key not in _TOPOLOGIES:
        # Topologies of an ended world hold dead process groups.
        for old in [known for known in _TOPOLOGIES if known[0] is not dist.group.WORLD]:
            del _TOPOLOGIES[old]
        # s ranks share an expert in r blocks of s/r ranks: esp numbers the blocks, ep the expert and the place inside.
        experts = torch.arange(W).view(W // shards, degree, shards // degree).transpose(1, 2).reshape(-1, degree)
        _TOPOLOGIES[key] = Topology.from_group(handle, experts, ranks_per_node=per_node, timeout_s=TIMEOUT_S)
    return _TOPOLOGIES[key]
