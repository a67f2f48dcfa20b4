"""The experts of a block in micro-batches: static, or placed dynamically with replicas."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts
from fusedmoe.engine.dispatcher import is_recomputing
from fusedmoe.engine.run import ReplicaTransport
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import Experts
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.moe import MoELayer
from fusedmoe.placement.replicas import ReplicaTiming


class CalledExperts(NamedTuple):
    """The experts of one call.

    `num_held`: number of experts on this rank under dynamic placement; None: equal on all ranks.
    """

    chunks: ChunkExperts
    num_held: int | None = None
    replicas: ReplicaTransport | None = None


class BlockExperts:
    """The experts of one block.

    Attributes:
        can_rechunk: forward and backward may have different chunks.
        refusal: error message if this rank cannot use its replicas in this call, else None.
    """

    def __init__(self, layer: MoELayer) -> None:
        self._layer, self._placed = layer, layer.placed
        self.refusal: str | None = None
        # Does not change: experts use either this library's kernels or autograd.
        like = next(layer.experts.parameters(), torch.empty(0, device="cpu"))
        self.can_rechunk = layer.experts.in_chunks(like).can_rechunk

    @property
    def has_replicas(self) -> bool:
        return self._placed is not None

    def require_nothing_between_layers(self) -> None:
        if self._placed is not None and (text := self._placed.why_not_in_blocks()) is not None:
            raise ConfigError(f"pipeline: {text}, or MoELayer(schedule=…) in place of the pipeline")

    def send_replicas(self, *, by_tasks: bool) -> None:
        """Send replicas in tasks of the plans if `by_tasks`, else from the start of the model's forward pass."""
        if self._placed is not None:
            self._placed.timing = ReplicaTiming.BY_TASKS if by_tasks else ReplicaTiming.EAGER

    def without_tasks(self) -> AbstractContextManager[None]:
        """Return a context for calls without a plan. In it, replicas are sent from the start of the forward pass."""
        if self._placed is None or self._placed.timing is not ReplicaTiming.BY_TASKS:
            return nullcontext()
        return self._placed.with_timing(ReplicaTiming.EAGER)

    def begin(self, x: Tensor) -> CalledExperts:
        """Begin a call for tokens like x, and fetch replicas. Collective over the experts' ranks, under a placement."""
        experts, placed = self._layer.experts, self._placed
        like = x.new_empty(0, dtype=experts.row_dtype(x))
        if placed is None:
            return CalledExperts(experts.in_chunks(like))
        self._counts_tokens = experts.training and not is_recomputing()  # tasks may run on other threads
        placed.begin_once(self._layer.recorder)
        self.refusal = placed.replicas.why_unusable()
        wait_first, fetch_first = placed.table.is_read_early(like.dtype), placed.timing is not ReplicaTiming.BY_TASKS
        chunks, replicas = placed.call(partial(_bind_tables, like), wait_first=wait_first, fetch_first=fetch_first)
        return CalledExperts(chunks, placed.table.num_rows, replicas)

    def split_rows(self, layout: Layout) -> Layout:
        """Return the layout with each expert's rows divided among owner and replicas. Collective over EP and ESP."""
        assert self._placed is not None
        return self._placed.split_rows(layout, self._counts_tokens, may_add=False)


def _bind_tables(like: Tensor, experts: Experts, replicas: ReplicaTransport) -> tuple[ChunkExperts, ReplicaTransport]:
    """Return `experts` in chunks for rows like `like`, and the unchanged `replicas`.

    During a call (`PlacedExperts.call`) the experts' parameters are the current tables. The chunks keep these
    tables, also if they run after the call.
    """
    chunks, named = experts.in_chunks(like), dict[str, Tensor](experts.named_parameters())
    # Experts by autograd must compute with the current parameters, even if a chunk runs later.
    if not chunks.can_rechunk:
        compute = partial(torch.func.functional_call, experts, named)
        chunks = AutogradExperts(lambda *rows: compute(rows), tuple(named.values()), experts)
    return chunks, replicas
