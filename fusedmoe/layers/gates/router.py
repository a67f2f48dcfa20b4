"""The router's matrix product, at least in float32 and outside autocast, and the choice of each token's k best experts,
with ties decided the same way on every device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.gate import router_product
from fusedmoe.autograd.linear import linear
from fusedmoe.kernels.derivatives import Function, numbers_only
from fusedmoe.kernels.gate import has_kernels
from fusedmoe.kernels.workspace import empty


def router_dtype(x: Tensor) -> torch.dtype:
    """The dtype of router maths: float32, or float64 for float64 input."""
    return torch.promote_types(x.dtype, torch.float32)


def outside_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A context in which autocast does not lower the precision of operations on ``device_type``."""
    # Only meta tensors have no autocast. (`is_autocast_available` would say so, too, but not in a compiled graph.)
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


class _RouterLogits(Function):
    operation, twice = "router_logits, the product of a gate", True

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
                grad_x = _product(grad_SE, weight_EM.to(dtype)).to(x_SM.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = (grad_SE.t() @ x_SM.to(dtype)).to(weight_EM.dtype)
        return grad_x, grad_weight


def _product(grad_SE: Tensor, weight_EM: Tensor) -> Tensor:
    """Into used memory, where neither a second derivative nor a graph of the compiler is made of it."""
    if torch.compiler.is_compiling() or not numbers_only():
        return grad_SE @ weight_EM
    return torch.mm(grad_SE, weight_EM, out=empty(grad_SE, (len(grad_SE), weight_EM.shape[1]), result=True))


def router_logits(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    """x · weightᵀ in ``router_dtype(x)``: [S, M] and [E, M], each of any float dtype, give [S, E].

    Saves ``x_SM`` and ``weight_EM`` themselves for backward, no cast copies. Gradients come in the inputs'
    dtypes. Differentiable twice where plain torch serves, once where Triton does.
    """
    if has_kernels(x_SM, weight_EM):
        return router_product(x_SM, weight_EM)
    return _RouterLogits.apply(x_SM, weight_EM)


# Measured on a CPU at 8192 tokens, k passes of max against one stable sort: 8 experts, k = 2: 0.3 and 0.8 ms;
# 512 experts, k = 16: 45 and 165 ms.
_MAX_PASSES = 32


def top_experts(score_SE: Tensor, k: int) -> Tensor:
    """The k highest columns of each row, best first; between equal scores the lower column wins.

    ``torch.topk`` leaves the order of equal scores open, so that two devices could route a token differently.

    Args:
        score_SE: [S, E] float or int64; k ≤ E. NaN counts as the highest score, -inf as the lowest finite
            one, so that the k columns of a row are distinct and in range whatever the scores are. No
            gradient.

    Returns:
        [S, k] int64.

    Example: score [[1, 3, 3, 2]], k = 3 gives [[1, 2, 3]].
    """
    score_SE = score_SE.detach()
    if k > _MAX_PASSES:
        return score_SE.sort(dim=1, descending=True, stable=True).indices[:, :k]
    if score_SE.is_floating_point():
        taken: float = -torch.inf
        lowest: float = torch.finfo(score_SE.dtype).min
    else:
        taken = torch.iinfo(score_SE.dtype).min
        lowest = taken + 1
    left_SE = score_SE.clamp(min=lowest)  # a copy; nothing in it is as low as a column already taken
    chosen = []
    for place in range(k):
        best_S1 = left_SE.max(dim=1, keepdim=True).indices  # documented: the first of equal maxima
        chosen.append(best_S1)
        if place + 1 < k:
            left_SE.scatter_(1, best_S1, taken)
    return torch.cat(chosen, dim=1)


def pick(score_SE: Tensor, expert_SK: Tensor) -> Tensor:
    """`score_SE.gather(1, expert_SK)` that does not keep the scores for backward, as torch's does for their shape."""
    shape = score_SE.shape
    return linear(
        score_SE,
        lambda score: score.gather(1, expert_SK),
        lambda grad: grad.new_zeros(shape).scatter_add(1, expert_SK, grad),
        "the scores of chosen experts",
    )
