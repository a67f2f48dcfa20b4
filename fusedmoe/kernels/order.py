"""Order: routed rows sorted by expert, capacity with drops, and the sums that bring rows back to their tokens.

Worked example, two experts, K = 2, capacity 2: with expert_SK = [[0, 1], [0, 1], [0, -1]] the rows sorted by expert
are expert 0: tokens 0, 1 (token 2 is dropped: the expert is full), expert 1: tokens 0, 1. So counts_E = [2, 2],
source_N = [0, 1, 0, 1], slot_N = [0, 2, 1, 3] and row_SK = [[0, 2], [1, 3], [-1, -1]].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """Where every routed row lies once the rows are sorted by expert.

    Attributes:
        counts_E: rows kept for each expert, int64.
        source_N: the token (row of x_SM) that each sorted row copies, int64; None when row n is simply x[n].
        slot_N: flat index s·K + k of the routing slot that each sorted row serves, int64.
        row_SK: the sorted row of every slot, -1 for a slot that is empty or was dropped, int64.
    """

    counts_E: Tensor
    source_N: Tensor | None
    slot_N: Tensor
    row_SK: Tensor

    @cached_property
    def counts(self) -> list[int]:
        """`counts_E` on the host (on CUDA this waits for the device once)."""
        return [int(count) for count in self.counts_E.tolist()]

    @property
    def tokens(self) -> int:
        return self.row_SK.shape[0]

    @property
    def rows(self) -> int:
        return self.slot_N.shape[0]

    @cached_property
    def bags(self) -> tuple[Tensor, Tensor]:
        """The kept rows in token order, [N], and where each token's rows start, [S]."""
        flat = self.row_SK.reshape(-1)
        slots = self.row_SK.shape[1]
        if self.rows == flat.numel():
            return flat, torch.arange(0, flat.numel(), max(slots, 1), device=flat.device)[: self.tokens]
        kept = self.row_SK >= 0
        per_token = kept.sum(1)
        return flat[kept.reshape(-1)], per_token.cumsum(0) - per_token


def build_layout(
    expert_SK: Tensor, experts: int, capacity: int | None = None, priority_S: Tensor | None = None
) -> Layout:
    """Sorts the routing slots by expert and drops what exceeds the capacity.

    Within an expert, slot k of all tokens comes before slot k + 1 (GShard: a second choice never displaces a first
    one), tokens in order, or by descending `priority_S` (V-MoE's batch-prioritised routing, ties in token order).
    Deterministic; nothing but stable sorts.

    Args:
        expert_SK: chosen experts, int; -1 marks an empty slot.
        capacity: rows that an expert takes from these tokens; None takes all.
        priority_S: higher goes first.
    """
    tokens, slots = expert_SK.shape
    device = expert_SK.device
    order_S = None if priority_S is None else priority_S.argsort(descending=True, stable=True)
    expert_KS = (expert_SK if order_S is None else expert_SK[order_S]).t().reshape(-1)
    # Empty slots sort behind the last expert and are cut off there.
    key = torch.where(expert_KS < 0, experts, expert_KS)
    # A stable sort of 16-bit keys runs several times faster than one of 64-bit keys.
    sorted_key, place = key.to(torch.int16 if experts < 2**15 else torch.int32).sort(stable=True)
    counts_E = torch.bincount(key, minlength=experts + 1)[:experts]
    kept_N = place[: int(counts_E.sum())]
    if capacity is not None:
        start_E = counts_E.cumsum(0) - counts_E
        rank_N = torch.arange(kept_N.numel(), device=device) - start_E[sorted_key[: kept_N.numel()].long()]
        kept_N = kept_N[rank_N < capacity]
        counts_E = counts_E.clamp(max=capacity)
    token_N = kept_N % max(tokens, 1)
    source_N = token_N if order_S is None else order_S[token_N]
    slot_N = source_N * slots + kept_N // max(tokens, 1)
    row_SK = expert_SK.new_full((tokens * slots,), -1, dtype=torch.long)
    row_SK[slot_N] = torch.arange(slot_N.numel(), device=device)
    return Layout(counts_E, source_N, slot_N, row_SK.view(tokens, slots))


