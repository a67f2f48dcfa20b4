"""`make bench`: plans, the simulator, and the decisions made before the first training step."""

from __future__ import annotations

import random

import pytest

from bench.paper_degree import paper_degree
from bench.simulate.grid import run_grid
from fusedmoe.schedule.cost import Contention, CostModel, Line, TaskDurations, fit
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.passes import choose_degree, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, layer_policies, micro_batch_policies
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.workload import Workload

# Twelve layers in eight chunks, with attention and one all-reduce: 985 tasks.
LAYERS, DEGREE = 12, 8


def costs(layers: int = LAYERS, share: float = 1.0) -> StepCosts:
    model = TESTBEDS["B"].costs
    layer = Workload(4, 1024, 2048, 8192, experts=8, ep=8, esp=4).layer_costs(model)
    return StepCosts((layer,) * layers, model.line("all-reduce/dp"), Contention.between_links(share)).by_layer()


def thousand_tasks() -> Plan:
    how = ChunkedPass(three_queues, DEGREE)
    return step_plan(costs(), [how] * LAYERS, [how] * LAYERS)


def test_make_and_check_a_plan(benchmark) -> None:  # type: ignore[no-untyped-def]
    plan = thousand_tasks()
    benchmark(Plan, plan.compute, plan.intra, plan.inter)
    benchmark.extra_info["tasks"] = len(plan)


def test_read_a_plan(benchmark) -> None:  # type: ignore[no-untyped-def]
    benchmark(Plan.parse, str(thousand_tasks()))


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("function", [simulate, makespan])
def test_simulate(benchmark, function, share: float) -> None:  # type: ignore[no-untyped-def]
    """1,000 tasks in less than 5 ms."""
    plan, rng = thousand_tasks(), random.Random(1)
    durations = TaskDurations({task: rng.random() for task in plan}, Contention.between_links(share))
    benchmark(function, plan, durations)
    benchmark.extra_info["tasks"] = len(plan)
    assert len(plan) >= 980 and benchmark.stats.stats.min < 5e-3


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_choose_a_degree(benchmark, share: float) -> None:  # type: ignore[no-untyped-def]
    """Less than 100 µs in closed form; with contention by simulation."""
    chunks = costs().layers[0].chunks["backward"]
    benchmark(choose_degree, chunks, 5e-3, contention=Contention.between_links(share))
    assert share < 1 or benchmark.stats.stats.min < 100e-6


def test_choose_a_degree_as_the_paper_does(benchmark) -> None:  # type: ignore[no-untyped-def]
    benchmark.pedantic(paper_degree, args=(costs().layers[0].chunks["backward"], 5e-3), rounds=3)


def test_fit_24_points(benchmark) -> None:  # type: ignore[no-untyped-def]
    """Less than 10 ms."""
    benchmark(fit, [(2**20 * n, 1e-4 + 1e-9 * 2**20 * n) for n in range(1, 25)])
    assert benchmark.stats.stats.min < 10e-3


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("policy", layer_policies())
def test_plan_a_step(benchmark, policy: str, share: float) -> None:  # type: ignore[no-untyped-def]
    here = costs(share=share)
    plan = benchmark.pedantic(POLICIES[policy].plan, args=(here,), rounds=5, warmup_rounds=1)
    benchmark.extra_info.update(tasks=len(plan), step_ms=1e3 * makespan(plan, here))


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("policy", micro_batch_policies())
def test_plan_24_layers(benchmark, policy: str, share: float) -> None:  # type: ignore[no-untyped-def]
    """Two kinds of layers, up to 16 micro-batches: less than a minute."""
    model = TESTBEDS["B"].costs
    cheap = CostModel({name: Line(line.alpha_s / 10, line.beta_s) for name, line in model.lines.items()})
    kinds = (Workload(size, 1024, 2048, 8192, experts=8, ep=8, esp=4).layer_costs(cheap) for size in (2, 4))
    here = StepCosts((*kinds,) * 12, cheap.line("all-reduce/dp"), Contention.between_links(share))
    plan = benchmark.pedantic(POLICIES[policy].plan, args=(here,), rounds=1)
    benchmark.extra_info.update(tasks=len(plan), step_ms=1e3 * makespan(plan, here))
    assert benchmark.stats.stats.max < 60


def test_the_whole_grid(benchmark) -> None:  # type: ignore[no-untyped-def]
    """Table 5: 972 cases, with and without contention."""
    benchmark.pedantic(run_grid, rounds=1)
