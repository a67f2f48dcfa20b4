"""Placements of experts on ranks, as plain Python without torch.

placement.placement     which ranks hold which expert
placement.traffic       costs of a placement under a batch's routing
placement.balance       how many tokens each replica computes
placement.replica_search, row_sharing, hecate    searches for cheap placements, and Hecate's rule
"""

from __future__ import annotations

from fusedmoe.placement.hecate import LayerLoads
from fusedmoe.placement.placement import Placement
from fusedmoe.placement.traffic import PlacementCosts

__all__ = [
    "LayerLoads",
    "Placement",
    "PlacementCosts",
]
