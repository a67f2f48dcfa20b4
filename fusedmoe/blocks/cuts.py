"""Cuts of a batch into micro-batches, and chunks: the rows of some micro-batches that travel together.

A plan may split a block's dense part (attention) into other chunks than its experts' rows, and the forward pass into
others than the backward pass. The batch is therefore cut into *dense micro-batches* wherever one of the passes cuts the
dense part, and these into *row micro-batches* wherever one of them cuts the rows; a chunk is some micro-batches that
follow each other. Cuts are fractions of the batch, so that there are as many micro-batches on every rank, some of them
empty where a rank has fewer samples. The backward pass takes chunks from the end (FlowMoE Eq. 5): there chunk 0 is the
last micro-batches.

Worked example, 6 samples, rows in 2 chunks forward and 3 backward, dense parts in one: cuts at 0, 1/3, 1/2, 2/3, 1, so
the row micro-batches are samples 0–1, 2, 3 and 4–5. The forward chunks are micro-batches 0, 1 | 2, 3, the backward
chunks 3 | 1, 2 | 0. The one dense micro-batch has all of them.
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
from fusedmoe.engine.chunks import concatenated, inverse, taken
from fusedmoe.engine.run import Plans
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.deduplicate import Received
from fusedmoe.kernels.layout import Layout
from fusedmoe.schedule.list_schedule import list_plan
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import one_pass
from fusedmoe.schedule.task import PIPELINE, STAGES, WEIGHT_GRADIENTS, Task, TaskKind

#: Indexes a batch, [B, …, M]: all before the axis that is cut, and a slice of that.
Index = tuple[slice, ...]


class BlockDegrees(NamedTuple):
    """Numbers of chunks in which the plans of both passes have each part of a block.

    Attributes:
        dense, rows: chunks of the dense part and of the experts' rows, forward and backward.
        permutes: a task of its own says when rows are given their places.
        later: the dense part's weight gradients are tasks of their own.
        dense_tasks: tasks of the dense part in the backward plan, its weight gradients among them.
    """

    dense: tuple[int, int]
    rows: tuple[int, int]
    permutes: bool
    later: bool
    dense_tasks: int


def passes_of(plan: Plan) -> Plans:
    """Split the plan of a step into its two passes."""
    return Plans(*(one_pass(plan, phase) for phase in STAGES))


def degrees_of(plans: Plans, block: int) -> BlockDegrees:
    """Reads the degrees of one block off the plans of both passes."""
    counts = [Counter(task.kind for task in plan if task.layer == block) for plan in (plans.forward, plans.backward)]
    dense_forward, dense_backward = (count[TaskKind.ATTENTION] or 1 for count in counts)
    # All parts of a block's pipeline have as many chunks, but which parts there are depends on the ranks.
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
    """Places of one block's cuts in a batch.

    Attributes:
        dense_at, rows_at: where each dense and each row micro-batch is in the batch.
        rows_in_dense_at: where each row micro-batch is in its dense one.
        dense_of: the dense micro-batch of each row micro-batch.
        rows_of: the row micro-batches of each dense one.
        dense_chunks, row_chunks: for "forward" and "backward" the micro-batches of each chunk.
    """

    dense_at: list[Index]
    rows_at: list[Index]
    rows_in_dense_at: list[Index]
    dense_of: list[int]
    rows_of: list[range]
    dense_chunks: dict[str, list[range]]
    row_chunks: dict[str, list[range]]


# A training run has a few plans and batch sizes, and asks for the same cuts in every step.
@lru_cache(maxsize=256)
def cut(dense: tuple[int, int], rows: tuple[int, int], axis: int, size: int) -> BlockCuts:
    """Cuts a batch that has `size` elements along `axis`, for these degrees of dense parts and rows."""
    dense_ends, row_ends = _ends(dense), _ends((*dense, *rows))
    # Rows are cut wherever a dense part is, so that each row micro-batch lies in one dense micro-batch.
    rows_of = _between(dense_ends, row_ends)
    dense_of = [place for place, inside in enumerate(rows_of) for _ in inside]
    # Fractions are rounded down to elements, the same way for both kinds of cuts.
    starts = [int(size * end) for end in dense_ends]
    return BlockCuts(
        _indices(dense_ends, axis, size),
        _indices(row_ends, axis, size),
        [
            (slice(None),) * axis + (slice(int(size * begin) - starts[place], int(size * end) - starts[place]),)
            for place, begin, end in zip(dense_of, row_ends[:-1], row_ends[1:], strict=True)
        ],
        dense_of,
        rows_of,
        {  # the backward pass begins at the end
            "forward": _between(_ends(dense[:1]), dense_ends),
            "backward": _between(_ends(dense[1:]), dense_ends)[::-1],
        },
        {"forward": _between(_ends(rows[:1]), row_ends), "backward": _between(_ends(rows[1:]), row_ends)[::-1]},
    )


def _ends(counts: Iterable[int]) -> list[Fraction]:
    """Lists where equal chunks begin, so many at a time, and the end, as fractions of a batch."""
    # Fractions, since 1/3 of one count must be equal to 2/6 of another.
    return sorted({Fraction(i, count) for count in counts for i in range(count + 1)})


def _between(coarse: list[Fraction], fine: list[Fraction]) -> list[range]:
    """Finds for each interval of coarser ends the intervals of finer ends in it."""
    return [range(fine.index(start), fine.index(end)) for start, end in zip(coarse[:-1], coarse[1:], strict=True)]


def _indices(ends: list[Fraction], axis: int, size: int) -> list[Index]:
    pairs = zip(ends[:-1], ends[1:], strict=True)
    return [(slice(None),) * axis + (slice(int(size * start), int(size * end)),) for start, end in pairs]


class MicroBatch:
    """A micro-batch, or a whole batch: which one it is, and which of its tokens this rank routes.

    Ranks of an MP group that have the same tokens route a slice of them each, first that of rank 0. Padding is routed
    by none.

    Attributes:
        number, count: which it is, of how many.
        lead: the shape of its tokens, [b, …].
        rows: tokens that each rank has, padding included; one number where no other rank has the same tokens.
        own: where the tokens that this rank routes are among all of them.
        real: where they are among its own; None: none of these is padding.
    """

    own: slice | Tensor

    def __init__(
        self,
        number: int,
        count: int,
        lead: torch.Size,
        rows: Sequence[int],
        rank: int,
        mask: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.number, self.count, self.lead, self.rows, self.rank = number, count, lead, rows, rank
        start = sum(rows[:rank])
        self.own, self.real = slice(start, start + rows[rank]), None
        if mask is not None:  # of `lead`'s shape, on the host, so that nobody waits for a device
            self.real = mask.flatten()[self.own].nonzero().squeeze(1).to(device)
            self.own = self.real + start

    def batch(self, own_S: Tensor, fill: int = 0) -> Tensor:
        """[S, …] values of the tokens that this rank routes -> [b, …, ·], with `fill` for the rest."""
        value_S = own_S if len(self.rows) == 1 and self.real is None else self.spread(own_S, fill)
        return value_S.view(*self.lead, *value_S.shape[1:])

    def spread(self, own_S: Tensor, fill: int = 0) -> Tensor:
        """Values of the tokens that this rank routes -> values of all tokens, with `fill` for the rest."""
        tokens, at = sum(self.rows), self.own
        if len(own_S) == tokens:
            return own_S
        if isinstance(at, Tensor):
            return own_S.new_full((tokens, *own_S.shape[1:]), fill).index_copy(0, at, own_S)
        before, after = (own_S.new_full((n, *own_S.shape[1:]), fill) for n in (at.start, tokens - at.stop))
        return torch.cat([before, own_S, after])


class ExternalCall(NamedTuple):
    """Arguments of a block of another library beside its tokens, of `batch` samples."""

    who: str
    batch: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def samples(self, at: slice) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments for some samples.

        Raises:
            ConfigError: an argument of which it is not known what of it is which sample's.
        """
        return tuple(self._part(value, at) for value in self.args), self._part(self.kwargs, at)

    def _part(self, value: Any, at: slice) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case dict():
                return {key: self._part(each, at) for key, each in value.items()}
            case list() | tuple():
                return type(value)([self._part(each, at) for each in value])
            case Tensor() if value.dim() == 0 or len(value) == 1:  # the same for all samples
                return value
            case Tensor() if len(value) == self.batch and value.dim() > 1:  # of one dimension it may be positions
                return value[at]
        from torch.nn.attention.flex_attention import BlockMask  # loads much, and few blocks have one

        if isinstance(value, BlockMask) and value.shape[0] in (1, self.batch):
            return value if value.shape[0] == 1 else _samples_of_mask(value, at)
        got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ConfigError(
            f"{self.who} is called with {got}, which nobody knows how to split into the {self.batch} samples of a "
            "batch: use schedule=… in place of the pipeline"
        )


