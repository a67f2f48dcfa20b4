"""One way to compute the layer: gather, experts, weighted sum, from tokens and a given routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GRADIENTS = ("dx", "dweight", "dW1", "dW2")


class Unavailable(Exception):
    """A variant that cannot take part; the text says why."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A variant that is ready to run.

    Attributes:
        name, version: of the library.
        forward: [S, M] from `leaves`, sorting of the routing included.
        leaves: tokens, router weights, W1, W2, in whatever layout the variant wants; of several ranks, each one's W1,
            and then each one's W2.
        ours: turns the gradients of the leaves into those of the case's tensors.
    """

    name: str
    version: str | None
    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    ours: Callable[[Sequence[Tensor]], Sequence[Tensor]] = tuple

    def backward(self, y_SM: Tensor, dy_SM: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of the leaves."""
        return torch.autograd.grad(y_SM, self.leaves, dy_SM)


def leaf(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same memory that asks for a gradient."""
    return tensor.detach().requires_grad_()
