"""Every policy makes a complete plan, none beats the bound, and each follows its paper."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusedmoe.schedule.bound import bound_s
from fusedmoe.schedule.cost import NO_CONTENTION, Contention, Line
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.plan import Plan, task_name
from fusedmoe.schedule.policies import LINA_BYTES, POLICIES, TUTEL_DEGREES, layer_policies
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.step_costs import LayerCosts, StageTime, StepCosts, gradient_ranges
from fusedmoe.schedule.task import Task
from fusedmoe.schedule.workload import Workload
from tests.schedule.plans import random_costs, random_plan

SEEDS = st.integers(0, 2**32)
FEW = settings(max_examples=8, deadline=None)


def check_complete(plan: Plan, costs: StepCosts) -> None:
    """Every part of every layer is scheduled in all its chunks, and every byte of the gradient is reduced once."""
    expected = set()
    for index, layer in enumerate(costs.layers):
        for phase in ("forward", "backward"):
            degree = plan.degrees[phase, index]
            for kind in layer.chunks[phase]:
                expected |= {Task(kind, chunk, index, phase) for chunk in range(degree)}
            expected |= {Task(kind, None, index, phase) for kind in layer.dense_s[phase]}
    if costs.loss_s is not None:
        expected.add(Task("loss", None, None, None))
    if costs.optimizer_s is not None:
        expected.add(Task("optimizer", None, None, None))
    found = [task for task in plan if task.kind != "gradient-all-reduce"]
    assert len(found) == len(expected) and set(found) == expected
    ranges = list(gradient_ranges(plan, costs.gradient_bytes).values())
    assert [part.start for part in ranges] == [0, *(part.stop for part in ranges)][: len(ranges)]
    assert sum(map(len, ranges)) == sum(costs.gradient_bytes)


@pytest.mark.parametrize("policy", layer_policies())
@FEW
@given(SEEDS)
def test_policy_plan_is_complete_and_deterministic(policy, seed):
    costs = random_costs(random.Random(seed))
    plan = POLICIES[policy].plan(costs)
    check_complete(plan, costs)
    again = POLICIES[policy].plan(random_costs(random.Random(seed)))
    assert again == plan and again.fingerprint == plan.fingerprint
    assert Plan.parse(str(plan)) == plan
    assert max(POLICIES[policy].plan(costs, 3).degrees.values()) <= 3


@FEW
@given(SEEDS)
@example(2760)  # two plans whose times differ by rounding
def test_joint_is_fastest_and_bound_holds(seed):
    rng = random.Random(seed)
    costs = random_costs(rng)
    seconds = {name: makespan(POLICIES[name].plan(costs), costs) for name in layer_policies()}
    assert seconds["joint"] <= min(seconds.values()) * (1 + ROUNDING), "of plans as fast to rounding it takes any"
    bound = bound_s(costs)
    assert bound <= seconds["joint"] * (1 + 1e-9)
    for _ in range(5):
        assert bound <= makespan(random_plan(rng, costs), costs) * (1 + 1e-9)


def test_expert_bound_step_reaches_bound():
    """Free parts and long experts in one chunk: the step takes exactly the experts' time under every policy."""
    rng = random.Random(1)
    costs = random_costs(rng, NO_CONTENTION)
    chunks = {"expert": costs.layers[0].chunks["forward"]["expert"]}
    layers = tuple(type(one)({"forward": chunks, "backward": chunks}, one.dense_s) for one in costs.layers)
    costs = StepCosts(layers, costs.all_reduce)
    for policy in layer_policies():
        assert makespan(POLICIES[policy].plan(costs, 1), costs) == pytest.approx(bound_s(costs, 1), rel=1e-9)


def costs_of_testbed_b(layers: int = 3, share: float = 1.0) -> StepCosts:
    model = TESTBEDS["B"].costs
    layer = Workload(4, 512, 2048, 8192, experts=8, ep=8, esp=4).layer_costs(model)
    return StepCosts((layer,) * layers, model.line("all-reduce/dp"), Contention.between_links(share)).by_layer()


