"""Placements of experts: owners, replicas for a step, and the transfers between them (Hecate).

placement, traffic, balance, row_sharing, replica_search, hecate    values and policies, without torch
expert_map     replicas and row splits as tensors, for dispatchers of other libraries
sharded_experts, planner, resharding    `ShardedExperts` for a model in training: decisions, changes of owners
placed_experts, placed_dispatcher       one layer's experts in its forward and backward passes
expert_table, replicas, replica_state   memory of a rank's experts; states of its replicas
replica_gradients, expert_transport     gradients of replicas in autograd; transfers of experts
"""

from __future__ import annotations

from fusedmoe.placement.expert_map import ExpertMap, balance_experts
from fusedmoe.placement.hecate import LayerLoads
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import PlacementCosts

__all__ = ["ExpertMap", "LayerLoads", "NodeLayout", "Placement", "PlacementCosts", "balance_experts"]
