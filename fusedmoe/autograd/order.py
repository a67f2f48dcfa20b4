"""Order and its inverse as differentiable functions. Neither saves a tensor but the layout's integers."""

from __future__ import annotations

from torch import Tensor

from fusedmoe.autograd.linear import linear
from fusedmoe.kernels import gather_sum as kernels
from fusedmoe.kernels.layout import Layout


def permute(x_SM: Tensor, layout: Layout) -> Tensor:
    """rows_NM: a copy of each token's row for every slot that was kept, sorted by expert."""
    return linear(x_SM, lambda x: kernels.permute(x, layout), lambda grad: kernels.gather_sum(grad, layout))


def unpermute(rows_NM: Tensor, layout: Layout) -> Tensor:
    """y_SM: the sum of each token's rows, in slot order; zeros for a token whose slots were all dropped."""
    return linear(rows_NM, lambda rows: kernels.gather_sum(rows, layout), lambda grad: kernels.permute(grad, layout))


def take_slots(value_SK: Tensor, layout: Layout) -> Tensor:
    """value_N: the value of the slot that each sorted row serves, as a router's weight.

    The backward reads the gradient of each slot's row; what stands in slack rows comes to nothing.
    """
    return linear(
        value_SK, lambda value: kernels.take_slots(value, layout), lambda grad: kernels.put_slots(grad, layout)
    )
