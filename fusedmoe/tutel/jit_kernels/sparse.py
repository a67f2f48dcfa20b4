"""The three moves of one choice's rows, as functions that write into one of their arguments.

Indices, locations and gates have an element for each token, as [T] or [T, 1] (gates also as [T, 2], twice the same);
tokens and rows may have any leading dimensions. `extra` is [tokens, row length, capacity] in all three; index < 0 and
location ≥ capacity mean no row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Move = Callable[..., None]


def create_forward(param_dtype: torch.dtype, is_cuda: bool = True) -> Move:
    """Makes `f(gates, indices, locations, tokens, rows, extra)`: rows[place] += gate · token."""

    def run(
        gates: Tensor, indices: Tensor, locations: Tensor, tokens: Tensor, rows: Tensor, extra: Sequence[int]
    ) -> None:
        D, (kept, place) = tokens.shape[-1], _places(indices, locations, extra)
        weighted = _flat(tokens, D)[kept] * _column(gates)[kept]
        _flat(rows, D).index_add_(0, place, weighted.to(rows.dtype))

    return run


def create_backward_data(param_dtype: torch.dtype, is_cuda: bool = True) -> Move:
    """Makes `f(gates, indices, locations, tokens, rows, extra)`: token = gate · rows[place], zero without a row."""

    def run(
        gates: Tensor, indices: Tensor, locations: Tensor, tokens: Tensor, rows: Tensor, extra: Sequence[int]
    ) -> None:
        D, (kept, place) = tokens.shape[-1], _places(indices, locations, extra)
        tokens.zero_()
        weighted = _flat(rows, D)[place] * _column(gates)[kept]
        _flat(tokens, D)[kept] = weighted.to(tokens.dtype)

    return run


def create_backward_gate(param_dtype: torch.dtype, is_cuda: bool = True) -> Move:
    """Makes `f(dgates, indices, locations, tokens, rows, extra)`: dgate = ⟨token, rows[place]⟩, zero without a row."""

    def run(
        dgates: Tensor, indices: Tensor, locations: Tensor, tokens: Tensor, rows: Tensor, extra: Sequence[int]
    ) -> None:
        D, (kept, place) = tokens.shape[-1], _places(indices, locations, extra)
        dgates.zero_()
        dots = (_flat(tokens, D)[kept] * _flat(rows, D)[place]).sum(1)
        _column(dgates)[kept, 0] = dots.to(dgates.dtype)

    return run


def _places(indices: Tensor, locations: Tensor, extra: Sequence[int]) -> tuple[Tensor, Tensor]:
    indices, locations, capacity = indices.reshape(-1), locations.reshape(-1), extra[2]
    kept = ((indices >= 0) & (locations < capacity)).nonzero()[:, 0]
    return kept, indices[kept].long() * capacity + locations[kept].long()


def _flat(rows: Tensor, width: int) -> Tensor:
    # A view: writes to it are writes to `rows`.
    return rows.view(-1, width)


def _column(gates: Tensor) -> Tensor:
    return gates[:, None] if gates.dim() == 1 else gates[:, :1]
