"""Policies on synthetic loads and on loads of a real job, `bench/traces/skewed.json`: 4 ranks, 16 experts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench.placement.baselines import (
    CLUSTER_A,
    Decision,
    auto,
    by_layer,
    exact,
    expert_parallelism,
    hecate,
    replication,
    shadowing,
    swaps,
)
from bench.placement.made_loads import make_loads
from bench.placement.replay import Outcome, replay
from fusedmoe.cli.load_trace import LoadTrace
from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import layer_s, placement_load
from tests.marks import slowly

NODES = NodeLayout(16, 4)


def replay_every_policy(iterations: int, seed: int, m: int, **changes) -> dict[str, Outcome]:
    """Replay 24 layers of 32 experts on 4 × 4 ranks under every policy, t = 8."""
    trace = make_loads(iterations, 24, 16, 32, seed=seed, **changes)
    policies = {
        "ep": expert_parallelism,
        "hecate": partial(hecate, t=8, m=m),
        "fastermoe": partial(shadowing, m=m),
        "smartmoe": swaps,
        "flexmoe": partial(replication, m=m, every=25),  # the paper's interval of 10 is slower
    }
    return {name: replay(trace, policy, NODES, CLUSTER_A) for name, policy in policies.items()}


def check_hecate_ahead(outcomes: dict[str, Outcome], straggler: float, ingress: float) -> None:
    ep, ours = outcomes["ep"], outcomes["hecate"]
    assert ep.straggler / ours.straggler >= straggler
    assert ep.ingress_bytes / ours.ingress_bytes >= ingress
    for name in ("fastermoe", "smartmoe", "flexmoe"):
        assert ours.straggler < outcomes[name].straggler
        assert ours.ingress_bytes < outcomes[name].ingress_bytes
        assert ours.iteration_s < outcomes[name].iteration_s < ep.iteration_s
    assert ours.owned_I.max() == 48, "24 layers of 32 experts on 16 ranks"


def check_exact(outcomes: dict[str, Outcome]) -> None:
    """Policy "even": busiest rank within 1.05 times the mean, at most 5% more experts sent. "exact": faster."""
    ours, even, cheapest = (outcomes[name] for name in ("hecate", "even", "exact"))
    assert even.straggler <= 1.05 < ours.straggler and even.sent_I.mean() <= 1.05 * ours.sent_I.mean()
    assert cheapest.straggler < ours.straggler and cheapest.iteration_s < ours.iteration_s


@pytest.mark.slow
@pytest.mark.parametrize(("m", "straggler", "ingress"), [(2, 3.5, 8.0), (4, 4.0, 12.0)])
def test_hecate_beats_baselines_on_synthetic_loads(m, straggler, ingress):
    """60 iterations, to cover two decisions of the policy with a period of 25."""
    outcomes = replay_every_policy(60, m, m)
    assert 5.5 < outcomes["ep"].straggler < 6.7, "as skewed as the paper's"
    assert outcomes["hecate"].replicas_I.max() <= 24 * m
    check_hecate_ahead(outcomes, straggler, ingress)


def test_replay_equals_definition():
    trace = make_loads(8, 3, 16, 20, tokens=300)
    found = replay(trace, expert_parallelism, NODES, CLUSTER_A)
    even = Placement.even(16, 20)
    assert found.last == (even,) * 3 and found.work_ILW.shape == (3, 3, 16)
    for iteration in range(5, 8):
        for layer in range(3):
            one = placement_load(trace.tokens_ILWE[iteration, layer], even, NODES)
            at = iteration - 5, layer
            assert found.work_ILW[at].tolist() == one.work_W.tolist()
            assert found.ingress_IL[at] == one.inter_node_received_W.max() * CLUSTER_A.token_bytes
            assert found.exchange_IL[at] + found.compute_IL[at] == pytest.approx(layer_s(one, CLUSTER_A))
            assert found.straggler_IL[at] == pytest.approx(one.work_W.max() / one.work_W.mean())
    assert found.straggler == pytest.approx(found.straggler_IL.mean())
    assert found.waits_s == 0 and not found.sent_I.any() and not found.replicas_I.any()
    assert found.iteration_s == pytest.approx((found.exchange_IL + found.compute_IL).sum() / 3)
    np.testing.assert_allclose(found.speedup_L(found), 1.0)


def test_replay_peak_memory_equals_hand_computation():
    """By hand: the busiest rank's owned experts, its replicas, and experts held twice while owners change."""
    e, s = CLUSTER_A.expert_bytes, CLUSTER_A.state_bytes
    trace, node_layout = make_loads(8, 2, 4, 4, tokens=100), NodeLayout(4, 2)
    even, one = Placement.even(4, 4), np.eye(4, dtype=bool)
    one[3, :3] = True  # three replicas of rank 3's expert
    swapped = Placement(4, (1, 0, 2, 3))

    def peak(placement, state=False):
        return replay(
            trace, lambda now: Decision((placement,) * 2, 0.0, 0, state), node_layout, CLUSTER_A
        ).peak_I.tolist()

    assert peak(even) == [2 * (2 * e + s)] * 3
    assert peak(Placement.holding(even.owners, one)) == [2 * (2 * e + s) + 2 * 2 * e] * 3
    assert peak(Placement.holding(even.owners, one), state=True) == [4 * (2 * e + s)] * 3
    # Without gradients: three experts, as the second layer's are held before and after, in the first iteration only.
    assert peak(swapped) == [max(3 * (e + s), 2 * (2 * e + s)), *[2 * (2 * e + s)] * 2]


