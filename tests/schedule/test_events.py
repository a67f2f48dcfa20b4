"""The simulator on plans that no policy makes, against its definition in exact numbers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import NO_CONTENTION, Contention, TaskDurations
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import IDLE_ONLY, makespan, simulate, simulate_in_order, simulate_tasks
from fusedmoe.schedule.task import FUSED, LINKS, RESOURCES, Task, invert_dependencies, issue_order, resources_of
from tests.schedule.plans import random_contention
from tests.schedule.test_simulate import by_definition


def any_plan(rng: random.Random, fused: bool = True) -> Plan:
    """Tasks on random resources in random orders, with random dependencies or none, also fused operations and single
    queues for both links.
    """
    tasks = [Task(rng.choice([*FUSED]), 0, layer) for layer in range(rng.randint(1, 5) if fused else 0)]
    tasks += [Task(rng.choice([*LINKS, "attention", "permute"]), 0, 10 + n) for n in range(rng.randint(2, 10))]
    rng.shuffle(tasks)
    orders: dict[str, list[Task]] = {resource: [] for resource in RESOURCES}
    for task in tasks:  # in one order, which excludes cycles
        on = [rng.choice(["intra", "inter"])] if task.kind in LINKS else resources_of(task.kind)
        for resource in on:
            orders[resource].append(task)
    after = {task: tuple(one for one in tasks[:n] if rng.random() < 0.15) for n, task in enumerate(tasks)}
    return Plan.from_orders(orders, after)


def random_durations(rng: random.Random, plan: Plan, contention: Contention = NO_CONTENTION) -> TaskDurations:
    """Small integers, which make ends coincide, or any durations, or zeros."""
    choose = rng.choice([lambda: rng.randrange(8) / 2, lambda: rng.random(), lambda: 10 ** rng.uniform(-4, 0)])
    return TaskDurations({task: float(choose()) for task in plan}, contention)


def assert_equals_definition(plan: Plan, costs: TaskDurations) -> None:
    timeline = simulate(plan, costs)
    expected = by_definition(plan, costs.durations_s, costs.contention)
    assert len(timeline.spans) == len(plan)
    for span in timeline.spans:
        task = next(one for one in expected if one[:4] == (span.kind, span.chunk, span.layer, span.phase))
        start, end = expected[task]
        assert (span.start_s, span.end_s) == pytest.approx((float(start), float(end)), rel=1e-9, abs=1e-12), task
    assert makespan(plan, costs) == timeline.end_s


def compare_random_plans(count: int, seed: int) -> None:
    rng = random.Random(seed)
    contended = 0
    for _ in range(count):
        plan = any_plan(rng)
        costs = random_durations(rng, plan, random_contention(rng))
        assert_equals_definition(plan, costs)
        contended += makespan(plan, costs) > makespan(plan, TaskDurations(costs.durations_s))
    assert contended > count / 10


def test_simulation_of_any_plan_equals_definition():
    compare_random_plans(250, random.randrange(2**32))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_simulation_of_20_000_plans_equals_definition():
    compare_random_plans(20_000, 7)


def test_fused_task_waits_for_both_of_its_resources():
    plan = Plan.parse(
        """
        compute: f0.AGERS0 f0.AGERS1 .A
        intra: .AG0 f0.AGERS0 f0.AGERS1 .RS0
        """
    )
    took = {"all-gather": 2.0, "all-gather-expert-reduce-scatter": 3.0, "attention": 1.0, "reduce-scatter": 1.0}
    plan = Plan(plan.compute, plan.intra, plan.inter, dict.fromkeys(plan, ()))
    spans = simulate(plan, TaskDurations({task: took[task.kind] for task in plan})).spans
    found = {f"{span.kind}{span.chunk}": (span.start_s, span.end_s) for span in spans}
    assert found == {
        "all-gather0": (0, 2),
        "all-gather-expert-reduce-scatter0": (2, 5),  # compute was free before, its link was not
        "all-gather-expert-reduce-scatter1": (5, 8),
        "attentionNone": (8, 9),
        "reduce-scatter0": (8, 9),
    }


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_contention_never_shortens_any_plan(seed):
    rng = random.Random(seed)
    plan = any_plan(rng)
    costs = random_durations(rng, plan)
    assert makespan(plan, costs) <= makespan(plan, TaskDurations(costs.durations_s, random_contention(rng))) * (
        1 + 1e-12
    )


def test_missing_duration_error_names_fused_task():
    with pytest.raises(ConfigError, match=r"no duration for f0\.DEC0"):
        makespan(Plan.parse("compute: DEC0\ninter: DEC0"), TaskDurations({}))


def random_graph(rng: random.Random) -> tuple[list[list[int]], list[int], list[float]]:
    """Tasks that depend on earlier tasks, and on the previous task of their resource; resources and seconds."""
    count = rng.randint(1, 25)
    on = [rng.randrange(3) for _ in range(count)]
    before = [[one for one in range(place) if rng.random() < 0.15] for place in range(count)]
    for place, resource in enumerate(on):
        earlier = [one for one in range(place) if on[one] == resource]
        before[place] = sorted({*before[place], *earlier[-1:]})
    return before, on, [rng.choice([0.0, 1.0, rng.random()]) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_run_equals_run_in_order_without_contention(seed):
    before, on, seconds = random_graph(random.Random(seed))
    followers = invert_dependencies(before)
    assert [sorted(found) for found in followers] == [
        [place for place, found in enumerate(before) if one in found] for one in range(len(before))
    ]
    assert simulate_tasks(before, followers, on, seconds) == simulate_in_order(before, seconds)
    # Tasks in issue order start as if each took the same time.
    starts, _ = simulate_in_order(before, [1.0] * len(before))
    assert issue_order(before, followers) == sorted(range(len(before)), key=lambda place: (starts[place], place))


def test_issue_order_omits_cycles_and_their_dependents():
    before = [[], [0, 2], [1], [2], [0]]
    assert issue_order(before, invert_dependencies(before)) == [0, 4]


def test_spare_tasks_start_only_on_idle_resources():
    # On one resource: 1 s, then a task that another resource delays until 3 s; two independent tasks of 1 s and 5 s.
    before, on = [[], [0, 3], [], [], [2]], [2, 2, 2 + IDLE_ONLY, 0, 2 + IDLE_ONLY]
    starts, ends = simulate_tasks(before, invert_dependencies(before), on, [1.0, 1.0, 1.0, 3.0, 5.0])
    assert (starts, ends) == ([0, 7, 1, 0, 2], [1, 8, 2, 3, 7]), "what has started ends, whoever gets ready meanwhile"
    starts, _ = simulate_tasks(before, invert_dependencies(before), on, [1.0, 1.0, 1.0, 1.0, 5.0])
    assert starts == [0, 1, 2, 0, 3], "what gets ready at the same time goes first"
    starts, _ = simulate_tasks([[], []], [[], []], [2 + IDLE_ONLY, 2], [1.0, 0.0])
    assert starts == [0, 0], "also what takes no time"


def test_most_urgent_ready_task_starts_first():
    before: list[list[int]] = [[], [], []]
    starts, _ = simulate_tasks(before, invert_dependencies(before), [0, 0, 0], [1.0, 1.0, 1.0], [0.5, -1.0, 0.5])
    assert starts == [1, 0, 2]
