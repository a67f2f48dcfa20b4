"""State of blocks that the forward pass hands to the backward pass: of each block its micro-batches and chunks.

Nothing here holds a module: a graph keeps it, and a layer that keeps a tensor of that graph would never go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fusedmoe.blocks.cuts import BlockCuts, BlockDegrees, MicroBatch, MicroBatchSizes, ReceivedChunk, Sent
from fusedmoe.blocks.deferred import DeferredGradients
from fusedmoe.comm.exchange import Exchange
from fusedmoe.engine.chunk_experts import ChunkExperts, Totals
from fusedmoe.engine.run import Chunk, Pass, Run
from fusedmoe.gates.base import Routing
from fusedmoe.hooks import Hooks
from fusedmoe.kernels.deduplicate import Sending
from fusedmoe.kernels.layout import Layout
from fusedmoe.orders import Ordered
from fusedmoe.schedule.task import Task


class Split(NamedTuple):
    """Description of how a batch becomes micro-batches.

    Attributes:
        peers: ranks that the experts are split over.
        axis: of the batch that is cut.
        in_order: micro-batches go to the dense part one after the other, with what it gave for those before: positions.
    """

    peers: int
    axis: int = 0
    in_order: bool = False

    def samples(self, x: Tensor) -> Tensor:
        """Returns a micro-batch as a block takes it. A batch that is cut along its second axis, but not in positions,
        has its samples along both."""
        # [rank, samples of each] is how `PipelinedBlocks` cuts tokens that an MP group has in common.
        return x.flatten(0, 1) if self.axis == 1 and not self.in_order else x


@dataclass(eq=False)
class Output:
    """A result of a graph, without its values: these can go when they are no longer needed."""

    shape: torch.Size
    dtype: torch.dtype
    edge: GradientEdge | None  # None: no gradient

    @classmethod
    def of(cls, tensor: Tensor) -> Output:
        return cls(tensor.shape, tensor.dtype, get_gradient_edge(tensor) if tensor.requires_grad else None)


@dataclass(eq=False)
class DenseState:
    """A dense micro-batch of a block, [b, …, M], and the graph that dense part and gate made of it.

    Attributes:
        x: its input, a leaf.
        u: what the experts see, until it has gone there; None then.
        shared: what comes to the experts' results; None: nothing.
        y_to, u_to, shared_to: where the gradients of the three results go.
        micro_batch: which of its tokens this rank routes.
        scores, routing: of the gate, for these tokens.
        own, past: tensors that later micro-batches of the same samples need (keys and values, say), and those of
            earlier micro-batches that this one has used, as leaves.
        own_grads: what later micro-batches have given of the gradients of `own`.
        later: weight gradients that are computed later; None: none are.
        sent: row micro-batches that have gone.
    """

    x: Tensor
    u: Tensor | None
    shared: Tensor | None
    y_to: Output
    u_to: Output
    shared_to: Output | None
    micro_batch: MicroBatch
    scores: tuple[Tensor, ...]
    routing: Routing
    own: tuple[Tensor, ...]
    own_grads: list[Tensor | None]
    past: Sequence[tuple[Tensor, ...]]
    later: DeferredGradients | None
    sent: int = 0


@dataclass(eq=False)
class RowState:
    """The rows of a row micro-batch: where they go, and with what weight.

    Attributes:
        layout: sorts them by expert, or by the places of its copies.
        weight_N: router weight of each sorted row, with its graph.
        kept_E: rows that each expert got.
        sent: the tokens that travel.
        ordered: what an order by products made of the tokens; None: rows are copies of tokens.
        ended: the block's output, the experts' results for tokens that it is made of, and those for rows; None where
            experts' results are added up as they come.
        dy, dcombine: gradients of the second, and of the matrix that restored it.
        drows, dweight: gradients that have come back of the rows and of their weights.
    """

    layout: Layout
    weight_N: Tensor
    kept_E: Tensor
    ordered: Ordered | None = None
    sent: Sending | None = None
    ended: tuple[Output, Tensor, Tensor] | None = None
    dy: Tensor | None = None
    dcombine: Tensor | None = None
    drows: Tensor | None = None
    dweight: Tensor | None = None


@dataclass(eq=False, kw_only=True)
class BlockChunk(Chunk):
    """A chunk that joins the tokens of some row micro-batches.

    Attributes:
        sent, sent_pairs: how tokens and pairs of the micro-batches are joined.
        dtypes: of the pairs' codes, None where a row travels for each pair, and of their weights.
        weight_P: weights of received pairs.
    """

    sent: Sent
    sent_pairs: Sent
    received: ReceivedChunk
    dtypes: tuple[torch.dtype | None, torch.dtype] | None = None
    weight_P: Tensor | None = None


# Micro-batches are entries of dictionaries, so that what is used up can be deleted while others are still to come.
@dataclass(eq=False)
class BlockState:
    """One block in both passes.

    Attributes:
        own: the parameters of dense part and gate, the model's.
        parameters: leaves in their place, so that hooks on the model's see whole gradients only.
        held: experts that this rank has, under a placement; None: as many as every other.
        returns: sends gradients of copies of experts to their owners; None: no expert is copied, or nothing learns.
        dense, rows: the micro-batches, by number.
        z: what the block gives, as far as it has come.
        chunks: of the forward pass.
        sizes: of each row micro-batch, as the ranks agreed.
        dscores: gradients of the auxiliary loss of the whole batch with respect to the gate's scores.
        exchange: one of the forward pass's, whose collectives the backward pass calls again.
    """

    experts: ChunkExperts
    hooks: Sequence[Hooks]
    own: Sequence[torch.nn.Parameter]
    parameters: list[Tensor]
    cuts: BlockCuts
    degrees: BlockDegrees
    held: int | None = None
    returns: Callable[[Totals], None] | None = None
    dense: dict[int, DenseState] = field(default_factory=dict)
    rows: dict[int, RowState] = field(default_factory=dict)
    z: Tensor | None = None
    chunks: dict[int, BlockChunk] = field(default_factory=dict)
    sizes: dict[int, MicroBatchSizes] = field(default_factory=dict)
    dscores: list[Tensor | None] | None = None
    exchange: Exchange | None = None


class BlockPass(Pass):
    """A pass of blocks, forward or backward.

    Args:
        split: of the batch.
        shape: of the batch, [B, …, M].
    """

    def __init__(self, run: Run, split: Split, blocks: list[BlockState], shape: torch.Size) -> None:
        # Layers of the plan are the blocks, numbered in order.
        super().__init__(run, {number: block.experts for number, block in enumerate(blocks)})
        self.split, self.blocks, self.shape = split, blocks, shape
        # The same dictionaries, of chunks that have more than the engine knows of.
        self.block_chunks: dict[int, dict[int, BlockChunk]] = self.chunks  # type: ignore[assignment]

    def hooks(self, task: Task) -> Sequence[Hooks]:
        return self.blocks[task.layer or 0].hooks

    def weight_of(self, chunk: Chunk) -> Tensor:
        assert isinstance(chunk, BlockChunk) and chunk.weight_P is not None
        # Weights have come with their pairs, as these travelled; experts want them in the order of sorted rows.
        return self.use(chunk.weight_P)[chunk.received.order_N]
