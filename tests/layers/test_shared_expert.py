"""The shared expert as a task of a layer's plan: equal to one after the combine, in forward and backward."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe import experts, gates
from fusedmoe.engine.chunk_experts import AutogradExperts
from fusedmoe.engine.run import Plans
from fusedmoe.engine.shared_expert_task import SharedExpertTask
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.cost import CostModel, Line, TaskDurations
from fusedmoe.schedule.passes import one_queue
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.shared_expert import with_shared_expert
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.task import PHASES, PIPELINE, Task, TaskKind
from fusedmoe.schedule.workload import Workload
from tests.cluster import Cluster
from tests.integrations.plans_run import tasks_run
from tests.marks import slowly

M, E, TOKENS = 6, 4, (9, 0, 14, 1)
COSTS = CostModel(
    {name: Line(1e-4, 1e-9) for name in ("gemm", "all-to-all/ep", "all-gather/esp", "reduce-scatter/esp")}
)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def two_layers(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, width))


def change(kind: str, shared: experts.Experts, calls: list[int]) -> None:
    if kind == "frozen":
        shared.requires_grad_(False)
    elif kind == "one frozen":
        shared.w2.requires_grad_(False)
    elif kind == "adapters":
        experts.add_adapters(shared, rank=2)
        with torch.no_grad():
            for name, parameter in shared.named_parameters():
                if parameter.requires_grad:
                    parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    elif kind == "parametrised":
        parametrize.register_parametrization(shared, "w1", Doubled())
    elif kind == "hook":
        shared.register_forward_hook(lambda module, args, output: calls.append(1) or 3 * output)


SHARED = {"swiglu": lambda: experts.SwiGLU(5), "feed-forward": lambda: experts.FeedForward(5, bias=True)}
SHARED |= {"custom": lambda: experts.Custom(two_layers)}
KINDS = ("swiglu", "feed-forward", "custom", "frozen", "one frozen", "adapters", "parametrised", "hook")


def make(topology: fusedmoe.Topology, schedule: Any, kind: str, calls: list[int], **options: Any) -> fusedmoe.MoELayer:
    torch.manual_seed(5)
    made = SHARED.get(kind, SHARED["swiglu"])()
    layer = fusedmoe.MoELayer(
        M, gates.TopK(E, 2), experts.SwiGLU(8), shared=made, topology=topology, schedule=schedule, **options
    )
    with torch.no_grad():  # equal on all ranks, and different from zero
        for number, parameter in enumerate(layer.shared.parameters()):
            parameter.normal_(generator=torch.Generator().manual_seed(number))
    change(kind, layer.shared, calls)
    return layer


def results(layer: fusedmoe.MoELayer, x: Tensor, how: str = "") -> dict[str, Tensor | None]:
    x = x.clone().requires_grad_(how != "tokens need no gradient")
    call: Any = (lambda x: checkpoint(layer, x, use_reentrant=False)) if how == "checkpoint" else layer
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = call(x)
    loss = y.double().square().sum() + layer.aux_loss
    loss.backward(retain_graph=how == "twice")
    if how == "twice":
        loss.backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def compare(rank: int, world: int, sizes: dict[str, int], schedule: Any, kinds: list[str], how: str) -> None:
    topology = fusedmoe.Topology.from_sizes(**sizes, timeout_s=30)
    dtype = torch.float32 if how == "autocast" else torch.float64
    options = {"placement": "fssdp"} if how == "fssdp" else {}
    near = {"rtol": 0.05, "atol": 0.05} if how == "autocast" else {"rtol": 1e-10, "atol": 1e-12}
    x = torch.randn(TOKENS[rank], M, dtype=dtype, generator=torch.Generator().manual_seed(rank))
    for kind in kinds:
        calls: list[int] = []
        plain, planned = (make(topology, of, kind, calls, dtype=dtype, **options) for of in ("off", schedule))
        planned.recorder = Recorder()
        found, wanted = results(planned, x, how), results(plain, x, how)
        spans = [(span.kind, span.phase) for span in planned.recorder.timeline().spans]
        # Custom modules may call collectives, and hooks need a call of the module: both run after the plan.
        if kind != "hook":
            in_plan = {(TaskKind.SHARED_EXPERT, phase) for phase in ("forward", "backward")}
            assert in_plan.isdisjoint(spans) if kind == "custom" else in_plan <= {*spans}
        assert len(calls) == (2 * (1 + (how == "checkpoint")) if kind == "hook" else 0)
        for name, value in wanted.items():
            assert (found[name] is None) == (value is None), (kind, name)
            if value is not None:
                what = f"{kind} {name}"
                torch.testing.assert_close(found[name], value, **near, msg=lambda m, w=what: f"{w}: {m}")
    topology.close()


def compare_wire(rank: int, world: int) -> None:
    """Rows of the routed experts are sent as fp8, and the shared expert computes the exact tokens."""
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=30)
    x = torch.randn(TOKENS[rank], M, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    found = []
    for schedule, is_planned in ((fusedmoe.Schedule("off", wire="fp8"), False), (FP8, False), (FP8, True)):
        layer = make(topology, schedule, "swiglu", [], dtype=torch.float64)
        if not is_planned:
            layer.shared.register_forward_hook(lambda *_: None)
        with tasks_run() as ran:
            found.append(results(layer, x))
        assert {*ran} == ({*PHASES} if is_planned else set())
    exact = results(make(topology, "off", "swiglu", [], dtype=torch.float64), x)
    for name, value in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-12, msg=name)
    if len(x):
        assert not torch.allclose(exact["y"], found[0]["y"], rtol=1e-4)


def test_shared_expert_in_plans_with_fp8_rows(cluster: Cluster) -> None:
    cluster.run(2, compare_wire)


FP8 = fusedmoe.Schedule("fsmoe", degrees=(2, 3), wire="fp8")
FSMOE = fusedmoe.Schedule("fsmoe", degrees=(2, 3))
SAME = fusedmoe.Schedule("fsmoe", degrees=(2, 2))  # custom modules need equal degrees
BY_COSTS = fusedmoe.Schedule("fsmoe", costs=COSTS)
JOINT = fusedmoe.Schedule("joint", costs=COSTS)


@pytest.mark.parametrize(
    ("world", "sizes", "schedule"),
    [
        pytest.param(2, {"ep": 2}, SAME, id="ep"),
        *slowly((2, {"ep": 2}, BY_COSTS), (2, {"ep": 2}, JOINT), (2, {"esp": 2}, SAME), (4, {"ep": 2, "esp": 2}, SAME)),
    ],
)
def test_every_kind_of_shared_expert_equals_no_schedule(
    cluster: Cluster, world: int, sizes: dict[str, int], schedule: Any
) -> None:
    cluster.run(world, compare, sizes, schedule, [*KINDS], "", timeout_s=110)


@pytest.mark.parametrize("how", ["checkpoint", "twice", "tokens need no gradient", "fssdp", "autocast"])
def test_shared_expert_in_a_plan_with_other_features(cluster: Cluster, how: str) -> None:
    kinds = ["swiglu"] if how == "autocast" else ["swiglu", "feed-forward", "frozen"]
    cluster.run(2, compare, {"ep": 2}, FSMOE, kinds, how)


def evaluate(rank: int, world: int) -> None:
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=30)
    plain, planned = (make(topology, of, "swiglu", [], dtype=torch.float64) for of in ("off", FSMOE))
    x = torch.randn(TOKENS[rank], M, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(planned(x), plain(x), rtol=1e-12, atol=1e-12)


def test_shared_expert_without_gradients(cluster: Cluster) -> None:
    cluster.run(2, evaluate)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_shared_expert_is_placed_where_the_pass_is_shortest(phase: str) -> None:
    rng = torch.Generator().manual_seed(4)
    for degree in (1, 2, 3, 5):
        plan = Plan.from_orders(one_queue(("dispatch", "expert", "combine"), degree, phase, 0, ()))
        for _ in range(20):
            drawn = torch.rand(4, generator=rng).tolist()
            seconds = dict(zip(("dispatch", "expert", "combine", "shared-expert"), drawn, strict=True))

            def pass_s(of: Plan, seconds: dict[str, float] = seconds) -> float:
                return makespan(of, TaskDurations({task: seconds[task.kind] for task in of.tasks}))

            task = Task(TaskKind.SHARED_EXPERT, None, 0, phase)
            places = [Plan((*plan.compute[:n], task, *plan.compute[n:]), (), plan.inter) for n in range(degree + 1)]
            costs = TaskDurations({task: seconds[task.kind] for task in plan.tasks})
            # Parts as long as the whole: one part is the fastest.
            found = with_shared_expert(plan, phase, costs, lambda count, seconds=seconds: seconds["shared-expert"])
            assert pass_s(found) == min(map(pass_s, places))
            assert pass_s(found) <= pass_s(plan) + seconds["shared-expert"]
    assert with_shared_expert(plan, phase).compute[0].kind == TaskKind.SHARED_EXPERT


def in_parts(plan: Plan, phase: str, count: int) -> Plan:
    """Add `count` tasks, spread over the pass, the last one at its end."""
    for number in range(count):
        place = (number + 1) * (len(plan.compute) + 1) // count - 1
        task = Task(TaskKind.SHARED_EXPERT, number, 0, phase)
        plan = Plan((*plan.compute[:place], task, *plan.compute[place:]), plan.intra, plan.inter, plan.after)
    return plan


def compare_parts(rank: int, world: int, counts: list[tuple[int, int]]) -> None:
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=30)
    x = torch.randn(TOKENS[rank], M, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    plans = [Plan.from_orders(one_queue(("dispatch", "expert", "combine"), 2, phase, 0, ())) for phase in PHASES]
    for kind, parts in itertools.product(["swiglu", "feed-forward", "one frozen", "adapters", "parametrised"], counts):
        plain, planned = (make(topology, "off", kind, [], dtype=torch.float64) for _ in range(2))
        made = [in_parts(plan, *each) for plan, *each in zip(plans, PHASES, parts, strict=True)]
        planned.set_plan(Plans(*made))
        planned.recorder = Recorder()
        for how in ("", "checkpoint", "twice"):
            wanted, found = results(plain, x, how), results(planned, x, how)
            for layer in (plain, planned):
                layer.zero_grad()
            for name, value in wanted.items():
                assert (found[name] is None) == (value is None), (kind, name)
                if value is not None:
                    torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=f"{kind} {how} {name}")
        spans = [span for span in planned.recorder.timeline().spans if span.kind == TaskKind.SHARED_EXPERT]
        assert {span.chunk for span in spans} == {*range(max(parts))}


def test_parts_of_a_shared_expert_equal_no_schedule(cluster: Cluster) -> None:
    cluster.run(2, compare_parts, [(2, 3), (1, 2)])


@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (2, 2), (3, 2), (2, 5)])
@pytest.mark.parametrize("rows", [7, 0])
def test_parts_of_a_module_have_the_gradients_of_the_whole(counts: tuple[int, int], rows: int) -> None:
    torch.manual_seed(1)
    module, (x, dy) = two_layers(M).double(), torch.randn(2, rows, M, dtype=torch.float64)
    parameters = list(module.parameters())
    task = SharedExpertTask(AutogradExperts(lambda x, *_: module(x), parameters, module), x)
    for _ in range(counts[0]):
        task.forward(counts[0], keep=True)
    inputs = x.clone().requires_grad_()
    wanted = module(inputs)
    torch.testing.assert_close(task.take_result(), wanted, rtol=1e-12, atol=1e-12)
    task = SharedExpertTask.restored(task.experts, *task.save())
    for _ in range(counts[1]):
        task.backward(dy, counts[1])
    grads = torch.autograd.grad(wanted, [inputs, *parameters], dy)
    for found, value in zip((task.result, *(task.totals or ())), grads, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)


# Hidden dim of the shared expert relative to that of an expert, and the experts of a token: the shared expert has an
# eighth of the experts' FLOP in DeepSeek-V3, and as many in Qwen2-MoE.
PROPORTIONS = {"DeepSeek-V3": (7168, 2048, 1, 8), "Qwen2-MoE": (2048, 1408, 4, 4)}


def predicted(rng: random.Random, name: str) -> Iterator[tuple[Plan, str, TaskDurations, Callable[[int], float]]]:
    """Plans of random machines and batches, with the costs of their tasks and of parts of the shared expert."""
    M, H, factor, k = PROPORTIONS[name]
    bandwidth = 10 ** rng.uniform(9.5, 11.5)
    lines = {"gemm": Line(rng.uniform(0, 5e-5), 10 ** rng.uniform(-14.8, -13.3))}
    for collective in ("all-to-all/ep", "all-gather/esp", "reduce-scatter/esp"):
        lines[collective] = Line(rng.uniform(0, 1e-4), 1 / (bandwidth * rng.uniform(0.5, 2)))
    costs, (ep, esp), tokens = CostModel(lines), rng.choice([(8, 1), (16, 1), (4, 2)]), rng.choice([2048, 4096, 8192])
    workload = Workload.of_rows(tokens * k, M, H, 64, True, 2, ep, esp)
    kinds = PIPELINE if esp > 1 else PIPELINE[::2]
    layer = workload.step_costs(costs, [0], kinds)
    alone = Workload.of_rows(tokens, M, factor * H, 1, True, 2, 1, 1).layer_costs(costs)
    for policy in ("fsmoe", "joint"):
        plans = fusedmoe.Schedule(policy).plans(kinds, workload, costs)
        for phase in PHASES:
            plan = plans.of(phase)
            known = TaskDurations(layer.seconds(plan), layer.contention)
            yield plan, phase, known, alone.chunks[phase][TaskKind.EXPERT].seconds


@pytest.mark.parametrize("name", PROPORTIONS)
def test_predictions_hide_the_shared_expert_where_communication_leaves_room(name: str) -> None:
    rng, hidden, parts = random.Random(3), [], set()
    for plan, phase, costs, part_s in (each for _ in range(40) for each in predicted(rng, name)):
        found = with_shared_expert(plan, phase, costs, part_s)
        tasks = [task for task in found if task.kind == TaskKind.SHARED_EXPERT]
        known = TaskDurations({**costs.durations_s, **dict.fromkeys(tasks, part_s(len(tasks)))}, costs.contention)
        without_s, alone_s, with_s = makespan(plan, costs), part_s(1), makespan(found, known)
        assert with_s <= (without_s + alone_s) * (1 + 1e-9)
        parts.add(len(tasks))
        # A quarter more room: a part of the shared expert has a start-up time, and does not fit into every gap.
        if without_s - sum(costs.durations_s[task] for task in plan.compute) >= 1.25 * alone_s:
            hidden.append((without_s + alone_s - with_s) / alone_s)
    assert len(hidden) >= 40 and min(hidden) >= 0.8 and len(parts) > 1, (len(hidden), min(hidden), parts)


def replace_shared(rank: int, world: int) -> None:
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=30)
    x = torch.randn(TOKENS[rank], M, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    plain, planned = (make(topology, of, "swiglu", [], dtype=torch.float64) for of in ("off", FSMOE))
    results(planned, x)
    for layer in (plain, planned):
        layer.zero_grad()
        layer.shared = copy.deepcopy(layer.shared)
        with torch.no_grad():
            layer.shared.w1.mul_(-3)
    found, wanted = results(planned, x), results(plain, x)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_replaced_shared_expert_is_used(cluster: Cluster) -> None:
    cluster.run(2, replace_shared)


def train_shared_on_one_rank(rank: int, world: int) -> None:
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=20)
    layer = make(topology, FSMOE, "swiglu", [], dtype=torch.float64)
    layer.requires_grad_(False)
    layer.shared.requires_grad_(rank == 0)
    y = layer(torch.randn(5, M, dtype=torch.float64))
    assert y.requires_grad == (rank == 0)
    if rank == 0:
        y.sum().backward()
        assert layer.shared.w1.grad is not None


def test_shared_expert_trained_on_one_rank_alone(cluster: Cluster) -> None:
    cluster.run(2, train_shared_on_one_rank)


def set_own_plan(rank: int, world: int) -> None:
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=30)
    layer, other = (make(topology, FSMOE, "swiglu", [], dtype=torch.float64) for _ in range(2))
    x = torch.randn(TOKENS[rank], M, dtype=torch.float64)
    y = layer(x)
    other.set_plan(next(iter(layer.plans.plans_by_workload.values())))
    torch.testing.assert_close(other(x), y, rtol=1e-12, atol=1e-12)
    # A plan without the shared expert gets a task for it.
    plans = [Plan.from_orders(one_queue(("dispatch", "expert", "combine"), 2, phase, 0, ())) for phase in PHASES]
    other.set_plan(Plans(*plans))
    other.recorder = Recorder()
    other(x).sum().backward()
    spans = {(span.kind, span.phase) for span in other.recorder.timeline().spans}
    assert {(TaskKind.SHARED_EXPERT, phase) for phase in PHASES} <= spans


def test_plans_with_a_shared_expert_can_be_set(cluster: Cluster) -> None:
    cluster.run(2, set_own_plan)
