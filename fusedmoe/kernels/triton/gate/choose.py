"""Choice of experts by logits in one pass over a tile of rows, with the product in front where it fits.

A program has all logits of its BS tokens in registers. Top-k is k passes of a maximum: logits become integers that sort
as they do (so that NaN, infinities and equal values have one place each), the lower index wins, and what was taken
becomes the lowest integer, below every logit. What was taken is thereby known for the count of choices. Where logits
come from memory, passes look at the high bits of the integers first, and at all of them where that leaves a doubt.

Sums over tokens are made in two steps, programs' sums and then their sum in a fixed order. The backward makes the
gradient of the logits in one pass, recomputing scores and sums from the logits. Definition: `define_choice`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.gate import LEAST_SUM, SCORES, GateChoice, GateRule
from fusedmoe.kernels.generation import BLACKWELL, HOPPER, Capability, generation_of
from fusedmoe.kernels.triton.gate.router import (
    Tile,
    logits,
    logits_tile,
    room_for_summands,
    store_summands,
    sum_of_parts,
    taken_apart,
    width,
)
from fusedmoe.kernels.triton.jit import MOST_REGISTERS, jit

_SCORE_CODES = {name: code for code, name in enumerate(SCORES)}
_LEAST_SUM = tl.constexpr(LEAST_SUM)
_TAKEN = tl.constexpr(-(2**31))
# Infinity as an integer that sorts (`sortable`); −inf is one below its negative, and NaN above.
_INFINITY = tl.constexpr(0x7F800000)
_UNSPECIAL = ["length", "blocks", "programs", "tiles"]
# Programs among which given logits are divided: as many as Hopper has at a time. The sums' order follows from it, so it
# is a constant.
_PROGRAMS = 12 * 132


@triton.jit
def sortable(x):
    """Integers in the order of the floats: -0 as 0, NaN highest, all above `_TAKEN`."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, key, 0x7FFFFFFF)


@triton.jit
def rows_of_program(length, blocks, tile, tiles, BS: tl.constexpr):
    """The sequence, the rows (int64, those past the sequence's end clamped to its last) and which are inside, for one
    of a program's tiles."""
    sequence = tl.program_id(0) // blocks
    place = (tl.program_id(0) % blocks * tiles + tile) * BS + tl.arange(0, BS)
    row = sequence * length + tl.minimum(place, length - 1)
    return sequence, row.to(tl.int64), place < length


@triton.jit
def divisor_of(total):
    """The sum by which scores are divided, as in `share_of_sum`; NaN stays NaN."""
    return tl.where(total < _LEAST_SUM, 1.0, total)


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
    share = power * (1.0 / total)[:, None]
    return share * (grad - tl.sum(share * grad, 1)[:, None])


@triton.jit
def score_backward(logits, inside, grad, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr):
    """The gradient of logits from that of their scores, with NORMALIZE of scores / Σ scores, over what is `inside`."""
    score = tl.sigmoid(logits) if SIGMOID else logits
    score = tl.where(inside, score, 0.0)
    factor = score if SIGMOID else tl.where(inside, 1.0, 0.0)
    if NORMALIZE:
        total = tl.sum(score, 1)
        divisor = divisor_of(total)[:, None]
        mean = tl.where(total >= _LEAST_SUM, tl.sum(score / divisor * grad, 1), 0.0)
        grad = grad - mean[:, None]
        factor = factor / divisor  # before the gradient, which a small divisor would make infinite
    if SIGMOID:
        factor *= 1.0 - score
    return factor * grad


@triton.jit
def best_of(key, e, BS: tl.constexpr, K: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr):
    """The places of a row's K highest keys, the lower of equals first, [BS, KP]; and the keys, those `_TAKEN`."""
    k = tl.arange(0, KP)
    expert = tl.zeros((BS, KP), dtype=tl.int32)
    for place in range(K):
        # Two reductions of a number each: fewer instructions than one of number and place, and where a row is within a
        # warp each is a single one.
        best = tl.max(key, 1)
        index = tl.min(tl.where(key == best[:, None], e[None, :], EP), 1)
        key = tl.where(e[None, :] == index[:, None], _TAKEN, key)
        expert = tl.where((k == place)[None, :], index[:, None], expert)
    return expert, key


