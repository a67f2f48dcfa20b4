"""The shared expert of a layer as a task of its plan: computed while rows of the routed experts are in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.engine.chunk_experts import ChunkExperts, Totals
from fusedmoe.kernels.layout import Layout, contiguous_layout


class SharedExpertTask:
    """Computes the shared expert in one planned forward pass, or its gradients in the backward pass.

    Attributes:
        x_SM: tokens; None if the backward does not read them.
        activations: saved by the experts: a tensor, or an autograd graph.
        result: [S, M] after `forward`; after `backward` the gradient of the tokens, None if they need none.
        totals: gradients of the parameters, after `backward`.
    """

    def __init__(self, experts: ChunkExperts, layout: Layout, x_SM: Tensor | None, activations: Any = None) -> None:
        self.experts, self.layout, self.x_SM, self.activations = experts, layout, x_SM, activations
        self.result: Tensor | None = None
        self.totals: Totals = None

    def forward(self, keep: bool) -> None:
        """Set `result`. `keep`: save tokens and activations, because a backward pass follows."""
        assert self.x_SM is not None
        self.result, self.activations = self.experts.forward(self.x_SM, self.layout, None)
        if not (keep and self.experts.needs_input_rows):
            self.x_SM = None
        if not keep:
            self.activations = None

    def backward(self, dy_SM: Tensor) -> None:
        given = dy_SM.contiguous(), self.x_SM, self.activations, self.layout, None
        self.result, _, self.totals = self.experts.backward(*given, None)
        self.x_SM = self.activations = None

    def take_result(self) -> Tensor:
        assert self.result is not None
        result, self.result = self.result, None
        return result

    def save(self) -> tuple[tuple[Tensor | None, Tensor | None], tuple[Layout, Any]]:
        """Return the arguments `tensors` and `state` of `restored`."""
        if self.experts.can_rechunk:
            return (self.x_SM, self.activations), (self.layout, None)
        return (self.x_SM, None), (self.layout, self.activations)

    @classmethod
    def restored(
        cls, experts: ChunkExperts, tensors: Sequence[Tensor | None], state: tuple[Layout, Any]
    ) -> SharedExpertTask:
        (x_SM, activations), (layout, graph) = tensors, state
        return cls(experts, layout, x_SM, graph if activations is None else activations)


def single_expert_layout(x_SM: Tensor) -> Layout:
    """Return the layout with which a shared expert processes every token."""
    return contiguous_layout(torch.full((1,), x_SM.shape[0], device=x_SM.device), x_SM.shape[0])
