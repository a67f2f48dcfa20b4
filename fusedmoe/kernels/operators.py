"""The kernels as PyTorch operators, `torch.ops.fusedmoe.*`, which `torch.compile` takes into a graph as they are.

An operator takes and returns tensors and plain numbers; its fake tells the shapes without computing, so that whole
models compile with fullgraph=True, and none of those on the way of a layer waits for the device, so that CUDA graphs
capture it. Their gradients are registered where the differentiable functions are, in fusedmoe/autograd/.

Shapes never depend on values under `torch.compile`: `order(…, padded=True)` returns as many rows as there can be (see
`Layout`), as the CUDA kernels always do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe.kernels import clamped_swiglu as _clamped_swiglu
from fusedmoe.kernels import experts as _experts
from fusedmoe.kernels import gather_sum, wire
from fusedmoe.kernels import grouped_linear as _grouped_linear
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.derivatives import operator, register_fake
from fusedmoe.kernels.gate import GateRule
from fusedmoe.kernels.layout import Layout, build_layout, row_bound
from fusedmoe.kernels.weights import Weights


@operator("order")
def order(
    expert_SK: Tensor, experts: int, capacity: int | None, priority_S: Tensor | None, padded: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five tensors of a `Layout`; `padded`: with padding up to the bound on a CPU, too."""
    layout = build_layout(expert_SK, experts, capacity, priority_S)
    if padded:
        layout = layout.padded(row_bound(layout.tokens, layout.k, experts, capacity))
    counts_E, offsets_E1, source_N, pair_N, row_SK = layout.tensors
    assert source_N is not None
    return counts_E, offsets_E1, source_N, pair_N, row_SK


@register_fake(order)
def _(expert_SK: Tensor, experts: int, capacity: int | None, priority_S: Tensor | None, padded: bool) -> Any:
    tokens, K = expert_SK.shape
    rows: Any = row_bound(tokens, K, experts, capacity)
    if not padded and not expert_SK.is_cuda:
        rows = torch.library.get_ctx().new_dynamic_size()
    sizes = ((experts,), (rows,), (rows,), (tokens, K))
    counts_E, source_N, pair_N, row_SK = (expert_SK.new_empty(size, dtype=torch.long) for size in sizes)
    return counts_E, expert_SK.new_empty(experts + 1, dtype=torch.int32), source_N, pair_N, row_SK


@operator("permute")
def permute(
    x_SM: Tensor, counts_E: Tensor, offsets_E1: Tensor, source_N: Tensor, pair_N: Tensor, row_SK: Tensor
) -> Tensor:
    return gather_sum.permute(x_SM, Layout(counts_E, offsets_E1, source_N, pair_N, row_SK))


@register_fake(permute)
def _(x_SM: Tensor, *layout: Tensor) -> Tensor:
    return x_SM.new_empty((layout[2].shape[0], x_SM.shape[1]))


@operator("unpermute")
def unpermute(
    rows_NM: Tensor, counts_E: Tensor, offsets_E1: Tensor, source_N: Tensor, pair_N: Tensor, row_SK: Tensor
) -> Tensor:
    return gather_sum.gather_sum(rows_NM, Layout(counts_E, offsets_E1, source_N, pair_N, row_SK))


@register_fake(unpermute)
def _(rows_NM: Tensor, *layout: Tensor) -> Tensor:
    return rows_NM.new_empty((layout[4].shape[0], rows_NM.shape[1]))


@operator("take_pairs")
def take_pairs(
    value_SK: Tensor, counts_E: Tensor, offsets_E1: Tensor, source_N: Tensor | None, pair_N: Tensor, row_SK: Tensor
) -> Tensor:
    return gather_sum.take_pairs(value_SK, Layout(counts_E, offsets_E1, source_N, pair_N, row_SK))


@register_fake(take_pairs)
def _(value_SK: Tensor, *layout: Tensor) -> Tensor:
    return value_SK.new_empty(layout[3].shape)