@triton.jit
def best_by_high_bits(key, e, BS: tl.constexpr, K: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr):
    """Results of `best_of`, in half of its instructions, and the rows where they may be wrong.

    The low bits of each key make room for its place, so that no two are equal and a maximum tells the place as well. A
    row where one of the K + 1 highest differs from the next in those bits only, or not at all, is doubtful.
    """
    k = tl.arange(0, KP)
    key = tl.where(key == _TAKEN, _TAKEN, (key & -EP) | (EP - 1 - e)[None, :])
    picked = tl.zeros((BS, KP), dtype=tl.int32)
    doubtful = tl.zeros((BS,), dtype=tl.int1)
    best = tl.max(key, 1)
    for place in range(K):
        picked = tl.where((k == place)[None, :], best[:, None], picked)
        key = tl.where(key == best[:, None], _TAKEN, key)
        then = tl.max(key, 1)
        doubtful |= (best & -EP) == (then & -EP)
        best = then
    return EP - 1 - (picked & (EP - 1)), key, doubtful


@jit(do_not_specialize=_UNSPECIAL)
def choose_kernel(
    # Tokens and router matrix with PRODUCT, which then writes the logits; else the logits are read.
    x_ptr, w_ptr, logits_ptr, bias_ptr,
    # The choice, sums over each program's tokens, and a count of tokens without a right choice.
    expert_ptr, weight_ptr, sums_ptr, logsumexp_ptr, bad_ptr,
    # Tokens of a sequence, programs of one and of all, tiles of a program where logits are given, and sizes.
    length, blocks, programs, tiles, M, E, scale,
    # The rule (`GateRule`).
    K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr, BIAS: tl.constexpr, STATISTICS: tl.constexpr,
    LOGSUMEXP: tl.constexpr,
    # How logits are made (`mac`), and in which tiles; EP, KP: powers of two that hold E and K.
    PRODUCT: tl.constexpr, EVEN: tl.constexpr, TAKEN_APART: tl.constexpr, INTERPRET: tl.constexpr,
    BS: tl.constexpr, BK: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    SOFTMAX: tl.constexpr = SCORE == 0
    e = tl.arange(0, EP)
    known = (e < E)[None, :]
    shares = tl.zeros((BS, EP), dtype=tl.float32)
    counts = tl.zeros((BS, EP), dtype=tl.int32)
    bad = tl.zeros((BS,), dtype=tl.int32)
    for tile in range(1 if PRODUCT else tiles):
        sequence, row, inside = rows_of_program(length, blocks, tile, 1 if PRODUCT else tiles, BS)
        at = row[:, None] * E + e[None, :]
        if PRODUCT:
            logits = logits_tile(x_ptr, w_ptr, row, tl.minimum(e, E - 1), M, EVEN, TAKEN_APART, INTERPRET, BS, EP, BK)
            tl.store(logits_ptr + at, logits, mask=inside[:, None] & known)
            logits = tl.where(known, logits, -float("inf"))
        else:
            logits = tl.load(logits_ptr + at, mask=known, other=-float("inf"))

        # Softmax over all experts, where something needs it: normalised weights need the chosen logits only.
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
        if PRODUCT:
            expert, key = best_of(key, e, BS, K, EP, KP)
        else:
            expert, left, doubtful = best_by_high_bits(key, e, BS, K, EP, KP)
            if tl.max(doubtful.to(tl.int32), 0) > 0:
                expert, key = best_of(key, e, BS, K, EP, KP)
            else:
                key = left

        chosen = (k < K)[None, :]
        # From here on logits come from memory again, where this program wrote them: the passes need their registers.
        if PRODUCT and not INTERPRET:
            tl.debug_barrier()
        picked = tl.load(logits_ptr + row[:, None] * E + expert, mask=chosen, other=-float("inf"))
        # Without a bias the highest logit of all is the highest of the chosen.
        highest = tl.max(sortable(tl.load(logits_ptr + at, mask=known, other=-float("inf")) if BIAS else picked), 1)
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
                logits = tl.load(logits_ptr + at, mask=known, other=-float("inf"))
            if SOFTMAX:
                if PRODUCT:
                    power = tl.exp(logits - top[:, None])
                share = power * (1.0 / total)[:, None]
            elif SCORE == 1:
                share = tl.where(known, tl.sigmoid(logits), 0.0)
                share = share / divisor_of(tl.sum(share, 1))[:, None]
            else:
                share = logits
            # Taken keys are the choices: the counts need no second look at the experts chosen.
            counted = (key == _TAKEN) & known & inside[:, None]
            shares += tl.where(inside[:, None], share, 0.0)
            counts += counted.to(tl.int32)

    number = tl.sum(bad, 0)
    if number > 0:
        tl.atomic_add(bad_ptr, number.to(tl.int64), sem="relaxed")
    if STATISTICS:
        # One row of sums for each program, added up afterwards in order: no atomics, so that sums repeat.
        sums = sums_ptr + tl.program_id(0).to(tl.int64) * E + e
        tl.store(sums, tl.sum(shares, 0), mask=e < E)
        tl.store(sums + programs.to(tl.int64) * E, tl.sum(counts, 0).to(tl.float32), mask=e < E)


@jit(do_not_specialize=["length", "blocks"])
def dlogits_kernel(
    logits_ptr, expert_ptr,
    # Gradients of weights, score sums and logsumexp, as far as there are any; and of the logits, which are made.
    dweight_ptr, dscore_ptr, dlogsumexp_ptr, dlogits_ptr,
    # Tokens of a sequence, programs of one, and sizes; numbers from a row of the result to the next, and to the second
    # summand.
    length, blocks, E, scale, stride, plane,
    # The rule (`GateRule`), and which gradients there are.
    K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr, WEIGHTS: tl.constexpr, STATISTICS: tl.constexpr,
    LOGSUMEXP: tl.constexpr,
    # Whether the result is two summands (`router.room_for_summands`).
    APART: tl.constexpr,
    BS: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    SOFTMAX: tl.constexpr = SCORE == 0
    sequence, row, inside = rows_of_program(length, blocks, 0, 1, BS)
    e = tl.arange(0, EP)
    known = (e < E)[None, :]
    at = row[:, None] * E + e[None, :]
    logits = tl.load(logits_ptr + at, mask=known, other=-float("inf"))

    # What the weights send to the logits of the chosen; to their probabilities, if they are not a softmax of their own.
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
    if APART:
        out = dlogits_ptr + row[:, None] * stride + e[None, :]
        store_summands(out, plane, tl.where(known, dlogits, 0.0), inside[:, None] & (e < stride)[None, :])
    else:
        tl.store(dlogits_ptr + at, dlogits, mask=inside[:, None] & known)


def fused_tile(experts: int, apart: str, capability: Capability | None) -> Tile | None:
    """Returns the tile of logits made and used in one program; None where they are too many for its registers."""
    columns = width(experts)
    if capability is None:
        return Tile(64, columns, 128, 4, 1)
    # Rows of logits that are no multiple of 16 take more registers: they come and go by single numbers.
    ragged = experts % 16 != 0
    if ragged and (columns > 128 or columns == 128 and apart == "both"):
        return None
    if apart:
        rows = 32 if capability < HOPPER and ragged and apart == "both" else 64  # sm_120 would spill
        return Tile(rows, columns, 32, 8, 3) if columns <= 128 else None
    # From so many on a product of its own pays: programs with more rows read the matrix less often than those that must
    # keep the registers for the choice, and there the cache's speed is the limit.
    if capability >= HOPPER and columns >= 128 and capability < BLACKWELL:
        return None
    # Blackwell's products give a thread a whole row, which reductions like but registers do not.
    if capability >= BLACKWELL:
        return Tile(64, columns, 64, 4 if columns <= 64 else 8, 3) if columns <= 128 else None
    # A deep step where the tile is small: the more is underway to a program, the faster tokens come.
    deep = capability >= HOPPER and columns <= (32 if ragged else 64)
    depth, stages = (128, 4 if columns <= 32 else 3) if deep else (64, 3)
    few = 64 if ragged or capability < HOPPER else 128
    return Tile(64, columns, depth, 8 if columns > few else 4, stages) if columns <= 256 else None


def rowwise_tile(experts: int, capability: Capability | None) -> Tile:
    """Returns the tile for logits that are given, and for their gradient."""
    if capability is None:
        return Tile(64, width(experts), 16, 4, 1)
    # A program is a warp: it waits for no other, and a row is within it.
    return Tile(512 // width(experts), width(experts), 16, 1, 1)


def choose(logits_SE: Tensor, rule: GateRule, bias_E: Tensor | None = None) -> GateChoice:
    """`define_choice` of float32 logits. No autograd, and no word from the device."""
    return _choose(None, None, logits_SE.contiguous(), rule, bias_E)


def gate(x_SM: Tensor, weight_EM: Tensor, rule: GateRule, bias_E: Tensor | None = None) -> GateChoice:
    """`define_choice` of x·Wᵀ. No autograd, and no word from the device."""
    x_SM, weight_EM = x_SM.contiguous(), weight_EM.contiguous()
    experts = weight_EM.shape[0]
    if fused_tile(experts, taken_apart(x_SM.dtype, weight_EM.dtype), generation_of(x_SM.device)) is None:
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
    bad = torch.zeros((), dtype=torch.int64, device=device)
    if S == 0:
        zeros = (torch.zeros((B, E), dtype=single, device=device) for _ in range(2))
        score_BE, count_BE = zeros if rule.statistics else (None, None)
        return GateChoice(expert_SK, weight_SK, logits_SE, score_BE, count_BE, logsumexp_S, bad)
    tile = rowwise_tile(E, generation_of(logits_SE.device))
    M, product = 0, {"EVEN": True, "TAKEN_APART": ""}
    if x_SM is not None and weight_EM is not None:
        M, apart = x_SM.shape[1], taken_apart(x_SM.dtype, weight_EM.dtype)
        fused = fused_tile(E, apart, generation_of(x_SM.device))
        assert fused is not None
        tile, product = fused, {"EVEN": M % fused.depth == 0, "TAKEN_APART": apart}
    blocks, tiles = triton.cdiv(S // B, tile.rows), 1
    if x_SM is None:
        tiles = triton.cdiv(blocks, max(_PROGRAMS // B, 1))
        blocks = triton.cdiv(blocks, tiles)
    sums = torch.empty((2, B, blocks, E), dtype=single, device=device) if rule.statistics else None
    choose_kernel[(B * blocks,)](
        x_SM, weight_EM, logits_SE, bias_E, expert_SK, weight_SK, sums, logsumexp_S, bad,
        S // B, blocks, B * blocks, tiles, M, E, rule.scale,
        BIAS=bias_E is not None, STATISTICS=rule.statistics, PRODUCT=x_SM is not None, INTERPRET=INTERPRET,
        BK=tile.depth, num_stages=tile.stages, **product, **launch_options(rule, tile),
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
    apart: bool = False,
) -> Tensor:
    """The gradient of float32 logits from those of a choice's weights, scores and logsumexp, as far as given; `apart`:
    as two summands (`router.room_for_summands`)."""
    S, E = logits_SE.shape
    logits_SE = logits_SE.contiguous()
    dlogits = room_for_summands(S, E, logits_SE.device) if apart else torch.empty_like(logits_SE)
    if S == 0:
        return dlogits
    tile, B = rowwise_tile(E, generation_of(logits_SE.device)), rule.sequences(S)
    blocks = triton.cdiv(S // B, tile.rows)
    grads = (None if grad is None else grad.contiguous() for grad in (dweight_SK, dscore_BE, dlogsumexp_S))
    given = {"WEIGHTS": dweight_SK is not None, "STATISTICS": dscore_BE is not None}
    options = {**launch_options(rule, tile), "LOGSUMEXP": dlogsumexp_S is not None, "APART": apart}
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
        # Left to itself the assembler spills a few bytes where that lets one more program onto a multiprocessor.
        "maxnreg": MOST_REGISTERS,
    }
