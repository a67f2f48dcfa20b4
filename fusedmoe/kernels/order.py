"""Order: the routing slots sorted by expert, capacity with drops.

On CUDA a counting sort in three launches (fusedmoe/kernels/rows/sort.py), on a CPU stable sorts. Neither leaves any
order to chance, and the former never waits for the device. Definition: `define_layout`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.kernels.backend import uses_triton
from fusedmoe.kernels.cost import Cost
from fusedmoe.kernels.layout import Layout, offsets


def build_layout(
    expert_SK: Tensor, experts: int, capacity: int | None = None, priority_S: Tensor | None = None
) -> Layout:
    """Sorts the routing slots by expert and drops what exceeds the capacity.

    Within an expert, slot k of all tokens comes before slot k + 1 (GShard: a second choice never displaces a first
    one), tokens in order, or by descending `priority_S` (V-MoE's batch-prioritised routing, ties in token order).

    Args:
        expert_SK: chosen experts, int; -1 marks an empty slot.
        capacity: rows that an expert takes from these tokens; None takes all.
        priority_S: higher goes first.
    """
    order_S = None if priority_S is None else priority_S.argsort(descending=True, stable=True)
    if uses_triton(expert_SK):
        from fusedmoe.kernels.rows.sort import sort_slots

        return sort_slots(expert_SK, experts, capacity, order_S)
    tokens, slots = expert_SK.shape
    expert_KS = (expert_SK if order_S is None else expert_SK[order_S]).t().reshape(-1)
    # Empty slots sort behind the last expert and are cut off there.
    key = torch.where(expert_KS < 0, experts, expert_KS)
    # A stable sort of 16-bit keys runs several times faster than one of 64-bit keys.
    sorted_key, place = key.to(torch.int16 if experts < 2**15 else torch.int32).sort(stable=True)
    counts_E = torch.bincount(key, minlength=experts + 1)[:experts]
    kept_N = place[: int(counts_E.sum())]
    if capacity is not None:
        start_E = counts_E.cumsum(0) - counts_E
        rank_N = torch.arange(kept_N.numel(), device=kept_N.device) - start_E[sorted_key[: kept_N.numel()].long()]
        kept_N = kept_N[rank_N < capacity]
        counts_E = counts_E.clamp(max=capacity)
    token_N = kept_N % max(tokens, 1)
    source_N = token_N if order_S is None else order_S[token_N]
    slot_N = source_N * slots + kept_N // max(tokens, 1)
    row_SK = expert_SK.new_full((tokens * slots,), -1, dtype=torch.long)
    row_SK[slot_N] = torch.arange(slot_N.numel(), device=kept_N.device)
    return Layout(counts_E, offsets(counts_E), source_N, slot_N, row_SK.view(tokens, slots))


def cost(tokens: int, slots: int, experts: int, rows: int) -> Cost:
    """Experts chosen are read, every array of the layout is written."""
    return Cost(0, 8 * (2 * tokens * slots + 2 * rows + experts) + 4 * (experts + 1))


def define_layout(
    expert_SK: Tensor, experts: int, capacity: int | None = None, priority_S: Tensor | None = None
) -> Layout:
    """What `build_layout` must return, slack aside, as plain loops."""
    tokens, slots = expert_SK.shape
    order = list(range(tokens))
    if priority_S is not None:
        priority = priority_S.tolist()
        order.sort(key=lambda s: -priority[s])
    taken: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    chosen = expert_SK.tolist()
    for k in range(slots):
        for s in order:
            e = chosen[s][k]
            if e >= 0 and (capacity is None or len(taken[e]) < capacity):
                taken[e].append((s, k))
    flat = [slot for slots_of_expert in taken for slot in slots_of_expert]
    row_SK = torch.full((tokens, slots), -1, dtype=torch.long)
    for row, (s, k) in enumerate(flat):
        row_SK[s, k] = row
    counts = [len(t) for t in taken]
    return Layout(
        torch.tensor(counts),
        torch.tensor([sum(counts[:e]) for e in range(experts + 1)], dtype=torch.int32),
        torch.tensor([s for s, _ in flat], dtype=torch.long),
        torch.tensor([s * slots + k for s, k in flat], dtype=torch.long),
        row_SK,
    )
