"""Train with expert placement: each expert has one owner, and popular experts are replicated for one step.

    torchrun --standalone --nproc-per-node 4 examples/placement.py

Loads are skewed and change over time. With expert parallelism, ranks wait for the owners of popular experts. Two lines
differ from expert parallelism: the layers' `placement` and `ShardedExperts`. Losses and updates do not change.
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
    """Two MoE layers, each after a dense layer that overlaps with the sending of replicas."""

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

    bias_M = torch.randn(WIDTH)  # makes some experts popular
    torch.manual_seed(topology.rank)
    for step in range(steps):
        bias_M = bias_M.roll(1) if step % 6 == 5 else bias_M  # other experts become popular
        x_SM = torch.randn(TOKENS, WIDTH) + bias_M
        loss = (model(x_SM) - x_SM.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        sync_gradients(model, topology)
        clip_grad_norm(model, topology, 1.0)
        optimizer.step()  # also chooses the replicas of the next step
        replicas = sum(placement.extra_W().sum() for placement in sharded.placements)
        say(topology, f"step {step + 1}: loss {loss.item():.3f}, {replicas} replicas")

    for number, placement in enumerate(sharded.placements):  # empty on one rank
        say(topology, f"layer {number}, per rank (+: a replica)\n{placement}")
    memory = sharded.memory()
    say(topology, f"rank 0: {memory.parameters} bytes of parameters, {memory.replicas} of replicas")
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
