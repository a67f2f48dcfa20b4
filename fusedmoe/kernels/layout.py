"""Layout: where every routed row lies once the rows are sorted by expert.

Worked example, two experts, K = 2, capacity 2: with expert_SK = [[0, 1], [0, 1], [0, -1]] the rows sorted by expert
are expert 0: tokens 0, 1 (token 2 is dropped: the expert is full), expert 1: tokens 0, 1. So counts_E = [2, 2],
offsets_E1 = [0, 2, 4], source_N = [0, 1, 0, 1], pair_N = [0, 2, 1, 3] and row_SK = [[0, 2], [1, 3], [-1, -1]].

On CUDA a counting sort in two launches makes it, on a CPU stable sorts. Neither leaves any order to chance, and the
former never waits for the device. Definition: `define_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import uses_triton

#: A layout as one argument of an operator; `source_N` may be None.
LayoutTensors = list[Tensor | None]


@dataclass(frozen=True, eq=False)
class Layout:
    """Sorted rows, their tokens and their (token, k) pairs.

    On a CPU there are as many rows as are kept. On CUDA nobody waits for the device to learn that number, nor does a
    graph of `torch.compile` anywhere: N is a bound on it (`row_bound`), and the rows from offsets_E1[E] on are padding.
    Padding has valid indices (token 0, pair 0), so that kernels may read through them. What the operations return for
    padding rows is zero, gradients included, and what they are given there is never read.

    Attributes:
        counts_E: rows kept for each expert, int64.
        offsets_E1: first row of each expert and, last, the number of rows kept, int32.
        source_N: the token (row of x_SM) that each sorted row copies, int64; None when row n is simply x[n].
        pair_N: flat index s·K + k of the (token, k) pair that each sorted row serves, int64.
        row_SK: the sorted row of every pair, -1 for one that is empty or was dropped, int64.
        verified: whether the numbers are known to fit each other, as those that `order` makes do; those of a layout
            made by hand are checked by the operations that get it.
    """

    counts_E: Tensor
    offsets_E1: Tensor
    source_N: Tensor | None
    pair_N: Tensor
    row_SK: Tensor
    verified: bool = False

    @cached_property
    def counts(self) -> list[int]:
        """`counts_E` on the host (on CUDA this waits for the device once)."""
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
        """K, the experts that a token may have."""
        return self.row_SK.shape[1]

    @property
    def rows(self) -> int:
        """N: the rows kept, or a bound on their number."""
        return self.pair_N.shape[0]

    @property
    def kept(self) -> int:
        """The number of rows that are no padding (on CUDA this waits for the device once)."""
        return sum(self.counts)

    def exact(self) -> Layout:
        """This layout without padding (on CUDA this waits for the device once)."""
        if torch.compiler.is_exporting():
            raise ConfigError(
                "torch.export: experts of your own (Custom) and the order Einsum read how many rows each expert has, "
                "which an exported graph does not know. Export experts FeedForward or SwiGLU with an order Sparse or "
                "Dropless"
            )
        return self.cut(self.kept)

    def cut(self, kept: int) -> Layout:
        """This layout without padding, where the number of rows kept is known on the host."""
        if kept == len(self.pair_N):
            return self
        source_N = None if self.source_N is None else self.source_N[:kept]
        return replace(self, source_N=source_N, pair_N=self.pair_N[:kept])

    @property
    def tensors(self) -> LayoutTensors:
        """The five tensors, in order, as operators take them; `Layout.of` is the inverse."""
        return [self.counts_E, self.offsets_E1, self.source_N, self.pair_N, self.row_SK]

    @classmethod
    def of(cls, tensors: LayoutTensors) -> Layout:
        """Makes a layout of its five tensors, whose numbers are known to fit each other."""
        counts_E, offsets_E1, source_N, pair_N, row_SK = tensors
        assert counts_E is not None and offsets_E1 is not None and pair_N is not None and row_SK is not None
        return cls(counts_E, offsets_E1, source_N, pair_N, row_SK, verified=True)

    def zero_padding(self, value_N: Tensor) -> Tensor:
        """[N, ...], contiguous, with zeros in the padding rows, in place; no host synchronisation."""
        if not uses_triton(value_N):
            if self.kept < value_N.shape[0]:  # an eager layout on a CPU has no padding
                value_N[self.kept :] = 0
            return value_N
        if value_N.element_size() <= 8:
            from fusedmoe.kernels.triton.gather_sum import zero_rows

            return zero_rows(value_N, self.offsets_E1)
        row_N = torch.arange(self.rows, device=value_N.device)
        padding_N = (row_N >= self.offsets_E1[-1]).view(-1, *[1] * (value_N.dim() - 1))
        return value_N.masked_fill_(padding_N, 0)

    def padded(self, rows: int) -> Layout:
        """This layout with padding up to `rows` rows."""
        more = (0, rows - self.rows)
        source_N = None if self.source_N is None else torch.nn.functional.pad(self.source_N, more)
        return replace(self, source_N=source_N, pair_N=torch.nn.functional.pad(self.pair_N, more))

    @cached_property
    def bags(self) -> tuple[Tensor, Tensor]:
        """The kept rows in token order, [N], and where each token's rows start, [S] (on CUDA this waits)."""
        flat = self.row_SK.reshape(-1)
        if self.kept == flat.numel():
            return flat, torch.arange(0, self.tokens * self.k, max(self.k, 1), device=flat.device)
        kept = self.row_SK >= 0
        per_token = kept.sum(1)
        return flat[kept.reshape(-1)], per_token.cumsum(0) - per_token


