"""Third-party style model: blocks in plain torch, rows exchanged by functional collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single


class GShard(nn.Module):
    """Top-k gating with a capacity, dispatch and combine by one-hot products, experts over all ranks.

    Args:
        chooses: "top", "switch" (the best one), "hash" (by position), "random".
    """

    def __init__(self, model_dim: int, hidden: int, experts: int, k: int, factor: float, chooses: str = "top") -> None:
        super().__init__()
        self.experts, self.k, self.factor, self.chooses = experts, k, factor, chooses
        self.gate = nn.Linear(model_dim, experts, bias=False)
        own = experts // dist.get_world_size()
        self.w1_eMH = nn.Parameter(torch.randn(own, model_dim, hidden) / model_dim**0.5)
        self.w2_eHM = nn.Parameter(torch.randn(own, hidden, model_dim) / hidden**0.5)

    def forward(self, x_BLM: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        x_SM = x_BLM.reshape(-1, x_BLM.shape[-1])
        tokens, model_dim, k, experts = *x_SM.shape, self.k, self.experts
        capacity = int(self.factor * k * tokens / experts)
        weight_SK, expert_SK = self.choose(self.gate(x_SM).softmax(-1))
        mask_SKE = F.one_hot(expert_SK, experts).to(x_SM.dtype)
        place_SKE = (mask_SKE.transpose(0, 1).reshape(-1, experts).cumsum(0) - 1).reshape(k, tokens, experts)
        place_SKE = place_SKE.transpose(0, 1)
        kept_SKE = mask_SKE * (place_SKE < capacity)
        place_SK = (place_SKE * mask_SKE).sum(-1).long().clamp(max=capacity - 1)
        slot_SKC = F.one_hot(place_SK, capacity).to(x_SM.dtype)
        combine_SEC = torch.einsum("ske,skc,sk->sec", kept_SKE, slot_SKC, weight_SK)
        rows_ECM = torch.einsum("sec,sm->ecm", (combine_SEC > 0).to(x_SM.dtype), x_SM)
        rows_ECM = all_to_all_single(rows_ECM, None, None, dist.group.WORLD)
        own = experts // ranks
        rows_eRM = rows_ECM.reshape(ranks, own, capacity, model_dim).transpose(0, 1).reshape(own, -1, model_dim)
        out_eRM = torch.bmm(F.gelu(torch.bmm(rows_eRM, self.w1_eMH)), self.w2_eHM)
        out_ECM = out_eRM.reshape(own, ranks, capacity, model_dim).transpose(0, 1).reshape(experts, capacity, model_dim)
        out_ECM = all_to_all_single(out_ECM, None, None, dist.group.WORLD)
        return torch.einsum("sec,ecm->sm", combine_SEC, out_ECM).reshape(x_BLM.shape)

    def choose(self, score_SE: Tensor) -> tuple[Tensor, Tensor]:
        if self.chooses == "switch":
            weight_S, expert_S = score_SE.max(-1)
            return weight_S[:, None], expert_S[:, None]
        if self.chooses == "top":
            return score_SE.topk(self.k, -1)  # type: ignore[return-value]
        if self.chooses == "hash":
            expert_SK = (3 * torch.arange(len(score_SE))[:, None] + torch.arange(self.k)) % self.experts
        else:
            expert_SK = torch.rand(score_SE.shape, device=score_SE.device).topk(self.k, -1).indices
        return score_SE.gather(1, expert_SK), expert_SK


class Block(nn.Module):
    def __init__(self, model_dim: int, k: int, factor: float = 1.0, chooses: str = "top") -> None:
        super().__init__()
        self.norm, self.experts_norm = nn.LayerNorm(model_dim), nn.LayerNorm(model_dim)
        self.qkv, self.out = nn.Linear(model_dim, 3 * model_dim), nn.Linear(model_dim, model_dim)
        self.moe = GShard(model_dim, 2 * model_dim, 4, k, factor, chooses)

    def forward(self, x_BLM: Tensor) -> Tensor:
        q_BLM, k_BLM, v_BLM = self.qkv(self.norm(x_BLM)).chunk(3, -1)
        y_BLM = x_BLM + self.out(F.scaled_dot_product_attention(q_BLM, k_BLM, v_BLM, is_causal=True))
        return y_BLM + self.moe(self.experts_norm(y_BLM))


class Model(nn.Module):
    def __init__(
        self, k: int = 1, blocks: int = 2, model_dim: int = 8, factor: float = 1.0, chooses: str = "top"
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, model_dim)
        self.blocks = nn.ModuleList(Block(model_dim, k, factor, chooses) for _ in range(blocks))
        self.head = nn.Linear(model_dim, 11)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLM = self.embedding(tokens_BL)
        for block in self.blocks:
            x_BLM = block(x_BLM)
        return self.head(x_BLM)


class AllToAll(nn.Module):
    def forward(self, x_SM: Tensor) -> Tensor:
        return all_to_all_single(x_SM, None, None, dist.group.WORLD)


class Steady:
    """OperatorCosts computed from sizes, for plans that are equal on every machine."""

    def __init__(self, number_s: float = 1e-8, byte_s: float = 1e-7, start_s: float = 1e-6) -> None:
        self.number_s, self.byte_s, self.start_s = number_s, byte_s, start_s

    def operator_s(self, target: object, args: tuple[object, ...], kwargs: object) -> float:
        return self.number_s * sum(one.numel() for one in args if isinstance(one, Tensor))

    def collective_s(self, size: float) -> float:
        return self.start_s + self.byte_s * size


class FreeCopies(Steady):
    """Costs under which concatenating chunks is free, to extend micro-batches to the maximum range."""

    def operator_s(self, target: object, args: tuple[object, ...], kwargs: object) -> float:
        copies = ("clone", "cat", "slice", "reshape", "view", "permute", "_to_copy")
        return 0.0 if any(f".{name}." in str(target) for name in copies) else super().operator_s(target, args, kwargs)


def train(model: nn.Module, call: nn.Module, rank: int, steps: int = 5) -> list[dict[str, Tensor]]:
    """Run steps of SGD with momentum on per-rank tokens; return the loss, gradients and parameters of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    source = torch.Generator().manual_seed(rank)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        tokens_BL = torch.randint(11, (4, 9), generator=source)
        logits_BLV = call(tokens_BL[:, :-1])
        loss = F.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        record = {"loss": loss.detach().clone()}
        record |= {f"grad {name}": one.grad.clone() for name, one in model.named_parameters()}
        optimizer.step()
        record |= {name: one.detach().clone() for name, one in model.named_parameters()}
        found.append(record)
    return found


def largest_difference(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for a, b in zip(ours, theirs, strict=True) for name in b)
