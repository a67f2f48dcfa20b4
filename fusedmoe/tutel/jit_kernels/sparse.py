"""Dispatch, combine and gate gradient for one choice per token. Each function writes into one of its arguments.

Indices, locations and gates are [T] or [T, 1] (gates also [T, 2], duplicated); tokens and rows may have any leading
dimensions. `extra` contains three integers: number of tokens, row length, capacity. Tokens with index < 0 or location ≥
capacity are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Move = Callable[..., None]


def create_forward(param_dtype: torch.dtype, is_cuda: bool = True) -> Move:
    """Return `f(gates, indices, locations, tokens, rows, extra)`: rows[slot] += gate · token."""
    return _forward


def create_backward_data(param_dtype: torch.dtype, is_cuda: bool = True) -> Move:
    """Return `f(gates, indices, locations, tokens, rows, extra)`: token = gate · rows[slot], zero if dropped."""
    return _backward_data


def create_backward_gate(param_dtype: torch.dtype, is_cuda: bool = True) -> Move:
    """Return `f(dgates, indices, locations, tokens, rows, extra)`: dgate = ⟨token, rows[slot]⟩, zero if dropped."""
    return _backward_gate


def _forward(
    gates: Tensor, indices: Tensor, locations: Tensor, tokens: Tensor, rows: Tensor, extra: Sequence[int]
) -> None:
    D, (kept, slot) = tokens.shape[-1], _kept_slots(indices, locations, extra)
    weighted = tokens.view(-1, D)[kept] * _column(gates)[kept]
    rows.view(-1, D).index_add_(0, slot, weighted.to(rows.dtype))


def _backward_data(
    gates: Tensor, indices: Tensor, locations: Tensor, tokens: Tensor, rows: Tensor, extra: Sequence[int]
) -> None:
    D, (kept, slot) = tokens.shape[-1], _kept_slots(indices, locations, extra)
    weighted = rows.view(-1, D)[slot] * _column(gates)[kept]
    tokens.zero_().view(-1, D)[kept] = weighted.to(tokens.dtype)


def _backward_gate(
    dgates: Tensor, indices: Tensor, locations: Tensor, tokens: Tensor, rows: Tensor, extra: Sequence[int]
) -> None:
    D, (kept, slot) = tokens.shape[-1], _kept_slots(indices, locations, extra)
    dots = (tokens.view(-1, D)[kept] * rows.view(-1, D)[slot]).sum(1)
    _column(dgates.zero_())[kept, 0] = dots.to(dgates.dtype)


def _kept_slots(indices: Tensor, locations: Tensor, extra: Sequence[int]) -> tuple[Tensor, Tensor]:
    indices, locations, capacity = indices.reshape(-1), locations.reshape(-1), extra[2]
    kept = ((indices >= 0) & (locations < capacity)).nonzero()[:, 0]
    return kept, indices[kept].long() * capacity + locations[kept].long()


def _column(gates: Tensor) -> Tensor:
    return gates[:, None] if gates.dim() == 1 else gates[:, :1]
