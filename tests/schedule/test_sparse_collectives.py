"""Sparse collectives in plans: what communication hides, and where the tasks are inserted."""

from __future__ import annotations

import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.placement.hecate import overlap_degree
from fusedmoe.schedule.cost import Contention, Durations, Line
from fusedmoe.schedule.draw import figure
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.plan import Plan, name
from fusedmoe.schedule.policies import POLICIES, layer_policies
from fusedmoe.schedule.policies.sparse_collectives import add_sparse, hidden_s, idle_after, idle_before, with_sparse
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.step_costs import LayerCosts, StageTime, StepCosts
from fusedmoe.schedule.workload import Workload


def by_hand(gradient_bytes: int = 0) -> StepCosts:
    """Three layers, in seconds: attention 4 and 8, dispatch and combine 1, experts 2 and 4. All-reduces: 1 for 1000
    bytes."""

    def chunks(expert_s: float) -> dict[str, StageTime]:
        return {"dispatch": StageTime(0.0, 1.0), "expert": StageTime(0.0, expert_s), "combine": StageTime(0.0, 1.0)}

    dense = {"forward": {"attention": 4.0}, "backward": {"attention": 8.0}}
    layer = LayerCosts({"forward": chunks(2.0), "backward": chunks(4.0)}, dense, gradient_bytes)
    return StepCosts((layer,) * 3, Line(0.0, 1e-3), optimizer_s=1.0)


def lengthened(plan: Plan, costs: StepCosts, seconds_L, again: bool) -> float:
    return makespan(*with_sparse(plan, costs, seconds_L, again=again)) - makespan(plan, costs)


def test_idle_by_hand():
    costs = by_hand()
    timeline = simulate(POLICIES["sequential"].plan(costs), costs)
    assert [idle_before(timeline, layer, "forward") for layer in range(3)] == [4, 4, 4], "attention"
    assert [idle_before(timeline, layer, "backward") for layer in range(3)] == [8, 8, 0]
    assert idle_after(timeline) == 8, "the first layer's attention, up to the optimizer"
    assert hidden_s(timeline, 3, again=False) == hidden_s(timeline, 3, again=True) == (4, 4, 4)


def test_buckets_of_gradients_take_their_part():
    costs = by_hand(gradient_bytes=5000)
    plan = POLICIES["tutel_improved"].plan(costs)  # each layer's 5 s beside the attention before it
    timeline = simulate(plan, costs)
    assert [idle_before(timeline, layer, "backward") for layer in range(3)] == [3, 8, 0]
    assert idle_after(timeline) == 3, "that of layer 1, and layer 0's own follows its attention"
    assert hidden_s(timeline, 3, again=True) == (1.5, 1.5, 4)
    assert hidden_s(timeline, 3, again=False) == (3, 3, 4)


def test_what_fits_is_hidden_and_what_does_not_is_not():
    costs, expert_s = by_hand(gradient_bytes=3000), 0.4  # of 2 bytes at 5 in a second
    plan = POLICIES["tutel_improved"].plan(costs)
    timeline = simulate(plan, costs)
    for again in (False, True):
        hidden_L = hidden_s(timeline, 3, again=again)
        t = overlap_degree(min(hidden_L), 2, 5.0)
        assert t == (10 if not again else 6), "4 s of attention forward; half of the 5 s that are left backward"
        assert lengthened(plan, costs, [t * expert_s] * 3, again) == pytest.approx(0)
        assert lengthened(plan, costs, [(t + 2) * expert_s] * 3, again) > expert_s
    # One layer alone: 12 experts are 4.8 s, 0.8 more than the attention before it.
    for layer in range(3):
        seconds_L = [12 * expert_s * (layer == one) for one in range(3)]
        assert lengthened(plan, costs, seconds_L, False) == pytest.approx(0.8)


def test_where_they_stand():
    costs = by_hand(gradient_bytes=1000)
    plan, _ = with_sparse(POLICIES["tutel_improved"].plan(costs, 1), costs, (1.0, 0.0, 2.0), again=True)
    words = [name(task) for task in plan.inter]
    assert words[:4] == ["f0.SAG", "f0.D0", "f0.C0", "f1.D0"] and words[4:7] == ["f1.C0", "f2.SAG", "f2.D0"]
    assert words[8:12] == ["b2.D0", "b2.C0", "b2.SRS", "b1.D0"], "the last layer keeps its experts, layer 1 has none"
    first = words.index("b0.D0")
    assert words[first - 3 : first] == ["b1.C0", "b0.SAG", "b2.AR0"], "gradient buckets go after"
    assert words[first + 1 : first + 3] == ["b0.C0", "b0.SRS"]
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("policy", [*layer_policies()])
@pytest.mark.parametrize("testbed", ["A", "B"])
def test_as_predicted_on_a_cluster(policy, testbed):
    """Four layers as FSMoE's, with gradient buckets: what is said to be hidden is, what is more shows in full."""
    bed = TESTBEDS[testbed]
    shape = Workload(4, 1024, 2048, 4096, experts=bed.nodes, ep=bed.nodes, esp=bed.gpus)
    layer = shape.layer_costs(bed.costs)
    costs = StepCosts((layer,) * 4, bed.costs.line("all-reduce/dp"), bed.costs.contention, optimizer_s=1e-3)
    plan = POLICIES[policy].plan(costs.by_layer())
    timeline, step_s = simulate(plan, costs), makespan(plan, costs)
    for again in (False, True):
        hidden_L = hidden_s(timeline, 4, again=again)
        # Policies that put gradients where the link is idle leave nothing of it on the slower testbed.
        assert min(hidden_L[:3]) > 1e-6 or (testbed == "A" and policy not in ("sequential", "tutel", "pipemoe"))
        assert lengthened(plan, costs, hidden_L, again) < 1e-9 * step_s
    for one in range(4):
        idle_s = idle_before(timeline, one, "forward")
        back_s = idle_before(timeline, one - 1, "backward") if one else idle_after(timeline)
        more_s = 0.3 * max(idle_s, back_s)
        seconds = max(idle_s, back_s) + more_s
        found = lengthened(plan, costs, [seconds * (layer == one) for layer in range(4)], False)
        assert found == pytest.approx((seconds - idle_s) + (seconds - back_s), rel=1e-6)


