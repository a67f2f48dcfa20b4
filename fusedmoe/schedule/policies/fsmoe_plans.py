"""FSMoE's plan of a step: the best degree for each layer and pass, and gradients where they hide behind it.

Gradient all-reduces hide in backward passes (FSMoE §5). In the order of back-propagation each layer has two places for
a bucket of the gradients of the layers before it: the middle of its pipeline, between the last dispatch and the first
combine, and beside its dense part. What fits in neither runs after everything, where nothing hides it. `search` finds
how many bytes go to each place; what a layer's pass hides is a `PassOption`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fusedmoe.schedule.cost import Contention, Line
from fusedmoe.schedule.passes import Order, Partition, choose_degree, pass_s
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import best_of
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import MAX_DEGREE, LayerCosts, StageTime, StepCosts
from fusedmoe.schedule.task import PHASES


def partitioned_plan(costs: StepCosts, orders: Sequence[Order], limit: int) -> Plan:
    """Returns the plan with the best degree of the best of some orders for each layer and pass; gradients by `search`.

    Where chunks of the forward pass that are none of the backward pass cost something, one degree for both may be
    better: the shorter of the two plans is returned, of equally short ones the one with fewer tasks.
    """
    own = _plan_with(costs, orders, lambda layer: (1, limit))
    if not any(layer.regroup_s for layer in costs.layers):
        return own

    def one_degree(layer: LayerCosts) -> tuple[int, int]:
        def both_s(degree: int) -> float:
            passes = (layer.chunks[phase] for phase in PHASES)
            return sum(min(pass_s(of, degree, order=o, contention=costs.contention) for o in orders) for of in passes)

        best = min(range(1, limit + 1), key=both_s)
        return best, best

    return best_of([own, _plan_with(costs, orders, one_degree)], costs)


def _plan_with(costs: StepCosts, orders: Sequence[Order], ends_of: Callable[[LayerCosts], tuple[int, int]]) -> Plan:
    """Returns the plan whose passes have the best of each layer's degrees, from a least to a most."""

    def best_pass(layer: LayerCosts, phase: str, gar_s: float) -> ChunkedPass:
        """Returns the shortest pass with all-reduces of `gar_s` seconds; of equally short ones the first order's."""
        key = id(layer), phase, gar_s
        if key not in passes:
            least, limit = ends[id(layer)]
            choices = [
                choose_degree(
                    layer.chunks[phase], gar_s, order=o, contention=costs.contention, limit=limit, least=least
                )
                for o in orders
            ]
            best = min(range(len(orders)), key=lambda number: choices[number].seconds)
            passes[key] = ChunkedPass(orders[best], choices[best].degree)
        return passes[key]

    # Layers are often one object many times: what is found for one of them holds for all.
    passes: dict[tuple[int, str, float], ChunkedPass] = {}
    ends: dict[int, tuple[int, int]] = {}
    options: dict[int, list[PassOption]] = {}
    for layer in costs.layers:
        if id(layer) not in options:
            least, limit = ends[id(layer)] = ends_of(layer)
            back = layer.chunks["backward"]
            options[id(layer)] = _useful(
                option for o in orders for option in pass_options(back, o, costs.contention, limit, least)
            )
    forward = [best_pass(layer, "forward", 0.0) for layer in costs.layers]
    partition = search(costs, [options[id(layer)] for layer in costs.layers])
    # What is in the middle of a pass may make another degree the best.
    gars_s = [bucket_s(costs.all_reduce, middle) for middle in partition.middle]
    backward = [best_pass(layer, "backward", gar_s) for layer, gar_s in zip(costs.layers, gars_s, strict=True)]
    return step_plan(costs, forward, backward, partition)


