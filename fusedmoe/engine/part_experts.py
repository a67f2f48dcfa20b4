"""Experts in chunks whose weights lie in parts: joined for a pass, and not kept between the two."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from torch import Tensor

from fusedmoe.autograd.experts import WeightParts, learning_weights, shape_of
from fusedmoe.engine.chunk_experts import GroupedExperts, Rest, Totals, learning
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout


class _SplitTotals(list["Tensor | None"]):
    """Gradients of the parts that learn, which are views of those of the joined weights: chunks add to these."""

    def __init__(self, joined: Totals, parts: Sequence[Tensor], learns: Sequence[bool]) -> None:
        super().__init__(part if learn else None for part, learn in zip(parts, learns, strict=True))
        self.joined = joined


class PartExperts:
    """Feed-forward experts by their own kernels, without biases, as `fusedmoe.ops.experts_in_parts` computes them.

    A chunk keeps its pre-activations.

    Args: as for `fusedmoe.ops.experts_in_parts`.
    """

    any_degree = tokens_learn = weights_learn = True

    def __init__(self, parts: Sequence[Tensor], how: WeightParts, activation: str) -> None:
        self.parameters, self._how, self._activation = tuple(parts), how, activation
        self._learns = learning(parts)
        self.keeps_rows = any(self._learns)
        self._joined: GroupedExperts | None = None

    def for_backward(self) -> PartExperts:
        # Without the joined weights: a graph that kept them would keep a copy of all experts.
        experts = copy(self)
        experts._joined = None
        return experts

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._experts(x_RM).forward(x_RM, layout, weight_R)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        dx_RM, dweight_R, joined = self._experts(dy_RM).backward(dy_RM, x_RM, kept, layout, weight_R, _joined(totals))
        return dx_RM, dweight_R, self._split(joined)

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Rest]:
        dx_RM, dweight_R, rest = self._experts(dy_RM).backward_rows(dy_RM, x_RM, kept, layout, weight_R)
        return dx_RM, dweight_R, lambda totals: self._split(rest(_joined(totals)))

    def _experts(self, like: Tensor) -> GroupedExperts:
        if self._joined is None:
            w1, w2 = self._how.join([part.to(like.dtype) for part in self.parameters])
            learns = (*learning_weights(self._how, w1, w2, self._learns), False, False)
            self._joined = GroupedExperts(Weights(w1, w2, None, None, 0), self._activation, learns)
            self._joined.tokens_learn, self._joined.weights_learn = self.tokens_learn, self.weights_learn
        return self._joined

    def _split(self, joined: Totals) -> Totals:
        assert joined is not None and self._joined is not None
        weights = self._joined.weights.w1, self._joined.weights.w2
        # Of a matrix that is frozen there is nothing to split but its shape.
        grads = (shape_of(w) if grad is None else grad for w, grad in zip(weights, joined, strict=False))
        return _SplitTotals(joined, self._how.split(*grads), self._learns)


def _joined(totals: Totals) -> Any:
    assert totals is None or isinstance(totals, _SplitTotals)
    return None if totals is None else totals.joined
