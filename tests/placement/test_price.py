"""The replicas that tokens are sent to, and the cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.errors import ConfigError
from fusedmoe.placement.hecate import calibrate, materialise
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import (
    PlacementCosts,
    Transfer,
    exchange_s,
    exposed_s,
    layer_s,
    placement_load,
    split_tokens,
    transfers_s,
)
from tests.placement.placements import MATERIALISED, NODES, situations


@settings(deadline=None)
@given(situations())
def test_dispatch_equals_definition(case):
    placement, tokens_WE, node_layout = case
    sent_WEV = split_tokens(tokens_WE, placement, node_layout)
    assert sent_WEV.dtype == np.int64 and (sent_WEV >= 0).all()
    np.testing.assert_array_equal(sent_WEV.sum(axis=2), tokens_WE)
    for expert in range(placement.experts):
        copies = {placement.owners[expert], *placement.replicas[expert]}
        pools: dict[frozenset[int], np.ndarray] = {}
        for rank in range(node_layout.num_ranks):
            near = {copy for copy in copies if node_layout.of(copy) == node_layout.of(rank)}
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
    assert sent_WEV.sum() == tokens_WE.sum()


def test_dispatch_prefers_local_replicas():
    # Expert 1 is on rank 1 only; expert 2 on ranks 0 and 2; expert 0 everywhere.
    sent_WEV = split_tokens([[5, 3, 7], [5, 4, 7], [5, 1, 7], [5, 0, 7]], MATERIALISED, NODES)
    assert sent_WEV[:, 0].tolist() == np.diag([5, 5, 5, 5]).tolist()
    assert sent_WEV[:, 1].tolist() == [[0, 3, 0, 0], [0, 4, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert sent_WEV[:, 2].tolist() == [[7, 0, 0, 0], [7, 0, 0, 0], [0, 0, 7, 0], [0, 0, 7, 0]]


def test_remainders_continue_after_previous_rank():
    # Ranks 2 to 7 have no replica on their nodes: one token each, over ranks 0 and 1.
    placement = Placement(8, (0,), ((1,),))
    sent_WEV = split_tokens([[1]] * 8, placement, NodeLayout(8, 2))
    assert sent_WEV.sum(axis=(0, 1)).tolist() == [4, 4, 0, 0, 0, 0, 0, 0]
    sent_WEV = split_tokens([[0], [0], [3], [0], [2], [0], [0], [0]], placement, NodeLayout(8, 2))
    assert sent_WEV[2, 0].tolist()[:2] == [2, 1] and sent_WEV[4, 0].tolist()[:2] == [1, 1]


def test_replicas_on_one_node_share_local_and_remote_rows():
    sent_WEV = split_tokens([[0], [0], [1], [1], [1], [1]], Placement(6, (0,), ((1,),)), NodeLayout(6, 3))
    assert sent_WEV.sum(axis=(0, 1)).tolist() == [2, 2, 0, 0, 0, 0]
    sent_WEV = split_tokens([[0], [0], [1], [1], [0], [0]], Placement(6, (0,), ((1,),)), NodeLayout(6, 3))
    assert sent_WEV.sum(axis=(0, 1)).tolist() == [1, 1, 0, 0, 0, 0]


def test_dispatch_sums_64_bit_counts():
    tokens = np.full((4, 3), 2**40 + 1)
    assert split_tokens(tokens, MATERIALISED, NODES).sum() == 12 * (2**40 + 1)
    small = np.full((4, 3), 200, dtype=np.uint8)
    assert split_tokens(small, MATERIALISED, NODES).sum() == 2400


COSTS = PlacementCosts(
    token_s=1.0, token_bytes=10, expert_bytes=100, state_bytes=600, inter_bytes_s=10.0, intra_bytes_s=100.0
)


@settings(deadline=None)
@given(situations())
def test_load_by_definition(case):
    placement, tokens_WE, node_layout = case
    found = placement_load(tokens_WE, placement, node_layout)
    sent_WEV = split_tokens(tokens_WE, placement, node_layout)
    inter, intra = np.zeros((2, node_layout.num_ranks), int), np.zeros((2, node_layout.num_ranks), int)
    for source in range(node_layout.num_ranks):
        for target in range(node_layout.num_ranks):
            if source != target:
                kind = intra if node_layout.of(source) == node_layout.of(target) else inter
                kind[0, source] += sent_WEV[source, :, target].sum()
                kind[1, target] += sent_WEV[source, :, target].sum()
    assert found.work_W.tolist() == sent_WEV.sum(axis=(0, 1)).tolist()
    assert found.inter_node_received_W.tolist() == inter[1].tolist()
    assert (found.max_inter_node_tokens, found.max_intra_node_tokens) == (inter.max(), intra.max())
    seconds = 4 * max(inter.max() * 10 / 10.0, intra.max() * 10 / 100.0) + found.work_W.max()
    assert layer_s(found, COSTS) == pytest.approx(seconds)


def test_layer_time_of_worked_example():
    # All four ranks send 3 tokens to rank 0: 6 from the other node, 3 from its own.
    found = placement_load([[3]] * 4, Placement(4, (0,)), NodeLayout(4, 2))
    assert found.work_W.tolist() == [12, 0, 0, 0]
    assert (found.max_inter_node_tokens, found.max_intra_node_tokens) == (6, 3)
    assert exchange_s(found, COSTS) == 4 * 6 * 10 / 10 and layer_s(found, COSTS) == 24 + 12
    assert transfers_s([Transfer(0, 0, 2, 0), Transfer(1, 0, 1, 0)], NodeLayout(4, 2), COSTS, 100) == 10.0
    assert transfers_s([], NodeLayout(4, 2), COSTS, 100) == 0.0


def test_placement_costs_reject_invalid_values():
    for change in ({"token_s": -1.0}, {"inter_bytes_s": 0.0}, {"intra_bytes_s": float("nan")}, {"state_bytes": -1}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            replace(COSTS, **change)


@settings(deadline=None)
@given(situations(), st.integers(0, 4))
def test_calibrate_reduces_time_or_keeps_placement(case, m):
    placement, tokens_WE, node_layout = case
    after = calibrate(placement, tokens_WE, node_layout, m, COSTS)
    assert placement.is_within(after)
    assert (after.extra_W() <= np.maximum(m, placement.extra_W())).all()
    if after != placement:
        before_s, after_s = (layer_s(placement_load(tokens_WE, one, node_layout), COSTS) for one in (placement, after))
        assert after_s + exposed_s(placement, after, node_layout, COSTS) < before_s


def test_calibrate_adds_unpredicted_hot_expert():
    node_layout, even = NodeLayout(4, 2), Placement.even(4, 8)
    tokens_WE = np.ones((4, 8), dtype=int)
    tokens_WE[:, 6] = 200  # not predicted
    predicted = materialise(even, [90, 1, 50, 1, 1, 1, 1, 1], node_layout, 2, 1)
    after = calibrate(predicted, tokens_WE, node_layout, 2, COSTS)
    assert (
        predicted.extra_W().tolist() == [1, 1, 1, 1]
        and after.replicas[6] == (0, 1, 2)
        and after.replicas[0] == predicted.replicas[0]
    )
    slow = replace(COSTS, expert_bytes=10**6)
    assert calibrate(predicted, tokens_WE, node_layout, 2, slow) == predicted, "its own communication counts"
    assert calibrate(predicted, tokens_WE, node_layout, 1, COSTS) == predicted, "no memory is left"


def test_gather_time_includes_backward():
    even, node_layout = Placement.even(4, 4), NodeLayout(4, 2)
    after = materialise(even, [9, 0, 0, 0], node_layout, 1, 1)
    assert exposed_s(even, after, node_layout, COSTS) == 2 * 100 / 10.0
    assert exposed_s(even, even, node_layout, COSTS) == 0.0
