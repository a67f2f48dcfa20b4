"""Sparse collectives in plans: the communication that they hide, and the positions of the tasks."""

from __future__ import annotations

import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.placement.hecate import overlap_degree
from fusedmoe.schedule.cost import Line, TaskDurations
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.plan import Plan, task_name
from fusedmoe.schedule.policies import POLICIES, layer_policies
from fusedmoe.schedule.policies.sparse_collectives import hidden_s, idle_after_s, idle_before_s, with_sparse_collectives
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.step_costs import LayerCosts, StageTime, StepCosts
from fusedmoe.schedule.workload import Workload


def example_costs(gradient_bytes: int = 0) -> StepCosts:
    """Three layers, in seconds: attention 4 and 8, dispatch and combine 1, experts 2 and 4. All-reduces: 1 for 1000
    bytes.
    """

    def chunks(expert_s: float) -> dict[str, StageTime]:
        return {"dispatch": StageTime(0.0, 1.0), "expert": StageTime(0.0, expert_s), "combine": StageTime(0.0, 1.0)}

    dense = {"forward": {"attention": 4.0}, "backward": {"attention": 8.0}}
    layer = LayerCosts({"forward": chunks(2.0), "backward": chunks(4.0)}, dense, gradient_bytes)
    return StepCosts((layer,) * 3, Line(0.0, 1e-3), optimizer_s=1.0)


def added_step_s(plan: Plan, costs: StepCosts, seconds_L, again: bool) -> float:
    return makespan(*with_sparse_collectives(plan, costs, seconds_L, again=again)) - makespan(plan, costs)


def test_idle_time_of_worked_example():
    costs = example_costs()
    timeline = simulate(POLICIES["sequential"].plan(costs), costs)
    assert [idle_before_s(timeline, layer, "forward") for layer in range(3)] == [4, 4, 4], "attention"
    assert [idle_before_s(timeline, layer, "backward") for layer in range(3)] == [8, 8, 0]
    assert idle_after_s(timeline) == 8, "the first layer's attention, up to the optimizer"
    assert hidden_s(timeline, 3, again=False) == hidden_s(timeline, 3, again=True) == (4, 4, 4)


def test_gradient_buckets_reduce_hidden_time():
    costs = example_costs(gradient_bytes=5000)
    plan = POLICIES["tutel_improved"].plan(costs)  # each layer's 5 s overlap the attention before it
    timeline = simulate(plan, costs)
    assert [idle_before_s(timeline, layer, "backward") for layer in range(3)] == [3, 8, 0]
    assert idle_after_s(timeline) == 3, "that of layer 1, and layer 0's own follows its attention"
    assert hidden_s(timeline, 3, again=True) == (1.5, 1.5, 4)
    assert hidden_s(timeline, 3, again=False) == (3, 3, 4)


def test_only_hidden_time_is_free():
    costs, expert_s = example_costs(gradient_bytes=3000), 0.4  # of 2 bytes at 5 in a second
    plan = POLICIES["tutel_improved"].plan(costs)
    timeline = simulate(plan, costs)
    for again in (False, True):
        hidden_L = hidden_s(timeline, 3, again=again)
        t = overlap_degree(min(hidden_L), 2, 5.0)
        assert t == (10 if not again else 6), "4 s of attention forward; half of the 5 s that are left backward"
        assert added_step_s(plan, costs, [t * expert_s] * 3, again) == pytest.approx(0)
        assert added_step_s(plan, costs, [(t + 2) * expert_s] * 3, again) > expert_s
    # One layer alone: 12 experts are 4.8 s, 0.8 more than the attention before it.
    for layer in range(3):
        seconds_L = [12 * expert_s * (layer == one) for one in range(3)]
        assert added_step_s(plan, costs, seconds_L, False) == pytest.approx(0.8)


