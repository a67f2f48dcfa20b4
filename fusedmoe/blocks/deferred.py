"""Linear maps whose weight gradients are computed later: the backward pass first gives the gradients of inputs.

What waits for a layer's backward pass waits for the gradient of its input; those of its weights can be computed beside
communication (Lancet §4). Inside `with later:` every `torch.nn.functional.linear` by one of the given parameters keeps
its input and, in the backward pass, its output's gradient; `later.run(add)` then makes their product. What else uses
parameters has its gradients at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusedmoe.kernels.derivatives import Function


class DeferredGradients(TorchFunctionMode):
    """Context whose linear maps by some parameters have their weight gradients computed later.

    `parameters`: leaves; `run` tells a gradient by its parameter's place among them. A frozen one has none.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._places = {id(one): place for place, one in enumerate(parameters) if one.requires_grad}
        self._waiting: list[tuple[int, int | None, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        places = self._places.get(id(weight)), self._places.get(id(bias))
        # A weight that is none of ours, or an input that needs no gradient: nothing would wait for its gradient.
        if places[0] is None or not (input.requires_grad and torch.is_grad_enabled()):
            return torch.nn.functional.linear(input, weight, bias)
        # The graph must not lead to the leaves: their gradients come by `run`.
        weight = weight.detach()
        if bias is not None and places[1] is not None:
            bias = bias.detach()
        device = input.device.type
        if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:  # which autocast leaves as it is
            dtype = torch.get_autocast_dtype(device)
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return _DeferredLinear.apply(input, weight, bias, self, *places)

    def keep(self, weight: int, bias: int | None, x: Tensor, dy: Tensor) -> None:
        self._waiting.append((weight, bias, x, dy))

    def run(self, add: Callable[[int, Tensor], None]) -> None:
        """Calls `add(place, gradient)` for every linear map whose backward has been; once.

        Under autocast gradients are in the lower precision.
        """
        waiting, self._waiting = self._waiting, []
        for weight, bias, x, dy in waiting:
            rows = dy.reshape(-1, dy.shape[-1])
            add(weight, rows.t() @ x.reshape(-1, x.shape[-1]))
            if bias is not None:
                add(bias, rows.sum(0))


class _DeferredLinear(Function):
    operation = "a linear map whose weight gradient is a task of its own"

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: DeferredGradients, *places: int | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later, ctx.places = later, places
        # Casts have been made outside, where autograd sees them.
        with torch.autocast(x.device.type, enabled=False):
            return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.later.keep(*ctx.places, x, dy)
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return dy @ weight, None, dbias, None, None, None
