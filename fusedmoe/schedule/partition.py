"""Where gradient all-reduces hide: how many bytes go into each layer's backward pass (FSMoE §5).

In the order of back-propagation each layer has two places for a piece of the gradients of the layers before it: the
middle of its pipeline, between the last dispatch and the first combine, and beside its dense part. What fits in
neither runs after everything, where nothing hides it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fusedmoe.schedule.cost import Line
from fusedmoe.schedule.passes import Order, choose_degree, pass_s
from fusedmoe.schedule.step_costs import MAX_DEGREE, StageTime, StepCosts


class Partition(NamedTuple):
    """Bytes in each layer's two places, by layer; 0: no piece there. The rest runs at the end."""

    middle: tuple[float, ...]
    beside: tuple[float, ...]


class PassOption(NamedTuple):
    """A way to run a layer's backward pass. With all-reduces of g seconds: max(busy_s + g, free_s) seconds."""

    order: Order
    degree: int
    busy_s: float
    free_s: float

    @classmethod
    def from_stages(cls, chunks: Mapping[str, StageTime], order: Order, degree: int, contention: float) -> PassOption:
        """Exact without contention. With it all-reduces slow down what they hide behind, so that a pass can take a
        little longer than its option says."""
        free_s = pass_s(chunks, degree, order=order, contention=contention)
        exposed_s = 2 * free_s + 1.0  # of which something must stay exposed
        busy_s = pass_s(chunks, degree, exposed_s, order=order, contention=contention) - exposed_s
        return cls(order, degree, busy_s, free_s)

    @property
    def slack_s(self) -> float:
        """Seconds of all-reduces that it hides."""
        return self.free_s - self.busy_s


def pass_options(
    chunks: Mapping[str, StageTime], order: Order, contention: float, limit: int = MAX_DEGREE
) -> list[PassOption]:
    """The degrees of a backward pass that can be best for some g: the first one for g = 0, each further one slower and
    less busy."""
    best = choose_degree(chunks, order=order, contention=contention, limit=limit)
    found: list[PassOption] = []
    for degree in range(best.degree, 0, -1):
        option = PassOption.from_stages(chunks, order, degree, contention)
        if not found or option.busy_s < found[-1].busy_s:
            found.append(option)
    return found


def fill_free(costs: StepCosts, of: Sequence[Sequence[PassOption]]) -> Partition:
    """Step 1 (F14): each place takes as much as it hides, as early as possible. `of[l]`: the options of layer l.

    Each piece pays the start of an all-reduce: a place too short for it takes nothing.
    """
    middle, beside = [0.0] * len(of), [0.0] * len(of)
    ready = 0.0
    for layer in reversed(range(len(of))):
        middle[layer] = min(ready, costs.all_reduce.amount(of[layer][0].slack_s))
        ready -= middle[layer]
        beside[layer] = min(ready, costs.all_reduce.amount(costs.layers[layer].dense_total_s("backward")))
        ready += costs.layers[layer].gradient_bytes - beside[layer]
    return Partition(tuple(middle), tuple(beside))


