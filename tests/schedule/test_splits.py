"""Whole steps in micro-batches: dependencies, costs, and the theorems of the FlowMoE paper."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from bench.simulate.grid import workloads
from fusedmoe.errors import ConfigError
from fusedmoe.schedule.bound import bound_s
from fusedmoe.schedule.cost import Line, TaskDurations
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, PlanSearch, micro_batch_policies
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, exposed_plan, micro_schedule
from fusedmoe.schedule.policies.lancet_plans import forward_ranges, lancet_plan
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.step import Degrees, gradient_buckets
from fusedmoe.schedule.step_costs import LayerCosts, StepCosts
from fusedmoe.schedule.task import PHASES, RESOURCES, Task
from fusedmoe.schedule.task_orders import fill_idle_slots
from fusedmoe.schedule.workload import Workload
from tests.schedule.plans import random_contention

GRADIENT = "gradient-all-reduce"
WEIGHTS = ("weight-gradient", "attention-weight-gradient")


def random_layer(rng: random.Random) -> LayerCosts:
    testbed = rng.choice(list(TESTBEDS))
    cases = list(workloads(TESTBEDS[testbed]))
    shape = replace(rng.choice(cases), ep=rng.choice([1, 8]), esp=rng.choice([1, 4]))
    return with_apart_s(shape.layer_costs(TESTBEDS[testbed].costs), rng.choice([0.0, 1e-4, 1e-2]))


def with_apart_s(layer: LayerCosts, seconds: float) -> LayerCosts:
    assert layer.micro is not None
    return replace(layer, micro=replace(layer.micro, w_task_overhead_s=seconds))


def random_stack(rng: random.Random, layers: int | None = None) -> StepCosts:
    found = tuple(random_layer(rng) for _ in range(layers or rng.randint(1, 3)))
    if rng.random() < 0.5:
        found = found[:1] * len(found)
    line = Line(10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-10, -8.5))
    return StepCosts(
        found, line, random_contention(rng), loss_s=rng.choice([None, 1e-3]), optimizer_s=rng.choice([None, 2e-3])
    )


def random_split(rng: random.Random, layers: int, most: int = 5) -> StepSplit:
    """Draw degrees for all layers, or for each part of each layer."""

    def degrees() -> int | tuple[Degrees, ...]:
        if rng.random() < 0.5:
            return rng.randint(1, most)
        found = tuple(Degrees(rng.randint(1, most), rng.randint(1, most)) for _ in range(layers))
        return found if len({one for of in found for one in of}) > 1 else found[0].rows

    return StepSplit(degrees(), degrees(), rng.choice([None, 2**20, 2**24]), rng.random() < 0.5)


def test_split_step_preserves_total_work():
    """Pieces of every part take the time of the whole, apart from their starts."""
    rng = random.Random()
    for _ in range(10):
        costs = random_stack(rng)
        split = random_split(rng, len(costs.layers))
        schedule, whole = micro_schedule(costs, split), micro_schedule(costs, StepSplit(1, 1)).plan()
        plan = exposed_plan(costs, split) if rng.random() < 0.3 else schedule.plan()
        gathered = [task for task in plan if task.kind == GRADIENT]
        assert sum(task.size or 0 for task in gathered) == sum(costs.gradient_bytes)
        once, seconds = costs.seconds(whole), costs.seconds(plan)
        for kind in ("expert", "attention", "dispatch"):
            of_kind = sum(seconds[task] for task in plan if task.kind == kind)
            weights = dict(zip(("expert", "attention"), WEIGHTS, strict=True)).get(kind)
            of_kind += sum(seconds[task] for task in plan if task.kind == weights)
            assert of_kind >= sum(once[task] for task in whole if task.kind == kind) * (1 - 1e-9)
        assert makespan(plan, costs) >= max(split.bound_s(costs), bound_s(costs, 5)) * (1 - 1e-9)
        assert schedule.makespan_s(costs.contention) == pytest.approx(makespan(schedule.plan(), costs), rel=1e-12)
        if split.forward == split.backward == 1 and not split.weights:
            assert {(t.kind, t.layer, t.phase) for t in plan} == {(t.kind, t.layer, t.phase) for t in whole}


def test_separate_weight_gradients_add_saved_tensor_cost():
    """The experts' backward pass includes the cost, over all chunks, only where weight gradients are split off."""
    rng = random.Random(5)
    free = StepCosts(tuple(with_apart_s(random_layer(rng), 0.0) for _ in range(2)))
    dear = replace(free, layers=tuple(with_apart_s(layer, 3e-3) for layer in free.layers))
    for weights in (False, True):
        plan = micro_schedule(free, StepSplit(2, 3, weights=weights)).plan()
        before, after = free.seconds(plan), dear.seconds(plan)
        for task in plan:
            more = 1e-3 if weights and task[:1] + task[3:4] == ("expert", "backward") else 0.0
            assert after[task] - before[task] == pytest.approx(more, abs=1e-12)
    dearest = replace(free, layers=tuple(with_apart_s(layer, 10.0) for layer in free.layers))
    plan = POLICIES["joint"].plan(dearest, 4)
    assert not any(task.kind == "weight-gradient" for task in plan)


