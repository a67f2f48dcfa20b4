"""Costs fitted to measured steps: planted costs are recovered from timelines of simulated steps."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import NO_CONTENTION, Contention, CostModel, Line, MeasuredPart, Observed
from fusedmoe.schedule.passes import one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.refit import compare_parts, observe_task_times, refit
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import LayerCosts, MicroBatches, StageTime, StepCosts
from fusedmoe.schedule.task import Task
from fusedmoe.schedule.timeline import Span, Timeline
from fusedmoe.schedule.workload import Workload

KINDS = ("dispatch", "all-gather", "expert", "reduce-scatter", "combine")
WORK = Workload(4, 64, 32, 64, 4, k=2, ep=2, esp=2)
LINES = ("all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "all-reduce/dp")
MODEL = CostModel({**{name: Line(1e-4, 1e-9) for name in LINES}, "gemm": Line(1e-5, 1e-11)})


def random_stage(rng: random.Random) -> StageTime:
    return StageTime(rng.uniform(1e-4, 1e-3), rng.uniform(1e-2, 1e-1))


def random_true_costs(rng: random.Random, whole: bool) -> StepCosts:
    """A step of equal layers; `whole`: micro-batches run through the whole step."""
    chunks = {phase: {kind: random_stage(rng) for kind in KINDS} for phase in ("forward", "backward")}
    dense = {phase: {"attention": random_stage(rng)} for phase in chunks}
    dense_s = {phase: {kind: part.seconds(1) for kind, part in of.items()} for phase, of in dense.items()}
    micro = None
    if whole:
        weights = {"expert": chunks["backward"]["expert"], "attention": dense["backward"]["attention"]}
        weights = {kind: part * rng.uniform(0.2, 0.6) for kind, part in weights.items()}
        micro = MicroBatches(dense, weights, w_task_overhead_s=rng.uniform(0, 1e-3))
    else:
        dense_s = {phase: of | {"other": rng.uniform(1e-3, 1e-2)} for phase, of in dense_s.items()}
        dense_s["forward"]["count-exchange"] = rng.uniform(1e-3, 1e-2)
    layers = (LayerCosts(chunks, dense_s, 2**20, micro),) * 3
    return StepCosts(layers, Line(1e-3, 1e-9), loss_s=rng.uniform(1e-3, 1e-2), optimizer_s=rng.uniform(1e-3, 1e-2))


def recorded_timeline(plan: Plan, costs: StepCosts) -> Timeline:
    """The step as a rank records it: no span for "other", and a span around the end of the gradients' reduction."""
    spans = [span for span in simulate(plan, costs).spans if span.kind != "other"]
    every = simulate(plan, costs).spans
    passed_s = max(span.end_s for span in every if span.phase == "backward" and span.kind != "gradient-all-reduce")
    end_s = min(span.start_s for span in spans if span.kind == "optimizer")
    return Timeline(0, (*spans, Span("gradient sync", "gradient-all-reduce", "inter", passed_s, end_s)))


def random_prior_costs(costs: StepCosts, rng: random.Random) -> StepCosts:
    """Other costs of the same parts, without contention."""
    found = random_true_costs(rng, costs.can_split)
    layer = found.layers[0]
    dense_s = {phase: {"attention": of["attention"]} for phase, of in layer.dense_s.items()}
    return replace(found, layers=(replace(layer, dense_s=dense_s),) * 3, loss_s=None, optimizer_s=None)


def sequential_plan(costs: StepCosts, degree: int) -> Plan:
    """A sequential step: the time of a pass beyond its tasks is "other"."""
    of = [ChunkedPass(one_queue, degree)] * len(costs.layers)
    return step_plan(costs, of, of, exposed=True)


