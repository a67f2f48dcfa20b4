"""Permute tokens to expert-sorted rows, and sum weighted rows back to tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.kernels.backend import uses_triton
from fusedmoe.kernels.layout import Layout


def permute(x_SM: Tensor, layout: Layout) -> Tensor:
    """Gather tokens into sorted rows: rows_NM[n] = x_SM[source_N[n]], 0 in padding rows."""
    if layout.source_N is None:
        return x_SM
    if uses_triton(x_SM):
        from fusedmoe.kernels.triton.gather_sum import gather_rows

        return gather_rows(x_SM, layout.source_N, layout.offsets_E1)
    # Padding rows copy a token.
    return layout.zero_padding(torch.index_select(x_SM, 0, layout.source_N))


def gather_sum(rows_NM: Tensor, layout: Layout, weight_N: Tensor | None = None) -> Tensor:
    """Sum each token's rows: y_SM[s] = Σ over its kept pairs, in order of k, of weight_N[row]·rows_NM[row].

    A token without kept pairs gets exact zeros. Accumulates in float32, float64 for float64 rows, and in the integer
    dtype for integer rows (which take no weights). Accepts any strides.
    """
    if layout.source_N is None and weight_N is None:
        return rows_NM
    if uses_triton(rows_NM):
        from fusedmoe.kernels.triton.gather_sum import sum_rows

        return sum_rows(rows_NM, layout.row_SK, weight_N)
    if layout.source_N is None and weight_N is not None:
        return rows_NM * weight_N.to(rows_NM.dtype)[:, None]
    row_N, start_S = layout.bags
    tokens, k = layout.row_SK.shape
    if row_N.numel() == 0 or rows_NM.shape[1] == 0:
        return rows_NM.new_zeros((tokens, rows_NM.shape[1]))
    if k == 1 and row_N.numel() == tokens:
        rows = torch.index_select(rows_NM, 0, row_N)
        return rows if weight_N is None else rows.mul_(weight_N[row_N].to(rows.dtype)[:, None])
    # embedding_bag sums each token's rows in order, in one pass.
    if rows_NM.dtype in (torch.float32, torch.float64):
        weights = None if weight_N is None else weight_N.index_select(0, row_N).to(rows_NM.dtype)
        return torch.embedding_bag(rows_NM.contiguous(), row_N, start_S, False, 0, False, weights)[0]
    total = torch.float32 if rows_NM.is_floating_point() else rows_NM.dtype
    y_SM = rows_NM.new_zeros((tokens, rows_NM.shape[1]), dtype=total)
    for row_S in layout.row_SK.unbind(1):
        kept = (row_S >= 0).nonzero().squeeze(1)
        rows = rows_NM[row_S[kept]].to(total)
        y_SM[kept] += rows if weight_N is None else rows * weight_N[row_S[kept], None].to(total)
    return y_SM.to(rows_NM.dtype)


def take_pairs(value_SK: Tensor, layout: Layout) -> Tensor:
    """Gather pair values (router weights) to sorted rows: value_N[n], 0 in padding rows."""
    if value_SK.element_size() <= 8 and uses_triton(value_SK):
        from fusedmoe.kernels.triton.gather_sum import take_values

        return take_values(value_SK, layout.pair_N, layout.offsets_E1)
    value_N = value_SK.reshape(-1).index_select(0, layout.pair_N)
    if value_N.is_cuda:
        return layout.zero_padding(value_N)
    value_N[int(layout.offsets_E1[-1]) :] = 0
    return value_N


def put_pairs(value_N: Tensor, layout: Layout) -> Tensor:
    """Scatter row values to (token, k) pairs, 0 without a row; adjoint of `take_pairs`. Never reads padding."""
    if layout.rows == 0:
        return value_N.new_zeros(layout.row_SK.shape)
    if uses_triton(value_N):
        if value_N.element_size() <= 8:
            from fusedmoe.kernels.triton.gather_sum import put_values

            return put_values(value_N, layout.row_SK)
        # Dropped pairs read row 0 and are masked, which needs no host synchronization.
        return torch.where(layout.row_SK < 0, 0, value_N[layout.row_SK.clamp(min=0)])
    # Padding rows have the index of another row's pair, so scatter kept rows only.
    value_SK = value_N.new_zeros(layout.row_SK.shape)
    value_SK.view(-1).scatter_(0, layout.pair_N[: layout.kept], value_N[: layout.kept])
    return value_SK


def define_permute(x_SM: Tensor, layout: Layout) -> Tensor:
    assert layout.source_N is not None
    rows = [x_SM[s] if n < sum(layout.counts) else 0 * x_SM[s] for n, s in enumerate(layout.source_N.tolist())]
    return torch.stack(rows) if rows else x_SM[:0]


def define_gather_sum(rows_NM: Tensor, layout: Layout, weight_N: Tensor | None = None) -> Tensor:
    y_SM = rows_NM.new_zeros((layout.tokens, rows_NM.shape[1]))
    for s, rows in enumerate(layout.row_SK.tolist()):
        for row in rows:
            if row >= 0:
                y_SM[s] += rows_NM[row] if weight_N is None else rows_NM[row] * weight_N[row]
    return y_SM
