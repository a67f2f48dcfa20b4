"""What the passes of a stack of layers are given, and what they hand each other.

`Stage` is one layer as the passes call it: what it computes of a piece by itself, and what goes between the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fusedmoe.autograd.deferred import DeferredGradients
from fusedmoe.comm.exchange import Exchange
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.chunks import Cuts, Received, Sent
from fusedmoe.engine.run import Chunk, Counts, Pass, Run, present
from fusedmoe.kernels.layout import Layout
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import Task


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
        later: DeferredGradients | None,
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


class Cut(NamedTuple):
    """How a batch becomes pieces.

    Attributes:
        peers: ranks that the experts are split over.
        axis: of the batch that is cut: 0, samples, or 1, positions; these then go to `Stage.dense` in order.
    """

    peers: int
    axis: int = 0


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
    later: DeferredGradients | None
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
class PieceChunk(Chunk):
    """A chunk of pieces, which it joins."""

    sent: Sent | None = None
    received: Received | None = None


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
    chunks: dict[int, PieceChunk] = field(default_factory=dict)
    sizes: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # of each piece
    dscores: list[Tensor | None] | None = None  # of the auxiliary loss, of the whole batch
    exchange: Exchange | None = None

    def unit_of(self, p: int) -> int:
        """The unit that a piece is of."""
        return max(place for place, share in enumerate(self.unit_cuts.shares[:-1]) if share <= self.cuts.shares[p])


class BlockPass(Pass):
    """What both passes have in common.

    Args:
        cut: of the batch.
        shape: of the batch, [B, …, M].
    """

    def __init__(self, run: Run, cut: Cut, layers: list[Layer], shape: torch.Size) -> None:
        super().__init__(run, [layer.experts for layer in layers])
        self.axis, self.peers, self.layers, self.shape = cut.axis, cut.peers, layers, shape

    def at(self, task: Task) -> tuple[int, Layer]:
        number = self.number(task)
        return number, self.layers[number]

    def piece_chunk(self, task: Task) -> PieceChunk:
        chunk = self.chunk(task)
        assert isinstance(chunk, PieceChunk)
        return chunk

    def weight_of(self, chunk: Chunk) -> Tensor:
        return self.use(present(chunk.weights))[:, 0][chunk.layout.pair_N]

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
        at = cuts.slice(pieces, batch.shape[self.axis])
        return batch[at] if self.axis == 0 else batch[:, at]

    def in_unit(self, layer: Layer, p: int) -> tuple[slice, ...]:
        """Where a piece is in its unit."""
        size, place = self.shape[self.axis], layer.unit_of(p)
        start = layer.unit_cuts.slice(range(place, place + 1), size).start
        at = layer.cuts.slice(range(p, p + 1), size)
        return (slice(None),) * self.axis + (slice(at.start - start, at.stop - start),)


def cuts_of(plans: Iterable[Plan], layer: int) -> tuple[Cuts, Cuts]:
    """Where the plans of both passes cut a layer's dense part, and where its rows."""
    counts = [Counts(plan) for plan in plans]
    dense, rows = {of.dense(layer) for of in counts}, {of.rows(layer) for of in counts}
    return Cuts.of(dense), Cuts.of(dense | rows)
