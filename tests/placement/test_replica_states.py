"""States of replicas: each state and event is in the table or refused, and objects follow the table."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedmoe.comm.topology import Topology
from fusedmoe.experts.networks import FeedForward, Place
from fusedmoe.placement.expert_table import ExpertTable
from fusedmoe.placement.expert_transport import SparseCollectives, SparseWork
from fusedmoe.placement.placement import Placement
from fusedmoe.placement.replicas import TRANSITIONS, ReplicaEvent, Replicas, ReplicaState, after
from fusedmoe.placement.traffic import Transfer

PAGE = (Path(__file__).parents[2] / "docs/life-of-a-replica.md").read_text(encoding="utf-8")
ABSENT, IN_FLIGHT, PRESENT, RELEASED = ReplicaState
#: By state: the next state by event. Missing events are illegal.
EXPECTED = {
    ABSENT: {"fetch": IN_FLIGHT, "release": RELEASED, "drop": ABSENT},
    IN_FLIGHT: {"arrive": PRESENT, "fail": ABSENT},
    PRESENT: {"add": IN_FLIGHT, "release": RELEASED, "drop": ABSENT},
    RELEASED: {"fetch": IN_FLIGHT, "release": RELEASED, "drop": ABSENT},
}


@pytest.mark.parametrize(("state", "event"), [*product(ReplicaState, ReplicaEvent)], ids=lambda value: value.name)
def test_transitions_equal_expected_table(state: ReplicaState, event: ReplicaEvent) -> None:
    if event.value in EXPECTED[state]:
        assert after(state, event) is EXPECTED[state][event.value]
    else:
        with pytest.raises(RuntimeError, match=f"replicas are {state.value} and cannot {event.value}; legal events: "):
            after(state, event)


def test_all_states_are_reachable_and_droppable() -> None:
    reached, ahead = set(), [ABSENT]
    while ahead:
        state = ahead.pop()
        reached.add(state)
        ahead += [next_state for (source, _), next_state in TRANSITIONS.items() if source is state]
        ahead = [one for one in ahead if one not in reached]
    assert reached == set(ReplicaState)
    # After any event the next forward pass can begin: replicas are dropped at once or after their transfers.
    assert all((state, ReplicaEvent.DROP) in TRANSITIONS or state is IN_FLIGHT for state in ReplicaState)


def test_docs_diagram_equals_transition_table() -> None:
    drawn = re.findall(r"^    (\w+) --> (\w+): (\w+)$", PAGE, re.MULTILINE)
    table = [(source.name, target.name, event.value) for (source, event), target in TRANSITIONS.items()]
    assert sorted(drawn) == sorted(table)
    described = re.findall(r"^\| ([A-Z_]+) \|", PAGE, re.MULTILINE)
    assert described[: len(ReplicaState)] == [state.name for state in ReplicaState]


class Transport(SparseCollectives):
    """Experts arrive, or their transfer fails, at the wait."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.started, self.arrived = fails, 0, 0

    def gather(self, *_: Any) -> SparseWork:
        self.started += 1
        return SparseWork(8, self._arrive)

    def _arrive(self) -> list[Any]:
        if self.fails:
            raise OSError("a link is down")
        self.arrived += 1
        return []


def make_replicas(transport: Transport) -> Replicas:
    """Replicas of a rank that owns two experts and receives two more, in a world of one process."""
    experts = FeedForward(3)
    experts.setup(4, Place(0, 2), device="cpu", dtype=torch.float64)
    experts.shardings = {name: {"ep": 0} for name, _ in experts.named_parameters()}
    table = ExpertTable(experts, 2, Topology())
    # As on rank 0 of two ranks, of which rank 1 owns experts 2 and 3.
    table.placement = table.current = Placement(2, (0, 0, 1, 1), ((), (), (0,), (0,)))
    table.experts_W, table._transfers = [(0, 1, 2, 3), (2, 3)], (Transfer(2, 1, 0, 0), Transfer(3, 1, 0, 0))
    replicas = Replicas(table)
    replicas.transport = transport
    return replicas


def test_replica_lifecycle_follows_transition_table() -> None:
    transport = Transport()
    replicas = make_replicas(transport)
    owned_bytes = [parameter.nbytes for parameter in replicas.table.parameters]
    replicas.fetch()
    assert replicas.state is IN_FLIGHT and transport.started == 1
    replicas.wait_for_transfers()
    replicas.wait_for_transfers()
    assert replicas.state is PRESENT and transport.arrived == 1 and replicas.sent_bytes == 8
    replicas.add(())
    assert replicas.state is PRESENT, "nothing was added"
    replicas.add((Transfer(3, 1, 0, 0),))
    assert replicas.state is IN_FLIGHT
    replicas.release()
    sizes = [parameter.data.untyped_storage().nbytes() for parameter in replicas.table.parameters]
    assert replicas.state is RELEASED and transport.arrived == 2 and sizes == owned_bytes
    replicas.fetch()
    replicas.invalidate()
    assert replicas.state is ABSENT and transport.arrived == 3, "waits before it invalidates"
    with pytest.raises(RuntimeError, match="replicas are absent and cannot arrive"):
        replicas.wait_for_transfers()
    replicas.fetch()
    with pytest.raises(RuntimeError, match="replicas are in flight and cannot fetch; legal events: arrive, fail"):
        replicas.fetch()
    assert transport.started == 4, "an illegal event starts nothing"


def test_parameter_update_during_fetch_is_rejected() -> None:
    replicas = make_replicas(Transport())
    assert replicas.why_unusable() is None
    replicas.fetch()
    assert replicas.why_unusable() is None
    with torch.no_grad():
        replicas.table.parameters[0].add_(1)
    refusal = replicas.why_unusable()
    assert refusal is not None and "experts have changed since their replicas started" in refusal
    replicas.invalidate()
    assert replicas.why_unusable() is None


def test_failed_transfer_leaves_replicas_absent() -> None:
    replicas = make_replicas(Transport(fails=True))
    replicas.fetch()
    with pytest.raises(OSError, match="a link is down"):
        replicas.wait_for_transfers()
    assert replicas.state is ABSENT
    replicas.fetch()
    replicas.abandon()
    assert replicas.state is ABSENT
