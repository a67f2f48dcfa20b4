"""Layout: the position of every routed row after sorting by expert, and row tiles of the sorted rows.

Example, two experts, K = 2, capacity 2: expert_SK = [[0, 1], [0, 1], [0, -1]]. Sorted rows of expert 0: tokens 0, 1
(token 2 is dropped: the expert is full); of expert 1: tokens 0, 1. So counts_E = [2, 2], offsets_E1 = [0, 2, 4],
source_N = [0, 1, 0, 1], pair_N = [0, 2, 1, 3] and row_SK = [[0, 2], [1, 3], [-1, -1]].

CUDA uses a counting sort without device synchronization, the CPU stable sorts. Both are deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import uses_triton

#: A layout as one operator argument; `source_N` may be None.
LayoutTensors = list[Tensor | None]


@dataclass(frozen=True, eq=False)
class Layout:
    """Rows sorted by expert, with their tokens and (token, k) pairs.

    On CPU in eager mode N is the number of rows kept. On CUDA, and in any `torch.compile` graph, N is an upper bound,
    and rows from offsets_E1[E] on are padding, with valid indices (token 0, pair 0) that kernels may dereference.
    Operations return zeros for padding rows, gradients included, and never read padding inputs. On CUDA, `counts`,
    `kept`, `exact` and `bags` synchronize with the device once.

    Attributes:
        counts_E: number of rows kept per expert, int64.
        offsets_E1: first row of each expert, then the number of rows kept, int32.
        source_N: token (row of x_SM) of each sorted row, int64; None if row n is x[n].
        pair_N: flat index s·K + k of each sorted row's (token, k) pair, int64.
        row_SK: sorted row of each pair, -1 for an empty or dropped pair, int64.
        verified: the tensors are consistent, as from `order`. Operations check other layouts.
    """

    counts_E: Tensor
    offsets_E1: Tensor
    source_N: Tensor | None
    pair_N: Tensor
    row_SK: Tensor
    verified: bool = False

    @cached_property
    def counts(self) -> list[int]:
        counts: list[int] = self.counts_E.tolist()
        return counts

    @property
    def experts(self) -> int:
        return self.counts_E.shape[0]

    @property
    def tokens(self) -> int:
        return self.row_SK.shape[0]

    @property
    def k(self) -> int:
        """Maximum number of experts per token."""
        return self.row_SK.shape[1]

    @property
    def rows(self) -> int:
        """Number of rows kept, or an upper bound."""
        return self.pair_N.shape[0]

    @property
    def kept(self) -> int:
        """Number of rows without padding."""
        return sum(self.counts)

    def exact(self) -> Layout:
        if torch.compiler.is_exporting():
            raise ConfigError(
                "torch.export: Custom experts and the order Einsum read the rows per expert on the host, which an "
                "exported graph does not know. Export FeedForward or SwiGLU experts with an order Sparse or Dropless"
            )
        return self.cut(self.kept)

    def cut(self, kept: int) -> Layout:
        if kept == len(self.pair_N):
            return self
        source_N = None if self.source_N is None else self.source_N[:kept]
        return replace(self, source_N=source_N, pair_N=self.pair_N[:kept])

    @property
    def tensors(self) -> LayoutTensors:
        """The five tensors in the order of operator arguments; `Layout.of` is the inverse."""
        return [self.counts_E, self.offsets_E1, self.source_N, self.pair_N, self.row_SK]

    @classmethod
    def of(cls, tensors: LayoutTensors) -> Layout:
        counts_E, offsets_E1, source_N, pair_N, row_SK = tensors
        assert counts_E is not None and offsets_E1 is not None and pair_N is not None and row_SK is not None
        return cls(counts_E, offsets_E1, source_N, pair_N, row_SK, verified=True)

    def zero_padding(self, value_N: Tensor) -> Tensor:
        """Zero the padding rows of a contiguous [N, ...] tensor in place, without device synchronization."""
        if not uses_triton(value_N):
            if self.kept < value_N.shape[0]:  # an eager layout on CPU has no padding
                value_N[self.kept :] = 0
            return value_N
        if value_N.element_size() <= 8:
            from fusedmoe.kernels.triton.gather_sum import zero_rows

            return zero_rows(value_N, self.offsets_E1)
        row_N = torch.arange(self.rows, device=value_N.device)
        padding_N = (row_N >= self.offsets_E1[-1]).view(-1, *[1] * (value_N.dim() - 1))
        return value_N.masked_fill_(padding_N, 0)

    def padded(self, rows: int) -> Layout:
        more = (0, rows - self.rows)
        source_N = None if self.source_N is None else torch.nn.functional.pad(self.source_N, more)
        return replace(self, source_N=source_N, pair_N=torch.nn.functional.pad(self.pair_N, more))

    @cached_property
    def bags(self) -> tuple[Tensor, Tensor]:
        """Kept rows in token order, [N], and each token's start in them, [S]: the input of `embedding_bag`."""
        flat = self.row_SK.reshape(-1)
        if self.kept == flat.numel():
            return flat, torch.arange(0, self.tokens * self.k, max(self.k, 1), device=flat.device)
        kept = self.row_SK >= 0
        per_token = kept.sum(1)
        return flat[kept.reshape(-1)], per_token.cumsum(0) - per_token


def row_bound(tokens: int, k: int, experts: int, capacity: int | None) -> int:
    """Return the maximum number of rows that routing can produce."""
    positions = tokens * k
    return positions if capacity is None else torch.sym_min(positions, experts * capacity)


