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
    """One expert, from one rank to another.

    `step`: transfers of step 0 need nothing before them, those of step n an earlier one's data, of the same expert.
    """

    expert: int
    source: int
    target: int
    step: int


def gather(before: Placement, after: Placement, nodes: Nodes) -> tuple[Transfer, ...]:
    """SparseAllGather: the transfers that make `after` of `before`, by step, expert and source.

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
    found: list[Transfer] = []
    arrived_W = [0] * nodes.ranks  # experts so far that a rank has received from another node
    for expert, owner in enumerate(before.owners):
        if after.replicas[expert] != before.replicas[expert]:
            has = {owner, *before.replicas[expert]}
            missing = [rank for rank in after.replicas[expert] if rank not in has]
            found += _chain(expert, owner, has, missing, nodes, arrived_W)
    return tuple(sorted(found, key=lambda one: (one.step, one.expert, one.source)))


def _chain(
    expert: int, owner: int, has: set[int], missing: Sequence[int], nodes: Nodes, arrived_W: list[int]
) -> Iterable[Transfer]:
    here, ready = owner, 0  # the chain's end, and the step in which it can send on
    for ahead in range(nodes.count):
        node = (nodes.of(owner) + ahead) % nodes.count
        lacking = [rank for rank in missing if nodes.of(rank) == node]
        if not lacking:
            continue
        first, holders = 0, sorted(rank for rank in has if nodes.of(rank) == node)
        if holders:
            holder = owner if owner in holders else holders[0]
        else:
            holder = min(lacking, key=lambda rank: (arrived_W[rank], rank))
            arrived_W[holder] += 1
            lacking.remove(holder)
            yield Transfer(expert, here, holder, ready)
            here, ready = holder, ready + 1
            first = ready
        around = sorted(lacking, key=lambda rank: (rank - holder) % nodes.ranks)
        for step, (source, target) in enumerate(zip([holder, *around], around, strict=False), start=first):
            yield Transfer(expert, source, target, step)


def reduce(gathered: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """SparseReduceScatter, the adjoint of a gather: the same ways back, the last step first.

    A target adds what it receives to its own; a rank sends once all that comes to it for the expert has come. An
    expert's gradients are summed in the same order whatever arrives first: by step, then by source.
    """
    last = max((one.step for one in gathered), default=0)
    back = (Transfer(one.expert, one.target, one.source, last - one.step) for one in gathered)
    return tuple(sorted(back, key=lambda one: (one.step, one.expert, one.source)))


class LinkBytes(NamedTuple):
    """Bytes that each rank, [W], sends and receives: between nodes, and inside its own."""

    inter_sent_W: NDArray[np.int64]
    inter_received_W: NDArray[np.int64]
    intra_sent_W: NDArray[np.int64]
    intra_received_W: NDArray[np.int64]

    @property
    def total(self) -> int:
        """All bytes that are sent."""
        return int(self.inter_sent_W.sum() + self.intra_sent_W.sum())

    @property
    def busiest(self) -> int:
        """The most bytes that a rank sends or receives on one kind of link."""
        return int(max(counts_W.max() for counts_W in self))


def traffic(transfers: Iterable[Transfer], nodes: Nodes, expert_bytes: int) -> LinkBytes:
    """The bytes of these transfers, counted one by one."""
    counts = np.zeros((4, nodes.ranks), dtype=np.int64)
    for one in transfers:
        inside = 2 * (nodes.of(one.source) == nodes.of(one.target))
        counts[inside, one.source] += expert_bytes
        counts[inside + 1, one.target] += expert_bytes
    return LinkBytes(*counts)


class Volume(NamedTuple):
    """Bytes of one sparse collective, before it runs: of all ranks, between nodes alone, and the most for one rank."""

    total: int
    inter: int
    limit: int


def predicted_volume(before: Placement, after: Placement, nodes: Nodes, expert_bytes: int) -> Volume:
    """What a gather sends, and what its reduce-scatter does (H2, with the paper's Eq. 2 set right).

    An expert on d ranks has travelled d − 1 times, and as often between nodes as it is on more of them than before. For
    a member of its group that is (d − 1)/d of its bytes for each of the two collectives, together those of a ring
    all-reduce; it tends to 2λS. `limit` is λS: no rank sends or receives more on one kind of link.
    """
    new_E = after.holds_EW.sum(axis=1) - before.holds_EW.sum(axis=1)
    nodes_E = _nodes_of(after, nodes) - _nodes_of(before, nodes)
    total, inter, travelling = int(new_E.sum()), int(nodes_E.sum()), int((new_E > 0).sum())
    return Volume(total * expert_bytes, inter * expert_bytes, travelling * expert_bytes)


def _nodes_of(placement: Placement, nodes: Nodes) -> NDArray[np.int64]:
    """[E]: on how many nodes each expert is."""
    found: NDArray[np.int64] = placement.holds_EW.reshape(-1, nodes.count, nodes.per_node).any(axis=2).sum(axis=1)
    return found
