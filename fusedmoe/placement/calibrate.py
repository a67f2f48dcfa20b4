"""Calibration (Hecate, section 4.2): once the gate has chosen, are still more copies worth their way?"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fusedmoe.placement.materialise import materialise
from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.price import Costs, layer_s, load, transfers_s
from fusedmoe.placement.transfers import gather


def calibrate(placement: Placement, tokens_WE: ArrayLike, nodes: Nodes, m: int, costs: Costs) -> Placement:
    """`placement`, or one with more replicas that is cheaper with their gather counted.

    Algorithm 1 runs again with the tokens as they are, from the copies that there are, in the memory that is left.
    What it adds nothing hides: the gather before this layer's tokens are sent, and as many bytes of gradients on their
    way back. So several overlap degrees are tried, 1, 2, 4, … experts that travel, and the cheapest is taken.

    Args:
        placement: what was materialised on the prediction.
        tokens_WE: [W, E] integers, the tokens of each rank for each expert: the same numbers on every rank.
        m: memory, the number of replicas that a rank may hold, those of `placement` among them.
    Returns:
        A placement that has all of `placement`; equal to it where nothing pays.
    """
    load_E = np.asarray(tokens_WE).sum(axis=0)
    best, best_s = placement, layer_s(load(tokens_WE, placement, nodes), costs)
    for t in (1 << power for power in range((placement.experts - 1).bit_length() + 1)):
        candidate = materialise(placement, load_E, nodes, t, m)
        if candidate == placement:
            continue
        seconds = layer_s(load(tokens_WE, candidate, nodes), costs) + gathered_s(placement, candidate, nodes, costs)
        if seconds < best_s:
            best, best_s = candidate, seconds
    return best


def gathered_s(before: Placement, after: Placement, nodes: Nodes, costs: Costs) -> float:
    """Seconds of the sparse all-gather from one to the other and of its reduce-scatter, when nothing hides them."""
    return 2 * transfers_s(gather(before, after, nodes), nodes, costs, costs.expert_bytes)
