"""Process groups, collectives with bounded waits, and the metadata exchange of expert-parallel ranks.

    with Topology.from_sizes(ep=2) as topology, topology.guard("my job"):
        facts = all_gather_object(topology.world, my_facts, "comparing facts")

Every wait ends within the topology's `timeout_s`. All ranks then raise a `RankError` that names the rank at fault, the
operation and the fix. On CPUs ranks also compare which collective they call.
"""

from __future__ import annotations

from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.collectives import all_gather_object, on_all_ranks
from fusedmoe.comm.exchange import Exchange, exchange_metadata
from fusedmoe.comm.group import Group
from fusedmoe.comm.metadata import NonFinite, RowForm, TokenCounts
from fusedmoe.comm.rendezvous import init_process_group
from fusedmoe.comm.topology import Topology, group_of

__all__ = [
    "Exchange",
    "Group",
    "NonFinite",
    "RowForm",
    "TokenCounts",
    "Topology",
    "all_gather_object",
    "exchange_metadata",
    "group_of",
    "init_process_group",
    "make_all_to_all",
    "on_all_ranks",
]