def _samples_of_mask(mask: Any, at: slice) -> Any:
    """Returns a `BlockMask` of some samples, whose numbers the mask's function takes to be those of the batch."""
    of_batch, part = mask.mask_mod, mask[at]
    part.mask_mod = lambda b, h, q, kv: of_batch(b + at.start, h, q, kv)
    return part


class Sent:
    """This rank's rows of a chunk, in the order in which they travel: by destination and micro-batch.

    Args:
        counts_pP: [micro-batch, peer] rows that each micro-batch sends to each rank. Its own rows lie by destination.
    """

    def __init__(self, counts_pP: Tensor) -> None:
        self._order_N: Tensor | None = None
        if len(counts_pP) > 1:  # else rows are in that order already
            flat = counts_pP.reshape(-1)
            start_pP = (flat.cumsum(0) - flat).view_as(counts_pP)
            self._order_N = _ranges(start_pP.t().reshape(-1), counts_pP.t().reshape(-1))
            self._sizes = counts_pP.sum(1).tolist()

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """Each micro-batch's rows -> all rows as they travel."""
        return rows[0] if self._order_N is None else taken(concatenated(rows), self._order_N)

    def split(self, rows: Tensor) -> list[Tensor]:
        """All rows as they travel -> each micro-batch's rows."""
        if self._order_N is None:
            return [rows]
        return list(rows.new_empty(rows.shape).index_copy_(0, self._order_N, rows).split(self._sizes))


