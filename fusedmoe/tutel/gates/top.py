"""The linear gate, and the parts of both gates: a product with the same bits on every CPU, float32 parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.errors import ConfigError
from fusedmoe.gates import router_logits
from fusedmoe.kernels import Function
from fusedmoe.tutel.impls.fast_dispatch import experts_of_a_token

# Up to so large model dimensions, and so many multiply-adds, sums go in an order of their own. It takes 0.1 ms at most,
# where a matrix library takes 0.01: every step of a sum is an operation by itself.
ORDERED_M = 64
ORDERED = 2**15


def gate_product(x_SM: Tensor, weight_EM: Tensor, fp32: bool) -> Tensor:
    """Computes x·Wᵀ in the weights' dtype, or by the library's router in float32."""
    if fp32:
        x_SM, weight_EM = x_SM.float(), weight_EM.float()
    x_SM = x_SM.to(weight_EM.dtype)
    # Half precision is rounded as Tutel rounds it; the library's router would compute in float32.
    if x_SM.dtype.itemsize < 4:
        return nn.functional.linear(x_SM, weight_EM)
    logits_SE = router_logits(x_SM, weight_EM)
    # A matrix library sums in an order that depends on its version and on the CPU, and gates, softmax and drops turn
    # its last bit into other numbers. Small products in float32 on a CPU are summed as on the machine where Tutel's
    # numbers were captured, so small models have the same numbers everywhere.
    M = x_SM.shape[1]
    small = M <= ORDERED_M and logits_SE.numel() * M <= ORDERED
    if not small or logits_SE.device.type != "cpu" or logits_SE.dtype != torch.float32:
        return logits_SE
    return _Ordered.apply(logits_SE, x_SM, weight_EM)


def summed_in_order(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    """Computes x·Wᵀ, [S, E], in four sums: sum i takes products i, i + 4, i + 8, …, and all are (0 + 2) + (1 + 3)."""
    # Each step is an operation by itself and rounds by itself, so that no CPU has a choice.
    products_SEM = x_SM[:, None] * weight_EM
    whole = nn.functional.pad(products_SEM, (0, -products_SEM.shape[2] % 4))
    first, *rest = whole.split(4, dim=2)
    for products in rest:
        first = first + products
    even, odd = first[..., 0] + first[..., 2], first[..., 1] + first[..., 3]
    return even + odd


class _Ordered(Function):
    """The values of `summed_in_order`, with the gradients of the logits given."""

    operation, twice = "moe_layer: the gate's product", True

    @staticmethod
    def forward(ctx: Any, logits_SE: Tensor, x_SM: Tensor, weight_EM: Tensor) -> Tensor:
        return summed_in_order(x_SM, weight_EM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class Float32Linear(nn.Linear):
    """A linear map that `.to(torch.bfloat16)` and the like leave in float32, with values rounded as they were asked to.

    FSDP's `fully_shard` wants one dtype for what it shards together: shard this module by itself first.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # At once, where Tutel does it in its first forward: what is built around a model before that, such as DDP's
        # buckets and optimizers, sees the dtype that stays.
        self.float()

    def forward(self, input: Tensor) -> Tensor:
        # Parameters may be in another dtype all the same, as under FSDP's mixed precision.
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32Linear:
        super()._apply(fn, recurse)
        # A conversion of the whole model has rounded the parameters: they keep those values, in float32.
        if any(parameter.dtype != torch.float32 for parameter in self.parameters()):
            super()._apply(lambda t: t.float(), recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        if self.weight.dtype != torch.float32:
            # `load_state_dict(assign=True)` has put parameters of another dtype in their place.
            self.float()


# Options of a gate's description that the layer reads; a gate takes them without using them.
OF_THE_LAYER = ("capacity_factor", "gate_noise")


class Router(nn.Linear):
    """A router by `gate_product`, in the dtype of the weights."""

    def forward(self, input: Tensor) -> Tensor:
        return gate_product(input, self.weight, fp32=False)


class Float32Router(Float32Linear):
    """A router that computes in float32, whatever the model's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return gate_product(input, self.weight, fp32=True)


class LinearTopKGate(nn.Module):
    """logits = x·Wᵀ, in the dtype of the weights.

    Parameters: `wg.weight` [E, D], initialised as `nn.Linear` is; with `fp32_gate` float32, also in a model that is
    converted to another dtype.

    Args:
        k: experts of a token, from 1 on; more than E are E.
        options: `capacity_factor` and `gate_noise`, which the layer reads; any other is a `ConfigError`.
    """

    def __init__(
        self,
        model_dim: int,
        num_global_experts: int,
        k: int = 1,
        fp32_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_unknown(options)
        router, own = (Float32Router, torch.float32) if fp32_gate else (Router, dtype)
        self.wg = router(model_dim, num_global_experts, bias=False, device=device, dtype=own)
        self.top_k = experts_of_a_token(k, num_global_experts)
        self.fp32_gate = fp32_gate

    def forward(self, x: Tensor) -> Tensor:
        return self.wg(x)


def refuse_unknown(options: dict[str, Any]) -> None:
    for name in options:
        if name not in OF_THE_LAYER:
            raise ConfigError(f"this gate has no option {name!r}; besides its own it takes {', '.join(OF_THE_LAYER)}")


Gate = LinearTopKGate
