"""The forward pass of blocks, task by task.

For each dense micro-batch `attention` runs dense part and gate, and gives rows their places; where an expert's room
depends on the whole batch, `permute` does that. `start` and `finish` are a chunk's way to the experts' ranks and back;
between them runs what `engine/run.py` has for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedmoe.autograd.order import order, take_pairs
from fusedmoe.autograd.parallel import split_counts
from fusedmoe.blocks.cuts import ExternalCall, Index, MicroBatch, ReceivedChunk, Sent, sizes_of
from fusedmoe.blocks.deferred import DeferredGradients
from fusedmoe.blocks.moe_block import MoEBlock
from fusedmoe.blocks.state import BlockChunk, BlockPass, BlockState, DenseState, Output, RowState, Split
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.group import Group
from fusedmoe.engine.run import ForwardPass, Run
from fusedmoe.errors import ConfigError
from fusedmoe.gates.choosing import GivenExperts
from fusedmoe.kernels.deduplicate import Sending, pack, sending
from fusedmoe.kernels.gather_sum import gather_sum, permute
from fusedmoe.schedule.task import Task, TaskKind


class BlocksForward(BlockPass, ForwardPass):
    """One forward pass of a batch [B, …, M].

    Args:
        blocks, states: each block's modules, and its state (`MoEBlock.begin`).
        mask: [B, …], false for padding, on the host; None: no token is padding.
        keep: a backward pass may follow.   learns: this rank needs it.
        refusal: why this rank's batch is refused, if so: the first exchange tells all ranks.
        calls: what blocks of another library are called with beside x; None: nothing.
    """

    def __init__(
        self,
        run: Run,
        split: Split,
        blocks: Sequence[MoEBlock],
        states: list[BlockState],
        x: Tensor,
        mask: Tensor | None,
        keep: bool,
        learns: bool,
        refusal: str | None,
        calls: Sequence[ExternalCall] | None = None,
    ) -> None:
        self.keep, self._x, self._mask, self._refusal, self._calls = keep, x, mask, refusal, calls
        self._modules, self._learns = blocks, learns
        super().__init__(run, split, states, x.shape)
        self._lead = x.shape[:-1]
        x_SM = x.reshape(self._lead.numel(), x.shape[-1])
        self._numbers: Tensor | None = None  # of the tokens, in the batch's shape
        # Of each block: the whole batch; rows that an expert accepts of it; what its gate drew for it, and the experts
        # that are replayed; rows that each expert has been given so far; dense micro-batches whose rows have places.
        groups = [block.mp for block in blocks]
        self._wholes = [
            MicroBatch(0, 1, self._lead, _rows_of_ranks(len(x_SM), mask, group), group.index, mask, x.device)
            for group in groups
        ]
        self._capacities: list[int | None] = []
        self._drawn: list[tuple[Tensor, ...]] = []
        self._given: list[GivenExperts | None] = []
        self._taken: list[Tensor | None] = [None] * len(states)
        self._placed = [0] * len(states)
        # Drawn for the whole batch at once, so that the numbers are those of a layer without micro-batches.
        for block, whole in zip(blocks, self._wholes, strict=True):
            gate, own_SM = block.layer.gate, x_SM[whole.own]
            self._capacities.append(gate.row_capacity(len(own_SM) if x.numel() else 0) if block.limited else None)
            self._drawn.append(tuple(whole.batch(values) for values in gate.draw(own_SM)))
            given = None if gate.tap is None else gate.tap.give(len(own_SM), gate.k)
            self._given.append(given and given._replace(expert_TK=whole.batch(given.expert_TK.to(x.device), -1)))

    def bodies(self) -> dict[str, Callable[[Task], None]]:
        return {
            **super().bodies(),
            TaskKind.ATTENTION: self.attention,
            TaskKind.PERMUTE: self.permute,
            TaskKind.SPARSE_ALL_GATHER: self.sparse_all_gather,
        }

    def run(self) -> tuple[Tensor, list[Tensor]]:
        """Runs the plan; returns the last block's output and each block's auxiliary loss."""
        self.execute()
        z = self.blocks[-1].z
        assert z is not None
        aux = []
        for number, state in enumerate(self.blocks):
            if self.keep:
                self._note_sizes(state)
            aux.append(self._whole_gate(number))
            # What the graph keeps holds no module, and no output of a block.
            state.z, state.experts = None, state.experts.for_backward()
        return z, aux

    def attention(self, task: Task) -> None:
        number = task.layer or 0
        state = self.blocks[number]
        chunk = state.cuts.dense_chunks["forward"][task.chunk or 0]
        try:
            for place in chunk:
                if self._refusal is not None:
                    return
                state.dense[place] = self._dense(number, place)
            # Else `permute` gives rows their places, once all micro-batches are routed.
            if not (self._modules[number].waits and state.degrees.permutes):
                self._route(number, chunk)
        except ConfigError as error:  # the next exchange tells the other ranks, which wait for rows
            self._refusal = str(error)

    def permute(self, task: Task) -> None:
        number = task.layer or 0
        if self._modules[number].waits and self._refusal is None:
            self._route(number, range(len(self.blocks[number].dense)))

    def _dense(self, number: int, place: int) -> DenseState:
        """Dense part and gate of a dense micro-batch."""
        state, block, at = self.blocks[number], self._modules[number], self.blocks[number].cuts.dense_at[place]
        before = self.blocks[number - 1].z if number else self._x
        assert before is not None
        x = before.data[at]  # `.data` counts changes by itself: other parts of the same memory are still being written
        micro_batch = self._micro_batch(number, place, state.cuts.dense_at, self._mask)
        drawn = tuple(self._tokens(values[at])[micro_batch.own] for values in self._drawn[number])
        given = self._given[number]
        given = given and given._replace(expert_TK=self._tokens(given.expert_TK[at])[micro_batch.own])
        past: list[tuple[Tensor, ...]] = []
        with torch.set_grad_enabled(self.keep):
            # Each micro-batch has a graph of its own, which the backward pass goes through when its turn comes.
            x = x.detach().requires_grad_(self.keep and x.is_floating_point())
            if self.split.in_order:
                earlier = (state.dense[other].own for other in range(place))
                past = [tuple(one.detach().requires_grad_(one.requires_grad) for one in own) for own in earlier]
            later = DeferredGradients(state.parameters) if self.keep and state.degrees.later else None
            beside = None if self._calls is None else self._calls[number].samples(at[0])
            samples = self.split.samples(x)
            result = block.dense(state.parameters, samples, micro_batch, drawn, given, past, later, beside)
            y, u = result.y.view(x.shape), result.u.view(x.shape)
            shared = None if result.shared is None else result.shared.view(x.shape)
        if state.z is None:
            state.z = y.new_empty(self.shape, dtype=torch.promote_types(y.dtype, u.dtype))
        # The residual stream is there now; the experts' results are added to it as they come back (`finish`).
        state.z[at].copy_(y.detach())
        return DenseState(
            x,
            # An order by products makes its rows of u, as a part of the graph; copies of tokens need no graph.
            u if block.makes_rows else u.detach(),
            None if shared is None else shared.detach(),
            Output.of(y),
            Output.of(u),
            None if shared is None else Output.of(shared),
            micro_batch,
            result.scores,
            result.routing,
            result.own,
            [None] * len(result.own),
            past,
            later,
        )

    def _route(self, number: int, chunk: range) -> None:
        """Gives the rows of some dense micro-batches their places, and drops those beyond an expert's capacity."""
        state, block, capacity = self.blocks[number], self._modules[number], self._capacities[number]
        E, axis = block.num_experts, self.split.axis
        assert chunk.start == self._placed[number], "micro-batches must be routed in order"
        self._placed[number] = chunk.stop
        routed = [state.dense[place] for place in chunk]
        chosen = [dense.micro_batch.batch(dense.routing.expert_SK, -1) for dense in routed]
        if capacity is not None:
            together = torch.cat(chosen, axis)
            expert_SK = together.flatten(0, -2)
            # Slots of one k come before those of the next for the whole batch, so `order` must see all of it; where a
            # token has one slot, micro-batches may come one after the other.
            if len(chunk) == len(state.cuts.dense_at):
                dropped_SK = order(expert_SK, E, capacity).row_SK < 0
            else:
                dropped_SK = self._full(number, expert_SK, capacity)
            kept = torch.where(dropped_SK, -1, expert_SK).view_as(together)
            chosen = list(kept.split([experts.shape[axis] for experts in chosen], axis))
        for place, dense, expert in zip(chunk, routed, chosen, strict=True):
            with torch.set_grad_enabled(self.keep):
                weight = dense.micro_batch.batch(dense.routing.weight_SK)
                for p in state.cuts.rows_of[place]:
                    at = state.cuts.rows_in_dense_at[p]
                    expert_SK, weight_SK = expert[at].flatten(0, -2), weight[at].flatten(0, -2)
                    if block.makes_rows:
                        assert dense.u is not None
                        state.rows[p] = _ordered_rows(block, dense.u[at].flatten(0, -2), expert_SK, weight_SK)
                    else:
                        layout = order(expert_SK, E).exact()
                        state.rows[p] = RowState(layout, take_pairs(weight_SK, layout), layout.counts_E)

    def _full(self, number: int, expert_SK: Tensor, capacity: int) -> Tensor:
        """Returns which slots come when their expert is full, where each token has one slot and micro-batches come in
        order."""
        E = self._modules[number].num_experts
        # A row's rank among those of its expert, in this micro-batch and in those before it.
        taken_E = self._taken[number]
        if taken_E is None:
            taken_E = torch.zeros(E, dtype=torch.long, device=expert_SK.device)
        layout = order(expert_SK, E).exact()
        chosen_N = expert_SK.reshape(-1)[layout.pair_N]
        rank_N = torch.arange(layout.rows, device=chosen_N.device) - layout.offsets_E1[:-1].long()[chosen_N]
        full_N = rank_N + taken_E[chosen_N] >= capacity
        self._taken[number] = taken_E + layout.counts_E
        full_S = torch.zeros(expert_SK.numel(), dtype=torch.bool, device=expert_SK.device)
        full_S[layout.pair_N] = full_N
        return full_S.view_as(expert_SK)

    def sparse_all_gather(self, task: Task) -> None:
        placed = self._modules[task.layer or 0].layer.placed
        assert placed is not None
        placed.arrive()

    def start(self, task: Task) -> None:
        number, chunk = task.layer or 0, task.chunk or 0
        state, block = self.blocks[number], self._modules[number]
        places = state.cuts.row_chunks["forward"][chunk]
        if (refusal := self._refusal) is None:
            micro_batches = [state.rows[p] for p in places]
        else:  # this rank sends nothing but why
            none_SK = torch.empty(0, 1, dtype=torch.long, device=self._x.device)
            layout = order(none_SK, block.num_experts)
            nothing = layout.exact(), self._x.new_empty(0), layout.counts_E
            micro_batches = [RowState(*nothing) for _ in places]
        if state.held is not None:
            for rows_state in micro_batches:  # rows that are sorted by expert go to copies of these
                by_expert = rows_state.layout
                rows_state.layout = block.places(by_expert)
                with torch.set_grad_enabled(self.keep):
                    pair_N = by_expert.row_SK.reshape(-1)[rows_state.layout.pair_N]
                    rows_state.weight_N = rows_state.weight_N[pair_N]
        sent = [self._sent(rows_state, block.makes_rows) for rows_state in micro_batches]
        peers, by_pairs = self.split.peers, block.makes_rows
        counts_pPE = torch.stack([batch.layout.counts_E for batch in micro_batches]).view(len(places), peers, -1)
        # A row by products is a token of its own, and its layout knows its expert.
        tokens_pP = torch.stack([tokens.counts_E.view(peers, -1).sum(1) for tokens, *_ in sent])
        counts, tokens_Pp = counts_pPE.transpose(0, 1).reshape(-1), tokens_pP.t()
        if refusal is not None:  # raises on every rank
            block.exchange(counts, tokens_Pp, self._x, (), refusal, self._learns)
        sent_tokens, sent_pairs = Sent(tokens_pP), Sent(counts_pPE.sum(2))
        rows = sent_tokens.join([self._rows_of(state, p) for p in places])
        routings = [state.dense[place].routing for place in sorted({state.cuts.dense_of[p] for p in places})]
        # The ranks exchange metadata once for each chunk, and for both passes.
        exchange = block.exchange(counts, tokens_Pp, rows, routings, None, self._learns)
        experts = state.held or exchange.experts
        received = ReceivedChunk(sizes_of(exchange.sizes), rows.device, experts, sent[0].k)
        weights = [batch.weight_N.detach() for batch in micro_batches]
        codes = None
        if not by_pairs:
            codes = sent_pairs.join([code_N for _, _, code_N, _ in sent if code_N is not None])
            weights = [weight_N[row_N] for weight_N, (_, row_N, *_) in zip(weights, sent, strict=True)]
        weight_N = sent_pairs.join([self.use(weight) for weight in weights])
        state.chunks[chunk] = self.block_chunks[number][chunk] = BlockChunk(
            exchange,
            rows=rows,
            pairs=exchange.pairs,
            beside=pack(codes, weight_N),
            sent=sent_tokens,
            sent_pairs=sent_pairs,
            received=received,
            dtypes=(None if codes is None else codes.dtype, weight_N.dtype),
        )

    def _sent(self, rows: RowState, by_pairs: bool) -> Sending:
        """Chooses the tokens of a row micro-batch that travel."""
        rows.sent = Sending(rows.layout)
        if not by_pairs:
            padded = sending(rows.layout, self.split.peers)
            rows.sent = padded.exact(sum(padded.tokens.counts), rows.layout.rows)
        return rows.sent

    def expert(self, task: Task) -> None:
        chunk = self.block_chunks[task.layer or 0][task.chunk or 0]
        assert isinstance(chunk.part, Exchange)
        # Codes have come with the tokens: which experts these are for is known now.
        message, chunk.beside = chunk.beside, None
        assert message is not None and chunk.dtypes is not None
        pairs, chunk.weight_P = chunk.part.read_pairs(self.use(message), *chunk.dtypes, chunk.received.k)
        chunk.received.sort(pairs)
        chunk.layout = chunk.received.layout
        super().expert(task)

    def _rows_of(self, state: BlockState, p: int) -> Tensor:
        """A row micro-batch's rows as they are sent."""
        rows, place = state.rows[p], state.cuts.dense_of[p]
        dense = state.dense[place]
        assert dense.u is not None
        if rows.ordered is None:
            u_SM = dense.u[state.cuts.rows_in_dense_at[p]].reshape(-1, self.shape[-1])
        else:
            u_SM = rows.ordered.x_SM.detach()
        dense.sent += 1
        if dense.sent == len(state.cuts.rows_of[place]):
            dense.u = None  # its last rows are made now
        assert rows.sent is not None
        return permute(self.use(u_SM), rows.sent.tokens)

    def finish(self, task: Task, rows: Tensor) -> None:
        number, chunk = task.layer or 0, task.chunk or 0
        state = self.blocks[number]
        assert state.z is not None
        parts = self.block_chunks[number][chunk].sent.split(rows)
        for p, part in zip(state.cuts.row_chunks["forward"][chunk], parts, strict=True):
            z = state.z[state.cuts.rows_at[p]]
            sent = state.rows[p].sent
            assert sent is not None
            y_SM = gather_sum(part, sent.tokens)
            z += self._end(number, p, y_SM, z.shape) if self._modules[number].ends else y_SM.view(z.shape)

    def _end(self, number: int, p: int, rows_SM: Tensor, shape: torch.Size) -> Tensor:
        """Makes the block's output for a row micro-batch, and keeps the graph that made it."""
        state, block = self.blocks[number], self._modules[number]
        dense, rows = state.dense[state.cuts.dense_of[p]], state.rows[p]
        # A small graph from the experts' results to the output; the backward pass begins with it.
        with torch.set_grad_enabled(self.keep):
            rows_SM.requires_grad_(self.keep)
            y = (rows_SM if rows.ordered is None else block.layer.order.restore(rows_SM, rows.ordered)).view(shape)
            if dense.shared is not None:
                y = y + self.use(dense.shared)[state.cuts.rows_in_dense_at[p]]
            # Padding has a place in the output: here it is a token as all others.
            micro_batch = self._micro_batch(number, p, state.cuts.rows_at, None)
            z = block.end(self.split.samples(y), micro_batch).view(shape)
        rows.ended = Output.of(z), y, rows_SM
        return z.detach()

    def _micro_batch(self, number: int, place: int, ats: Sequence[Index], mask: Tensor | None) -> MicroBatch:
        """Counts the tokens of a micro-batch that each rank of the MP group routes."""
        whole = self._wholes[number]
        if self._numbers is None:
            self._numbers = torch.arange(self._lead.numel(), device="cpu").view(self._lead)
        part, masked = self._numbers[ats[place]], None if mask is None else mask[ats[place]]
        if len(whole.rows) == 1:
            return MicroBatch(place, len(ats), part.shape, (part.numel(),), 0, masked, self._x.device)
        # Tokens are numbered along the batch; each rank routes those between two of these ends.
        ends = torch.tensor([0, *whole.rows], device="cpu").cumsum(0)
        rows = torch.searchsorted(part.flatten().contiguous(), ends).diff()
        return MicroBatch(place, len(ats), part.shape, rows.tolist(), whole.rank, masked, self._x.device)

    def _whole_gate(self, number: int) -> Tensor:
        """Computes the auxiliary loss of the whole batch, and its gradient with respect to the scores."""
        state, block, whole = self.blocks[number], self._modules[number], self._wholes[number]
        # Losses are means over all tokens: the gate chooses once more, from the scores of all micro-batches together,
        # and the gradient with respect to scores is what each micro-batch's graph gets in the backward pass.
        dense = [state.dense[place] for place in range(len(state.dense))]
        parts = zip(
            *([one.micro_batch.batch(score.detach()) for score in one.scores] for one in dense),
            strict=True,
        )
        scores = [self._tokens(torch.cat(part, self.split.axis))[whole.own] for part in parts]
        scores = [score.requires_grad_(self.keep) if score.is_floating_point() else score for score in scores]
        with torch.set_grad_enabled(self.keep):
            given = self._given[number]
            given = given and given._replace(expert_TK=self._tokens(given.expert_TK)[whole.own])
            routing = block.choose(tuple(scores), given)
        layer, aux = block.layer, routing.aux_loss
        kept_E = torch.stack([state.rows[p].kept_E for p in range(len(state.rows))]).sum(0)
        with torch.set_grad_enabled(self.keep):  # the load of a forward without gradients is not counted
            layer.load.count(routing, kept_E, layer.gate, layer.training, all_kept=False)
        exchanges = [chunk.part for chunk in state.chunks.values() if isinstance(chunk.part, Exchange)]
        layer.load.sent(
            (sum(exchange.pairs.sent for exchange in exchanges), sum(exchange.sent for exchange in exchanges))
        )
        if aux.requires_grad:
            leaves = [score for score in scores if score.requires_grad]
            grads = iter(torch.autograd.grad(aux, leaves, allow_unused=True))
            of_scores = [next(grads) if score.requires_grad else None for score in scores]
            state.dscores = [None if grad is None else whole.batch(grad) for grad in of_scores]
        return aux.detach()

    def _note_sizes(self, state: BlockState) -> None:
        """Keeps what the backward pass needs of sizes, for its own chunks."""
        for number, chunk in state.chunks.items():
            assert isinstance(chunk.part, Exchange)
            state.exchange = chunk.part
            places = state.cuts.row_chunks["forward"][number]
            state.sizes |= dict(zip(places, sizes_of(chunk.part.sizes), strict=True))

    def _tokens(self, value: Tensor) -> Tensor:
        """[b, …, ·] values -> [S, …]."""
        return value.flatten(0, len(self._lead) - 1)


