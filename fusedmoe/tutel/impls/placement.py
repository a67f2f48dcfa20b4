"""Where a layer's ranks stand: topologies of process groups, made once and shared by the layers over a group."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from fusedmoe.comm.topology import Topology
from fusedmoe.tutel.impls.groups import TIMEOUT_S, get_world_size

# By (world, group, copies, nodes); the world is part of it because a process may make one, end it and make another.
_MADE: dict[tuple[object, tuple[int, ...], tuple[int, int], int | None], Topology] = {}


def topology_of(handle: dist.ProcessGroup | None, shards: int = 1, degree: int = 1) -> Topology:
    """The topology for experts that `shards` consecutive ranks of a group hold together. Collective on first use.

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
    if key not in _MADE:
        for old in [known for known in _MADE if known[0] is not dist.group.WORLD]:
            del _MADE[old]
        experts = torch.arange(W).view(W // shards, degree, shards // degree).transpose(1, 2).reshape(-1, degree)
        _MADE[key] = Topology.from_group(handle, experts, ranks_per_node=per_node, timeout_s=TIMEOUT_S)
    return _MADE[key]
