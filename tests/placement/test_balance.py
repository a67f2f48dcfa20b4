"""Exact balance: its rules on drawn placements, and its results against the optimum of an integer program."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from bench.placement.baselines import CLUSTER_A
from bench.placement.exact import fewest_copies, least_busiest, price_gap
from bench.placement.made_loads import make_loads
from fusedmoe.errors import ConfigError
from fusedmoe.placement.balance import Balance, balance, cheapest_balance
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import (
    EXCHANGES,
    PlacementCosts,
    exchange_s,
    exposed_s,
    gather_transfers,
    layer_s,
    transfers_s,
)
from fusedmoe.schedule.cost import TaskDurations
from fusedmoe.schedule.plan import Plan, task_name
from fusedmoe.schedule.policies.sparse_collectives import add_sparse_collectives
from fusedmoe.schedule.simulate import makespan
from tests.placement.placements import situations

auto_balance = partial(cheapest_balance, planning_s=0.0)

UGLY = ("as drawn", "nothing", "one expert", "one rank", "one row")


def zero_part_of_counts(tokens_WE: np.ndarray, kind: str) -> np.ndarray:
    """Draw token counts, at times with some ranks or experts zeroed."""
    kept_WE = np.zeros_like(tokens_WE)
    if kind == "as drawn":
        return tokens_WE
    if kind == "one expert":
        kept_WE[:, -1] = 1000 + tokens_WE[:, -1]
    elif kind == "one rank":
        kept_WE[0] = 1000 * tokens_WE[0]
    elif kind == "one row":
        kept_WE[-1, 0] = 1
    return kept_WE


def rows_sent_by_rank(found: Balance) -> np.ndarray:
    """Stack the rows [W, E, V] that each rank computes separately."""
    return np.stack([found.sent_from(rank) for rank in range(found.node_layout.num_ranks)])


def count_replicas(placement: Placement) -> int:
    return int(placement.extra_W().sum())


def assert_valid_balance(found: Balance, before: Placement, m: int, stays: bool = True) -> None:
    """Check a balance's rules in plain loops. `stays`: no replica is replaced by another."""
    node_layout, tokens_WE, sent_WEV = found.node_layout, found.tokens_WE, rows_sent_by_rank(found)
    assert before.is_within(found.placement) or not stays
    assert before.owners == found.placement.owners
    assert (found.placement.extra_W() <= np.maximum(m, before.extra_W())).all(), (
        "no rank holds more than it has room for"
    )
    assert (sent_WEV >= 0).all() and (sent_WEV.sum(axis=2) == tokens_WE).all(), "each row goes to one copy"
    assert (sent_WEV.sum(axis=0) == found.computed_EV).all()
    assert not sent_WEV.sum(axis=0)[~found.placement.holds_EW].any(), "to ranks that hold the expert"
    for expert in range(before.experts):
        for node in range(node_layout.num_nodes):
            inside = range(node * node_layout.per_node, (node + 1) * node_layout.per_node)
            for rank in inside:
                kept = min(tokens_WE[rank, expert], found.computed_EV[expert, rank])
                assert sent_WEV[rank, expert, rank] == kept, "rows stay on their rank if it computes as many"
            stay = sum(sent_WEV[a, expert, b] for a in inside for b in inside)
            rows, room = (sum(of[r] for r in inside) for of in (tokens_WE[:, expert], found.computed_EV[expert]))
            assert stay == min(rows, room), "and on their node"


@settings(deadline=None)
@given(situations(), st.integers(0, 4), st.sampled_from((1.0, 1.1, 2.0)), st.sampled_from(UGLY))
def test_balance_is_valid_and_deterministic(case, m, level, kind):
    placement, tokens_WE, node_layout = case
    tokens_WE = zero_part_of_counts(tokens_WE, kind)
    found = balance(placement, tokens_WE, node_layout, m, level)
    assert_valid_balance(found, placement, m)
    again = balance(placement, tokens_WE, node_layout, m, level)
    assert again.placement == found.placement and (again.computed_EV == found.computed_EV).all(), "a pure function"


