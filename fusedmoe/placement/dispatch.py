"""The dispatcher (Hecate, section 4.4): to which of an expert's copies each rank sends its tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import Nodes, Placement


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
    place_WEV = choice_WEV.cumsum(axis=2) - 1 - before_WE[:, :, None]
    more_WEV = place_WEV % copies_WE[:, :, None] < rest_WE[:, :, None]
    return choice_WEV * (each_WE[:, :, None] + more_WEV)


def work_W(sent_WEV: NDArray[np.int64]) -> NDArray[np.int64]:
    """[W]: the tokens that each rank's experts compute."""
    return sent_WEV.sum(axis=(0, 1))


def flows_WV(sent_WEV: NDArray[np.int64]) -> NDArray[np.int64]:
    """[W, V]: the tokens from each rank to each, its own included."""
    return sent_WEV.sum(axis=1)
