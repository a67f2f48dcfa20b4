"""Fused operations in plans: where they stand, what they wait for, and what is said of plans that cannot be."""

from __future__ import annotations

import itertools
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.layer import beside, half, pass_by_degree, pass_of
from fusedmoe.schedule.orders import alternating, one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import FUSED, LINKS, PIPELINE, Task, resources_of, road_with, weight_gradient
from fusedmoe.schedule.text import name
from fusedmoe.schedule.timeline import SYMBOLS
from tests.schedule.plans import random_costs, random_plan, with_fused

SHARDED = """compute: AGE0 AGE1
intra: AGE0 AGE1 RS0 RS1
inter: D0 D1 AR0(4096) C0 C1"""


def needs(plan: Plan) -> dict[str, set[str]]:
    return {name(task): {name(one) for one in before} for task, before in plan.dependencies.items()}


def test_the_kinds_are_all_runs_of_a_road_with_the_expert():
    expected = set()
    for road in (("dispatch", "expert", "combine"), PIPELINE):
        for first, last in itertools.combinations_with_replacement(range(len(road)), 2):
            run = road[first : last + 1]
            if "expert" in run and len(run) > 1:
                expected.add(run)
    assert set(FUSED.values()) == expected and len(FUSED) == 11
    for kind, parts in FUSED.items():
        assert kind == "-".join(parts) and SYMBOLS[kind] == "".join(SYMBOLS[part] for part in parts)
        assert set(resources_of(kind)) == {"compute", *(LINKS[part] for part in parts if part != "expert")}
        assert resources_of(kind)[0] == "compute" and weight_gradient(kind) == "weight-gradient"
    assert resources_of("dispatch") == ("inter",) and resources_of("attention") == ("compute",)


@pytest.mark.parametrize(
    ("kind", "parts", "road"),
    [
        ("dispatch-expert", PIPELINE[::2], ("dispatch-expert", "combine")),
        ("dispatch-expert", PIPELINE, None),  # the all-gather is between them
        ("dispatch-all-gather-expert", PIPELINE, ("dispatch-all-gather-expert", "reduce-scatter", "combine")),
        ("dispatch-all-gather-expert", PIPELINE[::2], None),
        ("all-gather-expert-reduce-scatter", PIPELINE[1:4], ("all-gather-expert-reduce-scatter",)),
        ("expert-reduce-scatter", PIPELINE, ("dispatch", "all-gather", "expert-reduce-scatter", "combine")),
    ],
)
def test_roads(kind, parts, road):
    assert road_with(kind, parts) == road


def test_a_plan_reads_as_its_text_and_writes_it_again():
    plan = Plan.parse(SHARDED)
    assert str(plan) == SHARDED and plan.fingerprint == "5d0e13e4beefaf30"
    assert len(plan) == len(list(plan)) == 9 and len(plan.fused) == 2 and plan.degrees == {("forward", 0): 2}
    assert plan.resources[Task("all-gather-expert", 1)] == ("compute", "intra")
    assert plan.intra[:2] == plan.compute == plan.fused
    single = Plan.parse("compute: AGE0\ninter: D0 AGE0 RS0 C0")  # one queue for both links
    assert single.resources[Task("all-gather-expert", 0)] == ("compute", "inter")


@pytest.mark.parametrize("order", [three_queues, alternating, one_queue])
def test_every_fused_kind_stands_where_its_parts_would(order):
    for kind, parts in FUSED.items():
        for layer in (PIPELINE, PIPELINE[::2]):
            road = road_with(kind, layer)
            if road is None:
                continue
            plan = Plan.of(order(road, 3, "backward", 2, [Task("gradient-all-reduce", 0, 3, "backward")]))
            assert Plan.parse(str(plan)) == plan and len(plan) == 3 * len(road) + 1
            unfused = order(layer, 3, "backward", 2)
            for resource in ("compute", "intra", "inter"):
                doing = {part: next(k for k in road if part in FUSED.get(k, (k,))) for part in layer}
                expected = dict.fromkeys(t._replace(kind=doing[t.kind]) for t in unfused[resource])
                if order is one_queue and resource == "intra" and len(resources_of(kind)) == 3:
                    expected = dict.fromkeys(plan.compute)  # its links are in use together
                assert [t for t in plan.on(resource) if t.layer == 2] == list(expected)
            alone = pass_of(plan, 2, "backward")
            assert {t.kind for t in alone} >= set(road) and alone.degrees == {("backward", 2): 3}
            if (parts[0], parts[-1]) == ("dispatch", "combine"):  # no middle for the gradients to be in
                assert beside(plan, 2) == plan.inter[-1:] and len(alone) == 3 * len(road)


