"""Policies: the published systems, and the one that takes the best of them, as functions from costs to a plan.

    plan = POLICIES["fsmoe"].plan(costs)

A policy is pure: the same costs give the same plan, on every rank. All of them order the same tasks; they differ in
which run at the same time, in how many chunks, and in where the gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fusedmoe.schedule.chunks import Chunks
from fusedmoe.schedule.degree import MAX_DEGREE, choose_degree, pass_s
from fusedmoe.schedule.fill import fill_idle
from fusedmoe.schedule.orders import Order, alternating, one_queue, three_queues
from fusedmoe.schedule.partition import Partition, Way, piece_s, search, ways
from fusedmoe.schedule.passes import chunk_times, one_queue_s
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.stack_costs import LayerCosts, StackCosts
from fusedmoe.schedule.step import Pass, step_plan
from fusedmoe.schedule.timeline import PHASES

#: The degrees that Tutel tries.
TUTEL_DEGREES = (1, 2, 4, 8)

#: The size of Lina's gradient pieces.
LINA_BYTES = 30 * 10**6

_ORDERS = (three_queues, alternating, one_queue)


def sequential(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """One chunk, one thing after the other; every layer's gradient at the end (DeepSpeed-MoE)."""
    one = [Pass(one_queue, 1)] * len(costs.layers)
    return step_plan(costs, one, one, exposed=True)