def test_from_plan_recovers_split():
    rng = random.Random()
    for _ in range(30):
        costs = random_stack(rng)
        split = random_split(rng, len(costs.layers))
        plan = micro_schedule(costs, split).plan()
        found = StepSplit.from_plan(plan)
        assert found._replace(bucket_bytes=None) == split._replace(bucket_bytes=None)
        assert micro_schedule(costs, found).plan() == plan
    bare = replace(costs, layers=tuple(replace(layer, gradient_bytes=0) for layer in costs.layers))
    assert StepSplit.from_plan(micro_schedule(bare, StepSplit(2, 3, 2**20)).plan()) == StepSplit(2, 3)


def test_chunks_depend_on_same_chunk_of_previous_layer():
    costs = replace(random_stack(random.Random(1), 2), loss_s=None, optimizer_s=None)
    plan = micro_schedule(costs, StepSplit(3, 3, weights=True)).plan()
    last = list(costs.layers[0].chunks["forward"])[-1]
    for chunk in range(3):
        before = (Task("attention", chunk - 1, 1),) if chunk else ()
        assert plan.dependencies[Task("attention", chunk, 1)] == (Task(last, chunk, 0), *before)
        weight = Task("weight-gradient", chunk, 1, "backward")
        assert plan.dependencies[weight] == (Task("expert", chunk, 1, "backward"),)
    bucket = next(task for task in plan.inter if task.kind == GRADIENT and task.layer == 1)
    needed = {(task.kind, task.chunk) for task in plan.dependencies[bucket]}
    assert needed == {(kind, chunk) for kind in ("attention", WEIGHTS[1]) for chunk in range(3)}


