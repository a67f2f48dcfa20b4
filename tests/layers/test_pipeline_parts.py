"""Blocks support each option of a single layer: hooks, tokens shared in an MP group, orders by products."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import ConfigError, experts, gates, orders
from fusedmoe.autograd.parallel import MpInput, sum_gradient
from fusedmoe.blocks.pipeline import Parts
from fusedmoe.comm.topology import Topology
from fusedmoe.gates.base import Routing
from fusedmoe.hooks import HookContext, Hooks, WireCast
from fusedmoe.kernels.wire import pack_fp8, unpack_fp8
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from tests.cluster import Cluster
from tests.layers.test_hooks import SEAMS, Note
from tests.layers.test_pipeline import LAYERS, Attention, Double, E, H, L, M
from tests.layers.test_pipeline_plans import Causal, costs_of, halves
from tests.marks import slowly


def make(
    topology: Topology,
    dense: Callable[[], nn.Module] = Attention,
    network: Callable[[], experts.Experts] = lambda: experts.SwiGLU(H),
    *,
    k: int = 2,
    factor: float | None = None,
    shared: bool = False,
    mp_input: MpInput = "split",
    **options: Any,
) -> list[Parts]:
    torch.manual_seed(0)
    return [
        Parts(
            dense().double(),
            fusedmoe.MoELayer(
                M,
                gates.TopK(E, k, factor, noise=1.0, aux={"balance": 0.5, "z": 0.1}),
                network(),
                topology=topology,
                shared=experts.SwiGLU(3) if shared else None,
                mp_input=mp_input,
                dtype=torch.double,
                **options,
            ),
        )
        for _ in range(LAYERS)
    ]


def run_without_micro_batches(blocks: list[Parts]) -> Callable[[Tensor], Tensor]:
    """Run without overlap, whatever the dense parts return besides y and u."""

    def run(x_BLM: Tensor) -> Tensor:
        for dense, layer in blocks:
            x_BLM, u_BLM, *_ = dense(x_BLM)
            x_BLM = x_BLM + layer(u_BLM)
        return x_BLM

    return run


def train(run: Callable[[Tensor], Tensor], blocks: list[Parts], batch: int, seed: int, rank: int) -> list[Tensor]:
    """Return losses, results, gradients, drops and parameters of two steps. MP ranks share a seed."""
    modules = nn.ModuleList([module for block in blocks for module in block])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)
    found: list[Tensor] = []
    for step in range(2):
        torch.manual_seed(100 * step + seed)
        x_BLM = torch.randn(batch, L, M, dtype=torch.double, requires_grad=True)
        weight_BLM = torch.randn(batch, L, M, dtype=torch.double)
        torch.manual_seed(7 * step + rank)  # for the gates' noise
        z_BLM = run(x_BLM)
        loss = (z_BLM * weight_BLM).sum() / 10 + sum(block.experts.aux_loss for block in blocks)
        optimizer.zero_grad()
        loss.backward()
        assert x_BLM.grad is not None
        found += [loss.detach(), z_BLM.detach(), x_BLM.grad]
        found += [torch.zeros(()) if one.grad is None else one.grad.clone() for one in modules.parameters()]
        found += [torch.tensor(block.experts.dropped) for block in blocks]
        found += [block.experts.load_E.clone() for block in blocks]
        optimizer.step()
    return found + [parameter.detach().clone() for parameter in modules.parameters()]


def same(blocks: list[Parts], run: Callable[[Tensor], Tensor], of: list[Parts], batch: int) -> None:
    """Compare micro-batches, through `run` of a copy of the blocks, with the blocks without overlap."""
    topology = blocks[0].experts.topology
    given = batch, topology.rank // topology.mp.size, topology.rank
    for one, other in zip(
        train(run, of, *given), train(run_without_micro_batches(blocks), blocks, *given), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def compare_with_no_overlap(
    rank: int, world: int, sizes: dict[str, int], degrees: tuple[int, int], batches: tuple[int, ...],
    options: dict[str, Any], **how: Any,
) -> None:  # fmt: skip
    """`batches`: sizes per MP group. With `weights`, weight gradients are separate tasks."""
    topology = Topology.from_sizes(**sizes, timeout_s=30) if world > 1 else Topology()
    dense: Callable[[], nn.Module] = Causal if how.get("along") == "positions" else Attention
    if options.get("mp_input") == "partial":
        dense = partial(Summands, topology)
    blocks = make(topology, dense, **options)
    others = copy.deepcopy(blocks)
    weights = how.pop("weights", False)
    run = fusedmoe.pipeline(others, degrees, **how)
    if weights:
        costs = costs_of(topology, 2, others[0].experts.parts, run.routes_first[0])
        run.set_plan(halves(micro_schedule(costs, StepSplit(*degrees, weights=True)).plan()))
    same(blocks, run, others, batches[rank // topology.mp.size])


# Hooks.


class Packed(Hooks):
    """Sends rows in another dtype and width."""

    def before_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        context.memory[self] = rows.dtype
        return pack_fp8(rows)

    def after_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        return unpack_fp8(rows, context.memory[self])

    before_combine, after_combine = before_dispatch, after_dispatch

    def __repr__(self) -> str:
        return "Packed()"


class Bend(Hooks):
    """Bend a layer's inputs and outputs in forward, and scale their gradients."""

    def __repr__(self) -> str:
        return "Bend()"  # part of a test's name, equal in every process

    def before_moe_start(self, x: Tensor, context: HookContext) -> Tensor:
        return 3 * x if context.direction == "forward" else 0.5 * x

    def before_moe_end(self, y: Tensor, context: HookContext) -> Tensor:
        return y.tanh() if context.direction == "forward" else 2 * y