def tutel(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """One communication queue; the better one of Tutel's degrees, for both passes; gradients at the end."""
    degrees = [degree for degree in TUTEL_DEGREES if degree <= limit]
    both = [Pass(one_queue, min(degrees, key=lambda r: _both_passes_s(layer, r))) for layer in costs.layers]
    return step_plan(costs, both, both, exposed=True)


def pipemoe(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """As Tutel; one degree for both passes, the best one by a model of all-to-all and experts (PipeMoE)."""
    both = _pipemoe_passes(costs, limit)
    return step_plan(costs, both, both, exposed=True)


def tutel_improved(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """As PipeMoE; each layer's gradient is reduced beside the dense part of the layer that follows backward."""
    both = _pipemoe_passes(costs, limit)
    none = (0.0,) * len(costs.layers)
    return step_plan(costs, both, both, Partition(none, (*map(float, costs.gradient_bytes[1:]), 0.0)))


def lina(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """As PipeMoE; gradients in pieces of 30 MB, whenever the communication queue would be idle (PipeMoE + Lina)."""
    both = _pipemoe_passes(costs, limit)
    return fill_idle(costs, both, both, LINA_BYTES)


def fsmoe_no_iio(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """FSMoE with one communication queue: own degrees forward and backward, gradients partitioned."""
    return _fsmoe(costs, [one_queue], limit)


def fsmoe(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """Links in a node and between nodes at once, own degrees for both passes, gradients partitioned."""
    return _fsmoe(costs, [three_queues], limit)


def any_order(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """As FSMoE, with the best of all orders for each layer and pass."""
    return _fsmoe(costs, _ORDERS, limit)


def joint(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """The best in simulation of all other policies, and of all orders, degrees and partitions together."""
    plans = [policy.plan(costs, limit) for name, policy in POLICIES.items() if name != "joint"]
    return best_of([*plans, any_order(costs, limit)], costs)


def best_of(plans: Sequence[Plan], costs: StackCosts) -> Plan:
    """The shortest in simulation; of those that are equally short the one with the fewest tasks: what costs do not know
    of, each task has some of."""
    seconds = [makespan(plan, costs) for plan in plans]
    enough = min(seconds) * (1 + ROUNDING)
    return min((plan for plan, took in zip(plans, seconds, strict=True) if took <= enough), key=len)


@dataclass(frozen=True)
class Policy:
    """`plan(costs, limit)`: the plan of a training step, with degrees up to `limit`."""

    plan: Callable[..., Plan]
    description: str


def _described(*functions: Callable[..., Plan]) -> dict[str, Policy]:
    return {f.__name__: Policy(f, (f.__doc__ or "").strip().rstrip(".")) for f in functions}


#: Every policy by its name.
POLICIES = _described(sequential, tutel, pipemoe, tutel_improved, lina, fsmoe_no_iio, fsmoe, joint)


def _both_passes_s(layer: LayerCosts, degree: int) -> float:
    return sum(one_queue_s(degree, chunk_times(layer.chunks[phase], degree)) for phase in PHASES)


def _pipemoe_passes(costs: StackCosts, limit: int) -> list[Pass]:
    """PipeMoE models neither all-gather nor reduce-scatter: it knows no expert sharding."""

    def modelled_s(layer: LayerCosts, degree: int) -> float:
        times = (chunk_times(layer.chunks[phase], degree) for phase in PHASES)
        return sum(one_queue_s(degree, t._replace(all_gather=0.0, reduce_scatter=0.0)) for t in times)

    return [
        Pass(one_queue, min(range(1, limit + 1), key=lambda degree: modelled_s(layer, degree)))
        for layer in costs.layers
    ]


def _fsmoe(costs: StackCosts, orders: Sequence[Order], limit: int) -> Plan:
    """For each layer and pass the best degree of the best of the orders; gradients by `partition.search`.

    Where chunks of the forward pass that are none of the backward pass cost something, one degree for both may be
    better.
    """
    own = _own_degrees(costs, orders, limit)
    if not any(layer.regroup_s for layer in costs.layers):
        return own
    return best_of([own, _one_degree(costs, orders, limit)], costs)


def _one_degree(costs: StackCosts, orders: Sequence[Order], limit: int) -> Plan:
    """For each layer the degree that is best for both passes together, without gradients between their chunks."""
    of_layer: dict[int, int] = {}  # layers are often one object many times
    chosen: dict[tuple[int, str, float], Pass] = {}

    def seconds(layer: LayerCosts, phase: str, order: Order, degree: int, gar: float = 0.0) -> float:
        return pass_s(layer.chunks[phase], degree, gar, order=order, contention=costs.contention)

    def best(layer: LayerCosts, phase: str, gar: float = 0.0) -> Pass:
        key, degree = (id(layer), phase, gar), of_layer[id(layer)]
        if key not in chosen:
            chosen[key] = Pass(min(orders, key=lambda order: seconds(layer, phase, order, degree, gar)), degree)
        return chosen[key]

    found: dict[int, list[Way]] = {}
    for layer in costs.layers:
        if id(layer) not in of_layer:
            taken_s = {
                degree: sum(min(seconds(layer, phase, order, degree) for order in orders) for phase in PHASES)
                for degree in range(1, limit + 1)
            }
            of_layer[id(layer)] = degree = min(taken_s, key=taken_s.__getitem__)
            back = layer.chunks["backward"]
            found[id(layer)] = _useful([Way.of(back, order, degree, costs.contention) for order in orders])
    partition = search(costs, [found[id(layer)] for layer in costs.layers])
    forward = [best(layer, "forward") for layer in costs.layers]
    gars = [piece_s(costs.all_reduce, middle) for middle in partition.middle]
    backward = [best(layer, "backward", gar) for layer, gar in zip(costs.layers, gars, strict=True)]
    return step_plan(costs, forward, backward, partition)


def _own_degrees(costs: StackCosts, orders: Sequence[Order], limit: int) -> Plan:
    """For each pass its own."""
    known: dict[int, tuple[Pass, list[Way]]] = {}  # layers are often one object many times
    for layer in costs.layers:
        if id(layer) not in known:
            there, back = (layer.chunks[phase] for phase in PHASES)
            found = [way for order in orders for way in ways(back, order, costs.contention, limit)]
            known[id(layer)] = (_best(there, 0.0, orders, costs, limit), _useful(found))
    forward = [known[id(layer)][0] for layer in costs.layers]
    partition = search(costs, [known[id(layer)][1] for layer in costs.layers])
    chosen: dict[tuple[int, float], Pass] = {}
    backward = []
    for layer, middle in zip(costs.layers, partition.middle, strict=True):
        if (id(layer), middle) not in chosen:
            gar = piece_s(costs.all_reduce, middle)
            chosen[id(layer), middle] = _best(layer.chunks["backward"], gar, orders, costs, limit)
        backward.append(chosen[id(layer), middle])
    return step_plan(costs, forward, backward, partition)


def _best(chunks: Mapping[str, Chunks], gar: float, orders: Sequence[Order], costs: StackCosts, limit: int) -> Pass:
    """The shortest pass with all-reduces of `gar` seconds; of equally short ones the first order's."""
    found = [
        (order, choose_degree(chunks, gar, order=order, contention=costs.contention, limit=limit)) for order in orders
    ]
    order, choice = min(found, key=lambda one: one[1].seconds)
    return Pass(order, choice.degree)


def _useful(found: Sequence[Way]) -> list[Way]:
    """The ways that are the best ones for some all-reduce, the first for none; each hides more than the one before."""
    result: list[Way] = []
    for way in sorted(found, key=lambda way: (way.free_s, way.busy_s)):
        if not result or way.busy_s < result[-1].busy_s:
            result.append(way)
    return result
