"""Dispatchers, and what a dispatcher of your own, or a door to another library, is built of.

    checks = InputChecks(topology, "my library")
    exchange = Collectives(topology, ops.make_all_to_all("direct", topology), name="my library")

    bad = checks.of_given(x_SM, weight_SK)
    y_SM = exchange.by_operators(Routed(x_SM, layout, weight_SK), experts, bad)

`Collectives` sends tokens by all-to-alls, once to each rank with experts for them; `Local` leaves them where they are.
`GroupedExperts`, `PartExperts` and `AutogradExperts` are experts as a plan calls them, chunk by chunk. A
`ScheduledExchange` is a `Collectives` whose tokens go by a schedule, of a module that `ExternalExperts` describes;
`pipeline_external` has whole decoder blocks with such experts go in micro-batches, as a `DecoderDoor` knows them.
"""

from __future__ import annotations

from fusedmoe.autograd.experts import no_wider
from fusedmoe.blocks.external_blocks import DecoderDoor, ExpertsInput, ExternalBlock, pipeline_external
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, GroupedExperts, PartExperts
from fusedmoe.engine.collectives_dispatcher import Collectives, no_plans
from fusedmoe.engine.dispatcher import Dispatcher, Handle, Local, LocalExperts, Routed, recomputing
from fusedmoe.engine.module_hooks import has_hooks, must_be_called
from fusedmoe.engine.recomputation import Remembered, trains_tokens, unselected
from fusedmoe.engine.run import Assigned, Plans
from fusedmoe.layers.input_checks import InputChecks, not_finite
from fusedmoe.layers.load import expert_load
from fusedmoe.layers.scheduled_exchange import EXCHANGE, ExternalExperts, ScheduledExchange, shared_topology

__all__ = ["Collectives", "Dispatcher", "Handle", "Local", "Routed", "InputChecks", "not_finite", "recomputing"]
__all__ += ["AutogradExperts", "ChunkExperts", "GroupedExperts", "LocalExperts", "expert_load", "no_wider"]
__all__ += ["Assigned", "Plans", "no_plans", "Remembered", "trains_tokens", "unselected"]
__all__ += ["EXCHANGE", "ExternalExperts", "PartExperts", "ScheduledExchange", "shared_topology"]
__all__ += ["DecoderDoor", "ExpertsInput", "ExternalBlock", "has_hooks", "must_be_called", "pipeline_external"]
