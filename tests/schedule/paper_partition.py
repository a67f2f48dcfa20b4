"""FSMoE's two-step gradient partitioning (§5), for comparison with the library's exact search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import differential_evolution

from fusedmoe.schedule.passes import GradientPartition
from fusedmoe.schedule.policies.fsmoe_plans import PassOption, _all_reduce_s
from fusedmoe.schedule.step_costs import StepCosts


def fill_free(costs: StepCosts, of: Sequence[Sequence[PassOption]]) -> GradientPartition:
    """Step 1: each place takes as many bytes as it hides, as early as possible. `of[l]`: the options of layer l.

    Each bucket pays the start of an all-reduce: a place shorter than the start takes nothing.
    """
    middle, beside = [0.0] * len(of), [0.0] * len(of)
    ready = 0.0
    for layer in reversed(range(len(of))):
        middle[layer] = min(ready, costs.all_reduce.amount(of[layer][0].slack_s))
        ready -= middle[layer]
        beside[layer] = min(ready, costs.all_reduce.amount(costs.layers[layer].dense_total_s("backward")))
        ready += costs.layers[layer].gradient_bytes - beside[layer]
    return GradientPartition(tuple(middle), tuple(beside))


def spread_rest(
    costs: StepCosts, of: Sequence[Sequence[PassOption]], first: GradientPartition, seed: int = 0
) -> GradientPartition:
    """Step 2: move the rest of step 1 into the middles, where that shortens the sum of all passes.

    Differential evolution over each middle's share of the available bytes, which satisfies the constraint by
    construction: in back-propagation order no place has taken more than was ready. Never worse than step 1.
    """
    layers = list(reversed(range(len(of))))
    if all(len(found) == 1 for found in of):
        return first  # one option for every pass: a byte in a middle costs the same as at the end
    gradients = np.array(costs.gradient_bytes, dtype=np.float64)[layers]
    taken = np.cumsum([first.pipeline_bytes[layer] + first.dense_bytes[layer] for layer in layers])
    left = np.cumsum(gradients) - gradients - taken
    room = np.minimum.accumulate(left[::-1])[::-1]  # a byte taken here is missing in all later places
    places = [n for n in range(len(layers)) if room[n] > 0]
    if not places:
        return first
    busy_s, free_s = _padded([of[layers[n]] for n in places])
    fixed = np.array([first.pipeline_bytes[layers[n]] for n in places])
    total = gradients.sum() - taken[-1]

    def extra(shares: Any) -> Any:
        """[P] or [P, T] shares of T trials -> bytes."""
        result = np.zeros_like(shares)
        placed = np.zeros_like(shares[0])
        for p, n in enumerate(places):
            size = shares[p] * np.maximum(room[n] - placed, 0.0)
            result[p] = np.where(size >= 1, size, 0.0)  # smaller values are rounding, and would cost nothing
            placed = placed + result[p]
        return result

    def seconds(shares: Any) -> Any:
        added = extra(shares)
        middle_s = _all_reduce_s(costs.all_reduce, fixed[:, None] + added)
        passes = np.maximum(busy_s[..., None] + middle_s, free_s[..., None])
        return passes.min(0).sum(0) + _all_reduce_s(costs.all_reduce, total - added.sum(0))

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
    middle = list(first.pipeline_bytes)
    for n, bytes_ in zip(places, extra(found.x), strict=True):
        middle[layers[n]] += float(bytes_)
    return first._replace(pipeline_bytes=tuple(middle))


def _padded(of: Sequence[Sequence[PassOption]]) -> tuple[Any, Any]:
    """[V, P] seconds of up to V options in P places, padded with the place's first option."""
    most = max(map(len, of))
    rows = [[(option.busy_s, option.free_s) for option in (*found, *[found[0]] * (most - len(found)))] for found in of]
    array = np.array(rows)  # [P, V, 2]
    return array[..., 0].T, array[..., 1].T
