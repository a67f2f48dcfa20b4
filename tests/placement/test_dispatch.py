from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from fusedmoe.errors import ConfigError
from fusedmoe.placement.dispatch import dispatch, flows_WV, work_W
from fusedmoe.placement.placement import Nodes, Placement
from tests.placement.placements import MATERIALISED, NODES, situations


@settings(deadline=None)
@given(situations())
def test_by_definition(case):
    placement, tokens_WE, nodes = case
    sent_WEV = dispatch(tokens_WE, placement, nodes)
    assert sent_WEV.dtype == np.int64 and (sent_WEV >= 0).all()
    np.testing.assert_array_equal(sent_WEV.sum(axis=2), tokens_WE)
    for expert in range(placement.experts):
        copies = {placement.owners[expert], *placement.replicas[expert]}
        pools: dict[frozenset[int], np.ndarray] = {}
        for rank in range(nodes.ranks):
            near = {copy for copy in copies if nodes.of(copy) == nodes.of(rank)}
            allowed = {rank} if rank in copies else near or copies
            sent_V = sent_WEV[rank, expert]
            assert set(np.flatnonzero(sent_V).tolist()) <= allowed
            parts = sent_V[sorted(allowed)]
            assert parts.max() - parts.min() <= 1, "evenly"
            if rank not in copies:
                pools[frozenset(allowed)] = pools.get(frozenset(allowed), 0) + sent_V
        for allowed, together_V in pools.items():
            if not any(other != allowed and other & allowed for other in pools):
                parts = together_V[sorted(allowed)]
                assert parts.max() - parts.min() <= 1, "ranks with the same choice are even together"
    np.testing.assert_array_equal(work_W(sent_WEV), sent_WEV.sum(axis=(0, 1)))
    assert flows_WV(sent_WEV).sum() == tokens_WE.sum()


def test_by_hand():
    # Expert 1 is on rank 1 only; expert 2 on ranks 0 and 2; expert 0 everywhere.
    sent_WEV = dispatch([[5, 3, 7], [5, 4, 7], [5, 1, 7], [5, 0, 7]], MATERIALISED, NODES)
    assert sent_WEV[:, 0].tolist() == np.diag([5, 5, 5, 5]).tolist()
    assert sent_WEV[:, 1].tolist() == [[0, 3, 0, 0], [0, 4, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert sent_WEV[:, 2].tolist() == [[7, 0, 0, 0], [7, 0, 0, 0], [0, 0, 7, 0], [0, 0, 7, 0]]


def test_what_does_not_divide_goes_on_where_the_rank_before_left_off():
    # Ranks 2 to 7 have no copy on their nodes: one token each, over ranks 0 and 1.
    placement = Placement(8, (0,), ((1,),))
    sent_WEV = dispatch([[1]] * 8, placement, Nodes(8, 2))
    assert work_W(sent_WEV).tolist() == [4, 4, 0, 0, 0, 0, 0, 0]
    sent_WEV = dispatch([[0], [0], [3], [0], [2], [0], [0], [0]], placement, Nodes(8, 2))
    assert sent_WEV[2, 0].tolist()[:2] == [2, 1] and sent_WEV[4, 0].tolist()[:2] == [1, 1]


def test_copies_on_one_node_are_the_same_choice_there_and_elsewhere():
    sent_WEV = dispatch([[0], [0], [1], [1], [1], [1]], Placement(6, (0,), ((1,),)), Nodes(6, 3))
    assert work_W(sent_WEV).tolist() == [2, 2, 0, 0, 0, 0]
    sent_WEV = dispatch([[0], [0], [1], [1], [0], [0]], Placement(6, (0,), ((1,),)), Nodes(6, 3))
    assert work_W(sent_WEV).tolist() == [1, 1, 0, 0, 0, 0]


def test_counts_past_32_bits():
    tokens = np.full((4, 3), 2**40 + 1)
    assert dispatch(tokens, MATERIALISED, NODES).sum() == 12 * (2**40 + 1)
    small = np.full((4, 3), 200, dtype=np.uint8)
    assert dispatch(small, MATERIALISED, NODES).sum() == 2400


@pytest.mark.parametrize(
    "tokens_WE", [[[1, 2, 3]], [[1, 2, 3, 4]] * 4, [[1.0, 2.0, 3.0]] * 4, [[1, -2, 3]] * 4, [[True, True, False]] * 4]
)
def test_what_is_refused(tokens_WE):
    with pytest.raises(ConfigError, match="dispatch"):
        dispatch(tokens_WE, MATERIALISED, NODES)
