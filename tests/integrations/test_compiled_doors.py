"""Experts of Hugging Face and torchtitan with a schedule inside compiled blocks: no break, one graph for all, and the
results without a schedule."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fusedmoe.titan
from fusedmoe import Schedule
from fusedmoe.dispatchers import Assigned
from fusedmoe.hf import ExpertParallel
from tests.cluster import Cluster
from tests.integrations import models, test_titan, test_titan_gpt_oss

# Experts, choices, and Hugging Face's width, as the models here have them.
E, K, WIDTH = 4, 2, 32


def planned(dispatcher: Any) -> None:
    """Has a door's dispatcher work by plans, other numbers of chunks backward."""
    plans = Schedule("fsmoe", (3, 2)).plans(("dispatch", "expert", "combine"), None)
    dispatcher.plans = lambda x_SM, exchange, experts: Assigned(plans)


class HubBlock(nn.Module):
    """A block around Hugging Face's experts, whose router is a product."""

    def __init__(self, family: str, mesh: DeviceMesh, own: DeviceMesh) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, E)
        self.experts = models.make(family, "fusedmoe").model.layers[0].mlp.experts
        for parameter in self.experts.parameters():
            parameter.data = parameter.data.chunk(mesh.size())[mesh.get_local_rank()].clone()
        self.experts.num_experts = E // mesh.size()
        self.door = ExpertParallel(self.experts, mesh, own)
        self.double()

    def forward(self, x_TD: Tensor) -> Tensor:
        h_TD = self.norm(x_TD)
        weight_TK, number_TK = self.router(h_TD).softmax(-1).topk(K)
        return x_TD + self.door(h_TD, number_TK, weight_TK)


class TitanBlock(nn.Module):
    """A block around torchtitan's routed experts."""

    def __init__(self, family: str, mesh: DeviceMesh) -> None:
        super().__init__()
        made = test_titan_gpt_oss.config() if family == "gpt-oss" else test_titan.config().layers[0].moe.routed_experts
        self.experts = experts = test_titan_gpt_oss.made(fusedmoe.titan.routed_experts(made, timeout_s=60.0))
        for parameter in experts.inner_experts.parameters():
            parameter.data = parameter.data.chunk(mesh.size())[mesh.get_local_rank()].clone()
        experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
        self.double()

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_TK, number_TK = x_TD[:, :E].softmax(-1).topk(K)
        y_BTD = self.experts(x_TD[None], weight_TK[None], number_TK[None], x_TD.new_zeros(E))
        return x_TD + y_BTD[0]


def step(blocks: nn.Module, x_TD: Tensor) -> dict[str, Tensor]:
    x_TD = x_TD.detach().requires_grad_()
    blocks.zero_grad(set_to_none=True)
    y_TD = blocks(x_TD)
    y_TD.square().sum().backward()
    assert x_TD.grad is not None
    grads = {name: p.grad for name, p in blocks.named_parameters() if p.grad is not None}
    return {"y": y_TD.detach(), "dx": x_TD.grad, **grads}


def compiled(
    rank: int, world: int, door: str, family: str, count: int, sizes: list[int], shared: bool = False
) -> tuple[int, float]:
    """How many graphs blocks need, compiled one by one, and the largest difference from blocks without a schedule.

    Args:
        shared: the ranks share their batch.
    """
    torch._dynamo.reset()
    mesh, own = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (world, 1), mesh_dim_names=("all", "one"))
    torch.manual_seed(0)
    blocks = nn.Sequential()
    for _ in range(count):
        blocks.append(
            TitanBlock(family, mesh) if door == "titan" else HubBlock(family, mesh, mesh if shared else own["one"])
        )
    off = copy.deepcopy(blocks)
    counter = CompileCounterWithBackend("aot_eager")
    for block in blocks:
        planned(block.experts.token_dispatcher._dispatcher if door == "titan" else block.door._exchange)
        block.compile(backend=counter, fullgraph=True)
    worst = 0.0
    for size in sizes:
        tokens = size if shared else size + 3 * rank
        x_TD = torch.randn(tokens, test_titan.DIM if door == "titan" else WIDTH, dtype=torch.float64)
        ours, right = step(blocks, x_TD), step(off, x_TD)
        assert ours.keys() == right.keys()
        errors = (
            float((ours[name] - right[name]).abs().max() / right[name].abs().max().clamp(min=1)) for name in right
        )
        worst = max(worst, *errors)
    targets = {node.target for graph in counter.graphs for node in graph.graph.nodes}
    assert torch.ops.fusedmoe.scheduled_experts.default in targets
    return counter.frame_count, worst


def test_one_graph_for_both_blocks(cluster: Cluster) -> None:
    for graphs, worst in cluster.run(2, compiled, "hf", "gpt-oss", 2, [9], True):
        assert graphs == 1 and worst < 1e-10, (graphs, worst)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("door", "family", "shared"),
    [("titan", "qwen3", False), ("titan", "gpt-oss", False), ("hf", "mixtral", False), ("hf", "mixtral", True)],
)
def test_one_graph_for_ten_blocks_and_twenty_sizes(
    cluster: Cluster, world: int, door: str, family: str, shared: bool
) -> None:
    # Ranks that share a batch have two tokens each from twice the ranks on.
    first = 2 * world if shared else 2
    sizes = [*range(first, first + 20)]
    for graphs, worst in cluster.run(world, compiled, door, family, 10, sizes, shared, timeout_s=550):
        assert graphs <= 2 and worst < 1e-10, (graphs, worst)
