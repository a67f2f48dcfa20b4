"""The batch of one call of pipelined blocks: checks before anything is sent, and each block's routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fusedmoe.autograd.order import order
from fusedmoe.autograd.parallel import split_counts
from fusedmoe.blocks.cuts import BlockCuts, ExternalCall, Index, MicroBatch
from fusedmoe.blocks.dense_part import DenseInputs
from fusedmoe.blocks.moe_block import MoEBlock
from fusedmoe.blocks.state import BlockState, DenseState, Split
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.group import Group
from fusedmoe.engine.dispatcher import is_in_selective_checkpoint
from fusedmoe.errors import ConfigError
from fusedmoe.layers.input_checks import empty_tokens, find_mask_error, find_tokens_error


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of pipelined blocks.

    Attributes:
        x: [B, …, M]; along samples, a batch shared by an MP group is [ranks, samples per rank, …, M].
        shape: of the blocks' output, [B, …, M].
        mask: x's shape without M, false for padding, on the host; None: no padding.
        refusal: error message of an invalid batch, whose x is empty; the first exchange reports it to all ranks.
        calls: further arguments of each block of another library.
    """

    x: Tensor
    split: Split
    shape: torch.Size
    mask: Tensor | None = None
    refusal: str | None = None
    calls: Sequence[ExternalCall] | None = None

    @cached_property
    def token_numbers(self) -> Tensor:
        token_shape = self.x.shape[:-1]
        return torch.arange(token_shape.numel(), device="cpu").view(token_shape)


def find_call_reason(blocks: Sequence[MoEBlock]) -> str | None:
    return next(filter(None, (block.dense.call_reason for block in blocks)), None)


def require_callable(blocks: Sequence[MoEBlock]) -> None:
    """Raise `ConfigError` for settings of a placement and wrappers of experts that micro-batches do not support."""
    for block in blocks:
        block.experts.require_nothing_between_layers()
    for block in blocks:
        if block.layer.check_wrapper is not None:
            block.layer.check_wrapper()


def read_batch(
    blocks: Sequence[MoEBlock], x: Tensor, mask: Tensor | None, calls: Sequence[ExternalCall] | None
) -> Batch:
    """Check a batch, and determine the axis along which to split it. Collective over an MP group that shares it.

    Raises:
        ConfigError, RankError: an invalid batch, if no exchange can report it to all ranks; errors of earlier calls
            that were not reported yet; a selective activation checkpoint.
    """
    for block in blocks:
        block.layer.checks.raise_deferred()
    if is_in_selective_checkpoint():  # it returns each saved result once, but dense parts have several graphs
        raise ConfigError(
            "pipeline: a selective activation checkpoint cannot look into micro-batches; leave out context_fn, "
            "and use fusedmoe.pipeline(…, recompute=True)"
        )
    refusal = find_input_error(blocks, x)
    if isinstance(mask, Tensor):
        mask = mask.cpu()
    if refusal is None and mask is not None:
        refusal = find_mask_error("pipeline", mask, x, *(block.layer.gate for block in blocks))
    if refusal is not None:
        x, mask = _empty_batch(blocks[0], x, refusal), None
    shape, (x, split) = x.shape, _split_batch(blocks[0], x)
    return Batch(x, split, shape, None if mask is None else mask.reshape(x.shape[:-1]), refusal, calls)


def find_input_error(blocks: Sequence[MoEBlock], x: object) -> str | None:
    """Return an error message for invalid x, else None. Accepts the dtype of any parameter of the first block."""
    layer, dense = blocks[0].layer, blocks[0].dense.parameters
    like: Tensor | None = next(layer.experts.parameters(), None)
    least = 3 if blocks[0].in_positions else 2
    return find_tokens_error("pipeline got input", x, layer.model_dim, like, least, {p.dtype for p in dense})


def _empty_batch(block: MoEBlock, x: object, refusal: str) -> Tensor:
    layer = block.layer
    layer.checks.refuse_without_exchange(refusal)
    if block.dense.has_collectives:  # other ranks may wait in a dense part: raise now
        layer.checks.refuse(refusal)
    nothing = empty_tokens(x, layer.model_dim, next(layer.experts.parameters(), None))
    return nothing[None] if block.in_positions else nothing