@pytest.mark.parametrize("degrees", [(3, 2), *slowly(((1, 1),))])
@pytest.mark.parametrize(
    "options", [{"hooks": [Bend()], "shared": True}, {"hooks": [Bend(), WireCast()], "factor": 0.8}], ids=str
)
def test_pipeline_hooks_equal_no_overlap(degrees: tuple[int, int], options: dict[str, Any]) -> None:
    compare_with_no_overlap(0, 1, {}, degrees, (5,), options)


def test_pipeline_hooks_with_autograd_experts() -> None:
    compare_with_no_overlap(0, 1, {}, (3, 3), (5,), {"hooks": [Packed()], "network": Double})


@pytest.mark.parametrize("how", [{"recompute": True}, {"along": "positions"}], ids=str)
def test_pipeline_hooks_with_recompute_and_positions(how: dict[str, Any]) -> None:
    compare_with_no_overlap(0, 1, {}, (2, 3), (5,), {"hooks": [Bend(), WireCast()]}, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        *(pytest.param(2, sizes, marks=pytest.mark.slow) for sizes in ({"ep": 2}, {"esp": 2})),
        (4, {"ep": 2, "esp": 2}),
    ],
    ids=str,
)
def test_pipeline_hooks_on_ranks(cluster: Cluster, world: int, sizes: dict[str, int]) -> None:
    cluster.run(
        world, compare_with_no_overlap, sizes, (3, 2), (5, 4, 0, 1), {"hooks": [Packed(), Bend()], "factor": 1.0}
    )


