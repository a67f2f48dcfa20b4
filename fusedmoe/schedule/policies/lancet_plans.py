"""Lancet's plan of a step: micro-batches forward, weight gradients beside communication backward.

Forward, a dynamic programme finds which consecutive layers go in micro-batches, and in how many (section 5). Backward,
Algorithm 1 places each weight gradient beside a collective (section 4).

A gap is a collective, and what computes must wait for it; weight gradients on which it does not depend, and which do
not depend on it, may run meanwhile. Each goes into one gap at most. A gap hides as much as its weight gradients take,
and no more than it lasts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.list_schedule import fill_idle_slots, list_plan
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import Degrees, gradient_buckets, loss_tasks, optimizer_tasks, pass_tasks
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import LINKS, RESOURCES, WEIGHT_GRADIENTS, Task, standard_dependencies

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

#: For each weight gradient its gap; None: in none.
Placement = tuple[int | None, ...]

# Of the longest gap, for the exact programme, which counts in whole numbers: finer ones cost it much time.
_TICKS = 2**12


class Gap(NamedTuple):
    """A collective of so many seconds, and the weight gradients that may run beside it."""

    seconds: float
    allowed: Collection[int]


def place_greedily(gaps: Sequence[Gap], weights_s: Sequence[float]) -> Placement:
    """Places weight gradients by Algorithm 1: into each gap, in order, the one that fits best, until it is full.

    `weights_s`: seconds of each. One that fits no gap that had room is None.
    """
    placed: list[int | None] = [None] * len(weights_s)
    for number, gap in enumerate(gaps):
        left = gap.seconds
        free = {weight for weight in gap.allowed if placed[weight] is None}
        while left > 0 and free:
            best = min(free, key=lambda weight: (abs(left - weights_s[weight]), weight))
            left -= weights_s[best]
            placed[best] = number
            free.remove(best)
    return tuple(placed)


def place_exactly(gaps: Sequence[Gap], weights_s: Sequence[float], *, limit: float = 10.0) -> Placement:
    """Returns the placement that hides most, by an integer programme; never worse than the greedy one.

    `limit`: of the solver's work, see `solved`. Raises `ConfigError` where OR-Tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigError("exact placement needs OR-Tools: pip install 'fusedmoe[plan]'") from None
    model = cp_model.CpModel()
    tick_s = max((gap.seconds for gap in gaps), default=0.0) / _TICKS or 1.0
    ticks = [round(seconds / tick_s) for seconds in weights_s]
    chosen = {(weight, number): model.new_bool_var("") for number, gap in enumerate(gaps) for weight in gap.allowed}
    for weight in range(len(weights_s)):
        model.add_at_most_one(chosen[weight, number] for number, gap in enumerate(gaps) if weight in gap.allowed)
    hidden = []
    for number, gap in enumerate(gaps):
        amount = model.new_int_var(0, round(gap.seconds / tick_s), "")
        model.add(amount <= sum(ticks[weight] * chosen[weight, number] for weight in gap.allowed))
        hidden.append(amount)
    model.maximize(sum(hidden))
    greedy = place_greedily(gaps, weights_s)
    # The solver starts from the greedy placement, so that it never ends with a worse one.
    for (weight, number), variable in chosen.items():
        model.add_hint(variable, greedy[weight] == number)
    solver = solved(model, limit)
    if solver is None:
        return greedy
    gap_of = {weight: number for (weight, number), variable in chosen.items() if solver.value(variable)}
    exact = tuple(gap_of.get(weight) for weight in range(len(weights_s)))
    # Whole ticks are rounded: the greedy placement may hide more.
    return max((exact, greedy), key=lambda placed: placement_hides_s(gaps, weights_s, placed))


def placement_hides_s(gaps: Sequence[Gap], weights_s: Sequence[float], placed: Placement) -> float:
    """Returns the seconds that a placement hides."""
    filled_s = [sum(s for s, at in zip(weights_s, placed, strict=True) if at == number) for number in range(len(gaps))]
    return sum(min(gap.seconds, filled) for gap, filled in zip(gaps, filled_s, strict=True))


def with_leftovers(placed: Placement, gaps: Sequence[Gap]) -> Placement:
    """Returns a placement in which what found no gap runs beside its last gap (spec line L2), or else at the end."""
    return tuple(
        max((place for place, gap in enumerate(gaps) if one in gap.allowed), default=None) if number is None else number
        for one, number in enumerate(placed)
    )


