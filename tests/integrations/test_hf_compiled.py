"""Hugging Face's experts with a schedule inside compiled blocks: one graph for all, the same results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fusedmoe.hf import ExpertParallel
from tests.cluster import Cluster
from tests.integrations import models
from tests.integrations.compiled_blocks import E, K, compare, split_experts

WIDTH = 32


class HubBlock(nn.Module):
    """Block around experts of a family, with a matrix product as router."""

    def __init__(self, family: str, mesh: DeviceMesh, sharing: DeviceMesh) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, E)
        self.experts = models.make(family, "fusedmoe").model.layers[0].mlp.experts
        split_experts(self.experts, mesh.get_local_rank(), mesh.size())
        self.experts.num_experts = E // mesh.size()
        self.door = ExpertParallel(self.experts, mesh, sharing)
        self.double()

    def forward(self, x_TD: Tensor) -> Tensor:
        h_TD = self.norm(x_TD)
        weight_TK, number_TK = self.router(h_TD).softmax(-1).topk(K)
        y_TD: Tensor = x_TD + self.door(h_TD, number_TK, weight_TK)
        return y_TD


def compile_blocks(rank: int, world: int, family: str, shared: bool, count: int, sizes: list[int]) -> tuple[int, float]:
    """Return the graph count and the largest error of the blocks. `shared`: the ranks share their batch."""
    torch.manual_seed(0)
    mesh, own = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (world, 1), mesh_dim_names=("all", "one"))
    blocks: list[nn.Module] = [HubBlock(family, mesh, mesh if shared else own["one"]) for _ in range(count)]
    own_sizes = sizes if shared else [size + 3 * rank for size in sizes]
    return compare(blocks, lambda block: block.door._exchange, WIDTH, own_sizes)


@pytest.mark.slow
def test_two_blocks_compile_to_one_graph(cluster: Cluster) -> None:
    for graphs, worst in cluster.run(2, compile_blocks, "gpt-oss", True, 2, [9]):
        assert graphs == 1 and worst < 1e-10, (graphs, worst)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "count"), [(2, 4), (4, 2)])
@pytest.mark.parametrize(("family", "shared"), [("mixtral", False), ("mixtral", True), ("gpt-oss", False)])
def test_blocks_with_dynamic_sizes_share_compiled_graph(
    cluster: Cluster, world: int, count: int, family: str, shared: bool
) -> None:
    # Each rank has at least two tokens of a shared batch: zero and one token need separate graphs.
    sizes = [size * (world if shared else 1) for size in range(2, 22, 3)]
    for graphs, worst in cluster.run(world, compile_blocks, family, shared, count, sizes, timeout_s=550):
        assert graphs <= 2 and worst < 1e-10, (graphs, worst)
