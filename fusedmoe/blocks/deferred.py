"""Deferred weight gradients of linear layers, computed after the input gradients.

Earlier layers wait only for input gradients; weight gradients can overlap with communication (Lancet §4). Other uses of
the parameters compute their gradients immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusedmoe.kernels.derivatives import Function


class DeferredGradients(TorchFunctionMode):
    """Context in which `torch.nn.functional.linear` saves its inputs and output gradients, for `run`.

    Args:
        parameters: leaves; `run` identifies each by its index. Frozen parameters get no gradient.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._index_by_id = {id(one): index for index, one in enumerate(parameters) if one.requires_grad}
        self._deferred: list[tuple[int, int | None, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        indices = self._index_by_id.get(id(weight)), self._index_by_id.get(id(bias))
        # Nothing to defer, or no earlier layer waits for the input's gradient.
        if indices[0] is None or not (input.requires_grad and torch.is_grad_enabled()):
            return torch.nn.functional.linear(input, weight, bias)
        # Detached: `run` computes the parameters' gradients.
        weight = weight.detach()
        if bias is not None and indices[1] is not None:
            bias = bias.detach()
        device = input.device.type
        if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:  # autocast does not cast float64
            dtype = torch.get_autocast_dtype(device)
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return _DeferredLinear.apply(input, weight, bias, self, *indices)

    def save(self, weight: int, bias: int | None, x: Tensor, dy: Tensor) -> None:
        self._deferred.append((weight, bias, x, dy))

    def run(self, add: Callable[[int, Tensor], None]) -> None:
        """Call `add(index, gradient)` for the weight and bias of every linear call whose backward has run.

        Under autocast the gradients have the lower precision.
        """
        deferred, self._deferred = self._deferred, []
        for weight, bias, x, dy in deferred:
            rows = dy.reshape(-1, dy.shape[-1])
            add(weight, rows.t() @ x.reshape(-1, x.shape[-1]))
            if bias is not None:
                add(bias, rows.sum(0))


class _DeferredLinear(Function):
    operation = "a linear map whose weight gradient is a task of its own"

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferredGradients, *indices: int | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deferred, ctx.indices = deferred, indices
        # `_linear` has already cast the input, where autograd records the cast.
        with torch.autocast(x.device.type, enabled=False):
            return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.deferred.save(*ctx.indices, x, dy)
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return dy @ weight, None, dbias, None, None, None
