"""Costs by what steps took: planted ones are found again from timelines of steps that took them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import ALONE, Contention, CostModel, Line, Observed, Sample
from fusedmoe.schedule.passes import one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.refit import compare, observe, refit
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


def stage(rng: random.Random) -> StageTime:
    return StageTime(rng.uniform(1e-4, 1e-3), rng.uniform(1e-2, 1e-1))


def planted(rng: random.Random, whole: bool) -> StepCosts:
    """A step of layers that are alike; `whole`: micro-batches go through them."""
    chunks = {phase: {kind: stage(rng) for kind in KINDS} for phase in ("forward", "backward")}
    dense = {phase: {"attention": stage(rng)} for phase in chunks}
    dense_s = {phase: {kind: part.seconds(1) for kind, part in of.items()} for phase, of in dense.items()}
    micro = None
    if whole:
        weights = {"expert": chunks["backward"]["expert"], "attention": dense["backward"]["attention"]}
        weights = {kind: part * rng.uniform(0.2, 0.6) for kind, part in weights.items()}
        micro = MicroBatches(dense, weights, apart_s=rng.uniform(0, 1e-3))
    else:
        dense_s = {phase: of | {"other": rng.uniform(1e-3, 1e-2)} for phase, of in dense_s.items()}
        dense_s["forward"]["count-exchange"] = rng.uniform(1e-3, 1e-2)
    layers = (LayerCosts(chunks, dense_s, 2**20, micro),) * 3
    return StepCosts(layers, Line(1e-3, 1e-9), loss_s=rng.uniform(1e-3, 1e-2), optimizer_s=rng.uniform(1e-3, 1e-2))


def as_run(plan: Plan, costs: StepCosts) -> Timeline:
    """The step as a rank records it: "other" by no span, and a span around what ends the reduction of gradients."""
    spans = [span for span in simulate(plan, costs).spans if span.kind != "other"]
    every = simulate(plan, costs).spans
    passed_s = max(span.end_s for span in every if span.phase == "backward" and span.kind != "gradient-all-reduce")
    end_s = min(span.start_s for span in spans if span.kind == "optimizer")
    return Timeline(0, (*spans, Span("gradient sync", "gradient-all-reduce", "inter", passed_s, end_s)))


def prior(costs: StepCosts, rng: random.Random) -> StepCosts:
    """Other costs of the same parts, with nothing around them."""
    found = planted(rng, costs.can_split)
    layer = found.layers[0]
    dense_s = {phase: {"attention": of["attention"]} for phase, of in layer.dense_s.items()}
    return replace(found, layers=(replace(layer, dense_s=dense_s),) * 3, loss_s=None, optimizer_s=None)


def in_turn(costs: StepCosts, degree: int) -> Plan:
    """One thing after the other: what a pass takes beside its tasks is then nothing but "other"."""
    of = [ChunkedPass(one_queue, degree)] * len(costs.layers)
    return step_plan(costs, of, of, exposed=True)


def seconds_are_equal(found: StepCosts, right: StepCosts, plan: Plan) -> None:
    expected = right.seconds(plan)
    assert found.seconds(plan) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert makespan(plan, found) == pytest.approx(makespan(plan, right), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_planted_costs_of_layers_are_found(seed: int) -> None:
    rng = random.Random(seed)
    right = planted(rng, whole=False)
    before = prior(right, rng)
    one, four = in_turn(right, 1), in_turn(right, 4)
    seen = observe(one, right, [[as_run(one, right)]]) | observe(four, right, [[as_run(four, right)]])
    found = refit(before, seen)
    for degree in (1, 2, 4, 7):
        seconds_are_equal(found, right, in_turn(right, degree))


@pytest.mark.parametrize("seed", range(5))
def test_planted_costs_are_found_where_tasks_disturb_each_other(seed: int) -> None:
    """Tasks of the steps that were seen took longer beside others; what each takes alone is found, and what it takes
    beside others then predicted of any number of chunks."""
    rng = random.Random(seed)
    contention = Contention(*(rng.uniform(0.4, 1.0) for _ in range(6)))
    right = replace(planted(rng, whole=False), contention=contention)
    before = replace(prior(right, rng), contention=contention)

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
        seen |= observe(plan, right, [[as_run(plan, right)]])
    found = refit(before, seen)
    for degree in (1, 2, 4, 7):
        seconds_are_equal(found, right, overlapped(degree))
    # Had nobody known of it, the same steps would give other costs.
    unaware = refit(
        replace(before, contention=ALONE), observe(plan, replace(right, contention=ALONE), [[as_run(plan, right)]])
    )
    assert unaware.seconds(plan) != pytest.approx(right.seconds(plan), rel=1e-3)


def test_large_chunks_that_take_more_than_in_proportion() -> None:
    """As rows that no longer fit in a cache: four chunks take less than the whole, and both are met. Of what a chunk
    takes to start the machine's lines tell."""
    rng = random.Random(4)
    right = planted(rng, whole=False)
    layer = right.layers[0]
    before = prior(right, rng)
    chunks = {
        phase: {
            kind: StageTime(before.layers[0].chunks[phase][kind].alpha_s, part.whole_s, 0.3 * part.whole_s)
            for kind, part in of.items()
        }
        for phase, of in layer.chunks.items()
    }
    right = replace(right, layers=(replace(layer, chunks=chunks),) * 3)
    one, four = in_turn(right, 1), in_turn(right, 4)
    seen = observe(one, right, [[as_run(one, right)]]) | observe(four, right, [[as_run(four, right)]])
    found = refit(before, seen)
    for degree in (1, 2, 4, 7):
        seconds_are_equal(found, right, in_turn(right, degree))


