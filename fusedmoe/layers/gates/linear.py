"""The router's matrix product: at least float32, outside autocast, saving the input as it came."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.gate import router_product
from fusedmoe.kernels.gate import has_kernels


def router_dtype(x: Tensor) -> torch.dtype:
    """The dtype of router maths: float32, or float64 for float64 input."""
    return torch.promote_types(x.dtype, torch.float32)


def outside_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A context in which autocast does not lower the precision of operations on ``device_type``."""
    # Only meta tensors have no autocast. (`is_autocast_available` would say so, too, but not in a compiled graph.)
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


class _RouterLogits(torch.autograd.Function):
    # nn.functional.linear on a cast copy would keep that copy, S·M·4 bytes, alive until backward.

    @staticmethod
    def forward(ctx: Any, x_SM: Tensor, weight_EM: Tensor) -> Tensor:
        ctx.save_for_backward(x_SM, weight_EM)
        dtype = router_dtype(x_SM)
        return x_SM.to(dtype) @ weight_EM.to(dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad_SE,) = grads
        x_SM, weight_EM = ctx.saved_tensors
        dtype = grad_SE.dtype
        grad_x = grad_weight = None
        with outside_autocast(grad_SE.device.type):
            if ctx.needs_input_grad[0]:
                grad_x = (grad_SE @ weight_EM.to(dtype)).to(x_SM.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = (grad_SE.t() @ x_SM.to(dtype)).to(weight_EM.dtype)
        return grad_x, grad_weight


def router_logits(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    """x · weightᵀ in ``router_dtype(x)``: [S, M] and [E, M], each of any float dtype, give [S, E].

    Saves ``x_SM`` and ``weight_EM`` themselves for backward, no cast copies. Gradients come in the inputs'
    dtypes. Differentiable twice where plain torch serves, once where Triton does.
    """
    if has_kernels(x_SM, weight_EM):
        return router_product(x_SM, weight_EM)
    return _RouterLogits.apply(x_SM, weight_EM)
