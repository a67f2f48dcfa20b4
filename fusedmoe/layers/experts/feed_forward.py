"""Feed-forward experts whose parameters are stacked and whose computation is one operation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusedmoe.autograd.experts import experts
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.weights import Weights
from fusedmoe.layers.experts.base import Experts, Place
from fusedmoe.schedule.workload import Workload


class FeedForward(Experts):
    """FFN(x) = act(x·W1ᵀ + b1)·W2ᵀ + b2: GPT's feed-forward network, two products.

    Parameters (H is the shard's part of `hidden` when experts are sharded over ESP):
        w1: [e, H, M], or [e, 2, H, M] for a gated activation (gate half, then value half).
        w2: [e, M, H].
        b1: [e, H] or [e, 2, H]; b2: [e, M], or the shard's slice of it. Absent without bias.
    Each expert is initialised like `nn.Linear`: uniform in ±1/√fan_in.

    Args:
        hidden: hidden dimension of one expert, over all shards.
        activation: "gelu", "gelu_tanh", "relu", "silu", or gated: "swiglu", "geglu".
        bias: adds b1 and b2.

    Saves for backward, for N rows on this rank: the rows' source x and the pre-activation, N·H elements (gated: 2·N·H).
    """

    def __init__(self, hidden: int, activation: str = "gelu", bias: bool = True) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
        if not isinstance(hidden, int) or isinstance(hidden, bool) or hidden < 1:
            raise ConfigError(f"hidden = {hidden!r}; an expert's hidden dimension is an integer of at least 1")
        self.hidden, self.activation, self.bias = hidden, activation, bias
        self.w1: nn.Parameter
        self.w2: nn.Parameter
        self.b1: nn.Parameter | None
        self.b2: nn.Parameter | None
        self.register_parameter("b1", None)
        self.register_parameter("b2", None)

    def make(
        self,
        model_dim: int,
        place: Place,
        seed: int,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        if self.hidden % place.shards:
            raise ConfigError(
                f"hidden = {self.hidden} cannot be split over esp = {place.shards} shards; choose a multiple of it"
            )
        self.b2_start = min(model_dim, -(-model_dim // place.shards) * place.shard)
        halves = (2,) if ACTIVATIONS[self.activation].gated else ()
        shapes = {"w1": (*halves, self.hidden, model_dim), "w2": (model_dim, self.hidden)}
        split = {"w1": len(halves), "w2": 1}
        if self.bias:
            shapes |= {"b1": (*halves, self.hidden), "b2": (model_dim,)}
            split |= {"b1": len(halves), "b2": 0}
        meta = device is not None and torch.device(device).type == "meta"
        generators = [torch.Generator().manual_seed((seed + number) % 2**63) for number in place.numbers]

        def own(whole: Tensor, dim: int) -> Tensor:
            parts = whole.chunk(place.shards, dim=dim)
            # torch.chunk may give fewer parts than shards when an output bias is tiny.
            return parts[place.shard] if place.shard < len(parts) else whole.narrow(dim, 0, 0)

        for name, shape in shapes.items():
            like = own(torch.empty(shape, device="meta"), split[name])
            bound = (model_dim if name in ("w1", "b1") else self.hidden) ** -0.5
            made = torch.empty((place.local, *like.shape), dtype=dtype, device=device)
            for at, generator in enumerate([] if meta else generators):
                made[at] = own(torch.empty(shape).uniform_(-bound, bound, generator=generator), split[name])
            self.register_parameter(name, nn.Parameter(made))
            self.shardings[name] = {"ep": 0, "esp": split[name] + 1}

    def weights(self, dtype: torch.dtype) -> Weights:
        """The parameters in the dtype of the computation."""
        b1, b2 = (None if bias is None else bias.to(dtype) for bias in (self.b1, self.b2))
        return Weights(self.w1.to(dtype), self.w2.to(dtype), b1, b2, self.b2_start)

    def forward(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        x_SM = x_SM.to(self.row_dtype(x_SM))
        cast = torch.is_autocast_enabled(x_SM.device.type)
        weights = self.weights(x_SM.dtype if cast else self.w1.dtype)
        return experts(x_SM, layout, weight_N, weights, self.activation, self.recorder)

    def in_chunks(self, x_SM: Tensor) -> GroupedExperts:
        return GroupedExperts(self.weights(x_SM.dtype), self.activation)

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        # A rank's rows go to the shards of its node, which work on them together: esp ranks' rows meet there.
        expert = "swiglu" if ACTIVATIONS[self.activation].gated else "ffn"
        assert self.place is not None
        experts = max(1, self.place.local) * ep  # under a placement a rank may own none
        return Workload(
            1, rows * esp, self.model_dim, self.hidden, experts, k=1, expert=expert, ep=ep, esp=esp, itemsize=itemsize
        )

    def row_dtype(self, x_SM: Tensor) -> torch.dtype:
        kind = x_SM.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_SM.dtype

    def describe(self) -> str:
        return f"{type(self).__name__}(hidden={self.hidden}, activation={self.activation!r}, bias={self.bias})"

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, activation={self.activation!r}, bias={self.bias}, {self.place}"


class SwiGLU(FeedForward):
    """FFN(x) = (silu(x·W1gᵀ) ∘ x·W1uᵀ)·W2ᵀ: Mixtral's and LLaMA's network, three products, no bias unless asked for."""

    def __init__(self, hidden: int, bias: bool = False) -> None:
        super().__init__(hidden, "swiglu", bias)
