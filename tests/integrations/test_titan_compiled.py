"""Torchtitan's experts with a schedule inside compiled blocks: no graph break, one graph for all, the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.cluster import Cluster
from tests.integrations.compiled_blocks import E, K, compare, planned, split_experts

pytest.importorskip(
    "torchtitan.distributed.fsdp",
    reason="torchtitan is not installed, or needs a newer PyTorch",
    exc_type=ImportError,
)

from torchtitan.config import CompileConfig

import fusedmoe.titan
from tests.integrations import test_titan, test_titan_gpt_oss


class TitanBlock(nn.Module):
    """Block around routed experts; a token's first values select its experts."""

    def __init__(self, family: str, mesh: DeviceMesh) -> None:
        super().__init__()
        cfg = test_titan_gpt_oss.config() if family == "gpt-oss" else test_titan.config().layers[0].moe.routed_experts
        self.experts = test_titan_gpt_oss.build_module(fusedmoe.titan.routed_experts(cfg, timeout_s=60.0))
        split_experts(self.experts.inner_experts, mesh.get_local_rank(), mesh.size())
        self.experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
        self.double()

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_TK, number_TK = x_TD[:, :E].softmax(-1).topk(K)
        y_TD: Tensor = x_TD + self.experts(x_TD[None], weight_TK[None], number_TK[None], x_TD.new_zeros(E))[0]
        return y_TD


def compile_blocks(rank: int, world: int, family: str, count: int, sizes: list[int]) -> tuple[int, float]:
    """Return the graph count and the largest error of the blocks."""
    mesh = init_device_mesh("cpu", (world,))
    blocks: list[nn.Module] = [TitanBlock(family, mesh) for _ in range(count)]
    own_sizes = [size + 3 * rank for size in sizes]
    return compare(blocks, lambda block: block.experts.token_dispatcher.exchange, test_titan.DIM, own_sizes)


@pytest.mark.slow
def test_two_blocks_compile_to_one_graph(cluster: Cluster) -> None:
    for graphs, worst in cluster.run(2, compile_blocks, "qwen3", 2, [9]):
        assert graphs == 1 and worst < 1e-10, (graphs, worst)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "count"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("family", ["qwen3", "gpt-oss"])
def test_blocks_with_dynamic_sizes_share_compiled_graph(cluster: Cluster, world: int, count: int, family: str) -> None:
    for graphs, worst in cluster.run(world, compile_blocks, family, count, [*range(2, 22, 3)], timeout_s=550):
        assert graphs <= 2 and worst < 1e-10, (graphs, worst)


def compile_by_torchtitan(rank: int, world: int, backend: str) -> tuple[int, float]:
    """Let torchtitan compile its blocks, with FSDP or replicated; return the graph count and the error.

    The error is the largest difference from eager blocks without a schedule.
    """
    right = test_titan.steps_on_ranks(rank, world, "fusedmoe.titan.routed_experts", 2, backend)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    wire = fusedmoe.titan.TokenDispatcher.init_buffer

    def wired(self: Any) -> None:
        wire(self)
        if self.ep_mesh is not None:
            planned(self.exchange)

    by_blocks = CompileConfig(enable=True, components=["model"], backend="aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusedmoe.titan.TokenDispatcher, "init_buffer", wired)
        patch.setattr(test_titan, "CompileConfig", lambda: by_blocks)
        ours = test_titan.steps_on_ranks(rank, world, "fusedmoe.titan.routed_experts", 2, backend)
    assert ours["calls"]["dispatch"] > right["calls"]["dispatch"]  # in chunks
    for loss, wanted in zip(ours["losses"], right["losses"], strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)
    assert ours["grads"].keys() == right["grads"].keys()
    errors = (float((ours["grads"][name] - grad).abs().max()) for name, grad in right["grads"].items())
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], max(errors)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("backend", ["spmd_types", "partial_dtensor"])
def test_blocks_compiled_by_torchtitan_equal_eager(cluster: Cluster, backend: str) -> None:
    """In float32, as in torchtitan's training; single blocks are compared in float64."""
    for graphs, worst in cluster.run(2, compile_by_torchtitan, backend, timeout_s=550):
        assert graphs <= 2 and worst < 1e-5, (graphs, worst)
