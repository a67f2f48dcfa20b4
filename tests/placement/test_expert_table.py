"""The table of a rank's experts: rows of replicas, and the slots that rows are sent to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusedmoe.autograd.order import order
from fusedmoe.placement.expert_table import experts_after, sort_by_slot
from fusedmoe.placement.placement import Placement


def test_new_replicas_reuse_rows_of_dropped_replicas() -> None:
    """On rank 0 the replica of 3 uses the row of 2, and 4 follows; rank 1 keeps its own."""
    before, after = Placement.parse("0: 0 1 +2\n1: 2 3 4 +0"), Placement.parse("0: 0 1 +3 +4\n1: 2 3 4 +0 +1")
    assert experts_after([(0, 1, 2), (2, 3, 4, 0)], before, after) == [(0, 1, 3, 4), (2, 3, 4, 0, 1)]
    with pytest.raises(AssertionError, match="a row would have no expert"):
        experts_after([(0, 1, 2), (2, 3, 4, 0)], before, before.sharding)


def test_sort_by_slot_splits_rows_between_replicas() -> None:
    """Layout of `sort_by_slot`: three rows of expert 0, one of them for its replica, and four of expert 2."""
    layout = order(torch.tensor([[0], [0], [0], [2], [2], [2], [2]]), 3).exact()
    by_slot = sort_by_slot(layout, np.array([[2, 1], [0, 0], [0, 4]]), [[0, 1], [2, 0]])
    assert by_slot.counts == [2, 0, 4, 1]
    assert by_slot.source_N is not None and by_slot.source_N.tolist() == [0, 1, 3, 4, 5, 6, 2]
    assert by_slot.row_SK[:, 0].tolist() == [0, 1, 6, 2, 3, 4, 5]
