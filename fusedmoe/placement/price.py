"""Prices of a placement in an iteration of one layer: the time of the busiest rank, and of experts that move first.

Tokens go to an expert's copies as Hecate's dispatcher sends them (section 4.4).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.transfers import Transfer, traffic


def dispatch(tokens_WE: ArrayLike, placement: Placement, nodes: Nodes) -> NDArray[np.int64]:
    """Splits the tokens of each rank and expert over the expert's copies.

    A rank that holds the expert keeps its tokens; else they go to the copies on its node, evenly; where there are none,
    to all copies, evenly. What does not divide goes on where the rank before, with the same choice, left off: so copies
    differ by one token at most in what such ranks send them together.

    Args:
        tokens_WE: [W, E] integers, the tokens that a rank has for an expert.
    Returns:
        sent_WEV: [W, E, V] int64, how many of them the first rank sends to rank V (V = W); over V they sum up to
        `tokens_WE`.
    Raises:
        ConfigError: sizes that do not fit together, or tokens that are no counts.
    """
    tokens_WE = np.asarray(tokens_WE)
    if tokens_WE.shape != (nodes.ranks, placement.experts) or placement.ranks != nodes.ranks:
        raise ConfigError(
            f"dispatch: tokens of shape {tokens_WE.shape}, but {placement.experts} experts on {placement.ranks} ranks, "
            f"and {nodes.ranks} ranks in nodes"
        )
    if tokens_WE.dtype.kind not in "iu" or (tokens_WE < 0).any():
        raise ConfigError("dispatch: tokens are counted in integers of 0 or more")
    tokens_WE = tokens_WE.astype(np.int64)
    holds_EW = placement.holds_EW
    node_W = np.arange(nodes.ranks) // nodes.per_node
    beside_WEV = holds_EW[None] & (node_W[:, None] == node_W[None, :])[:, None, :]
    inside_WE = beside_WEV.any(axis=2)
    choice_WEV = np.where(inside_WE[:, :, None], beside_WEV, holds_EW[None])
    # A rank that holds the expert sends nothing; else tokens stay on the node; else they go to all copies.
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
        inter_bytes_s, intra_bytes_s: what a rank sends in a second to other nodes, and inside its own; it receives as
            much at the same time.

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
    """Loads of ranks and links under a placement, in tokens, in one all-to-all of an iteration of a layer.

    Attributes:
        work_W: [W], tokens that each rank computes.
        ingress_W: [W], tokens that each rank receives from other nodes.
        busiest_inter, busiest_intra: the most that a rank sends, or receives, to or from other nodes; and other ranks
            of its own.
    """

    work_W: NDArray[np.int64]
    ingress_W: NDArray[np.int64]
    busiest_inter: int
    busiest_intra: int


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
    """Returns the seconds of an iteration's all-to-alls of the layer: each takes as long as its busiest rank needs.

    Both kinds of links work at the same time.
    """
    inter_s, intra_s = tokens.busiest_inter / costs.inter_bytes_s, tokens.busiest_intra / costs.intra_bytes_s
    return EXCHANGES * costs.token_bytes * max(inter_s, intra_s)


def compute_s(tokens: PlacementLoad, costs: PlacementCosts) -> float:
    """Returns the seconds in which the rank with the most tokens computes its experts of the layer in an iteration."""
    return float(tokens.work_W.max()) * costs.token_s


def layer_s(tokens: PlacementLoad, costs: PlacementCosts) -> float:
    """Returns the seconds of an iteration's all-to-alls and experts of the layer, by which a placement is judged."""
    return exchange_s(tokens, costs) + compute_s(tokens, costs)


def transfers_s(transfers: Iterable[Transfer], nodes: Nodes, costs: PlacementCosts, expert_bytes: int) -> float:
    """Returns the seconds that transfers of experts of so many bytes take: those of the busiest rank."""
    inter_sent_W, inter_received_W, intra_sent_W, intra_received_W = traffic(transfers, nodes, expert_bytes)
    inter = max(inter_sent_W.max(), inter_received_W.max())
    intra = max(intra_sent_W.max(), intra_received_W.max())
    return float(max(inter / costs.inter_bytes_s, intra / costs.intra_bytes_s))
