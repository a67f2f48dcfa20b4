"""Row tiles: how the rows of ragged groups are cut for a grid whose size is known without asking the device.

A tile is up to BM rows of one expert. N rows of E experts make at most N // BM + E tiles, however they are spread; the
grid has that many, and those without rows end at once. So nothing waits for the host to learn the counts.

Worked example, BM = 4, counts [5, 0, 3]: expert 0 has rows 0–3 and 4, expert 2 rows 5–7; the table is
[[0, 0], [0, 4], [2, 5], [-1, 0], [-1, 0]].
"""

from __future__ import annotations

import torch
from torch import Tensor


def tile_bound(rows: int, experts: int, block_rows: int) -> int:
    """Tiles that `rows` rows of `experts` experts can make at most."""
    return rows // block_rows + experts


def make_tiles(counts_E: Tensor, rows: int, block_rows: int) -> Tensor:
    """[tiles, 2] int32: expert and first row of every tile, expert -1 where there is none. No host synchronisation.

    Args:
        counts_E: rows of each expert, on any device.
        rows: a bound on their sum.
    """
    experts = counts_E.numel()
    tiles_E = (counts_E + block_rows - 1) // block_rows
    end_E = tiles_E.cumsum(0)
    tile_T = torch.arange(tile_bound(rows, experts, block_rows), device=counts_E.device)
    expert_T = torch.searchsorted(end_E, tile_T, right=True)
    inside_T = expert_T < experts
    known_T = expert_T.clamp(max=experts - 1)
    row_E = counts_E.cumsum(0) - counts_E
    start_T = row_E[known_T] + (tile_T - (end_E - tiles_E)[known_T]) * block_rows
    table = torch.stack([torch.where(inside_T, expert_T, -1), torch.where(inside_T, start_T, 0)], 1)
    return table.to(torch.int32)
