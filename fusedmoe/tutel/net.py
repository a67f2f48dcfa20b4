"""Communication by Tutel's names."""

from __future__ import annotations

from fusedmoe.tutel.impls.communicate import (
    all_gather,
    all_to_all,
    all_to_all_single,
    allreduce_backward,
    allreduce_forward,
    barrier,
    batch_all_gather_v,
    batch_all_to_all_v,
    reduce_scatter,
    simple_all_gather,
    simple_all_reduce,
    simple_all_to_all,
    simple_broadcast,
    simple_reduce_scatter,
    simple_split,
    spatial_split,
    zero_gather,
    zero_scatter,
)
from fusedmoe.tutel.impls.groups import get_world_rank, get_world_size
from fusedmoe.tutel.impls.job import create_groups_from_world, create_standalone_group
from fusedmoe.tutel.impls.optimizer import TutelDistributedOptimizer

__all__ = [
    "TutelDistributedOptimizer",
    "all_gather",
    "all_to_all",
    "all_to_all_single",
    "allreduce_backward",
    "allreduce_forward",
    "barrier",
    "batch_all_gather_v",
    "batch_all_to_all_v",
    "create_groups_from_world",
    "create_standalone_group",
    "get_world_rank",
    "get_world_size",
    "reduce_scatter",
    "simple_all_gather",
    "simple_all_reduce",
    "simple_all_to_all",
    "simple_broadcast",
    "simple_reduce_scatter",
    "simple_split",
    "spatial_split",
    "zero_gather",
    "zero_scatter",
]
