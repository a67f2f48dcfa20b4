"""Results do not depend on the schedule: outputs, auxiliary loss, drops and every gradient."""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe.comm.exchange import Exchange, exchange_metadata
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.run import Plans
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.experts.networks import Custom, SwiGLU
from fusedmoe.layers import measure as measure_module
from fusedmoe.layers import schedule as schedules
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.schedule import Schedule
from fusedmoe.runtime import cache
from fusedmoe.runtime.cache import CACHE, cached_profile
from fusedmoe.runtime.profiler import Profile
from fusedmoe.schedule.cost import CostModel, Line
from fusedmoe.schedule.passes import one_queue
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, register_policy
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.workload import Workload
from fusedmoe.training import save_communication
from tests.cluster import Cluster
from tests.marks import slowly
from tests.oracle import GATES, M, Results, assert_same_results, make_layer, run_passes

TOKENS = [23, 0, 41, 1]
DEGREES = (1, 2, 4, 8)
PAIRS = list(itertools.product(DEGREES, DEGREES))


LAYER = ("topk", "sparse", "swiglu")


def step(layer: MoELayer, rank: int) -> Results:
    x = torch.randn(TOKENS[rank], M, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    return run_passes(layer, x, seed=100 + rank)


def compare_with_no_schedule(
    rank: int,
    world: int,
    ep: int,
    esp: int,
    gate: str,
    order: str,
    experts: str,
    dispatch: str,
    policy: str,
    pairs: list[tuple[int, int]],
) -> None:
    """One chunk gives the same bits; more chunks change the summation order of weight gradients."""
    topology, case = Topology.from_sizes(ep, esp, ranks_per_node=2), (gate, order, experts)
    plain = step(make_layer(case, topology, dispatch=dispatch), rank)
    for pair in pairs:
        found = step(make_layer(case, topology, schedule=Schedule(policy, pair), dispatch=dispatch), rank)
        assert_same_results(found, plain, 0.0 if pair == (1, 1) else 1e-10, what=pair)


@pytest.mark.parametrize("experts", ["swiglu", pytest.param("feed_forward", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("world", "ep", "esp"),
    [
        (2, 2, 1),
        *slowly((2, 1, 2), (4, 4, 1)),
        pytest.param(4, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_any_degrees_equal_no_schedule(cluster: Cluster, world: int, ep: int, esp: int, experts: str) -> None:
    pairs = PAIRS if world == 2 else PAIRS[:: len(DEGREES) - 1]  # each degree of one pass with some degree of the other
    cluster.run(world, compare_with_no_schedule, ep, esp, "topk", "sparse", experts, "direct", "fsmoe", pairs)


@pytest.mark.parametrize(("world", "esp"), [(2, 1), *slowly((4, 2))])
@pytest.mark.parametrize(
    "gate",
    [
        pytest.param(name, marks=() if name == "expert_choice" else pytest.mark.slow)
        for name in GATES
        if name not in ("topk", "switch")
    ],
)
def test_scheduled_gates_equal_no_schedule(cluster: Cluster, gate: str, world: int, esp: int) -> None:
    order = "dropless" if gate in ("topk3", "deepseek_v3") else "sparse"
    cluster.run(world, compare_with_no_schedule, 2, esp, gate, order, "swiglu", "direct", "fsmoe", [(4, 2), (2, 8)])


@pytest.mark.parametrize("policy", ["joint", *slowly("lina", "sequential", "tutel", "fsmoe_no_iio")])
def test_policies_equal_no_schedule(cluster: Cluster, policy: str) -> None:
    cluster.run(4, compare_with_no_schedule, 2, 2, "topk", "dropless", "swiglu", "direct", policy, [(4, 2), (3, 3)])


@pytest.mark.parametrize("dispatch", ["2dh", *slowly("1dh")])
def test_hierarchical_dispatch_equals_no_schedule(cluster: Cluster, dispatch: str) -> None:
    cluster.run(
        4, compare_with_no_schedule, 4, 1, "topk", "sparse", "feed_forward", dispatch, "fsmoe", [(1, 1), (4, 2)]
    )


@pytest.mark.slow
def test_custom_experts_and_einsum_equal_no_schedule(cluster: Cluster) -> None:
    cluster.run(4, compare_with_no_schedule, 2, 2, "topk", "sparse", "custom", "direct", "fsmoe", [(1, 1), (4, 4)])
    cluster.run(4, compare_with_no_schedule, 2, 2, "topk", "einsum", "swiglu", "direct", "fsmoe", [(1, 1), (4, 2)])


class Count(fusedmoe.Hooks):
    """Record the chunks that each seam receives, and send bfloat16."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int, int]] = []

    def before_dispatch(self, rows: Tensor, context: fusedmoe.HookContext) -> Tensor:
        self.seen.append(("dispatch", context.direction, context.chunk, context.chunks))
        return rows.to(torch.bfloat16)

    def after_dispatch(self, rows: Tensor, context: fusedmoe.HookContext) -> Tensor:
        return rows.double()

    def before_combine(self, rows: Tensor, context: fusedmoe.HookContext) -> Tensor:
        self.seen.append(("combine", context.direction, context.chunk, context.chunks))
        return rows.to(torch.bfloat16)

    after_combine = after_dispatch


def check_hooks_with_chunks(rank: int, world: int) -> None:
    topology = Topology.from_sizes(2)
    hooks = [Count(), Count()]
    plain, chunked = (
        step(make_layer(LAYER, topology, hooks=[hook], **options), rank)
        for hook, options in zip(hooks, ({}, {"schedule": Schedule("fsmoe", (3, 2))}), strict=True)
    )
    assert_same_results(chunked, plain, 1e-10)
    chunks = [("forward", i, 3) for i in range(3)] + [("backward", i, 2) for i in range(2)]
    expected = {(what, *chunk) for what in ("dispatch", "combine") for chunk in chunks}
    assert set(hooks[1].seen) == expected and len(hooks[1].seen) == len(expected)
    assert len(hooks[0].seen) == 4


def test_hooks_receive_each_chunk(cluster: Cluster) -> None:
    cluster.run(2, check_hooks_with_chunks)


def degrees_for_costs(rank: int, world: int) -> tuple[Any, Any]:
    """Slow links make many chunks worth their latency; with a high latency, one chunk is best."""
    topology = Topology.from_sizes(2)
    found = []
    for alpha_s in (0.0, 10.0):
        line = Line(alpha_s, 1e-9)
        costs = CostModel({"all-to-all/ep": line, "gemm": Line(0.0, 1e-12), "all-reduce/dp": line})
        layer = make_layer(LAYER, topology, schedule=Schedule("fsmoe", costs=costs))
        assert "schedule='fsmoe'" in repr(layer)
        step(layer, rank)
        (plans,) = layer.plans.plans_by_workload.values()
        idle = "" if alpha_s == 0.0 else ", no overlap: equivalent to off"
        assert f"schedule='fsmoe in {plans.degrees} chunks{idle}'" in repr(layer)
        found.append((max(plans.forward.degrees.values()), max(plans.backward.degrees.values())))
        found.append(plans.forward.fingerprint)
    return tuple(found)


def test_costs_determine_degrees(cluster: Cluster) -> None:
    one, other = cluster.run(2, degrees_for_costs)
    assert one == other
    assert min(one[0]) > 1 and one[2] == (1, 1)


def check_custom_policy(rank: int, world: int) -> None:
    """A user's policy sets the chunks, and results stay; if no rows are sent, the policy is not called."""
    line = Line(1e-5, 1e-9)
    costs = CostModel({"all-to-all/ep": line, "gemm": Line(0.0, 1e-12), "all-reduce/dp": line})

    def mine(workload: Workload, costs: StepCosts) -> Plan:
        assert workload.model_dim == M
        return step_plan(costs, [ChunkedPass(one_queue, 3)], [ChunkedPass(one_queue, 2)])

    topology = Topology.from_sizes(2)
    register_policy("mine", mine)
    try:
        plain = step(make_layer(LAYER, topology), rank)
        for schedule in (Schedule(mine, costs=costs), Schedule("mine", costs=costs)):
            layer = make_layer(LAYER, topology, schedule=schedule)
            found = step(layer, rank)
            assert_same_results(found, plain, 1e-10)
            (plans,) = layer.plans.plans_by_workload.values()
            assert {**plans.forward.degrees, **plans.backward.degrees} == {("forward", 0): 3, ("backward", 0): 2}
    finally:
        del POLICIES["mine"]
    alone = Topology.from_sizes(1)
    step(make_layer(LAYER, alone, schedule=Schedule(mine)), rank)


def test_custom_policy_sets_chunks(cluster: Cluster) -> None:
    cluster.run(2, check_custom_policy)


def check_different_policies(rank: int, world: int) -> None:
    def mine(workload: Workload, costs: StepCosts) -> Plan:
        return step_plan(costs, *([ChunkedPass(one_queue, 1 + rank)],) * 2)

    line = Line(1e-5, 1e-9)
    costs = CostModel({"all-to-all/ep": line, "gemm": Line(0.0, 1e-12), "all-reduce/dp": line})
    schedule = Schedule(mine, costs=costs)
    layer = make_layer(LAYER, Topology.from_sizes(2), schedule=schedule)
    with pytest.raises(RankError, match=r"the ranks plan differently: .* on ranks \[0\] but .* on ranks \[1\]"):
        step(layer, rank)


def test_different_policies_across_ranks_are_rejected(cluster: Cluster) -> None:
    cluster.run(2, check_different_policies)


def fail_in_chunk(rank: int, world: int) -> None:
    topology = Topology.from_sizes(2, timeout_s=60.0)
    layer = make_layer(LAYER, topology, schedule=Schedule("fsmoe", (4, 4)))
    if rank == 1:
        usual = layer.experts.in_chunks

        def broken(x: Tensor) -> Any:
            chunks, calls, forward = usual(x), [0], usual(x).forward

            def third(*arguments: Any) -> Any:
                calls[0] += 1
                if calls[0] == 3:
                    raise MemoryError("no room for chunk 2")
                return forward(*arguments)

            chunks.forward = third  # type: ignore[method-assign]
            return chunks

        layer.experts.in_chunks = broken  # type: ignore[method-assign]
    step(layer, rank)


def test_failure_in_chunk_names_rank(cluster: Cluster) -> None:
    one, other = (outcome.error for outcome in cluster.outcomes(2, fail_in_chunk, timeout_s=40.0))
    assert one is not None and other is not None
    assert other[:2] == ("MemoryError", "no room for chunk 2")
    assert one[0] == "RankError" and "rank 1 failed" in one[1] and "no room for chunk 2" in one[1]


def costs_of(topology: Topology, dtype: torch.dtype) -> CostModel:
    """Return this machine's costs, measured briefly if missing: layers then read them from disk."""
    return cached_profile(topology, torch.device("cpu"), dtype=dtype, budget_s=0.5)[0].costs


def check_named_schedules(rank: int, world: int, ep: int, esp: int, names: list[str]) -> None:
    topology = Topology.from_sizes(ep, esp, ranks_per_node=2)
    costs_of(topology, torch.float64)
    measured = schedules.ScheduledPlans.measure_costs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedmoe.runtime.cache.profile", None)  # measuring once is enough
        plain = step(make_layer(LAYER, topology), rank)
        for name in names:
            layer = make_layer(LAYER, topology, schedule=name)
            costs = measured(layer.plans, torch.empty(6, M, dtype=torch.float64))
            patch.setattr(schedules.ScheduledPlans, "measure_costs", lambda self, like, all_to_all, known=costs: known)
            found = step(layer, rank)
            assert_same_results(found, plain, 1e-10, what=name)
            (plans,) = layer.plans.plans_by_workload.values()
            given = Schedule("joint" if name == "auto" else name, costs=costs)
            (workload,) = layer.plans.plans_by_workload
            assert plans == given.plans(layer.parts, workload)
            layer.eval()
            with torch.no_grad():
                layer(torch.zeros(3 if rank else 0, M, dtype=torch.float64))


@pytest.mark.parametrize(
    ("world", "ep", "esp"),
    [pytest.param(*of, marks=pytest.mark.slow) for of in ((2, 1, 2), (2, 2, 1), (4, 2, 1), (4, 2, 2))],
)
def test_named_schedules_use_equal_measured_costs(cluster: Cluster, world: int, ep: int, esp: int) -> None:
    """All ranks plan with the same measured costs, and results stay. Replicas measure together."""
    cluster.run(world, check_named_schedules, ep, esp, ["auto", "tutel"] if world == 2 else ["auto"])


def degrees_of_auto(rank: int, world: int) -> tuple[int, int]:
    """With zero latency and slow links, "auto" selects many chunks, and results stay."""
    topology = Topology.from_sizes(2)
    slow = CostModel({"all-to-all/ep": Line(0.0, 1e-6), "gemm": Line(0.0, 1e-9)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_module, "measured_costs", None)
        patch.setattr(schedules.ScheduledPlans, "measure_costs", lambda self, like, all_to_all: slow)
        plain = step(make_layer(LAYER, topology), rank)
        layer = make_layer(LAYER, topology, schedule="auto")
        found = step(layer, rank)
    assert_same_results(found, plain, 1e-10)
    (plans,) = layer.plans.plans_by_workload.values()
    return max(plans.forward.degrees.values()), max(plans.backward.degrees.values())


def test_auto_chooses_many_chunks_for_slow_links(cluster: Cluster) -> None:
    one, other = cluster.run(2, degrees_of_auto)
    assert one == other and min(one) > 1


def count_measurements(rank: int, world: int) -> list[Any]:
    """One measurement serves all layers of a topology and dtype, whatever the plans; plans are compared once."""
    topology = Topology.from_sizes(2, 1, ranks_per_node=2)
    slow = CostModel({"all-to-all/ep": Line(0.0, 1e-6), "gemm": Line(0.0, 1e-9)})
    asked: list[Any] = []
    compared: list[Any] = []

    def measure(topology: Topology, device: torch.device, *, dtype: torch.dtype, **_: Any) -> Any:
        asked.append(dtype)
        return Profile(slow), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cached_profile", measure)
        patch.setattr(schedules, "require_same_plans", lambda topology, plans: compared.append(plans))
        for dtype in (torch.float64, torch.float32):
            for _ in range(2):
                layer = make_layer(LAYER, topology, dtype=dtype, schedule="fsmoe")
                x_SM = torch.randn(200 + rank, M, dtype=dtype)
                for tokens in (6, 6, 200, 200):
                    layer(x_SM[:tokens])
    return [asked, len(compared)]


@pytest.mark.slow
def test_costs_are_measured_once_per_topology_and_dtype(cluster: Cluster) -> None:
    assert cluster.run(2, count_measurements) == [[[torch.float64, torch.float32], 8]] * 2


def measure_in_checkpoint(rank: int, world: int, folder: str) -> int:
    """Count a first forward's measurements: recomputations measure nothing and save the same number of tensors.

    Plans that change in between have no effect.
    """
    topology = Topology.from_sizes(2, 1, ranks_per_node=2)
    slow = CostModel({"all-to-all/ep": Line(0.0, 1e-6), "gemm": Line(0.0, 1e-9)})
    x = torch.randn(9 + rank, M, dtype=torch.float64, requires_grad=True)

    def gradients(layer: MoELayer, call: Any, between: Any = lambda: None) -> list[Tensor]:
        y = call(layer, x)
        between()
        for one in (leaves := [x, *layer.parameters()]):
            one.grad = None
        (y * x.detach()).sum().backward()
        return [y.detach(), *(one.grad.clone() for one in leaves if one.grad is not None)]

    def same(*given: Any) -> None:
        for found, right in zip(gradients(*given), theirs, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)

    plain = make_layer(LAYER, topology)
    theirs = gradients(plain, lambda layer, x: layer(x))
    whole = partial(checkpoint, use_reentrant=False)
    calls = (whole, partial(whole, context_fn=save_communication), partial(checkpoint, use_reentrant=True))
    observe, measured = measure_module.time_layer, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cached_profile", lambda *_, **__: (Profile(slow), None))
        patch.setattr(measure_module, "time_layer", lambda *given: (measured.append(0), observe(*given))[1])
        for number, call in enumerate(calls):
            patch.setenv(CACHE, f"{folder}/{number}")  # a machine's first job
            patch.setattr(measure_module, "_observed_parts", WeakKeyDictionary())
            layer = make_layer(LAYER, topology, schedule="auto")
            same(layer, call)
            same(layer, call)
    many, one = (Schedule("fsmoe", (degree, degree)).plans(plain.parts, None) for degree in (3, 1))
    for call in calls:
        for before, after in ((many, None), (None, many), (one, many)):
            plain.set_plan(before)
            same(plain, call, partial(plain.set_plan, after))
    return len(measured)


@pytest.mark.slow
def test_first_forward_in_checkpoint_measures_once(cluster: Cluster, tmp_path: Path) -> None:
    """A selective checkpoint runs operators, which have no plans."""
    assert cluster.run(2, measure_in_checkpoint, str(tmp_path)) == [2, 2]


def run_different_plans(rank: int, world: int) -> None:
    topology = Topology.from_sizes(2, 2, ranks_per_node=2, timeout_s=60.0)
    layer = make_layer(LAYER, topology, schedule=Schedule("fsmoe", (2, 2)))
    if rank in (1, 3):
        layer.plans.schedule = Schedule("fsmoe", (2, 4))
    step(layer, rank)


def test_different_plans_across_ranks_are_rejected(cluster: Cluster) -> None:
    errors = [outcome.error for outcome in cluster.outcomes(4, run_different_plans)]
    (name, message), *others = [error[:2] for error in errors if error is not None]
    assert name == "RankError" and others == [(name, message)] * 3
    assert "on ranks [0, 2] but" in message and "on ranks [1, 3]" in message and "the same versions" in message


class Doubling(Custom):
    """Modules that declare their computation."""

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        return Workload(1, rows * esp, M, 64, 8, k=1, ep=ep, esp=esp, itemsize=itemsize)


def compare_modules(rank: int, world: int) -> None:
    topology = Topology.from_sizes(2)
    found = []
    for options in ({}, {"schedule": Schedule("fsmoe", costs=BACKWARD_HEAVY)}):
        torch.manual_seed(7)
        experts = Doubling(lambda model_dim: torch.nn.Linear(model_dim, model_dim))
        layer = MoELayer(M, GATES["topk"](), experts, topology=topology, dtype=torch.float64, **options)
        found.append(step(layer, rank))
    assert_same_results(found[1], found[0], 1e-10)
    (plans,) = layer.plans.plans_by_workload.values()
    assert plans.forward.degrees["forward", 0] == plans.backward.degrees["backward", 0] > 1
    (workload,) = layer.plans.plans_by_workload
    assert layer.plans.schedule is not None
    free = layer.plans.schedule.plans(layer.parts, workload)
    assert free.forward == plans.forward and free.backward.degrees["backward", 0] != plans.forward.degrees["forward", 0]


BACKWARD_HEAVY = CostModel({"all-to-all/ep": Line(1e-4, 1e-6), "gemm": Line(0.0, 2e-8)})


def test_custom_modules_use_one_degree_for_both_passes(cluster: Cluster) -> None:
    cluster.run(2, compare_modules)


def run_backward_twice(rank: int, world: int) -> None:
    topology = Topology.from_sizes(world)
    layer = make_layer(("topk", "sparse", "custom"), topology, schedule=Schedule("fsmoe", (2, 2)))
    x = torch.randn(4 + rank, M, dtype=torch.float64, requires_grad=True)
    y = layer(x).square().sum()
    leaves = [x, *layer.experts.parameters()]
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    for one, again in zip(first, torch.autograd.grad(y, leaves), strict=True):
        assert torch.equal(one, again)


def test_custom_modules_support_second_backward(cluster: Cluster) -> None:
    """With `retain_graph`, each chunk's graph also exists in the second backward."""
    cluster.run(2, run_backward_twice)


def make_experts_without_workload(rank: int, world: int) -> None:
    topology = Topology.from_sizes(2)
    experts = Custom(lambda model_dim: torch.nn.Linear(model_dim, model_dim))
    MoELayer(M, GATES["topk"](), experts, topology=topology, schedule="auto")


def test_experts_without_workload_are_rejected(cluster: Cluster) -> None:
    for outcome in cluster.outcomes(2, make_experts_without_workload):
        assert outcome.error is not None
        name, message, _ = outcome.error
        assert name == "ConfigError" and "Custom does not define its work" in message and "degrees=" in message


def test_unknown_schedules_and_policies_are_rejected() -> None:
    for name, match in (
        ("fast", "unknown schedule 'fast'; choose off, auto, sequential, .*joint, fused$"),
        ("flowmoe", "flowmoe plans whole models: fusedmoe.pipeline with fusedmoe.training.plan_step"),
    ):
        with pytest.raises(ConfigError, match=match):
            MoELayer(M, GATES["topk"](), SwiGLU(8), schedule=name)
    for name, match in (
        ("fast", "unknown policy 'fast'; choose sequential, .*joint, fused$"),
        ("auto", "unknown policy 'auto'; choose sequential, .* by name"),
    ):
        with pytest.raises(ConfigError, match=match):
            Schedule(name)
    degrees: Any
    for degrees in ((0, 1), 2, (2, 2, 2), (1.5, 2), (True, 2), "12"):
        with pytest.raises(ConfigError, match=f"each at least 1.* not {re.escape(repr(degrees))}"):
            Schedule("fsmoe", degrees)
    limit: Any
    for limit in (0, 1.5, None):
        with pytest.raises(ConfigError, match=f"limit must be an integer of at least 1, got {limit}"):
            Schedule("fsmoe", limit=limit)


ASSIGNED = ("compute: E0 E1\ninter: D0 D1 C0 C1", "phase: backward\ncompute: E0\ninter: D0 C0")


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (("compute: DEC0\ninter: DEC0", ASSIGNED[1]), r"forward plan has f0\.DEC0 .*cannot run here; supported: dis"),
        ((ASSIGNED[0], ASSIGNED[1] + " AR0(4)"), r"backward plan has b0\.AR0 \(gradient-all-reduce\), which cannot"),
        ((ASSIGNED[0] + "\nintra: AG0 AG1", ASSIGNED[1]), r"f0\.AG0 \(all-gather\), which cannot run here"),
        ((ASSIGNED[0], "phase: backward\ncompute: E0\ninter: D0"), "backward plan has no combine, which every chunk"),
    ],
)
def test_unsupported_manual_plans_are_rejected(texts: tuple[str, str], says: str) -> None:
    layer = make_layer(LAYER, Topology(), hooks=[fusedmoe.Hooks()])
    right = step(layer, 0)
    with pytest.raises(ConfigError, match=says):
        layer.set_plan(Plans(*map(Plan.parse, texts)))
    layer.zero_grad()
    layer.set_plan(Plans(*map(Plan.parse, ASSIGNED)))
    assert_same_results(step(layer, 0), right, 1e-10)


@pytest.mark.parametrize("schedule", ["off", "auto", "fsmoe", Schedule("fsmoe", (4, 2))], ids=str)
def test_one_process_ignores_schedule(monkeypatch: pytest.MonkeyPatch, schedule: str | Schedule) -> None:
    """One process ignores the schedule and measures nothing, with or without hooks."""
    monkeypatch.setattr(measure_module, "measured_costs", None)
    for hooks in ([], [fusedmoe.Hooks()]):
        found = []
        for options in ({}, {"schedule": schedule}):
            layer = make_layer(LAYER, Topology(), hooks=hooks, **options)
            found.append(step(layer, 0))
        assert_same_results(found[1], found[0], 1e-10 if hooks and isinstance(schedule, Schedule) else 0.0)


@pytest.mark.slow
def test_compiled_one_process_layer_ignores_schedule() -> None:
    layer = make_layer(LAYER, Topology(), schedule="auto")
    x = torch.randn(5, M, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


def count_sends_in_checkpoint(rank: int, world: int) -> None:
    """A checkpoint that packs saved tensors sends all rows once more, rather than once per chunk."""
    topology = Topology.from_sizes(2)
    met: list[str] = []

    def counted(*given: Any, **named: Any) -> Exchange:
        met.append("met")
        return exchange_metadata(*given, **named)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedmoe.engine.collectives_dispatcher.exchange_metadata", counted)
        for schedule in ("off", Schedule("fsmoe", (4, 4))):
            layer = make_layer(("topk", "sparse", "custom"), topology, schedule=schedule)
            torch.manual_seed(100 + rank)
            x = torch.randn(TOKENS[rank], M, dtype=torch.float64).requires_grad_()
            checkpoint(layer, x, use_reentrant=False).square().sum().backward()
            found.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
            assert len(met) == 2, (schedule, met)
            met.clear()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_checkpoint_of_custom_modules_resends_rows_once(cluster: Cluster) -> None:
    cluster.run(2, count_sends_in_checkpoint)
