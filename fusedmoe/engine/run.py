"""One run of a plan: what it is given, and the tasks between dispatch and combine, the same wherever rows come from.

`engine/tokens.py` runs a layer by itself, whose tokens are routed already; `blocks/` runs blocks, which route
piece by piece between these tasks. Both passes of both are subclasses of `Pass`: they say what a chunk sends (`start`)
and what becomes of what comes back (`finish`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fusedmoe.autograd.hooks import Direction, HookContext, Hooks, carry
from fusedmoe.comm.exchange import Part
from fusedmoe.engine.chunk_experts import ChunkExperts, Rest, Totals
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.execute import execute
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import PIPELINE, WEIGHT_GRADIENTS, Task


class GradientReducer(Protocol):
    """Reduces gradients while the backward pass goes on; see `fusedmoe.training.gradient_buckets`."""

    @property
    def opened(self) -> bool:
        """Whether gradients of the pass that comes are to be reduced."""
        ...

    def give(self, parameter: torch.nn.Parameter, gradient: Tensor) -> None:
        """A gradient that is complete, in memory of its own; it is reduced in place."""
        ...

    def reduce(self, task: Task) -> None: ...

    def begin(self, tasks: Sequence[Task], behind: Callable[[], None] | None = None) -> None:
        """Starts what runs beside the tasks that follow a plan. `behind`: waits for what has the link before."""
        ...

    def wait(self) -> None:
        """For what was begun."""
        ...


@dataclass(frozen=True)
class Plans:
    """The order of work of two passes; each has its tasks once."""

    forward: Plan
    backward: Plan

    def of(self, direction: Direction) -> Plan:
        return self.forward if direction == "forward" else self.backward


class CopiesInTurns(Protocol):
    """Copies of experts that come, and whose gradients go, between one layer's traffic and the next's."""

    def wait(self) -> None:
        """Until none is on its way."""
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


@cache
def one_chunk(sharded: bool) -> Plans:
    """One chunk, with the steps inside a node where experts are sharded."""

    def of(phase: str) -> Plan:
        dispatch, gather, expert, scatter, combine = (Task(kind, 0, 0, phase) for kind in PIPELINE)
        return Plan((expert,), (gather, scatter) if sharded else (), (dispatch, combine))

    return Plans(of("forward"), of("backward"))


@dataclass(frozen=True, eq=False)
class Run:
    """What a call needs beside tensors and modules. A graph keeps it.

    Attributes:
        stop: told of an exception on this rank while others wait for it.
        streams: one for each resource, on CUDA.
        gradients: reduces the gradient buckets in the backward plan, and those `beside` what follows it.
        copies: of experts, whose traffic goes ahead of this layer's, forward, and behind it, backward.
    """

    plans: Plans
    stop: Callable[[BaseException], None]
    hooks: Sequence[Hooks] = ()
    recorder: Recorder | None = None
    streams: Mapping[str, torch.cuda.Stream] | None = None
    gradients: GradientReducer | None = None
    beside: Sequence[Task] = ()
    copies: CopiesInTurns | None = None

    def degree(self, direction: Direction) -> int:
        return max(self.plans.of(direction).degrees.values(), default=1)


@dataclass(eq=False)
class Chunk:
    """A chunk's rows in one layer and one pass.

    Attributes:
        layout: sorts received rows by local expert.
        rows: wherever they are.   weights: with them, where these travel along; gradients of them in the backward pass.
        weight_R: of sorted rows, where weights are there already; then their gradients.
        x_RM, kept: what experts were given, and what they keep.   rest: what gives gradients of parameters later.
    """

    part: Part
    layout: Layout
    rows: Tensor | None = None
    weights: Tensor | None = None
    weight_R: Tensor | None = None
    x_RM: Tensor | None = None
    kept: Any = None
    rest: Rest | None = None


class Counts:
    """In how many chunks a plan has each part of each layer, and whether weight gradients are tasks of their own."""

    def __init__(self, plan: Plan) -> None:
        self._counts = Counter((task.kind, task.layer) for task in plan)

    def dense(self, layer: int | None) -> int:
        return self._counts["attention", layer] or 1

    def rows(self, layer: int | None) -> int:
        return max((self._counts[kind, layer] for kind in PIPELINE), default=0) or 1

    def of(self, kind: str, layer: int | None) -> int:
        return self._counts[kind, layer]


class Pass:
    """One pass.

    Attributes:
        experts: of each layer.   chunks: of each layer, as far as they are known.
        totals: gradients of each layer's experts' parameters.
    """

    phase: Direction

    def __init__(self, run: Run, experts: Sequence[ChunkExperts]) -> None:
        self.settings, self.experts = run, list(experts)
        self.plan = run.plans.of(self.phase)
        self.counts = Counts(self.plan)
        self.chunks: list[dict[int, Chunk]] = [{} for _ in experts]
        self.totals: list[Totals] = [None] * len(self.experts)

    def execute(self) -> None:
        run = self.settings
        bodies = {task.kind: getattr(self, task.kind.replace("-", "_")) for task in self.plan}
        execute(self.plan, bodies, stop=run.stop, streams=run.streams, recorder=run.recorder)

    def number(self, task: Task) -> int:
        """Of the task's layer."""
        assert task.layer is not None
        return task.layer

    def chunk(self, task: Task) -> Chunk:
        return self.chunks[self.number(task)][task.chunk or 0]

    def hooks(self, task: Task) -> Sequence[Hooks]:
        """Of the task's layer."""
        return self.settings.hooks

    def start(self, task: Task) -> None:
        """Puts the rows that a chunk sends in place."""
        raise NotImplementedError

    def finish(self, task: Task, rows: Tensor) -> None:
        """Takes what has come back of a chunk."""
        raise NotImplementedError

    def dispatch(self, task: Task) -> None:
        self.start(task)
        self._move(task, "dispatch", there=True)

    def all_gather(self, task: Task) -> None:
        self._move(task, "all_gather", there=True)

    def reduce_scatter(self, task: Task) -> None:
        self._move(task, "reduce_scatter", there=False)

    def combine(self, task: Task) -> None:
        self._move(task, "combine", there=False)
        chunk = self.chunk(task)
        rows, chunk.rows = present(chunk.rows), None
        self.finish(task, rows)

    def _move(self, task: Task, name: str, there: bool) -> None:
        """`there`: towards the experts. Weights go there in the forward pass, their gradients back."""
        chunk, hooks, move = self.chunk(task), self.hooks(task), getattr(self.chunk(task).part, name)
        rows, chunk.rows = self.use(present(chunk.rows)), None
        if hooks and name in ("dispatch", "combine"):
            context = HookContext(self.phase, task.chunk or 0, self.counts.rows(task.layer))
            chunk.rows = carry(hooks, name, move, rows, context)
        else:
            chunk.rows = move(rows)
        if chunk.weights is not None and there == (self.phase == "forward"):
            chunk.weights = move(self.use(chunk.weights))

    def gradient_all_reduce(self, task: Task) -> None:
        present(self.settings.gradients).reduce(task)

    def use(self, tensor: Tensor) -> Tensor:
        """For a tensor that another stream has made: its memory must not be given out anew while this one reads it."""
        if self.settings.streams is not None:
            tensor.record_stream(torch.cuda.current_stream())
        return tensor


