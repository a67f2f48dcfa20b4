"""Deduplicated tokens: the selection, decoding of packed expert assignments, and rejection of invalid ones."""

from __future__ import annotations

import pytest
import torch

from fusedmoe.kernels.deduplicate import (
    decode,
    deduplicate_tokens,
    find_invalid_codes,
    pack,
    pairs_from_counts,
    unpack,
)
from fusedmoe.kernels.layout import Layout, build_layout
from tests.marks import slowly


def define_deduplicate_tokens(
    layout: Layout, peers: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int, int, bool]]]:
    """Reference for `deduplicate_tokens`, for `peers` ranks with equal shares of the experts.

    Returns:
        The sent tokens as (destination rank, token), and their pairs as (destination rank, token, local expert there,
        whether it is the token's first pair there).
    """
    expert_of = [expert for expert, count in enumerate(layout.counts) for _ in range(count)]
    chosen_S = [[expert_of[row] for row in rows if row >= 0] for rows in layout.row_SK.tolist()]
    tokens, pairs = [], []
    for rank in range(peers):
        hosted = range(rank * layout.experts // peers, (rank + 1) * layout.experts // peers)
        hosted_S = [[expert for expert in experts if expert in hosted] for experts in chosen_S]
        for token, chosen in enumerate(hosted_S):
            if chosen:
                tokens.append((rank, token))
            pairs += [(rank, token, expert - hosted.start, number == 0) for number, expert in enumerate(chosen)]
    return tokens, pairs


def define_received(pairs: list[tuple[int, int]], tokens: int, experts: int) -> list[list[tuple[int, int]]]:
    """Return each expert's rows as (token, index in `pairs`)."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for number, (expert, token) in enumerate(pairs):
        assert token < tokens
        rows[expert].append((token, number))
    return rows


def random_choices(seed: int) -> tuple[torch.Tensor, int, int, int | None]:
    """Choices with ids of -1 and repeated ids, ranks, experts of each rank, and a capacity."""
    generator = torch.Generator().manual_seed(seed)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    W, e, K, S = number(1, 5), number(1, 4), number(1, 6), number(0, 9)
    expert_SK = torch.randint(-1, W * e, (S, K), generator=generator)
    return expert_SK, W, e, number(0, 4) if seed % 2 else None


@pytest.mark.parametrize("seed", range(90))
def test_deduplicated_tokens_equal_definition(seed: int) -> None:
    expert_SK, W, e, capacity = random_choices(seed)
    S, K = expert_SK.shape
    exact = build_layout(expert_SK, W * e, capacity)
    layout = exact.padded(S * K) if seed % 3 == 0 else exact
    tokens, pairs = define_deduplicate_tokens(exact, W)
    sent = deduplicate_tokens(layout, W).exact(len(tokens), len(pairs))
    assert sent.row_N is not None and sent.code_N is not None and sent.tokens.source_N is not None
    rank_T = [rank for rank, count in enumerate(sent.tokens.counts) for _ in range(count)]
    assert list(zip(rank_T, sent.tokens.source_N.tolist(), strict=True)) == tokens
    assert [(code >> 1, bool(code & 1)) for code in sent.code_N.tolist()] == [(pair[2], pair[3]) for pair in pairs]
    expert_N = torch.repeat_interleave(torch.arange(W * e), exact.counts_E).tolist()
    source_N = exact.source_N.tolist() if exact.source_N is not None else []
    rows = [(expert_N[row] // e, source_N[row], expert_N[row] % e) for row in sent.row_N.tolist()]
    assert rows == [pair[:3] for pair in pairs]
    # A token's sums are added rank by rank.
    for token, row_K in enumerate(sent.tokens.row_SK.tolist()):
        assert [row for row in row_K if row >= 0] == [t for t, (_, of) in enumerate(tokens) if of == token]
    for rank in range(W):
        code_P = sent.code_N[[pair[0] == rank for pair in pairs]]
        count = sent.tokens.counts[rank]
        received = decode(code_P)
        made, order_N = received.sort(count, e, K)
        known = list(zip(received.expert_P.tolist(), received.token_P.tolist(), strict=True))
        wanted = define_received(known, count, e)
        assert made.counts == [len(of_expert) for of_expert in wanted] and made.source_N is not None
        got = list(zip(made.source_N.tolist(), order_N.tolist(), strict=True))
        assert got == [row for of_expert in wanted for row in of_expert]
        # The tables equal the layout of local tokens, except for the order of the choices.
        for row, pair in enumerate(made.pair_N.tolist()):
            assert made.row_SK.reshape(-1)[pair] == row and pair // K == made.source_N[row]


def test_pairs_from_counts_are_not_deduplicated() -> None:
    counts_RE = torch.tensor([[2, 0, 1], [1, 1, 0]])
    layout, order_N = pairs_from_counts(counts_RE, 5).sort(5, 3, 1)
    assert order_N.tolist() == [0, 1, 3, 4, 2] and layout.counts == [3, 1, 1]
    assert layout.row_SK.tolist() == [[0], [1], [4], [2], [3]]


@pytest.mark.parametrize("seed", [*range(10), *slowly(*range(10, 40))])
def test_invalid_expert_codes_are_detected(seed: int) -> None:
    expert_SK, W, e, _ = random_choices(seed)
    layout = build_layout(expert_SK, W * e)
    tokens, pairs = define_deduplicate_tokens(layout, W)
    sent = deduplicate_tokens(layout, W).exact(len(tokens), len(pairs))
    assert sent.code_N is not None
    # One simulated receiver of all rows: the rows sent to rank w count as the rows from source w.
    counts_WE = layout.counts_E.view(W, e)
    tokens_W, K = sent.tokens.counts_E, expert_SK.shape[1]
    assert not find_invalid_codes(sent.code_N, counts_WE, tokens_W, K).any()
    for at, code in enumerate(sent.code_N.tolist()):
        for other in {code ^ 1, -3, 2 * e, 2 * e + 1, (code + 2) % (2 * e)} - {code}:
            bad_N = sent.code_N.clone()
            bad_N[at] = other
            assert find_invalid_codes(bad_N, counts_WE, tokens_W, K)[pairs[at][0]]


def test_too_many_pairs_per_token_are_detected() -> None:
    code_P = torch.tensor([1, 0, 0, 1], dtype=torch.int16)
    counts_RE, token_counts_R = torch.tensor([[4]]), torch.tensor([2])
    assert not find_invalid_codes(code_P, counts_RE, token_counts_R, 3).any()
    assert find_invalid_codes(code_P, counts_RE, token_counts_R, 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("pairs", [0, 1, 7])
def test_code_and_weight_messages_round_trip(dtype: torch.dtype, pairs: int) -> None:
    code_N, weight_N = torch.randint(0, 99, (pairs,)).to(torch.int16), torch.randn(pairs).to(dtype)
    both, codes = pack(code_N, weight_N), pack(code_N, None)
    assert both is not None and codes is not None and both.shape == (pairs, 2 + dtype.itemsize)
    for message, weight in ((both, dtype), (codes, None)):
        code_P, weight_P = unpack(message, code_N.dtype, weight)
        assert torch.equal(code_P, code_N) and (weight_P is None or torch.equal(weight_P, weight_N))
    assert pack(None, None) is None
