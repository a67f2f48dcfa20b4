"""Between collectives and fused operations policies choose by cost, for each layer and pass."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.schedule.bound import bound_s
from fusedmoe.schedule.cost import Durations, FusedCosts, Line
from fusedmoe.schedule.degree import choose_degree, pass_s
from fusedmoe.schedule.fused import Chunks, TiledChunks, tiled_parts
from fusedmoe.schedule.grid import workloads
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, best_of
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.stack_costs import LayerCosts, StackCosts
from fusedmoe.schedule.task import FUSED, PIPELINE, Task
from fusedmoe.schedule.testbeds import TESTBEDS
from fusedmoe.schedule.timeline import PHASES
from fusedmoe.schedule.whole import Split, micro_schedule, split_bound_s
from fusedmoe.schedule.whole_policies import WHOLE_POLICIES, WholeModel
from fusedmoe.schedule.workload import Workload
from tests.schedule.plans import ORDERS, random_costs, random_plan, with_fused

SEEDS = st.integers(0, 2**32)
CHOOSING = ("fused", "joint")
QUICK = FusedCosts(128, {"intra": 2e-6, "inter": 5e-6})


def roads_of(plan: Plan) -> dict[tuple[str | None, int | None], str]:
    return {(task.phase, task.layer): task.kind for task in plan.fused}


def check_complete(plan: Plan, costs: StackCosts) -> None:
    """Every part of every layer is done once in each chunk, alone or by a fused operation."""
    for (index, layer), phase in product(enumerate(costs.layers), PHASES):
        of = [task for task in plan if (task.layer, task.phase) == (index, phase)]
        found = [task for task in of if task.kind in PIPELINE or task.kind in FUSED]
        degree = plan.degrees[phase, index]
        done = sorted((part, task.chunk) for task in found for part in FUSED.get(task.kind, (task.kind,)))
        assert done == sorted(product(layer.chunks[phase], range(degree)))


@settings(max_examples=12, deadline=None)
@given(SEEDS)
def test_joint_is_never_worse_and_nothing_beats_the_bound(seed):
    rng = random.Random(seed)
    plain = random_costs(rng)
    costs = with_fused(rng, plain)
    plans = {name: policy.plan(costs) for name, policy in POLICIES.items()}
    seconds = {name: makespan(plan, costs) for name, plan in plans.items()}
    assert seconds["joint"] == min(seconds.values())
    without = {name: policy.plan(plain) for name, policy in POLICIES.items()}
    for name, plan in plans.items():
        check_complete(plan, costs)
        assert max(POLICIES[name].plan(costs, 3).degrees.values()) <= 3
        if name in CHOOSING:
            assert seconds[name] <= makespan(without[name], plain) * (1 + 1e-9)
        else:
            assert plan == without[name]  # the published ones are what they were
        assert not without[name].fused
    bound = bound_s(costs)
    assert bound <= bound_s(plain) * (1 + 1e-12) and bound <= seconds["joint"] * (1 + 1e-9)
    for _ in range(5):
        assert bound <= makespan(random_plan(rng, costs), costs) * (1 + 1e-9)


def layer_of(
    dispatch_ms: float, expert_ms: float, alpha_s: float, signal_s: float, *, gather_ms: float = 0.0, tile: float = 0.01
) -> LayerCosts:
    """Both passes alike; each collective starts in alpha_s, products in no time. With shards where gather_ms > 0: then
    kernels send within the node only."""
    parts = {"dispatch": dispatch_ms, "expert": expert_ms, "combine": dispatch_ms}
    if gather_ms:
        parts |= {"all-gather": gather_ms, "reduce-scatter": gather_ms}
    chunks = {kind: Chunks(alpha_s * (kind != "expert"), parts[kind] * 1e-3) for kind in PIPELINE if kind in parts}
    costs = FusedCosts(1, {"intra" if gather_ms else "inter": signal_s})
    fused = tiled_parts(chunks, "forward", 2, Chunks(0.0, 0.0), 1 / tile, costs)
    none = {phase: {} for phase in PHASES}
    return LayerCosts(dict.fromkeys(PHASES, chunks), none, 0, None, dict.fromkeys(PHASES, fused))


@pytest.mark.parametrize(
    ("what", "layer", "kind"),
    [
        # Links take longer: two chunks already hide the experts, and only starts are to be saved.
        ("link-bound, starts are cheap", layer_of(10, 4, 1e-6, 1e-6), None),
        ("link-bound, starts are dear", layer_of(10, 4, 3e-3, 1e-6), "dispatch-expert-combine"),
        ("link-bound, signals are dear, too", layer_of(10, 4, 3e-3, 9e-3), None),
        # Experts take longer: of chunks the first and the last are bare, of tiles as well, but these are smaller.
        ("compute-bound, starts are dear", layer_of(2, 20, 3e-4, 1e-6), "dispatch-expert-combine"),
        ("compute-bound, starts are cheap", layer_of(2, 20, 1e-6, 1e-6, tile=0.5), None),
        ("compute-bound, tiles are small", layer_of(2, 20, 1e-6, 1e-6, tile=0.001), "dispatch-expert-combine"),
        ("nothing costs anything", layer_of(2, 20, 0.0, 0.0, tile=1.0), None),
        # Shards: links inside the node take as long as experts, those between nodes are hidden behind both.
        ("shards", layer_of(3, 12, 5e-4, 1e-6, gather_ms=6), "all-gather-expert-reduce-scatter"),
    ],
)
def test_the_choice_flips_where_it_should(what, layer, kind):
    costs = StackCosts((layer,) * 2)
    for policy in CHOOSING:
        plan = POLICIES[policy].plan(costs)
        assert set(roads_of(plan).values()) == ({kind} if kind else set()), (policy, what)
        if kind:
            assert len(roads_of(plan)) == 4
            plain = replace(costs, layers=tuple(replace(one, fused={}) for one in costs.layers))
            assert makespan(plan, costs) < makespan(POLICIES[policy].plan(plain), plain)


def test_each_layer_and_pass_has_its_own_choice():
    dear, cheap = layer_of(10, 4, 3e-3, 1e-6), layer_of(10, 4, 1e-6, 1e-6)
    mixed = replace(dear, fused={"forward": dear.fused["forward"], "backward": {}})
    for policy in CHOOSING:
        plan = POLICIES[policy].plan(StackCosts((dear, cheap, mixed)))
        kind = "dispatch-expert-combine"
        assert roads_of(plan) == {("forward", 0): kind, ("backward", 0): kind, ("forward", 2): kind}
        assert plan.degrees["forward", 0] == 1 < plan.degrees["forward", 1]


def test_with_shards_it_goes_in_chunks():
    """Between nodes rows travel beside the fused operations of other chunks."""
    layer = layer_of(6, 12, 1e-4, 1e-6, gather_ms=6)
    plan = POLICIES["fused"].plan(StackCosts((layer,)))
    assert set(roads_of(plan).values()) == {"all-gather-expert-reduce-scatter"}
    assert plan.degrees["forward", 0] > 1
    assert [task.kind for task in plan.intra] == [task.kind for task in plan.compute]


@pytest.mark.parametrize("contention", [1.0, 0.6])
def test_a_pass_is_the_best_of_all_roads_orders_and_degrees(contention):
    rng = random.Random()
    for _ in range(12):
        costs = with_fused(rng, random_costs(rng, contention))
        layer = replace(costs.layers[0], gradient_bytes=0, dense_s={phase: {} for phase in PHASES})
        costs = StackCosts((layer,), contention=contention)
        least = 0.0
        for phase in PHASES:
            every = [
                pass_s(road, degree, order=order, contention=contention)
                for road, order, degree in product(layer.roads(phase), ORDERS, range(1, 7))
            ]
            least += min(every)
            for road, order in product(layer.roads(phase), ORDERS):
                choice = choose_degree(road, order=order, contention=contention, limit=6)
                of = [pass_s(road, degree, order=order, contention=contention) for degree in range(1, 7)]
                assert choice.seconds == pytest.approx(min(of), rel=1e-9)
        assert makespan(POLICIES["fused"].plan(costs, 6), costs) == pytest.approx(least, rel=1e-9)


def test_the_seconds_of_a_road_are_those_of_its_plan():
    rng = random.Random()
    for _ in range(30):
        costs = with_fused(rng, random_costs(rng))
        road = rng.choice(costs.layers[0].roads("backward"))
        order, degree, gar = rng.choice(ORDERS), rng.randint(1, 6), rng.choice([0.0, 1e-3])
        pieces = [Task("gradient-all-reduce", 0, 1, "backward")] if gar else []
        plan = Plan.of(order(tuple(road), degree, "backward", 0, pieces))
        given = {task: gar if task in pieces else road[task.kind].seconds(degree) for task in plan}
        overlaps = {task: road[task.kind].overlap(degree) for task in plan.fused}
        expected = makespan(plan, Durations(given, costs.contention, overlaps))
        assert pass_s(road, degree, gar, order=order, contention=costs.contention) == pytest.approx(expected, rel=1e-9)


def test_of_plans_that_are_equally_short_collectives_win():
    chunks = {"dispatch": Chunks(0.0, 0.5), "expert": Chunks(0.0, 1.0), "combine": Chunks(0.0, 0.5)}
    plain = Plan.parse("compute: E0 E1 E2 E3\ninter: D0 D1 D2 D3 C0 C1 C2 C3")
    fused = Plan.parse("compute: DE0\ninter: DE0 C0")
    layer = LayerCosts(dict.fromkeys(PHASES, chunks), {phase: {} for phase in PHASES})
    for longer, best in ((0.0, plain), (0.01, plain), (-0.01, fused)):
        alone = makespan(plain, StackCosts((layer,))) - 0.5
        part = TiledChunks(alone + longer, 0.0, ({"inter": 0.0, "compute": 0.0},), 0.0)
        costs = StackCosts((replace(layer, fused={"forward": {"dispatch-expert": part}}),))
        assert best_of([fused, plain], costs) == best_of([plain, fused], costs) == best
    assert len(fused) < len(plain)  # so it is not their number that decides


@pytest.mark.parametrize("testbed", TESTBEDS)
@pytest.mark.parametrize("contended", [False, True])
def test_a_sample_of_the_published_grid(testbed, contended):
    """Joint is at most any other, and at most what it was; where fused operations are not known there are none."""
    model = TESTBEDS[testbed].costs
    model = replace(model, contention=model.contention if contended else 1.0)
    cases = random.Random().sample(list(workloads(TESTBEDS[testbed])), 4)
    chosen = 0
    for workload in cases:
        parts, sizes = (*workload.volumes(), *FUSED), [workload.gradient_bytes()] * 2
        costs, plain = (workload.step_costs(one, sizes, parts) for one in (replace(model, fused=QUICK), model))
        plans = {name: policy.plan(costs) for name, policy in POLICIES.items()}
        seconds = {name: makespan(plan, costs) for name, plan in plans.items()}
        assert seconds["joint"] == min(seconds.values())
        before = {name: policy.plan(plain) for name, policy in POLICIES.items()}
        assert seconds["joint"] <= makespan(before["joint"], plain) * (1 + 1e-9)
        assert not any(plan.fused for plan in before.values())
        chosen += bool(plans["joint"].fused)
    assert chosen


# Whole models.


def whole_costs(alpha_scale: float, fused: FusedCosts | None = QUICK, layers: int = 2) -> StackCosts:
    model = TESTBEDS["B"].costs
    lines = {name: replace(line, alpha_s=line.alpha_s * alpha_scale) for name, line in model.lines.items()}
    model = replace(model, lines={**lines, "gemm": model.lines["gemm"]}, fused=fused)
    work = Workload(4, 512, 2048, 4096, experts=8, ep=8, esp=4)
    return work.step_costs(model, [2**20] * layers, (*work.volumes(), *FUSED), whole=True)


def test_whole_models_choose_as_well():
    dear, cheap = whole_costs(40.0), whole_costs(0.1)
    plan = WHOLE_POLICIES["joint"](dear, 4)
    assert plan.fused and not WHOLE_POLICIES["joint"](cheap, 4).fused
    without = whole_costs(40.0, None)
    model = WholeModel(dear, 4)
    seconds = {name: makespan(model.plan(name), dear) for name in (*WHOLE_POLICIES, *POLICIES)}
    assert seconds["joint"] == makespan(plan, dear) == min(seconds.values())
    assert seconds["joint"] < makespan(WHOLE_POLICIES["joint"](without, 4), without)
    assert bound_s(dear) <= seconds["joint"]
    for name in ("flowmoe", "lancet"):
        assert model.plan(name) == WHOLE_POLICIES[name](without, 4)
    assert Plan.parse(str(plan)) == plan


def test_micro_batches_with_fused_operations():
    """What a split step costs is what its plan costs; each pass has the road that the split says."""
    rng = random.Random()
    costs = replace(whole_costs(1.0, layers=3), contention=0.6, loss_s=1e-3, optimizer_s=1e-3)
    kinds = [None, *costs.layers[0].fused["forward"]]
    for _ in range(12):
        split = Split(rng.randint(1, 4), rng.randint(1, 4), rng.choice([None, 2**18]), rng.random() < 0.5)
        expected = {}
        for layer, phase in product(range(3), PHASES):
            expected[phase, layer] = rng.choice(kinds)
            split = split.with_fused([layer], phase, expected[phase, layer])
        schedule = micro_schedule(costs, split)
        plan = schedule.plan()
        assert roads_of(plan) == {place: kind for place, kind in expected.items() if kind}
        check_complete(plan, costs)
        for contention in (1.0, 0.6):
            here = replace(costs, contention=contention)
            assert schedule.makespan_s(contention) == pytest.approx(makespan(plan, here), rel=1e-12)
            assert split_bound_s(here, split) <= makespan(plan, here) * (1 + 1e-12)
        assert any(task.kind == "weight-gradient" for task in plan) == split.weights


def test_a_split_s_choice_can_be_taken_back():
    split = Split(2, 2).with_fused([0, 1], "forward", "dispatch-expert").with_fused([1], "backward", "expert-combine")
    assert split.fused == (
        *((0, "forward", "dispatch-expert"), (1, "backward", "expert-combine"), (1, "forward", "dispatch-expert")),
    )
    assert split.with_fused([1], "forward", "expert-combine").fused[-1] == (1, "forward", "expert-combine")
    assert split.with_fused([0, 1], "forward", None).with_fused([1], "backward", None) == Split(2, 2)


def test_progress_is_told_to_the_end():
    told: list[tuple[int, int]] = []
    WholeModel(whole_costs(40.0), 4, None, lambda *of: told.append(of)).plan("joint")
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len({total for _, total in told}) == 1 and told[-1][0] == told[-1][1]


def test_lines_that_fused_operations_need_are_those_of_collectives():
    """A link's bytes are as fast; only their start is another."""
    model = replace(TESTBEDS["A"].costs, fused=QUICK)
    slow = replace(model, lines=model.lines | {"all-gather/esp": Line(9.0, model.lines["all-gather/esp"].beta_s)})
    work = Workload(1, 512, 1024, 2048, experts=6, ep=6, esp=8)
    fast_layer, slow_layer = (work.layer_costs(one) for one in (model, slow))
    assert fast_layer.fused == slow_layer.fused and fast_layer.chunks != slow_layer.chunks
