"""What the passes of a stack of layers are given, and what they hand each other.

`Stage` is one layer as the passes call it: what it computes of a piece by itself, and what goes between the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fusedmoe.autograd.hooks import Direction
from fusedmoe.autograd.linear_later import Later
from fusedmoe.comm.exchange import Exchange, Part
from fusedmoe.engine.chunk_experts import ChunkExperts, Rest
from fusedmoe.engine.chunked import Plans
from fusedmoe.engine.chunks import Cuts, Received, Sent
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.execute import execute
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import PIPELINE, Task


class Choice(Protocol):
    """What a stack needs of a gate's routing; see `fusedmoe.layers.gates.Routing`."""

    expert_SK: Tensor
    weight_SK: Tensor
    aux_loss: Tensor


class Dense(NamedTuple):
    """What a layer computes of a piece by itself.

    Attributes:
        y: the residual stream, like x.   u: what the experts see, like x, in the dtype in which it travels.
        scores: of the gate, [S, …] each.   routing: by them.
        own: what later pieces of the same samples need of this one; empty where pieces are whole samples.
    """

    y: Tensor
    u: Tensor
    scores: tuple[Tensor, ...]
    routing: Choice
    own: tuple[Tensor, ...]


class Stage(Protocol):
    """One layer.

    Attributes:
        experts_in_all: E.
        waits: whether it takes all tokens to know which rows an expert has no room for.
        dense_parameters: of dense part and gate, the model's own.
    """

    experts_in_all: int
    waits: bool

    @property
    def dense_parameters(self) -> Sequence[torch.nn.Parameter]: ...

    def capacity(self, tokens: int) -> int | None:
        """Rows that an expert takes of so many tokens; None: all."""
        ...

    def draw(self, x: Tensor) -> tuple[Tensor, ...]:
        """What belongs to the tokens of a batch beside x: random numbers, above all. First dimensions are tokens'."""
        ...

    def dense(
        self,
        parameters: Sequence[Tensor],
        x: Tensor,
        drawn: tuple[Tensor, ...],
        past: Sequence[tuple[Tensor, ...]],
        later: Later | None,
    ) -> Dense:
        """Of one piece [b, …, M].

        Args:
            parameters: to compute with in place of `dense_parameters`.
            past: `own` of the pieces before of the same samples.
            later: takes the weight gradients that may be computed later; None: none may.
        """
        ...

    def choose(self, scores: tuple[Tensor, ...]) -> Choice:
        """The routing of the whole batch, with its auxiliary loss."""
        ...

    def count(self, routing: Choice, kept_E: Tensor) -> None:
        """Told the routing of the whole batch, and how many rows of each expert were kept of it."""
        ...

    def exchange(self, counts: Tensor, like: Tensor, routings: Sequence[Choice]) -> Exchange: ...

    def experts(self, like: Tensor) -> ChunkExperts: ...


class Gradients(Protocol):
    """Reduces the gradients of dense parts while the backward pass goes on; see `fusedmoe.training.stream`."""

    @property
    def opened(self) -> bool:
        """Whether gradients of the pass that comes are to be reduced."""
        ...

    def give(self, parameter: torch.nn.Parameter, gradient: Tensor) -> None:
        """A gradient that is complete, in memory of its own; it is reduced in place."""
        ...

    def reduce(self, task: Task) -> None: ...


@dataclass(frozen=True, eq=False)
class Stack:
    """What a call of `through_stack` needs beside tensors.

    Attributes:
        axis: of the batch that is cut: 0, samples, or 1, positions; these then go to `Stage.dense` in order.
        peers: ranks that the experts are split over.
        stop: told of an exception on this rank while others wait for it.
        gradients: reduces the gradient pieces in the backward plan.
        streams: one for each resource, on CUDA.
    """

    plans: Plans
    peers: int
    stop: Callable[[BaseException], None]
    axis: int = 0
    gradients: Gradients | None = None
    recorder: Recorder | None = None
    streams: Mapping[str, torch.cuda.Stream] | None = None


@dataclass(eq=False)
class Output:
    """A result of a unit's graph. Its values can go when they are no longer needed; its gradient has its place."""

    shape: torch.Size
    dtype: torch.dtype
    edge: GradientEdge | None  # None: no gradient

    @classmethod
    def of(cls, tensor: Tensor) -> Output:
        return cls(tensor.shape, tensor.dtype, get_gradient_edge(tensor) if tensor.requires_grad else None)


@dataclass(eq=False)
class Unit:
    """Some samples in one layer's dense part and gate, and the graph that these made.

    `u`: what the experts see, until it has gone there. `past`, `own`: of other units' keys and values, leaves here, and
    this unit's. `dpast`: the gradients that later units have for `own`.
    """

    x: Tensor
    u: Tensor | None
    to: tuple[Output, Output]  # y, u
    scores: tuple[Tensor, ...]
    routing: Choice
    own: tuple[Tensor, ...]
    past: Sequence[tuple[Tensor, ...]]
    later: Later | None
    dispatched: int = 0  # pieces that have gone
    down: list[Tensor | None] = field(default_factory=list)


