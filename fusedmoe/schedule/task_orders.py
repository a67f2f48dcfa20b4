"""Task orders: list scheduling by critical-path priority, gradient all-reduces in idle slots, and a tabu search.

List scheduling: when a resource is free, the ready task with the longest path to the end starts; gradient all-reduces
start only if no other task is ready (the pool of FlowMoE §3.3). There is no preemption. Forward-backward passes then
improve the schedule (Li and Willis, "An iterative scheduling technique for resource-constrained project scheduling",
1992): a backward pass starts each task, including gradient all-reduces, as late as possible, and a forward pass gives
priority to tasks without slack.

A list schedule never leaves a resource idle while a task is ready: instead of waiting 0.1 ms for the next chunk, the
processor starts a long weight gradient, which delays the chunk and all its dependents. The tabu search can wait.

Only tasks on critical paths matter. A block is a run of them on one resource without a gap. A move puts a task of a
block after a later one or before an earlier one; its effect is estimated by the longest path through the tasks between
(Balas and Vazacopoulos, "Guided local search with shifting bottleneck for job shop scheduling", 1998). The search
applies the move with the smallest estimate, even if the step gets longer, and forbids its reversal for some iterations
(Nowicki and Smutnicki, "A fast taboo search algorithm for the job shop problem", 1996).

All ranks compute the same plan: iterations depend only on the number of tasks, and the random seed is fixed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from fusedmoe.schedule.cost import NO_CONTENTION, Contention, Costs, Line
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import IDLE_ONLY, ROUNDING, fastest_plan, simulate_tasks
from fusedmoe.schedule.task import (
    FUSED,
    RESOURCES,
    Task,
    TaskKind,
    invert_dependencies,
    issue_order,
    resources_of,
    standard_dependencies,
)

_NUM_IMPROVEMENTS = 3  # of a list schedule

# Maxima of iterations and of tasks × iterations: 76 iterations for 1,300 tasks (24 layers), well below 1 s.
_MAX_ITERATIONS, _MAX_EVALUATIONS = 800, 100_000
# A larger plan would get fewer iterations than it has layers.
_MAX_TASKS = 2_000
# Iterations without improvement before the search returns to the best orders.
_MAX_STALE_ITERATIONS = 150
# Minimum and maximum iterations for which a reversal is forbidden; each return selects the next pair.
_TABU_TENURES = ((12, 30), (6, 14), (20, 50), (3, 8))
_NUM_RANDOM_MOVES = 4  # after each return
_MAX_MOVE_DISTANCE = 12  # of a move


class _TaskGraph:
    """Tasks by index, with durations, dependencies and resources. Gradient all-reduces also keep their order."""

    def __init__(self, tasks: Iterable[Task], seconds: Mapping[Task, float]) -> None:
        self._tasks = list(tasks)
        self._durations_s = [seconds[task] for task in self._tasks]
        self._resource_indices = [RESOURCES.index(resources_of(task.kind)[0]) for task in self._tasks]
        number = {task: place for place, task in enumerate(self._tasks)}
        needed = standard_dependencies(self._tasks)
        self._dependencies = [[number[one] for one in needed[task]] for task in self._tasks]
        # Each bucket holds the bytes after those of the previous one.
        for earlier, bucket in pairwise(task for task in self._tasks if task.kind == TaskKind.GRADIENT_ALL_REDUCE):
            self._dependencies[number[bucket]].append(number[earlier])
        self._followers = invert_dependencies(self._dependencies)

    def _make_plan(self, orders: Iterable[Iterable[int]]) -> Plan:
        """Return the plan of the orders of all resources."""
        tasks = ([self._tasks[place] for place in order] for order in orders)
        return Plan.from_orders(dict(zip(RESOURCES, tasks, strict=True)))


def list_plan(tasks: Iterable[Task], seconds: Mapping[Task, float]) -> Plan:
    """Return the plan of the list schedule without contention."""
    return ListSchedule(tasks, seconds).plan()


class ListSchedule(_TaskGraph):
    """A list schedule of tasks. `makespan_s` is much cheaper than `plan`.

    `cutoff_s`: a first schedule that takes at least this long is not improved.
    """

    def __init__(self, tasks: Iterable[Task], seconds: Mapping[Task, float], cutoff_s: float = math.inf) -> None:
        super().__init__(tasks, seconds)
        self._order = issue_order(self._dependencies, self._followers)
        self._start_times_s, self._end_s = self._best_schedule(cutoff_s)

    def makespan_s(self, contention: Contention = NO_CONTENTION) -> float:
        """Return the plan's seconds under contention, which lengthens tasks but changes no order."""
        if not contention.slows_any([RESOURCES[number] for number in set(self._resource_indices)]):
            return self._end_s
        before, followers = ([list(waited) for waited in each] for each in (self._dependencies, self._followers))
        for order in self._orders():
            for earlier, place in pairwise(order):
                before[place].append(earlier)
                followers[earlier].append(place)
        return max(
            simulate_tasks(before, followers, self._resource_indices, self._durations_s, speeds=contention.speeds)[1]
        )

    def plan(self) -> Plan:
        return self._make_plan(self._orders())

    def _orders(self) -> list[list[int]]:
        # Of tasks that start together, all but the last take no time. Dependents have a larger depth.
        depth = [0] * len(self._tasks)
        for place in self._order:
            depth[place] = 1 + max((depth[one] for one in self._dependencies[place]), default=0)
        keys = list(zip(self._start_times_s, (seconds > 0 for seconds in self._durations_s), depth, strict=True))
        orders: list[list[int]] = [[] for _ in RESOURCES]
        for place in sorted(range(len(keys)), key=keys.__getitem__):
            orders[self._resource_indices[place]].append(place)
        return orders

    def _best_schedule(self, cutoff_s: float) -> tuple[list[float], float]:
        starts, end = self._schedule_by_priority(self._priorities())
        for _ in range(_NUM_IMPROVEMENTS if end < cutoff_s else 0):
            ends = [start + took for start, took in zip(starts, self._durations_s, strict=True)]
            late, _ = self._schedule_by_priority([-end_s for end_s in ends], True)
            again, sooner = self._schedule_by_priority(
                [-start - took for start, took in zip(late, self._durations_s, strict=True)]
            )
            if sooner >= end:
                break
            starts, end = again, sooner
        return starts, end

    def _priorities(self) -> list[float]:
        path_s = [0.0] * len(self._tasks)  # seconds of the critical path from the task's start to the end
        for place in reversed(self._order):
            # Not `max`: it would build a list per task, and a search makes thousands of schedules.
            longest = 0.0
            for later in self._followers[place]:
                if path_s[later] > longest:
                    longest = path_s[later]
            path_s[place] = self._durations_s[place] + longest
        # Gradients have the lowest priority; at most one is ready at a time.
        return [
            math.inf if task.kind == TaskKind.GRADIENT_ALL_REDUCE else -seconds
            for task, seconds in zip(self._tasks, path_s, strict=True)
        ]

    def _schedule_by_priority(self, priority: Sequence[float], backwards: bool = False) -> tuple[list[float], float]:
        # Backwards, times count from the end.
        before, followers = (
            (self._followers, self._dependencies) if backwards else (self._dependencies, self._followers)
        )
        starts, ends = simulate_tasks(before, followers, self._resource_indices, self._durations_s, priority)
        return starts, max(ends, default=0.0)