def _split_batch(block: MoEBlock, x: Tensor) -> tuple[Tensor, Split]:
    layer = block.layer
    peers, mp, is_shared = layer.topology.ep.size, layer.topology.mp, layer.mp_tokens.is_joint
    if is_shared:
        x_SM, refusal = layer.checks.agree_on_tokens(x.reshape(-1, layer.model_dim), None, layer.mp_input)
        layer.checks.refuse(refusal)
        x = x_SM.view(x.shape)
    if block.in_positions:
        return x, Split(peers, 1, is_in_order=True)
    if is_shared and len(x) % mp.size == 0:  # every micro-batch has samples of all ranks, which keeps all ranks busy
        return x.view(mp.size, len(x) // mp.size, *x.shape[1:]), Split(peers, 1)
    return x, Split(peers)


class BatchRouting:
    """Routing of a block's whole batch: random numbers, replayed experts, capacity and auxiliary loss.

    Results therefore equal those without micro-batches.
    """

    def __init__(self, block: MoEBlock, batch: Batch, number: int, keep: bool) -> None:
        self._block, self._batch, self._block_index, self._saves_for_backward = block, batch, number, keep
        x, mask, group, gate = batch.x, batch.mask, block.mp, block.layer.gate
        token_shape = x.shape[:-1]
        x_SM = x.reshape(token_shape.numel(), x.shape[-1])
        rows = _rows_of_ranks(len(x_SM), mask, group)
        self._whole_batch = whole = MicroBatch(0, 1, token_shape, rows, group.index, mask, x.device)
        own_SM = x_SM[whole.routed_indices]
        self._capacity = gate.row_capacity(len(own_SM) if x.numel() else 0) if block.has_capacity else None
        self._random_numbers = tuple(whole.scatter_to_batch(values) for values in gate.draw(own_SM))
        given = None if gate.tap is None else gate.tap.next_experts(len(own_SM), gate.k)
        self._given_experts = given and given._replace(
            expert_TK=whole.scatter_to_batch(given.expert_TK.to(x.device), -1)
        )
        self._num_taken_E: Tensor | None = None  # rows of each expert so far
        self._num_routed = 0  # dense micro-batches

    def inputs(self, index: int, cuts: BlockCuts) -> DenseInputs:
        at, calls, given = cuts.dense_at[index], self._batch.calls, self._given_experts
        micro_batch = self.micro_batch(index, cuts.dense_at, self._batch.mask)
        drawn = tuple(self._flatten_tokens(values[at])[micro_batch.routed_indices] for values in self._random_numbers)
        given = given and given._replace(
            expert_TK=self._flatten_tokens(given.expert_TK[at])[micro_batch.routed_indices]
        )
        arguments = None if calls is None else calls[self._block_index].samples(at[0])
        return DenseInputs(micro_batch, drawn, given, arguments)

    def micro_batch(self, index: int, indices: Sequence[Index], mask: Tensor | None = None) -> MicroBatch:
        """Return the micro-batch of index `index` among `indices`. Without a mask, padding is routed too."""
        whole, device = self._whole_batch, self._batch.x.device
        part, masked = self._batch.token_numbers[indices[index]], None if mask is None else mask[indices[index]]
        if len(whole.rows) == 1:
            return MicroBatch(index, len(indices), part.shape, (part.numel(),), 0, masked, device)
        ends = torch.tensor([0, *whole.rows], device="cpu").cumsum(0)
        rows = torch.searchsorted(part.flatten().contiguous(), ends).diff()
        return MicroBatch(index, len(indices), part.shape, rows.tolist(), whole.rank, masked, device)

    def without_excess(self, routed: Sequence[DenseState], chunk: range, *, is_all: bool) -> list[Tensor]:
        """Return the experts [b, …, K] of each dense micro-batch, -1 for pairs beyond the capacity.

        Chunks must be passed in order. `is_all`: the chunk has all of the batch's micro-batches.
        """
        assert chunk.start == self._num_routed, "micro-batches must be routed in order"
        self._num_routed, axis = chunk.stop, self._batch.split.axis
        chosen = [dense.micro_batch.scatter_to_batch(dense.routing.expert_SK, -1) for dense in routed]
        if (capacity := self._capacity) is None:
            return chosen
        together = torch.cat(chosen, axis)
        expert_SK = together.flatten(0, -2)
        # Choice k of all tokens precedes choice k + 1, so `order` needs the whole batch unless k = 1.
        if is_all:
            dropped_SK = order(expert_SK, self._block.num_experts, capacity).row_SK < 0
        else:
            dropped_SK = self._exceeds_capacity(expert_SK, capacity)
        kept = torch.where(dropped_SK, -1, expert_SK).view_as(together)
        return list(kept.split([experts.shape[axis] for experts in chosen], axis))

    def _exceeds_capacity(self, expert_SK: Tensor, capacity: int) -> Tensor:
        """Return which pairs exceed the capacity, after all pairs of earlier chunks. Only for k = 1."""
        E = self._block.num_experts
        taken_E = self._num_taken_E
        if taken_E is None:
            taken_E = torch.zeros(E, dtype=torch.long, device=expert_SK.device)
        layout = order(expert_SK, E).exact()
        chosen_N = expert_SK.reshape(-1)[layout.pair_N]
        rank_N = torch.arange(layout.rows, device=chosen_N.device) - layout.offsets_E1[:-1].long()[chosen_N]
        full_N = rank_N + taken_E[chosen_N] >= capacity
        self._num_taken_E = taken_E + layout.counts_E
        full_S = torch.zeros(expert_SK.numel(), dtype=torch.bool, device=expert_SK.device)
        full_S[layout.pair_N] = full_N
        return full_S.view_as(expert_SK)

    def aux_loss(self, state: BlockState) -> Tensor:
        """Return the auxiliary loss of the whole batch. Store its gradients in `state.dscores`, and count the load."""
        block, whole, axis = self._block, self._whole_batch, self._batch.split.axis
        # Losses are means over all tokens: the gate chooses once more, from the scores of all micro-batches.
        dense = [state.dense[index] for index in range(len(state.dense))]
        parts = zip(
            *([one.micro_batch.scatter_to_batch(score.detach()) for score in one.gate_scores] for one in dense),
            strict=True,
        )
        scores = [self._flatten_tokens(torch.cat(part, axis))[whole.routed_indices] for part in parts]
        scores = [
            score.requires_grad_(self._saves_for_backward) if score.is_floating_point() else score for score in scores
        ]
        with torch.set_grad_enabled(self._saves_for_backward):
            given = self._given_experts
            given = given and given._replace(expert_TK=self._flatten_tokens(given.expert_TK)[whole.routed_indices])
            routing = block.dense.choose(tuple(scores), given)
        layer, aux = block.layer, routing.aux_loss
        kept_E = torch.stack([state.rows[p].kept_E for p in range(len(state.rows))]).sum(0)
        with torch.set_grad_enabled(self._saves_for_backward):  # forwards without gradients are not counted
            layer.load.count(routing, kept_E, layer.gate, layer.training, all_kept=False)
        exchanges = [chunk.exchange for chunk in state.chunks.values() if isinstance(chunk.exchange, Exchange)]
        num_pairs = sum(exchange.pair_exchange.num_sent for exchange in exchanges)
        layer.load.count_sent((num_pairs, sum(exchange.num_sent for exchange in exchanges)))
        if aux.requires_grad:
            leaves = [score for score in scores if score.requires_grad]
            grads = iter(torch.autograd.grad(aux, leaves, allow_unused=True))
            of_scores = [next(grads) if score.requires_grad else None for score in scores]
            state.dscores = [None if grad is None else whole.scatter_to_batch(grad) for grad in of_scores]
        return aux.detach()

    def _flatten_tokens(self, value: Tensor) -> Tensor:
        return value.flatten(0, len(self._whole_batch.token_shape) - 1)


def _rows_of_ranks(tokens: int, mask: Tensor | None, group: Group) -> list[int]:
    """Return the number of tokens of each MP rank, padding included. Real tokens are split evenly."""
    if mask is None or group.size == 1:
        return split_counts(tokens, group)
    real_S = mask.flatten().nonzero().squeeze(1)
    # A rank's tokens end with the last that it routes; trailing padding belongs to the last rank.
    routed = torch.tensor(split_counts(len(real_S), group), device="cpu").cumsum(0)[:-1]
    ends = torch.cat([real_S.new_zeros(1), real_S + 1])[routed].tolist()
    return [end - start for start, end in zip([0, *ends], [*ends, tokens], strict=True)]