def expert_bound_costs(layers: int = 3) -> StepCosts:
    """Experts take longer than all communication, above all backward: they hide 10 MB of gradients (10 ms)."""
    links = {"dispatch": 4, "all-gather": 2, "reduce-scatter": 2, "combine": 4}
    alpha_s = 3e-4
    chunks = {
        phase: {kind: StageTime(alpha_s, ms * 1e-3) for kind, ms in ({"expert": experts} | links).items()}
        for phase, experts in (("forward", 12), ("backward", 60))
    }
    dense = {"forward": {"attention": 1e-3}, "backward": {"attention": 2e-3}}
    return StepCosts((LayerCosts(chunks, dense, 10**7),) * layers, Line(1e-4, 1e-9))


def with_rechunk_time(costs: StepCosts, seconds: float) -> StepCosts:
    return replace(costs, layers=tuple(replace(layer, rechunk_s=seconds) for layer in costs.layers))


def test_different_degrees_add_rechunk_time():
    """The experts' backward pass includes the copy if a layer's two degrees differ, and no other task does."""
    costs = random_costs(random.Random(3), NO_CONTENTION)
    with_copies = with_rechunk_time(costs, 3e-3)
    for policy in ("fsmoe", "tutel"):
        plan = POLICIES[policy].plan(costs)
        plain, found = costs.seconds(plan), with_copies.seconds(plan)
        for layer in range(len(costs.layers)):
            differ = plan.degrees["forward", layer] != plan.degrees["backward", layer]
            more = sum(found[task] - plain[task] for task in plan if task.layer == layer)
            assert more == pytest.approx(3e-3 * differ, abs=1e-12)
            chunks = {task for task in plan if task[:1] + task[2:4] == ("expert", layer, "backward")}
            assert {task for task in plan if found[task] != plain[task] and task.layer == layer} <= chunks


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(SEEDS)
def test_policies_weigh_rechunk_time(seed):
    rng = random.Random(seed)
    costs = random_costs(rng)
    copied = with_rechunk_time(costs, rng.choice([1e-9, 1e-4, 1e-3, 100.0]))
    for policy in ("fsmoe", "fsmoe_no_iio", "joint"):
        plan, free = (POLICIES[policy].plan(of) for of in (copied, costs))
        # At most by the cost of ignoring the copies.
        assert makespan(plan, copied) <= makespan(free, copied) * (1 + ROUNDING)
        if copied.layers[0].rechunk_s == 100.0:  # longer than the sum of all other tasks
            layers = range(len(costs.layers))
            assert all(plan.degrees["forward", layer] == plan.degrees["backward", layer] for layer in layers)


def test_sequential_time_is_sum_of_tasks():
    costs = costs_of_testbed_b()
    plan = POLICIES["sequential"].plan(costs)
    assert set(plan.degrees.values()) == {1}
    assert makespan(plan, costs) == pytest.approx(sum(costs.seconds(plan).values()), rel=1e-12)


@pytest.mark.parametrize("policy", ["sequential", "tutel", "pipemoe"])
def test_baselines_reduce_gradients_after_backward(policy):
    costs = costs_of_testbed_b()
    plan = POLICIES[policy].plan(costs)
    reduces = [task for task in plan.inter if task.kind == "gradient-all-reduce"]
    assert [task.layer for task in reduces] == [2, 1, 0] and not plan.intra
    assert all(plan.dependencies[task] == (plan.compute[-1],) for task in reduces)
    for layer in range(3):
        assert plan.degrees["forward", layer] == plan.degrees["backward", layer]


def test_tutel_is_limited_to_its_degrees():
    for costs, can_rechunk in ((costs_of_testbed_b(), 4), (expert_bound_costs(), 5)):
        degree = POLICIES["tutel"].plan(costs).degrees["forward", 0]
        assert degree in TUTEL_DEGREES
        seconds = {r: makespan(POLICIES["tutel"].plan(costs, r), costs) for r in TUTEL_DEGREES}
        assert seconds[8] == min(seconds.values())  # with all at its choice
        assert POLICIES["pipemoe"].plan(costs).degrees["forward", 0] == can_rechunk