def contiguous_layout(counts_E: Tensor, rows: int) -> Layout:
    """The layout of rows that lie sorted by expert already: row n is token n."""
    index = torch.arange(rows, device=counts_E.device)
    return Layout(counts_E, None, index, index.view(-1, 1))


def permute(x_SM: Tensor, layout: Layout) -> Tensor:
    """rows_NM[n] = x_SM[source_N[n]]."""
    return x_SM if layout.source_N is None else x_SM.index_select(0, layout.source_N)


def gather_sum(rows_NM: Tensor, layout: Layout, weight_N: Tensor | None = None) -> Tensor:
    """y_SM[s] = Σ over the kept slots k of token s, in slot order, of weight · rows_NM[row_SK[s, k]].

    A token without a kept slot gets exact zeros. Float64 and integers included; any strides.
    """
    if layout.source_N is None:
        return rows_NM if weight_N is None else rows_NM * weight_N.to(rows_NM.dtype)[:, None]
    if layout.rows == 0 or rows_NM.shape[1] == 0:
        return rows_NM.new_zeros((layout.tokens, rows_NM.shape[1]))
    row_N, start_S = layout.bags
    if layout.row_SK.shape[1] == 1 and layout.rows == layout.tokens:
        rows = rows_NM.index_select(0, row_N)
        return rows if weight_N is None else rows.mul_(weight_N[row_N].to(rows.dtype)[:, None])
    if rows_NM.dtype in (torch.float32, torch.float64):
        weights = None if weight_N is None else weight_N[row_N].to(rows_NM.dtype)
        return torch.embedding_bag(rows_NM.contiguous(), row_N, start_S, False, 0, False, weights)[0]
    # Half precision is summed in float32, slot by slot.
    y_SM = rows_NM.new_zeros((layout.tokens, rows_NM.shape[1]), dtype=torch.float32)
    for k in range(layout.row_SK.shape[1]):
        row_S = layout.row_SK[:, k]
        kept = (row_S >= 0).nonzero().squeeze(1)
        rows = rows_NM[row_S[kept]].float()
        y_SM[kept] += rows if weight_N is None else rows * weight_N[row_S[kept], None].float()
    return y_SM.to(rows_NM.dtype)


def define_layout(
    expert_SK: Tensor, experts: int, capacity: int | None = None, priority_S: Tensor | None = None
) -> Layout:
    """What `build_layout` must return, as plain loops."""
    tokens, slots = expert_SK.shape
    order = list(range(tokens))
    if priority_S is not None:
        order.sort(key=lambda s: -float(priority_S[s]))
    taken: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for k in range(slots):
        for s in order:
            e = int(expert_SK[s, k])
            if e >= 0 and (capacity is None or len(taken[e]) < capacity):
                taken[e].append((s, k))
    flat = [slot for slots_of_expert in taken for slot in slots_of_expert]
    row_SK = torch.full((tokens, slots), -1, dtype=torch.long)
    for row, (s, k) in enumerate(flat):
        row_SK[s, k] = row
    return Layout(
        torch.tensor([len(t) for t in taken]),
        torch.tensor([s for s, _ in flat], dtype=torch.long),
        torch.tensor([s * slots + k for s, k in flat], dtype=torch.long),
        row_SK,
    )


def define_gather_sum(rows_NM: Tensor, layout: Layout, weight_N: Tensor | None = None) -> Tensor:
    """What `gather_sum` must return, as plain loops in the rows' dtype."""
    y_SM = rows_NM.new_zeros((layout.tokens, rows_NM.shape[1]))
    for s, slots in enumerate(layout.row_SK.tolist()):
        for row in slots:
            if row >= 0:
                y_SM[s] += rows_NM[row] if weight_N is None else rows_NM[row] * weight_N[row]
    return y_SM
