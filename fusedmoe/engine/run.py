"""Tasks of a plan from dispatch to combine, forward and backward.

Single layers (`engine/planned.py`) and blocks (`fusedmoe/blocks`) subclass `PassRun` and define the rows that a chunk
sends (`prepare_rows`) and the use of the combined rows (`store_results`).

    forward     prepare_rows → dispatch → all-gather → expert → reduce-scatter → combine → store_results    rows
    backward    prepare_rows → dispatch → all-gather → expert → reduce-scatter → combine → store_results    gradients

The backward of combine is a dispatch, and the backward of dispatch is a combine: both passes share
`PassRun.dispatch` and `PassRun.combine`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fusedmoe.comm.exchange import RowExchange
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import AddGrads, ChunkExperts, Totals
from fusedmoe.errors import ConfigError
from fusedmoe.hooks import Direction, HookContext, Hooks, transfer_with_hooks
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.execute import Streams, execute
from fusedmoe.runtime.recorder import Recorder, record_with
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import SPARSE_GATHER, Task, TaskKind


class GradientReducer(Protocol):
    """All-reduces gradients in buckets during the backward pass."""

    @property
    def is_open(self) -> bool:
        """True if the next backward pass reduces gradients."""
        ...

    def add_gradient(self, parameter: torch.nn.Parameter, gradient: Tensor) -> None:
        """Add a complete gradient. It is reduced in place, so it must not share memory."""
        ...

    def reduce(self, task: Task) -> None: ...

    def begin(self, tasks: Sequence[Task], wait_for_link: Callable[[], None] | None = None) -> None:
        """Start reductions that overlap with later tasks. `wait_for_link` is called before the first one."""
        ...

    def wait(self) -> None:
        """Wait for the reductions of `begin`."""
        ...


@dataclass(frozen=True)
class Plans:
    """The plans of a forward and a backward pass."""

    forward: Plan
    backward: Plan

    def of(self, phase: str) -> Plan:
        return self.forward if phase == "forward" else self.backward

    @cached_property
    def degrees(self) -> tuple[int, int]:
        """The maximum number of chunks over all layers, forward and backward."""
        return max(self.forward.degrees.values(), default=1), max(self.backward.degrees.values(), default=1)

    def require_one_degree(self) -> None:
        forward, backward = self.degrees
        if forward != backward:
            raise ConfigError(
                f"experts that are modules of their own need one degree for both passes, not {forward} forward and "
                f"{backward} backward: their backward follows the forward's chunks"
            )

    @cached_property
    def deferred_weight_gradients(self) -> frozenset[int | None]:
        """The layers whose weight gradients are separate tasks (Lancet)."""
        return frozenset(task.layer for task in self.backward if task.kind == TaskKind.WEIGHT_GRADIENT)


class ReplicaTransport(Protocol):
    """Transfers of one layer call: replicas of its experts, and the gradients of these replicas."""

    def wait_for_replicas(self) -> None:
        """Wait until the experts of this rank can compute with all replicas."""
        ...

    def send_gradients(
        self, inputs: Sequence[Tensor | None], totals: Totals, *, wait: bool = False
    ) -> Callable[[], None]:
        """Start sending gradients of replicas to their owners. Return a function that waits until the link is free.

        Args:
            inputs, totals: the experts' parameters in this call, and their gradients summed over all chunks.
            wait: block until the gradients have arrived.
        """
        ...


class AssignedPlans(NamedTuple):
    """Plans that a layer follows, by its schedule or in place of it.

    Attributes:
        gradients: reduces the gradient buckets of the backward plan; None: the plan has none.
        trailing_all_reduces: gradient all-reduces that start after the backward plan and overlap with later tasks.
    """

    plans: Plans
    gradients: GradientReducer | None = None
    trailing_all_reduces: Sequence[Task] = ()


class _ReduceInBackward(Function):
    operation = "gradient all-reduces of a plan that is not followed"

    @staticmethod
    def forward(ctx: Any, y_SM: Tensor, assigned: AssignedPlans) -> Tensor:
        ctx.assigned = assigned
        return y_SM.view_as(y_SM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        plans, gradients, trailing_all_reduces = ctx.assigned
        gradients.wait()
        for task in plans.backward:
            if task.kind == TaskKind.GRADIENT_ALL_REDUCE:
                gradients.reduce(task)
        gradients.begin(trailing_all_reduces)
        return grads[0], None


def reduce_in_backward(y_SM: Tensor, assigned: AssignedPlans) -> Tensor:
    """Return `y_SM`, the result of a layer that ran without its plans, with a backward that runs their all-reduces.

    Ranks of other expert-parallel groups may follow the plans, and would wait for this rank in the all-reduces.
    """
    if assigned.gradients is None:
        return y_SM
    reduced: Tensor = _ReduceInBackward.apply(y_SM, assigned)
    return reduced


@dataclass(frozen=True, eq=False)
class Run:
    """Settings of one forward call and its backward. An autograd graph can keep it: it holds no tensors or modules.

    `report_error`: reports this rank's exception to the other ranks, which then raise instead of waiting.
    """

    plans: Plans
    report_error: Callable[[BaseException], None]
    hooks: Sequence[Hooks] = ()
    recorder: Recorder | None = None
    streams: Mapping[str, torch.cuda.Stream] | None = None
    gradients: GradientReducer | None = None
    trailing_all_reduces: Sequence[Task] = ()
    replicas: ReplicaTransport | None = None


class Runner:
    """Starts the runs of a layer or of pipelined blocks. Chunks overlap on `streams`; None: the current stream."""

    def __init__(self, topology: Topology, name: str, hooks: Sequence[Hooks] = ()) -> None:
        self._topology, self._name, self._hooks = topology, name, hooks
        self.streams: Streams | None = Streams()

    def start(
        self,
        assigned: AssignedPlans,
        device: torch.device,
        recorder: Recorder | None,
        replicas: ReplicaTransport | None = None,
    ) -> Run:
        plans, gradients, trailing_all_reduces = assigned
        streams = None if self.streams is None else self.streams.on(device)
        report_error = partial(self._topology.stop, self._name)
        return Run(plans, report_error, self._hooks, recorder, streams, gradients, trailing_all_reduces, replicas)


@dataclass(eq=False)
class Chunk:
    """One chunk of one layer in one pass.

    Attributes:
        layout: sorts received rows by local expert; None until computed.
        rows: this chunk's rows: inputs, received rows, or results, depending on the task.
        pair_values: packed expert id and router weight per (token, expert) pair; in backward, the weights' gradients.
        weight_R: router weights of the sorted rows, then their gradients.
        x_RM: received tokens; None if the backward of the experts does not read them.
        encoded_dtype: dtype to which the experts' ranks decode the rows (`comm/wire_format.py`); None: not encoded.
    """

    exchange: RowExchange
    layout: Layout | None = None
    rows: Tensor | None = None
    pair_exchange: RowExchange | None = None
    pair_values: Tensor | None = None
    weight_R: Tensor | None = None
    x_RM: Tensor | None = None
    activations: Any = None
    add_weight_grads: AddGrads | None = None
    encoded_dtype: torch.dtype | None = None

    def decode(self, rows: Tensor) -> Tensor:
        wire = self.exchange.algorithm.wire
        assert wire is not None and self.encoded_dtype is not None
        return wire.decode(rows, self.encoded_dtype)


class PassRun:
    """Base of a forward or backward pass that executes tasks in the order of a plan."""

    phase: Direction

    def __init__(self, run: Run, experts: Mapping[int | None, ChunkExperts]) -> None:
        self.settings, self.experts = run, experts
        # `Plans.of` written out: passes begin in every forward and backward.
        self.plan = run.plans.forward if self.phase == "forward" else run.plans.backward
        self.chunks: dict[int | None, dict[int, Chunk]] = {layer: {} for layer in experts}
        self.totals: dict[int | None, Totals] = dict.fromkeys(experts)

    def task_methods(self) -> dict[str, Callable[[Task], None]]:
        # Not an attribute: a pass that holds its own bound methods is a reference cycle, which is freed late.
        return {
            TaskKind.DISPATCH: self.dispatch,
            TaskKind.ALL_GATHER: self.all_gather,
            TaskKind.EXPERT: self.expert,
            TaskKind.SHARED_EXPERT: self.shared_expert,
            TaskKind.REDUCE_SCATTER: self.reduce_scatter,
            TaskKind.COMBINE: self.combine,
            TaskKind.GRADIENT_ALL_REDUCE: self.gradient_all_reduce,
        }

    def execute(self) -> None:
        run = self.settings
        # Each task is recorded as one span; the experts inside it must not add another.
        with nullcontext() if run.recorder is None else record_with(None):
            execute(self.plan, self.task_methods(), stop=run.report_error, streams=run.streams, recorder=run.recorder)

    def hooks(self, task: Task) -> Sequence[Hooks]:
        return self.settings.hooks

    def replicas(self, task: Task) -> ReplicaTransport | None:
        return self.settings.replicas

    def prepare_rows(self, task: Task) -> None:
        """Set the rows that a chunk sends. Called at the start of its dispatch."""
        raise NotImplementedError

    def store_results(self, task: Task, rows: Tensor) -> None:
        """Store the combined results of a chunk. Called at the end of its combine."""
        raise NotImplementedError

    def dispatch(self, task: Task) -> None:
        self.prepare_rows(task)
        chunk = self.chunks[task.layer][task.chunk or 0]
        chunk.rows = self._transfer("dispatch", chunk.exchange.dispatch, task, chunk)
        # Expert ids and weights are dispatched in the forward pass; gradients of weights are combined in the backward.
        if chunk.pair_exchange is not None and chunk.pair_values is not None and self.phase == "forward":
            chunk.pair_values = chunk.pair_exchange.dispatch(self.keep_alive(chunk.pair_values))

    def all_gather(self, task: Task) -> None:
        chunk = self.chunks[task.layer][task.chunk or 0]
        # The chunk drops its reference, so that the memory is free once the rows are sent.
        rows, chunk.rows = chunk.rows, None
        assert rows is not None
        chunk.rows = chunk.exchange.all_gather(self.keep_alive(rows))
        if chunk.pair_exchange is not None and chunk.pair_values is not None and self.phase == "forward":
            chunk.pair_values = chunk.pair_exchange.all_gather(self.keep_alive(chunk.pair_values))

    def expert(self, task: Task) -> None:
        raise NotImplementedError

    def weight_of(self, chunk: Chunk) -> Tensor | None:
        return chunk.weight_R

    def shared_expert(self, task: Task) -> None:
        """Compute the layer's shared expert. Does nothing here: the caller computes it after the plan."""

    def reduce_scatter(self, task: Task) -> None:
        chunk = self.chunks[task.layer][task.chunk or 0]
        rows, chunk.rows = chunk.rows, None
        if rows is not None:  # None: no rank needs gradients of the rows
            chunk.rows = chunk.exchange.reduce_scatter(self.keep_alive(rows))
        if chunk.pair_exchange is not None and chunk.pair_values is not None and self.phase == "backward":
            chunk.pair_values = chunk.pair_exchange.reduce_scatter(self.keep_alive(chunk.pair_values))

    def combine(self, task: Task) -> None:
        chunk = self.chunks[task.layer][task.chunk or 0]
        move, wire = chunk.exchange.combine, chunk.exchange.algorithm.wire
        if wire is not None and wire.encodes_results:
            move = partial(wire.transfer, move)
        rows = None if chunk.rows is None else self._transfer("combine", move, task, chunk)
        if chunk.pair_exchange is not None and chunk.pair_values is not None and self.phase == "backward":
            chunk.pair_values = chunk.pair_exchange.combine(self.keep_alive(chunk.pair_values))
        if rows is not None:
            self.store_results(task, rows)

    def _transfer(self, name: str, move: Callable[[Tensor], Tensor], task: Task, chunk: Chunk) -> Tensor:
        rows, chunk.rows = chunk.rows, None
        assert rows is not None
        if hooks := self.hooks(task):
            context = HookContext(self.phase, task.chunk or 0, self.plan.degrees[task.phase, task.layer])
            return transfer_with_hooks(hooks, name, move, self.keep_alive(rows), context)
        return move(self.keep_alive(rows))

    def gradient_all_reduce(self, task: Task) -> None:
        assert self.settings.gradients is not None
        self.settings.gradients.reduce(task)

    def keep_alive(self, tensor: Tensor) -> Tensor:
        """Keep a tensor's memory from being reused while the current stream still reads it; return the tensor."""
        if self.settings.streams is not None:
            tensor.record_stream(torch.cuda.current_stream())
        return tensor


