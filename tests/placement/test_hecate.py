"""Hecate's algorithms: by hand, by their rules on drawn placements, and against the optimal placements."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.placement.baselines import CLUSTER_A, Decision, Move, Situation, expert_parallelism, hecate, moves
from bench.placement.exact import best_placement
from bench.placement.made_loads import make_loads
from bench.placement.replay import replay
from fusedmoe.errors import ConfigError
from fusedmoe.placement.hecate import is_uneven, materialise, max_owned_experts, overlap_degree, predict_load, reshard
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.replica_search import accept_if_faster, improve
from fusedmoe.placement.traffic import PlacementCosts, layer_s, placement_load
from tests.marks import slowly
from tests.placement.placements import node_layouts, situations

LIMITS = st.tuples(st.integers(0, 8), st.integers(0, 5))


@settings(deadline=None)
@given(situations(), LIMITS)
def test_materialise_respects_t_and_m(case, limits):
    placement, tokens_WE, node_layout = case
    t, m = limits
    after = materialise(placement, tokens_WE.sum(axis=0), node_layout, t, m)
    assert placement.is_within(after) and after.owners == placement.owners
    new_W = after.extra_W() - placement.extra_W()
    assert (after.extra_W() <= np.maximum(m, placement.extra_W())).all(), "no rank exceeds its slots"
    assert (new_W <= t).all()
    travelling = [e for e in range(placement.experts) if after.replicas[e] != placement.replicas[e]]
    assert len(travelling) <= t


@settings(deadline=None)
@given(situations(replicas=False), st.integers(0, 8))
def test_enough_slots_replicate_top_experts_everywhere(case, t):
    placement, tokens_WE, node_layout = case
    load_E = tokens_WE.sum(axis=0)
    after = materialise(placement, load_E, node_layout, t, t + 1)
    assert after == materialise(placement, load_E, node_layout, t, t)
    top = sorted(range(placement.experts), key=lambda e: (-load_E[e], e))[:t]
    for expert in range(placement.experts):
        assert after.holds_EW[expert].sum() == (node_layout.num_ranks if expert in top else 1)


@settings(deadline=None)
@given(situations(replicas=False), LIMITS)
def test_replica_counts_are_proportional_to_load(case, limits):
    """Check the number of replicas of each expert; a node without the expert receives it first."""
    placement, tokens_WE, node_layout = case
    t, m = min(limits[0], placement.experts), limits[1]
    if m >= t:
        return
    load_E = tokens_WE.sum(axis=0)
    after = materialise(placement, load_E, node_layout, t, m)
    top = sorted(range(placement.experts), key=lambda e: (-load_E[e], e))[:t]
    left, slots = int(sum(load_E[e] for e in top)), node_layout.num_ranks * m
    free_W = np.full(node_layout.num_ranks, m)
    for expert in top:
        wanted = min(math.floor(slots * load_E[expert] / left + 0.5), node_layout.num_ranks - 1) if left else 0
        others = [rank for rank in range(node_layout.num_ranks) if rank != placement.owners[expert]]
        got = after.replicas[expert]
        assert len(got) == min(wanted, sum(free_W[rank] > 0 for rank in others))
        lacking = {node_layout.of(r) for r in others if free_W[r] > 0} - {node_layout.of(placement.owners[expert])}
        covered = {node_layout.of(rank) for rank in got} - {node_layout.of(placement.owners[expert])}
        assert len(covered) == min(len(got), len(lacking)), "nodes that lack it come first"
        free_W[list(got)] -= 1
        slots, left = slots - len(got), left - int(load_E[expert])


def test_materialise_of_worked_example():
    # Four slots for loads 60, 30 and 10: round(4·0.6) = 2, round(2·30/40) = 2, none are left.
    after = materialise(Placement.even(4, 4), [60, 30, 10, 0], NodeLayout(4, 2), t=3, m=1)
    # Expert 0: node 1 lacks it, and rank 3 has less work there than rank 2. Then both nodes have it; node 0 has two
    # free slots left, node 1 one. Expert 1 gets the last two.
    assert after == Placement.parse("0: 0 +1\n1: 1 +0\n2: 2 +1\n3: 3 +0")


def test_ties_place_replica_on_less_loaded_rank():
    # One replica of expert 0, on node 1; rank 2 owns the second largest.
    after = materialise(Placement.even(4, 4), [50, 0, 40, 0], NodeLayout(4, 2), t=2, m=1)
    assert 3 in after.replicas[0]


def test_existing_replicas_reduce_load_per_replica():
    placement = Placement.parse("0: 0\n1: 1 +0\n2: 2 +0\n3: +0")
    after = materialise(placement, [80, 30, 25], NodeLayout(4, 2), t=1, m=2)
    assert after.replicas == ((1, 2, 3), (0, 2, 3), ()), "80 over four copies are less than 30 for one"


def test_materialise_keeps_placement_without_load_or_slots():
    even = Placement.even(4, 8)
    for load_E, t, m in (([0] * 8, 3, 1), ([1] * 8, 0, 5), ([1] * 8, 5, 0)):
        assert materialise(even, load_E, NodeLayout(4, 2), t, m) == even
    alone = Placement.even(1, 3)
    assert materialise(alone, [3, 2, 1], NodeLayout(1, 1), 2, 1) == alone


def test_overlap_degree_of_examples_and_invalid_arguments():
    assert overlap_degree(1e-3, 4_000_000, 12.5e9) == 3  # 12.5 MB in 1 ms
    assert overlap_degree(0.0, 1, 1e9) == 0
    assert overlap_degree(2.0, 3, 6.0) == 4
    for arguments in ((-1.0, 1, 1.0), (1.0, 0, 1.0), (1.0, 1, 0.0), (math.inf, 1, 1.0), (math.nan, 1, 1.0)):
        with pytest.raises(ConfigError, match="overlap degree"):
            overlap_degree(*arguments)


#: Communication inside a node is free.
COSTS = replace(CLUSTER_A, intra_bytes_s=1e300)


def expected_s(
    load_E: np.ndarray, placement: Placement, node_layout: NodeLayout, costs: PlacementCosts = COSTS
) -> float:
    """Seconds by definition, with equal token counts on every rank that divide evenly over any number of replicas."""
    return layer_s(placement_load(np.tile(720720 * load_E, (node_layout.num_ranks, 1)), placement, node_layout), costs)


@settings(deadline=None)
@given(situations(), LIMITS, st.sampled_from((0, 100, 1536, 10**5)))
def test_improve_respects_limits_and_never_increases_time(case, limits, token_bytes):
    placement, tokens_WE, node_layout = case
    (t, m), load_E, costs = limits, tokens_WE.sum(axis=0), replace(COSTS, token_bytes=token_bytes)
    start = materialise(placement, load_E, node_layout, t, m)
    after = improve(placement, start, load_E, node_layout, t, m, costs)
    assert placement.is_within(after)
    assert (after.extra_W() <= np.maximum(m, placement.extra_W())).all(), "no rank exceeds its slots"
    assert sum(after.replicas[e] != placement.replicas[e] for e in range(placement.experts)) <= t
    assert expected_s(load_E, after, node_layout, costs) <= expected_s(load_E, start, node_layout, costs) * (1 + 1e-9)
    assert after == improve(placement, start, load_E, node_layout, t, m, costs), "a pure function"


def test_improve_corrects_rounding_of_few_slots():
    """Expert 4 gets three of four slots, expert 7 one. An improvement from there needs two simultaneous changes."""
    load_E = np.array([133, 425, 126, 115, 2081, 285, 232, 603])
    even, node_layout = Placement.even(4, 8), NodeLayout(4, 2)
    start = materialise(even, load_E, node_layout, 3, 1)
    assert start.replicas[4] == (0, 1, 3) and start.replicas[7] == (2,)
    after = improve(even, start, load_E, node_layout, 3, 1, CLUSTER_A)
    better = Placement.parse("0: 0 1 +7\n1: 2 3 +4\n2: 4 5 +1\n3: 6 7 +4")
    assert expected_s(load_E, better, node_layout) < 0.8 * expected_s(load_E, start, node_layout)
    assert expected_s(load_E, after, node_layout) < 1.05 * expected_s(load_E, better, node_layout)


def test_improve_minimizes_machine_bottleneck():
    """With free computation the search lowers inter-node traffic; with cheap tokens it lowers the computation."""
    node_layout, load_E = NodeLayout(16, 4), make_loads(1, 1, 16, 32).load_ILE[0, 0]
    even, tokens_WE = Placement.even(16, 32), np.tile(720720 * load_E, (16, 1))
    start = materialise(even, load_E, node_layout, 8, 2)
    exchange, work = (
        placement_load(tokens_WE, improve(even, start, load_E, node_layout, 8, 2, costs), node_layout)
        for costs in (replace(CLUSTER_A, token_s=0.0), replace(CLUSTER_A, token_bytes=0))
    )
    assert exchange.max_inter_node_tokens < work.max_inter_node_tokens and work.work_W.max() < exchange.work_W.max()


def test_accept_rejects_replicas_that_save_no_time():
    """At even loads and on a fast network replicas save nothing; with a hot expert or costly rows they save time."""
    node_layout, even = NodeLayout(4, 2), Placement.even(4, 8)
    copied = materialise(even, [9, 1, 1, 1, 1, 1, 1, 1], node_layout, 4, 2)
    assert copied != even
    quick, slow = (PlacementCosts(1e-6, 8, 100, 200, rate, rate) for rate in (1e12, 1e5))
    unknown = PlacementCosts(0.0, 0, 0, 0, 1.0, 1.0)
    assert accept_if_faster(even, copied, [5] * 8, node_layout, quick) == even
    assert accept_if_faster(even, copied, [9, 1, 1, 1, 1, 1, 1, 1], node_layout, quick) == copied
    everywhere = materialise(even, [5] * 8, node_layout, 8, 6)
    assert accept_if_faster(even, everywhere, [5] * 8, node_layout, slow) == everywhere, "no rows travel"
    assert accept_if_faster(even, everywhere, [5] * 8, node_layout, quick) == even
    assert accept_if_faster(even, copied, [5] * 8, node_layout, unknown) == copied, "nothing is known"
    assert accept_if_faster(even, even, [9, 1, 1, 1, 1, 1, 1, 1], node_layout, quick) == even


def test_improve_keeps_placement_without_load_or_costs():
    even, node_layout = Placement.even(4, 8), NodeLayout(4, 2)
    for load_E, t, m in (([0] * 8, 3, 1), ([5] + [1] * 7, 0, 1), ([5] + [1] * 7, 2, 0)):
        assert improve(even, even, load_E, node_layout, t, m, CLUSTER_A) == even
    unknown = replace(CLUSTER_A, token_s=0.0, token_bytes=0)
    start = materialise(even, [5] + [1] * 7, node_layout, 2, 1)
    assert improve(even, start, [5] + [1] * 7, node_layout, 2, 1, unknown) == start, "nothing is known to be faster"
    alone = Placement.even(1, 3)
    assert improve(alone, alone, [3, 2, 1], NodeLayout(1, 1), 2, 1, CLUSTER_A) == alone


def materialise_all_layers(now: Situation, *, t: int, m: int, searched: bool) -> Decision:
    """Hecate with Algorithm 1 alone, or followed by the search."""
    decision, placements = hecate(now, t=t, m=m), []
    for one, load_E in zip(decision.placements, predict_load(now.history_ILE), strict=True):
        start = materialise(one.sharding, load_E, now.node_layout, t, m)
        after = improve(one.sharding, start, load_E, now.node_layout, t, m, now.costs)
        placements.append(after if searched else start)
    return decision._replace(placements=tuple(placements))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "seed", "m"),
    [(4, 0, 2), *(pytest.param(24, seed, m, marks=pytest.mark.slow) for seed, m in ((0, 2), (1, 4)))],
)
def test_search_beats_algorithm_1_on_drifting_loads(layers, seed, m):
    """The actual loads differ from the expected ones, and the search has seen only the expected loads."""
    node_layout, trace = NodeLayout(16, 4), make_loads(12, layers, 16, 32, seed=seed)
    ep, before, after = (
        replay(trace, policy, node_layout, CLUSTER_A)
        for policy in (
            expert_parallelism,
            *(partial(materialise_all_layers, t=8, m=m, searched=how) for how in (False, True)),
        )
    )
    assert after.straggler < before.straggler and after.ingress_bytes < before.ingress_bytes
    assert after.iteration_s < before.iteration_s
    assert ep.straggler / after.straggler > {2: 4.5, 4: 5.0}[m] and ep.ingress_bytes / after.ingress_bytes > 12


pytest.importorskip("ortools")


#: Nodes, experts, t and m of small cases.
CASES = [
    (node_layout, experts, t, m)
    for node_layout, experts in ((NodeLayout(4, 2), 8), (NodeLayout(6, 3), 6), (NodeLayout(6, 2), 12))
    for t, m in ((2, 1), (3, 1), (4, 2), (2, 2))
]


def ratios_to_optimum(
    node_layout: NodeLayout,
    experts: int,
    t: int,
    m: int,
    seeds: range,
    *,
    searched: bool = True,
    hindsight: bool = False,
) -> list[float]:
    """Ratios of a layer's time by Algorithm 1, and by the search after it (`searched`), to the least possible time.

    `hindsight`: the least time is for the tokens of each rank, which neither algorithm knows; otherwise all ranks have
    equally many tokens for an expert.
    """
    found = []
    for seed in seeds:
        tokens_WE = make_loads(1, 1, node_layout.num_ranks, experts, tokens=1000, seed=seed).tokens_ILWE[0, 0]
        load_E = tokens_WE.sum(axis=0)
        if not hindsight:
            tokens_WE = np.tile(np.rint(load_E / node_layout.num_ranks).astype(int), (node_layout.num_ranks, 1))
        even = Placement.even(node_layout.num_ranks, experts)
        ours = materialise(even, load_E, node_layout, t, m)
        if searched:
            ours = improve(even, ours, load_E, node_layout, t, m, CLUSTER_A)
        best = best_placement(even, tokens_WE, node_layout, t, m, CLUSTER_A)
        assert (best.extra_W() <= m).all() and sum(map(bool, best.replicas)) <= t
        ratio = layer_s(placement_load(tokens_WE, ours, node_layout), CLUSTER_A) / layer_s(
            placement_load(tokens_WE, best, node_layout), CLUSTER_A
        )
        assert ratio > 0.999, "nothing is better than the best"
        found.append(ratio)
    return found


@pytest.mark.parametrize(("t", "m"), [(2, 1), (2, 2), *slowly((3, 1), (4, 2))])
def test_small_cases_are_within_10_percent_of_optimum(t, m):
    assert max(ratios_to_optimum(NodeLayout(4, 2), 8, t, m, range(6))) < 1.1


@pytest.mark.slow
@pytest.mark.parametrize(("node_layout", "experts", "t", "m"), CASES)
def test_all_cases_are_within_10_percent_of_optimum(node_layout, experts, t, m):
    found = ratios_to_optimum(node_layout, experts, t, m, range(8))
    assert max(found) < 1.1 and np.mean(found) < 1.03


@pytest.mark.slow
def test_search_is_near_optimum_in_hindsight():
    """The unknown token counts of each rank cost little."""
    found = [ratio for case in CASES for ratio in ratios_to_optimum(*case, range(100, 108), hindsight=True)]
    assert np.mean(found) < 1.03 and np.quantile(found, 0.98) < 1.1 and max(found) < 1.2


@pytest.mark.slow
def test_algorithm_1_is_near_optimum_on_average():
    """A single case may be 50% longer where a rank has one slot: shares of four slots are coarse."""
    found = [ratio for case in CASES for ratio in ratios_to_optimum(*case, range(4), searched=False, hindsight=True)]
    assert np.mean(found) < 1.1 and np.median(found) < 1.06


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Placement], np.ndarray, NodeLayout, int]:
    where = draw(node_layouts)
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        shardings = [Placement.even(where.num_ranks, experts)] * layers
    else:  # each rank owns as many as it has slots
        room = np.repeat(np.arange(where.num_ranks), max_owned_experts(layers, experts, where.num_ranks))
        owners_LE = rng.permutation(room)[: layers * experts].reshape(layers, experts)
        shardings = [Placement(where.num_ranks, tuple(owners)) for owners in owners_LE.tolist()]
    most = draw(st.sampled_from((0, 3, 1000)))
    return shardings, rng.integers(0, most + 1, (layers, experts)), where, draw(st.integers(0, 8))


@settings(deadline=None)
@given(models())
def test_reshard_respects_slots_per_rank(case):
    shardings, load_LE, where, t = case
    after = reshard(shardings, load_LE, where, t)
    assert [one.experts for one in after] == [one.experts for one in shardings]
    assert not any(any(one.replicas) for one in after)
    owned_W = sum(np.bincount(one.owners, minlength=where.num_ranks) for one in after)
    assert owned_W.max() <= max_owned_experts(len(after), after[0].experts, where.num_ranks)


@settings(deadline=None)
@given(models())
def test_underloaded_experts_follow_algorithm_2(case):
    """Lines 5 to 14 of Algorithm 2, in plain loops."""
    shardings, load_LE, where, t = case
    layers, experts = load_LE.shape
    after = reshard(shardings, load_LE, where, t)
    free = [max_owned_experts(layers, experts, where.num_ranks)] * where.num_ranks
    under = [sorted(range(experts), key=lambda e, of=of: (-of[e], e))[t:] for of in load_LE.tolist()]
    for layer in sorted(range(layers), key=lambda n: (-max((load_LE[n, e] for e in under[n]), default=0), n)):
        work = [0] * where.num_ranks
        for expert in under[layer]:
            ranks = [rank for rank in range(where.num_ranks) if free[rank]]

            def node_key(n: int) -> tuple:
                inside = range(n * where.per_node, (n + 1) * where.per_node)
                return sum(work[r] for r in inside), sum(free[r] for r in inside), n  # noqa: B023

            node = min({where.of(rank) for rank in ranks}, key=node_key)
            rank = min((r for r in ranks if where.of(r) == node), key=lambda r: (work[r], free[r], r))  # noqa: B023
            assert after[layer].owners[expert] == rank
            work[rank] += load_LE[layer, expert]
            free[rank] -= 1


@settings(max_examples=25, deadline=None)
@given(models())
def test_moves_transform_old_sharding_into_new(case):
    shardings, load_LE, where, t = case
    after = reshard(shardings, load_LE, where, t)
    owners = [list(one.owners) for one in shardings]
    for layer, expert, source, target in moves(shardings, after):
        assert owners[layer][expert] == source != target
        owners[layer][expert] = target
    assert [tuple(one) for one in owners] == [one.owners for one in after]


@settings(deadline=None)
@given(models())
def test_reshard_is_idempotent(case):
    shardings, load_LE, where, t = case
    once = reshard(shardings, load_LE, where, t)
    assert all(new is old for new, old in zip(reshard(once, load_LE, where, t), once, strict=True))
    twice = reshard(once, load_LE, where, 0)
    again = reshard(twice, load_LE, where, 0)
    assert again == twice and moves(twice, again) == ()
    assert all(new is old for new, old in zip(again, twice, strict=True))


def test_reshard_is_idempotent_for_300_random_models():
    """In drawn models the busiest experts are rarely crowded, so they rarely have to move again."""
    for seed in range(300):
        rng = np.random.default_rng(seed)
        count, per_node = rng.integers(1, 5, 2).tolist()
        where, (layers, experts, t) = (
            NodeLayout(count * per_node, per_node),
            rng.integers((1, 1, 0), (5, 17, 9)).tolist(),
        )
        room = np.repeat(np.arange(where.num_ranks), max_owned_experts(layers, experts, where.num_ranks))
        owners_LE = rng.permutation(room)[: layers * experts].reshape(layers, experts)
        load_LE = rng.integers(0, (1, 4, 1001)[seed % 3], (layers, experts))
        once = reshard([Placement(where.num_ranks, tuple(owners)) for owners in owners_LE.tolist()], load_LE, where, t)
        assert reshard(once, load_LE, where, t) == once


def test_reshard_of_worked_example():
    # Two layers of three experts on 2 × 1 ranks: 3 slots each. t = 1: expert 0 is sent in each layer.
    even = [Placement(2, (0, 0, 1))] * 2
    after = reshard(even, [[90, 6, 4], [80, 15, 5]], NodeLayout(2, 1), 1)
    # Layer 1 first, as 15 > 6: expert 1 to rank 0, 2 to rank 1. Then layer 0: the same for ranks 0 and 1. One slot each
    # is left: layer 0's expert 0 stays on rank 0; layer 1's cannot, and moves to rank 1.
    assert [one.owners for one in after] == [(0, 0, 1), (1, 0, 1)]
    assert moves(even, after) == (Move(1, 0, 0, 1),)


def test_reshard_balances_work_and_ingress_of_other_experts():
    """The paper's purpose: no rank owns two of the larger experts, and no node only small ones."""
    node_layout = NodeLayout(16, 4)
    trace = make_loads(1, 12, 16, 32, seed=1)
    even, load_LE = [Placement.even(16, 32)] * 12, trace.load_ILE[0]
    tokens_LWE = trace.tokens_ILWE[0].copy()
    for layer, top in enumerate(np.argsort(-load_LE, axis=1)[:, :8]):
        tokens_LWE[layer][:, top] = 0
    work, ingress = (
        [
            sum(
                getattr(placement_load(tokens, one, node_layout), name).max()
                for tokens, one in zip(tokens_LWE, of, strict=True)
            )
            for of in (even, reshard(even, load_LE, node_layout, 8))
        ]
        for name in ("work_W", "inter_node_received_W")
    )
    assert work[1] < 0.8 * work[0] and ingress[1] < 0.8 * ingress[0]


def test_uneven_detects_imbalanced_owners():
    two = [Placement.parse("0: 0\n1: 1")] * 2
    assert is_uneven(two, [[10, 30], [20, 20]]), "25 of 20 in the mean of the layers"
    assert not is_uneven(two, [[20.5, 19.5], [20, 20]]) and not is_uneven(two, np.zeros((2, 2)))
    assert not is_uneven([Placement.parse("0: 0 1\n1: 2")], [[10, 10, 20]])
    assert is_uneven([Placement.parse("0: 0 1\n1: 2")], [[10, 10, 10]])


def test_moves_reject_other_layers():
    even = [Placement.even(4, 4)] * 2
    with pytest.raises(ConfigError, match="moves"):
        moves(even, even[:1])
