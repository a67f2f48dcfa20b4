"""A router as one differentiable function: logits, choice of experts, weights, and sums for the auxiliary losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.checks import check_floats, check_rows, check_tensor, refuse
from fusedmoe.kernels import operators
from fusedmoe.kernels.derivatives import first_order, register_gradient
from fusedmoe.kernels.gate import GateChoice, GateRule, define_choice, fits_kernels, has_kernels

__all__ = ["GateChoice", "GateRule", "gate", "gate_from_logits", "router_product"]


def router_product(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    """x·Wᵀ [S, E] in float32, as exact as float32, of any mix of float32 and half precision; Triton only.

    Saves x and W as they are, no cast copies. Differentiable once; gradients come in the operands' dtypes.
    """
    return operators.router_product(x_SM, weight_EM)


def gate(x_SM: Tensor, weight_EM: Tensor, rule: GateRule, bias_E: Tensor | None = None) -> GateChoice:
    """Routes tokens by the logits x·Wᵀ (see `GateRule` for what follows from them).

    On CUDA one kernel, for up to 512 experts, 16 of them chosen, in float32 or half precision; differentiable once. The
    rest, and CPU tensors, plain torch. Neither waits for the device.

    Args:
        x_SM: [S, M] tokens, S ≥ 0, any float dtype, any strides.
        weight_EM: [E, M] router matrix, any float dtype.
        rule: choice and weights.
        bias_E: [E] added to the scores for the choice only; gets no gradient.
    Returns:
        A `GateChoice`, in float32 (float64 if an operand is). Gradients flow through weights, score sums and logsumexp.
    Saves for backward:
        x and W as they are, logits (S·E float32) and choices (S·K int64). Plain torch saves a few times S·E instead,
        and copies of x and W where these are in half precision.
    Raises:
        ConfigError: sizes, dtypes or devices that do not fit each other.
    """
    check_rows("gate", "x_SM", x_SM, None)
    check_floats("gate", "x_SM", x_SM)
    check_rows("gate", "weight_EM", weight_EM, None, x_SM)
    check_floats("gate", "weight_EM", weight_EM)
    if x_SM.shape[1] != weight_EM.shape[1]:
        shapes = f"tokens {list(x_SM.shape)} and matrix {list(weight_EM.shape)}"
        refuse("gate", f"{shapes} do not fit; they must be [S, M] and [E, M]")
    _check(weight_EM.shape[0], x_SM, rule, bias_E)
    if fits_kernels(weight_EM.shape[0], rule.k) and has_kernels(x_SM, weight_EM):
        return _asked_for(operators.gate(x_SM, weight_EM, _single(bias_E), *_fields(rule)), rule)
    dtype = torch.promote_types(torch.promote_types(x_SM.dtype, weight_EM.dtype), torch.float32)
    with torch.autocast(x_SM.device.type, enabled=False):
        return define_choice(x_SM.to(dtype) @ weight_EM.to(dtype).t(), rule, bias_E)


def gate_from_logits(logits_SE: Tensor, rule: GateRule, bias_E: Tensor | None = None) -> GateChoice:
    """As `gate`, from logits that are made elsewhere: noisy ones, or cosines.

    Args:
        logits_SE: [S, E] any float dtype; half precision becomes float32 first.
        rule, bias_E: as for `gate`.
    Returns:
        A `GateChoice`; its logits are the given ones.
    Saves for backward:
        the logits and the choices (S·K int64).
    Raises:
        ConfigError: sizes, dtypes or devices that do not fit each other.
    """
    check_tensor("gate", "logits_SE", logits_SE)
    check_floats("gate", "logits_SE", logits_SE)
    if logits_SE.dim() != 2:
        refuse("gate", f"logits must be [S, E], got {list(logits_SE.shape)}")
    _check(logits_SE.shape[1], logits_SE, rule, bias_E)
    logits_SE = logits_SE.to(torch.promote_types(logits_SE.dtype, torch.float32))
    if fits_kernels(logits_SE.shape[1], rule.k) and has_kernels(logits_SE):
        choice = _asked_for(operators.gate_from_logits(logits_SE, _single(bias_E), *_fields(rule)), rule)
        return choice._replace(logits_SE=logits_SE.detach())
    return define_choice(logits_SE, rule, bias_E)


def _single(bias_E: Tensor | None) -> Tensor | None:
    return None if bias_E is None else bias_E.detach().float().contiguous()


def _check(experts: int, of_tokens: Tensor, rule: GateRule, bias_E: Tensor | None) -> None:
    if not isinstance(rule, GateRule):
        refuse("gate", f"rule must be a GateRule, got {type(rule).__name__}")
    if rule.k > experts:
        refuse("gate", f"k = {rule.k} is more than its {experts} experts")
    if bias_E is not None:
        check_tensor("gate", "bias_E", bias_E, of_tokens)
        check_floats("gate", "bias_E", bias_E)
        if bias_E.shape != (experts,):
            refuse("gate", f"the bias must be [{experts}], got {list(bias_E.shape)}")
    rule.sequences(of_tokens.shape[0])


def _fields(rule: GateRule) -> tuple[Any, ...]:
    """The rule as the operators take it."""
    return rule.k, rule.score, rule.normalize, rule.scale, rule.statistics, rule.sequence, rule.logsumexp


def _asked_for(tensors: Sequence[Tensor], rule: GateRule) -> GateChoice:
    expert_SK, weight_SK, logits_SE, score_BE, count_BE, logsumexp_S = tensors
    return GateChoice(
        expert_SK,
        weight_SK,
        logits_SE,
        score_BE if rule.statistics else None,
        count_BE if rule.statistics else None,
        logsumexp_S if rule.logsumexp else None,
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_SM, weight_EM, _, *ctx.rule = inputs
    expert_SK, _, logits_SE, _, count_BE, _ = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(expert_SK, logits_SE, count_BE)
    ctx.save_for_backward(logits_SE, expert_SK, x_SM, weight_EM)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    logits_SE, expert_SK, x_SM, weight_EM = ctx.saved_tensors
    dlogits_SE = _dlogits(logits_SE, expert_SK, grads, ctx.rule)
    found = (*_product_gradients(dlogits_SE, x_SM, weight_EM, ctx.needs_input_grad), *(None,) * 8)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # The logits are an output: autograd does not know that they were made of x and W.
        return first_order("fusedmoe::gate", found, (x_SM, weight_EM, *grads))
    return found


def _setup_from_logits(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_SE, _, *ctx.rule = inputs
    expert_SK, _, nothing, _, count_BE, _ = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(expert_SK, nothing, count_BE)
    ctx.save_for_backward(logits_SE, expert_SK)


def _backward_from_logits(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    logits_SE, expert_SK = ctx.saved_tensors
    return _dlogits(logits_SE, expert_SK, grads, ctx.rule), *(None,) * 8


def _dlogits(logits_SE: Tensor, expert_SK: Tensor, grads: Sequence[Tensor | None], rule: Sequence[Any]) -> Tensor:
    _, dweight_SK, _, dscore_BE, _, dlogsumexp_S = grads
    return operators.gate_backward(logits_SE, expert_SK, dweight_SK, dscore_BE, dlogsumexp_S, *rule)


def _setup_product(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, dlogits_SE: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x_SM, weight_EM = ctx.saved_tensors
    return _product_gradients(dlogits_SE.contiguous(), x_SM, weight_EM, ctx.needs_input_grad)


def _product_gradients(
    dlogits_SE: Tensor, x_SM: Tensor, weight_EM: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    dx_SM = operators.router_dx(dlogits_SE, weight_EM, x_SM.dtype) if needs[0] else None
    return dx_SM, operators.router_dw(dlogits_SE, x_SM, weight_EM.dtype) if needs[1] else None


register_gradient(operators.gate, _backward, _setup)
register_gradient(operators.gate_from_logits, _backward_from_logits, _setup_from_logits)
register_gradient(operators.router_product, _product_backward, _setup_product)
