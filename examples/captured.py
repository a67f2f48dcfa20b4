"""Compile a plain PyTorch model so that its all-to-alls overlap with computation (`GraphBackend`).

torchrun --standalone --nproc-per-node 2 examples/captured.py      # or: python examples/captured.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single

import fusedmoe


class Experts(nn.Module):
    """Top-1 routing to 4 experts. Each expert takes at most `capacity` tokens of this rank; the rest are dropped."""

    def __init__(self, model_dim: int, hidden: int, capacity: int) -> None:
        super().__init__()
        self.count, self.ranks, self.capacity = 4, dist.get_world_size(), capacity
        self.gate = nn.Linear(model_dim, self.count, bias=False)
        own = self.count // self.ranks
        self.w1_eMH = nn.Parameter(torch.randn(own, model_dim, hidden) / model_dim**0.5)
        self.w2_eHM = nn.Parameter(torch.randn(own, hidden, model_dim) / hidden**0.5)

    def forward(self, x_BLM: Tensor) -> Tensor:
        x_SM = x_BLM.flatten(0, 1)
        weight_S, expert_S = self.gate(x_SM).softmax(-1).max(-1)
        chosen_SE = F.one_hot(expert_S, self.count)
        place_S = (chosen_SE.cumsum(0) * chosen_SE).sum(-1) - 1
        slot_SC = F.one_hot(place_S.clamp(max=self.capacity - 1), self.capacity) * (place_S < self.capacity)[:, None]
        send_SEC = (chosen_SE[:, :, None] * slot_SC[:, None, :]).to(x_SM.dtype)
        rows_ECM = self.across(torch.einsum("sec,sm->ecm", send_SEC, x_SM))
        shape = (self.ranks, self.count // self.ranks, self.capacity, -1)
        rows_eRM = rows_ECM.reshape(shape).transpose(0, 1).flatten(1, 2)
        out_eRM = torch.bmm(F.gelu(torch.bmm(rows_eRM, self.w1_eMH)), self.w2_eHM)
        out_ECM = out_eRM.unflatten(1, (self.ranks, self.capacity)).transpose(0, 1).flatten(0, 1)
        out_SM = torch.einsum("sec,ecm->sm", send_SEC * weight_S[:, None, None], self.across(out_ECM))
        return out_SM.view_as(x_BLM)

    def across(self, rows_ECM: Tensor) -> Tensor:
        return all_to_all_single(rows_ECM, None, None, dist.group.WORLD)


class Block(nn.Module):
    def __init__(self, model_dim: int, capacity: int) -> None:
        super().__init__()
        self.norm, self.experts_norm = nn.LayerNorm(model_dim), nn.LayerNorm(model_dim)
        self.qkv, self.out = nn.Linear(model_dim, 3 * model_dim), nn.Linear(model_dim, model_dim)
        self.experts = Experts(model_dim, 2 * model_dim, capacity)

    def forward(self, x_BLM: Tensor) -> Tensor:
        q_BLM, k_BLM, v_BLM = self.qkv(self.norm(x_BLM)).chunk(3, dim=-1)
        x_BLM = x_BLM + self.out(F.scaled_dot_product_attention(q_BLM, k_BLM, v_BLM, is_causal=True))
        return x_BLM + self.experts(self.experts_norm(x_BLM))


def main(steps: int = 60) -> float:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(Block(32, 64), Block(32, 64))
    # Each capacity slot of `send_SEC` holds at most one token, and only this token reads it back (checked).
    backend = fusedmoe.graph.GraphBackend(own_places=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        x_BLM = torch.randn(8, 16, 32)
        loss = F.mse_loss(compiled(x_BLM), x_BLM.cumsum(1) / 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 20 == 0 or step == steps - 1):
            print(f"step {step:2}  loss {loss.item():.3f}")
    if rank == 0:
        print(*backend.reports, sep="\n")
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    fusedmoe.keep_memory()
    main()
