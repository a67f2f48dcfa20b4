"""Auxiliary losses in layer attributes, whose gradients a reentrant checkpoint would silently drop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe.compat.torch import is_forward_mode_enabled
from fusedmoe.errors import DerivativeError
from fusedmoe.kernels.derivatives import operator, register_fake, register_gradient


def is_in_autograd_function() -> bool:
    """Return whether the caller runs inside the forward of an autograd function, such as a reentrant checkpoint.

    Forward-mode AD is disabled there and in inference mode, but not under `torch.no_grad()`.
    """
    return not (torch.is_grad_enabled() or torch.is_inference_mode_enabled() or is_forward_mode_enabled())


def guard_aux_loss(aux: Tensor, layer: str, like: Tensor | None, if_any: bool = False) -> Tensor:
    """Return the auxiliary loss, or, inside a reentrant checkpoint, a copy that raises if it gets a nonzero gradient.

    The checkpoint's forward has no graph. Its backward recomputes the layer with one, but the caller's total loss
    contains the first value, whose gradient would be lost. A loss that the checkpointed function returns keeps its
    gradient, because autograd then uses the checkpoint's output.

    Args:
        layer: name of the layer, for errors.
        like: a parameter of the gate, used in compiled graphs only. These cannot detect a checkpoint: they return the
            copy whenever `like` requires grad, so call this only while gradients are disabled.
        if_any: the layer may have no auxiliary loss, which is then zero: a zero loss never raises.
    """
    # Eager code detects the checkpoint; any tensor that requires grad then serves as `like`.
    if not torch.compiler.is_compiling():
        like = torch.empty(0, requires_grad=True, device="cpu") if is_in_autograd_function() else None
    if like is None or not like.requires_grad:
        return aux
    # Autograd is disabled here, so the graph consists of the one node that raises.
    with torch.enable_grad():
        refusing: Tensor = refuse_gradient(aux.detach(), like, layer, if_any)
    return refusing


# An operator, because a compiled graph detects the checkpoint only in its backward.
@operator("refuse_gradient")
def refuse_gradient(aux: Tensor, like: Tensor, layer: str, if_any: bool) -> Tensor:
    # An operator must not return a view of an argument.
    return aux.clone()


@register_fake(refuse_gradient)
def _(aux: Tensor, like: Tensor, layer: str, if_any: bool) -> Tensor:
    return aux.new_empty(aux.shape)


@operator("refuse_gradient_backward")
def refuse_gradient_backward(grad: Tensor, aux: Tensor | None, like: Tensor, layer: str) -> Tensor:
    """Backward of `refuse_gradient`: raise if the auxiliary loss has a gradient, which the checkpoint would lose.

    A reentrant activation checkpoint runs its forward without a graph, so a loss from inside it cannot reach the gate.

    Args:
        grad: gradient of the auxiliary loss.
        aux: the auxiliary loss, if the layer may have none (`if_any`): its value is then 0. None: the layer has one.
    Returns:
        Zeros like `like`, if `grad` is 0 or the layer has no auxiliary loss.
    Raises:
        DerivativeError: a gradient would be lost.
    """
    if grad == 0 or (aux is not None and aux == 0):
        return torch.zeros_like(like)
    raise DerivativeError(
        f"{layer} was made in a reentrant activation checkpoint (torch.utils.checkpoint or gradient checkpointing with "
        "use_reentrant=True, Megatron's recompute): its gradient would be lost. Set use_reentrant=False, or return the "
        "loss from the checkpointed function along with the output"
    )


@register_fake(refuse_gradient_backward)
def _(grad: Tensor, aux: Tensor | None, like: Tensor, layer: str) -> Tensor:
    return like.new_empty(like.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    aux, like, ctx.layer, if_any = inputs
    ctx.save_for_backward(aux if if_any else None, like)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return None, refuse_gradient_backward(grad, *ctx.saved_tensors, ctx.layer), None, None


register_gradient(refuse_gradient, _backward, _setup)
