"""Process groups, collectives with bounded waits, and the metadata exchange of expert-parallel ranks.

Every wait ends within the topology's `timeout_s`. All ranks then raise a `RankError` that names the rank at fault, the
operation and the fix.
"""

from __future__ import annotations

from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.exchange import exchange_metadata
from fusedmoe.comm.metadata import RowForm
from fusedmoe.comm.rendezvous import init_process_group

__all__ = ["RowForm", "exchange_metadata", "init_process_group", "make_all_to_all"]