@pytest.mark.parametrize("seed", range(5))
def test_planted_costs_of_blocks_are_found(seed: int) -> None:
    rng = random.Random(seed)
    right = planted(rng, whole=True)
    before, seen = prior(right, rng), Observed()
    for split in (StepSplit(1, 1), StepSplit(3, 3), StepSplit(1, 1, None, True), StepSplit(3, 3, None, True)):
        plan = micro_schedule(right, split).plan()
        seen |= observe(plan, right, [[as_run(plan, right)]])
    found = refit(before, seen)
    for split in (StepSplit(1, 1), StepSplit(2, 4), StepSplit(4, 4)):
        seconds_are_equal(found, right, micro_schedule(right, split).plan())
    layer, own = found.layers[0].micro, right.layers[0].micro
    assert layer is not None and own is not None
    assert layer.apart_s == pytest.approx(own.apart_s, abs=1e-6)
    for kind, part in own.weights.items():
        assert layer.weights[kind].seconds(1) == pytest.approx(part.seconds(1), rel=1e-6)


def test_gradients_that_are_reduced_at_the_end_count_once() -> None:
    """Their tasks are in the plan, but no span is: what is after the step is theirs, and the rest the optimizer's."""
    rng = random.Random(2)
    right = planted(rng, whole=False)
    plan = in_turn(right, 1)
    run = as_run(plan, right)
    spans = [span for span in run.spans if span.kind != "gradient-all-reduce" or span.chunk is None]
    seen = observe(plan, right, [[replace(run, spans=tuple(spans))]])
    seconds_are_equal(refit(replace(right, optimizer_s=None), seen), right, plan)


def test_one_number_of_chunks_is_a_factor() -> None:
    """Start and whole are multiplied alike, each kind and pass by its own."""
    rng = random.Random(1)
    before = planted(rng, whole=False)
    seen = Observed({Sample("expert", "forward", 2): 3 * before.layers[0].chunks["forward"]["expert"].seconds(2)})
    found = refit(before, seen)
    chunks = found.layers[0].chunks
    part = before.layers[0].chunks["forward"]["expert"]
    assert chunks["forward"]["expert"].alpha_s == pytest.approx(3 * part.alpha_s)
    assert chunks["forward"]["expert"].whole_s == pytest.approx(3 * part.whole_s)
    assert chunks["backward"] == before.layers[0].chunks["backward"]
    assert (found.loss_s, found.optimizer_s, found.all_reduce) == (before.loss_s, before.optimizer_s, before.all_reduce)


def test_the_slowest_rank_computes_and_the_last_one_does_not_wait() -> None:
    def rank(expert_s: float, waited_s: float) -> Timeline:
        own = Span("expert", "expert", "compute", 0.0, expert_s, chunk=0, layer=0, phase="forward")
        move = Span("combine", "combine", "inter", expert_s, expert_s + waited_s, chunk=0, layer=0, phase="forward")
        return Timeline(0, (own, move))

    plan = Plan.parse("compute: E0\ninter: C0")
    steps = [[rank(1.0, 3.5), rank(4.0, 0.5)], [rank(2.0, 5.0), rank(6.0, 1.0)], [rank(5.0, 0.25), rank(1.0, 4.25)]]
    costs = StepCosts((LayerCosts({"forward": {}, "backward": {}}, {"forward": {}, "backward": {}}),))
    # Of three steps the middle one counts, in all its parts: medians of each part would be a step that never was.
    assert observe(plan, costs, steps).seconds == {Sample("expert", "forward"): 5.0, Sample("combine", "forward"): 0.25}
    five = [*steps, steps[2], [rank(6.0, 0.5), rank(6.0, 0.5)]]  # 4.5, 5.25, 5.25, 6.5 and 7 s
    seen = observe(plan, costs, five).seconds
    assert seen[Sample("expert", "forward")] == pytest.approx(16 / 3)
    assert seen[Sample("combine", "forward")] == pytest.approx(1 / 3)


