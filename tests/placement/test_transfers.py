"""Transfers between two placements: replicas, sums and bytes against the papers' definitions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.placement.baselines import predicted_volume
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import Transfer, chain_gathers, gather_transfers, link_bytes, reduce_transfers
from tests.placement.placements import GATHER, MATERIALISED, NODES, REDUCE, SHARDING, node_layouts, placements


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Placement, Placement, NodeLayout]:
    """Draw a placement and one within it, possibly with replicas."""
    where = draw(node_layouts)
    after = draw(placements(where))
    keep = np.random.default_rng(draw(st.integers(0, 2**32))).random(after.holds_EW.shape) < draw(
        st.sampled_from((0, 0.4))
    )
    return Placement.holding(after.owners, after.holds_EW & keep), after, where


def run_gather(before: Placement, transfers) -> np.ndarray:
    """Run all steps and return the holders [E, W]; a source must hold the expert before its step."""
    has_EW = before.holds_EW.copy()
    for step in sorted({one.step for one in transfers}):
        now = [one for one in transfers if one.step == step]
        assert all(has_EW[one.expert, one.source] for one in now), "sent before it came"
        for one in now:
            assert not has_EW[one.expert, one.target], "sent twice"
            has_EW[one.expert, one.target] = True
    return has_EW


def run_reduce(after: Placement, transfers, gradient_EW: np.ndarray) -> np.ndarray:
    """Run all steps and return each rank's sums [E, W]. A sent sum is removed, so that sending twice is detected."""
    sum_EW = np.where(after.holds_EW, gradient_EW, 0)
    for step in sorted({one.step for one in transfers}):
        now = [one for one in transfers if one.step == step]
        parts = [sum_EW[one.expert, one.source] for one in now]
        for one in now:
            sum_EW[one.expert, one.source] = 0
        for one, part in zip(now, parts, strict=True):
            sum_EW[one.expert, one.target] += part
    return sum_EW


@settings(deadline=None)
@given(pairs(), st.integers(0, 2**32))
def test_chained_gathers_equal_sequential_gathers(case, seed):
    """Two gathers merged into one hold both results, in no more steps, and gradients return along its edges."""
    before, after, node_layout = case
    keep_EW = np.random.default_rng(seed).random(after.holds_EW.shape) < 0.5
    between = Placement.holding(after.owners, before.holds_EW | (after.holds_EW & keep_EW))
    first, second = gather_transfers(before, between, node_layout), gather_transfers(between, after, node_layout)
    both = chain_gathers(first, second)
    assert (run_gather(before, both) == after.holds_EW).all() and len(both) == len(first) + len(second)
    steps = [max((one.step for one in of), default=-1) + 1 for of in (both, first, second)]
    assert steps[0] <= steps[1] + steps[2]
    gradient_EW = np.random.default_rng(seed).random(after.holds_EW.shape) * after.holds_EW
    summed_EW = run_reduce(after, reduce_transfers(both), gradient_EW)
    if before == before.sharding:
        owned_E = summed_EW[range(after.experts), after.owners]
        np.testing.assert_allclose(owned_E, gradient_EW.sum(axis=1))


def test_chained_gathers_of_docstring_example():
    """The docstring's example."""
    more = (Transfer(5, 1, 2, 0), Transfer(6, 0, 2, 0))
    assert chain_gathers((Transfer(5, 0, 1, 0),), more) == (
        Transfer(5, 0, 1, 0),
        Transfer(6, 0, 2, 0),
        Transfer(5, 1, 2, 1),
    )


@given(pairs())
def test_gather_delivers_all_replicas(case):
    before, after, where = case
    transfers = gather_transfers(before, after, where)
    np.testing.assert_array_equal(run_gather(before, transfers), after.holds_EW)
    assert list(transfers) == sorted(transfers, key=lambda one: (one.step, one.expert, one.source))


@settings(deadline=None)
@given(pairs())
def test_reduce_sums_gradients_at_owners(case):
    _, after, where = case
    back = reduce_transfers(gather_transfers(after.sharding, after, where))
    gradient_EW = np.random.default_rng(0).integers(-(2**40), 2**40, after.holds_EW.shape)
    expected_EW = np.zeros_like(gradient_EW)
    expected_EW[np.arange(after.experts), list(after.owners)] = (gradient_EW * after.holds_EW).sum(axis=1)
    np.testing.assert_array_equal(run_reduce(after, back, gradient_EW), expected_EW)
    sent_at = {(one.expert, one.source): one.step for one in back}
    assert len(sent_at) == len(back), "each rank sends its sum once"
    for one in back:
        assert sent_at.get((one.expert, one.target), 10**9) > one.step, "and after all has come"


