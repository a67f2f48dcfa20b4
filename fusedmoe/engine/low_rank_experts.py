"""Feed-forward experts with low-rank adapters, chunk by chunk."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fusedmoe.engine.chunk_experts import Rest, Totals, add_all
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.low_rank import Adapters, low_rank_backward, low_rank_forward


class LowRankChunks:
    """Frozen experts and their adapters, which alone have gradients. A chunk keeps its hidden_NL."""

    any_degree = keeps_rows = tokens_learn = weights_learn = True

    def __init__(self, weights: Weights, adapters: Adapters, activation: str) -> None:
        self.weights, self.adapters = weights.contiguous(), adapters.contiguous()
        self.activation = ACTIVATIONS[activation]
        self.parameters = tuple(factor for adapter in self.adapters if adapter is not None for factor in adapter[:2])

    def for_backward(self) -> LowRankChunks:
        return self

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        return low_rank_forward(x_RM, layout, weight_R, self.weights, self.adapters, self.activation)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        assert x_RM is not None
        given = (dy_RM, x_RM, kept, layout, weight_R, self.weights, self.adapters, self.activation)
        trained = any(factor.requires_grad for factor in self.parameters)
        dx_RM, dweight_R, factors = low_rank_backward(*given, trained, self.tokens_learn)
        # In the order of `parameters`, which has none where there is no adapter.
        grads = [grad for grad in factors if grad is not None] if trained else [None] * len(self.parameters)
        return dx_RM, dweight_R, add_all(totals, grads)

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Rest]:
        """Gives all gradients: those of the factors are too small to wait for."""
        dx_RM, dweight_R, grads = self.backward(dy_RM, x_RM, kept, layout, weight_R, None)
        return dx_RM, dweight_R, partial(add_all, grads=grads)