class ForwardPass(Pass):
    """`keep`: a backward pass will follow."""

    phase = "forward"
    keep = True

    def weight_of(self, chunk: Chunk) -> Tensor | None:
        return chunk.weight_R

    def expert(self, task: Task) -> None:
        chunk = self.chunk(task)
        chunk.x_RM, chunk.rows = self.use(present(chunk.rows)), None
        experts = self.experts[self.number(task)]
        chunk.rows, chunk.kept = experts.forward(chunk.x_RM, chunk.layout, self.weight_of(chunk))
        if not self.keep:
            chunk.x_RM = chunk.kept = None


class BackwardPass(Pass):
    phase = "backward"

    def weight_of(self, chunk: Chunk) -> Tensor | None:
        return chunk.weight_R

    def give_weights(self, chunk: Chunk, dweight_R: Tensor | None) -> None:
        chunk.weight_R = dweight_R

    def recall(self, task: Task) -> None:
        """Before a chunk's experts: what the forward pass kept of its rows goes to this pass's chunks."""

    def expert(self, task: Task) -> None:
        number, chunk = self.number(task), self.chunk(task)
        self.recall(task)
        experts, weight_R = self.experts[number], self.weight_of(chunk)
        dy_RM, chunk.rows = self.use(present(chunk.rows)), None
        given = dy_RM, self.use(present(chunk.x_RM)), chunk.kept, chunk.layout, weight_R
        if self.counts.of(WEIGHT_GRADIENTS["expert"], task.layer):
            chunk.rows, dweight_R, chunk.rest = experts.backward_rows(*given)
        else:
            chunk.rows, dweight_R, self.totals[number] = experts.backward(*given, self.totals[number])
        chunk.x_RM = chunk.kept = None
        self.give_weights(chunk, dweight_R)

    def weight_gradient(self, task: Task) -> None:
        number = self.number(task)
        for at in range(self.counts.rows(task.layer)) if task.chunk is None else (task.chunk,):
            chunk = self.chunks[number][at]
            self.totals[number], chunk.rest = present(chunk.rest)(self.totals[number]), None


_T = TypeVar("_T")


def present(value: _T | None) -> _T:
    """What the plan's order has put in place."""
    assert value is not None
    return value
