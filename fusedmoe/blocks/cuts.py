"""Cuts of a batch into micro-batches, and chunks: consecutive micro-batches whose rows are sent together.

The dense part (attention) and the experts' rows may have different chunks in each pass. The cuts of the dense part in
both passes split the batch into *dense micro-batches*. The cuts of the rows in both passes split these into *row
micro-batches*. Cuts are fractions of the batch: every rank has the same number of micro-batches, some of them empty.
Backward processes chunks from the end (FlowMoE Eq. 5): its chunk 0 has the last micro-batches.

Worked example, 6 samples, rows in 2 chunks forward and 3 backward, dense parts in one: cuts at 0, 1/3, 1/2, 2/3, 1, so
the row micro-batches are samples 0–1, 2, 3 and 4–5. The forward chunks are micro-batches 0, 1 | 2, 3, the backward
chunks 3 | 1, 2 | 0. The only dense micro-batch has all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedmoe.comm.exchange import ExchangeSizes
from fusedmoe.engine.chunks import concat, inverse
from fusedmoe.engine.run import Plans
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.deduplicate import ReceivedPairs
from fusedmoe.kernels.layout import Layout
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import extract_phase
from fusedmoe.schedule.task import PIPELINE, STAGES, WEIGHT_GRADIENTS, Task, TaskKind
from fusedmoe.schedule.task_orders import list_plan

#: Index of a batch [B, …, M]: full slices before the cut axis, and a slice of that axis.
Index = tuple[slice, ...]


class BlockDegrees(NamedTuple):
    """Numbers of chunks of each part of a block, forward and backward.

    Attributes:
        has_permute_task: the plan has a task that sorts the rows.
        dense_tasks: tasks of the dense part in the backward plan, weight gradients included.
    """

    dense: tuple[int, int]
    rows: tuple[int, int]
    has_permute_task: bool
    has_weight_gradient_tasks: bool
    dense_tasks: int


def split_by_phase(plan: Plan) -> Plans:
    return Plans(*(extract_phase(plan, phase) for phase in STAGES))


def degrees_of(plans: Plans, block: int) -> BlockDegrees:
    counts = [Counter(task.kind for task in plan if task.layer == block) for plan in (plans.forward, plans.backward)]
    dense_forward, dense_backward = (count[TaskKind.ATTENTION] or 1 for count in counts)
    # All kinds of tasks of a block's rows have the same number of chunks; which kinds exist depends on the ranks.
    rows_forward, rows_backward = (max(count[kind] for kind in PIPELINE) or 1 for count in counts)
    weights = counts[1][WEIGHT_GRADIENTS[TaskKind.ATTENTION]]
    return BlockDegrees(
        (dense_forward, dense_backward),
        (rows_forward, rows_backward),
        counts[0][TaskKind.PERMUTE] > 0,
        weights > 0,
        counts[1][TaskKind.ATTENTION] + weights,
    )


@dataclass(frozen=True, eq=False)
class BlockCuts:
    """Cuts of a batch for one block.

    Attributes:
        rows_in_dense_at: index of each row micro-batch in its dense one.
        dense_parent, row_children: the dense micro-batch of each row micro-batch, and the reverse.
        dense_chunks, row_chunks: for "forward" and "backward" the micro-batches of each chunk.
    """

    dense_at: list[Index]
    rows_at: list[Index]
    rows_in_dense_at: list[Index]
    dense_parent: list[int]
    row_children: list[range]
    dense_chunks: dict[str, list[range]]
    row_chunks: dict[str, list[range]]


@lru_cache(maxsize=256)
def cut(dense: tuple[int, int], rows: tuple[int, int], axis: int, size: int) -> BlockCuts:
    """Cut a batch of `size` elements along `axis`, for these numbers of chunks (forward, backward)."""
    dense_ends, row_ends = _cut_fractions(dense), _cut_fractions((*dense, *rows))
    row_children = _micro_batch_ranges(dense_ends, row_ends)
    dense_parent = [parent for parent, inside in enumerate(row_children) for _ in inside]
    starts = [int(size * end) for end in dense_ends]
    return BlockCuts(
        _batch_indices(dense_ends, axis, size),
        _batch_indices(row_ends, axis, size),
        [
            (slice(None),) * axis + (slice(int(size * begin) - starts[parent], int(size * end) - starts[parent]),)
            for parent, begin, end in zip(dense_parent, row_ends[:-1], row_ends[1:], strict=True)
        ],
        dense_parent,
        row_children,
        {
            "forward": _micro_batch_ranges(_cut_fractions(dense[:1]), dense_ends),
            "backward": _micro_batch_ranges(_cut_fractions(dense[1:]), dense_ends)[::-1],
        },
        {
            "forward": _micro_batch_ranges(_cut_fractions(rows[:1]), row_ends),
            "backward": _micro_batch_ranges(_cut_fractions(rows[1:]), row_ends)[::-1],
        },
    )


def _cut_fractions(counts: Iterable[int]) -> list[Fraction]:
    # Exact fractions: 1/3 must equal 2/6.
    return sorted({Fraction(i, count) for count in counts for i in range(count + 1)})


def _micro_batch_ranges(coarse: list[Fraction], fine: list[Fraction]) -> list[range]:
    return [range(fine.index(start), fine.index(end)) for start, end in zip(coarse[:-1], coarse[1:], strict=True)]


def _batch_indices(ends: list[Fraction], axis: int, size: int) -> list[Index]:
    pairs = zip(ends[:-1], ends[1:], strict=True)
    return [(slice(None),) * axis + (slice(int(size * start), int(size * end)),) for start, end in pairs]


class MicroBatch:
    """A micro-batch, or a whole batch, and the tokens of it that this rank routes.

    Ranks of an MP group with the same tokens route one slice each. Padding is not routed.

    Attributes:
        token_shape: the shape of its tokens, [b, …].
        rows: tokens of each MP rank, padding included; one number if no other rank has the same tokens.
        routed_indices: indices, in the flattened micro-batch, of the tokens that this rank routes.
        indices_in_slice: indices of the same tokens in this rank's slice; None: no padding.
    """

    routed_indices: slice | Tensor

    def __init__(
        self,
        number: int,
        count: int,
        token_shape: torch.Size,
        rows: Sequence[int],
        rank: int,
        mask: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.number, self.count, self.token_shape, self.rows, self.rank = number, count, token_shape, rows, rank
        start = sum(rows[:rank])
        self.routed_indices, self.indices_in_slice = slice(start, start + rows[rank]), None
        if mask is not None:  # of `token_shape`'s shape, on the host: no synchronization
            self.indices_in_slice = mask.flatten()[self.routed_indices].nonzero().squeeze(1).to(device)
            self.routed_indices = self.indices_in_slice + start

    def scatter_to_batch(self, own_S: Tensor, fill: int = 0) -> Tensor:
        """Scatter values of the tokens that this rank routes, [S, ·], into [b, …, ·], with `fill` elsewhere."""
        is_whole = len(self.rows) == 1 and self.indices_in_slice is None
        value_S = own_S if is_whole else self.scatter_to_tokens(own_S, fill)
        return value_S.view(*self.token_shape, *value_S.shape[1:])

    def scatter_to_tokens(self, own_S: Tensor, fill: int = 0) -> Tensor:
        """As `scatter_to_batch`, into [tokens, ·]."""
        tokens, at = sum(self.rows), self.routed_indices
        if len(own_S) == tokens:
            return own_S
        if isinstance(at, Tensor):
            return own_S.new_full((tokens, *own_S.shape[1:]), fill).index_copy(0, at, own_S)
        before, after = (own_S.new_full((n, *own_S.shape[1:]), fill) for n in (at.start, tokens - at.stop))
        return torch.cat([before, own_S, after])


class ExternalCall(NamedTuple):
    """Arguments of one call of another library's block, without the tokens, for `batch` samples."""

    who: str
    batch: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def samples(self, at: slice) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs for some samples. Raise `ConfigError` if one cannot be split into samples."""
        return tuple(self._part(value, at) for value in self.args), self._part(self.kwargs, at)

    def _part(self, value: Any, at: slice) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case dict():
                return {key: self._part(each, at) for key, each in value.items()}
            case list() | tuple():
                return type(value)([self._part(each, at) for each in value])
            case Tensor() if value.dim() == 0 or len(value) == 1:  # shared by all samples
                return value
            case Tensor() if len(value) == self.batch and value.dim() > 1:  # a 1D tensor may be positions
                return value[at]
        from torch.nn.attention.flex_attention import BlockMask  # slow import, rarely needed

        if isinstance(value, BlockMask) and value.shape[0] in (1, self.batch):
            return value if value.shape[0] == 1 else _samples_of_mask(value, at)
        got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ConfigError(
            f"{self.who} is called with {got}, which nobody knows how to split into the {self.batch} samples of a "
            "batch: use schedule=… in place of the pipeline"
        )


def _samples_of_mask(mask: Any, at: slice) -> Any:
    of_batch, part = mask.mask_mod, mask[at]
    part.mask_mod = lambda b, h, q, kv: of_batch(b + at.start, h, q, kv)
    return part


class SendOrder:
    """Sending order of this rank's rows of a chunk: by destination, then by micro-batch.

    Args:
        counts_pP: [micro-batch, peer] rows that each micro-batch sends to each rank, in that order.
    """

    def __init__(self, counts_pP: Tensor) -> None:
        self._order_N: Tensor | None = None
        if len(counts_pP) > 1:  # otherwise already in order
            flat = counts_pP.reshape(-1)
            start_pP = (flat.cumsum(0) - flat).view_as(counts_pP)
            self._order_N = _concatenated_ranges(start_pP.t().reshape(-1), counts_pP.t().reshape(-1))
            self._sizes = counts_pP.sum(1).tolist()

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the rows of all micro-batches in sending order."""
        return rows[0] if self._order_N is None else concat(rows).index_select(0, self._order_N)

    def split(self, rows: Tensor) -> list[Tensor]:
        if self._order_N is None:
            return [rows]
        return list(rows.new_empty(rows.shape).index_copy_(0, self._order_N, rows).split(self._sizes))