@settings(deadline=None)
@given(pairs(), st.integers(1, 2**33))
def test_traffic_equals_predicted_volume(case, expert_bytes):
    before, after, where = case
    transfers = gather_transfers(before, after, where)
    volume = predicted_volume(before, after, where, expert_bytes)
    for found in (
        link_bytes(transfers, where, expert_bytes),
        link_bytes(reduce_transfers(transfers), where, expert_bytes),
    ):
        inter_sent, inter_received, intra_sent, intra_received = found.sum(axis=1)
        assert inter_sent + intra_sent == volume.total == len(transfers) * expert_bytes
        assert inter_sent == inter_received == volume.inter and intra_sent == intra_received
        assert found.max() <= volume.limit, "λS"
    travelling = {one.expert for one in transfers}
    assert volume.limit == len(travelling) * expert_bytes


@settings(deadline=None)
@given(pairs())
def test_expert_enters_each_node_once(case):
    before, after, where = case
    entries = Counter(
        (one.expert, where.of(one.target))
        for one in gather_transfers(before, after, where)
        if where.of(one.source) != where.of(one.target)
    )
    assert set(entries.values()) <= {1}


@settings(deadline=None)
@given(pairs())
def test_volume_equals_all_reduce_volume(case):
    """H2: for each expert on d ranks both collectives send 2(d − 1)/d of its bytes for each of these ranks."""
    _, after, where = case
    sharding = after.sharding
    both = link_bytes(gather_transfers(sharding, after, where), where, 1).sum()
    d_E = after.holds_EW.sum(axis=1)
    assert both == pytest.approx(sum(d * 2 * (d - 1) / d for d in d_E.tolist()))


def test_volume_tends_to_twice_lambda_s():
    for ranks in (2, 16, 256):
        sharding = Placement.even(ranks, 8)
        after = Placement.holding(sharding.owners, np.arange(8)[:, None] < np.full(ranks, 3))  # three experts are sent
        total = 2 * predicted_volume(sharding, after, NodeLayout(ranks, 1), 100).total
        assert total / ranks == pytest.approx(2 * 3 * 100 * (ranks - 1) / ranks)


def test_worked_example_satisfies_paper_definitions():
    """Section 3.1: P0 assigns each chunk to one device, P0 ⊆ P1; spRS produces the sum of all inputs; the two are
    symmetric; no device sends more than λS.
    """
    assert (SHARDING.holds_EW.sum(axis=1) == 1).all() and SHARDING.is_within(MATERIALISED)
    np.testing.assert_array_equal(run_gather(SHARDING, GATHER), MATERIALISED.holds_EW)
    # Gradients that ranks compute for expert 0, 1 and 2; an owner ends with the sum of its row.
    gradient_EW = np.array([[1, 10, 100, 1000], [0, 7, 0, 0], [30, 0, 4, 0]])
    left_EW = run_reduce(MATERIALISED, REDUCE, gradient_EW)
    assert left_EW.tolist() == [[1111, 0, 0, 0], [0, 7, 0, 0], [0, 0, 34, 0]]
    ways = {(one.expert, one.source, one.target) for one in GATHER}
    assert {(one.expert, one.target, one.source) for one in REDUCE} == ways
    travel = {one.expert for one in GATHER}
    size, share = 3 * 10, len(travel) / 3  # S of experts of 10 bytes, and λ
    for transfers in (GATHER, REDUCE):
        assert link_bytes(transfers, NODES, 10).max() <= share * size == 20


def test_worked_example_routes_and_bytes():
    """Choices that the paper leaves open: the routes, their order, and therefore the bytes of each rank."""
    assert gather_transfers(SHARDING, MATERIALISED, NODES) == GATHER
    assert reduce_transfers(GATHER) == REDUCE
    assert link_bytes(GATHER, NODES, 10).tolist() == [[10, 0, 10, 0]] * 3 + [[0, 10, 0, 10]]
    assert predicted_volume(SHARDING, MATERIALISED, NODES, 10) == (40, 20, 20)


def test_arrivals_are_spread_over_node_ranks():
    """Four experts of node 0 for all ranks of node 1: each of its ranks receives one from outside."""
    sharding = Placement(8, (0, 1, 2, 3))
    after = Placement(8, (0, 1, 2, 3), ((4, 5, 6, 7),) * 4)
    _, inter_received_W, *_ = link_bytes(gather_transfers(sharding, after, NodeLayout(8, 4)), NodeLayout(8, 4), 1)
    assert inter_received_W.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_equal_placements_need_no_transfers():
    assert gather_transfers(SHARDING, SHARDING, NODES) == reduce_transfers(()) == ()
    assert link_bytes((), NODES, 7).max() == 0