def test_sums_wait_for_weight_gradients_apart():
    plan = Plan.parse(
        """
        compute: f.A f.E0 b.E0 b.E1 b.WG0 b.WG1 b.A .Opt
        inter: f.D0 f.C0 b.D0 b.D1 b.C0 b.C1
        """.replace(" f.", " f0.").replace(" b.", " b0.")
    )
    durations = dict.fromkeys(plan, 1.0)
    with_them, costs = with_sparse(plan, Durations(durations), (1.0,), again=True)
    (reduce,) = [task for task in with_them.inter if task.kind == "sparse-reduce-scatter"]
    assert [name(task) for task in with_them.dependencies[reduce]] == ["b0.WG0", "b0.WG1"]
    (optimizer,) = [task for task in with_them.compute if task.kind == "optimizer"]
    assert reduce in with_them.dependencies[optimizer] and costs.given[reduce] == 1.0


def test_late_copies_by_hand():
    """Rows in two chunks, 1 s each on the link, experts 3 s each; late copies take 4 s, of which chunk 0 hides 2 s."""
    plan = Plan.parse("compute: E0 E1\ninter: D0 D1 C0 C1")
    durations = {task: 3.0 if task.kind == "expert" else 1.0 for task in plan}
    for first, copies_s, end_s in ((0, 4.0, 13), (1, 4.0, 10), (2, 4.0, 8), (1, 2.0, 8), (1, 1.0, 8)):
        late = add_sparse(plan, [0], late={0: first})
        assert [name(task) for task in late.inter] == ["f0.D0", "f0.D1", "f0.SAG1", "f0.C0", "f0.C1"]
        assert Plan.parse(str(late)) == late
        (copies,) = late.kinds - plan.kinds
        costs = Durations(durations | {task: copies_s for task in late if task.kind == copies})
        assert makespan(late, costs) == end_s
    # Where the link and the processor slow each other down, copies beside the experts cost more.
    slow = Durations(costs.given, Contention(compute_beside_inter=0.5))
    assert makespan(late, slow) > makespan(late, costs)
    drawn = figure(simulate(late, Durations(durations | {task: 4.0 for task in late if task.kind == copies})))
    assert any(text.get_text() == "sparse-all-gather 1" for axes in drawn.axes for text in axes.texts), (
        "a picture names them"
    )


@pytest.mark.parametrize("policy", [*layer_policies()])
def test_late_copies_in_any_order(policy):
    """No rank waits in a circle, wherever its first late rows are; the fewer chunks need copies, the sooner it ends."""
    bed = TESTBEDS["A"]
    shape = Workload(4, 1024, 2048, 4096, experts=bed.nodes, ep=bed.nodes, esp=bed.gpus)
    costs = StepCosts((shape.layer_costs(bed.costs),) * 2, contention=bed.costs.contention)
    plan = POLICIES[policy].plan(costs.by_layer())
    alone_s, degree = makespan(plan, costs), plan.degrees["forward", 1]
    for seconds in (1e-3, 0.1):
        steps = [
            makespan(*with_sparse(plan, costs, (0.0, seconds), again=False, late={1: first}))
            for first in range(degree + 1)
        ]
        assert all(one >= other - 1e-12 for one, other in zip(steps, steps[1:], strict=False))
        assert alone_s <= steps[-1] <= alone_s + 2 * seconds + 1e-12, "there and, gradients, back"
    orders = {first: add_sparse(plan, [1], late={1: first}).orders for first in range(degree + 1)}
    assert all(one == orders[0] for one in orders.values()), "what ranks send is in one order"


def test_what_is_refused():
    alone = Plan.parse("compute: E0 E1")
    with pytest.raises(ConfigError, match="layer 0 has no dispatch"):
        with_sparse(alone, by_hand(), (1.0,), again=False)
    costs = by_hand()
    timeline = simulate(POLICIES["sequential"].plan(costs), costs)
    with pytest.raises(ConfigError, match="layer 3 has no dispatch"):
        idle_before(timeline, 3, "forward")