class ForwardPass(PassRun):
    """Base of forward passes. `saves_for_backward`: save tensors for a backward pass."""

    phase = "forward"
    saves_for_backward = True

    def task_methods(self) -> dict[str, Callable[[Task], None]]:
        return {**super().task_methods(), SPARSE_GATHER: self.sparse_all_gather}

    def sparse_all_gather(self, task: Task) -> None:
        replicas = self.replicas(task)
        assert replicas is not None
        replicas.wait_for_replicas()

    def expert(self, task: Task) -> None:
        chunk = self.chunks[task.layer][task.chunk or 0]
        x_RM, chunk.rows = chunk.rows, None
        assert x_RM is not None and chunk.layout is not None
        x_RM = self.keep_alive(x_RM)
        if chunk.encoded_dtype is not None:
            x_RM = chunk.decode(x_RM)
        chunk.x_RM = x_RM
        if (replicas := self.replicas(task)) is not None and SPARSE_GATHER not in self.plan.kinds:
            replicas.wait_for_replicas()
        experts = self.experts[task.layer]
        chunk.rows, chunk.activations = experts.forward(chunk.x_RM, chunk.layout, self.weight_of(chunk))
        if not (self.saves_for_backward and experts.needs_input_rows):
            chunk.x_RM = None
        if not self.saves_for_backward:
            chunk.activations = None


