"""Traffic of a layer under a placement, and its price: tokens that go to their experts, experts that go to ranks.

Tokens go to an expert's copies as Hecate's dispatcher sends them (section 4.4). A layer takes the time of its busiest
rank, and what experts take that move first.

Sparse collectives (section 3.1): SparseAllGather(before, after) brings each expert from where it is to where it shall
be; SparseReduceScatter(after, before) sums gradients along the same ways back. An expert goes along a chain: from its
owner once to each other node that lacks it, from node to node in the order of a ring, and in each node from where it
arrived from rank to rank. So it crosses the network once for each node without it, and on each kind of link no
rank sends or receives more than λS, the bytes of all experts that travel (Eq. 1). An owner that sent to everyone would.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import Nodes, Placement


class Transfer(NamedTuple):
    """Transfer of one expert from one rank to another."""

    expert: int
    source: int
    target: int
    step: int  # 0: it needs nothing before it; else it needs the data of an earlier one, of the same expert


def gather(before: Placement, after: Placement, nodes: Nodes) -> tuple[Transfer, ...]:
    """Lists the transfers of a SparseAllGather that makes `after` of `before`, by step, expert and source.

    Raises `ConfigError` where `after` lacks something of `before`, or has other owners or ranks.
    """
    if not before.is_within(after) or before.ranks != nodes.ranks:
        raise ConfigError(
            "sparse all-gather: what is there before must be there after, with the same owners on the same ranks: "
            f"{before} is not within {after}".replace("\n", "; ")
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
    lacking_N: dict[int, list[int]] = {}
    for rank in missing:
        lacking_N.setdefault(nodes.of(rank), []).append(rank)
    for node in sorted(lacking_N, key=lambda node: (node - nodes.of(owner)) % nodes.count):
        lacking = lacking_N[node]
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


def chained(before: Sequence[Transfer], more: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """Lists the transfers of two gathers, of which the second goes on where the first has ended, as one gather.

    It has as few steps as can be: an expert is sent on in the step after the one in which it arrives. Worked example:
    expert 5 went from rank 0 to 1; then it goes from there to 2, which is step 1, and expert 6 from 0 to 2, step 0.
    """
    ready = {(one.expert, one.target): one.step + 1 for one in before}
    added = []
    for one in more:
        step = ready.get((one.expert, one.source), 0)
        ready[one.expert, one.target] = step + 1
        added.append(one._replace(step=step))
    return tuple(sorted((*before, *added), key=lambda one: (one.step, one.expert, one.source)))


def reduce(gathered: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """Lists the transfers of a SparseReduceScatter, the adjoint of a gather: the same ways back, the last step first.

    A target adds the rows that it receives to its own; a rank sends once it has received all of the expert's.
    """
    last = max((transfer.step for transfer in gathered), default=0)
    back = (Transfer(expert, target, source, last - step) for expert, source, target, step in gathered)
    # An expert's gradients are summed in the same order whatever arrives first: by step, then by source.
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


def counted(operation: str, tokens_WE: ArrayLike, placement: Placement, nodes: Nodes) -> NDArray[np.integer]:
    """Returns the tokens of each rank and expert, [W, E]. Raises `ConfigError` for sizes that do not fit together, and
    tokens that are no counts."""
    tokens_WE = np.asarray(tokens_WE)
    if tokens_WE.shape != (nodes.ranks, placement.experts) or placement.ranks != nodes.ranks:
        raise ConfigError(
            f"{operation}: tokens of shape {tokens_WE.shape}, but {placement.experts} experts on {placement.ranks} "
            f"ranks, and {nodes.ranks} ranks in nodes"
        )
    if tokens_WE.dtype.kind not in "iu" or (tokens_WE < 0).any():
        raise ConfigError(f"{operation}: tokens are counted in integers of 0 or more")
    return tokens_WE


def dispatch(tokens_WE: ArrayLike, placement: Placement, nodes: Nodes) -> NDArray[np.int64]:
    """Splits the tokens of each rank and expert, [W, E] integers, over the expert's copies.

    A rank that holds the expert keeps its tokens; else they go to the copies on its node, evenly; where there are none,
    to all copies, evenly. What does not divide goes on where the rank before, with the same choice, left off: so copies
    differ by one token at most in what such ranks send them together.

    Returns sent_WEV: [W, E, V] int64, how many of them the first rank sends to rank V (V = W).

    Raises `ConfigError` for sizes that do not fit together, and tokens that are no counts.
    """
    tokens_WE = counted("dispatch", tokens_WE, placement, nodes).astype(np.int64)
    holds_EW = placement.holds_EW
    node_W = np.arange(nodes.ranks) // nodes.per_node
    beside_WEV = holds_EW[None] & (node_W[:, None] == node_W[None, :])[:, None, :]
    inside_WE = beside_WEV.any(axis=2)
    choice_WEV = np.where(inside_WE[:, :, None], beside_WEV, holds_EW[None])
    local_EW = holds_EW & (np.arange(nodes.ranks)[:, None, None] == np.arange(nodes.ranks))  # [W, E, V]
    choice_WEV = np.where(holds_EW.T[:, :, None], local_EW, choice_WEV)
    copies_WE = choice_WEV.sum(axis=2)
    each_WE, rest_WE = np.divmod(tokens_WE, copies_WE)
    # Where the ranks before have left off: those of the same node for choices inside it, all others without a copy on
    # theirs for choices among all; where one node has all copies, these are the same choice.
    several_E = holds_EW.reshape(-1, nodes.count, nodes.per_node).any(axis=2).sum(axis=1) > 1
    beside_WE = inside_WE & several_E
    far_WE = np.where(beside_WE, 0, rest_WE)
    near_WE = np.where(beside_WE & ~holds_EW.T, rest_WE, 0)
    near_NRE = near_WE.reshape(nodes.count, nodes.per_node, -1)
    before_WE = np.where(
        beside_WE,
        (near_NRE.cumsum(axis=1) - near_NRE).reshape(nodes.ranks, -1),
        far_WE.cumsum(axis=0) - far_WE,
    )
    # The tokens that do not divide go one each to the next copies in turn, from where the ranks before have left off.
    place_WEV = choice_WEV.cumsum(axis=2) - 1 - before_WE[:, :, None]
    more_WEV = place_WEV % copies_WE[:, :, None] < rest_WE[:, :, None]
    return choice_WEV * (each_WE[:, :, None] + more_WEV)


#: All-to-alls of an iteration: dispatch and combine, forward and backward.
EXCHANGES = 4


@dataclass(frozen=True)
class PlacementCosts:
    """Costs of tokens and experts on one machine.

    Attributes:
        token_s: seconds in which an expert computes one token, forward and backward together.
        token_bytes: of one token in one all-to-all.
        expert_bytes: of one expert's parameters; its gradients are as large.
        state_bytes: of one expert's optimizer state, with the master copy of its parameters where there is one.
        inter_bytes_s, intra_bytes_s: bytes that a rank sends in a second to other nodes, and inside its own, while it
            receives as many.

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
        """Bytes of an expert that moves for good: parameters and optimizer state."""
        return self.expert_bytes + self.state_bytes


