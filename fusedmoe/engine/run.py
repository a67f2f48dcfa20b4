"""One run of a plan: what it is given, and the tasks between dispatch and combine, the same wherever rows come from.

A layer by itself has tokens that are routed already (`engine/collectives_dispatcher.py`); blocks route micro-batch by
micro-batch between these tasks (`fusedmoe/blocks`). Both passes of both are subclasses of `Pass`: they say what a chunk
sends (`start`) and what becomes of what comes back (`finish`).

    forward     start → dispatch → all-gather → expert → reduce-scatter → combine → finish       rows
    backward    start → dispatch → all-gather → expert → reduce-scatter → combine → finish       their gradients

A gradient's way to the experts is a dispatch, its way home a combine: so the all-to-all of a chunk in the backward pass
is `Pass.dispatch` and `Pass.combine`, too. Bodies of tasks are bound methods, by kind (`Pass.bodies`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fusedmoe.comm.exchange import Part
from fusedmoe.engine.chunk_experts import ChunkExperts, Rest, Totals
from fusedmoe.errors import ConfigError
from fusedmoe.hooks import Direction, HookContext, Hooks, carry
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.execute import execute
from fusedmoe.runtime.recorder import Recorder, record_with
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import GATHER, Task, TaskKind


class GradientReducer(Protocol):
    """Reduces gradients while the backward pass goes on; see `fusedmoe.training.gradient_buckets`."""

    @property
    def opened(self) -> bool:
        """Tells whether gradients of the pass that comes are to be reduced."""
        ...

    def give(self, parameter: torch.nn.Parameter, gradient: Tensor) -> None:
        """Takes a gradient that is complete, in memory of its own; it is reduced in place."""
        ...

    def reduce(self, task: Task) -> None: ...

    def begin(self, tasks: Sequence[Task], behind: Callable[[], None] | None = None) -> None:
        """Starts what runs beside the tasks that follow a plan. `behind`: waits for what has the link before."""
        ...

    def wait(self) -> None:
        """Waits for what was begun."""
        ...


@dataclass(frozen=True)
class Plans:
    """The order of work of two passes; each has its tasks once."""

    forward: Plan
    backward: Plan

    @cached_property
    def degrees(self) -> tuple[int, int]:
        """The largest numbers of chunks of a layer, forward and backward."""
        return max(self.forward.degrees.values(), default=1), max(self.backward.degrees.values(), default=1)

    def require_one_degree(self) -> None:
        """Raises `ConfigError` for other degrees backward than forward, which not all experts can follow: on every rank
        alike, for plans and experts are the same on all."""
        there, back = self.degrees
        if there != back:
            raise ConfigError(
                f"experts that are modules of their own need one degree for both passes, not {there} forward and "
                f"{back} backward: their backward follows the forward's chunks"
            )

    @cached_property
    def late_weight_gradients(self) -> frozenset[int | None]:
        """The layers whose experts' weight gradients are tasks of their own."""
        return frozenset(task.layer for task in self.backward if task.kind == TaskKind.WEIGHT_GRADIENT)


class CopiesInTurns(Protocol):
    """Copies of experts that travel, as their gradients do, between one layer's rows and the next's."""

    def wait(self) -> None:
        """Waits until none is on its way."""
        ...

    def send_back(self, made: Sequence[Tensor | None], totals: Totals) -> None:
        """Starts gradients on their way: those of what experts compute with."""
        ...


class Assigned(NamedTuple):
    """Plans that a layer was given to work by, and what they need.

    Attributes:
        gradients: reduces the gradient buckets that the backward plan has, and those `beside` what follows it.
    """

    plans: Plans
    gradients: GradientReducer | None = None
    beside: Sequence[Task] = ()