def test_parts_depend_on_overlapping_chunks():
    costs = replace(random_stack(random.Random(1), 2), loss_s=1e-3)
    split = StepSplit((Degrees(2, 4), Degrees(3, 1)), (Degrees(1, 3), Degrees(2, 3)))
    after = micro_schedule(costs, split).plan().dependencies
    last = list(costs.layers[0].chunks["forward"])[-1]
    first = next(iter(costs.layers[0].chunks["backward"]))

    def chunks(task: Task, kind: str) -> list[int | None]:
        return sorted(one.chunk or 0 for one in after[task] if one.kind == kind and one.layer != task.layer)

    for chunk in range(4):  # halves of the attention's costs
        assert after[Task(first, chunk, 0)] == (Task("attention", chunk // 2, 0),)
    assert [chunks(Task("attention", chunk, 1), last) for chunk in range(3)] == [[0, 1], [1, 2], [2, 3]]
    # One part in one piece; and the loss, between the passes.
    assert len(after[Task(first, 0, 1)]) == 3
    loss = Task("loss", None, None, None)
    assert after[loss] == (Task(last, 0, 1),)
    assert all(after[Task(first, chunk, 1, "backward")] == (loss,) for chunk in range(3))
    assert [chunks(Task(first, chunk, 0, "backward"), "attention") for chunk in range(3)] == [[0], [0, 1], [1]]
    assert {one.chunk for one in after[Task("attention", 0, 0, "backward")]} == {0, 1, 2}


def test_backward_starts_after_forward_and_loss():
    """With and without a loss, for any policy: the backward pass needs the loss of the whole batch."""
    rng = random.Random()
    for _ in range(2):
        costs = replace(random_stack(rng), loss_s=rng.choice([None, 1e-3]))
        for name in ("tutel", "flowmoe", "lancet", "joint"):
            spans = simulate(POLICIES[name].plan(costs, 4), costs).spans
            ended_s = max(span.end_s for span in spans if span.phase == "forward") + (costs.loss_s or 0.0)
            begun_s = min(span.start_s for span in spans if span.phase == "backward" and span.kind != GRADIENT)
            assert begun_s >= ended_s * (1 - 1e-9), name


@pytest.mark.slow
def test_first_and_last_layers_have_separate_degrees():
    """Inner layers share their neighbours' degrees; a plan of many layers is no worse for it."""
    model = TESTBEDS["B"].costs
    layer = Workload(4, 512, 1024, 2048, experts=8, ep=8, esp=4).layer_costs(model)
    costs = StepCosts((layer,) * 8, model.line("all-reduce/dp"))
    search = PlanSearch(costs, 4)
    plan = search.plan("joint")
    split = StepSplit.from_plan(plan).degrees(8)
    assert any(len({of for of in degrees}) > 1 for degrees in split.values())
    assert all(degrees[2] == degrees[3] == degrees[4] and max(map(max, degrees)) <= 4 for degrees in split.values())
    assert makespan(plan, costs) < makespan(search.plan("flowmoe"), costs)


@pytest.mark.parametrize("steps", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_joint_is_fastest_and_bound_holds(steps):
    rng = random.Random()
    for _ in range(steps):
        costs = random_stack(rng)
        seconds = {name: makespan(POLICIES[name].plan(costs, 4), costs) for name in micro_batch_policies()}
        seconds |= {name: makespan(plan, costs) for name, plan in PlanSearch(costs, 4).ablation.items()}
        assert min(seconds.values()) >= bound_s(costs) * (1 - 1e-12)
        assert seconds["joint"] <= min(seconds.values()) * (1 + 1e-12)
        assert all(POLICIES[name].plan(costs, 4) == POLICIES[name].plan(costs, 4) for name in micro_batch_policies())


def test_plan_search_equals_separate_policies():
    costs = random_stack(random.Random())
    told: list[tuple[int, int]] = []
    model = PlanSearch(costs, 4, None, lambda *of: told.append(of))
    for name in ("joint", "lancet", "flowmoe", "fsmoe"):  # in another order
        alone = POLICIES[name].plan(costs, 4)
        assert model.plan(name) == alone
    assert model.ablation == PlanSearch(costs, 4).ablation
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len({total for _, total in told}) == 1 and told[-1][0] == told[-1][1]


def test_progress_is_monotonic_and_complete():
    told: list[tuple[int, int]] = []
    PlanSearch(random_stack(random.Random(), 2), 4, None, lambda *of: told.append(of)).plan("joint")
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len({total for _, total in told}) == 1 and told[-1][0] == told[-1][1]


@pytest.mark.parametrize(("samples", "allowed"), [(1, {1}), (4, {1, 2, 4}), (5, {1, 5}), (6, {1, 2, 3, 6})])
def test_degrees_divide_number_of_samples(samples, allowed):
    layer = Workload(4, 1024, 2048, 4096, experts=8, ep=8, esp=1).layer_costs(TESTBEDS["B"].costs)
    free = Line(0.0, TESTBEDS["B"].costs.line("all-reduce/dp").beta_s)
    parts = {
        phase: {kind: replace(part, alpha_s=0.0) for kind, part in layer.chunks[phase].items()} for phase in PHASES
    }
    dense = {phase: {k: replace(p, alpha_s=0.0) for k, p in layer.micro.dense[phase].items()} for phase in PHASES}
    # Starts are free, which makes the largest number the best.
    layer = replace(layer, chunks=parts, micro=replace(layer.micro, dense=dense))
    costs = StepCosts((layer,) * 2, free)
    for name in micro_batch_policies():
        plan = POLICIES[name].plan(costs, 16, samples)
        found = Counter(task.phase for task in plan if task.kind == "attention" and task.layer == 0)
        assert set(found.values()) <= allowed, name
        if name == "flowmoe":
            assert found["forward"] == max(allowed)


def test_step_costs_with_and_without_dense_parts():
    model = TESTBEDS["B"].costs
    shape = Workload(4, 1024, 2048, 4096, experts=8, ep=8, esp=4)
    sizes = [shape.gradient_bytes(), 0, shape.gradient_bytes()]
    whole, bare = (shape.step_costs(model, sizes, shape.volumes(), whole=how) for how in (True, False))
    assert whole.can_split and not bare.can_split and whole.gradient_bytes == bare.gradient_bytes == tuple(sizes)
    assert whole.layers[0] is whole.layers[2]  # the result of one layer applies to all equal layers
    plan = POLICIES["fsmoe"].plan(bare)
    assert plan == POLICIES["fsmoe"].plan(whole) and makespan(plan, bare) == makespan(plan, whole)
    without = shape.step_costs(model, sizes, ("dispatch", "expert", "combine"), whole=True)
    assert {task.kind for task in POLICIES["flowmoe"].plan(without)} == {
        *("attention", "dispatch", "expert", "combine", GRADIENT)
    }


def test_waits_routes_all_chunks_before_first_dispatch():
    model = TESTBEDS["B"].costs
    shape = Workload(4, 1024, 2048, 4096, experts=8, ep=8, esp=4)
    parts = shape.volumes()
    free, costs = (shape.step_costs(model, [2**20] * 2, parts, whole=True, waits=how) for how in (False, True))
    plan = micro_schedule(costs, StepSplit(4, 2, 2**20)).plan()
    ends = {(s.kind, s.chunk, s.layer, s.phase): s.end_s for s in simulate(plan, costs).spans}
    starts = {(s.kind, s.chunk, s.layer, s.phase): s.start_s for s in simulate(plan, costs).spans}
    for layer in (0, 1):
        routed = max(ends["attention", chunk, layer, "forward"] for chunk in range(4))
        assert all(starts["dispatch", chunk, layer, "forward"] >= routed for chunk in range(4))
        assert plan.dependencies[Task("attention", 1, 1)] == (Task("combine", 1, 0), Task("attention", 0, 1))
    assert [task for task in plan if task.kind == "permute"] == [Task("permute", None, layer) for layer in (0, 1)]
    for name in micro_batch_policies():
        assert makespan(POLICIES[name].plan(costs, 4), costs) >= makespan(POLICIES[name].plan(free, 4), free) * 0.97
        assert Plan.parse(str(POLICIES[name].plan(costs, 4))) == POLICIES[name].plan(costs, 4)


def test_layers_without_split_costs_are_rejected():
    costs = random_stack(random.Random(2))
    bare = replace(costs, layers=tuple(replace(layer, micro=None) for layer in costs.layers))
    assert not bare.can_split
    with pytest.raises(ConfigError, match="cannot be split"):
        micro_schedule(bare, StepSplit(2, 2))


def test_lancet_plan_of_six_layers():
    model = TESTBEDS["B"].costs
    layer = Workload(2, 1024, 2048, 4096, experts=8, ep=8, esp=4).layer_costs(model)
    costs = StepCosts((layer,) * 6, model.line("all-reduce/dp"))
    ranges = forward_ranges(costs)
    assert [place for one in ranges for place in range(one.start, one.stop)] == list(range(6))
    assert any(one.parts > 1 for one in ranges)
    plan = lancet_plan(costs)
    weights = [task for task in plan.compute if task.kind in WEIGHTS]
    assert len(weights) == 12
    experts = plan.compute.index(Task("expert", 0, 0, "backward"))
    assert any(plan.compute.index(weight) < experts for weight in weights)  # not all at the end


# FlowMoE's theorems, of the backward pass of a few layers, experts only: any chunks in the order of its Eqs. 4 and 5.


def backward_orders(rng: random.Random) -> tuple[dict[str, list[Task]], dict[Task, float], list[int]]:
    layers, degree = rng.randint(1, 3), rng.randint(1, 3)
    orders: dict[str, list[Task]] = {resource: [] for resource in RESOURCES}
    seconds: dict[Task, float] = {}
    for layer in reversed(range(layers)):
        took = {kind: rng.uniform(0.1, 2.0) for kind in ("dispatch", "expert", "combine", "attention")}
        for kind in took:
            tasks = [Task(kind, chunk, layer, "backward") for chunk in range(degree)]
            orders["inter" if kind in ("dispatch", "combine") else "compute"] += tasks
            seconds |= dict.fromkeys(tasks, took[kind])
    gradients = [rng.randrange(1, 8) * 256 for _ in range(layers)]
    return orders, seconds, gradients


SETTINGS = pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])


@SETTINGS
def test_flowmoe_theorem_1_overlapped_reduces_never_slow_step(count):
    """All-reduces between all-to-alls, each started only when it is ready and delays no task, never lengthen the step
    compared with all-reduces at its end.
    """
    rng = random.Random()
    for _ in range(count):
        orders, seconds, gradients = backward_orders(rng)
        line = Line(rng.choice([0.0, 0.05]), rng.uniform(1e-4, 2e-3))
        buckets = gradient_buckets(gradients, None)
        of = seconds | {bucket: line.seconds(bucket.size or 0) for bucket in buckets}
        end = {bucket: (orders["compute"][-1],) for bucket in buckets}
        at_the_end = Plan.from_orders({**orders, "inter": [*orders["inter"], *buckets]}, end)
        assert makespan(plan_with_first_fitting_gap(orders, of, buckets), TaskDurations(of)) <= makespan(
            at_the_end, TaskDurations(of)
        ) * (1 + 1e-9)


def plan_with_first_fitting_gap(orders, seconds, buckets) -> Plan:
    """Put each bucket into the first gap that is long enough for all of it."""
    inter, waiting = list(orders["inter"]), list(buckets)
    place = 0
    for bucket in waiting:
        for at in range(place, len(inter) + 1):
            trial = [*inter[:at], bucket, *inter[at:]]
            try:
                before = Plan.from_orders({**orders, "inter": inter + waiting[waiting.index(bucket) :]})
                after = Plan.from_orders({**orders, "inter": trial + waiting[waiting.index(bucket) + 1 :]})
            except ConfigError:
                continue
            if last_task_end_s(after, seconds, orders) <= last_task_end_s(before, seconds, orders) * (1 + 1e-12):
                inter, place = trial, at + 1
                break
        else:
            inter, place = [*inter, bucket], len(inter) + 1
    return Plan.from_orders({**orders, "inter": inter})


def last_task_end_s(plan: Plan, seconds, orders) -> float:
    """Return the end of all tasks except all-reduces."""
    return max(span.end_s for span in simulate(plan, TaskDurations(seconds)).spans if span.kind != GRADIENT)


@SETTINGS
def test_flowmoe_theorem_2_smaller_free_buckets_never_slow_step(count):
    """With free starts, halves of the buckets never lengthen the step: the pool runs them whenever the link is free.
    With a start-up cost they can.
    """
    rng = random.Random()
    longer = 0
    for _ in range(count):
        orders, seconds, gradients = backward_orders(rng)
        slope = rng.uniform(1e-4, 2e-3)
        for alpha in (0.0, 0.3):
            line = Line(alpha, slope)
            took = []
            for size in (1024, 512, 256, 1):
                if size == 1 and alpha:
                    continue
                buckets = gradient_buckets(gradients, size if size > 1 else 32)
                of = seconds | {bucket: line.seconds(bucket.size or 0) for bucket in buckets}
                took.append(makespan(fill_idle_slots(orders, of, buckets, line), TaskDurations(of)))
            if alpha:
                longer += took[-1] > took[0] * (1 + 1e-9)
            else:
                # The smallest buckets are within one bucket of the best that any size reaches.
                assert took[-1] <= min(took) + 2 * len(gradients) * slope * 32
    assert longer > count / 10