class MicroBatchSizes(NamedTuple):
    """Sizes of one row micro-batch: tokens and pairs sent to each peer P, and received by ESP peer Q from rank P."""

    send_P: np.ndarray
    send_pairs_P: np.ndarray
    recv_QP: np.ndarray
    recv_pairs_QP: np.ndarray


def micro_batch_sizes(sizes: ExchangeSizes) -> list[MicroBatchSizes]:
    p = sizes.micro_batches
    send_PpE = sizes.send_PE.reshape(len(sizes.send_PE), p, -1)
    recv_QPpE = sizes.recv_QPE.reshape(*sizes.recv_QPE.shape[:2], p, -1)
    return [
        MicroBatchSizes(sizes.send_Pp[:, i], send_PpE[:, i].sum(1), sizes.recv_QPp[..., i], recv_QPpE[:, :, i].sum(2))
        for i in range(p)
    ]


class ReceivedChunk:
    """The tokens of a chunk received by the local experts, by source rank and micro-batch.

    Args:
        experts, k: number of local experts, and maximum number of pairs per token.
    Attributes:
        layout: sorts the received tokens by local expert.
        order_N: index of the received pair of each sorted row.
    """

    layout: Layout
    order_N: Tensor
    pairs: ReceivedPairs

    def __init__(self, sizes: Sequence[MicroBatchSizes], device: torch.device, experts: int, k: int) -> None:
        tokens_QPp, pairs_QPp = np.stack([s.recv_QP for s in sizes], -1), np.stack([s.recv_pairs_QP for s in sizes], -1)
        self.tokens_Rp, self.pairs_Rp = (
            torch.from_numpy(recv_QPp.reshape(-1, len(sizes))).to(device) for recv_QPp in (tokens_QPp, pairs_QPp)
        )
        self.tokens, self.experts, self.k = int(tokens_QPp.sum()), experts, k

    def sort(self, pairs: ReceivedPairs) -> None:
        self.pairs = pairs
        self.layout, self.order_N = pairs.sort(self.tokens, self.experts, self.k)


