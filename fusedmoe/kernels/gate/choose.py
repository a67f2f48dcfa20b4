"""From logits to a choice of experts in one pass over a tile of rows, with the product in front where it fits.

A program has all logits of its BS tokens in registers. Top-k is k passes of a maximum: logits become integers that sort
as they do (so that NaN, infinities and equal values have one place each), the lower index wins, and what was taken
becomes the lowest integer, below every logit. What was taken is thereby known for the count of choices.

Sums over tokens are made in two steps, programs' sums and then their sum in a fixed order. The backward makes the
gradient of the logits in one pass, recomputing scores and sums from the logits. Definition: `define_choice`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.aot import MOST_REGISTERS, AotCase
from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.gate.configs import GENERATIONS, Tile, fused_tile, rowwise_tile
from fusedmoe.kernels.gate.product import capability, logits, logits_tile, taken_apart
from fusedmoe.kernels.gate.rule import MOST_CHOSEN, SCORES, GateChoice, GateRule
from fusedmoe.kernels.jit import jit

_SCORE_CODES = {name: code for code, name in enumerate(SCORES)}
# What a sum is at least when it divides: float32's least normal number, as in the definition.
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_TAKEN = tl.constexpr(-(2**31))
_UNSPECIAL = ["length", "blocks", "programs"]


@triton.jit
def sortable(x):
    """Integers in the order of the floats: -0 as 0, NaN highest, all above `_TAKEN`."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, key, 0x7FFFFFFF)