def test_what_waits_for_what():
    plan = Plan.parse(
        """
        compute: f0.A f0.DE0 f0.DE1 f0.U f1.A f1.E0 .L b1.ERS0 b1.WG0 b1.A b0.DEC0 b0.A
        intra: b1.ERS0
        inter: f0.DE0 f0.DE1 f0.C0 f0.C1 f1.D0 f1.C0 b1.D0 b1.C0 b0.DEC0 b1.AR0
        """
    )
    found = needs(plan)
    assert found["f0.DE1"] == {"f0.A"} and found["f0.C1"] == {"f0.DE1"} and found["f0.U"] == {"f0.C0", "f0.C1"}
    assert found["f1.A"] == {"f0.U"} and found["b1.ERS0"] == {"b1.D0"} and found["b1.C0"] == {"b1.ERS0"}
    assert found["b1.WG0"] == {"b1.ERS0"}  # the gradients of its expert's weights
    assert found["b0.DEC0"] == {"b1.A"} and found["b0.A"] == {"b0.DEC0"} and found["b1.AR0"] == {"b1.A"}
    assert Plan.parse(str(plan)) == plan and Plan.parse(str(half(plan, "backward"))) == half(plan, "backward")


def test_micro_batches_go_through_it():
    found = needs(Plan.parse("compute: f0.A0 f0.A1 f0.DEC0 f0.DEC1 f1.A0 f1.A1\ninter: f0.DEC0 f0.DEC1"))
    assert found["f0.DEC1"] == {"f0.A1"} and found["f1.A1"] == {"f0.DEC1", "f1.A0"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("inter: DE0", ["f0.DE0 (dispatch-expert) is on inter, but computes as well", "put it on compute, too"]),
        ("compute: DE0", ["f0.DE0", "is on compute, but sends between nodes as well", "put it on inter, too"]),
        ("compute: AGE0", ["sends inside the node as well", "put it on intra, too"]),
        ("compute: DAGE0\ninter: DAGE0", ["f0.DAGE0", "is on compute and inter, but", "put it on intra, too"]),
        ("compute: DE0\nintra: DE0\ninter: DE0", ["f0.DE0", "intra and inter, but uses one link", "take one"]),
        ("compute: DE0\ninter: DE0 DE0", ["f0.DE0 is on inter twice", "take one"]),
        ("compute: DE0 DE0\ninter: DE0", ["f0.DE0 is on compute twice"]),
        (
            "compute: DE0 DE1\ninter: DE1 DE0",
            ["would never end", "stands behind f0.DE1 on inter", "stands behind f0.DE0 on compute", "move f0.DE"],
        ),
        (
            "compute: EC0 EC1\ninter: D0 EC0 EC1 D1",
            ["would never end", "f0.EC1 needs f0.D1", "f0.D1 stands behind f0.EC1 on inter", "move f0.D1 forward"],
        ),
        (
            "compute: ERSC0 AGE0\nintra: f1.AGE0",
            ["f0.ERSC0", "is on compute, but sends", "put it on intra, too"],
        ),
        ("compute: DE0 DE1\ninter: DE0 DE1 C0", ["f0.C1 is missing", "2 chunks"]),
        ("compute: DE0 DE2\ninter: DE0 DE2", ["f0.DE1 is missing", "number f0.DE2"]),
        (
            "compute: DE0 E0\ninter: DE0",
            ["f0.E0 (expert) is where f0.DE0 (dispatch-expert) goes from dispatch to expert", "take one"],
        ),
        ("compute: DE0\ninter: D0 DE0", ["f0.D0 (dispatch) is where f0.DE0"]),
        ("compute: DE0\nintra: AG0\ninter: DE0", ["f0.AG0 (all-gather) is where f0.DE0"]),
        ("compute: DE0 EC0\ninter: DE0 EC0", ["is where", "take one of them away"]),
        ("compute: DE0(12)\ninter: DE0(12)", ["f0.DE0 has a size"]),
        ("compute: ED0\ninter: ED0", ["line 1", "'ED0' is not a task"]),
    ],
)
def test_a_bad_plan_is_refused_with_the_task_and_the_cure(text, parts):
    with pytest.raises(ConfigError) as caught:
        Plan.parse(text)
    for part in parts:
        assert part in str(caught.value)