class PlacementLoad(NamedTuple):
    """Loads of ranks and links under a placement, in tokens, in one all-to-all of an iteration of a layer."""

    work_W: NDArray[np.int64]  # that each rank computes
    ingress_W: NDArray[np.int64]  # that each rank receives from other nodes
    busiest_inter: int  # the most that a rank sends, or receives, between nodes
    busiest_intra: int  # and inside its node


def load(tokens_WE: ArrayLike, placement: Placement, nodes: Nodes) -> PlacementLoad:
    """Counts where the tokens, [W, E] integers, go under a placement."""
    sent_WEV = dispatch(tokens_WE, placement, nodes)
    flow_WV = sent_WEV.sum(axis=1)  # the tokens from each rank to each, its own included
    node_W = np.arange(nodes.ranks) // nodes.per_node
    inside_WV = node_W[:, None] == node_W
    inter_WV = np.where(inside_WV, 0, flow_WV)
    intra_WV = flow_WV - inter_WV
    np.fill_diagonal(intra_WV, 0)  # a rank's own tokens take no link
    return PlacementLoad(
        sent_WEV.sum(axis=(0, 1)),
        inter_WV.sum(axis=0),
        *(int(max(part_WV.sum(axis=0).max(), part_WV.sum(axis=1).max())) for part_WV in (inter_WV, intra_WV)),
    )


def exchange_s(tokens: PlacementLoad, costs: PlacementCosts) -> float:
    """Returns the seconds of an iteration's all-to-alls of the layer: each takes as long as its busiest rank needs."""
    inter_s, intra_s = tokens.busiest_inter / costs.inter_bytes_s, tokens.busiest_intra / costs.intra_bytes_s
    # Both kinds of links work at the same time.
    return EXCHANGES * costs.token_bytes * max(inter_s, intra_s)


def compute_s(tokens: PlacementLoad, costs: PlacementCosts) -> float:
    """Returns the seconds in which the rank with the most tokens computes its experts of the layer in an iteration."""
    return float(tokens.work_W.max()) * costs.token_s


def layer_s(tokens: PlacementLoad, costs: PlacementCosts) -> float:
    """Returns the seconds of an iteration's all-to-alls and experts of the layer, by which a placement is judged."""
    return exchange_s(tokens, costs) + compute_s(tokens, costs)


def transfers_s(transfers: Iterable[Transfer], nodes: Nodes, costs: PlacementCosts, expert_bytes: int) -> float:
    """Returns the seconds that transfers of experts of so many bytes take: those of the busiest rank."""
    *inter, sent, received = (counts_W.max() for counts_W in traffic(transfers, nodes, expert_bytes))
    return float(max(max(inter) / costs.inter_bytes_s, max(sent, received) / costs.intra_bytes_s))