def test_policies_receive_past_loads_only():
    trace = make_loads(8, 2, 16, 20, tokens=300)
    seen = []

    def policy(now):
        seen.append(
            (now.iteration, len(now.history_ILE), np.array_equal(now.tokens_LWE, trace.tokens_ILWE[now.iteration]))
        )
        return expert_parallelism(now)

    shown: list[tuple[int, int]] = []
    replay(trace, policy, NODES, CLUSTER_A, show=lambda done, total: shown.append((done, total)))
    assert seen == [(5, 5, True), (6, 6, True), (7, 7, True)] and shown == [(1, 3), (2, 3), (3, 3)]


def test_replay_without_tokens_has_no_straggler_or_ingress():
    trace = LoadTrace(np.zeros((7, 2, 16, 20), dtype=np.int64))
    for policy in (
        expert_parallelism,
        partial(hecate, t=4, m=2),
        partial(shadowing, m=2),
        swaps,
        partial(replication, m=2),
    ):
        found = replay(trace, policy, NODES, CLUSTER_A)
        assert found.straggler == 1.0 and found.ingress_bytes == 0.0


def test_replay_rejects_short_trace_and_rank_mismatch():
    with pytest.raises(ConfigError, match="5 iterations"):
        replay(make_loads(5, 1, 16, 4), expert_parallelism, NODES, CLUSTER_A)
    with pytest.raises(ConfigError, match="a trace of 8 ranks"):
        replay(make_loads(6, 1, 8, 4), expert_parallelism, NODES, CLUSTER_A)


TRACE = LoadTrace.from_json((Path(__file__).parents[2] / "bench/traces/skewed.json").read_text(encoding="utf-8"))


def test_recorded_trace_is_skewed_and_drifting():
    """60 steps of 16 sequences of 128 bytes on each of 4 ranks, two choices per byte."""
    assert TRACE.tokens_ILWE.shape == (60, 4, 4, 16) and (TRACE.tokens_ILWE.sum(axis=3) == 16 * 128 * 2).all()
    share_ILE = TRACE.load_ILE / TRACE.load_ILE.sum(axis=2, keepdims=True)
    assert share_ILE.max(axis=2).mean() > 3 / 16, "skewed"
    step, whole = abs(share_ILE[1:] - share_ILE[:-1]).sum(axis=2).mean(), abs(share_ILE[-1] - share_ILE[0]).sum(axis=1)
    assert step < 0.5 < whole.mean(), "and drifting"


@pytest.mark.slow
@pytest.mark.parametrize(("per_node", "m"), [(2, 1), (2, 2), (1, 2)])
def test_exact_balance_of_recorded_loads(per_node, m):
    policies = {
        "hecate": partial(hecate, t=4, m=m),
        "exact": partial(exact, t=4, m=m),
        "even": partial(exact, t=4, m=m, level=1.0),
    }
    check_exact({name: replay(TRACE, one, NodeLayout(4, per_node), CLUSTER_A) for name, one in policies.items()})


EVEN = {"skew": 0.0, "spread": 0.0, "drift": 0.0, "jitter": 0.0, "difference": 0.0}


