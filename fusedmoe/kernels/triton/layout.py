"""Layouts and row tiles on the device, without device synchronization.

`build_layout` is a stable counting sort in two launches. A position is a (token, k) pair in the order in which experts
are filled: p = k·S + i, where i orders tokens by priority. Launch 1: each block of positions counts its experts. Launch
2: each block sums the counts of the blocks before it, to find its first row per expert. It then processes STEP
positions at a time, one per thread: a position's row is the expert's next row plus the number of earlier positions with
this expert in the step.

For few positions every block counts all of them: one launch. Ranks come from comparisons and counts, never from the
order of atomics.

N rows of E experts form at most N // BM + E row tiles of up to BM rows. The grid has that size and unused programs exit
at once, so the host need not know the counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.layout import Layout, Tiles, row_bound, tile_bound
from fusedmoe.kernels.one_sided import Wait
from fusedmoe.kernels.triton.jit import MAX_REGISTERS, jit

# Positions ranked at a time, one per thread, each by comparison with all of the step.
STEP, WARPS = 128, 4
# Positions counted at a time in the first launch, and in a block that counts alone; more would spill.
WIDE = 1024
ALONE_WIDE = 256
# Maximum number of blocks, about two per multiprocessor of an H100 or H200. Each reads the counts of all.
BLOCKS = 256
# Counts read at a time in the second launch.
TABLE = 4096
# Up to this many positions, every block counts all of them.
ALONE = 2048
# Comparisons per program: each of its tiles with the ends of all experts.
_COMPARISONS = 4096
# Tiles that a program sorts, and tiles that it compares at a time.
_SORTED, _COMPARED = 16, 128
_DYNAMIC_ARGUMENTS = ["tokens", "positions", "length", "capacity", "bound"]


@triton.jit
def _choice(expert_ptr, order_ptr, p, inside, tokens, K, ORDERED: tl.constexpr):
    # Choice-major order.
    k = p // tokens
    token = (p - k * tokens).to(tl.int64)
    if ORDERED:
        token = tl.load(order_ptr + token, mask=inside, other=0)
    pair = token * K + k
    return token, pair, tl.load(expert_ptr + pair, mask=inside, other=-1)


@triton.jit
def _key(expert, E):
    """Return the expert index, or -1 for an empty or invalid one, to keep stores in bounds."""
    return tl.where((expert >= 0) & (expert < E), expert, -1).to(tl.int32)


@triton.jit
def _histogram(key, EP: tl.constexpr):
    return tl.histogram(tl.maximum(key, 0), EP, mask=key >= 0)


@triton.jit
def _count(
    expert_ptr, order_ptr, start, size, tokens, E, K, ORDERED: tl.constexpr, WIDE: tl.constexpr, EP: tl.constexpr
):  # fmt: skip
    """Count each expert's pairs among `size` positions from `start` on; also return whether any index is invalid."""
    i = tl.arange(0, WIDE)
    count_E = tl.zeros((EP,), dtype=tl.int32)
    wrong = tl.zeros((WIDE,), dtype=tl.int32)
    for first in range(0, size, WIDE):
        _, _, expert = _choice(expert_ptr, order_ptr, start + first + i, i < size - first, tokens, K, ORDERED)
        count_E += _histogram(_key(expert, E), EP)
        wrong |= ((expert < -1) | (expert >= E)).to(tl.int32)
    return count_E, tl.max(wrong, 0)


