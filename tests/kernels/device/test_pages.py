"""Pages of a stash, by kernels: as the definitions say, whatever the order in which passes come and go."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.pages import (
    HEAD,
    PageFault,
    Pages,
    define_give,
    define_lost,
    define_stored,
    define_take,
    make_pages,
)
from fusedmoe.kernels.triton import pages as kernels
from fusedmoe.kernels.triton.pages import check_pages, give_pages, load_chunks, store_rows, take_pages

FEW, LOST = 3, 5


def chunks_of(counts: list[list[int]], spare: int, device: torch.device, seed: int = 0) -> list[Layout]:
    """Chunks of so many rows of each expert, as `read_metadata` leaves them: padded to one bound, tables in a row."""
    degree, experts, bound = len(counts), len(counts[0]), spare + max(map(sum, counts))
    draw = torch.Generator().manual_seed(seed)
    ends = torch.zeros(degree, experts + 3, dtype=torch.int32)
    ends[:, 1 : experts + 1] = torch.tensor(counts).cumsum(1)
    source = torch.randint(0, 50, (degree, bound), generator=draw).to(device)
    ends, row_R = ends.to(device), torch.arange(bound, device=device)
    return [
        Layout(torch.tensor(count, device=device), end[: experts + 1], source_N, row_R, row_R[:, None])
        for count, end, source_N in zip(counts, ends, source, strict=True)
    ]


def rows_of(chunks: list[Layout]) -> int:
    return sum(int(layout.offsets_E1[-1]) for layout in chunks)


def copied(pages: Pages) -> Pages:
    return Pages(pages.rows, *(one.clone() for one in pages[1:]))


def assert_equal_pages(one: Pages, other: Pages) -> None:
    free = int(other.state[0])
    assert one.state.tolist() == other.state.tolist() and one.taker_P.tolist() == other.taker_P.tolist()
    assert one.free_P[:free].tolist() == other.free_P[:free].tolist()


def told(own: Tensor) -> tuple[int, int]:
    """The number of the fault, and its count."""
    number, count = divmod(int(own), 1 << 32)
    return number, count


@pytest.mark.parametrize("block", [kernels.NUMBERS, 2], ids=["", "blocks"])
@pytest.mark.parametrize("seed", range(3))
def test_passes_in_any_order(seed: int, block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes and gives at random, more than there are pages for too; a page has one taker at most."""
    monkeypatch.setattr(kernels, "NUMBERS", block)
    rng = random.Random(seed)
    pages = make_pages(rng.randint(20, 60), rng.choice((1, 3, 4)), device)
    right, own = copied(pages), torch.zeros(1, dtype=torch.int64, device=device)
    held: list[tuple[list[Layout], Tensor, list[int]]] = []
    seen = set()
    for _ in range(40):
        if held and rng.random() < 0.5:
            chunks, table, defined = held.pop(rng.randrange(len(held)))
            check_pages(pages, table, chunks, PageFault(own, LOST))
            assert define_lost(right, defined, rows_of(chunks)) == int(own) == 0
            give_pages(pages, table)
            define_give(right, defined)
            if rng.random() < 0.3:  # gives nothing the second time
                give_pages(pages, table)
        else:
            degree, experts = rng.randint(1, 5), rng.randint(1, 4)
            counts = [[rng.choice((0, 0, 1, 2, 5)) for _ in range(experts)] for _ in range(degree)]
            chunks = chunks_of(counts, rng.randint(1, 3), device)
            table = take_pages(pages, chunks, PageFault(own, FEW))
            defined, few = define_take(right, rows_of(chunks))
            assert table[: HEAD + defined[1]].tolist() == defined
            assert told(own) == ((FEW, few) if few else (0, 0))
            seen.add(few > 0)
            if few:
                own.zero_()
                give_pages(pages, table)  # it has none
            else:
                held.append((chunks, table, defined))
        assert_equal_pages(pages, right)
        taken = [page for *_, (_, count, *numbers) in held for page in numbers[:count]]
        free = pages.free_P[: int(pages.state[0])].tolist()
        assert sorted([*taken, *free]) == list(range(len(pages.free_P)))
    assert seen == {True, False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 24, 300])
