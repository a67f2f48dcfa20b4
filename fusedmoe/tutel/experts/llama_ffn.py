"""Gated experts: y = (act(x·W1) ∘ x·W2)·W3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fusedmoe.kernels import Weights
from fusedmoe.schedule import Workload
from fusedmoe.sizes import require_elements, require_within
from fusedmoe.tutel.experts.ffn import Activation, activation_name, can_use_kernels, cast_weights, is_trained, shards_of

if TYPE_CHECKING:
    from fusedmoe.tutel.impls.moe_layer import MOELayer

_GATED = {"silu": "swiglu", "gelu": "geglu"}


class LlamaFFNNetwork(nn.Module):
    """Gated experts of a rank, without biases.

    Each of s ranks that share an expert holds a flat 1/s of each parameter: W_fc1 and W_fc2, [e, D, H], and W_fc3, [e,
    H, D]; normal with standard deviation 0.01.

    Attributes:
        whole_only: the work of an expert is never split over its ranks, because flat parts must be joined.
    """

    whole_only = True
    W_fc1: nn.Parameter
    W_fc2: nn.Parameter
    W_fc3: nn.Parameter

    def __init__(
        self,
        model_dim: int,
        hidden_size_per_expert: int,
        num_experts_per_device: int = 1,
        sharded_count: int = 1,
        activation_fn: Activation = nn.functional.silu,
    ) -> None:
        super().__init__()
        require_within("llama_ffn experts", hidden_size_per_expert=hidden_size_per_expert)
        require_elements("llama_ffn experts", "weights", (num_experts_per_device, hidden_size_per_expert, model_dim))
        e, D, H = num_experts_per_device, model_dim, hidden_size_per_expert
        self.model_dim, self.hidden_size, self.local_experts = D, H, e
        self.sharded_count, self.activation_fn = sharded_count, activation_fn
        self._up, self._down = torch.Size((e, D, H)), torch.Size((e, H, D))
        for name in ("W_fc1", "W_fc2", "W_fc3"):
            self.register_parameter(name, nn.Parameter(torch.empty(-(-e * D * H // sharded_count), device=None)))
        self.shardings = {name: {"ep": 0, "esp": 0} for name, _ in self.named_parameters()}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, 0.01)

    def whole(self, ctx: MOELayer) -> tuple[Tensor, Tensor, Tensor]:
        """Return W1, W2 [e, D, H] and W3 [e, H, D], joined over ranks; with adaptive degree 0, of all experts."""
        shards = shards_of(ctx, min(ctx.adaptive_degree, 1))
        w1, w2 = shards.join_flat(self.W_fc1, self._up), shards.join_flat(self.W_fc2, self._up)
        return w1, w2, shards.join_flat(self.W_fc3, self._down)

    def fused(self, ctx: MOELayer, x_SM: Tensor, rows: int) -> tuple[Weights, str] | None:
        gated = _GATED.get(activation_name(self.activation_fn) or "")
        plain = type(self).forward is LlamaFFNNetwork.forward
        if gated is None or not plain or not can_use_kernels(self, x_SM, rows * self.hidden_size):
            return None
        w1, w2, w3 = self.whole(ctx)
        # The kernels read both up projections as one tensor [e, 2, H, D].
        halves = torch.stack([w1.transpose(1, 2), w2.transpose(1, 2)], 1)
        return cast_weights(Weights(halves, w3.transpose(1, 2)), x_SM), gated

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        D, H, E = self.model_dim, self.hidden_size, self.local_experts * ep
        up, down = is_trained(self, "W_fc1") or is_trained(self, "W_fc2"), is_trained(self, "W_fc3")
        trained = tuple(name for name, learnt in (("w1", up), ("w2", down)) if learnt)
        return Workload(1, rows, D, H, E, k=1, expert="swiglu", ep=ep, itemsize=itemsize, trained=trained)

    def join(self, ctx: MOELayer) -> tuple[Any, ...] | None:
        return self.whole(ctx) if type(self).forward is LlamaFFNNetwork.forward else None

    def forward(self, x: Tensor, ctx: MOELayer, joined: tuple[Any, ...] | None = None) -> Tensor:
        w1, w2, w3 = self.whole(ctx) if joined is None else joined
        return (self.activation_fn(x @ w1) * (x @ w2)) @ w3

    def extra_repr(self) -> str:
        sizes = f"model_dim={self.model_dim}, hidden_size={self.hidden_size}"
        return f"{sizes}, num_experts_per_device={self.local_experts}"


ExpertModule = LlamaFFNNetwork
