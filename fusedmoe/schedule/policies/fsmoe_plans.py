"""FSMoE's plan of a step: the best degree for each layer and pass, and gradients overlapped with the backward pass.

FSMoE §5 hides gradient all-reduces in backward passes. Each layer's pass has two slots for gradients of layers that
precede it in backward order: the middle of its pipeline, between the last dispatch and the first combine, and its dense
part. Remaining gradients are reduced at the end, where no computation hides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from fusedmoe.schedule.cost import Contention, Line
from fusedmoe.schedule.passes import GradientPartition, TaskOrder, choose_degree, pass_s
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import fastest_plan
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import MAX_DEGREE, LayerCosts, StageTime, StepCosts, map_shared
from fusedmoe.schedule.task import PHASES


def fsmoe_plan(costs: StepCosts, orders: Sequence[TaskOrder], max_degree: int) -> Plan:
    """Return the plan with the fastest order and degree for each layer and pass, and the fastest gradient partition.

    If different degrees in the two passes cost time (`LayerCosts.rechunk_s`), one degree per layer for both passes is
    tried too.

    Args:
        max_degree: maximum number of chunks per layer and pass.
    """
    own = _plan_with(costs, orders, lambda layer: (1, max_degree))
    if not any(layer.rechunk_s for layer in costs.layers):
        return own

    def one_degree(layer: LayerCosts) -> tuple[int, int]:
        def both_s(degree: int) -> float:
            passes = (layer.chunks[phase] for phase in PHASES)
            return sum(min(pass_s(of, degree, order=o, contention=costs.contention) for o in orders) for of in passes)

        best = min(range(1, max_degree + 1), key=both_s)
        return best, best

    return fastest_plan([own, _plan_with(costs, orders, one_degree)], costs)


def _plan_with(
    costs: StepCosts, orders: Sequence[TaskOrder], degree_range_of: Callable[[LayerCosts], tuple[int, int]]
) -> Plan:
    def choices_of(layer: LayerCosts) -> tuple[Callable[[str, float], ChunkedPass], list[PassOption]]:
        least, most = degree_range_of(layer)

        @cache
        def best_pass(phase: str, gar_s: float) -> ChunkedPass:
            # All-reduces take `gar_s` seconds. Ties go to the first order.
            choose = partial(choose_degree, layer.chunks[phase], gar_s, contention=costs.contention)
            choices = [choose(order=order, max_degree=most, least=least) for order in orders]
            best = min(range(len(orders)), key=lambda number: choices[number].seconds)
            return ChunkedPass(orders[best], choices[best].degree)

        back = layer.chunks["backward"]
        options = [pass_options(back, order, costs.contention, most, least) for order in orders]
        return best_pass, _undominated_options(chain.from_iterable(options))

    choices = map_shared(choices_of, costs.layers)
    forward = [best_pass("forward", 0.0) for best_pass, _ in choices]
    partition = search(costs, [options for _, options in choices])
    # A bucket in the middle of a pass may change its best degree.
    gars_s = [bucket_s(costs.all_reduce, middle) for middle in partition.pipeline_bytes]
    backward = [best_pass("backward", gar_s) for (best_pass, _), gar_s in zip(choices, gars_s, strict=True)]
    return step_plan(costs, forward, backward, partition)


class PassOption(NamedTuple):
    """Time of a backward pass with g seconds of all-reduces: max(saturated_extra_s + g, no_all_reduce_s).

    Attributes:
        saturated_extra_s: seconds beyond g, the seconds of all-reduces, if all-reduces saturate the link.
        no_all_reduce_s: seconds of the pass without all-reduces.
    """

    saturated_extra_s: float
    no_all_reduce_s: float

    @classmethod
    def from_stages(
        cls, chunks: Mapping[str, StageTime], order: TaskOrder, degree: int, contention: Contention
    ) -> PassOption:
        """Return the option's times; exact without contention."""
        # Contention can lengthen the pass a little: all-reduces and overlapped tasks slow down.
        no_all_reduce_s = pass_s(chunks, degree, order=order, contention=contention)
        # So long that they are partly exposed: the pass takes their time plus saturated_extra_s.
        exposed_s = 2 * no_all_reduce_s + 1.0
        saturated_extra_s = pass_s(chunks, degree, exposed_s, order=order, contention=contention) - exposed_s
        return cls(saturated_extra_s, no_all_reduce_s)

    @property
    def slack_s(self) -> float:
        """Seconds of all-reduces that the pass hides."""
        return self.no_all_reduce_s - self.saturated_extra_s