@jit(do_not_specialize=_DYNAMIC_ARGUMENTS)
def count_kernel(
    expert_ptr, order_ptr, count_ptr, tokens, positions, length, E, K,
    ORDERED: tl.constexpr, WIDE: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Write count[b, e] of each block, then one flag per block: whether it has an invalid index."""
    block = tl.program_id(0)
    size = tl.minimum(length, positions - block * length)
    count_E, wrong = _count(expert_ptr, order_ptr, block * length, size, tokens, E, K, ORDERED, WIDE, EP)
    e = tl.arange(0, EP)
    tl.store(count_ptr + block * E + e, count_E, mask=e < E)
    tl.store(count_ptr + tl.num_programs(0) * E + block, wrong)


@jit(do_not_specialize=_DYNAMIC_ARGUMENTS)
def place_kernel(
    # `count_ptr`: counts of the first launch, or None.
    expert_ptr, order_ptr, count_ptr,
    counts_ptr, offsets_ptr, source_ptr, pair_ptr, row_ptr, right_ptr,
    tokens, positions, length, capacity, bound, E, K,
    ORDERED: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    start = block * length
    e = tl.arange(0, EP)
    if count_ptr is None:
        before_E, wrong = _count(expert_ptr, order_ptr, 0, start, tokens, E, K, ORDERED, WIDE, EP)
        rest_E, others = _count(expert_ptr, order_ptr, start, positions - start, tokens, E, K, ORDERED, WIDE, EP)
        total_E = before_E + rest_E
        wrong |= others
    else:
        before = tl.zeros((ROWS, EP), dtype=tl.int32)
        total = tl.zeros((ROWS, EP), dtype=tl.int32)
        some = tl.zeros((ROWS,), dtype=tl.int32)
        # Two loads are in flight; more would take registers from the sums.
        for first in tl.range(0, blocks, ROWS, loop_unroll_factor=2):
            b = first + tl.arange(0, ROWS)
            mask = (b < blocks)[:, None] & (e < E)[None, :]
            count = tl.load(count_ptr + b[:, None] * E + e[None, :], mask=mask, other=0)
            total += count
            before += tl.where((b < block)[:, None], count, 0)
            some |= tl.load(count_ptr + blocks * E + b, mask=b < blocks, other=0)
        before_E = tl.sum(before, 0)
        total_E = tl.sum(total, 0)
        wrong = tl.max(some, 0)
    kept_E = tl.minimum(total_E, capacity)
    end_E = tl.cumsum(kept_E, 0)
    kept = tl.sum(kept_E, 0)
    if block == 0:
        tl.store(counts_ptr + e, kept_E.to(tl.int64), mask=e < E)
        tl.store(offsets_ptr + e, end_E - kept_E, mask=e < E)
        tl.store(offsets_ptr + E, kept)
        tl.store(right_ptr, 1 - wrong)

    i = tl.arange(0, STEP)
    size = tl.minimum(length, positions - start)
    # Row of each expert's next pair, past the expert's end once it is full.
    next_E = end_E - kept_E + before_E
    token, pair, expert = _choice(expert_ptr, order_ptr, start + i, i < size, tokens, K, ORDERED)
    for first in range(0, size, STEP):
        inside = i < size - first
        p = start + first + i
        # Prefetched while this step's ranks are computed.
        next_step = _choice(expert_ptr, order_ptr, p + STEP, i < size - first - STEP, tokens, K, ORDERED)
        key = _key(expert, E)
        # Rank of a pair among its expert's in this step, by comparison with all pairs before it: stable, unlike
        # atomics. The sum down columns stays within a thread; along rows it would cross threads.
        equal = (key[:, None] == key[None, :]) & (i[:, None] < i[None, :])
        rank = tl.sum(equal.to(tl.int32), 0)
        clamped_key = tl.maximum(key, 0)
        # One gather for both values, because each gather synchronizes all threads.
        next_and_end = tl.gather(end_E.to(tl.int64) << 32 | next_E, clamped_key, 0)
        row = next_and_end.to(tl.int32) + rank
        found = (key >= 0) & (row < (next_and_end >> 32))
        next_E += _histogram(key, EP)

        tl.store(row_ptr + pair, tl.where(found, row, -1).to(tl.int64), mask=inside)
        tl.store(source_ptr + row, token, mask=found)
        tl.store(pair_ptr + row, pair, mask=found)
        # Kernels may dereference the indices of padding, so they are valid.
        padding = inside & (p >= kept) & (p < bound)
        tl.store(source_ptr + p, tl.zeros((STEP,), dtype=tl.int64), mask=padding)
        tl.store(pair_ptr + p, tl.zeros((STEP,), dtype=tl.int64), mask=padding)
        token, pair, expert = next_step


def sizes(experts: int) -> tuple[int, dict[str, int]]:
    padded = triton.next_power_of_2(experts)
    return padded, {"STEP": STEP, "WIDE": ALONE_WIDE, "ROWS": min(256, max(1, TABLE // padded))}


def sort_pairs(
    expert_SK: Tensor, experts: int, capacity: int | None, order_S: Tensor | None, refusal: str | None = None
) -> Layout:
    """Launch the sort, by descending priority if `order_S` is given. `refusal`: as for `build_layout`."""
    tokens, K = expert_SK.shape
    positions = tokens * K
    if positions >= 2**31:
        raise ValueError(f"{tokens} tokens with {K} experts each exceed 2**31 - 1 rows: split the batch")
    bound = row_bound(tokens, K, experts, capacity)
    if positions == 0:
        # Outputs of a PyTorch operator must not alias.
        counts_E = expert_SK.new_zeros(experts, dtype=torch.long)
        offsets_E1 = expert_SK.new_zeros(experts + 1, dtype=torch.int32)
        source_N, pair_N, row_N = (expert_SK.new_empty(0, dtype=torch.long) for _ in range(3))
        return Layout(counts_E, offsets_E1, source_N, pair_N, row_N.view(tokens, K))
    expert_SK = expert_SK.contiguous()
    layout = Layout(
        expert_SK.new_empty(experts, dtype=torch.long),
        expert_SK.new_empty(experts + 1, dtype=torch.int32),
        expert_SK.new_empty(bound, dtype=torch.long),
        expert_SK.new_empty(bound, dtype=torch.long),
        expert_SK.new_empty((tokens, K), dtype=torch.long),
    )
    length = triton.cdiv(positions, STEP * BLOCKS) * STEP
    blocks = triton.cdiv(positions, length)
    padded, steps = sizes(experts)
    numbers = (tokens, positions, length)
    constants = {"ORDERED": order_S is not None, "EP": padded}
    right, count = expert_SK.new_empty((), dtype=torch.int32), None
    if positions > ALONE:
        count = expert_SK.new_empty(blocks * (experts + 1), dtype=torch.int32)
        count_kernel[(blocks,)](expert_SK, order_S, count, *numbers, experts, K, WIDE=WIDE, **constants, num_warps=4)
    place_kernel[(blocks,)](
        expert_SK, order_S, count,
        layout.counts_E, layout.offsets_E1, layout.source_N, layout.pair_N, layout.row_SK, right,
        *numbers, positions if capacity is None else capacity, bound, experts, K,
        **constants, **steps, num_warps=WARPS,
    )  # fmt: skip
    if refusal is not None:
        torch.ops.aten._assert_async.msg(right, refusal)
    return layout


@triton.jit
def find_tiles(start_E, count_E, tile, E, BM: tl.constexpr, EP: tl.constexpr):
    """Return each row tile's expert (-1 if unused) and first row, and the number of tiles used."""
    e = tl.arange(0, EP)
    end_E = tl.cumsum((count_E + BM - 1) // BM, 0)
    # Number of experts whose tiles all precede this one, empty experts included.
    before = (e < E)[None, :] & (end_E[None, :] <= tile[:, None])
    expert = tl.sum(before.to(tl.int32), 1)
    first = tl.max(tl.where(before, end_E[None, :], 0), 1)
    start = tl.sum(tl.where(e[None, :] == expert[:, None], start_E[None, :], 0), 1) + (tile - first) * BM
    used = expert < E
    return tl.where(used, expert, -1), tl.where(used, start, 0), tl.max(end_E, 0)


@jit(do_not_specialize=["n_tiles"])
def tiles_kernel(offsets_ptr, tiles_ptr, used_ptr, n_tiles, E, BM: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr):
    e = tl.arange(0, EP)
    start_E = tl.load(offsets_ptr + e, mask=e < E, other=0)
    count_E = tl.load(offsets_ptr + e + 1, mask=e < E, other=0) - start_E
    tile = tl.program_id(0) * BT + tl.arange(0, BT)
    expert, start, used = find_tiles(start_E, count_E, tile, E, BM, EP)
    tl.store(tiles_ptr + 2 * tile, expert, mask=tile < n_tiles)
    tl.store(tiles_ptr + 2 * tile + 1, start, mask=tile < n_tiles)
    if tl.program_id(0) == 0:
        tl.store(used_ptr, used)


def make_tiles(offsets_E1: Tensor, rows: int, block_rows: int) -> Tiles:
    """Cut up to `rows` rows sorted by expert into tiles of `block_rows` rows."""
    experts = offsets_E1.numel() - 1
    n_tiles = tile_bound(rows, experts, block_rows)
    # After the count, the table is 16-byte aligned as the kernels assume.
    numbers = offsets_E1.new_empty(4 + 2 * n_tiles)
    tiles = Tiles(numbers[4:].view(n_tiles, 2), numbers[:1])
    padded, block = block_sizes(experts)
    tiles_kernel[(triton.cdiv(n_tiles, block),)](
        offsets_E1, *tiles, n_tiles, experts, BM=block_rows, BT=block, EP=padded, num_warps=4, maxnreg=MAX_REGISTERS
    )
    return tiles


@triton.jit
def _last_signal(tiles_ptr, ends_ptr, source_ptr, tile, n_tiles, SIGNALS, BM: tl.constexpr, ROWS: tl.constexpr):
    """Return the position, among its source's signals, of the signal of each tile's last row."""
    inside = tile < n_tiles
    expert = tl.load(tiles_ptr + 2 * tile, mask=inside, other=-1)
    used = expert >= 0
    start = tl.load(tiles_ptr + 2 * tile + 1, mask=used, other=0)
    last = tl.minimum(start + BM, tl.load(ends_ptr + expert, mask=used, other=1)) - 1
    signal = (tl.load(source_ptr + last, mask=used, other=0) // ROWS % SIGNALS).to(tl.int32)
    return tl.where(used, signal, SIGNALS)


@jit(do_not_specialize=["n_tiles"])
def sort_tiles_kernel(
    tiles_ptr, ends_ptr, source_ptr, sorted_ptr, n_tiles, SIGNALS,
    BM: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) * BT + tl.arange(0, BT)
    own = _last_signal(tiles_ptr, ends_ptr, source_ptr, tile, n_tiles, SIGNALS, BM, ROWS)
    place = tile * 0
    for first in range(0, n_tiles, BLOCK):
        others = first + tl.arange(0, BLOCK)
        signal = _last_signal(tiles_ptr, ends_ptr, source_ptr, others, n_tiles, SIGNALS, BM, ROWS)
        precedes = (signal[None, :] < own[:, None]) | (
            (signal[None, :] == own[:, None]) & (others[None, :] < tile[:, None])
        )
        place += tl.sum((precedes & (others < n_tiles)[None, :]).to(tl.int32), 1)
    inside = tile < n_tiles
    tl.store(sorted_ptr + 2 * place, tl.load(tiles_ptr + 2 * tile, mask=inside), mask=inside)
    tl.store(sorted_ptr + 2 * place + 1, tl.load(tiles_ptr + 2 * tile + 1, mask=inside), mask=inside)


def sort_tiles(tiles: Tiles, ends_E: Tensor, source_N: Tensor, block_rows: int, wait: Wait) -> Tiles:
    """Sort row tiles by the last signal they wait for (`define_arrival_order`)."""
    table, n_tiles = torch.empty_like(tiles.table), len(tiles.table)
    sort_tiles_kernel[(triton.cdiv(n_tiles, _SORTED),)](
        tiles.table, ends_E, source_N, table, n_tiles, wait.signals.shape[-1],
        BM=block_rows, ROWS=wait.tile, BT=_SORTED, BLOCK=_COMPARED, num_warps=4,
    )  # fmt: skip
    return Tiles(table, tiles.used)


def block_sizes(experts: int) -> tuple[int, int]:
    padded = triton.next_power_of_2(experts)
    return padded, min(128, max(1, _COMPARISONS // padded))
