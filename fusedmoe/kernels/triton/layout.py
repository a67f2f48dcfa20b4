"""The order of `build_layout` as a stable counting sort, in three launches and without a word from the device.

1. Every block of positions counts its experts and writes the positions' keys down.
2. For each expert the counts are summed over the blocks before: where in the expert a block's rows begin. Several
   programs share the blocks, and each sums up those before its own.
3. Every position finds its rank among the equal keys of its own block, and with it its row; it fills in its row of
   `source` and `pair` and its pair of `row`. Positions past the last row fill in padding.

A position is a (token, k) pair in the order in which experts are filled: p = k·S + i, where i counts tokens by
priority. Ranks are found by comparing and counting, never by the order in which atomics happen to arrive.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.layout import Layout, row_bound
from fusedmoe.kernels.triton.jit import jit

# Positions of a block. A rank costs as many comparisons; half as many would double the table of counts.
BLOCK = 256
# Of which so many are compared at a time; more would take more registers.
CHUNK = 16
# Experts and blocks that a program of the scan has at a time, how many blocks it sums up at a time, and how many
# programs there are for the same experts at the most.
SCAN_EXPERTS = 16
SCAN_BLOCKS = 64
SCAN_WIDE = 256
SCAN_PROGRAMS = 16
_UNSPECIAL = ["tokens", "positions", "blocks", "capacity", "bound"]


@triton.jit(do_not_specialize=_UNSPECIAL)
def _token_and_pair(p, inside, order_ptr, tokens, K, ORDERED: tl.constexpr):
    """The token of each position, and the flat index s·K + k of its pair."""
    # Positions go choice by choice, tokens in order: a second choice never displaces a first one.
    k = p // tokens
    token = (p - k * tokens).to(tl.int64)
    if ORDERED:
        token = tl.load(order_ptr + token, mask=inside, other=0)
    return token, token * K + k


@jit(do_not_specialize=_UNSPECIAL)
def count_kernel(
    expert_ptr, order_ptr, key_ptr, count_ptr, tokens, positions, E, K,
    ORDERED: tl.constexpr, BLOCK: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    p = block * BLOCK + tl.arange(0, BLOCK)
    inside = p < positions
    _, pair = _token_and_pair(p, inside, order_ptr, tokens, K, ORDERED)
    expert = tl.load(expert_ptr + pair, mask=inside, other=-1)
    # What is no expert's number is an empty pair: nothing may be written out of bounds, whatever a gate returns.
    routed = (expert >= 0) & (expert < E)
    key = tl.where(routed, expert, -1).to(tl.int32)
    tl.store(key_ptr + p, key, mask=inside)
    e = tl.arange(0, EP)
    # Empty pairs are counted nowhere: the mask leaves them out, and expert 0 stands in for their number.
    count = tl.histogram(tl.where(routed, key, 0), EP, mask=routed)
    tl.store(count_ptr + block.to(tl.int64) * E + e, count, mask=e < E)


@jit(do_not_specialize=[*_UNSPECIAL, "length"])
def scan_kernel(
    count_ptr, before_ptr, total_ptr, blocks, length, E, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr
):
    """before[b, e] = sum of count[b', e] over b' < b; total[e] is the sum over all b'.

    A program has `length` blocks, a multiple of BLOCKS and of WIDE. It sums up those before on its own, WIDE at a time,
    and waits for no other.
    """
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    start = tl.program_id(1) * length
    columns = (e < E)[None, :]
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    # The sum of the blocks before: read again by each program, which is cheaper than to wait for another.
    for first in range(0, start, WIDE):
        ptrs = count_ptr + (first + tl.arange(0, WIDE))[:, None].to(tl.int64) * E + e[None, :]
        total += tl.sum(tl.load(ptrs, mask=columns, other=0), 0)
    for first in range(start, tl.minimum(start + length, blocks), BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        mask = (block < blocks)[:, None] & columns
        places = block[:, None].to(tl.int64) * E + e[None, :]
        count = tl.load(count_ptr + places, mask=mask, other=0)
        tl.store(before_ptr + places, tl.cumsum(count, 0) - count + total[None, :], mask=mask)
        total += tl.sum(count, 0)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        tl.store(total_ptr + e, total, mask=e < E)


@jit(do_not_specialize=_UNSPECIAL)
def place_kernel(
    # What the launches before have made.
    key_ptr, before_ptr, total_ptr, order_ptr,
    # The layout.
    counts_ptr, offsets_ptr, source_ptr, pair_ptr, row_ptr,
    tokens, positions, capacity, bound, E, K,
    ORDERED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    p = block * BLOCK + i
    inside = p < positions
    key = tl.load(key_ptr + p, mask=inside, other=-1)
    routed = key >= 0

    e = tl.arange(0, EP)
    # Every program sums up the experts' totals on its own: E numbers are cheaper than one more launch.
    kept_E = tl.minimum(tl.load(total_ptr + e, mask=e < E, other=0), capacity)
    end_E = tl.cumsum(kept_E, 0)
    if block == 0:
        tl.store(counts_ptr + e, kept_E.to(tl.int64), mask=e < E)
        tl.store(offsets_ptr + e, end_E - kept_E, mask=e < E)
        tl.store(offsets_ptr + E, tl.sum(kept_E, 0))

    # A pair's rank among those of its expert in this block: comparisons with all pairs before it, which is stable,
    # unlike atomics.
    rank = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, BLOCK, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(key_ptr + block * BLOCK + j, mask=block * BLOCK + j < positions, other=-1)
        equal = (other[None, :] == key[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(equal.to(tl.int32), 1)
    expert = tl.maximum(key, 0)
    rank += tl.load(before_ptr + block.to(tl.int64) * E + expert, mask=routed, other=0)
    kept = routed & (rank < capacity)
    row = tl.gather(end_E - kept_E, expert, 0) + rank

    token, pair = _token_and_pair(p, inside, order_ptr, tokens, K, ORDERED)
    tl.store(row_ptr + pair, tl.where(kept, row, -1).to(tl.int64), mask=inside)
    tl.store(source_ptr + row, token, mask=kept)
    tl.store(pair_ptr + row, pair, mask=kept)
    # Padding has valid indices, so that kernels may read through them.
    padding = (p >= tl.sum(kept_E, 0)) & (p < bound)
    tl.store(source_ptr + p, tl.zeros((BLOCK,), dtype=tl.int64), mask=padding)
    tl.store(pair_ptr + p, tl.zeros((BLOCK,), dtype=tl.int64), mask=padding)


def sort_pairs(expert_SK: Tensor, experts: int, capacity: int | None, order_S: Tensor | None) -> Layout:
    """Launches the sort. `order_S`: tokens in the order in which experts take them, or None for their own order."""
    tokens, K = expert_SK.shape
    positions = tokens * K
    if positions >= 2**31:
        raise ValueError(f"{tokens} tokens with {K} experts each are more than 2**31 - 1 rows: split the batch")
    bound = row_bound(tokens, K, experts, capacity)
    if positions == 0:
        # Memory of their own: what an operator of PyTorch returns must not share any.
        counts_E = expert_SK.new_zeros(experts, dtype=torch.long)
        offsets_E1 = expert_SK.new_zeros(experts + 1, dtype=torch.int32)
        source_N, pair_N, row_N = (expert_SK.new_empty(0, dtype=torch.long) for _ in range(3))
        return Layout(counts_E, offsets_E1, source_N, pair_N, row_N.view(tokens, K))
    expert_SK = expert_SK.contiguous()
    blocks = triton.cdiv(positions, BLOCK)
    scratch = expert_SK.new_empty(positions + (2 * blocks + 1) * experts, dtype=torch.int32)
    key_P, count, before, total_E = scratch.split([positions, blocks * experts, blocks * experts, experts])
    layout = Layout(
        expert_SK.new_empty(experts, dtype=torch.long),
        expert_SK.new_empty(experts + 1, dtype=torch.int32),
        expert_SK.new_empty(bound, dtype=torch.long),
        expert_SK.new_empty(bound, dtype=torch.long),
        expert_SK.new_empty((tokens, K), dtype=torch.long),
    )
    constants = {"ORDERED": order_S is not None, "BLOCK": BLOCK, "EP": triton.next_power_of_2(experts)}
    count_kernel[(blocks,)](expert_SK, order_S, key_P, count, tokens, positions, experts, K, **constants, num_warps=4)
    length = triton.cdiv(triton.cdiv(blocks, SCAN_PROGRAMS), SCAN_WIDE) * SCAN_WIDE
    scan_kernel[(triton.cdiv(experts, SCAN_EXPERTS), triton.cdiv(blocks, length))](
        count, before, total_E, blocks, length, experts,
        EXPERTS=SCAN_EXPERTS, BLOCKS=SCAN_BLOCKS, WIDE=SCAN_WIDE, num_warps=4,
    )  # fmt: skip
    place_kernel[(blocks,)](
        key_P, before, total_E, order_S,
        layout.counts_E, layout.offsets_E1, layout.source_N, layout.pair_N, layout.row_SK,
        tokens, positions, positions if capacity is None else capacity, bound, experts, K,
        **constants, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return layout
