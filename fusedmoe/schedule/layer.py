"""Plans of one layer's passes, from a plan of more or from degrees alone."""

from __future__ import annotations

from collections.abc import Collection

from fusedmoe.schedule.orders import one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import PIPELINE
from fusedmoe.schedule.timeline import RESOURCES

#: Policies whose links inside the node and between nodes work at the same time; the others have one queue.
THREE_QUEUES = ("fsmoe", "joint")


def pass_of(plan: Plan, layer: int, phase: str) -> Plan:
    """The chunks of one layer's pass in the order that a plan of more gives them, without anything beside them."""
    return Plan.of(
        {
            resource: [t for t in plan.on(resource) if (t.layer, t.phase) == (layer, phase) and t.kind in PIPELINE]
            for resource in RESOURCES
        }
    )


def pass_by_degree(policy: str, kinds: Collection[str], degree: int, phase: str) -> Plan:
    """One layer's pass with that many chunks, in the order that a policy has for chunks."""
    order = three_queues if policy in THREE_QUEUES else one_queue
    return Plan.of(order(kinds, degree, phase))