@dataclass(eq=False)
class Piece:
    """The rows of some samples in one layer: where they go, and with what weight."""

    layout: Layout
    weight_N: Tensor
    drows: Tensor | None = None
    dweight: Tensor | None = None


@dataclass(eq=False)
class Chunk:
    """A chunk's rows in one layer and one pass."""

    sent: Sent
    part: Part
    received: Received
    rows: Tensor | None
    weights: Tensor | None = None  # of received rows, and gradients of them
    x_RM: Tensor | None = None
    kept: Any = None
    rest: Rest | None = None


@dataclass(eq=False)
class Layer:
    """One layer. Cuts of units are coarser than those of pieces, or the same."""

    experts: ChunkExperts
    own: Sequence[torch.nn.Parameter]  # the dense part's, the model's own
    parameters: list[Tensor]  # of the dense part, leaves of their own: hooks of the real ones see whole gradients only
    unit_cuts: Cuts
    cuts: Cuts
    units: list[Unit | None]
    pieces: list[Piece | None]
    z: Tensor | None = None  # what the layer gives, as far as it has come
    chunks: dict[int, Chunk] = field(default_factory=dict)
    sizes: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # of each piece
    dscores: list[Tensor | None] | None = None  # of the auxiliary loss, of the whole batch
    exchange: Exchange | None = None

    def unit_of(self, p: int) -> int:
        """The unit that a piece is of."""
        return max(place for place, share in enumerate(self.unit_cuts.shares[:-1]) if share <= self.cuts.shares[p])


class Counts:
    """In how many chunks a plan has each part of each layer, and whether weight gradients are tasks of their own."""

    def __init__(self, plan: Plan) -> None:
        self._counts = Counter((task.kind, task.layer) for task in plan)

    def dense(self, layer: int) -> int:
        return self._counts["attention", layer] or 1

    def rows(self, layer: int) -> int:
        return max((self._counts[kind, layer] for kind in PIPELINE), default=0) or 1

    def of(self, kind: str, layer: int) -> int:
        return self._counts[kind, layer]


class Pass:
    """What both passes have in common. `shape`: of the batch, [B, …, M]."""

    def __init__(self, stack: Stack, phase: Direction, layers: list[Layer], shape: torch.Size) -> None:
        self.stack, self.phase, self.layers, self.shape = stack, phase, layers, shape
        self.plan = stack.plans.of(phase)
        self.counts = Counts(self.plan)
        self.chunks: list[dict[int, Chunk]] = [{} for _ in layers]

    def execute(self) -> None:
        stack = self.stack
        bodies = {task.kind: getattr(self, task.kind.replace("-", "_")) for task in self.plan}
        execute(self.plan, bodies, stop=stack.stop, streams=stack.streams, recorder=stack.recorder)

    def at(self, task: Task) -> tuple[int, Layer]:
        assert task.layer is not None
        return task.layer, self.layers[task.layer]

    def chunk(self, task: Task) -> Chunk:
        assert task.layer is not None
        return self.chunks[task.layer][task.chunk or 0]

    def units(self, task: Task) -> range:
        """Of a dense part's task."""
        number, layer = self.at(task)
        return layer.unit_cuts.chunk(task.chunk or 0, self.counts.dense(number), self.phase)

    def pieces(self, task: Task) -> range:
        """Of a task of the experts' pipeline."""
        number, layer = self.at(task)
        return layer.cuts.chunk(task.chunk or 0, self.counts.rows(number), self.phase)

    def view(self, batch: Tensor, cuts: Cuts, pieces: range) -> Tensor:
        """Some pieces of a batch, [B, …, M]."""
        at = cuts.slice(pieces, batch.shape[self.stack.axis])
        return batch[at] if self.stack.axis == 0 else batch[:, at]

    def in_unit(self, layer: Layer, p: int) -> tuple[slice, ...]:
        """Where a piece is in its unit."""
        size, place = self.shape[self.stack.axis], layer.unit_of(p)
        start = layer.unit_cuts.slice(range(place, place + 1), size).start
        at = layer.cuts.slice(range(p, p + 1), size)
        return (slice(None),) * self.stack.axis + (slice(at.start - start, at.stop - start),)

    def use(self, tensor: Tensor) -> Tensor:
        """For a tensor that another stream has made: its memory must not be given out anew while this one reads it."""
        if self.stack.streams is not None:
            tensor.record_stream(torch.cuda.current_stream())
        return tensor


_T = TypeVar("_T")


def there(value: _T | None) -> _T:
    """What the plan's order has put in place."""
    assert value is not None
    return value


def cuts_of(plans: Iterable[Plan], layer: int) -> tuple[Cuts, Cuts]:
    """Where the plans of both passes cut a layer's dense part, and where its rows."""
    counts = [Counts(plan) for plan in plans]
    dense, rows = {of.dense(layer) for of in counts}, {of.rows(layer) for of in counts}
    return Cuts.of(dense), Cuts.of(dense | rows)
