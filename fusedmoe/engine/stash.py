"""A stash: what layers of kernels that send by themselves keep from forward to backward, in pages that they share.

Without one each layer and micro-batch keeps tensors of the bound on its rows. With one these are gone once the forward
has copied the rows that really came: `Stash` has the pages, `StashedRows` is what one forward pass has put there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fusedmoe.comm.one_sided.receive_buffers import ReceiveBuffers
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.pages import PageFault, Pages, make_pages
from fusedmoe.kernels.triton.pages import check_pages, give_pages, load_chunks, store_rows, take_pages

# Rows of a page: a pass leaves less than one page of its last one empty.
_PAGE_ROWS = 128


class Stash:
    """Memory for rows that layers of one shape keep from forward to backward, all of them together, on one device.

    Kernels take pages where a forward ends and give them back in its backward, in whichever order passes come to it;
    those of a graph that is dropped without a backward are given back with the next forward. The memory is allocated
    with the first batch. Layers that share a stash run on one stream, one after the other.

    Args:
        rows: (token, k) pairs at the experts of a rank, of all layers and micro-batches between forward and backward.
        page_rows: rows of a page. Each forward leaves less than one page empty.
    Raises:
        ConfigError: one of the numbers is below 1.
    Worked example: 24 layers of 8192 rows in the mean, of which 2 micro-batches are alive at once, and 10% to spare:
        rows = 1.1 · 24 · 2 · 8192. The bound of a layer may be 8 times its mean all the same.
    """

    def __init__(self, rows: int, page_rows: int = _PAGE_ROWS) -> None:
        if rows < 1 or page_rows < 1:
            raise ConfigError(f"Stash: rows={rows}, page_rows={page_rows}; give numbers of at least 1")
        self._rows, self._page_rows = rows, page_rows
        self._memory: _Memory | None = None
        # Tables of graphs that have gone without a backward: Python deletes these whenever it likes.
        self._dropped: list[Tensor] = []

    def claim(
        self, x_SM: Tensor, weight_SK: Tensor | None, experts: GroupedExperts, buffers: ReceiveBuffers, name: str
    ) -> TakePages | None:
        """Returns what takes pages for the rows of a forward, once the device knows them; None: no backward will come.

        Args:
            x_SM, weight_SK: what may need gradients beside the experts.
            buffers: in which rows travel; their ranks are told of faults.
            name: of who calls, for errors; the same on all ranks.
        Raises:
            ConfigError: the stash has been allocated for layers of another shape, or on another device.
        """
        hidden = experts.weights.w1.shape[1:-1].numel()
        if self._memory is None:
            pages = make_pages(self._rows, self._page_rows, x_SM.device)
            h = x_SM.new_empty(len(pages.free_P) * pages.rows, hidden)
            self._memory = _Memory(pages, h.new_empty(0, x_SM.shape[1]), h)
        x, h = self._memory.x, self._memory.h
        if (x.shape[1], h.shape[1], x.dtype, x.device) != (x_SM.shape[1], hidden, x_SM.dtype, x_SM.device):
            raise ConfigError(
                f"{name}: rows of {x_SM.shape[1]} and {hidden} × {x_SM.dtype} on {x_SM.device} do not fit a stash of "
                f"{x.shape[1]} and {h.shape[1]} × {x.dtype} on {x.device}; give layers of another shape their own"
            )
        if experts.keeps_rows and not len(x):
            self._memory.x = x.new_empty(len(h), x.shape[1])
        few, lost = (
            PageFault(buffers.faults.own, buffers.watch.number(text))
            for text in (
                f"pages of {self._page_rows} rows are needed in the stash on this rank with {name}, and it has "
                f"{len(self._memory.pages.free_P)}: {_MORE_PAGES}",
                f"pages of the stash on this rank were given to others before the backward of {name} had read them: "
                f"{_LOST_PAGES}",
            )
        )
        given = (x_SM, weight_SK, *experts.parameters)
        # Texts of faults have numbers by then, the same on all ranks, whichever need a backward.
        learns = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given)
        return partial(self._take, few, lost) if learns else None

    def _take(self, few: PageFault, lost: PageFault, chunks: Sequence[Layout]) -> StashedRows:
        assert self._memory is not None
        captured = chunks[0].counts_E.is_cuda and torch.cuda.is_current_stream_capturing()
        # A CUDA graph would give these back with each replay.
        while self._dropped and not captured:
            give_pages(self._memory.pages, self._dropped.pop())
        table = take_pages(self._memory.pages, chunks, few)
        # What a graph takes with each replay its own backward gives back, or nobody.
        return StashedRows(self._memory, table, lost, None if captured else self._dropped)


#: Takes pages for the rows of a pass's chunks.
TakePages = Callable[[Sequence[Layout]], "StashedRows"]

_MORE_PAGES = (
    "results since then are wrong. Give it more rows (stash_factor of a Schedule, rows of a Stash), have the gate "
    "spread tokens more evenly, or run fewer forwards ahead of their backwards"
)
_LOST_PAGES = (
    "gradients since then are wrong. That is a fault of fusedmoe, or a CUDA graph has replayed a backward twice after "
    "one forward"
)


@dataclass
class _Memory:
    """Pages, and the rows in them: received rows, [pages · P, M] once some are kept, and pre-activations,
    [pages · P, (2·)H]."""

    pages: Pages
    x: Tensor
    h: Tensor


class StashedRows:
    """Rows of one forward pass in the pages of a stash."""

    def __init__(self, memory: _Memory, table: Tensor, lost: PageFault, dropped: list[Tensor] | None) -> None:
        self._memory, self._table, self._lost, self._dropped = memory, table, lost, dropped

    def store_x(self, x_CM: Tensor, chunks: Sequence[Layout]) -> None:
        """Copies received rows of all chunks, which their layouts look up in x_CM."""
        store_rows(self._memory.pages, self._table, self._memory.x, chunks, x_CM)

    def store_h(self, h: Sequence[Tensor], chunks: Sequence[Layout]) -> None:
        """Copies pre-activations, [R, (2,) H] of each chunk."""
        for chunk, h_RH in enumerate(h):
            store_rows(self._memory.pages, self._table, self._memory.h, chunks, h_RH.flatten(1), chunk)

    def check(self, chunks: Sequence[Layout]) -> None:
        """Notes a fault where pages have been given to others meanwhile."""
        check_pages(self._memory.pages, self._table, chunks, self._lost)

    def x(self, chunks: Sequence[Layout]) -> Iterator[Tensor]:
        """Yields received rows, [R, M], of each chunk."""
        return load_chunks(self._memory.pages, self._table, self._memory.x, chunks)

    def h(self, chunks: Sequence[Layout]) -> Iterator[Tensor]:
        """Yields pre-activations, [R, (2·)H], of each chunk."""
        return load_chunks(self._memory.pages, self._table, self._memory.h, chunks)

    def give(self) -> None:
        """Gives the pages back: nothing is read from them any more."""
        give_pages(self._memory.pages, self._table)
        self._dropped = None

    def __del__(self) -> None:
        if self._dropped is not None:
            self._dropped.append(self._table)
