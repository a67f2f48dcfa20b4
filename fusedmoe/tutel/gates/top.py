"""Linear gate, and parts of both gates: a matrix product with equal bits on every CPU, and float32 parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.errors import ConfigError
from fusedmoe.gates.base import router_logits
from fusedmoe.kernels.derivatives import Function
from fusedmoe.tutel.impls.fast_dispatch import experts_of_a_token

# Largest model dimension and number of multiply-adds for ordered summation, which then takes at most 0.1 ms.
ORDERED_M = 64
ORDERED = 2**15


def gate_product(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    """Compute x·Wᵀ in the weights' dtype."""
    x_SM = x_SM.to(weight_EM.dtype)
    # Tutel rounds to half precision; fusedmoe's router would compute in float32.
    if x_SM.dtype.itemsize < 4:
        return nn.functional.linear(x_SM, weight_EM)
    logits_SE = router_logits(x_SM, weight_EM)
    # The order of a BLAS's sums depends on its version and the CPU, and drops amplify a difference in the last bit.
    # Small float32 products on a CPU use the order in which Tutel's reference values were recorded.
    M = x_SM.shape[1]
    small = M <= ORDERED_M and logits_SE.numel() * M <= ORDERED
    if not small or logits_SE.device.type != "cpu" or logits_SE.dtype != torch.float32:
        return logits_SE
    return _Ordered.apply(logits_SE, x_SM, weight_EM)


def summed_in_order(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    """Compute x·Wᵀ, [S, E], with equal bits on every CPU: (0 + 2) + (1 + 3) of sums i over products i, i + 4, …."""
    products_SEM = x_SM[:, None] * weight_EM
    whole = nn.functional.pad(products_SEM, (0, -products_SEM.shape[2] % 4))
    first, *rest = whole.split(4, dim=2)
    for products in rest:
        first = first + products
    even, odd = first[..., 0] + first[..., 2], first[..., 1] + first[..., 3]
    return even + odd


class _Ordered(Function):
    """Replaces logits = x·Wᵀ by `summed_in_order`; the gradient is that of the given logits."""

    operation, double_backward = "moe_layer: the gate's product", True

    @staticmethod
    def forward(ctx: Any, logits_SE: Tensor, x_SM: Tensor, weight_EM: Tensor) -> Tensor:
        return summed_in_order(x_SM, weight_EM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class Float32Linear(nn.Linear):
    """Linear layer that stays in float32 when the model is converted, with its values rounded to the requested dtype.

    FSDP's `fully_shard` requires one dtype per unit: shard this module separately first.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Tutel converts in the first forward, after optimizers and DDP buckets have been built.
        self.float()

    def forward(self, input: Tensor) -> Tensor:
        # FSDP's mixed precision may present parameters in another dtype.
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32Linear:
        super()._apply(fn, recurse)
        if any(parameter.dtype != torch.float32 for parameter in self.parameters()):
            super()._apply(lambda t: t.float(), recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        if self.weight.dtype != torch.float32:
            # `load_state_dict(assign=True)` replaces parameters.
            self.float()


# Options of a gate description that the layer reads.
OF_THE_LAYER = ("capacity_factor", "gate_noise")

# Arguments of `moe_layer` that describe its routing, often put into gate_type.
_ARGUMENTS_OF_THE_LAYER = ("batch_prioritized_routing", "is_gshard_loss", "is_postscore", "normalize_gate")


class Router(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return gate_product(input, self.weight)


class Float32Router(Float32Linear):
    def forward(self, input: Tensor) -> Tensor:
        return gate_product(input, self.weight.float())


class LinearTopKGate(nn.Module):
    """logits = x·Wᵀ, in the dtype of the weights.

    Parameters: `wg.weight` [E, D], initialised as `nn.Linear`; with `fp32_gate` float32, even after the model is
    converted.

    Args:
        k: experts per token, at least 1; capped at E.
        options: `capacity_factor` and `gate_noise`, for the layer; others raise `ConfigError`.
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


def refuse_unknown(options: dict[str, Any], *own: str) -> None:
    """Raise `ConfigError` for options of gate_type that neither the gate (`own`) nor the layer reads."""
    unknown = [name for name in options if name not in OF_THE_LAYER]
    misplaced = [name for name in unknown if name in _ARGUMENTS_OF_THE_LAYER]
    if unknown:
        known = ("type", "k", "fp32_gate", *own, *OF_THE_LAYER)
        raise ConfigError(
            f"gate_type: this gate has no option {', '.join(map(repr, unknown))}; it has {', '.join(known)}"
            + (f". Pass {', '.join(misplaced)} to moe_layer itself" if misplaced else "")
        )


Gate = LinearTopKGate