def check_hook_calls(rank: int, world: int, degree: int) -> None:
    """Every micro-batch passes all seams in the layer's order, with its part of the whole batch's tensors."""
    topology = Topology.from_sizes(ep=world, timeout_s=30) if world > 1 else Topology()
    logs: list[list[tuple[str, Any, HookContext, Tensor]]] = [[], []]
    for log, of in zip(
        logs, (run_without_micro_batches, lambda blocks: fusedmoe.pipeline(blocks, (degree, degree))), strict=True
    ):
        blocks = [make(topology, hooks=[Note(log, str(number))])[number] for number in range(LAYERS)]
        torch.manual_seed(rank)
        of(blocks)(torch.randn(6, L, M, dtype=torch.double)).square().sum().backward()
    found: list[dict[Any, Tensor]] = []
    for log, count in zip(logs, (1, degree), strict=True):
        assert all(context.chunks == count for _, _, context, _ in log)
        seams: dict[Any, list[str]] = defaultdict(list)
        tensors: dict[Any, list[Tensor]] = defaultdict(list)
        # Backward takes chunks from the end, and numbers them in that order at the communication seams.
        for seam, name, context, tensor in log:
            travels, backward = seam in SEAMS[1:5], context.direction == "backward"
            chunk = count - 1 - context.chunk if travels and backward else context.chunk
            seams[name, context.direction, chunk].append(seam)
            tensors[seam, name, context.direction, chunk] = [tensor]
        assert len(seams) == 2 * LAYERS * count and all(one == SEAMS for one in seams.values())
        whole_of: dict[Any, list[Tensor]] = defaultdict(list)
        for key in sorted(tensors):
            whole_of[key[:3]] += tensors[key]
        found.append({key: torch.cat(of_chunks) for key, of_chunks in whole_of.items()})
    for key, want in found[0].items():
        got = found[1][key]
        if key[0] in SEAMS[1:5] and degree > 1:  # rows, which each micro-batch sorts by expert
            want, got = (rows[rows[:, 0].argsort()] for rows in (want, got))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    if degree == 1:
        assert [note[:2] for note in logs[1]] == [note[:2] for note in logs[0]]


@pytest.mark.parametrize("degree", [3, *slowly(1)])
def test_hooks_receive_each_micro_batch(cluster: Cluster, degree: int) -> None:
    check_hook_calls(0, 1, degree)
    cluster.run(2, check_hook_calls, degree)


class Flat(Hooks):
    def before_moe_start(self, x: Tensor, context: HookContext) -> Tensor | None:
        return x.flatten(0, 1) if context.direction == "forward" else None


def test_hooks_changing_token_shape_are_rejected() -> None:
    run = fusedmoe.pipeline(make(Topology(), hooks=[Flat()]))
    with pytest.raises(ConfigError, match=rf"before_moe_start made \[{2 * L}, {M}\] of \[2, {L}, {M}\].*schedule="):
        run(torch.randn(2, L, M, dtype=torch.double))


# Tokens shared in an MP group.