def offsets(counts_E: Tensor) -> Tensor:
    """Return exclusive prefix sums and the total, [E + 1] int32."""
    return torch.nn.functional.pad(counts_E.cumsum(0, dtype=torch.int32), (1, 0))


def contiguous_layout(counts_E: Tensor, rows: int) -> Layout:
    """Return the layout of rows that are already sorted by expert: row n is token n."""
    index = torch.arange(rows, device=counts_E.device)
    return Layout(counts_E, offsets(counts_E), None, index, index.view(-1, 1), verified=True)


def build_layout(
    expert_SK: Tensor,
    experts: int,
    capacity: int | None = None,
    priority_S: Tensor | None = None,
    refusal: str | None = None,
) -> Layout:
    """Sort (token, k) pairs by expert and drop pairs beyond the capacity (`fusedmoe.autograd.order`).

    `refusal`: on CUDA, message of a device assertion that every index is -1 or an expert's; without it an invalid index
    is an empty pair. On CPU the caller validates.
    """
    order_S = None if priority_S is None else priority_S.argsort(descending=True, stable=True)
    if uses_triton(expert_SK):
        from fusedmoe.kernels.triton.layout import sort_pairs

        return sort_pairs(expert_SK, experts, capacity, order_S, refusal)
    tokens, K = expert_SK.shape
    expert_KS = (expert_SK if order_S is None else expert_SK[order_S]).t().reshape(-1)
    # remainder maps empty pairs (-1) to E, which sorts last.
    key = expert_KS.remainder(experts + 1)
    # Stable: keeps the pair order within an expert. 16-bit keys sort several times faster than 64-bit keys.
    sorted_key, position = key.to(torch.int16 if experts < 2**15 else torch.int32).sort(stable=True)
    counts = torch.bincount(key, minlength=experts + 1)
    kept, counts_E = key.numel() - int(counts[experts]), counts[:experts]
    kept_N = position[:kept]
    if capacity is not None:
        start_E = counts_E.cumsum(0) - counts_E
        rank_N = torch.arange(kept, device=kept_N.device) - start_E[sorted_key[:kept].long()]
        kept_N = kept_N[rank_N < capacity]
        counts_E = counts_E.clamp(max=capacity)
    # Position k·S + s is choice k of token s.
    token_N = kept_N % max(tokens, 1)
    source_N = token_N if order_S is None else order_S[token_N]
    pair_N = source_N * K + kept_N // max(tokens, 1)
    row_SK = expert_SK.new_full((tokens * K,), -1, dtype=torch.long)
    row_SK.scatter_(0, pair_N, torch.arange(pair_N.numel(), device=kept_N.device))
    return Layout(counts_E, offsets(counts_E), source_N, pair_N, row_SK.view(tokens, K))


def define_layout(
    expert_SK: Tensor, experts: int, capacity: int | None = None, priority_S: Tensor | None = None
) -> Layout:
    tokens, K = expert_SK.shape
    order = list(range(tokens))
    if priority_S is not None:
        priority = priority_S.tolist()
        order.sort(key=lambda s: -priority[s])
    pairs_of_experts: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    chosen = expert_SK.tolist()
    for k in range(K):
        for s in order:
            e = chosen[s][k]
            if e >= 0 and (capacity is None or len(pairs_of_experts[e]) < capacity):
                pairs_of_experts[e].append((s, k))
    flat = [pair for pairs in pairs_of_experts for pair in pairs]
    row_SK = torch.full((tokens, K), -1, dtype=torch.long, device="cpu")
    for row, (s, k) in enumerate(flat):
        row_SK[s, k] = row
    counts = [len(pairs) for pairs in pairs_of_experts]
    return Layout(
        torch.tensor(counts, device="cpu"),
        torch.tensor([sum(counts[:e]) for e in range(experts + 1)], dtype=torch.int32, device="cpu"),
        torch.tensor([s for s, _ in flat], dtype=torch.long, device="cpu"),
        torch.tensor([s * K + k for s, k in flat], dtype=torch.long, device="cpu"),
        row_SK,
    )


class Tiles(NamedTuple):
    """Row tiles of experts, in a table whose size is known without a device synchronization.

    `table` [tiles, 2] int32 (expert, first row), expert -1 if unused; `used` [1] int32, tiles in use.
    """

    table: Tensor
    used: Tensor


def tile_bound(rows: int, experts: int, block_rows: int) -> int:
    return rows // block_rows + experts


def define_tiles(counts: list[int], rows: int, block_rows: int) -> list[list[int]]:
    """List (expert, first row) of each tile of up to `block_rows` rows of one expert; (-1, 0) if unused.

    Example, tiles of 4 rows, counts [5, 0, 3]: the table is [[0, 0], [0, 4], [2, 5], [-1, 0], [-1, 0]].
    """
    tiles, start = [], 0
    for expert, count in enumerate(counts):
        tiles += [[expert, row] for row in range(start, start + count, block_rows)]
        start += count
    return tiles + [[-1, 0]] * (tile_bound(rows, len(counts), block_rows) - len(tiles))


def define_arrival_order(
    table: list[list[int]], ends: list[int], source: list[int], block_rows: int, rows_per_signal: int, signals: int
) -> list[list[int]]:
    """Sort row tiles by the last signal they wait for, if their rows are sorted by arrival. Unused tiles are last.

    Args:
        ends: end of each expert's rows.
        source: index of each row in the receive buffer, which has one signal per `rows_per_signal` rows.
        signals: number of signals per source rank.
    """

    def last_signal(tile: list[int]) -> int:
        expert, start = tile
        last = min(start + block_rows, ends[expert]) - 1
        return signals if expert < 0 else source[last] // rows_per_signal % signals

    return sorted(table, key=last_signal)
