"""The forward pass of pipelined blocks: a method for each kind of task in a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedmoe.autograd.order import order, take_pairs
from fusedmoe.blocks.batch import Batch, BatchRouting
from fusedmoe.blocks.cuts import ReceivedChunk, SendOrder, micro_batch_sizes
from fusedmoe.blocks.deferred import DeferredGradients
from fusedmoe.blocks.moe_block import MoEBlock
from fusedmoe.blocks.state import BlockChunk, BlockPass, BlockState, DenseState, Output, RowState
from fusedmoe.comm.exchange import Exchange
from fusedmoe.engine.run import ForwardPass, Run
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.deduplicate import SentTokens, deduplicate_tokens, pack
from fusedmoe.kernels.gather_sum import gather_sum, permute
from fusedmoe.schedule.task import Task, TaskKind


class BlocksForward(BlockPass, ForwardPass):
    """One forward pass of a batch [B, …, M] through all blocks.

    `number` is the index of a block, `d` of a dense micro-batch and `p` of a row micro-batch (`cuts.py`).

    Args:
        keep: save tensors, because a backward pass may follow on some rank.
        needs_backward: this rank needs a backward pass.
    """

    def __init__(
        self,
        run: Run,
        blocks: Sequence[MoEBlock],
        states: list[BlockState],
        batch: Batch,
        keep: bool,
        needs_backward: bool,
    ) -> None:
        self.saves_for_backward, self._x, self._refusal = keep, batch.x, batch.refusal
        self._block_modules, self._needs_backward = blocks, needs_backward
        super().__init__(run, batch.split, states, batch.x.shape)
        self._routing = [BatchRouting(block, batch, number, keep) for number, block in enumerate(blocks)]

    def task_methods(self) -> dict[str, Callable[[Task], None]]:
        return {**super().task_methods(), TaskKind.ATTENTION: self.attention, TaskKind.PERMUTE: self.permute}

    def run(self) -> tuple[Tensor, list[Tensor]]:
        """Execute the plan; return the last block's output and each block's auxiliary loss."""
        self.execute()
        z = self.blocks[-1].z
        assert z is not None
        aux = []
        for number, state in enumerate(self.blocks):
            if self.saves_for_backward:
                self._save_sizes(state)
            aux.append(self._routing[number].aux_loss(state))
            # The graph keeps neither modules nor outputs of blocks.
            state.z, state.experts = None, state.experts.for_backward()
        return z, aux

    def attention(self, task: Task) -> None:
        number = task.layer or 0
        state = self.blocks[number]
        chunk = state.cuts.dense_chunks["forward"][task.chunk or 0]
        try:
            for d in chunk:
                if self._refusal is not None:
                    return
                state.dense[d] = self._run_dense(number, d)
            # Otherwise `permute` sorts the rows, once all micro-batches are routed.
            if not (self._block_modules[number].routes_first and state.degrees.has_permute_task):
                self._sort_rows(number, chunk)
        except ConfigError as error:  # the next exchange reports it to the other ranks
            self._refusal = str(error)

    def permute(self, task: Task) -> None:
        number = task.layer or 0
        if self._block_modules[number].routes_first and self._refusal is None:
            self._sort_rows(number, range(len(self.blocks[number].dense)))

    def _run_dense(self, number: int, d: int) -> DenseState:
        state, block, at = self.blocks[number], self._block_modules[number], self.blocks[number].cuts.dense_at[d]
        before = self.blocks[number - 1].z if number else self._x
        assert before is not None
        x = before.data[at]  # `.data` has its own version counter: other parts of this memory are still written
        inputs = self._routing[number].inputs(d, state.cuts)
        past: list[tuple[Tensor, ...]] = []
        with torch.set_grad_enabled(self.saves_for_backward):
            x = x.detach().requires_grad_(self.saves_for_backward and x.is_floating_point())
            if self.split.is_in_order:
                earlier = (state.dense[other].present for other in range(d))
                past = [tuple(one.detach().requires_grad_(one.requires_grad) for one in present) for present in earlier]
            is_deferred = self.saves_for_backward and state.degrees.has_weight_gradient_tasks
            deferred = DeferredGradients(state.leaves) if is_deferred else None
            result = block.dense.run(state.leaves, self.split.samples(x), inputs, past, deferred)
            y, u = result.y.view(x.shape), result.u.view(x.shape)
            shared = None if result.shared is None else result.shared.view(x.shape)
        if state.z is None:
            state.z = y.new_empty(self.shape, dtype=torch.promote_types(y.dtype, u.dtype))
        # Residual stream; `store_results` adds the experts' results.
        state.z[at].copy_(y.detach())
        return DenseState(
            x,
            # A matrix order computes rows from u inside the graph; copies of tokens need no graph.
            u if block.has_matrix_order else u.detach(),
            None if shared is None else shared.detach(),
            Output.from_tensor(y),
            Output.from_tensor(u),
            None if shared is None else Output.from_tensor(shared),
            inputs.micro_batch,
            result.gate_scores,
            result.routing,
            result.present,
            [None] * len(result.present),
            past,
            deferred,
        )

    def _sort_rows(self, number: int, chunk: range) -> None:
        """Sort the rows of the tokens of these dense micro-batches by expert, and drop pairs beyond the capacity."""
        state, block = self.blocks[number], self._block_modules[number]
        routed = [state.dense[d] for d in chunk]
        chosen = self._routing[number].without_excess(routed, chunk, is_all=len(chunk) == len(state.cuts.dense_at))
        for d, dense, expert in zip(chunk, routed, chosen, strict=True):
            with torch.set_grad_enabled(self.saves_for_backward):
                weight = dense.micro_batch.scatter_to_batch(dense.routing.weight_SK)
                for p in state.cuts.row_children[d]:
                    at = state.cuts.rows_in_dense_at[p]
                    expert_SK, weight_SK = expert[at].flatten(0, -2), weight[at].flatten(0, -2)
                    if block.has_matrix_order:
                        assert dense.u is not None
                        state.rows[p] = _ordered_rows(block, dense.u[at].flatten(0, -2), expert_SK, weight_SK)
                    else:
                        layout = order(expert_SK, block.num_experts).exact()
                        state.rows[p] = RowState(layout, take_pairs(weight_SK, layout), layout.counts_E)

    def prepare_rows(self, task: Task) -> None:
        number, chunk = task.layer or 0, task.chunk or 0
        state, block = self.blocks[number], self._block_modules[number]
        row_batches = state.cuts.row_chunks["forward"][chunk]
        if (refusal := self._refusal) is None:
            micro_batches = [state.rows[p] for p in row_batches]
        else:  # send only the reason
            none_SK = torch.empty(0, 1, dtype=torch.long, device=self._x.device)
            layout = order(none_SK, block.num_experts)
            nothing = layout.exact(), self._x.new_empty(0), layout.counts_E
            micro_batches = [RowState(*nothing) for _ in row_batches]
        if state.num_held is not None:
            for rows_state in micro_batches:
                by_expert = rows_state.layout
                rows_state.layout = block.experts.split_rows(by_expert)
                with torch.set_grad_enabled(self.saves_for_backward):
                    pair_N = by_expert.row_SK.reshape(-1)[rows_state.layout.pair_N]
                    rows_state.weight_N = rows_state.weight_N[pair_N]
        sent = [self._deduplicate(rows_state, block.has_matrix_order) for rows_state in micro_batches]
        peers, by_pairs = self.split.peers, block.has_matrix_order
        counts_pPE = torch.stack([batch.layout.counts_E for batch in micro_batches]).view(len(row_batches), peers, -1)
        # A row of a matrix order is a separate token, whose expert is known from its layout.
        tokens_pP = torch.stack([tokens.counts_E.view(peers, -1).sum(1) for tokens, *_ in sent])
        counts, tokens_Pp = counts_pPE.transpose(0, 1).reshape(-1), tokens_pP.t()
        if refusal is not None:  # raises on every rank
            block.exchange(counts, tokens_Pp, self._x, (), refusal, self._needs_backward)
        token_order, pair_order = SendOrder(tokens_pP), SendOrder(counts_pPE.sum(2))
        rows = token_order.join([self._rows_to_send(state, p) for p in row_batches])
        routings = [state.dense[d].routing for d in sorted({state.cuts.dense_parent[p] for p in row_batches})]
        # One metadata exchange per chunk serves both passes.
        exchange = block.exchange(counts, tokens_Pp, rows, routings, None, self._needs_backward)
        experts = state.num_held or exchange.num_local_experts
        received = ReceivedChunk(micro_batch_sizes(exchange.sizes), rows.device, experts, sent[0].k)
        wire, dtype = exchange.algorithm.wire, None
        if wire is not None:
            rows, dtype = wire.encode(rows), rows.dtype
        weights = [batch.weight_N.detach() for batch in micro_batches]
        codes = None
        if not by_pairs:
            codes = pair_order.join([code_N for _, _, code_N, _ in sent if code_N is not None])
            weights = [weight_N[row_N] for weight_N, (_, row_N, *_) in zip(weights, sent, strict=True)]
        weight_N = pair_order.join([self.keep_alive(weight) for weight in weights])
        state.chunks[chunk] = self.block_chunks[number][chunk] = BlockChunk(
            exchange,
            rows=rows,
            pair_exchange=exchange.pair_exchange,
            pair_values=pack(codes, weight_N),
            token_order=token_order,
            pair_order=pair_order,
            received=received,
            dtypes=(None if codes is None else codes.dtype, weight_N.dtype),
            encoded_dtype=dtype,
        )

    def _deduplicate(self, rows: RowState, by_pairs: bool) -> SentTokens:
        rows.sent_tokens = SentTokens(rows.layout)
        if not by_pairs:
            padded = deduplicate_tokens(rows.layout, self.split.peers)
            rows.sent_tokens = padded.exact(sum(padded.tokens.counts), rows.layout.rows)
        return rows.sent_tokens

    def expert(self, task: Task) -> None:
        chunk = self.block_chunks[task.layer or 0][task.chunk or 0]
        assert isinstance(chunk.exchange, Exchange)
        message, chunk.pair_values = chunk.pair_values, None
        assert message is not None and chunk.dtypes is not None
        pairs, chunk.weight_P = chunk.exchange.decode_pairs(self.keep_alive(message), *chunk.dtypes, chunk.received.k)
        chunk.received.sort(pairs)
        chunk.layout = chunk.received.layout
        super().expert(task)

    def _rows_to_send(self, state: BlockState, p: int) -> Tensor:
        rows, d = state.rows[p], state.cuts.dense_parent[p]
        dense = state.dense[d]
        assert dense.u is not None
        if rows.ordered is None:
            u_SM = dense.u[state.cuts.rows_in_dense_at[p]].reshape(-1, self.shape[-1])
        else:
            u_SM = rows.ordered.x_SM.detach()
        dense.num_sent += 1
        if dense.num_sent == len(state.cuts.row_children[d]):
            dense.u = None
        assert rows.sent_tokens is not None
        return permute(self.keep_alive(u_SM), rows.sent_tokens.tokens)

    def store_results(self, task: Task, rows: Tensor) -> None:
        number, chunk = task.layer or 0, task.chunk or 0
        state = self.blocks[number]
        assert state.z is not None
        parts = self.block_chunks[number][chunk].token_order.split(rows)
        for p, part in zip(state.cuts.row_chunks["forward"][chunk], parts, strict=True):
            z = state.z[state.cuts.rows_at[p]]
            sent = state.rows[p].sent_tokens
            assert sent is not None
            y_SM = gather_sum(part, sent.tokens)
            has_end = self._block_modules[number].has_end
            z += self._run_block_end(number, p, y_SM, z.shape) if has_end else y_SM.view(z.shape)

    def _run_block_end(self, number: int, p: int, rows_SM: Tensor, shape: torch.Size) -> Tensor:
        state, block = self.blocks[number], self._block_modules[number]
        dense, rows = state.dense[state.cuts.dense_parent[p]], state.rows[p]
        # A small graph from the experts' results to the output, with which backward starts.
        with torch.set_grad_enabled(self.saves_for_backward):
            rows_SM.requires_grad_(self.saves_for_backward)
            y = (rows_SM if rows.ordered is None else block.layer.order.restore(rows_SM, rows.ordered)).view(shape)
            if dense.shared is not None:
                y = y + self.keep_alive(dense.shared)[state.cuts.rows_in_dense_at[p]]
            micro_batch = self._routing[number].micro_batch(p, state.cuts.rows_at)
            z = block.end(self.split.samples(y), micro_batch).view(shape)
        rows.end_graph = Output.from_tensor(z), y, rows_SM
        return z.detach()

    def _save_sizes(self, state: BlockState) -> None:
        """Save the sizes of each row micro-batch and one exchange, for a backward pass with other chunks."""
        for index, chunk in state.chunks.items():
            assert isinstance(chunk.exchange, Exchange)
            state.exchange = chunk.exchange
            row_batches = state.cuts.row_chunks["forward"][index]
            state.sizes |= dict(zip(row_batches, micro_batch_sizes(chunk.exchange.sizes), strict=True))


def _ordered_rows(block: MoEBlock, u_SM: Tensor, expert_SK: Tensor, weight_SK: Tensor) -> RowState:
    ordered = block.order(u_SM, expert_SK, weight_SK)
    layout = ordered.layout.exact()
    # Without weights: the matrix that restores the tokens has them.
    weights = ordered.weight_SK
    weight_N = weight_SK.new_ones(layout.rows) if weights is None else take_pairs(weights, layout)
    return RowState(layout, weight_N, ordered.kept_E, ordered)
