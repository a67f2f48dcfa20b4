"""Least work of each of the library's operations: the ground of rooflines and of fractions of a limit.

Of the grouped products there is a function for each launcher. Counted are products, two operations a multiply-add, and
every tensor once: tokens (however often they are gathered), weights of all experts, and rows. Indices, router weights,
biases and activations are left out, being small beside them.

Arguments: rows routed (R), tokens (T), experts (E), model dimension (d), hidden dimension of an expert (n), and bytes
of an element. Activations are gated, so that their input is twice as wide as the hidden layer.
"""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """Floating point operations (a multiply-add counts as two), and bytes that must be read or written once."""

    flops: int
    bytes: int


def gate(tokens: int, dim: int, experts: int, k: int, element_size: int, *, backward: bool = False) -> Cost:
    """Counts the router's products, and tokens, matrix, float32 logits and choices each read or written once.

    Backward reads what forward kept, and the weights' gradient, and writes the gradients of tokens and matrix.
    """
    product = 2 * tokens * dim * experts
    operands = element_size * dim * (tokens + experts)
    results = 4 * tokens * experts + 12 * tokens * k
    return Cost(2 * product, 2 * operands + results) if backward else Cost(product, operands + results)


def layout(tokens: int, k: int, experts: int, rows: int) -> Cost:
    """Reads the experts chosen, writes every array of the layout."""
    return Cost(0, 8 * (2 * tokens * k + 2 * rows + experts) + 4 * (experts + 1))


def gather_sum(rows: int, tokens: int, k: int, dim: int, element_size: int, weighted: bool) -> Cost:
    """Reads rows that are kept, indices, and 4 bytes of weight a row, and writes tokens."""
    flops = rows * dim * (2 if weighted else 1)
    moved = (rows + tokens) * dim * element_size + tokens * k * 8 + (rows * 4 if weighted else 0)
    return Cost(flops, moved)


def up(rows: int, tokens: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Reads tokens and W1, writes H and A."""
    wide = 2 * hidden
    return Cost(2 * rows * wide * dim, element_size * (tokens * dim + experts * wide * dim + rows * (wide + hidden)))


def down(rows: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Reads A and W2, writes Y."""
    return Cost(2 * rows * hidden * dim, element_size * (rows * hidden + experts * hidden * dim + rows * dim))


def dhidden(rows: int, tokens: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Reads tokens' gradients, W2 and H, writes dH and A."""
    each = 5 * hidden
    return Cost(2 * rows * hidden * dim, element_size * (tokens * dim + experts * hidden * dim + rows * each))


def dinput(rows: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Reads dH and W1, writes the rows' gradients."""
    return down(rows, experts, dim, 2 * hidden, element_size)


def dw2(rows: int, tokens: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Reads tokens' gradients and A, writes the gradient of W2."""
    return Cost(2 * rows * hidden * dim, element_size * (tokens * dim + rows * hidden + experts * hidden * dim))


def dw1(rows: int, tokens: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Reads tokens and dH, writes the gradient of W1."""
    return dw2(rows, tokens, experts, dim, 2 * hidden, element_size)
