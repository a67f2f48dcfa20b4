from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from fusedmoe.kernels.layout import define_arrival_order, define_tiles, offsets, tile_bound
from fusedmoe.kernels.one_sided import Bounds, Wait
from fusedmoe.kernels.triton.layout import make_tiles, sort_tiles
from tests.marks import interpreted_slowly


def test_tiles_of_worked_example() -> None:
    assert define_tiles([5, 0, 3], 8, 4) == [[0, 0], [0, 4], [2, 5], [-1, 0], [-1, 0]]


def ragged(experts: int, most: int) -> list[int]:
    """Random counts, about a third of them zero."""
    counts = torch.randint(0, most, (experts,)) * (torch.rand(experts) > 0.3)
    return counts.tolist()


NoSync = Callable[[], AbstractContextManager[None]]


def check(counts: list[int], slack: int, block: int, device: torch.device, no_sync: NoSync) -> None:
    """Compare with the definition; `slack`: the bound minus the rows, which also adds idle tiles."""
    offsets_E1 = offsets(torch.tensor(counts, device=device))
    rows = sum(counts) + slack
    with no_sync():
        tiles = make_tiles(offsets_E1, rows, block)
    right = define_tiles(counts, rows, block)
    assert tiles.table.dtype == torch.int32 and len(right) == tile_bound(rows, len(counts), block)
    assert tiles.table.tolist() == right
    assert tiles.used.tolist() == [sum(expert >= 0 for expert, _ in right)]
    # Tile sizes for which kernels are compiled.
    assert tiles.table.data_ptr() % 16 == tiles.used.data_ptr() % 16 == 0


@pytest.mark.parametrize(
    ("slack", "block"), [(0, 64), (77, 128), *interpreted_slowly((77, 32), (0, 32), (77, 64), (0, 128))]
)
@pytest.mark.parametrize(
    "counts",
    [
        [0],
        [129],
        [5, 0, 0, 64, 32, 0, 0],
        [0, 0, 0, 0, 0, 0, 700],
        [700, 0, 0, 0, 0, 0, 0],
        [128] * 7,
        [1] * 128,
        [0] * 128,
        [0] * 60 + [900] + [0] * 67,
        [0] * 511 + [65],
        [3] + [0] * 511,
    ],
    ids=lambda counts: f"{len(counts)} experts {sum(counts)} rows first {counts[0]}",
)
def test_tiles_equal_definition(
    counts: list[int], block: int, slack: int, device: torch.device, no_sync: NoSync
) -> None:
    check(counts, slack, block, device, no_sync)


@pytest.mark.parametrize("experts", [1, 7, 128, 512])
def test_tiles_of_random_counts_equal_definition(experts: int, device: torch.device, no_sync: NoSync) -> None:
    for block in (32, 64, 128):
        check(ragged(experts, 300), 11, block, device, no_sync)


def test_tiles_cover_every_row_once() -> None:
    counts = ragged(9, 50)
    covered = []
    for expert, start in define_tiles(counts, 500, 16):
        if expert >= 0:
            covered += [(expert, row) for row in range(start, min(start + 16, sum(counts[: expert + 1])))]
    assert covered == [(e, sum(counts[:e]) + i) for e, count in enumerate(counts) for i in range(count)]


@pytest.mark.parametrize(
    ("counts", "slack", "signals"),
    [
        ([0], 0, 1),
        ([5, 0, 17], 9, 3),
        ([40, 0, 1, 130, 0], 50, 7),
        *interpreted_slowly(([300] * 9, 3000, 8), ([0, 2500, 3], 0, 64)),
    ],
    ids=str,
)
def test_tiles_are_sorted_by_last_signal(
    counts: list[int], slack: int, signals: int, device: torch.device, no_sync: NoSync
) -> None:
    """Tiles with the same last signal keep their order, and unused tiles are last."""
    block, per_signal, peers = 16, 4, 3
    offsets_E1, rows = offsets(torch.tensor(counts, device=device)), sum(counts) + slack
    source_N = torch.randint(0, peers * signals * per_signal, (rows,), device=device)
    word = torch.zeros(8, dtype=torch.int64, device=device)
    wait = Wait(word.new_zeros(peers, signals), per_signal, word, Bounds(word, word, 1), by_arrival=True)
    tiles = make_tiles(offsets_E1, rows, block)
    with no_sync():
        found = sort_tiles(tiles, offsets_E1[1:], source_N, block, wait)
    ends, source = offsets_E1[1:].tolist(), source_N.tolist()
    right = define_arrival_order(tiles.table.tolist(), ends, source, block, per_signal, signals)
    assert found.table.tolist() == right and found.used.tolist() == tiles.used.tolist()
