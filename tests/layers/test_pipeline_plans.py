"""Blocks follow any plan of whole models, in chunks of any kind, with the results of blocks without overlap."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedmoe
from fusedmoe import ConfigError, experts, gates
from fusedmoe.blocks.deferred import DeferredGradients
from fusedmoe.blocks.external_blocks import BlocksSource
from fusedmoe.blocks.pipeline import Parts, PipelinedBlocks
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.run import Plans
from fusedmoe.runtime.cache import CACHE
from fusedmoe.schedule.cost import Contention, CostModel, Line
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.plan_chooser import PlanChooser
from fusedmoe.schedule.policies import POLICIES, micro_batch_policies
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.step import Degrees, extract_phase, fused_pass
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import STAGES
from fusedmoe.schedule.workload import Workload, uniform_share
from fusedmoe.training import plan_step, sync_gradients
from tests.cluster import Cluster
from tests.layers.test_pipeline import Attention, E, H, L, M, make_blocks, train, without_overlap
from tests.marks import slowly
from tests.schedule.test_splits import random_split

LINES = ("gemm", "all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "all-reduce/dp")
COSTS = CostModel(
    {name: Line(1e-6, 1e-12 if name == "gemm" else 4e-9) for name in LINES}, contention=Contention.between_links(0.8)
)


def workload(topology: Topology, k: int) -> Workload:
    return Workload(4, L, M, H, E, k=k, expert="swiglu", ep=topology.ep.size, esp=topology.esp.size, itemsize=8)


def costs_of(topology: Topology, k: int, kinds: Sequence[str], waits: bool) -> StepCosts:
    found = workload(topology, k).step_costs(COSTS, [0, 0], kinds, whole=True)
    layer = found.layers[0]
    assert layer.micro is not None
    return replace(found, layers=(replace(layer, micro=replace(layer.micro, waits=waits)),) * 2)


def halves(plan: Plan) -> Plans:
    return Plans(extract_phase(plan, "forward"), extract_phase(plan, "backward"))


def compare_policy_with_no_overlap(
    rank: int, world: int, policy: str, k: int, factor: float | None, sizes: dict[str, int]
) -> None:
    topology = Topology.from_sizes(**sizes, timeout_s=30) if world > 1 else Topology()
    blocks = make_blocks("topk", k, factor, topology)
    others = copy.deepcopy(blocks)
    run = fusedmoe.pipeline(others)
    costs = costs_of(topology, k, others[0].experts.parts, run.routes_first[0])
    run.set_plan(halves(POLICIES[policy].plan(costs, 4)))
    want = train(without_overlap(blocks), blocks, 4 - rank, rank, 2)
    for one, other in zip(train(run, others, 4 - rank, rank, 2), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("k", "factor"), [(1, 0.8), *slowly((2, 1.0))])
def test_every_policy_equals_no_overlap(policy: str, k: int, factor: float | None) -> None:
    compare_policy_with_no_overlap(0, 1, policy, k, factor, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [pytest.param(one, marks=() if one == "joint" else pytest.mark.slow) for one in ("fsmoe", *micro_batch_policies())],
)
def test_every_policy_on_ranks_equals_no_overlap(cluster: Cluster, policy: str) -> None:
    cluster.run(4, compare_policy_with_no_overlap, policy, 2, 1.0, {"ep": 2, "esp": 2})


def compare_split_with_no_overlap(rank: int, world: int, split: StepSplit, k: int, factor: float | None) -> None:
    topology = Topology.from_sizes(ep=world, timeout_s=30) if world > 1 else Topology()
    blocks = make_blocks("noisy", k, factor, topology)
    others = copy.deepcopy(blocks)
    run = fusedmoe.pipeline(others, recompute=split.forward in (2, 4))
    costs = costs_of(topology, k, others[0].experts.parts, run.routes_first[0])
    run.set_plan(halves(micro_schedule(costs, split).plan()))
    batch = 5 if rank == 0 else 0
    want = train(without_overlap(blocks), blocks, batch, rank, 3)
    for one, other in zip(train(run, others, batch, rank, 3), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# Each part of each layer has its own chunks, in both passes.
APART = StepSplit((Degrees(2, 4), Degrees(3, 1)), (Degrees(1, 3), Degrees(4, 2)), weights=True)


@pytest.mark.parametrize(
    "split",
    [APART, *slowly(StepSplit(4, 2, weights=True), StepSplit(1, 3), StepSplit(1, 3, weights=True), StepSplit(4, 2))],
)
def test_separate_weight_gradients_equal_no_overlap(cluster: Cluster, split: StepSplit) -> None:
    cluster.run(2, compare_split_with_no_overlap, split, 2, 0.8)


@pytest.mark.parametrize(("k", "factor"), [(1, 0.8), *slowly((2, None))])
def test_different_chunks_per_part_equal_no_overlap(k: int, factor: float | None) -> None:
    """Tokens are sent before all are routed, and each task waits only for tasks whose chunks overlap its own."""
    for split in (APART, StepSplit(APART.backward, APART.forward)):
        compare_split_with_no_overlap(0, 1, split, k, factor)


class Causal(nn.Module):
    """Two heads; later positions see the keys and values of earlier positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_u = nn.LayerNorm(M), nn.LayerNorm(M)
        self.qkv, self.out = nn.Linear(M, 3 * M), nn.Linear(M, M, bias=False)

    def forward(
        self, x_BLM: Tensor, past: Sequence[tuple[Tensor, ...]] = ()
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        heads = self.qkv(self.norm(x_BLM)).unflatten(-1, (2, 3, M // 2)).movedim(-3, 1)
        q, k, v = (heads[..., i, :] for i in range(3))
        keys, values = (torch.cat([*(of[i] for of in past), own], 2) for i, own in enumerate((k, v)))
        before = keys.shape[2] - q.shape[2]
        seen = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).tril(before)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        y_BLM = x_BLM + self.out(mixed.movedim(1, -2).flatten(-2))
        return y_BLM, self.norm_u(y_BLM), (k, v)


def compare_along_positions(
    rank: int, world: int, k: int, factor: float | None, split: StepSplit, batch: int, length: int, recompute: bool
) -> None:
    topology = Topology.from_sizes(ep=world, timeout_s=30) if world > 1 else Topology()
    torch.manual_seed(0)
    gate = gates.TopK(E, k, factor, noise=1.0, aux={"balance": 0.5, "z": 0.1})
    blocks = [
        Parts(
            Causal().double(),
            fusedmoe.MoELayer(
                M, copy.deepcopy(gate), experts.SwiGLU(H), topology=topology, mp_input="split", dtype=torch.double
            ),
        )
        for _ in range(2)
    ]  # fmt: skip
    others = copy.deepcopy(blocks)

    def whole(x_BLM: Tensor) -> Tensor:
        for dense, layer in blocks:
            x_BLM, u_BLM, _ = dense(x_BLM)
            x_BLM = x_BLM + layer(u_BLM)
        return x_BLM

    run = fusedmoe.pipeline(others, along="positions", recompute=recompute)
    costs = costs_of(topology, k, others[0].experts.parts, run.routes_first[0])
    run.set_plan(halves(micro_schedule(costs, split).plan()))
    found: list[list[Tensor]] = []
    for of, model in ((blocks, whole), (others, run)):
        modules = nn.ModuleList([module for block in of for module in block])
        optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)
        got: list[Tensor] = []
        for step in range(3):
            torch.manual_seed(step + 10 * rank)
            x_BLM = torch.randn(batch, length, M, dtype=torch.double, requires_grad=True)
            z_BLM = model(x_BLM)
            loss = (z_BLM * torch.randn_like(z_BLM)).sum() + sum(block.experts.aux_loss for block in of)
            optimizer.zero_grad()
            loss.backward()
            assert x_BLM.grad is not None
            got += [loss.detach(), z_BLM.detach(), x_BLM.grad]
            got += [torch.zeros(()) if p.grad is None else p.grad.clone() for p in modules.parameters()]
            got += [torch.tensor(block.experts.dropped) for block in of]
            optimizer.step()
        found.append(got)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("k", "factor"), [(2, None), *slowly((1, 0.8), (2, 1.0))])
