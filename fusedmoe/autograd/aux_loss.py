"""An auxiliary loss as a layer's attribute: its gradient arrives, or is refused where it cannot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe.errors import DerivativeError
from fusedmoe.kernels.derivatives import Function


def in_function() -> bool:
    """Whether this runs in the forward of a function of autograd, as what a reentrant activation checkpoint holds does.

    There, and in inference mode, forward mode is off as well; `torch.no_grad()` leaves it on.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    return not torch._C._is_fwd_grad_enabled()


def refusing_gradients(aux: Tensor, layer: str, if_any: bool = False) -> Tensor:
    """The same number, which refuses a gradient: made in a reentrant checkpoint, it is no part of any graph.

    The checkpoint's backward computes the layer again, with a graph, but whoever adds the number to a loss has the
    first one, and a coefficient of which that backward knows nothing. (Returned from the checkpointed function it is an
    output of the checkpoint, which takes this function's place: then gradients arrive.)

    Args:
        layer: whose it is, in errors.
        if_any: there may be no loss: a zero refuses nothing.
    """
    with torch.enable_grad():
        return _OfCheckpoint.apply(aux.detach().requires_grad_(), layer, if_any)


class _OfCheckpoint(Function):
    operation = "the auxiliary loss of a layer in a reentrant checkpoint"

    @staticmethod
    def forward(ctx: Any, aux: Tensor, layer: str, if_any: bool) -> Tensor:
        ctx.layer, ctx.perhaps_none = layer, aux.detach() if if_any else None
        return aux.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if grads[0] == 0 or (ctx.perhaps_none is not None and ctx.perhaps_none == 0):
            return grads[0], None, None
        raise DerivativeError(
            f"{ctx.layer} was made in a reentrant activation checkpoint (torch.utils.checkpoint or gradient checkpointing "
            "with use_reentrant=True, Megatron's recompute): its gradient would be lost. Set use_reentrant=False, or "
            "return the loss from the checkpointed function, beside the output"
        )
