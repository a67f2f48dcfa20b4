"""Replicas of experts and their gradients in executed plans: results of expert parallelism, one task at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedmoe.blocks.pipeline import PipelinedBlocks
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import Experts
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.cost import CostModel, Line
from fusedmoe.schedule.plan import Plan, task_name
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.task import SPARSE_GATHER, SPARSE_REDUCE
from fusedmoe.schedule.timeline import Span
from fusedmoe.schedule.workload import Workload
from fusedmoe.training import ShardedExperts, plan_step, sync_gradients
from fusedmoe.training.gradient_buckets import GradientBuckets
from tests.cluster import Cluster
from tests.layers.test_pipeline_plans import halves
from tests.marks import slowly
from tests.training.placed import (
    DIM,
    EXACT,
    EXPERTS,
    HECATE,
    Model,
    experts_of,
    optimizer_of,
    owners_of,
    tokens,
    train_step,
)

STEPS = 8
# Links that make chunks and gradient buckets profitable.
LINES = ("gemm", "all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "all-reduce/dp")
COSTS = CostModel({name: Line(0.0, 1e-6) for name in LINES})


def blocks_of(model: Model) -> PipelinedBlocks:
    (blocks,) = model._pipeline
    assert isinstance(blocks, PipelinedBlocks)
    return blocks


def set_plan_of_mode(model: Model, topology: Topology, mode: str) -> tuple[Plan | None, GradientBuckets | None]:
    """The plan of a mode, and the gradients that it reduces."""
    work = Workload(4, 4, DIM, 6, EXPERTS, k=2, ep=topology.ep.size, esp=topology.esp.size, itemsize=8)
    if mode == "ep":
        return None, None
    if mode == "layers":
        return plan_step(model, topology, "fsmoe", COSTS, work, limit=2)
    blocks = blocks_of(model)
    if mode == "blocks":
        return plan_step(model, topology, "flowmoe", COSTS, work, limit=2, blocks=blocks)
    costs = work.step_costs(COSTS, [0, 0], blocks.experts[0].parts, whole=True)
    plan = micro_schedule(costs, StepSplit(3, 2, weights=True)).plan()
    plan = blocks.with_copies(plan) if mode == "separate weight gradients" else plan
    blocks.set_plan(halves(plan))
    return plan, None


class Lora(nn.Module):
    """w + B·A, with factors for each expert."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        owned, out, inputs = experts.w2.shape
        numbers = experts.place.numbers
        a = [torch.randn(2, inputs, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in numbers]
        self.A, self.B = nn.Parameter(torch.stack(a)), nn.Parameter(experts.w2.new_full((owned, out, 2), 0.1))

    def forward(self, w: Tensor) -> Tensor:
        return w + self.B @ self.A


def add_lora_to_experts(model: Model) -> None:
    for layer in model.layers:
        experts = layer.experts
        experts.w2.requires_grad_(False)
        parametrize.register_parametrization(experts, "w2", Lora(experts))
        experts.shardings["parametrizations.w2.original"] = experts.shardings.pop("w2")
        experts.shardings |= {f"parametrizations.w2.0.{factor}": {"ep": 0} for factor in "AB"}


def train_on_rank(rank: int, world: int, mode: str, sizes: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """Train through changing replicas and owners; return the results of this rank."""
    topology = Topology.from_sizes(**sizes, ranks_per_node=1, timeout_s=30.0)
    split = {} if mode in ("ep", "layers") else {"degrees": (1, 1)}
    parts, recomputes = options.pop("parts", 1), options.pop("recomputes", False)
    model = Model(topology, "ep" if mode == "ep" else "fssdp", recomputes=recomputes, **split)
    if options.pop("lora", False):
        add_lora_to_experts(model)
    optimizer = optimizer_of(model)
    sharded = None if mode == "ep" else ShardedExperts(model, optimizer, topology, **HECATE, **options)
    plan, buckets = set_plan_of_mode(model, topology, mode)
    losses, owners, copied, spans = [], [], 0, []
    for step in range(STEPS):
        recorder = Recorder(rank)
        for one in (*model.layers, *model._pipeline):
            one.recorder = recorder
        copied += 0 if sharded is None else sum(str(one).count("+") for one in sharded.placements)
        optimizer.zero_grad()
        for part in range(parts):
            y_SM = model(tokens(rank, step + 100 * part))
            loss = y_SM.square().sum() / 50 + sum(layer.aux_loss for layer in model.layers)
            if buckets is not None and part == parts - 1:
                buckets.open(recorder)
            loss.backward()
        sync_gradients(model, topology, buckets=buckets)
        losses.append(loss.detach())
        owners.append(owners_of(model))
        found = experts_of(model)
        optimizer.step()
        spans.append([span for span in recorder.timeline().on("inter") if span.name != "exchange of counts"])
    dense = {name: p.detach().clone() for name, p in model.named_parameters() if ".experts." not in name}
    if sharded is not None:
        sharded.close()
    return {
        "losses": losses, "dense": dense, "experts": found, "owners": owners, "copies": copied, "spans": spans,
        "plan": None if plan is None else str(plan),
    }  # fmt: skip


def experts_by_layer_and_number(ranks: list[dict[str, Any]]) -> dict[tuple[int, str, int], Any]:
    """Parameters before the last step, and its gradients, by layer, name and number."""
    return {
        (layer, name, number): pair
        for rank in ranks
        for layer, of in enumerate(rank["experts"])
        for name, by_number in of.items()
        for number, pair in by_number.items()
    }


def assert_no_overlap(spans: list[Span]) -> None:
    for one, other in zip(spans, spans[1:], strict=False):
        assert one.end_s <= other.start_s, f"{one.kind} of layer {one.layer} beside {other.kind} of layer {other.layer}"


@pytest.fixture(scope="module")
def plain(cluster: Cluster) -> Callable[[int, int, bool], list[dict[str, Any]]]:
    """Expert parallelism, by ranks, parts of a batch, and whether experts are parametrised."""

    @cache
    def of(world: int, parts: int, lora: bool) -> list[dict[str, Any]]:
        return cluster.run(world, train_on_rank, "ep", {"ep": world}, {"parts": parts, "lora": lora})

    return of


@pytest.mark.parametrize(
    ("world", "mode", "options"),
    [
        (2, "layers", {"rematerialises": True, "parts": 2}),
        *slowly((4, "separate weight gradients", {}), (2, "blocks", {"lora": True})),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, "blocks", {}),
                (2, "overlapped", {}),
                (4, "layers", {}),
                (4, "layers", EXACT),
                (2, "layers", {"lora": True}),
                (4, "blocks", {"lora": True}),
                (2, "layers", {"recomputes": True}),
                (4, "blocks", {}),
            )
        ),
    ],
    ids=str,
)
def test_planned_replicas_equal_expert_parallelism(
    cluster: Cluster, plain: Any, world: int, mode: str, options: dict[str, Any]
) -> None:
    wanted = plain(world, options.get("parts", 1), options.get("lora", False))
    found = cluster.run(world, train_on_rank, mode, {"ep": world}, options)
    close = {"rtol": 1e-10, "atol": 1e-12}
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours["losses"], theirs["losses"], **close)
        torch.testing.assert_close(ours["dense"], theirs["dense"], **close)
    experts, experts_there = experts_by_layer_and_number(found), experts_by_layer_and_number(wanted)
    assert len(experts) == len(experts_there)
    torch.testing.assert_close(experts, experts_there, **close)
    assert found[0]["copies"] > STEPS and found[0]["owners"][0] != found[0]["owners"][-1]
    plan = Plan.parse(found[0]["plan"])
    sparse = [task for task in plan.inter if task.kind in (SPARSE_GATHER, SPARSE_REDUCE)]
    again = 1 if options.get("rematerialises") else 0
    assert len(sparse) == (0 if mode == "overlapped" else 4 + again)
    for rank in found:
        for spans in rank["spans"]:
            kinds = {span.kind for span in spans}
            if mode != "overlapped":
                assert_no_overlap(spans)
            # In blocks the executor also runs tasks that send nothing.
            if mode in ("blocks", "separate weight gradients"):
                order = [(span.kind, span.chunk, span.layer, span.phase) for span in spans]
                tasks = [task[:4] for phase in ("forward", "backward") for task in plan.inter if task.phase == phase]
                assert order == [task for task in tasks if task[0] != "gradient-all-reduce" or task in order]
                assert {SPARSE_GATHER, SPARSE_REDUCE} <= kinds
        assert {SPARSE_GATHER, SPARSE_REDUCE} <= {span.kind for spans in rank["spans"] for span in spans}


