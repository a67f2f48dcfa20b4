"""Top-k expert selection from logits in one pass over row tiles, fused with the router GEMM where it fits.

A program holds all logits of its BS tokens in registers. Top-k is k passes of a maximum over logits mapped to integers
of the same order, in which NaN, infinities and ties have a defined place. Logits read from memory are compared by their
high bits first, and by all bits only where those are ambiguous.

Sums over tokens are reduced per program, then over programs in a fixed order. Backward computes the gradient of the
logits in one pass, recomputing scores and sums. No device synchronization.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.backend import BLACKWELL, HOPPER, INTERPRET, Capability, generation_of
from fusedmoe.kernels.gate import MIN_SUM, SCORES, GateChoice, GateRule
from fusedmoe.kernels.triton.gate.router import (
    Tile,
    empty_summands,
    logits,
    logits_tile,
    operand_to_split,
    padded_width,
    store_summands,
    sum_of_parts,
)
from fusedmoe.kernels.triton.jit import MAX_REGISTERS, jit

_SCORE_CODES = {name: code for code, name in enumerate(SCORES)}
_MIN_SUM = tl.constexpr(MIN_SUM)
_TAKEN = tl.constexpr(-(2**31))
# Infinity as an integer of `sortable`; −inf is one below its negative, NaN is above.
_INFINITY = tl.constexpr(0x7F800000)
_DYNAMIC_ARGUMENTS = ["length", "blocks", "programs", "tiles"]
# Programs for given logits, which all run concurrently on Hopper. Constant, because it determines the summation order.
_PROGRAMS = 12 * 132


@triton.jit
def sortable(x):
    """Map floats to integers of the same order: -0 equals 0, NaN is highest, all are above `_TAKEN`."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, key, 0x7FFFFFFF)


@triton.jit
def rows_of_program(length, blocks, tile, tiles, BS: tl.constexpr):
    """Return the tile's sequence, its row indices (int64, clamped) and valid mask; sequences have `length` rows."""
    sequence = tl.program_id(0) // blocks
    position = (tl.program_id(0) % blocks * tiles + tile) * BS + tl.arange(0, BS)
    row = sequence * length + tl.minimum(position, length - 1)
    return sequence, row.to(tl.int64), position < length


@triton.jit
def divisor_of(total):
    return tl.where(total < _MIN_SUM, 1.0, total)


@triton.jit
def softmax_terms(logits):
    top = tl.max(logits, 1)
    power = tl.exp(logits - top[:, None])
    return power, tl.sum(power, 1), top


@triton.jit
def softmax_backward(logits, grad):
    power, total, _ = softmax_terms(logits)
    share = power * (1.0 / total)[:, None]
    return share * (grad - tl.sum(share * grad, 1)[:, None])


@triton.jit
def score_backward(logits, inside, grad, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr):
    """Return the gradient of logits from the gradient of their scores, over the mask `inside`.

    NORMALIZE: the scores are divided by their sum first.
    """
    score = tl.sigmoid(logits) if SIGMOID else logits
    score = tl.where(inside, score, 0.0)
    factor = score if SIGMOID else tl.where(inside, 1.0, 0.0)
    if NORMALIZE:
        total = tl.sum(score, 1)
        divisor = divisor_of(total)[:, None]
        mean = tl.where(total >= _MIN_SUM, tl.sum(score / divisor * grad, 1), 0.0)
        grad = grad - mean[:, None]
        factor = factor / divisor  # before the gradient, which a small divisor could overflow
    if SIGMOID:
        factor *= 1.0 - score
    return factor * grad


@triton.jit
def best_of(key, e, BS: tl.constexpr, K: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr):
    """Return the indices of each row's K highest keys, [BS, KP], and the keys with those set to `_TAKEN`."""
    k = tl.arange(0, KP)
    expert = tl.zeros((BS, KP), dtype=tl.int32)
    for choice in range(K):
        # Two scalar reductions take fewer instructions than one over (value, index).
        best = tl.max(key, 1)
        index = tl.min(tl.where(key == best[:, None], e[None, :], EP), 1)
        key = tl.where(e[None, :] == index[:, None], _TAKEN, key)
        expert = tl.where((k == choice)[None, :], index[:, None], expert)
    return expert, key


