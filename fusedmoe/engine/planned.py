"""The planned path: dispatch, experts and combine in chunks, in the order of a plan, forward and backward.

`PlannedFunction` (eager) and the compiled operators of `scheduled_operator.py` call `run_forward` and `run_backward`,
and store the tensors between the passes.

A token's results are summed in the same order in every plan (`chunks.py`). Plans with different chunks may still differ
by rounding in matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.comm.exchange import Exchange
from fusedmoe.compat.torch import retains_graph
from fusedmoe.engine.chunk_experts import ChunkExperts, Totals, cast_totals
from fusedmoe.engine.chunks import RowChunks, SavedRows, concat
from fusedmoe.engine.run import BackwardPass, Chunk, ForwardPass, PassRun, Run
from fusedmoe.engine.shared_expert_task import SharedExpertTask
from fusedmoe.kernels import gather_sum as kernels
from fusedmoe.kernels.deduplicate import ReceivedPairs, SentTokens
from fusedmoe.kernels.derivatives import Function
from fusedmoe.schedule.task import Task, TaskKind


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """Inputs of one call that both passes need."""

    sent_tokens: SentTokens
    exchange: Exchange
    experts: ChunkExperts
    run: Run
    shared: ChunkExperts | None = None

    def chunks(self, pairs: ReceivedPairs, degree: int) -> RowChunks:
        return RowChunks(self.exchange, self.sent_tokens.tokens, pairs, self.sent_tokens.k, degree)

    def for_backward(self) -> PlannedBatch:
        shared = None if self.shared is None else self.shared.for_backward()
        return replace(self, experts=self.experts.for_backward(), shared=shared)


@dataclass(eq=False)
class SavedForward:
    """Tensors that `run_forward` saves for `run_backward`. Lists have one entry per chunk of the forward pass.

    Attributes:
        pairs: (token, k) pairs of the received tokens of all chunks.
        x_RM: received tokens; None if the backward of the experts does not read them.
        activations: saved by the experts: pre-activations [P, H] (gated [P, 2, H]), or an autograd graph.
        weight_R: router weights of received pairs, sorted by expert; None: all weights are 1.
        num_weights: N, the router weights on this rank, padding included; None: all weights are 1.
        shared: the shared expert's task; None: the plan computes none.
    """

    pairs: ReceivedPairs
    chunks: RowChunks
    x_RM: list[Any]
    activations: list[Any]
    weight_R: list[Tensor | None]
    num_weights: int | None
    shared: SharedExpertTask | None = None


class PlannedGradients(NamedTuple):
    """Gradients of tokens, router weights and expert parameters (`totals`); None if no rank needs them."""

    dx_SM: Tensor | None
    dweight_N: Tensor | None
    totals: Totals


def run_forward(
    batch: PlannedBatch,
    x_SM: Tensor,
    weight_N: Tensor | None,
    shared_x_SM: Tensor | None = None,
    *,
    save_for_backward: bool = True,
) -> tuple[Tensor, SavedForward]:
    """Send tokens through the experts in the order of the forward plan. Collective.

    Args:
        weight_N: [N], router weights of the rows sorted by expert; None: all weights are 1.
        shared_x_SM: [S, M], tokens of the shared expert; None: the plan computes no shared expert.
        save_for_backward: a backward pass follows. Otherwise `SavedForward` has no tokens and no activations.
    Returns:
        [S, M], for each token the sum of its experts' results, and the tensors saved for `run_backward`.
    """
    # Expert ids and router weights of all chunks take one message before the first chunk.
    pairs, weight_P = batch.exchange.exchange_pairs(
        batch.sent_tokens.code_N, weight_N, batch.sent_tokens.row_N, batch.sent_tokens.k
    )
    chunks = batch.chunks(pairs, batch.run.plans.degrees[0])
    weight_R: list[Tensor | None] = [None] * len(chunks.exchanges) if weight_P is None else [*chunks.split(weight_P)]
    wire = batch.exchange.algorithm.wire
    rows_SM = x_SM if wire is None else wire.encode(x_SM)
    forward = TokensForward(batch, chunks, kernels.permute(rows_SM, chunks.layout), weight_R, x_SM.dtype)
    forward.saves_for_backward = save_for_backward
    if batch.shared is not None and shared_x_SM is not None:
        forward.shared = SharedExpertTask(batch.shared, shared_x_SM)
    out_TM = forward.run()
    forward.finish_shared_expert()
    assert out_TM is not None
    done = forward.layer_chunks.values()
    x_RM, activations = ([getattr(chunk, name) for chunk in done] for name in ("x_RM", "activations"))
    num_weights = None if weight_N is None else len(weight_N)
    saved = SavedForward(pairs, chunks, x_RM, activations, weight_R, num_weights, forward.shared)
    return kernels.gather_sum(out_TM, chunks.layout), saved


def run_backward(
    batch: PlannedBatch, saved: SavedForward, dy_SM: Tensor, shared_dy_SM: Tensor | None = None
) -> PlannedGradients:
    """Send gradients through the experts in the order of the backward plan. Collective.

    The backward plan may have another number of chunks than the forward plan. Clears the lists of `saved`, so that each
    chunk frees its memory once it is done.

    Args:
        dy_SM: [S, M], gradient of the result of `run_forward`.
        shared_dy_SM: [S, M], gradient of the shared expert's result, whose own gradients are stored in `saved.shared`.
    """
    exchange, run = batch.exchange, batch.run
    # Compare calls first: a rank without a backward pass is reported before any rows are sent.
    exchange.begin_backward()
    first, backward = saved.weight_R[0], _backward_pass(batch, saved, dy_SM)
    backward.shared, backward.shared_dy_SM = saved.shared, shared_dy_SM
    chunks, dx_TM, dweight_N = backward.row_chunks, backward.run(), None
    backward.finish_shared_expert()
    dx_SM = None if dx_TM is None else kernels.gather_sum(dx_TM, chunks.layout)
    if first is not None and saved.num_weights is not None and exchange.weights_require_grad:
        # Gradients of the weights of all chunks take one message after the last chunk.
        parts = (chunk.weight_R for chunk in backward.layer_chunks.values())
        dweights = [dweight_R.to(first.dtype) for dweight_R in parts if dweight_R is not None]
        dweight_N = exchange.return_weight_grads(chunks.join(dweights), batch.sent_tokens.row_N, saved.num_weights)
    totals = backward.totals[backward.layer]
    # After the last rows the link is free for gradients of replicas, then for buckets that run alongside other layers.
    sent = None if run.replicas is None else run.replicas.send_gradients(batch.experts.parameters, totals)
    if run.gradients is not None:
        run.gradients.begin(run.trailing_all_reduces, sent)
    return PlannedGradients(dx_SM, dweight_N, totals)


class PlannedFunction(Function):
    """`run_forward` and `run_backward` as a function for autograd.

    Saves for backward: received tokens R·M, if the experts' backward reads them (`ChunkExperts.needs_input_rows`), and
    pre-activations of P pairs P·H (gated 2·P·H), which backward copies once if the plans differ in degree. For a shared
    expert, its tokens S·M and pre-activations.

    With a shared expert in `batch`, it is applied to `shared_x_SM`, its parameters follow the experts' parameters, and
    the results are ([S, M] of the routed experts, [S, M] of the shared expert).
    """

    operation = "dispatch, experts and combine on several ranks (MoELayer, moe_layer)"

    @staticmethod
    def forward(
        ctx: Any,
        x_SM: Tensor,
        weight_N: Tensor | None,
        batch: PlannedBatch,
        shared_x_SM: Tensor | None,
        *parameters: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        y_SM, saved = run_forward(batch, x_SM, weight_N, shared_x_SM)
        tensors = saved.activations if batch.experts.can_rechunk else ()
        of_shared, ctx.shared = ((), None) if saved.shared is None else saved.shared.save()
        ctx.save_for_backward(*saved.x_RM, *saved.weight_R, *tensors, *of_shared, *parameters)
        ctx.graphs = [] if tensors else saved.activations
        ctx.batch, ctx.saved = batch.for_backward(), replace(saved, x_RM=[], weight_R=[], activations=[], shared=None)
        return y_SM if saved.shared is None else (y_SM, saved.shared.take_result())

    @staticmethod
    def backward(ctx: Any, dy_SM: Tensor, shared_dy_SM: Tensor | None = None) -> tuple[Tensor | None, ...]:
        batch: PlannedBatch = ctx.batch
        tensors, count = [*ctx.saved_tensors], len(ctx.saved.chunks.exchanges)
        x_RM, weight_R = (tensors[i * count : (i + 1) * count] for i in range(2))
        del tensors[: 2 * count]
        activations, ctx.graphs = ctx.graphs, ctx.graphs if retains_graph() else []
        if batch.experts.can_rechunk:
            activations, tensors = tensors[:count], tensors[count:]
        # Copies for this pass: weights that experts join for it are freed with it.
        batch, shared = batch.for_backward(), None
        if batch.shared is not None:
            shared, tensors = SharedExpertTask.restored(batch.shared, tensors[:2], ctx.shared), tensors[2:]
            ctx.shared = ctx.shared if retains_graph() else None
        saved = replace(ctx.saved, x_RM=x_RM, weight_R=weight_R, activations=activations, shared=shared)
        # Local names would keep every chunk's memory until the end of the pass.
        del x_RM, weight_R, activations
        dx_SM, dweight_N, totals = run_backward(batch, saved, dy_SM, shared_dy_SM)
        own = len(batch.experts.parameters)
        grads = cast_totals(totals, tensors[:own])
        if shared is None:
            return dx_SM, dweight_N, None, None, *grads
        return dx_SM, dweight_N, None, shared.result, *grads, *cast_totals(shared.totals, tensors[own:])


def _backward_pass(batch: PlannedBatch, saved: SavedForward, dy_SM: Tensor) -> TokensBackward:
    degree, count = batch.run.plans.degrees[1], len(saved.chunks.exchanges)
    chunks, weight_R = saved.chunks, saved.weight_R
    if degree != count:
        chunks = batch.chunks(saved.pairs, degree)
        parts = [weight for weight in weight_R if weight is not None]
        weight_R = [*chunks.split(saved.chunks.join(parts))] if parts else [None] * degree
    wire = batch.exchange.algorithm.wire
    rows_SM = dy_SM.contiguous() if wire is None else wire.encode(dy_SM)
    backward = TokensBackward(batch, saved, chunks, kernels.permute(rows_SM, chunks.layout), weight_R, dy_SM.dtype)
    saved.x_RM, saved.activations, saved.weight_R = [], [], []
    return backward


class _TokensPass(PassRun):
    """A forward or backward pass of one layer, whose rows are all available at its start."""

    def __init__(
        self,
        batch: PlannedBatch,
        row_chunks: RowChunks,
        rows_TM: Tensor,
        weight_R: Sequence[Tensor | None],
        dtype: torch.dtype,
    ) -> None:
        run = batch.run
        encoded_dtype = None if batch.exchange.algorithm.wire is None else dtype
        plan = run.plans.forward if self.phase == "forward" else run.plans.backward
        # Tasks carry the layer's number in its model; a step's plan also has gradients of other layers.
        layer = next(task.layer for task in plan if task.kind == TaskKind.DISPATCH)
        super().__init__(run, {layer: batch.experts})
        self.layer, self.row_chunks = layer, row_chunks
        parts = zip(row_chunks.exchanges, row_chunks.received, weight_R, strict=True)
        self.layer_chunks = {
            i: Chunk(part, layout, weight_R=weight, encoded_dtype=encoded_dtype)
            for i, (part, layout, weight) in enumerate(parts)
        }
        self.chunks[layer] = self.layer_chunks
        self.shared: SharedExpertTask | None = None
        self._rows: list[Tensor | None] = [*rows_TM.split([exchange.num_sent for exchange in row_chunks.exchanges])]
        # Tensors that cross streams live until the streams have joined, at the end of `execute`: memory that another
        # stream still reads must not be reused.
        self._kept_alive: list[Tensor] = []

    @property
    def num_shared_parts(self) -> int:
        return max(1, sum(task.kind == TaskKind.SHARED_EXPERT for task in self.plan))

    def finish_shared_expert(self) -> None:
        """Compute the shared expert if the plan has no task for it."""
        if self.shared is not None and not self.shared.is_done:
            self.shared_expert(Task(TaskKind.SHARED_EXPERT))

    def prepare_rows(self, task: Task) -> None:
        number = task.chunk or 0
        self.layer_chunks[number].rows, self._rows[number] = self._rows[number], None

    def store_results(self, task: Task, rows: Tensor) -> None:
        self._rows[task.chunk or 0] = rows

    def keep_alive(self, tensor: Tensor) -> Tensor:
        if self.settings.streams is not None:
            self._kept_alive.append(tensor)
        return tensor

    def run(self) -> Tensor | None:
        """Execute the plan; return the combined rows in chunk order, or None if no rank needs them."""
        # Gradients that run alongside the previous pass use the link before the rows of this layer.
        if self.settings.gradients is not None:
            self.settings.gradients.wait()
        self.execute()
        rows = [chunk_rows for chunk_rows in self._rows if chunk_rows is not None]
        self._rows.clear()
        return concat(rows) if rows else None


class TokensForward(_TokensPass, ForwardPass):
    """The forward pass of a layer, after the metadata exchange."""

    def shared_expert(self, task: Task) -> None:
        if self.shared is not None and not self.shared.is_done:
            self.shared.forward(self.num_shared_parts, self.saves_for_backward)


class TokensBackward(_TokensPass, BackwardPass):
    """The backward pass of a layer. `shared_dy_SM`: gradient of the shared expert's result; None: no such gradient."""

    shared_dy_SM: Tensor | None = None

    def __init__(
        self,
        batch: PlannedBatch,
        saved: SavedForward,
        row_chunks: RowChunks,
        rows_TM: Tensor,
        weight_R: Sequence[Tensor | None],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(batch, row_chunks, rows_TM, weight_R, dtype)
        # Per chunk, the indices of its received tokens and sorted pairs in the forward's chunks; None: same chunks.
        self._saved_indices = None if row_chunks is saved.chunks else row_chunks.indices_in(saved.chunks)
        if self._saved_indices is None:
            for chunk, x_RM, activations in zip(self.layer_chunks.values(), saved.x_RM, saved.activations, strict=True):
                chunk.x_RM, chunk.activations = x_RM, activations
        else:
            self._x_RM = SavedRows(saved.x_RM) if batch.experts.needs_input_rows else None
            self._activations = SavedRows(saved.activations)

    def shared_expert(self, task: Task) -> None:
        if self.shared is not None and self.shared_dy_SM is not None and not self.shared.is_done:
            self.shared.backward(self.shared_dy_SM, self.num_shared_parts)
        if self.shared is not None and self.shared.is_done:
            self.shared_dy_SM = None

    def rechunk_saved(self, task: Task) -> None:
        if self._saved_indices is not None:
            number = task.chunk or 0
            chunk, (received, in_order) = self.layer_chunks[number], self._saved_indices[number]
            chunk.x_RM = None if self._x_RM is None else self._x_RM.rows(received)
            chunk.activations = self._activations.rows(in_order)