def _rows_of_ranks(tokens: int, mask: Tensor | None, group: Group) -> list[int]:
    """Returns how many of a batch's tokens each rank of an MP group has: as many to route as without padding."""
    if mask is None or group.size == 1:
        return split_counts(tokens, group)
    real_S = mask.flatten().nonzero().squeeze(1)
    # A rank's tokens end with the last that it routes, and all padding after the last of all is the last rank's.
    routed = torch.tensor(split_counts(len(real_S), group), device="cpu").cumsum(0)[:-1]
    ends = torch.cat([real_S.new_zeros(1), real_S + 1])[routed].tolist()
    return [end - start for start, end in zip([0, *ends], [*ends, tokens], strict=True)]


def _ordered_rows(block: MoEBlock, u_SM: Tensor, expert_SK: Tensor, weight_SK: Tensor) -> RowState:
    """Rows that an order by products makes of tokens, none of which is to be dropped any more."""
    ordered = block.order(u_SM, expert_SK, weight_SK)
    layout = ordered.layout.exact()
    # Without weights here, the matrix that restores tokens has them.
    weights = ordered.weight_SK
    weight_N = weight_SK.new_ones(layout.rows) if weights is None else take_pairs(weights, layout)
    return RowState(layout, weight_N, ordered.kept_E, ordered)
