"""The experts' operation on rows that are still on their way, and with results that go straight to where they belong.

Contract: as `launch.py`; rows that are awaited lie in a window, what is put is not returned.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fusedmoe.kernels.activation import Activation
from fusedmoe.kernels.gather_sum import permute
from fusedmoe.kernels.grouped.launch import bias_dot, make_plan
from fusedmoe.kernels.grouped.products import Wait, dhidden, product, up
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.places import Addresses, Put
from fusedmoe.kernels.puts import put_values
from fusedmoe.kernels.weights import Hidden, Weights


def experts_forward(
    x_CM: Tensor, layout: Layout, weights: Weights, activation: Activation, wait: Wait | None, put: Put | None
) -> tuple[Tensor, Tensor]:
    """Results [R, M], none where they are put, and the pre-activation h [R, 2, H] or [R, H].

    Args:
        layout: `source_N` are the rows of x; slack may follow.
    """
    plan = make_plan(layout, x_CM, in_flight=True)
    h, a = up(plan, x_CM, weights, activation, wait)
    out_RM = product(plan, "down", a, weights.w2, True, weights.b2, weights.b2_start, put)
    hidden = weights.w2.shape[2]
    return out_RM, h.view((layout.rows, 2, hidden) if activation.gated else (layout.rows, hidden))


def experts_backward_rows(
    dy_CM: Tensor,
    h: Tensor,
    layout: Layout,
    weight_R: Tensor | None,
    weights: Weights,
    activation: Activation,
    wait: Wait | None,
    put: Put | None,
    values: Addresses | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Hidden]:
    """Gradients of rows [R, M], none where they are put, of router weights [R], and what is left for those of
    parameters: dy, [R, M] sorted by expert, and activations.

    Args:
        values: where the gradients of router weights go as well.
    """
    plan = make_plan(layout, dy_CM, in_flight=True)
    h = h.view(layout.rows, activation.halves * weights.w2.shape[2])
    dh, a, ds_R = dhidden(plan, dy_CM, h, weight_R, weights, activation, wait)
    dy_RM = permute(dy_CM, layout)  # all of them are here by now
    if weights.b2 is not None and ds_R is not None:
        sorted_plan = make_plan(replace(layout, source_N=None), dy_RM, in_flight=True)
        ds_R = ds_R + bias_dot(sorted_plan, dy_RM, weights)
    if values is not None and ds_R is not None:
        put_values(ds_R, values, layout.offsets_E1[-1:])
    up_ENM = weights.w1.view(weights.w1.shape[0], -1, weights.w1.shape[-1])
    return product(plan, "dinput", dh, up_ENM, False, put=put), ds_R, dy_RM, Hidden(a, dh)
