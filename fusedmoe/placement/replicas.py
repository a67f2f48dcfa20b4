"""Replicas of one layer's experts on this rank, with the states of `replica_state.TRANSITIONS`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fusedmoe.placement.expert_table import ExpertTable
from fusedmoe.placement.expert_transport import SparseCollectives, SparseWork
from fusedmoe.placement.replica_state import ReplicaEvent, ReplicaState, after
from fusedmoe.placement.traffic import Transfer, reduce_transfers

# Context that records a transfer, entered by the thread that runs it.
RecordContext = AbstractContextManager[None] | None


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
