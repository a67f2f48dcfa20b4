"""Chunks of rows and micro-batches, rechunking of saved rows, and the worked examples of layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fusedmoe.blocks.cuts import cut
from fusedmoe.comm.all_to_all import block_order, chunk_size
from fusedmoe.engine.chunks import SavedRows
from fusedmoe.kernels.deduplicate import inverse


def chunk_order(counts_G: np.ndarray, degree: int) -> Tensor:
    sizes_Gi = np.stack([chunk_size(counts_G, i, degree) for i in range(degree)], 1)
    return block_order(sizes_Gi, (1, 0), torch.device("cpu"))


@pytest.mark.parametrize("seed", range(20))
def test_saved_rows_rechunk_to_other_count(seed: int) -> None:
    """Rechunk segments of any sizes: each row is copied to its position."""
    draw = torch.Generator().manual_seed(seed)
    counts_G = torch.randint(0, 9 if seed % 2 else 90, (seed % 7,), generator=draw)
    before, after = (int(n) for n in torch.randint(1, 9, (2,), generator=draw))
    whole = torch.randn(int(counts_G.sum()), 3, generator=draw)
    there, here = (chunk_order(counts_G.numpy(), degree) for degree in (before, after))
    kept = SavedRows(whole[there].tensor_split(before))
    found = [kept.rows(part) for part in inverse(there)[here].tensor_split(after)]
    assert_close(torch.cat(found), whole[here], rtol=0, atol=0)
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in found)


@pytest.mark.parametrize("parts", [[0, 0], [4], [0, 3, 0, 5], [1, 1, 1]])
def test_saved_rows_are_indexable_in_any_order(parts: list[int]) -> None:
    draw = torch.Generator().manual_seed(sum(parts))
    pieces = [torch.randn(rows, 2, dtype=torch.float64, generator=draw) for rows in parts]
    kept, whole = SavedRows(pieces), torch.cat(pieces)
    for count in (0, 1, 20):
        index = torch.randint(len(whole), (count,), generator=draw) if len(whole) else torch.empty(0, dtype=torch.long)
        assert_close(kept.rows(index), whole[index], rtol=0, atol=0)


def test_cuts_of_worked_example() -> None:
    """Check the example of `blocks/cuts.py`: 6 samples, rows in 2 chunks forward and 3 backward, dense parts in one."""
    cuts = cut((1, 1), (2, 3), 0, 6)
    samples = [list(range(6)[at[0]]) for at in cuts.rows_at]
    assert samples == [[0, 1], [2], [3], [4, 5]]
    assert [list(chunk) for chunk in cuts.row_chunks["forward"]] == [[0, 1], [2, 3]]
    assert [list(chunk) for chunk in cuts.row_chunks["backward"]] == [[3], [1, 2], [0]]
    assert cuts.dense_chunks["forward"] == cuts.dense_chunks["backward"] == [range(1)]
    assert cuts.rows_in_dense_at == cuts.rows_at and cuts.dense_parent == [0, 0, 0, 0]


@pytest.mark.parametrize("size", [0, 1, 5, 12])
@pytest.mark.parametrize("axis", [0, 1])
def test_each_element_is_in_one_micro_batch(size: int, axis: int) -> None:
    cuts = cut((2, 4), (3, 2), axis, size)
    whole = torch.arange(2 * size).view(size, 2) if axis == 0 else torch.arange(2 * size).view(2, size)
    for ats in (cuts.dense_at, cuts.rows_at):
        assert torch.equal(torch.cat([whole[at] for at in ats], axis), whole)
    for p, place in enumerate(cuts.dense_parent):
        assert p in cuts.row_children[place]
        assert torch.equal(whole[cuts.dense_at[place]][cuts.rows_in_dense_at[p]], whole[cuts.rows_at[p]])
