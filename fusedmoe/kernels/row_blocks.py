"""Blocks of sorted rows that experts in plain torch are worked through in.

A block has rows of one expert, or of several whose rows fit into the cache together: then all but the products is done
for all of them at once, in slices that stay in the cache. On CUDA that waits for the device once, to learn the counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedmoe.kernels.activation import cached_rows
from fusedmoe.kernels.layout import Layout

# Rows of an expert in a block: enough for full speed in the products, and sums of weight gradients are rarely read
# again.
_BLOCK_ROWS = 2048
# Bytes of each tensor in a slice of a block, for each thread: what activations read and write stays in its cache.
_SLICE_BYTES = 1 << 18


@dataclass
class RowBlock:
    """Sorted rows from `start` on that are worked through together: `sizes[i]` rows of expert `experts[i]`, in turn."""

    start: int
    experts: list[int]
    sizes: list[int]
    rows: int

    def of(self, value_N: Tensor) -> Tensor:
        """Returns this block's part of what all sorted rows have."""
        return value_N[self.start : self.start + self.rows]

    def gather(self, x_SM: Tensor, layout: Layout, buffer: Tensor) -> Tensor:
        """Returns the tokens that the rows copy: a view where they lie in order already, else in the buffer."""
        if layout.source_N is None:
            return self.of(x_SM)
        return torch.index_select(x_SM, 0, self.of(layout.source_N), out=buffer[: self.rows])

    def by_expert(self, *values: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yields each expert, and its rows of the block's values.

        One call makes the views of all experts: where these have few rows, a view costs as much as a product.
        """
        return zip(self.experts, *(value.split(self.sizes) for value in values), strict=True)


def row_blocks(layout: Layout, like: Tensor, hidden: int) -> tuple[list[RowBlock], int, int]:
    """Cuts sorted rows into blocks, experts in order.

    Args:
        like: tokens, [S, M].
    Returns:
        the blocks, the most rows of one, and how many rows of width H stay in the cache.
    """
    step = cached_rows(hidden * like.itemsize, _SLICE_BYTES)
    together = min(step, cached_rows(like.shape[1] * like.itemsize, _SLICE_BYTES))
    most = max(layout.counts, default=0)
    # In half precision a weight gradient must be one product: adding blocks would round after each.
    if like.dtype in (torch.float32, torch.float64):
        most = min(most, _BLOCK_ROWS)
    blocks: list[RowBlock] = []
    start = 0
    for expert, count in enumerate(layout.counts):
        parts = -(-count // most) if count else 0
        for i in range(parts):
            rows = count * (i + 1) // parts - count * i // parts
            if blocks and blocks[-1].rows + rows <= together:
                blocks[-1].experts.append(expert)
                blocks[-1].sizes.append(rows)
                blocks[-1].rows += rows
            else:
                blocks.append(RowBlock(start, [expert], [rows], rows))
            start += rows
    return blocks, max((block.rows for block in blocks), default=0), step