@pytest.mark.parametrize(
    ("m", "iterations", "layers"),
    [(2, 8, 2), *slowly((2, 20, 4), (4, 20, 4))],
)
def test_auto_policy_on_changing_drifting_and_even_loads(m, iterations, layers):
    """A wrong prediction is corrected, also with memory full of replicas; even loads cost nothing."""
    seconds = {}
    for router, loads in (("changes", {"jitter": 1.5}), ("drifts", {"drift": 0.02, "jitter": 0.05}), ("even", EVEN)):
        trace = make_loads(iterations, layers, 16, 32, seed=m, **loads)
        policies = {"ep": expert_parallelism, "hecate": partial(hecate, t=8, m=m), "auto": partial(auto, t=8, m=m)}
        found = {name: replay(trace, one, NODES, CLUSTER_A) for name, one in policies.items()}
        seconds[router] = {name: one.iteration_s for name, one in found.items()}
        assert found["auto"].replicas_I.max() <= layers * m
    assert seconds["changes"]["auto"] * 1.25 < seconds["changes"]["hecate"]
    assert seconds["drifts"]["auto"] <= seconds["drifts"]["hecate"]
    assert seconds["even"]["auto"] <= 1.02 * seconds["even"]["ep"]


@pytest.mark.slow
@pytest.mark.parametrize("m", [2, 4])
def test_exact_balance_of_drifting_loads(m):
    trace = make_loads(20, 4, 16, 32, seed=m)
    policies = {
        "hecate": partial(hecate, t=8, m=m),
        "exact": partial(exact, t=8, m=m),
        "even": partial(exact, t=8, m=m, level=1.0),
    }
    check_exact({name: replay(trace, one, NODES, CLUSTER_A) for name, one in policies.items()})


# Ranks as 2 × 2, with one replica and two, and as four nodes.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("per_node", "m", "straggler", "ingress", "faster"),
    [
        (2, 1, 1.6, 5.5, 2.8),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in ((2, 2, 1.7, 7.5, 3.2), (1, 2, 1.6, 4.0, 2.7))),
    ],
)
def test_hecate_beats_baselines_on_recorded_loads(per_node, m, straggler, ingress, faster):
    policies = {
        "ep": expert_parallelism,
        "fastermoe": partial(shadowing, m=m),
        "smartmoe": swaps,
        "flexmoe": partial(replication, m=m),
        "hecate": partial(hecate, t=4, m=m),
    }
    found = {name: replay(TRACE, policy, NodeLayout(4, per_node), CLUSTER_A) for name, policy in policies.items()}
    ours, ep = found.pop("hecate"), found["ep"]
    for other in found.values():
        assert ours.straggler < other.straggler and ours.ingress_bytes < other.ingress_bytes
        assert ours.iteration_s < other.iteration_s
    assert ep.straggler / ours.straggler > straggler
    assert ep.ingress_bytes / ours.ingress_bytes > ingress
    assert ep.iteration_s / ours.iteration_s > faster


def test_own_layer_policy_counts_its_transfers():
    def of_first(count):
        def policy(now):
            holds_EW = now.placement.sharding.holds_EW.copy()
            holds_EW[:count] = True
            return Placement.holding(now.placement.owners, holds_EW)

        return policy

    trace = make_loads(8, 2, 8, 16)
    none, hidden, exposed, more = (
        replay(trace, by_layer(of_first(count), t=t), NodeLayout(8, 4), CLUSTER_A)
        for count, t in ((0, 2), (2, 2), (2, 1), (2, 0))
    )
    assert none.waits_s == hidden.waits_s == 0 < exposed.waits_s < more.waits_s
    sent_bytes = 2 * 2 * 2 * 7 * CLUSTER_A.expert_bytes  # both ways, layers, experts, other ranks
    assert none.sent_I.max() == 0 and set(hidden.sent_I) == set(exposed.sent_I) == {sent_bytes}


def test_own_layer_policy_counts_owner_changes():
    def exchange(now):
        first, second, *others = now.placement.owners
        return Placement(now.placement.num_ranks, (second, first, *others))

    trace = make_loads(8, 2, 16, 16)
    found = replay(trace, by_layer(exchange, t=8), NODES, CLUSTER_A)
    assert found.waits_s > 0 and set(found.sent_I) == {2 * 2 * CLUSTER_A.move_bytes}


def test_policies_without_placements_are_named():
    def forgets(now):
        pass

    def forgets_layers(now):
        return Decision((None, None), 0.0, 0)

    trace = make_loads(8, 2, 16, 16)
    with pytest.raises(ConfigError, match=r"forgets: it returned a NoneType, no Placement"):
        replay(trace, by_layer(forgets, t=8), NODES, CLUSTER_A)
    with pytest.raises(ConfigError, match=r"forgets_layers: expected a Decision with a Placement for each layer"):
        replay(trace, forgets_layers, NODES, CLUSTER_A)
