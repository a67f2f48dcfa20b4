"""Lancet's plan of a step: micro-batches forward, weight gradients beside communication backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from fusedmoe.schedule.list_schedule import fill_idle_slots
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.ranges import Range, best_ranges
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.stack_costs import LayerCosts, StackCosts
from fusedmoe.schedule.step import gradient_pieces
from fusedmoe.schedule.task import LINKS, WEIGHT_GRADIENTS, Task, standard_dependencies
from fusedmoe.schedule.timeline import RESOURCES
from fusedmoe.schedule.weights import Gap, Placement, place_greedily
from fusedmoe.schedule.whole import Split, forward_plan, pass_tasks, task_seconds, with_weights

#: Micro-batches that are tried (spec line L5), and the most layers of a range.
PARTS, LONGEST = (1, 2, 4, 8), 4

#: Of a gradient all-reduce: the buckets of PyTorch's DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20

_WEIGHTS = frozenset(WEIGHT_GRADIENTS.values())


def lancet_plan(costs: StackCosts, parts: Sequence[int] = PARTS, *, weights: bool = True) -> Plan:
    """Forward, ranges of layers in micro-batches by the dynamic programme; backward, each layer in one piece, and its
    weight gradients where Algorithm 1 places them; gradients in buckets when nothing else is to be sent.

    Either of the two passes can be left out (Lancet's ablation).

    Args:
        parts: micro-batches that the ranges may have; only (1,): no ranges.
        weights: weight gradients are placed; otherwise they stay with the input gradients.
    Raises:
        ConfigError: layers that cannot be split.
    """
    orders: dict[str, list[Task]] = {resource: [] for resource in RESOURCES}
    seconds: dict[Task, float] = {}
    for start, stop, k in forward_ranges(costs, parts):
        plan = forward_plan(costs, range(start, stop), k)
        seconds |= task_seconds(costs, plan, Split(k, 1))
        for resource in RESOURCES:
            orders[resource] += plan.on(resource)
    if costs.loss_s is not None:
        orders["compute"].append(Task("loss", None, None, None))
        seconds[orders["compute"][-1]] = costs.loss_s
    layers = reversed(range(len(costs.layers)))
    backward = [task for layer in layers for task in pass_tasks(costs, layer, "backward", 1)]
    if weights:
        backward = list(with_weights(backward))
    seconds |= task_seconds(costs, backward, Split(1, 1, weights=weights))
    for resource, tasks in _backward_orders(backward, seconds).items():
        orders[resource] += tasks
    if costs.optimizer_s is not None:
        orders["compute"].append(Task("optimizer", None, None, None))
        seconds[orders["compute"][-1]] = costs.optimizer_s
    return fill_idle_slots(orders, seconds, gradient_pieces(costs.gradient_bytes, BUCKET_BYTES), costs.all_reduce)


def forward_ranges(costs: StackCosts, parts: Sequence[int] = PARTS) -> tuple[Range, ...]:
    """The layers that go forward in micro-batches together."""
    layers = costs.layers

    @cache
    def seconds_of(which: tuple[int, ...], k: int) -> float:
        found = tuple(by_id[one] for one in which)
        here = StackCosts(found, costs.all_reduce, costs.contention)
        return makespan(forward_plan(here, range(len(found)), k), here)

    by_id: dict[int, LayerCosts] = {id(layer): layer for layer in layers}  # layers are often one object many times
    return best_ranges(
        len(layers), lambda start, stop, k: seconds_of(tuple(map(id, layers[start:stop])), k), parts, LONGEST
    )[0]


def gaps_of(tasks: Sequence[Task], seconds: Mapping[Task, float]) -> tuple[list[Task], list[Task], list[Gap]]:
    """The collectives of a pass in order, its weight gradients, and which of these may run beside which of those."""
    before = standard_dependencies(tasks)
    ancestors: dict[Task, set[Task]] = {}
    for task in tasks:
        ancestors[task] = set().union(*({one} | ancestors[one] for one in before[task])) if before[task] else set()
    links = [task for task in tasks if task.kind in LINKS]
    weights = [task for task in tasks if task.kind in _WEIGHTS]
    # No collective of the pass waits for a weight gradient, so one that it does not wait for has no path either way.
    gaps = [
        Gap(seconds[link], frozenset(n for n, weight in enumerate(weights) if link not in ancestors[weight]))
        for link in links
    ]
    return links, weights, gaps


def _backward_orders(tasks: Sequence[Task], seconds: Mapping[Task, float]) -> dict[str, list[Task]]:
    links, weights, gaps = gaps_of(tasks, seconds)
    placed = with_leftovers(place_greedily(gaps, [seconds[weight] for weight in weights]), gaps)
    beside: dict[Task | None, list[Task]] = {}
    for weight, number in zip(weights, placed, strict=True):
        beside.setdefault(None if number is None else links[number], []).append(weight)
    orders: dict[str, list[Task]] = {resource: [] for resource in RESOURCES}
    for task in tasks:
        if task.kind in LINKS:
            orders[LINKS[task.kind]].append(task)
            orders["compute"] += beside.get(task, [])
        elif task.kind not in _WEIGHTS:
            orders["compute"].append(task)
    orders["compute"] += beside.get(None, [])
    return orders


def with_leftovers(placed: Placement, gaps: Sequence[Gap]) -> Placement:
    """What found no gap runs beside its last one (spec line L2), or else at the end."""
    return tuple(
        max((place for place, gap in enumerate(gaps) if one in gap.allowed), default=None) if number is None else number
        for one, number in enumerate(placed)
    )