def assert_equal_seconds(found: StepCosts, right: StepCosts, plan: Plan) -> None:
    expected = right.seconds(plan)
    assert found.seconds(plan) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert makespan(plan, found) == pytest.approx(makespan(plan, right), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_refit_recovers_layer_costs(seed: int) -> None:
    rng = random.Random(seed)
    right = random_true_costs(rng, whole=False)
    before = random_prior_costs(right, rng)
    one, four = sequential_plan(right, 1), sequential_plan(right, 4)
    seen = observe_task_times(one, right, [[recorded_timeline(one, right)]]) | observe_task_times(
        four, right, [[recorded_timeline(four, right)]]
    )
    found = refit(before, seen)
    for degree in (1, 2, 4, 7):
        assert_equal_seconds(found, right, sequential_plan(right, degree))


@pytest.mark.parametrize("seed", range(5))
def test_refit_recovers_costs_under_contention(seed: int) -> None:
    """Tasks of the recorded steps were slowed by contention; the fit recovers the time of each alone, and predicts
    overlapping tasks for any number of chunks.
    """
    rng = random.Random(seed)
    contention = Contention(*(rng.uniform(0.4, 1.0) for _ in range(6)))
    right = replace(random_true_costs(rng, whole=False), contention=contention)
    before = replace(random_prior_costs(right, rng), contention=contention)

    def overlapped(degree: int) -> Plan:
        of = [ChunkedPass(three_queues, degree)] * len(right.layers)
        return step_plan(right, of, of, exposed=True)

    seen = Observed()
    for degree in (1, 4):
        plan = overlapped(degree)
        alone_s = right.seconds(plan)
        spans = {Task(s.kind, s.chunk, s.layer, s.phase): s.duration_s for s in simulate(plan, right).spans}
        longer = [task for task, seconds in spans.items() if seconds > alone_s.get(task, seconds) * (1 + 1e-9)]
        assert bool(longer) == (degree > 1)
        seen |= observe_task_times(plan, right, [[recorded_timeline(plan, right)]])
    found = refit(before, seen)
    for degree in (1, 2, 4, 7):
        assert_equal_seconds(found, right, overlapped(degree))
    # Without the contention model the same steps would give other costs.
    unaware = refit(
        replace(before, contention=NO_CONTENTION),
        observe_task_times(plan, replace(right, contention=NO_CONTENTION), [[recorded_timeline(plan, right)]]),
    )
    assert unaware.seconds(plan) != pytest.approx(right.seconds(plan), rel=1e-3)


def test_refit_matches_superlinear_chunk_times() -> None:
    """As for rows that exceed a cache: four chunks take less than the whole, and the fit matches both. The start of a
    chunk is from the machine's lines.
    """
    rng = random.Random(4)
    right = random_true_costs(rng, whole=False)
    layer = right.layers[0]
    before = random_prior_costs(right, rng)
    chunks = {
        phase: {
            kind: StageTime(before.layers[0].chunks[phase][kind].alpha_s, part.whole_s, 0.3 * part.whole_s)
            for kind, part in of.items()
        }
        for phase, of in layer.chunks.items()
    }
    right = replace(right, layers=(replace(layer, chunks=chunks),) * 3)
    one, four = sequential_plan(right, 1), sequential_plan(right, 4)
    seen = observe_task_times(one, right, [[recorded_timeline(one, right)]]) | observe_task_times(
        four, right, [[recorded_timeline(four, right)]]
    )
    found = refit(before, seen)
    for degree in (1, 2, 4, 7):
        assert_equal_seconds(found, right, sequential_plan(right, degree))


@pytest.mark.parametrize("seed", range(5))
def test_refit_recovers_block_costs(seed: int) -> None:
    rng = random.Random(seed)
    right = random_true_costs(rng, whole=True)
    before, seen = random_prior_costs(right, rng), Observed()
    for split in (StepSplit(1, 1), StepSplit(3, 3), StepSplit(1, 1, None, True), StepSplit(3, 3, None, True)):
        plan = micro_schedule(right, split).plan()
        seen |= observe_task_times(plan, right, [[recorded_timeline(plan, right)]])
    found = refit(before, seen)
    for split in (StepSplit(1, 1), StepSplit(2, 4), StepSplit(4, 4)):
        assert_equal_seconds(found, right, micro_schedule(right, split).plan())
    layer, own = found.layers[0].micro, right.layers[0].micro
    assert layer is not None and own is not None
    assert layer.w_task_overhead_s == pytest.approx(own.w_task_overhead_s, abs=1e-6)
    for kind, part in own.weights.items():
        assert layer.weights[kind].seconds(1) == pytest.approx(part.seconds(1), rel=1e-6)


def test_final_gradient_reduction_is_counted_once() -> None:
    """The plan has their tasks, but no span does: the time after the step counts as theirs, and the rest as the
    optimizer's.
    """
    rng = random.Random(2)
    right = random_true_costs(rng, whole=False)
    plan = sequential_plan(right, 1)
    run = recorded_timeline(plan, right)
    spans = [span for span in run.spans if span.kind != "gradient-all-reduce" or span.chunk is None]
    seen = observe_task_times(plan, right, [[replace(run, spans=tuple(spans))]])
    assert_equal_seconds(refit(replace(right, optimizer_s=None), seen), right, plan)


def test_single_degree_scales_startup_and_total() -> None:
    """Start and whole are scaled by one factor for each kind and pass."""
    rng = random.Random(1)
    before = random_true_costs(rng, whole=False)
    seen = Observed({MeasuredPart("expert", "forward", 2): 3 * before.layers[0].chunks["forward"]["expert"].seconds(2)})
    found = refit(before, seen)
    chunks = found.layers[0].chunks
    part = before.layers[0].chunks["forward"]["expert"]
    assert chunks["forward"]["expert"].alpha_s == pytest.approx(3 * part.alpha_s)
    assert chunks["forward"]["expert"].whole_s == pytest.approx(3 * part.whole_s)
    assert chunks["backward"] == before.layers[0].chunks["backward"]
    assert (found.loss_s, found.optimizer_s, found.all_reduce) == (before.loss_s, before.optimizer_s, before.all_reduce)


def test_observe_uses_slowest_compute_and_shortest_wait() -> None:
    def rank(expert_s: float, waited_s: float) -> Timeline:
        own = Span("expert", "expert", "compute", 0.0, expert_s, chunk=0, layer=0, phase="forward")
        move = Span("combine", "combine", "inter", expert_s, expert_s + waited_s, chunk=0, layer=0, phase="forward")
        return Timeline(0, (own, move))

    plan = Plan.parse("compute: E0\ninter: C0")
    steps = [[rank(1.0, 3.5), rank(4.0, 0.5)], [rank(2.0, 5.0), rank(6.0, 1.0)], [rank(5.0, 0.25), rank(1.0, 4.25)]]
    costs = StepCosts((LayerCosts({"forward": {}, "backward": {}}, {"forward": {}, "backward": {}}),))
    # The median of three steps is used with all its parts: medians of each part would be a step that never ran.
    assert observe_task_times(plan, costs, steps).seconds == {
        MeasuredPart("expert", "forward"): 5.0,
        MeasuredPart("combine", "forward"): 0.25,
    }
    five = [*steps, steps[2], [rank(6.0, 0.5), rank(6.0, 0.5)]]  # 4.5, 5.25, 5.25, 6.5 and 7 s
    seen = observe_task_times(plan, costs, five).seconds
    assert seen[MeasuredPart("expert", "forward")] == pytest.approx(16 / 3)
    assert seen[MeasuredPart("combine", "forward")] == pytest.approx(1 / 3)


def test_alternating_stragglers_are_counted_once() -> None:
    """Each gate is slow on another rank, and rows reach some ranks early: the fit counts the lost time once."""
    rng = random.Random(5)
    names = [("expert", "compute"), ("combine", "inter")]
    plan = Plan.parse("compute: E0 E1 E2\ninter: C0 C1 C2")
    ranks: list[list[Span]] = [[] for _ in range(4)]
    now = [0.0] * 4
    for chunk in range(3):
        for kind, resource in names:
            begins = [one + rng.uniform(0, 0.01) for one in now]
            free = max(begins) if kind == "combine" else 0.0
            now = [max(begin, free) + rng.uniform(0.1, 0.2) for begin in begins]
            for spans, begin, end in zip(ranks, begins, now, strict=True):
                spans.append(Span(kind, kind, resource, begin, end, chunk=chunk, layer=0, phase="forward"))
    costs = StepCosts((LayerCosts({"forward": {}, "backward": {}}, {"forward": {}, "backward": {}}),))
    steps = [[Timeline(rank, tuple(spans)) for rank, spans in enumerate(ranks)]]
    seen = observe_task_times(plan, costs, steps).seconds
    tasks_s = 3 * (seen[MeasuredPart("expert", "forward", 3)] + seen[MeasuredPart("combine", "forward", 3)])
    assert 0.95 * max(now) < tasks_s <= max(now)


def test_task_time_is_at_least_executor_overhead() -> None:
    costs = replace(WORK.step_costs(MODEL, [0, 0], KINDS), task_s=1e-3)
    seen = Observed({MeasuredPart("expert", "forward", 1): 0.1, MeasuredPart("expert", "forward", 4): 0.025})
    assert refit(costs, seen).layers[0].chunks["forward"]["expert"] == StageTime(1e-3, pytest.approx(0.1))


@pytest.mark.parametrize("whole", [False, True])
def test_step_costs_use_observed_samples(whole: bool) -> None:
    """Costs of a workload are those measured for its shapes, scaled in proportion for more rows."""
    seconds = {
        MeasuredPart("expert", "forward", 1): 0.4,
        MeasuredPart("expert", "forward", 4): 0.13,
        MeasuredPart("count-exchange", "forward"): 0.003,
        MeasuredPart("other", "forward"): 0.01,
        MeasuredPart("other", "backward"): 0.02,
        MeasuredPart("loss", None): 0.05,
        MeasuredPart("optimizer", None): 0.06,
    }
    seen = Observed(seconds, WORK.rows)
    model = replace(MODEL, observed={WORK.shapes: seen})
    assert CostModel.from_json(model.to_json()) == model
    costs = WORK.step_costs(model, [4096] * 2, KINDS, whole=whole)
    twice = replace(WORK, batch=2 * WORK.batch).step_costs(model, [4096] * 2, KINDS, whole=whole)
    assert costs.layers[0].chunks["forward"]["expert"] == StageTime(pytest.approx(0.04), pytest.approx(0.36))
    assert twice.layers[0].chunks["forward"]["expert"] == StageTime(pytest.approx(0.04), pytest.approx(0.72))
    if whole:
        assert (costs.loss_s, costs.optimizer_s) == (pytest.approx(0.076), pytest.approx(0.10))
        assert all("other" not in of for of in costs.layers[0].dense_s.values())
    else:
        assert (costs.loss_s, costs.optimizer_s) == (0.05, 0.06)
        assert costs.layers[0].dense_s["backward"]["other"] == 0.02
        assert twice.layers[0].dense_s["backward"]["other"] == 0.04
        # The count exchange depends on the number of ranks, not of rows.
        assert costs.layers[0].dense_s["forward"]["count-exchange"] == 0.003
        assert twice.layers[0].dense_s["forward"]["count-exchange"] == 0.003
    del seconds[MeasuredPart("loss", None)], seconds[MeasuredPart("optimizer", None)]
    alone = replace(MODEL, observed={WORK.shapes: Observed(seconds, WORK.rows)})
    costs, lines = (WORK.step_costs(of, [4096] * 2, KINDS, whole=whole) for of in (alone, MODEL))
    longer_s = costs.layers[0].dense_total_s("backward") - lines.layers[0].dense_total_s("backward")
    assert costs.loss_s is costs.optimizer_s is None and longer_s == pytest.approx(0.02)
    other = replace(WORK, hidden=128)
    assert other.step_costs(model, [0], KINDS) == other.step_costs(MODEL, [0], KINDS)


def test_compare_equals_prediction_for_exact_costs() -> None:
    rng = random.Random(3)
    right = random_true_costs(rng, whole=False)
    plan = sequential_plan(right, 1)
    rows = {row.part: row for row in compare_parts(plan, refit(right, Observed()), [recorded_timeline(plan, right)])}
    assert rows["step"].predicted_s == rows["step"].measured_s == pytest.approx(makespan(plan, right))
    for row in rows.values():
        assert row.error == pytest.approx(0.0, abs=1e-9), row
    # A sequential step: the parts sum to the whole.
    parts = [row.measured_s or 0.0 for row in rows.values() if row.part != "step"]
    assert sum(parts) == pytest.approx(makespan(plan, right))
    half = {
        row.part: row.error for row in compare_parts(plan, right, [recorded_timeline(plan, _scaled_costs(right, 2.0))])
    }
    assert half["expert backward"] == pytest.approx(-0.5) and half["loss"] == pytest.approx(0.0)


@pytest.mark.parametrize("seed", range(3))
def test_compare_measures_parts_of_step_without_schedule(seed: int) -> None:
    """Its spans have no chunk numbers, and one synchronization of all gradients follows the backward pass."""
    right = random_true_costs(random.Random(seed), whole=False)
    plan = sequential_plan(right, 1)
    timeline = recorded_timeline(plan, right)
    reduced = [span for span in timeline.spans if span.kind == "gradient-all-reduce"]
    begin_s, end_s = min(span.start_s for span in reduced), max(span.end_s for span in reduced)
    spans = [span._replace(chunk=None) for span in timeline.spans if span not in reduced]
    spans.append(Span("gradient sync", "gradient-all-reduce", "inter", begin_s, end_s))
    without = replace(timeline, spans=tuple(spans))
    rows = {row.part: row.measured_s for row in compare_parts(plan, right, [without])}
    for row in compare_parts(plan, right, [timeline]):
        assert rows[row.part] == pytest.approx(row.measured_s, abs=1e-9), row
    assert rows["gradient-all-reduce backward"] == pytest.approx(end_s - begin_s)


def _scaled_costs(costs: StepCosts, times: float) -> StepCosts:
    layer = costs.layers[0]
    chunks = {phase: {kind: part * times for kind, part in of.items()} for phase, of in layer.chunks.items()}
    return replace(costs, layers=(replace(layer, chunks=chunks),) * len(costs.layers))


def test_old_gate_samples_are_read_as_other() -> None:
    old = {"rows": None, "samples": [["gate", "forward", 1, False, 0.5], ["expert", "forward", 1, False, 1.0]]}
    assert Observed.from_dict(old).seconds == {
        MeasuredPart("other", "forward"): 0.5,
        MeasuredPart("expert", "forward"): 1.0,
    }


BROKEN: Sequence[object] = (
    [],
    {"rows": 1.0},
    {"rows": None, "samples": [["expert", "forward", 1, False]]},
    {"rows": None, "samples": [["expert", "forward", 0, False, 1.0]]},
    {"rows": None, "samples": [["expert", "forward", 1, False, -1.0]]},
    {"rows": None, "samples": [["expert", "forward", 1, False, float("nan")]]},
    {"rows": "many", "samples": []},
)


@pytest.mark.parametrize("broken", BROKEN)
def test_from_dict_rejects_invalid_observations(broken: object) -> None:
    with pytest.raises(ConfigError, match="observed"):
        Observed.from_dict(broken)
    data = json.loads(MODEL.to_json()) | {"observed": {WORK.shapes: broken}}
    with pytest.raises(ConfigError, match="observed|cost model"):
        CostModel.from_json(json.dumps(data))
