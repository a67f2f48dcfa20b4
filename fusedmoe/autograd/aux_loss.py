"""An auxiliary loss as a layer's attribute: its gradient arrives, or is refused where it cannot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe.compat.torch import is_forward_mode_enabled
from fusedmoe.errors import DerivativeError
from fusedmoe.kernels.derivatives import operator, register_fake, register_gradient


def in_function() -> bool:
    """Returns whether this runs in the forward of an autograd function, as the inside of a reentrant checkpoint does.

    There, and in inference mode, forward mode is off as well; `torch.no_grad()` leaves it on.
    """
    return not (torch.is_grad_enabled() or torch.is_inference_mode_enabled() or is_forward_mode_enabled())


def without_a_graph(aux: Tensor, layer: str, like: Tensor | None, if_any: bool = False) -> Tensor:
    """Returns an auxiliary loss as it is to be kept: the same number, which refuses gradients if it was made in a
    reentrant checkpoint.

    The checkpoint's backward computes the layer again, with a graph, but whoever adds the number to a loss has the
    first one, and a coefficient of which that backward knows nothing. (Returned from the checkpointed function it is an
    output of the checkpoint, whose gradient takes this one's place and arrives.)

    Args:
        layer: whose it is, in errors.
        like: a parameter of the gate. A compiled graph does not know what it will run in: by this each refuses.
        if_any: there may be no loss: a zero refuses nothing.
    """
    # An eager layer knows whether it runs in a checkpoint, and then any tensor with a gradient will do.
    if not torch.compiler.is_compiling():
        like = torch.empty(0, requires_grad=True, device="cpu") if in_function() else None
    if like is None or not like.requires_grad:
        return aux
    # In the checkpoint's forward no graph is made; the refusal is one, of a single node.
    with torch.enable_grad():
        refusing: Tensor = refuse_gradient(aux.detach(), like, layer, if_any)
    return refusing


# Operators, so that compiled graphs hold the refusal, and decide in the backward, when it is known where they ran.
@operator("refuse_gradient")
def refuse_gradient(aux: Tensor, like: Tensor, layer: str, if_any: bool) -> Tensor:
    # An operator returns memory of its own.
    return aux.clone()


@register_fake(refuse_gradient)
def _(aux: Tensor, like: Tensor, layer: str, if_any: bool) -> Tensor:
    return aux.new_empty(aux.shape)


@operator("refused_gradient")
def refused_gradient(grad: Tensor, aux: Tensor | None, like: Tensor, layer: str) -> Tensor:
    """Zeros like `like`, where there is nothing to refuse: no gradient, or no loss, if that is given.

    Raises:
        DerivativeError: else.
    """
    # A loss with coefficient zero, or none at all, loses nothing.
    if grad == 0 or (aux is not None and aux == 0):
        return torch.zeros_like(like)
    raise DerivativeError(
        f"{layer} was made in a reentrant activation checkpoint (torch.utils.checkpoint or gradient checkpointing with "
        "use_reentrant=True, Megatron's recompute): its gradient would be lost. Set use_reentrant=False, or return the "
        "loss from the checkpointed function, beside the output"
    )


@register_fake(refused_gradient)
def _(grad: Tensor, aux: Tensor | None, like: Tensor, layer: str) -> Tensor:
    return like.new_empty(like.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    aux, like, ctx.layer, if_any = inputs
    ctx.save_for_backward(aux if if_any else None, like)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return None, refused_gradient(grad, *ctx.saved_tensors, ctx.layer), None, None


register_gradient(refuse_gradient, _backward, _setup)
