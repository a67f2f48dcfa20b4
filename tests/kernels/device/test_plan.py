"""Plans of one-sided dispatch in kernels, compared with their definitions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fusedmoe.kernels.gather_sum import permute
from fusedmoe.kernels.layout import Layout, build_layout, define_tiles
from fusedmoe.kernels.one_sided import (
    Addresses,
    Arrivals,
    Network,
    ReturnBuffers,
    RowLimit,
    Sends,
    define_addresses,
    define_arrivals,
    define_sends,
)
from fusedmoe.kernels.triton.one_sided import plan
from fusedmoe.kernels.triton.one_sided.plan import copy_received_rows, plan_sends, read_metadata
from tests.marks import interpreted_slowly

# Peers, local experts, tokens, experts per token, chunks.
CASES = [
    (1, 1, 1, 1, 1),
    (2, 4, 0, 2, 2),
    (2, 1, 5, 1, 3),
    (3, 5, 301, 3, 2),
    (4, 3, 150, 12, 5),
    (8, 1, 129, 8, 8),
    (2, 7, 128, 2, 24),
]
# Rows per row tile.
HEIGHTS = (16, 32)
# Padding, and whether results are sent to other nodes.
HOW = [(0, False), (3, False), (0, True)]
# Its value does not matter, only its presence.
NETWORK = Network(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), {})


def routed(case: tuple[int, int, int, int, int], device: torch.device, seed: int) -> tuple[Layout, Tensor]:
    """Some pairs are empty, one expert has no rows, and some rows are dropped."""
    peers, local, tokens, k, _ = case
    torch.manual_seed(seed)
    score_SE = torch.rand(tokens, peers * local)
    score_SE[:, peers * local // 2] = -1 if peers * local > k else 1
    expert_SK = score_SE.topk(k, 1).indices
    expert_SK[torch.rand(tokens, k) < 0.2] = -1
    layout = build_layout(expert_SK.to(device), peers * local, max(1, tokens * k // 3))
    return layout, torch.rand(tokens, k, device=device)


@pytest.mark.parametrize(("weighted", "alone"), [(True, False), (False, True)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_send_plan_equals_definition(
    case: tuple[int, int, int, int, int],
    weighted: bool,
    alone: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`alone`: in one launch, where every block counts all tokens."""
    monkeypatch.setattr(plan, "ALONE", 10**6 if alone else -1)
    peers, local, tokens, k, degree = case
    layout, weight_SK = routed(case, device, 0)
    sizes = (peers, degree, max(1, tokens) + 3, local + tokens * k + 2)
    given = weight_SK if weighted else None
    found, right = plan_sends(layout, given, *sizes), define_sends(layout, given, *sizes)
    assert_equal_sends(found, right)


def assert_equal_sends(found: Sends, right: Sends) -> None:
    """Compare the sent entries; the remaining entries are never read."""
    for name in ("token_used_W", "line_used_W"):
        torch.testing.assert_close(getattr(found, name), getattr(right, name), rtol=0, atol=0)
    token_WC, line_WC = (of.view(len(right.token_used_W), -1) for of in (found.token_WC, found.line_WC))
    metadata = found.metadata.view(-1, 2)
    for peer, (tokens, lines) in enumerate(zip(right.token_used_W.tolist(), right.line_used_W.tolist(), strict=True)):
        torch.testing.assert_close(token_WC[peer, :tokens], right.token_WC[peer, :tokens], rtol=0, atol=0)
        line = right.line_WC[peer, :lines]
        torch.testing.assert_close(line_WC[peer, :lines], line, rtol=0, atol=0)
        torch.testing.assert_close(metadata[line.long()], right.metadata[line.long()], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("case", "padding", "far"),
    [(case, *how) for case in CASES[:3] for how in HOW]
    + [(CASES[3], *HOW[0]), (CASES[6], *HOW[2])]
    # The larger cases use a few settings each; the small cases cover all settings.
    + interpreted_slowly(*((CASES[case], *HOW[how]) for case, how in ((3, 1), (4, 1), (4, 2), (5, 0), (5, 2), (6, 1)))),
    ids=str,
)
def test_arrival_plan_equals_definition(
    case: tuple[int, int, int, int, int], padding: int, far: bool, device: torch.device
) -> None:
    """Compare the arrivals at each rank, given all ranks' sends."""
    check_arrivals(case, padding, far, device)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("case", [CASES[1], CASES[2], (3, 2, 9, 2, 2)], ids=str)
def test_arrival_plan_beyond_capacity_keeps_first_rows(
    case: tuple[int, int, int, int, int], far: bool, device: torch.device
) -> None:
    """The first rows are kept, and the full count is reported."""
    check_arrivals(case, -4, far, device)