def solved(model: cp_model.CpModel, limit: float) -> cp_model.CpSolver | None:
    """Returns the solver of an integer programme (OR-Tools CP-SAT) with the best solution that it found, the same on
    every rank; None where it found no solution.

    `limit`: of its work, in units of about a second that are the same on every machine.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = limit
    # One worker with one seed stops at the same solution everywhere.
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    return solver if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None


#: Micro-batches that are tried (spec line L5), and the most layers of a range.
PARTS, LONGEST = (1, 2, 4, 8), 4

#: Of a gradient all-reduce: the buckets of PyTorch's DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20

_WEIGHTS = frozenset(WEIGHT_GRADIENTS.values())


def lancet_plan(costs: StepCosts, parts: Sequence[int] = PARTS, *, weights: bool = True) -> Plan:
    """Returns the plan: forward, ranges of layers in micro-batches by the dynamic programme; backward, each layer in
    one piece, and its weight gradients where Algorithm 1 places them; gradients in buckets when nothing else is to be
    sent. Either of the two can be left out (Lancet's ablation).

    Args:
        parts: micro-batches that the ranges may have; only (1,): no ranges.
        weights: weight gradients are placed; otherwise they stay with the input gradients.
    Raises:
        ConfigError: layers that cannot be split.
    """
    orders: dict[str, list[Task]] = {resource: [] for resource in RESOURCES}
    for start, stop, k in forward_ranges(costs, parts):
        for resource, tasks in _forward_plan(costs, range(start, stop), k).orders.items():
            orders[resource] += tasks
    orders["compute"] += loss_tasks(costs)
    layers, whole = reversed(range(len(costs.layers))), Degrees(1, 1)
    backward = [task for layer in layers for task in pass_tasks(costs, layer, "backward", whole, weights=weights)]
    for resource, placed in _backward_orders(backward, costs.durations(backward)).items():
        orders[resource] += placed
    orders["compute"] += optimizer_tasks(costs)
    seconds = costs.durations([task for tasks in orders.values() for task in tasks])
    return fill_idle_slots(orders, seconds, gradient_buckets(costs.gradient_bytes, BUCKET_BYTES), costs.all_reduce)


def forward_ranges(costs: StepCosts, parts: Sequence[int] = PARTS) -> tuple[SplitRange, ...]:
    """Returns the layers that go forward in micro-batches together."""
    known: dict[tuple[object, ...], float] = {}

    def seconds(start: int, stop: int, k: int) -> float:
        layers = costs.layers[start:stop]
        # Layers are often one object many times: ranges of equal ones take equally long, and are simulated once.
        key = (*map(id, layers), k)
        if key not in known:
            here = StepCosts(layers, costs.all_reduce, costs.contention)
            known[key] = makespan(_forward_plan(here, range(len(layers)), k), here)
        return known[key]

    return best_ranges(len(costs.layers), seconds, parts, LONGEST)[0]


def _forward_plan(costs: StepCosts, layers: Iterable[int], degree: int) -> Plan:
    """Returns the forward pass of some layers that follow each other, in micro-batches, by list scheduling."""
    tasks = [task for layer in layers for task in pass_tasks(costs, layer, "forward", Degrees(degree, degree))]
    return list_plan(tasks, costs.durations(tasks))


class SplitRange(NamedTuple):
    """Parts `start` to `stop` (without it) in `parts` micro-batches; 1: not split."""

    start: int
    stop: int
    parts: int


def best_ranges(
    count: int, seconds: Callable[[int, int, int], float], parts: Iterable[int], longest: int
) -> tuple[tuple[SplitRange, ...], float]:
    """Returns the best way to cut `count` parts into ranges, and its seconds.

    Args:
        seconds: P(start, stop, k), of a range by itself.
        parts: the k to try.
        longest: the most parts of a range; a part that is not split is a range by itself.
    """
    choices = sorted(set(parts) | {1})
    # T(n) = min over i, k of T(i) + P(i, n, k), with the ranges that lead there.
    best: list[tuple[float, tuple[SplitRange, ...]]] = [(0.0, ())]
    for stop in range(1, count + 1):
        options = []
        for start in range(max(0, stop - longest), stop):
            for k in choices:
                if k > 1 or start == stop - 1:
                    options.append((best[start][0] + seconds(start, stop, k), SplitRange(start, stop, k)))
        total_s, last = min(options)
        best.append((total_s, (*best[last.start][1], last)))
    return best[count][1], best[count][0]


def gaps_of(tasks: Sequence[Task], seconds: Mapping[Task, float]) -> tuple[list[Task], list[Task], list[Gap]]:
    """Returns the collectives of a pass in order, its weight gradients, and the gap of each collective."""
    before = standard_dependencies(tasks)
    # All that a task waits for, by whatever way: a weight gradient beside a collective among these would wait in a
    # circle.
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
    """Returns the orders of a backward pass with its weight gradients where Algorithm 1 places them."""
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