def pass_options(
    chunks: Mapping[str, StageTime],
    order: TaskOrder,
    contention: Contention,
    max_degree: int = MAX_DEGREE,
    least: int = 1,
) -> list[PassOption]:
    """Return the options that may be fastest for some g, by decreasing degree; the first is fastest for g = 0."""
    best = choose_degree(chunks, order=order, contention=contention, max_degree=max_degree, least=least)
    options: list[PassOption] = []
    # Degrees above the best one for g = 0 only add start-up times.
    for degree in range(best.degree, least - 1, -1):
        option = PassOption.from_stages(chunks, order, degree, contention)
        if not options or option.saturated_extra_s < options[-1].saturated_extra_s:
            options.append(option)
    return options


def _undominated_options(options: Iterable[PassOption]) -> list[PassOption]:
    """Return the options that are fastest for some all-reduce time g, by increasing `no_all_reduce_s`."""
    kept: list[PassOption] = []
    for option in sorted(options, key=lambda option: (option.no_all_reduce_s, option.saturated_extra_s)):
        if not kept or option.saturated_extra_s < kept[-1].saturated_extra_s:
            kept.append(option)
    return kept


def search(costs: StepCosts, options: Sequence[Sequence[PassOption]]) -> GradientPartition:
    """Return the best partition of gradients for each layer's options; exact, by dynamic programming."""
    # The paper fills free time greedily and spreads the rest by differential evolution.
    line = costs.all_reduce
    seconds, ready = np.zeros(1), np.zeros(1)  # per state: time so far, and bytes not yet placed
    steps = []
    for layer in reversed(range(len(options))):
        dense_s = costs.layers[layer].dense_total_s("backward")
        # All bytes, none, or what an option hides: for amounts in between, a byte costs the same as at the end.
        amounts = np.array([0.0, np.inf, *(line.amount(option.slack_s) for option in options[layer])])
        middle = np.minimum(ready[:, None], amounts)
        middle_s = _all_reduce_s(line, middle)
        pass_s = np.minimum.reduce(
            [np.maximum(option.saturated_extra_s + middle_s, option.no_all_reduce_s) for option in options[layer]]
        )
        left = ready[:, None] - middle
        beside = np.stack([np.zeros_like(left), np.minimum(left, line.amount(dense_s)), left])
        # [3, states, amounts], flattened. Keep undominated states: none has both less time and fewer bytes left.
        seconds = (seconds[:, None] + pass_s + np.maximum(dense_s, _all_reduce_s(line, beside))).ravel()
        ready = (left - beside + costs.layers[layer].gradient_bytes).ravel()
        order = np.lexsort((ready, seconds))
        least = np.minimum.accumulate(ready[order])
        kept = order[np.concatenate([[True], ready[order][1:] < least[:-1] - 0.5])]
        steps.append((middle, beside, kept))
        seconds, ready = seconds[kept], ready[kept]
    # Backtrack from the best state, first layer first.
    state = int(np.argmin(seconds + _all_reduce_s(line, ready)))
    places: list[tuple[float, float]] = []
    for middle, beside, kept in reversed(steps):
        which = np.unravel_index(kept[state], beside.shape)
        places.append((float(middle[which[1:]]), float(beside[which])))
        state = int(which[1])
    return GradientPartition(tuple(in_middle for in_middle, _ in places), tuple(after for _, after in places))


def bucket_s(line: Line, size: float) -> float:
    """Return the seconds of a bucket; 0 for less than a byte, a rounding error."""
    return line.seconds(size) if size >= 1 else 0.0


def _all_reduce_s(line: Line, size: Any) -> Any:
    return np.where(size >= 1, line.alpha_s + line.beta_s * size, 0.0)
