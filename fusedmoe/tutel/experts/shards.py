"""Which part of which experts a rank computes with, and whom it asks for what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from fusedmoe.tutel.impls.communicate import zero_gather
from fusedmoe.tutel.impls.groups import get_world_rank
from fusedmoe.tutel.impls.placement import topology_of

if TYPE_CHECKING:
    from fusedmoe.tutel.impls.moe_layer import MOELayer


@dataclass(frozen=True)
class Shards:
    """Parameters [e, n, …] of `members` ranks, joined to [experts, n·parts, …].

    Attributes:
        group: those ranks; unused where there is one.
        members, experts: how many ranks, and how many experts the joined parameters have.
        first: the number of the first joined shard among those of its expert.
    """

    group: dist.ProcessGroup | None
    members: int
    experts: int
    first: int

    def join(self, parameter: Tensor) -> Tensor:
        """Its gradient goes back to the ranks that hold the parts, summed."""
        if self.members == 1:
            return parameter
        return zero_gather(parameter, group=self.group).view(self.experts, -1, *parameter.shape[2:])


def shards_of(ctx: MOELayer) -> Shards:
    """By the layer's adaptive degree r: 0 gathers everything everywhere, r ≥ 1 leaves experts in r parts."""
    s, r = ctx.sharded_count, ctx.adaptive_degree
    if r == 0:
        return Shards(ctx.group, ctx.world_size, ctx.num_global_experts, 0)
    size = s // r
    place = get_world_rank(ctx.group) % s if s > 1 else 0
    first = place // size * size
    if size == 1:
        return Shards(None, 1, ctx.num_local_experts, first)
    topology = topology_of(ctx.group, s, r)
    start = topology.world.index - place + first
    block = topology.subgroup("shards", topology.world.ranks[start : start + size])
    return Shards(block.handle, size, 1, first)