def fill_idle_slots(
    orders: Mapping[str, Sequence[Task]], seconds: Mapping[Task, float], buckets: Iterable[Task], line: Line
) -> Plan:
    """Insert gradient buckets into fixed orders wherever `inter` would be idle (Lina, FlowMoE's pool).

    A bucket is not preempted and may delay other tasks on `inter`. Ignores contention.
    """
    bare, waiting = Plan.from_orders(orders), list(buckets)
    tasks = [*bare.sequence, *waiting]
    number = {task: place for place, task in enumerate(tasks)}
    dependencies = standard_dependencies(tasks)
    before: list[Sequence[int]] = list(bare.before)
    for bucket in waiting:
        ahead = [len(before) - 1] if bucket is not waiting[0] else []
        before.append([*(number[one] for one in dependencies[bucket]), *ahead])
    on = bare.graph[1] + [RESOURCES.index("inter") + IDLE_ONLY] * len(waiting)
    took = [seconds[task] for task in bare.sequence] + [line.seconds(bucket.size or 0) for bucket in waiting]
    starts, _ = simulate_tasks(before, invert_dependencies(before), on, took)
    # Among tasks that start together, buckets are last.
    inter = sorted((*orders["inter"], *waiting), key=lambda task: starts[number[task]])
    return Plan.from_orders({**orders, "inter": inter})


