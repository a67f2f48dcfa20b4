"""Pages of a pool as kernels: taken, given back and looked after by one program, rows copied into them and out again.

Definitions: `fusedmoe/kernels/pages.py`. Rows come in chunks, each padded to the same bound, and lie in the pages
without padding, chunk behind chunk: so a pass finds them whatever the chunks that it reads them in. Whatever takes,
copies and gives follows each other on one stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.pages import HEAD, PageFault, Pages
from fusedmoe.kernels.triton.jit import jit

_HEAD = tl.constexpr(HEAD)
_UNSPECIAL = ["step", "experts", "degree", "first", "bound", "tiles", "count", "number"]
#: Numbers of pages that a program looks at in one go.
NUMBERS = 1024 if not INTERPRET else 64
#: Rows of a program that copies, its columns in one go, and its warps.
ROWS, COLUMNS, WARPS = 16, 256 if not INTERPRET else 4096, 8


@triton.jit
def _rows_before(ends_ptr, step, experts, chunk, DP: tl.constexpr):
    """Rows of the chunks before this one; each chunk's table of its experts' first rows ends with how many it has."""
    d = tl.arange(0, DP)
    return tl.sum(tl.load(ends_ptr + d * step + experts, mask=d < chunk, other=0).to(tl.int64), 0)


@triton.jit
def _note(fault_ptr, number, count):
    """Notes a fault in a word that has none."""
    if tl.load(fault_ptr) == 0:
        tl.store(fault_ptr, (number.to(tl.int64) << 32) + count)


@jit(do_not_specialize=_UNSPECIAL)
def take_pages_kernel(
    ends_ptr, free_ptr, state_ptr, taker_ptr, table_ptr, fault_ptr,
    step, experts, degree, count, number, P, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    need = (_rows_before(ends_ptr, step, experts, degree, DP) + P - 1) // P
    free, take = tl.load(state_ptr), tl.load(state_ptr + 1) + 1
    taken = tl.where(need > free, 0, need)
    tl.store(table_ptr, take)
    tl.store(table_ptr + 1, taken)
    for begin in range(0, taken, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        page = tl.load(free_ptr + free - taken + i, mask=i < taken, other=0)
        tl.store(table_ptr + _HEAD + i, page, mask=i < taken)
        tl.store(taker_ptr + page, take + i * 0, mask=i < taken)
    if need > free:
        _note(fault_ptr, number, count - free + need)
    # All threads have read what the one writes.
    tl.debug_barrier()
    tl.store(state_ptr, free - taken)
    tl.store(state_ptr + 1, take)


@jit
def give_pages_kernel(free_ptr, state_ptr, taker_ptr, table_ptr, BLOCK: tl.constexpr):
    free, taken = tl.load(state_ptr), tl.load(table_ptr + 1)
    for begin in range(0, taken, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        page = tl.load(table_ptr + _HEAD + i, mask=i < taken, other=0)
        tl.store(free_ptr + free + i, page, mask=i < taken)
        tl.store(taker_ptr + page, i * 0, mask=i < taken)
    tl.debug_barrier()
    tl.store(state_ptr, free + taken)
    # Who gives twice gives nothing the second time.
    tl.store(table_ptr + 1, taken * 0)


@jit(do_not_specialize=_UNSPECIAL)
def check_pages_kernel(
    ends_ptr, taker_ptr, table_ptr, fault_ptr,
    step, experts, degree, number, P, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lost = (_rows_before(ends_ptr, step, experts, degree, DP) + P - 1) // P
    take, taken = tl.load(table_ptr), tl.load(table_ptr + 1)
    for begin in range(0, taken, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        page = tl.load(table_ptr + _HEAD + i, mask=i < taken, other=0)
        taker = tl.load(taker_ptr + page, mask=i < taken, other=0)
        lost -= tl.sum((taker == take).to(tl.int64), 0)
    if lost > 0:
        _note(fault_ptr, number, lost)


@jit(do_not_specialize=_UNSPECIAL)
def copy_pages_kernel(
    # Rows of chunks from `first` on, each of `bound`; where `source_ptr` is not None, it says where they are read.
    rows_ptr, source_ptr, ends_ptr, table_ptr, pool_ptr,
    step, experts, first, bound, tiles, M, P,
    STORE: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk, tile = first + tl.program_id(0) // tiles, tl.program_id(0) % tiles
    count = tl.load(ends_ptr + chunk * step + experts)
    if tile * ROWS >= count:
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    place = _rows_before(ends_ptr, step, experts, chunk, DP) + row
    # Where there were too few pages nothing is copied: what is computed then is wrong, and told of.
    inside = (row < count) & (place // P < tl.load(table_ptr + 1))
    page = tl.load(table_ptr + _HEAD + place // P, mask=inside, other=0)
    stored = page * P + place % P
    at = (tl.program_id(0) // tiles).to(tl.int64) * bound + row
    if source_ptr is not None:
        at = tl.load(source_ptr + at, mask=inside, other=0)
    column = tl.arange(0, BLOCK)
    for begin in range(0, M, BLOCK):
        mask = inside[:, None] & (begin + column < M)[None, :]
        outside = rows_ptr + at[:, None] * M + begin + column[None, :]
        within = pool_ptr + stored[:, None] * M + begin + column[None, :]
        if STORE:
            tl.store(within, tl.load(outside, mask=mask), mask=mask)
        else:
            tl.store(outside, tl.load(within, mask=mask), mask=mask)


def take_pages(pages: Pages, chunks: Sequence[Layout], fault: PageFault) -> Tensor:
    """Takes pages for the rows of all chunks, as `define_take`; no host synchronisation.

    Args:
        chunks: of one call of `read_metadata`, chunk behind chunk.
        fault: where too few are free: its count is the pages that would have done.
    Returns:
        the table, int64.
    """
    bound = sum(layout.rows for layout in chunks)
    table = pages.free_P.new_empty(HEAD + min(len(pages.free_P), triton.cdiv(bound, pages.rows)))
    take_pages_kernel[(1,)](
        chunks[0].offsets_E1, pages.free_P, pages.state, pages.taker_P, table, fault.own,
        *_ends(chunks), len(chunks), len(pages.free_P), fault.number, pages.rows, **_blocks(chunks), BLOCK=NUMBERS,
    )  # fmt: skip
    return table


def give_pages(pages: Pages, table: Tensor) -> None:
    """Gives back the pages of a table, as `define_give`."""
    give_pages_kernel[(1,)](pages.free_P, pages.state, pages.taker_P, table, BLOCK=NUMBERS)


def check_pages(pages: Pages, table: Tensor, chunks: Sequence[Layout], fault: PageFault) -> None:
    """Notes a fault where the table's take no longer holds pages of the chunks' rows; its count is `define_lost`."""
    check_pages_kernel[(1,)](
        chunks[0].offsets_E1, pages.taker_P, table, fault.own,
        *_ends(chunks), len(chunks), fault.number, pages.rows, **_blocks(chunks), BLOCK=NUMBERS,
    )  # fmt: skip


def store_rows(
    pages: Pages, table: Tensor, pool: Tensor, chunks: Sequence[Layout], x: Tensor, chunk: int | None = None
) -> None:
    """Copies rows of one chunk into a table's pages, or of all.

    Args:
        pool: [pages · P, M].
        x: [R, M] of one chunk; for all, [C, M], in which the layouts look their rows up.
    """
    source = chunks[0].source_N if chunk is None else None
    _copy(pages, table, pool, chunks, chunk, x, source, store=True)


def load_chunks(pages: Pages, table: Tensor, pool: Tensor, chunks: Sequence[Layout]) -> Iterator[Tensor]:
    """Copies rows out of a table's pages, chunk by chunk as they are asked for, [R, M]; their padding stays unwritten.

    Chunks are those by which the rows were stored.
    """
    for chunk, layout in enumerate(chunks):
        x_RM = pool.new_empty((layout.rows, pool.shape[1]))
        _copy(pages, table, pool, chunks, chunk, x_RM, None, store=False)
        yield x_RM


def _copy(
    pages: Pages,
    table: Tensor,
    pool: Tensor,
    chunks: Sequence[Layout],
    chunk: int | None,
    x: Tensor,
    source: Tensor | None,
    store: bool,
) -> None:
    first, count = (0, len(chunks)) if chunk is None else (chunk, 1)
    bound, width = chunks[0].rows, pool.shape[1]
    tiles = triton.cdiv(bound, ROWS)
    copy_pages_kernel[(count * tiles,)](
        x, source, chunks[0].offsets_E1, table, pool, *_ends(chunks), first, bound, tiles, width, pages.rows,
        STORE=store, **_blocks(chunks), ROWS=ROWS, BLOCK=min(COLUMNS, triton.next_power_of_2(width)),
        num_warps=WARPS,
    )  # fmt: skip


def _ends(chunks: Sequence[Layout]) -> tuple[int, int]:
    """Numbers from one chunk's table of first rows to the next one's, and from its first to that of its rows."""
    tables = [int(layout.offsets_E1.storage_offset()) for layout in chunks[:2]]
    return tables[-1] - tables[0], chunks[0].experts


def _blocks(chunks: Sequence[Layout]) -> dict[str, int]:
    return {"DP": triton.next_power_of_2(len(chunks))}