@pytest.mark.parametrize("counts", [[[3, 0, 4], [0, 0, 0], [20, 1, 2]], [[0]], [[1]], [[40, 3]]], ids=str)
def test_copies(counts: list[list[int]], width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows lie where the definition says, no other row of the pool is written, and they come back as they were."""
    chunks = chunks_of(counts, 2, device, width)
    pages = make_pages(3 * rows_of(chunks) + 9, 4, device)
    own = torch.zeros(1, dtype=torch.int64, device=device)
    before = take_pages(pages, chunks, PageFault(own, FEW))
    table = take_pages(pages, chunks, PageFault(own, FEW))
    give_pages(pages, before)
    pool = torch.full((len(pages.free_P) * pages.rows, width), torch.nan, dtype=dtype, device=device)
    x_CM = torch.randn(50, width, device=device).to(dtype)
    kept = [x_CM[layout.source_N[: int(layout.offsets_E1[-1])]] for layout in chunks if layout.source_N is not None]
    stored = define_stored(pages, table.tolist(), rows_of(chunks))
    others = sorted({*range(len(pool))} - {*stored})
    for way in ("looked up", "chunk by chunk"):
        pool.fill_(torch.nan)
        if way == "looked up":
            store_rows(pages, table, pool, chunks, x_CM)
        else:
            for chunk, (layout, rows) in enumerate(zip(chunks, kept, strict=True)):
                x_RM = torch.full((layout.rows, width), torch.inf, dtype=dtype, device=device)
                x_RM[: len(rows)] = rows
                store_rows(pages, table, pool, chunks, x_RM, chunk)
        assert torch.equal(pool[stored], torch.cat(kept)), way
        assert bool(pool[others].isnan().all()), way
        back = list(load_chunks(pages, table, pool, chunks))
        assert [len(x_RM) for x_RM in back] == [layout.rows for layout in chunks]
        for x_RM, rows in zip(back, kept, strict=True):
            assert torch.equal(x_RM[: len(rows)], rows), way
    assert int(own) == 0


def test_without_pages_nothing_is_written(device: torch.device) -> None:
    chunks = chunks_of([[9]], 1, device)
    pages, own = make_pages(8, 4, device), torch.zeros(1, dtype=torch.int64, device=device)
    table = take_pages(pages, chunks, PageFault(own, FEW))
    pool = torch.full((8, 5), 7.0, device=device)
    store_rows(pages, table, pool, chunks, torch.zeros(50, 5, device=device))
    assert bool((pool == 7.0).all()) and told(own) == (FEW, 3)
    list(load_chunks(pages, table, pool, chunks))
    check_pages(pages, table, chunks, PageFault(own, LOST))
    assert told(own) == (FEW, 3), "the first fault stays"
    assert_equal_pages(pages, make_pages(8, 4, device)._replace(state=torch.tensor([2, 1], device=device)))


@pytest.mark.parametrize("planted", ["given back too early", "given back twice", "taken twice", "nothing"])
def test_a_page_that_is_used_again_too_early(planted: str, device: torch.device) -> None:
    """The pass that loses pages counts them; passes beside it do not."""
    pages, own = make_pages(24, 4, device), torch.zeros(1, dtype=torch.int64, device=device)
    first, second = chunks_of([[9], [1]], 1, device), chunks_of([[5]], 1, device)
    table = take_pages(pages, first, PageFault(own, FEW))
    if planted == "given back too early":
        pages.state[0] += 3  # without the numbers of those who have them
    elif planted == "given back twice":
        give_pages(pages, table)
    elif planted == "taken twice":
        pages.free_P[1] = int(table[HEAD + 1])
    other = take_pages(pages, second, PageFault(own, FEW))
    check_pages(pages, other, second, PageFault(own, LOST))
    assert int(own) == 0
    check_pages(pages, table, first, PageFault(own, LOST))
    lost = {"given back too early": 2, "given back twice": 3, "taken twice": 1, "nothing": 0}[planted]
    assert told(own) == ((LOST, lost) if lost else (0, 0))
