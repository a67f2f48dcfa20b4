"""Dispatchers: how tokens travel to the ranks of their experts, and results back.

    rows, handle = dispatcher.dispatch(Routed(x_SM, layout, weight_SK))
    out = experts(rows, handle.layout, handle.weight_N)
    y_SM = dispatcher.combine(out, handle)

A layer calls the three as one, `through_experts`, so that a dispatcher can have them overlap by a plan. One of your own
defines `dispatch` and `combine`, differentiable both, and is given to `MoELayer(dispatch=…)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from fusedmoe.autograd import exchange_operators
from fusedmoe.autograd.checks import check_rows
from fusedmoe.autograd.exchange_operators import Way
from fusedmoe.autograd.hooks import Hooks
from fusedmoe.autograd.moves import all_gather, combine, dispatch, received_layout, reduce_scatter
from fusedmoe.autograd.order import permute, take_pairs, unpermute
from fusedmoe.comm.all_to_all import AllToAll
from fusedmoe.comm.exchange import CHECK, Exchange
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import ChunkExperts, no_wider
from fusedmoe.engine.run import Assigned, CopiesInTurns, Run, one_chunk
from fusedmoe.engine.tokens import through_experts
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.execute import Streams
from fusedmoe.runtime.recorder import Recorder, span
from fusedmoe.schedule.task import COUNTS

_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


class LocalExperts(Protocol):
    """The experts of a rank; see `fusedmoe.layers.expert_networks.Experts`."""

    def __call__(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        """For each row of x_SM the sum of its sorted rows' results, times their weights."""
        ...

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        """The same for rows like these in chunks, forward and backward apart."""
        ...


class Routed(NamedTuple):
    """Tokens of this rank, and where they are to go.

    Attributes:
        x_SM: [S, M].
        layout: their rows, sorted by expert, of all E experts.
        weight_SK: [S, K] router weights, or None for 1.
        refusal: why this rank cannot take part, if so; then all ranks end with that reason.
    """

    x_SM: Tensor
    layout: Layout
    weight_SK: Tensor | None = None
    refusal: str | None = None


class Handle(NamedTuple):
    """What experts, and `combine`, need to know of rows that were dispatched.

    Attributes:
        layout: sorts them by local expert.
        weight_N: the router weight of each sorted row, which experts multiply results by; None for 1.
        counts_RE: rows by where they are from and local expert, in the order in which they are sorted; None: all are
            from here.
        state: whatever the dispatcher wants back.
    """

    layout: Layout
    weight_N: Tensor | None
    counts_RE: Tensor | None = None
    state: Any = None


class Dispatcher:
    """Base of all dispatchers. Ranks call the same methods in the same order.

    Attributes:
        recorder: takes spans while it is set.
    """

    recorder: Recorder | None = None

    def __str__(self) -> str:
        return type(self).__name__

    def dispatch(self, routed: Routed) -> tuple[Tensor, Handle]:
        """Rows at their experts' ranks."""
        raise NotImplementedError

    def combine(self, out_RM: Tensor, handle: Handle) -> Tensor:
        """[S, M] the sum of each token's results. The inverse way of `dispatch`."""
        raise NotImplementedError

    def through_experts(self, routed: Routed, experts: LocalExperts) -> Tensor:
        """[S, M] the sum of each token's results: dispatch, experts, combine."""
        rows_RM, handle = self.dispatch(routed)
        return self.combine(experts(rows_RM, handle.layout, handle.weight_N), handle)


class Local(Dispatcher):
    """Nothing travels: experts gather from the tokens themselves."""

    def dispatch(self, routed: Routed) -> tuple[Tensor, Handle]:
        return routed.x_SM, Handle(routed.layout, _weight_of_rows(routed.weight_SK, routed.layout))

    def combine(self, out_RM: Tensor, handle: Handle) -> Tensor:
        return out_RM


# What experts work by: plans for rows like these, of which the rank with the most sends so many; None: nothing is to
# overlap.
FindPlans = Callable[[Tensor, int, ChunkExperts], "Assigned | None"]