@pytest.mark.parametrize("padding", [0, 5, -4])
@pytest.mark.parametrize("tile", [1, 2, 3, 128])
@pytest.mark.parametrize("case", [CASES[0], (2, 4, 0, 2, 1), (3, 2, 9, 2, 1), (2, 1, 7, 1, 1)], ids=str)
def test_rows_sorted_by_arrival_equal_definition(
    case: tuple[int, int, int, int, int], tile: int, padding: int, device: torch.device
) -> None:
    check_arrivals(case, padding, False, device, tile)


def check_arrivals(
    case: tuple[int, int, int, int, int], padding: int, far: bool, device: torch.device, tile: int | None = None
) -> None:
    peers, local, tokens, k, degree = case
    capacity, lines = max(1, tokens), local + tokens * k + 1
    batches = [routed(case, device, 1 + peer) for peer in range(peers)]
    sends = [define_sends(layout, weight_SK, peers, degree, capacity, lines) for layout, weight_SK in batches]
    for me in range(peers):
        metadata = torch.full((peers, lines, 2), -7, dtype=torch.int32, device=device)
        for sender, send in enumerate(sends):
            used = int(send.line_used_W[me])
            metadata[sender, :used] = send.metadata[send.line_WC[me, :used].long()]
        counts = metadata[:, :local, 0].long()
        rows = max(int((counts * (j + 1) // degree - counts * j // degree).sum()) for j in range(degree)) + padding
        rows, total = max(0, rows), int(counts.sum())
        limit = RowLimit(total - (padding < 0), torch.zeros(1, dtype=torch.int64, device=device), 3)
        results, values = (return_addresses(peers, me, width, tokens * k, far, device) for width in (6, 1))
        found = read_metadata(metadata, local, degree, capacity, rows, results, values, HEIGHTS, limit, tile)
        assert limit.fault_word.tolist() == [(3 << 32) + total if padding < 0 else 0]
        bound = -(-rows // 4) * 4
        right = define_arrivals(metadata, local, degree, capacity, [bound] * degree, tile)
        for number, (one, other) in enumerate(zip(found, right, strict=True)):
            assert_equal_arrivals(one.arrivals, other)
            for of, chosen in ((results, one.results), (values, one.values)):
                assert_equal_addresses(chosen, other, of, number * bound)
            assert [counter_W.tolist() for counter_W in one.counters] == [[0] * peers] * 2
            assert tuple(one.tiles) == HEIGHTS
            for height, tiles in one.tiles.items():
                table = define_tiles(other.layout.counts, bound, height)
                assert tiles.table.tolist() == table and tiles.used.tolist() == [sum(e >= 0 for e, _ in table)]
                assert tiles.table.data_ptr() % 16 == tiles.used.data_ptr() % 16 == 0
        # The rows themselves, in one launch; padding is zeros.
        x_CM = torch.randn(peers * capacity, 5, device=device)
        for x_RM, other in zip(copy_received_rows(x_CM, [one.arrivals for one in found]), right, strict=True):
            torch.testing.assert_close(x_RM, permute(x_CM, other.layout), rtol=0, atol=0)


def return_addresses(peers: int, me: int, width: int, places: int, far: bool, device: torch.device) -> ReturnBuffers:
    """Return addresses for rows of two slots, at simulated addresses; with `far`, every other rank is far."""
    own = torch.empty(2, max(1, places), width, device=device)
    table = torch.tensor([(1 << 40) * (p + 1) for p in range(peers)], device=device)
    if not far:
        return ReturnBuffers(own, table)
    table[torch.arange(peers, device=device) % 2 != me % 2] = 0
    return ReturnBuffers(own, table, torch.empty(9, width, device=device), NETWORK)


def assert_equal_addresses(found: Sequence[Addresses], right: Arrivals, rows: ReturnBuffers, first: int) -> None:
    """Compare both slots, without the padding."""
    kept = int(right.layout.offsets_E1[-1])
    assert len(found) == 2
    for slot, addresses in enumerate(found):
        defined = define_addresses(right.peer_R, right.result_row_R, rows, slot, first)
        assert addresses.network is rows.network
        for one, other in zip(addresses[:3], defined[:3], strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one[:kept], other[:kept], rtol=0, atol=0)


def assert_equal_arrivals(found: Arrivals, right: Arrivals) -> None:
    """Compare rows; padding reads valid memory."""
    for name in ("counts_E", "offsets_E1", "pair_N", "row_SK"):
        torch.testing.assert_close(getattr(found.layout, name), getattr(right.layout, name), rtol=0, atol=0)
    torch.testing.assert_close(found.num_rows_W, right.num_rows_W, rtol=0, atol=0)
    kept, source_N = int(right.layout.offsets_E1[-1]), found.layout.source_N
    assert source_N is not None and right.layout.source_N is not None
    torch.testing.assert_close(source_N[:kept], right.layout.source_N[:kept], rtol=0, atol=0)
    for name in ("weight_R", "peer_R", "result_row_R"):
        torch.testing.assert_close(getattr(found, name)[:kept], getattr(right, name)[:kept], rtol=0, atol=0)
    for padding in (source_N[kept:], found.peer_R[kept:] + 1, found.result_row_R[kept:]):
        assert not padding.any()
