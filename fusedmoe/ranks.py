"""Ranks and what they tell each other: topologies, groups, and collectives whose waits are bounded.

A collective of `torch.distributed` that a rank never joins waits for minutes, and its error names nobody. Those here
end within the topology's `timeout_s`, on all ranks, with a `RankError` that names the rank at fault, the operation and
the cure. On CPUs ranks first compare what they call, so that different calls are an error as well.

    with Topology.from_sizes(ep=2) as topology, topology.guard("my job"):
        everyone = all_gather_object(topology.world, facts, "comparing facts")

`group_of` is for a process group that another library made; `begin` and `wait` are for a collective of your own.
"""

from __future__ import annotations

from fusedmoe.comm.all_to_all import ALGORITHMS, Traffic, TwoLevel, make_all_to_all
from fusedmoe.comm.collectives import (
    all_gather_object,
    all_gather_rows,
    all_reduce,
    all_to_all_rows,
    begin,
    device_of,
    on_all_ranks,
    reduce_scatter_rows,
    wait,
)
from fusedmoe.comm.failure.board import RENEWED_S, tell_others
from fusedmoe.comm.group import Group, launch_in_order_of_issue
from fusedmoe.comm.one_sided.heap import no_gpu, not_for_torch
from fusedmoe.comm.one_sided.heaps import BACKENDS
from fusedmoe.comm.rendezvous import init_process_group
from fusedmoe.comm.topology import Topology, group_of
from fusedmoe.kernels.libraries import nvshmem_packages

__all__ = ["Group", "Topology", "group_of", "device_of", "init_process_group", "launch_in_order_of_issue"]
__all__ += ["all_gather_object", "all_gather_rows", "all_reduce", "all_to_all_rows", "reduce_scatter_rows"]
__all__ += ["begin", "wait"]
__all__ += ["ALGORITHMS", "Traffic", "TwoLevel", "make_all_to_all"]
__all__ += ["RENEWED_S", "on_all_ranks", "tell_others"]
__all__ += ["BACKENDS", "no_gpu", "not_for_torch", "nvshmem_packages"]