class _ReducedBehind(Function):
    operation = "gradient all-reduces of a plan that is not followed"

    @staticmethod
    def forward(ctx: Any, y_SM: Tensor, assigned: Assigned, behind: Callable[[], None] | None) -> Tensor:
        ctx.given = assigned, behind
        return y_SM.view_as(y_SM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (plans, gradients, beside), behind = ctx.given
        gradients.wait()
        for task in plans.backward:
            if task.kind == TaskKind.GRADIENT_ALL_REDUCE:
                gradients.reduce(task)
        gradients.begin(beside, behind)
        return grads[0], None, None


def reduced_behind(y_SM: Tensor, assigned: Assigned, behind: Callable[[], None] | None) -> Tensor:
    """Return a layer's result whose backward runs the gradient all-reduces of its plans, which it does not follow.

    Ranks of other expert-parallel groups may follow the same plans, and wait for this one in these all-reduces.
    """
    reduced: Tensor = _ReducedBehind.apply(y_SM, assigned, behind)
    return reduced


@dataclass(frozen=True, eq=False)
class Run:
    """A call's plans, and all that it needs beside tensors and modules. A graph keeps it.

    Attributes:
        stop: told of an exception on this rank while others wait for it.
        streams: one for each resource, on CUDA.
        gradients: reduces the gradient buckets in the backward plan, and those `beside` what follows it.
        copies: of experts, whose traffic goes ahead of this layer's, forward, and behind it, backward.
        arrive: waits in the forward pass for copies that travel beside rows, before experts compute; or else sends late
            ones in the plan's task for them, and waits there.
    """

    plans: Plans
    stop: Callable[[BaseException], None]
    hooks: Sequence[Hooks] = ()
    recorder: Recorder | None = None
    streams: Mapping[str, torch.cuda.Stream] | None = None
    gradients: GradientReducer | None = None
    beside: Sequence[Task] = ()
    copies: CopiesInTurns | None = None
    arrive: Callable[[], None] | None = None


@dataclass(eq=False)
class Chunk:
    """A chunk's rows in one layer and one pass.

    Attributes:
        layout: sorts received rows by local expert; None: not known yet.
        rows: wherever they are.
        pairs: the collectives of what travels along with rows, `beside`: codes and weights of pairs, in the backward
            pass gradients of weights.
        weight_R: of sorted rows, where weights are there already; then their gradients.
        x_RM, kept: what experts were given, where their backward reads it, and what they keep.
        rest: what gives gradients of parameters later.
    """

    part: Part
    layout: Layout | None = None
    rows: Tensor | None = None
    pairs: Part | None = None
    beside: Tensor | None = None
    weight_R: Tensor | None = None
    x_RM: Tensor | None = None
    kept: Any = None
    rest: Rest | None = None


class Pass:
    """One pass, forward or backward, by a plan.

    Attributes:
        experts: of each layer.   chunks: of each layer, as far as they are known.
        totals: gradients of each layer's experts' parameters.
    """

    phase: Direction

    def __init__(self, run: Run, experts: Mapping[int | None, ChunkExperts]) -> None:
        self.settings, self.experts = run, experts
        self.plan = run.plans.forward if self.phase == "forward" else run.plans.backward
        self.chunks: dict[int | None, dict[int, Chunk]] = {layer: {} for layer in experts}
        self.totals: dict[int | None, Totals] = dict.fromkeys(experts)

    def bodies(self) -> dict[str, Callable[[Task], None]]:
        """Returns what does the tasks of each kind."""
        # Made anew for each run: a pass that holds its own methods is a circle, which is freed late.
        return {
            TaskKind.DISPATCH: self.dispatch,
            TaskKind.ALL_GATHER: self.all_gather,
            TaskKind.EXPERT: self.expert,
            TaskKind.REDUCE_SCATTER: self.reduce_scatter,
            TaskKind.COMBINE: self.combine,
            TaskKind.GRADIENT_ALL_REDUCE: self.gradient_all_reduce,
        }

    def execute(self) -> None:
        """Runs all tasks."""
        run = self.settings
        # Each task is a span: parts of the experts inside it must not add another.
        with nullcontext() if run.recorder is None else record_with(None):
            execute(self.plan, self.bodies(), stop=run.stop, streams=run.streams, recorder=run.recorder)

    def hooks(self, task: Task) -> Sequence[Hooks]:
        """Returns the hooks of the task's layer."""
        return self.settings.hooks

    def start(self, task: Task) -> None:
        """Puts the rows that a chunk sends in place."""
        raise NotImplementedError

    def finish(self, task: Task, rows: Tensor) -> None:
        """Takes what has come back of a chunk."""
        raise NotImplementedError

    def dispatch(self, task: Task) -> None:
        self.start(task)
        chunk = self.chunks[task.layer][task.chunk or 0]
        chunk.rows = self._carry("dispatch", chunk.part.dispatch, task, chunk)
        # Codes and weights go to the experts in the forward pass; in the backward pass gradients of weights go home.
        if chunk.pairs is not None and chunk.beside is not None and self.phase == "forward":
            chunk.beside = chunk.pairs.dispatch(self.use(chunk.beside))

    def all_gather(self, task: Task) -> None:
        chunk = self.chunks[task.layer][task.chunk or 0]
        # The chunk lets go of rows that move on: their memory is free as soon as they have left.
        rows, chunk.rows = chunk.rows, None
        assert rows is not None
        # Shards of an expert need the same rows; their results are summands.
        chunk.rows = chunk.part.all_gather(self.use(rows))
        if chunk.pairs is not None and chunk.beside is not None and self.phase == "forward":
            chunk.beside = chunk.pairs.all_gather(self.use(chunk.beside))

    def expert(self, task: Task) -> None:
        raise NotImplementedError

    def reduce_scatter(self, task: Task) -> None:
        chunk = self.chunks[task.layer][task.chunk or 0]
        rows, chunk.rows = chunk.rows, None
        if rows is not None:  # else no rank needs gradients of rows, and none go back
            chunk.rows = chunk.part.reduce_scatter(self.use(rows))
        if chunk.pairs is not None and chunk.beside is not None and self.phase == "backward":
            chunk.beside = chunk.pairs.reduce_scatter(self.use(chunk.beside))

    def combine(self, task: Task) -> None:
        chunk = self.chunks[task.layer][task.chunk or 0]
        rows = None if chunk.rows is None else self._carry("combine", chunk.part.combine, task, chunk)
        if chunk.pairs is not None and chunk.beside is not None and self.phase == "backward":
            chunk.beside = chunk.pairs.combine(self.use(chunk.beside))
        if rows is not None:
            self.finish(task, rows)

    def _carry(self, name: str, move: Callable[[Tensor], Tensor], task: Task, chunk: Chunk) -> Tensor:
        """Moves a chunk's rows between nodes, with hooks at both ends. The chunk lets go of them."""
        rows, chunk.rows = chunk.rows, None
        assert rows is not None
        if hooks := self.hooks(task):
            context = HookContext(self.phase, task.chunk or 0, self.plan.degrees[task.phase, task.layer])
            return carry(hooks, name, move, self.use(rows), context)
        return move(self.use(rows))

    def gradient_all_reduce(self, task: Task) -> None:
        assert self.settings.gradients is not None
        self.settings.gradients.reduce(task)

    def use(self, tensor: Tensor) -> Tensor:
        """Marks a tensor that another stream has made."""
        if self.settings.streams is not None:
            # Its memory must not be given out anew while this stream still reads it.
            tensor.record_stream(torch.cuda.current_stream())
        return tensor


class ForwardPass(Pass):
    """A forward pass.

    Attributes:
        keep: a backward pass will follow.
    """

    phase = "forward"
    keep = True

    def bodies(self) -> dict[str, Callable[[Task], None]]:
        return {**super().bodies(), GATHER: self.sparse_all_gather}

    def weight_of(self, chunk: Chunk) -> Tensor | None:
        return chunk.weight_R

    def sparse_all_gather(self, task: Task) -> None:
        assert self.settings.arrive is not None
        self.settings.arrive()

    def expert(self, task: Task) -> None:
        chunk = self.chunks[task.layer][task.chunk or 0]
        x_RM, chunk.rows = chunk.rows, None
        assert x_RM is not None and chunk.layout is not None
        chunk.x_RM = self.use(x_RM)
        if self.settings.arrive is not None and GATHER not in self.plan.kinds:
            self.settings.arrive()
        experts = self.experts[task.layer]
        chunk.rows, chunk.kept = experts.forward(chunk.x_RM, chunk.layout, self.weight_of(chunk))
        # Rows go where no backward reads them, and without one pre-activations as well.
        if not (self.keep and experts.keeps_rows):
            chunk.x_RM = None
        if not self.keep:
            chunk.kept = None


class BackwardPass(Pass):
    """A backward pass, from what the forward pass kept of its chunks."""

    phase = "backward"

    def bodies(self) -> dict[str, Callable[[Task], None]]:
        return {**super().bodies(), TaskKind.WEIGHT_GRADIENT: self.weight_gradient}

    def weight_of(self, chunk: Chunk) -> Tensor | None:
        return chunk.weight_R

    def give_weights(self, chunk: Chunk, dweight_R: Tensor | None) -> None:
        chunk.weight_R = dweight_R

    def recall(self, task: Task) -> None:
        """Gives this pass's chunks what the forward pass kept of their rows, before their experts."""

    def expert(self, task: Task) -> None:
        layer, chunk = task.layer, self.chunks[task.layer][task.chunk or 0]
        self.recall(task)
        experts, weight_R = self.experts[layer], self.weight_of(chunk)
        dy_RM, chunk.rows = chunk.rows, None
        assert dy_RM is not None and chunk.layout is not None
        x_RM = None if chunk.x_RM is None else self.use(chunk.x_RM)
        given = self.use(dy_RM), x_RM, chunk.kept, chunk.layout, weight_R
        # Gradients of rows are on their way sooner where sums over rows are a task of their own (Lancet).
        if layer in self.settings.plans.late_weight_gradients:
            chunk.rows, dweight_R, chunk.rest = experts.backward_rows(*given)
        else:
            chunk.rows, dweight_R, self.totals[layer] = experts.backward(*given, self.totals[layer])
        # Nothing reads them again; the next chunk needs the memory.
        chunk.x_RM = chunk.kept = None
        self.give_weights(chunk, dweight_R)

    def weight_gradient(self, task: Task) -> None:
        chunks = self.chunks[task.layer]
        # In the order of their numbers, whatever the plan: the sums have one order.
        for number in sorted(chunks) if task.chunk is None else (task.chunk,):
            chunk = chunks[number]
            rest, chunk.rest = chunk.rest, None
            assert rest is not None
            self.totals[task.layer] = rest(self.totals[task.layer])
