"""Orders by tabu search: against an exact solver on the same tasks, and the invariants of every result."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest

from fusedmoe.schedule.cost import NO_CONTENTION, CostModel, Line, TaskDurations
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, PlanSearch
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import PIPELINE, RESOURCES, resources_of, standard_dependencies
from fusedmoe.schedule.task_orders import improved_order
from fusedmoe.schedule.workload import Workload
from tests.marks import slowly
from tests.schedule.plans import random_contention
from tests.schedule.test_splits import random_split, random_stack

GRADIENT = "gradient-all-reduce"

# For each line: the range of powers of ten of alpha, in seconds, and beta, in seconds for a byte or FLOP.
LINES = {
    "all-to-all/ep": (-5, -4, -9.5, -8.5),
    "all-gather/esp": (-5, -4, -10, -9),
    "reduce-scatter/esp": (-5, -4, -10, -9),
    "all-reduce/dp": (-4.5, -3.5, -9.5, -8.5),
    "gemm": (-5, -4, -13.2, -12.2),
    "copy": (-6, -6, -12, -12),
}


def small_stack(rng: random.Random) -> StepCosts:
    """One to three blocks with gradients in buckets, on slow to fast links and processors."""
    lines = {
        name: Line(10 ** rng.uniform(*ends[:2]), 10 ** rng.uniform(*ends[2:]), 1.0) for name, ends in LINES.items()
    }
    esp, expert = rng.choice((1, 2)), rng.choice(("ffn", "swiglu"))
    tokens, dim, hidden = rng.choice((128, 512, 1024)), rng.choice((256, 512, 1024)), rng.choice((1024, 4096))
    shape = Workload(2, tokens, dim, hidden, 8, rng.choice((1, 2)), 1.2, expert, 4, esp)
    gradients = [rng.choice((0, 2**18, 2**20, 2**22)) for _ in range(rng.randint(1, 3))]
    parts = PIPELINE if esp > 1 else PIPELINE[::2]
    return shape.step_costs(CostModel(lines, NO_CONTENTION, "drawn"), gradients, parts, whole=True)


def exact_step_s(plan: Plan, costs: StepCosts) -> float:
    """Shortest step that an exact solver finds for the tasks of a plan; gradients keep their order.

    Infinity where the solver reaches its limit without an order: 2 of 200 stacks.
    """
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    seconds, tick_s = costs.seconds(plan), makespan(plan, costs) / 100_000
    ticks = {task: int(seconds[task] / tick_s) for task in plan}  # rounded down, to stay a lower bound
    model = cp_model.CpModel()
    starts = {task: model.new_int_var(0, 100_001, "") for task in plan}
    spans = {task: model.new_fixed_size_interval_var(starts[task], ticks[task], "") for task in plan}
    end = model.new_int_var(0, 100_001, "")
    buckets = [task for task in plan.inter if task.kind == GRADIENT]
    arcs = [(one, task) for task, before in standard_dependencies(list(plan)).items() for one in before]
    for earlier, later in [*arcs, *zip(buckets, buckets[1:], strict=False)]:
        model.add(starts[later] >= starts[earlier] + ticks[earlier])
    for resource in RESOURCES:
        model.add_no_overlap([spans[task] for task in plan if resource in resources_of(task.kind)])
    for task in plan:
        model.add(end >= starts[task] + ticks[task])
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time, solver.parameters.num_workers = 4.0, 1
    solved = solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return float(solver.objective_value * tick_s) if solved else math.inf


@pytest.mark.parametrize(
    "seeds", [range(8), *slowly(*(range(first, first + 20) for first in range(0, 200, 20)))], ids=str
)
def test_joint_plan_is_near_exact_optimum(seeds: range) -> None:
    over_best = []
    for seed in seeds:
        rng = random.Random(seed)
        costs = small_stack(rng)
        plan = PlanSearch(costs, rng.randint(1, 3) if len(seeds) > 8 else rng.randint(1, 2)).plan("joint")
        seconds = makespan(plan, costs)
        over_best.append(seconds / min(seconds, exact_step_s(plan, costs)) - 1)
    print(f"over the best order: {mean(over_best):.3%} in the mean, {max(over_best):.3%} at most")
    assert mean(over_best) <= 0.003 and max(over_best) <= 0.02


def test_order_search_delays_weight_gradient_for_next_chunk() -> None:
    """Expert chunk 1 is ready 1 ms after chunk 0 has ended. The attention and its all-reduce wait for its results;
    nothing waits for the weight gradient of chunk 0, which takes 5 ms.
    """
    links = "\ninter: b0.D0 b0.D1 b0.C0 b0.C1 b0.AR"
    listed = Plan.parse("compute: b0.E0 b0.WG0 b0.E1 b0.WG1 b0.A" + links)
    took_s = {"dispatch": 3e-3, "expert": 2e-3, "weight-gradient": 5e-3, "combine": 4e-3, "attention": 1e-3}
    costs = TaskDurations({task: took_s.get(task.kind, 20e-3) for task in listed})
    assert makespan(listed, costs) == pytest.approx(38e-3)
    found = improved_order(listed, costs)
    assert makespan(found, costs) == pytest.approx(35e-3)
    assert [task.kind for task in found.compute[:2]] == ["expert", "expert"]


@pytest.mark.parametrize("seeds", [range(2), *slowly(range(2, 40))], ids=str)
def test_improved_order_keeps_tasks_and_never_slows_step(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        costs = random_stack(rng, rng.randint(1, 2))
        if seed % 2:
            costs = StepCosts(costs.layers, costs.all_reduce, random_contention(rng))
        plan = micro_schedule(costs, random_split(rng, len(costs.layers), 3)).plan()
        found = improved_order(plan, costs)
        assert sorted(map(str, found)) == sorted(map(str, plan)) and found.after == {}
        buckets = [[task for task in one.inter if task.kind == GRADIENT] for one in (plan, found)]
        assert buckets[0] == buckets[1]
        assert makespan(found, costs) <= makespan(plan, costs) * (1 + 1e-9)
        assert improved_order(plan, costs) == found


@pytest.mark.parametrize("seeds", [range(2), *slowly(range(2, 30))], ids=str)
def test_joint_is_fastest_policy(seeds: range) -> None:
    for seed in seeds:
        costs = small_stack(random.Random(seed))
        search = PlanSearch(costs, 3)
        joint_s = makespan(search.plan("joint"), costs)
        for name in POLICIES:
            assert joint_s <= makespan(search.plan(name), costs) * (1 + 1e-9), (seed, name)


def test_plans_with_thousands_of_tasks_are_returned_unchanged() -> None:
    """In 16 micro-batches, forty equal blocks have more tasks than the search may move often enough."""
    costs = Workload(16, 64, 64, 128, 8, ep=8).step_costs(TESTBEDS["B"].costs, [0] * 40, PIPELINE[::2], whole=True)
    plan = micro_schedule(costs, StepSplit(16, 16, None, True)).plan()
    assert len(plan.sequence) > 2_000 and improved_order(plan, costs) is plan
