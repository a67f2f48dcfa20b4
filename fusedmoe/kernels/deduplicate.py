"""Tokens that travel once: which tokens go to which ranks, and what the experts there do with them.

A token goes once to each rank that has experts for it, however many these are. Beside it travels a *code* for each of
its (token, k) pairs on that rank: twice the local expert's number, and one more where the pair is the first of its
token. Codes and tokens are in the same order, so that no index travels.

Worked example, two ranks with two experts each, K = 3. Tokens a → 0, 3, 1 and b → 2, 3, 2; what rank 0 and rank 1 get:

    rank 0    a       codes of a: experts 0, 1 → 1, 2
    rank 1    a b     codes of a: expert 3 (there 1) → 3; of b: experts 2, 3, 2 (there 0, 1, 0) → 1, 2, 0

What rank 1 makes of the codes is the layout that these tokens would have if they were its own: rows by expert
b b | a b. It computes one sum for a and one for b, and `Sending.tokens` adds up what comes back, rank by rank.

Plain torch on every device. Definitions: `define_sending`, `define_received`.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.kernels.layout import Layout, offsets


class Sending(NamedTuple):
    """Tokens of this rank as they travel.

    Attributes:
        tokens: sorts them by destination rank, and by number within; its `row_SK` has a token's ranks in order. Its
            number of rows may be a bound, with padding behind the last token.
        row_N: of each pair that travels, by (rank, token, k), its row in the experts' layout; None: rows travel as that
            layout has them, a row for each pair.
        code_N: its code, int16, or int32 where experts are many; None likewise.
        k: the most pairs that a token can have on a rank.
    """

    tokens: Layout
    row_N: Tensor | None = None
    code_N: Tensor | None = None
    k: int = 1

    def exact(self, tokens: int, pairs: int) -> Sending:
        """This without padding; how many tokens and pairs there are is known on the host."""
        if self.row_N is None or self.code_N is None:
            return self._replace(tokens=self.tokens.cut(pairs))
        return Sending(self.tokens.cut(tokens), self.row_N[:pairs], self.code_N[:pairs], self.k)


def sending(layout: Layout, peers: int, last_E: Tensor | None = None) -> Sending:
    """Chooses the tokens that go to each of `peers` ranks, which have the layout's experts in equal shares, in order.

    Never waits for the device; a layout with padding gives one with padding.

    Args:
        last_E: [E] booleans: of the tokens for a rank, those that have pairs with such experts there come last. None:
            tokens for a rank are by number.
    """
    if layout.source_N is None:  # rows that are tokens of their own: there is nothing to deduplicate
        return Sending(layout)
    (S, K), rows, experts = layout.row_SK.shape, len(layout.pair_N), len(layout.counts_E)
    small = torch.int16 if experts < 2**14 else torch.int32  # keys of 16 bits sort several times faster
    # Ranks have equal shares, in order, so that an expert's number says its rank.
    experts_here = experts // peers
    row_N = torch.arange(rows, dtype=torch.int32, device=layout.row_SK.device)
    expert_N = torch.searchsorted(layout.offsets_E1[1:], row_N, right=True).to(small)
    # Pairs without a row (-1, the last entry) go to no rank: they sort behind the last one.
    rank_N1 = torch.nn.functional.pad(expert_N.div(experts_here, rounding_mode="floor"), (0, 1), value=peers)
    rank_SK = rank_N1[layout.row_SK]
    if last_E is not None:
        expert_N1 = torch.nn.functional.pad(expert_N.long(), (0, 1), value=experts)
        last_N1 = torch.nn.functional.pad(last_E, (0, 1))[expert_N1]
        # All pairs of a token on a rank have one key, so that they stay together.
        last_SK = (last_N1[layout.row_SK][:, None] & (rank_SK[:, :, None] == rank_SK[:, None])).any(2)
        rank_SK = 2 * rank_SK + last_SK
    key_SK, by_rank_SK = rank_SK.sort(dim=1, stable=True)
    # A token's pairs are by rank now, and those of one rank by k: so they stay when all pairs are sorted by rank.
    key_N, at_N = (sorted_P[:rows] for sorted_P in key_SK.reshape(-1).sort(stable=True))
    if last_E is not None:
        key_N = key_N >> 1
    row_N = layout.row_SK.gather(1, by_rank_SK).reshape(-1)[at_N].clamp_(min=0)
    token_N, rank_N = at_N.div(max(K, 1), rounding_mode="floor"), key_N.long()
    first_N = key_N < peers
    first_N[1:] &= (token_N[1:] != token_N[:-1]) | (key_N[1:] != key_N[:-1])
    tokens_W = key_N.new_zeros(peers + 1, dtype=torch.long).index_add_(0, rank_N, first_N.long())[:peers]
    # The t-th first pair is the t-th token that is sent. Other pairs write behind the last one, and are cut off.
    sent_N, bound = first_N.cumsum(0) - 1, min(rows, S * peers)
    to_N = torch.where(first_N, sent_N, bound)
    source_T = token_N.new_zeros(bound + 1).index_copy_(0, to_N, token_N)[:bound]
    pair_T = token_N.new_zeros(bound + 1).index_copy_(0, to_N, at_N)[:bound]
    sent_SK = token_N.new_full((S * K + 1,), -1).index_copy_(0, torch.where(first_N, at_N, S * K), sent_N)[:-1]
    tokens = Layout(tokens_W, offsets(tokens_W), source_T, pair_T, sent_SK.view(S, K), verified=True)
    return Sending(tokens, row_N, (expert_N % experts_here)[row_N] * 2 + first_N, K)


class Received(NamedTuple):
    """Pairs of received tokens, in the order of these, and of k within each.

    Attributes:
        expert_P: the local expert of each pair.
        token_P: its token, numbered as received; ascending.
    """

    expert_P: Tensor
    token_P: Tensor

    def sort(self, tokens: int, experts: int, k: int) -> tuple[Layout, Tensor]:
        """Sorts the pairs of so many tokens by local expert; never waits for the device.

        Args:
            k: the most pairs that a token has.
        Returns:
            The layout, and of each of its rows the pair [N].
        """
        # Keys of 16 bits sort several times faster.
        key_P = self.expert_P.to(torch.int16 if experts < 2**15 else torch.int32)
        order_N = key_P.sort(stable=True).indices
        number_P = torch.arange(len(order_N), device=order_N.device)
        counts_E = self.expert_P.new_zeros(experts).index_add_(0, self.expert_P, torch.ones_like(self.expert_P))
        first_P = torch.ones_like(number_P, dtype=torch.bool)
        first_P[1:] = self.token_P[1:] != self.token_P[:-1]
        # A pair is the k-th of its token, counted from the token's first.
        pair_P = self.token_P * k + number_P - torch.where(first_P, number_P, 0).cummax(0).values
        pair_N = pair_P[order_N]
        row_RK = number_P.new_full((tokens * k,), -1).index_copy_(0, pair_N, number_P).view(tokens, k)
        return Layout(counts_E, offsets(counts_E), self.token_P[order_N], pair_N, row_RK, verified=True), order_N

    def in_chunks(self, order_R: Tensor, rows: list[int]) -> tuple[Tensor, list[Received]]:
        """Splits the pairs as their tokens are: in that order, so many in each chunk.

        Returns:
            The pairs in the order in which they are then, and those of each chunk.
        """
        place_P = inverse(order_R)[self.token_P]
        # Stable, so that a token's pairs keep their order: sums over them have the same order in any number of chunks.
        place_P, pair_P = place_P.sort(stable=True)
        first = list(accumulate(rows, initial=0))
        # How many pairs the tokens of a chunk have is known here alone: on CUDA the host waits for it once.
        ends = torch.searchsorted(place_P, torch.tensor(first, device=place_P.device)).tolist()
        expert_P, spans = self.expert_P[pair_P], zip(pairwise(ends), first[:-1], strict=True)
        return pair_P, [Received(expert_P[start:end], place_P[start:end] - before) for (start, end), before in spans]


def inverse(order_N: Tensor) -> Tensor:
    """Returns the place of each row in an order."""
    # A write by index takes one pass; an argsort would sort what is known.
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return place_N


def decode(code_P: Tensor) -> Received:
    """Reads codes of pairs, in the order in which their tokens are received."""
    # The last bit marks a token's first pair: their running count is the token.
    return Received((code_P >> 1).long(), (code_P & 1).cumsum(0) - 1)


def pack(code_N: Tensor | None, weight_N: Tensor | None) -> Tensor | None:
    """Makes one message of codes and router weights of pairs, [N, bytes]; None: there is nothing to say."""
    if code_N is None:
        return None if weight_N is None else weight_N[:, None]
    # As bytes: there are backends that know no integers of 16 bits.
    values = (code_N,) if weight_N is None else (code_N, weight_N)
    bytes_NB = [value.contiguous().view(torch.uint8).view(len(value), value.itemsize) for value in values]
    return torch.cat(bytes_NB, 1)


def unpack(message_P: Tensor, code: torch.dtype, weight: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Returns the codes of a message, and the weights if it has any."""
    # Clones: a slice that is contiguous already would begin where no number of that size may.
    halves = message_P[:, : code.itemsize], message_P[:, code.itemsize :]
    code_P, weight_P = (half.clone(memory_format=torch.contiguous_format).view(-1) for half in halves)
    return code_P.view(code), None if weight is None else weight_P.view(weight)