class BackwardPass(PassRun):
    """Base of backward passes. They read the tensors that the forward pass saved."""

    phase = "backward"

    def task_methods(self) -> dict[str, Callable[[Task], None]]:
        return {**super().task_methods(), TaskKind.WEIGHT_GRADIENT: self.weight_gradient}

    def store_weight_grads(self, chunk: Chunk, dweight_R: Tensor | None) -> None:
        chunk.weight_R = dweight_R

    def rechunk_saved(self, task: Task) -> None:
        """Set the saved tensors of a chunk before its experts run, if the forward pass had other chunks."""

    def expert(self, task: Task) -> None:
        layer, chunk = task.layer, self.chunks[task.layer][task.chunk or 0]
        self.rechunk_saved(task)
        experts, weight_R = self.experts[layer], self.weight_of(chunk)
        dy_RM, chunk.rows = chunk.rows, None
        assert dy_RM is not None and chunk.layout is not None
        x_RM, dy_RM = None if chunk.x_RM is None else self.keep_alive(chunk.x_RM), self.keep_alive(dy_RM)
        if chunk.encoded_dtype is not None:
            dy_RM = chunk.decode(dy_RM)
        given = dy_RM, x_RM, chunk.activations, chunk.layout, weight_R
        # Weight gradients are separate tasks: gradients of rows are sent earlier (Lancet).
        if layer in self.settings.plans.deferred_weight_gradients:
            chunk.rows, dweight_R, chunk.add_weight_grads = experts.backward_rows(*given)
        else:
            chunk.rows, dweight_R, self.totals[layer] = experts.backward(*given, self.totals[layer])
        chunk.x_RM = chunk.activations = None
        self.store_weight_grads(chunk, dweight_R)

    def weight_gradient(self, task: Task) -> None:
        chunks = self.chunks[task.layer]
        # In ascending order, so that the sum does not depend on the plan.
        for number in sorted(chunks) if task.chunk is None else (task.chunk,):
            chunk = chunks[number]
            add_weight_grads, chunk.add_weight_grads = chunk.add_weight_grads, None
            assert add_weight_grads is not None
            self.totals[task.layer] = add_weight_grads(self.totals[task.layer])
