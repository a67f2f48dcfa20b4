"""Plans of one layer's passes, from a plan of more or from degrees alone."""

from __future__ import annotations

from collections.abc import Collection

from fusedmoe.schedule.orders import one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import PIPELINE, Task, resources_of
from fusedmoe.schedule.timeline import RESOURCES

#: Policies whose links inside the node and between nodes work at the same time; the others have one queue.
THREE_QUEUES = ("fsmoe", "fused", "joint")

_GRADIENT = "gradient-all-reduce"


def pass_of(plan: Plan, layer: int, phase: str) -> Plan:
    """One layer's pass as a plan of more has it: its chunks, and the gradient pieces that run between them."""

    def own(task: Task) -> bool:
        return _is_chunk(task, layer, phase)

    orders = {}
    for resource in RESOURCES:
        tasks = plan.on(resource)
        places = [place for place, task in enumerate(tasks) if own(task)]
        between = tasks[places[0] : places[-1] + 1] if places else ()
        orders[resource] = [task for task in between if own(task) or task.kind == _GRADIENT]
    return Plan.of(orders)


def half(plan: Plan, phase: str) -> Plan:
    """One pass of all layers as a plan of both has it, with its gradient pieces and weight gradients."""
    orders = {resource: [task for task in plan.on(resource) if task.phase == phase] for resource in RESOURCES}
    after = {
        task: tuple(one for one in before if one.phase == phase)
        for task, before in plan.after.items()
        if task.phase == phase
    }
    return Plan.of(orders, after)


def beside(plan: Plan, layer: int) -> tuple[Task, ...]:
    """The gradient pieces after the last chunk of a layer's backward pass, before those of the next layer."""
    places = [place for place, task in enumerate(plan.inter) if _is_chunk(task, layer, "backward")]
    found: list[Task] = []
    for task in plan.inter[places[-1] + 1 :] if places else ():
        if task.kind != _GRADIENT:
            break
        # What waits for this layer's own dense part or an earlier one's, or is told to wait, is not beside anything.
        if task.layer is not None and task.layer > layer and task not in plan.after:
            found.append(task)
    return tuple(found)


def pass_by_degree(policy: str, kinds: Collection[str], degree: int, phase: str) -> Plan:
    """One layer's pass with that many chunks, in the order that a policy has for chunks.

    `kinds`: those of the layer, of which its parts count.
    """
    order = three_queues if policy in THREE_QUEUES else one_queue
    return Plan.of(order(kinds, degree, phase))


def fused_pass(kind: str, degree: int, phase: str) -> Plan:
    """One layer's pass by a fused operation in that many chunks."""
    chunks = [Task(kind, chunk, 0, phase) for chunk in range(degree)]
    return Plan.of(dict.fromkeys(resources_of(kind), chunks))


def _is_chunk(task: Task, layer: int, phase: str) -> bool:
    return (task.layer, task.phase) == (layer, phase) and task.kind in PIPELINE
