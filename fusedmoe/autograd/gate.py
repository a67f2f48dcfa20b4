"""A router as one differentiable function: logits, choice of experts, weights, and sums for the auxiliary losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.gate.rule import GateChoice, GateRule, define_choice, fits_kernels, has_kernels

__all__ = ["GateChoice", "GateRule", "gate", "gate_from_logits", "router_product"]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_EM: Tensor | None, bias_E: Tensor | None, rule: GateRule
    ) -> tuple[Any, ...]:
        from fusedmoe.kernels.gate import choose as kernels

        ctx.rule, ctx.given = rule, weight_EM is None
        ctx.set_materialize_grads(False)
        if weight_EM is None:
            choice = kernels.choose(x, rule, bias_E)
            ctx.save_for_backward(x, choice.expert_SK)
            # not the input itself, which would be marked as not differentiable
            choice = choice._replace(logits_SE=x.detach())
        else:
            choice = kernels.gate(x, weight_EM, rule, bias_E)
            ctx.save_for_backward(choice.logits_SE, choice.expert_SK, x, weight_EM)
        constants = (choice.expert_SK, choice.logits_SE, choice.count_BE)
        ctx.mark_non_differentiable(*(tensor for tensor in constants if tensor is not None))
        return tuple(choice)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from fusedmoe.kernels.gate import choose as kernels

        _, dweight_SK, _, dscore_BE, _, dlogsumexp_S = grads
        logits_SE, expert_SK, *operands = ctx.saved_tensors
        dlogits_SE = kernels.dlogits(logits_SE, expert_SK, ctx.rule, dweight_SK, dscore_BE, dlogsumexp_S)
        if ctx.given:
            return dlogits_SE, None, None, None
        x_SM, weight_EM = operands
        return *_product_backward(dlogits_SE, x_SM, weight_EM, ctx.needs_input_grad), None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SM: Tensor, weight_EM: Tensor) -> Tensor:
        from fusedmoe.kernels.gate.product import logits

        ctx.save_for_backward(x_SM, weight_EM)
        return logits(x_SM, weight_EM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits_SE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_SM, weight_EM = ctx.saved_tensors
        return _product_backward(dlogits_SE.contiguous(), x_SM, weight_EM, ctx.needs_input_grad)


def _product_backward(
    dlogits_SE: Tensor, x_SM: Tensor, weight_EM: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    from fusedmoe.kernels.gate.product import dw, dx

    dx_SM = dx(dlogits_SE, weight_EM, x_SM.dtype) if needs[0] else None
    return dx_SM, dw(dlogits_SE, x_SM, weight_EM.dtype) if needs[1] else None


def router_product(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    """x·Wᵀ [S, E] in float32, as exact as float32, of any mix of float32 and half precision; Triton only.

    Saves x and W as they are, no cast copies. Differentiable once; gradients come in the operands' dtypes.
    """
    return _Product.apply(x_SM, weight_EM)


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
        ConfigError: sizes that do not fit each other.
    """
    if x_SM.dim() != 2 or weight_EM.dim() != 2 or x_SM.shape[1] != weight_EM.shape[1]:
        shapes = f"tokens {list(x_SM.shape)} and matrix {list(weight_EM.shape)}"
        raise ConfigError(f"gate: {shapes} do not fit; they must be [S, M] and [E, M]")
    _check(weight_EM.shape[0], x_SM.shape[0], rule, bias_E)
    if fits_kernels(weight_EM.shape[0], rule.k) and has_kernels(x_SM, weight_EM):
        return GateChoice(*_Gate.apply(x_SM, weight_EM, _single(bias_E), rule))
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
        ConfigError: sizes that do not fit each other.
    """
    if logits_SE.dim() != 2:
        raise ConfigError(f"gate: logits must be [S, E], got {list(logits_SE.shape)}")
    _check(logits_SE.shape[1], logits_SE.shape[0], rule, bias_E)
    logits_SE = logits_SE.to(torch.promote_types(logits_SE.dtype, torch.float32))
    if fits_kernels(logits_SE.shape[1], rule.k) and has_kernels(logits_SE):
        return GateChoice(*_Gate.apply(logits_SE, None, _single(bias_E), rule))
    return define_choice(logits_SE, rule, bias_E)


def _single(bias_E: Tensor | None) -> Tensor | None:
    return None if bias_E is None else bias_E.detach().float().contiguous()


def _check(experts: int, tokens: int, rule: GateRule, bias_E: Tensor | None) -> None:
    if rule.k > experts:
        raise ConfigError(f"gate: k = {rule.k} is more than its {experts} experts")
    if bias_E is not None and bias_E.shape != (experts,):
        raise ConfigError(f"gate: the bias must be [{experts}], got {list(bias_E.shape)}")
    rule.sequences(tokens)