@pytest.mark.parametrize(("batch", "length"), [(3, 4), *slowly((1, 7))])
@pytest.mark.parametrize("split", [StepSplit(4, 3, weights=True), *slowly(StepSplit(2, 2), APART)])
def test_chunks_along_positions_equal_no_overlap(
    k: int, factor: float | None, batch: int, length: int, split: StepSplit
) -> None:
    compare_along_positions(0, 1, k, factor, split, batch, length, recompute=length == 4)


@pytest.mark.slow
def test_chunks_along_positions_on_ranks(cluster: Cluster) -> None:
    cluster.run(2, compare_along_positions, 2, None, StepSplit(3, 2), 1, 8, False)


def compare_overlapped_reduction(rank: int, world: int, policy: str, sizes: dict[str, int], passes: int) -> None:
    """Compare gradients after a step with all-reduces in the plan to gradients reduced at the end of the step."""
    topology = Topology.from_sizes(**sizes, timeout_s=30)
    blocks = make_blocks("topk", 2, None, topology)
    found = []
    for planned in (False, True):
        others = copy.deepcopy(blocks)
        run = fusedmoe.pipeline(others, (2, 2))
        # Parameters before and after the blocks have gradients, too.
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(M, M).double(), run, nn.Linear(M, 1).double())
        buckets = None
        if planned:
            shape = run.workload(torch.empty(4, L, M, dtype=torch.double))
            wanted = replace(workload(topology, 2), capacity_factor=None)
            wanted = replace(wanted, share=uniform_share(wanted.experts, wanted.k, topology.ep.size))
            assert replace(shape, k=wanted.k, capacity_factor=None) == wanted and shape.rows == wanted.rows
            plan, buckets = plan_step(model, topology, policy, COSTS, shape, limit=4)
            assert any(task.kind == "gradient-all-reduce" for task in plan)
        for step in range(2):
            for number in range(passes):
                torch.manual_seed(100 * step + 10 * number + rank)
                loss = model(torch.randn(4 - rank, L, M, dtype=torch.double)).square().mean()
                if buckets is not None and number == passes - 1:
                    buckets.open()
                loss.backward()
            sync_gradients(model, topology, buckets=buckets)
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            model.zero_grad()
    for want, got in zip(found[:2], found[2:], strict=True):
        for one, other in zip(got, want, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("policy", "passes"), [("joint", 1), *slowly(("flowmoe", 2), ("fsmoe", 1), ("lancet", 2))])
