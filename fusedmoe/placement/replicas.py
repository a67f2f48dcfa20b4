"""Replicas of one layer's experts on this rank, and their state machine, which docs/life-of-a-replica.md draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from types import MappingProxyType

import torch
from torch import Tensor

from fusedmoe.placement.expert_table import ExpertTable
from fusedmoe.placement.expert_transport import SparseCollectives, SparseWork
from fusedmoe.placement.traffic import Transfer, reduce_transfers

# Context that records a transfer, entered by the thread that runs it.
RecordContext = AbstractContextManager[None] | None


class ReplicaState(Enum):
    """State of all replicas of one layer on one rank."""

    ABSENT = "absent"  # no replica of the current parameters
    IN_FLIGHT = "in flight"
    PRESENT = "present"  # every replica in the table is complete
    RELEASED = "released"  # memory is freed until the backward pass fetches the replicas again


class ReplicaEvent(Enum):
    """Event that changes the state of a layer's replicas."""

    FETCH = "fetch"  # start the transfers of all replicas
    ARRIVE = "arrive"
    FAIL = "fail"
    ADD = "add"  # start transfers of replicas chosen after the gate
    RELEASE = "release"
    DROP = "drop"  # a new forward pass or placement begins: parameters may have changed


_S, _E = ReplicaState, ReplicaEvent

#: (state, event) -> next state. Missing pairs are errors.
TRANSITIONS: Mapping[tuple[ReplicaState, ReplicaEvent], ReplicaState] = MappingProxyType(
    {
        (_S.ABSENT, _E.FETCH): _S.IN_FLIGHT,
        (_S.RELEASED, _E.FETCH): _S.IN_FLIGHT,
        (_S.IN_FLIGHT, _E.ARRIVE): _S.PRESENT,
        (_S.IN_FLIGHT, _E.FAIL): _S.ABSENT,
        (_S.PRESENT, _E.ADD): _S.IN_FLIGHT,
        (_S.PRESENT, _E.RELEASE): _S.RELEASED,
        # A later forward pass of the step has dropped the replicas before this forward's backward.
        (_S.ABSENT, _E.RELEASE): _S.RELEASED,
        (_S.RELEASED, _E.RELEASE): _S.RELEASED,
        # Transfers in flight still write to the memory: await them first.
        **{(state, _E.DROP): _S.ABSENT for state in _S if state is not _S.IN_FLIGHT},
    }
)


def after(state: ReplicaState, event: ReplicaEvent) -> ReplicaState:
    """Return the next state. Raises `RuntimeError` for an event that is illegal in `state`."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        legal = ", ".join(sorted(event.value for source, event in TRANSITIONS if source is state))
        raise RuntimeError(
            f"placement='fssdp': replicas are {state.value} and cannot {event.value}; legal events: {legal}"
        ) from None


class ReplicaTiming(Enum):
    """When a layer's replicas are sent, and their gradients returned."""

    EAGER = "from the start of the model's forward pass, and from the end of the layer's backward pass"
    IN_TURNS = "between the rows of one layer and the rows of the next layer, in a step with a plan"
    BY_TASKS = "in the sparse all-gather and reduce-scatter tasks of a plan"


class Replicas:
    """The replicas in a layer's table. "Collective" methods are collective over the expert-parallel group.

    `transport`: sends experts between ranks, shared by all layers; None without `ShardedExperts`. `sent_bytes`: bytes
    of parameters and gradients that this rank has sent.
    """

    def __init__(self, table: ExpertTable) -> None:
        self.table, self.state = table, ReplicaState.ABSENT
        self.transport: SparseCollectives | None = None
        self.sent_bytes = 0
        self._works: list[SparseWork] = []
        self._versions: list[tuple[int, int]] = []

    @property
    def has_started(self) -> bool:
        return self.state not in (ReplicaState.ABSENT, ReplicaState.RELEASED)

    def fetch(self, recording: RecordContext = None) -> None:
        """Start the transfers of all replicas. Collective."""
        tensors = self.table.tensors()
        # Compared later: replicas of older parameters must not be used.
        self._versions = self.table.versions()
        self._start(ReplicaEvent.FETCH, self.table.transfers, tensors, recording)

    def add(self, transfers: Sequence[Transfer], recording: RecordContext = None) -> None:
        """Start the transfers of on-demand replicas. Collective."""
        if transfers:
            self._start(ReplicaEvent.ADD, transfers, self.table.tensors(), recording)

    def wait_for_transfers(self) -> None:
        works, self._works = self._works, []
        try:
            for work in works:
                work.wait()
        except BaseException:
            self._transition(ReplicaEvent.FAIL)
            raise
        if self.state is not ReplicaState.PRESENT:
            self._transition(ReplicaEvent.ARRIVE)

    def invalidate(self) -> None:
        """Wait for started transfers, and mark the replicas as outdated."""
        self._wait_if_in_flight()
        self._transition(ReplicaEvent.DROP)

    def release(self) -> None:
        """Wait for started transfers, and free the memory of the replicas."""
        self._wait_if_in_flight()
        self._transition(ReplicaEvent.RELEASE)
        self.table.free_replicas()

    def abandon(self) -> None:
        """Mark the replicas as outdated. Transfers must have ended."""
        self._works = []
        if self.state is ReplicaState.IN_FLIGHT:
            self._transition(ReplicaEvent.FAIL)
        self._transition(ReplicaEvent.DROP)

    def why_unusable(self) -> str | None:
        """Return why replicas must not be used, or None."""
        has_data = bool(self._works) or self.state is ReplicaState.PRESENT
        if has_data and self._versions != self.table.versions():
            return (
                "experts have changed since their replicas started, at the start of the model's forward pass. Change "
                "parameters between forward and backward passes, not within one"
            )
        return None

    def send_gradients(
        self,
        transfers: Sequence[Transfer],
        row_of_expert: Mapping[int, int],
        grads: Sequence[Tensor],
        num_owned: int,
        recording: RecordContext,
    ) -> SparseWork:
        """Start sending gradients of replicas, along `transfers` reversed. Collective."""
        if not transfers:
            return SparseWork()
        assert self.transport is not None
        work = self.transport.reduce(reduce_transfers(transfers), row_of_expert, grads, num_owned, recording)
        self.sent_bytes += work.sent_bytes
        return work

    def _start(
        self, event: ReplicaEvent, transfers: Sequence[Transfer], tensors: Sequence[Tensor], recording: RecordContext
    ) -> None:
        state = after(self.state, event)
        if transfers:
            assert self.transport is not None
            with torch.inference_mode(False):  # it may end in another thread
                work = self.transport.gather(transfers, self.table.row_of_expert, tensors, recording)
            self.sent_bytes += work.sent_bytes
            self._works.append(work)
        self.state = state

    def _wait_if_in_flight(self) -> None:
        if self.state is ReplicaState.IN_FLIGHT:
            self.wait_for_transfers()

    def _transition(self, event: ReplicaEvent) -> None:
        self.state = after(self.state, event)
