"""Pages of memory that layers share for what they keep from forward to backward, counted on the device.

A pool has pages of P rows each. A pass takes as many as its rows need, whose number no host knows, and gives them back
when its backward has read them; passes do so in any order. The numbers of free pages are a stack on the device: who
takes pops them into a table of its own, who gives back pushes them. One launch each, with the same arguments each time.

A page knows the number of the take that holds it. So a reader notices a page that another pass has taken meanwhile,
which this library never lets happen: what it would compute with such rows is told of as a fault (`Faults`).

Worked example, 4 pages of 2 rows: pass A has 3 rows and takes pages 3 and 2, pass B has 2 rows and takes page 1. A's
rows are rows 6, 7 and 4 of the pool. When A gives back first, pages 0, 3 and 2 are free.

Here are the plain definitions; `triton/pages.py` has kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pages(NamedTuple):
    """Pages that are free, and who has the others.

    Attributes:
        rows: of a page.
        free_P: int64, whose first `state[0]` are the numbers of free pages.
        state: [2] int64, how many pages are free, and how often some were taken.
        taker_P: int64, the number of the take that holds each page; 0 where it is free.
    """

    rows: int
    free_P: Tensor
    state: Tensor
    taker_P: Tensor


class PageFault(NamedTuple):
    """A fault to note in this rank's word (`Faults.own`), where it has none yet: the number of its text."""

    own: Tensor
    number: int


# A table is the number of its take, how many pages it has, and their numbers.
HEAD = 2


def make_pages(rows: int, page_rows: int, device: torch.device) -> Pages:
    """Makes pages of `page_rows` rows for so many rows, all of them free."""
    count = -(-rows // page_rows)
    free_P = torch.arange(count, device=device)
    return Pages(page_rows, free_P, torch.tensor([count, 0], device=device), torch.zeros_like(free_P))


def define_take(pages: Pages, rows: int) -> tuple[list[int], int]:
    """Takes pages for so many rows. Returns the table, which has none where too few are free; and how many pages would
    have done for all who hold some, where there are too few, else 0."""
    need, free = -(-rows // pages.rows), int(pages.state[0])
    pages.state[1] += 1
    take = int(pages.state[1])
    if need > free:
        return [take, 0], len(pages.free_P) - free + need
    taken = pages.free_P[free - need : free].tolist()
    pages.state[0] -= need
    pages.taker_P[taken] = take
    return [take, need, *taken], 0


def define_give(pages: Pages, table: list[int]) -> None:
    """Gives back the pages of a table, which has none afterwards."""
    free, (count, *taken) = int(pages.state[0]), table[1:]
    pages.free_P[free : free + count] = torch.tensor(taken[:count], device=pages.free_P.device)
    pages.taker_P[taken[:count]] = 0
    pages.state[0] += count
    table[1] = 0


def define_lost(pages: Pages, table: list[int], rows: int) -> int:
    """Counts the pages of so many rows that the table's take does not hold, or no longer."""
    take, count, *taken = table
    held = sum(int(pages.taker_P[page]) == take for page in taken[:count])
    return -(-rows // pages.rows) - held


def define_stored(pages: Pages, table: list[int], rows: int) -> list[int]:
    """Finds the pool's rows that hold a table's first so many rows."""
    return [table[HEAD + row // pages.rows] * pages.rows + row % pages.rows for row in range(rows)]