def test_overlapped_gradient_reduction_equals_final_reduction(cluster: Cluster, policy: str, passes: int) -> None:
    cluster.run(2, compare_overlapped_reduction, policy, {"ep": 2}, passes)


def test_deferred_linear_gradients_equal_autograd() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3, bias=False)).double()
    leaves = [one.detach().requires_grad_() for one in model.parameters()]
    named = dict(zip((name for name, _ in model.named_parameters()), leaves, strict=True))
    x = torch.randn(2, 5, 4, dtype=torch.double, requires_grad=True)
    dy = torch.randn(2, 5, 3, dtype=torch.double)
    later = DeferredGradients(leaves)
    with later:
        y = torch.func.functional_call(model, named, x)
    dx, *now = torch.autograd.grad(y, [x, *leaves], dy, allow_unused=True)
    got: dict[int, Tensor] = {place: grad for place, grad in enumerate(now) if grad is not None}
    assert sorted(got) == [2, 3]  # the norm's
    later.run(got.__setitem__)
    want_dx, *want = torch.autograd.grad(model(x), [x, *model.parameters()], dy)
    torch.testing.assert_close(dx, want_dx, rtol=1e-12, atol=1e-12)
    for place, one in enumerate(want):
        torch.testing.assert_close(got[place], one, rtol=1e-12, atol=1e-12)
    later.run(lambda *_: pytest.fail("once"))