def test_sparse_tasks_are_inserted_around_dispatch():
    costs = example_costs(gradient_bytes=1000)
    plan, _ = with_sparse_collectives(POLICIES["tutel_improved"].plan(costs, 1), costs, (1.0, 0.0, 2.0), again=True)
    words = [task_name(task) for task in plan.inter]
    assert words[:4] == ["f0.SAG", "f0.D0", "f0.C0", "f1.D0"] and words[4:7] == ["f1.C0", "f2.SAG", "f2.D0"]
    assert words[8:12] == ["b2.D0", "b2.C0", "b2.SRS", "b1.D0"], "the last layer keeps its experts, layer 1 has none"
    first = words.index("b0.D0")
    assert words[first - 3 : first] == ["b1.C0", "b0.SAG", "b2.AR0"], "gradient buckets go after"
    assert words[first + 1 : first + 3] == ["b0.C0", "b0.SRS"]
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("policy", [*layer_policies()])
@pytest.mark.parametrize("testbed", ["A", "B"])
def test_predicted_hidden_time_is_hidden_on_testbed(policy, testbed):
    """Four layers as FSMoE's, with gradient buckets: predicted hidden time is hidden, and the excess shows in full."""
    bed = TESTBEDS[testbed]
    shape = Workload(4, 1024, 2048, 4096, experts=bed.nodes, ep=bed.nodes, esp=bed.gpus)
    layer = shape.layer_costs(bed.costs)
    costs = StepCosts((layer,) * 4, bed.costs.line("all-reduce/dp"), bed.costs.contention, optimizer_s=1e-3)
    plan = POLICIES[policy].plan(costs.by_layer())
    timeline, step_s = simulate(plan, costs), makespan(plan, costs)
    for again in (False, True):
        hidden_L = hidden_s(timeline, 4, again=again)
        # Policies that put gradients on idle links leave no idle time on the slower testbed.
        assert min(hidden_L[:3]) > 1e-6 or (testbed == "A" and policy not in ("sequential", "tutel", "pipemoe"))
        assert added_step_s(plan, costs, hidden_L, again) < 1e-9 * step_s
    for one in range(4):
        idle_s = idle_before_s(timeline, one, "forward")
        back_s = idle_before_s(timeline, one - 1, "backward") if one else idle_after_s(timeline)
        more_s = 0.3 * max(idle_s, back_s)
        seconds = max(idle_s, back_s) + more_s
        found = added_step_s(plan, costs, [seconds * (layer == one) for layer in range(4)], False)
        assert found == pytest.approx((seconds - idle_s) + (seconds - back_s), rel=1e-6)


def test_sparse_reduce_scatter_depends_on_weight_gradients():
    plan = Plan.parse(
        """
        compute: f.A f.E0 b.E0 b.E1 b.WG0 b.WG1 b.A .Opt
        inter: f.D0 f.C0 b.D0 b.D1 b.C0 b.C1
        """.replace(" f.", " f0.").replace(" b.", " b0.")
    )
    durations = dict.fromkeys(plan, 1.0)
    with_them, costs = with_sparse_collectives(plan, TaskDurations(durations), (1.0,), again=True)
    (reduce,) = [task for task in with_them.inter if task.kind == "sparse-reduce-scatter"]
    assert [task_name(task) for task in with_them.dependencies[reduce]] == ["b0.WG0", "b0.WG1"]
    (optimizer,) = [task for task in with_them.compute if task.kind == "optimizer"]
    assert reduce in with_them.dependencies[optimizer] and costs.durations_s[reduce] == 1.0


def test_layers_without_dispatch_are_rejected():
    alone = Plan.parse("compute: E0 E1")
    with pytest.raises(ConfigError, match="layer 0 has no dispatch"):
        with_sparse_collectives(alone, example_costs(), (1.0,), again=False)
    costs = example_costs()
    timeline = simulate(POLICIES["sequential"].plan(costs), costs)
    with pytest.raises(ConfigError, match="layer 3 has no dispatch"):
        idle_before_s(timeline, 3, "forward")