def improved_order(plan: Plan, costs: Costs) -> Plan:
    """Return a plan of the same tasks that takes no longer in simulation.

    Gradient all-reduces keep their order. The search ignores contention, but its result must be faster under contention
    too. Plans with fused operations or more than 2,000 tasks are returned unchanged.
    """
    if any(task.kind in FUSED for task in plan) or len(plan.sequence) > _MAX_TASKS:
        return plan
    search = _OrderSearch(plan, costs)
    search.run()
    return fastest_plan([plan, search.plan()], costs)


class _Move(NamedTuple):
    """Move of a task to another position in the order of its resource."""

    resource: int
    source: int  # positions in this order
    target: int


class _OrderSearch(_TaskGraph):
    """Task orders of the three resources, changed one move at a time."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        super().__init__(plan.sequence, costs.seconds(plan))
        self._orders: list[list[int]] = [[] for _ in RESOURCES]
        for place, resource in enumerate(self._resource_indices):  # `sequence` has each resource's tasks in order
            self._orders[resource].append(place)
        self._earliest_starts_s, self._longest_paths_after_s = [0.0] * len(self._tasks), [0.0] * len(self._tasks)
        self._random = random.Random(0)

    def plan(self) -> Plan:
        return self._make_plan(self._orders)

    def run(self) -> None:
        now_s = self._compute_makespan_s()
        assert now_s is not None
        best_s, best, stale, returns = now_s, [list(order) for order in self._orders], 0, 0
        bound_s = self._makespan_bound_s() * (1 + ROUNDING)
        forbidden: dict[tuple[int, int], int] = {}
        for iteration in range(min(_MAX_ITERATIONS, _MAX_EVALUATIONS // max(1, len(self._tasks)))):
            if best_s <= bound_s:
                break
            if stale > _MAX_STALE_ITERATIONS:
                self._orders, stale, returns = [list(order) for order in best], 0, returns + 1
                forbidden.clear()
                self._compute_makespan_s()
                for _ in range(_NUM_RANDOM_MOVES):
                    moves = list(self._candidate_moves())
                    if moves:
                        self._try_move(self._random.choice(moves))
            move = self._choose_move(forbidden, iteration, best_s)
            if move is None:
                break
            until = iteration + self._random.randint(*_TABU_TENURES[returns % len(_TABU_TENURES)])
            forbidden.update({(later, earlier): until for earlier, later in self._reversed_pairs(move)})
            after_s = self._try_move(move)
            if after_s < best_s * (1 - ROUNDING):
                best_s, best, stale = after_s, [list(order) for order in self._orders], 0
            else:
                stale += 1
        self._orders = best

    def _try_move(self, move: _Move) -> float:
        """Apply a move and return the makespan. A move that makes a cycle is undone."""
        self._apply_move(move)
        after_s = self._compute_makespan_s()
        if after_s is None:
            self._apply_move(_Move(move.resource, move.target, move.source))
            after_s = self._compute_makespan_s()
            assert after_s is not None
        return after_s

    def _apply_move(self, move: _Move) -> None:
        order = self._orders[move.resource]
        order.insert(move.target, order.pop(move.source))

    def _reversed_pairs(self, move: _Move) -> list[tuple[int, int]]:
        order, moved = self._orders[move.resource], self._orders[move.resource][move.source]
        if move.source < move.target:
            return [(passed, moved) for passed in order[move.source + 1 : move.target + 1]]
        return [(moved, passed) for passed in order[move.target : move.source]]

    def _compute_makespan_s(self) -> float | None:
        """Compute all earliest starts and longest paths to the end. Returns the makespan, or None for a cycle."""
        seconds, followers, heads, tails = (
            self._durations_s,
            self._followers,
            self._earliest_starts_s,
            self._longest_paths_after_s,
        )
        waits = list(map(len, self._dependencies))
        behind: list[tuple[int, ...]] = [()] * len(waits)
        for order in self._orders:
            for earlier, later in pairwise(order):
                behind[earlier] = (later,)
                waits[later] += 1
        ready = [place for place, count in enumerate(waits) if not count]
        heads[:] = [0.0] * len(heads)
        done: list[int] = []
        while ready:
            place = ready.pop()
            done.append(place)
            end = heads[place] + seconds[place]
            for later in (*followers[place], *behind[place]):
                if heads[later] < end:
                    heads[later] = end
                waits[later] -= 1
                if not waits[later]:
                    ready.append(later)
        if len(done) < len(heads):
            return None
        makespan = 0.0
        for place in reversed(done):
            tail = 0.0
            for later in (*followers[place], *behind[place]):
                path_s = tails[later] + seconds[later]
                if path_s > tail:
                    tail = path_s
            tails[place] = tail
            if heads[place] + seconds[place] + tail > makespan:
                makespan = heads[place] + seconds[place] + tail
        self._makespan_s = makespan
        return makespan

    def _makespan_bound_s(self) -> float:
        """Return a lower bound over all orders: the longest path; the work of a resource and the paths around it."""
        orders, self._orders = self._orders, [[] for _ in RESOURCES]
        bound_s = self._compute_makespan_s() or 0.0
        self._orders = orders
        for order in orders:
            if order:
                head, tail = (
                    min(self._earliest_starts_s[place] for place in order),
                    min(self._longest_paths_after_s[place] for place in order),
                )
                bound_s = max(bound_s, head + sum(self._durations_s[place] for place in order) + tail)
        self._compute_makespan_s()
        return bound_s

    def _critical_blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (resource, first position, last position) of each block."""
        heads, tails, seconds = self._earliest_starts_s, self._longest_paths_after_s, self._durations_s
        least = self._makespan_s * (1 - ROUNDING)
        critical = [heads[place] + seconds[place] + tails[place] >= least for place in range(len(heads))]
        for resource, order in enumerate(self._orders):
            start = 0
            while start < len(order):
                stop = start + 1
                if critical[order[start]]:
                    while (
                        stop < len(order)
                        and critical[order[stop]]
                        and self._are_back_to_back(order[stop - 1], order[stop])
                    ):
                        stop += 1
                    if stop - start > 1:
                        yield resource, start, stop - 1
                start = stop

    def _are_back_to_back(self, earlier: int, later: int) -> bool:
        end = self._earliest_starts_s[earlier] + self._durations_s[earlier]
        return self._earliest_starts_s[later] - end <= self._makespan_s * ROUNDING

    def _candidate_moves(self) -> Iterator[_Move]:
        """Yield moves of each task by one position and to the ends of its block."""
        for resource, first, last in self._critical_blocks():
            order = self._orders[resource]
            for source in range(first, last + 1):
                moved, right, left = order[source], source, source
                while right < min(last, source + _MAX_MOVE_DISTANCE) and order[right + 1] not in self._followers[moved]:
                    right += 1
                while (
                    left > max(first, source - _MAX_MOVE_DISTANCE) and order[left - 1] not in self._dependencies[moved]
                ):
                    left -= 1
                for target in sorted({source + 1, right}) if right > source else ():
                    yield _Move(resource, source, target)
                if left < source - 1:  # otherwise the moves of the neighbour include the swap
                    yield _Move(resource, source, left)

    def _choose_move(self, forbidden: dict[tuple[int, int], int], iteration: int, best_s: float) -> _Move | None:
        """Return the move with the smallest estimate that is not forbidden or would give the best makespan."""
        chosen, least, moves = None, 0.0, []
        for move in self._candidate_moves():
            moves.append(move)
            estimate = self._estimate_makespan_s(move)
            if (chosen is None or estimate < least) and (
                estimate < best_s * (1 - ROUNDING)
                or not any(forbidden.get(pair, -1) >= iteration for pair in self._reversed_pairs(move))
            ):
                chosen, least = move, estimate
        return self._random.choice(moves) if chosen is None and moves else chosen

    def _estimate_makespan_s(self, move: _Move) -> float:
        """Estimate the makespan after a move by the longest path through the reordered tasks."""
        order, seconds, heads, tails = (
            self._orders[move.resource],
            self._durations_s,
            self._earliest_starts_s,
            self._longest_paths_after_s,
        )
        low, high = min(move.source, move.target), max(move.source, move.target)
        section = order[low : high + 1]
        if move.source < move.target:
            section.append(section.pop(0))
        else:
            section.insert(0, section.pop())
        end = heads[order[low - 1]] + seconds[order[low - 1]] if low else 0.0
        ends = []
        new_end: dict[int, float] = {}
        for place in section:
            for waited in self._dependencies[place]:
                done = new_end.get(waited, heads[waited] + seconds[waited])
                if done > end:
                    end = done
            end += seconds[place]
            new_end[place] = end
            ends.append(end)
        tail = tails[order[high + 1]] + seconds[order[high + 1]] if high + 1 < len(order) else 0.0
        longest = 0.0
        new_path_s: dict[int, float] = {}
        for place, end in zip(reversed(section), reversed(ends), strict=True):
            for later in self._followers[place]:
                path_s = new_path_s.get(later, tails[later] + seconds[later])
                if path_s > tail:
                    tail = path_s
            longest = max(longest, end + tail)
            tail += seconds[place]
            new_path_s[place] = tail
        return longest
