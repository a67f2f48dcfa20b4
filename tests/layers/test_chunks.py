from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from fusedmoe.engine.chunks import Kept, chunk_order, inverse


@pytest.mark.parametrize("seed", range(20))
def test_kept_rows_of_other_chunks(seed: int) -> None:
    """Segments of any sizes, in so many chunks before and so many after: each row where it belongs, copied."""
    draw = torch.Generator().manual_seed(seed)
    counts_G = torch.randint(0, 9 if seed % 2 else 90, (seed % 7,), generator=draw)
    rows = int(counts_G.sum())
    before, after = (int(n) for n in torch.randint(1, 9, (2,), generator=draw))
    whole = torch.randn(rows, 3, generator=draw)
    there, here = (chunk_order(counts_G, rows, degree) for degree in (before, after))
    kept = Kept(whole[there].tensor_split(before))
    found = [kept.rows(part) for part in inverse(there)[here].tensor_split(after)]
    assert_close(torch.cat(found), whole[here], rtol=0, atol=0)
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in found)


@pytest.mark.parametrize("parts", [[0, 0], [4], [0, 3, 0, 5], [1, 1, 1]])
def test_kept_rows_in_any_order(parts: list[int]) -> None:
    draw = torch.Generator().manual_seed(sum(parts))
    pieces = [torch.randn(rows, 2, dtype=torch.float64, generator=draw) for rows in parts]
    kept, whole = Kept(pieces), torch.cat(pieces)
    for count in (0, 1, 20):
        index = torch.randint(len(whole), (count,), generator=draw) if len(whole) else torch.empty(0, dtype=torch.long)
        assert_close(kept.rows(index), whole[index], rtol=0, atol=0)