def spread_rest(costs: StepCosts, of: Sequence[Sequence[PassOption]], first: Partition, seed: int = 0) -> Partition:
    """Step 2 (F15): what step 1 left over moves into the middles, where that makes the sum of all passes shorter.

    Differential evolution over the share of what is there that each middle takes, so that the constraint holds by
    construction: in back-propagation order no place has taken more than was ready. Never worse than step 1.
    """
    layers = list(reversed(range(len(of))))
    if all(len(found) == 1 for found in of):
        return first  # no other way to run any pass: a byte in a middle costs what it costs at the end
    gradients = np.array(costs.gradient_bytes, dtype=np.float64)[layers]
    taken = np.cumsum([first.middle[layer] + first.beside[layer] for layer in layers])
    left = np.cumsum(gradients) - gradients - taken
    room = np.minimum.accumulate(left[::-1])[::-1]  # a byte taken here is missing in all later places
    places = [n for n in range(len(layers)) if room[n] > 0]
    if not places:
        return first
    busy_s, free_s = _padded([of[layers[n]] for n in places])
    fixed = np.array([first.middle[layers[n]] for n in places])
    total = gradients.sum() - taken[-1]

    def extra(shares: Any) -> Any:
        """[P] or [P, T] shares of T trials -> bytes."""
        result = np.zeros_like(shares)
        placed = np.zeros_like(shares[0])
        for p, n in enumerate(places):
            size = shares[p] * np.maximum(room[n] - placed, 0.0)
            result[p] = np.where(size >= 1, size, 0.0)  # less is rounding, and would be free
            placed = placed + result[p]
        return result

    def seconds(shares: Any) -> Any:
        added = extra(shares)
        middle_s = _all_reduce_s(costs.all_reduce, fixed[:, None] + added)
        passes = np.maximum(busy_s[..., None] + middle_s, free_s[..., None])
        return passes.min(0).sum(0) + _all_reduce_s(costs.all_reduce, total - added.sum(0))

    from scipy.optimize import differential_evolution

    found = differential_evolution(
        seconds,
        [(0.0, 1.0)] * len(places),
        x0=np.zeros(len(places)),
        rng=np.random.default_rng(seed),
        vectorized=True,
        updating="deferred",
        polish=False,
        tol=1e-4,
    )
    middle = list(first.middle)
    for n, bytes_ in zip(places, extra(found.x), strict=True):
        middle[layers[n]] += float(bytes_)
    return first._replace(middle=tuple(middle))


def search(costs: StepCosts, of: Sequence[Sequence[PassOption]]) -> Partition:
    """The best partition, where passes take what their options say: exact, by a dynamic programme over the layers.

    Nothing but the ends of what a option hides, and all or nothing, can be best for a place: between them a byte costs
    the same as at the end. Of two states the one with less time and less left over wins.
    """
    line = costs.all_reduce
    seconds, ready = np.zeros(1), np.zeros(1)  # of each state: so far, and the bytes that wait for a place
    steps = []
    for layer in reversed(range(len(of))):
        dense_s = costs.layers[layer].dense_total_s("backward")
        amounts = np.array([0.0, np.inf, *(line.amount(option.slack_s) for option in of[layer])])
        middle = np.minimum(ready[:, None], amounts)
        busy_s = _all_reduce_s(line, middle)
        pass_s = np.minimum.reduce([np.maximum(option.busy_s + busy_s, option.free_s) for option in of[layer]])
        left = ready[:, None] - middle
        beside = np.stack([np.zeros_like(left), np.minimum(left, line.amount(dense_s)), left])
        # [3, states, amounts], then one row of all that is not beaten: by time, each with less left over.
        seconds = (seconds[:, None] + pass_s + np.maximum(dense_s, _all_reduce_s(line, beside))).ravel()
        ready = (left - beside + costs.layers[layer].gradient_bytes).ravel()
        order = np.lexsort((ready, seconds))
        least = np.minimum.accumulate(ready[order])
        kept = order[np.concatenate([[True], ready[order][1:] < least[:-1] - 0.5])]
        steps.append((middle, beside, kept))
        seconds, ready = seconds[kept], ready[kept]
    place = int(np.argmin(seconds + _all_reduce_s(line, ready)))
    found: list[tuple[float, float]] = []
    for middle, beside, kept in reversed(steps):
        which = np.unravel_index(kept[place], beside.shape)
        found.append((float(middle[which[1:]]), float(beside[which])))
        place = int(which[1])
    return Partition(*(tuple(part) for part in zip(*found, strict=True))) if found else Partition((), ())


def piece_s(line: Line, size: float) -> float:
    """Seconds of a piece; less than a byte is rounding, and does not even start."""
    return line.seconds(size) if size >= 1 else 0.0


def _all_reduce_s(line: Line, size: Any) -> Any:
    return np.where(size >= 1, line.alpha_s + line.beta_s * size, 0.0)


def _padded(of: Sequence[Sequence[PassOption]]) -> tuple[Any, Any]:
    """[V, P] seconds of up to V options in P places; where a place has fewer, its first one again."""
    most = max(map(len, of))
    rows = [[(option.busy_s, option.free_s) for option in (*found, *[found[0]] * (most - len(found)))] for found in of]
    array = np.array(rows)  # [P, V, 2]
    return array[..., 0].T, array[..., 1].T
