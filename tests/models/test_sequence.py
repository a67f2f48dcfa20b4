"""Rows in the order of the ranks and in the order of the samples, against plain lists of (sample, position)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedmoe.models.sequence import TokenSplit


def split_on(rank: int, ranks: int, length: int) -> TokenSplit:
    topology: Any = SimpleNamespace(mp=SimpleNamespace(index=rank, size=ranks))
    return TokenSplit.of(length, topology)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 5, 6, 8])
@pytest.mark.parametrize("samples", [0, 1, 3])
def test_rows_by_rank_and_by_sample(ranks: int, length: int, samples: int) -> None:
    splits = [split_on(rank, ranks, length) for rank in range(ranks)]
    chunks = [chunk.tolist() for chunk in torch.arange(length).chunk(ranks)]
    own = [list(range(split.start, split.stop)) for split in splits]
    assert own == chunks + [[]] * (ranks - len(chunks))

    # What each rank holds, [rank, sample, position], and what attention sees: [sample, position].
    by_rank = [(sample, place) for part in own for sample in range(samples) for place in part]
    by_sample = sorted(by_rank)
    split = splits[-1]
    assert split.rows(samples) == [samples * len(part) for part in own]
    y_BLM = split.by_sample(torch.tensor(by_rank, dtype=torch.float64).view(-1, 2), samples)
    assert y_BLM.shape == (samples, length, 2)
    assert [tuple(row) for row in y_BLM.flatten(0, 1).tolist()] == by_sample
    assert [tuple(row) for row in split.by_rank(y_BLM).tolist()] == by_rank


def test_nothing_is_copied_on_one_rank_or_of_one_sample() -> None:
    for ranks, samples in ((1, 3), (4, 1)):
        split = split_on(0, ranks, 6)
        rows = torch.randn(6 * samples, 2)
        shaped = split.by_sample(rows, samples)
        assert shaped.data_ptr() == rows.data_ptr() == split.by_rank(shaped).data_ptr()
