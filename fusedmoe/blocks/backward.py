"""The backward pass of pipelined blocks: a method for each kind of task in a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedmoe.blocks.cuts import MicroBatchSizes, ReceivedChunk, RechunkedIndices, SendOrder
from fusedmoe.blocks.state import BlockChunk, BlockPass, BlockState, DenseState, Output, RowState, Split
from fusedmoe.engine.chunks import SavedRows
from fusedmoe.engine.run import BackwardPass, Chunk, Run
from fusedmoe.kernels.gather_sum import gather_sum, permute
from fusedmoe.schedule.task import Task, TaskKind


class BlocksBackward(BlockPass, BackwardPass):
    """One backward pass of a batch [B, …, M] through all blocks.

    `number` is the index of a block, `d` of a dense micro-batch and `p` of a row micro-batch (`cuts.py`).

    Args:
        blocks: the state that forward has saved for each block.
        dz, daux: gradients of the last block's output and of each block's auxiliary loss.
    Attributes:
        dense_gradients: per block, gradients of `BlockState.leaves` by index.
    """

    def __init__(
        self, run: Run, split: Split, blocks: list[BlockState], dz: Tensor, daux: Sequence[Tensor | None]
    ) -> None:
        super().__init__(run, split, blocks, dz.shape)
        self._daux = daux
        # Gradients of each block's output; index -1 is the gradient of the input.
        self._dz: list[Tensor | None] = [None] * (len(blocks) + 1)
        self._dz[len(blocks) - 1] = dz
        self._num_done = [0] * len(blocks)  # finished dense micro-batches
        self._num_tasks_left = [block.degrees.dense_tasks for block in blocks]
        self.dense_gradients: list[dict[int, Tensor]] = [{} for _ in blocks]
        self._has_same_chunks = []
        for number, block in enumerate(blocks):
            # Ranks compare their calls before the first rows: this rank may be the only one with a backward pass.
            for chunk in block.chunks.values():
                chunk.exchange.begin_backward()
            count = len(block.chunks)
            self._has_same_chunks.append(block.degrees.rows[1] == count)
            if self._has_same_chunks[-1]:
                self.block_chunks[number] = {i: block.chunks[count - 1 - i] for i in range(count)}
            else:
                self.block_chunks[number] = self._rechunked_chunks(block, dz.device)

    def task_methods(self) -> dict[str, Callable[[Task], None]]:
        return {
            **super().task_methods(),
            TaskKind.ATTENTION: self.attention,
            TaskKind.ATTENTION_WEIGHT_GRADIENT: self.attention_weight_gradient,
            TaskKind.SPARSE_REDUCE_SCATTER: self.sparse_reduce_scatter,
        }

    def run(self) -> Tensor:
        self.execute()
        dx = self._dz[-1]
        assert dx is not None
        return dx

    def _rechunked_chunks(self, block: BlockState, device: torch.device) -> dict[int, BlockChunk]:
        """Return a block's chunks by index, with the sizes and exchanges of the backward pass, but no rows yet."""
        assert block.exchange is not None
        chunks, forward = {}, block.chunks[0].received
        for index, row_batches in enumerate(block.cuts.row_chunks["backward"]):
            sizes = [block.sizes[p] for p in row_batches]
            whole = MicroBatchSizes(*(np.sum(each, 0) for each in zip(*sizes, strict=True)))
            part = block.exchange.with_row_counts(whole.send_P, whole.recv_QP)
            pairs = part
            if not block.exchange.has_row_per_pair:
                pairs = block.exchange.with_row_counts(whole.send_pairs_P, whole.recv_pairs_QP)
            token_order, pair_order = (
                SendOrder(torch.from_numpy(np.stack(each)).to(device))
                for each in ([s.send_P for s in sizes], [s.send_pairs_P for s in sizes])
            )
            received = ReceivedChunk(sizes, device, forward.experts, forward.k)
            chunks[index] = BlockChunk(
                part, pair_exchange=pairs, token_order=token_order, pair_order=pair_order, received=received
            )
        return chunks

    def rechunk_saved(self, task: Task) -> None:
        number = task.layer or 0
        block = self.blocks[number]
        if self._has_same_chunks[number] or not block.chunks:
            return
        # The first chunk re-slices all saved tensors of the block, with one copy.
        chunks = [block.chunks[i] for i in range(len(block.chunks))]
        block.chunks = {}
        rechunked = RechunkedIndices([chunk.received for chunk in chunks])
        rows = [c.x_RM for c in chunks if c.x_RM is not None]
        x_RM, kept_NH = SavedRows(rows) if rows else None, SavedRows([c.activations for c in chunks])
        weight_P = torch.cat([c.weight_P for c in chunks if c.weight_P is not None])
        del chunks, rows  # frees the forward's rows as soon as they are copied
        for i, chunk in self.block_chunks[number].items():
            tokens, pairs, sorted_rows = rechunked.indices_of(
                chunk.received, block.cuts.row_chunks["backward"][i].start
            )
            chunk.layout = chunk.received.layout
            chunk.x_RM = None if x_RM is None else x_RM.rows(tokens)
            chunk.activations, chunk.weight_P = kept_NH.rows(sorted_rows), weight_P[pairs]

    def prepare_rows(self, task: Task) -> None:
        number, chunk = task.layer or 0, task.chunk or 0
        block, dz, rows = self.blocks[number], self._dz[number], []
        assert dz is not None
        for p in block.cuts.row_chunks["backward"][chunk]:
            dy, state = self.keep_alive(dz[block.cuts.rows_at[p]]), block.rows[p]
            if state.end_graph is not None:
                dy = self._backward_end(state, dy)
            dtype = block.dense[block.cuts.dense_parent[p]].u_output.dtype
            assert state.sent_tokens is not None
            rows.append(permute(dy.reshape(-1, dz.shape[-1]).to(dtype), state.sent_tokens.tokens))
        into = self.block_chunks[number][chunk]
        into.rows = into.token_order.join(rows)
        if (wire := into.exchange.algorithm.wire) is not None:
            into.rows, into.encoded_dtype = wire.encode(into.rows), into.rows.dtype

    def _backward_end(self, rows: RowState, dz: Tensor) -> Tensor:
        assert rows.end_graph is not None
        (to_z, y, rows_SM), rows.end_graph = rows.end_graph, None
        if to_z.edge is None:  # a hook detached the graph
            rows.dy = torch.zeros_like(y)
            return torch.zeros_like(rows_SM)
        needing_grad, matrix = [rows_SM, y], None if rows.ordered is None else rows.ordered.combine_SN
        if matrix is not None and matrix.requires_grad:
            needing_grad.append(matrix)
        drows_SM, rows.dy, *rest = torch.autograd.grad(to_z.edge, needing_grad, dz.to(to_z.dtype).reshape(to_z.shape))
        rows.dcombine = rest[0] if rest else None
        return drows_SM

    def store_weight_grads(self, chunk: Chunk, dweight_R: Tensor | None) -> None:
        assert isinstance(chunk, BlockChunk) and chunk.weight_P is not None
        if dweight_R is None:
            dweight_R = torch.zeros_like(chunk.weight_P)
        dweight_P = torch.empty_like(chunk.weight_P).index_copy_(
            0, chunk.received.order_N, dweight_R.to(chunk.weight_P.dtype)
        )
        chunk.pair_values, chunk.weight_P = dweight_P[:, None], None

    def sparse_reduce_scatter(self, task: Task) -> None:
        number, replicas = task.layer or 0, self.replicas(task)
        assert replicas is not None
        replicas.send_gradients(self.blocks[number].experts.parameters, self.totals[number], wait=True)

    def store_results(self, task: Task, rows: Tensor) -> None:
        number, i = task.layer or 0, task.chunk or 0
        block, chunk = self.blocks[number], self.block_chunks[number][i]
        assert chunk.pair_values is not None
        dweights, chunk.pair_values = chunk.pair_values[:, 0], None
        row_batches = block.cuts.row_chunks["backward"][i]
        for p, dx, dweight in zip(
            row_batches, chunk.token_order.split(rows), chunk.pair_order.split(dweights), strict=True
        ):
            state = block.rows[p]
            assert state.sent_tokens is not None
            state.drows, state.dweight = dx, dweight
            if state.sent_tokens.row_N is not None:
                state.dweight = torch.empty_like(dweight).index_copy_(0, state.sent_tokens.row_N, dweight)

    def attention(self, task: Task) -> None:
        number = task.layer or 0
        block = self.blocks[number]
        for d in reversed(block.cuts.dense_chunks["backward"][task.chunk or 0]):
            dense = block.dense[d]
            dx = self._backward_dense(number, d, dense)
            before = self._dz[number - 1]
            if before is None:
                before = self._dz[number - 1] = dx.new_empty(self.shape)
            before[block.cuts.dense_at[d]].copy_(dx)
            if dense.deferred is None:
                del block.dense[d]
            for p in block.cuts.row_children[d]:
                del block.rows[p]
            self._num_done[number] += 1
        if self._num_done[number] == len(block.cuts.dense_at):
            self._dz[number] = None
        self._finish_dense(number)

    def attention_weight_gradient(self, task: Task) -> None:
        number = task.layer or 0
        block = self.blocks[number]
        for d in reversed(block.cuts.dense_chunks["backward"][task.chunk or 0]):
            deferred = block.dense.pop(d).deferred
            assert deferred is not None
            deferred.run(partial(self._add_gradient, number))
        self._finish_dense(number)

    def _backward_dense(self, number: int, d: int, dense: DenseState) -> Tensor:
        block, at, dz = self.blocks[number], self.blocks[number].cuts.dense_at[d], self._dz[number]
        assert dz is not None
        pairs: list[tuple[Any, Tensor]] = []

        def add_output_gradient(output: Output, gradient: Tensor) -> None:
            if output.edge is not None:
                pairs.append((output.edge, gradient.to(output.dtype).reshape(output.shape)))

        add_output_gradient(dense.y_output, dz[at])
        # Gradients of the experts' input: per token; with a matrix order, per row.
        micro_batches = [block.rows[p] for p in block.cuts.row_children[d]]
        drows = []
        for rows in micro_batches:
            assert rows.drows is not None
            # Dropped pairs have no row: `gather_sum` skips them.
            assert rows.sent_tokens is not None
            drows.append(gather_sum(self.keep_alive(rows.drows), rows.sent_tokens.tokens))
        if micro_batches[0].ordered is None:
            add_output_gradient(dense.u_output, _join_row_batches(block, d, dense.u_output.shape, drows))
        for rows, dx_SM in zip(micro_batches, drows, strict=True):
            if rows.ordered is not None and rows.ordered.x_SM.requires_grad:
                pairs.append((rows.ordered.x_SM, dx_SM))
            if rows.ordered is not None and rows.dcombine is not None:
                pairs.append((rows.ordered.combine_SN, self.keep_alive(rows.dcombine)))
        if dense.shared_output is not None:
            dy = [self.keep_alive(rows.dy) for rows in micro_batches if rows.dy is not None]
            add_output_gradient(dense.shared_output, _join_row_batches(block, d, dense.shared_output.shape, dy))
        for rows in micro_batches:
            if rows.weight_N.requires_grad:
                assert rows.dweight is not None
                pairs.append((rows.weight_N, self.keep_alive(rows.dweight)))
        daux = self._daux[number]
        if daux is not None and block.dscores is not None:
            for score, dscore in zip(dense.gate_scores, block.dscores, strict=True):
                if dscore is not None and score.requires_grad:
                    own = dscore[at].flatten(0, len(self.shape) - 2)[dense.micro_batch.routed_indices]
                    pairs.append((score, daux * own))
        # Keys and values used by later positions, whose backward has already run.
        for tensor, grad in zip(dense.present, dense.present_grads, strict=True):
            if grad is not None and tensor.requires_grad:
                pairs.append((tensor, grad))
        needing_grad = [i for i, leaf in enumerate(block.leaves) if leaf.requires_grad]
        past = [(j, i) for j, leaves in enumerate(dense.past) for i, leaf in enumerate(leaves) if leaf.requires_grad]
        dx, *grads = torch.autograd.grad(
            [to for to, _ in pairs],
            [dense.x, *(block.leaves[i] for i in needing_grad), *(dense.past[j][i] for j, i in past)],
            [grad for _, grad in pairs],
            allow_unused=True,
        )
        for i, grad in zip(needing_grad, grads, strict=False):
            if grad is not None:
                self._add_gradient(number, i, grad)
        for (j, i), grad in zip(past, grads[len(needing_grad) :], strict=True):
            if grad is not None:
                earlier = block.dense[j].present_grads
                accumulated = earlier[i]
                earlier[i] = grad if accumulated is None else accumulated + grad
        return torch.zeros_like(dense.x) if dx is None else dx

    def _add_gradient(self, number: int, leaf: int, gradient: Tensor) -> None:
        totals = self.dense_gradients[number]
        # Deferred gradients are in half precision under autocast: sum them in the parameter's dtype.
        gradient = gradient.to(self.blocks[number].leaves[leaf].dtype)
        totals[leaf] = gradient if leaf not in totals else totals[leaf] + gradient

    def _finish_dense(self, number: int) -> None:
        self._num_tasks_left[number] -= 1
        gradients = self.settings.gradients
        if self._num_tasks_left[number] or gradients is None or not gradients.is_open:
            return
        own = self.blocks[number].module_parameters
        for leaf, gradient in self.dense_gradients[number].items():
            # Copy, because the reducer works in place. Add gradients accumulated by earlier passes.
            parameter = own[leaf]
            if parameter.grad is None:
                whole = gradient.clone(memory_format=torch.contiguous_format)
            else:
                whole, parameter.grad = gradient + parameter.grad, None
            self.dense_gradients[number][leaf] = whole
            gradients.add_gradient(parameter, whole)


def _join_row_batches(block: BlockState, d: int, shape: torch.Size, parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].new_empty(shape)
    for p, part in zip(block.cuts.row_children[d], parts, strict=True):
        into = whole[block.cuts.rows_in_dense_at[p]]
        into.copy_(part.view(into.shape))
    return whole