def test_tutel_improved_overlaps_reduce_with_next_dense_part():
    plan = POLICIES["tutel_improved"].plan(costs_of_testbed_b())
    degree = plan.degrees["backward", 0]
    order = [task_name(task) for task in plan.inter if task.kind in ("gradient-all-reduce", "combine")]
    backward = [word for word in order if word[0] == "b"]
    combines = {layer: [f"b{layer}.C{chunk}" for chunk in range(degree)] for layer in range(3)}
    assert backward == [*combines[2], *combines[1], "b2.AR0", *combines[0], "b1.AR0", "b0.AR0"]


def test_lina_overlaps_reduce_with_experts():
    costs = expert_bound_costs()
    plan = POLICIES["lina"].plan(costs)
    reduces = [task for task in plan.inter if task.kind == "gradient-all-reduce"]
    # 10 MB are less than a bucket; layer 2's are sent while layer 1 computes.
    assert [(task.layer, task.chunk, task.size) for task in reduces] == [(2, 0, 10**7), (1, 0, 10**7), (0, 0, 10**7)]
    degree = plan.degrees["backward", 0]
    place = {task_name(task): index for index, task in enumerate(plan.inter)}
    assert place[f"b1.AG{degree - 1}"] < place["b2.AR0"] < place[f"b1.C{degree - 1}"]
    # All are hidden except the last layer's, which are ready after all other tasks have ended.
    bare = StepCosts(tuple(replace(layer, gradient_bytes=0) for layer in costs.layers), costs.all_reduce)
    hidden = makespan(POLICIES["lina"].plan(bare), bare)
    assert makespan(plan, costs) == pytest.approx(hidden + costs.all_reduce.seconds(10**7), rel=1e-9)


def test_lina_buckets_have_fixed_size():
    costs = expert_bound_costs()
    costs = StepCosts(tuple(replace(layer, gradient_bytes=70 * 10**6) for layer in costs.layers), costs.all_reduce)
    plan = POLICIES["lina"].plan(costs)
    sizes = [task.size for task in plan.inter if task.kind == "gradient-all-reduce"]
    assert sizes == [LINA_BYTES, LINA_BYTES, 10 * 10**6] * 3


def test_fsmoe_has_degrees_per_pass_and_reduces_mid_layer():
    degrees = POLICIES["fsmoe"].plan(costs_of_testbed_b()).degrees
    assert degrees["forward", 0] != degrees["backward", 0]
    plan = POLICIES["fsmoe"].plan(expert_bound_costs())
    order = [task_name(task) for task in plan.inter]
    last = plan.degrees["backward", 1] - 1
    assert order[order.index(f"b1.D{last}") :][:3] == [f"b1.D{last}", "b2.AR0", "b1.C0"]
    assert all(task.kind in ("all-gather", "reduce-scatter") for task in plan.intra)


def test_one_queue_policies_ignore_contention():
    for policy in ("sequential", "tutel", "pipemoe", "tutel_improved", "lina", "fsmoe_no_iio"):
        free, slow = (POLICIES[policy].plan(costs_of_testbed_b(share=share)) for share in (1.0, 0.5))
        assert free == slow
        assert makespan(free, costs_of_testbed_b()) == makespan(slow, costs_of_testbed_b(share=0.5))


def test_joint_serializes_links_under_strong_contention():
    costs = costs_of_testbed_b(share=0.35)
    seconds = {name: makespan(POLICIES[name].plan(costs), costs) for name in layer_policies()}
    assert seconds["fsmoe"] > seconds["fsmoe_no_iio"] >= seconds["joint"]


@pytest.mark.parametrize("policy", layer_policies())
def test_descriptions_are_one_line(policy):
    assert "\n" not in POLICIES[policy].description and 20 < len(POLICIES[policy].description) < 110
