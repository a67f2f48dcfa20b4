"""The experts of one layer under a dynamic placement: each has one owner and temporary replicas (Hecate).

Dispatch sends rows to slots in the ranks' tables of experts (`expert_table.py`). A rank's rows for one expert are split
over the owner and its replicas, transparently to dispatch, experts and combine.

    begin → split_rows → call( run(experts, replicas) )          one forward pass of a layer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusedmoe.comm.collectives import all_gather_rows
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.metadata import ExpertCalls, NonFiniteCount, RowForm
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import tensor_version
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.collectives_dispatcher import Collectives, CountedBatch
from fusedmoe.engine.dispatcher import LocalExperts, Routed, is_recomputing
from fusedmoe.engine.recomputation import without_selective_checkpoint
from fusedmoe.experts.networks import Experts, ExpertsModule
from fusedmoe.kernels.derivatives import before_backward, require_no_tangent
from fusedmoe.kernels.layout import Layout
from fusedmoe.placement.balance import Balance
from fusedmoe.placement.expert_table import ExpertTable, sort_by_slot, sum_over_shards
from fusedmoe.placement.expert_transport import SparseCollectives, SparseWork
from fusedmoe.placement.placement import Placement
from fusedmoe.placement.replicas import (
    AttachTables,
    GradientRoute,
    ReceiveGradients,
    RecordContext,
    Replicas,
    ReplicaTiming,
    SendGradients,
    send_accumulated,
)
from fusedmoe.placement.traffic import Transfer, split_tokens
from fusedmoe.runtime.recorder import DeviceTime, Recorder, active_recorder, part_span, span
from fusedmoe.schedule.task import SPARSE_GATHER, SPARSE_REDUCE

T = TypeVar("T")

_OPERATION = "experts with replicas (placement='fssdp')"

# (placement, tokens of each rank for each expert) -> a placement with at least the replicas of `placement`.
Calibrate = Callable[[Placement, NDArray[np.int64]], Placement]
# (as above, whether replicas may be added) -> rows that each rank computes.
ShareRows = Callable[[Placement, NDArray[np.int64], bool], Balance]


@dataclass(frozen=True, eq=False)
class PlacementSettings:
    """Settings that `ShardedExperts` attaches to a layer's experts.

    Attributes:
        transport: sends experts between ranks; shared by all layers, which orders the transfers.
        previous_layer, next_layer: whose replicas may be fetched one layer ahead.
        releases_replicas: replicas are released after each forward and fetched again for its backward.
        calibrate: adds on-demand replicas for the current batch's routing (`hecate.calibrate`).
        share_rows: assigns rows to replicas (`placement.balance`); None: rows are split evenly.
    """

    transport: SparseCollectives | None = None
    previous_layer: PlacedExperts | None = None
    next_layer: PlacedExperts | None = None
    releases_replicas: bool = False
    calibrate: Calibrate | None = None
    share_rows: ShareRows | None = None


class IdleClock:
    """Records when the model and a layer's experts start and end in a forward pass."""

    def __init__(self) -> None:
        self.is_on = False
        self.model_start, self.experts_start, self.experts_end = DeviceTime(), DeviceTime(), DeviceTime()

    def note(self, moment: DeviceTime, device: torch.device) -> None:
        if self.is_on:
            moment.record(device)

    def idle_s(self, previous: IdleClock | None) -> float:
        """Return the seconds between the previous layer's experts (or the model's start) and this layer's."""
        start = self.model_start if previous is None else previous.experts_end
        return max(0.0, self.experts_start.seconds_since(start))


