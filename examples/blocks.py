"""Train a small transformer whose blocks run in micro-batches that overlap across blocks (`fusedmoe.pipeline`).

torchrun --standalone --nproc-per-node 4 examples/blocks.py      # or: python examples/blocks.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fusedmoe
from fusedmoe.training import sync_gradients


class Attention(nn.Module):
    """Return x + attention(x) and the input of the block's experts."""

    def __init__(self, model_dim: int) -> None:
        super().__init__()
        self.norm, self.experts_norm = nn.LayerNorm(model_dim), nn.LayerNorm(model_dim)
        self.qkv, self.out = nn.Linear(model_dim, 3 * model_dim), nn.Linear(model_dim, model_dim)

    def forward(self, x_BLM: Tensor) -> tuple[Tensor, Tensor]:
        q_BLM, k_BLM, v_BLM = self.qkv(self.norm(x_BLM)).chunk(3, dim=-1)
        y_BLM = x_BLM + self.out(F.scaled_dot_product_attention(q_BLM, k_BLM, v_BLM, is_causal=True))
        return y_BLM, self.experts_norm(y_BLM)


def main(steps: int = 60) -> float:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    topology = fusedmoe.Topology.from_sizes(ep=ranks) if ranks > 1 else fusedmoe.Topology()
    torch.manual_seed(0)  # the same parameters on every rank
    blocks = fusedmoe.pipeline(
        [
            (
                Attention(32),
                fusedmoe.MoELayer(
                    32, fusedmoe.gates.TopK(8, k=2), fusedmoe.experts.SwiGLU(64), topology=topology, mp_input="split"
                ),
            )
            for _ in range(2)
        ],
        degrees=(2, 4),  # micro-batches forward and backward
    )
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=3e-3)
    torch.manual_seed(1 + topology.rank)  # different data on every rank
    with topology.guard("training"):
        for step in range(steps):
            x_BLM = torch.randn(8, 16, 32)
            loss = F.mse_loss(blocks(x_BLM), x_BLM.cumsum(1) / 4)
            (loss + 0.01 * sum(layer.aux_loss for layer in blocks.experts)).backward()
            sync_gradients(blocks, topology)
            optimizer.step()
            optimizer.zero_grad()
            if topology.rank == 0 and (step % 20 == 0 or step == steps - 1):
                print(f"step {step:2}  loss {loss.item():.3f}")
    if ranks > 1:
        dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    fusedmoe.keep_memory()
    main()
