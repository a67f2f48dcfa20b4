"""State of pipelined blocks that forward saves for backward: micro-batches and chunks.

No class here holds a module: the autograd graph holds the state, and a module may hold a tensor of the graph. Such a
reference cycle would never be freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fusedmoe.blocks.cuts import BlockCuts, BlockDegrees, MicroBatch, MicroBatchSizes, ReceivedChunk, SendOrder
from fusedmoe.blocks.deferred import DeferredGradients
from fusedmoe.comm.exchange import Exchange
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.run import Chunk, PassRun, ReplicaTransport, Run
from fusedmoe.gates.base import Routing
from fusedmoe.hooks import Hooks
from fusedmoe.kernels.deduplicate import SentTokens
from fusedmoe.kernels.layout import Layout
from fusedmoe.orders import Ordered
from fusedmoe.schedule.task import Task


class Split(NamedTuple):
    """Split of a batch into micro-batches.

    Attributes:
        peers: number of EP ranks.
        axis: dimension of the batch that is split.
        is_in_order: micro-batches are positions: the dense part runs in order, with its results for earlier positions.
    """

    peers: int
    axis: int = 0
    is_in_order: bool = False

    def samples(self, x: Tensor) -> Tensor:
        """Return a micro-batch as dense parts expect it: ranks and samples per rank joined into one axis."""
        return x.flatten(0, 1) if self.axis == 1 and not self.is_in_order else x


@dataclass(eq=False)
class Output:
    """Shape, dtype and gradient edge of an output of the autograd graph, without the output's memory."""

    shape: torch.Size
    dtype: torch.dtype
    edge: GradientEdge | None  # None: no gradient

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Output:
        return cls(tensor.shape, tensor.dtype, get_gradient_edge(tensor) if tensor.requires_grad else None)


@dataclass(eq=False)
class DenseState:
    """A dense micro-batch [b, …, M] of a block, and the graph of its dense part and gate.

    Attributes:
        u: input of the experts; None after it was sent.
        shared: shared expert's result, to add at the end of the block; None: none, or part of y.
        y_output, u_output, shared_output: graph outputs that receive the gradients of y, u and shared.
        own: tensors, such as keys and values, that later micro-batches of the same samples read.
        past: leaves with the values of `own` of all earlier micro-batches.
    """

    x: Tensor
    u: Tensor | None
    shared: Tensor | None
    y_output: Output
    u_output: Output
    shared_output: Output | None
    micro_batch: MicroBatch
    gate_scores: tuple[Tensor, ...]
    routing: Routing
    own: tuple[Tensor, ...]
    own_grads: list[Tensor | None]
    past: Sequence[tuple[Tensor, ...]]
    deferred: DeferredGradients | None
    num_sent: int = 0


@dataclass(eq=False)
class RowState:
    """The rows of a row micro-batch.

    Attributes:
        layout: sorts rows by expert, or by slots of owners and replicas.
        weight_N: router weight of each sorted row, with its graph.
        ordered: rows of a matrix order (tokens times a matrix); None: rows are copies of tokens.
        end_graph: (block output, results per token, results per row), if autograd records the block output as a
            function of the experts' results; None: the results are only added to it.
        dy, dcombine: gradients of the results per token, and of the matrix order's combine matrix.
    """

    layout: Layout
    weight_N: Tensor
    kept_E: Tensor
    ordered: Ordered | None = None
    sent_tokens: SentTokens | None = None
    end_graph: tuple[Output, Tensor, Tensor] | None = None
    dy: Tensor | None = None
    dcombine: Tensor | None = None
    drows: Tensor | None = None
    dweight: Tensor | None = None


@dataclass(eq=False, kw_only=True)
class BlockChunk(Chunk):
    """One or more consecutive row micro-batches (`fusedmoe.blocks.cuts`) whose rows are sent together.

    Attributes:
        dtypes: dtypes of the expert assignments sent with the pairs, and of the router weights. If each row is one
            pair, no assignments are sent and their dtype is None.
    """

    token_order: SendOrder
    pair_order: SendOrder
    received: ReceivedChunk
    dtypes: tuple[torch.dtype | None, torch.dtype] | None = None
    weight_P: Tensor | None = None


# Dictionaries permit deleting each micro-batch after its use.
@dataclass(eq=False)
class BlockState:
    """State of one block in both passes.

    Attributes:
        module_parameters: of the dense part, the gate and the shared expert.
        leaves: replace `module_parameters` in the graph (`DenseRunner.begin`).
        num_held: number of owned experts and replicas on this rank under dynamic placement; None: static placement.
        dscores: gradients of the batch's auxiliary loss with respect to the gate's scores.
        exchange: an exchange of the forward pass, whose collectives backward reuses.
    """

    experts: ChunkExperts
    hooks: Sequence[Hooks]
    module_parameters: Sequence[torch.nn.Parameter]
    leaves: list[Tensor]
    cuts: BlockCuts
    degrees: BlockDegrees
    num_held: int | None = None
    replicas: ReplicaTransport | None = None
    dense: dict[int, DenseState] = field(default_factory=dict)
    rows: dict[int, RowState] = field(default_factory=dict)
    z: Tensor | None = None
    chunks: dict[int, BlockChunk] = field(default_factory=dict)
    sizes: dict[int, MicroBatchSizes] = field(default_factory=dict)
    dscores: list[Tensor | None] | None = None
    exchange: Exchange | None = None


class BlockPass(PassRun):
    """A forward or backward pass of blocks."""

    def __init__(self, run: Run, split: Split, blocks: list[BlockState], shape: torch.Size) -> None:
        super().__init__(run, {number: block.experts for number, block in enumerate(blocks)})
        self.split, self.blocks, self.shape = split, blocks, shape
        self.block_chunks: dict[int, dict[int, BlockChunk]] = self.chunks  # type: ignore[assignment]

    def hooks(self, task: Task) -> Sequence[Hooks]:
        return self.blocks[task.layer or 0].hooks

    def replicas(self, task: Task) -> ReplicaTransport | None:
        return self.blocks[task.layer or 0].replicas

    def weight_of(self, chunk: Chunk) -> Tensor:
        assert isinstance(chunk, BlockChunk) and chunk.weight_P is not None
        return self.keep_alive(chunk.weight_P)[chunk.received.order_N]