@settings(deadline=None)
@given(situations(), st.sampled_from((1.0, 1.1, 2.0)), st.sampled_from(UGLY))
def test_enough_slots_reduce_max_load_to_mean(case, level, kind):
    placement, tokens_WE, node_layout = case
    tokens_WE = zero_part_of_counts(tokens_WE, kind)
    found, rows = balance(placement, tokens_WE, node_layout, placement.experts, level), int(tokens_WE.sum())
    assert found.max_rank_rows <= max(-(-rows // node_layout.num_ranks), level * rows / node_layout.num_ranks)
    new = count_replicas(found.placement) - count_replicas(placement)
    assert new < node_layout.num_ranks + placement.experts, "a copy fills a rank, or takes what an expert has too much"


@settings(deadline=None)
@given(situations(), st.integers(0, 3), st.sampled_from(UGLY))
def test_split_over_replicas_minimizes_max_load(case, m, kind):
    placement, tokens_WE, node_layout = case
    found = balance(placement, zero_part_of_counts(tokens_WE, kind), node_layout, m)
    load_E = found.tokens_WE.sum(axis=0)
    assert m or found.placement == placement
    assert loads_fit(found.placement, load_E, found.max_rank_rows)
    assert found.max_rank_rows == 0 or not loads_fit(found.placement, load_E, found.max_rank_rows - 1)


def loads_fit(placement: Placement, load_E: np.ndarray, most: int) -> bool:
    """Whether ranks of at most `most` rows each can compute all rows: a maximum flow from experts to ranks."""
    experts, ranks = placement.experts, placement.num_ranks
    source, sink = experts + ranks, experts + ranks + 1
    edges = [(source, e, load_E[e]) for e in range(experts)]
    edges += [(e, experts + r, load_E[e]) for e, r in zip(*np.nonzero(placement.holds_EW), strict=True)]
    edges += [(experts + r, sink, most) for r in range(ranks)]
    starts, ends, capacities = zip(*edges, strict=True)
    graph = csr_array((np.array(capacities, dtype=np.int32), (starts, ends)), shape=(sink + 1, sink + 1))
    return bool(maximum_flow(graph, source, sink).flow_value == load_E.sum())


@settings(deadline=None)
@given(situations(replicas=False), st.integers(1, 4), st.sampled_from(UGLY))
def test_max_load_bound_with_few_slots(case, m, kind):
    placement, tokens_WE, node_layout = case
    tokens_WE = zero_part_of_counts(tokens_WE, kind)
    mean, most_owned = -(-int(tokens_WE.sum()) // node_layout.num_ranks), np.bincount(placement.owners).max()
    assert balance(placement, tokens_WE, node_layout, m).max_rank_rows <= (1 + most_owned / m) * mean


@pytest.mark.slow
def test_balance_is_near_integer_program_optimum():
    """Compare maximum load and replica count with the optimum in 100 small cases."""
    rng, more, busier = np.random.default_rng(0), Counter[int](), []
    for case in range(100):
        (ranks, experts), m = ((4, 6), (6, 9))[case % 5 == 0], int(rng.integers(1, 4))
        tokens_WE = rng.multinomial(200, rng.dirichlet(np.full(experts, 0.4)), ranks)
        owners = Placement.even(ranks, experts).owners if case % 2 else tuple(rng.integers(0, ranks, experts))
        placement = Placement(ranks, owners)
        found = balance(placement, tokens_WE, NodeLayout(ranks, 2), m, (1.0, 1.1)[case % 3 == 0])
        load_E = tokens_WE.sum(axis=0)
        if case % 3:
            busier.append(found.max_rank_rows / least_busiest(placement, load_E, m))
        more[count_replicas(found.placement) - fewest_copies(placement, load_E, m, found.max_rank_rows)] += 1
    assert max(busier) < 1.2 and np.mean(busier) < 1.005
    assert more[0] >= 95 and max(more) <= 1


@pytest.mark.slow
def test_cheapest_balance_time_is_near_optimum():
    gaps = [price_gap(seed) for seed in range(12)]
    assert min(gaps) > -1e-6, "nothing is faster than the best"
    assert np.mean(gaps) < 0.12


def test_one_slot_balances_64_ranks_exactly():
    tokens_WE = make_loads(1, 1, 64, 256).tokens_ILWE[0, 0]
    found = balance(Placement.even(64, 256), tokens_WE, NodeLayout(64, 8), 1)
    assert found.max_rank_rows == tokens_WE.sum() / 64
    # Each of the 63 other ranks needs a replica.
    assert count_replicas(found.placement) <= 66


def test_balance_of_docstring_example():
    """The docstring's example."""
    found = balance(Placement.even(2, 2), [[5, 1], [5, 1]], NodeLayout(2, 1), 1)
    assert found.placement == Placement.parse("0: 0\n1: 1 +0")
    assert found.computed_EV.tolist() == [[6, 4], [0, 2]]
    assert found.sent_from(0).tolist() == [[5, 0], [0, 1]] and found.sent_from(1).tolist() == [[1, 4], [0, 1]]


@settings(deadline=None)
@given(situations(most=400), st.integers(0, 3))
def test_rank_loads_and_link_rows_equal_definition(case, m):
    placement, tokens_WE, node_layout = case
    found = balance(placement, tokens_WE, node_layout, m)
    flow_WV, tokens = rows_sent_by_rank(found).sum(axis=1), found.load
    node_W = np.arange(node_layout.num_ranks) // node_layout.per_node
    inter_WV = np.where(node_W[:, None] == node_W, 0, flow_WV)
    intra_WV = flow_WV - inter_WV - np.diag(np.diag(flow_WV))
    assert (tokens.work_W == flow_WV.sum(axis=0)).all() and (tokens.inter_node_received_W == inter_WV.sum(axis=0)).all()
    for most, part_WV in ((tokens.max_inter_node_tokens, inter_WV), (tokens.max_intra_node_tokens, intra_WV)):
        assert most == max(part_WV.sum(axis=0).max(), part_WV.sum(axis=1).max())


def test_cheapest_balance_replicates_only_if_cheaper():
    trace, node_layout, even = make_loads(1, 1, 16, 32), NodeLayout(16, 4), Placement.even(16, 32)
    tokens_WE = trace.tokens_ILWE[0, 0]
    found = cheapest_balance(even, tokens_WE, node_layout, 2, CLUSTER_A)
    assert_valid_balance(found, even, 2)
    seconds = layer_s(found.load, CLUSTER_A) + exposed_s(even, found.placement, node_layout, CLUSTER_A)
    without = balance(even, tokens_WE, node_layout, 0)
    assert seconds < layer_s(without.load, CLUSTER_A) / 2
    dear = replace(CLUSTER_A, expert_bytes=10**12)
    assert cheapest_balance(even, tokens_WE, node_layout, 2, dear).placement == even
    light = replace(CLUSTER_A, expert_bytes=0, token_bytes=0)
    assert cheapest_balance(even, tokens_WE, node_layout, 2, light).max_rank_rows == tokens_WE.sum() / 16


# Rows, rows on links, or both cost time; replicas may cost more.
COSTS = (
    PlacementCosts(1.0, 1, 1, 1, 1.0, 10.0),
    PlacementCosts(1.0, 0, 0, 0, 1.0, 1.0),
    PlacementCosts(0.0, 1, 1, 1, 1.0, 10.0),
    PlacementCosts(1.0, 1, 100, 100, 1.0, 10.0),
    PlacementCosts(0.0, 0, 1, 1, 1.0, 1.0),
)


def auto_balance_s(found: Balance, before: Placement, costs: PlacementCosts) -> float:
    """Compute the seconds by definition: new replicas are sent to the placement, and their gradients back."""
    kept = Placement.holding(before.owners, before.holds_EW & found.placement.holds_EW)
    return layer_s(found.load, costs) + exposed_s(kept, found.placement, found.node_layout, costs)


@settings(deadline=None)
@given(situations(), st.integers(0, 3), st.sampled_from(COSTS), st.sampled_from(UGLY))
def test_auto_balance_never_increases_time(case, m, costs, kind):
    before, tokens_WE, node_layout = case
    tokens_WE = zero_part_of_counts(tokens_WE, kind)
    found = auto_balance(before, tokens_WE, node_layout, m, costs)
    assert_valid_balance(found, before, m, stays=False)
    nearest = auto_balance(before, tokens_WE, node_layout, m, costs, planning_s=1e12)
    assert nearest.placement == before
    assert auto_balance_s(found, before, costs) <= auto_balance_s(nearest, before, costs) * (1 + 1e-12)
    if m == 0:
        assert found.placement == before
    gone_EW = before.holds_EW & ~found.placement.holds_EW
    relays = {(one.expert, one.source) for one in gather_transfers(before.sharding, before, node_layout)}
    for expert, rank in np.argwhere(gone_EW).tolist():
        assert (expert, rank) not in relays and not found.computed_EV[expert, rank]
        assert found.placement.extra_W()[rank] >= before.extra_W()[rank], "its place has another"
    again = auto_balance(before, tokens_WE, node_layout, m, costs)
    assert again.placement == found.placement and (again.computed_EV == found.computed_EV).all(), "a pure function"


def test_auto_balance_keeps_placement_for_even_loads():
    trace = make_loads(1, 4, 16, 32, skew=0, spread=0, drift=0, jitter=0, difference=0)
    for tokens_WE in trace.tokens_ILWE[0]:
        found = auto_balance(Placement.even(16, 32), tokens_WE, NodeLayout(16, 4), 2, CLUSTER_A)
        assert found.placement == Placement.even(16, 32)
    found = auto_balance(Placement.even(4, 4), np.full((4, 4), 7), NodeLayout(4, 2), 2, COSTS[0])
    assert found.sent_from(1).tolist() == np.diag([7] * 4).tolist() or found.max_rank_rows == 28


def test_auto_balance_replaces_underused_replicas():
    before = Placement.parse("0: 0 +1\n1: 1 +2\n2: 2 +3\n3: 3 +1")
    tokens_WE = np.array([[100, 1, 1, 1]] * 4)
    found = auto_balance(before, tokens_WE, NodeLayout(4, 2), 1, COSTS[1])
    assert found.max_rank_rows == 103 and found.placement.replicas[0] == (1, 2, 3)
    assert found.placement.extra_W().tolist() == [1, 1, 1, 1], "rank 0's copy, for which nothing else comes, stays"
    # Exact balance does the same, and keeps replicas in slots that no new replica needs.
    exact = cheapest_balance(before, tokens_WE, NodeLayout(4, 2), 1, COSTS[1])
    assert exact.placement == found.placement and exact.max_rank_rows == 103
    assert cheapest_balance(before, tokens_WE, NodeLayout(4, 2), 0, COSTS[1]).placement == before


def test_replicas_reduce_inter_node_rows():
    """Loads are even, and half of the rows cross nodes: ten each way, four times, or one replica and its gradient."""
    tokens_WE, even = [[10, 10], [10, 10]], Placement.even(2, 2)
    for expert_bytes, copied in ((19, True), (21, False)):
        costs = PlacementCosts(1.0, 1, expert_bytes, 0, 1.0, 1.0)
        found = cheapest_balance(even, tokens_WE, NodeLayout(2, 1), 1, costs)
        assert found.placement == (Placement.parse("0: 0 +1\n1: 1 +0") if copied else even)
        assert found.load.max_inter_node_tokens == (0 if copied else 10) and found.max_rank_rows == 20
    # Experts with the most rows are placed first, on the least busy rank of the node; rank 1 has no free slot left.
    before = Placement.parse("0: 0 1\n1: 2 3 +0\n2: 4 5\n3: 6 7")
    tokens_WE = np.tile([[5, 90, 70, 3, 4, 4, 4, 4]], (4, 1))
    costs = PlacementCosts(1e-3, 1, 1, 0, 1.0, 1e3)
    found = cheapest_balance(before, tokens_WE, NodeLayout(4, 2), 1, costs)
    assert {found.placement.replicas[1], found.placement.replicas[2]} == {(2,), (3,)}


def test_exposed_time_of_docstring_example():
    """Docstring example: a replica of expert 0 takes 5 s, and one that was there before 3 s."""
    before, after = Placement.parse("0: 0 2\n1: 1"), Placement.parse("0: 0 2\n1: 1 +0")
    tokens_WE, computed_EV = np.array([[4, 2, 2], [2, 1, 0]]), np.array([[4, 2], [0, 3], [2, 0]])
    costs, found = PlacementCosts(1.0, 1, 5, 0, 1.0, 1.0), Balance(after, tokens_WE, computed_EV, NodeLayout(2, 1))
    assert exposed_s(before, found.placement, found.node_layout, costs) == 5 + 5
    assert exposed_s(before, found.placement, found.node_layout, costs, hidden_s=3.0) == 5 + 2
    assert exposed_s(before, found.placement, found.node_layout, costs, hidden_s=5.0) == 5
    assert exposed_s(after, found.placement, found.node_layout, costs) == 0
    # Gradients of the previous replicas use 5 s of the hidden time: one more from rank 0 to rank 1.
    two = Placement.parse("0: 0 2\n1: 1 +0 +2")
    more = Balance(two, tokens_WE, computed_EV, NodeLayout(2, 1))
    assert exposed_s(after, more.placement, more.node_layout, costs, hidden_s=8.0) == 5 + 2


# A layer's forward and backward pass, with the tasks after it.
STEP = """
    compute: f1.E0 b1.E0 b1.A b0.E0
    inter: f1.D0 f1.C0 b1.D0 b1.C0 b0.D0 b0.C0
"""


def simulated_exposed_s(before: Placement, found: Balance, costs: PlacementCosts, hidden_s: float) -> float:
    """Seconds that new replicas add to simulated plans: the maximum over ranks of the wait for their own replicas."""
    plan, after, node_layout = Plan.parse(STEP), found.placement, found.node_layout
    new_EV = after.holds_EW & ~before.holds_EW
    had_s, there_s = (
        transfers_s(gather_transfers(old, new, node_layout), node_layout, costs, costs.expert_bytes)
        for old, new in ((before.sharding, before), (before, after))
    )
    rows_s, forward_W = exchange_s(found.load, costs) / EXCHANGES, found.computed_EV.sum(axis=0) * costs.token_s / 3
    replicated, exposed = add_sparse_collectives(plan, [1]), [0.0]
    for rank in np.flatnonzero(new_EV.any(axis=0)).tolist():
        rows = {"f1.D0": rows_s, "f1.E0": forward_W[rank], "f1.C0": rows_s, "b1.A": hidden_s}
        without, with_them = (
            makespan(
                replicated, TaskDurations({task: (rows | sparse).get(task_name(task), 0.0) for task in replicated})
            )
            for sparse in ({"b1.SRS": had_s}, {"f1.SAG": there_s, "b1.SRS": had_s + there_s})
        )
        exposed.append(with_them - without)
    return max(exposed)


@settings(deadline=None)
@given(situations(), st.integers(1, 3), st.sampled_from(COSTS), st.sampled_from((0.0, 1.0, 30.0)), st.integers(1, 9))
def test_exposed_time_equals_simulation(case, m, costs, hidden_s, dear):
    before, tokens_WE, node_layout = case
    # Gradients of new replicas follow those of the previous replicas on the same link: the bytes add up.
    costs = replace(costs, token_s=dear * costs.token_s, intra_bytes_s=1e9)
    found = balance(before, tokens_WE, node_layout, m)
    whole_s = exposed_s(before, found.placement, node_layout, costs)
    assert exposed_s(before, found.placement, found.node_layout, replace(costs, token_s=0.0)) == pytest.approx(whole_s)
    priced_s = exposed_s(before, found.placement, found.node_layout, costs, hidden_s)
    assert -1e-12 <= priced_s <= exposed_s(before, found.placement, found.node_layout, costs) <= whole_s + 1e-9
    if hidden_s:  # else previous replicas have no effect
        assert priced_s == pytest.approx(simulated_exposed_s(before, found, costs, hidden_s), rel=1e-9, abs=1e-9)


def test_auto_balance_of_docstring_example():
    """Docstring example: 20 rows, half of which take as long as one replica's round trip at 5 bytes/s."""
    before, tokens_WE = Placement.parse("0: 0 +1\n1: 1"), [[10, 0], [10, 0]]
    for expert_bytes, copied in ((23, True), (26, False)):
        costs = PlacementCosts(1.0, 0, expert_bytes, 0, 5.0, 5.0)
        found = auto_balance(before, tokens_WE, NodeLayout(2, 1), 1, costs)
        assert (found.placement.replicas == ((1,), (0,))) == copied
        assert found.max_rank_rows == (10 if copied else 20)


@pytest.mark.parametrize(
    ("tokens_WE", "ranks", "m", "level"),
    [
        (np.ones((4, 3), dtype=int), 4, 1, 1.0),
        (np.ones((4, 4), dtype=int), 8, 1, 1.0),
        (np.ones((4, 4)), 4, 1, 1.0),
        (-np.ones((4, 4), dtype=int), 4, 1, 1.0),
        (np.full((4, 4), 2**28), 4, 1, 1.0),
        (np.ones((4, 4), dtype=int), 4, -1, 1.0),
        (np.ones((4, 4), dtype=int), 4, 1, 0.9),
        (np.ones((4, 4), dtype=int), 4, 1, np.inf),
        (np.ones((4, 4), dtype=int), 4, 1, np.nan),
    ],
)
def test_balance_rejects_invalid_arguments(tokens_WE, ranks, m, level):
    with pytest.raises(ConfigError, match="balance"):
        balance(Placement.even(4, 4), tokens_WE, NodeLayout(ranks, 2), m, level)
