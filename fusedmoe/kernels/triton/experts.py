"""Expert MLPs on grouped GEMM kernels, forward and backward; same contract as `fusedmoe.kernels.experts`.

Also runs on rows still in flight, and puts results directly to other ranks. Only tuning synchronizes with the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fusedmoe.kernels.activation import Activation
from fusedmoe.kernels.backend import INTERPRET, generation_of
from fusedmoe.kernels.experts import Gradients, HiddenRows, NeedsGrad, Weights
from fusedmoe.kernels.gather_sum import gather_sum, permute
from fusedmoe.kernels.grouped import at_least_float32
from fusedmoe.kernels.layout import Layout, Tiles
from fusedmoe.kernels.one_sided import Addresses, Put, Wait
from fusedmoe.kernels.triton.grouped.autotune import tuner, untuned_choice
from fusedmoe.kernels.triton.grouped.call import GroupedCall, aligned
from fusedmoe.kernels.triton.grouped.configs import has_bulk_copies, row_heights
from fusedmoe.kernels.triton.grouped.dhidden import dhidden
from fusedmoe.kernels.triton.grouped.dweight import dweight
from fusedmoe.kernels.triton.grouped.product import product
from fusedmoe.kernels.triton.grouped.up import up
from fusedmoe.kernels.triton.one_sided.put import put_values


def tile_heights(dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    return row_heights(dtype, generation_of(device))


def make_call(
    layout: Layout,
    like: Tensor,
    in_flight: bool = False,
    shared: bool = False,
    tiles: Mapping[int, Tiles] | None = None,
) -> GroupedCall:
    """Prepare the launches of one call, which cannot be repeated for tuning if rows are `in_flight`."""
    # The interpreter supports bulk copies and is not tuned.
    if INTERPRET:
        return GroupedCall(layout, like, untuned_choice(None), True, tiles=tiles)
    table = generation_of(like.device)
    assert table is not None
    choose = untuned_choice(table) if in_flight else tuner(like.device).choose
    return GroupedCall(layout, like, choose, has_bulk_copies(table), shared, tiles)


def experts_forward(
    x_SM: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    call = make_call(layout, x_SM, shared=shared)
    h, a = up(call, x_SM, weights, activation)
    out_NM = product(call, "down", a, weights.w2, True, weights.b2, weights.b2_start)
    return gather_sum(out_NM, layout, weight_N), h.view(layout.rows, *weights.w1.shape[1:-1])


def experts_backward_rows(
    dy_SM: Tensor,
    h_NH: Tensor | None,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
    needs_grad: NeedsGrad,
    shared: bool = False,
) -> tuple[Tensor | None, Tensor | None, HiddenRows]:
    """Compute the row half of backward; the intermediates are scaled by the router weights."""
    if h_NH is None or not needs_grad.h_NH:
        return None, None, HiddenRows(None, None)
    dy_SM = aligned(dy_SM)
    call = make_call(layout, dy_SM, shared=shared)
    h = h_NH.view(layout.rows, activation.num_projections * weights.w2.shape[2])
    dh, a, ds_N = dhidden(call, dy_SM, h, weight_N, weights, activation, needs_grad)
    dx_SM = None
    if needs_grad.x_SM and dh is not None:
        # dH includes the router weights.
        dx_SM = gather_sum(product(call, "dinput", dh, weights.w1.flatten(1, -2), False), layout)
    if weights.b2 is not None and ds_N is not None:
        ds_N = ds_N + _bias_dot(call, dy_SM, weights)
    if ds_N is not None:
        ds_N = layout.zero_padding(ds_N)
    return dx_SM, ds_N, HiddenRows(a, dh if needs_grad.w1 or needs_grad.b1 else None)


def experts_backward_weights(
    dy_SM: Tensor,
    x_SM: Tensor | None,
    intermediates: HiddenRows,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    into: Gradients | None,
    needs_grad: NeedsGrad,
    shared: bool = False,
) -> Gradients:
    """Compute the parameter half of backward; the epilogues accumulate into `into`."""
    dy_SM, dh, a = aligned(dy_SM), intermediates.dh_NH, intermediates.a_NH
    call = make_call(layout, dy_SM, shared=shared)
    dw1 = dw2 = db1 = db2 = None
    w1_EPQ, w2_EPQ, b1_EPQ, b2_EO = _total_matrices(into)
    if needs_grad.w1 and x_SM is not None and dh is not None:
        dw1 = dweight(call, "dw1", dh, aligned(x_SM), "right", w1_EPQ).view_as(weights.w1)
    if needs_grad.w2 and a is not None:
        dw2 = dweight(call, "dw2", dy_SM, a, "left", w2_EPQ)
    # A column sum is a GEMM with a column of ones, in the same summation order.
    one_N1 = dy_SM.new_ones((layout.rows, 1)) if needs_grad.b1 or needs_grad.b2 else None
    if weights.b1 is not None and needs_grad.b1 and one_N1 is not None and dh is not None:
        db1 = dweight(call, "dw1", one_N1, dh, None, b1_EPQ).view_as(weights.b1)
    if weights.b2 is not None and needs_grad.b2 and one_N1 is not None:
        factor_N1 = one_N1 if weight_N is None else weight_N.to(dy_SM.dtype)[:, None]
        db2 = dweight(call, "dw1", factor_N1, dy_SM, "right")[:, 0, weights.b2_columns()].contiguous()
        db2 = db2 if b2_EO is None else at_least_float32(b2_EO).add_(db2)
    return Gradients(None, None, dw1, dw2, db1, db2)


def _total_matrices(into: Gradients | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    if into is None:
        return None, None, None, None
    w1_EPQ = None if into.w1 is None else into.w1.flatten(1, -2)
    b1_EPQ = None if into.b1 is None else into.b1.flatten(1)[:, None]
    return w1_EPQ, into.w2, b1_EPQ, into.b2


def forward_in_flight(
    x_CM: Tensor,
    layout: Layout,
    tiles: Mapping[int, Tiles],
    weights: Weights,
    activation: Activation,
    wait: Wait,
    put: Put,
) -> Tensor:
    """Run forward on the rows of a receive buffer, put the results to their ranks, and return h [R, (2,) H].

    `layout.source_N` are the rows of x_CM. The up GEMM waits for rows (`wait`), and the down GEMM puts its results.
    """
    call = make_call(layout, x_CM, in_flight=True, tiles=tiles)
    h, a = up(call, x_CM, weights, activation, wait)
    product(call, "down", a, weights.w2, True, weights.b2, weights.b2_start, put)
    return h.view(layout.rows, *weights.w1.shape[1:-1])


def backward_rows_in_flight(
    dy_CM: Tensor,
    h: Tensor,
    layout: Layout,
    tiles: Mapping[int, Tiles],
    weight_R: Tensor,
    weights: Weights,
    activation: Activation,
    wait: Wait,
    put: Put,
    values: Addresses,
    needs_grad: NeedsGrad,
) -> tuple[Tensor | None, HiddenRows]:
    """Run the backward of `forward_in_flight` without the parameter gradients, while rows of dy arrive.

    Puts the gradients of input rows and of router weights directly to the ranks that sent them.

    Args:
        dy_CM: receive buffer of the gradients of results; `wait` lists its rows to wait for.
        put: destinations of the gradients of input rows.
        values: destination addresses of the gradients of the R rows' router weights.
        needs_grad: must include x and the router weights, because other ranks wait for both.
    Returns:
        dy sorted by expert, [R, M], or None without output bias; and the intermediates for the parameter gradients.
    """
    call = make_call(layout, dy_CM, in_flight=True, tiles=tiles)
    h = h.view(layout.rows, activation.num_projections * weights.w2.shape[2])
    dh, a, ds_R = dhidden(call, dy_CM, h, weight_R, weights, activation, needs_grad, wait)
    assert dh is not None and ds_R is not None
    dy_RM = None
    if weights.b2 is not None:
        dy_RM = permute(dy_CM, layout)  # the previous kernel has waited for all rows
        sorted_call = make_call(replace(layout, source_N=None), dy_RM, in_flight=True)
        ds_R = ds_R + _bias_dot(sorted_call, dy_RM, weights)
    put_values(ds_R, values, layout.offsets_E1[-1:])
    product(call, "dinput", dh, weights.w1.flatten(1, -2), False, put=put)
    return dy_RM, HiddenRows(a, dh if needs_grad.w1 or needs_grad.b1 else None)


def _bias_dot(call: GroupedCall, dy_SM: Tensor, weights: Weights) -> Tensor:
    """Return ⟨dy[source], b2_e⟩ per row, the output bias's part of the router weight gradient."""
    assert weights.b2 is not None
    dot_SE = dy_SM[:, weights.b2_columns()].float() @ weights.b2.float().t()
    row_N = torch.arange(call.layout.rows, device=dy_SM.device)
    expert_N = torch.searchsorted(call.ends_E, row_N, right=True).clamp(max=dot_SE.shape[1] - 1)
    source_N = row_N if call.layout.source_N is None else call.layout.source_N
    return dot_SE[source_N, expert_N]


def grouped_product(
    rows_NK: Tensor, weight: Tensor, bias_EO: Tensor | None, layout: Layout, transposed: bool
) -> Tensor:
    bias = None if bias_EO is None else bias_EO.contiguous()
    operation = "down" if transposed else "dinput"
    out = product(make_call(layout, rows_NK), operation, rows_NK, weight.contiguous(), transposed, bias)
    return layout.zero_padding(out)


def grouped_dweight(left_NP: Tensor, right_NQ: Tensor, layout: Layout) -> Tensor:
    return dweight(make_call(layout, left_NP), "dw1", left_NP, right_NQ, None)