@operator("put_pairs")
def put_pairs(
    value_N: Tensor, counts_E: Tensor, offsets_E1: Tensor, source_N: Tensor | None, pair_N: Tensor, row_SK: Tensor
) -> Tensor:
    return gather_sum.put_pairs(value_N, Layout(counts_E, offsets_E1, source_N, pair_N, row_SK))


@register_fake(put_pairs)
def _(value_N: Tensor, *layout: Tensor) -> Tensor:
    return value_N.new_empty(layout[4].shape)


@operator("experts")
def experts(
    x_SM: Tensor,
    weight_N: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    b2_start: int,
    counts_E: Tensor,
    offsets_E1: Tensor,
    source_N: Tensor | None,
    pair_N: Tensor,
    row_SK: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """y_SM and the pre-activation."""
    layout = Layout(counts_E, offsets_E1, source_N, pair_N, row_SK)
    weights = Weights(w1, w2, b1, b2, b2_start)
    return _experts.experts_forward(x_SM, layout, weight_N, weights, ACTIVATIONS[activation])


@register_fake(experts)
def _(
    x_SM: Tensor,
    weight_N: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    b2_start: int,
    counts_E: Tensor,
    offsets_E1: Tensor,
    source_N: Tensor | None,
    pair_N: Tensor,
    row_SK: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    return x_SM.new_empty((x_SM.shape[0], w2.shape[1])), x_SM.new_empty((pair_N.shape[0], *w1.shape[1:-1]))


@operator("experts_backward")
def experts_backward(
    dy_SM: Tensor,
    h_NH: Tensor,
    x_SM: Tensor,
    weight_N: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    b2_start: int,
    counts_E: Tensor,
    offsets_E1: Tensor,
    source_N: Tensor | None,
    pair_N: Tensor,
    row_SK: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x_SM, weight_N, w1, w2, b1 and b2; an empty tensor for what was None."""
    layout = Layout(counts_E, offsets_E1, source_N, pair_N, row_SK)
    weights = Weights(w1, w2, b1, b2, b2_start)
    grads = _experts.experts_backward(dy_SM, x_SM, h_NH, layout, weight_N, weights, ACTIVATIONS[activation])
    dweight_N = None if weight_N is None or grads.weight_N is None else grads.weight_N.to(weight_N.dtype)
    found = (grads.x_SM, dweight_N, grads.w1, grads.w2, grads.b1, grads.b2)
    dx_SM, dweight_N, dw1, dw2, db1, db2 = (x_SM.new_empty(0) if grad is None else grad for grad in found)
    return dx_SM, dweight_N, dw1, dw2, db1, db2


@register_fake(experts_backward)
def _(
    dy_SM: Tensor,
    h_NH: Tensor,
    x_SM: Tensor,
    weight_N: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    *layout: Any,
) -> tuple[Tensor, ...]:
    given = (x_SM, weight_N, w1, w2, b1, b2)
    return tuple(x_SM.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in given)


@operator("grouped_linear")
def grouped_linear(
    rows_NK: Tensor,
    weight: Tensor,
    bias_EO: Tensor | None,
    transposed: bool,
    counts_E: Tensor,
    offsets_E1: Tensor,
    source_N: Tensor | None,
    pair_N: Tensor,
    row_SK: Tensor,
) -> Tensor:
    layout = Layout(counts_E, offsets_E1, source_N, pair_N, row_SK)
    return _grouped_linear.grouped_product(rows_NK, weight, bias_EO, layout, transposed)


@register_fake(grouped_linear)
def _(rows_NK: Tensor, weight: Tensor, bias_EO: Tensor | None, transposed: bool, *layout: Any) -> Tensor:
    return rows_NK.new_empty((rows_NK.shape[0], weight.shape[1 if transposed else 2]))


@operator("grouped_linear_backward")
def grouped_linear_backward(
    dout_NO: Tensor,
    rows_NK: Tensor,
    weight: Tensor,
    biased: bool,
    transposed: bool,
    counts_E: Tensor,
    offsets_E1: Tensor,
    source_N: Tensor | None,
    pair_N: Tensor,
    row_SK: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows, the weights and the bias; an empty tensor where there is none."""
    layout = Layout(counts_E, offsets_E1, source_N, pair_N, row_SK)
    drows_NK = _grouped_linear.grouped_product(dout_NO, weight, None, layout, not transposed)
    left, right = (dout_NO, rows_NK) if transposed else (rows_NK, dout_NO)
    dweight = _grouped_linear.grouped_dweight(left, right, layout)
    if not biased:
        return drows_NK, dweight, dout_NO.new_empty(0)
    dbias_EO = _grouped_linear.grouped_dweight(dout_NO.new_ones((layout.rows, 1)), dout_NO, layout)
    return drows_NK, dweight, dbias_EO[:, 0].contiguous()


@register_fake(grouped_linear_backward)
def _(dout_NO: Tensor, rows_NK: Tensor, weight: Tensor, biased: bool, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    dbias = dout_NO.new_empty((weight.shape[0], dout_NO.shape[1]) if biased else 0)
    return rows_NK.new_empty(rows_NK.shape), weight.new_empty(weight.shape), dbias


@operator("clamped_swiglu")
def clamped_swiglu(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    return _clamped_swiglu.clamped_swiglu(h_NH, alpha, limit)


@register_fake(clamped_swiglu)
def _(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    return h_NH.new_empty((h_NH.shape[0], h_NH.shape[1] // 2))


@operator("clamped_swiglu_backward")
def clamped_swiglu_backward(da_NI: Tensor, h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    return _clamped_swiglu.clamped_swiglu_backward(da_NI, h_NH, alpha, limit)


@register_fake(clamped_swiglu_backward)
def _(da_NI: Tensor, h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    return h_NH.new_empty(h_NH.shape)


@operator("gate")
def gate(
    x_SM: Tensor,
    weight_EM: Tensor,
    bias_E: Tensor | None,
    k: int,
    score: str,
    normalize: bool,
    scale: float,
    statistics: bool,
    sequence: int | None,
    logsumexp: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The six tensors of a `GateChoice`, by Triton's kernels; an empty one for each that the rule does not ask for."""
    from fusedmoe.kernels.triton.gate import choose

    rule = GateRule(k, score, normalize, scale, statistics, sequence, logsumexp)
    return _all_six(choose.gate(x_SM, weight_EM, rule, bias_E))


@register_fake(gate)
def _(x_SM: Tensor, weight_EM: Tensor, bias_E: Tensor | None, *rule: Any) -> tuple[Tensor, ...]:
    return _fake_choice(x_SM.new_empty((x_SM.shape[0], weight_EM.shape[0]), dtype=torch.float32), GateRule(*rule))


@operator("gate_from_logits")
def gate_from_logits(
    logits_SE: Tensor,
    bias_E: Tensor | None,
    k: int,
    score: str,
    normalize: bool,
    scale: float,
    statistics: bool,
    sequence: int | None,
    logsumexp: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A `GateChoice` from float32 logits, which are not returned."""
    from fusedmoe.kernels.triton.gate import choose

    rule = GateRule(k, score, normalize, scale, statistics, sequence, logsumexp)
    choice = choose.choose(logits_SE, rule, bias_E)
    return _all_six(choice._replace(logits_SE=logits_SE.new_empty(0)))


@register_fake(gate_from_logits)
def _(logits_SE: Tensor, bias_E: Tensor | None, *rule: Any) -> tuple[Tensor, ...]:
    expert_SK, weight_SK, _, *sums = _fake_choice(logits_SE, GateRule(*rule))
    return expert_SK, weight_SK, logits_SE.new_empty(0), *sums


def _all_six(choice: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    weight_SK = choice[1]
    assert weight_SK is not None
    expert, weight, logits, score, count, logsumexp = (weight_SK.new_empty(0) if t is None else t for t in choice)
    return expert, weight, logits, score, count, logsumexp


def _fake_choice(logits_SE: Tensor, rule: GateRule) -> tuple[Tensor, ...]:
    S, E = logits_SE.shape
    sums = (rule.sequences(S), E) if rule.statistics else (0,)
    return (
        logits_SE.new_empty((S, rule.k), dtype=torch.int64),
        logits_SE.new_empty((S, rule.k)),
        logits_SE,
        logits_SE.new_empty(sums),
        logits_SE.new_empty(sums),
        logits_SE.new_empty(S if rule.logsumexp else 0),
    )


@operator("gate_backward")
def gate_backward(
    logits_SE: Tensor,
    expert_SK: Tensor,
    dweight_SK: Tensor | None,
    dscore_BE: Tensor | None,
    dlogsumexp_S: Tensor | None,
    k: int,
    score: str,
    normalize: bool,
    scale: float,
    statistics: bool,
    sequence: int | None,
    logsumexp: bool,
) -> Tensor:
    """The logits' gradient, [S, E] float32."""
    from fusedmoe.kernels.triton.gate import choose

    rule = GateRule(k, score, normalize, scale, statistics, sequence, logsumexp)
    return choose.dlogits(logits_SE, expert_SK, rule, dweight_SK, dscore_BE, dlogsumexp_S)


@register_fake(gate_backward)
def _(logits_SE: Tensor, *others: Any) -> Tensor:
    return logits_SE.new_empty(logits_SE.shape)


@operator("router_product")
def router_product(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    """x·Wᵀ, [S, E] float32, by Triton's kernel."""
    from fusedmoe.kernels.triton.gate import router

    return router.logits(x_SM, weight_EM)


@register_fake(router_product)
def _(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    return x_SM.new_empty((x_SM.shape[0], weight_EM.shape[0]), dtype=torch.float32)


@operator("router_dx")
def router_dx(dlogits_SE: Tensor, weight_EM: Tensor, dtype: torch.dtype) -> Tensor:
    """dlogits·W, [S, M]."""
    from fusedmoe.kernels.triton.gate import router

    return router.dx(dlogits_SE, weight_EM, dtype)


@register_fake(router_dx)
def _(dlogits_SE: Tensor, weight_EM: Tensor, dtype: torch.dtype) -> Tensor:
    return dlogits_SE.new_empty((dlogits_SE.shape[0], weight_EM.shape[1]), dtype=dtype)


@operator("router_dw")
def router_dw(dlogits_SE: Tensor, x_SM: Tensor, dtype: torch.dtype) -> Tensor:
    """dlogitsᵀ·x, [E, M]."""
    from fusedmoe.kernels.triton.gate import router

    return router.dw(dlogits_SE, x_SM, dtype)


@register_fake(router_dw)
def _(dlogits_SE: Tensor, x_SM: Tensor, dtype: torch.dtype) -> Tensor:
    return x_SM.new_empty((dlogits_SE.shape[1], x_SM.shape[1]), dtype=dtype)


@operator("pack_bf16")
def pack_bf16(rows_NM: Tensor) -> Tensor:
    packed = wire.pack_bf16(rows_NM)
    return packed.clone() if packed is rows_NM else packed


@register_fake(pack_bf16)
def _(rows_NM: Tensor) -> Tensor:
    return rows_NM.new_empty(rows_NM.shape, dtype=torch.bfloat16)


@operator("unpack_bf16")
def unpack_bf16(packed_NM: Tensor, dtype: torch.dtype) -> Tensor:
    rows = wire.unpack_bf16(packed_NM, dtype)
    return rows.clone() if rows is packed_NM else rows


@register_fake(unpack_bf16)
def _(packed_NM: Tensor, dtype: torch.dtype) -> Tensor:
    return packed_NM.new_empty(packed_NM.shape, dtype=dtype)


@operator("pack_fp8")
def pack_fp8(rows_NM: Tensor) -> Tensor:
    return wire.pack_fp8(rows_NM)


@register_fake(pack_fp8)
def _(rows_NM: Tensor) -> Tensor:
    return rows_NM.new_empty((rows_NM.shape[0], rows_NM.shape[1] + wire.SCALE_BYTES), dtype=torch.uint8)


@operator("unpack_fp8")
def unpack_fp8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return wire.unpack_fp8(packed, dtype)


@register_fake(unpack_fp8)
def _(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((packed.shape[0], packed.shape[1] - wire.SCALE_BYTES), dtype=dtype)
