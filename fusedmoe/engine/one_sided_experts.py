"""Experts over ranks without collectives: kernels put tokens to their experts' ranks, compute on tiles as their rows
come, and put results straight back.

Values and gradients are those of the collectives (`engine/tokens.py`), bit for bit: rows meet in the same order, in
the same tiles. The backward is the other way by the same means.

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
from fusedmoe.engine.chunk_experts import GroupedExperts, Totals
from fusedmoe.engine.chunks import Kept
from fusedmoe.engine.route import Route
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.gather_sum import put_pairs, take_pairs
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import contiguous
from fusedmoe.kernels.triton.experts import backward_rows_in_flight, forward_in_flight
from fusedmoe.runtime.recorder import Recorder, span


class Measured(NamedTuple):
    """Where spans go, and of what kind of task they are (`fusedmoe.schedule.task.FUSED`)."""

    recorder: Recorder | None
    kind: str
    links: tuple[str, ...]


def _span(measured: Measured | None, phase: str, chunk: int) -> AbstractContextManager[None]:
    if measured is None:
        return nullcontext()
    recorder, kind, links = measured
    return span(recorder, kind, kind=kind, chunk=chunk, phase=phase, also=links)


def make_route(
    x_SM: Tensor,
    weight_SK: Tensor | None,
    layout: Layout,
    buffers: ReceiveBuffers,
    degree: int | tuple[int, int] = 1,
) -> Route:
    """The way of a batch's tokens. Nothing is sent yet.

    Args:
        x_SM: [S, M] tokens, or what is like them. weight_SK: router weight of each slot, or None for 1.
        layout: of all E experts; rank p of the buffers' group has those from p·E/W on.
        degree: chunks in which results are computed and come back; two numbers: forward and backward.
    Raises:
        ConfigError: more tokens, choices of a token or chunks than the receive buffers have room for.
    """
    weight_N = None if weight_SK is None else take_pairs(weight_SK.detach(), layout)
    degrees = (degree, degree) if isinstance(degree, int) else degree
    return Route(buffers, layout, weight_N, degrees, x_SM.dtype, x_SM.shape[1])


class Forward:
    """The forward pass of `fused_experts` in three steps, which virtual ranks of one process take in turn.

    Attributes:
        x: received rows [R, M] of each chunk of the backward pass.
        h: pre-activations [R, (2,) H] of each chunk of the forward pass.
    """

    def __init__(self, x_SM: Tensor, route: Route, experts: GroupedExperts, measured: Measured | None = None) -> None:
        self._x_SM, self.route, self.experts, self.measured = x_SM, route, experts, measured
        self.x: list[Tensor] = []
        self.h: list[Tensor] = []
        self._tokens = self._results = 0

    def send(self) -> None:
        self.route.put_metadata()
        self._tokens = self.route.put_tokens(self._x_SM)

    def compute(self) -> None:
        route, chunks = self.route, self.route.forward
        self._results = route.begin_results()
        for chunk, arrivals in enumerate(chunks.arrivals):
            x_CM, layout, wait = chunks.arriving(chunk, self._tokens)
            put = chunks.put(chunk, self._results, arrivals.weight_R)
            with route.buffers.watch.over(), _span(self.measured, "forward", chunk):
                h_RH = forward_in_flight(x_CM, layout, self.experts.weights, self.experts.activation, wait, put)
            self.h.append(h_RH)
        # Products of all chunks have waited for all rows.
        self.x = [route.backward.take(chunk, self._tokens) for chunk in range(len(route.backward))]
        route.read(self._tokens)

    def finish(self) -> Tensor:
        """[S, M]"""
        return self.route.receive(self._results, len(self.route.forward))[0]


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
                    dy_CM, h_RH, layout, arrivals.weight_R, experts.weights, experts.activation, wait, put, values
                )
            left.append((dy_RM, hidden))
        route.read(self._tokens)
        # Sums over rows wait for nothing, and what others wait for is on its way by now.
        for (dy_RM, hidden), x_RM, arrivals in zip(left, self._x, chunks.arrivals, strict=True):
            layout = contiguous(arrivals)
            self.totals = experts.weight_gradients(dy_RM, x_RM, hidden, layout, arrivals.weight_R, self.totals)

    def _pre_activations(self) -> Iterator[Tensor]:
        """Of each chunk, from those that the forward's chunks have kept."""
        there, here = self._route.forward, self._route.backward
        if here is there:
            yield from self._h
            return
        kept = Kept(self._h)
        yield from map(kept.rows, here.find(there))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Gradients of tokens, [S, M], and of router weights, [S, K] float32."""
        dx_SM, dweight_N = self._route.receive(self._results, len(self._route.backward))
        return dx_SM, put_pairs(dweight_N, self._route.layout)


class _FusedExperts(Function):
    operation = "fusedmoe.puts.fused_experts"

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
        forward, ctx.run = ctx.run, None
        run = Backward(forward, dy_SM)
        run.send()
        run.compute()
        dx_SM, dweight_SK = run.finish()
        dweight = None if ctx.weighted is None else dweight_SK.to(ctx.weighted)
        return dx_SM, dweight, None, None, None, *_grads(run.totals, forward.experts)


def fused_experts(
    x_SM: Tensor,
    weight_SK: Tensor | None,
    layout: Layout,
    buffers: ReceiveBuffers,
    experts: GroupedExperts,
    degree: int | tuple[int, int] = 1,
    measured: Measured | None = None,
) -> Tensor:
    """Σ over a token's experts of their weighted results, through the experts' ranks, by puts. Collective.

    Args:
        x_SM, weight_SK, layout, buffers, degree: as for `make_route`.
        experts: the local ones.
        measured: takes spans of both passes.
    Returns:
        [S, M]
    Saves for backward:
        received rows, R·M, and pre-activations R·H (gated 2·R·H); where the passes have different numbers of chunks,
        the backward copies the latter once.
    Raises:
        ConfigError: more tokens, choices of a token or chunks than the receive buffers have room for. Nothing has been
            sent then.
        RankError: a rank failed or did not come; it names rank, peer, what was waited for, expected and seen signal.
    """
    route = make_route(x_SM, weight_SK, layout, buffers, degree)
    return _FusedExperts.apply(x_SM, weight_SK, route, experts, measured, *experts.parameters)


def _grads(totals: Totals, experts: GroupedExperts) -> list[Tensor | None]:
    parameters = experts.parameters
    pairs = zip(totals or (None,) * len(parameters), parameters, strict=True)
    return [None if total is None or p is None else total.to(p.dtype) for total, p in pairs]
