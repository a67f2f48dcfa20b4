"""Lancet's plan of a step: micro-batches forward, weight gradients overlapped with communication backward.

Forward, dynamic programming selects ranges of consecutive layers and their numbers of micro-batches (section 5).
Backward, Algorithm 1 assigns weight gradients to collectives (section 4).

A gap is a collective that computation has to wait for. Weight gradients without a dependency on it, in either
direction, may run meanwhile, each in at most one gap. A gap hides their time, up to its own duration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import Degrees, gradient_buckets, loss_tasks, optimizer_tasks, pass_tasks
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import LINKS, RESOURCES, WEIGHT_GRADIENTS, Task, standard_dependencies
from fusedmoe.schedule.task_orders import fill_idle_slots, list_plan

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

#: Gap index of each weight gradient; None: no gap.
GapAssignment = tuple[int | None, ...]

# Integer resolution of the exact program. Finer resolutions cost much solver time.
_TICKS_PER_GAP = 2**12


class Gap(NamedTuple):
    """Duration of a collective and the weight gradients that may overlap with it."""

    seconds: float
    allowed: Collection[int]


def place_greedily(gaps: Sequence[Gap], weight_gradients_s: Sequence[float]) -> GapAssignment:
    """Return the index of a gap for each weight gradient, None if no gap took it (Algorithm 1).

    Each gap, in order, takes the unplaced allowed gradient whose duration is closest to its remaining time, until no
    time remains; the last one may exceed the gap.
    """
    placed: list[int | None] = [None] * len(weight_gradients_s)
    for number, gap in enumerate(gaps):
        left = gap.seconds
        free = {weight for weight in gap.allowed if placed[weight] is None}
        while left > 0 and free:
            best = min(free, key=lambda weight: (abs(left - weight_gradients_s[weight]), weight))
            left -= weight_gradients_s[best]
            placed[best] = number
            free.remove(best)
    return tuple(placed)


def place_exactly(gaps: Sequence[Gap], weight_gradients_s: Sequence[float], *, limit: float = 10.0) -> GapAssignment:
    """Return the assignment that hides most, by integer programming; never worse than the greedy one.

    `limit`: see `solve_integer_program`. Raises `ConfigError` without OR-Tools.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigError("exact placement needs OR-Tools: pip install 'fusedmoe[plan]'") from None
    model = cp_model.CpModel()
    tick_s = max((gap.seconds for gap in gaps), default=0.0) / _TICKS_PER_GAP or 1.0
    ticks = [round(seconds / tick_s) for seconds in weight_gradients_s]
    chosen = {(weight, number): model.new_bool_var("") for number, gap in enumerate(gaps) for weight in gap.allowed}
    for weight in range(len(weight_gradients_s)):
        model.add_at_most_one(chosen[weight, number] for number, gap in enumerate(gaps) if weight in gap.allowed)
    hidden = []
    for number, gap in enumerate(gaps):
        amount = model.new_int_var(0, round(gap.seconds / tick_s), "")
        model.add(amount <= sum(ticks[weight] * chosen[weight, number] for weight in gap.allowed))
        hidden.append(amount)
    model.maximize(sum(hidden))
    greedy = place_greedily(gaps, weight_gradients_s)
    for (weight, number), variable in chosen.items():
        model.add_hint(variable, greedy[weight] == number)
    solver = solve_integer_program(model, limit)
    if solver is None:
        return greedy
    gap_of = {weight: number for (weight, number), variable in chosen.items() if solver.value(variable)}
    exact = tuple(gap_of.get(weight) for weight in range(len(weight_gradients_s)))
    # Ticks are rounded: the greedy assignment may hide more.
    return max((exact, greedy), key=lambda placed: hidden_communication_s(gaps, weight_gradients_s, placed))


def hidden_communication_s(gaps: Sequence[Gap], weight_gradients_s: Sequence[float], placed: GapAssignment) -> float:
    filled_s = [
        sum(s for s, at in zip(weight_gradients_s, placed, strict=True) if at == number) for number in range(len(gaps))
    ]
    return sum(min(gap.seconds, filled) for gap, filled in zip(gaps, filled_s, strict=True))


def place_leftovers(placed: GapAssignment, gaps: Sequence[Gap]) -> GapAssignment:
    """Assign each unassigned weight gradient to the last gap that allows it, if any."""
    return tuple(
        max((place for place, gap in enumerate(gaps) if one in gap.allowed), default=None) if number is None else number
        for one, number in enumerate(placed)
    )


