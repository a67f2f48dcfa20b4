"""What the passes of a stack of layers are given, and what they hand each other.

`Stage` is one layer as the passes call it: what it computes of a piece by itself, and what goes between the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fusedmoe.autograd.hooks import Hooks
from fusedmoe.blocks.cuts import Cuts, Received, Sent
from fusedmoe.blocks.deferred import DeferredGradients
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.group import Group
from fusedmoe.engine.chunk_experts import ChunkExperts, Totals
from fusedmoe.engine.run import Chunk, Counts, Pass, Run, present
from fusedmoe.kernels.layout import Layout
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import Task


class Choice(Protocol):
    """What a stack needs of a gate's routing; see `fusedmoe.layers.gates.Routing`."""

    expert_SK: Tensor
    weight_SK: Tensor
    aux_loss: Tensor


class OrderedRows(Protocol):
    """Rows that an order makes of tokens, and what restores these; see `fusedmoe.layers.orders.Ordered`."""

    @property
    def x_SM(self) -> Tensor: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def weight_SK(self) -> Tensor | None: ...
    @property
    def kept_E(self) -> Tensor: ...
    @property
    def combine_SN(self) -> Tensor | None: ...


@dataclass(frozen=True)
class Share:
    """A part of a batch, and how many of its tokens each rank routes that has the same ones: first those of rank 0.

    Attributes:
        number, of: which part, of how many.
        rows: of each rank; one number where no rank has the same tokens.   rank: this rank's place.
    """

    number: int
    of: int
    rows: Sequence[int]
    rank: int

    @property
    def own(self) -> slice:
        """Where this rank's tokens are among those of the part."""
        start = sum(self.rows[: self.rank])
        return slice(start, start + self.rows[self.rank])

    def spread(self, own_S: Tensor, fill: int = 0) -> Tensor:
        """Values of this rank's tokens -> of all of the part's, with `fill` for those of others."""
        tokens, at = sum(self.rows), self.own
        if len(own_S) == tokens:
            return own_S
        before, after = (own_S.new_full((n, *own_S.shape[1:]), fill) for n in (at.start, tokens - at.stop))
        return torch.cat([before, own_S, after])


class Dense(NamedTuple):
    """What a layer computes of a piece by itself.

    Attributes:
        y: the residual stream, like x.   u: what the experts see, like x, in the dtype in which it travels.
        shared: what comes to the experts' results before `Stage.end`, like x; None: nothing.
        scores: of the gate, [S, …] each, of the tokens that this rank routes.   routing: by them.
        own: what later pieces of the same samples need of this one; empty where pieces are whole samples.
    """

    y: Tensor
    u: Tensor
    shared: Tensor | None
    scores: tuple[Tensor, ...]
    routing: Choice
    own: tuple[Tensor, ...]


