"""Order and its inverse as differentiable functions. Neither saves a tensor but the layout's integers."""

from __future__ import annotations

from torch import Tensor

from fusedmoe.autograd.linear import linear
from fusedmoe.kernels import order
from fusedmoe.kernels.order import Layout


def permute(x_SM: Tensor, layout: Layout) -> Tensor:
    """rows_NM: a copy of each token's row for every slot that was kept, sorted by expert."""
    return linear(x_SM, lambda x: order.permute(x, layout), lambda grad: order.gather_sum(grad, layout))


def unpermute(rows_NM: Tensor, layout: Layout) -> Tensor:
    """y_SM: the sum of each token's rows, in slot order; zeros for a token whose slots were all dropped."""
    return linear(rows_NM, lambda rows: order.gather_sum(rows, layout), lambda grad: order.permute(grad, layout))
