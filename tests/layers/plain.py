"""A layer's computation in plain torch, as a user would write it: a loop over experts, each with products of its rows.

Its rounding is plain torch's in any dtype, so its distance from the float64 result is the cost of the dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fusedmoe.experts.networks import FeedForward
from fusedmoe.gates import TopK
from fusedmoe.kernels.activation import define_activation
from fusedmoe.layers.moe import MoELayer


def chosen_experts(layer: MoELayer, x_SM: Tensor) -> Tensor:
    """Return the layer's own gate decisions, expert_SK, so a near tie cannot route two computations differently."""
    with torch.no_grad():
        routing = layer.gate(x_SM)
    return routing.expert_SK


def plain_moe(x_SM: Tensor, expert_SK: Tensor, p: dict[str, Tensor], activation: str) -> Tensor:
    """Compute softmax over the chosen logits, the experts on their rows, and the weighted sum; no capacity.

    `p` holds the layer's parameters by name, in the dtype of the computation; the router computes in at least float32.
    """
    router = torch.promote_types(x_SM.dtype, torch.float32)
    with torch.autocast(x_SM.device.type, enabled=False):
        logits_SE = x_SM.to(router) @ p["gate.weight_EM"].to(router).t()
    weight_SK = logits_SE.gather(1, expert_SK).softmax(1)
    y_SM = torch.zeros_like(x_SM)
    for number in range(len(p["experts.w1"])):
        token, slot = (expert_SK == number).nonzero(as_tuple=True)
        w1, w2 = p["experts.w1"][number], p["experts.w2"][number]
        b1, b2 = (p[name][number] if name in p else None for name in ("experts.b1", "experts.b2"))
        h = linear(x_SM[token], w1.reshape(-1, x_SM.shape[1]), None if b1 is None else b1.reshape(-1))
        out = linear(define_activation(activation, h.view(-1, *w1.shape[:-1])), w2, b2)
        y_SM = y_SM.to(out.dtype).index_add(0, token, out * weight_SK[token, slot, None].to(out.dtype))
    return y_SM


def gradients(layer: MoELayer, x_SM: Tensor, dy_SM: Tensor, expert_SK: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute y, dx and the gradient of every parameter with `plain_moe` in `dtype`; return them in float64."""
    assert isinstance(layer.experts, FeedForward) and isinstance(layer.gate, TopK)
    p = {name: q.detach().to(dtype).requires_grad_() for name, q in layer.named_parameters()}
    x = x_SM.detach().to(dtype).requires_grad_()
    y = plain_moe(x, expert_SK, p, layer.experts.activation)
    y.backward(dy_SM.to(dtype))
    return {"y": y.detach().double(), "x": grad(x), **{name: grad(q) for name, q in p.items()}}


def of_layer(layer: nn.Module, x_SM: Tensor, dy_SM: Tensor) -> dict[str, Tensor]:
    """Compute the same results with the layer, in the dtypes of its parameters and input."""
    layer.zero_grad()
    x = x_SM.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(dy_SM.to(y.dtype))
    return {"y": y.detach().double(), "x": grad(x), **{name: grad(q) for name, q in layer.named_parameters()}}


def grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad.double()


def error(got: Tensor, exact: Tensor) -> float:
    """Relative error in the 2-norm."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())