class Summands(Attention):
    """Tensor parallelism: each MP rank returns a summand of the experts' input."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.mp = topology.mp
        self.weight = nn.Parameter(torch.randn(topology.mp.size, M))

    def forward(self, x_BLM: Tensor) -> tuple[Tensor, Tensor]:
        y_BLM, u_BLM = super().forward(x_BLM)
        return y_BLM, sum_gradient(u_BLM, self.mp) * self.weight[self.mp.index]


@pytest.mark.parametrize(
    ("degrees", "batch", "options", "how", "mp_input"),
    [
        pytest.param(*of, mp_input, marks=() if (place, number) == (1, 1) else pytest.mark.slow)
        for place, of in enumerate(
            (
                ((1, 1), 4, {}, {}),
                ((3, 2), 6, {"factor": 0.8, "k": 1, "shared": True}, {}),
                ((2, 3), 5, {"factor": 0.8}, {"recompute": True}),
                ((2, 2), 1, {"hooks": [Bend(), WireCast()]}, {}),
            )
        )
        for number, mp_input in enumerate(("replicated", "partial"))
    ],
    ids=str,
)
def test_shared_mp_tokens_equal_no_overlap(
    cluster: Cluster, degrees: tuple[int, int], batch: int, options: dict[str, Any], how: dict[str, Any], mp_input: str
) -> None:
    given = {"mp": 2, "ep": 2}, degrees, (batch,), {**options, "mp_input": mp_input}
    cluster.run(2, partial(compare_with_no_overlap, **how), *given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"mp": 2, "ep": 2, "esp": 2},
        *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ({"mp": 4, "ep": 2}, {"mp": 2, "ep": 4})),
    ],
    ids=str,
)
def test_shared_mp_tokens_on_four_ranks(cluster: Cluster, sizes: dict[str, int]) -> None:
    options = {"mp_input": "replicated", "factor": 1.0, "shared": True}
    cluster.run(4, compare_with_no_overlap, sizes, (3, 2), (4, 3), options)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [3, *slowly(2)])
def test_shared_mp_tokens_split_along_positions(cluster: Cluster, batch: int) -> None:
    options = {"mp_input": "replicated", "factor": 0.8}
    cluster.run(2, partial(compare_with_no_overlap, along="positions"), {"mp": 2, "ep": 2}, (2, 3), (batch,), options)


def make_mixed_mp_input(rank: int, world: int) -> None:
    topology = Topology.from_sizes(mp=world, ep=world, timeout_s=30)
    fusedmoe.pipeline([*make(topology), *make(topology, mp_input="replicated")])


def run_unequal_mp_tokens(rank: int, world: int) -> None:
    topology = Topology.from_sizes(mp=world, ep=world, timeout_s=30)
    fusedmoe.pipeline(make(topology, mp_input="replicated"))(torch.randn(2 + rank, L, M, dtype=torch.double))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (make_mixed_mp_input, "block 2: either all blocks have mp_input='split', or none"),
        (
            run_unequal_mp_tokens,
            f"needs equal tokens .* {2 * L} tokens of 64-bit numbers on rank 0, {3 * L} tokens of 64-bit numbers on",
        ),
    ],
)
def test_inconsistent_mp_tokens_are_rejected(cluster: Cluster, function: Callable[..., None], text: str) -> None:
    for outcome in cluster.outcomes(2, function):
        assert outcome.error is not None and re.search(text, outcome.error[1]), outcome.error


# Orders by products.


class Halved(orders.Order):
    """User-defined order: rows are computed from tokens, and experts weigh them."""

    def _order(self, x_SM: Tensor, routing: Routing, experts: int) -> orders.Ordered:
        ordered = super()._order(x_SM, routing, experts)
        return replace(ordered, x_SM=x_SM * 0.5)


@pytest.mark.parametrize(
    ("order", "options"),
    [
        (orders.Einsum, {"factor": 0.8, "shared": True}),
        (Halved, {"hooks": [Bend()]}),
        *slowly((Halved, {"factor": 0.8, "shared": True}), (orders.Einsum, {"hooks": [Bend()]})),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", [{"along": "positions", "recompute": True}, *slowly({})], ids=str)
def test_layout_orders_equal_no_overlap(
    order: type[orders.Order], options: dict[str, Any], how: dict[str, Any]
) -> None:
    compare_with_no_overlap(0, 1, {}, (3, 2), (5,), {**options, "order": order()}, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [pytest.param({"ep": 2, "esp": 2}, marks=pytest.mark.slow), {"ep": 2, "mp": 2}], ids=str
)
def test_layout_orders_on_ranks(cluster: Cluster, sizes: dict[str, int]) -> None:
    options = {"order": orders.Einsum(), "factor": 0.8, "mp_input": "replicated"}
    cluster.run(4, compare_with_no_overlap, sizes, (3, 2), (4, 3, 0, 1), options)


# Experts that move between ranks.


@pytest.mark.parametrize(
    ("world", "sizes", "network"),
    [
        (2, {"ep": 2}, Double),
        *slowly((2, {"ep": 2}, experts.SwiGLU), (4, {"ep": 2, "esp": 2}, experts.SwiGLU)),  # Double has no shards
    ],
    ids=str,
)
def test_pipeline_with_placement_equals_no_overlap(
    cluster: Cluster, world: int, sizes: dict[str, int], network: type[experts.Experts]
) -> None:
    """Without a training step experts stay in place; `tests/training/test_sharded_experts.py` covers moves."""
    made = partial(network, H) if network is experts.SwiGLU else network
    options = {"placement": "fssdp", "network": made, "factor": 0.8, "hooks": [Bend()]}
    cluster.run(world, compare_with_no_overlap, sizes, (3, 3), (5, 4, 0, 1), options)


@pytest.mark.parametrize("options", [{"placement": "fssdp"}, *slowly({"order": orders.Einsum()})], ids=str)
def test_all_pipeline_options_combined(cluster: Cluster, options: dict[str, Any]) -> None:
    """All options combined, also with separate weight gradients."""
    more = {"hooks": [Bend(), WireCast()], "shared": True, "factor": 0.8, "mp_input": "replicated"}
    given = {"ep": 2, "mp": 2}, (2, 3), (4, 3), {**options, **more}
    cluster.run(4, partial(compare_with_no_overlap, weights=True), *given)
