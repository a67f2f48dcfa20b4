"""Train an MoE layer on four ranks.

    torchrun --standalone --nproc-per-node 4 examples/parallel.py

Experts are split over EP = 2 (two nodes), and each expert's hidden dimension over ESP = 2 (the ranks of a node). Every
rank has different tokens, and a different number of them.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import fusedmoe
from fusedmoe import training


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    topology = fusedmoe.Topology.from_sizes(ep=2, esp=2, ranks_per_node=2)

    # With the same seed, all ranks hold parts of the same model.
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32),
        fusedmoe.MoELayer(
            model_dim=32,
            gate=fusedmoe.gates.TopK(experts=8, k=2, capacity_factor=1.25),
            experts=fusedmoe.experts.SwiGLU(hidden=64),
            topology=topology,
        ),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # If this rank fails inside, the other ranks raise an error that names it at once.
    with topology.guard("the training loop"):
        torch.manual_seed(1 + topology.rank)
        for step in range(5):
            x_SM = torch.randn(100 + 10 * topology.rank, 16, device=device)
            loss = model(x_SM).square().mean() + 0.01 * model[1].aux_loss
            loss.backward()
            # Average expert gradients over ranks with the same shard, and all other gradients over all ranks.
            training.sync_gradients(model, topology)
            norm = training.clip_grad_norm(model, topology, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            if topology.rank == 0:
                held = tuple(model[1].experts.w1.shape)
                print(f"step {step}  loss {loss.item():.4f}  gradient norm {norm.item():.4f}  w1 on this rank {held}")
    dist.destroy_process_group()


if __name__ == "__main__":
    fusedmoe.keep_memory()
    main()
