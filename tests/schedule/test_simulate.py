"""The simulator against its definition, closed forms, and contention by hand."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import NO_CONTENTION, Contention, TaskDurations
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.passes import one_queue, one_queue_s, three_queues, three_queues_s
from fusedmoe.schedule.plan import Plan, task_name
from fusedmoe.schedule.policies import POLICIES, micro_batch_policies
from fusedmoe.schedule.simulate import critical_path, layer_passes, makespan, simulate
from fusedmoe.schedule.step_costs import ChunkTimes, StepCosts, pass_bound_s
from fusedmoe.schedule.task import PIPELINE, RESOURCES, Task, resources_of
from fusedmoe.schedule.timeline import Timeline
from fusedmoe.schedule.workload import Workload
from tests.marks import slowly
from tests.schedule.plans import ORDERS, random_contention, random_costs, random_plan

PARTS = {"all": PIPELINE, "no shards": ("dispatch", "expert", "combine"), "one node": PIPELINE[1:4]}


def by_definition(plan: Plan, seconds, contention: Contention) -> dict[Task, tuple[Fraction, Fraction]]:
    """The simulator's definition, in exact numbers: step from event to event, visiting every task each time.

    A task runs when it is at the head of all of its resources; its first resource defines it as computation or
    communication.
    """
    left = {task: Fraction(seconds[task]) for task in plan}
    started: dict[Task, Fraction] = {}
    ended: dict[Task, Fraction] = {}
    now = Fraction(0)
    while len(ended) < len(plan):
        heads = {r: next((task for task in plan.on(r) if task not in ended), None) for r in RESOURCES}
        running = {}
        for resource, head in heads.items():
            on = plan.resources.get(head, ())
            first = on[:1] == (resource,) and all(heads[other] == head for other in on)
            if head is not None and first and all(one in ended for one in plan.dependencies[head]):
                running[resource] = head
                started.setdefault(head, now)
        # A task uses the resource of its kind, also in a plan with one queue for both links.
        at = {queue: resources_of(task.kind)[0] for queue, task in running.items()}
        speed = {
            queue: math.prod(Fraction(contention.speed_fraction(at[queue], other)) for other in set(at.values()))
            for queue in at
        }
        step = min(left[task] / speed[resource] for resource, task in running.items())
        now += step
        for resource, task in running.items():
            left[task] -= step * speed[resource]
            if left[task] == 0:
                ended[task] = now
    return {task: (started[task], ended[task]) for task in plan}


def random_durations_of(rng: random.Random, plan: Plan) -> dict[Task, float]:
    """Small integers, which make ends coincide, arbitrary values, and zeros."""
    choose = rng.choice([lambda: float(rng.randrange(4)), lambda: rng.random(), lambda: 10 ** rng.uniform(-6, 0)])
    return {task: choose() for task in plan}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_simulation_equals_definition(seed):
    rng = random.Random(seed)
    contention = random_contention(rng)
    plan = random_plan(rng, random_costs(rng))
    seconds = random_durations_of(rng, plan)
    timeline = simulate(plan, TaskDurations(seconds, contention))
    expected = by_definition(plan, seconds, contention)
    assert len(timeline.spans) == len(plan) and timeline.source == "predicted"
    found = {(s.kind, s.chunk, s.layer, s.phase): s for s in timeline.spans}
    for task, (start, end) in expected.items():
        span = found[task[:4]]
        assert span.resources == resources_of(task.kind)
        assert span.start_s == pytest.approx(float(start), rel=1e-9, abs=1e-12)
        assert span.end_s == pytest.approx(float(end), rel=1e-9, abs=1e-12)
    assert makespan(plan, TaskDurations(seconds, contention)) == timeline.end_s


def test_link_contention_of_worked_example():
    plan = Plan.parse("compute: E0\nintra: AG0 RS0\ninter: D0 AR0 C0\nafter AR0: D0")
    seconds = {"dispatch": 4, "all-gather": 2, "expert": 1, "reduce-scatter": 3, "combine": 4, "gradient-all-reduce": 5}
    timeline = simulate(
        plan, TaskDurations({task: float(seconds[task.kind]) for task in plan}, Contention.between_links(0.5))
    )
    found = {span.kind: (span.start_s, span.end_s) for span in timeline.spans}
    # From 4 s on AG0 (2 s of work) and AR0 (5 s) are slowed to a half: AG0 ends at 8 s, AR0 has 3 s left. It is alone
    # for the second of E0, and has 2 s left when RS0 (3 s) starts at 9 s. Both at a half again: AR0 ends at 13 s, RS0
    # has 1 s left and is alone until 14 s. C0 follows.
    assert found == {
        "dispatch": (0.0, 4.0),
        "all-gather": (4.0, 8.0),
        "expert": (8.0, 9.0),
        "gradient-all-reduce": (4.0, 13.0),
        "reduce-scatter": (9.0, 14.0),
        "combine": (14.0, 18.0),
    }
    alone = simulate(plan, TaskDurations({task: float(seconds[task.kind]) for task in plan}))
    assert alone.end_s == 4 + 2 + 1 + 3 + 4


def test_compute_contention_of_docstring_example():
    """Docstring example: 4 s of a product at a half, 3 s of an all-to-all at three quarters of their speeds."""
    plan = Plan.parse("compute: E0\ninter: D0\nafter E0:")
    seconds = {Task("expert", 0): 4.0, Task("dispatch", 0): 3.0}
    contention = Contention(compute_beside_inter=0.5, inter_beside_compute=0.75, compute_beside_intra=0.1)
    found = {span.kind: span.end_s for span in simulate(plan, TaskDurations(seconds, contention)).spans}
    assert found == {"dispatch": 4.0, "expert": 6.0}
    # A third task scales the second's remaining speed: 0.5 · 0.1 until 4 s, and 0.1 from then on.
    plan = Plan.parse("compute: E0\nintra: AG0\ninter: D0\nafter E0:\nafter AG0:")
    seconds[Task("all-gather", 0)] = 14.0
    found = {span.kind: span.end_s for span in simulate(plan, TaskDurations(seconds, contention)).spans}
    assert found == {"dispatch": 4.0, "all-gather": 14.0, "expert": pytest.approx(14 + 4 - 0.2 - 1.0)}


def test_one_queue_never_contends():
    plan = Plan.from_orders(one_queue(PIPELINE, 4))
    seconds = {task: 1.0 for task in plan}
    assert simulate(plan, TaskDurations(seconds, Contention.between_links(0.1))) == simulate(
        plan, TaskDurations(seconds)
    )


def pass_plan(order, kinds, degree, times: ChunkTimes, gar: float) -> tuple[Plan, dict[Task, float]]:
    buckets = [Task("gradient-all-reduce", 0, 1, "backward")] if gar else []
    plan = Plan.from_orders(order(kinds, degree, "backward", 0, buckets))
    of = dict(zip(PIPELINE, times, strict=True)) | {"gradient-all-reduce": gar}
    return plan, {task: of[task.kind] for task in plan}


def random_times(rng: random.Random, kinds) -> tuple[ChunkTimes, float]:
    """Draw free parts, equal parts, and very different lengths."""
    scale = rng.choice([lambda: rng.random(), lambda: 10 ** rng.uniform(-4, 0), lambda: float(rng.randrange(3))])
    times = ChunkTimes(*(scale() if kind in kinds else 0.0 for kind in PIPELINE))
    if rng.random() < 0.5:
        times = times._replace(combine=times.dispatch)
    return times, rng.choice([0.0, 1.0, 5.0, 20.0]) * rng.random()


def compare_closed_forms(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        kinds = PARTS[rng.choice(list(PARTS))]
        times, gar = random_times(rng, kinds)
        degree = rng.randint(1, 16)
        for order, closed in ((three_queues, three_queues_s), (one_queue, one_queue_s)):
            plan, seconds = pass_plan(order, kinds, degree, times, gar)
            assert makespan(plan, TaskDurations(seconds)) == pytest.approx(closed(degree, times, gar), rel=1e-9), times


def test_closed_forms_equal_simulation():
    compare_closed_forms(300, seed=11)


@pytest.mark.slow
def test_closed_forms_equal_simulation_10_000_cases():
    compare_closed_forms(10_000, seed=12)


SECONDS = st.floats(0.0, 1e3, allow_subnormal=False)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), SECONDS)
def test_closed_forms_equal_simulation_for_any_times(degree, times, gar):
    for order, closed in ((three_queues, three_queues_s), (one_queue, one_queue_s)):
        plan, seconds = pass_plan(order, PIPELINE, degree, ChunkTimes(*times), gar)
        assert makespan(plan, TaskDurations(seconds)) == pytest.approx(
            closed(degree, ChunkTimes(*times), gar), rel=1e-9
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32))
def test_pass_bound_holds_for_all_orders(degree, seed):
    rng = random.Random(seed)
    contention = random_contention(rng)
    times, gar = random_times(rng, PIPELINE)
    bound = pass_bound_s(degree, times, gar, contention)
    for order in ORDERS:
        plan, seconds = pass_plan(order, PIPELINE, degree, times, gar)
        assert makespan(plan, TaskDurations(seconds, contention)) >= bound * (1 - 1e-9)
    # Any other valid order: the links' tasks in a random order that keeps each chunk's.
    plan, seconds = pass_plan(three_queues, PIPELINE, degree, times, gar)
    for _ in range(10):
        try:
            shuffled = Plan(plan.compute, *(shuffle(rng, plan.on(link)) for link in ("intra", "inter")))
        except ConfigError:
            continue
        assert makespan(shuffled, TaskDurations(seconds, contention)) >= bound * (1 - 1e-9)


def shuffle(rng: random.Random, order: tuple[Task, ...]) -> tuple[Task, ...]:
    return tuple(rng.sample(order, len(order)))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_contention_never_ends_a_task_earlier(seed):
    rng = random.Random(seed)
    plan = random_plan(rng, random_costs(rng))
    seconds = random_durations_of(rng, plan)
    ends = []
    for contention in (NO_CONTENTION, Contention.between_links(0.7), Contention(0.9, 0.5, 0.7, 0.4, 0.8, 0.6)):
        spans = simulate(plan, TaskDurations(seconds, contention)).spans
        ends.append({(s.kind, s.chunk, s.layer, s.phase): s.end_s for s in spans})
    for key in ends[0]:
        assert ends[0][key] <= ends[1][key] * (1 + 1e-12) and ends[0][key] <= ends[2][key] * (1 + 1e-12)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_invalid_duration_error_names_task(bad):
    plan = Plan.parse("compute: E0 E1")
    with pytest.raises(ConfigError, match=r"invalid duration .* s of f0\.E1"):
        simulate(plan, TaskDurations({Task("expert", 0): 1.0, Task("expert", 1): bad}))


def test_missing_duration_error_names_task():
    with pytest.raises(ConfigError, match=r"no duration for f0\.E1"):
        makespan(Plan.parse("compute: E0 E1"), TaskDurations({Task("expert", 0): 1.0}))


def test_empty_plan_takes_zero_time():
    assert simulate(Plan(), TaskDurations({})).spans == () and makespan(Plan(), TaskDurations({})) == 0.0


def test_spans_keep_plan_order_per_resource():
    rng = random.Random()
    plan = random_plan(rng, random_costs(rng))
    timeline = simulate(plan, TaskDurations({task: 0.1 + rng.random() for task in plan}, Contention.between_links(0.6)))
    spans = {task_name(Task(s.kind, s.chunk, s.layer, s.phase)): s for s in timeline.spans}
    for resource in RESOURCES:
        own = [spans[task_name(task)] for task in plan.on(resource)]
        assert all(one.end_s <= following.start_s for one, following in zip(own, own[1:], strict=False))


def make_step_costs(contention: Contention, layers: int = 3) -> StepCosts:
    workload = Workload(
        2, random.choice((256, 1024)), 1024, random.choice((1024, 8192)), 8, ep=8, esp=random.choice((1, 4))
    )
    layer = workload.layer_costs(TESTBEDS["B"].costs)
    return StepCosts((layer,) * layers, TESTBEDS["B"].costs.line("all-reduce/dp"), contention)


@pytest.mark.parametrize("contention", [Contention(0.9, 0.8, 0.95, 0.6, 0.9, 0.6), *slowly(NO_CONTENTION)])
@pytest.mark.parametrize("policy", [*POLICIES])
def test_critical_path_is_contiguous_and_spans_step(policy: str, contention: Contention) -> None:
    costs = make_step_costs(contention)
    plan = POLICIES[policy].plan(costs)
    timeline = simulate(plan, costs)
    path = critical_path(plan, timeline)
    assert path[0].start_s == 0 and path[-1].end_s == timeline.end_s
    for one, following in zip(path, path[1:], strict=False):
        assert one.end_s == pytest.approx(following.start_s, abs=1e-12)
    found = layer_passes(plan, timeline)
    assert [(s.phase, s.layer) for s in found] == [("forward", i) for i in range(3)] + [
        ("backward", i) for i in (2, 1, 0)
    ]
    for stretch in found:
        assert sum(stretch.critical_s.values()) == pytest.approx(stretch.seconds)
        assert stretch.degree == plan.degrees[stretch.phase, stretch.layer]
    for one, following in zip(found, found[1:], strict=False):
        assert one.end_s == pytest.approx(following.start_s)
    if policy not in micro_batch_policies():  # which weight gradients may end
        tail_s = timeline.end_s - found[-1].end_s
        reduced_s = sum(span.duration_s for span in timeline.spans if span.kind == "gradient-all-reduce")
        assert sum(stretch.gradient_s for stretch in found) + tail_s == pytest.approx(reduced_s)


def test_only_critical_tasks_shorten_step() -> None:
    for _ in range(30):
        costs = make_step_costs(NO_CONTENTION, layers=2)
        plan = POLICIES["fsmoe"].plan(costs)
        seconds = {task: random.uniform(0.5, 2) for task in plan}
        path = critical_path(plan, simulate(plan, TaskDurations(seconds)))
        names = {(s.kind, s.chunk, s.layer, s.phase) for s in path}
        whole_s = makespan(plan, TaskDurations(seconds))
        elsewhere = {task: s * (1 if task[:4] in names else 0.5) for task, s in seconds.items()}
        assert makespan(plan, TaskDurations(elsewhere)) == pytest.approx(whole_s)
        assert makespan(plan, TaskDurations({task: 0.9 * s for task, s in seconds.items()})) == pytest.approx(
            0.9 * whole_s
        )


def test_layer_passes_report_limiting_resource() -> None:
    plan = Plan.parse("compute: E0 E1\ninter: D0 D1 C0 C1")
    tasks = {kind: [task for task in plan if task.kind == kind] for kind in ("dispatch", "expert", "combine")}
    for kind, resource in (("expert", "compute"), ("dispatch", "inter")):
        seconds = {task: 5.0 if task in tasks[kind] else 1.0 for task in plan}
        (found,) = layer_passes(plan, simulate(plan, TaskDurations(seconds)))
        assert found.bound_by == resource and found.degree == 2 and found.gradient_s == 0
        assert found.critical_s[resource] >= 10.0


def test_critical_path_of_empty_plan() -> None:
    assert critical_path(Plan(), Timeline(0, (), "predicted")) == () and layer_passes(Plan(), Timeline()) == []