class MicroBatchSizes(NamedTuple):
    """Numbers of one row micro-batch, as the ranks agreed: tokens and pairs sent to each peer, and those that come by
    sharding peer and source rank."""

    send_P: np.ndarray
    send_pairs_P: np.ndarray
    come_QP: np.ndarray
    come_pairs_QP: np.ndarray


def sizes_of(sizes: ExchangeSizes) -> list[MicroBatchSizes]:
    """Returns the sizes of each micro-batch of an exchange."""
    p = sizes.micro_batches
    send_PpE = sizes.send_PE.reshape(len(sizes.send_PE), p, -1)
    come_QPpE = sizes.come_QPE.reshape(*sizes.come_QPE.shape[:2], p, -1)
    return [
        MicroBatchSizes(sizes.send_Pp[:, i], send_PpE[:, i].sum(1), sizes.come_QPp[..., i], come_QPpE[:, :, i].sum(2))
        for i in range(p)
    ]


class ReceivedChunk:
    """The tokens of a chunk that come to the local experts: by source and micro-batch.

    Args:
        sizes: of its micro-batches.   device: of the rows.
        experts, k: the experts here, and the most pairs of a token.
    Attributes:
        tokens_Rp, pairs_Rp: tokens and their pairs by source and micro-batch.
        pairs: the pairs, once they are known.
        layout: sorts them by local expert.   order_N: the pair of each row of it.
    """

    layout: Layout
    order_N: Tensor
    pairs: Received

    def __init__(self, sizes: Sequence[MicroBatchSizes], device: torch.device, experts: int, k: int) -> None:
        tokens_QPp, pairs_QPp = np.stack([s.come_QP for s in sizes], -1), np.stack([s.come_pairs_QP for s in sizes], -1)
        self.tokens_Rp, self.pairs_Rp = (
            torch.from_numpy(come_QPp.reshape(-1, len(sizes))).to(device) for come_QPp in (tokens_QPp, pairs_QPp)
        )
        self.tokens, self.experts, self.k = int(tokens_QPp.sum()), experts, k

    def sort(self, pairs: Received) -> None:
        """Takes the pairs, and sorts them."""
        self.pairs = pairs
        self.layout, self.order_N = pairs.sort(self.tokens, self.experts, self.k)


