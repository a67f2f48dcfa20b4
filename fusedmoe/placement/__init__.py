"""Placements of experts: owners, replicas for a step, and the transfers between them (Hecate).

`placement`, `traffic`, `balance`, `row_sharing`, `replica_search` and `hecate` hold values and policies and import no
torch; `expert_map` gives their results to dispatchers of other libraries. The other modules implement `ShardedExperts`,
which applies placements to a model in training.
"""

from __future__ import annotations

from fusedmoe.placement.expert_map import ExpertMap, balance_experts
from fusedmoe.placement.hecate import LayerLoads
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import PlacementCosts

__all__ = ["ExpertMap", "LayerLoads", "NodeLayout", "Placement", "PlacementCosts", "balance_experts"]
