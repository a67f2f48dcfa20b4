"""Replicas of one layer's experts on this rank: states (drawn in docs/life-of-a-replica.md), transfers and autograd.

Forward maps owned parameters to the rank's tables; backward sends gradients to the owners. The backward of
`AttachTables` sends replica gradients once the layer's backward is done. The backward of `ReceiveGradients` waits for
the gradients from other ranks and adds them to the owners' gradients. Its forward runs before the whole model, so its
backward runs last, and the backward of other layers hides the transfers (Hecate, section 4.1). Gradient hooks and
`.grad` see complete gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fusedmoe.kernels.derivatives import Function
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


# Sends the replica rows of table gradients: [rows, ...] for each parameter that requires gradients.
SendGradients = Callable[[Sequence[Tensor]], SparseWork]


class GradientRoute:
    """Transfers of the replica gradients of one forward pass.

    `AttachTables` starts the transfers in backward, `ReceiveGradients` waits for them. `row_of_expert`: row of each
    owned expert in the parameters. `is_sent`: a task of a plan has sent the gradients; autograd must not send them
    again.
    """

    def __init__(self, row_of_expert: dict[int, int], needs_grad: Sequence[bool]) -> None:
        self.row_of_expert, self.needs_grad, self.is_sent = row_of_expert, needs_grad, False
        self.works: list[SparseWork] = []

    def send(self, send: SendGradients, grads: Sequence[Tensor]) -> SparseWork:
        work = send(grads)
        self.works.append(work)
        return work


def send_accumulated(
    send: SendGradients,
    tables: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    totals: Sequence[Tensor | None] | None,
) -> SparseWork:
    """Compute the gradients of the tables from the gradients of the experts' inputs, and send those of replica rows.

    Args:
        inputs: the weights that the experts used, which depend on the tables (for example cast under autocast).
        totals: gradients of `inputs`, summed over chunks; None: there are none.
    """
    tables = [table for table in tables if table.requires_grad]
    pairs = zip(inputs, totals or [None] * len(inputs), strict=True)
    given = [(one, total.to(one.dtype)) for one, total in pairs if one is not None and total is not None]
    given = [(one, total) for one, total in given if one.requires_grad]
    grads: Sequence[Tensor | None] = [None] * len(tables)
    if given:
        outputs, totals = zip(*given, strict=True)
        grads = torch.autograd.grad(outputs, tables, totals, retain_graph=True, allow_unused=True)
    # The owner waits for a gradient from each replica.
    filled = zip(tables, grads, strict=True)
    return send([torch.zeros_like(table) if grad is None else grad.contiguous() for table, grad in filled])


class AttachTables(Function):
    """Returns the tables with the parameters as their inputs in the autograd graph.

    `parameters`: [owned, ...], outputs of `ReceiveGradients`. `tables`: [rows, ...], owned rows, then replica rows.
    """

    operation = "experts with replicas (placement='fssdp')"

    @staticmethod
    def forward(
        ctx: Any, route: GradientRoute, send: SendGradients, tables: list[Tensor], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.route, ctx.send = route, send
        ctx.num_owned = [len(parameter) for parameter in parameters]
        return _aliases(ctx, route, tables)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        route = ctx.route
        whole = [grad.contiguous() if needed else None for grad, needed in zip(grads, route.needs_grad, strict=True)]
        # After a plan's task, the link belongs to another layer.
        if not route.is_sent:
            route.send(ctx.send, [grad for grad in whole if grad is not None])
        owned = zip(whole, ctx.num_owned, strict=True)
        return None, None, None, *(None if grad is None else grad[:rows] for grad, rows in owned)


class ReceiveGradients(Function):
    """Returns aliases of the parameters. Backward waits for the gradients of their replicas and adds them."""

    operation = "gradients of experts' replicas (placement='fssdp')"

    @staticmethod
    def forward(ctx: Any, route: GradientRoute, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.route = route
        return _aliases(ctx, route, parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        route = ctx.route
        works, route.works = route.works, []
        arrived = [one for work in works for one in work.wait()]
        needed = [grad for grad, needs_grad in zip(grads, route.needs_grad, strict=True) if needs_grad]
        # A view would keep the replica gradients in memory.
        own = [grad.clone() if grad.untyped_storage().nbytes() > grad.nbytes else grad for grad in needed]
        by_row: dict[int, list[tuple[Tensor, ...]]] = {}
        for expert, parts in arrived:
            by_row.setdefault(route.row_of_expert[expert], []).append(parts)
        for row, several in by_row.items():
            for grad, *others in zip(own, *several, strict=True):
                # In transfer order (deterministic), rounded once.
                dtype = torch.promote_types(grad.dtype, torch.float32)
                total = grad[row].to(dtype)
                for other in others:
                    total = total + other.to(dtype)
                grad[row] = total
        whole = iter(own)
        return None, *(next(whole) if needs_grad else None for needs_grad in route.needs_grad)


def _aliases(ctx: Any, route: GradientRoute, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # Autograd does not treat an input that is returned unchanged as an output.
    aliases = tuple(tensor.detach() for tensor in tensors)
    frozen = (one for one, needs_grad in zip(aliases, route.needs_grad, strict=True) if not needs_grad)
    ctx.mark_non_differentiable(*frozen)
    return aliases
