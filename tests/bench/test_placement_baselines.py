"""Baseline placement policies on small situations: FasterMoE, SmartMoE, FlexMoE, Hecate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.placement.baselines import (
    CLUSTER_A,
    Situation,
    exact,
    expert_parallelism,
    hecate,
    replication,
    shadowing,
    swaps,
)
from bench.placement.made_loads import make_loads
from fusedmoe.placement.hecate import materialise, max_owned_experts, predict_load, reshard
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.replica_search import improve
from fusedmoe.placement.traffic import gather_transfers, layer_s, link_bytes, placement_load, transfers_s

NODES = NodeLayout(8, 4)


def situation(iteration: int = 5, *, layers: int = 2, experts: int = 16, seed: int = 0, **changes) -> Situation:
    trace = make_loads(iteration + 1, layers, NODES.num_ranks, experts, seed=seed)
    before = (Placement.even(NODES.num_ranks, experts),) * layers
    now = Situation(iteration, before, trace.load_ILE[:-1], trace.tokens_ILWE[-1], NODES, CLUSTER_A)
    return replace(now, **changes)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 4), st.booleans())
def test_every_policy_preserves_owner_count_and_slot_limit(seed, m, t, calibrated):
    now = situation(seed=seed)
    policies = {
        "ep": expert_parallelism,
        "hecate": partial(hecate, t=t, m=m, calibrated=calibrated),
        "algorithm1": partial(hecate, t=t, m=m, calibrated=calibrated, searches=False),
        "fastermoe": partial(shadowing, m=m),
        "smartmoe": swaps,
        "flexmoe": partial(replication, m=m),
        "exact": partial(exact, t=t, m=m),
        "even": partial(exact, t=t, m=m, level=1.0),
    }
    for name, policy in policies.items():
        decision = policy(now)
        assert repr(policy(now)) == repr(decision), "a pure function"
        assert decision.waits_s >= 0 and decision.sent_bytes >= 0
        assert all(one.experts == 16 and one.num_ranks == 8 for one in decision.placements)
        room = m if name not in ("ep", "smartmoe") else 0
        assert all(one.extra_W().max() <= room for one in decision.placements)
        owned_W = sum(np.bincount(one.owners, minlength=8) for one in decision.placements)
        assert owned_W.max() <= max_owned_experts(2, 16, 8)


def test_hecate_composes_reshard_materialise_and_improve():
    now = situation()
    expected_LE = predict_load(now.history_ILE)
    shardings = reshard(now.before, expected_LE, NODES, 4)
    decision = hecate(now, t=4, m=2)
    assert decision.placements == tuple(
        improve(one, materialise(one, load_E, NODES, 4, 2), load_E, NODES, 4, 2, CLUSTER_A)
        for one, load_E in zip(shardings, expected_LE, strict=True)
    )
    alone = hecate(now, t=4, m=2, searches=False)
    assert alone.placements != decision.placements
    assert alone.placements == tuple(
        materialise(one, load_E, NODES, 4, 2) for one, load_E in zip(shardings, expected_LE, strict=True)
    )
    assert decision.waits_s > 0, "the new owners' parameters and state"
    # Later, without new owners: only gathers and reduce-scatters are sent, and they are hidden.
    later = replace(now, iteration=6, before=decision.placements)
    again = hecate(later, t=4, m=2)
    assert again.waits_s == 0
    assert [one.owners for one in again.placements] == [one.owners for one in shardings]
    sent = sum(
        link_bytes(gather_transfers(one.sharding, one, NODES), NODES, CLUSTER_A.expert_bytes)[::2].sum()
        for one in again.placements
    )
    assert again.sent_bytes == 2 * sent


def test_hecate_gather_fits_in_t_expert_transfers():
    """A gather takes no longer than sending t experts over the inter-node link."""
    now = situation(layers=4)
    for t in (1, 3, 8):
        for one in hecate(now, t=t, m=2).placements:
            seconds = transfers_s(gather_transfers(one.sharding, one, NODES), NODES, CLUSTER_A, CLUSTER_A.expert_bytes)
            assert seconds <= t * CLUSTER_A.expert_bytes / CLUSTER_A.inter_bytes_s * (1 + 1e-12)


def test_shadowing_replicates_experts_of_current_tokens():
    now = situation(history_ILE=np.zeros((5, 2, 16), dtype=np.int64))  # the history is unused
    decision = shadowing(now, m=2)
    for before, after, tokens_WE in zip(now.before, decision.placements, now.tokens_LWE, strict=True):
        assert 0 < sum(map(bool, after.replicas)) <= 2
        assert after.replicas[int(tokens_WE.sum(axis=0).argmax())] != ()
        assert layer_s(placement_load(tokens_WE, after, NODES), now.costs) < layer_s(
            placement_load(tokens_WE, before, NODES), now.costs
        )
    assert decision.waits_s > 0
    dear = replace(now, costs=replace(CLUSTER_A, expert_bytes=10**12))
    assert shadowing(dear, m=2).placements == now.before


def test_swaps_balance_work_and_skip_off_period_iterations():
    load_E = np.array([8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1]) * 1000
    now = situation(layers=1, history_ILE=np.tile(load_E, (5, 1, 1)))
    (after,) = swaps(now).placements
    work = [load_E[list(after.owned(rank))].sum() for rank in range(8)]
    assert max(work) <= 9000 < load_E[:2].sum() and all(len(after.owned(rank)) == 2 for rank in range(8))
    assert swaps(replace(now, iteration=7)).placements == now.before, "not every time"
    dear = replace(now, costs=replace(CLUSTER_A, state_bytes=10**12))
    assert swaps(dear).placements == now.before, "moving must pay"


def test_replication_adds_and_evicts_replicas():
    now = situation(layers=1)
    grown = replication(now, m=1)
    (first,) = grown.placements
    assert any(first.replicas) and grown.waits_s > 0
    # The load moves to previously idle experts: replicas change their expert.
    turned = replace(now, iteration=10, before=grown.placements, history_ILE=now.history_ILE[..., ::-1])
    (second,) = replication(turned, m=1).placements
    lost = [e for e in range(16) if set(first.replicas[e]) - set(second.replicas[e])]
    gained = [e for e in range(16) if set(second.replicas[e]) - set(first.replicas[e])]
    assert gained and (lost or first.extra_W().sum() < 8) and second.extra_W().max() <= 1
    assert replication(replace(turned, iteration=11), m=1).placements == grown.placements, "not every time"


def test_replication_evicts_replicas_when_slots_are_full():
    load_E = np.array([800_000] + [10_000] * 15)
    full = Placement(8, Placement.even(8, 16).owners, tuple(() if e % 2 else ((e // 2 - 2) % 8,) for e in range(16)))
    assert full.extra_W().tolist() == [1] * 8
    now = situation(layers=1, before=(full,), history_ILE=np.tile(load_E, (5, 1, 1)), iteration=10)
    (after,) = replication(now, m=1).placements
    assert len(after.replicas[0]) > 1 and after.extra_W().tolist() == [1] * 8


@pytest.mark.parametrize(
    "policy", [partial(hecate, t=8, m=2), partial(shadowing, m=2), swaps, partial(replication, m=2)]
)
def test_even_loads_never_get_slower(policy):
    """With equal loads, moving experts gains nothing."""
    even = situation(history_ILE=np.full((5, 2, 16), 1000), tokens_LWE=np.full((2, 8, 16), 125))
    before_s = sum(
        layer_s(placement_load(tokens, one, NODES), CLUSTER_A)
        for tokens, one in zip(even.tokens_LWE, even.before, strict=True)
    )
    decision = policy(even)
    after_s = sum(
        layer_s(placement_load(tokens, one, NODES), CLUSTER_A)
        for tokens, one in zip(even.tokens_LWE, decision.placements, strict=True)
    )
    assert after_s <= before_s
