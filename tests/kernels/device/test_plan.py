"""Plans of one-sided dispatch, in kernels, beside their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedmoe.kernels.layout import Layout, build_layout
from fusedmoe.kernels.one_sided import Arrivals, Sends, define_arrivals, define_sends
from fusedmoe.kernels.triton.one_sided.plan import plan_sends, read_metadata

# Peers, local experts, tokens, experts of a token, chunks.
CASES = [
    (1, 1, 1, 1, 1),
    (2, 4, 0, 2, 2),
    (2, 1, 5, 1, 3),
    (3, 5, 301, 3, 2),
    (4, 3, 150, 12, 5),
    (8, 1, 129, 8, 8),
    (2, 7, 128, 2, 24),
]


def routed(case: tuple[int, int, int, int, int], device: torch.device, seed: int) -> tuple[Layout, Tensor]:
    """Some pairs empty, an expert without rows, some rows dropped."""
    peers, local, tokens, k, _ = case
    torch.manual_seed(seed)
    score_SE = torch.rand(tokens, peers * local)
    score_SE[:, peers * local // 2] = -1 if peers * local > k else 1
    expert_SK = score_SE.topk(k, 1).indices
    expert_SK[torch.rand(tokens, k) < 0.2] = -1
    layout = build_layout(expert_SK.to(device), peers * local, max(1, tokens * k // 3))
    return layout, torch.rand(layout.rows, device=device)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sends(case: tuple[int, int, int, int, int], weighted: bool, device: torch.device) -> None:
    peers, local, tokens, k, degree = case
    layout, weight_N = routed(case, device, 0)
    sizes = (peers, degree, max(1, tokens) + 3, local + tokens * k + 2)
    given = weight_N if weighted else None
    found, right = plan_sends(layout, given, *sizes), define_sends(layout, given, *sizes)
    assert_equal_sends(found, right)


def assert_equal_sends(found: Sends, right: Sends) -> None:
    """What is sent is equal; the rest is never read."""
    for name in ("token_used_W", "line_used_W"):
        torch.testing.assert_close(getattr(found, name), getattr(right, name), rtol=0, atol=0)
    for peer, (tokens, lines) in enumerate(zip(right.token_used_W.tolist(), right.line_used_W.tolist(), strict=True)):
        torch.testing.assert_close(found.token_WC[peer, :tokens], right.token_WC[peer, :tokens], rtol=0, atol=0)
        line = right.line_WC[peer, :lines]
        torch.testing.assert_close(found.line_WC[peer, :lines], line, rtol=0, atol=0)
        torch.testing.assert_close(found.metadata[line.long()], right.metadata[line.long()], rtol=0, atol=0)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_arrivals(case: tuple[int, int, int, int, int], padding: int, device: torch.device) -> None:
    """At each rank, of what all ranks send it."""
    peers, local, tokens, k, degree = case
    capacity, lines = max(1, tokens), local + tokens * k + 1
    batches = [routed(case, device, 1 + peer) for peer in range(peers)]
    sends = [define_sends(layout, weight_N, peers, degree, capacity, lines) for layout, weight_N in batches]
    for me in range(peers):
        metadata = torch.full((peers, lines, 2), -7, dtype=torch.int32, device=device)
        for sender, send in enumerate(sends):
            used = int(send.line_used_W[me])
            metadata[sender, :used] = send.metadata[send.line_WC[me, :used].long()]
        counts = metadata[:, :local, 0].long()
        rows = [int((counts * (j + 1) // degree - counts * j // degree).sum()) + padding for j in range(degree)]
        found = read_metadata(metadata, local, degree, capacity, rows)
        right = define_arrivals(metadata, local, degree, capacity, rows)
        for one, other in zip(found, right, strict=True):
            assert_equal_arrivals(one, other)


def assert_equal_arrivals(found: Arrivals, right: Arrivals) -> None:
    """Rows are equal; padding reads what exists."""
    for name in ("counts_E", "offsets_E1", "pair_N", "row_SK"):
        torch.testing.assert_close(getattr(found.layout, name), getattr(right.layout, name), rtol=0, atol=0)
    torch.testing.assert_close(found.wanted_W, right.wanted_W, rtol=0, atol=0)
    kept, source_N = int(right.layout.offsets_E1[-1]), found.layout.source_N
    assert source_N is not None and right.layout.source_N is not None
    torch.testing.assert_close(source_N[:kept], right.layout.source_N[:kept], rtol=0, atol=0)
    for name in ("weight_R", "peer_R", "place_R"):
        torch.testing.assert_close(getattr(found, name)[:kept], getattr(right, name)[:kept], rtol=0, atol=0)
    for padding in (source_N[kept:], found.peer_R[kept:], found.place_R[kept:]):
        assert not padding.any()