@triton.jit
def unsortable(key):
    """The float of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def rows_of_program(length, blocks, BS: tl.constexpr):
    """The sequence, the rows (int64, those past the sequence's end clamped to its last) and which are inside."""
    sequence = tl.program_id(0) // blocks
    place = tl.program_id(0) % blocks * BS + tl.arange(0, BS)
    row = sequence * length + tl.minimum(place, length - 1)
    return sequence, row.to(tl.int64), place < length


@triton.jit
def softmax_terms(logits):
    """The powers of e above the highest logit, their sum, and that logit; a column of padding is -inf."""
    top = tl.max(logits, 1)
    power = tl.exp(logits - top[:, None])
    return power, tl.sum(power, 1), top


@triton.jit
def softmax_backward(logits, grad):
    """The gradient of logits from that of their softmax; columns of padding are -inf."""
    power, total, _ = softmax_terms(logits)
    share = power / total[:, None]
    return share * (grad - tl.sum(share * grad, 1)[:, None])


@triton.jit
def score_backward(logits, inside, grad, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr):
    """The gradient of logits from that of their scores, with NORMALIZE of scores / Σ scores, over what is `inside`."""
    score = tl.sigmoid(logits) if SIGMOID else logits
    score = tl.where(inside, score, 0.0)
    factor = score if SIGMOID else tl.where(inside, 1.0, 0.0)
    if NORMALIZE:
        total = tl.sum(score, 1)
        divisor = tl.maximum(total, _TINY)[:, None]
        mean = tl.where(total >= _TINY, tl.sum(score / divisor * grad, 1), 0.0)
        grad = grad - mean[:, None]
        factor = factor / divisor  # before the gradient: divided by next to nothing, that would be infinite
    if SIGMOID:
        factor *= 1.0 - score
    return factor * grad


@jit(do_not_specialize=_UNSPECIAL)
def choose_kernel(
    x_ptr,
    w_ptr,
    logits_ptr,
    bias_ptr,
    expert_ptr,
    weight_ptr,
    sums_ptr,
    logsumexp_ptr,
    length,
    blocks,
    programs,
    M,
    E,
    scale,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BIAS: tl.constexpr,
    STATISTICS: tl.constexpr,
    LOGSUMEXP: tl.constexpr,
    PRODUCT: tl.constexpr,
    EVEN: tl.constexpr,
    TAKEN_APART: tl.constexpr,
    INTERPRET: tl.constexpr,
    BS: tl.constexpr,
    BK: tl.constexpr,
    EP: tl.constexpr,
    KP: tl.constexpr,
):
    SOFTMAX: tl.constexpr = SCORE == 0
    sequence, row, inside = rows_of_program(length, blocks, BS)
    e = tl.arange(0, EP)
    known = (e < E)[None, :]
    at = row[:, None] * E + e[None, :]
    if PRODUCT:
        logits = logits_tile(x_ptr, w_ptr, row, tl.minimum(e, E - 1), M, EVEN, TAKEN_APART, INTERPRET, BS, EP, BK)
        tl.store(logits_ptr + at, logits, mask=inside[:, None] & known)
        logits = tl.where(known, logits, -float("inf"))
    else:
        logits = tl.load(logits_ptr + at, mask=known, other=-float("inf"))

    if SOFTMAX and (STATISTICS or BIAS or not NORMALIZE) or LOGSUMEXP:
        power, total, top = softmax_terms(logits)
        if LOGSUMEXP:
            tl.store(logsumexp_ptr + row, top + tl.log(total), mask=inside)

    if BIAS:
        if SOFTMAX:
            by = power / total[:, None]
        elif SCORE == 1:
            by = tl.sigmoid(logits)
        else:
            by = logits
        by += tl.load(bias_ptr + e, mask=e < E, other=0.0)[None, :]
    else:
        by = logits
    key = tl.where(known, sortable(by), _TAKEN)
    k = tl.arange(0, KP)
    expert = tl.zeros((BS, KP), dtype=tl.int32)
    picked = tl.zeros((BS, KP), dtype=tl.float32)
    for place in range(K):
        best, index = tl.max(key, 1, return_indices=True, return_indices_tie_break_left=True)
        key = tl.where(e[None, :] == index[:, None], _TAKEN, key)
        here = (k == place)[None, :]
        expert = tl.where(here, index[:, None], expert)
        if not BIAS:
            picked = tl.where(here, unsortable(best)[:, None], picked)

    chosen = (k < K)[None, :]
    # From here on logits come from memory again, where this program wrote them: the passes need their registers.
    if PRODUCT and (BIAS or STATISTICS) and not INTERPRET:
        tl.debug_barrier()
    if BIAS:
        picked = tl.load(logits_ptr + row[:, None] * E + expert)
    if SOFTMAX:
        if NORMALIZE:
            weight, sum_of_chosen, _ = softmax_terms(tl.where(chosen, picked, -float("inf")))
            weight = weight / sum_of_chosen[:, None]
        else:
            weight = tl.exp(picked - top[:, None]) / total[:, None]
    else:
        weight = tl.sigmoid(picked) if SCORE == 1 else picked
        if NORMALIZE:
            weight = tl.where(chosen, weight, 0.0)
            weight = weight / tl.maximum(tl.sum(weight, 1), _TINY)[:, None]
    slot = row[:, None] * K + k[None, :]
    tl.store(expert_ptr + slot, expert.to(tl.int64), mask=inside[:, None] & chosen)
    tl.store(weight_ptr + slot, weight * scale, mask=inside[:, None] & chosen)

    if STATISTICS:
        logits = tl.load(logits_ptr + at, mask=known, other=-float("inf"))
        if SOFTMAX:
            share = tl.exp(logits - top[:, None]) / total[:, None]
        elif SCORE == 1:
            share = tl.where(known, tl.sigmoid(logits), 0.0)
            share = share / tl.maximum(tl.sum(share, 1), _TINY)[:, None]
        else:
            share = logits
        counted = (key == _TAKEN) & known & inside[:, None]
        sums = sums_ptr + tl.program_id(0).to(tl.int64) * E + e
        tl.store(sums, tl.sum(tl.where(inside[:, None], share, 0.0), 0), mask=e < E)
        tl.store(sums + programs.to(tl.int64) * E, tl.sum(counted.to(tl.float32), 0), mask=e < E)


@jit(do_not_specialize=_UNSPECIAL)
def dlogits_kernel(
    logits_ptr,
    expert_ptr,
    dweight_ptr,
    dscore_ptr,
    dlogsumexp_ptr,
    dlogits_ptr,
    length,
    blocks,
    E,
    scale,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    STATISTICS: tl.constexpr,
    LOGSUMEXP: tl.constexpr,
    BS: tl.constexpr,
    EP: tl.constexpr,
    KP: tl.constexpr,
):
    SOFTMAX: tl.constexpr = SCORE == 0
    sequence, row, inside = rows_of_program(length, blocks, BS)
    e = tl.arange(0, EP)
    known = (e < E)[None, :]
    at = row[:, None] * E + e[None, :]
    logits = tl.load(logits_ptr + at, mask=known, other=-float("inf"))

    # What the weights send to the logits of the chosen; to their probabilities, if they are not a softmax of their own.
    dlogits = tl.zeros((BS, EP), dtype=tl.float32)
    if WEIGHTS:
        k = tl.arange(0, KP)
        chosen = (k < K)[None, :]
        slot = row[:, None] * K + k[None, :]
        expert = tl.load(expert_ptr + slot, mask=chosen, other=0).to(tl.int32)
        grad = tl.load(dweight_ptr + slot, mask=chosen, other=0.0) * scale
        if NORMALIZE or SCORE == 1:
            picked = tl.load(logits_ptr + row[:, None] * E + expert, mask=chosen, other=-float("inf"))
            if SOFTMAX:
                grad = softmax_backward(picked, grad)
            else:
                grad = score_backward(picked, chosen, grad, NORMALIZE, SCORE == 1)
        for place in range(K):
            here = (k == place)[None, :]
            index = tl.sum(tl.where(here, expert, 0), 1)
            value = tl.sum(tl.where(here, grad, 0.0), 1)
            dlogits = tl.where(e[None, :] == index[:, None], value[:, None], dlogits)

    if STATISTICS:
        dscore = tl.load(dscore_ptr + sequence.to(tl.int64) * E + e, mask=e < E, other=0.0)[None, :]
        dscore = tl.broadcast_to(dscore, (BS, EP))
    if SOFTMAX:
        if NORMALIZE:
            if STATISTICS:
                dlogits += softmax_backward(logits, dscore)
        else:
            if STATISTICS:
                dlogits += dscore
            if STATISTICS or WEIGHTS:
                dlogits = softmax_backward(logits, dlogits)
    elif STATISTICS:
        dlogits += score_backward(logits, known, dscore, SCORE == 1, SCORE == 1)
    if LOGSUMEXP:
        power, total, _ = softmax_terms(logits)
        dlogits += power / total[:, None] * tl.load(dlogsumexp_ptr + row)[:, None]
    tl.store(dlogits_ptr + at, dlogits, mask=inside[:, None] & known)


def choose(logits_SE: Tensor, rule: GateRule, bias_E: Tensor | None = None) -> GateChoice:
    """`define_choice` of float32 logits. No autograd, and no word from the device."""
    return _choose(None, None, logits_SE.contiguous(), rule, bias_E)


def gate(x_SM: Tensor, weight_EM: Tensor, rule: GateRule, bias_E: Tensor | None = None) -> GateChoice:
    """`define_choice` of x·Wᵀ. No autograd, and no word from the device."""
    x_SM, weight_EM = x_SM.contiguous(), weight_EM.contiguous()
    experts = weight_EM.shape[0]
    if fused_tile(experts, taken_apart(x_SM.dtype, weight_EM.dtype), capability(x_SM)) is None:
        return _choose(None, None, logits(x_SM, weight_EM), rule, bias_E)
    logits_SE = torch.empty((x_SM.shape[0], experts), dtype=torch.float32, device=x_SM.device)
    return _choose(x_SM, weight_EM, logits_SE, rule, bias_E)


def _choose(
    x_SM: Tensor | None, weight_EM: Tensor | None, logits_SE: Tensor, rule: GateRule, bias_E: Tensor | None
) -> GateChoice:
    (S, E), B = logits_SE.shape, rule.sequences(logits_SE.shape[0])
    device, single = logits_SE.device, torch.float32
    expert_SK = torch.empty((S, rule.k), dtype=torch.int64, device=device)
    weight_SK = torch.empty((S, rule.k), dtype=single, device=device)
    logsumexp_S = torch.empty(S, dtype=single, device=device) if rule.logsumexp else None
    if S == 0:
        zeros = (torch.zeros((B, E), dtype=single, device=device) for _ in range(2))
        score_BE, count_BE = zeros if rule.statistics else (None, None)
        return GateChoice(expert_SK, weight_SK, logits_SE, score_BE, count_BE, logsumexp_S)
    tile = rowwise_tile(E, capability(logits_SE))
    M, product = 0, {"EVEN": True, "TAKEN_APART": ""}
    if x_SM is not None and weight_EM is not None:
        M, apart = x_SM.shape[1], taken_apart(x_SM.dtype, weight_EM.dtype)
        fused = fused_tile(E, apart, capability(x_SM))
        assert fused is not None
        tile, product = fused, {"EVEN": M % fused.depth == 0, "TAKEN_APART": apart}
    blocks = triton.cdiv(S // B, tile.rows)
    sums = torch.empty((2, B, blocks, E), dtype=single, device=device) if rule.statistics else None
    choose_kernel[(B * blocks,)](
        x_SM,
        weight_EM,
        logits_SE,
        bias_E,
        expert_SK,
        weight_SK,
        sums,
        logsumexp_S,
        S // B,
        blocks,
        B * blocks,
        M,
        E,
        rule.scale,
        BIAS=bias_E is not None,
        STATISTICS=rule.statistics,
        PRODUCT=x_SM is not None,
        INTERPRET=INTERPRET,
        BK=tile.depth,
        num_stages=tile.stages,
        **product,
        **_launch(rule, tile),
    )
    score_BE, count_BE = (None, None) if sums is None else (sums[0].sum(1), sums[1].sum(1))
    return GateChoice(expert_SK, weight_SK, logits_SE, score_BE, count_BE, logsumexp_S)


def dlogits(
    logits_SE: Tensor,
    expert_SK: Tensor,
    rule: GateRule,
    dweight_SK: Tensor | None,
    dscore_BE: Tensor | None,
    dlogsumexp_S: Tensor | None,
) -> Tensor:
    """The gradient of float32 logits from those of a choice's weights, scores and logsumexp, as far as given."""
    S, E = logits_SE.shape
    logits_SE = logits_SE.contiguous()
    dlogits_SE = torch.empty_like(logits_SE)
    if S == 0:
        return dlogits_SE
    tile, B = rowwise_tile(E, capability(logits_SE)), rule.sequences(S)
    blocks = triton.cdiv(S // B, tile.rows)
    dlogits_kernel[(B * blocks,)](
        logits_SE,
        expert_SK,
        None if dweight_SK is None else dweight_SK.contiguous(),
        None if dscore_BE is None else dscore_BE.contiguous(),
        None if dlogsumexp_S is None else dlogsumexp_S.contiguous(),
        dlogits_SE,
        S // B,
        blocks,
        E,
        rule.scale,
        WEIGHTS=dweight_SK is not None,
        STATISTICS=dscore_BE is not None,
        **{**_launch(rule, tile), "LOGSUMEXP": dlogsumexp_S is not None},
    )
    return dlogits_SE


def _launch(rule: GateRule, tile: Tile) -> dict[str, Any]:
    return {
        "K": rule.k,
        "SCORE": _SCORE_CODES[rule.score],
        "NORMALIZE": rule.normalize,
        "LOGSUMEXP": rule.logsumexp,
        "BS": tile.rows,
        "EP": tile.columns,
        "KP": triton.next_power_of_2(rule.k),
        "num_warps": tile.warps,
        # Left to itself the assembler spills a few bytes where that lets one more program onto a multiprocessor.
        "maxnreg": MOST_REGISTERS,
    }


def aot_cases() -> list[AotCase]:
    """Tiles with the costliest rules and every dtype; every combination of a rule's parts, and every K, in one tile.

    Experts that are no multiple of 16 take up to twice the registers: every width of a tile comes with such, too.
    """
    half, single = torch.bfloat16, torch.float32
    full: dict[str, Any] = {"statistics": True, "logsumexp": True}
    rules = [
        (GateRule(8, **full), False),
        (GateRule(16, **full), False),
        (GateRule(1, normalize=False, **full), False),
        (GateRule(3, normalize=False, **full), True),
        (GateRule(16, "sigmoid", **full), True),
        (GateRule(10, "none", **full), False),
        (GateRule(2, "sigmoid", normalize=False), False),
    ]
    # Rule, whether there is a bias, experts, dtypes of the product (None where logits are given).
    choices: dict[tuple[GateRule, bool, int, tuple[torch.dtype, torch.dtype] | None], None]
    choices = dict.fromkeys(
        (rule, bias, experts, dtypes)
        for experts in (1, 7, 24, 60, 64, 100, 128, 200, 256, 500, 512)
        for rule, bias in rules
        for dtypes in (None, (half, half), (half, single), (single, single))
        if rule.k <= experts
    )
    for x, w in ((torch.float16, torch.float16), (torch.float16, single)):
        choices |= dict.fromkeys((rules[0][0], False, experts, (x, w)) for experts in (24, 64, 128, 256))
    flags = (False, True)
    every_rule = [
        (GateRule(8, score, normalize, statistics=statistics, logsumexp=logsumexp), bias)
        for score, normalize, statistics, logsumexp, bias in product(SCORES, flags, flags, flags, flags)
    ]
    every_rule += [(GateRule(k, **full), False) for k in range(1, MOST_CHOSEN + 1)]
    choices |= dict.fromkeys((rule, bias, 128, None) for rule, bias in every_rule)

    def is_rare(rule: GateRule, experts: int) -> bool:
        return experts not in (60, 128, 500) or rule not in (rules[0][0], rules[3][0], rules[4][0])

    cases = [case for choice in choices for case in _choose_cases(*choice, rare=is_rare(choice[0], choice[2]))]
    gradients = dict.fromkeys((rule, experts, True) for rule, _, experts, _ in choices)
    gradients |= dict.fromkeys((rule, 128, False) for rule, _ in rules if rule.statistics)
    return cases + [_dlogits_case(*gradient, rare=is_rare(*gradient[:2])) for gradient in gradients]


def _title(rule: GateRule, bias: bool) -> str:
    flags = {"normalize": rule.normalize, "bias": bias, "statistics": rule.statistics, "logsumexp": rule.logsumexp}
    return " ".join([f"{rule.score} K={rule.k}", *(name for name, flag in flags.items() if flag)])


def _choose_cases(
    rule: GateRule, bias: bool, experts: int, dtypes: tuple[torch.dtype, torch.dtype] | None, rare: bool
) -> list[AotCase]:
    x, w = dtypes or (None, None)
    M = 0 if dtypes is None else 100 if experts == 7 else 4096
    title = f"gate{' choose' * (x is None)} {_title(rule, bias)} E={experts}"
    if x is not None:
        title += f" {str(x)[6:]} {str(w)[6:]}"
    apart = "" if x is None or w is None else taken_apart(x, w)
    targets: dict[Tile, list[int]] = {}
    for major, minor in GENERATIONS:
        at = (major, minor)
        tile = rowwise_tile(experts, at) if dtypes is None else fused_tile(experts, apart, at)
        if tile is not None:
            targets.setdefault(tile, []).append(10 * major + minor)
    single, cases = torch.float32, []
    for tile, found in targets.items():
        arguments = {
            "x_ptr": x,
            "w_ptr": w,
            "logits_ptr": single,
            "bias_ptr": single if bias else None,
            "expert_ptr": torch.int64,
            "weight_ptr": single,
            "sums_ptr": single if rule.statistics else None,
            "logsumexp_ptr": single if rule.logsumexp else None,
            "length": "i32",
            "blocks": "i32",
            "programs": "i32",
            "M": M,
            "E": experts,
            "scale": 1.0,
            "BIAS": bias,
            "STATISTICS": rule.statistics,
            "PRODUCT": dtypes is not None,
            "EVEN": M % tile.depth == 0,
            "TAKEN_APART": apart,
            "INTERPRET": False,
            "BK": tile.depth,
            **_launch(rule, tile),
        }
        options = {"num_stages": tile.stages} | {name: arguments.pop(name) for name in ("num_warps", "maxnreg")}
        expect = {90: ("HGMMA",)} if dtypes is not None and 90 in found else {}
        quick = not rare and (rule.k, experts, dtypes) == (8, 128, (torch.bfloat16,) * 2)
        name = f"{title} {tile}"
        cases.append(AotCase(name, choose_kernel, arguments, options, tuple(found), expect, quick, rare))
    return cases


def _dlogits_case(rule: GateRule, experts: int, weights: bool, rare: bool) -> AotCase:
    single, (tile,) = torch.float32, {rowwise_tile(experts, at) for at in GENERATIONS}
    arguments: dict[str, Any] = {
        "logits_ptr": single,
        "expert_ptr": torch.int64,
        "dweight_ptr": single if weights else None,
        "dscore_ptr": single if rule.statistics else None,
        "dlogsumexp_ptr": single if rule.logsumexp else None,
        "dlogits_ptr": single,
        "length": "i32",
        "blocks": "i32",
        "E": experts,
        "scale": 1.0,
        "WEIGHTS": weights,
        "STATISTICS": rule.statistics,
        **_launch(rule, tile),
    }
    options = {name: arguments.pop(name) for name in ("num_warps", "maxnreg")}
    quick = not rare and weights and (rule.k, experts) == (8, 128)
    name = f"gate dlogits {_title(rule, False)}{' weights' * weights} E={experts} {tile}"
    return AotCase(name, dlogits_kernel, arguments, options, quick=quick, rare=rare)
