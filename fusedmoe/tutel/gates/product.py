"""The gates' matrix product, in small models with the same bits on every CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.layers.gates.router import router_logits

# Up to so large model dimensions, and so many multiply-adds, sums go in an order of their own. It takes 0.1 ms at most,
# where a matrix library takes 0.01: every step of a sum is an operation by itself.
ORDERED_M = 64
ORDERED = 2**15


def gate_product(x_SM: Tensor, weight_EM: Tensor, fp32: bool) -> Tensor:
    """x·Wᵀ in the weights' dtype, or by the library's router in float32.

    A matrix library sums in an order that depends on its version and on the CPU, and gates, softmax and drops turn its
    last bit into other numbers. Small products in float32 on a CPU are summed as on the machine where Tutel's numbers
    were captured (`summed_in_order`): small models have the same numbers everywhere.
    """
    if fp32:
        x_SM, weight_EM = x_SM.float(), weight_EM.float()
    x_SM = x_SM.to(weight_EM.dtype)
    if x_SM.dtype.itemsize < 4:
        return nn.functional.linear(x_SM, weight_EM)
    logits_SE = router_logits(x_SM, weight_EM)
    M = x_SM.shape[1]
    small = M <= ORDERED_M and logits_SE.numel() * M <= ORDERED
    if not small or logits_SE.device.type != "cpu" or logits_SE.dtype != torch.float32:
        return logits_SE
    return _Ordered.apply(logits_SE, x_SM, weight_EM)


def summed_in_order(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    """x·Wᵀ, [S, E], in four sums: sum i takes products i, i + 4, i + 8, …, and all are (0 + 2) + (1 + 3).

    Of single operations, each rounded by itself, so that no CPU has a choice.
    """
    products_SEM = x_SM[:, None] * weight_EM
    whole = nn.functional.pad(products_SEM, (0, -products_SEM.shape[2] % 4))
    first, *rest = whole.split(4, dim=2)
    for products in rest:
        first = first + products
    even, odd = first[..., 0] + first[..., 2], first[..., 1] + first[..., 3]
    return even + odd


class _Ordered(torch.autograd.Function):
    """The values of `summed_in_order`, with the gradients of the logits given."""

    @staticmethod
    def forward(ctx: Any, logits_SE: Tensor, x_SM: Tensor, weight_EM: Tensor) -> Tensor:
        return summed_in_order(x_SM, weight_EM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None
