"""Traffic and time of a layer under a placement: tokens sent to experts, and experts sent to ranks.

A layer takes the time of its busiest rank and link.

Sparse collectives (Hecate, section 3.1): SparseAllGather(before, after) sends experts to their new replicas;
SparseReduceScatter(after, before) sums gradients along the same routes. An expert is sent along a chain: from its owner
to each node that lacks it, in ring order, and within each node from rank to rank. So it crosses the network once per
node without it, and on each kind of link no rank sends or receives more than λS, the bytes of all experts sent (Eq. 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import NodeLayout, Placement


class Transfer(NamedTuple):
    """Transfer of one expert from one rank to another."""

    expert: int
    source: int
    target: int
    step: int  # above 0: forwards data of an earlier step


def gather_transfers(before: Placement, after: Placement, node_layout: NodeLayout) -> tuple[Transfer, ...]:
    """Return the transfers of a SparseAllGather from `before` to `after`, sorted by step, expert and source.

    `after` has the replicas of `before`, and maybe more.
    """
    assert before.is_within(after)
    transfers: list[Transfer] = []
    # Experts received from other nodes, to spread them over the links of a node's ranks.
    arrived_W = [0] * node_layout.num_ranks
    for expert, owner in enumerate(before.owners):
        if after.replicas[expert] != before.replicas[expert]:
            has = {owner, *before.replicas[expert]}
            missing = [rank for rank in after.replicas[expert] if rank not in has]
            transfers += _chain_transfers(expert, owner, has, missing, node_layout, arrived_W)
    return tuple(sorted(transfers, key=lambda transfer: (transfer.step, transfer.expert, transfer.source)))


def _chain_transfers(
    expert: int, owner: int, has: set[int], missing: Sequence[int], node_layout: NodeLayout, arrived_W: list[int]
) -> Iterable[Transfer]:
    end, ready = owner, 0  # end of the chain, and the first step in which it can forward
    # In ring order from the owner's node: no inter-node link carries the expert twice.
    lacking_N: dict[int, list[int]] = {}
    for rank in missing:
        lacking_N.setdefault(node_layout.of(rank), []).append(rank)
    for node in sorted(lacking_N, key=lambda node: (node - node_layout.of(owner)) % node_layout.num_nodes):
        lacking = lacking_N[node]
        first, holders = 0, sorted(rank for rank in has if node_layout.of(rank) == node)
        if holders:
            holder = owner if owner in holders else holders[0]
        else:
            # The rank that has received the fewest experts from other nodes.
            holder = min(lacking, key=lambda rank: (arrived_W[rank], rank))
            arrived_W[holder] += 1
            lacking.remove(holder)
            yield Transfer(expert, end, holder, ready)
            end, ready = holder, ready + 1
            first = ready
        # From rank to rank: none sends the expert twice.
        around = sorted(lacking, key=lambda rank: (rank - holder) % node_layout.num_ranks)
        for step, (source, target) in enumerate(zip([holder, *around], around, strict=False), start=first):
            yield Transfer(expert, source, target, step)


def chain_gathers(before: Sequence[Transfer], more: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """Join the transfers of two consecutive gathers into one gather with the fewest steps.

    Worked example: `before` sends expert 5 from rank 0 to 1. `more` sends expert 5 from rank 1 to 2, which becomes step
    1, and expert 6 from rank 0 to 2, which is step 0.
    """
    ready = {(one.expert, one.target): one.step + 1 for one in before}
    added = []
    for one in more:
        step = ready.get((one.expert, one.source), 0)
        ready[one.expert, one.target] = step + 1
        added.append(one._replace(step=step))
    return tuple(sorted((*before, *added), key=lambda one: (one.step, one.expert, one.source)))


def reduce_transfers(gathered: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """Return the transfers of the SparseReduceScatter that is the adjoint of a gather: routes and steps reversed.

    A rank sends an expert's gradient after receiving and adding all contributions to it.
    """
    last = max((transfer.step for transfer in gathered), default=0)
    back = (Transfer(expert, target, source, last - step) for expert, source, target, step in gathered)
    # A fixed summation order.
    return tuple(sorted(back, key=lambda transfer: (transfer.step, transfer.expert, transfer.source)))


def link_bytes(transfers: Iterable[Transfer], node_layout: NodeLayout, expert_bytes: int) -> NDArray[np.int64]:
    """Return [4, W], the bytes that ranks send and receive between nodes, and send and receive within their node."""
    counts = np.zeros((4, node_layout.num_ranks), dtype=np.int64)
    for transfer in transfers:
        inside = 2 * (node_layout.of(transfer.source) == node_layout.of(transfer.target))
        counts[inside, transfer.source] += expert_bytes
        counts[inside + 1, transfer.target] += expert_bytes
    return counts


def split_tokens(tokens_WE: ArrayLike, placement: Placement, node_layout: NodeLayout) -> NDArray[np.int64]:
    """Split the tokens of each rank and expert, [W, E] integers, over the expert's holders (Hecate, section 4.4).

    A rank that holds the expert keeps its tokens. Otherwise they are split evenly over the holders on its node or, if
    there are none, over all holders. Remainders are assigned round-robin: summed over ranks with the same choice of
    holders, holders differ by at most one token.

    Returns sent_WEV: [W, E, V] int64, tokens that rank W sends to rank V.
    """
    tokens_WE = np.asarray(tokens_WE, dtype=np.int64)
    holds_EW = placement.holds_EW
    node_W = node_layout.node_W
    beside_WEV = holds_EW[None] & (node_W[:, None] == node_W[None, :])[:, None, :]
    inside_WE = beside_WEV.any(axis=2)
    choice_WEV = np.where(inside_WE[:, :, None], beside_WEV, holds_EW[None])
    own_WEV = np.eye(node_layout.num_ranks, dtype=np.bool_)[:, None]
    choice_WEV = np.where(holds_EW.T[:, :, None], own_WEV, choice_WEV)
    copies_WE = choice_WEV.sum(axis=2)
    each_WE, rest_WE = np.divmod(tokens_WE, copies_WE)
    # Remainders of preceding ranks with the same choice of holders: the holders on the node, or all. If one node has
    # all holders, both choices are the same.
    several_E = node_layout.by_node(holds_EW).any(axis=2).sum(axis=1) > 1
    beside_WE = inside_WE & several_E
    far_WE = np.where(beside_WE, 0, rest_WE)
    near_WE = np.where(beside_WE & ~holds_EW.T, rest_WE, 0)
    near_NRE = near_WE.reshape(node_layout.num_nodes, node_layout.per_node, -1)
    before_WE = np.where(
        beside_WE,
        (near_NRE.cumsum(axis=1) - near_NRE).reshape(node_layout.num_ranks, -1),
        far_WE.cumsum(axis=0) - far_WE,
    )
    place_WEV = choice_WEV.cumsum(axis=2) - 1 - before_WE[:, :, None]
    more_WEV = place_WEV % copies_WE[:, :, None] < rest_WE[:, :, None]
    return choice_WEV * (each_WE[:, :, None] + more_WEV)


#: All-to-alls of an iteration: dispatch and combine, forward and backward.
EXCHANGES = 4


@dataclass(frozen=True)
class PlacementCosts:
    """Costs of tokens and experts on one machine.

    Attributes:
        token_s: seconds that an expert computes for one token, forward and backward.
        token_bytes: size of one token in one all-to-all.
        expert_bytes: size of one expert's parameters, and of its gradients.
        state_bytes: size of one expert's optimizer state, including master copies of parameters.
        inter_bytes_s, intra_bytes_s: bytes/s that a rank sends while it also receives, between nodes and within a node.

    Raises `ConfigError` unless all are finite and 0 or more, and the bandwidths above 0.
    """

    token_s: float
    token_bytes: int
    expert_bytes: int
    state_bytes: int
    inter_bytes_s: float
    intra_bytes_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not np.isfinite(value) or value < 0 or (value == 0 and name.endswith("_bytes_s")):
                raise ConfigError(f"costs: {name} = {value} must be finite, not negative, and a bandwidth more than 0")

    @property
    def move_bytes(self) -> int:
        """Bytes sent when an expert changes its owner: parameters and optimizer state."""
        return self.expert_bytes + self.state_bytes


class PlacementLoad(NamedTuple):
    """Token counts of ranks and links under a placement, in one all-to-all of a layer."""

    work_W: NDArray[np.int64]  # computed by each rank
    inter_node_received_W: NDArray[np.int64]  # received by each rank from other nodes
    max_inter_node_tokens: int  # maximum sent or received by a rank between nodes
    max_intra_node_tokens: int  # the same within its node


def placement_load(tokens_WE: ArrayLike, placement: Placement, node_layout: NodeLayout) -> PlacementLoad:
    """Return the token counts of ranks and links. `tokens_WE`: [W, E] integers."""
    sent_WEV = split_tokens(tokens_WE, placement, node_layout)
    flow_WV = sent_WEV.sum(axis=1)  # from each rank to each rank
    node_W = node_layout.node_W
    inside_WV = node_W[:, None] == node_W
    inter_WV = np.where(inside_WV, 0, flow_WV)
    intra_WV = flow_WV - inter_WV
    np.fill_diagonal(intra_WV, 0)  # tokens that stay on their rank use no link
    return PlacementLoad(
        sent_WEV.sum(axis=(0, 1)),
        inter_WV.sum(axis=0),
        *(int(max(part_WV.sum(axis=0).max(), part_WV.sum(axis=1).max())) for part_WV in (inter_WV, intra_WV)),
    )


def exchange_s(tokens: PlacementLoad, costs: PlacementCosts) -> float:
    """Return the busiest rank's seconds of a layer's all-to-alls in an iteration."""
    inter_s = tokens.max_inter_node_tokens / costs.inter_bytes_s
    intra_s = tokens.max_intra_node_tokens / costs.intra_bytes_s
    return EXCHANGES * costs.token_bytes * max(inter_s, intra_s)


def compute_s(tokens: PlacementLoad, costs: PlacementCosts) -> float:
    """Return the seconds of a layer's experts in an iteration on the rank with the most tokens."""
    return float(tokens.work_W.max()) * costs.token_s


