"""Minimum work of each library operation, the basis of rooflines and limit fractions.

For the grouped products there is one function per launcher. Counted are products (two operations per multiply-add) and
one access to every tensor: tokens (however often gathered), weights of all experts, and rows. Indices, router weights,
biases and activations are negligible and omitted.

Arguments: routed rows (R), tokens (T), experts (E), model dimension (d), expert hidden dimension (n), and bytes per
element. Activations are gated, so their input is twice as wide as the hidden layer.
"""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """Floating point operations (two per multiply-add), and bytes read or written at least once."""

    flops: int
    bytes: int


def gate(tokens: int, dim: int, experts: int, k: int, element_size: int, *, backward: bool = False) -> Cost:
    """Router product; tokens, matrix, float32 logits and choices, each accessed once.

    Backward reads the saved tensors and the weights' gradient, and writes the gradients of tokens and matrix.
    """
    product = 2 * tokens * dim * experts
    operands = element_size * dim * (tokens + experts)
    results = 4 * tokens * experts + 12 * tokens * k
    return Cost(2 * product, 2 * operands + results) if backward else Cost(product, operands + results)


def layout(tokens: int, k: int, experts: int, rows: int) -> Cost:
    """Read expert choices, write all arrays of the layout."""
    return Cost(0, 8 * (2 * tokens * k + 2 * rows + experts) + 4 * (experts + 1))


def gather_sum(rows: int, tokens: int, k: int, dim: int, element_size: int, weighted: bool) -> Cost:
    """Read saved rows, indices and 4 bytes of weight per row; write tokens."""
    flops = rows * dim * (2 if weighted else 1)
    moved = (rows + tokens) * dim * element_size + tokens * k * 8 + (rows * 4 if weighted else 0)
    return Cost(flops, moved)


def up(rows: int, tokens: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Read tokens and W1, write H and A."""
    wide = 2 * hidden
    return Cost(2 * rows * wide * dim, element_size * (tokens * dim + experts * wide * dim + rows * (wide + hidden)))


def down(rows: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Read A and W2, write Y."""
    return Cost(2 * rows * hidden * dim, element_size * (rows * hidden + experts * hidden * dim + rows * dim))


def dhidden(rows: int, tokens: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Read token gradients, W2 and H; write dH and A."""
    each = 5 * hidden
    return Cost(2 * rows * hidden * dim, element_size * (tokens * dim + experts * hidden * dim + rows * each))


def dinput(rows: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Read dH and W1, write row gradients."""
    return down(rows, experts, dim, 2 * hidden, element_size)


def dw2(rows: int, tokens: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Read token gradients and A, write the gradient of W2."""
    return Cost(2 * rows * hidden * dim, element_size * (tokens * dim + rows * hidden + experts * hidden * dim))


def dw1(rows: int, tokens: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Read tokens and dH, write the gradient of W1."""
    return dw2(rows, tokens, experts, dim, 2 * hidden, element_size)
