"""schedule="fused": a layer chooses by cost between collectives and sending kernels, among the kinds it can run."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.layers.schedule import FUSED_POLICY, Schedule
from fusedmoe.schedule.cost import CostModel, FusedCosts, Line, MeasuredPart, Observed
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import any_order, layer_policies
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.task import FUSED, PHASES, PIPELINE
from fusedmoe.schedule.workload import Workload, one_sided_s

OVER_EXPERTS = (Workload(1, 4096, 1024, 4096, 8, ep=8), PIPELINE[::2], "dispatch-expert-combine")
OVER_SHARDS = (Workload(1, 4096, 1024, 4096, 8, esp=4), PIPELINE, "all-gather-expert-reduce-scatter")


def costs_of(link: Line, gemm: Line, signal_s: float, tile_rows: int = 128) -> CostModel:
    lines = dict.fromkeys(("all-to-all/ep", "all-gather/esp", "reduce-scatter/esp"), link)
    return CostModel({**lines, "gemm": gemm}, fused=FusedCosts(tile_rows, {"intra": signal_s, "inter": signal_s}))


@pytest.mark.parametrize("where", [OVER_EXPERTS, OVER_SHARDS], ids=["over experts", "over shards"])
@pytest.mark.parametrize(
    ("what", "costs", "chosen"),
    [
        # The links take longer: two chunks already hide the experts, so only start-up latencies can be saved.
        ("link-bound, low latency", costs_of(Line(0.0, 1e-9), Line(0.0, 1e-12), 1e-2), False),
        ("link-bound, high latency", costs_of(Line(3e-2, 1e-9), Line(1e-6, 1e-12), 1e-6), True),
        ("link-bound, high latency and signal time", costs_of(Line(3e-2, 1e-9), Line(1e-6, 1e-12), 9e-2), False),
        # The experts take longer: the first and last chunks are exposed. So are the first and last tiles, but tiles are
        # smaller.
        ("compute-bound, high latency", costs_of(Line(3e-3, 1e-10), Line(1e-6, 1e-11), 1e-6), True),
        ("compute-bound, large tiles", costs_of(Line(1e-6, 1e-10), Line(1e-9, 1e-11), 1e-6, 4096), False),
        ("zero costs", costs_of(Line(0.0, 0.0), Line(0.0, 0.0), 0.0), False),
    ],
)
def test_fused_is_chosen_if_predicted_faster(
    what: str, costs: CostModel, chosen: bool, where: tuple[Workload, tuple[str, ...], str]
) -> None:
    workload, parts, kind = where
    plans = Schedule("fused", costs=costs).plans((*parts, kind), workload)
    for plan in (plans.forward, plans.backward):
        assert {task.kind for task in plan} == ({kind} if chosen else set(parts)), what
        assert plan == Plan.parse(str(plan))
    assert not chosen or len(plans.forward) == len(plans.backward) == 1  # more chunks need measured times


@pytest.mark.parametrize("where", [OVER_EXPERTS, OVER_SHARDS], ids=["over experts", "over shards"])
def test_measured_times_select_chunks_of_each_pass(where: tuple[Workload, tuple[str, ...], str]) -> None:
    """Select the fastest measured pair, including the copy between chunk counts; else one chunk by the cost model."""
    workload, parts, kind = where
    rng, seen, copies = random.Random(), set(), (0.0, 0.3)
    for _ in range(40):
        slow = costs_of(Line(1e3, 1e-9), Line(1e-6, 1e-12), 1e-6)
        copy_s = rng.choice(copies)
        lines = {**slow.lines, "copy": Line(copy_s, 0.0)}
        ran = {
            MeasuredPart(kind, phase, chunks): rng.uniform(1.0, 1.5)
            for phase in PHASES
            for chunks in rng.sample((1, 2, 4, 8), rng.randint(1, 4))
        }
        rows = rng.choice((None, workload.rows / 2))
        costs = replace(slow, lines=lines, observed={workload.shapes: Observed(ran, rows)})
        limit, can_rechunk = rng.choice((1, 4, 8)), rng.choice((True, False))
        share = 1 if rows is None else 2
        took = {
            (there.chunks, back.chunks): share * (ran[there] + ran[back]) + copy_s * (there.chunks != back.chunks)
            for there in ran
            for back in ran
            if (there.phase, back.phase) == PHASES and max(there.chunks, back.chunks) <= limit
            if can_rechunk or there.chunks == back.chunks
        }
        schedule = Schedule("joint", costs=costs, limit=limit, puts=True)
        plans = schedule.plans((*parts, kind), workload, can_rechunk=can_rechunk)
        found = len(plans.forward), len(plans.backward)
        assert {task.kind for plan in (plans.forward, plans.backward) for task in plan} == {kind}
        assert found == (min(took, key=took.__getitem__) if took else (1, 1))
        seen.add(found[0] == found[1])
    assert seen == {True, False}


@pytest.mark.parametrize("schedule", [*layer_policies(), FUSED_POLICY])
def test_plans_contain_only_runnable_tasks(schedule: str) -> None:
    """Plans contain only tasks that the layer can run; "fused" is chosen if possible and faster."""
    rng, seen = random.Random(), set()
    for _ in range(20):
        workload, parts, kind = rng.choice([OVER_EXPERTS, OVER_SHARDS])
        link = Line(10 ** rng.uniform(-6, -2), 10 ** rng.uniform(-11, -9))
        gemm = Line(1e-6, 10 ** rng.uniform(-13, -11))
        costs = costs_of(link, gemm, 10 ** rng.uniform(-6, -2))
        by_costs, by_hand = Schedule(schedule, costs=costs, limit=4), Schedule(schedule, degrees=(3, 3))
        for kinds in (parts, (*parts, kind)):
            for how in (by_costs, by_hand):
                plans = how.plans(kinds, workload)
                found = {task.kind for plan in (plans.forward, plans.backward) for task in plan}
                assert found in (set(parts), {kind}) and found <= set(kinds)
                assert FUSED.keys().isdisjoint(found) or schedule == "fused"
                seen |= found & FUSED.keys()
        if schedule == "fused":
            stack = workload.step_costs(costs, [0], parts)
            alone = one_sided_s(kind, workload, costs)
            assert alone is not None
            rest_s = sum(stack.layers[0].dense_total_s(phase) for phase in PHASES)
            shorter = sum(alone.values()) + rest_s < makespan(any_order(stack, 4), stack)
            took = by_costs.plans((*parts, kind), workload)
            assert ({task.kind for task in took.forward} == {kind}) == shorter
    assert bool(seen) == (schedule == "fused")


@pytest.mark.parametrize(
    "given",
    [{"row_factor": 1.5}, *({"row_factor": factor, "puts": True} for factor in (0.0, -1.0, math.inf, math.nan))],
)
def test_invalid_row_factor_is_rejected(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Schedule: row_factor = .*; give a positive number"):
        Schedule("joint", **given)