def rows_of_counts(counts_RE: Tensor, rows: int) -> Received:
    """Makes the pairs of rows that are tokens of their own, and lie by (source, local expert)."""
    expert_RE = torch.arange(counts_RE.shape[1], device=counts_RE.device).expand(counts_RE.shape)
    expert_R = expert_RE.reshape(-1).repeat_interleave(counts_RE.reshape(-1), output_size=rows)
    return Received(expert_R, torch.arange(rows, device=counts_RE.device))


def wrong_codes(code_P: Tensor, counts_RE: Tensor, tokens_R: Tensor, k: int) -> Tensor:
    """Returns [sources] booleans: whose codes are not those of the pairs and tokens that it said it would send.

    Args:
        code_P: as received, by source.
        counts_RE: pairs of each source for each local expert.   tokens_R: tokens of each source.
        k: the most pairs that a token has.
    """
    sources, experts = counts_RE.shape
    pairs_R = counts_RE.sum(1)
    source_P = torch.repeat_interleave(pairs_R, output_size=len(code_P))
    expert_P, first_P = (code_P >> 1).long(), (code_P & 1).long()
    known_P = (expert_P >= 0) & (expert_P < experts)
    # Experts that do not exist are counted in a column of their own.
    column_P = source_P * (experts + 1) + torch.where(known_P, expert_P, experts)
    found_R = column_P.new_zeros(sources * (experts + 1)).index_add_(0, column_P, torch.ones_like(column_P))
    found_R = found_R.view(sources, experts + 1)
    wrong_R = (found_R[:, :experts] != counts_RE).any(1)
    wrong_R |= torch.zeros_like(tokens_R).index_add_(0, source_P, first_P) != tokens_R
    # Each source begins with a token, and no token has more than k pairs.
    start_R = pairs_R.cumsum(0) - pairs_R
    some_R = pairs_R > 0
    wrong_R |= some_R & (first_P[start_R.clamp(max=max(len(code_P) - 1, 0))] == 0) if len(code_P) else some_R
    token_P = first_P.cumsum(0)
    if len(code_P) > k:  # the pair k places before is of the same token
        long_P = (token_P[k:] == token_P[:-k]).long()
        wrong_R |= torch.zeros_like(tokens_R).index_add_(0, source_P[k:], long_P) > 0
    return wrong_R