def test_ranks_that_are_late_by_turns() -> None:
    """Each gate is slow on another rank, and rows reach some ranks early: what the ranks lose is in the parts once."""
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
    seen = observe(plan, costs, steps).seconds
    tasks_s = 3 * (seen[Sample("expert", "forward", 3)] + seen[Sample("combine", "forward", 3)])
    assert 0.95 * max(now) < tasks_s <= max(now)


def test_no_task_takes_less_than_the_executor() -> None:
    costs = replace(WORK.step_costs(MODEL, [0, 0], KINDS), task_s=1e-3)
    seen = Observed({Sample("expert", "forward", 1): 0.1, Sample("expert", "forward", 4): 0.025})
    assert refit(costs, seen).layers[0].chunks["forward"]["expert"] == StageTime(1e-3, pytest.approx(0.1))


@pytest.mark.parametrize("whole", [False, True])
def test_a_model_with_what_was_seen(whole: bool) -> None:
    """Costs of a workload are by what was seen of its shapes, and of more rows in proportion."""
    seconds = {
        Sample("expert", "forward", 1): 0.4,
        Sample("expert", "forward", 4): 0.13,
        Sample("count-exchange", "forward"): 0.003,
        Sample("other", "forward"): 0.01,
        Sample("other", "backward"): 0.02,
        Sample("loss", None): 0.05,
        Sample("optimizer", None): 0.06,
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
        # As many ranks tell each other as many numbers, whatever the rows.
        assert costs.layers[0].dense_s["forward"]["count-exchange"] == 0.003
        assert twice.layers[0].dense_s["forward"]["count-exchange"] == 0.003
    del seconds[Sample("loss", None)], seconds[Sample("optimizer", None)]
    alone = replace(MODEL, observed={WORK.shapes: Observed(seconds, WORK.rows)})
    costs, lines = (WORK.step_costs(of, [4096] * 2, KINDS, whole=whole) for of in (alone, MODEL))
    longer_s = costs.layers[0].dense_total_s("backward") - lines.layers[0].dense_total_s("backward")
    assert costs.loss_s is costs.optimizer_s is None and longer_s == pytest.approx(0.02)
    other = replace(WORK, hidden=128)
    assert other.step_costs(model, [0], KINDS) == other.step_costs(MODEL, [0], KINDS)


def test_a_step_beside_its_prediction() -> None:
    rng = random.Random(3)
    right = planted(rng, whole=False)
    plan = in_turn(right, 1)
    rows = {row.part: row for row in compare(plan, refit(right, Observed()), [as_run(plan, right)])}
    assert rows["step"].predicted_s == rows["step"].measured_s == pytest.approx(makespan(plan, right))
    for row in rows.values():
        assert row.error == pytest.approx(0.0, abs=1e-9), row
    # One thing after the other: the parts are the whole.
    parts = [row.measured_s or 0.0 for row in rows.values() if row.part != "step"]
    assert sum(parts) == pytest.approx(makespan(plan, right))
    half = {row.part: row.error for row in compare(plan, right, [as_run(plan, _slower(right, 2.0))])}
    assert half["expert backward"] == pytest.approx(-0.5) and half["loss"] == pytest.approx(0.0)


def _slower(costs: StepCosts, times: float) -> StepCosts:
    layer = costs.layers[0]
    chunks = {phase: {kind: part * times for kind, part in of.items()} for phase, of in layer.chunks.items()}
    return replace(costs, layers=(replace(layer, chunks=chunks),) * len(costs.layers))


def test_files_that_call_it_the_gate() -> None:
    old = {"rows": None, "samples": [["gate", "forward", 1, False, 0.5], ["expert", "forward", 1, False, 1.0]]}
    assert Observed.from_dict(old).seconds == {Sample("other", "forward"): 0.5, Sample("expert", "forward"): 1.0}


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
def test_json_that_is_nothing_observed(broken: object) -> None:
    with pytest.raises(ConfigError, match="observed"):
        Observed.from_dict(broken)
    data = json.loads(MODEL.to_json()) | {"observed": {WORK.shapes: broken}}
    with pytest.raises(ConfigError, match="observed|cost model"):
        CostModel.from_json(json.dumps(data))
