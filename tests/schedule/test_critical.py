from __future__ import annotations

import random

import pytest

from fusedmoe.schedule.cost import Durations
from fusedmoe.schedule.grid import TESTBEDS
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, WHOLE_POLICIES
from fusedmoe.schedule.simulate import critical_path, makespan, simulate, stretches
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.timeline import Timeline
from fusedmoe.schedule.workload import Workload


def stack(contention: float, layers: int = 3) -> StepCosts:
    workload = Workload(
        2, random.choice((256, 1024)), 1024, random.choice((1024, 8192)), 8, ep=8, esp=random.choice((1, 4))
    )
    layer = workload.layer_costs(TESTBEDS["B"].costs)
    return StepCosts((layer,) * layers, TESTBEDS["B"].costs.line("all-reduce/dp"), contention)


@pytest.mark.parametrize("contention", [1.0, 0.6])
@pytest.mark.parametrize("policy", [*POLICIES])
def test_the_path_has_no_gap_and_explains_the_whole_step(policy: str, contention: float) -> None:
    costs = stack(contention)
    plan = POLICIES[policy].plan(costs)
    timeline = simulate(plan, costs)
    path = critical_path(plan, timeline)
    assert path[0].start_s == 0 and path[-1].end_s == timeline.end_s
    for one, following in zip(path, path[1:], strict=False):
        assert one.end_s == pytest.approx(following.start_s, abs=1e-12)
    found = stretches(plan, timeline)
    assert [(s.phase, s.layer) for s in found] == [("forward", i) for i in range(3)] + [
        ("backward", i) for i in (2, 1, 0)
    ]
    for stretch in found:
        assert sum(stretch.waits_s.values()) == pytest.approx(stretch.seconds)
        assert stretch.degree == plan.degrees[stretch.phase, stretch.layer]
    for one, following in zip(found, found[1:], strict=False):
        assert one.end_s == pytest.approx(following.start_s)
    if policy not in WHOLE_POLICIES:  # of which weight gradients may be the end
        tail_s = timeline.end_s - found[-1].end_s
        reduced_s = sum(span.duration_s for span in timeline.spans if span.kind == "gradient-all-reduce")
        assert sum(stretch.gradient_s for stretch in found) + tail_s == pytest.approx(reduced_s)


def test_only_what_is_on_the_path_makes_the_step_shorter() -> None:
    for _ in range(30):
        costs = stack(1.0, layers=2)
        plan = POLICIES["fsmoe"].plan(costs)
        seconds = {task: random.uniform(0.5, 2) for task in plan}
        path = critical_path(plan, simulate(plan, Durations(seconds)))
        names = {(s.kind, s.chunk, s.layer, s.phase) for s in path}
        whole_s = makespan(plan, Durations(seconds))
        elsewhere = {task: s * (1 if task[:4] in names else 0.5) for task, s in seconds.items()}
        assert makespan(plan, Durations(elsewhere)) == pytest.approx(whole_s)
        assert makespan(plan, Durations({task: 0.9 * s for task, s in seconds.items()})) == pytest.approx(0.9 * whole_s)


def test_what_a_pass_is_bound_by() -> None:
    plan = Plan.parse("compute: E0 E1\ninter: D0 D1 C0 C1")
    tasks = {kind: [task for task in plan if task.kind == kind] for kind in ("dispatch", "expert", "combine")}
    for kind, resource in (("expert", "compute"), ("dispatch", "inter")):
        seconds = {task: 5.0 if task in tasks[kind] else 1.0 for task in plan}
        (found,) = stretches(plan, simulate(plan, Durations(seconds)))
        assert found.bound_by == resource and found.degree == 2 and found.gradient_s == 0
        assert found.waits_s[resource] >= 10.0


def test_nothing() -> None:
    assert critical_path(Plan(), Timeline(0, (), "predicted")) == () and stretches(Plan(), Timeline()) == []