def define_sending(
    layout: Layout, peers: int, last: Collection[int] = ()
) -> tuple[list[tuple[int, int]], list[tuple[int, int, int, bool]]]:
    """Defines what `sending` must choose: (rank, token) of tokens, (rank, token, expert there, first) of pairs.

    Args:
        last: experts, numbered over all ranks, whose tokens come last.
    """
    expert_of = [expert for expert, count in enumerate(layout.counts) for _ in range(count)]
    chosen_S = [[expert_of[row] for row in rows if row >= 0] for rows in layout.row_SK.tolist()]
    tokens, pairs = [], []
    for rank in range(peers):
        here = range(rank * layout.experts // peers, (rank + 1) * layout.experts // peers)
        chosen_here_S = [[expert for expert in experts if expert in here] for experts in chosen_S]
        for token, chosen in sorted(enumerate(chosen_here_S), key=lambda one: not set(last).isdisjoint(one[1])):
            if chosen:
                tokens.append((rank, token))
            pairs += [(rank, token, expert - here.start, number == 0) for number, expert in enumerate(chosen)]
    return tokens, pairs


def define_received(pairs: list[tuple[int, int]], tokens: int, experts: int) -> list[list[tuple[int, int]]]:
    """Defines the rows that `Received.sort` must make of (expert, token) pairs: for each expert (token, pair)."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for number, (expert, token) in enumerate(pairs):
        assert token < tokens
        rows[expert].append((token, number))
    return rows