def layer_s(tokens: PlacementLoad, costs: PlacementCosts) -> float:
    """Return the seconds of a layer's all-to-alls and experts in an iteration, the objective of placements."""
    return exchange_s(tokens, costs) + compute_s(tokens, costs)


def transfers_s(
    transfers: Iterable[Transfer], node_layout: NodeLayout, costs: PlacementCosts, expert_bytes: int
) -> float:
    """Return the busiest rank's seconds of expert transfers of `expert_bytes` each."""
    inter, intra = link_bytes(transfers, node_layout, expert_bytes).reshape(2, -1).max(axis=1)
    return float(max(inter / costs.inter_bytes_s, intra / costs.intra_bytes_s))


def exposed_s(
    before: Placement, after: Placement, node_layout: NodeLayout, costs: PlacementCosts, hidden_s: float = 0.0
) -> float:
    """Return the seconds that the transfers of new replicas, those not in `before`, add to the layer's time.

    Parameter transfers count in full: experts wait for them. `hidden_s` hides the gradient transfers of the replicas in
    `before` first, then those of the new replicas.

    Worked example: transfers take 5 s for the new replicas and 3 s for the replicas in `before`. With `hidden_s` = 6,
    parameters count 5 s and gradients 2 s.
    """
    if after.is_within(before):
        return 0.0

    def gather_s(start: Placement, end: Placement) -> float:
        return transfers_s(gather_transfers(start, end, node_layout), node_layout, costs, costs.expert_bytes)

    there_s = gather_s(before.both(after), after)
    if hidden_s:
        hidden_s -= gather_s(before.sharding, before)
    return there_s + there_s - min(there_s, max(0.0, hidden_s))