class PlacedExperts:
    """The experts of one layer under a placement that changes between steps.

    Constructed by `MoELayer(placement="fssdp")`; `ShardedExperts` attaches settings and sets placements. "Collective"
    methods are collective over the expert-parallel group: its ranks call them in the same order, layer by layer.

    Attributes:
        timing: when replicas are sent.
        is_trained: a backward pass has computed gradients of these experts.
        deep_copies: existing results of `copy.deepcopy`, numbered in order of creation.
    """

    def __init__(self, experts: Experts, num_experts: int, topology: Topology) -> None:
        self._reset(ExpertTable(experts, num_experts, topology))

    def _reset(self, table: ExpertTable, timing: ReplicaTiming = ReplicaTiming.EAGER) -> None:
        self.table, self.replicas, self.timing = table, Replicas(table), timing
        self.settings = PlacementSettings()
        self.clock, self._load_E = IdleClock(), np.zeros(table.placement.experts, dtype=np.int64)
        self.deep_copies: WeakValueDictionary[int, PlacedExperts] = WeakValueDictionary()
        self._deep_copy_numbers = count()
        self._recorder: Recorder | None = None
        self._gradient_route: GradientRoute | None = None
        self._parameter_aliases: tuple[Tensor, ...] = ()
        # Whether `begin` has prepared a forward; whether on-demand replicas are fixed until the next step.
        self._has_begun = self._replicas_are_final = self.is_trained = False

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedExperts:
        # Shares topology, groups and streams, and has no replicas.
        made = copy(self)
        memo[id(self)] = made
        self.deep_copies[next(self._deep_copy_numbers)] = made
        made._reset(self.table.copy_for(deepcopy(self.table.experts, memo)), self.timing)
        return made

    def attach(self, settings: PlacementSettings) -> None:
        self.settings = settings
        self.replicas.transport = settings.transport

    def detach(self) -> None:
        self.replicas.abandon()
        self.attach(PlacementSettings())
        self.pop_load()
        self.clock.is_on = self._has_begun = False
        self._recorder, self._gradient_route, self._parameter_aliases = None, None, ()
        self._set_placement(self.table.sharding)

    @property
    def is_attached(self) -> bool:
        return self.settings.transport is not None

    def set_placement(self, placement: Placement) -> None:
        """Set the placement, with the same owners, of the next forward passes, which fetch its replicas."""
        assert placement.sharding == self.table.sharding, "owners change by reshard()"
        self.replicas.invalidate()
        self._set_placement(placement)

    def reshard(self, sharding: Placement, tensors: Mapping[str, Tensor]) -> None:
        """Change owners. `tensors`: parameters of this rank's new experts. Drops gradients."""
        self.replicas.invalidate()  # first: no transfer may write to the old memory
        self.table.replace_parameters(tensors)
        self._set_placement(sharding)
        self._gradient_route, self._parameter_aliases = None, ()  # they describe rows of the old owners

    def _set_placement(self, placement: Placement) -> None:
        self.table.set_placement(placement)
        self._replicas_are_final = False

    @contextmanager
    def with_timing(self, timing: ReplicaTiming) -> Iterator[None]:
        outer, self.timing = self.timing, timing
        try:
            yield
        finally:
            self.timing = outer

    def why_not_in_blocks(self) -> str | None:
        """Return why pipelined blocks do not support the settings, else None.

        In blocks, all layers compute concurrently, and replicas are chosen before the first gate.
        """
        if self.clock.is_on:
            return "overlap=None measures the time between two layers: give ShardedExperts(overlap=…)"
        if self.settings.releases_replicas:
            return "rematerialises=True releases replicas after each layer: use rematerialises=False"
        if self.settings.calibrate is not None:
            return "replicas are added once a gate has chosen for a whole batch: use policy='hecate' without calibrates"
        return None

    def begin_once(self, recorder: Recorder | None) -> None:
        """Call `begin` unless it was called for this forward pass. Collective."""
        if not self.is_attached or not (self._has_begun or is_recomputing()):
            self.begin(recorder)

    def begin(self, recorder: Recorder | None = None) -> None:
        """Prepare a forward pass: drop the previous pass's replicas, and start fetching new ones. Collective.

        Nothing is fetched yet if a plan's tasks or an earlier layer start the transfer (`ReplicaTiming`). `recorder`
        records the transfers of this pass.
        """
        self.clock.note(self.clock.model_start, self.table.device)
        # Changes of parameters through `.data` are undetectable, so replicas serve one forward and its backward.
        self.replicas.invalidate()
        self._has_begun, self._recorder = True, recorder
        is_first = self.settings.previous_layer is None
        one_by_one = self._needs_fetch_ahead or self.timing is ReplicaTiming.IN_TURNS
        if is_first if one_by_one else self.timing is ReplicaTiming.EAGER:
            self.fetch()
        if torch.is_grad_enabled():
            self._create_gradient_route()

    @property
    def _needs_fetch_ahead(self) -> bool:
        """Whether each layer fetches the next layer's replicas. On-demand replicas then wait for few transfers."""
        shares = self.settings.share_rows is not None and self.timing is ReplicaTiming.EAGER
        return self.settings.releases_replicas or shares

    def _create_gradient_route(self) -> None:
        # Created before the whole model runs: its backward then runs last, hidden by other layers' backward.
        row_of_expert = {expert: row for row, expert in enumerate(self.table.local_experts[: self.table.num_owned])}
        parameters = self.table.parameters
        self._gradient_route = GradientRoute(row_of_expert, [parameter.requires_grad for parameter in parameters])
        self._parameter_aliases = ReceiveGradients.apply(self._gradient_route, *parameters)

    def fetch(self) -> None:
        """Start fetching replicas unless already started. Collective."""
        if not self.replicas.has_started:
            self.replicas.fetch(self._record_gather())

    def fetch_next(self) -> None:
        """Start fetching the next layer's replicas if they are fetched one layer ahead. Collective."""
        next_layer = self.settings.next_layer
        if self._needs_fetch_ahead and next_layer is not None and self.timing is not ReplicaTiming.IN_TURNS:
            next_layer.fetch()

    def wait_for_replicas(self) -> None:
        """Wait for all replicas of this layer; start fetching them if necessary. Collective."""
        self.fetch()
        self.replicas.wait_for_transfers()

    def wait_for_link(self) -> None:
        """Wait for all layers' transfers. Does not raise their errors."""
        if self.settings.transport is not None:
            self.settings.transport.wait_for_all()

    def pop_load(self) -> NDArray[np.int64]:
        """Return and reset [E], this rank's rows for each expert since the last call."""
        load_E, self._load_E = self._load_E, np.zeros_like(self._load_E)
        return load_E

    def split_rows(self, layout: Layout, training: bool, may_add: bool = True) -> Layout:
        """Divide each expert's rows among owner and replicas, and re-sort them by slot. Collective.

        Args:
            layout: sorted by expert, without padding.
            training: count the tokens for the next prediction, which excludes evaluation.
            may_add: on-demand replicas may be added.
        """
        table, settings = self.table, self.settings
        if training:
            self.clock.note(self.clock.experts_start, table.device)
        counts_E = layout.counts_E
        # With all counts, assigning rows to replicas needs no further communication.
        ones, me = [1] * table.group.size, table.group.index
        tokens_WE = all_gather_rows(table.group, counts_E[None], ones, "exchange of loads").cpu().numpy()
        if training:
            self._load_E += tokens_WE[me]
        if settings.calibrate is not None and training:
            self._add_replicas(settings.calibrate(table.current, sum_over_shards(table.shards, tokens_WE)))
        if settings.share_rows is None:
            sent_EV = split_tokens(tokens_WE, table.current, table.node_layout)[me]
        else:
            # Once per step: recomputations and backward passes need the tables of the forward.
            may_add = training and may_add and not self._replicas_are_final
            sent_EV = self._share_rows(settings.share_rows, tokens_WE, may_add).sent_from(me)
        return sort_by_slot(layout, sent_EV, table.experts_W)

    def _share_rows(self, share_rows: ShareRows, tokens_WE: NDArray[np.int64], may_add: bool) -> Balance:
        if may_add:
            self._replicas_are_final = True
            target = share_rows(self.table.current, sum_over_shards(self.table.shards, tokens_WE), True)
            if target.placement == self.table.current and self.table.shards.size == 1:
                return target
            self._add_replicas(target.placement)
        return share_rows(self.table.current, tokens_WE, False)

    def _add_replicas(self, target: Placement) -> None:
        """Fetch the missing replicas of `target`; remove all others. Collective."""
        if target != self.table.current:
            self.wait_for_replicas()
            self.replicas.add(self.table.set_replicas(target), self._record_gather())

    def call(
        self, run: Callable[[Experts, ReplicaCall], T], *, wait_first: bool = False, fetch_first: bool = True
    ) -> T:
        """Return `run(experts, replicas)`, with tables (`ExpertTable`) as the experts' parameters. Collective.

        Args:
            wait_first: wait for replicas before `run`.
            fetch_first: start fetching replicas before `run`; False: a plan's task fetches them during `run`.
        """
        settings, next_layer = self.settings, self.settings.next_layer
        is_in_turns, is_recomputed = self.timing is ReplicaTiming.IN_TURNS, is_recomputing()
        if not is_recomputed:
            self._has_begun = False
        if wait_first or is_in_turns:
            self.wait_for_replicas()
            self.fetch_next()
        elif fetch_first:
            self.fetch()
        if is_in_turns:
            self.wait_for_link()
        # Transfers of parameters to replicas would lose forward-mode derivatives.
        require_no_tangent(_OPERATION, self.table.parameters)
        tables, needs_grad, send = self.table.tensors(), torch.is_grad_enabled(), None
        self._replicas_are_final |= needs_grad
        if needs_grad:
            tables, send = self._attach_tables(tables)
        named = {f"experts.{name}": table for name, table in zip(self.table.names, tables, strict=True)}
        replicas = ReplicaCall(self, tables, send)
        y = torch.func.functional_call(ExpertsModule(self.table.experts), named, (run, replicas))
        if needs_grad and (settings.releases_replicas or is_in_turns):
            assert isinstance(y, Tensor)
            y = before_backward(y, self._prepare_backward, _OPERATION)
        # The last layer's backward runs next: keep its replicas. A recomputation is followed by its backward.
        if settings.releases_replicas and not (needs_grad and (next_layer is None or is_recomputed)):
            self.replicas.release()
        # With a plan, the link is free for the next layer's replicas after this layer's rows.
        if is_in_turns and next_layer is not None and not is_recomputed:
            next_layer.fetch()
        if not is_recomputed:
            self.clock.note(self.clock.experts_end, self.table.device)
        return y

    def _attach_tables(self, tables: Sequence[Tensor]) -> tuple[list[Tensor], SendGradients | None]:
        """Connect the tables to the parameters in autograd.

        Also returns the function that sends replica gradients; None if all parameters are frozen.
        """
        if self._gradient_route is None:  # `begin` was not called with gradients enabled
            self._create_gradient_route()
        assert self._gradient_route is not None
        versions = [tensor_version(parameter) for parameter in self.table.parameters]
        table = self.table
        send = partial(self._send_gradients, table.transfers, table.row_of_expert, table.num_owned, versions)
        made = list(AttachTables.apply(self._gradient_route, send, list(tables), *self._parameter_aliases))
        needs_grad = any(self._gradient_route.needs_grad)
        return made, partial(self._send_by_plan, self._gradient_route, send) if needs_grad else None

    def _prepare_backward(self) -> None:
        """Fetch released replicas before the layer's backward. Collective."""
        is_in_turns, previous = self.timing is ReplicaTiming.IN_TURNS, self.settings.previous_layer
        if self.settings.releases_replicas:
            self.wait_for_replicas()
            if previous is not None and not is_in_turns:
                previous.fetch()
        if is_in_turns:
            self.wait_for_link()

    def _send_gradients(
        self,
        transfers: tuple[Transfer, ...],
        row_of_expert: dict[int, int],
        num_owned: int,
        versions: list[int],
        grads: Sequence[Tensor],
    ) -> SparseWork:
        self.is_trained = True
        if versions != [tensor_version(parameter) for parameter in self.table.parameters]:
            raise RuntimeError(
                "experts have changed between a forward pass and its backward pass; call backward() before "
                "optimizer.step()"
            )
        if self.settings.releases_replicas:
            self.replicas.release()
        recording = self._record("sparse reduce-scatter", SPARSE_REDUCE, "backward")
        return self.replicas.send_gradients(transfers, row_of_expert, grads, num_owned, recording)

    def _send_by_plan(self, route: GradientRoute, send: SendGradients, grads: Sequence[Tensor]) -> SparseWork:
        route.is_sent = True
        work = route.send(send, grads)
        previous = self.settings.previous_layer
        if self.settings.releases_replicas and previous is not None:
            previous.fetch()
        return work

    def _record_gather(self) -> RecordContext:
        return self._record("sparse all-gather", SPARSE_GATHER, "backward" if is_recomputing() else "forward")

    def _record(self, name: str, kind: str, phase: str) -> RecordContext:
        if self.timing is ReplicaTiming.BY_TASKS:
            return None  # the executor records the task
        return span(self._recorder, name, kind=kind, resource="inter", phase=phase)