class RechunkedIndices:
    """Index map from the chunks of forward to those of backward, which group the same micro-batches differently.

    It numbers tokens and pairs by micro-batch, source rank and position.
    """

    def __init__(self, chunks: Sequence[ReceivedChunk]) -> None:
        self._token_starts = _segment_starts([chunk.tokens_Rp for chunk in chunks])
        self._pair_starts = _segment_starts([chunk.pairs_Rp for chunk in chunks])
        tokens, pairs, rows, first, start = [], [], [], 0, 0
        for chunk in chunks:
            tokens.append(_segment_indices(self._token_starts, first, chunk.tokens_Rp))
            pairs.append(_segment_indices(self._pair_starts, first, chunk.pairs_Rp))
            rows.append(start + inverse(chunk.order_N))
            first, start = first + chunk.tokens_Rp.shape[1], start + len(chunk.order_N)
        self._token_R, self._pair_P = inverse(concat(tokens)), inverse(concat(pairs))
        self._row_P = concat(rows)
        self._expert_P = concat([chunk.pairs.expert_P for chunk in chunks])
        first_P = [torch.ones_like(chunk.pairs.token_P) for chunk in chunks]
        for ones, chunk in zip(first_P, chunks, strict=True):
            ones[1:] = chunk.pairs.token_P.diff() != 0
        self._is_first_P = concat(first_P)

    def indices_of(self, chunk: ReceivedChunk, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indices of a backward chunk's tokens, pairs and sorted rows in the concatenated forward chunks.

        Also sorts the pairs in `chunk`. `first`: index of its first micro-batch.
        """
        token_R = self._token_R[_segment_indices(self._token_starts, first, chunk.tokens_Rp)]
        pair_P = self._pair_P[_segment_indices(self._pair_starts, first, chunk.pairs_Rp)]
        chunk.sort(ReceivedPairs(self._expert_P[pair_P], self._is_first_P[pair_P].cumsum(0) - 1))
        return token_R, pair_P, self._row_P[pair_P[chunk.order_N]]


def _segment_starts(counts: Sequence[Tensor]) -> Tensor:
    """Return the first index of each (micro-batch, source rank), [p, R], from the counts [R, p] of several chunks."""
    counts_pR = torch.cat([each.t() for each in counts])
    flat = counts_pR.reshape(-1)
    return (flat.cumsum(0) - flat).view_as(counts_pR)


def _segment_indices(start_pR: Tensor, first: int, counts_Rp: Tensor) -> Tensor:
    start_Rp = start_pR[first : first + counts_Rp.shape[1]].t()
    return _concatenated_ranges(start_Rp.reshape(-1), counts_Rp.reshape(-1))


def _concatenated_ranges(start_G: Tensor, count_G: Tensor) -> Tensor:
    """Return the concatenated ranges start, …, start + count − 1 of all segments."""
    before_G = count_G.cumsum(0) - count_G
    rows = int(count_G.sum())
    return torch.arange(rows, device=count_G.device) + torch.repeat_interleave(
        start_G - before_G, count_G, output_size=rows
    )


def even_plan(phase: str, degree: int, kinds: Sequence[str], routes_first: Sequence[bool]) -> Plan:
    """Return a plan that assumes equal durations of all tasks, for when no costs are known."""
    tasks: list[Task] = []
    layers = range(len(routes_first))
    for layer in layers if phase == "forward" else reversed(layers):
        for kind in STAGES[phase]:
            if kind == TaskKind.PERMUTE and phase == "forward" and routes_first[layer]:
                tasks.append(Task(kind, None, layer, phase))
            elif kind in (TaskKind.ATTENTION, *kinds):
                tasks += [Task(kind, chunk, layer, phase) for chunk in range(degree)]
    return list_plan(tasks, dict.fromkeys(tasks, 1.0))