def errors_without_placement(rank: int, world: int) -> list[str]:
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)
    told = []
    placed, fixed = (Model(topology, placement, degrees=(1, 1)) for placement in ("fssdp", "ep"))
    plans = blocks_of(placed).plans
    assert plans is not None and [task_name(task) for task in plans.forward.inter[:2]] == ["f0.SAG", "f0.D0"]
    backward = str(plans.backward).replace("inter:", "inter: b0.SAG")
    for model, forward, back in ((fixed, plans.forward, plans.backward), (placed, plans.forward, Plan.parse(backward))):
        with pytest.raises(ConfigError) as caught:
            blocks_of(model).set_plan(type(plans)(forward, back))
        told.append(str(caught.value))
    return told


def test_sparse_tasks_without_placement_are_rejected(cluster: Cluster) -> None:
    for first, second in cluster.run(2, errors_without_placement):
        assert "f0.SAG (sparse-all-gather), which cannot run here" in first
        assert "the backward plan has b0.SAG" in second


def train_frozen_experts(rank: int, world: int, mode: str) -> bool:
    """Frozen experts send no gradients, and all other gradients are reduced as before."""
    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=30.0)
    model = Model(topology, "fssdp", **({"degrees": (2, 2)} if mode == "blocks" else {}))
    for layer in model.layers:
        layer.experts.requires_grad_(False)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    sharded = ShardedExperts(model, optimizer, topology, reshard=False, **HECATE)
    _, buckets = set_plan_of_mode(model, topology, mode)
    for step in range(3):
        optimizer.zero_grad()
        y_SM = model(tokens(rank, step))
        buckets.open()
        y_SM.square().sum().backward()
        sync_gradients(model, topology, buckets=buckets)
        optimizer.step()
    sharded.close()
    assert all(one.grad is None for layer in model.layers for one in layer.experts.parameters())
    between: nn.Module = model.between
    return all(bool(one.grad.abs().sum() > 0) for one in between.parameters())


@pytest.mark.parametrize("mode", ["blocks", *slowly("layers")])
def test_frozen_experts_send_no_gradients(cluster: Cluster, mode: str) -> None:
    assert all(cluster.run(2, train_frozen_experts, mode))


def call_layer_directly(rank: int, world: int, placement: str) -> torch.Tensor:
    """A layer of blocks whose plan sends replicas, called directly after some steps."""
    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=30.0)
    model = Model(topology, placement, degrees=(1, 1))
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, **HECATE) if placement == "fssdp" else None
    for step in range(3):
        train_step(model, optimizer, topology, step)
    assert sharded is None or all("+" in str(one) for one in sharded.placements)
    with torch.no_grad():
        y_SM = model.layers[0](tokens(rank, 9))
    if sharded is not None:
        sharded.close()
    return y_SM


def test_layer_of_blocks_called_directly_fetches_replicas(cluster: Cluster) -> None:
    found, wanted = (cluster.run(2, call_layer_directly, placement) for placement in ("fssdp", "ep"))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
