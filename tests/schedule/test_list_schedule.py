"""List scheduling of tasks over resources, against all orders of small steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from fusedmoe.schedule.cost import NO_CONTENTION, TaskDurations
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.step import ChunkedPass, idle_slot_plan
from fusedmoe.schedule.task import PIPELINE, RESOURCES, WEIGHT_GRADIENTS, Task
from fusedmoe.schedule.task_orders import ListSchedule, list_plan
from tests.schedule.plans import ORDERS, random_contention, random_costs

GRADIENT = "gradient-all-reduce"


def random_tasks(rng: random.Random) -> list[Task]:
    """A step of a few layers, with or without micro-batches, some parts missing, gradients in buckets."""
    layers, degree = rng.randint(1, 3), rng.randint(1, 3)
    parts = [kind for kind in PIPELINE if rng.random() < 0.8]
    whole = rng.random() < 0.3
    tasks = []
    for phase in ("forward", "backward"):
        for layer in range(layers) if phase == "forward" else reversed(range(layers)):
            for kind in ("attention", *parts):
                chunks = [None] if whole and kind == "attention" else range(degree)
                tasks += [Task(kind, chunk, layer, phase) for chunk in chunks]
                if phase == "backward" and WEIGHT_GRADIENTS.get(kind) == "weight-gradient" and rng.random() < 0.5:
                    tasks += [Task("weight-gradient", chunk, layer, phase) for chunk in range(degree)]
            if phase == "backward":
                tasks += [Task(GRADIENT, n, layer, phase, 256) for n in range(rng.randint(0, 3))]
    return tasks


def random_seconds(rng: random.Random, tasks: list[Task]) -> dict[Task, float]:
    """Durations that are at times zero or equal."""
    return {task: rng.choice([0.0, 1.0, rng.random(), 10 ** rng.uniform(-3, 1)]) for task in tasks}


def test_list_plan_has_each_task_once_without_needless_wait():
    rng = random.Random()
    for _ in range(60):
        tasks = random_tasks(rng)
        seconds = random_seconds(rng, tasks)
        plan = list_plan(tasks, seconds)
        assert sorted(map(str, plan)) == sorted(map(str, tasks))
        assert [task for task in plan.inter if task.kind == GRADIENT] == [t for t in tasks if t.kind == GRADIENT]
        # No task could start sooner in its position: each starts when one of its dependencies ends.
        timeline = simulate(plan, TaskDurations(seconds))
        ends = {0.0} | {span.end_s for span in timeline.spans}
        assert all(span.start_s in ends for span in timeline.spans)
        assert makespan(plan, TaskDurations(seconds)) <= sum(seconds.values()) * (1 + 1e-12)
        schedule = ListSchedule(tasks, seconds)
        assert schedule.plan() == plan
        for contention in (NO_CONTENTION, random_contention(rng)):
            assert schedule.makespan_s(contention) == pytest.approx(makespan(plan, TaskDurations(seconds, contention)))


def assert_near_optimal(over_best: Sequence[float]) -> None:
    """A list schedule leaves no idle time, which bounds it by all tasks of two classes of resources in sequence: twice
    the optimum. One in twenty-five random steps is 25% above the optimum: eight of twelve are, once in 300 million
    times.
    """
    assert min(over_best) >= 1 - 1e-12 and max(over_best) <= 2 + 1e-12
    assert sum(one >= 1.25 for one in over_best) < len(over_best) * 2 / 3


def test_list_plan_is_near_optimum_of_small_steps():
    """All orders of two chunks in one layer and a gradient of the previous layer, by brute force."""
    rng, over_best = random.Random(), []
    for _ in range(12):
        tasks = [Task(kind, chunk) for kind in ("dispatch", "expert", "combine") for chunk in (0, 1)]
        tasks.append(Task(GRADIENT, 0, 1, "backward", 256))
        seconds = {task: rng.random() for task in tasks}
        link = [task for task in tasks if task.kind != "expert"]
        experts = [task for task in tasks if task.kind == "expert"]
        best = float("inf")
        for inter, compute in itertools.product(itertools.permutations(link), itertools.permutations(experts)):
            try:
                plan = Plan.from_orders({"compute": compute, "inter": inter})
            except Exception:
                continue
            best = min(best, makespan(plan, TaskDurations(seconds)))
        over_best.append(makespan(list_plan(tasks, seconds), TaskDurations(seconds)) / best)
    assert_near_optimal(over_best)


def test_longest_remaining_path_is_scheduled_first():
    tasks = [Task("expert", 0), Task("expert", 1), Task("combine", 0), Task("combine", 1)]
    seconds = dict(zip(tasks, (1.0, 1.0, 1.0, 5.0), strict=True))
    assert list_plan(tasks, seconds).compute == (tasks[1], tasks[0])


def test_tasks_are_assigned_to_resource_of_their_kind():
    tasks = [Task(kind, 0) for kind in PIPELINE]
    seconds = dict.fromkeys(tasks, 1.0)
    assert [len(list_plan(tasks, seconds).on(resource)) for resource in RESOURCES] == [1, 2, 2]


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_list_plan_of_zero_and_one_task(seconds):
    assert list_plan([], {}) == Plan()
    one = Task("expert", 0)
    assert list_plan([one], {one: seconds}) == Plan((one,))


def test_gradient_buckets_fill_idle_link_slots():
    """A bucket starts only while no other ready task waits for the link; no ready bucket waits for an idle link."""
    rng = random.Random()
    filled = 0
    for _ in range(40):
        costs = random_costs(rng, NO_CONTENTION)
        passes = [ChunkedPass(rng.choice(ORDERS), rng.randint(1, 4)) for _ in costs.layers]
        plan = idle_slot_plan(costs, passes, passes, rng.choice([10**5, 10**6, 10**7]))
        seconds = costs.seconds(plan)
        spans = {(s.kind, s.chunk, s.layer, s.phase): s for s in simulate(plan, costs).spans}
        ready = {task: max((spans[one[:4]].end_s for one in plan.dependencies[task]), default=0.0) for task in plan}
        starts = {task: spans[task[:4]].start_s for task in plan}
        for place, task in enumerate(plan.inter):
            rest = plan.inter[place + 1 :]
            if task.kind == GRADIENT:
                other = next((one for one in rest if one.kind != GRADIENT), None)
                assert other is None or ready[other] > starts[task]
                filled += other is not None
            else:
                bucket = next((one for one in rest if one.kind == GRADIENT), None)
                before = plan.inter[place - 1] if place else None
                free_s = starts[before] + seconds[before] if before else 0.0
                assert bucket is None or max(ready[bucket], free_s) >= starts[task]
    assert filled
