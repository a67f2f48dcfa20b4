"""A variant of the layer: gather, experts and weighted sum, given tokens and routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GRADIENTS = ("dx", "dweight", "dW1", "dW2")


class Unavailable(Exception):
    """Raised if a variant cannot run, with the reason."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A variant that is ready to run.

    Attributes:
        name, version: of the library.
        forward: returns [S, M] from `leaves`, including the sorting of the routing.
        leaves: tokens, router weights, W1, W2 in the variant's layout; for several ranks, all W1, then all W2.
        ours: converts gradients of the leaves to those of the case's tensors.
    """

    name: str
    version: str | None
    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    ours: Callable[[Sequence[Tensor]], Sequence[Tensor]] = tuple

    def backward(self, y_SM: Tensor, dy_SM: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y_SM, self.leaves, dy_SM)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()
