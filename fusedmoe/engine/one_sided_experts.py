"""Experts over ranks without collectives: kernels put tokens to their experts' ranks, compute on tiles as their rows
come, and put results straight back. `Forward` and `Backward` run both passes along a batch's way (`engine/route.py`).

Values and gradients are those of the collectives (`engine/collectives_dispatcher.py`) to rounding: a result comes back
for each (token, k) pair, to be added up k by k, and by collectives a sum of each rank. The backward is the other way by
the same means.

All of it goes in chunks: an expert's rows are shared out evenly (`kernels/one_sided.py`), and each chunk has kernels
of its own, which wait for its rows and put its results. So a chunk's results may still be on their way while the next
one is computed. The backward may have other chunks than the forward: the forward pass ends with all rows in the
receive buffer, and keeps them by the backward's chunks; pre-activations are copied to these as they begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from fusedmoe.comm.one_sided.receive_buffers import ReceiveBuffers
from fusedmoe.engine.chunk_experts import GroupedExperts, Totals, gradients_of
from fusedmoe.engine.chunks import concatenated, taken
from fusedmoe.engine.route import Route
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import contiguous
from fusedmoe.kernels.triton.experts import backward_rows_in_flight, forward_in_flight
from fusedmoe.runtime.recorder import Recorder, span


class Measured(NamedTuple):
    """A recorder for spans, and the kind of task that they are of (`fusedmoe.schedule.task.FUSED`)."""

    recorder: Recorder | None
    kind: str
    links: tuple[str, ...]


def _span(measured: Measured | None, phase: str, chunk: int) -> AbstractContextManager[None]:
    if measured is None:
        return nullcontext()
    recorder, kind, links = measured
    return span(recorder, kind, kind=kind, chunk=chunk, phase=phase, also=links)


class Forward:
    """The forward pass of `fused_experts` in three steps, which virtual ranks of one process take in turn.

    Attributes:
        x: received rows [R, M] of each chunk of the backward pass; None where that does not read them.
        h: pre-activations [R, (2,) H] of each chunk of the forward pass.
    """

    def __init__(self, x_SM: Tensor, route: Route, experts: GroupedExperts, measured: Measured | None = None) -> None:
        self._x_SM, self.route, self.experts, self.measured = x_SM, route, experts, measured
        self.x: list[Tensor | None] = []
        self.h: list[Tensor] = []
        self._tokens = self._results = 0

    def send(self) -> None:
        self._tokens = self.route.put_tokens(self._x_SM)

    def compute(self) -> None:
        route = self.route
        self._results = route.begin_results()
        chunks = route.forward
        for chunk, arrivals in enumerate(chunks.arrivals):
            x_CM, layout, wait = chunks.arriving(chunk, self._tokens)
            put = chunks.put(chunk, self._results, arrivals.weight_R)
            with route.buffers.watch.over(), _span(self.measured, "forward", chunk):
                given = (x_CM, layout, chunks.tiles(chunk), self.experts.weights, self.experts.activation)
                h_RH = forward_in_flight(*given, wait, put)
            self.h.append(h_RH)
        # Products of all chunks have waited for all rows.
        there = route.backward
        self.x = [*there.take(self._tokens)] if self.experts.keeps_rows else [None] * len(there)
        route.read(self._tokens)

    def finish(self) -> Tensor:
        """[S, M]"""
        return self.route.receive(self._results, len(self.route.forward))


class Backward:
    """The backward pass of a forward pass, in three steps.

    Attributes:
        totals: gradients of the experts' parameters.
    """

    def __init__(self, forward: Forward, dy_SM: Tensor) -> None:
        self._route, self._experts, self._dy_SM = forward.route, forward.experts, dy_SM
        self._x, self._h, self._measured = forward.x, forward.h, forward.measured
        self._tokens = self._results = 0
        self.totals: Totals = None

    def send(self) -> None:
        self._tokens = self._route.put_tokens(self._dy_SM)

    def compute(self) -> None:
        route, chunks, experts = self._route, self._route.backward, self._experts
        self._results = route.begin_results()
        left = []
        for chunk, (arrivals, h_RH) in enumerate(zip(chunks.arrivals, self._pre_activations(), strict=True)):
            dy_CM, layout, wait = chunks.arriving(chunk, self._tokens)
            put, values = chunks.put(chunk, self._results), chunks.value_addresses(chunk, self._results)
            with route.buffers.watch.over(), _span(self._measured, "backward", chunk):
                dy_RM, hidden = backward_rows_in_flight(
                    dy_CM, h_RH, layout, chunks.tiles(chunk), arrivals.weight_R, experts.weights, experts.activation,
                    wait, put, values, experts.wanted,
                )  # fmt: skip
            left.append((dy_RM, hidden))
        if experts.wanted.parameters and experts.weights.b2 is None:
            left = [(dy_RM, hidden) for dy_RM, (_, hidden) in zip(chunks.take(self._tokens), left, strict=True)]
        route.read(self._tokens)
        # Sums over rows wait for nothing, and what others wait for is on its way by now.
        for (dy_RM, hidden), x_RM, arrivals in zip(left, self._x, chunks.arrivals, strict=True):
            if experts.wanted.parameters:
                assert dy_RM is not None
                given = (dy_RM, x_RM, hidden, contiguous(arrivals), arrivals.weight_R)
                self.totals = experts.weight_gradients(*given, self.totals)

    def _pre_activations(self) -> Iterator[Tensor]:
        """Yields the pre-activations of each chunk, from those that the forward's chunks have kept."""
        there, here = self._route.forward, self._route.backward
        if here is there:
            yield from self._h
            return
        h_RH = concatenated(self._h)
        yield from (taken(h_RH, index_R) for index_R in here.find(there))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns gradients of tokens, [S, M], and of router weights, [S, K] float32."""
        return self._route.receive_with_values(self._results, len(self._route.backward))


class _FusedExperts(Function):
    operation = "fusedmoe.engine.one_sided_experts.fused_experts"

    @staticmethod
    def forward(
        ctx: Any,
        x_SM: Tensor,
        weight_SK: Tensor | None,
        route: Route,
        experts: GroupedExperts,
        measured: Measured | None,
        *parameters: Tensor | None,
    ) -> Tensor:
        run = Forward(x_SM, route, experts, measured)
        run.send()
        run.compute()
        ctx.run, ctx.weighted = run, None if weight_SK is None else weight_SK.dtype
        return run.finish()

    @staticmethod
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        # Rows and pre-activations go with this pass: the graph may be kept for longer.
        forward, ctx.run = ctx.run, None
        run = Backward(forward, dy_SM)
        run.send()
        run.compute()
        dx_SM, dweight_SK = run.finish()
        dweight = None if ctx.weighted is None else dweight_SK.to(ctx.weighted)
        return dx_SM, dweight, None, None, None, *gradients_of(run.totals, forward.experts.parameters)


def fused_experts(
    x_SM: Tensor,
    weight_SK: Tensor | None,
    layout: Layout,
    buffers: ReceiveBuffers,
    experts: GroupedExperts,
    degree: int | tuple[int, int] = 1,
    measured: Measured | None = None,
    rows: int | None = None,
    name: str = "fused_experts",
) -> Tensor:
    """Σ over a token's experts of their weighted results, through the experts' ranks, by puts. Collective.

    Args:
        x_SM, weight_SK, layout, buffers, degree: as for `Route`.
        experts: the local ones.
        measured: takes spans of both passes.
        rows: a bound on the (token, k) pairs that come to a rank's experts, the same on all ranks, for memory of that
            size; None: on a GPU as many as all ranks can send, else as many as come. With it nothing waits on the host
            and every launch has the same arguments each time, so that a CUDA graph may hold both passes.
        name: of who calls, for errors; the same on all ranks.
    Returns:
        [S, M]
    Saves for backward:
        received rows, R·M, unless w1 is frozen, and pre-activations R·H (gated 2·R·H), where R is the bound if there is
        one. Where the passes have different numbers of chunks, the backward copies pre-activations once. Tables of
        about 64 bytes for each of R.
    Raises:
        ConfigError: more tokens, choices of a token or chunks than the receive buffers have room for, `rows` below 1,
            or a CPU without Triton's interpreter. Nothing has been sent then.
        RankError: a rank failed or did not come; it names rank, peer, what was waited for, expected and seen signal. Or
            in a call before more rows came to a rank than `rows`; it names rank, `name` and both numbers.
    """
    route = Route(x_SM, weight_SK, layout, buffers, degree, rows, name)
    return _FusedExperts.apply(x_SM, weight_SK, route, experts, measured, *experts.parameters)
