"""The shared expert as a task of a layer's plan: equal to one after the combine, in forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe import experts, gates
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.cost import CostModel, Line, TaskDurations
from fusedmoe.schedule.passes import one_queue
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.shared_expert import with_shared_expert
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.task import Task, TaskKind
from tests.cluster import Cluster
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
            found = with_shared_expert(plan, phase, pass_s)
            assert pass_s(found) == min(map(pass_s, places))
            assert pass_s(found) <= pass_s(plan) + seconds["shared-expert"]
    assert with_shared_expert(plan, phase).compute[0].kind == TaskKind.SHARED_EXPERT


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


def test_plans_with_a_shared_expert_can_be_set(cluster: Cluster) -> None:
    cluster.run(2, set_own_plan)
