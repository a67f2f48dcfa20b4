"""Tasks on several resources in the simulator: against its definition, in exact numbers."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Durations, LinkUse, Overlap
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.task import FUSED, LINKS, Task
from fusedmoe.schedule.timeline import RESOURCES
from tests.schedule.plans import random_costs, random_plan, with_fused

SHARES = st.sampled_from([1.0, 0.75, 0.5, 0.3])


def by_definition(plan: Plan, costs: Durations) -> dict[Task, tuple[Fraction, Fraction]]:
    """Starts and ends, stepping from event to event and looking at every task each time.

    A task starts when it is at the head of all of its resources, and all that it waits for has ended. On a link it
    works for as long as its overlap says (without one, for all of its time), at a share of its speed while another
    link works too. It ends when its seconds are over and its rows have left all links, and that much later as these
    were late for more than their slack.
    """
    share = Fraction(costs.contention)
    seconds = {task: Fraction(costs.given[task]) for task in plan}
    work: dict[tuple[Task, str], Fraction] = {}
    slack: dict[tuple[Task, str], Fraction] = {}
    for task in plan:
        overlap = costs.given_overlaps.get(task)
        for resource in plan.resources[task]:
            use = LinkUse(costs.given[task])
            if resource != "compute" and overlap is not None:
                use = overlap.links[resource]
            work[task, resource], slack[task, resource] = Fraction(use.work_s), Fraction(use.slack_s)
    left, left_at = dict(work), {}
    started: dict[Task, Fraction] = {}
    ended: dict[Task, Fraction] = {}
    now = Fraction(0)
    while len(ended) < len(plan):
        for task in plan:
            heads = (next(one for one in plan.on(r) if one not in ended) for r in plan.resources[task])
            waits = any(one not in ended for one in plan.dependencies[task])
            if task not in started and not waits and all(head == task for head in heads):
                started[task] = now
        running = [task for task in started if task not in ended]
        sides = [(task, r) for task in running for r in plan.resources[task] if r != "compute" and left[task, r] > 0]
        for task in running:
            for r in plan.resources[task]:
                if r != "compute" and left[task, r] == 0:
                    left_at.setdefault((task, r), now)
        ends = {}
        for task in running:
            on = [r for r in plan.resources[task] if r != "compute"]
            if all((task, r) in left_at for r in on):
                late = [left_at[task, r] - started[task] - work[task, r] - slack[task, r] for r in on]
                ends[task] = started[task] + seconds[task] + max([Fraction(0), *late])
        speed = share if {"intra", "inter"} == {r for _, r in sides} else Fraction(1)
        step = min([left[side] / speed for side in sides] + [end - now for end in ends.values()])
        now += step
        for side in sides:
            left[side] -= step * speed
        for task, end in ends.items():
            if end == now:
                ended[task] = now
    return {task: (started[task], ended[task]) for task in plan}


def random_durations(rng: random.Random, plan: Plan, contention: float) -> Durations:
    """Small whole numbers, so that ends coincide, any, or nothing; overlaps of some, of all, or of none."""
    choose = rng.choice([lambda: rng.randrange(8) / 2, lambda: rng.random(), lambda: 10 ** rng.uniform(-4, 0)])
    seconds = {task: float(choose()) for task in plan}
    known, overlaps = rng.choice([0.0, 0.6, 1.0]), {}
    for task in plan.fused:
        if rng.random() < known:
            parts = [rng.choice([0.0, 0.25, 0.5, 1.0, rng.random()]) for _ in range(4)]
            links = plan.resources[task][1:]
            uses = {
                link: LinkUse(seconds[task] * one, seconds[task] * (1 - one) * other)
                for link, one, other in zip(links, parts[:2], parts[2:], strict=False)
            }
            overlaps[task] = Overlap(uses, seconds[task])
    return Durations(seconds, contention, overlaps)


def check(plan: Plan, costs: Durations) -> None:
    timeline = simulate(plan, costs)
    expected = by_definition(plan, costs)
    assert len(timeline.spans) == len(plan)
    for span in timeline.spans:
        task = Task(span.kind, span.chunk, span.layer, span.phase)
        task = next(one for one in expected if one[:4] == task[:4])
        start, end = expected[task]
        assert span.resources == plan.resources[task]
        assert (span.start_s, span.end_s) == pytest.approx((float(start), float(end)), rel=1e-9, abs=1e-12), task
    assert makespan(plan, costs) == timeline.end_s


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), SHARES)
def test_simulation_equals_its_definition(seed, contention):
    rng = random.Random(seed)
    plan = random_plan(rng, with_fused(rng, random_costs(rng)))
    check(plan, random_durations(rng, plan, contention))


def any_plan(rng: random.Random) -> Plan:
    """Fused operations and others on random resources in random orders, with random dependencies or none: what no
    policy would make, among it single queues for both links and links that only fused operations use."""
    kinds = rng.sample([*FUSED], rng.randint(1, 5))
    tasks = [Task(kind, 0, layer) for layer, kind in enumerate(kinds)]
    tasks += [Task(rng.choice([*LINKS, "attention", "order"]), 0, 10 + n) for n in range(rng.randint(0, 8))]
    rng.shuffle(tasks)
    orders: dict[str, list[Task]] = {resource: [] for resource in RESOURCES}
    for task in tasks:  # in one order, so without a circle
        links = {LINKS[part] for part in FUSED.get(task.kind, ()) if part in LINKS}
        if task.kind in FUSED:
            orders["compute"].append(task)
            links = rng.sample(["intra", "inter"], len(links))
        elif task.kind in LINKS:
            links = {rng.choice(["intra", "inter"])}
        else:
            orders["compute"].append(task)
        for link in links:
            orders[link].append(task)
    after = {task: tuple(one for one in tasks[:n] if rng.random() < 0.15) for n, task in enumerate(tasks)}
    return Plan.of(orders, after)


def sweep(count: int, seed: int) -> None:
    rng = random.Random(seed)
    contended = late = 0
    for _ in range(count):
        plan = any_plan(rng)
        costs = random_durations(rng, plan, rng.choice([1.0, 0.8, 0.5, 0.25]))
        check(plan, costs)
        alone = Durations(costs.given, 1.0, costs.given_overlaps)
        contended += makespan(plan, costs) > makespan(plan, alone)
        late += any(s.duration_s > costs.given[t] * 1.001 for t in plan.fused for s in spans_of(plan, costs, t))
    assert contended > count / 10 and late > count / 10


def spans_of(plan, costs, task):
    return [s for s in simulate(plan, costs).spans if (s.kind, s.chunk, s.layer, s.phase) == task[:4]]


def test_any_plan_equals_its_definition():
    sweep(250, random.randrange(2**32))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_plan_equals_its_definition_20_000_times():
    sweep(20_000, 7)


FUSED_PLAN = "compute: AGE0 AGE1\nintra: AGE0 AGE1 RS0 RS1\ninter: D0 D1 C0 C1"


def seconds_of(plan: Plan, **of: float) -> dict[Task, float]:
    return {task: of[task.kind.replace("-", "_")] for task in plan}


def test_it_waits_for_the_head_of_all_its_orders_by_hand():
    plan = Plan.parse(FUSED_PLAN)
    costs = Durations(seconds_of(plan, dispatch=2, all_gather_expert=3, reduce_scatter=1, combine=2))
    found = {(span.kind, span.chunk): (span.start_s, span.end_s) for span in simulate(plan, costs).spans}
    assert found == {
        ("dispatch", 0): (0, 2),
        ("dispatch", 1): (2, 4),
        ("all-gather-expert", 0): (2, 5),
        ("all-gather-expert", 1): (5, 8),  # intra is free only then, and so is compute
        ("reduce-scatter", 0): (8, 9),
        ("reduce-scatter", 1): (9, 10),
        ("combine", 0): (9, 11),
        ("combine", 1): (11, 13),
    }


def test_contention_by_hand():
    """AGE0 (3 s, its rows for 1 s on the link) meets D1 (2 s): both rows go at a half until AGE0's are there."""
    plan = Plan.parse(FUSED_PLAN)
    seconds = seconds_of(plan, dispatch=2, all_gather_expert=3, reduce_scatter=1, combine=2)

    def ends(slack_s: float) -> dict[str, float]:
        overlap = Overlap({"intra": LinkUse(1.0, slack_s)}, 3.0)
        costs = Durations(seconds, 0.5, dict.fromkeys(plan.fused, overlap))
        return {f"{span.kind} {span.chunk}": span.end_s for span in simulate(plan, costs).spans}

    # From 2 s to 4 s the rows of AGE0 are on the link, at half speed: D1 has 1 s left then, and ends at 5 s.
    hidden = ends(2.0)
    assert (hidden["all-gather-expert 0"], hidden["dispatch 1"]) == (5.0, 5.0)
    # They are 1 s late. Of that, slack hides half a second, or nothing.
    assert ends(0.5)["all-gather-expert 0"] == 5.5 and ends(0.0)["all-gather-expert 0"] == 6.0
    assert ends(0.0)["dispatch 1"] == 5.0  # goes at full speed again, although AGE0 still holds its link


