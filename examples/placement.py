"""Experts that go where their tokens are: owned once in the world, copied for a step to the ranks that ask for them.

    torchrun --standalone --nproc-per-node 4 examples/placement.py

The tokens like some experts more than others, and change their minds. Expert parallelism has the ranks of popular
experts compute while the others wait. Here two lines are different, the layers' `placement` and `ShardedExperts`;
losses and updates stay the same.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedmoe
from fusedmoe.training import ShardedExperts, clip_grad_norm, sync_gradients

WIDTH, EXPERTS, TOKENS = 32, 16, 256


class Model(nn.Module):
    """Two layers of experts behind something that takes time, in which copies travel."""

    def __init__(self, topology: fusedmoe.Topology) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.experts = nn.ModuleList(
            fusedmoe.MoELayer(
                WIDTH,
                fusedmoe.gates.TopK(EXPERTS, k=2),
                fusedmoe.experts.SwiGLU(64),
                topology=topology,
                mp_input="split",
                placement="fssdp",
            )
            for _ in range(2)
        )

    def forward(self, x_SM: Tensor) -> Tensor:
        for before, experts in zip(self.before, self.experts, strict=True):
            x_SM = x_SM + experts(torch.tanh(before(x_SM)))
        return x_SM


def main(steps: int = 12) -> float:
    dist.init_process_group("gloo")
    per_node = max(1, dist.get_world_size() // 2)
    topology = fusedmoe.Topology.from_sizes(ep=dist.get_world_size(), ranks_per_node=per_node)
    torch.manual_seed(0)
    model = Model(topology)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sharded = ShardedExperts(model, optimizer, topology, overlap=6, memory=2)

    likes_M = torch.randn(WIDTH)
    torch.manual_seed(topology.rank)
    for step in range(steps):
        likes_M = likes_M.roll(1) if step % 6 == 5 else likes_M  # they change their minds
        x_SM = torch.randn(TOKENS, WIDTH) + likes_M
        loss = (model(x_SM) - x_SM.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        sync_gradients(model, topology)
        clip_grad_norm(model, topology, 1.0)
        optimizer.step()  # and copies for the next step are chosen
        copies = sum(placement.extra_W().sum() for placement in sharded.placements)
        say(topology, f"step {step + 1}: loss {loss.item():.3f}, {copies} copies")

    for number, placement in enumerate(sharded.placements):  # none on one rank
        say(topology, f"layer {number}, rank by rank (+: a copy)\n{placement}")
    memory = sharded.memory()
    say(topology, f"rank 0: {memory.parameters} bytes of parameters, {memory.replicas} of copies")
    sharded.close()
    dist.destroy_process_group()
    return loss.item()


def say(topology: fusedmoe.Topology, text: str) -> None:
    if topology.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    fusedmoe.keep_memory()
    main()
