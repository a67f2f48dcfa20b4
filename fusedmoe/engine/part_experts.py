"""Experts in chunks whose weights lie in parts: joined for a pass, and not kept between the two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedmoe.autograd.experts import WeightParts
from fusedmoe.engine.chunk_experts import GroupedExperts, Rest, Totals
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout


class _SplitTotals(list["Tensor | None"]):
    """Gradients of the parts, which are views of those of the joined weights: chunks add to these."""

    def __init__(self, joined: Totals, how: WeightParts) -> None:
        assert joined is not None and joined[0] is not None and joined[1] is not None
        super().__init__(how.split(joined[0], joined[1]))
        self.joined = joined


class PartExperts:
    """Feed-forward experts by their own kernels, without biases, as `fusedmoe.ops.experts_in_parts` computes them.

    A chunk keeps its pre-activations.

    Args: as for `fusedmoe.ops.experts_in_parts`.
    """

    any_degree = True

    def __init__(self, parts: Sequence[Tensor], how: WeightParts, activation: str) -> None:
        self.parameters, self._how, self._activation = tuple(parts), how, activation
        self._joined: GroupedExperts | None = None

    def for_backward(self) -> PartExperts:
        # Without the joined weights: a graph that kept them would keep a copy of all experts.
        return PartExperts(self.parameters, self._how, self._activation)

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._experts(x_RM).forward(x_RM, layout, weight_R)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor, kept: Tensor, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor, Tensor | None, Totals]:
        dx_RM, dweight_R, joined = self._experts(x_RM).backward(dy_RM, x_RM, kept, layout, weight_R, _joined(totals))
        return dx_RM, dweight_R, _SplitTotals(joined, self._how)

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor, kept: Tensor, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Rest]:
        dx_RM, dweight_R, rest = self._experts(x_RM).backward_rows(dy_RM, x_RM, kept, layout, weight_R)
        return dx_RM, dweight_R, lambda totals: _SplitTotals(rest(_joined(totals)), self._how)

    def _experts(self, x_RM: Tensor) -> GroupedExperts:
        if self._joined is None:
            w1, w2 = self._how.join([part.to(x_RM.dtype) for part in self.parameters])
            self._joined = GroupedExperts(Weights(w1, w2, None, None, 0), self._activation)
        return self._joined


def _joined(totals: Totals) -> Any:
    assert totals is None or isinstance(totals, _SplitTotals)
    return None if totals is None else totals.joined