def test_both_links_of_one_operation_disturb_each_other():
    plan = Plan.parse("compute: DAGE0\nintra: DAGE0\ninter: DAGE0")
    (task,) = plan
    overlap = Overlap({"intra": LinkUse(1.0, 2.0), "inter": LinkUse(3.0)}, 1.0)
    # Both at a half until the 1 s on intra is done, at 2 s; the 2 s that are left on inter go alone.
    assert makespan(plan, Durations({task: 3.0}, 0.5, {task: overlap})) == 4.0
    assert makespan(plan, Durations({task: 3.0}, 1.0, {task: overlap})) == 3.0
    assert makespan(plan, Durations({task: 3.0}, 0.5)) == 6.0  # of which nothing is known: at work all the time


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_contention_makes_nothing_shorter(seed):
    rng = random.Random(seed)
    plan = any_plan(rng)
    costs = random_durations(rng, plan, 1.0)
    slow = Durations(costs.given, 0.4, costs.given_overlaps)
    assert makespan(plan, costs) <= makespan(plan, slow) * (1 + 1e-12)


def test_a_missing_duration_is_named():
    with pytest.raises(ConfigError, match=r"no duration for f0\.DE0"):
        makespan(Plan.parse("compute: DE0\ninter: DE0"), Durations({}))