@triton.jit
def best_by_high_bits(key, e, BS: tl.constexpr, K: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr):
    """Return each row's top K as `best_of` does, with half the instructions, and a mask of rows that may be wrong.

    The index replaces the low bits of each key, so one maximum yields value and index. A row may be wrong if two
    neighbours among its K + 1 highest keys have equal high bits.
    """
    k = tl.arange(0, KP)
    key = tl.where(key == _TAKEN, _TAKEN, (key & -EP) | (EP - 1 - e)[None, :])
    picked = tl.zeros((BS, KP), dtype=tl.int32)
    doubtful = tl.zeros((BS,), dtype=tl.int1)
    best = tl.max(key, 1)
    for choice in range(K):
        picked = tl.where((k == choice)[None, :], best[:, None], picked)
        key = tl.where(key == best[:, None], _TAKEN, key)
        then = tl.max(key, 1)
        doubtful |= (best & -EP) == (then & -EP)
        best = then
    return EP - 1 - (picked & (EP - 1)), key, doubtful


@jit(do_not_specialize=_DYNAMIC_ARGUMENTS)
def choose_kernel(
    # Tokens and router matrix with PRODUCT, which writes the logits; otherwise logits are read.
    x_ptr, w_ptr, logits_ptr, bias_ptr,
    expert_ptr, weight_ptr, sums_ptr, logsumexp_ptr, bad_ptr,
    # Tokens per sequence, programs per sequence and in total, tiles per program for given logits.
    length, blocks, programs, tiles, M, E, scale,
    K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr, BIAS: tl.constexpr, STATISTICS: tl.constexpr,
    LOGSUMEXP: tl.constexpr,
    # How logits are computed (`mac`); EP, KP: powers of two that hold E and K.
    PRODUCT: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, INTERPRET: tl.constexpr,
    BS: tl.constexpr, BK: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    SOFTMAX: tl.constexpr = SCORE == 0
    e = tl.arange(0, EP)
    is_expert = (e < E)[None, :]
    shares = tl.zeros((BS, EP), dtype=tl.float32)
    counts = tl.zeros((BS, EP), dtype=tl.int32)
    bad = tl.zeros((BS,), dtype=tl.int32)
    for tile in range(1 if PRODUCT else tiles):
        sequence, row, inside = rows_of_program(length, blocks, tile, 1 if PRODUCT else tiles, BS)
        at = row[:, None] * E + e[None, :]
        if PRODUCT:
            logits = logits_tile(x_ptr, w_ptr, row, tl.minimum(e, E - 1), M, EVEN, SPLIT, INTERPRET, BS, EP, BK)
            tl.store(logits_ptr + at, logits, mask=inside[:, None] & is_expert)
            logits = tl.where(is_expert, logits, -float("inf"))
        else:
            logits = tl.load(logits_ptr + at, mask=is_expert, other=-float("inf"))

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
        key = tl.where(is_expert, sortable(by), _TAKEN)
        k = tl.arange(0, KP)
        if PRODUCT:
            expert, key = best_of(key, e, BS, K, EP, KP)
        else:
            expert, left, doubtful = best_by_high_bits(key, e, BS, K, EP, KP)
            if tl.max(doubtful.to(tl.int32), 0) > 0:
                expert, key = best_of(key, e, BS, K, EP, KP)
            else:
                key = left

        chosen = (k < K)[None, :]
        # Logits are reloaded below, because the top-k passes need their registers.
        if PRODUCT and not INTERPRET:
            tl.debug_barrier()
        picked = tl.load(logits_ptr + row[:, None] * E + expert, mask=chosen, other=-float("inf"))
        # Without a bias the highest logit is among the selected.
        highest = tl.max(sortable(tl.load(logits_ptr + at, mask=is_expert, other=-float("inf")) if BIAS else picked), 1)
        bad += (inside & ((highest >= _INFINITY) | (highest < -_INFINITY))).to(tl.int32)
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
                weight = weight / divisor_of(tl.sum(weight, 1))[:, None]
        pair = row[:, None] * K + k[None, :]
        tl.store(expert_ptr + pair, expert.to(tl.int64), mask=inside[:, None] & chosen)
        tl.store(weight_ptr + pair, weight * scale, mask=inside[:, None] & chosen)

        if STATISTICS:
            if PRODUCT:
                logits = tl.load(logits_ptr + at, mask=is_expert, other=-float("inf"))
            if SOFTMAX:
                if PRODUCT:
                    power = tl.exp(logits - top[:, None])
                share = power * (1.0 / total)[:, None]
            elif SCORE == 1:
                share = tl.where(is_expert, tl.sigmoid(logits), 0.0)
                share = share / divisor_of(tl.sum(share, 1))[:, None]
            else:
                share = logits
            # Taken keys mark the choices.
            counted = (key == _TAKEN) & is_expert & inside[:, None]
            shares += tl.where(inside[:, None], share, 0.0)
            counts += counted.to(tl.int32)

    number = tl.sum(bad, 0)
    if number > 0:
        tl.atomic_add(bad_ptr, number.to(tl.int64), sem="relaxed")
    if STATISTICS:
        # Reduced afterwards in order: deterministic, no atomics.
        sums = sums_ptr + tl.program_id(0).to(tl.int64) * E + e
        tl.store(sums, tl.sum(shares, 0), mask=e < E)
        tl.store(sums + programs.to(tl.int64) * E, tl.sum(counts, 0).to(tl.float32), mask=e < E)


@jit(do_not_specialize=["length", "blocks"])
def dlogits_kernel(
    logits_ptr, expert_ptr,
    # Gradients of weights, score sums and logsumexp, or None; the logits' gradient, the output.
    dweight_ptr, dscore_ptr, dlogsumexp_ptr, dlogits_ptr,
    # Sequence length, programs per sequence; element strides of the result between rows and between summands.
    length, blocks, E, scale, stride, plane,
    K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr, WEIGHTS: tl.constexpr, STATISTICS: tl.constexpr,
    LOGSUMEXP: tl.constexpr,
    APART: tl.constexpr,
    BS: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    SOFTMAX: tl.constexpr = SCORE == 0
    sequence, row, inside = rows_of_program(length, blocks, 0, 1, BS)
    e = tl.arange(0, EP)
    is_expert = (e < E)[None, :]
    at = row[:, None] * E + e[None, :]
    logits = tl.load(logits_ptr + at, mask=is_expert, other=-float("inf"))

    # If the weights are a softmax over the selected logits, these get the gradient, else the probabilities do.
    dlogits = tl.zeros((BS, EP), dtype=tl.float32)
    if WEIGHTS:
        k = tl.arange(0, KP)
        chosen = (k < K)[None, :]
        pair = row[:, None] * K + k[None, :]
        expert = tl.load(expert_ptr + pair, mask=chosen, other=0).to(tl.int32)
        grad = tl.load(dweight_ptr + pair, mask=chosen, other=0.0) * scale
        if NORMALIZE or SCORE == 1:
            picked = tl.load(logits_ptr + row[:, None] * E + expert, mask=chosen, other=-float("inf"))
            if SOFTMAX:
                grad = softmax_backward(picked, grad)
            else:
                grad = score_backward(picked, chosen, grad, NORMALIZE, SCORE == 1)
        for choice in range(K):
            here = (k == choice)[None, :]
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
        dlogits += score_backward(logits, is_expert, dscore, SCORE == 1, SCORE == 1)
    if LOGSUMEXP:
        power, total, _ = softmax_terms(logits)
        dlogits += power / total[:, None] * tl.load(dlogsumexp_ptr + row)[:, None]
    if APART:
        out = dlogits_ptr + row[:, None] * stride + e[None, :]
        store_summands(out, plane, tl.where(is_expert, dlogits, 0.0), inside[:, None] & (e < stride)[None, :])
    else:
        tl.store(dlogits_ptr + at, dlogits, mask=inside[:, None] & is_expert)


def fused_tile(experts: int, split: str, capability: Capability | None) -> Tile | None:
    """Return the tile of the fused router GEMM and top-k; None if the logits do not fit in a program's registers."""
    columns = padded_width(experts)
    if capability is None:
        return Tile(64, columns, 128, 4, 1)
    # Rows with a length not a multiple of 16 are moved element by element, which takes registers.
    ragged = experts % 16 != 0
    if ragged and (columns > 128 or columns == 128 and split == "both"):
        return None
    if split:
        rows = 32 if capability < HOPPER and ragged and split == "both" else 64  # sm_120 would spill
        return Tile(rows, columns, 32, 8, 3) if columns <= 128 else None
    # A separate GEMM is faster: without keys of top-k its programs have more rows and read the matrix less often. Cache
    # bandwidth is the limit.
    if capability >= HOPPER and columns >= 128 and capability < BLACKWELL:
        return None
    # Blackwell MMA results assign a whole row to a thread: good for reductions, but it takes registers.
    if capability >= BLACKWELL:
        return Tile(64, columns, 64, 4 if columns <= 64 else 8, 3) if columns <= 128 else None
    # Deep steps for small tiles: more bytes in flight per program load tokens faster.
    deep = capability >= HOPPER and columns <= (32 if ragged else 64)
    depth, stages = (128, 4 if columns <= 32 else 3) if deep else (64, 3)
    few = 64 if ragged or capability < HOPPER else 128
    return Tile(64, columns, depth, 8 if columns > few else 4, stages) if columns <= 256 else None


def rowwise_tile(experts: int, capability: Capability | None) -> Tile:
    if capability is None:
        return Tile(64, padded_width(experts), 16, 4, 1)
    return Tile(512 // padded_width(experts), padded_width(experts), 16, 1, 1)


def choose(logits_SE: Tensor, rule: GateRule, bias_E: Tensor | None = None) -> GateChoice:
    """Compute `define_choice` of float32 logits. Not differentiable."""
    tile = rowwise_tile(logits_SE.shape[1], generation_of(logits_SE.device))
    return _choose(logits_SE.contiguous(), rule, bias_E, tile)


def gate(x_SM: Tensor, weight_EM: Tensor, rule: GateRule, bias_E: Tensor | None = None) -> GateChoice:
    """Compute `define_choice` of x·Wᵀ. Not differentiable."""
    x_SM, weight_EM = x_SM.contiguous(), weight_EM.contiguous()
    experts, split = weight_EM.shape[0], operand_to_split(x_SM.dtype, weight_EM.dtype)
    tile = fused_tile(experts, split, generation_of(x_SM.device))
    if tile is None:
        return choose(logits(x_SM, weight_EM), rule, bias_E)
    logits_SE = torch.empty((x_SM.shape[0], experts), dtype=torch.float32, device=x_SM.device)
    return _choose(logits_SE, rule, bias_E, tile, x_SM, weight_EM, split)


def _choose(
    logits_SE: Tensor,
    rule: GateRule,
    bias_E: Tensor | None,
    tile: Tile,
    x_SM: Tensor | None = None,
    weight_EM: Tensor | None = None,
    split: str = "",
) -> GateChoice:
    (S, E), B = logits_SE.shape, rule.sequences(logits_SE.shape[0])
    device, single = logits_SE.device, torch.float32
    expert_SK = torch.empty((S, rule.k), dtype=torch.int64, device=device)
    weight_SK = torch.empty((S, rule.k), dtype=single, device=device)
    logsumexp_S = torch.empty(S, dtype=single, device=device) if rule.logsumexp else None
    bad = torch.zeros((), dtype=torch.int64, device=device)
    if S == 0:
        zeros = (torch.zeros((B, E), dtype=single, device=device) for _ in range(2))
        score_BE, count_BE = zeros if rule.statistics else (None, None)
        return GateChoice(expert_SK, weight_SK, logits_SE, score_BE, count_BE, logsumexp_S, bad)
    M = 0 if x_SM is None else x_SM.shape[1]
    blocks, tiles = triton.cdiv(S // B, tile.rows), 1
    if x_SM is None:
        tiles = triton.cdiv(blocks, max(_PROGRAMS // B, 1))
        blocks = triton.cdiv(blocks, tiles)
    sums = torch.empty((2, B, blocks, E), dtype=single, device=device) if rule.statistics else None
    choose_kernel[(B * blocks,)](
        x_SM, weight_EM, logits_SE, bias_E, expert_SK, weight_SK, sums, logsumexp_S, bad,
        S // B, blocks, B * blocks, tiles, M, E, rule.scale,
        BIAS=bias_E is not None, STATISTICS=rule.statistics, PRODUCT=x_SM is not None, INTERPRET=INTERPRET,
        EVEN=M % tile.depth == 0, SPLIT=split, BK=tile.depth, num_stages=tile.stages, **launch_options(rule, tile),
    )  # fmt: skip
    if sums is None:
        return GateChoice(expert_SK, weight_SK, logits_SE, None, None, logsumexp_S, bad)
    score_BE, count_BE = (torch.empty((B, E), dtype=single, device=device) for _ in range(2))
    sum_of_parts(sums, score_BE, count_BE)
    return GateChoice(expert_SK, weight_SK, logits_SE, score_BE, count_BE, logsumexp_S, bad)


def dlogits(
    logits_SE: Tensor,
    expert_SK: Tensor,
    rule: GateRule,
    dweight_SK: Tensor | None,
    dscore_BE: Tensor | None,
    dlogsumexp_S: Tensor | None,
    split: bool = False,
) -> Tensor:
    """Return the gradient of float32 logits from the gradients of weights, scores and logsumexp, where given.

    `split`: return it as two summands (`router.empty_summands`).
    """
    S, E = logits_SE.shape
    logits_SE = logits_SE.contiguous()
    dlogits = empty_summands(S, E, logits_SE.device) if split else torch.empty_like(logits_SE)
    if S == 0:
        return dlogits
    tile, B = rowwise_tile(E, generation_of(logits_SE.device)), rule.sequences(S)
    blocks = triton.cdiv(S // B, tile.rows)
    grads = (None if grad is None else grad.contiguous() for grad in (dweight_SK, dscore_BE, dlogsumexp_S))
    given = {"WEIGHTS": dweight_SK is not None, "STATISTICS": dscore_BE is not None}
    options = {**launch_options(rule, tile), "LOGSUMEXP": dlogsumexp_S is not None, "APART": split}
    stride = dlogits.shape[-1]
    dlogits_kernel[(B * blocks,)](
        logits_SE, expert_SK, *grads, dlogits, S // B, blocks, E, rule.scale, stride, S * stride, **given, **options
    )
    return dlogits


def launch_options(rule: GateRule, tile: Tile) -> dict[str, Any]:
    return {
        "K": rule.k,
        "SCORE": _SCORE_CODES[rule.score],
        "NORMALIZE": rule.normalize,
        "LOGSUMEXP": rule.logsumexp,
        "BS": tile.rows,
        "EP": tile.columns,
        "KP": triton.next_power_of_2(rule.k),
        "num_warps": tile.warps,
        # By default the assembler spills a few bytes where that raises occupancy.
        "maxnreg": MAX_REGISTERS,
    }