class Regrouped:
    """Finds the tokens of other chunks of the same micro-batches among those of `chunks`, which have all in order.

    Every token and every pair has a number by micro-batch, source and place there, the same whatever the chunks.
    """

    def __init__(self, chunks: Sequence[ReceivedChunk]) -> None:
        self._token_starts = _starts([chunk.tokens_Rp for chunk in chunks])
        self._pair_starts = _starts([chunk.pairs_Rp for chunk in chunks])
        tokens, pairs, rows, first, start = [], [], [], 0, 0
        for chunk in chunks:
            tokens.append(_numbers(self._token_starts, first, chunk.tokens_Rp))
            pairs.append(_numbers(self._pair_starts, first, chunk.pairs_Rp))
            rows.append(start + inverse(chunk.order_N))
            first, start = first + chunk.tokens_Rp.shape[1], start + len(chunk.order_N)
        # Where the token with each number is among those received, each pair likewise, and its sorted row.
        self._token_R, self._pair_P = inverse(concatenated(tokens)), inverse(concatenated(pairs))
        self._row_P = concatenated(rows)
        self._expert_P = concatenated([chunk.pairs.expert_P for chunk in chunks])
        first_P = [torch.ones_like(chunk.pairs.token_P) for chunk in chunks]
        for ones, chunk in zip(first_P, chunks, strict=True):
            ones[1:] = chunk.pairs.token_P.diff() != 0
        self._first_P = concatenated(first_P)

    def places(self, chunk: ReceivedChunk, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Finds the tokens of a chunk that begins with micro-batch `first`, which is given its pairs.

        Returns:
            Places of its tokens and of its pairs among those received, and of its sorted rows among the sorted ones.
        """
        token_R = self._token_R[_numbers(self._token_starts, first, chunk.tokens_Rp)]
        pair_P = self._pair_P[_numbers(self._pair_starts, first, chunk.pairs_Rp)]
        chunk.sort(Received(self._expert_P[pair_P], self._first_P[pair_P].cumsum(0) - 1))
        return token_R, pair_P, self._row_P[pair_P[chunk.order_N]]


def _starts(counts: Sequence[Tensor]) -> Tensor:
    """Returns the first number of each micro-batch and source, [p, R], of counts [R, p] of some chunks."""
    counts_pR = torch.cat([each.t() for each in counts])
    flat = counts_pR.reshape(-1)
    return (flat.cumsum(0) - flat).view_as(counts_pR)


def _numbers(start_pR: Tensor, first: int, counts_Rp: Tensor) -> Tensor:
    """Returns the numbers of a chunk's rows, which lie by source and micro-batch, from micro-batch `first` on."""
    start_Rp = start_pR[first : first + counts_Rp.shape[1]].t()
    return _ranges(start_Rp.reshape(-1), counts_Rp.reshape(-1))


def _ranges(start_G: Tensor, count_G: Tensor) -> Tensor:
    """start, start + 1, … of each segment, one after the other."""
    before_G = count_G.cumsum(0) - count_G
    rows = int(count_G.sum())
    return torch.arange(rows, device=count_G.device) + torch.repeat_interleave(
        start_G - before_G, count_G, output_size=rows
    )


def even_plan(phase: str, degree: int, kinds: Sequence[str], waits: Sequence[bool]) -> Plan:
    """Makes a plan as if all parts took as long as each other, where no costs are known."""
    tasks: list[Task] = []
    layers = range(len(waits))
    for layer in layers if phase == "forward" else reversed(layers):
        for kind in STAGES[phase]:
            if kind == TaskKind.PERMUTE and phase == "forward" and waits[layer]:
                tasks.append(Task(kind, None, layer, phase))
            elif kind in (TaskKind.ATTENTION, *kinds):
                tasks += [Task(kind, chunk, layer, phase) for chunk in range(degree)]
    return list_plan(tasks, dict.fromkeys(tasks, 1.0))