def solve_integer_program(model: cp_model.CpModel, limit: float) -> cp_model.CpSolver | None:
    """Solve an integer program with OR-Tools CP-SAT, equally on every rank. None without a solution.

    `limit`: deterministic work limit in units of about a second.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = limit
    # One worker with a fixed seed stops at the same solution everywhere.
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    return solver if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None


#: Numbers of micro-batches to try; maximum number of layers in a range.
NUM_MICRO_BATCHES, MAX_RANGE_LAYERS = (1, 2, 4, 8), 4

#: Bucket size of PyTorch's DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20

_W_TASK_KINDS = frozenset(WEIGHT_GRADIENTS.values())


def lancet_plan(costs: StepCosts, parts: Sequence[int] = NUM_MICRO_BATCHES, *, weights: bool = True) -> Plan:
    """Return Lancet's plan of a step.

    Forward, ranges of layers run in micro-batches. Backward, layers are unchunked and Algorithm 1 places weight
    gradients. Gradients are reduced in buckets when the link is idle.

    Args:
        parts: allowed numbers of micro-batches; (1,): no ranges.
        weights: separate weight gradients from input gradients and place them.
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


def forward_ranges(costs: StepCosts, parts: Sequence[int] = NUM_MICRO_BATCHES) -> tuple[SplitRange, ...]:
    """Return the ranges of layers that share micro-batches in the forward pass."""
    known: dict[tuple[object, ...], float] = {}

    def seconds(start: int, stop: int, k: int) -> float:
        layers = costs.layers[start:stop]
        # Layers are often one object many times.
        key = (*map(id, layers), k)
        if key not in known:
            here = StepCosts(layers, costs.all_reduce, costs.contention)
            known[key] = makespan(_forward_plan(here, range(len(layers)), k), here)
        return known[key]

    return best_ranges(len(costs.layers), seconds, parts, MAX_RANGE_LAYERS)[0]


def _forward_plan(costs: StepCosts, layers: Iterable[int], degree: int) -> Plan:
    tasks = [task for layer in layers for task in pass_tasks(costs, layer, "forward", Degrees(degree, degree))]
    return list_plan(tasks, costs.durations(tasks))


class SplitRange(NamedTuple):
    """Layers `start` to `stop` (exclusive) in `parts` micro-batches; 1: not split."""

    start: int
    stop: int
    parts: int


def best_ranges(
    count: int, seconds: Callable[[int, int, int], float], parts: Iterable[int], longest: int
) -> tuple[tuple[SplitRange, ...], float]:
    """Return the best partition of `count` layers into ranges, and its seconds.

    Args:
        seconds: P(start, stop, k), the time of a single range.
        parts: values of k to try.
        longest: maximum length of a range. Unsplit layers are ranges of length 1.
    """
    choices = sorted(set(parts) | {1})
    # T(n) = min over i, k of T(i) + P(i, n, k), stored with its ranges.
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
    """Return the collectives of a pass in order, its weight gradients, and the gap of each collective."""
    before = standard_dependencies(tasks)
    ancestors: dict[Task, set[Task]] = {}
    for task in tasks:
        ancestors[task] = set().union(*({one} | ancestors[one] for one in before[task])) if before[task] else set()
    links = [task for task in tasks if task.kind in LINKS]
    weights = [task for task in tasks if task.kind in _W_TASK_KINDS]
    # No collective of the pass depends on a weight gradient.
    gaps = [
        Gap(seconds[link], frozenset(n for n, weight in enumerate(weights) if link not in ancestors[weight]))
        for link in links
    ]
    return links, weights, gaps


def _backward_orders(tasks: Sequence[Task], seconds: Mapping[Task, float]) -> dict[str, list[Task]]:
    links, weights, gaps = gaps_of(tasks, seconds)
    placed = place_leftovers(place_greedily(gaps, [seconds[weight] for weight in weights]), gaps)
    beside: dict[Task | None, list[Task]] = {}
    for weight, number in zip(weights, placed, strict=True):
        beside.setdefault(None if number is None else links[number], []).append(weight)
    orders: dict[str, list[Task]] = {resource: [] for resource in RESOURCES}
    for task in tasks:
        if task.kind in LINKS:
            orders[LINKS[task.kind]].append(task)
            orders["compute"] += beside.get(task, [])
        elif task.kind not in _W_TASK_KINDS:
            orders["compute"].append(task)
    orders["compute"] += beside.get(None, [])
    return orders