class PassOption(NamedTuple):
    """A way to run a layer's backward pass. With all-reduces of g seconds it takes max(busy_s + g, free_s) seconds."""

    order: Order
    degree: int
    busy_s: float
    free_s: float

    @classmethod
    def from_stages(
        cls, chunks: Mapping[str, StageTime], order: Order, degree: int, contention: Contention
    ) -> PassOption:
        """Returns the option of this order and degree, exact without contention."""
        # With contention all-reduces slow down what they hide behind: a pass can take a little longer than this says.
        free_s = pass_s(chunks, degree, order=order, contention=contention)
        # All-reduces so long that some of them must stay exposed: then the pass takes busy_s beside them.
        exposed_s = 2 * free_s + 1.0
        busy_s = pass_s(chunks, degree, exposed_s, order=order, contention=contention) - exposed_s
        return cls(order, degree, busy_s, free_s)

    @property
    def slack_s(self) -> float:
        """Seconds of all-reduces that the pass hides."""
        return self.free_s - self.busy_s


def pass_options(
    chunks: Mapping[str, StageTime], order: Order, contention: Contention, limit: int = MAX_DEGREE, least: int = 1
) -> list[PassOption]:
    """Returns the degrees of a backward pass that can be best for some g: the first one for g = 0, each further one
    slower and less busy."""
    best = choose_degree(chunks, order=order, contention=contention, limit=limit, least=least)
    options: list[PassOption] = []
    # More chunks than are best without all-reduces only start more often: they are slower, and busier.
    for degree in range(best.degree, least - 1, -1):
        option = PassOption.from_stages(chunks, order, degree, contention)
        if not options or option.busy_s < options[-1].busy_s:
            options.append(option)
    return options


def _useful(options: Iterable[PassOption]) -> list[PassOption]:
    """Returns the options that are the best for some all-reduce, the first for none; each hides more than the last."""
    kept: list[PassOption] = []
    for option in sorted(options, key=lambda option: (option.free_s, option.busy_s)):
        if not kept or option.busy_s < kept[-1].busy_s:
            kept.append(option)
    return kept


def search(costs: StepCosts, options: Sequence[Sequence[PassOption]]) -> Partition:
    """Returns the best partition, where the passes of each layer take what their options say: exact, by a dynamic
    programme over the layers."""
    # The paper fills what is free and spreads the rest by differential evolution; tests compare with that.
    line = costs.all_reduce
    seconds, ready = np.zeros(1), np.zeros(1)  # of each state: so far, and the bytes that wait for a place
    steps = []
    for layer in reversed(range(len(options))):
        dense_s = costs.layers[layer].dense_total_s("backward")
        # All, nothing, and as much as an option hides: between these a byte costs the same as at the end.
        amounts = np.array([0.0, np.inf, *(line.amount(option.slack_s) for option in options[layer])])
        middle = np.minimum(ready[:, None], amounts)
        busy_s = _all_reduce_s(line, middle)
        pass_s = np.minimum.reduce([np.maximum(option.busy_s + busy_s, option.free_s) for option in options[layer]])
        left = ready[:, None] - middle
        beside = np.stack([np.zeros_like(left), np.minimum(left, line.amount(dense_s)), left])
        # [3, states, amounts], then one row of all that is not beaten: of two states the one with less time and less
        # left over wins.
        seconds = (seconds[:, None] + pass_s + np.maximum(dense_s, _all_reduce_s(line, beside))).ravel()
        ready = (left - beside + costs.layers[layer].gradient_bytes).ravel()
        order = np.lexsort((ready, seconds))
        least = np.minimum.accumulate(ready[order])
        kept = order[np.concatenate([[True], ready[order][1:] < least[:-1] - 0.5])]
        steps.append((middle, beside, kept))
        seconds, ready = seconds[kept], ready[kept]
    # The choices that led to the best state, from the first layer, which came last, to the last one.
    state = int(np.argmin(seconds + _all_reduce_s(line, ready)))
    places: list[tuple[float, float]] = []
    for middle, beside, kept in reversed(steps):
        which = np.unravel_index(kept[state], beside.shape)
        places.append((float(middle[which[1:]]), float(beside[which])))
        state = int(which[1])
    return Partition(*(tuple(part) for part in zip(*places, strict=True))) if places else Partition((), ())


def bucket_s(line: Line, size: float) -> float:
    """Returns the seconds of a bucket; less than a byte is rounding, and does not even start."""
    return line.seconds(size) if size >= 1 else 0.0


def _all_reduce_s(line: Line, size: Any) -> Any:
    return np.where(size >= 1, line.alpha_s + line.beta_s * size, 0.0)
