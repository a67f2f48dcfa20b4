from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.placement.loads import LoadTrace, make_loads
from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.policies import expert_parallelism, hecate, replication, shadowing, swaps
from fusedmoe.placement.price import CLUSTER_A, layer_s, load
from fusedmoe.placement.simulate import Outcome, simulate

NODES = Nodes(16, 4)


def follow(iterations: int, seed: int, m: int, **changes) -> dict[str, Outcome]:
    """24 layers of 32 experts on 4 × 4 ranks under every policy, t = 8."""
    trace = make_loads(iterations, 24, 16, 32, seed=seed, **changes)
    policies = {
        "ep": expert_parallelism,
        "hecate": partial(hecate, t=8, m=m),
        "fastermoe": partial(shadowing, m=m),
        "smartmoe": swaps,
        "flexmoe": partial(replication, m=m),
    }
    return {name: simulate(trace, policy, NODES, CLUSTER_A) for name, policy in policies.items()}


def check(outcomes: dict[str, Outcome], straggler: float, ingress: float) -> None:
    ep, ours = outcomes["ep"], outcomes["hecate"]
    assert ep.straggler / ours.straggler >= straggler
    assert ep.ingress_bytes / ours.ingress_bytes >= ingress
    for name in ("fastermoe", "smartmoe", "flexmoe"):
        assert ours.straggler < outcomes[name].straggler
        assert ours.ingress_bytes < outcomes[name].ingress_bytes
        assert ours.iteration_s < outcomes[name].iteration_s < ep.iteration_s
    assert ours.owned_I.max() == 48, "24 layers of 32 experts on 16 ranks"


def test_ahead_of_the_others():
    outcomes = follow(10, 0, 2)
    assert 5.5 < outcomes["ep"].straggler < 6.7, "as skewed as the paper's"
    assert outcomes["hecate"].replicas_I.max() <= 24 * 2
    check(outcomes, 3.5, 8.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("m", "straggler", "ingress"), [(2, 3.5, 8.0), (4, 4.0, 12.0)])
def test_a_long_trace(seed, m, straggler, ingress):
    check(follow(120, seed, m), straggler, ingress)


def test_by_definition():
    trace = make_loads(8, 3, 16, 20, tokens=300)
    found = simulate(trace, expert_parallelism, NODES, CLUSTER_A)
    even = Placement.even(16, 20)
    assert found.last == (even,) * 3 and found.work_ILW.shape == (3, 3, 16)
    for iteration in range(5, 8):
        for layer in range(3):
            one = load(trace.tokens_ILWE[iteration, layer], even, NODES)
            at = iteration - 5, layer
            assert found.work_ILW[at].tolist() == one.work_W.tolist()
            assert found.ingress_IL[at] == one.ingress_W.max() * CLUSTER_A.token_bytes
            assert found.exchange_IL[at] + found.compute_IL[at] == pytest.approx(layer_s(one, CLUSTER_A))
            assert found.straggler_IL[at] == pytest.approx(one.straggler)
    assert found.straggler == pytest.approx(found.straggler_IL.mean())
    assert found.waits_s == 0 and not found.sent_I.any() and not found.replicas_I.any()
    assert found.iteration_s == pytest.approx((found.exchange_IL + found.compute_IL).sum() / 3)
    np.testing.assert_allclose(found.speedup_L(found), 1.0)


def test_policies_see_only_the_past():
    trace = make_loads(8, 2, 16, 20, tokens=300)
    seen = []

    def policy(now):
        seen.append(
            (now.iteration, len(now.history_ILE), np.array_equal(now.tokens_LWE, trace.tokens_ILWE[now.iteration]))
        )
        return expert_parallelism(now)

    shown: list[tuple[int, int]] = []
    simulate(trace, policy, NODES, CLUSTER_A, show=lambda done, total: shown.append((done, total)))
    assert seen == [(5, 5, True), (6, 6, True), (7, 7, True)] and shown == [(1, 3), (2, 3), (3, 3)]


def test_iterations_without_tokens():
    trace = LoadTrace(np.zeros((7, 2, 16, 20), dtype=np.int64))
    for policy in (
        expert_parallelism,
        partial(hecate, t=4, m=2),
        partial(shadowing, m=2),
        swaps,
        partial(replication, m=2),
    ):
        found = simulate(trace, policy, NODES, CLUSTER_A)
        assert found.straggler == 1.0 and found.ingress_bytes == 0.0


def test_what_is_refused():
    with pytest.raises(ConfigError, match="5 iterations"):
        simulate(make_loads(5, 1, 16, 4), expert_parallelism, NODES, CLUSTER_A)
    with pytest.raises(ConfigError, match="a trace of 8 ranks"):
        simulate(make_loads(6, 1, 8, 4), expert_parallelism, NODES, CLUSTER_A)