def no_plans(x_SM: Tensor, rows: int, chunks: ChunkExperts) -> None:
    """Nothing overlaps."""


class Crossing(NamedTuple):
    """One batch's way between ranks: its rows, their weights, and the sizes that the ranks have agreed on."""

    layout: Layout
    weight_N: Tensor | None
    exchange: Exchange


@dataclass(eq=False)
class Collectives(Dispatcher):
    """Rows travel by all-to-alls over ep, and all-gathers and reduce-scatters over esp, in chunks that a plan overlaps.

    Experts that are modules of their own go by `dispatch` and `combine` where nothing is to overlap: autograd then sees
    all that they do, as often as it is asked to, and gives gradients to whatever they use.

    Attributes:
        all_to_all: how rows cross ep.
        plans: which plans to work by.
        name: of who calls, for messages.
        streams: on which chunks overlap on CUDA; None: on one.
    """

    topology: Topology
    all_to_all: AllToAll
    plans: FindPlans = no_plans
    hooks: Sequence[Hooks] = ()
    name: str = "MoELayer"
    recorder: Recorder | None = None
    streams: Streams | None = field(default_factory=Streams)

    def __post_init__(self) -> None:
        self.way = Way(self.topology, self.all_to_all)
        self._call = f"{self.name} {self.topology.number_layer()}"

    def dispatch(self, routed: Routed) -> tuple[Tensor, Handle]:
        return self._dispatch(routed.x_SM, self.meet(routed))

    def combine(self, out_RM: Tensor, handle: Handle) -> Tensor:
        crossing: Crossing = handle.state
        check_rows("combine", "the experts' result", out_RM, crossing.exchange.rows)
        rows_RM = reduce_scatter(out_RM, crossing.exchange, self.recorder)
        rows_NM = combine(rows_RM, crossing.exchange, self.hooks, self.recorder)
        with span(self.recorder, "unpermute", kind="unpermute", phase="forward"):
            return unpermute(rows_NM, crossing.layout)

    def through_experts(self, routed: Routed, experts: LocalExperts) -> Tensor:
        if selects() and routed.refusal is None and not self.hooks:
            return self.by_operators(routed, experts)
        return self.run(routed.x_SM, self.meet(routed), experts)

    def by_operators(
        self, routed: Routed, experts: Callable[[Tensor, Layout, Tensor | None], Tensor], bad: Tensor | None = None
    ) -> Tensor:
        """The same by operators, which compilers and selective checkpoints see: one thing after the other, no hooks.

        `bad`: how many router logits are not finite, a scalar; all ranks end where there are any.
        """
        layout, weight_N = routed.layout, _weight_of_rows(routed.weight_SK, routed.layout)
        rows_RM, handle = self.dispatch_by_operators(permute(routed.x_SM, layout), weight_N, layout, bad)
        out_RM = experts(rows_RM, handle.layout, handle.weight_N)
        return unpermute(self.combine_by_operators(out_RM, handle), layout)

    def by_operators_without_tokens(
        self, routed: Routed, experts: nn.Module, bad: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same for a graph without tokens, and a zero to be added to the loss: a compiler leaves out what gives no
        number, also where other ranks wait for it; so a row of padding ties them to the loss, and to a parameter.
        """
        x_0M = routed.x_SM
        like = next((one for one in experts.parameters() if one.requires_grad), x_0M.new_zeros(1))
        padding_1M = like.reshape(-1)[:1].to(x_0M.dtype).expand(1, x_0M.shape[1])
        weight_1 = None if routed.weight_SK is None else routed.weight_SK.new_zeros(1)
        rows_RM, handle = self.dispatch_by_operators(padding_1M, weight_1, routed.layout, bad)
        back_1M = self.combine_by_operators(experts(rows_RM, handle.layout, handle.weight_N), handle)
        return back_1M[:0], back_1M.sum()

    def dispatch_by_operators(
        self, rows_NM: Tensor, weight_N: Tensor | None, layout: Layout, bad: Tensor | None = None
    ) -> tuple[Tensor, Handle]:
        """[N, M] rows that the layout has sorted, with their weights, at their experts' ranks."""
        send_PE, come_QPE = exchange_operators.meet(layout.counts_E, bad, rows_NM.dtype, self.way.name)
        found = exchange_operators.dispatch(rows_NM, weight_N, send_PE, come_QPE, self.way.name)
        rows_RM, weight_R, counts_E, offsets_E1, source_N, pair_N, row_SK = found
        received = Layout(counts_E, offsets_E1, source_N, pair_N, row_SK, verified=True)
        return rows_RM, Handle(
            received, None if weight_N is None else weight_R, state=(send_PE, come_QPE, rows_NM.shape[0])
        )

    def combine_by_operators(self, out_RM: Tensor, handle: Handle) -> Tensor:
        """[N, M] the results of the rows that were sent."""
        combined: Tensor = exchange_operators.combine(out_RM, *handle.state, self.way.name)
        return combined

    def meet(self, routed: Routed) -> Crossing:
        """The ranks tell each other how many rows come. Collective."""
        layout = routed.layout.exact()  # padding does not travel
        weight_N = _weight_of_rows(routed.weight_SK, layout)
        return Crossing(layout, weight_N, self.exchange(layout.counts_E, routed.x_SM.dtype, routed.refusal))

    def exchange(self, counts_E: Tensor, dtype: torch.dtype, refusal: str | None, **more: Any) -> Exchange:
        with span(self.recorder, "exchange of counts", kind=COUNTS, resource="inter", phase="forward"):
            return Exchange(self.all_to_all, self.topology.esp, counts_E, dtype, refusal, call=self._call, **more)

    def run(
        self, x_SM: Tensor, crossing: Crossing, experts: LocalExperts, copies: CopiesInTurns | None = None
    ) -> Tensor:
        """What `through_experts` does once the ranks have met. Collective."""
        layout, weight_N, exchange = crossing
        chunks = experts.in_chunks(x_SM)
        assigned = self.plans(x_SM, exchange.most_rows, chunks)
        streams = None if self.streams is None else self.streams.on(x_SM.device)
        if assigned is None:
            if not chunks.any_degree:
                rows_RM, handle = self._dispatch(x_SM, crossing)
                return self.combine(no_wider(experts(rows_RM, handle.layout, handle.weight_N), rows_RM), handle)
            assigned, streams = Assigned(one_chunk(self.topology.esp.size > 1)), None
        run = Run(
            assigned.plans,
            partial(self.topology.stop, self.name),
            self.hooks,
            self.recorder,
            streams,
            assigned.gradients,
            assigned.beside,
            copies,
        )
        return through_experts(x_SM, weight_N, layout, exchange, chunks, run)

    def _dispatch(self, x_SM: Tensor, crossing: Crossing) -> tuple[Tensor, Handle]:
        layout, weight_N, exchange = crossing
        with span(self.recorder, "permute", kind="permute", phase="forward"):
            rows_NM = permute(x_SM, layout)
        rows_RM = all_gather(dispatch(rows_NM, exchange, self.hooks, self.recorder), exchange, self.recorder)
        weight_R = None
        if weight_N is not None:
            weight_R = all_gather(dispatch(weight_N[:, None], exchange), exchange)[:, 0]
        with span(self.recorder, "sort received rows", kind="permute"):
            received = received_layout(exchange.counts_RE, exchange.rows)
            weight_R = None if weight_R is None else weight_R[received.pair_N]
        return rows_RM, Handle(received, weight_R, exchange.counts_RE, crossing)


def _weight_of_rows(weight_SK: Tensor | None, layout: Layout) -> Tensor | None:
    return None if weight_SK is None else take_pairs(weight_SK, layout)


def refuse(topology: Topology, refusal: str | None) -> None:
    """Raises a refusal, if there is any, and tells the other ranks."""
    if refusal:
        topology.fail(CHECK, refusal)
        raise (ConfigError if topology.size == 1 else RankError)(f"rank {topology.rank}: {refusal}")


def selects() -> bool:
    """Whether a selective activation checkpoint, forward or when it recomputes, chooses among operators."""
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def recomputing() -> bool:
    """Whether this forward runs inside a backward, for activation checkpointing: nothing may then count twice."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
