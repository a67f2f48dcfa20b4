"""The three moves of one choice's rows, as functions that write into a tensor of theirs.

`extra` is [tokens, row length, capacity] in all of them; index < 0 and location ≥ capacity mean no row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Move = Callable[..., None]


def create_forward(param_dtype: torch.dtype, is_cuda: bool = True) -> Move:
    """`f(gates, indices, locations, tokens, rows, extra)`: rows[place] += gate · token."""

    def run(
        gates: Tensor, indices: Tensor, locations: Tensor, tokens: Tensor, rows: Tensor, extra: Sequence[int]
    ) -> None:
        kept, place = _places(indices, locations, extra)
        rows.view(-1, tokens.shape[1]).index_add_(0, place, (tokens[kept] * _column(gates)[kept]).to(rows.dtype))

    return run


def create_backward_data(param_dtype: torch.dtype, is_cuda: bool = True) -> Move:
    """`f(gates, indices, locations, tokens, rows, extra)`: token = gate · rows[place], zero without a row."""

    def run(
        gates: Tensor, indices: Tensor, locations: Tensor, tokens: Tensor, rows: Tensor, extra: Sequence[int]
    ) -> None:
        kept, place = _places(indices, locations, extra)
        tokens.zero_()
        tokens[kept] = (rows.view(-1, tokens.shape[1])[place] * _column(gates)[kept]).to(tokens.dtype)

    return run


def create_backward_gate(param_dtype: torch.dtype, is_cuda: bool = True) -> Move:
    """`f(dgates, indices, locations, tokens, rows, extra)`: dgate = ⟨token, rows[place]⟩, zero without a row."""

    def run(
        dgates: Tensor, indices: Tensor, locations: Tensor, tokens: Tensor, rows: Tensor, extra: Sequence[int]
    ) -> None:
        kept, place = _places(indices, locations, extra)
        dgates.zero_()
        dgates[kept] = (tokens[kept] * rows.view(-1, tokens.shape[1])[place]).sum(1).to(dgates.dtype)

    return run


def _places(indices: Tensor, locations: Tensor, extra: Sequence[int]) -> tuple[Tensor, Tensor]:
    capacity = extra[2]
    kept = ((indices >= 0) & (locations < capacity)).nonzero()[:, 0]
    return kept, indices[kept].long() * capacity + locations[kept].long()


def _column(gates: Tensor) -> Tensor:
    return gates.view(len(gates), -1)[:, :1]
