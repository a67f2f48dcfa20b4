"""The simulation on loads of a real training job, `bench/traces/skewed.json`: 4 ranks, 16 experts, no balance loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from fusedmoe.placement.loads import LoadTrace
from fusedmoe.placement.placement import Nodes
from fusedmoe.placement.policies import expert_parallelism, hecate, replication, shadowing, swaps
from fusedmoe.placement.price import CLUSTER_A
from fusedmoe.placement.simulate import simulate

TRACE = LoadTrace.from_json((Path(__file__).parents[2] / "bench/traces/skewed.json").read_text(encoding="utf-8"))


def test_what_was_recorded():
    """60 steps of 16 sequences of 128 bytes on each of 4 ranks, two choices a byte."""
    assert TRACE.tokens_ILWE.shape == (60, 4, 4, 16) and (TRACE.tokens_ILWE.sum(axis=3) == 16 * 128 * 2).all()
    share_ILE = TRACE.load_ILE / TRACE.load_ILE.sum(axis=2, keepdims=True)
    assert share_ILE.max(axis=2).mean() > 3 / 16, "skewed"
    step, whole = abs(share_ILE[1:] - share_ILE[:-1]).sum(axis=2).mean(), abs(share_ILE[-1] - share_ILE[0]).sum(axis=1)
    assert step < 0.5 < whole.mean(), "and drifting"


# Of ranks as 2 × 2, with one copy and two, and as four nodes.
@pytest.mark.parametrize(
    ("per_node", "m", "straggler", "ingress", "faster"),
    [(2, 1, 1.6, 5.5, 2.8), (2, 2, 1.7, 7.5, 3.2), (1, 2, 1.6, 4.0, 2.7)],
)
def test_hecate_is_ahead(per_node, m, straggler, ingress, faster):
    policies = {
        "ep": expert_parallelism,
        "fastermoe": partial(shadowing, m=m),
        "smartmoe": swaps,
        "flexmoe": partial(replication, m=m),
        "hecate": partial(hecate, t=4, m=m),
    }
    found = {name: simulate(TRACE, policy, Nodes(4, per_node), CLUSTER_A) for name, policy in policies.items()}
    ours, ep = found.pop("hecate"), found["ep"]
    for other in found.values():
        assert ours.straggler < other.straggler and ours.ingress_bytes < other.ingress_bytes
        assert ours.iteration_s < other.iteration_s
    assert ep.straggler / ours.straggler > straggler
    assert ep.ingress_bytes / ours.ingress_bytes > ingress
    assert ep.iteration_s / ours.iteration_s > faster
