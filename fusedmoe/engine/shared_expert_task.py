"""The shared expert of a layer as a task of its plan: computed while rows of the routed experts are in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.engine.chunk_experts import ChunkExperts, Totals
from fusedmoe.engine.chunks import concat
from fusedmoe.kernels.layout import Layout, contiguous_layout


class SharedExpertTask:
    """Computes the shared expert in one planned forward pass, or its gradients in the backward pass.

    A plan may compute it in parts: each call of `forward` or `backward` computes the next part of the tokens.

    Attributes:
        x_SM: tokens; None if the backward does not read them.
        activations: saved by the experts: one tensor, or an autograd graph for each part of the forward pass.
        result: [S, M] after `forward`; after `backward` the gradient of the tokens, None if they need none.
        totals: gradients of the parameters, after `backward`.
        is_done: all parts are computed.
    """

    def __init__(self, experts: ChunkExperts, x_SM: Tensor | None, activations: Sequence[Any] = ()) -> None:
        self.experts, self.x_SM, self.activations = experts, x_SM, [*activations]
        self.result: Tensor | None = None
        self.totals: Totals = None
        self.is_done = False
        self._parts: list[Tensor | None] = []
        self._num_done = 0

    def forward(self, count: int, keep: bool) -> None:
        """Compute the next of `count` parts. `keep`: save tokens and activations, because a backward pass follows."""
        assert self.x_SM is not None
        x_SM = self.x_SM if count == 1 else self.x_SM.tensor_split(count)[self._num_done]
        result, activations = self.experts.forward(x_SM, single_expert_layout(x_SM), None)
        self._add(result, count)
        if keep:
            self.activations.append(activations)
        if self.is_done and not (keep and self.experts.needs_input_rows):
            self.x_SM = None
        if self.is_done and keep and self.experts.can_rechunk:
            self.activations = [concat(self.activations)]

    def backward(self, dy_SM: Tensor, count: int) -> None:
        """Compute the next of `count` parts. `dy_SM`: [S, M], gradient of the result of all tokens."""
        number = self._num_done
        # Graphs have the parts of the forward pass.
        saved = 1 if self.experts.can_rechunk else len(self.activations)
        first, stop = (number, number + 1) if self.experts.can_rechunk else _part_bounds(number, count, saved)
        parts = count if self.experts.can_rechunk else saved
        dx_SM = []
        for part in range(first, stop):
            dy, x = (None if rows is None else _rows_of_part(rows, part, parts) for rows in (dy_SM, self.x_SM))
            assert dy is not None
            if self.experts.can_rechunk:
                activations = _rows_of_part(self.activations[0], part, parts)
            else:
                activations, self.activations[part] = self.activations[part], None
            given = dy.contiguous(), x, activations, single_expert_layout(dy), None
            dx, _, self.totals = self.experts.backward(*given, self.totals)
            if dx is not None:
                dx_SM.append(dx)
        self._add(concat(dx_SM) if dx_SM else None, count)
        if self.is_done:
            self.x_SM, self.activations = None, []

    def _add(self, part: Tensor | None, count: int) -> None:
        self._parts.append(part)
        self._num_done += 1
        if self._num_done == count:
            parts = [each for each in self._parts if each is not None]
            self.result, self.is_done = concat(parts) if parts else None, True
            self._parts.clear()

    def take_result(self) -> Tensor:
        assert self.result is not None
        result, self.result = self.result, None
        return result

    def save(self) -> tuple[tuple[Tensor | None, Tensor | None], list[Any]]:
        """Return the arguments `tensors` and `graphs` of `restored`."""
        if self.experts.can_rechunk:
            return (self.x_SM, self.activations[0]), []
        return (self.x_SM, None), self.activations

    @classmethod
    def restored(
        cls, experts: ChunkExperts, tensors: Sequence[Tensor | None], graphs: Sequence[Any]
    ) -> SharedExpertTask:
        x_SM, activations = tensors
        return cls(experts, x_SM, graphs if activations is None else [activations])


def _part_bounds(number: int, count: int, total: int) -> tuple[int, int]:
    return number * total // count, (number + 1) * total // count


def _rows_of_part(rows: Tensor, number: int, count: int) -> Tensor:
    return rows if count == 1 else rows.tensor_split(count)[number]


def single_expert_layout(x_SM: Tensor) -> Layout:
    """Return the layout with which a shared expert processes every token."""
    return contiguous_layout(torch.full((1,), x_SM.shape[0], device=x_SM.device), x_SM.shape[0])