def test_one_road_in_each_layer_and_pass_but_any():
    """Chunks of one pass go the same way; other layers and passes may go other ways."""
    plan = Plan.parse("compute: f0.DE0 f1.E0 b1.EC0 b0.DEC0\ninter: f0.DE0 f0.C0 f1.D0 f1.C0 b1.D0 b1.EC0 b0.DEC0")
    assert len(plan.fused) == 3
    with pytest.raises(ConfigError, match=r"f0\.(E1 \(expert\)|D1 \(dispatch\)) is where f0\.DE0 .* one road"):
        Plan.parse("compute: DE0 E1\ninter: DE0 D1 C0 C1")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_any_plan_survives_its_text_and_a_pickle(seed):
    rng = random.Random(seed)
    plan = random_plan(rng, with_fused(rng, random_costs(rng)))
    for again in (Plan.parse(str(plan)), pickle.loads(pickle.dumps(plan))):
        assert again == plan and hash(again) == hash(plan)
        assert (again.fingerprint, str(again)) == (plan.fingerprint, str(plan))
        assert (again.sequence, again.before) == (plan.sequence, plan.before)
    place = {task: index for index, task in enumerate(plan.sequence)}
    assert len(place) == len(plan.sequence) == len(plan) == len(list(plan)) and set(place) == set(plan)
    for task, before in zip(plan.sequence, plan.before, strict=True):
        orders = [plan.on(resource) for resource in plan.resources[task]]
        earlier = {order[order.index(task) - 1] for order in orders if order[0] != task}
        assert {plan.sequence[one] for one in before} == set(plan.dependencies[task]) | earlier
        assert all(one < place[task] for one in before)


def test_any_swap_on_one_resource_deadlocks_or_gives_another_plan():
    rng = random.Random()
    refused = made = 0
    for _ in range(200):
        plan = random_plan(rng, with_fused(rng, random_costs(rng)))
        resource = rng.choice([one for one in ("compute", "intra", "inter") if len(plan.on(one)) > 1])
        order = list(plan.on(resource))
        one, two = rng.sample(range(len(order)), 2)
        order[one], order[two] = order[two], order[one]
        orders = {name: plan.on(name) for name in ("compute", "intra", "inter")} | {resource: order}
        try:
            other = Plan.of(orders, plan.after)
        except ConfigError as error:
            refused += 1
            assert "would never end" in str(error)
        else:
            made += 1
            assert other != plan and other.fingerprint != plan.fingerprint
    assert refused and made


def test_plans_by_degree_have_the_operation_that_does_most():
    kinds = (*PIPELINE, "all-gather-expert", "all-gather-expert-reduce-scatter")
    plan = pass_by_degree("fused", kinds, 2, "forward")
    assert {task.kind for task in plan} == {"dispatch", "all-gather-expert-reduce-scatter", "combine"}
    for policy in ("fsmoe", "tutel", "joint"):
        assert not pass_by_degree(policy, kinds, 2, "forward").fused
    assert pass_by_degree("fused", PIPELINE, 2, "forward") == pass_by_degree("fsmoe", PIPELINE, 2, "forward")
