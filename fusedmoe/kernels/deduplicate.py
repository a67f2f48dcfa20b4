"""Deduplicated dispatch: send each token once per destination rank, with its packed expert assignments.

For each (token, k) pair on a destination rank an int *code* is sent: 2·(local expert), plus 1 for the token's first
pair there. Codes follow token order, so no index is sent.

Example, two ranks with two experts each, K = 3. Token a is routed to experts 0, 3, 1 and b to 2, 3, 2:

    rank 0    receives a       codes of a: experts 0, 1 → 1, 2
    rank 1    receives a b     codes of a: expert 3 (local 1) → 3; of b: experts 2, 3, 2 (local 0, 1, 0) → 1, 2, 0

Rank 1 sorts its local rows by expert, b b | a b, and returns one partial sum for a and one for b, which the sender sums
in rank order.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.kernels.layout import Layout, offsets


class SentTokens(NamedTuple):
    """Tokens and packed expert assignments that this rank sends.

    Attributes:
        tokens: layout of tokens by destination rank, in index order within a rank, maybe padded. `row_SK` has the sent
            row at a token's first pair for each rank, else -1; a token's pairs are sorted by rank.
        row_N: row of each sent (token, expert) pair in the layout sorted by expert; pairs are ordered by (rank, token,
            k). None: one row per pair is sent, sorted by expert.
        code_N: packed expert assignment of each sent pair, int16 (int32 from 2¹⁴ experts); None if `row_N` is None.
        k: maximum number of pairs of one token on one rank.
    """

    tokens: Layout
    row_N: Tensor | None = None
    code_N: Tensor | None = None
    k: int = 1

    def exact(self, tokens: int, pairs: int) -> SentTokens:
        if self.row_N is None or self.code_N is None:
            return self._replace(tokens=self.tokens.cut(pairs))
        return SentTokens(self.tokens.cut(tokens), self.row_N[:pairs], self.code_N[:pairs], self.k)


def deduplicate_tokens(layout: Layout, peers: int) -> SentTokens:
    """Select the tokens for each of `peers` ranks, which host equal, consecutive shares of the experts.

    Never synchronizes with the device; a padded layout yields a padded result.
    """
    if layout.source_N is None:  # rows are distinct tokens: nothing to deduplicate
        return SentTokens(layout)
    (S, K), rows, experts = layout.row_SK.shape, len(layout.pair_N), len(layout.counts_E)
    small = torch.int16 if experts < 2**14 else torch.int32  # 16-bit keys sort several times faster
    experts_per_rank = experts // peers
    row_N = torch.arange(rows, dtype=torch.int32, device=layout.row_SK.device)
    expert_N = torch.searchsorted(layout.offsets_E1[1:], row_N, right=True).to(small)
    # Pairs without a row (-1, the last entry) get rank `peers`, which sorts last.
    rank_N1 = torch.nn.functional.pad(expert_N.div(experts_per_rank, rounding_mode="floor"), (0, 1), value=peers)
    rank_SK = rank_N1[layout.row_SK]
    key_SK, by_rank_SK = rank_SK.sort(dim=1, stable=True)
    # Within a token, pairs are now sorted by rank, then k; the stable sort preserves this order.
    key_N, at_N = (sorted_P[:rows] for sorted_P in key_SK.reshape(-1).sort(stable=True))
    row_N = layout.row_SK.gather(1, by_rank_SK).reshape(-1)[at_N].clamp_(min=0)
    token_N, rank_N = at_N.div(max(K, 1), rounding_mode="floor"), key_N.long()
    first_N = key_N < peers
    first_N[1:] &= (token_N[1:] != token_N[:-1]) | (key_N[1:] != key_N[:-1])
    tokens_W = key_N.new_zeros(peers + 1, dtype=torch.long).index_add_(0, rank_N, first_N.long())[:peers]
    # The t-th first pair is the t-th sent token; other pairs write past the end.
    sent_N, bound = first_N.cumsum(0) - 1, min(rows, S * peers)
    to_N = torch.where(first_N, sent_N, bound)
    source_T = token_N.new_zeros(bound + 1).index_copy_(0, to_N, token_N)[:bound]
    pair_T = token_N.new_zeros(bound + 1).index_copy_(0, to_N, at_N)[:bound]
    sent_SK = token_N.new_full((S * K + 1,), -1).index_copy_(0, torch.where(first_N, at_N, S * K), sent_N)[:-1]
    tokens = Layout(tokens_W, offsets(tokens_W), source_T, pair_T, sent_SK.view(S, K), verified=True)
    return SentTokens(tokens, row_N, (expert_N % experts_per_rank)[row_N] * 2 + first_N, K)


class ReceivedPairs(NamedTuple):
    """P pairs of received tokens, ordered by token, then k: the local expert and the token index of each."""

    expert_P: Tensor
    token_P: Tensor

    def sort(self, tokens: int, experts: int, k: int) -> tuple[Layout, Tensor]:
        """Sort the pairs by local expert, without device synchronization. `k`: maximum number of pairs per token.

        Returns the layout, and the pair of each of its rows, [N].
        """
        key_P = self.expert_P.to(torch.int16 if experts < 2**15 else torch.int32)
        order_N = key_P.sort(stable=True).indices
        number_P = torch.arange(len(order_N), device=order_N.device)
        counts_E = self.expert_P.new_zeros(experts).index_add_(0, self.expert_P, torch.ones_like(self.expert_P))
        first_P = torch.ones_like(number_P, dtype=torch.bool)
        first_P[1:] = self.token_P[1:] != self.token_P[:-1]
        # k is the distance from the token's first pair.
        pair_P = self.token_P * k + number_P - torch.where(first_P, number_P, 0).cummax(0).values
        pair_N = pair_P[order_N]
        row_RK = number_P.new_full((tokens * k,), -1).index_copy_(0, pair_N, number_P).view(tokens, k)
        return Layout(counts_E, offsets(counts_E), self.token_P[order_N], pair_N, row_RK, verified=True), order_N

    def in_chunks(self, order_R: Tensor, rows: list[int]) -> tuple[Tensor, list[ReceivedPairs]]:
        """Split the pairs into chunks of tokens: permuted by `order_R`, `rows[i]` tokens in chunk i.

        Returns the permutation of the pairs, stable within a token, and each chunk's pairs. Synchronizes with the
        device.
        """
        place_P = inverse(order_R)[self.token_P]
        # Stable, so sums have the same order for any number of chunks.
        place_P, pair_P = place_P.sort(stable=True)
        first = list(accumulate(rows, initial=0))
        ends = torch.searchsorted(place_P, torch.tensor(first, device=place_P.device)).tolist()
        expert_P, spans = self.expert_P[pair_P], zip(pairwise(ends), first[:-1], strict=True)
        return pair_P, [
            ReceivedPairs(expert_P[start:end], place_P[start:end] - before) for (start, end), before in spans
        ]


def inverse(order_N: Tensor) -> Tensor:
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return place_N


def decode(code_P: Tensor) -> ReceivedPairs:
    # The running count of first pairs is the token index.
    return ReceivedPairs((code_P >> 1).long(), (code_P & 1).cumsum(0) - 1)


def pack(code_N: Tensor | None, weight_N: Tensor | None) -> Tensor | None:
    """Return the message with one row per sent pair, its code and its router weight, as bytes [N, bytes].

    Without codes, returns the weights alone, [N, 1]; without either, None.
    """
    if code_N is None:
        return None if weight_N is None else weight_N[:, None]
    # Bytes: some backends do not support 16-bit integers.
    values = (code_N,) if weight_N is None else (code_N, weight_N)
    bytes_NB = [value.contiguous().view(torch.uint8).view(len(value), value.itemsize) for value in values]
    return torch.cat(bytes_NB, 1)


def unpack(message_P: Tensor, code: torch.dtype, weight: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    # Clone, because a contiguous slice may be unaligned.
    halves = message_P[:, : code.itemsize], message_P[:, code.itemsize :]
    code_P, weight_P = (half.clone(memory_format=torch.contiguous_format).view(-1) for half in halves)
    return code_P.view(code), None if weight is None else weight_P.view(weight)


def pairs_from_counts(counts_RE: Tensor, rows: int) -> ReceivedPairs:
    """Build the pairs of rows received without deduplication, ordered by (source, local expert)."""
    expert_RE = torch.arange(counts_RE.shape[1], device=counts_RE.device).expand(counts_RE.shape)
    expert_R = expert_RE.reshape(-1).repeat_interleave(counts_RE.reshape(-1), output_size=rows)
    return ReceivedPairs(expert_R, torch.arange(rows, device=counts_RE.device))


def find_invalid_codes(code_P: Tensor, counts_RE: Tensor, token_counts_R: Tensor, k: int) -> Tensor:
    """Return [sources] bool: whether a source's codes contradict the numbers of pairs and tokens that it announced."""
    sources, experts = counts_RE.shape
    pairs_R = counts_RE.sum(1)
    source_P = torch.repeat_interleave(pairs_R, output_size=len(code_P))
    expert_P, first_P = (code_P >> 1).long(), (code_P & 1).long()
    known_P = (expert_P >= 0) & (expert_P < experts)
    # Invalid experts are counted in an extra column.
    column_P = source_P * (experts + 1) + torch.where(known_P, expert_P, experts)
    counted_RE = column_P.new_zeros(sources * (experts + 1)).index_add_(0, column_P, torch.ones_like(column_P))
    counted_RE = counted_RE.view(sources, experts + 1)
    wrong_R = (counted_RE[:, :experts] != counts_RE).any(1)
    wrong_R |= torch.zeros_like(token_counts_R).index_add_(0, source_P, first_P) != token_counts_R
    # Each source starts with a first pair, and no token has more than k pairs.
    start_R = pairs_R.cumsum(0) - pairs_R
    some_R = pairs_R > 0
    wrong_R |= some_R & (first_P[start_R.clamp(max=max(len(code_P) - 1, 0))] == 0) if len(code_P) else some_R
    token_P = first_P.cumsum(0)
    if len(code_P) > k:  # the pair k positions earlier belongs to the same token
        long_P = (token_P[k:] == token_P[:-k]).long()
        wrong_R |= torch.zeros_like(token_counts_R).index_add_(0, source_P[k:], long_P) > 0
    return wrong_R
