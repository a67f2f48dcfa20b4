"""Reference of the layer in plain torch at higher precision, and errors of a variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.case import Case
from bench.gpu.layer import GRADIENTS, Layer
from fusedmoe.kernels.activation import define_activation

# Relative error explained by bfloat16 rounding: half a percent for single roundings, up to this bound for router
# weights whose gradient is summed in bfloat16. A wrong tile causes a much larger error.
TOLERANCE = 1e-2


@dataclass(frozen=True, eq=False)
class Reference:
    """Result and gradients of the layer, by the names in `GRADIENTS`."""

    y_SM: Tensor
    gradients: tuple[Tensor, ...]


def make_reference(case: Case, dtype: torch.dtype) -> Reference:
    """Compute expert by expert, to avoid temporaries for all rows; the result is a sum over experts."""
    y_SM, dx_SM = (torch.zeros_like(case.x_SM, dtype=dtype) for _ in range(2))
    dweight_SK = torch.zeros_like(case.weight_SK, dtype=dtype)
    dw1, dw2 = torch.zeros_like(case.w1, dtype=dtype), torch.zeros_like(case.w2, dtype=dtype)
    for e in range(case.shape.E):
        token, slot = torch.nonzero(case.expert_SK == e, as_tuple=True)
        given = [case.x_SM[token], case.weight_SK[token, slot], case.w1[e], case.w2[e]]
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in given]
        x, weight, w1, w2 = leaves
        hidden = torch.einsum("nm,thm->nth", x, w1)
        y = weight[:, None] * (define_activation("swiglu", hidden) @ w2.t())
        y_SM.index_add_(0, token, y.detach())
        dx, dweight, dw1[e], dw2[e] = torch.autograd.grad(y, leaves, case.dy_SM[token].to(dtype))
        dx_SM.index_add_(0, token, dx)
        dweight_SK[token, slot] = dweight
    return Reference(y_SM, (dx_SM, dweight_SK, dw1, dw2))


def find_errors(layer: Layer, case: Case, right: Reference) -> dict[str, float]:
    """Return ‖found − right‖ / ‖right‖ of the result and each gradient."""
    y_SM = layer.forward()
    gradients = layer.ours(layer.backward(y_SM, case.dy_SM))
    errors = {"y": _error(y_SM.detach(), right.y_SM)}
    return errors | {
        name: _error(found, expected)
        for name, found, expected in zip(GRADIENTS, gradients, right.gradients, strict=True)
    }


def wrong(errors: dict[str, float], tolerance: float = TOLERANCE) -> Sequence[str]:
    """Return the names with an error above the tolerance, including NaN."""
    return [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= tolerance]


def _error(found: Tensor, right: Tensor) -> float:
    return float((found.to(right.dtype) - right).norm() / right.norm())
