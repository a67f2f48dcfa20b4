"""The experts' operation on grouped kernels, forward and backward.

Contract: no host synchronisation (but when a configuration is tuned), no autograd; shapes are bounds, rows past the
true count are never read as results.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fusedmoe.kernels.activation import Activation
from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.gather_sum import gather_sum
from fusedmoe.kernels.grouped.configs import has_bulk_copies
from fusedmoe.kernels.grouped.products import Plan, dhidden, dweight, product, solid, up
from fusedmoe.kernels.grouped.tuning import tuner, untuned
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.weights import Gradients, Hidden, Weights


def make_plan(layout: Layout, like: Tensor, in_flight: bool = False) -> Plan:
    """What the launches of one call share; `like`: a tensor of the call's dtype and device.

    `in_flight`: launches wait for rows or put them, so that none can be repeated to tune it.
    """
    if INTERPRET:
        return Plan(layout, like, untuned(None), True, 4)
    gpu = torch.cuda.get_device_properties(like.device)
    bulk = has_bulk_copies((gpu.major, gpu.minor))
    choose = untuned((gpu.major, gpu.minor)) if in_flight else tuner(like.device).choose
    return Plan(layout, like, choose, bulk, gpu.multi_processor_count)


def experts_forward(
    x_SM: Tensor, layout: Layout, weight_N: Tensor | None, weights: Weights, activation: Activation
) -> tuple[Tensor, Tensor]:
    """y_SM and h, as `fusedmoe.kernels.experts.experts_forward`."""
    plan = make_plan(layout, x_SM)
    h, a = up(plan, x_SM, weights, activation)
    out_NM = product(plan, "down", a, weights.w2, True, weights.b2, weights.b2_start)
    hidden = weights.w2.shape[2]
    shape = (layout.rows, 2, hidden) if activation.gated else (layout.rows, hidden)
    return gather_sum(out_NM, layout, weight_N), h.view(shape)


def experts_backward(
    dy_SM: Tensor,
    x_SM: Tensor,
    h_NH: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
) -> Gradients:
    """Gradients, as `fusedmoe.kernels.experts.experts_backward`."""
    dx_SM, ds_N, left = experts_backward_rows(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)
    grads = experts_backward_weights(dy_SM, x_SM, left, layout, weight_N, weights)
    return replace(grads, x_SM=dx_SM, weight_N=ds_N)


def experts_backward_rows(
    dy_SM: Tensor,
    x_SM: Tensor,
    h_NH: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
) -> tuple[Tensor, Tensor | None, Hidden]:
    """As `fusedmoe.kernels.experts.experts_backward_rows`; what is left is times the router weights."""
    dy_SM = solid(dy_SM)
    plan = make_plan(layout, x_SM)
    h = h_NH.view(layout.rows, activation.halves * weights.w2.shape[2])
    dh, a, ds_N = dhidden(plan, dy_SM, h, weight_N, weights, activation)
    up_ENM = weights.w1.view(weights.w1.shape[0], -1, weights.w1.shape[-1])
    dx_SM = gather_sum(product(plan, "dinput", dh, up_ENM, False), layout)
    if weights.b2 is not None and ds_N is not None:
        ds_N = ds_N + bias_dot(plan, dy_SM, weights)
    if ds_N is not None:
        ds_N = layout.zero_padding(ds_N)
    return dx_SM, ds_N, Hidden(a, dh)


def experts_backward_weights(
    dy_SM: Tensor, x_SM: Tensor, left: Hidden, layout: Layout, weight_N: Tensor | None, weights: Weights
) -> Gradients:
    """As `fusedmoe.kernels.experts.experts_backward_weights`."""
    x_SM, dy_SM, dh, a = solid(x_SM), solid(dy_SM), left.dh_NH, left.a_NH
    plan = make_plan(layout, x_SM)
    dw1 = dweight(plan, "dw1", dh, x_SM, "right").view_as(weights.w1)
    dw2 = dweight(plan, "dw2", dy_SM, a, "left")
    one_N1 = None
    if weights.b1 is not None or weights.b2 is not None:
        one_N1 = dh.new_ones((layout.rows, 1))
    db1 = None if weights.b1 is None or one_N1 is None else dweight(plan, "dw1", one_N1, dh, None).view_as(weights.b1)
    db2 = None
    if weights.b2 is not None and one_N1 is not None:
        factor_N1 = one_N1 if weight_N is None else weight_N.to(dh.dtype)[:, None]
        db2 = dweight(plan, "dw1", factor_N1, dy_SM, "right")[:, 0, weights.b2_columns()].contiguous()
    return Gradients(x_SM, None, dw1, dw2, db1, db2)


def bias_dot(plan: Plan, dy_SM: Tensor, weights: Weights) -> Tensor:
    """⟨dy[source], b2_e⟩ of every row: what the output bias adds to the router weight's gradient."""
    assert weights.b2 is not None
    dot_SE = dy_SM[:, weights.b2_columns()].float() @ weights.b2.float().t()
    row_N = torch.arange(plan.layout.rows, device=dy_SM.device)
    expert_N = torch.searchsorted(plan.ends_E, row_N, right=True).clamp(max=dot_SE.shape[1] - 1)
    source_N = row_N if plan.layout.source_N is None else plan.layout.source_N
    return dot_SE[source_N, expert_N]
