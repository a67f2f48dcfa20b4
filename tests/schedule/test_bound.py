"""The lower bound of all plans: against an exact solver, against all policies, and in cases solved by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linprog

from bench.simulate.grid import workloads
from fusedmoe.schedule import bound
from fusedmoe.schedule.bound import _min_max_bound_s, bound_s
from fusedmoe.schedule.cost import NO_CONTENTION, Contention, Line
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import LayerCosts, MicroBatches, StageTime, StepCosts
from fusedmoe.schedule.task import Task, resources_of, standard_dependencies
from tests.schedule.test_splits import random_split, random_stack


def cp_sat_step_limits_s(costs: StepCosts, split: StepSplit, seconds: float) -> tuple[float, float]:
    """Return an exact solver's lower and upper limits of the shortest step with this split."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    tasks = list(split.tasks(costs))
    took = costs.durations(tasks)
    tick_s = seconds / 10_000
    model = cp_model.CpModel()
    end = model.new_int_var(0, 20_000, "")
    starts: dict[Task, object] = {}
    spans: dict[Task, object] = {}
    for task in tasks:
        starts[task] = model.new_int_var(0, 20_000, "")
        spans[task] = model.new_fixed_size_interval_var(starts[task], int(took[task] / tick_s), "")  # never too long
        model.add(starts[task] + int(took[task] / tick_s) <= end)
    for task, before in standard_dependencies(tasks).items():
        for one in before:
            model.add(starts[task] >= starts[one] + int(took[one] / tick_s))
    for resource in ("compute", "intra", "inter"):
        model.add_no_overlap([spans[task] for task in tasks if resource in resources_of(task.kind)])
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time, solver.parameters.num_workers = 2.0, 1
    assert solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return solver.best_objective_bound * tick_s, (solver.objective_value + len(tasks)) * tick_s


@pytest.mark.parametrize(
    "seed",
    # "fresh": another one in each run
    ["fresh", *range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))],
)
def test_bound_is_below_exact_optimum(seed: int | str) -> None:
    seed = random.randrange(10**6) if seed == "fresh" else seed
    print(f"seed {seed}")
    rng = random.Random(seed)
    costs = replace(random_stack(rng, rng.randint(1, 2)), contention=NO_CONTENTION)
    bound = bound_s(costs, 3)
    for split in (random_split(rng, len(costs.layers), 3), StepSplit.from_plan(POLICIES["flowmoe"].plan(costs, 3))):
        found = micro_schedule(costs, split).makespan_s()
        least, most = cp_sat_step_limits_s(costs, split, found)
        assert bound <= most * (1 + 1e-9)
        assert least <= found * (1 + 1e-9)


@pytest.mark.parametrize("seed", ["fresh", *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3))])
def test_bound_holds_with_contention_between_all_resources(seed: int | str) -> None:
    seed = random.randrange(10**6) if seed == "fresh" else seed
    print(f"seed {seed}")
    rng = random.Random(seed)
    raised = 0
    for case in range(30):
        if case >= 3 and raised:
            break
        alone = replace(random_stack(rng, rng.randint(1, 2)), contention=NO_CONTENTION)
        costs = replace(alone, contention=Contention(*(rng.uniform(0.4, 1.0) for _ in range(6))))
        bound = bound_s(costs, 3)
        raised += bound > bound_s(alone, 3) * (1 + 1e-9)
        for policy in POLICIES:
            assert bound <= makespan(POLICIES[policy].plan(costs, 3), costs) * (1 + 1e-9), policy
        for _ in range(5):
            split = random_split(rng, len(costs.layers), 3)
            assert bound <= makespan(micro_schedule(costs, split).plan(), costs) * (1 + 1e-9), split
    assert raised, "contention raises no bound"


def test_bound_is_tight_in_solved_case() -> None:
    """Two layers with long gradients: the all-reduce of the first starts after the forward pass and one layer's
    backward, and uses the link from then on.
    """
    free, experts = StageTime(0.0, 0.0), StageTime(0.0, 1.0)
    chunks = {phase: {"expert": experts} for phase in ("forward", "backward")}
    micro = MicroBatches({phase: {"attention": experts} for phase in chunks}, {"expert": free, "attention": free})
    layer = LayerCosts(chunks, {phase: {"attention": 1.0} for phase in chunks}, 10, micro)
    costs = StepCosts((layer, layer), Line(0.5, 1.0))
    assert bound_s(costs) == pytest.approx(4.0 + 2.0 + 20.0 + 0.5)
    assert makespan(POLICIES["joint"].plan(costs), costs) == pytest.approx(4.0 + 2.0 + 20.0 + 2 * 0.5)
    # Where links between nodes are free, the processor and the last gradient determine the bound.
    costs = StepCosts((layer, layer), Line(0.0, 0.001))
    assert bound_s(costs) == pytest.approx(8.0 + 0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "testbed", [pytest.param(TESTBEDS[name], id=name, marks=[pytest.mark.slow] * (name == "B")) for name in TESTBEDS]
)
def test_joint_plan_is_close_to_bound(testbed) -> None:
    """The bound is close in cases of FSMoE's study, and contention between links only raises it."""
    cases = random.Random(0).sample(list(workloads(testbed)), 2)
    gaps = []
    for workload in cases:
        layer = workload.layer_costs(testbed.costs)
        costs = StepCosts((layer,) * 4, testbed.costs.line("all-reduce/dp"))
        bound = bound_s(costs)
        gaps.append(makespan(POLICIES["joint"].plan(costs), costs) / bound - 1)
        shared = replace(costs, contention=testbed.costs.contention)
        assert bound <= bound_s(shared) <= makespan(POLICIES["joint"].plan(shared), shared)
    assert min(gaps) >= 0 and sum(gaps) / len(gaps) < 0.15


def test_program_of_some_choices_finds_the_bound_of_all_choices() -> None:
    """Against one linear program over every choice and pass; equal passes are the same objects."""
    rng = np.random.default_rng()
    kinds = [[rng.random(30) for _ in range(12)] for _ in range(3)]
    passes = [kinds[int(kind)] for kind in rng.integers(0, 3, 9)]
    fixed = rng.random(12)
    found = _min_max_bound_s([([one[row] for one in passes], float(fixed[row])) for row in range(12)])
    which = np.repeat(np.eye(9), 30, axis=0)
    matrix = np.concatenate([-np.concatenate([np.stack(one) for one in passes], 1).T, which], 1)
    solved = linprog(
        -np.concatenate([fixed, np.ones(9)]),
        matrix,
        np.zeros(270),
        np.concatenate([np.ones(12), np.zeros(9)])[None],
        [1.0],
        [(0, None)] * 21,
    )
    assert found == pytest.approx(-solved.fun, rel=1e-6)


def test_equal_layers_of_a_deep_stack_are_one_pass_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    undominated = bound._remove_dominated_columns
    monkeypatch.setattr(
        bound, "_remove_dominated_columns", lambda sums: rows.append(sums.shape[0]) or undominated(sums)
    )
    costs = random_stack(random.Random(1), 1)
    for depth in (20, 60):
        rows.clear()
        deep = replace(costs, layers=costs.layers * depth)
        assert 0 < bound_s(deep, 3) <= makespan(POLICIES["sequential"].plan(deep), deep)
        assert len(rows) < 45  # of forward, and backward with and without W tasks
