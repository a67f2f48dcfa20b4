"""Where weight gradients run: beside which communication (Lancet §4, Algorithm 1).

A gap is a collective, and what computes must wait for it; weight gradients on which it does not depend, and which do
not depend on it, may run meanwhile. Each goes into one gap at most. A gap hides as much as its weight gradients take,
and no more than it lasts itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fusedmoe.errors import ConfigError

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

Placement = tuple[int | None, ...]
"""For each weight gradient its gap; None: in none."""

# Of the longest gap, for the exact programme, which counts in whole numbers: finer ones cost it much time.
_TICKS = 2**12


class Gap(NamedTuple):
    """A collective of so many seconds, and the weight gradients that may run beside it."""

    seconds: float
    allowed: Collection[int]


def place_greedily(gaps: Sequence[Gap], weights_s: Sequence[float]) -> Placement:
    """Algorithm 1: into each gap, in order, the weight gradient that fits best, until it is full or none is left.

    `weights_s`: seconds of each. One that fits no gap that had room is None.
    """
    placed: list[int | None] = [None] * len(weights_s)
    for number, gap in enumerate(gaps):
        left = gap.seconds
        free = {one for one in gap.allowed if placed[one] is None}
        while left > 0 and free:
            best = min(free, key=lambda one: (abs(left - weights_s[one]), one))
            left -= weights_s[best]
            placed[best] = number
            free.remove(best)
    return tuple(placed)


def place_exactly(gaps: Sequence[Gap], weights_s: Sequence[float], *, limit: float = 10.0) -> Placement:
    """What hides most, by an integer programme (OR-Tools CP-SAT); never worse than the greedy placement.

    `limit`: of the solver's work, see `solved`.

    Raises `ConfigError` where OR-Tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigError("exact placement needs OR-Tools: pip install 'fusedmoe[plan]'") from None
    model = cp_model.CpModel()
    tick_s = max((gap.seconds for gap in gaps), default=0.0) / _TICKS or 1.0
    ticks = [round(seconds / tick_s) for seconds in weights_s]
    chosen = {(one, number): model.new_bool_var("") for number, gap in enumerate(gaps) for one in gap.allowed}
    for one in range(len(weights_s)):
        model.add_at_most_one(chosen[one, number] for number, gap in enumerate(gaps) if one in gap.allowed)
    hidden = []
    for number, gap in enumerate(gaps):
        amount = model.new_int_var(0, round(gap.seconds / tick_s), "")
        model.add(amount <= sum(ticks[one] * chosen[one, number] for one in gap.allowed))
        hidden.append(amount)
    model.maximize(sum(hidden))
    greedy = place_greedily(gaps, weights_s)
    for (one, number), variable in chosen.items():
        model.add_hint(variable, greedy[one] == number)
    solver = solved(model, limit)
    if solver is None:
        return greedy
    found: list[int | None] = [None] * len(weights_s)
    for (one, number), variable in chosen.items():
        if solver.value(variable):
            found[one] = number
    return max((tuple(found), greedy), key=lambda placed: placement_hides_s(gaps, weights_s, placed))


def placement_hides_s(gaps: Sequence[Gap], weights_s: Sequence[float], placed: Placement) -> float:
    """Seconds that a placement hides."""
    inside = [0.0] * len(gaps)
    for seconds, number in zip(weights_s, placed, strict=True):
        if number is not None:
            inside[number] += seconds
    return sum(min(gap.seconds, filled) for gap, filled in zip(gaps, inside, strict=True))


def with_leftovers(placed: Placement, gaps: Sequence[Gap]) -> Placement:
    """What found no gap runs beside its last one (spec line L2), or else at the end."""
    return tuple(
        max((place for place, gap in enumerate(gaps) if one in gap.allowed), default=None) if number is None else number
        for one, number in enumerate(placed)
    )


def solved(model: cp_model.CpModel, limit: float) -> cp_model.CpSolver | None:
    """The solver of an integer programme (OR-Tools CP-SAT) with the best solution that it found; None where there is
    none. The result is the same on every rank.

    `limit`: of its work, in units of about a second that are the same on every machine. One worker with one seed then
    stops at the same solution everywhere.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = limit
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    return solver if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
