"""Gradients reduced during the backward pass equal gradients reduced after it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fusedmoe
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import Transformer
from fusedmoe.schedule.candidates import PlanCandidate
from fusedmoe.schedule.cost import Contention, CostModel, Line
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.task import Task
from fusedmoe.schedule.workload import Workload
from fusedmoe.training import plan_step, sync_gradients
from fusedmoe.training.gradient_buckets import GradientBuckets
from fusedmoe.training.step_plan import PlannedStep
from tests.cluster import Cluster

CONFIG = ModelConfig(layers=3, model_dim=16, heads=2, hidden=24, experts=4, k=2, batch=2, seq_len=9)
WORK = Workload(2, 9, 16, 24, 4, k=2, ep=2, esp=2)
# Links that make chunks and gradient buckets profitable.
LINES = ("all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "all-reduce/dp")
COSTS = CostModel({**{name: Line(0.0, 1e-6) for name in LINES}, "gemm": Line(0.0, 1e-6)}, Contention.between_links(0.9))


def build(topology: Topology, recompute: bool = False) -> Transformer:
    torch.manual_seed(3)
    return Transformer(CONFIG, topology, recompute=recompute, dtype=torch.float64)


def backward(model: Transformer, topology: Topology, buckets: GradientBuckets | None, seed: int) -> dict[str, Any]:
    tokens = torch.randint(0, 200, (2, 9), generator=torch.Generator().manual_seed(seed + topology.dp.index))
    model.zero_grad(set_to_none=True)
    if buckets is not None:
        buckets.open()
    torch.manual_seed(seed)
    loss = model(tokens, tokens)
    (loss.nats + 0.1 * loss.aux).backward()
    sync_gradients(model, topology, buckets=buckets)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def compare_planned_gradients(rank: int, world: int, policy: str, recompute: bool) -> tuple[int, int]:
    """Gradient buckets in the plan, and the parameters that they reduced."""
    topology = Topology.from_sizes(2, 2, 2, ranks_per_node=2)
    plain, model = build(topology), build(topology, recompute)
    plan, buckets = plan_step(model, topology, policy, COSTS, WORK, limit=4)
    done: list[int] = []
    close = buckets.close
    buckets.close = lambda: (done.append(len(found := close())), found)[1]  # type: ignore[method-assign]
    for seed in (1, 2):
        ours, theirs = backward(model, topology, buckets, seed), backward(plain, topology, None, seed)
        for name, right in theirs.items():
            torch.testing.assert_close(ours[name], right, rtol=1e-10, atol=1e-12, msg=f"{policy} {name}")
    return sum(task.kind == "gradient-all-reduce" for task in plan), done[0]


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "policy",
    ["fsmoe", pytest.param("lina", marks=pytest.mark.slow), pytest.param("tutel_improved", marks=pytest.mark.slow)],
)
def test_gradients_reduced_during_backward_equal_plain(cluster: Cluster, policy: str, recompute: bool) -> None:
    for buckets, done in cluster.run(4, compare_planned_gradients, policy, recompute):
        assert buckets > 1 and done > 5


def compare_hooked_gradients(rank: int, world: int, policy: str) -> None:
    """Layers with hooks follow no plan, and reduce their gradient buckets, for which other ranks wait."""
    topology = Topology.from_sizes(2, ranks_per_node=2, timeout_s=60)
    plain, model = build(topology), build(topology)
    _, buckets = plan_step(model, topology, policy, COSTS, replace(WORK, esp=1), limit=4)
    for seed, on_all in ((1, True), (2, False), (3, True)):
        layers = [module for module in model.modules() if isinstance(module, fusedmoe.MoELayer)]
        # On one rank of one expert-parallel group, then on all ranks.
        hooks = [layers[1].experts.register_forward_hook(lambda *_: None)] if seed > 1 and (on_all or not rank) else []
        ours, theirs = backward(model, topology, buckets, seed), backward(plain, topology, None, seed)
        for name, right in theirs.items():
            torch.testing.assert_close(ours[name], right, rtol=1e-10, atol=1e-12, msg=f"{policy} {name}")
        for hook in hooks:
            hook.remove()


def test_layers_with_hooks_reduce_gradient_buckets(cluster: Cluster) -> None:
    cluster.run(4, compare_hooked_gradients, "fsmoe")


@pytest.mark.slow
def test_sequential_policy_reduces_after_backward(cluster: Cluster) -> None:
    for _, done in cluster.run(4, compare_planned_gradients, "sequential", False):
        assert done == 0


def objects_are_freed(rank: int, world: int) -> list[bool]:
    topology = Topology.from_sizes(2, 2, 2, ranks_per_node=2)
    model = build(topology)
    buckets = plan_step(model, topology, "fsmoe", COSTS, WORK, limit=4)[1]
    backward(model, topology, buckets, 1)
    kept = [weakref.ref(one) for one in (model, buckets, topology)]
    del model, buckets, topology
    gc.collect()
    return [one() is None for one in kept]


@pytest.mark.slow
def test_model_with_buckets_is_freed(cluster: Cluster) -> None:
    assert cluster.run(4, objects_are_freed) == [[True] * 3] * 4


def check_ragged_buckets(rank: int, world: int) -> None:
    """Buckets that end inside parameters, gradients that some ranks lack, passes that add up."""
    topology = Topology.from_sizes(1)
    torch.manual_seed(0)
    gate, experts = fusedmoe.gates.TopK(experts=2, k=1), fusedmoe.experts.FeedForward(4)
    layer = fusedmoe.MoELayer(3, gate, experts, topology=topology)
    model = nn.ModuleDict({"a": nn.Linear(5, 7), "b": nn.Linear(7, 3), "layer": layer})
    twin = copy.deepcopy(model)
    buckets = GradientBuckets(model, topology)
    (size,) = buckets.layer_bytes
    assert size == 4 * (35 + 7 + 21 + 3 + 2 * 3)
    for begin in (False, True):
        for each in (model, twin):
            generator = torch.Generator().manual_seed(rank)
            for parameter in each.parameters():
                parameter.grad = None
            for second in (False, True):
                if second and each is model:
                    buckets.open()
                loss = sum((p * torch.randn(p.shape, generator=generator)).sum() for p in each["b"].parameters())
                if rank:
                    loss = loss + (each["a"].weight * torch.randn(7, 5, generator=generator)).sum()
                loss.backward()
                if not second and each is model:
                    buckets.reduce(Task("gradient-all-reduce", 0, 0, "backward", size))  # not this pass's
        tasks = [Task("gradient-all-reduce", n, 0, "backward", bytes_) for n, bytes_ in enumerate((30, 4, 88, 61))]
        if begin:
            buckets.begin(tasks[:2])
            buckets.begin(tasks[2:])
        else:
            for task in tasks:
                buckets.reduce(task)
        sync_gradients(model, topology, buckets=buckets)
        sync_gradients(twin, topology)
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None, name
            else:
                torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_buckets_may_split_parameters_anywhere(cluster: Cluster) -> None:
    cluster.run(3, check_ragged_buckets)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.linear(x)


def test_deepcopy_of_blocks_during_and_after_reduction() -> None:
    blocks = fusedmoe.pipeline([(Dense(), fusedmoe.MoELayer(8, fusedmoe.gates.TopK(4), fusedmoe.experts.SwiGLU(4)))])
    buckets = GradientBuckets(blocks, Topology(), dense=blocks.dense_parameters)
    blocks.set_plan(blocks.plans, buckets)
    buckets.open()
    buckets.begin([Task("gradient-all-reduce", 0, 0, "backward", 64)])
    during = copy.deepcopy(blocks)
    buckets.wait()
    x = torch.randn(4, 8)
    assert torch.equal(during(x), blocks(x))
    assert torch.equal(copy.deepcopy(blocks)(x), blocks(x))
    assert torch.equal(pickle.loads(pickle.dumps(blocks))(x), blocks(x))


def test_plan_step_rejects_unknown_schedule_and_plain_model() -> None:
    model = build(Topology())
    with pytest.raises(ConfigError, match="unknown schedule 'fast'; choose sequential"):
        plan_step(model, Topology(), "fast", COSTS, WORK)
    with pytest.raises(ConfigError, match="no MoELayer"):
        plan_step(nn.Linear(2, 2), Topology(), "fsmoe", COSTS, WORK)


def test_unsupported_plan_is_rejected_before_step() -> None:
    network = fusedmoe.experts.Custom(lambda model_dim: nn.Linear(model_dim, model_dim))
    layer = fusedmoe.MoELayer(16, fusedmoe.gates.TopK(4), network)
    work = replace(WORK, ep=1, esp=1)
    step = PlannedStep(layer, Topology(), COSTS, work)
    there, back = ([ChunkedPass(three_queues, degree)] for degree in (2, 3))
    candidate = PlanCandidate("a test", step_plan(step.costs, there, back), False, 0.0)
    assert not step.is_runnable(candidate)
    with pytest.raises(ConfigError, match="one degree for both passes"):
        step.follow(candidate)
    with pytest.raises(ConfigError, match="blocks only"):
        step.follow(candidate._replace(uses_micro_batches=True))
