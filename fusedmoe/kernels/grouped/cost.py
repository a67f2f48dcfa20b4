"""What each grouped product has to do at the least, one function for each of its launchers.

Counted are products, two operations a multiply-add, and every tensor once: tokens (however often they are gathered),
weights of all experts, and rows. Indices, router weights, biases and activations are left out, being small beside them.

Arguments: rows routed (R), tokens (T), experts (E), dim of the model (d), hidden width of an expert (n), bytes of an
element, and whether the activation is gated, so that its input is twice as wide as the hidden layer.
"""

from __future__ import annotations

from fusedmoe.kernels.cost import Cost


def up(rows: int, tokens: int, experts: int, dim: int, hidden: int, element_size: int, gated: bool = True) -> Cost:
    """Reads tokens and W1, writes H and A."""
    wide = _wide(hidden, gated)
    return Cost(2 * rows * wide * dim, element_size * (tokens * dim + experts * wide * dim + rows * (wide + hidden)))


def down(rows: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Reads A and W2, writes Y."""
    return Cost(2 * rows * hidden * dim, element_size * (rows * hidden + experts * hidden * dim + rows * dim))


def dhidden(rows: int, tokens: int, experts: int, dim: int, hidden: int, element_size: int, gated: bool = True) -> Cost:
    """Reads tokens' gradients, W2 and H, writes dH and A."""
    each = 2 * _wide(hidden, gated) + hidden
    return Cost(2 * rows * hidden * dim, element_size * (tokens * dim + experts * hidden * dim + rows * each))


def dinput(rows: int, experts: int, dim: int, hidden: int, element_size: int, gated: bool = True) -> Cost:
    """Reads dH and W1, writes the rows' gradients."""
    return down(rows, experts, dim, _wide(hidden, gated), element_size)


def dw2(rows: int, tokens: int, experts: int, dim: int, hidden: int, element_size: int) -> Cost:
    """Reads tokens' gradients and A, writes the gradient of W2."""
    return Cost(2 * rows * hidden * dim, element_size * (tokens * dim + rows * hidden + experts * hidden * dim))


def dw1(rows: int, tokens: int, experts: int, dim: int, hidden: int, element_size: int, gated: bool = True) -> Cost:
    """Reads tokens and dH, writes the gradient of W1."""
    return dw2(rows, tokens, experts, dim, _wide(hidden, gated), element_size)


def _wide(hidden: int, gated: bool) -> int:
    return 2 * hidden if gated else hidden