class Stage(Protocol):
    """One layer.

    Attributes:
        experts_in_all: E.
        waits: whether it takes all tokens to know which rows an expert has no room for.
        mp: ranks that have the same tokens, of which each routes a slice; a group of one where each has its own.
        hooks: see rows on their way.
        orders: rows are made by `order` and restored by `end`; else they are copies of tokens.
        ends: experts' results go through `end`; else they are added to y as they come.
        held: experts that this rank has, where `places` says which; None: as many as every other.
        returns: sends gradients of copies of experts to their owners, by the totals of what `experts` gave; None: there
            are none.
        dense_parameters: of dense part and gate, the model's own.
    """

    experts_in_all: int
    waits: bool
    mp: Group
    hooks: Sequence[Hooks]
    orders: bool
    ends: bool

    @property
    def held(self) -> int | None: ...

    @property
    def returns(self) -> Callable[[Totals], None] | None: ...

    @property
    def dense_parameters(self) -> Sequence[torch.nn.Parameter]: ...

    def capacity(self, tokens: int) -> int | None:
        """Rows that an expert takes of so many tokens; None: all."""
        ...

    def draw(self, x_SM: Tensor) -> tuple[Tensor, ...]:
        """What belongs to the tokens of a batch beside x: random numbers, above all. [S, …] each."""
        ...

    def dense(
        self,
        parameters: Sequence[Tensor],
        x: Tensor,
        share: Share,
        drawn: tuple[Tensor, ...],
        past: Sequence[tuple[Tensor, ...]],
        later: DeferredGradients | None,
    ) -> Dense:
        """Of one piece [b, …, M].

        Args:
            parameters: to compute with in place of `dense_parameters`.
            share: which piece it is.   drawn: for the tokens that this rank routes.
            past: `own` of the pieces before of the same samples.
            later: takes the weight gradients that may be computed later; None: none may.
        Raises:
            ConfigError: what this rank made of the piece is none to go on with; the next exchange tells the others.
        """
        ...

    def order(self, u_SM: Tensor, expert_SK: Tensor, weight_SK: Tensor) -> OrderedRows:
        """The rows of some tokens, of which none is to be dropped any more. Differentiable."""
        ...

    def restore(self, y_SM: Tensor, ordered: OrderedRows) -> Tensor:
        """Results of tokens from those of `ordered.x_SM`. Differentiable."""
        ...

    def end(self, y: Tensor, share: Share) -> Tensor:
        """What the layer gives of some samples: of the experts' results, [b, …, M], zero for tokens that other ranks
        route. Differentiable; collective over `mp`, but for its backward."""
        ...

    def choose(self, scores: tuple[Tensor, ...]) -> Choice:
        """The routing of the whole batch, with its auxiliary loss."""
        ...

    def count(self, routing: Choice, kept_E: Tensor) -> None:
        """Told the routing of the whole batch, and how many rows of each expert were kept of it."""
        ...

    def places(self, layout: Layout) -> Layout:
        """Sorts rows that are sorted by expert by the places of its copies. Collective over the experts' ranks."""
        ...

    def gather(self) -> None:
        """Copies of experts come, where plans have a task for it. Collective over the experts' ranks."""
        ...

    def exchange(self, counts: Tensor, like: Tensor, routings: Sequence[Choice], refusal: str | None) -> Exchange: ...

    def experts(self, like: Tensor) -> ChunkExperts: ...


class Cut(NamedTuple):
    """How a batch becomes pieces.

    Attributes:
        peers: ranks that the experts are split over.
        axis: of the batch that is cut.
        in_order: pieces go to `Stage.dense` one after the other, with what it gave for those before: positions.
    """

    peers: int
    axis: int = 0
    in_order: bool = False

    def samples(self, x: Tensor) -> Tensor:
        """A piece, as `Stage` takes it. A batch that is cut along its second axis, but not in positions, has its
        samples along both."""
        return x.flatten(0, 1) if self.axis == 1 and not self.in_order else x


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

    `u`: what the experts see, until it has gone there. `shared`: what comes to their results. `past`, `own`: of other
    units' keys and values, leaves here, and this unit's. `down`: the gradients that later units have for `own`.
    """

    x: Tensor
    u: Tensor | None
    shared: Tensor | None
    to: tuple[Output, Output, Output | None]  # y, u, shared
    share: Share
    scores: tuple[Tensor, ...]
    routing: Choice
    own: tuple[Tensor, ...]
    past: Sequence[tuple[Tensor, ...]]
    later: DeferredGradients | None
    dispatched: int = 0  # pieces that have gone
    down: list[Tensor | None] = field(default_factory=list)


@dataclass(eq=False)
class Piece:
    """The rows of some samples in one layer: where they go, and with what weight.

    `ordered`: what an order made of the tokens. `ended`: what the layer gives of the experts' results, the results of
    tokens that it is made of, and those of rows. `dy`: the gradient of the second; `dcombine`: of what restored it.
    """

    layout: Layout
    weight_N: Tensor
    kept_E: Tensor
    ordered: OrderedRows | None = None
    ended: tuple[Output, Tensor, Tensor] | None = None
    dy: Tensor | None = None
    dcombine: Tensor | None = None
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
    hooks: Sequence[Hooks]
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
    held: int | None = None  # experts, under a placement
    returns: Callable[[Totals], None] | None = None  # of gradients of copies of experts

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
        self.cut, self.axis, self.peers, self.layers, self.shape = cut, cut.axis, cut.peers, layers, shape

    def at(self, task: Task) -> tuple[int, Layer]:
        number = self.number(task)
        return number, self.layers[number]

    def piece_chunk(self, task: Task) -> PieceChunk:
        chunk = self.chunk(task)
        assert isinstance(chunk, PieceChunk)
        return chunk

    def hooks(self, task: Task) -> Sequence[Hooks]:
        return self.at(task)[1].hooks

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