@pytest.mark.parametrize("frozen", [(), (0,), (1,)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_deferred_bias_gradients_equal_autograd(own: bool, autocast: bool, frozen: tuple[int, ...]) -> None:
    """A bias passed to the call, and one computed from it."""
    torch.manual_seed(0)
    x, dy = torch.randn(40, 5, requires_grad=True), torch.randn(40, 3)
    leaves = [torch.randn(3, 5), torch.randn(3)]
    for place, leaf in enumerate(leaves):
        leaf.requires_grad_(place not in frozen)
    weight, bias = leaves
    later = DeferredGradients(leaves)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), later:
        y = F.linear(x, weight, bias if own else bias * 3)
    y.backward(dy.to(y.dtype))
    got = {place: leaf.grad for place, leaf in enumerate(leaves) if leaf.grad is not None}
    late: dict[int, Tensor] = {}
    later.run(late.__setitem__)
    if not frozen:
        assert sorted(got) == ([] if own else [1]) and sorted(late) == ([0, 1] if own else [0])
    assert not got.keys() & late.keys()
    want = dict(enumerate((dy.t() @ x, dy.sum(0) * (1 if own else 3))))
    assert x.grad is not None and y.dtype == (torch.bfloat16 if autocast else torch.float32)
    pairs = [(x.grad, dy @ weight), *((grad, want.pop(place)) for place, grad in (got | late).items())]
    assert set(want) == set(frozen)
    for grad, right in pairs:
        assert (grad - right).norm() <= (0.02 if autocast else 1e-6) * right.norm()


def test_deferred_gradients_keep_float64_under_autocast() -> None:
    x, weight = torch.randn(4, 5, dtype=torch.double, requires_grad=True), torch.randn(3, 5, dtype=torch.double)
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        with DeferredGradients([weight]):
            y = F.linear(x, weight)
        assert torch.equal(y, F.linear(x, weight))


def test_deferred_dense_gradients_under_autocast() -> None:
    """Gradients of every dense parameter, including biases, are in the parameter's precision."""
    torch.manual_seed(0)
    blocks = [Parts(Attention(), fusedmoe.MoELayer(M, gates.TopK(E, 2), experts.SwiGLU(H))) for _ in range(2)]
    others = copy.deepcopy(blocks)
    run = fusedmoe.pipeline(others)
    costs = costs_of(Topology(), 2, others[0].experts.parts, run.routes_first[0])
    run.set_plan(halves(micro_schedule(costs, StepSplit(2, 3, weights=True)).plan()))
    x_BLM, dz_BLM = torch.randn(2, 6, L, M)
    for call in (without_overlap(blocks), run):
        with torch.autocast("cpu", torch.bfloat16):
            z_BLM = call(x_BLM)
        z_BLM.backward(dz_BLM)
    for (dense, _), (other, _) in zip(blocks, others, strict=True):
        for want, got in zip(dense.parameters(), other.parameters(), strict=True):
            assert want.grad is not None and got.grad is not None and got.grad.dtype == torch.float32
            assert (got.grad - want.grad).norm() <= 0.03 * want.grad.norm()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_random_plans_equal_no_overlap(cluster: Cluster, world: int) -> None:
    rng = random.Random()
    for _ in range(12 if world == 1 else 5):
        k, factor = rng.choice([1, 2, 4, 8]), rng.choice([None, 0.5, 1.0, 2.0])
        split = random_split(rng, 2, 8)
        given = split, k, factor
        positions = k, factor, split, rng.randint(1, 3), rng.randint(1, 9), rng.random() < 0.5
        try:
            if world == 1:
                compare_split_with_no_overlap(0, 1, *given)
                compare_along_positions(0, 1, *positions)
            else:
                cluster.run(world, compare_split_with_no_overlap, *given)
                cluster.run(world, compare_along_positions, *positions)
        except AssertionError as error:
            raise AssertionError(f"{given} {positions}") from error


def test_unsupported_plans_are_rejected() -> None:
    run = fusedmoe.pipeline(make_blocks("topk", 2, 1.0, Topology()), (2, 2))
    costs = costs_of(Topology(), 2, run.experts[0].parts, False)  # type: ignore[union-attr, arg-type]
    with pytest.raises(ConfigError, match="permute task"):
        run.set_plan(halves(micro_schedule(costs, StepSplit(2, 2)).plan()))
    with pytest.raises(ConfigError, match="no attention of block 0"):
        run.set_plan(Plans(Plan(), Plan()))
    with pytest.raises(ConfigError, match="fused operations.* use MoELayer.schedule='fused'. without a pipeline"):
        run.set_plan(Plans(*(fused_pass("dispatch-expert-combine", 1, phase) for phase in STAGES)))
    with pytest.raises(ConfigError, match="along"):
        fusedmoe.pipeline([(Attention(), fusedmoe.MoELayer(M, gates.TopK(E), experts.SwiGLU(H)))], along="length")  # type: ignore[list-item, arg-type]


@pytest.mark.parametrize("policy", ["auto", "flowmoe"])
def test_choice_by_prediction_is_first_runnable_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    run = fusedmoe.pipeline(make_blocks("topk", 2, None, Topology()), (3, 3))
    costs = costs_of(run.topology, 2, run.experts[0].parts, run.routes_first[0])
    source = BlocksSource(run, policy, costs, 4)
    ranked = source.candidates()
    seconds = [one.predicted_s for one in ranked]
    assert all(one.uses_micro_batches for one in ranked) and seconds == sorted(seconds)
    PlanChooser(source, steps=None)
    assert run.plans == halves(ranked[0].plan)
    refused, require = halves(ranked[0].plan), PipelinedBlocks.require_runnable

    def require_another(self: PipelinedBlocks, plans: Plans, gradients: object = None) -> None:
        if plans == refused:
            raise ConfigError("not this one")
        require(self, plans)

    monkeypatch.setattr(PipelinedBlocks, "require_runnable", require_another)
    other = fusedmoe.pipeline(make_blocks("topk", 2, None, Topology()), (3, 3))
    own = other.plans
    PlanChooser(BlocksSource(other, policy, costs, 4), steps=None)
    # A named policy has one candidate.
    assert other.plans == (halves(ranked[1].plan) if policy == "auto" else own)
