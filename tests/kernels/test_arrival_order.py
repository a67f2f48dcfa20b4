"""How much of a dispatch row tiles in order of arrival hide, in a model of one receiving rank's GPU.

Tokens arrive in tiles, evenly from all ranks at once. A program that waits for its rows occupies one of the GPU's
multiprocessors. Dispatch and product would each take one unit of time alone, so 2.0 is no overlap and 1.0 is the bound.
"""

from __future__ import annotations

import heapq

import pytest
import torch

from fusedmoe.autograd.order import order
from fusedmoe.kernels.layout import define_arrival_order, define_tiles
from fusedmoe.kernels.one_sided import define_arrivals, define_sends

MULTIPROCESSORS, ROWS, COLUMNS, BAND, TOKENS = 132, 128, 256, 8, 128


def finish_time(peers: int, tokens: int, experts: int, k: int, hidden: int, by_arrival: bool) -> float:
    """Return the time at which the up projection ends, over the time of a dispatch."""
    local, lines = experts // peers, experts // peers + tokens * k
    metadata = torch.zeros((peers, lines, 2), dtype=torch.int32)
    sent = []
    for rank in range(peers):
        random = torch.Generator().manual_seed(rank)
        layout = order(torch.rand(tokens, experts, generator=random).topk(k).indices, experts)
        sends = define_sends(layout, None, peers, 1, tokens, lines)
        used = int(sends.line_used_W[0])
        metadata[rank, :used] = sends.metadata[sends.line_WC[0, :used].long()]
        sent.append(int(sends.token_used_W[0]))
    rows = int(metadata[:, :local, 0].sum())
    (arrivals,) = define_arrivals(metadata, local, 1, tokens, [rows], TOKENS if by_arrival else None)
    assert arrivals.layout.source_N is not None
    source, ends = arrivals.layout.source_N.tolist(), arrivals.layout.offsets_E1[1:].tolist()
    table = [tile for tile in define_tiles(arrivals.layout.counts, rows, ROWS) if tile[0] >= 0]
    if by_arrival:
        table = define_arrival_order(table, ends, source, ROWS, TOKENS, tokens // TOKENS)
    tiles_W = [-(-count // TOKENS) for count in sent]

    def ready(row: int) -> float:
        rank, token = divmod(source[row], tokens)
        return (token // TOKENS + 1) / tiles_W[rank]

    needs = [max(map(ready, range(start, min(start + ROWS, ends[expert])))) for expert, start in table]
    columns = -(-2 * hidden // COLUMNS)
    seconds = MULTIPROCESSORS / (len(needs) * columns)
    free = [0.0] * MULTIPROCESSORS
    for first in range(0, len(needs), BAND):
        for need in needs[first : first + BAND] * columns:
            heapq.heappush(free, max(heapq.heappop(free), need) + seconds)
    return max(free)


SHAPES = {"Qwen3-30B": (8, 8192, 128, 8, 768), "Mixtral": (8, 4096, 8, 2, 14336)}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_in_order_of_arrival_hide_the_dispatch(shape: str) -> None:
    """One chunk: at most 15% above the bound; in order of sources most of the dispatch is exposed."""
    assert finish_time(*SHAPES[shape], by_arrival=True) <= 1.15
    assert finish_time(*SHAPES[shape], by_arrival=False) > 1.5