def row_bound(tokens: int, k: int, experts: int, capacity: int | None) -> int:
    """The rows that routing can make at most."""
    positions = tokens * k
    # In a graph both may be known only when it runs.
    return positions if capacity is None else torch.sym_min(positions, experts * capacity)


def offsets(counts_E: Tensor) -> Tensor:
    """[E + 1], int32: the sums of the counts before each expert, and of all."""
    return torch.nn.functional.pad(counts_E.cumsum(0, dtype=torch.int32), (1, 0))


def contiguous_layout(counts_E: Tensor, rows: int) -> Layout:
    """The layout of rows that lie sorted by expert already: row n is token n."""
    index = torch.arange(rows, device=counts_E.device)
    return Layout(counts_E, offsets(counts_E), None, index, index.view(-1, 1), verified=True)


def build_layout(
    expert_SK: Tensor,
    experts: int,
    capacity: int | None = None,
    priority_S: Tensor | None = None,
    refusal: str | None = None,
) -> Layout:
    """Sorts the (token, k) pairs by expert and drops what exceeds the capacity.

    Within an expert, choice k of all tokens comes before choice k + 1 (GShard: a second choice never displaces a first
    one), tokens in order, or by descending `priority_S` (V-MoE's batch-prioritised routing, ties in token order).

    Args:
        expert_SK: chosen experts, int; -1 marks an empty pair.
        capacity: rows that an expert takes from these tokens; None takes all.
        priority_S: higher goes first.
        refusal: on CUDA, the words of an assertion on the device that fails where a number is neither an expert's nor
            -1; without it such a number is an empty pair. On a CPU the caller has looked.
    """
    order_S = None if priority_S is None else priority_S.argsort(descending=True, stable=True)
    if uses_triton(expert_SK):
        from fusedmoe.kernels.triton.layout import sort_pairs

        return sort_pairs(expert_SK, experts, capacity, order_S, refusal)
    tokens, K = expert_SK.shape
    # Choice by choice, so that no second choice displaces a first one.
    expert_KS = (expert_SK if order_S is None else expert_SK[order_S]).t().reshape(-1)
    # Empty pairs, -1, are numbered E: they sort behind the last expert and are cut off there.
    key = expert_KS.remainder(experts + 1)
    # A stable sort leaves the pairs of an expert in their order; with 16-bit keys it is several times as fast as with
    # 64-bit ones.
    sorted_key, place = key.to(torch.int16 if experts < 2**15 else torch.int32).sort(stable=True)
    counts = torch.bincount(key, minlength=experts + 1)
    kept, counts_E = key.numel() - int(counts[experts]), counts[:experts]
    kept_N = place[:kept]
    if capacity is not None:
        start_E = counts_E.cumsum(0) - counts_E
        rank_N = torch.arange(kept, device=kept_N.device) - start_E[sorted_key[:kept].long()]
        kept_N = kept_N[rank_N < capacity]
        counts_E = counts_E.clamp(max=capacity)
    # Position k·S + s is choice k of token s; the maximum keeps the division defined for no tokens.
    token_N = kept_N % max(tokens, 1)
    source_N = token_N if order_S is None else order_S[token_N]
    pair_N = source_N * K + kept_N // max(tokens, 1)
    row_SK = expert_SK.new_full((tokens * K,), -1, dtype=torch.long)
    row_SK.scatter_(0, pair_N, torch.arange(pair_N.numel(), device=kept_N.device))
    return Layout(counts_E, offsets(counts_E), source_N, pair_N, row_SK.view(tokens, K))


def define_layout(
    expert_SK: Tensor, experts: int, capacity: int | None = None, priority_S: Tensor | None = None
) -> Layout:
    """Defines what `build_layout` must return, padding aside, as plain loops."""
    tokens, K = expert_SK.shape
    order = list(range(tokens))
    if priority_S is not None:
        priority = priority_S.tolist()
        order.sort(key=lambda s: -priority[s])
    taken: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    chosen = expert_SK.tolist()
    for k in range(K):
        for s in order:
            e = chosen[s][k]
            if e >= 0 and (capacity is None or len(taken[e]) < capacity):
                taken[e].append((s, k))
    flat = [pair for pairs_of_expert in taken for pair in pairs_of_expert]
    row_SK = torch.full((tokens, K), -1, dtype=torch.long, device="cpu")
    for row, (s, k) in enumerate(flat):
        row_SK[s, k] = row
    counts = [len(t) for t in taken]
    return Layout(
        torch.tensor(counts, device="cpu"),
        torch.tensor([sum(counts[:e]) for e in range(experts + 1)], dtype=torch.int32, device="cpu"),
        torch.tensor([s for s, _ in flat], dtype=torch.long, device="cpu"),
        torch.tensor([s * K + k for s, k in flat], dtype=torch.long, device="cpu"),
        row_SK,
    )
