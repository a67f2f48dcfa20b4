"""Experts as the pipelined layer calls them: chunk by chunk, forward and backward apart, without autograd around."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fusedmoe.autograd.checks import check_rows
from fusedmoe.autograd.experts import no_wider
from fusedmoe.autograd.moves import Compute
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import (
    Gradients,
    Hidden,
    Wanted,
    Weights,
    experts_backward,
    experts_backward_rows,
    experts_backward_weights,
    experts_forward,
)
from fusedmoe.kernels.layout import Layout

# Gradients of parameters; None before the first chunk, and for a parameter without one.
Totals = Sequence["Tensor | None"] | None

# Adds a chunk's gradients of parameters to those of the chunks before.
Rest = Callable[[Totals], Totals]


class ChunkExperts(Protocol):
    """The local experts, for rows of one chunk, sorted by expert by a layout.

    Attributes:
        parameters: what gets gradients, in the order of those.
        any_degree: the backward's chunks may be others than the forward's. Then what a chunk keeps is one tensor whose
            n-th row belongs to the n-th sorted row.
        keeps_rows: the backward reads the rows that the forward was given; else it gets None for them.
    """

    @property
    def parameters(self) -> Sequence[Tensor | None]: ...

    @property
    def any_degree(self) -> bool: ...

    @property
    def keeps_rows(self) -> bool: ...

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Any]:
        """Results, and what the backward needs of them beside the inputs."""
        ...

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Any, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor, Tensor | None, Totals]:
        """Gradients of rows, of their weights, and of the parameters, these added up over the chunks.

        `totals`: what the chunk before gave; None at the first one. Of half precision in float32 from the second on.
        """
        ...

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Any, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Rest]:
        """Gradients of rows and of their weights, and what gives those of the parameters later."""
        ...

    def for_backward(self) -> ChunkExperts:
        """Returns what the backward pass needs.

        A graph keeps it, and so it holds no module: a layer that keeps a tensor of that graph would never go."""
        ...


class GroupedExperts:
    """Feed-forward experts by their own kernels, beside communication. A chunk keeps its pre-activations.

    Args:
        learns: w1, w2, b1 and b2 that have gradients; None: those that require them.
    Attributes:
        wanted: the gradients that are computed: those of rows and router weights, which go back to other ranks in any
            case, and those of parameters that have one.
    """

    any_degree = True

    def __init__(self, weights: Weights, activation: str, learns: Sequence[bool] | None = None) -> None:
        # Once for all chunks: kernels would copy matrices with other strides in each of them.
        weights = weights.contiguous()
        self.weights, self.activation = weights, ACTIVATIONS[activation]
        self.parameters = (weights.w1, weights.w2, weights.b1, weights.b2)
        self.wanted = Wanted(True, True, *(learning(self.parameters) if learns is None else learns))
        self.keeps_rows = self.wanted.w1

    def for_backward(self) -> GroupedExperts:
        return self

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        return experts_forward(x_RM, layout, weight_R, self.weights, self.activation, shared=True)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor, Tensor | None, Totals]:
        # Kernels add to what the chunks before gave: no second tensor of the parameters' size.
        given = (layout, weight_R, self.weights, self.activation, _gradients(totals), self.wanted)
        grads = experts_backward(dy_RM, x_RM, kept, *given, shared=True)
        assert grads.x_SM is not None
        return grads.x_SM, grads.weight_N, grads.parameters

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Rest]:
        given = (layout, weight_R, self.weights, self.activation, self.wanted)
        dx_RM, dweight_R, left = experts_backward_rows(dy_RM, kept, *given, shared=True)
        assert dx_RM is not None
        return dx_RM, dweight_R, partial(self.weight_gradients, dy_RM, x_RM, left, layout, weight_R)

    def weight_gradients(
        self,
        dy_RM: Tensor,
        x_RM: Tensor | None,
        left: Hidden,
        layout: Layout,
        weight_R: Tensor | None,
        totals: Totals,
    ) -> Totals:
        """The second half of `backward`."""
        given = (layout, weight_R, self.weights, _gradients(totals), self.wanted)
        return experts_backward_weights(dy_RM, x_RM, left, *given, shared=True).parameters


def learning(parameters: Sequence[Tensor | None]) -> list[bool]:
    """Tells which parameters have gradients."""
    return [parameter is not None and parameter.requires_grad for parameter in parameters]


class AutogradExperts:
    """Experts of any kind, by autograd inside each chunk. A chunk keeps its graph, so both passes have its chunks."""

    # What a chunk keeps has its rows.
    any_degree = keeps_rows = False

    def __init__(self, compute: Compute | None, parameters: Sequence[Tensor]) -> None:
        self._compute: Callable[..., Tensor] | None = compute
        self.parameters = tuple(parameters)

    def for_backward(self) -> AutogradExperts:
        # What chunks keep has the graph; with the module in it, a layer that holds a tensor of it would never go.
        return AutogradExperts(None, self.parameters)

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Any]:
        assert self._compute is not None
        with torch.enable_grad():
            # Leaves of a graph of its own: the pass around it runs without autograd, and asks for gradients by hand.
            x_RM = x_RM.detach().requires_grad_()
            weight_R = None if weight_R is None else weight_R.detach().requires_grad_()
            y_RM = no_wider(self._compute(x_RM, layout, weight_R), x_RM)
            check_rows("experts in chunks", "their result", y_RM, len(x_RM))
        return y_RM.detach(), (y_RM, x_RM, weight_R)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Any, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor, Tensor | None, Totals]:
        totals = totals or (None,) * len(self.parameters)
        y_RM, own_x_RM, own_weight_R = kept
        # Nothing here learns: rows go back all the same, for other ranks wait for as many as they have sent.
        if not y_RM.requires_grad:
            return torch.zeros_like(own_x_RM), None, totals
        # Parameters that are frozen get no gradient; those that these rows did not use have None.
        wanted = [p for p in self.parameters if p.requires_grad]
        inputs = [own_x_RM, *([] if own_weight_R is None else [own_weight_R]), *wanted]
        dx_RM, *others = torch.autograd.grad(y_RM, inputs, dy_RM, allow_unused=True)
        dweight_R = others.pop(0) if own_weight_R is not None else None
        found = iter(others)
        grads = (next(found) if p.requires_grad else None for p in self.parameters)
        totals = add_all(totals, tuple(grads))
        return torch.zeros_like(own_x_RM) if dx_RM is None else dx_RM, dweight_R, totals

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Any, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Rest]:
        """Gives all gradients, and what adds them up."""
        # Autograd makes all gradients at once: nothing is left for later but the sum.
        dx_RM, dweight_R, grads = self.backward(dy_RM, x_RM, kept, layout, weight_R, None)
        return dx_RM, dweight_R, lambda totals: add_all(totals, grads)


def _gradients(totals: Totals) -> Gradients | None:
    if totals is None:
        return None
    return Gradients(None, None, *(None if total is None else _at_least_float32(total) for total in totals))


def add_all(totals: Totals, grads: Totals) -> Totals:
    if totals is None or grads is None:
        return grads if totals is None else totals
    return tuple(_add(total, grad) for total, grad in zip(totals, grads, strict=True))


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if total is None or grad is None:
        return grad if total is None else total
    return _at_least_float32(total).add_(grad)


def _at_least_float32(total: Tensor) -> Tensor:
    # Chunks are not rounded one after the other: half precision is for their sum.
    return total.float() if total.dtype.itemsize < 4 else total
