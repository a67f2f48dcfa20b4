"""Transfers: who sends which expert to whom in the sparse collectives (Hecate, section 3.1), and how many bytes.

SparseAllGather(before, after) brings each expert from where it is to where it shall be; SparseReduceScatter(after,
before) sums gradients along the same ways back. An expert goes along a chain: from its owner once to each other node
that lacks it, from node to node in the order of a ring, and in each node from where it arrived from rank to rank. So it
crosses the network as often as there are nodes without it, no rank sends or receives it twice on one kind of link, and
on each kind no rank sends or receives more than λS, the bytes of all experts that travel (Eq. 1). An owner that sent
to everyone would.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import Nodes, Placement


class Transfer(NamedTuple):
    """Transfer of one expert from one rank to another.

    `step`: transfers of step 0 need nothing before them; those of step n need the data of an earlier one, of the same
    expert.
    """

    expert: int
    source: int
    target: int
    step: int


def gather(before: Placement, after: Placement, nodes: Nodes) -> tuple[Transfer, ...]:
    """Lists the transfers of a SparseAllGather that makes `after` of `before`, by step, expert and source.

    Args:
        before: a sharding, or a placement with replicas (as calibration finds it), within `after`.
    Raises:
        ConfigError: `after` lacks something of `before`, or has other owners or ranks.
    """
    if not before.is_within(after) or before.ranks != nodes.ranks:
        raise ConfigError(
            "sparse all-gather: what is there before must be there after, with the same owners on the same ranks:\n"
            f"{before}\nis not within\n{after}"
        )
    transfers: list[Transfer] = []
    # Over all experts together: several that enter one node should come in over different ranks' links.
    arrived_W = [0] * nodes.ranks  # experts so far that a rank has received from another node
    for expert, owner in enumerate(before.owners):
        if after.replicas[expert] != before.replicas[expert]:
            has = {owner, *before.replicas[expert]}
            missing = [rank for rank in after.replicas[expert] if rank not in has]
            transfers += _chain(expert, owner, has, missing, nodes, arrived_W)
    return tuple(sorted(transfers, key=lambda transfer: (transfer.step, transfer.expert, transfer.source)))


def _chain(
    expert: int, owner: int, has: set[int], missing: Sequence[int], nodes: Nodes, arrived_W: list[int]
) -> Iterable[Transfer]:
    end, ready = owner, 0  # the chain's end, and the step in which it can send on
    # Nodes in the order of a ring, from the owner's on: no link between nodes carries the expert twice.
    for ahead in range(nodes.count):
        node = (nodes.of(owner) + ahead) % nodes.count
        lacking = [rank for rank in missing if nodes.of(rank) == node]
        if not lacking:
            continue
        first, holders = 0, sorted(rank for rank in has if nodes.of(rank) == node)
        if holders:
            holder = owner if owner in holders else holders[0]
        else:
            # The rank of this node that has received the least from other nodes: its link has the most room.
            holder = min(lacking, key=lambda rank: (arrived_W[rank], rank))
            arrived_W[holder] += 1
            lacking.remove(holder)
            yield Transfer(expert, end, holder, ready)
            end, ready = holder, ready + 1
            first = ready
        # From rank to rank inside the node, so that none of them sends an expert twice.
        around = sorted(lacking, key=lambda rank: (rank - holder) % nodes.ranks)
        for step, (source, target) in enumerate(zip([holder, *around], around, strict=False), start=first):
            yield Transfer(expert, source, target, step)


def reduce(gathered: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """Lists the transfers of a SparseReduceScatter, the adjoint of a gather: the same ways back, the last step first.

    A target adds the rows that it receives to its own; a rank sends once it has received all of the expert's. An
    expert's gradients are summed in the same order whatever arrives first: by step, then by source.
    """
    last = max((there.step for there in gathered), default=0)
    back = (Transfer(there.expert, there.target, there.source, last - there.step) for there in gathered)
    return tuple(sorted(back, key=lambda transfer: (transfer.step, transfer.expert, transfer.source)))


class LinkBytes(NamedTuple):
    """Bytes that each rank, [W], sends and receives: between nodes, and inside its own."""

    inter_sent_W: NDArray[np.int64]
    inter_received_W: NDArray[np.int64]
    intra_sent_W: NDArray[np.int64]
    intra_received_W: NDArray[np.int64]

    @property
    def total(self) -> int:
        """Bytes that all ranks send."""
        return int(self.inter_sent_W.sum() + self.intra_sent_W.sum())

    @property
    def busiest(self) -> int:
        """Bytes that the busiest rank sends or receives on one kind of link."""
        return int(max(counts_W.max() for counts_W in self))


def traffic(transfers: Iterable[Transfer], nodes: Nodes, expert_bytes: int) -> LinkBytes:
    """Counts the bytes of these transfers one by one."""
    counts = np.zeros((4, nodes.ranks), dtype=np.int64)
    for transfer in transfers:
        inside = 2 * (nodes.of(transfer.source) == nodes.of(transfer.target))
        counts[inside, transfer.source] += expert_bytes
        counts[inside + 1, transfer.target] += expert_bytes
    return LinkBytes(*counts)