class ReplicaCall:
    """The replicas of one call of a layer's experts; implements `engine.run.ReplicaTransport`.

    Args:
        tables: the experts' parameters in this call.
        send: sends the gradients of `tables`' replicas to their owners; None: no gradients are needed.
    """

    def __init__(self, placed: PlacedExperts, tables: Sequence[Tensor], send: SendGradients | None) -> None:
        self._placed = placed
        # Without a plan, autograd sends gradients as soon as they are computed.
        self._send = None if placed.timing is ReplicaTiming.EAGER else send
        self._tables = () if self._send is None else tables

    def wait_for_replicas(self) -> None:
        self._placed.fetch_next()
        self._placed.wait_for_replicas()

    def send_gradients(
        self, inputs: Sequence[Tensor | None], totals: Sequence[Tensor | None] | None, *, wait: bool = False
    ) -> Callable[[], None]:
        if self._send is None:
            return lambda: None
        work = send_accumulated(self._send, self._tables, inputs, totals)
        if wait:
            work.wait()
        return self._placed.wait_for_link


class PlacedDispatcher(Collectives):
    """Dispatches tokens by collectives to owners and replicas, while replica weights are in flight.

    A pair's slot (example in `expert_table`) also determines the rank that adds it to its partial sum, so results
    depend on the placement only by rounding. Predicted replicas of the next layer are sent while this layer's experts
    compute, on-demand replicas together with this layer's rows.
    """

    compiles = False

    def __init__(self, placed: PlacedExperts, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._placed = placed

    def exchange_metadata(
        self, routed: Routed, calls: ExpertCalls, by_node: bool = True, weight_N: Tensor | None = None
    ) -> CountedBatch:
        placed = self._placed
        placed.begin_once(active_recorder())
        with part_span("permute"):
            # Without padding: rows are split by their counts. Predictions use training steps only.
            training = placed.table.experts.training and not is_recomputing()
            layout = placed.split_rows(routed.layout.exact(), training)
        refusal = placed.replicas.why_unusable() or routed.refusal
        return super().exchange_metadata(routed._replace(layout=layout, refusal=refusal), calls, by_node, weight_N)

    def exchange_counts(
        self, counts_E: Tensor, form: RowForm, refusal: str | NonFiniteCount | None, **options: Any
    ) -> Exchange:
        return super().exchange_counts(counts_E, form, refusal, held=self._placed.table.num_rows, **options)

    def through_experts(self, routed: Routed, experts: LocalExperts) -> Tensor:
        with without_selective_checkpoint():
            counted = self.exchange_metadata(routed, self.find_expert_calls(self._placed.table.experts))
            return self._placed.call(partial(self.send_through_experts, counted, shared=routed.shared))

    def can_chunk(self, experts: ChunkExperts) -> bool:
        # In a step with a plan, all layers follow the plan.
        return self._placed.timing is ReplicaTiming.IN_TURNS or super().can_chunk(experts)

    def in_chunks(self, experts: LocalExperts, x_SM: Tensor) -> ChunkExperts:
        if self._placed.table.is_read_early(x_SM.dtype):
            self._placed.wait_for_replicas()
        return super().in_chunks(experts, x_SM)
