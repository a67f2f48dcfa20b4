"""Masks and replayed experts in micro-batches: results equal those of the blocks without overlap."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe import ConfigError, Topology, routing
from fusedmoe.blocks.pipeline import Parts
from fusedmoe.schedule.cost import CostModel, Line
from fusedmoe.schedule.task import PHASES
from tests.cluster import Cluster
from tests.layers.test_pipeline import GATES, Attention, E, H, L, M, make_blocks
from tests.marks import slowly
from tests.oracle import Results, assert_same_results, run_passes

K = 2


def run_sequentially(blocks: list[Parts], x: Tensor, mask: Tensor | None) -> Tensor:
    for dense, layer in blocks:
        x, u = dense(x)
        x = x + layer(u, mask)
    return x


def step(run: Any, blocks: list[Parts], x: Tensor, seed: int) -> Results:
    modules = nn.ModuleList([module for block in blocks for module in block])
    return run_passes(modules, x, call=run, aux=1.0, seed=seed)


def assert_same(found: Results, wanted: Results) -> None:
    assert_same_results(found, wanted, 1e-12, none_is_zero=True)


def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, L, M, generator=generator, dtype=torch.float64)
    return x, torch.arange(L) < torch.randint(0, L + 1, (samples, 1), generator=generator)


def blocks_of(gate: str, factor: float | None, topology: Topology, einsum: bool, mp_input: Any) -> list[Parts]:
    """Build blocks with shared experts."""
    torch.manual_seed(0)
    return [
        Parts(
            Attention().double(),
            fusedmoe.MoELayer(
                M, GATES[gate](K, factor), fusedmoe.experts.SwiGLU(H), topology=topology, mp_input=mp_input,
                shared=fusedmoe.experts.SwiGLU(3), order=fusedmoe.orders.Einsum() if einsum else None,
                dtype=torch.float64,
            ),
        )
        for _ in range(2)
    ]  # fmt: skip


def compare_masked(
    data: int,
    topology: Topology,
    gate: str,
    factor: float | None,
    degrees: Any,
    recompute: bool = False,
    einsum: bool = False,
    mp_input: Any = "split",
) -> None:
    blocks = blocks_of(gate, factor, topology, einsum, mp_input)
    others = copy.deepcopy(blocks)
    pipeline = fusedmoe.pipeline(others, degrees, recompute=recompute)
    for samples, seed in ((5, 1), (4, 4), (1, 2), (0, 3)):
        x, mask = batch(samples, 10 * seed + data)
        wanted = step(lambda x, mask=mask: run_sequentially(blocks, x, mask), blocks, x, seed)
        assert_same(step(lambda x, mask=mask: pipeline(x, mask), others, x, seed), wanted)
        if samples == 5:
            assert not torch.equal(step(pipeline, others, x, seed)["load"], wanted["load"])


@pytest.mark.parametrize(
    ("gate", "factor", "degrees", "recompute"),
    [
        pytest.param(*gate, *how, marks=() if place == number else pytest.mark.slow)
        for place, gate in enumerate([("noisy", 0.7), ("gshard", None), ("hash", 0.8), ("random", None)])
        for number, how in enumerate(itertools.product([(2, 2), (2, 3)], [False, True]))
    ],
)
def test_masked_pipeline_equals_no_overlap(
    gate: str, factor: float | None, degrees: tuple[int, int], recompute: bool
) -> None:
    compare_masked(0, Topology(), gate, factor, degrees, recompute)


def compare_masked_on_rank(rank: int, world: int, ep: int, mp: int) -> None:
    topology = Topology.from_sizes(ep, mp=mp)
    data, mp_input = rank // mp, "replicated" if mp > 1 else "split"
    for factor, degrees, einsum in ((0.7, (2, 3), False), (None, (2, 2), True)):
        compare_masked(data, topology, "topk", factor, degrees, einsum=einsum, mp_input=mp_input)


@pytest.mark.parametrize(("ep", "mp"), [(2, 1), *slowly((1, 2))])
def test_masked_pipeline_on_two_ranks(cluster: Cluster, ep: int, mp: int) -> None:
    cluster.run(2, compare_masked_on_rank, ep, mp)


@pytest.mark.slow
@pytest.mark.parametrize(("ep", "mp"), [(4, 1), (2, 2)])
def test_masked_pipeline_on_four_ranks(cluster: Cluster, ep: int, mp: int) -> None:
    cluster.run(4, compare_masked_on_rank, ep, mp)


def test_masked_pipeline_without_plans() -> None:
    blocks = make_blocks("topk", K, 0.8, Topology())
    others = copy.deepcopy(blocks)
    pipeline = fusedmoe.pipeline(others)
    pipeline.set_plan(None)
    x, mask = batch(4, 1)
    assert_same(
        step(lambda x: pipeline(x, mask), others, x, 1), step(lambda x: run_sequentially(blocks, x, mask), blocks, x, 1)
    )


def test_pipeline_rejects_mask_of_wrong_shape() -> None:
    pipeline = fusedmoe.pipeline(make_blocks("topk", K, None, Topology()))
    with pytest.raises(
        ConfigError, match=r"pipeline got a mask that is torch.bool \[4, 4\]; it takes booleans \[4, 5\]"
    ):
        pipeline(batch(4, 1)[0], torch.ones(4, 4).bool())


def test_costs_of_dense_parts_contain_the_shared_expert() -> None:
    blocks = blocks_of("topk", None, Topology(), False, "split")
    x, costs = torch.empty(4, L, M, dtype=torch.float64), CostModel({"gemm": Line(1e-6, 1e-12)})
    shared = fusedmoe.pipeline(blocks).workload(x)
    plain = fusedmoe.pipeline(make_blocks("topk", K, None, Topology())).workload(x)
    assert shared.dense is not None and shared.dense.feed_forward == 3 * M * 3
    for phase, times in zip(PHASES, (1, 2), strict=True):
        with_s, without_s = (each.layer_costs(costs).dense_total_s(phase) for each in (shared, plain))
        assert with_s - without_s == pytest.approx(times * 1e-12 * 2 * 4 * L * 3 * M * 3)


def random_choices_for(blocks: list[Parts], count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    given = [torch.rand(count, E, generator=generator).topk(K).indices for _ in blocks]
    given[0][: count // 3] = -1
    return given


def compare_replayed(rank: int, topology: Topology, gate: str, recompute: bool, around: bool) -> None:
    blocks = make_blocks(gate, K, 0.8, topology)
    others = copy.deepcopy(blocks)
    pipeline = fusedmoe.pipeline(others, (2, 3), recompute=recompute)
    layers = nn.ModuleList([block.experts for block in blocks])
    x, mask = batch(5, rank)
    for masking in (None, mask):
        count = 5 * L if masking is None else int(mask.sum())
        given = random_choices_for(blocks, count, rank)
        with routing.replay(layers, given), routing.record(layers) as wanted_choices:
            wanted = step(lambda x, masking=masking: run_sequentially(blocks, x, masking), blocks, x, 1)

        def run(x: Tensor, masking: Tensor | None = masking) -> Tensor:
            return checkpoint(pipeline, x, masking, use_reentrant=False) if around else pipeline(x, masking)

        with routing.replay(pipeline, given), routing.record(pipeline) as choices:
            found = step(run, others, x, 1)
        assert_same(found, wanted)
        for one, other, own in zip(choices.values(), wanted_choices.values(), given, strict=True):
            assert torch.equal(one, other) and torch.equal(one.long()[count // 3 :], own[count // 3 :])


@pytest.mark.parametrize(
    ("gate", "recompute", "around"),
    [
        *(("noisy", False, False), ("noisy", True, False), ("random", False, True)),
        *slowly(("random", False, False), ("random", True, False), ("noisy", False, True)),
    ],
)
def test_replay_in_pipeline_equals_no_overlap(gate: str, recompute: bool, around: bool) -> None:
    assert gate in GATES
    compare_replayed(0, Topology(), gate, recompute, around)


def compare_replayed_on_rank(rank: int, world: int) -> None:
    compare_replayed(rank, Topology.from_sizes(world), "topk", True, False)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_replay_in_pipeline_on_ranks(cluster: Cluster, world: int) -> None:
    cluster.run(world, compare_replayed_on_rank)
