"""The router as differentiable functions: logits, expert choice, router weights, sums for auxiliary losses.

Operators exist for Triton kernels only; without Triton the plain-torch definition runs. Inconsistent sizes, dtypes or
devices raise ConfigError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.checks import check_floats, check_rows, check_tensor, refuse
from fusedmoe.kernels.derivatives import first_order, operator, register_fake, register_flops, register_gradient
from fusedmoe.kernels.gate import GateChoice, GateRule, define_choice, fits_kernels, has_kernels, summands_shape


def gate(x_SM: Tensor, weight_EM: Tensor, rule: GateRule, bias_E: Tensor | None = None) -> GateChoice:
    """Route tokens by the logits x·Wᵀ and the rule (`GateRule`). Never synchronizes with the device.

    On CUDA, kernels compute up to 512 experts with k up to 16, in float32 or half precision, once
    differentiable. Other cases and CPU tensors use plain torch.

    Args:
        x_SM: [S, M] tokens, S ≥ 0, any float dtype, any strides.
        weight_EM: [E, M] router matrix, any float dtype.
        bias_E: [E] added to the scores for the choice only; gets no gradient.
    Returns:
        A `GateChoice` in float32 (float64 if an operand is). Weights, score sums and logsumexp are
        differentiable.
    Saves for backward:
        x and W without cast copies, logits (S·E float32) and choices (S·K int64). Plain torch saves a few
        times S·E instead, and float32 copies of x and W if they have half precision.
    """
    check_rows("gate", "x_SM", x_SM, None)
    check_floats("gate", "x_SM", x_SM)
    check_rows("gate", "weight_EM", weight_EM, None, x_SM)
    check_floats("gate", "weight_EM", weight_EM)
    if x_SM.shape[1] != weight_EM.shape[1]:
        shapes = f"tokens {list(x_SM.shape)} and matrix {list(weight_EM.shape)}"
        refuse("gate", f"{shapes} do not fit; they must be [S, M] and [E, M]")
    _check_arguments(weight_EM.shape[0], x_SM, rule, bias_E)
    if fits_kernels(weight_EM.shape[0], rule.k) and has_kernels(x_SM, weight_EM):
        return _as_choice(gate_operator(x_SM, weight_EM, _detached_bias(bias_E), *_operator_arguments(rule)), rule)
    # Half-precision logits would select different experts.
    dtype = torch.promote_types(torch.promote_types(x_SM.dtype, weight_EM.dtype), torch.float32)
    with torch.autocast(x_SM.device.type, enabled=False):
        return define_choice(x_SM.to(dtype) @ weight_EM.to(dtype).t(), rule, bias_E)


def gate_from_logits(logits_SE: Tensor, rule: GateRule, bias_E: Tensor | None = None) -> GateChoice:
    """Route tokens by given logits, [S, E], such as noisy or cosine logits; otherwise like `gate`.

    Half-precision logits are converted to float32. Saves the logits and the choices for backward.
    """
    check_tensor("gate", "logits_SE", logits_SE)
    check_floats("gate", "logits_SE", logits_SE)
    if logits_SE.dim() != 2:
        refuse("gate", f"logits must be [S, E], got {list(logits_SE.shape)}")
    _check_arguments(logits_SE.shape[1], logits_SE, rule, bias_E)
    logits_SE = logits_SE.to(torch.promote_types(logits_SE.dtype, torch.float32))
    if fits_kernels(logits_SE.shape[1], rule.k) and has_kernels(logits_SE):
        tensors = gate_from_logits_operator(logits_SE, _detached_bias(bias_E), *_operator_arguments(rule))
        return _as_choice(tensors, rule)._replace(logits_SE=logits_SE.detach())
    return define_choice(logits_SE, rule, bias_E)


def _detached_bias(bias_E: Tensor | None) -> Tensor | None:
    return None if bias_E is None else bias_E.detach().float().contiguous()


def _check_arguments(experts: int, like_SN: Tensor, rule: GateRule, bias_E: Tensor | None) -> None:
    if not isinstance(rule, GateRule):
        refuse("gate", f"rule must be a GateRule, got {type(rule).__name__}")
    if rule.k > experts:
        refuse("gate", f"k = {rule.k} is more than its {experts} experts")
    if bias_E is not None:
        check_tensor("gate", "bias_E", bias_E, like_SN)
        check_floats("gate", "bias_E", bias_E)
        if bias_E.shape != (experts,):
            refuse("gate", f"the bias must be [{experts}], got {list(bias_E.shape)}")
    rule.sequences(like_SN.shape[0])


def _operator_arguments(rule: GateRule) -> tuple[int, str, bool, float, bool, int | None, bool]:
    """Return the fields of the rule in order, for `GateRule(*fields)`."""
    return rule.k, rule.score, rule.normalize, rule.scale, rule.statistics, rule.sequence, rule.logsumexp


def _as_choice(tensors: Sequence[Tensor], rule: GateRule) -> GateChoice:
    expert_SK, weight_SK, logits_SE, score_BE, count_BE, logsumexp_S, bad = tensors
    sums_BE, counts_BE = (score_BE, count_BE) if rule.statistics else (None, None)
    requested_S = logsumexp_S if rule.logsumexp else None
    return GateChoice(expert_SK, weight_SK, logits_SE, sums_BE, counts_BE, requested_S, bad)


# Operator schemas have neither dataclasses nor optional results: pass the fields, return empty unused tensors.
_RULE = "SymInt k, str score, bool normalize, float scale, bool statistics, SymInt? sequence, bool logsumexp"
_CHOICE = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


@operator("gate", f"(Tensor x_SM, Tensor weight_EM, Tensor? bias_E, {_RULE}) -> {_CHOICE}")
def gate_operator(x_SM: Tensor, weight_EM: Tensor, bias_E: Tensor | None, *rule: Any) -> tuple[Tensor, ...]:
    from fusedmoe.kernels.triton.gate import choose

    return _replace_none(choose.gate(x_SM, weight_EM, GateRule(*rule), bias_E))


@register_fake(gate_operator)
def _(x_SM: Tensor, weight_EM: Tensor, bias_E: Tensor | None, *rule: Any) -> tuple[Tensor, ...]:
    return _fake_choice(x_SM.new_empty((x_SM.shape[0], weight_EM.shape[0]), dtype=torch.float32), GateRule(*rule))


@operator("gate_from_logits", f"(Tensor logits_SE, Tensor? bias_E, {_RULE}) -> {_CHOICE}")
def gate_from_logits_operator(logits_SE: Tensor, bias_E: Tensor | None, *rule: Any) -> tuple[Tensor, ...]:
    """The third tensor, the logits, is empty."""
    from fusedmoe.kernels.triton.gate import choose

    choice = choose.choose(logits_SE, GateRule(*rule), bias_E)
    return _replace_none((*choice[:2], None, *choice[3:]))  # operators must not return an argument


@register_fake(gate_from_logits_operator)
def _(logits_SE: Tensor, bias_E: Tensor | None, *rule: Any) -> tuple[Tensor, ...]:
    expert_SK, weight_SK, _, *sums = _fake_choice(logits_SE, GateRule(*rule))
    return expert_SK, weight_SK, logits_SE.new_empty(0), *sums


def _replace_none(choice: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    weight_SK = choice[1]
    assert weight_SK is not None
    return tuple(weight_SK.new_empty(0) if tensor is None else tensor for tensor in choice)


def _fake_choice(logits_SE: Tensor, rule: GateRule) -> tuple[Tensor, ...]:
    S, E = logits_SE.shape
    sums = (rule.sequences(S), E) if rule.statistics else (0,)
    of_weights = (S, rule.k), sums, sums, (S if rule.logsumexp else 0,)
    weight_SK, score_BE, count_BE, logsumexp_S = (logits_SE.new_empty(shape) for shape in of_weights)
    expert_SK, bad = (logits_SE.new_empty(shape, dtype=torch.int64) for shape in ((S, rule.k), ()))
    return expert_SK, weight_SK, logits_SE, score_BE, count_BE, logsumexp_S, bad


_GRADIENTS = "Tensor? dweight_SK, Tensor? dscore_BE, Tensor? dlogsumexp_S"


@operator("gate_backward", f"(Tensor logits_SE, Tensor expert_SK, {_GRADIENTS}, {_RULE}, bool apart) -> Tensor")
def gate_backward(
    logits_SE: Tensor,
    expert_SK: Tensor,
    dweight_SK: Tensor | None,
    dscore_BE: Tensor | None,
    dlogsumexp_S: Tensor | None,
    *rule_and_apart: Any,
) -> Tensor:
    """Return the gradient of the logits, [S, E] float32.

    Args:
        dweight_SK, dscore_BE, dlogsumexp_S: gradients of the router weights, of the score sums of the B sequences, and
            of logsumexp; None: no gradient.
        rule_and_apart: the fields of the `GateRule`, then `apart`. With `apart`, returns two bfloat16 summands of the
            gradient, [2, S, E rounded up to 16], the input format of the bfloat16 router products.
    """
    from fusedmoe.kernels.triton.gate import choose

    *rule, apart = rule_and_apart
    return choose.dlogits(logits_SE, expert_SK, GateRule(*rule), dweight_SK, dscore_BE, dlogsumexp_S, apart)


@register_fake(gate_backward)
def _(logits_SE: Tensor, *others: Any) -> Tensor:
    S, E = logits_SE.shape
    if others[-1]:
        return logits_SE.new_empty(summands_shape(S, E), dtype=torch.bfloat16)
    return logits_SE.new_empty((S, E))


def _save_choice(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    x_SM, weight_EM, _, *ctx.rule = inputs
    expert_SK, _, logits_SE, _, count_BE, _, bad = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(expert_SK, logits_SE, count_BE, bad)
    ctx.save_for_backward(logits_SE, expert_SK, x_SM, weight_EM)


def _gate_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    logits_SE, expert_SK, x_SM, weight_EM = ctx.saved_tensors
    apart = x_SM.dtype == weight_EM.dtype == torch.bfloat16  # otherwise a product reads float32
    dlogits = _dlogits(logits_SE, expert_SK, grads, ctx.rule, apart)
    gradients = (*_product_gradients(dlogits, x_SM, weight_EM, ctx.needs_input_grad), *(None,) * 8)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # Autograd does not track that the logits, an output, depend on x and W.
        return first_order("fusedmoe::gate", gradients, (x_SM, weight_EM, *grads))
    return gradients


def _save_choice_from_logits(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    logits_SE, _, *ctx.rule = inputs
    expert_SK, _, empty_logits, _, count_BE, _, bad = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(expert_SK, empty_logits, count_BE, bad)
    ctx.save_for_backward(logits_SE, expert_SK)


def _gate_from_logits_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    logits_SE, expert_SK = ctx.saved_tensors
    return _dlogits(logits_SE, expert_SK, grads, ctx.rule, False), *(None,) * 8


def _dlogits(
    logits_SE: Tensor, expert_SK: Tensor, grads: Sequence[Tensor | None], rule: Sequence[Any], apart: bool
) -> Tensor:
    _, dweight_SK, _, dscore_BE, _, dlogsumexp_S, _ = grads
    return gate_backward(logits_SE, expert_SK, dweight_SK, dscore_BE, dlogsumexp_S, *rule, apart)


register_gradient(gate_operator, _gate_gradients, _save_choice)
register_gradient(gate_from_logits_operator, _gate_from_logits_gradients, _save_choice_from_logits)


@operator("router_product")
def router_product(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    """Return x·Wᵀ [S, E] with float32 accuracy, for any mix of float32 and half precision. Triton only.

    Saves x and W without cast copies. Once differentiable; gradients have the operands' dtypes.
    """
    from fusedmoe.kernels.triton.gate import router

    return router.logits(x_SM, weight_EM)


@register_fake(router_product)
def _(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    return x_SM.new_empty((x_SM.shape[0], weight_EM.shape[0]), dtype=torch.float32)


@operator("router_dx")
def router_dx(dlogits: Tensor, weight_EM: Tensor, dtype: torch.dtype) -> Tensor:
    from fusedmoe.kernels.triton.gate import router

    return router.dx(dlogits, weight_EM, dtype)


@register_fake(router_dx)
def _(dlogits: Tensor, weight_EM: Tensor, dtype: torch.dtype) -> Tensor:
    return dlogits.new_empty((dlogits.shape[-2], weight_EM.shape[1]), dtype=dtype)


@operator("router_dw")
def router_dw(dlogits: Tensor, x_SM: Tensor, dtype: torch.dtype, experts: int) -> Tensor:
    from fusedmoe.kernels.triton.gate import router

    return router.dw(dlogits, x_SM, dtype, experts)


@register_fake(router_dw)
def _(dlogits: Tensor, x_SM: Tensor, dtype: torch.dtype, experts: int) -> Tensor:
    return x_SM.new_empty((experts, x_SM.shape[1]), dtype=dtype)


@register_flops(gate_operator)
@register_flops(router_product)
def _(x_SM: Any, weight_EM: Any, *_: Any, **__: Any) -> int:
    return 2 * int(x_SM[0] * weight_EM[0] * weight_EM[1])


@register_flops(router_dx)
def _(dlogits: Any, weight_EM: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return 2 * int(out_shape[0] * out_shape[1] * weight_EM[0])


@register_flops(router_dw)
def _(dlogits: Any, x_SM: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return 2 * int(x_SM[0] * out_shape[0] * out_shape[1])


def _save_operands(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _router_gradients(ctx: Any, dlogits_SE: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x_SM, weight_EM = ctx.saved_tensors
    return _product_gradients(dlogits_SE.contiguous(), x_SM, weight_EM, ctx.needs_input_grad)


def _product_gradients(
    dlogits: Tensor, x_SM: Tensor, weight_EM: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    dx_SM = router_dx(dlogits, weight_EM, x_SM.dtype) if needs[0] else None
    return dx_SM, router_dw(dlogits, x_SM, weight_EM.dtype, len(weight_EM)) if needs[1] else None


register_gradient(router_product, _router_gradients, _save_operands)
